"""The trunk of a residual network: which of its additions are steps of one chain, blocks and stages.

The *trunk* is the longest chain of steps, each linked to the last step that its own x came from; what
adds inside a branch hangs beside it. Additions that belong to one module, such as attention and MLP of
a transformer's layer, are one *block*. A *stage* ends where the number of channels of one input's
features, or the number of their places, changes; another order of axes is no change.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import Literal, TypeAlias

from torch import nn

from attractor.residual.dispatch import Path, Stack

Granularity: TypeAlias = Literal["block", "addition"]


@dataclass(frozen=True)
class Gate:
    """A factor of a branch: the number of the operation, and which arguments are f and F.

    A constant number behind a gate is kept as one more, with `scalar`: it belongs to f, not to F.
    `layout` is the order of axes that makes the product to the sum's f, but for a reshape; `axis` is
    where the inputs are, see `sample_axis`, or None if that is not known.
    """

    index: int
    branch: int
    factor: int
    scalar: bool = False
    layout: tuple[int, ...] | None = None
    axis: int | None = None


@dataclass(frozen=True)
class Addition:
    """One residual step.

    Attributes:
        index: number of the operation in the pass.
        state, branch: which arguments are x and f; branch is None in a fused operation.
        node, state_node: of the sum and of x.
        before: the node of the step that x came from, or -1.
        length: of the chain that ends here.
        inside: the nodes of the steps within its branch.
        gates: those at the end of the branch, in order.
        projected: whether x is a projection.
        shape: of one input's sum.
        axis: where the inputs are, see `sample_axis`, or None if that is not known.
        layout: the order of axes that makes the sum before to this x, but for a reshape; None if that is
            not known.
        moved: whether x has other features than the sum before: something that is no function of
            single features, such as a convolution, a pooling or padding, lies between.
        home: the path of its block.
        stack: the calls around it, and around the end of its branch.
    """

    index: int
    state: int
    branch: int | None
    node: int
    state_node: int
    before: int
    length: int
    inside: frozenset[int]
    gates: tuple[Gate, ...]
    projected: bool
    shape: tuple[int, ...]
    axis: int | None
    layout: tuple[int, ...] | None
    moved: bool
    home: Path
    stack: Stack

    @property
    def call(self) -> int | None:
        """The number of its block's call; None if that module is a list, which is not called."""
        return next((number for path, number in self.stack if path == self.home), None)

    @property
    def part(self) -> Path | None:
        """The module inside its block that ends its branch; None if the block itself does."""
        end = self.stack[-1][0] if self.stack else ()
        return end if len(end) > len(self.home) else None

    @property
    def turned(self) -> bool:
        """Whether axes changed places since the sum before."""
        return self.layout is not None and self.layout != tuple(range(len(self.layout)))


@dataclass(frozen=True)
class Block:
    """One step of the profile: an addition, or those of one block taken together.

    Attributes:
        first, last: its first and last addition.
        gates: of each addition.
        direct: whether f is an operand, so that its norm can be taken as it is; otherwise the increment
            is the sum at the end less x at the start.
        copied: whether x must be copied to be there at the end, as something writes to it.
        layout: how x's axes change places before the end, or None.
        tokens: see `token_side`.
    """

    name: str
    stage: int
    first: Addition
    last: Addition
    gates: tuple[tuple[Gate, ...], ...]
    direct: bool
    copied: bool
    layout: tuple[int, ...] | None
    tokens: int | None = 1


@dataclass(frozen=True)
class Event:
    """What is to be done at one operation.

    Attributes:
        digest: the hash of all operations up to it.
        starts, ends: the block whose first or last addition it is, if it is one.
        gates: blocks, additions of them and gates, if it is a gate.
    """

    digest: int
    starts: int | None
    ends: int | None
    gates: tuple[tuple[int, int, Gate], ...]


@dataclass(frozen=True)
class Plan:
    """A trunk.

    Attributes:
        blocks: its steps.
        events: what is to be done at which operation.
        end: the hash of the whole pass.
        sources: the inputs that its first x was made from, by name.
        decodes: whether it lies in a decoder that has an encoder beside it.
    """

    blocks: tuple[Block, ...]
    events: dict[int, Event]
    end: int = 0
    sources: frozenset[str] = frozenset()
    decodes: bool = False


def find_trunk(steps: Mapping[int, Addition]) -> list[Addition]:
    """The longest chain of steps; of equal ones the one that ends last.

    A chain that goes around all branches with steps inside but for the last one is led around that too.
    """

    def chain(end: Addition) -> list[Addition]:
        found = [end]
        while found[-1].before >= 0:
            found.append(steps[found[-1].before])
        return found[::-1]

    trunk = chain(max(steps.values(), key=lambda step: (step.length, step.index)))
    while True:
        nodes = {step.node for step in trunk}
        around = [k for k in steps.values() if trunk[-1].node in k.inside and k.before in nodes]
        if not around or not any(step.inside for step in trunk):
            return trunk
        trunk = chain(min(around, key=lambda step: step.index))


