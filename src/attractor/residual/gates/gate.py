"""What a gate is: something that multiplies a residual branch."""

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from attractor.core.checks import check_dtype, check_home, check_tensor

is_scripting = torch.jit.is_scripting  # type: ignore[attr-defined]


class Gate(nn.Module):
    """A step size for a residual branch: called ``gate(f, x)``, it returns f already multiplied.

    Members are made with the number of channels first. Facts about a kind of gate are told by its class:
    whether it belongs on blocks with an identity shortcut only, whether all blocks of a stage share one,
    whether it looks at the shortcut, whether it needs height and width (to others `insert_gates` gives
    any axes behind the channels as one), whether it is a normalisation (and takes the place of a block's
    batch normalisations instead of following the last), and how many sigmoids are multiplied in F, which
    lies between 0 and 1.

    Args of every member, by keyword: `identity` starts the gate at exactly 1, so that a trained network
    computes the same function on the day a gate is put into it: every sigmoid is doubled (F then lies
    between 0 and ``2 ** sigmoids``) and its argument starts at 0; `device` and `dtype`. States keep
    `identity` under the name `doubled`, and a gate becomes what the state it loads says. It is not a
    buffer, since averages of weights (EMA, SWA) take in buffers, and a bool has no average.

    A gate can be used in several threads at once and compiled by `torch.jit.script`; checks of the
    arguments are left out there.
    """

    identity_blocks_only: ClassVar[bool] = False
    shared: ClassVar[bool] = False
    needs_x: ClassVar[bool] = False
    needs_image: ClassVar[bool] = False
    normalisation: ClassVar[bool] = False
    sigmoids: ClassVar[int] = 1
    may_lack: ClassVar[tuple[str, ...]] = ("doubled",)  # states of older versions do
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
        """`identity` as states keep it."""
        own = next(self.parameters(), None)
        return torch.tensor(self.identity, device=None if own is None else own.device)

    @abstractmethod
    def weights(self, f: Tensor, x: Tensor | None = None) -> Tensor:
        """F, what multiplies f: it broadcasts against f ``[batch, channels, height, width]``."""

    def forward(self, f: Tensor, x: Tensor | None = None) -> Tensor:
        """The gated branch ``f * F``.

        Args:
            f: output of the residual branch ``[batch, channels, height, width]``.
            x: the shortcut it will be added to, of the same shape; only some gates look at it.
        """
        return f * self.weights(f, x)

    def start(self) -> None:
        """Called before the first block of a stage; a gate with a memory forgets it here."""

    def resume(self, x: Any) -> None:
        """Called before each further block of a stage with the block's input.

        A gate with a memory takes the one that belongs to this input, if the block is run again.
        """

    def extra_repr(self) -> str:
        """The arguments, for ``print(gate)``."""
        return f"{self.channels}, identity=True" if self.identity else f"{self.channels}"

    def _save_to_state_dict(self, state: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(state, prefix, keep_vars)
        state[f"{prefix}doubled"] = self.doubled

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        adopt_identity(self, state, prefix)
        super()._load_from_state_dict(state, prefix, *args)


def adopt_identity(gate: Any, state: dict[str, Any], prefix: str) -> None:
    """Take `identity` out of a state; one of an older version does not tell it and changes nothing."""
    saved = state.pop(f"{prefix}doubled", None)
    if saved is not None and not saved.is_meta:
        gate.identity = bool(saved)


def check_channels(name: str, channels: Any, dtype: Any = None) -> None:
    """Raise if channels is not a positive integer, or dtype no type of floats."""
    check_dtype(dtype)
    if isinstance(channels, bool) or not isinstance(channels, int) or channels < 1:
        raise ValueError(f"{name}(channels={channels!r}); the number of channels is a positive integer")


def check_branch(gate: Any, f: Any) -> None:
    """Raise if f is not ``[batch, channels, height, width]`` of floats beside the gate's parameters.

    Callers leave it out where `torch.jit.script` compiles them.
    """
    if traced(f):
        return
    name, channels = type(gate).__name__, gate.channels
    check_tensor("f", f, f"[batch, {channels}, height, width]")
    if f.dim() != 4 or f.shape[1] != channels or not f.shape[2] * f.shape[3]:
        raise ValueError(
            f"{name}({channels}) was given a tensor of shape {list(f.shape)}; "
            f"it takes [batch, {channels}, height, width]"
        )
    own = next(gate.parameters(), None)
    if own is not None:
        check_home("f", f, f"the gate {name}", own)


def check_batch(name: str, norm: nn.Module, values: int) -> None:
    """Raise if a batch normalisation inside a gate would see one value a channel in training."""
    if traced(values) or not norm.training or isinstance(norm, nn.SyncBatchNorm):
        return
    if values < 2:
        raise ValueError(
            f"{name} normalises over the batch and was given one sample in training, which has no "
            "variance; train with batches of at least 2 (drop_last=True in the loader), or call .eval()"
        )


def traced(value: Any) -> bool:
    """Whether a value is only a name, as torch.fx writes the network down: it cannot be checked."""
    return isinstance(value, torch.fx.Proxy)


def average(f: Tensor, dtype: torch.dtype) -> Tensor:
    """The mean over space ``[batch, channels, 1, 1]``.

    `dtype` is that of the gate's parameters: a network under autocast hands over halves, and its
    statistics are float32.
    """
    return f.mean((2, 3), keepdim=True, dtype=dtype)


def opened(z: Tensor, identity: bool) -> Tensor:
    """A sigmoid; with `identity` twice that, which is exactly 1 at 0."""
    return 2 * z.sigmoid() if identity else z.sigmoid()
