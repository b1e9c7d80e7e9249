"""Processes train together if they were launched together and say the same; nobody hangs, nothing mixes."""

import json

import pytest
import torch
import torch.distributed as dist

from attractor.train.place import Place
from tests.distributed import join_worker
from tests.distributed.launching import launch

pytest.importorskip("accelerate")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return launch("torchrun", 2, "join_worker.py", tmp_path_factory.mktemp("join"), "disagreeing")


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("weights", "other initial weights (0.weight, 0.bias, 3.weight and 1 more)"),
        ("data", "another train_data"),
        ("recipe", "seed = 0, not 1"),
        ("call", "save_every = 0, not 1"),
        ("out", "out = False, not True"),
    ],
)
def test_different_runs_raise_in_every_process(two, what, told):
    for result in two:
        assert result[what]["error"] == "ValueError"
        assert result[what]["soon"]
        assert result[what]["told"].startswith(
            f"ranks [1] train another run than rank 0: rank 0 has {told}"
        )
        assert "distributed=False" in result[what]["told"]


def test_each_process_trains_its_own_run_if_asked(two):
    """With the weights that it would have in a program of its own."""
    for rank, result in enumerate(two):
        assert result["each"] == join_worker.trained(rank)
    assert two[0]["one rank"] == join_worker.trained(7)
    assert two[0]["evaluated"] == join_worker.evaluate(join_worker.model_of(0), join_worker.batches(0))


def test_of_two_runs_in_one_folder_at_the_same_time_one_is_refused(two):
    ends = [result["one folder"] for result in two]
    owner = 0 if isinstance(ends[0], list) else 1
    assert ends[owner] == join_worker.trained(owner)
    assert ends[1 - owner]["error"] == "CheckpointError"


def test_a_rank_that_calls_alone_is_told_and_both_train_together_later(two):
    alone = two[0]["alone"]
    assert alone["error"] == "RuntimeError"
    assert "rank 0 has waited 2 s for ranks [1] to call train, too" in alone["told"]
    for result in two:
        assert result["together"] == two[0]["together"]
        assert result["again"] == two[0]["together"][1]
        assert result["another"]["error"] == "CheckpointError"
        assert "other initial weights" in result["another"]["told"]


def test_a_rank_that_calls_before_there_is_a_group_does_not_wait_for_ever(tmp_path):
    found = launch("torchrun", 2, "join_worker.py", tmp_path, "lonely")[0]["alone"]
    assert found["error"] == "RuntimeError"
    assert "not all of the 2 processes have called train within 3 s" in found["told"]


def _in_a_group(rank, folder):
    """A group that the program has made for itself: training has no part in it."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    assert Place.find("cpu").share == (0, 1)
    if rank == 0:  # alone
        assert join_worker.trained(0) == json.loads((folder / "expected.json").read_text())
    dist.barrier()
    expected = join_worker.trained(rank, out=folder / str(rank))
    assert expected != join_worker.trained(1 - rank, 1)
    dist.destroy_process_group()


def test_a_group_that_is_merely_initialised_changes_nothing(tmp_path):
    (tmp_path / "expected.json").write_text(json.dumps(join_worker.trained(0)))
    torch.multiprocessing.spawn(_in_a_group, (tmp_path,), nprocs=2)
