"""DIA: "DIANet: Dense-and-Implicit Attention Network" (Huang et al., AAAI 2020)."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from attractor.residual.gates.excitation import Excitation, narrow
from attractor.residual.gates.gate import Gate, average, check_branch, traced


class DIA(Gate):
    """One LSTM cell for all blocks of a stage: it reads the pooled f of each, its output is the gate.

    The authors' cell: input, forget, candidate and output gates are the sum of two `Excitation`, of
    pool(f) and of the last output h; ``c = forget c + input tanh(candidate)`` and
    ``h = sigma(output) sigma(c)``, a sigmoid where an LSTM has tanh, so that h is a weight. (Their
    dropout acts between layers only, and there is one.) ``2 (5 C n + n + 4 C)`` parameters a stage for
    ``n = max(1, C // reduction)``.

    The memory (h, c) belongs to one pass through the stage: whoever owns the gate calls `start` before
    the stage's first block, in every forward; calling it after the last block too lets the memory and
    its graph go at once. `weights` and `forward` both move the memory on. Copies and saved states
    carry no memory. A block that is run again in the backward pass (activation checkpointing) would meet
    the wrong memory: checkpoint whole stages instead.

    Args:
        channels: C.
        reduction: how much narrower the middle of the excitations is.
        identity, device, dtype: see `Gate`; with identity both excitations start at 0, so that h is 1/4,
            which is then multiplied by 4.
    """

    shared: ClassVar[bool] = True
    sigmoids: ClassVar[int] = 2

    def __init__(
        self,
        channels: int,
        *,
        reduction: int = 4,
        identity: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(channels, identity, dtype, device)
        hidden = narrow("DIA", channels, reduction)
        factory: Any = {"zero": identity, "device": device, "dtype": dtype}
        self.read = Excitation(channels, 4 * channels, hidden, **factory)
        self.recall = Excitation(channels, 4 * channels, hidden, **factory)
        self.memory: tuple[Tensor, Tensor] | None = None

    def start(self) -> None:
        """Forget: the next block is a stage's first."""
        self.memory = None

    def weights(self, f: Tensor, x: Tensor | None = None) -> Tensor:
        """F ``[batch, channels, 1, 1]``; moves the memory on."""
        check_branch(self, f)
        dtype = self.read.reduce.weight.dtype
        mean = average(f, dtype).flatten(1)
        if self.memory is None:
            h = c = torch.zeros_like(mean)
        else:
            h, c = self.memory
            if not traced(h) and (h.shape != mean.shape or h.device != mean.device):
                raise ValueError(
                    f"DIA remembers {h.shape[0]} samples on {h.device} and was given {mean.shape[0]} on "
                    f"{mean.device}; call start() before the first block of a stage, in every forward"
                )
        gates = self.read(mean).to(dtype) + self.recall(h).to(dtype)
        take, keep, candidate, give = gates.chunk(4, 1)
        c = keep.sigmoid() * c + take.sigmoid() * candidate.tanh()
        h = give.sigmoid() * c.sigmoid()
        self.memory = (h, c)
        return (4 * h if self.identity else h)[..., None, None].to(f.dtype)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "memory": None}
