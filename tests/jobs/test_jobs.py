"""The same artifacts whatever the engine and whoever dies; mistakes come back with the shard's name."""

import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import attractor as at
from attractor import jobs
from attractor.cli import equation_names as equations
from attractor.jobs.job import Artifact, Failure
from attractor.jobs.naming import name_of, named
from tests.jobs import functions

HERE = "tests.jobs.functions"


def job(function, folder=None, **config):
    if folder is not None:
        config["marks"] = str(folder)
    return jobs.Job(f"{HERE}:{function}", config, also=(HERE,))


@pytest.fixture(scope="module")
def local_ray():
    """A cluster of one machine with one core, in this process."""
    ray = pytest.importorskip("ray")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    options = dict(num_cpus=1, object_store_memory=100 * 2**20, include_dashboard=False)
    ray.init("local", log_to_driver=False, logging_level="warning", **options)
    yield
    ray.shutdown()


@pytest.fixture(params=["here", "processes", "ray"])
def engine(request):
    if request.param == "ray":
        request.getfixturevalue("local_ray")
    return dict(engine=request.param, workers=1)


@pytest.fixture
def distributed(engine):
    if engine["engine"] == "here":
        pytest.skip("a process that dies takes its own engine along")
    return engine


def begun(folder):
    return {path.name: path.stat().st_size for path in folder.iterdir()}


@pytest.mark.slow
def test_artifacts_do_not_depend_on_the_engine(engine, tmp_path):
    workers = {"here": 1, "processes": 2, "ray": None}[engine["engine"]]
    work, taken = job("noted", tmp_path, word="w"), []
    shards = (taken.append(k) or k for k in range(6))
    stream = jobs.each(work, shards, engine=engine["engine"], workers=workers)
    first = next(stream)
    assert len(taken) <= 4  # a shard is taken when somebody is free
    made = {a.shard: a for a in (first, *stream)}
    assert sorted(made) == [0, 1, 2, 3, 4, 5]
    for shard, artifact in made.items():
        assert artifact == next(jobs.each(work, [shard]))
        assert artifact.content == f"w {shard}".encode() * 1000


@pytest.mark.slow
def test_workers_clean_up_before_they_go(tmp_path):
    """Those that have nothing left to do end by themselves: atexit is heard of."""
    made = list(jobs.each(job("leaves_a_note", tmp_path), range(2), engine="processes", workers=2))
    assert len(made) == 2
    assert {path.read_text() for path in tmp_path.iterdir()} == {"gone"}


@pytest.mark.slow
def test_a_worker_that_dies_is_replaced(distributed, tmp_path):
    dying = job("dies", tmp_path, victim=1, deaths=1)
    made = {a.shard: a.json() for a in jobs.each(dying, range(3), **distributed)}
    assert made == {k: {"shard": k, "third": 1 / 3, "nothing": None} for k in range(3)}
    assert begun(tmp_path) == {"0": 1, "1": 2, "2": 1}


@pytest.mark.slow
def test_a_shard_that_always_kills_is_named(distributed, tmp_path):
    dying = job("dies", tmp_path, victim=1, deaths=99)
    with pytest.raises(jobs.WorkerDiedError, match=r"shard 1: its \w+ died 1 times"):
        list(jobs.each(dying, range(3), **distributed, retries=0))
    assert begun(tmp_path)["1"] == 1


@pytest.mark.slow
def test_an_exception_is_raised_once_with_the_shard_s_name(engine, tmp_path):
    with pytest.raises(ValueError, match="this and that") as raised:
        list(jobs.each(job("fails", tmp_path), range(3), **engine))
    assert "shard 2" in "\n".join([str(raised.value), *raised.value.__notes__])
    assert "in fails" in "".join(raised.value.__notes__) or engine["engine"] == "here"
    assert begun(tmp_path)["2"] == 1


@pytest.mark.slow
def test_what_others_have_done_is_kept_before_a_failure_is_raised(tmp_path):
    """While the caller was busy with the first, one failed and the others ended."""
    work, engine = job("fails_second", tmp_path), dict(engine="processes", workers=4)
    kept = jobs.keep(work, range(4), tmp_path / "kept", **engine)
    assert next(kept).shard == 0
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("?"))) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    with pytest.raises(ValueError, match="this and that"):
        list(kept)
    names = sorted(path.name[0] for path in (tmp_path / "kept").glob("?.*.json"))
    assert names == ["0", "2", "3"]


