"""The demo: all three wings on data that come with the library, in one page; a minute or two.

`run` computes, part after part, `write` makes the page of what was found; the command line calls both.

>>> from attractor import demo
>>> found = demo.run(small=True)      # doctest: +SKIP
>>> demo.write(found, "out/demo")      # doctest: +SKIP
PosixPath('out/demo/report.html')
"""

import platform
import shlex
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import attractor
from attractor.core.files import write_json
from attractor.demo import attention, networks, solvers, text

# Name -> module, and what part of the time it takes. A module's `run` returns a dictionary, in which
# "drawn" holds what only pictures need; `show` puts it on a page; `told` is a line for the terminal.
PARTS: dict[str, tuple[Any, float]] = {
    "solvers": (solvers, 0.30),
    "networks": (networks, 0.31),
    "attention": (attention, 0.01),
    "text": (text, 0.38),
}
TITLES = {
    "solvers": "1. Solvers: attention corrects a step",
    "networks": "2. Networks: attention is a step size",
    "attention": "3. Transformers: attention is what moves",
    "text": "4. The same map in a language model",
}


def run(
    seed: int = 0,
    device: str | None = None,
    tell: Callable[[str, float], None] = lambda what, done: None,
    small: bool = False,
) -> dict[str, Any]:
    """All parts; one that fails is told of, and does not take the others with it.

    Args:
        seed: of all random numbers: the same seed gives the same numbers, times excepted.
        device: where to compute; None: the CPU.
        tell: called with what is being done, and how much of everything is done, from 0 to 1.
        small: seconds instead of minutes, and numbers that mean little: for tests.
    """
    began, before, parts = time.perf_counter(), 0.0, {}
    for name, (module, share) in PARTS.items():
        start = time.perf_counter()

        def inside(what: str, done: float, before: float = before, share: float = share) -> None:
            tell(what, before + share * min(1.0, done))

        try:
            with torch.random.fork_rng(devices=[]), _one_thread():
                parts[name] = module.run(seed, device or "cpu", inside, small)
        except Exception as error:
            parts[name] = {
                "failed": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc(),
            }  # fmt: skip
        parts[name]["seconds"] = time.perf_counter() - start
        before += share
        tell(f"{name}: done", before)
    return {
        "seed": seed, "device": device or "cpu", "small": small, "attractor": attractor.__version__,
        "torch": torch.__version__, "python": platform.python_version(),
        "seconds": time.perf_counter() - began, "parts": parts,
    }  # fmt: skip


def write(results: dict[str, Any], folder: Path | str) -> Path:
    """report.html, results.json and picture.png in folder; returns the page's path."""
    from attractor.demo import picture
    from attractor.report import Page

    folder = Path(folder)
    write_json(folder / "results.json", numbers(results))
    page = Page("Attention as time stepping: the demo")
    page.text(
        "Three papers say one thing in three places: attention is a way to take a step. In a numerical "
        "solver it corrects the step, in a residual network it is the step's size, and in a transformer "
        "the attention map itself takes steps. All you see was computed by this run, in "
        f"{results['seconds']:.0f} seconds (device {results['device']}, seed {results['seed']})."
    )
    for name, found in results["parts"].items():
        page.section(TITLES[name])
        if "failed" in found:
            page.text(f"This part failed: {found['failed']}. The others are whole.")
        else:
            PARTS[name][0].show(page, found)
    page.section("Again")
    page.text(
        f"attractor {results['attractor']}, torch {results['torch']}, Python {results['python']}, one "
        "thread. The same seed gives the same numbers, times excepted; they are in results.json beside "
        "this page."
    )
    again = ["attractor", "demo", "--seed", str(results["seed"]), "--out", str(folder)]
    again += ["--device", results["device"]] if results["device"] != "cpu" else []
    page.command(shlex.join(again + (["--small"] if results["small"] else [])))
    picture.write(results["parts"], folder / "picture.png")
    return page.write(folder / "report.html")


@contextmanager
def _one_thread() -> Iterator[None]:
    """Small tensors gain nothing from more, and on a busy machine threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def numbers(value: Any) -> Any:
    """Results without what only pictures need."""
    if isinstance(value, dict):
        return {key: numbers(inside) for key, inside in value.items() if key != "drawn"}
    return value
