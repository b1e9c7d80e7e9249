"""The interface of gates, which multiply a residual branch."""

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from attractor.common.checks import check_dtype, check_home, check_tensor

is_scripting = torch.jit.is_scripting  # type: ignore[attr-defined]


class Gate(nn.Module):
    """A step size for a residual branch; ``gate(f, x)`` returns f times the step size.

    A state dict stores `identity` under the name `doubled`, and a gate adopts the value that it loads.
    `doubled` is not a buffer, since averages of weights (EMA, SWA) include buffers, and a bool has no
    average. A gate can be used in several threads at once. `torch.jit.script` compiles it without the
    checks of its arguments.

    Args:
        channels: Number of channels of the branch.
        identity: Start at exactly 1, so that inserting the gate does not change a trained network. Each
            sigmoid is doubled, and its argument starts at 0, so F lies between 0 and ``2 ** sigmoids``.
        dtype, device: Dtype and device of the parameters.

    Attributes:
        identity_blocks_only: Whether the gate is meant for blocks with an identity shortcut only.
        shared: Whether all blocks of a stage share one gate.
        needs_x: Whether the gate uses the shortcut.
        needs_image: Whether the gate needs height and width. For other gates `insert_gates` flattens the
            spatial axes of other shapes.
        normalisation: Whether the gate replaces the batch normalisations of a block.
        sigmoids: Number of sigmoids whose product is F, which lies between 0 and 1.
    """

    identity_blocks_only: ClassVar[bool] = False
    shared: ClassVar[bool] = False
    needs_x: ClassVar[bool] = False
    needs_image: ClassVar[bool] = False
    normalisation: ClassVar[bool] = False
    sigmoids: ClassVar[int] = 1
    may_lack: ClassVar[tuple[str, ...]] = ("doubled",)  # missing in states of older versions
    __jit_unused_properties__: ClassVar[list[str]] = ["doubled"]

    def __init__(
        self,
        channels: int,
        identity: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_channels(type(self).__name__, channels, dtype)
        self.channels, self.identity = channels, bool(identity)

    @property
    def doubled(self) -> Tensor:
        """`identity` as a tensor, for state dicts."""
        parameter = next(self.parameters(), None)
        return torch.tensor(self.identity, device=None if parameter is None else parameter.device)

    @abstractmethod
    def weights(self, f: Tensor, x: Tensor | None = None) -> Tensor:
        """Return the factor F, which broadcasts against f ``[batch, channels, height, width]``."""

    def forward(self, f: Tensor, x: Tensor | None = None) -> Tensor:
        """Return the gated branch ``f * F``.

        Args:
            f: Output of the residual branch ``[batch, channels, height, width]``.
            x: The shortcut of the same shape that f is added to; only some gates use it.
        """
        return f * self.weights(f, x)

    def start(self) -> None:
        """Clear the memory, if the gate has one; called before the first block of a stage."""

    def resume(self, x: Any) -> None:
        """Restore the memory that belongs to the input x of a block, if the gate has one.

        This is called before each further block of a stage. It matters if a block runs again.
        """

    def extra_repr(self) -> str:
        """Return the arguments for ``print(gate)``."""
        return f"{self.channels}, identity=True" if self.identity else f"{self.channels}"

    def _save_to_state_dict(self, state: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(state, prefix, keep_vars)
        state[f"{prefix}doubled"] = self.doubled

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        adopt_identity(self, state, prefix)
        super()._load_from_state_dict(state, prefix, *args)


def adopt_identity(gate: Any, state: dict[str, Any], prefix: str) -> None:
    """Remove `identity` from a state and set it; a state of an older version does not contain it."""
    doubled = state.pop(f"{prefix}doubled", None)
    if doubled is not None and not doubled.is_meta:
        gate.identity = bool(doubled)


def check_channels(name: str, channels: Any, dtype: Any = None) -> None:
    """Raise an error unless channels is a positive integer and dtype a floating-point type."""
    check_dtype(dtype)
    if isinstance(channels, bool) or not isinstance(channels, int) or channels < 1:
        raise ValueError(f"{name}(channels={channels!r}); pass a positive integer")


def check_branch(gate: Any, f: Any) -> None:
    """Raise an error unless f is ``[batch, channels, height, width]`` on the device of the gate.

    Callers skip this check when `torch.jit.script` compiles them.
    """
    if traced(f):
        return
    name, channels = type(gate).__name__, gate.channels
    check_tensor("f", f, f"[batch, {channels}, height, width]")
    if f.dim() != 4 or f.shape[1] != channels or not f.shape[2] * f.shape[3]:
        raise ValueError(
            f"f has shape {list(f.shape)}, but {name}({channels}) takes "
            f"[batch, {channels}, height, width]"
        )
    parameter = next(gate.parameters(), None)
    if parameter is not None:
        check_home("f", f, f"the gate {name}", parameter)


def check_batch(name: str, norm: nn.Module, values: int) -> None:
    """Raise an error if a batch normalisation would see one value per channel in training."""
    if traced(values) or not norm.training or isinstance(norm, nn.SyncBatchNorm):
        return
    if values < 2:
        raise ValueError(
            f"{name} normalises over the batch, but one sample in training has no variance; train with "
            "batches of at least 2 (drop_last=True in the loader), or call .eval()"
        )


def traced(value: Any) -> bool:
    """Whether a value is a proxy of torch.fx, which cannot be checked."""
    return isinstance(value, torch.fx.Proxy)


def average(f: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mean over space ``[batch, channels, 1, 1]``.

    Args:
        f: Output of the residual branch.
        dtype: Dtype of the gate's parameters; under autocast f has half precision.
    """
    return f.mean((2, 3), keepdim=True, dtype=dtype)


def opened(z: Tensor, identity: bool) -> Tensor:
    """Return the sigmoid of z; with `identity` twice the sigmoid, which is exactly 1 at 0."""
    return 2 * z.sigmoid() if identity else z.sigmoid()
