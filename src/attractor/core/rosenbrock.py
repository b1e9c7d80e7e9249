"""Rosenbrock schemes: linearly implicit steps for stiff equations.

A stage solves one linear system with the matrix ``I - gamma dt J``, where J is the Jacobian of the
rate at the start of the step. There is no iteration, so that all trajectories of a batch take the same
operations: one batched LU factorisation per step, and one pair of triangular solves per stage. See
Hairer and Wanner, "Solving Ordinary Differential Equations II", IV.7.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from attractor.core.linearisation import linear_solver, linearised
from attractor.core.rates import (
    Rate,
    add_increment,
    call_rate,
    check_distinct,
    check_state,
    weighted_sum,
)
from attractor.core.step import Step, with_parameters
from attractor.core.tableau_checks import Coefficient, as_fractions, check_stages, checked_order
from attractor.core.trees import rosenbrock_defect

TOLERANCE = 1e-10  # of order conditions: coefficients are printed with 16 digits and are as large as 200

Row = tuple[float, ...]


@dataclass(frozen=True)
class Rosenbrock:
    """A Rosenbrock scheme, in the form in which codes print their coefficients.

    With the Jacobian J and the derivative ``f_t`` of the rate in time, both at the start of the step,
    the stages k_i of a step of size h from u at t are::

        (I - gamma h J) k_i = gamma (f(t + alpha_i h, u + h sum_j a_ij k_j) + sum_j c_ij k_j + d_i h f_t)

    and the new state is ``u + h sum_i b_i k_i``. The matrix of the standard form is
    ``Gamma = (I / gamma - c)^-1``; d holds the sums of its rows, and alpha those of ``a Gamma``.

    Args:
        name: Name for `get_scheme` and tables.
        gamma: The diagonal of Gamma, which all stages share.
        a: One row of weights per stage; row i needs its first i entries.
        c: Likewise.
        b: Weights of the stages in the slope.
        order: Order of convergence, checked against the order conditions to 1e-10.
        b_low: Weights of an embedded slope of lower order; with it the scheme can control its error.
        dense_rows: Rows of weights d of the interpolant inside a step,
            ``u + theta (rise + (1 - theta) (h d_1 k + theta (h d_2 k + (1 - theta) (h d_3 k + ...))))``,
            where ``rise`` is the difference of the states at both ends. Without them the interpolant is
            a cubic Hermite polynomial.

    Raises:
        ValueError: A row has a wrong length, or the order conditions of `order` do not hold.

    >>> Rosenbrock("rosenbrock_euler", gamma=1, a=[[]], c=[[]], b=[1], order=1)
    Rosenbrock('rosenbrock_euler', order 1, 1 stages)
    """

    name: str
    gamma: float
    a: tuple[Row, ...]
    c: tuple[Row, ...]
    b: Row
    order: int
    b_low: Row | None = None
    dense_rows: tuple[Row, ...] = ()
    order_low: int = field(init=False, default=0, repr=False, compare=False)
    alpha: Row = field(init=False, default=(), repr=False, compare=False)
    d: Row = field(init=False, default=(), repr=False, compare=False)
    error_weights: Row = field(init=False, default=(), repr=False, compare=False)

    # Attributes of `Scheme` that have no meaning here.
    lower_error_weights = ()
    extra_stages = ()
    first_same_as_last = False

    def __init__(
        self,
        name: str,
        gamma: Coefficient,
        a: Sequence[Sequence[Coefficient]],
        c: Sequence[Sequence[Coefficient]],
        b: Sequence[Coefficient],
        order: int,
        b_low: Sequence[Coefficient] | None = None,
        dense_rows: Sequence[Sequence[Coefficient]] = (),
    ) -> None:
        every_row = [*_rows(name, a, c, dense_rows), b, *([] if b_low is None else [b_low])]
        if not all(hasattr(row, "__len__") and not isinstance(row, str) for row in every_row):
            raise TypeError(
                f"{name}: a, c and dense_rows are lists of rows, b and b_low are rows of coefficients"
            )
        stages = len(b)
        check_stages(name, stages)
        put = lambda key, value: object.__setattr__(self, key, value)
        put("name", name)
        put("order", checked_order(name, order))
        put("gamma", _floats(name, [gamma])[0])
        if self.gamma <= 0:
            raise ValueError(
                f"{name}: gamma = {gamma!r} must be positive, or the scheme is unstable for stiff "
                "equations"
            )
        for key, rows in (("a", a), ("c", c)):
            if [len(row) for row in rows] != list(range(stages)):
                raise ValueError(
                    f"{name}: the rows of {key} have {[len(row) for row in rows]} entries; with "
                    f"{stages} weights in b they need {list(range(stages))}"
                )
            put(key, tuple(_floats(name, row) for row in rows))
        full_rows = {"b": b, "b_low": b_low, **{f"dense_rows[{i}]": x for i, x in enumerate(dense_rows)}}
        for key, row in full_rows.items():
            if row is not None and len(row) != stages:
                raise ValueError(f"{name}: {key} has {len(row)} entries but b has {stages}")
        put("b", _floats(name, b))
        put("b_low", None if b_low is None else _floats(name, b_low))
        put("dense_rows", tuple(_floats(name, row) for row in dense_rows))

        weights, alpha, beta = self.standard_form()
        put("alpha", tuple(alpha.sum(1).tolist()))
        put("d", tuple((beta - alpha).sum(1).tolist()))
        reached = _order(weights, alpha, beta, order)
        if reached < order:
            residual = rosenbrock_defect(reached + 1, weights, alpha, beta)
            raise ValueError(
                f"{name}: claims order {order}, but the conditions of order {reached + 1} have a "
                f"residual of {residual:.3g}; check the coefficients, or pass order={reached}"
            )
        if self.b_low is not None:
            low = np.array(self.b_low) @ (beta - alpha)
            put("order_low", _order(low, alpha, beta, order + 1))
            if self.b_low == self.b or not self.order_low:
                raise ValueError(f"{name}: b_low is not an embedded slope of order 1 or more")
            put("error_weights", tuple(x - y for x, y in zip(self.b, self.b_low)))

    def __repr__(self) -> str:
        pair = f" (error from order {self.error_order})" if self.b_low else ""
        return f"Rosenbrock({self.name!r}, order {self.order}{pair}, {len(self.b)} stages)"

    def standard_form(self) -> tuple[Any, Any, Any]:
        """Return the arrays b [s], alpha [s, s] and beta = alpha + Gamma [s, s] of the standard form."""
        stages = len(self.b)
        a, c = np.zeros((2, stages, stages))
        for i in range(stages):
            a[i, :i], c[i, :i] = self.a[i], self.c[i]
        gammas = np.linalg.inv(np.eye(stages) / self.gamma - c)
        return np.array(self.b) @ gammas, a @ gammas, a @ gammas + gammas

    @property
    def rate_calls(self) -> int:
        """Calls of the rate per step: one per stage, and one for its derivatives."""
        return len(self.b) + 1

    @property
    def error_order(self) -> int:
        """Order of the error estimate."""
        return min(self.order, self.order_low)

    @property
    def dense_weights(self) -> tuple[Row, ...]:
        """The rows of the interpolant."""
        return self.dense_rows

    @property
    def interpolates(self) -> bool:
        """Whether the interpolant of a step is as exact as error control needs it."""
        return bool(self.dense_rows) or self.order <= 3

    @property
    def _b(self) -> Row:
        return self.b

    def slope(self, f: Rate, t: Any, u: Tensor, dt: Any) -> Tensor:
        """Return S, so that a step is ``u + dt * S``. Arguments as in `Scheme.slope`."""
        return weighted_sum(self.b, self.stages(f, t, u, dt))

    def step(self, f: Rate, t: Any, u: Tensor, dt: Any, parameters: Tensor | None = None) -> Step:
        """Return the step from u, which a correction may add to. Arguments as in `Scheme.step`."""
        stages = self.stages(with_parameters(f, parameters), t, u, dt)
        return Step(u, weighted_sum(self.b, stages), dt, t, tuple(stages), parameters)

    def stages(self, f: Rate, t: Any, u: Tensor, dt: Any, first: Tensor | None = None) -> list[Tensor]:
        """Return the stages k_i ``[*batch, d]``.

        Where the matrix of a trajectory is singular or not finite, its stages are not finite.

        Args:
            f: The rate. Its derivatives are computed by `torch.func`, unless it is a `Linearised` rate.
            t: Time, a number or a tensor that broadcasts against ``[*batch, 1]``.
            u: States ``[*batch, d]``, real.
            dt: Step size, likewise.
            first: The rate at u; None to compute it.
        """
        check_state(u, t, dt)
        _check_real(self.name, u)
        for what, x in (("t", t), ("dt", dt)):
            if isinstance(x, Tensor) and x.dim() and x.shape[-1] != 1:
                raise ValueError(
                    f"{what} {list(x.shape)} must be [*batch, 1]: {self.name} solves a linear system "
                    "for all components of a state at once"
                )
        jacobian, in_time = linearised(self.name, f, t, u)
        matrix = -self.gamma * (dt[..., None] if isinstance(dt, Tensor) and dt.dim() else dt) * jacobian
        solve = linear_solver(matrix)
        k: list[Tensor] = []  # Dynamo cannot call list[Tensor]
        rates: list[Tensor] = []
        for i, (a, c) in enumerate(zip(self.a, self.c)):
            if i:
                rates.append(call_rate(f, t + self.alpha[i] * dt, add_increment(u, dt, a, k)))
                check_distinct(f, t, u, rates)
            else:
                rates.append(call_rate(f, t, u) if first is None else first)
            right = rates[-1] + (self.d[i] * dt) * in_time
            k.append(solve(self.gamma * (right + weighted_sum(c, k) if k else right)))
        return k

    def check_rate(self, f: Rate, t: Any, u: Tensor) -> None:
        """Raise unless the state is real and the rate can be differentiated."""
        check_state(u, t)
        _check_real(self.name, u)
        if u.numel():
            linearised(self.name, f, t, u.detach())


def _rows(name: str, *matrices: Any) -> list[Any]:
    try:
        return [row for matrix in matrices for row in matrix]
    except TypeError as error:
        raise TypeError(f"{name}: a, c and dense_rows are lists of rows of coefficients") from error


def _floats(name: str, row: Sequence[Coefficient]) -> Row:
    values = tuple(map(float, as_fractions(name, row)))
    if not all(map(math.isfinite, values)):
        raise ValueError(f"{name}: {list(row)!r} contains coefficients that are not finite")
    return values


def _order(b: Any, alpha: Any, beta: Any, most: int) -> int:
    """Return the order of the weights b, at most `most`."""
    order = 0
    while order < most and rosenbrock_defect(order + 1, b, alpha, beta) <= TOLERANCE:
        order += 1
    return order


def _check_real(name: str, u: Tensor) -> None:
    if u.is_complex():
        raise TypeError(
            f"{name} is implemented for real states, and u has dtype {u.dtype}; use torch.view_as_real "
            "and a rate of real and imaginary parts"
        )


_A4 = [1.221224509226641, 6.019134481288629, 12.53708332932087, -0.6878860361058950]

RODAS4 = Rosenbrock(  # RODAS of Hairer and Wanner (II, IV.7 and VI.4): stiffly accurate, L-stable
    "rodas4",
    0.25,
    [
        [],
        [1.544],
        [0.9466785280815826, 0.2557011698983284],
        [3.314825187068521, 2.896124015972201, 0.9986419139977817],
        _A4,
        [*_A4, 1],
    ],
    [
        [],
        [-5.6688],
        [-2.430093356833875, -0.2063599157091915],
        [-0.1073529058151375, -9.594562251023355, -20.47028614809616],
        [7.496443313967647, -10.24680431464352, -33.99990352819905, 11.70890893206160],
        [
            8.083246795921522, -7.981132988064893, -31.52159432874371, 16.31930543123136,
            -6.058818238834054,
        ],
    ],
    [*_A4, 1, 1],
    4,
    b_low=[*_A4, 1, 0],
    dense_rows=[
        [
            10.12623508344586, -7.487995877610167, -34.80091861555747, -7.992771707568823,
            1.025137723295662, 0,
        ],
        [
            -0.6762803392801253, 6.087714651680015, 16.43084320892478, 24.76722511418386,
            -6.594389125716872, 0,
        ],
    ],
)  # fmt: skip

_A5 = [
    -7.502846399306121, 2.561846144803919, -11.627539656261098, -0.18268767659942256,
    0.030198172008377946,
]  # fmt: skip
# The interpolant of the paper is u + theta (rise + (1 - theta) (h_2 + theta h_3 + theta^2 h_4)).
_H3 = [
    -9.91568850695171, -0.9689944594115154, 3.0438037242978453, -24.495224566215796, 20.176138334709044,
    15.98066361424651, -6.789040303419874, -6.710236069923372,
]  # fmt: skip
_H4 = [
    11.419903575922262, 2.8879645146136994, 72.92137995996029, 80.12511834622643, -52.072871366152654,
    -59.78993625266729, -0.15582684282751913, 4.883087185713722,
]  # fmt: skip

RODAS5P = Rosenbrock(  # Steinebach 2023: order 5(4), stiffly accurate, L-stable
    "rodas5p",
    0.21193756319429014,
    [
        [],
        [3],
        [2.849394379747939, 0.45842242204463923],
        [-6.954028509809101, 2.489845061869568, -10.358996098473584],
        [2.8029986275628964, 0.5072464736228206, -0.3988312541770524, -0.04721187230404641],
        _A5,
        [*_A5, 1],
        [*_A5, 1, 1],
    ],
    [
        [],
        [-14.155112264123755],
        [-17.97296035885952, -2.859693295451294],
        [147.12150275711716, -1.41221402718213, 71.68940251302358],
        [165.43517024871676, -0.4592823456491126, 42.90938336958603, -5.961986721573306],
        [
            24.854864614690072, -3.0009227002832186, 47.4931110020768, 5.5814197821558125,
            -0.6610691825249471,
        ],
        [
            30.91273214028599, -3.1208243349937974, 77.79954646070892, 34.28646028294783,
            -19.097331116725623, -28.087943162872662,
        ],
        [
            37.80277123390563, -3.2571969029072276, 112.26918849496327, 66.9347231244047,
            -40.06618937091002, -54.66780262877968, -9.48861652309627,
        ],
    ],
    [*_A5, 1, 1, 1],
    5,
    b_low=[*_A5, 1, 1, 0],
    dense_rows=[
        [
            25.948786856663858, -2.5579724845846235, 10.433815404888879, -2.3679251022685204,
            0.524948541321073, 1.1241088310450404, 0.4272876194431874, -0.17202221070155493,
        ],
        [x + y for x, y in zip(_H3, _H4)],
        [-y for y in _H4],
    ],
)  # fmt: skip
