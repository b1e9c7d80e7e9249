"""A vision transformer for small images with any attention, any gate, or StepNet instead of attention.

A layer consists of two steps, ``x + gate(mix(norm(x)), x)`` and ``x + gate(think(norm(x)), x)``: mix is
attention between the patches of an image, think a network that is applied to each patch.

>>> import torch
>>> model = vit(image_size=32, patch=4, dim=64, depth=2, heads=4, num_classes=10, gate="se")
>>> model(torch.rand(2, 3, 32, 32)).shape
torch.Size([2, 10])

Appendix G of "Understanding Self-attention Mechanism via Dynamical System Perspective" (Huang et al.,
ICCV 2023) replaces attention by StepNet. It writes attention as ``x + f3(x) * F(f1(x), f2(x))``, values
times a step size (Eq. 32). With ``mixer="stepnet"`` the values are a linear map of each patch, and
StepNet is the step size, so that patches interact only through its mean over all of them.

>>> small = {"image_size": 8, "patch": 2, "in_channels": 1, "dim": 32, "depth": 2}
>>> vit(**small, mixer="stepnet")(torch.rand(2, 1, 8, 8)).shape
torch.Size([2, 10])

Another attention is a class or function of ``(dim, heads)``:

>>> import attractor as at
>>> vit(**small, attention=at.attention.PDEAttention)(torch.rand(2, 1, 8, 8)).shape
torch.Size([2, 10])
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from attractor.common.checks import MOST_PARTS, as_int, check_whole
from attractor.residual.attach import share
from attractor.residual.gates import make_gate
from attractor.residual.resnet import check_images


class SelfAttention(nn.Module):
    """Standard multi-head self-attention."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        if heads < 1 or dim % heads:
            raise ValueError(f"dim = {dim} must be a multiple of heads = {heads}")
        self.heads = heads
        self.project = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attention output for tokens ``[batch, tokens, dim]``, of the same shape."""
        batch, tokens, dim = x.shape
        heads = self.project(x).view(batch, tokens, 3, self.heads, dim // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each [batch, heads, tokens, dim / heads]
        out = scaled_dot_product_attention(query, key, value)
        return self.out(out.transpose(1, 2).reshape(batch, tokens, dim))


class Step(nn.Module):
    """``x + gate(branch(norm(x)), x)``.

    Args:
        dim: Size of a token.
        branch: A module from tokens ``[batch, tokens, dim]`` to tokens.
        grid: Number of rows and columns of tokens. A gate sees a map ``[batch, dim, rows, columns]``.
        dropout: Dropout probability of the increment.
    """

    def __init__(self, dim: int, branch: nn.Module, grid: tuple[int, int], dropout: float) -> None:
        super().__init__()
        self.norm, self.branch, self.dropout = nn.LayerNorm(dim), branch, nn.Dropout(dropout)
        self.grid = grid
        self.gate: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the state after the step ``[batch, tokens, dim]``."""
        f = self.branch(self.norm(x))
        if self.gate is not None:
            f = self.gate(self.as_map(f), self.as_map(x)).flatten(2).transpose(1, 2)
        return x + self.dropout(f)

    def as_map(self, x: Tensor) -> Tensor:
        """Return a view of tokens ``[batch, tokens, dim]`` as a map ``[batch, dim, rows, columns]``."""
        return x.transpose(1, 2).unflatten(2, self.grid)


class Layer(nn.Module):
    """A step that mixes tokens, then a step of a network that is applied to each token."""

    def __init__(self, mix: Step, think: Step) -> None:
        super().__init__()
        self.mix, self.think = mix, think

    def forward(self, x: Tensor) -> Tensor:
        """Return the state after both steps ``[batch, tokens, dim]``."""
        return self.think(self.mix(x))


