"""Error control on ten equations: the time to two errors, beside SciPy and diffrax.

Run ``python -m benchmarks.control``. Every library solves the same rate, a function of torch, with the
largest tolerance that reaches the error on the same trajectories: attractor with ``compile=True`` and a step
size for each trajectory; SciPy's DOP853 and diffrax, to which the rate is translated, for the batch as one
state, which is the fastest way to use them. Times are the least of three solves after the first one.
"""

import argparse
import importlib.util
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor

import attractor as at
from benchmarks.cases import add_options, machine_of, name_of, run
from benchmarks.results import save
from benchmarks.tune import CASES, Peers

NAMES = (
    "elastic pendulum", "2-link pendulum", "Lorenz", "van der Pol", "Hénon-Heiles", "three bodies", "planets",
    "Lotka-Volterra sweep", "FitzHugh-Nagumo sweep", "rigid body",
)  # fmt: skip
ERRORS = (1e-6, 1e-9)
BATCHES = (1, 1_000)
SCHEMES = ("tsit5", "dop853")
LIMIT = 60.0  # seconds after which the search for a tolerance is given up


def ours(peers: Peers, scheme: str) -> dict[str, float] | None:
    """Return the time of a scheme with error control, compiled, and that of the first call."""

    def solve(tolerance: float) -> Tensor | None:
        solved = at.evolve(
            peers.case.rate, peers.u0, [0.0, peers.case.horizon], scheme, rtol=tolerance,
            atol=0.1 * tolerance * peers.smallest, parameters=peers.p, compile=True,
        )  # fmt: skip
        return solved.final if bool(solved.ok.all()) else None

    began = time.perf_counter()
    solve(1e-2)
    first = time.perf_counter() - began
    result = peers.largest_tolerance(solve)
    if result is None:
        return None
    times = []
    for _ in range(3):
        began = time.perf_counter()
        solve(result["tolerance"])
        times.append(time.perf_counter() - began)
    return {**result, "seconds": min(times), "first": first}


def measure(name: str, error: float, batch: int) -> dict[str, Any]:
    """One row of the table."""
    with torch.no_grad():
        peers = Peers(CASES[name], error, batch, LIMIT)
        row: dict[str, Any] = {"case": name, "error": error, "batch": batch}
        row["attractor"] = {scheme: ours(peers, scheme) for scheme in SCHEMES}
        row["scipy"] = {"DOP853": peers.scipy("DOP853")}
        if importlib.util.find_spec("diffrax"):
            row["diffrax"] = {method: peers.diffrax(method) for method in ("Tsit5", "Dopri8")}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(NAMES))
    add_options(parser, "out/control-benchmark", workers=1)
    options = parser.parse_args()
    cases = {
        name_of(name, f"{error:g}", batch): partial(measure, name, error, batch)
        for batch in BATCHES
        for error in ERRORS
        for name in options.only
    }
    rows = run("control", cases, options)
    if rows is not None:
        save("control", {"threads": options.threads, "rows": rows, "machine": machine_of(rows)})


if __name__ == "__main__":
    main()
