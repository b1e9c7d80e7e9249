"""The trunk of a residual network: the chain of additions that are its steps, in blocks and stages.

The *trunk* is the longest chain of steps, each linked to the latest step that its own x comes from.
Additions inside a branch are not part of it. The additions of one module, such as attention and MLP in a
transformer's layer, are one *block*. A new *stage* begins where the number of channels or of positions
of the features changes; another order of axes is no change.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal, TypeAlias

from torch import nn

from attractor.residual.dispatch import Path, Stack
from attractor.residual.stages import stage_numbers

Granularity: TypeAlias = Literal["block", "addition"]


@dataclass(frozen=True)
class BranchFactor:
    """A factor of a branch: a gate, or a constant after one.

    Attributes:
        index: Number of the multiplication in the pass.
        branch: Position of f among the arguments.
        factor: Position of the factor F among the arguments.
        scalar: Whether the factor is a constant after a gate, which belongs to f and not to F.
        order: Permutation of axes from the product to the summand f, see `axis_order`; None if unknown.
        axis: The axis that counts the inputs, see `sample_axis`; None if unknown.
    """

    index: int
    branch: int
    factor: int
    scalar: bool = False
    order: tuple[int, ...] | None = None
    axis: int | None = None


@dataclass(frozen=True)
class Addition:
    """One residual step.

    Attributes:
        index: Number of the operation in the pass.
        state: Position of x among the arguments.
        branch: Position of f among the arguments; None in a fused operation.
        node: Node of the sum.
        state_node: Node of x.
        previous: Node of the step that x comes from, or -1.
        length: Number of steps in the chain that ends here.
        inside: Nodes of the steps within the branch.
        gates: Gates at the end of the branch, in order.
        projected: Whether x is a projection.
        shape: Shape of the sum for one input.
        axis: The axis that counts the inputs, see `sample_axis`; None if unknown.
        order: Permutation of axes from the previous sum to x, see `axis_order`; None if unknown.
        changed: Whether x has other features than the previous sum, because an operation that is not a
            function of single features, such as a convolution, pooling or padding, lies between them.
        home: Path of the block.
        branch_path: Path of the module that holds the whole branch.
        stack: The calls around the addition, and around the end of its branch.
    """

    index: int
    state: int
    branch: int | None
    node: int
    state_node: int
    previous: int
    length: int
    inside: frozenset[int]
    gates: tuple[BranchFactor, ...]
    projected: bool
    shape: tuple[int, ...]
    axis: int | None
    order: tuple[int, ...] | None
    changed: bool
    home: Path
    branch_path: Path
    stack: Stack

    @property
    def call(self) -> int | None:
        """Number of the block's call; None if the block is a list of modules, which is not called."""
        return next((number for path, number in self.stack if path == self.home), None)

    @property
    def part(self) -> Path | None:
        """Path of the module inside the block that ends the branch; None if the block itself does."""
        end = self.stack[-1][0] if self.stack else ()
        return end if len(end) > len(self.home) else None

    @property
    def reorders(self) -> bool:
        """Whether axes were permuted since the previous sum."""
        return self.order is not None and self.order != tuple(range(len(self.order)))


@dataclass(frozen=True)
class Block:
    """One step of the profile: an addition, or all additions of one block.

    Attributes:
        name: Path of the block's module.
        stage: Number of the stage.
        first: The first addition.
        last: The last addition.
        gates: Gates of each addition.
        direct: Whether f is an operand, so that its norm can be computed directly. Otherwise the
            increment is the last sum minus the first x.
        needs_copy: Whether x must be copied, because an operation in the block overwrites it.
        order: Permutation of x's axes within the block, or None.
        token_axis: See `token_axis`.
    """

    name: str
    stage: int
    first: Addition
    last: Addition
    gates: tuple[tuple[BranchFactor, ...], ...]
    direct: bool
    needs_copy: bool
    order: tuple[int, ...] | None
    token_axis: int | None = 1


@dataclass(frozen=True)
class Event:
    """Measurements at one operation.

    Attributes:
        digest: Hash of all operations up to this one.
        starts: Number of the block whose first addition this is, or None.
        ends: Number of the block whose last addition this is, or None.
        gates: (block, addition, gate) of each gate that the operation is.
    """

    digest: int
    starts: int | None
    ends: int | None
    gates: tuple[tuple[int, int, BranchFactor], ...]


