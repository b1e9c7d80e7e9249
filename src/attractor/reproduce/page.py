"""Write the pages of results and claims, with their pictures, from the files of results."""

import math
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from attractor.reproduce.experiment import SCALES, Experiment
from attractor.reproduce.results import Results, load
from attractor.reproduce.shelf import catalogue, papers, uncovered
from attractor.reproduce.verdict import DIRECTIONS, EXACT, Verdict, combine, number
from attractor.storage.files import check_target, write_text

HEAD = """# Results

Tables and figures of the papers, run again on real data: what the paper reports beside what we
measured, under the paper's protocol and under a fair one, with the verdict on each. [The
claims](claims.md) are one table per paper; this page is its appendix. Numbers are means over seeds,
"±" their standard deviation; of errors, which differ by factors, the geometric mean, and "×÷" the
factor of one standard deviation.

This page is made by `attractor reproduce --page docs/results.md` from the files in
experiments/results.

"""

RULES = """## How claims are judged

Direction and size are separate questions.

**Direction.** A claim is one comparison or several, each an effect that is positive if it goes the
paper's way. One comparison is *supported* if the 95 % confidence interval of the effect lies above
0, *contradicted* if it lies below 0, and else *inconclusive*: a significant lag is treated like a
significant lead, and an insignificant lag like an insignificant lead. The interval is Student's,
over the differences at the same seeds; of one seed it takes the deviation of other runs of the same
kind, if there are any, and their degrees of freedom. A claim is supported if all its comparisons
are, each at 95 %, and contradicted if one of them is, at 95 % for all of them together
(Bonferroni). So either word is wrong at most once in forty times. A training that is much shorter
than the paper's, and a check that cannot fail, leave a claim inconclusive. *Not run: no data* means
that what the experiment needs is not at hand. "So far": seeds or arms are still missing.

**Size.** The measured share of the claimed effect, with its 95 % interval; ratios are compared by
their logarithms. *Smaller*: the interval lies below 100 %. *Larger*: it lies above. *As claimed*:
it contains 100 % and not 0. *Opposite*: it lies below 0. *Unclear*: it contains 0 and 100 %. Where
the paper prints no number there is no size. Of a claim with several comparisons the table shows
their mean, or the one with the least lead where something is said to be best.

**These rules were changed after the results were known.** Before, one word was given for both
questions: "holds", "holds in direction" for an insignificant lead or a small effect, "cannot be
tested" for an insignificant lag, "does not hold". Under equal arms half of all verdicts then
favoured the paper. No run was made or left out for the change. Changed beside that: an arm that is
said to be best is compared with every other one; a training that is too short speaks for neither
side, where it could support a claim in direction; epochs of half of the data count as epochs
(attns-fig4); what untrained networks pass as well (stepnet-fig6) and a bound that no error could
exceed (attns-theorem51) support nothing; the Longformer is judged where no token sees the future
(pde-table3); thresholds of single runs are Student's; claims with several parts are judged part by
part. [A simulation with equal arms](trust.md#verdicts-under-equal-arms) shows how often each word
occurs by chance.

Of the 50 experiments of that day the former rules gave 9 "holds", 12 "holds in direction", 10 "does
not hold", 16 "cannot be tested" and 3 no word; the present ones gave 11 supported, 10 contradicted,
22 inconclusive, 4 not run and 3 no word. From "does not hold" to supported went pde-table3, to
inconclusive pde-table1; from "holds" to inconclusive attns-theorem51 and stepnet-fig6; to
contradicted went attns-fig4 ("cannot be tested") and pde-mixing ("holds in direction"). Of the
other 11 "holds in direction" 3 are supported and 8 inconclusive.

"""

LEVELS = ("with all of its training", "partly", "on small data", "not at all")
COVERAGE = """## Coverage

The tables and figures of the papers that show results. *With all of its training*: as long as the
paper's, as far as it is known, with all arms that are judged. *Partly*: a shorter training, a smaller
model, or some of the rows. *On small data*: on data that come with the library, too small for a verdict.
"""

CLAIMS = """# Claims

What the papers say, and what we measured. Each row is a claim; its name leads to all numbers. [How
claims are judged](#how-claims-are-judged) is below the tables. An effect is positive, or a factor
above 1, if it goes the paper's way; brackets are 95 % confidence intervals. "Training" is the share
of the paper's training: of its epochs, or for language models of the tokens of its 20 epochs. The
AttNS paper prints no epochs; 100 % are the 500 of the code of NeurVec, which it names.

This page is made by `attractor reproduce --page docs/results.md` from the files in
experiments/results.

"""

FEW = 8  # maximum number of arms that are listed in a sentence, not in a table
LOST = 1e39  # larger errors are those of solvers with a non-finite trajectory

