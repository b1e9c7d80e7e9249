import inspect
import math
import re

import pytest
import torch

import attractor as at
from attractor.ode import Paper, Ridge
from attractor.ode.corrections.network import Network
from attractor.ode.shards import make_trajectories
from attractor.ode.substeps import enough_substeps, whole_steps
from attractor.ode.trajectories import LostTrajectoriesError, fine_trajectories
from attractor.ode.trust import TrustRegion

F64 = dict(dtype=torch.float64)


def errors(solver, system, horizon, n=30):
    """Mean square error over new trajectories: of the hybrid solver without its guard, and of the scheme."""
    u0 = system.sample(n, torch.Generator().manual_seed(777), torch.float64)
    steps = round(horizon / solver.dt)
    truth = fine_trajectories(system, u0, solver.dt, steps, 16)
    plain = at.evolve(system, u0, torch.arange(steps + 1, **F64) * solver.dt, solver.scheme)
    hybrid = solver.solve(u0, horizon, guard=False)
    return [(solved.u - truth).square().mean().item() for solved in (hybrid, plain)]


@pytest.fixture(scope="module")
def chain():
    system = at.systems.PendulumChain(2)
    return system, at.fit(system, dt=0.1, horizon=5.0, width=128, trajectories=100, fine_dt=0.0125)


def test_a_hybrid_step_is_far_better_than_a_plain_one(chain):
    system, solver = chain
    hybrid, plain = errors(solver, system, 5.0)
    assert hybrid < 1e-4 * plain
    assert hybrid < 1e-8
    assert solver.history[-1]["rollout"] == pytest.approx(hybrid, rel=10)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("scheme", ["euler", "heun", "rk3", "rk4", "leapfrog"])
def test_linear_systems_come_out_exact(scheme):
    system = at.systems.SpringMass(n=8)
    solver = at.fit(system, dt=0.2, horizon=5.0, scheme=scheme, width=32, trajectories=40)
    assert errors(solver, system, 5.0)[0] < 1e-20


def test_one_trajectory_fits_the_linear_correction():
    system = at.systems.SpringMass(n=4)
    solver = at.fit(system, dt=0.2, horizon=20.0, correction="linear", trajectories=1)
    assert errors(solver, system, 20.0)[0] < 1e-18


@pytest.mark.sampled(3)
@pytest.mark.parametrize("correction", ["attns", "attns_m", "neurvec", "csm", "fsnet"])
def test_every_correction_can_be_fitted(correction):
    system = at.systems.ElasticPendulum()
    how = dict(dt=0.1, horizon=2.0, fine_dt=0.025, width=64, trajectories=60)
    solver = at.fit(system, correction=correction, **how)
    hybrid, plain = errors(solver, system, 2.0)
    # AttNS-m cannot correct where its slope vanishes (see its docstring).
    assert hybrid < (1.0 if correction == "attns_m" else 1e-3) * plain


def test_the_same_seed_gives_the_same_solver():
    fit = lambda seed: at.fit(
        at.systems.Logistic(),
        dt=0.5,
        horizon=5.0,
        width=16,
        correction="attns",
        trajectories=20,
        seed=seed,
    )
    u = torch.rand(5, 1, **F64)
    assert torch.equal(fit(0).step(u), fit(0).step(u))
    assert not torch.equal(fit(0).step(u), fit(1).step(u))


@pytest.mark.slow
def test_paper_recipe_learns():
    system = at.systems.Logistic(growth=2.0)
    solver = at.fit(
        system,
        dt=0.5,
        horizon=4.0,
        recipe=Paper(epochs=60),
        scheme="euler",
        width=32,
        trajectories=100,
    )
    losses = [row["loss"] for row in solver.history[:-1]]
    assert losses[-1] < 0.2 * losses[0]
    u0 = system.sample(50).float()
    assert solver.solve(u0, 4.0).u.dtype == torch.float32


