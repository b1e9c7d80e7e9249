"""Kernels of linear PDEs equal plain torch: values, causal attention, and every gradient.

On a GPU the kernels run there; elsewhere in Triton's interpreter (see conftest.py).
"""

import pytest
import torch

GPU = torch.cuda.is_available()
pytest.importorskip("triton")

from attractor.attention import kernels, pde_attention, pdes  # noqa: E402
from attractor.attention.engines import backends, boundary, selection, strips  # noqa: E402
from attractor.attention.engines.values import Stencil, step_values  # noqa: E402
from attractor.attention.kernels import boundary as boundary_kernels  # noqa: E402
from attractor.attention.kernels import causal, stencils, values  # noqa: E402
from attractor.attention.kernels.boundary import CAUSAL  # noqa: E402
from attractor.attention.pdes import Line, take_steps  # noqa: E402
from attractor.attention.pdes.evolution import Evolution  # noqa: E402
from tests.attention.test_backends import StandIns  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
pytestmark = [pytest.mark.gpu] if GPU else []
LINEAR = ("diffusion", "wave", "advection_diffusion")


def equation(name, heads, dtype=torch.float64):
    """A PDE with a coefficient for each head, and its coefficients."""
    alpha = torch.linspace(0.05, 0.3, heads, dtype=dtype, device=DEVICE).view(heads, 1, 1)
    beta = torch.linspace(0.1, -0.05, heads, dtype=dtype, device=DEVICE).view(heads, 1, 1)
    leaves = [x.requires_grad_() for x in (alpha, beta)[: 2 if name == "advection_diffusion" else 1]]
    return pdes.get_pde(name)(*leaves), leaves


def random(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64).to(DEVICE, dtype).requires_grad_()


def worst(found, truth):
    """The largest difference of any entry, relative to the largest, or to 1."""
    pairs = [(a.double(), b.double()) for a, b in zip(found, truth, strict=True)]
    return max(((a - b).abs().max() / b.abs().max().clamp(min=1)).item() for a, b in pairs)


def stencil_of(pde, steps, dt, like):
    return stencils.stencil_table(Evolution(pde, steps, dt), like)


def table_of(pde, steps, dt, like):
    return stencils.table_by_steps(Evolution(pde, steps, dt), like.dtype, like.device)


def merge_operands(q, k, v, far, far_lse, table, scale, open=None):
    """Arguments of `boundary_forward` for causal rows."""
    none = (None,) * 4  # neither global tokens nor rows that are computed elsewhere
    return q, k, v, far, far_lse, table, open, *none, CAUSAL, 0, scale


def row_operands(do, q, k, v, out, lse, table, far, scale, of_stencil, open=None):
    """Arguments of `boundary_backward_rows` for causal rows."""
    return do, q, k, v, out, lse, table, open, None, None, far, 0, 0, CAUSAL, 0, scale, of_stencil


def with_gradients(out, inputs):
    torch.manual_seed(1)
    return out, *torch.autograd.grad(out, inputs, torch.randn(out.shape).to(out))


@pytest.mark.slow
@pytest.mark.parametrize("name", LINEAR)
def test_a_stencil_table_is_what_steps_make_of_a_unit(name):
    for steps, heads in ((1, 3), (4, 1), (8, 1))[: 3 if name == "advection_diffusion" else 2]:
        pde, leaves = equation(name, heads)
        like = torch.empty(1, dtype=torch.float64, device=DEVICE)
        found = [make(pde, steps, 0.7, like) for make in (stencil_of, table_of)]
        assert found[0].shape == (heads, steps + 1, steps + 1, 2 * steps + 1)
        grad = torch.randn_like(found[0])
        found = [(x, *torch.autograd.grad(x, leaves, grad)) for x in found]
        assert worst(*found) < 1e-13


def test_a_stencil_table_contains_the_matrices_of_a_stencil():
    reach = 3
    pde, _ = equation("advection_diffusion", 2)
    like = torch.empty(1, dtype=torch.float64, device=DEVICE)
    stencil, table = (
        Stencil.of(Evolution(pde, reach, 1.0), like.dtype, like.device),
        stencil_of(pde, reach, 1.0, like),
    )
    torch.testing.assert_close(table[:, -1, -1], stencil.matrix[:, 0, : 2 * reach + 1])
    for k in range(reach):
        row = table[:, k, reach, reach - k :]
        torch.testing.assert_close(row, stencil.top[:, k, : row.shape[-1]])
        row = table[:, reach, reach - 1 - k, : 2 * reach - k]
        torch.testing.assert_close(row, stencil.bottom[:, k, k:])


