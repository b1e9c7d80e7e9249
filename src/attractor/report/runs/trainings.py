"""Trainings: the folder that `attractor.train.train` or `train_seeds` writes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attractor.core.limits import read_json_lines
from attractor.core.schema import (
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
from attractor.report import live
from attractor.report.page import Page
from attractor.report.runs.run import Run, look, read_json

ABOUT = (
    "A line an epoch, the last one is what the training ended with. Validation is on data that the "
    "network was not trained on."
)
EPOCH = {"epoch": number(1, whole=True)}
ROWS = listing(record(EPOCH, others=any_of(number(), null, text(), flag)))
CONFIG = record(
    {}, {"recipe": mapping(plain), "steps": number(whole=True), "versions": mapping(text())}, plain
)
SHOWN = ("train_loss", "valid_loss", "train_accuracy", "valid_accuracy")


def read(path: Path, name: str) -> Run:
    """The run in a folder with log.jsonl."""
    log = _lines(path / "log.jsonl")
    times = _lines(path / "times.jsonl") if (path / "times.jsonl").exists() else []
    kept = sorted(path.glob("epoch-*/config.json"))
    config = read_json(kept[-1], CONFIG) if kept else {}
    last = log[-1] if log else {}
    numbers = {key: value for key, value in last.items() if key not in ("epoch", "lr")}
    seconds = sum(row.get("seconds") or 0.0 for row in times)
    return Run(
        "training",
        name,
        path,
        numbers={"epochs": len(log), **numbers, "seconds": seconds or None},
        settings={**config.get("recipe", {}), "steps an epoch": config.get("steps")},
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
    """Losses and accuracies epoch by epoch, and whatever else was logged."""
    logged = dict.fromkeys(key for run in runs for row in run.content["log"] for key in row)
    others = [n for n in logged if n not in (*SHOWN, "epoch", "lr", "step", "layer")]
    groups = {
        "loss": SHOWN[:2],
        "accuracy": SHOWN[2:],
        **{n: (n,) for n in others},
        "learning rate": ("lr",),
    }
    for title, columns in groups.items():
        named: dict[str, live.Line] = {}
        looks: dict[str, Any] = {}
        for i, run in enumerate(runs):
            log = run.content["log"]
            for column in columns:
                values = [row.get(column) for row in log]
                if any(isinstance(v, int | float) for v in values):
                    label = f"{run.name}, {column}" if len(runs) > 1 else column
                    named[label] = [row["epoch"] for row in log], values
                    dash = 1 if column.startswith("train_") else 0
                    looks[label] = look(i if len(runs) > 1 else dash, dash)
        if named:
            figure = live.lines(named, x="epoch", y=title, looks=looks, marks=True)
            page.plot(f"{title} by epoch", figure, 240 if title == "learning rate" else 340)
