"""The page of results and its pictures, made from the files of results alone."""

import math
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from attractor.core.files import check_target, write_text
from attractor.reproduce.experiment import PAPERS, SCALES, Experiment
from attractor.reproduce.results import Results, load
from attractor.reproduce.shelf import catalogue
from attractor.reproduce.verdict import number

HEAD = """# Results

Tables and figures of the three papers, run again on real data and judged: what the paper reports beside
what we measured, under the paper's protocol and under a fair one. *holds*: what the paper says is what
we see. *holds in direction*: the means go the paper's way, but by far less than it says, or by no more
than seeds differ (half of a 95 % interval: 4.3 standard errors of three seeds). *does not hold*: it is
not what we see. *cannot be tested here*: what it needs is not at hand, or a training of this length, or
so few seeds, cannot tell; the command is there. *so far*: seeds or arms that the verdict waits for are
still missing. Without a word: the runs are too small for a verdict, or not all there. Numbers are means
over seeds, "±" their standard deviation; of errors, which differ by factors, the geometric mean, and
"×÷" the factor of one standard deviation. Where language models have one seed, perplexities within
1.7 %, twice the deviation between two runs of other seeds, are level.

This page is made by `attractor reproduce --page docs/results.md` from the files in experiments/results.

"""

FEW = 8  # arms, up to which a sentence names them all
LOST = 1e39  # errors above are those of solvers that lost a trajectory

FINDINGS = {  # what a reader would quote, and the experiments that show it
    "Perplexity once the evaluation is the same for both models": ("pde-artefact",),
    "Perplexity once no token sees the future": ("pde-leak",),
    "AttNS and NeurVec once their inputs are normalised": ("attns-normalised",),
    "TNS once its value before training is shown": ("stepnet-initial-cifar100", "stepnet-initial"),
}


def largest(experiment: Experiment, folder: Path | str) -> Results | None:
    """The runs of the largest scale that can be judged, else of the largest that has some."""
    scales = [s for s in reversed(SCALES) if s in experiment.scales and s != "smoke"]
    found = [load(experiment, scale, folder) for scale in scales]
    found = [results for results in found if any(results.runs.values())]
    return next((r for r in found if r.complete), found[0] if found else None)


def state(experiment: Experiment, folder: Path | str) -> str:
    """How far it is, in a few words."""
    found = largest(experiment, folder)
    if found is None:
        return "no data" if experiment.missing else "not yet"
    done = sum(len(runs) for runs in found.runs.values())
    missing = len(found.missing())
    return f"{found.scale}, {done}" if not missing else f"{found.scale}, {done} of {done + missing}"


def worded(experiment: Experiment, results: Results | None) -> str:
    """The verdict's word, "so far" where runs are missing; nothing without a verdict."""
    verdict = experiment.verdict(results)
    if verdict is None:
        return ""
    partly = results is not None and results.complete and results.partly
    return f"{verdict.word} so far" if partly else verdict.word


def rows(experiment: Experiment, results: Results) -> list[dict[str, Any]]:
    """A row an arm: the paper's number, ours with spread and seeds, and the other metrics' means."""
    return [
        {
            "arm": arm,
            "paper": experiment.numbers.get(arm),
            "mean": results.typical(arm) if experiment.logarithmic else results.mean(arm),
            "spread": results.factor(arm) if experiment.logarithmic else results.spread(arm),
            "told": cell(experiment, results, arm),
            "seeds": len(results.values(arm)),
            "others": {m: other(experiment, results, arm, m) for m in experiment.others},
        }
        for arm in results.arms
        if results.runs.get(arm)
    ]


def cell(experiment: Experiment, results: Results, arm: str) -> str:
    """An arm's number with its spread over seeds."""
    if not experiment.logarithmic:
        return told(results.mean(arm), results.spread(arm))
    values = results.values(arm)
    lost = sum(x >= LOST for x in values)
    if lost:
        return "lost" if lost == len(values) else f"lost at {lost} of {len(values)} seeds"
    mean, factor = results.typical(arm), results.factor(arm)
    return number(mean) if factor is None or math.isnan(mean) else f"{number(mean)} ×÷ {factor:.2g}"


