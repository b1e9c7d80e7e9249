"""Where a residual network adds: the graph of one forward pass.

The graph is independent of the model's class. Each operation that torch dispatches is a node, numbered
in the order of execution. The node of a tensor is that of the last operation that wrote to its storage,
so views share a node and in-place operations renew it. Only tensors that depend on the input have
nodes; parameters, positions and masks have none. Kernels that torch does not dispatch, such as Triton's,
are not visible, but the memory that they fill is.

An addition of two tensors of one shape is a residual step if the latest common ancestor of the operands

- is one of them: that operand is the state x, the other one the branch f(x);
- is neither, and one operand is itself a sum that began at an ancestor of the other: the sum is x, as in
  ``x + attention(h) + mlp(h)``;
- is neither, and one operand lies under fewer convolutions and matrix products: that operand is x, the
  projected shortcut of the first block of a stage.

A branch of pointwise operations only does not count (``x + 0.04 * x**3`` inside a GELU), nor does the
same state some steps later (``x + x_0``, where a network mixes in its embedding again). A gate is a
multiplication of the branch by a broadcast tensor that varies from input to input, or by a sigmoid of
any size, if only views, copies and constant factors lie between it and the addition. A factor deeper
inside f is not a gate, nor is a learnt scale or a normalisation.
"""

import heapq
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from attractor.residual.axes import axis_order, sample_axis_or_none, sample_shape
from attractor.residual.dispatch import (
    Calls,
    Counted,
    Stack,
    extent_of,
    is_feature,
    is_scalar,
    kind_of,
    split_path,
    storage_of,
    tensors_in,
)
from attractor.residual.trunk import (
    Addition,
    BranchFactor,
    Granularity,
    MeasurementPlan,
    block_path,
    common_path,
    make_measurement_plan,
)

Nodes: TypeAlias = set[int]
Sides: TypeAlias = tuple[Nodes, Nodes]

SUMS = {"add", "add_", "sub", "sub_"}
FUSED = {"addcmul", "addcmul_", "addcdiv", "addcdiv_", "lerp", "lerp_", "addmm", "addmm_", "baddbmm",
         "baddbmm_", "addbmm", "addbmm_"}  # the first operand is x; f is not an operand  # fmt: skip
PRODUCTS = {"mul": 0, "mul_": 0, "addcmul": 1, "addcmul_": 1}  # position of the first of two factors
COPIES = {"clone", "_to_copy", "copy"}
MOVES = {"cat", "stack", "index", "index_select", "gather", "roll", "flip", "constant_pad_nd",
         "slice_scatter", "select_scatter", "repeat", "masked_fill", "where"} | COPIES  # fmt: skip
NORMS = {"rsqrt", "rsqrt_", "reciprocal", "pow", "div", "sqrt"}  # their outputs are not gates
SIGMOIDS = {"sigmoid", "sigmoid_", "hardsigmoid", "hardsigmoid_"}
LEARNT = ("conv", "mm", "attention", "linear", "unseen")  # parts of the names of layers with weights
JOINS = {"cat", "stack", "constant_pad_nd", "repeat"}  # these may add channels
POOLS = ("pool", "upsample", "pixel_", "unfold", "col2im")  # these change the number of positions
MEMORY = 16  # recent sums, and recent products with gates, that are held to compare the order of axes


