"""Benchmark of a hybrid step against a plain one: m*, the cost of a correction.

The problem is the elastic pendulum with rk4 in float32. All steps are compiled; on a GPU ten of them are
one graph. Whether a correction pays also depends on its error: see `attractor compare`.
"""

from typing import Any

import torch
from torch import Tensor

from attractor.bench import timing
from attractor.core import get_scheme
from attractor.core.compiling import compiled, components_first
from attractor.ode import HybridSolver, corrections, systems
from attractor.ode.captured import CapturedStep

BATCHES = {"cuda": (1, 1_000, 20_000, 200_000), "cpu": (1, 1_000)}
WIDTHS = {"cuda": (256, 1024), "cpu": (256,)}
STEPS, DT = 10, 0.1


@torch.no_grad()
def measure(batch: int, width: int, *, device: str = "cpu", rounds: int = 15) -> dict[str, Any]:
    """Return microseconds per step of a batch, plain and hybrid, and their ratio."""
    torch.manual_seed(0)
    pendulum, rk4 = systems.ElasticPendulum(), get_scheme("rk4")
    correction = corrections.AttNS(4, width=width, device=device).requires_grad_(False)
    for own in (correction.net.head.weight, correction.net.head.bias):
        own.mul_(1e-3)  # as small as a fitted correction
    start = pendulum.sample(batch, device=device)
    solver = HybridSolver(pendulum, rk4, correction, DT)
    hybrid = CapturedStep(solver, start, steps=STEPS, compile=True)
    u, fixed = components_first(start), (pendulum, rk4, DT)
    one: Any = compiled(_plain, u.device, *fixed)

    def plain() -> Tensor:
        v = u
        for _ in range(STEPS):
            v = one(*fixed, v)
        return v

    replayed = timing.graph_of(plain) if u.is_cuda else None
    timings = timing.measure({"plain": replayed or plain, "hybrid": hybrid.advance}, device, rounds)
    micro = {name: 1e3 * timings.median(name) / STEPS for name in ("plain", "hybrid")}
    return {
        "kind": "hybrid", "width": width, "batch": batch, "device": device, "plain_us": micro["plain"],
        "hybrid_us": micro["hybrid"], "ratio": timings.ratio("hybrid", "plain"),
    }  # fmt: skip


def _plain(f: Any, scheme: Any, dt: float, u: Tensor) -> Tensor:
    return u + dt * scheme.slope(f, 0.0, u, dt)
