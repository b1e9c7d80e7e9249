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

NORM_ATTRIBUTES = (
    "weight", "bias", "running_mean", "running_var", "num_batches_tracked", "num_features", "eps",
    "momentum", "affine", "track_running_stats",
)  # fmt: skip


def _norm_attribute(name: str) -> Any:
    """Return a property that reads an attribute of the batch normalisation inside."""
    return property(lambda gate: getattr(gate.norm, name), doc=f"`{name}` of the batch normalisation.")


class IEBN(nn.Module):
    """``gamma xhat delta + beta`` with ``delta = sigma(scale pool(z) + shift)``, xhat the normalised z.

    IEBN replaces a `BatchNorm2d` and has its options, plus 2C parameters `scale` and `shift`, which
    start at 0 and -1. It contains the batch normalisation as its part `norm`, so that functions that
    convert or update batch normalisations (`nn.SyncBatchNorm.convert_sync_batchnorm`,
    `torch.optim.swa_utils.update_bn`) work and do not change scale and shift. In a state dict the
    tensors of `norm` have their names in a `BatchNorm2d` (``weight``, not ``norm.weight``): a state of
    a batch normalisation can be loaded with ``strict=False``, and `IEBN.of` converts one.

    Args:
        channels: C.
        eps, momentum, affine, track_running_stats: As in `nn.BatchNorm2d`. If `affine` is False, gamma
            is 1 and beta 0.
        identity: Start at exactly the batch normalisation: sigma is doubled, and its argument is 0. As a
            `Gate`, IEBN adopts the value of a state that it loads.
        device, dtype: Device and dtype of the parameters.
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
        """Return an IEBN with the options, weights, statistics and mode of a batch normalisation.

        By default its output equals that of `norm` until it is trained.
        """
        if type(norm) is not nn.BatchNorm2d:  # the additions of a subclass would be lost
            raise TypeError(f"IEBN.of takes an nn.BatchNorm2d, not a {type(norm).__name__}")
        tensor: Any = norm.weight if norm.affine else norm.running_mean
        factory = {} if tensor is None else {"device": tensor.device, "dtype": tensor.dtype}
        module = cls(
            norm.num_features,
            norm.eps,
            norm.momentum,
            norm.affine,
            norm.track_running_stats,
            identity=identity,
            **factory,
        )
        module.norm.load_state_dict(norm.state_dict())
        for name, parameter in norm.named_parameters():
            getattr(module.norm, name).requires_grad_(parameter.requires_grad)
        return module.train(norm.training)

    weight, bias, running_mean, running_var, num_batches_tracked, num_features, eps, momentum, affine, \
        track_running_stats = map(_norm_attribute, NORM_ATTRIBUTES)  # fmt: skip
    __jit_unused_properties__: ClassVar[list[str]] = ["doubled", *NORM_ATTRIBUTES]

    @property
    def doubled(self) -> Tensor:
        """`identity` as a tensor, for state dicts."""
        return torch.tensor(self.identity, device=self.scale.device)

    def weights(self, f: Tensor, x: Tensor | None = None) -> Tensor:
        """Return delta ``[batch, channels, 1, 1]``, the factor of the normalised input."""
        if not is_scripting():
            check_branch(self, f)
        mean = average(f, self.scale.dtype)
        z = self.scale[:, None, None] * mean + self.shift[:, None, None]
        return opened(z, self.identity).to(f.dtype)

    def forward(self, f: Tensor, x: Tensor | None = None) -> Tensor:
        """Return the normalised f of the same shape; x, an argument of all gates, is not used."""
        delta = self.weights(f)
        if not is_scripting():
            self._check(f)
        out = self.norm(f)
        bias = self.norm.bias
        if bias is None:
            return out * delta
        # gamma xhat delta + beta, in a form that equals the batch normalisation for delta = 1.
        rest = bias[:, None, None] * (1 - delta)
        return torch.addcmul(rest.to(f.dtype), out, delta)

    def start(self) -> None:
        """Do nothing: IEBN has no memory."""

    def resume(self, x: Any) -> None:
        """Do nothing: IEBN has no memory."""

    def extra_repr(self) -> str:
        """Return the arguments for ``print(gate)``."""
        return f"{self.channels}, identity=True" if self.identity else f"{self.channels}"

    @torch.jit.unused
    def _check(self, f: Tensor) -> None:
        """Raise an error if f has too few values for statistics, or a dtype that does not fit."""
        if traced(f):
            return
        check_batch("IEBN", self.norm, f.numel() // self.channels)
        dtype, half = self.scale.dtype, (torch.float16, torch.bfloat16)
        if f.dtype != dtype and not (dtype == torch.float32 and f.dtype in half):
            raise ValueError(
                f"f is {f.dtype}, but this IEBN is {dtype}; use f.to({dtype}), or the module's "
                f".to({f.dtype})"
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
        for name, tensor in self.norm.state_dict(keep_vars=True).items():
            if f"{prefix}{name}" in state:
                state[f"{prefix}norm.{name}"] = state.pop(f"{prefix}{name}")
            elif name != "num_batches_tracked":  # missing in states of old versions of torch
                missing.append(f"{prefix}{name}")
                state[f"{prefix}norm.{name}"] = tensor
        super()._load_from_state_dict(state, prefix, metadata, strict, missing, *rest)


def _rename_norm(module: IEBN, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Give the tensors of the part `norm` the names that they have in a batch normalisation."""
    for name in module.norm.state_dict():
        state[f"{prefix}{name}"] = state.pop(f"{prefix}norm.{name}")
