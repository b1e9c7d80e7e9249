"""Commands that write pages about runs: report."""

from pathlib import Path
from typing import Annotated

import typer

from attractor.cli.terminal import (
    AsJson,
    app,
    console,
    example,
    make_table,
    need,
    print_json,
    report_usage_errors,
    say,
    typed_command,
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
    title: Annotated[
        str, typer.Option(help="Title of the page; default: a description of its runs.")
    ] = "",
    out: Annotated[Path, typer.Option(help="Path of the page.")] = Path("out/report.html"),
    as_json: AsJson = False,
) -> None:
    """Write one page about one or several runs.

    A run is a result of fit, compare, probe, bench --out or reproduce, or the
    folder of a training. The page is a single file with tables, pictures,
    settings, versions and commands to repeat the runs; it opens offline.
    """
    need("matplotlib", "report")
    need("plotly", "report")
    from attractor.report import runs as run_files
    from attractor.storage.files import check_target

    with report_usage_errors():
        check_target(out)
        results = [run for path in runs for run in run_files.find(path)]
        with console.status("writing"):
            page = run_files.page(results, title).write(out)
    if as_json:
        content = [run.to_json() for run in results]
        print_json({"command": typed_command(), "page": str(page), "runs": content})
    table = make_table("kind", "run", words=2)
    for run in results:
        table.add_row(run.kind, run.name)
    console.print(table)
    say(f"Report: {page}")
