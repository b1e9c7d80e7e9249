"""Batch normalisations of a network, which some gates (IEBN) replace."""

from collections.abc import Callable, Iterable
from typing import TypeAlias

from torch import nn

Norm: TypeAlias = tuple[nn.Module, str, nn.Module]  # parent, name in the parent, normalisation


def batch_norms(module: nn.Module, exclude: Iterable[nn.Module | None] = ()) -> list[Norm]:
    """Return the batch normalisations inside a module, and the gates that replace one.

    Args:
        module: Any module.
        exclude: Parts whose normalisations are omitted.
    """
    skip = {inner for part in exclude if part is not None for inner in part.modules()}
    return [
        (parent, name, part)
        for parent in module.modules()
        if parent not in skip and not replaces_norm(parent)
        for name, part in parent.named_children()
        if (isinstance(part, nn.BatchNorm2d) or replaces_norm(part)) and part not in skip
    ]


def replaces_norm(module: nn.Module) -> bool:
    """Whether a module is a gate that replaces a batch normalisation."""
    return bool(getattr(module, "normalisation", False))


def stem_norms(model: nn.Module, first_block: nn.Module) -> list[Norm]:
    """Return the batch normalisations that come before the first block."""
    order = {module: i for i, module in enumerate(model.modules())}
    return [norm for norm in batch_norms(model) if order[norm[2]] < order[first_block]]


def replace_norms(norms: list[Norm], make: Callable[[nn.Module], nn.Module]) -> None:
    """Replace each batch normalisation by ``make(norm)``.

    Raises:
        ValueError: One of them is not an `nn.BatchNorm2d`, or there are none.
    """
    kinds = {type(norm) for _, _, norm in norms}
    if kinds != {nn.BatchNorm2d}:
        names = ", ".join(sorted(kind.__name__ for kind in kinds)) or "none"
        raise ValueError(
            f"this gate takes the place of BatchNorm2d; the blocks' normalisations are {names}"
        )
    for parent, name, norm in norms:
        setattr(parent, name, make(norm))
