"""Properties of the solver's wing: right results or errors, saved objects, folders, copies and threads."""

import contextlib
import copy
import json
import pickle
import subprocess
import sys
import threading

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import attractor as at
from attractor.core.step import Step
from attractor.core.trajectory import Status
from attractor.ode import Ridge, make_trajectories
from attractor.ode.corrections import BY_NAME
from attractor.ode.trajectories import fine_trajectories
from attractor.ode.trust import TrustRegion

F64 = dict(dtype=torch.float64)
pytestmark = pytest.mark.filterwarnings("ignore:the correction makes held-out trajectories worse")
few = settings(
    max_examples=12, deadline=None, derandomize=True, phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
many = settings(few, max_examples=150)


def duffing(t, u):
    x, v = u.unbind(-1)
    return torch.stack((v, x - x**3 - 0.1 * v), -1)


def near_the_wells(n, generator):
    return torch.rand(n, 2, generator=generator, **F64) * 2 - 1


@pytest.fixture(scope="module")
def solver():
    how = dict(dt=0.1, horizon=3.0, width=48, trajectories=80, fine_dt=0.0125, correction="neurvec")
    made = at.fit(duffing, sample=near_the_wells, **how)
    made.trust.accuracy.clamp_(min=1e-9)  # fewer substeps
    return made


# (a) Whatever is accepted is right, or raises


@st.composite
def problems(draw):
    """A rate with an accurate reference, states, times and a scheme."""
    rate = draw(
        st.sampled_from(
            [
                lambda t, u: torch.stack((u[..., 1], -u[..., 0]), -1),
                lambda t, u: torch.stack((u[..., 1], -u[..., 0].sin() - 0.2 * u[..., 1]), -1),
                lambda t, u: -u + 0.5 * u.roll(1, -1).tanh(),
            ]
        )
    )
    batch = draw(st.sampled_from([(), (1,), (3,), (2, 2)]))
    seed = draw(st.integers(0, 1000))
    u0 = torch.randn(*batch, 2, generator=torch.Generator().manual_seed(seed), **F64)
    ends = sorted(draw(st.lists(st.floats(0.05, 2.0), min_size=1, max_size=4, unique=True)))
    t = torch.tensor([0.0, *ends], **F64)
    t = t + draw(st.sampled_from([0.0, -3.0, 10.0]))
    return rate, u0, t.flip(0) if draw(st.booleans()) else t


def reference(rate, u0, t):
    from scipy.integrate import solve_ivp

    flat = lambda when, y: (
        rate(torch.tensor(when), torch.from_numpy(y).view(u0.shape)).reshape(-1).numpy()
    )
    solved = solve_ivp(
        flat, (t[0], t[-1]), u0.reshape(-1).numpy(), "DOP853", t_eval=t, rtol=1e-12, atol=1e-13
    )
    return torch.from_numpy(solved.y.T.copy()).view(len(t), *u0.shape)


def check_error_control(problem, scheme, compile_tolerance):
    rate, u0, t = problem
    rtol, checkpoint = compile_tolerance
    truth = reference(rate, u0, t)
    solved = at.evolve(rate, u0, t, scheme, rtol=rtol, atol=rtol, checkpoint=checkpoint)
    assert solved.ok.all()
    assert (solved.u - truth).abs().max() < 1e3 * rtol
    theirs = at.odeint(rate, u0, t, rtol=rtol, atol=rtol, method=scheme)
    assert (theirs - truth).abs().max() < 1e3 * rtol


tolerances = st.tuples(st.sampled_from([1e-4, 1e-6, 1e-8]), st.sampled_from([None, 2, True]))
controlled = st.sampled_from([None, "dopri5", "bosh3", "tsit5", "dop853"])


@few
@given(problems(), controlled, tolerances)
def test_error_control_keeps_its_tolerance(problem, scheme, compile_tolerance):
    pytest.importorskip("scipy")
    check_error_control(problem, scheme, compile_tolerance)


@pytest.mark.slow
@many
@given(problems(), controlled, tolerances)
def test_error_control_keeps_its_tolerance_for_many_problems(problem, scheme, compile_tolerance):
    pytest.importorskip("scipy")
    check_error_control(problem, scheme, compile_tolerance)


def check_hybrid(solver, seed, size, dtype, n, t0):
    """As exact as the fit inside, and never worse than the plain scheme outside, whatever the states."""
    generator = torch.Generator().manual_seed(seed)
    u0 = (size * near_the_wells(4, generator)).to(dtype)
    truth = fine_trajectories(duffing, u0.double(), 0.1, n, 60)
    times = torch.arange(n + 1, **F64) * 0.1
    plain = at.evolve(duffing, u0.double(), times, "rk4").u
    solved = solver.solve(u0, t0 + n * 0.1, t0)
    assert solved.u.dtype == torch.float64
    error, worst = ((x - truth).abs().amax((0, 2)) for x in (solved.u, plain))
    allowed = torch.where(solved.status == Status.OK, 1e-5, 1e-5 + worst)
    assert solved.ok.all()
    assert (error <= allowed).all()


hybrid_calls = given(
    seed=st.integers(0, 10_000),
    size=st.sampled_from([0.0, 0.5, 1.0, 1.5, 3.0, 6.0]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    n=st.integers(0, 12),
    t0=st.sampled_from([0.0, -1.0, 7.5]),
)


@settings(few, max_examples=6)
@hybrid_calls
def test_a_hybrid_solver_is_right_from_any_state(solver, seed, size, dtype, n, t0):
    check_hybrid(solver, seed, size, dtype, n, t0)


@pytest.mark.slow
@many
@hybrid_calls
def test_a_hybrid_solver_is_right_from_many_states(solver, seed, size, dtype, n, t0):
    check_hybrid(solver, seed, size, dtype, n, t0)


# (b) Saved, and loaded in another process

OWN_RK4 = at.Scheme("rk4", a=[[], ["2/3"]], b=["1/4", "3/4"], c=[0, "2/3"], order=2)  # named as another


class VanDerPol:
    """A rate of a user's own that has the name of one of ours."""

    def __call__(self, t, u):
        return torch.stack((u[..., 1], -2 * u[..., 0]), -1)


def solvers_to_save():
    """name -> (solver, rate to load it with)."""
    torch.manual_seed(0)
    region = TrustRegion.around(torch.randn(50, 2, **F64))
    small = {"width": 8, **F64}
    cases = {
        name: (at.systems.VanDerPol(2.0), "rk4", make(2, **(small if make.fit_defaults else F64)), None)
        for name, make in BY_NAME.items()
    }
    network = lambda: at.corrections.AttNS(2, **small)
    cases["scheme of one's own"] = at.systems.VanDerPol(2.0), OWN_RK4, network(), None
    cases["splitting"] = at.systems.HarmonicOscillator(), "leapfrog", network(), None
    cases["a name of ours"] = VanDerPol(), "dopri5", network(), VanDerPol()
    cases["a function"] = duffing, "rk4", network(), duffing
    return {
        name: (at.HybridSolver(rate, scheme, correction, 0.1, region), again)
        for name, (rate, scheme, correction, again) in cases.items()
    }


STATES = torch.tensor([[0.3, -0.2], [40.0, 1.0]], **F64)


@pytest.mark.slow
def test_saved_solvers_are_the_same_in_another_process(tmp_path):
    solvers = solvers_to_save()
    for i, (solver, _) in enumerate(solvers.values()):
        solver.save(tmp_path / str(i))
    code = (
        "import json, attractor as at; from tests.ode.test_properties import STATES, solvers_to_save\n"
        "rates = [again for _, again in solvers_to_save().values()]\n"
        f"loaded = [at.HybridSolver.load({str(tmp_path)!r} + f'/{{i}}', rate) for i, rate in enumerate(rates)]\n"
        "print(json.dumps([s.solve(STATES, 0.3).u.tolist() for s in loaded]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for states, (solver, _) in zip(json.loads(done.stdout), solvers.values()):
        assert solver.solve(STATES, 0.3).u.tolist() == states


def test_every_saved_solver_knows_its_equation(tmp_path):
    other = lambda t, u: -3 * u
    for i, (solver, again) in enumerate(solvers_to_save().values()):
        folder = solver.save(tmp_path / str(i))
        loaded = at.HybridSolver.load(folder, again)
        assert torch.equal(loaded.solve(STATES, 0.3).u, solver.solve(STATES, 0.3).u)
        with pytest.raises(at.CheckpointError, match="was fitted to another equation"):
            at.HybridSolver.load(folder, other)


# (c) Two different fits, or data, in one folder never mix


def decay(speed):
    return lambda t, u: -speed * u.sin()


def uniform(scale):
    return lambda n, generator: scale * torch.rand(n, 1, generator=generator, **F64)


definitions = st.fixed_dictionaries(
    {
        "speed": st.sampled_from([1.0, 1.5]),
        "scale": st.sampled_from([1.0, 1.25]),
        "seed": st.sampled_from([0, 1]),
        "width": st.sampled_from([4, 6]),
        "correction": st.sampled_from(["attns", "neurvec"]),
        "scheme": st.sampled_from(["rk4", "heun"]),
        "recipe": st.sampled_from([Ridge(), Ridge(adam_steps=5)]),
    }
)


def fitted(definition, out=None, stop_after=None):
    options = dict(definition)
    calls = 0

    def progress(message):
        nonlocal calls
        calls += 1
        if stop_after is not None and calls > stop_after:
            raise KeyboardInterrupt

    made = at.fit(
        decay(options.pop("speed")), sample=uniform(options.pop("scale")), dt=0.5, horizon=2.0,
        trajectories=12, fine_dt=0.25, out=out, progress=progress, **options,
    )  # fmt: skip
    return made.step(torch.tensor([[0.4]], **F64)).item()


@settings(few, max_examples=8)
@given(definitions, definitions, st.integers(3, 8))
def test_two_fits_in_one_folder_never_mix(tmp_path_factory, first, second, stop_after):
    out = tmp_path_factory.mktemp("fit") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attractor.ode.unfinished.Unfinished.SECONDS", 0.0)  # keep every candidate
        with contextlib.suppress(KeyboardInterrupt):
            fitted(first, out, stop_after)
        if first == second:
            assert fitted(second, out) == fitted(second)
        else:
            with pytest.raises(at.CheckpointError, match="is of a fit with other"):
                fitted(second, out)
        assert fitted(first, out) == fitted(first)


@settings(few, max_examples=8)
@given(
    st.tuples(st.sampled_from([1.0, 1.5]), st.sampled_from([1.0, 1.25]), st.sampled_from([0, 1])),
    st.tuples(st.sampled_from([1.0, 1.5]), st.sampled_from([1.0, 1.25]), st.sampled_from([0, 1])),
)
def test_data_of_two_equations_in_one_folder_never_mix(tmp_path_factory, first, second):
    folder = tmp_path_factory.mktemp("data") / "out"

    def states(definition, where):
        speed, scale, seed = definition
        how = dict(trajectories=6, dt=0.5, horizon=1.0, shard_size=3, fine_dt=0.25, seed=seed)
        data = make_trajectories(decay(speed), where, sample=uniform(scale), **how)
        return torch.cat([run.u for run in data.runs()], 1)

    states(first, folder)
    alone = tmp_path_factory.mktemp("alone")
    if first == second:
        assert torch.equal(states(second, folder), states(second, alone / "second"))
    else:
        with pytest.raises(ValueError, match="holds other data"):
            states(second, folder)
    assert torch.equal(states(first, folder), states(first, alone / "first"))


# (d) Copies, threads, averages and recomputation of what the wing hands out


@pytest.mark.parametrize("name", [*BY_NAME, "trust region"])
def test_modules_can_be_copied_averaged_and_shared(name):
    torch.manual_seed(0)
    u, slope = torch.randn(2, 5, 3, **F64)
    of = lambda u: Step(u, slope, 0.1, None, (slope, u, slope * u, slope + u))
    if name == "trust region":
        module = TrustRegion.around(torch.randn(40, 3, **F64))
        call = lambda m: m.distance(u)
    else:
        module = BY_NAME[name](3, **({"width": 8} if BY_NAME[name].fit_defaults else {}), **F64)
        call = lambda m: m(of(u))
    result = call(module)
    averaged = torch.optim.swa_utils.AveragedModel(module, use_buffers=True)
    averaged.update_parameters(module)
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), averaged.module):
        assert torch.equal(call(again), result)
    together = in_threads(lambda: call(module))
    assert all(torch.equal(x, result) for x in together)
    if name == "trust region":
        return
    for reentrant in (False, True):
        start = u.clone().requires_grad_()
        added = torch.utils.checkpoint.checkpoint(
            lambda x: module(of(x)), start, use_reentrant=reentrant
        )
        plain = u.clone().requires_grad_()
        wanted = torch.autograd.grad(module(of(plain)).sum(), plain, allow_unused=True)[0]
        if wanted is not None:
            added.sum().backward()
            torch.testing.assert_close(start.grad, wanted)


def in_threads(call, count=8):
    results, barrier = [None] * count, threading.Barrier(count)

    def work(i):
        barrier.wait()
        results[i] = call()

    workers = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return results


def test_a_solver_can_be_copied_pickled_and_shared_by_threads(solver):
    u0 = 2 * near_the_wells(6, torch.Generator().manual_seed(5))
    with torch.no_grad():
        solved = solver.solve(u0, 0.5)
        assert (solved.status == Status.GUARDED).any()
        for again in (copy.deepcopy(solver), pickle.loads(pickle.dumps(solver))):
            assert torch.equal(again.solve(u0, 0.5).u, solved.u)
        copied = copy.deepcopy(solver)
        copied.correction.net.head.bias.add_(1.0)
        copied.trust.limit.zero_()
        assert torch.equal(solver.solve(u0, 0.5).u, solved.u)  # a copy shares nothing

    def in_a_thread():
        with torch.no_grad():  # grad mode belongs to a thread
            return solver.solve(u0, 0.5)

    for other in in_threads(in_a_thread):
        assert torch.equal(other.u, solved.u)
        assert torch.equal(other.stats.guarded, solved.stats.guarded)
        assert other.stats.rate_calls == solved.stats.rate_calls
    for again in (copy.deepcopy(solved), pickle.loads(pickle.dumps(solved))):
        assert torch.equal(again.u, solved.u)
        assert repr(again) == repr(solved)
