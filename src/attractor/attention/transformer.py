"""Transformers whose attention maps move under a PDE; ``pde=None`` makes the standard ones.

`PDEAttention` is a layer of attention, `Stack` the layers of a transformer, `Classifier` an encoder of
texts, `LanguageModel` a causal one. A standard transformer is the same class with ``pde=None``; a
Longformer or a Performer is the same class with another function for ``attention=``. Nothing else
differs, and with the same seed all of them start with the same weights.

>>> import torch
>>> model = LanguageModel(vocabulary=100, dim=32, heads=4, layers=2, hidden=64, pde="wave", steps=4)
>>> ids = torch.randint(100, (2, 10))
>>> model(ids).shape
torch.Size([2, 10, 100])
>>> from attractor.attention import assert_causal
>>> assert_causal(model, ids)

A Longformer that sees 64 tokens back, and a Performer:

>>> from attractor.attention.performer import RandomFeatures, performer_attention
>>> from attractor.attention.windows import window_attention
>>> size = {"dim": 32, "heads": 4, "layers": 2, "hidden": 64}
>>> longformer = LanguageModel(100, **size, attention=window_attention, window=64, global_tokens=1)
>>> performer = LanguageModel(100, **size, attention=performer_attention, features=RandomFeatures(8))
>>> longformer(ids).shape == performer(ids).shape == model(ids).shape
True
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

from attractor.attention.cache import PDECache, unchanged_on_error
from attractor.attention.call import METHODS, WALLS
from attractor.attention.pde_attention import pde_attention
from attractor.attention.pdes import AXES, PDE, Diffusion, LearnedPDE, get_pde
from attractor.attention.pdes.pde import dimensions
from attractor.attention.tracing import as_node, is_symbolic
from attractor.core.checks import (
    as_int,
    check_beside,
    check_choice,
    check_home,
    check_input,
    check_number,
    check_tensor,
    check_whole,
    is_number,
    is_whole,
    nearest,
)


class PDEAttention(nn.Module):
    """Self-attention with several heads whose maps take `steps` steps under a PDE.

    Args:
        dim: of the tokens.
        heads: how many; they divide dim among them.
        pde: an equation of `attractor.pdes`, or the name of one; None, as ``steps=0``, is standard
            attention. Or a module that returns an equation when it is called, such as a `LearnedPDE`
            shared by several layers.
        steps: how many steps a map takes.
        causal: whether a token sees only itself and what is before it.
        learn: whether the PDE's coefficients are learnt, from its numbers on, see `LearnedPDE`.
        per_head: learn a coefficient for each head instead of one for all.
        dt: pseudo-time of a step.
        dropout: probability that an entry of a map is dropped, in training.
        bias: whether the projections have one.
        attention: what to call instead of `pde_attention`: a function or module ``(query, key, value,
            *, is_causal, key_padding, pde, steps, dt, **options)``, all three tensors ``[batch, heads,
            tokens, dim / heads]``, that returns one like query. Without a PDE it is given pde=None and
            steps=0; key_padding, documents and dropout_p only where there are any.
        **options: passed on to it: ``axis``, ``walls``, ``window``, ``method`` of `pde_attention`, or
            whatever `attention` takes; modules among them become part of this one.

    Raises:
        TypeError: an option that `attention` does not take, or that is an argument of this class under
            another name (``is_causal``, ``dropout_p``).
        ValueError: a number that is not allowed, or dropout for an `attention` without dropout_p.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        pde: str | PDE | nn.Module | None = "diffusion",
        steps: int = 4,
        causal: bool = False,
        learn: bool = True,
        *,
        per_head: bool = False,
        dt: float = 1.0,
        dropout: float = 0.0,
        bias: bool = True,
        attention: Callable[..., Tensor] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        whole = is_whole(dim) and is_whole(heads)
        if not whole or heads < 1 or dim < 1 or dim % heads:
            raise ValueError(f"dim = {dim!r} must be a multiple of heads = {heads!r}")
        check_number("dt", dt, 0.0)
        dim, heads, steps = as_int(dim), as_int(heads), as_int(steps)
        if not isinstance(steps, int) or steps < 0:
            raise ValueError(
                f"steps = {steps} must be a whole number of at least 0; 0 is standard attention"
            )
        if not is_number(dropout) or not 0 <= dropout < 1:
            raise ValueError(f"dropout = {dropout!r} is not a probability below 1")
        _check_options(attention, options, dropout)
        self.dim, self.heads, self.causal, self.dropout = dim, heads, causal, dropout
        self.steps, self.dt = (steps, dt) if pde is not None else (0, dt)
        self.attention = attention
        self.options = {n: o for n, o in options.items() if not isinstance(o, nn.Module)}
        self.parts = nn.ModuleDict({n: o for n, o in options.items() if isinstance(o, nn.Module)})
        self.pde = None
        if self.steps:
            self.pde = _equation(pde, learn, heads if per_head else None, dt, options.get("axis", "key"))
        self.project = nn.Linear(dim, 3 * dim, bias=bias)
        self.out = nn.Linear(dim, dim, bias=bias)

    def forward(
        self,
        x: Tensor,
        key_padding: Tensor | None = None,
        documents: Tensor | None = None,
        cache: PDECache | None = None,
    ) -> Tensor:
        """What the tokens ``[batch, tokens, dim]`` see of each other, of the same shape.

        Args:
            x: the tokens; with a cache, those that are new.
            key_padding: ``[batch, tokens]`` bool, True = a real token.
            documents: ``[batch, tokens]`` integer ids of packed texts that do not see each other.
            cache: of the tokens before, made by `new_cache`; x is added to it.
        """
        if is_symbolic(x):
            return as_node(self, x, key_padding, documents, cache)
        width, weight = self.dim, getattr(self.project, "weight", None)
        check_input("x", x, f"[batch, tokens, {width}]", "this attention", weight)
        if x.ndim != 3 or x.shape[2] != width:
            raise ValueError(f"x {list(x.shape)} must be [batch, tokens, {width}]")
        if cache is not None:
            self._check_cache(cache, documents)
        batch, tokens, dim = x.shape
        heads = self.project(x).view(batch, tokens, 3, self.heads, dim // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each [batch, heads, tokens, dim / heads]
        if cache is None:
            seen = self._attend(query, key, value, key_padding, documents)
            return self.out(seen.transpose(1, 2).reshape(batch, tokens, dim))
        with unchanged_on_error(cache):
            seen = cache.attend(query, key, value, key_padding)
            return self.out(seen.transpose(1, 2).reshape(batch, tokens, dim))

    def equation(self) -> PDE | None:
        """The PDE with its coefficients as they are now; None for standard attention."""
        return self.pde() if isinstance(self.pde, nn.Module) else self.pde

    @property
    def can_cache(self) -> bool:
        """Whether tokens can be taken in one by one: causal, by `pde_attention`, without a window, with
        ``axis="key"`` and ``walls="mask"``."""
        plain = self.attention is None and self.options.keys() <= {"axis", "walls", "method"}
        walled = self.options.get("axis", "key") == "key" and self.options.get("walls", "mask") == "mask"
        return plain and walled and self.causal

    def new_cache(self, capacity: int = 64) -> PDECache:
        """An empty cache for decoding, with the PDE's coefficients as they are now."""
        self._check_can_cache()
        return PDECache(self.equation() or Diffusion(), self.steps, self.dt, capacity=capacity)

    def _check_can_cache(self) -> None:
        if not self.can_cache:
            raise ValueError(
                "only causal attention by pde_attention, with axis='key' and walls='mask' and without "
                f"further options, has a cache; this is {self}"
            )

    def _check_cache(self, cache: PDECache, documents: Tensor | None) -> None:
        """Raise unless the cache gives what this attention gives without one."""
        self._check_can_cache()
        if documents is not None:
            raise ValueError(
                "documents and a cache were both given, but a cache holds one text a row; leave out the "
                "cache, or give every text a row of its own"
            )
        if self.training and self.dropout:
            raise ValueError(
                f"dropout = {self.dropout} acts in training mode, and a cache is for inference; use "
                "evaluation mode, or leave out the cache"
            )
        own, other = (
            f"{pde.__name__}, steps={steps}, dt={dt:g}" if steps else "no steps"
            for pde, steps, dt in (
                (type(self.equation()), self.steps, self.dt),
                (type(cache.pde), cache.steps, cache.dt),
            )
        )
        if own != other:
            raise ValueError(
                f"the cache is for {other}, and this attention has {own}; use one of its new_cache"
            )

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding: Tensor | None,
        documents: Tensor | None,
    ) -> Tensor:
        options = {**self.options, **self.parts, "is_causal": self.causal}
        if self.training and self.dropout:
            options["dropout_p"] = self.dropout
        if documents is not None:
            options["documents"] = documents
        if key_padding is not None:
            options["key_padding"] = key_padding
        motion: dict[str, Any] = {"pde": self.equation(), "steps": self.steps, "dt": self.dt}
        if self.attention is not None:
            return self.attention(query, key, value, **motion, **options)
        if self.steps:
            return pde_attention(query, key, value, **motion, **options)
        for name in ("axis", "walls"):  # they mean nothing to a map that does not move
            options.pop(name, None)
        if options.keys() <= {"is_causal", "dropout_p"}:
            return scaled_dot_product_attention(query, key, value, **options)
        return pde_attention(query, key, value, pde=Diffusion(), steps=0, **options)

    def extra_repr(self) -> str:
        """How many heads and steps, and which PDE if it is not learnt."""
        pde = "" if isinstance(self.pde, nn.Module) else f", pde={self.pde}"
        return f"heads={self.heads}, steps={self.steps}, causal={self.causal}{pde}"


