"""Attention by Triton kernels, forward and backward: which calls have kernels, and their dispatch.

Linear PDEs take stepped values (`values`) for a fused operator and boundary keys (`boundary`) near walls
that move with the row: causal attention, within packed documents too (`causal`), and sliding windows
(`window`). Reaction-diffusion, exact and split, has kernels of its own (`reaction`).

Kernels are never required: without Triton, or on another device, plain torch computes the same, and
`why_not` says why. All modules of this folder import Triton, so ask first. With ``TRITON_INTERPRET=1``
in the environment before the first import, kernels run on a CPU, slowly, for tests.
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

REACH = 8  # the largest reach of all steps: sums over neighbours are unrolled
DIM = 256  # the largest head dimension: a program holds complete rows
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
        return "exported programs run without attractor, and so without its kernels"
    reach = evolution.reach if hasattr(pde, "reach") else 0
    heads = query.shape[-3] if query.ndim > 2 else 1
    if not is_dataclass(pde) or not (pde.linear or type(pde) is ReactionDiffusion):
        return f"there is no kernel for {type(pde).__name__}"
    if not all(_one_per_head(getattr(pde, field.name), heads) for field in fields(pde)):
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


def why_not_row(query: Tensor, key: Tensor, value: Tensor, evolution: Evolution) -> str:
    """Return why `attend_row` cannot compute ``[*batch, heads, tokens, dim]``; empty if it can."""
    if not evolution.linear:
        return f"{type(evolution.pde).__name__} is not linear"
    reason = why_not(query, value, evolution)
    if reason:
        return reason
    from attractor.attention.kernels import decoding

    heads = query.shape[-3] if query.ndim > 2 else 1
    shared = key.shape[-3] if key.ndim > 2 else 1
    if not evolution.same_for_all_heads and heads != shared:
        return "heads that share keys have coefficients of their own"
    return "" if decoding.usable(query, key, value) else "one query has a kernel without gradients only"


def attend_row(
    query: Tensor, key: Tensor, value: Tensor, valid: Tensor | None, scale: float, evolution: Evolution
) -> Tensor:
    """Return the output ``[batch, heads, 1, value dim]`` of one query, as in generation with a cache.

    Requires: `why_not_row` is empty for these arguments.

    Args:
        query: ``[batch, heads, 1, dim]``.
        key, value: ``[batch, shared heads, keys, dim]``.
        valid: bool ``[batch or 1, keys]``, True = attend; None: all keys.
    """
    from attractor.attention.kernels.decoding import decode
    from attractor.attention.kernels.stencils import stencil_table

    return decode(query, key, value, valid, stencil_table(evolution, value), scale)


def pack_documents(
    query: Tensor, key: Tensor, value: Tensor, documents: Tensor, evolution: Evolution
) -> tuple["Documents | None", str]:
    """Return documents ``[batch, tokens]`` as `attend` accepts them, or why causal kernels cannot.

    Compiled code cannot look at them, and leaves that to the operator that it calls.
    """
    if torch.compiler.is_compiling():
        return None, ""
    from attractor.attention.kernels import causal

    runs = causal.pack_documents(query, key, value, documents, evolution.reach)
    return runs, "" if runs is not None else "kernels want every document to be one run of tokens"


def _one_per_head(coefficient: Any, heads: int) -> bool:
    if not isinstance(coefficient, Tensor) or coefficient.numel() == 1:
        return True
    return coefficient.numel() == heads and coefficient.shape[-3:] == (heads, 1, 1)


def usable(x: Tensor, reach: int) -> bool:
    """Return whether kernels accept values, queries or keys like x, for steps of that reach in all."""
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

    Requires: `why_not` is empty for these arguments.

    Args:
        query, key, value: ``[batch, heads, tokens, dim]``, with equal numbers of tokens if causal. Key
            and value may have fewer heads if the PDE is linear and the same for all heads.
        ids: Of packed documents ``[batch, tokens]``, of causal attention.
        documents: What `pack_documents` has returned for them. None: they are packed later.
        operator: For the far keys of a causal call without documents. None: it is chosen later.
        dropout_p: Of the entries of A(0), for linear PDEs.
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
    share = query.shape[1] != key.shape[1]
    stepped = step(value, stencil, None)
    return scaled_dot_product_attention(
        query, key, stepped, None, dropout_p, scale=scale, enable_gqa=share
    )


def why_no_dropout(query: Tensor, value: Tensor, evolution: Evolution, is_causal: bool) -> str:
    """Return why `attend` cannot drop weights; empty if it can. Requires: `why_not` is empty."""
    if not evolution.linear:
        return f"kernels of {type(evolution.pde).__name__} know no dropout"
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
    """Return what `engines.values.step_values` returns, by a kernel where there is one.

    Args:
        value: ``[batch, heads, keys, dim]``.
        open: bool ``[batch or 1, heads or 1, 1, keys - 1]``, False at walls. None: only the ends are
            walls.
    """
    if not usable(value, evolution.reach):
        return step_values(evolution, value, open)
    from attractor.attention.kernels.stencils import stencil_table
    from attractor.attention.kernels.values import step

    return step(value, stencil_table(evolution, value), open)