def test_a_rate_of_one_s_own():
    def duffing(t, u):
        x, v = u.unbind(-1)
        return torch.stack((v, x - x**3), -1)

    sample = lambda n, generator: torch.randn(n, 2, generator=generator, **F64) * 0.3 + 1
    solver = at.fit(duffing, dt=0.2, horizon=4.0, sample=sample, width=128, trajectories=200)
    # Three states share a slope in a double well, so the slope alone does not tell the error.
    found = solver.history[-1]
    assert found["correction"] in ("neurvec", "stages") or found["state"]
    u0 = sample(20, torch.Generator().manual_seed(9))
    truth = fine_trajectories(duffing, u0, 0.2, 20, 40)
    assert (solver.solve(u0, 4.0).u - truth).square().mean() < 1e-9
    assert "duffing" in repr(solver)


def test_held_out_rollouts_choose_between_slope_and_state():
    solver = at.fit(at.systems.VanDerPol(2.0), dt=0.1, horizon=3.0, width=64, trajectories=50)
    tried = [row for row in solver.history if "chosen" not in row]
    assert {(row["correction"], row.get("state", False)) for row in tried} == {
        ("stages", False), ("attns", False), ("neurvec", False), ("attns", True)
    }  # fmt: skip
    assert solver.history[-1]["selection"] == min(row["rollout"] for row in tried)
    assert isinstance(solver.correction, at.corrections.get_correction(solver.history[-1]["correction"]))


def forced(t, u):
    x, v = u.unbind(-1)
    return torch.stack((v, x - x**3 - 0.3 * v + 0.5 * torch.cos(1.2 * t)), -1)


FORCED_SAMPLE = lambda n, generator: 3 * torch.rand(n, 2, generator=generator, **F64) - 1.5


@pytest.mark.slow
def test_a_rate_that_repeats_in_time(tmp_path):
    period = 2 * math.pi / 1.2
    how = dict(dt=0.2, horizon=6.0, sample=FORCED_SAMPLE, period=period, width=192, trajectories=200)
    solver = at.fit(forced, **how)
    u0 = FORCED_SAMPLE(50, torch.Generator().manual_seed(9))
    again = at.HybridSolver.load(solver.save(tmp_path / "forced"), rate=forced)
    for t0 in (0.0, 1.0, 1.0 + 3 * period):
        truth = fine_trajectories(forced, u0, 0.2, 30, 40, t0)
        plain = at.evolve(forced, u0, t0 + torch.arange(31, **F64) * 0.2)
        error = (solver.solve(u0, t0 + 6.0, t0).u - truth).square().mean()
        assert error < 1e-3 * (plain.u - truth).square().mean()
        guarded = solver.solve(u0, t0 + 6.0, t0, guard=True)
        assert (guarded.u - truth).square().mean() < 0.1 * (plain.u - truth).square().mean()
        assert torch.equal(again.solve(u0, t0 + 6.0, t0).u, solver.solve(u0, t0 + 6.0, t0).u)
    torch.testing.assert_close(solver.step(u0, 1.0), solver.solve(u0, 1.2, 1.0).final)
    with pytest.raises(ValueError, match=r"needs the time: step\.t, or a fourth argument"):
        solver.correction(solver.scheme.step(forced, torch.tensor(1.0), u0, 0.2)._replace(t=None))


@pytest.mark.slow
def test_a_forced_linear_oscillator_comes_out_exact():
    def rate(t, u):
        x, v = u.unbind(-1)
        return torch.stack((v, -4 * x + torch.cos(3 * t)), -1)

    fit = dict(correction="linear", period=2 * math.pi / 3, trajectories=16, sample=FORCED_SAMPLE)
    solver = at.fit(rate, dt=0.25, horizon=5.0, scheme="heun", **fit)
    u0 = FORCED_SAMPLE(20, torch.Generator().manual_seed(3))
    truth = fine_trajectories(rate, u0, 0.25, 20, 64)
    assert (solver.solve(u0, 5.0).u - truth).abs().max() < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("body", ["lstm", "transformer"])
