"""Figure 6: the part of all blocks that are stiff, CIFAR-100.

With thresholds of zero every block above its stage's mean counts, which is no statement; all others up
to 2.4 do, in steps of 0.2 and 0.1. The metric is at 0.5 for both. Before training as well as after.
"""

from attractor.reproduce import Effect, Experiment, Results, Scale, Verdict, decide
from attractor.reproduce.tasks.images import table

from .stepnet_shared import CIFAR100, CLASSIFY, RECIPE, SEEDS, SHORT, SIX, STEPS, TABLE1, shares, smoke

MOST = 10  # per cent


def few(results: Results, arm: str, step: str, end: str = "") -> list[float]:
    """Return, by seed, the part of all pairs of thresholds above 0 at which at most a tenth of the
    blocks are stiff."""
    shares = (table(results.curve(arm, f"share_{step}{end}", s))[1:, 1:] for s in results.runs[arm])
    return [float((share <= 10 * MOST).mean()) for share in shares]


def effects(results: Results, step: str, end: str = "") -> list[Effect]:
    """Return by how much that part is above one half, in every network."""
    return [Effect(arm, tuple(x - 0.5 for x in few(results, arm, step, end))) for arm in results.arms]


def judge(results: Results) -> Verdict:
    """Few blocks are stiff at most thresholds, in all networks, with the paper's step; networks before
    training are the control."""
    least = {
        (step, end): min(min(few(results, arm, step, end)) for arm in results.arms)
        for step in STEPS
        for end in ("", "_initial")
    }
    told = ", ".join(
        f"{100 * x:.0f} % ({STEPS[step]}{', before training' * bool(end)})"
        for (step, end), x in least.items()
    )
    most = max(results.mean(arm, "proportion_gate") for arm in results.arms)
    return decide(
        effects(results, "gate"),
        f"in every network at most 10 % of the blocks are stiff at {told} of all pairs of thresholds, "
        f"or more; with both at 0.5 up to {100 * most:.1f} % are",
        control=effects(results, "gate", "_initial"),
        measurement=f"at {100 * least['gate', '']:.0f} % of thresholds; untrained "
        f"{100 * least['gate', '_initial']:.0f} %",
    )


EXPERIMENT = Experiment(
    name="stepnet-fig6",
    paper="stepnet",
    place="Figure 6, CIFAR-100",
    claim="Of a network's blocks only few are stiff, mostly 10 % or less.",
    task=CLASSIFY,
    arms={arm: TABLE1[arm] for arm in SIX},
    scales={
        "smoke": smoke("none", "eca"),
        "gpu": Scale(CIFAR100, seeds=SEEDS, training=SHORT, time="none beside Table 1's on CIFAR-100"),
    },
    metric="proportion_gate",
    better="",
    numbers={},
    judge=judge,
    others=("proportion_gate_initial", "proportion_one", "proportion_one_initial", "stiff_inputs_gate"),
    data=("cifar100",),
    note=f"{RECIPE} The metric has both thresholds at 0.5; the verdict all up to 2.4.",
    picture=shares,
)
