"""Torch's fused attention operators, called so that they take and hand out the log-sum-exp.

Every operator is a pair, for a part of the map that a `Strip` describes:

    forward   (query, key, value, strip, scale) -> output, log-sum-exp [batch, heads, rows]
    backward  (grad, output, query, key, value, log-sum-exp, strip, scale) -> the three gradients

The backward of each makes the weights ``exp(score - log-sum-exp)`` and subtracts ``<grad, output>``, so
it serves one share of a softmax as well, if it is given the output and log-sum-exp of the whole.

On CUDA `choose` takes the operator that `torch.nn.functional.scaled_dot_product_attention` would: cuDNN
on Hopper and Blackwell, else FlashAttention, else the memory-efficient one, as far as the user allows
them (`torch.nn.attention.sdpa_kernel`), and as far as `torch.use_deterministic_algorithms` does. A band
or packed documents go to FlashAttention. Where no operator can do it, `choose` says `plain`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import pad
from torch.utils.weak import WeakTensorKeyDictionary

from attractor.attention.lengths import larger, smaller
from attractor.attention.masks import Scope
from attractor.attention.precision import wide

HALF = (torch.float16, torch.bfloat16)
FULL = (torch.float32, torch.float64)
CUDNN_DIM, FLASH_DIM = 128, 256  # the deepest heads they take
BAND_DIM = 192  # and FlashAttention on every device, which SDPA is not asked about for bands
GRID = 65_535  # of CUDA, in its second dimension: sequences, or heads times batch, at a time

Function = TypeVar("Function", bound=Callable[..., Any])
_aten: Any = torch.ops.aten


def constant_when_compiled(function: Function) -> Function:
    """`torch.compiler.assume_constant_result`, which would import the compiler, seconds of it, now."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@dataclass(frozen=True, eq=False)
class Runs:
    """Packed documents, each of them a run of tokens.

    Attributes:
        ends: where they begin, all batch rows laid one behind the other, and last the number of
            tokens; int32 ``[documents + 1]``.
        longest: tokens of the longest.
    """

    ends: Tensor
    longest: int


