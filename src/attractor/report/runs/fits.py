"""Fits of hybrid solvers: the folder of `attractor fit`, or of a saved solver."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attractor.ode.serialization import HISTORY, history_from_json
from attractor.ode.solver_checkpoint import SOLVER
from attractor.report import live
from attractor.report.page import Page
from attractor.report.runs.run import OPTIONAL_NUMBER, ORIGIN, Run, look, read_json
from attractor.storage.schema import listing, mapping, number, plain, record, text

ABOUT = (
    "A hybrid solver takes large steps of a plain scheme and adds a learnt correction. "
    "The errors are those on trajectories that were not used in the fit."
)
CURVE = listing(OPTIONAL_NUMBER)
FIT = record(
    {},
    {
        "equation": text(), "horizon": number(5e-324), "history": HISTORY,
        "test": mapping(
            record({"error": OPTIONAL_NUMBER, "rate_calls": number(0, whole=True)}, others=plain)
        ),
        "curves": record({"times": CURVE, "errors": mapping(CURVE), "states": listing(listing(CURVE))}),
        **ORIGIN,
    },
    others=plain,
)  # fmt: skip


def read(path: Path, name: str) -> Run:
    """Read the run in a folder with fit.json, or with a solver's config.json."""
    fit = read_json(path / "fit.json", FIT) if (path / "fit.json").exists() else {}
    inner = path / "solver" if (path / "solver").is_dir() else path
    config = read_json(inner / "config.json", SOLVER) if (inner / "config.json").exists() else {}
    history = fit.get("history") or history_from_json(config.get("history") or [], path)
    last = history[-1] if history else {}
    test = fit.get("test", {})
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
        "equation": fit.get("equation") or rate.get("system") or rate.get("name"),
        **rate.get("options", {}),
        "horizon": fit.get("horizon"),
        "dt": float.fromhex(config["dt"]) if "dt" in config else None,
        "scheme": scheme.get("scheme") or scheme.get("splitting"),
        "correction": config.get("correction"),
        "trust region": config.get("trust"),
    }
    content = {"test": test, "history": history, "curves": fit.get("curves") or {}}
    versions, command = fit.get("versions", {}), fit.get("command", "")
    return Run("fit", name, path, numbers, settings, versions, command, content)


def show(page: Page, runs: Sequence[Run]) -> None:
    """Show errors over time, the candidates of the fit, and states."""
    own = lambda run, text: f"{run.name}: {text}" if len(runs) > 1 else text
    rows = [
        [own(run, name), row["error"], row["rate_calls"]]
        for run in runs
        for name, row in run.content["test"].items()
    ]
    if rows:
        page.text("Errors of each solver:")
        page.table(["100 new trajectories", "mean square error", "rate calls"], rows)
    curves_by_name: dict[str, live.Line] = {}
    looks: dict[str, Any] = {}
    for i, run in enumerate(runs):
        curves = run.content["curves"]
        for j, (name, errors) in enumerate(curves.get("errors", {}).items()):
            curves_by_name[own(run, name)] = curves["times"][1:], errors[1:]
            looks[own(run, name)] = look(i, j) if len(runs) > 1 else look(j, j % 2)
    if curves_by_name:
        figure = live.lines(curves_by_name, x="time", y="root mean square error", log="y", looks=looks)
        caption = (
            "Root mean square error over time on new trajectories. The error of the plain scheme grows "
            "with every step; the error of the hybrid stays below it as long as its correction is "
            "accurate."
        )
        page.plot("Error over time", figure, caption=caption)
    _show_candidates(page, runs)
    for run in runs if len(runs) == 1 else ():
        times, states = run.content["curves"].get("times"), run.content["curves"].get("states")
        if states:
            count = range(len(states[0]))
            first = {f"trajectory {k + 1}": (times, [u[k][0] for u in states]) for k in count}
            caption = (
                f"{run.name}: five of the new trajectories, solved by the hybrid solver. "
                "Only the first component of the state is drawn."
            )
            figure = live.lines(first, x="time", y="first component of the state")
            page.plot(f"States of {run.name}", figure, 320, caption)


def _show_candidates(page: Page, runs: Sequence[Run]) -> None:
    """Show held-out errors of the candidates, or the loss per epoch for the paper's recipe."""
    errors_by_name: dict[str, live.Line] = {}
    looks: dict[str, Any] = {}
    losses: dict[str, live.Line] = {}
    for i, run in enumerate(runs):
        candidates: dict[str, list[tuple[float, float]]] = {}
        for row in run.content["history"]:
            if "scale" in row and "chosen" not in row:
                name = row["correction"] + (", state too" if row.get("state") else "")
                candidates.setdefault(name, []).append((row["scale"], row["rollout"]))
        for j, (name, pairs) in enumerate(candidates.items()):
            label = f"{run.name}: {name}" if len(runs) > 1 else name
            x, y = zip(*sorted(pairs))
            errors_by_name[label], looks[label] = (x, y), look(i, j) if len(runs) > 1 else look(j)
        epochs = [(row["epoch"] + 1, row["loss"]) for row in run.content["history"] if "loss" in row]
        if epochs:
            x, y = zip(*epochs)
            losses[run.name] = x, y
    if sum(len(x) for x, _ in errors_by_name.values()) > 1:
        label = "scale of the random weights"
        figure = live.lines(
            errors_by_name, x=label, y="held-out mean square error", log="xy", looks=looks, marks=True
        )
        figure["layout"]["xaxis"] |= {
            "dtick": None,
            "tickvals": sorted({x for a, _ in errors_by_name.values() for x in a}),
        }
        figure["layout"]["yaxis"]["dtick"] = None
        caption = (
            "Candidates of the fit: a point is the error of a candidate on held-out trajectories. "
            "The fit selects the lowest."
        )
        page.plot("Candidates of the fit", figure, 360, caption)
    if losses:
        page.plot("Loss of the fit", live.lines(losses, x="epoch", y="training loss", log="y"), 360)
