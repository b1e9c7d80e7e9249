"""Hybrid steps on a GPU: m*, the verdict beside diffrax, and the fused network beside torch.

    python -m benchmarks.hybrid_gpu                      # steps, then the verdict
    python -m benchmarks.hybrid_gpu --what kernel inductor
    python -m benchmarks.hybrid_gpu --what sweep --width 1024 --batch 20000

step: fifty steps of the elastic pendulum in float32 as one graph, for every contender alike. m* is a
hybrid step over a plain one, twice: over a step of rk4 compiled by torch, one kernel launch a step; and,
stricter, all steps in one kernel of ours on both sides. inductor: the same steps compiled by torch in one
piece, and hybrid ones with two kernels a step. verdict: float64 states, networks in float32; time to the
horizon at the hybrid's error, between two settings of a rival interpolated on logarithmic scales. kernel:
Q of random states alone; fused, in torch, and compiled by torch. sweep: other plans of the kernel.

Everything is checked against float64 before it is timed. Times are medians over rounds, by device events
around many replays of a captured graph, everyone in turn (diffrax: wall time of compiled calls). Floors: a
multiply-add, or another instruction, of each lane in every cycle at the highest clock; and the bytes of
states and weights, once, at the speed of a copy.
"""

import argparse
import copy
import math
import os
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attractor import fit, systems
from attractor.core import get_scheme
from attractor.core.compiling import compiled, components_first
from attractor.ode import HybridSolver, captured, corrections, fused
from attractor.ode.comparison import Point, reach
from attractor.ode.jax_rates import jax_rate
from benchmarks import results

BATCHES, WIDTHS = (1, 1_000, 20_000, 200_000), (256, 1024)
STEPS, CHECKED, DT, ROUNDS = 50, 10, 0.1, 9
SOLVERS = Path("out/hybrid_gpu")  # fitted ones, so that a second run need not fit again
LANES, CLOCK = 128, 1.98e9  # of a processor of an H200, and its highest clock
INSTRUCTIONS = 17.6  # of the kernel for each state and hidden unit: 4 inputs, 4 outputs, rational
PENDULUM = systems.ElasticPendulum()


def graph_of(call: Callable[[], Any]) -> Callable[[], None]:
    """The call as a graph, after a few to warm up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        graph.kept = call()  # what is returned lives as long as the graph
    return graph.replay


def microseconds(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Of a call, the median over rounds; everyone has one round after the other."""
    play = {name: graph_of(call) for name, call in calls.items()}
    repeat, found = {}, {name: [] for name in calls}
    for name, run in play.items():  # a hundred milliseconds all together, or ten replays
        repeat[name] = max(10, min(2_000, round(0.1 / ROUNDS / max(seconds(run, 10), 1e-6))))
    for _ in range(ROUNDS):
        for name, run in play.items():
            found[name].append(1e6 * seconds(run, repeat[name]))
    return {name: statistics.median(values) for name, values in found.items()}


def seconds(run: Callable[[], Any], repeat: int) -> float:
    """Of one call, by device events around several, after one that does not count."""
    run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeat):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / repeat


