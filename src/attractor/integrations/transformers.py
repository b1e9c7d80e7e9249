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

So far the coefficients are the PDE's own numbers. `add_pde` gives every attention module coefficients
that are learnt, and that start at 0, where the model computes what it computes without a PDE:

>>> model = pde.add_pde(model, "diffusion", steps=2)
>>> model.transformer.h[0].attn.pde().alpha.item() == 0  # so far
True

They are part of the model's parameters and of its state dict; `save_pretrained` saves them, and
`from_pretrained` restores them after `register`. `check` tells whether PDE attention reaches a model's
attention at all.

Padding, packed texts, sliding windows and every kind of cache are walls: nothing flows through them,
and cached generation gives what the whole text at once gives.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields
from importlib.util import find_spec
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from attractor.attention import kernels, masks, pde_attention
from attractor.attention.pde_attention import attention_and_map
from attractor.attention.pdes import BY_NAME, PDE, get_pde
from attractor.attention.precision import accumulate_dtype, for_scores
from attractor.common.checks import check_choice
from attractor.integrations.transformers_loading import default_setting, install
from attractor.integrations.transformers_masks import (
    BypassError,
    Mask,
    describe_masks,
    make_mask,
)
from attractor.integrations.transformers_modules import (
    UNKNOWN,
    asking,
    example_inputs,
    in_words,
    is_pde_attention,
    needing,
    outside,
    refusal,
    say_needs,
    which,
)
from attractor.integrations.transformers_refinement import (
    SETTING,
    VERSION,
    Refinement,
    Setting,
    has_adapter,
    refinement_of,
)
from attractor.train import groups as optimiser_groups

if find_spec("transformers") is None:
    raise ImportError(
        "attractor.integrations.transformers needs transformers: pip install 'attractor[text]'"
    )

NAMES = {f"pde_{name}": name for name in BY_NAME}
STARTS = ("identity", "paper")


