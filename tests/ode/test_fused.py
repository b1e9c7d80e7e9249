"""The fused network equals the module, and captured steps equal steps.

On a GPU the kernels run there; elsewhere in Triton's interpreter, which must be asked for before Triton
is imported for the first time.
"""

import copy
import math
import os
import sys
import warnings
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from attractor.core import evolve, get_scheme
from attractor.core.step import Step
from attractor.ode import HybridSolver, captured, corrections, fit, fused, systems, trajectories
from attractor.ode.captured import CapturedStep, capture_step
from attractor.ode.corrections.network import ACTIVATIONS, Network
from attractor.ode.fused import formulas
from attractor.ode.recipes import Paper
from attractor.ode.trajectories import LostTrajectoriesError, fine_trajectories
from attractor.train.capture import WARMUP

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
KERNELS = "attractor.ode.fused.perceptron"
pytestmark = [pytest.mark.gpu] if GPU else []


def imported():
    """The modules of kernels; without a GPU for the interpreter, None if it is too late for that."""
    asked = os.environ.get("TRITON_INTERPRET")
    if not fused.TRITON or (not GPU and asked != "1" and {"triton", KERNELS} & sys.modules.keys()):
        return None, None, None
    before, fused.INTERPRETED = fused.INTERPRETED, not GPU
    if not GPU:
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        from attractor.ode.fused import gradients, perceptron, steps
    finally:
        fused.INTERPRETED = before
        if asked is None:
            os.environ.pop("TRITON_INTERPRET", None)
    return perceptron, steps, gradients


perceptron, steps, gradients = imported()


@pytest.fixture
def kernels(monkeypatch):
    """Kernels in use, and few processors, so that small batches meet every plan."""
    if perceptron is None:
        pytest.skip("needs Triton, and its interpreter to be asked for before the first import")
    if not GPU:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.setattr(fused, "INTERPRETED", True)
        monkeypatch.setattr(fused, "EVERYWHERE", True)
        monkeypatch.setattr(perceptron, "PROCESSORS", 2)
        monkeypatch.setattr(gradients, "PROCESSORS", 2)


def made(inputs=4, outputs=4, width=40, activation="rational", dtype=torch.float32, **options):
    """A network whose activation has moved from its start."""
    net = Network(inputs, outputs, width, 2, activation=activation, dtype=dtype, **options).to(DEVICE)
    for p in net.body.activations.parameters():
        p.data.add_(0.1 * torch.randn(p.shape).to(p))
    return net


def forced(t, u):
    return torch.stack((u[..., 1], -u[..., 0] + torch.cos(t)), -1)


def drawn(*shape, dtype=torch.float32, scale=2.0):
    return (scale * torch.randn(*shape, dtype=torch.float64)).to(DEVICE, dtype)


def as_exact(net, x, found):
    """Whether it is as near to float64 as the module, by a factor of two and a few roundings."""
    with torch.no_grad():
        plain = net.in_torch(x)
        truth = net.double().in_torch(x.double())
        net.to(x.dtype)
    error, allowed = ((y.double() - truth).abs().max().item() for y in (found.detach(), plain))
    # Of the largest that is added up, not of the sum alone: with one output that may be small.
    size = max(truth.abs().max().item(), x.abs().max().clamp(max=1.0).item())
    return error <= 2 * allowed + 1e-6 * size


SIZES = [(4, 4, 40), (3, 5, 100), (8, 1, 16), (12, 10, 33), (1, 20, 64)]  # the last two: by products


@pytest.mark.sampled(10)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("inputs", "outputs", "width"), SIZES)
def test_equals_the_module(kernels, activation, inputs, outputs, width):
    net = made(inputs, outputs, width, activation, skip=width % 2 == 0)
    for n in (1, 3, 19):
        x = drawn(n, inputs)
        assert fused.usable(net, x)
        found = fused.network(net, x)
        assert found.shape == (n, outputs)
        assert as_exact(net, x, found), n


