"""Weights of ResNets from files and from torchvision."""

from pathlib import Path

from torch import Tensor, nn


def read_weights(name: str, weights: Path | str) -> dict[str, Tensor]:
    """Return the tensors of a file, or of a network of torchvision.

    Args:
        name: Name of the network in torchvision.
        weights: A safetensors file, or "torchvision" to download them.
    """
    if weights == "torchvision":
        try:
            from torchvision.models import get_model_weights  # type: ignore[import-not-found,unused-ignore]
        except ImportError:
            raise ImportError(
                'weights="torchvision" needs torchvision (pip install torchvision); or pass a file'
            ) from None
        return get_model_weights(name).DEFAULT.get_state_dict(check_hash=True, weights_only=True)
    if not Path(weights).is_file():
        raise FileNotFoundError(f'weights {str(weights)!r} is neither a file nor "torchvision"')
    from attractor.train.tensors import read_tensors

    return read_tensors(weights)


def load_weights(model: nn.Module, tensors: dict[str, Tensor], plain: set[str]) -> None:
    """Load tensors into a ResNet. Its gates may be missing, and a classifier of another size is skipped.

    Args:
        model: The network.
        tensors: Tensors by name.
        plain: Names of the network's tensors without gates.

    Raises:
        ValueError: Other tensors are missing or unknown.
    """
    own = model.state_dict()
    for part in ("fc.weight", "fc.bias"):
        if part in tensors and tensors[part].shape != own[part].shape:
            tensors = {**tensors, part: own[part]}
    missing, unknown = model.load_state_dict(tensors, strict=False)
    absent = [key for key in missing if key in plain]
    if absent or unknown:
        raise ValueError(
            f"these weights do not belong to this network: {len(absent)} tensors are missing "
            f"({', '.join(absent[:3])}, ...), {len(unknown)} unknown ({', '.join(unknown[:3])}, ...)"
        )
