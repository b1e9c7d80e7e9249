"""One program for many lengths: compiled ones are few, and an exported one is the module at each length."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from torch.export import Dim, export

from attractor.attention import (
    Classifier,
    LanguageModel,
    PDEAttention,
    lengths,
    pde_attention,
    pdes,
    window_attention,
)

LENGTHS = (40, 56, 72, 96, 100, 131, 200)  # of less than two blocks, of whole ones, and others


def masks(kind, batch, tokens):
    position = torch.arange(tokens)
    if "padding" in kind:
        return {"key_padding": (position < tokens - torch.arange(batch)[:, None]).contiguous()}
    if "documents" in kind:
        return {"documents": position.div(7, rounding_mode="floor").expand(batch, -1).contiguous()}
    return {}


# What is compiled at most, for all these lengths: two where a length of whole blocks is a case of its
# own, or a length that two blocks fill; three where both are.
COMPILED = {
    "full": ({}, 2),
    "causal": ({"is_causal": True}, 1),
    "causal, stepped": ({"is_causal": True, "method": "stepped"}, 1),
    "causal, wave": ({"is_causal": True, "pde": "wave"}, 1),
    "causal, advection-diffusion": ({"is_causal": True, "pde": "advection_diffusion"}, 1),
    "tiled": ({"method": "tiled"}, 1),
    "causal, tiled": ({"method": "tiled", "is_causal": True}, 1),
    "causal reaction, tiled": (
        {"method": "tiled", "is_causal": True, "pde": "reaction_diffusion"},
        1,
    ),
    "dense": ({"method": "dense", "is_causal": True}, 1),
    "padding": ({}, 1),
    "documents": ({}, 1),
    "causal padding": ({"is_causal": True}, 2),
    "causal documents": ({"is_causal": True}, 2),
}


SLOW = ("causal padding", "causal documents", "causal, advection-diffusion")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind in SLOW else ()) for kind in COMPILED]
)
def test_few_programs_serve_many_lengths(kind):
    options, most = COMPILED[kind]
    options = {"pde": "diffusion", **options}
    counter = CompileCounter()

    def attend(q, k, v, given):
        return pde_attention(q, k, v, **given, **options)

    compiled = torch.compile(attend, dynamic=True, fullgraph=True, backend=counter)
    torch.manual_seed(0)
    for tokens in LENGTHS:
        given = masks(kind, 2, tokens)
        q, k, v = torch.randn(3, 2, 4, tokens, 8)
        torch.testing.assert_close(compiled(q, k, v, given), attend(q, k, v, given))
    assert counter.frame_count <= most


@pytest.mark.slow
@pytest.mark.parametrize("method", ["stepped", "tiled"])
def test_gradients_of_many_lengths_by_two_programs(method):
    counters.clear()
    alpha = torch.tensor([0.1, 0.2], dtype=torch.float64).view(2, 1, 1).requires_grad_()

    def attend(q, k, v, alpha):
        return pde_attention(q, k, v, is_causal=True, pde=pdes.Diffusion(alpha), method=method)

    compiled = torch.compile(attend, dynamic=True, fullgraph=True, backend="aot_eager")
    torch.manual_seed(0)
    for tokens in (40, 72, 96, 131, 192):
        given = [torch.randn(3, 2, tokens, 8).double().requires_grad_() for _ in range(3)]
        grad = torch.randn(3, 2, tokens, 8).double()
        found, truth = (
            torch.autograd.grad(f(*given, alpha), (*given, alpha), grad) for f in (compiled, attend)
        )
        torch.testing.assert_close(found, truth)
    assert counters["stats"]["unique_graphs"] <= 2  # whole blocks are a case of their own


@pytest.mark.slow
def test_windows_of_many_lengths_take_few_programs():
    counter = CompileCounter()

    def attend(q, k, v):
        return pde_attention(q, k, v, window=(9, 3), pde="diffusion")

    compiled = torch.compile(attend, dynamic=True, fullgraph=True, backend=counter)
    torch.manual_seed(0)
    for tokens in (70, 81, 99, 110, 120, 127):
        q, k, v = torch.randn(3, 2, 2, tokens, 8)
        torch.testing.assert_close(compiled(q, k, v), attend(q, k, v))
    assert counter.frame_count == 1


def test_strips_are_all_rows_once():
    for first, last, height in ((0, 1, 16), (3, 100, 16), (0, 1024, 512), (4, 1030, 512)):
        cut = lengths.strips(first, last, height)
        assert [i for start, stop in cut for i in range(start, stop)] == list(range(first, last))
        assert max(stop - start for start, stop in cut) <= height


EXPORTED = {
    "diffusion": {},
    "causal diffusion": {"causal": True},
    "wave": {"pde": "wave"},
    "causal wave": {"pde": "wave", "causal": True},
    "a coefficient for each head": {"causal": True, "per_head": True},
    "causal advection-diffusion": {"pde": "advection_diffusion", "causal": True},
    "reaction-diffusion": {"pde": "reaction_diffusion"},
    "causal reaction-diffusion": {"pde": "reaction_diffusion", "causal": True},
    "tiled": {"method": "tiled", "causal": True},
    "dense": {"method": "dense", "causal": True},
    "window": {"window": (9, 3)},
    "padding": {},
    "causal padding": {"causal": True},
    "documents": {},
    "causal documents": {"causal": True},
    "no PDE": {"pde": None, "causal": True},
}


@pytest.mark.parametrize("kind", EXPORTED)
def test_an_exported_layer_is_the_layer_at_every_length_and_batch(kind):
    torch.manual_seed(0)
    layer = PDEAttention(32, 4, **EXPORTED[kind]).eval()
    sizes = {0: Dim("batch", min=1), 1: Dim("tokens", min=3)}
    given = masks(kind, 3, 48)
    shapes = {"x": sizes, **dict.fromkeys(given, sizes)}
    program = export(layer, (torch.randn(3, 48, 32),), given, dynamic_shapes=shapes).module()
    for batch, tokens in ((1, 3), (2, 7), (2, 33), (5, 64), (3, 96), (4, 100), (1, 301)):
        x, given = torch.randn(batch, tokens, 32), masks(kind, batch, tokens)
        torch.testing.assert_close(program(x, **given), layer(x, **given), rtol=1e-5, atol=1e-6)


def test_exported_causal_layers_take_the_shortest_texts():
    torch.manual_seed(0)
    layer = PDEAttention(32, 4, causal=True).eval()
    sizes = {0: Dim("batch", min=1), 1: Dim("tokens", min=1)}
    program = export(layer, (torch.randn(3, 48, 32),), dynamic_shapes={"x": sizes}).module()
    for tokens in (1, 2, 3, 50):
        x = torch.randn(2, tokens, 32)
        torch.testing.assert_close(program(x), layer(x), rtol=1e-5, atol=1e-6)


def test_exported_programs_never_hold_a_map_of_stepped_attention():
    layer = PDEAttention(32, 4, causal=True).eval()
    sizes = {0: Dim("batch"), 1: Dim("tokens", min=3)}
    program = export(layer, (torch.randn(3, 48, 32),), dynamic_shapes={"x": sizes})
    for tokens in (128, 512):
        seen = []

        class Largest(torch.fx.Interpreter):
            def run_node(self, n, seen=seen):
                out = super().run_node(n)
                seen.extend(
                    x.numel() for x in (out if isinstance(out, tuple) else (out,)) if torch.is_tensor(x)
                )
                return out

        Largest(program.module()).run(torch.randn(1, tokens, 32))
        assert max(seen) < 130 * tokens * 4  # some blocks of keys for each row of four heads, not all


@pytest.mark.parametrize("kind", [LanguageModel, Classifier])
def test_exported_models(kind):
    torch.manual_seed(0)
    size = {"dim": 32, "heads": 4, "layers": 2, "hidden": 64, "pde": "wave"}
    if kind is LanguageModel:
        model = LanguageModel(50, **size).eval()
    else:
        model = Classifier(vocabulary=50, classes=3, padding=0, **size).eval()
    sizes = {0: Dim("batch"), 1: Dim("tokens", min=3, max=128)}
    program = export(model, (torch.randint(1, 50, (3, 40)),), dynamic_shapes=(sizes,)).module()
    for batch, tokens in ((1, 3), (2, 33), (4, 64), (3, 128)):
        ids = torch.randint(1, 50, (batch, tokens))
        ids[:, tokens - tokens // 4 :] = 0
        torch.testing.assert_close(program(ids), model(ids), rtol=1e-5, atol=1e-6)


def test_windows_with_global_tokens_are_exported_for_one_length():
    class Windowed(torch.nn.Module):
        def forward(self, q, k, v):
            return window_attention(q, k, v, window=8, global_tokens=2, pde="diffusion")

    given = torch.randn(3, 3, 2, 70, 8)
    shapes = [{0: Dim("batch", min=1)}] * 3
    program = export(Windowed(), tuple(given), dynamic_shapes=shapes).module()
    for batch in (1, 2, 5):
        given = torch.randn(3, batch, 2, 70, 8)
        torch.testing.assert_close(program(*given), Windowed()(*given), rtol=1e-5, atol=1e-6)
