"""Norms at the additions of a network, batch by batch: what `probe` is made of."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from attractor.core.checks import nearest
from attractor.core.stiffness import Mean
from attractor.residual.dispatch import Calls, Counted
from attractor.residual.graph import Graph, sample_axis
from attractor.residual.profile import Step, StiffnessProfile
from attractor.residual.trunk import Gate, Granularity, Plan

Call: TypeAlias = Callable[[nn.Module, Any], Any]
Padding: TypeAlias = Callable[[Any], Tensor | None] | Tensor | Literal[False] | None

SHOWN = 2  # inputs that the graph is read from
PLANS = 4  # ways through a network that are remembered
LABELS = ("labels", "label", "decoder_labels")
TEXT = frozenset({"input_ids", "inputs_embeds"})  # what a mapping's attention_mask belongs to
DECODED = frozenset({"decoder_input_ids", "decoder_inputs_embeds"})
MASKS = ("attention_mask", "decoder_attention_mask")


@dataclass(frozen=True)
class Batch:
    """What a model is called with, and what is known of it.

    Attributes:
        given: as it came, on the model's device.
        size: number of inputs.
        real: ``[batch, tokens]``, True for tokens that count, or None.
        masks: where nobody said what is real, the masks that its mapping has, by name.
    """

    given: Any
    size: int
    real: Tensor | None = None
    masks: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Any, model: nn.Module, padding: Padding, call: Call | None = None) -> "Batch":
        """Made ready for a model.

        Args:
            given: one batch, see `arguments_of`; a list is a tuple.
            model: that will be called.
            padding: as in `probe`.
            call: how it will be called, if not with `arguments_of`; the first of a tuple then counts.

        Raises:
            ValueError: it is no batch, or not one for this model.
        """
        like = next((p for p in model.parameters() if p.is_floating_point()), None)
        if isinstance(given, list | tuple) and not given:
            raise ValueError("a batch is empty; give tensors [batch, ...]")
        if like is not None:
            device, dtype = like.device, like.dtype
            given = _map(given, lambda t: t.to(device, dtype if t.is_floating_point() else None))
        inputs: Any = _argument(given)
        if call is None:
            args, kwargs = arguments_of(model, given)
            inputs = {**{f"input {i}": value for i, value in enumerate(args)}, **kwargs}
        size = _size(inputs, type(given).__name__)
        real, masks = None, {}
        if callable(padding):
            real = padding(given)
        elif isinstance(padding, Tensor):
            real = padding
        elif padding is None and isinstance(named := _argument(given), Mapping):
            found = {name: named.get(name) for name in MASKS}
            masks = {k: m for k, m in found.items() if isinstance(m, Tensor) and m.dim() == 2}
        return cls(given, size, None if real is None else _checked(real, size), masks)

    def first(self, n: int) -> "Batch":
        """Its first n inputs."""
        if n >= self.size:
            return self
        cut = lambda t: t[:n] if t.dim() and t.shape[0] == self.size else t
        real = None if self.real is None else self.real[:n]
        return Batch(_map(self.given, cut), n, real, {k: cut(m) for k, m in self.masks.items()})

    def varying(self) -> Iterator[tuple[str, Tensor]]:
        """Its tensors with their names, without masks."""
        return ((name, tensor) for name, tensor in _named(self.given) if not _is_mask(name, tensor))

    def real_in(self, plan: Plan) -> Tensor | None:
        """The tokens of a trunk that count: as was said, or by the mask of what it is made from."""
        if self.real is not None or not self.masks:
            return self.real
        decodes = plan.decodes or (bool(plan.sources) and plan.sources <= DECODED)
        mask = self.masks.get(MASKS[decodes])
        if mask is None:
            return None
        text = TEXT & {name for name, _ in self.varying()}
        if not decodes and text and not plan.sources & text:  # a trunk of images beside a text
            return None
        return _checked(mask, self.size)


class OffPlanError(BaseException):
    """The network takes another way than the plan; no `Exception`, so that no model catches it."""


class Meter:
    """Probes one model: keeps its plans, and the norms of the batches it has seen."""

    def __init__(
        self, model: nn.Module, granularity: Granularity, within: str, call: Call | None
    ) -> None:
        names = [_path(name) for name, _ in model.named_modules(remove_duplicate=False)]
        if within not in names:
            outer = ", ".join(name for name in names if name and "." not in name)
            raise ValueError(
                f"within = {within!r}; {type(model).__name__} has no module of that path, paths begin "
                f"with {outer or 'nothing'}{nearest(within, names)}"
            )
        self.model, self.granularity, self.within = model, granularity, within
        self.name = type(getattr(model, "_orig_mod", model)).__name__
        self.call = call or call_model
        self.plans: list[Plan] = []
        self.rows: list[Tensor] = []

    def see(self, batch: Batch) -> None:
        """Measure a batch."""
        for plan in self.plans:
            if self._measure(plan, batch):
                return
        for shown in (batch.first(SHOWN), batch):
            try:
                plan = self._look(shown)
            except Exception:
                if shown is batch:
                    raise
                continue  # not every model takes fewer inputs
            if self._measure(plan, batch):
                return
        raise ValueError(
            "the model does not take the same way twice on one batch; is it random in eval mode?"
        )

    def _look(self, batch: Batch) -> Plan:
        calls = Calls(self.model)
        graph = Graph(calls, batch.varying(), batch.size, self.within)
        with calls.watched(), graph:
            self.call(self.model, batch.given)
        plan = graph.plan(self.granularity)
        name = self.name
        if plan is None:
            where = f" in its module {self.within!r}" if self.within else ""
            raise ValueError(
                f"{name} adds nothing{where} to what it was made from; it has no residual blocks"
            )
        if self.plans and _outline(self.plans[0]) != _outline(plan):
            raise ValueError(
                f"{name} has {len(self.plans[0].blocks)} blocks on one batch and others on the next "
                f"({len(plan.blocks)}); probe such batches by themselves"
            )
        return plan

    def _measure(self, plan: Plan, batch: Batch) -> bool:
        """Take the norms of a batch; False if the model did something else than planned."""
        watch = Watch(plan, Samples(batch, batch.real_in(plan)))
        try:
            with watch:
                self.call(self.model, batch.given)
        except OffPlanError:
            return False
        if watch.digest != plan.end:
            return False
        self.plans = [plan, *(p for p in self.plans if p is not plan)][:PLANS]
        self.rows.append(watch.table())
        return True

    def profile(self, step: Step, mean: Mean, granularity: Granularity) -> StiffnessProfile:
        """Of all that was seen."""
        blocks = self.plans[0].blocks
        state, moved, ungated, gates = torch.cat(self.rows, dim=1)
        ratio = lambda top: torch.where((top == 0) & (state == 0), 0.0, top / state)
        return StiffnessProfile(
            one=ratio(moved),
            gate=ratio(ungated),
            gates=gates,
            stage=torch.tensor([b.stage for b in blocks]),
            names=tuple(b.name for b in blocks),
            model=self.name,
            granularity=granularity,
            step=step,
            mean=mean,
        )


class Watch(Counted):
    """Takes norms at the operations of a plan while a model runs."""

    def __init__(self, plan: Plan, samples: "Samples") -> None:
        super().__init__()
        self.plan, self.samples = plan, samples
        self.state: dict[int, Tensor] = {}  # block -> |x|
        self.moved: dict[int, Tensor] = {}  # block -> |x_{t+1} - x|
        self.ungated: dict[int, Tensor] = {}  # block -> the same before its gates
        self.factors: dict[tuple[int, int], Tensor] = {}  # block, addition -> mean of F
        self.held: dict[int, Tensor] = {}  # block under way -> x at its start
        self.closed: dict[int, list[Any]] = {}  # block under way -> what its gates held back

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operation; if it is in the plan, look at its operands first and its sum after."""
        found = self.plan.events.get(self.index)
        if found is None:
            return func(*args, **kwargs)
        if self.digest != found.digest:
            raise OffPlanError
        for number, addition, gate in found.gates:
            self._gate(number, addition, gate, args, kwargs)
        if found.starts is not None:
            self._start(found.starts, args, kwargs)
        out = func(*args, **kwargs)
        if found.ends is not None:
            self._end(found.ends, out)
        return out

    def _gate(self, k: int, addition: int, gate: Gate, args: Any, kwargs: Any) -> None:
        f, factor = args[gate.branch], args[gate.factor]
        if gate.scalar:
            self._scale(k, addition, factor)
            return
        side = self.plan.blocks[k].tokens
        mean = self.samples.mean(factor, gate.axis, side)
        known = self.factors.get((k, addition))
        self.factors[k, addition] = mean if known is None else known * mean
        if not self.plan.blocks[k].direct:
            back = (f - f * factor) * kwargs.get("value", 1)
            self.closed.setdefault(k, []).append((addition, back, gate.layout))
        elif known is None:
            self.ungated[k] = self.samples.norm(f, gate.axis, side)

    def _scale(self, k: int, addition: int, number: Any) -> None:
        """A constant behind a gate belongs to f."""
        if self.plan.blocks[k].direct:
            self.ungated[k] = self.ungated[k] * abs(number)
            return
        self.closed[k] = [
            (j, back * number if j == addition else back, order) for j, back, order in self.closed[k]
        ]

    def _start(self, k: int, args: Any, kwargs: Any) -> None:
        block = self.plan.blocks[k]
        state, branch = block.first.state, block.first.branch
        x = args[state]
        self.state[k] = self.samples.norm(x, block.first.axis, block.tokens)
        if not block.direct or branch is None:
            self.held[k] = x.clone() if block.copied else x
            return
        self.moved[k] = self.samples.norm(args[branch], block.first.axis, block.tokens)
        self.ungated.setdefault(k, self.moved[k])
        if "alpha" in kwargs:  # a factor of the second summand
            for kept in (self.state,) if state == 1 else (self.moved, self.ungated):
                kept[k] = kept[k] * abs(kwargs["alpha"])

    def _end(self, k: int, out: Tensor) -> None:
        block = self.plan.blocks[k]
        turn, axis, side = block.layout, block.last.axis, block.tokens
        x = _laid(self.held.pop(k), turn, out)
        moved = out.to(torch.promote_types(out.dtype, torch.float32)) - x
        self.moved[k] = self.ungated[k] = self.samples.norm(moved, axis, side)
        closed = self.closed.pop(k, [])
        for _, back, order in closed:
            moved = moved + _laid(back, order, out)
        if closed:
            known = turn is None and all(order is not None for _, _, order in closed)
            self.ungated[k] = self.samples.norm(moved, axis, side) * (1 if known else torch.nan)

    def table(self) -> Tensor:
        """|x|, |x_{t+1} - x|, the same without gates, and mean gates: ``[4, inputs, blocks]``."""
        blocks = range(len(self.plan.blocks))
        none = torch.full_like(self.state[0], torch.nan)
        gates = [[m for (k, _), m in self.factors.items() if k == b] or [none] for b in blocks]
        means = [torch.stack(found).mean(0) for found in gates]
        rows = [*(kept[b] for kept in (self.state, self.moved, self.ungated) for b in blocks), *means]
        return torch.stack(rows).cpu().double().unflatten(0, (4, -1)).transpose(1, 2)


