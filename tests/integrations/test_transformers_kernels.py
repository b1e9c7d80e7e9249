"""Models of transformers reach the kernels: with padding, in compiled code, and in generation.

On a GPU the kernels run there; elsewhere in Triton's interpreter (see conftest.py).
"""

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM

from attractor.attention import kernels
from attractor.integrations import transformers as hf
from attractor.integrations import transformers_masks as hf_masks

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
pytestmark = [pytest.mark.gpu] if GPU else []
TOKENS = 24


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    """Use kernels wherever they can run."""
    monkeypatch.setattr(kernels, "DEVICES", ("cuda", "cpu"))
    hf.register()
    yield
    hf.register()


def llama(layers=1):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, attn_implementation="pde_diffusion",
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().to(DEVICE)


def tokens():
    generator = torch.Generator().manual_seed(0)
    return torch.randint(64, (3, TOKENS), generator=generator).to(DEVICE)


def padding(kind):
    valid = torch.ones(3, TOKENS, dtype=torch.long, device=DEVICE)
    if kind in ("left", "both"):
        valid[0, :7] = 0
    if kind in ("right", "both"):
        valid[0, -3:], valid[1, -9:] = 0, 0
    if kind == "holes":
        valid[2, 5:8] = 0
    return valid


def logits_and_gradient(model, method, **inputs):
    hf.register(method=method)
    model.zero_grad()
    logits = model(**inputs, use_cache=False).logits
    valid = inputs["attention_mask"].bool()
    logits[valid].square().mean().backward()
    return logits[valid], model.model.layers[0].self_attn.k_proj.weight.grad


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "left", "right", "both", "holes"])
def test_padded_rows_equal_the_dense_map(kind):
    """Logits at valid tokens, and gradients; heads share keys, which are not repeated."""
    model, inputs = llama(), {"input_ids": tokens(), "attention_mask": padding(kind)}
    found = logits_and_gradient(model, "auto", **inputs)
    truth = logits_and_gradient(model, "dense", **inputs)
    for a, b in zip(found, truth):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("kind", "word"), [("both", "documents"), ("holes", "key_padding")])
def test_padding_that_tears_no_text_is_documents(kind, word):
    valid = padding(kind).bool()
    said = hf_masks._padding(valid, {"is_causal": True}, TOKENS)
    assert list(said) == [word]
    assert hf_masks._padding(padding("none").bool(), {"is_causal": True}, TOKENS) == {}
    assert list(hf_masks._padding(valid, {}, 1)) == ["key_padding"]  # not looked at


@pytest.mark.slow
@pytest.mark.parametrize("learn", [False, True])
def test_generation_is_that_of_the_dense_map(learn):
    model = llama(layers=2)
    if learn:
        hf.add_pde(model, "wave", start="paper")
        model.to(DEVICE)
    options = {
        "attention_mask": padding("left"), "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0,
        "output_logits": True, "return_dict_in_generate": True,
    }  # fmt: skip
    found = model.generate(tokens(), **options)
    for module in model.modules():
        if isinstance(module, hf.Refinement):
            module.setting.method = "dense"
    hf.register(method="dense")
    truth = model.generate(tokens(), **options)
    assert torch.equal(found.sequences, truth.sequences)
    torch.testing.assert_close(found.logits, truth.logits, atol=1e-5, rtol=1e-4)


def test_coefficients_that_have_changed_are_noticed():
    model = hf.add_pde(llama(), "diffusion", start="paper")
    own = model.model.layers[0].self_attn.pde
    before = own.evolution()
    assert own.evolution() is before
    with torch.no_grad():
        next(own.parameters()).add_(0.1)
    assert own.evolution() is not before
    assert own.evolution().pde.alpha > before.pde.alpha
    assert not own.evolution().pde.alpha.requires_grad


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "left"])
def test_a_compiled_model_is_one_graph_with_the_operator(kind):
    graphs = []

    def backend(module, inputs):
        graphs.append([str(node.target) for node in module.graph.nodes])
        return module.forward

    model, inputs = llama(), {"input_ids": tokens()}
    if kind != "none":
        inputs["attention_mask"] = padding(kind)
    expected = model(**inputs, use_cache=False).logits
    found = torch.compile(model, backend=backend, fullgraph=True)(**inputs, use_cache=False).logits
    torch._dynamo.reset()
    assert len(graphs) == 1
    assert sum("causal_attention" in name for name in graphs[0]) == 1
    assert not any("softmax" in name for name in graphs[0])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