def test_other_bodies_of_the_paper_s_table_2(body):
    system = at.systems.VanDerPol(2.0)
    how = dict(correction="neurvec", width=64, trajectories=50, options={"body": body}, budget=0.0)
    solver = at.fit(system, dt=0.1, horizon=3.0, **how)
    hybrid, plain = errors(solver, system, 3.0)
    assert hybrid < 0.5 * plain


def test_a_correction_that_does_harm_is_not_handed_over_silently():
    how = dict(correction="linear", dt=0.1, horizon=3.0, trajectories=20)
    with pytest.warns(UserWarning, match="makes held-out trajectories worse"):
        solver = at.fit(at.systems.VanDerPol(2.0), **how)
    assert solver.history[-1]["rollout"] > solver.history[-1]["plain"]


@pytest.mark.slow
def test_adam_phase_trains_hidden_weights_and_stops_on_rollouts():
    system = at.systems.PendulumChain(2)
    how = dict(dt=0.1, horizon=2.0, correction="attns", width=24, trajectories=100, budget=0.0,
               fine_dt=0.005)  # fmt: skip
    plain, trained = at.fit(system, **how), at.fit(system, **how, recipe=Ridge(1000))
    assert trained.history[0]["rollout"] == plain.history[0]["rollout"]
    assert trained.history[-1]["rollout"] < 0.5 * plain.history[-1]["rollout"]
    assert trained.history[-1]["selection"] == min(row["rollout"] for row in trained.history[:-1])


@pytest.mark.slow
def test_a_network_in_float32_serves_a_state_in_float64(tmp_path):
    system = at.systems.PendulumChain(2)
    how = dict(dt=0.1, horizon=2.0, fine_dt=0.005, correction="attns", width=64, trajectories=100)
    full, low = at.fit(system, **how), at.fit(system, **how, options={"precision": "float32"})
    (hybrid, plain), (better, _) = errors(low, system, 2.0), errors(full, system, 2.0)
    assert hybrid < 1e-3 * plain
    assert hybrid < 100 * better
    u0 = system.sample(5, dtype=torch.float64)
    again = at.HybridSolver.load(low.save(tmp_path))
    assert torch.equal(again.solve(u0, 1.0).u, low.solve(u0, 1.0).u)
    assert low.correction(u0, u0, 0.1).dtype == torch.float64
    hidden = low.correction.net.features(low.correction.inputs(u0, u0, 0.1))[:, :64]
    assert torch.equal(hidden, hidden.float().double())


def test_fit_takes_data_made_before(tmp_path):
    system = at.systems.Logistic(growth=2.0)
    data = make_trajectories(system, tmp_path, trajectories=60, dt=0.5, horizon=4.0, shard_size=25)
    how = dict(dt=0.5, horizon=4.0, width=32, correction="attns")
    u = torch.rand(5, 1, **F64)
    fitted = [at.fit(system, data=d, **how).step(u) for d in (data, tmp_path, data.runs())]
    assert torch.equal(fitted[0], fitted[1])
    assert torch.equal(fitted[0], fitted[2])
    with pytest.warns(UserWarning, match="makes held-out trajectories worse"):
        noisy = at.fit(system, data=data.runs(noise=1e-2), **how)
    assert noisy.history[-1]["rollout"] > 100 * at.fit(system, data=data, **how).history[-1]["rollout"]
    with pytest.raises(ValueError, match=r"a state every 0.5, and dt is 0.25"):
        at.fit(system, data=data, **{**how, "dt": 0.25})


