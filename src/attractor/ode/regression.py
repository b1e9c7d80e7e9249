"""How the weights of a correction are found, given states, slopes and the errors of plain steps."""

import copy
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attractor.core.scheme import Rate
from attractor.core.step import Step
from attractor.core.tableaus import AnyScheme
from attractor.ode.corrections import AttNSM
from attractor.ode.processes import Crew
from attractor.ode.trajectories import Run
from attractor.train import checkpoint
from attractor.train.checkpoint import CheckpointError
from attractor.train.runs import Kept

# Of the largest singular value squared.
PENALTIES = (0.0, 1e-15, 1e-14, 1e-13, 1e-12, 1e-11, 1e-10, 1e-8, 1e-6)
ROWS_A_FEATURE = 60
CHUNK = 65_536  # rows of features in memory at once
WIDE = 3000  # features from which an SVD would take minutes
BATCH = 4096  # of the Adam phase


@dataclass(frozen=True)
class Pairs:
    """Plain steps and their errors.

    Attributes:
        u, slope: States and slopes ``[n, d]``.
        error: The errors ``u' - u - dt S`` of the steps ``[n, d]``.
        t: Times ``[n]``.
        dt: The step size.
        stages: The stages of the steps, ``[n, d]`` each, if a correction is to see them.
        parameters: Of the trajectories ``[n, k]``; None for an equation without them.
    """

    u: Tensor
    slope: Tensor
    error: Tensor
    t: Tensor
    dt: float
    stages: tuple[Tensor, ...] = ()
    parameters: Tensor | None = None

    def rows(self, index: Tensor) -> "Pairs":
        """Return some of them."""
        return self._map(lambda x: x[index])

    def to(self, dtype: torch.dtype) -> "Pairs":
        """Return them in another type; times stay as they are."""
        return replace(self._map(lambda x: x.to(dtype)), t=self.t)

    def step(self) -> Step:
        """Return the steps, as a correction sees them."""
        return Step(self.u, self.slope, self.dt, self.t, self.stages, self.parameters)

    def _map(self, change: Callable[[Tensor], Tensor]) -> "Pairs":
        return Pairs(
            change(self.u), change(self.slope), change(self.error), change(self.t), self.dt,
            tuple(change(k) for k in self.stages),
            None if self.parameters is None else change(self.parameters),
        )  # fmt: skip

    @property
    def hash(self) -> str:
        """SHA-256 of all numbers."""
        total = hashlib.sha256(float(self.dt).hex().encode())
        for x in (self.u, self.slope, self.error, self.t, self.parameters):
            if x is None:
                continue
            total.update(x.cpu().contiguous().numpy().tobytes())
        return total.hexdigest()


