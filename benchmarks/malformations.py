"""Structured malformations of every format that the library reads: each is refused, or loads correctly.

A malformation is a valid file in which one field differs: another type, a huge number, NaN, a key that is
missing, extra or there twice, a value that is nested deeply, a tensor of another name, shape, dtype or with
other numbers. Hashes are made anew, so that the checks behind them have to find it. Each must raise the
error of the format, `CheckpointError` or for reports and results `ValueError`, or load and be usable; within
1 s of processor time and 100 MB.

    python -m benchmarks.malformations
"""

import contextlib
import json
import math
import random
import re
import shutil
import struct
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from attractor import CheckpointError, HybridSolver, corrections, fit, jobs, pdes, systems
from attractor.cli import network_names as networks
from attractor.common.versions import versions
from attractor.integrations import hub
from attractor.integrations.transformers_refinement import from_config
from attractor.ode import Paper, make_trajectories
from attractor.ode.algorithm1 import Checkpoints
from attractor.ode.candidates import Candidate
from attractor.ode.comparison import Comparison, Point
from attractor.ode.fine_data import FineData
from attractor.ode.patch_region import PatchRegion
from attractor.ode.ridge_search import RidgeSearch
from attractor.ode.trust import TrustRegion
from attractor.ode.tuning import TunedSolver, TuningReport
from attractor.ode.tuning_sweep import Problem, tune_all
from attractor.ode.unfinished import Unfinished
from attractor.report import runs as reports
from attractor.reproduce import results
from attractor.reproduce.experiment import Experiment, Scale
from attractor.reproduce.verdict import best
from attractor.residual.profile import StiffnessProfile
from attractor.storage.files import write_json
from attractor.storage.limits import read_json
from attractor.train import Recipe, checkpoint, train
from attractor.train.loop import restored
from attractor.train.recent_checkpoints import RecentCheckpoints
from attractor.train.tensors import write_tensors
from benchmarks.damage import clear, resident, sealed
from benchmarks.results import save

COUNT, SECONDS, MEGABYTES = 5000, 1.0, 100
KEPT = re.compile(r"[^.]+\.[0-9a-f]{16}\.json")  # a result of a job
TENSORS, CONFIG, MANIFEST = "tensors.safetensors", "config.json", "manifest.json"


@dataclass(frozen=True)
class Format:
    """A format: what writes one of it, what reads and uses it, the error for what it refuses."""

    make: Callable[[Path], Any]
    load: Callable[[Path], Any]
    error: type[Exception] = CheckpointError


# The formats


def small_solver(correction: nn.Module, scheme: str = "rk4", history: Any = None) -> HybridSolver:
    torch.manual_seed(0)
    trust = TrustRegion.around(torch.randn(50, 4, dtype=torch.float64))
    rows = [{"correction": "attns", "scale": 0.25, "rollout": math.inf, "seconds": 1.0},
            {"chosen": True, "correction": "attns", "rollout": 1e-6, "plain": 0.1, "seconds": 2.0}]  # fmt: skip
    solver = HybridSolver(systems.ElasticPendulum(), scheme, correction, 0.1, trust, history or rows)
    return solver.to(torch.float64)


def use_solver(folder: Path) -> None:
    solver = HybridSolver.load(folder)
    solver.step(torch.full((2, 4), 0.1, dtype=torch.float64), torch.zeros(()))
    assert isinstance(solver.fit_error, float | int | None)
    assert solver.about()


def use_spring_solver(folder: Path) -> None:
    def rate(t: Any, u: Any) -> Any:
        return torch.stack((u[..., 1], -u[..., 0]), -1)

    solver = HybridSolver.load(folder, rate)
    solver.step(torch.full((2, 2), 0.1), torch.zeros(()))


def make_own_solver(folder: Path) -> None:
    def rate(t: Any, u: Any) -> Any:
        return torch.stack((u[..., 1], -u[..., 0]), -1)

    HybridSolver(rate, "leapfrog", corrections.NeurVec(2, width=8), 0.1).save(folder)


def tuned(folder: Path, hybrid: bool) -> None:
    solver = small_solver(corrections.AttNS(4, width=8)) if hybrid else None
    winner = Candidate(
        "hybrid" if hybrid else "fixed", "rk4", 0.1, 8 if hybrid else None, error=1e-7, seconds=0.1
    )
    plain = Candidate("adaptive", "dop853", 1e-6, error=math.inf, seconds=0.2)
    report = TuningReport(1e-6, 1.0, 100, "cpu", (winner, plain), 1.0, 0.5, (1.0,) * 4, ("a note",))
    TunedSolver(systems.ElasticPendulum(), report, solver).save(folder)