PLANS = [(1, 128, 4), (2, 32, 1), (8, 64, 2), (8, 32, 1), (16, 16, 1), (32, 8, 1), (64, 32, 4)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("cut", PLANS)
def test_every_plan(kernels, monkeypatch, cut):
    monkeypatch.setattr(perceptron, "plan", lambda *_: perceptron.Plan(*cut))
    for inputs in (4, 3):
        net = made(inputs, 4, 100, skip=True)
        x = drawn(19, inputs)
        assert as_exact(net, x, fused.network(net, x))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("splits", [1, 2, 8])
def test_parts_of_a_hidden_layer_add_up(kernels, monkeypatch, splits):
    monkeypatch.setattr(perceptron, "plan", lambda *_: perceptron.Plan(16, 16, 4, splits))
    for width in (16, 100, 128):
        for dtype in (torch.float32, torch.float64):
            net = made(12, 10, width, skip=True, dtype=dtype, precision="float32")
            x = drawn(19, 12, dtype=dtype)
            found = fused.network(net, x)
            assert found.dtype == dtype
            torch.testing.assert_close(found, net.in_torch(x), rtol=1e-4, atol=1e-5)


def test_plans_are_sizes_a_kernel_can_have(kernels):
    for size in (1, 4, 5, 8, 9, 20, 100):
        for width in (1, 20, 128, 256, 1000, 4096):
            for n in (1, 2, 100, 1_000, 1_057, 5_000, 20_000, 200_000, 10**7):
                few = 2 * size <= fused.FEW
                cuts = [perceptron.plan(n, width, size, size, p) for p in fused.PRECISIONS]
                if few:
                    cuts.append(steps.plan(n, width, size, size))
                for cut in cuts:
                    for value in cut:
                        assert value & (value - 1) == 0
                    assert cut.warps <= 32
                    assert cut.hidden >= (8 if few else 16)
                    assert cut.splits * cut.hidden <= max(cut.hidden, 2 * width)
                    assert (
                        cut.rows == 1 or (cut.rows // 2) * perceptron.PROCESSORS <= n or cut.rows <= 16
                    )
                    if few:
                        assert cut.splits == 1
                        assert cut.rows * cut.hidden <= 8 * 32 * cut.warps  # what registers hold


def test_batches_and_strides(kernels):
    net = made(4, 3, 20)
    x = drawn(2, 3, 4)
    truth = fused.network(net, x)
    assert truth.shape == (2, 3, 3)
    first = x.movedim(-1, 0).contiguous().movedim(0, -1)
    assert torch.equal(fused.network(net, first), truth)
    assert torch.equal(fused.network(net, x.flip(-1).contiguous().flip(-1)), truth)
    assert torch.equal(fused.network(net, x[0, 0]), truth[0, 0])
    assert torch.equal(fused.network(net, x[:1].expand(4, -1, -1))[3], truth[0])
    assert fused.network(net, x[:0]).shape == (0, 3, 3)


def with_gradients(net, x, run):
    leaves = [x, *(p for p in net.parameters() if p.requires_grad)]
    out = run(x)
    torch.manual_seed(1)
    return torch.autograd.grad(out, leaves, torch.randn(out.shape).to(out))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_equal_the_module_s(kernels, activation):
    for inputs, outputs, skip in ((4, 3, True), (12, 5, False)):
        net = made(inputs, outputs, 24, activation, skip=skip)
        x = drawn(2, 5, inputs).requires_grad_()
        found = with_gradients(net, x, lambda x, net=net: fused.network(net, x))
        for a, b in zip(found, with_gradients(net, x, net.in_torch), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        net.requires_grad_(False)
        found = with_gradients(net, x, lambda x, net=net: fused.network(net, x))
        torch.testing.assert_close(found, with_gradients(net, x, net.in_torch), rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("inputs", "outputs", "width"),
    [SIZES[0], *(pytest.param(*x, marks=pytest.mark.slow) for x in SIZES[1:3])],
)
def test_gradients_of_weights_alone(kernels, monkeypatch, activation, inputs, outputs, width):
    """As near to float64 as the module's own, with rows cut into parts and units into tiles."""
    calls = []
    monkeypatch.setattr(
        gradients, "apply", lambda *a, apply=gradients.apply: calls.append(1) or apply(*a)
    )
    net = made(inputs, outputs, width, activation, skip=width % 2 == 0)
    for n in (1, 7, 80):
        x, grad = drawn(n, inputs), drawn(n, outputs)

        def own(run, net=net, grad=grad):
            net.zero_grad()
            run.backward(grad.to(run.dtype))
            return [p.grad.double() for p in net.parameters()]

        found, plain = own(fused.network(net, x)), own(net.in_torch(x))
        exact = copy.deepcopy(net).double()
        truth = own(exact.in_torch(x.double()), exact)
        for ours, theirs, true in zip(found, plain, truth, strict=True):
            allowed = 3 * (theirs - true).abs().max() + 1e-5 * true.abs().max()
            assert (ours - true).abs().max() <= allowed, n
    assert len(calls) == 3


@pytest.mark.parametrize("cut", [(4, 32, 1, 1), (4, 32, 1, 8), (8, 64, 2, 2), (2, 128, 4, 256)])
@pytest.mark.slow
def test_every_plan_of_gradients(kernels, monkeypatch, cut):
    monkeypatch.setattr(gradients, "plan", lambda *_: perceptron.Plan(*cut))
    net = made(4, 4, 100)
    x = drawn(50, 4)
    for run in (net.in_torch, lambda x: fused.network(net, x)):
        net.zero_grad()
        run(x).square().sum().backward()
        found = [p.grad.clone() for p in net.parameters()]
        if run == net.in_torch:
            truth = found
    for ours, theirs in zip(found, truth, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())


def test_plans_of_gradients_fill_a_gpu(kernels, monkeypatch):
    monkeypatch.setattr(gradients, "PROCESSORS", 132)
    for n in (1, 100, 16_384, 10**7):
        for width in (1, 33, 256, 1024, 4096):
            _, hidden, warps, parts = gradients.plan(n, width)
            assert hidden in (32, 64)
            assert warps == 1
            tiles = -(-width // hidden)
            assert tiles * parts <= max(16 * 132, tiles)
            assert parts == 1 or n > 32 * parts
            if n >= 10**7:
                assert tiles * parts > 8 * 132 or parts == 256


@pytest.mark.slow
def test_training_learns_the_same_by_the_kernel(kernels):
    torch.manual_seed(0)
    target = torch.sin(x := drawn(64, 2))
    losses = []
    for run in (Network.in_torch, fused.network):
        torch.manual_seed(1)
        net = made(2, 2, 32)
        optimiser = torch.optim.Adam(net.parameters(), lr=1e-2)
        for _ in range(15):
            optimiser.zero_grad()
            loss = (run(net, x) - target).square().mean()
            loss.backward()
            optimiser.step()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["attns", "fsnet", *(pytest.param(x, marks=pytest.mark.slow) for x in ("neurvec", "attns_m"))],
)
def test_the_paper_s_recipe_by_kernels(kernels, monkeypatch, name):
    """Every correction learns what it learns in torch; those whose inputs are learnt stay there."""
    options = {"dt": 0.1, "horizon": 0.5, "recipe": Paper(epochs=1), "trajectories": 4, "width": 32, "seed": 2}  # fmt: skip
    found = []
    for there in (True, False):
        monkeypatch.setattr(fused, "TRITON", there)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            solver = fit(systems.ElasticPendulum(), correction=name, device=DEVICE, **options)
        found.append([row["loss"] for row in solver.history if "loss" in row])
    assert found[0] == pytest.approx(found[1], rel=1e-3)
    correction = solver.correction.requires_grad_()
    x = correction.inputs(*(drawn(3, 4) for _ in range(2)), 0.1)
    monkeypatch.setattr(fused, "TRITON", True)
    assert fused.pays(correction.net, x) is (name != "fsnet")


def test_second_derivatives(kernels):
    net = made(3, 3, 16, "tanh")
    x = drawn(4, 3).requires_grad_()
    found = []
    for run in (net.in_torch, lambda x: fused.network(net, x)):
        (slope,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), [x, net.head.weight]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_derivatives_of_activations(kernels, activation):
    module = ACTIVATIONS[activation](dtype=torch.float64)
    z = torch.linspace(-3, 3, 41, dtype=torch.float64).requires_grad_()
    parts = list(module.parameters())
    a, change, *of_parts = gradients.derivatives(activation, z, *parts)
    torch.testing.assert_close(a, module(z))
    torch.testing.assert_close(change, torch.autograd.grad(module(z).sum(), z)[0])
    for part, of in zip(parts, of_parts):
        (truth,) = torch.autograd.grad(module(z).sum(), part)
        torch.testing.assert_close(torch.stack([x.sum() for x in of]), truth)


def test_large_angles(kernels):
    net = made(1, 1, 1, "sine")
    with torch.no_grad():
        for p, value in ((net.body.layers[0].weight, 1.0), (net.head.weight, 1.0)):
            p.fill_(value)
        net.body.layers[0].bias.zero_()
        net.head.bias.zero_()
    x = torch.cat(
        (drawn(500, 1, scale=10.0), drawn(500, 1, scale=1e4), torch.zeros(1, 1, device=DEVICE))
    )
    assert (fused.network(net, x).double() - x.double().sin()).abs().max() < 3e-7
    x = torch.logspace(5, 38, 500, device=DEVICE)[:, None]
    assert fused.network(net, torch.cat((x, -x))).abs().max() < 1.01
    assert fused.network(net, torch.full_like(x, math.inf)).isnan().all()


def test_float64_states_of_a_network_that_may_be_computed_in_float32(kernels):
    net = made(4, 4, 40, skip=True, dtype=torch.float64, precision="float32")
    x = drawn(9, 4, dtype=torch.float64).requires_grad_()
    assert fused.usable(net, x)
    found = fused.network(net, x)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, net.in_torch(x), rtol=1e-5, atol=1e-5)
    found = with_gradients(net, x, lambda x: fused.network(net, x))
    torch.testing.assert_close(found, with_gradients(net, x, net.in_torch), rtol=1e-4, atol=1e-4)
    assert 0 < fused.deviation(net, x) < 1e-5


def test_what_is_not_finite_stays_alone(kernels):
    for inputs in (4, 13):
        for activation in ACTIVATIONS:
            net = made(inputs, 4, 20, activation)
            x = drawn(9, inputs)
            truth = fused.network(net, x)
            for value in (math.nan, math.inf):
                broken = x.clone()
                broken[4, 0] = value
                found = fused.network(net, broken)
                others = torch.arange(9) != 4
                assert torch.equal(found[others], truth[others])
                lost, plain = ~torch.isfinite(found[4]), ~torch.isfinite(net.in_torch(broken)[4])
                assert bool(lost.all()) or (torch.equal(lost, plain) and not math.isnan(value))


def test_the_same_bits_every_time(kernels):
    net = made(4, 4, 100)
    x = drawn(50, 4)
    first = fused.network(net, x)
    assert all(torch.equal(fused.network(net, x), first) for _ in range(250 if GPU else 3))


def arguments(net, x):
    layer, activation = net.body.layers[0], net.body.activations[0]
    around = None if net.around is None else net.around.weight
    learned = (activation.top, activation.bottom) if hasattr(activation, "top") else (None, None)
    name = net.config["activation"]
    return x, layer.weight, layer.bias, net.head.weight, net.head.bias, around, *learned, name, "ieee"


@pytest.mark.slow
def test_the_operator_keeps_its_promises(kernels):
    for net in (made(4, 3, 16, skip=True), made(9, 9, 16, "tanh")):
        x = drawn(5, net.body.layers[0].in_features).requires_grad_()
        torch.library.opcheck(perceptron.apply, arguments(net, x))
        torch.library.opcheck(perceptron.apply, arguments(net, x.detach()))
        x, first, bias, head, _, _, *learned, name, _ = (
            a.detach() if isinstance(a, torch.Tensor) else a for a in arguments(net, x)
        )
        grad = drawn(5, head.shape[0])
        torch.library.opcheck(gradients.apply, (x, first, bias, head, *learned, grad, name))


@pytest.mark.slow
def test_compiled_in_one_graph(kernels):
    net = made(4, 4, 20)
    x = drawn(6, 4).requires_grad_()
    run = torch.compile(
        lambda x: 2 * fused.network(net, x), fullgraph=True, backend="inductor" if GPU else "aot_eager"
    )
    torch.testing.assert_close(run(x), 2 * net.in_torch(x), rtol=1e-4, atol=1e-4)
    found = with_gradients(net, x, run)
    truth = with_gradients(net, x, lambda x: 2 * net.in_torch(x))
    torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-4)


def test_a_compiled_training_learns_the_same(kernels):
    """A network in a compiled loss chooses kernels by itself, for the gradients of its weights too."""
    net, x, target = made(4, 4, 20), drawn(6, 4), drawn(6, 4)
    assert fused.pays(net, x)
    loss = lambda run: (run(x) - target).square().mean()
    truth = torch.autograd.grad(loss(net.in_torch), list(net.parameters()))
    run = torch.compile(loss, fullgraph=True, backend="inductor" if GPU else "aot_eager")
    for call in (run, loss):
        found = torch.autograd.grad(call(net), list(net.parameters()))
        torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-4)


