"""Gates in a network one already has: `insert_gates`.

A gate sits on f, the output of a block's residual branch, before the addition. It becomes the block's
child `gate`, so that all other names, and the weights saved under them, stay as they were. By default it
starts at exactly 1: no output changes on the day it is inserted.

>>> import torch
>>> from attractor.residual.resnet import resnet34
>>> model = resnet34(num_classes=10).eval()
>>> images = torch.rand(1, 3, 64, 64)
>>> before = model(images)
>>> model = insert_gates(model, "stepnet", where=["layer3.1", "layer4.2"])
>>> list(gated_blocks(model)), bool((model(images) - before).abs().max() < 1e-6)
(['layer3.1', 'layer4.2'], True)

A block is recognised by what it does, not by its class: it adds what a part of it returns, f, to x. The
names of torchvision, timm and transformers are looked for first, and each such block is tried by itself
(see `branch`); where none is found, every module is. What adds nothing, or concatenates, gets no gate.

Our own blocks have a slot for a gate and call it themselves. Into the forward of others the call is
written, see `attach`: a gated network can be copied, run in several threads, checkpointed, traced by
torch.fx, exported, and compiled by torch.jit.script where it could be without gates.
"""

import inspect
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from attractor.residual.attach import attach, share
from attractor.residual.branch import Branch, Given, NoBranchError, read_branch
from attractor.residual.gates import BY_NAME, get_gate, make_gate
from attractor.residual.meter import Batch, call_model

Model = TypeVar("Model", bound=nn.Module)
Norm = tuple[nn.Module, str, nn.Module]  # what holds it, its name there, itself
Where = str | Iterable[int | str] | Callable[[str, nn.Module], bool]


@dataclass(frozen=True)
class ResidualBlock:
    """A block ``x + f(x)`` of convolutions: where it is, and what of it matters to a gate."""

    name: str
    module: nn.Module
    channels: int  # of f
    branch: str  # the part whose output is f
    shortcut: str | None  # the part that projects x; None where x itself is added, or no part makes it
    identity: bool = True  # whether x itself is added
    axes: int = 4  # of f, [batch, channels, ...]
    untried: str = ""  # why it could not be tried, so that only its parts' names tell what it does
    read: Branch | None = None  # what a trial showed

    @property
    def stage(self) -> str:
        """Name of the module that holds this block and the others of its stage."""
        return self.name.rpartition(".")[0]

    def gate(self) -> nn.Module | None:
        """The gate it has, if any: its child, or the last of its normalisations that are gates."""
        gates = [norm for _, _, norm in self.norms() if getattr(norm, "normalisation", False)]
        child = self.module._modules.get("gate")
        return child if child is not None or not gates else gates[-1]

    def norms(self) -> list[Norm]:
        """Batch normalisations of the branch."""
        parts = self.module._modules
        return _norms(self.module, without=(parts.get(self.shortcut or ""), parts.get("gate")))


def residual_blocks(model: nn.Module, example: Any = None) -> list[ResidualBlock]:
    """The residual blocks of a network of convolutions, in order.

    Those with the names of torchvision, timm, transformers and this library; if there are none, all
    modules that add what one of their parts returns.

    Args:
        model: a network.
        example: a batch for it, as `probe` takes one, where blocks cannot be tried by themselves.

    Raises:
        ValueError: if there are none.
    """
    return _find(model, example)[0]


def gated_blocks(model: nn.Module, example: Any = None) -> dict[str, nn.Module]:
    """The gates of a model by the names of their blocks, in order; `example` as in `residual_blocks`."""
    return _gates_in(residual_blocks(model, example))


def _gates_in(blocks: list[ResidualBlock]) -> dict[str, nn.Module]:
    gates = {block.name: block.gate() for block in blocks}
    return {name: gate for name, gate in gates.items() if gate is not None}


