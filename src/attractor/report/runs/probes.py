"""Probes of residual networks: the folder of `attractor probe`, or a saved profile."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from attractor.report import live
from attractor.report.page import Page
from attractor.report.runs.run import OPTIONAL_NUMBER, ORIGIN, Run, look, read_json
from attractor.residual.profile import STEPS, StiffnessProfile
from attractor.storage.schema import flag, listing, number, record, text
from attractor.train.checkpoint import CheckpointError

ABOUT = (
    "NSI measures how fast a feature changes in a block, and TNS how much stiffer some blocks are than "
    "others. Both depend on the initial weights, so a trained network is shown beside its "
    "initialisation."
)
CELLS = 40
COUNT = number(0, whole=True)
PAIRS = record(dict.fromkeys(STEPS, record({"trained": OPTIONAL_NUMBER, "initial": OPTIONAL_NUMBER})))
STAGE = {"stage": COUNT, "first": text(), "blocks": COUNT}
STAGE |= dict.fromkeys(("mean", "largest", "initial", "gate"), OPTIONAL_NUMBER)
BLOCK = {"name": text(), "stage": COUNT, "one": number()}
BLOCK |= dict.fromkeys(("gate", "gate_value", "initial"), OPTIONAL_NUMBER)
PROBE = record(
    {
        "model": text(), "granularity": text(), "inputs": COUNT, "mean": text(), "tns": PAIRS,
        "stages": listing(record(STAGE)), "blocks": listing(record(BLOCK)),
    },
    {
        "tns_with_first": PAIRS, "note": text(10_000), "network": text(1000), "source": text(1000),
        "trained": flag, **ORIGIN,
    },
)  # fmt: skip


def read(path: Path, name: str) -> Run:
    """Read the run in a folder with probe.json, or with a profile."""
    inner = path / "profile" if (path / "profile").is_dir() else path
    try:
        profile = StiffnessProfile.load(inner)
    except CheckpointError:
        if not (path / "probe.json").exists():
            raise
        profile = None  # probe.json has the numbers
    numbers: dict[str, Any] = (
        read_json(path / "probe.json", PROBE) if (path / "probe.json").exists() else profile.numbers()  # type: ignore[union-attr]
    )
    tns = numbers["tns"]
    return Run(
        "probe",
        name,
        path,
        numbers={
            "TNS, step one": tns["one"]["trained"],
            "TNS, step one, initial": tns["one"]["initial"],
            "TNS, step gate": tns["gate"]["trained"],
            "TNS, step gate, initial": tns["gate"]["initial"],
            "blocks": len(numbers["blocks"]),
            "inputs": numbers["inputs"],
        },
        settings={
            "network": numbers.get("network") or numbers["model"],
            "inputs": numbers.get("source"),
            "trained": numbers.get("trained"),
            "granularity": numbers["granularity"],
            "mean": numbers["mean"],
        },
        versions=numbers.get("versions", {}),
        command=numbers.get("command", ""),
        content={"numbers": numbers, "profile": profile},
    )


def show(page: Page, runs: Sequence[Run]) -> None:
    """Show NSI by block, the stages, and the surface whose integral is TNS."""
    curves: dict[str, live.Line] = {}
    looks: dict[str, Any] = {}
    for i, run in enumerate(runs):
        blocks = run.content["numbers"]["blocks"]
        own = f"{run.name}: " if len(runs) > 1 else ""
        places = list(range(1, len(blocks) + 1))
        names = [f"{block['name']}: {block['one']:.3g}" for block in blocks]
        curves[f"{own}NSI"] = places, [block["one"] for block in blocks]
        looks[f"{own}NSI"] = look(i, text=names, hoverinfo="text")
        if any(block["initial"] is not None for block in blocks):
            curves[f"{own}initial"] = places, [block["initial"] for block in blocks]
            looks[f"{own}initial"] = look(i, 1, mode="lines")
    figure = live.lines(curves, x="block", y="NSI, mean over inputs", looks=looks, marks=True)
    figure["layout"]["yaxis"]["rangemode"] = "tozero"
    caption = "Mean stiffness of each block. A dashed line is the same network before training."
    page.plot("NSI by block", figure, caption=caption)
    columns = ("first", "stage", "blocks", "mean", "largest", "initial", "gate")
    rows = [
        [
            *([run.name] if len(runs) > 1 else []),
            *(row[c] + 1 if c == "stage" else row[c] for c in columns),
        ]
        for run in runs
        for row in run.content["numbers"]["stages"]
    ]
    page.table([*(["run"] if len(runs) > 1 else []), *columns], rows)
    for run in runs:
        if note := _note(run):
            page.text(f"{run.name}: {note}" if len(runs) > 1 else note)
        if run.content["profile"] is not None:
            _surface(page, run)


def _note(run: Run) -> str:
    """Return the note about what TNS omits, which older versions of probe.json lack."""
    profile = run.content["profile"]
    return profile.note if profile is not None else run.content["numbers"].get("note", "")


def _surface(page: Page, run: Run) -> None:
    profile = run.content["profile"]
    high = float(profile.nsi.max())
    m1, m2 = (torch.linspace(0, top, CELLS, dtype=profile.nsi.dtype) for top in (_widest(profile), high))
    try:
        share = 100 * profile.surface(m1, m2).T
    except ValueError:  # one block per stage, so there are no thresholds
        return
    figure = live.heatmap(
        share.tolist(), m1.tolist(), m2.tolist(), x="m1, times the mean of its stage", y="m2, NSI",
        of="stiff inputs, %", top=100.0,
    )  # fmt: skip
    caption = (
        f"{run.name}: the share of inputs with a block that is stiffer than both thresholds. "
        "Its integral is TNS."
    )
    page.plot(f"Surface of TNS of {run.name}", figure, 340, caption)


def _widest(profile: StiffnessProfile) -> float:
    """Return the largest m1 that one in a hundred inputs exceeds."""
    grid = torch.linspace(0, float(torch.bincount(profile.stage).max()), 200, dtype=profile.nsi.dtype)
    line = profile.surface(grid, torch.zeros(1, dtype=profile.nsi.dtype))[:, 0]
    exceeding = (line >= 0.01).nonzero()
    return float(grid[exceeding[-1]]) if len(exceeding) else 1.0