# Arguments that PDEAttention hands to its attention by itself, and its own names of them.
_OWN = {
    "is_causal": "causal", "dropout_p": "dropout", "pde": "pde", "steps": "steps", "dt": "dt",
    "key_padding": "key_padding of forward", "documents": "documents of forward",
}  # fmt: skip


def _check_options(attention: Any, options: dict[str, Any], dropout: float) -> None:
    """Raise unless `attention`, or `pde_attention` if it is None, takes these options."""
    called: Any = pde_attention if attention is None else attention
    name = getattr(called, "__name__", type(called).__name__)
    try:
        signature = inspect.signature(called.forward if isinstance(called, nn.Module) else called)
    except (TypeError, ValueError):  # a function of C does not say
        return
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = {n for n, p in signature.parameters.items() if p.kind in named}
    for option in options:
        if option in _OWN:
            raise TypeError(f"{option} is set by PDEAttention itself; use its argument {_OWN[option]}")
        if option not in known and inspect.Parameter.VAR_KEYWORD not in kinds:
            own = inspect.signature(PDEAttention).parameters
            raise TypeError(
                f"PDEAttention has no argument {option!r}, and {name} takes no such option"
                f"{nearest(option, [*own, *known])}"
            )
    if attention is None:
        for option, choices in (("axis", AXES), ("walls", WALLS), ("method", METHODS)):
            check_choice(option, options.get(option, choices[0]), choices)
    if dropout and not known & {"dropout_p"} and inspect.Parameter.VAR_KEYWORD not in kinds:
        raise ValueError(
            f"dropout = {dropout} drops entries of the map, which {name} cannot: it takes no dropout_p; "
            "use dropout=0 here, and dropout on what the layers add"
        )


