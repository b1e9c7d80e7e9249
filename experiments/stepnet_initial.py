"""TNS beside its value before training: how much of it was learnt? The networks of Table 1.

The paper compares trained networks with the gate as the step. But gates begin below 1, so that with
this step TNS is larger than with step 1 from the beginning, and each gate begins at a value of its
own. The claim is taken to hold if gated networks have a larger TNS than the plain one after training,
and training raised theirs by more than the plain one's.
"""

import math
import statistics
from dataclasses import replace

from attractor.reproduce import (
    Effect,
    Experiment,
    Results,
    Scale,
    Verdict,
    combine,
    compare,
    decide,
    margin,
)

from .stepnet_shared import (
    CIFAR10,
    CLASSIFY,
    RECIPE,
    SEEDS,
    SHORT,
    SIX,
    STEPS,
    TABLE1,
    before_and_after,
    digits,
    of_seed,
    smoke,
)

LARGER = "After training, networks with gates have a larger TNS than the plain one"
LEARNT = "Training raised it by a larger factor than that of the plain one"
FIGURE = ("se", "eca", "srm")  # gates of the paper's Figure 2 that are run here


def judge(results: Results) -> Verdict:
    """With the paper's step, for the gates of its Figure 2: all are above the plain network after
    training, and have risen by a larger factor."""
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
        rises = {a: rises_over_plain(results, a, step) for a in gated}
        risen = [a for a, r in rises.items() if statistics.fmean(r) > 0]
        named = {"none": "plain"}
        each = ", ".join(
            f"{named.get(arm, arm)} {before[arm]:.2f} to {after[arm]:.2f}" for arm in results.arms
        )
        told.append(
            f"{name}, from before training to after it: {each}. Above the plain network by more than "
            f"seeds differ: {', '.join(above) or 'no gate'}; below it: {', '.join(below) or 'none'}; "
            f"{len(risen)} of {len(gated)} have risen by a larger factor than it"
        )
    start = [
        results.mean(a, "tns_gate_initial") / results.mean(a, "tns_one_initial") for a in gated
    ]  # of untrained networks
    told.append(
        f"Before training, taking F for the step makes TNS up to {max(start):.1f} times larger than "
        "step 1"
    )
    figure = [arm for arm in FIGURE if arm in gated]  # by the last step, the paper's
    higher = [compare(results, a, "none", metric="tns_gate", ratio=True) for a in figure]
    more = [Effect(f"rise of {a}", tuple(rises[a]), ratio=True) for a in figure]
    parts = [
        decide(higher, f"{decide(higher).tally()}, {'; '.join(map(str, higher))}", claim=LARGER),
        decide(more, f"{decide(more).tally()}, {'; '.join(map(str, more))}", claim=LEARNT),
    ]
    verdict = combine(parts)
    asked = "Asked of SE, ECA and SRM, the gates of its Figure 2, with step F"
    return replace(
        verdict, why=f"{verdict.why}. {asked}. With " + ". With ".join(told[:2]) + f". {told[2]}"
    )


def rises_over_plain(results: Results, arm: str, step: str) -> list[float]:
    """Return the log ratio of the TNS growth during training, relative to the plain network."""

    def rise(which: str) -> dict[int, float]:
        before, after = (of_seed(results, which, f"tns_{step}{end}") for end in ("_initial", ""))
        return {s: math.log(after[s] / before[s]) for s in after}

    ours, plain = rise(arm), rise("none")
    return [ours[s] - plain[s] for s in sorted(ours.keys() & plain.keys())]


EXPERIMENT = Experiment(
    name="stepnet-initial",
    paper="stepnet",
    place="Figures 2 and 7, and Section 2.3, CIFAR-10",
    claim="Gates learn to measure stiffness: trained networks with gates have a larger TNS.",
    task=CLASSIFY,
    arms={arm: TABLE1[arm] for arm in SIX},
    scales={
        "smoke": smoke("none", "stepnet"),
        "cpu": digits(time="none beside Table 1's"),
        "gpu": Scale(CIFAR10, seeds=SEEDS, training=SHORT, time="none beside Table 1's"),
    },
    metric="tns_gate",
    better="",
    numbers={},
    judge=judge,
    others=("tns_gate_initial", "tns_one", "tns_one_initial", "accuracy"),
    data=("cifar10",),
    note=f"{RECIPE} TNS of the first 256 test images. The paper's Figure 2 is of CIFAR-100 and "
    "STL-10, and has SE, FCA, ECA and SRM; the verdict is on the three of them that are run here. IEBN "
    "is no function of the input alone, so that both its steps are one.",
    picture=before_and_after,
)
