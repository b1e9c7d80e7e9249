"""The search for the fastest plain scheme: the reference, errors, times, and compiled candidates.

An equation that needs many more steps by an explicit scheme than by a Rosenbrock scheme is stiff; only
Rosenbrock schemes are then candidates.
"""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from attractor.core import Trajectory, evolve, get_scheme
from attractor.core.rates import Rate
from attractor.core.step import with_parameters
from attractor.core.tableaus import AnyScheme
from attractor.core.trajectory import Status
from attractor.ode.candidates import Candidate, distance, in_dtype, sizes, solved_by
from attractor.ode.samples import Sampler, initial_states, sampled_parameters
from attractor.ode.solver import HybridSolver

CHECKED = 200  # number of fresh trajectories on which errors are measured
FIXED = ("dop853", "tsit5", "rk4")  # in the order in which they are tried
ADAPTIVE = ("dop853", "tsit5")
IMPLICIT = ("rodas5p", "rodas4")  # for stiff equations
STIFF = (
    10  # times the steps of a Rosenbrock scheme that an explicit scheme needs if an equation is stiff
)
PROBE = 1e-3  # tolerance with which steps are counted
MOST_PROBED = 1_000  # steps of a Rosenbrock scheme, and as many explicit steps for each as STIFF says
LARGEST_IMPLICIT = 100  # components of a state whose Jacobian is not too expensive
MOST_STEPS = 200_000
# A reference solution takes at most so many times the budget, or so many seconds if that is longer.
MOST_REFERENCE, LEAST_REFERENCE = 20.0, 120.0
PARTS = [8.0**-k for k in range(9, 0, -1)]  # of the horizon, which are timed for an estimate
RELIABLE = 50  # steps, from which on a part serves for an estimate
REPEATS = 5  # number of timings, of which the least counts
ENOUGH = 0.5  # seconds of timing after which it is not repeated
COMPILING = 15.0  # seconds that torch takes to compile a loop of steps, for most rates
FEWER = 6  # candidates with this many times the rate calls of another one are given up
HOPELESS = 1.5  # candidates with this many times the rate calls of another one are not compiled
SHORT = 2.0  # seconds of compiling, as of a loop in C, up to which all candidates are compiled
UNLIKELY = 3  # candidates with this many times the rate calls are not timed, if others are compiled
SINGLE = 1e-5  # the smallest error for which float32 is tried
REFERENCE = 0.01  # error of the reference, relative to the error that is asked for
GRIDS = (256, 512, 1024)  # steps of the reference, before error control is tried
CONTROL = 1.5  # cost of a rate call with error control, relative to one with equal steps


