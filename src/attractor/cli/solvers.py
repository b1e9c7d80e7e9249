"""Commands of solvers: trajectories, fit, solve, compare, tune."""

import math
import shutil
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from attractor import equations
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
    given_command,
    make_table,
    need,
    origin,
    print_json,
    progress_bar,
    say,
    told_as_usage,
)
from attractor.core import Status
from attractor.core.files import write_json, write_parts
from attractor.core.limits import read_json
from attractor.core.schema import check, number, plain, record
from attractor.ode import HybridSolver, Paper, make_trajectories, pretrained
from attractor.ode import fit as fit_solver
from attractor.ode.compare import SCHEMES
from attractor.ode.compare import compare as compare_solver
from attractor.ode.compare_saved import compare_all
from attractor.ode.comparison import Comparison
from attractor.ode.processes import Crew
from attractor.ode.samples import initial_states, sampled_parameters
from attractor.ode.tuning import tune as tune_solver

WHAT = "A built-in system, such as elastic-pendulum, or FILE.py:FUNCTION, or MODULE:FUNCTION."
Equation = Annotated[str, typer.Argument(metavar="EQUATION", help=WHAT)]
Option = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", metavar="KEY=VALUE", help="Of a built-in system: -o links=10."),
]
SAVED = "The folder of a saved solver, or pretrained:NAME, such as pretrained:elastic-pendulum."
Saved = Annotated[str, typer.Argument(metavar="SOLVER", help=SAVED)]
RateOption = Annotated[
    str | None,
    typer.Option(
        "--rate", metavar="FILE.py:FUNCTION", help="The equation it was fitted to, if it is your own."
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
    dt: Annotated[float | None, typer.Option(help="Between two states.")] = None,
    horizon: Horizon = None,
    fine_dt: Annotated[float | None, typer.Option(help="Of the reference; default: found.")] = None,
    period: Annotated[float | None, typer.Option(help="Of a rate that repeats in time.")] = None,
    shard_size: Annotated[int, typer.Option(min=1, help="Trajectories in a file.")] = 1000,
    engine: Engine = None,
    workers: Workers = None,
    address: Address = None,
    part: Part = "1/1",
    seed: Seed = 0,
    device: Device = "cpu",
    out: Annotated[Path, typer.Option(help="Folder for the files.")] = Path("out/trajectories"),
    as_json: AsJson = False,
) -> None:
    """Make fine trajectories for fit --data to learn from.

    What is in the folder already is not made again.
    """
    with told_as_usage():
        check_out(out)
        if engine != "ray":  # whose machines may have others
            check_device(device)
        found = _find(equation, option, parameters)
        dt, horizon = _needed(equation, dt=_or(dt, found.dt), horizon=_or(horizon, found.horizon))
        with progress_bar() as bar:
            task = bar.add_task("starting", total=None)

            def progress(line: str) -> None:
                _, done, _, total = line.split()
                bar.update(task, description=line, completed=int(done), total=int(total))

            made = make_trajectories(
                found.rate, out, trajectories=trajectories, dt=dt, horizon=horizon, sample=found.sample,
                parameters=found.parameters, fine_dt=fine_dt, period=_or(period, found.period),
                seed=seed, shard_size=shard_size, device=device, engine=engine, workers=workers,
                address=address, part=part, progress=progress,
            )  # fmt: skip
    left = made.missing()
    if as_json:
        print_json({
            "command": given_command(), "out": str(out), "trajectories": trajectories,
            "shards": made.plan.shards, "missing": len(left), "sha256": None if left else made.hash,
        })  # fmt: skip
    elif left:
        say(f"{len(left)} of {made.plan.shards} shards are still to come, in other parts.")
    else:
        say(f"{trajectories:,} trajectories, {made.plan.shards} shards, SHA-256 {made.hash}")
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
    dt: Annotated[float | None, typer.Option(help="The big step.")] = None,
    horizon: Horizon = None,
    scheme: Annotated[str, typer.Option(help="The scheme to correct; identity: none.")] = "rk4",
    correction: Annotated[
        str,
        typer.Option(help="auto, stages, polynomial, attns, neurvec, attns_m, csm, fsnet or linear."),
    ] = "auto",
    recipe: Annotated[str, typer.Option(help="default, or paper (slow).")] = "default",
    width: Annotated[int | None, typer.Option(min=0, help="Of the network.")] = None,
    degree: Annotated[int | None, typer.Option(min=1, help="Of the polynomial.")] = None,
    precision: Annotated[str | None, typer.Option(help="float32: a quicker network.")] = None,
    trajectories: Annotated[
        int, typer.Option(min=1, help="Number of trajectories to learn from.")
    ] = 1000,
    period: Annotated[float | None, typer.Option(help="Of a rate that repeats in time.")] = None,
    fine_dt: Annotated[
        float | None, typer.Option(help="Step of the fine data; found by refinement if not passed.")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Epochs of the paper's recipe (500).")
    ] = None,
    budget: Annotated[float | None, typer.Option(min=0, help="Seconds; then no new candidates.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder that attractor trajectories has made, to learn from.")
    ] = None,
    seed: Seed = 0,
    device: Device = "cpu",
    out: Annotated[Path, typer.Option(help="Folder for the solver and its report.")] = Path("out/fit"),
    as_json: AsJson = False,
) -> None:
    """Learn the error of a big step; save a solver and a report."""
    check_device(device)
    need("matplotlib", "report")
    from attractor.report import hybrid as report

    started = time.perf_counter()
    with told_as_usage():
        check_out(out)
        check_out(out / "solver")
        found = _find(equation, option, parameters)
        dt, horizon = _needed(equation, dt=_or(dt, found.dt), horizon=_or(horizon, found.horizon))
        options = {"degree": degree, "precision": precision}
        with console.status("starting") as status, warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", UserWarning)
            solver = fit_solver(
                found.rate, dt=dt, horizon=horizon, scheme=scheme, correction=correction,
                recipe=_recipe(recipe, epochs), width=width,
                trajectories=trajectories, sample=found.sample, parameters=found.parameters,
                fine_dt=fine_dt, period=_or(period, found.period), budget=budget, data=data, seed=seed,
                device=device, out=out / "unfinished", progress=status.update,
                options={name: value for name, value in options.items() if value is not None},
                process_group="world",  # a launched command is one fit
            )  # fmt: skip
            if Crew.of("world").rank:  # of several processes the first saves and reports
                return
            solver.save(out / "solver")
            shutil.rmtree(out / "unfinished", ignore_errors=True)
            status.update("test trajectories")
            tested = report.test(solver, horizon, found.sample, seed, found.parameters)
    page = report.fit_page(solver, found.name, tested, out, given_command())
    numbers = {
        **origin(),
        "equation": found.name,
        "horizon": horizon,
        "test": tested["rows"],
        "history": solver.history,
    }
    write_json(out / "fit.json", {**numbers, "curves": report.curves(tested)})
    seconds = time.perf_counter() - started
    if as_json:
        print_json({**numbers, "solver": str(out / "solver"), "report": str(page), "seconds": seconds})
    for message in dict.fromkeys(str(w.message) for w in warned):
        say(message, style="yellow")
    _show_candidates(solver)
    say(repr(solver))
    table = make_table("100 new trajectories", "mean square error", "rate calls")
    for name, row in tested["rows"].items():
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
    solver: Saved,
    rate: RateOption = None,
    t_end: Annotated[
        float | None, typer.Option(help="The last time: a whole number of steps after --t0.")
    ] = None,
    t0: Annotated[float, typer.Option(help="The first time.")] = 0.0,
    u0: Annotated[
        list[str] | None, typer.Option(help="An initial state, such as 1,0.5; may be repeated.")
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
    every: Annotated[int, typer.Option(min=1, help="Keep every n-th state.")] = 1,
    guard: Annotated[
        bool, typer.Option(help="Replace steps outside of the fitted states by plain substeps.")
    ] = True,
    seed: Seed = 1,
    device: Device = "cpu",
    out: Annotated[Path, typer.Option(help="Folder for states and picture.")] = Path("out/solve"),
    as_json: AsJson = False,
) -> None:
    """Follow states with a saved solver; write CSV and a picture."""
    check_device(device)
    need("matplotlib", "report")
    from attractor.report import figures

    with told_as_usage():
        check_out(out)
        values = None if parameters is None or ":" in parameters else _numbers(parameters)
        loaded, found = _load(solver, rate, device, parameters if values is None else None, values)
        if u0:
            states = [_state(text, loaded, found.sample) for text in u0]
            start = torch.tensor(states, dtype=torch.float64)
        else:
            generator = torch.Generator().manual_seed(seed)
            start = initial_states(loaded.rate, found.sample, batch, generator)
        if values is None:
            generator = torch.Generator().manual_seed(seed + 1)
            values = sampled_parameters(found.parameters, len(start), generator)
        t_end = t_end if t_end is not None else t0 + (found.horizon or 100 * loaded.dt)
        with console.status("solving"), torch.no_grad():
            solved = loaded.solve(start, t_end, t0, every, guard, parameters=values)
    lost = torch.nonzero(~solved.ok).flatten().tolist()
    guarded = None
    if solved.stats.guarded is not None:
        guarded = solved.stats.guarded.double().mean().item() / max(1, round((t_end - t0) / loaded.dt))
    write_parts(out / "states.csv", _csv(solved))
    name = figures.literal(loaded.rate_name)
    figure = figures.trajectories(solved.t.tolist(), solved.u.double().cpu().numpy(), name)
    figures.write(figure, out / "states.png")
    if as_json:
        print_json({
            "command": given_command(), "solver": repr(loaded), "t0": t0, "t_end": t_end,
            "parameters": None if values is None else values.tolist(),
            "final": solved.final.tolist(), "lost": lost, "guarded": guarded,
            "status": [Status(value).name.lower() for value in solved.status.tolist()],
            "rate_calls": solved.stats.rate_calls, "states": str(out / "states.csv"),
            "picture": str(out / "states.png"),
        })  # fmt: skip
    say(repr(solved))
    if guarded is not None:
        say(f"Plain substeps replaced {guarded:.1%} of the steps.")
    outside = torch.nonzero(solved.status == Status.EXTRAPOLATED).flatten().tolist()
    if outside:
        say(
            f"Trajectories {outside} left the trust region, and their error is not known; --guard "
            "replaces such steps by plain substeps.",
            style="yellow",
        )
    if lost:
        say(f"Trajectories {lost} became non-finite; they keep their last state.", style="yellow")
    say(f"States: {out / 'states.csv'}, picture: {out / 'states.png'}")
    if lost:
        raise typer.Exit(1)


