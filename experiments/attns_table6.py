"""Table 6: how |u''| is distributed along test trajectories.

1,000 trajectories cannot give shares such as 55.35 %, so the paper counts something else; all three
readings are tried: states by their largest component, components each by itself, trajectories.
"""

from dataclasses import replace
from typing import Any

from attractor.reproduce import EXACT, Effect, Experiment, Results, Scale, Verdict, decide, number

from .attns_shared import frame

READINGS = ("states", "components", "trajectories")
PAPER = {
    "spring-mass": (55.35, 80.51, 91.84, 96.68, 98.57, 99.41, 99.76, 99.91, 99.97),
    "2-link": (41.10, 65.93, 80.55, 89.48, 94.66, 97.61, 99.03, 99.71, 99.95),
}
LEVELS = {"spring-mass": list(range(30, 271, 30)), "2-link": list(range(5, 46, 5))}


def judge(results: Results) -> Verdict:
    """Judge the tail of the 2-link pendulum, all of whose constants are printed.

    Most states are below a third of the largest level, and some above two thirds, in the reading nearest
    to the paper's. How far the readings are from the paper's rows is said beside it.
    """
    off = {of: {s: results.mean(f"{s}, {of}") for s in PAPER} for of in READINGS}
    nearest = {s: min(READINGS, key=lambda of: off[of][s]) for s in PAPER}
    share = results.curve(f"2-link, {nearest['2-link']}", "share")
    rows = ", ".join(f"of {nearest[s]} for {s}, {number(off[nearest[s]][s])} points off" for s in PAPER)
    low, high = (
        Effect(
            "below a third of the largest level", (share[2] - 50,), PAPER["2-link"][2] - 50, "points"
        ),
        Effect("above two thirds of it", (100 - share[5],), 100 - PAPER["2-link"][5], "% of states"),
    )
    effects = [replace(effect, deviation=EXACT) for effect in (low, high)]
    why = (
        f"the nearest readings are {rows}; of the 2-link pendulum {share[2]:.0f} % are below a third "
        f"of the largest level and {100 - share[5]:.1f} % above two thirds"
    )
    return decide(effects, why, headline=effects[1], caveat="no reading gives the paper's rows")


def picture(results: Results) -> Any:
    """Shares below levels."""
    from attractor.report.figures import plt

    figure, axes = plt.subplots(1, 2, figsize=(9.5, 3.6), sharey=True)
    for axis, s in zip(axes, PAPER):
        axis.plot(LEVELS[s], PAPER[s], "o-", color="#1b1f24", label="paper")
        for of in READINGS:
            axis.plot(LEVELS[s], results.curve(f"{s}, {of}", "share"), "o--", ms=4, label=of)
        frame(axis, s, "level of |u''|", "per cent below it" if s == "spring-mass" else "")
    axes[1].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    return figure


EXPERIMENT = Experiment(
    name="attns-table6",
    paper="attns",
    place="Table 6",
    claim="|u''| has a long tail: few are large.",
    task="attractor.reproduce.tasks.solver_theory:curvature",
    arms={
        f"{s}, {of}": {"system": s, "of": of, "levels": LEVELS[s], "paper": PAPER[s]}
        for s in PAPER
        for of in READINGS
    },
    scales={
        "smoke": Scale({"test": 20, "substeps": 4}, judged=False, time="2 s"),
        "cpu": Scale({"test": 1000}, time="1 min on 2 cores"),
        "gpu": Scale({}, time="10 s on one H200"),
    },
    metric="off",
    better="lower",
    numbers={},
    unit="percentage points",
    judge=judge,
    note="The metric is the largest difference from the paper's row. |u''| is computed from the "
    "equation, not by differences. Test states do not depend on the seed, so there is one. The "
    "spring-mass constants, which decide the first row, are not in the paper.",
    picture=picture,
)
