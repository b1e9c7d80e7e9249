"""Batches of inputs: which forms `probe` accepts, and how a model is called with one batch."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from attractor.residual.trunk import MeasurementPlan

Call: TypeAlias = Callable[[nn.Module, Any], Any]
Padding: TypeAlias = Callable[[Any], Tensor | None] | Tensor | Literal[False] | None

LABELS = ("labels", "label", "decoder_labels")
TEXT = frozenset({"input_ids", "inputs_embeds"})  # the inputs that `attention_mask` belongs to
DECODER_TEXT = frozenset({"decoder_input_ids", "decoder_inputs_embeds"})
MASKS = ("attention_mask", "decoder_attention_mask")


@dataclass(frozen=True)
class Batch:
    """One batch of inputs, on the device and in the dtype of the model.

    Attributes:
        data: A tensor, a mapping, a tuple or a list.
        size: Number of inputs.
        valid_tokens: ``[batch, tokens]``, True for tokens that are not padding, or None.
        masks: The attention masks of a mapping by name, where `probe` has no argument `padding`.
    """

    data: Any
    size: int
    valid_tokens: Tensor | None = None
    masks: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, data: Any, model: nn.Module, padding: Padding, call: Call | None = None) -> "Batch":
        """Prepare a batch for a model.

        Args:
            data: One batch, in a form that `arguments_of` accepts. A list is treated as a tuple.
            model: The model that will be called.
            padding: As in `probe`.
            call: The function that will call the model. If it is not None, the inputs are counted in
                the first element of a tuple only.

        Raises:
            ValueError: The data is not a batch, or not a batch for this model.
        """
        weight = next((p for p in model.parameters() if p.is_floating_point()), None)
        if isinstance(data, list | tuple) and not data:
            raise ValueError("a batch is empty; pass tensors [batch, ...]")
        if weight is not None:
            device, dtype = weight.device, weight.dtype
            data = map_tensors(data, lambda t: t.to(device, dtype if t.is_floating_point() else None))
        inputs: Any = _first(data)
        if call is None:
            args, kwargs = arguments_of(model, data)
            inputs = {**{f"input {i}": value for i, value in enumerate(args)}, **kwargs}
        size = _size(inputs, type(data).__name__)
        valid, masks = None, {}
        if callable(padding):
            valid = padding(data)
        elif isinstance(padding, Tensor):
            valid = padding
        elif padding is None and isinstance(mapping := _first(data), Mapping):
            candidates = {name: mapping.get(name) for name in MASKS}
            masks = {k: m for k, m in candidates.items() if isinstance(m, Tensor) and m.dim() == 2}
        return cls(data, size, None if valid is None else _as_mask(valid, size), masks)

    def first(self, n: int) -> "Batch":
        """Return the first n inputs as a batch."""
        if n >= self.size:
            return self
        cut = lambda t: t[:n] if t.dim() and t.shape[0] == self.size else t
        valid = None if self.valid_tokens is None else self.valid_tokens[:n]
        return Batch(map_tensors(self.data, cut), n, valid, {k: cut(m) for k, m in self.masks.items()})

    def varying(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) for all tensors except masks."""
        return ((name, tensor) for name, tensor in tensors_of(self.data) if not _is_mask(name, tensor))

    def valid_tokens_of(self, plan: MeasurementPlan) -> Tensor | None:
        """Return the mask of valid tokens for the trunk of a plan, or None if all tokens count."""
        if self.valid_tokens is not None or not self.masks:
            return self.valid_tokens
        decodes = plan.decodes or (bool(plan.sources) and plan.sources <= DECODER_TEXT)
        mask = self.masks.get(MASKS[decodes])
        if mask is None:
            return None
        text = TEXT & {name for name, _ in self.varying()}
        if not decodes and text and not plan.sources & text:  # a trunk of images, not of the text
            return None
        return _as_mask(mask, self.size)