class Unfinished:
    """A folder in which a fit is kept while it goes on: weights, generators and what happened so far.

    Args:
        out: the folder; None: nothing is kept.
        what: is fitted, and how; another fit is not taken up.
        unit: what is counted.
        writes: whether this process keeps anything; of several only the first does.
    """

    SECONDS = 30.0  # between checkpoints

    def __init__(
        self, out: Path | str | None, what: dict[str, Any], unit: str, writes: bool = True
    ) -> None:
        self.writes = writes
        self.what = json.loads(json.dumps(what))
        self.kept = None if out is None else Kept(out, "unfinished fit", unit)
        self.saved, self.began, self.before = time.monotonic(), time.monotonic(), 0.0

    @property
    def seconds(self) -> float:
        """Spent, those before a break included."""
        return time.monotonic() - self.began + self.before

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Tensors and numbers of the latest state, if there is one.

        Raises:
            CheckpointError: it is of another fit.
        """
        found = self.kept.load() if self.kept else None
        if found is None:
            return None
        folder, tensors, config = found
        theirs = config.get("what")
        if theirs != self.what:
            theirs = theirs if isinstance(theirs, dict) else {}
            other = [k for k in self.what if theirs.get(k) != self.what[k]]
            raise CheckpointError(
                f"{folder} is of a fit with other {', '.join(other)}; give another out="
            )
        self.before = config["seconds"]
        return tensors, config

    def due(self, last: bool = False) -> bool:
        """Whether it is time to keep a state."""
        if self.kept is None or not self.writes:
            return False
        return last or time.monotonic() - self.saved >= self.SECONDS

    def save(
        self, count: int, tensors: dict[str, Tensor], numbers: dict[str, Any], last: bool = False
    ) -> None:
        """Keep a state, if that is due and it is not kept yet."""
        if self.kept and self.due(last) and self.kept.last != self.kept.place(count):
            config = {"what": self.what, "seconds": self.seconds, **numbers}
            self.kept.save(count, 0, tensors, config)
            self.saved = time.monotonic()


def one_step(
    rate: Rate, scheme: AnyScheme, dt: float, runs: list[Run], timed: bool, stages: bool = False
) -> Pairs:
    """The pairs along fine trajectories, with the stages of the steps if they are wanted."""
    parts: list[Pairs] = []
    for run in runs:
        (count, n), device = run.u[:-1].shape[:2], run.u.device
        u, after = (x.flatten(0, 1) for x in (run.u[:-1], run.u[1:]))
        t = (run.t0 + torch.arange(count, dtype=u.dtype, device=device) * dt).repeat_interleave(n)
        p = run.parameters
        with torch.no_grad():
            if timed:  # a step of all trajectories at a time, for t is one number
                single = [
                    scheme.step(rate, t[i * n], u[i * n : (i + 1) * n], dt, p) for i in range(count)
                ]
                slope = torch.cat([step.slope for step in single])
                kept = [torch.cat(k) for k in zip(*(step.stages for step in single))]
                p = None if p is None else p.repeat(count, 1)
            else:
                p = None if p is None else p.repeat(count, 1)
                step = scheme.step(rate, t[0], u, dt, p)
                slope, kept = step.slope, list(step.stages)
        error = after - u - dt * slope
        parts.append(Pairs(u, slope, error, t, dt, tuple(kept) if stages else (), p))
    pairs = _joined(parts)
    finite = torch.isfinite(pairs.slope).all(-1)
    if not bool(finite.all()):
        raise ValueError(
            f"a plain step of {scheme.name} with dt = {dt:g} is non-finite from "
            f"{int((~finite).sum())} of {len(finite)} states; use a smaller dt"
        )
    return pairs


def _joined(parts: list[Pairs]) -> Pairs:
    """All pairs of several parts."""
    if len(parts) == 1:
        return parts[0]
    join: Any = lambda name: torch.cat([getattr(part, name) for part in parts])
    stages = tuple(torch.cat(k) for k in zip(*(part.stages for part in parts)))
    p = None if parts[0].parameters is None else join("parameters")
    return Pairs(join("u"), join("slope"), join("error"), join("t"), parts[0].dt, stages, p)


class ClosedForm:
    """Fits the last layer of a correction to pairs by ridge least squares, in float64.

    Inputs are standardised, targets divided by their spread; `fold` puts both into the weights. Of a
    crew of several processes each takes its share of the rows.
    """

    def __init__(
        self,
        model: Any,
        pairs: Pairs,
        scale: float,
        generator: torch.Generator,
        crew: Crew | None = None,
    ) -> None:
        self.model, self.pairs, self.crew = model, pairs, crew or Crew()
        self.net = model.net
        if hasattr(self.net, "spread"):
            self.net.spread(scale, generator)
        with torch.no_grad():
            x = model.inputs(pairs.step())
            self.mean, spread = x.mean(0), x.std(0)
            # A component that hardly moves is noise; leave it as small as it is.
            self.deviation = torch.where(spread > 1e-12 * (1 + self.mean.abs()), spread, 1.0)
            self.x = x
            size = pairs.error.std(0)
            self.size = torch.where(size > 0, size, 1.0)
            order = torch.randperm(len(x), generator=generator).to(x.device)
            k = self.net.features(x[:1]).shape[-1]
        # AttNS-m has a matrix for each output, so it makes do with fewer rows.
        few = isinstance(model, AttNSM)
        wanted = max(5_000, ROWS_A_FEATURE // 5 * k) if few else max(20_000, ROWS_A_FEATURE * k)
        count = min(int(0.9 * len(x)) + 1, wanted)
        enough = len(x) > count + 100
        self.train = order[:count]
        self.check = order[count : count + 20_000] if enough else order[-max(1, len(x) // 10) :]

    def rows(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Standardised inputs, targets, and what multiplies Q (AttNS-m only)."""
        some = self.pairs.rows(index)
        x = (self.x[index] - self.mean) / self.deviation
        if isinstance(self.model, AttNSM):  # error = gain (Q - 1), gain depending on row and component
            gain = self.model.gain(some.slope, some.dt) / self.size
            return x, some.error / self.size + gain, gain
        return x, some.error / self.size, None

    def train_hidden(self, steps: int, first: int, total: int, generator: torch.Generator) -> None:
        """Adam on all weights in float32, steps `first` to `first + steps` of a cosine over total."""
        net = copy.deepcopy(self.net).float()
        with torch.no_grad():
            x, target, gain = self.rows(torch.arange(len(self.x), device=self.x.device))
            x, target = x.float(), target.float()
            gain = None if gain is None else gain.float()
        optimiser = torch.optim.Adam(net.parameters(), lr=1e-3)
        batch = min(BATCH, len(x))
        with torch.enable_grad():
            for step in range(first, first + steps):
                optimiser.param_groups[0]["lr"] = 5e-4 * (1 + math.cos(math.pi * step / total))
                index = torch.randint(len(x), (batch,), generator=generator).to(x.device)
                index = self.crew.share(index)
                out = net(x[index]) if gain is None else gain[index] * net(x[index])
                loss = self.crew.mean((out - target[index]).square(), batch)
                optimiser.zero_grad()
                loss.backward()
                self.crew.add_gradients(net.parameters())
                optimiser.step()
        if not math.isfinite(self.crew.total(loss.detach()).item()):
            raise FloatingPointError(
                "the loss of the Adam phase became non-finite; use Ridge(adam_steps=0)"
            )
        with torch.no_grad():
            for ours, trained in zip(self.net.parameters(), net.parameters()):
                ours.copy_(trained)

    def solve(self) -> dict[str, float]:
        """Set the last layer; the penalty chosen and the one-step error on rows not used for it."""
        with torch.no_grad():
            gained = isinstance(self.model, AttNSM)
            outputs = range(self.pairs.error.shape[-1]) if gained else (None,)
            found = [self._solve_for(j) for j in outputs]
            self.net.set_head(self.crew.agreed(torch.cat([w for w, _, _ in found], -1)))
        return {"penalty": found[-1][1], "one_step": sum(e for _, _, e in found) / len(found)}

    def _solve_for(self, output: int | None) -> tuple[Tensor, float, float]:
        """Weights for one output, or for all at once, which is possible if all have one matrix."""

        def equations(index: Tensor) -> tuple[Tensor, Tensor]:
            x, target, gain = self.rows(index)
            features = self.net.features(x)
            if output is None or gain is None:
                return features, target
            return gain[:, output, None] * features, target[:, output, None]

        triangle = torch.empty(0)
        for index in self.crew.share(self.train).split(CHUNK):
            rows = torch.cat(equations(index), -1)
            stacked = torch.cat((triangle, rows)) if len(triangle) else rows
            triangle = torch.linalg.qr(stacked, mode="r")[1]
        return ridge(self.crew.triangle(triangle), *equations(self.check))

    def fold(self) -> nn.Module:
        """A copy of the correction that takes raw inputs and gives raw errors."""
        model = copy.deepcopy(self.model)
        net: Any = model.net
        with torch.no_grad():
            if not isinstance(model, AttNSM):
                net.head.weight.mul_(self.size[:, None])
                net.head.bias.mul_(self.size)
                if getattr(net, "around", None) is not None:
                    net.around.weight.mul_(self.size[:, None])
            net.standardise(self.mean, self.deviation)
        return model


