"""The search for the fastest way to an error: candidates, their errors and their times."""

import copy
import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attractor.core import Trajectory, evolve, get_scheme
from attractor.core.scheme import Rate
from attractor.core.step import with_parameters
from attractor.core.tableaus import AnyScheme
from attractor.ode.solver import HybridSolver
from attractor.ode.trajectories import Sampler, initial_states, sampled_parameters

TIMED = 1000  # number of trajectories that `fit` times
CHECKED = 200  # number of fresh trajectories on which errors are measured
FIXED = ("dop853", "tsit5", "rk4")  # in the order in which they are tried
ADAPTIVE = ("dop853", "tsit5")
WIDTHS = (0, 16, 64)  # of hybrids, narrow ones first
WIDE = (256, 64)  # the same for rates that take longer than such a network
TRAJECTORIES = 200  # number of trajectories that a hybrid learns from
FITS = 4  # number of fits per scheme and width, in search of the largest step
CLEAR = 1.1  # a hybrid is fitted only if it has this many times fewer steps than the next best one
MOST_STEPS = 200_000
REPEATS = 5  # number of timings, of which the least counts
ENOUGH = 0.5  # seconds of timing after which it is not repeated
COMPILING = 15.0  # seconds that compiling a loop of steps takes, for most rates
FEWER = 6  # candidates with this many times the rate calls of another one are given up
HOPELESS = 1.5  # candidates with this many times the rate calls of another one are not compiled
UNLIKELY = 3  # candidates with this many times the rate calls are not timed, if others are compiled
SINGLE = 1e-5  # the smallest error for which float32 is tried
REFERENCE = 0.01  # error of the reference, relative to the error that is asked for
GRIDS = (256, 512, 1024)  # steps of the reference, before error control is tried
CONTROL = 1.5  # cost of a rate call with error control, relative to one with equal steps


@dataclass(frozen=True)
class Candidate:
    """One way to solve the equation, and what it measured.

    Attributes:
        method: "fixed", "adaptive" or "hybrid".
        scheme: Name of the scheme.
        setting: The step size, or the tolerance of an adaptive scheme.
        width: Width of a hybrid's correction; 0 for a linear map. None without a correction.
        dtype: "float64" or "float32".
        compiled: Whether steps are compiled.
        error: The error on fresh trajectories.
        seconds: Wall time for the batch; infinite if it was not measured.
        rate_calls: Calls of the rate, each for the whole batch.
    """

    method: str
    scheme: str
    setting: float
    width: int | None = None
    dtype: str = "float64"
    compiled: bool = False
    error: float = math.inf
    seconds: float = math.inf
    rate_calls: int = 0

    def __str__(self) -> str:
        what = f"tolerance {self.setting:.2g}" if self.method == "adaptive" else f"dt {self.setting:.4g}"
        parts = [self.scheme, what]
        if self.width is not None:
            parts.insert(1, "linear map of stages" if not self.width else f"network of {self.width}")
        parts += ["float32"] * (self.dtype == "float32") + ["compiled"] * self.compiled
        return ", ".join(parts)


def fastest_hybrid(
    fit: Callable[..., HybridSolver],
    rate: Rate,
    scheme: AnyScheme,
    *,
    error: float,
    horizon: float,
    sample: Sampler | None,
    parameters: Sampler | None,
    widths: tuple[int, ...] | None,
    trajectories: int,
    budget: float | None,
    device: Any,
    period: float | None,
    seed: int,
    progress: Callable[[str], None],
) -> HybridSolver:
    """Return the hybrid of a scheme that reaches an error in the least time; `fit` is passed by itself.

    Raises:
        ValueError: The scheme does not reach the error, or no hybrid reaches it with fewer steps.
    """
    limit = math.inf if budget is None else budget
    search = Search(
        fit, rate, error, horizon, sample, parameters, TIMED, limit, device, period, seed, progress
    )
    search.trajectories = trajectories
    with torch.no_grad():
        search.reference()
        plain = search.fixed(scheme)
        if plain is None:
            raise ValueError(f"{scheme.name} does not reach an error of {error:g} over {horizon:g}")
        search.fine_dt = plain.setting / 2 if scheme.name == "dop853" else None
        hybrids = search.hybrids([plain], widths)
        timed = [search.timing(replace(c, compiled=True)) for c in hybrids]
    if not timed:
        reasons = "".join(f"; {note}" for note in search.notes)
        raise ValueError(
            f"no hybrid of {scheme.name} reaches an error of {error:g} with fewer steps than the "
            f"plain scheme (dt = {plain.setting:.3g}); try another scheme or width{reasons}"
        )
    solver = search.solver_of(min(timed, key=lambda c: c.seconds))
    assert solver is not None
    return solver


