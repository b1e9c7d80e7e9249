"""Commands about the papers: reproduce."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from attractor.cli.engines import Address, Engine, Part, Threads, Workers
from attractor.cli.terminal import (
    AsJson,
    app,
    check_device,
    check_out,
    console,
    example,
    make_table,
    print_json,
    report_usage_errors,
    say,
)

Names = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[NAME]...",
        help="An experiment of --list, or a paper, which means all of its experiments, or the path of a "
        "Python file that declares an EXPERIMENT.",
    ),
]

PIPE_WIDTH = 200  # columns of a table in a file or a pipe


@app.command(
    epilog=example(
        "attractor reproduce --list",
        "attractor reproduce attns-theorem51 --scale smoke",
    )
)
def reproduce(
    names: Names = None,
    list_: Annotated[bool, typer.Option("--list", help="Show all experiments and their state.")] = False,
    scale: Annotated[
        str, typer.Option(help="Scale: smoke (seconds), cpu (minutes) or gpu (one large GPU).")
    ] = "smoke",
    device: Annotated[str, typer.Option(help="Device: cpu, cuda, cuda:1 ...")] = "cpu",
    data: Annotated[
        Path | None, typer.Option(help="Folder of data sets; default: ATTRACTOR_DATA.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of results; default: out/reproduce.")] = None,
    arm: Annotated[
        list[str] | None, typer.Option(help="Run only this arm. Repeat the option to run several.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, such as 0,1,2; default: those of the scale.")] = "",
    engine: Engine = None,
    workers: Workers = None,
    address: Address = None,
    threads: Threads = None,
    part: Part = "1/1",
    budget: Annotated[float, typer.Option(min=0, help="Start no run after this many seconds.")] = float(
        "inf"
    ),
    again: Annotated[bool, typer.Option(help="Repeat runs that have results already.")] = False,
    merge: Annotated[
        list[Path] | None,
        typer.Option(help="Add the runs of this file. Repeat the option to add several."),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option(help="Write the pages of results and claims to this path."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Repeat the papers' tables and figures, with a verdict.

    Runs with results in the folder are not repeated; interrupted runs
    continue.
    """
    from attractor.reproduce import catalogue
    from attractor.reproduce.page import write_page
    from attractor.reproduce.shelf import home

    with report_usage_errors():
        if list_:
            _list(out or home(), as_json)
            return
        if page is not None:
            paths = [str(path) for path in write_page(page, out or home())]
            if as_json:
                print_json(paths)
            say("\n".join(paths))
            return
        if not names:
            raise ValueError("give the NAME of an experiment; attractor reproduce --list shows all")
        check_out(out or Path("out/reproduce"))
        experiments = _experiment_names(names, list(catalogue()))
        if engine != "ray":  # its machines may have other devices
            check_device(device)
        seed_list = _seeds(seeds) if seeds else None
        options: dict[str, Any] = {
            "device": device, "data": data, "arms": arm or None, "seeds": seed_list, "workers": workers,
            "budget": budget, "again": again, "engine": engine, "address": address,
            "threads": threads, "part": part,
        }  # fmt: skip
        results = [
            _one(name, scale, out or Path("out/reproduce"), merge or [], options, as_json)
            for name in experiments
        ]
    if as_json:
        print_json(results)


def _experiment_names(names: list[str], every_name: list[str]) -> list[str]:
    from attractor.reproduce import find

    papers = {n.split("-")[0] for n in every_name}
    selection: list[str] = []
    for name in names:
        if name == "all" or name in papers:
            selection += [n for n in every_name if name == "all" or n.startswith(f"{name}-")]
        else:
            selection.append(name if name.endswith(".py") else find(name).name)
    return list(dict.fromkeys(selection))


