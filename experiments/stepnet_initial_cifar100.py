"""TNS beside its value before training, CIFAR-100, of which the paper's Figure 2 is."""

from .stepnet_initial import EXPERIMENT as ON_CIFAR10
from .stepnet_shared import on_cifar100

EXPERIMENT = on_cifar100(ON_CIFAR10)