class Graph(Counted):
    """The operations of one forward pass.

    Enter the graph as a context manager, call the model, leave it, and call `plan`.

    Args:
        calls: The calls of the model's modules.
        inputs: Tensors that vary from input to input, with their names.
        size: Number of inputs.
        within: Path of a module. Only additions inside it are steps.
        related: Treat the inputs as functions of one tensor, as the arguments of a block in a network
            are. One of them may then be the shortcut of another.
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
        self.calls, self.size, self.within = calls, size, split_path(within)
        self.parents: list[tuple[int, ...]] = []  # this and the following lists have one entry per node
        self.operation: list[str] = []
        self.sources: list[frozenset[str]] = []  # names of the inputs that it depends on
        self.where: list[Stack] = []
        self.depth: list[int] = []  # number of layers with weights on the longest path from the input
        self.work: list[int] = []  # the same for operations that are neither pointwise nor moves
        self.latest: list[int] = []  # the latest step on any path from the input, or -1
        self.gates: dict[int, tuple[BranchFactor, ...]] = {}  # node -> gates at its end
        self.steps: dict[int, Addition] = {}  # node -> residual step
        self.digests: dict[int, int] = {}  # operation -> hash of the operations up to it
        self.writes: dict[int, list[int]] = {}  # node -> operations that overwrote its storage
        self._sums: dict[int, Tensor] = {}  # recent steps
        self._products: dict[int, Tensor] = {}  # recent products with gates
        self._node_of_storage: dict[int, int] = {}
        self._references: list[StorageWeakRef] = []  # these prevent the reuse of a storage's address
        self._uninitialised: set[int] = set()  # storages without a visible write
        origin = {self._add_node("input", set())} if related else set()
        for name, tensor in inputs:
            node = self.node_of(tensor)  # one tensor may have several names
            names = {name} if node is None else {name, *self.sources[node]}
            self._register(tensor, self._add_node("input", origin, sources=frozenset(names)))

    def node_of(self, tensor: Any) -> int | None:
        """Return the node of a tensor, or None if it does not depend on the input."""
        return self._node_of_storage.get(storage_of(tensor)) if isinstance(tensor, Tensor) else None

    def plan(self, granularity: Granularity) -> MeasurementPlan | None:
        """Return the trunk in blocks, or None if there is no residual step."""
        if not self.steps:
            return None
        plan = make_measurement_plan(
            self.steps, granularity, self.calls.model, self.digests, self.writes
        )
        return replace(plan, end=self.digest, sources=self.sources[plan.blocks[0].first.state_node])

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Examine the operands, run the operation, and add a node for its outputs."""
        kind = kind_of(func)
        name = kind.name
        tensors = tensors_in([*args, *kwargs.values()])
        storages = [storage_of(t) for t in tensors]
        targets = [storage_of(t) for t in kind.targets(args, kwargs)]
        if self._uninitialised and not kind.view:
            self._add_hidden_kernels(storages, targets)
        nodes = [self._node_of_storage.get(storage) for storage in storages]
        varies = any(node is not None for node in nodes)
        step = self._step(name, args) if varies else None
        gates = self._gates_of(name, args) if varies else ()
        out = func(*args, **kwargs)
        node = None
        if varies and not name.endswith("_like") and not name.startswith("new_"):
            parents = {n for n, t in zip(nodes, tensors) if n is not None and is_feature(t)}
            sources = frozenset().union(*(self.sources[n] for n in nodes if n is not None))
            node = self._add_node(name, parents, kind.pointwise, sources)
        for tensor in tensors_in([out]):
            storage = storage_of(tensor)
            if storage not in storages:  # new memory
                if node is not None:
                    self._register(tensor, node)
                elif "empty" in name and tensor.numel():
                    self._register(tensor, None)
                    self._uninitialised.add(storage)
        for storage in targets if node is not None else ():
            if storage in self._node_of_storage:
                self.writes.setdefault(self._node_of_storage[storage], []).append(self.index)
            self._node_of_storage[storage] = node  # type: ignore[assignment]
        if node is not None:
            self._record(node, name, out, step, gates)
        return out

    def _add_hidden_kernels(self, storages: list[int], targets: list[int]) -> None:
        """Add nodes for memory that is read but was never visibly written.

        A kernel that torch does not dispatch must have filled it. Its operands are assumed to be the
        inputs of the innermost running module.
        """
        for storage in self._uninitialised.intersection(storages):
            self._uninitialised.discard(storage)
            inputs = ({self.node_of(t) for t in tensors} - {None} for tensors in self.calls.inputs[::-1])
            parents = next((nodes for nodes in inputs if nodes), None)
            if storage not in targets and parents is not None:
                sources = frozenset().union(*(self.sources[n] for n in parents if n is not None))
                node = self._add_node("unseen", parents, sources=sources)  # type: ignore[arg-type]
                self._node_of_storage[storage] = node

    def _record(
        self, node: int, name: str, out: Any, step: Addition | None, gates: tuple[BranchFactor, ...]
    ) -> None:
        """Record a node as a residual step or as a product with gates, if it is one."""
        if step is not None and step.shape == sample_shape(tuple(out.shape), self.size):
            if name in FUSED:
                same_order = tuple(range(out.dim()))
                step = replace(step, gates=tuple(replace(gate, order=same_order) for gate in gates))
            self.steps[node] = replace(step, node=node)
            self.latest[node] = node
            recent = self._sums
        elif gates and name not in FUSED:
            self.gates[node] = gates
            recent = self._products
        else:
            return
        self.digests[self.index] = self.digest
        recent[node] = out
        if len(recent) > MEMORY:
            del recent[next(iter(recent))]

    def _add_node(
        self,
        name: str,
        parents: Nodes,
        pointwise: bool = False,
        sources: frozenset[str] = frozenset(),
    ) -> int:
        has_weights = any(part in name for part in LEARNT)
        works = has_weights or not (pointwise or name in MOVES or name == "input")
        self.depth.append(max((self.depth[p] for p in parents), default=0) + has_weights)
        self.work.append(max((self.work[p] for p in parents), default=0) + works)
        self.latest.append(max((self.latest[p] for p in parents), default=-1))
        self.parents.append(tuple(parents))
        self.operation.append(name)
        self.sources.append(sources)
        self.where.append(tuple(self.calls.stack))
        return len(self.parents) - 1

    def _register(self, tensor: Tensor, node: int | None) -> None:
        """Register new memory, with a node if it has one, so that its address is not used again."""
        storage = storage_of(tensor)
        if storage > 0:
            self._references.append(StorageWeakRef(tensor.untyped_storage()))
        if node is not None:
            self._node_of_storage[storage] = node

    def _step(self, name: str, args: tuple[Any, ...]) -> Addition | None:
        """Return the residual step that an operation would be, before it runs."""
        summands = (
            self._sum(args, name) if name in SUMS else self._fused(args) if name in FUSED else None
        )
        if summands is None:
            return None
        state, x, f, sides = summands
        branch = sides[1 - state]
        place = self.calls.path
        paths = [self.where[n][-1][0] if self.where[n] else () for n in branch | {f}]
        branch_path = common_path([path for path in paths if path != place] or paths)
        home = block_path(place, branch_path)
        if self.within and home[: len(self.within)] != self.within:
            return None
        previous = self.latest[x]
        return Addition(
            self.index,
            state,
            branch=1 - state if name in SUMS else None,
            node=-1,
            state_node=x,
            previous=previous,
            length=self.steps[previous].length + 1 if previous >= 0 else 1,
            inside=frozenset(branch & self.steps.keys()),
            gates=self._gates_at_end(f, args[1 - state]),
            projected=bool(sides[state]) and x not in self.steps,
            shape=sample_shape(tuple(args[0].shape), self.size),
            axis=sample_axis_or_none(tuple(args[0].shape), self.size),
            order=axis_order(self._sums.get(previous), args[state]),
            changed=previous >= 0 and self._features_change(previous, x),
            home=home,
            branch_path=branch_path,
            stack=(*self.calls.stack, *self.where[f]),
        )

    def _gates_at_end(self, f: int, branch: Any) -> tuple[BranchFactor, ...]:
        """Return the gates at the end of a branch, with the order of their axes in the sum."""
        gates = self.gates.get(f, ())
        order = axis_order(self._products.get(f), branch) if gates else None
        return tuple(replace(gate, order=order) for gate in gates)

    def _sum(self, args: tuple[Any, ...], name: str) -> tuple[int, int, int, Sides] | None:
        """For x + f: the position of x, the nodes of x and f, and the nodes on both sides."""
        if len(args) < 2 or not (is_feature(args[0]) and is_feature(args[1])):
            return None
        a, b = self.node_of(args[0]), self.node_of(args[1])
        if args[0].shape != args[1].shape or a is None or b is None or a == b:
            return None
        roles = self._roles(a, b)
        if roles is None or (name.startswith("sub") and roles[0] == 1):
            return None
        state, sides = roles
        return (0, a, b, sides) if state == 0 else (1, b, a, sides)

    def _fused(self, args: tuple[Any, ...]) -> tuple[int, int, int, Sides] | None:
        """The same for an operation that adds a function of its other operands to the first one."""
        x = self.node_of(args[0])
        for tensor in args[1:] if x is not None and is_feature(args[0]) else ():
            if x is not None and (f := self.node_of(tensor)) is not None and f != x:
                roles = self._roles(x, f)
                if roles is not None and roles[0] == 0:
                    return 0, x, f, roles[1]
        return None

    def _roles(self, a: int, b: int) -> tuple[int, Sides] | None:
        """Return which of two summands is the state, and the nodes on both sides of the graph."""
        ancestor, sides = self._common_ancestor(a, b)
        if ancestor is None or (self._is_state(a, ancestor) and self._is_state(b, ancestor)):
            return None
        if ancestor in (a, b):
            return (0 if ancestor == a else 1), sides
        for state, (sum_, other) in enumerate(((a, b), (b, a))):
            if self._began_above(sum_, other):
                return state, sides
        return None if self.depth[a] == self.depth[b] else (int(self.depth[a] > self.depth[b]), sides)

    def _is_state(self, node: int, ancestor: int) -> bool:
        """Whether a node is the state of an ancestor, possibly some steps later, and not a branch."""
        while (step := self.latest[node]) > ancestor:
            if self.depth[node] > self.depth[step]:
                return False
            node = self.steps[step].state_node
        if node < ancestor or self.work[node] != self.work[ancestor]:
            return False
        return self._common_ancestor(node, ancestor)[0] == ancestor

    def _features_change(self, previous: int, x: int) -> bool:
        """Whether layers with weights, pooling, padding or concatenation lie between two nodes."""
        _, (between, _) = self._common_ancestor(x, previous)
        changes = lambda name: name in JOINS or any(part in name for part in (*LEARNT, *POOLS))
        return any(changes(self.operation[node]) for node in between)

    def _began_above(self, sum_: int, other: int) -> bool:
        """Whether a chain of sums began at an ancestor of the other node."""
        while sum_ in self.steps:
            sum_ = self.steps[sum_].state_node
            if sum_ <= other and self._common_ancestor(sum_, other)[0] == sum_:
                return True
        return False

    def _common_ancestor(self, a: int, b: int) -> tuple[int | None, Sides]:
        """Return the latest common ancestor, and its descendants on a's side and on b's side.

        Nodes are visited from the latest to the earliest, so all descendants of a node come before it.
        """
        sides: Sides = (set(), set())
        if a == b:
            return a, sides
        side = {a: 1, b: 2}  # bits
        heap = sorted((-a, -b))
        while heap:
            node = -heapq.heappop(heap)
            if side[node] == 3:
                return node, (self._descendants(node, sides[0]), self._descendants(node, sides[1]))
            sides[side[node] - 1].add(node)
            for parent in self.parents[node]:
                if parent not in side:
                    heapq.heappush(heap, -parent)
                side[parent] = side.get(parent, 0) | side[node]
        return None, sides

    def _descendants(self, ancestor: int, nodes: Nodes) -> Nodes:
        """Return those of the nodes that depend on the ancestor; a condition from elsewhere does not."""
        descendants = {ancestor}
        for node in sorted(nodes):
            if not descendants.isdisjoint(self.parents[node]):
                descendants.add(node)
        return descendants - {ancestor}

    def _gates_of(self, name: str, args: tuple[Any, ...]) -> tuple[BranchFactor, ...]:
        """Return the gates at the end of an operation's output."""
        if name in COPIES:
            return self._known_gates(args[0])
        if name not in PRODUCTS:
            return ()
        first = PRODUCTS[name]
        for branch, factor in ((first, first + 1), (first + 1, first)):
            gates = self._known_gates(args[branch])
            if gates and is_scalar(args[factor]) and self.node_of(args[factor]) is None:
                return (*gates, BranchFactor(self.index, branch, factor, scalar=True))
            if self._is_gate(args[branch], args[factor]):
                axis = sample_axis_or_none(tuple(args[branch].shape), self.size)
                return (*gates, BranchFactor(self.index, branch, factor, axis=axis))
        return ()

    def _known_gates(self, tensor: Any) -> tuple[BranchFactor, ...]:
        node = self.node_of(tensor)
        return () if node is None else self.gates.get(node, ())

    def _is_gate(self, f: Any, factor: Any) -> bool:
        """Whether a factor depends on the input, is not a norm, and is smaller than f or a sigmoid."""
        if not (is_feature(f) and is_feature(factor)) or self.node_of(f) is None:
            return False
        node = self.node_of(factor)
        if node is None or self.operation[node] in NORMS or f.dim() < 2 or factor.dim() != f.dim():
            return False
        fits = factor.shape[0] == f.shape[0] and torch.broadcast_shapes(f.shape, factor.shape) == f.shape
        return fits and (extent_of(factor) < extent_of(f) or self._is_sigmoid(node))

    def _is_sigmoid(self, node: int) -> bool:
        """Whether a node is a sigmoid, possibly times a constant."""
        while self.operation[node] in {"mul", *COPIES} and len(self.parents[node]) == 1:
            (node,) = self.parents[node]
        return self.operation[node] in SIGMOIDS
