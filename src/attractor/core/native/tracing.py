"""Functions of tensors as programs of scalars, traced again when what they read has changed."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from attractor.core.native.aten import Nodes, UntranslatableError, interpret
from attractor.core.native.scalars import Leaf, Program
from attractor.core.rates import version

_NUMBERS = count()


@dataclass(frozen=True, eq=False)
class ScalarFunction:
    """What a function computes for one trajectory.

    Attributes:
        program: The operations.
        outputs: Nodes of the numbers that the function returns.
        memory: The tensors that it reads, contiguous and in the dtype of the states.
        differentiable: Whether one of them requires a gradient.
        casts: Whether parts of the function may be computed in float32.
    """

    program: Program
    outputs: tuple[int, ...]
    memory: tuple[Tensor, ...]
    differentiable: bool = False
    casts: bool = False

    @property
    def kinds(self) -> list[str]:
        """The operations that it takes."""
        return [self.program.operations[node][0] for node in self.program.needed(self.outputs)]

    @property
    def statements(self) -> int:
        """The number of operations that are written one by one, which compilers take time for."""
        return sum(kind not in ("leaf", "constant", "dot") for kind in self.kinds)


@dataclass(frozen=True, eq=False)
class _Graph:
    """A graph that Dynamo has made, and its translation."""

    module: GraphModule
    translated: dict[Any, tuple[Program, tuple[int, ...], tuple[int, ...], bool]]


class Traced:
    """A function of tensors of trajectories, for one shape of them.

    Dynamo traces it, and checks in each call that what it has read besides its arguments is as it was:
    numbers, attributes and closures. Tensors that it reads become arguments of the program.

    Args:
        function: Called with the inputs in the order of `inputs`.
        inputs: Names of the inputs, as the leaves of the program have them. An input that is a list of
            tensors is stacked in a leading dimension.
        constants: Whether tensors that the function reads become constants of the program, which is then
            written again when they change.
        with_casts: Whether the function may compute parts in float32, which are computed in the dtype of
            the states then.
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        inputs: Sequence[str],
        constants: bool = False,
        with_casts: bool = False,
    ) -> None:
        def call(*arguments: Any) -> Tensor:
            return function(*arguments)

        # torch counts recompilations for each code object, and gives up after eight.
        code = call.__code__.replace(co_name=f"call_{next(_NUMBERS)}")
        copy = FunctionType(code, call.__globals__, closure=call.__closure__)
        self.compiled = torch.compile(copy, backend=self._backend, fullgraph=True, dynamic=False)
        self.inputs, self.constants, self.with_casts = tuple(inputs), constants, with_casts
        self.lock = threading.Lock()
        self.graph: tuple[_Graph, tuple[Tensor, ...]] | None = None
        self.reason: str | None = None

    def _backend(self, module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        graph = _Graph(module, {})
        outputs: list[Any] = []

        def run(*arguments: Any) -> Any:
            self.graph = graph, arguments
            if not outputs:
                with torch.no_grad():
                    outputs.append(module(*arguments))
            return outputs[0]

        return run

    def __call__(self, *arguments: Any) -> ScalarFunction:
        """Return the program for inputs like these, whose values have no meaning.

        Raises:
            UntranslatableError: It cannot be written, now or in an earlier call.
        """
        if self.reason is not None:
            raise UntranslatableError(self.reason)
        with self.lock, torch.no_grad():
            try:
                self.compiled(*arguments)
                assert self.graph is not None
                return self._translated(*self.graph, arguments)
            except UntranslatableError as error:
                self.reason = str(error)
                raise
            except Exception as error:  # of Dynamo, of the function, or of tracing
                self.reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise UntranslatableError(self.reason) from error
            finally:
                self.graph = None

    def _translated(
        self, graph: _Graph, tensors: Sequence[Any], arguments: Sequence[Any]
    ) -> ScalarFunction:
        """Return the program of a graph, called with these tensors for these arguments of ours."""
        places = {
            tensor.data_ptr(): (name, i if isinstance(argument, list) else None)
            for name, argument in zip(self.inputs, arguments)
            if argument is not None
            for i, tensor in enumerate(argument if isinstance(argument, list) else [argument])
        }
        own = [isinstance(x, Tensor) and x.data_ptr() in places for x in tensors]
        read = [x for x, mine in zip(tensors, own) if not mine and isinstance(x, Tensor)]
        key = tuple((x.data_ptr(), version(x)) for x in read) if self.constants else ()
        state = next(x for name, x in zip(self.inputs, arguments) if name == "u")
        if key not in graph.translated:
            graph.translated.clear()
            graph.translated[key] = self._translate(graph.module, tensors, places, own, state)
        program, outputs, used, casts = graph.translated[key]
        memory = tuple(read[i].detach().to(state.dtype).contiguous() for i in used)
        return ScalarFunction(program, outputs, memory, any(x.requires_grad for x in read), casts)

    def _translate(
        self,
        module: GraphModule,
        tensors: Sequence[Any],
        places: dict[int, tuple[str, int | None]],
        own: Sequence[bool],
        state: Tensor,
    ) -> tuple[Program, tuple[int, ...], tuple[int, ...], bool]:
        """Return the program, its outputs, the tensors that it reads, and whether it casts."""
        if not all(isinstance(x, Tensor) for x in tensors):
            raise UntranslatableError("a number that varies")
        traced = make_fx(torch.func.functionalize(module))(*tensors)
        program = Program()
        arrays = list[Nodes]()
        batch, memory = state.dim() - 1, 0
        for tensor, mine in zip(tensors, own):
            array = np.empty(tuple(tensor.shape), dtype=np.int64)
            if mine:
                name, part = places[tensor.data_ptr()]
                of_batch = 0 if tensor.dim() == 0 else batch
                for place in np.ndindex(*array.shape):
                    row, index = place[:of_batch], place[of_batch:]
                    array[place] = program.leaf(name, index if part is None else (part, *index), row)
            elif self.constants:
                for place, value in np.ndenumerate(tensor.detach().double().numpy()):
                    array[place] = program.constant(float(value))
            else:
                for i, place in enumerate(np.ndindex(*array.shape)):
                    array[place] = program.leaf("memory", (memory, i))
            memory += not mine
            arrays.append(array)
        result = interpret(traced, arrays, program, state.dtype, self.with_casts)
        if result.shape[:batch] != tuple(state.shape[:batch]):
            raise UntranslatableError("a result with another batch")
        values = (value for node in traced.graph.nodes for value in tree_leaves(node.meta.get("val")))
        casts = state.dtype != torch.float32 and any(
            isinstance(x, Tensor) and x.dtype == torch.float32 for x in values
        )
        return *_of_one_trajectory(program, result, batch), casts


def _of_one_trajectory(
    program: Program, result: Nodes, batch: int
) -> tuple[Program, tuple[int, ...], tuple[int, ...]]:
    """Return the outputs of the first trajectory, and the tensors in memory that they need.

    Raises:
        UntranslatableError: They depend on other trajectories, or others are computed in another way.
    """
    first, last = (result[(place,) * batch].reshape(-1).tolist() for place in (0, -1))
    leaves = [
        arguments[0]
        for operation, arguments in (program.operations[node] for node in program.needed(first))
        if operation == "leaf"
    ]
    if any(any(leaf.row) for leaf in leaves):
        raise UntranslatableError("a trajectory depends on others")
    if batch and not program.same(first, last):
        raise UntranslatableError("trajectories have rates of their own")
    used = sorted({leaf.place[0] for leaf in leaves if leaf.source == "memory"})
    return _renumbered(program, first, used)


def _renumbered(
    program: Program, outputs: Sequence[int], used: Sequence[int]
) -> tuple[Program, tuple[int, ...], tuple[int, ...]]:
    """Return a program of the nodes that outputs need, whose memory is the used tensors."""
    small = Program()
    new = dict[int, int]()
    for node in program.needed(outputs):
        operation, arguments = program.operations[node]
        if operation == "leaf":
            source, index, _ = arguments[0]
            index = (used.index(index[0]), *index[1:]) if source == "memory" else index
            arguments = (Leaf(source, index),)
        elif operation != "constant":
            arguments = tuple(new[argument] for argument in arguments)
        new[node] = small._add(operation, *arguments)
    return small, tuple(new[node] for node in outputs), tuple(used)


@lru_cache(maxsize=64)
def traced(
    function: Any, inputs: tuple[str, ...], constants: bool = False, with_casts: bool = False
) -> Traced:
    """Return the same `Traced` again for the same function."""
    return Traced(function, inputs, constants, with_casts)