def test_jacobians_by_transforms(kernels):
    net = made(3, 3, 16).requires_grad_(False)
    x = drawn(5, 3)
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        jacobian = lambda run, transform=transform: torch.func.vmap(transform(run))(x)
        assert torch.equal(jacobian(lambda x: fused.network(net, x)), jacobian(net))
    assert fused.usable(net, x)


@pytest.mark.parametrize("name", corrections.BY_NAME)
@pytest.mark.parametrize("period", [None, 2.0])
def test_fused_corrections(kernels, name, period):
    make = corrections.get_correction(name)
    options = {"width": 20} if make.fit_defaults else {}
    correction = make(4, period=period, device=DEVICE, **options)
    twin = fused.fuse(correction)
    u, slope, t = drawn(6, 4), drawn(6, 4), torch.tensor(0.3, device=DEVICE)
    stages = (slope, u, 2 * slope, u + slope) if name == "stages" else ()
    given = (Step(u, slope, 0.1, t if period else None, stages),)
    torch.testing.assert_close(twin(*given), correction(*given), rtol=1e-4, atol=1e-5)
    if name in ("csm", "linear", "patches", "polynomial"):  # several hidden layers, or none
        assert torch.equal(twin(*given), correction(*given))
    assert {id(p) for p in twin.parameters()} == {id(p) for p in correction.parameters()}
    assert fused.fuse(twin) is twin
    with torch.no_grad():
        last = correction.net[0] if name == "patches" else correction.net
        last.head.weight.add_(1.0)
    torch.testing.assert_close(twin(*given), correction(*given), rtol=1e-4, atol=1e-5)


