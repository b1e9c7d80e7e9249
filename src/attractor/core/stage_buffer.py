"""Memory for the stages of a step without a graph."""

import torch
from torch import Tensor

from attractor.core.scheme import Scheme


class StageBuffer:
    """Memory for the stages of a step without a graph, whose weighted sums are one operation each."""

    def __init__(self, scheme: Scheme, u: Tensor) -> None:
        self.count = len(scheme.b)
        self.k = u.new_empty(self.count, u.numel())
        pad = lambda row: [*row, *[0.0] * (self.count - len(row))]
        rows = [*scheme._a, scheme._b, scheme.error_weights, scheme.lower_error_weights]
        self.weights = torch.tensor([pad(row) for row in rows], dtype=u.dtype, device=u.device)
        self.scaled = torch.empty_like(self.weights)
        self.stages = list(self.k.unbind())
        self.sums = [(self.k[:i].T, self.scaled[i, :i]) for i in range(self.count)]
        self.slope, self.error, self.lower_error = (
            (self.k.T, self.scaled[self.count + i]) for i in range(3)
        )

    def start(self, k: Tensor, h: float) -> None:
        """Begin a step of size h whose first stage is k."""
        self.stages[0].copy_(k)
        torch.mul(self.weights, h, out=self.scaled)
