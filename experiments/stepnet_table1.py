"""Table 1, CIFAR-10: what a gate is worth, and whether StepNet is worth most.

One network, one recipe, several seeds, and nothing but the gate differs. Every network is probed
before training and after it on the same test images; figures that look at such networks share these
runs.
"""

from attractor.reproduce import Experiment, Scale

from .stepnet_shared import (
    CIFAR10,
    CLASSIFY,
    RECIPE,
    SEEDS,
    SHORT,
    SIX,
    TABLE1,
    digits,
    gains_picture,
    gates,
    smoke,
)

NUMBERS = {
    "none": 93.35, "se": 94.26, "cbam": 93.91, "eca": 94.15, "sem": 94.52, "srm": 94.59, "fca": 94.66,
    "iebn": 94.70, "stepnet": 95.14,
}  # fmt: skip

EXPERIMENT = Experiment(
    name="stepnet-table1",
    paper="stepnet",
    place="Table 1, CIFAR-10, six of nine rows",
    claim="Every gate makes ResNet164 better on CIFAR-10, and StepNet most.",
    task=CLASSIFY,
    arms=TABLE1,
    scales={
        "smoke": smoke("none", "stepnet"),
        "cpu": digits(*SIX, time="5 min on 2 cores, on the digits"),
        "gpu": Scale(CIFAR10, seeds=SEEDS, training=SHORT, arms=SIX, time="20 min on one H200"),
    },
    metric="accuracy",
    better="higher",
    numbers=NUMBERS,
    judge=gates(SIX),
    others=("parameters", "tns_one", "tns_gate"),
    unit="%",
    data=("cifar10",),
    note=f"{RECIPE} CBAM, SEM and FCA are not run at this scale.",
    picture=gains_picture(NUMBERS),
)