def other(experiment: Experiment, results: Results, arm: str, metric: str) -> float:
    """A further metric's mean, as the experiment's own is taken; NaN if the arm does not have it."""
    if not all(metric in run["metrics"] for run in results.runs[arm].values()):
        return math.nan
    factors = experiment.logarithmic and min(results.values(arm, metric)) > 0
    return results.typical(arm, metric) if factors else results.mean(arm, metric)


def known(x: float) -> str:
    """A number, a dash where there is none, "lost" where some seed's trajectories were."""
    return "–" if math.isnan(x) else "lost" if x >= LOST / 100 else number(x)


def told(mean: float, spread: float | None) -> str:
    """A number with its spread, both to the same place where it is not very small or large."""
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
    """What makes these results."""
    device = " --device cuda" if scale == "gpu" else ""
    data = " --data FOLDER" if experiment.data else ""
    return f"attractor reproduce {shlex.quote(experiment.name)} --scale {scale}{device}{data}"


def section(experiment: Experiment, folder: Path | str, pictures: Path) -> str:
    """An experiment on the page."""
    found = largest(experiment, folder)
    lines = [f"### {experiment.name}: {experiment.place}\n", f"*{experiment.claim}*\n"]
    verdict = experiment.verdict(found)
    if verdict is not None:
        lines.append(f"**{worded(experiment, found)}**: {verdict.why}.\n")
    elif found is None:
        lines.append("**not run yet**\n")
    elif found.complete:
        lines.append("**not judged**: this is too small for a verdict.\n")
    else:
        lines.append("**not judged yet**: runs are missing.\n")
    if found is not None:
        unit = f", {experiment.unit}" if experiment.unit else ""
        head = ["", "paper", f"ours ({experiment.metric}{unit})", "seeds", *experiment.others]
        body = [
            [
                row["arm"],
                "" if row["paper"] is None else number(row["paper"]),
                row["told"],
                str(row["seeds"]),
                *map(known, row["others"].values()),
            ]
            for row in rows(experiment, found)
        ]
        lines.append(_table(head, body))
        minutes = found.seconds() / 60
        time = f"{minutes:.0f} min" if minutes >= 2 else f"{found.seconds():.0f} s"
        where = ", ".join(map(literal, found.devices()))
        each = [run.get("made_by") for runs in found.runs.values() for run in runs.values()]
        others = sorted({script for script in each if script})
        by = ", ".join(map(code, others)) + " of an earlier version, since removed"
        part = "all" if all(each) else f"{len(each) - each.count(None)} of {len(each)}"
        taken = f"; {part} made by {by}" if others else ""
        lines.append(f"`{command(experiment, found.scale)}`: {time} of runs on {where}{taken}.\n")
        lines += larger(experiment, found, folder)
        drawn = pictures / f"{experiment.name.replace('-', '_')}.png"
        if experiment.picture is not None and drawn.exists():
            lines.append(f"![{experiment.place}]({pictures.name}/{drawn.name})\n")
    elif not experiment.missing:
        scale = next((s for s in reversed(SCALES) if s in experiment.scales), "smoke")
        lines.append(f"`{command(experiment, scale)}`\n")
    notes = [experiment.note, experiment.scales[found.scale].note if found is not None else ""]
    if any(notes):
        lines.append(" ".join(filter(None, notes)) + "\n")
    return "\n".join(lines)


def larger(experiment: Experiment, found: Results, folder: Path | str) -> list[str]:
    """What there is of a larger scale, which is not complete: it may say otherwise."""
    lines = []
    for scale in SCALES[SCALES.index(found.scale) + 1 :]:
        if scale not in experiment.scales:
            continue
        more = load(experiment, scale, folder)
        each = [[row["arm"], row["told"], str(row["seeds"])] for row in rows(experiment, more)]
        if len(each) > FEW:
            lines.append(f"Of scale {scale} there are so far:\n")
            lines.append(_table(["", f"ours ({experiment.metric})", "seeds"], each))
        elif each:
            told = "; ".join(f"{arm} {value}" for arm, value, _ in each)
            lines.append(f"Of scale {scale} there are so far: {told}.\n")
    return lines


