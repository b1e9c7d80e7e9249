"""The 10-link pendulum at dt = 0.1, T = 10: how good can a corrected step get?

Plain rk4 at dt and fractions of it, and hybrids of growing width and data, chosen on held-out rollouts.
Mean square error over all states of 200 test trajectories. Minutes on a GPU:

    python -m benchmarks.chaos --device cuda
"""

import argparse
import math
import time
import warnings

import torch

import attractor.ode.ridge_search as ridge_search
from attractor import evolve, fit, systems
from attractor.ode.trajectories import Plan, Run, fine_trajectories, make_run
from benchmarks.results import save

DT, HORIZON, SUBSTEPS = 0.1, 10.0, 32
BOTH = {"state": True}  # AttNS that sees slope and state, what rollouts choose here
TRIALS = [  # trajectories, correction, its options, width, Adam steps, scales of the random weights
    (2_000, "linear", {}, None, 0, (1.0,)),
    (2_000, "auto", {}, 512, 0, (0.1, 0.05, 0.2)),
    (20_000, "auto", {}, 512, 0, (0.1, 0.05, 0.2)),
    (20_000, "attns", BOTH, 2048, 0, (0.05, 0.1)),
    (20_000, "attns", BOTH, 4096, 0, (0.05,)),
    (20_000, "attns", BOTH, 8192, 0, (0.05,)),
    (20_000, "attns", BOTH, 2048, 30_000, (0.1,)),
    (20_000, "attns", BOTH, 12_288, 0, (0.05,)),
]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=1e9, help="start nothing new after so long")
    arguments = parser.parse_args()
    device, start = arguments.device, time.perf_counter()
    warnings.filterwarnings("ignore", message="the correction makes held-out")
    system, steps = systems.PendulumChain(10), round(HORIZON / DT)
    u0 = system.sample(200, torch.Generator().manual_seed(20_261_115), torch.float64, device)
    truth = fine_trajectories(system, u0, DT, steps, 2 * SUBSTEPS)

    def error(solved) -> list:
        """Mean square errors up to T/4, T/2 and T; None where a trajectory was lost."""
        if not bool(solved.ok.all()):
            return [None] * 3
        each = (solved.u.double() - truth).square().mean((1, 2))
        return [each[: steps // part + 1].mean().item() for part in (4, 2, 1)]

    plain = {}
    for m in (1, 2, 3, 4, 8):
        t = torch.arange(m * steps + 1, dtype=torch.float64, device=device) * DT / m
        plain[m] = error(evolve(system, u0, t, every=m))
        print(f"rk4, dt / {m}: {told(plain[m])}", flush=True)
    plan = Plan(max(t[0] for t in TRIALS), DT, steps, SUBSTEPS, 0, 20_000)
    whole = make_run(system, None, plan, 0, device)
    print(f"data [{time.perf_counter() - start:.0f} s]", flush=True)
    rows = []
    for count, correction, options, width, adam, scales in TRIALS:
        if time.perf_counter() - start > arguments.seconds:
            break
        began, ridge_search.SCALES = time.perf_counter(), scales
        solver = fit(
            system, dt=DT, horizon=HORIZON, correction=correction, width=width, adam_steps=adam, options=options,
            data=[Run(0.0, whole.u[:, :count])], trajectories=count, device=device, fine_dt=DT / SUBSTEPS,
        )  # fmt: skip
        with torch.no_grad():
            errors = error(solver.solve(u0, HORIZON))
        chosen = {
            k: v for k, v in solver.history[-1].items() if k in ("correction", "state", "scale")
        } | options
        rows.append({"trajectories": count, "width": width, "adam_steps": adam, "errors": errors,
                     "seconds": time.perf_counter() - began, **chosen})  # fmt: skip
        print(f"{count} trajectories, {chosen}, width {width}, Adam {adam}: {told(errors)} "
              f"[{time.perf_counter() - start:.0f} s]", flush=True)  # fmt: skip
        one_step = [r["one_step"] for r in solver.history if "one_step" in r]
        print(f"   one-step errors {[f'{x:.1e}' for x in one_step]}", flush=True)
        name = torch.cuda.get_device_name() if device.startswith("cuda") else "cpu"
        save("chaos", {"device": name, "dt": DT, "horizon": HORIZON, "plain": plain, "rows": rows})


def told(errors: list) -> str:
    return " / ".join("lost" if e is None or not math.isfinite(e) else f"{e:.1e}" for e in errors)


if __name__ == "__main__":
    main()