def test_a_table_of_one_head_and_numbers_for_coefficients():
    value = random(1, 2, 40, 16)
    for pde in (
        pdes.Diffusion(0.2),
        pdes.Wave(0.5),
        pdes.AdvectionDiffusion(0.2, torch.tensor(0.1, device=DEVICE)),
    ):
        assert stencil_of(pde, 2, 1.0, value).shape == (1, 3, 3, 5)
        found = with_gradients(kernels.stepped_values(Evolution(pde, 2, 1.0), value, None), [value])
        truth = with_gradients(step_values(Evolution(pde, 2, 1.0), value, None), [value])
        assert worst(found, truth) < 1e-12


def test_a_table_of_numbers_is_computed_once():
    evolution, value = Evolution.of(pdes.Diffusion(0.123), 2, 0.5), random(1, 1, 30, 16)
    with torch.inference_mode():
        table = stencils.stencil_table(evolution, value)
    assert stencils.stencil_table(evolution, value) is table
    assert stencils.stencil_table(evolution, value.float()).dtype == torch.float32
    assert worst([table], [table_of(evolution.pde, 2, 0.5, value)]) < 1e-14
    values.step(value, table, None).sum().backward()


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_a_captured_graph_computes_its_own_table():
    evolution, value = Evolution.of(pdes.Diffusion(0.321), 2, 0.5), random(1, 1, 300, 64).detach()
    truth = kernels.stepped_values(Evolution(pdes.Diffusion(0.321), 2, 0.5), value, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels.stepped_values(evolution, value, None)
    assert not evolution.stencils
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, truth)


def walls(tokens):
    """Open faces ``[batch or 1, heads or 1, 1, keys - 1]`` of every kind, for a batch of two."""
    real = torch.arange(tokens) < torch.tensor([[tokens], [tokens - tokens // 3]])
    real = (real[:, 1:] & real[:, :-1])[:, None, None]
    ids = torch.arange(tokens).div(5, rounding_mode="floor")
    documents = (ids[1:] == ids[:-1])[None, None, None]
    found = {
        "ends": None,
        "padding": real,
        "documents": documents,
        "heads": torch.rand(1, 2, 1, tokens - 1) > 0.2,
        "both": real & documents,
    }
    return {kind: x if x is None else x.to(DEVICE) for kind, x in found.items()}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "kind", [pytest.param(x, marks=() if x in ("both", "heads") else pytest.mark.slow) for x in walls(2)]
)
def test_stepped_values_equal_steps(kind):
    for tokens, steps, dim, heads in ((1, 2, 16, 2), (7, 8, 32, 1), (66, 4, 16, 1), (33, 3, 64, 1)):
        if kind == "heads":
            heads, tokens, steps = 2, min(tokens, 33), min(steps, 2)
        pde, leaves = equation("advection_diffusion", heads)
        value, open = random(2, heads, tokens, dim), walls(tokens)[kind]
        table = table_of(pde, steps, 0.9, value)
        line = Line(-2, None if open is None else open.mT).adjoint
        truth = take_steps(pde, value, line, steps, 0.9)
        found, truth = (
            with_gradients(x, [value, *leaves]) for x in (values.step(value, table, open), truth)
        )
        assert worst(found, truth) < 1e-12, (tokens, steps, dim)


def test_an_unusual_pde_goes_through_the_same_kernel():
    class Twice(pdes.Diffusion):
        reach = 2

        def step(self, u, velocity, line, dt):
            for _ in range(2):
                u, _ = super().step(u, None, line, dt)
            return u, velocity

    value = random(1, 1, 50, 16)
    found, truth = (
        step(Evolution(Twice(0.2), 2, 1.0), value, None)
        for step in (kernels.stepped_values, step_values)
    )
    assert worst([found], [truth]) < 1e-12


def test_rows_of_any_stride():
    value = random(1, 40, 2, 16).transpose(1, 2)
    pde = pdes.AdvectionDiffusion(0.2, 0.1)
    truth = step_values(Evolution(pde, 2, 1.0), value, None)
    shared = value[:, :1].expand(-1, 2, -1, -1)
    for given in (value, value.contiguous(), value.mT.contiguous().mT):
        assert worst([kernels.stepped_values(Evolution(pde, 2, 1.0), given, None)], [truth]) < 1e-12
    truth = step_values(Evolution(pde, 2, 1.0), shared, None)
    assert worst([kernels.stepped_values(Evolution(pde, 2, 1.0), shared, None)], [truth]) < 1e-12


def test_nothing_behind_a_wall_is_read():
    value = random(1, 1, 90, 16).detach()
    open = torch.ones(1, 1, 1, 89, dtype=torch.bool, device=DEVICE)
    open[..., 49] = False
    broken = value.clone()
    broken[..., 50:, :] = torch.nan
    found = [
        kernels.stepped_values(Evolution(pdes.Diffusion(0.2), 2, 1.0), x, open) for x in (value, broken)
    ]
    assert torch.equal(found[0][..., :50, :], found[1][..., :50, :])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("tokens", "steps", "dim", "heads", "name"),
    [
        (1, 1, 16, 1, "diffusion"),
        (2, 4, 16, 1, "wave"),
        (9, 8, 16, 2, "advection_diffusion"),
        (17, 2, 16, 3, "wave"),
        (65, 3, 64, 1, "advection_diffusion"),
        (66, 4, 16, 1, "wave"),
        (130, 1, 16, 2, "diffusion"),
        pytest.param(130, 8, 16, 1, "advection_diffusion", marks=pytest.mark.slow),
    ],
)
def test_causal_equals_dense(tokens, steps, dim, heads, name):
    pde, leaves = equation(name, heads)
    q, k, v = (random(1 + (tokens == 17), heads, tokens, dim) for _ in range(3))
    found = causal.causal(q, k, v, table_of(pde, steps, 1.0, v), 0.3)
    truth = pde_attention(q, k, v, is_causal=True, scale=0.3, pde=pde, steps=steps, method="dense")
    found, truth = (with_gradients(x, [q, k, v, *leaves]) for x in (found, truth))
    assert worst(found, truth) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "steps", "heads", "shared", "lengths"),
    [
        (70, 2, 4, 2, None),
        pytest.param(5, 4, 2, 1, None, marks=pytest.mark.slow),
        pytest.param(90, 4, 6, 2, None, marks=pytest.mark.slow),
        pytest.param(50, 3, 4, 2, [1, 2, 3, 4, 40], marks=pytest.mark.slow),
    ],
)
def test_heads_that_share_keys_and_values_equal_dense(tokens, steps, heads, shared, lengths):
    """Key and value are not repeated; their gradients, and the coefficients', sum over the group."""
    documents = None if lengths is None else ids(lengths, lengths[::-1])
    pde, leaves = equation("advection_diffusion", 1)
    q = random(2, heads, tokens, 16)
    k, v = (random(2, tokens, shared, 16).transpose(1, 2) for _ in range(2))
    found = causal.causal(q, k, v, table_of(pde, steps, 1.0, v), 0.3, documents)
    truth = pde_attention(
        q, k, v, is_causal=True, scale=0.3, enable_gqa=True, pde=pde, steps=steps, documents=documents,
        method="dense",
    )  # fmt: skip
    found, truth = (with_gradients(x, [q, k, v, *leaves]) for x in (found, truth))
    assert worst(found, truth) < 1e-12


