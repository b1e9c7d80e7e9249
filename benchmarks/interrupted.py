"""Nothing is lost: long computations are killed at random moments and resumed, again and again.

Trainings: 200 times a process is killed by SIGKILL, at a random moment or at a random operation of a
checkpoint's writing, and another goes on in the same folder; when a training is at its end, its weights,
its log and its last checkpoint must have the hashes of one that was left in peace. Two kinds are
trained: images with mixup, batch norm and dropout, and a shuffling loader whose data set draws from
torch's, Python's and NumPy's random numbers.

Fits, fine data, reproductions of an experiment and sweeps of `tune`: 200 times more, at random moments.
The states of the solver, the data, and the results without their durations must be those of computations
that were not interrupted, and each solver of a sweep must reach the error.

Data must have the hash of data made in one go. A solver is fitted and saved by one process, which is
then killed; another loads it, and its states must have the same hash.
"""

import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np

# Before torch: processes are forked, and a forked one waits for ever for threads that only its parent has.
os.environ["OMP_NUM_THREADS"] = "1"

import torch
from torch import nn

from attractor import HybridSolver, fit, systems
from attractor.data import images
from attractor.ode import make_trajectories
from attractor.ode.tuning_sweep import Problem, tune_all
from attractor.ode.unfinished import Unfinished
from attractor.reproduce import run, shelf
from attractor.train import Recipe, checkpoint, tensors, train
from attractor.train.recent_checkpoints import RecentCheckpoints
from benchmarks.results import save

TRAININGS, AT_WRITES = 200, 100  # kills, and those of them that wait for a write
OTHER_KILLS = 200  # of fits, data, reproductions, sweeps of tune
KILLS = 10  # of data, shard by shard
DATA = dict(trajectories=600, dt=0.1, horizon=5.0, fine_dt=0.01, shard_size=10)
FEW_DATA = DATA | dict(trajectories=60)
RECIPE = Recipe(
    epochs=3, batch=16, learning_rate=0.01, warmup=0.5, crop=1, precision="fp32", optimiser="adamw"
)


# Trainings


