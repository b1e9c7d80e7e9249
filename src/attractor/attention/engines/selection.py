"""The choice among torch's attention operators for a softmax.

On CUDA, `choose` returns the operator that `torch.nn.functional.scaled_dot_product_attention` would use:
cuDNN on Hopper and Blackwell, otherwise FlashAttention, otherwise the memory-efficient one. It respects
`torch.nn.attention.sdpa_kernel` and `torch.use_deterministic_algorithms`. FlashAttention computes bands
and packed documents. If no operator is suitable, `choose` returns `PLAIN`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import pad
from torch.utils.weak import WeakTensorKeyDictionary

from attractor.attention.engines.backends import BY_NAME, CPU, CPU_CAUSAL, GRID, PLAIN, padded_dim
from attractor.attention.engines.strips import Operator, PackedSequences, Strip
from attractor.attention.masks import Scope

HALF = (torch.float16, torch.bfloat16)
FULL = (torch.float32, torch.float64)
CUDNN_DIM, FLASH_DIM = 128, 256  # largest head dimensions
BAND_DIM = 192  # largest head dimension of FlashAttention on all devices, for bands

Function = TypeVar("Function", bound=Callable[..., Any])


def constant_when_compiled(function: Function) -> Function:
    """Mark a function like `torch.compiler.assume_constant_result`, without importing the compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def choose(
    query: Tensor, key: Tensor, value: Tensor, scope: Scope, consecutive: bool = False
) -> Operator:
    """Return the operator for tensors ``[batch, heads, tokens, dim]`` and a scope.

    Args:
        consecutive: Whether an assertion on the device may replace the check that the tokens of each
            document are consecutive, if the host cannot wait for the device.
    """
    if query.device.type == "cuda":
        return choose_on_cuda(query, key, value, scope, consecutive)
    if query.device.type != "cpu":
        return PLAIN
    return replace(CPU, strip=_corner(scope)) if _one_corner(scope) else CPU


def choose_square_causal(query: Tensor, value: Tensor, tokens: int) -> Operator:
    """Return the operator for a causal problem with as many queries as keys."""
    if query.device.type == "cpu":
        return CPU_CAUSAL
    if not query.is_cuda:
        return PLAIN
    return choose_on_cuda(query, query, value, Scope(tokens, tokens, right=0))


def choose_on_cuda(
    query: Tensor, key: Tensor, value: Tensor, scope: Scope, consecutive: bool = False
) -> Operator:
    """Return what `choose` does on CUDA."""
    if scope.mask is not None or scope.bias is not None or scope.valid_keys is not None:
        return PLAIN
    if not query.shape[0] * query.shape[1]:
        return PLAIN
    dim = padded_dim(query, value)
    if _one_corner(scope):
        strip = _corner(scope)
        if strip.causal:
            if strip.rows.stop - strip.rows.start != strip.columns.stop:
                return PLAIN  # operators differ in the position of the diagonal
            strip = replace(strip, right=0)
        name = preferred(query.device.index, query.dtype, min(dim, FLASH_DIM))
        fits = dim <= CUDNN_DIM and strip.columns.stop > 1 and max(query.shape[:2]) <= GRID
        # In code compiled by torch 2.11, cuDNN's gradients are wrong: it reuses plans for other layouts.
        if name == "cudnn" and (not fits or torch.compiler.is_compiling()):
            name = "flash" if flash_works(query.device.index) else "efficient"
        if name == "flash" and dim > FLASH_DIM:
            name = "efficient"
        # In half precision, the efficient operator's gradients are wrong for the output of another one.
        if name == "efficient" and (not efficient_works() or query.dtype not in FULL):
            name = "plain"
        return replace(BY_NAME[name], strip=strip) if name != "plain" else PLAIN
    if query.dtype not in HALF or dim > BAND_DIM or not flash_works(query.device.index):
        return PLAIN
    if scope.documents is not None and len(scope.documents) != query.shape[0]:
        return PLAIN
    strip_or_none = _band(scope) if scope.documents is None else _packed(scope, consecutive)
    if strip_or_none is None:
        return PLAIN
    name = "flash" if strip_or_none.packed is None else "packed flash"
    return replace(BY_NAME[name], strip=strip_or_none)


