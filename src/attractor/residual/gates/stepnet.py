"""StepNet (Huang et al., ICCV 2023).

"Understanding Self-attention Mechanism via Dynamical System Perspective".
"""

from typing import Any, ClassVar, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from attractor.common.checks import check_beside, check_tensor
from attractor.residual.gates.excitation import Excitation, narrow
from attractor.residual.gates.gate import (
    Gate,
    average,
    check_batch,
    check_branch,
    is_scripting,
    opened,
    traced,
)
from attractor.residual.gates.iebn import IEBN

Inputs: TypeAlias = Literal["pair", "x", "next", "difference"]
Adaptor: TypeAlias = Literal["stepnet", "a", "b", "c", "d"]
Reading: TypeAlias = Literal["after", "inside"]


class StepNet(Gate):
    """A step size computed from the state x_t and the next state of a plain step, x_{t+1} = x_t + f.

    The Adaptor takes the means of both states over space (x_t + f is not computed, as the mean is
    linear). It mixes them per channel (the paper's group convolution: channel c of x_t with channel c of
    x_{t+1}), normalises over the batch, scales and shifts (IE, which starts at 0 and -1), and applies a
    sigmoid: ``F = sigma(scale BN(p pool(x_t) + q pool(x_{t+1})) + shift)`` with 2C + 2C + 2C parameters.
    It is meant for blocks with an identity shortcut, and training needs at least two samples.

    Args:
        channels: C.
        inputs: Input of the Adaptor (Table 4): both states ("pair"), x_t ("x"), x_{t+1} ("next"), or
            their difference f ("difference"). A single input reduces 6C parameters to 5C.
        adaptor: "stepnet", or an alternative of Figure 5. The figure is not legible; our interpretation
            is: "a" without IE (4C), "b" the two layers of SE on the pair (3 C h + h + C), "c" without BN
            (4C), "d" the sum of an IEBN of each state without mixing (8C).
        iebn: "after" applies IE after BN, as above. "inside" is the paper's IEBN,
            ``gamma xhat sigma(scale z + shift) + beta`` before the sigmoid, with as many parameters.
        reduction: Ratio of C to the hidden size of adaptor "b".
        identity: See `Gate`; the argument of the sigmoid starts at 0.
        device, dtype: Device and dtype of the parameters.
    """

    identity_blocks_only: ClassVar[bool] = True
    needs_x: ClassVar[bool] = True

    def __init__(
        self,
        channels: int,
        *,
        inputs: Inputs = "pair",
        adaptor: Adaptor = "stepnet",
        iebn: Reading = "after",
        reduction: int = 16,
        identity: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(channels, identity, dtype, device)
        check_choice("inputs", inputs, get_args(Inputs))
        check_choice("adaptor", adaptor, get_args(Adaptor))
        check_choice("iebn", iebn, get_args(Reading))
        if iebn == "inside" and adaptor not in ("stepnet", "d"):
            raise ValueError(
                f"StepNet(adaptor={adaptor!r}, iebn='inside'): this adaptor does not have both BN and "
                "IE; omit iebn, or use adaptor 'stepnet' or 'd'"
            )
        self.inputs, self.adaptor = inputs, adaptor
        self.excitation: Excitation | None = None
        self.mix: nn.Parameter | None = None
        factory: Any = {"device": device, "dtype": dtype}
        states = 2 if inputs == "pair" else 1
        if adaptor == "b":
            hidden = narrow("StepNet", channels, reduction)
            self.excitation = Excitation(states * channels, channels, hidden, zero=identity, **factory)
            return
        if adaptor != "d":
            bound = states**-0.5  # the initialisation of nn.Conv2d
            self.mix = nn.Parameter(torch.empty(channels, states, **factory).uniform_(-bound, bound))
        heads = states if adaptor == "d" else 1
        self.heads: Any = nn.ModuleList(
            make_head(channels, adaptor, iebn, identity, **factory) for _ in range(heads)
        )

    def weights(self, f: Tensor, x: Tensor | None = None) -> Tensor:
        """Return F ``[batch, channels, 1, 1]``."""
        if not is_scripting():
            check_branch(self, f)
            self._check_batch(f)
        if self.excitation is not None:
            states = self._states(f, x, self.excitation.reduce.weight.dtype)
            z = self.excitation(torch.cat(states, 1).flatten(1))[..., None, None]
        elif self.mix is not None:
            states = self._states(f, x, self.mix.dtype)
            z = self.heads[0]((torch.stack(states, -1) * self.mix[:, None, None]).sum(-1))
        else:
            states = self._states(f, x, self.heads[0][-1].shift.dtype)
            z = self.heads[0](states[0])
            if len(self.heads) > 1:
                z = z + self.heads[-1](states[-1])
        return opened(z, self.identity).to(f.dtype)

    def _states(self, f: Tensor, x: Tensor | None, dtype: torch.dtype) -> list[Tensor]:
        """Return the inputs of the Adaptor, one or two tensors ``[batch, channels, 1, 1]``."""
        if self.inputs == "difference":
            return [average(f, dtype)]
        if x is None:
            raise ValueError(
                "StepNet looks at the shortcut as well; call gate(f, x) with the x that f is added to "
                "(inputs='difference' needs f only)"
            )
        if not is_scripting():
            check_shortcut(f, x)
        state = average(x, dtype)
        if self.inputs == "x":
            return [state]
        next_state = state + average(f, dtype)
        return [next_state] if self.inputs == "next" else [state, next_state]

    @torch.jit.unused
    def _check_batch(self, f: Tensor) -> None:
        """Raise an error if a normalisation would see one sample in training."""
        for layer in self.modules():
            if isinstance(layer, _BatchNorm):
                check_batch("StepNet", layer, f.shape[0])

    def extra_repr(self) -> str:
        """Return the arguments for ``print(gate)``."""
        return f"{super().extra_repr()}, inputs={self.inputs!r}, adaptor={self.adaptor!r}"


class IE(nn.Module):
    """``scale z + shift`` with a scale and a shift per channel, which start at 0 and `shift`."""

    def __init__(self, channels: int, shift: float, **factory: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(channels, **factory))
        self.shift = nn.Parameter(torch.full((channels,), shift, **factory))

    def forward(self, z: Tensor) -> Tensor:
        """Return ``scale z + shift`` for z ``[batch, channels, 1, 1]``."""
        return self.scale[:, None, None] * z + self.shift[:, None, None]


def make_head(
    channels: int, adaptor: Adaptor, iebn: Reading, identity: bool, **factory: Any
) -> nn.Sequential:
    """Return the layers before the sigmoid; with `identity` their output starts at 0."""
    ie = IE(channels, 0.0 if identity else -1.0, **factory)
    if adaptor == "c":
        return nn.Sequential(ie)
    norm = IEBN(channels, **factory) if iebn == "inside" else nn.BatchNorm2d(channels, **factory)
    if iebn == "after" and adaptor != "a":
        return nn.Sequential(norm, ie)
    if identity and norm.weight is not None:
        nn.init.zeros_(norm.weight)
    return nn.Sequential(norm)


def check_shortcut(f: Tensor, x: Any) -> None:
    """Raise an error unless x is a tensor with the shape, dtype and device of f."""
    if traced(f) or traced(x):
        return
    check_tensor("x", x, "of f's shape")
    check_beside("x", x, "f", f)
    if x.shape != f.shape:
        raise ValueError(
            f"f has shape {list(f.shape)} and x {list(x.shape)}; StepNet needs the x that f is added "
            "to, which for a projected shortcut is the projection"
        )


def check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Raise an error if an option does not have one of its values."""
    if value not in allowed:
        raise ValueError(f"StepNet({name}={value!r}); it is one of {', '.join(allowed)}")
