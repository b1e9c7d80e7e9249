"""Theorem 5.2: Q of AttNS is Lipschitz continuous; its constant bounded, and measured."""

import math
from typing import Any

from attractor.reproduce import EXACT, Effect, Experiment, Results, Scale, Verdict, decide, number

from .attns_shared import CPU, GPU, RECIPES, SEEDS, SMOKE, arms, frame

SYSTEMS = ("spring-mass", "2-link", "elastic")
KIND = {
    "paper": {"AttNS": {}},
    "default": {"AttNS": {}, "AttNS of rationals": {"options": {"activation": "rational"}}},
}
ARMS = {k: v for r in RECIPES for k, v in arms(SYSTEMS, KIND[r], (r,)).items()}


def judge(results: Results) -> Verdict:
    """Every bound is finite, and no constant that is seen is above it, but for rounding."""
    used = {a: max(results.values(a, "used")) for a in ARMS}
    finite = {a: max(results.values(a, "bound")) < math.inf for a in ARMS}
    effects = [
        Effect(a, (1 + 1e-9 - x if finite[a] else -1.0,), deviation=EXACT, inclusive=True)
        for a, x in used.items()
    ]
    least, most = min(used.values()), max(used.values())
    why = f"the largest constant that was seen is {number(least)} to {number(most)} of the bound"
    measured = f"at most {number(most)} of the bound"
    return decide(effects, why, headline=min(effects, key=lambda e: e.value), measurement=measured)


def picture(results: Results) -> Any:
    """Bound and what is observed."""
    from attractor.report.figures import plt

    figure, axis = plt.subplots(figsize=(9, 3.6))
    for key, mark in {"bound": "_", "observed": "o", "between": "x", "far": "^"}.items():
        axis.semilogy([results.mean(a, key) for a in ARMS], mark, ms=8, label=key)
    axis.set_xticks(
        range(len(ARMS)), [a.replace(": ", "\n").replace(", ", "\n") for a in ARMS], fontsize=7
    )
    frame(axis, "Lipschitz constant of Q", "", "")
    axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    return figure


EXPERIMENT = Experiment(
    name="attns-theorem52",
    paper="attns",
    place="Theorem 5.2",
    claim="Q is Lipschitz continuous.",
    task="attractor.reproduce.tasks.solver_theory:lipschitz",
    arms=ARMS,
    base={"correction": "attns", "horizon": {"elastic": 10.0}},
    scales={
        "smoke": Scale({**SMOKE, "states": 50}, judged=False, time="2 s"),
        "cpu": Scale({**CPU, "train": 200, "test": 100, "epochs": 40, "width": 256}, SEEDS,
                     training="8 %", time="3 min on 2 cores"),
        "gpu": Scale({**GPU, "train": 2000, "test": 1000, "epochs": 100, "horizon": {"elastic": 10.0}},
                     SEEDS, time="1 min on one H200"),
    },
    metric="used",
    better="",
    numbers={},
    others=("bound", "observed", "between", "far", "activation"),
    judge=judge,
    note="The bound is the product of the matrices' spectral norms and the steepest slope of the "
    "activation; observed are the largest spectral norm of Q's derivative on test states, "
    "quotients of differences between pairs of them, and the derivative far away. Lemma D.2 also"
    " asks the numerator to stay away from 0, which a cubic cannot; a denominator away from 0 is"
    " enough. The default recipe has sines, which need no lemma, so it is there with rational "
    "functions too.",
    picture=picture,
)  # fmt: skip
