"""Forward functions with the call of a gate written into them.

A gate sits on f, what one part of a block returns. Where the block's forward calls that part by its
name, as in ``out = self.bn2(out)``, the source of forward is enough: the call becomes
``self.gate_branch(self.bn2(out), gate_x)``, and ``gate_x = x`` is forward's first line. The class of the
block becomes a subclass of the one it had, with this forward. The result is ordinary code without state
between calls, so that threads, copies, checkpointing, torch.fx, torch.export and torch.jit.script work
as they do without a gate.

`gated_class` returns None where the source is not available or does not show every call of the part, as
in a forward that loops over its parts, calls helper methods, or passes a part to `checkpoint`.
"""

import __future__

import ast
import inspect
import linecache
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import count
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor, nn

from attractor.residual.branch import Source

FUTURE = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
NUMBERS = count(1)  # of functions that were written

Chain = tuple[str, ...]  # bn2 of ``self.bn2``, or body and norm of ``self.body.norm``


def gate_branch(self: Any, f: Tensor, x: Tensor | None) -> Tensor:
    """The gated f, as a method of a block."""
    return self.gate(f, x)


def gate_flat_branch(self: Any, f: Tensor, x: Tensor | None) -> Tensor:
    """The gated f with one axis of places, or more than two: as gates take images, it becomes one."""
    flat = None if x is None else x.flatten(2).unsqueeze(3)
    return self.gate(f.flatten(2).unsqueeze(3), flat).reshape(f.shape)


@dataclass(frozen=True)
class Recipe:
    """What `written_class` builds a class from: a block's class, and how its forward changes.

    Attributes:
        kind: the block's class.
        ends: the names under which forward calls the part at the end of the branch.
        source: where x is before forward begins, or None if the gate does not see it.
        projections: the names under which forward calls the part of `source`.
        flat: whether the gate takes all places as one axis.
    """

    kind: type[nn.Module]
    ends: frozenset[Chain]
    source: Source | None
    projections: frozenset[Chain]
    flat: bool


def gated_class(block: nn.Module, end: str, source: Source | None, flat: bool) -> type[nn.Module] | None:
    """The class of a block whose forward calls ``self.gate``, or None if it cannot be written.

    Args:
        block: read, not changed.
        end: path of the part whose output is f; each of its calls is followed by the gate.
        source: where x is before forward begins, or None if the gate does not see it. What a part makes
            of an argument is made at once, and forward takes the result where it calls that part.
        flat: whether the gate takes all places as one axis.
    """
    if "forward" in vars(block):  # of this instance alone
        return None
    function = _definition(type(block).forward)
    if function is None:
        return None
    chains = set(_chains(function))
    of = lambda path: frozenset(c for c in chains if _resolved(block, c) is block.get_submodule(path))
    projections = of(source.part) if source is not None and source.part else frozenset()
    try:
        return written_class(Recipe(type(block), of(end), source, projections, flat))
    except CannotWriteError:
        return None


class CannotWriteError(ValueError):
    """The source of a forward does not show where the gate belongs."""


@cache
def written_class(recipe: Recipe) -> type[nn.Module]:
    """The class that a recipe describes.

    Raises:
        CannotWriteError: the source is not available or does not show every call.
    """
    original: Any = recipe.kind.forward
    names: dict[str, Any] = {
        "__module__": recipe.kind.__module__,
        "__qualname__": recipe.kind.__qualname__,
        "__doc__": recipe.kind.__doc__,
        "__reduce__": _reduce,
        "gate_recipe": recipe,
        "gate_branch": gate_flat_branch if recipe.flat else gate_branch,
        "forward": _written(original, recipe),
    }
    return type(recipe.kind.__name__, (recipe.kind,), names)


def _reduce(self: Any) -> tuple[Any, ...]:
    return _empty, (type(self).gate_recipe,), self.__getstate__()


def _empty(recipe: Recipe) -> nn.Module:
    """A block of the class of a recipe, to be filled by a copy or a pickle."""
    kind = written_class(recipe)
    return kind.__new__(kind)


def _written(original: FunctionType, recipe: Recipe) -> FunctionType:
    """A forward with the gate in it."""
    function = _definition(original)
    if function is None or not recipe.ends:
        raise CannotWriteError("the source does not show the call of the part that ends the branch")
    used = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    name = next(n for n in (f"gate_x{'_' * i}" for i in count()) if n not in used)
    writer = _Writer(function.args.args[0].arg, recipe, name)
    for i, statement in enumerate(function.body):
        function.body[i] = writer.visit(statement)
    if (
        writer.hidden
        or not writer.ends
        or (recipe.source and recipe.source.part and writer.shortcuts != 1)
    ):
        raise CannotWriteError("the source does not show every call of the part that ends the branch")
    first = ast.Assign([ast.Name(name, ast.Store())], writer.x())
    documented = ast.get_docstring(function, clean=False) is not None
    function.body.insert(int(documented), first)
    return _compiled(original, ast.fix_missing_locations(function), recipe)


