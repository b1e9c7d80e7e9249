"""Pictures of the documentation: `python docs/pictures.py` writes them into docs/images.

Colours and greys are of middle brightness and the background is transparent, so that they can be read on
light and dark pages. Measurements come from experiments/results and benchmarks/results; the others are
computed here, in seconds.
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot as plt

import attractor as at
from attractor.reproduce import find, results

HERE = Path(__file__).parent
GREY, BLUE, ORANGE, GREEN = "#7d8590", "#3b82d6", "#e06c1f", "#1b9e77"
STYLE = {
    "font.size": 10, "axes.edgecolor": GREY, "axes.labelcolor": GREY, "axes.titlecolor": GREY,
    "xtick.color": GREY, "ytick.color": GREY, "text.color": GREY, "legend.labelcolor": GREY,
    "legend.frameon": False, "axes.spines.top": False, "axes.spines.right": False,
    "axes.titlesize": 10, "axes.titlelocation": "left", "lines.linewidth": 1.6,
    "savefig.transparent": True, "svg.hashsalt": "attractor",
}  # fmt: skip


def solver() -> Any:
    """An elastic pendulum: exact, with plain steps and with corrected ones of the same size."""
    dt, horizon = 0.25, 12.0
    system = at.systems.ElasticPendulum()
    fitted = at.fit(
        system, dt=dt, horizon=horizon, trajectories=100, width=128, correction="attns", fine_dt=0.01
    )
    u0 = system.sample(1, torch.Generator().manual_seed(7), torch.float64)
    t = torch.arange(0, horizon + dt / 2, dt, dtype=torch.float64)
    fine = torch.linspace(0, horizon, 601, dtype=torch.float64)
    exact = at.evolve(system, u0, fine, "dopri5", rtol=1e-8, atol=1e-9).u[:, 0]
    plain = at.evolve(system, u0, t, "rk4").u[:, 0]
    corrected = fitted.solve(u0, horizon).u[:, 0]

    figure, (path, error) = plt.subplots(1, 2, figsize=(9, 3.0), width_ratios=(1.7, 1))
    path.plot(fine, exact[:, 1], color=GREY, lw=3.5, alpha=0.45, label="exact")
    path.plot(t, plain[:, 1], "o-", color=ORANGE, ms=3, lw=1, label="u + dt S")
    path.plot(t, corrected[:, 1], "o", color=BLUE, ms=4, label="u + dt S + Q")
    path.set(title="state: a pendulum on a spring, its length over time", xlabel="time")
    path.legend(ncols=3, loc="upper left", bbox_to_anchor=(0, -0.2))
    truth = at.evolve(system, u0, t, "dopri5", rtol=1e-11, atol=1e-12).u[:, 0]
    for states, colour in ((plain, ORANGE), (corrected, BLUE)):
        error.semilogy(t[1:], (states - truth).abs().amax(-1)[1:], color=colour)
    error.set(title="largest error of a component", xlabel="time")
    return figure


def network() -> Any:
    """A residual network's steps, block by block: without a gate and with one."""
    found = results.load(find("stepnet-table1"), "gpu", HERE.parent / "experiments" / "results")
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.0), sharey=True)
    looks = {"none": (ORANGE, "x + f(x)"), "stepnet": (BLUE, "x + f(x) F, F by StepNet")}
    for name, (colour, label) in looks.items():
        low, middle, high = (found.curve(name, f"nsi_one{end}") for end in ("_low", "", "_high"))
        stage = torch.tensor(found.curve(name, "stage"))
        blocks = range(1, len(middle) + 1)
        axis = axes[int(name != "none")]
        axis.fill_between(blocks, low, high, color=colour, alpha=0.3, lw=0)
        axis.plot(blocks, middle, color=colour)
        for end in torch.nonzero(stage.diff()).flatten().tolist():
            axis.axvline(end + 1.5, color=GREY, lw=0.8, ls=":")
        axis.set(title=label, xlabel="block; dotted: a new stage")
    axes[0].set(ylabel="size of a step, |x' - x| / |x|", ylim=(0, None))
    return figure


def attention() -> Any:
    """One row of an attention map in pseudo-time: with a wall where its mask ends, and without."""
    torch.manual_seed(3)
    query, key = 2 * torch.randn(2, 1, 1, 24, 8, dtype=torch.float64)
    row, steps = 14, 8  # whose weight is near its mask's end
    key[..., row, :] = query[..., row, :] / 2
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.0), sharey=True)
    for axis, walls, title in (
        (axes[0], "mask", "a wall where the mask ends: A + dt P(A)"),
        (axes[1], "sequence", "no wall: weight on keys that are not there yet"),
    ):
        seen = at.attention.trace(
            query, key, is_causal=True, pde=at.pdes.Diffusion(alpha=0.25), steps=steps, walls=walls
        )
        before, after = seen.maps[0, 0, 0, row], seen.maps[-1, 0, 0, row]
        keys = list(range(len(after)))
        axis.bar(keys, after.numpy(), color=[BLUE if k <= row else ORANGE for k in keys])
        axis.step(keys, before.numpy(), where="mid", color=GREY, lw=1.2)
        axis.axvline(row + 0.5, color=GREEN, lw=2, ls="-" if walls == "mask" else ":")
        axis.set(title=title, xlabel="key; grey: before the steps, green: the mask's end")
    axes[0].set(ylabel=f"weights of query {row}")
    return figure


