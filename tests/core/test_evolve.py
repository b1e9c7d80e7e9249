import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attractor as at
from attractor.core.tableaus import ALL

F64 = dict(dtype=torch.float64)


def spring(t, u):
    return torch.stack((u[..., 1], -u[..., 0]), -1)


def turned(u, angle):
    q, p = u.unbind(-1)
    c, s = math.cos(angle), math.sin(angle)
    return torch.stack((q * c + p * s, p * c - q * s), -1)


# What comes out


def test_trajectory_has_the_promised_shape():
    u0, t = torch.rand(2, 3, 2), torch.linspace(0, 1, 11)
    solved = at.evolve(spring, u0, t)
    assert solved.u.shape == (11, 2, 3, 2)
    assert torch.equal(solved.u[0], u0)
    assert torch.equal(solved.t, t)
    assert solved.ok.shape == (2, 3)
    assert solved.ok.all()
    assert torch.equal(solved.until, torch.full((2, 3), 1.0))
    assert (solved.stats.rate_calls, solved.stats.correction_calls, solved.stats.steps) == (40, 0, 10)
    assert len(solved) == 11
    assert torch.equal(solved.final, solved.u[-1])
    assert "11 times in [0, 1], states 2 x 3 x 2, all ok" in repr(solved)


def test_one_time_is_no_step():
    solved = at.evolve(spring, torch.rand(3, 2), [0.5])
    assert solved.u.shape == (1, 3, 2)
    assert solved.stats.steps == 0