@app.command(
    epilog=example(
        "attractor compare pretrained:elastic-pendulum --no-peers",
        "attractor compare out/fit/solver --rate examples/duffing.py:rate",
    )
)
def compare(
    solver: Annotated[list[str], typer.Argument(metavar="SOLVER", help=SAVED)],
    rate: RateOption = None,
    parameters: ParametersOption = None,
    horizon: Horizon = None,
    batch: Annotated[int, typer.Option(min=1, help="Number of trajectories solved at a time.")] = 1000,
    scheme: Annotated[
        list[str] | None, typer.Option(help="Plain schemes to compare with; may be repeated.")
    ] = None,
    compile: Annotated[bool, typer.Option(help="Compile the hybrid and its rivals.")] = True,
    peers: Annotated[bool, typer.Option(help="Also SciPy, torchdiffeq and diffrax.")] = True,
    engine: Engine = None,
    workers: Workers = None,
    address: Address = None,
    threads: Threads = None,
    seed: Seed = 1,
    device: Device = "cpu",
    out: Annotated[Path, typer.Option(help="Folder for numbers and picture.")] = Path("out/compare"),
    strict: Annotated[bool, typer.Option(help="End with status 1 if it does not pay.")] = False,
    as_json: AsJson = False,
) -> None:
    """Does a saved solver pay? Error against time and rate calls.

    Beside it are plain schemes and the solvers of other libraries. Several
    solvers, or an engine, give a line for each; what is in the folder is not
    measured again.
    """
    if len(solver) > 1 or engine or workers or address:
        with told_as_usage():
            check_out(out)
            folders = {name: _folder(name) for name in solver}
            loads = {name: _load(name, rate, "cpu", parameters)[1] for name in solver}
            fitted = {name: _or(horizon, found.horizon) for name, found in loads.items()}
            many = _compare_many(
                folders, out, rate=_find(rate, None, parameters) if rate else None, horizon=fitted,
                batch=batch, schemes=scheme or SCHEMES, compile=compile, peers=peers,
                seed=seed, engine=engine, workers=workers, address=address, threads=threads,
                device=device,
            )  # fmt: skip
        if as_json:
            print_json([{"solver": name, **found.to_json()} for name, found in many.items()])
        raise typer.Exit(strict and any(found.gain <= 1 for found in many.values()))
    check_device(device)
    need("matplotlib", "report")
    from attractor.report import figures

    with told_as_usage():
        check_out(out)
        loaded, found = _load(solver[0], rate, device, parameters)
        horizon = _or(horizon, _or(found.horizon, 100 * loaded.dt))
        with console.status("starting") as status:
            result = compare_solver(
                loaded, horizon=horizon, batch=batch, sample=found.sample, parameters=found.parameters,
                schemes=scheme or SCHEMES, compile=compile, peers=peers,
                jax_rate=found.jax_rate, seed=seed, progress=status.update,
            )  # fmt: skip
    write_json(out / "compare.json", {**origin(), **result.to_json()})
    figures.write(figures.work_precision(result, figures.literal(found.name)), out / "compare.png")
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


