"""The Hugging Face hub, for networks and solvers; needs the extra `hub`.

A hybrid solver has `push_to_hub` and `from_pretrained` itself. A network of ours is made by name, with
options that JSON can hold, and has what the hub's own mixin gives:

>>> from attractor.integrations import hub
>>> net = hub.network("resnet_cifar", depth=11, gate="se", width=4)
>>> net.save_pretrained("folder")                       # doctest: +SKIP
>>> net.push_to_hub("somebody/something")               # doctest: +SKIP
>>> net = hub.load("somebody/something")                # doctest: +SKIP

``net.net`` is the network itself. Weights are safetensors and configurations JSON: nothing is unpickled,
and a name that is not in `NETWORKS` is not made.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attractor import attention, residual
from attractor.attention import pdes
from attractor.common.checks import check_choice
from attractor.storage import schema
from attractor.storage.files import check_source
from attractor.storage.limits import read_json
from attractor.train import checkpoint, generators
from attractor.train.tensors import CheckpointError, read_tensors, write_tensors

__all__ = ["NETWORKS", "fetched", "load", "network", "push"]

NETWORKS: dict[str, Callable[..., nn.Module]] = {
    **{n: getattr(residual, n) for n in ("resnet_cifar", "resnet34", "resnet50", "resnet101", "vit")},
    **{n: getattr(attention, n) for n in ("Classifier", "LanguageModel")},
}
EQUATIONS = {cls.__name__: cls for cls in pdes.BY_NAME.values()}
PRECISIONS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LARGEST_CONFIG = 2**20  # bytes
CONFIG, WEIGHTS = "config.json", "model.safetensors"
ELSEWHERE = ("weights", "device", "dtype")  # options that are no part of a configuration


def _options(value: Any, path: str) -> None:
    """Match the options of a network; see `attractor.storage.schema`."""
    schema.mapping(schema.plain)(value, path)
    for name in set(ELSEWHERE) & set(value):
        allowed = f"{', '.join(ELSEWHERE)} are no options of a saved network"
        raise schema.MismatchError(path, f"has the key {name!r}", allowed)


NETWORK = schema.record({"network": schema.text(choices=NETWORKS), "options": _options})
NOT_FETCHED = "is no folder here, and could not be fetched from the hub"


def network(name: str, **options: Any) -> Any:
    """A network that can be saved to and loaded from the hub.

    Args:
        name: one of `NETWORKS`.
        options: its arguments: what JSON can hold, and equations of `attractor.pdes`. ``weights=``
            fills it; a gate then starts at exactly 1. ``device=`` and ``dtype=`` say where it is. These
            three are not part of its configuration.
    """
    weights = options.pop("weights", None)
    place = {name: options.pop(name) for name in ELSEWHERE if name in options}
    if weights is not None and "gate" in options:
        options["gate_options"] = {"identity": True, **(options.get("gate_options") or {})}
    made = _class()(name, _to_json(options)).to(**place)
    if weights is not None:
        made.net.load_state_dict(NETWORKS[name](weights=weights, **options).state_dict())
    return made


def load(name: str | Path, **options: Any) -> Any:
    """The network in a folder or a repository, in evaluation mode and the precision it was saved in.

    Args:
        name: of the folder or the repository.
        options: the hub's own.

    Raises:
        CheckpointError: it cannot be had, or is no network of ours, and why.
    """
    made = _class()
    try:
        for file in (Path(name) / CONFIG, Path(name) / WEIGHTS):  # links, as in the cache of the hub
            if Path(name).is_dir() and os.path.lexists(file):
                check_source(file, link=True)
        return made.from_pretrained(str(name), **options)
    except CheckpointError:
        raise
    except Exception as error:  # of the network, of the hub, of what stands in files
        told = "holds no network of attractor" if Path(name).is_dir() else NOT_FETCHED
        raise CheckpointError(f"{str(name)!r} {told} ({_reason(error)})") from None


@contextmanager
def fetched(
    repo: str, folder: str, *, revision: str | None = None, token: str | bool | None = None
) -> Iterator[Path]:
    """A folder of a repository, as plain files that are removed afterwards.

    Raises:
        ValueError: it cannot be had, and why.
    """
    library = _library()
    try:
        place = library.snapshot_download(
            repo, revision=revision, token=token, allow_patterns=[f"{folder}/*"]
        )
    except Exception as error:  # of the network, of the hub, of names: there are many
        raise ValueError(f"{repo!r} {NOT_FETCHED} ({_reason(error)})") from None
    inside = Path(place) / folder
    if not inside.is_dir():
        raise ValueError(
            f"{repo} has no folder {folder!r}; it is not something that attractor has pushed"
        )
    with tempfile.TemporaryDirectory() as own:
        for path in inside.iterdir():  # the hub's cache is of links, which a checkpoint may not be
            if path.is_file():
                shutil.copyfile(path, Path(own) / path.name)
        yield Path(own)


def push(
    repo: str,
    parts: Mapping[str, Callable[[Path], Any]],
    card: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
) -> str:
    """Put folders and a card in a repository, which is made if there is none; returns its address.

    Args:
        parts: folder -> what writes it.
        card: the README.
    """
    library = _library()
    with tempfile.TemporaryDirectory() as own:
        for name, write in parts.items():
            write(Path(own) / name)
        (Path(own) / "README.md").write_text(card)
        made = library.create_repo(repo, private=private, token=token, exist_ok=True)
        library.upload_folder(repo_id=made.repo_id, folder_path=own, token=token)
    return str(made)


@cache
def _class() -> Any:
    """The class with the hub's mixin, made when it is first needed."""
    mixin = _library().PyTorchModelHubMixin

    class Network(nn.Module, mixin, library_name="attractor", tags=["attractor"]):  # type: ignore[misc,valid-type,call-arg]
        """A network by name, in `net`; calls go to it."""

        def __init__(self, network: str, options: dict[str, Any]) -> None:
            super().__init__()
            check_choice("network", network, list(NETWORKS))
            self.net = NETWORKS[network](**_from_json(options))

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            """What the network gives."""
            return self.net(*args, **kwargs)

        def _save_pretrained(self, save_directory: Path) -> None:
            write_tensors(save_directory / WEIGHTS, dict(self.net.state_dict()))

        @classmethod
        def from_pretrained(cls, name: Any, **options: Any) -> Any:
            """Load a network as the mixin does, after checking the size of its configuration."""
            _check_config(str(name), options)
            return super().from_pretrained(name, **options)

        @classmethod
        def _from_pretrained(
            cls,
            *,
            model_id: str,
            network: Any = None,
            options: Any = None,
            map_location: str = "cpu",
            strict: bool = True,
            **place: Any,
        ) -> Any:
            """The mixin's, but no module is made before the weights are known to be its own."""
            if network is None:  # there is no config.json
                raise CheckpointError(f"{model_id}: {CONFIG} does not name a network and its options")
            config = {"network": network, "options": options}
            schema.check(config, NETWORK, f"{model_id}/{CONFIG}", CheckpointError)
            file = _weights(model_id, place)
            tensors = read_tensors(file)
            checkpoint.check_sizes(options, tensors, file, allowed=1_000_000)  # of tokens, say
            with torch.device("meta"):
                shell = _in_precision_of(tensors, cls(network, options).net)
            checkpoint.check(shell, checkpoint.completed(shell, tensors), file)
            with generators.own():  # its first weights are not kept
                model = cls(network, options)
            net = _in_precision_of(tensors, model.net)
            checkpoint.fill(net, checkpoint.completed(net, tensors), file)
            return model.to(map_location).eval()

        def __reduce__(self) -> tuple[Any, ...]:
            return _empty, (), self.__dict__.copy()

    return Network


