"""Linear PDEs in Triton kernels: stepped values (`values`), and the keys near a causal wall (`near`).

Never required. Both modules need Triton to be imported, so ask `usable` first; without it, or on another
device, plain torch does the same. With ``TRITON_INTERPRET=1`` in the environment before the first
import the kernels run on a CPU, slowly, to be tested there.
"""

import os
from importlib.util import find_spec

import torch
from torch import Tensor

from attractor.attention.bands import step_values
from attractor.attention.pdes import PDE

REACH = 8  # the furthest that kernels look: their sums over neighbours are unrolled
DIM = 256  # the deepest head: a row is held whole
TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

TRITON = find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


def usable(x: Tensor, reach: int) -> bool:
    """Whether the kernels take values, queries or keys like x, for steps of that reach in all."""
    if not TRITON or not 1 <= reach <= REACH or x.shape[-1] > DIM or x.dtype not in TYPES:
        return False
    return x.device.type == "cuda" or (INTERPRETED and x.device.type == "cpu")


def stepped_values(pde: PDE, value: Tensor, open: Tensor | None, steps: int, dt: float) -> Tensor:
    """`bands.step_values`: by one kernel where it can be, in the type of value, with sums in single.

    Args:
        value: ``[batch, heads, keys, dim]``.
        open: bool ``[batch or 1, heads or 1, 1, keys - 1]``, False at walls; None: only the ends are.
    """
    if not usable(value, steps * pde.reach):
        return step_values(pde, value, open, steps, dt)
    from attractor.attention.fused import values

    return values.step(value, values.taps(pde, steps, dt, value), open)
