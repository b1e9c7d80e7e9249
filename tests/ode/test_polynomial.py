"""Polynomials of the state as corrections, their loop in C, and the search for them."""

import copy
import itertools
import math

import pytest
import torch

import attractor as at
from attractor.core.chunks import Guard
from attractor.core.identity import Identity
from attractor.core.step import Step
from attractor.ode.candidates import Candidate
from attractor.ode.corrections import Polynomial, polynomial_kernel
from attractor.ode.corrections.polynomial import Monomials, count_terms
from attractor.ode.hybrid_search import HybridSearch
from attractor.ode.polynomial_search import FITS, GRID, STEPS, PolynomialSearch
from attractor.ode.trust import TrustRegion

F64 = {"dtype": torch.float64}
IDENTITY = at.get_scheme("identity")


def small(dim, degree, dtype=torch.float64, **options):
    """A polynomial whose steps move states a little."""
    torch.manual_seed(0)
    correction = Polynomial(dim, degree, dtype=dtype, **options).requires_grad_(False)
    net = correction.net
    torch.nn.init.normal_(net.head.weight, std=0.1)
    inputs = len(net.centre)
    centre = 0.0 if net.odd else 0.3
    net.standardise(torch.full((inputs,), centre, dtype=dtype), torch.full((inputs,), 0.5, dtype=dtype))
    return correction


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize(("inputs", "degree"), [(1, 5), (2, 1), (2, 4), (3, 3), (5, 2)])
def test_every_monomial_occurs_once(inputs, degree, odd):
    """Values at a point of distinct primes tell all products of powers apart."""
    primes = torch.tensor([2.0, 3.0, 5.0, 7.0, 11.0], **F64)[:inputs]
    net = Monomials(inputs, 1, degree, odd=odd, **F64)
    powers = itertools.product(range(degree + 1), repeat=inputs)
    expected = sorted(
        math.prod(p**n for p, n in zip(primes.tolist(), own))
        for own in powers
        if 1 <= sum(own) <= degree and (sum(own) % 2 or not odd)
    )
    values = net.features((primes / net.scale)[None])[0]
    assert len(expected) == count_terms(inputs, degree, odd)
    if not odd:
        assert values[-1] == 1
        values = values[:-1]
    torch.testing.assert_close(values.sort().values, torch.tensor(expected, **F64))


def test_an_odd_polynomial_is_an_odd_function():
    net = small(3, 5, odd=True).net
    x = torch.rand(20, 3, **F64)
    torch.testing.assert_close(net(-x), -net(x))


def test_the_identity_leaves_states_and_never_calls_the_rate():
    def rate(t, u):
        raise AssertionError("the rate was called")

    u = torch.rand(3, 2, **F64)
    step = Identity().step(rate, 0.0, u, 0.1)
    assert not step.slope.any()
    assert step.stages == ()
    assert torch.equal(at.evolve(rate, u, [0.0, 0.5, 2.0], IDENTITY).final, u)
    assert "identity" not in at.schemes.ALL


SIZES = [
    (1, 1, {}), (4, 6, {}), (2, 12, {}), (9, 2, {}), (3, 4, {"parameters": 2}), (2, 3, {"period": 0.7}),
    (2, 7, {"odd": True}), (3, 4, {"odd": True}), (2, 5, {"odd": True, "period": 0.7}), (20, 1, {}),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("dim", "degree", "options"), SIZES)
@pytest.mark.parametrize("guarded", [False, True])
def test_the_loop_in_c_equals_torch(dim, degree, options, dtype, guarded):
    """For numbers of states that fill no block, one or several, and any strides; also where some leave."""
    correction = small(dim, degree, dtype, **options)
    region = guard = None
    known = dim + options.get("parameters", 0)
    if guarded:
        region = TrustRegion.around(0.8 * torch.rand(400, known, dtype=dtype), dim=dim)
        guard = region.guard(IDENTITY)
    inside = None if region is None else region.inside
    for states in (1, 7, 300):
        u = torch.rand(states, 2 * dim, dtype=dtype)[:, ::2]
        p = torch.rand(states, 2, dtype=dtype) if "parameters" in options else None
        kernel = correction._identity_loop(u, guard)
        assert kernel is not None, "no C compiler"
        t, dt = torch.arange(8, dtype=dtype) * 0.2, torch.full((8,), 0.2, dtype=dtype)
        for anywhere in (torch.zeros(states, dtype=torch.bool), torch.arange(states) % 5 > 0):
            problem = t, dt, torch.tensor(5), u, anywhere, p
            found = kernel(*problem)
            # The same steps, one after the other in Python.
            steps, inside_now, stayed, state = 0, torch.ones_like(anywhere), torch.ones_like(anywhere), u
            while True:
                if inside is not None:
                    x = state if p is None else torch.cat((state, p), -1)
                    inside_now = inside(x)
                if steps == 5 or not bool((inside_now | anywhere).all()):
                    break
                stayed &= inside_now
                step = IDENTITY.step(None, t[steps], state, 0.2, p)
                state, steps = state + correction(step), steps + 1
            assert int(found.taken) == steps
            torch.testing.assert_close(found.u, state)
            assert torch.equal(found.inside, inside_now)
            assert torch.equal(found.stayed, stayed)


