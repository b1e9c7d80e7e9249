"""Energy drift over 100,000 steps of Hénon-Heiles: symplectic splittings against Runge-Kutta."""

import torch

from attractor import evolve, systems
from benchmarks.results import save

STEPS, DT = 100_000, 0.25
SCHEMES = ("leapfrog", "yoshida4", "rk4", "dopri5")


def drift(scheme: str, steps: int = STEPS, dt: float = DT) -> list[float]:
    """Largest relative energy error of ten orbits in each tenth of the time."""
    system = systems.HenonHeiles()
    u0 = system.sample(10, torch.Generator().manual_seed(0), torch.float64)
    t = torch.arange(steps + 1, dtype=torch.float64) * dt
    with torch.no_grad():
        solved = evolve(system, u0, t, scheme, every=max(steps // 1000, 1))
    start = system.energy(u0)
    error = ((system.energy(solved.u) - start) / start).abs().amax(-1)[1:]
    return [part.max().item() for part in error.chunk(10)]


def main() -> None:
    rows = {}
    print(f"largest relative energy error in each tenth of {STEPS:,} steps of {DT}")
    for scheme in SCHEMES:
        rows[scheme] = drift(scheme)
        print(f"{scheme:9}", " ".join(f"{x:.1e}" for x in rows[scheme]))
    save("energy", {"system": "HenonHeiles", "steps": STEPS, "dt": DT, "tenths": rows})


if __name__ == "__main__":
    main()
