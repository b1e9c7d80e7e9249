"""What a step reads: images that lie on the device, or batches from anywhere.

A feed hands out the *inputs* of each step of an epoch, tensors of the same shapes every time, and makes
the batch of them: ``feed.batch(*inputs)`` runs inside the step, on the device, and never waits for it.
"""

import warnings
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.data import Dataset, DistributedSampler

from attractor.train import generators
from attractor.train.recipe import Recipe

Share = tuple[int, int]  # which of how many processes


class Feed(Protocol):
    """Steps of an epoch, as this process sees them."""

    steps: int
    unit: str

    def epoch(self, epoch: int, first: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """The inputs of every step, from one on; the steps before leave no trace in random numbers."""
        ...

    def batch(self, *inputs: Tensor) -> Any:
        """What the loss is called with."""
        ...

    def size(self, *inputs: Tensor) -> int:
        """How many samples these inputs are."""
        ...


def feed_of(data: Any, recipe: Recipe, *, train: bool, like: Tensor, share: Share = (0, 1)) -> Feed:
    """The feed for images (whatever has `images`, `labels`, `mean` and `std`) or for batches.

    Args:
        train: shuffled, cropped and flipped, without an incomplete last batch; otherwise all samples
            once, as they are.
        like: a parameter of the model, for device and dtype.
        share: this process and the number of processes.
    """
    if hasattr(data, "images") and hasattr(data, "labels"):
        return ImageFeed(data, recipe, train=train, like=like, share=share)
    if isinstance(data, Dataset):
        raise TypeError(
            f"{type(data).__name__} gives single samples; training takes batches: give a DataLoader of "
            "it (an ImageFolder has .loader(batch))"
        )
    return BatchFeed(data, recipe, train=train, device=like.device, share=share)


class ImageFeed:
    """Images as bytes on the device; random crops, flips and normalisation are done there.

    The input of a step is a draw ``[batch, 4]``: for each sample which image, top and left of what is
    cut out, and whether it is flipped. Draws of an epoch are made on the CPU, so that a seed means the
    same batches on every device, and moved at once. With mixup there are two inputs more: the draws of
    the images mixed in, each one's neighbour in the batch, and the weights ``[batch]`` of the first.
    """

    unit = "images"

    def __init__(self, data: Any, recipe: Recipe, *, train: bool, like: Tensor, share: Share) -> None:
        self.recipe, self.train, self.share = recipe, train, share
        images: Tensor = data.images
        if not isinstance(images, Tensor) or not isinstance(data.labels, Tensor):
            kinds = " and ".join(type(x).__name__ for x in (images, data.labels))
            raise TypeError(f"images and labels are {kinds}; give tensors (torch.as_tensor makes them)")
        if len(images) != len(data.labels):
            raise ValueError(f"{len(images)} images have {len(data.labels)} labels; give each one")
        if images.dtype != torch.uint8 or images.dim() != 4:
            raise ValueError(
                f"images are {images.dtype} {list(images.shape)}; they must be uint8 [n, channels, "
                "height, width], values from 0 to 255; others come as batches"
            )
        self.count, channels, self.height, self.width = images.shape
        self.crop, self.flip = (recipe.crop, recipe.flip) if train else (0, False)
        self.mixup = recipe.mixup if train else 0.0
        device = self.device = like.device
        # [n, height, width, channels], so that batches come out as channels_last
        self.images = (
            padded(images.to(device), self.crop, recipe.padding).permute(0, 2, 3, 1).contiguous()
        )
        self.labels = data.labels.to(device)
        self.dtype = like.dtype
        mean, std = (torch.as_tensor(x, dtype=torch.float64) * 255 for x in (data.mean, data.std))
        self.shift, self.scale = (
            x.reshape(channels, 1, 1).to(device, self.dtype) for x in (mean, 1 / std)
        )
        rank, world = share
        if train and recipe.batch % world:
            raise ValueError(f"batch = {recipe.batch} cannot be shared by {world} processes")
        if train and self.count < recipe.batch:
            raise ValueError(f"batch = {recipe.batch} is more than the {self.count} training images")
        if self.count < world:
            raise ValueError(f"{self.count} images for {world} process{'es' * (world > 1)}: too few")
        self.part = recipe.batch // world if train else recipe.batch
        own = len(range(rank, self.count, world))
        self.steps = self.count // recipe.batch if train else -(-own // self.part)

    def epoch(self, epoch: int, first: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """A draw for every step; with mixup also the neighbours' and the weights."""
        rank, world = self.share
        if self.train:
            draws = self.draws(epoch).view(self.steps, -1, 4)
            inputs = [draws]
            if self.mixup:
                inputs += [draws.roll(1, 1), self.weights(epoch).view(self.steps, -1)]
            mine = [x[first:].unflatten(1, (world, -1))[:, rank].to(self.device) for x in inputs]
            yield from zip(*mine)
        else:
            still = torch.zeros(self.count, 4, dtype=torch.int64)
            still[:, 0] = torch.arange(self.count)
            parts = still[rank::world].to(self.device).split(self.part)
            yield from ((draw,) for draw in parts[first:])

    def draws(self, epoch: int) -> Tensor:
        """All draws of an epoch of training ``[steps * batch, 4]``."""
        generator = torch.Generator().manual_seed(self.recipe.stream("batches", epoch))
        n = self.steps * self.recipe.batch
        order = torch.randperm(self.count, generator=generator)[:n]
        top, left = torch.randint(2 * self.crop + 1, (2, n), generator=generator)
        flipped = torch.randint(1 + self.flip, (n,), generator=generator)
        return torch.stack((order, top, left, flipped), 1)

    def weights(self, epoch: int) -> Tensor:
        """What mixup weighs the images of an epoch with ``[steps * batch]``."""
        random = np.random.default_rng(self.recipe.stream("mixup", epoch))
        drawn = random.beta(self.mixup, self.mixup, self.steps * self.recipe.batch)
        return torch.from_numpy(drawn).to(self.dtype)

    def batch(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Normalised images ``[batch, channels, height, width]`` and labels ``[batch]``; with mixup also
        the labels of the images mixed in, and the weights of the first ones."""
        x, labels = self.drawn(inputs[0])
        if not self.mixup:
            return x, labels
        (other, others), weight = self.drawn(inputs[1]), inputs[2]
        return torch.lerp(other, x, weight[:, None, None, None]), labels, others, weight

    def drawn(self, draw: Tensor) -> tuple[Tensor, Tensor]:
        """Images and labels of a draw."""
        x = cut_out(self.images, draw, self.height, self.width).permute(0, 3, 1, 2)
        x = (x.to(self.dtype) - self.shift) * self.scale
        return x if self.recipe.channels_last else x.contiguous(), self.labels[draw[:, 0]]

    def size(self, *inputs: Tensor) -> int:
        """Images of a step."""
        return len(inputs[0])


def padded(images: Tensor, pixels: int, how: str) -> Tensor:
    """Images ``[n, c, h, w]`` with so many pixels more on each side, black or mirrored."""
    if not pixels:
        return images
    if how == "zero":
        return pad(images, (pixels,) * 4)
    if pixels >= min(images.shape[2:]):
        raise ValueError(
            f"crop = {pixels} pixels cannot be reflected in {tuple(images.shape[2:])} images"
        )

    def mirrored(size: int) -> Tensor:
        place = torch.arange(-pixels, size + pixels, device=images.device).abs()
        return (size - 1) - ((size - 1) - place).abs()

    return images[:, :, mirrored(images.shape[2])][..., mirrored(images.shape[3])]


def cut_out(images: Tensor, draw: Tensor, height: int, width: int) -> Tensor:
    """Parts ``[batch, height, width, c]`` of images ``[n, H, W, c]``, as a draw ``[batch, 4]`` says."""
    image, top, left, flipped = draw.unbind(1)
    across = torch.arange(width, device=draw.device)
    rows = top[:, None] + torch.arange(height, device=draw.device)
    columns = left[:, None] + torch.where(flipped[:, None] == 1, width - 1 - across, across)
    return images[image[:, None, None], rows[:, :, None], columns[:, None, :]]


class BatchFeed:
    """Batches of an iterable that can be gone through again and has a length; moved to the device.

    A batch is a tensor, or tuples, lists and mappings of tensors. If the iterable has `set_epoch`, it is
    called first. Of several processes each takes every n-th batch: torch's random numbers are the same
    in all of them while the first one is made, so that a loader which shuffles has one order.
    """

    unit = "samples"

    def __init__(
        self, batches: Any, recipe: Recipe, *, train: bool, device: torch.device, share: Share
    ) -> None:
        try:
            total = len(batches)
        except TypeError:
            raise TypeError(
                f"{type(batches).__name__} has no length; give images with labels, mean and std, or "
                "batches in a list, a DataLoader or a class with __len__ and __iter__"
            ) from None
        if train and recipe.mixup:
            raise ValueError(
                f"mixup = {recipe.mixup} is for images with labels, mean and std, which training draws "
                "itself; batches have to be mixed where they are made"
            )
        rank, world = share
        divided = isinstance(getattr(batches, "sampler", None), DistributedSampler)
        if world > 1 and (divided or type(batches).__module__.startswith("accelerate.")):
            raise ValueError(
                "this loader gives each process a share already (DistributedSampler, prepare); give a "
                "plain one, of which every process takes its own batches"
            )
        self.batches, self.train, self.device, self.share = batches, train, device, share
        self.recipe = recipe
        self.total, self.begun = total, False
        self.steps = total // world if train else len(range(rank, total, world))
        self.channels_last = recipe.channels_last
        self.form: TreeSpec | None = None
        if total < max(1, world):  # in all processes alike, or the others would wait for ever
            raise ValueError(f"{total} batches for {world} process{'es' * (world > 1)}: too few")

    def epoch(self, epoch: int, first: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """The tensors of every batch. Those before the first that is asked for are made and left."""
        if hasattr(self.batches, "set_epoch"):
            self.batches.set_epoch(epoch)
        rank, world = self.share
        batches = self.ordered(epoch)
        done = (first - 1) * world + rank + 1 if first else 0  # up to this process's last one
        next(islice(batches, done, done), None)
        return self.own(batches, done)

    def own(self, batches: Iterator[Any], done: int) -> Iterator[tuple[Tensor, ...]]:
        """This process's share of the batches of an epoch, of which so many are gone."""
        rank, world = self.share
        for i, batch in enumerate(batches, done):
            if self.train and i // world >= self.steps:
                if i >= self.total:
                    warnings.warn(
                        f"the data gave more batches than the {self.total} that its length says; an "
                        "epoch of training has as many as that, and the rest is left",
                        stacklevel=2,
                    )
                break
            if i % world == rank:
                yield self.apart(batch)

    def ordered(self, epoch: int) -> Iterator[Any]:
        """The batches, in an order that depends on the recipe's seed and the epoch alone."""
        if type(self.batches) in (list, tuple):
            return iter(self.batches)
        with generators.turn():
            return self._drawn(epoch)

    def _drawn(self, epoch: int) -> Iterator[Any]:
        """`ordered` for a loader, which draws from the global generator."""
        state = torch.get_rng_state()
        seed = self.recipe.stream("batches", epoch)
        if (
            self.train
            and epoch
            and not self.begun
            and getattr(self.batches, "persistent_workers", False)
        ):
            warnings.warn(
                "the random numbers of persistent workers run on from epoch to epoch, so this resumed "
                "training draws others than one without a break; persistent_workers=False would not",
                stacklevel=2,
            )
        self.begun = True
        sampler = getattr(self.batches, "sampler", None)
        for own in (getattr(self.batches, "generator", None), getattr(sampler, "generator", None)):
            if self.train and isinstance(own, torch.Generator):
                own.manual_seed(seed)
        torch.default_generator.manual_seed(seed)
        try:  # samplers draw their order when they are asked for the first time
            batches = iter(self.batches)
            first = list(islice(batches, 1))
        finally:
            torch.set_rng_state(state)
        return chain(first, batches)

    def apart(self, batch: Any) -> tuple[Tensor, ...]:
        """A batch's tensors, on the device; its form is kept."""
        leaves, form = tree_flatten(dict(batch) if isinstance(batch, Mapping) else batch)
        if self.form not in (None, form):
            raise ValueError(
                f"batches must have one form; the first was {self.form}, this one is {form}"
            )
        self.form = form
        if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
            kinds = sorted({type(leaf).__name__ for leaf in leaves})
            raise TypeError(
                f"a batch must consist of tensors; this one has {', '.join(kinds) or 'nothing'}"
            )
        moved = (leaf.to(self.device, non_blocking=True) for leaf in leaves)
        if not self.channels_last:
            return tuple(moved)
        return tuple(
            x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x for x in moved
        )

    def batch(self, *inputs: Tensor) -> Any:
        """The batch as it was."""
        assert self.form is not None
        return tree_unflatten(list(inputs), self.form)

    def size(self, *inputs: Tensor) -> int:
        """The first dimension of the first tensor."""
        return len(inputs[0]) if inputs[0].dim() else 1
