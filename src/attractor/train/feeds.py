"""Feeds provide the batches of a training: images on the device, or batches from an iterable.

A feed yields the *inputs* of each step of an epoch, tensors whose shapes do not change, and makes the
batch from them: ``feed.batch(*inputs)`` runs inside the step, on the device, without synchronisation.
"""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
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

Share = tuple[int, int]  # the rank of this process, and the number of processes


class Feed(Protocol):
    """The steps of an epoch in this process."""

    steps: int
    unit: str

    def epoch(self, epoch: int, first: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """Yield the inputs of every step from `first` on, without drawing for the steps before."""
        ...

    def batch(self, *inputs: Tensor) -> Any:
        """Return the batch that the loss is called with."""
        ...

    def batches_of(self, *inputs: Tensor) -> Iterator[Any]:
        """Yield the batches of a step; there are several if gradients are accumulated."""
        ...

    def size(self, *inputs: Tensor) -> int:
        """Return the number of samples in these inputs."""
        ...


def feed_of(data: Any, recipe: Recipe, *, train: bool, like: Tensor, share: Share = (0, 1)) -> Feed:
    """Return the feed for images (any object with `images`, `labels`, `mean` and `std`) or for batches.

    Args:
        data: images, or an iterable of batches.
        recipe: the recipe of the training.
        train: if True, images are shuffled, cropped and flipped, and an incomplete last batch is left
            out; otherwise every sample is used once, unchanged.
        like: a parameter of the model, for device and dtype.
        share: the rank of this process and the number of processes.
    """
    if train and recipe.accumulate > 1:
        one = feed_of(data, replace(recipe, accumulate=1), train=True, like=like, share=share)
        return AccumulationFeed(one, recipe.accumulate)
    if hasattr(data, "images") and hasattr(data, "labels"):
        return ImageFeed(data, recipe, train=train, like=like, share=share)
    if isinstance(data, Dataset):
        raise TypeError(
            f"{type(data).__name__} gives single samples; training takes batches: give a DataLoader of "
            "it (an ImageFolder has .loader(batch))"
        )
    return BatchFeed(data, recipe, train=train, device=like.device, share=share)


class AccumulationFeed:
    """The steps of another feed, several of which are one step here."""

    def __init__(self, feed: Feed, count: int) -> None:
        self.feed, self.count, self.unit, self.steps = feed, count, feed.unit, feed.steps // count
        if not self.steps:
            raise ValueError(
                f"accumulate = {count} is more than the {feed.steps} batches of an epoch; use fewer"
            )

    def epoch(self, epoch: int, first: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """Yield the inputs of the batches of each step, one after the other."""
        batches = self.feed.epoch(epoch, first * self.count)

        def steps() -> Iterator[tuple[Tensor, ...]]:
            for _ in range(first, self.steps):
                inputs = list(islice(batches, self.count))
                if len(inputs) == self.count:
                    yield tuple(chain.from_iterable(inputs))

        return steps()

    def batch(self, *inputs: Tensor) -> Any:
        """Return the list of batches."""
        return list(self.batches_of(*inputs))

    def batches_of(self, *inputs: Tensor) -> Iterator[Any]:
        """Yield the batches."""
        return (self.feed.batch(*own) for own in self._parts(inputs))

    def size(self, *inputs: Tensor) -> int:
        """Return the number of samples of all batches."""
        return sum(self.feed.size(*own) for own in self._parts(inputs))

    def _parts(self, inputs: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
        size = len(inputs) // self.count
        return [inputs[i : i + size] for i in range(0, len(inputs), size)]


class ImageFeed:
    """Images as bytes on the device, where they are cropped, flipped and normalised.

    The input of a step is a draw ``[batch, 4]``: per sample the index of the image, top and left of the
    crop, and whether it is flipped. The draws of an epoch are made on the CPU, so that a seed gives the
    same batches on every device, and copied to the device at once. With mixup there are two more inputs:
    the draws of the second images, which are the neighbours in the batch, and the weights ``[batch]`` of
    the first images.
    """

    unit = "images"

    def __init__(self, data: Any, recipe: Recipe, *, train: bool, like: Tensor, share: Share) -> None:
        self.recipe, self.train, self.share = recipe, train, share
        images: Tensor = data.images
        if not isinstance(images, Tensor) or not isinstance(data.labels, Tensor):
            kinds = " and ".join(type(x).__name__ for x in (images, data.labels))
            raise TypeError(f"images and labels are {kinds}; give tensors (torch.as_tensor makes them)")
        if len(images) != len(data.labels):
            raise ValueError(
                f"{len(images)} images have {len(data.labels)} labels; give one label per image"
            )
        if images.dtype != torch.uint8 or images.dim() != 4:
            raise ValueError(
                f"images are {images.dtype} {list(images.shape)}; they must be uint8 [n, channels, "
                "height, width], values from 0 to 255; give other images as batches"
            )
        self.count, channels, self.height, self.width = images.shape
        self.crop, self.flip = (recipe.crop, recipe.flip) if train else (0, False)
        self.mixup = recipe.mixup if train else 0.0
        device = self.device = like.device
        # [n, height, width, channels], so that batches come out as channels_last
        self.images = (
            pad_images(images.to(device), self.crop, recipe.padding).permute(0, 2, 3, 1).contiguous()
        )
        self.labels = data.labels.to(device)
        self.dtype = like.dtype
        mean, std = (torch.as_tensor(x, dtype=torch.float64) * 255 for x in (data.mean, data.std))
        self.shift, self.scale = (
            x.reshape(channels, 1, 1).to(device, self.dtype) for x in (mean, 1 / std)
        )
        rank, world = share
        if train and recipe.batch % world:
            raise ValueError(
                f"batch = {recipe.batch} cannot be shared by {world} processes; "
                "use a multiple of the number of processes"
            )
        if train and self.count < recipe.batch:
            raise ValueError(
                f"batch = {recipe.batch} is more than the {self.count} training images; "
                "use a smaller batch"
            )
        if self.count < world:
            raise ValueError(
                f"{self.count} images for {world} process{'es' * (world > 1)}: too few; each process "
                "needs at least one"
            )
        self.part = recipe.batch // world if train else recipe.batch
        own = len(range(rank, self.count, world))
        self.steps = self.count // recipe.batch if train else -(-own // self.part)

    def epoch(self, epoch: int, first: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """Yield the draw of every step; with mixup also the draws of the neighbours and the weights."""
        rank, world = self.share
        if self.train:
            draws = self.draws(epoch).view(self.steps, -1, 4)
            inputs = [draws]
            if self.mixup:
                inputs += [draws.roll(1, 1), self.weights(epoch).view(self.steps, -1)]
            mine = [x[first:].unflatten(1, (world, -1))[:, rank].to(self.device) for x in inputs]
            yield from zip(*mine)
        else:
            draws = torch.zeros(self.count, 4, dtype=torch.int64)
            draws[:, 0] = torch.arange(self.count)
            parts = draws[rank::world].to(self.device).split(self.part)
            yield from ((draw,) for draw in parts[first:])

    def draws(self, epoch: int) -> Tensor:
        """Return all draws of an epoch of training ``[steps * batch, 4]``."""
        generator = torch.Generator().manual_seed(self.recipe.stream("batches", epoch))
        n = self.steps * self.recipe.batch
        order = torch.randperm(self.count, generator=generator)[:n]
        top, left = torch.randint(2 * self.crop + 1, (2, n), generator=generator)
        flipped = torch.randint(1 + self.flip, (n,), generator=generator)
        return torch.stack((order, top, left, flipped), 1)

    def weights(self, epoch: int) -> Tensor:
        """Return the weights of mixup for an epoch ``[steps * batch]``."""
        random = np.random.default_rng(self.recipe.stream("mixup", epoch))
        weights = random.beta(self.mixup, self.mixup, self.steps * self.recipe.batch)
        return torch.from_numpy(weights).to(self.dtype)

    def batch(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return normalised images ``[batch, channels, height, width]`` and labels ``[batch]``.

        With mixup, the labels of the second images and the weights of the first ones follow.
        """
        x, labels = self.gather(inputs[0])
        if not self.mixup:
            return x, labels
        (other, others), weight = self.gather(inputs[1]), inputs[2]
        return torch.lerp(other, x, weight[:, None, None, None]), labels, others, weight

    def batches_of(self, *inputs: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield the batch."""
        yield self.batch(*inputs)

    def gather(self, draw: Tensor) -> tuple[Tensor, Tensor]:
        """Return images and labels of a draw."""
        x = cut_out(self.images, draw, self.height, self.width).permute(0, 3, 1, 2)
        x = (x.to(self.dtype) - self.shift) * self.scale
        return x if self.recipe.channels_last else x.contiguous(), self.labels[draw[:, 0]]

    def size(self, *inputs: Tensor) -> int:
        """Return the number of images of a step."""
        return len(inputs[0])


def pad_images(images: Tensor, pixels: int, how: str) -> Tensor:
    """Return images ``[n, c, h, w]`` with `pixels` more on each side, black or mirrored."""
    if not pixels:
        return images
    if how == "zero":
        return pad(images, (pixels,) * 4)
    if pixels >= min(images.shape[2:]):
        raise ValueError(
            f"crop = {pixels} pixels cannot be reflected in {tuple(images.shape[2:])} images; use a "
            "smaller crop, or padding='zero'"
        )

    def mirrored(size: int) -> Tensor:
        place = torch.arange(-pixels, size + pixels, device=images.device).abs()
        return (size - 1) - ((size - 1) - place).abs()

    return images[:, :, mirrored(images.shape[2])][..., mirrored(images.shape[3])]


def cut_out(images: Tensor, draw: Tensor, height: int, width: int) -> Tensor:
    """Return the crops ``[batch, height, width, c]`` that a draw ``[batch, 4]`` selects from images
    ``[n, H, W, c]``."""
    image, top, left, flipped = draw.unbind(1)
    across = torch.arange(width, device=draw.device)
    rows = top[:, None] + torch.arange(height, device=draw.device)
    columns = left[:, None] + torch.where(flipped[:, None] == 1, width - 1 - across, across)
    return images[image[:, None, None], rows[:, :, None], columns[:, None, :]]


class BatchFeed:
    """Batches of an iterable with a length that can be iterated repeatedly, copied to the device.

    A batch is a tensor, or tuples, lists and mappings of tensors. If the iterable has `set_epoch`, it is
    called before each epoch. Each of n processes takes every n-th batch. torch's random numbers are the
    same in all processes while the first batch is made, so that a loader shuffles in the same order.
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
                f"mixup = {recipe.mixup} needs images with labels, mean and std; for other data mix "
                "the batches where they are made"
            )
        rank, world = share
        is_distributed = isinstance(getattr(batches, "sampler", None), DistributedSampler)
        if world > 1 and (is_distributed or type(batches).__module__.startswith("accelerate.")):
            raise ValueError(
                "this loader gives each process a share already (DistributedSampler, prepare); give a "
                "plain loader, of which every process takes its own batches"
            )
        self.batches, self.train, self.device, self.share = batches, train, device, share
        self.recipe = recipe
        self.total, self.iterated = total, False
        self.steps = total // world if train else len(range(rank, total, world))
        self.channels_last = recipe.channels_last
        self.form: TreeSpec | None = None
        if total < max(1, world):  # raised in all processes, or the others would wait for ever
            raise ValueError(
                f"{total} batches for {world} process{'es' * (world > 1)}: too few; each process needs "
                "at least one"
            )

    def epoch(self, epoch: int, first: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """Yield the tensors of every batch from `first` on; batches before it are read and discarded."""
        if hasattr(self.batches, "set_epoch"):
            self.batches.set_epoch(epoch)
        rank, world = self.share
        batches = self.in_order(epoch)
        skip = (first - 1) * world + rank + 1 if first else 0  # up to the last batch of this process
        next(islice(batches, skip, skip), None)
        return self.own(batches, skip)

    def own(self, batches: Iterator[Any], first: int) -> Iterator[tuple[Tensor, ...]]:
        """Yield this process's share of the batches of an epoch after the first `first` batches."""
        rank, world = self.share
        for i, batch in enumerate(batches, first):
            if self.train and i // world >= self.steps:
                if i >= self.total:
                    warnings.warn(
                        f"the data gave more batches than the {self.total} that its length says; an "
                        "epoch of training uses that many and ignores the rest",
                        stacklevel=2,
                    )
                break
            if i % world == rank:
                yield self.flatten(batch)

    def in_order(self, epoch: int) -> Iterator[Any]:
        """Iterate over the batches in an order that depends on the recipe's seed and the epoch only."""
        if type(self.batches) in (list, tuple):
            return iter(self.batches)
        with generators.turn():
            return self._shuffle(epoch)

    def _shuffle(self, epoch: int) -> Iterator[Any]:
        """Do what `in_order` does for a loader, which draws from the global generator."""
        state = torch.get_rng_state()
        seed = self.recipe.stream("batches", epoch)
        if (
            self.train
            and epoch
            and not self.iterated
            and getattr(self.batches, "persistent_workers", False)
        ):
            warnings.warn(
                "persistent workers keep their random state from epoch to epoch, so this resumed "
                "training draws other numbers than an uninterrupted one; use persistent_workers=False",
                stacklevel=2,
            )
        self.iterated = True
        sampler = getattr(self.batches, "sampler", None)
        for own in (getattr(self.batches, "generator", None), getattr(sampler, "generator", None)):
            if self.train and isinstance(own, torch.Generator):
                own.manual_seed(seed)
        torch.default_generator.manual_seed(seed)
        try:  # samplers draw their order when the first batch is requested
            batches = iter(self.batches)
            first = list(islice(batches, 1))
        finally:
            torch.set_rng_state(state)
        return chain(first, batches)

    def flatten(self, batch: Any) -> tuple[Tensor, ...]:
        """Flatten a batch into tensors on the device, and store its structure."""
        leaves, form = tree_flatten(dict(batch) if isinstance(batch, Mapping) else batch)
        if self.form not in (None, form):
            raise ValueError(
                f"batches must have one structure; the first had {self.form}, this one has {form}"
            )
        self.form = form
        if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
            kinds = sorted({type(leaf).__name__ for leaf in leaves})
            raise TypeError(
                f"a batch must consist of tensors; this one has {', '.join(kinds) or 'nothing'}"
            )
        tensors = (leaf.to(self.device, non_blocking=True) for leaf in leaves)
        if not self.channels_last:
            return tuple(tensors)
        return tuple(
            x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x for x in tensors
        )

    def batch(self, *inputs: Tensor) -> Any:
        """Rebuild the batch from its tensors."""
        assert self.form is not None
        return tree_unflatten(list(inputs), self.form)

    def batches_of(self, *inputs: Tensor) -> Iterator[Any]:
        """Yield the batch."""
        yield self.batch(*inputs)

    def size(self, *inputs: Tensor) -> int:
        """Return the first dimension of the first tensor."""
        return len(inputs[0]) if inputs[0].dim() else 1
