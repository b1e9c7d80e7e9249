"""Networks by name, and inputs for them, for the command line.

``timm:resnet50``, ``torchvision:resnet50``, ``transformers:google/vit-base-patch16-224`` (or a kind of
model with its options, ``transformers:bert``), ``attractor:resnet_cifar``, or a function of one's own
that returns a module, ``FILE.py:FUNCTION`` or ``MODULE:FUNCTION``. Beside that function there may be
`inputs`, what the network is probed on: a batch, a list of batches, or a function ``inputs(n,
generator)`` that returns either.
"""

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from attractor.cli import equation_names as equations
from attractor.common.checks import MOST_PARTS, nearest
from attractor.data import images
from attractor.data.imagefolder import ENDINGS, centre_box, decoded
from attractor.residual.batch import Batch, is_batch
from attractor.storage.files import read_text
from attractor.storage.limits import check_memory, parse_json
from attractor.train.generators import forked

HUBS = ("timm", "torchvision", "transformers", "attractor")
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CONVERT = (  # pickled weights may run code, so they are not read
    "only weights in .safetensors files are read. Convert pickled ones that you trust with "
    "AutoModel.from_pretrained(NAME).save_pretrained(FOLDER), and pass transformers:FOLDER; or pass "
    "--random, which needs no weights"
)
TOKENS = 64  # of a random text