class Samples:
    """Norms and means input by input, over the tokens that are real.

    `axis` is where inputs were seen, `side` the axis of tokens if that must be told, see `token_side`.
    """

    def __init__(self, batch: Batch, real: Tensor | None) -> None:
        self.size = batch.size
        self.real = None if real is None or bool(real.all()) else real
        self.device = next(tensor for _, tensor in _named(batch.given)).device

    def norm(self, features: Tensor, axis: int | None = None, side: int | None = 1) -> Tensor:
        """``[batch]``, accumulated in float32 at least: norms of pieces, then the norm of those."""
        norm = torch.linalg.vector_norm
        wide = torch.promote_types(features.dtype, torch.float32).to_real()
        if self.real is not None:
            tokens = self._tokens(features, axis, side)
            pieces = norm(tokens.flatten(2), dim=2, dtype=wide)
            return norm(pieces * self.real.to(pieces.device), dim=1).to(self.device)
        apart = self._apart(features, axis)
        order = sorted(range(1, apart.dim()), key=apart.stride, reverse=True)  # as they lie in memory
        flat = apart.permute(0, *order).reshape(self.size, -1)
        pieces = norm(flat.unflatten(1, (-1, _piece(flat.shape[1]))), dim=2, dtype=wide)
        return norm(pieces, dim=1).to(self.device)

    def mean(self, factor: Tensor, axis: int | None = None, side: int | None = 1) -> Tensor:
        """``[batch]``."""
        apart = self._apart(factor, axis).to(torch.promote_types(factor.dtype, torch.float32))
        if apart.dim() > 1:
            apart = apart.movedim(side or 1, 1)
        if self.real is not None and apart.shape[1] == self.real.shape[1]:
            weight = self.real.to(apart.device) / self.real.sum(1, keepdim=True).to(apart.device)
            return (apart.reshape(*self.real.shape, -1).mean(2) * weight).sum(1).to(self.device)
        return apart.flatten(1).mean(1).to(self.device)

    def _apart(self, features: Tensor, seen: int | None) -> Tensor:
        """``[batch, ...]``, a view."""
        axis = sample_axis(tuple(features.shape), self.size, seen)
        apart = features.unflatten(0, (self.size, -1)) if axis < 0 else features.movedim(axis, 0)
        return torch.view_as_real(apart.resolve_conj()) if apart.is_complex() else apart

    def _tokens(self, features: Tensor, axis: int | None, side: int | None) -> Tensor:
        """``[batch, tokens, ...]``; packed tokens are laid out with zeros between."""
        assert self.real is not None
        tokens = self.real.shape[1]
        if features.dim() == 2 and len(features) == int(self.real.sum()):
            laid = features.new_zeros(self.size, tokens, features.shape[1])
            laid[self.real.to(features.device)] = features
            return laid
        apart = self._apart(features, axis)
        fits = [i for i, n in enumerate(apart.shape) if i and n == tokens]
        if apart.dim() == 3 and len(fits) == 2:
            if side is None:
                raise ValueError(
                    f"features of shape {list(features.shape)} have two axes as long as the {tokens} "
                    "tokens of the mask, and their block has layers for either; pad the batch to "
                    "another length, or pass padding=False to count everything"
                )
            return apart.movedim(side, 1)
        if len(fits) > 1:
            raise ValueError(
                f"features of shape {list(features.shape)} have {len(fits)} axes as long as the mask's "
                f"{tokens} tokens; pad the batch to another length, or pass padding=False to count "
                "everything"
            )
        if apart.dim() < 3 or not fits:
            raise ValueError(
                f"features of shape {list(features.shape)} do not have the {tokens} tokens of the "
                "attention mask; pass padding= a function of the batch that returns a mask of theirs, "
                "or padding=False to count everything"
            )
        return apart.movedim(fits[0], 1)


