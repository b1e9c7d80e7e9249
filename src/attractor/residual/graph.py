"""Where a residual network adds: the graph of one forward pass.

Nothing here knows a model. Every operation that torch dispatches is a node, numbered in the order of
time; a tensor's node is that of the last operation that wrote to its storage, so views share it and
in-place operations renew it. Only what varies with the input has a node: parameters, positions and
masks have none. Kernels that torch does not dispatch, such as Triton's, are not seen; what they fill is.

An addition of two tensors of one shape is a residual step if the operands' latest common ancestor is

- one of them: that one is the state x, the other the branch f(x);
- neither, and one operand is itself a sum that began at an ancestor of the other: the sum is x, as in
  ``x + attention(h) + mlp(h)``;
- neither, and one operand lies under fewer convolutions and matrix products: that one is x, the
  projected shortcut of a stage's first block.

A branch without any operation beyond pointwise ones is none (``x + 0.04 * x**3`` inside a GELU), nor is
the same state some steps later (``x + x_0``, as where a network mixes in its embedding again). A gate is
a multiplication of the branch by a broadcast tensor that varies from input to input (or, if it is a
sigmoid, by one as large as f), with nothing but views, copies and constant numbers between it and the
addition: a gate deep inside f is none, nor is a learnt scale, nor a norm.
"""

import heapq
from collections.abc import Iterable
from dataclasses import replace
from itertools import permutations
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from attractor.residual.dispatch import (
    Calls,
    Counted,
    Stack,
    extent_of,
    is_feature,
    is_scalar,
    kind_of,
    storage_of,
    tensors_in,
)
from attractor.residual.trunk import (
    Addition,
    Gate,
    Granularity,
    Plan,
    block_path,
    common_path,
    make_plan,
)

Sides: TypeAlias = tuple[set[int], set[int]]

SUMS = {"add", "add_", "sub", "sub_"}
FUSED = {"addcmul", "addcmul_", "addcdiv", "addcdiv_", "lerp", "lerp_", "addmm", "addmm_", "baddbmm",
         "baddbmm_", "addbmm", "addbmm_"}  # x comes first, f is no operand  # fmt: skip
PRODUCTS = {"mul": 0, "mul_": 0, "addcmul": 1, "addcmul_": 1}  # where their two factors begin
COPIES = {"clone", "_to_copy", "copy"}
MOVES = {"cat", "stack", "index", "index_select", "gather", "roll", "flip", "constant_pad_nd",
         "slice_scatter", "select_scatter", "repeat", "masked_fill", "where"} | COPIES  # fmt: skip
NORMS = {"rsqrt", "rsqrt_", "reciprocal", "pow", "div", "sqrt"}  # a factor made by these is no gate
SIGMOIDS = {"sigmoid", "sigmoid_", "hardsigmoid", "hardsigmoid_"}
LEARNT = ("conv", "mm", "attention", "linear", "unseen")  # in names of what makes a branch deeper
JOINS = {"cat", "stack", "constant_pad_nd", "repeat"}  # these may add channels
POOLS = ("pool", "upsample", "pixel_", "unfold", "col2im")  # in names of what changes places
KEPT = 16  # sums, and gated products, that are held while the graph is made, to see how axes lie later


