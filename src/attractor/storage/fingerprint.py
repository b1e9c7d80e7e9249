"""Fingerprints of values and of code: the same definition has the same fingerprint in every process.

A fingerprint is a SHA-256 over what a value is made of. It covers

- numbers, text, containers (dictionaries in any order), tensors and arrays with their dtype and shape;
- functions: their compiled code, defaults, closure variables and the global variables they read (of an
  object of which they read attributes only, those attributes);
- classes: by their full name if they belong to Python, to this library or to an installed package, and
  by their methods and attributes otherwise, so that two classes that share a name are told apart;
- modules (`torch.nn.Module`): class, attributes, parameters, buffers and submodules;
- other objects: class and state, which is the text in their attribute `fingerprint` (or `_fingerprint`)
  if they have one, and else what pickling would keep (`__reduce_ex__`, `__getstate__`).

It does not cover devices, positions of random generators and of iterators, files, locks and threads.
Tensors and arrays above `WHOLE` bytes are sampled. Compiled code differs between versions of Python.
"""

import dis
import enum
import functools
import hashlib
import io
import logging
import queue
import random
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["Fingerprints", "differences", "fingerprint", "outline", "settings_of", "short"]

WHOLE = 2**30  # bytes of a tensor that are all read
BLOCK, BLOCKS = 2**18, 4096  # bytes and number of the samples of a larger one
DEEPEST = 150  # levels of nesting
SHOWN = 60  # characters of a value that `outline` shows
LONGEST = 300  # characters of a value that a message shows, which may come from a damaged file
PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented)})
BY_REPR = (range, slice, torch.dtype, torch.layout, torch.memory_format, torch.Size)
BY_TYPE = (
    torch.device, torch.Generator, random.Random, np.random.Generator, np.random.RandomState,
    np.random.BitGenerator, io.IOBase, threading.Thread, queue.Queue, weakref.ref,
)  # fmt: skip
BY_NAME = (
    types.BuiltinFunctionType, types.MethodWrapperType, types.WrapperDescriptorType,
    types.MethodDescriptorType, types.ClassMethodDescriptorType, types.GetSetDescriptorType,
    types.MemberDescriptorType,
)  # fmt: skip
ONE = (
    *PLAIN, *BY_REPR, *BY_TYPE, *BY_NAME, type, dict, list, tuple, set, frozenset, bytearray, memoryview,
    deque, Tensor, np.ndarray, np.generic, nn.Module, enum.Enum, PurePath, types.ModuleType,
    types.CodeType, types.MappingProxyType, staticmethod, classmethod, property, logging.Logger,
)  # fmt: skip
# Attributes of a class that say nothing about what its instances do.
UNTOLD = frozenset({
    "__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__",
    "__annotate__", "__annotate_func__", "__annotations_cache__", "__firstlineno__",
    "__static_attributes__", "__abstractmethods__", "_abc_impl", "__dataclass_fields__",
    "__dataclass_params__", "__match_args__", "__parameters__", "__orig_bases__",
})  # fmt: skip
Foreign = Literal["state", "public", "class"]
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def fingerprint(value: Any, *, foreign: Foreign = "state") -> str:
    """Return the fingerprint of a value, 64 hexadecimal digits; see `Fingerprints`."""
    return Fingerprints(foreign).of(value)


def outline(value: Any, *, foreign: Foreign = "state") -> dict[str, str]:
    """Return what a value is made of; see `Fingerprints.outline`."""
    return Fingerprints(foreign).outline(value)


def differences(theirs: Mapping[str, str], mine: Mapping[str, str], what: str) -> list[str]:
    """Name the parts in which two outlines differ, each with its values where they are readable.

    Of two values of different kinds the kinds are named, and no parts.
    """
    if any(theirs.get(key) != mine.get(key) for key in ("", "name")):
        kinds = (x.get("name") or x.get("", "").partition(" #")[0] for x in (theirs, mine))
        return [_unlike(what, *kinds)]
    paths = dict.fromkeys((*theirs, *mine))
    return [
        _unlike(f"{what}.{path}", theirs.get(path), mine.get(path))
        for path in paths
        if theirs.get(path) != mine.get(path)
    ]


