"""Restores the PDE of saved models.

`register` calls `install`. After that, transformers adds the PDE of `add_pde` to every model that is
made from a config with the entry `SETTING`, before its weights are loaded. `from_pretrained` raises if
coefficients are missing, and every way of loading raises if it would omit saved coefficients.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from os import PathLike
from typing import Any, NoReturn

import torch
from torch import nn

from attractor.attention.pdes import LearnedPDE
from attractor.integrations.transformers_masks import BypassError
from attractor.integrations.transformers_modules import (
    attention_modules,
    is_part,
    is_pde_attention,
    maker,
)
from attractor.integrations.transformers_refinement import SETTING, VERSION, from_config

LEARNED = "pde.learned"  # part of the names of coefficients in state dicts


@dataclass(frozen=True)
class _Loading:
    """A running call of `from_pretrained`.

    Attributes:
        model_class: The class of the model.
        setting: The setting to use if the config has none.
    """

    model_class: type
    setting: Mapping[str, Any] | None = None


_loading: ContextVar[_Loading | None] = ContextVar("loading", default=None)
_default: ContextVar[Mapping[str, Any] | None] = ContextVar("default", default=None)


def install(
    add: Callable[..., Any], use: Callable[..., Any], accept: Callable[[Any, Any], bool]
) -> None:
    """Wrap the methods of `PreTrainedModel` that make, load and change models, once per process.

    Args:
        add: `add_pde`.
        use: A function ``(model, name, modules)`` that sets ``attn_implementation`` of the attention
            modules, which are a dictionary by name.
        accept: A function ``(model, name)`` that returns whether the name is one of PDE attention. It
            raises if PDE attention cannot reach the model.
    """
    from transformers import PreTrainedModel

    post_init, from_pretrained = PreTrainedModel.post_init, PreTrainedModel.from_pretrained.__func__
    if getattr(post_init, "restores_pde", False):
        return

    init, set_name = PreTrainedModel.__init__, PreTrainedModel.set_attn_implementation

    @wraps(init)
    def init_and_check_tables(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        _reject_in_tables(type(self), self.config._attn_implementation)

    @wraps(post_init)
    def post_init_and_restore(self: Any) -> None:
        post_init(self)
        if not is_part(self, PreTrainedModel):
            accept(self, self.config._attn_implementation)
        _restore(self, add, use)

    @wraps(set_name)
    def accept_and_set(self: Any, attn_implementation: Any, *args: Any, **options: Any) -> None:
        if accept(self, attn_implementation):
            use(self, attn_implementation, attention_modules(self))
        else:
            set_name(self, attn_implementation, *args, **options)

    @wraps(from_pretrained)
    def from_pretrained_and_check(
        cls: Any, *args: Any, output_loading_info: bool = False, **options: Any
    ) -> Any:
        with _set(_loading, _Loading(cls, _default.get())), _set(_default, None):
            model, info = from_pretrained(cls, *args, output_loading_info=True, **options)
        _check_attention(model, args, options)
        _check_coefficients(model, args, info)
        return (model, info) if output_loading_info else model

    load_from_state_dict = PreTrainedModel._load_from_state_dict

    @wraps(load_from_state_dict)
    def load_from_state_dict_or_raise(
        self: Any, state_dict: Mapping[str, Any], prefix: str, *args: Any, **options: Any
    ) -> None:
        _check_places(self, state_dict, prefix)
        load_from_state_dict(self, state_dict, prefix, *args, **options)

    post_init_and_restore.restores_pde = True  # type: ignore[attr-defined]
    PreTrainedModel.__init__ = init_and_check_tables
    PreTrainedModel.post_init = post_init_and_restore
    PreTrainedModel.set_attn_implementation = accept_and_set
    PreTrainedModel._load_from_state_dict = load_from_state_dict_or_raise
    PreTrainedModel.from_pretrained = classmethod(from_pretrained_and_check)


def _reject_in_tables(kind: type, name: Any) -> None:
    """Add a class that raises to a model's table of attention classes, such as GPT-J's.

    These models look up their attention class before `post_init`, and would raise a KeyError.
    """
    if not is_pde_attention(name):
        return
    for variable, table in vars(sys.modules.get(kind.__module__)).items():
        if variable.endswith("ATTENTION_CLASSES") and isinstance(table, dict):
            table.setdefault(name, _reject)


def _reject(*args: Any, **options: Any) -> NoReturn:
    from transformers import PreTrainedModel

    raise BypassError(
        f"{maker(PreTrainedModel)} has its own classes of attention, outside of transformers' "
        "AttentionInterface, which PDE attention would not reach; use 'eager' or 'sdpa'"
    )


def default_setting(setting: Mapping[str, Any]) -> Any:
    """Return a context in which `from_pretrained` uses this setting for configs that have none."""
    return _set(_default, setting)


@contextmanager
def _set(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """Set a context variable while the context is active."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def _restore(model: Any, add: Callable[..., Any], use: Callable[..., Any]) -> None:
    """Add the PDE that a model's config describes, unless the model has one."""
    setting, loading = getattr(model.config, SETTING, None), _loading.get()
    if setting is None and loading is not None and type(model) is loading.model_class:
        setting = loading.setting
    if setting is None:
        return
    modules = attention_modules(model)
    if not all("pde" in module._modules for module in modules.values()):
        with torch.device("cpu"):  # from_pretrained makes models on the meta device
            equation, options = from_config(setting)
            add(model, equation, **options)
        if count := setting.get("modules"):  # this class may have fewer modules
            getattr(model.config, SETTING)["modules"] = count
        if loading is not None and setting.get("version", 1) < VERSION:
            for module in modules.values():
                module.pde.learned = module.pde.learned and _Logits(module.pde.learned)
    else:  # a part was made before, such as the GPT2Model of a GPT2LMHeadModel
        use(model, f"pde_{setting['pde']}", modules)
    model._keep_in_fp32_modules_strict = {*(model._keep_in_fp32_modules_strict or ()), LEARNED}


