"""When kernels do the whole of it, and that it is then the same; on a CPU in Triton's interpreter."""

import pytest
import torch
from torch.torch_version import TorchVersion

from attractor.attention import explain, kernels, pde_attention, pdes

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
needs_kernels = pytest.mark.skipif(not kernels.TRITON, reason="Triton is not installed")


@pytest.fixture
def everywhere(monkeypatch):
    """Kernels wherever they can run."""
    if not GPU and not kernels.INTERPRETED:
        pytest.skip("Triton's interpreter was not asked for")
    monkeypatch.setattr(kernels, "DEVICES", ("cuda", "cpu"))


def tensors(*shape, dtype=torch.float32):
    return [
        torch.randn(*shape, dtype=torch.float64).to(DEVICE, dtype).requires_grad_() for _ in range(3)
    ]


def coefficients(heads):
    return [x.to(DEVICE).requires_grad_() for x in (torch.linspace(0.05, 0.2, heads).view(-1, 1, 1), torch.full((1, 1), 0.03))]  # fmt: skip


EQUATIONS = {
    "diffusion": lambda a, b: pdes.Diffusion(a),
    "wave": lambda a, b: pdes.Wave(a),
    "advection_diffusion": pdes.AdvectionDiffusion,
    "reaction_diffusion": pdes.ReactionDiffusion,
    "split": lambda a, b: pdes.ReactionDiffusion(a, b, split=True),
}


@pytest.mark.skipif(GPU, reason="a GPU has kernels")
def test_a_cpu_has_none_and_says_so():
    q, k, v = tensors(1, 2, 100, 16)
    assert explain(q, k, v, pde="diffusion", is_causal=True).method == "stepped"
    with pytest.raises(ValueError, match="kernels are for cuda, not cpu"):
        pde_attention(q, k, v, pde="diffusion", method="fused")


@needs_kernels
def test_what_they_are_chosen_for(everywhere):
    q, k, v = tensors(2, 2, 100, 16)
    chosen = lambda **more: explain(q, k, v, **{"pde": pdes.Diffusion(0.1), **more}).method
    assert chosen() == "fused"
    assert chosen(is_causal=True) == "fused"
    assert chosen(pde="reaction_diffusion") == "fused"
    assert chosen(pde=pdes.Wave(torch.tensor([[[0.1]], [[0.2]]], device=DEVICE))) == "fused"
    for other in (
        {"key_padding": torch.ones(2, 100, dtype=torch.bool, device=DEVICE)},
        {"window": (8, 0)},
        {"dropout_p": 0.1, "is_causal": True},  # without an operator that drops weights
        {"dropout_p": 0.1, "pde": "reaction_diffusion"},
        {"steps": 9},
        {"steps": 0},
        {"axis": "query"},
        {"method": "stepped"},
        {"pde": pdes.Diffusion(torch.rand(2, 2, 1, 1, device=DEVICE) / 9)},
        {"pde": pdes.Diffusion(torch.rand(2, 1, 1, 1, device=DEVICE) / 9)},
    ):
        assert chosen(**other) != "fused", other
    assert explain(q[..., :7, :], k, v, pde="diffusion").method == "fused"
    assert explain(q[..., :7, :], k, v, pde="diffusion", is_causal=True).method != "fused"
    assert explain(*(x[:, :, :0] for x in (q, k, v)), pde="diffusion").method != "fused"


@needs_kernels
def test_documents_they_are_chosen_for(everywhere):
    q, k, v = tensors(2, 2, 100, 16)
    line = torch.arange(100, device=DEVICE).div(30, rounding_mode="floor")
    ids = torch.stack((line, 7 - line))
    given = {"pde": "diffusion", "is_causal": True, "documents": ids}
    choice = explain(q, k, v, **given)
    assert choice.method == "fused"
    assert "Diffusion within documents" in choice.reason
    torn = ids.clone()
    torn[1, 70:75] = 7
    real = torch.ones(2, 100, dtype=torch.bool, device=DEVICE)
    for other in (
        {"documents": torn},
        {"is_causal": False},
        {"pde": "reaction_diffusion"},
        {"key_padding": real},
        {"window": (8, 0)},
        {"attn_mask": torch.zeros(100, 100, device=DEVICE)},
        {"dropout_p": 0.1, "is_causal": True},  # without an operator that drops weights
        {"dropout_p": 0.1, "pde": "reaction_diffusion"},
    ):
        assert explain(q, k, v, **given | other).method != "fused", other
    with pytest.raises(ValueError, match="consecutive tokens of each document; use 'stepped'"):
        pde_attention(q, k, v, method="fused", **given | {"documents": torn})
    with pytest.raises(
        ValueError, match="documents only with is_causal and a linear PDE; use 'stepped'"
    ):
        pde_attention(q, k, v, method="fused", **given | {"is_causal": False})


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize(
    "name",
    ["advection_diffusion", *(pytest.param(x, marks=pytest.mark.slow) for x in ("diffusion", "wave"))],
)
def test_documents_the_same_as_dense(everywhere, name):
    q, k, v = tensors(2, 2, 45, 16)
    leaves = [
        q,
        k[:, :1].detach().requires_grad_(),
        v[:, :1].detach().requires_grad_(),
        *coefficients(2),
    ]
    used = leaves if name == "advection_diffusion" else leaves[:4]
    line = torch.arange(45, device=DEVICE)
    ids = torch.stack((line.div(18, rounding_mode="floor"), (line > 2).long() - (line > 5).long() * 4))
    found = []
    for method in ("auto", "dense"):
        out = pde_attention(
            *leaves[:3], is_causal=True, pde=EQUATIONS[name](*leaves[3:]), steps=2, method=method,
            documents=ids, enable_gqa=True, renormalise=name == "wave",
        )  # fmt: skip
        torch.manual_seed(1)
        found.append((out, *torch.autograd.grad(out, used, torch.randn(out.shape).to(out))))
    for ours, dense in zip(*found):
        assert not ours.isnan().any()
        torch.testing.assert_close(ours, dense, rtol=2e-4, atol=2e-5)


