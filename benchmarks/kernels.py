"""Kernels of linear PDEs on a GPU, beside SDPA: stepped values, and causal stepped attention.

    python -m benchmarks.kernels --what values
    python -m benchmarks.kernels --what causal
    python -m benchmarks.kernels --what documents
    python -m benchmarks.kernels --what causal --tune

8 heads of 64, diffusion with a learnt coefficient for each head. First everything is checked against
float64, on random data of a length that no block divides. Then all are timed in turn, a round each, by
device events; up to 16,384 tokens as replays of a captured graph, for all alike, and there once more
without. Times are medians, ratios medians of a round's ratios to SDPA, for pieces of "values" to a copy
of them; these pieces go round several sets of inputs that together do not fit in the cache. "Of copy"
is the share of the bandwidth that a copy of the values reaches in the same run, with every input and
output counted once. With --tune other shapes of programs are timed instead, kernel by kernel.

"Documents" is causal attention within packed documents of 512 tokens on average, of uneven lengths, beside
FlashAttention of the same documents ("varlen"), for SDPA cannot do them. Where they begin is known to both
before; "by ids" both find it out at every call, which cannot be captured.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from attractor.attention import kernels, pde_attention, pdes
from attractor.attention.engines import backends, boundary, selection, softmax
from attractor.attention.engines.values import Stencil, step_values, steps_forward
from attractor.attention.masks import Scope
from attractor.attention.pdes.evolution import Evolution
from attractor.attention.precision import accumulate_dtype
from attractor.bench.attention import documents_for, varlen
from benchmarks.results import FOLDER, save

HEADS, DIM = 8, 64
BATCH = {1_024: 8, 4_096: 8, 16_384: 1, 65_536: 1}
GRAPHS_UP_TO = 16_384
CACHE = 256 << 20  # bytes of inputs to go round: several times the cache
ROUNDS, FEW_ROUNDS, CHECKED = 15, 5, 1_111
# Pieces of a row, the run of a strand, and warps, that are tried.
SHAPES = ((1, 1, 4), (1, 2, 4), (1, 4, 4), (1, 8, 4), (1, 2, 2), (1, 2, 8))
ALONE = (None,) * 4  # neither global tokens nor rows that are computed elsewhere

Call = Callable[[int], Any]  # of the number of a set of inputs


def use(far: str) -> None:
    """Let that operator compute the far keys, whatever SDPA would use."""
    if far != "auto":
        selection.preferred = lambda *_: far


def times(
    calls: dict[str, Call], sets: int, graphs: bool, rounds: int = ROUNDS
) -> dict[str, list[float]]:
    """Milliseconds a call, for every round; everyone has one round after the other."""
    play = {}
    for name, call in calls.items():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for n in range(3):
                call(n % sets)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()

        def all_sets(call: Call = call) -> None:
            for n in range(sets):
                call(n)

        play[name] = all_sets
        if graphs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                all_sets()
            play[name] = graph.replay
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, run in play.items():
            run()  # whoever came before has left other data in the cache
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            found[name].append(start.elapsed_time(end) / sets)
    return found


def printed(
    found: dict[str, list[float]], moved: dict[str, int], base: str, label: str
) -> dict[str, dict[str, float]]:
    """Medians, ratios to `base`, and the share of the copy's bandwidth where bytes are known."""
    rows = {}
    for name, ms in found.items():
        row = {"ms": statistics.median(ms), "spread": (max(ms) - min(ms)) / statistics.median(ms)}
        if base in found:
            row["ratio"] = statistics.median(a / b for a, b in zip(ms, found[base]))
        if name in moved:
            row["TB/s"] = moved[name] / row["ms"] / 1e9
            copy = statistics.median(found["copy"])
            row["of copy"] = moved[name] / moved["copy"] * copy / row["ms"]
        rows[name] = row
        print(f"{label:>28}  {name:<34}" + "".join(f"  {k} {v:.4g}" for k, v in row.items()), flush=True)
    return rows


def inputs(tokens: int, dtype: torch.dtype, many: int, batch: int | None = None) -> list[Tensor]:
    torch.manual_seed(0)
    shape = batch or BATCH[tokens], HEADS, tokens, DIM
    return [torch.randn(shape, device="cuda", dtype=dtype) for _ in range(many)]


