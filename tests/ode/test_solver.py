"""A saved solver belongs to its equation, takes states of any kind, and reports an honest error."""

import json
import math
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import attractor as at
from attractor.ode import Paper, Ridge
from attractor.ode.fit_data import make_plans
from attractor.ode.processes import Crew
from attractor.ode.rollouts import Rollouts
from attractor.ode.serialization import is_system, rate_to_json
from attractor.ode.substeps import enough_substeps
from attractor.ode.trajectories import (
    LostTrajectoriesError,
    Plan,
    Run,
    exact_solution,
    fine_trajectories,
)

F64 = dict(dtype=torch.float64)
pytestmark = pytest.mark.filterwarnings("ignore:the correction makes held-out trajectories worse")
QUICK = dict(dt=0.1, horizon=1.0, width=16, trajectories=30, fine_dt=0.0125)


def sample(n, generator):
    return torch.rand(n, 2, generator=generator, **F64) - 0.5


def spring(t, u):
    x, v = u.unbind(-1)
    return torch.stack((v, -x), -1)


def damped(damping):
    def rate(t, u):
        x, v = u.unbind(-1)
        return torch.stack((v, -x.sin() - damping * v), -1)

    return rate


@pytest.fixture(scope="module")
def pendulum():
    return at.fit(damped(0.2), sample=sample, **QUICK)


# The equation of a solver


@dataclass(frozen=True)
class Lorenz:
    """A system of a user's own that has the name and the fields of ours."""

    sigma: float = 10.0
    rho: float = 28.0
    beta: float = 8 / 3
    dim = 3

    def __call__(self, t, u):
        return -u * torch.tensor([1.0, 2.0, 3.0]).to(u)

    def sample(self, n, generator=None, dtype=None, device=None):
        return torch.rand(n, 3, generator=generator, dtype=torch.float64).to(dtype)


@dataclass(frozen=True)
class VanDerPol:
    """Another one, which is saved by a subprocess."""

    mu: float = 2.0
    dim = 2

    def __call__(self, t, u):
        return -u


def test_a_class_of_the_same_name_is_not_a_system_of_the_library(tmp_path):
    assert is_system(at.systems.Lorenz())
    assert not is_system(Lorenz())
    assert "system" not in rate_to_json(Lorenz())
    solver = at.fit(Lorenz(), **QUICK)
    solver.save(tmp_path)
    with pytest.raises(at.CheckpointError, match="was fitted to 'Lorenz', which is not saved"):
        at.HybridSolver.load(tmp_path)
    with pytest.raises(at.CheckpointError, match="was fitted to another equation"):
        at.HybridSolver.load(tmp_path, rate=at.systems.Lorenz())
    u0 = Lorenz().sample(3, dtype=torch.float64)
    again = at.HybridSolver.load(tmp_path, rate=Lorenz())
    assert torch.equal(again.solve(u0, 1.0).u, solver.solve(u0, 1.0).u)


def test_a_system_of_the_library_is_not_replaced_by_a_class_of_its_name(tmp_path):
    at.fit(at.systems.VanDerPol(2.0), **QUICK).save(tmp_path)
    with pytest.raises(at.CheckpointError, match="was fitted to another equation"):
        at.HybridSolver.load(tmp_path, rate=VanDerPol())
    assert at.HybridSolver.load(tmp_path).rate == at.systems.VanDerPol(2.0)
    same = at.systems.VanDerPol(2.0)
    assert at.HybridSolver.load(tmp_path, rate=lambda t, u: same(t, u)) is not None


def test_a_folder_that_names_a_system_it_was_not_fitted_to_is_refused(tmp_path):
    """Older versions took a user's class for ours; the values that are saved tell."""
    solver = at.fit(Lorenz(), **QUICK)
    solver.rate = at.systems.Lorenz()
    from attractor.ode import serialization

    values = serialization.values_to_json(Lorenz(), 3, solver.trust)
    original = serialization.values_to_json
    serialization.values_to_json = lambda *_: values
    try:
        solver.save(tmp_path)
    finally:
        serialization.values_to_json = original
    with pytest.raises(at.CheckpointError, match="was fitted to another equation"):
        at.HybridSolver.load(tmp_path)


def test_equations_are_compared_without_a_region_and_at_several_times(tmp_path):
    correction = at.corrections.AttNS(2, width=4, **F64)
    at.HybridSolver(spring, "rk4", correction, 0.1).save(tmp_path)
    later = lambda t, u: spring(t, u) * (1 + t)  # the same at t = 0
    for other in (damped(0.1), later):
        with pytest.raises(at.CheckpointError, match="was fitted to another equation"):
            at.HybridSolver.load(tmp_path, rate=other)
    assert at.HybridSolver.load(tmp_path, rate=spring).trust is None


