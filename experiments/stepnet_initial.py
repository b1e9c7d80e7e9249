"""TNS beside its value before training: how much of it was learnt? CIFAR-10, the networks of Table 1.

The paper compares trained networks with the gate as the step. But gates begin below 1, so that with
this step TNS is larger than with step 1 from the beginning, and each gate begins at a value of its
own. The claim is taken to hold if gated networks have a larger TNS than the plain one after training,
and training raised theirs by more than the plain one's.
"""

import statistics

from attractor.reproduce import DIRECTION, FAILS, HOLDS, Experiment, Results, Scale, Verdict
from attractor.reproduce.verdict import margin

from .stepnet_shared import (
    CIFAR10,
    CLASSIFY,
    RECIPE,
    SEEDS,
    SIX,
    STEPS,
    TABLE1,
    before_and_after,
    digits,
    smoke,
)

FIGURE = ("se", "eca", "srm")  # gates of the paper's Figure 2 that are run here


def judge(results: Results) -> Verdict:
    """With the paper's step, for the gates of its Figure 2: holds if all are above the plain network
    after training, by more than seeds differ, and have risen by more; in direction if their means are
    and have; else it does not."""
    gated = [a for a in results.arms if a != "none"]
    told = []
    for step, name in STEPS.items():
        before, after = (
            {arm: results.mean(arm, f"tns_{step}{end}") for arm in results.arms}
            for end in ("_initial", "")
        )
        gaps = {a: results.paired(a, "none", f"tns_{step}") for a in gated}
        above = [a for a, g in gaps.items() if statistics.fmean(g) > margin(g)]
        below = [a for a, g in gaps.items() if -statistics.fmean(g) > margin(g)]
        rose = {arm: after[arm] / before[arm] for arm in results.arms}
        more = [a for a in gated if rose[a] > rose["none"]]
        named = {"none": "plain"}
        each = ", ".join(
            f"{named.get(arm, arm)} {before[arm]:.2f} to {after[arm]:.2f}" for arm in results.arms
        )
        told.append(
            f"{name}, from before training to after it: {each}. By more than seeds differ, "
            f"{', '.join(above) or 'no gate'} ends above the plain network and "
            f"{', '.join(below) or 'none'} below it; {len(more)} of {len(gated)} have risen by a larger "
            "factor than it"
        )
    start = [
        results.mean(a, "tns_gate_initial") / results.mean(a, "tns_one_initial") for a in gated
    ]  # of untrained networks
    told.append(
        f"Before training, taking F for the step makes TNS up to {max(start):.1f} times larger than "
        "step 1"
    )
    # of the last step, the paper's
    higher = all(after[arm] > after["none"] and arm in more for arm in FIGURE if arm in gated)
    word = FAILS if not higher else HOLDS if set(FIGURE) <= set(above) else DIRECTION
    return Verdict(word, "on CIFAR-10, with " + ". With ".join(told[:2]) + f". {told[2]}")


EXPERIMENT = Experiment(
    name="stepnet-initial",
    paper="stepnet",
    place="Figures 2 and 7, and Section 2.3",
    claim="Gates learn to measure stiffness: trained networks with gates have a larger TNS.",
    task=CLASSIFY,
    arms={arm: TABLE1[arm] for arm in SIX},
    scales={
        "smoke": smoke("none", "stepnet"),
        "cpu": digits(time="none beside Table 1's"),
        "gpu": Scale(CIFAR10, seeds=SEEDS, time="none beside Table 1's"),
    },
    metric="tns_gate",
    better="",
    numbers={},
    judge=judge,
    others=("tns_gate_initial", "tns_one", "tns_one_initial", "accuracy"),
    data=("cifar10",),
    note=f"{RECIPE} TNS of the first 256 test images. The paper's Figure 2 is of CIFAR-100 and "
    "STL-10, and has SE, FCA, ECA and SRM. IEBN is no function of the input alone, so that both its "
    "steps are one.",
    picture=before_and_after,
)
