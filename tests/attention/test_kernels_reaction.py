"""Kernels of reaction-diffusion attention against the dense truth, on a GPU or in Triton's interpreter.

The interpreter is asked for in conftest.py.
"""

from contextlib import contextmanager

import pytest
import torch

GPU = torch.cuda.is_available()
pytest.importorskip("triton")

from attractor.attention import pde_attention, pdes  # noqa: E402
from attractor.attention.kernels import reaction  # noqa: E402
from attractor.attention.kernels.reaction import launch  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
pytestmark = [pytest.mark.gpu] if GPU else []


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several blocks of rows and runs of keys for few tokens; a GPU takes what it always does."""
    if not GPU:
        monkeypatch.setattr(launch, "TILES", dict.fromkeys(launch.TILES, (32, 16, 4, 1)))
        monkeypatch.setattr(launch, "BUFFERS", 2)


@pytest.fixture(params=["once", "in order", "split"])
def kind(request):
    """Backward in one launch; in several, under deterministic algorithms; and of the split equation."""
    with deterministic(request.param == "in order"):
        yield request.param


@contextmanager
def deterministic(wanted):
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(wanted, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def equation(heads, split, dtype=torch.float32):
    """A PDE with coefficients of either sign for each head, and its coefficients."""
    alpha = torch.linspace(0.3, 0.1, heads, dtype=dtype, device=DEVICE).view(heads, 1, 1)
    beta = torch.linspace(0.4, -0.2, heads, dtype=dtype, device=DEVICE).view(heads, 1, 1)
    leaves = [alpha.requires_grad_(), beta.requires_grad_()]
    return pdes.ReactionDiffusion(*leaves, split=split), leaves


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(DEVICE, dtype).requires_grad_()


def with_gradients(out, inputs):
    torch.manual_seed(1)
    return out, *torch.autograd.grad(out, inputs, torch.randn(out.shape).to(out))


def both(q, k, v, steps, split, causal=False):
    """(output, gradients) of the kernels, and of the dense algorithm in double precision."""
    pde, leaves = equation(q.shape[1], split)
    out = reaction.attend(q, k, v, 0.3, pde=pde, steps=steps, dt=0.8, is_causal=causal)
    found = with_gradients(out, [q, k, v, *leaves])
    pde, leaves = equation(q.shape[1], split, torch.float64)
    inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out = pde_attention(
        *inputs, scale=0.3, is_causal=causal, pde=pde, steps=steps, dt=0.8, method="dense"
    )
    return found, with_gradients(out, [*inputs, *leaves])


def worst(found, truth):
    """The largest difference of any entry, relative to the largest, or to 1; NaN if there is one."""
    pairs = [(a.double(), b.double()) for a, b in zip(found, truth, strict=True)]
    off = [(a - b).abs().max() / b.abs().max().clamp(min=1) for a, b in pairs]
    return torch.stack(off).max().item()  # Python's max would pass over NaN


@pytest.mark.sampled(2)
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_equals_dense(causal, kind):
    for tokens, steps, heads in ((1, 1, 1), (5, 2, 2), (33, 4, 1), (40, 1, 1)):
        q, k, v = (random(1, heads, tokens, 16) for _ in range(3))
        assert worst(*both(q, k, v, steps, kind == "split", causal=causal)) < 1e-5, (tokens, steps)


@pytest.mark.parametrize(("tokens", "steps"), [(98, 2), pytest.param(150, 4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "causal", [pytest.param(False, marks=pytest.mark.slow), True], ids=["all", "causal"]
)
@pytest.mark.slow
def test_runs_of_keys_out_of_reach_of_walls(causal, tokens, steps):
    """Some programs of every kernel have keys that no wall reaches, which they visit without masks."""
    q, k, v = (random(1, 1, tokens, 16) for _ in range(3))
    for wanted in (False, True):
        with deterministic(wanted):
            assert worst(*both(q, k, v, steps, False, causal=causal)) < 1e-5


@pytest.mark.parametrize("width", [16, pytest.param(32, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_any_number_of_steps(width, monkeypatch):
    """The carry of an iteration is longer or shorter than the keys of an iteration."""
    monkeypatch.setattr(launch, "DIM_BY_KEYS", width == 32)
    monkeypatch.setitem(launch.TILES, "backward", (32 if not GPU else 64, width, 4, 1))
    for tokens, steps in {16: ((75, 2), (34, 5), (40, 8)), 32: ((71, 3), (45, 6), (9, 7))}[width]:
        q, k, v = (random(1, 1, tokens, 16) for _ in range(3))
        assert worst(*both(q, k, v, steps, False)) < 1e-5, (tokens, steps)
        assert worst(*both(q, k, v, steps, True, causal=True)) < 1e-5, (tokens, steps)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_as_exact_as_dense_at_full_size(causal, dtype, dim, kind):
    """Several heads, blocks of rows and runs of keys, whose number no block divides."""
    results = {}
    inputs = [torch.randn(2, 3, 777, dim) for _ in range(4)]
    for by in ("truth", "dense", "kernels"):
        exact = torch.float64 if by == "truth" else dtype
        q, k, v, grad = (x.to(dtype).to(DEVICE, exact).requires_grad_() for x in inputs)
        pde, leaves = equation(3, kind == "split", torch.float64 if by == "truth" else torch.float32)
        if by == "kernels":
            out = reaction.attend(q, k, v, dim**-0.5, pde=pde, steps=4, dt=1.0, is_causal=causal)
        else:
            out = pde_attention(q, k, v, is_causal=causal, pde=pde, steps=4, method="dense")
        results[by] = out, *torch.autograd.grad(out, [q, k, v, *leaves], grad.detach())
    for n, (truth, dense, ours) in enumerate(zip(*results.values())):
        error, allowed = (((x.double() - truth).norm() / truth.norm()).item() for x in (ours, dense))
        few = 8 * torch.finfo(dtype).eps if n > 3 else 1e-3  # coefficients: three numbers
        assert error <= (2 if n == 0 else 3) * allowed + few, n


@pytest.mark.slow
def test_shapes_and_strides_of_one_s_own():
    q, k = random(2, 9, 1, 20).transpose(1, 2), random(2, 30, 1, 20).transpose(1, 2)
    v = random(2, 1, 24, 30).mT
    assert worst(*both(q, k, v, 1, True)) < 1e-5
    for wanted in (False, True):
        with deterministic(wanted):
            assert worst(*both(q, k, v, 1, False)) < 1e-5


def test_large_scores_do_not_overflow():
    q, k, v = (random(1, 1, 30, 16) for _ in range(3))
    with torch.no_grad():  # a log-sum-exp far below 0 for some rows, far above for others
        q *= 30
        k -= 5
    for split in (False, True):
        found, truth = both(q, k, v, 1, split, causal=True)
        assert all(x.isfinite().all() for x in found)
        assert worst(found[:1], truth[:1]) < 1e-4


@pytest.mark.sampled(1)
@pytest.mark.parametrize(  # Triton's interpreter multiplies the bits of bfloat16
    "half", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str
)
def test_half_precision_is_as_exact_as_dense(half, kind):
    inputs = [random(1, 1, 40, 32).detach() for _ in range(3)]
    found = []
    for method, dtype in (("dense", torch.float64), ("dense", half), ("kernels", half)):
        pde, leaves = equation(
            1, kind == "split", torch.float64 if dtype == torch.float64 else torch.float32
        )
        q, k, v = (x.to(half).to(dtype).requires_grad_() for x in inputs)
        if method == "dense":
            out = pde_attention(q, k, v, is_causal=True, pde=pde, steps=2, method="dense")
        else:
            out = reaction.attend(q, k, v, 32**-0.5, pde=pde, steps=2, dt=1.0, is_causal=True)
            assert out.dtype == dtype
        found.append(with_gradients(out, [q, k, v, *leaves]))
        assert all(x.dtype == dtype for x in found[-1][:4])
    for n, (exact, dense, ours) in enumerate(zip(*found)):
        error, allowed = (((x.double() - exact) ** 2).mean().sqrt().item() for x in (ours, dense))
        few = torch.finfo(half).eps * exact.abs().max().item() if n > 3 else 1e-6
        assert error <= (2 if n == 0 else 3) * allowed + few, n


@pytest.mark.parametrize("split", [False, True], ids=["steps", "split"])
def test_no_bit_of_the_past_changes_with_the_future(split):
    pde = pdes.ReactionDiffusion(0.2, 0.3, split=split)
    q, k, v = (random(1, 1, 45, 16).detach() for _ in range(3))
    before = reaction.attend(q, k, v, 0.3, pde=pde, steps=2, dt=1.0, is_causal=True)
    for x in (q, k, v):
        x[..., 30:, :] = torch.randn_like(x[..., 30:, :]) * 10
    after = reaction.attend(q, k, v, 0.3, pde=pde, steps=2, dt=1.0, is_causal=True)
    assert torch.equal(before[..., :30, :], after[..., :30, :])
    assert not torch.equal(before[..., 30:, :], after[..., 30:, :])


@pytest.mark.parametrize("split", [False, True], ids=["steps", "split"])
@pytest.mark.slow
def test_the_same_bits_every_time(split):
    """Where they are asked for; without, programs add to the gradients of one key in any order."""
    q, k, v = (random(1, 2, 1000 if GPU else 34, 16) for _ in range(3))
    runs = []
    with deterministic(True):
        for _ in range(20 if GPU else 2):
            pde, leaves = equation(2, split)
            out = reaction.attend(q, k, v, 0.3, pde=pde, steps=1, dt=1.0, is_causal=True)
            runs.append(with_gradients(out, [q, k, v, *leaves]))
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run))


def test_launches_of_backward(monkeypatch):
    """One launch has all rows, unless deterministic algorithms are asked for; results are the same."""
    q, k, v = (random(1, 1, 200 if GPU else 70, 16) for _ in range(3))
    monkeypatch.setattr(launch, "BUFFERS", 2)
    kernels, wrap = [], launch.wrap_triton
    monkeypatch.setattr(launch, "wrap_triton", lambda kernel: (kernels.append(kernel), wrap(kernel))[1])
    found, counts = [], []
    for wanted in (False, True):
        kernels.clear()
        with deterministic(wanted):
            pde, leaves = equation(1, False)
            out = reaction.attend(q, k, v, 0.3, pde=pde, steps=2, dt=1.0)
            found.append(with_gradients(out, [q, k, v, *leaves]))
        counts.append(kernels.count(launch.backward_kernel))
    assert counts == [1, 2]
    assert worst(*found) < 1e-5


def test_coefficients_for_all_heads():
    q, k, v = (random(1, 2, 4, 16) for _ in range(3))
    for split in (False, True):
        alpha, beta = (torch.tensor(x, device=DEVICE, requires_grad=True) for x in (0.2, 0.3))
        found = []
        for pde, inputs in (
            (pdes.ReactionDiffusion(alpha, beta, split=split), [alpha, beta]),
            (pdes.ReactionDiffusion(0.2, 0.3, split=split), []),
        ):
            out = reaction.attend(q, k, v, 0.3, pde=pde, steps=1, dt=1.0, is_causal=True)
            found.append(with_gradients(out, [*inputs, q, k, v]))
        assert worst(found[0][:1] + found[0][3:], found[1]) == 0
        assert all(x.shape == () for x in found[0][1:3])


@pytest.mark.slow
def test_operators_keep_their_promises():
    q, k, v = (random(1, 1, 3, 16) for _ in range(3))
    alpha, beta = (torch.full((1,), x, device=DEVICE, requires_grad=True) for x in (0.2, 0.1))
    torch.library.opcheck(launch.log_sum_exp, (q.detach(), k.detach(), True, 0.3, True))
    lse, mean = launch.log_sum_exp(q.detach(), k.detach(), True, 0.3, True)
    rows = lse, mean, True, 0.3, 1
    torch.library.opcheck(launch.reaction, (q, k, v, alpha, beta, *rows))
    torch.library.opcheck(launch.split_reaction, (q, k, v, v.detach(), alpha, beta, *rows))
    q, k, v, alpha, beta = (x.detach() for x in (q, k, v, alpha, beta))
    options = True, 0.3, 1
    saved = v, q, k, v, v, alpha, beta, lse, mean
    dk = k.float()
    for operator, given in (
        (launch.backward, (*saved, None, None, *options, True, False)),
        (launch.backward, (*saved, None, None, *options, False, False)),
        (launch.backward, (*saved, None, None, *options, True, True)),
        (launch.backward, (*saved, q.float(), lse, *options, True, False)),
        (launch.key_gradients, (None, q, k, None, beta, lse, None, lse, dk, True, 0.3, 0)),
        (launch.key_gradients, (v, q, k, v, beta, lse, lse, lse, dk, *options)),
        (launch.key_gradients, (v, q, k, v, beta, lse, lse, lse, None, False, 0.3, 0)),
        (launch.split_backward, (v, q, k, v, v, beta, lse, mean, *options, True)),
    ):
        torch.library.opcheck(operator, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.gpu
def test_compiled_in_one_graph(kind):
    def model(q, k, v, alpha, beta):
        pde = pdes.ReactionDiffusion(alpha, beta, split=kind == "split")
        return reaction.attend(q, k, v, 0.125, pde=pde, steps=4, dt=1.0, is_causal=True)

    _, leaves = equation(2, kind == "split")
    inputs = [*(random(2, 2, 300, 64, dtype=torch.bfloat16) for _ in range(3)), *leaves]
    found = with_gradients(torch.compile(model, fullgraph=True)(*inputs), inputs)
    assert worst(found, with_gradients(model(*inputs), inputs)) < 0.02


def test_what_the_kernels_do_not_take():
    x = torch.empty(1, 1, 4, 16)
    assert reaction.usable(x, x, 4)
    assert not reaction.usable(x, x, 0)
    assert not reaction.usable(x, x, reaction.STEPS + 1)
    assert not reaction.usable(x, torch.empty(1, 1, 4, 512), 4)
    assert not reaction.usable(x.double(), x.double(), 4)
    deep = torch.empty(1, 1, 4, 128)
    assert reaction.usable(deep.half(), deep.half(), 4)
    assert not reaction.usable(deep, deep, 4)  # more shared memory than there is