@pytest.mark.slow
def test_a_solver_loads_in_another_process(tmp_path, pendulum):
    systems = {"own": None, "library": at.fit(at.systems.Logistic(), **{**QUICK, "dt": 0.5})}
    systems["own"] = pendulum
    for name, solver in systems.items():
        solver.save(tmp_path / name)
    code = f"""
import json, torch, attractor as at
from tests.ode.test_solver import damped
out = {{}}
for name, rate, dim in (("own", damped(0.2), 2), ("library", None, 1)):
    solver = at.HybridSolver.load({str(tmp_path)!r} + "/" + name, rate=rate)
    u0 = torch.full((2, dim), 0.25, dtype=torch.float64)
    out[name] = solver.solve(u0, solver.dt * 4).final.tolist()
print(json.dumps(out))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    final = json.loads(done.stdout)
    for name, solver in systems.items():
        u0 = torch.full((2, solver.dim), 0.25, **F64)
        assert solver.solve(u0, solver.dt * 4).final.tolist() == final[name]


@pytest.mark.parametrize("damping", [0.5, 1.0])
@pytest.mark.parametrize("start", [[0.3, 0.0], [0.3, 0.2]], ids=["at rest", "moving"])
def test_solve_ivp_refuses_another_equation(pendulum, damping, start):
    scipy = pytest.importorskip("scipy.integrate")
    from attractor.integrations.scipy import hybrid

    fun = lambda t, u, damping: [u[1], -np.sin(u[0]) - damping * u[1]]
    with pytest.raises(ValueError, match="fun, with its args, is not the equation"):
        scipy.solve_ivp(fun, (0, 1), start, method=hybrid(pendulum), args=(damping,))
    assert scipy.solve_ivp(fun, (0, 1), start, method=hybrid(pendulum), args=(0.2,)).success


@pytest.mark.parametrize("start", [[0.3, 0.0], [0.3, 0.2]], ids=["at rest", "moving"])
def test_odeint_refuses_another_equation(pendulum, start):
    y0, t = torch.tensor([start], **F64), torch.arange(11, **F64) * 0.1
    with pytest.raises(ValueError, match="func is not the equation that this HybridSolver"):
        at.odeint(damped(0.5), y0, t, method=pendulum)
    solved = at.odeint(damped(0.2), y0.float(), t, method=pendulum)
    assert solved.dtype == torch.float32  # as torchdiffeq: that of y0
    torch.testing.assert_close(solved.double(), pendulum.solve(y0, 1.0).u, rtol=1e-6, atol=1e-7)


# States of any kind


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_states_of_any_floating_type_are_solved_in_the_solvers_own(pendulum, dtype):
    assert pendulum.dtype == torch.float64
    assert pendulum.device == torch.device("cpu")
    u0 = torch.tensor([[0.25, 0.5], [-0.5, 0.0]], dtype=dtype)
    solved = pendulum.solve(u0, 1.0)
    assert solved.u.dtype == torch.float64
    assert torch.equal(solved.u, pendulum.solve(u0.double(), 1.0).u)
    assert torch.equal(pendulum.step(u0), pendulum.step(u0.double()))


def test_samples_of_a_system_can_be_solved_at_once():
    system = at.systems.ElasticPendulum()
    solver = at.fit(system, **{**QUICK, "fine_dt": 0.025})
    assert system.sample(3).dtype == torch.float32
    assert solver.solve(system.sample(3), 1.0).ok.all()


@pytest.mark.parametrize("u0", [torch.ones(3, 2, dtype=torch.long), torch.ones(3, 2) > 0], ids=str)
def test_states_that_are_no_floats_are_refused(pendulum, u0):
    with pytest.raises(TypeError, match="states must be floating or complex"):
        pendulum.solve(u0, 1.0)


# What a fit reports


def test_the_reported_error_is_of_trajectories_that_chose_nothing():
    system = at.systems.PendulumChain(2)
    how = {**QUICK, "trajectories": 60}
    solver = at.fit(system, **how)
    last = solver.history[-1]
    plan = Plan(6, 0.1, 10, last["substeps"], 0, 6, stream="test")
    (runs,) = make_plans(system, None, None, None, [plan])
    errors = Rollouts(system, solver.scheme, 0.1, runs, Crew()).errors(solver.correction)
    assert solver.fit_error == last["rollout"] == pytest.approx(errors.mean().item(), rel=1e-9)
    assert last["median"] == pytest.approx(errors.median().item(), rel=1e-9)
    assert last["worst"] == pytest.approx(errors.max().item(), rel=1e-9)
    assert last["selection"] == min(row["rollout"] for row in solver.history[:-1])
    assert last["selection"] != last["rollout"]
    assert "worst" in solver.about()["mean square error on new trajectories"]


def test_constant_components_do_not_dilute_the_error():
    """A parameter that is carried along as a state is exact in every scheme."""

    def rate(t, u):
        x, v, k = u.unbind(-1)
        return torch.stack((v, -k * x, torch.zeros_like(k)), -1)

    u = fine_trajectories(rate, torch.tensor([[1.0, 0.0, 2.0], [0.5, 0.0, 3.0]], **F64), 0.5, 8, 20)
    errors = Rollouts(rate, at.schemes.RK4, 0.5, [Run(0.0, u)], Crew()).errors(None)
    plain = at.evolve(rate, u[0], torch.arange(9, **F64) * 0.5, "rk4").u
    torch.testing.assert_close(errors, (plain - u)[..., :2].square().mean((0, 2)))


def hires(t, u):
    y = u.unbind(-1)
    return torch.stack(
        (
            -1.71 * y[0] + 0.43 * y[1] + 8.32 * y[2] + 0.0007,
            1.71 * y[0] - 8.75 * y[1],
            -10.03 * y[2] + 0.43 * y[3] + 0.035 * y[4],
            8.32 * y[1] + 1.71 * y[2] - 1.12 * y[3],
            -1.745 * y[4] + 0.43 * y[5] + 0.43 * y[6],
            -280 * y[5] * y[7] + 0.69 * y[3] + 1.71 * y[4] - 0.43 * y[5] + 0.69 * y[6],
            280 * y[5] * y[7] - 1.81 * y[6],
            -280 * y[5] * y[7] + 1.81 * y[6],
        ),
        -1,
    )


HIRES = torch.tensor([1.0, 0, 0, 0, 0, 0, 0, 0.0057], **F64)


@pytest.mark.parametrize(
    ("rate", "sampler", "dt", "substeps"),
    [
        (at.systems.Robertson(), None, 0.01, 64),
        pytest.param(
            hires, lambda n, generator: HIRES * (0.9 + 0.2 * torch.rand(n, 1, generator=generator)),
            1.0, 512, marks=pytest.mark.slow,
        ),
    ],
    ids=["robertson", "hires"],
)  # fmt: skip
def test_fits_that_are_not_finite_raise_and_name_the_stiffness(rate, sampler, dt, substeps):
    how = dict(dt=dt, horizon=20 * dt, width=8, trajectories=10, fine_dt=dt / substeps)
    with pytest.raises(LostTrajectoriesError, match=r"stiffness index.*is [\d.e+]+, so that dt times"):
        at.fit(rate, sample=sampler, **how)


def test_an_infinite_error_survives_saving(tmp_path, pendulum):
    history = [{"rollout": math.inf, "plain": math.nan}]
    solver = at.HybridSolver(spring, "rk4", pendulum.correction, 0.1, history=history)
    again = at.HybridSolver.load(solver.save(tmp_path), rate=spring)
    assert again.fit_error == math.inf
    assert math.isnan(again.history[0]["plain"])
    assert "inf" in again.about()["mean square error on new trajectories"]


# Rates that depend on time


def test_a_dependence_on_time_that_initial_states_hide_is_found():
    def rate(t, u):  # friction that varies; states at rest do not feel it
        x, v = u.unbind(-1)
        return torch.stack((v, -x - 0.05 * (1 + torch.sin(3 * t)) * v), -1)

    at_rest = lambda n, generator: (
        torch.rand(n, 2, generator=generator, **F64) * torch.tensor([1.0, 0.0])
    )
    with pytest.raises(ValueError, match="the rate depends on t"):
        at.fit(rate, sample=at_rest, **QUICK)
    with pytest.raises(ValueError, match="does not repeat with period = 2"):
        at.fit(rate, sample=at_rest, period=2.0, **QUICK)


class Driven:
    """u' = cos t, whose exact solution depends on when it starts."""

    def __call__(self, t, u):
        return torch.cos(t) * torch.ones_like(u)

    def sample(self, n, generator=None, dtype=None, device=None):
        return torch.rand(n, 1, generator=generator, dtype=torch.float64)


