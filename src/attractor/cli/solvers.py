"""Commands of solvers: trajectories, fit, solve, compare, tune."""

import math
import re
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from attractor.cli import equation_names as equations
from attractor.cli.engines import Address, Engine, Part, Threads, Workers
from attractor.cli.terminal import (
    AsJson,
    Device,
    Seed,
    app,
    check_device,
    check_out,
    console,
    example,
    make_table,
    need,
    origin,
    print_json,
    progress_bar,
    report_usage_errors,
    say,
    typed_command,
)
from attractor.core import Status
from attractor.ode import HybridSolver, Paper, make_trajectories, pretrained
from attractor.ode import fit as fit_solver
from attractor.ode.compare import SCHEMES
from attractor.ode.compare import compare as compare_solver
from attractor.ode.compare_saved import compare_all
from attractor.ode.comparison import Comparison
from attractor.ode.processes import Crew
from attractor.ode.samples import initial_states, sampled_parameters
from attractor.ode.tuning import TunedSolver
from attractor.ode.tuning import tune as tune_solver
from attractor.ode.tuning_sweep import Problem, tune_all
from attractor.storage.files import discard_folder, write_json, write_parts
from attractor.storage.limits import read_json
from attractor.storage.objects import AnyPath, path_of
from attractor.storage.schema import check, number, plain, record

EQUATION_HELP = "A built-in system, such as elastic-pendulum, or FILE.py:FUNCTION, or MODULE:FUNCTION."
Equation = Annotated[str, typer.Argument(metavar="EQUATION", help=EQUATION_HELP)]
Option = Annotated[
    list[str] | None,
    typer.Option(
        "--option", "-o", metavar="KEY=VALUE", help="Option of a built-in system: -o links=10."
    ),
]
SOLVER_HELP = "The folder of a saved solver, or pretrained:NAME, such as pretrained:elastic-pendulum."
SolverArgument = Annotated[str, typer.Argument(metavar="SOLVER", help=SOLVER_HELP)]
RateOption = Annotated[
    str | None,
    typer.Option(
        "--rate",
        metavar="FILE.py:FUNCTION",
        help="Equation that the solver was fitted to, if it is your own.",
    ),
]
ParametersOption = Annotated[
    str | None,
    typer.Option(
        "--parameters",
        metavar="FILE.py:FUNCTION",
        help="Sampler of the parameters of a rate(t, u, p). Default: parameters() beside the rate.",
    ),
]
Horizon = Annotated[
    float | None, typer.Option(help="Duration of a trajectory: a whole number of steps.")
]


@app.command(epilog=example("attractor trajectories lorenz --trajectories 10000 --workers 4"))
def trajectories(
    equation: Equation,
    option: Option = None,
    parameters: ParametersOption = None,
    trajectories: Annotated[int, typer.Option(min=1, help="Number of trajectories.")] = 1000,
    dt: Annotated[float | None, typer.Option(help="Time between two states.")] = None,
    horizon: Horizon = None,
    fine_dt: Annotated[
        float | None, typer.Option(help="Step of the reference; default: found by refinement.")
    ] = None,
    period: Annotated[float | None, typer.Option(help="Period of a rate that repeats in time.")] = None,
    shard_size: Annotated[int, typer.Option(min=1, help="Number of trajectories per file.")] = 1000,
    engine: Engine = None,
    workers: Workers = None,
    address: Address = None,
    part: Part = "1/1",
    seed: Seed = 0,
    device: Device = "cpu",
    out: Annotated[
        str, typer.Option(help="Folder for the files, or its URL, such as s3://bucket/data.")
    ] = "out/trajectories",
    as_json: AsJson = False,
) -> None:
    """Compute fine trajectories from which fit --data learns.

    Trajectories in the folder are not computed again.
    """
    with report_usage_errors():
        check_out(out)
        if engine != "ray":  # its machines may have other devices
            check_device(device)
        problem = _find(equation, option, parameters)
        dt, horizon = _require(
            equation, dt=_default(dt, problem.dt), horizon=_default(horizon, problem.horizon)
        )
        with progress_bar() as bar:
            task = bar.add_task("starting", total=None)

            def progress(line: str) -> None:
                _, position, _, total = line.split()
                bar.update(task, description=line, completed=int(position), total=int(total))

            dataset = make_trajectories(
                problem.rate, out, trajectories=trajectories, dt=dt, horizon=horizon,
                sample=problem.sample, parameters=problem.parameters, fine_dt=fine_dt,
                period=_default(period, problem.period), seed=seed, shard_size=shard_size,
                device=device, engine=engine, workers=workers, address=address, part=part,
                progress=progress,
            )  # fmt: skip
    missing = dataset.missing()
    if as_json:
        print_json({
            "command": typed_command(), "out": str(out), "trajectories": trajectories,
            "shards": dataset.plan.shards, "missing": len(missing),
            "sha256": None if missing else dataset.hash,
        })  # fmt: skip
    elif missing:
        say(f"{len(missing)} of {dataset.plan.shards} shards, of other parts, are still missing.")
    else:
        say(f"{trajectories:,} trajectories, {dataset.plan.shards} shards, SHA-256 {dataset.hash}")
    say(f"Data: {out}")