class Graph(Counted):
    """The operations of one pass: enter it, call the model, leave it, and ask for the `plan`.

    Args:
        calls: the model's stack of calls.
        inputs: tensors that vary from input to input, with their names.
        size: how many inputs there are.
        within: keep to additions in the module of that path.
        related: take all inputs to come from one tensor, as those of a block inside a network do: one
            may then be the shortcut of another.
    """

    def __init__(
        self,
        calls: Calls,
        inputs: Iterable[tuple[str, Tensor]],
        size: int,
        within: str = "",
        related: bool = False,
    ) -> None:
        super().__init__()
        self.calls, self.size = calls, size
        self.within = tuple(within.split(".")) if within else ()
        self.parents: list[tuple[int, ...]] = []
        self.made_by: list[str] = []
        self.sources: list[frozenset[str]] = []  # the inputs that a node was made from
        self.where: list[Stack] = []
        self.depth: list[int] = []  # convolutions and products on the longest way here
        self.work: list[int] = []  # the same for all that is neither pointwise nor a move
        self.latest: list[int] = []  # the last step on any way here, or -1
        self.gated: dict[int, tuple[Gate, ...]] = {}
        self.steps: dict[int, Addition] = {}
        self.digests: dict[int, int] = {}
        self.written: dict[int, list[int]] = {}
        self._sums: dict[int, Tensor] = {}  # the last steps
        self._products: dict[int, Tensor] = {}  # the last that passed a gate
        self._owner: dict[int, int] = {}  # storage -> node
        self._alive: list[StorageWeakRef] = []  # as long as these are here, no storage's number returns
        self._blank: set[int] = set()  # storages that nothing was written to
        origin = {self._node("input", set())} if related else set()
        for name, tensor in inputs:
            known = self._of(tensor)  # one tensor may have several names
            names = {name} if known is None else {name, *self.sources[known]}
            self._own(tensor, self._node("input", origin, sources=frozenset(names)))

    def plan(self, granularity: Granularity) -> Plan | None:
        """The trunk in blocks; None if nothing was added to what it came from."""
        if not self.steps:
            return None
        plan = make_plan(self.steps, granularity, self.calls.model, self.digests, self.written)
        return replace(plan, end=self.digest, sources=self.sources[plan.blocks[0].first.state_node])

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Look at the operands, run the operation, number its outputs."""
        kind = kind_of(func)
        name = kind.name
        tensors = tensors_in([*args, *kwargs.values()])
        keys = [storage_of(t) for t in tensors]
        written = [storage_of(t) for t in kind.targets(args, kwargs)]
        if self._blank and not kind.view:
            self._fill_in(keys, written)
        nodes = [self._owner.get(key) for key in keys]
        varies = any(node is not None for node in nodes)
        step = self._step(name, args) if varies else None
        gates = self._gates(name, args) if varies else ()
        out = func(*args, **kwargs)
        node = None
        if varies and not name.endswith("_like") and not name.startswith("new_"):
            parents = {n for n, t in zip(nodes, tensors) if n is not None and is_feature(t)}
            sources = frozenset().union(*(self.sources[n] for n in nodes if n is not None))
            node = self._node(name, parents, kind.pointwise, sources)
        for tensor in tensors_in([out]):
            key = storage_of(tensor)
            if key not in keys:  # new memory
                if node is not None:
                    self._own(tensor, node)
                elif "empty" in name and tensor.numel():
                    self._own(tensor, None)
                    self._blank.add(key)
        for key in written if node is not None else ():
            if key in self._owner:
                self.written.setdefault(self._owner[key], []).append(self.index)
            self._owner[key] = node  # type: ignore[assignment]
        if node is not None:
            self._note(node, name, out, step, gates)
        return out

    def _fill_in(self, keys: list[int], written: list[int]) -> None:
        """Memory that nobody was seen writing to, and that is read, was filled by a kernel of its own.

        It is taken to depend on what the innermost module was given.
        """
        for key in self._blank.intersection(keys):
            self._blank.discard(key)
            known = [{self._of(t) for t in tensors} - {None} for tensors in self.calls.inputs[::-1]]
            parents = next((found for found in known if found), None)
            if key not in written and parents is not None:
                sources = frozenset().union(*(self.sources[n] for n in parents if n is not None))
                self._owner[key] = self._node("unseen", parents, sources=sources)  # type: ignore[arg-type]

    def _note(
        self, node: int, name: str, out: Any, step: Addition | None, gates: tuple[Gate, ...]
    ) -> None:
        """Keep what an operation turned out to be."""
        if step is not None and step.shape == sample_shape(tuple(out.shape), self.size):
            as_it_is = tuple(range(out.dim()))
            fused = tuple(replace(gate, layout=as_it_is) for gate in gates)
            own = fused if name in FUSED else step.gates
            self.steps[node] = replace(step, node=node, gates=own)
            self.latest[node] = node
            recent = self._sums
        elif gates and name not in FUSED:
            self.gated[node] = gates
            recent = self._products
        else:
            return
        self.digests[self.index] = self.digest
        recent[node] = out
        if len(recent) > KEPT:
            del recent[next(iter(recent))]

    def _node(
        self,
        name: str,
        parents: set[int],
        pointwise: bool = False,
        sources: frozenset[str] = frozenset(),
    ) -> int:
        depth, work, latest = 0, 0, -1
        for p in parents:
            depth, work = max(depth, self.depth[p]), max(work, self.work[p])
            latest = max(latest, self.latest[p])
        learnt = any(part in name for part in LEARNT)
        works = learnt or not (pointwise or name in MOVES or name == "input")
        self.depth.append(depth + learnt)
        self.work.append(work + works)
        self.latest.append(latest)
        self.parents.append(tuple(parents))
        self.made_by.append(name)
        self.sources.append(sources)
        self.where.append(tuple(self.calls.stack))
        return len(self.parents) - 1

    def _own(self, tensor: Tensor, node: int | None) -> None:
        """A node for new memory, or None; its number is not given to other memory any more."""
        key = storage_of(tensor)
        if key > 0:
            self._alive.append(StorageWeakRef(tensor.untyped_storage()))
        if node is not None:
            self._owner[key] = node

    def _of(self, tensor: Any) -> int | None:
        return self._owner.get(storage_of(tensor)) if isinstance(tensor, Tensor) else None

    def _step(self, name: str, args: tuple[Any, ...]) -> Addition | None:
        """The residual step that this operation is, before it runs."""
        found = self._sum(args, name) if name in SUMS else self._fused(args) if name in FUSED else None
        if found is None:
            return None
        state, x, f, sides = found
        branch = sides[1 - state]
        own = self.calls.path
        paths = [self.where[n][-1][0] if self.where[n] else () for n in branch | {f}]
        home = block_path(own, common_path([path for path in paths if path != own] or paths))
        if self.within and home[: len(self.within)] != self.within:
            return None
        before = self.latest[x]
        return Addition(
            self.index,
            state,
            branch=1 - state if name in SUMS else None,
            node=-1,
            state_node=x,
            before=before,
            length=self.steps[before].length + 1 if before >= 0 else 1,
            inside=frozenset(branch & self.steps.keys()),
            gates=self._laid(f, args[1 - state]),
            projected=bool(sides[state]) and x not in self.steps,
            shape=sample_shape(tuple(args[0].shape), self.size),
            axis=known_axis(tuple(args[0].shape), self.size),
            layout=_layout(self._sums.get(before), args[state]),
            moved=before >= 0 and self._moved(before, x),
            home=home,
            stack=(*self.calls.stack, *self.where[f]),
        )

    def _laid(self, f: int, branch: Any) -> tuple[Gate, ...]:
        """The gates of a branch, and how its axes lie in the sum."""
        found = self.gated.get(f, ())
        layout = _layout(self._products.get(f), branch) if found else None
        return tuple(replace(gate, layout=layout) for gate in found)

    def _sum(self, args: tuple[Any, ...], name: str) -> tuple[int, int, int, Sides] | None:
        """Of a sum of two tensors: which is the state, the nodes of state and branch, and between."""
        if len(args) < 2 or not (is_feature(args[0]) and is_feature(args[1])):
            return None
        a, b = self._of(args[0]), self._of(args[1])
        if args[0].shape != args[1].shape or a is None or b is None or a == b:
            return None
        found = self._roles(a, b)
        if found is None or (name.startswith("sub") and found[0] == 1):
            return None
        state, sides = found
        return (0, a, b, sides) if state == 0 else (1, b, a, sides)

    def _fused(self, args: tuple[Any, ...]) -> tuple[int, int, int, Sides] | None:
        """The same of an operation that adds something made from its other operands to the first."""
        x = self._of(args[0])
        for tensor in args[1:] if x is not None and is_feature(args[0]) else ():
            if x is not None and (f := self._of(tensor)) is not None and f != x:
                found = self._roles(x, f)
                if found is not None and found[0] == 0:
                    return 0, x, f, found[1]
        return None

    def _roles(self, a: int, b: int) -> tuple[int, Sides] | None:
        """Which of two summands is the state, and the nodes on either side since they parted."""
        at, sides = self._between(a, b)
        if at is None:
            return None
        if self._moved_on(a, at) and self._moved_on(b, at):
            return None
        if at in (a, b):
            return (0 if at == a else 1), sides
        for state, (sum_, other) in enumerate(((a, b), (b, a))):
            if self._began_above(sum_, other):
                return state, sides
        if self.depth[a] == self.depth[b]:
            return None
        return (0 if self.depth[a] < self.depth[b] else 1), sides

    def _moved_on(self, node: int, at: int) -> bool:
        """Whether a node is the state `at`, perhaps some steps later, and so no branch made from it."""
        while (step := self.latest[node]) > at:
            if self.depth[node] > self.depth[step]:
                return False
            node = self.steps[step].state_node
        return node >= at and self.work[node] == self.work[at] and self._between(node, at)[0] == at

    def _moved(self, before: int, x: int) -> bool:
        """Whether more than pointwise operations, norms and another order of axes lies between nodes."""
        _, (since, _) = self._between(x, before)
        changes = lambda name: name in JOINS or any(part in name for part in (*LEARNT, *POOLS))
        return any(changes(self.made_by[node]) for node in since)

    def _began_above(self, sum_: int, other: int) -> bool:
        """Whether a sum of steps started from an ancestor of the other node."""
        while sum_ in self.steps:
            sum_ = self.steps[sum_].state_node
            if sum_ <= other and self._between(sum_, other)[0] == sum_:
                return True
        return False

    def _between(self, a: int, b: int) -> tuple[int | None, Sides]:
        """The latest common ancestor, and all nodes made from it on a's side and on b's.

        Nodes are taken from the latest: when one comes up, everything made from it has been seen.
        """
        seen: Sides = (set(), set())
        if a == b:
            return a, seen
        side = {a: 1, b: 2}
        heap = sorted((-a, -b))
        while heap:
            node = -heapq.heappop(heap)
            if side[node] == 3:
                return node, (self._made_from(node, seen[0]), self._made_from(node, seen[1]))
            seen[side[node] - 1].add(node)
            for parent in self.parents[node]:
                if parent not in side:
                    heapq.heappush(heap, -parent)
                side[parent] = side.get(parent, 0) | side[node]
        return None, seen

    def _made_from(self, at: int, nodes: set[int]) -> set[int]:
        """Those of the nodes that come from `at`; a condition made elsewhere is no part of a branch."""
        found = {at}
        for node in sorted(nodes):
            if not found.isdisjoint(self.parents[node]):
                found.add(node)
        return found - {at}

    def _gates(self, name: str, args: tuple[Any, ...]) -> tuple[Gate, ...]:
        """The gates that what this operation makes has passed last."""
        if name in COPIES:
            return self.gated.get(self._known(args[0]), ())
        if name not in PRODUCTS:
            return ()
        first = PRODUCTS[name]
        for branch, factor in ((first, first + 1), (first + 1, first)):
            known = self.gated.get(self._known(args[branch]), ())
            if known and is_scalar(args[factor]) and self._of(args[factor]) is None:
                return (*known, Gate(self.index, branch, factor, scalar=True))
            if self._is_gate(args[branch], args[factor]):
                axis = known_axis(tuple(args[branch].shape), self.size)
                return (*known, Gate(self.index, branch, factor, axis=axis))
        return ()

    def _known(self, tensor: Any) -> int:
        node = self._of(tensor)
        return -1 if node is None else node

    def _is_gate(self, f: Any, factor: Any) -> bool:
        """Whether a factor varies, has f's inputs, does not normalise, and is smaller or a sigmoid."""
        if not (is_feature(f) and is_feature(factor)) or self._of(f) is None:
            return False
        node = self._of(factor)
        if node is None or self.made_by[node] in NORMS or f.dim() < 2 or factor.dim() != f.dim():
            return False
        fits = factor.shape[0] == f.shape[0] and torch.broadcast_shapes(f.shape, factor.shape) == f.shape
        return fits and (extent_of(factor) < extent_of(f) or self._is_sigmoid(node))

    def _is_sigmoid(self, node: int) -> bool:
        """Whether a node is a sigmoid, perhaps times a number: a gate as large as f is known by it."""
        while self.made_by[node] in {"mul", *COPIES} and len(self.parents[node]) == 1:
            (node,) = self.parents[node]
        return self.made_by[node] in SIGMOIDS


