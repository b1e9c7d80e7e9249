"""Decoding with PDE attention: a cache of keys and values, and of the values after their steps.

A new token's row of the map ends at the token itself, its wall. Keys further from it than the reach R,
steps times the PDE's reach, multiply stepped values, and a stepped value is final as soon as R tokens
follow it: one becomes final with each token, and is kept. The last R weights take the steps themselves,
within 2 R keys. So a token costs ordinary cached attention and O(R) more. Under a PDE that is not
linear the whole row takes the steps, steps / dim of the attention's cost.
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
from attractor.attention.engines.values import step_values
from attractor.attention.pde_attention import pde_attention
from attractor.attention.pdes import PDE, Line
from attractor.attention.pdes.evolution import Evolution
from attractor.attention.pdes.pde import check_heads, with_coefficients
from attractor.attention.precision import for_scores, wide
from attractor.core.checks import (
    as_int,
    check_beside,
    check_number,
    check_tensor,
    check_values,
    check_whole,
)

ROWS = 128  # of the map that are held at once when many tokens come together


class PDECache:
    """Keys and values of the tokens so far, for causal PDE attention a few tokens at a time.

    However the tokens are cut into calls, the outputs are those of one call of ``pde_attention(...,
    is_causal=True)`` on all of them. For inference: nothing here carries gradients, and the PDE's
    coefficients are those of the moment when the cache is made, whatever happens to the parameters they
    come from. Where heads share keys and values but have coefficients of their own, stepped values are
    kept for every head of the queries.

    A copy, shallow or deep, is a cache of its own, and a cache can be pickled if its PDE can. A method
    that raises leaves the cache as it was.

    >>> import torch
    >>> from attractor.attention import pdes
    >>> cache = PDECache(pdes.Diffusion(alpha=0.1), steps=4)
    >>> prompt, token = torch.randn(3, 2, 8, 10, 64), torch.randn(3, 2, 8, 1, 64)
    >>> cache.attend(*prompt).shape, cache.attend(*token).shape, len(cache)
    (torch.Size([2, 8, 10, 64]), torch.Size([2, 8, 1, 64]), 11)

    Args:
        pde: an equation or its name.
        steps, dt: how many steps a map takes, and their size; no steps are ordinary attention.
        scale: of the scores, ``dim ** -0.5`` if None.
        axis, walls: as in `pde_attention`; only ``"key"`` and ``"mask"`` are possible.
        capacity: tokens to make room for at once; it grows by itself.
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
                f"axis {axis!r} mixes the rows of a map, and a cache does not have those to come; "
                "use axis='key'"
            )
        if walls != "mask":
            raise ValueError(
                f"walls={walls!r} lets a row flow to keys after it, and a cache does not have those "
                "yet; use walls='mask'"
            )
        evolution = Evolution.of(pde, steps, dt)
        self.pde: PDE = with_coefficients(evolution.pde, lambda x: x.detach().clone())
        if scale is not None:
            check_number("scale", scale)
        check_whole("capacity", capacity, 1)
        self.steps, self.dt, self.scale = evolution.steps, dt, scale
        self._by_rows = not self.pde.linear or not hasattr(self.pde, "reach")
        self._reach = 0 if self._by_rows else self._evolution.reach
        self._capacity = capacity
        self._length = self._final = 0  # tokens, and those of them whose stepped values are final
        self._clear = 0  # no wall between keys from here on
        self._key: Tensor | None = None
        self._value: Tensor | None = None
        self._stepped: Tensor | None = None
        self._real: Tensor | None = None
        self._matrices: tuple[Tensor, Tensor] | None = None

    @property
    def _evolution(self) -> Evolution:
        return Evolution(self.pde, self.steps, self.dt)

    def __len__(self) -> int:
        return self._length

    def __copy__(self) -> "PDECache":
        return copy.deepcopy(self)  # two caches that write into one buffer would be of no use

    @property
    def real_tokens(self) -> Tensor | None:
        """How many tokens of each text are real, ``[batch, 1]``; None if no text has padding."""
        return None if self._real is None else self._real[:, 0, : self._length].sum(1)

    @torch.no_grad()
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding: Tensor | None = None
    ) -> Tensor:
        """Takes in new tokens, one or several, and attends from each to all up to it.

        Args:
            query: ``[batch, heads, new, dim]``.
            key: ``[batch, key heads, new, dim]``; key heads divide heads.
            value: ``[batch, key heads, new, value dim]``.
            key_padding: ``[batch, new]`` bool, True = a real token; for prompts padded on the left.

        Returns:
            ``[batch, heads, new, value dim]``.
        """
        with unchanged_on_error(self):
            return _attend(query, key, value, cache=self, key_padding=key_padding)

    def _take_in(self, query: Tensor, key: Tensor, value: Tensor, key_padding: Tensor | None) -> Tensor:
        self._check(query, key, value, key_padding)
        first = self._length
        self._append(key, value, key_padding)
        if self._reach:
            self._finish(query.shape[1])
        if first == 0 and query.shape[2] > 1:
            return pde_attention(
                query, key, value, is_causal=True, scale=self.scale, enable_gqa=True, pde=self.pde,
                steps=self.steps, dt=self.dt, key_padding=key_padding,
            )  # fmt: skip
        parts = query.split(ROWS, 2)
        return torch.cat([self._rows(part, first + i * ROWS) for i, part in enumerate(parts)], 2)

    def reorder(self, indices: Tensor) -> None:
        """Takes these texts of the batch, in this order, some twice and others not: beam search."""
        check_tensor("indices", indices, "of texts [batch]", floating=False)
        texts = 0 if self._key is None else len(self._key)
        if indices.dim() != 1 or indices.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"indices {list(indices.shape)} of {indices.dtype} must be integers [batch]"
            )
        check_values("indices", indices)
        if (
            texts
            and indices.device.type == "cpu"
            and not bool(((indices >= 0) & (indices < texts)).all())
        ):
            raise ValueError(f"indices {indices.tolist()} must be from 0 to {texts - 1}")
        chosen: dict[str, Any] = {}
        for name in ("_key", "_value", "_stepped", "_real"):
            held = getattr(self, name)
            if held is not None:
                chosen[name] = held.index_select(0, indices.to(held.device))
        if texts > 1:
            chosen["pde"] = with_coefficients(self.pde, lambda x: _of_texts(x, indices))
            chosen["_matrices"] = None
        for name, value in chosen.items():
            setattr(self, name, value)

    def crop(self, tokens: int) -> None:
        """Keeps the first tokens, or, if negative, drops so many at the end: speculative decoding."""
        tokens = as_int(tokens)
        if not isinstance(tokens, int):
            raise TypeError(f"crop({tokens!r}): give a number of tokens")
        kept = tokens if tokens >= 0 else self._length + tokens
        if not 0 <= kept <= self._length:
            raise ValueError(f"crop({tokens}) is not possible: the cache holds {self._length} tokens")
        self._length = kept
        self._clear = min(self._clear, kept)
        self._final = min(self._final, max(kept - self._reach, 0))

    def _check(self, query: Tensor, key: Tensor, value: Tensor, key_padding: Tensor | None) -> None:
        for name, x in (("query", query), ("key", key), ("value", value), ("key_padding", key_padding)):
            if x is not None or name != "key_padding":
                check_tensor(name, x, "[batch, heads, new tokens, dim]", floating=name != "key_padding")
                check_beside(name, x, "query", query)
        own = query if self._key is None else self._key
        check_beside("query", query, "what the cache holds", own)
        if not query.dtype == key.dtype == value.dtype == own.dtype:
            raise ValueError(
                f"query, key and value are {query.dtype}, {key.dtype} and {value.dtype}; they must "
                f"be of one type, that of the tokens before: {own.dtype}"
            )
        shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
        if not query.ndim == key.ndim == value.ndim == 4:
            raise ValueError(f"{shapes}: all three must be [batch, heads, new tokens, dim]")
        if not query.shape[2] == key.shape[2] == value.shape[2] >= 1:
            raise ValueError(f"{shapes}: every new token needs a query, a key and a value")
        if (
            query.shape[0] != key.shape[0]
            or key.shape[0] != value.shape[0]
            or query.shape[3] != key.shape[3]
        ):
            raise ValueError(f"{shapes}: all have one batch, query and key the same last dimension")
        if key.shape[1] != value.shape[1] or query.shape[1] % max(key.shape[1], 1):
            raise ValueError(f"{shapes}: key and value must have as many heads, a divisor of query's")
        check_heads(self.pde, query.shape[:2])
        for name, new, held in (("key", key, self._key), ("value", value, self._value)):
            if held is not None and (new.shape[:2], new.shape[3]) != (held.shape[:2], held.shape[3]):
                raise ValueError(
                    f"{name} {list(new.shape)} does not go with the cache's "
                    f"{[*held.shape[:2], self._length, held.shape[3]]}; use one cache for each layer"
                )
        if key_padding is not None and (
            key_padding.dtype != torch.bool or tuple(key_padding.shape) != (key.shape[0], key.shape[2])
        ):
            raise ValueError(
                f"key_padding {list(key_padding.shape)} of {key_padding.dtype} must be bool "
                f"{[key.shape[0], key.shape[2]]}, True = a real token"
            )

    def _append(self, key: Tensor, value: Tensor, key_padding: Tensor | None) -> None:
        first, last = self._length, self._length + key.shape[2]
        self._key = self._put(self._key, key, first)
        self._value = self._put(self._value, value, first)
        if key_padding is not None and self._real is None:
            self._real = key_padding.new_ones(key.shape[0], 1, self._key.shape[2], 1)
        if self._real is not None:
            real = (
                self._real.new_ones(key.shape[0], key.shape[2]) if key_padding is None else key_padding
            )
            self._real = self._put(self._real, real[:, None, :, None], first)
        if key_padding is not None:
            padded = (~key_padding).any(0).nonzero()
            if len(padded):
                self._clear = first + int(padded[-1]) + 1
        self._length = last

    def _put(self, held: Tensor | None, new: Tensor, first: int) -> Tensor:
        """New tokens into a buffer ``[batch, heads, capacity, n]``, a longer one where it is full."""
        last = first + new.shape[2]
        if held is None or last > held.shape[2]:
            room = max(self._capacity, last, 0 if held is None else 2 * held.shape[2])
            longer = new.new_zeros(new.shape[0], new.shape[1], room, new.shape[3])
            if held is not None:
                longer[:, :, :first] = held[:, :, :first]
            held = longer
        held[:, :, first:last] = new
        return held

    def _finish(self, heads: int) -> None:
        """Stepped values of the keys that the new tokens make final."""
        assert self._value is not None
        reach, first, last = self._reach, self._final, self._length - self._reach
        if last <= first:
            return
        low = max(first - reach, 0)
        value = self._value[:, :, low : self._length].to(wide(self._value.dtype))
        taps, _ = self._patterns(value)
        if taps.ndim > 2 and taps.shape[-3] > 1 and value.shape[1] != heads:
            # Heads share values, but not coefficients.
            value = value.repeat_interleave(heads // value.shape[1], 1)
        if last - first == 1 and low >= self._clear and low + 2 * reach + 1 == self._length:
            stepped = taps @ value
        else:
            open = None
            if self._real is not None:
                open = masks.open_faces(self._real[:, :, low : self._length].mT)
            stepped = step_values(self._evolution, value, open)
            stepped = stepped[:, :, first - low : last - low]
        self._stepped = self._put(self._stepped, stepped.to(self._value.dtype), first)
        self._final = last

    def _rows(self, query: Tensor, first: int) -> Tensor:
        """Output of the queries at positions from first on."""
        assert self._key is not None
        assert self._value is not None
        reach, rows = self._reach, query.shape[2]
        stop = first + rows
        A, allowed = self._map(query, first)
        if self._by_rows:
            line = Line(-1, None if allowed is None else masks.open_faces(allowed))
            A = self._evolution.of_map(A, line)
        if not reach:
            return _product(A.to(query.dtype), self._value[:, :, :stop])

        far, out = max(stop - reach, 0), None
        if self._stepped is not None and far:
            weights = A[..., :far] if rows == 1 else A[..., :far].tril(first - reach)
            out = _product(weights.to(query.dtype), self._stepped[:, :, :far])
        near = _upright(pad(A[..., max(first - reach + 1, 0) :], (max(reach - 1 - first, 0), 0)), reach)
        low = first - 2 * reach + 1
        if low >= self._clear:
            patch = near @ self._patterns(near)[1]
        else:
            band = boundary.before_wall(0, reach)
            patch = boundary.spread(near, band, self._evolution, row=first, open=self._open(stop))
        value = pad(self._value[:, :, max(low, 0) : stop], (0, 0, max(-low, 0), 0))
        at_wall = _product(_slanted(patch).to(query.dtype), value)
        return at_wall if out is None else (out.to(A.dtype) + at_wall.to(A.dtype)).to(query.dtype)

    def _open(self, stop: int) -> Tensor | None:
        """Return the faces ``[batch, 1, 1, stop - 1]`` through which weight flows; None: through all."""
        return None if self._real is None else masks.open_faces(self._real[:, :, :stop].mT)

    def _map(self, query: Tensor, first: int) -> tuple[Tensor, Tensor | None]:
        """A(0) ``[batch, heads, rows, keys]`` of rows from first on, and what they may attend to."""
        assert self._key is not None
        rows, stop = query.shape[2], first + query.shape[2]
        scale = query.shape[3] ** -0.5 if self.scale is None else self.scale
        own, keys = for_scores(query, self._key[:, :, :stop])
        scores = _product(own * scale, keys.mT)
        scores = scores.to(wide(scores.dtype))
        allowed = None
        if rows > 1:
            allowed = torch.ones(rows, stop, dtype=torch.bool, device=query.device).tril(first)
        if self._real is not None:
            real = self._real[:, :, :stop].mT
            allowed = real if allowed is None else allowed & real
        if allowed is None:
            return scores.softmax(-1), None
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        return scores.softmax(-1).masked_fill(~allowed, 0.0), allowed

    def _patterns(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """What a stepped value is of its neighbours ``[..., 1, 2 R + 1]``, and what the last R weights
        before a wall become ``[..., R, 2 R]``: both away from any other wall."""
        if self._matrices is None or self._matrices[0].device != like.device:
            reach, unit = self._reach, torch.eye(self._reach, dtype=like.dtype, device=like.device)
            row = pad(unit[:1, :1], (reach, reach))
            taps = self._evolution.of_linear(row, Line(-1))
            wall = self._evolution.of_linear(pad(unit, (reach, 0)), Line(-1))
            self._matrices = taps.to(like.dtype), wall.to(like.dtype)
        return self._matrices


@autocast_as_sdpa
def _attend(
    query: Tensor, key: Tensor, value: Tensor, *, cache: PDECache, key_padding: Tensor | None
) -> Tensor:
    return cache._take_in(query, key, value, key_padding)


@contextmanager
def unchanged_on_error(*caches: PDECache | None) -> Iterator[None]:
    """Give caches back what they held, should the body raise.

    Buffers are only ever written beyond the tokens that a cache holds, so its attributes are enough.
    """
    before = [(cache, dict(vars(cache))) for cache in caches if cache is not None]
    try:
        yield
    except BaseException:
        for cache, attributes in before:
            vars(cache).update(attributes)
        raise


def _of_texts(coefficient: Tensor, indices: Tensor) -> Tensor:
    """Coefficients ``[batch, heads, 1, 1]`` of other texts; those that all texts share as they are."""
    if coefficient.ndim < 4 or coefficient.shape[-4] == 1:
        return coefficient
    return coefficient.index_select(-4, indices.to(coefficient.device))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` for ``[batch, heads, rows, n]`` and ``[batch, fewer heads, n, k]``."""
    if a.shape[1] == b.shape[1]:
        return a @ b
    shared = a.reshape(a.shape[0], b.shape[1], -1, a.shape[3])  # the rows of heads that share a b
    return (shared @ b).reshape(*a.shape[:3], b.shape[3])


def _upright(slab: Tensor, width: int) -> Tensor:
    """Of each row i of ``[..., rows, rows + width - 1]`` the entries i to i + width - 1."""
    rows = slab.shape[-2]
    if rows == 1:
        return slab
    return pad(slab.flatten(-2), (0, rows)).unflatten(-1, (rows, rows + width))[..., :width]


def _slanted(band: Tensor) -> Tensor:
    """The reverse of `_upright`, zeros elsewhere."""
    rows, width = band.shape[-2:]
    if rows == 1:
        return band
    flat = pad(band, (0, rows)).flatten(-2)[..., : rows * (rows + width - 1)]
    return flat.unflatten(-1, (rows, rows + width - 1))