@constant_when_compiled
def preferred(device: int, dtype: torch.dtype, dim: int) -> str:
    """Return the operator of SDPA for a standard problem: "cudnn", "flash", "efficient" or "plain".

    It is that of a small problem, once per combination of torch's settings, because there are no tensors
    during compilation; `choose` handles what depends on sizes.
    """
    backends = torch.backends.cuda
    settings = (
        backends.cudnn_sdp_enabled(), backends.flash_sdp_enabled(), backends.mem_efficient_sdp_enabled(),
        backends.math_sdp_enabled(), *torch._C._get_sdp_priority_order(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )  # fmt: skip
    return _sdpa_choice(device, dtype, dim, settings)


@cache
def _sdpa_choice(device: int, dtype: torch.dtype, dim: int, settings: tuple[int, ...]) -> str:
    shape = (1, 1, 128, dim)
    with torch.enable_grad():
        like = torch.empty(shape, dtype=dtype, device=f"cuda:{device}", requires_grad=True)
        backend = SDPBackend(torch._fused_sdp_choice(like, like, like, is_causal=True))
    names = {
        SDPBackend.CUDNN_ATTENTION: "cudnn",
        SDPBackend.FLASH_ATTENTION: "flash",
        SDPBackend.EFFICIENT_ATTENTION: "efficient",
    }
    return names.get(backend, "plain")


@constant_when_compiled
def flash_works(device: int) -> bool:
    """Return whether FlashAttention is available, enabled, and supports the device."""
    return torch.backends.cuda.flash_sdp_enabled() and _flash_is_for(device)


@cache
def _flash_is_for(device: int) -> bool:
    if not torch.backends.cuda.is_flash_attention_available() or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


@constant_when_compiled
def efficient_works() -> bool:
    """Return whether the memory-efficient operator is enabled."""
    return torch.backends.cuda.mem_efficient_sdp_enabled()


def may_sync(device: torch.device) -> bool:
    """Return whether the host may read values, which it may not while a graph is traced or captured."""
    if torch.compiler.is_compiling():
        return False
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def first_row(scope: Scope) -> int:
    """Return the first row with a key in the band."""
    return 0 if scope.right is None else min(max(-scope.right, 0), scope.queries)


def _one_corner(scope: Scope) -> bool:
    """Return whether rows attend to all keys but a corner, apart from padding and bias."""
    corner = scope.left is None and (scope.right is None or scope.right <= 0)
    corner = corner and scope.offset is None  # the offset would expand a row of bias to a map
    return corner and scope.documents is None and scope.mask is None


def _corner(scope: Scope) -> Strip:
    """Return the rows and keys of a scope for which `_one_corner` holds."""
    rows = slice(first_row(scope), scope.queries)
    columns = scope.columns(rows)
    bias = scope.bias_tile(rows, columns)
    causal = scope.right is not None
    if scope.valid_keys is None or rows.start == rows.stop or columns.stop == 0:
        return Strip(rows, columns, causal, None, bias)
    valid = scope.valid_keys[..., columns]
    if not causal:
        return Strip(rows, columns, False, valid, bias, ~valid.any(-1))
    nonempty = valid.long().cumsum(-1)[..., 0, :] > 0  # row i has a key if there is a valid one up to i
    missing = (rows.stop - rows.start) - nonempty.shape[-1]
    nonempty = torch.cat((nonempty, nonempty[..., -1:].expand(*nonempty.shape[:-1], missing)), -1)
    return Strip(rows, columns, True, valid, bias, ~nonempty)


def _band(scope: Scope) -> Strip | None:
    """Return the rows and keys of a band for FlashAttention, or None if it cannot compute the band.

    The operator counts from the last row and key, and requires at least as many keys as rows, and sides
    of at least 0. Therefore rows without keys and keys without rows are excluded.
    """
    left, right = scope.left, scope.right
    if left is not None and right is not None and left + right < 0:
        return Strip(slice(0, 0), slice(0, 0))
    top, bottom = first_row(scope), scope.queries
    if left is not None:
        bottom = min(bottom, max(scope.keys + left, top))
    rows = slice(top, bottom)
    columns = scope.columns(rows)
    ahead = bottom - columns.stop  # distance of the last row from the last key
    if columns.stop - columns.start < bottom - top:
        return None
    return Strip(
        rows,
        columns,
        left=None if left is None else left - ahead,
        right=None if right is None else right + ahead,
    )


CONSECUTIVE = "the tokens of each document, and the valid tokens of each padded row, must be consecutive"

# By documents: their version, and the results of `_pack` by the sides of the band.
_packings: Any = WeakTensorKeyDictionary()


def _packed(scope: Scope, consecutive: bool = False) -> Strip | None:
    """Return a band within documents; None if their tokens are not consecutive, or cannot be read.

    The launch depends on the number of documents, so the host waits for the device, once per tensor of
    ids until the tensor is changed; all layers of a model may share it. While a graph is captured, the
    ids cannot be read. If `consecutive` is true, the graph then has room for any number of documents.

    A band on one side of the diagonal is shifted onto it, with row ``i + shift`` at key i. If these
    belong to two documents, the row has no keys.
    """
    documents = scope.documents
    if documents is None or not scope.queries == scope.keys == documents.shape[-1]:
        return None
    if not may_sync(documents.device):
        return _pack(scope, documents) if consecutive and not torch.compiler.is_compiling() else None
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


def has_split_documents(documents: Tensor) -> bool:
    """Return whether the tokens of a document in ``[batch, tokens]`` are not consecutive.

    The host waits for the device.
    """
    changes, changes_if_sorted = _count_changes(documents).tolist()
    return bool(changes != changes_if_sorted)


def check_consecutive(documents: Tensor, condition: Tensor | bool = True) -> None:
    """Assert on the device that documents have consecutive tokens and that a condition holds."""
    torch._assert_async((_count_changes(documents).diff() == 0) & condition, CONSECUTIVE)


def _count_changes(documents: Tensor) -> Tensor:
    """Return the numbers ``[2]`` of changes of the ids along the tokens, unsorted and sorted."""
    ids = documents.sort(dim=-1).values
    return torch.stack([(x[:, 1:] != x[:, :-1]).sum() for x in (documents, ids)])


def _pack(scope: Scope, documents: Tensor) -> Strip | None:
    """Return the strip of `_packed`; None if the tokens of a document are not consecutive."""
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
    if may_sync(documents.device):
        before, after = documents[:, :-1], documents[:, 1:]
        decreases = (after < before).sum()  # without a decrease, no document is split
        numbers = torch.stack((begins.sum(), ends.diff().max(), decreases, (after != before).sum()))
        count, longest, decreases, changes = numbers.tolist()
        if count > most or (decreases and has_split_documents(documents)):
            return None
    else:  # room for the largest number of documents, most of them empty
        check_consecutive(documents, begins.sum() <= most)
        count, longest, changes = most, size, None
    shift = down - along
    empty_rows = (documents[:, rows] != own)[:, None] if shift else None
    return Strip(
        rows,
        columns,
        empty_rows=empty_rows,
        left=None if left is None else left - shift,
        right=None if right is None else right + shift,
        packed=PackedSequences(ends[: count + 1].int(), longest, changes == 0),
    )
