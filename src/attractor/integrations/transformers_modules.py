"""Which modules of a Hugging Face model compute attention, and what they ask of an attention function.

Read from their code, before they run. Of use there only: `attractor.integrations.transformers` calls it.
"""

import ast
import inspect
from collections.abc import Iterable, Mapping
from contextlib import suppress
from textwrap import dedent
from typing import Any

from torch import nn

# Arguments of other attention functions that change their numbers, and that PDE attention does not know.
UNKNOWN = {
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "head_mask": "weights of heads",
    "indices": "an indexer's choice of keys",
    "block_indices": "an indexer's choice of blocks of keys",
    "score_mod": "a function of the scores",
    "cache": "paged attention",
}


def asking(model: nn.Module) -> dict[str, Any]:
    """The modules, by name, whose own code asks transformers' AttentionInterface for a function."""
    return {name: module for name, module in model.named_modules() if _calls(type(module))}


def _calls(kind: type) -> list[Any]:
    """The functions of a class that ask transformers' AttentionInterface for a function."""
    functions = [inspect.unwrap(f) for f in vars(kind).values() if callable(f)]
    code = lambda f: getattr(f, "__code__", _none)
    found = [f for f in functions if "ALL_ATTENTION_FUNCTIONS" in code(f).co_names]
    if found or "forward" in vars(kind):
        return found
    return [f for base in kind.__bases__ for f in _calls(base)]


_none: Any = (lambda: None).__code__


def needing(modules: Mapping[str, nn.Module]) -> dict[str, list[str]]:
    """Those of the modules that hand on what PDE attention does not know, and the names in `UNKNOWN`.

    What a module keeps as an attribute of its own and is None there, it does not need; what is computed
    on the way counts as needed.
    """

    def is_given(module: nn.Module, value: ast.expr) -> bool:
        match value:
            case ast.Constant(None):
                return False
            case ast.Attribute(ast.Name("self"), attribute):
                return getattr(module, attribute, None) is not None
        return True

    unknown = {kind: _unknown(kind) for kind in {type(m) for m in modules.values()}}
    needs = {
        name: [argument for argument, value in unknown[type(m)].items() if is_given(m, value)]
        for name, m in modules.items()
    }
    return {name: arguments for name, arguments in needs.items() if arguments}


def _unknown(kind: type) -> dict[str, ast.expr]:
    """What of `UNKNOWN` a class writes into its calls of attention functions, which begin with self."""
    found: dict[str, ast.expr] = {}
    for function in _calls(kind):
        with suppress(OSError, SyntaxError):  # without its source, the first call will tell
            for call in ast.walk(ast.parse(dedent(inspect.getsource(function)))):
                match call:
                    case ast.Call(args=[ast.Name("self"), *_], keywords=given):
                        found |= {word.arg: word.value for word in given if word.arg in UNKNOWN}
    return found


def outside(model: nn.Module, reached: Mapping[str, nn.Module]) -> list[str]:
    """Modules called attention that neither are, nor contain, nor belong to those that are reached."""
    related = lambda a, b: f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.")
    names = [n for n, m in model.named_modules() if "attention" in type(m).__name__.lower()]
    found = [n for n in names if not any(related(n, r) for r in reached)]
    return [n for n in found if not any(n.startswith(f"{o}.") for o in found)]


# In messages


def in_words(arguments: Iterable[str]) -> str:
    """Arguments with their meaning: ``"s_aux (attention sinks)"``."""
    return ", ".join(f"{argument} ({UNKNOWN[argument]})" for argument in arguments)


def which(names: list[str]) -> str:
    """The first of the names, and how many there are more."""
    return (names[0] or "anywhere") + (f" and {len(names) - 1} more" if len(names) > 1 else "")
