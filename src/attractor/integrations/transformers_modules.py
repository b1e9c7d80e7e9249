"""Which modules of a Hugging Face model compute attention, and what they ask of an attention function.

Read from their code, before they run. Of use there only: `attractor.integrations.transformers` calls it.
"""

import ast
import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from textwrap import dedent
from typing import Any

import torch
from torch import Tensor, nn

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


def refusal(model: nn.Module, name: str) -> str | None:
    """Return why PDE attention cannot take the place of a model's attention, None if it can."""
    modules, kind = asking(model), type(model).__name__
    if not modules:
        return (
            f"{kind} computes its attention itself, or has none: nothing in it calls transformers' "
            f"AttentionInterface, and attn_implementation={name!r} would not reach it; use 'eager' or "
            "'sdpa'"
        )
    if needs := needing(modules):
        return f"{say_needs(model, needs)}: use another attn_implementation for this model"
    return None


def is_pde_attention(name: Any) -> bool:
    """Return whether a value of ``attn_implementation`` is a name of PDE attention."""
    from transformers import AttentionInterface

    function = AttentionInterface().get(name) if isinstance(name, str) else None
    return getattr(function, "is_pde_attention", False)


def is_part(model: nn.Module, kind: type) -> bool:
    """Return whether a model is being made by the constructor of another model of this kind."""
    return any(other is not model and name == "__init__" for other, name in _callers(kind))


def caller(kind: type) -> str:
    """Return the name of the class whose method is running, the innermost of this kind."""
    return next((type(this).__name__ for this, _ in _callers(kind)), "this model")


def maker(kind: type) -> str:
    """Return the name of the class whose constructor is running, the outermost of this kind."""
    names = [type(this).__name__ for this, method in _callers(kind) if method == "__init__"]
    return names[-1] if names else "this model"


def _callers(kind: type) -> Iterator[tuple[Any, str]]:
    """Yield the objects of a class whose methods are running, with the names of these methods."""
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(this := frame.f_locals.get("self"), kind):
            yield this, frame.f_code.co_name
        frame = frame.f_back


def example_inputs(model: Any) -> dict[str, Tensor]:
    """Return inputs for a model's forward: a text or an image, as far as it says what it takes."""
    config = model.config
    kinds = (model.main_input_name, *getattr(model, "input_modalities", ()))
    inputs: dict[str, Tensor] = {}
    if any(kind in ("input_ids", "text") for kind in kinds):
        inputs = dict(model.dummy_inputs)
    if "pixel_values" in kinds:
        parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
        said = lambda name, usual: next((x for part in parts if (x := getattr(part, name, None))), usual)
        channels, size = said("num_channels", 3), said("image_size", 224)
        size = (size, size) if isinstance(size, int) else tuple(size)
        inputs["pixel_values"] = torch.zeros(1, channels, *size, dtype=model.dtype)
    if getattr(config, "is_encoder_decoder", False):
        ids = inputs.get("input_ids", torch.zeros(1, 5, dtype=torch.long))
        inputs.setdefault("decoder_input_ids", ids)
    return {name: x.to(model.device) for name, x in inputs.items()}


# In messages


def say_needs(model: nn.Module, needs: Mapping[str, list[str]]) -> str:
    """What modules of a model need and PDE attention does not know."""
    arguments = dict.fromkeys(argument for of_module in needs.values() for argument in of_module)
    return (
        f"{type(model).__name__}'s attention needs {in_words(arguments)}, which PDE attention does not "
        f"know ({which([*needs])})"
    )


def in_words(arguments: Iterable[str]) -> str:
    """Arguments with their meaning: ``"s_aux (attention sinks)"``."""
    return ", ".join(f"{argument} ({UNKNOWN[argument]})" for argument in arguments)


def which(names: list[str]) -> str:
    """The first of the names, and how many there are more."""
    return (names[0] or "anywhere") + (f" and {len(names) - 1} more" if len(names) > 1 else "")
