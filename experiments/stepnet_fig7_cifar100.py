"""Figure 7, over the networks of Table 1 on CIFAR-100."""

from dataclasses import replace

from attractor.reproduce import Scale

from .stepnet_fig7 import EXPERIMENT as CIFAR10
from .stepnet_shared import CIFAR100, SEEDS

EXPERIMENT = replace(
    CIFAR10,
    name="stepnet-fig7-cifar100",
    place="Figure 7, CIFAR-100",
    scales={
        "smoke": CIFAR10.scales["smoke"],
        "gpu": Scale(CIFAR100, seeds=SEEDS, time="none beside Table 1's on CIFAR-100"),
    },
    data=("cifar100",),
)
