"""Channel attention as a step size, one gate per file.

A gate is an `nn.Module` whose first argument is the number of channels. It is called as
``gate(f, x=None)``, where f is the output of a residual branch and x the shortcut that it is added to,
and returns f times the factor ``gate.weights(f, x)``. Only IEBN is a normalisation: it replaces the
batch normalisations of a block.

>>> import torch
>>> gate = SE(64)
>>> f, x = torch.rand(2, 64, 8, 8), torch.rand(2, 64, 8, 8)
>>> gate(f, x).shape, gate.weights(f, x).shape
(torch.Size([2, 64, 8, 8]), torch.Size([2, 64, 1, 1]))

With ``identity=True`` a gate starts at exactly 1, for trained networks:

>>> bool((StepNet(64, identity=True)(f, x) == f).all())
True

To add a gate, write a file in this folder and add its name below. `tests/contracts.py` then tests it.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import nn

from attractor.common.checks import nearest
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
    """Return the class of a gate by its name, such as ``"stepnet"``."""
    if not isinstance(name, str) or name not in BY_NAME:
        hint = nearest(name, ["none", *BY_NAME])
        raise ValueError(f"no gate is called {name!r}; the names are none, {', '.join(BY_NAME)}{hint}")
    return BY_NAME[name]


def make_gate(gate: GateLike, channels: int, **options: Any) -> nn.Module | None:
    """Make a gate, or return None for no gate.

    Args:
        gate: A name, a class, or a function ``channels -> Module``; None and "none" mean no gate.
        channels: Number of channels of the branch.
        **options: Further arguments of the gate.

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
            f"gate is a {type(gate).__name__}, but each block needs a gate of its own; pass the class, "
            "a name, or a function channels -> Module"
        )
    make = get_gate(gate) if isinstance(gate, str) else gate
    if not callable(make):
        raise TypeError(f"gate = {gate!r} is not a name, a class or a function channels -> Module")
    module = make(channels, **options)
    if module is not None and not isinstance(module, nn.Module):
        raise TypeError(
            f"gate returned a {type(module).__name__} for {channels} channels; it must return a Module"
        )
    return module
