"""A folder holds one run: the same definition goes on or returns, every other one raises."""

import copy
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, Dataset, TensorDataset

from attractor.data import images
from attractor.storage.files import json_bytes
from attractor.train import CheckpointError, Classify, Recipe, checkpoint, train, train_seeds
from attractor.train.definition import Definition
from attractor.train.recent_checkpoints import RecentCheckpoints

pytest.importorskip("accelerate")

RECIPE = Recipe(epochs=2, batch=4, learning_rate=0.05, warmup=0, crop=0, flip=False, precision="fp32")
TIMES = ("seconds", "images_per_second", "samples_per_second")


class Scaled(nn.Module):
    """Has a number that its repr does not show."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return self.scale * x


def model_of(seed=0, dropout=0.1, scale=1.0, width=5, last=nn.Identity):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(3, width), nn.Dropout(dropout), Scaled(scale), nn.Linear(width, 2), last()
    )


def rows(seed=0, count=12):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, generator=generator), torch.arange(count) % 2


def batches(seed=0, count=12):
    return list(zip(*(x.split(4) for x in rows(seed, count))))


def weighted(weight):
    def loss(model, batch):
        return weight * cross_entropy(model(batch[0]), batch[1], reduction="none")

    return loss


def files(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def numbers(history):
    return [{k: v for k, v in row.items() if k not in TIMES} for row in history]


def run(model=None, data=None, valid=None, recipe=RECIPE, **options):
    model = model_of() if model is None else model
    return model, train(model, data or batches(), valid, recipe, device="cpu", **options)


def same(one, other):
    one, other = (x.state_dict() for x in (one, other))
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


class Tilted(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


def frozen(model):
    model[0].weight.requires_grad_(False)
    return model


class Tanh(nn.Module):
    """A user's own class with the name of another."""

    def forward(self, x):
        return x


class Shifted(Dataset):
    def __init__(self, shift):
        self.shift = shift

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return torch.randn(3) + self.shift, i % 2


class Multiplied(list):
    """Multiplies its batches when they are asked for."""

    def __init__(self, batches, times):
        super().__init__(batches)
        self.times = times

    def __iter__(self):
        return iter([(x * self.times, y) for x, y in super().__iter__()])


def loader(data=None, size=4, **options):
    return DataLoader(TensorDataset(*rows()) if data is None else data, size, **options)


def pictures(seed=0, mean=0.5):
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (12, 1, 1, 3), generator=generator, dtype=torch.uint8)
    return SimpleNamespace(images=pixels, labels=torch.arange(12) % 2, mean=(mean,), std=(0.3,))


def flat():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(3, 2))


