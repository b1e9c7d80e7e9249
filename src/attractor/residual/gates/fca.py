"""FCA: "FcaNet: Frequency Channel Attention Networks" (Qin et al., ICCV 2021)."""

import math
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from attractor.core.checks import as_int
from attractor.residual.gates.excitation import Excitation, narrow
from attractor.residual.gates.gate import Gate, check_branch, is_scripting, opened, traced

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
    frequency: Tensor  # `grid` for compiled code; floats, as an average rounds integers down

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
        self.grid = tuple(zip(*mine))  # [2, channels], along height and along width
        floats = torch.tensor(self.grid, device=device, dtype=dtype or torch.get_default_dtype())
        self.register_buffer("frequency", floats, persistent=False)
        hidden = narrow("FCA", channels, reduction)
        self.excitation = Excitation(
            channels, channels, hidden, zero=identity, device=device, dtype=dtype
        )

    def weights(self, f: Tensor, x: Tensor | None = None) -> Tensor:
        """F ``[batch, channels, 1, 1]``."""
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
        """The waves along an axis [channels, length], kept for the next call where that is possible."""
        device = self.frequency.device
        if torch.compiler.is_compiling() or traced(length) or transforms(device):
            return cosines(self.frequency[axis], length, dtype)
        return kept_cosines(self.grid[axis], length, device, dtype)

    def _save_to_state_dict(self, state: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(state, prefix, keep_vars)
        state[f"{prefix}frequency"] = torch.tensor(self.grid, device=self.frequency.device)

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, metadata: Any, strict: bool, missing: Any, *rest: Any
    ) -> None:
        saved = state.pop(f"{prefix}frequency", None)
        if saved is None:
            missing.append(f"{prefix}frequency")
        elif not saved.is_meta:
            self.grid = tuple(map(tuple, saved.round().long().tolist()))
            home = saved.device if self.frequency.is_meta else self.frequency.device
            self.frequency = torch.tensor(self.grid, device=home, dtype=self.frequency.dtype)
        super()._load_from_state_dict(state, prefix, metadata, strict, missing, *rest)


def transforms(device: torch.device) -> bool:
    """Whether tensors made now may be more than numbers, so that they must not outlive the call.

    Transforms of torch.func, dispatch modes such as FakeTensorMode, `torch.jit.trace` and the capture of
    a CUDA graph make tensors that mean nothing outside.
    """
    return (
        torch.jit.is_tracing()  # type: ignore[attr-defined]
        or torch._C._functorch.peek_interpreter_stack() is not None
        or _get_current_dispatch_mode() is not None
        or (device.type == "cuda" and torch.cuda.is_current_stream_capturing())
    )


@lru_cache(maxsize=128)
def kept_cosines(
    frequency: tuple[int, ...], length: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """`cosines`, made once and used by all gates."""
    with torch.inference_mode(False), torch.no_grad():  # they may be used in training later
        return cosines(torch.tensor(frequency, device=device), length, dtype)


def cosines(frequency: Tensor, length: int, dtype: torch.dtype, grid: int = GRID) -> Tensor:
    """Waves of unit mean square ``[channels, length]`` for frequencies of the grid ``[channels]``."""
    scaled = frequency.round().long() * length // grid
    odd = 2 * torch.arange(length, device=frequency.device) + 1
    turn = scaled[:, None] * odd % (4 * length)  # in integers: exact for long waves too
    # Multiplied first: torch.jit.trace makes the length a tensor, whose quotient would be float32.
    waves = (math.pi * turn.to(torch.promote_types(dtype, torch.float32)) / (2 * length)).cos()
    return torch.where(scaled[:, None] > 0, math.sqrt(2) * waves, waves).to(dtype)
