"""PDE attention for Hugging Face models: one call, then a name.

>>> from transformers import GPT2Config, GPT2LMHeadModel
>>> import torch
>>> from attractor.integrations import transformers as pde
>>> pde.register()
['pde_diffusion', 'pde_wave', 'pde_reaction_diffusion', 'pde_advection_diffusion']
>>> small = GPT2Config(n_layer=2, n_head=2, n_embd=8, attn_implementation="pde_diffusion")
>>> model = GPT2LMHeadModel(small)
>>> model(torch.tensor([[3, 1, 4, 1, 5]])).logits.shape
torch.Size([1, 5, 50257])

The coefficients of this model are the default numbers of the equation. `add_pde` gives every attention
module learnable coefficients, which start at 0, where the output equals that without a PDE:

>>> model = pde.add_pde(model, "diffusion", steps=2)
>>> model.transformer.h[0].attn.pde().alpha.item() == 0
True

They are parameters of the model and entries of its state dict. `save_pretrained` saves them, and
`from_pretrained` restores them after `register`. `check` lists the attention modules of a model that PDE
attention does not reach.

`parameter_groups` returns optimiser groups in which coefficients have no weight decay; transformers'
Trainer accepts an optimiser of them as ``optimizers=(torch.optim.AdamW(groups), None)``.

Padding, packed texts, sliding windows and caches of every kind are walls, through which nothing flows.
Generation with a cache equals a forward pass on the whole text.
"""

from collections.abc import Mapping
from dataclasses import fields
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from attractor.attention.pdes import BY_NAME, PDE, get_pde
from attractor.common.checks import check_choice
from attractor.integrations.transformers_attention import AttentionFunction
from attractor.integrations.transformers_check import check, check_model
from attractor.integrations.transformers_loading import check_class, default_setting, install
from attractor.integrations.transformers_masks import BypassError, describe_masks, make_mask
from attractor.integrations.transformers_modules import (
    attention_modules,
    bypassing_modules,
    describe_unsupported,
    is_pde_attention,
    number_of_heads,
    set_along_path,
    unsupported_arguments,
    warn_of_bypass,
    why_not,
)
from attractor.integrations.transformers_refinement import (
    SETTING,
    VERSION,
    Refinement,
    Setting,
    has_adapter,
)
from attractor.train.groups import parameter_groups

if find_spec("transformers") is None:
    raise ImportError(
        "attractor.integrations.transformers needs transformers: pip install 'attractor[text]'"
    )

__all__ = ["add_pde", "check", "load", "parameter_groups", "register"]

NAMES = {f"pde_{name}": name for name in BY_NAME}
STARTS = ("identity", "paper")


