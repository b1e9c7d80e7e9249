"""Networks by name, for the command line.

A name is ``timm:resnet50``, ``torchvision:resnet50``, ``transformers:google/vit-base-patch16-224``, a
model type of transformers with options as in ``transformers:bert``, ``attractor:resnet_cifar``, or a
user's function that returns a module, ``FILE.py:FUNCTION`` or ``MODULE:FUNCTION``. Beside that function
there may be `inputs` on which the network is probed: a batch, a list of batches, or a function
``inputs(n, generator)`` that returns one of these.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attractor.cli.arguments import pairs_of
from attractor.cli.equation_names import find_function
from attractor.common.checks import MOST_PARTS, nearest
from attractor.storage.limits import check_memory, parse_json
from attractor.train.generators import forked

HUBS = ("timm", "torchvision", "transformers", "attractor")
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CONVERT = (  # pickled weights may run code, so they are not read
    "only weights in .safetensors files are read. Convert pickled ones that you trust with "
    "AutoModel.from_pretrained(NAME).save_pretrained(FOLDER), and pass transformers:FOLDER; or pass "
    "--random, which needs no weights"
)


@dataclass(frozen=True)
class Network:
    """A network and its inputs.

    Attributes:
        name: The name that the user passed.
        model: The network.
        trained: Whether its weights come from a training.
        fresh: A function that makes the same network with random weights, or None if there is no way.
        size: Height and width of its images.
        mean, std: Statistics of the channels of the images that it was trained on.
        tokenizer: Name of its tokenizer, or None.
        vocabulary: Number of different tokens; None if the inputs are images.
        place: The user's file or module, or None.
        inputs: The attribute `inputs` of that file or module, or None.
    """

    name: str
    model: nn.Module
    trained: bool
    fresh: Callable[[], nn.Module] | None
    size: int = 224
    mean: tuple[float, ...] = IMAGENET[0]
    std: tuple[float, ...] = IMAGENET[1]
    tokenizer: str | None = None
    vocabulary: int | None = None
    place: str | None = None
    inputs: Any = None


def find(
    name: str,
    options: dict[str, Any] | None = None,
    pretrained: bool | None = None,
    weights: Path | None = None,
) -> Network:
    """Return the network of a name.

    Args:
        name: The name.
        options: Arguments of the function or configuration that makes the network.
        pretrained: Whether to load the weights of the hub; None: if the hub has them.
        weights: A file of weights in safetensors.

    Raises:
        ValueError: There is no such network, or its weights cannot be loaded.
    """
    hub, _, inner = name.partition(":")
    if not inner:
        hubs = ", ".join(f"{h}:NAME" for h in HUBS)
        raise ValueError(f"{name!r} names no network; write {hubs}, FILE.py:FUNCTION")
    options = options or {}
    if weights is not None:
        pretrained = False
    finders = {"timm": _timm, "torchvision": _torchvision, "transformers": _transformers}
    if hub in finders:
        network = finders[hub](name, inner, options, pretrained)
    else:
        network = _from_function(name, options, check_weights=weights is None)
        if pretrained:
            raise ValueError(f"no hub offers weights for {name}; pass a file with --weights")
    if weights is None:
        return network
    _load(network.model, weights)
    return replace(network, trained=True)


def parse(text: str) -> Any:
    """Return the value of an option: JSON if the text is JSON, else the text itself."""
    try:
        return parse_json(text.replace("True", "true").replace("False", "false"), "the option")
    except ValueError:
        return text


def parse_options(texts: list[str] | None, option: str = "--option") -> dict[str, Any]:
    """Return the parsed values of options of the form KEY=VALUE."""
    return {key: parse(value) for key, value in pairs_of(texts, option, "depth=29").items()}


def _timm(name: str, inner: str, options: dict[str, Any], pretrained: bool | None) -> Network:
    timm = import_package("timm", "vision")
    import_module("attractor.integrations.timm").register()  # adds the models of this library
    if not timm.is_model(inner):
        near = ", ".join(timm.list_models(f"*{inner.split('.')[0][:6]}*")[:8])
        raise ValueError(f"timm has no model {inner!r}" + (f"; it has {near} ..." if near else ""))
    trained = bool(timm.models.is_model_pretrained(inner)) if pretrained is None else pretrained
    fresh = lambda: _make(
        name, lambda: timm.create_model(inner, pretrained=False, **options), options, {}
    )
    make = lambda: timm.create_model(inner, pretrained=trained, **options)
    model = fetch(make, name) if trained else fresh()
    config = model.default_cfg
    return Network(name, model, trained, fresh, config["input_size"][-1], config["mean"], config["std"])


def _torchvision(name: str, inner: str, options: dict[str, Any], pretrained: bool | None) -> Network:
    models = import_package("torchvision", "vision").models
    if inner not in models.list_models():
        near = ", ".join(n for n in models.list_models() if inner[:6] in n)
        raise ValueError(f"torchvision has no model {inner!r}" + (f"; it has {near}" if near else ""))
    trained = pretrained is not False
    fresh = lambda: _make(name, lambda: models.get_model(inner, weights=None, **options), options, {})
    make = lambda: models.get_model(inner, weights="DEFAULT", **options)
    return Network(name, fetch(make, name) if trained else fresh(), trained, fresh)


def _transformers(name: str, inner: str, options: dict[str, Any], pretrained: bool | None) -> Network:
    library = import_package("transformers", "text")
    model_types = library.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    is_type = inner in model_types and not Path(inner).is_dir()
    if is_type and pretrained:
        raise ValueError(f"{inner} is a type of model and has no weights; name a model, such as a/b")
    if "trust_remote_code" in options:
        raise ValueError(
            f"{name}: code of a repository or a folder is not run, so trust_remote_code cannot be set; "
            "write a function that returns the network, and pass it as FILE.py:FUNCTION"
        )
    auto = library.AutoConfig
    defaults = vars(auto.for_model(inner)) if is_type and options else {}
    if is_type:
        config = _make(name, lambda: auto.for_model(inner, **options), options, defaults)
    else:
        config = fetch(
            lambda: auto.from_pretrained(inner, trust_remote_code=False, **options),
            name,
            "a folder, or a model type with options as in transformers:bert, needs no connection; pass "
            "a network with code of its own as FILE.py:FUNCTION",
        )
    _check_config(name, config)
    bare = lambda: library.AutoModel.from_config(config, trust_remote_code=False)
    _check_weights(name, bare)
    fresh = lambda: _make(name, bare, options, defaults)
    trained = pretrained is not False and not is_type
    make = lambda: library.AutoModel.from_pretrained(
        inner, config=config, trust_remote_code=False, use_safetensors=True
    )
    size = getattr(config, "image_size", None) or 224
    vision = hasattr(config, "num_channels")
    return Network(
        name,
        fetch(make, name, CONVERT) if trained else fresh(),
        trained,
        fresh,
        size=size if isinstance(size, int) else size[0],
        tokenizer=None if vision or is_type else inner,
        vocabulary=None if vision else getattr(config, "vocab_size", None),
    )


def _from_function(name: str, options: dict[str, Any], check_weights: bool) -> Network:
    """Return the network that a function returns.

    Args:
        check_weights: Whether to find out if a user's function returns trained weights: two networks
            that it makes are then equal.
    """
    place, _, function = name.rpartition(":")
    own = place != "attractor"
    make, module = find_function(name if own else f"attractor.residual:{function}")
    if isinstance(make, nn.Module):  # a network in place of a function
        if options:
            raise ValueError(f"{name} is a network, not a function, so it takes no options")
        network, make = make, lambda: network
    fresh = lambda: _make(name, lambda: make(**options), options, _defaults(make))
    if not own:
        _check_weights(name, lambda: make(**options))
    model = fresh()
    if not isinstance(model, nn.Module):
        raise TypeError(f"{name} returned a {type(model).__name__}; it must return an nn.Module")
    same = False
    if check_weights and own:
        pairs = zip(model.parameters(), fresh().parameters())
        same = all(torch.equal(one, other) for one, other in pairs)
    small = not own and (function == "resnet_cifar" or not function.startswith("resnet"))
    return Network(
        name,
        model,
        trained=same,
        fresh=None if same else fresh,
        size=32 if small else 224,
        vocabulary=vocabulary_of(model),
        place=place if own else None,
        inputs=getattr(module, "inputs", None) if own else None,
    )


def _check_config(name: str, config: Any) -> None:
    """Raise if a configuration of transformers names code of a repository, or has too many layers."""
    parts = [config, *(getattr(config, part, None) for part in getattr(config, "sub_configs", ()))]
    for attention in (getattr(part, "_attn_implementation", None) for part in parts):
        if isinstance(attention, str) and "/" in attention:
            raise ValueError(
                f"{name}: its attn_implementation is {attention!r}, a repository, whose code is not "
                "run; write sdpa or eager into its config.json instead"
            )
    values = list(config.to_dict().items())
    while values:
        key, value = values.pop()
        values += value.items() if isinstance(value, dict) else ()
        values += [(key, entry) for entry in value] if isinstance(value, list) else ()
        counts = re.search("layer|depth|expert|stage", str(key))
        if isinstance(value, int) and value > MOST_PARTS and counts:
            raise ValueError(f"{name}: {key} = {value!r:.40} is more than {MOST_PARTS:,}; use fewer")


def _check_weights(name: str, make: Callable[[], Any]) -> None:
    """Raise if the weights of a network do not fit into memory; it is made on the meta device first."""
    size = 0
    with suppress(Exception), forked(torch.device("cpu")), torch.device("meta"):
        size = sum(x.nbytes for x in make().state_dict().values() if isinstance(x, Tensor))
    check_memory(f"the weights of {name}", size, "use smaller layers")


def _make(
    name: str, make: Callable[[], Any], options: dict[str, Any], defaults: Mapping[str, Any]
) -> Any:
    """Return ``make()``, with errors about options that name the option and its default value.

    A ValueError of the function itself is not changed if all options have the types of their defaults.
    """
    try:
        return make()
    except Exception as error:
        is_number = lambda value: isinstance(value, int | float)  # also True and False
        wrong = [k for k, v in options.items() if is_number(defaults.get(k)) and not is_number(v)]
        if not options or (
            isinstance(error, ValueError) and (not wrong or name.startswith("attractor:"))
        ):
            raise
        is_unknown = "unexpected keyword" in str(error)
        unknown = [k for k in options if is_unknown and defaults and k not in defaults]
        values = ", ".join(f"{k} = {options[k]!r}" for k in wrong or unknown or options)
        advice = [f"{k} is a number, such as -o {k}={json.dumps(defaults[k])}" for k in wrong]
        if unknown:
            advice.append(f"its options are {', '.join(defaults)}{nearest(unknown[0], list(defaults))}")
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        advice = advice or ["write numbers as they are, lists as [1,2], and all else as text"]
        raise ValueError(
            f"{name} cannot be made with {values} ({reason}); {'; '.join(advice)}"
        ) from error


def _defaults(make: Callable[..., Any]) -> dict[str, Any]:
    """Return the options of a function with their default values."""
    try:
        return {name: p.default for name, p in inspect.signature(make).parameters.items()}
    except (TypeError, ValueError):  # some functions that are written in C have no signature
        return {}


def _load(model: nn.Module, path: Path) -> None:
    """Load weights from a safetensors file, or from the folder of a finished training."""
    from attractor.storage.tensor_specs import NO_NAN, TensorSpec
    from attractor.train.run_folder import WEIGHTS
    from attractor.train.tensors import CheckpointError, read_tensors

    if path.is_dir() and (path / WEIGHTS).is_file():
        path = path / WEIGHTS
    if path.is_dir():
        raise ValueError(
            f"{path} is a folder without {WEIGHTS}, which a finished training leaves; --weights takes a "
            ".safetensors file"
        )
    if not path.is_file():
        raise ValueError(f"there is no file {path}; --weights takes a .safetensors file")
    try:
        tensors = read_tensors(path)
        for name, x in tensors.items():
            if TensorSpec(tuple(x.shape), (x.dtype,), NO_NAN).mismatch(x, {}):
                raise CheckpointError(f"{name} has numbers that are NaN")
        model.load_state_dict(tensors)
    except (CheckpointError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:400]
        raise ValueError(f"the weights of {path} do not fit {type(model).__name__}: {reason}") from None


def import_package(name: str, extra: str) -> Any:
    """Import an optional package; if it is missing, the error says how to install it."""
    try:
        return __import__(name)
    except ImportError:
        raise ImportError(
            f"{name} is missing; install it with: pip install 'attractor[{extra}]'"
        ) from None


def fetch(make: Callable[[], Any], name: str, advice: str = "--random needs no weights") -> Any:
    """Return ``make()``, which loads from a hub; its many types of errors become a ValueError."""
    try:
        return make()
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{name} could not be fetched ({type(error).__name__}: {reason}); {advice}"
        ) from None


def vocabulary_of(model: nn.Module) -> int | None:
    """Return the size of the first embedding; None if there is none, or if there are convolutions."""
    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    if any(isinstance(m, convolutions) for m in model.modules()):
        return None
    embeddings = (m for m in model.modules() if isinstance(m, nn.Embedding))
    return next((e.num_embeddings for e in embeddings), None)
