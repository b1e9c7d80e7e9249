"""Channel attention as a step size, one gate a file.

A gate is an `nn.Module` whose first argument is the number of channels, called ``gate(f, x=None)``: f
is the output of a residual branch, x the shortcut it is added to, and the result is f already
multiplied. ``gate.weights(f, x)`` is the factor itself. IEBN alone is a normalisation: it takes the
place of the batch normalisations of a block.

>>> import torch
>>> gate = SE(64)
>>> f, x = torch.rand(2, 64, 8, 8), torch.rand(2, 64, 8, 8)
>>> gate(f, x).shape, gate.weights(f, x).shape
(torch.Size([2, 64, 8, 8]), torch.Size([2, 64, 1, 1]))

Put into a trained network, a gate starts at exactly 1:

>>> bool((StepNet(64, identity=True)(f, x) == f).all())
True

To add one: a file here, a line and a name below; `tests/contracts.py` then tests it.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import nn

from attractor.core.checks import nearest
from attractor.residual.gates.cbam import CBAM
from attractor.residual.gates.dia import DIA
from attractor.residual.gates.eca import ECA
from attractor.residual.gates.fca import FCA
from attractor.residual.gates.gate import Gate
from attractor.residual.gates.iebn import IEBN
from attractor.residual.gates.se import SE
from attractor.residual.gates.sem import SEM
from attractor.residual.gates.sge import SGE
from attractor.residual.gates.srm import SRM
from attractor.residual.gates.stepnet import StepNet

__all__ = [
    "BY_NAME",
    "CBAM",
    "DIA",
    "ECA",
    "FCA",
    "IEBN",
    "SE",
    "SEM",
    "SGE",
    "SRM",
    "Gate",
    "StepNet",
    "get_gate",
    "make_gate",
]

BY_NAME: dict[str, type[nn.Module]] = {
    "se": SE,
    "cbam": CBAM,
    "eca": ECA,
    "sem": SEM,
    "srm": SRM,
    "fca": FCA,
    "iebn": IEBN,
    "sge": SGE,
    "dia": DIA,
    "stepnet": StepNet,
}

GateLike: TypeAlias = str | type[nn.Module] | Callable[..., nn.Module | None] | None


def get_gate(name: str) -> type[nn.Module]:
    """The class of that name, such as ``"stepnet"``."""
    if not isinstance(name, str) or name not in BY_NAME:
        hint = nearest(name, ["none", *BY_NAME])
        raise ValueError(f"no gate is called {name!r}; there are none, {', '.join(BY_NAME)}{hint}")
    return BY_NAME[name]


def make_gate(gate: GateLike, channels: int, **options: Any) -> nn.Module | None:
    """A new gate for that many channels, or None for no gate.

    Args:
        gate: a name, a class, or any function ``channels -> Module``; None and "none" are no gate.
        channels: of the branch to be gated.
        options: passed on.

    >>> make_gate("eca", 64)
    ECA(
      64
      (conv): Conv1d(1, 1, kernel_size=(3,), stride=(1,), padding=(1,), bias=False)
    )
    """
    if gate is None or gate == "none":
        return None
    if isinstance(gate, nn.Module):
        raise TypeError(
            f"gate is a {type(gate).__name__} already made, but every block needs its own; "
            f"give the class, a name, or a function channels -> Module"
        )
    make = get_gate(gate) if isinstance(gate, str) else gate
    if not callable(make):
        raise TypeError(f"gate = {gate!r} is not a name, a class or a function channels -> Module")
    made = make(channels, **options)
    if made is not None and not isinstance(made, nn.Module):
        raise TypeError(
            f"gate made a {type(made).__name__} for {channels} channels; it must make a Module"
        )
    return made