def alphas() -> Tensor:
    return torch.linspace(0.05, 0.3, HEADS, device="cuda").view(HEADS, 1, 1).requires_grad_()


def stencil_table(pde: Any, steps: int, like: Tensor) -> Tensor:
    """The stencil table of so many steps of size 1."""
    from attractor.attention.kernels import stencils

    return stencils.stencil_table(Evolution(pde, steps, 1.0), like)


def error(found: Tensor, truth: Tensor) -> float:
    return ((found.double() - truth.double()).norm() / truth.double().norm()).item()


def check(what: str, steps: int, dtype: torch.dtype) -> dict[str, list[float]]:
    """Relative errors against float64 of the kernels and of torch in the same type; raises by our rule."""
    from attractor.attention.kernels import causal, values

    drawn, results = inputs(CHECKED, dtype, 4, batch=2), {}
    for kind in ("truth", "torch", "kernels"):
        dtype_ = torch.float64 if kind == "truth" else dtype
        q, k, v, grad = (x.to(dtype_).requires_grad_() for x in drawn)
        alpha = alphas().detach().to(accumulate_dtype(dtype_)).requires_grad_()
        pde = pdes.Diffusion(alpha)
        if what == "values":
            if kind == "kernels":
                out = values.step(v, stencil_table(pde, steps, v), None)
            else:
                out = step_values(Evolution(pde, steps, 1.0), v.to(accumulate_dtype(dtype_)), None).to(
                    dtype_
                )
            of = [v, alpha]
        else:
            ids, of = documents_for(q) if what == "documents" else None, [q, k, v, alpha]
            if kind == "kernels":
                within = None if ids is None else causal.pack_documents(q, k, v, ids, steps)
                out = causal.causal(q, k, v, stencil_table(pde, steps, v), DIM**-0.5, within)
            else:
                out = pde_attention(
                    q, k, v, is_causal=True, pde=pde, steps=steps, documents=ids, method="dense"
                )
        results[kind] = [x.detach() for x in (out, *torch.autograd.grad(out, of, grad.detach()))]
    found = {
        kind: [error(a, b) for a, b in zip(results[kind], results["truth"])]
        for kind in ("torch", "kernels")
    }
    print(f"check {what}, {steps} steps, {dtype}: " + json.dumps(found), flush=True)
    floor = 8 * torch.finfo(accumulate_dtype(dtype)).eps
    for n, (ours, theirs) in enumerate(zip(found["kernels"], found["torch"])):
        few = (
            torch.finfo(dtype).eps if n == len(found["torch"]) - 1 else floor
        )  # the coefficients' gradient
        allowed = (2 if n == 0 else 3) * theirs + few
        if not ours <= allowed:
            raise SystemExit(f"kernel output {n} is off by {ours:.2e} where {allowed:.2e} is allowed")
    return found


def the_same(call: Callable[[], tuple[Tensor, ...]], repeats: int = 250) -> bool:
    """Whether so many calls give the same bits."""
    first = call()
    return all(torch.equal(a, b) for _ in range(repeats - 1) for a, b in zip(first, call()))


