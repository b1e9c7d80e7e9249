"""Which of torch's attention operators computes a softmax.

On CUDA `choose` takes the operator that `torch.nn.functional.scaled_dot_product_attention` would: cuDNN
on Hopper and Blackwell, else FlashAttention, else the memory-efficient one, as far as the user allows
them (`torch.nn.attention.sdpa_kernel`), and as far as `torch.use_deterministic_algorithms` does. Bands
and packed documents go to FlashAttention. Where no operator can do it, `choose` returns `PLAIN`.
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

from attractor.attention.engines.backends import (
    BY_NAME,
    CPU,
    CPU_CAUSAL,
    GRID,
    PLAIN,
    Operator,
    PackedSequences,
    Strip,
    padded_dim,
)
from attractor.attention.masks import Scope

HALF = (torch.float16, torch.bfloat16)
FULL = (torch.float32, torch.float64)
CUDNN_DIM, FLASH_DIM = 128, 256  # the deepest heads they take
BAND_DIM = 192  # and FlashAttention on every device, which SDPA is not asked about for bands

Function = TypeVar("Function", bound=Callable[..., Any])


def constant_when_compiled(function: Function) -> Function:
    """Do what `torch.compiler.assume_constant_result` does, without importing the compiler now."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def choose(
    query: Tensor, key: Tensor, value: Tensor, scope: Scope, consecutive: bool = False
) -> Operator:
    """Return the operator for tensors ``[batch, heads, tokens, dim]`` and a scope.

    Args:
        consecutive: Whether a device that cannot be waited for may be told to fail if the tokens of a
            document are not consecutive.
    """
    if query.device.type == "cuda":
        return choose_on_cuda(query, key, value, scope, consecutive)
    if query.device.type != "cpu":
        return PLAIN
    return replace(CPU, strip=_corner(scope)) if _one_corner(scope) else CPU


def choose_square_causal(query: Tensor, value: Tensor, tokens: int) -> Operator:
    """Return the operator for a causal problem of as many queries as keys."""
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
                return PLAIN  # operators differ on where its diagonal begins
            strip = replace(strip, right=0)
        name = preferred(query.device.index, query.dtype, min(dim, FLASH_DIM))
        fits = dim <= CUDNN_DIM and strip.columns.stop > 1 and max(query.shape[:2]) <= GRID
        # Compiled by torch 2.11 cuDNN's gradients are wrong: plans are kept for layouts that change.
        if name == "cudnn" and (not fits or torch.compiler.is_compiling()):
            name = "flash" if flash_works(query.device.index) else "efficient"
        if name == "flash" and dim > FLASH_DIM:
            name = "efficient"
        # In half precision the efficient operator's gradients are wrong for an output not its own.
        if name == "efficient" and (not efficient_works() or query.dtype not in FULL):
            name = "plain"
        return Operator(name, *BY_NAME[name], strip) if name != "plain" else PLAIN
    if query.dtype not in HALF or dim > BAND_DIM or not flash_works(query.device.index):
        return PLAIN
    if scope.documents is not None and len(scope.documents) != query.shape[0]:
        return PLAIN
    strip_or_none = _band(scope) if scope.documents is None else _packed(scope, consecutive)
    if strip_or_none is None:
        return PLAIN
    name = "flash" if strip_or_none.packed is None else "packed flash"
    return Operator(name, *BY_NAME[name], strip_or_none)


@constant_when_compiled
def preferred(device: int, dtype: torch.dtype, dim: int) -> str:
    """Return what SDPA takes for an ordinary problem: "cudnn", "flash", "efficient" or "plain".

    Torch is asked about a small problem, once per combination of the settings that count, because
    compiled code has no tensors yet; `choose` handles what depends on sizes.
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
    """Return whether FlashAttention is available, enabled, and made for that device."""
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
    """Return whether values may be read: not while a graph is traced or captured."""
    if torch.compiler.is_compiling():
        return False
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def first_row(scope: Scope) -> int:
    """Return the first row to which the band gives a key."""
    return 0 if scope.right is None else min(max(-scope.right, 0), scope.queries)


def _one_corner(scope: Scope) -> bool:
    """Return whether rows see all keys but those in a corner, whatever padding and bias say."""
    corner = scope.left is None and (scope.right is None or scope.right <= 0)
    corner = corner and scope.offset is None  # which would make a whole map of a row of bias
    return corner and scope.documents is None and scope.mask is None


def _corner(scope: Scope) -> Strip:
    rows = slice(first_row(scope), scope.queries)
    columns = scope.columns(rows)
    bias = scope.bias_tile(rows, columns)
    causal = scope.right is not None
    if scope.valid_keys is None or rows.start == rows.stop or columns.stop == 0:
        return Strip(rows, columns, causal, None, bias)
    valid = scope.valid_keys[..., columns]
    if not causal:
        return Strip(rows, columns, False, valid, bias, ~valid.any(-1))
    so_far = valid.long().cumsum(-1)[..., 0, :] > 0  # row i has a key if there is a valid one up to i
    beyond = (rows.stop - rows.start) - so_far.shape[-1]
    so_far = torch.cat((so_far, so_far[..., -1:].expand(*so_far.shape[:-1], beyond)), -1)
    return Strip(rows, columns, True, valid, bias, ~so_far)


def _band(scope: Scope) -> Strip | None:
    """Return the rows and keys of a band as FlashAttention takes it, or None if it cannot.

    The operator counts from the last row and key, and needs at least as many keys as rows and sides of
    at least 0. So rows without keys are cut off, and keys without rows.
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


TORN = "the tokens of each document, and the valid tokens of each padded row, must be consecutive"

# What `_pack` has made of documents: their version then, and strips by the sides of the band.
_packings: Any = WeakTensorKeyDictionary()


def _packed(scope: Scope, consecutive: bool = False) -> Strip | None:
    """Return a band within documents of consecutive tokens; None if they are not, or cannot be read.

    Their number decides on the launch, so the device is waited for: once for a tensor, which all layers
    of a model may share, until something is written to it. While a graph is captured it cannot be read;
    if the documents must be `consecutive`, the graph gets room for any number of them.

    A band to one side of the diagonal is moved onto it: row ``i + shift`` beside key i. Such a pair of
    two documents is a row without keys.
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


def torn(documents: Tensor) -> bool:
    """Return whether a document of ``[batch, tokens]`` is torn: its tokens are not consecutive.

    This waits for the device.
    """
    runs, kinds = _runs_and_kinds(documents).tolist()
    return bool(runs != kinds)


def check_consecutive(documents: Tensor, also: Tensor | bool = True) -> None:
    """Let the device fail, without waiting for it, if a document is torn or `also` is False."""
    torch._assert_async((_runs_and_kinds(documents).diff() == 0) & also, TORN)


def _runs_and_kinds(documents: Tensor) -> Tensor:
    """Return the number of changes of the ids along the tokens ``[2]``: as they are, and sorted."""
    ids = documents.sort(dim=-1).values
    return torch.stack([(x[:, 1:] != x[:, :-1]).sum() for x in (documents, ids)])


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
    if may_sync(documents.device):
        before, after = documents[:, :-1], documents[:, 1:]
        falls = (after < before).sum()  # if there are none no document can be torn
        found = torch.stack((begins.sum(), ends.diff().max(), falls, (after != before).sum()))
        count, longest, falls, changes = found.tolist()
        if count > most or (falls and torn(documents)):
            return None
    else:  # as many documents as there may be, most of them empty
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
