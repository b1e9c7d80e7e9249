"""Rounds under error control in C, from the first step to the last wanted time."""

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attractor.core.native.aten import UntranslatableError
from attractor.core.native.code import blocks, function_text, prototypes, template, weighted_stages
from attractor.core.native.compiler import TYPES, lanes_of, library_of
from attractor.core.native.derivatives import jacobian
from attractor.core.native.rosenbrock import LARGEST, after_rate, attempt_text, interpolant_lines
from attractor.core.native.tracing import ScalarFunction, traced
from attractor.core.output_times import Output
from attractor.core.rates import Linearised, Rate
from attractor.core.rosenbrock import Rosenbrock
from attractor.core.rounds import Progress, Rules
from attractor.core.scheme import Scheme
from attractor.core.trajectory import Status
from attractor.core.transforms import has_tangent, is_transformed

_CARRIED = Progress._fields
_POINTERS = (
    "parameters", "shortest", "rtol", "atol", "wanted", "memory",
    *_CARRIED, *(f"new_{name}" for name in _CARRIED), "states", "upcoming", "inside",
)  # fmt: skip
_COUNTS = ("n", "times", "each", "limit")
_OPTIONS = ("sign", "least", "most", "safety", "grow", "shrink", "beta", "exponent")


class _Call(ctypes.Structure):
    """The arguments of the loop, as control.c has them."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_longlong) for name in _COUNTS),
        *((name, ctypes.c_double) for name in _OPTIONS),
    )


class Rounds(NamedTuple):
    """What a loop of rounds has done.

    Attributes:
        taken: The number of rounds.
        with_interpolant: The number of rounds with states inside of steps.
        now: The trajectories after them.
    """

    taken: int
    with_interpolant: int
    now: Progress


def native_rounds(
    f: Rate, rules: Rules, output: Output, limit: int, now: Progress, parameters: Tensor | None
) -> Rounds | None:
    """Take rounds in C until every trajectory has reached its last time or was given up.

    Each block of trajectories takes its rounds by itself.

    Args:
        f: The rate, which takes `parameters` if there are any.
        output: The states at wanted times, which are filled.
        limit: Largest number of rounds.
        now: The trajectories at their first time.

    Returns:
        The rounds. None: the rate or the norm of the error cannot be written in C, or has gradients.
    """
    u, scheme = now.u, rules.scheme
    if u.dtype not in TYPES or not u.numel() or now.t.dtype != torch.float64:
        return None
    if isinstance(f, Linearised) or is_transformed(u) or has_tangent(u):
        return None
    dim, known = u.shape[-1], 0 if parameters is None else parameters.shape[-1]
    if isinstance(scheme, Rosenbrock) and dim > LARGEST:
        return None
    try:
        functions = _functions(f, rules, u, parameters)
    except UntranslatableError:
        return None
    rate = functions.rate
    if rate.differentiable and torch.is_grad_enabled():
        return None
    stages, terms, blocks = _sizes(scheme)
    if isinstance(scheme, Rosenbrock):
        blocks += 2 * dim  # the derivatives and the matrix
    macros = (
        f"T={TYPES[u.dtype]}", f"LANES={lanes_of(u.dtype, u.numel() // dim, dim * blocks)}",
        f"STATE={dim}", f"PARAMETERS={known}", f"KNOWN={stages}", f"LAST={_last(scheme)}",
        f"LANDS={int(not scheme.interpolates)}", f"COEFFICIENTS={terms}",
        f"STEP_UNDERFLOW={int(Status.STEP_UNDERFLOW)}", f"LOST={int(Status.LOST)}",
        f"PI_CONTROL={int(rules.control.beta != 0)}",
        *(["TWO_ESTIMATES=1"] if scheme.lower_error_weights else []),
    )  # fmt: skip
    source = lambda: _source(functions, scheme, dim, u.dtype == torch.float32)
    library = library_of(functions.all, (scheme, "control"), source, macros, vector_math=True)
    if library is None:
        return None
    own = None if parameters is None else parameters.detach().to(u.dtype)
    return _call(library.rounds, rate, rules, output, limit, now, own)


class _Functions(NamedTuple):
    """What rounds consist of, besides the scheme.

    Attributes:
        rate: ``(t, u, p) -> k``.
        norm: ``(u) -> norm``, of errors divided by the allowed errors.
        derivatives: ``(t, u, p) -> df/du, df/dt`` for Rosenbrock schemes.
    """

    rate: ScalarFunction
    norm: ScalarFunction
    derivatives: ScalarFunction | None

    @property
    def all(self) -> tuple[ScalarFunction, ...]:
        """The functions, in the order in which `library_of` knows them."""
        return tuple(f for f in self if f is not None)


def _functions(f: Rate, rules: Rules, u: Tensor, parameters: Tensor | None) -> _Functions:
    """Return the functions, traced with two trajectories per dimension."""
    ones = lambda components, dtype: torch.ones([2] * (u.dim() - 1) + [components], dtype=dtype)
    own = [] if parameters is None else [ones(parameters.shape[-1], u.dtype)]
    names, dim = ("t", "u", "p")[: 2 + len(own)], u.shape[-1]
    implicit = isinstance(rules.scheme, Rosenbrock)
    # Derivatives of constants that are zero need no operations.
    rate = traced(f, names, constants=implicit)(ones(1, u.dtype), ones(dim, u.dtype), *own)
    norm = traced(rules.control.norm, ("u",))(ones(dim, torch.float64))
    if len(rate.outputs) != dim or len(norm.outputs) != 1:
        raise UntranslatableError("a result of another shape")
    if norm.memory or "dot" in norm.kinds:
        raise UntranslatableError("a norm with weights")
    return _Functions(rate, norm, jacobian(rate, dim) if implicit else None)


def _last(scheme: Scheme | Rosenbrock) -> int:
    """Return the place of the rate at the end of a step among the stages that are kept."""
    if isinstance(scheme, Rosenbrock):
        return len(scheme.b) + 1
    return len(scheme.b) - scheme.first_same_as_last


def _sizes(scheme: Scheme | Rosenbrock) -> tuple[int, int, int]:
    """Return the numbers of stages, of terms of the interpolant, and of states that a step keeps."""
    stages = _last(scheme) + 1 + len(scheme.extra_stages)
    cubic = isinstance(scheme, Scheme) or not scheme.dense_rows
    return stages, len(scheme.dense_weights) + (3 if cubic else 1), stages + 3


def _call(
    function: Any,
    rate: ScalarFunction,
    rules: Rules,
    output: Output,
    limit: int,
    now: Progress,
    parameters: Tensor | None,
) -> Rounds:
    """Call the loop."""
    u, control = now.u, rules.control
    batch, n, wide = u.shape[:-1], u.numel() // u.shape[-1], now.t.dtype

    def components_first(x: Tensor) -> Tensor:
        return x.detach().movedim(-1, 0).contiguous()

    def number(x: Any) -> Tensor:
        return torch.as_tensor(x, dtype=wide).detach().expand(*batch, 1).contiguous()

    def tolerance(x: Any) -> Tensor:
        return components_first(torch.as_tensor(x, dtype=wide).expand(u.shape))

    states = output.states.movedim(-1, 1).contiguous()
    inside = torch.zeros(limit, dtype=torch.uint8)
    rest = {
        name: getattr(now, name).contiguous() for name in ("active", "status", "accepted", "rejected")
    }
    before = {
        "t": number(now.t), "h": number(now.h), "error": number(now.error),
        "u": components_first(u), "k": components_first(now.k), **rest,
    }  # fmt: skip
    after = {name: torch.empty_like(x) for name, x in before.items()}
    memory = (ctypes.c_void_p * max(1, len(rate.memory)))(*[x.data_ptr() for x in rate.memory])
    tensors = {
        "parameters": states if parameters is None else components_first(parameters.expand(*batch, -1)),
        "shortest": number(rules.shortest), "rtol": tolerance(rules.rtol), "atol": tolerance(rules.atol),
        "wanted": output.clock.contiguous(), "states": states, "upcoming": output.upcoming,
        "inside": inside, **before, **{f"new_{name}": x for name, x in after.items()},
    }  # fmt: skip
    call = _Call(
        **{name: x.data_ptr() for name, x in tensors.items()}, memory=ctypes.addressof(memory),
        n=n, times=len(output.clock), each=output.clock.dim() > 1, limit=limit,
        sign=float(rules.sign), least=control.least, most=control.most, safety=control.safety,
        grow=control.grow, shrink=control.shrink, beta=control.beta,
        exponent=1 / (rules.scheme.error_order + 1) - 0.75 * control.beta,
    )  # fmt: skip
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_int], ctypes.c_longlong
    count = function(ctypes.addressof(call), torch.get_num_threads())
    output.states.copy_(states.movedim(1, -1))
    after |= {name: after[name].movedim(0, -1) for name in ("u", "k")}
    return Rounds(count, int(inside.sum()), Progress(**after))


def _source(functions: _Functions, scheme: Scheme | Rosenbrock, dim: int, single: bool) -> str:
    """Return the C code of rounds."""
    suffix = "f" if single else ""
    of_numbers = "OF_VECTORS double pow(double, double);\n" if single else ""
    signature = "const Block *t, const Block *u, const Block *p, Block *out"
    parts = [
        blocks(), prototypes(suffix), of_numbers,
        function_text("rate", signature, functions.rate, suffix),
    ]  # fmt: skip
    weights = scheme.error_weights, scheme.lower_error_weights
    if isinstance(scheme, Rosenbrock):
        assert functions.derivatives is not None
        parts += [
            function_text("jacobian", signature, functions.derivatives, suffix),
            template("rosenbrock.c"), attempt_text(scheme, dim),
        ]  # fmt: skip
        weights = after_rate(weights[0]), ()
    else:
        parts.append(_attempt(scheme, dim))
    parts += [
        _estimate("estimate", weights[0], dim), _estimate("estimate_lower", weights[1], dim),
        _interpolant(scheme, dim),
        '#pragma push_macro("T")\n#undef T\n#define T double\n#define Block Wide',  # for the norm
        function_text("norm", "const Block *u, Block *out", functions.norm, ""),
        '#undef Block\n#pragma pop_macro("T")\n', template("control.c"),
    ]  # fmt: skip
    return "\n".join(parts)


def _attempt(scheme: Scheme, dim: int) -> str:
    """Return the function that attempts a step, whose first stage is known."""
    each = f"  for (int i = 0; i < {dim}; i++)\n    EACH_LANE"
    lines = [
        "static inline void attempt(const Block *t, const Block *h, const Block *u, Block *k,",
        "                           const Block *p, Block *u1, const T *const *memory) {",
        f"  Block x[{dim}], time[1];",
    ]
    for i in range(1, len(scheme.b)):
        row = weighted_stages(scheme._a[i][:i], dim)
        lines += [
            f"{each} x[i][s] = u[i][s] + h[0][s] * ({row});",
            f"  EACH_LANE time[0][s] = t[0][s] + (T){scheme._c[i]!r} * h[0][s];",
            f"  rate((const Block *)time, (const Block *)x, p, k + {i * dim}, memory);",
        ]
    lines.append(f"{each} u1[i][s] = u[i][s] + h[0][s] * ({weighted_stages(scheme._b, dim)});")
    if not scheme.first_same_as_last:
        last = len(scheme.b) * dim
        lines += [
            "  EACH_LANE time[0][s] = t[0][s] + h[0][s];",
            f"  rate((const Block *)time, (const Block *)u1, p, k + {last}, memory);",
        ]
    return "\n".join([*lines, "}", ""])


def _interpolant(scheme: Scheme | Rosenbrock, dim: int) -> str:
    """Return the function that computes the coefficients of `attractor.core.interpolant`."""
    each = f"  for (int i = 0; i < {dim}; i++)\n    EACH_LANE"
    head = [
        "static inline void interpolant(const Block *t, const Block *h, const Block *u,",
        "                               const Block *u1, Block *k, const Block *p, Block *out,",
        "                               const T *const *memory) {",
    ]
    if isinstance(scheme, Rosenbrock) and scheme.dense_rows:
        return "\n".join([*head, *interpolant_lines(scheme, dim), "}", ""])
    last = _last(scheme) * dim
    lines = [
        *head,
        f"  Block x[{dim}], time[1];",
        f"{each} {{",
        "      T rise = u1[i][s] - u[i][s];",
        "      out[i][s] = rise;",
        f"      out[{dim} + i][s] = h[0][s] * k[i][s] - rise;",
        f"      out[{2 * dim} + i][s] = 2 * rise - h[0][s] * (k[i][s] + k[{last} + i][s]);",
        "    }",
    ]
    if isinstance(scheme, Scheme):
        for j, row in enumerate(scheme.extra_stages, _last(scheme) + 1):
            lines += [
                f"{each} x[i][s] = u[i][s] + h[0][s] * ({weighted_stages(row, dim)});",
                f"  EACH_LANE time[0][s] = t[0][s] + (T){float(sum(row))!r} * h[0][s];",
                f"  rate((const Block *)time, (const Block *)x, p, k + {j * dim}, memory);",
            ]
        lines += [
            f"{each} out[{(3 + j) * dim} + i][s] = h[0][s] * ({weighted_stages(row, dim)});"
            for j, row in enumerate(scheme.dense_weights)
        ]
    return "\n".join([*lines, "}", ""])


def _estimate(name: str, weights: tuple[float, ...], dim: int) -> str:
    """Return the function that estimates the error of each component."""
    return "\n".join(
        [
            f"static inline void {name}(const Block *h, const Block *k, Wide *out) {{",
            f"  for (int i = 0; i < {dim}; i++)",
            "    EACH_LANE out[i][s] = __builtin_fabs(",
            f"      (double)(h[0][s] * ({weighted_stages(weights, dim)})));",
            "}", "",
        ]
    )  # fmt: skip
