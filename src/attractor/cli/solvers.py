"""Commands of saved solvers: solve, compare."""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attractor.cli.arguments import (
    SOLVER_HELP,
    Horizon,
    ParametersOption,
    RateOption,
    SolverArgument,
    default,
    find_equation,
    number_text,
)
from attractor.cli.engines import Address, Engine, Threads, Workers
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
    import torch

    from attractor.cli import equation_names as equations
    from attractor.ode import HybridSolver
    from attractor.ode.comparison import Comparison
    from attractor.storage.objects import AnyPath


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
    import torch

    from attractor.core import Status
    from attractor.ode.samples import initial_states, sampled_parameters
    from attractor.report import figures
    from attractor.storage.files import lock_folder, write_parts

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
    name = figures.literal(hybrid.rate_name)
    figure = figures.trajectories(solution.t.tolist(), solution.u.double().cpu().numpy(), name)
    with lock_folder(out):  # all files are of one command
        write_parts(out / "states.csv", _csv(solution))
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
    from attractor.ode.compare import SCHEMES
    from attractor.ode.compare import compare as compare_solver
    from attractor.storage.files import lock_folder, write_json

    if len(solver) > 1 or engine or workers or address:
        with report_usage_errors():
            check_out(out)
            folders = {name: _folder(name) for name in solver}
            loads = {name: _load(name, rate, "cpu", parameters)[1] for name in solver}
            horizons = {name: default(horizon, problem.horizon) for name, problem in loads.items()}
            comparisons = _compare_many(
                folders, out, rate=find_equation(rate, None, parameters) if rate else None,
                horizon=horizons, batch=batch, schemes=scheme or SCHEMES, compile=compile, peers=peers,
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
        horizon = default(horizon, default(problem.horizon, 100 * hybrid.dt))
        with console.status("starting") as status:
            result = compare_solver(
                hybrid, horizon=horizon, batch=batch, sample=problem.sample,
                parameters=problem.parameters, schemes=scheme or SCHEMES, compile=compile, peers=peers,
                jax_rate=problem.jax_rate, seed=seed, progress=status.update,
            )  # fmt: skip
    figure = figures.work_precision(result, figures.literal(problem.name))
    with lock_folder(out):  # all files are of one command
        write_json(out / "compare.json", {**origin(), **result.to_json()})
        figures.write(figure, out / "compare.png")
    if as_json:
        files = {"numbers": str(out / "compare.json"), "picture": str(out / "compare.png")}
        print_json({**origin(), **result.to_json(), **files})
    table = make_table("", "", "mean square error", "milliseconds", "rate calls", words=2)
    table.title = f"{batch} trajectories, t = {horizon:g}"
    for point in (result.hybrid, *result.points):
        setting = f"{'rtol' if point.adaptive else 'dt'} {point.setting:.2g}"
        numbers = (number_text(point.error), f"{point.seconds * 1e3:,.1f}", f"{point.rate_calls:,}")
        table.add_row(point.method, setting, *numbers, style="bold" if point is result.hybrid else "")
    console.print(table)
    say(result.verdict, style="bold")
    say(f"Numbers: {out / 'compare.json'}, picture: {out / 'compare.png'}")
    raise typer.Exit(strict and result.gain <= 1)


def _compare_many(
    solvers: "dict[str, AnyPath]", out: Path, rate: "equations.Equation | None", **options: Any
) -> "dict[str, Comparison]":
    """Compare several saved solvers, and show a table; return the comparisons by name."""
    from attractor.ode.compare_saved import compare_all

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
        table.add_row(name, f"{result.about['horizon']:g}", number_text(result.hybrid.error), *numbers)
    console.print(table)
    for name, result in comparisons.items():
        say(f"{name}: {result.verdict}")
    say(f"Numbers: {out}")
    return comparisons


def _folder(name: str) -> "AnyPath":
    """Return the folder of a saved solver, or of a pretrained one of the library."""
    from attractor.ode import pretrained
    from attractor.storage.objects import path_of

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


def _load(
    name: str, rate: str | None, device: str, parameters: str | None = None, values: Any = None
) -> "tuple[HybridSolver, equations.Equation]":
    """Return a saved solver and its equation, with the horizon of its fit if that is in a file."""
    from attractor.cli import equation_names as equations
    from attractor.ode import HybridSolver
    from attractor.storage.limits import read_json
    from attractor.storage.schema import check, number, plain, record

    if parameters is not None and rate is None:
        raise ValueError("--parameters belongs to an equation of your own; pass --rate as well")
    problem = find_equation(rate, None, parameters, values) if rate else None
    folder = _folder(name)
    hybrid = HybridSolver.load(folder, problem.rate if problem else None).to(device)
    if problem is None:
        name = next(n for n, cls in equations.names().items() if isinstance(hybrid.rate, cls))
        problem = equations.Equation(name, hybrid.rate, horizon=equations.find(name).horizon)
    fit_file = folder.parent / "fit.json" if isinstance(folder, Path) else None
    if fit_file is not None and fit_file.is_file():  # the default horizon is that of the fit
        with suppress(ValueError):
            content = read_json(fit_file)
            check(content, record({"horizon": number(5e-324)}, others=plain), fit_file)
            problem = replace(problem, horizon=float(content["horizon"]))
    return hybrid, problem


def _numbers(text: str) -> "torch.Tensor":
    """Return parameters for all trajectories ``[k]`` from a comma-separated list of numbers."""
    import torch

    try:
        return torch.tensor([float(x) for x in text.split(",")], dtype=torch.float64)
    except ValueError:
        raise ValueError(
            f"--parameters {text!r} must be comma-separated numbers, such as 1,0.5, or a sampler, "
            "FILE.py:FUNCTION"
        ) from None


def _state(text: str, solver: "HybridSolver", sample: Any) -> list[float]:
    """Return an initial state from a comma-separated list of numbers."""
    import torch

    from attractor.ode.samples import initial_states

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


def _csv(solution: Any) -> Iterator[bytes]:
    """Yield a CSV table with one row per trajectory and time, one part per trajectory."""
    yield (
        ",".join(("trajectory", "t", *(f"u{i}" for i in range(solution.u.shape[-1])))) + "\n"
    ).encode()
    times = [repr(t) for t in solution.t.tolist()]
    for k in range(solution.u.shape[1]):
        rows = zip(times, solution.u[:, k].double().tolist())
        yield "".join(",".join((str(k), t, *map(repr, u))) + "\n" for t, u in rows).encode()
