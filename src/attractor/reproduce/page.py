"""Write the pages of results and claims, with their pictures, from the files of results."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from attractor.reproduce.effects import DIRECTIONS, number
from attractor.reproduce.experiment import SCALES, Experiment
from attractor.reproduce.page_text import CLAIMS, COVERAGE, HEAD, RULES
from attractor.reproduce.results import Results, load
from attractor.reproduce.shelf import catalogue, papers, uncovered
from attractor.reproduce.summary import (
    claims,
    code,
    command,
    largest,
    literal,
    metric_text,
    rows,
    sizes_of,
    state,
    worded,
)
from attractor.reproduce.verdict import Verdict, combine
from attractor.storage.files import check_target, write_text

LEVELS = ("with all of its training", "partly", "on small data", "not at all")


FEW = 8  # maximum number of arms that are listed in a sentence, not in a table

FINDINGS = {  # headings of the main findings, and the experiments that show them
    "Perplexity once the evaluation is the same for both models": ("pde-artefact",),
    "Perplexity once no token sees the future": ("pde-leak",),
    "AttNS and NeurVec once their inputs are normalised": ("attns-normalised",),
    "TNS once its value before training is shown": ("stepnet-initial-cifar100", "stepnet-initial"),
}


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
                row["text"],
                str(row["seeds"]),
                *map(metric_text, row["others"].values()),
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
        values = [[row["arm"], row["text"], str(row["seeds"])] for row in rows(experiment, partial)]
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
