"""The solvers and the network that come with the library: fitted, tested and written, seconds each.

    python -m benchmarks.pretrained                   all of them
    python -m benchmarks.pretrained henon-heiles      one

A solver's card holds mean square errors over all states of 500 trajectories from a seed that no fit
uses, beside its plain scheme with the same step and with half of it. The network's card holds its
accuracy on the digits that it was not trained on.
"""

import sys
import time
from pathlib import Path
from typing import Any

import torch

from attractor import evolve, fit, residual, systems
from attractor.data import images
from attractor.ode import pretrained
from attractor.ode.trajectories import fine_trajectories
from attractor.residual import pretrained as networks
from attractor.storage.files import write_json
from attractor.train import Recipe, train
from benchmarks.pages import load
from benchmarks.results import save

TESTED, SEED = 500, 20_261_116
SOLVERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "elastic-pendulum": (systems.ElasticPendulum(), {"dt": 0.1, "horizon": 50.0, "trajectories": 500}),
    "pendulum-chain": (
        systems.PendulumChain(2),
        {"dt": 0.1, "horizon": 10.0, "trajectories": 1000},
    ),
    "henon-heiles": (systems.HenonHeiles(), {"dt": 0.25, "horizon": 50.0, "trajectories": 500}),
}
DIGITS = Recipe(epochs=25, batch=64, learning_rate=0.1, warmup=1.0, flip=False, crop=1, seed=0)


def solver(name: str) -> dict[str, Any]:
    system, options = SOLVERS[name]
    start = time.perf_counter()
    made = fit(system, scheme="rk4", width=512, seed=0, **options)
    seconds = time.perf_counter() - start
    made.save(pretrained.HOME / name)
    dt, horizon = options["dt"], options["horizon"]
    u0 = system.sample(TESTED, torch.Generator().manual_seed(SEED), torch.float64)
    steps = round(horizon / dt)
    truth = fine_trajectories(system, u0, dt, steps, 64)
    grid = lambda k: torch.arange(k * steps + 1, dtype=torch.float64) * (dt / k)
    with torch.no_grad():
        solved = {
            "hybrid": made.solve(u0, horizon, guard=False),
            "hybrid, guarded": made.solve(u0, horizon),
            "plain rk4": evolve(system, u0, grid(1), "rk4"),
            "plain rk4, half the step": evolve(system, u0, grid(2), "rk4", every=2),
        }
    card = {
        "name": name,
        "solver": repr(made),
        "system": repr(system),
        "scheme": "rk4",
        "dt": dt,
        "horizon": horizon,
        "correction": type(made.correction).__name__,
        "trajectories": options["trajectories"],
        "fit_error": made.fit_error,
        "tested": {
            "trajectories": TESTED,
            "seed": SEED,
            "mean_square_error": {k: (s.u - truth).square().mean().item() for k, s in solved.items()},
            "lost": {k: int((~s.ok).sum()) for k, s in solved.items()},
        },
        "bytes": size(pretrained.HOME / name),
        "command": f"python -m benchmarks.pretrained {name}",
    }
    write_json(pretrained.HOME / f"{name}.json", card)
    return {**card, "seconds": seconds}


def network(name: str) -> dict[str, Any]:
    start = time.perf_counter()
    torch.manual_seed(0)
    options = {"depth": 20, "width": 8, "in_channels": 1, "num_classes": 10, "gate": "se"}
    net = residual.resnet_cifar(**options)
    learn, test = images.load("digits", "train"), images.load("digits", "test")
    history = train(net, learn, test, DIGITS, device="cpu")
    networks.save(name, "resnet_cifar", options, net.eval())
    card = {
        "name": name,
        "network": "resnet_cifar",
        "options": options,
        "data": "digits",
        "accuracy": history.accuracy,
        "tested": len(test.labels),
        "bytes": size(networks.HOME / name),
        "command": f"python -m benchmarks.pretrained {name}",
    }
    write_json(networks.HOME / f"{name}.json", card)
    return {**card, "seconds": time.perf_counter() - start}


def size(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.iterdir())


def main() -> None:
    torch.set_num_threads(1)
    wanted = sys.argv[1:] or [*SOLVERS, "digits"]
    rows = []
    for name in wanted:
        rows.append(solver(name) if name in SOLVERS else network(name))
        told = rows[-1]["tested"]["mean_square_error"] if name in SOLVERS else rows[-1]["accuracy"]
        print(name, f"{rows[-1]['bytes']:,} bytes, {rows[-1]['seconds']:.0f} s:", told)
    others = [row for row in load("pretrained")["rows"] if row["name"] not in wanted]
    save("pretrained", {"rows": sorted([*rows, *others], key=lambda row: row["name"])})


if __name__ == "__main__":
    main()
