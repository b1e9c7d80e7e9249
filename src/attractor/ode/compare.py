"""Does a hybrid solver pay? Error against work, beside plain schemes and other libraries' solvers.

Two numbers describe a hybrid solver. m is the number of plain steps of the same scheme that reach the
error of one hybrid step; m* is the cost of a hybrid step in plain steps. The hybrid beats its own scheme
if and only if m > m*. It pays if it is also faster than every other method at its error, in compiled
code and for the number of trajectories that are solved at once.

>>> import attractor as at
>>> from attractor.ode.compare import compare
>>> solver = at.fit(at.systems.Logistic(growth=2.0), dt=0.5, horizon=4.0, width=16, trajectories=50)
>>> found = compare(solver, horizon=4.0, batch=20, schemes=("rk4",), compile=False, peers=False)
>>> found.hybrid.error < found.plain("rk4")[0].error
True
"""

import base64
import math
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from attractor import jobs
from attractor.core import Trajectory, evolve, get_scheme
from attractor.core.checks import check_seed
from attractor.core.files import json_bytes, write_bytes, write_json
from attractor.core.fingerprint import fingerprint
from attractor.core.step import with_parameters
from attractor.core.views import html_table, pandas, pictures
from attractor.jobs.naming import name_of, named
from attractor.ode.serialization import rate_to_json
from attractor.ode.solver import HybridSolver
from attractor.ode.trajectories import (
    Sampler,
    enough_substeps,
    fine_trajectories,
    initial_states,
    sampled_parameters,
    whole_steps,
)

TOLERANCES = (1e-4, 1e-6, 1e-8, 1e-10, 1e-12)
FINEST = 512  # plain steps in one of dt, at most
ENOUGH = 0.6  # seconds of repetition after which a time is known well enough
PATIENCE = 5.0  # seconds a solve may take; finer settings of that method are then left out


@dataclass(frozen=True)
class Point:
    """One way to solve the problem.

    Attributes:
        method: such as "rk4", "hybrid", "SciPy DOP853".
        setting: the step, or for error control the relative tolerance.
        adaptive: whether the setting is a tolerance.
        error: mean square error over all states, one every dt of the hybrid solver.
        seconds: Wall time, the shortest of several repetitions.
        rate_calls: Calls of the rate for all trajectories together; the network is not counted.
        first_seconds: Wall time of the first call, compilation included.
    """

    method: str
    setting: float
    adaptive: bool
    error: float
    seconds: float
    rate_calls: int
    first_seconds: float = 0.0

    @property
    def preparation(self) -> float:
        """Seconds that the first call took longer than later ones: compilation."""
        return max(0.0, self.first_seconds - self.seconds)

    def __str__(self) -> str:
        return f"{self.method} with {'rtol' if self.adaptive else 'dt'} = {self.setting:.2g}"


