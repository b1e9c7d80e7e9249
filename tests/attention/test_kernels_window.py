"""Windows with global tokens by kernels equal the map built whole: outputs and every gradient.

On a GPU the kernels run there; elsewhere in Triton's interpreter (see conftest.py).
"""

import pytest
import torch

GPU = torch.cuda.is_available()
pytest.importorskip("triton")

from attractor.attention import kernels, pde_attention, pdes, window_attention, windows  # noqa: E402
from attractor.attention.engines import softmax  # noqa: E402
from attractor.attention.kernels import boundary, stencils  # noqa: E402
from attractor.attention.kernels import window as window_kernels  # noqa: E402
from attractor.attention.pdes.evolution import Evolution  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
pytestmark = [pytest.mark.gpu] if GPU else []


@pytest.fixture(autouse=True)
def _everywhere(monkeypatch):
    """Kernels are taken on a CPU too."""
    monkeypatch.setattr(kernels, "DEVICES", ("cuda", "cpu"))


def random(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64).to(DEVICE, dtype).requires_grad_()


def equation(name, heads, dtype=torch.float64):
    """A PDE with a coefficient for each head, and its coefficients; None for no PDE."""
    if name is None:
        return None, []
    alpha = torch.linspace(0.05, 0.2, heads, dtype=dtype, device=DEVICE).view(heads, 1, 1)
    beta = torch.linspace(0.1, -0.05, heads, dtype=dtype, device=DEVICE).view(heads, 1, 1)
    leaves = [x.requires_grad_() for x in (alpha, beta)[: 2 if name == "advection_diffusion" else 1]]
    return pdes.get_pde(name)(*leaves), leaves


def dense(q, k, v, window, count, causal, pde, steps, scale=None):
    """The map built whole, with the same mask."""
    place = torch.arange(q.shape[-2], device=DEVICE)
    ahead = place - place[:, None]
    mask = (ahead >= -window[0]) & (ahead <= window[1]) | (place < count) | (place < count)[:, None]
    mask = mask & (ahead <= 0) if causal else mask
    return pde_attention(
        q, k, v, mask, scale=scale, enable_gqa=True, pde=pde or "diffusion", steps=steps if pde else 0,
        method="dense",
    )  # fmt: skip


def by_kernels(q, k, v, window, count, causal, pde, steps, scale=None):
    """`window_attention`, which must not go another way."""
    evolution = Evolution.of(pde or pdes.Diffusion(), steps if pde else 0, 1.0)
    sides = window[0], 0 if causal else window[1]
    assert not windows._why_no_kernels(q, v, sides, count, evolution)
    return window_attention(
        q, k, v, window=window, global_tokens=count, is_causal=causal, scale=scale, enable_gqa=True,
        pde=pde, steps=steps,
    )  # fmt: skip


def with_gradients(out, inputs, grad=None):
    if grad is None:
        torch.manual_seed(1)
        grad = torch.randn(out.shape).to(out)
    return out, *torch.autograd.grad(out, inputs, grad)


def worst(found, truth):
    """The largest difference of any entry, relative to the largest, or to 1."""
    pairs = [(a.double(), b.double()) for a, b in zip(found, truth, strict=True)]
    return max(((a - b).abs().max() / b.abs().max().clamp(min=1)).item() for a, b in pairs)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("tokens", "window", "count", "causal", "name", "steps", "shape"),
    [
        (67, (9, 0), 3, True, "advection_diffusion", 2, (1, 2, 16)),
        (40, (9, 4), 2, True, "wave", 3, (2, 1, 16)),
        pytest.param(36, (16, 0), 1, True, "wave", 8, (1, 1, 16), marks=pytest.mark.slow),
        (30, (10, 0), 2, True, "wave", 5, (1, 1, 16)),  # further than runs are long
        pytest.param(45, (8, 0), 4, True, "advection_diffusion", 4, (1, 1, 64), marks=pytest.mark.slow),
        (70, (8, 0), 5, True, "diffusion", 2, (1, 1, 16)),
        (50, (7, 3), 0, False, "advection_diffusion", 1, (1, 2, 16)),
        (40, (8, 5), 2, False, "advection_diffusion", 3, (1, 1, 24)),
        pytest.param(40, (2, 14), 1, False, "wave", 4, (1, 1, 16), marks=pytest.mark.slow),
        (30, (0, 6), 0, False, "diffusion", 3, (1, 1, 16)),
        (70, (12, 0), 3, True, None, 0, (2, 2, 16)),
        (70, (3, 9), 5, False, None, 0, (1, 1, 64)),
        (40, (0, 0), 1, True, None, 0, (1, 1, 16)),
        (70, (5, 2), 0, False, None, 0, (2, 2, 16)),
    ],
)
def test_equals_dense(tokens, window, count, causal, name, steps, shape):
    batch, heads, dim = shape
    pde, leaves = equation(name, heads)
    q, k, v = (random(batch, heads, tokens, dim) for _ in range(3))
    given = window, count, causal, pde, steps, 0.3
    found, truth = (
        with_gradients(way(q, k, v, *given), [q, k, v, *leaves]) for way in (by_kernels, dense)
    )
    assert worst(found, truth) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["advection_diffusion", None])
