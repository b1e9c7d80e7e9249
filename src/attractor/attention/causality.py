"""A test that a causal model is causal: no output may depend on a later token."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attractor.core.checks import check_number, check_tensor, check_values

SHORT = 64  # up to this many tokens every position is tried
SPREAD = 16  # of longer inputs, this many


class CausalityError(AssertionError):
    """A model whose output sees the future.

    Attributes:
        position: the first output position found to depend on a later token.
        size: by how much it changed, or the size of its gradient.
    """

    def __init__(self, message: str, position: int, size: float) -> None:
        super().__init__(message)
        self.position, self.size = position, size


def assert_causal(model: Callable[[Tensor], Any], inputs: Tensor, tolerance: float = 0.0) -> None:
    """Raises a CausalityError if an output position depends on a token after it.

    Changes every token after position i and compares the outputs up to i, bit by bit if tolerance is
    0, for every i of a short input and for some spread over a long one. For float inputs, follows the
    gradients of output i to later inputs as well: they must vanish. A module is put into eval mode,
    and back afterwards.

    Args:
        model: a module or any function of one tensor. For arguments with names, wrap it:
            ``lambda x: model(inputs_embeds=x).logits``.
        inputs: token ids ``[tokens]`` or ``[batch, tokens]``, of any integer type, with at least two
            different ids if possible; or floats ``[..., tokens, dim]``.
        tolerance: the largest difference, and gradient, that passes.

    The output may be a tensor, or any nesting of tuples, mappings and dataclasses: the first floating
    tensor that has as many positions as the input, in the same dimension, is compared.
    """
    check_tensor(
        "inputs", inputs, "of ids [batch, tokens], or of floats [..., tokens, dim]", floating=False
    )
    check_values("inputs", inputs)
    check_number("tolerance", tolerance, 0.0)
    if not callable(model):
        raise TypeError(f"model is a {type(model).__name__}; give a module or a function of one tensor")
    ids = not inputs.is_floating_point()
    if inputs.ndim < (1 if ids else 2) or (ids and inputs.ndim > 2):
        raise ValueError(
            f"inputs {list(inputs.shape)} of {inputs.dtype} must be ids [tokens] or [batch, tokens], "
            "or floats [..., tokens, dim]"
        )
    time = inputs.ndim - (1 if ids else 2)
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    modes = [module.training for module in modules]
    try:
        for module in modules:
            module.training = False
        _perturb(model, inputs, time, tolerance)
        if not ids:
            _follow_gradients(model, inputs, time, tolerance)
    finally:
        for module, mode in zip(modules, modes):
            module.training = mode


@torch.no_grad()
def _perturb(model: Callable[[Tensor], Any], inputs: Tensor, time: int, tolerance: float) -> None:
    n = inputs.shape[time]
    before = _output(model(inputs), n, time)
    if (size := _differences(before, _output(model(inputs), n, time), time).max().item()) > tolerance:
        module = isinstance(model, nn.Module)
        cure = "fix its seed" if module else "put the modules it uses into eval mode, fix its seed"
        raise ValueError(
            f"the model's output changes by {size:.2g} when nothing changes: it is random"
            f"{' even in eval mode' if module else ''}, so its causality cannot be tested; {cure}, "
            "or give a tolerance"
        )
    other = _other(inputs)
    leaks = []
    for i in _positions(n):
        past, future = inputs.narrow(time, 0, i + 1), other.narrow(time, i + 1, n - i - 1)
        after = _output(model(torch.cat((past, future), time)), n, time)
        changed = _differences(before, after, time)[: i + 1]
        leaks += [(int(p), i, changed[p].item()) for p in (changed > tolerance).nonzero()[:1, 0]]
    if leaks:
        position, last, size = min(leaks)
        raise CausalityError(
            f"output {position} sees its future: it changes by {size:.2g} when only tokens after {last} "
            f"change ({len(leaks)} of {len(_positions(n))} changes of the future leak into the past)",
            position,
            size,
        )


def _follow_gradients(
    model: Callable[[Tensor], Any], inputs: Tensor, time: int, tolerance: float
) -> None:
    n = inputs.shape[time]
    with torch.enable_grad():
        leaf = inputs.detach().clone().requires_grad_()
        output = _output(model(leaf), n, time)
        if not output.requires_grad:
            return
        # A sum would miss what cancels, as it does behind a layer norm.
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
        for i in _positions(n):
            weighted = (weights * output).select(time, i).sum()
            (slope,) = torch.autograd.grad(weighted, leaf, retain_graph=True, allow_unused=True)
            if slope is None:
                continue
            sizes = _differences(slope, torch.zeros_like(slope), time)
            sizes[: i + 1] = 0
            if (sizes > tolerance).any():
                size, j = sizes.max(0)
                raise CausalityError(
                    f"output {i} sees its future: its gradient with respect to input {int(j)} is "
                    f"{size.item():.2g}",
                    i,
                    size.item(),
                )


def _positions(n: int) -> list[int]:
    """Those after which the future is changed; the last has none."""
    if n <= SHORT:
        return list(range(n - 1))
    return sorted({round(p) for p in torch.linspace(0, n - 2, SPREAD).tolist()})


def _other(inputs: Tensor) -> Tensor:
    """Inputs of the same kind, different in every position."""
    generator = torch.Generator().manual_seed(0)
    if inputs.is_floating_point():
        noise = torch.randn(inputs.shape, generator=generator).to(inputs)
        return inputs + noise * inputs.abs().max().clamp(min=1)
    known, index = inputs.unique(return_inverse=True)  # ids that the model is sure to have
    if len(known) == 1:
        return torch.where(inputs > 0, inputs - 1, inputs + 1)
    shift = torch.randint(1, len(known), inputs.shape, generator=generator).to(index)
    return known[(index + shift) % len(known)]


def _differences(a: Tensor, b: Tensor, time: int) -> Tensor:
    """The largest difference at each position, ``[tokens]``; NaN on one side only is infinite."""
    a, b = (x.detach().movedim(time, 0).flatten(1).double() for x in (a, b))
    same = (a == b) | (a.isnan() & b.isnan())
    return (a - b).abs().nan_to_num(nan=torch.inf).masked_fill(same, 0.0).amax(1)


def _output(result: Any, n: int, time: int) -> Tensor:
    for tensor in _tensors(result):
        if tensor.is_floating_point() and tensor.ndim > time and tensor.shape[time] == n:
            return tensor
    raise ValueError(
        f"no floating tensor with {n} positions in dimension {time} in the model's output "
        f"({type(result).__name__}); return one, for instance lambda x: model(x).logits"
    )


def _tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, Mapping):
        for part in result.values():
            yield from _tensors(part)
    elif isinstance(result, (tuple, list)):
        for part in result:
            yield from _tensors(part)
    elif is_dataclass(result):
        for field in fields(result):
            yield from _tensors(getattr(result, field.name))
