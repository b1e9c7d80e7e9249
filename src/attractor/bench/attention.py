"""Benchmark of PDE attention against `scaled_dot_product_attention` in the same run.

    stepped     a linear PDE (diffusion, with one learnt coefficient per head)
    causal      the same, causal
    reaction    reaction-diffusion, a nonlinear PDE whose steps are applied to tiles of the map
    split       the same with an exact reaction step first
    window      a causal window and global tokens with diffusion; the peer is the same without a PDE
    documents   causal diffusion on packed documents of uneven lengths; the peer is FlashAttention on the
                same documents, called through our operator, because SDPA does not support them. Both
                get document ids and compute the boundaries once per tensor of ids, as in a model

"Both" is forward and backward, including the gradients of the coefficients.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from attractor.attention import pde_attention, pdes, window_attention
from attractor.attention.engines import softmax
from attractor.attention.masks import Scope
from attractor.attention.precision import accumulate_dtype, first_derivatives_only
from attractor.bench import timing
from attractor.storage.limits import check_memory

KINDS = ("stepped", "causal", "reaction", "split", "window", "documents")
TOKENS = {"cuda": (1_024, 4_096, 16_384, 65_536), "cpu": (512, 2_048)}
LONG = {"cuda": (1 << 16, 1 << 18, 1 << 20), "cpu": (8_192, 16_384)}
GRAPHS_UP_TO = 16_384  # tokens; shorter calls would be dominated by launches
REACTION_UP_TO = {"cuda": 16_384, "cpu": 512}
WINDOW, GLOBAL, CHECK_TOKENS = 256, 4, 333
DOCUMENT = 512  # mean tokens per document; a sequence has about four documents or more

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def measure(
    kind: str,
    tokens: int,
    batch: int,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    heads: int = 8,
    dim: int = 64,
    steps: int = 4,
    rounds: int = 15,
    ceilings: dict[str, float] | None = None,
    dense: bool = False,
) -> dict[str, Any]:
    """Measure one kind at one length: milliseconds, ratios, memory, and shares of the ceilings.

    Args:
        kind: one of `KINDS`.
        tokens, batch, heads, dim: sizes of query, key and value ``[batch, heads, tokens, dim]``.
        device, dtype: device and dtype of query, key and value.
        steps: steps of the PDE.
        rounds: number of rounds.
        ceilings: the result of `timing.ceilings` in the same run.
        dense: whether to time the forward pass of the dense map as well.
    """
    check_kind(kind)
    check_memory(
        f"query, key, value, output and their gradients [{batch:,}, {heads}, {tokens:,}, {dim}]",
        8 * batch * heads * tokens * dim * dtype.itemsize,
        "use fewer tokens",
        device,
    )
    coefficients = learnt(heads, accumulate_dtype(dtype), device)
    ours, theirs = contenders(kind, coefficients, steps)
    qkv = [
        torch.randn(batch, heads, tokens, dim, device=device, dtype=dtype, requires_grad=True)
        for _ in range(3)
    ]
    grad = torch.randn_like(qkv[0])
    row: dict[str, Any] = {
        "kind": kind, "tokens": tokens, "batch": batch, "heads": heads, "dim": dim, "steps": steps,
        "device": device, "dtype": str(dtype).removeprefix("torch."),
    }  # fmt: skip
    own_coefficients = coefficients if kind in ("reaction", "split") else coefficients[:1]
    for passes in ("forward", "both"):

        def call(attention: Attention, of: list[Tensor], passes: str = passes) -> Any:
            if passes == "forward":
                with torch.no_grad():
                    return attention(*qkv)
            return torch.autograd.grad(attention(*qkv), of, grad)

        calls = {
            "peer": lambda: call(theirs, qkv),
            "ours": lambda: call(ours, [*qkv, *own_coefficients]),
        }
        graphs = tokens <= GRAPHS_UP_TO and kind != "documents"
        timings = timing.measure(calls, device, rounds, graphs=graphs)
        row[passes] = {
            "ms": timings.median("ours"),
            "peer_ms": timings.median("peer"),
            "ratio": timings.ratio("ours", "peer"),
            "graph": timings.graph,
            "peak_mb": timing.peak_mb(calls["ours"], device),
            "peer_peak_mb": timing.peak_mb(calls["peer"], device),
        }
        if ceilings:
            row[passes] |= shares(row, row[passes]["ms"], passes, ceilings)
    if dense:
        row["dense_ms"] = dense_ms(kind, qkv, coefficients, steps)
        row["speedup_over_dense"] = row["dense_ms"] / row["forward"]["ms"]
    return row


def contenders(kind: str, coefficients: list[Tensor], steps: int) -> tuple[Attention, Attention]:
    """Return PDE attention of a kind, and its peer."""
    alpha, beta = coefficients
    if kind == "window":
        attention = lambda pde: (
            lambda q, k, v: window_attention(
                q, k, v, window=WINDOW, global_tokens=GLOBAL, is_causal=True, pde=pde, steps=steps
            )
        )
        return attention(pdes.Diffusion(alpha)), attention(None)
    pde = equation(kind, alpha, beta)
    if kind == "documents":
        return (
            lambda q, k, v: pde_attention(
                q, k, v, is_causal=True, pde=pde, steps=steps, documents=documents_for(q)
            ),
            lambda q, k, v: varlen(q, k, v, documents_for(q)),
        )
    causal = kind == "causal"
    return (
        lambda q, k, v: pde_attention(q, k, v, is_causal=causal, pde=pde, steps=steps),
        lambda q, k, v: sdpa(q, k, v, is_causal=causal),
    )


def documents_for(query: Tensor) -> Tensor:
    """Return ids ``[batch, tokens]`` of packed documents, which differ per row but not per call."""
    return _documents(query.shape[0], query.shape[-2], str(query.device))


@cache
def _documents(batch: int, tokens: int, device: str) -> Tensor:
    most = 2 * min(DOCUMENT, tokens // 4 + 1) - 1
    lengths = torch.randint(1, most + 1, (batch, tokens), generator=torch.Generator().manual_seed(0))
    last = lengths.cumsum(-1)
    position = torch.arange(tokens).expand(batch, -1).contiguous()
    return torch.searchsorted(last, position, right=True).to(device)


def mean_keys(documents: Tensor) -> float:
    """Return the mean number of keys per query in causal attention within documents."""
    begins = documents.new_ones(documents.shape, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    position = torch.arange(documents.shape[-1], device=documents.device)
    return (position - (position * begins).cummax(-1).values + 1).double().mean().item()


def varlen(query: Tensor, key: Tensor, value: Tensor, documents: Tensor) -> Tensor:
    """Compute causal attention within documents, without a PDE."""
    return _Varlen.apply(query, key, value, documents)


class _Varlen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, documents: Tensor) -> Tensor:
        tokens = query.shape[-2]
        ctx.scope = Scope(tokens, tokens, right=0, documents=documents)
        out, lse = softmax.attend(query, key, value, ctx.scope, query.shape[-1] ** -0.5)
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        scale = query.shape[-1] ** -0.5
        return *softmax.attend_backward(grad, query, key, value, out, lse, ctx.scope, scale), None


def equation(kind: str, alpha: Tensor, beta: Tensor) -> pdes.PDE:
    """Return the PDE of a kind."""
    if kind in ("reaction", "split"):
        return pdes.ReactionDiffusion(alpha, beta, split=kind == "split")
    return pdes.Diffusion(alpha)


def learnt(heads: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Return alpha and beta ``[heads, 1, 1]``, which differ per head, as leaves of autograd."""
    spread = torch.linspace(0.05, 0.2, heads, dtype=torch.float32).to(device, dtype).view(-1, 1, 1)
    return [x.requires_grad_() for x in (spread, 0.1 * spread)]