@dataclass(frozen=True)
class MeasurementPlan:
    """A trunk, and where to measure it.

    Attributes:
        blocks: Steps of the trunk.
        events: Measurements by the number of the operation.
        end: Hash of the whole pass.
        sources: Names of the inputs that the first x depends on.
        decodes: Whether the trunk lies in a decoder that has an encoder beside it.
    """

    blocks: tuple[Block, ...]
    events: dict[int, Event]
    end: int = 0
    sources: frozenset[str] = frozenset()
    decodes: bool = False


def find_trunk(steps: Mapping[int, Addition]) -> list[Addition]:
    """Return the longest chain of steps; among equal ones, the one that ends last.

    If a later step adds around all but the last steps of the chain, and the chain itself holds such a
    step, the chain is redirected around them.
    """

    def chain(end: Addition) -> list[Addition]:
        steps_back = [end]
        while steps_back[-1].previous >= 0:
            steps_back.append(steps[steps_back[-1].previous])
        return steps_back[::-1]

    trunk = chain(max(steps.values(), key=lambda step: (step.length, step.index)))
    while True:
        nodes = {step.node for step in trunk}
        around = [s for s in steps.values() if trunk[-1].node in s.inside and s.previous in nodes]
        if not around or not any(step.inside for step in trunk):
            return trunk
        trunk = chain(min(around, key=lambda step: step.index))


def make_measurement_plan(
    steps: Mapping[int, Addition],
    granularity: Granularity,
    model: nn.Module,
    digests: Mapping[int, int],
    writes: Mapping[int, list[int]],
) -> MeasurementPlan:
    """Return the trunk in blocks and stages.

    Args:
        steps: Steps by the node of their sum.
        granularity: "block", or "addition" for one block per addition.
        model: The network.
        digests: Hash of the pass up to each operation that may matter.
        writes: Operations that overwrote the storage of a node.
    """
    trunk = find_trunk(steps)
    groups = [[step] for step in trunk]
    if granularity == "block":
        groups = group_by_block(merge_lists_of_parts(merge_parts(trunk), model))
    stages = stage_numbers([g[-1].shape for g in groups], [g[0].changed for g in groups])
    names = unique([".".join(group[0].home) for group in groups])
    blocks = []
    for name, stage, group in zip(names, stages, groups):
        first, last = group[0], group[-1]
        block = Block(
            name,
            stage,
            first,
            last,
            gates=tuple(step.gates for step in group),
            direct=len(group) == 1 and first.branch is not None,
            needs_copy=any(first.index <= i <= last.index for i in writes.get(first.state_node, ())),
            order=next((step.order for step in group[1:] if step.reorders), None),
            token_axis=token_axis(_submodule(model, first.home)),
        )
        blocks.append(block)
    return MeasurementPlan(
        tuple(blocks), _events(blocks, digests), decodes=decodes(model, trunk[0].home)
    )


def token_axis(block: nn.Module | None) -> int | None:
    """Return the axis of ``[batch, ., .]`` that counts tokens: 1 or -1; None if both are possible.

    Linear layers have channels in the last axis, `nn.Conv1d` has tokens there.
    """
    parts = [] if block is None else list(block.modules())
    if not any(isinstance(part, nn.Conv1d) for part in parts):
        return 1
    return None if any(isinstance(part, nn.Linear) for part in parts) else -1


def decodes(model: nn.Module, path: Path) -> bool:
    """Whether a path leads through a decoder with an encoder beside it."""
    for n, part in enumerate(path):
        parent = _submodule(model, path[:n])
        if "decoder" in part and parent is not None:
            return any("encoder" in name for name in parent._modules)
    return False


def _events(blocks: list[Block], digests: Mapping[int, int]) -> dict[int, Event]:
    starts = {block.first.index: k for k, block in enumerate(blocks)}
    ends = {block.last.index: k for k, block in enumerate(blocks) if not block.direct}
    gates: dict[int, list[tuple[int, int, BranchFactor]]] = {}
    for k, block in enumerate(blocks):
        for j, factors in enumerate(block.gates):
            for gate in factors:
                gates.setdefault(gate.index, []).append((k, j, gate))
    at = lambda i: Event(digests[i], starts.get(i), ends.get(i), tuple(gates.get(i, ())))
    return {i: at(i) for i in {*starts, *ends, *gates}}


