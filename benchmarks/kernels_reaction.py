"""Reaction-diffusion attention in kernels, beside SDPA: stepped and split, causal and not.

    python -m benchmarks.kernels_reaction --out reaction.json
    python -m benchmarks.kernels_reaction --what steps --tokens 4096 --tune

bf16, 8 heads of 64, 4 steps, coefficients for each head. First outputs and gradients are checked against
float64, beside the dense algorithm in the same type, on a length that no block divides; what fails is
reported, and not timed. `--tune` then tries sizes of blocks for every kernel (or those of `--only`), and
keeps the quickest of those that give the same result; many processes compile them first. All are timed
in turn, a round each, by device events, up to 4,096 tokens as replays of captured graphs; times are
medians, ratios medians of a round's ratios to SDPA. "deterministic" is "steps" under torch's deterministic
algorithms, whose backward has several launches; both are checked and timed. `--repeats 250` asks for
deterministic algorithms, and counts runs whose bits differ from the first. `--out` is written after every
part.

Floors of a forward pass: one product of matrices for the log-sum-exp (two if backward wants the mean key)
and two for the rest; and in single precision 4 operations a step and about 5 more an entry of the map.
"""

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from attractor.attention import pde_attention, pdes
from attractor.attention.kernels import reaction
from attractor.attention.kernels.reaction import launch

HEADS, DIM, STEPS = 8, 64, 4
BATCH = {1_024: 32, 4_096: 8, 16_384: 2, 65_536: 1}
GRAPHS_UP_TO = 4_096
ROUNDS, CHECKED = 15, 777
SCALE = DIM**-0.5
Call = Callable[[], Any]
Size = tuple[Any, ...]
RESULTS = ("output", "query", "key", "value", "alpha", "beta")  # what is compared

# `launch.TILES` to try, and for "backward" whether products are by keys. The first is what is checked
# against float64; the others must agree with it, for assemblers have been seen to get single sizes wrong.
SIZES: dict[str, list[Size]] = {
    "log_sum_exp": [(128, 64, 4, 3), (128, 128, 8, 3), (64, 64, 4, 3)],
    "forward": [(64, 32, 4, 2), (128, 32, 8, 2), (64, 16, 4, 2), (128, 16, 8, 2)],
    "backward": [
        (64, 32, 4, 1, True),
        (64, 32, 4, 1, False),
        (64, 16, 4, 1, True),
        (64, 16, 4, 1, False),
        (128, 32, 8, 1, True),
    ],
    "key_gradients": [(64, 128, 8, 3), (64, 128, 4, 3), (128, 128, 8, 2), (64, 64, 4, 3)],
    "split_forward": [(128, 64, 8, 3), (128, 128, 8, 2), (128, 64, 4, 3)],
    "split_backward": [(128, 64, 8, 2), (128, 64, 8, 3), (128, 32, 8, 2)],
    "split_key_gradients": [(64, 128, 8, 2), (64, 128, 8, 3), (64, 64, 4, 2)],
}