class Search:
    """A search among plain schemes.

    Args:
        rate, error, horizon, sample, parameters, batch, budget, device, period, seed, progress: As for
            `attractor.ode.tune`.
    """

    def __init__(
        self,
        rate: Rate,
        error: float,
        horizon: float,
        sample: Sampler | None,
        parameters: Sampler | None,
        batch: int,
        budget: float,
        device: Any,
        period: float | None,
        seed: int,
        progress: Callable[[str], None],
    ) -> None:
        self.rate, self.error, self.horizon, self.budget = rate, error, horizon, budget
        self.samplers: dict[str, Any] = {"sample": sample, "parameters": parameters}
        self.device, self.period, self.seed, self.progress = device, period, seed, progress
        self.started = time.monotonic()
        self.stiff = False
        self.reserve = 0.0  # seconds of the budget that are kept for later
        self.compile_seconds = COMPILING  # that equal steps of the rate took to compile
        self.fewest_calls = math.inf  # calls of the rate of a candidate that reaches the error
        self.notes: list[str] = []
        self.solvers: dict[Candidate, HybridSolver] = {}  # by what `_identity` returns
        # Random streams that no fit uses.
        fresh, timed = (torch.Generator().manual_seed(seed + 2**41 + i) for i in range(2))
        self.checked = initial_states(rate, sample, CHECKED, fresh, device)
        self.timed = initial_states(rate, sample, batch, timed, device)
        self.checked_p = sampled_parameters(parameters, CHECKED, fresh, device)
        self.timed_p = sampled_parameters(parameters, batch, timed, device)

    @property
    def left(self) -> float:
        """Seconds of the budget that are left."""
        return self.budget - self.reserve - (time.monotonic() - self.started)

    @property
    def spent(self) -> bool:
        """Whether the budget is spent: twice the budget as long as no candidate reaches the error."""
        return self.left <= (0 if math.isfinite(self.fewest_calls) else -self.budget)

    @property
    def most_calls(self) -> float:
        """The calls of the rate with which a candidate still has a chance."""
        return FEWER * self.fewest_calls

    def plain(self) -> tuple[list[Candidate], list[Candidate]]:
        """Return the schemes with equal steps, and those with error control, that reach the error."""
        self.progress("reference")
        self.reference()
        if self.stiff:
            self.notes.append("explicit schemes and hybrids: the equation is stiff")
        equal_steps, error_control = ((), IMPLICIT) if self.stiff else (FIXED, ADAPTIVE)
        fixed = [c for name in equal_steps if (c := self.fixed(get_scheme(name))) is not None]
        adaptive = [c for name in error_control if (c := self.adaptive(name)) is not None]
        if not fixed and not adaptive:
            raise ValueError(
                f"no scheme reaches an error of {self.error:g} over {self.horizon:g}: rounding is "
                "larger than the error, or the equation is too stiff; use a larger error or a shorter "
                "horizon"
            )
        return fixed, adaptive

    def solver_of(self, way: Candidate) -> HybridSolver | None:
        """Return the hybrid solver of a candidate; None if it is plain."""
        if not way.is_hybrid:
            return None
        key = _identity(way)
        if key not in self.solvers:
            self.solvers[key] = in_dtype(self.solvers[replace(key, dtype="float64")], way.dtype)
        return self.solvers[key]

    def reference(self) -> None:
        """Compute the final states of the checked trajectories, and the size of each component."""
        solution = self.reference_on_grids()
        if solution is None:
            self.stiff = self.is_stiff()
            solution = self.reference_with_control("rodas5p" if self.stiff else "dop853")
        self.truth, self.scale = solution.final, sizes(solution)

    def reference_on_grids(self) -> Trajectory | None:
        """Follow the checked trajectories by equal steps of dop853; None if they need too many."""
        before = None
        for n in GRIDS:
            t = torch.linspace(0.0, self.horizon, n + 1, dtype=torch.float64, device=self.checked.device)
            solution = evolve(self.rate, self.checked, t, "dop853", every=n, parameters=self.checked_p)
            if not bool(solution.ok.all()):
                return None
            # Half the step has a two hundredth of the error; a tenth of that gain is counted on.
            if before is not None:
                change = distance(before.final, solution.final, sizes(solution))
                if change <= 20 * REFERENCE * self.error:
                    return solution
            before = solution
        return None

    def is_stiff(self) -> bool:
        """Return whether an explicit scheme needs far more steps than a Rosenbrock scheme."""
        if self.checked.shape[-1] > LARGEST_IMPLICIT:
            return False
        size = self.checked.square().mean(0).sqrt()
        size = torch.where(size > 0, size, 1.0)

        def solve(scheme: str, most: int) -> Trajectory:
            return self.solve_with_control(scheme, self.horizon, PROBE, PROBE * size, max_steps=most)

        try:
            implicit = solve("rodas5p", MOST_PROBED)
        except (ValueError, TypeError):  # a rate that cannot be differentiated
            return False
        if not bool(implicit.ok.all()):
            return False
        most = max(100, STIFF * implicit.stats.steps)
        return bool((solve("dop853", most).status == Status.STEP_LIMIT).any())

    def solve_with_control(
        self, scheme: str, end: float, rtol: float, atol: Any, max_steps: int = 100_000
    ) -> Trajectory:
        """Follow the checked trajectories with error control."""
        implicit = scheme in IMPLICIT  # which take long if they are not compiled
        return evolve(
            self.rate, self.checked, [0.0, end], scheme, rtol=rtol, atol=atol, compile=implicit,
            parameters=self.checked_p, max_steps=max_steps,
        )  # fmt: skip

    def reference_with_control(self, scheme: str) -> Trajectory:
        """Follow the checked trajectories by a scheme with error control."""
        tolerance = max(1e-13, 1e-3 * self.error)
        self.check_horizon(scheme, tolerance)
        for _ in range(3):
            solved, finer = (
                self.solve_with_control(scheme, self.horizon, x, 1e-3 * x)
                for x in (tolerance, 0.03 * tolerance)
            )
            if not bool(finer.ok.all()):
                raise ValueError(
                    f"{int((~finer.ok).sum())} of {CHECKED} sampled trajectories cannot be followed to "
                    f"horizon = {self.horizon:g} by {scheme} with error control; does the solution of "
                    "the equation end?"
                )
            if distance(solved.final, finer.final, sizes(finer)) <= REFERENCE * self.error:
                return finer
            tolerance = max(1e-14, 1e-2 * tolerance)
        self.notes.append(
            "a reference with a hundredth of the error: rounding, or chaos, does not allow it"
        )
        return finer

    def check_horizon(self, scheme: str, tolerance: float) -> None:
        """Raise a ValueError if a reference would take far longer than the budget.

        Longer and longer parts of it are timed. The steps that a part takes more than the previous one
        tell how many the rest takes, so that a start with small steps does not count.
        """
        most = max(LEAST_REFERENCE, MOST_REFERENCE * self.budget)
        before_share, before_steps, seconds, taken = 0.0, 0, 0.0, 0
        for share in PARTS:
            began = time.monotonic()
            steps = self.solve_with_control(
                scheme, share * self.horizon, tolerance, 1e-3 * tolerance
            ).stats.steps
            seconds, taken = seconds + time.monotonic() - began, taken + steps
            further = steps - before_steps
            expected = steps + (1 - share) * further / (share - before_share)
            estimate = expected * seconds / taken
            if further > RELIABLE and estimate > most:
                raise ValueError(
                    f"horizon = {self.horizon:g}: the reference solution alone would take about "
                    f"{estimate:,.0f} s, and at most {most:,.0f} s are spent on it with a budget of "
                    f"{self.budget:g} s; use a shorter horizon or a larger budget"
                )
            before_share, before_steps = share, steps

    def measured(self, way: Candidate) -> Candidate:
        """Return the candidate with its error on the checked trajectories."""
        try:
            problem = self.checked, 0.0, self.horizon, self.checked_p
            quick = replace(way, compiled=self.stiff)
            solved = solved_by(self.rate, quick, self.solver_of(way), *problem, self.scale, self.error)
        except (RuntimeError, ValueError, TypeError) as failure:
            if way.dtype == "float64":
                raise
            self.notes.append(f"float32, which the rate does not accept ({failure})")
            return replace(way, error=math.inf)
        error = distance(solved.final, self.truth, self.scale) if bool(solved.ok.all()) else math.inf
        return replace(way, error=error, rate_calls=solved.stats.rate_calls)

    def timing(self, way: Candidate) -> Candidate:
        """Return the candidate with the time that it takes for the batch."""
        self.progress(f"time of {way}")
        solver, problem = self.solver_of(way), (self.timed, 0.0, self.horizon, self.timed_p)

        def solve() -> None:
            solved_by(self.rate, way, solver, *problem, self.scale, self.error)

        if way.compiled:
            began = time.monotonic()
            solve()  # compiles
            if way.method == "fixed":
                self.compile_seconds = time.monotonic() - began
        return replace(way, seconds=self.seconds_of(solve))

    def fixed(self, scheme: AnyScheme) -> Candidate | None:
        """Return the scheme with the fewest steps that reach the error; None if none does."""
        self.progress(f"steps of {scheme.name}")
        of = lambda n: self.measured(Candidate("fixed", scheme.name, self.horizon / n))
        n, last = 8, None
        while (best := of(n)).error > self.error:
            n, last = 2 * n, best
            if n > MOST_STEPS or n * scheme.rate_calls > self.most_calls or self.spent:
                return None
        # Between the last two numbers of steps the error is a power of the step size.
        few, many = (n // 2 if last is not None else 1), n
        for _ in range(3):
            if last is None or not math.isfinite(last.error) or many - few < max(2, many // 50):
                guess = (few + many) // 2
            else:
                slope = math.log(last.error / best.error) / math.log(many / few)
                guess = math.ceil(few * (last.error / self.error) ** (1 / max(slope, 0.5)) * 1.01)
            if not few < guess < many:
                break
            middle = of(guess)
            if middle.error <= self.error:
                many, best = guess, middle
            else:
                few, last = guess, middle
        self.fewest_calls = min(self.fewest_calls, best.rate_calls)
        return best

    def adaptive(self, name: str) -> Candidate | None:
        """Return the scheme with the largest tolerance that reaches the error; None if none does."""
        self.progress(f"tolerance of {name}")
        tolerance = min(1e-2, 10 * self.error)
        while tolerance > 1e-14:
            candidate = self.measured(Candidate("adaptive", name, tolerance))
            if candidate.error <= self.error:
                self.fewest_calls = min(self.fewest_calls, candidate.rate_calls)
                return candidate
            if candidate.rate_calls > self.most_calls or self.spent:
                return None
            # A tolerance is about proportional to the error; steps of at least a half decade.
            share = self.error / candidate.error if math.isfinite(candidate.error) else 0.03
            tolerance *= min(0.3, max(0.01, 0.7 * share))
        return None

    def add(self, way: Candidate, solver: HybridSolver) -> Candidate:
        """Return the candidate of a hybrid solver, with its error."""
        self.solvers[_identity(way)] = solver
        return self.measured(way)

    def rate_seconds(self, few: bool = False) -> float:
        """Return the time of an eager call of the rate for the batch, or for few, the checked ones."""
        u, p = (self.checked, self.checked_p) if few else (self.timed, self.timed_p)
        rate, t = with_parameters(self.rate, p), torch.zeros((), dtype=u.dtype, device=u.device)
        return self.seconds_of(lambda: rate(t, u))

    def seconds_of(self, call: Callable[[], Any]) -> float:
        """Return the least duration of at most `REPEATS` calls."""
        synchronize = torch.cuda.synchronize if self.timed.is_cuda else lambda: None
        seconds, spent = math.inf, 0.0
        for _ in range(REPEATS):
            synchronize()
            began = time.perf_counter()
            call()
            synchronize()
            duration = time.perf_counter() - began
            seconds, spent = min(seconds, duration), spent + duration
            if spent > ENOUGH:
                break
        return seconds

    def in_float32(self, timed: list[Candidate]) -> list[Candidate]:
        """Return the candidates with the fewest rate calls in float32, where that reaches the error."""
        few = sorted(timed, key=lambda c: c.rate_calls)[:2]
        candidates = [self.measured(replace(c, dtype="float32", seconds=math.inf)) for c in few]
        return [self.timing(c) for c in candidates if c.error <= self.error]

    def compiled(self, timed: list[Candidate]) -> list[Candidate]:
        """Return the most promising candidates, compiled and timed.

        Compiled steps have no overhead, so that their time is that of rate calls and networks: of each
        method and correction the candidate with the fewest rate calls, in float32 if that is possible.
        Where compiling takes long, those with many more rate calls than the best one are left out.
        """
        cost = lambda c: c.rate_calls * (CONTROL if c.method == "adaptive" else 1.0)
        by_cost = sorted(timed, key=lambda c: (cost(c), c.dtype, c.seconds))  # float32 first
        ways = {(c.method, c.correction): c for c in reversed(by_cost)}
        compiled: list[Candidate] = []
        for way in sorted(ways.values(), key=cost):
            few = HOPELESS if self.compile_seconds > SHORT else FEWER
            if cost(way) > few * cost(by_cost[0]):
                continue
            if self.left <= 0 and compiled:
                self.notes.append(f"{way}, compiled: the budget was spent")
                continue
            compiled.append(self.timing(replace(way, compiled=True, seconds=math.inf)))
        return compiled


def _identity(way: Candidate) -> Candidate:
    """Return the candidate without what it measured."""
    return Candidate(way.method, way.scheme, way.setting, way.width, way.dtype, degree=way.degree)
