"""A million tokens on one GPU: a causal window of 256 and 4 global tokens, with a PDE and without.

    python -m benchmarks.windows_gpu --out windows.json
    python -m benchmarks.windows_gpu --pieces --tokens 1048576
    python -m benchmarks.windows_gpu --tune --tokens 1048576

8 heads of 64 in bfloat16, diffusion with a learnt coefficient for each head, 4 steps. First outputs and
gradients of a short sequence are checked against the dense algorithm in float64, by the project's rule:
errors at most twice, for gradients three times, those of the dense algorithm in bfloat16. Then all are
timed in turn, a round each, by device events; times are medians, ratios medians of a round's ratios to
the same call without a PDE. "Operator" is FlashAttention in that window alone, what no call can be
quicker than. Memory is the peak beyond the inputs. With --pieces every launch is timed by itself, beside
the bandwidth of a copy, with every input and output counted once; with --tune so are other shapes of the
programs, and how far their results are from those of the first.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attractor.attention import pde_attention, pdes, window_attention
from attractor.attention.engines import softmax
from attractor.attention.masks import Scope
from attractor.attention.pdes.evolution import Evolution

HEADS, DIM, WINDOW, GLOBAL, STEPS = 8, 64, 256, 4, 4
TOKENS = (1 << 16, 1 << 18, 1 << 20)
CHECKED, ROUNDS = 1_111, 7
SHAPES = {  # pieces of a row, the run of a strand, and warps, that are tried
    "window_forward": ((2, 2, 4), (2, 4, 4), (1, 4, 4), (2, 2, 8), (2, 1, 4)),
    "window_backward_rows": ((2, 2, 4), (2, 1, 4), (1, 2, 4), (1, 4, 4), (2, 2, 2)),
    "window_backward_keys": ((2, 2, 4), (1, 4, 4), (2, 4, 4), (1, 2, 4), (2, 2, 2)),
}


def inputs(tokens: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    torch.manual_seed(0)
    shape = 1, HEADS, tokens, DIM
    return [torch.randn(shape, device="cuda").to(dtype).requires_grad_() for _ in range(3)]


def alphas() -> Tensor:
    return torch.linspace(0.05, 0.3, HEADS, device="cuda").view(HEADS, 1, 1).requires_grad_()


def windowed(qkv: list[Tensor], alpha: Tensor | None) -> Tensor:
    pde = None if alpha is None else pdes.Diffusion(alpha)
    return window_attention(
        *qkv, window=(WINDOW, 0), global_tokens=GLOBAL, is_causal=True, pde=pde, steps=STEPS
    )


def dense(qkv: list[Tensor], alpha: Tensor | None) -> Tensor:
    row = torch.arange(qkv[0].shape[-2], device="cuda")
    behind = row[:, None] - row
    mask = (behind >= 0) & ((behind <= WINDOW) | (row < GLOBAL))
    pde = pdes.Diffusion() if alpha is None else pdes.Diffusion(alpha)
    steps = 0 if alpha is None else STEPS
    return pde_attention(*qkv, mask, pde=pde, steps=steps, method="dense")


def check(with_pde: bool) -> dict[str, list[float]]:
    """Relative errors of outputs and gradients against float64; raises by our rule."""
    drawn, grad = inputs(CHECKED), inputs(CHECKED)[2].detach().flip(-1)
    found: dict[str, list[Tensor]] = {}
    for name, way, dtype in (
        ("truth", dense, torch.float64),
        ("dense", dense, torch.bfloat16),
        ("window", windowed, torch.bfloat16),
    ):
        qkv = [x.detach().to(dtype).requires_grad_() for x in drawn]
        single = torch.float64 if dtype == torch.float64 else torch.float32
        alpha = alphas().detach().to(single).requires_grad_() if with_pde else None
        out = way(qkv, alpha)
        of = qkv if alpha is None else [*qkv, alpha]
        found[name] = [out.detach(), *torch.autograd.grad(out, of, grad.to(dtype))]
    errors = {
        name: [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found[name], found["truth"])]
        for name in ("dense", "window")
    }
    print(f"errors {'with' if with_pde else 'without'} PDE: {json.dumps(errors)}", flush=True)
    for n, (ours, theirs) in enumerate(zip(errors["window"], errors["dense"])):
        floor = torch.finfo(torch.bfloat16).eps if n == 4 else 0.0  # a few sums over everything
        if not ours <= (2 if n == 0 else 3) * theirs + floor:
            raise SystemExit(f"output {n} is off by {ours:.2e} where dense is by {theirs:.2e}")
    return errors


def times(calls: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Milliseconds a call, for every round; everyone has one round after the other."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(ROUNDS):
        for name, call in calls.items():
            call()  # so that the device has something to do while the next one is launched
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            found[name].append(start.elapsed_time(end))
    return found


def peak(call: Callable[[], Any]) -> float:
    """GiB beyond what is there before."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def measure(tokens: int) -> dict[str, Any]:
    qkv, alpha = inputs(tokens), alphas()
    grad = torch.randn_like(qkv[2])
    scope = Scope(tokens, tokens, WINDOW, 0)
    ways: dict[str, tuple[Callable[[], Tensor], list[Tensor]]] = {
        "without PDE": (lambda: windowed(qkv, None), qkv),
        "with PDE": (lambda: windowed(qkv, alpha), [*qkv, alpha]),
    }

    def forward(way: Callable[[], Tensor]) -> None:
        with torch.no_grad():
            way()

    def both(way: Callable[[], Tensor], of: list[Tensor]) -> None:
        torch.autograd.grad(way(), of, grad)

    def operator(backward: bool) -> None:
        with torch.no_grad():
            out, lse = softmax.attend(*qkv, scope, DIM**-0.5)
            if backward:
                softmax.attend_backward(grad, *qkv, out, lse, scope, DIM**-0.5)

    results: dict[str, Any] = {}
    for kind in ("forward", "both"):
        calls: dict[str, Callable[[], Any]] = {"operator": lambda: operator(kind == "both")}  # noqa: B023
        for name, (way, of) in ways.items():
            calls[name] = (
                (lambda way=way: forward(way)) if kind == "forward" else (lambda w=way, o=of: both(w, o))
            )
        rows: dict[str, dict[str, float]] = {}
        for name, call in list(calls.items()):
            try:
                call()
                rows[name] = {"peak GiB": peak(call)}
            except torch.OutOfMemoryError as error:
                print(f"{tokens:>9,} {kind:<8} {name:<12} does not fit: {str(error).splitlines()[0]}")
                del calls[name]
        found = times(calls)
        for name, ms in found.items():
            rows[name]["ms"] = statistics.median(ms)
            rows[name]["spread"] = (max(ms) - min(ms)) / statistics.median(ms)
            if "without PDE" in found:
                ratios = (a / b for a, b in zip(ms, found["without PDE"]))
                rows[name]["ratio"] = statistics.median(ratios)
            line = "".join(f"  {what} {x:8.4g}" for what, x in rows[name].items())
            print(f"{tokens:>9,} {kind:<8} {name:<12}{line}", flush=True)
        results[kind] = rows
        torch.cuda.empty_cache()
    return results


