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
    is_scripting,
    opened,
    traced,
)


def _of_norm(name: str) -> Any:
    """An attribute of the batch normalisation inside, which is set there."""
    return property(lambda gate: getattr(gate.norm, name), doc=f"`{name}` of the batch normalisation.")


class IEBN(nn.Module):
    """``gamma xhat delta + beta`` with ``delta = sigma(scale pool(z) + shift)``, xhat the normalised z.

    A normalisation: it takes the place of a `BatchNorm2d`, whose options it has, plus 2C parameters
    `scale` and `shift`, starting at 0 and -1. It holds the batch normalisation as its part `norm`, so
    that `nn.SyncBatchNorm.convert_sync_batchnorm`, `torch.optim.swa_utils.update_bn` and others that
    look for batch normalisations find a real one and leave scale and shift alone. In a state dict the
    tensors of `norm` have the names that they have in a `BatchNorm2d` (``weight``, not
    ``norm.weight``): a state of a batch normalisation loads with ``strict=False``, and `IEBN.of`
    converts one.

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
        super().__init__()
        factory: Any = {"device": device, "dtype": dtype}
        self.channels, self.identity = channels, bool(identity)
        self.norm = nn.BatchNorm2d(channels, eps, momentum, affine, track_running_stats, **factory)
        self.scale = nn.Parameter(torch.zeros(channels, **factory))
        self.shift = nn.Parameter(torch.full_like(self.scale, 0.0 if identity else -1.0))
        self.register_state_dict_post_hook(_rename_norm)

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
        made.norm.load_state_dict(norm.state_dict())
        for name, parameter in norm.named_parameters():
            getattr(made.norm, name).requires_grad_(parameter.requires_grad)
        return made.train(norm.training)

    weight, bias = _of_norm("weight"), _of_norm("bias")
    running_mean, running_var = _of_norm("running_mean"), _of_norm("running_var")
    num_batches_tracked, num_features = _of_norm("num_batches_tracked"), _of_norm("num_features")
    eps, momentum = _of_norm("eps"), _of_norm("momentum")
    affine, track_running_stats = _of_norm("affine"), _of_norm("track_running_stats")
    __jit_unused_properties__: ClassVar[list[str]] = [
        "doubled", "weight", "bias", "running_mean", "running_var", "num_batches_tracked", "eps",
        "num_features", "momentum", "affine", "track_running_stats",
    ]  # fmt: skip

    @property
    def doubled(self) -> Tensor:
        """`identity` as states keep it."""
        return torch.tensor(self.identity, device=self.scale.device)

    def weights(self, f: Tensor, x: Tensor | None = None) -> Tensor:
        """delta ``[batch, channels, 1, 1]``, what multiplies the normalised input."""
        if not is_scripting():
            check_branch(self, f)
        mean = average(f, self.scale.dtype)
        z = self.scale[:, None, None] * mean + self.shift[:, None, None]
        return opened(z, self.identity).to(f.dtype)

    def forward(self, f: Tensor, x: Tensor | None = None) -> Tensor:
        """The normalised f of the same shape; x, which gates are given, is not looked at."""
        delta = self.weights(f)
        if not is_scripting():
            self._check(f)
        out = self.norm(f)
        bias = self.norm.bias
        if bias is None:
            return out * delta
        # gamma xhat delta + beta, written so that delta = 1 leaves the batch normalisation as it is.
        rest = bias[:, None, None] * (1 - delta)
        return torch.addcmul(rest.to(f.dtype), out, delta)

    def start(self) -> None:
        """As a gate's: there is nothing to forget."""

    def resume(self, x: Any) -> None:
        """As a gate's: there is nothing to remember."""

    def extra_repr(self) -> str:
        """The arguments, for ``print(gate)``."""
        return f"{self.channels}, identity=True" if self.identity else f"{self.channels}"

    @torch.jit.unused
    def _check(self, f: Tensor) -> None:
        """Raise if f has too few values for statistics, or a dtype that does not fit the parameters."""
        if traced(f):
            return
        check_batch("IEBN", self.norm, f.numel() // self.channels)
        own, halves = self.scale.dtype, (torch.float16, torch.bfloat16)
        if f.dtype != own and not (own == torch.float32 and f.dtype in halves):
            raise ValueError(
                f"an IEBN of {own} was given {f.dtype}; use f.to({own}), or the module's .to({f.dtype})"
            )

    def _save_to_state_dict(self, state: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(state, prefix, keep_vars)
        state[f"{prefix}doubled"] = self.doubled

    def _load_from_state_dict(
        self,
        state: dict[str, Any],
        prefix: str,
        metadata: Any,
        strict: bool,
        missing: list[str],
        *rest: Any,
    ) -> None:
        adopt_identity(self, state, prefix)
        for name, own in self.norm.state_dict(keep_vars=True).items():
            if f"{prefix}{name}" in state:
                state[f"{prefix}norm.{name}"] = state.pop(f"{prefix}{name}")
            elif name != "num_batches_tracked":  # the states of old versions of torch lack it
                missing.append(f"{prefix}{name}")
                state[f"{prefix}norm.{name}"] = own
        super()._load_from_state_dict(state, prefix, metadata, strict, missing, *rest)


def _rename_norm(module: IEBN, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Give the tensors of the part `norm` the names that they have in a batch normalisation."""
    for name in module.norm.state_dict():
        state[f"{prefix}{name}"] = state.pop(f"{prefix}norm.{name}")
