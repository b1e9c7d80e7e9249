"""How the weights of a correction are found, given states, slopes and the errors of plain steps."""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attractor.core.scheme import Rate
from attractor.core.tableaus import AnyScheme
from attractor.ode.corrections import AttNSM
from attractor.ode.trajectories import Run

# Of the largest singular value squared.
PENALTIES = (0.0, 1e-15, 1e-14, 1e-13, 1e-12, 1e-11, 1e-10, 1e-8, 1e-6)
ROWS_A_FEATURE = 60
CHUNK = 65_536  # rows of features in memory at once
WIDE = 3000  # features from which an SVD would take minutes
BATCH = 4096  # of the Adam phase


@dataclass(frozen=True)
class Pairs:
    """States, their slopes, the errors ``u' - u - dt S`` of plain steps, ``[n, d]`` each, and times."""

    u: Tensor
    slope: Tensor
    error: Tensor
    t: Tensor  # [n]
    dt: float

    def rows(self, index: Tensor) -> "Pairs":
        """Some of them."""
        return Pairs(self.u[index], self.slope[index], self.error[index], self.t[index], self.dt)


def one_step(rate: Rate, scheme: AnyScheme, dt: float, runs: list[Run], timed: bool) -> Pairs:
    """The pairs along fine trajectories."""
    found = []
    for run in runs:
        u, after = run.u[:-1], run.u[1:]
        steps = torch.arange(len(u), dtype=u.dtype, device=u.device)
        t = run.t0 + steps * dt
        with torch.no_grad():
            if timed:
                slope = torch.stack([scheme.slope(rate, t[i], u[i], dt) for i in range(len(u))])
            else:
                slope = scheme.slope(rate, t[0], u.flatten(0, 1), dt).reshape(u.shape)
        times = t[:, None].expand(u.shape[:2])
        found.append([x.flatten(0, 1) for x in (u, slope, after - u - dt * slope, times)])
    states, slopes, errors, when = (torch.cat(x) for x in zip(*found))
    pairs = Pairs(states, slopes, errors, when, dt)
    finite = torch.isfinite(pairs.slope).all(-1)
    if not bool(finite.all()):
        raise ValueError(
            f"a plain step of {scheme.name} with dt = {dt:g} is non-finite from "
            f"{int((~finite).sum())} of {len(finite)} states; use a smaller dt"
        )
    return pairs


class ClosedForm:
    """Fits the last layer of a correction to pairs by ridge least squares, in float64.

    Inputs are standardised, targets divided by their spread; `fold` puts both into the weights.
    """

    def __init__(self, model: Any, pairs: Pairs, scale: float, generator: torch.Generator) -> None:
        self.model, self.pairs = model, pairs
        self.net = model.net
        if hasattr(self.net, "spread"):
            self.net.spread(scale, generator)
        with torch.no_grad():
            x = model.inputs(pairs.u, pairs.slope, pairs.dt, pairs.t)
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
                out = net(x[index]) if gain is None else gain[index] * net(x[index])
                loss = (out - target[index]).square().mean()
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
        if not math.isfinite(loss.item()):
            raise FloatingPointError(
                "the loss of the Adam phase became non-finite; leave adam_steps at 0"
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
            self.net.set_head(torch.cat([w for w, _, _ in found], -1))
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
        for index in self.train.split(CHUNK):
            rows = torch.cat(equations(index), -1)
            stacked = torch.cat((triangle, rows)) if len(triangle) else rows
            triangle = torch.linalg.qr(stacked, mode="r")[1]
        return ridge(triangle, *equations(self.check))

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
    left, right = triangle[:k, :k], triangle[:k, k:]
    best: tuple[Tensor, float, float] | None = None
    for penalty, w in _solutions(left, right):
        error = (check @ w - check_y).square().mean().item()
        if best is None or error < best[2]:
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
) -> list[dict[str, Any]]:
    """Algorithm 1 of the AttNS paper: Adam on one-step pairs, in float32; the loss of each epoch."""
    u, slope, error = pairs.u.float(), pairs.slope.float(), pairs.error.float()
    batch = min(16_384, len(u))
    total = epochs * math.ceil(len(u) / batch)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, total)
    timed = getattr(model, "timed", False)
    history: list[dict[str, Any]] = []
    for epoch in range(epochs):
        summed = torch.zeros((), dtype=torch.float64, device=u.device)
        for index in torch.randperm(len(u), generator=generator).to(u.device).split(batch):
            added = model(u[index], slope[index], pairs.dt, pairs.t[index] if timed else None)
            loss = loss_scale * (added - error[index]).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
            summed += loss.detach() * len(index)
        mean = summed.item() / len(u)
        if not math.isfinite(mean):
            raise FloatingPointError(f"the loss became non-finite in epoch {epoch}; lower loss_scale")
        history.append({"epoch": epoch, "loss": mean})
        progress(f"epoch {epoch + 1} of {epochs}, loss {mean:.2e}")
    return history