PAIRS = {  # two calls whose runs differ, and what the error names
    "data": ({}, {"data": batches(1)}, "another train_data"),
    "order of data": ({}, {"data": batches()[::-1]}, "another train_data"),
    "labels": ({}, {"data": [(x, 1 - y) for x, y in batches()]}, "another train_data"),
    "size of batches": ({}, {"data": list(zip(*(x.split(6) for x in rows())))}, "3 steps per epoch, not 2"),
    "validation": ({"valid": batches(2)}, {"valid": batches(3)}, "another valid_data"),
    "no validation": ({"valid": batches(2)}, {}, "valid_data"),
    "loss": ({}, {"loss": weighted(1.0)}, "loss = default, not 'weighted.<locals>.loss'"),
    "closure of a loss": ({"loss": weighted(1.0)}, {"loss": weighted(2.0)}, r"loss.weight = 1.0, not 2.0"),
    "code of a loss": (
        {"loss": lambda m, b: m(b[0]).square().mean()}, {"loss": lambda m, b: m(b[0]).abs().mean()}, "loss.code"),
    "object of a loss": ({"loss": Classify(0.1)}, {"loss": Classify(0.2)}, "loss.label_smoothing = 0.1, not 0.2"),
    "dropout": ({}, {"model": model_of(dropout=0.2)}, "Dropout(p=0.1, inplace=False), not Dropout(p=0.2"),
    "a hidden number": ({}, {"model": model_of(scale=2.0)}, "another model"),
    "initial weights": ({}, {"model": model_of(1)}, "other initial weights (0.weight, 0.bias"),
    "shapes": ({}, {"model": model_of(width=6)}, "another model"),
    "a layer more": ({}, {"model": model_of(last=nn.Tanh)}, "module '4' is Identity(), not Tanh()"),
    "frozen": ({}, {"model": frozen(model_of())}, "other parameters frozen (0.weight)"),
    "dtypes": ({"loss": lambda m, b: m(b[0].to(m[0].weight)).mean()},
               {"loss": lambda m, b: m(b[0].to(m[0].weight)).mean(), "model": model_of().double()},
               "other initial weights"),
    "a class of the same name": ({"model": model_of(last=nn.Tanh)}, {"model": model_of(last=Tanh)},
                                 "another model (in '4')"),
    "recipe": ({}, {"recipe": replace(RECIPE, weight_decay=0.1)}, "weight_decay = 0.0005, not 0.1"),
    "seed": ({}, {"recipe": replace(RECIPE, seed=1)}, "seed = 0, not 1"),
    "precision": ({}, {"recipe": replace(RECIPE, precision="bf16")}, "precision = 'fp32', not 'bf16'"),
    "epochs": ({}, {"recipe": replace(RECIPE, epochs=3)}, "epochs = 2, not 3"),
    "a loader's data": ({"data": loader()}, {"data": loader(TensorDataset(*rows(1)))}, "another train_data.dataset"),
    "a loader's order": ({"data": loader()}, {"data": loader(shuffle=True)}, "another train_data.sampler"),
    "a data set's number": ({"data": loader(Shifted(0.0))}, {"data": loader(Shifted(1.0))},
                            "train_data.dataset.shift = 0.0, not 1.0"),
    "a list of its own kind": ({"data": Multiplied(batches(), 1)}, {"data": Multiplied(batches(), 2)},
                               "another train_data"),
    "images": ({"model": flat(), "data": pictures()}, {"model": flat(), "data": pictures(1)},
               "another train_data.images"),
    "normalisation": ({"model": flat(), "data": pictures()}, {"model": flat(), "data": pictures(mean=0.4)},
                      "another train_data.mean"),
}  # fmt: skip


def definition_of(model=None, data=None, valid=None, recipe=RECIPE, loss=None):
    model, data = model_of() if model is None else model, data or batches()
    made = Definition.of(model, data, valid, recipe, loss, precision=recipe.precision, processes=1)
    return replace(made, steps=len(data) if hasattr(data, "__len__") else 0)


@pytest.mark.parametrize("what", PAIRS)
def test_what_defines_a_run(what):
    """A definition is the same after it was written, and names what is another in another run."""
    first, second, told = PAIRS[what]
    one, other = (definition_of(**copy.deepcopy(x)) for x in (first, second))
    again = Definition.from_json(json.loads(json_bytes(one.to_json())))
    assert (again, again.digest, again.unlike(definition_of(**first))) == (one, one.digest, [])
    assert one.digest != other.digest
    assert told in "; ".join(one.unlike(other))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("what", PAIRS)
def test_another_run_in_the_same_folder_raises_and_changes_nothing(tmp_path, what):
    first, second, told = PAIRS[what]
    run(**copy.deepcopy(first), out=tmp_path)
    before = files(tmp_path)
    with pytest.raises(CheckpointError) as error:
        run(**copy.deepcopy(second), out=tmp_path)
    assert told in str(error.value)
    assert "give another out=, or resume=False to start anew" in str(error.value)
    assert files(tmp_path) == before
    expected, history = run(**copy.deepcopy(second))
    fresh, again = run(**copy.deepcopy(second), out=tmp_path, resume=False)
    assert same(fresh, expected)
    assert numbers(again) == numbers(history)
    with pytest.raises(CheckpointError):
        run(**copy.deepcopy(first), out=tmp_path)


