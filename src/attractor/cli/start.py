"""The command `attractor` without arguments, its version, and doctor."""

import time
from typing import Annotated, Any

import typer
from rich.markup import escape

import attractor
from attractor.cli.terminal import (
    AsJson,
    Device,
    app,
    check_device,
    console,
    example,
    make_table,
    print_json,
    progress_bar,
    say,
)

START = """attractor: attention as time stepping. What to try first:

  attractor demo                                       all of it, on one page

  attractor solve pretrained:elastic-pendulum          "I have an ODE"
  attractor fit pendulum-chain --trajectories 300

  attractor bench --what causal --tokens 1024          "I have a transformer"

  attractor probe attractor:resnet_cifar -o depth=29   "Is my ResNet stiff?"

All commands: attractor --help. One: attractor fit --help.
In trouble: attractor doctor."""


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks of errors; also ATTRACTOR_DEBUG=1.")
    ] = False,
) -> None:
    """Attention as time stepping. Start with: attractor demo"""
    if show_version:
        print(f"attractor {attractor.__version__}")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        say(START)


@app.command(epilog=example("attractor doctor --device cuda"))
def doctor(
    device: Device = "cpu",
    compile: Annotated[bool, typer.Option(help="Also try torch.compile (about 20 s).")] = False,
    as_json: AsJson = False,
) -> None:
    """Show versions, devices and missing packages, and run a self-check."""
    from attractor import doctor as doctor_job

    check_device(device)
    environment: dict[str, Any] = {"versions": doctor_job.versions(), "devices": doctor_job.devices()}
    results: list[dict[str, Any]] = []
    with progress_bar(quiet=as_json) as progress:
        checks = doctor_job.checks(device, compile)
        task = progress.add_task("self-check", total=len(checks))
        for name, check in checks:
            progress.update(task, description=name)
            start = time.perf_counter()
            try:
                results.append({"check": name, "ok": True, "found": check()})
            except Exception as error:
                results.append({"check": name, "ok": False, "found": f"{type(error).__name__}: {error}"})
            results[-1]["seconds"] = round(time.perf_counter() - start, 2)
            progress.update(task, advance=1)
    failures = [row["check"] for row in results if not row["ok"]]
    if as_json:
        print_json({**environment, "optional": doctor_job.optional(), "checks": results})
        raise typer.Exit(bool(failures))

    versions = ", ".join(f"{name} {value}" for name, value in environment["versions"].items())
    console.print(versions, highlight=False)
    for line in environment["devices"]:
        say(line)
    table = make_table("optional", "version", "what it is for", words=3)
    for row in doctor_job.optional():
        table.add_row(row["package"], row["version"] or "[yellow]missing[/]", row["for"])
    console.print("", table)
    for extra, names in doctor_job.missing().items():
        say(f"{', '.join(names)}: pip install 'attractor[{extra}]'", style="yellow")
    table = make_table("self-check", "", "found", "s", words=3)
    for row in results:
        mark = "[green]ok[/]" if row["ok"] else "[red]FAILED[/]"
        table.add_row(row["check"], mark, escape(row["found"]), f"{row['seconds']:.1f}")
    console.print("", table)
    if failures:
        say(f"{len(failures)} of {len(results)} checks failed: {', '.join(failures)}", style="red")
        raise typer.Exit(1)
    note = "" if compile else " (torch.compile was not tried: add --compile)"
    console.print(f"[green]All is well.[/]{note}")
