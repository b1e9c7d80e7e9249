"""Figure 3: NSI block by block with SE and without, CIFAR-100.

"Significant and rapid oscillations" with SE, a "relatively smooth" line without: measured by how much
NSI changes from one block of a stage to the next, as a part of its mean (1 would be as much as it is
high).
"""

from dataclasses import replace

from attractor.reproduce import Experiment, Results, Scale, Verdict, gains, number

from .stepnet_shared import CIFAR100, CLASSIFY, RECIPE, SEEDS, SHORT, TABLE1, nsi, smoke

RULE = gains(["se"], over="none", metric="oscillation_gate", ratio=True)


def judge(results: Results) -> Verdict:
    """With the paper's step; the other and the network before training are told."""
    told = ", ".join(
        f"{arm} {number(results.mean(arm, metric))} ({what})"
        for metric, what in (
            ("oscillation_gate", "step F"), ("oscillation_gate_initial", "step F, before training"),
            ("oscillation_one", "step 1"),
        )
        for arm in results.arms
    )  # fmt: skip
    return replace(RULE(results), why=f"oscillation: {told}")


EXPERIMENT = Experiment(
    name="stepnet-fig3",
    paper="stepnet",
    place="Figure 3, CIFAR-100: ResNet and SE",
    claim="NSI oscillates strongly from block to block with SE, and less in the plain ResNet.",
    task=CLASSIFY,
    arms={arm: TABLE1[arm] for arm in ("none", "se")},
    scales={
        "smoke": smoke(),
        "gpu": Scale(CIFAR100, seeds=SEEDS, training=SHORT, time="none beside Table 1's on CIFAR-100"),
    },
    metric="oscillation_gate",
    better="",
    numbers={},
    judge=judge,
    others=("oscillation_gate_initial", "oscillation_one", "oscillation_one_initial"),
    data=("cifar100",),
    note=f"{RECIPE} The paper shows a picture without numbers; how oscillation is measured is ours.",
    picture=nsi,
)