@dataclass(frozen=True)
class Comparison:
    """What a comparison found.

    Attributes:
        hybrid: the hybrid solver's point. points: everybody else's, by method.
        m: plain steps of the hybrid's scheme that reach its error; infinite if none was found to.
        m_star: what a hybrid step costs in plain steps.
        rival: The fastest other method at the hybrid's error, its time interpolated between settings;
            None if no other method reached it.
        about: The conditions: batch, horizon, dtype, threads, whether code was compiled, and the seconds
            that the fit took.
    """

    hybrid: Point
    points: tuple[Point, ...]
    m: float
    m_star: float
    rival: Point | None
    about: dict[str, Any]

    def plain(self, method: str) -> list[Point]:
        """The points of one method."""
        return [p for p in self.points if p.method == method]

    @property
    def gain(self) -> float:
        """Time of the fastest other method at the hybrid's error over the hybrid's; infinite if none."""
        return self.rival.seconds / self.hybrid.seconds if self.rival else math.inf

    @property
    def pays(self) -> bool | None:
        """Whether the hybrid is the fastest method at its error; None without compiled code."""
        return self.gain > 1 if self.about.get("compiled") else None

    @property
    def break_even(self) -> float:
        """Number of trajectories from which on the fit and the compilation have paid for themselves.

        Infinite if they never do; 0 if no other method reaches the error.
        """
        if self.rival is None:
            return 0.0
        saved = (self.rival.seconds - self.hybrid.seconds) / self.about.get("batch", 1)
        spent = (self.about.get("fit_seconds") or 0.0) + self.hybrid.preparation - self.rival.preparation
        return max(0.0, spent / saved) if saved > 0 else math.inf

    @property
    def verdict(self) -> str:
        """One line for a person, which names the conditions under which it holds."""
        about = self.about
        mode = "compiled" if about.get("compiled") else "eager mode"
        conditions = [mode, f"{about.get('batch', 1):,} trajectories at once"]
        conditions += [str(about[key]) for key in ("dtype", "device") if key in about]
        own = f"{', '.join(conditions)}; m = {self.m:.3g}, m* = {self.m_star:.3g}"
        if self.rival is None:
            result = "no other method reaches its error"
        elif self.gain > 1:
            result = f"{self.gain:.2g}x faster than {self.rival}, the fastest other method at its error"
        else:
            result = f"{self.rival} is {1 / self.gain:.2g}x faster at its error"
        if self.pays is None:
            return f"not decided: {result} ({own}); compiled code may decide otherwise (compile=True)"
        if not self.pays:
            return f"does not pay: {result} ({own})"
        if not about.get("fit_seconds"):
            return f"pays: {result} ({own})"
        return (
            f"pays from {self.break_even:,.0f} trajectories on: {result} ({own}; the fit took "
            f"{about['fit_seconds']:.0f} s, compilation {self.hybrid.preparation:.0f} s)"
        )

    def __repr__(self) -> str:
        methods = ", ".join(dict.fromkeys(p.method for p in self.points))
        return f"Comparison({self.verdict}; beside {len(self.points)} points of {methods or 'nobody'})"

    def _repr_html_(self) -> str:
        head = ("method", "setting", "mean square error", "milliseconds", "rate calls")
        rows = [
            (p.method, f"{'rtol' if p.adaptive else 'dt'} {p.setting:.2g}", p.error, 1e3 * p.seconds,
             p.rate_calls)
            for p in (self.hybrid, *self.points)
        ]  # fmt: skip
        return html_table(head, rows, self.verdict)

    def to_pandas(self) -> Any:
        """A row a point, the hybrid's first. Needs the extra `report`."""
        return pandas().DataFrame([asdict(p) for p in (self.hybrid, *self.points)])

    def plot(self, path: Path | str | None = None, title: str = "") -> Any:
        """Error against wall time and against rate calls, as a Matplotlib figure.

        Args:
            path: where to write it as a PNG, if anywhere. Needs the extra `report`.
        """
        figures = pictures("figures")
        figure = figures.work_precision(self, title)
        if path is not None:
            figures.write(figure, path)
        return figure

    def save(self, folder: Path | str) -> Path:
        """Write `compare.json`; returns its path."""
        return write_json(Path(folder) / "compare.json", self.to_json())

    def to_json(self) -> dict[str, Any]:
        """What is saved."""
        return {
            "verdict": self.verdict, "pays": self.pays, "m": self.m, "m_star": self.m_star,
            "gain": self.gain, "break_even": self.break_even, "about": self.about,
            "hybrid": asdict(self.hybrid),
            "rival": asdict(self.rival) if self.rival else None,
            "points": [asdict(p) for p in self.points],
        }  # fmt: skip

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Self:
        """What was saved; JSON has null for what is infinite."""
        number = lambda x: math.inf if x is None else x
        point = lambda p: Point(**{**p, "error": number(p["error"])})
        return cls(
            hybrid=point(saved["hybrid"]),
            points=tuple(map(point, saved["points"])),
            m=number(saved["m"]),
            m_star=saved["m_star"],
            rival=None if saved["rival"] is None else point(saved["rival"]),
            about=saved["about"],
        )


