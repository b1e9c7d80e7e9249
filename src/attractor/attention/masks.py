"""Which keys a query may attend to, as a boolean matrix or as a `Scope`, which avoids T x T entries.

Matrices broadcast to ``[..., queries, keys]`` and are True where a query may attend. Positions of
queries and keys are both counted from 0, as in `torch.nn.functional.scaled_dot_product_attention`. An
entry of an additive mask up to `WALL` forbids the key (see `walls_of_bias`); other entries are a bias.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor
from torch.nn.functional import pad

from attractor.attention.lengths import statically_true

Window = int | tuple[int, int]
WALL = -8192.0  # largest entry of an additive mask that forbids its key; see `walls_of_bias`
FAR = 1e3  # for a larger bias, float32 scores lose the fourth digit
ROWS = 512  # rows of a map that are computed at a time


def allowed(
    queries: int,
    keys: int,
    device: torch.device,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    key_padding: Tensor | None = None,
    documents: Tensor | None = None,
    window: Window | None = None,
) -> Tensor | None:
    """Return the conjunction of all masks, or None if every key is allowed.

    Args:
        queries, keys: Number of queries and of keys.
        device: Device of the matrix.
        attn_mask: bool, True = attend, or a float bias, which forbids keys according to `walls_of_bias`.
        is_causal: Whether a query attends only to keys up to its own position.
        key_padding: ``[batch, keys]`` bool, True = a valid token.
        documents: ``[batch, tokens]`` ids. A token attends within its own document.
        window: (left, right), the numbers of keys before and after its own position that a query
            attends to, -1 for no limit. A single number stands for both.
    """
    masks = []
    if is_causal or window is not None:
        ahead = torch.arange(keys, device=device) - torch.arange(queries, device=device)[:, None]
        if is_causal:
            masks.append(ahead <= 0)
        left, right = sides(window)
        if left >= 0:
            masks.append(ahead >= -left)
        if right >= 0:
            masks.append(ahead <= right)
    if attn_mask is not None:
        masks.append(attn_mask if attn_mask.dtype == torch.bool else ~walls_of_bias(attn_mask))
    if key_padding is not None:
        masks.append(key_padding[:, None, None, :])
    if documents is not None:
        masks.append((documents[:, :, None] == documents[:, None, :])[:, None])
    return all_of(masks)


def all_of(masks: Sequence[Tensor]) -> Tensor | None:
    """Return the conjunction of masks that broadcast, or None if there are none."""
    return reduce(torch.logical_and, masks) if masks else None


def sides(window: Window | None) -> tuple[int, int]:
    """Return (left, right) of a window; -1 means no limit."""
    if window is None:
        return -1, -1
    return (window, window) if isinstance(window, int) else window


def walls_of_bias(bias: Tensor) -> Tensor:
    """Return True where an additive mask forbids a key: where its entry is at most `WALL`, -8192.

    The softmax weight of such a key is exactly 0 in every float type, unless the scores of its row
    differ by thousands. The threshold is

    - smaller than usual biases. ALiBi's steepest usual slope, 1/2 for 8 heads, exceeds it up to 16,384
      tokens. In a longer ALiBi bias, the weights of thousands of keys before the threshold are 0, so a
      wall there has no effect.
    - larger than the numbers that are used in masks: -1e4 (-9984 in bfloat16), -65504, -1e9, the lowest
      number of any float type, half of it, and sums of these, even if a bias of up to 1,790 is added.

    It is a power of two, and thus exact in every float type. NaN is not a wall.
    """
    return bias <= WALL


def row_offset(bias: Tensor, allowed: Tensor | None) -> Tensor:
    """Return numbers ``[..., queries, 1]`` to subtract from the rows of a bias, to make it small.

    The number of a row is its largest bias on allowed keys if this is larger than `FAR` in magnitude,
    and otherwise 0. The subtraction does not change the softmax. Without it, scores would be lost in the
    rounding of a large bias.
    """
    bias = bias.detach()
    largest = (bias if allowed is None else bias.masked_fill(~allowed, -torch.inf)).amax(-1, True)
    return torch.where((largest.abs() > FAR) & (largest != -torch.inf), largest, 0.0)


def without_offset(bias: Tensor, offset: Tensor) -> Tensor:
    """Return a bias minus the offset of its rows, at most 0 where an offset was subtracted."""
    return torch.where(offset == 0, bias, (bias - offset).clamp(max=0.0))


def open_faces(allowed: Tensor, dim: int = -1) -> Tensor:
    """Return True where two neighbours along dim are both allowed, so that weight may flow."""
    n = allowed.shape[dim]
    if n <= 1:  # the dimension broadcasts, or is empty
        return allowed
    return allowed.narrow(dim, 0, n - 1) & allowed.narrow(dim, 1, n - 1)


def sees_no_future(allowed: Tensor | None) -> bool:
    """Return whether no query may attend to a later key. Requires: the code is not compiled."""
    if allowed is None or allowed.shape[-1] == 1 or allowed.shape[-2] == 1:
        return False
    return not bool(allowed.triu(1).any())


@dataclass(frozen=True, eq=False)
class Scope:
    """Which keys a query may attend to, without a matrix unless one is necessary.

    Row i may attend to key j if ``-left <= j - i <= right``, j is valid, both belong to one document,
    and `mask` is True.

    Attributes:
        queries, keys: Number of queries and of keys.
        left, right: Sides of the band around the diagonal, None for no limit. They may be negative.
        valid_keys: bool ``[batch or 1, heads or 1, 1, keys]``, or None if all keys are valid.
        documents: ids ``[batch, tokens]``, or None.
        mask: bool ``[batch or 1, heads or 1, queries or 1, keys or 1]``, a mask that the other
            attributes cannot express, or None.
        bias: Finite floats of the same shape that are added to the scores, or None.
        offset: ``[batch or 1, heads or 1, queries, 1]``, numbers that `bias_tile` subtracts from the
            bias, or None; see `row_offset`.
    """

    queries: int
    keys: int
    left: int | None = None
    right: int | None = None
    valid_keys: Tensor | None = None
    documents: Tensor | None = None
    mask: Tensor | None = None
    bias: Tensor | None = None
    offset: Tensor | None = None

    @classmethod
    def of(
        cls,
        queries: int,
        keys: int,
        *,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        key_padding: Tensor | None = None,
        documents: Tensor | None = None,
        window: Window | None = None,
    ) -> "Scope":
        """Return the scope for arguments of `allowed`; attn_mask must have four dimensions."""
        left, right = (side if side >= 0 else None for side in sides(window))
        if is_causal:
            right = 0
        valid_keys, mask, bias, far = None, None, None, False
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            walls = walls_of_bias(attn_mask)
            bias = attn_mask.masked_fill(walls, 0.0)
            some, far = True, True
            if not torch.compiler.is_compiling():  # one synchronisation with the device
                some, far = torch.stack((walls.any(), (bias.abs() > FAR).any())).tolist()
            attn_mask = ~walls if some else None
        if attn_mask is not None:
            valid_keys, triangle, mask = _simplify(attn_mask, queries, keys)
            right = 0 if triangle else right
        if key_padding is not None:
            padding = key_padding[:, None, None, :]
            valid_keys = padding if valid_keys is None else valid_keys & padding
        if left is not None and statically_true(left >= queries - 1):
            left = None
        if right is not None and statically_true(right >= keys - 1):
            right = None
        scope = cls(queries, keys, left, right, valid_keys, documents, mask, bias)
        return scope._without_offset() if far else scope

    @property
    def banded(self) -> bool:
        """Whether walls move with the row."""
        return self.left is not None or self.right is not None

    @property
    def only_causal(self) -> bool:
        """Whether a query attends to all keys up to its own position, without a bias."""
        others = self.valid_keys, self.documents, self.mask, self.bias, self.left
        return self.right == 0 and all(x is None for x in others)

    def narrowed(self, by: int) -> "Scope":
        """Return the scope without `by` keys at each edge of the band."""
        left = None if self.left is None else self.left - by
        right = None if self.right is None else self.right - by
        return replace(self, left=left, right=right)

    def open_faces(self) -> Tensor | None:
        """Return bool ``[batch or 1, heads or 1, 1, keys - 1]``, False at walls that all rows share.

        The end of a document is a wall for all rows, because no row attends to two documents.
        """
        faces = []
        if self.valid_keys is not None:
            faces.append(self.valid_keys[..., 1:] & self.valid_keys[..., :-1])
        if self.documents is not None:
            faces.append((self.documents[:, 1:] == self.documents[:, :-1])[:, None, None, :])
        return all_of(faces)

    def tile(self, rows: slice, columns: slice, device: torch.device) -> Tensor | None:
        """Return bool ``[batch or 1, heads or 1, rows, columns]``, or None if every key is allowed."""
        masks = []
        (i, end_i), (j, end_j) = (rows.start, rows.stop), (columns.start, columns.stop)
        cut_left = self.left is not None and j < end_i - 1 - self.left
        if cut_left or (self.right is not None and end_j - 1 > i + self.right):
            row = torch.arange(i, end_i, device=device)[:, None]
            ahead = torch.arange(j, end_j, device=device) - row
            if self.right is not None:
                masks.append(ahead <= self.right)
            if self.left is not None:
                masks.append(ahead >= -self.left)
        if self.valid_keys is not None:
            masks.append(self.valid_keys[..., columns])
        if self.documents is not None:
            same = self.documents[:, rows, None] == self.documents[:, None, columns]
            masks.append(same[:, None])
        if self.mask is not None:
            masks.append(broadcast_slice(self.mask, rows, columns))
        return all_of(masks)

    def diagonals(self, first: int, width: int, device: torch.device) -> Tensor:
        """Return bool ``[..., queries, width]``, whether row i may attend to key i + first + m."""
        row = torch.arange(self.queries, device=device)[:, None]
        key = row + first + torch.arange(width, device=device)
        ok = (key >= 0) & (key < self.keys)
        if self.right is not None:
            ok = ok & (key - row <= self.right)
        if self.left is not None:
            ok = ok & (key - row >= -self.left)
        if self.valid_keys is not None:
            ok = ok & sliding_entries(self.valid_keys, first, width, self.queries)[..., 0, :, :]
        if self.documents is not None:
            ids = sliding_entries(
                self.documents, first, width, self.queries
            )  # `ok` is False beyond the ends
            ok = ok & (ids == self.documents[:, :, None])[:, None]
        return ok

    def bias_tile(self, rows: slice, columns: slice) -> Tensor | None:
        """Return the bias of some rows and keys, with the shape of `tile`, or None."""
        if self.bias is None:
            return None
        bias = broadcast_slice(self.bias, rows, columns)
        return bias if self.offset is None else without_offset(bias, self.offset[..., rows, :])

    def _without_offset(self) -> "Scope":
        """Return a scope with the same softmax and a small bias."""
        assert self.bias is not None
        if self.banded or self.documents is not None or self.mask is not None:
            offsets = [self._offset_of(slice(i, i + ROWS)) for i in range(0, self.queries, ROWS)]
            offset = torch.cat(offsets, -2)
            if self.bias.shape[-2] == 1 or offset.shape[:2] != self.bias.shape[:2]:
                return replace(self, offset=offset)  # their difference would be a larger tensor
        else:
            offset = row_offset(self.bias, self.valid_keys)
        return replace(self, bias=without_offset(self.bias, offset))

    def _offset_of(self, rows: slice) -> Tensor:
        """Return `row_offset` for some rows."""
        assert self.bias is not None
        rows = slice(rows.start, min(rows.stop, self.queries))
        columns = slice(0, self.keys)
        allowed = self.tile(rows, columns, self.bias.device)
        offset = row_offset(broadcast_slice(self.bias, rows, columns), allowed)
        return offset.expand(*offset.shape[:-2], rows.stop - rows.start, 1)

    def bias_diagonals(self, first: int, width: int) -> Tensor | None:
        """Return the bias ``[..., queries, width]`` of row i and key i + first + m, or None."""
        if self.bias is None:
            return None
        row = torch.arange(self.queries, device=self.bias.device)[:, None]
        key = (row + first + torch.arange(width, device=row.device)).clamp(0, self.keys - 1)
        bias = self.bias.expand(*self.bias.shape[:-2], self.queries, self.keys)[..., row, key]
        return bias if self.offset is None else without_offset(bias, self.offset)

    def columns(self, rows: slice) -> slice:
        """Return the smallest range of keys that contains the band in these rows."""
        start, stop = 0, self.keys
        if self.left is not None:
            start = min(max(rows.start - self.left, 0), self.keys)
        if self.right is not None:
            stop = min(max(rows.stop + self.right, 0), self.keys)
        return slice(start, max(start, stop))

    def document_ranges(self) -> tuple[Tensor, Tensor] | None:
        """Return the first key of each row's document and one past the last, ``[batch, tokens]``."""
        if self.documents is None:
            return None
        ids, order = self.documents.sort(dim=-1, stable=True)
        first = torch.searchsorted(ids, self.documents.contiguous())
        last = torch.searchsorted(ids, self.documents.contiguous(), right=True) - 1
        return order.gather(-1, first), order.gather(-1, last) + 1


