import json
import sys

import pytest
import torch
from typer.testing import CliRunner

from attractor.cli import app, network_inputs
from attractor.cli import network_names as networks
from attractor.data import images
from attractor.residual import StiffnessProfile, probe, resnet_cifar
from attractor.train import Recipe, train

runner = CliRunner()
SMALL = ["-o", "depth=29", "-o", "width=4", "--size", "16", "--inputs", "12", "--batch", "5"]
PICTURES = {"nsi.png", "surface.png", "proportion.png", "all.png"}


def run(*arguments):
    return runner.invoke(app, ["probe", *map(str, arguments)], env={"COLUMNS": "200"})


@pytest.fixture
def pictures():
    """Asked for by tests that look at pictures; others have none, which are most of a probe's time."""


@pytest.fixture(autouse=True)
def _no_pictures(request, monkeypatch):
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr("attractor.cli.networks._draw", lambda *_: None)


def test_help_has_an_example():
    result = run("--help")
    assert result.exit_code == 0
    assert "Example: attractor probe" in result.output


def test_a_network_of_ours_on_noise(tmp_path, pictures):
    result = run("attractor:resnet_cifar", *SMALL, "-o", "gate=se", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "values at initialisation" in result.output
    numbers = json.loads((tmp_path / "probe.json").read_text())
    assert (numbers["inputs"], numbers["source"], numbers["trained"]) == (12, "--noise 12", False)
    assert [row["name"] for row in numbers["blocks"]] == [
        f"layer{s}.{i}" for s in (1, 2, 3) for i in range(3)
    ]
    assert {p.name for p in tmp_path.glob("*.png")} == {*PICTURES, "gates.png"}
    profile = StiffnessProfile.load(tmp_path / "profile")
    assert numbers["tns"]["gate"]["trained"] == pytest.approx(profile.with_step("gate").tns.item())
    assert f"TNS, step one: {profile.tns.item():.3g}" in result.output


def test_the_same_call_gives_the_same_numbers(tmp_path):
    blocks = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        assert run("attractor:resnet_cifar", *SMALL, "-o", "gate=se", "--out", folder).exit_code == 0
        blocks.append(json.loads((folder / "probe.json").read_text())["blocks"])
    assert blocks[0] == blocks[1]


def test_weights_of_a_finished_training_are_read_as_they_are(tmp_path):
    pytest.importorskip("accelerate")
    torch.manual_seed(5)
    net = resnet_cifar(29, width=4, in_channels=1)
    recipe = Recipe(epochs=1, batch=16, learning_rate=0.05, warmup=0, crop=0)
    train(
        net, images.load("digits", "train").subset(32), None, recipe, device="cpu", out=tmp_path / "run"
    )
    common = [
        "attractor:resnet_cifar",
        *SMALL[:4],
        "-o",
        "in_channels=1",
        "--data",
        "digits",
        "--inputs",
        "12",
    ]
    for weights in ("run/model.safetensors", "run"):
        result = run(*common, "--weights", tmp_path / weights, "--out", tmp_path / "out")
        assert result.exit_code == 0, result.output
        found = json.loads((tmp_path / "out/probe.json").read_text())
        data = images.load("digits", "test").subset(12, 0)
        expected = probe(net, [data.normalised()])
        assert found["trained"]
        assert found["tns"]["one"]["trained"] == pytest.approx(expected.tns.item(), rel=1e-5)
    (tmp_path / "run" / "model.safetensors").unlink()
    wrong = run(*common, "--weights", tmp_path / "run", "--out", tmp_path / "out")
    assert wrong.exit_code == 2
    assert "a finished training leaves" in wrong.output
    kept = run(
        *common, "--weights", tmp_path / "run/epoch-0001/tensors.safetensors", "--out", tmp_path / "out"
    )
    assert kept.exit_code == 2
    assert "do not fit" in kept.output


def test_pictures_of_another_probe_are_not_left_beside_this_one(tmp_path):
    (tmp_path / "gates.png").write_text("of a network with gates")
    (tmp_path / "mine.png").write_text("of the user")
    assert run("attractor:resnet_cifar", *SMALL, "--out", tmp_path).exit_code == 0
    assert [p.name for p in tmp_path.glob("*.png")] == ["mine.png"]


def test_trained_weights_stand_beside_random_ones(tmp_path):
    from safetensors.torch import save_file

    torch.manual_seed(5)
    net = resnet_cifar(29, width=4)
    save_file(net.state_dict(), tmp_path / "w.safetensors")
    weights = ["--weights", tmp_path / "w.safetensors"]
    result = run(
        "attractor:resnet_cifar", *SMALL, *weights, "--data", "digits", "--out", tmp_path / "out"
    )
    assert result.exit_code == 0, result.output
    profile = StiffnessProfile.load(tmp_path / "out/profile")
    found = networks.Network("net", net, True, None)
    images = list(network_inputs.data_set(found, "digits", None, 12, 5, 0, 16))
    assert [batch.shape for batch in images] == [(n, 3, 16, 16) for n in (5, 5, 2)]
    assert next(network_inputs.data_set(found, "digits", None, 12, 5, 0, None)).shape == (5, 3, 8, 8)
    torch.testing.assert_close(profile.nsi, probe(net, images).nsi)
    assert profile.initial is not None
    assert not torch.equal(profile.initial.nsi, profile.nsi)
    wrong = run("attractor:resnet_cifar", "-o", "depth=11", *weights)
    assert wrong.exit_code == 2
    assert "do not fit ResNet" in wrong.output


OWN = """
import torch
from attractor.residual import resnet_cifar


def fresh(width=4):
    return resnet_cifar(20, width=width)


def trained(width=4):
    torch.manual_seed(1)
    return resnet_cifar(20, width=width)


def even(width=4):
    if width % 2:
        raise ValueError(f"width = {width} is odd")
    return fresh(width)


def number():
    return 3
"""


def test_a_function_of_one_s_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    small = ["--noise", 6, "--size", 16, "-o", "width=5"]
    result = run("own.py:fresh", *small)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out/probe/probe.json").exists()
    assert "values at initialisation" in result.output
    result = run("own.py:trained", *small)
    assert "give --initial NAME" in result.output
    result = run(
        "own.py:trained",
        *small,
        "--initial",
        "own.py:fresh",
        "--step",
        "gate",
        "--granularity",
        "addition",
    )
    assert result.exit_code == 0, result.output
    profile = StiffnessProfile.load("out/probe/profile")
    assert profile.initial is not None
    assert (profile.step, profile.granularity) == ("gate", "addition")


def test_a_network_that_is_made_already_beside_the_file_of_its_blocks(tmp_path, monkeypatch):
    (tmp_path / "blocks_beside.py").write_text(OWN)
    file = tmp_path / "main_of_two.py"
    file.write_text("from blocks_beside import fresh\nnetwork = fresh(width=5)\n")
    before = list(sys.path)
    found = networks.find(f"{file}:network")
    assert found.trained
    assert found.fresh is None
    assert sys.path == before
    with pytest.raises(ValueError, match="is a network, not a function, so it takes no options"):
        networks.find(f"{file}:network", options={"width": 4})


def test_a_folder_of_images(tmp_path):
    pillow = pytest.importorskip("PIL.Image")
    (tmp_path / "photos/more").mkdir(parents=True)
    for i, name in enumerate(("a.png", "more/b.jpg")):
        pillow.new("RGB", (40, 20 + i), (50 * i, 100, 200)).save(tmp_path / "photos" / name)
    result = run(
        "attractor:resnet_cifar", *SMALL, "--images", tmp_path / "photos", "--out", tmp_path / "o"
    )
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "o/probe.json").read_text())["inputs"] == 2
    grey = networks.Network("net", resnet_cifar(29, width=4, in_channels=1), True, None)
    batch = next(network_inputs.folder_of_images(grey, tmp_path / "photos", 2, 2, 16))
    assert batch.shape == (2, 1, 16, 16)