def insert_gates(
    model: Model,
    gate: Any,
    where: Where = "default",
    *,
    identity: bool = True,
    example: Any = None,
    **options: Any,
) -> Model:
    """Put a gate into the residual blocks of a model, in place; the model is returned.

    Args:
        model: a ResNet of this library, torchvision, timm or transformers, or another network of
            convolutions whose blocks add what a part of theirs returns. Convolutions of one or three
            axes will do: a gate of this library then takes all places as one axis.
        gate: a name such as "stepnet", a class of `gates`, or a function from the number of channels to
            a module called ``(f, x)``; identity, device and dtype are passed on if it takes them. IEBN
            takes the place of batch normalisations: of every one in the chosen blocks but the
            shortcut's, and of the stem's where all blocks are chosen.
        where: which blocks. "default" is all, or those with an identity shortcut if the gate is meant
            for these alone (StepNet); "all"; "identity"; a list of indices or names of blocks, as
            `residual_blocks` gives them; or a function ``(name, block) -> bool``.
        identity: start at exactly 1, so that the model computes what it did before.
        example: a batch for the model, as `probe` takes one, if a block cannot be tried by itself, as
            where it takes more than x.
        **options: of the gate.

    Raises:
        ValueError: if there are no blocks, where chooses none of them or one that adds nothing, the
            gate does not fit one, or there are gates already.

    Warns:
        UserWarning: of blocks that have a residual block's names but add nothing; they get no gate.
    """
    blocks, refused = _find(model, example)
    if there := _gates_in(blocks):
        raise ValueError(
            f"{len(there)} blocks have a gate already, {next(iter(there))} is the first; insert all "
            "gates with one call into a model that has none"
        )
    if gate is None or gate == "none":
        return model
    options = {**_accepted(gate, identity=identity), **options}
    kinds = (make_gate(gate, block.channels, **options) for block in blocks)
    kind: Any = next((made for made in kinds if made is not None), None)
    if isinstance(where, str) and where == "default":
        where = "identity" if getattr(kind, "identity_blocks_only", False) else "all"
    chosen = _choose(blocks, where, refused)
    for block in chosen:
        _check(block, kind)
    if refused and (isinstance(where, str) or callable(where)):
        told = "; ".join(f"{name} {reason}" for name, reason in list(refused.items())[:3])
        warnings.warn(
            f"{len(refused)} modules get no gate, though they look like residual blocks: {told}",
            stacklevel=2,
        )
    if getattr(kind, "normalisation", False):
        stem = _stem_norms(model, blocks[0]) if len(chosen) == len(blocks) else []
        norms = [*stem, *(norm for block in chosen for norm in block.norms())]
        _replace(norms, partial(kind.of, **options))
        return model
    gates = [(block, made) for block in chosen if (made := _make(gate, block, options)) is not None]
    if getattr(kind, "shared", False):
        gates = _share(gates)
    for block, made in gates:
        named = Branch(block.branch, block.shortcut, block.identity, block.channels, block.axes)
        attach(block.module, made, block.read or named)
    return model


