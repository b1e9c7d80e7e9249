"""Rewriting a forward function so that it calls a gate.

A gate multiplies f, the output of one part of a block. If the block's forward calls that part by its
name, as in ``out = self.bn2(out)``, its source can be rewritten: the call becomes
``self.gate_branch(self.bn2(out), gate_x)``, and ``gate_x = x`` becomes the first line. The class of the
block is replaced by a subclass with this forward. The result is ordinary code without state between
calls, so that threads, copies, checkpointing, torch.fx, torch.export and torch.jit.script work as they
do without a gate.

`gated_class` returns None if the source is not available or does not show every call of the part, as in
a forward that loops over its parts, calls helper methods, or passes a part to `checkpoint`.
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
NUMBERS = count(1)  # of rewritten functions

Chain = tuple[str, ...]  # bn2 of ``self.bn2``, or body and norm of ``self.body.norm``


def gate_branch(self: Any, f: Tensor, x: Tensor | None) -> Tensor:
    """Return the gated f; a method of the block."""
    return self.gate(f, x)


def gate_flat_branch(self: Any, f: Tensor, x: Tensor | None) -> Tensor:
    """Return the gated f with one or three spatial axes, which the gate sees as one axis of an image."""
    flat = None if x is None else x.flatten(2).unsqueeze(3)
    return self.gate(f.flatten(2).unsqueeze(3), flat).reshape(f.shape)


@dataclass(frozen=True)
class Edit:
    """A block's class, and the changes to its forward.

    Attributes:
        kind: The block's class.
        ends: Names by which forward calls the part that ends the branch.
        source: Where x comes from, or None if the gate does not use it.
        projections: Names by which forward calls the part of `source`.
        flat: Whether the gate sees all spatial axes as one.
    """

    kind: type[nn.Module]
    ends: frozenset[Chain]
    source: Source | None
    projections: frozenset[Chain]
    flat: bool


def gated_class(block: nn.Module, end: str, source: Source | None, flat: bool) -> type[nn.Module] | None:
    """Return a subclass of a block's class whose forward calls ``self.gate``, or None if not possible.

    Args:
        block: The block, which is not changed.
        end: Path of the part whose output is f. The gate follows each of its calls.
        source: Where x comes from, or None if the gate does not use it. If a part computes x, it is
            called in the first line, and forward uses the result instead of calling it later.
        flat: Whether the gate sees all spatial axes as one.
    """
    if "forward" in vars(block):  # of this instance alone
        return None
    function = _definition(type(block).forward)
    if function is None:
        return None
    chains = set(_chains(function))
    names = lambda path: frozenset(c for c in chains if _resolve(block, c) is block.get_submodule(path))
    projections = names(source.part) if source is not None and source.part else frozenset()
    try:
        return rewritten_class(Edit(type(block), names(end), source, projections, flat))
    except RewriteError:
        return None


class RewriteError(ValueError):
    """The source of a forward does not show where the gate belongs."""


@cache
def rewritten_class(edit: Edit) -> type[nn.Module]:
    """Return the class with an edited forward.

    Raises:
        RewriteError: The source is not available or does not show every call.
    """
    original: Any = edit.kind.forward
    names: dict[str, Any] = {
        "__module__": edit.kind.__module__,
        "__qualname__": edit.kind.__qualname__,
        "__doc__": edit.kind.__doc__,
        "__reduce__": _reduce,
        "gate_edit": edit,
        "gate_branch": gate_flat_branch if edit.flat else gate_branch,
        "forward": _rewrite(original, edit),
    }
    return type(edit.kind.__name__, (edit.kind,), names)


def _reduce(self: Any) -> tuple[Any, ...]:
    return _empty, (type(self).gate_edit,), self.__getstate__()


def _empty(edit: Edit) -> nn.Module:
    """Return an empty block of the class of an edit, for copies and pickles."""
    kind = rewritten_class(edit)
    return kind.__new__(kind)


def _rewrite(original: FunctionType, edit: Edit) -> FunctionType:
    """Return a forward that calls the gate."""
    function = _definition(original)
    if function is None or not edit.ends:
        raise RewriteError("the source does not show the call of the part that ends the branch")
    variables = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    name = next(n for n in (f"gate_x{'_' * i}" for i in count()) if n not in variables)
    writer = _Writer(function.args.args[0].arg, edit, name)
    for i, statement in enumerate(function.body):
        function.body[i] = writer.visit(statement)
    if writer.hidden or not writer.ends or (edit.source and edit.source.part and writer.shortcuts != 1):
        raise RewriteError("the source does not show every call of the part that ends the branch")
    first = ast.Assign([ast.Name(name, ast.Store())], writer.x())
    has_docstring = ast.get_docstring(function, clean=False) is not None
    function.body.insert(int(has_docstring), first)
    return _compile(original, ast.fix_missing_locations(function), edit)


def _compile(original: FunctionType, function: ast.FunctionDef, edit: Edit) -> FunctionType:
    """Compile a changed definition with the globals, defaults and closure of the original function."""
    free = original.__code__.co_freevars
    body: ast.stmt = function
    if free:
        arguments = ast.arguments([], [ast.arg(n) for n in free], None, [], [], None, [])
        result = ast.Return(ast.Name(function.name, ast.Load()))
        body = ast.FunctionDef("closure", arguments, [function, result], [], None)
    module = ast.fix_missing_locations(ast.Module([body], []))
    text = ast.unparse(module) + "\n"
    file = f"<{edit.kind.__module__}.{edit.kind.__qualname__}.{function.name}, gated, {next(NUMBERS)}>"
    flags = original.__code__.co_flags & FUTURE
    code = _code(compile(text, file, "exec", flags, dont_inherit=True), function.name)
    cells = dict(zip(free, original.__closure__ or ()))
    if code is None or not set(code.co_freevars) <= set(cells):
        raise RewriteError("forward uses variables that a copy of it lacks")
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    closure = tuple(cells[n] for n in code.co_freevars)
    rewritten = FunctionType(
        code, original.__globals__, original.__name__, original.__defaults__, closure
    )
    rewritten.__kwdefaults__ = original.__kwdefaults__
    rewritten.__annotations__ = dict(original.__annotations__)
    rewritten.__module__, rewritten.__qualname__ = original.__module__, original.__qualname__
    return rewritten


def _code(code: CodeType, name: str) -> CodeType | None:
    """Return the code object of a function inside another code object, by its name."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_name == name:
                return constant
            if (inner := _code(constant, name)) is not None:
                return inner
    return None