def use_tuned(folder: Path) -> None:
    solver = TunedSolver.load(folder)
    assert all((repr(solver), str(solver.report), solver._repr_html_()))
    winner = solver.report.winner
    if winner.method != "adaptive" and winner.setting > 1e-3:
        u0 = torch.full((2, 4), 0.1, dtype=torch.float64)
        with contextlib.suppress(ValueError):  # of sizes that are no longer those of a state
            solver.solve(u0, min(2 * winner.setting, 1.0), compile=False)


def profile() -> StiffnessProfile:
    torch.manual_seed(0)
    stage = torch.tensor([0, 0, 1, 1])
    gates = torch.where(torch.arange(4) < 2, torch.rand(6, 4), torch.nan)
    initial = StiffnessProfile(torch.rand(6, 4), torch.rand(6, 4), gates, stage, ("a", "b", "c", "d"))
    made = StiffnessProfile(
        torch.rand(6, 4), torch.rand(6, 4), gates, stage, ("a", "b", "c", "d"), "network"
    )
    return made.beside(initial)


def use_profile(folder: Path) -> None:
    assert StiffnessProfile.load(folder).summary()


RECIPE = Recipe(epochs=3, batch=4, learning_rate=0.05, warmup=0, precision="fp32", crop=0)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


@cache
def batches() -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(4, 1, 6, 6, generator=generator), torch.arange(4) % 2) for _ in range(3)]


class StoppedError(Exception):
    """Ends a training where its checkpoint is to be."""


def make_training(folder: Path, within: bool) -> None:
    """Train until the middle of the second epoch, or its end; keep the last checkpoint alone."""
    steps = 0

    def loss(model: nn.Module, batch: Any) -> Any:
        nonlocal steps
        steps += model.training
        if steps > (5 if within else 6):
            raise StoppedError
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    recipe, kept = RECIPE, RecentCheckpoints(folder, "training")
    with contextlib.suppress(StoppedError):
        train(
            network(),
            batches(),
            None,
            recipe,
            loss=loss,
            out=folder,
            save_minutes=0.0 if within else 9.0,
        )
    for old in kept.paths()[1:]:
        shutil.rmtree(old)
    # A definition without the loss, which is a closure with a counter.
    content = json.loads((folder / "run.json").read_text())
    content["loss"] = LOSS
    write_json(folder / "run.json", content)
    from attractor.train.definition import Definition

    digest = Definition.from_json(content).digest
    path = kept.paths()[0]
    config = json.loads((path / CONFIG).read_text())
    write_json(path / CONFIG, {**config, "run": digest})
    sealed(path)


LOSS = {"": "default"}


def use_training(folder: Path) -> None:
    restored(network(), batches(), None, RECIPE, out=folder, device="cpu")


PENDULUM = systems.HarmonicOscillator()


def make_search(folder: Path) -> None:
    fit(PENDULUM, dt=0.1, horizon=1.0, trajectories=10, width=8, out=folder, fine_dt=0.05)


def make_paper(folder: Path) -> None:
    fit(PENDULUM, dt=0.1, horizon=1.0, trajectories=10, width=8, out=folder, fine_dt=0.05,
        recipe=Paper(epochs=2))  # fmt: skip


WHAT: dict[str, Any] = {}


def unfinished(folder: Path, unit: str) -> Unfinished:
    if unit not in WHAT:
        last = RecentCheckpoints(folder, "unfinished fit", unit).paths()[0]
        WHAT[unit] = json.loads((last / CONFIG).read_text())["what"]
    return Unfinished(folder, WHAT[unit], unit)


def use_search(folder: Path) -> None:
    pairs: Any = SimpleNamespace(u=torch.zeros(3, 2, dtype=torch.float64))
    options = {"period": None, "width": 8}
    search = RidgeSearch(
        pairs, SimpleNamespace(crew=None), options, 0, unfinished(folder, "candidate"), None, print,  # type: ignore[arg-type]
        torch.Generator(),
    )  # fmt: skip
    search._load()
    assert search.best is not None
    assert search.best.rollout >= 0