def compare(
    solver: HybridSolver,
    *,
    horizon: float,
    u0: Tensor | None = None,
    batch: int = 1000,
    sample: Sampler | None = None,
    parameters: Sampler | Tensor | None = None,
    schemes: Sequence[str] = ("rk4", "dopri5"),
    compile: bool = True,
    peers: bool = True,
    jax_rate: Callable[..., Any] | None = None,
    seed: int = 1,
    progress: Callable[[str], None] = lambda what: None,
) -> Comparison:
    """Error against wall time and rate calls, everybody in one run on one machine.

    Plain schemes take steps of dt, dt/2, dt/4 ... until they are better than the hybrid; solvers with
    error control go through tolerances. All solve the same batch, in the dtype of the solver, and
    compute only the final states when timed. Plain schemes and the hybrid are compiled, and the hybrid
    is guarded, as in `HybridSolver.solve`; solvers of other libraries take the batch as one state, which
    is the fastest way to use them.

    Args:
        horizon: how far, a whole number of the solver's steps.
        u0: initial states ``[batch, d]``; None samples them with `sample`, or with the system's own,
            from a seed that a fit does not use.
        parameters: ``(n, generator=...) -> [n, k]`` parameters of an equation ``rate(t, u, p)``, one row
            per trajectory, as for `fit`; or the parameters themselves, ``[batch, k]`` beside u0.
        schemes: plain schemes beside the solver's own.
        compile: Whether plain schemes and the hybrid are compiled. False gives a quick answer about
            eager code, which decides nothing about compiled code.
        peers: also solvers with error control: ours, SciPy's, torchdiffeq's and diffrax's where
            installed.
        jax_rate: ``(t, u, args) -> du`` in JAX, for diffrax, which cannot call a rate in torch. `args`
            are the parameters, or None.
        progress: called with a line for each solve.

    Raises:
        ValueError: The solver loses trajectories, or was fitted with parameters and there are none.
    """
    steps = whole_steps(solver.dt, horizon)
    check_seed(seed)
    generator = torch.Generator().manual_seed(seed + 2**40)
    if u0 is None:
        u0 = initial_states(solver.rate, sample, batch, generator)
    u0 = solver._converted(u0)
    if parameters is None and solver.parameter_count:
        raise ValueError(
            f"the solver was fitted to an equation with {solver.parameter_count} parameters; pass "
            "parameters=, a function (n, generator=...) -> [n, k], such as the one that fit was given"
        )
    if not isinstance(parameters, Tensor):
        parameters = sampled_parameters(parameters, len(u0), generator)
    p = solver._parameters(u0, parameters)
    progress("reference")
    own = None if p is None else p.double()
    enough = enough_substeps(solver.rate, u0.double(), solver.dt, steps, parameters=own)
    substeps = max(32, 2 * enough)
    truth = fine_trajectories(solver.rate, u0, solver.dt, steps, substeps, parameters=own)
    race = _Race(solver, u0, p, truth, steps, compile, progress)
    with torch.no_grad():
        hybrid = race.hybrid(solver)
        if not math.isfinite(hybrid.error):
            raise ValueError(
                f"{solver} loses trajectories over horizon = {horizon:g}: nothing to compare"
            )
        names = [solver.scheme, *(get_scheme(s) for s in schemes if s != solver.scheme.name)]
        points = [p for scheme in names for p in race.refine(scheme, hybrid.error)]
        if peers:
            points += race.adaptive(jax_rate, hybrid.error)
    plain = [p for p in points if p.method == solver.scheme.name]
    reach = _reach(plain, hybrid.error)
    one = min(plain, key=lambda p: abs(p.setting - solver.dt))
    by_method = [_reach([p for p in points if p.method == m], hybrid.error) for m in _methods(points)]
    rivals = [p for p in by_method if p is not None]
    about = {
        "rate": rate_to_json(solver.rate), "scheme": solver.scheme.name, "dt": solver.dt,
        "correction": {"name": type(solver.correction).__name__, **_options(solver)},
        "horizon": horizon, "batch": len(u0), "dtype": str(u0.dtype).removeprefix("torch."),
        "device": str(u0.device), "threads": torch.get_num_threads(), "compiled": compile,
        "fit_seconds": solver.history[-1].get("seconds") if solver.history else None,
    }  # fmt: skip
    return Comparison(
        hybrid=hybrid,
        points=tuple(points),
        m=solver.dt / reach.setting if reach else math.inf,
        m_star=hybrid.seconds / one.seconds,
        rival=min(rivals, key=lambda p: p.seconds, default=None),
        about=about,
    )