def _definition(forward: Any) -> ast.FunctionDef | None:
    """Parse the definition of a plain function from its source; return None if that is not possible."""
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
    names = (getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(function))
    is_mangled = lambda name: name.startswith("__") and not name.endswith("__")
    return None if any(map(is_mangled, names)) else function


def _chains(function: ast.FunctionDef) -> Iterator[Chain]:
    """Yield all attributes of self in a function, and their attributes."""
    own = function.args.args[0].arg
    for node in ast.walk(function):
        if (chain := _chain(node, own)) is not None:
            yield chain


def _chain(node: ast.AST, own: str) -> Chain | None:
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return tuple(names[::-1]) if names and isinstance(node, ast.Name) and node.id == own else None


def _resolve(block: Any, chain: Chain) -> Any:
    for name in chain:
        try:
            block = getattr(block, name)
        except Exception:  # a property may raise any error
            return None
    return block


class _Writer(ast.NodeTransformer):
    """Inserts the gate after the calls of the part that ends the branch.

    Attributes:
        ends: Number of calls of that part.
        shortcuts: Number of calls of the part that computes x.
        hidden: Whether one of these parts is used in another way than by a call.
    """

    def __init__(self, own: str, edit: Edit, name: str) -> None:
        self.own, self.edit, self.name = own, edit, name
        self.ends = self.shortcuts = 0
        self.hidden = False

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Rewrite a call of a part."""
        chain = _chain(node.func, self.own)
        if chain in self.edit.projections:
            self.shortcuts += 1
            return ast.Name(self.name, ast.Load())
        if chain not in self.edit.ends:
            return self.generic_visit(node)
        self.ends += 1
        node.args = [self.visit(argument) for argument in node.args]
        node.keywords = [self.visit(keyword) for keyword in node.keywords]
        gate = ast.Attribute(ast.Name(self.own, ast.Load()), "gate_branch", ast.Load())
        return ast.Call(gate, [node, ast.Name(self.name, ast.Load())], [])

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Note a part that is not called here; its own attributes may be read."""
        if self._is_part(node):
            self.hidden = True
        return node if self._is_part(node.value) else self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """Skip ``self.downsample is not None``, which does not use the part."""
        only_tests = self._is_part(node.left) and all(
            isinstance(o, ast.Is | ast.IsNot) for o in node.ops
        )
        return node if only_tests else self.generic_visit(node)

    def visit_If(self, node: Any) -> ast.AST:
        """Skip the test of ``if self.downsample``."""
        test, node.test = node.test, ast.Constant(None)
        self.generic_visit(node)
        node.test = test if self._is_part(test) else self.visit(test)
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        """Skip the test of a conditional expression."""
        return self.visit_If(node)

    def _is_part(self, node: ast.AST) -> bool:
        return _chain(node, self.own) in self.edit.ends | self.edit.projections

    def x(self) -> ast.expr:
        """Return the expression of x for the first line of forward."""
        source = self.edit.source
        if source is None:
            return ast.Constant(None)
        value: ast.expr = ast.Name(source.argument, ast.Load())
        if source.index is not None:
            value = ast.Subscript(value, ast.Constant(source.index), ast.Load())
        if source.part is None:
            return value
        part: ast.expr = ast.Name(self.own, ast.Load())
        for name in min(self.edit.projections):
            part = ast.Attribute(part, name, ast.Load())
        return ast.Call(part, [value], [])


def call_counts(block: nn.Module, kind: type[nn.Module], run: Callable[[nn.Module], Any]) -> list[int]:
    """Return the number of calls of the gate in evaluation and in training mode; -1 after an error.

    Args:
        block: A copy of the block, which is changed.
        kind: A class of `gated_class`.
        run: A function that calls a block.
    """
    block.__class__ = kind
    counter: Any = _Counter()
    block._modules["gate"] = counter
    numbers = []
    for training in (False, True):
        counter.calls = 0
        try:
            run(block.train(training))
        except Exception:
            counter.calls = -1
        numbers.append(counter.calls)
    return numbers


class _Counter(nn.Module):
    """Replaces a gate and counts its calls."""

    calls: Any = 0

    def forward(self, f: Tensor, x: Tensor | None = None) -> Tensor:
        self.calls += 1
        return f
