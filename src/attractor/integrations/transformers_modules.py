"""Attention modules of Hugging Face models, and the arguments that they pass to attention functions.

Both are read from the source of the modules, before the model runs.
`attractor.integrations.transformers` uses this module.
"""

import ast
import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from textwrap import dedent
from typing import Any

import torch
from torch import Tensor, nn

# Arguments that change the result of other attention functions, and that PDE attention does not support.
UNSUPPORTED = {
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "head_mask": "weights of heads",
    "indices": "an indexer's choice of keys",
    "block_indices": "an indexer's choice of blocks of keys",
    "score_mod": "a function of the scores",
    "cache": "paged attention",
}


def attention_modules(model: nn.Module) -> dict[str, Any]:
    """Return the modules, by name, whose own code takes a function from `AttentionInterface`."""
    return {
        name: module for name, module in model.named_modules() if _callers_of_interface(type(module))
    }


def _callers_of_interface(kind: type) -> list[Any]:
    """Return the functions of a class that take a function from transformers' `AttentionInterface`."""
    functions = [inspect.unwrap(f) for f in vars(kind).values() if callable(f)]
    code = lambda f: getattr(f, "__code__", _NO_CODE)
    callers = [f for f in functions if "ALL_ATTENTION_FUNCTIONS" in code(f).co_names]
    if callers or "forward" in vars(kind):
        return callers
    return [f for base in kind.__bases__ for f in _callers_of_interface(base)]


_NO_CODE: Any = (lambda: None).__code__


def unsupported_arguments(modules: Mapping[str, nn.Module]) -> dict[str, list[str]]:
    """Return the names in `UNSUPPORTED` that modules pass on; modules without such names are left out.

    An argument that is an attribute of the module is not passed if the attribute is None. An argument
    that forward computes always counts.
    """

    def is_passed(module: nn.Module, value: ast.expr) -> bool:
        match value:
            case ast.Constant(None):
                return False
            case ast.Attribute(ast.Name("self"), attribute):
                return getattr(module, attribute, None) is not None
        return True

    arguments = {kind: _arguments_in_source(kind) for kind in {type(m) for m in modules.values()}}
    unsupported = {
        name: [argument for argument, value in arguments[type(m)].items() if is_passed(m, value)]
        for name, m in modules.items()
    }
    return {name: names for name, names in unsupported.items() if names}


def _arguments_in_source(kind: type) -> dict[str, ast.expr]:
    """Return the arguments in `UNSUPPORTED` with which a class calls functions of ``(self, ...)``."""
    arguments: dict[str, ast.expr] = {}
    for function in _callers_of_interface(kind):
        with suppress(OSError, SyntaxError):  # without its source, the first call raises
            for call in ast.walk(ast.parse(dedent(inspect.getsource(function)))):
                match call:
                    case ast.Call(args=[ast.Name("self"), *_], keywords=keywords):
                        arguments |= {
                            word.arg: word.value for word in keywords if word.arg in UNSUPPORTED
                        }
    return arguments


def bypassing_modules(model: nn.Module, reached: Mapping[str, nn.Module]) -> list[str]:
    """Return the outermost modules with "attention" in their class name that PDE attention misses.

    Args:
        model: The model.
        reached: The modules that PDE attention reaches. Modules inside or around these are left out.
    """
    related = lambda a, b: f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.")
    names = [n for n, m in model.named_modules() if "attention" in type(m).__name__.lower()]
    bypassing = [n for n in names if not any(related(n, r) for r in reached)]
    return [n for n in bypassing if not any(n.startswith(f"{outer}.") for outer in bypassing)]


def why_not(model: nn.Module, name: str) -> str | None:
    """Return why PDE attention cannot replace a model's attention, or None if it can."""
    modules, kind = attention_modules(model), type(model).__name__
    if not modules:
        return (
            f"{kind} computes its attention itself, or has none: nothing in it calls transformers' "
            f"AttentionInterface, and attn_implementation={name!r} would not reach it; use 'eager' or "
            "'sdpa'"
        )
    if unsupported := unsupported_arguments(modules):
        return (
            f"{describe_unsupported(model, unsupported)}: use another attn_implementation for this model"
        )
    return None


def is_pde_attention(name: Any) -> bool:
    """Return whether a value of ``attn_implementation`` is a name of PDE attention."""
    from transformers import AttentionInterface

    function = AttentionInterface().get(name) if isinstance(name, str) else None
    return getattr(function, "is_pde_attention", False)


def is_part(model: nn.Module, kind: type) -> bool:
    """Return whether a model is being made by the constructor of another model of this kind."""
    return any(other is not model and name == "__init__" for other, name in _running_methods(kind))


