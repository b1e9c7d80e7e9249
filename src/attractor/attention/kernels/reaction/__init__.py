"""Reaction-diffusion attention in O(T) memory, by Triton kernels. Torch twin: `engines.tiled`.

Rows attend to all keys or, if causal, to those up to their own. `log_sum_exp` computes the softmax
normalisation first, so that all other kernels can compute the weights of any keys. Weights take their
steps in registers (`forward`, `backward`), and the map is never stored. `key_gradients` completes the
backward. If the equation is split, `split` computes all keys that no causal wall reaches.
"""

import torch
from torch import Tensor

from attractor.attention.engines import softmax
from attractor.attention.kernels import stepped_values
from attractor.attention.kernels.reaction import launch
from attractor.attention.masks import Scope
from attractor.attention.pdes import Diffusion, ReactionDiffusion
from attractor.attention.pdes.evolution import Evolution

STEPS = 8  # each step keeps tiles in registers
DIM = {torch.bfloat16: 128, torch.float16: 128, torch.float32: 64}  # limited by shared memory
BY_OPERATOR = True  # torch's fused operator computes log-sum-exp and mean key where it can


def usable(query: Tensor, value: Tensor, steps: int) -> bool:
    """Return whether the kernels support these tensors, on a device for which `kernels.usable` holds."""
    dim = max(query.shape[-1], value.shape[-1])
    return 1 <= steps <= STEPS and dim <= DIM.get(query.dtype, 0)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    *,
    pde: ReactionDiffusion,
    steps: int,
    dt: float,
    is_causal: bool = False,
) -> Tensor:
    """Return the output ``[batch, heads, queries, value dim]`` of reaction-diffusion on the key axis.

    Requires: `usable` holds.

    Args:
        query, key, value: ``[batch, heads, tokens, dim]``, with equal numbers of heads.
        pde: Equation whose coefficients are numbers, or tensors with one entry or one per head.
        is_causal: Whether row i attends to keys up to i only.
    """
    heads, device = query.shape[1], query.device
    alpha, beta = (_per_head(c, heads, device) for c in (pde.alpha, pde.beta))
    inputs = query, key, value, alpha, beta
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    lse, k_mean = row_statistics(query, key, is_causal, scale, needs_grad)
    rows = lse, k_mean, is_causal, scale, steps
    if not pde.split:
        return launch.reaction(query, key, value, alpha * dt, beta * dt, *rows)
    stepped = stepped_values(Evolution(Diffusion(pde.alpha), steps, dt), value, None)
    return launch.split_reaction(query, key, value, stepped, alpha * dt, beta * (dt * steps), *rows)


def _per_head(coefficient: float | Tensor, heads: int, device: torch.device) -> Tensor:
    if isinstance(coefficient, Tensor):
        return coefficient.to(device, torch.float32).reshape(-1).expand(heads)
    return torch.full((heads,), coefficient, dtype=torch.float32, device=device)


def row_statistics(
    query: Tensor, key: Tensor, is_causal: bool, scale: float, mean: bool
) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp of scores ``[batch, heads, queries]`` and, if `mean`, the mean keys."""
    square, aligned = query.shape[-2] == key.shape[-2], query.shape[-1] % 8 == 0
    half = query.is_cuda and query.dtype != torch.float32
    if BY_OPERATOR and mean and half and square and aligned:
        with torch.no_grad():
            scope = Scope(query.shape[-2], key.shape[-2], right=0 if is_causal else None)
            k_mean, lse = softmax.attend(query, key, key, scope, scale)
        return lse.float().contiguous(), k_mean
    return launch.log_sum_exp(query.detach(), key.detach(), is_causal, scale, mean)
