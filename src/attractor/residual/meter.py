"""Norms at the additions of a network, batch by batch: what `probe` is made of."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

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


@dataclass(frozen=True)
class Batch:
    """What a model is called with, and what is known of it.

    Attributes:
        given: as it came, on the model's device.
        size: number of inputs.
        real: ``[batch, tokens]``, True for tokens that count, or None.
    """

    given: Any
    size: int
    real: Tensor | None = None

    @classmethod
    def of(cls, given: Any, model: nn.Module, padding: Padding) -> "Batch":
        """Made ready for a model."""
        like = next((p for p in model.parameters() if p.is_floating_point()), None)
        if isinstance(given, list | tuple) and not given:
            raise ValueError("a batch is empty; give tensors [batch, ...]")
        if like is not None:
            device, dtype = like.device, like.dtype
            given = _map(given, lambda t: t.to(device, dtype if t.is_floating_point() else None))
        first = next(_tensors_in(given), None)
        if first is None or first.dim() == 0 or first.shape[0] == 0:
            raise ValueError(
                f"a batch is a {type(given).__name__} without a tensor [batch, ...]; give tensors, "
                "tuples (input, label) or mappings of a model's arguments"
            )
        size = first.shape[0]
        real = None
        if callable(padding):
            real = padding(given)
        elif isinstance(padding, Tensor):
            real = padding
        elif padding is None:
            named = given[0] if isinstance(given, list | tuple) else given
            real = named.get("attention_mask") if isinstance(named, Mapping) else None
            real = real if real is not None and real.dim() == 2 else None
        if real is not None:
            real = real.to(first.device) > 0
            if real.dim() != 2 or real.shape[0] != size:
                raise ValueError(
                    f"padding has shape {list(real.shape)}; it marks real tokens, [{size}, tokens]"
                )
            if not bool(real.any(1).all()):
                raise ValueError("an input has no real token at all; leave it out of the batch")
        return cls(given, size, real)

    def first(self, n: int) -> "Batch":
        """Its first n inputs."""
        if n >= self.size:
            return self
        cut = lambda t: t[:n] if t.dim() and t.shape[0] == self.size else t
        return Batch(_map(self.given, cut), n, None if self.real is None else self.real[:n])

    def varying(self) -> Iterator[Tensor]:
        """Its tensors, without masks."""
        yield from _tensors_in(self.given, masks=False)


class OffPlanError(BaseException):
    """The network takes another way than the plan; no `Exception`, so that no model catches it."""


class Meter:
    """Probes one model: keeps its plans, and the norms of the batches it has seen."""

    def __init__(
        self, model: nn.Module, granularity: Granularity, within: str, call: Call | None
    ) -> None:
        self.model, self.granularity, self.within = model, granularity, within
        self.name = type(getattr(model, "_orig_mod", model)).__name__
        self.call = call or _call
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
        watch = Watch(plan, Samples(batch))
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
        mean = self.samples.mean(factor, gate.axis)
        known = self.factors.get((k, addition))
        self.factors[k, addition] = mean if known is None else known * mean
        if not self.plan.blocks[k].direct:
            back = (f - f * factor) * kwargs.get("value", 1)
            self.closed.setdefault(k, []).append((addition, back, gate.layout))
        elif known is None:
            self.ungated[k] = self.samples.norm(f, gate.axis)

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
        self.state[k] = self.samples.norm(x, block.first.axis)
        if not block.direct or branch is None:
            self.held[k] = x.clone() if block.copied else x
            return
        self.moved[k] = self.samples.norm(args[branch], block.first.axis)
        self.ungated.setdefault(k, self.moved[k])
        if "alpha" in kwargs:  # a factor of the second summand
            for kept in (self.state,) if state == 1 else (self.moved, self.ungated):
                kept[k] = kept[k] * abs(kwargs["alpha"])

    def _end(self, k: int, out: Tensor) -> None:
        turn, axis = self.plan.blocks[k].layout, self.plan.blocks[k].last.axis
        x = _laid(self.held.pop(k), turn, out)
        moved = out.to(torch.promote_types(out.dtype, torch.float32)) - x
        self.moved[k] = self.ungated[k] = self.samples.norm(moved, axis)
        closed = self.closed.pop(k, [])
        for _, back, order in closed:
            moved = moved + _laid(back, order, out)
        if closed:
            known = turn is None and all(order is not None for _, _, order in closed)
            self.ungated[k] = self.samples.norm(moved, axis) * (1 if known else torch.nan)

    def table(self) -> Tensor:
        """|x|, |x_{t+1} - x|, the same without gates, and mean gates: ``[4, inputs, blocks]``."""
        blocks = range(len(self.plan.blocks))
        none = torch.full_like(self.state[0], torch.nan)
        gates = [[m for (k, _), m in self.factors.items() if k == b] or [none] for b in blocks]
        means = [torch.stack(found).mean(0) for found in gates]
        rows = [*(kept[b] for kept in (self.state, self.moved, self.ungated) for b in blocks), *means]
        return torch.stack(rows).cpu().double().unflatten(0, (4, -1)).transpose(1, 2)


class Samples:
    """Norms and means input by input, over what counts of each; `axis` is where inputs were seen."""

    def __init__(self, batch: Batch) -> None:
        self.size = batch.size
        self.real = None if batch.real is None or bool(batch.real.all()) else batch.real
        self.device = next(_tensors_in(batch.given)).device

    def norm(self, features: Tensor, axis: int | None = None) -> Tensor:
        """``[batch]``, accumulated in float32 at least: norms of pieces, then the norm of those."""
        norm = torch.linalg.vector_norm
        wide = torch.promote_types(features.dtype, torch.float32).to_real()
        if self.real is not None:
            tokens = self._tokens(features, axis)
            pieces = norm(tokens.flatten(2), dim=2, dtype=wide)
            return norm(pieces * self.real.to(pieces.device), dim=1).to(self.device)
        apart = self._apart(features, axis)
        order = sorted(range(1, apart.dim()), key=apart.stride, reverse=True)  # as they lie in memory
        flat = apart.permute(0, *order).reshape(self.size, -1)
        pieces = norm(flat.unflatten(1, (-1, _piece(flat.shape[1]))), dim=2, dtype=wide)
        return norm(pieces, dim=1).to(self.device)

    def mean(self, factor: Tensor, axis: int | None = None) -> Tensor:
        """``[batch]``."""
        apart = self._apart(factor, axis).to(torch.promote_types(factor.dtype, torch.float32))
        if self.real is not None and apart.shape[1] == self.real.shape[1]:
            weight = self.real.to(apart.device) / self.real.sum(1, keepdim=True).to(apart.device)
            return (apart.reshape(*self.real.shape, -1).mean(2) * weight).sum(1).to(self.device)
        return apart.flatten(1).mean(1).to(self.device)

    def _apart(self, features: Tensor, seen: int | None) -> Tensor:
        """``[batch, ...]``, a view."""
        axis = sample_axis(tuple(features.shape), self.size, seen)
        apart = features.unflatten(0, (self.size, -1)) if axis < 0 else features.movedim(axis, 0)
        return torch.view_as_real(apart.resolve_conj()) if apart.is_complex() else apart

    def _tokens(self, features: Tensor, axis: int | None) -> Tensor:
        """``[batch, tokens, ...]``; packed tokens are laid out with zeros between."""
        assert self.real is not None
        tokens = self.real.shape[1]
        if features.dim() == 2 and len(features) == int(self.real.sum()):
            laid = features.new_zeros(self.size, tokens, features.shape[1])
            laid[self.real.to(features.device)] = features
            return laid
        apart = self._apart(features, axis)
        at = next((i for i, n in enumerate(apart.shape) if i and n == tokens), None)
        if apart.dim() < 3 or at is None:
            raise ValueError(
                f"features of shape {list(features.shape)} do not have the {tokens} tokens of the "
                "attention mask; pass padding= a function of the batch that returns a mask of theirs, "
                "or padding=False to count everything"
            )
        return apart.movedim(at, 1)


def _laid(x: Tensor, order: tuple[int, ...] | None, like: Tensor) -> Tensor:
    """x with its axes as those of another tensor, where their order changed on the way."""
    return (x if order is None else x.permute(order)).reshape(like.shape)


@cache
def _piece(n: int) -> int:
    """The longest even part of n numbers, up to 4,096: a float32 sum of more loses digits."""
    longest = max(d for d in range(1, 4097) if n % d == 0)
    return longest if longest >= 64 else n


def _call(model: nn.Module, given: Any) -> Any:
    """A tensor as it is, the first of a tuple, a mapping by name without what forward does not take."""
    if isinstance(given, list | tuple):
        return _call(model, given[0])
    if not isinstance(given, Mapping):
        return model(given)
    taken = inspect.signature(getattr(model, "_orig_mod", model).forward).parameters
    every = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    return model(**{k: v for k, v in given.items() if (every or k in taken) and k not in LABELS})


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


def _tensors_in(given: Any, masks: bool = True) -> Iterator[Tensor]:
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, Mapping):
        for name, part in given.items():
            if masks or "mask" not in name:
                yield from _tensors_in(part, masks)
    elif isinstance(given, list | tuple):
        for part in given:
            yield from _tensors_in(part, masks)
