"""Gates in an existing network: `insert_gates`.

A gate multiplies f, the output of a block's residual branch, before the addition. It becomes the block's
child `gate`, so that all other names, and the weights saved under them, remain valid. By default it
starts at exactly 1, so inserting it does not change the network's output.

>>> import torch
>>> from attractor.residual.resnet import resnet34
>>> model = resnet34(num_classes=10).eval()
>>> images = torch.rand(1, 3, 64, 64)
>>> before = model(images)
>>> model = insert_gates(model, "stepnet", where=["layer3.1", "layer4.2"])
>>> list(gated_blocks(model)), bool((model(images) - before).abs().max() < 1e-6)
(['layer3.1', 'layer4.2'], True)

Blocks are recognised by their operations, as `probe` recognises them (see `finder`). A profile of
`probe` selects the blocks that it measured:

>>> from attractor.residual import probe
>>> model = resnet34(num_classes=10)
>>> model = insert_gates(model, "se", where=probe(model, images, within="layer4", settle=True))
>>> list(gated_blocks(model))
['layer4.0', 'layer4.1', 'layer4.2']

The blocks of this library have an attribute for a gate. In other blocks `attach` writes the call of the
gate into a copy of their forward. A network with gates can be copied, run in several threads,
checkpointed, traced by torch.fx and exported, and compiled by torch.jit.script if it could be before.
"""

import inspect
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

from torch import nn

from attractor.residual.attach import attach, share
from attractor.residual.blocks import ResidualBlock
from attractor.residual.branch import Branch
from attractor.residual.finder import Search, find_blocks, residual_blocks, summarise
from attractor.residual.gates import BY_NAME, get_gate, make_gate
from attractor.residual.normalisations import replace_norms, stem_norms
from attractor.residual.profile import StiffnessProfile

Model = TypeVar("Model", bound=nn.Module)
Where = str | StiffnessProfile | Iterable[int | str] | Callable[[str, nn.Module], bool]

__all__ = ["Model", "Where", "gated_blocks", "insert_gates", "residual_blocks"]


def gated_blocks(model: nn.Module, example: Any = None) -> dict[str, nn.Module]:
    """Return the gates of a model by the names of their blocks; `example` as in `residual_blocks`."""
    search = find_blocks(model, example)
    if not search.blocks:
        raise search.error()
    return _gates_of(search.blocks)


def insert_gates(
    model: Model,
    gate: Any,
    where: Where = "default",
    *,
    identity: bool = True,
    example: Any = None,
    **options: Any,
) -> Model:
    """Insert a gate into the residual blocks of a model, in place, and return the model.

    Args:
        model: A ResNet of this library, torchvision, timm or transformers, or another network whose
            blocks have convolutions and add the output of one of their parts to x. If the convolutions
            have one or three spatial axes, a gate of this library treats them as one axis.
        gate: A name such as "stepnet", a class of `gates`, or a function from the number of channels to
            a module that is called with ``(f, x)``. The arguments identity, device and dtype are passed
            if the function accepts them. IEBN replaces the batch normalisations of the selected blocks,
            except those of the shortcut, and those of the stem if all blocks are selected.
        where: Blocks that get a gate.

            - "all".
            - "identity": blocks that add x itself.
            - "default": "identity" if the gate is meant for such blocks only (StepNet), else "all".
            - A list of names or indices of blocks, in the order of `residual_blocks`.
            - A `StiffnessProfile` of this network: the blocks that it measured.
            - A function ``(name, block) -> bool``.
        identity: Let the gates start at exactly 1.
        example: A batch in a form that `probe` accepts. Requires: pass it if a block cannot be run by
            itself, for example because its forward takes more than x.
        **options: Further arguments of the gate.

    Raises:
        ValueError: The model has no suitable blocks, `where` selects none of them or an unsuitable one,
            the gate does not fit a block, or the model has gates already.

    Warns:
        UserWarning: Some residual blocks, or modules that resemble one, get no gate.
    """
    search = find_blocks(model, example)
    if not search.open:
        raise search.error()
    if gates := _gates_of(search.blocks):
        raise ValueError(
            f"{len(gates)} blocks have a gate already, the first is {next(iter(gates))}; insert all "
            "gates with one call into a model that has none"
        )
    if gate is None or gate == "none":
        return model
    options = {**_accepted(gate, identity=identity), **options}
    prototypes = (make_gate(gate, block.channels, **options) for block in search.open)
    prototype: Any = next((module for module in prototypes if module is not None), None)
    if isinstance(where, str) and where == "default":
        where = "identity" if getattr(prototype, "identity_blocks_only", False) else "all"
    blocks = _select(search, where)
    for block in blocks:
        _check(block, prototype)
    if search.reasons and (isinstance(where, str | StiffnessProfile) or callable(where)):
        reasons = [f"{name} {reason}" for name, reason in search.reasons.items()]
        warnings.warn(
            f"{len(reasons)} modules that look like residual blocks get no gate: {summarise(reasons)}",
            stacklevel=2,
        )
    if getattr(prototype, "normalisation", False):
        everywhere = len(blocks) == len(search.open)
        stem = stem_norms(model, search.open[0].module) if everywhere else []
        norms = [*stem, *(norm for block in blocks for norm in block.norms())]
        replace_norms(norms, partial(prototype.of, **options))
        return model
    pairs = [(block, _make(gate, block, options)) for block in blocks]
    gates_of_blocks = [(block, module) for block, module in pairs if module is not None]
    if getattr(prototype, "shared", False):
        gates_of_blocks = _share(gates_of_blocks)
    for block, module in gates_of_blocks:
        by_names = Branch(block.end, block.shortcut, block.identity, block.channels, block.axes)
        attach(block.module, module, block.branch or by_names)
    return model


