"""After a process is killed, torchrun restarts all of them, and the result is that of a run without it."""

import pytest

from tests.distributed.launching import launch

pytest.importorskip("accelerate")
pytestmark = pytest.mark.slow

KINDS = ("none", "full", "fit")  # two trainings, by their sharding, and a fit


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    return launch("torchrun", 2, "elastic_worker.py", tmp_path_factory.mktemp("whole"), False)


@pytest.fixture(scope="module")
def killed_run(tmp_path_factory):
    options = ("--max-restarts", "3")
    folder = tmp_path_factory.mktemp("killed")
    results = launch("torchrun", 2, "elastic_worker.py", folder, True, options=options)
    assert sorted(p.name for p in folder.glob("*-killed")) == sorted(f"{k}-killed" for k in KINDS)
    return results


@pytest.mark.parametrize("kind", KINDS)
def test_restarted_processes_give_the_bits_of_an_uninterrupted_run(whole_run, killed_run, kind):
    for one, other in zip(whole_run, killed_run, strict=True):
        assert one["restarts"] == 0
        assert other["restarts"] == len(KINDS)
        assert one[kind]["rows"] == other[kind]["rows"]
        assert one[kind]["weights"] == other[kind]["weights"]
        assert other[kind]["checkpoints"]