def sample_axis(shape: tuple[int, ...], size: int, seen: int | None = None) -> int:
    """Which axis counts the inputs, or -1 if each has its part of the first one.

    The first axis; or the second of three, ``[tokens, batch, dim]``; or the first with windows or tokens
    moved into it; or any other. Where `seen`, which it was in a batch of another size, is possible, it
    is that one: as many tokens as inputs are no trap.

    Raises:
        ValueError: there is no such axis.
    """
    if seen is not None and (shape[0] % size == 0 if seen < 0 else shape[seen : seen + 1] == (size,)):
        return seen
    if shape and shape[0] == size:
        return 0
    if len(shape) == 3 and shape[1] == size:
        return 1
    if shape and shape[0] % size == 0:
        return -1
    if size in shape:
        return shape.index(size)
    raise ValueError(
        f"features of shape {list(shape)} have no axis for the {size} inputs of a batch; the model must "
        "keep its inputs apart, in the first axis if it can"
    )


def known_axis(shape: tuple[int, ...], size: int) -> int | None:
    """`sample_axis`, or None where inputs cannot be told apart."""
    try:
        return sample_axis(shape, size)
    except ValueError:
        return None


def sample_shape(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """The shape of one input's features; all of it where inputs cannot be told apart."""
    axis = known_axis(shape, size)
    if axis is None:
        return shape
    return (shape[0] // size, *shape[1:]) if axis < 0 else shape[:axis] + shape[axis + 1 :]


def _layout(old: Tensor | None, new: Tensor) -> tuple[int, ...] | None:
    """The order of old's axes in which its numbers are new's; None if there is no such order."""
    if old is None or old.numel() != new.numel():
        return None
    for order in permutations(range(1, old.dim())) if old.dim() < 6 else ():  # as it is comes first
        turned = old.permute(0, *order)
        possible = turned.shape == new.shape or old.shape != new.shape
        if possible and torch.equal(turned.reshape(new.shape), new):
            return (0, *order)
    # Normalised on the way: taken to lie as before, also [batch, tokens, dim] as [batch * tokens, dim].
    flat = old.dim() + new.dim() == 5 and old.shape[-1] == new.shape[-1]
    return tuple(range(old.dim())) if old.shape == new.shape or flat else None