@app.command(epilog=example("attractor tune elastic-pendulum --error 1e-6 --horizon 20"))
def tune(
    equation: Equation,
    error: Annotated[float, typer.Option(help="The error to reach, relative to the states.")],
    option: Option = None,
    parameters: ParametersOption = None,
    horizon: Annotated[float | None, typer.Option(help="Duration of a trajectory.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Number of trajectories solved at a time.")] = 1000,
    budget: Annotated[float, typer.Option(min=0, help="Seconds; then nothing further is tried.")] = 60.0,
    period: Annotated[float | None, typer.Option(help="Of a rate that repeats in time.")] = None,
    compile: Annotated[bool, typer.Option(help="Also try compiled steps.")] = True,
    seed: Seed = 0,
    device: Device = "cpu",
    out: Annotated[Path, typer.Option(help="Folder for the solver.")] = Path("out/tune"),
    as_json: AsJson = False,
) -> None:
    """Find the fastest way to an error: plain schemes, error control and hybrids, timed here."""
    check_device(device)
    with told_as_usage():
        check_out(out)
        found = _find(equation, option, parameters)
        (horizon,) = _needed(equation, horizon=_or(horizon, found.horizon))
        with console.status("starting") as status:
            solver = tune_solver(
                found.rate, error=error, horizon=horizon, sample=found.sample,
                parameters=found.parameters, batch=batch, budget=budget, device=device,
                compile=compile, period=_or(period, found.period), seed=seed, progress=status.update,
            )  # fmt: skip
        solver.save(out / "solver")
    report = {**origin(), "equation": found.name, **solver.report.to_json()}
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
    solvers: dict[str, Path], out: Path, rate: equations.Equation | None, **options: Any
) -> dict[str, Comparison]:
    keys = ("rate", "sample", "parameters", "jax_rate")
    own = {} if rate is None else {key: getattr(rate, key) for key in keys}
    found: dict[str, Comparison] = {}
    with progress_bar() as bar:
        task = bar.add_task("comparing", total=len(solvers))
        for name, result in compare_all(solvers, out, **own, **options):
            found[name] = result
            bar.update(task, advance=1, description=name)
    found = {name: found[name] for name in solvers}
    table = make_table("solver", "t", "mean square error", "m", "m*", "gain")
    for name, result in found.items():
        numbers = (f"{x:.3g}" for x in (result.m, result.m_star, result.gain))
        table.add_row(name, f"{result.about['horizon']:g}", _number(result.hybrid.error), *numbers)
    console.print(table)
    for name, result in found.items():
        say(f"{name}: {result.verdict}")
    say(f"Numbers: {out}")
    return found