@app.command(
    epilog=example(
        "attractor fit pendulum-chain -o links=2 --trajectories 300",
        "attractor fit examples/duffing.py:rate --trajectories 500",
    )
)
def fit(
    equation: Equation,
    option: Option = None,
    parameters: ParametersOption = None,
    dt: Annotated[float | None, typer.Option(help="Step of the solver.")] = None,
    horizon: Horizon = None,
    scheme: Annotated[str, typer.Option(help="The scheme to correct; identity: no scheme.")] = "rk4",
    correction: Annotated[
        str,
        typer.Option(
            help="Correction: auto, stages, polynomial, attns, neurvec, attns_m, csm, fsnet or linear."
        ),
    ] = "auto",
    recipe: Annotated[
        str, typer.Option(help="Recipe of the fit: default, or paper (slow).")
    ] = "default",
    width: Annotated[int | None, typer.Option(min=0, help="Width of the network.")] = None,
    degree: Annotated[int | None, typer.Option(min=1, help="Degree of the polynomial.")] = None,
    precision: Annotated[
        str | None, typer.Option(help="float32: evaluate the network in float32, which is faster.")
    ] = None,
    trajectories: Annotated[
        int, typer.Option(min=1, help="Number of trajectories to learn from.")
    ] = 1000,
    period: Annotated[float | None, typer.Option(help="Period of a rate that repeats in time.")] = None,
    fine_dt: Annotated[
        float | None, typer.Option(help="Step of the fine data; found by refinement if not passed.")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Epochs of the paper's recipe (500).")
    ] = None,
    budget: Annotated[
        float | None, typer.Option(min=0, help="Seconds after which no new candidate is tried.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Folder or URL written by attractor trajectories, to learn from.")
    ] = None,
    seed: Seed = 0,
    device: Device = "cpu",
    out: Annotated[Path, typer.Option(help="Folder for the solver and its report.")] = Path("out/fit"),
    as_json: AsJson = False,
) -> None:
    """Fit a correction of a large step; save a solver and a report."""
    check_device(device)
    need("matplotlib", "report")
    from attractor.report import hybrid as report

    start = time.perf_counter()
    with report_usage_errors():
        check_out(out)
        check_out(out / "solver")
        problem = _find(equation, option, parameters)
        dt, horizon = _require(
            equation, dt=_default(dt, problem.dt), horizon=_default(horizon, problem.horizon)
        )
        options = {"degree": degree, "precision": precision}
        with console.status("starting") as status, warnings.catch_warnings(record=True) as messages:
            warnings.simplefilter("always", UserWarning)
            solver = fit_solver(
                problem.rate, dt=dt, horizon=horizon, scheme=scheme, correction=correction,
                recipe=_recipe(recipe, epochs), width=width,
                trajectories=trajectories, sample=problem.sample, parameters=problem.parameters,
                fine_dt=fine_dt, period=_default(period, problem.period), budget=budget, data=data,
                seed=seed, device=device, out=out / "unfinished", progress=status.update,
                options={name: value for name, value in options.items() if value is not None},
                process_group="world",  # all launched processes take part in one fit
            )  # fmt: skip
            if Crew.of("world").rank:  # only the first process saves and reports
                return
            solver.save(out / "solver")
            discard_folder(out / "unfinished")
            status.update("test trajectories")
            test_results = report.test(solver, horizon, problem.sample, seed, problem.parameters)
    page = report.fit_page(solver, problem.name, test_results, out, typed_command())
    numbers = {
        **origin(),
        "equation": problem.name,
        "horizon": horizon,
        "test": test_results["rows"],
        "history": solver.history,
    }
    write_json(out / "fit.json", {**numbers, "curves": report.curves(test_results)})
    seconds = time.perf_counter() - start
    if as_json:
        print_json({**numbers, "solver": str(out / "solver"), "report": str(page), "seconds": seconds})
    for message in dict.fromkeys(str(w.message) for w in messages):
        say(message, style="yellow")
    _show_candidates(solver)
    say(repr(solver))
    table = make_table("100 new trajectories", "mean square error", "rate calls")
    for name, row in test_results["rows"].items():
        table.add_row(name, _number(row["error"]), str(row["rate_calls"]))
    console.print(table)
    say(f"{seconds:.0f} s. Solver: {out / 'solver'}")
    say(f"Report: {page}")
    own = f" --rate {equation}" if ":" in equation else ""
    own += f" --parameters {parameters}" if parameters else ""
    say(f"Does it pay? attractor compare {out / 'solver'}{own}")