def test_networks_use_kernels_by_themselves(kernels):
    net, x = made(skip=True).requires_grad_(False), drawn(7, 4)
    assert fused.pays(net, x)
    assert torch.equal(net(x), fused.network(net, x))
    assert as_exact(net, x, net(x))
    low = made(dtype=torch.float64, precision="float32").requires_grad_(False)
    assert fused.pays(low, x.double())
    correction = corrections.AttNS(4, width=20, state=True, device=DEVICE).requires_grad_(False)
    u, slope = drawn(6, 4), drawn(6, 4)
    assert torch.equal(correction(u, slope, 0.1), fused.fuse(correction)(u, slope, 0.1))


def test_solvers_compile_with_their_kernels(kernels):
    for size in (4, 12):
        correction = corrections.AttNS(size, width=20, skip=True, device=DEVICE).requires_grad_(False)
        found = HybridSolver(lambda t, u: -u, "euler", correction, 0.1)
        u = drawn(6, size)
        backend = "inductor" if GPU else "aot_eager"
        run = torch.compile(found.step, fullgraph=True, backend=backend)
        torch.testing.assert_close(run(u), found.step(u), rtol=1e-4, atol=1e-5)


def test_where_gradients_of_more_than_a_few_weights_are_wanted_torch_runs(kernels):
    for size in (4, fused.FEW):
        net, x = made(size, size), drawn(7, size)
        assert fused.pays(net, x) is (size == 4)
        if size > 4:
            assert torch.equal(net(x), net.in_torch(x))
        assert not fused.pays(net, drawn(7, size).requires_grad_())
        with torch.no_grad():
            assert fused.pays(net, x)
        net.requires_grad_(False)
        assert fused.pays(net, x)
        assert not fused.pays(net, x.requires_grad_())