class Dropping:
    """A causal operator that drops the same weights every time, as `Dropout` asks for."""

    def __init__(self, tokens, p):
        generator = torch.Generator().manual_seed(7)
        kept = torch.rand(1, 2, tokens, tokens, generator=generator, dtype=torch.float64) >= p
        self.factors = (kept / (1 - p)).to(DEVICE)
        strip = strips.Strip(slice(0, tokens), slice(0, tokens), causal=True)
        self.operator = strips.Operator("dropping", self.forward, self.backward, strip, True)

    def scores(self, q, k, scale):
        allowed = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=DEVICE).tril()
        return (scale * q @ k.mT).masked_fill(~allowed, -torch.inf)

    def forward(self, q, k, v, strip, scale, dropout):
        dropout.state = torch.tensor([7, 0], device=DEVICE)
        scores = self.scores(q, k, scale)
        return (scores.softmax(-1) * self.factors) @ v, scores.logsumexp(-1)

    def backward(self, grad, out, q, k, v, lse, strip, scale, dropout):
        assert dropout.state.tolist() == [7, 0]
        weights = (self.scores(q, k, scale) - lse[..., None]).exp()
        of_weights = (grad @ v.mT) * self.factors - (grad * out).sum(-1, keepdim=True)
        of_scores = scale * weights * of_weights
        return of_scores @ k, of_scores.mT @ q, (weights * self.factors).mT @ grad


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "far"), [(4, False), (11, True)])
def test_dropout_has_the_gradients_of_the_same_draw(tokens, far):
    """Boundary keys drop by the kernels' own numbers, far keys by the operator's."""
    table = table_of(pdes.AdvectionDiffusion(0.2, 0.1), 4 if not far else 2, 1.0, random(1)).detach()
    operator = Dropping(tokens - 2, 0.4).operator if far else None
    q, k, v = (random(1, 2, tokens, 3) for _ in range(3))

    def dropped(q, k, v, table):
        torch.manual_seed(3)
        return causal.causal(q, k, v, table, 0.3, None, None, operator, 0.4)

    assert torch.equal(dropped(q, k, v, table), dropped(q, k, v, table))
    assert torch.autograd.gradcheck(dropped, (q, k, v, table.requires_grad_()), fast_mode=True)


