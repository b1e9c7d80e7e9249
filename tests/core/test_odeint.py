import importlib
import weakref

import pytest
import torch

import attractor as at

torchdiffeq = pytest.importorskip("torchdiffeq")
F64 = dict(dtype=torch.float64)
T = torch.tensor([0.0, 0.3, 1.0, 1.7], **F64)


class Field(torch.nn.Module):
    """A rate with weights, time and a batch, as a user of torchdiffeq would write it."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
        ).double()

    def forward(self, t, y):
        assert t.dim() == 0
        return self.net(y) * t.cos() - 0.5 * y


def both(y0, t=T, weights=None, **how):
    """Solution and gradients from either library."""
    for library in (torchdiffeq, at):
        torch.manual_seed(5)
        field = Field()
        start = y0.clone().requires_grad_()
        times = t.clone().requires_grad_()
        y = library.odeint(field, start, times, **how)
        torch.manual_seed(6)
        loss = (y * torch.randn_like(y)).sum()
        yield y.detach(), *torch.autograd.grad(loss, (start, times, *field.parameters()))


@pytest.mark.parametrize("method", ["euler", "midpoint", "heun2", "heun3", "rk4"])
@pytest.mark.parametrize("back", [False, True])
def test_fixed_methods_give_torchdiffeq_s_numbers(method, back):
    t = T.flip(0) if back else T
    for theirs, ours in zip(*both(torch.randn(4, 3, **F64), t, method=method)):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", [None, "dopri5", "bosh3", "fehlberg2", "adaptive_heun"])
def test_adaptive_methods_agree_with_torchdiffeq(method):
    tolerance = 1e-5 if method in ("fehlberg2", "adaptive_heun") else 1e-8
    how = dict(method=method, rtol=tolerance, atol=tolerance)
    (y, y0, t, *weights), (y_, y0_, t_, *weights_) = both(torch.randn(4, 3, **F64), **how)
    for theirs, ours in zip((y, y0, *weights), (y_, y0_, *weights_)):
        torch.testing.assert_close(ours, theirs, rtol=3e3 * tolerance, atol=3e3 * tolerance)
    if method in (None, "dopri5"):  # the others' interpolants there are too coarse for times
        torch.testing.assert_close(t_, t, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("step", [0.1, 0.25, 0.03])
@pytest.mark.parametrize("back", [False, True])
def test_step_size(step, back):
    y0, t = torch.randn(4, 3, **F64), torch.tensor([0.0, 0.5, 1.0, 1.5], **F64)
    t = t.flip(0) if back else t
    theirs, ours = both(y0, t, method="rk4", options={"step_size": step})
    # torchdiffeq interpolates linearly where its grid misses a wanted time; ours steps on it.
    tolerance = 1e-10 if step != 0.03 else 1e-3
    torch.testing.assert_close(ours[0], theirs[0], rtol=tolerance, atol=tolerance)


def test_a_step_size_for_one_interval():
    y = at.odeint(lambda t, y: -y, torch.ones(1, **F64), torch.tensor([0.0, 1.0], **F64),
                  method="euler", options={"step_size": 0.25})  # fmt: skip
    torch.testing.assert_close(y[-1], torch.full((1,), 0.75**4, **F64))


def test_steps_end_at_the_wanted_times():
    seen = []
    rate = lambda t, y: (seen.append(t.item()), -y)[1]
    at.odeint(rate, torch.ones(1, **F64), torch.tensor([0.0, 0.25, 1.0], **F64), method="euler",
              options={"step_size": 0.1})  # fmt: skip
    assert seen == pytest.approx([0.0, 0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])


def test_grid_constructor():
    grid = lambda func, y0, t: torch.linspace(t[0].item(), t[-1].item(), 35, **F64)
    y0, field = torch.randn(2, 3, **F64), Field()
    how = dict(method="rk4", options={"grid_constructor": grid})
    ours, theirs = (library.odeint(field, y0, T, **how) for library in (at, torchdiffeq))
    torch.testing.assert_close(ours[-1], theirs[-1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", ["dopri5", "rk4"])
def test_tuples(method):
    rate = lambda t, y: (y[1], -y[0])
    y0 = (torch.rand(2, 3, **F64), torch.rand(2, 3, **F64))
    ours = at.odeint(rate, y0, T, method=method)
    theirs = torchdiffeq.odeint(rate, y0, T, method=method)
    for a, b in zip(ours, theirs):
        assert a.shape == (4, 2, 3)
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_scalar_state_and_any_shape():
    for shape in ((), (1,), (2, 3, 4)):
        y0 = torch.rand(shape, **F64)
        assert at.odeint(lambda t, y: -y, y0, T).shape == (4, *shape)
        torch.testing.assert_close(
            at.odeint(lambda t, y: -y, y0, T)[-1], y0 * torch.exp(-T[-1]), rtol=1e-6, atol=0
        )


def test_a_scheme_of_one_s_own():
    y0 = torch.rand(2, 2, **F64)
    fixed = at.odeint(lambda t, y: -y, y0, torch.linspace(0, 1, 21, **F64), method=at.schemes.SSPRK3)
    adaptive = at.odeint(lambda t, y: -y, y0, torch.linspace(0, 1, 2, **F64), method=at.schemes.BOSH3)
    torch.testing.assert_close(fixed[-1], adaptive[-1], rtol=1e-4, atol=0)


def test_options_reach_the_controller():
    field, y0 = Field(), torch.randn(4, 3, **F64)
    norm = lambda x: x.abs().max()
    how = dict(rtol=1e-6, atol=1e-6, method="dopri5")
    options = {"first_step": 0.01, "safety": 0.8, "max_num_steps": 500, "norm": norm}
    plain, tuned = at.odeint(field, y0, T, **how), at.odeint(field, y0, T, **how, options=options)
    torch.testing.assert_close(plain, tuned, rtol=1e-4, atol=1e-4)
    with pytest.raises(FloatingPointError, match="after 3 steps"):
        at.odeint(field, y0, T, **how, options={"max_num_steps": 3})


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (dict(method="rodas5"), "odeint has no method 'rodas5'; adaptive: dopri5.*scipy_solver"),
        (dict(event_fn=lambda t, y: y), r"t has 4 times; with event_fn pass t\[0\], and t\[1\]"),
        (dict(method="rk4", options={"jump_t": T}), r"\['jump_t'\] are not supported with fixed"),
        (dict(options={"perturb": True}), r"\['perturb'\] are not supported with an adaptive"),
        (dict(options={"step_t": [0.5], "jump_t": [0.5]}), "step_t and jump_t share times"),
        (dict(method="rk4", options={"interp": "quintic"}), "interp = 'quintic' is not one of"),
        (dict(method="scipy_solver", options={"first_step": 1}), "there are solver, min_step, max_step"),
        (dict(method="rk4", options={"step_size": -0.1}), "must be positive"),
        (dict(method="rk4", options={"step_size": 0.1, "grid_constructor": print}), "were both passed"),
    ],
)
def test_what_is_not_supported_says_so(how, message):
    with pytest.raises(ValueError, match=message):
        at.odeint(lambda t, y: -y, torch.ones(2), T, **how)


def test_wrong_results_of_the_rate():
    with pytest.raises(ValueError, match=r"func returned \[\] for a state of shape \[2\]"):
        at.odeint(lambda t, y: y.sum(), torch.ones(2), T)
    with pytest.raises(TypeError, match="tensor or a tuple or dict"):
        at.odeint(lambda t, y: y, [1.0], T)


def test_explosions():
    with pytest.raises(FloatingPointError, match=r"gave up at t = 0\.[45]"):
        at.odeint(lambda t, y: y**2, torch.tensor([2.0], **F64), T)
    blown = at.odeint(lambda t, y: y**2, torch.tensor([2.0]), torch.linspace(0, 10, 101), method="rk4")
    assert torch.isfinite(blown[0]).all()
    assert torch.isnan(blown[-1]).all()


def test_one_row_that_explodes_leaves_the_others():
    y0, t = torch.tensor([[1.0], [0.01]], **F64), torch.linspace(0, 5, 51, **F64)
    ours, theirs = (
        library.odeint(lambda t, y: y**2, y0, t, method="rk4") for library in (at, torchdiffeq)
    )
    torch.testing.assert_close(ours, theirs, equal_nan=True)
    assert torch.isfinite(ours[-1, 1]).all()


def test_a_small_part_of_a_tuple_counts_as_much_as_a_large_one():
    rate = lambda t, y: (-50 * y[0] * torch.cos(30 * t), 0 * y[1])
    y0 = (torch.ones(1, **F64), torch.ones(10_000, **F64))
    t = torch.tensor([0.0, 1.0], **F64)
    small, _ = at.odeint(rate, y0, t, rtol=1e-5, atol=1e-7)
    exact = torch.exp(-50 / 30 * torch.sin(torch.tensor(30.0, **F64)))
    assert abs(small[-1].item() - exact.item()) < 1e-3


def test_many_steps_and_many_times():
    t = torch.linspace(0, 50, 2001, **F64)
    y = at.odeint(lambda t, y: -y, torch.ones(1, **F64), t, method="euler", options={"step_size": 2e-2})
    assert y.shape == (2001, 1)


def test_a_tuple_of_tolerances_needs_a_tuple_of_states():
    with pytest.raises(TypeError, match="rtol is a tuple, but y0 is one tensor"):
        at.odeint(lambda t, y: -y, torch.ones(1), T, rtol=(1e-3, 1e-4))
    with pytest.raises(ValueError, match=r"one tolerance per part of y0 \(1\)"):
        at.odeint(lambda t, y: y, (torch.ones(1),), T, rtol=(1e-3, 1e-4))


def test_a_tuple_may_hold_a_number():
    y0 = (torch.tensor(1.0, **F64), torch.ones(3, **F64))
    rate = lambda t, y: (-y[0], y[0] * y[1])
    for method in ("dopri5", "rk4"):
        ours, theirs = (library.odeint(rate, y0, T, method=method) for library in (at, torchdiffeq))
        for a, b in zip(ours, theirs):
            assert a.shape == b.shape
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_a_norm_of_one_s_own_sees_a_state_without_dimensions():
    seen = []
    norm = lambda y: (seen.append(y.shape), y.abs())[1]
    at.odeint(lambda t, y: -y, torch.tensor(1.0, **F64), T, options={"norm": norm})
    assert set(seen) == {()}


def hybrid_oscillator():
    torch.manual_seed(0)
    correction = at.corrections.Linear(2, dtype=torch.float64).requires_grad_(False)
    for p in correction.parameters():
        p.mul_(1e-3)
    return at.HybridSolver(at.systems.HarmonicOscillator(), "rk4", correction, 0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_hybrid_solver_takes_the_steps_of_its_own_solve(dtype):
    solver, y0 = hybrid_oscillator(), torch.rand(3, 2, **F64)
    t = torch.linspace(0, 50, 26, dtype=dtype)
    y = at.odeint(solver.rate, y0, t, method=solver)
    assert torch.equal(y, solver.solve(y0, 50.0, every=20).u)


def test_a_hybrid_solver_is_for_one_equation():
    solver, y0 = hybrid_oscillator(), torch.rand(3, 2, **F64)
    t = torch.tensor([0.0, 0.5], **F64)
    same = lambda t, u: solver.rate(t, u)
    assert torch.equal(
        at.odeint(same, y0, t, method=solver), at.odeint(solver.rate, y0, t, method=solver)
    )
    with pytest.raises(ValueError, match="not the equation that this HybridSolver was fitted to"):
        at.odeint(lambda t, u: -u, y0, t, method=solver)
    near = lambda t, u: solver.rate(t, u) + 1e-17  # where the rate is 0
    assert torch.isfinite(at.odeint(near, torch.zeros(3, 2, **F64), t, method=solver)).all()
    assert at.odeint(same, torch.zeros(0, 2, **F64), t, method=solver).shape == (2, 0, 2)
    batched = torch.func.vmap(lambda y: at.odeint(same, y, t, method=solver))(y0)
    torch.testing.assert_close(batched, at.odeint(same, y0, t, method=solver).transpose(0, 1))
    with pytest.raises(ValueError, match="states of 3 numbers; this solver's have 2"):
        solver.solve(torch.rand(4, 3, **F64), 1.0)


def test_a_hybrid_solver_has_no_gradient_of_times():
    solver, y0 = hybrid_oscillator(), torch.rand(3, 2, **F64)
    t = torch.tensor([0.0, 0.5], **F64, requires_grad=True)
    with pytest.raises(ValueError, match=r"t requires a gradient.*t\.detach\(\)"):
        at.odeint(solver.rate, y0, t, method=solver)
    with torch.no_grad():
        assert at.odeint(solver.rate, y0, t, method=solver).shape == (2, 3, 2)


class Ticket:
    """Stands for a tensor that a graph keeps."""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dopri5", "rk4"])
def test_the_adjoint_has_the_same_gradients_in_less_memory(method):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2)).double()
    func, y0, t = lambda t, y: net(y), torch.rand(5, 2, **F64), torch.linspace(0, 20, 301, **F64)
    t = t[::100] if method == "dopri5" else t

    solved = lambda solve: solve(func, y0, t, method=method, rtol=1e-9, atol=1e-9)

    def kept_by(solve):
        held = weakref.WeakKeyDictionary()

        def pack(x):  # not x itself: a graph that holds its own results is never freed
            held[ticket := Ticket()] = x.numel()
            return ticket

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda ticket: ticket):
            y = solved(solve)
        return sum(held.values()), y

    plain, adjoint = (kept_by(solve)[0] for solve in (at.odeint, at.odeint_adjoint))
    found = [
        torch.autograd.grad(solved(solve).square().sum(), list(net.parameters()))
        for solve in (at.odeint, at.odeint_adjoint)
    ]
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)
    assert adjoint < plain / 5
    both = at.odeint_adjoint(func, y0, t, method=method, adjoint_rtol=1e-3, adjoint_params=())
    assert both.shape == (len(t), 5, 2)


def test_tolerances_may_be_tensors_of_one_number():
    y0, t = torch.ones(2, **F64), torch.linspace(0, 1, 3, **F64)
    by = lambda tol: at.odeint(lambda t, y: -y, y0, t, rtol=tol, atol=tol)
    assert torch.equal(by(torch.tensor(1e-4, **F64)), by(1e-4))
    torch.testing.assert_close(by(torch.full((2,), 1e-4)), by(1e-4))


class Partly(torch.nn.Module):
    """A rate with a parameter that it does not use."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = (torch.nn.Parameter(torch.tensor(x, **F64)) for x in (0.5, 2.0))
        self.frozen = torch.nn.Parameter(torch.tensor(1.0, **F64), requires_grad=False)

    def forward(self, t, y):
        return tuple(-self.used * x for x in y) if isinstance(y, tuple) else -self.used * y