def _find(model: nn.Module, example: Any) -> tuple[list[ResidualBlock], dict[str, str]]:
    """The blocks, and those that only look like some, with the reason why they are none."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; give a network, an nn.Module")
    given = _inputs(model, example) if example is not None else None
    named = [block for name, module in model.named_modules() if (block := _read(name, module))]
    blocks, refused = [], {}
    for block in named:
        try:
            blocks.append(_tried(block, given))
        except NoBranchError as error:
            refused[block.name] = str(error)
    if blocks:
        return blocks, refused
    unknown: dict[str, str] = {}
    adding: dict[str, str] = {}
    for name, module in reversed(list(model.named_modules())):  # what is inside comes first
        inside = any(not name or block.name.startswith(f"{name}.") for block in blocks)
        if inside or name in refused or "gate" in name.split(".") or not _may_be_block(module):
            continue
        try:
            blocks.append(_tried(ResidualBlock(name, module, 0, "", None), given))
        except NoBranchError as error:
            refused[name] = str(error)
            adding |= {name: str(error)} if error.adds else {}
        if blocks and blocks[-1].untried:
            unknown[name] = f"could not be tried ({blocks.pop().untried})"
    if blocks:
        around = {n for n in unknown if any(not n or b.name.startswith(f"{n}.") for b in blocks)}
        found = {**adding, **{k: f"{v}: give example=" for k, v in unknown.items() if k not in around}}
        return blocks[::-1], {name: found[name] for name, _ in model.named_modules() if name in found}
    convolutions = lambda name: sum(isinstance(m, _ConvNd) for m in model.get_submodule(name).modules())
    names = [
        name
        for name, _ in model.named_modules()
        if name in refused
        and "only inside its part" not in refused[name]
        and (name in adding or convolutions(name) > 1)
    ]
    told = [f"{n or 'the network itself'} {refused[n]}" for n in names if n or len(names) == 1]
    untried = [f"{n or 'the network itself'} {unknown[n]}" for n in list(unknown)[::-1]]
    raise ValueError(
        f"{type(model).__name__} has no residual blocks of convolutions; looked for modules with "
        f"convolutions that add what one of their parts returns to x, and found {_some(told) or 'none'}"
        + (f"; {_some(untried)}: give example=, a batch for the network" if untried else "")
    )


def _some(told: list[str]) -> str:
    more = f", and {len(told) - 3} more" if len(told) > 3 else ""
    return "; ".join(told[:3]) + more


def _called(block: ResidualBlock) -> str:
    return f"block {block.name}" if block.name else "the network itself"


def _may_be_block(module: nn.Module) -> bool:
    """Whether a module has parts, convolutions among them, and a forward of its own."""
    kind: Any = type(module)
    plain = kind.forward in (nn.Sequential.forward, nn.Module.forward)
    return not plain and any(isinstance(m, _ConvNd) for m in module.modules() if m is not module)


def _tried(block: ResidualBlock, given: dict[str, Given] | None) -> ResidualBlock:
    """A block as a run shows it. Our own are known; what has a gate was tried when it got it."""
    gated: Branch | None = vars(block.module).get("gated_branch")
    if gated is not None:
        return _as_read(block, gated)
    if type(block.module).__module__.startswith("attractor.") or (block.branch and block.gate()):
        return block
    if given is not None and block.name not in given:
        return replace(block, untried="the network does not call it on the example")
    try:
        found = read_branch(block.module, given[block.name] if given else None, block.branch)
    except NoBranchError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
        return replace(block, untried=reason)
    return _as_read(block, found)


def _as_read(block: ResidualBlock, found: Branch) -> ResidualBlock:
    return ResidualBlock(
        block.name,
        block.module,
        found.channels,
        found.end,
        found.shortcut,
        found.identity,
        found.axes,
        read=found,
    )


def _inputs(model: nn.Module, example: Any) -> dict[str, Given]:
    """What each module that may be a block is called with on an example, without its numbers."""
    given: dict[str, Given] = {}

    def note(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        known: dict[int, Tensor] = {}  # one tensor that is given twice stays one

        def bare(value: Any) -> Any:
            if isinstance(value, Tensor):
                return known.setdefault(id(value), value.detach().to("meta"))
            return [bare(v) for v in value] if isinstance(value, list | tuple) else value

        given.setdefault(name, (tuple(map(bare, args)), {k: bare(v) for k, v in kwargs.items()}))

    modes = [(module, module.training) for module in model.modules()]
    hooks = []
    try:
        for name, part in model.named_modules():
            if _may_be_block(part):
                hook = partial(note, name)
                hooks.append(part.register_forward_pre_hook(hook, with_kwargs=True))
        with torch.no_grad():
            call_model(model.eval(), Batch.of(example, model, False).given)
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes:
            module.training = training
    return given


def _check(block: ResidualBlock, gate: Any) -> None:
    """Raise if a gate of that kind cannot go into a block."""
    kind = type(gate).__name__
    if block.untried:
        raise ValueError(
            f"{_called(block)} could not be tried by itself ({block.untried}), so it is not known if it "
            "adds its branch to x; give example=, a batch for the network, as probe takes one"
        )
    if block.axes != 4 and getattr(gate, "needs_image", False):
        others = [name for name, each in BY_NAME.items() if not getattr(each, "needs_image", False)]
        raise ValueError(
            f"{kind} is for images, [batch, channels, height, width], but {_called(block)} has "
            f"{block.axes - 2} axes behind its channels; take one of {', '.join(others)}"
        )
    hidden = block.read is not None and block.read.source is None and "gate" not in vars(block.module)
    if hidden and getattr(gate, "needs_x", True):
        made = "makes in its own forward, where no hook reaches"
        if block.shortcut is not None:
            made = (
                f"makes by its part {block.shortcut} of another tensor than its input, as pre-activation"
                " does"
            )
        raise ValueError(
            f"{kind} looks at x, which {_called(block)} {made}; insert it with where='identity', take a "
            "gate that looks at f alone, such as 'se', or tell by needs_x = False that yours does"
        )


def _read(name: str, module: nn.Module) -> ResidualBlock | None:
    """The block that a module is by the names of its parts, if it is one."""
    parts: dict[str, Any] = module._modules
    convolution, branch, shortcut = None, "layer", "shortcut"  # transformers
    if isinstance(parts.get("layer"), nn.Sequential) and "shortcut" in parts:
        convolution = [
            None,
            *(part for part in parts["layer"].modules() if isinstance(part, _ConvNd)),
        ][-1]
    elif "conv1" in parts and hasattr(module, "downsample"):  # torchvision, timm, our own
        last = "3" if "conv3" in parts else "2"
        convolution, shortcut = parts.get(f"conv{last}"), "downsample"
        branch = _end(name, parts, last)
        if parts.get("se") is not None:  # timm's own attention comes after
            branch = "se"
    if not isinstance(convolution, _ConvNd) or branch not in parts:
        return None
    projects = not isinstance(parts.get(shortcut), nn.Identity | None)
    return ResidualBlock(
        name,
        module,
        convolution.out_channels,
        branch,
        shortcut if projects else None,
        not projects,
        2 + len(convolution.kernel_size),
    )


def _end(name: str, parts: dict[str, Any], last: str) -> str:
    """The part that ends a branch: its last norm, or with pre-activation its last convolution.

    A norm has as many channels as what it follows; where that does not tell, parts are taken to be
    called in the order in which they were registered.
    """
    conv, norm, order = f"conv{last}", f"bn{last}", list(parts)
    first, end = parts["conv1"], parts.get(conv)
    if norm not in parts or not (isinstance(first, _ConvNd) and isinstance(end, _ConvNd)):
        return norm
    width = lambda part: getattr(parts.get(part), "num_features", None)
    if first.in_channels != first.out_channels and width("bn1") == first.in_channels:
        return conv
    if width(norm) not in (None, end.out_channels):
        return conv
    known = first.in_channels != first.out_channels and width("bn1") == first.out_channels
    if known or order.index(norm) > order.index(conv):
        return norm
    if order.index(norm) < order.index(f"conv{int(last) - 1}"):
        raise ValueError(
            f"block {name or 'itself'} has registered {norm} before all convolutions, so it cannot be "
            f"told whether {norm} or {conv} ends its branch; register its parts in the order in which "
            "forward calls them"
        )
    return conv


def _choose(blocks: list[ResidualBlock], where: Where, refused: dict[str, str]) -> list[ResidualBlock]:
    """Those of the blocks that where means, in the model's order."""
    if callable(where):
        chosen = [block for block in blocks if where(block.name, block.module)]
    elif isinstance(where, str):
        if where not in ("all", "identity"):
            raise ValueError(
                f"where {where!r} is not one of default, all, identity; one block is a list of one"
            )
        chosen = [block for block in blocks if where == "all" or block.identity]
    else:
        if not isinstance(where, Iterable):
            raise TypeError(f"where = {where!r}; give a word, a list of blocks, or a function")
        where = list(where)
        for item in where:
            if isinstance(item, str) and item in refused:
                raise ValueError(f"block {item} {refused[item]}; it can have no gate")
        wanted = {_index(blocks, item) for item in where}
        chosen = [block for i, block in enumerate(blocks) if i in wanted]
    if not chosen:
        raise ValueError(f"where {where!r} chooses none of the {len(blocks)} blocks")
    return chosen


