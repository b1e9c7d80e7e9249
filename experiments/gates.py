"""What a gate is worth: one network, one recipe, several seeds, and how stiff the features become.

The StepNet paper's Table 1 (gates), Table 4 (what StepNet's Adaptor sees, and its structure) and
Figures 2, 3, 6 and 7 (TNS, its surface, the proportion, and TNS against accuracy). Every network is
probed before and after training on the same test images, with both step conventions: TNS with the gate
as the step is larger even at random initialisation, so a comparison without that value says little.

    python -m experiments.gates                                            # digits, minutes on a CPU
    python -m experiments.gates --data cifar10 --folder FOLDER --device cuda
    python -m experiments.gates --data cifar10 --folder FOLDER --device cuda --table4

FOLDER (or ATTRACTOR_DATA) holds CIFAR-10. With --workers several networks train at a time, each in its
own process on the same device; how long an epoch takes is then not told. Trainings that are in the
results with the same recipe are not run again; results of another recipe are not overwritten. Accuracy
is that of the last epoch on the test set, which nothing was chosen on.
"""

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from attractor.core.files import write_json
from attractor.data import images
from attractor.residual import StiffnessProfile, probe, resnet_cifar
from attractor.residual.profile import Comparison
from attractor.train import SHORT, Recipe, train

RESULTS = Path(__file__).parent / "results"
GATES = ("none", "se", "eca", "iebn", "srm", "stepnet")
TABLE4: dict[str, dict[str, Any]] = {
    "stepnet, sees x_t": {"inputs": "x"},
    "stepnet, sees x_t+1": {"inputs": "next"},
    "stepnet, sees f": {"inputs": "difference"},
    "adaptor a": {"adaptor": "a"},
    "adaptor b": {"adaptor": "b"},
    "adaptor c": {"adaptor": "c"},
    "adaptor d": {"adaptor": "d"},
}
# ResNet164, 164 epochs, five seeds: what the paper reports for CIFAR-10 (Tables 1 and 4).
PAPER = {
    "none": 93.35, "se": 94.26, "cbam": 93.91, "eca": 94.15, "sem": 94.52, "srm": 94.59, "fca": 94.66,
    "iebn": 94.70, "stepnet": 95.14, "stepnet, sees x_t": 94.59, "stepnet, sees x_t+1": 94.32,
    "stepnet, sees f": 94.69, "adaptor a": 94.39, "adaptor b": 94.05, "adaptor c": 94.19,
    "adaptor d": 94.92,
}  # fmt: skip
DIGITS = Recipe(epochs=10, batch=64, learning_rate=0.1, warmup=2, crop=1, flip=False)
PROBED = 256  # test images
COLUMNS = [
    (step, end, when)
    for step in ("one", "gate")
    for end, when in (("", "trained"), ("_initial", "initial"))
]


def arms(gates: list[str], table4: bool) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name -> gate and its options."""
    found: dict[str, tuple[str, dict[str, Any]]] = {gate: (gate, {}) for gate in gates}
    if table4:
        found |= {name: ("stepnet", options) for name, options in TABLE4.items()}
    return found


def run(
    gate: str,
    options: dict[str, Any],
    recipe: Recipe,
    network: dict[str, Any],
    data: tuple[str, str | None],
    device: str,
    keep: Path | None,
) -> dict[str, Any]:
    """Train one network on the data of that name and folder, and probe it before and after."""
    sets = load(*data)
    torch.manual_seed(recipe.seed)
    model = resnet_cifar(gate=gate, gate_options=options, **network).to(device)
    batches = sets[1].normalised(slice(PROBED)).to(device).split(128)
    initial = probe(model, batches, settle=True)
    began = time.perf_counter()
    history = train(model, *sets, recipe, device=device)
    seconds = time.perf_counter() - began
    alone = multiprocessing.parent_process() is None  # a worker shares the device with others
    trained = probe(model, batches).beside(initial)
    if keep is not None:
        trained.save(keep)
    return {
        "accuracy": history.accuracy,
        "device": named(device),
        "seconds": seconds,
        "seconds_per_epoch": statistics.median(history.column("seconds")) if alone else None,
        "parameters": sum(p.numel() for p in model.parameters()),
        "stiffness": {"initial": stiffness(initial), "trained": stiffness(trained)},
        "history": [
            {k: row[k] for k in ("train_loss", "train_accuracy", "valid_accuracy")} for row in history
        ],
    }


@cache
def load(name: str, folder: str | None) -> tuple[images.ImageSet, images.ImageSet]:
    """Training and test images; every process reads them once."""
    return images.load(name, "train", folder), images.load(name, "test", folder)


def run_all(
    jobs: dict[tuple[str, int], tuple[Any, ...]], workers: int, budget: float
) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Name, seed and result of every training, as they end; after `budget` seconds no other begins."""
    began = time.perf_counter()
    late = lambda: time.perf_counter() - began > budget
    if workers == 1:
        for job, arguments in jobs.items():
            if not late():
                yield *job, run(*arguments)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(run, *arguments): job for job, arguments in jobs.items()}
        for done in as_completed(running):
            if late():
                pool.shutdown(wait=False, cancel_futures=True)
            if not done.cancelled():
                yield *running[done], done.result()


