"""Pages about runs: report."""

from pathlib import Path
from typing import Annotated

import typer

from attractor.cli.terminal import (
    AsJson,
    app,
    console,
    example,
    given_command,
    make_table,
    need,
    print_json,
    say,
    told_as_usage,
)


@app.command(
    epilog=example(
        "attractor report out/fit",
        "attractor report out/fit out/compare --out out/both.html",
    )
)
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", help="Files and folders that other commands have written."),
    ],
    title: Annotated[str, typer.Option(help="Of the page; default: what it shows.")] = "",
    out: Annotated[Path, typer.Option(help="The page.")] = Path("out/report.html"),
    as_json: AsJson = False,
) -> None:
    """One page about runs, alone or side by side.

    A run is what fit, compare, probe, bench --out and reproduce write, or the
    folder of a training. The page is a single file with tables, pictures,
    settings, versions and commands to repeat it; it asks the network nothing.
    """
    need("matplotlib", "report")
    need("plotly", "report")
    from attractor.core.files import check_target
    from attractor.report import runs as kept

    with told_as_usage():
        check_target(out)
        found = [run for path in runs for run in kept.find(path)]
        with console.status("writing"):
            written = kept.page(found, title).write(out)
    if as_json:
        content = [run.to_json() for run in found]
        print_json({"command": given_command(), "page": str(written), "runs": content})
    table = make_table("kind", "run", words=2)
    for run in found:
        table.add_row(run.kind, run.name)
    console.print(table)
    say(f"Report: {written}")