def test_data_of_another_equation_are_refused(tmp_path):
    system, other = at.systems.Logistic(growth=2.0), at.systems.Logistic(growth=2.1)
    how = dict(dt=0.5, horizon=4.0, width=32, correction="attns")
    data = make_trajectories(system, tmp_path, trajectories=60, dt=0.5, horizon=4.0)
    with pytest.raises(ValueError, match="data of another equation"):
        at.fit(other, data=data, **how)
    away = lambda t, u: -2 * u
    with pytest.raises(ValueError, match=r"does not follow this equation: within dt = 0\.5"):
        at.fit(away, data=data.runs(), sample=system.sample, **how)
    with pytest.raises(ValueError, match="those that are held out start from sample="):
        at.fit(lambda t, u: 2 * u * (1 - u), data=data, **how)
    with pytest.raises(TypeError, match=r"a list of its runs\(\)"):
        at.fit(system, data=[torch.rand(9, 5, 1)], **how)
    with pytest.raises(ValueError, match="noise = nan"):
        data.runs(noise=math.nan)


def test_what_is_nearest_is_taken():
    dt = 2 / 7
    with pytest.raises(ValueError, match="the nearest is") as found:
        whole_steps(dt, 2.6)
    near = re.search(r"nearest is ([0-9.]+), 9 of them", str(found.value))
    assert whole_steps(dt, float(near[1])) == 9


def test_solutions_that_end_are_told_from_stiff_ones():
    sample = lambda n, generator: 1 + torch.rand(n, 2, generator=generator, **F64)
    with pytest.raises(LostTrajectoriesError, match="if the solution itself does, shorten the horizon"):
        at.fit(lambda t, u: u * u, dt=0.1, horizon=2.0, sample=sample, trajectories=20, width=8)


def test_a_width_of_0_is_no_default():
    with pytest.raises(ValueError, match="width = 0"):
        at.fit(at.systems.Logistic(), dt=0.5, horizon=2.0, trajectories=20, width=0)


def test_step_and_solve_agree(chain):
    system, solver = chain
    u0 = system.sample(5, dtype=torch.float64)
    u = u0
    for _ in range(3):
        u = solver.step(u)
    torch.testing.assert_close(solver.solve(u0, 0.3).final, u, rtol=1e-14, atol=1e-14)
    assert len(solver.solve(u0, 1.0, every=5)) == 3
    torch.testing.assert_close(solver.solve(u0, 2.3, t0=2.0).final, u)


def test_guard_stays_close_to_plain_outside_and_out_of_the_way_inside(chain):
    system, solver = chain
    inside = system.sample(100, torch.Generator().manual_seed(5), torch.float64)
    calm = solver.solve(inside, 2.0, guard=True)
    assert calm.stats.guarded.double().mean() < 0.02 * 20
    far = torch.cat((torch.rand(100, 2, **F64) * math.pi / 2, torch.zeros(100, 2, **F64)), -1)
    truth = fine_trajectories(system, far, 0.1, 20, 40)
    guarded = solver.solve(far, 2.0, guard=True)
    plain = at.evolve(system, far, torch.arange(21, **F64) * 0.1, "rk4")
    error = lambda solved: (solved.u - truth).square().mean((0, 2))
    assert guarded.ok.all()
    assert error(guarded).mean() <= 2 * error(plain).mean()
    assert guarded.stats.guarded.max() > 10
    assert guarded.stats.rate_calls > plain.stats.rate_calls


def test_saved_and_loaded_solvers_give_the_same_bits(chain, tmp_path):
    system, solver = chain
    folder = solver.save(tmp_path / "s")
    again = at.HybridSolver.load(folder)
    u0 = system.sample(7, dtype=torch.float64)
    assert again.rate == system
    assert again.dt == solver.dt
    assert again.scheme == solver.scheme
    for guard in (False, True):
        assert torch.equal(again.solve(u0, 2.0, guard=guard).u, solver.solve(u0, 2.0, guard=guard).u)
    assert again.history == solver.history
    assert not any(
        p.requires_grad for p in (*again.correction.parameters(), *solver.correction.parameters())
    )
    half = at.HybridSolver.load(solver.to(torch.float32).save(tmp_path / "half"))
    assert torch.equal(half.solve(u0.float(), 1.0).u, solver.solve(u0.float(), 1.0).u)
    solver.to(torch.float64)


