"""The fastest way to an error: plain schemes, error control and hybrids, measured on this machine."""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from attractor.common import checks
from attractor.common.checks import (
    as_number,
    check_number,
    check_seed,
    check_tensor,
    check_values,
    check_whole,
)
from attractor.common.views import html_table
from attractor.core import Trajectory, get_scheme
from attractor.core.rates import Rate
from attractor.ode import serialization
from attractor.ode.candidates import Candidate, in_dtype, solved_by
from attractor.ode.fitting import fit
from attractor.ode.hybrid_search import HybridSearch
from attractor.ode.samples import Sampler
from attractor.ode.solver import HybridSolver
from attractor.ode.solver_checkpoint import SOLVER
from attractor.storage.objects import AnyPath
from attractor.storage.schema import (
    ADVICE,
    any_of,
    check,
    flag,
    listing,
    null,
    number,
    record,
    text,
    text_number,
)
from attractor.storage.tensor_specs import check_tensors
from attractor.train import checkpoint
from attractor.train.checkpoint import CheckpointError
from attractor.train.tensors import described

KIND = "tuned solver"
POSITIVE, COUNT = number(5e-324), number(0, whole=True)
TIMED = text_number(0, math.inf, float)  # an infinite number is text
CANDIDATE = record(
    {
        "method": text(choices=("fixed", "adaptive", "hybrid")), "scheme": text(), "setting": POSITIVE,
        "width": any_of(COUNT, null), "dtype": text(choices=("float64", "float32")), "compiled": flag,
        "error": TIMED, "seconds": TIMED, "rate_calls": COUNT,
    },
    {"degree": any_of(COUNT, null)},
)  # fmt: skip
REPORT = record(
    {
        "error": POSITIVE, "horizon": POSITIVE, "batch": number(1, whole=True), "device": text(),
        "candidates": listing(CANDIDATE, 1, 1000), "seconds": number(0), "hybrid_seconds": number(0),
        "scale": listing(POSITIVE), "notes": listing(text(1000)),
    }
)  # fmt: skip
PLAIN = record({"report": REPORT, "rate": serialization.RATE})
HYBRID = record({"report": REPORT, "solver": SOLVER})


