"""Small networks that come with the library, each a folder here; `benchmarks/pretrained.py` has made
them.

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

from attractor.core.schema import check, mapping, plain, record, text
from attractor.core.shelf import Shelf
from attractor.residual import resnet
from attractor.train import checkpoint, generators
from attractor.train.checkpoint import CheckpointError

__all__ = ["card", "folder", "load", "names", "save"]

KIND = "network"
HOME = Path(__file__).parent
_SHELF = Shelf(HOME, "pretrained network")
_MAKERS = {"resnet_cifar": resnet.resnet_cifar}
_SCHEMA = record({"network": text(choices=_MAKERS), "options": mapping(plain)})


def names() -> list[str]:
    """What `load` knows by name."""
    return _SHELF.names()


def folder(name: str) -> Path:
    """Where the network of that name is; an error that names those there are."""
    return _SHELF.folder(name)


def card(name: str) -> dict[str, Any]:
    """What is known about a network: how it is made, its data, its accuracy on new ones."""
    return _SHELF.card(name)


def load(name: str) -> resnet.ResNet:
    """The trained network of that name, in evaluation mode."""
    place = folder(name)
    tensors, config = checkpoint.load(place, KIND)
    check(config, _SCHEMA, place, CheckpointError)
    with generators.own():  # its first weights are not kept
        net = _MAKERS[config["network"]](**config["options"])
    checkpoint.fill(net, checkpoint.completed(net, tensors), place)
    return net.eval()


def save(name: str, network: str, options: dict[str, Any], net: resnet.ResNet) -> Path:
    """Put a network on the shelf: what `load` needs to make it again."""
    return checkpoint.save(
        HOME / name, KIND, dict(net.state_dict()), {"network": network, "options": options}
    )