def test_compiled_code_multiplies_many_large_rows_itself(kernels, monkeypatch):
    small, large = made().requires_grad_(False), made(12, 12, 20).requires_grad_(False)
    many = fused.MANY + 1
    assert fused.pays(large, drawn(many, 12))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert fused.pays(small, drawn(many, 4))
    assert fused.pays(large, drawn(many - 1, 12))
    assert not fused.pays(large, drawn(many, 12))


@pytest.mark.skipif(GPU, reason="kernels run on a GPU")
def test_on_a_cpu_torch_runs():
    net, x = made().requires_grad_(False), drawn(7, 4)
    assert not fused.pays(net, x)
    assert torch.equal(net(x), net.head(net.body(x)))


def test_without_kernels_the_module_runs_bit_for_bit(monkeypatch):
    monkeypatch.setattr(fused, "TRITON", False)
    net, x = made(), drawn(7, 4)
    assert not fused.usable(net, x)
    assert torch.equal(fused.network(net, x), net(x))
    correction = corrections.AttNS(4, width=20, state=True, device=DEVICE)
    u, slope = drawn(6, 4), drawn(6, 4)
    assert torch.equal(fused.fuse(correction)(u, slope, 0.1), correction(u, slope, 0.1))


def test_what_kernels_do_not_take(kernels):
    assert not fused.usable(made(dtype=torch.float64), drawn(3, 4, dtype=torch.float64))
    assert not fused.usable(made(), drawn(3, 4, dtype=torch.float64))
    assert not fused.usable(made(inputs=200), drawn(3, 200))
    for options in ({"depth": 3}, {"depth": 2, "body": "lstm"}, {"depth": 2, "body": "transformer"}):
        net, x = Network(4, 4, 16, **options).to(DEVICE), drawn(3, 4)
        assert not fused.usable(net, x)
        assert torch.equal(fused.network(net, x), net(x))
    with torch.autocast(DEVICE, torch.bfloat16):
        assert not fused.usable(made(), drawn(3, 4))


def test_precisions():
    with pytest.raises(ValueError, match=r"precision 'bf16' is not one of ieee, tf32x3, tf32"):
        fused.fuse(corrections.AttNS(4, width=8), "bf16")


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "most"), [("ieee", 2e-6), ("tf32x3", 5e-6), ("tf32", 2e-3)])
def test_precisions_on_a_gpu(precision, most):
    for size in (4, 12, 20, 64, 100):
        for n in (1, 1_000, 20_000):
            net = made(size, size, 256, skip=True)
            assert fused.deviation(net, drawn(n, size), precision) < most, (size, n)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [256, 1000, 1024])
def test_plans_of_a_gpu(width):
    for size in (1, 4, 5, 8):
        for n in (1, 100, 500, 1_000, 1_057, 5_000, 20_000, 200_001):
            net, x = made(size, size, width), drawn(n, size)
            assert as_exact(net, x, fused.network(net, x)), (size, n)


# Whole steps in one kernel


WRITTEN = (
    systems.ElasticPendulum(), systems.PendulumChain(1), systems.PendulumChain(3), systems.HenonHeiles(),
    systems.Lorenz(), systems.Logistic(), systems.VanDerPol(), systems.HarmonicOscillator(),
)  # fmt: skip


