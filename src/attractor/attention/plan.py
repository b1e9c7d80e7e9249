"""Which engine computes a call, and why: the one place where that is decided.

The first engine of this list that can compute the call does, unless `method` names one:

    fused      causal or unmasked attention on a GPU, by Triton kernels
    dense      maps with no more rows than values have dimensions
    stepped    linear PDEs; tiled if walls anywhere, or dropout near moving ones, need single weights
    dense      small maps
    tiled      everything else on the key axis
    dense      everything
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attractor.attention import kernels
from attractor.attention.call import Call, four_dimensions
from attractor.attention.engines.backends import CPU_CAUSAL
from attractor.attention.engines.bands import BLOCK
from attractor.attention.engines.boundary import bands_of
from attractor.attention.engines.selection import choose, choose_square_causal
from attractor.attention.engines.strips import Operator
from attractor.attention.lengths import has_symbolic_length, statically_true
from attractor.attention.masks import Scope
from attractor.common.versions import exporting

SMALL = 1 << 20  # entries of a map, over all heads, up to which tiles cost more than they save
METHODS = ("fused", "stepped", "tiled", "dense")


@dataclass(frozen=True)
class Plan:
    """How a call is computed, and why.

    Attributes:
        method: The engine: "fused", "stepped", "tiled" or "dense".
        reason: Why this engine was chosen.
        backend: What computes the softmax: an operator of torch, Triton kernels, or plain torch.
        boundary: How keys within reach of walls that move with the row are computed.
        rejected: Why other engines cannot compute the call, by name, as far as that was looked at.
        scope: Which keys a query may attend to, if the choice depended on it.
        documents: Packed documents as the kernels take them, or None.
        operator: The operator of torch that computes the softmax, if it was chosen.
        single: Whether the causal mask is the only one, so that `boundary.causal` computes all of it.
        one_query: Whether `kernels.attend_row` computes it.
    """

    method: str
    reason: str
    backend: str = ""
    boundary: str = "none: no wall moves with the row"
    rejected: Mapping[str, str] = field(default_factory=dict)
    scope: Scope | None = field(default=None, compare=False, repr=False)
    documents: Any = field(default=None, compare=False, repr=False)
    operator: Operator | None = field(default=None, compare=False, repr=False)
    single: bool = field(default=False, compare=False, repr=False)
    one_query: bool = field(default=False, compare=False, repr=False)

    def __str__(self) -> str:
        lines = [f"{self.method}: {self.reason}", f"  softmax   {self.backend}"]
        lines.append(f"  boundary  {self.boundary}")
        lines += [f"  not {name}: {reason}" for name, reason in self.rejected.items()]
        return "\n".join(lines)


Choice = Plan  # the former name


def plan(call: Call) -> Plan:
    """Return how a call is computed.

    Raises:
        ValueError: `method` names an engine that cannot compute the call.
    """
    method = call.method
    only_dense = only_plain_torch() or _why_dense_in_onnx(call)
    if only_dense and method == "auto":
        return _dense(only_dense, {})
    if only_dense and method != "dense":
        raise ValueError(f"method {method!r} cannot do this: {only_dense}; use 'dense'")
    if call.query.shape[-2] == 1 and method in ("auto", "fused") and not _why_not_row(call):
        reason, boundary = (
            "there is a kernel for one query",
            "the row takes the steps, within the kernel",
        )
        return Plan("fused", reason, "Triton kernels", boundary, one_query=True)
    not_fused, documents = _why_not_fused(call), None
    if call.documents is not None and not not_fused and method in ("auto", "fused"):
        documents, not_fused = kernels.pack_documents(
            *four_dimensions(call.query, call.key, call.value, share_heads=True), call.documents,
            call.evolution,
        )  # fmt: skip
    if documents is not None and call.dropout_p and not documents.operator.takes_dropout:
        not_fused = "no operator drops weights within these documents"
    if not not_fused and method in ("auto", "fused"):
        return _fused(call, documents)
    reasons = {"fused": not_fused, "stepped": _why_not_stepped(call), "tiled": _why_not_tiled(call)}
    rejected = {name: reason for name, reason in reasons.items() if reason}
    return _quickest(call, rejected) if method == "auto" else _named(call, rejected)


def _named(call: Call, rejected: dict[str, str]) -> Plan:
    """Return the plan with the engine that was asked for, or raise."""
    method, scope = call.method, None
    if "stepped" not in rejected and (method == "stepped" or method in rejected):
        weights, scope = _why_weights(call)
        if weights:
            rejected["stepped"] = weights
    if method in rejected:
        able = " or ".join(repr(name) for name in METHODS if name not in rejected)
        raise ValueError(f"method {method!r} cannot do this: {rejected[method]}; use {able}")
    if method == "stepped":
        return _stepped(call, "asked for", rejected, scope)
    return _tiled("asked for", rejected) if method == "tiled" else _dense("asked for", rejected)


def _quickest(call: Call, rejected: dict[str, str]) -> Plan:
    """Return the plan with the quickest engine that can, kernels excluded."""
    queries, keys, dim = call.query.shape[-2], call.key.shape[-2], call.value.shape[-1]
    name = type(call.pde).__name__
    exported = exporting()
    if exported and (call.is_causal or call.window is not None) and has_symbolic_length(queries, keys):
        alone = call.is_causal and not call.has_masks and call.documents is None
        if not alone or not statically_true(queries == keys):
            reason = "a program exported for all lengths has no moving walls beside other masks"
            return _dense(reason, rejected)
    few = statically_true(queries <= dim) if exported else queries <= dim
    if few and (call.steps or "stepped" in rejected):
        reason = f"{queries} rows of a map are less than values of {dim} dimensions"
        return _dense(reason, rejected)
    if "stepped" not in rejected:
        weights, scope = _why_weights(call)
        if weights:
            return _tiled(f"{name} is linear, but {weights}", rejected, scope)
        return _stepped(call, f"{name} is linear", rejected, scope)
    large = math.prod(call.query.shape[:-1]) * keys > SMALL
    if not (statically_true(large) if exported else large):
        return _dense(f"{rejected['stepped']}, and the map is small", rejected)
    if "tiled" not in rejected:
        reason = f"{rejected['stepped']}, and a map of {queries} rows is built in tiles"
        return _tiled(reason, rejected)
    return _dense(rejected["tiled"], rejected)


def _fused(call: Call, documents: Any) -> Plan:
    name = type(call.pde).__name__
    problem = name if call.documents is None else f"{name} within documents"
    reason = "asked for" if call.method == "fused" else f"there are kernels for {problem}"
    backend, boundary, operator = "Triton kernels", "none: no wall moves with the row", None
    if call.evolution.linear:
        far = call.query.shape[-2] - call.evolution.reach
        backend = "scaled_dot_product_attention"
        if call.is_causal and torch.compiler.is_compiling():
            backend = "chosen when the program runs"
        elif documents is not None:
            backend = documents.operator.name
        elif call.is_causal and far > 0:
            operator = choose_square_causal(_query(call), call.value, far)
            backend = operator.name
    if call.is_causal:
        boundary = "the last keys of a row take the steps, by Triton kernels"
    return Plan("fused", reason, backend, boundary, {}, None, documents, operator)


def _query(call: Call) -> Tensor:
    """Return the query as ``[batch, heads, tokens, dim]``, whose shape decides on an operator."""
    return four_dimensions(call.query, call.query, call.query)[0]


def _stepped(call: Call, reason: str, rejected: Mapping[str, str], scope: Scope | None) -> Plan:
    if call.axis != "key" or call.walls != "mask":
        ignored = call.walls != "mask"
        boundary = "none: walls ignore the mask" if ignored else "none: rows take the steps"
        return Plan("stepped", reason, "scaled_dot_product_attention", boundary, rejected, scope)
    tokens, reach = call.key.shape[-2], call.evolution.reach
    alone = call.is_causal and reach and not call.has_masks and call.documents is None
    if alone and call.query.shape[-2] == tokens:
        exported = exporting()  # its lengths are padded until the stencil fits
        if exported or tokens >= 2 * max(BLOCK, 2 * reach):
            operator = CPU_CAUSAL
            if call.query.device.type != "cpu":
                operator = choose_square_causal(_query(call), call.value, tokens - reach)
            if operator.strip is not None:
                boundary = f"the last {reach} keys of a row take the steps, as one function"
                how = reason, operator.name, boundary, rejected
                return Plan("stepped", *how, operator=operator, single=True)
    if call.empty:
        return Plan("stepped", reason, "", rejected=rejected, scope=scope)
    scope = call.scope() if scope is None else scope
    near = bands_of(scope, reach)
    if not near and scope.documents is None and (not scope.banded or scope.only_causal):
        backend = "scaled_dot_product_attention"
        return Plan("stepped", reason, backend, rejected=rejected, scope=scope)
    operator = choose(_query(call), call.key, call.value, scope.narrowed(reach) if near else scope)
    boundary = "none: no wall moves with the row"
    if near:
        widths = " and ".join(str(band.width) for band in near)
        boundary = f"the {widths} keys near a wall take the steps"
    return Plan("stepped", reason, operator.name, boundary, rejected, scope, operator=operator)


def _tiled(reason: str, rejected: Mapping[str, str], scope: Scope | None = None) -> Plan:
    boundary = "tiles of the map take the steps, with its walls"
    return Plan("tiled", reason, "plain torch, in tiles", boundary, rejected, scope)


def _dense(reason: str, rejected: Mapping[str, str]) -> Plan:
    return Plan("dense", reason, "plain torch", "the map takes the steps, with its walls", rejected)


def _why_dense_in_onnx(call: Call) -> str:
    """Return why a model for ONNX must build the map; empty if it need not, or is not for ONNX."""
    if torch.onnx.is_in_onnx_export() and (
        call.is_causal or call.has_masks or call.documents is not None
    ):
        return "ONNX has no operators for keys near a wall"
    return ""


def _why_not_fused(call: Call) -> str:
    """Return why kernels cannot compute the call, empty if they can, apart from documents."""
    if call.query.device.type not in kernels.DEVICES:
        return f"kernels are for {' and '.join(kernels.DEVICES)}, not {call.query.device.type}"
    if call.has_masks or call.axis != "key" or call.walls != "mask":
        return "kernels know no masks but is_causal and documents, and only axis 'key' with walls 'mask'"
    if call.is_causal and call.query.shape[-2] != call.key.shape[-2]:
        return "causal kernels need as many queries as keys"
    if call.documents is not None and not (call.is_causal and call.evolution.linear):
        return "kernels know documents only with is_causal and a linear PDE"
    reason = kernels.why_not(call.query, call.value, call.evolution)
    if reason or not call.dropout_p:
        return reason
    if call.dropout_p == 1:
        return "kernels cannot drop everything"
    return kernels.why_no_dropout(call.query, call.value, call.evolution, call.is_causal)


def _why_not_row(call: Call) -> str:
    """Return why the kernel for one query cannot compute the call, empty if it can."""
    mask = call.attn_mask
    if call.axis != "key" or call.walls != "mask" or call.dropout_p:
        return "the kernel for one query knows no dropout, and only axis 'key' with walls 'mask'"
    if call.is_causal or call.window is not None or call.documents is not None:
        return "the kernel for one query knows no masks but key_padding and a row of attn_mask"
    if mask is not None and (mask.dtype != torch.bool or (mask.ndim > 2 and mask.shape[-3] != 1)):
        return "the kernel for one query takes a bool mask that is the same for all heads"
    if call.query.ndim > 4:
        return "the kernel for one query takes up to four dimensions"
    return kernels.why_not_row(call.query, call.key, call.value, call.evolution)


def _why_not_stepped(call: Call) -> str:
    """Return why the values cannot be stepped, apart from `_why_weights`; empty if they can."""
    mask, axis, walls = call.attn_mask, call.axis, call.walls
    if not call.evolution.pde.linear:
        return f"{type(call.pde).__name__} is not linear"
    if axis == "key" and walls == "mask":
        return _why_unknown(call)
    if axis == "both":
        return "axis 'both' steps keys and queries at once"
    rows = mask is not None and mask.shape[-2] > 1
    if axis == "query" and walls == "mask" and (rows or call.window is not None):
        return "on the query axis these walls differ from key to key"
    if call.dropout_p:
        return f"dropout acts on the map, and axis {axis!r} with walls {walls!r} has no tiles"
    return _why_unknown(call)


def _why_weights(call: Call) -> tuple[str, Scope | None]:
    """Return why stepped values need weights of single keys, or "", and the scope if it was made.

    This reads the values of a mask. Compiled code cannot, and takes every mask with rows for a general
    one.
    """
    if call.axis != "key" or call.walls != "mask":
        return "", None
    near = "dropout near a wall that moves with the row needs the weights themselves"
    if call.dropout_p and (call.is_causal or call.window is not None or call.documents is not None):
        return near, None
    if call.attn_mask is None or call.empty:
        return "", None
    scope = call.scope()
    if call.dropout_p and scope.banded:
        return near, scope
    if scope.mask is None:
        return "", scope
    if torch.compiler.is_compiling():
        return "compiled code cannot see whether attn_mask puts walls anywhere", scope
    return "attn_mask puts walls anywhere", scope


def _why_not_tiled(call: Call) -> str:
    """Return why the map cannot be computed tile by tile; empty if it can."""
    if call.axis != "key":
        return f"axis {call.axis!r} steps rows into each other"
    if call.walls != "mask":
        return f"walls {call.walls!r} are not those of a tile"
    return _why_unknown(call)


def _why_unknown(call: Call) -> str:
    pde = call.evolution.pde
    if call.attn_mask is not None and call.attn_mask.requires_grad:
        return "attn_mask wants a gradient"
    if not hasattr(pde, "reach"):
        return f"{type(pde).__name__} does not say its reach, how many neighbours away a step looks"
    if not is_dataclass(pde):
        return f"{type(pde).__name__} is not a dataclass, whose tensors can be found"
    return ""


def only_plain_torch() -> str:
    """Return why only plain operations of torch can be used here; empty if others can be, too.

    Transforms of `torch.func` and forward-mode derivatives see through plain operations alone: other
    engines have backward functions of their own. `torch.compile` sees through these itself.
    """
    if torch.compiler.is_compiling():
        return ""
    if torch._C._are_functorch_transforms_active():
        return "a transform of torch.func sees through plain operations only"
    if forward_ad._current_level >= 0:
        return "derivatives in forward mode go through plain operations only"
    return ""


def refuse_transforms(what: str, instead: str) -> None:
    """Raise within a transform of `torch.func`, or where forward-mode derivatives are taken."""
    why = only_plain_torch()
    if why:
        raise ValueError(f"{what} cannot do this: {why}; use {instead}")