def use_paper(folder: Path) -> None:
    model = corrections.AttNS(2, width=8, dtype=torch.float32)
    optimiser = torch.optim.Adam(model.parameters())
    losses = Checkpoints(unfinished(folder, "epoch"), torch.Generator()).load(model, optimiser)
    assert all(isinstance(x, float) for x in losses)


def make_data(folder: Path) -> None:
    make_trajectories(
        systems.Lorenz(), folder, trajectories=5, dt=0.1, horizon=0.3, shard_size=3, fine_dt=0.05
    )


def make_data_with_parameters(folder: Path) -> None:
    make_trajectories(
        decay, folder, trajectories=5, dt=0.1, horizon=0.3, shard_size=3, fine_dt=0.05,
        sample=draw, parameters=draw,
    )  # fmt: skip


def decay(t: Any, u: Any, p: Any) -> Any:
    return -p * u


def draw(n: int, generator: Any = None) -> Any:
    return 1 + torch.rand(n, 1, generator=generator, dtype=torch.float64)


def use_data(folder: Path) -> None:
    data = FineData.open(folder)
    for run in data.runs():
        assert run.u.dtype == torch.float64
        assert bool(torch.isfinite(run.u).all())
    with contextlib.suppress(ValueError):  # the data are of another equation
        data.check_rate(decay if data.manifest["rate"].get("name") else systems.Lorenz())


def use_hub(folder: Path) -> None:
    net = hub.load(folder)
    assert not any(bool(p.isnan().any()) for p in net.parameters())


def use_weights(folder: Path) -> None:
    networks._load(network(), folder / "model.safetensors")


EXPERIMENT = Experiment(
    name="attns-example", paper="attns", place="Table 0", claim="b is more than a.",
    task="attractor.reproduce.tasks:echo", arms={"a": {"value": 1.0}, "b": {"value": 2.0}},
    scales={"smoke": Scale(seeds=(0, 1))}, metric="value", better="higher", numbers={}, judge=best("b"),
)  # fmt: skip


def make_results(folder: Path) -> None:
    made = {
        arm: {seed: {
            "task": EXPERIMENT.task, "config": EXPERIMENT.config(arm, "smoke"), "metrics": {"value": 1.0},
            "digest": results.digest(EXPERIMENT.task, EXPERIMENT.config(arm, "smoke")), "seconds": 1.5,
            "curves": {"loss": [1.0, 0.5]}, "data": {"train": "0" * 16}, "device": "cpu",
            "versions": versions(), "made_by": "attractor",
        } for seed in (0, 1)}
        for arm in ("a", "b")
    }  # fmt: skip
    results.write(folder / "results.json", EXPERIMENT.name, "smoke", made)


