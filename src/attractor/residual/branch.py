"""The residual branch of one block: which part computes f, and where x comes from.

The names of a block's parts are not sufficient: a block with ``conv1``, ``conv2`` and ``downsample`` may
add nothing, concatenate, or pool at its end. `read_branch` therefore runs a copy of the block and reads
the graph of that run (see `graph`). The copy has no hooks and lives on torch's meta device, where only
shapes are computed. If that fails, the copy runs with values. The model itself is not changed.
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

from attractor.residual.axes import sample_shape
from attractor.residual.dispatch import Calls, Path, is_feature, tensors_in
from attractor.residual.graph import COPIES, Graph
from attractor.residual.trunk import Addition, block_path

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments

SIZES = (24, 40, 56)  # lengths of the trial input's axes, distinct so that transposed axes show
BATCH = 2
TRIALS = 3  # numbers of input channels to try
LINEAR = {"mul", "mul_", "div", "div_", "neg", "relu", "relu_", "leaky_relu", "leaky_relu_"} | COPIES
HOOKS = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
         "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks",
         "_backward_pre_hooks")  # fmt: skip


class NoBranchError(ValueError):
    """A gate cannot be inserted into a block. The message is a verb phrase with the block as subject.

    Attributes:
        adds: Whether the block adds a branch to x that a gate cannot reach.
    """

    def __init__(self, reason: str, adds: bool = False) -> None:
        super().__init__(reason)
        self.adds = adds


@dataclass(frozen=True)
class Source:
    """Where x comes from: an argument of the block's forward, or a part applied to an argument.

    Attributes:
        argument: Name of a parameter of forward.
        index: Position in the argument if it is a list; None if it is a tensor.
        part: Path of the part that computes x from the argument; None if x is the argument.
    """

    argument: str
    index: int | None = None
    part: str | None = None


@dataclass(frozen=True)
class Branch:
    """The residual branch of a block.

    Attributes:
        end: Path of the part whose output is f, except for a constant factor or a ReLU after it.
        shortcut: Path of the part that computes x, or None.
        identity: Whether x is the input of the block.
        channels: Number of channels of f.
        axes: Number of axes of f.
        source: Where x comes from; None if forward computes x in a way that a gate cannot repeat.
        trial: Arguments on the meta device for a call of the block; None if the block needs values.
        path: Path within the block of the module that holds the whole branch.
    """

    end: str
    shortcut: str | None
    identity: bool
    channels: int
    axes: int
    source: Source | None = None
    trial: Arguments | None = None
    path: Path = ()


def read_branch(
    block: nn.Module, arguments: Arguments | None = None, end: str = "", path: Path = ()
) -> Branch:
    """Return the residual branch of a block.

    Args:
        block: The block. Without `arguments` it is run on an input for its first convolution.
        arguments: Arguments of a call.
        end: Path of the part that probably ends the branch. It is used unless the run contradicts it.
        path: Path of the block in its network.

    Raises:
        NoBranchError: The block has no branch, or a gate cannot reach it.
        Exception: The block cannot be run.
    """
    errors: list[Exception] = []
    for with_values in (False, True):
        errors.clear()
        for candidate in (arguments,) if arguments is not None else _trial_arguments(block):
            trial = _convert(candidate, block, with_values)
            try:
                branch = _Run(copied(block, with_values), trial, path).branch(end)
                return replace(branch, trial=None if with_values else trial)
            except NoBranchError:
                raise
            except Exception as error:
                errors.append(error)
        if any(isinstance(error, TypeError | ValueError) for error in errors):
            break  # the block does not accept such arguments, whatever their values
    raise errors[0] if errors else NoBranchError("has no convolutions")


class _Run:
    """One run of a block, and what its graph shows."""

    def __init__(self, block: nn.Module, arguments: Arguments, path: Path) -> None:
        self.block, self.path = block, path
        args, kwargs = arguments
        sources = dict(_sources(block, args, kwargs))
        features = [tensor for tensor in sources.values() if is_feature(tensor)]
        if not features:
            raise TypeError("it is called without a floating-point tensor")
        calls = Calls(block)
        self.size = features[0].shape[0]
        inputs = ((str(source), tensor) for source, tensor in sources.items())
        self.graph = graph = Graph(calls, inputs, self.size, related=True)
        self.start = graph.node_of(features[0])
        self.input_shape = sample_shape(tuple(features[0].shape), self.size)
        self.sources = {
            graph.node_of(tensor): (source, sample_shape(tuple(tensor.shape), self.size))
            for source, tensor in reversed(sources.items())
            if isinstance(source, Source)
        }
        self.input_nodes: dict[str, int | None] = {}  # of the only tensor that a part takes
        self.outputs: dict[str, list[tuple[int | None, Tensor]]] = {}
        self.has_slot = vars(block).get("gate", block) is None  # the block calls a gate stored there
        if self.has_slot:
            block.gate = _IdentityGate()
        for part_path, part in block.named_modules():
            if part_path:
                part.register_forward_pre_hook(self._input_hook(part_path), with_kwargs=True)
                part.register_forward_hook(self._output_hook(part_path))
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), calls.watched(), graph:
            block(*args, **kwargs)

    def branch(self, end: str) -> Branch:
        """Return the last branch that a gate can reach; `end` as in `read_branch`."""
        if self.has_slot:
            end = "gate"
            if len(self.outputs.get(end, ())) != 1:
                raise NoBranchError(
                    f"has an attribute gate, None, but calls it {len(self.outputs.get(end, ()))} times "
                    "in a forward; rename the attribute, and a hook will call the gate"
                )
        single = {path: outputs[0] for path, outputs in self.outputs.items() if len(outputs) == 1}
        additions = [
            step
            for step in self.graph.steps.values()
            if place_of(self.graph, step) == () and self._adds_function_of_input(step)
        ]
        homes = {block_path(self.path, self.path + step.branch_path) for step in additions}
        if len(homes) > 1:
            names = ", ".join(sorted(".".join(home) for home in homes))
            raise NoBranchError(
                f"adds the outputs of several blocks in its own forward ({names}); a gate fits a block "
                "that adds to x in its own forward",
                adds=True,
            )
        for step in sorted(additions, key=lambda step: step.node, reverse=True):
            part = self._end(step, single, end)
            if part is not None:
                return self._describe(step, part, single)
        raise NoBranchError(self._reason(additions), adds=bool(additions))

    def _describe(
        self, step: Addition, end: str, single: Mapping[str, tuple[int | None, Tensor]]
    ) -> Branch:
        """Describe the branch of an addition that the part `end` ends."""
        f, x = single[end][1], step.state_node
        if sample_shape(tuple(f.shape), self.size) != step.shape:
            raise NoBranchError(
                f"adds {list(step.shape)} per input, but its part {end} returns {list(f.shape)[1:]}; "
                "a gate needs f as it is added, [batch, channels, ...]",
                adds=True,
            )
        if not _is_map(f, self.block):
            raise NoBranchError(
                f"adds {list(step.shape)} per input, whose first axis is not the channels of one of its "
                "convolutions; a gate needs maps [batch, channels, ...] with as many axes as theirs",
                adds=True,
            )
        identity = x == self.start and step.shape == self.input_shape
        source, shape = self.sources.get(x, (None, None))
        shortcut = None
        if shape != step.shape:
            parts = [path for path, (node, _) in single.items() if node == x]
            shortcut = min(parts, key=lambda path: path.count("."), default=None)
            origin = None if shortcut is None else self.sources.get(self.input_nodes[shortcut])
            source = None if origin is None else replace(origin[0], part=shortcut)
        return Branch(end, shortcut, identity, f.shape[1], f.dim(), source, path=step.branch_path)

    def _adds_function_of_input(self, step: Addition) -> bool:
        """Whether the branch depends on the block's first input, and not only on other ones."""
        (f,) = self._summand(step) or (step.node,)
        sources = self.graph.sources
        return self.start is None or sources[self.start] <= sources[f]

    def _summand(self, step: Addition) -> tuple[int, ...]:
        """Return the node that a step adds to x; empty for a fused operation."""
        others = tuple(set(self.graph.parents[step.node]) - {step.state_node})
        return others if len(others) == 1 and step.branch is not None else ()

    def _end(self, step: Addition, single: Mapping[str, Any], end: str) -> str | None:
        """Return the part that ends a branch: `end` if possible, else the outermost of the last parts.

        The search passes through constant factors and ReLUs, which commute with a positive gate.
        """
        graph = self.graph
        (node,) = self._summand(step) or (None,)
        candidates = []
        while node is not None:
            parts = [path for path, (output, _) in single.items() if output == node]
            if end in parts:
                return end
            candidates.append(min(reversed(parts), key=lambda path: path.count("."), default=None))
            passes = len(graph.parents[node]) == 1 and graph.operation[node] in LINEAR
            node = graph.parents[node][0] if passes else None
        return next((part for part in candidates if part is not None), None)

    def _reason(self, additions: list[Addition]) -> str:
        """Say why there is no branch that a gate can reach."""
        graph = self.graph
        if additions:
            (f,) = self._summand(additions[-1]) or (additions[-1].node,)
            return (
                f"ends its branch with {graph.operation[f]} in its own forward, where no hook reaches; "
                "let a part that is called once return the branch"
            )
        inner = [step for step in graph.steps.values() if place_of(graph, step)]
        if inner:
            return f"adds nothing by itself, only inside its part {'.'.join(inner[0].home)}"
        operations = {
            graph.operation[n] for n, stack in enumerate(graph.where) if not (stack and stack[-1][0])
        }
        if operations & {"cat", "stack"}:
            return "concatenates its input and its features, and adds nothing to its input"
        return "adds nothing to its input"

    def _input_hook(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            tensors = tensors_in([*args, *kwargs.values()])
            self.input_nodes[path] = self.graph.node_of(tensors[0]) if len(tensors) == 1 else None

        return hook

    def _output_hook(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            if isinstance(out, Tensor):
                self.outputs.setdefault(path, []).append((self.graph.node_of(out), out))

        return hook


class _IdentityGate(nn.Module):
    """A gate of 1, for trial runs."""

    def forward(self, f: Tensor, x: Tensor | None = None) -> Tensor:
        return f


def place_of(graph: Graph, step: Addition) -> Path:
    """Return the path of the module whose own forward performs an addition."""
    stack = graph.where[step.node]
    return stack[-1][0] if stack else ()


def copied(block: nn.Module, with_values: bool = False) -> nn.Module:
    """Return a copy in evaluation mode without hooks, with the block's weights or on the meta device."""
    memo: dict[int, Any] = {}
    for part in block.modules():
        memo |= {id(getattr(part, hooks)): OrderedDict() for hooks in HOOKS if hasattr(part, hooks)}
        attributes = [t for t in part.__dict__.values() if isinstance(t, Tensor)]
        for tensor in (*part._parameters.values(), *part._buffers.values(), *attributes):
            if tensor is not None and not with_values:
                meta: Tensor = tensor.detach().to("meta")
                is_weight = isinstance(tensor, nn.Parameter)
                memo[id(tensor)] = nn.Parameter(meta, requires_grad=False) if is_weight else meta
            elif isinstance(tensor, nn.Parameter):
                memo[id(tensor)] = tensor
    return copy.deepcopy(block, memo).eval()


def _sources(block: nn.Module, args: Any, kwargs: Any) -> Iterator[tuple[Any, Tensor]]:
    """Yield the tensors among the arguments, each with its `Source`, or a number if it has none."""
    signature = inspect.signature(block.forward)
    variadic = [p.name for p in signature.parameters.values() if p.kind is p.VAR_POSITIONAL]
    number = 0
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        if isinstance(value, Tensor):
            yield Source(name), value
        elif isinstance(value, list | tuple) and name not in variadic:
            for i, tensor in enumerate(value):
                if isinstance(tensor, Tensor):
                    yield Source(name, i), tensor
        else:
            values = value.values() if isinstance(value, Mapping) else (value,)
            for tensor in tensors_in(values):
                yield (number := number + 1), tensor


def _is_map(f: Tensor, block: nn.Module) -> bool:
    """Whether f is ``[batch, channels, ...]`` with as many axes as the block's convolutions have.

    f has the channels of x, which the first convolution takes or the shortcut returns. A part that joins
    several convolutions, for example by concatenation, need not have the channels of any of them.
    """
    convolutions = [m for m in block.modules() if isinstance(m, _ConvNd)]
    widths = {n for c in convolutions for n in (c.in_channels, c.out_channels)}
    widths |= {m.out_features for m in block.modules() if isinstance(m, nn.Linear)}
    return f.dim() in {2 + len(c.kernel_size) for c in convolutions} and f.shape[1] in widths


def _trial_arguments(block: nn.Module) -> Iterator[Arguments]:
    """Yield inputs that fit the first convolutions of a block."""
    weight = next((p for p in block.parameters() if p.is_floating_point()), None)
    dtype = None if weight is None else weight.dtype
    convolutions = [m for m in block.modules() if isinstance(m, _ConvNd)]
    channels = {n for conv in convolutions for n in (conv.in_channels, conv.out_channels)}
    shapes: set[tuple[int, ...]] = set()
    for conv in convolutions:
        sizes = sorted(SIZES, key=lambda size: size in channels)[: len(conv.kernel_size)]
        shape = (BATCH, conv.in_channels, *sizes)
        if shape not in shapes and len(shapes) < TRIALS:
            shapes.add(shape)
            yield (torch.empty(shape, dtype=dtype, device="meta"),), {}


def _convert(arguments: Arguments, block: nn.Module, with_values: bool) -> Arguments:
    """Move arguments to the meta device, or give random values to those that are there."""
    device = next((p.device for p in block.parameters()), torch.device("cpu"))

    def convert(value: Any) -> Any:
        if isinstance(value, Tensor) and not with_values:
            return value.detach().to("meta")
        if isinstance(value, Tensor):
            return torch.rand(value.shape).to(device, value.dtype) if value.is_meta else value.clone()
        if isinstance(value, list | tuple):
            return type(value)(convert(v) for v in value)
        return value

    args, kwargs = arguments
    return tuple(convert(v) for v in args), {k: convert(v) for k, v in kwargs.items()}
