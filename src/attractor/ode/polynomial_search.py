"""The search for a polynomial that replaces the rate: few and large steps of the scheme "identity".

All polynomials learn from steps that start at any point of the same fine trajectories, or beside them.
The solver that is returned can then start anywhere on a trajectory, not only where it was sampled. The
states beside the trajectories keep a polynomial from being arbitrary where trajectories fill a thin set
only: its rollouts would leave that set and diverge, and the trust region would not see it.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from attractor.core import evolve
from attractor.core.rates import Rate, call_rate
from attractor.core.tableaus import IDENTITY
from attractor.ode.candidates import Candidate, distance
from attractor.ode.closed_form import ClosedForm
from attractor.ode.corrections import Polynomial
from attractor.ode.corrections.polynomial import count_terms
from attractor.ode.pairs import one_step
from attractor.ode.rate_checks import check_rate
from attractor.ode.search import Search
from attractor.ode.solver import HybridSolver
from attractor.ode.substeps import enough_substeps, substeps_for
from attractor.ode.trajectories import LARGEST, PHASES, Plan, Run, make_runs, shifted
from attractor.train import generators

GRID = 240  # steps of the fine trajectories, a number with many divisors
STEPS = tuple(n for n in range(2, GRID // 2 + 1) if GRID % n == 0)  # of a polynomial
TERMS = (350, 120, 40)  # of a polynomial, at most; the most accurate one first
MORE_TERMS = (800, 2200)  # where fewer terms do not reach the error, or need many steps
MANY_STEPS = 60
HUGE = 1e30  # of an error, relative to that which is asked for; larger powers overflow
FAR = 3  # times the most steps: a prediction of more ends the search,
NEAR = 30  # unless the error is at most so many times the error to reach
HIGHEST = 16  # degree; of higher ones the monomials are too sensitive to rounding
FITS = 6  # number of fits per degree, in search of the fewest steps
MOST_TRAJECTORIES, FEWEST_TRAJECTORIES = 2000, 200
MOST_NUMBERS = 2**25  # of the trajectories
MOVED = 0.7  # share of the starting points of steps that lie beside the trajectories,
BESIDE = 0.1  # by this many standard deviations of each component
ROWS_PER_TERM = 18  # steps that a polynomial learns from, at least; they are free of noise
ENOUGH_ROWS = 25_000  # for a fit and its trust region, unless there are more terms. Where states have
ENOUGH_NUMBERS = 100_000  # components enough for more numbers than these, fewer steps,
ENOUGH_PER_TERM = 60  # but as many per term
SPEED = 5e9  # rows times squared terms per second of a fit, at least
SHARE = 0.15  # of the budget that fine trajectories take, at most
HOPELESS = 1e4  # more terms are tried if fewer terms came as close as this many times the error
STAGES = 12  # rate calls per step of the reference


class PolynomialSearch:
    """A search among polynomials.

    Args:
        search: The search among plain schemes, which has measured some.
        fit: `attractor.ode.fit`.
        fine_dt: Step of dop853 that is accurate enough to learn from, half of that which reaches the
            error; None if it is not known.
    """

    def __init__(self, search: Search, fit: Callable[..., HybridSolver], fine_dt: float | None) -> None:
        self.search, self.fit, self.fine_dt = search, fit, fine_dt
        self.runs: list[Run] = []
        self.large_steps: dict[tuple[int, int], list[Run]] = {}  # of the last candidate
        self.odd = self.is_odd()
        # A third of the steps of dop853 are tried first.
        self.start = 4.0 if fine_dt is None else search.horizon / (6 * fine_dt)

    def run(self) -> list[Candidate]:
        """Return the polynomials that reach the error, each of them fitted, with the fewest steps."""
        search, degrees = self.search, self.degrees()
        if not degrees:
            search.notes.append(f"polynomials: {self.inputs} inputs have too many monomials")
            return []
        try:
            check_rate(
                search.rate, [(0.0, search.checked, search.checked_p)], search.horizon, search.period
            )
            return self.search_degrees(degrees)
        except (ValueError, FloatingPointError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
            search.notes.append(f"polynomials: {str(error).split(';')[0].split(':')[0]}")
            return []

    def search_degrees(self, degrees: list[int]) -> list[Candidate]:
        """Return the polynomials of these degrees, and of larger ones where they are too inaccurate."""
        search = self.search
        search.progress("fine data of polynomials")
        self.runs = self.fine_runs()
        first, *cheaper = degrees
        results = list[Candidate]()
        cost = lambda: min((self.steps(c) * self.terms(c.degree) for c in results), default=math.inf)
        attempt = lambda degree: self.fewest_steps(degree, cost() / self.terms(degree))
        for degree in (first, *(n for n in map(self.degree, MORE_TERMS) if n > first)):
            if not self.is_affordable(degree):
                search.notes.append(f"polynomials of degree {degree}: the budget is too small")
                break
            candidates = attempt(degree)
            results += self.best(candidates)
            least = min((c.error for c in candidates), default=math.inf)
            if least > HOPELESS * search.error or (results and self.steps(results[-1]) <= MANY_STEPS):
                break
        for degree in cheaper:
            if not any(c.degree > degree for c in results if c.degree):
                break
            results += self.best(attempt(degree))
        return [final for candidate in results if (final := self.refit(candidate)) is not None]

    def is_affordable(self, degree: int) -> bool:
        """Return whether the budget allows two fits of a degree."""
        terms = self.terms(degree)
        return self.search.left > 2 * self.rows(terms) * terms**2 / SPEED

    def rows(self, terms: int) -> int:
        """Return the number of steps that a polynomial learns from."""
        few = max(ENOUGH_NUMBERS // self.search.timed.shape[-1], ENOUGH_PER_TERM * terms)
        return max(ROWS_PER_TERM * terms, min(few, ENOUGH_ROWS))

    def best(self, candidates: list[Candidate]) -> list[Candidate]:
        """Return a list of the candidate with the fewest steps that reach the error, or an empty one."""
        return sorted((c for c in candidates if c.error <= self.search.error), key=self.steps)[:1]

    def steps(self, way: Candidate) -> int:
        """Return the number of steps of a candidate."""
        return round(self.search.horizon / way.setting)

    def terms(self, degree: int | None) -> int:
        """Return the number of monomials of a degree."""
        assert degree is not None
        return count_terms(self.inputs, degree, self.odd)

    def degrees(self) -> list[int]:
        """Return the degrees to try, the largest first; none if a state has too many components."""
        return [n for n in dict.fromkeys(map(self.degree, TERMS)) if n]

    def degree(self, terms: int) -> int:
        """Return the largest degree with so few terms; 0 if there is none."""
        degrees = range(HIGHEST - self.odd, 0, -2 if self.odd else -1)
        return next((n for n in degrees if self.terms(n) <= terms), 0)

    @property
    def inputs(self) -> int:
        """The number of components of a state, with its parameters and its phase."""
        search = self.search
        own = 0 if search.timed_p is None else search.timed_p.shape[-1]
        return search.timed.shape[-1] + own + 2 * (search.period is not None)

    def fine_runs(self) -> list[Run]:
        """Return trajectories with `GRID` steps, as many as the budget allows."""
        search, dt = self.search, self.search.horizon / GRID
        if self.fine_dt is None:
            substeps = enough_substeps(
                search.rate, search.checked[:16], dt, GRID, period=search.period,
                parameters=None if search.checked_p is None else search.checked_p[:16],
            )  # fmt: skip
        else:
            substeps = substeps_for(dt, min(dt, self.fine_dt))
        each = STAGES * GRID * substeps * search.rate_seconds(few=True) / len(search.checked)
        affordable = SHARE * min(search.budget, 600.0) / each
        most = min(MOST_TRAJECTORIES, MOST_NUMBERS // ((GRID + 1) * search.checked.shape[-1]))
        count = int(max(FEWEST_TRAJECTORIES, min(most, affordable)))
        spread = 1 if search.period is None else PHASES
        size = min(LARGEST, math.ceil(count / spread))
        plan = Plan(count, dt, GRID, substeps, search.seed, size, search.period, "polynomials")
        shards = [(plan, k) for k in range(plan.shards)]
        samplers = search.samplers
        return make_runs(search.rate, samplers["sample"], shards, search.device, samplers["parameters"])

    def fewest_steps(self, degree: int, limit: float = math.inf) -> list[Candidate]:
        """Return the candidates of a search for the fewest steps, less than `limit`.

        The error is taken for a power of the number of steps, which predicts those of the next fit.
        """
        counts = [n for n in STEPS if n < limit]
        low, high = -1, len(counts)  # indices of numbers that miss the error, and reach it
        guess = next((i for i, n in enumerate(counts) if n >= self.start), len(counts) - 1)
        candidates, order = list[Candidate](), degree + 1.0
        while low < guess < high and len(candidates) < FITS and self.search.left > 0:
            candidate = self.candidate(degree, counts[guess])
            candidates.append(candidate)
            share = candidate.error / self.search.error
            low, high = (low, guess) if share <= 1 else (guess, high)
            order = _order(candidates[-2:], order)
            factor = 2.0 if not math.isfinite(share) else 1.03 * min(share, HUGE) ** (1 / order)
            far = high == len(counts) and factor * counts[guess] > FAR * counts[-1]
            if far and share > NEAR:
                break
            target = counts[guess] * min(4.0, max(0.25, factor))
            guess = next((i for i, n in enumerate(counts) if n >= target and not far), len(counts) - 1)
            guess = min(max(guess, low + 1), high - 1)
        return candidates

    def candidate(self, degree: int, steps: int) -> Candidate:
        """Return a polynomial with its error on rollouts without a guard."""
        search = self.search
        way = Candidate("hybrid", IDENTITY.name, search.horizon / steps, degree=degree)
        search.progress(f"fit of {way}")
        pairs = one_step(
            search.rate, IDENTITY, way.setting, self.steps_of(way), search.period is not None
        )
        own = 0 if pairs.parameters is None else pairs.parameters.shape[-1]
        like = {"dtype": torch.float64, "device": pairs.u.device}
        with generators.own():  # the weights that are drawn here are not kept
            model = Polynomial(pairs.u.shape[-1], degree, search.period, own, self.odd, **like)
        closed = ClosedForm(model, pairs, 0.0, torch.Generator().manual_seed(search.seed))
        closed.solve()
        solver = HybridSolver(search.rate, IDENTITY, closed.fold().requires_grad_(False), way.setting)
        solved = solver.solve(search.checked, search.horizon, every=steps, parameters=search.checked_p)
        if not bool(solved.ok.all()):
            return way
        return replace(way, error=distance(solved.final, search.truth, search.scale))

    def steps_of(self, way: Candidate) -> list[Run]:
        """Return large steps from all points of the trajectories and beside them, for a candidate."""
        key = self.steps(way), self.rows(self.terms(way.degree))
        if key not in self.large_steps:
            self.large_steps = {key: self.beside(self.steps_along(way), way.setting)}
        return self.large_steps[key]

    def beside(self, runs: list[Run], length: float) -> list[Run]:
        """Return steps of a length with most of their starting points moved at random, followed anew.

        If a rate accepts one time for all states only, steps of different times remain as they are.
        """
        if self.fine_dt is None:
            return runs
        search, sizes = self.search, [run.u.shape[1] for run in runs]
        like: Any = {"dtype": torch.float64, "device": runs[0].u.device}
        generator = torch.Generator().manual_seed(search.seed + 2**42)
        before, after = (torch.cat([run.u[i] for run in runs], 0) for i in (0, 1))
        own = [run.parameters for run in runs if run.parameters is not None]
        p = torch.cat(own) if own else None
        rate: Rate | None = search.rate
        if search.period is not None:
            times = torch.cat([torch.full((n,), run.t0, **like) for run, n in zip(runs, sizes)])
            rate = shifted(search.rate, times, before, p)
        if rate is None:
            return runs
        noise = torch.randn(before.shape, generator=generator, dtype=torch.float64).to(before)
        is_moved = torch.rand(len(before), 1, generator=generator).to(before) < MOVED
        start = before + torch.where(is_moved, BESIDE * before.std(0) * noise, 0.0)
        count = substeps_for(length, min(length, self.fine_dt))
        t = torch.linspace(0.0, length, count + 1, **like)
        solved = evolve(rate, start, t, "dop853", every=count, parameters=p)
        ok = solved.ok[:, None]
        pairs = torch.stack((torch.where(ok, start, before), torch.where(ok, solved.final, after)))
        parts = pairs.split(sizes, 1)
        return [Run(run.t0, part, run.parameters) for run, part in zip(runs, parts)]

    def steps_along(self, way: Candidate) -> list[Run]:
        """Return large steps that start at all points of the trajectories.

        There are about as many as a fit needs. Each trajectory takes part in steps from some points.
        """
        steps, dt = self.steps(way), self.search.horizon / GRID
        stride = GRID // steps
        starts = GRID - stride + 1
        rows = self.rows(self.terms(way.degree))
        runs = []
        for run in self.runs:
            skip = max(1, run.u.shape[1] * len(self.runs) * starts // rows)
            for first in range(starts):
                few, p = slice(first % skip, None, skip), run.parameters
                states = run.u[[first, first + stride]][:, few]
                if states.shape[1]:
                    runs.append(Run(run.t0 + first * dt, states, None if p is None else p[few]))
        return runs

    def is_odd(self) -> bool:
        """Return whether the rate changes its sign with the state, so that odd powers suffice."""
        search = self.search
        if search.checked_p is not None:
            return False
        half = 0.0 if search.period is None else search.period / 2
        for t in (0.0, 0.3 * half, 1.1 * half):
            try:
                here, there = (
                    call_rate(search.rate, torch.tensor(time, dtype=u.dtype, device=u.device), u)
                    for time, u in ((t, search.checked), (t + half, -search.checked))
                )
            except Exception:  # a rate may refuse states that no trajectory has
                return False
            if not torch.allclose(here, -there, rtol=1e-9, atol=1e-9 * float(here.abs().max())):
                return False
        return True

    def refit(self, way: Candidate) -> Candidate | None:
        """Return the polynomial as `fit` makes it, with a guard; None if it misses the error then."""
        search = self.search
        how: dict[str, Any] = {
            "correction": "polynomial",
            "options": {"degree": way.degree, "odd": self.odd},
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # rollouts without a guard may diverge
            solver = self.fit(
                search.rate, dt=way.setting, horizon=search.horizon, scheme=IDENTITY, **how,
                period=search.period, seed=search.seed, device=search.device,
                fine_dt=None if self.fine_dt is None else min(way.setting, self.fine_dt),
                data=self.steps_of(way), **search.samplers,
            )  # fmt: skip
        measured = search.add(way, solver)
        return measured if measured.error <= search.error else None


def _order(candidates: list[Candidate], default: float) -> float:
    """Return the power of the step size that the error of two candidates follows, if it is known."""
    if len(candidates) < 2:
        return default
    one, two = candidates
    ratio = two.error / one.error if one.error > 0 else math.inf
    if not (0 < ratio < math.inf):
        return default
    return min(max(math.log(ratio) / math.log(two.setting / one.setting), 0.3), 2 * default)