def _gates_of(blocks: list[ResidualBlock]) -> dict[str, nn.Module]:
    gates = {block.name: block.gate() for block in blocks}
    return {name: gate for name, gate in gates.items() if gate is not None}


def _check(block: ResidualBlock, gate: Any) -> None:
    """Raise an error if a gate of this kind does not fit a block."""
    kind = type(gate).__name__
    if block.failure:
        raise ValueError(
            f"{block} could not be run by itself ({block.failure}), so it is unknown whether it adds "
            "its branch to x; pass example=, a batch for the network"
        )
    if block.axes != 4 and getattr(gate, "needs_image", False):
        others = [name for name, each in BY_NAME.items() if not getattr(each, "needs_image", False)]
        raise ValueError(
            f"{kind} is for images, [batch, channels, height, width], but {block} has {block.axes - 2} "
            f"axes after its channels; use one of {', '.join(others)}"
        )
    unknown_x = block.branch is not None and block.branch.source is None
    if unknown_x and "gate" not in vars(block.module) and getattr(gate, "needs_x", True):
        origin = "computes in its own forward, where no hook reaches"
        if block.shortcut is not None:
            origin = (
                f"computes by its part {block.shortcut} of another tensor than its input, as "
                "pre-activation does"
            )
        raise ValueError(
            f"{kind} looks at x, which {block} {origin}; insert it with where='identity', use a gate "
            "that looks at f alone, such as 'se', or set needs_x = False on a gate that does not need x"
        )


def _select(search: Search, where: Where) -> list[ResidualBlock]:
    """Return the blocks that `where` selects, in the model's order."""
    blocks = search.open
    if isinstance(where, StiffnessProfile):
        blocks = [block for block in blocks if block in _measured(search, where)]
    elif callable(where):
        blocks = [block for block in blocks if where(block.name, block.module)]
    elif isinstance(where, str):
        if where not in ("all", "identity"):
            raise ValueError(
                f"where {where!r} is not one of default, all, identity; pass a list to select one block"
            )
        blocks = [block for block in blocks if where == "all" or block.identity]
    else:
        if not isinstance(where, Iterable):
            raise TypeError(f"where = {where!r}; pass a word, a list of blocks, a profile or a function")
        where = list(where)
        for item in where:
            if isinstance(item, str) and item in search.reasons:
                raise ValueError(f"block {item} {search.reasons[item]}; it can have no gate")
        indices = {_index(search.blocks, item) for item in where}
        blocks = [block for i, block in enumerate(search.blocks) if i in indices]
    if not blocks:
        text = repr(where) if not isinstance(where, StiffnessProfile) else "= profile"
        raise ValueError(f"where {text} selects none of the {len(search.open)} blocks")
    return blocks


def _measured(search: Search, profile: StiffnessProfile) -> list[ResidualBlock]:
    """Return the blocks that a profile measured; one of its blocks may hold several of the model's."""
    names = dict.fromkeys(name.partition(":")[0] for name in profile.names)
    holds = lambda name, block: block.home == name or f"{block.home}.".startswith(f"{name}.")
    unknown = [name for name in names if not any(holds(name, block) for block in search.blocks)]
    if unknown:
        homes = dict.fromkeys(block.home for block in search.blocks)
        raise ValueError(
            f"the profile of {profile.model} measured {summarise(unknown)}, but the blocks of this "
            f"{type(search.model).__name__} are {', '.join(homes)}; pass a profile of this network, and "
            "as example= the batch that it was probed with"
        )
    return [block for block in search.blocks if any(holds(name, block) for name in names)]


def _index(blocks: list[ResidualBlock], item: int | str) -> int:
    names = [block.name for block in blocks]
    if isinstance(item, str) and item in names:
        return names.index(item)
    if isinstance(item, int) and -len(blocks) <= item < len(blocks):
        if blocks[item].obstacle:
            raise ValueError(f"{blocks[item]} {blocks[item].obstacle}; it can have no gate")
        return item % len(blocks)
    raise ValueError(
        f"there is no block {item!r}; the blocks are 0 to {len(blocks) - 1}, called {', '.join(names)}"
    )


def _make(gate: Any, block: ResidualBlock, options: dict[str, Any]) -> nn.Module | None:
    """Make a gate with the device, dtype and mode of a block; None if the function returns None."""
    weight = next(block.module.parameters())
    factory: Any = {"device": weight.device, "dtype": weight.dtype}
    module: Any = make_gate(gate, block.channels, **{**_accepted(gate, **factory), **options})
    return module if module is None else module.to(**factory).train(block.module.training)


def _accepted(gate: Any, **arguments: Any) -> dict[str, Any]:
    """Return those of the arguments that a gate accepts; a user's function need not accept any."""
    parameters = inspect.signature(get_gate(gate) if isinstance(gate, str) else gate).parameters
    any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in arguments.items() if any_name or name in parameters}


def _share(gates: list[tuple[ResidualBlock, nn.Module]]) -> list[tuple[ResidualBlock, nn.Module]]:
    """Replace the gates of each stage by one that the stage's blocks share.

    In a flat list of blocks a stage ends where the number of channels changes.
    """
    shared: list[tuple[ResidualBlock, nn.Module]] = []
    for _, group in groupby(gates, lambda pair: (pair[0].stage, pair[0].channels)):
        blocks, modules = zip(*group)
        shared += zip(blocks, share(modules[0], [block.module for block in blocks]))
    return shared
