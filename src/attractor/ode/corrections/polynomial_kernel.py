"""Steps of `Polynomial` on the CPU, in C: compiled for each size in a fraction of a second.

torch's own compiler needs minutes for a few hundred monomials in one loop, and one loop per degree takes
ten times as long to run. Without a C compiler there is no kernel, and steps are taken in torch.
"""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attractor.core.chunks import LoopResult
from attractor.core.native.compiler import compiled_library
from attractor.core.rates import version

SOURCES = [Path(__file__).with_name(name) for name in ("polynomial.c", "polynomial_kernel.c")]
TYPES = {torch.float32: "float", torch.float64: "double"}
MOST_KEPT = 4096  # monomials of lower degrees, which are held on the stack
MOST_COMPONENTS = 64  # of a state, whose sums are unrolled


@dataclass(frozen=True)
class Size:
    """What the C code is compiled for.

    Attributes:
        dtype: float32 or float64.
        state, parameters, phase: Number of components of each, the phase of the time with 2 or 0.
        degree: Degree of the polynomial.
        odd: Whether it has odd powers only.
        features: Number of features of the trust region; 0 without one.
        all_products: Whether they include products of different components.
    """

    dtype: torch.dtype
    state: int
    parameters: int
    phase: int
    degree: int
    odd: bool
    features: int = 0
    all_products: bool = True

    @property
    def definitions(self) -> dict[str, Any]:
        """The macros of the C code."""
        inputs, stride = self.state + self.parameters + self.phase, 2 if self.odd else 1
        count = lambda n: math.comb(inputs + n - 1, n)  # monomials of degree n
        degree = self.degree - (self.odd and self.degree % 2 == 0)
        terms = sum(map(count, range(1, degree + 1, stride)))
        lower = terms - count(degree)
        return {
            "T": TYPES[self.dtype], "STATE": self.state, "PARAMETERS": self.parameters,
            "OUTPUTS": self.state, "INPUTS": inputs, "PHASE": self.phase,
            "VECTORS": 1 if self.state > 8 else 2 if self.state > 4 else 4,
            "DEGREE": degree, "STRIDE": stride, "TERMS": terms,
            "LOWER": max(1, lower),
            "GUARDED": int(self.features > 0), "FEATURES": max(1, self.features),
            "ALL_PRODUCTS": int(self.all_products),
        }  # fmt: skip


class Kernel:
    """A loop of steps with the call and the result of `attractor.core.chunks.step_loop`.

    Args:
        tensors: Weight, bias, centre and scale of the polynomial; then, if there is a trust region, its
            mean, deviation, factor and limit.
        size: What the kernel is compiled for.
        period: Of the equation, or None.

    Attributes:
        available: Whether there is a kernel: the factor of the region must be the inverse of a triangle,
            as that of `TrustRegion.around` is, and a C compiler must compile it.
    """

    def __init__(self, tensors: Sequence[Tensor], size: Size, period: float | None) -> None:
        self.tensors, self.versions = tuple(tensors), tuple(map(version, tensors))
        self.size, self.period, self.limit = size, period, math.inf
        weight, bias, centre, scale, *region = (x.detach() for x in tensors)
        own = [weight.contiguous(), bias, centre, scale, centre, centre, centre]
        triangular = True
        if region:
            mean, deviation, factor, limit = region
            own[4:] = mean.contiguous(), deviation.reciprocal(), factor.T.contiguous()
            triangular, self.limit = not bool(factor.tril(-1).any()), limit.item()
        self.own, self.pointers = own, [x.data_ptr() for x in own]
        self.function = compiled_kernel(size) if triangular else None
        self.available = self.function is not None

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether the kernel was made from these tensors, and none has changed since."""
        return unchanged(tensors, self.tensors, self.versions)

    def __call__(
        self,
        t: Tensor,
        dt: Tensor,
        count: Tensor,
        u: Tensor,
        anywhere: Tensor,
        parameters: Tensor | None = None,
    ) -> LoopResult:
        """Take `count` steps from u ``[*batch, d]``, or fewer; see `attractor.core.chunks.step_loop`."""
        rows, most = u.movedim(-1, 0).contiguous(), int(count)
        own = rows if parameters is None else parameters.movedim(-1, 0).contiguous()
        phases = rows
        if self.period is not None:
            phases = phases_of(t[:most], self.period).to(u.dtype).contiguous()
        out, anywhere = torch.empty_like(rows), anywhere.contiguous()
        inside, stayed = torch.empty_like(anywhere), torch.empty_like(anywhere)
        states = (x.data_ptr() for x in (rows, own, phases, out))
        flags = (x.data_ptr() for x in (anywhere, inside, stayed))
        assert self.function is not None
        taken = self.function(
            *states, *self.pointers, self.limit, *flags, anywhere.numel(), most, torch.get_num_threads()
        )
        return LoopResult(taken, out.movedim(0, -1), inside, stayed)


def unchanged(tensors: Sequence[Tensor], originals: Sequence[Tensor], versions: Sequence[int]) -> bool:
    """Return whether tensors are the originals, and none of them has changed since these versions."""
    if len(tensors) != len(originals):
        return False
    rows = zip(tensors, originals, versions)
    return all(x is original and version(x) == number for x, original, number in rows)


def phases_of(t: Tensor, period: float) -> Tensor:
    """Return the cosine and sine ``[n, 2]`` of the phase at times t ``[n]``."""
    angle = 2 * math.pi / period * t
    return torch.stack((torch.cos(angle), torch.sin(angle)), -1)


@cache
def compiled_kernel(size: Size) -> Any:
    """Return the C function for a size; None if it is too large, or no C compiler compiles it."""
    definitions = size.definitions
    if definitions["LOWER"] > MOST_KEPT or size.state > MOST_COMPONENTS:
        return None
    macros = tuple(f"{name}={value}" for name, value in definitions.items())
    library = compiled_library("".join(path.read_text() for path in SOURCES), macros)
    if library is None:
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_longlong
    function = library.steps
    function.argtypes = [
        *[pointer] * 11, ctypes.c_double, *[pointer] * 3, number, number, ctypes.c_int
    ]  # fmt: skip
    function.restype = number
    return function