FINDINGS = {  # headings of the main findings, and the experiments that show them
    "Perplexity once the evaluation is the same for both models": ("pde-artefact",),
    "Perplexity once no token sees the future": ("pde-leak",),
    "AttNS and NeurVec once their inputs are normalised": ("attns-normalised",),
    "TNS once its value before training is shown": ("stepnet-initial-cifar100", "stepnet-initial"),
}


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
        row["paper"] = f"{'factor ' * effect.ratio}{effect.shown(effect.paper)}{unit}"
    low, high = effect.interval()
    seeds = max(map(len, results.runs.values())) if effect.deviation == EXACT else len(effect.samples)
    row |= {
        "ours": verdict.measurement or str(effect), "value": effect.value, "low": low, "high": high,
        "effect": effect.paper, "seeds": seeds,
    }  # fmt: skip
    return row


def claims_page(folder: Path | str) -> str:
    """Return the page with a table of claims per paper."""
    everything = catalogue()
    parts = [CLAIMS]
    columns = ("the paper says", "its effect", "ours [95 % interval]", "training", "seeds")
    head = ["", *columns, "direction", "size"]
    counts: dict[str, dict[str, int]] = {}
    for paper, title in titles(everything).items():
        body, notes = [], []
        tally = counts.setdefault(title, dict.fromkeys((*DIRECTIONS, "not judged"), 0))
        for e in everything.values():
            if e.paper != paper:
                continue
            for i, row in enumerate(claims(e, folder)):
                tally[row["direction"] or "not judged"] += 1
                name = "" if i else f"[{e.name.removeprefix(f'{paper}-')}](results.md#{anchor(e)})"
                mark = ""
                if row.get("caveat"):
                    if row["caveat"] not in notes:
                        notes.append(row["caveat"])
                    mark = f" ({notes.index(row['caveat']) + 1})"
                word = row["direction"] or f"not judged: {row['why']}"
                so_far = "" if row["complete"] or not row["direction"] else " so far"
                body.append([
                    name, row["claim"], row.get("paper", ""), row.get("ours", ""), row["training"],
                    str(row.get("seeds") or ""), f"{word}{so_far}{mark}", row.get("size", ""),
                ])  # fmt: skip
        parts.append(f"## {title}\n")
        parts.append(_table(head, body, numbers=False))
        if notes:
            texts = [f"({i + 1}) {note[0].upper()}{note[1:]}." for i, note in enumerate(notes)]
            parts.append(" ".join(texts) + "\n")
    totals = [[title, *(str(count) for count in tally.values())] for title, tally in counts.items()]
    sums = [str(sum(tally[word] for tally in counts.values())) for word in next(iter(counts.values()))]
    parts.append("## Counts\n")
    parts.append(_table(["claims", *next(iter(counts.values()))], [*totals, ["all", *sums]]))
    levels = coverage(everything, folder)
    coverage_rows = [[word, *(str(len(items[word])) for items in levels.values())] for word in LEVELS]
    coverage_rows = [[*row, str(sum(map(int, row[1:])))] for row in coverage_rows]
    parts.append(COVERAGE)
    parts.append(_table(["run", *titles(everything).values(), "all"], coverage_rows))
    gaps = [f"{t}: {', '.join(levels[p]['not at all'])}" for p, t in titles(everything).items()]
    nonempty_gaps = [text for text in gaps if not text.endswith(": ")]
    parts.append(f"Not at all: {'; '.join(nonempty_gaps)}.\n" if nonempty_gaps else "")
    parts.append(RULES)
    return "\n".join(parts).rstrip() + "\n"


def coverage(
    everything: Mapping[str, Experiment], folder: Path | str
) -> dict[str, dict[str, list[str]]]:
    """Return the tables and figures of each paper, by the level of completeness of their runs.

    Each table or figure is represented by the experiment that has its name, which uses the paper's first
    data set.
    """
    levels: dict[str, dict[str, list[str]]] = {}
    for paper in titles(everything):
        items = levels[paper] = {level: [] for level in LEVELS}
        for e in everything.values():
            item = e.name.removeprefix(f"{paper}-")
            if e.paper != paper or not re.fullmatch(r"(table|fig|top)\d+", item):
                continue
            results = largest(e, folder)
            if results is None:
                level = "not at all"
            elif not e.scales[results.scale].judged:
                level = "on small data"
            else:
                full_training = e.scales[results.scale].training in ("", "100 %") and not results.partly
                level = "with all of its training" if full_training else "partly"
            items[level].append(item)
        items["not at all"] += uncovered().get(paper, ())
    return levels


def titles(everything: Mapping[str, Experiment]) -> dict[str, str]:
    """Return the titles of the papers of some experiments by short name, in order of appearance."""
    all_titles = papers()
    short_names = dict.fromkeys(e.paper for e in everything.values())
    return {paper: all_titles.get(paper, paper) for paper in short_names}


