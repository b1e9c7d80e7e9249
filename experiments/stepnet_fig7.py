"""Figure 7: does TNS go with accuracy? Rank correlations over the networks of Table 1.

Holds if both correlations over all trained networks are positive beyond chance (5 %), with the paper's
step, in direction if by 20 %. Those over the gates' means are told beside them, but six points say
little. The same correlations of TNS before training, when no network knows anything, are told beside
them.
"""

from attractor.reproduce import DIRECTION, FAILS, HOLDS, Experiment, Results, Scale, Verdict

from .stepnet_shared import (
    CIFAR10,
    CLASSIFY,
    RECIPE,
    SEEDS,
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


def judge(results: Results) -> Verdict:
    """By all trained networks."""
    both = compared(results)
    found = both["models"].correlations["gate"]
    kinds = ("kendall", "spearman")
    worst = max(found[f"{k}_p"] for k in kinds)
    positive = all(found[k] > 0 for k in kinds)
    word = HOLDS if positive and worst < 0.05 else DIRECTION if positive and worst < 0.2 else FAILS
    told = [
        f"{what}: {c['kendall']:+.2f} (p {c['kendall_p']:.2f})"
        for column, what in TOLD.items()
        for c in [both["arms"].correlations[column]]
    ]
    models = both["models"]
    first = f"{found['kendall']:+.2f} (p {found['kendall_p']:.2f})"
    why = f"Kendall's tau over all {len(models.rows)} networks, step F: {first}"
    return Verdict(word, f"{why}; over the means of {len(results.arms)} gates, {'; '.join(told)}")


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
        "gpu": Scale(CIFAR10, seeds=SEEDS, time="none beside Table 1's"),
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
