"""Shared parts of all commands: application, console, options, progress, errors, checks of input.

The exit status of a command is 0 on success, 1 if a check or a comparison failed, 2 if an argument was
wrong, 130 after Ctrl-C and 143 after SIGTERM. Results go to stdout, errors to stderr.

The modules of commands import torch and the library inside their functions, so that --help is fast.
"""

import errno
import os
import re
import shlex
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from typer.core import TyperGroup

console = Console()
errors = Console(stderr=True)
DEBUG = "ATTRACTOR_DEBUG"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
MEMORY_FULL = "can't allocate memory"  # part of torch's message, a RuntimeError on a CPU
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EFBIG)


class Commands(TyperGroup):
    """The group of all commands. ``--debug`` is allowed anywhere, and enables tracebacks."""

    debug = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Remove --debug from the arguments, and set `debug`."""
        end = args.index("--") if "--" in args else len(args)
        Commands.debug = "--debug" in args[:end] or os.environ.get(DEBUG, "0") not in ("", "0")
        console.quiet = False
        return super().parse_args(ctx, [a for a in args[:end] if a != "--debug"] + args[end:])

    def invoke(self, ctx: Any) -> Any:
        """Run the command, and print errors as one line."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            if not str(error):  # otherwise training has printed where it stopped
                errors.print("Interrupted.")
            raise typer.Exit(130) from None
        except (BrokenPipeError, typer.Abort):
            raise
        except Exception as error:
            if hasattr(error, "exit_code"):  # Typer's own errors: exits and wrong usage
                raise
            import torch

            from attractor.storage.files import FileTypeError, FolderLockedError

            if isinstance(error, FileTypeError | FolderLockedError):
                tell(error)
                raise typer.Exit(2) from None
            if isinstance(error, OSError) and error.errno in DISK:
                tell(error)
                say_error("Results could not be written; free space, or give another folder with --out.")
                raise typer.Exit(2) from None
            if isinstance(error, MemoryError | torch.OutOfMemoryError) or MEMORY_FULL in str(error):
                tell(error)
                say_error("The memory is full; use smaller sizes or batches, or fewer steps.")
                raise typer.Exit(2) from None
            tell(error, f"{type(error).__name__}")
            if not Commands.debug:
                say_error(
                    "This error was not expected. Run the command with --debug to see where it happened."
                )
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=Commands,
    help="Attention as time stepping. Start with: attractor demo",
    rich_markup_mode="rich" if console.is_terminal else None,  # no boxes in files and pipes
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def example(command: str, *others: str) -> str:
    """Return the examples below the help of a command, one per line."""
    return "\n\n".join(f"Example: {text}" for text in (command, *others))


def _hush(as_json: bool) -> bool:
    console.quiet = as_json
    return as_json


Seed = Annotated[int, typer.Option(min=-(2**63), max=2**63 - 1, help="Seed of all random numbers.")]
Device = Annotated[str, typer.Option(help="Device: cpu, cuda, cuda:1, mps ...")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.", callback=_hush)]


def print_json(content: Any) -> None:
    """Print one strict JSON document on stdout; numbers that are not finite become null."""
    from attractor.storage.files import json_bytes

    sys.stdout.write(json_bytes(content).decode())


def make_table(*columns: str, title: str = "", words: int = 1, caption: str = "") -> Table:
    """Return an empty table, without rules in pipes; the first `words` columns are text."""
    table = Table(
        title=title or None, title_justify="left", caption=caption or None, caption_justify="left",
        box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False,
    )  # fmt: skip
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < words else "right")
    return table


def progress_bar(quiet: bool = False) -> Progress:
    """Return a progress bar, which is hidden if the output is not a terminal."""
    return Progress(
        TextColumn("{task.description:44.44}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console, transient=True, disable=quiet or console.quiet or not console.is_terminal,
    )  # fmt: skip


def say(text: str, style: str = "") -> None:
    """Print a line without markup or line breaks."""
    console.print(_printable(text), style=style, markup=False, highlight=False, soft_wrap=True)


def say_error(text: str) -> None:
    """Print a line on stderr without markup or line breaks."""
    errors.print(text, soft_wrap=True, highlight=False, markup=False)


def tell(error: BaseException, name: str = "Error") -> None:
    """Print an error as a line on stderr, with --debug after its traceback."""
    if Commands.debug:
        errors.print("".join(traceback.format_exception(error)), markup=False, highlight=False,
                     soft_wrap=True)  # fmt: skip
    errors.print(f"[red]{name}:[/] ", end="")
    options: Any = {"markup": False, "highlight": False, "soft_wrap": not errors.is_terminal}
    errors.print(_printable(str(error)) or "no message", **options)
    for note in getattr(error, "__notes__", ()):  # such as the name of the shard
        errors.print(_printable(note), **options)


def _printable(text: str) -> str:
    """Return text without codes that control a terminal, which may come from the files of others."""
    return CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


@contextmanager
def report_usage_errors() -> Iterator[None]:
    """Exit with status 2 and a message, without a traceback, on errors in the arguments."""
    try:
        yield
    except BrokenPipeError:
        raise
    except (ValueError, TypeError, FloatingPointError, ImportError, OSError) as error:
        tell(error)
        raise typer.Exit(2) from None


def check_out(folder: Path | str) -> None:
    """Raise, before anything is computed, if a folder for results cannot be written to.

    Args:
        folder: A `Path` must be one of this machine; text may be a URL.
    """
    from attractor.storage.limits import check_folder
    from attractor.storage.objects import AS_PATH

    if isinstance(folder, Path) and AS_PATH.match(str(folder)):
        raise ValueError(
            f"--out {folder} is in an object store, and the results of this command, which include "
            "pages and pictures, are written to a folder of this machine only. Give one, and copy it"
        )
    check_folder("--out", folder)


def check_device(device: str) -> None:
    """Exit with a list of the devices if a device cannot be used."""
    import torch

    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        from attractor.doctor import devices

        reason = str(error).splitlines()[0].split(" device type at start")[0]
        raise typer.BadParameter(
            f"{device!r} cannot be used here ({reason}); there is {', '.join(devices())}",
            param_hint="--device",
        ) from None


def need(package: str, extra: str) -> None:
    """Exit with the command that installs an optional package if it is missing."""
    if find_spec(package) is None:
        errors.print(f"[red]Error:[/] {package} is missing; install it with: "
                     f"pip install 'attractor\\[{extra}]'", soft_wrap=True, highlight=False)  # fmt: skip
        raise typer.Exit(2)


def origin() -> dict[str, Any]:
    """Return what is written with results: the command that repeats them, and versions."""
    from attractor.doctor import versions

    return {"command": typed_command(), "versions": versions()}


def typed_command() -> str:
    """Return the command as it was typed."""
    return shlex.join(["attractor", *sys.argv[1:]])
