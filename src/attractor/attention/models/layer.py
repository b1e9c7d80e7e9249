"""A layer of multi-head self-attention under a PDE, and the checks of its options."""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from attractor.attention.cache import PDECache, unchanged_on_error
from attractor.attention.pde_attention import pde_attention
from attractor.attention.pdes import AXES, PDE, Diffusion, LearnedPDE
from attractor.attention.pdes.pde import as_equation, dimensions
from attractor.attention.tracing import as_node, is_symbolic
from attractor.attention.validation import METHODS, WALLS
from attractor.common.checks import (
    as_int,
    check_choice,
    check_input,
    check_number,
    is_number,
    is_whole,
    nearest,
)


class PDEAttention(nn.Module):
    """Multi-head self-attention whose attention maps take `steps` steps under a PDE.

    Args:
        dim: Number of features per token.
        heads: Number of heads, a divisor of `dim`.
        pde: An equation of `attractor.pdes`, or the name of one. None and ``steps=0`` are both standard
            attention. A module that returns an equation when it is called is also accepted, such as a
            `LearnedPDE` shared by several layers.
        steps: Number of steps that a map takes.
        causal: Whether a token attends only to itself and to earlier tokens.
        learn: Whether the coefficients of the PDE are parameters, initialised to the numbers in `pde`;
            see `LearnedPDE`.
        per_head: Whether to learn one coefficient per head instead of one for all heads.
        dt: Size of a step in pseudo-time.
        dropout: Probability that an entry of a map is dropped in training mode.
        bias: Whether the projections have a bias.
        attention: A function or module to call instead of `pde_attention`, with the signature ``(query,
            key, value, *, is_causal, key_padding, pde, steps, dt, **options)``. All three tensors are
            ``[batch, heads, tokens, dim / heads]``, and the result has the shape of `query`. Without a
            PDE it receives ``pde=None`` and ``steps=0``. It receives `key_padding`, `documents` and
            `dropout_p` only if they are in use.
        **options: Options for `attention`: ``axis``, ``walls``, ``window`` and ``method`` of
            `pde_attention`, or those of the function that replaces it. Options that are modules become
            submodules of this layer.

    Raises:
        TypeError: An option is not an argument of `attention`, or is an argument of this class under
            another name (``is_causal``, ``dropout_p``).
        ValueError: A number is out of range, or `dropout` is not 0 although `attention` does not take
            `dropout_p`.
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
        integers = is_whole(dim) and is_whole(heads)
        if not integers or heads < 1 or dim < 1 or dim % heads:
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
            axis = options.get("axis", "key")
            self.pde = _make_equation(pde, learn, heads if per_head else None, dt, axis)
        self.project = nn.Linear(dim, 3 * dim, bias=bias)
        self.out = nn.Linear(dim, dim, bias=bias)

    def forward(
        self,
        x: Tensor,
        key_padding: Tensor | None = None,
        documents: Tensor | None = None,
        cache: PDECache | None = None,
    ) -> Tensor:
        """Return the output of the attention, ``[batch, tokens, dim]``.

        Args:
            x: The tokens ``[batch, tokens, dim]``. With a cache, only the new tokens.
            key_padding: Bool ``[batch, tokens]``, True for valid tokens and False for padding.
            documents: Integer ids ``[batch, tokens]`` of packed texts. A token attends only to
                tokens of its own text.
            cache: The cache of the previous tokens, made by `new_cache`; the tokens in `x` are appended.
        """
        if is_symbolic(x):
            return as_node(self, x, key_padding, documents, cache)
        weight = getattr(self.project, "weight", None)
        check_input("x", x, f"[batch, tokens, {self.dim}]", "this attention", weight)
        if x.ndim != 3 or x.shape[2] != self.dim:
            raise ValueError(f"x {list(x.shape)} must be [batch, tokens, {self.dim}]")
        if cache is not None:
            self._check_cache(cache, documents)
        batch, tokens, dim = x.shape
        heads = self.project(x).view(batch, tokens, 3, self.heads, dim // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each [batch, heads, tokens, dim / heads]
        with nullcontext() if cache is None else unchanged_on_error(cache):
            if cache is None:
                output = self._attend(query, key, value, key_padding, documents)
            else:
                output = cache.attend(query, key, value, key_padding)
            return self.out(output.transpose(1, 2).reshape(batch, tokens, dim))

    def equation(self) -> PDE | None:
        """Return the PDE with its current coefficients, or None for standard attention."""
        return self.pde() if isinstance(self.pde, nn.Module) else self.pde

    @property
    def can_cache(self) -> bool:
        """Whether the layer supports a cache.

        It does if it is causal and calls `pde_attention` without a window, with ``axis="key"`` and
        ``walls="mask"``.
        """
        default = self.attention is None and self.options.keys() <= {"axis", "walls", "method"}
        walled = self.options.get("axis", "key") == "key" and self.options.get("walls", "mask") == "mask"
        return default and walled and self.causal

    def new_cache(self, capacity: int = 64) -> PDECache:
        """Return an empty cache for decoding, with the current coefficients of the PDE."""
        self._check_can_cache()
        return PDECache(self.equation() or Diffusion(), self.steps, self.dt, capacity=capacity)

    def _check_can_cache(self) -> None:
        if not self.can_cache:
            raise ValueError(
                "only causal attention by pde_attention with axis='key' and walls='mask', and without "
                f"other options, supports a cache; this layer is {self}"
            )

    def _check_cache(self, cache: PDECache, documents: Tensor | None) -> None:
        """Raise unless decoding with the cache gives the output of this layer without a cache."""
        self._check_can_cache()
        if documents is not None:
            raise ValueError(
                "documents and a cache were both given, but a cache holds one text per row; omit the "
                "cache, or put each text in a row of its own"
            )
        if self.training and self.dropout:
            raise ValueError(
                f"dropout = {self.dropout} is active in training mode, but a cache is for inference; "
                "use evaluation mode, or omit the cache"
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
                f"the cache was made for {other}, but this attention has {own}; make the cache with "
                "new_cache of this layer"
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
        evolution: dict[str, Any] = {"pde": self.equation(), "steps": self.steps, "dt": self.dt}
        if self.attention is not None:
            return self.attention(query, key, value, **evolution, **options)
        if self.steps:
            return pde_attention(query, key, value, **evolution, **options)
        for name in ("axis", "walls"):  # Without steps they have no effect.
            options.pop(name, None)
        if options.keys() <= {"is_causal", "dropout_p"}:
            return scaled_dot_product_attention(query, key, value, **options)
        return pde_attention(query, key, value, pde=Diffusion(), steps=0, **options)

    def extra_repr(self) -> str:
        """Return the number of heads and steps, and the PDE unless it is a submodule."""
        pde = "" if isinstance(self.pde, nn.Module) else f", pde={self.pde}"
        return f"heads={self.heads}, steps={self.steps}, causal={self.causal}{pde}"


# Arguments that PDEAttention passes to `attention`, and the arguments of PDEAttention that set them.
_RESERVED = {
    "is_causal": "causal", "dropout_p": "dropout", "pde": "pde", "steps": "steps", "dt": "dt",
    "key_padding": "key_padding of forward", "documents": "documents of forward",
}  # fmt: skip


def _check_options(attention: Any, options: dict[str, Any], dropout: float) -> None:
    """Raise unless `attention`, or `pde_attention` if it is None, takes these options."""
    function: Any = pde_attention if attention is None else attention
    name = getattr(function, "__name__", type(function).__name__)
    try:
        signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):  # A function implemented in C may not have a signature.
        return
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds
    keyword_kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    keywords = {n for n, p in signature.parameters.items() if p.kind in keyword_kinds}
    for option in options:
        if option in _RESERVED:
            raise TypeError(
                f"{option} is set by PDEAttention itself; use its argument {_RESERVED[option]}"
            )
        if option not in keywords and not takes_any:
            arguments = inspect.signature(PDEAttention).parameters
            raise TypeError(
                f"PDEAttention has no argument {option!r}, and {name} takes no such option"
                f"{nearest(option, [*arguments, *keywords])}"
            )
    if attention is None:
        for option, choices in (("axis", AXES), ("walls", WALLS), ("method", METHODS)):
            check_choice(option, options.get(option, choices[0]), choices)
    if dropout and "dropout_p" not in keywords and not takes_any:
        raise ValueError(
            f"dropout = {dropout} drops entries of the map, but {name} takes no dropout_p; use "
            "dropout=0 for this attention, and the dropout of Stack for its residual branches"
        )


def _make_equation(
    pde: str | PDE | nn.Module | None, learn: bool, heads: int | None, dt: float, axis: str
) -> Any:
    """Return an equation, or a module that returns one, which is stable for steps of `dt` on `axis`."""
    if isinstance(pde, LearnedPDE) and (pde.dt < dt or dimensions(pde.axis) < dimensions(axis)):
        raise ValueError(
            f"pde keeps its coefficients stable for dt = {pde.dt:g} on axis {pde.axis!r}, but this "
            f"attention has dt = {dt:g} on axis {axis!r}; make the LearnedPDE with these values"
        )
    if isinstance(pde, nn.Module):
        return pde
    if learn:
        return LearnedPDE(pde, heads, dt, axis)  # type: ignore[arg-type]
    equation = as_equation(pde)
    equation.check(dt, axis)
    return equation
