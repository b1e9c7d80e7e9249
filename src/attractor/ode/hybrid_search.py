"""The search for the fastest hybrid: corrections of increasing cost, each with the largest step.

Polynomials of the state come first: they replace all rate calls, and pay where a state has few
components. Unless they are clearly faster than every plain scheme, linear maps and networks of the
stages follow, on the schemes that the search among plain schemes has left.
"""

import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from attractor.core import get_scheme
from attractor.core.rates import Rate
from attractor.core.tableaus import AnyScheme
from attractor.ode.candidates import Candidate
from attractor.ode.polynomial_search import PolynomialSearch
from attractor.ode.samples import Sampler
from attractor.ode.search import FEWER, SINGLE, UNLIKELY, Search
from attractor.ode.solver import HybridSolver

TIMED = 1000  # number of trajectories that `fit` times
WIDTHS = (0, 16, 64)  # of networks of the stages, narrow ones first
WIDE = (256, 64)  # the same for rates that take longer than such a network
TRAJECTORIES = 200  # number of trajectories that a hybrid learns from
FITS = 4  # number of fits per scheme and correction, in search of the largest step
CLEAR = 1.1  # a hybrid is fitted only if it has this many times fewer steps than the next best one
FASTER = 1.5  # times faster than all plain schemes: corrections of the stages are rarely that fast


class HybridSearch(Search):
    """A search among plain schemes and hybrids.

    Args:
        fit: `attractor.ode.fit`, which makes hybrids.
        options: As for `Search`.
    """

    def __init__(self, fit: Callable[..., HybridSolver], *options: Any) -> None:
        super().__init__(*options)
        self.fit, self.trajectories, self.hybrid_seconds = fit, TRAJECTORIES, 0.0
        self.fine_dt: float | None = None  # of the data that hybrids learn from

    def run(self, compile: bool) -> list[Candidate]:
        """Return the candidates that reach the error and were timed, the fastest first."""
        fixed, adaptive = self.plain()
        if self.stiff:
            timed = [self.timing(replace(c, compiled=compile)) for c in adaptive]
            timed += self.in_float32(timed) if self.error >= SINGLE else []
            return sorted(timed, key=lambda c: c.seconds)
        # Half the step of dop853 has an error of a two hundredth.
        self.fine_dt = next((c.setting / 2 for c in fixed if c.scheme == "dop853"), None)
        most = UNLIKELY * self.fewest_calls if compile else math.inf
        timed = [self.timing(c) for c in (*fixed, *adaptive) if c.rate_calls <= most]
        if compile:  # how long it takes decides which part of the budget is kept for it
            equal = [c for c in timed if c.method == "fixed"] or timed
            self.timing(replace(min(equal, key=lambda c: c.rate_calls), compiled=True))
        with self.counted_for_hybrids(), self.reserved(2 * self.compile_seconds if compile else 0.0):
            polynomials = self.polynomials(compile)
        timed += self.variants(timed, compile)
        plain = min(c.seconds for c in timed)
        timed += polynomials
        with self.counted_for_hybrids():
            if min(c.seconds for c in timed) * FASTER <= plain:
                self.notes.append("corrections of the stages: a polynomial is faster")
            else:
                with self.reserved(self.compile_seconds if compile else 0.0):
                    hybrids = [self.timing(c) for c in self.stages(fixed)]
                timed += hybrids + self.variants(hybrids, compile)
        return sorted(timed, key=lambda c: c.seconds)

    @contextmanager
    def reserved(self, seconds: float) -> Iterator[None]:
        """Keep a part of the budget, at most half of what is left, for what follows."""
        self.reserve = min(seconds, 0.5 * self.left)
        yield
        self.reserve = 0.0

    def variants(self, timed: list[Candidate], compile: bool) -> list[Candidate]:
        """Return the best candidates in float32 and compiled, where that is asked for and possible."""
        low = self.in_float32(timed) if self.error >= SINGLE else []
        return low + (self.compiled(timed + low) if compile else [])

    def are_faster(self, timed: list[Candidate], plain: Candidate) -> bool:
        """Return whether one of the candidates is clearly faster than a plain scheme, compiled."""
        seconds = self.timing(replace(plain, compiled=True)).seconds
        return min(c.seconds for c in timed) * FASTER <= seconds

    def polynomials(self, compile: bool) -> list[Candidate]:
        """Return polynomials that reach the error, timed; compiled ones need no time to compile.

        On a GPU torch's own compiler would need minutes for them.
        """
        compile = compile and self.timed.device.type == "cpu"
        candidates = PolynomialSearch(self, self.fit, self.fine_dt).run()
        if self.error >= SINGLE:
            low = [self.measured(replace(c, dtype="float32")) for c in candidates]
            candidates += [c for c in low if c.error <= self.error]
        return [self.timing(replace(c, compiled=compile)) for c in candidates]

    @contextmanager
    def counted_for_hybrids(self) -> Iterator[None]:
        """Count the time that is spent here as that of hybrids."""
        began = time.monotonic()
        yield
        self.hybrid_seconds += time.monotonic() - began

    def stages(self, plain: list[Candidate], widths: tuple[int, ...] | None = None) -> list[Candidate]:
        """Return corrections of the stages that reach the error with fewer steps than their scheme.

        Schemes with the fewest rate calls come first, and narrow corrections first. A wider one begins
        where the narrower one ended. If the rate takes longer than a network, wide corrections of
        schemes with few stages come first, because only the number of rate calls counts.
        """
        hybrids: list[Candidate] = []
        calls = min(c.rate_calls for c in plain) if plain else 0
        costly = bool(plain) and self.rate_seconds() > 2 * self.network_seconds(WIDE[0])
        stages = lambda c: get_scheme(c.scheme).rate_calls
        for base in sorted(plain, key=stages if costly else lambda c: c.rate_calls):
            if base.rate_calls > FEWER * calls:
                continue  # a hybrid does not make up for that
            n = round(self.horizon / base.setting)
            for width in widths or (WIDE if costly else WIDTHS):
                best = self.largest_step(Candidate("hybrid", base.scheme, 0.0, width), n)
                if best is not None:
                    hybrids.append(best)
                    n = round(self.horizon / best.setting)
                    calls = min(calls, best.rate_calls)
                if self.left <= 0:
                    self.notes.append("further hybrids: the budget was spent")
                    return hybrids
        return hybrids

    def network_seconds(self, width: int) -> float:
        """Return the time of a network of the stages of rk4, eager and in float32, for the batch."""
        u, dim = self.timed, self.timed.shape[-1]
        inputs, hidden, outputs = (
            torch.full(shape, 0.1, dtype=torch.float32, device=u.device)
            for shape in ((len(u), 5 * dim), (5 * dim, width), (width, dim))
        )

        def network() -> None:
            x = inputs @ hidden
            (x * x * (1 + x)) @ outputs

        return self.seconds_of(network)

    def largest_step(self, kind: Candidate, n: int) -> Candidate | None:
        """Return the hybrid with the fewest steps that reach the error, fewer than n; None if none does.

        A first fit takes half of n. From then on the error is taken for a power of the
        step size, which predicts the steps of the next fit.

        Args:
            kind: Its scheme and its correction.
        """
        order = get_scheme(kind.scheme).order + 1.0
        best, worst, steps = None, None, max(2, math.ceil(n / 2))
        for _ in range(FITS):
            most = n if best is None else round(self.horizon / best.setting)
            if not (2 <= steps <= most / CLEAR) or self.left <= 0:
                break
            hybrid = self.hybrid(replace(kind, setting=self.horizon / steps), steps)
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

    def hybrid(self, way: Candidate, steps: int) -> Candidate | None:
        """Return a hybrid, fitted, with its error; None if it cannot be fitted."""
        self.progress(f"fit of {way}")
        fine_dt = None if self.fine_dt is None else min(way.setting, self.fine_dt)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                solver = self.fit(
                    self.rate, dt=way.setting, horizon=self.horizon, scheme=way.scheme,
                    correction="stages", width=way.width, trajectories=self.trajectories,
                    options={"precision": "float32"} if way.width else None, period=self.period,
                    seed=self.seed, device=self.device, fine_dt=fine_dt, **self.samplers,
                )  # fmt: skip
        except (ValueError, FloatingPointError) as error:  # steps that lose trajectories, rates of t
            reason = str(error).split(";")[0].split(":")[0]
            if f"hybrids of {way.scheme}: {reason}" not in self.notes:
                self.notes.append(f"hybrids of {way.scheme}: {reason}")
            return None
        return self.add(way, solver)


