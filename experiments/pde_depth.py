"""Proposition D.4: depth adds pseudo-time.

L layers with one step of dt each are, the paper says, one evolution over L dt up to an error of first
order in dt, and damp high frequencies from layer to layer. Here on softmax maps: the error against the
exact flow as layers become more and dt smaller; and what becomes of it in a transformer, where every
layer makes its own map instead of going on with the last one's.
"""

import math
from itertools import pairwise

from attractor.reproduce import (
    EXACT,
    Effect,
    Experiment,
    Results,
    Scale,
    Verdict,
    decide,
    number,
    values_of,
)

CLOSE = 0.1  # of the order 1
LAYERS = (4, 8, 16, 32)


def judge(results: Results) -> Verdict:
    """Whether the error is of first order, and one map is the other."""
    errors = [results.mean(arm) for arm in results.arms]
    orders = [math.log2(a / b) for a, b in pairwise(errors)]
    additive = max(results.mean(arm, "additive") for arm in results.arms)
    high, low = (results.mean(results.arms[0], name) for name in ("high", "low"))
    own = results.mean(results.arms[0], "softmax")
    why = (
        f"orders of the error {', '.join(f'{p:.2f}' for p in orders)}; L layers of one step and one "
        f"of L differ by {number(additive)}; of the highest frequency {number(high)} is left, of the "
        f"lowest {number(low)}. Where every layer starts from its own softmax, as a transformer's do "
        f"(here without weights), the last map is {number(own)} of a map away from that of L steps: "
        "there pseudo-time does not add up"
    )
    errors_of = {arm: values_of(results, arm) for arm in results.arms}
    effects = [
        Effect(
            f"order from {a} to {b}",
            tuple(CLOSE - abs(math.log2(errors_of[a][s] / errors_of[b][s]) - 1) for s in errors_of[a]),
        )
        for a, b in pairwise(results.arms)
    ]
    effects.append(Effect("one map is the other", (1e-12 - additive,), deviation=EXACT))
    return decide(effects, why, headline=min(effects[:-1], key=lambda effect: effect.value),
                  measurement=f"orders {', '.join(f'{p:.2f}' for p in orders)}")  # fmt: skip


EXPERIMENT = Experiment(
    name="pde-depth",
    paper="pde",
    place="Proposition D.4 (order 1 of the error bound)",
    claim="L layers of one step dt act on a map like one evolution over L dt, up to an error of O(dt).",
    task="attractor.reproduce.tasks.maps:depth",
    base={"alpha": 0.1, "time": 4.0, "sharpness": 2.0},
    arms={f"{n} layers": {"layers": n} for n in LAYERS},
    scales={
        "smoke": Scale({"tokens": 32}, arms=("4 layers", "8 layers"), judged=False, time="1 s"),
        "cpu": Scale({"tokens": 128}, seeds=(0, 1, 2, 3, 4), time="20 s on one core"),
    },
    metric="error",
    better="lower",
    others=("additive", "high", "low", "softmax"),
    numbers={},
    judge=judge,
    note=(
        "The proposition is about steps of one map, and true of it: L Euler steps. A transformer's "
        "layers have maps of their own, of other queries and keys (here those that the map before has "
        "mixed), so that of its depth the proposition says nothing."
    ),
)