@dataclass(frozen=True)
class Network:
    """What the command line knows about a network.

    Attributes:
        name: as it was asked for.
        model: to be probed.
        trained: whether its weights are those of a training.
        fresh: makes the same network with random weights, or None if nobody knows how.
        size: height and width of its images.
        mean, std: of the channels of the images that it was trained on.
        tokenizer: name of its tokenizer, or None.
        vocabulary: number of tokens that it knows, or None if it takes images.
        place: the file or module of one's own that it is from, or None.
        inputs: what stands beside it there under that name, or None.
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
    what: str,
    options: dict[str, Any] | None = None,
    pretrained: bool | None = None,
    weights: Path | None = None,
) -> Network:
    """The network called `what`.

    Args:
        options: arguments of the function or configuration that makes it.
        pretrained: load the weights that its hub offers; None: if it offers some.
        weights: a file of weights, in safetensors.

    Raises:
        ValueError: there is no such network, or its weights cannot be had.
    """
    hub, _, name = what.partition(":")
    if not name:
        raise ValueError(
            f"{what!r} names no network; write {', '.join(h + ':NAME' for h in HUBS)}, FILE.py:FUNCTION"
        )
    options = options or {}
    if weights is not None:
        pretrained = False
    finders = {"timm": _timm, "torchvision": _torchvision, "transformers": _transformers}
    if hub in finders:
        found = finders[hub](what, name, options, pretrained)
    else:
        found = _function(what, options, asked=weights is None)
        if pretrained:
            raise ValueError(f"no hub offers weights for {what}; give a file with --weights")
    if weights is None:
        return found
    _load(found.model, weights)
    return replace(found, trained=True)


def parse(text: str) -> Any:
    """The value of an option: JSON if it is that, else the text itself."""
    try:
        return parse_json(text.replace("True", "true").replace("False", "false"), "the option")
    except ValueError:
        return text


def _timm(what: str, name: str, options: dict[str, Any], pretrained: bool | None) -> Network:
    timm = _package("timm", "vision")
    import_module("attractor.integrations.timm").register()  # our own among them
    if not timm.is_model(name):
        near = ", ".join(timm.list_models(f"*{name.split('.')[0][:6]}*")[:8])
        raise ValueError(f"timm has no model {name!r}" + (f"; it has {near} ..." if near else ""))
    trained = bool(timm.models.is_model_pretrained(name)) if pretrained is None else pretrained
    fresh = lambda: _made(
        what, lambda: timm.create_model(name, pretrained=False, **options), options, {}
    )
    make = lambda: timm.create_model(name, pretrained=trained, **options)
    model = _fetched(make, what) if trained else fresh()
    config = model.default_cfg
    return Network(what, model, trained, fresh, config["input_size"][-1], config["mean"], config["std"])


def _torchvision(what: str, name: str, options: dict[str, Any], pretrained: bool | None) -> Network:
    models = _package("torchvision", "vision").models
    if name not in models.list_models():
        near = ", ".join(n for n in models.list_models() if name[:6] in n)
        raise ValueError(f"torchvision has no model {name!r}" + (f"; it has {near}" if near else ""))
    trained = pretrained is not False
    fresh = lambda: _made(what, lambda: models.get_model(name, weights=None, **options), options, {})
    make = lambda: models.get_model(name, weights="DEFAULT", **options)
    return Network(what, _fetched(make, what) if trained else fresh(), trained, fresh)


def _transformers(what: str, name: str, options: dict[str, Any], pretrained: bool | None) -> Network:
    library = _package("transformers", "text")
    kinds = library.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    known = name in kinds and not Path(name).is_dir()
    if known and pretrained:
        raise ValueError(f"{name} is a kind of model, not one with weights; name one, such as a/b")
    if "trust_remote_code" in options:
        raise ValueError(
            f"{what}: code of a repository or a folder is not run, so trust_remote_code cannot be set; "
            "write a function that returns the network, and give it as FILE.py:FUNCTION"
        )
    auto = library.AutoConfig
    defaults = vars(auto.for_model(name)) if known and options else {}
    config = (
        _made(what, lambda: auto.for_model(name, **options), options, defaults)
        if known
        else _fetched(
            lambda: auto.from_pretrained(name, trust_remote_code=False, **options),
            what,
            "a folder, or a kind with its options as transformers:bert, needs no network; a network "
            "with code of its own is given as FILE.py:FUNCTION",
        )
    )
    _check_config(what, config)
    bare = lambda: library.AutoModel.from_config(config, trust_remote_code=False)
    _check_weights(what, bare)
    fresh = lambda: _made(what, bare, options, defaults)
    trained = pretrained is not False and not known
    make = lambda: library.AutoModel.from_pretrained(
        name, config=config, trust_remote_code=False, use_safetensors=True
    )
    size = getattr(config, "image_size", None) or 224
    vision = hasattr(config, "num_channels")
    return Network(
        what,
        _fetched(make, what, CONVERT) if trained else fresh(),
        trained,
        fresh,
        size=size if isinstance(size, int) else size[0],
        tokenizer=None if vision or known else name,
        vocabulary=None if vision else getattr(config, "vocab_size", None),
    )


def _function(what: str, options: dict[str, Any], asked: bool) -> Network:
    place, _, name = what.rpartition(":")
    own = place != "attractor"
    if own:
        module = (
            equations.module_from_file(Path(place))
            if place.endswith(".py")
            else equations.module_from_package(place)
        )
    else:
        import attractor.residual as module
    make = getattr(module, name, None)
    if not callable(make):
        there = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        hint = nearest(name, there)
        raise ValueError(f"{place} has no function {name!r}; it has {', '.join(there) or 'none'}{hint}")
    if isinstance(make, nn.Module):  # not a function, but what it would return
        if options:
            raise ValueError(f"{what} is a network, not a function, so it takes no options")
        made, make = make, lambda: made
    fresh = lambda: _made(what, lambda: make(**options), options, _defaults(make))
    if not own:
        _check_weights(what, lambda: make(**options))
    model = fresh()
    if not isinstance(model, nn.Module):
        raise TypeError(f"{what} returned a {type(model).__name__}; it must return an nn.Module")
    # What a function of one's own returns may be trained already, and made anew would be so again.
    asked = asked and own
    pairs = zip(model.parameters(), fresh().parameters() if asked else ())
    same = asked and all(torch.equal(old, new) for old, new in pairs)
    small = not own and (name == "resnet_cifar" or not name.startswith("resnet"))
    return Network(
        what,
        model,
        trained=same,
        fresh=None if same else fresh,
        size=32 if small else 224,
        vocabulary=tokens_of(model),
        place=place if own else None,
        inputs=getattr(module, "inputs", None) if own else None,
    )


def _check_config(what: str, config: Any) -> None:
    """Raise if a configuration of transformers asks for code of a repository, or for endless layers."""
    parts = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))]
    for name in (getattr(part, "_attn_implementation", None) for part in parts):
        if isinstance(name, str) and "/" in name:
            raise ValueError(
                f"{what}: its attn_implementation is {name!r}, a repository, whose code is not run; "
                "write sdpa or eager into its config.json instead"
            )
    values = list(config.to_dict().items())
    while values:
        key, value = values.pop()
        values += value.items() if isinstance(value, dict) else ()
        values += [(key, entry) for entry in value] if isinstance(value, list) else ()
        if (
            isinstance(value, int)
            and value > MOST_PARTS
            and re.search("layer|depth|expert|stage", str(key))
        ):
            raise ValueError(f"{what}: {key} = {value!r:.40} is more than {MOST_PARTS:,}; use fewer")


def _check_weights(what: str, make: Callable[[], Any]) -> None:
    """Raise if the weights of a network do not fit into memory; it is made without memory first."""
    size = 0
    with (
        suppress(Exception),
        forked(torch.device("cpu")),
        torch.device("meta"),
    ):  # errors: when it is made
        size = sum(x.nbytes for x in make().state_dict().values() if isinstance(x, Tensor))
    check_memory(f"the weights of {what}", size, "use smaller layers")


def _made(
    what: str, make: Callable[[], Any], options: dict[str, Any], defaults: Mapping[str, Any]
) -> Any:
    """What `make` returns. Where it fails on an option's value, as ``width % 4`` does on text, the error
    says which value was given, and what the option is by default; a ValueError of its own is left as it
    is, if all values are of the kind that they are by default.
    """
    try:
        return make()
    except Exception as error:
        number = lambda value: isinstance(value, int | float)  # as True and False are
        wrong = [k for k, v in options.items() if number(defaults.get(k)) and not number(v)]
        if not options or (
            isinstance(error, ValueError) and (not wrong or what.startswith("attractor:"))
        ):
            raise
        unasked = "unexpected keyword" in str(error)
        unknown = [k for k in options if unasked and defaults and k not in defaults]
        given = ", ".join(f"{k} = {options[k]!r}" for k in wrong or unknown or options)
        told = [f"{k} is a number, such as -o {k}={json.dumps(defaults[k])}" for k in wrong]
        if unknown:
            told.append(f"its options are {', '.join(defaults)}{nearest(unknown[0], list(defaults))}")
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        advised = "; ".join(told) or "numbers are written as they are, lists as [1,2], all else is text"
        raise ValueError(f"{what} cannot be made with {given} ({reason}); {advised}") from error


def _defaults(make: Callable[..., Any]) -> dict[str, Any]:
    """The options of a function, with the value that each has if it is not given."""
    try:
        return {name: p.default for name, p in inspect.signature(make).parameters.items()}
    except (TypeError, ValueError):  # some that are written in C have none
        return {}


def _load(model: nn.Module, path: Path) -> None:
    from attractor.storage.tensor_specs import NO_NAN, TensorSpec
    from attractor.train.runs import WEIGHTS
    from attractor.train.tensors import CheckpointError, read_tensors

    if path.is_dir() and (path / WEIGHTS).is_file():  # the folder of a training that is finished
        path = path / WEIGHTS
    if path.is_dir():
        raise ValueError(
            f"{path} is a folder without {WEIGHTS}, which a training leaves when it is finished; "
            "--weights takes a .safetensors file"
        )
    if not path.is_file():
        raise ValueError(f"there is no file {path}; --weights takes a .safetensors file")
    try:
        tensors = read_tensors(path)
        wrong = [
            name
            for name, x in tensors.items()
            if TensorSpec(tuple(x.shape), (x.dtype,), NO_NAN).mismatch(x, {})
        ]
        if wrong:
            raise CheckpointError(f"{wrong[0]} has numbers that are NaN")
        model.load_state_dict(tensors)
    except (CheckpointError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:400]
        raise ValueError(f"the weights of {path} do not fit {type(model).__name__}: {reason}") from None


def _package(name: str, extra: str) -> Any:
    try:
        return __import__(name)
    except ImportError:
        raise ImportError(
            f"{name} is missing; install it with: pip install 'attractor[{extra}]'"
        ) from None


def _fetched(make: Callable[[], Any], what: str, otherwise: str = "--random needs no weights") -> Any:
    """What a hub gives; its many errors as one."""
    try:
        return make()
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{what} could not be fetched ({type(error).__name__}: {reason}); {otherwise}"
        ) from None


def noise(network: Network, n: int, batch: int, seed: int, size: int) -> Iterator[Any]:
    """Batches of normal noise, or of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    channels = channels_of(network.model)
    _check_images(min(n, batch), channels, size)
    for start in range(0, n, batch):
        count = min(batch, n - start)
        if network.vocabulary is not None:
            shape = (count, TOKENS)
            ids = torch.randint(network.vocabulary, shape, generator=generator)
            named = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            yield named if network.name.startswith("transformers:") else ids
        else:
            yield torch.randn(count, channels, size, size, generator=generator)


