"""Theorem 5.1: the error of AttNS is at most alpha dt + beta sqrt(delta); how tight is that?

Constants are the largest seen along test trajectories. All numbers are powers of ten, since beta has
exp(T L (1 + L_att)) in it. Here fine data are true, so the term with alpha is not needed.
"""

import math
from typing import Any

from attractor.reproduce import EXACT, Effect, Experiment, Results, Scale, Verdict, decide

from .attns_shared import CPU, RECIPES, SEEDS, SMOKE, frame

SYSTEMS = ("2-link", "elastic")
SCHEMES = ("euler", "rk4")
ENDS = (1.0, 10.0)
LOOSE = 6  # powers of ten between an error and a bound that says nothing about it


def arm(system: str, scheme: str, end: float, recipe: str) -> str:
    """Its name."""
    return f"{system}, {scheme}, T = {end:g}, {recipe}"


ARMS = {
    arm(s, k, end, r): {"system": s, "scheme": k, "end": end, "recipe": r}
    for s in SYSTEMS
    for k in SCHEMES
    for end in ENDS
    for r in RECIPES
}


def judge(results: Results) -> Verdict:
    """No error is above its bound; by how many powers of ten the bound is larger."""
    slack = {a: [x for x in results.values(a, "slack") if not math.isnan(x)] for a in ARMS}
    every = [x for values in slack.values() for x in values]
    lost = sum(len(results.values(a)) for a in ARMS) - len(every)
    missing = f"; {lost} of {lost + len(every)} solvers lost trajectories" if lost else ""
    effects = [
        Effect(a, (min(values),), unit="powers of ten", deviation=EXACT, inclusive=True)
        for a, values in slack.items()
        if values
    ]
    loose = f"the bound is 10^{min(every):,.0f} to 10^{max(every):,.0f} times the error"
    vacuous = f"no error could have contradicted a bound that is 10^{LOOSE} times larger and more"
    return decide(
        effects, loose + missing, headline=min(effects, key=lambda e: e.value),
        vacuous=vacuous if min(every) > LOOSE else "",
        measurement=f"the bound is 10^{min(every):,.0f} times the error, or more",
    )  # fmt: skip


def picture(results: Results) -> Any:
    """Error and bounds, default recipe."""
    from attractor.report.figures import plt

    shown = [a for a in ARMS if a.endswith("default")]
    figure, axis = plt.subplots(figsize=(9, 3.8))
    for k, (key, label) in enumerate(
        {"actual": "error", "carried": "residuals carried by Jacobians", "classical": "classical bound",
         "theorem": "Theorem 5.1"}.items()
    ):  # fmt: skip
        axis.plot([results.mean(a, key) for a in shown], "os^D"[k], label=label)
    axis.set_xticks(
        range(len(shown)), [a.rsplit(", ", 1)[0].replace(", ", "\n") for a in shown], fontsize=8
    )
    axis.set_yscale("symlog", linthresh=10)
    frame(axis, "default recipe", "", "power of ten")
    axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    return figure


EXPERIMENT = Experiment(
    name="attns-theorem51",
    paper="attns",
    place="Theorem 5.1",
    claim="The error at T is bounded by alpha dt + beta sqrt(delta).",
    task="attractor.reproduce.tasks.solver_theory:bound",
    arms=ARMS,
    base={"correction": "attns", "horizon": 10.0, "width": 128},
    scales={
        "smoke": Scale(
            {**SMOKE, "followed": 3, "horizon": 2.0}, judged=False, time="3 s",
            arms=tuple(arm(s, k, 1.0, r) for s in SYSTEMS for k in SCHEMES for r in RECIPES),
        ),
        "cpu": Scale({**CPU, "horizon": 10.0, "train": 200, "test": 100, "epochs": 50,
                      "compile": False}, SEEDS, training="10 %", time="5 min on 2 cores"),
        "gpu": Scale({"train": 2000, "test": 100, "epochs": 500, "compile": True}, SEEDS,
                     time="3 min on one H200"),
    },
    metric="actual",
    better="lower",
    numbers={},
    unit="power of ten",
    others=("carried", "classical", "theorem", "slack", "L", "L_att"),
    judge=judge,
    note="Width 128; 500 epochs from 2,000 trajectories, at scale cpu 50 from 200, so few updates. "
    "The theorem is stated for Euler's scheme; with the slope in"
    " place of f it holds for any, and is checked for RK4 too. alpha is read as M exp(2 T L) / "
    "(2 L), as the proof has it. delta is along the trajectories that are followed, not the "
    "training loss. A NaN is a solver that lost a trajectory.",
    picture=picture,
)  # fmt: skip
