"""Steps of `Patches` on the CPU, in C: compiled for each grid in about a second.

Without a C compiler there is no kernel, and steps are taken in torch.
"""

import ctypes
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attractor.core.chunks import LoopResult
from attractor.core.native.compiler import compiled_library
from attractor.core.rates import version
from attractor.ode.corrections.polynomial_kernel import MOST_KEPT, TYPES, phases_of, unchanged

SOURCES = [Path(__file__).with_name(name) for name in ("polynomial.c", "patches_kernel.c")]
MOST_AXES = 3
CACHE = 24_000  # bytes of the monomials of a block, to stay in the first cache
VECTOR_BYTES = 64


class Kernel:
    """A loop of steps with the call and the result of `attractor.core.chunks.step_loop`.

    Args:
        correction: The `Patches` correction.
        tensors: All tensors that the kernel copies, to notice when one of them changes.
        region: The `PatchRegion` that stops the loop, or None.

    Attributes:
        available: Whether there is a kernel.
    """

    def __init__(self, correction: Any, tensors: Sequence[Tensor], region: Any) -> None:
        self.tensors, self.versions = tuple(tensors), tuple(map(version, tensors))
        nets = list(correction.net)
        self.period = correction.net.period
        join = lambda name: torch.stack([x.detach() for x in map(name, nets)]).contiguous()
        weight, bias = join(lambda net: net.head.weight), join(lambda net: net.head.bias)
        centre, scale = join(lambda net: net.centre), join(lambda net: net.scale)
        rows = [centre, centre, centre]
        triangular = True
        if region is not None:
            triangular = not bool(region.factor.tril(-1).any())
            rows = [x.detach().contiguous() for x in (region.mean, region.factor.mT, region.limit)]
        macros, distance = _size_of(correction, weight.dtype, region is not None)
        self.own = [weight, bias, centre, scale, *rows, torch.tensor(distance, dtype=torch.int64)]
        self.function = _compiled(macros) if triangular and macros else None
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
        rows, most = u.contiguous(), int(count)
        own = rows
        if parameters is not None:
            own = parameters.expand(*u.shape[:-1], parameters.shape[-1]).contiguous()
        phases = rows
        if self.period is not None:
            phases = phases_of(t[:most], self.period).to(u.dtype).contiguous()
        out, anywhere = torch.empty_like(rows), anywhere.contiguous()
        inside, stayed = torch.empty_like(anywhere), torch.empty_like(anywhere)
        arrays = (rows, own, phases, out, *self.own, anywhere, inside, stayed)
        assert self.function is not None
        taken = self.function(
            *(x.data_ptr() for x in arrays), anywhere.numel(), most, torch.get_num_threads()
        )
        if taken < 0:
            raise MemoryError(f"there is no memory for the fields of {torch.get_num_threads()} threads")
        return LoopResult(taken, out, inside, stayed)


def _size_of(correction: Any, dtype: torch.dtype, guarded: bool) -> tuple[tuple[str, ...], list[Any]]:
    """Return the macros of the C code, none if there is no kernel of this size, and its distances."""
    grid, config, nets = correction.grid, correction.config, list(correction.net)
    axes = len(grid.shape)
    if axes > MOST_AXES:
        return (), []
    unused = MOST_AXES - axes
    cells = [1] * unused + list(grid.shape)
    ghosts = [0] * unused + [max(config["radius"], config["breadth"])] * axes
    extra, size = config["parameters"] + 2 * correction.timed, correction.patches(0).shape[-1]
    inputs, degree = size + extra, config["degree"]
    count = lambda n: math.comb(inputs + n - 1, n)
    terms = sum(map(count, range(1, degree + 1)))
    lower = max(1, terms - count(degree))
    if lower > MOST_KEPT or grid.channels > 16:
        return (), []
    lanes = VECTOR_BYTES // dtype.itemsize
    vectors = next(
        v for v in (4, 2, 1) if v == 1 or (v * VECTOR_BYTES * lower <= CACHE and v * lanes <= cells[-1])
    )
    row = cells[2] + 2 * ghosts[2] + vectors * lanes
    widths = [n + 2 * g for n, g in zip(cells, ghosts)]
    strides = widths[1] * row, row, 1
    channel = widths[0] * strides[0]
    distance = []
    for i in range(len(nets)):
        offsets = grid.offsets(correction.axes[i], config["radius"], config["breadth"])
        steps = [sum(k * s for k, s in zip(o, strides[unused:])) for o in offsets]
        distance.append([c * channel + step for c in range(grid.channels) for step in steps])
    values = {
        "T": TYPES[dtype], "INPUTS": inputs, "OUTPUTS": grid.channels, "VECTORS": vectors,
        "DEGREE": degree, "STRIDE": 1, "TERMS": terms, "LOWER": lower, "CHANNELS": grid.channels,
        **{f"CELLS_{i}": n for i, n in enumerate(cells)},
        **{f"GHOST_{i}": n for i, n in enumerate(ghosts)},
        "POLYNOMIALS": len(nets), "FIRST_AXIS": unused, "SIZE": size, "EXTRA": extra,
        "PHASE": 2 * correction.timed, "FLUXES": int(config["conservative"]),
        "WALLS": int(grid.walls), "GUARDED": int(guarded),
    }  # fmt: skip
    return tuple(f"{name}={value}" for name, value in values.items()), distance


@cache
def _compiled(macros: tuple[str, ...]) -> Any:
    """Return the C function for these macros; None if no C compiler compiles it."""
    library = compiled_library("".join(path.read_text() for path in SOURCES), macros)
    if library is None:
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_longlong
    function = library.steps
    function.argtypes = [*[pointer] * 15, number, number, ctypes.c_int]
    function.restype = number
    return function