def rows(experiment: Experiment, results: Results) -> list[dict[str, Any]]:
    """Return one row per arm: the paper's number, ours with spread and seeds, and other metrics."""
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
    """Format an arm's metric with its spread over seeds."""
    if not experiment.logarithmic:
        return told(results.mean(arm), results.spread(arm))
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


def known(x: float) -> str:
    """Format a number: a dash for NaN, and "lost" for errors of solvers with non-finite trajectories."""
    return "–" if math.isnan(x) else "lost" if x >= LOST / 100 else number(x)


def told(mean: float, spread: float | None) -> str:
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


def section(experiment: Experiment, folder: Path | str, pictures: Path) -> str:
    """Return the section of an experiment on the page of results."""
    results = largest(experiment, folder)
    lines = [f"### {experiment.name}: {experiment.place}\n", f"*{experiment.claim}*\n"]
    verdict = experiment.verdict(results)
    if verdict is not None:
        lines += [*verdict_lines(experiment, results, verdict), ""]
    elif results is None:
        lines.append("**not run yet**\n")
    elif results.complete:
        lines.append("**not judged**: this is too small for a verdict.\n")
    else:
        lines.append("**not judged yet**: runs are missing.\n")
    if results is not None:
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
            for row in rows(experiment, results)
        ]
        lines.append(_table(head, body))
        minutes = results.seconds() / 60
        time = f"{minutes:.0f} min" if minutes >= 2 else f"{results.seconds():.0f} s"
        devices = ", ".join(map(literal, results.devices()))
        scripts = [run.get("made_by") for runs in results.runs.values() for run in runs.values()]
        unique_scripts = sorted({script for script in scripts if script})
        origin = ", ".join(map(code, unique_scripts)) + " of an earlier version, since removed"
        portion = "all" if all(scripts) else f"{len(scripts) - scripts.count(None)} of {len(scripts)}"
        provenance = f"; {portion} made by {origin}" if unique_scripts else ""
        lines.append(
            f"`{command(experiment, results.scale)}`: {time} of runs on {devices}{provenance}.\n"
        )
        lines += larger(experiment, results, folder)
        picture = pictures / f"{experiment.name.replace('-', '_')}.png"
        if experiment.picture is not None and picture.exists():
            lines.append(f"![{chart_title(experiment, results)}]({pictures.name}/{picture.name})\n")
    elif not experiment.missing:
        scale = next((s for s in reversed(SCALES) if s in experiment.scales), "smoke")
        lines.append(f"`{command(experiment, scale)}`\n")
    notes = [experiment.note, experiment.scales[results.scale].note if results is not None else ""]
    if any(notes):
        lines.append(" ".join(filter(None, notes)) + "\n")
    return "\n".join(lines)


def verdict_lines(experiment: Experiment, results: Results | None, verdict: Verdict) -> list[str]:
    """Return the verdict as one line, or as one line per part and a line for further remarks."""
    so_far = " so far" if worded(experiment, results).endswith("so far") else ""
    size = lambda part: f", size {part.size}" if part.size else ""
    note = lambda part: f" Caveat: {part.caveat}." if part.caveat else ""
    if not verdict.parts:
        word = f"**{verdict.direction}{so_far}{size(verdict)}**"
        return [f"{word}: {verdict.why}.{note(verdict)}"]
    lines = [
        f"- {part.claim}: **{part.direction}{so_far}{size(part)}**; {part.why}.{note(part)}"
        for part in verdict.parts
    ]
    rest = verdict.why.removeprefix(combine(verdict.parts).why).removeprefix(". ")
    return [*lines, "", f"{rest}."] if rest else lines


def chart_title(experiment: Experiment, results: Results) -> str:
    """Return the title of a chart: the place in the paper, unless runs were made on other data.

    Small scales of an experiment may use generated data or a data set that comes with the library.
    """
    configs = [run.get("config", {}) for runs in results.runs.values() for run in runs.values()]
    names = {str(c["data"]) for c in configs if isinstance(c.get("data"), str)}
    is_generated = any(c.get("synthetic") or c.get("made") for c in configs)
    if not experiment.data or (names <= set(experiment.data) and not is_generated):
        return experiment.place
    data = "generated data" if is_generated or "toy" in names else ", ".join(sorted(names))
    return f"{experiment.name} at scale {results.scale}, on {data} in place of the paper's data"