def _laid(x: Tensor, order: tuple[int, ...] | None, like: Tensor) -> Tensor:
    """x with its axes as those of another tensor, where their order changed on the way."""
    return (x if order is None else x.permute(order)).reshape(like.shape)


@cache
def _piece(n: int) -> int:
    """The longest even part of n numbers, up to 4,096: a float32 sum of more loses digits."""
    longest = max(d for d in range(1, 4097) if n % d == 0)
    return longest if longest >= 64 else n


def is_batch(given: Any, model: nn.Module, name: str = "batches") -> bool:
    """Whether something is one batch, and not an iterable of batches.

    Args:
        given: a tensor, a mapping or a tuple is one batch; a list or another iterable holds batches.
        model: decides how many elements of a tuple are inputs.
        name: of the argument, for the message of an error.

    Raises:
        TypeError: it is neither.
        ValueError: it is a tuple that may as well be several batches.
    """
    if isinstance(given, Tensor | Mapping):
        return True
    if isinstance(given, tuple):
        inputs = required(model) or []
        more = [i for i, other in enumerate(given) if i and _alike(given[0], other)]
        if not more or 1 < len(inputs) == len(given):
            return True
        if len({len(part) for part in given if isinstance(part, Tensor) and part.dim()}) > 1:
            return False  # labels would be as many as inputs
        raise ValueError(
            f"{name} is a tuple whose elements 0 and {more[0]} are alike ({_form(given[0])}); it may be "
            "one batch (inputs, labels) or several batches: give [batch] for one batch, or a list of "
            "the elements for several, such as list(x.split(64))"
        )
    if isinstance(given, Dataset) and not isinstance(given, IterableDataset):
        raise TypeError(
            f"{name} is a {type(given).__name__}, a Dataset of single samples; give "
            "DataLoader(dataset, batch_size=...)"
        )
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise TypeError(
            f"{name} is a {type(given).__name__}; give a tensor [n, ...], a tuple (inputs, labels), a "
            "mapping of the model's arguments, or an iterable of these, such as a list or a DataLoader"
        )
    return False


