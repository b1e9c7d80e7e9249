"""One program for many lengths: an exported one is the module at each of them."""

import pytest
import torch
from torch.export import Dim, export

from attractor.attention import (
    Classifier,
    LanguageModel,
    PDEAttention,
    lengths,
    window_attention,
)


def masks(kind, batch, tokens):
    position = torch.arange(tokens)
    if "padding" in kind:
        return {"key_padding": (position < tokens - torch.arange(batch)[:, None]).contiguous()}
    if "documents" in kind:
        return {"documents": position.div(7, rounding_mode="floor").expand(batch, -1).contiguous()}
    return {}


def test_strips_are_all_rows_once():
    for first, last, height in ((0, 1, 16), (3, 100, 16), (0, 1024, 512), (4, 1030, 512)):
        cut = lengths.row_ranges(first, last, height)
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


FEW = ("causal diffusion", "wave", "causal reaction-diffusion", "causal padding")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in FEW else pytest.mark.slow) for kind in EXPORTED]
)
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


@pytest.mark.slow
def test_exported_causal_layers_take_the_shortest_texts():
    torch.manual_seed(0)
    layer = PDEAttention(32, 4, causal=True).eval()
    sizes = {0: Dim("batch", min=1), 1: Dim("tokens", min=1)}
    program = export(layer, (torch.randn(3, 48, 32),), dynamic_shapes={"x": sizes}).module()
    for tokens in (1, 2, 3, 50):
        x = torch.randn(2, tokens, 32)
        torch.testing.assert_close(program(x), layer(x), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param(LanguageModel, marks=pytest.mark.slow), Classifier])
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


@pytest.mark.slow
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