def compare_all(
    solvers: Mapping[str, Path | str],
    folder: Path | str,
    *,
    horizon: float | Mapping[str, float | None] | None = None,
    rate: Callable[..., Tensor] | None = None,
    sample: Sampler | None = None,
    parameters: Sampler | None = None,
    jax_rate: Callable[..., Any] | None = None,
    device: str = "cpu",
    engine: str | None = None,
    workers: int | None = None,
    address: str | None = None,
    threads: int | None = None,
    **options: Any,
) -> Iterator[tuple[str, Comparison]]:
    """`compare` for many saved solvers, each with its name as it ends; those in the folder come first.

    A comparison stays whole: all of its times are from one machine. Errors and calls do not depend on
    who made it; times do, and are best with one worker a machine.

    Args:
        solvers: name -> folder. Their files travel to the workers.
        folder: where comparisons are kept, and not made again.
        horizon: one for all, or name -> horizon; None: a hundred steps of each solver.
        rate, sample, parameters, jax_rate: of all solvers, if the equation is your own: functions of a
            module or a file.
        engine, workers, address: see `attractor.jobs.each`. threads: of torch, for a comparison.
        options: further ones of `compare`, such as batch and schemes.
    """
    own = {"rate": rate, "sample": sample, "parameters": parameters, "jax_rate": jax_rate}
    names = {key: name_of(function) for key, function in own.items()}
    for key, function in own.items():
        if function is not None and names[key] is None:
            raise TypeError(f"{key} must be a function of a module or a file, for workers to find")
    own_horizons = dict(horizon) if isinstance(horizon, Mapping) else {}
    about = {
        "horizon": None if own_horizons else horizon, "device": device, "options": options, **names,
    }  # fmt: skip
    code = {key: fingerprint(function) for key, function in own.items() if function is not None}
    files = {name: _packed(Path(place)) for name, place in solvers.items()}
    shards = []
    for name, packed in files.items():
        known = packed if own_horizons.get(name) is None else [packed, own_horizons[name]]
        shards.append((name, sha256(json_bytes(known)).hexdigest()[:16]))
    job = jobs.Job(
        "attractor.ode.compare:compare_one", {**about, "solvers": files, "horizons": own_horizons},
        threads=threads, gpus=int("cuda" in device),
    )  # fmt: skip
    how = {"engine": engine, "workers": workers, "address": address}
    for made in jobs.keep(job, shards, folder, {**about, "code": code}, **how):
        yield made.shard[0], Comparison.from_json(made.json())


def compare_one(config: Mapping[str, Any], shard: tuple[str, str]) -> dict[str, Any]:
    """What a job of `compare_all` does for a solver, which the shard names with a hash of its files."""
    rate, *own = (
        config[key] and named(config[key]) for key in ("rate", "sample", "parameters", "jax_rate")
    )
    with tempfile.TemporaryDirectory() as folder:
        for name, content in config["solvers"][shard[0]].items():
            write_bytes(Path(folder) / name, base64.b64decode(content))
        solver = HybridSolver.load(folder, rate).to(config["device"])
    horizon = config["horizons"].get(shard[0], config["horizon"])
    horizon = 100 * solver.dt if horizon is None else horizon
    how = dict(zip(("sample", "parameters", "jax_rate"), own)) | config["options"]
    return compare(solver, horizon=horizon, **how).to_json()