def _folder(name: str) -> Path:
    """The folder of a saved solver, or of one that comes with the library."""
    if name.startswith("pretrained:"):
        return pretrained.folder(name.removeprefix("pretrained:"))
    folder = Path(name)
    if (folder / "manifest.json").exists():
        return folder
    if (folder / "solver" / "manifest.json").exists():
        raise ValueError(f"{folder} holds a fit; its solver is {folder / 'solver'}")
    there = (
        "holds no solver" if folder.is_dir() else "is a file" if folder.exists() else "does not exist"
    )
    known = ", ".join(f"pretrained:{n}" for n in pretrained.names())
    raise ValueError(
        f"{folder} {there}; give the folder that attractor fit has written, such as out/fit/solver, or "
        f"{known}"
    )


def _find(
    equation: str, option: list[str] | None, parameters: str | None, values: Any = None
) -> equations.Equation:
    """Return the equation, which has a sampler of its parameters unless their values are known."""
    found = equations.find(equation, _pairs(option), parameters)
    if found.takes_parameters and found.parameters is None and values is None:
        raise ValueError(
            f"{equation} has parameters: write a function parameters(n, generator) that returns them "
            "[n, k] beside it, or name one with --parameters FILE.py:FUNCTION"
        )
    return found


HORIZON = record({"horizon": number(5e-324)}, others=plain)  # of the file fit.json