def test_loading_for_another_equation_is_refused(chain, tmp_path):
    folder = chain[1].save(tmp_path / "s")
    with pytest.raises(at.CheckpointError, match=r"fitted to PendulumChain\(links=2"):
        at.HybridSolver.load(folder, rate=at.systems.PendulumChain(3))
    own = at.HybridSolver(lambda t, u: -u, "rk4", at.corrections.AttNS(2, width=8), 0.1)
    folder = own.save(tmp_path / "own")
    with pytest.raises(at.CheckpointError, match="pass it as rate="):
        at.HybridSolver.load(folder)
    again = at.HybridSolver.load(folder, rate=own.rate)
    assert torch.equal(again.step(torch.ones(3, 2)), own.step(torch.ones(3, 2)))
    with pytest.raises(ValueError, match="needs a trust region"):
        again.solve(torch.ones(3, 2), 0.2, guard=True)


def test_a_rate_that_is_clearly_another_is_refused(tmp_path):
    """Code is not saved, but what it gives at some states is; rounding is no other equation."""
    spring = lambda t, u: torch.stack((u[..., 1], -u[..., 0]), -1)
    seen = torch.randn(50, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    trust = at.ode.trust.TrustRegion.around(seen)
    own = at.HybridSolver(spring, "rk4", at.corrections.AttNS(2, width=8), 0.1, trust)
    folder = own.save(tmp_path / "own")
    at.HybridSolver.load(folder, rate=lambda t, u: spring(t, u.float()).double())
    at.HybridSolver.load(folder, rate=lambda t, u: u.missing)  # cannot be asked here
    with pytest.raises(
        at.CheckpointError, match=r"another equation: at t = [\d.]+ and u = \[.*\] its rate was \["
    ):
        at.HybridSolver.load(folder, rate=lambda t, u: 1.01 * spring(t, u))


def test_a_scheme_of_one_s_own_is_saved(tmp_path):
    heun = at.Scheme("mine", [[], [1]], ["1/2", "1/2"], [0, 1], 2, b_low=[1, 0])
    for scheme in (heun, at.schemes.YOSHIDA4, at.schemes.DOPRI5):
        solver = at.HybridSolver(at.systems.HarmonicOscillator(), scheme, at.corrections.Linear(2), 0.1)
        assert at.HybridSolver.load(solver.save(tmp_path / scheme.name)).scheme == scheme


SAMPLE = lambda n, generator: torch.rand(n, 2, generator=generator)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(horizon=1.05), "not a whole number of steps of dt = 0.1; the nearest is 1"),
        (dict(dt=-0.1), "must be a positive number"),
        (dict(correction="attn"), "no correction is called 'attn'"),
        (dict(recipe="fast"), "'default' or 'paper'"),
        (dict(recipe=Ridge), "'default' or 'paper'"),
        (dict(trajectories=0), "trajectories = 0 must be a whole number"),
        (dict(sample=None), "needs sample="),
        (dict(sample=lambda n, generator: torch.rand(n)), r"it must return a tensor \["),
        (dict(sample=lambda n, generator: torch.full((n, 2), torch.nan)), "non-finite states"),
        (dict(rate=lambda t, u: u[..., :1]), r"returned shape \[16, 1\]"),
        (dict(rate=lambda t, u: u / 0), "non-finite at sampled states"),
        (dict(rate=lambda t, u: u * torch.cos(t)), "depends on t.*pass its period="),
        (dict(rate=lambda t, u: u * torch.cos(t), period=3.0), "does not repeat with period = 3"),
        (dict(period=-1.0), "period = -1.0 must be a positive"),
        (dict(options={"precision": "float16"}), "precision 'float16' is neither"),
        (dict(options={"body": "gru"}), "not one of mlp, lstm, transformer"),
        (dict(data=[]), r"runs of states \[steps \+ 1, n, 2\]"),
        (dict(rate=lambda t, u: u**3 * 50), "become non-finite even with|do not settle"),
        (dict(fine_dt=0.2), "must be positive and at most dt"),
        (dict(scheme="rk5"), "no scheme is called"),
    ],
)
def test_bad_input_is_named_before_time_is_spent(change, message):
    good = dict(rate=lambda t, u: -u, dt=0.1, horizon=1.0, sample=SAMPLE, trajectories=10, width=8)
    options = {**good, **change}
    with pytest.raises(ValueError, match=message):
        at.fit(options.pop("rate"), **options)