@pytest.mark.slow
def test_dropout_does_not_change_the_mean():
    table = table_of(pdes.Diffusion(0.2), 4, 1.0, random(1)).detach()
    q, k, v = (random(1, 1, 4, 3).detach() for _ in range(3))
    whole = causal.causal(q, k, v, table, 0.3)
    torch.manual_seed(0)
    many = [x.expand(10, 8, -1, -1) for x in (q, k, v)]
    draws = causal.causal(*many, table, 0.3, None, None, None, 0.4).flatten(0, 1)
    spread = draws.std(0) / len(draws) ** 0.5
    assert (draws.mean(0) - whole).abs().lt(5 * spread + 1e-12).all()
    assert draws[:, 1].std() > 0.1


def test_dropout_without_an_operator_that_drops_raises():
    q, k, v = (random(1, 1, 40, 16) for _ in range(3))
    with pytest.raises(ValueError, match="supports dropout for these tensors; use method='tiled'"):
        causal.causal(q, k, v, table_of(pdes.Diffusion(0.2), 2, 1.0, v), 0.3, dropout_p=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
def test_dropout_on_a_gpu_is_the_same_forward_and_backward(packed):
    """The output is linear in the values, and the mean gradient is that without dropout."""
    documents = ids([90, 110]).expand(1024, -1) if packed else None
    one = [torch.randn(1, 2, 200, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    q, k, v, grad = (x.expand(1024, -1, -1, -1).contiguous().requires_grad_() for x in one)
    table = table_of(pdes.Diffusion(0.2), 4, 1.0, one[0].float())
    out = causal.causal(q, k, v, table, 0.125, documents, dropout_p=0.2)
    found = torch.autograd.grad(out, (q, k, v), grad.detach())
    of_out, of_value = ((a.float() * b.float()).sum((1, 2, 3)) for a, b in ((out, grad), (v, found[2])))
    torch.testing.assert_close(of_out, of_value, rtol=2e-2, atol=2.0)
    whole = causal.causal(
        q[:1], k[:1], v[:1], table, 0.125, None if documents is None else documents[:1]
    )
    truth = torch.autograd.grad(whole, (q, k, v), grad[:1].detach())
    for a, b in zip((out, *found), (whole, *(x[:1] for x in truth)), strict=True):
        spread = a.float().std(0) / len(a) ** 0.5
        assert ((a.float().mean(0) - b[0].float()).abs() < 6 * spread + 2e-2).all()


def test_causal_equals_the_operator_without_kernels():
    pde, leaves = equation("advection_diffusion", 2)
    q, k, v = (random(1, 2, 70, 16) for _ in range(3))
    found = causal.causal(q, k, v, table_of(pde, 3, 1.0, v), 0.3)
    operator = selection.choose_square_causal(q, v, 67)
    if operator.strip is None:
        pytest.skip("torch has no operator for a causal map in float64 on this device")
    truth = boundary.causal(
        q, k, v, Stencil.of(Evolution(pde, 3, 1.0), v.dtype, v.device), operator, 0.3
    )
    found, truth = (with_gradients(x, [q, k, v, *leaves]) for x in (found, truth))
    assert worst(found, truth) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_lower_precision_is_as_exact_as_torch(dtype):
    inputs = [random(1, 2, 70, 32).detach() for _ in range(3)]
    found = []
    for method, type_ in (("dense", torch.float64), ("dense", dtype), ("fused", dtype)):
        wide = torch.float64 if type_ == torch.float64 else torch.float32
        pde, leaves = equation("advection_diffusion", 2, wide)
        q, k, v = (x.to(dtype).to(type_).requires_grad_() for x in inputs)
        if method == "dense":
            out = pde_attention(q, k, v, is_causal=True, pde=pde, steps=4, method="dense")
        else:
            out = causal.causal(q, k, v, table_of(pde, 4, 1.0, v.to(wide)), 32**-0.5)
            assert out.dtype == dtype
        found.append(with_gradients(out, [q, k, v, *leaves]))
    if dtype == torch.float32:
        assert worst(found[2], found[0]) < 2e-6
    for n, (exact, dense, ours) in enumerate(zip(*found)):
        error, allowed = (((x.double() - exact) ** 2).mean().sqrt().item() for x in (ours, dense))
        few = 32 * torch.finfo(dtype).eps * exact.abs().max().item() if n > 3 else 1e-6
        assert error <= 3 * allowed + few, n  # stepped values are rounded, dense's scores are not


def test_value_dim_and_strides_of_one_s_own():
    pde = pdes.AdvectionDiffusion(0.2, 0.1)
    q, k = (random(1, 40, 2, 24).transpose(1, 2) for _ in range(2))
    v = random(1, 2, 8, 40).mT
    found = causal.causal(q, k, v, table_of(pde, 3, 1.0, v), 0.25)
    truth = pde_attention(q, k, v, is_causal=True, scale=0.25, pde=pde, steps=3, method="dense")
    found, truth = (with_gradients(x, [q, k, v]) for x in (found, truth))
    assert worst(found, truth) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_bit_of_the_past_changes_with_the_future(dtype):
    table = table_of(pdes.AdvectionDiffusion(0.2, 0.1), 3, 1.0, torch.empty(1, device=DEVICE))
    x = random(1, 1, 40, 16, dtype=dtype).detach()
    out = causal.causal(x, x.flip(-1), x * 0.5, table, 0.3)
    for cut in (1, 4, 31, 39):
        other = x.clone()
        other[..., cut:, :] = random(1, 1, 40 - cut, 16, dtype=dtype).detach()
        changed = causal.causal(other, other.flip(-1), other * 0.5, table, 0.3)
        assert torch.equal(out[..., :cut, :], changed[..., :cut, :])
        assert not torch.equal(out[..., cut, :], changed[..., cut, :])


def test_boundary_keys_read_no_later_key():
    table = table_of(pdes.Diffusion(0.2), 2, 1.0, torch.empty(1, device=DEVICE))
    q, k, v = (random(1, 1, 40, 16, dtype=torch.float32).detach() for _ in range(3))
    far, far_lse = v[..., 2:, :].clone(), v[..., 2:, 0].clone()
    given = merge_operands(q, k, v, far, far_lse, table, 0.3)
    found = boundary_kernels.boundary_forward(*given)
    for x in (q, k, v, far, far_lse):
        x[:, :, 30 - (x is far or x is far_lse) * 2 :] = torch.nan
    for a, b in zip(found, boundary_kernels.boundary_forward(*given)):
        assert torch.equal(a[:, :, :30], b[:, :, :30])


@pytest.mark.slow
def test_the_same_bits_every_time():
    pde, leaves = equation("advection_diffusion", 1, torch.float32)
    q, k, v = (random(1, 1, 70, 16, dtype=torch.float32) for _ in range(3))
    runs = []
    for _ in range(2):
        table = table_of(pde, 2, 1.0, v)
        out = causal.causal(q, k, v, table, 0.25)
        runs.append(with_gradients(out, [q, k, v, *leaves]))
    if not GPU:  # the operators of torch for CUDA are not all deterministic
        assert all(torch.equal(a, b) for a, b in zip(*runs))
    table = table.detach().requires_grad_()
    steps = [with_gradients(values.step(v, table, None), [v, table]) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*steps))


def ids(*rows):
    """Documents ``[batch, tokens]`` of these lengths, in no order of ids."""
    lines = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in rows]
    return torch.stack([(line * 7 + 3) % 101 for line in lines]).to(DEVICE)


def packed_attention(q, k, v, documents, table, scale=0.3):
    within = causal.pack_documents(q, k, v, documents, table.shape[-1] // 2)
    return causal.causal(q, k, v, table, scale, documents, within)


PACKED = {
    "one token": (1, [[1]], "diffusion"),
    "fewer tokens than the reach": (4, [[1, 2]], "wave"),
    "a token each": (3, [[1] * 20], "advection_diffusion"),
    "reach 1": (1, [[1, 1, 2, 3, 38, 1, 4], [30, 20]], "diffusion"),
    "reach 2": (2, [[1, 2, 3, 4, 40], [29, 21]], "wave"),
    "reach 3": (3, [[2, 5, 6, 37, 7, 3, 1]], "advection_diffusion"),
    "reach 4": (4, [[1, 3, 4, 7, 8, 43, 1]], "advection_diffusion"),
    "one": (2, [[50]], "diffusion"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", PACKED)
def test_documents_equal_dense(case):
    steps, lengths, name = PACKED[case]
    documents = ids(*lengths)
    pde, leaves = equation(name, 1)
    q, k, v = (random(*documents.shape[:1], 1, documents.shape[1], 16) for _ in range(3))
    found = packed_attention(q, k, v, documents, table_of(pde, steps, 1.0, v))
    truth = pde_attention(
        q, k, v, is_causal=True, scale=0.3, pde=pde, steps=steps, documents=documents, method="dense"
    )
    found, truth = (with_gradients(x, [q, k, v, *leaves]) for x in (found, truth))
    assert worst(found, truth) < 1e-12


@pytest.mark.slow
def test_random_documents_in_heads_of_their_own():
    lengths = torch.randint(1, 12, (2, 54)).tolist()
    documents = torch.stack([ids(row)[0, :54] for row in lengths])
    documents[:, 24:] = 200  # and a long one
    pde, leaves = equation("advection_diffusion", 2)
    q, k = (random(2, 54, 2, 24).transpose(1, 2) for _ in range(2))
    v = random(2, 2, 8, 54).mT
    found = packed_attention(q, k, v, documents, table_of(pde, 2, 1.0, v), 0.25)
    truth = pde_attention(
        q, k, v, is_causal=True, scale=0.25, pde=pde, steps=2, documents=documents, method="dense"
    )
    found, truth = (with_gradients(x, [q, k, v, *leaves]) for x in (found, truth))
    assert worst(found, truth) < 1e-12


@pytest.mark.skipif(GPU, reason="the operator itself is there")
def test_documents_through_the_operator_for_packed_ones(monkeypatch):
    stand_ins = StandIns()
    monkeypatch.setattr(backends, "_aten", stand_ins)
    monkeypatch.setattr(selection, "HALF", (torch.float64,))
    monkeypatch.setattr(selection, "flash_works", lambda _: True)
    monkeypatch.setattr(causal, "choose", selection.choose_on_cuda)
    documents = ids([1, 2, 5, 25, 7], [3, 37])
    pde, leaves = equation("advection_diffusion", 1)
    q, k, v = (random(2, 1, 40, 16) for _ in range(3))
    found = packed_attention(q, k, v, documents, table_of(pde, 2, 1.0, v))
    truth = pde_attention(
        q, k, v, is_causal=True, scale=0.3, pde=pde, steps=2, documents=documents, method="dense"
    )
    found, truth = (with_gradients(x, [q, k, v, *leaves]) for x in (found, truth))
    assert worst(found, truth) < 1e-12
    assert stand_ins.calls == ["packed", "packed backward"]
    assert causal.pack_documents(q, k, v, documents % 2, 2) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.slow
def test_documents_in_lower_precision(dtype):
    inputs, documents = [random(1, 1, 90, 32).detach() for _ in range(3)], ids([1, 2, 5, 7, 66, 9])
    found = []
    for method, type_ in (("dense", torch.float64), ("dense", dtype), ("fused", dtype)):
        wide = torch.float64 if type_ == torch.float64 else torch.float32
        pde, leaves = equation("advection_diffusion", 1, wide)
        q, k, v = (x.to(dtype).to(type_).requires_grad_() for x in inputs)
        if method == "dense":
            out = pde_attention(
                q, k, v, is_causal=True, pde=pde, steps=3, documents=documents, method="dense"
            )
        else:
            table = table_of(pde, 3, 1.0, v.to(wide))
            out = packed_attention(q, k, v, documents, table, 32**-0.5)
            assert out.dtype == dtype
        found.append(with_gradients(out, [q, k, v, *leaves]))
    if dtype == torch.float32:
        assert worst(found[2], found[0]) < 5e-6
    for n, (exact, dense, ours) in enumerate(zip(*found)):
        error, allowed = (((x.double() - exact) ** 2).mean().sqrt().item() for x in (ours, dense))
        few = 32 * torch.finfo(dtype).eps * exact.abs().max().item() if n > 3 else 1e-6
        assert error <= 3 * allowed + few, n  # stepped values are rounded, dense's scores are not


@pytest.mark.slow
def test_no_bit_of_a_document_changes_with_another_or_with_its_future():
    pde = pdes.AdvectionDiffusion(0.2, 0.1)
    documents, own = ids([9, 3, 40, 8]), slice(12, 52)
    x = random(3, 1, 1, 60, 16, dtype=torch.float32).detach()
    grad = torch.randn_like(x[0])
    table = table_of(pde, 3, 1.0, x)

    def run(x, grad):
        q, k, v = (part.clone().requires_grad_() for part in x)
        out = packed_attention(q, k, v, documents, table)
        return out, *torch.autograd.grad(out, (q, k, v), grad)

    found, other, other_grad = run(x, grad), torch.randn_like(x), torch.randn_like(grad)
    other[..., own, :], other_grad[..., own, :] = x[..., own, :], grad[..., own, :]
    changed = run(other, other_grad)
    for a, b in zip(found, changed):
        assert torch.equal(a[..., own, :], b[..., own, :])
        assert not torch.equal(a[..., :12, :], b[..., :12, :])
    for cut in (12, 15, 51):
        other = x.clone()
        other[..., cut:, :] = torch.randn_like(other[..., cut:, :])
        changed = packed_attention(*other, documents, table)
        assert torch.equal(found[0][..., :cut, :], changed[..., :cut, :])
        assert not torch.equal(found[0][..., cut, :], changed[..., cut, :])


def test_nothing_of_another_document_is_used_near_a_wall():
    table = table_of(pdes.AdvectionDiffusion(0.2, 0.1), 2, 1.0, torch.empty(1, device=DEVICE))
    documents, own = ids([40, 30, 3, 7]), slice(40, 70)
    x = random(6, 1, 1, 80, 16, dtype=torch.float32).detach()
    broken = x.clone()
    broken[..., :40, :], broken[..., 70:, :] = torch.nan, torch.nan
    results = []
    for q, k, v, far, of_far, grad in (x, broken):
        open = (documents[:, 1:] == documents[:, :-1])[:, None, None]
        given = merge_operands(q, k, v, far[..., 2:, :], far[..., 2:, 0], table, 0.3, open)
        out, lse = boundary_kernels.boundary_forward(*given)
        rows = row_operands(grad, q, k, v, out, lse, table, of_far[..., 2:, :], 0.3, False, open)
        dq, row_weights, _, _, *sums = boundary_kernels.boundary_backward_rows(*rows)
        # Operators leave zeros for keys that nobody meets; these are not of another document.
        later = of_far.clone()
        later[..., 68:70, :] = 0.0
        cut = later[..., :78, :]
        keys = grad, q, k, v, row_weights, table, open, cut, cut, *sums, CAUSAL, 0, False
        dk, dv, _ = boundary_kernels.boundary_backward_keys(*keys)
        results.append((out, lse[..., None], dq, dk, dv))
    for a, b in zip(*results):
        assert not a.isnan().any()
        assert torch.equal(a[..., own, :], b[..., own, :])


@pytest.mark.slow
def test_documents_give_the_same_bits_whatever_was_in_memory():
    pde, _ = equation("advection_diffusion", 1, torch.float32)
    q, k, v = (random(1, 1, 80, 16, dtype=torch.float32) for _ in range(3))
    documents, runs = ids([1, 6, 65, 8]), []
    table = table_of(pde, 2, 1.0, v).detach().requires_grad_()
    for poisoned in (False, True):
        torch.use_deterministic_algorithms(poisoned, warn_only=True)
        try:
            runs.append(with_gradients(packed_attention(q, k, v, documents, table), [q, k, v, table]))
        finally:
            torch.use_deterministic_algorithms(False)
    if not GPU:  # the operators of torch for CUDA are not all deterministic
        assert all(torch.equal(a, b) for a, b in zip(*runs))
    assert not any(x.isnan().any() for x in runs[1])


def test_documents_that_are_torn_are_seen():
    x = torch.empty(1, 1, 6, 16, device=DEVICE)
    for line, whole in (([5, 5, 1, 1, 1, 0], True), ([5, 5, 1, 1, 5, 0], False), ([4] * 6, True)):
        documents = torch.tensor([line], device=DEVICE)
        assert (causal.pack_documents(x, x, x, documents, 2) is not None) == whole
        assert (causal.pack_documents(x, x, x, documents, 6) is not None) == whole  # without far keys


@pytest.mark.slow
@pytest.mark.parametrize("walled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_operators_keep_their_promises(walled):
    table = stencil_of(pdes.AdvectionDiffusion(0.2, 0.1), 2, 1.0, torch.empty(1, device=DEVICE))
    table = table.detach().requires_grad_()
    q, k, v = (random(1, 1, 20, 16, dtype=torch.float32) for _ in range(3))
    faces = walls(20)["documents"] if walled else None
    spread, drift = (torch.rand(n, device=DEVICE, requires_grad=True) for n in (2, 1))
    given = (spread, drift if walled else None)
    torch.library.opcheck(stencils.make_table_operator, (*given, 0.7, 1, False, v.detach()))
    torch.library.opcheck(values.step_operator, (v, table, faces))
    q, k, v, table = (x.detach() for x in (q, k, v, table))
    far, far_lse = v[..., 2:, :].contiguous(), v[..., 2:, 0].contiguous()
    some = {
        "test_utils": ("test_schema", "test_faketensor")
    }  # without a derivative there is no more to ask
    torch.library.opcheck(values.step_backward_operator, (v, v, table, faces, True), **some)
    given = merge_operands(q, k, v, far, far_lse, table, 0.25, faces)
    torch.library.opcheck(boundary_kernels.forward_operator, given, **some)
    out, lse = boundary_kernels.boundary_forward(*given)
    given = row_operands(v, q, k, v, out, lse, table, far, 0.25, True, faces)
    torch.library.opcheck(boundary_kernels.backward_rows_operator, given, **some)
    _, row_weights, _, _, *sums = boundary_kernels.boundary_backward_rows(*given)
    given = v, q, k, v, row_weights, table, faces, far, far, *sums, CAUSAL, 0, True
    torch.library.opcheck(boundary_kernels.backward_keys_operator, given, **some)


@pytest.mark.slow
def test_operators_do_what_is_done_without_them():
    pde, leaves = equation("advection_diffusion", 2)
    value, open = random(2, 2, 33, 16), walls(33)["both"]
    alpha, beta = leaves
    table = stencils.make_table_operator(alpha, beta, 0.7, 3, False, value.detach())[0]
    by_operators = values.step_operator(value, table, open)
    directly = values.step(value, stencil_of(pde, 3, 0.7, value), open)
    found, truth = (with_gradients(x, [value, *leaves]) for x in (by_operators, directly))
    assert all(torch.equal(a, b) for a, b in zip(found, truth))


@pytest.mark.slow
def test_gradcheck():
    table = table_of(pdes.AdvectionDiffusion(0.2, 0.1), 1, 1.0, random(1)).detach()
    faces = walls(6)["documents"]
    step = lambda v, table: values.step(v, table, faces)
    assert torch.autograd.gradcheck(step, (random(1, 1, 6, 2), table.requires_grad_()))
    like, alpha, beta = random(1), random(2, 1, 1), random(1)
    made = lambda a, b: stencil_of(pdes.AdvectionDiffusion(a, b), 1, 0.7, like)
    assert torch.autograd.gradcheck(made, (alpha, beta))
    wave = lambda c: stencil_of(pdes.Wave(c), 2, 0.7, like)[:, 1, 2]
    assert torch.autograd.gradcheck(wave, (random(1),))
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(made(alpha, beta).sum(), alpha, create_graph=True)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_the_operator_for_compiled_code_keeps_its_promises(packed):
    documents = ids([3, 17], [20]) if packed else None
    table = table_of(pdes.AdvectionDiffusion(0.2, 0.1), 2, 1.0, torch.empty(1, device=DEVICE))
    q, k = random(2, 4, 20, 16, dtype=torch.float32), random(2, 2, 20, 16, dtype=torch.float32)
    given = q, k, random(2, 20, 2, 16, dtype=torch.float32).transpose(1, 2), table.requires_grad_()
    torch.library.opcheck(causal.attend_operator, (*given, 0.3, documents, 0.0))
    by_operator = causal.attend_operator(*given, 0.3, documents, 0.0)[0]
    directly = causal.causal(*given, 0.3, documents)
    found, truth = (with_gradients(x, given) for x in (by_operator, directly))
    assert all(torch.equal(a, b) for a, b in zip(found, truth))
    if packed:
        with pytest.raises(ValueError, match=r"in compiled code, .* must be consecutive"):
            causal.attend_operator(*given, 0.3, documents.roll(1, 1), 0.0)


@pytest.mark.slow
def test_compiled_in_one_graph_for_all_lengths():
    """Lengths are symbols of one program, and padding and documents need no other."""
    graphs = []

    def backend(module, inputs):
        graphs.append(module)
        return module.forward

    @torch.compile(fullgraph=True, dynamic=True, backend=backend)
    def attention(q, k, v):
        return causal.causal(q, k, v, stencil_of(pdes.Diffusion(0.2), 2, 1.0, v), 0.25)

    for tokens in range(20, 50):
        q, k, v = (random(1, 2, tokens, 16, dtype=torch.float32) for _ in range(3))
        attention(q, k, v)
    assert len(graphs) == 1


@pytest.mark.slow
def test_compiled_in_one_graph():
    def both(q, k, v, alpha):
        pde = pdes.Diffusion(alpha)
        return causal.causal(q, k, v, stencil_of(pde, 2, 1.0, v), 0.25) + kernels.stepped_values(
            Evolution(pde, 2, 1.0), v, None
        )

    alpha = torch.full((1, 1, 1), 0.1, device=DEVICE, requires_grad=True)
    inputs = [
        *(random(1, 1, 40, 16, dtype=torch.float32).detach().requires_grad_() for _ in range(3)),
        alpha,
    ]
    compiled = torch.compile(both, fullgraph=True, backend="inductor" if GPU else "aot_eager")
    found, truth = (with_gradients(model(*inputs), inputs) for model in (compiled, both))
    assert worst(found, truth) < 1e-5


def test_what_the_kernels_do_not_take():
    x = torch.empty(1, 1, 4, 16, device=DEVICE)
    assert kernels.usable(x, 4)
    assert not kernels.usable(x, 0)
    assert not kernels.usable(x, kernels.REACH + 1)
    assert not kernels.usable(torch.empty(1, 1, 4, 512, device=DEVICE), 4)
    assert not kernels.usable(x.to(torch.int32), 4)
    value = random(1, 1, 80, 16)
    found = kernels.stepped_values(Evolution(pdes.Diffusion(0.2), kernels.REACH + 1, 1.0), value, None)
    torch.testing.assert_close(
        found, step_values(Evolution(pdes.Diffusion(0.2), kernels.REACH + 1, 1.0), value, None)
    )