def _check_images(count: int, channels: int, size: int) -> None:
    """Raise if images ``[count, channels, size, size]`` in float32 do not fit into memory."""
    check_memory(
        f"images [{count:,}, {channels}, {size:,}, {size:,}]",
        4 * count * channels * size**2,
        "use a smaller --size or --batch",
    )


def own_inputs(network: Network, n: int, batch: int, seed: int) -> Iterator[Any]:
    """Batches of what stands beside a network of one's own as `inputs`.

    One batch is cut into such as are asked for; a list or an iterator holds batches, which stay as they
    are. What is one batch, `probe` says.
    """
    given, where = network.inputs, f"inputs in {network.place}"
    if callable(given) and not isinstance(given, Mapping):
        generator = torch.Generator().manual_seed(seed)
        try:
            inspect.signature(given).bind(n, generator)
        except TypeError:
            raise ValueError(
                f"{where} is called as inputs(n, generator), but takes {inspect.signature(given)}; "
                "write def inputs(n, generator), which returns n inputs"
            ) from None
        given = given(n, generator)
    if not is_batch(given, network.model, where):
        yield from given
        return
    size = Batch.of(given, network.model, None).size
    last = min(n, size)
    for start in range(0, last, batch):
        yield _cut(given, slice(start, min(start + batch, last)), size)