def register(
    steps: int = 4,
    dt: float = 1.0,
    walls: str = "mask",
    method: str = "auto",
    names: Mapping[str, PDE | str] = NAMES,
) -> list[str]:
    """Make PDE attention available to transformers, and return the values for ``attn_implementation=``.

    The default values are ``"pde_diffusion"``, ``"pde_wave"``, ``"pde_reaction_diffusion"`` and
    ``"pde_advection_diffusion"``, each with the default coefficients of its PDE. Models that PDE
    attention cannot reach raise a `BypassError` when they are made with one of these names, or when it
    is set.

    Models look up the name in each forward pass, so a second call of this function changes existing
    models, too. To use two settings side by side, register them under different names:
    ``register(names={"pde_strong": pdes.Diffusion(0.3)})``. The call does not change the PDE that
    `add_pde` gave to a model.

    Args:
        steps: Number of steps that a map takes; 0 is ordinary attention.
        dt: Size of a step in pseudo-time.
        walls: As in `pde_attention`; with other values than ``"mask"``, a language model sees its
        future.
        method: As in `pde_attention`.
        names: Equations, or their names, by the name under which to register them.

    Raises:
        ValueError: A step is unstable, an option does not exist, or transformers gives a name another
            meaning. Nothing is registered then.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    install(add_pde, _use, _accept)
    registered, functions = AttentionInterface(), {}
    for name, pde in names.items():
        equation = get_pde(pde)() if isinstance(pde, str) else pde
        reserved = [part for part in ("/", "|", "sdpa", "flash", "flex_attention") if part in name]
        is_ours = name not in registered or isinstance(registered[name], AttentionFunction)
        if reserved or name == "eager" or not is_ours:
            raise ValueError(
                f"{name!r} is no name for PDE attention: "
                + (f"transformers gives {reserved[0]!r} a meaning" if reserved else "it is taken")
            )
        functions[name] = AttentionFunction(name, Setting(equation, steps, dt, walls, method))
    describe_masks()
    for name, function in functions.items():
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, make_mask)
    return list(names)


def add_pde(
    model: Any,
    pde: str | PDE = "diffusion",
    steps: int = 4,
    dt: float = 1.0,
    *,
    start: str = "identity",
    per_head: bool = False,
    learn: bool = True,
    walls: str = "mask",
) -> Any:
    """Give every attention module of a model a PDE of its own, and return the model.

    The coefficients of a module are parameters of its submodule `pde`, which remain stable in training
    (see `LearnedPDE`). If `pde` is a name, they start at 0, where the output of the model does not
    change but the gradients are not 0. Another call starts them anew.

    The settings are stored in the model's config, as `pde_attention`. After `register`, or a call of
    this function, transformers restores them in every model that is made from such a config, and
    `from_pretrained` loads the coefficients or raises. A process that has not imported this module
    cannot load such a model, because it does not know the attn_implementation in the config.

    Args:
        model: A model of transformers, which is changed in place.
        pde: The name of an equation, or an equation with the initial coefficients.
        steps, dt, walls: As in `register`, for this model only.
        start: Initial coefficients if `pde` is a name and they are learned: ``"identity"`` for 0 (for a
            wave, 1e-6 of the limit of c), or ``"paper"`` for the defaults of the equation, which are the
            paper's. Coefficients that are not learned always have these defaults.
        per_head: Whether each head has coefficients of its own, instead of one set per module.
        learn: Whether the coefficients are parameters; otherwise they are constants.

    Raises:
        ValueError: No module of the model uses transformers' `AttentionInterface`, its attention needs
            something that PDE attention does not support (sinks, an indexer), or the PDE is unstable.
            The model is not changed then.

    Warns:
        UserWarning: Some modules of the model compute attention by themselves.
    """
    check_choice("start", start, STARTS)
    equation: Any = get_pde(pde)() if isinstance(pde, str) else pde
    name = _implementation(equation)
    if isinstance(pde, str) and learn and start == "identity":
        equation = type(equation)(**dict.fromkeys(_coefficients(equation), 0.0))
    setting = Setting(equation, steps, dt, walls)
    check_model(model)
    if has_adapter(model):
        raise ValueError(
            "model has an adapter of peft, which would leave coefficients out when it is saved: call "
            'add_pde before get_peft_model, and pass modules_to_save=["pde"] to the adapter\'s config'
        )
    modules = attention_modules(model)
    if not modules:
        raise ValueError(
            f"{type(model).__name__} has no attention that PDE attention could reach: none of its "
            "modules calls transformers' AttentionInterface"
        )
    if unsupported := unsupported_arguments(modules):
        raise ValueError(
            f"{describe_unsupported(model, unsupported)}: use another attn_implementation for this "
            "model, or give add_pde a part of it that does without"
        )
    refinements = [
        Refinement(setting, number_of_heads(module) if per_head else None, learn)
        for module in modules.values()
    ]
    coefficients = {f.name: getattr(equation, f.name) for f in fields(equation)}
    numbers = {n: c.flatten().tolist() if isinstance(c, Tensor) else c for n, c in coefficients.items()}
    entry = {
        "pde": name.removeprefix("pde_"), "coefficients": numbers, "steps": steps, "dt": dt,
        "per_head": per_head, "learn": learn, "walls": walls, "version": VERSION,
        "modules": len(modules),
    }  # fmt: skip
    for module, refinement in zip(modules.values(), refinements, strict=True):
        weight = next(module.parameters(), None)
        if weight is not None and not weight.is_meta:
            refinement.to(weight.device, torch.promote_types(weight.dtype, torch.float32))
        module.pde = refinement
    setattr(model.config, SETTING, entry)
    model.config.attn_implementation = name  # saved, unlike the private attribute that models read
    install(add_pde, _use, _accept)
    _use(model, name, modules)
    warn_of_bypass(model, name, bypassing_modules(model, modules))
    return model


def _coefficients(equation: Any) -> list[str]:
    """Return the names of the fields of an equation that are numbers; `split` is a bool."""
    return [f.name for f in fields(equation) if not isinstance(getattr(equation, f.name), bool)]


def _implementation(equation: PDE) -> str:
    """Return the value of ``attn_implementation`` for an equation."""
    for name, kind in BY_NAME.items():
        if type(equation) is kind:
            return f"pde_{name}"
    raise ValueError(
        f"{type(equation).__name__} is not one of {', '.join(BY_NAME)}; a PDE of your own can be "
        'registered with constant coefficients: register(names={"pde_mine": ...})'
    )


def _use(model: Any, name: str, modules: Mapping[str, nn.Module]) -> None:
    """Set ``attn_implementation`` of a model and of its attention modules."""
    from transformers import AttentionInterface

    if name not in AttentionInterface():
        register(names={name: NAMES[name]})
    method = type(model).set_attn_implementation
    # The original method of transformers, because `_accept` would warn again.
    getattr(method, "__wrapped__", method)(model, name)
    for path in modules:
        set_along_path(model, path, name)


def _accept(model: Any, name: Any) -> bool:
    """Return whether a name is one of PDE attention; warn about modules that it does not reach.

    Raises:
        BypassError: It is, but PDE attention does not reach the model.
    """
    if not is_pde_attention(name):
        return False
    if reason := why_not(model, name):
        raise BypassError(reason)
    warn_of_bypass(model, name, bypassing_modules(model, attention_modules(model)), stacklevel=4)
    return True


def load(model_class: Any, folder: Any, **options: Any) -> Any:
    """Return ``model_class.from_pretrained(folder, **options)`` for a model that `add_pde` changed.

    After `register`, `from_pretrained` loads such models as well. This function raises for models
    without a PDE, and uses the PDE of the folder if the argument `config` has none.

    Args:
        model_class: A class of transformers, such as ``GPT2LMHeadModel`` or ``AutoModelForCausalLM``.
        folder: A folder that `save_pretrained` wrote, or its name on the hub.
        **options: Arguments of `from_pretrained`: ``dtype``, ``device_map``, ``config`` (an object or a
            folder), and entries of the config such as ``num_labels=3``.

    Raises:
        TypeError: `model_class` is not such a class, or neither `from_pretrained` nor the config or
            class of the model knows an option.
        ValueError: The model was saved without a PDE or without its coefficients, or an option requests
            another attn_implementation.
    """
    from transformers import AttentionInterface, AutoConfig, PreTrainedConfig, PreTrainedModel

    check_class(model_class)
    of_hub = ("cache_dir", "code_revision", "force_download", "local_files_only", "proxies", "revision",
              "subfolder", "token", "trust_remote_code")  # fmt: skip
    hub_options = {name: options[name] for name in of_hub if name in options}
    source = options.get("config")
    config = source
    if not isinstance(config, PreTrainedConfig):
        config = AutoConfig.from_pretrained(folder if source is None else source, **hub_options)
    entry: Any = getattr(config, SETTING, None)
    if entry is None and source is not None:
        entry = getattr(AutoConfig.from_pretrained(folder, **hub_options), SETTING, None)
    if entry is None:
        raise ValueError(
            f"{folder} was saved without a PDE: use {model_class.__name__}.from_pretrained, then add_pde"
        )
    name = f"pde_{entry['pde']}"
    if name not in AttentionInterface():
        register(names={name: NAMES[name]})
    install(add_pde, _use, _accept)
    options.pop("code_revision", None)  # only the from_pretrained of auto classes takes it
    if not issubclass(model_class, PreTrainedModel):  # auto classes take no folder as config
        code = {n: x for n, x in hub_options.items() if n in ("code_revision", "trust_remote_code")}
        with torch.device("meta"):
            model_class = type(model_class.from_config(config, **code))
    with default_setting(entry):
        return model_class.from_pretrained(folder, **options)
