"""Commands about the library as a whole: demo, doctor."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

import attractor
from attractor import demo as demo_job
from attractor import doctor as doctor_job
from attractor.cli.terminal import Device, Seed, app, check_device, console, need, progress_bar


@app.callback(invoke_without_command=True)
def root(
    show_version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Attention as time stepping."""
    if show_version:
        print(f"attractor {attractor.__version__}")
        raise typer.Exit()


@app.command(epilog="Example: attractor demo --out out/demo --seed 1")
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("out/demo"),
    trajectories: Annotated[int, typer.Option(min=1, help="Trajectories of each system.")] = 100,
    seed: Seed = 0,
    device: Device = "cpu",
) -> None:
    """Solve three systems with every scheme, fit a hybrid solver; write a page about it."""
    check_device(device)
    need("matplotlib", "report")
    start = time.perf_counter()
    with progress_bar() as progress:
        task = progress.add_task("demo", total=demo_job.jobs())

        def tell(what: str) -> None:
            progress.update(task, advance=1, description=what)

        results = demo_job.run(trajectories, seed, device, tell)
    for name in demo_job.SYSTEMS:
        table = Table(title=f"{name}: t = {demo_job.HORIZON:g}, dt = {demo_job.SHOWN_STEP}")
        for column in ("scheme", "order", "rate calls", "error", "energy drift", "lost"):
            table.add_column(column, justify="left" if column == "scheme" else "right")
        for row in demo_job.table(results, name):
            table.add_row(*(f"{x:.2e}" if isinstance(x, float) else str(x) for x in row))
        console.print(table)
    for scheme, (_, errors) in results["long"].items():
        console.print(f"{scheme}: energy error after 6,000 steps of Hénon-Heiles {errors[-1]:.1e}")
    hybrid = results["hybrid"]
    table = Table(title=f"2-link pendulum, hybrid solver fitted in {hybrid['seconds']:.0f} s")
    for column in ("", "mean square error", "rate calls"):
        table.add_column(column, justify="right" if column else "left")
    for name, row in hybrid["rows"].items():
        table.add_row(name, f"{row['error']:.1e}", str(row["rate_calls"]))
    console.print(table)
    page = demo_job.write(results, out)
    console.print(f"{time.perf_counter() - start:.0f} s. Report: [bold]{page}[/bold]", soft_wrap=True)


@app.command(epilog="Example: attractor doctor --device cuda")
def doctor(
    device: Device = "cpu",
    compile: Annotated[bool, typer.Option(help="Also try torch.compile (some 20 s).")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Versions, devices, what is missing and what that switches off, and a self-check."""
    check_device(device)
    found: dict[str, Any] = {"versions": doctor_job.versions(), "devices": doctor_job.devices()}
    outcome: list[dict[str, Any]] = []
    with progress_bar(quiet=as_json) as progress:
        checks = doctor_job.checks(device, compile)
        task = progress.add_task("self-check", total=len(checks))
        for name, check in checks:
            progress.update(task, description=name)
            start = time.perf_counter()
            try:
                outcome.append({"check": name, "ok": True, "found": check()})
            except Exception as error:
                outcome.append({"check": name, "ok": False, "found": f"{type(error).__name__}: {error}"})
            outcome[-1]["seconds"] = round(time.perf_counter() - start, 2)
            progress.update(task, advance=1)
    failed = [row["check"] for row in outcome if not row["ok"]]
    if as_json:
        print(json.dumps({**found, "optional": doctor_job.optional(), "checks": outcome}, indent=1))
        raise typer.Exit(bool(failed))

    table = Table(title="attractor doctor", show_header=False)
    for name, value in found["versions"].items():
        table.add_row(name, value)
    for line in found["devices"]:
        table.add_row("device", line)
    console.print(table)
    table = Table("optional", "version", "what it is for", "bring it with")
    for row in doctor_job.optional():
        extra = f"pip install 'attractor[{row['extra']}]'".replace("[", "\\[") if row["extra"] else "–"
        have = row["version"]
        table.add_row(row["package"], have or "[yellow]missing[/]", row["for"], "" if have else extra)
    console.print(table)
    table = Table("self-check", "", "found", "s")
    for row in outcome:
        mark = "[green]ok[/]" if row["ok"] else "[red]FAILED[/]"
        table.add_row(row["check"], mark, row["found"], f"{row['seconds']:.1f}")
    console.print(table)
    if failed:
        console.print(f"[red]{len(failed)} of {len(outcome)} checks failed: {', '.join(failed)}[/]")
        raise typer.Exit(1)
    untried = "" if compile else " (torch.compile was not tried: add --compile)"
    console.print(f"[green]All is well.[/]{untried}")
