"""Saved models come back with their PDE.

`register` calls `install`: from then on transformers adds the PDE of `add_pde` to every model that is
made from a config with the entry `SETTING`, before its weights are loaded; `from_pretrained` raises
where coefficients are missing, and loading of any kind where they would be left out. Of use there only:
`attractor.integrations.transformers` calls it.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import nn

from attractor.attention.pdes import LearnedPDE
from attractor.integrations.transformers_masks import BypassError
from attractor.integrations.transformers_modules import asking, is_part, is_pde_attention, maker
from attractor.integrations.transformers_refinement import SETTING, VERSION, from_config

LEARNED = "pde.learned"  # the part of a parameter's name that tells coefficients


@dataclass(frozen=True)
class _Loading:
    """A call of `from_pretrained`: the class, and the setting to use if the config has none."""

    model_class: type
    setting: Mapping[str, Any] | None = None


_loading: ContextVar[_Loading | None] = ContextVar("loading", default=None)
_default: ContextVar[Mapping[str, Any] | None] = ContextVar("default", default=None)


def install(
    add: Callable[..., Any], use: Callable[..., Any], accept: Callable[[Any, Any], bool]
) -> None:
    """Wrap methods of `PreTrainedModel` with which models are made, loaded and changed, once.

    Args:
        add: `add_pde`.
        use: Called with a model, the name of an attention function, and attention modules by their
            names: lets them use it.
        accept: Called with a model and the name of its attention: tells whether the name is one of PDE
            attention, and raises if it is and does not reach the model.
    """
    from transformers import PreTrainedModel

    post_init, from_pretrained = PreTrainedModel.post_init, PreTrainedModel.from_pretrained.__func__
    if getattr(post_init, "restores_pde", False):
        return

    init, set_name = PreTrainedModel.__init__, PreTrainedModel.set_attn_implementation

    @wraps(init)
    def init_and_refuse(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        _refuse_in_tables(type(self), self.config._attn_implementation)

    @wraps(post_init)
    def post_init_and_restore(self: Any) -> None:
        post_init(self)
        if not is_part(self, PreTrainedModel):
            accept(self, self.config._attn_implementation)
        _restore(self, add, use)

    @wraps(set_name)
    def accept_and_set(self: Any, attn_implementation: Any, *args: Any, **options: Any) -> None:
        if accept(self, attn_implementation):
            use(self, attn_implementation, asking(self))
        else:
            set_name(self, attn_implementation, *args, **options)

    @wraps(from_pretrained)
    def from_pretrained_and_check(
        cls: Any, *args: Any, output_loading_info: bool = False, **options: Any
    ) -> Any:
        with _value(_loading, _Loading(cls, _default.get())), _value(_default, None):
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
    PreTrainedModel.__init__ = init_and_refuse
    PreTrainedModel.post_init = post_init_and_restore
    PreTrainedModel.set_attn_implementation = accept_and_set
    PreTrainedModel._load_from_state_dict = load_from_state_dict_or_raise
    PreTrainedModel.from_pretrained = classmethod(from_pretrained_and_check)


def _refuse_in_tables(kind: type, name: Any) -> None:
    """Let a table of attention classes by names, as GPT-J's has one, have a class that raises.

    Models of this kind look their attention class up before `post_init`, and knew nothing better than a
    KeyError.
    """
    if not is_pde_attention(name):
        return
    for variable, table in vars(sys.modules.get(kind.__module__)).items():
        if variable.endswith("ATTENTION_CLASSES") and isinstance(table, dict):
            table.setdefault(name, _refuse)


def _refuse(*args: Any, **options: Any) -> NoReturn:
    from transformers import PreTrainedModel

    raise BypassError(
        f"{maker(PreTrainedModel)} has its own classes of attention, outside of transformers' "
        "AttentionInterface, which PDE attention would not reach; use 'eager' or 'sdpa'"
    )


def default_setting(setting: Mapping[str, Any]) -> Any:
    """Return a context in which `from_pretrained` takes this setting for a config that has none."""
    return _value(_default, setting)


@contextmanager
def _value(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def _restore(model: Any, add: Callable[..., Any], use: Callable[..., Any]) -> None:
    """Add the PDE that a model's config describes, unless the model has it."""
    setting, loading = getattr(model.config, SETTING, None), _loading.get()
    if setting is None and loading is not None and type(model) is loading.model_class:
        setting = loading.setting
    if setting is None:
        return
    modules = asking(model)
    if not all("pde" in module._modules for module in modules.values()):
        with torch.device("cpu"):  # from_pretrained makes modules without numbers
            equation, options = from_config(setting)
            add(model, equation, **options)
        if count := setting.get("modules"):  # this class may have fewer
            getattr(model.config, SETTING)["modules"] = count
        if loading is not None and setting.get("version", 1) < VERSION:
            for module in modules.values():
                module.pde.learned = module.pde.learned and _Logits(module.pde.learned)
    else:  # of a part that was made before, such as the GPT2Model of a GPT2LMHeadModel
        use(model, f"pde_{setting['pde']}", modules)
    model._keep_in_fp32_modules_strict = {*(model._keep_in_fp32_modules_strict or ()), LEARNED}


