"""All six corrections on the three systems of the AttNS paper, at 50 % and 100 % of the data.

The default recipe from 2,000 trajectories (1,000 at 50 %) with five seeds; the paper's recipe from all
of Table 4's trajectories (20,000; spring-mass 5,000) at 1 % of its iterations (5 of 500 epochs) with
three. Mean square error over all states of 500 test trajectories of a seed no fit uses; `lost` where a
trajectory became non-finite. Seconds on a GPU, the better part of a day on two cores:

    python -m benchmarks.corrections --device cuda
"""

import argparse
import time
import warnings

import torch

from attractor import evolve, fit, systems
from attractor.ode.corrections import BY_NAME
from attractor.ode.trajectories import Plan, Run, fine_trajectories, make_run
from benchmarks.results import save

# name, system, dt, horizon, trajectories in Table 4, the paper's factor of the loss
CASES = [
    ("spring-mass", systems.SpringMass(20), 0.2, 20.0, 5_000, 1.0),
    ("2-link pendulum", systems.PendulumChain(2), 0.1, 10.0, 20_000, 1e6),
    ("elastic pendulum", systems.ElasticPendulum(), 0.1, 50.0, 20_000, 1e6),
]
EPOCHS = 5  # of 500
SEEDS = {"default": range(5), "paper": range(3)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=1e9, help="start nothing new after so long")
    arguments = parser.parse_args()
    device, start = arguments.device, time.perf_counter()
    warnings.filterwarnings("ignore", message="the correction makes held-out")
    rows = []
    for name, system, dt, horizon, count, loss_scale in CASES:
        steps = round(horizon / dt)
        generator = torch.Generator().manual_seed(20_261_115)
        u0 = system.sample(500, generator, torch.float64, device)
        truth = fine_trajectories(system, u0, dt, steps, 64)
        t = torch.arange(steps + 1, dtype=torch.float64, device=device) * dt
        plain = evolve(system, u0, t)
        plain_error = (plain.u - truth).square().mean().item()
        print(f"{name}: plain {plain_error:.1e}  [{time.perf_counter() - start:.0f} s]", flush=True)
        for recipe, seeds in SEEDS.items():
            found: dict[tuple[str, float], list] = {(c, p): [] for c in BY_NAME for p in (0.5, 1.0)}
            for seed in seeds:
                plan = Plan(2_000 if recipe == "default" else count, dt, steps, 16, seed, 20_000)
                whole = make_run(system, None, plan, 0, device)
                for (correction, part), errors in found.items():
                    if time.perf_counter() - start > arguments.seconds:
                        continue
                    data = [Run(0.0, whole.u[:, : round(part * plan.count)])]
                    solver = fit(
                        system, dt=dt, horizon=horizon, correction=correction, recipe=recipe, data=data,
                        seed=seed, device=device, fine_dt=dt / 16, epochs=EPOCHS, loss_scale=loss_scale,
                    )  # fmt: skip
                    own = next(solver.correction.parameters()).dtype
                    with torch.no_grad():
                        solved = solver.solve(u0.to(own), horizon)
                    good = bool(solved.ok.all())
                    errors.append((solved.u.double() - truth).square().mean().item() if good else None)
            for (correction, part), errors in found.items():
                rows.append({"system": name, "plain": plain_error, "recipe": recipe,
                             "correction": correction, "data": part, "errors": errors})  # fmt: skip
                told = ", ".join("lost" if e is None else f"{e:.1e}" for e in errors)
                print(f"  {recipe:8} {correction:8} {part:4.0%}  {told}", flush=True)
            print(f"  [{time.perf_counter() - start:.0f} s]", flush=True)
        save("corrections", {"device": _name(device), "epochs": EPOCHS, "rows": rows})


def _name(device: str) -> str:
    return torch.cuda.get_device_name() if device.startswith("cuda") else "cpu"


if __name__ == "__main__":
    main()
