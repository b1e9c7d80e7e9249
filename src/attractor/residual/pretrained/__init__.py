"""Small pretrained networks, one folder per network; `benchmarks/pretrained.py` trains them.

>>> import torch
>>> from attractor.residual import pretrained
>>> pretrained.names()
['digits']
>>> net = pretrained.load("digits")
>>> net(torch.zeros(1, 1, 8, 8)).shape
torch.Size([1, 10])
"""

from pathlib import Path
from typing import Any

from attractor.residual import resnet
from attractor.storage.objects import AnyPath
from attractor.storage.schema import check, mapping, plain, record, text
from attractor.storage.shelf import Shelf
from attractor.train import checkpoint, generators
from attractor.train.checkpoint import CheckpointError

__all__ = ["card", "folder", "load", "names", "save"]

KIND = "network"
HOME = Path(__file__).parent
_SHELF = Shelf(HOME, "pretrained network")
_MAKERS = {"resnet_cifar": resnet.resnet_cifar}
_SCHEMA = record({"network": text(choices=_MAKERS), "options": mapping(plain)})


def names() -> list[str]:
    """Return the names that `load` accepts."""
    return _SHELF.names()


def folder(name: str) -> Path:
    """Return the folder of a network.

    Raises:
        ValueError: There is no network of that name; the message lists the names.
    """
    return _SHELF.folder(name)


def card(name: str) -> dict[str, Any]:
    """Return the card of a network: its architecture, its data, and its accuracy on test data."""
    return _SHELF.card(name)


def load(name: str) -> resnet.ResNet:
    """Load a network by its name, in evaluation mode."""
    place = folder(name)
    tensors, config = checkpoint.load(place, KIND)
    check(config, _SCHEMA, place, CheckpointError)
    with generators.own():  # the initial weights are replaced
        net = _MAKERS[config["network"]](**config["options"])
    checkpoint.fill(net, checkpoint.completed(net, tensors), place)
    return net.eval()


def save(name: str, network: str, options: dict[str, Any], net: resnet.ResNet) -> AnyPath:
    """Save a network so that `load` can restore it, and return its folder.

    Args:
        name: Name for `load`.
        network: Name of the function that makes the network.
        options: Arguments of that function.
        net: The network.
    """
    return checkpoint.save(
        HOME / name, KIND, dict(net.state_dict()), {"network": network, "options": options}
    )