@dataclass(frozen=True, eq=False)
class Strip:
    """Some rows, the keys they meet, and which of these they may attend to.

    Attributes:
        causal: row i may attend to keys up to i, both counted within the strip.
        allowed: bool, or None for all.
        bias: added to the scores, or None.
        keyless: the rows that may attend to nothing, bool ``[batch or 1, heads or 1, rows]``, or None.
        left, right: how far the last row sees to either side of the last key, and the row before to
            either side of the key before, and so on; None for no limit.
        runs: the documents of the keys, and of the rows that are not keyless; None for one.
    """

    rows: slice
    columns: slice
    causal: bool = False
    allowed: Tensor | None = None
    bias: Tensor | None = None
    keyless: Tensor | None = None
    left: int | None = None
    right: int | None = None
    runs: Runs | None = None

    def cut(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The strip's part of all three."""
        return part(query, self.rows), part(key, self.columns), part(value, self.columns)

    def additive(self, dtype: torch.dtype) -> Tensor | None:
        """allowed and bias, as one mask to add; a bias is not rounded to query's half precision."""
        dtype = dtype if self.bias is None else wide(dtype)
        if self.allowed is None:
            return None if self.bias is None else self.bias.to(dtype)
        zero = torch.zeros((), dtype=dtype, device=self.allowed.device)
        return torch.where(self.allowed, zero if self.bias is None else self.bias.to(dtype), -torch.inf)


@dataclass(frozen=True, eq=False)
class Operator:
    """A pair of functions, and the one strip that they do at once; None: any strip, but small ones."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    strip: Strip | None = None


def choose(query: Tensor, key: Tensor, value: Tensor, scope: Scope) -> Operator:
    """For these tensors ``[batch, heads, tokens, dim]`` and this scope."""
    if query.device.type == "cuda":
        return choose_on_cuda(query, key, value, scope)
    if query.device.type != "cpu":
        return PLAIN
    return Operator(cpu, cpu_backward, _corner(scope) if _one_corner(scope) else None)


def choose_on_cuda(query: Tensor, key: Tensor, value: Tensor, scope: Scope) -> Operator:
    """`choose`, there."""
    if scope.mask is not None or scope.bias is not None or scope.real is not None:
        return PLAIN
    if not query.shape[0] * query.shape[1]:
        return PLAIN
    depth = _depth(query, value)
    if _one_corner(scope):
        strip = _corner(scope)
        if strip.causal:
            if strip.rows.stop - strip.rows.start != strip.columns.stop:
                return PLAIN  # operators differ on where its diagonal begins
            strip = replace(strip, right=0)
        name = preferred(query.device.index, query.dtype, min(depth, FLASH_DIM))
        fits = depth <= CUDNN_DIM and strip.columns.stop > 1 and max(query.shape[:2]) <= GRID
        # Compiled by torch 2.11 cuDNN's gradients are wrong: plans are kept for layouts that change.
        if name == "cudnn" and (not fits or torch.compiler.is_compiling()):
            name = "flash" if flash_works(query.device.index) else "efficient"
        if name == "flash" and depth > FLASH_DIM:
            name = "efficient"
        # In half precision the efficient operator's gradients are wrong for an output not its own.
        if name == "efficient" and (not efficient_works() or query.dtype not in FULL):
            name = "plain"
        return Operator(*BY_NAME[name], strip) if name != "plain" else PLAIN
    if query.dtype not in HALF or depth > BAND_DIM or not flash_works(query.device.index):
        return PLAIN
    if scope.documents is not None and len(scope.documents) != query.shape[0]:
        return PLAIN
    part = _band(scope) if scope.documents is None else _packed(scope)
    if part is None:
        return PLAIN
    pair = (flash, flash_backward) if part.runs is None else (packed, packed_backward)
    return Operator(*pair, part)


@constant_when_compiled
def preferred(device: int, dtype: torch.dtype, dim: int) -> str:
    """What SDPA takes there for an ordinary problem: "cudnn", "flash", "efficient" or "plain".

    Torch is asked, so that the user's choice of backends, their order, the driver and the wish for
    deterministic gradients count as they do there; once for every such wish. It is asked about a small
    problem, for compiled code has no tensors yet; what depends on the sizes is for `choose` to know.
    """
    backends = torch.backends.cuda
    wishes = (
        backends.cudnn_sdp_enabled(), backends.flash_sdp_enabled(), backends.mem_efficient_sdp_enabled(),
        backends.math_sdp_enabled(), *torch._C._get_sdp_priority_order(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )  # fmt: skip
    return _asked(device, dtype, dim, wishes)


@cache
def _asked(device: int, dtype: torch.dtype, dim: int, wishes: tuple[int, ...]) -> str:
    where = torch.device("cuda", device)
    with torch.enable_grad():
        like = torch.empty(1, 1, 128, dim, dtype=dtype, device=where, requires_grad=True)
        backend = SDPBackend(torch._fused_sdp_choice(like, like, like, is_causal=True))
    names = {
        SDPBackend.CUDNN_ATTENTION: "cudnn",
        SDPBackend.FLASH_ATTENTION: "flash",
        SDPBackend.EFFICIENT_ATTENTION: "efficient",
    }
    return names.get(backend, "plain")


@constant_when_compiled
def flash_works(device: int) -> bool:
    """Whether FlashAttention is there, allowed, and made for that device."""
    return torch.backends.cuda.flash_sdp_enabled() and _flash_is_for(device)


@cache
def _flash_is_for(device: int) -> bool:
    if not torch.backends.cuda.is_flash_attention_available() or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


@constant_when_compiled
def efficient_works() -> bool:
    """Whether the memory-efficient operator is allowed."""
    return torch.backends.cuda.mem_efficient_sdp_enabled()


def may_sync(device: torch.device) -> bool:
    """Whether values may be looked at: not where a graph is being traced or captured."""
    if torch.compiler.is_compiling():
        return False
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def first_row(scope: Scope) -> int:
    """The first row that the band gives a key."""
    return 0 if scope.right is None else smaller(larger(-scope.right, 0), scope.queries)


def part(x: Tensor, where: slice) -> Tensor:
    """Some tokens of x ``[..., tokens, dim]``; x itself if these are all."""
    return x if where.start == 0 and where.stop == x.shape[-2] else x[..., where, :]


def in_rows(x: Tensor) -> Tensor:
    """x with the numbers of a row side by side: torch's operators read them so without asking.

    On CUDA 16 bytes at once, from addresses that they divide, as those do that torch allocates.
    Compiled code sees to that itself.
    """
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        return x.contiguous()
    if x.device.type != "cuda" or torch.compiler.is_compiling():
        return x
    unit = 16 // x.element_size()
    aligned = x.storage_offset() % unit == 0
    for size, step in zip(x.shape[:-1], x.stride()):
        aligned = aligned and (size == 1 or (step > 0 and step % unit == 0))
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


def _one_corner(scope: Scope) -> bool:
    """Whether rows see everything, or all but a corner, whatever padding and bias say."""
    corner = scope.left is None and (scope.right is None or scope.right <= 0)
    corner = corner and scope.offset is None  # which would make a whole map of a row of bias
    return corner and scope.documents is None and scope.mask is None


def _corner(scope: Scope) -> Strip:
    rows = slice(first_row(scope), scope.queries)
    columns = scope.columns(rows)
    bias = scope.bias_tile(rows, columns)
    causal = scope.right is not None
    if scope.real is None or rows.start == rows.stop or columns.stop == 0:
        return Strip(rows, columns, causal, None, bias)
    real = scope.real[..., columns]
    if not causal:
        return Strip(rows, columns, False, real, bias, ~real.any(-1))
    so_far = real.long().cumsum(-1)[..., 0, :] > 0  # row i has a key if there is a real one up to i
    beyond = (rows.stop - rows.start) - so_far.shape[-1]
    so_far = torch.cat((so_far, so_far[..., -1:].expand(*so_far.shape[:-1], beyond)), -1)
    return Strip(rows, columns, True, real, bias, ~so_far)


def _band(scope: Scope) -> Strip | None:
    """The rows and keys that a band joins, so that the operator's band is that one; None: it cannot be.

    The operator counts from the last row and the last key, wants as many keys as rows at least, and
    both sides of the band at least 0. So rows without keys are cut off, and keys without rows.
    """
    left, right = scope.left, scope.right
    if left is not None and right is not None and left + right < 0:
        return Strip(slice(0, 0), slice(0, 0))
    top, bottom = first_row(scope), scope.queries
    if left is not None:
        bottom = min(bottom, max(scope.keys + left, top))
    rows = slice(top, bottom)
    columns = scope.columns(rows)
    ahead = bottom - columns.stop  # the last row is so much further along than the last key
    if columns.stop - columns.start < bottom - top:
        return None
    return Strip(
        rows,
        columns,
        left=None if left is None else left - ahead,
        right=None if right is None else right + ahead,
    )


# What `_pack` has made of documents: their version then, and strips by the sides of the band.
_packings: Any = WeakTensorKeyDictionary()


def _packed(scope: Scope) -> Strip | None:
    """A band within documents, each of them a run; None where they are not, or cannot be looked at.

    Their number decides on the launch, so the device is waited for: once for a tensor, which all layers
    of a model may share, until something is written to it. Where that is not possible, in a captured
    graph or in compiled code, rows go in strips: T documents, the most there could be, would be T
    sequences to launch.

    A band that lies to one side of the diagonal is moved onto it: row ``i + shift`` beside key i. Such
    a pair of two documents is a row without keys.
    """
    documents = scope.documents
    if documents is None or not scope.queries == scope.keys == documents.shape[-1]:
        return None
    if not may_sync(documents.device):
        return None
    if documents.is_inference():  # has no version
        return _pack(scope, documents)
    version, strips = _packings.get(documents, (None, {}))
    if version != documents._version:
        strips = {}
        _packings[documents] = documents._version, strips
    sides = scope.left, scope.right
    if sides not in strips:
        strips[sides] = _pack(scope, documents)
    return strips[sides]


def torn(documents: Tensor) -> bool:
    """Whether some document of ``[batch, tokens]`` is not one run; waits for the device."""
    ids = documents.sort(dim=-1).values
    runs, kinds = ((x[:, 1:] != x[:, :-1]).sum() for x in (documents, ids))
    return bool(runs != kinds)


def _pack(scope: Scope, documents: Tensor) -> Strip | None:
    left, right, tokens = scope.left, scope.right, scope.keys
    if left is not None and right is not None and left + right < 0:
        return Strip(slice(0, 0), slice(0, 0))
    down = max(0, -right) if right is not None else 0
    along = max(0, -left) if left is not None else 0
    size = max(tokens - down - along, 0)
    rows, columns = slice(down, down + size), slice(along, along + size)
    if not size:
        return Strip(rows, columns)
    own = documents[:, columns]
    begins = pad(own[:, 1:] != own[:, :-1], (1, 0), value=True).flatten()
    most = min(own.numel(), GRID)
    ends = begins.nonzero_static(size=most + 1, fill_value=own.numel())[:, 0]
    falls = (documents[:, 1:] < documents[:, :-1]).sum()  # if there are none no document can be torn
    count, longest, falls = torch.stack((begins.sum(), ends.diff().max(), falls)).tolist()
    if count > most or (falls and torn(documents)):
        return None
    shift = down - along
    keyless = (documents[:, rows] != own)[:, None] if shift else None
    return Strip(
        rows,
        columns,
        keyless=keyless,
        left=None if left is None else left - shift,
        right=None if right is None else right + shift,
        runs=Runs(ends[: count + 1].int(), longest),
    )


def _depth(query: Tensor, value: Tensor) -> int:
    """The deeper of the two, up to a multiple of 8: as deep as operators on CUDA want them."""
    return -(-max(query.shape[-1], value.shape[-1]) // 8) * 8


def _deeper(x: Tensor, dim: int) -> Tensor:
    """x with zeros up to that dim: most operators want the same for all."""
    return x if x.shape[-1] == dim else pad(x, (0, dim - x.shape[-1]))


def _equally_deep(
    dim: int, q: Tensor, k: Tensor, v: Tensor, *others: Tensor
) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
    return tuple(_deeper(x, dim) for x in (q, k, v, *others)), (q.shape[-1], v.shape[-1])


def _as_deep(grads: tuple[Tensor, ...], dims: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (_shallower(x, dim) for x, dim in zip(grads, (dims[0], *dims)))
    return q, k, v


def _shallower(x: Tensor, dim: int) -> Tensor:
    """x without what `_deeper` has added."""
    return x if x.shape[-1] == dim else x[..., :dim]


def cpu(q: Tensor, k: Tensor, v: Tensor, strip: Strip, scale: float) -> tuple[Tensor, Tensor]:
    """The operator for CPUs; it takes everything that a strip can say but bands and documents."""
    (q, k, v), (_, v_dim) = _equally_deep(max(q.shape[-1], v.shape[-1]), q, k, v)
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, strip.causal, attn_mask=strip.additive(q.dtype), scale=scale
    )
    return _shallower(out, v_dim), lse


def cpu_backward(
    grad: Tensor, out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, strip: Strip, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Of `cpu`."""
    dim = max(q.shape[-1], v.shape[-1])
    (q, k, v, out, grad), dims = _equally_deep(dim, q, k, v, out, grad)
    grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, strip.causal, attn_mask=strip.additive(q.dtype), scale=scale
    )
    return _as_deep(grads, dims)


