"""Norms of states and increments at the residual additions of a network, batch by batch."""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from attractor.common.checks import nearest
from attractor.core.stiffness import Mean
from attractor.residual.axes import reorder, sample_axis
from attractor.residual.batch import Batch, Call, call_model, tensors_of
from attractor.residual.dispatch import Counted, split_path
from attractor.residual.finder import trace
from attractor.residual.profile import Step, StiffnessProfile
from attractor.residual.trunk import BranchFactor, Granularity, MeasurementPlan

TRACED = 2  # inputs in the pass from which the graph is read
PLANS = 4  # plans that are kept, for networks whose operations depend on the batch


class OffPlanError(BaseException):
    """The network deviates from its plan. Not an `Exception`, so that no model catches it."""


class Meter:
    """Measures one model: holds its plans, and the norms of all batches so far."""

    def __init__(
        self, model: nn.Module, granularity: Granularity, within: str, call: Call | None
    ) -> None:
        names = [".".join(split_path(name)) for name, _ in model.named_modules(remove_duplicate=False)]
        if within not in names:
            children = ", ".join(name for name in names if name and "." not in name)
            raise ValueError(
                f"within = {within!r}; {type(model).__name__} has no module of that path, its children "
                f"are {children or 'none'}{nearest(within, names)}"
            )
        self.model, self.granularity, self.within = model, granularity, within
        self.name = type(getattr(model, "_orig_mod", model)).__name__
        self.call = call or call_model
        self.plans: list[MeasurementPlan] = []
        self.rows: list[Tensor] = []

    def measure(self, batch: Batch) -> None:
        """Measure a batch.

        Raises:
            ValueError: The model has no residual blocks, or its operations vary from call to call.
        """
        for plan in self.plans:
            if self._follow(plan, batch):
                return
        for sample in (batch.first(TRACED), batch):
            try:
                plan = self._plan(sample)
            except Exception:
                if sample is batch:
                    raise
                continue  # not every model accepts fewer inputs
            if self._follow(plan, batch):
                return
        raise ValueError(
            "the model runs other operations in a second call on the same batch; make it deterministic "
            "in evaluation mode"
        )

    def _plan(self, batch: Batch) -> MeasurementPlan:
        plan = trace(self.model, batch, self.call, self.within).plan(self.granularity)
        name = self.name
        if plan is None:
            where = f" in its module {self.within!r}" if self.within else ""
            raise ValueError(f"{name} has no residual blocks: it adds no branch to its input{where}")
        if self.plans and _outline(self.plans[0]) != _outline(plan):
            raise ValueError(
                f"{name} has {len(self.plans[0].blocks)} blocks on one batch and others on the next "
                f"({len(plan.blocks)}); probe such batches separately"
            )
        return plan

    def _follow(self, plan: MeasurementPlan, batch: Batch) -> bool:
        """Record the norms of a batch; return False if the model deviates from the plan."""
        recorder = Recorder(plan, Reductions(batch, batch.valid_tokens_of(plan)))
        try:
            with recorder:
                self.call(self.model, batch.data)
        except OffPlanError:
            return False
        if recorder.digest != plan.end:
            return False
        self.plans = [plan, *(p for p in self.plans if p is not plan)][:PLANS]
        self.rows.append(recorder.table())
        return True

    def profile(self, step: Step, mean: Mean, granularity: Granularity) -> StiffnessProfile:
        """Return the profile of all batches so far."""
        blocks = self.plans[0].blocks
        state, increment, ungated, gates = torch.cat(self.rows, dim=1)
        ratio = lambda top: torch.where((top == 0) & (state == 0), 0.0, top / state)
        return StiffnessProfile(
            one=ratio(increment),
            gate=ratio(ungated),
            gates=gates,
            stage=torch.tensor([b.stage for b in blocks]),
            names=tuple(b.name for b in blocks),
            model=self.name,
            granularity=granularity,
            step=step,
            mean=mean,
        )


