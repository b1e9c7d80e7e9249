"""The choice of an engine for a call.

Unless `method` names an engine, the first entry of this list that can compute the call is chosen:

    fused      causal attention, or attention without masks, on a GPU by Triton kernels
    dense      maps with at most as many rows as the values have dimensions
    stepped    linear PDEs; instead tiled, if arbitrary walls, or dropout near moving walls, need the
               weights of single keys
    dense      small maps
    tiled      all other calls on the key axis
    dense      all other calls
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

SMALL = 1 << 20  # largest number of entries of a map, over all heads, that is built without tiles
METHODS = ("fused", "stepped", "tiled", "dense")


@dataclass(frozen=True)
class Plan:
    """How a call is computed, and why.

    Attributes:
        method: The engine: "fused", "stepped", "tiled" or "dense".
        reason: Why this engine was chosen.
        backend: What computes the softmax: an operator of torch, Triton kernels, or plain torch.
        boundary: How keys within reach of walls that move with the row are computed.
        rejected: Why other engines cannot compute the call, by name, as far as this was tested.
        scope: The scope of the masks, if the choice depended on it.
        documents: The result of `kernels.pack_documents`, or None.
        operator: The operator of torch for the softmax, if it was chosen.
        single: Whether the causal mask is the only mask, so that `boundary.causal` computes the call.
        one_query: Whether `kernels.attend_row` computes the call.
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
    """Return the plan of a call.

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
        boundary = "the row takes the steps, within the kernel"
        reason = "there is a kernel for one query"
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
    return _fastest(call, rejected) if method == "auto" else _named(call, rejected)


def _named(call: Call, rejected: dict[str, str]) -> Plan:
    """Return the plan with the engine that `method` names, or raise."""
    method, scope = call.method, None
    if "stepped" not in rejected and (method == "stepped" or method in rejected):
        weights, scope = _why_weights(call)
        if weights:
            rejected["stepped"] = weights
    if method in rejected:
        others = " or ".join(repr(name) for name in METHODS if name not in rejected)
        raise ValueError(f"method {method!r} cannot do this: {rejected[method]}; use {others}")
    if method == "stepped":
        return _stepped(call, "requested", rejected, scope)
    return _tiled("requested", rejected) if method == "tiled" else _dense("requested", rejected)


def _fastest(call: Call, rejected: dict[str, str]) -> Plan:
    """Return the plan with the fastest possible engine, without kernels."""
    queries, keys, dim = call.query.shape[-2], call.key.shape[-2], call.value.shape[-1]
    name = type(call.pde).__name__
    is_export = exporting()
    if is_export and (call.is_causal or call.window is not None) and has_symbolic_length(queries, keys):
        alone = call.is_causal and not call.has_masks and call.documents is None
        if not alone or not statically_true(queries == keys):
            reason = "a program exported for all lengths has no moving walls beside other masks"
            return _dense(reason, rejected)
    few_rows = statically_true(queries <= dim) if is_export else queries <= dim
    if few_rows and (call.steps or "stepped" in rejected):
        reason = f"a map of {queries} rows is smaller than values of {dim} dimensions"
        return _dense(reason, rejected)
    if "stepped" not in rejected:
        weights, scope = _why_weights(call)
        if weights:
            return _tiled(f"{name} is linear, but {weights}", rejected, scope)
        return _stepped(call, f"{name} is linear", rejected, scope)
    large = math.prod(call.query.shape[:-1]) * keys > SMALL
    if not (statically_true(large) if is_export else large):
        return _dense(f"{rejected['stepped']}, and the map is small", rejected)
    if "tiled" not in rejected:
        reason = f"{rejected['stepped']}, and a map of {queries} rows is built in tiles"
        return _tiled(reason, rejected)
    return _dense(rejected["tiled"], rejected)


def _fused(call: Call, documents: Any) -> Plan:
    """Return the plan with Triton kernels."""
    name = type(call.pde).__name__
    problem = name if call.documents is None else f"{name} within documents"
    reason = "requested" if call.method == "fused" else f"there are kernels for {problem}"
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
    """Return the query as ``[batch, heads, tokens, dim]``, the shape for which operators are chosen."""
    return four_dimensions(call.query, call.query, call.query)[0]


def _stepped(call: Call, reason: str, rejected: Mapping[str, str], scope: Scope | None) -> Plan:
    """Return the plan with stepped values."""
    if call.axis != "key" or call.walls != "mask":
        ignored = call.walls != "mask"
        boundary = "none: walls ignore the mask" if ignored else "none: rows take the steps"
        return Plan("stepped", reason, "scaled_dot_product_attention", boundary, rejected, scope)
    tokens, reach = call.key.shape[-2], call.evolution.reach
    alone = call.is_causal and reach and not call.has_masks and call.documents is None
    if alone and call.query.shape[-2] == tokens:
        is_export = exporting()  # in an export, tokens are appended until the stencil fits
        if is_export or tokens >= 2 * max(BLOCK, 2 * reach):
            operator = CPU_CAUSAL
            if call.query.device.type != "cpu":
                operator = choose_square_causal(_query(call), call.value, tokens - reach)
            if operator.strip is not None:
                boundary = f"the last {reach} keys of a row take the steps, as one function"
                fields = reason, operator.name, boundary, rejected
                return Plan("stepped", *fields, operator=operator, single=True)
    if call.empty:
        return Plan("stepped", reason, "", rejected=rejected, scope=scope)
    scope = call.scope() if scope is None else scope
    bands = bands_of(scope, reach)
    if not bands and scope.documents is None and (not scope.banded or scope.only_causal):
        backend = "scaled_dot_product_attention"
        return Plan("stepped", reason, backend, rejected=rejected, scope=scope)
    operator = choose(_query(call), call.key, call.value, scope.narrowed(reach) if bands else scope)
    boundary = "none: no wall moves with the row"
    if bands:
        widths = " and ".join(str(band.width) for band in bands)
        boundary = f"the {widths} keys near a wall take the steps"
    return Plan("stepped", reason, operator.name, boundary, rejected, scope, operator=operator)


def _tiled(reason: str, rejected: Mapping[str, str], scope: Scope | None = None) -> Plan:
    boundary = "tiles of the map take the steps, with its walls"
    return Plan("tiled", reason, "plain torch, in tiles", boundary, rejected, scope)


def _dense(reason: str, rejected: Mapping[str, str]) -> Plan:
    return Plan("dense", reason, "plain torch", "the map takes the steps, with its walls", rejected)


def _why_dense_in_onnx(call: Call) -> str:
    """Return why an export to ONNX must build the map, or an empty string."""
    if torch.onnx.is_in_onnx_export() and (
        call.is_causal or call.has_masks or call.documents is not None
    ):
        return "ONNX has no operators for keys near a wall"
    return ""


def _why_not_fused(call: Call) -> str:
    """Return why kernels cannot compute the call, apart from documents; empty if they can."""
    if call.query.device.type not in kernels.DEVICES:
        return f"kernels are for {' and '.join(kernels.DEVICES)}, not {call.query.device.type}"
    if call.has_masks or call.axis != "key" or call.walls != "mask":
        return (
            "kernels support no masks but is_causal and documents, and only axis 'key' with walls 'mask'"
        )
    if call.is_causal and call.query.shape[-2] != call.key.shape[-2]:
        return "causal kernels need as many queries as keys"
    if call.documents is not None and not (call.is_causal and call.evolution.linear):
        return "kernels support documents only with is_causal and a linear PDE"
    reason = kernels.why_not(call.query, call.value, call.evolution)
    if reason or not call.dropout_p:
        return reason
    if call.dropout_p == 1:
        return "kernels cannot drop all weights"
    return kernels.why_no_dropout(call.query, call.value, call.evolution, call.is_causal)


def _why_not_row(call: Call) -> str:
    """Return why the kernel for one query cannot compute the call; empty if it can."""
    mask = call.attn_mask
    if call.axis != "key" or call.walls != "mask" or call.dropout_p:
        return "the kernel for one query supports no dropout, and only axis 'key' with walls 'mask'"
    if call.is_causal or call.window is not None or call.documents is not None:
        return "the kernel for one query supports no masks but key_padding and a row of attn_mask"
    if mask is not None and (mask.dtype != torch.bool or (mask.ndim > 2 and mask.shape[-3] != 1)):
        return "the kernel for one query requires a bool mask that is the same for all heads"
    if call.query.ndim > 4:
        return "the kernel for one query supports up to four dimensions"
    return kernels.why_not_row(call.query, call.key, call.value, call.evolution)


def _why_not_stepped(call: Call) -> str:
    """Return why values cannot be stepped, apart from `_why_weights`; empty if they can."""
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
    """Return why weights of single keys are needed, or an empty string; and the scope or None.

    This function reads the values of a mask. Compiled code cannot do so, and treats every mask with
    several rows as a general one.
    """
    if call.axis != "key" or call.walls != "mask":
        return "", None
    moving_wall = "dropout near a wall that moves with the row needs the weights themselves"
    if call.dropout_p and (call.is_causal or call.window is not None or call.documents is not None):
        return moving_wall, None
    if call.attn_mask is None or call.empty:
        return "", None
    scope = call.scope()
    if call.dropout_p and scope.banded:
        return moving_wall, scope
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
    """Return why gradients or the reach of a call are unknown; empty if they are known."""
    pde = call.evolution.pde
    if call.attn_mask is not None and call.attn_mask.requires_grad:
        return "attn_mask requires a gradient"
    if not hasattr(pde, "reach"):
        return f"{type(pde).__name__} has no attribute reach, the number of neighbours that a step uses"
    if not is_dataclass(pde):
        return f"{type(pde).__name__} is not a dataclass, so its tensors are unknown"
    return ""


def only_plain_torch() -> str:
    """Return why only plain operations of torch are possible here; empty if others are, too.

    Transforms of `torch.func` and forward-mode derivatives support plain operations only, because the
    other engines have their own backward functions. `torch.compile` supports these.
    """
    if torch.compiler.is_compiling():
        return ""
    if torch._C._are_functorch_transforms_active():
        return "transforms of torch.func support plain operations only"
    if forward_ad._current_level >= 0:
        return "forward-mode derivatives support plain operations only"
    return ""


def refuse_transforms(what: str, instead: str) -> None:
    """Raise within transforms of `torch.func` and forward-mode derivatives."""
    why = only_plain_torch()
    if why:
        raise ValueError(f"{what} cannot do this: {why}; use {instead}")
