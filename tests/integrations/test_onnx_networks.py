"""A network's ONNX file runs in onnxruntime and agrees, or it is not written."""

import pytest
import torch
from torch import nn

import attractor as at

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from attractor.integrations import onnx_networks
from attractor.integrations.onnx_networks import export_network

SIZE = {"dim": 16, "heads": 2, "layers": 1, "hidden": 16}
FREE = {"ids": {0: "batch", 1: "tokens"}}
LEAST = 1e-5  # of the largest output


def ids(batch=2, tokens=40):
    return torch.randint(1, 50, (batch, tokens), generator=torch.Generator().manual_seed(0))


def run(path, **inputs):
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    feed = {name: x.numpy() for name, x in inputs.items()}
    return torch.from_numpy(session.run(None, feed)[0])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"window": (5, 0)}], ids=["causal", "window"])
@pytest.mark.parametrize("pde", [*at.attention.pdes.BY_NAME, None])
def test_language_models_of_any_length(pde, options, tmp_path):
    model = at.attention.LanguageModel(50, **SIZE, pde=pde, **options)
    made = export_network(model, tmp_path / "model.onnx", {"ids": ids()}, free=FREE)
    assert made.difference < LEAST
    assert model.training  # as it was
    for size in ((1, 3), (3, 130)):
        found = run(made.path, ids=ids(*size))
        torch.testing.assert_close(found, model.eval()(ids(*size)), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_classifiers_with_padding(tmp_path):
    model = at.attention.Classifier(50, 3, **SIZE, pde="diffusion", padding=0).eval()
    padded = ids().index_fill(1, torch.arange(30, 40), 0)
    made = export_network(model, tmp_path / "model.onnx", {"ids": padded}, free=FREE)
    other = ids(3, 20).index_fill(1, torch.arange(11, 20), 0)
    torch.testing.assert_close(run(made.path, ids=other), model(other), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "bert"])
def test_models_of_transformers(name, padded, tmp_path):
    pytest.importorskip("transformers")
    from attractor.integrations import transformers as hf
    from tests.integrations.test_transformers import DECODERS, ENCODERS

    hf.register()
    model = hf.add_pde(({**DECODERS, **ENCODERS}[name])(), "wave", start="paper", per_head=True)
    inputs = {"input_ids": ids()} | ({"use_cache": False} if name in DECODERS else {})
    free = {"input_ids": {0: "batch", 1: "tokens"}}
    if padded:
        mask = torch.ones(2, 40, dtype=torch.long)
        mask[0, :7] = 0
        inputs["attention_mask"] = mask
        free["attention_mask"] = free["input_ids"]
    made = export_network(model, tmp_path / "model.onnx", inputs, free=free)
    assert made.difference < LEAST


@pytest.mark.slow
@pytest.mark.parametrize("pde", ["diffusion", "reaction_diffusion"])
def test_torchs_exporter_alone(pde, tmp_path):
    """Causal attention without a mask: the file was one that onnxruntime refused."""

    class Attention(nn.Module):
        def forward(self, q, k, v):
            return at.pde_attention(q, k, v, is_causal=True, pde=pde, steps=2)

    q, k, v = torch.randn(3, 1, 2, 40, 8)
    path = tmp_path / "attention.onnx"
    torch.onnx.export(Attention(), (q, k, v), path, dynamo=True, verbose=False, opset_version=20)
    torch.testing.assert_close(run(path, q=q, k=k, v=v), Attention()(q, k, v), rtol=1e-4, atol=1e-5)


def test_a_model_for_onnx_has_plain_operations_where_there_are_masks(monkeypatch):
    q = torch.randn(1, 2, 40, 8)
    assert at.attention.explain(q, q, q, pde="wave", is_causal=True).method == "stepped"
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    assert at.attention.explain(q, q, q, pde="wave", is_causal=True).method == "dense"
    assert at.attention.explain(q, q, q, pde="wave").method == "stepped"
    with pytest.raises(
        ValueError, match="'stepped' cannot do this: ONNX has no operators for keys near"
    ):
        at.pde_attention(q, q, q, pde="wave", is_causal=True, method="stepped")


class Other(nn.Module):
    """A module that is exported as another one."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(x) * (2.0 if torch.compiler.is_exporting() else 1.0)


@pytest.mark.slow
def test_what_disagrees_is_not_written(tmp_path):
    with pytest.raises(RuntimeError, match=r"differs from Other by .* Nothing was written"):
        export_network(Other(), tmp_path / "model.onnx", {"x": torch.randn(2, 3)})
    features = at.attention.PerformerAttention(8, 16, chunk=4)
    model = at.attention.LanguageModel(50, **SIZE, pde="diffusion", attention=features)
    with pytest.raises(
        RuntimeError, match=r"LanguageModel has no ONNX form: .*cummax(.|\n)*Nothing was"
    ):
        export_network(model, tmp_path / "model.onnx", {"ids": ids()})
    assert not [*tmp_path.iterdir()]


def test_what_onnxruntime_refuses_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_networks, "_to_onnx", lambda *args: b"not a model")
    with pytest.raises(RuntimeError, match="onnxruntime cannot run the model"):
        export_network(nn.Linear(3, 3), tmp_path / "model.onnx", {"x": torch.randn(2, 3)})
    assert not [*tmp_path.iterdir()]


def test_errors_teach(tmp_path):
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    path = tmp_path / "model.onnx"
    with pytest.raises(ValueError, match=r"path 'model.pt2' must end in \.onnx"):
        export_network(layer, tmp_path / "model.pt2", {"x": x})
    with pytest.raises(TypeError, match="network is a function; pass a module"):
        export_network(lambda x: x, path, {"x": x})
    with pytest.raises(ValueError, match="must be a dictionary with at least one tensor"):
        export_network(layer, path, {"x": 3})
    for free, message in (
        ({"y": {0: "batch"}}, "free has 'y', which is not a tensor of inputs: x"),
        ({"x": {2: "batch"}}, r"x \[2, 3\] has no dimension 2"),
        ({"x": {0: "n", 1: "n"}}, "'n' has sizes 2 and 3 in inputs"),
    ):
        with pytest.raises(ValueError, match=message):
            export_network(layer, path, {"x": x}, free=free)