def _compiled(original: FunctionType, function: ast.FunctionDef, recipe: Recipe) -> FunctionType:
    """Compile a changed definition with the globals, defaults and closure of the original function."""
    free = original.__code__.co_freevars
    body: ast.stmt = function
    if free:
        arguments = ast.arguments([], [ast.arg(n) for n in free], None, [], [], None, [])
        back = ast.Return(ast.Name(function.name, ast.Load()))
        body = ast.FunctionDef("around", arguments, [function, back], [], None)
    module = ast.fix_missing_locations(ast.Module([body], []))
    text = ast.unparse(module) + "\n"
    file = (
        f"<{recipe.kind.__module__}.{recipe.kind.__qualname__}.{function.name}, gated, {next(NUMBERS)}>"
    )
    flags = original.__code__.co_flags & FUTURE
    code = _code(compile(text, file, "exec", flags, dont_inherit=True), function.name)
    cells = dict(zip(free, original.__closure__ or ()))
    if code is None or not set(code.co_freevars) <= set(cells):
        raise CannotWriteError("forward uses variables that its copy would not have")
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    closure = tuple(cells[n] for n in code.co_freevars)
    made = FunctionType(code, original.__globals__, original.__name__, original.__defaults__, closure)
    made.__kwdefaults__ = original.__kwdefaults__
    made.__annotations__ = dict(original.__annotations__)
    made.__module__, made.__qualname__ = original.__module__, original.__qualname__
    return made


def _code(code: CodeType, name: str) -> CodeType | None:
    """Find the code object of a function by its name inside another code object."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_name == name:
                return constant
            if (inner := _code(constant, name)) is not None:
                return inner
    return None


def _definition(forward: Any) -> ast.FunctionDef | None:
    """Parse the definition of a plain function from its source; None if that is not possible."""
    if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__"):
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)), type_comments=True)
    except (OSError, TypeError, SyntaxError):
        return None
    function = tree.body[0] if tree.body else None
    if not isinstance(function, ast.FunctionDef) or function.decorator_list or not function.args.args:
        return None
    if function.name != forward.__name__ or inspect.isgeneratorfunction(forward):
        return None
    private = lambda name: (
        name.startswith("__") and not name.endswith("__")
    )  # a class changes such names
    named = (getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(function))
    return None if any(map(private, named)) else function


def _chains(function: ast.FunctionDef) -> Iterator[Chain]:
    """All attributes of self in a function, and theirs."""
    own = function.args.args[0].arg
    for node in ast.walk(function):
        if (found := _chain(node, own)) is not None:
            yield found


def _chain(node: ast.AST, own: str) -> Chain | None:
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return tuple(names[::-1]) if names and isinstance(node, ast.Name) and node.id == own else None


def _resolved(block: Any, chain: Chain) -> Any:
    for name in chain:
        try:
            block = getattr(block, name)
        except Exception:  # a property may do anything
            return None
    return block


class _Writer(ast.NodeTransformer):
    """Puts the gate behind the calls of the part at the end of the branch.

    Attributes:
        ends, shortcuts: how many calls were found.
        hidden: whether one of the parts is used in another way than by a call.
    """

    def __init__(self, own: str, recipe: Recipe, name: str) -> None:
        self.own, self.recipe, self.name = own, recipe, name
        self.ends = self.shortcuts = 0
        self.hidden = False

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """A call of a part."""
        chain = _chain(node.func, self.own)
        if chain in self.recipe.projections:
            self.shortcuts += 1
            return ast.Name(self.name, ast.Load())
        if chain not in self.recipe.ends:
            return self.generic_visit(node)
        self.ends += 1
        node.args = [self.visit(argument) for argument in node.args]
        node.keywords = [self.visit(keyword) for keyword in node.keywords]
        gate = ast.Attribute(ast.Name(self.own, ast.Load()), "gate_branch", ast.Load())
        return ast.Call(gate, [node, ast.Name(self.name, ast.Load())], [])

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """A part that is not called here; its own attributes may be read."""
        if self._is_part(node):
            self.hidden = True
        return node if self._is_part(node.value) else self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """``self.downsample is not None`` does not use the part."""
        asks = self._is_part(node.left) and all(isinstance(o, ast.Is | ast.IsNot) for o in node.ops)
        return node if asks else self.generic_visit(node)

    def visit_If(self, node: Any) -> ast.AST:
        """Neither does ``if self.downsample``."""
        test, node.test = node.test, ast.Constant(None)
        self.generic_visit(node)
        node.test = test if self._is_part(test) else self.visit(test)
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        """Nor does the test of a conditional expression."""
        return self.visit_If(node)

    def _is_part(self, node: ast.AST) -> bool:
        return _chain(node, self.own) in self.recipe.ends | self.recipe.projections

    def x(self) -> ast.expr:
        """What x is made from when forward begins."""
        source = self.recipe.source
        if source is None:
            return ast.Constant(None)
        value: ast.expr = ast.Name(source.argument, ast.Load())
        if source.index is not None:
            value = ast.Subscript(value, ast.Constant(source.index), ast.Load())
        if source.part is None:
            return value
        part: ast.expr = ast.Name(self.own, ast.Load())
        for name in min(self.recipe.projections):
            part = ast.Attribute(part, name, ast.Load())
        return ast.Call(part, [value], [])


def counts(block: nn.Module, kind: type[nn.Module], run: Callable[[nn.Module], Any]) -> list[int]:
    """How often forward calls the gate, in evaluation and in training, in two runs of a copy.

    Args:
        block: a copy of the block; it is changed.
        kind: a class of `gated_class`.
        run: calls a block.
    """
    block.__class__ = kind
    counter: Any = _Counter()
    block._modules["gate"] = counter
    found = []
    for training in (False, True):
        counter.calls = 0
        try:
            run(block.train(training))
        except Exception:
            counter.calls = -1
        found.append(counter.calls)
    return found


class _Counter(nn.Module):
    """Stands in for a gate and counts its calls."""

    calls: Any = 0

    def forward(self, f: Tensor, x: Tensor | None = None) -> Tensor:
        self.calls += 1
        return f
