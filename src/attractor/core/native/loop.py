"""Loops of steps in C, with the call and the result of `attractor.core.runs.looped`."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attractor.core.native.aten import UntranslatableError
from attractor.core.native.code import StepFunctions, source_of
from attractor.core.native.compiler import compiled_library
from attractor.core.native.tracing import ScalarFunction, traced
from attractor.core.rates import Rate
from attractor.core.runs import Guard, Looped, beside, correction_term
from attractor.core.scheme import Scheme
from attractor.core.step import Correction, Step
from attractor.core.tableaus import AnyScheme

TYPES = {torch.float32: "float", torch.float64: "double"}
VECTOR_BYTES = 64
CACHE = 24_000  # bytes of the stages of a block, to stay in the first cache
MOST_LIBRARIES = 64  # of compiled steps
MOST_STATEMENTS = 6_000  # of a step's functions, which C compilers handle in seconds


def native_loop(
    f: Rate,
    scheme: AnyScheme,
    correction: Correction | None,
    guard: Guard | None,
    t: Tensor,
    dt: Tensor,
    u: Tensor,
    parameters: Tensor | None,
) -> "NativeLoop | None":
    """Return a loop of steps in C; None if a step cannot be written in it.

    Requires: tensors on the CPU, and nothing to differentiate.

    Args:
        correction: With the call ``correction(step)``.
        t, dt: Times and step sizes, in the dtype of u.
        u: States ``[*batch, d]``.
        parameters: ``[*batch, k]``, or None.
    """
    if not isinstance(scheme, Scheme) or u.dtype not in TYPES or u.shape[-1] == 0:
        return None
    try:
        step = _functions(f, scheme, correction, guard, t, dt, u, parameters)
    except UntranslatableError:
        return None
    dim, known = u.shape[-1], 0 if parameters is None else parameters.shape[-1]
    size, trajectories = u.element_size(), u.numel() // u.shape[-1]
    lanes = VECTOR_BYTES // size
    if trajectories > lanes and 2 * VECTOR_BYTES * dim * (scheme.rate_calls + 3) <= CACHE:
        lanes *= 2
    library = _library(step, scheme, u.dtype, lanes, dim, known)
    return None if library is None else NativeLoop(library, step.functions)


_LIBRARIES: dict[Any, tuple[Any, ctypes.CDLL | None]] = {}


def _library(
    step: StepFunctions, scheme: Scheme, dtype: torch.dtype, lanes: int, dim: int, known: int
) -> ctypes.CDLL | None:
    """Return the compiled steps, which are the same as long as the programs are."""
    programs = [f.program for f in step.functions]
    key = (*map(id, programs), scheme, dtype, lanes, dim, known)
    if key not in _LIBRARIES:
        while len(_LIBRARIES) >= MOST_LIBRARIES:
            _LIBRARIES.pop(next(iter(_LIBRARIES)))
        library = None
        if step.statements <= MOST_STATEMENTS:
            macros = (
                f"T={TYPES[dtype]}", f"LANES={lanes}", f"STATE={dim}", f"PARAMETERS={known}",
                f"GUARDED={int(step.region is not None)}",
            )  # fmt: skip
            source = source_of(step, scheme, dim, dtype == torch.float32)
            library = compiled_library(source, macros, vector_math=step.uses_vector_math)
        _LIBRARIES[key] = programs, library  # the programs, so that no other one has their ids
    return _LIBRARIES[key][1]


def _functions(
    f: Rate,
    scheme: Scheme,
    correction: Correction | None,
    guard: Guard | None,
    t: Tensor,
    dt: Tensor,
    u: Tensor,
    parameters: Tensor | None,
) -> StepFunctions:
    """Return the rate, the correction and the region, traced with two trajectories per dimension."""

    def like(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.new_ones([2] * (x.dim() - 1) + [x.shape[-1]])

    def known(name: str) -> tuple[str, ...]:
        return () if parameters is None else (name,)

    u, p = like(u), like(parameters)  # type: ignore[assignment]
    own = () if p is None else (p,)
    time, size = t[0].clone(), dt[0].clone()
    rate = traced(f, ("t", "u", *known("p")))(time, u, *own)
    if len(rate.outputs) != u.shape[-1]:
        raise UntranslatableError("a rate of another shape")
    added: ScalarFunction | None = None
    if correction is not None:
        stages = [torch.ones_like(u) for _ in range(scheme.rate_calls)]
        corrected = CorrectionFunction(correction, parameters is not None)
        added = traced(corrected, ("t", "dt", "u", "slope", "k", *known("p")))(
            time, size, u, torch.ones_like(u), stages, *own
        )
        if len(added.outputs) != u.shape[-1]:
            raise UntranslatableError("a correction of another shape")
    region: ScalarFunction | None = None
    if guard is not None:
        test = RegionFunction(guard.inside, parameters is not None)
        region = traced(test, ("u", *known("p")), constants=True)(u, *own)
        if len(region.outputs) != 1:
            raise UntranslatableError("a region of another shape")
    return StepFunctions(rate, added, region)


@dataclass(frozen=True)
class CorrectionFunction:
    """A correction with a tensor per argument."""

    correction: Correction
    with_parameters: bool

    def __call__(self, t: Tensor, dt: Tensor, u: Tensor, slope: Tensor, k: Any, *p: Tensor) -> Tensor:
        """Return what the correction adds to a step with the stages k."""
        return correction_term(self.correction, Step(u, slope, dt, t, tuple(k), *p))


@dataclass(frozen=True)
class RegionFunction:
    """The test of a guard with a tensor per argument."""

    inside: Callable[[Tensor], Tensor]
    with_parameters: bool

    def __call__(self, u: Tensor, *p: Tensor) -> Tensor:
        """Return whether states are inside the trust region."""
        return self.inside(beside(u, p[0] if p else None))


class NativeLoop:
    """A loop of steps in C.

    Args:
        library: Compiled from `source_of`.
        functions: Of the step, whose tensors are passed to it.
    """

    def __init__(self, library: ctypes.CDLL, functions: tuple[ScalarFunction, ...]) -> None:
        self.function = library.steps
        if self.function.argtypes is None:
            pointer, number = ctypes.c_void_p, ctypes.c_longlong
            self.function.argtypes = [*[pointer] * 9, number, number, ctypes.c_int]
            self.function.restype = number
        self.tensors = [x for function in functions for x in function.memory]
        self.memory = (ctypes.c_void_p * max(1, len(self.tensors)))(
            *[x.data_ptr() for x in self.tensors]
        )

    def __call__(
        self,
        t: Tensor,
        dt: Tensor,
        count: Tensor,
        u: Tensor,
        anywhere: Tensor,
        parameters: Tensor | None = None,
    ) -> Looped:
        """Take `count` steps from u ``[*batch, d]``, or fewer; see `attractor.core.runs.looped`."""
        rows, most = u.movedim(-1, 0).contiguous(), int(count)
        own = rows if parameters is None else parameters.movedim(-1, 0).contiguous()
        t, dt = t.detach().contiguous(), dt.detach().contiguous()
        out, anywhere = torch.empty_like(rows), anywhere.contiguous()
        inside, stayed = torch.empty_like(anywhere), torch.empty_like(anywhere)
        states = (x.data_ptr() for x in (rows, own, t, dt, out))
        flags = (x.data_ptr() for x in (anywhere, inside, stayed))
        taken = self.function(
            *states, *flags, ctypes.addressof(self.memory), anywhere.numel(), min(most, len(dt)),
            torch.get_num_threads(),
        )  # fmt: skip
        return Looped(taken, out.movedim(0, -1), inside, stayed)
