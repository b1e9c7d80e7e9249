"""`attractor bench`: what is timed is checked first, everybody has a turn, failures do not spread."""

import json

import pytest
import torch
from typer.testing import CliRunner

from attractor.attention import pde_attention
from attractor.bench import attention, model, run, solvers, timing
from attractor.cli import app

SMALL = {"heads": 2, "dim": 16, "rounds": 2}


def test_everybody_has_a_turn_in_every_round():
    seen = []
    calls = {name: lambda name=name: seen.append(name) for name in "ab"}
    found = timing.measure(calls, "cpu", rounds=3, graphs=True)
    assert {name: len(ms) for name, ms in found.ms.items()} == {"a": 3, "b": 3}
    assert min(min(ms) for ms in found.ms.values()) > 0
    assert not found.graph  # a CPU has none
    turns = "".join(seen)
    assert turns.index("b") < turns.rindex("a")


def test_a_ratio_is_that_of_a_round():
    found = timing.Rounds({"ours": [1.0, 30.0, 3.0], "peer": [1.0, 10.0, 1.0]})
    assert found.ratio("ours", "peer") == 3.0
    assert found.median("ours") == 3.0


@pytest.mark.parametrize("kind", attention.KINDS)
def test_rows(kind):
    row = attention.measure(
        kind, 80, 1, ceilings={"copy_gb_s": 10.0, "matrix_tflop_s": 0.1}, dense=True, **SMALL
    )
    for passes in ("forward", "both"):
        assert row[passes]["ms"] > 0
        assert row[passes]["ratio"] > 0
        assert row[passes]["peak_mb"] is None  # only GPUs tell
        assert row[passes]["of_bandwidth"] > 0
    assert row["speedup_over_dense"] == row["dense_ms"] / row["forward"]["ms"]


def test_shares_are_of_the_ceilings():
    row = {"kind": "stepped", "batch": 2, "heads": 3, "dim": 5, "tokens": 100, "dtype": "float32"}
    found = attention.shares(row, 2.0, "forward", {"copy_gb_s": 1.0, "matrix_tflop_s": 1e-3})
    assert found["of_matrix_rate"] == pytest.approx(4 * 2 * 3 * 100 * 100 * 5 / 2e-3 / 1e9)
    assert found["of_bandwidth"] == pytest.approx(4 * 4 * 2 * 3 * 100 * 5 / 2e-3 / 1e9)
    causal = attention.shares(
        row | {"kind": "causal"}, 2.0, "forward", {"copy_gb_s": 1.0, "matrix_tflop_s": 1e-3}
    )
    assert causal["of_matrix_rate"] == pytest.approx(found["of_matrix_rate"] / 2)


def test_documents_are_runs_of_uneven_lengths():
    ids = attention.documents_for(torch.empty(2, 1, 16_384, 1))
    assert torch.equal(ids, attention.documents_for(torch.empty(2, 1, 16_384, 1)))
    assert ids.diff(dim=-1).unique().tolist() == [0, 1]
    assert not torch.equal(ids[0], ids[1])
    assert 0.8 * attention.DOCUMENT < 16_384 / (ids[0].max() + 1) < 1.25 * attention.DOCUMENT
    assert attention.documents_for(torch.empty(1, 1, 40, 1)).max() > 0
    assert attention.mean_keys(torch.tensor([[3, 3, 3, 3, 0, 1, 1, 1]])) == (10 + 1 + 6) / 8