def findings(everything: dict[str, Experiment], folder: Path | str, pictures: Path) -> list[str]:
    """Return the findings whose experiments have been run, with their pictures."""
    parts = []
    for title, names in FINDINGS.items():
        shown = [everything[name] for name in names if name in everything]
        told = [text for e in shown if (text := seen(e, title, folder, pictures, len(shown) > 1))]
        if told:
            parts += [f"### {title}\n\nThe paper: *{shown[0].claim}*\n", *told]
    return ["## Findings\n", *parts] if parts else []


def seen(experiment: Experiment, title: str, folder: Path | str, pictures: Path, named: bool) -> str:
    """What an experiment says on a finding, with its picture; nothing without a verdict.

    Args:
        named: say on which data, since another experiment stands beside it.
    """
    found = largest(experiment, folder)
    verdict = experiment.verdict(found)
    if found is None or verdict is None:
        return ""
    where = f"{max(map(len, found.runs.values()))} seeds, scale {found.scale}"
    if named:
        where = f"{experiment.place.split(', ')[-1]}, {where}"
    text = (
        f"Seen ({where}): **{worded(experiment, found)}**. {verdict.why[0].upper()}{verdict.why[1:]}.\n"
    )
    text += "".join(f"\n{line}" for line in larger(experiment, found, folder))
    drawn = pictures / f"{experiment.name.replace('-', '_')}.png"
    if drawn.exists():
        text += f"\n![{title}]({pictures.name}/{drawn.name})\n"
    return f"{text}\nNumbers: [{experiment.name}](#{anchor(experiment)}).\n"


def page(folder: Path | str, pictures: Path) -> str:
    """The whole text."""
    everything = catalogue()
    head = ["", "claim", "verdict", "runs"]
    body = []
    for e in everything.values():
        word = worded(e, largest(e, folder))
        body.append([f"[{e.name}](#{anchor(e)})", e.claim, word, state(e, folder)])
    parts = [HEAD, *findings(everything, folder, pictures), "## Everything\n"]
    parts.append(_table(head, body, numbers=False))
    for paper, title in PAPERS.items():
        parts.append(f"\n## {title}\n")
        parts += [section(e, folder, pictures) for e in everything.values() if e.paper == paper]
    return "\n".join(parts).rstrip() + "\n"


def write_page(path: Path | str, folder: Path | str, draw: bool = True) -> list[Path]:
    """Write the page, and its pictures into a folder ``results`` beside it; what was written.

    An experiment that lacks runs has no picture, and what there was of former ones is removed.
    """
    path = Path(path)
    check_target(path)
    pictures, made = path.parent / "results", []
    if draw:
        from attractor.report.figures import write

        for experiment in catalogue().values():
            found = largest(experiment, folder)
            target = pictures / f"{experiment.name.replace('-', '_')}.png"
            if found is not None and experiment.picture is not None and found.complete:
                made.append(write(experiment.picture(found), target))
            else:
                target.unlink(missing_ok=True)  # of runs that are no longer there
    return [*made, write_text(path, page(folder, pictures))]


def anchor(experiment: Experiment) -> str:
    """Where it is on the page."""
    kept = [c for c in f"{experiment.name}: {experiment.place}".lower() if c.isalnum() or c in " -_"]
    return "".join(kept).replace(" ", "-")


def _table(head: list[str], body: Iterable[list[str]], numbers: bool = True) -> str:
    lines = [head, ["---"] + ["---:" if numbers else "---"] * (len(head) - 1), *body]
    escaped = lambda text: text.replace("|", r"\|")
    return "".join(f"| {' | '.join(map(escaped, line))} |\n" for line in lines)
