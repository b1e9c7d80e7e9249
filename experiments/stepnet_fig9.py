"""Figure 9: do gates make small steps where the network is stiff? SE's first stage, CIFAR-100.

Two correlations of NSI with the mean of a block's gate: over inputs in each block (a), and over the
blocks of the stage for each input (b). NSI with the gate as the step, |f| / |x|; with step 1 the gate
is a factor of NSI itself.
"""

import statistics

from attractor.reproduce import DIRECTION, FAILS, HOLDS, UNTESTED, Experiment, Results, Scale, Verdict
from attractor.reproduce.verdict import margin, number

from .stepnet_shared import (
    CIFAR100,
    CLASSIFY,
    RECIPE,
    SEEDS,
    TABLE1,
    gate_correlations,
    of_seed,
    smoke,
)


def judge(results: Results) -> Verdict:
    """Holds if both are below 0 for SE by more than seeds differ, in direction if both means are; not if
    one is above 0 by more than that."""
    blocks, paths = (of_seed(results, "se", f"{m}_gate") for m in ("blocks", "paths"))
    found = [list(values.values()) for values in (blocks, paths)]
    each = ", ".join(f"{number(blocks[s])} and {number(paths[s])}" for s in blocks)
    others = ", ".join(
        f"{arm} {number(results.mean(arm, 'blocks_gate'))} and {number(results.mean(arm, 'paths_gate'))}"
        for arm in results.arms
        if arm != "se"
    )
    word = FAILS if any(statistics.fmean(x) > margin(x) for x in found) else UNTESTED
    if all(statistics.fmean(values) < 0 for values in found):
        sure = all(statistics.fmean(values) < -margin(values) for values in found)
        word = HOLDS if sure else DIRECTION
    told = f"correlation over inputs and over blocks, SE seed by seed: {each}; others: {others}"
    return Verdict(word, told)


EXPERIMENT = Experiment(
    name="stepnet-fig9",
    paper="stepnet",
    place="Figure 9 (Appendix D): SE, first stage",
    claim="In the first stage of SENet, gates are the smaller the larger NSI is.",
    task=CLASSIFY,
    arms={arm: TABLE1[arm] for arm in ("se", "eca", "srm", "stepnet")},
    scales={
        "smoke": smoke("se"),
        "gpu": Scale(CIFAR100, seeds=SEEDS, time="none beside Table 1's on CIFAR-100"),
    },
    metric="blocks_gate",
    better="",
    numbers={},
    judge=judge,
    others=("paths_gate", "negative_gate", "blocks_one", "paths_one"),
    data=("cifar100",),
    note=f"{RECIPE} The stage's first block is left out. blocks is over inputs in each block, "
    "paths over the blocks for each input. The paper names no data set.",
    picture=gate_correlations,
)