def test_solve_takes_whole_steps_forward(chain):
    system, solver = chain
    for end in (0.25, -1.0):
        with pytest.raises(ValueError, match="not a whole number of steps"):
            solver.solve(system.sample(2, dtype=torch.float64), end)


def test_whole_steps_are_told_apart_however_small_they_are():
    solver = at.HybridSolver(
        lambda t, u: -u, "rk4", at.corrections.Linear(1, dtype=torch.float64), 1e-10
    )
    u0 = torch.ones(1, 1, **F64)
    assert len(solver.solve(u0, 3e-10)) == 4
    assert len(solver.solve(u0, 1e-6 + 3e-10, t0=1e-6)) == 4  # t_end is rounded
    for end in (1.5e-10, 3.01e-10):
        with pytest.raises(ValueError, match="not a whole number of steps"):
            solver.solve(u0, end)


# Every option of Network, with a value that is not the default.
OTHER = dict(width=24, depth=3, activation="tanh", skip=True, residual=True, body="lstm", period=2.0,
             precision="float32", parameters=1)  # fmt: skip


def test_every_option_of_the_network_is_tried():
    given = inspect.signature(Network).parameters
    assert set(OTHER) == set(given) - {"inputs", "outputs", "factory"}
    assert all(given[name].default != value for name, value in OTHER.items())


@pytest.mark.parametrize("kind", ["attns", "attns_m", "neurvec", "csm", "fsnet"])
@pytest.mark.parametrize("option", OTHER)
def test_every_option_survives_saving(kind, option, tmp_path):
    value = not OTHER[option] if (kind, option) == ("csm", "residual") else OTHER[option]
    options = {"width": 8, "depth": 3, option: value}
    correction = at.corrections.get_correction(kind)(2, **options, dtype=torch.float64)
    solver = at.HybridSolver(at.systems.HarmonicOscillator(), "rk4", correction, 0.1)
    again = at.HybridSolver.load(solver.save(tmp_path / "s"))
    assert again.correction.config == correction.config
    assert again.correction.config[option] == value
    if option == "parameters":  # which the rate of this solver does not take
        return
    u = torch.rand(3, 2, **F64)
    correction.requires_grad_(False)  # an LSTM whose weights ask for gradients rounds in another order
    assert torch.equal(again.step(u, 0.3), solver.step(u, 0.3))


@pytest.mark.parametrize(("kind", "residual"), [("neurvec", False), ("csm", True)])
def test_folders_from_before_residual_was_written_still_load(kind, residual, tmp_path):
    correction = at.corrections.get_correction(kind)(2, width=8, depth=3)
    del correction.config["residual"]
    solver = at.HybridSolver(at.systems.HarmonicOscillator(), "rk4", correction, 0.1)
    again = at.HybridSolver.load(solver.save(tmp_path / "s"))
    assert again.correction.net.body.residual is residual
    assert torch.equal(again.step(torch.ones(3, 2)), solver.step(torch.ones(3, 2)))


