"""Residual blocks as `insert_gates` sees them, and blocks that follow the names of common libraries."""

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from attractor.residual.branch import Branch
from attractor.residual.dispatch import Path, split_path
from attractor.residual.normalisations import Norm, batch_norms, replaces_norm
from attractor.residual.trunk import block_path


@dataclass(frozen=True)
class ResidualBlock:
    """A module whose forward adds a branch to x.

    Attributes:
        name: Path of the module.
        module: The module.
        channels: Number of channels of f.
        end: Path of the part whose output is f.
        shortcut: Path of the part that projects x; None if x itself is added, or no part computes it.
        identity: Whether x itself is added.
        axes: Number of axes of f, ``[batch, channels, ...]``.
        branch: The branch as a run of the block shows it; None if only names are known.
        path: Path within the module of the part that holds the whole branch.
        failure: Error of the run if the block could not be run, so that only its names are known.
        merged: Path of the block in a profile, where `probe` merges several parts into one block.
        obstacle: Reason why a gate cannot be inserted, as a verb phrase, or "".
    """

    name: str
    module: nn.Module
    channels: int = 0
    end: str = ""
    shortcut: str | None = None
    identity: bool = True
    axes: int = 4
    branch: Branch | None = None
    path: Path = ()
    failure: str = ""
    merged: Path = ()
    obstacle: str = ""

    @property
    def stage(self) -> str:
        """Name of the module that holds this block and the others of its stage."""
        return self.name.rpartition(".")[0]

    @property
    def home(self) -> str:
        """Name of the block in a `StiffnessProfile`; several additions may share one block there."""
        place = split_path(self.name)
        return ".".join(self.merged or block_path(place, place + self.path)) or "model"

    def gate(self) -> nn.Module | None:
        """Return the gate: the child `gate`, or the last normalisation that a gate replaces, or None."""
        gates = [norm for _, _, norm in self.norms() if replaces_norm(norm)]
        child = self.module._modules.get("gate")
        return child if child is not None or not gates else gates[-1]

    def norms(self) -> list[Norm]:
        """Return the batch normalisations of the branch."""
        parts = self.module._modules
        return batch_norms(self.module, exclude=(parts.get(self.shortcut or ""), parts.get("gate")))

    def __str__(self) -> str:
        return f"block {self.name}" if self.name else "the network itself"


def block_by_names(name: str, module: nn.Module) -> ResidualBlock | None:
    """Return the block that a module is by the names of its parts in torchvision, timm or transformers.

    Raises:
        ValueError: The names do not show which part ends the branch.
    """
    parts: dict[str, Any] = module._modules
    convolution, end, shortcut = None, "layer", "shortcut"  # transformers
    if isinstance(parts.get("layer"), nn.Sequential) and "shortcut" in parts:
        convolutions = [part for part in parts["layer"].modules() if isinstance(part, _ConvNd)]
        convolution = convolutions[-1] if convolutions else None
    elif "conv1" in parts and hasattr(module, "downsample"):  # torchvision, timm, this library
        last = "3" if "conv3" in parts else "2"
        convolution, shortcut = parts.get(f"conv{last}"), "downsample"
        end = _last_part(name, parts, last)
        if parts.get("se") is not None:  # timm's own attention follows
            end = "se"
    if not isinstance(convolution, _ConvNd) or end not in parts:
        return None
    projects = not isinstance(parts.get(shortcut), nn.Identity | None)
    return ResidualBlock(
        name,
        module,
        convolution.out_channels,
        end,
        shortcut if projects else None,
        not projects,
        2 + len(convolution.kernel_size),
    )


def _last_part(name: str, parts: dict[str, Any], last: str) -> str:
    """Return the part that ends a branch: the last norm, or with pre-activation the last convolution.

    A norm has as many channels as the part before it. Where this is ambiguous, the parts are assumed to
    be called in the order of their registration.
    """
    conv, norm, order = f"conv{last}", f"bn{last}", list(parts)
    first, end = parts["conv1"], parts.get(conv)
    if norm not in parts or not (isinstance(first, _ConvNd) and isinstance(end, _ConvNd)):
        return norm
    width = lambda part: getattr(parts.get(part), "num_features", None)
    if first.in_channels != first.out_channels and width("bn1") == first.in_channels:
        return conv
    if width(norm) not in (None, end.out_channels):
        return conv
    after_convolutions = first.in_channels != first.out_channels and width("bn1") == first.out_channels
    if after_convolutions or order.index(norm) > order.index(conv):
        return norm
    if order.index(norm) < order.index(f"conv{int(last) - 1}"):
        raise ValueError(
            f"block {name or 'itself'} has registered {norm} before all convolutions, so it is unclear "
            f"whether {norm} or {conv} ends its branch; register its parts in the order in which "
            "forward calls them"
        )
    return conv
