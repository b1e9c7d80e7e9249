"""Which attention modules of a Hugging Face model PDE attention reaches: `check`."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from attractor.integrations.transformers_masks import BypassError
from attractor.integrations.transformers_modules import (
    UNSUPPORTED,
    attention_modules,
    bypassing_modules,
    describe_unsupported,
    example_inputs,
    first_and_count,
    is_pde_attention,
    unsupported_arguments,
    warn_of_bypass,
)


def check_model(model: Any) -> None:
    """Raise unless `model` is a model of transformers."""
    if not (isinstance(model, nn.Module) and hasattr(model, "config")):
        raise TypeError(f"model is a {type(model).__name__}; give a model of transformers")


def check(model: Any, **inputs: Any) -> list[str]:
    """Run a model once, and warn if some of its attention does not go through PDE attention.

    Longformer, BigBird, Reformer, Bloom and other models that compute attention by themselves, and
    GPT-OSS, whose attention sinks PDE attention does not support, raise a `BypassError` when they are
    made with such an attn_implementation, or when it is set. This function is for other models: those of
    which a part computes attention by itself, and those with parts whose config has another
    attn_implementation.

    Args:
        model: A model of transformers whose attn_implementation is one of `register`'s.
        **inputs: Arguments of its forward. If there are none, the function makes a text, an image or
            both, provided that the model declares its inputs.

    Returns:
        The names of the attention modules that PDE attention does not reach. The name "" is the model
        itself, if nothing in it is called attention.

    Raises:
        ValueError: PDE attention could reach the model, but its attn_implementation is another one; or
            the model does not run with the inputs that this function made.
    """
    check_model(model)
    name = model.config._attn_implementation
    candidates = attention_modules(model)
    if not is_pde_attention(name):
        if candidates:
            raise ValueError(
                f"the model's attn_implementation is {name!r}, not one of PDE attention; set it with "
                "model.set_attn_implementation. If that was done, transformers did not accept the name "
                f"for {type(model).__name__}, and its log says why: add_pde does not ask it"
            )
        bypassing = bypassing_modules(model, {}) or [""]
        warn_of_bypass(model, "pde_...", bypassing)
        return bypassing
    kwargs = inputs or example_inputs(model)
    modes = [(module, module.training) for module in model.modules()]
    completed = False
    try:
        with record_calls(name) as (callers, rejected), torch.no_grad(), suppress(BypassError):
            model.eval()(**kwargs)
            completed = True
    except Exception as error:
        if inputs:
            raise
        raise ValueError(
            f"{type(model).__name__} does not run with the inputs that check made "
            f"({', '.join(kwargs)}): {error}; pass inputs for its forward, as in "
            "check(model, input_ids=ids)"
        ) from error
    finally:
        for module, mode in modes:
            module.training = mode
    reached = {n: m for n, m in model.named_modules() if m in callers}
    unsupported = unsupported_arguments(candidates)
    unsupported |= {n: rejected[m] for n, m in model.named_modules() if m in rejected}
    implementation = lambda module: getattr(
        getattr(module, "config", None), "_attn_implementation", None
    )
    others = [n for n, module in candidates.items() if not is_pde_attention(implementation(module))]
    bypassing = bypassing_modules(model, reached | candidates)
    if not (unsupported or others or bypassing or (reached and completed)):
        bypassing = [n for n in candidates if n not in reached] or [""]
    warn_of_bypass(model, name, bypassing)
    if others:
        warnings.warn(
            f"{type(model).__name__} has modules with a config of their own, where attn_implementation "
            f"is not {name!r} ({first_and_count(others)}): they stay as they are. add_pde sets it "
            "there, too",
            stacklevel=2,
        )
    if unsupported:
        message = f"{describe_unsupported(model, unsupported)}: running it raises"
        warnings.warn(message, stacklevel=2)
    return [n for n, _ in model.named_modules() if n in {*bypassing, *others, *unsupported}]


@contextmanager
def record_calls(name: str) -> Iterator[tuple[set[nn.Module], dict[nn.Module, list[str]]]]:
    """Record the modules that call an attention function while the context is active.

    Args:
        name: The value of ``attn_implementation`` of the function.

    Yields:
        The modules that call the function; and, by module, the unsupported arguments of other calls,
        which return zeros.
    """
    from transformers import AttentionInterface

    function: Any = AttentionInterface().get(name)
    callers: set[nn.Module] = set()
    rejected: dict[nn.Module, list[str]] = {}

    def record(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        if names := [argument for argument in UNSUPPORTED if kwargs.get(argument) is not None]:
            rejected[module] = names
            return query.new_zeros(*query.transpose(1, 2).shape[:-1], value.shape[-1]), None
        callers.add(module)
        return function(module, query, key, value, *args, **kwargs)

    AttentionInterface.register(name, record)
    try:
        yield callers, rejected
    finally:
        AttentionInterface.register(name, function)