def ridge(triangle: Tensor, check: Tensor, check_y: Tensor) -> tuple[Tensor, float, float]:
    """Least squares ``a w = y`` for all penalties; weights, penalty and error of the best on check rows.

    Args:
        triangle: the R of a QR decomposition of ``[a, y]``. Normal equations would square the
            condition, and with it throw away half of the digits.
        check, check_y: further rows of a and y.
    """
    k = check.shape[-1]
    if len(triangle) < k:  # fewer rows than features
        triangle = torch.nn.functional.pad(triangle, (0, 0, 0, k - len(triangle)))
    left, right = triangle[:k, :k], triangle[:k, k:]
    best: tuple[Tensor, float, float] | None = None
    for penalty, w in _solutions(left, right):
        error = (check @ w - check_y).square().mean().item()
        if best is None or not best[2] <= error:  # which NaN is not
            best = w, penalty, error
    assert best is not None
    return best


def _solutions(triangle: Tensor, y: Tensor) -> Iterator[tuple[float, Tensor]]:
    """Penalties and their solutions: by one SVD, or where that would take minutes, by a QR each."""
    k = triangle.shape[-1]
    if k <= WIDE:
        left, values, right = torch.linalg.svd(triangle, full_matrices=False)
        turned = left.T @ y
        for penalty in PENALTIES:
            inverse = values / (values.square() + penalty * values[0].square())
            inverse = torch.where(values > 1e-15 * values[0], inverse, 0.0)
            yield penalty, right.T @ (inverse[:, None] * turned)
        return
    probe = torch.ones(k, 1).to(triangle)
    for _ in range(20):  # towards the largest singular value
        probe = triangle.T @ (triangle @ (probe / probe.norm()))
    for penalty in PENALTIES:
        if penalty:
            size = (penalty * probe.norm()).sqrt()
            rows = torch.cat((triangle, size * torch.eye(k).to(triangle)))
            both = torch.cat((rows, torch.cat((y, torch.zeros_like(triangle[:, : y.shape[-1]])))), -1)
            solved = torch.linalg.qr(both, mode="r")[1]
            yield penalty, torch.linalg.solve_triangular(solved[:k, :k], solved[:k, k:], upper=True)