def _index(blocks: list[ResidualBlock], item: int | str) -> int:
    names = [block.name for block in blocks]
    if isinstance(item, str) and item in names:
        return names.index(item)
    if isinstance(item, int) and -len(blocks) <= item < len(blocks):
        return item % len(blocks)
    raise ValueError(
        f"there is no block {item!r}; there are 0 to {len(blocks) - 1}, called {', '.join(names)}"
    )


def _make(gate: Any, block: ResidualBlock, options: dict[str, Any]) -> nn.Module | None:
    """A gate for this block, on its device, in its precision and its mode; or None, if that is made."""
    weight = next(block.module.parameters())
    factory: Any = {"device": weight.device, "dtype": weight.dtype}
    made: Any = make_gate(gate, block.channels, **{**_accepted(gate, **factory), **options})
    return made if made is None else made.to(**factory).train(block.module.training)


def _accepted(gate: Any, **arguments: Any) -> dict[str, Any]:
    """Those of the arguments that a gate takes; a user's function need not take any."""
    takes = inspect.signature(get_gate(gate) if isinstance(gate, str) else gate).parameters
    everything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
    return {name: value for name, value in arguments.items() if everything or name in takes}


def _share(gates: list[tuple[ResidualBlock, nn.Module]]) -> list[tuple[ResidualBlock, nn.Module]]:
    """One gate a stage: it belongs to the first block, starts before it, and forgets after the last.

    In a flat list of blocks a stage ends where the channels change.
    """
    shared: list[tuple[ResidualBlock, nn.Module]] = []
    for _, group in groupby(gates, lambda pair: (pair[0].stage, pair[0].channels)):
        blocks, made = zip(*group)
        shared += zip(blocks, share(made[0], [block.module for block in blocks]))
    return shared


