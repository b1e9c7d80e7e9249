"""Find the cause of a loss that is not finite: data, weights, a layer, or the loss function."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def blame(model: nn.Module, again: Callable[[], Any], inputs: Any) -> tuple[str | None, str]:
    """Return the name of the first module whose output is not finite, or None, and an explanation.

    Args:
        model: the model, as it was before the step or later.
        again: a function that computes the loss of the step once more.
        inputs: the batch of the step.
    """
    for i, leaf in enumerate(tree_leaves(inputs)):
        if not finite(leaf):
            return None, f"the batch itself is not finite (its tensor {i}), so look at the data"
    advice = "lower it, lengthen warmup, or set clip=1.0"
    for name, value in model.named_parameters():
        if not finite(value):
            layer = name.rpartition(".")[0]
            return layer, f"{advice}; some weights are not finite either, such as {name!r}"
    causes: list[tuple[str, str]] = []
    hooks = [module.register_forward_hook(_hook(name, causes)) for name, module in model.named_modules()]
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            again()
    except (ArithmeticError, RuntimeError, ValueError):
        pass  # later layers may reject numbers that are not finite
    finally:
        for hook in hooks:
            hook.remove()
    if not causes:
        return None, f"{advice}; every layer's output is finite, so look at the loss function, too"
    layer, kind = causes[0]
    return layer, f"{advice}; the first layer whose output is not finite is {layer!r} ({kind})"


def finite(value: Any) -> bool:
    """Return whether all numbers of a tensor are finite; True for other values."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return True
    return bool(torch.isfinite(value.detach()).all())


def _hook(name: str, causes: list[tuple[str, str]]) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        # Of nested modules the innermost calls its hook first.
        if not causes and not all(map(finite, tree_leaves(output))):
            causes.append((name, type(module).__name__))

    return hook
