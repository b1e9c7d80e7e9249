"""Tables and figures of the papers: results of `attractor reproduce`."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attractor.report import live
from attractor.report.page import Page
from attractor.report.runs.run import Run, read_json
from attractor.reproduce import find
from attractor.reproduce.page import chart_title
from attractor.reproduce.results import FILE, Results, fault
from attractor.reproduce.results import read as read_runs
from attractor.reproduce.summary import command, mean_text, rows, sizes_of, worded

ABOUT = (
    "A reproduction of a table or figure of a paper: the numbers of the paper, our numbers, and a "
    "verdict. The spread is the standard deviation over seeds."
)


def read(path: Path, name: str) -> Run:
    """Read the run in a file such as stepnet_table1/smoke.json."""
    content = read_json(path, FILE)
    experiment, scale = find(content["experiment"]), content["scale"]
    runs = read_runs(path, experiment.name, scale)
    for arm, by_seed in runs.items():
        for seed, run in by_seed.items():
            if wrong := fault(run, experiment.metric if arm in experiment.arms else None):
                raise ValueError(f"{path}: {wrong}, in the run of arm {arm[:80]!r} and seed {seed}")
    seeds = sorted({seed for by_seed in runs.values() for seed in by_seed})
    results = Results(
        experiment.name, scale, experiment.metric, experiment.arms_of(scale), seeds, runs,
        experiment.extra, experiment.numbers, experiment.logarithmic,
    )  # fmt: skip
    verdict = experiment.verdict(results)
    all_runs = [run for by_seed in runs.values() for run in by_seed.values()]
    versions = {k: v for run in all_runs for k, v in run.get("versions", {}).items()}
    return Run(
        "reproduction",
        f"{experiment.name}, {scale}",
        path,
        numbers={
            "verdict": worded(experiment, results) or "not judged at this scale",
            "size": sizes_of(verdict) or None,
            "why": verdict.why if verdict else None,
            "runs": len(all_runs),
            "seconds": results.seconds(),
        },
        settings={
            "experiment": experiment.name,
            "place": experiment.place,
            "scale": scale,
            "seeds": len(seeds),
            "device": ", ".join(results.devices()),
            **experiment.base,
            **experiment.scale(scale).config,
        },
        versions=versions,
        command=command(experiment, scale),
        content=(experiment, results),
    )


def show(page: Page, runs: Sequence[Run]) -> None:
    """Show our numbers and those of the paper, and the picture of the experiment if it has one."""
    for run in runs:
        experiment, results = run.content
        page.text(f"{experiment.name}, scale {results.scale}. The paper: {experiment.claim}")
        why = f": {run.numbers['why']}" if run.numbers["why"] else ""
        size = f" (size {run.numbers['size']})" if run.numbers["size"] else ""
        page.text(f"Verdict: {run.numbers['verdict']}{size}{why}.")
        table = rows(experiment, results)
        unit = f", {experiment.unit}" if experiment.unit else ""
        head = ["", "paper", f"ours ({experiment.metric}{unit})", "seeds", *experiment.others]
        columns = [
            (row["arm"], row["paper"], mean_text(row["mean"], row["spread"]), row["seeds"])
            for row in table
        ]
        others = [tuple(row["others"].values()) for row in table]
        page.table(head, [a + b for a, b in zip(columns, others)])
        _bars(page, experiment, table)
        if experiment.picture is not None and results.complete:
            page.figure(chart_title(experiment, results), experiment.picture(results))
        if experiment.note:
            page.text(experiment.note)


def _bars(page: Page, experiment: Any, table: list[dict[str, Any]]) -> None:
    number = lambda x: x if x is not None and math.isfinite(x) else None
    names = [row["arm"] for row in table]
    bars = {"ours": [number(row["mean"]) for row in table], "paper": [row["paper"] for row in table]}
    bars = {name: values for name, values in bars.items() if any(v is not None for v in values)}
    data: list[dict[str, Any]] = [
        {"type": "bar", "name": name, "x": names, "y": values, "marker": {"color": live.COLORS[3 * i]}}
        for i, (name, values) in enumerate(bars.items())
    ]
    if "ours" in bars:
        data[0]["error_y"] = {"type": "data", "array": [number(row["spread"]) or 0.0 for row in table]}
    sizes = [abs(v) for values in bars.values() for v in values if v]
    axis = "y" if sizes and max(sizes) > 100 * min(sizes) else ""  # logarithmic
    layout = {**live.layout("", experiment.metric, axis), "barmode": "group"}
    if sizes:
        page.plot(f"{experiment.name}, ours and the paper's", {"data": data, "layout": layout}, 360)