def _cut(given: Any, part: slice, size: int) -> Any:
    """Some of the inputs of a batch; what has no axis for them stays whole."""
    if isinstance(given, Mapping):
        return {key: _cut(value, part, size) for key, value in given.items()}
    if isinstance(given, list | tuple):
        return tuple(_cut(value, part, size) for value in given)
    return given[part] if isinstance(given, Tensor) and given.shape[:1] == (size,) else given


def advice(network: Network, source: str = "") -> str:
    """What to give to a network that could not take what it was given, by an option or by itself."""
    if network.place is None:
        return "give --size, or --images, --data or --texts that fit it"
    if network.inputs is not None:
        own = f"inputs in {network.place}"
        return f"leave {source} out, and it gets {own}" if source else f"{own} must be what it takes"
    ids = f"torch.randint({network.vocabulary or 1000}, (n, 64), generator=generator)"
    return (
        f"give --size, or --images or --data that fit it, or write into {network.place}, beside it, def "
        f"inputs(n, generator), which returns n inputs: of a text network token ids, such as {ids}"
    )


def data_set(
    network: Network, name: str, folder: Path | None, n: int, batch: int, seed: int, size: int | None
) -> Iterator[Tensor]:
    """Batches of the test images of a data set; `size` None leaves them as large as they are."""
    if name == "imagefolder":
        raise ValueError("--data imagefolder: a folder of image files is read by --images FOLDER")
    try:
        found = images.load(name, "test", folder)
    except FileNotFoundError as error:
        raise ValueError(str(error)) from None
    found = found.subset(min(n, len(found)), seed)
    if channels_of(network.model) == 3:
        found = found.rgb()
    for start in range(0, len(found), batch):
        pictures = found.normalised(slice(start, start + batch))
        resize = size is not None and (size, size) != tuple(pictures.shape[2:])
        _check_images(len(pictures), pictures.shape[1], size or 1)
        yield interpolate(pictures, size, mode="bilinear", antialias=True) if resize else pictures


def folder_of_images(network: Network, folder: Path, n: int, batch: int, size: int) -> Iterator[Tensor]:
    """Batches of the images in a folder and those below it, the middle of each."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}; --images takes one with image files")
    paths = [p for p in sorted(folder.rglob("*")) if p.suffix.lower() in ENDINGS][:n]
    if not paths:
        raise ValueError(f"{folder} holds no image files ({', '.join(sorted(ENDINGS))})")
    image = _package("PIL.Image", "vision").Image
    _check_images(min(len(paths), batch), 3, size)
    mean, std = (torch.tensor(x)[:, None, None] for x in (network.mean, network.std))
    for start in range(0, len(paths), batch):
        pictures = []
        for path in paths[start : start + batch]:
            picture = decoded(path)
            resized = picture.resize((size, size), image.Resampling.BILINEAR, centre_box(*picture.size))
            pictures.append(torch.from_numpy(np.array(resized)).permute(2, 0, 1))
        coloured = (torch.stack(pictures) / 255 - mean) / std
        yield coloured.mean(1, keepdim=True) if channels_of(network.model) == 1 else coloured


def texts(network: Network, path: Path, n: int, batch: int) -> Iterator[Any]:
    """Batches of the lines of a file, tokenized and padded."""
    if network.tokenizer is None:
        otherwise = (
            "leave it out"
            if network.place is None
            else f"write def inputs(n, generator) into {network.place}, which returns n texts as the "
            "token ids that the network takes"
        )
        raise ValueError(f"{network.name} has no tokenizer, so --texts cannot be read; {otherwise}")
    if not path.is_file():
        raise ValueError(f"there is no file {path}; --texts takes one with a text a line")
    name = network.tokenizer
    auto = _package("transformers", "text").AutoTokenizer
    tokenizer = _fetched(lambda: auto.from_pretrained(name, trust_remote_code=False), network.name)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    lines = [line for line in read_text(path, link=True).splitlines() if line.strip()][:n]
    for start in range(0, len(lines), batch):
        part = lines[start : start + batch]
        yield tokenizer(part, padding=True, truncation=True, max_length=512, return_tensors="pt")


def channels_of(model: nn.Module) -> int:
    """Channels of a network's images: those of its first convolution."""
    convolutions = (m for m in model.modules() if isinstance(m, nn.Conv2d))
    return next((c.in_channels for c in convolutions), 3)


def tokens_of(model: nn.Module) -> int | None:
    """How many tokens a network knows: its first embedding's. None if it has none, or convolutions."""
    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    if any(isinstance(m, convolutions) for m in model.modules()):
        return None
    embeddings = (m for m in model.modules() if isinstance(m, nn.Embedding))
    return next((e.num_embeddings for e in embeddings), None)
