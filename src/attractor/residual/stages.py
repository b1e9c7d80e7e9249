"""Stages of a residual network: runs of blocks whose features have the same channels and positions."""

from collections.abc import Sequence
from math import prod


def stage_numbers(shapes: Sequence[tuple[int, ...]], changed: Sequence[bool] | None = None) -> list[int]:
    """Return the stage of each block: a new one begins where the channels or positions change.

    Shapes alone are ambiguous: ``[128, 64]`` after ``[64, 128]`` may be the same features with
    transposed axes, or twice the channels at half the length. `changed` resolves this.

    Args:
        shapes: Shape of one input's features after each block, without the axis that counts inputs.
            Channels are first or last, as in ``[C, H, W]``, ``[H, W, C]`` or ``[tokens, C]``.
        changed: For each block, whether its x has other features than the previous sum. Such a block
            begins a stage if its shape differs. If None, a block with another shape stays in the stage
            only if the shape is an unambiguous permutation.

    Returns:
        Numbers of the stages, from 0.

    >>> stage_numbers([(16, 32, 32), (16, 32, 32), (64, 16, 16), (16, 16, 64), (256, 64)])
    [0, 0, 1, 1, 1]
    """
    numbers = [0]
    for i in range(1, len(shapes)):
        old, new = shapes[i - 1], shapes[i]
        same = old == new
        if not same and (changed is None or not changed[i]):
            same = is_permutation(old, new, strict=changed is None)
        numbers.append(numbers[-1] + (not same))
    return numbers


def is_permutation(old: tuple[int, ...], new: tuple[int, ...], strict: bool) -> bool:
    """Whether two shapes can hold the same features in another order: equal channels and positions.

    Args:
        old: Shape of one input's features.
        new: Another one.
        strict: Return False for ambiguous cases, which are two transposed axes, and channels in the last
            axis after positions that are grouped in another way.
    """
    if prod(old) != prod(new) or not old or not new:
        return False
    first_or_last = lambda shape: ((shape[0], shape[1:]), (shape[-1], shape[:-1]))
    (first, after), (last, before) = first_or_last(old)
    (new_first, new_after), (new_last, new_before) = first_or_last(new)
    if first == new_first or (last == new_last and not (strict and len(old) == len(new))):
        return True
    if strict and len(old) == len(new) == 2:
        return False
    equal = lambda one, other: one == other or 1 in (len(one), len(other))  # or flattened
    first_to_last = first == new_last and equal(after, new_before)
    return first_to_last or (last == new_first and equal(before, new_after))
