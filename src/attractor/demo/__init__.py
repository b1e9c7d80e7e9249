"""The demo: all parts of the library on one page, in a minute or two, on data of the library.

`run` computes the parts, and `write` makes a page of the results; the command line calls both.

>>> from attractor import demo
>>> results = demo.run(small=True)      # doctest: +SKIP
>>> demo.write(results, "out/demo")      # doctest: +SKIP
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
from attractor.demo import attention, networks, solvers, text
from attractor.storage.files import lock_folder, write_json

# Name -> module, and its share of the time. A module's `run` returns a dictionary, in which "drawn"
# holds data for pictures; `show` adds it to a page; `summary` returns lines for the terminal.
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
    tell: Callable[[str, float], None] = lambda what, fraction: None,
    small: bool = False,
) -> dict[str, Any]:
    """Compute all parts. If one fails, the results contain its error, and the others still run.

    Args:
        seed: seed of all random numbers: the same seed gives the same numbers, except for times.
        device: the device; None: the CPU.
        tell: a function that is called with the current task and the finished fraction, from 0 to 1.
        small: whether to take seconds instead of minutes, for tests; the numbers then mean little.
    """
    began, before, parts = time.perf_counter(), 0.0, {}
    for name, (module, share) in PARTS.items():
        start = time.perf_counter()

        def report(what: str, fraction: float, before: float = before, share: float = share) -> None:
            tell(what, before + share * min(1.0, fraction))

        try:
            with torch.random.fork_rng(devices=[]), _one_thread():
                parts[name] = module.run(seed, device or "cpu", report, small)
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
    """Write report.html, results.json and picture.png to a folder; return the path of the page."""
    from attractor.demo import picture
    from attractor.report import Page

    folder = Path(folder)
    page = Page("Attention as time stepping: the demo")
    page.text(
        "Three papers use attention to take a step. In a numerical solver it corrects the step, in a "
        "residual network it is the size of the step, and in a transformer the attention map itself "
        "takes steps. Everything on this page was computed by this run, in "
        f"{results['seconds']:.0f} seconds (device {results['device']}, seed {results['seed']})."
    )
    for name, part in results["parts"].items():
        page.section(TITLES[name])
        if "failed" in part:
            page.text(f"This part failed: {part['failed']}. The others are complete.")
        else:
            PARTS[name][0].show(page, part)
    page.section("Repeat this run")
    page.text(
        f"attractor {results['attractor']}, torch {results['torch']}, Python {results['python']}, one "
        "thread. The same seed gives the same numbers, except for times; they are in results.json "
        "beside this page."
    )
    again = ["attractor", "demo", "--seed", str(results["seed"]), "--out", str(folder)]
    again += ["--device", results["device"]] if results["device"] != "cpu" else []
    page.command(shlex.join(again + (["--small"] if results["small"] else [])))
    with lock_folder(folder):  # all files are of one demo
        write_json(folder / "results.json", numbers(results))
        picture.write(results["parts"], folder / "picture.png")
        return page.write(folder / "report.html")


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: small tensors gain nothing from more, and threads of busy machines wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def numbers(value: Any) -> Any:
    """Return results without the data of pictures."""
    if isinstance(value, dict):
        return {key: numbers(entry) for key, entry in value.items() if key != "drawn"}
    return value
