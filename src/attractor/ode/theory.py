"""The AttNS paper's theory as numbers: Lipschitz constants, error bounds, second derivatives.

All norms are Euclidean, of matrices spectral. The paper's Section 5 and Appendices C and D mix them
with maxima over components, and need these repairs:

- The proof of Theorem 5.1 gives ``alpha = M exp(2 T L) / (2 L)`` (Eq. 15, 19, 42). Read with the L
  above the line, as the statement allows, alpha has the wrong unit and is no bound for small L. The
  classical constant ``M (exp(T L) - 1) / (2 L)`` is smaller and stays finite as L goes to 0.
- M is a maximum over components in the statement; for Euclidean errors it has to be ``sup |u''|``.
- delta is the mean square of the residuals along the one trajectory that is followed. The training
  loss is their mean over training states: it makes delta small only where the fit generalises.
- alpha multiplies the *fine* step. Nothing converges as the step of the solver shrinks, because Q is
  fitted to one step size and does not vanish with it.
- Theorem 5.2 needs only a denominator away from 0 (Lemma D.2 also asks that of the numerator, a
  cubic, which always has a root). The constant is then global, as the slope tends to ``a3 / b2``.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from numpy.polynomial import Polynomial
from torch import Tensor, nn

from attractor.common.checks import check_choice, check_tensor, check_time, check_values, is_number
from attractor.core.rates import Rate, broadcasts, call_rate
from attractor.core.step import Step, correction_of_step
from attractor.ode.corrections import CSM, AttNS, AttNSM, FSNet, Linear, NeurVec
from attractor.ode.corrections.network import Affine, Layers, Rational, Sine
from attractor.ode.solver import HybridSolver

STEEPEST: dict[type[nn.Module], float] = {
    Sine: 1.0,
    nn.Tanh: 1.0,
    nn.ReLU: 1.0,
    nn.GELU: (1 + math.erf(1)) / 2 + math.exp(-1) / math.sqrt(math.pi),  # at sqrt 2
    nn.SiLU: 1.09983933,  # 1/2 + x/4 where x tanh(x/2) = 2
}


def steepest(activation: nn.Module) -> float:
    """The Lipschitz constant of an activation: the largest ``|a'(x)|`` over all x.

    A rational one has it where ``a''`` vanishes, at a kink of its denominator, or at infinity; it is
    infinite if the numerator outgrows the denominator by more than one power.
    """
    if not isinstance(activation, Rational):
        if type(activation) not in STEEPEST:
            known = ", ".join(kind.__name__ for kind in STEEPEST)
            raise ValueError(
                f"nobody knows how steep a {type(activation).__name__} is; known are {known}, Rational"
            )
        return STEEPEST[type(activation)]
    top, inner = Polynomial(activation.top.tolist()).trim(), Polynomial([0, *activation.bottom.tolist()])
    outer = (1 + inner).trim()
    rise = top.degree() - outer.degree()
    if rise > 1:
        return math.inf
    found = [abs(top.coef[-1] / outer.coef[-1]) if rise == 1 else 0.0]
    for sign in (1, -1):  # 1 + |inner| is 1 + inner here, 1 - inner there, and 1 at the kinks
        bottom = 1 + sign * inner
        above = top.deriv() * bottom - top * bottom.deriv()
        turning = (above.deriv() * bottom - 2 * above * bottom.deriv()).roots().real
        inside = [x for x in turning if sign * inner(x) >= 0]
        kinks = inner.trim().roots().real if any(inner.coef) else [0.0]
        found += [abs(above(x) / bottom(x) ** 2) for x in (*inside, *kinks)]
    return float(max(found))


def lipschitz_bound(correction: nn.Module, dt: float) -> float:
    """An upper bound of the Lipschitz constant of ``(u, slope) -> correction`` at one dt.

    The product of the spectral norms of the matrices and of the steepest slopes of the activations,
    a residual layer counting 1 more, plus the norm of the linear way around; exact for `Linear`. For
    AttNS it is the ``k dt L_att`` of Theorem 5.1. A fit whose large weights cancel makes it far
    larger than `lipschitz_observed`.

    Raises:
        ValueError: for AttNS-m, LSTM and Transformer bodies, and corrections not of this package.
    """
    if isinstance(correction, AttNSM):
        raise ValueError(
            "AttNS-m multiplies by the slope, so it has no Lipschitz constant over all slopes; "
            "use lipschitz_observed on the states that matter"
        )
    if not isinstance(correction, AttNS | NeurVec | CSM | FSNet | Linear):
        raise ValueError(f"a {type(correction).__name__} has no known bound; use lipschitz_observed")
    net: Any = correction.net
    head, dim = net.head.weight.double(), net.head.out_features
    # What the network sees is affine in (u, slope); its matrix joins the first layer.
    see = lambda x: correction.inputs(x[:, :dim], x[:, dim:], dt, 0.0)
    seen = _jacobians(see, torch.zeros(1, 2 * dim).to(net.head.weight))[0].double()
    scale: Any = correction.scale_out.double()[:, None] if isinstance(correction, FSNet) else 1.0
    if isinstance(net, Affine):
        return _norm(head @ seen)
    if not isinstance(net.body, Layers):
        raise ValueError(
            f"no useful bound for a body of {type(net.body).__name__}: dot-product attention is not "
            "Lipschitz on unbounded inputs, and a bound for an LSTM grows exponentially with its "
            "length; use lipschitz_observed"
        )
    bound, body = _norm(scale * head), net.body
    for i, (layer, activation) in enumerate(zip(body.layers, body.activations)):
        weight: Any = layer.weight.double()
        gain = steepest(activation) * _norm(weight if i else weight @ seen)
        bound *= gain + (1 if body.residual and i else 0)
    return bound if net.around is None else bound + _norm(scale * net.around.weight.double() @ seen)


def lipschitz_observed(
    correction: Callable[..., Tensor], u: Tensor, slope: Tensor, dt: float, t: Any = None
) -> float:
    """The largest spectral norm of the derivative of the correction by (u, slope) ``[*batch, d]`` each.

    A lower bound of the Lipschitz constant, and all there is to say along these states.
    """
    _check_states(u, "u", "[*batch, d]")
    _check_states(slope, "slope", "[*batch, d]")
    if u.shape != slope.shape or u.device != slope.device or not u.numel():
        raise ValueError(f"u {list(u.shape)} and slope {list(slope.shape)} must be alike, and not empty")
    if not is_number(dt) and not (isinstance(dt, Tensor) and dt.dim() == 0 and dt.is_floating_point()):
        raise TypeError(f"dt = {dt!r} must be a number")
    dim = u.shape[-1]
    of_step: Any = correction_of_step(correction)
    added = lambda x: of_step(Step(x[:, :dim], x[:, dim:], dt, t))
    return _norm(_jacobians(added, torch.cat((u, slope), -1).reshape(-1, 2 * dim)))


def second_derivative(rate: Rate, u: Tensor, t: Any = 0.0) -> Tensor:
    """``u'' = df/dt + (df/du) f`` of the solution through each state u ``[*batch, d]`` at time t.

    Forward mode, so it costs about two rate calls. A rate that turns t into a number hides df/dt.
    """
    _check_states(u, "u", "[*batch, d]")
    check_time(t, u)
    if isinstance(t, Tensor) and not broadcasts(t, u.shape):
        raise ValueError(f"t {list(t.shape)} does not broadcast against u {list(u.shape)}")
    u = u.contiguous()  # jvp writes beside it, which expanded memory cannot take
    t = torch.as_tensor(t, dtype=u.dtype, device=u.device)
    f = lambda t, u: call_rate(rate, t, u)
    return torch.func.jvp(f, (t, u), (torch.ones_like(t), f(t, u)))[1]


def curvature_distribution(
    rate: Rate,
    u: Tensor,
    levels: Tensor,
    of: Literal["states", "components", "trajectories"] = "states",
    t: Tensor | None = None,
) -> Tensor:
    """The share of states whose ``max_i |u_i''|`` is below each level (Table 6), ``[len(levels)]``.

    The paper has 1,000 trajectories and shares such as 55.35 %, so it does not count trajectories;
    whether its maximum runs over components it does not say. `of` offers all three readings.

    Args:
        u: States of trajectories ``[times, n, d]``, evenly spaced in time.
        of: what is counted: states by their largest component, components each by itself, or
            trajectories by their largest state.
        t: the times ``[times]``, for a rate that depends on them.
    """
    _check_states(u, "u", "[times, n, d]")
    if u.dim() != 3 or not u.numel():
        raise ValueError(f"u has shape {list(u.shape)}; give [times, n, d]")
    check_choice("of", of, ("states", "components", "trajectories"))
    if not isinstance(levels, Tensor):
        try:
            levels = torch.as_tensor(levels)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"levels is a {type(levels).__name__}; give numbers [n]") from None
    if levels.dim() != 1 or levels.device != u.device:
        raise ValueError(
            f"levels {list(levels.shape)} on {levels.device} must be [n], on the device of u"
        )
    if t is not None and (not isinstance(t, Tensor) or t.shape != u.shape[:1]):
        raise ValueError(f"t = {t!r} must be a tensor of the {len(u)} times of u")
    if t is not None:
        check_values("t", t)
    if t is None:
        sizes = second_derivative(rate, u).abs()
    else:
        sizes = torch.stack([second_derivative(rate, states, now) for now, states in zip(t, u)]).abs()
    if of != "components":
        sizes = sizes.amax(-1) if of == "states" else sizes.amax((0, -1))
    return (sizes.flatten()[:, None] < torch.as_tensor(levels).to(sizes)).double().mean(0)


@dataclass(frozen=True)
class ConvergenceBound:
    """How far a solver may be off after its last step, and how far it is; the worst trajectory counts.

    Attributes:
        actual: the largest error after the last step.
        propagated: the largest sum of the residuals, each carried to the end by the product of the
            Jacobians of the steps after it; the one bound that says something over many steps.
        classical: ``residual * (1 + w + ... + w^(steps - 1))`` with w the step constant.
        theorem: ``beta sqrt(delta)`` of Theorem 5.1, ``beta = sqrt(T / K) exp(T K)`` with
            ``K = L (1 + L_att)``, or ``L + L_att sqrt(1 + L^2)`` if Q does not see the slope alone.
        alpha: what the theorem adds for every unit of the fine step, if the fine solution is Euler's
            and not the truth: ``M exp(2 T L) / (2 L)``. None if the scheme is not Euler's.
        residual: largest error of one corrected step from the truth.
        delta: mean square of residual / dt along a trajectory, the largest.
        step_constant: largest norm of the derivative of a corrected step.
        slope_constant: L, the same of the scheme's slope; Euler's is the rate itself.
        attention_constant: L_att, the same of Q by what it sees, over dt.
        curvature: M, the largest ``|u''|``.
    """

    actual: float
    propagated: float
    classical: float
    theorem: float
    alpha: float | None
    residual: float
    delta: float
    step_constant: float
    slope_constant: float
    attention_constant: float
    curvature: float


@torch.no_grad()
def convergence_bound(solver: HybridSolver, truth: Tensor) -> ConvergenceBound:
    """Error bounds of a solver along the true states `truth` ``[steps + 1, n, d]``, dt apart.

    With e the error and J the derivative of a corrected step, averaged between the truth and the
    numerical solution, ``e' = J e - r`` holds exactly. All three bounds follow; for the theorem's,
    ``|J| <= 1 + dt K``, which holds for any scheme with its slope in place of f.

    Errors and residuals are measured. The constants are the largest values at three points between
    the truth and the numerical solution in every step, so they are observed and not proven; J is
    averaged by Simpson's rule over these points. Rounding is not part of the theory: use float64.

    Raises:
        ValueError: the dtypes differ, or the solver loses a trajectory.
    """
    _check_states(truth, "truth", "[steps + 1, n, d]")
    if truth.dim() != 3 or len(truth) < 2 or not truth.numel():
        raise ValueError(
            f"truth has shape {list(truth.shape)}; give [steps + 1, n, d] of at least one step"
        )
    if not bool(torch.isfinite(truth).all()):
        raise ValueError("truth holds states that are not finite")
    own = next(solver.correction.parameters()).dtype
    if truth.dtype != own:
        raise ValueError(f"truth is in {truth.dtype}, the solver in {own}; use solver.to(truth.dtype)")
    steps, dt, scheme, correction = len(truth) - 1, solver.dt, solver.scheme, solver.correction
    solved = solver.solve(truth[0], steps * dt, guard=False)  # the theory is of corrected steps
    if not bool(solved.ok.all()):
        raise ValueError(f"the solver loses {int((~solved.ok).sum())} of {len(solved.ok)} trajectories")
    t = solved.t.to(truth.dtype)
    residuals, means, constants = [], [], []
    for now, u, after, numerical in zip(t, truth, truth[1:], solved.u):
        residuals.append((after - solver.step(u, now, guard=False)).norm(dim=-1))
        points = torch.stack((u, (u + numerical) / 2, numerical)).flatten(0, -2)
        slope = partial(scheme.slope, solver.rate, now, dt=dt)
        each = _jacobians(partial(solver.step, t=now, guard=False), points)
        low, middle, high = each.unflatten(0, (3, -1))
        means.append((low + 4 * middle + high) / 6)
        attention = lipschitz_observed(correction, points, slope(points), dt, now) / dt
        constants.append((_norm(each), _norm(_jacobians(slope, points)), attention))
    step, L, L_att = (max(1e-300, *column) for column in zip(*constants))  # not 0, it divides

    carried, reach = torch.zeros_like(residuals[0]), torch.eye(truth.shape[-1]).to(truth)
    for residual, mean in zip(reversed(residuals), reversed(means)):
        carried = carried + torch.linalg.matrix_norm(reach, 2) * residual
        reach = reach @ mean
    largest = torch.stack(residuals).max().item()
    delta = (torch.stack(residuals) / dt).square().mean(0).max().item()
    M = max(second_derivative(solver.rate, u, now).norm(dim=-1).max().item() for now, u in zip(t, truth))
    sees_slope_alone = isinstance(correction, AttNS) and not correction.state
    T, K = steps * dt, L + L_att * (L if sees_slope_alone else math.hypot(1, L))
    powers = torch.tensor(step, dtype=torch.float64) ** torch.arange(steps)
    return ConvergenceBound(
        actual=(solved.final - truth[-1]).norm(dim=-1).max().item(),
        propagated=carried.max().item(),
        classical=largest * powers.sum().item(),
        theorem=math.sqrt(T / K * delta) * _exp(T * K),
        alpha=M * _exp(2 * T * L) / (2 * L) if scheme.name == "euler" else None,
        residual=largest,
        delta=delta,
        step_constant=step,
        slope_constant=L,
        attention_constant=L_att,
        curvature=M,
    )


def _check_states(x: Any, name: str, shape: str) -> None:
    check_tensor(name, x, shape)
    check_values(name, x)
    if x.dim() == 0:
        raise ValueError(f"{name} has no dimension; give {shape}")


def _jacobians(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``[rows, outputs, inputs]`` of a function of rows x ``[rows, inputs]``, each by itself."""
    return torch.func.jacrev(lambda x: function(x).sum(0))(x).movedim(0, 1).detach()


def _norm(matrices: Tensor) -> float:
    """The largest spectral norm; NaN where a matrix is not finite."""
    if not bool(torch.isfinite(matrices).all()):
        return math.nan
    return torch.linalg.matrix_norm(matrices.detach(), 2).max().item()


def _exp(x: float) -> float:
    return math.exp(x) if x < 709 else math.inf
