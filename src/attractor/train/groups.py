"""Parameter groups of an optimiser: which parameters are decayed, and with which learning rate.

Weight decay pulls a parameter toward zero. For a weight this is a prior; for a coefficient of a PDE it
is a bias toward no PDE, whatever the data say. A module whose own parameters must not be decayed has
the attribute ``no_weight_decay = True``; `Recipe.make_optimiser` and `parameter_groups` respect it.
"""

from typing import Any

from torch import nn

from attractor.common.checks import check_number


def undecayed(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of all modules that declare ``no_weight_decay = True``."""
    modules = [m for m in model.modules() if getattr(m, "no_weight_decay", False) is True]
    return [parameter for module in modules for parameter in module.parameters(recurse=False)]


def parameter_groups(
    model: nn.Module,
    lr: float,
    *,
    weight_decay: float = 0.01,
    coefficient_lr: float | None = None,
    decay_vectors: bool = False,
) -> list[dict[str, Any]]:
    """Return optimiser groups of a model's trainable parameters, with learnt coefficients in their own.

    The groups are, in this order and without empty ones: parameters that are decayed; vectors (biases,
    norms), which are not; and the parameters of modules that declare ``no_weight_decay``, such as the
    coefficients of a `LearnedPDE`, which are not decayed either and may have their own learning rate.

    >>> import torch
    >>> from attractor.attention import PDEAttention
    >>> layer = PDEAttention(dim=8, heads=2, pde="diffusion")
    >>> groups = parameter_groups(layer, 1e-3, weight_decay=0.1, coefficient_lr=1e-2)
    >>> [(len(group["params"]), group["lr"], group["weight_decay"]) for group in groups]
    [(2, 0.001, 0.1), (2, 0.001, 0.0), (1, 0.01, 0.0)]
    >>> optimiser = torch.optim.AdamW(groups)

    Args:
        model: any module.
        lr: the learning rate.
        weight_decay: the weight decay of the first group.
        coefficient_lr: the learning rate of the last group; None: `lr`.
        decay_vectors: whether parameters of fewer than two dimensions are decayed as well.

    Raises:
        TypeError: model is not a module.
        ValueError: a rate is negative, or no parameter of the model requires a gradient.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; give a module")
    coefficient_lr = lr if coefficient_lr is None else coefficient_lr
    for name, number in (("lr", lr), ("weight_decay", weight_decay), ("coefficient_lr", coefficient_lr)):
        check_number(name, number, 0.0)
    excluded_ids = {id(parameter) for parameter in undecayed(model)}
    decayed: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    coefficients: list[nn.Parameter] = []
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in excluded_ids:
            coefficients.append(parameter)
        else:
            (decayed if decay_vectors or parameter.dim() > 1 else vectors).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": decayed, "lr": lr, "weight_decay": weight_decay},
        {"params": vectors, "lr": lr, "weight_decay": 0.0},
        {"params": coefficients, "lr": coefficient_lr, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise ValueError(f"{type(model).__name__} has no parameter that requires a gradient")
    return groups