@pytest.mark.slow
@needs_kernels
def test_documents_in_compiled_code_take_another_way(everywhere):
    q, k, v = (x.detach() for x in tensors(1, 1, 40, 16))
    ids = torch.arange(40, device=DEVICE).div(17, rounding_mode="floor")[None]
    attend = lambda q, k, v: pde_attention(
        q, k, v, is_causal=True, pde=pdes.Diffusion(0.2), steps=2, documents=ids
    )
    compiled = torch.compile(attend, backend="eager")
    torch.testing.assert_close(compiled(q, k, v), attend(q, k, v), rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(3)
@needs_kernels
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("name", EQUATIONS)
def test_the_same_as_dense(everywhere, name, causal):
    leaves = [*tensors(1, 2, 40, 16), *coefficients(2)]
    used = leaves if name in ("advection_diffusion", "reaction_diffusion", "split") else leaves[:4]
    found = []
    for method in ("auto", "dense"):
        out = pde_attention(
            *leaves[:3], is_causal=causal, pde=EQUATIONS[name](*leaves[3:]), steps=3, method=method
        )
        torch.manual_seed(1)
        found.append((out, *torch.autograd.grad(out, used, torch.randn(out.shape).to(out))))
    for ours, dense in zip(*found):
        assert not ours.isnan().any()
        torch.testing.assert_close(ours, dense, rtol=2e-4, atol=2e-5)


@needs_kernels
@pytest.mark.slow
def test_shapes_that_attention_takes(everywhere):
    q, k, v = tensors(1, 4, 33, 8)
    few = [x[:, :2].detach() for x in (k, v)]
    pde = pdes.Diffusion(0.15)
    for query, key, value, more in (
        (q[0], k[0], v[0], {}),
        (q[0, 0], k[0, 0], v[0, 0], {}),
        (q, *few, {"enable_gqa": True}),
        (q, k, v, {"renormalise": True}),
        (q[None], k[None], v[None], {}),
    ):
        common = {"pde": pde, "is_causal": True, **more}
        assert explain(query, key, value, **common).method == "fused"
        ours, dense = (pde_attention(query, key, value, method=m, **common) for m in ("auto", "dense"))
        torch.testing.assert_close(ours, dense, rtol=1e-4, atol=1e-5)


@needs_kernels
@pytest.mark.parametrize("name", ["diffusion", "reaction_diffusion"])
@pytest.mark.parametrize("causal", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.slow
def test_inputs_broadcast(name, causal, everywhere):
    alone, heads = tensors(1, 2, 40, 16), tensors(2, 1, 40, 16)
    for given in (
        (tensors(2, 2, 40, 16)[0], alone[1], alone[2]),
        (alone[0], heads[1], heads[2]),
    ):
        options = {"pde": name, "is_causal": causal, "steps": 2, "method": "fused"}
        whole = [x.expand(2, 2, -1, -1) for x in given]
        grad = torch.randn(2, 2, 40, 16, device=DEVICE)
        found, truth = (
            (out, *torch.autograd.grad(out, given, grad))
            for out in (pde_attention(*given, **options), pde_attention(*whole, **options))
        )
        torch.testing.assert_close(found, truth)


@needs_kernels
@pytest.mark.slow
def test_one_row_of_documents_serves_all_texts(everywhere):
    given = tensors(2, 2, 40, 16)
    options = {"pde": "diffusion", "is_causal": True, "steps": 2, "method": "fused"}
    row = torch.arange(40, device=DEVICE).div(9, rounding_mode="floor")[None]
    found, truth = (pde_attention(*given, documents=x, **options) for x in (row, row.repeat(2, 1)))
    torch.testing.assert_close(found, truth)


@needs_kernels
@pytest.mark.slow
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.__version__ < TorchVersion("2.13"),
    reason="below torch 2.13, `export` fails to state its guards for dynamic lengths on a GPU",
)
def test_exported_programs_have_none(everywhere):
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return pde_attention(q, k, v, pde="diffusion", is_causal=True)

    given = [x.detach() for x in tensors(2, 2, 40, 16)]
    # Below torch 2.13, `export` cannot prove its guards for lengths less than the reach of two walls.
    least = 3 if torch.__version__ >= TorchVersion("2.13") else 16
    sizes = {0: torch.export.Dim("batch", min=1), 2: torch.export.Dim("tokens", min=least)}
    program = torch.export.export(Attention(), tuple(given), dynamic_shapes=[sizes] * 3)
    assert not any("attractor" in str(node.target) for node in program.graph.nodes)
    given = [x.detach() for x in tensors(3, 2, 70, 16)]
    torch.testing.assert_close(program.module()(*given), Attention()(*given), rtol=1e-4, atol=1e-5)