def register(
    steps: int = 4,
    dt: float = 1.0,
    walls: str = "mask",
    method: str = "auto",
    names: Mapping[str, PDE | str] = NAMES,
) -> list[str]:
    """Make PDE attention known to transformers; returns the values for ``attn_implementation=``.

    Models that PDE attention cannot reach raise a `BypassError` when they are made with one of these
    names, or when it is set. They are ``"pde_diffusion"``, ``"pde_wave"``, ``"pde_reaction_diffusion"``
    and ``"pde_advection_diffusion"``, each with its PDE's own coefficients. Models look a name up
    whenever they run, so a second call changes models that exist already: the last one counts. To have
    two settings side by side, give them names: ``register(names={"pde_strong": pdes.Diffusion(0.3)})``.
    What `add_pde` gave to a model stays as it is.

    Args:
        steps: how many steps a map takes; 0 is ordinary attention.
        dt: pseudo-time of a step.
        walls: as in `pde_attention`; with anything but ``"mask"`` a language model sees its future.
        method: as in `pde_attention`.
        names: what to register, and under which names: equations, or their names.

    Raises:
        ValueError: an unstable step, an option that does not exist, or a name that transformers would
            take for something else; nothing is registered then.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    install(add_pde, _use, _accept)
    known, made = AttentionInterface(), {}
    for name, pde in names.items():
        equation = get_pde(pde)() if isinstance(pde, str) else pde
        reserved = [part for part in ("/", "|", "sdpa", "flash", "flex_attention") if part in name]
        foreign = name == "eager" or (name in known and not isinstance(known[name], _Attention))
        if reserved or foreign:
            raise ValueError(
                f"{name!r} is no name for PDE attention: "
                + (f"transformers gives {reserved[0]!r} a meaning" if reserved else "it is taken")
            )
        made[name] = _Attention(name, Setting(equation, steps, dt, walls, method))
    describe_masks()
    for name, function in made.items():
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, make_mask)
    return list(names)


# The attention function


class _Attention:
    """A function for transformers' AttentionInterface."""

    is_pde_attention = True

    def __init__(self, name: str, setting: Setting) -> None:
        self.name, self.setting = name, setting
        try:  # transformers 5.0 does not have it, and its GPT-2 cannot return maps
            from transformers.utils.output_capturing import _active_collector
        except ImportError:
            _active_collector = None
        self.collector: Any = _active_collector

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: "Tensor | Mask | None",
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        position_bias: Tensor | None = None,
        softcap: float | None = None,
        **more: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """The output ``[batch, queries, heads, dim]``, and the map A(Nt) where it is asked for.

        query is ``[batch, heads, queries, dim]``; key and value may have fewer heads. With `softcap`
        the scores are a matrix for every head, whatever the method.
        """
        self._refuse(more, attention_mask)
        own = self._refinement(module)
        setting = self.setting if own is None else own.setting
        keys = key.shape[-2]
        if isinstance(attention_mask, Mask):
            where: dict[str, Any] = attention_mask.where()
            key, value = key[..., : attention_mask.keys, :], value[..., : attention_mask.keys, :]
        elif attention_mask is not None:
            where = {"attn_mask": _four_dimensions(attention_mask)}
        else:
            causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            key, value, where = _unmasked(query, key, value, bool(causal), sliding_window)
        wants_map = self._is_map_wanted(more)
        if query.shape[-2] == 1 and not (dropout or softcap or wants_map or position_bias is not None):
            output = _one_query(setting if own is None else own, query, key, value, scaling, **where)
            if output is not None:
                return output.transpose(1, 2), None
        if position_bias is not None:
            where["attn_mask"] = _biased(position_bias[..., : key.shape[-2]], where.get("attn_mask"))
        if softcap:
            where["attn_mask"] = _biased(_capped(query, key, scaling, softcap), where.get("attn_mask"))
            query, scaling = torch.zeros_like(query), 1.0  # all of the scores are in the bias

        options = setting.options()
        if own is not None:
            options["pde"] = own()
        if not wants_map:
            output = pde_attention(
                query, key, value, dropout_p=dropout, scale=scaling, enable_gqa=True, **where, **options
            )
            return output.transpose(1, 2).contiguous(), None
        del options["method"]
        output, A = attention_and_map(
            query, key, value, dropout_p=dropout, scale=scaling, enable_gqa=True, **where, **options
        )
        A = pad(A.to(query.dtype), (0, keys - A.shape[-1]))  # a static cache's empty end
        return output.transpose(1, 2).contiguous(), A

    def _refinement(self, module: nn.Module) -> Any:
        """Return what `add_pde` gave to a module, or None."""
        own = refinement_of(module)
        if own is None:
            if hasattr(getattr(module, "config", None), SETTING):
                raise ValueError(
                    "this model's config says that add_pde changed it, but its modules have no PDE: "
                    "call attractor.integrations.transformers.register() before the model is made"
                )
            return None
        if type(own.setting.equation) is not type(self.setting.equation):
            raise ValueError(
                f"add_pde gave this model {type(own.setting.equation).__name__}, but its "
                f"attn_implementation is {self.name!r}; call add_pde again, or set the name that fits"
            )
        return own

    def _is_map_wanted(self, more: dict[str, Any]) -> bool:
        if more.get("output_attentions"):
            return True
        # Models such as GPT-2 keep the argument to themselves, and collect maps with hooks.
        if self.collector is None or (torch.compiler.is_compiling() and not self.collector.compiling):
            return False
        collected = self.collector.get()
        return collected is not None and any("attentions" in name for name in collected)

    def _refuse(self, more: dict[str, Any], attention_mask: "Tensor | Mask | None") -> None:
        unknown = [name for name in UNKNOWN if more.get(name) is not None]
        if unknown:
            raise ValueError(
                f"{self.name!r} does not know {in_words(unknown)}, which this model's attention needs; "
                "use another attn_implementation for it"
            )
        bounds = more.get("cu_seq_lens_q")
        if attention_mask is None and bounds is not None and len(bounds) > 2:
            raise ValueError(
                f"{self.name!r} does not read cu_seq_lens: for packed texts give position_ids that "
                "start again at 0 with every text, and no attention_mask"
            )


def _check_model(model: Any) -> None:
    if not (isinstance(model, nn.Module) and hasattr(model, "config")):
        raise TypeError(f"model is a {type(model).__name__}; give a model of transformers")


