"""Attention by Triton kernels, forward and backward: which calls have kernels, and their dispatch.

For linear PDEs, a fused operator computes most keys with stepped values (`values`), and kernels compute
boundary keys (`boundary`) near walls that move with the row. `causal` is for causal attention, also
within packed documents, and `window` for sliding windows. `reaction` has kernels for reaction-diffusion.

Kernels are optional: without Triton, or on another device, plain torch computes the same results.
`why_not` returns the reason. All other modules of this folder import Triton, so call `why_not` first. If
``TRITON_INTERPRET=1`` is set before the first import, kernels run on a CPU, slowly, for tests.
"""

import os
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attractor.attention.engines.values import step_values
from attractor.attention.pdes import ReactionDiffusion
from attractor.attention.pdes.evolution import Evolution
from attractor.common.versions import exporting

if TYPE_CHECKING:
    from attractor.attention.engines.strips import Operator
    from attractor.attention.kernels.causal import Documents

REACH = 8  # largest reach of all steps, because sums over neighbours are unrolled
DIM = 256  # largest head dimension, because a program holds entire rows
TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
DEVICES = ("cuda",)  # where kernels are faster than torch

TRITON = find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


def why_not(query: Tensor, value: Tensor, evolution: Evolution) -> str:
    """Return why kernels cannot compute ``[*batch, heads, tokens, dim]``; empty if they can."""
    pde = evolution.pde
    if query.device.type not in DEVICES:
        return f"kernels are for {' and '.join(DEVICES)}, not {query.device.type}"
    if not TRITON:
        return "Triton is missing"
    if exporting():
        return "exported programs run without attractor and its kernels"
    reach = evolution.reach if hasattr(pde, "reach") else 0
    heads = query.shape[-3] if query.ndim > 2 else 1
    if not is_dataclass(pde) or not (pde.linear or type(pde) is ReactionDiffusion):
        return f"there is no kernel for {type(pde).__name__}"
    if not all(_one_per_head(getattr(pde, field.name), heads) for field in fields(pde)):
        return "kernels require one set of coefficients, or one per head"
    if not query.numel() or not value.numel():
        return "the tensors are empty"
    if not (usable(query, reach) and usable(value, reach)):
        return f"kernels support a reach of 1 to {REACH} keys, and heads of up to {DIM}"
    if not pde.linear:
        from attractor.attention.kernels import reaction

        if not reaction.usable(query, value, evolution.steps):
            return f"reaction-diffusion in {query.dtype} has no kernel for heads of {query.shape[-1]}"
    return ""


def why_not_row(query: Tensor, key: Tensor, value: Tensor, evolution: Evolution) -> str:
    """Return why `attend_row` cannot compute ``[*batch, heads, tokens, dim]``; empty if it can."""
    if not evolution.linear:
        return f"{type(evolution.pde).__name__} is not linear"
    reason = why_not(query, value, evolution)
    if reason:
        return reason
    from attractor.attention.kernels import decoding

    heads = query.shape[-3] if query.ndim > 2 else 1
    key_heads = key.shape[-3] if key.ndim > 2 else 1
    if not evolution.same_for_all_heads and heads != key_heads:
        return "heads that share keys have coefficients of their own"
    return "" if decoding.usable(query, key, value) else "the kernel for one query has no gradients"


def attend_row(
    query: Tensor, key: Tensor, value: Tensor, valid: Tensor | None, scale: float, evolution: Evolution
) -> Tensor:
    """Return the output ``[batch, heads, 1, value dim]`` of one query, as in generation with a cache.

    Requires: `why_not_row` returns an empty string for these arguments.

    Args:
        query: ``[batch, heads, 1, dim]``.
        key, value: ``[batch, key heads, keys, dim]``.
        valid: bool ``[batch or 1, keys]``, True = attend, or None for all keys.
        scale: Scale of the scores.
        evolution: The PDE and its steps.
    """
    from attractor.attention.kernels.decoding import decode
    from attractor.attention.kernels.stencils import stencil_table

    return decode(query, key, value, valid, stencil_table(evolution, value), scale)


