"""Nodes leave a Ray cluster and join it while a job runs; the artifacts do not depend on that."""

import logging
import threading
import time

import pytest

import attractor as at
from attractor import jobs
from attractor.jobs.cluster import POLL_SECONDS

pytestmark = pytest.mark.slow
DATA = dict(trajectories=200, dt=0.1, horizon=5.0, shard_size=5)
HERE = "tests.jobs.functions"
NODE = dict(object_store_memory=100 * 2**20)


@pytest.fixture
def start_cluster(monkeypatch):
    """A function that starts a Ray cluster whose only node has a number of CPUs."""
    ray = pytest.importorskip("ray")
    utils = pytest.importorskip("ray.cluster_utils")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_health_check_period_ms", "1000")  # the loss of a node is noticed sooner
    clusters = []

    def start(cpus):
        head = dict(num_cpus=cpus, include_dashboard=False, **NODE)
        options = dict(shutdown_at_exit=False)  # its signal handlers need the main thread
        clusters.append(utils.Cluster(initialize_head=True, head_node_args=head, **options))
        return clusters[-1]

    yield start
    ray.shutdown()
    for cluster in clusters:
        cluster.shutdown()


@pytest.mark.parametrize("cpus", [1, 0], ids=["head computes shards", "head has no CPUs"])
def test_fine_data_do_not_depend_on_nodes_that_leave_and_join(start_cluster, cpus, tmp_path, caplog):
    """One node is removed after two shards; another one is added when Ray has noticed the loss."""
    ray = pytest.importorskip("ray")
    system = at.systems.ElasticPendulum()
    at.make_trajectories(system, tmp_path / "here", **DATA, engine="here")
    cluster, added_nodes, completed = start_cluster(cpus), [], []
    add_node = lambda: added_nodes.append(cluster.add_node(num_cpus=1, **NODE))
    add_node()

    def replace_node():
        cluster.remove_node(added_nodes[0], allow_graceful=False)
        while len([node for node in ray.nodes() if node["Alive"]]) > 1:
            time.sleep(0.2)
        time.sleep(2 * POLL_SECONDS)
        add_node()

    replacement = threading.Thread(target=replace_node)

    def progress(message):
        completed.append(message)
        if len(completed) == 2:
            replacement.start()
        if len(completed) == 3 and cpus:  # otherwise the head computes all other shards meanwhile
            replacement.join()

    caplog.set_level(logging.INFO, "attractor.jobs")
    at.make_trajectories(
        system, tmp_path / "ray", **DATA, engine="ray", address=cluster.address, progress=progress
    )
    names = sorted(path.name for path in (tmp_path / "here").iterdir() if path.suffix != ".lock")
    assert len(names) >= 40
    for name in names:
        assert (tmp_path / "ray" / name).read_bytes() == (tmp_path / "here" / name).read_bytes()
    replacement.join()
    assert len(added_nodes) == 2
    assert f"was computed on node {added_nodes[1].node_id}" in caplog.text
    assert ("no machine can run a shard" in caplog.text) == (cpus == 0)


def test_a_node_that_joins_gets_a_shard_while_all_others_are_busy(start_cluster, tmp_path):
    """Shard 0 ends only after shard 1 has begun, which needs a second node."""
    cluster = start_cluster(1)
    job = jobs.Job(f"{HERE}:zero_waits_for_one", {"marks": str(tmp_path)}, also=(HERE,))
    timer = threading.Timer(8.0, cluster.add_node, kwargs=dict(num_cpus=1, **NODE))
    timer.start()
    artifacts = list(jobs.each(job, range(2), engine="ray", address=cluster.address))
    timer.join()
    assert sorted(artifact.shard for artifact in artifacts) == [0, 1]


def test_a_copy_of_a_slow_shard_replaces_it(start_cluster, tmp_path):
    """The first attempt at shard 0 would take ten minutes; its worker is ended."""
    cluster = start_cluster(2)
    job = jobs.Job(f"{HERE}:slow_at_first", {"marks": str(tmp_path)}, also=(HERE,), copies=True)
    artifacts = list(jobs.each(job, range(6), engine="ray", address=cluster.address))
    assert sorted(artifact.shard for artifact in artifacts) == list(range(6))
    assert {artifact.shard: artifact.json() for artifact in artifacts}[0] == 2