def test_a_hidden_class_attribute_of_a_user_is_part_of_the_model(tmp_path):
    run(out=tmp_path)
    other = model_of()
    other[3].__class__ = Tilted
    with pytest.raises(CheckpointError, match=r"its module '3' is Linear\(.*, not Tilted\("):
        run(other, out=tmp_path)


class Called(Exception):  # noqa: N818
    pass


def refuse(progress):
    raise Called


SAME = {
    "the same": dict,
    "the way steps are taken": lambda: {"recipe": replace(RECIPE, capture="none")},
    "how often it is saved": lambda: {"save_every": 2, "save_minutes": 0.0},
    "tied or copied views": lambda: {"data": [(x.clone(), y.clone()) for x, y in batches()]},
}


@pytest.mark.parametrize("what", SAME)
def test_a_finished_run_returns_what_it_was(tmp_path, what):
    whole, history = run(out=tmp_path)
    model, again = run(**SAME[what](), out=tmp_path, tell=refuse)
    assert same(model, whole)
    assert again.rows == history.rows
    assert not model.training


def test_workers_and_random_positions_are_no_part_of_a_run(tmp_path):
    own = torch.Generator().manual_seed(1)
    data = loader(shuffle=True, generator=own)
    whole, history = run(data=data, out=tmp_path)
    workers = loader(shuffle=True, generator=torch.Generator().manual_seed(9), num_workers=1)
    for other in (data, workers):
        model, again = run(data=other, out=tmp_path, tell=refuse)
        assert same(model, whole)
        assert again.rows == history.rows


class EachDifferent:
    """Counts how often it is gone through, and gives other batches each time."""

    def __init__(self):
        self.passes = 0

    def __len__(self):
        return 3

    def __iter__(self):
        self.passes += 1
        return iter(batches(self.passes))


def test_data_are_not_touched_to_find_out_what_they_are(tmp_path):
    (alone, _), (kept, _) = run(data=EachDifferent()), run(data=EachDifferent(), out=tmp_path)
    assert same(alone, kept)


def test_a_folder_belongs_to_a_run_before_its_first_checkpoint(tmp_path):
    def stop(self, *_):
        raise Called

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Classify, "__call__", stop)
        with pytest.raises(Called):
            run(out=tmp_path)
    assert not RecentCheckpoints(tmp_path, "training").paths()
    with pytest.raises(CheckpointError, match="seed = 0, not 1"):
        run(recipe=replace(RECIPE, seed=1), out=tmp_path)
    model, _ = run(out=tmp_path)
    assert same(model, run()[0])


def test_a_model_that_was_stopped_is_the_one_that_goes_on(tmp_path):
    """As after Ctrl-C in a notebook, where the cell is run again with the same model."""

    def stop(progress):
        if progress.row and progress.epoch == 1:
            raise Called

    model = model_of()
    with pytest.raises(Called):
        run(model, out=tmp_path, tell=stop)
    run(model, out=tmp_path)
    assert same(model, run()[0])
    with pytest.raises(
        CheckpointError, match="make the model anew, from the same seed, to get this run"
    ):
        run(model, out=tmp_path)


def test_runs_of_earlier_versions_are_refused_with_advice(tmp_path):
    run(out=tmp_path)
    (tmp_path / "run.json").unlink()
    for folder in RecentCheckpoints(tmp_path, "training").paths():
        tensors, config = checkpoint.load(folder, "training")
        config.pop("run")
        checkpoint.save(folder, "training", tensors, config)
    with pytest.raises(
        CheckpointError, match=r"did not record what defines a run.*give another out=.*'model.'"
    ):
        run(out=tmp_path)
    run(out=tmp_path, resume=False)