def batches_of(given: Any, model: nn.Module) -> Iterator[Any]:
    """The batches that the argument `batches` of `probe` means, see `is_batch`.

    Raises:
        TypeError, ValueError: it means none, or several things, or its batches are not of one form.
    """
    if is_batch(given, model):
        yield given
        return
    first = None
    for i, batch in enumerate(given):
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


def _form(batch: Any) -> str:
    """What all batches of one probe have in common."""
    if isinstance(batch, Tensor):
        kind = "float" if batch.is_floating_point() else "complex" if batch.is_complex() else "integer"
        return f"a {kind} tensor with {batch.dim()} axes"
    if isinstance(batch, Mapping):
        return "a mapping"
    if isinstance(batch, list | tuple):
        return f"a {type(batch).__name__} that begins with {_form(batch[0])}" if batch else "empty"
    return f"a {type(batch).__name__}"


def _alike(one: Any, other: Any) -> bool:
    """Whether two elements of a tuple look like two batches of inputs."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return _form(one) == _form(other) and one.dim() > 1 and one.shape[1:] == other.shape[1:]
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys()
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) > 0 and _alike(one[0], other[0])
    return False


def call_model(model: nn.Module, given: Any) -> Any:
    """Call a model with a batch, see `arguments_of`."""
    args, kwargs = arguments_of(model, given)
    return model(*args, **kwargs)


def arguments_of(model: nn.Module, given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a model is called with for one batch.

    Args:
        model: its forward says how many inputs it needs: the parameters without a default.
        given: a tensor is the input. A mapping has arguments by name; what forward does not take is left
            out, and labels are, unless forward needs them. A tuple or list begins with as many inputs as
            forward needs, and what follows, such as labels, is left out; its first element may also be a
            mapping, or a list or tuple of all inputs.

    Returns:
        Positional arguments, and arguments by name.

    Raises:
        ValueError: the batch lacks an input that forward needs, or it is not known how many it takes.
    """
    if isinstance(given, Mapping):
        return (), _by_name(model, given)
    if not isinstance(given, list | tuple):
        return (given,), {}
    first = given[0]
    if isinstance(first, Mapping):
        return (), _by_name(model, first)
    inputs = required(model)
    if isinstance(first, list | tuple):
        if inputs is None or len(inputs) == len(first):
            return tuple(first), {}
        if len(inputs) == 1:
            return (first,), {}
        given = first
    if inputs is None:
        if len(given) == 1:
            return (first,), {}
        raise ValueError(
            f"a batch is a {type(given).__name__} of {len(given)} elements, and forward of "
            f"{type(model).__name__} takes any number of arguments, so it is not known which are inputs;"
            " pass call=lambda model, batch: ..."
        )
    if len(given) < len(inputs):
        raise ValueError(
            f"a batch is a {type(given).__name__} of {len(given)} elements, but forward of "
            f"{type(model).__name__} needs {len(inputs)} inputs ({', '.join(inputs)}); pass them all"
        )
    return tuple(given[: max(1, len(inputs))]), {}