def caller(kind: type) -> str:
    """Return the class name of the innermost object of this kind whose method is running."""
    return next((type(this).__name__ for this, _ in _running_methods(kind)), "this model")


def maker(kind: type) -> str:
    """Return the class name of the outermost object of this kind whose constructor is running."""
    names = [type(this).__name__ for this, method in _running_methods(kind) if method == "__init__"]
    return names[-1] if names else "this model"


def _running_methods(kind: type) -> Iterator[tuple[Any, str]]:
    """Yield (object, method name) for the running methods of objects of a class, innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(this := frame.f_locals.get("self"), kind):
            yield this, frame.f_code.co_name
        frame = frame.f_back


def set_along_path(model: Any, path: str, name: str) -> None:
    """Set ``attn_implementation`` in all configs from a model to one of its attention modules.

    transformers omits some of them. It guesses from source which models accept a name. And a model made
    from two models gives each a new config, while the modules keep the old one, which later changes
    would not reach; these modules get the new config.

    Args:
        model: The model.
        path: Path of the attention module.
        name: The name to set.
    """
    from transformers import PreTrainedModel

    parts = path.split(".") if path else []
    current = model.config
    for depth in range(len(parts) + 1):
        holder = model.get_submodule(".".join(parts[:depth]))
        config: Any = getattr(holder, "config", None)
        if not hasattr(config, "_attn_implementation"):
            continue
        if config is not current:
            if type(config) is type(current) and _entries(config) == _entries(current):
                holder.config = config = current
            elif isinstance(holder, PreTrainedModel):
                current = config
        if config._attn_implementation != name:
            config._attn_implementation = name


def _entries(config: Any) -> dict[str, Any]:
    """Return a config as a dictionary, without a mark that transformers 5.17 does not set in all."""
    return {name: x for name, x in config.to_dict().items() if name != "_attn_was_changed"}


def number_of_heads(module: Any) -> int:
    """Return the number of heads of an attention module, from its attributes or its config."""
    for owner in (module, getattr(module, "config", None)):
        for attribute in ("num_heads", "num_attention_heads", "n_heads", "n_head"):
            if isinstance(heads := getattr(owner, attribute, None), int):
                return heads
    raise ValueError(
        f"{type(module).__name__} has no attribute with its number of heads; use per_head=False"
    )


def example_inputs(model: Any) -> dict[str, Tensor]:
    """Return a text, an image or both, according to the inputs that a model declares."""
    config = model.config
    kinds = (model.main_input_name, *getattr(model, "input_modalities", ()))
    inputs: dict[str, Tensor] = {}
    if any(kind in ("input_ids", "text") for kind in kinds):
        inputs = dict(model.dummy_inputs)
    if "pixel_values" in kinds:
        configs = [config, *(getattr(config, name, None) for name in config.sub_configs)]
        entry = lambda name, default: next(
            (x for c in configs if (x := getattr(c, name, None))), default
        )
        channels, size = entry("num_channels", 3), entry("image_size", 224)
        size = (size, size) if isinstance(size, int) else tuple(size)
        inputs["pixel_values"] = torch.zeros(1, channels, *size, dtype=model.dtype)
    if getattr(config, "is_encoder_decoder", False):
        ids = inputs.get("input_ids", torch.zeros(1, 5, dtype=torch.long))
        inputs.setdefault("decoder_input_ids", ids)
    return {name: x.to(model.device) for name, x in inputs.items()}


# Messages


def describe_unsupported(model: nn.Module, unsupported: Mapping[str, list[str]]) -> str:
    """Say which arguments the modules of a model pass on that PDE attention does not support."""
    arguments = dict.fromkeys(argument for names in unsupported.values() for argument in names)
    return (
        f"{type(model).__name__}'s attention needs {describe_arguments(arguments)}, which PDE attention "
        f"does not know ({first_and_count([*unsupported])})"
    )


def describe_arguments(arguments: Iterable[str]) -> str:
    """Return arguments with their meanings, such as ``"s_aux (attention sinks)"``."""
    return ", ".join(f"{argument} ({UNSUPPORTED[argument]})" for argument in arguments)


def first_and_count(names: list[str]) -> str:
    """Return the first name, and the number of the others."""
    return (names[0] or "anywhere") + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def warn_of_bypass(model: nn.Module, name: str, bypassing: list[str], stacklevel: int = 3) -> None:
    """Warn about modules that compute attention by themselves, if there are any."""
    if bypassing:
        warnings.warn(
            f"{type(model).__name__} computes attention by itself ({first_and_count(bypassing)}): "
            f"attn_implementation={name!r} does not reach it, it stays ordinary attention",
            stacklevel=stacklevel,
        )