@dataclass(frozen=True)
class TuningReport:
    """What `tune` has measured.

    Attributes:
        error: The error that was asked for.
        horizon, batch, device: The problem that was timed.
        candidates: Everything that reached the error and was timed, the fastest first.
        seconds: Duration of the search.
        hybrid_seconds: The part of it that only hybrids took.
        scale: Size of each component along the trajectories; errors and tolerances are relative to it.
        notes: Why something was not tried.
    """

    error: float
    horizon: float
    batch: int
    device: str
    candidates: tuple[Candidate, ...]
    seconds: float
    hybrid_seconds: float
    scale: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def winner(self) -> Candidate:
        """The fastest candidate."""
        return self.candidates[0]

    @property
    def plain(self) -> Candidate | None:
        """The fastest candidate without a correction."""
        return next((c for c in self.candidates if not c.is_hybrid), None)

    @property
    def speedup(self) -> float:
        """How many times faster the winner is than the fastest plain candidate; 1 if it is plain."""
        return 1.0 if self.plain is None else self.plain.seconds / self.winner.seconds

    @property
    def break_even(self) -> float | None:
        """Trajectories after which a hybrid has saved the time its search took; None for a plain one."""
        if self.plain is None or not self.winner.is_hybrid:
            return None
        saved = (self.plain.seconds - self.winner.seconds) / self.batch
        return self.hybrid_seconds / saved if saved > 0 else math.inf

    def __str__(self) -> str:
        lines = [
            f"error {self.error:g} over {self.horizon:g}, {self.batch:,} trajectories on {self.device}; "
            f"{self.seconds:.0f} s of search"
        ]
        width = max(len(str(c)) for c in self.candidates)
        lines += [
            f"  {c!s:{width}}  {_time(c.seconds):>9}  error {c.error:.1e}" for c in self.candidates
        ]
        if self.break_even is not None:
            lines.append(
                f"The hybrid is {self.speedup:.2g} times faster than the best plain scheme, and has "
                f"saved the time of its search after {self.break_even:,.0f} trajectories."
            )
        lines += [f"Not tried: {note}." for note in self.notes]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return a dictionary of plain values; infinite numbers are text."""
        rows = [
            {**asdict(c), "seconds": repr(c.seconds), "error": repr(c.error)} for c in self.candidates
        ]
        lists = {"scale": list(self.scale), "notes": list(self.notes)}
        return {**asdict(self), **lists, "candidates": rows}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Self:
        """Return the report of `to_json`."""
        rows = [
            Candidate(**{**row, "seconds": float(row["seconds"]), "error": float(row["error"])})
            for row in saved["candidates"]
        ]
        lists = {"scale": tuple(saved["scale"]), "notes": tuple(saved["notes"])}
        return cls(**{**saved, **lists, "candidates": tuple(rows)})


class TunedSolver:
    """The fastest way to an error that `tune` has found.

    Args:
        rate: The equation.
        report: What was measured; its winner is used.
        solver: The hybrid solver, if the winner is one.
    """

    def __init__(self, rate: Rate, report: TuningReport, solver: HybridSolver | None = None) -> None:
        if (report.winner.method == "hybrid") != (solver is not None):
            raise ValueError("a hybrid winner needs its solver, and no other winner has one")
        self.rate, self.report = rate, report
        self.solver = None if solver is None else in_dtype(solver, report.winner.dtype)

    def __repr__(self) -> str:
        best = self.report.winner
        return (
            f"TunedSolver({best}: error {best.error:.1e}, {_time(best.seconds)} for "
            f"{self.report.batch:,} trajectories over {self.report.horizon:g})"
        )

    def _repr_html_(self) -> str:
        rows = [(str(c), _time(c.seconds), f"{c.error:.1e}") for c in self.report.candidates]
        return html_table(("candidate", "time", "error"), rows)

    def solve(
        self,
        u0: Tensor,
        t_end: float,
        t0: float = 0.0,
        *,
        parameters: Tensor | None = None,
        compile: bool | None = None,
    ) -> Trajectory:
        """Follow u0 ``[*batch, d]`` from t0 to t_end.

        Args:
            u0: Initial states, of any floating dtype.
            t_end: The last time. The error was measured over the horizon of the tuning; beyond it
                errors grow as they do for the equation.
            parameters: Parameters ``[*batch, k]`` of an equation ``rate(t, u, p)``.
            compile: Whether steps are compiled, which takes time for every new shape of u0. None: if the
                winner was compiled.

        Returns:
            A `Trajectory` with the first and the last states, in the dtype of u0.
        """
        t_end, t0 = as_number("t_end", t_end), as_number("t0", t0)
        best = self.report.winner
        if compile not in (True, False, None):
            raise TypeError(f"compile = {compile!r} must be True, False or None")
        way = replace(best, compiled=best.compiled if compile is None else compile)
        check_tensor("u0", u0, "[*batch, d]")
        check_values("u0", u0)
        step = self.report.horizon if best.method == "adaptive" else best.setting
        if not abs(t_end - t0) <= checks.MOST_STEPS * step:
            raise ValueError(
                f"from t0 = {t0:g} to t_end = {t_end:g} is not a finite time, or more than "
                f"{checks.MOST_STEPS:g} times {step:g}; use a shorter time"
            )
        if u0.dim() == 0:
            raise ValueError("u0 has no dimension; a state needs one, even of size 1: use u0[None]")
        if self.report.scale and u0.shape[-1] != len(self.report.scale):
            raise ValueError(
                f"u0 {list(u0.shape)}: states of {u0.shape[-1]} numbers; this solver's have "
                f"{len(self.report.scale)}"
            )
        scale = torch.tensor(self.report.scale or 1.0, dtype=torch.float64, device=u0.device)
        return solved_by(
            self.rate, way, self.solver, u0, t0, t_end, parameters, scale, self.report.error
        )

    def save(self, folder: AnyPath | str) -> AnyPath:
        """Write the solver and its report to a folder, as `HybridSolver.save` does."""
        tensors: dict[str, Tensor] = {}
        config: dict[str, Any] = {"report": self.report.to_json()}
        if self.solver is not None:
            tensors, config["solver"] = self.solver._to_checkpoint()
        else:
            config["rate"] = serialization.rate_to_json(self.rate)
        return checkpoint.save(folder, KIND, tensors, config)

    @classmethod
    def load(cls, folder: AnyPath | str, rate: Rate | None = None) -> Self:
        """Read a solver.

        Args:
            rate: The equation, if it is not one of `attractor.systems`: code is not saved.

        Raises:
            CheckpointError: The folder is damaged, or the equation is missing.
        """
        tensors, config = checkpoint.load(folder, KIND)
        own = HYBRID if isinstance(config, dict) and "solver" in config else PLAIN
        check(config, own, folder, CheckpointError)
        with described(folder, "a tuned solver"):
            report = TuningReport.from_json(config["report"])
            if own is HYBRID:
                solver = HybridSolver._from_checkpoint(tensors, config["solver"], folder, rate)
                return cls(solver.rate, report, solver)
            get_scheme(report.winner.scheme)
            check_tensors(tensors, {}, folder, CheckpointError)
            known = serialization.rate_from_json(config["rate"])
        if known is not None and report.scale and known.dim != len(report.scale):
            raise CheckpointError(
                f"{folder} was tuned for states of {len(report.scale)} components, and those of {known} "
                f"have {known.dim}. {ADVICE}"
            )
        equation = rate if rate is not None else known
        if equation is None:
            raise CheckpointError(f"{folder} needs its equation; pass it as rate=")
        return cls(equation, report)


def tune(
    system_or_rate: Rate,
    *,
    error: float,
    horizon: float,
    sample: Sampler | None = None,
    parameters: Sampler | None = None,
    batch: int = 1000,
    budget: float = 60.0,
    device: torch.device | str | None = None,
    compile: bool = True,
    period: float | None = None,
    seed: int = 0,
    progress: Callable[[str], None] = lambda message: None,
) -> TunedSolver:
    """Find the fastest way to solve an equation with a given error, on this machine.

    Candidates are plain schemes with fixed steps, schemes with error control, and hybrids whose
    correction is a polynomial of the state, or a linear map or network of the stages; each with the
    largest step or tolerance that reaches the error; eager and compiled, and in float32 where the error
    allows it. Stiff equations, for which explicit schemes need far more steps, are solved by Rosenbrock
    schemes with error control. All are measured in this process, and the fastest one is returned. A
    plain scheme is among them, so that the result is never slower than the best plain scheme that was
    found.

    The error is the root mean square error of final states on trajectories that nothing else has seen,
    relative to the size of each component along the trajectories; the largest of all components counts.

    Args:
        system_or_rate: One of `attractor.systems`, or any rate ``(t, u) -> du`` with `sample`.
        error: The error to reach, such as 1e-6.
        horizon: The duration of a trajectory.
        sample: ``(n, generator=...) -> [n, d]`` initial states, for a rate of your own.
        parameters: ``(n, generator=...) -> [n, k]`` parameters, for a rate ``(t, u, p) -> du``.
        batch: Number of trajectories that are solved at a time, and timed.
        budget: Number of seconds after which nothing further is tried. What has begun is finished, so
            that compiling may exceed it.
        device: Where the equation is solved.
        compile: Whether compiled candidates are tried.
        period: Period of a rate that depends on t. Without it such a rate has no hybrids.
        seed: Seed of everything random.
        progress: Called with a message at each stage.

    Returns:
        A `TunedSolver` with `solve`, `save` and `report`.

    Raises:
        ValueError: No candidate reaches the error.

    >>> import attractor as at
    >>> spring = at.systems.HarmonicOscillator()
    >>> solver = at.tune(spring, error=1e-4, horizon=5.0, batch=10, compile=False)
    >>> solver.report.winner.error <= 1e-4
    True
    """
    check_number("error", error)
    check_number("horizon", horizon)
    check_number("budget", budget, 0.0)
    check_whole("batch", batch, 1)
    check_seed(seed)
    if not 0 < error < 1:
        raise ValueError(f"error = {error} must be between 0 and 1; it is relative to the states")
    if not (horizon > 0 and math.isfinite(horizon)):
        raise ValueError(f"horizon = {horizon} must be a positive number")
    search = HybridSearch(
        fit, system_or_rate, float(error), float(horizon), sample, parameters, batch, budget, device,
        period, seed, progress,
    )  # fmt: skip
    with torch.no_grad():
        ranked = tuple(search.run(compile))
    report = TuningReport(
        search.error, search.horizon, len(search.timed), str(search.timed.device), ranked,
        time.monotonic() - search.started, search.hybrid_seconds, tuple(search.scale.tolist()),
        tuple(search.notes),
    )  # fmt: skip
    return TunedSolver(search.rate, report, search.solver_of(ranked[0]))


def _time(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "-"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
