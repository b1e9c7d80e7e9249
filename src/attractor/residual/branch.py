"""What a block adds to what, as one run of it shows: where its branch ends, and what x is.

Names do not tell: a block with ``conv1``, ``conv2`` and ``downsample`` may add nothing, concatenate, or
pool at its end. So a block is run by itself, as a copy without numbers (on torch's meta device, where
only shapes are computed; with numbers where that fails), and the graph of that run is read, see `graph`.
The model is not touched: the copy has its own buffers and none of its hooks.
"""

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from attractor.residual.dispatch import Calls, is_feature, tensors_in
from attractor.residual.graph import COPIES, Graph, sample_shape
from attractor.residual.trunk import Addition

Given: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]  # arguments of a call

SIZES = (24, 40, 56)  # of the axes of what a block is tried on: not equal, so that turned axes show
BATCH = 2
TRIALS = 3  # numbers of channels
SCALED = {"mul", "mul_", "div", "div_", "neg", "relu", "relu_", "leaky_relu", "leaky_relu_"} | COPIES
HOOKS = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
         "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks",
         "_backward_pre_hooks")  # fmt: skip


class NoBranchError(ValueError):
    """A block that a gate cannot go into; the message goes on from its name.

    `adds` tells whether it adds something to x all the same, which a gate cannot reach.
    """

    def __init__(self, why: str, adds: bool = False) -> None:
        super().__init__(why)
        self.adds = adds


@dataclass(frozen=True)
class Source:
    """Where x is before a block's forward begins: an argument, or what a part makes of one.

    Attributes:
        argument: name of a parameter of forward.
        index: position in it, where the argument is a list; None where it is a tensor.
        part: path of the part that makes x of it; None where it is x.
    """

    argument: str
    index: int | None = None
    part: str | None = None


@dataclass(frozen=True)
class Branch:
    """A residual branch of a block.

    Attributes:
        end: path of the part inside the block whose output is f, but for a factor or a ReLU after it.
        shortcut: path of the part that makes x, or None.
        identity: whether x is what the block was given.
        channels, axes: of f.
        source: where x is before forward begins; None where forward makes it on the way.
        trial: arguments of a call without numbers that shows this; None where it needs numbers.
    """

    end: str
    shortcut: str | None
    identity: bool
    channels: int
    axes: int
    source: Source | None = None
    trial: Given | None = None


def read_branch(block: nn.Module, given: Given | None = None, named: str = "") -> Branch:
    """The branch of a block.

    Args:
        block: is tried on what its first convolution takes, unless arguments are `given`.
        given: arguments of a call.
        named: the part that ends the branch by its name; it is believed if the run does not disagree.

    Raises:
        NoBranchError: it adds nothing to what it was made from, or a gate could not reach what it adds.
        Exception: it cannot be run.
    """
    failed: list[Exception] = []
    for numbers in (False, True):
        failed.clear()
        for arguments in (given,) if given is not None else _arguments(block):
            trial = _on(arguments, block, numbers)
            try:
                found = _read(copied(block, numbers), trial, named)
                return replace(found, trial=None if numbers else trial)
            except NoBranchError:
                raise
            except Exception as error:
                failed.append(error)
        if any(isinstance(error, TypeError | ValueError) for error in failed):
            break  # it does not take such arguments, whatever their numbers
    raise failed[0] if failed else NoBranchError("has no convolutions")