def make_plan(
    steps: Mapping[int, Addition],
    granularity: Granularity,
    model: nn.Module,
    digests: Mapping[int, int],
    written: Mapping[int, list[int]],
) -> Plan:
    """Blocks and stages of the trunk.

    Args:
        steps: by the node of their sums.
        digests: the hash of the pass up to each operation that may matter.
        written: the operations that wrote to a node's storage.
    """
    trunk = find_trunk(steps)
    parts = [[step] for step in trunk]
    if granularity == "block":
        parts = join(join_siblings(absorb(trunk), model))
    stages = stage_numbers([p[-1].shape for p in parts], [p[0].moved for p in parts])
    names = unique([".".join(part[0].home) for part in parts])
    blocks = []
    for name, stage, part in zip(names, stages, parts):
        first, last = part[0], part[-1]
        copied = any(first.index <= i <= last.index for i in written.get(first.state_node, ()))
        turn = next((step.layout for step in part[1:] if step.turned), None)
        direct = len(part) == 1 and first.branch is not None
        gates = tuple(step.gates for step in part)
        side = token_side(_submodule(model, first.home))
        blocks.append(Block(name, stage, first, last, gates, direct, copied, turn, side))
    return Plan(tuple(blocks), _events(blocks, digests), decodes=decodes(model, trunk[0].home))


def token_side(block: nn.Module | None) -> int | None:
    """Which axis of ``[batch, ., .]`` is that of tokens: 1; -1 among convolutions; None if both may be.

    Linear layers have channels last, and `nn.Conv1d` has tokens last.
    """
    parts = [] if block is None else list(block.modules())
    if not any(isinstance(part, nn.Conv1d) for part in parts):
        return 1
    return None if any(isinstance(part, nn.Linear) for part in parts) else -1


def decodes(model: nn.Module, path: Path) -> bool:
    """Whether a path leads through a decoder that has an encoder beside it."""
    for n, part in enumerate(path):
        around = _submodule(model, path[:n])
        if "decoder" in part and around is not None:
            return any("encoder" in name for name in around._modules)
    return False


def _events(blocks: list[Block], digests: Mapping[int, int]) -> dict[int, Event]:
    starts = {block.first.index: k for k, block in enumerate(blocks)}
    ends = {block.last.index: k for k, block in enumerate(blocks) if not block.direct}
    gates: dict[int, list[tuple[int, int, Gate]]] = {}
    for k, block in enumerate(blocks):
        for j, found in enumerate(block.gates):
            for gate in found:
                gates.setdefault(gate.index, []).append((k, j, gate))
    at = lambda i: Event(digests[i], starts.get(i), ends.get(i), tuple(gates.get(i, ())))
    return {i: at(i) for i in {*starts, *ends, *gates}}


def block_path(own: Path, branch: Path) -> Path:
    """The path of the block that an addition belongs to.

    Args:
        own: the module in whose forward it is written.
        branch: the module that holds all of its branch.

    What both have in common, if its name holds a number (``layer1.0``, ``encoder_layer_3``). Else the
    first such part of the branch, for additions written outside of their block (``x + block(x)``).
    Else the list element around it, for those written inside a part (``layer.0.attention``).
    """
    common = common_path([own, branch])
    if common and _numbered(common[-1]):
        return common
    for n in range(len(common) + 1, len(branch) + 1):
        if _numbered(branch[n - 1]):
            return branch[:n]
    return _list_element(common) or common or branch


def common_path(paths: Iterable[Path]) -> Path:
    """What all paths begin with."""
    rows = zip(*paths)
    found: list[str] = []
    for parts in rows:
        if len(set(parts)) > 1:
            break
        found.append(parts[0])
    return tuple(found)


def absorb(trunk: list[Addition]) -> list[Addition]:
    """Give a numbered part of a block, as ``blocks.0.cpe1``, the home of its neighbour ``blocks.0``."""
    found = list(trunk)
    for i, step in enumerate(trunk):
        above = _list_element(step.home)
        if above and above != step.home and above in {s.home for s in trunk[max(i - 1, 0) : i + 2]}:
            found[i] = replace(step, home=above)
    return found