def stiffness(profile: StiffnessProfile) -> dict[str, Any]:
    """Both conventions' numbers: step 1, which the network takes, and the gate as the step."""
    found: dict[str, Any] = {}
    for step in ("one", "gate"):
        own = profile.with_step(step)
        found[step] = {
            "tns": float(own.tns), "mean_nsi": float(own.nsi.mean()),
            "proportion": float(own.proportion(0.5, 0.5)),
        }  # fmt: skip
    return found


def summary(results: dict[str, Any]) -> list[dict[str, Any]]:
    """A row an arm: mean and spread over seeds, and the gain over no gate at the same seeds.

    A gain's error is the standard error of the mean of its differences, seed by seed. (Of two or three
    it is itself uncertain: two differences that happen to agree make it small.)
    """
    plain = results["arms"].get("none", {})
    rows = []
    for name, seeds in results["arms"].items():
        accuracy = [100 * seeds[s]["accuracy"] for s in seeds]
        gains = [100 * (seeds[s]["accuracy"] - plain[s]["accuracy"]) for s in seeds if s in plain]
        if name == "none":
            gains = []
        alone = [s["seconds_per_epoch"] for s in seeds.values() if s["seconds_per_epoch"] is not None]
        row: dict[str, Any] = {
            "arm": name, "seeds": len(accuracy), "accuracy": statistics.mean(accuracy),
            "spread": statistics.stdev(accuracy) if len(accuracy) > 1 else None,
            "gain": statistics.mean(gains) if gains else None,
            "gains": gains,
            "gain_error": statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else None,
            "parameters": next(iter(seeds.values()))["parameters"],
            "seconds_per_epoch": statistics.median(alone) if alone else None,
        }  # fmt: skip
        for when in ("initial", "trained"):
            for step in ("one", "gate"):
                values = [s["stiffness"][when][step]["tns"] for s in seeds.values()]
                row[f"tns_{when}_{step}"] = statistics.mean(values)
        rows.append(row)
    return rows


def compared(results: dict[str, Any]) -> dict[str, Comparison]:
    """Rank correlation of accuracy with TNS, over all trained models and over the arms' means.

    Its p is that of orders drawn at random, as if all were independent; models of one arm are not, so of
    the two only the arms' can be taken at its word.
    """
    models = [
        {"name": f"{name}, seed {seed}", "accuracy": 100 * run["accuracy"]}
        | {f"{step}{end}": run["stiffness"][when][step]["tns"] for step, end, when in COLUMNS}
        for name, seeds in results["arms"].items()
        for seed, run in seeds.items()
    ]
    means = [
        {"name": row["arm"], "accuracy": row["accuracy"]}
        | {f"{step}{end}": row[f"tns_{when}_{step}"] for step, end, when in COLUMNS}
        for row in summary(results)
    ]
    return {"models": Comparison.of(models), "arms": Comparison.of(means)}


def show(results: dict[str, Any]) -> None:
    """The table, on the terminal."""
    print(f"{'':22}{'accuracy':>16}{'gain':>16}{'paper':>8}{'s/epoch':>9}   TNS before -> after", end="")
    print(" (step 1; step F)")
    for r in summary(results):
        name, spread, gain, epoch = r["arm"], "", "", ""
        if r["seconds_per_epoch"] is not None:
            epoch = f"{r['seconds_per_epoch']:.2f}"
        if r["spread"] is not None:
            spread = f" ± {r['spread']:.2f}"
        if r["gain"] is not None:
            error = "" if r["gain_error"] is None else f" ± {r['gain_error']:.2f}"
            gain = f"{r['gain']:+.2f}{error}"
        paper = f"{PAPER[name] - PAPER['none']:+.2f}" if name in PAPER and name != "none" else ""
        print(
            f"{name:22}{r['accuracy']:>8.2f}{spread:>8}{gain:>16}{paper:>8}"
            f"{epoch:>9}   "
            f"{r['tns_initial_one']:.3f} -> {r['tns_trained_one']:.3f}; "
            f"{r['tns_initial_gate']:.3f} -> {r['tns_trained_gate']:.3f}"
        )
    for over, found in compared(results).items():
        for column, c in found.correlations.items():
            print(
                f"TNS ({column}), accuracy, {len(found.rows)} {over}: Kendall {c['kendall']:+.2f} "
                f"(p {c['kendall_p']:.2g}), Spearman {c['spearman']:+.2f} (p {c['spearman_p']:.2g})"
            )