def pack_documents(
    query: Tensor, key: Tensor, value: Tensor, documents: Tensor, evolution: Evolution
) -> tuple["Documents | None", str]:
    """Return documents ``[batch, tokens]`` in the form of `attend`, or None and a reason.

    Compiled code cannot read the ids; the operator that it calls does.
    """
    if torch.compiler.is_compiling():
        return None, ""
    from attractor.attention.kernels import causal

    packed = causal.pack_documents(query, key, value, documents, evolution.reach)
    return packed, "" if packed is not None else "kernels require consecutive tokens of each document"


def _one_per_head(coefficient: Any, heads: int) -> bool:
    """Return whether a coefficient is a number, or a tensor with one entry or ``[heads, 1, 1]``."""
    if not isinstance(coefficient, Tensor) or coefficient.numel() == 1:
        return True
    return coefficient.numel() == heads and coefficient.shape[-3:] == (heads, 1, 1)


def usable(x: Tensor, reach: int) -> bool:
    """Return whether kernels support x as query, key or value, for this reach of all steps."""
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
    ids: Tensor | None = None,
    documents: "Documents | None" = None,
    operator: "Operator | None" = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Return the output ``[batch, heads, queries, value dim]`` of a PDE on the key axis.

    Requires: `why_not` returns an empty string for these arguments.

    Args:
        query, key, value: ``[batch, heads, tokens, dim]``, with equal numbers of tokens if causal. Key
            and value may have fewer heads if the PDE is linear and the same for all heads.
        is_causal: Whether row i attends to keys up to i only.
        scale: Scale of the scores.
        evolution: The PDE and its steps.
        ids: Ids of packed documents ``[batch, tokens]``, for causal attention.
        documents: The result of `pack_documents` for them; None to pack them later.
        operator: The operator for the far keys of a causal call without documents; None to choose it
            later.
        dropout_p: Dropout probability of the entries of A(0), for linear PDEs.
    """
    from attractor.attention.kernels import causal, reaction
    from attractor.attention.kernels.stencils import stencil_table
    from attractor.attention.kernels.values import step

    pde, steps, dt = evolution.pde, evolution.steps, evolution.dt
    if isinstance(pde, ReactionDiffusion):
        return reaction.attend(
            query, key, value, scale, pde=pde, steps=steps, dt=dt, is_causal=is_causal
        )
    stencil = stencil_table(evolution, value)
    if is_causal:
        options = ids, documents, operator, dropout_p
        return causal.causal(query, key, value, stencil, scale, *options)
    gqa = query.shape[1] != key.shape[1]
    stepped = step(value, stencil, None)
    return scaled_dot_product_attention(
        query, key, stepped, None, dropout_p, scale=scale, enable_gqa=gqa
    )


def why_no_dropout(query: Tensor, value: Tensor, evolution: Evolution, is_causal: bool) -> str:
    """Return why `attend` cannot drop weights; empty if it can. Requires: `why_not` returns ""."""
    if not evolution.linear:
        return f"kernels of {type(evolution.pde).__name__} support no dropout"
    if not is_causal:
        return ""
    from attractor.attention.kernels import causal

    return causal.why_no_dropout(query, value)


def value_step_function(
    query: Tensor, value: Tensor, evolution: Evolution
) -> Callable[..., Tensor] | None:
    """Return `stepped_values` if kernels can compute ``[*batch, heads, tokens, dim]``, else None."""
    return None if why_not(query, value, evolution) else stepped_values


def stepped_values(evolution: Evolution, value: Tensor, open: Tensor | None) -> Tensor:
    """Return the result of `engines.values.step_values`, by a kernel if there is one.

    Args:
        evolution: The PDE and its steps.
        value: ``[batch, heads, keys, dim]``.
        open: bool ``[batch or 1, heads or 1, 1, keys - 1]``, False at walls; None if only the ends are
            walls.
    """
    if not usable(value, evolution.reach):
        return step_values(evolution, value, open)
    from attractor.attention.kernels.stencils import stencil_table
    from attractor.attention.kernels.values import step

    return step(value, stencil_table(evolution, value), open)