def join_siblings(trunk: list[Addition], model: nn.Module) -> list[Addition]:
    """Give the parts of one block, kept as a list in it, one home: T5's ``block.0.layer.0`` and ``.1``.

    They are parts, and not blocks of a stage, if each list holds modules of different classes and all
    lists the same ones.
    """
    above = [_list_element(step.home[:-1]) if step.home[-1:] else () for step in trunk]
    if not all(step.home and step.home[-1].isdigit() for step in trunk) or not all(above):
        return trunk
    if any(step.projected for step in trunk):
        return trunk
    kinds = [type(_submodule(model, step.home)) for step in trunk]
    runs = [[k for _, k in run] for _, run in groupby(zip(above, kinds), lambda pair: pair[0])]
    if len(runs[0]) < 2 or len(set(runs[0])) < len(runs[0]) or any(run != runs[0] for run in runs):
        return trunk
    return [replace(step, home=path) for step, path in zip(trunk, above)]


def join(trunk: list[Addition]) -> list[list[Addition]]:
    """Consecutive additions of one call of a block, as long as it is known how their axes lie.

    Those of a network without parts stay by themselves. A list of parts is not called: its second use
    begins where one of its parts is used again.
    """
    parts = [[trunk[0]]]
    for step in trunk[1:]:
        last = parts[-1][-1]
        same = step.home and (step.home, step.call) == (last.home, last.call)
        turns = step.turned and any(s.turned for s in parts[-1][1:])
        again = step.call is None and step.part and step.part in [s.part for s in parts[-1]]
        if same and step.layout is not None and not turns and not again:
            parts[-1].append(step)
        else:
            parts.append([step])
    return parts


def stage_numbers(shapes: Sequence[tuple[int, ...]], moved: Sequence[bool] | None = None) -> list[int]:
    """The stage of every block: one more where channels or places of the features change.

    A shape does not tell which of its axes are the channels: ``[128, 64]`` after ``[64, 128]`` may be
    the same features in another order, or twice the channels at half the length. What lies between the
    two blocks tells.

    Args:
        shapes: of one input's features after each block, without the axis of the inputs: channels come
            first or last, as in ``[C, H, W]``, ``[H, W, C]`` or ``[tokens, C]``.
        moved: for each block, whether its x has other features than the block before it made; such a
            block begins a stage if its shape is another. None if that is not known: another shape then
            is the same stage only if it can be nothing but the same features in another order.

    Returns:
        Numbers from 0.

    >>> stage_numbers([(16, 32, 32), (16, 32, 32), (64, 16, 16), (16, 16, 64), (256, 64)])
    [0, 0, 1, 1, 1]
    """
    numbers = [0]
    for i in range(1, len(shapes)):
        old, new = shapes[i - 1], shapes[i]
        same = old == new
        if not same and (moved is None or not moved[i]):
            same = rearranged(old, new, sure=moved is None)
        numbers.append(numbers[-1] + (not same))
    return numbers


def rearranged(old: tuple[int, ...], new: tuple[int, ...], sure: bool) -> bool:
    """Whether a shape can be another one's features in another order: as many channels and places.

    Args:
        old, new: shapes of one input's features.
        sure: leave out what may as well be other features: two axes that change places, and channels
            last beside places that are grouped in another way.
    """
    if prod(old) != prod(new) or not old or not new:
        return False
    first_or_last = lambda shape: ((shape[0], shape[1:]), (shape[-1], shape[:-1]))
    (first, behind), (last, before) = first_or_last(old)
    (new_first, new_behind), (new_last, new_before) = first_or_last(new)
    if first == new_first or (last == new_last and not (sure and len(old) == len(new))):
        return True
    if sure and len(old) == len(new) == 2:
        return False
    alike = lambda one, other: one == other or 1 in (len(one), len(other))  # or flattened
    first_to_last = first == new_last and alike(behind, new_before)
    return first_to_last or (last == new_first and alike(before, new_behind))


def unique(names: list[str]) -> list[str]:
    """Names with a number after a colon where one occurs more than once."""
    names = [name or "model" for name in names]
    numbers: dict[str, int] = {}
    found = []
    for name in names:
        numbers[name] = numbers.get(name, 0) + 1
        found.append(f"{name}:{numbers[name]}" if names.count(name) > 1 else name)
    return found


def _list_element(path: Path) -> Path:
    """``layer.0`` of ``layer.0.attention``: up to the last part that is a number."""
    ends = [n for n, part in enumerate(path, 1) if part.isdigit()]
    return path[: ends[-1]] if ends else ()


def _submodule(model: nn.Module, path: Path) -> nn.Module | None:
    try:
        return model.get_submodule(".".join(path))
    except AttributeError:  # the path of a compiled module leaves a part out
        return None


def _numbered(part: str) -> bool:
    return any(letter.isdigit() for letter in part)