def _equation(
    pde: str | PDE | nn.Module | None, learn: bool, heads: int | None, dt: float, axis: str
) -> Any:
    if isinstance(pde, LearnedPDE) and (pde.dt < dt or dimensions(pde.axis) < dimensions(axis)):
        raise ValueError(
            f"pde keeps its coefficients stable for dt = {pde.dt:g} on axis {pde.axis!r}, and this "
            f"attention steps by dt = {dt:g} on axis {axis!r}; make the LearnedPDE with these"
        )
    if isinstance(pde, nn.Module):
        return pde
    if learn:
        return LearnedPDE(pde, heads, dt, axis)  # type: ignore[arg-type]
    equation: Any = get_pde(pde)() if isinstance(pde, str) else pde
    if isinstance(equation, type) or not hasattr(equation, "step"):
        raise ValueError(f"pde {pde!r} is not an equation; give one such as pdes.Diffusion(alpha=0.1)")
    equation.check(dt, axis)
    return equation


class Residual(nn.Module):
    """``x + branch(norm(x))`` (norm="pre"), or ``norm(x + branch(x))`` (norm="post")."""

    def __init__(self, dim: int, branch: nn.Module, norm: str, dropout: float) -> None:
        super().__init__()
        if norm not in ("pre", "post"):
            raise ValueError(f"norm {norm!r} is not one of pre, post")
        check_number("dropout", dropout, 0.0, 1.0)
        self.pre, self.branch, self.dim = norm == "pre", branch, dim
        self.norm, self.dropout = nn.LayerNorm(dim), nn.Dropout(dropout)

    def forward(self, x: Tensor, **masks: Any) -> Tensor:
        """The state after this branch, ``[batch, tokens, dim]``; masks go to the branch."""
        if not is_symbolic(x):
            check_input("x", x, "[batch, tokens, dim]", "this layer", getattr(self.norm, "weight", None))
            if x.ndim != 3 or x.shape[-1] != self.dim:
                raise ValueError(f"x {list(x.shape)} must be [batch, tokens, {self.dim}]")
        if self.pre:
            return x + self.dropout(self.branch(self.norm(x), **masks))
        return self.norm(x + self.dropout(self.branch(x, **masks)))