class ViT(nn.Module):
    """Patches, learnt position embeddings, layers, and a linear classifier; arguments as in `vit`."""

    def __init__(
        self,
        image_size: int | tuple[int, int],
        patch: int,
        dim: int,
        depth: int,
        num_classes: int,
        mixer: Callable[[], nn.Module],
        *,
        hidden: int,
        in_channels: int,
        pool: str,
        dropout: float,
    ) -> None:
        super().__init__()
        image_size = as_int(image_size)
        pair = (image_size, image_size) if isinstance(image_size, int) else image_size
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ValueError(f"image_size = {image_size!r}; pass a number of pixels or (height, width)")
        height, width = pair
        sizes = {"height": height, "width": width, "patch": patch, "dim": dim, "hidden": hidden}
        for name, size in {**sizes, "num_classes": num_classes, "in_channels": in_channels}.items():
            check_whole(name, size, 1)
        if height % patch or width % patch:
            raise ValueError(
                f"images of {height} x {width} cannot be cut into patches of {patch} x {patch}"
            )
        check_whole("depth", depth, 1, most=MOST_PARTS)
        if pool not in ("mean", "cls"):
            raise ValueError(f"pool {pool!r} is not one of mean, cls")
        self.image_size = (height, width)
        rows, columns = height // patch, width // patch
        tokens, grid = rows * columns, (rows, columns)
        if pool == "cls":  # an additional token, so the tokens do not form a grid
            tokens, grid = tokens + 1, (tokens + 1, 1)
        self.patches = nn.Conv2d(in_channels, dim, patch, patch)
        self.cls = nn.Parameter(0.02 * torch.randn(1, 1, dim)) if pool == "cls" else None
        self.positions = nn.Parameter(0.02 * torch.randn(1, tokens, dim))
        step = lambda branch: Step(dim, branch, grid, dropout)
        self.layers = nn.Sequential(
            *(Layer(step(mixer()), step(_network(dim, hidden))) for _ in range(depth))
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits ``[batch, num_classes]`` for images ``[batch, in_channels, height, width]``."""
        check_images(images, self.patches, self.image_size)
        x = self.patches(images).flatten(2).transpose(1, 2)
        if self.cls is not None:
            x = torch.cat((self.cls.expand(x.shape[0], -1, -1), x), 1)
        x = self.norm(self.layers(x + self.positions))
        return self.head(x.mean(1) if self.cls is None else x[:, 0])


def vit(
    image_size: int | tuple[int, int] = 32,
    patch: int = 4,
    dim: int = 192,
    depth: int = 9,
    heads: int = 4,
    num_classes: int = 10,
    gate: Any = "none",
    *,
    attention: Callable[[int, int], nn.Module] | None = None,
    mixer: Any = "attention",
    where: str = "both",
    gate_options: Mapping[str, Any] | None = None,
    hidden: int | None = None,
    in_channels: int = 3,
    pool: str = "mean",
    dropout: float = 0.0,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> ViT:
    """Return a vision transformer that normalises before each step.

    Args:
        image_size: Height and width of the images, or one number for both.
        patch: Height and width of a patch.
        dim: Size of a token.
        depth: Number of layers.
        heads: Number of attention heads.
        num_classes: Number of classes.
        gate: Name or class of a gate, or a function from channels to one. It multiplies the increment of
            a step and sees the patches as a map (with pool="cls", as a map with one column).
        attention: A class or function ``(dim, heads) -> Module`` that replaces standard attention. The
            module maps tokens ``[batch, tokens, dim]`` to tokens of the same shape.
        mixer: "attention", or a gate such as "stepnet" that multiplies values and replaces attention.
        where: Steps with the gate: "both", "mixer" or "network". If the mixer is a gate, "network".
        gate_options: Further arguments of the gate.
        hidden: Width of the networks; by default 4 dim.
        in_channels: Number of channels of the images.
        pool: Input of the classifier: the "mean" of all tokens, or an additional "cls" token.
        dropout: Dropout probability of the increments.
        device, dtype: Device and dtype of the parameters.
    """
    uses_attention = isinstance(mixer, str) and mixer == "attention"
    if isinstance(attention, nn.Module):
        raise TypeError(
            f"attention is a {type(attention).__name__}, but each layer needs a module of its own; "
            "pass its class or a function (dim, heads) -> Module"
        )
    if attention is not None and not uses_attention:
        raise ValueError(f"attention= and mixer={mixer!r} exclude each other; pass one of them")
    if where not in ("both", "mixer", "network"):
        raise ValueError(f"where {where!r} is not one of both, mixer, network")
    if where == "mixer" and not uses_attention:
        raise ValueError(f"mixer={mixer!r} is a gate itself; use where='network' for another gate")
    if not uses_attention:
        where = "network"
    make_attention = attention or SelfAttention
    model = ViT(
        image_size,
        patch,
        dim,
        depth,
        num_classes,
        (lambda: make_attention(dim, heads)) if uses_attention else (lambda: nn.Linear(dim, dim)),
        hidden=hidden or 4 * dim,
        in_channels=in_channels,
        pool=pool,
        dropout=dropout,
    )
    mixes, thinks = [layer.mix for layer in model.layers], [layer.think for layer in model.layers]
    if not uses_attention:
        _add_gates(mixes, mixer, dim, {})
    if where != "network":
        _add_gates(mixes, gate, dim, gate_options or {})
    if where != "mixer":
        _add_gates(thinks, gate, dim, gate_options or {})
    return model.to(device=device, dtype=dtype)


def _network(dim: int, hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))


def _add_gates(steps: list[Any], gate: Any, dim: int, options: Mapping[str, Any]) -> None:
    for step in steps:
        step.gate = make_gate(gate, dim, **options)
    first: Any = steps[0].gate
    if getattr(first, "normalisation", False):
        raise ValueError(f"{type(first).__name__} replaces batch normalisations, but a ViT has none")
    if getattr(first, "shared", False):  # all layers are one stage
        for step, module in zip(steps, share(first, steps)):
            step.gate = module
