"""Networks and solvers on the Hugging Face hub. Requires the extra `hub`.

A hybrid solver has the methods `push_to_hub` and `from_pretrained`. A network of this library is made by
its name, with options that JSON can represent, and has the methods of the hub's mixin:

>>> from attractor.integrations import hub
>>> net = hub.network("resnet_cifar", depth=11, gate="se", width=4)
>>> net.save_pretrained("folder")                       # doctest: +SKIP
>>> net.push_to_hub("somebody/something")               # doctest: +SKIP
>>> net = hub.load("somebody/something")                # doctest: +SKIP

``net.net`` is the network itself. Weights are stored as safetensors and configurations as JSON. Nothing
is unpickled, and only the networks in `NETWORKS` are made.
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

__all__ = ["NETWORKS", "download", "load", "network", "push"]

NETWORKS: dict[str, Callable[..., nn.Module]] = {
    **{n: getattr(residual, n) for n in ("resnet_cifar", "resnet34", "resnet50", "resnet101", "vit")},
    **{n: getattr(attention, n) for n in ("Classifier", "LanguageModel")},
}
EQUATIONS = {cls.__name__: cls for cls in pdes.BY_NAME.values()}
PRECISIONS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LARGEST_CONFIG = 2**20  # bytes
CONFIG, WEIGHTS = "config.json", "model.safetensors"
NOT_SAVED = ("weights", "device", "dtype")  # options that are not part of a configuration


def _options(value: Any, path: str) -> None:
    """Match the options of a network, as a schema of `attractor.storage.schema`."""
    schema.mapping(schema.plain)(value, path)
    for name in set(NOT_SAVED) & set(value):
        rule = f"{', '.join(NOT_SAVED)} are no options of a saved network"
        raise schema.MismatchError(path, f"has the key {name!r}", rule)


NETWORK = schema.record({"network": schema.text(choices=NETWORKS), "options": _options})
NOT_FETCHED = "is no folder here, and could not be fetched from the hub"


def network(name: str, **options: Any) -> Any:
    """Return a network that can be saved to the hub and loaded from it.

    Args:
        name: A name in `NETWORKS`.
        **options: Arguments of the network: values that JSON can represent, and equations of
            `attractor.pdes`. With ``weights=``, a gate starts at exactly 1. The options ``weights``,
            ``device`` and ``dtype`` are not part of the configuration.
    """
    weights = options.pop("weights", None)
    factory = {name: options.pop(name) for name in NOT_SAVED if name in options}
    if weights is not None and "gate" in options:
        options["gate_options"] = {"identity": True, **(options.get("gate_options") or {})}
    module = _class()(name, _to_json(options)).to(**factory)
    if weights is not None:
        module.net.load_state_dict(NETWORKS[name](weights=weights, **options).state_dict())
    return module


def load(name: str | Path, **options: Any) -> Any:
    """Load a network in evaluation mode, with the dtypes of its saved weights.

    Args:
        name: Name of a folder or a repository.
        **options: Options of the hub.

    Raises:
        CheckpointError: The network cannot be downloaded, or is not a network of this library.
    """
    try:
        for file in (Path(name) / CONFIG, Path(name) / WEIGHTS):  # links, as in the cache of the hub
            if Path(name).is_dir() and os.path.lexists(file):
                check_source(file, link=True)
        return _class().from_pretrained(str(name), **options)
    except CheckpointError:
        raise
    except Exception as error:  # errors of the connection, the hub, or damaged files
        message = "holds no network of attractor" if Path(name).is_dir() else NOT_FETCHED
        raise CheckpointError(f"{str(name)!r} {message} ({_reason(error)})") from None


@contextmanager
def download(
    repo: str, folder: str, *, revision: str | None = None, token: str | bool | None = None
) -> Iterator[Path]:
    """Download a folder of a repository as plain files, which are removed at the end of the context.

    Raises:
        ValueError: The folder cannot be downloaded, or does not exist.
    """
    library = _library()
    try:
        snapshot = library.snapshot_download(
            repo, revision=revision, token=token, allow_patterns=[f"{folder}/*"]
        )
    except Exception as error:  # errors of the connection, the hub, or the name
        raise ValueError(f"{repo!r} {NOT_FETCHED} ({_reason(error)})") from None
    source = Path(snapshot) / folder
    if not source.is_dir():
        raise ValueError(
            f"{repo} has no folder {folder!r}; it is not something that attractor has pushed"
        )
    with tempfile.TemporaryDirectory() as target:
        for path in source.iterdir():  # the hub's cache consists of links, which checkpoints must not be
            if path.is_file():
                shutil.copyfile(path, Path(target) / path.name)
        yield Path(target)


def push(
    repo: str,
    folders: Mapping[str, Callable[[Path], Any]],
    card: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
) -> str:
    """Upload folders and a card to a repository, which is created if necessary, and return its address.

    Args:
        repo: Name of the repository.
        folders: Functions that write a folder, by the name of the folder.
        card: Content of README.md.
        private, token: As in `huggingface_hub.create_repo`.
    """
    library = _library()
    with tempfile.TemporaryDirectory() as target:
        for name, write in folders.items():
            write(Path(target) / name)
        (Path(target) / "README.md").write_text(card)
        url = library.create_repo(repo, private=private, token=token, exist_ok=True)
        library.upload_folder(repo_id=url.repo_id, folder_path=target, token=token)
    return str(url)


@cache
def _class() -> Any:
    """Return the class with the hub's mixin, which is imported at the first call."""
    mixin = _library().PyTorchModelHubMixin

    class Network(nn.Module, mixin, library_name="attractor", tags=["attractor"]):  # type: ignore[misc,valid-type,call-arg]
        """A network by name, stored in `net`."""

        def __init__(self, network: str, options: dict[str, Any]) -> None:
            super().__init__()
            check_choice("network", network, list(NETWORKS))
            self.net = NETWORKS[network](**_from_json(options))

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            """Return the output of the network."""
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
            **download_options: Any,
        ) -> Any:
            """Load a network as the mixin does, but check the weights before a module is made."""
            if network is None:  # there is no config.json
                raise CheckpointError(f"{model_id}: {CONFIG} does not name a network and its options")
            config = {"network": network, "options": options}
            schema.check(config, NETWORK, f"{model_id}/{CONFIG}", CheckpointError)
            file = _weights(model_id, download_options)
            tensors = read_tensors(file)
            checkpoint.check_sizes(
                options, tensors, file, allowed=1_000_000
            )  # such as a number of tokens
            with torch.device("meta"):
                shell = _with_dtypes_of(tensors, cls(network, options).net)
            checkpoint.check(shell, checkpoint.completed(shell, tensors), file)
            with generators.own():  # the initial weights are replaced
                model = cls(network, options)
            net = _with_dtypes_of(tensors, model.net)
            checkpoint.fill(net, checkpoint.completed(net, tensors), file)
            return model.to(map_location).eval()

        def __reduce__(self) -> tuple[Any, ...]:
            return _empty, (), self.__dict__.copy()

    return Network