class Layer(nn.Module):
    """Attention, then a network of two layers on every token."""

    def __init__(self, attention: Residual, network: Residual) -> None:
        super().__init__()
        self.attention, self.network = attention, network

    def forward(self, x: Tensor, **masks: Any) -> Tensor:
        """The state after this layer, ``[batch, tokens, dim]``."""
        return self.network(self.attention(x, **masks))


class Stack(nn.Module):
    """The layers of a transformer.

    Args:
        dim, heads: as in `PDEAttention`.
        layers: how many.
        hidden: width of the networks.
        dropout: on what each branch adds.
        map_dropout: on the maps.
        norm: "pre" normalises what enters a branch, "post" what leaves it.
        place: where maps move: in "each" layer; or only in one more attention "after" standard layers
            (that attention is there without a PDE as well, so that the PDE is all that differs).
        **attention: all other arguments of `PDEAttention`. Every layer has its own copy of a module
            among them; a PDE given as a module is shared.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        layers: int,
        hidden: int,
        *,
        dropout: float = 0.1,
        map_dropout: float = 0.0,
        norm: str = "pre",
        place: str = "each",
        **attention: Any,
    ) -> None:
        super().__init__()
        if place not in ("each", "after"):
            raise ValueError(f"place {place!r} is not one of each, after")
        check_whole("layers", layers, 0)
        check_whole("hidden", hidden, 1)

        def attend(**changes: Any) -> Residual:
            own = {n: o if n == "pde" else _own(o) for n, o in {**attention, **changes}.items()}
            return Residual(dim, PDEAttention(dim, heads, dropout=map_dropout, **own), norm, dropout)

        def think() -> Residual:
            network = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
            return Residual(dim, network, norm, dropout)

        if not layers and place == "each":
            attend()  # for its checks
        inside = {} if place == "each" else {"pde": None}
        self.layers = nn.ModuleList(Layer(attend(**inside), think()) for _ in range(layers))
        self.after = attend() if place == "after" else None
        self.norm = nn.LayerNorm(dim) if norm == "pre" else nn.Identity()

    def attentions(self) -> list[PDEAttention]:
        """The attention of every layer, from the first to the last."""
        return [module for module in self.modules() if isinstance(module, PDEAttention)]

    def forward(
        self,
        x: Tensor,
        caches: Sequence[PDECache | None] | None = None,
        key_padding: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """States ``[batch, tokens, dim]`` after the last layer, normalised.

        Args:
            x: the states ``[batch, tokens, dim]`` that enter.
            caches: one for each of `attentions`, in that order, or None. Where anything raises they stay
                as they are.
            key_padding, documents: as in `PDEAttention`.
        """
        if not is_symbolic(x):
            check_tensor("x", x, "[batch, tokens, dim]")
        count = len(self.layers) + (self.after is not None)
        masks = {"key_padding": key_padding, "documents": documents}
        if not caches:
            return self._through(x, [None] * count, masks)
        if len(caches) != count:
            raise ValueError(f"caches are {len(caches)}; give one for each of {count} attentions")
        with unchanged_on_error(*caches):
            return self._through(x, caches, masks)

    def _through(self, x: Tensor, caches: Sequence[PDECache | None], masks: dict[str, Any]) -> Tensor:
        for layer, cache in zip(self.layers, caches):
            x = layer(x, cache=cache, **masks)
        if self.after is not None:
            x = self.after(x, cache=caches[-1], **masks)
        return self.norm(x)


def _own(option: Any) -> Any:
    return copy.deepcopy(option) if isinstance(option, nn.Module) else option


class Embedding(nn.Module):
    """Tokens and their positions as vectors, both learnt."""

    def __init__(self, vocabulary: int, dim: int, max_tokens: int, dropout: float) -> None:
        super().__init__()
        check_whole("vocabulary", vocabulary, 1)
        check_whole("dim", dim, 1)
        check_whole("max_tokens", max_tokens, 1)
        check_number("dropout", dropout, 0.0, 1.0)
        self.tokens, self.positions = nn.Embedding(vocabulary, dim), nn.Embedding(max_tokens, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        ids: Tensor,
        key_padding: Tensor | None = None,
        start: int = 0,
        real: Tensor | None = None,
    ) -> Tensor:
        """Vectors ``[batch, tokens, dim]`` of ids ``[batch, tokens]``.

        Positions are counted from `start`, real tokens only, so that padding on the left is like
        padding on the right.

        Args:
            ids: of the tokens.
            key_padding: ``[batch, tokens]`` bool, True = a real token.
            start: how many tokens there were before.
            real: how many of these were real in each text, ``[batch, 1]``; None if all were.
        """
        if is_symbolic(ids):
            return as_node(self, ids, key_padding, start, real)
        most = self.positions.num_embeddings
        check_tensor("ids", ids, "of integers [batch, tokens]", floating=False)
        check_home("ids", ids, "this model", self.tokens.weight)
        if ids.ndim != 2 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise ValueError(f"ids {list(ids.shape)} of {ids.dtype} must be integers [batch, tokens]")
        if start + ids.shape[1] > most:
            raise ValueError(
                f"{start + ids.shape[1]} tokens are more than the {most} this model has positions for; "
                "make it with a larger max_tokens, or give fewer"
            )
        check_padding(key_padding, ids)
        ids = ids if ids.dtype in (torch.int64, torch.int32) else ids.long()
        before = start if real is None else real
        if key_padding is None:
            positions = before + torch.arange(ids.shape[1], device=ids.device)
        else:
            positions = (before + key_padding.cumsum(1) - 1).clamp(min=0)
        try:
            tokens = self.tokens(ids)
        except IndexError:  # on a CPU; elsewhere a look would make everybody wait
            raise ValueError(
                f"ids go from {int(ids.min())} to {int(ids.max())}; this model has tokens 0 to "
                f"{self.tokens.num_embeddings - 1}"
            ) from None
        return self.dropout(tokens + self.positions(positions))


def check_padding(key_padding: Any, ids: Tensor) -> None:
    """Raise unless it is None, or a bool for each id."""
    if key_padding is None:
        return
    check_tensor("key_padding", key_padding, "of bools [batch, tokens]", floating=False)
    check_beside("key_padding", key_padding, "ids", ids)
    if key_padding.dtype != torch.bool or key_padding.shape != ids.shape:
        raise ValueError(
            f"key_padding {list(key_padding.shape)} of {key_padding.dtype} must be bool "
            f"{list(ids.shape)}, True = a real token"
        )


class Classifier(nn.Module):
    """An encoder that tells texts apart.

    Args:
        vocabulary: how many token ids there are.
        classes: how many answers.
        dim, heads, layers, hidden: of the transformer; the defaults are those of the paper's Table 7.
        max_tokens: the longest text.
        dropout: on embeddings, branches and the pooled state.
        pooling: "mean" of the real tokens' states, or "first", the state of the first real token (where
            texts begin with one made for that, as BERT's ``[CLS]``).
        padding: the id that fills up texts; key_padding then need not be given.
        **options: of `Stack` and of `PDEAttention`: ``pde``, ``steps``, ``learn``, ``norm``, ...

    >>> model = Classifier(vocabulary=100, classes=4, layers=2, pde="diffusion", padding=0)
    >>> model(torch.tensor([[5, 17, 32], [8, 9, 0]])).shape
    torch.Size([2, 4])
    """

    def __init__(
        self,
        vocabulary: int,
        classes: int,
        *,
        dim: int = 128,
        heads: int = 4,
        layers: int = 4,
        hidden: int = 256,
        max_tokens: int = 512,
        dropout: float = 0.1,
        pooling: str = "mean",
        padding: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if pooling not in ("mean", "first"):
            raise ValueError(f"pooling {pooling!r} is not one of mean, first")
        check_whole("classes", classes, 1)
        self.pooling, self.padding = pooling, padding
        self.embed = Embedding(vocabulary, dim, max_tokens, dropout)
        self.stack = Stack(dim, heads, layers, hidden, dropout=dropout, **options)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(dim, classes)
        initialise(self)

    def forward(self, ids: Tensor, key_padding: Tensor | None = None) -> Tensor:
        """Logits ``[batch, classes]`` of texts ``[batch, tokens]``; key_padding True = a real token."""
        if not is_symbolic(ids):
            check_tensor("ids", ids, "of integers [batch, tokens]", floating=False)
            if ids.ndim == 2 and not ids.shape[1]:
                raise ValueError(
                    f"ids {list(ids.shape)} hold no token; a text to be told apart has at least one"
                )
        if key_padding is None and self.padding is not None:
            key_padding = ids != self.padding
        x = self.stack(self.embed(ids, key_padding), key_padding=key_padding)
        return self.head(self.dropout(self._pool(x, key_padding)))

    def _pool(self, x: Tensor, real: Tensor | None) -> Tensor:
        if real is None:
            return x[:, 0] if self.pooling == "first" else x.mean(1)
        if self.pooling == "first":
            first = real.int().argmax(1)[:, None, None]
            return x.gather(1, first.expand(-1, 1, x.shape[-1]))[:, 0]
        total = x.masked_fill(~real[:, :, None], 0.0).sum(1)
        return total / real.sum(1, keepdim=True).clamp(min=1)


class LanguageModel(nn.Module):
    """A causal transformer that predicts the next token; embeddings in and out are the same.

    Args:
        vocabulary: how many token ids there are.
        dim, heads, layers, hidden: of the transformer; the defaults are those of the paper's Table 8.
        max_tokens: the longest text.
        dropout: on embeddings and branches.
        **options: of `Stack` and of `PDEAttention`: ``pde``, ``steps``, ``learn``, ``norm``, ...
    """

    def __init__(
        self,
        vocabulary: int,
        *,
        dim: int = 256,
        heads: int = 8,
        layers: int = 4,
        hidden: int = 512,
        max_tokens: int = 1024,
        dropout: float = 0.1,
        **options: Any,
    ) -> None:
        super().__init__()
        self.embed = Embedding(vocabulary, dim, max_tokens, dropout)
        self.stack = Stack(dim, heads, layers, hidden, dropout=dropout, causal=True, **options)
        initialise(self)

    def forward(
        self, ids: Tensor, key_padding: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """Logits ``[batch, tokens, vocabulary]`` of the token after each of ids ``[batch, tokens]``."""
        return self.logits(self.states(ids, key_padding, documents))

    def states(
        self,
        ids: Tensor,
        key_padding: Tensor | None = None,
        documents: Tensor | None = None,
        caches: Sequence[PDECache] | None = None,
    ) -> Tensor:
        """States ``[batch, tokens, dim]`` from which `logits` predicts.

        With caches, one for each attention of the stack, ids are the tokens after those they hold.
        """
        start, real = (len(caches[0]), caches[0].real_tokens) if caches else (0, None)
        if caches and any(len(cache) != start for cache in caches):
            raise ValueError(
                f"caches hold {[len(cache) for cache in caches]} tokens; all must hold the same text"
            )
        x = self.embed(ids, key_padding, start, real)
        return self.stack(x, caches, key_padding=key_padding, documents=documents)

    def logits(self, states: Tensor) -> Tensor:
        """``[..., vocabulary]`` of states ``[..., dim]``."""
        weight = self.embed.tokens.weight
        if not is_symbolic(states):
            check_input("states", states, f"[..., {weight.shape[1]}]", "this model", weight)
            check_beside("states", states, "the embedding", weight)  # no hook brings an offloaded one
            if states.ndim == 0 or states.shape[-1] != weight.shape[1]:
                raise ValueError(f"states {list(states.shape)} must be [..., {weight.shape[1]}]")
        return linear(states, weight)

    @torch.no_grad()
    def generate(
        self,
        ids: Tensor,
        tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
        cache: bool = True,
    ) -> Tensor:
        """Texts ``[batch, before]`` with that many more tokens, ``[batch, before + tokens]``.

        In eval mode, whatever the mode was. A text longer than max_tokens is continued from its last
        max_tokens, without a cache.

        Args:
            ids: how the texts begin, at least one token each.
            tokens: how many to add.
            temperature: 0 takes the most likely token always.
            top_k: sample from that many most likely tokens only.
            generator: where randomness comes from.
            cache: keep keys and values, where every attention can: other costs, the same texts.
        """
        check_tensor("ids", ids, "of integers [batch, tokens]", floating=False)
        check_whole("tokens", tokens, 0)
        check_number("temperature", temperature)
        if top_k is not None:
            check_whole("top_k", top_k, 1)
        if ids.ndim != 2 or not ids.shape[1]:
            raise ValueError(f"ids {list(ids.shape)} must be [batch, tokens], with at least one token")
        if temperature < 0:
            raise ValueError(f"temperature = {temperature} must be at least 0")
        modes = [(module, module.training) for module in self.modules()]
        self.eval()
        try:
            attentions, most = self.stack.attentions(), self.embed.positions.num_embeddings
            caches = None
            if cache and all(attention.can_cache for attention in attentions):
                caches = [
                    attention.new_cache(min(ids.shape[1] + tokens, most)) for attention in attentions
                ]
            for _ in range(tokens):
                if ids.shape[1] > most:
                    caches = None  # positions move on, and with them every key
                new = ids[:, len(caches[0]) :] if caches else ids[:, -most:]
                logits = self.logits(self.states(new, caches=caches)[:, -1])
                ids = torch.cat((ids, choose(logits, temperature, top_k, generator)), 1)
        finally:
            for module, mode in modes:
                module.training = mode
        return ids


def choose(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    """A token ``[batch, 1]`` for each row of logits ``[batch, vocabulary]``."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits = logits.float() / temperature
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)


def initialise(model: nn.Module) -> None:
    """GPT-2's start: normal weights of 0.02, smaller where branches join the residual stream."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    branches = [module.branch for module in model.modules() if isinstance(module, Residual)]
    for branch in branches:
        last: Any = branch.out if isinstance(branch, PDEAttention) else branch[-1]  # type: ignore[index]
        nn.init.normal_(last.weight, std=0.02 / len(branches) ** 0.5)
