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
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

from attractor import attention, residual
from attractor.attention import pdes
from attractor.core.checks import check_choice
from attractor.train import checkpoint
from attractor.train.tensors import CheckpointError, read_tensors, write_tensors

__all__ = ["NETWORKS", "fetched", "load", "network", "push"]

NETWORKS: dict[str, Callable[..., nn.Module]] = {
    **{n: getattr(residual, n) for n in ("resnet_cifar", "resnet34", "resnet50", "resnet101", "vit")},
    **{n: getattr(attention, n) for n in ("Classifier", "LanguageModel")},
}
EQUATIONS = {cls.__name__: cls for cls in pdes.BY_NAME.values()}
WEIGHTS = "model.safetensors"


def network(name: str, **options: Any) -> Any:
    """A network that can be saved to and loaded from the hub.

    Args:
        name: one of `NETWORKS`.
        options: its arguments: what JSON can hold, and equations of `attractor.pdes`. ``weights=``
            fills it, and is not part of its configuration.
    """
    weights = options.pop("weights", None)
    made = _class()(name, _to_json(options))
    if weights is not None:
        made.net.load_state_dict(NETWORKS[name](weights=weights, **options).state_dict())
    return made


def load(name: str | Path, **options: Any) -> Any:
    """The network in a folder or a repository, in evaluation mode; options are the hub's own."""
    return _class().from_pretrained(str(name), **options)


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
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{repo!r} is no folder here, and could not be fetched from the hub "
            f"({type(error).__name__}: {reason})"
        ) from None
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
        def _load_as_safetensor(cls, model: Any, file: str, map_location: str, strict: bool) -> Any:
            checkpoint.fill(model.net, read_tensors(file), file)
            return model.to(map_location).eval()

        @classmethod
        def _load_as_pickle(cls, model: Any, file: str, map_location: str, strict: bool) -> Any:
            raise CheckpointError(f"there is no {WEIGHTS}; weights that are pickled are not loaded")

    return Network


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
    if not isinstance(options, dict) or "weights" in options:  # a path or an address of somebody's
        raise CheckpointError(
            f"options {options!r} are not those of a network; weights come beside them"
        )
    found = {}
    for name, value in options.items():
        if isinstance(value, dict) and value.get("equation") in EQUATIONS:
            numbers = {k: v for k, v in value.items() if k != "equation"}
            value = EQUATIONS[value["equation"]](**numbers)
        found[name] = value
    return found