def test_only_the_library_s_corrections_can_be_saved(tmp_path):
    class Mine(torch.nn.Linear):
        pass

    solver = at.HybridSolver(lambda t, u: -u, "rk4", Mine(2, 2), 0.1)
    with pytest.raises(TypeError, match=r"a correction of type Mine cannot be saved.*AttNS.*state_dict"):
        solver.save(tmp_path / "s")


@pytest.mark.slow
def test_a_small_component_decides_about_substeps_as_well():
    def rate(t, u):  # a slow component of size 1e6 beside a quick one of size 1
        slow, q, v = u.unbind(-1)
        return torch.stack((-0.01 * slow, v, -25 * q), -1)

    alone = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.5, 1.0]], **F64)
    beside = alone * torch.tensor([1e6, 1.0, 1.0], **F64)
    assert enough_substeps(rate, beside, 0.2, 50) == enough_substeps(rate, alone, 0.2, 50)
    still = beside * torch.tensor([1.0, 0.0, 0.0], **F64)  # what is zero is settled
    assert enough_substeps(rate, still, 0.2, 50) == 2


def test_a_step_may_be_a_whole_number(tmp_path):
    how = dict(horizon=4, correction="linear", trajectories=5)
    system = at.systems.HarmonicOscillator()
    kept = at.fit(system, dt=1, out=tmp_path / "fit", **how)
    u0 = system.sample(2, dtype=torch.float64)
    assert torch.equal(kept.step(u0), at.fit(system, dt=1.0, **how).step(u0))


@pytest.mark.parametrize("middle", [0.2, 0.55, 0.9])
def test_a_pulse_in_time_is_noticed(middle):
    pulse = lambda t, u: -u + (abs(t - 10 * middle) < 0.25) * 1.0
    with pytest.raises(ValueError, match="the rate depends on t"):
        at.fit(pulse, dt=0.1, horizon=10.0, sample=SAMPLE, trajectories=4)
    with pytest.raises(ValueError, match="does not repeat with period = 25"):
        at.fit(pulse, dt=0.1, horizon=10.0, sample=SAMPLE, trajectories=4, period=25.0)


@pytest.mark.slow
def test_a_period_known_to_seven_digits_is_good_enough():
    rate = lambda t, u: torch.stack((u[..., 1], -u[..., 0] + torch.cos(t)), -1)
    solver = at.fit(rate, dt=0.1, horizon=2.0, sample=SAMPLE, trajectories=8, period=6.2831853,
                    correction="linear")  # fmt: skip
    assert solver.correction.config["period"] == 6.2831853


@pytest.mark.parametrize("every", [1, 7])
def test_guarded_steps_are_counted_once(every):
    # The second trajectory is lost at 1/2, which makes the run be repeated; all are outside throughout.
    trust = TrustRegion.around(torch.full((50, 1), -100.0, **F64) + 0.1 * torch.rand(50, 1, **F64))
    correction = at.corrections.Linear(1, dtype=torch.float64)
    solver = at.HybridSolver(lambda t, u: u**2, "rk4", correction, 0.05, trust)
    u0 = torch.tensor([[0.1], [2.0], [0.2]], **F64)
    solved = solver.solve(u0, 2.0, guard=True, every=every)
    assert solved.ok.tolist() == [True, False, True]
    followed = round(solved.until[1].item() / 0.05)
    assert 5 < followed < 20
    assert solved.stats.guarded.tolist() == [40, followed, 40]


def test_former_keywords_are_options_and_warn():
    how = dict(dt=0.1, horizon=1.0, trajectories=20, fine_dt=0.05, width=8, correction="attns")
    rate = at.systems.HarmonicOscillator()
    with pytest.warns(DeprecationWarning, match="pass options={'depth': 3, 'activation': 'tanh'}"):
        former = at.fit(rate, depth=3, activation="tanh", precision=None, **how)
    now = at.fit(rate, options={"depth": 3, "activation": "tanh"}, **how)
    assert former.correction.config == now.correction.config
    assert former.correction.config["depth"] == 3
    assert former.fit_error == now.fit_error
