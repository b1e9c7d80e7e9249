"""Trainings: the folder that `attractor.train.train` or `train_seeds` writes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attractor.report import live
from attractor.report.page import Page
from attractor.report.runs.run import Run, look, read_json
from attractor.storage.limits import read_json_lines
from attractor.storage.schema import (
    any_of,
    check,
    flag,
    listing,
    mapping,
    null,
    number,
    plain,
    record,
    text,
)

ABOUT = (
    "One point per epoch; the last one is the result of the training. Validation uses data on which the "
    "network was not trained."
)
EPOCH = {"epoch": number(1, whole=True)}
ROWS = listing(record(EPOCH, others=any_of(number(), null, text(), flag)))
CONFIG = record(
    {}, {"recipe": mapping(plain), "steps": number(whole=True), "versions": mapping(text())}, plain
)
MAIN_COLUMNS = ("train_loss", "valid_loss", "train_accuracy", "valid_accuracy")


def read(path: Path, name: str) -> Run:
    """Read the run in a folder with log.jsonl."""
    log = _lines(path / "log.jsonl")
    times = _lines(path / "times.jsonl") if (path / "times.jsonl").exists() else []
    configs = sorted(path.glob("epoch-*/config.json"))
    config = read_json(configs[-1], CONFIG) if configs else {}
    last = log[-1] if log else {}
    numbers = {key: value for key, value in last.items() if key not in ("epoch", "lr")}
    seconds = sum(row.get("seconds") or 0.0 for row in times)
    return Run(
        "training",
        name,
        path,
        numbers={"epochs": len(log), **numbers, "seconds": seconds or None},
        settings={**config.get("recipe", {}), "steps per epoch": config.get("steps")},
        versions=config.get("versions", {}),
        content={"log": log},
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        rows = read_json_lines(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    check(rows, ROWS, path)
    return rows


def show(page: Page, runs: Sequence[Run]) -> None:
    """Show losses and accuracies per epoch, and all other numbers in the log."""
    columns_of_log = dict.fromkeys(key for run in runs for row in run.content["log"] for key in row)
    others = [n for n in columns_of_log if n not in (*MAIN_COLUMNS, "epoch", "lr", "step", "layer")]
    groups = {
        "loss": MAIN_COLUMNS[:2],
        "accuracy": MAIN_COLUMNS[2:],
        **{n: (n,) for n in others},
        "learning rate": ("lr",),
    }
    for title, columns in groups.items():
        curves: dict[str, live.Line] = {}
        looks: dict[str, Any] = {}
        for i, run in enumerate(runs):
            log = run.content["log"]
            for column in columns:
                values = [row.get(column) for row in log]
                if any(isinstance(v, int | float) for v in values):
                    label = f"{run.name}, {column}" if len(runs) > 1 else column
                    curves[label] = [row["epoch"] for row in log], values
                    dash = 1 if column.startswith("train_") else 0
                    looks[label] = look(i if len(runs) > 1 else dash, dash)
        if curves:
            figure = live.lines(curves, x="epoch", y=title, looks=looks, marks=True)
            page.plot(f"{title} by epoch", figure, 240 if title == "learning rate" else 340)