def _read(block: nn.Module, given: Given, named: str) -> Branch:
    args, kwargs = given
    sources = dict(_sources(block, args, kwargs))
    features = [tensor for tensor in sources.values() if is_feature(tensor)]
    if not features:
        raise TypeError("it is called without a tensor of floats")
    calls = Calls(block)
    inputs = features[0].shape[0]
    graph = Graph(calls, ((str(s), t) for s, t in sources.items()), inputs, related=True)
    start, whole = graph._of(features[0]), sample_shape(tuple(features[0].shape), inputs)
    arguments = {graph._of(t): s for s, t in reversed(sources.items()) if isinstance(s, Source)}
    taken: dict[str, int | None] = {}
    made: dict[str, list[tuple[int | None, Tensor]]] = {}
    slot = "gate" in block.__dict__ and block.__dict__["gate"] is None  # the block calls it itself
    if slot:
        block.gate = _Same()

    def note(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            if isinstance(out, Tensor):
                made.setdefault(path, []).append((graph._of(out), out))

        return hook

    def take(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            tensors = tensors_in([*args, *kwargs.values()])
            taken[path] = graph._of(tensors[0]) if len(tensors) == 1 else None

        return hook

    for path, part in block.named_modules():
        if path:
            part.register_forward_pre_hook(take(path), with_kwargs=True)
            part.register_forward_hook(note(path))
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), calls.watched(), graph:
        block(*args, **kwargs)
    if slot and len(made.get("gate", ())) != 1:
        raise NoBranchError(
            f"has an attribute gate, None, but calls it {len(made.get('gate', ()))} times in a forward; "
            "give the attribute another name, and a hook will call the gate"
        )
    once = {path: found[0] for path, found in made.items() if len(found) == 1}
    wanted = "gate" if slot else named
    steps = [s for s in graph.steps.values() if _place(graph, s.node) == () and _adds(graph, s, start)]
    for step in sorted(steps, key=lambda s: s.node, reverse=True):
        end = _end(graph, step, once, wanted)
        if end is None:
            continue
        out, x = once[end][1], step.state_node
        if sample_shape(tuple(out.shape), inputs) != step.shape:
            raise NoBranchError(
                f"adds {list(step.shape)} per input, but its part {end} returns {list(out.shape)[1:]}; "
                "a gate goes on what is added as it is, [batch, channels, ...]",
                adds=True,
            )
        if not _is_map(out, block):
            raise NoBranchError(
                f"adds {list(step.shape)} per input, whose first axis is no number of channels of its "
                "convolutions; a gate takes maps [batch, channels, ...], with as many axes as they have",
                adds=True,
            )
        identity = x == start and step.shape == whole
        shapes = {s: sample_shape(tuple(t.shape), inputs) for s, t in sources.items()}
        argument = arguments.get(x)
        if argument is not None and shapes[argument] == step.shape:
            return Branch(end, None, identity, out.shape[1], out.dim(), argument)
        parts = [path for path, (node, _) in once.items() if node == x]
        shortcut = min(parts, key=lambda path: path.count("."), default=None)
        origin = None if shortcut is None else arguments.get(taken[shortcut])
        source = None if origin is None else replace(origin, part=shortcut)
        return Branch(end, shortcut, identity, out.shape[1], out.dim(), source)
    raise NoBranchError(_why(graph, steps), adds=bool(steps))


def _sources(block: nn.Module, args: Any, kwargs: Any) -> Iterator[tuple[Any, Tensor]]:
    """The tensors among the arguments of a call by their `Source`, or by a number if none names them."""
    signature = inspect.signature(block.forward)
    lists = [p.name for p in signature.parameters.values() if p.kind is p.VAR_POSITIONAL]
    others = 0
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        if isinstance(value, Tensor):
            yield Source(name), value
        elif isinstance(value, list | tuple) and name not in lists:
            for i, tensor in enumerate(value):
                if isinstance(tensor, Tensor):
                    yield Source(name, i), tensor
        else:
            values = value.values() if isinstance(value, Mapping) else (value,)
            for tensor in tensors_in(values):
                yield (others := others + 1), tensor


def _adds(graph: Graph, step: Addition, start: int | None) -> bool:
    """Whether what a step adds was made from the block's first input, and not only from another one."""
    (f,) = _others(graph, step) or (step.node,)
    return start is None or graph.sources[start] <= graph.sources[f]


class _Same(nn.Module):
    """In the place of a gate."""

    def forward(self, f: Tensor, x: Tensor | None = None) -> Tensor:
        return f


def _end(graph: Graph, step: Addition, once: Mapping[str, Any], named: str) -> str | None:
    """The part that ends a step's branch: as named, or the outermost of the last, called once.

    From f on it is looked for through factors and ReLUs, which a gate that is not negative may precede.
    """
    (node,) = _others(graph, step) or (None,)
    found = []
    while node is not None:
        ends = [path for path, (out, _) in once.items() if out == node]
        if named in ends:
            return named
        found.append(min(reversed(ends), key=lambda path: path.count("."), default=None))
        scaled = len(graph.parents[node]) == 1 and graph.made_by[node] in SCALED
        node = graph.parents[node][0] if scaled else None
    return next((end for end in found if end is not None), None)


def _is_map(f: Tensor, block: nn.Module) -> bool:
    """Whether f is ``[batch, channels, ...]``, with as many axes as the block's convolutions have.

    f has the channels of x, which the first convolution takes or the shortcut's returns; what a part
    makes of several convolutions, as by concatenation, need not have those of any.
    """
    convolutions = [m for m in block.modules() if isinstance(m, _ConvNd)]
    widths = {n for c in convolutions for n in (c.in_channels, c.out_channels)}
    widths |= {m.out_features for m in block.modules() if isinstance(m, nn.Linear)}
    return f.dim() in {2 + len(c.kernel_size) for c in convolutions} and f.shape[1] in widths


def _others(graph: Graph, step: Addition) -> tuple[int, ...]:
    """What a step adds to its state; nothing where that is made in the addition itself."""
    found = tuple(set(graph.parents[step.node]) - {step.state_node})
    return found if len(found) == 1 and step.branch is not None else ()


def _place(graph: Graph, node: int) -> tuple[str, ...]:
    return graph.where[node][-1][0] if graph.where[node] else ()


def _why(graph: Graph, steps: list[Addition]) -> str:
    """Why there is no branch."""
    if steps:
        (f,) = _others(graph, steps[-1]) or (steps[-1].node,)
        return (
            f"ends its branch by {graph.made_by[f]} in its own forward, where no hook reaches; let a "
            "part that is called once return the branch"
        )
    parts = [step for step in graph.steps.values() if _place(graph, step.node)]
    if parts:
        inner = ".".join(parts[0].home)
        return f"adds nothing by itself, only inside its part {inner}"
    own = [graph.made_by[n] for n in range(len(graph.parents)) if _place(graph, n) == ()]
    if {"cat", "stack"} & set(own):
        return "concatenates what it has made with its input, and adds nothing to it"
    return "adds nothing to what it was given"


def _arguments(block: nn.Module) -> Iterator[Given]:
    """What a block may take: the channels of one of its first convolutions, with as many axes."""
    weight = next((p for p in block.parameters() if p.is_floating_point()), None)
    dtype = None if weight is None else weight.dtype
    convolutions = [m for m in block.modules() if isinstance(m, _ConvNd)]
    channels = {n for conv in convolutions for n in (conv.in_channels, conv.out_channels)}
    seen: set[tuple[int, ...]] = set()
    for conv in convolutions:
        sizes = sorted(SIZES, key=lambda size: size in channels)[: len(conv.kernel_size)]
        shape = (BATCH, conv.in_channels, *sizes)
        if shape not in seen and len(seen) < TRIALS:
            seen.add(shape)
            yield (torch.empty(shape, dtype=dtype, device="meta"),), {}


def copied(block: nn.Module, numbers: bool = False) -> nn.Module:
    """A copy in eval mode without hooks: with the block's own weights, or with none at all."""
    memo: dict[int, Any] = {}
    for part in block.modules():
        memo |= {id(getattr(part, hooks)): OrderedDict() for hooks in HOOKS if hasattr(part, hooks)}
        plain = [t for t in part.__dict__.values() if isinstance(t, Tensor)]
        for tensor in (*part._parameters.values(), *part._buffers.values(), *plain):
            if tensor is not None and not numbers:
                bare: Tensor = tensor.detach().to("meta")
                is_weight = isinstance(tensor, nn.Parameter)
                memo[id(tensor)] = nn.Parameter(bare, requires_grad=False) if is_weight else bare
            elif isinstance(tensor, nn.Parameter):
                memo[id(tensor)] = tensor
    return copy.deepcopy(block, memo).eval()


def _on(given: Given, block: nn.Module, numbers: bool) -> Given:
    """The arguments without numbers, or with some where they have none."""
    home = next((p.device for p in block.parameters()), torch.device("cpu"))

    def there(value: Any) -> Any:
        if isinstance(value, Tensor) and not numbers:
            return value.detach().to("meta")
        if isinstance(value, Tensor):
            return torch.rand(value.shape).to(home, value.dtype) if value.is_meta else value.clone()
        if isinstance(value, list | tuple):
            return type(value)(there(v) for v in value)
        return value

    args, kwargs = given
    return tuple(there(v) for v in args), {k: there(v) for k, v in kwargs.items()}
