"""IEBN: "Instance Enhancement Batch Normalization" (Liang et al., AAAI 2020)."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from attractor.residual.gates.gate import (
    adopt_identity,
    average,
    check_batch,
    check_branch,
    check_channels,
    opened,
    traced,
)


class IEBN(nn.BatchNorm2d):
    """``gamma xhat delta + beta`` with ``delta = sigma(scale pool(z) + shift)``, xhat the normalised z.

    A normalisation: it takes the place of a `BatchNorm2d`, whose options and state it has, plus 2C
    parameters `scale` and `shift`, starting at 0 and -1. A batch normalisation's state loads into it
    with ``strict=False``, and `IEBN.of` converts one. `nn.SyncBatchNorm.convert_sync_batchnorm` does not
    know it and would turn it into a plain one: convert first, then put IEBN in.

    Args:
        channels: C.
        eps, momentum, affine, track_running_stats: as in `nn.BatchNorm2d`; without affine, gamma is 1
            and beta 0.
        identity: start at exactly the batch normalisation: sigma is doubled and its argument is 0. As a
            `Gate`, it becomes what the state it loads says.
        device, dtype: of the parameters.
    """

    may_lack: ClassVar[tuple[str, ...]] = ("doubled",)
    identity_blocks_only: ClassVar[bool] = False
    shared: ClassVar[bool] = False
    needs_x: ClassVar[bool] = False
    normalisation: ClassVar[bool] = True
    needs_image: ClassVar[bool] = True
    sigmoids: ClassVar[int] = 1

    def __init__(
        self,
        channels: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        identity: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_channels("IEBN", channels, dtype)
        super().__init__(channels, eps, momentum, affine, track_running_stats, device, dtype)
        self.channels, self.identity = channels, identity
        self.register_buffer("doubled", torch.tensor(bool(identity), device=device))
        self.scale = nn.Parameter(torch.zeros(channels, device=device, dtype=dtype))
        self.shift = nn.Parameter(torch.full_like(self.scale, 0.0 if identity else -1.0))

    @classmethod
    def of(cls, norm: nn.BatchNorm2d, identity: bool = True) -> "IEBN":
        """IEBN with a batch normalisation's options, copies of its weights and statistics, and its mode.

        By default it computes the same as `norm` until it is trained.
        """
        if type(norm) is not nn.BatchNorm2d:  # a subclass may do more, which would be lost
            raise TypeError(f"IEBN.of takes an nn.BatchNorm2d, not a {type(norm).__name__}")
        like: Any = norm.weight if norm.affine else norm.running_mean
        factory = {} if like is None else {"device": like.device, "dtype": like.dtype}
        made = cls(
            norm.num_features,
            norm.eps,
            norm.momentum,
            norm.affine,
            norm.track_running_stats,
            identity=identity,
            **factory,
        )
        made.load_state_dict({**made.state_dict(), **norm.state_dict()})
        for name, parameter in norm.named_parameters():
            getattr(made, name).requires_grad_(parameter.requires_grad)
        return made.train(norm.training)

    def weights(self, f: Tensor, x: Tensor | None = None) -> Tensor:
        """delta ``[batch, channels, 1, 1]``, what multiplies the normalised input."""
        check_branch(self, f)
        mean = average(f, self.scale.dtype)
        z = self.scale[:, None, None] * mean + self.shift[:, None, None]
        return opened(z, self.identity).to(f.dtype)

    def forward(self, f: Tensor, x: Tensor | None = None) -> Tensor:
        """The normalised f of the same shape; x, which gates are given, is not looked at."""
        delta = self.weights(f)
        check_batch("IEBN", self, f.numel() // self.channels)
        own, halves = self.scale.dtype, (torch.float16, torch.bfloat16)
        fits = traced(f) or f.dtype == own or (own == torch.float32 and f.dtype in halves)
        if not fits:
            raise ValueError(
                f"an IEBN of {own} was given {f.dtype}; use f.to({own}), or the module's .to({f.dtype})"
            )
        out = super().forward(f)
        if self.bias is None:
            return out * delta
        # gamma xhat delta + beta, written so that delta = 1 leaves the batch normalisation as it is.
        rest = self.bias[:, None, None] * (1 - delta)
        return torch.addcmul(rest.to(f.dtype), out, delta)

    def start(self) -> None:
        """As a gate's: there is nothing to forget."""

    def _check_input_dim(self, input: Tensor) -> None:
        """Nothing: check_branch has looked, and lets torch.fx through."""

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        adopt_identity(self, state, prefix)
        super()._load_from_state_dict(state, prefix, *args)