def kinetics() -> Any:
    """Robertson's reaction at twelve temperatures, and the time of 10,000 cells of four mechanisms."""

    def rate(t: torch.Tensor, u: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        a, b, c = u.unbind(-1)
        slow, fast, back = p.unbind(-1)
        first, second, third = slow * a, fast * b * b, back * b * c
        return torch.stack((third - first, first - second - third, second), -1)

    temperature = torch.linspace(280, 320, 12, dtype=torch.float64)[:, None]
    barriers = torch.tensor([6e3, 2e3, 3e3], dtype=torch.float64)
    at_300 = torch.tensor([0.04, 3e7, 1e4], dtype=torch.float64)
    p = at_300 * torch.exp(-barriers * (1 / temperature - 1 / 300))
    u0 = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64).expand(12, 3)
    t = torch.cat((torch.zeros(1), torch.logspace(-6, 10, 161))).double()
    solved = at.evolve(rate, u0, t, "rodas5p", parameters=p, rtol=1e-6, atol=1e-14, compile=True)

    figure, (cells, times) = plt.subplots(1, 2, figsize=(9, 3.0), width_ratios=(1.3, 1))
    colours = plt.get_cmap("coolwarm")(torch.linspace(0, 1, 12).numpy())
    for i, colour in enumerate(colours):
        cells.loglog(t[1:], solved.u[1:, i, 1], color=colour, lw=1.2)
    cells.set(title="intermediate, 280 K (blue) to 320 K (red)", xlabel="time")

    rows = json.loads((HERE.parent / "benchmarks" / "results" / "stiff.json").read_text())["rows"]
    names = list(dict.fromkeys(row["system"] for row in rows))
    looks = {"SciPy Radau": GREY, "diffrax Kvaerno5": ORANGE, "rodas5p": BLUE}
    for i, (solver_name, colour) in enumerate(looks.items()):
        seconds = {
            row["system"]: row["seconds"] for row in rows
            if row["solver"] == solver_name and row["rtol"] == 1e-4
        }  # fmt: skip
        places = [n + 0.27 * (i - 1) for n in range(len(names))]
        times.barh(places, [seconds.get(n, 0) for n in names], 0.25, color=colour, label=solver_name)
    times.set(xscale="log", xlabel="seconds, 10,000 cells, rtol 1e-4", yticks=range(len(names)))
    times.set_yticklabels(names)
    times.legend(
        ncols=3, loc="upper right", bbox_to_anchor=(1.05, 1.18), columnspacing=1, handlelength=1
    )
    figure.subplots_adjust(wspace=0.35)
    return figure


def fields() -> Any:
    """A field of Burgers' equation on a coarse grid, corrected and fine, and error against time."""
    coarse, fine = at.systems.Burgers(32), at.systems.Burgers(256, order=4)
    fitted = at.fit(
        coarse, reference=fine, dt=1 / 16, horizon=1.0, scheme="identity", trajectories=64,
        options={"radius": 2, "degree": 5}, fine_dt=1 / 256,
    )  # fmt: skip
    v0 = fine.sample(1, torch.Generator().manual_seed(12), torch.float64)
    u0 = coarse.grid.restrict(v0, fine.grid)
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
    curves = {
        "fine, 256 cells": (fine, at.evolve(fine, v0, ends, "dopri5", rtol=1e-7).final, GREY, "-"),
        "plain, 32 cells": (coarse, at.evolve(coarse, u0, ends, "dopri5", rtol=1e-7).final, ORANGE, "o"),
        "corrected, 32 cells": (coarse, fitted.solve(u0, 1.0).final, BLUE, "o"),
    }
    figure, (field, work) = plt.subplots(1, 2, figsize=(9, 3.0), width_ratios=(1.3, 1))
    for label, (system, u, colour, mark) in curves.items():
        x = (torch.arange(system.cells) + 0.5) * system.length / system.cells
        size = {"ms": 3, "mfc": "none" if "plain" in label else colour} if mark == "o" else {"lw": 1.2}
        field.plot(x, u[0], mark, color=colour, label=label, **size)
    field.set(title="a field at t = 1", xlabel="x")
    field.legend()

    kept = json.loads((HERE.parent / "benchmarks" / "results" / "fields.json").read_text())
    for order, colour in ((2, ORANGE), (4, GREEN)):
        rows = [min(r["schemes"].values(), key=lambda s: s["seconds"]["100"])
                for r in kept["plain"] if r["order"] == order]  # fmt: skip
        times, errors = [r["seconds"]["100"] for r in rows], [r["error"] for r in rows]
        work.loglog(times, errors, "o-", ms=3, color=colour, label=f"plain, order {order}")
    times, errors = zip(*((r["seconds"]["100"], r["error"]) for r in kept["hybrid"]))
    work.loglog(times, errors, "o", color=BLUE, ms=4, label="corrected")
    work.set(title="relative error", xlabel="seconds for 100 fields, compiled")
    work.legend()
    figure.subplots_adjust(wspace=0.25)
    return figure


PICTURES = {
    "idea-solver": solver, "idea-network": network, "idea-attention": attention, "kinetics": kinetics,
    "fields": fields,
}  # fmt: skip


def main(folder: Path) -> None:
    """Write all pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        for name, draw in PICTURES.items():
            figure = draw()
            path = folder / f"{name}.svg"
            figure.savefig(path, bbox_inches="tight", metadata={"Date": None, "Creator": None})
            plt.close(figure)
            print(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "images")
