"""FCA: "FcaNet: Frequency Channel Attention Networks" (Qin et al., ICCV 2021)."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from attractor.core.checks import as_int
from attractor.residual.gates.excitation import Excitation, narrow
from attractor.residual.gates.gate import Gate, check_branch, opened, traced

GRID = 7
# The 16 best of the 7 x 7 frequencies on ImageNet, the best first: (along height, along width).
TOP = ((0, 0), (0, 1), (6, 0), (0, 5), (0, 2), (1, 0), (1, 2), (4, 0),
       (5, 0), (1, 6), (3, 0), (0, 4), (0, 6), (0, 3), (3, 5), (2, 2))  # fmt: skip


class FCA(Gate):
    """SE that looks at a cosine coefficient of every channel, where SE looks at the mean.

    The channels are split evenly among the frequencies, neighbours together. A frequency (u, v) of the
    paper's 7 x 7 grid becomes ``u height // 7`` and ``v width // 7``, the paper's own rule where 7
    divides the size; it works at any size, and at 1 x 1 it is SE. A coefficient is a mean over space
    (the paper's sum, divided by ``sqrt(height * width)``), so it does not grow with the image, and
    frequency (0, 0) is the mean: ``frequencies=1`` is SE. ``2 C h + h + C`` parameters.

    Args:
        channels: C; any number.
        frequencies: how many of the paper's best, 1 to 16.
        reduction: how much narrower the middle of the two layers is.
        identity, device, dtype: see `Gate`; with identity the second layer starts at 0.
    """

    needs_image: ClassVar[bool] = True
    frequency: Tensor  # [2, channels], along height and along width

    def __init__(
        self,
        channels: int,
        *,
        frequencies: int = 16,
        reduction: int = 16,
        identity: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(channels, identity, dtype, device)
        frequencies = as_int(frequencies)
        if not isinstance(frequencies, int) or not 1 <= frequencies <= len(TOP):
            raise ValueError(f"FCA(frequencies={frequencies}); the paper ranks 16: give 1 to 16")
        used = min(frequencies, channels)
        mine = [TOP[channel * used // channels] for channel in range(channels)]
        self.register_buffer("frequency", torch.tensor(mine, device=device).T.contiguous())
        hidden = narrow("FCA", channels, reduction)
        self.excitation = Excitation(
            channels, channels, hidden, zero=identity, device=device, dtype=dtype
        )
        self.cosines: dict[tuple[int, int, torch.device, torch.dtype], Tensor] = {}

    def weights(self, f: Tensor, x: Tensor | None = None) -> Tensor:
        """F ``[batch, channels, 1, 1]``."""
        check_branch(self, f)
        dtype = self.excitation.reduce.weight.dtype
        rows, columns = self._cosines(0, f.shape[2], dtype), self._cosines(1, f.shape[3], dtype)
        z = (f * columns[:, None]).mean(3)
        z = self.excitation((z * rows).mean(2).to(dtype))
        return opened(z, self.identity)[..., None, None].to(f.dtype)

    def _cosines(self, axis: int, length: int, dtype: torch.dtype) -> Tensor:
        """The waves along an axis [channels, length], kept for the next call.

        Compiled code makes them anew: a tensor made inside a CUDA graph must not be kept.
        """
        if torch.compiler.is_compiling() or traced(length):
            return cosines(self.frequency[axis], length, dtype)
        key = (axis, length, self.frequency.device, dtype)
        if key not in self.cosines:
            if len(self.cosines) >= 32:  # images of all sizes
                self.cosines.clear()
            with torch.inference_mode(False), torch.no_grad():  # it may be used in training later
                self.cosines[key] = cosines(self.frequency[axis], length, dtype)
        return self.cosines[key]

    def _load_from_state_dict(self, *args: Any) -> None:
        self.cosines.clear()  # other frequencies may be loaded
        super()._load_from_state_dict(*args)


def cosines(frequency: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Waves of unit mean square ``[channels, length]`` for frequencies of the grid ``[channels]``."""
    scaled = frequency * length // GRID
    odd = 2 * torch.arange(length, device=frequency.device) + 1
    turn = scaled[:, None] * odd % (4 * length)  # in integers: exact for long waves too
    waves = (turn.to(torch.promote_types(dtype, torch.float32)) * (math.pi / (2 * length))).cos()
    return torch.where(scaled[:, None] > 0, math.sqrt(2) * waves, waves).to(dtype)