def test_checkpoints_of_another_run_are_not_taken_for_this_ones(tmp_path):
    run(out=tmp_path / "a")
    run(recipe=replace(RECIPE, seed=1), out=tmp_path / "b")
    mine, theirs = (tmp_path / x / "epoch-0002" for x in "ab")
    tensors, config = checkpoint.load(theirs, "training")
    checkpoint.save(mine, "training", tensors, config)
    with pytest.raises(CheckpointError, match=r"epoch-0002 belongs to another run than run.json"):
        run(out=tmp_path / "a")
    (tmp_path / "a" / "run.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"epoch-0002 belongs to another run, and its folder has no run.json"
    ):
        run(out=tmp_path / "a")
    for content in ("{", "[]", "{}", json.dumps({"format": 99}), json.dumps({"format": 1, "recipe": 1})):
        (tmp_path / "b" / "run.json").write_text(content)
        with pytest.raises(
            CheckpointError, match=r"run.json does not describe a run|run.json is damaged"
        ):
            run(recipe=replace(RECIPE, seed=1), out=tmp_path / "b")


# ---- weights of a finished run


def test_a_finished_run_leaves_plain_weights(tmp_path):
    model, _ = run(out=tmp_path)
    path = tmp_path / "model.safetensors"
    fresh = model_of(7)
    fresh.load_state_dict(load_file(path))
    assert same(fresh, model)
    content = path.read_bytes()
    path.unlink()
    run(out=tmp_path, tell=refuse)
    assert path.read_bytes() == content

    def stop(progress):
        raise Called

    with pytest.raises(Called):
        run(recipe=replace(RECIPE, seed=1), out=tmp_path, resume=False, tell=stop)
    assert not path.exists()  # of the run before


@pytest.mark.parametrize("name", ["model.safetensors", "run.json"])
@pytest.mark.parametrize("resume", [True, False])
def test_files_of_others_with_such_names_are_left_alone(tmp_path, name, resume):
    """As in a folder of a pretrained model that somebody gives as out=."""
    (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointError, match=r"give another out="):
        run(out=tmp_path, resume=resume)
    assert files(tmp_path) == {(tmp_path / name).relative_to(tmp_path): b"{}"}