@pytest.mark.slow
def test_lower_precision_is_as_exact_as_torch(dtype, name):
    inputs = [random(1, 1, 75, 64).detach() for _ in range(3)]
    found = []
    for way, type_ in ((dense, torch.float64), (dense, dtype), (by_kernels, dtype)):
        wide = torch.float64 if type_ == torch.float64 else torch.float32
        pde, leaves = equation(name, 1, wide)
        qkv = [x.to(dtype).to(type_).requires_grad_() for x in inputs]
        out = way(*qkv, (12, 0), 4, True, pde, 2)
        assert out.dtype == type_
        found.append(with_gradients(out, [*qkv, *leaves]))
    if dtype == torch.float32:
        assert worst(found[2], found[0]) < 4e-6
    for n, (exact, theirs, ours) in enumerate(zip(*found)):
        error, allowed = (((x.double() - exact) ** 2).mean().sqrt().item() for x in (ours, theirs))
        few = 8 * torch.finfo(dtype).eps * exact.abs().max().item() if n > 3 else 1e-6
        assert error <= 3 * allowed + few, n  # stepped values are rounded, dense's scores are not


@pytest.mark.slow
def test_any_strides_and_shared_heads():
    pde = pdes.AdvectionDiffusion(0.2, 0.1)
    q = random(1, 40, 2, 24).transpose(1, 2)
    k, v = random(1, 40, 1, 24).transpose(1, 2), random(1, 1, 8, 40).mT
    for window, causal in (((10, 0), True), ((6, 4), False)):
        given = window, 2, causal, pde, 2
        found, truth = (with_gradients(way(q, k, v, *given), [q, k, v]) for way in (by_kernels, dense))
        assert worst(found, truth) < 1e-12


@pytest.mark.slow
def test_one_coefficient_for_all_heads():
    alpha = random(1).detach().abs().mul(0.1).requires_grad_()
    q, k, v = (random(2, 2, 30, 16) for _ in range(3))
    given = (10, 0), 2, True, pdes.Diffusion(alpha), 2
    ways = (by_kernels, dense)
    found, truth = (with_gradients(way(q, k, v, *given), [q, k, v, alpha]) for way in ways)
    assert worst(found, truth) < 1e-12


@pytest.mark.sampled(2)
@pytest.mark.parametrize("wanted", [0, 1, 2, 3])
def test_a_gradient_alone(wanted):
    _, leaves = equation("diffusion", 1)
    given = [random(1, 1, 30, 16).detach() for _ in range(3)]
    found = []
    for way in (by_kernels, dense):
        inputs = [x.clone() for x in given] + [leaves[0].detach().clone()]
        inputs[wanted].requires_grad_()
        out = way(*inputs[:3], (8, 0), 1, True, pdes.Diffusion(inputs[3]), 1)
        found.append(with_gradients(out, [inputs[wanted]]))
    assert worst(*found) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("pde", [pdes.AdvectionDiffusion(0.2, 0.1), None])