def train_as_printed(
    model: nn.Module,
    pairs: Pairs,
    epochs: int,
    loss_scale: float,
    generator: torch.Generator,
    progress: Callable[[str], None],
    unfinished: Unfinished | None = None,
    crew: Crew | None = None,
) -> list[dict[str, Any]]:
    """Algorithm 1 of the AttNS paper: Adam on one-step pairs, in float32; the loss of each epoch.

    With `unfinished` it goes on where it was interrupted, to the same bits.
    """
    pairs, u = pairs.to(torch.float32), pairs.u
    batch = min(16_384, len(u))
    total = epochs * math.ceil(len(u) / batch)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, total)
    crew = crew or Crew()
    history: list[dict[str, Any]] = []
    found = unfinished.load() if unfinished else None
    crew.wait()  # until all have read what is there
    if found is not None:
        losses = _take_up(*found, model, optimiser, schedule, generator)
        history = [{"epoch": i, "loss": loss} for i, loss in enumerate(losses)]
    for epoch in range(len(history), epochs):
        summed = torch.zeros((), dtype=torch.float64, device=u.device)
        for whole in torch.randperm(len(u), generator=generator).to(u.device).split(batch):
            some = pairs.rows(crew.share(whole))
            loss = loss_scale * crew.mean((model(some.step()) - some.error).square(), len(whole))
            optimiser.zero_grad()
            loss.backward()
            crew.add_gradients(model.parameters())
            optimiser.step()
            schedule.step()
            summed += loss.detach() * len(whole)
        mean = crew.total(summed).item() / len(u)
        if not math.isfinite(mean):
            raise FloatingPointError(f"the loss became non-finite in epoch {epoch}; lower loss_scale")
        history.append({"epoch": epoch, "loss": mean})
        if unfinished and unfinished.due(epoch + 1 == epochs):
            tensors, numbers = _put_down(model, optimiser, schedule, generator)
            tensors["losses"] = torch.tensor([row["loss"] for row in history], dtype=torch.float64)
            unfinished.save(epoch + 1, tensors, numbers, last=epoch + 1 == epochs)
        progress(f"epoch {epoch + 1} of {epochs}, loss {mean:.2e}")
    return history


def _put_down(
    model: nn.Module, optimiser: torch.optim.Adam, schedule: Any, generator: torch.Generator
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All that an epoch of Adam changes."""
    tensors = {f"model.{k}": v for k, v in model.state_dict().items()}
    for index, state in optimiser.state_dict()["state"].items():
        tensors |= {f"adam.{index}.{k}": v for k, v in state.items()}
    tensors["generator"] = generator.get_state()
    return tensors, {"rate": optimiser.param_groups[0]["lr"], "steps": schedule.last_epoch}


def _take_up(
    tensors: dict[str, Tensor], numbers: dict[str, Any], model: nn.Module, optimiser: torch.optim.Adam,
    schedule: Any, generator: torch.Generator,
) -> list[float]:  # fmt: skip
    """Put back what `_put_down` took; the losses so far."""
    weights = {k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")}
    checkpoint.fill(model, weights, "the unfinished fit")
    state: dict[int, dict[str, Tensor]] = {}
    try:
        for name, value in tensors.items():
            if name.startswith("adam."):
                _, index, key = name.split(".")
                state.setdefault(int(index), {})[key] = value
        groups = optimiser.state_dict()["param_groups"]
        optimiser.load_state_dict({"state": state, "param_groups": groups})
        optimiser.param_groups[0]["lr"] = numbers["rate"]
        schedule.last_epoch = numbers["steps"]
        generator.set_state(tensors["generator"])
        return tensors["losses"].tolist()
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"the unfinished fit cannot be taken up: {error}") from None
