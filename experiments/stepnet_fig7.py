"""Figure 7: does TNS go with accuracy? Rank correlations over the networks of Table 1.

Kendall's correlation over the means of the gates, with the paper's step, and its interval by Fisher's
transform with the variance of Fieller, Hartley and Pearson (1957). Seeds of one gate are not networks of
their own. The correlation over all networks is told beside it, and that of TNS before training, when no
network knows anything.
"""

import math

from attractor.reproduce import Deviation, Effect, Experiment, Results, Scale, Verdict, decide

from .stepnet_shared import (
    CIFAR10,
    CLASSIFY,
    RECIPE,
    SEEDS,
    SHORT,
    SIX,
    TABLE1,
    against_accuracy,
    compared,
    digits,
    smoke,
)

TOLD = {
    "gate": "step F", "one": "step 1", "gate_initial": "step F, before training",
    "one_initial": "step 1, before training",
}  # fmt: skip


def correlated(tau: float, count: int) -> Effect:
    """Return Kendall's correlation of `count` pairs on Fisher's scale, where its deviation is known."""
    z = math.atanh(max(-0.999, min(0.999, tau)))
    return Effect(
        "Fisher's z of Kendall's tau",
        (z,),
        deviation=Deviation(math.sqrt(0.437 / (count - 4)), count - 1),
    )


def judge(results: Results) -> Verdict:
    """By the means of gates, no gate among them."""
    both = compared(results)
    means, every = (both[of].correlations["gate"] for of in ("arms", "models"))
    told = [
        f"{what}: {c['kendall']:+.2f} (p {c['kendall_p']:.2f})"
        for column, what in TOLD.items()
        for c in [both["arms"].correlations[column]]
    ]
    why = f"Kendall's tau over the means of {len(results.arms)} arms, {'; '.join(told)}"
    rest = f"{every['kendall']:+.2f} over all {len(both['models'].rows)} networks with step F"
    effect = correlated(means["kendall"], len(results.arms))
    start = correlated(both["arms"].correlations["gate_initial"]["kendall"], len(results.arms))
    low, high = map(math.tanh, effect.interval())
    return decide(
        [effect],
        f"{why}; {rest}, as if seeds were networks of their own",
        control=[start],
        caveat=f"{len(results.arms)} networks, all of one depth and recipe",
        measurement=f"tau {means['kendall']:+.2f} [{low:.2f}, {high:.2f}]",
    )


EXPERIMENT = Experiment(
    name="stepnet-fig7",
    paper="stepnet",
    place="Figure 7, CIFAR-10",
    claim="The larger a network's TNS, the higher its accuracy.",
    task=CLASSIFY,
    arms={arm: TABLE1[arm] for arm in SIX},
    scales={
        "smoke": smoke("none", "srm"),
        "cpu": digits(time="none beside Table 1's"),
        "gpu": Scale(CIFAR10, seeds=SEEDS, training=SHORT, time="none beside Table 1's"),
    },
    metric="tns_gate",
    better="",
    numbers={},
    judge=judge,
    others=("accuracy", "tns_gate_initial", "tns_one", "tns_one_initial"),
    data=("cifar10",),
    note=f"{RECIPE} The paper does not say over which networks and data it correlates.",
    picture=against_accuracy,
)