def use_results(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as place:
        found = results.merge(EXPERIMENT, "smoke", place, [folder / "results.json"])
        assert all(map(math.isfinite, found.values("a")))
        assert found.seconds() >= 0


def make_job(folder: Path) -> None:
    list(jobs.keep(jobs.Job("attractor.jobs.job:power", {"exponent": 2}), [1, 2], folder))


def use_job(folder: Path) -> None:
    found = jobs.keep(jobs.Job("attractor.jobs.job:power", {"exponent": 2}), [1, 2], folder)
    assert len([one.json() for one in found]) == 2


def use_sweep(folder: Path) -> None:
    problems = {"logistic": Problem(systems.Logistic(), 2.0)}
    options = {"error": 1e-3, "batch": 10, "budget": 0.0, "compile": False}
    (solver,) = dict(tune_all(problems, folder, **options)).values()
    assert isinstance(solver, ValueError) or str(solver.report)


def use_report(folder: Path) -> None:
    one = folder / "bench.json"
    assert reports.page(reports.find(one if one.exists() else folder))


def make_fit_report(folder: Path) -> None:
    small_solver(corrections.Stages(4, width=8)).save(folder / "solver")
    states = [[[0.1] * 4] * 2] * 3
    write_json(folder / "fit.json", {
        "command": "attractor fit", "versions": versions(), "equation": "elastic-pendulum", "horizon": 1.0,
        "test": {"hybrid": {"error": 1e-8, "rate_calls": 40}, "plain rk4": {"error": 1e-4, "rate_calls": 40}},
        "history": [{"correction": "attns", "scale": 0.25, "rollout": 1e-7, "seconds": 1.0},
                    {"chosen": True, "correction": "attns", "rollout": 1e-6, "worst": 1e-5, "plain": 0.1,
                     "median": 1e-7, "seconds": 2.0}],
        "curves": {"times": [0.0, 0.5, 1.0], "errors": {"hybrid": [0.0, 1e-8, 1e-7]}, "states": states},
    })  # fmt: skip


def make_probe_report(folder: Path) -> None:
    numbers = {
        "command": "attractor probe",
        "versions": versions(),
        "network": "n",
        "source": "s",
        "trained": True,
    }
    write_json(folder / "probe.json", {**numbers, **profile().numbers()})
    profile().save(folder / "profile")


def make_comparison(folder: Path) -> None:
    points = [Point("rk4", 0.1 / n, False, 10.0**-n, 0.1 * n, 40 * n, 0.2) for n in (1, 2, 3)]
    points.append(Point("SciPy DOP853", 1e-6, True, 1e-7, 1.0, 900, 1.0))
    about = {"rate": {"system": "ElasticPendulum", "options": {}}, "scheme": "rk4", "dt": 0.1, "batch": 10,
             "correction": {"name": "AttNS", "dim": 4}, "horizon": 1.0, "dtype": "float64", "device": "cpu",
             "threads": 1, "compiled": True, "fit_seconds": 3.0}  # fmt: skip
    hybrid = Point("hybrid", 0.1, False, 1e-5, 0.05, 40, 0.3)
    Comparison(hybrid, tuple(points), math.inf, 1.3, points[1], about).save(folder)


def make_training_report(folder: Path) -> None:
    rows = [{"epoch": i, "lr": 0.1, "train_loss": 1 / i, "valid_loss": None} for i in (1, 2, 3)]
    times = [{"epoch": i, "seconds": 1.0, "images_per_second": 10.0} for i in (1, 2, 3)]
    folder.mkdir(parents=True)
    for name, lines in (("log.jsonl", rows), ("times.jsonl", times)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    checkpoint.save(
        folder / "epoch-0003",
        "training",
        {},
        {"recipe": asdict(RECIPE), "steps": 3, "versions": versions()},
    )


def make_benchmark(folder: Path) -> None:
    timed = lambda tokens: {"seconds": 0.1 * tokens, "ratio": 1.1}
    rows = [
        {"kind": kind, "tokens": n, "forward": timed(n), "both": timed(n)}
        for kind in ("a", "b")
        for n in (64, 128)
    ]
    write_json(folder / "bench.json", {
        "command": "attractor bench", "versions": versions(), "machine": {"cores": 2}, "rows": rows, "rest": {"a": 1},
    })  # fmt: skip


def make_model_config(folder: Path) -> None:
    write_json(folder / CONFIG, {"model_type": "gpt2", "pde_attention": {
        "pde": "advection_diffusion", "coefficients": {"alpha": [0.1, 0.2], "beta": 0.1}, "steps": 4, "dt": 1.0,
        "per_head": True, "learn": True, "walls": "mask", "version": 2, "modules": 2,
    }})  # fmt: skip


def use_model_config(folder: Path) -> None:
    content = read_json(folder / CONFIG)
    if not isinstance(content, dict) or "pde_attention" not in content:
        raise ValueError("there is no PDE")
    assert from_config(content["pde_attention"])


def make_hub_network(folder: Path) -> None:
    hub.network("resnet_cifar", depth=11, width=2, gate="se").save_pretrained(folder)


def make_hub_equation(folder: Path) -> None:
    sizes = {"vocabulary": 9, "classes": 2, "dim": 8, "heads": 2, "layers": 1, "hidden": 8, "steps": 2}
    hub.network("Classifier", **sizes, pde=pdes.Wave(c=0.2)).save_pretrained(folder)


def make_weights(folder: Path) -> None:
    write_tensors(folder / "model.safetensors", dict(network().state_dict()))


def make_field_solver(folder: Path) -> None:
    system = systems.Burgers(4)
    correction = corrections.Patches(4, radius=1, degree=2, dtype=torch.float64)
    trust = PatchRegion.around(system.sample(8, dtype=torch.float64), correction)
    HybridSolver(system, "identity", correction, 0.1, trust).save(folder)


FORMATS: dict[str, Format] = {
    "solver: slope": Format(lambda f: small_solver(corrections.AttNS(4, width=8)).save(f), use_solver),
    "solver: stages": Format(
        lambda f: small_solver(corrections.Stages(4, stages=6), "dopri5").save(f), use_solver
    ),
    "solver: polynomial": Format(
        lambda f: small_solver(corrections.Polynomial(4, 3), "identity").save(f), use_solver
    ),
    "solver: patches": Format(make_field_solver, use_solver),
    "solver: own equation": Format(make_own_solver, use_spring_solver),
    "tuned solver": Format(lambda f: tuned(f, False), use_tuned),
    "tuned hybrid": Format(lambda f: tuned(f, True), use_tuned),
    "stiffness profile": Format(lambda f: profile().save(f), use_profile),
    "training": Format(lambda f: make_training(f, False), use_training),
    "training within an epoch": Format(lambda f: make_training(f, True), use_training),
    "unfinished search": Format(make_search, use_search),
    "unfinished training": Format(make_paper, use_paper),
    "fine data": Format(make_data, use_data),
    "fine data with parameters": Format(make_data_with_parameters, use_data),
    "hub: network": Format(make_hub_network, use_hub),
    "hub: equation": Format(make_hub_equation, use_hub),
    "weights": Format(make_weights, use_weights, ValueError),
    "PDE of a transformer": Format(make_model_config, use_model_config, ValueError),
    "results": Format(make_results, use_results, ValueError),
    "jobs": Format(make_job, use_job, ValueError),
    "sweep of tune": Format(use_sweep, use_sweep, ValueError),
    "report: fit": Format(make_fit_report, use_report, ValueError),
    "report: probe": Format(make_probe_report, use_report, ValueError),
    "report: comparison": Format(make_comparison, use_report, ValueError),
    "report: training": Format(make_training_report, use_report, ValueError),
    "report: benchmark": Format(make_benchmark, use_report, ValueError),
}


# Malformations

MARK = "@@malformation@@"
VALUES = (
    "null", "true", "false", '""', '"text"', '"1"', "3", "-1", "0", "2.5", "-0.0", "[]", "{}", "[1]", '{"a": 1}',
    '"os.system"', '"\\ud800"', '"../../x"', "[null]", "[[]]", '["a", "b"]',
)  # fmt: skip
HUGE = ("1e308", "-1e308", "1e999", "-1e999", "1e-320", str(2**31), str(2**63), str(-(2**63)), str(10**30),
        "9" * 400, "9" * 5000, '"' + "9" * 400 + '"', '"0x1p+99999"', '"1e999999999"')  # fmt: skip
CONSTANTS = ("NaN", "Infinity", "-Infinity")
LONG = ('"' + "x" * 100_000 + '"', "[" + "0," * 50_000 + "0]")


def nodes(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all values in a JSON document, lists of many items by their first and last."""
    found = [path] if path else []
    if isinstance(value, dict):
        return found + [one for key, part in value.items() for one in nodes(part, (*path, key))]
    if isinstance(value, list):
        return found + [one for i in {0, len(value) - 1} if value for one in nodes(value[i], (*path, i))]
    return found


def is_json(text: str) -> bool:
    """Whether a text holds a list or an object as JSON, such as the history of a fit."""
    try:
        return isinstance(json.loads(text), dict | list)
    except ValueError:
        return False


def malformed(text: str, draw: random.Random) -> tuple[str, str]:
    """Return a JSON document in which one field differs, and what was done."""
    content = json.loads(text)
    path = draw.choice(nodes(content) or [()])
    if not path:
        return draw.choice(VALUES), "whole"
    parent = content
    for key in path[:-1]:
        parent = parent[key]
    key, value = path[-1], parent[path[-1]]
    kinds = ["type", "type", "huge", "constant", "deep", "long"]
    kinds += ["missing", "extra", "twice"] if isinstance(parent, dict) else ["shorter", "longer"]
    if isinstance(value, str) and is_json(value):
        kinds = ["inside"]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        kinds += ["changed", "as text"]
    kind = draw.choice(kinds)
    raw = MARK
    if kind == "inside":
        parent[key], kind = malformed(value, draw)
        kind = f"inside, {kind}"
    elif kind == "missing":
        del parent[key]
    elif kind == "extra":
        parent["extra"], raw = MARK, draw.choice(VALUES)
    elif kind == "twice":
        parent[MARK] = value
        return json.dumps(content).replace(json.dumps(MARK), json.dumps(key)), f"{kind} {path}"
    elif kind == "shorter":
        del parent[key]
    elif kind == "longer":
        parent.append(value)
    elif kind == "as text":
        parent[key] = str(value)
    else:
        parent[key] = MARK
        raw = {
            "type": lambda: draw.choice(VALUES),
            "huge": lambda: draw.choice(HUGE),
            "constant": lambda: draw.choice(CONSTANTS),
            "deep": lambda: (n := draw.choice((3, 70, 900, 5000))) and "[" * n + "]" * n,
            "long": lambda: draw.choice(LONG),
            "changed": lambda: str(draw.choice((value + 1, value - 1, -value, 2 * value, value / 3))),
        }[kind]()
    return json.dumps(content).replace(json.dumps(MARK), raw), f"{kind} {path} {raw[:20]}"


DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "I64": torch.int64,
    "U8": torch.uint8,
}


def malformed_tensors(path: Path, draw: random.Random) -> str:
    """Change one tensor, or one field of the header, of a safetensors file."""
    header, numbers = parts_of(path)
    metadata = header.pop("__metadata__", None)
    if (metadata and draw.random() < 0.3) or (draw.random() < 0.3 and header):
        if metadata and draw.random() < 0.7:
            text, how = malformed(metadata["about"], draw)
            metadata["about"] = text
            whole = {"__metadata__": metadata, **header}
        else:
            text, how = malformed(json.dumps(header), draw)
            put(path, text.encode(), numbers)
            return f"header, {how}"
        put(path, json.dumps(whole).encode(), numbers)
        return f"metadata, {how}"
    tensors = {name: torch.frombuffer(bytearray(numbers), dtype=torch.uint8)[slice(*entry["data_offsets"])]
               .clone().view(KINDS[entry["dtype"]]).view(entry["shape"]) if math.prod(entry["shape"]) else
               torch.zeros(entry["shape"], dtype=KINDS[entry["dtype"]]) for name, entry in header.items()}  # fmt: skip
    if not tensors:
        tensors = {"first": torch.zeros(1)}
    name = draw.choice(sorted(tensors))
    x = tensors[name]
    how = draw.choice(("NaN", "infinite", "huge", "rank", "transposed", "shorter", "dtype", "missing", "extra",
                       "renamed", "empty", "negative", "log"))  # fmt: skip
    if how == "log" and "log" in tensors:
        rows = [row for row in bytes(tensors["log"].tolist()).decode().splitlines() if row] or ["{}"]
        line = draw.randrange(len(rows))
        rows[line], more = malformed(rows[line], draw)
        tensors["log"] = torch.tensor(list("\n".join(rows).encode("utf8", "replace")), dtype=torch.uint8)
        how = f"log, {more}"
    elif how in ("NaN", "infinite", "huge") and x.is_floating_point() and x.numel():
        x.view(-1)[draw.randrange(x.numel())] = {"NaN": math.nan, "infinite": -math.inf}.get(
            how, torch.finfo(x.dtype).max
        )
    elif how == "rank":
        tensors[name] = x[None]
    elif how == "transposed":
        tensors[name] = (
            x.movedim(0, -1).contiguous() if x.dim() > 1 else x.expand(2, *x.shape).contiguous()
        )
    elif how == "shorter":
        tensors[name] = x[1:].clone() if x.dim() else x.reshape(1)
    elif how == "dtype":
        tensors[name] = x.to(draw.choice([*DTYPES.values()]))
    elif how == "missing":
        del tensors[name]
    elif how == "extra":
        tensors[draw.choice((f"{name}.extra", "extra", ""))] = torch.ones(3)
    elif how == "renamed":
        tensors[name + "x"] = tensors.pop(name)
    elif how == "empty":
        tensors[name] = x.new_zeros(0)
    else:
        tensors[name] = -x if x.dtype.is_signed else x.flip(0) if x.dim() else x
    if metadata is None:
        write_tensors(path, tensors)
    else:  # a shard, whose hash of the numbers is made anew
        from safetensors.torch import save_file

        about = json.loads(metadata["about"])
        total = sha256()
        for key in ("u", "parameters"):
            if key in tensors:
                total.update(tensors[key].numpy().tobytes())
        save_file(tensors, path, {"about": json.dumps({**about, "sha256": total.hexdigest()})})
    return f"{name} {how}"


KINDS = {**DTYPES, "BOOL": torch.bool, "BF16": torch.bfloat16}


def parts_of(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return header and numbers of a safetensors file."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def put(path: Path, header: bytes, numbers: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header + numbers)


def malform(folder: Path, draw: random.Random) -> str:
    """Change one field of one file of a folder, and make hashes anew; return what was done."""
    path = draw.choice(
        sorted(p for p in folder.rglob("*.*") if p.suffix in (".json", ".jsonl", ".safetensors"))
    )
    name = str(path.relative_to(folder))
    if path.suffix == ".safetensors":
        how = malformed_tensors(path, draw)
    elif path.suffix == ".jsonl":
        rows = path.read_text().splitlines()
        line = draw.randrange(len(rows))
        rows[line], how = malformed(rows[line], draw)
        path.write_text("\n".join(rows) + "\n")
    else:
        text, how = malformed(path.read_text(), draw)
        path.write_bytes(text.encode("utf8", "surrogatepass"))
        undone = "twice" in how or "'own'" in how  # a seal would undo these
        if KEPT.fullmatch(path.name):  # the name contains the hash
            name, _, ending = path.name.split(".")
            path.rename(path.with_name(f"{name}.{sha256(path.read_bytes()).hexdigest()[:16]}.{ending}"))
        if path.name == MANIFEST and (path.parent / TENSORS).exists() and not undone:
            with contextlib.suppress(Exception):  # what has no hashes cannot be sealed
                seal_manifest(path)
    if path.name != MANIFEST and (path.parent / MANIFEST).exists() and (path.parent / TENSORS).exists():
        sealed(path.parent)
    return f"{name}: {how}"


def seal_manifest(path: Path) -> None:
    """Make the manifest's hash of itself anew."""
    from attractor.storage.files import json_bytes

    manifest = json.loads(path.read_bytes())
    manifest.pop("own")
    own = sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    path.write_bytes(json_bytes({**manifest, "own": own}))


# What it takes


def campaign(count: int, seed: int = 1, names: Sequence[str] = tuple(FORMATS)) -> dict[str, Any]:
    """Malform so many files, as many of each format; return counts, failures and the worst of them."""
    draw, found = random.Random(seed), dict[str, Counter[str]]()
    failures: list[str] = []
    slowest: tuple[float, str] = (0.0, "")
    largest: tuple[float, str] = (0.0, "")
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole, copy = Path(place) / "whole", Path(place) / "copy"
        for number, name in enumerate(names):
            FORMATS[name].make(whole / str(number))
            FORMATS[name].load(whole / str(number))  # what is imported late is imported now
            found[name] = Counter()
        for i in range(count):
            number = i % len(names)
            name = names[number]
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(whole / str(number), copy)
            label = f"{name}: {malform(copy, draw)}"
            clear()
            before, began = resident()[0], time.process_time()
            result = outcome(FORMATS[name], copy)
            seconds, megabytes = time.process_time() - began, (resident()[1] - before) / 1e6
            slowest, largest = max(slowest, (seconds, label)), max(largest, (megabytes, label))
            if result not in ("refused", "loaded"):
                failures.append(f"{label}: {result}")
                result = "failed"
            elif seconds > SECONDS or megabytes > MEGABYTES:
                failures.append(f"{label}: {result} in {seconds:.2f} s and {megabytes:.0f} MB")
            found[name][result] += 1
    totals = sum(found.values(), Counter[str]())
    return {
        "count": count, "seed": seed, **{key: totals[key] for key in ("refused", "loaded", "failed")},
        "formats": {name: dict(own) for name, own in found.items()}, "failures": failures,
        "slowest": {"seconds": slowest[0], "malformation": slowest[1]},
        "largest": {"megabytes": largest[0], "malformation": largest[1]},
    }  # fmt: skip


def outcome(format: Format, folder: Path) -> str:
    """Load a malformed folder: "refused", "loaded", or what went wrong."""
    try:
        format.load(folder)
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        if not isinstance(error, format.error) or isinstance(error, UnicodeError | json.JSONDecodeError):
            return told[:300]
        if "\n" in str(error) or len(str(error)) > 2000:
            return f"a message of several lines or {len(str(error)):,} characters: {told[:300]}"
        return "refused"
    return "loaded"


def main() -> None:
    found = campaign(COUNT)
    for key, value in found.items():
        print(f"{key}: {value if not isinstance(value, list) else value[:20] or 'none'}")
    save("malformations", found)


if __name__ == "__main__":
    main()