@pytest.mark.sampled(8)
@pytest.mark.parametrize("system", WRITTEN, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("scheme", ["euler", "rk4", "dopri5"])
def test_slopes_number_by_number(system, scheme):
    u = system.sample(5, torch.Generator().manual_seed(0), torch.float64)
    truth = get_scheme(scheme).slope(system, 0.0, u, 0.1)
    call = lambda t, u: get_scheme(scheme).slope(system, t, u, 0.1)
    formula = formulas.written(call, [(), (system.dim,)], u)
    torch.testing.assert_close(formula(torch.zeros(()), u), truth, rtol=1e-12, atol=1e-13)
    assert not formula.uses(0)


def everything(t, u):
    """A rate with every operation that is written."""
    a, b = (2 + u.sin()).unbind(-1)
    one = (1 - a) / 2 + 3 / b - (a - 0.5) + a.reciprocal() * b**-2 - b**3 / a + torch.rsub(a, b, alpha=2)
    two = (-a).exp() + b.log() - a.sqrt() * b**-0.5 + (-a).abs() * a.cos() + t
    return 0.1 * torch.stack((one, two), -1) + torch.ones_like(u).to(u.dtype)


def test_every_operation_is_written():
    u = drawn(7, 2, dtype=torch.float64)
    t = torch.tensor(0.7, dtype=torch.float64, device=DEVICE)
    formula = formulas.written(everything, [(), (2,)], u)
    torch.testing.assert_close(formula(t, u), everything(t, u), rtol=1e-12, atol=1e-12)
    assert formula.uses(0)
    assert {line[0] for line in formula.lines} == set(formulas.OPERATIONS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_every_operation_in_a_kernel(kernels, dtype):
    plain = steps.WholeSteps(everything, get_scheme("heun"), None, 0.1, drawn(2, dtype=dtype))
    u = drawn(37, 2, dtype=dtype)
    truth = evolve(everything, u, 0.5 + torch.arange(3, dtype=torch.float64) * 0.1, "heun").final
    t = torch.tensor(0.5, dtype=torch.float64, device=DEVICE)
    plain(u, t, 2)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(u, truth, rtol=tolerance, atol=tolerance)
    assert float(t) == pytest.approx(0.7)


def test_what_is_more_than_formulas_is_not_written():
    held = torch.ones(2)

    def branching(t, u):
        return u if u.sum() > 0 else -u

    refused = {
        "cannot be traced": branching,
        "a tensor that is not an argument": lambda t, u: u * held,
        "aten.sum": lambda t, u: u / u.sum(),
        "aten.rand_like": lambda t, u: u + torch.rand_like(u),
        "0.3 is not a small whole number": lambda t, u: u**0.3,
        "inf is not a finite number": lambda t, u: u + math.inf,
    }
    for message, rate in refused.items():
        with pytest.raises(formulas.CannotWriteError, match=message):
            formulas.written(rate, [(), (2,)])


CORRECTIONS = {
    "attns": {}, "attns, slope and state": {"state": True, "skip": True, "activation": "sine"},
    "attns, times dt": {"times_dt": True}, "neurvec": {"activation": "tanh"}, "attns_m": {},
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize(("period", "dtype"), [(None, torch.float32), (1.5, torch.float64)], ids=str)
def test_whole_steps_are_steps(kernels, name, period, dtype):
    options = dict(CORRECTIONS[name], period=period, precision="float32", dtype=dtype, device=DEVICE)
    correction = corrections.get_correction(name.split(",")[0])(2, width=40, **options)
    found = HybridSolver(forced, "rk4", correction.requires_grad_(False), 0.1)
    with torch.no_grad():
        correction.net.head.weight.mul_(0.1)
    u = drawn(3, 5, 2, dtype=dtype)
    step = found.capture(u, t=0.5, steps=2, compile=True)
    assert step.whole
    tolerance = 1e-5 if dtype == torch.float32 else 1e-6
    truth = stepped(found, u, 4, 0.5)
    torch.testing.assert_close(step.advance(2), truth, rtol=tolerance, atol=tolerance)
    assert float(step.t) == pytest.approx(0.9, abs=1e-12)
    torch.testing.assert_close(step(u, 2.0), stepped(found, u, 2, 2.0), rtol=1e-5, atol=1e-5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "cut",
    [(8, 32, 1), (8, 128, 4),
     *(pytest.param(x, marks=pytest.mark.slow) for x in ((1, 64, 2), (16, 16, 1), (32, 8, 1)))],
)  # fmt: skip
def test_every_plan_of_whole_steps(kernels, monkeypatch, cut):
    monkeypatch.setattr(steps, "plan", lambda *_: perceptron.Plan(*cut))
    pendulum = systems.ElasticPendulum()
    correction = corrections.AttNS(4, width=100, device=DEVICE).requires_grad_(False)
    correction.net.head.weight.mul_(1e-3)
    found = HybridSolver(pendulum, "rk4", correction, 0.1)
    u = pendulum.sample(19, torch.Generator().manual_seed(0)).to(DEVICE)
    u[3] = math.nan
    step = found.capture(u, steps=4, compile=True)
    assert step.whole
    truth = stepped(found, u, 4)
    torch.testing.assert_close(step.advance(), truth, rtol=1e-4, atol=1e-4, equal_nan=True)
    assert torch.equal(step.u.isnan().any(-1).nonzero()[:, 0].cpu(), torch.tensor([3]))
    assert float(step.t) == pytest.approx(0.4)
    with torch.no_grad():
        correction.net.head.bias.add_(0.01)  # weights are read anew
    torch.testing.assert_close(step(u), stepped(found, u, 4), rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize(("period", "dtype"), [(None, torch.float32), (1.5, torch.float64)], ids=str)
def test_steps_around_a_larger_network(kernels, period, dtype):
    options = {"period": period, "precision": "float32", "dtype": dtype, "device": DEVICE, "skip": True}
    chain = systems.PendulumChain(5)
    correction = corrections.AttNS(10, width=40, **options).requires_grad_(False)
    for p in (correction.net.head.weight, correction.net.head.bias, correction.net.around.weight):
        p.mul_(1e-3)
    found = HybridSolver(chain, "rk4", correction, 0.05)
    u = chain.sample(19, torch.Generator().manual_seed(0), dtype).to(DEVICE)
    step = found.capture(u, t=0.5, steps=3, compile=True)
    assert step.whole
    torch.testing.assert_close(step.advance(2), stepped(found, u, 6, 0.5), rtol=1e-4, atol=1e-4)
    assert float(step.t) == pytest.approx(0.8)


@pytest.mark.slow
def test_plain_steps(kernels):
    pendulum = systems.ElasticPendulum()
    for scheme in ("rk4", "dopri5"):
        plain = steps.WholeSteps(pendulum, get_scheme(scheme), None, 0.1, drawn(4))
        u = pendulum.sample(37, torch.Generator().manual_seed(0)).to(DEVICE)
        truth = evolve(pendulum, u, torch.arange(4) * 0.1, scheme).final
        t = torch.zeros((), dtype=torch.float64, device=DEVICE)
        plain(u, t, 3)
        torch.testing.assert_close(u, truth, rtol=1e-5, atol=1e-5)
        assert float(t) == pytest.approx(0.3)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rate", [systems.ElasticPendulum(), forced], ids=["elastic", "forced"])
def test_fine_data_by_a_kernel(kernels, monkeypatch, rate):
    monkeypatch.setattr(trajectories, "WORTH", 0.01)
    d = getattr(rate, "dim", 2)
    u0 = 1 + 0.3 * torch.rand(5, d, dtype=torch.float64).to(DEVICE)
    found = fine_trajectories(rate, u0, 0.1, 4, 3, t0=0.5)
    monkeypatch.setattr(fused, "TRITON", False)
    truth = fine_trajectories(rate, u0, 0.1, 4, 3, t0=0.5)
    assert torch.equal(found[0], u0)
    torch.testing.assert_close(found, truth, rtol=1e-13, atol=1e-13)
    assert not torch.equal(found, truth), "a kernel rounds otherwise; torch ran"
    monkeypatch.setattr(fused, "TRITON", True)
    monkeypatch.setattr(trajectories, "WORTH", 5)
    assert torch.equal(fine_trajectories(rate, u0, 0.1, 4, 3, t0=0.5), truth), "not worth a kernel"


def test_fine_data_that_are_lost_or_no_formula(kernels, monkeypatch):
    monkeypatch.setattr(trajectories, "WORTH", 0.01)
    start = torch.tensor([[0.1], [2.0]], dtype=torch.float64, device=DEVICE)
    with pytest.raises(LostTrajectoriesError, match="1 of 2"):
        fine_trajectories(lambda t, u: u * u, start, 1.0, 3, 8)
    together = lambda t, u: u / u.sum(-1, True)  # not a formula for each number
    found = fine_trajectories(together, start, 1.0, 1, 4)
    torch.testing.assert_close(found[1], start + 1, rtol=1e-13, atol=1e-13)


def test_a_rate_that_is_not_what_it_does_to_one_state(kernels, monkeypatch):
    monkeypatch.setattr(captured, "compiled", lambda run, *_: run)
    mixing = lambda t, u: u.flatten().flip(0).view(u.shape)  # no rate: states depend on each other
    correction = corrections.NeurVec(2, width=16, device=DEVICE).requires_grad_(False)
    found = HybridSolver(mixing, "rk4", correction, 0.1)
    with pytest.warns(UserWarning, match="does not do what the rate does: left out"):
        step = found.capture(drawn(6, 2), compile=True)
    assert not step.whole


def test_what_takes_no_whole_steps(kernels, monkeypatch):
    monkeypatch.setattr(captured, "compiled", lambda run, *_: run)
    u = drawn(6, 2)
    large = corrections.NeurVec(fused.QUICK + 1, width=16, device=DEVICE)
    for found, start in (
        (HybridSolver(forced, "rk4", corrections.Linear(2, device=DEVICE), 0.1), u),
        (HybridSolver(forced, "rk4", corrections.CSM(2, width=16, device=DEVICE), 0.1), u),
        (HybridSolver(forced, "rk4", corrections.FSNet(2, width=16, device=DEVICE), 0.1), u),  # scales
        (HybridSolver(lambda t, u: -u, "rk4", large, 0.1), drawn(6, fused.QUICK + 1)),
        (HybridSolver(lambda t, u: u / u.sum(-1, True), "rk4", solver().correction, 0.1), u + 9),
    ):
        step = found.capture(start, steps=2, compile=True)
        assert not step.whole
        torch.testing.assert_close(step.advance(), stepped(found, start, 2), rtol=1e-4, atol=1e-4)
    assert not solver().capture(drawn(6, 2), compile=False).whole


# Captured steps


def solver(period=None, **options):
    """A rate that depends on the time, with a correction that does not vanish."""
    correction = corrections.NeurVec(2, width=16, period=period, device=DEVICE, **options)
    return HybridSolver(forced, "rk4", correction.requires_grad_(False), 0.1)


def stepped(solver, u, n, t=0.0):
    with torch.no_grad():
        for i in range(n):
            u = solver.step(u, t + i * solver.dt)
    return u


class Stream:
    def wait_stream(self, other):
        pass


@pytest.fixture
def cuda(monkeypatch):
    """A stand-in for what is used of torch.cuda: a replay does again what was captured."""
    state = SimpleNamespace(mode="default", captures=0, replays=0, refuse=False, step=None)

    class Graph:
        def replay(self):
            state.replays += 1
            found = state.step
            found.run(*found.inputs)

    @contextmanager
    def graph(graph, stream, capture_error_mode="global"):
        state.captures += 1
        yield
        if state.refuse and state.captures == 1:
            raise RuntimeError("operation not permitted when stream is capturing")

    make = captured.Captured

    def watched(run):
        state.step = make(run)
        return state.step

    fakes = {
        "Stream": Stream, "CUDAGraph": Graph, "graph": graph, "stream": lambda s: nullcontext(),
        "device": lambda d: nullcontext(), "current_stream": Stream, "set_stream": lambda s: None,
        "get_sync_debug_mode": lambda: state.mode,
        "set_sync_debug_mode": lambda m: setattr(state, "mode", m),
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(captured, "_on_gpu", lambda u: True)
    monkeypatch.setattr(captured, "Captured", watched)
    return state


@pytest.mark.parametrize("period", [None, 1.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_advancing_is_stepping(period, dtype):
    found, u = solver(period, dtype=dtype), drawn(3, 5, 2, dtype=dtype)
    step = CapturedStep(found, u, t=0.5, steps=3, compile=False, precision=None)
    assert step.captured == GPU
    torch.testing.assert_close(step.advance(2), stepped(found, u, 6, 0.5), rtol=1e-5, atol=1e-5)
    assert float(step.t) == pytest.approx(1.1)
    torch.testing.assert_close(step(u, 2.0), stepped(found, u, 3, 2.0), rtol=1e-5, atol=1e-5)
    if not GPU:
        step.reset(u, 0.5)
        assert torch.equal(step.advance(), stepped(found, u, 3, 0.5))


def test_states_are_kept_apart_from_what_the_caller_holds():
    found, u = solver(), drawn(4, 2)
    before = u.clone()
    step = capture_step(found, u, compile=False)
    first = step(u)
    kept = first.clone()
    step.advance(3)
    assert torch.equal(u, before)
    assert torch.equal(first, kept)
    step.reset(u)
    assert torch.equal(step.u, before)
    assert float(step.t) == 0


@pytest.mark.skipif(GPU, reason="a stand-in for a machine without a GPU")
def test_captured_once_and_replayed(cuda):
    found, u = solver(), drawn(6, 2)
    step = CapturedStep(found, u, steps=4, compile=False, precision=None)
    assert step.captured
    assert (cuda.captures, cuda.replays) == (1, 1)
    assert torch.equal(step.u, u)  # what warmed up is forgotten
    assert float(step.t) == 0
    torch.testing.assert_close(step.advance(5), stepped(found, u, 20), rtol=1e-5, atol=1e-5)
    assert (cuda.captures, cuda.replays) == (1, 6)
    torch.testing.assert_close(step(u, 1.0), stepped(found, u, 4, 1.0), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(GPU, reason="a stand-in for a machine without a GPU")
def test_what_cannot_be_captured_runs_as_it_is(cuda):
    cuda.refuse = True
    found, u = solver(), drawn(6, 2)
    with pytest.warns(UserWarning, match="not captured in a CUDA graph, going on without"):
        step = CapturedStep(found, u, steps=2, compile=False)
    assert not step.captured
    torch.testing.assert_close(step.advance(3), stepped(found, u, 6), rtol=1e-5, atol=1e-5)
    assert cuda.replays == 0


@pytest.mark.skipif(GPU, reason="a stand-in for a machine without a GPU")
def test_a_rate_that_waits_runs_as_it_is(cuda):
    calls = []

    def rate(t, u):
        calls.append(1)
        if cuda.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        return -u

    found, u = HybridSolver(rate, "euler", corrections.NeurVec(2, width=8), 0.1), drawn(6, 2)
    with pytest.warns(UserWarning, match="called a synchronizing CUDA operation"):
        step = CapturedStep(found, u, compile=False)
    assert len(calls) >= WARMUP
    torch.testing.assert_close(step.advance(2), stepped(found, u, 2), rtol=1e-5, atol=1e-5)


def test_parts_that_are_compiled_make_up_all_steps(monkeypatch):
    monkeypatch.setattr(captured, "compiled", lambda run, *_: run)
    monkeypatch.setattr(captured, "COMPILED_OPERATIONS", 120)
    found, u = solver(), drawn(6, 2)
    step = CapturedStep(found, u, steps=12, compile=True, precision="ieee")
    assert not step.whole
    assert 1 <= step._length < 12
    assert 12 % step._length == 0
    torch.testing.assert_close(step.advance(), stepped(found, u, 12), rtol=1e-5, atol=1e-5)


def test_errors_of_captured_steps():
    found, u = solver(), drawn(6, 2)
    with pytest.raises(ValueError, match="steps = 0 goes nowhere"):
        CapturedStep(found, u, steps=0)
    step = CapturedStep(found, u, compile=False)
    with pytest.raises(ValueError, match=r"states \[5, 2\] do not fit a graph of \[6, 2\]"):
        step.reset(u[:5])
    drag = lambda t, u: torch.stack((u[..., 1], -u[..., 0] - u[..., 1]), -1)
    dragged = HybridSolver(drag, "leapfrog", found.correction, 0.1)
    with pytest.raises(ValueError, match="leapfrog needs a separable rate"):
        CapturedStep(dragged, u, compile=False)


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("batch", [1, 1_000])
def test_a_graph_on_a_gpu_is_the_solver(compile, batch):
    pendulum = systems.ElasticPendulum()
    correction = corrections.AttNS(4, width=64, device="cuda").requires_grad_(False)
    with torch.no_grad():
        correction.net.head.weight.mul_(1e-3)
    found = HybridSolver(pendulum, "rk4", correction, 0.1)
    u = pendulum.sample(batch, device="cuda")
    step = CapturedStep(found, u, steps=10, compile=compile)
    assert step.captured
    truth = HybridSolver(pendulum, "rk4", copy.deepcopy(correction).double(), 0.1)
    exact = stepped(truth, u.double(), 20)
    end = step.advance(2)
    assert ((end.double() - exact).norm() / exact.norm()).item() < 1e-5
    again = step.advance(0).clone()
    step.reset(u)
    assert torch.equal(step.advance(2), again)
