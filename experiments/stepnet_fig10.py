"""Figure 10: is a network stiff whatever its seed? SE's first stage, CIFAR-100.

How far the stiffest block of the stage is above the stage's mean, of the mean NSI over inputs; "stiff"
is by a half of it or more. Whether it is the same block at every seed is told as well.
"""

from attractor.reproduce import Effect, Experiment, Results, Scale, Verdict, decide, number

from .stepnet_shared import (
    CIFAR100,
    CLASSIFY,
    RECIPE,
    SEEDS,
    SHORT,
    TABLE1,
    of_seed,
    seeds_side_by_side,
    smoke,
)

LEAST = 0.5


def judge(results: Results) -> Verdict:
    """The stage is stiff, at the mean over seeds; each seed and the network before training are told."""
    after, before = (of_seed(results, "se", f"peak_gate{end}") for end in ("", "_initial"))
    places = []
    for seed in after:
        stage = results.curve("se", "stage", seed)
        own = results.curve("se", "nsi_gate", seed)[1 : sum(s == stage[0] for s in stage)]
        places.append(2 + own.index(max(own)))
    each = ", ".join(f"{number(x)} (block {b})" for x, b in zip(after.values(), places))
    start = ", ".join(number(x) for x in before.values())
    why = f"the stiffest block is above the mean by {each}; before training by {start}"
    effects, control = (
        [Effect("se", tuple(x - LEAST for x in peaks.values()))] for peaks in (after, before)
    )
    measured = f"{Effect('', tuple(after.values()))} of the mean above it"
    return decide(effects, why, control=control, measurement=measured)


EXPERIMENT = Experiment(
    name="stepnet-fig10",
    paper="stepnet",
    place="Figure 10 (Appendix E): SE, first stage",
    claim="The first stage of SENet is stiff with whatever random seed it is trained.",
    task=CLASSIFY,
    arms={"se": TABLE1["se"]},
    scales={
        "smoke": smoke(),
        "gpu": Scale(CIFAR100, seeds=SEEDS, training=SHORT, time="none beside Table 1's on CIFAR-100"),
    },
    metric="peak_gate",
    better="",
    numbers={},
    judge=judge,
    others=("peak_gate_initial", "peak_one", "peak_one_initial"),
    data=("cifar100",),
    note=f"{RECIPE} The stage's first block is left out. The paper shows pictures without numbers "
    'and speaks of most inputs; here it is the mean over inputs, and "stiff" is by half of the '
    "stage's mean or more, a threshold of ours.",
    picture=seeds_side_by_side("se"),
)
