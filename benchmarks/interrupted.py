"""Nothing is lost: making data is killed at random ten times and resumed; a solver outlives its process.

The data must have the hash of data made in one go. The solver is fitted and saved by one process, which
is then killed; another loads it, and its states must have the same hash.
"""

import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from attractor import HybridSolver, fit, systems
from attractor.ode import make_trajectories
from benchmarks.results import save

KILLS = 10
DATA = dict(count=600, dt=0.1, horizon=5.0, fine_dt=0.0025, shard_size=10)


def make(folder: Path) -> str:
    return make_trajectories(systems.PendulumChain(2), folder, **DATA).hash


def states(solver: HybridSolver) -> str:
    u0 = solver.rate.sample(100, torch.Generator().manual_seed(5), torch.float64)
    solved = [solver.solve(u0, 5.0, guard=guard).u for guard in (False, True)]
    return hashlib.sha256(torch.stack(solved).numpy().tobytes()).hexdigest()


def killed(folder: Path, wait: float) -> int:
    """Let a process make data for a while, kill it, count the shards there are."""
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.interrupted", "make", folder])
    time.sleep(wait)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return len(list(folder.glob("shard-*")))


def main() -> None:
    if sys.argv[1:2] == ["make"]:
        make(Path(sys.argv[2]))
        return
    if sys.argv[1:2] == ["fit"]:
        solver = fit(systems.PendulumChain(2), dt=0.1, horizon=5.0, trajectories=200, width=128)
        solver.save(sys.argv[2])
        print(states(solver), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    random.seed(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = make(folder / "whole")
        shards = []
        while len(shards) < KILLS:
            count = killed(folder / "torn", random.uniform(2.0, 4.5))
            if count == DATA["count"] // DATA["shard_size"]:  # it was quicker: start again
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
    save(
        "interrupted", {"shards_after_kills": shards, "data_equal": torn == whole, "states_equal": equal}
    )


if __name__ == "__main__":
    main()
