"""Fit a polynomial of patches to trajectories of a finer grid, in closed form."""

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attractor.core import get_scheme
from attractor.core.rates import Rate, call_rate
from attractor.core.step import with_parameters
from attractor.core.tableaus import AnyScheme
from attractor.ode.closed_form import solutions
from attractor.ode.corrections import Patches
from attractor.ode.fit_data import FitData, Problem
from attractor.ode.grids import Grid, grid_of
from attractor.ode.pairs import Pairs, one_step
from attractor.ode.patch_region import PatchRegion
from attractor.ode.processes import Crew
from attractor.ode.rollouts import Rollouts, step_accuracy
from attractor.ode.solver import HybridSolver
from attractor.ode.trajectories import Run

PATCHES = 200_000  # that a fit learns from, if the number of trajectories is not set
FEWEST_TRAJECTORIES = 16
CANDIDATES = ((2, 2), (2, 3), (3, 3), (3, 4), (2, 5))  # radius and degree along one axis,
CANDIDATES_IN_SPACE = ((1, 2), (2, 2), (2, 3))  # and in several dimensions
NOISE = 1e-4  # of the states from which steps start, relative to their spread
PENALTIES = (
    0.0,
    1e-14,
    1e-12,
    1e-10,
    1e-8,
    1e-6,
    1e-4,
)  # relative to the largest singular value squared
MARGIN = 2.0  # of the trust region
CHUNK = 2**24  # numbers of features in memory at once
EQUAL = 1e-6  # relative difference up to which rates are taken to be the same


