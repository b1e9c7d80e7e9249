"""What a block adds to what, as one run of it shows: where its branch ends, and what x is.

Names do not tell: a block with ``conv1``, ``conv2`` and ``downsample`` may add nothing, concatenate, or
pool at its end. So a block is run by itself, as a copy without numbers (on torch's meta device, where
only shapes are computed; with numbers where that fails), and the graph of that run is read, see `graph`.
The model is not touched: the copy has its own buffers and none of its hooks.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from attractor.residual.dispatch import Calls, tensors_in
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
class Branch:
    """A residual branch of a block.

    Attributes:
        end: path of the part inside the block whose output is f, but for a factor or a ReLU after it.
        shortcut: path of the part that makes x, or None.
        identity: whether x is what the block was given.
        channels, axes: of f.
    """

    end: str
    shortcut: str | None
    identity: bool
    channels: int
    axes: int


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
            try:
                return _read(_copied(block, numbers), _on(arguments, block, numbers), named)
            except NoBranchError:
                raise
            except Exception as error:
                failed.append(error)
        if any(isinstance(error, TypeError | ValueError) for error in failed):
            break  # it does not take such arguments, whatever their numbers
    raise failed[0] if failed else NoBranchError("has no convolutions")


def _read(block: nn.Module, given: Given, named: str) -> Branch:
    args, kwargs = given
    features = tensors_in([*args, *kwargs.values()])
    calls = Calls(block)
    inputs = features[0].shape[0]
    graph = Graph(calls, ((f"input {i}", t) for i, t in enumerate(features)), inputs)
    start, whole = graph._of(features[0]), sample_shape(tuple(features[0].shape), inputs)
    made: dict[str, list[tuple[int | None, Tensor]]] = {}
    slot = "gate" in block.__dict__ and block.__dict__["gate"] is None  # the block calls it itself
    if slot:
        block.gate = _Same()

    def note(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            if isinstance(out, Tensor):
                made.setdefault(path, []).append((graph._of(out), out))

        return hook

    for path, part in block.named_modules():
        if path:
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
    steps = [s for s in graph.steps.values() if _place(graph, s.node) == ()]
    for step in sorted(steps, key=lambda s: s.node, reverse=True):
        end = _end(graph, step, once, wanted)
        if end is None:
            continue
        out, x = once[end][1], step.state_node
        if sample_shape(tuple(out.shape), inputs) != step.shape or not _is_map(out, block):
            raise NoBranchError(
                f"adds {list(step.shape)} an input, but its part {end} returns {list(out.shape)[1:]}; a "
                "gate goes on what is added as it is, [batch, channels, ...]",
                adds=True,
            )
        identity = x == start and step.shape == whole
        parts = [] if identity else [path for path, (node, _) in once.items() if node == x]
        shortcut = min(parts, key=lambda path: path.count("."), default=None)
        return Branch(end, shortcut, identity, out.shape[1], out.dim())
    raise NoBranchError(_why(graph, steps), adds=bool(steps))


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
    """Whether f is ``[batch, channels, ...]``, with as many axes as the block's convolutions have."""
    convolutions = [m for m in block.modules() if isinstance(m, _ConvNd)]
    widths = {c.out_channels for c in convolutions}
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
    if graph.steps:
        inner = ".".join(next(iter(graph.steps.values())).home)
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


def _copied(block: nn.Module, numbers: bool) -> nn.Module:
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