def is_batch(data: Any, model: nn.Module, name: str = "batches") -> bool:
    """Return True for one batch, False for an iterable of batches.

    Args:
        data: A tensor, a mapping or a tuple is one batch; a list or another iterable holds batches.
        model: Its forward decides how many elements of a tuple are inputs.
        name: Name of the argument for error messages.

    Raises:
        TypeError: The data is neither.
        ValueError: The data is a tuple that may as well be several batches.
    """
    if isinstance(data, Tensor | Mapping):
        return True
    if isinstance(data, tuple):
        inputs = required_inputs(model) or []
        similar = [i for i, other in enumerate(data) if i and _similar(data[0], other)]
        if not similar or 1 < len(inputs) == len(data):
            return True
        if len({len(part) for part in data if isinstance(part, Tensor) and part.dim()}) > 1:
            return False  # inputs and labels would have the same length
        raise ValueError(
            f"{name} is a tuple whose elements 0 and {similar[0]} are alike ({_form(data[0])}); it "
            "may be one batch (inputs, labels) or several; pass [batch] for one batch, or a list of the "
            "elements for several, such as list(x.split(64))"
        )
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        raise TypeError(
            f"{name} is a {type(data).__name__}, a Dataset of single samples; pass "
            "DataLoader(dataset, batch_size=...)"
        )
    if isinstance(data, str | bytes) or not isinstance(data, Iterable):
        raise TypeError(
            f"{name} is a {type(data).__name__}; pass a tensor [n, ...], a tuple (inputs, labels), a "
            "mapping of the model's arguments, or an iterable of these, such as a list or a DataLoader"
        )
    return False


def batches_of(data: Any, model: nn.Module) -> Iterator[Any]:
    """Yield the batches in the argument `batches` of `probe`; see `is_batch`.

    Raises:
        TypeError, ValueError: The data holds no batches, is ambiguous, or its batches differ in form.
    """
    if is_batch(data, model):
        yield data
        return
    first = None
    for i, batch in enumerate(data):
        form = _form(batch)
        first = first or form
        if form != first:
            raise ValueError(
                f"batch 0 is {first}, but batch {i} is {form}; a list holds batches of inputs, and "
                "inputs with their labels are one batch, a tuple (inputs, labels)"
            )
        if isinstance(batch, list | tuple) and any(type(part) in (int, float) for part in batch[1:]):
            raise ValueError(
                f"batch {i} is {form} with a number beside it, a single sample; pass batches, as "
                "DataLoader(dataset, batch_size=...) makes them"
            )
        yield batch


def call_model(model: nn.Module, data: Any) -> Any:
    """Call a model with a batch; see `arguments_of`."""
    args, kwargs = arguments_of(model, data)
    return model(*args, **kwargs)


