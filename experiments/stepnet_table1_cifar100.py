"""Table 1, CIFAR-100: what a gate is worth. Figures 2, 3, 6, 9 and 10 look at these networks."""

from attractor.reproduce import Experiment, Scale

from .stepnet_shared import (
    CIFAR100,
    CLASSIFY,
    RECIPE,
    SEEDS,
    SHORT,
    SIX,
    TABLE1,
    gains_picture,
    gates,
    smoke,
)

NUMBERS = {
    "none": 74.30, "se": 75.25, "cbam": 74.68, "eca": 74.41, "sem": 76.49, "srm": 75.49, "fca": 76.52,
    "iebn": 76.32, "stepnet": 77.04,
}  # fmt: skip

EXPERIMENT = Experiment(
    name="stepnet-table1-cifar100",
    paper="stepnet",
    place="Table 1, CIFAR-100, six of nine rows",
    claim="Every gate makes ResNet164 better on CIFAR-100, and StepNet most.",
    task=CLASSIFY,
    arms=TABLE1,
    scales={
        "smoke": smoke("none", "srm"),
        "gpu": Scale(
            CIFAR100, seeds=SEEDS, training=SHORT, arms=SIX, time="19 min on one H200, three at a time"
        ),
    },
    metric="accuracy",
    better="higher",
    numbers=NUMBERS,
    judge=gates(SIX),
    others=("parameters", "tns_one", "tns_gate"),
    unit="%",
    data=("cifar100",),
    note=f"{RECIPE} CBAM, SEM and FCA are not run at this scale.",
    picture=gains_picture(NUMBERS),
)