def test_the_order_of_a_configuration_is_no_other_job(tmp_path):
    (tmp_path / "marks").mkdir()
    given = {"word": "w", "marks": str(tmp_path / "marks")}
    for config in (given, dict(reversed(given.items()))):
        made = jobs.Job(f"{HERE}:noted", config, also=(HERE,))
        assert len(list(jobs.keep(made, [0], tmp_path / "kept", engine="here"))) == 1


@pytest.mark.slow
def test_threads_are_those_of_the_job(engine):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for wanted in (None, 1) if engine["engine"] == "here" else (None,):
            given = jobs.Job(f"{HERE}:threads", {}, also=(HERE,), threads=wanted)
            (made,) = jobs.each(given, ["a"], **engine)
            alone = 2 if engine["engine"] == "here" and wanted is None else 1
            assert made.json() == ["a", alone]
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_what_is_there_is_not_made_again(tmp_path):
    (tmp_path / "marks").mkdir()
    work, engine = job("noted", tmp_path / "marks", word="w"), dict(engine="here")
    first = list(jobs.keep(work, range(2), tmp_path / "kept", **engine))
    again = list(jobs.keep(work, range(3), tmp_path / "kept", **engine))
    assert again[:2] == first
    assert begun(tmp_path / "marks") == {"0": 1, "1": 1, "2": 1}
    damaged = next((tmp_path / "kept").glob("1.*.bin"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert len(list(jobs.keep(work, range(3), tmp_path / "kept", **engine))) == 3
    assert begun(tmp_path / "marks") == {"0": 1, "1": 2, "2": 1}
    with pytest.raises(ValueError, match="another job"):
        next(jobs.keep(job("noted", word="v"), [0], tmp_path / "kept"))


plain = (
    st.none()
    | st.booleans()
    | st.integers(-2, 2)
    | st.sampled_from([1.0, math.nan, math.inf, -math.inf, "1", "a"])
)
configs = st.dictionaries(
    st.sampled_from(["x", "y", 1, "1"]), plain | st.lists(plain, max_size=2), max_size=2
)
shard = st.integers(-1, 2) | st.sampled_from(
    ["1", "a b", "a-b", "a/b", "a, b", ("a", "b"), ("a, b",), (1,), ("1",), True, ""]
)


@hypothesis.given(
    configs,
    configs,
    st.lists(st.tuples(st.booleans(), st.lists(shard, max_size=3)), min_size=2, max_size=4),
)
def test_two_jobs_in_one_folder_never_mix(tmp_path_factory, one, other, calls):
    """Each call gets what its own function gives of its own shards, or an error."""
    folder, owner = tmp_path_factory.mktemp("kept"), None
    for first, shards in calls:
        config = one if first else other
        mine = repr(sorted(config.items(), key=repr))
        kept = jobs.keep(job("shown", inner=config), shards, folder, engine="here")
        if owner not in (None, mine):
            with pytest.raises(ValueError, match="holds another job"):
                list(kept)
            continue
        made, owner = list(kept), mine
        expected = {repr(s): functions.shown({"inner": config}, s) for s in shards}
        assert {a.json()["shard"]: a.json() for a in made} == expected
        assert {repr(a.shard) for a in made} == set(expected)


def test_a_function_that_was_changed_is_another_job(tmp_path):
    path = tmp_path / "own.py"
    for text in ("def run(config, shard):\n    return 1\n", "def run(config, shard):\n    return 2\n"):
        path.write_text(text)
        named.cache_clear()
        work = jobs.Job(f"{path}:run", {}, also=(str(path),))
        if "return 1" in text:
            assert [a.json() for a in jobs.keep(work, [0], tmp_path / "kept")] == [1]
            assert [a.json() for a in jobs.keep(work, [0], tmp_path / "kept")] == [1]
        else:
            with pytest.raises(ValueError, match="holds another job"):
                list(jobs.keep(work, [0], tmp_path / "kept"))
            assert [a.json() for a in jobs.keep(work, [0], tmp_path / "other")] == [2]
    (tmp_path / "other" / "job.json").write_text('{"config": {}}')
    with pytest.raises(ValueError, match="or one of an earlier version of attractor"):
        list(jobs.keep(work, [0], tmp_path / "other"))


@pytest.mark.slow
def test_workers_are_no_ranks_of_the_caller_s_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "2")
    (made,) = jobs.each(job("launched"), [0], engine="processes", workers=1)
    found = made.json()
    assert found.pop("HOME") == os.environ.get("HOME")
    assert set(found.values()) == {None}
    assert os.environ["WORLD_SIZE"] == "2"


@pytest.mark.slow
def test_leaving_early_ends_what_is_under_way(distributed, tmp_path):
    started = time.monotonic()
    for artifact in jobs.each(job("sleeps", tmp_path), range(3), **distributed):
        assert artifact.shard == 0
        break
    assert time.monotonic() - started < 50
    assert not multiprocessing.active_children()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_ctrl_c_keeps_what_is_done(tmp_path):
    (tmp_path / "marks").mkdir()
    code = (
        "import sys; from attractor import jobs\n"
        "if __name__ == '__main__':\n"
        f"    job = jobs.Job('{HERE}:sleeps', {{'marks': sys.argv[1]}}, also=('{HERE}',))\n"
        "    for made in jobs.keep(job, range(3), sys.argv[2], engine='processes', workers=2): print('one', flush=True)"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    process = subprocess.Popen(
        [sys.executable, script, tmp_path / "marks", tmp_path / "kept"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert process.stdout.readline() == "one\n"
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers as well
    _, told = process.communicate(timeout=30)
    assert told.count("KeyboardInterrupt") == 1
    assert [p.name[0] for p in (tmp_path / "kept").glob("*.json") if p.name != "job.json"] == ["0"]
    gone = lambda: not [p for p in Path("/proc").glob("[0-9]*") if group_of(p) == process.pid]
    assert any(gone() or time.sleep(0.1) for _ in range(100))


def group_of(process):
    """The group of a process in /proc that has not ended; None of one that has."""
    try:
        state, _, group = (process / "stat").read_text().rpartition(")")[2].split()[:3]
    except OSError:
        return None
    return None if state == "Z" else int(group)


def test_only_names_that_were_given_are_imported():
    with pytest.raises(
        ValueError,
        match=r"'os:getcwd' is not a function of attractor; if it is yours, pass also=\('os',\)",
    ):
        jobs.Job("os:getcwd", {})
    with pytest.raises(ValueError, match="not a function of attractor"):
        jobs.Job("attractors.evil:run", {})


def test_mistakes_are_told_before_anything_begins():
    for given, message in (
        (dict(engine="rya"), "'rya' is not one of here, processes, ray"),
        (dict(engine="here", workers=3), "use engine processes"),
        (dict(workers=0), "workers = 0 must be at least 1"),
        (dict(address="10.0.0.1:6379"), "is for engine ray"),
    ):
        with pytest.raises(ValueError, match=message):
            jobs.each(job("noted"), [1], **given)
    for part in ("0/4", "5/4", "1", "a/b", "-1/2", "1/0"):
        with pytest.raises(ValueError, match="such as 3/16"):
            jobs.part_of(part)
    with pytest.raises(TypeError, match=r"cannot be sent to a process .* instead of lambdas"):
        list(jobs.each(job("noted", word=lambda: 0), [1], engine="processes"))


def test_ray_wants_json(local_ray):
    with pytest.raises(TypeError, match="cannot be sent to a cluster"):
        list(jobs.each(job("noted", word=at.systems.Lorenz()), [1], engine="ray"))
    given = jobs.Job("attractor.jobs.job:power", {"exponent": 2}, threads=1000)
    with pytest.raises(ValueError, match=r"needs 1000 CPU, and no machine .* \(there is 1 CPU, 0 GPU\)"):
        list(jobs.each(given, [1], engine="ray"))


def test_without_ray_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'attractor\[distributed\]'"):
        next(jobs.each(job("noted"), [1], engine="ray"))


def test_functions_are_found_by_name(tmp_path):
    assert name_of(functions.noted) == f"{HERE}:noted"
    assert named(f"{HERE}:noted") is functions.noted
    (tmp_path / "own.py").write_text("def rate(t, u):\n    return -u\n")
    rate = equations.find(f"{tmp_path}/own.py:rate").rate
    assert name_of(rate) == f"{tmp_path}/own.py:rate"
    assert named(name_of(rate))(0, 2) == -2
    assert name_of(lambda t, u: u) is None
    assert name_of(at.systems.Lorenz()) is None
    assert name_of(torch.sin) is None
    assert name_of(None) is None


def test_damage_on_the_way_is_noticed():
    with pytest.raises(OSError, match="shard 3: its artifact was damaged"):
        Artifact(3, b"abc", "0" * 64, False).checked()
    assert (
        str(Failure(("a", 0), "UnicodeDecodeError", "bad", "").error())
        == "shard a, 0: UnicodeDecodeError: bad"
    )


@pytest.mark.slow
def test_a_node_of_a_cluster_is_killed_half_way():
    pytest.importorskip("ray")
    command = [sys.executable, "-m", "benchmarks.cluster", "--quick"]
    found = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=600
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "hashes equal: True" in found.stdout
    assert "is begun again: its worker died" in found.stdout
