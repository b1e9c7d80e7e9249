"""Figure 7, over the networks of Table 1 on CIFAR-100."""

from .stepnet_fig7 import EXPERIMENT as ON_CIFAR10
from .stepnet_shared import on_cifar100

EXPERIMENT = on_cifar100(ON_CIFAR10)
