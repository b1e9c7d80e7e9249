"""Figure 9: do gates make small steps where the network is stiff? SE's first stage, CIFAR-100.

Two correlations of NSI with the mean of a block's gate: over inputs in each block (a), and over the
blocks of the stage for each input (b). NSI with the gate as the step, |f| / |x|; with step 1 the gate
is a factor of NSI itself.
"""

from attractor.reproduce import Effect, Experiment, Results, Scale, Verdict, decide, number

from .stepnet_shared import (
    CIFAR100,
    CLASSIFY,
    RECIPE,
    SEEDS,
    SHORT,
    TABLE1,
    gate_correlations,
    of_seed,
    smoke,
)


def judge(results: Results) -> Verdict:
    """Both correlations are below 0 for SE."""
    blocks, paths = (of_seed(results, "se", f"{m}_gate") for m in ("blocks", "paths"))
    each = ", ".join(f"{number(blocks[s])} and {number(paths[s])}" for s in blocks)
    others = ", ".join(
        f"{arm} {number(results.mean(arm, 'blocks_gate'))} and {number(results.mean(arm, 'paths_gate'))}"
        for arm in results.arms
        if arm != "se"
    )
    effects = [
        Effect(label, tuple(-x for x in values.values()))
        for label, values in (("over inputs", blocks), ("over blocks", paths))
    ]
    told = f"correlation over inputs and over blocks, SE seed by seed: {each}; others: {others}"
    return decide(effects, told)


EXPERIMENT = Experiment(
    name="stepnet-fig9",
    paper="stepnet",
    place="Figure 9 (Appendix D): SE, first stage",
    claim="In the first stage of SENet, gates are the smaller the larger NSI is.",
    task=CLASSIFY,
    arms={arm: TABLE1[arm] for arm in ("se", "eca", "srm", "stepnet")},
    scales={
        "smoke": smoke("se"),
        "gpu": Scale(CIFAR100, seeds=SEEDS, training=SHORT, time="none beside Table 1's on CIFAR-100"),
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