class Recorder(Counted):
    """Records norms at the operations of a plan while a model runs."""

    def __init__(self, plan: MeasurementPlan, reductions: "Reductions") -> None:
        super().__init__()
        self.plan, self.reductions = plan, reductions
        self.state: dict[int, Tensor] = {}  # block -> |x|
        self.increment: dict[int, Tensor] = {}  # block -> |x_{t+1} - x|
        self.ungated: dict[int, Tensor] = {}  # block -> the same without its gates
        self.factors: dict[tuple[int, int], Tensor] = {}  # block, addition -> mean of F
        self._x: dict[int, Tensor] = {}  # running block -> x at its start
        self._removed: dict[int, list[Any]] = {}  # running block -> f - F f of its gates

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operation; measure its operands first and its output afterwards, if planned."""
        event = self.plan.events.get(self.index)
        if event is None:
            return func(*args, **kwargs)
        if self.digest != event.digest:
            raise OffPlanError
        for number, addition, gate in event.gates:
            self._gate(number, addition, gate, args, kwargs)
        if event.starts is not None:
            self._start(event.starts, args, kwargs)
        out = func(*args, **kwargs)
        if event.ends is not None:
            self._end(event.ends, out)
        return out

    def _gate(self, k: int, addition: int, gate: BranchFactor, args: Any, kwargs: Any) -> None:
        f, factor = args[gate.branch], args[gate.factor]
        if gate.scalar:
            self._scale(k, addition, factor)
            return
        tokens = self.plan.blocks[k].token_axis
        mean = self.reductions.mean(factor, gate.axis, tokens)
        previous = self.factors.get((k, addition))
        self.factors[k, addition] = mean if previous is None else previous * mean
        if not self.plan.blocks[k].direct:
            removed = (f - f * factor) * kwargs.get("value", 1)
            self._removed.setdefault(k, []).append((addition, removed, gate.order))
        elif previous is None:
            self.ungated[k] = self.reductions.norm(f, gate.axis, tokens)

    def _scale(self, k: int, addition: int, number: Any) -> None:
        """Multiply the branch by a constant that follows a gate; it belongs to f."""
        if self.plan.blocks[k].direct:
            self.ungated[k] = self.ungated[k] * abs(number)
            return
        self._removed[k] = [
            (j, part * number if j == addition else part, order) for j, part, order in self._removed[k]
        ]

    def _start(self, k: int, args: Any, kwargs: Any) -> None:
        block = self.plan.blocks[k]
        state, branch = block.first.state, block.first.branch
        x = args[state]
        self.state[k] = self.reductions.norm(x, block.first.axis, block.token_axis)
        if not block.direct or branch is None:
            self._x[k] = x.clone() if block.needs_copy else x
            return
        self.increment[k] = self.reductions.norm(args[branch], block.first.axis, block.token_axis)
        self.ungated.setdefault(k, self.increment[k])
        if "alpha" in kwargs:  # a factor of the second summand
            for norms in (self.state,) if state == 1 else (self.increment, self.ungated):
                norms[k] = norms[k] * abs(kwargs["alpha"])

    def _end(self, k: int, out: Tensor) -> None:
        block = self.plan.blocks[k]
        axis, tokens = block.last.axis, block.token_axis
        x = reorder(self._x.pop(k), block.order, out)
        increment = out.to(torch.promote_types(out.dtype, torch.float32)) - x
        self.increment[k] = self.ungated[k] = self.reductions.norm(increment, axis, tokens)
        removed = self._removed.pop(k, [])
        for _, part, order in removed:
            increment = increment + reorder(part, order, out)
        if removed:
            aligned = block.order is None and all(order is not None for _, _, order in removed)
            self.ungated[k] = self.reductions.norm(increment, axis, tokens) * (
                1 if aligned else torch.nan
            )

    def table(self) -> Tensor:
        """Return |x|, |x_{t+1} - x|, the same without gates, and mean gates: ``[4, inputs, blocks]``."""
        blocks = range(len(self.plan.blocks))
        nan = torch.full_like(self.state[0], torch.nan)
        gates = [[m for (k, _), m in self.factors.items() if k == b] or [nan] for b in blocks]
        rows = [norms[b] for norms in (self.state, self.increment, self.ungated) for b in blocks]
        rows += [torch.stack(means).mean(0) for means in gates]
        return torch.stack(rows).cpu().double().unflatten(0, (4, -1)).transpose(1, 2)


class Reductions:
    """Norms and means per input, over its valid tokens.

    Args:
        batch: The batch.
        valid: Mask of valid tokens ``[batch, tokens]``, or None.
    """

    def __init__(self, batch: Batch, valid: Tensor | None) -> None:
        self.size = batch.size
        self.valid = None if valid is None or bool(valid.all()) else valid
        self.device = next(tensor for _, tensor in tensors_of(batch.data)).device

    def norm(self, features: Tensor, axis: int | None = None, token_axis: int | None = 1) -> Tensor:
        """Return the norms ``[batch]``, accumulated in float32 or wider over pieces of the features.

        Args:
            features: The tensor to reduce.
            axis: The axis that counted inputs in the traced pass.
            token_axis: See `attractor.residual.trunk.token_axis`.
        """
        norm = torch.linalg.vector_norm
        dtype = torch.promote_types(features.dtype, torch.float32).to_real()
        if self.valid is not None:
            tokens = self._tokens(features, axis, token_axis)
            pieces = norm(tokens.flatten(2), dim=2, dtype=dtype)
            return norm(pieces * self.valid.to(pieces.device), dim=1).to(self.device)
        rows = self._batch_first(features, axis)
        order = sorted(range(1, rows.dim()), key=rows.stride, reverse=True)  # the order in memory
        flat = rows.permute(0, *order).reshape(self.size, -1)
        pieces = norm(flat.unflatten(1, (-1, _piece(flat.shape[1]))), dim=2, dtype=dtype)
        return norm(pieces, dim=1).to(self.device)

    def mean(self, factor: Tensor, axis: int | None = None, token_axis: int | None = 1) -> Tensor:
        """Return the means ``[batch]`` of a gate's factor; arguments as in `norm`."""
        rows = self._batch_first(factor, axis).to(torch.promote_types(factor.dtype, torch.float32))
        if rows.dim() > 1:
            rows = rows.movedim(token_axis or 1, 1)
        if self.valid is not None and rows.shape[1] == self.valid.shape[1]:
            weight = self.valid.to(rows.device) / self.valid.sum(1, keepdim=True).to(rows.device)
            return (rows.reshape(*self.valid.shape, -1).mean(2) * weight).sum(1).to(self.device)
        return rows.flatten(1).mean(1).to(self.device)

    def _batch_first(self, features: Tensor, previous: int | None) -> Tensor:
        """Return a view ``[batch, ...]``."""
        axis = sample_axis(tuple(features.shape), self.size, previous)
        rows = features.unflatten(0, (self.size, -1)) if axis < 0 else features.movedim(axis, 0)
        return torch.view_as_real(rows.resolve_conj()) if rows.is_complex() else rows

    def _tokens(self, features: Tensor, axis: int | None, token_axis: int | None) -> Tensor:
        """Return ``[batch, tokens, ...]``; packed tokens are unpacked, with zeros between them."""
        assert self.valid is not None
        tokens = self.valid.shape[1]
        if features.dim() == 2 and len(features) == int(self.valid.sum()):
            unpacked = features.new_zeros(self.size, tokens, features.shape[1])
            unpacked[self.valid.to(features.device)] = features
            return unpacked
        rows = self._batch_first(features, axis)
        candidates = [i for i, n in enumerate(rows.shape) if i and n == tokens]
        if rows.dim() == 3 and len(candidates) == 2 and token_axis is not None:
            return rows.movedim(token_axis, 1)
        if rows.dim() >= 3 and len(candidates) == 1:
            return rows.movedim(candidates[0], 1)
        if not candidates or rows.dim() < 3:
            raise ValueError(
                f"features of shape {list(features.shape)} do not have the {tokens} tokens of the "
                "attention mask; pass padding= a function from the batch to a mask of their tokens, or "
                "padding=False to count everything"
            )
        raise ValueError(
            f"features of shape {list(features.shape)} have {len(candidates)} axes as long as the "
            f"mask's {tokens} tokens; pad the batch to another length, or pass padding=False to count "
            "everything"
        )


@cache
def _piece(n: int) -> int:
    """Return the largest divisor of n up to 4,096, since longer float32 sums lose digits, or n."""
    longest = max(d for d in range(1, 4097) if n % d == 0)
    return longest if longest >= 64 else n


def _outline(plan: MeasurementPlan) -> list[tuple[str, int]]:
    return [(block.name, block.stage) for block in plan.blocks]