@pytest.mark.slow
def test_transformers_by_their_kind(tmp_path):
    pytest.importorskip("transformers")
    options = [f"-o{k}={v}" for k, v in dict(hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
               intermediate_size=32, vocab_size=40).items()]  # fmt: skip
    result = run("transformers:bert", *options, "--inputs", 4, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    names = [row["name"] for row in json.loads((tmp_path / "probe.json").read_text())["blocks"]]
    assert names == [f"encoder.layer.{i}" for i in range(3)]
    sizes = ["-oembedding_size=8", "-ohidden_sizes=[8,16]", "-odepths=[3,3]", "-olayer_type=basic"]
    result = run("transformers:resnet", *sizes, "--inputs", 4, "--size", 32, "--out", tmp_path / "r")
    assert result.exit_code == 0, result.output


def test_a_folder_of_transformers_on_texts(tmp_path):
    transformers = pytest.importorskip("transformers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "stiff", "network", "moves", "far"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    tokenizer = transformers.BertTokenizer(str(tmp_path / "vocab.txt"))
    config = transformers.BertConfig(hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
                                     intermediate_size=32, vocab_size=10)  # fmt: skip
    torch.manual_seed(7)
    model = transformers.BertModel(config).eval()
    for part in (tokenizer, model):
        part.save_pretrained(tmp_path / "net")
    lines = ["a stiff network moves", "a network", "far far far far far far"]
    (tmp_path / "texts.txt").write_text("\n\n".join(lines))
    result = run(
        f"transformers:{tmp_path / 'net'}", "--texts", tmp_path / "texts.txt", "--out", tmp_path / "out"
    )
    assert result.exit_code == 0, result.output
    profile = StiffnessProfile.load(tmp_path / "out/profile")
    assert profile.initial is not None  # the weights are trained, as far as anyone knows
    alone = [probe(model, [tokenizer(line, return_tensors="pt")]).nsi for line in lines]
    torch.testing.assert_close(profile.nsi, torch.cat(alone), rtol=1e-4, atol=0)  # without the padding
    random = run(f"transformers:{tmp_path / 'net'}", "--random", "--noise", 3, "--out", tmp_path / "r")
    assert "values at initialisation" in random.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["resnet50"], "'resnet50' names no network; write timm:NAME"),
        (["attractor:resnet99"], "attractor.residual has no function 'resnet99'; it has"),
        (["attractor:resnet_cifar", "-o", "depth=21"], "is not 9 n + 2"),
        (["attractor:resnet_cifar", "-o", "depth"], "must be KEY=VALUE"),
        (["attractor:resnet_cifar", "-o", "deep=2"], "unexpected keyword argument 'deep'"),
        (["attractor:resnet_cifar", "-o", "deep=2"], "its options are depth, num_classes"),
        (["attractor:resnet_cifar", "-o", "width=x"], "width = 'x' must be a whole number"),
        (["own.py:fresh", "-o", "width=x"], "width is a number, such as -o width=4"),
        (
            ["own.py:even", "-o", "width=x"],
            "own.py:even cannot be made with width = 'x' (TypeError: not",
        ),
        (["own.py:even", "-o", "width=x"], "width is a number, such as -o width=4"),
        (["own.py:even", "-o", "width=3"], "width = 3 is odd"),
        (["own.py:even", "-o", "widht=4"], "its options are width; did you mean 'width'?"),
        (["attractor:resnet_cifar", "--pretrained"], "no hub offers weights"),
        (["attractor:resnet_cifar", "--images", "nowhere"], "there is no folder nowhere"),
        (["attractor:resnet_cifar", "--images", "."], "holds no image files"),
        (["attractor:resnet_cifar", "--data", "mnist"], "no image data set is called 'mnist'"),
        (
            ["attractor:resnet_cifar", "--data", "digits", "--noise", "3"],
            "--data and --noise exclude each other",
        ),
        (["attractor:resnet_cifar", "--data", "imagefolder"], "use --images FOLDER"),
        (["attractor:resnet_cifar", "--texts", "t.txt"], "has no tokenizer"),
        (["attractor:resnet_cifar", "--weights", "w.safetensors"], "there is no file w.safetensors"),
        (["attractor:resnet_cifar", "--step", "two"], "step = 'two'"),
        (["own.py:number"], "returned a int; it must return an nn.Module"),
        (
            ["own.py:missing"],
            "has no function 'missing'; it has resnet_cifar, fresh, trained, even, number",
        ),
        (["elsewhere.py:net"], "there is no file elsewhere.py"),
    ],
)
def test_bad_calls_are_named_without_a_traceback(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())