Launch = tuple[Callable[[], tuple[Tensor, ...]], list[Tensor]]


def launched(tokens: int, with_pde: bool) -> dict[str, Launch]:
    """Every launch by itself: how to call it, and all that it has to read and write."""
    from attractor.attention.kernels import boundary, stencils, values, window

    q, k, v = (x.detach() for x in inputs(tokens))
    grad, scale, sides = torch.randn_like(q), DIM**-0.5, (WINDOW, 0)
    table = None
    if with_pde:
        evolution = Evolution(pdes.Diffusion(alphas()), STEPS, 1.0)
        table = stencils.stencil_table(evolution, v).detach()
    globals_ = k[..., :GLOBAL, :], v[..., :GLOBAL, :].float()
    head, tail = q[..., : GLOBAL + WINDOW + 1, :], q[..., :0, :]
    near = [k, v] if with_pde else []
    stepped = v if table is None else values.step(v, table, None)
    ahead = q, k, stepped, table, sides, scale
    far = window._far_forward(*ahead)
    merged = q, k, v, *far, table, None, *globals_, head, tail, *sides, scale
    out, lse = boundary.boundary_forward(*merged)
    behind = grad, q, k, stepped, out, lse, table, sides, scale
    back = window._far_backward(*behind)
    begin = head.shape[-2]
    by_rows = (
        grad, q, k, v, out, lse, table, None, *globals_, back[0], begin, tokens, *sides, scale, with_pde
    )  # fmt: skip
    dq, row_weights, *of_globals, sums, edge_sums = boundary.boundary_backward_rows(*by_rows)
    found: dict[str, Launch] = {
        "operator": (lambda: window._far_forward(*ahead), [q, k, stepped, far[0]]),
        "window_forward": (lambda: boundary.boundary_forward(*merged)[:1], [q, *far, *near, out, lse]),
        "operator back": (
            lambda: window._far_backward(*behind),
            [grad, q, k, stepped, out, lse, *back],
        ),
        "window_backward_rows": (
            lambda: boundary.boundary_backward_rows(*by_rows)[0:4:2],
            [grad, q, *near, out, lse, back[0], dq, row_weights, *of_globals, sums],
        ),
    }
    if table is not None:
        by_keys = grad, q, v, row_weights, table, None, *back[1:], sums, edge_sums, *sides, True
        found["step"] = lambda: (values.step(v, table, None),), [v, stepped]
        found["window_backward_keys"] = (
            lambda: boundary.boundary_backward_keys(*by_keys),
            [grad, q, v, row_weights, *back[1:], k, v],  # and as much as keys and values
        )
    return found