def arguments_of(model: nn.Module, data: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments with which a model is called for one batch.

    Args:
        model: The parameters of its forward that have no default are the inputs that it needs.
        data: A tensor is the only input. A mapping holds keyword arguments; entries that forward does
            not accept are omitted, and so are labels unless forward needs them. A tuple or list begins
            with as many inputs as forward needs, and its other elements, such as labels, are omitted.
            The first element may also be a mapping, or a list or tuple of all inputs.

    Raises:
        ValueError: The batch lacks an input, or the number of inputs is unknown.
    """
    if isinstance(data, Mapping):
        return (), _keyword_arguments(model, data)
    if not isinstance(data, list | tuple):
        return (data,), {}
    first = data[0]
    if isinstance(first, Mapping):
        return (), _keyword_arguments(model, first)
    inputs = required_inputs(model)
    if isinstance(first, list | tuple):
        if inputs is None or len(inputs) == len(first):
            return tuple(first), {}
        if len(inputs) == 1:
            return (first,), {}
        data = first
    if inputs is None:
        if len(data) == 1:
            return (first,), {}
        raise ValueError(
            f"a batch is a {type(data).__name__} of {len(data)} elements, and forward of "
            f"{type(model).__name__} takes any number of arguments, so it is not known which are inputs;"
            " pass call=lambda model, batch: ..."
        )
    if len(data) < len(inputs):
        raise ValueError(
            f"a batch is a {type(data).__name__} of {len(data)} elements, but forward of "
            f"{type(model).__name__} needs {len(inputs)} inputs ({', '.join(inputs)}); pass them all"
        )
    return tuple(data[: max(1, len(inputs))]), {}


def required_inputs(model: nn.Module) -> list[str] | None:
    """Return the names of the inputs that a model's forward needs; None if it takes ``*args``."""
    parameters = _parameters(model)
    if parameters is None:
        return ["input"]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [p.name for p in positional if p.default is p.empty]


def map_tensors(data: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to all tensors of a nested structure, and return the new structure."""
    if isinstance(data, Tensor):
        return function(data)
    if isinstance(data, Mapping):
        return {k: map_tensors(v, function) for k, v in data.items()}
    if isinstance(data, list | tuple):
        parts = [map_tensors(v, function) for v in data]
        return type(data)(*parts) if hasattr(data, "_fields") else type(data)(parts)
    return data


def tensors_of(data: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of a batch, each with its key in the innermost mapping that holds it."""
    if isinstance(data, Tensor):
        yield name, data
    elif isinstance(data, Mapping):
        for key, part in data.items():
            yield from tensors_of(part, str(key))
    elif isinstance(data, list | tuple):
        for part in data:
            yield from tensors_of(part, name)


def _form(batch: Any) -> str:
    """Describe the properties that all batches of one probe must share."""
    if isinstance(batch, Tensor):
        kind = "float" if batch.is_floating_point() else "complex" if batch.is_complex() else "integer"
        return f"a {kind} tensor with {batch.dim()} axes"
    if isinstance(batch, Mapping):
        return "a mapping"
    if isinstance(batch, list | tuple):
        return f"a {type(batch).__name__} that begins with {_form(batch[0])}" if batch else "empty"
    return f"a {type(batch).__name__}"


def _similar(one: Any, other: Any) -> bool:
    """Whether two elements of a tuple look like two batches of inputs."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return _form(one) == _form(other) and one.dim() > 1 and one.shape[1:] == other.shape[1:]
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys()
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) > 0 and _similar(one[0], other[0])
    return False


def _parameters(model: nn.Module) -> list[inspect.Parameter] | None:
    """Return the parameters of a model's forward; None for a traced model, which has no signature."""
    try:
        return list(inspect.signature(getattr(model, "_orig_mod", model).forward).parameters.values())
    except ValueError:
        return None


def _keyword_arguments(model: nn.Module, data: Mapping[str, Any]) -> dict[str, Any]:
    parameters = _parameters(model) or []
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters)
    needed = {p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    names = {p.name for p in parameters}
    if needed - data.keys():
        raise ValueError(
            f"a batch has {', '.join(map(repr, data))}, but forward of {type(model).__name__} needs "
            f"{', '.join(sorted(needed - data.keys()))}; name the entries as forward's parameters, or "
            "pass call=lambda model, batch: ..."
        )
    accepts = lambda name: (any_name or name in names) and (name not in LABELS or name in needed)
    return {name: value for name, value in data.items() if accepts(name)}


def _first(data: Any) -> Any:
    """Return the first element of a tuple, which holds the inputs."""
    return _first(data[0]) if isinstance(data, list | tuple) and data else data


def _size(inputs: Any, kind: str) -> int:
    """Return the number of inputs: the length of the first axes, which agree except for ones.

    Args:
        inputs: Arguments of the model.
        kind: Type of the batch for error messages.
    """
    pairs = [(n, t) for n, t in tensors_of(inputs) if n not in LABELS] or [*tensors_of(inputs)]
    sizes = [(name, t.shape[0]) for name, t in pairs if t.dim() and not _is_mask(name, t)]
    text = [size for name, size in sizes if name in TEXT]
    distinct = {size for _, size in sizes if size != 1}
    if not sizes or 0 in distinct:
        raise ValueError(
            f"a batch is a {kind} without a tensor [batch, ...]; pass tensors, tuples (inputs, labels) "
            "or mappings of a model's arguments"
        )
    if text:  # the images of all texts may be packed into one tensor
        return text[0]
    if len(distinct) > 1:
        lengths = ", ".join(f"{name} {size}" for name, size in sizes)
        raise ValueError(
            f"the number of inputs is ambiguous, as the first axes of the batch's tensors differ "
            f"({lengths}); each must have as many entries as there are inputs, or 1"
        )
    return max(distinct, default=1)


def _as_mask(valid: Tensor, size: int) -> Tensor:
    """Check a mask of valid tokens and convert it to booleans."""
    if valid.dim() != 2 or valid.shape[0] != size:
        raise ValueError(
            f"padding has shape {list(valid.shape)}; pass a mask of valid tokens, [{size}, tokens]"
        )
    if not bool((valid > 0).any(1).all()):
        raise ValueError("an input consists of padding only; remove it from the batch")
    return valid > 0


def _is_mask(name: str, tensor: Tensor) -> bool:
    return "mask" in name and (name.endswith("mask") or not tensor.is_floating_point())
