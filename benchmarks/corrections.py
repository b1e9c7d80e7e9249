"""All six corrections on the three systems of the AttNS paper, at 50 % and 100 % of the data.

The default recipe from 2,000 trajectories (1,000 at 50 %) with five seeds; the paper's recipe from all
of Table 4's trajectories (20,000; spring-mass 5,000) at 1 % of its iterations (5 of 500 epochs) with
three. Mean square error over all states of 500 test trajectories of a seed no fit uses; `lost` where a
trajectory became non-finite. Minutes with a GPU and 16 cores, hours on two:

    python -m benchmarks.corrections --device cuda --workers 8
"""

import argparse
import json
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

import torch

from attractor import evolve, fit, systems
from attractor.ode import Paper
from attractor.ode.corrections import BY_NAME
from attractor.ode.trajectories import Plan, Run, fine_trajectories, make_run
from benchmarks.results import FOLDER, save

# name, system, dt, horizon, trajectories in Table 4, the paper's factor of the loss
CASES = [
    ("spring-mass", systems.SpringMass(20), 0.2, 20.0, 5_000, 1.0),
    ("2-link pendulum", systems.PendulumChain(2), 0.1, 10.0, 20_000, 1e6),
    ("elastic pendulum", systems.ElasticPendulum(), 0.1, 50.0, 20_000, 1e6),
]
EPOCHS = 5  # of 500
RESULTS = FOLDER / "corrections.json"
SEEDS = {"default": range(5), "paper": range(3)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--device", default="cpu", help="for the paper's recipe; the other stays on the CPU"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes of two threads each")
    parser.add_argument("--again", action="store_true", help="do not go on with what is in results/")
    device, workers = (arguments := parser.parse_args()).device, arguments.workers
    rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() and not arguments.again else []
    done = {(r["system"], r["recipe"], int(seed)) for r in rows for seed in r["errors"]}
    tasks = [(c, r, seed, device) for r in ("paper", "default") for c in reversed(range(len(CASES)))
             for seed in SEEDS[r] if (CASES[c][0], r, seed) not in done]  # fmt: skip
    with ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (2,)) as pool:
        for task in as_completed([pool.submit(run, *task) for task in tasks]):
            for new in task.result():
                key = ("system", "recipe", "correction", "data")
                old = next((r for r in rows if all(r[k] == new[k] for k in key)), None)
                if old is None:
                    rows.append(new)
                else:
                    old["errors"] |= new["errors"]
            save("corrections", {"epochs": EPOCHS, "rows": rows})
    for row in rows:
        told = ", ".join("lost" if e is None else f"{e:.1e}" for e in row["errors"].values())
        print(f"{row['system']:17} {row['recipe']:8} {row['correction']:8} {row['data']:4.0%}  {told}")


def run(case: int, recipe: str, seed: int, device: str) -> list[dict]:
    """One seed of one recipe on one system: rows by correction and share of the data."""
    warnings.filterwarnings("ignore", message="the correction makes held-out")
    device = "cpu" if recipe == "default" else device
    name, system, dt, horizon, count, loss_scale = CASES[case]
    steps = round(horizon / dt)
    u0 = system.sample(500, torch.Generator().manual_seed(20_261_115), torch.float64, device)
    truth = fine_trajectories(system, u0, dt, steps, 64)
    t = torch.arange(steps + 1, dtype=torch.float64, device=device) * dt
    plain = (evolve(system, u0, t).u - truth).square().mean().item()
    plan = Plan(2_000 if recipe == "default" else count, dt, steps, 16, seed, 20_000)
    whole = make_run(system, None, plan, 0, device)
    rows = []
    for correction, part in [(c, p) for c in BY_NAME for p in (0.5, 1.0)]:
        solver = fit(
            system, dt=dt, horizon=horizon, correction=correction, seed=seed, device=device,
            recipe=Paper(EPOCHS, loss_scale) if recipe == "paper" else recipe,
            data=[Run(0.0, whole.u[:, : round(part * plan.trajectories)])], fine_dt=dt / 16,
        )  # fmt: skip
        with torch.no_grad():
            solved = solver.solve(u0.to(next(solver.correction.parameters()).dtype), horizon)
        good = bool(solved.ok.all())
        error = (solved.u.double() - truth).square().mean().item() if good else None
        rows.append({"system": name, "plain": plain, "recipe": recipe, "correction": correction,
                     "data": part, "device": _name(device), "errors": {str(seed): error}})  # fmt: skip
    print(f"{name}, {recipe}, seed {seed} is done", flush=True)
    return rows


def _name(device: str) -> str:
    return torch.cuda.get_device_name() if device.startswith("cuda") else "cpu"


if __name__ == "__main__":
    main()