def _empty() -> Any:
    """What a pickled network is put into: its class has no name that pickle could find."""
    return object.__new__(_class())


def _in_precision_of(tensors: Mapping[str, Tensor], net: nn.Module) -> nn.Module:
    """The network, each of its tensors of floats in the precision of the saved one."""
    for name, own in net.state_dict(keep_vars=True).items():  # parts may rename their tensors there
        saved = tensors.get(name)
        if saved is not None and own.is_floating_point() and saved.dtype in PRECISIONS:
            own.data = own.data.to(saved.dtype)
    return net


def _check_config(name: str, options: Mapping[str, Any]) -> None:
    """Raise if the configuration of a folder or a repository is too long or too deep to be read."""
    place = Path(name) / "config.json"
    if not Path(name).is_dir():
        own = ("revision", "cache_dir", "force_download", "token", "local_files_only")
        known = {key: value for key, value in options.items() if key in own}
        library = _library()
        try:
            place = Path(library.hf_hub_download(name, "config.json", **known))
        except library.errors.EntryNotFoundError:
            return  # the mixin reports it
    if place.exists():
        try:
            schema.check(read_json(place, LARGEST_CONFIG, link=True), NETWORK, CONFIG)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{name} holds no network of attractor: {error}") from None


def _weights(name: str, place: dict[str, Any]) -> Path:
    """The file of weights, of a folder or a repository."""
    library = _library()
    missing = CheckpointError(f"{name} has no {WEIGHTS}; weights that are pickled are not loaded")
    if Path(name).is_dir():
        if not (file := Path(name) / WEIGHTS).is_file():
            raise missing
        return file
    try:
        return Path(library.hf_hub_download(name, WEIGHTS, **place))
    except library.errors.EntryNotFoundError:
        raise missing from None


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _library() -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise ImportError(
            "huggingface_hub is missing; install it with: pip install 'attractor[hub]'"
        ) from None
    return huggingface_hub


def _to_json(options: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in options.items():
        if is_dataclass(value) and type(value) in EQUATIONS.values():
            numbers = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
            value = {"equation": type(value).__name__, **numbers}
        try:
            found[name] = json.loads(json.dumps(value))
        except (TypeError, ValueError):
            raise TypeError(
                f"{name} is a {type(value).__name__}, which a configuration cannot hold; give numbers, "
                "names, or an equation of attractor.pdes with numbers"
            ) from None
    return found


def _from_json(options: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in options.items():
        if isinstance(value, dict) and value.get("equation") in EQUATIONS:
            numbers = {k: v for k, v in value.items() if k != "equation"}
            value = EQUATIONS[value["equation"]](**numbers)
        found[name] = value
    return found
