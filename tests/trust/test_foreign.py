"""Folders of transformers from strangers: no code runs, and nobody is asked whether it may."""

import io
import json
import sys
import zipfile

import pytest
from typer.testing import CliRunner

from attractor.cli import app
from attractor.cli import network_names as networks


@pytest.fixture
def foreign(tmp_path):
    """A folder with a small network whose configuration can be changed."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32, vocab_size=10
    )
    folder = tmp_path / "net"
    transformers.BertModel(config).save_pretrained(folder)

    def change(**entries):
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))
        return folder

    return change


def probed(folder, *more):
    result = CliRunner().invoke(
        app, ["probe", f"transformers:{folder}", *more, "--inputs", "2", "--out", str(folder / "out")],
        input="y\ny\n",
    )  # fmt: skip
    assert "not expected" not in result.output
    return result.exit_code, " ".join(result.output.split())


CODE = """
import pathlib
pathlib.Path(__file__).with_name("ran").write_text("code ran")
from transformers import BertConfig as Config, BertModel as Model
"""


def test_code_of_a_folder_is_neither_run_nor_offered(foreign):
    own = {"AutoConfig": "own.Config", "AutoModel": "own.Model"}
    folder = foreign(model_type="of its own", auto_map=own)
    (folder / "own.py").write_text(CODE)
    code, said = probed(folder)
    assert (code, "a network with code of its own as FILE.py:FUNCTION" in said) == (2, True)
    assert "[y/N]" not in said
    assert not list(folder.rglob("ran"))
    code, said = probed(folder, "-o", "trust_remote_code=true")
    assert (code, "so trust_remote_code cannot be set" in said) == (2, True)


@pytest.mark.parametrize("entry", ["attn_implementation", "_attn_implementation"])
def test_attention_of_a_repository_is_not_fetched(foreign, entry):
    """With the package kernels installed, transformers would download and run it."""
    code, said = probed(foreign(**{entry: "somebody/attention"}))
    assert (code, "'somebody/attention', a repository, whose code is not run" in said) == (2, True)


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000 is more than 10,000"),
        ({"vocab_size": 10**12}, "of memory are free; use smaller layers"),
    ],
)
def test_a_configuration_of_hostile_sizes_is_refused_at_once(foreign, entries, told):
    code, said = probed(foreign(**entries), "--random")
    assert (code, told in said) == (2, True), said


def test_pickled_weights_are_not_read(foreign, monkeypatch):
    folder = foreign()
    (folder / "model.safetensors").unlink()
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("archive/data.pkl", b"cos\nsystem\n(S'true'\ntR.")
        file.writestr("archive/version", "3\n")
    (folder / "pytorch_model.bin").write_bytes(archive.getvalue())

    def reached(*_, **__):
        raise AssertionError("torch.load was called")

    monkeypatch.setattr(sys.modules["torch"], "load", reached)
    code, said = probed(folder)
    assert code == 2
    assert "torch.load was called" not in said
    assert "only weights in .safetensors files are read" in said
    assert "AutoModel.from_pretrained(NAME).save_pretrained(FOLDER)" in said
    assert networks.CONVERT in said
    assert probed(folder, "--random")[0] == 0
