"""`attractor train`: runs in folders, options of networks and recipes."""

import json

import pytest
from typer.testing import CliRunner

from attractor.cli import app

pytest.importorskip("accelerate")

SMALL = [
    "attractor:resnet_cifar", "-o", "depth=11", "-o", "width=2", "-r", "batch=512", "-r", "warmup=0",
    "-r", "crop=0", "-r", "learning_rate=0.05",
]  # fmt: skip


def run(*arguments):
    return CliRunner().invoke(app, ["train", *map(str, arguments)])


def test_a_run_its_extension_and_a_probe_of_its_weights(tmp_path):
    first = run(*SMALL, "-r", "epochs=1", "-r", "schedule=constant", "--out", tmp_path, "--json")
    assert first.exit_code == 0, first.output
    content = json.loads(first.output)
    assert [row["epoch"] for row in content["rows"]] == [1]
    assert content["recipe"]["batch"] == 512
    assert (tmp_path / "model.safetensors").exists()
    longer = [*SMALL, "-r", "epochs=2", "-r", "schedule=constant", "--out", tmp_path]
    refused = run(*longer)
    assert refused.exit_code == 2
    assert "epochs = 1, not 2" in refused.output
    extended = run(*longer, "--extend", "--json")
    assert extended.exit_code == 0, extended.output
    rows = json.loads(extended.output)["rows"]
    assert [row["train_loss"] for row in rows][:1] == [content["rows"][0]["train_loss"]]
    assert len(rows) == 2
    again = run(*longer, "--restart", "--json")
    assert json.loads(again.output)["rows"][1]["train_loss"] == rows[1]["train_loss"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["attractor:resnet_cifar", "-r", "epoch=3"], "--recipe has no field 'epoch'"),
        (["attractor:resnet_cifar", "-r", "epochs"], "--recipe 'epochs' must be KEY=VALUE"),
        (["attractor:resnet_cifar", "-r", "epochs=many"], "epochs = 'many' must be an integer"),
        (["attractor:resnet_cifar", "--data", "mnist"], "no image data set is called 'mnist'"),
        (["attractor:resnet_cifar", "-o", "depth=ten"], "depth = 'ten'"),
        (["resnet"], "names no network"),
    ],
)
def test_bad_calls_are_named_without_a_traceback(arguments, message, tmp_path):
    result = run(*arguments, "--out", tmp_path / "run")
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())