def errors(
    kind: str, *, device: str, dtype: torch.dtype, heads: int = 2, dim: int = 64, steps: int = 4
) -> dict[str, list[float]]:
    """Return relative errors of output and gradients against float64: ours, and of the dense map.

    Raises:
        ArithmeticError: our error exceeds twice (gradients: three times) that of the dense map.
    """
    check_kind(kind)
    torch.manual_seed(0)
    inputs = torch.randn(4, 1, heads, CHECK_TOKENS, dim, dtype=torch.float64).to(dtype)
    results = {}
    for name, type_ in (("truth", torch.float64), ("dense", dtype), ("ours", dtype)):
        *qkv, grad = (x.to(device, type_).requires_grad_() for x in inputs)
        coefficients = learnt(heads, accumulate_dtype(type_), device)
        own_coefficients = coefficients if kind in ("reaction", "split") else coefficients[:1]
        if name == "ours":
            out = contenders(kind, coefficients, steps)[0](*qkv)
        else:
            out = _dense(kind, qkv, coefficients, steps)
        results[name] = [out, *torch.autograd.grad(out, [*qkv, *own_coefficients], grad.detach())]
    errors_of = lambda name: [
        ((a.double() - b).norm() / b.norm()).item() for a, b in zip(results[name], results["truth"])
    ]
    result = {"ours": errors_of("ours"), "dense": errors_of("dense")}
    for n, (ours, theirs) in enumerate(zip(*result.values())):
        # with few numbers, such as coefficients, the dense error can be small by chance
        tolerance = max(0.25 * torch.finfo(dtype).eps, 2e-6) if n > 3 else 1e-6
        limit = (3 if n else 2) * theirs + tolerance
        if not ours <= limit:
            raise ArithmeticError(
                f"{kind} in {dtype} on {device}: result {n} is off by {ours:.1e}, {limit:.1e} allowed"
            )
    return result