@dataclass(frozen=True)
class Fields:
    """An equation on a grid, and the one that it is fitted to.

    Attributes:
        rate, grid: The equation on the coarse grid.
        reference, fine: The equation on the fine grid; the same ones if only the step is corrected.
    """

    rate: Rate
    grid: Grid
    reference: Rate
    fine: Grid

    @classmethod
    def of(cls, rate: Rate, reference: Rate | None, grid: Grid | None, fine_dim: int) -> "Fields":
        """Return the fields, after checking that the fine grid coarsens evenly.

        Args:
            grid: The grid of the rate; None: the rate's attribute `grid`.
            fine_dim: Size of a sampled state, from which follows the grid of a reference without one.
        """
        grid = grid_of(rate, grid)
        if reference is None:
            return cls(rate, grid, rate, grid)
        if isinstance(getattr(reference, "grid", None), Grid):
            fine = grid_of(reference)
        else:
            factor = round((fine_dim / grid.dim) ** (1 / len(grid.shape)))
            fine = Grid(tuple(n * max(1, factor) for n in grid.shape), grid.channels, grid.walls)
        grid.factor_of(fine)
        return cls(rate, grid, reference, fine)

    def check(self, u: Tensor, p: Tensor | None) -> None:
        """Raise unless the rates commute with translations, for states u ``[n, fine.dim]``."""
        if u.shape[-1] != self.fine.dim:
            raise ValueError(
                f"sample draws states of {u.shape[-1]} numbers, and those of the "
                f"{'fine grid' if self.fine != self.grid else 'grid'} have {self.fine.dim}; with "
                "reference= it draws states of the fine grid"
            )
        for name, rate, grid in (
            ("the rate", self.rate, self.grid),
            ("reference", self.reference, self.fine),
        ):
            if grid.walls:
                continue  # walls are in one place
            u_grid = grid.restrict(u, self.fine)
            for axis in range(-len(grid.shape), 0):
                shift = max(1, grid.shape[axis] // 3)
                move = lambda x, k=shift, a=axis, g=grid: g.state(torch.roll(g.field(x), k, a))
                call = lambda x, f=rate: call_rate(with_parameters(f, p), torch.zeros(()).to(x), x)
                with torch.no_grad():
                    here, there = move(call(u_grid)), call(move(u_grid))
                if not torch.allclose(here, there, rtol=EQUAL, atol=EQUAL * float(here.abs().max())):
                    raise ValueError(
                        f"{name} depends on the place: for a field moved by {shift} cells along axis "
                        f"{axis + len(grid.shape)} it is not the moved rate (it differs by "
                        f"{(here - there).abs().max().item():.2g}). A correction of patches is the same "
                        "everywhere; put what depends on the place into channels of the state, or use "
                        "Grid(..., walls=True) if the domain is not periodic"
                    )

    def restrict(self, runs: list[Run]) -> list[Run]:
        """Return runs of the fine grid on the coarse one."""
        return [replace(run, u=self.grid.restrict(run.u, self.fine)) for run in runs]

    def is_conserved(self, runs: list[Run]) -> bool:
        """Return whether the means of all channels stay the same along trajectories."""
        for run in runs:
            field = self.grid.field(run.u).flatten(-len(self.grid.shape))
            mean, size = field.mean(-1), field.square().mean((0, 1, 3)).sqrt()
            if bool(((mean - mean[:1]).abs().amax((0, 1)) > 1e-7 * size).any()):
                return False
        return True


def fit_patches(
    rate: Rate,
    reference: Rate | None,
    scheme: AnyScheme,
    *,
    dt: float,
    horizon: float,
    sample: Any,
    parameters: Any,
    trajectories: int | None,
    fine_dt: float | None,
    period: float | None,
    seed: int,
    device: Any,
    options: Mapping[str, Any],
    progress: Callable[[str], None],
) -> HybridSolver:
    """Return a solver of fields on a coarse grid. Arguments as for `fit`.

    The coefficients are a ridge regression on all patches of steps along restricted fine trajectories,
    whose starting states have a little noise, without which long rollouts drift away. Penalties, and
    radius and degree unless they are set, are those with the smallest error of held-out rollouts.
    """
    options = dict(options)
    problem = Problem(
        rate if reference is None else reference, sample, parameters, dt, horizon, 1, period, seed,
        device,
    )  # fmt: skip
    few, few_p = problem.few()
    fields = Fields.of(rate, reference, options.pop("grid", None), few.shape[-1])
    fields.check(few, few_p)
    if trajectories is None:
        steps = problem.plan.steps
        trajectories = max(FEWEST_TRAJECTORIES, math.ceil(PATCHES / (fields.grid.cells * steps)))
    problem = replace(problem, trajectories=trajectories)
    grid = fields.grid
    shared: dict[str, Any] = {
        "shape": grid.shape, "channels": grid.channels, "walls": grid.walls, "period": period,
        "parameters": 0 if few_p is None else few_p.shape[-1],
        "dtype": torch.float64, "device": few.device,
    }  # fmt: skip
    noise = options.pop("noise", NOISE)
    names = [key for key in ("radius", "degree") if key in options]
    sizes = [
        {"radius": radius, "degree": degree, **options}
        for radius, degree in (CANDIDATES if len(grid.shape) == 1 else CANDIDATES_IN_SPACE)
    ]
    sizes = [own for i, own in enumerate(sizes) if own not in sizes[:i]]
    if len(names) == 2:
        sizes = [options]
    for own in sizes:
        Patches(grid.dim, **{**shared, **own, "device": "meta"})  # raises before time is spent
    progress("fine data")
    data = problem.make(None, fine_dt, few, few_p)
    train, held_out, test = map(fields.restrict, data[:3])
    data = FitData(train, held_out, test, data.substeps)
    if "conservative" not in options:
        shared["conservative"] = fields.is_conserved(data.train)
    elif options["conservative"] and not fields.is_conserved(data.train):
        raise ValueError(
            "conservative=True, but the mean over all cells changes along trajectories; leave it out, "
            "or use conservative=False"
        )
    search = _Search(fields, scheme, data, dt, period is not None, noise, seed)
    for own in sizes:
        progress(f"patches of radius {own['radius']}, degree {own['degree']}")
        search.attempt(Patches(grid.dim, **{**shared, **own}))
    return search.solver()


class _Search:
    """Candidates, and the best one so far."""

    def __init__(
        self,
        fields: Fields,
        scheme: AnyScheme,
        data: FitData,
        dt: float,
        timed: bool,
        noise: float,
        seed: int,
    ) -> None:
        self.fields, self.scheme, self.data, self.dt, self.timed = fields, scheme, data, dt, timed
        self.held_out = Rollouts(fields.rate, scheme, dt, data.held_out, Crew())
        generator = torch.Generator().manual_seed(seed + 2**41)
        spread = torch.cat([run.u.flatten() for run in data.train]).std()
        steps = [step for run in data.train for step in noisy_steps(run, dt, noise * spread, generator)]
        self.pairs = one_step(fields.rate, scheme, dt, steps, timed)
        self.history: list[dict[str, Any]] = []
        self.best: tuple[float, Patches] | None = None

    def attempt(self, model: Patches) -> None:
        """Fit a correction with all penalties, and keep the one with the smallest error of rollouts."""
        standardise(model, self.pairs)
        k = sum(_feature_counts(model))
        triangle = self.pairs.u.new_zeros(0, k + model.grid.channels)
        for rows in equations(model, self.pairs):
            triangle = torch.linalg.qr(torch.cat((triangle, rows)), mode="r")[1]
        if len(triangle) < k:
            triangle = torch.nn.functional.pad(triangle, (0, 0, 0, k - len(triangle)))
        for penalty, weights in solutions(triangle[:k, :k], triangle[:k, k:], PENALTIES):
            candidate = with_weights(model, weights)
            error = self.held_out.error(candidate)
            config = {key: model.config[key] for key in ("radius", "degree", "conservative")}
            self.history.append(
                {"correction": "patches", **config, "penalty": penalty, "rollout": error}
            )
            if self.best is None or not self.best[0] <= error:
                self.best = error, candidate

    def solver(self) -> HybridSolver:
        """Return the solver of the best candidate, with its error on test trajectories."""
        assert self.best is not None
        selection, model = self.best
        if not math.isfinite(selection):
            raise self.held_out.lost()
        tested = replace(self.held_out, runs=self.data.test)
        errors = tested.errors(model)
        # A step of the scheme "identity" is no solution that anybody would use.
        rival = self.scheme if self.scheme.order else get_scheme("rk4")
        plain = replace(tested, scheme=rival).errors(None).mean().item()
        if not bool(torch.isfinite(errors).all()):
            raise tested.lost()
        region = PatchRegion.around(self.pairs.u, model, MARGIN)
        fields = self.fields
        region.accuracy = step_accuracy(
            model, one_step(fields.rate, self.scheme, self.dt, self.data.test, self.timed)
        )
        rollout = errors.mean().item()
        chosen = {
            "correction": "patches", "radius": model.config["radius"],
            "degree": model.config["degree"], "selection": selection, "rollout": rollout,
            "median": errors.median().item(), "worst": errors.max().item(), "plain": plain,
            "substeps": self.data.substeps, "cells": fields.fine.cells,
        }  # fmt: skip
        if not rollout < plain and plain > 0:
            warnings.warn(
                f"plain steps of {rival.name} on the same grid have a smaller error on test "
                f"trajectories: mean square error {plain:.1e}, corrected {rollout:.1e}; use a smaller "
                'dt, a larger radius or degree, or scheme="rk4", of which only the error is learnt',
                stacklevel=4,
            )
        history = [*self.history, {"chosen": True, **chosen}]
        return HybridSolver(fields.rate, self.scheme, model, self.dt, region, history)


def standardise(model: Patches, pairs: Pairs) -> None:
    """Centre and scale the inputs of each polynomial by the mean and spread of its patches."""
    some = pairs.rows(torch.arange(0, len(pairs.u), max(1, len(pairs.u) // 2000), device=pairs.u.device))
    for i, net in enumerate(model.net):
        x = model.patch_inputs(i, some.step()).flatten(0, -2)
        deviation = x.std(0)
        net.standardise(x.mean(0), torch.where(deviation > 0, deviation, 1.0))


def equations(model: Patches, pairs: Pairs) -> Iterator[Tensor]:
    """Yield rows ``[n, features + channels]`` of the least squares problem: one row per cell."""
    cells, conservative = model.grid.cells, model.config["conservative"]
    size = max(1, CHUNK // (cells * sum(_feature_counts(model))))
    for part in torch.arange(len(pairs.u), device=pairs.u.device).split(size):
        some, columns = pairs.rows(part), list[Tensor]()
        for i, net in enumerate(model.net):
            x = model.patch_inputs(i, some.step())
            rows = x.flatten(0, -2)
            features = net.monomials(rows.T).T if conservative else net.features(rows)
            columns.append(model.differences(i, features.unflatten(0, x.shape[:-1])))
        error = model.grid.field(some.error).flatten(2).movedim(1, -1)  # [n, cells, channels]
        yield torch.cat((*columns, error), -1).flatten(0, 1)


def with_weights(model: Patches, weights: Tensor) -> Patches:
    """Return a copy with these coefficients ``[features, channels]``."""
    model = copy.deepcopy(model)
    for net, own in zip(model.net, weights.split(_feature_counts(model))):
        own = own if not model.config["conservative"] else torch.cat((own, torch.zeros_like(own[:1])))
        net.set_head(own)
    return model.requires_grad_(False)


def noisy_steps(run: Run, dt: float, sigma: Tensor, generator: torch.Generator) -> list[Run]:
    """Return the steps of a run, one run each, with noise on the states from which they start."""
    noise = torch.randn(run.u[:-1].shape, generator=generator, dtype=torch.float64)
    starts = run.u[:-1] + sigma * noise.to(run.u)
    return [
        Run(run.t0 + k * dt, torch.stack((start, after)), run.parameters)
        for k, (start, after) in enumerate(zip(starts, run.u[1:]))
    ]


def _feature_counts(model: Patches) -> list[int]:
    """Return the number of features of each polynomial; a constant flux has no differences."""
    return [net.head.in_features + (not model.config["conservative"]) for net in model.net]
