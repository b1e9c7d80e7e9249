"""A test of causality: no output of a causal model may depend on a later token."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attractor.common.checks import check_number, check_tensor, check_values
from attractor.common.modes import evaluation_mode

ALL_POSITIONS = 64  # Inputs with up to this many tokens are tested at every position.
SAMPLED_POSITIONS = 16  # Longer inputs are tested at this many positions.


class CausalityError(AssertionError):
    """An output of a model depends on a later token.

    Attributes:
        position: The first output position that was observed to depend on a later token.
        size: The change of that output, or the size of its gradient.
    """

    def __init__(self, message: str, position: int, size: float) -> None:
        super().__init__(message)
        self.position, self.size = position, size


def assert_causal(model: Callable[[Tensor], Any], inputs: Tensor, tolerance: float = 0.0) -> None:
    """Raise a CausalityError if an output position depends on a later token.

    The test changes all tokens after position i and compares the outputs up to i, bit by bit if
    `tolerance` is 0. It does so for every i of a short input, and for evenly spaced positions of a long
    one. For floating-point inputs, it also verifies that the gradients of output i with respect to later
    inputs vanish. A module runs in evaluation mode, and its modes are restored afterwards.

    The output of the model may be a tensor, or any nesting of tuples, lists, mappings and dataclasses.
    The test compares the first floating-point tensor with as many positions as the input, in the same
    dimension.

    Args:
        model: A module, or any function of one tensor. Wrap a model that takes keyword arguments:
            ``lambda x: model(inputs_embeds=x).logits``.
        inputs: Token ids ``[tokens]`` or ``[batch, tokens]`` of any integer dtype, preferably with at
            least two different ids, or floats ``[..., tokens, dim]``.
        tolerance: The largest difference, and the largest gradient, to accept.

    Raises:
        CausalityError: An output depends on a later token.
        TypeError: `model` is not callable, or `inputs` is not a tensor.
        ValueError: The shape of `inputs` is not supported, the output of the model is random, or it has
            no tensor with as many positions as `inputs`.
    """
    check_tensor(
        "inputs", inputs, "of ids [batch, tokens], or of floats [..., tokens, dim]", floating=False
    )
    check_values("inputs", inputs)
    check_number("tolerance", tolerance, 0.0)
    if not callable(model):
        raise TypeError(f"model is a {type(model).__name__}; pass a module or a function of one tensor")
    is_ids = not inputs.is_floating_point()
    if inputs.ndim < (1 if is_ids else 2) or (is_ids and inputs.ndim > 2):
        raise ValueError(
            f"inputs {list(inputs.shape)} of {inputs.dtype} must be ids [tokens] or [batch, tokens], "
            "or floats [..., tokens, dim]"
        )
    token_dim = inputs.ndim - (1 if is_ids else 2)
    run = lambda x: _output(model(x), inputs.shape[token_dim], token_dim)
    with evaluation_mode(model):
        _check_outputs(run, inputs, token_dim, tolerance, isinstance(model, nn.Module))
        if not is_ids:
            _check_gradients(run, inputs, token_dim, tolerance)


@torch.no_grad()
def _check_outputs(
    run: Callable[[Tensor], Tensor],
    inputs: Tensor,
    token_dim: int,
    tolerance: float,
    is_module: bool = False,
) -> None:
    """Raise if an output changes when only later tokens change, or when nothing changes."""
    tokens, output = inputs.shape[token_dim], run(inputs)
    if (size := _differences(output, run(inputs), token_dim).max().item()) > tolerance:
        remedy = "fix its seed" if is_module else "use its modules in evaluation mode, fix its seed"
        raise ValueError(
            f"the output of the model changes by {size:.2g} between two calls with the same inputs: "
            f"it is random{' even in evaluation mode' if is_module else ''}, so its causality cannot be "
            f"tested; {remedy}, or pass a tolerance"
        )
    other = _other_inputs(inputs)
    leaks = []
    for i in _positions(tokens):
        past = inputs.narrow(token_dim, 0, i + 1)
        future = other.narrow(token_dim, i + 1, tokens - i - 1)
        perturbed = run(torch.cat((past, future), token_dim))
        changes = _differences(output, perturbed, token_dim)[: i + 1]
        leaks += [(int(p), i, changes[p].item()) for p in (changes > tolerance).nonzero()[:1, 0]]
    if leaks:
        position, last, size = min(leaks)
        raise CausalityError(
            f"output {position} sees its future: it changes by {size:.2g} when only tokens after {last} "
            f"change ({len(leaks)} of {len(_positions(tokens))} tested positions leak)",
            position,
            size,
        )


def _check_gradients(
    run: Callable[[Tensor], Tensor], inputs: Tensor, token_dim: int, tolerance: float
) -> None:
    """Raise if an output has a gradient with respect to a later input."""
    with torch.enable_grad():
        leaf = inputs.detach().clone().requires_grad_()
        output = run(leaf)
        if not output.requires_grad:
            return
        # In an unweighted sum gradients may cancel, for example after a layer norm.
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
        for i in _positions(inputs.shape[token_dim]):
            weighted_sum = (weights * output).select(token_dim, i).sum()
            (gradient,) = torch.autograd.grad(weighted_sum, leaf, retain_graph=True, allow_unused=True)
            if gradient is None:
                continue
            sizes = _differences(gradient, torch.zeros_like(gradient), token_dim)
            sizes[: i + 1] = 0
            if (sizes > tolerance).any():
                size, j = sizes.max(0)
                raise CausalityError(
                    f"output {i} sees its future: its gradient with respect to input {int(j)} is "
                    f"{size.item():.2g}",
                    i,
                    size.item(),
                )


def _positions(tokens: int) -> list[int]:
    """Return the positions to test. The last token is excluded because none follows it."""
    if tokens <= ALL_POSITIONS:
        return list(range(tokens - 1))
    return sorted({round(p) for p in torch.linspace(0, tokens - 2, SAMPLED_POSITIONS).tolist()})


def _other_inputs(inputs: Tensor) -> Tensor:
    """Return inputs of the same kind that differ at every position."""
    generator = torch.Generator().manual_seed(0)
    if inputs.is_floating_point():
        noise = torch.randn(inputs.shape, generator=generator).to(inputs)
        return inputs + noise * inputs.abs().max().clamp(min=1)
    ids, index = inputs.unique(return_inverse=True)  # The vocabulary certainly contains these ids.
    if len(ids) == 1:
        return torch.where(inputs > 0, inputs - 1, inputs + 1)
    shift = torch.randint(1, len(ids), inputs.shape, generator=generator).to(index)
    return ids[(index + shift) % len(ids)]


def _differences(a: Tensor, b: Tensor, token_dim: int) -> Tensor:
    """Return the largest difference per position, ``[tokens]``; infinite where only one is NaN."""
    a, b = (x.detach().movedim(token_dim, 0).flatten(1).double() for x in (a, b))
    same = (a == b) | (a.isnan() & b.isnan())
    return (a - b).abs().nan_to_num(nan=torch.inf).masked_fill(same, 0.0).amax(1)


def _output(result: Any, tokens: int, token_dim: int) -> Tensor:
    """Return the first floating-point tensor in `result` with as many positions as the input."""
    for tensor in _tensors(result):
        if tensor.is_floating_point() and tensor.ndim > token_dim and tensor.shape[token_dim] == tokens:
            return tensor
    raise ValueError(
        f"there is no floating tensor with {tokens} positions in dimension {token_dim} in the output of "
        f"the model ({type(result).__name__}); return one, for example with lambda x: model(x).logits"
    )


def _tensors(result: Any) -> Iterator[Tensor]:
    """Iterate over all tensors in nested tuples, lists, mappings and dataclasses."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, Mapping):
        for item in result.values():
            yield from _tensors(item)
    elif isinstance(result, (tuple, list)):
        for item in result:
            yield from _tensors(item)
    elif is_dataclass(result):
        for field in fields(result):
            yield from _tensors(getattr(result, field.name))