class Search:
    """A search for the fastest way to an error.

    Args:
        fit: `attractor.ode.fit`, which makes hybrids.
        rate, error, horizon, sample, parameters, batch, budget, device, period, seed, progress: As for
            `attractor.ode.tune`.
    """

    def __init__(
        self,
        fit: Callable[..., HybridSolver],
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
        self.fit, self.rate, self.error, self.horizon, self.budget = fit, rate, error, horizon, budget
        self.samplers: dict[str, Any] = {"sample": sample, "parameters": parameters}
        self.fine_dt: float | None = None  # of the data that hybrids learn from
        self.device, self.period, self.seed, self.progress = device, period, seed, progress
        self.started, self.hybrid_seconds = time.monotonic(), 0.0
        self.reserve = 0.0  # seconds of the budget that hybrids leave
        self.fewest_calls = math.inf  # calls of the rate of a candidate that reaches the error
        self.notes: list[str] = []
        self.solvers: dict[tuple[str, int, float, str], HybridSolver] = {}
        self.trajectories = TRAJECTORIES
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

    def run(self, compile: bool) -> list[Candidate]:
        """Return the candidates that reach the error and were timed, the fastest first."""
        self.progress("reference")
        self.reference()
        plain = [candidate for name in FIXED if (candidate := self.fixed(get_scheme(name))) is not None]
        adaptive = [candidate for name in ADAPTIVE if (candidate := self.adaptive(name)) is not None]
        if not plain and not adaptive:
            raise ValueError(
                f"no scheme reaches an error of {self.error:g} over {self.horizon:g}: the equation is "
                "stiff, or rounding is larger than the error; use a larger error or a shorter horizon"
            )
        # Half the step of dop853 has an error of a two hundredth.
        self.fine_dt = next((c.setting / 2 for c in plain if c.scheme == "dop853"), None)
        most = UNLIKELY * self.fewest_calls if compile else math.inf
        timed = [self.timing(c) for c in (*plain, *adaptive) if c.rate_calls <= most]
        # Compiling a plain scheme and a hybrid has its share of the budget, too.
        self.reserve = min(3 * COMPILING, 0.5 * self.left) if compile else 0.0
        with self.counted_for_hybrids():
            hybrids = [self.timing(c) for c in self.hybrids(plain)]
        self.reserve = 0.0
        if self.error >= SINGLE:
            timed += self.in_float32(timed)
            with self.counted_for_hybrids():
                hybrids += self.in_float32(hybrids)
        if compile:
            timed += self.compiled(timed)
            with self.counted_for_hybrids():
                hybrids += self.compiled(hybrids)
        timed += hybrids
        return sorted(timed, key=lambda c: c.seconds)

    @contextmanager
    def counted_for_hybrids(self) -> Iterator[None]:
        """Count the time that is spent here as that of hybrids."""
        began = time.monotonic()
        yield
        self.hybrid_seconds += time.monotonic() - began

    def solver_of(self, way: Candidate) -> HybridSolver | None:
        """Return the hybrid solver of a candidate; None if it is plain."""
        if way.width is None:
            return None
        key = (way.scheme, way.width, way.setting, way.dtype)
        if key not in self.solvers:
            self.solvers[key] = in_dtype(self.solvers[*key[:3], "float64"], way.dtype)
        return self.solvers[key]

    def reference(self) -> None:
        """Compute the final states of the checked trajectories, and the size of each component."""
        solution = self.reference_on_grids() or self.reference_with_control()
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

    def reference_with_control(self) -> Trajectory:
        """Follow the checked trajectories by dop853 with error control."""
        tolerance = max(1e-13, 1e-3 * self.error)
        for _ in range(3):
            solved, finer = (
                evolve(
                    self.rate, self.checked, [0.0, self.horizon], "dop853", rtol=x, atol=1e-3 * x,
                    parameters=self.checked_p,
                )
                for x in (tolerance, 0.03 * tolerance)
            )  # fmt: skip
            if not bool(finer.ok.all()):
                raise ValueError(
                    f"{int((~finer.ok).sum())} of {CHECKED} sampled trajectories cannot be followed to "
                    f"horizon = {self.horizon:g} by dop853 with error control; is the equation stiff, "
                    "or does its solution end?"
                )
            if distance(solved.final, finer.final, sizes(finer)) <= REFERENCE * self.error:
                return finer
            tolerance = max(1e-14, 1e-2 * tolerance)
        self.notes.append(
            "a reference with a hundredth of the error: rounding, or chaos, does not allow it"
        )
        return finer

    def measured(self, way: Candidate) -> Candidate:
        """Return the candidate with its error on the checked trajectories."""
        try:
            problem = self.checked, 0.0, self.horizon, self.checked_p
            eager = replace(way, compiled=False)
            solved = solved_by(self.rate, eager, self.solver_of(way), *problem, self.scale, self.error)
        except (RuntimeError, ValueError, TypeError) as failure:
            if way.dtype == "float64":
                raise
            self.notes.append(f"float32, which the rate does not accept ({failure})")
            return way
        error = distance(solved.final, self.truth, self.scale) if bool(solved.ok.all()) else math.inf
        return replace(way, error=error, rate_calls=solved.stats.rate_calls)

    def timing(self, way: Candidate) -> Candidate:
        """Return the candidate with the time that it takes for the batch."""
        self.progress(f"time of {way}")
        solver, problem = self.solver_of(way), (self.timed, 0.0, self.horizon, self.timed_p)

        def solve() -> None:
            solved_by(self.rate, way, solver, *problem, self.scale, self.error)

        if way.compiled:
            solve()  # compiles
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

    def hybrids(self, plain: list[Candidate], widths: tuple[int, ...] | None = None) -> list[Candidate]:
        """Return hybrids that reach the error with fewer steps than their scheme.

        Schemes with the fewest rate calls come first, and narrow corrections first. A wider one begins
        where the narrower one ended. If the rate takes longer than a network, wide corrections of
        schemes with few stages come first, because only the number of rate calls counts.
        """
        hybrids: list[Candidate] = []
        calls = min(c.rate_calls for c in plain) if plain else 0
        costly = bool(plain) and self.rate_takes_longer_than(WIDE[0])
        stages = lambda c: get_scheme(c.scheme).rate_calls
        for base in sorted(plain, key=stages if costly else lambda c: c.rate_calls):
            if base.rate_calls > FEWER * calls:
                continue  # a hybrid does not make up for that
            n = round(self.horizon / base.setting)
            for width in widths or (WIDE if costly else WIDTHS):
                best = self.largest_step(base.scheme, width, n)
                if best is not None:
                    hybrids.append(best)
                    n = round(self.horizon / best.setting)
                    calls = min(calls, best.rate_calls)
                if self.left <= 0:
                    self.notes.append("further hybrids: the budget was spent")
                    return hybrids
        return hybrids

    def rate_takes_longer_than(self, width: int) -> bool:
        """Return whether a call of the rate takes more than twice as long as a network.

        The network is one of the stages of rk4. Both are measured eagerly and for the batch. Compiled
        rates take a fraction of that time, but a step calls the rate four times or more.
        """
        u, dim = self.timed, self.timed.shape[-1]
        inputs, hidden, outputs = (
            torch.full(shape, 0.1, dtype=torch.float32, device=u.device)
            for shape in ((len(u), 5 * dim), (5 * dim, width), (width, dim))
        )
        rate = with_parameters(self.rate, self.timed_p)
        t = torch.zeros((), dtype=u.dtype, device=u.device)

        def network() -> None:
            x = inputs @ hidden
            (x * x * (1 + x)) @ outputs

        return self.seconds_of(lambda: rate(t, u)) > 2 * self.seconds_of(network)

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

    def largest_step(self, scheme: str, width: int, n: int) -> Candidate | None:
        """Return the hybrid with the fewest steps that reach the error, fewer than n; None if none does.

        A first fit takes half the steps. From then on the error is taken for a power of the step size,
        which predicts the steps of the next fit.
        """
        order = get_scheme(scheme).order + 1.0
        best, worst, steps = None, None, math.ceil(n / 2)
        for _ in range(FITS):
            most = n if best is None else round(self.horizon / best.setting)
            if not (2 <= steps <= most / CLEAR) or self.left <= 0:
                break
            hybrid = self.hybrid(scheme, width, steps)
            if hybrid is None or not math.isfinite(hybrid.error):
                steps = math.ceil(1.4 * steps)
                continue
            best, worst = (hybrid, worst) if hybrid.error <= self.error else (best, hybrid)
            if best is not None and worst is not None:
                ratio = math.log(worst.error / best.error) / math.log(worst.setting / best.setting)
                order = max(1.0, ratio)
            known = hybrid if best is None else best
            share = (known.error / self.error) ** (1 / order)
            steps = math.ceil(1.03 * share * self.horizon / known.setting)
            if worst is not None:
                steps = max(steps, math.ceil(CLEAR * self.horizon / worst.setting))
        return best

    def hybrid(self, scheme: str, width: int, steps: int) -> Candidate | None:
        """Return a fitted hybrid with its error; None if it cannot be fitted."""
        dt = self.horizon / steps
        way = Candidate("hybrid", scheme, dt, width)
        self.progress(f"fit of {way}")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                solver = self.fit(
                    self.rate, dt=dt, horizon=self.horizon, scheme=scheme, correction="stages",
                    width=width, precision="float32" if width else None, trajectories=self.trajectories,
                    period=self.period, seed=self.seed, device=self.device,
                    fine_dt=None if self.fine_dt is None else min(dt, self.fine_dt), **self.samplers,
                )  # fmt: skip
        except (ValueError, FloatingPointError) as error:  # steps that lose trajectories, rates of t
            reason = str(error).split(";")[0].split(":")[0]
            if f"hybrids of {scheme}: {reason}" not in self.notes:
                self.notes.append(f"hybrids of {scheme}: {reason}")
            return None
        self.solvers[scheme, width, dt, "float64"] = solver
        return self.measured(way)

    def in_float32(self, timed: list[Candidate]) -> list[Candidate]:
        """Return the candidates with the fewest rate calls in float32, where that reaches the error."""
        few = sorted(timed, key=lambda c: c.rate_calls)[:2]
        candidates = [self.measured(replace(c, dtype="float32", seconds=math.inf)) for c in few]
        return [self.timing(c) for c in candidates if c.error <= self.error]

    def compiled(self, timed: list[Candidate]) -> list[Candidate]:
        """Return the most promising candidates, compiled and timed.

        Compiled steps have no overhead, so that their time is that of rate calls and networks: of each
        method and width the candidate with the fewest rate calls, in float32 if that is possible.
        """
        cost = lambda c: c.rate_calls * (CONTROL if c.method == "adaptive" else 1.0)
        by_cost = sorted(timed, key=lambda c: (cost(c), c.dtype, c.seconds))  # float32 first
        ways = {(c.method, c.width): c for c in reversed(by_cost)}
        compiled: list[Candidate] = []
        for way in sorted(ways.values(), key=cost):
            if cost(way) > HOPELESS * cost(by_cost[0]):
                break
            if self.left <= 0 and compiled:
                self.notes.append(f"{way}, compiled: the budget was spent")
                continue
            compiled.append(self.timing(replace(way, compiled=True, seconds=math.inf)))
        return compiled


def in_dtype(solver: HybridSolver, dtype: str) -> HybridSolver:
    """Return the solver, or a copy of it in another dtype."""
    wanted = getattr(torch, dtype)
    if solver.dtype == wanted:
        return solver
    trust = copy.deepcopy(solver.trust)
    moved = HybridSolver(
        solver.rate, solver.scheme, copy.deepcopy(solver.correction), solver.dt, trust, solver.history
    )
    return moved.to(wanted)


def solved_by(
    rate: Rate,
    way: Candidate,
    solver: HybridSolver | None,
    u0: Tensor,
    t0: float,
    t_end: float,
    parameters: Tensor | None,
    scale: Tensor,
    error: float,
) -> Trajectory:
    """Return the first and the last states by a candidate, in the dtype of u0."""
    u = u0.to(getattr(torch, way.dtype))
    if way.method == "adaptive":
        solution = evolve(
            rate, u, [t0, t_end], way.scheme, rtol=way.setting, atol=way.setting * scale.to(u),
            parameters=parameters, compile=way.compiled,
        )  # fmt: skip
        return replace(solution, u=solution.u.to(u0.dtype))
    length = abs(t_end - t0)
    if way.method == "fixed":
        n = max(1, math.ceil(length / way.setting - 1e-9))
        t = torch.linspace(t0, t_end, n + 1, dtype=torch.float64, device=u0.device)
        options: Any = {"parameters": parameters, "every": n, "compile": way.compiled}
        solution = evolve(rate, u, t, way.scheme, **options)
        return replace(solution, u=solution.u.to(u0.dtype))
    assert solver is not None
    n = max(0, math.floor((t_end - t0) / solver.dt + 1e-9))
    reached = t0 + n * solver.dt
    solution = solver.solve(
        u, reached, t0, every=max(n, 1), compile=way.compiled and n > 0, parameters=parameters
    )
    if t_end - reached <= 1e-9 * max(length, abs(t_end)):
        return replace(solution, u=solution.u.to(u0.dtype))
    # The last part of a step, by a scheme that needs no correction.
    last = evolve(
        rate, solution.final, [reached, t_end], "dop853", rtol=1e-2 * error,
        atol=1e-2 * error * scale.to(u), parameters=parameters,
    )  # fmt: skip
    calls = solution.stats.rate_calls + last.stats.rate_calls
    return Trajectory(
        torch.stack((solution.t[0], last.t[-1])),
        torch.stack((solution.u[0], last.final)).to(u0.dtype),
        replace(solution.stats, rate_calls=calls),
        solution.ok & last.ok,
        torch.where(solution.ok, last.until, solution.until),
        torch.where(last.ok, solution.status, last.status),
    )


def sizes(solution: Trajectory) -> Tensor:
    """Return the root mean square of each component; 1 where that is 0."""
    size = solution.u.square().mean((0, 1)).sqrt()
    return torch.where(size > 0, size, 1.0)


def distance(u: Tensor, truth: Tensor, scale: Tensor) -> float:
    """Return the largest relative root mean square error of a component."""
    return ((u - truth).square().mean(0).sqrt() / scale).max().item()
