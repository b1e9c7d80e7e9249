"""Commands that make solvers: trajectories, fit, tune."""

import re
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attractor.cli.arguments import (
    EQUATION_HELP,
    Equation,
    Horizon,
    Option,
    ParametersOption,
    default,
    find_equation,
    number_text,
    require,
)
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

if TYPE_CHECKING:
    from attractor.ode import HybridSolver, Paper
    from attractor.ode.tuning import TunedSolver
    from attractor.ode.tuning_sweep import Problem


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
    from attractor.ode import make_trajectories

    with report_usage_errors():
        check_out(out)
        if engine != "ray":  # its machines may have other devices
            check_device(device)
        problem = find_equation(equation, option, parameters)
        dt, horizon = require(
            equation, dt=default(dt, problem.dt), horizon=default(horizon, problem.horizon)
        )
        with progress_bar() as bar:
            task = bar.add_task("starting", total=None)

            def progress(line: str) -> None:
                _, position, _, total = line.split()
                bar.update(task, description=line, completed=int(position), total=int(total))

            dataset = make_trajectories(
                problem.rate, out, trajectories=trajectories, dt=dt, horizon=horizon,
                sample=problem.sample, parameters=problem.parameters, fine_dt=fine_dt,
                period=default(period, problem.period), seed=seed, shard_size=shard_size,
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
    from attractor.ode import fit as fit_solver
    from attractor.ode.processes import Crew
    from attractor.report import hybrid as report
    from attractor.storage.files import FolderLockedError, discard_folder, lock_folder, write_json

    start = time.perf_counter()
    with report_usage_errors():
        check_out(out)
        check_out(out / "solver")
        problem = find_equation(equation, option, parameters)
        dt, horizon = require(
            equation, dt=default(dt, problem.dt), horizon=default(horizon, problem.horizon)
        )
        options = {"degree": degree, "precision": precision}
        with console.status("starting") as status, warnings.catch_warnings(record=True) as messages:
            warnings.simplefilter("always", UserWarning)
            solver = fit_solver(
                problem.rate, dt=dt, horizon=horizon, scheme=scheme, correction=correction,
                recipe=_recipe(recipe, epochs), width=width,
                trajectories=trajectories, sample=problem.sample, parameters=problem.parameters,
                fine_dt=fine_dt, period=default(period, problem.period), budget=budget, data=data,
                seed=seed, device=device, out=out / "unfinished", progress=status.update,
                options={name: value for name, value in options.items() if value is not None},
                process_group="world",  # all launched processes take part in one fit
            )  # fmt: skip
            if Crew.of("world").rank:  # only the first process saves and reports
                return
            status.update("test trajectories")
            test_results = report.test(solver, horizon, problem.sample, seed, problem.parameters)
    numbers = {
        **origin(),
        "equation": problem.name,
        "horizon": horizon,
        "test": test_results["rows"],
        "history": solver.history,
    }
    with lock_folder(out):  # all files are of one command
        solver.save(out / "solver")
        page = report.fit_page(solver, problem.name, test_results, out, typed_command())
        write_json(out / "fit.json", {**numbers, "curves": report.curves(test_results)})
    with suppress(FolderLockedError):  # the same command, in another process
        discard_folder(out / "unfinished", wait=0.0)
    seconds = time.perf_counter() - start
    if as_json:
        print_json({**numbers, "solver": str(out / "solver"), "report": str(page), "seconds": seconds})
    for message in dict.fromkeys(str(w.message) for w in messages):
        say(message, style="yellow")
    _show_candidates(solver)
    say(repr(solver))
    table = make_table("100 new trajectories", "mean square error", "rate calls")
    for name, row in test_results["rows"].items():
        table.add_row(name, number_text(row["error"]), str(row["rate_calls"]))
    console.print(table)
    say(f"{seconds:.0f} s. Solver: {out / 'solver'}")
    say(f"Report: {page}")
    own = f" --rate {equation}" if ":" in equation else ""
    own += f" --parameters {parameters}" if parameters else ""
    say(f"Does it pay? attractor compare {out / 'solver'}{own}")


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
    """Find the fastest solver that reaches an error, plain or hybrid.

    Each of several equations has a folder in --out, and is not tuned again.
    """
    from attractor.ode.tuning import tune as tune_solver
    from attractor.ode.tuning_sweep import Problem

    if len(equation) > 1 or engine or workers or address:
        with report_usage_errors():
            check_out(out)
            if engine != "ray":  # its machines may have other devices
                check_device(device)
            problems = {}
            for name in dict.fromkeys(equation):
                own = find_equation(name, option, parameters)
                (own_horizon,) = require(name, horizon=default(horizon, own.horizon))
                problems[name] = Problem(
                    own.rate, own_horizon, own.sample, own.parameters, default(period, own.period)
                )
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
        problem = find_equation(equation[0], option, parameters)
        (horizon,) = require(equation[0], horizon=default(horizon, problem.horizon))
        with console.status("starting") as status:
            solver = tune_solver(
                problem.rate, error=error, horizon=horizon, sample=problem.sample,
                parameters=problem.parameters, batch=batch, budget=budget, device=device,
                compile=compile, period=default(period, problem.period), seed=seed,
                progress=status.update,
            )  # fmt: skip
    report = {**origin(), "equation": problem.name, **solver.report.to_json()}
    _save_tuned(solver, out, report)
    if as_json:
        print_json({**report, "solver": str(out / "solver")})
    table = make_table("way", "time", "error", "rate calls")
    for row in solver.report.candidates:
        table.add_row(
            str(row), f"{1e3 * row.seconds:.3g} ms", number_text(row.error), str(row.rate_calls)
        )
    console.print(table)
    for line in str(solver.report).splitlines()[1 + len(solver.report.candidates) :]:
        say(line)
    say(f"{solver.report.seconds:.0f} s. Solver: {out / 'solver'}")


def _tune_many(problems: "dict[str, Problem]", out: Path, **options: Any) -> dict[str, dict[str, Any]]:
    """Tune many equations, save each solver with its report, and show a table; return the reports."""
    from attractor.ode.tuning import TunedSolver
    from attractor.ode.tuning_sweep import tune_all

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
            report = {**origin(), "equation": name, **result.report.to_json()}
            _save_tuned(result, folder, report)
            reports[name] = {**report, "solver": str(folder / "solver")}
    table = make_table("equation", "fastest solver", "time", "error", "speedup", words=2)
    for name in problems:
        if isinstance(solver := solvers[name], TunedSolver):
            best = solver.report.winner
            time_text = f"{1e3 * best.seconds:.3g} ms"
            table.add_row(
                name, str(best), time_text, number_text(best.error), f"{solver.report.speedup:.3g}"
            )
        else:
            table.add_row(name, "none", "", "", "")
    console.print(table)
    for name in problems:
        if "failure" in reports[name]:
            say(f"{name}: {reports[name]['failure']}", style="yellow")
    say(f"Solvers and reports: {out}")
    return {name: reports[name] for name in problems}


def _save_tuned(solver: "TunedSolver", folder: Path, report: dict[str, Any]) -> None:
    """Write a solver and its report, which are of one command."""
    from attractor.storage.files import lock_folder, write_json

    with lock_folder(folder):
        solver.save(folder / "solver")
        write_json(folder / "tune.json", report)


def _recipe(name: str, epochs: int | None) -> "str | Paper":
    """Return the recipe of that name, or the paper's with another number of epochs."""
    from attractor.ode import Paper

    if epochs is None:
        return name
    if name != Paper.name:
        raise ValueError(f"--epochs {epochs} belongs to --recipe paper, and the recipe is {name}")
    return Paper(epochs=epochs)


def _show_candidates(solver: "HybridSolver") -> None:
    rows = [row for row in solver.history if "scale" in row and "chosen" not in row]
    if not rows:
        return
    best = min(row["rollout"] for row in rows)
    table = make_table("candidate", "scale", "held-out mean square error", "s")
    for row in rows:
        name = f"{row['correction']}{', state too' if row.get('state') else ''}"
        style = "bold" if row["rollout"] == best else ""
        table.add_row(
            name, f"{row['scale']:g}", number_text(row["rollout"]), f"{row['seconds']:.1f}", style=style
        )
    console.print(table)