def _packed(folder: Path) -> dict[str, str]:
    """The files of a folder as text."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}; give that of a saved solver")
    files = sorted(p for p in folder.iterdir() if p.is_file())
    return {p.name: base64.b64encode(p.read_bytes()).decode() for p in files}


class _Race:
    """Solves one problem in many ways."""

    def __init__(
        self,
        solver: HybridSolver,
        u0: Tensor,
        parameters: Tensor | None,
        truth: Tensor,
        steps: int,
        compile: bool,
        progress: Callable[[str], None],
    ) -> None:
        self.rate, self.dt, self.steps, self.u0, self.truth = solver.rate, solver.dt, steps, u0, truth
        self.parameters = parameters
        self.compile, self.progress = compile, progress
        self.times = torch.arange(steps + 1, dtype=torch.float64, device=u0.device) * solver.dt

    def error(self, u: Tensor) -> float:
        value = (u.to(self.truth) - self.truth).square().mean().item()
        return value if math.isfinite(value) else math.inf

    def hybrid(self, solver: HybridSolver) -> Point:
        """The hybrid solver, as a user calls it."""
        self.progress(f"hybrid, dt = {self.dt:.2g}")
        solve = partial(solver.solve, self.u0, self.steps * self.dt, parameters=self.parameters)
        end = lambda: solve(every=self.steps, compile=self.compile)
        return self.fixed_point("hybrid", self.dt, solve(), end)

    def fixed(self, scheme: Any, substeps: int) -> Point:
        """A plain scheme with steps of dt / substeps."""
        self.progress(f"{scheme.name}, dt = {self.dt / substeps:.2g}")
        n = self.steps * substeps
        t = torch.arange(n + 1, dtype=torch.float64, device=self.u0.device) * (self.dt / substeps)
        solve = partial(evolve, self.rate, self.u0, t, scheme, parameters=self.parameters)
        dt, whole = self.dt / substeps, solve(every=substeps)
        return self.fixed_point(scheme.name, dt, whole, lambda: solve(every=n, compile=self.compile))

    def fixed_point(self, method: str, dt: float, solved: Trajectory, run: Callable[[], Any]) -> Point:
        """A method with fixed steps: its solution, and the call to time."""
        error = self.error(solved.u) if bool(solved.ok.all()) else math.inf
        seconds, first = self.seconds(run)
        return Point(method, dt, False, error, seconds, solved.stats.rate_calls, first)

    def refine(self, scheme: Any, target: float) -> list[Point]:
        """Halve the step until the target is reached."""
        found: list[Point] = []
        substeps = 1
        while substeps <= FINEST:
            found.append(self.fixed(scheme, substeps))
            if found[-1].error <= target or found[-1].seconds > PATIENCE:
                break
            substeps *= 2
        return found

    def adaptive(self, jax_rate: Callable[..., Any] | None, target: float) -> list[Point]:
        """Solvers with error control over tolerances, until the target is reached."""
        contenders: dict[str, Callable[[float, Any], tuple[Tensor, int]]] = {
            "dopri5, own steps": self._ours
        }
        try:
            import scipy.integrate  # noqa: F401
        except ImportError:
            self.progress("SciPy is not installed: left out")
        else:
            contenders["SciPy DOP853"] = self._scipy
        try:
            import torchdiffeq  # noqa: F401
        except ImportError:
            self.progress("torchdiffeq is not installed: left out")
        else:
            contenders["torchdiffeq dopri5"] = self._torchdiffeq
        if jax_rate is not None:
            contenders["diffrax Tsit5"] = _Diffrax(jax_rate, self.u0, self.parameters)
        found = []
        for method, solve in contenders.items():
            for tolerance in TOLERANCES:
                self.progress(f"{method}, rtol = {tolerance:.0e}")
                try:
                    u, calls = solve(tolerance, self.times)
                except (FloatingPointError, RuntimeError, AssertionError) as error:
                    # A step size that fell to nothing: no point here, and the reader is told.
                    reason = (str(error).splitlines() or [""])[0]
                    warnings.warn(f"{method} at rtol = {tolerance:.0e} gave up: {reason}", stacklevel=3)
                    continue
                ends = self.times[[0, -1]]
                seconds, first = self.seconds(lambda: solve(tolerance, ends))  # noqa: B023
                found.append(Point(method, tolerance, True, self.error(u), seconds, calls, first))
                if found[-1].error <= target or seconds > PATIENCE:
                    break
        return found

    def seconds(self, run: Callable[[], Any]) -> tuple[float, float]:
        """The shortest of several repetitions, and the first call, which compiles."""
        times: list[float] = []
        start = time.perf_counter()
        run()
        if self.u0.is_cuda:
            torch.cuda.synchronize()
        first = time.perf_counter() - start
        while len(times) < 3 or (sum(times) < ENOUGH and len(times) < 100):
            start = time.perf_counter()
            run()
            if self.u0.is_cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
            if times[-1] > PATIENCE / 4:
                break
        return min(times), first

    def _ours(self, tolerance: float, t: Tensor) -> tuple[Tensor, int]:
        solved = evolve(
            self.rate, self.u0, t, "dopri5", parameters=self.parameters, rtol=tolerance,
            atol=1e-2 * tolerance,
        )  # fmt: skip
        return solved.u, solved.stats.rate_calls

    def _scipy(self, tolerance: float, t: Tensor) -> tuple[Tensor, int]:
        from scipy.integrate import solve_ivp

        shape, p = self.u0.shape, self.parameters
        of = with_parameters(self.rate, None if p is None else p.double().cpu())

        def rate(t: float, y: np.ndarray) -> np.ndarray:
            u = torch.from_numpy(y).reshape(shape)
            return of(torch.tensor(t, dtype=torch.float64), u).reshape(-1).numpy()

        start, when = self.u0.double().cpu().numpy().ravel(), t.cpu().numpy()
        options = {"rtol": max(tolerance, 3e-14), "atol": 1e-2 * tolerance, "t_eval": when}
        solved = solve_ivp(rate, (when[0], when[-1]), start, "DOP853", **options)
        if not solved.success:
            raise FloatingPointError(solved.message)
        return torch.from_numpy(solved.y.T.reshape(-1, *shape)), int(solved.nfev)

    def _torchdiffeq(self, tolerance: float, t: Tensor) -> tuple[Tensor, int]:
        import torchdiffeq

        calls, of = 0, with_parameters(self.rate, self.parameters)

        def rate(t: Tensor, u: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return of(t, u)

        return torchdiffeq.odeint(rate, self.u0, t, rtol=tolerance, atol=1e-2 * tolerance), calls


class _Diffrax:
    """Tsit5 with error control, compiled by JAX for each tolerance and set of times."""

    def __init__(self, rate: Callable[..., Any], u0: Tensor, parameters: Tensor | None) -> None:
        import diffrax
        import jax

        jax.config.update("jax_enable_x64", True)

        def solve(u0: Any, times: Any, tolerance: float) -> Any:
            return diffrax.diffeqsolve(
                diffrax.ODETerm(rate), diffrax.Tsit5(), times[0], times[-1], 1e-3, u0, args,
                saveat=diffrax.SaveAt(ts=times), max_steps=1_000_000,
                stepsize_controller=diffrax.PIDController(rtol=tolerance, atol=1e-2 * tolerance),
            )  # fmt: skip

        args = None if parameters is None else jax.numpy.asarray(parameters.cpu().numpy())
        self.solve, self.u0 = jax.jit(solve), u0.cpu().numpy()

    def __call__(self, tolerance: float, t: Tensor) -> tuple[Tensor, int]:
        solved = self.solve(self.u0, t.cpu().numpy(), tolerance)
        states = torch.from_numpy(np.array(solved.ys))
        return states, 6 * int(solved.stats["num_steps"])  # Tsit5 has six stages a step


def _reach(points: Sequence[Point], target: float) -> Point | None:
    """Where a method reaches the target, between two of its settings on logarithmic scales."""
    coarser: Point | None = None
    preparation = max((p.preparation for p in points), default=0.0)  # compiled for the first setting
    for p in points:
        if p.error <= target:
            if coarser is None or not math.isfinite(coarser.error):
                return replace(p, first_seconds=p.seconds + preparation)
            share = math.log(coarser.error / target) / math.log(coarser.error / max(p.error, 1e-300))
            between = lambda a, b: a * (b / a) ** share  # noqa: B023
            seconds = between(coarser.seconds, p.seconds)
            return Point(
                p.method, between(coarser.setting, p.setting), p.adaptive, target, seconds,
                round(between(coarser.rate_calls, p.rate_calls)), seconds + preparation,
            )  # fmt: skip
        coarser = p
    return None


def _methods(points: Sequence[Point]) -> list[str]:
    return list(dict.fromkeys(p.method for p in points))


def _options(solver: HybridSolver) -> dict[str, Any]:
    config: Any = getattr(solver.correction, "config", {})
    return dict(config)
