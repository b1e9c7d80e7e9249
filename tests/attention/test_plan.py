"""A call is planned once: the plan says what runs, and nothing else runs."""

import re
import sys

import pytest
import torch

from attractor.attention import assert_causal, explain, pde_attention, pdes
from attractor.attention.pdes.evolution import Evolution
from benchmarks.road import counted, plans

ENGINES = {
    "dense": ("dense",),
    "stepped": ("stepped", "without_walls", "causal"),
    "tiled": ("tiled",),
}


def tensors(tokens=80, dim=8, **kwargs):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, tokens, dim, generator=generator, **kwargs) for _ in range(3)]


@pytest.fixture
def ran(monkeypatch):
    """Record which engines compute something."""
    entrance = sys.modules["attractor.attention.pde_attention"]
    names = []

    def record(module, name):
        engine = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, **k: (names.append(name), engine(*a, **k))[1])

    for name in ("dense", "stepped", "without_walls", "tiled"):
        record(entrance, name)
    record(entrance.boundary, "causal")
    return names


CALLS = {
    "causal": {"is_causal": True},
    "no mask": {},
    "window": {"window": (5, 2)},
    "walls of the sequence": {"walls": "sequence"},
    "query axis": {"axis": "query"},
    "both axes": {"axis": "both"},
    "dropout": {"dropout_p": 0.2},
    "padding": {"key_padding": torch.arange(80).expand(2, -1) < 70},
    "documents": {"documents": (torch.arange(80) // 30).expand(2, -1), "is_causal": True},
    "anywhere": {"attn_mask": torch.rand(80, 80, generator=torch.Generator().manual_seed(1)) < 0.8},
}


@pytest.mark.sampled(40)
@pytest.mark.parametrize("pde", ["diffusion", "wave", "reaction_diffusion"])
@pytest.mark.parametrize("method", ["auto", "dense", "stepped", "tiled", "fused"])
@pytest.mark.parametrize("name", CALLS)
def test_only_the_planned_engine_runs(name, method, pde, ran):
    q, k, v = tensors()
    options = {**CALLS[name], "pde": pde, "steps": 2, "method": method}
    refused = None
    try:
        plan = explain(q, k, v, **options)
    except ValueError as error:
        refused = re.escape(str(error))
    if refused is not None:
        assert method != "auto"
        with pytest.raises(ValueError, match=refused):
            pde_attention(q, k, v, **options)
        assert not ran
        return
    assert method in ("auto", plan.method)
    pde_attention(q, k, v, **options)
    assert len(ran) == 1
    assert ran[0] in ENGINES[plan.method]


@pytest.mark.parametrize("name", CALLS)
def test_a_rejected_engine_cannot_be_asked_for(name):
    q, k, v = tensors()
    options = {**CALLS[name], "pde": "diffusion", "steps": 2}
    for method, reason in explain(q, k, v, **options).rejected.items():
        with pytest.raises(ValueError, match="cannot do this") as raised:
            explain(q, k, v, **options, method=method)
        assert reason in str(raised.value)


def test_the_road_of_a_causal_call_is_short():
    q, k, v = tensors(64, 32)
    pde = pdes.Diffusion(alpha=0.1)
    files = counted(lambda: pde_attention(q, k, v, is_causal=True, pde=pde))
    assert len(files) <= 8, files
    assert sum(files.values()) <= 80, files


def test_plans_say_engine_softmax_and_boundary():
    texts = plans("cpu")
    assert len(texts) == 12
    for text in texts.values():
        first, *others = text.splitlines()
        assert first.split(":")[0] in ENGINES
        assert [line.split()[0] for line in others[:2]] == ["softmax", "boundary"]
        assert all(len(line.split()) > 1 for line in others)


def test_equations_with_numbers_share_one_evolution():
    first, second = (Evolution.of(pdes.Wave(c=0.3), 4, 1.0) for _ in range(2))
    assert first is second
    assert first.constant
    assert Evolution.of("wave", 4, 1.0) is Evolution.of("wave", 4, 1.0)
    assert Evolution.of(pdes.Wave(c=0.2), 4, 1.0) is not first
    learned = pdes.Wave(torch.full((3, 1, 1), 0.3))
    assert Evolution.of(learned, 4, 1.0) is not Evolution.of(learned, 4, 1.0)


def test_numbers_of_another_type_are_still_refused():
    Evolution.of(pdes.Wave(c=0.3), 4, 1.0)
    for steps in (4.0, "4", -1, None):
        with pytest.raises(ValueError, match="steps"):
            Evolution.of(pdes.Wave(c=0.3), steps, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_stencil_of_inference_mode_serves_training(dtype):
    pde = pdes.AdvectionDiffusion(alpha=0.17, beta=0.011)
    q, k, v = tensors(dtype=dtype)
    with torch.inference_mode():
        before = pde_attention(q, k, v, is_causal=True, pde=pde, steps=3)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    after = pde_attention(*leaves, is_causal=True, pde=pde, steps=3)
    assert torch.equal(before, after)
    truth = pde_attention(*leaves, is_causal=True, pde=pde, steps=3, method="dense")
    grad = torch.randn_like(after)
    for a, b in zip(*(torch.autograd.grad(x, leaves, grad) for x in (after, truth))):
        torch.testing.assert_close(a, b, atol=1e-4 if dtype == torch.float32 else 1e-12, rtol=0)


def test_a_stencil_of_a_meta_call_is_not_kept():
    pde = pdes.Diffusion(alpha=0.123)
    pde_attention(*(x.to("meta") for x in tensors()), is_causal=True, pde=pde)
    q, k, v = tensors(dtype=torch.float64)
    output = pde_attention(q, k, v, is_causal=True, pde=pde)
    torch.testing.assert_close(
        output, pde_attention(q, k, v, is_causal=True, pde=pde, method="dense"), atol=1e-12, rtol=0
    )
    assert_causal(lambda x: pde_attention(x, x, x, is_causal=True, pde=pde), v)


def test_heads_of_dimension_1_in_any_memory_layout():
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 3, 1, 70, generator=generator).double().mT for _ in range(2))
    v = torch.randn(2, 3, 70, 7, generator=generator).double()
    outputs = [
        pde_attention(q, k, v, is_causal=True, scale=-0.4, pde="wave", method=method)
        for method in ("stepped", "dense")
    ]
    torch.testing.assert_close(*outputs, atol=1e-12, rtol=0)
