"""Comparisons of solvers: results of `attractor compare`."""

import math
from collections.abc import Sequence
from pathlib import Path

from attractor.ode.comparison import COMPARISON, Comparison
from attractor.report import live
from attractor.report.page import Page
from attractor.report.runs.run import Run, read_json

ABOUT = (
    "Error against work of all methods, in one run on one machine. m is the number of plain steps that "
    "reach the error of a hybrid step, and m* is the cost of a hybrid step in plain steps: the hybrid "
    "pays if m > m*."
)


def read(path: Path, name: str) -> Run:
    """Read the run in a file such as compare.json."""
    content = read_json(path, COMPARISON)
    comparison = Comparison.from_json(content)
    finite = lambda x: x if math.isfinite(x) else None
    return Run(
        "comparison",
        name,
        path,
        numbers={
            "verdict": comparison.verdict,
            "mean square error": comparison.hybrid.error,
            "milliseconds": 1e3 * comparison.hybrid.seconds,
            "m": finite(comparison.m),
            "m*": comparison.m_star,
            "gain": finite(comparison.gain),
        },
        settings=comparison.about,
        versions=content.get("versions", {}),
        command=content.get("command", ""),
        content=comparison,
    )


def show(page: Page, runs: Sequence[Run]) -> None:
    """Show the verdict, work-precision pictures and a table of each run."""
    captions = {
        "seconds": "Lower and further left is better. The star is the hybrid solver; dotted lines are "
        "solvers with error control.",
        "rate_calls": "Error against calls of the rate; calls of the network are not counted.",
    }
    for run in runs:
        comparison: Comparison = run.content
        page.text(f"{run.name}: {comparison.verdict}.")
        for work, caption in captions.items():
            page.plot(f"Error against {work}", live.work_precision(comparison, work), caption=caption)
        rows = []
        for p in (comparison.hybrid, *comparison.points):
            setting = f"{'rtol' if p.adaptive else 'dt'} {p.setting:.2g}"
            rows.append([p.method, setting, p.error, 1e3 * p.seconds, p.rate_calls])
        page.table(["method", "setting", "mean square error", "milliseconds", "rate calls"], rows)
