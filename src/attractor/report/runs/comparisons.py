"""Comparisons of solvers: what `attractor compare` writes."""

import math
from collections.abc import Sequence
from pathlib import Path

from attractor.ode.comparison import COMPARISON, Comparison
from attractor.report import live
from attractor.report.page import Page
from attractor.report.runs.run import Run, read_json

ABOUT = (
    "Error against work, everybody in one run on one machine. m is how many plain steps reach the error "
    "of a hybrid step, m* is what a hybrid step costs in plain ones: it pays if m > m*."
)


def read(path: Path, name: str) -> Run:
    """The run in a file such as compare.json."""
    told = read_json(path, COMPARISON)
    found = Comparison.from_json(told)
    finite = lambda x: x if math.isfinite(x) else None
    return Run(
        "comparison",
        name,
        path,
        numbers={
            "verdict": found.verdict,
            "mean square error": found.hybrid.error,
            "milliseconds": 1e3 * found.hybrid.seconds,
            "m": finite(found.m),
            "m*": found.m_star,
            "gain": finite(found.gain),
        },
        settings=found.about,
        versions=told.get("versions", {}),
        command=told.get("command", ""),
        content=found,
    )


def show(page: Page, runs: Sequence[Run]) -> None:
    """The verdict, a work-precision picture and a table, of each."""
    told = {
        "seconds": "Lower and further left is better: the star is the hybrid solver. Dotted lines are "
        "solvers with error control.",
        "rate_calls": "The same against the calls of the rate; the network is not counted.",
    }
    for run in runs:
        found: Comparison = run.content
        page.text(f"{run.name}: {found.verdict}.")
        for work, caption in told.items():
            page.plot(f"Error against {work}", live.work_precision(found, work), caption=caption)
        rows = []
        for p in (found.hybrid, *found.points):
            setting = f"{'rtol' if p.adaptive else 'dt'} {p.setting:.2g}"
            rows.append([p.method, setting, p.error, 1e3 * p.seconds, p.rate_calls])
        page.table(["method", "setting", "mean square error", "milliseconds", "rate calls"], rows)