def test_weights_are_written_whole_or_not_at_all(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("attractor.train.run_folder.write_tensors", full)
    told = r"the weights model.safetensors could not be written to .*; .*epoch-0002 is whole"
    with pytest.raises(OSError, match=told):
        run(out=tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    monkeypatch.undo()
    model, _ = run(out=tmp_path)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["0.weight"], model[0].weight)


class Wrapped(nn.Module):
    """As torch.compile wraps a module, without its compiler."""

    def __init__(self, inner):
        super().__init__()
        self._orig_mod = inner

    def forward(self, x):
        return self._orig_mod(x)


def test_weights_of_a_compiled_model_have_the_names_of_the_plain_one(tmp_path):
    model, _ = run(Wrapped(model_of()), out=tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == model_of().state_dict().keys()
    again, _ = run(Wrapped(model_of()), out=tmp_path, tell=refuse)
    assert same(again, model)


class Stateful(nn.Linear):
    def get_extra_state(self):
        return {"a": 1}

    def set_extra_state(self, state):
        pass


def test_what_cannot_be_written_is_said_before_the_first_step(tmp_path):
    called = []
    with pytest.raises(TypeError, match="'_extra_state' is dict; a checkpoint holds tensors"):
        run(
            Stateful(3, 2),
            loss=lambda m, b: called.append(1) or mse_loss(m(b[0]), b[0][:, :2]),
            out=tmp_path,
        )
    assert not called


# ---- several seeds


def test_seeds_follow_the_same_rule(tmp_path):
    def seeds(dropout=0.1, **options):
        make = lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(dropout), nn.Linear(4, 2))
        return train_seeds(
            make, batches(), batches(2), RECIPE, seeds=(0, 1), out=tmp_path, device="cpu", **options
        )

    first = seeds()
    summary = (tmp_path / "summary.json").read_bytes()
    assert seeds(tell=refuse).values == first.values
    with pytest.raises(CheckpointError, match=r"seed-0 holds a run with another model"):
        seeds(dropout=0.2)
    assert (tmp_path / "summary.json").read_bytes() == summary
    with pytest.raises(Called):
        seeds(dropout=0.2, resume=False, tell=refuse)
    assert not (tmp_path / "summary.json").exists()  # it would be of other trainings than the folder's


# ---- any two runs in one folder

definitions = st.fixed_dictionaries({
    "seed": st.integers(0, 1), "dropout": st.sampled_from([0.0, 0.3]), "data": st.integers(0, 1),
    "valid": st.sampled_from([None, 2]), "weight": st.sampled_from([None, 1.0, 2.0]),
    "rate": st.sampled_from([0.05, 0.1]), "optimiser": st.sampled_from(["sgd", "adamw"]),
})  # fmt: skip
calls = st.lists(
    st.tuples(st.booleans(), st.sampled_from([None, None, 1, 2, 4, 5]), st.booleans()),
    min_size=2,
    max_size=4,
)
known = {}


def defined(definition, **options):
    model = model_of(definition["seed"], definition["dropout"])
    valid = None if definition["valid"] is None else batches(definition["valid"])
    loss = None if definition["weight"] is None else weighted(definition["weight"])
    recipe = replace(RECIPE, learning_rate=definition["rate"], optimiser=definition["optimiser"])
    return run(model, batches(definition["data"]), valid, recipe, loss=loss, **options)


def expected_of(definition):
    key = tuple(definition.values())
    if key not in known:
        known[key] = defined(definition)
    return known[key]


@settings(max_examples=3)
@given(definitions, definitions, calls)
def test_two_runs_in_one_folder_never_mix(tmp_path_factory, one, other, calls):
    interleave(tmp_path_factory, one, other, calls)


@pytest.mark.slow
@settings(max_examples=30)
@given(definitions, definitions, calls)
def test_many_pairs_of_runs_in_one_folder_never_mix(tmp_path_factory, one, other, calls):
    interleave(tmp_path_factory, one, other, calls)


def interleave(tmp_path_factory, one, other, calls):
    """Each call gets its own result, an error, or is stopped half way; whatever came before it."""
    folder, owner = tmp_path_factory.mktemp("run"), None
    for first, stop, anew in calls:
        mine = one if first else other
        steps = iter(range(1, 100))

        def tell(progress, stop=stop, steps=steps):
            if stop is not None and next(steps) == stop:
                raise Called

        refused = owner is not None and owner != mine and not anew
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("attractor.train.bookkeeping.Timer.INTERVAL", 0.0)
                model, history = defined(mine, out=folder, save_minutes=0.0, tell=tell, resume=not anew)
        except CheckpointError:
            assert refused
            continue
        except Called:
            owner = mine
            continue
        assert not refused
        owner = mine
        expected, row = expected_of(mine)
        assert same(model, expected)
        assert numbers(history) == numbers(row)
        kept = model_of(9, mine["dropout"])
        kept.load_state_dict(load_file(folder / "model.safetensors"))
        assert same(kept, expected)


def test_image_sets_of_the_library_are_told_apart(tmp_path):
    data = images.load("digits", "train")
    model = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    torch.manual_seed(0)
    recipe = replace(RECIPE, batch=16, epochs=1)
    first = model()
    run(copy.deepcopy(first), data.subset(32), recipe=recipe, out=tmp_path)
    with pytest.raises(CheckpointError, match=r"another train_data.images, another train_data.labels"):
        run(copy.deepcopy(first), data.subset(32, seed=1), recipe=recipe, out=tmp_path)


@pytest.mark.slow
def test_definitions_are_the_same_in_every_process():
    """Also of models that hold sets, compiled code, or a library's Python hashes."""
    found = []
    for seed in ("1", "2"):
        command = [sys.executable, "-W", "ignore", "-m", "tests.train.definition_worker"]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            command,
            cwd=Path(__file__).parents[2],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        found.append(json.loads(done.stdout.splitlines()[-1]))
    assert found[0] == found[1]
    assert len(found[0]) == len(set(found[0].values())) > 20
