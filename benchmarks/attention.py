"""PDE attention beside SDPA on the CPU: time and memory over the length of the text.

Diffusion (reaction-diffusion where the method is "tiled" or "split"), 4 steps, batch 1, 8 heads of 64,
float32, a learnt coefficient for each head. Everyone runs once a round after a warm-up, SDPA among
them; times are medians, ratios medians of the rounds' ratios to SDPA in the same round. Peak memory is
the most that was in use beyond inputs, outputs and their gradients, by a count of every allocation.

Sliding windows with global tokens are measured against the same without a PDE, at lengths where a T x T
map would not fit.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.profiler import ProfilerActivity, profile

from attractor.attention import pde_attention, pdes, window_attention
from benchmarks.results import FOLDER, save

BATCH, HEADS, DIM, STEPS = 1, 8, 64, 4
LENGTHS = (512, 1024, 2048, 4096, 8192)
WINDOW, GLOBAL, LONG = (128, 128), 4, (8_192, 16_384, 32_768, 65_536)
DENSE_UP_TO = {"forward": 8192, "both": 4096}  # a map of 8 heads at 8,192 is 2 GB, and there are several
TILED_UP_TO = {"forward": 8192, "both": 4096}

SLOW, SLOW_ROUNDS = ("dense", "tiled", "split"), 3

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def methods(tokens: int, causal: bool, kind: str) -> dict[str, Attention]:
    alpha = torch.full((HEADS, 1, 1), 0.1, requires_grad=True)
    beta = torch.full((HEADS, 1, 1), 0.02, requires_grad=True)

    def refined(pde: pdes.PDE, method: str) -> Attention:
        return lambda q, k, v: pde_attention(
            q, k, v, is_causal=causal, pde=pde, steps=STEPS, method=method
        )

    found: dict[str, Attention] = {
        "sdpa": lambda q, k, v: sdpa(q, k, v, is_causal=causal),
        "stepped": refined(pdes.Diffusion(alpha), "stepped"),
        "windowed": lambda q, k, v: window_attention(
            q, k, v, window=WINDOW, global_tokens=GLOBAL, is_causal=causal, pde=pdes.Diffusion(alpha)
        ),
    }
    if tokens <= TILED_UP_TO[kind]:
        found["tiled"] = refined(pdes.ReactionDiffusion(alpha, beta), "tiled")
        found["split"] = refined(pdes.ReactionDiffusion(alpha, beta, split=True), "tiled")
    if tokens <= DENSE_UP_TO[kind]:
        found["dense"] = refined(pdes.Diffusion(alpha), "dense")
    return found


def run(attention: Attention, inputs: list[Tensor], kind: str, grad: Tensor) -> None:
    if kind == "forward":
        with torch.no_grad():
            attention(*inputs)
    else:
        torch.autograd.grad(attention(*inputs), inputs, grad)


def peak(attention: Attention, inputs: list[Tensor], kind: str, grad: Tensor) -> float:
    """Megabytes in use at the worst moment, beyond what is handed out in the end."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run(attention, inputs, kind, grad)
    events = sorted(
        (e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"),
        key=lambda e: e.start_ns(),
    )
    now = most = 0
    for event in events:
        now += event.nbytes()
        most = max(most, now)
    handed_out = grad.nbytes if kind == "forward" else grad.nbytes + sum(x.nbytes for x in inputs)
    return max(most - handed_out, 0) / 1e6


def measure(contenders: dict[str, Attention], tokens: int, kind: str, rounds: int) -> dict[str, dict]:
    inputs = [torch.randn(BATCH, HEADS, tokens, DIM, requires_grad=True) for _ in range(3)]
    grad = torch.randn(BATCH, HEADS, tokens, DIM)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    memory = {name: peak(f, inputs, kind, grad) for name, f in contenders.items()}
    for n in range(rounds):
        for name, attention in contenders.items():
            if n >= SLOW_ROUNDS and name in SLOW:
                continue
            start = time.perf_counter()
            run(attention, inputs, kind, grad)
            times[name].append(time.perf_counter() - start)
    first = next(iter(contenders))
    return {
        name: {
            "milliseconds": statistics.median(t) * 1e3,
            "ratio": None if name == first else statistics.median(a / b for a, b in zip(t, times[first])),
            "peak_mb": memory[name],
        }
        for name, t in times.items()
    }  # fmt: skip


def lengths() -> list[dict]:
    rows = []
    for tokens, causal, kind in product(LENGTHS, (False, True), ("forward", "both")):
        rounds = 21 if tokens <= 2048 else 11 if tokens <= 4096 else 5
        found = measure(methods(tokens, causal, kind), tokens, kind, rounds)
        rows += [
            {"tokens": tokens, "method": name, "causal": causal, "pass": kind, **numbers}
            for name, numbers in found.items()
        ]
        show(f"{tokens} {'causal' if causal else 'full'} {kind}", found)
    return rows


def windows() -> list[dict]:
    rows = []
    for tokens, kind in product(LONG, ("forward", "both")):
        alpha = torch.full((HEADS, 1, 1), 0.1, requires_grad=True)

        def windowed(pde: pdes.PDE | None) -> Attention:
            return lambda q, k, v: window_attention(
                q, k, v, window=WINDOW, global_tokens=GLOBAL, is_causal=True, pde=pde, steps=STEPS
            )

        found = measure(
            {"no PDE": windowed(None), "diffusion": windowed(pdes.Diffusion(alpha))}, tokens, kind, 3
        )
        rows += [
            {"tokens": tokens, "method": n, "pass": kind, **numbers} for n, numbers in found.items()
        ]
        show(f"window, {tokens} {kind}", found)
    return rows


def show(case: str, found: dict[str, dict]) -> None:
    shown = ", ".join(
        f"{name} {x['milliseconds']:.1f} ms"
        + (f" ({x['ratio']:.2f}x)" if x["ratio"] else "")
        + f" {x['peak_mb']:.0f} MB"
        for name, x in found.items()
    )
    print(f"{case}: {shown}", flush=True)


def main() -> None:
    """Both parts, or the one that is named: ``python -m benchmarks.attention windows``."""
    path = FOLDER / "attention.json"
    content = json.loads(path.read_text()) if path.exists() else {}
    settings = {"batch": BATCH, "heads": HEADS, "dim": DIM, "steps": STEPS, "window": WINDOW,
                "global_tokens": GLOBAL}  # fmt: skip
    torch.manual_seed(0)
    for part in sys.argv[1:] or ("rows", "windows"):
        content[part] = {"rows": lengths, "windows": windows}[part]()
        save("attention", settings | {k: content[k] for k in ("rows", "windows") if k in content})


if __name__ == "__main__":
    main()
