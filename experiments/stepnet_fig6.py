"""Figure 6: the part of all blocks that are stiff, CIFAR-100.

With thresholds of zero every block above its stage's mean counts, which is no statement; the number
here is that of both thresholds at 0.5, the picture has the others. Before training as well as after.
"""

from attractor.reproduce import FAILS, HOLDS, Experiment, Results, Scale, Verdict

from .stepnet_shared import CIFAR100, CLASSIFY, RECIPE, SEEDS, SIX, STEPS, TABLE1, shares, smoke

MOST = 0.10


def judge(results: Results) -> Verdict:
    """Holds if at most a tenth of the blocks are stiff, in all networks, with either step."""
    most = {
        (step, end): max(results.mean(arm, f"proportion_{step}{end}") for arm in results.arms)
        for step in STEPS
        for end in ("", "_initial")
    }
    few = all(x <= MOST for (_, end), x in most.items() if not end)
    told = ", ".join(
        f"{100 * x:.1f} % ({STEPS[step]}{', before training' * bool(end)})"
        for (step, end), x in most.items()
    )
    return Verdict(HOLDS if few else FAILS, f"at most, of {len(results.arms)} networks: {told}")


EXPERIMENT = Experiment(
    name="stepnet-fig6",
    paper="stepnet",
    place="Figure 6, CIFAR-100",
    claim="Of a network's blocks only few are stiff, mostly 10 % or less.",
    task=CLASSIFY,
    arms={arm: TABLE1[arm] for arm in SIX},
    scales={
        "smoke": smoke("none", "eca"),
        "gpu": Scale(CIFAR100, seeds=SEEDS, time="none beside Table 1's on CIFAR-100"),
    },
    metric="proportion_gate",
    better="",
    numbers={},
    judge=judge,
    others=("proportion_gate_initial", "proportion_one", "proportion_one_initial", "stiff_inputs_gate"),
    data=("cifar100",),
    note=RECIPE,
    picture=shares,
)
