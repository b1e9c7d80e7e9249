"""Positive random features of the softmax kernel (FAVOR+, https://arxiv.org/abs/2009.14794)."""

import math

import torch
from torch import Tensor, nn

from attractor.attention.tracing import as_node, is_symbolic
from attractor.common.checks import check_beside, check_tensor, is_whole


class RandomFeatures(nn.Module):
    """Positive random features f of the softmax kernel: ``f(x) . f(y)`` has the mean ``exp(x . y)``.

    The directions are a buffer: they are saved and moved with a model, and they are not trained.

    Args:
        dim: Dimension of queries and keys.
        count: Number of features. Errors decrease as ``1 / sqrt(count)``.
        heads: Number of heads with independent directions. None: all heads have the same directions.
        orthogonal: Whether directions are orthogonal in blocks of `dim`, which reduces the variance.
        generator: Random number generator for the directions.

    Attributes:
        projection: The directions, ``[dim, count]`` or ``[heads, dim, count]``.

    Raises:
        ValueError: `dim`, `count` or `heads` is not a whole number of at least 1.
    """

    projection: Tensor

    def __init__(
        self,
        dim: int,
        count: int = 256,
        *,
        heads: int | None = None,
        orthogonal: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if not all(is_whole(x) and x >= 1 for x in (dim, count, 1 if heads is None else heads)):
            raise ValueError(
                f"dim = {dim!r}, count = {count!r} and heads = {heads!r} must be at least 1"
            )
        self.orthogonal = orthogonal
        lead = () if heads is None else (heads,)
        self.register_buffer("projection", torch.empty(*lead, dim, count))
        self.redraw(generator)

    @torch.no_grad()
    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Replace the directions by new random ones, in place.

        Call this method from time to time during training, so that a model does not adapt to particular
        directions.

        Args:
            generator: Random number generator; None for the global one.
        """
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(
                f"generator is a {type(generator).__name__}; pass a torch.Generator, or None"
            )
        *lead, dim, count = self.projection.shape
        device = None if generator is None else generator.device
        randn = lambda *shape: torch.randn(
            *lead, *shape, dtype=torch.float64, generator=generator, device=device
        )
        if not self.orthogonal:
            self.projection.copy_(randn(dim, count))
            return
        blocks = []
        for _ in range(-(-count // dim)):
            q, r = torch.linalg.qr(randn(dim, dim))
            signs = r.diagonal(dim1=-2, dim2=-1).sign()  # with them, directions are uniform
            blocks.append(q * signs.unsqueeze(-2))
        norms = randn(dim, count).norm(dim=-2, keepdim=True)  # distributed as those of independent ones
        self.projection.copy_(torch.cat(blocks, -1)[..., :count] * norms)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features ``[..., count]`` of x ``[..., dim]``."""
        if is_symbolic(x):
            return as_node(self, x)
        dim = self.projection.shape[-2]
        check_tensor("x", x, f"[..., {dim}]")
        check_beside("x", x, "the features", self.projection)
        if x.dim() == 0 or x.shape[-1] != dim:
            raise ValueError(f"x has shape {list(x.shape)}; these features are of [..., {dim}]")
        logs = x @ self.projection.to(x.dtype) - 0.5 * x.square().sum(-1, keepdim=True)
        return logs.exp() / math.sqrt(self.projection.shape[-1])

    def extra_repr(self) -> str:
        """Return the arguments that `print` shows."""
        *lead, dim, count = self.projection.shape
        heads = f", heads={lead[0]}" if lead else ""
        return f"dim={dim}, count={count}{heads}, orthogonal={self.orthogonal}"