def fastest_hybrid(
    fit: Callable[..., HybridSolver],
    rate: Rate,
    scheme: AnyScheme,
    *,
    correction: str,
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
    """Return the hybrid that reaches an error in the least time; `fit` is passed by itself.

    Args:
        scheme: The scheme that corrections of the stages correct.
        correction: "polynomial", "stages", or "auto" for both.

    Raises:
        ValueError: No hybrid reaches the error with fewer steps than the scheme.
    """
    limit = math.inf if budget is None else budget
    search = HybridSearch(
        fit, rate, error, horizon, sample, parameters, TIMED, limit, device, period, seed, progress
    )
    search.trajectories = trajectories
    with torch.no_grad():
        search.reference()
        plain = search.fixed(scheme)
        reference = plain if scheme.name == "dop853" else search.fixed(get_scheme("dop853"))
        search.fine_dt = None if reference is None else reference.setting / 2
        timed: list[Candidate] = []
        if correction in ("auto", "polynomial"):
            timed += search.polynomials(compile=True)
        if (
            correction in ("auto", "stages")
            and plain is not None
            and not (timed and search.are_faster(timed, plain))
        ):
            hybrids = search.stages([plain], widths)
            timed += [search.timing(replace(c, compiled=True)) for c in hybrids]
    if not timed:
        reasons = "".join(f"; {note}" for note in search.notes)
        steps = f"does not reach an error of {error:g} over {horizon:g} itself"
        if plain is not None:
            steps = f"needs steps of dt = {plain.setting:.3g}, and no hybrid larger ones"
        raise ValueError(
            f"no hybrid reaches an error of {error:g}: {scheme.name} {steps}; try another scheme or "
            f"width{reasons}"
        )
    solver = search.solver_of(min(timed, key=lambda c: c.seconds))
    assert solver is not None
    solver.history[-1]["seconds"] = time.monotonic() - search.started
    return solver