class DrivenFromZero(Driven):
    def exact(self, t, u0):
        return u0 + torch.sin(t)[:, None, None]


class DrivenFromAnyTime(Driven):
    def exact(self, t, u0, t0=0.0):
        return u0 + torch.sin(t)[:, None, None] - math.sin(t0)


class DrivenWrongly(Driven):
    def exact(self, t, u0):
        return u0 + torch.sin(2 * t)[:, None, None]


@pytest.mark.parametrize("rate", [DrivenFromZero(), DrivenFromAnyTime()], ids=["from 0", "from t0"])
def test_an_exact_solution_is_used_for_the_times_it_is_of(rate):
    assert (exact_solution(rate, 1.0) is None) == isinstance(rate, DrivenFromZero)
    u0 = torch.zeros(2, 1, **F64)
    for t0 in (0.0, 1.3):
        u = fine_trajectories(rate, u0, 0.1, 5, 16, t0)
        truth = torch.sin(t0 + 0.1 * torch.arange(6, **F64)) - math.sin(t0)
        torch.testing.assert_close(u[:, 0, 0], truth, rtol=0, atol=1e-12)
    period = 2 * math.pi
    assert (enough_substeps(rate, u0, 0.1, 5, period=period) > 1) == isinstance(rate, DrivenFromZero)
    how = {**QUICK, "fine_dt": None, "correction": "linear", "width": None}
    solver = at.fit(rate, **how, scheme="heun", period=period)
    ends = [
        solver.solve(u0, t0 + 1.0, t0).final[0, 0].item() - math.sin(t0 + 1) + math.sin(t0)
        for t0 in (0.0, 2.0)
    ]
    assert max(map(abs, ends)) < 1e-9


