"""Axes of feature tensors: which one counts the inputs of a batch, and how axes are reordered."""

from itertools import permutations

import torch
from torch import Tensor


def sample_axis(shape: tuple[int, ...], size: int, previous: int | None = None) -> int:
    """Return the axis that counts the inputs, or -1 if the first axis holds several rows per input.

    The candidates are, in this order: the first axis; the second of three, ``[tokens, batch, dim]``; a
    first axis into which windows or tokens were folded; any other axis. The axis of an earlier batch of
    another size takes precedence, so that a number of tokens equal to the batch size does no harm.

    Args:
        shape: Shape of the features.
        size: Number of inputs.
        previous: The axis in an earlier batch, or None.

    Raises:
        ValueError: No axis fits.
    """
    if previous is not None and (
        shape[0] % size == 0 if previous < 0 else shape[previous : previous + 1] == (size,)
    ):
        return previous
    if shape and shape[0] == size:
        return 0
    if len(shape) == 3 and shape[1] == size:
        return 1
    if shape and shape[0] % size == 0:
        return -1
    if size in shape:
        return shape.index(size)
    raise ValueError(
        f"features of shape {list(shape)} have no axis for the {size} inputs of a batch; the model must "
        "keep its inputs apart, in the first axis if it can"
    )


def sample_axis_or_none(shape: tuple[int, ...], size: int) -> int | None:
    """Return `sample_axis`, or None if no axis fits."""
    try:
        return sample_axis(shape, size)
    except ValueError:
        return None


def sample_shape(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Return the shape of the features of one input, or the whole shape if no axis counts inputs."""
    axis = sample_axis_or_none(shape, size)
    if axis is None:
        return shape
    return (shape[0] // size, *shape[1:]) if axis < 0 else shape[:axis] + shape[axis + 1 :]


def axis_order(old: Tensor | None, new: Tensor) -> tuple[int, ...] | None:
    """Return the permutation of old's axes that makes its values equal to new's, up to a reshape.

    Returns:
        The permutation. If the values differ, because the features were normalised in between, or are
        not known: the identity where the shapes agree, or where ``[batch, tokens, dim]`` was flattened
        to ``[batch * tokens, dim]`` or back. None in all other cases.
    """
    if old is None or old.numel() != new.numel():
        return None
    for order in permutations(range(1, old.dim())) if old.dim() < 6 else ():  # the identity comes first
        candidate = old.permute(0, *order)
        possible = candidate.shape == new.shape or old.shape != new.shape
        if possible and not new.is_meta and torch.equal(candidate.reshape(new.shape), new):
            return (0, *order)
    flattened = old.dim() + new.dim() == 5 and old.shape[-1] == new.shape[-1]
    return tuple(range(old.dim())) if old.shape == new.shape or flattened else None


def reorder(x: Tensor, order: tuple[int, ...] | None, like: Tensor) -> Tensor:
    """Permute x by an order of `axis_order`, and reshape it to the shape of another tensor."""
    return (x if order is None else x.permute(order)).reshape(like.shape)