def _empty() -> Any:
    """Return an empty network for unpickling; its class has no name that pickle could find."""
    return object.__new__(_class())


def _with_dtypes_of(tensors: Mapping[str, Tensor], net: nn.Module) -> nn.Module:
    """Convert each floating-point tensor of a network to the dtype of the saved one."""
    for name, parameter in net.state_dict(keep_vars=True).items():  # modules may rename tensors there
        tensor = tensors.get(name)
        if tensor is not None and parameter.is_floating_point() and tensor.dtype in PRECISIONS:
            parameter.data = parameter.data.to(tensor.dtype)
    return net


def _check_config(name: str, options: Mapping[str, Any]) -> None:
    """Raise if the configuration in a folder or a repository is too long, too deep, or invalid."""
    path = Path(name) / CONFIG
    if not Path(name).is_dir():
        names = ("revision", "cache_dir", "force_download", "token", "local_files_only")
        download_options = {key: value for key, value in options.items() if key in names}
        library = _library()
        try:
            path = Path(library.hf_hub_download(name, CONFIG, **download_options))
        except library.errors.EntryNotFoundError:
            return  # the mixin reports it
    if path.exists():
        try:
            schema.check(read_json(path, LARGEST_CONFIG, link=True), NETWORK, CONFIG)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{name} holds no network of attractor: {error}") from None


def _weights(name: str, options: dict[str, Any]) -> Path:
    """Return the file of weights in a folder or a repository."""
    library = _library()
    missing = CheckpointError(f"{name} has no {WEIGHTS}; weights that are pickled are not loaded")
    if Path(name).is_dir():
        if not (file := Path(name) / WEIGHTS).is_file():
            raise missing
        return file
    try:
        return Path(library.hf_hub_download(name, WEIGHTS, **options))
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
    result = {}
    for name, value in options.items():
        if is_dataclass(value) and type(value) in EQUATIONS.values():
            numbers = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
            value = {"equation": type(value).__name__, **numbers}
        try:
            result[name] = json.loads(json.dumps(value))
        except (TypeError, ValueError):
            raise TypeError(
                f"{name} is a {type(value).__name__}, which a configuration cannot hold; pass numbers, "
                "names, or an equation of attractor.pdes with numbers"
            ) from None
    return result


def _from_json(options: dict[str, Any]) -> dict[str, Any]:
    result = {}
    for name, value in options.items():
        if isinstance(value, dict) and value.get("equation") in EQUATIONS:
            numbers = {k: v for k, v in value.items() if k != "equation"}
            value = EQUATIONS[value["equation"]](**numbers)
        result[name] = value
    return result