def test_empty_batch():
    assert at.evolve(spring, torch.rand(0, 2), [0.0, 0.5, 1.0]).u.shape == (3, 0, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtype_of_the_state_is_kept(dtype):
    u0 = torch.tensor([[1.0, 0.5]]).to(dtype)
    solved = at.evolve(spring, u0, torch.linspace(0, 1, 21, **F64))
    assert solved.u.dtype == dtype
    error = (solved.final.double() - turned(u0.double(), 1.0)).abs().max()
    assert error < 40 * torch.finfo(dtype).eps + 1e-7


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_states(dtype):
    u0 = torch.tensor([1 + 1j, 2 - 1j], dtype=dtype)
    t = torch.linspace(0, 1, 101, **F64)
    turn = lambda t, u: 1j * u
    torch.testing.assert_close(at.evolve(turn, u0, t).final, u0 * complex(math.cos(1), math.sin(1)))
    controlled = at.evolve(turn, u0, t[::50], "dopri5", rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(
        controlled.final, u0 * complex(math.cos(1), math.sin(1)), rtol=1e-5, atol=1e-5
    )


@given(n=st.integers(1, 45), every=st.integers(1, 50))
def test_every_keeps_the_same_states(n, every):
    u0, t = torch.rand(3, 2, **F64), torch.linspace(0, 1, n + 1, **F64)
    everything, some = at.evolve(spring, u0, t), at.evolve(spring, u0, t, every=every)
    kept = sorted({*range(0, n + 1, every), n})
    assert torch.equal(some.t, t[kept])
    assert torch.equal(some.u, everything.u[kept])


@given(times=st.lists(st.floats(-2, 2), min_size=2, max_size=12, unique=True), back=st.booleans())
def test_uneven_grids_forward_and_backward(times, back):
    t = torch.tensor(sorted(times, reverse=back), **F64)
    if (t.diff().abs() < 1e-6).any():
        return
    u0 = torch.tensor([1.0, 0.3], **F64)
    solved = at.evolve(spring, u0, t, "dopri5", rtol=1e-9, atol=1e-11)
    for i, end in enumerate(t.tolist()):
        exact = turned(u0, end - t[0].item())
        torch.testing.assert_close(solved.u[i], exact, rtol=1e-7, atol=1e-7)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ALL)
def test_going_back_returns(name):
    u0, t = torch.rand(4, 2, **F64), torch.linspace(0, 1, 401, **F64)
    there = at.evolve(spring, u0, t, name)
    back = at.evolve(spring, there.final, t.flip(0), name)
    order = at.get_scheme(name).order
    torch.testing.assert_close(back.final, u0, rtol=0, atol=5 * (1 / 400) ** order + 1e-13)


def test_time_reaches_the_rate():
    rate = lambda t, u: torch.cos(t) * torch.ones_like(u)
    t = torch.linspace(1, 3, 41, **F64)
    solved = at.evolve(rate, torch.zeros(2, 1, **F64), t)
    torch.testing.assert_close(solved.u[:, 0, 0], t.sin() - math.sin(1), rtol=0, atol=1e-8)


def test_correction_is_added_and_sees_the_old_state():
    seen = []

    def correction(u, slope, dt):
        seen.append((u, slope, dt))
        return 0.5 * u

    u0 = torch.rand(3, 2, **F64)
    solved = at.evolve(spring, u0, [0.0, 0.1], "rk4", correction)
    slope = at.schemes.RK4.slope(spring, 0.0, u0, 0.1)
    torch.testing.assert_close(solved.final, u0 + 0.1 * slope + 0.5 * u0)
    assert torch.equal(seen[0][0], u0)
    torch.testing.assert_close(seen[0][1], slope)
    assert solved.stats.correction_calls == 1


# Gradients


@pytest.mark.parametrize("scheme", ["rk4", "dopri5", "yoshida4"])
def test_gradients_of_a_solve(scheme):
    u0 = torch.rand(2, 2, **F64, requires_grad=True)
    t = torch.tensor([0.0, 0.1, 0.25, 0.3], **F64, requires_grad=True)
    k = torch.tensor(1.3, **F64, requires_grad=True)

    def solve(u0, t, k):
        return at.evolve(lambda t, u: torch.stack((u[..., 1], -k * u[..., 0] ** 3), -1), u0, t, scheme).u

    assert torch.autograd.gradcheck(solve, (u0, t, k))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("checkpoint", [True, 1, 3, 10, 25, 1000])
@pytest.mark.parametrize("every", [1, 7])
def test_checkpoint_changes_no_bit(checkpoint, every):
    def solve(**how):
        u0 = torch.full((3, 2), 0.7, **F64, requires_grad=True)
        k = torch.tensor(1.3, **F64, requires_grad=True)
        rate = lambda t, u: torch.stack((u[..., 1], -k * u[..., 0].sin()), -1)
        solved = at.evolve(rate, u0, torch.linspace(0, 3, 62, **F64), every=every, **how)
        return solved.u.detach(), *torch.autograd.grad(solved.u.square().sum(), (u0, k))

    for plain, kept in zip(solve(), solve(checkpoint=checkpoint)):
        torch.testing.assert_close(plain, kept, rtol=1e-14, atol=0)


def test_checkpoint_bounds_the_memory_of_gradients():
    def most(**how):
        u0 = torch.rand(1000, 2, **F64, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: kept.append(x.numel()) or x, lambda x: x
        ):
            kept = []
            at.evolve(lambda t, u: -u.sin(), u0, torch.linspace(0, 1, 401, **F64), every=400, **how)
        return sum(kept)

    assert most(checkpoint=True) < most() / 10


def test_memory_without_gradients_is_a_few_states():
    u0 = torch.rand(10_000, 8)
    with torch.no_grad():
        profile = torch.profiler.profile(profile_memory=True)
        with profile:
            at.evolve(lambda t, u: -u, u0, torch.linspace(0, 1, 101), "rk4", every=100)
    alive = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    stages, result = 4, 2
    assert peak <= (stages + 3 + result + 0.05) * u0.nbytes


# Trajectories that are lost

ALONE = torch.arange(1000) != 17


def poisoned(t, u):
    """A rate with a root in it: NaN for the one trajectory that goes below zero."""
    return torch.stack((u[..., 1], -u[..., 0].sqrt()), -1)


def start(requires_grad=False):
    u0 = torch.rand(1000, 2, generator=torch.Generator().manual_seed(1)) + 20
    u0[17] = torch.tensor([0.02, -1.0])
    return u0.requires_grad_(requires_grad)


HOW = pytest.mark.parametrize(
    "how",
    [
        dict(),
        dict(scheme="euler"),
        dict(every=9),
        dict(checkpoint=True),
        dict(scheme="dopri5", rtol=1e-5, atol=1e-7),
    ],
    ids=str,
)


@pytest.fixture
def one_thread():
    """The last bit of torch's vector operations depends on where threads share out a tensor."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.sampled(3)
@HOW
def test_the_lost_one_changes_no_bit_of_the_others(how, one_thread):
    t = torch.linspace(0, 1, 101)
    u0 = start(requires_grad=True)
    solved = at.evolve(poisoned, u0, t, **how)
    (gradient,) = torch.autograd.grad(solved.u.square().sum(), u0)

    others = start()[ALONE].requires_grad_()
    without = at.evolve(poisoned, others, t, **how)
    (expected,) = torch.autograd.grad(without.u.square().sum(), others)

    assert torch.equal(solved.ok, ALONE)
    assert torch.equal(solved.u[:, ALONE], without.u)
    assert torch.equal(gradient[ALONE], expected)
    assert torch.isfinite(solved.u).all()
    assert torch.isfinite(gradient).all()
    assert 0 < solved.until[17] < 0.05
    assert (solved.until[ALONE] == 1).all()


@pytest.mark.sampled(3)
@HOW
def test_parameters_all_share_get_finite_gradients(how):
    k = torch.tensor(1.0, requires_grad=True)
    rate = lambda t, u: k * poisoned(t, u)
    solved = at.evolve(rate, start(), torch.linspace(0, 1, 101), **how)
    (gradient,) = torch.autograd.grad(solved.final[ALONE].sum(), k)
    without = at.evolve(rate, start()[ALONE], torch.linspace(0, 1, 101), **how)
    torch.testing.assert_close(
        gradient, torch.autograd.grad(without.final.sum(), k)[0], rtol=1e-4, atol=0
    )


def test_the_lost_one_keeps_its_last_finite_state():
    t = torch.linspace(0, 1, 101, **F64)
    solved = at.evolve(poisoned, start().double(), t, "euler")
    alone = start()[17].double()
    for i in range(100):  # by hand
        new = alone + (t[i + 1] - t[i]) * poisoned(t[i], alone)
        if not torch.isfinite(new).all():
            break
        alone = new
    torch.testing.assert_close(solved.final[17], alone)
    assert solved.until[17] == t[i]
    assert torch.equal(solved.u[i:, 17], solved.u[i, 17].expand(101 - i, 2))


def test_a_rate_that_is_nan_by_its_place_in_the_batch():
    bad = torch.zeros(1000, 1)
    bad[17] = torch.nan
    rate = lambda t, u: -u + bad
    u0 = torch.rand(1000, 2, requires_grad=True)
    solved = at.evolve(rate, u0, torch.linspace(0, 1, 101))
    (gradient,) = torch.autograd.grad(solved.final.sum(), u0)
    plain = at.evolve(lambda t, u: -u, u0, torch.linspace(0, 1, 101))
    assert torch.equal(solved.ok, ALONE)
    assert torch.equal(solved.u[:, ALONE], plain.u[:, ALONE])
    assert torch.equal(gradient[ALONE], torch.autograd.grad(plain.final.sum(), u0)[0][ALONE])


def test_the_loop_ends_when_nobody_is_left():
    solved = at.evolve(lambda t, u: u * torch.nan, torch.ones(10, 2), torch.linspace(0, 1, 10_001))
    assert not solved.ok.any()
    assert solved.stats.steps < 100
    assert torch.equal(solved.u, torch.ones(10_001, 10, 2))
    assert (solved.until == 0).all()


def test_explosion_is_a_loss():
    solved = at.evolve(
        lambda t, u: u**2, torch.tensor([[0.1], [50.0]]), torch.linspace(0, 1, 101), "rk4"
    )
    assert solved.ok.tolist() == [True, False]
    assert torch.isfinite(solved.u).all()


def test_a_state_lost_from_the_start_is_flagged():
    u0 = torch.tensor([[1.0], [torch.nan], [2.0]])
    for how in (dict(), dict(scheme="dopri5", rtol=1e-5)):
        solved = at.evolve(lambda t, u: -u, u0, torch.linspace(0, 1, 11), **how)
        assert solved.ok.tolist() == [True, False, True]
        torch.testing.assert_close(solved.final[0], torch.tensor([math.exp(-1)]), rtol=1e-4, atol=0)


def test_large_but_finite_states_are_not_lost():
    u0 = torch.full((1000, 2), 3e38)
    solved = at.evolve(lambda t, u: torch.zeros_like(u), u0, torch.linspace(0, 1, 31))
    assert solved.ok.all()
    assert solved.stats.steps == 30


# Compiled


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 5, 12])
def test_compiled_steps_are_the_same(every, compiler):
    u0, t = torch.rand(9, 2, **F64), torch.linspace(0, 1, 13, **F64)
    with torch.no_grad():
        plain = at.evolve(spring, u0, t, every=every)
        fast = at.evolve(spring, u0, t, every=every, compile=True)
    torch.testing.assert_close(fast.u, plain.u, rtol=1e-13, atol=1e-13)
    assert fast.stats == plain.stats


@pytest.mark.slow
def test_compiled_run_with_a_loss_and_gradients(compiler):
    t = torch.linspace(0, 1, 11)
    u0 = start(requires_grad=True)
    fast = at.evolve(poisoned, u0, t, "heun", compile=True, every=3)
    plain = at.evolve(poisoned, u0, t, "heun", every=3)
    assert torch.equal(fast.ok, ALONE)
    torch.testing.assert_close(fast.u, plain.u, rtol=1e-5, atol=1e-5)
    (a,) = torch.autograd.grad(fast.final.square().sum(), u0)
    (b,) = torch.autograd.grad(plain.final.square().sum(), u0)
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_a_rate_that_cannot_be_compiled_goes_on_without(monkeypatch):
    import attractor.core.compiling as compiling

    def broken(*args, **kwargs):
        def fail(*args):
            raise torch._dynamo.exc.TorchDynamoException("no compiler")

        return fail

    monkeypatch.setattr(torch, "compile", broken)
    compiling._compiled.cache_clear()
    u0, t = torch.rand(3, 2), torch.linspace(0, 1, 11)
    with pytest.warns(UserWarning, match="the steps are not compiled"):
        fast = at.evolve(spring, u0, t, compile=True)
    torch.testing.assert_close(fast.u, at.evolve(spring, u0, t).u)
    compiling._compiled.cache_clear()


# Bad input


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(u0=[1.0, 2.0]), TypeError, "u0 is a list"),
        (dict(u0=torch.ones(2, dtype=torch.long)), TypeError, "use u0.float"),
        (dict(u0=torch.tensor(1.0)), ValueError, r"use u0\[None\]"),
        (dict(t=torch.tensor(1.0)), ValueError, r"t has shape \[\]"),
        (dict(t=torch.tensor([])), ValueError, r"t has shape \[0\]"),
        (
            dict(t=torch.tensor([0.0, 1.0, 0.5])),
            ValueError,
            "strictly increasing or strictly decreasing",
        ),
        (dict(t=torch.tensor([0.0, 0.0])), ValueError, "strictly"),
        (dict(t=torch.tensor([0.0, torch.nan])), ValueError, "strictly"),
        (dict(t=torch.tensor([0.0, torch.inf])), ValueError, "non-finite times"),
        (dict(every=0), ValueError, "every = 0 must be a whole number"),
        (dict(checkpoint=-2), ValueError, "checkpoint = -2"),
        (dict(scheme="rk5"), ValueError, "no scheme is called 'rk5'"),
        (dict(scheme="rk4", rtol=1e-3), ValueError, "rk4 has no embedded pair.* dopri5"),
        (dict(scheme="leapfrog", atol=1e-3), ValueError, "leapfrog has no embedded pair"),
        (dict(scheme="dopri5", rtol=-1.0), ValueError, "rtol = -1.0"),
        (dict(scheme="dopri5", rtol=0.0, atol=0.0), ValueError, "both 0"),
        (dict(scheme="dopri5", rtol=1e-3, correction=lambda u, s, dt: u), ValueError, "leave out one"),
    ],
)
def test_bad_input_is_named(arguments, error, message):
    good = dict(u0=torch.ones(3, 2), t=torch.linspace(0, 1, 5))
    with pytest.raises(error, match=message):
        at.evolve(spring, **{**good, **arguments})


# Found by trying to break it


@pytest.mark.parametrize(
    "how", [dict(), dict(scheme="euler"), dict(scheme="dopri5", rtol=1e-6)], ids=str
)
def test_a_row_that_stays_nan_leaves_shared_gradients_alone(how):
    net = torch.nn.Linear(3, 3).double()
    bad = torch.tensor([False, True, False, False])

    def rate(t, u):
        late = torch.as_tensor(t).reshape(-1, 1) >= 0.5
        return torch.where(bad[:, None] & late, torch.nan, torch.tanh(net(u)))

    u0, t = torch.randn(4, 3, **F64), torch.linspace(0, 1, 11, **F64)
    solved = at.evolve(rate, u0, t, **how)
    assert torch.equal(solved.ok, ~bad)
    got = torch.autograd.grad(solved.u[:, ~bad].sum(), net.weight)[0]
    clean = at.evolve(lambda t, u: torch.tanh(net(u)), u0[~bad], t, **how)
    torch.testing.assert_close(
        got, torch.autograd.grad(clean.u.sum(), net.weight)[0], rtol=1e-6, atol=1e-9
    )


@pytest.mark.slow
@pytest.mark.parametrize("how", [dict(), dict(scheme="dopri5", rtol=1e-6)], ids=str)
def test_early_states_have_gradients_though_all_are_lost_later(how):
    u0 = torch.tensor([[1.0], [0.2]], **F64, requires_grad=True)
    solved = at.evolve(lambda t, u: u**2, u0, torch.linspace(0, 20, 201, **F64), **how)
    assert not solved.ok.any()
    (gradient,) = torch.autograd.grad(solved.u[3].sum(), u0)
    torch.testing.assert_close(gradient, 1 / (1 - 0.3 * u0.detach()) ** 2, rtol=1e-4, atol=0)


def test_times_given_as_numbers_are_exact():
    u0, times = torch.ones(1, **F64), [0.0, 0.1, 0.2, 0.3]
    decay = lambda t, u: -u
    assert torch.equal(at.evolve(decay, u0, times).u, at.evolve(decay, u0, torch.tensor(times, **F64)).u)


def test_conjugated_states():
    u0 = torch.randn(2, 2, dtype=torch.complex128).conj()
    assert at.evolve(lambda t, u: 1j * u, u0, [0.0, 0.1]).ok.all()


def test_a_correction_of_the_wrong_shape_is_named():
    with pytest.raises(ValueError, match=r"the correction returned \[3\] in torch.float32"):
        at.evolve(spring, torch.ones(3, 2), [0.0, 0.1], correction=lambda u, s, dt: u.sum(-1))


def test_trajectories_compare_by_identity():
    solved = at.evolve(spring, torch.ones(3, 2), [0.0, 0.1])
    assert solved == solved
    assert solved != at.evolve(spring, torch.ones(3, 2), [0.0, 0.1])


HOW = [
    {},
    {"scheme": "euler"},
    {"scheme": "dopri5", "rtol": 1e-4},
    pytest.param({"compile": True}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("how", HOW, ids=str)
def test_a_rate_that_writes_into_its_state_is_refused(how):
    u0, t = torch.ones(3, 2), torch.linspace(0, 1, 5)
    with pytest.raises(ValueError, match=r"modifies its argument u in place.* u = u.clone\(\) first"):
        at.evolve(lambda t, u: u.neg_(), u0, t, **how)
    assert at.evolve(lambda t, u: u.clone().neg_(), torch.ones(3, 2), t, **how).ok.all()


@pytest.mark.parametrize("how", [{}, {"scheme": "heun"}, {"scheme": "dopri5", "rtol": 1e-4}], ids=str)
def test_a_rate_that_fills_one_buffer_again_and_again_is_refused(how):
    buffer, t = torch.empty(3, 2), torch.linspace(0, 1, 5)
    filled = lambda t, u: torch.neg(u, out=buffer)
    with pytest.raises(ValueError, match="the same tensor in every call and overwrites it"):
        at.evolve(filled, torch.ones(3, 2), t, **how)
    with pytest.raises(ValueError, match="the same tensor in every call"):
        at.odeint(filled, torch.ones(3, 2), t)
    constant = torch.full((3, 2), 2.0)  # one tensor, too, but nobody writes into it
    torch.testing.assert_close(
        at.evolve(lambda t, u: constant, torch.ones(3, 2), t, **how).final, 1 + constant
    )


@pytest.mark.parametrize("how", HOW, ids=str)
def test_a_network_in_another_type_is_told_what_to_do(how):
    network, t = torch.nn.Linear(2, 2), torch.linspace(0, 1, 5)
    with pytest.raises(ValueError, match=r"a state in torch.float64.*network.double\(\)"):
        at.evolve(lambda t, u: network(u), torch.ones(3, 2, **F64), t, **how)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):  # other errors stay as they are
        at.evolve(lambda t, u: network(u), torch.ones(3, 4), t, **how)