def block_path(place: Path, branch: Path) -> Path:
    """Return the path of the block that an addition belongs to.

    This is the common path of both arguments if its name holds a number (``layer1.0``,
    ``encoder_layer_3``). Otherwise it is the first numbered part of the branch, for additions outside of
    their block (``x + block(x)``); otherwise the list element around the addition, for additions inside
    a part (``layer.0.attention``).

    Args:
        place: Path of the module whose forward performs the addition.
        branch: Path of the module that holds the whole branch.
    """
    common = common_path([place, branch])
    if common and _numbered(common[-1]):
        return common
    for n in range(len(common) + 1, len(branch) + 1):
        if _numbered(branch[n - 1]):
            return branch[:n]
    return _list_element(common) or common or branch


def common_path(paths: Iterable[Path]) -> Path:
    """Return the longest path that all paths begin with."""
    common: list[str] = []
    for parts in zip(*paths):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return tuple(common)


def merge_parts(trunk: list[Addition]) -> list[Addition]:
    """Merge a numbered part such as ``blocks.0.cpe1`` into its block ``blocks.0``, a neighbour."""
    merged = list(trunk)
    for i, step in enumerate(trunk):
        parent = _list_element(step.home)
        if parent and parent != step.home and parent in {s.home for s in trunk[max(i - 1, 0) : i + 2]}:
            merged[i] = replace(step, home=parent)
    return merged


def merge_lists_of_parts(trunk: list[Addition], model: nn.Module) -> list[Addition]:
    """Merge the parts of one block that form a list, such as T5's ``block.0.layer.0`` and ``.1``.

    The elements of a list are parts of a block, and not blocks of a stage, if their classes differ and
    all lists hold the same classes.
    """
    parents = [_list_element(step.home[:-1]) if step.home[-1:] else () for step in trunk]
    if not all(step.home and step.home[-1].isdigit() for step in trunk) or not all(parents):
        return trunk
    if any(step.projected for step in trunk):
        return trunk
    kinds = [type(_submodule(model, step.home)) for step in trunk]
    lists = [[k for _, k in group] for _, group in groupby(zip(parents, kinds), lambda pair: pair[0])]
    first = lists[0]
    if len(first) < 2 or len(set(first)) < len(first) or any(other != first for other in lists):
        return trunk
    return [replace(step, home=path) for step, path in zip(trunk, parents)]


def group_by_block(trunk: list[Addition]) -> list[list[Addition]]:
    """Group consecutive additions of one call of a block, as long as the order of their axes is known.

    The additions of a network without parts are not grouped. A list of parts is not called; its second
    use begins where one of its parts is used again.
    """
    groups = [[trunk[0]]]
    for step in trunk[1:]:
        group = groups[-1]
        last = group[-1]
        same_call = step.home and (step.home, step.call) == (last.home, last.call)
        reorders_twice = step.reorders and any(s.reorders for s in group[1:])
        reused = step.call is None and step.part and step.part in [s.part for s in group]
        if same_call and step.order is not None and not reorders_twice and not reused:
            group.append(step)
        else:
            groups.append([step])
    return groups


def unique(names: list[str]) -> list[str]:
    """Append a number after a colon to names that occur more than once."""
    names = [name or "model" for name in names]
    numbers: dict[str, int] = {}
    result = []
    for name in names:
        numbers[name] = numbers.get(name, 0) + 1
        result.append(f"{name}:{numbers[name]}" if names.count(name) > 1 else name)
    return result


def _list_element(path: Path) -> Path:
    """Return the path up to its last number: ``layer.0`` for ``layer.0.attention``."""
    ends = [n for n, part in enumerate(path, 1) if part.isdigit()]
    return path[: ends[-1]] if ends else ()


def _submodule(model: nn.Module, path: Path) -> nn.Module | None:
    try:
        return model.get_submodule(".".join(path))
    except AttributeError:  # the path of a compiled module lacks a part
        return None


def _numbered(part: str) -> bool:
    return any(letter.isdigit() for letter in part)
