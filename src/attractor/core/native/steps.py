"""Loops of steps in C, with the call and the result of `attractor.core.chunks.step_loop`."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attractor.core.chunks import Guard, LoopResult, beside, correction_term
from attractor.core.native.affine import AffineMap, affine_map
from attractor.core.native.aten import UntranslatableError
from attractor.core.native.code import (
    blocks,
    function_text,
    in_float,
    prototypes,
    template,
    test_text,
    weighted_stages,
)  # fmt: skip
from attractor.core.native.compiler import TYPES, lanes_of, library_of
from attractor.core.native.tracing import ScalarFunction, traced
from attractor.core.rates import Rate
from attractor.core.scheme import Scheme
from attractor.core.step import Correction, Step
from attractor.core.tableaus import AnyScheme


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
    lanes = lanes_of(u.dtype, u.numel() // dim, dim * (scheme.rate_calls + 3))
    macros = (
        f"T={TYPES[u.dtype]}", f"LANES={lanes}", f"STATE={dim}", f"PARAMETERS={known}",
        f"GUARDED={int(step.region is not None)}",
    )  # fmt: skip
    source = lambda: source_of(step, scheme, dim, u.dtype == torch.float32)
    places = None if step.affine is None else step.affine.places
    library = library_of(step.functions, (scheme, places), source, macros)
    return None if library is None else NativeLoop(library, step)


@dataclass(frozen=True, eq=False)
class StepFunctions:
    """What a step consists of.

    Attributes:
        rate: ``(t, u, p) -> k``.
        correction: ``(t, dt, u, slope, k, p) -> added``, or None.
        affine: The correction as a matrix, if it is one of the state and the stages.
        region: ``(u, p) -> whether the state is inside``, or None.
    """

    rate: ScalarFunction
    correction: ScalarFunction | None
    affine: AffineMap | None
    region: ScalarFunction | None

    @property
    def functions(self) -> tuple[ScalarFunction, ...]:
        """All functions."""
        return tuple(f for f in (self.rate, self.correction, self.region) if f is not None)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that are passed to the C code."""
        correction = () if self.correction is None else self.correction.memory
        if self.affine is not None:
            correction = (self.affine.numbers,)
        return [*self.rate.memory, *correction]


def source_of(step: StepFunctions, scheme: Scheme, dim: int, single: bool) -> str:
    """Return the C code of a loop of steps.

    Args:
        dim: Number of components of a state.
        single: Whether numbers are float32.
    """
    suffix = "f" if single else ""
    parts = [blocks(), prototypes(suffix)]
    parts.append(
        function_text("rate", "T t, const Block *u, const Block *p, Block *out", step.rate, suffix)
    )
    if step.correction is not None and step.affine is None:
        signature = (
            "T t, T dt, const Block *u, const Block *slope, const Block *k, const Block *p, Block *out"
        )
        offset = len(step.rate.memory)
        parts.append(function_text("correction", signature, step.correction, suffix, offset, dim))
    signature = "const State *u, const State *p, unsigned char *out"
    if step.region is None:
        parts.append(f"static inline void region({signature}, const T *const *memory) {{}}\n")
    else:
        assert not step.region.memory
        text = test_text("region", signature, step.region, suffix)
        parts.append(in_float(text) if step.region.casts and not single else text)
    parts += [_step(step, scheme, dim), template("steps.c")]
    return "\n".join(parts)


def _step(step: StepFunctions, scheme: Scheme, dim: int) -> str:
    """Return the function of one step."""
    stages = scheme.rate_calls
    lines = [
        "static inline void step(T t, T dt, Block *u, const Block *p, const T *const *memory) {",
        f"  Block k[{stages * dim}], x[{dim}];",
    ]
    for i in range(stages):
        if i == 0:
            lines.append("  rate(t, u, p, k, memory);")
            continue
        row = weighted_stages(scheme._a[i][:i], dim)
        lines.append(f"  for (int i = 0; i < {dim}; i++) EACH_LANE x[i][s] = u[i][s] + dt * ({row});")
        time = f"t + (T){scheme._c[i]!r} * dt"
        lines.append(f"  rate({time}, x, p, k + {i * dim}, memory);")
    slope = weighted_stages(scheme._b[:stages], dim)
    if step.affine is not None:
        lines += [f"  const T *map = memory[{len(step.rate.memory)}];", *step.affine.lines(dim)]
        lines += [
            f"  for (int i = 0; i < {dim}; i++)",
            f"    EACH_LANE u[i][s] = u[i][s] + dt * ({slope}) + added[i][s];",
        ]
    elif step.correction is not None:
        lines += [
            f"  Block slope[{dim}], added[{dim}];",
            f"  for (int i = 0; i < {dim}; i++) EACH_LANE slope[i][s] = {slope};",
            "  correction(t, dt, u, slope, k, p, added, memory);",
            f"  for (int i = 0; i < {dim}; i++)",
            "    EACH_LANE u[i][s] = u[i][s] + dt * slope[i][s] + added[i][s];",
        ]
    else:
        lines.append(f"  for (int i = 0; i < {dim}; i++) EACH_LANE u[i][s] = u[i][s] + dt * ({slope});")
    return "\n".join([*lines, "}"])


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
    affine: AffineMap | None = None
    if correction is not None:
        stages = [torch.ones_like(u) for _ in range(scheme.rate_calls)]
        corrected = CorrectionFunction(correction, parameters is not None)
        added = traced(corrected, ("t", "dt", "u", "slope", "k", *known("p")), with_casts=True)(
            time, size, u, torch.ones_like(u), stages, *own
        )
        if len(added.outputs) != u.shape[-1]:
            raise UntranslatableError("a correction of another shape")
        affine = affine_map(added, u.shape[-1], scheme.rate_calls)
    region: ScalarFunction | None = None
    if guard is not None:
        test = RegionFunction(guard.inside, parameters is not None)
        region = traced(test, ("u", *known("p")), constants=True, with_casts=True)(u, *own)
        if len(region.outputs) != 1:
            raise UntranslatableError("a region of another shape")
    return StepFunctions(rate, added, affine, region)


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
        step: What it was compiled for, whose tensors are passed to it.
    """

    def __init__(self, library: ctypes.CDLL, step: StepFunctions) -> None:
        self.function = library.steps
        if self.function.argtypes is None:
            pointer, number = ctypes.c_void_p, ctypes.c_longlong
            self.function.argtypes = [*[pointer] * 9, number, number, ctypes.c_int]
            self.function.restype = number
        self.tensors = step.tensors
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
    ) -> LoopResult:
        """Take `count` steps from u ``[*batch, d]``, or fewer; see `attractor.core.chunks.step_loop`."""
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
        return LoopResult(taken, out.movedim(0, -1), inside, stayed)
