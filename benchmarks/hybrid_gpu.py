"""Hybrid steps on a GPU: the fused network beside torch, m*, and the verdict beside diffrax.

    python -m benchmarks.hybrid_gpu --what kernel step
    python -m benchmarks.hybrid_gpu --what sweep --width 1024 --batch 20000
    python -m benchmarks.hybrid_gpu --what verdict --case elastic

kernel: Q of random states alone; fused, the module, and the module compiled. step: ten steps of the
elastic pendulum in float32 as one graph, for every contender alike; "one by one" compiles a plain rk4 step
and calls it ten times, "ten in one" lets the compiler fuse them. m* is hybrid over plain. sweep: every plan
of the kernel. verdict: float64 states, networks in float32; time to the horizon at the hybrid's error.

Everything is checked against float64 before it is timed. Times are medians over rounds, by device events
around many replays of a captured graph, everyone in turn (diffrax: wall time of compiled calls). Floors: a
multiply-add, or another instruction, of each lane in every cycle at the highest clock; and the bytes of
states and weights, once, at the speed of a copy.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attractor import fit, systems
from attractor.core import get_scheme
from attractor.core.compiling import compiled, components_first
from attractor.ode import HybridSolver, captured, corrections, fused
from attractor.ode.trajectories import fine_trajectories
from benchmarks import results

BATCHES, WIDTHS = (1, 1_000, 20_000, 200_000), (256, 1024)
STEPS, DT, ROUNDS = 10, 0.1, 15
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


def floors(batch: int, width: int, size: int, copy: float) -> dict[str, float]:
    """Microseconds that no kernel can go below: arithmetic as it is here, and bytes."""
    rate = torch.cuda.get_device_properties(0).multi_processor_count * LANES * CLOCK
    moved = 4 * (2 * batch * size + width * (2 * size + 1))
    work = INSTRUCTIONS + 2 * (size - 4)
    return {"instructions": 1e6 * batch * width * work / rate, "bytes": 1e6 * moved / copy}


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
        raise SystemExit(f"{what} is off by {ours:.1e} where {2 * theirs + few:.1e} is allowed")


def measure_kernel(batch: int, width: int, size: int, copy: float) -> dict[str, Any]:
    torch.compiler.reset()  # torch gives up after eight recompilations
    net = correction_of(size, width).net
    torch.manual_seed(1)
    x = torch.randn(batch, size, device="cuda")
    with torch.no_grad():
        truth = net.double()(x.double())
        theirs = relative(net.float()(x), truth)
    errors = {"torch": theirs}
    for precision in fused.PRECISIONS:
        errors[precision] = fused.deviation(net, x, precision)
        few = {"ieee": 1e-6, "tf32x3": 3e-6, "tf32": 2e-3}[precision]
        insist(f"{size} -> {width}, {batch} states, {precision}", errors[precision], theirs, few)
    fast = torch.compile(net)
    calls: dict[str, Callable[[], Any]] = {
        "fused": lambda: fused.network(net, x),
        "module": lambda: net(x),
        "module, compiled": lambda: fast(x),
    }
    if size > 8:
        for precision in ("tf32x3", "tf32"):
            calls[f"fused, {precision}"] = lambda p=precision: fused.network(net, x, p)
    found = microseconds(calls)
    with torch.no_grad():
        first = fused.network(net, x)
        same = all(torch.equal(fused.network(net, x), first) for _ in range(250))
    row = {
        "size": size, "width": width, "batch": batch, "microseconds": found, "errors": errors,
        "floors": floors(batch, width, size, copy), "same bits 250 times": same,
    }  # fmt: skip
    print(row, flush=True)
    return row


def plain_steps(f: Any, scheme: Any, dt: float, steps: int, u: Tensor) -> Tensor:
    for _ in range(steps):
        u = u + dt * scheme.slope(f, 0.0, u, dt)
    return u


def measure_step(batch: int, width: int, copy: float) -> dict[str, Any]:
    rk4, correction = get_scheme("rk4"), correction_of(4, width)
    torch.manual_seed(2)
    start = PENDULUM.sample(batch, device="cuda")
    u, t = components_first(start), torch.zeros((), dtype=torch.float64, device="cuda")
    twin = fused.fuse(correction)

    def hybrid(correction: Any, compile: bool = True) -> Callable[[], Tensor]:
        fixed = (PENDULUM, rk4, correction, DT, STEPS)
        run = compiled(captured._steps, u.device, *fixed) if compile else captured._steps
        return lambda: run(*fixed, u, t)

    one, ten = ((PENDULUM, rk4, DT, n) for n in (1, STEPS))
    one_step = compiled(plain_steps, u.device, *one)
    ten_steps = compiled(plain_steps, u.device, *ten)

    def one_by_one() -> Tensor:
        v = u
        for _ in range(STEPS):
            v = one_step(*one, v)
        return v

    calls = {
        "plain, one by one": one_by_one,
        "plain, ten in one": lambda: ten_steps(*ten, u),
        "hybrid, fused": hybrid(twin),
        "hybrid, torch compiled": hybrid(correction),
        "hybrid, torch": hybrid(correction, compile=False),
    }
    with torch.no_grad():
        theirs = hybrid(correction, compile=False)()
        ours = hybrid(twin)()
        exact = captured._steps(PENDULUM, rk4, correction.double(), DT, STEPS, u.double(), t)
        correction.float()
        plain = plain_steps(*ten, u.double())
        insist(
            f"hybrid, width {width}, {batch} states",
            relative(ours, exact),
            relative(theirs, exact),
            1e-6,
        )
        insist("plain rk4", relative(calls["plain, ten in one"](), plain), 0.0, 5e-6)
    found = {name: value / STEPS for name, value in microseconds(calls).items()}
    step = captured.CapturedStep(HybridSolver(PENDULUM, rk4, correction, DT), start, steps=STEPS)
    insist("CapturedStep", relative(step.advance(), exact), relative(theirs, exact), 1e-6)
    times = [1e6 * seconds(step.advance, 100) / STEPS for _ in range(ROUNDS)]
    found["CapturedStep.advance"] = statistics.median(times)
    hybrids = found["hybrid, fused"]
    row = {
        "width": width, "batch": batch, "microseconds a step": found,
        "m*": hybrids / found["plain, one by one"],
        "m* against ten in one": hybrids / found["plain, ten in one"],
        "floors of the network": floors(batch, width, 4, copy),
    }  # fmt: skip
    print(row, flush=True)
    return row


def sweep(batch: int, width: int, size: int) -> dict[str, Any]:
    """Every plan of the kernel, the quickest first."""
    from attractor.ode.fused import perceptron

    net, found, own = correction_of(size, width).net, {}, perceptron.plan
    x = torch.randn(batch, size, device="cuda")
    for rows in (1, 2, 4, 8, 16, 32, 64, 128):
        for hidden in (16, 32, 64, 128, 256, 512, 1024):
            for warps in (1, 2, 4, 8, 16, 32):
                each = rows * hidden // (32 * warps)
                if not 1 <= each <= 32 or rows > max(1, batch):
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


def jax_rate(system: Any) -> Any:
    """The rate of one trajectory in JAX."""
    import jax.numpy as jnp

    from benchmarks.compare import jax_rate as known

    if (found := known(system)) is not None:
        return found
    links = system.links
    index = jnp.arange(links)
    below = links - jnp.maximum(index[:, None], index[None, :])

    def rate(t, u, args):
        angle, speed = u[:links], u[links:]
        apart = angle[:, None] - angle[None, :]
        mass = below * jnp.cos(apart)
        force = -(below * jnp.sin(apart) * speed[None, :] ** 2).sum(1)
        force = force - (links - index) * 9.8 * jnp.sin(angle)
        return jnp.concatenate((speed, jnp.linalg.solve(mass, force)))

    return rate


def verdict(name: str, batch: int) -> dict[str, Any]:
    """Time to the horizon at the hybrid's error: plain rk4 as a graph, and diffrax."""
    system, dt, horizon, trajectories, width = CASES[name]
    n = round(horizon / dt)
    solver = fit(
        system, dt=dt, horizon=horizon, trajectories=trajectories, width=width, precision="float32",
        device="cuda",
    )  # fmt: skip
    solver.to("cuda")
    u0 = system.sample(batch, torch.Generator().manual_seed(7), torch.float64).cuda()
    truth = torch.cat([fine_trajectories(system, x, dt, n, 64)[-1] for x in u0.split(5_000)])
    points = []

    def note(method: str, setting: float, end: Tensor, took: float) -> float:
        error = (end - truth).square().mean().item()
        points.append({"method": method, "setting": setting, "error": error, "ms": 1e3 * took})
        print(f"    {name}: {method}, {setting:.2g}: {error:.1e} in {1e3 * took:.3g} ms", flush=True)
        return error

    def stepping(step: captured.CapturedStep, replays: int) -> tuple[Tensor, float]:
        def run() -> Tensor:
            step.reset(u0)
            return step.advance(replays)

        end = run().clone()
        return end, statistics.median(seconds(run, 1) for _ in range(5))

    step = captured.CapturedStep(solver, u0, steps=STEPS)
    goal = note("hybrid", dt, *stepping(step, n // STEPS))
    part = 1
    while part <= 64:
        plain = HybridSolver(system, "rk4", Nothing(), dt / part)
        step = captured.CapturedStep(plain, u0, steps=STEPS)
        if note("rk4", dt / part, *stepping(step, n * part // STEPS)) <= goal:
            break
        part *= 2
    try:
        contender = diffrax(system, u0, horizon)
    except ImportError:
        print("    diffrax is not installed: left out")
    else:
        for tolerance in (1e-4, 1e-6, 1e-8, 1e-10, 1e-12):
            end = contender(tolerance)
            times = []
            for _ in range(5):
                start = time.perf_counter()
                contender(tolerance)
                times.append(time.perf_counter() - start)
            if note("diffrax Tsit5", tolerance, end.to(truth), statistics.median(times)) <= goal:
                break
    reached = [p for p in points[1:] if p["error"] <= goal]
    rival = min(reached, key=lambda p: p["ms"], default=None)
    gain = rival["ms"] / points[0]["ms"] if rival else None
    print(
        f"{name}: "
        + ("nothing else reaches its error" if gain is None else f"{gain:.2g}x the quickest rival")
    )
    return {"case": name, "batch": batch, "width": width, "points": points, "gain": gain}


class Nothing(torch.nn.Module):
    """No correction; compilers leave it out."""

    def forward(self, u: Tensor, slope: Tensor, dt: float) -> Any:
        """Adds nothing."""
        return 0.0


def diffrax(system: Any, u0: Tensor, horizon: float) -> Callable[[float], Tensor]:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import diffrax
    import jax

    jax.config.update("jax_enable_x64", True)
    print(f"    JAX runs on {jax.devices()[0]}")
    term = diffrax.ODETerm(jax_rate(system))
    start = jax.device_put(u0.cpu().numpy())

    def solve(y: Any, tolerance: float) -> Any:
        return diffrax.diffeqsolve(
            term, diffrax.Tsit5(), 0.0, horizon, 1e-3, y, saveat=diffrax.SaveAt(t1=True),
            max_steps=1_000_000,
            stepsize_controller=diffrax.PIDController(rtol=tolerance, atol=1e-2 * tolerance),
        ).ys[0]  # fmt: skip

    whole = jax.jit(jax.vmap(solve, in_axes=(0, None)))

    def run(tolerance: float) -> Tensor:
        import numpy as np

        return torch.from_numpy(np.array(whole(start, tolerance).block_until_ready()))

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    what = ("kernel", "step", "sweep", "verdict")
    parser.add_argument("--what", nargs="+", choices=what, default=["kernel", "step"])
    parser.add_argument("--batch", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--width", type=int, nargs="+", default=list(WIDTHS))
    parser.add_argument("--size", type=int, nargs="+", default=[4, 20], help="of states, for the kernel")
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--out", type=Path, help="folder for the JSON file")
    given = parser.parse_args()
    if not torch.cuda.is_available() or not fused.TRITON:
        raise SystemExit("this needs a CUDA device and Triton; on a CPU run benchmarks.compare")
    if given.out is not None:
        results.FOLDER = given.out
    copy = bandwidth()
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "copy TB/s": copy / 1e12}
    print(f"{found['device']}: a copy moves {found['copy TB/s']:.2f} TB/s", flush=True)
    sizes = [(b, w) for w in given.width for b in given.batch]
    for kind in given.what:
        if kind == "kernel":
            rows = [measure_kernel(b, w, d, copy) for d in given.size for b, w in sizes]
        elif kind == "step":
            rows = [measure_step(b, w, copy) for b, w in sizes]
        elif kind == "sweep":
            rows = [sweep(b, w, 4) for b, w in sizes]
        else:
            rows = [verdict(case, 20_000) for case in given.case]
        found[kind] = rows
        results.save("hybrid_gpu", {"results": found})


if __name__ == "__main__":
    main()