def required(model: nn.Module) -> list[str] | None:
    """The names of the inputs that a model's forward needs; None if it takes any number of them."""
    parameters = _parameters(model)
    if parameters is None:
        return ["input"]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [p.name for p in positional if p.default is p.empty]


def _parameters(model: nn.Module) -> list[inspect.Parameter] | None:
    """The parameters of a model's forward; None of a traced one, which has no signature."""
    try:
        return list(inspect.signature(getattr(model, "_orig_mod", model).forward).parameters.values())
    except ValueError:
        return None


def _by_name(model: nn.Module, given: Mapping[str, Any]) -> dict[str, Any]:
    parameters = _parameters(model) or []
    every = any(p.kind is p.VAR_KEYWORD for p in parameters)
    needed = {p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    taken = {p.name for p in parameters}
    if needed - given.keys():
        raise ValueError(
            f"a batch has {', '.join(map(repr, given))}, but forward of {type(model).__name__} needs "
            f"{', '.join(sorted(needed - given.keys()))}; give the entries the names of forward's "
            "parameters, or pass call=lambda model, batch: ..."
        )
    wanted = lambda name: (every or name in taken) and (name not in LABELS or name in needed)
    return {name: value for name, value in given.items() if wanted(name)}


def _argument(given: Any) -> Any:
    """The first of a tuple, which holds the inputs."""
    return _argument(given[0]) if isinstance(given, list | tuple) and given else given


def _size(inputs: Any, kind: str) -> int:
    """How many inputs a batch has: the first axis of its tensors, where 1 fits all.

    Args:
        inputs: what the model is called with.
        kind: of the batch, for the message.
    """
    named = [(n, t) for n, t in _named(inputs) if n not in LABELS] or [*_named(inputs)]
    sizes = [(name, t.shape[0]) for name, t in named if t.dim() and not _is_mask(name, t)]
    text = [size for name, size in sizes if name in TEXT]
    many = {size for _, size in sizes if size != 1}
    if not sizes or 0 in many:
        raise ValueError(
            f"a batch is a {kind} without a tensor [batch, ...]; give tensors, tuples (inputs, labels) "
            "or mappings of a model's arguments"
        )
    if text:  # images of all texts may come in one pack
        return text[0]
    if len(many) > 1:
        told = ", ".join(f"{name} {size}" for name, size in sizes)
        raise ValueError(
            f"how many inputs a batch has cannot be told from its tensors' first axes ({told}); all "
            "have as many entries as there are inputs, or 1"
        )
    return max(many, default=1)


def _checked(real: Tensor, size: int) -> Tensor:
    """A mask of real tokens as True and False."""
    if real.dim() != 2 or real.shape[0] != size:
        raise ValueError(f"padding has shape {list(real.shape)}; it marks real tokens, [{size}, tokens]")
    if not bool((real > 0).any(1).all()):
        raise ValueError("an input has no real token at all; leave it out of the batch")
    return real > 0


def _is_mask(name: str, tensor: Tensor) -> bool:
    return "mask" in name and (name.endswith("mask") or not tensor.is_floating_point())


def _path(name: str) -> str:
    """A module's path without the parts that compilation adds."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _outline(plan: Plan) -> list[tuple[str, int]]:
    return [(block.name, block.stage) for block in plan.blocks]


def _map(given: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(given, Tensor):
        return change(given)
    if isinstance(given, Mapping):
        return {k: _map(v, change) for k, v in given.items()}
    if isinstance(given, list | tuple):
        parts = [_map(v, change) for v in given]
        return type(given)(*parts) if hasattr(given, "_fields") else type(given)(parts)
    return given


def _named(given: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors of a batch, each with the name it has in the innermost mapping around it."""
    if isinstance(given, Tensor):
        yield name, given
    elif isinstance(given, Mapping):
        for key, part in given.items():
            yield from _named(part, str(key))
    elif isinstance(given, list | tuple):
        for part in given:
            yield from _named(part, name)