def _load(
    name: str, rate: str | None, device: str, parameters: str | None = None, values: Any = None
) -> tuple[HybridSolver, equations.Equation]:
    if parameters is not None and rate is None:
        raise ValueError("--parameters belongs to an equation of your own; pass --rate as well")
    found = _find(rate, None, parameters, values) if rate else None
    folder = _folder(name)
    loaded = HybridSolver.load(folder, found.rate if found else None).to(device)
    if found is None:
        name = next(n for n, cls in equations.names().items() if isinstance(loaded.rate, cls))
        found = equations.Equation(name, loaded.rate, horizon=equations.find(name).horizon)
    fitted = folder.parent / "fit.json"
    if fitted.is_file():  # as far as it was fitted, unless something else is asked for
        with suppress(ValueError):
            content = read_json(fitted)
            check(content, HORIZON, fitted)
            found = replace(found, horizon=float(content["horizon"]))
    return loaded, found


def _or(given: float | None, otherwise: Any) -> Any:
    """What was given, be it 0, which is then refused where it makes no sense."""
    return otherwise if given is None else given


def _pairs(texts: list[str] | None) -> dict[str, str]:
    found = {}
    for text in texts or []:
        key, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--option {text!r} must be KEY=VALUE, such as links=10")
        found[key] = value
    return found


def _needed(equation: str, **given: float | None) -> list[float]:
    missing = [name for name, value in given.items() if value is None]
    if missing:
        meaning = {"dt": "--dt 0.1, the big step", "horizon": "--horizon 10, how far trajectories go"}
        asked = ", and ".join(meaning[name] for name in missing)
        beside = f"; or write {' and '.join(f'{name} = ...' for name in missing)} beside the rate"
        raise ValueError(
            f"{equation} suggests no {' and no '.join(missing)}; add for example {asked}"
            f"{beside if ':' in equation else ''}"
        )
    return [value for value in given.values() if value is not None]


def _recipe(name: str, epochs: int | None) -> str | Paper:
    """Return the recipe of that name, or the paper's with another number of epochs."""
    if epochs is None:
        return name
    if name != Paper.name:
        raise ValueError(f"--epochs {epochs} belongs to --recipe paper, and the recipe is {name}")
    return Paper(epochs=epochs)


def _numbers(text: str) -> torch.Tensor:
    """Parameters for all trajectories ``[k]`` from numbers with commas between."""
    try:
        return torch.tensor([float(x) for x in text.split(",")], dtype=torch.float64)
    except ValueError:
        raise ValueError(
            f"--parameters {text!r} must be numbers with commas between, such as 1,0.5, or a sampler, "
            "FILE.py:FUNCTION"
        ) from None


def _state(text: str, solver: HybridSolver, sample: Any) -> list[float]:
    try:
        state = [float(x) for x in text.split(",")]
    except ValueError:
        raise ValueError(f"--u0 {text!r} must be numbers with commas between, such as 1,0.5") from None
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


def _csv(solved: Any) -> Iterator[bytes]:
    """Yield a CSV table with one row per trajectory and time, one part per trajectory."""
    yield (",".join(("trajectory", "t", *(f"u{i}" for i in range(solved.u.shape[-1])))) + "\n").encode()
    times = [repr(t) for t in solved.t.tolist()]
    for k in range(solved.u.shape[1]):
        rows = zip(times, solved.u[:, k].double().tolist())
        yield "".join(",".join((str(k), t, *map(repr, u))) + "\n" for t, u in rows).encode()
