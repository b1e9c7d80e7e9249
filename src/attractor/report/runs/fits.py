"""Fits of hybrid solvers: the folder that `attractor fit` writes, or that of a saved solver."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attractor.core.schema import listing, mapping, number, plain, record, text
from attractor.ode.serialization import HISTORY, history_from_json
from attractor.ode.solver_checkpoint import SOLVER
from attractor.report import live
from attractor.report.page import Page
from attractor.report.runs.run import ORIGIN, UNKNOWN, Run, look, read_json

ABOUT = (
    "A hybrid solver takes big steps of a plain scheme and adds a correction that it has learnt. "
    "The errors are on trajectories that the fit has not seen."
)
CURVE = listing(UNKNOWN)
FIT = record(
    {},
    {
        "equation": text(), "horizon": number(5e-324), "history": HISTORY,
        "test": mapping(record({"error": UNKNOWN, "rate_calls": number(0, whole=True)}, others=plain)),
        "curves": record({"times": CURVE, "errors": mapping(CURVE), "states": listing(listing(CURVE))}),
        **ORIGIN,
    },
    others=plain,
)  # fmt: skip


def read(path: Path, name: str) -> Run:
    """The run in a folder with fit.json, or with a solver's config.json."""
    told = read_json(path / "fit.json", FIT) if (path / "fit.json").exists() else {}
    inner = path / "solver" if (path / "solver").is_dir() else path
    config = read_json(inner / "config.json", SOLVER) if (inner / "config.json").exists() else {}
    history = told.get("history") or history_from_json(config.get("history") or [], path)
    last = history[-1] if history else {}
    test = told.get("test", {})
    error = lambda key: test[key]["error"] if key in test else None
    plain = next((key for key in test if key.startswith("plain") and "half" not in key), "")
    rate = config.get("rate", {})
    scheme = config.get("scheme", {})
    numbers = {
        "mean square error of the fit": last.get("rollout"),
        "worst trajectory of the fit": last.get("worst"),
        "without the correction": last.get("plain"),
        "new trajectories, hybrid": error("hybrid"),
        "new trajectories, plain": error(plain),
        "candidates": len([row for row in history if "chosen" not in row]) or None,
        "seconds": last.get("seconds"),
    }
    settings = {
        "equation": told.get("equation") or rate.get("system") or rate.get("name"),
        **rate.get("options", {}),
        "horizon": told.get("horizon"),
        "dt": float.fromhex(config["dt"]) if "dt" in config else None,
        "scheme": scheme.get("scheme") or scheme.get("splitting"),
        "correction": config.get("correction"),
        "trust region": config.get("trust"),
    }
    content = {"test": test, "history": history, "curves": told.get("curves") or {}}
    versions, command = told.get("versions", {}), told.get("command", "")
    return Run("fit", name, path, numbers, settings, versions, command, content)


def show(page: Page, runs: Sequence[Run]) -> None:
    """Errors over time, what was tried, and the states."""
    own = lambda run, text: f"{run.name}: {text}" if len(runs) > 1 else text
    rows = [
        [own(run, name), row["error"], row["rate_calls"]]
        for run in runs
        for name, row in run.content["test"].items()
    ]
    if rows:
        page.text("Each way to solve them:")
        page.table(["100 new trajectories", "mean square error", "rate calls"], rows)
    named: dict[str, live.Line] = {}
    looks: dict[str, Any] = {}
    for i, run in enumerate(runs):
        curves = run.content["curves"]
        for j, (name, errors) in enumerate(curves.get("errors", {}).items()):
            named[own(run, name)] = curves["times"][1:], errors[1:]
            looks[own(run, name)] = look(i, j) if len(runs) > 1 else look(j, j % 2)
    if named:
        figure = live.lines(named, x="time", y="root mean square error", log="y", looks=looks)
        told = (
            "Root mean square error over time on new trajectories. The plain scheme's error grows with "
            "every step; the hybrid's stays below it as long as its correction is right."
        )
        page.plot("Error over time", figure, caption=told)
    _tried(page, runs)
    for run in runs if len(runs) == 1 else ():
        times, states = run.content["curves"].get("times"), run.content["curves"].get("states")
        if states:
            count = range(len(states[0]))
            first = {f"trajectory {k + 1}": (times, [u[k][0] for u in states]) for k in count}
            told = (
                f"{run.name}: five of the new trajectories as the hybrid solver follows them. "
                "Only the first component of the state is drawn."
            )
            figure = live.lines(first, x="time", y="first component of the state")
            page.plot(f"States of {run.name}", figure, 320, told)


def _tried(page: Page, runs: Sequence[Run]) -> None:
    """The candidates' held-out errors; of the paper's recipe the loss of every epoch."""
    named: dict[str, live.Line] = {}
    looks: dict[str, Any] = {}
    losses: dict[str, live.Line] = {}
    for i, run in enumerate(runs):
        kinds: dict[str, list[tuple[float, float]]] = {}
        for row in run.content["history"]:
            if "scale" in row and "chosen" not in row:
                name = row["correction"] + (", state too" if row.get("state") else "")
                kinds.setdefault(name, []).append((row["scale"], row["rollout"]))
        for j, (name, pairs) in enumerate(kinds.items()):
            label = f"{run.name}: {name}" if len(runs) > 1 else name
            x, y = zip(*sorted(pairs))
            named[label], looks[label] = (x, y), look(i, j) if len(runs) > 1 else look(j)
        epochs = [(row["epoch"] + 1, row["loss"]) for row in run.content["history"] if "loss" in row]
        if epochs:
            x, y = zip(*epochs)
            losses[run.name] = x, y
    if sum(len(x) for x, _ in named.values()) > 1:
        label = "scale of the random weights"
        figure = live.lines(
            named, x=label, y="held-out mean square error", log="xy", looks=looks, marks=True
        )
        figure["layout"]["xaxis"] |= {
            "dtick": None,
            "tickvals": sorted({x for a, _ in named.values() for x in a}),
        }
        figure["layout"]["yaxis"]["dtick"] = None
        told = (
            "What the fit tried: a point is a candidate and its error on held-out trajectories. "
            "The lowest one was kept."
        )
        page.plot("What the fit tried", figure, 360, told)
    if losses:
        page.plot("Loss of the fit", live.lines(losses, x="epoch", y="training loss", log="y"), 360)
