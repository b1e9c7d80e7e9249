"""Whole attention by Triton kernels, forward and backward, where nothing but causality is masked.

Linear PDEs: stepped values (`values`) for a fused operator, and the keys near a causal wall (`near`),
within packed documents too.
Reaction-diffusion, as it is and split: `reaction`. Never required: without Triton, or on another device,
plain torch does the same, and `why_not` says why. These modules need Triton to be imported, so ask
first. With ``TRITON_INTERPRET=1`` in the environment before the first import the kernels run on a CPU,
slowly, to be tested there.
"""

import os
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attractor.attention.engines.selection import may_sync
from attractor.attention.engines.values import step_values
from attractor.attention.pdes import ReactionDiffusion
from attractor.attention.pdes.evolution import Evolution

if TYPE_CHECKING:
    from attractor.attention.engines.backends import Operator
    from attractor.attention.kernels.near import Packed

REACH = 8  # the furthest that kernels look: their sums over neighbours are unrolled
DIM = 256  # the deepest head: a row is held whole
TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
DEVICES = ("cuda",)  # where they are quick

TRITON = find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


def why_not(query: Tensor, value: Tensor, evolution: Evolution) -> str:
    """Return why kernels cannot be used for ``[*batch, heads, tokens, dim]``; empty if they can."""
    pde = evolution.pde
    if query.device.type not in DEVICES:
        return f"kernels are for {' and '.join(DEVICES)}, not {query.device.type}"
    if not TRITON:
        return "Triton is missing"
    if torch.compiler.is_exporting():
        return "exported programs run without attractor, and so without its kernels"
    reach = evolution.reach if hasattr(pde, "reach") else 0
    heads = query.shape[-3] if query.ndim > 2 else 1
    if not is_dataclass(pde) or not (pde.linear or type(pde) is ReactionDiffusion):
        return f"there is no kernel for {type(pde).__name__}"
    if not all(_one_a_head(getattr(pde, field.name), heads) for field in fields(pde)):
        return "kernels take coefficients for all heads or one for each"
    if not query.numel() or not value.numel():
        return "there is nothing to do"
    if not (usable(query, reach) and usable(value, reach)):
        return f"kernels reach 1 to {REACH} keys, in heads of up to {DIM}"
    if not pde.linear:
        from attractor.attention.kernels import reaction

        if not reaction.usable(query, value, evolution.steps):
            return f"reaction-diffusion in {query.dtype} has no kernel for heads of {query.shape[-1]}"
    return ""


def packed(
    query: Tensor, key: Tensor, value: Tensor, documents: Tensor, evolution: Evolution
) -> tuple["Packed | None", str]:
    """Documents ``[batch, tokens]`` as causal kernels of a linear PDE take them, or why they do not."""
    if not may_sync(documents.device):
        return None, "kernels have to look at documents, which compiled or captured code cannot"
    from attractor.attention.kernels import near

    found = near.packed(query, key, value, documents, evolution.reach)
    return found, "" if found is not None else "kernels want every document to be one run of tokens"


def _one_a_head(coefficient: Any, heads: int) -> bool:
    if not isinstance(coefficient, Tensor) or coefficient.numel() == 1:
        return True
    return coefficient.numel() == heads and coefficient.shape[-3:] == (heads, 1, 1)


def usable(x: Tensor, reach: int) -> bool:
    """Whether the kernels take values, queries or keys like x, for steps of that reach in all."""
    if not TRITON or not 1 <= reach <= REACH or x.shape[-1] > DIM or x.dtype not in TYPES:
        return False
    return x.device.type == "cuda" or (INTERPRETED and x.device.type == "cpu")


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    scale: float,
    evolution: Evolution,
    documents: "Packed | None" = None,
    operator: "Operator | None" = None,
) -> Tensor:
    """Return the output ``[batch, heads, queries, value dim]`` of a PDE on the key axis.

    Requires: `why_not` is empty for these arguments.

    Args:
        query, key, value: ``[batch, heads, tokens, dim]``, with equal numbers of heads, and of tokens if
            causal.
        documents: Documents that `packed` has returned.
        operator: For the far keys of a causal call without documents. None: it is chosen later.
    """
    from attractor.attention.kernels import near, reaction, values

    pde, steps, dt = evolution.pde, evolution.steps, evolution.dt
    if isinstance(pde, ReactionDiffusion):
        return reaction.attend(
            query, key, value, scale, pde=pde, steps=steps, dt=dt, is_causal=is_causal
        )
    taps = values.taps(pde, steps, dt, value)
    if is_causal:
        return near.causal(query, key, value, taps, scale, documents, operator)
    return scaled_dot_product_attention(query, key, values.step(value, taps, None), scale=scale)


def value_stepper(query: Tensor, value: Tensor, evolution: Evolution) -> Callable[..., Tensor] | None:
    """Return `stepped_values` if kernels can be used for ``[*batch, heads, tokens, dim]``, else None."""
    return None if why_not(query, value, evolution) else stepped_values


def stepped_values(evolution: Evolution, value: Tensor, open: Tensor | None) -> Tensor:
    """Return what `engines.values.step_values` does, by one kernel where it can be used.

    Args:
        value: ``[batch, heads, keys, dim]``.
        open: bool ``[batch or 1, heads or 1, 1, keys - 1]``, False at walls. None: only the ends are
            walls.
    """
    if not usable(value, evolution.reach):
        return step_values(evolution, value, open)
    from attractor.attention.kernels import values

    taps = values.taps(evolution.pde, evolution.steps, evolution.dt, value)
    return values.step(value, taps, open)
