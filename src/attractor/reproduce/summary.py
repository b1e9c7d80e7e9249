"""Summaries of experiments: claims and rows of tables, in words and formatted numbers."""

import math
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from attractor.reproduce.effects import EXACT, number
from attractor.reproduce.experiment import SCALES, Experiment
from attractor.reproduce.results import Results, load
from attractor.reproduce.verdict import Verdict

LOST = 1e39  # larger errors are those of solvers with a non-finite trajectory


def largest(experiment: Experiment, folder: Path | str) -> Results | None:
    """Return the results at the largest scale with complete runs, else with any runs; None for none."""
    scales = [s for s in reversed(SCALES) if s in experiment.scales and s != "smoke"]
    candidates = [load(experiment, scale, folder) for scale in scales]
    candidates = [results for results in candidates if any(results.runs.values())]
    return next((r for r in candidates if r.complete), candidates[0] if candidates else None)


def state(experiment: Experiment, folder: Path | str) -> str:
    """Return the scale and the number of runs of an experiment, in a few words."""
    results = largest(experiment, folder)
    if results is None:
        return "no data" if experiment.missing else "not yet"
    run_count = sum(len(runs) for runs in results.runs.values())
    missing_count = len(results.missing())
    total = f" of {run_count + missing_count}" if missing_count else ""
    return f"{results.scale}, {run_count}{total}"


def worded(experiment: Experiment, results: Results | None) -> str:
    """Return the direction, with "so far" if runs are missing; empty without a verdict."""
    verdict = experiment.verdict(results)
    if verdict is None:
        return ""
    partly = results is not None and results.complete and results.partly
    return f"{verdict.direction} so far" if partly else verdict.direction


def sizes_of(verdict: Verdict | None) -> str:
    """Return the sizes of a verdict and its parts, in a few words; empty if the paper has no numbers."""
    return "" if verdict is None else "; ".join(filter(None, (part.size for part in verdict.claims)))


def claims(experiment: Experiment, folder: Path | str) -> list[dict[str, Any]]:
    """Return one row per claim of an experiment, as in the page of claims.

    An experiment without a verdict has one row without a direction.
    """
    results = largest(experiment, folder)
    verdict = experiment.verdict(results)
    scale = None if results is None else experiment.scales[results.scale]
    partly = results is not None and results.complete and results.partly
    common = {
        "experiment": experiment.name,
        "scale": None if results is None else results.scale,
        "training": scale.training if scale is not None else "",
        "complete": not partly,
    }
    if verdict is None:
        small = results is not None and results.complete
        why = "runs are too small to judge" if small else "runs are missing"
        return [{**common, "claim": experiment.claim.rstrip("."), "direction": None, "why": why}]
    return [{**common, **_claim(experiment, part, results)} for part in verdict.claims]


def _claim(experiment: Experiment, verdict: Verdict, results: Results | None) -> dict[str, Any]:
    effect = verdict.headline
    row: dict[str, Any] = {
        "claim": verdict.claim or experiment.claim.rstrip("."),
        "direction": verdict.direction, "size": verdict.size, "caveat": verdict.caveat,
        "why": verdict.why, "paper": "", "ours": "", "seeds": None, "tally": verdict.tally(),
    }  # fmt: skip
    if effect is None or results is None:
        return row
    if experiment.unit == "%" and not effect.unit and not effect.ratio:
        effect = replace(effect, unit="points")
    unit = f" {effect.unit}" if effect.unit else ""
    if effect.paper is not None:
        row["paper"] = f"{'factor ' * effect.ratio}{effect.format(effect.paper)}{unit}"
    low, high = effect.interval()
    seeds = max(map(len, results.runs.values())) if effect.deviation == EXACT else len(effect.samples)
    row |= {
        "ours": verdict.measurement or str(effect), "value": effect.value, "low": low, "high": high,
        "effect": effect.paper, "seeds": seeds,
    }  # fmt: skip
    return row


def rows(experiment: Experiment, results: Results) -> list[dict[str, Any]]:
    """Return one row per arm: the paper's number, ours with spread and seeds, and other metrics."""
    return [
        {
            "arm": arm,
            "paper": experiment.numbers.get(arm),
            "mean": results.typical(arm) if experiment.logarithmic else results.mean(arm),
            "spread": results.factor(arm) if experiment.logarithmic else results.spread(arm),
            "text": cell(experiment, results, arm),
            "seeds": len(results.values(arm)),
            "others": {m: other(experiment, results, arm, m) for m in experiment.others},
        }
        for arm in results.arms
        if results.runs.get(arm)
    ]


def cell(experiment: Experiment, results: Results, arm: str) -> str:
    """Format an arm's metric with its spread over seeds."""
    if not experiment.logarithmic:
        return mean_text(results.mean(arm), results.spread(arm))
    values = results.values(arm)
    lost_count = sum(x >= LOST for x in values)
    if lost_count:
        return "lost" if lost_count == len(values) else f"lost at {lost_count} of {len(values)} seeds"
    mean, factor = results.typical(arm), results.factor(arm)
    return number(mean) if factor is None or math.isnan(mean) else f"{number(mean)} ×÷ {factor:.2g}"


def other(experiment: Experiment, results: Results, arm: str, metric: str) -> float:
    """Return the mean of a further metric, geometric if the experiment's is; NaN if an arm lacks it."""
    if not all(metric in run["metrics"] for run in results.runs[arm].values()):
        return math.nan
    factors = experiment.logarithmic and min(results.values(arm, metric)) > 0
    return results.typical(arm, metric) if factors else results.mean(arm, metric)


def metric_text(x: float) -> str:
    """Format a number: a dash for NaN, and "lost" for errors of solvers with non-finite trajectories."""
    return "–" if math.isnan(x) else "lost" if x >= LOST / 100 else number(x)


def mean_text(mean: float, spread: float | None) -> str:
    """Format a mean with its spread, with equally many decimals unless it is very small or large."""
    if math.isnan(mean):
        return "NaN"
    if spread is None:
        return number(mean)
    if 0.01 <= abs(mean) < 1e4 and spread > 0:
        places = min(max(0, 1 - math.floor(math.log10(spread))), 4)
        return f"{mean:.{places}f} ± {spread:.{places}f}"
    return f"{number(mean)} ± {number(spread)}"


def literal(text: str) -> str:
    """Return a string of a results file as one line of Markdown without any markup."""
    return re.sub(r"([\\`*\[\]{}()<>&$|~#!^@%])", r"\\\1", " ".join(text.split()))


def code(text: str) -> str:
    """Return a string of a results file as an inline code span of Markdown."""
    return f"`{' '.join(text.replace('`', ' ').split())}`"


def command(experiment: Experiment, scale: str) -> str:
    """Return the command that makes the results of an experiment at a scale."""
    device = " --device cuda" if scale == "gpu" else ""
    data = " --data FOLDER" if experiment.data else ""
    return f"attractor reproduce {shlex.quote(experiment.name)} --scale {scale}{device}{data}"