@pytest.mark.parametrize("as_tuple", [False, True])
@pytest.mark.parametrize("method", ["dopri5", "rk4"])
def test_the_adjoint_gives_unused_parameters_gradients_of_zero(as_tuple, method):
    gradients = []
    for library in (at, torchdiffeq):
        field = Partly()
        y0 = torch.ones(2, **F64)
        y = library.odeint_adjoint(field, (y0, y0) if as_tuple else y0, T, method=method)
        (y[1] if as_tuple else y)[-1].sum().backward()
        gradients.append([p.grad for p in field.parameters()])
    ours, theirs = gradients
    assert ours[1] == theirs[1] == 0
    assert ours[2] is theirs[2] is None
    # Theirs are those of the exact flow, up to the errors of coarse steps.
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5 if method == "dopri5" else 0.1, atol=0)


def test_parameters_of_a_function_get_zeros_if_they_are_named():
    weight, other = (torch.tensor(x, **F64, requires_grad=True) for x in (0.5, 2.0))
    y = at.odeint_adjoint(
        lambda t, y: -weight * y, torch.ones(2, **F64), T, adjoint_params=(weight, other)
    )
    y[-1].sum().backward()
    assert weight.grad != 0
    assert other.grad == 0


def test_adaptive_methods_go_on_as_long_as_torchdiffeq(monkeypatch):
    module = importlib.import_module("attractor.core.odeint")
    limits = []
    solve_adaptive = module.solve_adaptive

    def seen(*args, **options):
        limits.append(args[4].max_steps)
        return solve_adaptive(*args, **options)

    monkeypatch.setattr(module, "solve_adaptive", seen)
    at.odeint(lambda t, y: -y, torch.ones(1, **F64), T)
    at.odeint(lambda t, y: -y, torch.ones(1, **F64), T, options={"max_num_steps": 50})
    assert limits == [2**31 - 1, 50]
