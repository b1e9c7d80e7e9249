"""Standardised inputs and targets of corrections, for the recipe "normalised"."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attractor.ode.corrections import AttNSM
from attractor.ode.pairs import Pairs


@dataclass(frozen=True)
class Normal:
    """Inputs and targets of a correction, standardised per component.

    Attributes:
        x: Inputs ``[n, inputs]`` with mean 0 and deviation 1.
        error: Targets ``[n, d]`` with deviation 1.
        mean: Mean of the original inputs ``[inputs]``.
        deviation: Standard deviation of the original inputs ``[inputs]``.
        size: Standard deviation of the original targets ``[d]``.
    """

    x: Tensor
    error: Tensor
    mean: Tensor
    deviation: Tensor
    size: Tensor

    @classmethod
    def of(cls, model: Any, pairs: Pairs) -> "Normal":
        """Standardise pairs for a correction that adds the output of its network.

        Raises:
            ValueError: The correction is AttNS-m.
        """
        if isinstance(model, AttNSM):
            raise ValueError(
                "recipe 'normalised' does not support AttNS-m, which multiplies its output by the "
                "slope; use recipe 'paper'"
            )
        with torch.no_grad():
            x = model.inputs(pairs.step()).double()
        mean, deviation, size = x.mean(0), x.std(0), pairs.error.std(0)
        deviation = torch.where(deviation > 1e-12 * (1 + mean.abs()), deviation, 1.0)
        size = torch.where(size > 0, size, 1.0)
        return cls(((x - mean) / deviation).float(), (pairs.error / size).float(), mean, deviation, size)

    def fold(self, model: Any) -> None:
        """Fold the standardisation into the weights of the correction, in float64 against rounding."""
        net = model.double().net
        with torch.no_grad():
            for layer in (net.head, net.around):
                if layer is not None:
                    layer.weight.mul_(self.size[:, None])
            net.head.bias.mul_(self.size)
        net.standardise(self.mean, self.deviation)