def sliding_entries(x: Tensor, first: int, width: int, rows: int) -> Tensor:
    """Return entries i + first + m of x ``[..., keys]`` as ``[..., rows, width]``, 0 beyond the ends."""
    return entries(x, first, rows + width - 1, -1).unfold(-1, width, 1)


def entries(x: Tensor, first: int, count: int, dim: int) -> Tensor:
    """Return `count` entries along dim (-1 or -2) from `first` on, 0 beyond the ends."""
    before, size = min(max(-first, 0), count), x.shape[dim]
    start = min(max(first, 0), size)
    x = x.narrow(dim, start, min(size - start, count - before))
    sides = before, count - before - x.shape[dim]
    return pad(x, sides if dim == -1 else (0, 0, *sides))


def broadcast_slice(x: Tensor, rows: slice, columns: slice) -> Tensor:
    """Return some rows and columns of a matrix whose dimensions of size 1 broadcast."""
    x = x if x.shape[-2] == 1 else x[..., rows, :]
    return x if x.shape[-1] == 1 else x[..., columns]


def _simplify(mask: Tensor, queries: int, keys: int) -> tuple[Tensor | None, bool, Tensor | None]:
    """Return (valid keys, whether the mask is also causal, the mask if it has no such form).

    This function reads values, so compiled code returns a mask with several rows unchanged.
    """
    last = mask[..., -1:, :].expand(*mask.shape[:-2], 1, keys)
    if mask.shape[-2] == 1:
        return last, False, None
    if torch.compiler.is_compiling() or queries < keys:
        return None, False, mask
    if (mask == last).all():
        return last, False, None
    below = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril()
    if (mask == (last & below)).all():
        return last, True, None
    return None, False, mask