def bandwidth() -> float:
    """Bytes a second of a copy of a gigabyte."""
    a = torch.randn(1 << 28, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.numel() * 4 / (1e-6 * microseconds({"copy": lambda: b.copy_(a)})["copy"])


def floors(batch: int, width: int, size: int, copied: float) -> dict[str, float]:
    """Microseconds that no kernel can go below: arithmetic as it is here, and bytes."""
    rate = torch.cuda.get_device_properties(0).multi_processor_count * LANES * CLOCK
    moved = 4 * (2 * batch * size + width * (2 * size + 1))
    work = INSTRUCTIONS + 2 * (size - 4)
    return {"instructions": 1e6 * batch * width * work / rate, "bytes": 1e6 * moved / copied}


def correction_of(size: int, width: int) -> Any:
    torch.manual_seed(0)
    made = corrections.AttNS(size, width=width, device="cuda").requires_grad_(False)
    made.net.head.weight.mul_(1e-3)
    made.net.head.bias.mul_(1e-3)
    return made


def relative(found: Tensor, truth: Tensor) -> float:
    return ((found.double() - truth).norm() / truth.norm()).item()


def insist(what: str, ours: float, theirs: float, few: float) -> None:
    print(f"    {what}: off by {ours:.1e}, torch in float32 by {theirs:.1e}", flush=True)
    if not ours <= 2 * theirs + few:
        raise RuntimeError(f"{what} is off by {ours:.1e} where {2 * theirs + few:.1e} is allowed")


def measure_kernel(batch: int, width: int, size: int, copied: float) -> dict[str, Any]:
    torch.compiler.reset()  # torch gives up after eight recompilations
    net = correction_of(size, width).net
    torch.manual_seed(1)
    x = torch.randn(batch, size, device="cuda")
    with torch.no_grad():
        truth = net.double().in_torch(x.double())
        theirs = relative(net.float().in_torch(x), truth)
    errors = {"torch": theirs}
    for precision in fused.PRECISIONS:
        errors[precision] = fused.deviation(net, x, precision)
        few = {"ieee": 1e-6, "tf32x3": 3e-6, "tf32": 2e-3}[precision]
        insist(f"{size} -> {width}, {batch} states, {precision}", errors[precision], theirs, few)
    fast = torch.compile(net.in_torch)
    calls: dict[str, Callable[[], Any]] = {
        "fused": lambda: fused.network(net, x),
        "torch": lambda: net.in_torch(x),
        "torch, compiled": lambda: fast(x),
    }
    if size > 8:
        for precision in ("ieee", "tf32"):
            calls[f"fused, {precision}"] = lambda p=precision: fused.network(net, x, p)
    found = microseconds(calls)
    with torch.no_grad():
        first = fused.network(net, x)
        same = all(torch.equal(fused.network(net, x), first) for _ in range(250))
    row = {
        "size": size, "width": width, "batch": batch, "microseconds": found, "errors": errors,
        "floors": floors(batch, width, size, copied), "same bits 250 times": same,
    }  # fmt: skip
    print(row, flush=True)
    return row


class InTorch(torch.nn.Module):
    """A network without kernels."""

    period = None

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """Q of x."""
        return self.net.in_torch(x)


def in_torch(correction: Any) -> Any:
    twin = copy.copy(correction)
    twin._modules = {**correction._modules, "net": InTorch(correction.net)}
    return twin


def plain_steps(f: Any, scheme: Any, dt: float, steps: int, u: Tensor) -> Tensor:
    for _ in range(steps):
        u = u + dt * scheme.slope(f, 0.0, u, dt)
    return u


def start_of(batch: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    u = components_first(PENDULUM.sample(batch, device="cuda"))
    return u, torch.zeros((), dtype=torch.float64, device="cuda")


def measure_plain(batch: int) -> dict[str, float]:
    """Microseconds of a plain step."""
    from attractor.ode.fused.steps import WholeSteps

    torch.compiler.reset()  # or it compiles for any batch, and less well
    u, t = start_of(batch)
    rk4 = get_scheme("rk4")
    one = (PENDULUM, rk4, DT, 1)
    one_step, ours = compiled(plain_steps, u.device, *one), WholeSteps(PENDULUM, rk4, None, DT, u)

    def one_by_one(steps: int = STEPS) -> Tensor:
        v = u
        for _ in range(steps):
            v = one_step(*one, v)
        return v

    own = u.clone()

    def one_by_one_ours() -> None:
        own.copy_(u)
        for _ in range(STEPS):
            ours(own, t, 1)

    def all_in_one_ours() -> None:
        own.copy_(u)
        ours(own, t, STEPS)

    with torch.no_grad():
        exact = plain_steps(PENDULUM, rk4, DT, CHECKED, u.double())
        insist("plain rk4, torch", relative(one_by_one(CHECKED), exact), 0.0, 5e-6)
        ours(own, t, CHECKED)
        insist("plain rk4, ours", relative(own, exact), 0.0, 5e-6)
    calls = {
        "plain, torch": one_by_one,
        "plain, ours, a launch a step": one_by_one_ours,
        "plain, ours, all in one": all_in_one_ours,
    }
    return {name: value / STEPS for name, value in microseconds(calls).items()}


def from_start(step: captured.CapturedStep, u: Tensor) -> Tensor:
    """All its steps from u, for a graph of our own: states that wander off must not be what is timed."""
    step.u.copy_(u)
    return step._run(step.u, step.t)


def measure_step(batch: int, width: int, plain: dict[str, float], copied: float) -> dict[str, Any]:
    rk4, correction = get_scheme("rk4"), correction_of(4, width)
    u, t = start_of(batch)
    fixed = (PENDULUM, rk4, in_torch(correction), DT, CHECKED, u, t)
    with torch.no_grad():
        theirs = captured._steps(*fixed)
        correction.double()
        exact = captured._steps(*fixed[:-2], u.double(), t)
        correction.float()
    solver = HybridSolver(PENDULUM, rk4, correction, DT)
    check = solver.capture(u, steps=CHECKED)
    if not check.whole:
        raise RuntimeError("no kernel for whole steps")
    few = relative(theirs, exact)
    insist(f"hybrid, width {width}, {batch} states", relative(check.advance(), exact), few, 1e-6)
    step = solver.capture(u, steps=STEPS)
    found = {"hybrid, all in one": microseconds({"": lambda: from_start(step, u)})[""] / STEPS}
    times = []
    for _ in range(ROUNDS):
        step.reset(u)
        times.append(1e6 * seconds(step.advance, 20) / STEPS)
    found["hybrid, CapturedStep.advance"] = statistics.median(times)
    hybrid = found["hybrid, all in one"]
    row = {
        "width": width, "batch": batch, "microseconds a step": {**plain, **found},
        "m*": hybrid / plain["plain, torch"],
        "m*, all in one": hybrid / plain["plain, ours, all in one"],
        "floors of the network": floors(batch, width, 4, copied),
    }  # fmt: skip
    print(row, flush=True)
    return row


def measure_inductor(batch: int, width: int) -> dict[str, Any]:
    """Ten steps compiled by torch in one piece: plain, hybrid with our network, hybrid in torch."""
    torch.compiler.reset()
    rk4, correction, ten = get_scheme("rk4"), correction_of(4, width), 10
    u, t = start_of(batch)
    plain = (PENDULUM, rk4, DT, ten)
    calls = {"plain": (compiled(plain_steps, u.device, *plain), (*plain, u))}
    for name, part in (("hybrid, two kernels", correction), ("hybrid, torch", in_torch(correction))):
        fixed = (PENDULUM, rk4, part, DT, ten)
        calls[name] = compiled(captured._steps, u.device, *fixed), (*fixed, u, t)
    run = {name: lambda f=f, args=args: f(*args) for name, (f, args) in calls.items()}
    found = {name: value / ten for name, value in microseconds(run).items()}
    row = {"width": width, "batch": batch, "microseconds a step": found}
    print(row, flush=True)
    return row


def sweep(batch: int, width: int, size: int) -> dict[str, Any]:
    """Every plan of the kernel, the quickest first."""
    from attractor.ode.fused import perceptron

    net, found, own = correction_of(size, width).net, {}, perceptron.plan
    x = torch.randn(batch, size, device="cuda")
    for rows in (1, 4, 8, 16, 32, 64):
        for hidden in (8, 16, 32, 128, 256, 1024):
            for warps in (1, 4, 8, 32):
                each = rows * hidden // (32 * warps)
                if not 1 <= each <= 16 or rows > max(1, batch) or (each < 4 and rows > 4):
                    continue
                cut = perceptron.Plan(rows, hidden, warps)
                perceptron.plan = lambda *_, cut=cut: cut
                try:
                    found[str(tuple(cut))] = microseconds({"": lambda: fused.network(net, x)})[""]
                except Exception as error:  # too many registers, or too much shared memory
                    print(f"    {cut}: {type(error).__name__}")
    perceptron.plan = own
    chosen = str(tuple(own(batch, width, size, size, "ieee")))
    best = dict(sorted(found.items(), key=lambda item: item[1])[:8])
    row = {
        "size": size,
        "width": width,
        "batch": batch,
        "chosen": {chosen: found.get(chosen)},
        "best": best,
    }
    print(row, flush=True)
    return row


CASES = {  # system, dt, horizon, trajectories, width
    "elastic": (PENDULUM, 0.1, 50.0, 500, 128),
    "2-link": (systems.PendulumChain(2), 0.1, 10.0, 1000, 128),
    "10-link": (systems.PendulumChain(10), 0.1, 5.0, 500, 1024),
}
TOLERANCES = (1e-4, 1e-6, 1e-8, 1e-10, 1e-12)


def fitted(name: str) -> HybridSolver:
    """The case's solver, from a folder or fitted now."""
    system, dt, horizon, trajectories, width = CASES[name]
    if (SOLVERS / name).exists():
        return HybridSolver.load(SOLVERS / name).to("cuda")
    solver = fit(
        system, dt=dt, horizon=horizon, trajectories=trajectories, width=width,
        options={"precision": "float32"}, device="cuda",
    )  # fmt: skip
    solver.save(SOLVERS / name)
    return solver.to("cuda")


def verdict(name: str, batch: int, late: Callable[[], bool]) -> dict[str, Any]:
    """Time to the horizon at the hybrid's error: plain schemes in one kernel, and diffrax."""
    from attractor.ode.fused.steps import WholeSteps

    system, dt, horizon, *_ = CASES[name]
    n, solver = round(horizon / dt), fitted(name)
    u0 = components_first(system.sample(batch, torch.Generator().manual_seed(7), torch.float64).cuda())

    def plain(scheme: str, part: int) -> Callable[[], Tensor]:
        whole, u = WholeSteps(system, get_scheme(scheme), None, dt / part, u0), u0.clone()
        t = torch.zeros((), dtype=torch.float64, device="cuda")

        def run() -> Tensor:
            u.copy_(u0)
            whole(u, t, n * part)
            return u

        return run

    schemes = ("rk4", "dopri5") if system.dim <= 8 else ("rk4",)  # others take long to compile
    truth = plain(schemes[-1], 128)().clone()
    agreed = (plain(schemes[-1], 64)() - truth).square().mean().item()
    print(f"    {name}: the reference is good to {agreed:.1e}", flush=True)
    points: list[Point] = []

    def note(method: str, setting: float, adaptive: bool, end: Tensor, took: float) -> float:
        error = (end.to(truth) - truth).square().mean().item()
        error = error if math.isfinite(error) else math.inf
        points.append(Point(method, setting, adaptive, error, took, rate_calls=1))
        print(f"    {name}: {method}, {setting:.2g}: {error:.1e} in {1e3 * took:.3g} ms", flush=True)
        return error

    def timed(run: Callable[[], Tensor]) -> float:
        replay = graph_of(run)
        return statistics.median(seconds(replay, 1) for _ in range(5))

    step = solver.capture(u0, steps=n)
    end = step(u0)
    goal = note("hybrid", dt, False, end, timed(lambda: from_start(step, u0)))
    for scheme in schemes:
        for part in (1, 2, 4, 8, 16, 32, 64):
            run = plain(scheme, part)
            if note(scheme, dt / part, False, run(), timed(run)) <= goal or late():
                break
    for method in ("Tsit5", "Dopri5"):
        if late():
            print(f"    {name}: no time left for diffrax {method}", flush=True)
            continue
        try:
            contender = diffrax(system, u0, horizon, method)
            for tolerance in TOLERANCES:
                end, times = contender(tolerance), []
                while len(times) < 5 and sum(times) < 2.0:
                    began = time.perf_counter()
                    contender(tolerance)
                    times.append(time.perf_counter() - began)
                took = statistics.median(times)
                if note(f"diffrax {method}", tolerance, True, end, took) <= goal or late():
                    break
        except Exception as error:  # a rival that cannot run must not cost us the rest
            print(
                f"    {name}: diffrax {method} failed: {type(error).__name__}: {error}"[:500], flush=True
            )
    methods = dict.fromkeys(p.method for p in points[1:])
    reached = {m: reach([p for p in points if p.method == m], goal) for m in methods}
    gains = {m: p.seconds / points[0].seconds if p else None for m, p in reached.items()}
    print(f"{name}: quicker than others at its error of {goal:.1e} by {gains}", flush=True)
    return {
        "case": name, "batch": batch, "width": solver.correction.config["width"], "error": goal,
        "milliseconds": 1e3 * points[0].seconds, "whole": step.whole, "gains": gains,
        "points": [asdict(p) for p in points],
    }  # fmt: skip


def diffrax(system: Any, u0: Tensor, horizon: float, method: str) -> Callable[[float], Tensor]:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import diffrax
    import jax
    import numpy as np

    jax.config.update("jax_enable_x64", True)
    print(f"    JAX runs on {jax.devices()[0]}", flush=True)
    term, solver = diffrax.ODETerm(jax_rate(system, u0[0])), getattr(diffrax, method)()
    start = jax.device_put(u0.cpu().numpy())

    def solve(y: Any, tolerance: float) -> Any:
        return diffrax.diffeqsolve(
            term, solver, 0.0, horizon, 1e-3, y, saveat=diffrax.SaveAt(t1=True), max_steps=1_000_000,
            stepsize_controller=diffrax.PIDController(rtol=tolerance, atol=1e-2 * tolerance),
            throw=False,
        ).ys[0]  # fmt: skip

    whole = jax.jit(jax.vmap(solve, in_axes=(0, None)))

    def run(tolerance: float) -> Tensor:
        return torch.from_numpy(np.array(whole(start, tolerance).block_until_ready()))

    return run


def table(found: dict[str, Any]) -> str:
    """What was found, short."""
    lines = []
    for row in found.get("step", []):
        each = row["microseconds a step"]
        lines.append(
            f"width {row['width']:5}, batch {row['batch']:7,}: plain {each['plain, torch']:7.2f} µs (ours, all in one "
            f"{each['plain, ours, all in one']:6.2f}), hybrid {each['hybrid, all in one']:7.2f} µs, "
            f"m* {row['m*']:5.2f} (all in one {row['m*, all in one']:5.2f})"
        )
    for row in found.get("inductor", []):
        each = {k: round(v, 2) for k, v in row["microseconds a step"].items()}
        lines.append(f"width {row['width']:5}, batch {row['batch']:7,}, torch: {each}")
    for row in found.get("kernel", []):
        each = {k: round(v, 1) for k, v in row["microseconds"].items()}
        lines.append(f"{row['size']} -> {row['width']}, {row['batch']:,}: {each}")
    for row in found.get("verdict", []):
        gains = {m: "never" if g is None else f"{g:.2g}" for m, g in row["gains"].items()}
        lines.append(
            f"{row['case']}, {row['batch']:,} states: error {row['error']:.1e} in {row['milliseconds']:.3g} ms; "
            f"times of others over it: {gains}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    what = ("step", "verdict", "kernel", "inductor", "sweep")
    parser.add_argument("--what", nargs="+", choices=what, default=["step", "verdict"])
    parser.add_argument("--batch", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--width", type=int, nargs="+", default=list(WIDTHS))
    parser.add_argument("--size", type=int, nargs="+", default=[4, 20], help="of states, for the kernel")
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--seconds", type=float, default=240.0, help="after which little new is begun")
    parser.add_argument("--out", type=Path, help="folder for the JSON file")
    given = parser.parse_args()
    if not torch.cuda.is_available() or not fused.TRITON:
        raise SystemExit("this needs a CUDA device and Triton; on a CPU run benchmarks.compare")
    if given.out is not None:
        results.FOLDER = given.out
    began, plain, copied = time.perf_counter(), {}, bandwidth()
    late = lambda: time.perf_counter() - began > given.seconds
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "copy TB/s": copied / 1e12}
    print(f"{found['device']}: a copy moves {found['copy TB/s']:.2f} TB/s", flush=True)
    cells = [(b, w) for w in sorted(given.width, reverse=True) for b in given.batch]
    work: list[tuple[str, Callable[[], Any]]] = []
    for kind in given.what:
        if kind == "step":
            work += [("plain", lambda b=b: plain.update({b: measure_plain(b)})) for b in given.batch]
            work += [(kind, lambda b=b, w=w: measure_step(b, w, plain[b], copied)) for b, w in cells]
        elif kind == "verdict":
            work += [(kind, lambda c=c: verdict(c, 20_000, late)) for c in given.case]
        elif kind == "kernel":
            work += [
                (kind, lambda b=b, w=w, d=d: measure_kernel(b, w, d, copied))
                for d in given.size for b, w in cells
            ]  # fmt: skip
        else:
            one = measure_inductor if kind == "inductor" else lambda b, w: sweep(b, w, 4)
            work += [(kind, lambda b=b, w=w, one=one: one(b, w)) for b, w in cells]
    for kind, run in work:
        if late():
            print("no time left", flush=True)
            break
        try:
            row = run()
        except Exception as error:  # say so, and go on with the rest
            traceback.print_exc()
            row = {"failed": f"{type(error).__name__}: {error}"[:500]}
            found.setdefault("failed", []).append({"what": kind, **row})
            continue
        if kind != "plain":
            found.setdefault(kind, []).append(row)
            results.save("hybrid_gpu", {"results": found})
        print(f"    {time.perf_counter() - began:.0f} s", flush=True)
    print(table(found))


if __name__ == "__main__":
    main()