def _unlike(what: str, one: str | None, other: str | None) -> str:
    readable = one and other and one != other and "#" not in (one[0], other[0])
    readable = readable and " #" not in f"{one} {other}"
    shown = lambda text: str(text) if len(str(text)) <= LONGEST else f"{str(text)[:LONGEST]}..."
    return f"{what} = {shown(one)}, not {shown(other)}" if readable else f"another {what}"


def short(names: Iterable[str], count: int = 3) -> str:
    """Join the first few of many names."""
    names = list(names)
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more


def settings_of(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of one module that are no parameters, buffers or submodules.

    The names of its hooks are among them: a hook may change what the module computes.
    """
    base = _of_every_module()
    found = {name: value for name, value in vars(module).items() if name not in base}
    hooks = [hook for name in HOOKS for hook in getattr(module, name, {}).values()]
    if hooks:
        found["hooks"] = [getattr(hook, "__qualname__", type(hook).__qualname__) for hook in hooks]
    return found


@functools.cache
def _of_every_module() -> frozenset[str]:
    return frozenset({*vars(nn.Module()), "_compiled_call_impl", "_forward_hooks_always_called"})


@functools.cache
def _owner(name: str) -> str:
    """Who wrote a module: "python", "attractor", "installed" or "user"."""
    root = name.partition(".")[0]
    if root in sys.stdlib_module_names or root == "builtins":
        return "python"
    if root == "attractor":
        return "attractor"
    if root == "__main__":  # whose file is that of the notebook's or the test's program
        return "user"
    file = getattr(sys.modules.get(name) or sys.modules.get(root), "__file__", None)
    return "installed" if root in ("torch", "numpy") or _is_installed(file or "") else "user"


@functools.cache
def _owner_of_code(file: str, name: str) -> str:
    """Who wrote a function of a file; by its module if there is no such file, as in a notebook."""
    path = Path(file)
    if not path.is_absolute() or not path.exists():
        return _owner(name)
    if _is_installed(file):
        return "installed"
    for owner, place in (
        ("attractor", Path(__file__).parents[1]),
        ("python", Path(dis.__file__).parent),
    ):
        if path.is_relative_to(place):
            return owner
    return "user" if name.partition(".")[0] not in ("torch", "numpy") else "installed"


def _is_installed(file: str) -> bool:
    return bool({"site-packages", "dist-packages"} & set(Path(file).parts))


def _named(value: Any) -> str:
    return f"{getattr(value, '__module__', None)}.{getattr(value, '__qualname__', repr(type(value)))}"


def _leaf(tag: str, content: bytes = b"") -> bytes:
    return hashlib.sha256(f"{tag} {len(content)} ".encode() + content).digest()


def _join(tag: str, *digests: bytes) -> bytes:
    return _leaf(f"{tag} {len(digests)}", b"".join(digests))


class Fingerprints:
    """Fingerprints of several values; what they have in common is read once.

    The values must not change in between.

    Args:
        foreign: what counts of objects whose classes come from installed packages: their whole "state",
            as of data; the part of it that is "public", since what a package keeps for itself, such as
            a Python hash, may differ from process to process; or their "class", as of something that
            writes logs.
    """

    def __init__(self, foreign: Foreign = "state") -> None:
        self.foreign = foreign
        self.known: dict[int, tuple[Any, bytes]] = {}  # the value too, so that its id stays its own
        self.open: dict[int, int] = {}

    def of(self, value: Any) -> str:
        """Return the fingerprint of a value, 64 hexadecimal digits."""
        return self.digest(value).hex()

    def outline(self, value: Any, depth: int = 3) -> dict[str, str]:
        """Return what a value is made of: the path of each part, and its value or fingerprint.

        Two values have the same outline if and only if they have the same fingerprint. The outline is
        for `differences`, which names the parts that differ.

        Args:
            value: anything.
            depth: levels of objects whose attributes have a path of their own.
        """
        parts: dict[str, str] = {}
        self.add_parts(value, "", depth, parts)
        return parts

    def digest(self, value: Any) -> bytes:
        """The fingerprint as bytes."""
        kind = type(value)
        if kind in PLAIN:
            return _leaf(kind.__name__, repr(value).encode("utf8", "surrogatepass"))
        key = id(value)
        if key in self.known:
            return self.known[key][1]
        if key in self.open:
            return _leaf("cycle", str(len(self.open) - self.open[key]).encode())
        if len(self.open) > DEEPEST:
            return _leaf("deep", _named(kind).encode())
        self.open[key] = len(self.open)
        try:
            made = self.compound(value)
        finally:
            del self.open[key]
        self.known[key] = value, made
        return made

    def add_parts(self, value: Any, path: str, depth: int, parts: dict[str, str]) -> None:
        """Add the parts of a value to an outline."""
        inner = self.attributes(value) if depth and id(value) not in self.open else None
        if inner is None:
            parts[path] = self.told(value)
            return
        parts[path] = f"{_named(type(value))} #{self.node('type', type(value)).hex()[:16]}"
        self.open[id(value)] = len(self.open)
        try:
            for name, part in inner.items():
                self.add_parts(part, f"{path}.{name}" if path else name, depth - 1, parts)
        finally:
            del self.open[id(value)]

    def told(self, value: Any) -> str:
        """A value as it is written, if it is short; else its kind and its fingerprint."""
        if type(value) in PLAIN and len(text := repr(value)) <= SHOWN:
            return text
        made = f"#{self.digest(value).hex()[:16]}"
        if isinstance(value, Tensor | np.ndarray):
            return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} {made}"
        return made

    def attributes(self, value: Any) -> dict[str, Any] | None:
        """What has a path of its own in an outline; None where the value is one part."""
        if isinstance(value, types.FunctionType):
            return self.function(value)
        if isinstance(value, types.MethodType):
            return {"function": value.__func__, "self": value.__self__}
        if isinstance(value, functools.partial):
            return {"function": value.func, "arguments": value.args, **value.keywords}
        if isinstance(value, ONE) or _is_position(value) or not self.counts(type(value)):
            return None
        state = self.state(value)
        plain = isinstance(state, dict) and state and all(isinstance(name, str) for name in state)
        return state if plain else None

    def compound(self, value: Any) -> bytes:
        """The digest of anything that is not plain."""
        match value:
            case type():
                return self.class_(value)
            case _ if isinstance(value, BY_TYPE) or _is_position(value):
                return _leaf("type", _named(type(value)).encode())
            case _ if isinstance(value, BY_REPR):
                return _leaf(_named(type(value)), repr(value).encode())
            case Tensor():
                return self.tensor(value)
            case np.ndarray():
                return self.array(value)
            case np.generic():
                return _leaf(f"numpy {value.dtype.str}", value.tobytes())
            case types.FunctionType():
                return self.node("function", self.function(value))
            case types.MethodType():
                return self.node("method", value.__func__, value.__self__)
            case functools.partial():
                return self.node("partial", value.func, value.args, value.keywords)
            case types.CodeType():
                return self.code(value)
            case staticmethod() | classmethod():
                return self.node(type(value).__name__, value.__func__)
            case property():
                return self.node("property", value.fget, value.fset, value.fdel)
            case types.ModuleType():
                return _leaf("module", value.__name__.encode())
            case _ if isinstance(value, BY_NAME):
                return _leaf("builtin", _named(value).encode())
            case nn.Module():
                return self.module(value)
            case enum.Enum():
                return self.node("enum", type(value), value.name)
            case PurePath():
                return _leaf("path", str(value).encode("utf8", "surrogatepass"))
            case logging.Logger():
                return _leaf("logger", value.name.encode())
            case bytearray() | memoryview():
                return _leaf(type(value).__name__, bytes(value))
            case dict() | types.MappingProxyType():
                pairs = sorted((self.digest(k), self.digest(v)) for k, v in value.items())
                return _join("mapping", self.own(value, dict), *(b for pair in pairs for b in pair))
            case set() | frozenset():
                return _join("set", self.own(value, set), *sorted(map(self.digest, value)))
            case list() | tuple() | deque():
                return self.sequence(value)
        return self.object(value)

    def node(self, tag: str, *parts: Any) -> bytes:
        """A digest of parts, in their order."""
        return _join(tag, *map(self.digest, parts))

    def own(self, value: Any, common: type) -> bytes:
        """What a container has beside its items: an unusual class, and attributes."""
        usual = type(value) is common
        return self.digest(None if usual else [type(value), getattr(value, "__dict__", None)])

    def sequence(self, value: list[Any] | tuple[Any, ...] | deque[Any]) -> bytes:
        """Items in their order; many plain ones are read at once."""
        if type(value) in (list, tuple) and set(map(type, value)) <= PLAIN:
            return _leaf(type(value).__name__, repr(value).encode("utf8", "surrogatepass"))
        return _join("sequence", self.own(value, list), *map(self.digest, value))

    def tensor(self, value: Tensor) -> bytes:
        """Dtype, shape and numbers; neither device nor layout."""
        told = f"tensor {value.dtype} {list(value.shape)}"
        if type(value) not in (Tensor, nn.Parameter, nn.Buffer):
            told = f"{_named(type(value))} {told}"
        if value.is_meta:
            return _leaf(told)
        plain = value.detach() if value.layout == torch.strided else value.detach().to_dense()
        plain = plain.dequantize() if plain.is_quantized else plain.resolve_conj().resolve_neg()
        flat = plain.reshape(-1).contiguous()
        numbers = (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).view(torch.uint8)
        made = hashlib.sha256(told.encode())
        for part in _sampled(numbers):
            made.update(memoryview(part.cpu().numpy()))
        return made.digest()

    def array(self, value: np.ndarray) -> bytes:
        """Dtype, shape and numbers."""
        told = f"array {value.dtype.descr if value.dtype.names else value.dtype.str} {list(value.shape)}"
        if value.dtype.hasobject:
            return self.node(told, value.tolist())
        made = hashlib.sha256(told.encode())
        for part in _sampled(np.ascontiguousarray(value).reshape(-1).view(np.uint8)):
            made.update(memoryview(part))
        return made.digest()

    def function(self, value: types.FunctionType) -> dict[str, Any]:
        """What a function computes from: its name or, if it is the user's, its code and defaults; and
        the variables from outside that it reads and does not set."""
        compiled = getattr(value, "_torchdynamo_orig_callable", None)
        if compiled is not None:
            return {"compiled": compiled}
        code = value.__code__
        outside: dict[str, Any] = {}
        for name, cell in zip(code.co_freevars, value.__closure__ or ()):
            with suppress(ValueError):  # a cell that is still empty
                outside[name] = cell.cell_contents
        reads, sets = _outside(code)
        if _owner_of_code(code.co_filename, value.__module__ or "") == "user":
            found: dict[str, Any] = {"name": value.__qualname__, "code": code}
            found |= {f"default {i}": x for i, x in enumerate(value.__defaults__ or ())}
            found |= {f"default {name}": x for name, x in (value.__kwdefaults__ or {}).items()}
            outside |= {n: value.__globals__[n] for n in sorted(reads) if n in value.__globals__}
        else:
            found = {"name": _named(value)}
        for name in sorted(outside.keys() - sets):
            read = reads.get(name) or frozenset()
            within = {} if isinstance(outside[name], ONE) else getattr(outside[name], "__dict__", {})
            if read and read <= within.keys():
                found |= {f"{name}.{attribute}": within[attribute] for attribute in sorted(read)}
            else:
                found[name] = outside[name]
        return found

    def code(self, value: types.CodeType) -> bytes:
        """Instructions and constants, without places in a file."""
        names = (value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars)
        sizes = (value.co_argcount, value.co_kwonlyargcount, value.co_posonlyargcount, value.co_flags)
        return self.node("code", value.co_code, value.co_exceptiontable, names, sizes, *value.co_consts)

    def class_(self, value: type) -> bytes:
        """The name of an installed class; the name, bases and attributes of one of the user's."""
        if _owner(value.__module__ or "") != "user":
            return _leaf("class", _named(value).encode())
        inside = {
            name: part if isinstance(part, _TOLD) or type(part) in PLAIN else type(part)
            for name, part in vars(value).items()
            if name not in UNTOLD
        }
        return self.node("class", value.__qualname__, *value.__bases__, inside)

    def module(self, value: nn.Module) -> bytes:
        """Class, attributes, and all that is registered."""
        own = [dict(x) for x in (value._parameters, value._buffers, value._modules)]
        return self.node("nn.Module", type(value), settings_of(value), own)

    def counts(self, kind: type) -> bool:
        """Whether the state of such objects counts."""
        return self.foreign != "class" or _owner(kind.__module__ or "") != "installed"

    def object(self, value: Any) -> bytes:
        """Class and state of any object."""
        kind = type(value)
        if not self.counts(kind):
            return self.node("type", kind)
        return self.node("object", kind, self.state(value))

    def state(self, value: Any) -> Any:
        """What counts of an object's state."""
        found = _state(value)
        installed = _owner(type(value).__module__ or "") == "installed"
        if self.foreign == "public" and installed and isinstance(found, dict):
            return {k: v for k, v in found.items() if not str(k).startswith("_")}
        return found


def _state(value: Any) -> Any:
    """What pickling an object would keep; its attributes where it cannot be pickled."""
    try:
        for name in ("fingerprint", "_fingerprint"):  # the latter of Hugging Face's data sets
            if isinstance(text := getattr(value, name, None), str):
                return {"fingerprint": text}
        if callable(value) and hasattr(value, "__wrapped__"):  # such as functools.cache makes
            return {"wrapped": value.__wrapped__}
        reduced = value.__reduce_ex__(4)
    except Exception:  # whatever an object raises that refuses to be pickled
        return dict(getattr(value, "__dict__", {}))
    if isinstance(reduced, str):
        return {"name": reduced}
    make, arguments, state, items, pairs = (*reduced, *[None] * (5 - len(reduced)))[:5]
    if getattr(make, "__module__", None) == "copyreg":
        arguments = arguments[1:]  # after the class
    if arguments or items or pairs:
        return [arguments, state, list(items or ()), dict(pairs or ())]
    return state


# Attributes of a user's class that count with their value; of others the class counts.
_TOLD = (
    types.FunctionType, staticmethod, classmethod, property, functools.partial, type, enum.Enum, tuple,
    list, dict, set, frozenset, Tensor, np.ndarray, np.generic,
)  # fmt: skip


def _sampled(numbers: Any) -> Iterator[Any]:
    """Parts of a row of bytes: all of it, or evenly spaced samples of a long one."""
    if len(numbers) <= WHOLE:
        yield from (numbers[i : i + 2**26] for i in range(0, len(numbers), 2**26))
        return
    last = len(numbers) - BLOCK
    for i in range(BLOCKS):
        start = last * i // (BLOCKS - 1)
        yield numbers[start : start + BLOCK]


def _is_position(value: Any) -> bool:
    """Whether a value is an iterator of Python's own, such as a generator."""
    return isinstance(value, Iterator) and _owner(type(value).__module__ or "") == "python"


def _outside(code: types.CodeType) -> tuple[dict[str, frozenset[str] | None], set[str]]:
    """The variables from outside that code and the functions inside it read, and those that they set.

    With each of the former the attributes that are read of it, or None where it is used as a whole.
    """
    reads: dict[str, frozenset[str] | None] = {}
    sets: set[str] = set()

    def read(name: str, attributes: frozenset[str] | None) -> None:
        known = reads.get(name, frozenset())
        reads[name] = None if known is None or attributes is None else known | attributes

    steps = list(dis.get_instructions(code))
    for step, following in zip(steps, [*steps[1:], None]):
        free = step.argval in code.co_freevars
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") or (step.opname == "LOAD_DEREF" and free):
            then = following is not None and following.opname in ("LOAD_ATTR", "LOAD_METHOD")
            read(step.argval, frozenset({following.argval}) if following and then else None)
        elif step.opname in ("STORE_GLOBAL", "STORE_NAME") or (step.opname == "STORE_DEREF" and free):
            sets.add(step.argval)
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            inner, also = _outside(part)
            for name in inner.keys() - set(code.co_cellvars):
                read(name, inner[name])
            sets |= also - set(code.co_cellvars)
    return reads, sets