def _one(
    name: str, scale: str, out: Path, merge_files: list[Path], options: dict[str, Any], quiet: bool
) -> dict[str, Any]:
    from attractor.reproduce import find, from_file, merge, run
    from attractor.reproduce.results import path_of
    from attractor.reproduce.summary import rows
    from attractor.storage.files import json_bytes

    experiment = from_file(name) if name.endswith(".py") else find(name)
    name = experiment.name
    if merge_files:
        results = merge(experiment, scale, out, merge_files)
    else:
        results = run(experiment, scale, folder=out, tell=say, **options)
    verdict = experiment.verdict(results)
    path = path_of(out, name, scale)
    if not quiet:
        _show(experiment, results, verdict)
        say(f"Results: {path}")
    summary = {
        "experiment": name, "scale": scale, "path": str(path), "rows": rows(experiment, results),
        "verdict": None if verdict is None else _plain(verdict),
    }  # fmt: skip
    return json.loads(json_bytes(summary))


def _plain(verdict: Any) -> dict[str, Any]:
    """Return a verdict for JSON."""
    return {
        "direction": verdict.direction, "size": verdict.size, "why": verdict.why,
        "caveat": verdict.caveat, "claim": verdict.claim, "parts": [_plain(x) for x in verdict.parts],
    }  # fmt: skip


def _show(experiment: Any, results: Any, verdict: Any) -> None:
    from attractor.reproduce.effects import number
    from attractor.reproduce.page import verdict_lines
    from attractor.reproduce.summary import metric_text, rows

    unit = f", {experiment.unit}" if experiment.unit else ""
    lines = [
        [row["arm"], "" if row["paper"] is None else number(row["paper"]),
         row["text"], str(row["seeds"]), *map(metric_text, row["others"].values())]
        for row in rows(experiment, results)
    ]  # fmt: skip
    columns = ["", "paper", f"ours ({experiment.metric}{unit})", "seeds", *experiment.others]
    widths = [max(len(line[i]) for line in [columns, *lines]) + 2 for i in range(len(columns))]
    fit = len(columns)
    while fit > 4 and sum(widths[:fit]) > console.width:
        fit -= 1
    table = make_table(*columns[:fit], title=f"{experiment.name}: {experiment.place}")
    for line in lines:
        table.add_row(*line[:fit])
    console.print(table)
    if columns[fit:]:
        say(f"Columns too wide to show: {', '.join(columns[fit:])}; --json prints them.")
    say(f"The paper: {experiment.claim}")
    if verdict is not None:
        for text in verdict_lines(experiment, results, verdict):
            say(text.replace("**", ""), style="bold")
    elif results.missing():
        say(f"{len(results.missing())} runs are still missing.")
    else:
        say("The experiment runs; this scale is too small for a verdict.")


def _seeds(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise typer.BadParameter(f"--seeds {text}: give whole numbers, such as 0,1,2")
    return [int(part) for part in parts]


def _list(folder: Path, as_json: bool) -> None:
    from attractor.reproduce import catalogue
    from attractor.reproduce.summary import claims, largest, sizes_of, state, worded
    from attractor.storage.files import json_bytes

    everything = catalogue().values()
    if as_json:
        print_json([
            {
                "name": e.name, "place": e.place, "claim": e.claim, "scales": list(e.scales),
                "state": state(e, folder), "verdict": worded(e, largest(e, folder)) or None,
                "size": sizes_of(e.verdict(largest(e, folder))) or None,
                "claims": json.loads(json_bytes(claims(e, folder))),
            }
            for e in everything
        ])  # fmt: skip
        return
    table = make_table("experiment", "of the paper", "runs", "direction, size", words=4)
    for column in table.columns:
        column.overflow = "fold"
    table.columns[0].no_wrap = True
    for e in everything:
        rows = claims(e, folder)
        if len(rows) > 1:
            table.add_row(e.name, e.place, state(e, folder), worded(e, largest(e, folder)))
        for row in rows:
            first = (
                (e.name, e.place, state(e, folder)) if len(rows) == 1 else ("", f"- {row['claim']}", "")
            )
            table.add_row(*first, _brief(row))
    console.print(table, width=None if console.is_terminal else PIPE_WIDTH)


def _brief(row: dict[str, Any]) -> str:
    """Return the direction and the size of a claim, without the interval."""
    direction = row["direction"] or ""
    so_far = " so far" if direction and not row["complete"] else ""
    size = row.get("size", "").split(" [")[0].replace(":", "")
    size = "" if size.startswith("not judged") else size
    return f"{direction}{so_far}{f', {size}' * bool(size)}"
