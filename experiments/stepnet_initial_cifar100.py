"""TNS beside its value before training, CIFAR-100, of which the paper's Figure 2 is."""

from dataclasses import replace

from attractor.reproduce import Scale

from .stepnet_initial import EXPERIMENT as CIFAR10
from .stepnet_shared import CIFAR100, SEEDS

EXPERIMENT = replace(
    CIFAR10,
    name="stepnet-initial-cifar100",
    place="Figures 2 and 7, and Section 2.3, CIFAR-100",
    scales={
        "smoke": CIFAR10.scales["smoke"],
        "gpu": Scale(CIFAR100, seeds=SEEDS, time="none beside Table 1's on CIFAR-100"),
    },
    data=("cifar100",),
)