def cudnn(q: Tensor, k: Tensor, v: Tensor, strip: Strip, scale: float) -> tuple[Tensor, Tensor]:
    """cuDNN's: the whole map, or a square one up to its diagonal; heads of up to 128."""
    (q, k, v), (_, v_dim) = _equally_deep(_depth(q, v), q, k, v)
    found = _aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, strip.causal, False, scale=scale
    )
    return _shallower(found[0], v_dim), found[1].reshape(q.shape[:-1])


def cudnn_backward(
    grad: Tensor, out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, strip: Strip, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Of `cudnn`."""
    (q, k, v, out, grad), dims = _equally_deep(_depth(q, v), q, k, v, out, grad)
    # Torch keeps one plan for a shape and layout of query, key and value, and in it the layout that
    # grad, out and log-sum-exp had when it was made: these must always have the same one, query's.
    grad, out = (_laid_out_as(x, q) for x in (grad, out))
    none = torch.empty((), dtype=torch.long, device=q.device)
    grads = _aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse.contiguous()[..., None], none, none, None, None, None,
        q.shape[-2], k.shape[-2], 0.0, strip.causal, scale=scale,
    )  # fmt: skip
    return _as_deep(grads, dims)


def _laid_out_as(x: Tensor, like: Tensor) -> Tensor:
    steps = zip(x.shape, x.stride(), like.stride())
    if all(size == 1 or own == other for size, own, other in steps):
        return x
    return torch.empty_strided(x.shape, like.stride(), dtype=x.dtype, device=x.device).copy_(x)


def efficient(q: Tensor, k: Tensor, v: Tensor, strip: Strip, scale: float) -> tuple[Tensor, Tensor]:
    """The memory-efficient one: in single precision too, as is all of the map or up to its diagonal."""
    (q, k, v), (_, v_dim) = _equally_deep(_depth(q, v), q, k, v)
    out, lse, _, _ = _aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, strip.causal, scale=scale
    )
    return _shallower(out, v_dim), lse[..., : q.shape[-2]]  # the operator rounds their number up


def efficient_backward(
    grad: Tensor, out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, strip: Strip, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Of `efficient`."""
    (q, k, v, out, grad), dims = _equally_deep(_depth(q, v), q, k, v, out, grad)
    none = torch.empty((), dtype=torch.long, device=q.device)
    lse = pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)
    grads = _aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, None, out, lse, none, none, 0.0, (True, True, True, False), strip.causal,
        scale=scale,
    )  # fmt: skip
    return _as_deep(grads[:3], dims)