def test_threads_share_the_trajectories_of_the_loop():
    correction, u, threads = small(3, 5), torch.rand(5000, 3, **F64), torch.get_num_threads()
    call = lambda: correction._identity_loop(u, None)(
        u.new_zeros(4), u.new_zeros(4), torch.tensor(4), u, torch.ones(5000, dtype=torch.bool)
    )
    alone = call()
    torch.set_num_threads(3)
    try:
        together = call()
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(alone.u, together.u)


@pytest.mark.parametrize("reason", ["no compiler", "region", "dtype", "guard"])
def test_there_is_no_loop_in_c_where_it_would_compute_something_else(reason, monkeypatch):
    correction, u = small(3, 4), torch.rand(20, 3, **F64)
    region = TrustRegion.around(u)
    guard = region.guard(IDENTITY)
    assert correction._identity_loop(u, guard) is not None
    if reason == "no compiler":
        correction = small(3, 4)
        monkeypatch.setattr(polynomial_kernel, "compiled_library", lambda source, macros: None)
        polynomial_kernel.compiled_kernel.cache_clear()
    elif reason == "region":  # no inverse of a triangle
        region.factor[-1, 0] = 0.5
    elif reason == "dtype":
        u = u.float()
    else:
        guard = Guard(lambda u: u[..., 0] > 0, None)
    assert correction._identity_loop(u, guard) is None
    polynomial_kernel.compiled_kernel.cache_clear()


def cubic(t, u):
    x, v = u.unbind(-1)
    return torch.stack((v, -x - x**3), -1)


def states(n, generator):
    return torch.rand(n, 2, generator=generator, **F64) + 0.5


@pytest.fixture(scope="module")
def solver():
    return at.fit(
        cubic, dt=0.5, horizon=4.0, scheme="identity", correction="polynomial",
        options={"degree": 11, "odd": True}, sample=states, trajectories=2000,
    )  # fmt: skip


def reference(u0, t):
    return at.evolve(cubic, u0, [0.0, t], "dop853", rtol=1e-12, atol=1e-12).final


def test_large_steps_without_the_rate_are_accurate(solver):
    u0 = states(100, torch.Generator().manual_seed(9))
    solved = solver.solve(u0, 4.0)
    assert solved.stats.rate_calls == 0
    assert (solved.final - reference(u0, 4.0)).square().mean().sqrt() < 1e-5
    plain = at.evolve(cubic, u0, torch.arange(9, **F64) / 2, "rk4").final
    assert (plain - reference(u0, 4.0)).square().mean().sqrt() > 1e-2


