"""Two processes with sharded parameters train as one does, and checkpoints are the same for both.

Models are in float64; losses and weights after three epochs agree to 1e-10.
"""

import pytest
import safetensors.torch

from attractor.train.recent_checkpoints import RecentCheckpoints
from tests.distributed import sharding_worker, train_worker
from tests.distributed.launching import launch
from tests.distributed.test_training import alike

pytest.importorskip("accelerate")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shardings")


@pytest.fixture(scope="module")
def one(folder):
    return train_worker.whole(folder / "one")


@pytest.fixture(scope="module")
def two(folder, one):
    return launch("torchrun", 2, "sharding_worker.py", folder / "two", folder / "one")


@pytest.mark.parametrize("kind", train_worker.TRAININGS)
def test_sharded_training_is_that_of_one_process(one, two, kind):
    for result in two:
        alike(one[kind], result["whole"][kind])
        assert result["whole"][kind]["same"]


@pytest.mark.parametrize("kind", train_worker.TRAININGS)
def test_sharded_training_continues_a_run_of_one_process(one, two, kind):
    for result in two:
        alike(one[kind], result["resumed"][kind])


@pytest.mark.parametrize("kind", train_worker.TRAININGS)
def test_replicated_training_continues_a_sharded_run(one, two, kind):
    for result in two:
        alike(one[kind], result["replicated"][kind])


@pytest.mark.parametrize("kind", train_worker.TRAININGS)
def test_one_process_continues_a_sharded_run(one, two, folder, kind, monkeypatch):
    monkeypatch.setattr(train_worker, "TRAININGS", {kind: train_worker.TRAININGS[kind]})
    alike(one[kind], train_worker.resumed(folder / "two", folder / "again", sharding="full")[kind])


@pytest.mark.parametrize("kind", train_worker.TRAININGS)
def test_files_have_the_same_names_and_tensors(one, two, folder, kind):
    one_folder, two_folder = folder / "one" / kind, folder / "two" / kind
    names = lambda path: sorted(p.name for p in path.iterdir())
    assert names(one_folder) == names(two_folder)
    shapes = []
    for path in (one_folder, two_folder):
        (_, tensors, config), weights = (
            RecentCheckpoints(path, "training").load(),
            safetensors.torch.load_file(path / "model.safetensors"),
        )
        shapes.append(
            ({k: (v.shape, v.dtype) for k, v in tensors.items()}, config.keys(), weights.keys())
        )
    logs = [shape[0].pop("log") for shape in shapes]
    assert len(logs) == 2
    assert shapes[0] == shapes[1]


def test_shared_and_frozen_parameters_and_unequal_evaluations(two, tmp_path):
    expected = train_worker.told(*sharding_worker.shared_training(tmp_path))
    for result in two:
        alike(expected, result["shared"])


def test_compiled_blocks_can_be_sharded(tmp_path):
    expected = train_worker.told(*sharding_worker.shared_training(None))
    for result in launch("torchrun", 2, "sharding_worker.py", tmp_path):
        alike(expected, result)


def test_the_model_is_ordinary_after_training(two):
    for result in (two[0]["restoration"], two[1]["restoration"]):
        for name in ("parameters", "plain", "classes", "attributes"):
            assert result[name], name
        assert not result["hooks"]
        assert not result["training"]
        assert result["again"] == two[0]["restoration"]["again"]
    total, shares = two[0]["restoration"]["total"], two[0]["restoration"]["shares"]
    assert len(shares) == 3
    assert all(total / 2 <= share < 0.7 * total for share in shares)  # rows of 5 are shared as 3 and 2


def test_divergence_raises_in_every_process_and_leaves_a_whole_model(two):
    for result in two:
        assert "the loss is not finite at epoch 1" in result["divergence"]["message"]
        assert result["divergence"]["plain"]


def test_processes_must_agree_on_sharding(two):
    for result in two:
        assert "sharding = 'none', not 'full'" in result["disagreement"]