def times(calls: dict[str, Call], graphs: bool, rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Milliseconds a call, for every round; everyone has one round after the other."""
    play = {}
    for name, call in calls.items():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        play[name] = call
        if graphs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call()
            play[name] = graph.replay
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, run in play.items():
            run()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            found[name].append(start.elapsed_time(end))
    return found


def equation(split: bool, dtype: torch.dtype = torch.float32) -> tuple[Any, list[Tensor]]:
    alpha, beta = (
        torch.linspace(*ends, HEADS, device="cuda", dtype=dtype).view(HEADS, 1, 1).requires_grad_()
        for ends in ((0.05, 0.2), (0.02, 0.1))
    )
    return pdes.ReactionDiffusion(alpha, beta, split=split), [alpha, beta]


def inputs(batch: int, tokens: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Query, key, value, and a gradient of the output."""
    torch.manual_seed(0)
    shape = batch, HEADS, tokens, DIM
    return [torch.randn(shape, device="cuda", dtype=dtype).requires_grad_() for _ in range(4)]


def fused(q: Tensor, k: Tensor, v: Tensor, pde: Any, causal: bool) -> Tensor:
    return reaction.attend(q, k, v, SCALE, pde=pde, steps=STEPS, dt=1.0, is_causal=causal)


def check(split: bool, causal: bool, dtype: torch.dtype) -> dict[str, Any]:
    """Relative errors of output and gradients, and which of ours are more than 2 and 3 times dense's."""
    drawn, results = inputs(2, CHECKED, dtype), {}
    kinds = ("truth", "dense", "fused", *([] if split else ["deterministic"]))
    for kind in kinds:
        torch.use_deterministic_algorithms(kind == "deterministic", warn_only=True)
        exact = torch.float64 if kind == "truth" else dtype
        q, k, v, grad = (x.detach().to(exact).requires_grad_() for x in drawn)
        pde, leaves = equation(split, torch.float64 if kind == "truth" else torch.float32)
        if kind in kinds[2:]:
            out = fused(q, k, v, pde, causal)
        else:
            out = pde_attention(q, k, v, is_causal=causal, pde=pde, steps=STEPS, method="dense")
        results[kind] = [out, *torch.autograd.grad(out, [q, k, v, *leaves], grad)]
    torch.use_deterministic_algorithms(False)
    found: dict[str, Any] = {
        kind: [
            ((a.double() - b.double()).norm() / b.double().norm()).item()
            for a, b in zip(results[kind], results["truth"])
        ]
        for kind in kinds[1:]
    }
    floor = 1e-5 if dtype == torch.float32 else 1e-3
    few = (
        8 * torch.finfo(dtype).eps + floor
    )  # coefficients: few numbers, of which dense may get one by luck
    found["wrong"] = [
        f"{RESULTS[n]}, {kind}"
        for kind in kinds[2:]
        for n, (dense, ours) in enumerate(zip(found["dense"], found[kind]))
        if not ours <= (2 if n == 0 else 3) * dense + (few if n > 3 else floor)
    ]
    print(f"check split={split} causal={causal} {dtype}: {json.dumps(found)}", flush=True)
    return found


def kernels(split: bool, tokens: int) -> dict[str, Call]:
    """A call of every kernel, where nothing is masked."""
    q, k, v, grad = (x.detach() for x in inputs(BATCH[tokens], tokens))
    pde, _ = equation(split)
    alpha, beta = (x.detach().flatten().contiguous() for x in (pde.alpha, pde.beta))
    options = False, SCALE
    lse, mean = reaction.row_statistics(q, k, *options, True)
    excess, dk = lse * 0.01, torch.zeros_like(k, dtype=torch.float32)  # of plausible sizes
    saved = lse, mean
    if split:
        return {
            "split_forward": lambda: launch.split_reaction(
                q, k, v, v, alpha, beta, *saved, *options, STEPS
            ),
            "split_backward": lambda: launch.split_backward(
                grad, q, k, v, v, beta, *saved, *options, 0, True
            ),
            "split_key_gradients": lambda: launch.key_gradients(
                grad, q, k, v, beta, lse, lse, excess, None, *options, 0
            ),
        }
    return {
        "backward": lambda: launch.backward(
            grad, q, k, v, v, alpha, beta, *saved, None, None, *options, STEPS, True, False
        ),
        "key_gradients": lambda: launch.key_gradients(
            None, q, k, None, beta, lse, None, excess, dk, *options, 0
        ),
        "forward": lambda: launch.reaction(q, k, v, alpha, beta, *saved, *options, STEPS),
        "log_sum_exp": lambda: launch.log_sum_exp(q, k, *options, True),
    }


def take(name: str, size: Size) -> None:
    launch.TILES[name] = size[:4]
    if name == "backward":
        launch.DIM_BY_KEYS = size[4]


def compiled(given: tuple[str, Size, bool, int]) -> str:
    """One size in a process of its own, for Triton's cache; what went wrong, if something did."""
    name, size, split, tokens = given
    try:
        take(name, size)
        kernels(split, tokens)[name]()
        torch.cuda.synchronize()
    except Exception as error:  # too much shared memory, say
        return f"{type(error).__name__} {str(error)[:200]}"
    return ""


def tune(split: bool, tokens: int, only: list[str]) -> dict[str, dict[str, float]]:
    """Tries `SIZES`, one kernel after the other, and leaves the quickest in place. Nothing is masked."""
    calls = {name: call for name, call in kernels(split, tokens).items() if not only or name in only}
    began = time.perf_counter()
    wanted = [(name, size, split, tokens) for name in calls for size in SIZES[name]]
    with multiprocessing.get_context("spawn").Pool(min(12, len(wanted))) as pool:
        failed = dict(zip(((name, size) for name, size, *_ in wanted), pool.map(compiled, wanted, 1)))
    print(f"compiled {len(wanted)} in {time.perf_counter() - began:.0f} s", flush=True)
    found: dict[str, dict[str, float]] = {}
    for name, call in calls.items():
        found[name] = {}
        reference = None
        for size in SIZES[name]:
            if failed[name, size]:
                print(f"{name} {size}: {failed[name, size]}", flush=True)
                continue
            take(name, size)
            began = time.perf_counter()
            result = call()
            result = result if isinstance(result, tuple) else (result,)
            reference = result if reference is None else reference
            off = max_difference(result, reference)
            ms = statistics.median(times({name: call}, False, 5)[name])
            took = time.perf_counter() - began
            wrong = "" if off < 1e-2 else f", but off by {off:.1e}"
            print(f"{name} {size}: {ms:.3f} ms ({took:.0f} s){wrong}", flush=True)
            if not wrong:
                found[name][str(size)] = ms
        best = min(SIZES[name], key=lambda size: found[name].get(str(size), float("inf")))
        take(name, best)
        print(f"{name}: {best}", flush=True)
    if "log_sum_exp" in calls:
        q, k, *_ = (x.detach() for x in inputs(BATCH[tokens], tokens))
        both = {}
        for by_operator in (False, True):
            reaction.BY_OPERATOR = by_operator
            call = partial(reaction.row_statistics, q, k, None, None, False, SCALE, True)
            both[str(by_operator)] = statistics.median(times({"": call}, False, 5)[""])
        reaction.BY_OPERATOR = both["True"] <= both["False"]
        found["log_sum_exp by operator"] = both
        print(f"log-sum-exp and mean key by the operator: {both}", flush=True)
    return found


def max_difference(some: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> float:
    """Of results that should be equal, relative to their norms; NaN is infinite."""
    pairs = ((a.double(), b.double()) for a, b in zip(some, others) if a.numel())
    off = [((a - b).norm() / b.norm()).item() for a, b in pairs]
    return max(x if x == x else float("inf") for x in off)


def _call(model: Any, given: list[Tensor], leaves: list[Tensor], grad: Tensor | None) -> Any:
    if grad is None:
        with torch.no_grad():
            return model(*given)
    return torch.autograd.grad(model(*given), [*given, *leaves], grad)


def deterministic(call: Call) -> Any:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return call()
    finally:
        torch.use_deterministic_algorithms(False)


def compare(tokens: int, causal: bool, what: list[str]) -> dict[str, dict[str, float]]:
    """Medians and ratios to SDPA, of forward and of forward with backward."""
    q, k, v, grad = inputs(BATCH[tokens], tokens)
    grad = grad.detach()

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, is_causal=causal)

    models: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {"sdpa": (plain, [])}
    for name in what:
        pde, leaves = equation(name == "split")
        models[name] = (lambda q, k, v, pde=pde: fused(q, k, v, pde, causal), leaves)
    result: dict[str, dict[str, float]] = {}
    for backward in (False, True):
        calls: dict[str, Call] = {}
        for name, (model, leaves) in models.items():
            calls[name] = partial(_call, model, [q, k, v], leaves, grad if backward else None)
        if backward and "steps" in what:
            calls["deterministic"] = partial(deterministic, calls["steps"])
        found = times(calls, tokens <= GRAPHS_UP_TO)
        kind = "forward and backward" if backward else "forward"
        for name, ms in found.items():
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            calls[name]()
            torch.cuda.synchronize()
            row = {
                "ms": statistics.median(ms),
                "ratio": statistics.median(a / b for a, b in zip(ms, found["sdpa"])),
                "MiB": (torch.cuda.max_memory_allocated() - before) / 2**20,
            }
            result[f"{name}, {kind}"] = row
            label = f"{tokens}{' causal' if causal else ''} {name}, {kind}"
            print(f"{label:<44}" + "".join(f"  {n} {x:.4g}" for n, x in row.items()), flush=True)
    return result


def repeats(count: int, split: bool, causal: bool) -> int:
    """How many of so many runs differ in a bit from the first, where torch is asked that none do."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    q, k, v, grad = inputs(2, 1_000)
    pde, leaves = equation(split)
    runs = (
        (out, *torch.autograd.grad(out, [q, k, v, *leaves], grad.detach()))
        for out in (fused(q, k, v, pde, causal) for _ in range(count))
    )
    first = next(runs)
    different = sum(not all(torch.equal(a, b) for a, b in zip(first, run)) for run in runs)
    torch.use_deterministic_algorithms(False)
    return different


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--what", choices=("both", "steps", "split"), default="both")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1_024, 4_096, 16_384])
    parser.add_argument("--causal", choices=("both", "no", "only"), default="both")
    parser.add_argument("--tune", action="store_true", help="try sizes of blocks first")
    parser.add_argument("--only", nargs="+", default=[], choices=SIZES, help="kernels to tune")
    parser.add_argument("--repeats", type=int, default=0, help="runs to compare bit by bit")
    parser.add_argument("--float32", action="store_true", help="check single precision too")
    parser.add_argument("--out", type=Path, help="a JSON file for all numbers")
    args = parser.parse_args()
    what = ["steps", "split"] if args.what == "both" else [args.what]
    masks = {"both": [False, True], "no": [False], "only": [True]}[args.causal]
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }

    def save() -> None:
        if args.out:
            args.out.write_text(json.dumps(report, indent=1) + "\n")

    failed: set[tuple[str, bool]] = set()
    for name in what:
        for causal in masks:
            for dtype in (torch.bfloat16, torch.float32)[: 2 if args.float32 else 1]:
                key = f"check {name}{' causal' if causal else ''} {dtype}"
                report[key] = check(name == "split", causal, dtype)
                if report[key]["wrong"]:
                    failed.add((name, causal))
                save()
    if args.tune:
        for name in what:
            if not any((name, causal) in failed for causal in masks):
                report[f"tune {name}"] = tune(name == "split", min(4_096, max(args.tokens)), args.only)
                save()
    report["tiles"] = {
        **launch.TILES,
        "dim by keys": launch.DIM_BY_KEYS,
        "operator": reaction.BY_OPERATOR,
    }
    print(report["tiles"], flush=True)
    for tokens in args.tokens:
        for causal in masks:
            right = [name for name in what if (name, causal) not in failed]
            report[f"{tokens}{' causal' if causal else ''}"] = compare(tokens, causal, right)
            save()
    if args.repeats:
        for name in what:
            for causal in masks:
                key = f"{name}{' causal' if causal else ''}: runs that differ, of {args.repeats}"
                report[key] = repeats(args.repeats, name == "split", causal)
                print(key, report[key], flush=True)
                save()
    if failed:
        raise SystemExit(f"not timed, for its check failed: {sorted(failed)}")


if __name__ == "__main__":
    main()