def test_the_peer_of_documents_is_attention_within_them():
    q, k, v = (torch.randn(2, 2, 50, 16, requires_grad=True) for _ in range(3))
    ids = attention.documents_for(q)
    found = attention.varlen(q, k, v, ids)
    truth = pde_attention(
        q, k, v, is_causal=True, documents=ids, pde="diffusion", steps=0, method="dense"
    )
    grad = torch.randn_like(found)
    found, truth = ((x, *torch.autograd.grad(x, (q, k, v), grad)) for x in (found, truth))
    for ours, dense in zip(found, truth):
        torch.testing.assert_close(ours, dense, rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", attention.KINDS)
def test_errors_are_those_of_the_type(kind, dtype):
    found = attention.errors(kind, device="cpu", dtype=dtype, dim=16)
    assert len(found["ours"]) == len(found["dense"]) == (6 if kind in ("reaction", "split") else 5)
    assert max(found["ours"]) < 16 * torch.finfo(dtype).eps


def test_what_is_wrong_is_not_timed(monkeypatch):
    right = attention.contenders

    def wrong(kind, coefficients, steps):
        ours, theirs = right(kind, coefficients, steps)
        return (lambda q, k, v: 1.01 * ours(q, k, v)) if kind == "causal" else ours, theirs

    monkeypatch.setattr(attention, "contenders", wrong)
    with pytest.raises(ArithmeticError, match="is off by"):
        attention.errors("causal", device="cpu", dtype=torch.float32)
    top = {"ceilings": {"copy_gb_s": 1.0, "matrix_tflop_s": 1.0}}
    wanted = [("causal", 64, 1), ("stepped", 64, 1)]
    bad, good = run.rows(wanted, "cpu", torch.float32, top)
    assert bad["failed"].startswith("ArithmeticError")
    assert "forward" not in bad
    assert good["forward"]["ms"] > 0


def test_cases():
    assert run.cases(["causal"], "cpu") == [("causal", 512, 1), ("causal", 2048, 1)]
    assert run.cases(["stepped"], "cuda")[-1] == ("stepped", 65_536, 1)
    assert run.cases(["reaction"], "cuda", [77]) == [("reaction", 77, 8)]
    assert ("hybrid", 1024, 200_000) in run.cases(["hybrid"], "cuda")
    with pytest.raises(ValueError, match="'wrong' is not one of stepped"):
        run.cases(["wrong"], "cpu")


@pytest.mark.slow
def test_the_command(tmp_path):
    out = tmp_path / "bench.json"
    given = ["bench", "--what", "causal", "--tokens", "64", "--out", str(out)]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output
    assert "causal" in result.output
    assert "GB/s" in result.output
    found = json.loads(out.read_text())
    assert found["ceilings"]["copy_gb_s"] > 0
    assert [row["tokens"] for row in found["rows"]] == [64]
    printed = json.loads(CliRunner().invoke(app, [*given, "--json"]).output)
    assert printed["rows"][0]["errors"] == found["rows"][0]["errors"]
    assert CliRunner().invoke(app, ["bench", "--what", "speed"]).exit_code == 2
    assert CliRunner().invoke(app, ["bench", "--dtype", "int8"]).exit_code == 2


@pytest.mark.slow
def test_a_hybrid_step():
    row = solvers.measure(10, 16, rounds=2)
    assert row["hybrid_us"] > 0
    assert row["ratio"] > 0


@pytest.mark.slow
def test_a_whole_model_is_measured_beside_itself(tmp_path):
    pytest.importorskip("transformers")
    out = tmp_path / "model.json"
    given = ["bench", "--what", "model", "--tokens", "24", "--out", str(out)]
    result = CliRunner().invoke(app, given)
    rows = json.loads(out.read_text())["rows"]
    assert {row.get("case") for row in rows if "failed" not in row} == set(model.KINDS), rows
    assert result.exit_code == 0
    assert all(row["ratio"] > 0 and row["tokens"] == 24 for row in rows)


def test_a_config_is_a_name_a_file_or_a_folder(tmp_path):
    pytest.importorskip("transformers")
    text = json.dumps({"model_type": "gpt2", "n_layer": 3})
    (tmp_path / "config.json").write_text(text)
    for place in (tmp_path, tmp_path / "config.json"):
        assert model.config_of(str(place)).n_layer == 3
    assert model.config_of("small", num_hidden_layers=1).num_hidden_layers == 1
    with pytest.raises(
        ValueError, match=r"neither a file, nor a folder with config\.json, nor llama or small"
    ):
        model.config_of("nothing")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="holds no model_type"):
        model.config_of(str(tmp_path))
