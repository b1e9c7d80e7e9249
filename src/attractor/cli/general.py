"""General commands: demo."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from attractor.cli.terminal import (
    AsJson,
    Device,
    Seed,
    app,
    check_device,
    check_out,
    console,
    example,
    need,
    print_json,
    progress_bar,
    report_usage_errors,
    say,
)


@app.command(epilog=example("attractor demo", "attractor demo --out out/demo --seed 1"))
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the page.")] = Path("out/demo"),
    small: Annotated[
        bool, typer.Option("--small", help="Take seconds; the numbers then mean little.")
    ] = False,
    seed: Seed = 0,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Show all parts of the library on one page, in a minute or two.

    The page has films, sliders and curves, computed on data that come with
    the library.
    """
    from attractor import demo as job

    check_device(device)
    need("matplotlib", "report")
    need("plotly", "report")
    with report_usage_errors():
        check_out(out)
    with progress_bar(quiet=as_json) as progress:
        task = progress.add_task("demo", total=100)
        report_progress = lambda what, fraction: progress.update(
            task, completed=int(100 * fraction), description=what
        )
        results = job.run(seed, device, report_progress, small)
        page = job.write(results, out)
    failures = [name for name, part in results["parts"].items() if "failed" in part]
    if as_json:
        print_json(job.numbers(results))
        raise typer.Exit(bool(failures))
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, part in results["parts"].items():
        table.add_row(f"[bold]{name}[/]", f"[dim]{part['seconds']:.0f} s[/]")
        for what, text in job.PARTS[name][0].summary(part) if name not in failures else ():
            table.add_row(f"  {what}", escape(text))
        if name in failures:
            table.add_row("  [red]failed[/]", escape(part["failed"]))
    console.print(table)
    say(f"{results['seconds']:.0f} s. Open this in a browser: {page}")
    raise typer.Exit(bool(failures))