def flash(q: Tensor, k: Tensor, v: Tensor, strip: Strip, scale: float) -> tuple[Tensor, Tensor]:
    """FlashAttention: the whole map, or a band of it; heads of up to 256."""
    (q, k, v), (_, v_dim) = _equally_deep(_depth(q, v), q, k, v)
    batch, heads = q.shape[:2]
    turned = _turned(q, k, v)
    out, lse, *_ = _aten._flash_attention_forward(
        *(turned(x) for x in (q, k, v)), None, None, q.shape[-2], k.shape[-2], 0.0, False, False,
        scale=scale, window_size_left=_side(strip.left), window_size_right=_side(strip.right),
    )  # fmt: skip
    return _shallower(_turned_back(out, batch, heads), v_dim), lse.view(batch, heads, -1)


def flash_backward(
    grad: Tensor, out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, strip: Strip, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Of `flash`."""
    (q, k, v, out, grad), dims = _equally_deep(_depth(q, v), q, k, v, out, grad)
    batch, heads = q.shape[:2]
    turned = _turned(q, k, v)
    parts = [turned(x) for x in (grad, q, k, v, out)]
    none = torch.empty((), dtype=torch.long, device=q.device)
    grads = _aten._flash_attention_backward(
        *parts, lse.contiguous().view(parts[1].shape[0], parts[1].shape[2], -1), None, None,
        q.shape[-2], k.shape[-2], 0.0, False, none, none, scale=scale,
        window_size_left=_side(strip.left), window_size_right=_side(strip.right),
    )  # fmt: skip
    return _as_deep(tuple(_turned_back(x, batch, heads) for x in grads), dims)


def _turned(*given: Tensor) -> Callable[[Tensor], Tensor]:
    """How to bring ``[batch, heads, tokens, dim]`` to FlashAttention's ``[batch, tokens, heads, dim]``.

    Where heads lie one behind the other in memory they are as good as batches of one head, without a
    copy: the operator's backward would copy what does not lie in its own order.
    """
    few = given[0].shape[0] * given[0].shape[1] <= GRID
    if few and all(x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1) for x in given):
        return lambda x: x.reshape(-1, x.shape[-2], 1, x.shape[-1])
    return lambda x: x.transpose(1, 2)


def _turned_back(x: Tensor, batch: int, heads: int) -> Tensor:
    if x.shape[2] == heads and x.shape[0] == batch:
        return x.transpose(1, 2)
    return x.reshape(batch, heads, x.shape[1], x.shape[3])


def _side(width: int | None) -> int:
    return -1 if width is None else width


def packed(q: Tensor, k: Tensor, v: Tensor, strip: Strip, scale: float) -> tuple[Tensor, Tensor]:
    """FlashAttention in a band within documents; rows without keys have anything that is finite."""
    (q, k, v), (_, v_dim) = _equally_deep(_depth(q, v), q, k, v)
    ends, longest = _runs(strip)
    out, lse, *_ = _aten._flash_attention_forward(
        *(_in_one_line(x) for x in (q, k, v)), ends, ends, longest, longest, 0.0, False, False,
        scale=scale, window_size_left=_side(strip.left), window_size_right=_side(strip.right),
    )  # fmt: skip
    lse = lse.unflatten(-1, (q.shape[0], -1)).transpose(0, 1)
    return _shallower(_out_of_line(out, q.shape[0]), v_dim), lse


def packed_backward(
    grad: Tensor, out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, strip: Strip, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Of `packed`."""
    (q, k, v, out, grad), dims = _equally_deep(_depth(q, v), q, k, v, out, grad)
    ends, longest = _runs(strip)
    if strip.keyless is not None:
        lse = lse.masked_fill(strip.keyless, torch.inf)  # no weight at all
    none = torch.empty((), dtype=torch.long, device=q.device)
    grads = _aten._flash_attention_backward(
        *(_in_one_line(x) for x in (grad, q, k, v, out)), lse.transpose(0, 1).flatten(1).contiguous(),
        ends, ends, longest, longest, 0.0, False, none, none, scale=scale,
        window_size_left=_side(strip.left), window_size_right=_side(strip.right),
    )  # fmt: skip
    return _as_deep(tuple(_out_of_line(x, q.shape[0]) for x in grads), dims)


def _runs(strip: Strip) -> tuple[Tensor, int]:
    if strip.runs is None:
        raise ValueError("a strip without runs of documents is not packed; use `flash`")
    return strip.runs.ends, strip.runs.longest


def _in_one_line(x: Tensor) -> Tensor:
    """``[batch, heads, tokens, dim]`` as ``[all tokens, heads, dim]``; without a copy if one batch."""
    return x.transpose(1, 2).flatten(0, 1)


def _out_of_line(x: Tensor, batch: int) -> Tensor:
    return x.unflatten(0, (batch, -1)).transpose(1, 2)


def plain(q: Tensor, k: Tensor, v: Tensor, strip: Strip, scale: float) -> tuple[Tensor, Tensor]:
    """Torch's own arithmetic, with the strip's map in memory; no bands, no documents."""
    scores = _scores(q, k, strip, scale)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    return weights.to(v.dtype) @ v, lse


def plain_backward(
    grad: Tensor, out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, strip: Strip, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Of `plain`."""
    weights = (_scores(q, k, strip, scale) - lse[..., None]).exp()
    inner = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1, keepdim=True)
    slopes = (weights * ((grad @ v.mT).to(lse.dtype) - inner)).to(q.dtype)
    return scale * (slopes @ k), scale * (slopes.mT @ q), weights.to(v.dtype).mT @ grad


def _scores(q: Tensor, k: Tensor, strip: Strip, scale: float) -> Tensor:
    scores = (q.to(wide(q.dtype)) * scale) @ k.mT.to(wide(k.dtype))
    mask = strip.additive(scores.dtype)
    return scores if mask is None else scores + mask


PLAIN = Operator(plain, plain_backward)
BY_NAME = {
    "cudnn": (cudnn, cudnn_backward),
    "flash": (flash, flash_backward),
    "efficient": (efficient, efficient_backward),
}
