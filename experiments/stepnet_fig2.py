"""Figure 2: TNS of networks with gates and without, CIFAR-100.

The paper takes the gate for the step size, NSI = |f| / |x|, and shows trained networks alone. Here
both steps, and the value before training beside the one after.
"""

from dataclasses import replace

from attractor.reproduce import Experiment, Results, Scale, Verdict, gains, number

from .stepnet_shared import CIFAR100, CLASSIFY, RECIPE, SEEDS, SHORT, STEPS, TABLE1, smoke, surfaces

ARMS = ("none", "se", "eca", "srm")


RULE = gains(ARMS[1:], over="none", metric="tns_gate", ratio=True)


def judge(results: Results) -> Verdict:
    """The paper's step decides; the other one, and what was there before training, is told."""
    verdict = RULE(results)
    told = [
        f"{told}, before and after: "
        + ", ".join(
            f"{arm} {number(results.mean(arm, f'tns_{step}_initial'))} and "
            f"{number(results.mean(arm, f'tns_{step}'))}"
            for arm in results.arms
        )
        for step, told in STEPS.items()
    ]
    return replace(verdict, why=f"TNS with step F: {verdict.why}. {'; '.join(told)}")


EXPERIMENT = Experiment(
    name="stepnet-fig2",
    paper="stepnet",
    place="Figure 2, CIFAR-100: ResNet, SE, ECA, SRM",
    claim="Networks with gates have a TNS much larger than that of the plain ResNet.",
    task=CLASSIFY,
    arms={arm: TABLE1[arm] for arm in ARMS},
    scales={
        "smoke": smoke("none", "se"),
        "gpu": Scale(CIFAR100, seeds=SEEDS, training=SHORT, time="none beside Table 1's on CIFAR-100"),
    },
    metric="tns_gate",
    better="",
    numbers={},
    judge=judge,
    others=("tns_gate_initial", "tns_one", "tns_one_initial", "accuracy"),
    data=("cifar100",),
    note=f"{RECIPE} The paper prints surfaces without numbers; FCA, and STL-10, are not run here.",
    picture=surfaces,
)
