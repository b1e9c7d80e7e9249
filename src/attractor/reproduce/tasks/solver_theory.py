"""Tasks on the theory of the AttNS paper: Theorem 5.1, Theorem 5.2 and Table 6."""

import math
from typing import Any

import torch
from torch import Tensor

from attractor.ode.theory import (
    convergence_bound,
    curvature_distribution,
    lipschitz_bound,
    lipschitz_observed,
    steepest,
)
from attractor.reproduce.tasks import Context, Outcome
from attractor.reproduce.tasks.solver_settings import CEILING, make_setting
from attractor.reproduce.tasks.solvers import fit_solver

READINGS = ("states", "components", "trajectories")


def curvature(config: dict[str, Any], context: Context) -> Outcome:
    """Table 6: compute the share of ``|u''|`` below each level, in percent.

    Configuration, beside that of `solvers`:
        levels: the levels.
        of: what is counted, one of `READINGS`.
        paper: the paper's shares in percent.

    Metrics:
        off: the largest difference from the paper in percentage points.

    Curves: level, share.
    """
    setting = make_setting({"train": 1, **config}, context)
    levels = torch.tensor(config["levels"], dtype=torch.float64)
    share = 100 * curvature_distribution(setting.system, setting.truth, levels, config["of"]).cpu()
    difference = (share - torch.tensor(config["paper"], dtype=torch.float64)).abs().max().item()
    curves = {"level": config["levels"], "share": [round(x, 4) for x in share.tolist()]}
    return {"metrics": {"off": difference}, "curves": curves}


def lipschitz(config: dict[str, Any], context: Context) -> Outcome:
    """Theorem 5.2: compare the bound on the Lipschitz constant of Q with observed values.

    Metrics, all NaN if the training diverged:
        bound: the bound of the theorem.
        observed: largest spectral norm of the derivative of Q on test states.
        between: largest difference quotient of Q between pairs of test states.
        far: like observed, at states shifted by a hundred standard deviations.
        used: the maximum of these three, divided by the bound.
        activation: largest slope of the rational activation.
    """
    setting = make_setting(config, context)
    solver, _ = fit_solver(config, context, setting)
    if solver is None:
        nan_metrics = dict.fromkeys(
            ("bound", "observed", "between", "far", "used", "activation"), math.nan
        )
        return {"metrics": nan_metrics}
    solver = solver.to(torch.float64)
    correction: Any = solver.correction
    u = _some(setting.truth.flatten(0, 1), config.get("states", 2000))
    slope = solver.scheme.slope(setting.system, 0.0, u, setting.dt)
    bound = lipschitz_bound(correction, setting.dt)
    observed = lipschitz_observed(correction, u, slope, setting.dt)
    far = lipschitz_observed(correction, u + 100 * u.std(0), slope + 100 * slope.std(0), setting.dt)
    q, order = correction(u, slope, setting.dt), torch.arange(len(u), device=u.device).flip(0)
    distance = torch.cat((u - u[order], slope - slope[order]), -1).norm(dim=-1)
    between = ((q - q[order]).norm(dim=-1) / distance.clamp(min=1e-12))[distance > 1e-9].max().item()
    metrics = {
        "bound": bound, "observed": observed, "between": between, "far": far,
        "used": max(observed, between, far) / bound,
        "activation": steepest(correction.net.body.activations[0]),
    }  # fmt: skip
    return {"metrics": metrics}


def bound(config: dict[str, Any], context: Context) -> Outcome:
    """Theorem 5.1: compare the error at the end of a few test trajectories with its bounds.

    Metrics as logarithms to base 10:
        actual: the error. It is that of `CEILING` if the solver loses a trajectory.
        theorem: ``beta sqrt(delta)``, computed without overflow.
        classical: see `ConvergenceBound`.
        carried: the residuals, propagated by the Jacobians of the steps.
        slack: theorem - actual.
        alpha: for Euler's scheme, the term of the theorem per unit of the fine step; NaN for others.

    Other metrics: L, L_att, delta; see `ConvergenceBound`.
    """
    setting = make_setting(config, context)
    solver, _ = fit_solver(config, context, setting)
    names = ("actual", "theorem", "classical", "carried", "slack", "L", "L_att", "delta", "alpha")
    if solver is None:
        return {"metrics": dict.fromkeys(names, math.nan)}
    truth = setting.truth[: round(config["end"] / setting.dt) + 1, : config.get("followed", 30)]
    try:
        bounds = convergence_bound(solver.to(torch.float64), truth)
    except ValueError:  # a trajectory became non-finite
        nan_metrics = dict.fromkeys(names, math.nan) | {"actual": math.log10(CEILING)}
        return {"metrics": nan_metrics}
    T, L, L_att = (len(truth) - 1) * setting.dt, bounds.slope_constant, bounds.attention_constant
    K = L * (1 + L_att)
    theorem = 0.5 * _log10(T / K * bounds.delta) + T * K / math.log(10)
    actual = _log10(bounds.actual)
    alpha = _log10(bounds.curvature / (2 * L)) + 2 * T * L / math.log(10)
    metrics = {
        "actual": actual, "theorem": theorem, "classical": _log10(bounds.classical),
        "carried": _log10(bounds.propagated), "slack": theorem - actual, "L": L, "L_att": L_att,
        "delta": bounds.delta, "alpha": alpha if bounds.alpha is not None else math.nan,
    }  # fmt: skip
    return {"metrics": metrics}


def _some(x: Tensor, count: int) -> Tensor:
    """Return about `count` evenly spaced rows of x."""
    return x[:: max(1, len(x) // count)]


def _log10(x: float) -> float:
    return math.log10(max(x, 1e-300)) if math.isfinite(x) else math.inf