class Noisy(torch.utils.data.Dataset):
    """Samples that are not the same twice."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.randn(3) + i % 2 + 0.1 * random.gauss(0, 1) + 0.1 * np.random.randn(), i % 2


def train_images(folder: Path) -> nn.Module:
    torch.manual_seed(5)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2),
        nn.Linear(256, 10),
    )  # fmt: skip
    recipe = Recipe(**{**vars(RECIPE), "mixup": 0.2})
    data, valid = images.load("digits", "train").subset(96), images.load("digits", "test").subset(40)
    train(model, data, valid, recipe, device="cpu", out=folder, save_minutes=0)
    return model


def train_batches(folder: Path) -> nn.Module:
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3), nn.Linear(8, 2))
    loader = torch.utils.data.DataLoader(Noisy(), 7, shuffle=True)
    train(model, loader, loader, RECIPE, device="cpu", out=folder, save_minutes=0)
    return model


def hashes(model: nn.Module, folder: Path) -> str:
    """Of weights, log and last checkpoint."""
    total = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        total.update(name.encode() + value.contiguous().numpy().tobytes())
    last = folder / f"epoch-{RECIPE.epochs:04}" / "tensors.safetensors"
    digest = lambda path: hashlib.sha256(path.read_bytes()).hexdigest()
    return repr([total.hexdigest(), digest(folder / "log.jsonl"), digest(last)])


# Other long computations


def fit_solver(folder: Path) -> str:
    """Return the hash of states of a fitted solver; all candidates of the fit are kept."""
    Unfinished.SECONDS = 0.0
    options = dict(dt=0.1, horizon=2.0, fine_dt=0.02, trajectories=60, width=32)
    solver = fit(systems.ElasticPendulum(), **options, out=folder / "unfinished")
    return states(solver)


def make_data(folder: Path) -> str:
    return make_trajectories(systems.PendulumChain(2), folder / "data", **FEW_DATA).hash


def reproduce_experiment(folder: Path) -> str:
    """Return the results of an experiment, without durations."""
    experiment = shelf.catalogue()["pde-mixing"]
    results = run(experiment, "smoke", folder=folder / "results", threads=1)
    rows = [[arm, seed, r["metrics"]] for arm, own in results.runs.items() for seed, r in own.items()]
    return hashlib.sha256(repr(sorted(rows, key=repr)).encode()).hexdigest()


def tune_solvers(folder: Path) -> str:
    """Return whether the solvers of a sweep reach the error; which is fastest depends on the machine."""
    problems = {"logistic": Problem(systems.Logistic(), 2.0),
                "oscillator": Problem(systems.HarmonicOscillator(), 2.0)}  # fmt: skip
    options = dict(error=1e-3, batch=10, budget=0.0, compile=False)
    solvers = dict(tune_all(problems, folder / "sweep", **options))
    return repr([(name, solvers[name].report.winner.error <= 1e-3) for name in problems])


TRAINED: dict[str, Callable[[Path], str]] = {
    "images": lambda folder: hashes(train_images(folder), folder),
    "batches": lambda folder: hashes(train_batches(folder), folder),
}
OTHERS: dict[str, Callable[[Path], str]] = {
    "fit": fit_solver, "data": make_data, "reproduce": reproduce_experiment, "tune": tune_solvers,
}  # fmt: skip
CASES = TRAINED | OTHERS


def child(case: str, folder: Path, ready: int, pause: int | None) -> None:
    """Train in a process of its own; at operation `pause` of writing checkpoints wait to be killed."""
    torch.set_num_threads(1)
    if pause is not None:
        wait_at(pause, ready)
    (folder / "done.json").write_text(CASES[case](folder))


def wait_at(operation: int, ready: int) -> None:
    """Tell the parent, and wait, at so-many-th operation of `checkpoint.save`.

    An operation is what the disk sees: a file or folder made, opened, renamed or removed (Python's audit
    events), content reaching the disk, a part of a file's content written.
    """
    seen, inside = 0, False

    def operate(what: str) -> None:
        nonlocal seen
        if not inside:
            return
        seen += 1
        if seen == operation:
            os.write(ready, what.encode())
            time.sleep(60)

    def heard(event: str, arguments: Any) -> None:
        if event in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir"):
            operate(event)

    write, sync, keep = tensors.write_parts, os.fsync, checkpoint.save

    def synced(handle: int) -> None:
        operate("fsync")
        sync(handle)

    def halves(path: Any, parts: Any) -> Any:
        def each() -> Any:
            for part in parts:
                yield part
                operate("part of a file")

        return write(path, each())

    def saving(*arguments: Any) -> Any:
        nonlocal inside
        inside = True
        try:
            return keep(*arguments)
        finally:
            inside = False

    os.fsync, tensors.write_parts, checkpoint.save = synced, halves, saving
    sys.addaudithook(heard)


def start(case: str, folder: Path, pause: int | None = None) -> tuple[int, int]:
    """A process that trains, made by fork: imports take longer than such a training."""
    ready, told = os.pipe()
    process = os.fork()
    if process == 0:
        code = 1
        try:
            os.close(ready)
            child(case, folder, told, pause)
            code = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        finally:
            os._exit(code)
    os.close(told)
    return process, ready


def killed_once(
    case: str, folder: Path, pause: int | None, wait: float
) -> tuple[str | None, str | None]:
    """Kill a computation: after a while, or where it waits. What it was at (None: it was at its end)."""
    process, ready = start(case, folder, pause)
    try:
        if pause is not None:
            at = os.read(ready, 100).decode()  # empty when it is at its end
        else:
            at = "any moment"
            time.sleep(wait)
        os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
    finally:
        os.close(ready)
    if os.waitstatus_to_exitcode(status) > 0:
        return None, f"{case} failed"
    return (at if at and not (folder / "done.json").exists() else None), None


def reached(folder: Path) -> str:
    """Where the next process goes on."""
    whole = [
        p.name for p in RecentCheckpoints(folder, "training").paths() if (p / "manifest.json").exists()
    ]
    return (
        "the beginning" if not whole else "within an epoch" if "step" in whole[0] else "an epoch's end"
    )


def campaign(cases: Collection[str], kills: int, at_writes: int, seed: int = 1) -> dict[str, Any]:
    """So many kills, over as many computations as that takes."""
    draw = random.Random(seed)
    counts: Counter[str] = Counter()
    went_on: Counter[str] = Counter()
    of_case: Counter[str] = Counter()
    runs, failures, wrong = 0, 0, 0
    began = time.monotonic()
    torch.set_num_threads(1)  # a forked process has none of the threads that its parent has made
    with tempfile.TemporaryDirectory() as name:
        for case in cases:  # so that all is imported that it needs
            CASES[case](Path(name) / f"first-{case}")
        expected, lengths = {}, {}
        for case in cases:  # left in peace
            since = time.monotonic()
            process, ready = start(case, Path(name) / case)
            os.waitpid(process, 0)
            os.close(ready)
            lengths[case] = time.monotonic() - since
            expected[case] = (Path(name) / case / "done.json").read_text()
        writes = 0
        while counts.total() < kills:
            case = min(cases, key=lambda name: of_case[name])
            folder = Path(name) / f"run-{runs}"
            runs += 1
            most = counts.total() + max(1, kills // (3 * len(cases)))  # then it ends undisturbed
            while counts.total() < min(kills, most) and not (folder / "done.json").exists():
                at_write = draw.random() < (at_writes - writes) / max(1, kills - counts.total())
                pause = draw.randint(1, 120) if at_write else None
                # Half of the duration: the training ends late. A fit needs its first part in one go.
                longest = lengths[case] * (0.5 if case in TRAINED else 1.1)
                at, failed = killed_once(case, folder, pause, draw.uniform(0.02, longest))
                failures += failed is not None
                if failed:
                    break
                if at is not None:
                    counts[at] += 1
                    of_case[case] += 1
                    writes += at != "any moment"
                    if case in TRAINED:
                        went_on[reached(folder)] += 1
            if failures == 0 and not (folder / "done.json").exists():
                process, ready = start(case, folder)
                os.close(ready)
                failures += os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) != 0
            done = folder / "done.json"
            wrong += not (done.exists() and done.read_text() == expected[case])
            left = [p for p in folder.rglob(".*") if ".tokens" not in p.parts]  # a cache of texts
            failures += bool(left)
            if failures:
                print(f"{case}: failed; left {left}")
                break
    return {
        "kills": counts.total(), "at_writes": writes, "at": dict(sorted(counts.items())),
        "went_on_from": dict(went_on), "kills_of": dict(of_case), "runs": runs, "not_resumed": failures, "not_equal": wrong,
        "seconds": time.monotonic() - began,
    }  # fmt: skip


# Data and solvers


def make(folder: Path) -> str:
    return make_trajectories(systems.PendulumChain(2), folder, **DATA).hash


def states(solver: HybridSolver) -> str:
    u0 = solver.rate.sample(100, torch.Generator().manual_seed(5), torch.float64)
    solved = [solver.solve(u0, 5.0, guard=guard).u for guard in (False, True)]
    return hashlib.sha256(torch.stack(solved).numpy().tobytes()).hexdigest()


def killed(folder: Path, wait: float) -> int:
    """Let a process make data until there is more, and a while, kill it, count the shards there are."""
    count = lambda: len(list(folder.glob("shard-*")))
    before = count()
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.interrupted", "make", folder])
    while count() == before and process.poll() is None:
        time.sleep(0.01)
    time.sleep(wait)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return count()


def data_and_solver() -> dict[str, Any]:
    random.seed(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = make(folder / "whole")
        shards: list[int] = []
        while len(shards) < KILLS:
            count = killed(folder / "torn", random.uniform(0.0, 1.0))
            if count == DATA["trajectories"] // DATA["shard_size"]:  # it was quicker: start again
                for path in (folder / "torn").iterdir():
                    path.unlink()
                continue
            shards.append(count)
        torn = make(folder / "torn")
        print(f"shards after each kill: {shards}; hashes equal: {torn == whole}")
        command = [sys.executable, "-m", "benchmarks.interrupted", "fit", folder / "solver"]
        first = subprocess.run(command, capture_output=True, text=True)
        again = states(HybridSolver.load(folder / "solver"))
        equal = first.stdout.strip() == again
        print(f"fitted by a process that ended with {first.returncode}; states bit-equal: {equal}")
    return {"shards_after_kills": shards, "data_equal": torn == whole, "states_equal": equal}


def main() -> None:
    if sys.argv[1:2] == ["make"]:
        make(Path(sys.argv[2]))
        return
    if sys.argv[1:2] == ["fit"]:
        solver = fit(systems.PendulumChain(2), dt=0.1, horizon=5.0, trajectories=200, width=128)
        solver.save(sys.argv[2])
        print(states(solver), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    # First, because processes are forked while there are no threads.
    trainings = campaign(TRAINED, TRAININGS, AT_WRITES)
    print(f"trainings: {trainings}")
    others = campaign(OTHERS, OTHER_KILLS, 0)
    print(f"others: {others}")
    save("interrupted", {"trainings": trainings, "others": others, **data_and_solver()})


if __name__ == "__main__":
    main()