def test_inputs_that_a_network_cannot_take(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(
        "from torch import nn\nmlp = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 16))\n"
    )
    result = run("own.py:mlp", "--noise", "4")
    assert result.exit_code == 2, result.output
    assert "own.py:mlp rejected its inputs (mat1 and mat2 shapes" in result.output
    assert (
        "give --size, or --images or --data that fit it, or write a function inputs(n, generator) into own"
        in result.output
    )
    result = run("attractor:resnet_cifar", "-o", "in_channels=5", "--data", "digits", "--inputs", 4)
    assert result.exit_code == 2, result.output
    assert "give --size, or --images, --data or --texts that fit it" in result.output


TEXT = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh())

    def forward(self, x):
        return x + self.f(x)


class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(11, 8), nn.Embedding(LENGTH, 8)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))

    def forward(self, ids):
        if ids.is_floating_point():
            raise ValueError("ids must be integers")
        return self.blocks(self.words(ids) + self.places(torch.arange(ids.shape[1])))


def net():
    return Text()
"""
INPUTS = {
    "a function": "def inputs(n, generator):\n    return torch.randint(11, (n, 7), generator=generator)",
    "a tensor": "inputs = torch.arange(7 * 300).view(300, 7) % 11",
    "a mapping": "inputs = {'ids': torch.arange(7 * 300).view(300, 7) % 11}",
    "a tuple": "inputs = (torch.arange(7 * 300).view(300, 7) % 11, torch.arange(300))",
    "batches": "inputs = [torch.zeros(5, 7).long(), torch.ones(4, 6).long()]",
    "made batches": "def inputs(n, generator):\n    yield from [torch.zeros(5, 7).long()] * 2",
}


@pytest.mark.parametrize("kind", INPUTS)
def test_a_text_network_of_one_s_own_is_probed_on_inputs_beside_it(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.py").write_text(TEXT.replace("LENGTH", "7") + "\n\n" + INPUTS[kind])
    result = run("text.py:net", "--inputs", 9, "--batch", 4)
    assert result.exit_code == 0, result.output
    numbers = json.loads((tmp_path / "out/probe/probe.json").read_text())
    assert (numbers["inputs"], numbers["source"]) == (9, "inputs of text.py")
    torch.manual_seed(0)
    found = networks.find("text.py:net")
    batches = list(network_inputs.own_inputs(found, 9, 4, 0))
    ids = lambda batch: batch["ids"] if kind == "a mapping" else batch[0] if kind == "a tuple" else batch
    assert [len(ids(batch)) for batch in batches] == (
        [4, 4, 1] if "batches" not in kind else [5, 4] if kind == "batches" else [5, 5]
    )
    profile = StiffnessProfile.load("out/probe/profile")
    torch.testing.assert_close(profile.nsi, probe(found.model, batches, limit=9).nsi)


def test_a_text_network_without_inputs_gets_random_tokens_or_is_told_what_to_write(
    tmp_path, monkeypatch
):
    """No message sends to an option whose message sends back."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "long.py").write_text(TEXT.replace("LENGTH", "100"))
    result = run("long.py:net", "--inputs", 5)
    assert result.exit_code == 0, result.output
    (tmp_path / "text.py").write_text(TEXT.replace("LENGTH", "7"))  # fewer places than random texts have
    (tmp_path / "lines.txt").write_text("a text")
    wanted = "write a function inputs(n, generator) into text.py"
    for source in ([], ["--noise", 4], ["--data", "digits"], ["--texts", "lines.txt"]):
        result = run("text.py:net", *source)
        assert result.exit_code == 2, result.output
        assert wanted in result.output
    (tmp_path / "text.py").write_text(TEXT.replace("LENGTH", "7") + "\n\n" + INPUTS["a function"])
    assert run("text.py:net", "--inputs", 5).exit_code == 0
    told = run("text.py:net", "--data", "digits").output
    assert "(ids must be integers); leave --data out, and it gets inputs in text.py" in told


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ("inputs = 3", "inputs in text.py is a int; pass a tensor [n, ...]"),
        (
            "inputs = (torch.zeros(4, 7).long(),) * 2",
            "inputs in text.py is a tuple whose elements 0 and 1",
        ),
        ("def inputs(batch):\n    return batch", "is called as inputs(n, generator), but takes (batch)"),
        ("inputs = torch.rand(4, 7)", "(ids must be integers); change inputs in text.py so that they"),
    ],
)
def test_inputs_that_are_none(inputs, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.py").write_text(TEXT.replace("LENGTH", "7") + "\n\n" + inputs)
    result = run("text.py:net")
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())


@pytest.mark.parametrize("hub", ["timm", "torchvision"])
def test_hubs(hub, tmp_path):
    pytest.importorskip(hub)
    result = run(f"{hub}:resnet18", "--random", "--size", 64, "--inputs", 3, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert len(json.loads((tmp_path / "probe.json").read_text())["blocks"]) == 8
    unknown = run(f"{hub}:resnet19")
    assert unknown.exit_code == 2
    assert f"{hub} has no model 'resnet19'" in unknown.output


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("20", 20),
        ("0.5", 0.5),
        ("true", True),
        ("False", False),
        ("se", "se"),
        ("[2,3]", [2, 3]),
        ("a/b", "a/b"),
    ],
)
def test_values_of_options(text, value):
    assert networks.parse(text) == value