def test_no_bit_of_the_past_changes_with_the_future(pde):
    x = random(1, 2, 40, 16, dtype=torch.bfloat16).detach()
    # Heads that do not lie one behind the other are not one line to the operator.
    for turn in (lambda x: x, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)):
        attend = lambda x: by_kernels(turn(x), turn(x.flip(-1)), turn(x * 0.5), (10, 0), 2, True, pde, 2)  # noqa: B023
        out = attend(x)
        for cut in (1, 30):
            other = x.clone()
            other[..., cut:, :] = random(1, 2, 40 - cut, 16, dtype=x.dtype).detach()
            changed = attend(other)
            assert torch.equal(out[..., :cut, :], changed[..., :cut, :])
            assert not torch.equal(out[..., cut, :], changed[..., cut, :])


def operands(dtype=torch.float32, with_pde=True):
    """Arguments of `boundary_forward`."""
    evolution = Evolution(pdes.AdvectionDiffusion(0.2, 0.1), 2, 1.0)
    table = stencils.stencil_table(evolution, torch.empty(1, device=DEVICE))
    table = table.detach() if with_pde else None
    q, k, v = (random(1, 2, 40, 16, dtype=dtype).detach() for _ in range(3))
    first = k[:, :, :2].contiguous(), v[:, :, :2].to(torch.float32)
    ends = v[:, :, :13].contiguous(), v[:, :, :0]
    far, far_lse = window_kernels._far_forward(q, k, v, table, (10, 0), 0.25)
    return (q, k, v, far, far_lse, table, None, *first, *ends, 10, 0, 0.25)


def test_no_key_is_read_but_those_near_a_wall():
    q, k, v, *given = operands()
    found = boundary.boundary_forward(q, k, v, *given)
    for x in (k, v):
        x[..., 20, :] = torch.nan
    changed = boundary.boundary_forward(q, k, v, *given)
    for n, reach in enumerate((4, 2)):  # outputs meet what near keys spread to, sums of weights not
        hit = [
            row for row in range(13, 40) if row - 10 <= 20 < row - 10 + reach or row - reach < 20 <= row
        ]
        same = [(found[n][:, :, row] == changed[n][:, :, row]).all().item() for row in range(40)]
        assert [row for row in range(40) if not same[row]] == hit


@pytest.mark.slow
def test_the_same_bits_every_time():
    pde, leaves = equation("advection_diffusion", 2, torch.float32)
    q, k, v = (random(1, 2, 40, 16, dtype=torch.float32) for _ in range(3))
    before = torch.are_deterministic_algorithms_enabled()
    runs = []
    for poisoned in (False, True):  # what is not written is not a number then
        torch.use_deterministic_algorithms(poisoned, warn_only=True)
        out = by_kernels(q, k, v, (12, 0), 3, True, pde, 2)
        runs.append(with_gradients(out, [q, k, v, *leaves]))
    torch.use_deterministic_algorithms(before)
    if not GPU:  # the operators of torch for CUDA are not all deterministic
        assert all(torch.equal(a, b) for a, b in zip(*runs))
    assert all(x.isfinite().all() for x in runs[1])


@pytest.mark.slow
@pytest.mark.parametrize("with_pde", [True, False])
def test_operators_keep_their_promises(with_pde):
    some = {"test_utils": ("test_schema", "test_faketensor")}  # there is no derivative to ask about
    given = operands(with_pde=with_pde)
    torch.library.opcheck(boundary.forward_operator, given, **some)
    out, lse = boundary.boundary_forward(*given)
    q, k, v, _, _, table, _, *global_tokens = given[:9]
    grad = torch.randn_like(out)
    far = window_kernels._far_backward(grad, q, k, v, out, lse, table, (10, 0), 0.25)
    sides = 10, 0
    given = (
        grad, q, k, v, out, lse, table, None, *global_tokens, far[0], 13, 40, *sides, 0.25, with_pde
    )  # fmt: skip
    torch.library.opcheck(boundary.backward_rows_operator, given, **some)
    if with_pde:
        _, row_weights, _, _, *sums = boundary.boundary_backward_rows(*given)
        given = grad, q, k, v, row_weights, table, None, *far[1:], *sums, *sides, True
        torch.library.opcheck(boundary.backward_keys_operator, given, **some)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_compiled_in_one_graph(count):
    def windowed(q, k, v, alpha):
        pde = pdes.Diffusion(alpha)
        with_pde = window_attention(
            q, k, v, window=(10, 0), global_tokens=count, is_causal=True, pde=pde, steps=2
        )
        return with_pde + window_attention(
            q, k, v, window=(10, 0), global_tokens=count, is_causal=True, pde=None
        )

    alpha = torch.full((1, 1, 1), 0.1, device=DEVICE, requires_grad=True)
    inputs = [*(random(1, 2, 50, 16, dtype=torch.float32) for _ in range(3)), alpha]
    inputs = [x.detach().requires_grad_() for x in inputs]
    compiled = torch.compile(windowed, fullgraph=True, backend="inductor" if GPU else "aot_eager")
    found, truth = (with_gradients(model(*inputs), inputs) for model in (compiled, windowed))
    assert worst(found, truth) < 1e-5


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_captured_in_a_graph():
    pde = pdes.Diffusion(torch.full((2, 1, 1), 0.1, device=DEVICE, requires_grad=True))
    q, k, v = (random(1, 2, 2000, 64, dtype=torch.bfloat16) for _ in range(3))
    grad = torch.randn_like(q)  # a capture takes no copies from the host
    attend = lambda: by_kernels(q, k, v, (256, 0), 4, True, pde, 4)
    call = lambda: with_gradients(attend(), [q, k, v, pde.alpha], grad)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        truth = call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found[0], truth[0])
    assert worst(found, truth) < 2e-2


