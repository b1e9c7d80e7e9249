"""Whether a clean clone gives the numbers that are committed.

    python -m benchmarks.again pde-theorem2 pde-table3 --data FOLDER

Clones this repository's last commit into a temporary folder, runs experiments there at scale cpu from nothing,
and compares every number they measure with that in experiments/results. Times are left out.
"""

import argparse
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attractor.reproduce import find
from attractor.reproduce import results as kept
from benchmarks.results import save

ROOT = Path(__file__).parents[1]
TIMES = {"step"}  # measured, not computed
ROUNDING = 1e-14  # numbers below are what float64 leaves of 0


def made_in_a_clone(name: str, data: str | None, workers: int, place: Path) -> kept.Results:
    """Runs of an experiment of the clone in a folder."""
    given = ["--data", str(Path(data).absolute())] if data else []
    command = ["reproduce", name, "--scale", "cpu", "--out", "again", "--workers", str(workers), *given]
    start = "from attractor.cli import main; main()"
    surroundings = {**os.environ, "PYTHONPATH": str(place / "src"), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", start, *command], cwd=place, env=surroundings, check=True)
    return kept.load(find(name), "cpu", place / "again")


def numbers(run: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Every number of a run that does not depend on the machine's speed; NaN where it was not finite."""
    for name, value in run["metrics"].items():
        if name not in TIMES:
            yield name, math.nan if value is None else value
    for name, values in run.get("curves", {}).items():
        for i, value in enumerate(values):
            if isinstance(value, int | float):
                yield f"{name}[{i}]", value


def compared(name: str, ours: kept.Results, again: kept.Results) -> dict[str, Any]:
    """How many numbers are equal, and how far the others are from those that are committed."""
    pairs, devices = [], set()
    for arm, seeds in again.runs.items():
        for seed, run in seeds.items():
            before = dict(numbers(ours.runs[arm][seed]))
            pairs += [(before[k], x, k.split("[")[0]) for k, x in numbers(run)]
            devices.add((ours.runs[arm][seed]["device"], run["device"]))
    off = [(_difference(a, b), name) for a, b, name in pairs]
    largest, of = max(off)
    return {
        "experiment": name,
        "runs": sum(map(len, again.runs.values())),
        "numbers": len(off),
        "equal": sum(x == 0 for x, _ in off),
        "largest": largest,
        "of": of if largest else None,
        "devices": sorted(devices),
    }


def _difference(a: float, b: float) -> float:
    """As a part of the larger; 0 if both are rounding errors."""
    if str(a) == str(b) or max(abs(a), abs(b)) < ROUNDING:
        return 0.0
    off = abs(a - b) / max(abs(a), abs(b))
    return off if math.isfinite(off) else math.inf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+")
    parser.add_argument("--data", default=os.environ.get("ATTRACTOR_DATA"))
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "clone"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(place)], check=True)
        for name in args.names:
            committed = kept.load(find(name), "cpu", place / "experiments" / "results")
            again = made_in_a_clone(name, args.data, args.workers, place)
            rows.append(compared(name, committed, again))
            print(rows[-1])
    save("again", {"rows": rows})


if __name__ == "__main__":
    main()
