"""The last layer of a correction in closed form: ridge least squares on one-step pairs, in float64."""

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attractor.ode.corrections import AttNSM, Stages
from attractor.ode.pairs import Pairs
from attractor.ode.processes import Crew
from attractor.ode.sparse_maps import sparse_solution

# Of the largest singular value squared.
PENALTIES = (0.0, 1e-15, 1e-14, 1e-13, 1e-12, 1e-11, 1e-10, 1e-8, 1e-6)
ROWS_A_FEATURE = 60
CHUNK = 65_536  # rows of features in memory at once
WIDE = 3000  # features from which an SVD would take minutes
BATCH = 4096  # of the Adam phase


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
            if getattr(self.net, "odd", False):  # a shift would not leave it so
                self.mean, spread = torch.zeros_like(self.mean), x.square().mean(0).sqrt()
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
        triangle, check = self.crew.triangle(triangle), equations(self.check)
        solution = ridge(triangle, *check)
        if isinstance(self.model, Stages) and not self.model.config["width"]:
            rows = self.pairs.u.square().mean(0) * len(self.train)
            rounding = torch.finfo(rows.dtype).eps * rows.sqrt() / self.size
            return sparse_solution(triangle, *check, solution, 2 * rounding)
        return solution

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
    for penalty, w in solutions(left, right):
        error = (check @ w - check_y).square().mean().item()
        if best is None or not best[2] <= error:  # which NaN is not
            best = w, penalty, error
    assert best is not None
    return best


def solutions(
    triangle: Tensor, y: Tensor, penalties: Sequence[float] = PENALTIES
) -> Iterator[tuple[float, Tensor]]:
    """Penalties and their solutions: by one SVD, or where that would take minutes, by a QR each."""
    k = triangle.shape[-1]
    if k <= WIDE:
        left, values, right = torch.linalg.svd(triangle, full_matrices=False)
        turned = left.T @ y
        for penalty in penalties:
            inverse = values / (values.square() + penalty * values[0].square())
            inverse = torch.where(values > 1e-15 * values[0], inverse, 0.0)
            yield penalty, right.T @ (inverse[:, None] * turned)
        return
    probe = torch.ones(k, 1).to(triangle)
    for _ in range(20):  # towards the largest singular value
        probe = triangle.T @ (triangle @ (probe / probe.norm()))
    for penalty in penalties:
        if penalty:
            size = (penalty * probe.norm()).sqrt()
            rows = torch.cat((triangle, size * torch.eye(k).to(triangle)))
            both = torch.cat((rows, torch.cat((y, torch.zeros_like(triangle[:, : y.shape[-1]])))), -1)
            solved = torch.linalg.qr(both, mode="r")[1]
            yield penalty, torch.linalg.solve_triangular(solved[:k, :k], solved[:k, k:], upper=True)