@app.command(
    epilog=example(
        "attractor solve pretrained:elastic-pendulum --batch 3 --t-end 10",
        "attractor solve out/fit/solver --rate examples/duffing.py:rate",
    )
)
def solve(
    solver: SolverArgument,
    rate: RateOption = None,
    t_end: Annotated[
        float | None, typer.Option(help="Last time: a whole number of steps after --t0.")
    ] = None,
    t0: Annotated[float, typer.Option(help="First time.")] = 0.0,
    u0: Annotated[
        list[str] | None,
        typer.Option(help="Initial state, such as 1,0.5. Repeat the option to solve several."),
    ] = None,
    parameters: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBERS|FILE.py:FUNCTION",
            help="Parameters of a rate(t, u, p), such as 1,0.5, or their sampler. "
            "Default: parameters() beside the rate.",
        ),
    ] = None,
    batch: Annotated[
        int, typer.Option(min=1, help="Number of sampled initial states, if --u0 is not passed.")
    ] = 5,
    every: Annotated[int, typer.Option(min=1, help="Write every n-th state.")] = 1,
    guard: Annotated[
        bool, typer.Option(help="Replace steps outside of the fitted states by plain substeps.")
    ] = True,
    seed: Seed = 1,
    device: Device = "cpu",
    out: Annotated[Path, typer.Option(help="Folder for states and picture.")] = Path("out/solve"),
    as_json: AsJson = False,
) -> None:
    """Solve an equation with a saved solver; write CSV and a picture."""
    check_device(device)
    need("matplotlib", "report")
    from attractor.report import figures

    with report_usage_errors():
        check_out(out)
        values = None if parameters is None or ":" in parameters else _numbers(parameters)
        hybrid, problem = _load(solver, rate, device, parameters if values is None else None, values)
        if u0:
            states = [_state(text, hybrid, problem.sample) for text in u0]
            start = torch.tensor(states, dtype=torch.float64)
        else:
            generator = torch.Generator().manual_seed(seed)
            start = initial_states(hybrid.rate, problem.sample, batch, generator)
        if values is None:
            generator = torch.Generator().manual_seed(seed + 1)
            values = sampled_parameters(problem.parameters, len(start), generator)
        t_end = t_end if t_end is not None else t0 + (problem.horizon or 100 * hybrid.dt)
        with console.status("solving"), torch.no_grad():
            solution = hybrid.solve(start, t_end, t0, every, guard, parameters=values)
    nonfinite = torch.nonzero(~solution.ok).flatten().tolist()
    guard_share = None
    if solution.stats.guarded is not None:
        guard_share = solution.stats.guarded.double().mean().item() / max(
            1, round((t_end - t0) / hybrid.dt)
        )
    write_parts(out / "states.csv", _csv(solution))
    name = figures.literal(hybrid.rate_name)
    figure = figures.trajectories(solution.t.tolist(), solution.u.double().cpu().numpy(), name)
    figures.write(figure, out / "states.png")
    if as_json:
        print_json({
            "command": typed_command(), "solver": repr(hybrid), "t0": t0, "t_end": t_end,
            "parameters": None if values is None else values.tolist(),
            "final": solution.final.tolist(), "lost": nonfinite, "guarded": guard_share,
            "status": [Status(value).name.lower() for value in solution.status.tolist()],
            "rate_calls": solution.stats.rate_calls, "states": str(out / "states.csv"),
            "picture": str(out / "states.png"),
        })  # fmt: skip
    say(repr(solution))
    if guard_share is not None:
        say(f"Plain substeps replaced {guard_share:.1%} of the steps.")
    outside = torch.nonzero(solution.status == Status.EXTRAPOLATED).flatten().tolist()
    if outside:
        say(
            f"Trajectories {outside} left the trust region, and their error is not known; --guard "
            "replaces such steps by plain substeps.",
            style="yellow",
        )
    if nonfinite:
        say(f"Trajectories {nonfinite} became non-finite; they keep their last state.", style="yellow")
    say(f"States: {out / 'states.csv'}, picture: {out / 'states.png'}")
    if nonfinite:
        raise typer.Exit(1)


