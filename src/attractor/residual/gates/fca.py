"""FCA: "FcaNet: Frequency Channel Attention Networks" (Qin et al., ICCV 2021)."""

import math
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from attractor.common.checks import as_int
from attractor.residual.gates.excitation import Excitation, narrow
from attractor.residual.gates.gate import Gate, check_branch, is_scripting, opened, traced

GRID = 7
# The 16 best of the 7 x 7 frequencies (height, width) on ImageNet, from the best one on.
TOP = ((0, 0), (0, 1), (6, 0), (0, 5), (0, 2), (1, 0), (1, 2), (4, 0),
       (5, 0), (1, 6), (3, 0), (0, 4), (0, 6), (0, 3), (3, 5), (2, 2))  # fmt: skip


class FCA(Gate):
    """SE with a cosine coefficient of each channel instead of its mean.

    Consecutive channels share a frequency, and all frequencies have equally many channels. A frequency
    (u, v) of the paper's 7 x 7 grid becomes ``u height // 7`` and ``v width // 7``, which is the paper's
    rule if 7 divides the size. Any size is possible, and at 1 x 1 the gate equals SE. A coefficient is a
    mean over space (the paper's sum, divided by ``sqrt(height * width)``), so it does not grow with the
    image. Frequency (0, 0) is the mean, so ``frequencies=1`` equals SE. ``2 C h + h + C`` parameters.

    Args:
        channels: C.
        frequencies: Number of frequencies, the paper's best 1 to 16.
        reduction: Ratio of C to the hidden size.
        identity: See `Gate`; the second layer starts at 0.
        device, dtype: Device and dtype of the parameters.
    """

    needs_image: ClassVar[bool] = True
    frequency: Tensor  # `grid` for compiled code; averages of weights would round integers down

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
            raise ValueError(f"FCA(frequencies={frequencies}); pass 1 to 16, as the paper ranks 16")
        count = min(frequencies, channels)
        pairs = [TOP[channel * count // channels] for channel in range(channels)]
        self.grid = tuple(zip(*pairs))  # [2, channels], along height and along width
        floats = torch.tensor(self.grid, device=device, dtype=dtype or torch.get_default_dtype())
        self.register_buffer("frequency", floats, persistent=False)
        hidden = narrow("FCA", channels, reduction)
        self.excitation = Excitation(
            channels, channels, hidden, zero=identity, device=device, dtype=dtype
        )

    def weights(self, f: Tensor, x: Tensor | None = None) -> Tensor:
        """Return F ``[batch, channels, 1, 1]``."""
        if not is_scripting():
            check_branch(self, f)
        dtype = self.excitation.reduce.weight.dtype
        if is_scripting():
            rows = cosines(self.frequency[0], f.shape[2], dtype)
            columns = cosines(self.frequency[1], f.shape[3], dtype)
        else:
            rows, columns = self._cosines(0, f.shape[2], dtype), self._cosines(1, f.shape[3], dtype)
        z = (f * columns[:, None]).mean(3)
        z = self.excitation((z * rows).mean(2).to(dtype))
        return opened(z, self.identity)[..., None, None].to(f.dtype)

    @torch.jit.unused
    def _cosines(self, axis: int, length: int, dtype: torch.dtype) -> Tensor:
        """Return the waves along an axis ``[channels, length]``, cached if possible."""
        device = self.frequency.device
        if torch.compiler.is_compiling() or traced(length) or in_transform(device):
            return cosines(self.frequency[axis], length, dtype)
        return cached_cosines(self.grid[axis], length, device, dtype)

    def _save_to_state_dict(self, state: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(state, prefix, keep_vars)
        state[f"{prefix}frequency"] = torch.tensor(self.grid, device=self.frequency.device)

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, metadata: Any, strict: bool, missing: Any, *rest: Any
    ) -> None:
        frequency = state.pop(f"{prefix}frequency", None)
        if frequency is None:
            missing.append(f"{prefix}frequency")
        elif not frequency.is_meta:
            self.grid = tuple(map(tuple, frequency.round().long().tolist()))
            device = frequency.device if self.frequency.is_meta else self.frequency.device
            self.frequency = torch.tensor(self.grid, device=device, dtype=self.frequency.dtype)
        super()._load_from_state_dict(state, prefix, metadata, strict, missing, *rest)


def in_transform(device: torch.device) -> bool:
    """Whether new tensors are valid during the current call only, and must not be cached.

    This holds in transforms of torch.func, dispatch modes such as FakeTensorMode, `torch.jit.trace`, and
    the capture of a CUDA graph.
    """
    return (
        torch.jit.is_tracing()  # type: ignore[attr-defined]
        or torch._C._functorch.peek_interpreter_stack() is not None
        or _get_current_dispatch_mode() is not None
        or (device.type == "cuda" and torch.cuda.is_current_stream_capturing())
    )


@lru_cache(maxsize=128)
def cached_cosines(
    frequency: tuple[int, ...], length: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Return `cosines` from a cache that all gates share."""
    with torch.inference_mode(False), torch.no_grad():  # training may use them later
        return cosines(torch.tensor(frequency, device=device), length, dtype)


def cosines(frequency: Tensor, length: int, dtype: torch.dtype, grid: int = GRID) -> Tensor:
    """Return waves ``[channels, length]`` with mean square 1 for frequencies ``[channels]``."""
    scaled = frequency.round().long() * length // grid
    odd = 2 * torch.arange(length, device=frequency.device) + 1
    phase = scaled[:, None] * odd % (4 * length)  # in integers, so exact for long waves
    # Multiply first: in torch.jit.trace the length is a tensor, and its quotient would be float32.
    waves = (math.pi * phase.to(torch.promote_types(dtype, torch.float32)) / (2 * length)).cos()
    return torch.where(scaled[:, None] > 0, math.sqrt(2) * waves, waves).to(dtype)
