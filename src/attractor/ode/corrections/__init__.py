"""What is learned: the error of a big step, one form of it a file.

A correction is an `nn.Module` that is called with a `Step` and returns what is added to the plain step
``u + dt * slope``; those that need no more can also be called with ``(u, slope, dt)``. Its first
argument is the size of a state. Its last layer is linear, so that it can be fitted in closed form:
`inputs` says what the network `net` sees, and `net.features` and `net.set_head` let a fit solve for the
last layer. A correction with a `period` depends on the time as well, and says so with `timed`; one with
`parameters` sees the parameters of each trajectory.

>>> import torch
>>> correction = AttNS(dim=4, width=32)
>>> u, slope = torch.rand(10, 4), torch.rand(10, 4)
>>> correction(u, slope, 0.1).shape
torch.Size([10, 4])

To add one: a file here, a line below; `tests/contracts.py` then tests it.
"""

from attractor.common.checks import nearest
from attractor.ode.corrections.attns import AttNS
from attractor.ode.corrections.attns_m import AttNSM
from attractor.ode.corrections.correction import Correction
from attractor.ode.corrections.csm import CSM
from attractor.ode.corrections.fsnet import FSNet
from attractor.ode.corrections.linear import Linear
from attractor.ode.corrections.neurvec import NeurVec
from attractor.ode.corrections.patches import Patches
from attractor.ode.corrections.polynomial import Polynomial
from attractor.ode.corrections.stages import Stages

__all__ = [
    "CSM",
    "AttNS",
    "AttNSM",
    "FSNet",
    "Linear",
    "NeurVec",
    "Patches",
    "Polynomial",
    "Stages",
    "get_correction",
]

BY_NAME: dict[str, type[Correction]] = {
    "attns": AttNS,
    "attns_m": AttNSM,
    "neurvec": NeurVec,
    "csm": CSM,
    "fsnet": FSNet,
    "linear": Linear,
    "patches": Patches,
    "polynomial": Polynomial,
    "stages": Stages,
}


def get_correction(name: str) -> type[Correction]:
    """The class of that name, such as ``"attns"``."""
    if not isinstance(name, str) or name not in BY_NAME:
        hint = nearest(name, list(BY_NAME))
        raise ValueError(f"no correction is called {name!r}; there are {', '.join(BY_NAME)}{hint}")
    return BY_NAME[name]
