"""Figure 7: does TNS go with accuracy? Rank correlations over the networks of Table 1.

Holds if both correlations over the means of the gates are positive beyond chance (5 %), with the paper's
step, in direction if by 20 %; does not if one is negative beyond chance; else so few gates cannot tell.
Seeds of one gate are no networks of their own. Those over all networks are told beside them, and the
same of TNS before training, when no network knows anything.
"""

from attractor.reproduce import DIRECTION, FAILS, HOLDS, UNTESTED, Experiment, Results, Scale, Verdict

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
    """By the means of gates, no gate among them."""
    both = compared(results)
    means, every = (both[of].correlations["gate"] for of in ("arms", "models"))
    kinds = ("kendall", "spearman")
    worst = max(means[f"{k}_p"] for k in kinds)
    word = UNTESTED
    if all(means[k] > 0 for k in kinds):
        word = HOLDS if worst < 0.05 else DIRECTION if worst < 0.2 else UNTESTED
    elif any(means[k] < 0 and means[f"{k}_p"] < 0.05 for k in kinds):
        word = FAILS
    told = [
        f"{what}: {c['kendall']:+.2f} (p {c['kendall_p']:.2f})"
        for column, what in TOLD.items()
        for c in [both["arms"].correlations[column]]
    ]
    why = f"Kendall's tau over the means of {len(results.arms)} arms, {'; '.join(told)}"
    rest = f"{every['kendall']:+.2f} over all {len(both['models'].rows)} networks with step F"
    return Verdict(word, f"{why}; {rest}, as if seeds were networks of their own")


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