def away(found: tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> float:
    """The largest difference, relative to the largest entry."""
    pairs = [(a, b) for a, b in zip(found, truth) if b.numel()]
    return torch.stack([(a - b).abs().max() / b.abs().max() for a, b in pairs]).max().item()


def pieces(tokens: int, tune: bool) -> dict[str, Any]:
    """Milliseconds of every launch, and its share of the bandwidth of a copy in the same run."""
    from attractor.attention.kernels import launch

    x = torch.empty(HEADS, tokens, DIM, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    copy = statistics.median(times({"copy": lambda: y.copy_(x)})["copy"])
    bandwidth = 2 * x.nbytes / copy
    print(f"{tokens:>9,} copy {copy:.3f} ms, {bandwidth / 1e6:.0f} GB/s", flush=True)
    results: dict[str, Any] = {"copy GB/s": bandwidth / 1e6}
    for with_pde in (False, True):
        for name, (call, moved) in launched(tokens, with_pde).items():
            kept = launch.TILES.get(name)
            truth = call()
            for shape in SHAPES[name] if tune and kept is not None else (kept,):
                if shape is not None:
                    launch.TILES[name] = shape
                try:
                    off = away(call(), truth)
                    ms = statistics.median(times({name: call})[name])
                except Exception as error:  # a shape may need more than the device has
                    print(f"{name} {shape}: {str(error).splitlines()[0]}", flush=True)
                    continue
                share = sum(t.nbytes for t in moved) / ms / bandwidth
                label = f"{'with' if with_pde else 'without'} PDE, {name}, {shape}"
                results[label] = {"ms": ms, "of copy": share, "off": off}
                print(f"{label:<45} {ms:7.3f} ms {100 * share:4.0f}% of copy  {off:.0e}", flush=True)
            if kept is not None:
                launch.TILES[name] = kept
        torch.cuda.empty_cache()
    return results


def launches(tokens: int) -> dict[str, int]:
    """Kernels of a forward and backward call."""
    qkv, alpha = inputs(tokens), alphas()
    counted = {}
    for name, given in (("without PDE", None), ("with PDE", alpha)):
        of = qkv if given is None else [*qkv, given]
        torch.autograd.grad(windowed(qkv, given).sum(), of)
        with torch.profiler.profile() as profile:
            torch.autograd.grad(windowed(qkv, given).sum(), of)
            torch.cuda.synchronize()
        events = profile.events() or []
        counted[name] = sum(event.device_type == torch.autograd.DeviceType.CUDA for event in events)
    print(f"kernels of forward and backward: {json.dumps(counted)}", flush=True)
    return counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--launches", action="store_true", help="count kernels too")
    parser.add_argument("--pieces", action="store_true", help="time every launch by itself instead")
    parser.add_argument("--tune", action="store_true", help="and other shapes of programs")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this needs a CUDA device; on a CPU run benchmarks.attention")
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    results["errors"] = {name: check(name == "with PDE") for name in ("without PDE", "with PDE")}
    for tokens in given.tokens:
        if given.pieces or given.tune:
            results[f"pieces of {tokens} tokens"] = pieces(tokens, given.tune)
        else:
            results[f"{tokens} tokens"] = measure(tokens)
        keep(results, given.out)
    if given.launches:
        results["kernels"] = launches(min(given.tokens))
        keep(results, given.out)


def keep(results: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