def _one_query(
    source: "Setting | Refinement",
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    key_padding: Tensor | None = None,
    documents: Tensor | None = None,
    window: tuple[int, int] | None = None,
) -> Tensor | None:
    """Return what `pde_attention` would, by the kernel for one query; None where it goes another way.

    Generation calls this for every layer and token, so that what cannot differ between them is looked at
    once. The masks are arguments of `pde_attention`.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    if is_causal or documents is not None or window is not None or (scaling or 1.0) <= 0:
        return None
    if torch.is_autocast_enabled(query.device.type):
        return None
    setting = source if isinstance(source, Setting) else source.setting
    valid, evolution = key_padding, source.evolution()
    if attn_mask is not None:
        if attn_mask.dtype != torch.bool or attn_mask.shape[1:3] != (1, 1):
            return None
        valid = attn_mask[:, 0, 0]
    if valid is not None and valid.shape[-1] != key.shape[-2]:
        return None
    if not setting.takes_one_query(query, key, value, evolution):
        return None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return kernels.attend_row(query, key, value, valid, scale, evolution)


def _unmasked(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, sliding_window: int | None
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Keys, values and masks where the model gives no mask: causal if the module is.

    `sliding_window` counts a query's own position, as flash attention does.
    """
    queries, keys = query.shape[-2], key.shape[-2]
    if queries == 1:  # the last token against a cache
        first = max(keys - sliding_window, 0) if causal and sliding_window else 0
        return key[..., first:, :], value[..., first:, :], {}
    if causal and queries != keys:
        raise ValueError(
            f"{queries} queries, {keys} keys and no mask: a causal module does not know where its "
            "queries are among the keys. Register a mask function under the name of the attention "
            "function, as register() does, or pass a mask [batch, 1, queries, keys]"
        )
    where: dict[str, Any] = {"is_causal": causal}
    if sliding_window:
        where["window"] = (sliding_window - 1, -1 if causal else sliding_window - 1)
    return key, value, where


def _four_dimensions(mask: Tensor) -> Tensor:
    if mask.ndim != 4:
        raise ValueError(
            f"attention_mask {list(mask.shape)} has reached the attention function; it must be "
            "[batch, heads or 1, queries, keys] there"
        )
    return mask


def _biased(bias: Tensor, mask: Tensor | None) -> Tensor:
    """A bias and a mask as one bias, with -inf for walls: sums of large numbers may lose them."""
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return bias.masked_fill(~mask, -torch.inf)
    walls = masks.walls_of_bias(mask)
    return (bias + mask.masked_fill(walls, 0.0)).masked_fill(walls, -torch.inf)


