"""Decoding with PDE attention: a cache of keys, values and stepped values.

The row of a new token ends at the token itself, which is a wall. Let R be the reach of all steps. A
stepped value is final once R tokens follow it; the cache stores it then. The last R weights of a row
take the steps themselves, within 2 R keys, so a token costs ordinary cached attention plus O(R). For a
nonlinear PDE the entire row takes the steps, which costs steps / dim of the attention.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attractor.attention import masks
from attractor.attention.call import autocast_as_sdpa
from attractor.attention.engines import boundary
from attractor.attention.engines.bands import diagonals, from_diagonals
from attractor.attention.engines.values import Stencil, step_values
from attractor.attention.pde_attention import pde_attention
from attractor.attention.pdes import PDE, Line
from attractor.attention.pdes.evolution import Evolution
from attractor.attention.pdes.pde import check_heads, with_coefficients
from attractor.attention.precision import accumulate_dtype, for_scores
from attractor.attention.validation import check_masks, check_tensors, for_every_text
from attractor.common.checks import (
    as_int,
    check_beside,
    check_number,
    check_tensor,
    check_values,
    check_whole,
)

BLOCK_ROWS = 128  # Rows of the attention map in memory at once when many tokens are appended.


class PDECache:
    """Keys and values of previous tokens, for causal PDE attention in several calls.

    The outputs do not depend on how the tokens are divided into calls: they equal those of one call of
    ``pde_attention(..., is_causal=True)`` on all tokens. The cache is for inference: no output has a
    gradient, and the coefficients of the PDE are copied when the cache is created, so later changes of
    parameters have no effect. If heads share keys and values but not coefficients, the cache stores
    stepped values for every query head.

    Shallow and deep copies are independent caches. A cache can be pickled if its PDE can. A method that
    raises an exception leaves the cache unchanged.

    >>> import torch
    >>> from attractor.attention import pdes
    >>> cache = PDECache(pdes.Diffusion(alpha=0.1), steps=4)
    >>> prompt, token = torch.randn(3, 2, 8, 10, 64), torch.randn(3, 2, 8, 1, 64)
    >>> cache.attend(*prompt).shape, cache.attend(*token).shape, len(cache)
    (torch.Size([2, 8, 10, 64]), torch.Size([2, 8, 1, 64]), 11)

    Args:
        pde: An equation, or the name of one.
        steps: Number of steps that a map takes. 0 is ordinary attention.
        dt: Size of a step in pseudo-time.
        scale: Factor of the scores, ``dim ** -0.5`` if None.
        axis: As in `pde_attention`; only ``"key"`` is supported.
        walls: As in `pde_attention`; only ``"mask"`` is supported.
        capacity: Number of tokens to allocate memory for. It is doubled when the cache is full.
    """

    def __init__(
        self,
        pde: PDE | str,
        steps: int = 4,
        dt: float = 1.0,
        *,
        scale: float | None = None,
        axis: str = "key",
        walls: str = "mask",
        capacity: int = 64,
    ) -> None:
        if axis != "key":
            raise ValueError(
                f"axis={axis!r} mixes the rows of a map, but a cache does not have the rows of later "
                "tokens; use axis='key'"
            )
        if walls != "mask":
            raise ValueError(
                f"walls={walls!r} moves weight to later keys, but a cache does not have these keys yet; "
                "use walls='mask'"
            )
        evolution = Evolution.of(pde, steps, dt)
        self.pde: PDE = with_coefficients(evolution.pde, lambda x: x.detach().clone())
        if scale is not None:
            check_number("scale", scale)
        check_whole("capacity", capacity, 1)
        self.steps, self.dt, self.scale = evolution.steps, dt, scale
        self._steps_entire_rows = not self.pde.linear or not hasattr(self.pde, "reach")
        self._reach = 0 if self._steps_entire_rows else self._evolution.reach
        self._capacity = capacity
        self._length = 0
        self._final_length = 0  # Number of tokens whose stepped values are final.
        self._padding_end = 0  # No padding, and so no wall between keys, from this position on.
        self._key: Tensor | None = None
        self._value: Tensor | None = None
        self._stepped: Tensor | None = None
        self._valid_keys: Tensor | None = None
        self._stencil: Stencil | None = None

    @property
    def _evolution(self) -> Evolution:
        return Evolution(self.pde, self.steps, self.dt)

    def __len__(self) -> int:
        return self._length

    def __copy__(self) -> "PDECache":
        return copy.deepcopy(self)  # Two caches must not write into the same buffers.

    @property
    def real_tokens(self) -> Tensor | None:
        """Number of valid tokens per text, ``[batch, 1]``, or None if no text has padding."""
        return None if self._valid_keys is None else self._valid_keys[:, 0, : self._length].sum(1)

    @torch.no_grad()
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding: Tensor | None = None
    ) -> Tensor:
        """Append one or more tokens, and attend from each of them to all tokens up to it.

        Args:
            query: ``[batch, heads, new, dim]``.
            key: ``[batch, key heads, new, dim]``; the number of key heads divides that of heads.
            value: ``[batch, key heads, new, value dim]``.
            key_padding: Bool ``[batch, new]``, True for valid tokens; for prompts with padding on the
                left.

        Returns:
            ``[batch, heads, new, value dim]``.
        """
        with unchanged_on_error(self):
            return _attend(query, key, value, cache=self, key_padding=key_padding)

    def _append_and_attend(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding: Tensor | None
    ) -> Tensor:
        first = self._length
        self._check_new_tokens(query, key, value, key_padding)
        key_padding = for_every_text(key_padding, query)
        self._append(key, value, key_padding)
        if self._reach:
            self._finalise(query.shape[1])
        if first == 0 and query.shape[2] > 1:
            return pde_attention(
                query, key, value, is_causal=True, scale=self.scale, enable_gqa=True, pde=self.pde,
                steps=self.steps, dt=self.dt, key_padding=key_padding,
            )  # fmt: skip
        blocks = query.split(BLOCK_ROWS, 2)
        outputs = [self._attend_rows(block, first + i * BLOCK_ROWS) for i, block in enumerate(blocks)]
        return torch.cat(outputs, 2)

    def _check_new_tokens(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding: Tensor | None
    ) -> None:
        """Raise unless new tokens match each other, those in the cache, and the PDE."""
        check_tensors(query, key, value, enable_gqa=True)
        check_masks(query, key, None, key_padding, None, None)
        if query.ndim != 4 or query.shape[2] != key.shape[2] or not key.shape[2]:
            raise ValueError(
                f"query {list(query.shape)} and key {list(key.shape)} must be [batch, heads, new "
                "tokens, dim]; every new token needs a query, a key and a value"
            )
        check_heads(self.pde, query.shape[:2])
        for name, x, buffer in (("key", key, self._key), ("value", value, self._value)):
            if buffer is None:
                continue
            check_beside(name, x, "the cache", buffer)
            if (x.shape[:2], x.shape[3], x.dtype) != (buffer.shape[:2], buffer.shape[3], buffer.dtype):
                raise ValueError(
                    f"{name} {list(x.shape)} of {x.dtype} does not match the cache's "
                    f"{[*buffer.shape[:2], self._length, buffer.shape[3]]} of {buffer.dtype}; use one "
                    "cache per layer"
                )

    def reorder(self, indices: Tensor) -> None:
        """Replace the texts by those at `indices` of the batch, as beam search does.

        Args:
            indices: Integers ``[new batch]``. An index may occur several times or not at all.
        """
        check_tensor("indices", indices, "of texts [batch]", floating=False)
        batch = 0 if self._key is None else len(self._key)
        if indices.dim() != 1 or indices.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"indices {list(indices.shape)} of {indices.dtype} must be integers [batch]"
            )
        check_values("indices", indices)
        if batch and indices.device.type == "cpu" and not ((indices >= 0) & (indices < batch)).all():
            raise ValueError(f"indices {indices.tolist()} must be from 0 to {batch - 1}")
        attributes: dict[str, Any] = {}
        for name in ("_key", "_value", "_stepped", "_valid_keys"):
            buffer = getattr(self, name)
            if buffer is not None:
                attributes[name] = buffer.index_select(0, indices.to(buffer.device))
        if batch > 1:
            attributes["pde"] = with_coefficients(self.pde, lambda x: _select_texts(x, indices))
            attributes["_stencil"] = None
        for name, value in attributes.items():
            setattr(self, name, value)

    def crop(self, tokens: int) -> None:
        """Remove tokens at the end, as speculative decoding does.

        Args:
            tokens: Number of tokens to keep, or, if negative, minus the number of tokens to remove.
        """
        tokens = as_int(tokens)
        if not isinstance(tokens, int):
            raise TypeError(f"tokens is a {type(tokens).__name__}; pass a number of tokens")
        length = tokens if tokens >= 0 else self._length + tokens
        if not 0 <= length <= self._length:
            raise ValueError(f"crop({tokens}) is not possible: the cache holds {self._length} tokens")
        self._length = length
        self._padding_end = min(self._padding_end, length)
        self._final_length = min(self._final_length, max(length - self._reach, 0))

    def _append(self, key: Tensor, value: Tensor, key_padding: Tensor | None) -> None:
        first, (batch, _, tokens, _) = self._length, key.shape
        self._key = self._write(self._key, key, first)
        self._value = self._write(self._value, value, first)
        if key_padding is not None and self._valid_keys is None:
            self._valid_keys = key_padding.new_ones(batch, 1, self._key.shape[2], 1)
        if self._valid_keys is not None:
            valid = self._valid_keys.new_ones(batch, tokens) if key_padding is None else key_padding
            self._valid_keys = self._write(self._valid_keys, valid[:, None, :, None], first)
        if key_padding is not None:
            padded = (~key_padding).any(0).nonzero()
            if len(padded):
                self._padding_end = first + int(padded[-1]) + 1
        self._length = first + tokens

    def _write(self, buffer: Tensor | None, new: Tensor, first: int) -> Tensor:
        """Return the buffer ``[batch, heads, capacity, n]``, larger if full, with new tokens."""
        last = first + new.shape[2]
        if buffer is None or last > buffer.shape[2]:
            capacity = max(self._capacity, last, 0 if buffer is None else 2 * buffer.shape[2])
            larger = new.new_zeros(new.shape[0], new.shape[1], capacity, new.shape[3])
            if buffer is not None:
                larger[:, :, :first] = buffer[:, :, :first]
            buffer = larger
        buffer[:, :, first:last] = new
        return buffer

    def _finalise(self, heads: int) -> None:
        """Store the stepped values that are final now."""
        assert self._value is not None
        reach, first, last = self._reach, self._final_length, self._length - self._reach
        if last <= first:
            return
        low = max(first - reach, 0)
        value = self._value[:, :, low : self._length].to(accumulate_dtype(self._value.dtype))
        row = self._stencil_like(value).matrix[..., :1, : 2 * reach + 1]
        if row.ndim > 2 and row.shape[-3] > 1 and value.shape[1] != heads:
            # Heads share values but not coefficients.
            value = value.repeat_interleave(heads // value.shape[1], 1)
        if last - first == 1 and low >= self._padding_end and low + 2 * reach + 1 == self._length:
            stepped = row @ value
        else:
            stepped = step_values(self._evolution, value, self._open_faces(low, self._length))
            stepped = stepped[:, :, first - low : last - low]
        self._stepped = self._write(self._stepped, stepped.to(self._value.dtype), first)
        self._final_length = last

    def _attend_rows(self, query: Tensor, first: int) -> Tensor:
        """Return the outputs of the queries at positions from `first` on."""
        assert self._key is not None
        assert self._value is not None
        reach, rows = self._reach, query.shape[2]
        stop = first + rows
        A, allowed = self._attention_map(query, first)
        if self._steps_entire_rows:
            line = Line(-1, None if allowed is None else masks.open_faces(allowed))
            A = self._evolution.of_map(A, line)
        if not reach:
            return _grouped_matmul(A.to(query.dtype), self._value[:, :, :stop])

        far, far_output = max(stop - reach, 0), None
        if self._stepped is not None and far:
            weights = A[..., :far] if rows == 1 else A[..., :far].tril(first - reach)
            far_output = _grouped_matmul(weights.to(query.dtype), self._stepped[:, :, :far])
        last_keys = pad(A[..., max(first - reach + 1, 0) :], (max(reach - 1 - first, 0), 0))
        weights = diagonals(last_keys, reach)
        low = first - 2 * reach + 1
        if low >= self._padding_end:
            patch = weights @ self._stencil_like(weights).bottom
        else:
            band, open = boundary.before_wall(0, reach), self._open_faces(0, stop)
            patch = boundary.spread(weights, band, self._evolution, row=first, open=open)
        value = pad(self._value[:, :, max(low, 0) : stop], (0, 0, max(-low, 0), 0))
        output = _grouped_matmul(from_diagonals(patch).to(query.dtype), value)
        if far_output is None:
            return output
        return (far_output.to(A.dtype) + output.to(A.dtype)).to(query.dtype)

    def _open_faces(self, start: int, stop: int) -> Tensor | None:
        """Return the open faces ``[batch, 1, 1, stop - start - 1]`` of these keys, or None for all."""
        if self._valid_keys is None:
            return None
        return masks.open_faces(self._valid_keys[:, :, start:stop].mT)

    def _attention_map(self, query: Tensor, first: int) -> tuple[Tensor, Tensor | None]:
        """Return A(0) ``[batch, heads, rows, keys]`` of the rows from `first` on, and their mask."""
        assert self._key is not None
        rows, stop = query.shape[2], first + query.shape[2]
        scale = query.shape[3] ** -0.5 if self.scale is None else self.scale
        query, keys = for_scores(query, self._key[:, :, :stop])
        scores = _grouped_matmul(query * scale, keys.mT)
        scores = scores.to(accumulate_dtype(scores.dtype))
        allowed = None
        if rows > 1:
            allowed = torch.ones(rows, stop, dtype=torch.bool, device=query.device).tril(first)
        if self._valid_keys is not None:
            valid = self._valid_keys[:, :, :stop].mT
            allowed = valid if allowed is None else allowed & valid
        if allowed is None:
            return scores.softmax(-1), None
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        return scores.softmax(-1).masked_fill(~allowed, 0.0), allowed

    def _stencil_like(self, x: Tensor) -> Stencil:
        """Return the matrices of all steps away from padding, with the device and dtype of `x`."""
        if self._stencil is None or self._stencil.matrix.device != x.device:
            self._stencil = Stencil.of(self._evolution, x.dtype, x.device)
        return self._stencil


@autocast_as_sdpa
def _attend(
    query: Tensor, key: Tensor, value: Tensor, *, cache: PDECache, key_padding: Tensor | None
) -> Tensor:
    return cache._append_and_attend(query, key, value, key_padding)


@contextmanager
def unchanged_on_error(*caches: PDECache | None) -> Iterator[None]:
    """Restore the caches if the body raises an exception.

    Buffers are written only beyond the tokens that a cache holds, so restoring attributes suffices.
    """
    previous = [(cache, dict(vars(cache))) for cache in caches if cache is not None]
    try:
        yield
    except BaseException:
        for cache, attributes in previous:
            vars(cache).update(attributes)
        raise


def _select_texts(coefficient: Tensor, indices: Tensor) -> Tensor:
    """Return coefficients ``[batch, heads, 1, 1]`` of other texts; shared ones are returned as is."""
    if coefficient.ndim < 4 or coefficient.shape[-4] == 1:
        return coefficient
    return coefficient.index_select(-4, indices.to(coefficient.device))


def _grouped_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` for ``[batch, heads, rows, n]`` and ``[batch, key heads, n, k]``."""
    if a.shape[1] == b.shape[1]:
        return a @ b
    groups = a.reshape(a.shape[0], b.shape[1], -1, a.shape[3])  # rows of the heads that share a key head
    return (groups @ b).reshape(*a.shape[:3], b.shape[3])