def test_an_exact_solution_that_is_none_is_refused():
    with pytest.raises(ValueError, match="the method exact of DrivenWrongly does not solve its rate"):
        enough_substeps(DrivenWrongly(), torch.zeros(2, 1, **F64), 0.1, 5)


# Options of a fit


def test_auto_tries_the_corrections_that_accept_the_options():
    solver = at.fit(spring, sample=sample, options={"times_dt": True}, **QUICK)
    assert {row["correction"] for row in solver.history} == {"attns"}
    assert solver.correction.config["times_dt"]


@pytest.mark.parametrize(
    "options",
    [
        dict(correction="linear", options={"nonsense": 1}),
        dict(correction="linear", width=8),
        dict(correction="linear", options={"depth": 3}),
        dict(correction="linear", options={"activation": "tanh"}),
        dict(correction="linear", options={"precision": "float32"}),
        dict(correction="linear", recipe=Ridge(adam_steps=10)),
        dict(correction="neurvec", options={"times_dt": True}),
        dict(options={"nonsense": 1}),
    ],
    ids=str,
)
def test_options_that_do_not_apply_are_refused_before_data_are_made(options):
    def never(n, generator):
        assert n <= 16, "data are made"
        return sample(n, generator)

    how = {key: value for key, value in QUICK.items() if key != "width"}
    with pytest.raises((ValueError, TypeError), match=r"option|no hidden weights"):
        at.fit(spring, sample=never, **how, **options)


def test_the_papers_recipe_is_in_float32_whatever_the_default_type():
    how = dict(recipe=Paper(epochs=2), scheme="euler")
    plain = at.fit(spring, sample=sample, **QUICK, **how)
    torch.set_default_dtype(torch.float64)
    try:
        solver = at.fit(spring, sample=sample, **QUICK, **how)
    finally:
        torch.set_default_dtype(torch.float32)
    assert solver.dtype == torch.float32
    u0 = torch.rand(2, 2)
    assert torch.equal(plain.step(u0), solver.step(u0))


def test_more_features_than_rows(monkeypatch):
    monkeypatch.setattr("attractor.ode.closed_form.WIDE", 50)
    how = dict(dt=0.1, horizon=1.0, trajectories=20, fine_dt=0.0125, correction="attns", budget=0.0)
    solver = at.fit(damped(0.2), sample=sample, width=300, **how)
    assert solver.fit_error < solver.history[-1]["plain"]


def test_ridge_with_fewer_rows_than_features_by_either_way(monkeypatch):
    from attractor.ode import closed_form

    torch.manual_seed(1)
    a, w = torch.randn(6, 12, **F64), torch.randn(12, 2, **F64)
    triangle = torch.linalg.qr(torch.cat((a, a @ w), -1), mode="r")[1]
    for limit in (3000, 4):
        monkeypatch.setattr(closed_form, "WIDE", limit)
        found, _, error = closed_form.ridge(triangle, a, a @ w)
        assert error < 1e-10
        torch.testing.assert_close(a @ found, a @ w, rtol=1e-4, atol=1e-4)


# Processes


def test_a_fit_does_not_join_process_groups_by_itself(monkeypatch):
    import torch.distributed as dist

    alone = at.fit(spring, sample=sample, **QUICK)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)
    for name in ("all_reduce", "all_gather", "broadcast", "barrier", "all_gather_object"):
        monkeypatch.setattr(dist, name, lambda *_, **__: pytest.fail("a process was waited for"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    u0 = torch.rand(2, 2, **F64)
    assert torch.equal(at.fit(spring, sample=sample, **QUICK).step(u0), alone.step(u0))
    with pytest.raises(ValueError, match="process_group = 'all'"):
        at.fit(spring, sample=sample, process_group="all", **QUICK)
    with pytest.raises(TypeError, match="process_group is a int"):
        at.fit(spring, sample=sample, process_group=3, **QUICK)