@app.command(
    epilog=example(
        "attractor compare pretrained:elastic-pendulum --no-peers",
        "attractor compare out/fit/solver --rate examples/duffing.py:rate",
    )
)
def compare(
    solver: Annotated[list[str], typer.Argument(metavar="SOLVER", help=SOLVER_HELP)],
    rate: RateOption = None,
    parameters: ParametersOption = None,
    horizon: Horizon = None,
    batch: Annotated[int, typer.Option(min=1, help="Number of trajectories solved at a time.")] = 1000,
    scheme: Annotated[
        list[str] | None,
        typer.Option(help="Plain scheme to compare with. Repeat the option to compare several."),
    ] = None,
    compile: Annotated[bool, typer.Option(help="Compile the hybrid and the plain schemes.")] = True,
    peers: Annotated[
        bool, typer.Option(help="Also compare with SciPy, torchdiffeq and diffrax.")
    ] = True,
    engine: Engine = None,
    workers: Workers = None,
    address: Address = None,
    threads: Threads = None,
    seed: Seed = 1,
    device: Device = "cpu",
    out: Annotated[Path, typer.Option(help="Folder for numbers and picture.")] = Path("out/compare"),
    strict: Annotated[bool, typer.Option(help="Exit with status 1 if the solver does not pay.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure whether a saved solver pays: error against time and rate calls.

    It is compared with plain schemes and the solvers of other libraries. With
    several solvers, or an engine, there is one line per solver, and solvers
    with results in the folder are not measured again.
    """
    if len(solver) > 1 or engine or workers or address:
        with report_usage_errors():
            check_out(out)
            folders = {name: _folder(name) for name in solver}
            loads = {name: _load(name, rate, "cpu", parameters)[1] for name in solver}
            horizons = {name: _default(horizon, problem.horizon) for name, problem in loads.items()}
            comparisons = _compare_many(
                folders, out, rate=_find(rate, None, parameters) if rate else None, horizon=horizons,
                batch=batch, schemes=scheme or SCHEMES, compile=compile, peers=peers,
                seed=seed, engine=engine, workers=workers, address=address, threads=threads,
                device=device,
            )  # fmt: skip
        if as_json:
            print_json([{"solver": name, **result.to_json()} for name, result in comparisons.items()])
        raise typer.Exit(strict and any(result.gain <= 1 for result in comparisons.values()))
    check_device(device)
    need("matplotlib", "report")
    from attractor.report import figures

    with report_usage_errors():
        check_out(out)
        hybrid, problem = _load(solver[0], rate, device, parameters)
        horizon = _default(horizon, _default(problem.horizon, 100 * hybrid.dt))
        with console.status("starting") as status:
            result = compare_solver(
                hybrid, horizon=horizon, batch=batch, sample=problem.sample,
                parameters=problem.parameters, schemes=scheme or SCHEMES, compile=compile, peers=peers,
                jax_rate=problem.jax_rate, seed=seed, progress=status.update,
            )  # fmt: skip
    write_json(out / "compare.json", {**origin(), **result.to_json()})
    figures.write(figures.work_precision(result, figures.literal(problem.name)), out / "compare.png")
    if as_json:
        files = {"numbers": str(out / "compare.json"), "picture": str(out / "compare.png")}
        print_json({**origin(), **result.to_json(), **files})
    table = make_table("", "", "mean square error", "milliseconds", "rate calls", words=2)
    table.title = f"{batch} trajectories, t = {horizon:g}"
    for point in (result.hybrid, *result.points):
        setting = f"{'rtol' if point.adaptive else 'dt'} {point.setting:.2g}"
        numbers = (_number(point.error), f"{point.seconds * 1e3:,.1f}", f"{point.rate_calls:,}")
        table.add_row(point.method, setting, *numbers, style="bold" if point is result.hybrid else "")
    console.print(table)
    say(result.verdict, style="bold")
    say(f"Numbers: {out / 'compare.json'}, picture: {out / 'compare.png'}")
    raise typer.Exit(strict and result.gain <= 1)


@app.command(
    epilog=example(
        "attractor tune elastic-pendulum --error 1e-6 --horizon 20",
        "attractor tune lorenz van-der-pol --error 1e-6 --horizon 5 --workers 2",
    )
)
def tune(
    equation: Annotated[list[str], typer.Argument(metavar="EQUATION", help=EQUATION_HELP)],
    error: Annotated[float, typer.Option(help="The error to reach, relative to the states.")],
    option: Option = None,
    parameters: ParametersOption = None,
    horizon: Annotated[float | None, typer.Option(help="Duration of a trajectory.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Number of trajectories solved at a time.")] = 1000,
    budget: Annotated[
        float, typer.Option(min=0, help="Seconds after which no new candidate is tried.")
    ] = 60.0,
    period: Annotated[float | None, typer.Option(help="Period of a rate that repeats in time.")] = None,
    compile: Annotated[bool, typer.Option(help="Also try compiled steps.")] = True,
    engine: Engine = None,
    workers: Workers = None,
    address: Address = None,
    threads: Threads = None,
    seed: Seed = 0,
    device: Device = "cpu",
    out: Annotated[Path, typer.Option(help="Folder for the solver.")] = Path("out/tune"),
    as_json: AsJson = False,
) -> None:
    """Find the fastest solver that reaches an error: plain, error-controlled or hybrid.

    With several equations, or an engine, each equation has a folder of its
    own in --out, and equations with results there are not tuned again. The
    exit status is 1 if the error was not reached for one of them.
    """
    if len(equation) > 1 or engine or workers or address:
        with report_usage_errors():
            check_out(out)
            if engine != "ray":  # its machines may have other devices
                check_device(device)
            problems = {}
            for name in dict.fromkeys(equation):
                found = _find(name, option, parameters)
                (own_horizon,) = _require(name, horizon=_default(horizon, found.horizon))
                problems[name] = Problem(
                    found.rate, own_horizon, found.sample, found.parameters,
                    _default(period, found.period),
                )  # fmt: skip
            results = _tune_many(
                problems, out, error=error, batch=batch, budget=budget, compile=compile, seed=seed,
                device=device, engine=engine, workers=workers, address=address, threads=threads,
            )  # fmt: skip
        if as_json:
            print_json([{"name": name, **row} for name, row in results.items()])
        raise typer.Exit(any("failure" in row for row in results.values()))
    check_device(device)
    with report_usage_errors():
        check_out(out)
        problem = _find(equation[0], option, parameters)
        (horizon,) = _require(equation[0], horizon=_default(horizon, problem.horizon))
        with console.status("starting") as status:
            solver = tune_solver(
                problem.rate, error=error, horizon=horizon, sample=problem.sample,
                parameters=problem.parameters, batch=batch, budget=budget, device=device,
                compile=compile, period=_default(period, problem.period), seed=seed,
                progress=status.update,
            )  # fmt: skip
        solver.save(out / "solver")
    report = {**origin(), "equation": problem.name, **solver.report.to_json()}
    write_json(out / "tune.json", report)
    if as_json:
        print_json({**report, "solver": str(out / "solver")})
    table = make_table("way", "time", "error", "rate calls")
    for row in solver.report.candidates:
        table.add_row(str(row), f"{1e3 * row.seconds:.3g} ms", _number(row.error), str(row.rate_calls))
    console.print(table)
    for line in str(solver.report).splitlines()[1 + len(solver.report.candidates) :]:
        say(line)
    say(f"{solver.report.seconds:.0f} s. Solver: {out / 'solver'}")


def _compare_many(
    solvers: dict[str, AnyPath], out: Path, rate: equations.Equation | None, **options: Any
) -> dict[str, Comparison]:
    keys = ("rate", "sample", "parameters", "jax_rate")
    own = {} if rate is None else {key: getattr(rate, key) for key in keys}
    comparisons: dict[str, Comparison] = {}
    with progress_bar() as bar:
        task = bar.add_task("comparing", total=len(solvers))
        for name, result in compare_all(solvers, out, **own, **options):
            comparisons[name] = result
            bar.update(task, advance=1, description=name)
    comparisons = {name: comparisons[name] for name in solvers}
    table = make_table("solver", "t", "mean square error", "m", "m*", "gain")
    for name, result in comparisons.items():
        numbers = (f"{x:.3g}" for x in (result.m, result.m_star, result.gain))
        table.add_row(name, f"{result.about['horizon']:g}", _number(result.hybrid.error), *numbers)
    console.print(table)
    for name, result in comparisons.items():
        say(f"{name}: {result.verdict}")
    say(f"Numbers: {out}")
    return comparisons


def _tune_many(problems: dict[str, Problem], out: Path, **options: Any) -> dict[str, dict[str, Any]]:
    """Tune many equations, save each solver with its report, and show a table; return the reports."""
    folders = {name: out / re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-") for name in problems}
    if len(set(folders.values())) < len(folders):
        raise ValueError(f"{', '.join(folders)} have folders of the same name; tune one of them alone")
    solvers: dict[str, TunedSolver | ValueError] = {}
    reports: dict[str, dict[str, Any]] = {}
    with progress_bar() as bar:
        task = bar.add_task("tuning", total=len(problems))
        for name, result in tune_all(problems, out, **options):
            solvers[name] = result
            bar.update(task, advance=1, description=name)
            if isinstance(result, ValueError):
                reports[name] = {"failure": str(result)}
                continue
            folder = folders[name]
            result.save(folder / "solver")
            report = {**origin(), "equation": name, **result.report.to_json()}
            write_json(folder / "tune.json", report)
            reports[name] = {**report, "solver": str(folder / "solver")}
    table = make_table("equation", "fastest solver", "time", "error", "speedup", words=2)
    for name in problems:
        if isinstance(solver := solvers[name], TunedSolver):
            best = solver.report.winner
            time_text = f"{1e3 * best.seconds:.3g} ms"
            table.add_row(
                name, str(best), time_text, _number(best.error), f"{solver.report.speedup:.3g}"
            )
        else:
            table.add_row(name, "none", "", "", "")
    console.print(table)
    for name in problems:
        if "failure" in reports[name]:
            say(f"{name}: {reports[name]['failure']}", style="yellow")
    say(f"Solvers and reports: {out}")
    return {name: reports[name] for name in problems}


def _folder(name: str) -> AnyPath:
    """Return the folder of a saved solver, or of a pretrained one of the library."""
    if name.startswith("pretrained:"):
        return pretrained.folder(name.removeprefix("pretrained:"))
    folder = path_of(name)
    if (folder / "manifest.json").exists():
        return folder
    if (folder / "solver" / "manifest.json").exists():
        raise ValueError(f"{folder} holds a fit; its solver is {folder / 'solver'}")
    there = "holds no solver"
    if isinstance(folder, Path) and not folder.is_dir():
        there = "is a file" if folder.exists() else "does not exist"
    names = ", ".join(f"pretrained:{n}" for n in pretrained.names())
    raise ValueError(
        f"{folder} {there}; give the folder that attractor fit has written, such as out/fit/solver, or "
        f"{names}"
    )


def _find(
    equation: str, option: list[str] | None, parameters: str | None, values: Any = None
) -> equations.Equation:
    """Return the equation, which has a sampler of its parameters unless their values are known."""
    problem = equations.find(equation, _pairs(option), parameters)
    if problem.takes_parameters and problem.parameters is None and values is None:
        raise ValueError(
            f"{equation} has parameters: write a function parameters(n, generator) that returns them "
            "[n, k] beside it, or name one with --parameters FILE.py:FUNCTION"
        )
    return problem


HORIZON = record({"horizon": number(5e-324)}, others=plain)  # schema of the file fit.json


def _load(
    name: str, rate: str | None, device: str, parameters: str | None = None, values: Any = None
) -> tuple[HybridSolver, equations.Equation]:
    if parameters is not None and rate is None:
        raise ValueError("--parameters belongs to an equation of your own; pass --rate as well")
    problem = _find(rate, None, parameters, values) if rate else None
    folder = _folder(name)
    hybrid = HybridSolver.load(folder, problem.rate if problem else None).to(device)
    if problem is None:
        name = next(n for n, cls in equations.names().items() if isinstance(hybrid.rate, cls))
        problem = equations.Equation(name, hybrid.rate, horizon=equations.find(name).horizon)
    fit_file = folder.parent / "fit.json" if isinstance(folder, Path) else None
    if fit_file is not None and fit_file.is_file():  # the default horizon is that of the fit
        with suppress(ValueError):
            content = read_json(fit_file)
            check(content, HORIZON, fit_file)
            problem = replace(problem, horizon=float(content["horizon"]))
    return hybrid, problem


def _default(value: float | None, default: Any) -> Any:
    """Return `given` unless it is None; 0 counts as given, so that it can be rejected later."""
    return default if value is None else value


def _pairs(texts: list[str] | None) -> dict[str, str]:
    pairs = {}
    for text in texts or []:
        key, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--option {text!r} must be KEY=VALUE, such as links=10")
        pairs[key] = value
    return pairs


def _require(equation: str, **values: float | None) -> list[float]:
    missing = [name for name, value in values.items() if value is None]
    if missing:
        meaning = {"dt": "--dt 0.1, the step", "horizon": "--horizon 10, the duration of a trajectory"}
        suggestion = ", and ".join(meaning[name] for name in missing)
        module_hint = f"; or write {' and '.join(f'{name} = ...' for name in missing)} beside the rate"
        raise ValueError(
            f"{equation} suggests no {' and no '.join(missing)}; add for example {suggestion}"
            f"{module_hint if ':' in equation else ''}"
        )
    return [value for value in values.values() if value is not None]


def _recipe(name: str, epochs: int | None) -> str | Paper:
    """Return the recipe of that name, or the paper's with another number of epochs."""
    if epochs is None:
        return name
    if name != Paper.name:
        raise ValueError(f"--epochs {epochs} belongs to --recipe paper, and the recipe is {name}")
    return Paper(epochs=epochs)


def _numbers(text: str) -> torch.Tensor:
    """Return parameters for all trajectories ``[k]`` from a comma-separated list of numbers."""
    try:
        return torch.tensor([float(x) for x in text.split(",")], dtype=torch.float64)
    except ValueError:
        raise ValueError(
            f"--parameters {text!r} must be comma-separated numbers, such as 1,0.5, or a sampler, "
            "FILE.py:FUNCTION"
        ) from None


def _state(text: str, solver: HybridSolver, sample: Any) -> list[float]:
    try:
        state = [float(x) for x in text.split(",")]
    except ValueError:
        raise ValueError(f"--u0 {text!r} must be comma-separated numbers, such as 1,0.5") from None
    if not all(map(math.isfinite, state)):
        raise ValueError(f"--u0 {text} is not finite; give a state that a trajectory can begin from")
    if solver.dim is not None and len(state) != solver.dim:
        one = initial_states(solver.rate, sample, 1, torch.Generator().manual_seed(0))[0]
        raise ValueError(
            f"--u0 {text} has {len(state)} numbers, but a state of {solver.rate_name} has {solver.dim}; "
            f"give all of them, such as --u0 {','.join(f'{x:.3g}' for x in one.tolist())}"
        )
    return state


def _show_candidates(solver: HybridSolver) -> None:
    rows = [row for row in solver.history if "scale" in row and "chosen" not in row]
    if not rows:
        return
    best = min(row["rollout"] for row in rows)
    table = make_table("candidate", "scale", "held-out mean square error", "s")
    for row in rows:
        name = f"{row['correction']}{', state too' if row.get('state') else ''}"
        style = "bold" if row["rollout"] == best else ""
        table.add_row(
            name, f"{row['scale']:g}", _number(row["rollout"]), f"{row['seconds']:.1f}", style=style
        )
    console.print(table)


def _number(x: float | None) -> str:
    return "lost" if x is None or x == float("inf") else f"{x:.1e}"


def _csv(solution: Any) -> Iterator[bytes]:
    """Yield a CSV table with one row per trajectory and time, one part per trajectory."""
    yield (
        ",".join(("trajectory", "t", *(f"u{i}" for i in range(solution.u.shape[-1])))) + "\n"
    ).encode()
    times = [repr(t) for t in solution.t.tolist()]
    for k in range(solution.u.shape[1]):
        rows = zip(times, solution.u[:, k].double().tolist())
        yield "".join(",".join((str(k), t, *map(repr, u))) + "\n" for t, u in rows).encode()
