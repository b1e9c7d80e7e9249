"""Table 7: StepNet in place of the attention of a vision transformer, CIFAR-10 and CIFAR-100.

The paper replaces the attention modules of a ViT by StepNet (Appendix G) and does not say which ViT.
Here one with patches of 4 x 4, 192 channels and six layers. "StepNet for attention" has plain values
and StepNet as their step size (Eq. 32), so that patches see each other only through its mean. The
other reading of "ViT+StepNet", attention kept and StepNet a gate on every step, is an arm too.
"""

from dataclasses import replace

from attractor.reproduce import Experiment, Results, Scale, Verdict, all_of, gains

from .stepnet_shared import CLASSIFY, SEEDS

KINDS = {"ViT": {}, "StepNet for attention": {"mixer": "stepnet"}, "StepNet on all": {"gate": "stepnet"}}
DATA = {"CIFAR-10": "cifar10", "CIFAR-100": "cifar100", "digits": "digits"}
ARMS = {
    f"{what}, {name}": {**kind, "data": d} for name, d in DATA.items() for what, kind in KINDS.items()
}
LARGE = tuple(a for a in ARMS if not a.endswith("digits"))
SMALL = tuple(a for a in ARMS if a.endswith("digits"))
ADAMW = {"batch": 256, "learning_rate": 1e-3, "optimiser": "adamw", "weight_decay": 0.05, "clip": 1.0}
TINY = {"name": "vit", "patch": 2, "dim": 32, "depth": 3, "heads": 4}


def judge(results: Results) -> Verdict:
    """StepNet in place of attention against the plain ViT, for each data set."""
    rules = [
        gains([f"StepNet for attention, {d}"], over=f"ViT, {d}", claim=f"It is better on {d}")
        for d in ("CIFAR-10", "CIFAR-100")
    ]
    verdict = all_of(*rules)(results)
    told = [f"{a}: {results.mean(a):.2f}" for a in results.arms]
    return replace(verdict, why=f"{verdict.why}; {', '.join(told)}")


EXPERIMENT = Experiment(
    name="stepnet-table7",
    paper="stepnet",
    place="Table 7, CIFAR-10 and CIFAR-100, both rows",
    claim="A ViT is better with StepNet in place of its attention.",
    task=CLASSIFY,
    arms=ARMS,
    scales={
        "smoke": Scale(
            {
                "images": 192, "network": {**TINY, "depth": 2}, "probed": 0,
                "recipe": {**ADAMW, "epochs": 1, "batch": 32, "warmup": 0, "crop": 1, "flip": False},
            },
            arms=SMALL, judged=False, time="2 s",
        ),
        "cpu": Scale(
            {
                "network": TINY, "probed": 0,
                "recipe": {**ADAMW, "epochs": 30, "batch": 64, "warmup": 2, "crop": 1, "flip": False},
            },
            seeds=SEEDS, arms=SMALL, judged=False, time="2 min on 2 cores, on the digits",
            note="Here the digits that come with the library, and 30 epochs.",
        ),
        "gpu": Scale(
            {
                "network": {"name": "vit", "patch": 4, "dim": 192, "depth": 6, "heads": 4},
                "recipe": {**ADAMW, "epochs": 60, "warmup": 5}, "probed": 0,
            },
            seeds=SEEDS, arms=LARGE, time="20 min on one H200",
        ),
    },
    metric="accuracy",
    better="higher",
    numbers={
        "ViT, CIFAR-10": 89.08, "StepNet for attention, CIFAR-10": 90.32,
        "ViT, CIFAR-100": 66.32, "StepNet for attention, CIFAR-100": 68.88,
    },
    judge=judge,
    others=("parameters",),
    unit="%",
    data=("cifar10", "cifar100"),
    note="Network and recipe (AdamW, 60 epochs) are ours, the paper names neither; STL-10 is not here.",
)  # fmt: skip