def _norms(module: nn.Module, without: Iterable[nn.Module | None] = ()) -> list[Norm]:
    """Batch normalisations inside a module, and gates that stand for one, but not inside some parts."""
    skip = {inner for part in without if part is not None for inner in part.modules()}
    return [
        (holder, name, part)
        for holder in module.modules()
        if holder not in skip and not _is_normalisation(holder)
        for name, part in holder.named_children()
        if (isinstance(part, nn.BatchNorm2d) or _is_normalisation(part)) and part not in skip
    ]


def _is_normalisation(module: nn.Module) -> bool:
    return bool(getattr(module, "normalisation", False))


def _stem_norms(model: nn.Module, first: ResidualBlock) -> list[Norm]:
    """Batch normalisations that come before the first block."""
    order = {module: i for i, module in enumerate(model.modules())}
    return [norm for norm in _norms(model) if order[norm[2]] < order[first.module]]


def _replace(norms: list[Norm], of: Callable[[nn.Module], nn.Module]) -> None:
    """Put what ``of(norm)`` makes in the place of every batch normalisation."""
    kinds = {type(norm) for _, _, norm in norms}
    if kinds != {nn.BatchNorm2d}:
        found = ", ".join(sorted(kind.__name__ for kind in kinds)) or "none"
        raise ValueError(
            f"this gate takes the place of BatchNorm2d; the blocks' normalisations are {found}"
        )
    for holder, name, norm in norms:
        setattr(holder, name, of(norm))