def pictures(results: dict[str, Any], profiles: dict[str, StiffnessProfile], path: Path) -> list[Path]:
    """Accuracy against TNS; NSI, surfaces and proportions of the networks whose profiles are kept."""
    from attractor.report import stiffness as draw
    from attractor.report.figures import write

    name = lambda what: path.with_name(f"{path.stem}_{what}.png")
    made = [write(compared(results)["arms"].plot(), name("tns"))]
    if profiles:
        made.append(write(draw.nsi(profiles, ("one", "gate")), name("nsi")))
        made.append(write(draw.surfaces(profiles, ("one", "gate")), name("surface")))
        made.append(write(draw.proportions(profiles, ("one", "gate")), name("proportion")))
    return made


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Train what is missing, write results and pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", default="digits", choices=["digits", "cifar10", "cifar100"])
    parser.add_argument("--folder", help="of the data; default ATTRACTOR_DATA")
    parser.add_argument("--depth", type=int, help="9 n + 2; default 29 for digits, 83 for CIFAR")
    parser.add_argument("--epochs", type=int, help="default 10 for digits, 30 for CIFAR")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--gates", nargs="+", help="default: four for digits, six for CIFAR")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--table4", action="store_true", help="StepNet's variants as well")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--capture", default="auto", choices=["auto", "none", "graph", "compile"])
    parser.add_argument("--workers", type=int, default=1, help="trainings at a time")
    parser.add_argument(
        "--budget",
        type=float,
        default=float("inf"),
        help="seconds after which no further training begins",
    )
    parser.add_argument("--out", type=Path, help="default: experiments/results/gates_DATA.json")
    given = parser.parse_args(argv)
    digits = given.data == "digits"
    recipe = DIGITS if digits else SHORT
    changes = {k: v for k in ("epochs", "batch", "capture") if (v := getattr(given, k)) is not None}
    recipe = replace(recipe, **changes)
    data = load(given.data, given.folder)
    network = {
        "depth": given.depth or (29 if digits else 83), "width": 8 if digits else 16,
        "num_classes": len(data[0].classes), "in_channels": data[0].images.shape[1],
    }  # fmt: skip
    gates = given.gates or (["none", "se", "eca", "stepnet"] if digits else list(GATES))
    path = given.out or RESULTS / f"gates_{given.data}.json"
    setting = json.loads(json.dumps({
        "data": data[0].name, "training_images": len(data[0]), "network": network, "probed": PROBED,
        "recipe": {k: v for k, v in asdict(recipe).items() if k not in ("seed", "capture", "mixup")},
    }))  # fmt: skip
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    other = [k for k in setting if results and results.get(k) != setting[k]]
    if other:
        parser.error(f"{path} holds results with another {', '.join(other)}; give --out another file")
    results = {**setting, "arms": {}, **results}
    profiles = path.with_name(f"{path.stem}_profiles")
    began, jobs, wanted = time.perf_counter(), {}, arms(gates, given.table4)
    for seed in range(given.seeds):
        for name, (gate, options) in wanted.items():
            if str(seed) not in results["arms"].get(name, {}):
                keep = profiles / name if seed == 0 and name in ("none", "se", "stepnet") else None
                own, source = replace(recipe, seed=seed), (given.data, given.folder)
                jobs[name, seed] = gate, options, own, network, source, given.device, keep
    for name, seed, found in run_all(jobs, given.workers, given.budget):
        mine = results["arms"].get(name, {}) | {str(seed): found}
        results["arms"][name] = dict(sorted(mine.items()))
        results["arms"] = {k: results["arms"][k] for k in (*PAPER, *wanted) if k in results["arms"]} | (
            results["arms"]
        )  # in the order of the paper's tables, whoever came first
        results |= {"device": found["device"], "torch": torch.__version__, "cores": os.cpu_count()}
        write_json(path, results)
        print(
            f"{name}, seed {seed}: {100 * found['accuracy']:.2f} % [{found['seconds']:.0f} s]",
            flush=True,
        )
    results |= {
        "seconds": sum(run["seconds"] for seeds in results["arms"].values() for run in seeds.values()),
        "summary": summary(results),
        "correlations": {over: found.correlations for over, found in compared(results).items()},
    }
    write_json(path, results)
    show(results)
    kept = {
        name: StiffnessProfile.load(profiles / name)
        for name in ("none", "se", "stepnet")
        if (profiles / name).exists()
    }
    try:
        made = pictures(results, kept, path)
    except ImportError as error:
        print(f"no pictures: {error}")
    else:
        print(*made, sep="\n")
    print(f"{time.perf_counter() - began:.0f} s. {path}")
    return results


def named(device: str) -> str:
    """The device's own name."""
    return torch.cuda.get_device_name() if device.startswith("cuda") else platform.processor() or device


if __name__ == "__main__":
    main()