class _Logits(nn.Module):
    """Parameters under the names of version 1, while such a model is loaded."""

    def __init__(self, learned: LearnedPDE) -> None:
        super().__init__()
        self.start = [learned]  # not a part
        for name in learned.signed:
            raw = getattr(learned, f"{name}_raw")
            self.register_parameter(f"{name}_logit", nn.Parameter(torch.full_like(raw, torch.nan)))

    def converted(self) -> LearnedPDE:
        """Return the module with parameters for the same coefficients."""
        (learned,) = self.start
        like = next(self.parameters())
        learned.load_state_dict({name: logit.detach() for name, logit in self.named_parameters()})
        return learned.to(like.device)


def _check_attention(model: Any, args: Any, options: Mapping[str, Any]) -> None:
    """Raise if the caller asked for another attention than that of the model's PDE."""
    if (setting := getattr(model.config, SETTING, None)) is None:
        return
    own = f"pde_{setting['pde']}"
    config: Any = options.get("config")
    asked = options.get("attn_implementation")
    if asked is None and hasattr(config, SETTING):  # auto classes write what is asked into the config
        asked = config._attn_implementation
    if asked not in (None, own):
        raise ValueError(
            f"attn_implementation = {asked!r}, but {_folder(args)} was saved with {own!r}; leave it "
            f"out, and call set_attn_implementation({asked!r}) on the model that is returned"
        )


def _check_places(model: nn.Module, state_dict: Mapping[str, Any], prefix: str) -> None:
    """Raise if coefficients in a state dict belong to modules of the model that have no PDE."""
    for name in state_dict:
        path, found, _ = name.removeprefix(prefix).rpartition(f".{LEARNED}.")
        if not found or not name.startswith(prefix):
            continue
        try:
            has_place = "pde" in model.get_submodule(path)._modules
        except AttributeError:  # of another architecture, which torch will say
            continue
        if not has_place:
            raise ValueError(
                f"the state dict has coefficients of a PDE ({name}), and {type(model).__name__} has no "
                "PDE there: call add_pde on the model first, or load the model that it was saved with"
            )


def _check_coefficients(model: Any, args: Any, info: Any) -> None:
    """Raise if coefficients are missing, or were saved and have no place in the model."""
    modules = [m for m in asking(model).values() if "pde" in m._modules]
    info = info if isinstance(info, Mapping) else {}
    without_numbers = {*info.get("missing_keys", ()), *(x[0] for x in info.get("mismatched_keys", ()))}
    lost = sorted(name for name in without_numbers if f".{LEARNED}." in f".{name}")
    if lost:
        raise ValueError(
            f"{_folder(args)} has no numbers for {', '.join(lost[:3])}; it was not saved whole"
        )
    setting = getattr(model.config, SETTING, {})
    count = setting.get("modules") or len(modules)
    left_out = sorted(name for name in info.get("unexpected_keys", ()) if f".{LEARNED}." in f".{name}")
    if left_out or len(modules) > count or (setting and not modules and asking(model)):
        without = f", without a place for {left_out[0]}" if left_out else ""
        raise ValueError(
            f"{_folder(args)} was saved with a PDE in {count} modules, and {type(model).__name__} has "
            f"one in {len(modules)} modules{without}; load it with the config that is saved there, and "
            "call add_pde with the whole model, not with a part that shares its config"
        )
    for module in modules:
        if isinstance(module.pde.learned, _Logits):
            module.pde.learned = module.pde.learned.converted()


def _folder(args: Any) -> Any:
    return args[0] if args else "the model"