@pytest.mark.parametrize("compile", [False, True])
def test_states_outside_are_left_to_the_guard(solver, compile):
    u0 = torch.tensor([[4.0, 0.0], [1.0, 0.6]], **F64)
    solved = solver.solve(u0, 1.0, compile=compile)
    assert solved.stats.guarded.tolist() == [2, 0]
    assert solved.status.tolist() == [at.core.Status.GUARDED, 0]
    torch.testing.assert_close(solved.final, reference(u0, 1.0), rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("known", [True, False])
def test_the_guard_of_a_large_step_takes_as_many_substeps_as_it_needs(known):
    """Also where the accuracy of a fit is not known: substeps of the identity would stand still."""
    region = TrustRegion.around(states(50, torch.Generator().manual_seed(0)))
    if known:
        region.accuracy = torch.full((2,), 1e-9, **F64)
    solver = at.HybridSolver(cubic, IDENTITY, small(2, 3), 60.0, region)
    u0 = torch.tensor([[4.0, 0.0]], **F64)
    torch.testing.assert_close(solver.solve(u0, 60.0).final, reference(u0, 60.0), rtol=1e-5, atol=1e-5)


def test_a_network_of_the_state_may_replace_the_rate():
    """The slope of the identity is 0, and it has no stages: "auto" takes the state."""
    solver = at.fit(
        cubic, dt=0.5, horizon=2.0, scheme="identity", sample=states, trajectories=500, width=64
    )
    assert isinstance(solver.correction, at.corrections.NeurVec)
    assert solver.fit_error < 1e-4
    with pytest.raises(TypeError, match="identity has no stages"):
        at.fit(cubic, dt=0.5, horizon=2.0, scheme="identity", sample=states, correction="stages")


def test_a_compiled_solve_is_the_loop_in_c_and_agrees(solver, monkeypatch):
    calls, own = [], polynomial_kernel.Kernel.__call__
    spy = lambda self, *args: calls.append(self.size) or own(self, *args)
    monkeypatch.setattr(polynomial_kernel.Kernel, "__call__", spy)
    u0 = states(50, torch.Generator().manual_seed(2))
    for every in (1, 3, 8):
        compiled, eager = (solver.solve(u0, 4.0, every=every, compile=x) for x in (True, False))
        torch.testing.assert_close(compiled.u, eager.u)
        assert calls
        calls.clear()
    batches = solver.solve(u0.view(5, 10, 2), 4.0, compile=True).final
    torch.testing.assert_close(batches.view(50, 2), eager.final)
    torch.testing.assert_close(solver.solve(u0[0], 4.0, compile=True).final, eager.final[0])


def test_the_loop_in_c_follows_changes_of_weights_and_region():
    correction, u = small(2, 4), states(50, torch.Generator().manual_seed(2))
    region = TrustRegion.around(u, 1.01)
    solver = at.HybridSolver(cubic, IDENTITY, correction, 0.5, region)
    head = correction.net.head
    changes = [
        lambda: None,
        lambda: head.weight.mul_(0.5),
        lambda: setattr(head, "weight", torch.nn.Parameter(3 * head.weight, requires_grad=False)),
        lambda: region.limit.mul_(1e-3),
    ]
    before = None
    for change in changes:
        change()
        compiled, eager = (solver.solve(u, 2.0, compile=x, guard=False) for x in (True, False))
        torch.testing.assert_close(compiled.u, eager.u)
        assert torch.equal(compiled.status, eager.status)
        now = compiled.u.sum(), compiled.status.sum()
        assert before is None or now != before
        before = now
    low = copy.deepcopy(solver).to(torch.float32).solve(u, 2.0, compile=True, guard=False)
    torch.testing.assert_close(low.u.double(), compiled.u, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("of", ["weights", "parameters"])
def test_a_compiled_solve_has_the_gradients_of_weights_and_parameters(of):
    correction = small(2, 3, parameters=int(of == "parameters"))
    u = states(50, torch.Generator().manual_seed(2))
    p = torch.rand(50, 1, **F64).requires_grad_() if of == "parameters" else None
    correction.requires_grad_(of == "weights")
    solver = at.HybridSolver(lambda t, u, *p: cubic(t, u), IDENTITY, correction, 0.5)
    how = dict(parameters=p, every=2)
    with torch.no_grad():
        fast = solver.solve(u, 1.0, compile=True, **how)
    solved = solver.solve(u, 1.0, compile=True, **how)
    (gradient,) = torch.autograd.grad(
        solved.final.sum(), p if p is not None else correction.net.head.bias
    )
    assert gradient.abs().max() > 0
    torch.testing.assert_close(fast.final, solved.final)


@pytest.mark.slow
def test_compiled_gradients_agree():
    solver = at.HybridSolver(cubic, IDENTITY, small(2, 3), 0.5)
    u0 = states(50, torch.Generator().manual_seed(2)).requires_grad_()
    gradients = [
        torch.autograd.grad(solver.solve(u0, 2.0, compile=x).final.sum(), u0)[0] for x in (True, False)
    ]
    torch.testing.assert_close(*gradients)


@pytest.mark.slow
def test_without_the_loop_in_c_torch_compiles_one(solver, monkeypatch):
    monkeypatch.setattr(Polynomial, "_identity_loop", lambda self, u, guard: None)
    u0 = states(50, torch.Generator().manual_seed(2))
    torch.testing.assert_close(
        solver.solve(u0, 4.0, every=8, compile=True).final, solver.solve(u0, 4.0).final
    )


def test_a_saved_solver_steps_as_before(solver, tmp_path):
    again = at.HybridSolver.load(solver.save(tmp_path / "solver"), rate=cubic)
    assert again.scheme is IDENTITY
    u0 = states(5, torch.Generator().manual_seed(3))
    assert torch.equal(again.solve(u0, 2.0).u, solver.solve(u0, 2.0).u)
    assert "identity" in repr(again)


def test_compare_counts_steps_of_rk4(solver):
    found = at.compare(solver, horizon=4.0, sample=states, batch=20, compile=False, peers=False)
    assert found.hybrid.rate_calls == 0
    assert {"rk4", "dopri5", "dop853"} == {p.method for p in found.points}
    assert found.m > 4
    assert found.m_star > 0


def test_sizes_that_cannot_be_computed_are_refused():
    with pytest.raises(ValueError, match=r"20 inputs have [\d,]+ monomials of degree 9 or less"):
        Polynomial(20, degree=9)
    with pytest.raises(ValueError, match="degree"):
        Polynomial(2, degree=0)
    with pytest.raises(TypeError, match="no option width"):
        Polynomial(2, width=3)
    with pytest.raises(TypeError, match="odd = 'yes' must be True or False"):
        Polynomial(2, odd="yes")
    with pytest.raises(ValueError, match="odd=True serves rates that change their sign"):
        Polynomial(2, odd=True, parameters=1)


def test_parameters_and_phase_are_inputs():
    correction = Polynomial(2, degree=2, period=1.0, parameters=1, **F64)
    torch.nn.init.normal_(correction.net.head.weight)
    u, slope = torch.rand(2, 3, 2, **F64)

    def call(t, p):
        return correction(Step(u, slope, 0.1, torch.tensor(t, **F64), (), torch.full((3, 1), p, **F64)))

    torch.testing.assert_close(call(0.2, 1.0), call(1.2, 1.0))
    assert not torch.allclose(call(0.2, 1.0), call(0.2, 2.0))
    assert not torch.allclose(call(0.2, 1.0), call(0.4, 1.0))


# The search


def search(rate=cubic, sample=states, horizon=4.0, error=1e-6, parameters=None, period=None):
    options = rate, error, horizon, sample, parameters, 5, 60.0, None, period, 0, lambda message: None
    return HybridSearch(at.fit, *options)


def polynomials(*args, fine_dt=0.05, **options):
    own = search(*args, **options)
    with torch.no_grad():
        own.reference()
    return PolynomialSearch(own, at.fit, fine_dt)


def uniform(dim):
    return lambda n, generator: torch.rand(n, dim, generator=generator, **F64)


@pytest.mark.parametrize(
    ("dim", "terms", "rows"),
    [(2, 72, 25_000), (4, 329, 25_000), (40, 40, 2_500), (40, 860, 25_000), (8, 2200, 39_600)],
)
def test_states_of_many_components_need_fewer_steps_to_learn_from(dim, terms, rows):
    own = PolynomialSearch(search(lambda t, u: 1 - u, uniform(dim)), None, 0.1)
    assert own.rows(terms) == rows


def test_the_search_finds_steps_that_start_anywhere_on_a_trajectory():
    own = polynomials(error=1e-5)
    with torch.no_grad():
        found = own.run()
    assert found
    assert all(c.error <= 1e-5 and c.scheme == "identity" and c.degree % 2 for c in found)
    assert all(round(4.0 / c.setting) in STEPS for c in found)
    solver = own.search.solver_of(found[0])
    u0 = reference(states(100, torch.Generator().manual_seed(5)), 0.37 * solver.dt)
    left = 4.0 - solver.dt
    solved = solver.solve(u0, left)
    assert (solved.final - reference(u0, left)).square().mean().sqrt() < 1e-4
    assert solved.stats.guarded.sum() == 0


def test_steps_that_are_learned_from_start_at_all_points():
    own = polynomials()
    with torch.no_grad():
        own.runs = own.fine_runs()
    runs = own.steps_along(Candidate("hybrid", "identity", 4.0 / 8, degree=3))
    assert [run.t0 for run in runs] == pytest.approx([4.0 / GRID * i for i in range(len(runs))])
    assert len(runs) == GRID - GRID // 8 + 1
    after = torch.cat([reference(run.u[0, :3], 0.5) for run in runs[::40]])
    torch.testing.assert_close(torch.cat([run.u[1, :3] for run in runs[::40]]), after)


@pytest.mark.parametrize(("period", "lists"), [(None, False), (2.0, False), (2.0, True)])
def test_most_steps_that_are_learned_from_start_beside_the_trajectories(period, lists):
    def rate(t, u):
        if lists and t.dim():
            raise ValueError("one time for all states")
        return (
            cubic(t, u) if period is None else cubic(t, u) + torch.cos(math.pi * t) * torch.ones_like(u)
        )

    own = polynomials(rate, period=period)
    way = Candidate("hybrid", "identity", 4.0 / 8, degree=3)
    with torch.no_grad():
        own.runs = own.fine_runs()
        along, runs = own.steps_along(way), own.steps_of(way)
    before, after = (torch.cat([run.u[0] for run in x]) for x in (along, runs))
    moved = (before != after).any(-1)
    if lists:
        assert not moved.any()
        return
    assert 0.6 < moved.double().mean() < 0.8
    size = ((after - before)[moved] / before.std(0)).square().mean().sqrt()
    assert size == pytest.approx(0.1, rel=0.1)
    for run in runs[::60]:
        t = run.t0 + torch.tensor([0.0, 0.5], **F64)
        truth = at.evolve(rate, run.u[0, :5], t, "dop853", rtol=1e-12, atol=1e-12).final
        torch.testing.assert_close(run.u[1, :5], truth, rtol=1e-9, atol=1e-9)


def test_a_polynomial_of_a_thin_set_of_states_holds_beside_it():
    """All trajectories start on one line; those that do not are close to it, and no guard steps."""
    pendulum = at.systems.ElasticPendulum()
    own = polynomials(pendulum, None, horizon=5.0, error=1e-5)
    with torch.no_grad():
        own.runs = own.fine_runs()
        solver = own.search.solver_of(own.refit(Candidate("hybrid", "identity", 0.5, degree=6)))
    u0 = pendulum.sample(100, torch.Generator().manual_seed(4), torch.float64)
    u0 = u0 + torch.tensor([0.0, 0.05, 0.02, 0.1], **F64)
    truth = at.evolve(pendulum, u0, [0.0, 5.0], "dop853", rtol=1e-11, atol=1e-11).final
    assert (solver.solve(u0, 5.0, guard=False).final - truth).abs().max() < 1e-3


def driven(t, u):
    x, v = u.unbind(-1)
    return torch.stack((v, -(x**3) + torch.cos(2 * t) * torch.ones_like(x)), -1)


def sprung(t, u, p):
    return torch.stack((u[..., 1], -p[..., 0] * u[..., 0]), -1)


@pytest.mark.parametrize(
    ("rate", "options", "odd"),
    [
        (cubic, {}, True),
        (at.systems.HenonHeiles(), {"sample": None}, False),
        (driven, {"period": math.pi}, True),
        (lambda t, u: driven(t, u) + 0.1, {"period": math.pi}, False),
        (sprung, {"parameters": uniform(1)}, False),
    ],
)
def test_odd_powers_do_where_the_rate_is_odd(rate, options, odd):
    own = search(rate, options.pop("sample", states), **options)
    assert PolynomialSearch(own, None, 0.1).odd is odd


def test_degrees_have_a_limited_number_of_terms():
    degrees = lambda dim: PolynomialSearch(search(lambda t, u: 1 - u, uniform(dim)), None, 0.1).degrees()
    assert degrees(2) == [16, 14, 7]
    assert degrees(4) == [7, 4, 3]
    assert degrees(20) == [2, 1]
    assert degrees(500) == []


@pytest.mark.parametrize("errors", [(1e200, 9.9e199), (1e-300, 1e200), (math.inf, 1e250), (0.0, 0.0)])
def test_the_search_ends_whatever_errors_its_candidates_have(errors, monkeypatch):
    own, rest = PolynomialSearch(search(), None, 0.1), itertools.cycle(errors)
    candidate = lambda self, degree, steps: Candidate(
        "hybrid", IDENTITY.name, 4.0 / steps, degree=degree, error=next(rest)
    )
    monkeypatch.setattr(PolynomialSearch, "candidate", candidate)
    assert 1 <= len(own.fewest_steps(3)) <= FITS


def test_the_fastest_hybrid_may_be_a_polynomial():
    fast = at.fit(
        cubic, objective="time", error=1e-4, horizon=4.0, sample=states, correction="polynomial"
    )
    assert fast.scheme is IDENTITY
    u0 = states(100, torch.Generator().manual_seed(6))
    assert (fast.solve(u0, 4.0).final - reference(u0, 4.0)).square().mean().sqrt() < 3e-4
    assert fast.history[-1]["seconds"] > 0
