"""What all commands share: the application, the console, options, progress, and checks of input."""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from attractor import doctor as doctor_job

app = typer.Typer(
    help="Attention as time stepping. Start with [bold]attractor demo[/bold].",
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console()

Seed = Annotated[int, typer.Option(help="Seed of all random numbers.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps ...")]


def progress_bar(quiet: bool = False) -> Progress:
    """A bar for jobs whose length is known; nothing where the output is not a terminal."""
    return Progress(
        TextColumn("{task.description:44.44}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console, transient=True, disable=quiet or not console.is_terminal,
    )  # fmt: skip


@contextmanager
def told_as_usage() -> Iterator[None]:
    """Errors about what was given end the command with their message, without a traceback."""
    try:
        yield
    except (ValueError, TypeError, FloatingPointError, ImportError, OSError) as error:
        console.print(f"[red]{type(error).__name__}:[/] ", end="")
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        for note in getattr(error, "__notes__", ()):  # such as which shard it was
            console.print(note, markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None


def check_device(device: str) -> None:
    """Stop, with what there is, if a device cannot be used."""
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise typer.BadParameter(
            f"{device!r} cannot be used here ({reason}); there is {', '.join(doctor_job.devices())}",
            param_hint="--device",
        ) from None


def need(package: str, extra: str) -> None:
    """Stop, with the command that installs it, if an optional package is missing."""
    if next(row for row in doctor_job.optional() if row["package"] == package)["version"] is None:
        console.print(
            f"[red]{package} is missing[/]; install it with: pip install 'attractor\\[{extra}]'"
        )
        raise typer.Exit(2)


def given_command() -> str:
    """The command as it was typed, for what is written beside results."""
    return shlex.join(["attractor", *sys.argv[1:]])