def _capped(query: Tensor, key: Tensor, scale: float | None, softcap: float) -> Tensor:
    """Scores ``[batch, heads, queries, keys]`` bent to stay within +-softcap, as Gemma 2 does it."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    with torch.autocast(query.device.type, enabled=False):
        query, key = for_scores(query, key)
        scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.mT
    return softcap * torch.tanh(scores.to(accumulate_dtype(scores.dtype)) / softcap)


# Learned coefficients


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
    """Give every attention module of a model a PDE of its own, and let the model use it.

    The coefficients of a module are parameters under its `pde`, stable whatever training does to them
    (see `LearnedPDE`). Those of a PDE that is given by its name start at 0, so that the model computes
    what it computed before, and have gradients there; calling this again starts them anew.
    The settings are kept in the model's config, as `pde_attention`. After `register`, or a call of this
    function, transformers restores them in every model that is made from such a config, and
    `from_pretrained` loads the coefficients or raises. A process that has not imported this module
    cannot load such a model at all: the config asks for an attn_implementation that is not known there.

    Args:
        model: a model of transformers; it is changed.
        pde: the name of one of the four equations, or an equation with the numbers to start at.
        steps, dt, walls: as in `register`, for this model only.
        start: where learnt coefficients start if `pde` is a name: ``"identity"``, at 0 (a wave's c at
            1e-6 of its limit), or ``"paper"``, at the numbers of the paper, which are the defaults of
            the equations. Coefficients that are not learnt are those of the paper.
        per_head: coefficients for each head; otherwise one set for a module.
        learn: False: the coefficients are constants.

    Returns:
        The model.

    Raises:
        ValueError: nothing in the model goes through transformers' AttentionInterface, its attention
            does more than PDE attention can (sinks, an indexer), or the PDE is unstable; the model is
            not changed then. Where only a part of it goes through there, a warning says which does not.
    """
    check_choice("start", start, STARTS)
    equation: Any = get_pde(pde)() if isinstance(pde, str) else pde
    name = _implementation(equation)
    if isinstance(pde, str) and learn and start == "identity":
        equation = type(equation)(**dict.fromkeys(_coefficients(equation), 0.0))
    setting = Setting(equation, steps, dt, walls)
    _check_model(model)
    if has_adapter(model):
        raise ValueError(
            "model has an adapter of peft, which would leave coefficients out when it is saved: call "
            'add_pde before get_peft_model, and pass modules_to_save=["pde"] to the adapter\'s config'
        )
    found = asking(model)
    if not found:
        raise ValueError(f"{type(model).__name__} has no attention that PDE attention could reach: "
                         "none of its modules calls transformers' AttentionInterface")  # fmt: skip
    if needs := needing(found):
        raise ValueError(f"{say_needs(model, needs)}: use another attn_implementation for this model, "
                         "or give add_pde a part of it that does without")  # fmt: skip
    refinements = [Refinement(setting, _heads(m) if per_head else None, learn) for m in found.values()]
    coefficients = {f.name: getattr(equation, f.name) for f in fields(equation)}
    numbers = {n: c.flatten().tolist() if isinstance(c, Tensor) else c for n, c in coefficients.items()}
    setting_of_config = {
        "pde": name.removeprefix("pde_"), "coefficients": numbers, "steps": steps, "dt": dt,
        "per_head": per_head, "learn": learn, "walls": walls, "version": VERSION, "modules": len(found),
    }  # fmt: skip
    for module, refinement in zip(found.values(), refinements, strict=True):
        here = next(module.parameters(), None)
        if here is not None and not here.is_meta:
            refinement.to(here.device, torch.promote_types(here.dtype, torch.float32))
        module.pde = refinement
    setattr(model.config, SETTING, setting_of_config)
    model.config.attn_implementation = name  # is saved, unlike the private attribute that models read
    install(add_pde, _use, _accept)
    _use(model, name, found)
    _warn_of_outside(model, name, outside(model, found))
    return model


def _coefficients(equation: Any) -> list[str]:
    """Return the names of the fields of an equation that are numbers; `split` is a choice."""
    return [f.name for f in fields(equation) if not isinstance(getattr(equation, f.name), bool)]


def parameter_groups(
    model: nn.Module, lr: float, *, weight_decay: float = 0.01, coefficient_lr: float | None = None
) -> list[dict[str, Any]]:
    """Optimiser groups of a model with PDE coefficients apart, which are never decayed.

    Weight decay moves a coefficient toward 0 even without a gradient, and the optimiser that
    transformers' Trainer makes by itself decays every parameter that is not a bias or of a norm. Give it
    another, by ``Trainer(..., optimizers=(torch.optim.AdamW(groups), None))`` or, where the Trainer
    wraps the model first (FSDP), by a `create_optimizer` of your own.

    Args:
        model: a model of transformers, with or without coefficients from `add_pde`.
        lr: the learning rate.
        weight_decay: the weight decay of matrices; vectors, such as biases and norms, have none.
        coefficient_lr: the learning rate of the coefficients; None: `lr`. One update of Adam changes
            a coefficient near 0 by about this rate times its largest stable value (a wave: c² by the
            rate times the square). Rates that suit pretrained weights, such as 5e-5, hardly move
            coefficients in a few hundred updates; 1e-3 is usual.

    Returns:
        The groups that are not empty of: matrices, vectors, coefficients.

    Raises:
        TypeError: model is not a module.
        ValueError: a rate is negative, or no parameter of the model requires a gradient.
    """
    return optimiser_groups.parameter_groups(
        model, lr, weight_decay=weight_decay, coefficient_lr=coefficient_lr
    )


def load(model_class: Any, folder: Any, **options: Any) -> Any:
    """``model_class.from_pretrained(folder, **options)``, for models that `add_pde` changed alone.

    After `register`, `from_pretrained` loads such models as well. This function raises for others, and
    takes the PDE of the folder where `config` is one without a PDE.

    Args:
        model_class: a class of transformers, such as ``GPT2LMHeadModel`` or ``AutoModelForCausalLM``.
        folder: what `save_pretrained` wrote, or its name on the hub.
        options: those of `from_pretrained`, with their meaning there: ``dtype``, ``device_map``,
            ``config`` (an object or a folder), entries of the config such as ``num_labels=3``.

    Raises:
        TypeError: model_class is no such class, or there is an option that neither `from_pretrained`
            nor the model's config or class knows.
        ValueError: the model was saved without a PDE or without its coefficients, or another
            attn_implementation is asked for.
    """
    from transformers import AttentionInterface, AutoConfig, PreTrainedConfig, PreTrainedModel

    _check_class(model_class)
    hub = ("cache_dir", "code_revision", "force_download", "local_files_only", "proxies", "revision",
           "subfolder", "token", "trust_remote_code")  # fmt: skip
    chosen = {name: options[name] for name in hub if name in options}
    config = given = options.get("config")
    if not isinstance(config, PreTrainedConfig):
        config = AutoConfig.from_pretrained(folder if given is None else given, **chosen)
    saved: Any = getattr(config, SETTING, None)
    if saved is None and given is not None:
        saved = getattr(AutoConfig.from_pretrained(folder, **chosen), SETTING, None)
    if saved is None:
        raise ValueError(
            f"{folder} was saved without a PDE: use {model_class.__name__}.from_pretrained, then add_pde"
        )
    own = f"pde_{saved['pde']}"
    if own not in AttentionInterface():
        register(names={own: NAMES[own]})
    install(add_pde, _use, _accept)
    options.pop("code_revision", None)  # from_pretrained knows it in auto classes only
    if not issubclass(model_class, PreTrainedModel):  # auto classes take no folder as config
        code = {name: chosen[name] for name in ("code_revision", "trust_remote_code") if name in chosen}
        with torch.device("meta"):
            model_class = type(model_class.from_config(config, **code))
    with default_setting(saved):
        return model_class.from_pretrained(folder, **options)


def _check_class(model_class: Any) -> None:
    import transformers

    if isinstance(model_class, type):
        is_model = issubclass(model_class, transformers.PreTrainedModel)
        if getattr(model_class, "config_class" if is_model else "from_config", None):
            return
        given = model_class.__name__
    else:
        is_text = isinstance(model_class, (str, PathLike))
        given = repr(model_class) if is_text else f"a {type(model_class).__name__}"
    known = isinstance(model_class, str) and hasattr(transformers, model_class)
    allowed = f"transformers.{model_class}" if known else "GPT2LMHeadModel or AutoModelForCausalLM"
    raise TypeError(
        f"model_class is {given}; give a class of transformers' models itself, such as {allowed}, and "
        "then the folder"
    )


def _implementation(equation: PDE) -> str:
    for name, kind in BY_NAME.items():
        if type(equation) is kind:
            return f"pde_{name}"
    raise ValueError(
        f"{type(equation).__name__} is not one of {', '.join(BY_NAME)}; a PDE of your own can be "
        'registered with constant coefficients: register(names={"pde_mine": ...})'
    )


def _use(model: Any, name: str, found: Mapping[str, nn.Module]) -> None:
    from transformers import AttentionInterface

    if name not in AttentionInterface():
        register(names={name: NAMES[name]})
    # that of transformers, since `_accept` would warn once more
    set_name = getattr(
        type(model).set_attn_implementation, "__wrapped__", type(model).set_attn_implementation
    )
    set_name(model, name)
    for path in found:
        _set_along(model, path, name)


def _accept(model: Any, name: Any) -> bool:
    """Return whether a name is one of PDE attention, for a model whose attention it reaches.

    Raises:
        BypassError: It is, and reaches nothing. If it reaches a part, a warning says which it does not.
    """
    if not is_pde_attention(name):
        return False
    if why := refusal(model, name):
        raise BypassError(why)
    _warn_of_outside(model, name, outside(model, asking(model)), stacklevel=4)
    return True


def _set_along(model: Any, path: str, name: str) -> None:
    """Let every config between a model and one of its attention modules have the name.

    transformers leaves some out. It guesses from source which models can take a name; and a model made
    from parts gives each part a new config, while the part's modules keep the old one, where nothing
    that is set later would arrive: those get the new one too.
    """
    from transformers import PreTrainedModel

    parts = path.split(".") if path else []
    of_part = model.config
    for depth in range(len(parts) + 1):
        holder = model.get_submodule(".".join(parts[:depth]))
        config: Any = getattr(holder, "config", None)
        if not hasattr(config, "_attn_implementation"):
            continue
        if config is not of_part:
            if type(config) is type(of_part) and _said_by(config) == _said_by(of_part):
                holder.config = config = of_part
            elif isinstance(holder, PreTrainedModel):
                of_part = config
        if config._attn_implementation != name:
            config._attn_implementation = name


def _said_by(config: Any) -> dict[str, Any]:
    """A config as a dictionary, without a mark that transformers 5.17 forgets in some."""
    return {name: x for name, x in config.to_dict().items() if name != "_attn_was_changed"}


def _heads(module: Any) -> int:
    for owner in (module, getattr(module, "config", None)):
        for attribute in ("num_heads", "num_attention_heads", "n_heads", "n_head"):
            if isinstance(heads := getattr(owner, attribute, None), int):
                return heads
    raise ValueError(
        f"how many heads {type(module).__name__} has is not written in it; use per_head=False"
    )


# Who is reached


def check(model: Any, **inputs: Any) -> list[str]:
    """Run a model once, and warn if some of its attention does not go through PDE attention.

    Longformer, BigBird, Reformer, Bloom and other models that compute attention by themselves, and
    GPT-OSS, whose attention sinks are more than PDE attention can do, raise a `BypassError` when they
    are made with such an attn_implementation, or when it is set. This function is for the others:
    models of which a part computes attention by itself, and parts whose config asks for another one.

    Args:
        model: a model of transformers whose attn_implementation is one of `register`'s.
        inputs: for its forward. Without them, texts, images or both are made if the model says what it
            takes.

    Returns:
        The names of the attention modules that PDE attention does not reach; "", the model itself, if
        nothing in it is called attention.

    Raises:
        ValueError: PDE attention could reach the model, which has another attn_implementation, or the
            model does not run with the inputs that were made.
    """
    _check_model(model)
    name = model.config._attn_implementation
    candidates = asking(model)
    if not is_pde_attention(name):
        if candidates:
            raise ValueError(
                f"the model's attn_implementation is {name!r}, not one of PDE attention; set it with "
                "model.set_attn_implementation. If that was done, transformers did not accept the name "
                f"for {type(model).__name__}, and its log says why: add_pde does not ask it"
            )
        missed = outside(model, {}) or [""]
        _warn_of_outside(model, "pde_...", missed)
        return missed
    given = inputs or example_inputs(model)
    modes = [(module, module.training) for module in model.modules()]
    is_whole = False
    try:
        with _listening(name) as (called, refused), torch.no_grad(), suppress(BypassError):
            model.eval()(**given)
            is_whole = True
    except Exception as error:
        if inputs:
            raise
        raise ValueError(
            f"{type(model).__name__} does not run with the inputs that check made ({', '.join(given)}): "
            f"{error}; pass inputs for its forward, as in check(model, input_ids=ids)"
        ) from error
    finally:
        for module, mode in modes:
            module.training = mode
    reached = {n: m for n, m in model.named_modules() if m in called}
    needs = needing(candidates) | {n: refused[m] for n, m in model.named_modules() if m in refused}
    config_name = lambda module: getattr(getattr(module, "config", None), "_attn_implementation", None)
    astray = [n for n, module in candidates.items() if not is_pde_attention(config_name(module))]
    bypassing = outside(model, reached | candidates)
    if not (needs or astray or bypassing or (reached and is_whole)):
        bypassing = [n for n in candidates if n not in reached] or [""]
    _warn_of_outside(model, name, bypassing)
    if astray:
        warnings.warn(
            f"{type(model).__name__} has modules with a config of their own, where attn_implementation "
            f"is not {name!r} ({which(astray)}): they stay as they are. add_pde sets it there, too",
            stacklevel=2,
        )
    if needs:
        warnings.warn(f"{say_needs(model, needs)}: running it raises", stacklevel=2)
    return [n for n, _ in model.named_modules() if n in {*bypassing, *astray, *needs}]


@contextmanager
def _listening(name: str) -> Iterator[tuple[set[nn.Module], dict[nn.Module, list[str]]]]:
    """The modules that call PDE attention, and what others ask that it does not know, meanwhile."""
    from transformers import AttentionInterface

    function: Any = AttentionInterface().get(name)
    called: set[nn.Module] = set()
    refused: dict[nn.Module, list[str]] = {}

    def listen(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **more: Any
    ) -> tuple[Tensor, Tensor | None]:
        if needs := [argument for argument in UNKNOWN if more.get(argument) is not None]:
            refused[module] = needs
            return query.new_zeros(*query.transpose(1, 2).shape[:-1], value.shape[-1]), None
        called.add(module)
        return function(module, query, key, value, *args, **more)

    AttentionInterface.register(name, listen)
    try:
        yield called, refused
    finally:
        AttentionInterface.register(name, function)


def _warn_of_outside(model: nn.Module, name: str, outside: list[str], stacklevel: int = 3) -> None:
    if outside:
        warnings.warn(
            f"{type(model).__name__} computes attention by itself ({which(outside)}): "
            f"attn_implementation={name!r} does not reach it, it stays ordinary attention",
            stacklevel=stacklevel,
        )