def count_of_sets(*held: Tensor) -> int:
    return max(2, min(16, CACHE // sum(x.numel() * x.element_size() for x in held)))


def measure_values(tokens: int, steps: int, dtype: torch.dtype) -> dict[str, Any]:
    from attractor.attention.kernels import values

    one = inputs(tokens, dtype, 1)[0]
    sets = count_of_sets(one, one)
    drawn = inputs(tokens, dtype, 2 * sets)
    v, grad = drawn[:sets], drawn[sets:]
    outs = [torch.empty_like(one) for _ in range(sets)]
    pde = pdes.Diffusion(alphas())
    with torch.no_grad():
        table = stencil_table(pde, steps, one)
        stencil = Stencil.of(Evolution(pde, steps, 1.0), accumulate_dtype(dtype), one.device)
    size = one.numel() * one.element_size()
    moved = {
        "copy": 2 * size,
        "step": 2 * size,
        "backward, values": 2 * size,
        "backward, both": 3 * size,
    }
    calls: dict[str, Call] = {
        "copy": lambda n: outs[n].copy_(v[n]),
        "step": lambda n: values.step(v[n], table, None),
        "backward, values": lambda n: values.step_backward(grad[n], v[n], table, None, False),
        "backward, both": lambda n: values.step_backward(grad[n], v[n], table, None, True),
        "table alone": lambda n: stencil_table(pde, steps, one),
        "torch step": lambda n: steps_forward(
            stencil.matrix, stencil.top, stencil.bottom, v[n].to(accumulate_dtype(dtype))
        ).to(dtype),
    }
    label = f"values T={tokens} Nt={steps} {str(dtype)[6:]}"
    with torch.no_grad():
        counted = times(calls, sets, tokens <= GRAPHS_UP_TO, rounds_for(tokens))
        found = printed(counted, moved, "copy", label)
        same = the_same(
            lambda: (values.step(one, table, None), *values.step_backward(one, v[1], table, None, True))
        )
    return {
        "pieces": found,
        "same bits 250 times": same,
        **against_sdpa(tokens, steps, dtype, causal=False),
    }


def measure_causal(tokens: int, steps: int, dtype: torch.dtype) -> dict[str, Any]:
    from attractor.attention.kernels import values
    from attractor.attention.kernels.boundary import (
        CAUSAL,
        boundary_backward_keys,
        boundary_backward_rows,
        boundary_forward,
    )

    q, k, v, grad = inputs(tokens, dtype, 4)
    scale, pde = DIM**-0.5, pdes.Diffusion(alphas())
    size = v.numel() * v.element_size()
    between = v.numel() // DIM * 3 * steps * table_bytes(dtype)
    rows, keys = slice(steps, None), slice(0, tokens - steps)
    scope = Scope(tokens - steps, tokens - steps, right=0)
    with torch.no_grad():
        table = stencil_table(pde, steps, v)
        stepped = values.step(v, table, None)
        cut = q[..., rows, :], k[..., keys, :], stepped[..., keys, :]
        far, far_lse = softmax.attend(*cut, scope, scale)
        merged = q, k, v, far, far_lse, table, None, *ALONE, CAUSAL, 0, scale
        out, lse = boundary_forward(*merged)
        later = out[..., rows, :], lse[..., rows], scope, scale
        of_far = softmax.attend_backward(grad[..., rows, :], *cut, *later)
        of_rows = grad, q, k, v, out, lse, table, None, None, None, of_far[0], 0, 0, CAUSAL, 0, scale
        _, row_weights, _, _, *sums = boundary_backward_rows(*of_rows, True)
        of_keys = grad, q, v, row_weights, table, None, *of_far[1:], *sums, CAUSAL, 0
    other = torch.empty_like(v)
    calls: dict[str, Call] = {
        "sdpa": lambda _: sdpa(q, k, v, is_causal=True),
        "copy": lambda _: other.copy_(v),
        "step": lambda _: values.step(v, table, None),
        "far": lambda _: softmax.attend(*cut, scope, scale),
        "boundary": lambda _: boundary_forward(*merged),
        "far backward": lambda _: softmax.attend_backward(grad[..., rows, :], *cut, *later),
        "boundary rows": lambda _: boundary_backward_rows(*of_rows, True),
        "boundary rows, fixed table": lambda _: boundary_backward_rows(*of_rows, False),
        "boundary keys": lambda _: boundary_backward_keys(*of_keys, True),
        "boundary keys, fixed table": lambda _: boundary_backward_keys(*of_keys, False),
    }
    moved = {
        "copy": 2 * size, "step": 2 * size, "boundary": 5 * size,
        "boundary rows": 7 * size + between, "boundary rows, fixed table": 7 * size + between,
        "boundary keys": 7 * size + between, "boundary keys, fixed table": 6 * size + between,
    }  # fmt: skip
    label = f"causal T={tokens} Nt={steps} {str(dtype)[6:]}"
    with torch.no_grad():
        counted = times(calls, 2, tokens <= GRAPHS_UP_TO, rounds_for(tokens))
        found = printed(counted, moved, "sdpa", label)
        same = the_same(
            lambda: (*boundary_forward(*merged),
                     *boundary_backward_rows(*of_rows, True), *boundary_backward_keys(*of_keys, True))
        )  # fmt: skip
    return {
        "pieces": found,
        "same bits 250 times": same,
        **against_sdpa(tokens, steps, dtype, causal=True),
    }


def measure_documents(tokens: int, steps: int, dtype: torch.dtype) -> dict[str, Any]:
    from attractor.attention.kernels import causal, values
    from attractor.attention.kernels.boundary import (
        CAUSAL,
        boundary_backward_keys,
        boundary_backward_rows,
        boundary_forward,
    )

    q, k, v, grad = inputs(tokens, dtype, 4)
    scale, pde, ids = DIM**-0.5, pdes.Diffusion(alphas()), documents_for(q)
    size = v.numel() * v.element_size()
    between = v.numel() // DIM * 3 * steps * table_bytes(dtype)
    within, whole = causal.pack_documents(q, k, v, ids, steps), whole_documents(q, k, v, ids)
    assert within is not None
    open, strip = within.open, within.operator.strip
    assert strip is not None
    with torch.no_grad():
        table = stencil_table(pde, steps, v)
        stepped = values.step(v, table, open)
        cut = strip.cut(q, k, stepped)
        far, far_lse = within.operator.forward(*cut, strip, scale)
        merged = q, k, v, far, far_lse, table, open, *ALONE, CAUSAL, 0, scale
        out, lse = boundary_forward(*merged)
        later = grad[..., steps:, :], out[..., steps:, :], *cut, lse[..., steps:], strip, scale
        of_far = within.operator.backward(*later)
        of_rows = grad, q, k, v, out, lse, table, open, None, None, of_far[0], 0, 0, CAUSAL, 0, scale
        _, row_weights, _, _, *sums = boundary_backward_rows(*of_rows, True)
        of_keys = grad, q, v, row_weights, table, open, *of_far[1:], *sums, CAUSAL, 0
    other = torch.empty_like(v)
    calls: dict[str, Call] = {
        "varlen": lambda _: whole.forward(q, k, v, whole.strip, scale),
        "copy": lambda _: other.copy_(v),
        "step": lambda _: values.step(v, table, open),
        "step, one document": lambda _: values.step(v, table, None),
        "far": lambda _: within.operator.forward(*cut, strip, scale),
        "boundary": lambda _: boundary_forward(*merged),
        "boundary, one document": lambda _: boundary_forward(*merged[:6], None, *merged[7:]),
        "far backward": lambda _: within.operator.backward(*later),
        "boundary rows": lambda _: boundary_backward_rows(*of_rows, True),
        "boundary rows, fixed table": lambda _: boundary_backward_rows(*of_rows, False),
        "boundary keys": lambda _: boundary_backward_keys(*of_keys, True),
        "boundary keys, fixed table": lambda _: boundary_backward_keys(*of_keys, False),
    }
    moved = {
        "copy": 2 * size, "step": 2 * size, "step, one document": 2 * size, "boundary": 5 * size,
        "boundary, one document": 5 * size, "boundary rows": 7 * size + between,
        "boundary rows, fixed table": 7 * size + between, "boundary keys": 7 * size + between,
        "boundary keys, fixed table": 6 * size + between,
    }  # fmt: skip
    label = f"documents T={tokens} Nt={steps} {str(dtype)[6:]}"
    with torch.no_grad():
        counted = times(calls, 2, tokens <= GRAPHS_UP_TO, rounds_for(tokens))
        found = printed(counted, moved, "varlen", label)
        same = the_same(
            lambda: (*boundary_forward(*merged),
                     *boundary_backward_rows(*of_rows, True), *boundary_backward_keys(*of_keys, True))
        )  # fmt: skip
    alpha, qkv = alphas(), [x.requires_grad_() for x in (q, k, v)]
    prepared = {
        "varlen": lambda: _Known.apply(*qkv, whole, scale),
        "kernels": lambda: causal.causal(
            *qkv, stencil_table(pdes.Diffusion(alpha), steps, v), scale, within
        ),
    }
    common: dict[str, Any] = {"is_causal": True, "steps": steps, "documents": ids}
    by_ids = {
        "varlen": lambda: varlen(*qkv, ids),
        "kernels": lambda: pde_attention(*qkv, pde=pdes.Diffusion(alpha), method="fused", **common),
        "torch": lambda: pde_attention(*qkv, pde=pdes.Diffusion(alpha), method="stepped", **common),
    }
    return {
        "pieces": found,
        "same bits 250 times": same,
        **beside(prepared, "varlen", label, qkv, alpha, grad, [tokens <= GRAPHS_UP_TO]),
        "by ids": beside(by_ids, "varlen", label + " by ids", qkv, alpha, grad, [False]),
    }


def whole_documents(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> backends.Operator:
    """For causal attention within documents, without a PDE."""
    return selection.choose(q, k, v, Scope(q.shape[-2], q.shape[-2], right=0, documents=ids))


class _Known(torch.autograd.Function):
    """Attention by an operator that is known already."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, operator: backends.Operator, scale: float
    ) -> Tensor:
        out, lse = operator.forward(q, k, v, operator.strip, scale)
        ctx.operator, ctx.scale = operator, scale
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        operator = ctx.operator
        return *operator.backward(grad, out, q, k, v, lse, operator.strip, ctx.scale), None, None


def tune(what: str, tokens: int, steps: int, dtype: torch.dtype) -> None:
    """Every kernel with other runs and warps, beside its default."""
    from attractor.attention.kernels import launch, values
    from attractor.attention.kernels.boundary import (
        CAUSAL,
        boundary_backward_keys,
        boundary_backward_rows,
        boundary_forward,
    )

    q, k, v, grad = inputs(tokens, dtype, 4)
    scale = DIM**-0.5
    with torch.no_grad():
        table = stencil_table(pdes.Diffusion(alphas()), steps, v)
        far, far_lse = v[..., steps:, :], v[..., steps:, 0].to(accumulate_dtype(dtype))
        sides = CAUSAL, 0
        merged = q, k, v, far, far_lse, table, None, *ALONE, *sides, scale
        out, lse = boundary_forward(*merged)
        of_rows = grad, q, k, v, out, lse, table, None, None, None, far, 0, 0, *sides, scale, True
        _, row_weights, _, _, *sums = boundary_backward_rows(*of_rows)
        of_keys = grad, q, v, row_weights, table, None, far, far, *sums, *sides, True
    kernels: dict[str, Callable[[], Any]] = {
        "step": lambda: values.step(v, table, None),
        "step_backward": lambda: values.step_backward(grad, v, table, None, True),
    }
    if what == "causal":
        kernels = {
            "causal_forward": lambda: boundary_forward(*merged),
            "causal_backward_rows": lambda: boundary_backward_rows(*of_rows),
            "causal_backward_keys": lambda: boundary_backward_keys(*of_keys),
        }
    for name, run in kernels.items():
        default = launch.TILES[name]

        def call(shape: tuple[int, int, int], name: str = name, run: Callable[[], Any] = run) -> Any:
            launch.TILES[name] = shape
            return run()

        calls: dict[str, Call] = {str(shape): lambda _, shape=shape: call(shape) for shape in SHAPES}
        with torch.no_grad():
            found = printed(times(calls, 2, True), {}, str(default), f"{name} T={tokens} Nt={steps}")
        launch.TILES[name] = default
        best = min(found, key=lambda shape: found[shape]["ms"])
        print(f"best for {name}, {tokens} tokens: {best} (default {default})", flush=True)


def rounds_for(tokens: int) -> int:
    return ROUNDS if tokens <= 4_096 else FEW_ROUNDS


def table_bytes(dtype: torch.dtype) -> int:
    return torch.empty((), dtype=accumulate_dtype(dtype)).element_size()


def against_sdpa(tokens: int, steps: int, dtype: torch.dtype, causal: bool) -> dict[str, Any]:
    """Whole calls with a new stencil table: forward, forward with backward, and peak memory."""
    from attractor.attention.kernels import causal as causal_kernels
    from attractor.attention.kernels import values

    alpha, grad = alphas(), inputs(tokens, dtype, 1)[0]
    qkv = [x.requires_grad_() for x in inputs(tokens, dtype, 3)]

    def kernels() -> Tensor:
        pde = pdes.Diffusion(alpha)
        table = stencil_table(pde, steps, qkv[2])
        if causal:
            return causal_kernels.causal(*qkv, table, DIM**-0.5)
        return sdpa(*qkv[:2], values.step(qkv[2], table, None))

    def plain_torch() -> Tensor:
        evolution = Evolution(pdes.Diffusion(alpha), steps, 1.0)
        stencil = Stencil.of(evolution, accumulate_dtype(dtype), alpha.device)
        if causal:
            operator = selection.choose_square_causal(qkv[0], qkv[2], tokens - steps)
            return boundary.causal(*qkv, stencil, operator, DIM**-0.5)
        return sdpa(*qkv[:2], stencil.step(qkv[2].to(accumulate_dtype(dtype))).to(dtype))

    ways = {"sdpa": lambda: sdpa(*qkv, is_causal=causal), "kernels": kernels, "torch": plain_torch}
    label = f"{'causal ' if causal else ''}T={tokens} Nt={steps}"
    modes = [tokens <= GRAPHS_UP_TO, *([False] if tokens == GRAPHS_UP_TO else [])]
    return beside(ways, "sdpa", label, qkv, alpha, grad, modes)


def beside(
    ways: dict[str, Callable[[], Tensor]], base: str, label: str, qkv: list[Tensor], alpha: Tensor,
    grad: Tensor, modes: list[bool],
) -> dict[str, Any]:  # fmt: skip
    """Forward, and forward with backward, and peak memory; by graphs or not, as modes say."""
    tokens, found = grad.shape[-2], {}
    for kind in ("forward", "both"):

        def call(way: Callable[[], Tensor], of: list[Tensor], kind: str = kind) -> Any:
            if kind == "forward":
                with torch.no_grad():
                    return way()
            return torch.autograd.grad(way(), of, grad)

        calls: dict[str, Call] = {
            name: (lambda _, way=way, of=[*qkv, *([] if name == base else [alpha])]: call(way, of))
            for name, way in ways.items()
        }
        memory = {}
        for name, one in calls.items():
            one(0)
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            one(0)
            torch.cuda.synchronize()
            memory[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
        for n, graphs in enumerate(modes):
            mode = ", eager" if n else ""
            sets = 2 if tokens <= 4_096 else 1
            counted = times(calls, sets, graphs, rounds_for(tokens))
            rows = printed(counted, {}, base, f"{label} {kind}{mode}")
            for name, row in rows.items():
                row["peak MiB"] = memory[name]
            found[kind + mode] = rows
    return found


def ceiling() -> float:
    """TB/s of a copy of a gigabyte."""
    a = torch.randn(1 << 28, device="cuda")
    b = torch.empty_like(a)
    found = times({"copy": lambda _: b.copy_(a)}, 2, False)["copy"]
    return 2 * a.numel() * 4 / statistics.median(found) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--what", choices=("values", "causal", "documents"), required=True)
    parser.add_argument("--far", choices=("auto", "flash", "cudnn"), default="auto")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(BATCH), choices=list(BATCH))
    parser.add_argument("--steps", type=int, nargs="+", default=[4])
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    given = parser.parse_args()
    dtype = getattr(torch, given.dtype)
    if not torch.cuda.is_available() or not kernels.usable(torch.empty(1, 1, 1, DIM, device="cuda"), 1):
        raise SystemExit(
            "these kernels need a CUDA device and Triton; on a CPU run benchmarks.attention"
        )
    use(given.far)
    if given.tune:
        for tokens in given.tokens if len(given.tokens) < len(BATCH) else (1_024, 4_096):
            tune(given.what, tokens, given.steps[0], dtype)
        return
    measures = {"values": measure_values, "causal": measure_causal, "documents": measure_documents}
    measure = measures[given.what]
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "copy TB/s": ceiling()}
    print(f"{results['device']}: a copy moves {results['copy TB/s']:.2f} TB/s")
    for steps in given.steps:
        results[f"errors, {steps} steps"] = {str(dtype): check(given.what, steps, dtype)}
        for tokens in given.tokens:
            results[f"{tokens} tokens, {steps} steps"] = measure(tokens, steps, dtype)
            torch.cuda.empty_cache()
    path = FOLDER / "kernels.json"
    kept = json.loads(path.read_text()).get("results", {}) if path.exists() else {}
    name = f"{given.what} {given.dtype} {given.far}"
    save("kernels", {"results": {**kept, name: results}})


if __name__ == "__main__":
    main()