def larger(experiment: Experiment, results: Results, folder: Path | str) -> list[str]:
    """Return lines with the incomplete results at larger scales, which may contradict the verdict."""
    lines = []
    for scale in SCALES[SCALES.index(results.scale) + 1 :]:
        if scale not in experiment.scales:
            continue
        partial = load(experiment, scale, folder)
        values = [[row["arm"], row["told"], str(row["seeds"])] for row in rows(experiment, partial)]
        if len(values) > FEW:
            lines.append(f"Of scale {scale} there are so far:\n")
            lines.append(_table(["", f"ours ({experiment.metric})", "seeds"], values))
        elif values:
            text = "; ".join(f"{arm} {value}" for arm, value, _ in values)
            lines.append(f"Of scale {scale} there are so far: {text}.\n")
    return lines


def findings(everything: dict[str, Experiment], folder: Path | str, pictures: Path) -> list[str]:
    """Return the findings whose experiments have been run, with their pictures."""
    parts = []
    for title, names in FINDINGS.items():
        experiments = [everything[name] for name in names if name in everything]
        texts = [
            text
            for e in experiments
            if (text := finding_text(e, title, folder, pictures, len(experiments) > 1))
        ]
        if texts:
            parts += [f"### {title}\n\nThe paper: *{experiments[0].claim}*\n", *texts]
    return ["## Findings\n", *parts] if parts else []


def finding_text(
    experiment: Experiment, title: str, folder: Path | str, pictures: Path, with_data: bool
) -> str:
    """Return the verdict of an experiment on a finding, with its picture; empty without a verdict.

    Args:
        experiment: The experiment.
        title: Heading of the finding.
        folder: Folder of results.
        pictures: Folder of pictures.
        with_data: Whether to name the data, because the finding has several experiments.
    """
    results = largest(experiment, folder)
    verdict = experiment.verdict(results)
    if results is None or verdict is None:
        return ""
    setting = f"{max(map(len, results.runs.values()))} seeds, scale {results.scale}"
    if with_data:
        setting = f"{experiment.place.split(', ')[-1]}, {setting}"
    text = f"Seen ({setting}):\n\n" + "\n".join(verdict_lines(experiment, results, verdict)) + "\n"
    text += "".join(f"\n{line}" for line in larger(experiment, results, folder))
    picture = pictures / f"{experiment.name.replace('-', '_')}.png"
    if picture.exists():
        text += f"\n![{title}]({pictures.name}/{picture.name})\n"
    return f"{text}\nNumbers: [{experiment.name}](#{anchor(experiment)}).\n"


def page(folder: Path | str, pictures: Path) -> str:
    """Return the page of results."""
    everything = catalogue()
    head = ["", "claim", "direction", "size", "runs"]
    body = []
    for e in everything.values():
        results = largest(e, folder)
        words = [worded(e, results), sizes_of(e.verdict(results))]
        body.append([f"[{e.name}](#{anchor(e)})", e.claim, *words, state(e, folder)])
    parts = [HEAD, *findings(everything, folder, pictures), "## Everything\n"]
    parts.append(_table(head, body, numbers=False))
    for paper, title in titles(everything).items():
        parts.append(f"\n## {title}\n")
        parts += [section(e, folder, pictures) for e in everything.values() if e.paper == paper]
    return "\n".join(parts).rstrip() + "\n"


def write_page(path: Path | str, folder: Path | str, draw: bool = True) -> list[Path]:
    """Write the page of results, ``claims.md`` next to it and the pictures; return their paths.

    The pictures are in a folder ``results`` next to the page. An experiment with missing runs has no
    picture; a previous picture is removed.

    Args:
        path: Path of the page of results.
        folder: Folder of results.
        draw: Whether to draw the pictures.
    """
    path = Path(path)
    check_target(path)
    pictures, paths = path.parent / "results", []
    if draw:
        from attractor.report.figures import write

        for experiment in catalogue().values():
            results = largest(experiment, folder)
            target = pictures / f"{experiment.name.replace('-', '_')}.png"
            if results is not None and experiment.picture is not None and results.complete:
                paths.append(write(experiment.picture(results), target))
            else:
                target.unlink(missing_ok=True)  # drawn from runs that no longer exist
    short = write_text(path.with_name("claims.md"), claims_page(folder))
    return [*paths, short, write_text(path, page(folder, pictures))]


def anchor(experiment: Experiment) -> str:
    """Return the anchor of an experiment's heading on the page of results."""
    characters = [
        c for c in f"{experiment.name}: {experiment.place}".lower() if c.isalnum() or c in " -_"
    ]
    return "".join(characters).replace(" ", "-")


def _table(head: list[str], body: Iterable[list[str]], numbers: bool = True) -> str:
    lines = [head, ["---"] + ["---:" if numbers else "---"] * (len(head) - 1), *body]
    escaped = lambda text: text.replace("|", r"\|")
    return "".join(f"| {' | '.join(map(escaped, line))} |\n" for line in lines)