def test_what_the_kernels_do_not_take():
    assert not window_kernels.why_not((256, 0), 4, 1000, 4)
    assert "further" in window_kernels.why_not((7, 0), 4, 1000, 4)
    assert not window_kernels.why_not((8, 0), 4, 1000, 4)
    assert "limit" in window_kernels.why_not((8, -1), 4, 1000, 4)
    assert "global" in window_kernels.why_not((256, 0), window_kernels.GLOBALS + 1, 1000, 4)
    assert "complete" in window_kernels.why_not((20, 3), 2, 26, 2)
    evolution = Evolution.of(pdes.ReactionDiffusion(), 2, 1.0)
    q = torch.empty(1, 1, 40, 16, device=DEVICE)
    assert "linear" in windows._why_no_kernels(q, q, (10, 0), 2, evolution)


def test_what_is_wrong_is_said_before_any_kernel():
    q, k, v = (random(1, 2, 40, 16).detach() for _ in range(3))
    given = {"window": (10, 0), "global_tokens": 2, "is_causal": True, "pde": pdes.Diffusion(0.2)}
    for wrong, message in (
        (lambda: window_attention(q[:, [0, 1, 0]], k, v, **given), "enable_gqa"),
        (lambda: window_attention(q, k.float(), v, **given), "one floating-point type"),
        (lambda: window_attention(q, k[..., :8], v, **given), "last dimension"),
        (lambda: window_attention(q, k, v, **given | {"pde": pdes.Diffusion(0.7)}), "unstable"),
        (lambda: window_attention(q, k, v, **given | {"steps": 2.5}), "whole number"),
        (lambda: window_attention(q, k, v, **given | {"window": (10, -2)}), "at least 0"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()


def test_what_they_do_not_take_goes_another_way():
    q, k, v = (random(1, 1, 40, 16) for _ in range(3))
    pde = pdes.Diffusion(0.2)
    for window, count in (((5, 0), 2), ((10, 0), 9), ((30, 0), 9)):
        found = window_attention(
            q, k, v, window=window, global_tokens=count, is_causal=True, pde=pde, steps=3
        )
        truth = dense(q, k, v, window, count, True, pde, 3)
        assert worst([found], [truth]) < 1e-12


def test_far_rows_of_all_heads_in_one_line_or_not():
    q, k, v = (random(2, 3, 50, 16).detach() for _ in range(3))
    lined, lse = window_kernels._far_forward(q, k, v, None, (7, 2), 0.3)
    assert lined.shape == (1, 1, 300, 16)
    plain, plain_lse = softmax.attend(q, k, v, window_kernels.Scope(50, 50, 7, 2), 0.3)
    whole = slice(7, 48)
    torch.testing.assert_close(lined.view(q.shape)[..., whole, :], plain[..., whole, :])
    torch.testing.assert_close(lse.view(q.shape[:3])[..., whole], plain_lse[..., whole])
