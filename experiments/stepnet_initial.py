"""TNS beside its value before training: how much of it was learnt? CIFAR-10, the networks of Table 1.

The paper compares trained networks with the gate as the step. But gates begin below 1, so that with
this step TNS is larger than with step 1 from the beginning, and each gate begins at a value of its
own. The claim is taken to hold if gated networks have a larger TNS than the plain one after training,
and training raised theirs by more than the plain one's.
"""

from attractor.reproduce import FAILS, HOLDS, Experiment, Results, Scale, Verdict

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


def judge(results: Results) -> Verdict:
    """Both conditions with the paper's step, for all gates; both steps are told."""
    gated = [a for a in results.arms if a != "none"]
    told, good = [], True
    for step, name in STEPS.items():
        before, after = (
            {arm: results.mean(arm, f"tns_{step}{end}") for arm in results.arms}
            for end in ("_initial", "")
        )
        rose = {arm: after[arm] / before[arm] for arm in results.arms}
        early, late, more = (sum(x[a] > x["none"] for a in gated) for x in (before, after, rose))
        good = late == more == len(gated)  # of the last, the paper's step
        each = ", ".join(f"{arm} {before[arm]:.2f} to {after[arm]:.2f}" for arm in results.arms)
        told.append(
            f"{name}, before training to after it: {each}; above the plain network are {early} of "
            f"{len(gated)} gates before and {late} after; {more} have risen by a larger factor than it"
        )
    start = [
        results.mean(a, "tns_gate_initial") / results.mean(a, "tns_one_initial") for a in gated
    ]  # of untrained networks
    told.append(f"before training, step F alone makes TNS up to {max(start):.1f} times larger")
    return Verdict(HOLDS if good else FAILS, ". ".join(told))


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
    note=f"{RECIPE} TNS of the first 256 test images.",
    picture=before_and_after,
)
