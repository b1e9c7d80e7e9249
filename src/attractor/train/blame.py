"""Where a loss that is not finite comes from: data, weights, a layer, or the loss function."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def blame(model: nn.Module, again: Callable[[], Any], inputs: Any) -> tuple[str | None, str]:
    """The name of the first module whose output is not finite, if there is one, and a sentence.

    Args:
        model: as it was before the step, or later.
        again: computes the loss of that step once more.
        inputs: what it is computed from.
    """
    for i, leaf in enumerate(tree_leaves(inputs)):
        if not finite(leaf):
            return None, f"the batch itself is not finite (its tensor {i}), so look at the data"
    advice = "lower it, lengthen warmup, or set clip=1.0"
    for name, value in model.named_parameters():
        if not finite(value):
            layer = name.rpartition(".")[0]
            return layer, f"{advice}; weights are not finite either by now, such as {name!r}"
    found: list[tuple[str, str]] = []
    hooks = [module.register_forward_hook(_look(name, found)) for name, module in model.named_modules()]
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            again()
    except (ArithmeticError, RuntimeError, ValueError):
        pass  # numbers that are not finite may be refused later on
    finally:
        for hook in hooks:
            hook.remove()
    if not found:
        return None, f"{advice}; every layer's output is finite, so look at the loss function, too"
    layer, kind = found[0]
    return layer, f"{advice}; the first layer whose output is not finite is {layer!r} ({kind})"


def finite(value: Any) -> bool:
    """Whether all numbers of a tensor are; other things are."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return True
    return bool(torch.isfinite(value.detach()).all())


def _look(name: str, found: list[tuple[str, str]]) -> Callable[..., None]:
    def hook(module: nn.Module, given: Any, output: Any) -> None:
        # Of layers within layers the innermost is done first.
        if not found and not all(map(finite, tree_leaves(output))):
            found.append((name, type(module).__name__))

    return hook