def _dense(kind: str, qkv: list[Tensor], coefficients: list[Tensor], steps: int) -> Tensor:
    tokens = qkv[0].shape[-2]
    mask = None
    if kind == "window":
        ahead = torch.arange(tokens) - torch.arange(tokens)[:, None]
        mask = (ahead <= 0) & ((ahead >= -WINDOW) | (torch.arange(tokens) < GLOBAL))
        mask = mask.to(qkv[0].device)
    query, key, value = qkv
    pde = equation(kind, *coefficients)
    return pde_attention(
        query, key, value, mask, is_causal=kind in ("causal", "documents"), pde=pde, steps=steps,
        documents=documents_for(query) if kind == "documents" else None, method="dense",
    )  # fmt: skip


def dense_ms(kind: str, qkv: list[Tensor], coefficients: list[Tensor], steps: int) -> float:
    """Return milliseconds of the forward pass of the dense map."""

    @torch.no_grad()
    def call() -> Tensor:
        return _dense(kind, qkv, coefficients, steps)

    return timing.measure({"dense": call}, qkv[0].device, rounds=3).median("dense")


def shares(row: dict[str, Any], ms: float, passes: str, ceilings: dict[str, float]) -> dict[str, float]:
    """Return shares of matrix rate and bandwidth, counting the work of attention without a PDE."""
    sides = row["batch"] * row["heads"] * row["dim"] * row["tokens"]
    keys = WINDOW + GLOBAL if row["kind"] == "window" else row["tokens"]
    if row["kind"] == "causal":
        keys /= 2
    if row["kind"] == "documents":
        keys = mean_keys(_documents(row["batch"], row["tokens"], row["device"]))
    flops = 4 * sides * keys * (1 if passes == "forward" else 3.5)
    size = torch.empty((), dtype=getattr(torch, row["dtype"])).element_size()
    traffic = sides * size * (4 if passes == "forward" else 12)
    return {
        "of_matrix_rate": flops / ms / 1e9 / ceilings["matrix_tflop_s"],
        "of_bandwidth": traffic / ms / 1e6 / ceilings["copy_gb_s"],
    }


def fits(tokens: int, batch: int, heads: int, device: str) -> bool:
    """Return whether the dense map, which needs several copies in float32, fits into memory."""
    room = torch.cuda.mem_get_info(device)[0] if torch.device(device).type == "cuda" else 2 << 30
    return 8 * 4 * batch * heads * tokens**2 < room


def check_kind(kind: str) -> None:
    """Raise a ValueError unless `kind` is one of `KINDS`."""
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is not one of {', '.join(KINDS)}")
