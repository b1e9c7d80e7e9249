# ruff: noqa: RET505, RUF005, SIM102 (Triton needs the else, unpacks nothing, and asks constants first)
"""Steps of a hybrid solver in few kernels: one for all of them, or two a step.

The scheme's slope and what the correction does around its network are formulas, found from what they do
to one state (see `formulas`). A small network goes by lanes (see `perceptron`)
in the same kernel: a program then follows its states through all steps without a word to the others. A
larger one has a kernel of its own, and all that lies between two of its calls has another.
"""

import copy
from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from attractor.core.step import Step
from attractor.ode import fused
from attractor.ode.fused import FEW, QUICK, formulas, perceptron
from attractor.ode.fused.perceptron import Plan, _coefficients, _through, lanes


def plan(n: int, width: int, inputs: int, outputs: int) -> Plan:
    """How the states are shared out. Every warp of a program computes the slopes of all its states."""
    held = 8 if inputs + outputs <= 8 else 4
    all_units = max(32, triton.next_power_of_2(width))
    if n <= perceptron.PROCESSORS:
        hidden = min(256, all_units)
        return Plan(1, hidden, hidden // 32)
    return lanes(n, held, 128 if n <= 4 * held * perceptron.PROCESSORS else 32, all_units)


@triton.jit
def _operation(a: tl.tensor, b: tl.tensor, OPERATION: tl.constexpr, C: tl.constexpr) -> tl.tensor:
    """One of `formulas.OPERATIONS`."""
    if OPERATION == "add":
        return a + b
    elif OPERATION == "subtract":
        return a - b
    elif OPERATION == "multiply":
        return a * b
    elif OPERATION == "divide":
        return a / b
    elif OPERATION == "shift":
        return a + C
    elif OPERATION == "scale":
        return a * C
    elif OPERATION == "over":
        return a / C
    elif OPERATION == "from":
        return C - a
    elif OPERATION == "under":
        return C / a
    elif OPERATION == "fill":
        return tl.zeros_like(a) + C
    elif OPERATION == "sine":
        return tl.sin(a)
    elif OPERATION == "cosine":
        return tl.cos(a)
    elif OPERATION == "exponential":
        return tl.exp(a)
    elif OPERATION == "logarithm":
        return tl.log(a)
    elif OPERATION == "root":
        return tl.sqrt(a)
    else:
        tl.static_assert(OPERATION == "absolute")
        return tl.abs(a)


@triton.jit
def _evaluated(v: tl.tuple, FORMULA: tl.constexpr) -> tl.tuple:
    """Results of a formula, as `_flat` has it, of variables v."""
    for k in tl.static_range(tl.constexpr(FORMULA[0])):
        a, b = v[FORMULA[3 + 4 * k]], v[FORMULA[4 + 4 * k]]
        r = _operation(a, b, tl.constexpr(FORMULA[2 + 4 * k]), tl.constexpr(FORMULA[5 + 4 * k]))
        v = v + (r,)
    found = ()
    for k in tl.static_range(tl.constexpr(FORMULA[1])):
        found = found + (v[FORMULA[2 + 4 * FORMULA[0] + k]],)  # type: ignore[assignment]
    return found


@triton.jit(do_not_specialize=["steps"])  # 1 would become a constant
def _steps(
    u: tl.tensor, t: tl.tensor, first: tl.tensor, first_bias: tl.tensor, head: tl.tensor,
    head_bias: tl.tensor, around: tl.tensor, top: tl.tensor, bottom: tl.tensor, n: tl.tensor,
    u_n: tl.tensor, u_i: tl.tensor, steps: tl.tensor,
    SLOPE: tl.constexpr, SEEN: tl.constexpr, STEPPED: tl.constexpr, TIMED: tl.constexpr,
    DT: tl.constexpr, DIM: tl.constexpr, INPUTS: tl.constexpr, WIDTH: tl.constexpr,
    OUTPUTS: tl.constexpr, ACTIVATION: tl.constexpr, SKIP: tl.constexpr, ROWS: tl.constexpr,
    HIDDEN: tl.constexpr,
) -> None:  # fmt: skip
    """Some states, in place; t too, where nothing depends on it. Without INPUTS there is no network."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < n
    c = _coefficients(top, bottom, ACTIVATION)
    us = ()
    for i in tl.static_range(DIM):
        us = us + (tl.load(u + row * u_n + i * u_i, mask=inside, other=1.0),)  # type: ignore[assignment]
    began = tl.load(t)
    step = steps * 0
    while step < steps:  # with `for`, Triton computes slopes twice, once of them in every lane
        now = (began + step.to(tl.float64) * DT).to(u.dtype.element_ty)
        step += 1
        slope = _evaluated((now,) + us, SLOPE)
        if INPUTS == 0:
            us = _evaluated((now,) + us + slope + slope, STEPPED)
        else:
            xs = ()
            seen = _evaluated((now,) + us + slope, SEEN)
            for i in tl.static_range(INPUTS):
                here = tl.broadcast_to(seen[i].to(tl.float32), [ROWS])  # a phase is one for all
                xs = xs + (here,)  # type: ignore[assignment]
            totals = _through(
                xs, first, first_bias, head, c, INPUTS, WIDTH, OUTPUTS, ACTIVATION, ROWS, HIDDEN
            )  # fmt: skip
            q = ()
            for o in tl.static_range(OUTPUTS):
                total = totals[o] + tl.load(head_bias + o).to(tl.float32)
                if SKIP:
                    for i in tl.static_range(INPUTS):
                        total += xs[i] * tl.load(around + o * INPUTS + i).to(tl.float32)
                q = q + (total.to(u.dtype.element_ty),)  # type: ignore[assignment]
            us = _evaluated((now,) + us + slope + q, STEPPED)
    for i in tl.static_range(DIM):
        tl.store(u + row * u_n + i * u_i, us[i], mask=inside)
    if not TIMED:
        if tl.program_id(0) == 0:
            tl.store(t, began + steps.to(tl.float64) * DT)


@triton.jit(do_not_specialize=["step"])
def _between(
    u: tl.tensor, slopes: tl.tensor, q: tl.tensor, x: tl.tensor, t: tl.tensor, step: tl.tensor,
    n: tl.tensor, u_n: tl.tensor, u_i: tl.tensor,
    SLOPE: tl.constexpr, SEEN: tl.constexpr, STEPPED: tl.constexpr, DT: tl.constexpr,
    DIM: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, ENDS: tl.constexpr,
    BEGINS: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """What is after the network in step - 1, if that ends here, and before it in step, if that begins.

    slopes ``[DIM, n]``, q ``[n, OUTPUTS]``, x ``[n, INPUTS]``.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < n
    now = tl.load(t) + step.to(tl.float64) * DT
    us = ()
    for i in tl.static_range(DIM):
        us = us + (tl.load(u + row * u_n + i * u_i, mask=inside, other=1.0),)  # type: ignore[assignment]
    if ENDS:
        slope = ()
        for i in tl.static_range(DIM):
            slope = slope + (tl.load(slopes + i * n + row, mask=inside, other=0.0),)  # type: ignore[assignment]
        qs = ()
        for o in tl.static_range(OUTPUTS):
            qs = qs + (tl.load(q + row * OUTPUTS + o, mask=inside, other=0.0),)  # type: ignore[assignment]
        before = (now - DT).to(u.dtype.element_ty)
        us = _evaluated((before,) + us + slope + qs, STEPPED)
        for i in tl.static_range(DIM):
            tl.store(u + row * u_n + i * u_i, us[i], mask=inside)
    if BEGINS:
        here = now.to(u.dtype.element_ty)
        new = _evaluated((here,) + us, SLOPE)
        for i in tl.static_range(DIM):
            tl.store(slopes + i * n + row, new[i], mask=inside)
        seen = _evaluated((here,) + us + new, SEEN)
        for i in tl.static_range(INPUTS):
            tl.store(x + row * INPUTS + i, tl.broadcast_to(seen[i], [ROWS]), mask=inside)


class WholeSteps:
    """Steps of a solver in few kernels, for states like u.

    Args:
        rate, scheme, dt: as in `HybridSolver`.
        correction: with a `Network` that `fused.usable` accepts, or None for plain steps.
        u: states ``[*batch, d]``.

    Attributes:
        timed: whether anything depends on the time.
        lines: of all formulas together; compilers take some milliseconds for each.

    Raises:
        formulas.CannotWriteError: a part of a step is more than a formula for each number.
    """

    def __init__(
        self, rate: Any, scheme: Any, correction: nn.Module | None, dt: float, u: Tensor
    ) -> None:
        net: Any = getattr(correction, "net", None)
        if getattr(correction, "needs_stages", False) or getattr(net, "parameter_count", 0):
            raise formulas.CannotWriteError("formulas have the state and the slope, and nothing else")
        self.net = net
        self.dt, dim = dt, u.shape[-1]
        self.sizes = (dim, 0, 1, dim)
        if net is not None:
            layer = net.body.layers[0]
            self.sizes = (dim, layer.in_features, layer.out_features, net.head.out_features)
        if max(self.sizes[1], self.sizes[3]) > QUICK:
            raise formulas.CannotWriteError(f"more than {QUICK} inputs or outputs are too many")
        around, given = _around(correction)

        def slope(t: Tensor, u: Tensor) -> Tensor:
            return scheme.slope(rate, t, u, dt)

        def seen(t: Tensor, u: Tensor, slope: Tensor) -> Tensor:
            given.result = u  # whatever; it is not looked at
            around(Step(u, slope, dt, t))
            return given.seen

        def stepped(t: Tensor, u: Tensor, slope: Tensor, q: Tensor) -> Tensor:
            given.result = q
            plain = u + dt * slope
            return plain if around is None else plain + around(Step(u, slope, dt, t))

        state, out = [(), (dim,)], (self.sizes[3],)
        found = [
            formulas.written(slope, state, u.detach()),
            formulas.written(seen, [*state, (dim,)], u.detach()) if net is not None else None,
            formulas.written(stepped, [*state, (dim,), out], u.detach()),
        ]
        self.timed = any(f.uses(0) for f in found if f is not None)
        self.parts = [() if f is None else _flat(f) for f in found]
        self.lines = sum(len(f.lines) for f in found if f is not None)

    def __call__(self, u: Tensor, t: Tensor, steps: int) -> None:
        """Move states u ``[*batch, d]`` and the time t, a float64 of no dimension, in place."""
        rows = u.view(-1, self.sizes[0])
        with torch.cuda.device(u.device) if u.is_cuda else nullcontext():
            if self.sizes[1] and sum(self.sizes[1::2]) > FEW:
                self._by_turns(rows, t, steps)
            else:
                self._at_once(rows, t, steps)

    def _at_once(self, u: Tensor, t: Tensor, steps: int) -> None:
        net = self.net
        dim, inputs, width, outputs = self.sizes
        cut, weights, rest = Plan(32, 32, 1), [u] * 7, ("none", False)  # of plain steps
        if net is not None:
            layer, activation = net.body.layers[0], net.body.activations[0]
            learned = (activation.top, activation.bottom) if hasattr(activation, "top") else (None, None)
            way = None if net.around is None else net.around.weight
            found = (layer.weight, layer.bias, net.head.weight, net.head.bias, way, *learned)
            weights = [net.head.weight if w is None else w.contiguous() for w in found]
            cut, rest = plan(len(u), width, inputs, outputs), (net.config["activation"], way is not None)
        # As many registers as let all warps of 20,000 states run at the same time.
        most = (96 if u.dtype == torch.float32 else 128) if cut.warps == 1 and net is not None else None
        _steps[(triton.cdiv(len(u), cut.rows),)](
            u, t, *weights, len(u), *u.stride(), steps, *self.parts, self.timed, self.dt, dim, inputs,
            width, outputs, *rest, cut.rows, cut.hidden, num_warps=cut.warps, maxnreg=most,
        )  # fmt: skip
        if self.timed:
            t.add_(steps * self.dt)

    def _by_turns(self, u: Tensor, t: Tensor, steps: int) -> None:
        (n, dim), (_, inputs, _, outputs) = u.shape, self.sizes
        slopes, x = u.new_empty(dim, n), u.new_empty(n, inputs)
        q, rows = x, 32 if n <= 64 * perceptron.PROCESSORS else 128
        for step in range(steps + 1):
            _between[(triton.cdiv(n, rows),)](
                u, slopes, q, x, t, step, n, *u.stride(), *self.parts, self.dt, dim, inputs, outputs,
                step > 0, step < steps, rows, num_warps=rows // 32,
            )  # fmt: skip
            if step < steps:
                q = fused.kernel(self.net, x)
        t.add_(steps * self.dt)


def _flat(f: formulas.Formula) -> tuple[Any, ...]:
    """How many lines and results, the lines, and the results: constants of kernels are not nested."""
    return len(f.lines), len(f.results), *(x for line in f.lines for x in line), *f.results


class _Given(nn.Module):
    """Stands in for a network: keeps what it sees, returns what it was given."""

    seen: Tensor
    result: Tensor

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.period = getattr(net, "period", None)

    def forward(self, x: Tensor) -> Tensor:
        """What was given."""
        self.seen = x
        return self.result


def _around(correction: nn.Module | None) -> tuple[Any, _Given]:
    """The correction with its network's result given."""
    given = _Given(getattr(correction, "net", None))
    if correction is None:
        return None, given
    around = copy.copy(correction)
    around._modules = {**correction._modules, "net": given}
    return around, given
