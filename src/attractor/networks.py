"""Networks by name, and inputs for them, for the command line.

``timm:resnet50``, ``torchvision:resnet50``, ``transformers:google/vit-base-patch16-224`` (or a kind of
model with its options, ``transformers:bert``), ``attractor:resnet_cifar``, or a function of one's own
that returns a module, ``FILE.py:FUNCTION`` or ``MODULE:FUNCTION``.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from attractor import equations
from attractor.core.checks import nearest
from attractor.data import images
from attractor.data.imagefolder import ENDINGS, centre_box, decoded

HUBS = ("timm", "torchvision", "transformers", "attractor")
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
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
        return json.loads(text.replace("True", "true").replace("False", "false"))
    except ValueError:
        return text


def _timm(what: str, name: str, options: dict[str, Any], pretrained: bool | None) -> Network:
    timm = _package("timm", "vision")
    import_module("attractor.integrations.timm").register()  # our own among them
    if not timm.is_model(name):
        near = ", ".join(timm.list_models(f"*{name.split('.')[0][:6]}*")[:8])
        raise ValueError(f"timm has no model {name!r}" + (f"; it has {near} ..." if near else ""))
    trained = bool(timm.models.is_model_pretrained(name)) if pretrained is None else pretrained
    fresh = lambda: timm.create_model(name, pretrained=False, **options)
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
    fresh = lambda: models.get_model(name, weights=None, **options)
    make = lambda: models.get_model(name, weights="DEFAULT", **options)
    return Network(what, _fetched(make, what) if trained else fresh(), trained, fresh)


def _transformers(what: str, name: str, options: dict[str, Any], pretrained: bool | None) -> Network:
    library = _package("transformers", "text")
    kinds = library.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    known = name in kinds and not Path(name).is_dir()
    if known and pretrained:
        raise ValueError(f"{name} is a kind of model, not one with weights; name one, such as a/b")
    auto = library.AutoConfig
    config = (
        auto.for_model(name, **options)
        if known
        else _fetched(
            lambda: auto.from_pretrained(name, **options),
            what,
            "a folder, or a kind with its options as transformers:bert, needs no network",
        )
    )
    fresh = lambda: library.AutoModel.from_config(config)
    trained = pretrained is not False and not known
    make = lambda: library.AutoModel.from_pretrained(name, config=config)
    size = getattr(config, "image_size", None) or 224
    vision = hasattr(config, "num_channels")
    return Network(
        what,
        _fetched(make, what) if trained else fresh(),
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
    model = make(**options)
    if not isinstance(model, nn.Module):
        raise TypeError(f"{what} returned a {type(model).__name__}; it must return an nn.Module")
    # What a function of one's own returns may be trained already, and made anew would be so again.
    fresh = lambda: make(**options)
    asked = asked and own
    pairs = zip(model.parameters(), fresh().parameters() if asked else ())
    same = asked and all(torch.equal(old, new) for old, new in pairs)
    small = not own and (name == "resnet_cifar" or not name.startswith("resnet"))
    return Network(what, model, trained=same, fresh=None if same else fresh, size=32 if small else 224)


def _load(model: nn.Module, path: Path) -> None:
    from attractor.train.tensors import CheckpointError, read_tensors

    if not path.is_file():
        raise ValueError(f"there is no file {path}; --weights takes a .safetensors file")
    try:
        model.load_state_dict(read_tensors(path))
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
    for start in range(0, n, batch):
        count = min(batch, n - start)
        if network.vocabulary is not None:
            shape = (count, TOKENS)
            ids = torch.randint(network.vocabulary, shape, generator=generator)
            yield {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        else:
            yield torch.randn(count, channels, size, size, generator=generator)


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
        yield interpolate(pictures, size, mode="bilinear", antialias=True) if resize else pictures


def folder_of_images(network: Network, folder: Path, n: int, batch: int, size: int) -> Iterator[Tensor]:
    """Batches of the images in a folder and those below it, the middle of each."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}; --images takes one with image files")
    paths = [p for p in sorted(folder.rglob("*")) if p.suffix.lower() in ENDINGS][:n]
    if not paths:
        raise ValueError(f"{folder} holds no image files ({', '.join(sorted(ENDINGS))})")
    image = _package("PIL.Image", "vision").Image
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
        raise ValueError(f"{network.name} has no tokenizer, so --texts cannot be read; leave it out")
    if not path.is_file():
        raise ValueError(f"there is no file {path}; --texts takes one with a text a line")
    name = network.tokenizer
    auto = _package("transformers", "text").AutoTokenizer
    tokenizer = _fetched(lambda: auto.from_pretrained(name), network.name)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    lines = [line for line in path.read_text().splitlines() if line.strip()][:n]
    for start in range(0, len(lines), batch):
        part = lines[start : start + batch]
        yield tokenizer(part, padding=True, truncation=True, max_length=512, return_tensors="pt")


def channels_of(model: nn.Module) -> int:
    """Channels of a network's images: those of its first convolution."""
    convolutions = (m for m in model.modules() if isinstance(m, nn.Conv2d))
    return next((c.in_channels for c in convolutions), 3)