class _Logits(nn.Module):
    """Parameters with the names of version 1, while a model of that version is loaded."""

    def __init__(self, learned: LearnedPDE) -> None:
        super().__init__()
        self.learned_pde = [learned]  # in a list, so that it is not a child
        for name in learned.signed:
            raw = getattr(learned, f"{name}_raw")
            self.register_parameter(f"{name}_logit", nn.Parameter(torch.full_like(raw, torch.nan)))

    def convert(self) -> LearnedPDE:
        """Return the `LearnedPDE` with the coefficients of these logits."""
        (learned,) = self.learned_pde
        like = next(self.parameters())
        learned.load_state_dict({name: logit.detach() for name, logit in self.named_parameters()})
        return learned.to(like.device)


def _check_attention(model: Any, args: Any, options: Mapping[str, Any]) -> None:
    """Raise if the caller requests an attn_implementation other than that of the model's PDE."""
    if (setting := getattr(model.config, SETTING, None)) is None:
        return
    saved = f"pde_{setting['pde']}"
    config: Any = options.get("config")
    requested = options.get("attn_implementation")
    if requested is None and hasattr(config, SETTING):  # auto classes write the argument into the config
        requested = config._attn_implementation
    if requested not in (None, saved):
        raise ValueError(
            f"attn_implementation = {requested!r}, but {_folder(args)} was saved with {saved!r}; leave "
            f"it out, and call set_attn_implementation({requested!r}) on the model that is returned"
        )


def _check_places(model: nn.Module, state_dict: Mapping[str, Any], prefix: str) -> None:
    """Raise if coefficients in a state dict belong to modules of the model that have no PDE."""
    for name in state_dict:
        path, separator, _ = name.removeprefix(prefix).rpartition(f".{LEARNED}.")
        if not separator or not name.startswith(prefix):
            continue
        try:
            has_pde = "pde" in model.get_submodule(path)._modules
        except AttributeError:  # another architecture, for which torch raises
            continue
        if not has_pde:
            raise ValueError(
                f"the state dict has coefficients of a PDE ({name}), and {type(model).__name__} has no "
                "PDE there: call add_pde on the model first, or load the model that it was saved with"
            )


def _check_coefficients(model: Any, args: Any, info: Any) -> None:
    """Raise if coefficients are missing, or if the model has no module for saved ones."""
    modules = [m for m in attention_modules(model).values() if "pde" in m._modules]
    info = info if isinstance(info, Mapping) else {}
    coefficients = lambda names: sorted(name for name in names if f".{LEARNED}." in f".{name}")
    mismatched = (key for key, *_ in info.get("mismatched_keys", ()))
    if missing := coefficients({*info.get("missing_keys", ()), *mismatched}):
        raise ValueError(
            f"{_folder(args)} has no numbers for {', '.join(missing[:3])}; it was not saved whole"
        )
    setting = getattr(model.config, SETTING, {})
    count = setting.get("modules") or len(modules)
    unexpected = coefficients(info.get("unexpected_keys", ()))
    if unexpected or len(modules) > count or (setting and not modules and attention_modules(model)):
        without = f", without a place for {unexpected[0]}" if unexpected else ""
        raise ValueError(
            f"{_folder(args)} was saved with a PDE in {count} modules, and {type(model).__name__} has "
            f"one in {len(modules)} modules{without}; load it with the config that is saved there, and "
            "call add_pde with the whole model, not with a part that shares its config"
        )
    for module in modules:
        if isinstance(module.pde.learned, _Logits):
            module.pde.learned = module.pde.learned.convert()


def _folder(args: Any) -> Any:
    """Return the first argument of `from_pretrained` for error messages."""
    return args[0] if args else "the model"


def check_class(model_class: Any) -> None:
    """Raise unless `model_class` is a class of transformers' models, or one of its auto classes."""
    import transformers

    if isinstance(model_class, type):
        is_model = issubclass(model_class, transformers.PreTrainedModel)
        if getattr(model_class, "config_class" if is_model else "from_config", None):
            return
        description = model_class.__name__
    else:
        is_text = isinstance(model_class, (str, PathLike))
        description = repr(model_class) if is_text else f"a {type(model_class).__name__}"
    is_name = isinstance(model_class, str) and hasattr(transformers, model_class)
    example = f"transformers.{model_class}" if is_name else "GPT2LMHeadModel or AutoModelForCausalLM"
    raise TypeError(
        f"model_class is {description}; give a class of transformers' models itself, such as {example}, "
        "and then the folder"
    )
