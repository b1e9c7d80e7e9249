"""Gradients of a correction's weights on a GPU: kernels beside torch, as it is and compiled.

    python -m benchmarks.gradients
    python -m benchmarks.gradients --plans

Q of a batch of random states of four components, the mean square error, and gradients of all weights, which is
an update of the paper's recipe but for Adam; as a graph for all. Everything is compared with float64 before it
is timed. plans: other ways to cut the kernel's work.
"""

import argparse
import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attractor.bench.timing import measure
from attractor.ode import corrections, fused
from benchmarks.results import save

SIZE = 4
Gradients = tuple[Tensor, ...]


def contenders(width: int, batch: int) -> tuple[dict[str, Callable[[], Gradients]], Gradients]:
    """Calls that give all gradients, and the truth."""
    torch.manual_seed(0)
    torch.compiler.reset()  # torch gives up after eight recompilations
    net: Any = corrections.AttNS(SIZE, width=width, device="cuda").net
    x, target = torch.randn(2, batch, SIZE, device="cuda").unbind()

    def call(run: Callable[[Tensor], Tensor], own: Any = net, x: Tensor = x) -> Gradients:
        with torch.enable_grad():
            loss = (run(x) - target).square().mean()
            return torch.autograd.grad(loss, list(own.parameters()))

    compiled = torch.compile(net.in_torch)
    exact = copy.deepcopy(net).double()
    calls = {
        "kernels": lambda: call(lambda x: fused.network(net, x)),
        "torch": lambda: call(net.in_torch),
        "compiled": lambda: call(compiled),
    }
    return calls, call(exact.in_torch, exact, x.double())


def off(found: Gradients, truth: Gradients) -> float:
    """The largest error of a gradient, as a part of its size."""
    pairs = zip(found, truth, strict=True)
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in pairs)


def measured(width: int, batch: int) -> dict[str, Any]:
    """Microseconds and errors of everybody."""
    calls, truth = contenders(width, batch)
    errors = {name: off(call(), truth) for name, call in calls.items()}
    if not errors["kernels"] <= 3 * errors["torch"] + 1e-5:
        raise RuntimeError(f"kernels are off by {errors['kernels']:.1e}, torch by {errors['torch']:.1e}")
    first = calls["kernels"]()
    same = all(
        torch.equal(a, b) for _ in range(250) for a, b in zip(calls["kernels"](), first, strict=True)
    )
    clock = measure(calls, "cuda", graphs=True)
    times = {name: 1e3 * clock.median(name) for name in calls}
    row = {"width": width, "batch": batch, "microseconds": times, "errors": errors, "graph": clock.graph,
           "over compiled": clock.ratio("compiled", "kernels"), "same bits 250 times": same}  # fmt: skip
    each = ", ".join(f"{name} {t:.0f} µs" for name, t in times.items())
    print(f"width {width}, batch {batch:,}: {each}; compiled over kernels {row['over compiled']:.2f}")
    return row


def plans(width: int, batch: int) -> list[dict[str, Any]]:
    """Times of the kernels with other plans."""
    from attractor.ode.fused import gradients
    from attractor.ode.fused.perceptron import Plan

    own, found = gradients.plan, []
    for rows, units, warps, parts in itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 4), (64, 128, 256)):
        if rows * units not in (2, 4):
            continue
        way = Plan(rows, 32 * units * warps, warps, parts)
        gradients.plan = lambda *_, way=way: way
        calls, _ = contenders(width, batch)
        clock = measure({"kernels": calls["kernels"]}, "cuda", rounds=5, graphs=True)
        cut = {"rows": rows, "hidden": way.hidden, "warps": warps, "parts": parts}
        found.append({**cut, "microseconds": 1e3 * clock.median("kernels")})
        print(found[-1], flush=True)
    gradients.plan = own
    return sorted(found, key=lambda row: row["microseconds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--batch", type=int, nargs="+", default=[2_048, 16_384, 131_072])
    parser.add_argument("--plans", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available() or not fused.TRITON:
        raise SystemExit("this needs a CUDA device and Triton")
    if args.plans:
        print(*plans(1024, 16_384)[:8], sep="\n")
        return
    rows = [measured(width, batch) for width in args.width for batch in args.batch]
    save("gradients", {"device": torch.cuda.get_device_name(), "rows": rows})


if __name__ == "__main__":
    main()
