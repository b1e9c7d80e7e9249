"""Export of networks with PDE attention to ONNX: models of this library, of transformers, or others.

>>> import torch
>>> import attractor as at
>>> model = at.attention.LanguageModel(50, dim=16, heads=2, layers=1, hidden=16, pde="diffusion")
>>> ids = torch.randint(50, (2, 12))
>>> free = {"ids": {0: "batch", 1: "tokens"}}
>>> file = export_network(model.eval(), "model.onnx", {"ids": ids}, free=free)  # doctest: +SKIP
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from attractor.integrations.onnx import (
    Exported,
    check_packages,
    from_onnx,
    without_paths,
    without_warnings,
)
from attractor.storage.files import check_target, write_bytes

ROUNDING = 1000  # largest difference of outputs, in units of rounding of the largest output


def export_network(
    network: nn.Module,
    path: Path | str,
    inputs: Mapping[str, Any],
    *,
    free: Mapping[str, Mapping[int, str]] | None = None,
) -> Exported:
    """Write a network in evaluation mode as an ONNX file for onnxruntime.

    Before the file is written, its outputs are compared with those of the network, on the inputs and
    with one more element in every free dimension. Attention with a mask, causal or not, builds the map
    of ``queries x keys`` numbers per head in the file, whatever its `method`.

    Args:
        network: A module. The file has its first output only, `logits` for most of transformers'.
        path: A path that ends in .onnx.
        inputs: Arguments of its forward by name. Tensors become inputs of the file; others, such as
            ``use_cache=False``, are constants in it.
        free: Names of free dimensions, by input and dimension, as in ``{"input_ids": {0: "batch",
            1: "tokens"}}``. Dimensions with the same name have the same size.

    Raises:
        ValueError: The path has another ending, or there is no input, or `free` has an unknown one.
        RuntimeError: The network cannot be traced, converted or run, or the outputs of the file differ.
            Nothing is written then.
        ImportError: onnx, onnxscript or onnxruntime is missing.
    """
    path = Path(path)
    if path.suffix != ".onnx":
        raise ValueError(f"path {path.name!r} must end in .onnx")
    check_target(path)
    if not isinstance(network, nn.Module):
        raise TypeError(f"network is a {type(network).__name__}; pass a module")
    if not isinstance(inputs, Mapping) or not any(isinstance(x, Tensor) for x in inputs.values()):
        raise ValueError(f"inputs {inputs!r} must be a dictionary with at least one tensor")
    check_packages()
    tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
    sizes = _sizes(tensors, free or {})
    modes = [(module, module.training) for module in network.modules()]
    model = _First(network, [*tensors], {n: x for n, x in inputs.items() if n not in tensors}).eval()
    try:
        with torch.no_grad(), without_warnings():
            content = _to_onnx(model, tensors, free or {}, sizes)
            try:
                run = from_onnx(content)
                difference = max(
                    _difference(run, model, x) for x in _examples(tensors, free or {}, sizes)
                )
            except RuntimeError:
                raise
            except Exception as error:  # of onnxruntime
                raise RuntimeError(f"onnxruntime cannot run the model: {error}") from error
            limit = ROUNDING * torch.finfo(model.dtype(tensors)).eps
    finally:
        for module, mode in modes:
            module.training = mode
    if not difference <= limit:  # NaN, too
        raise RuntimeError(
            f"the exported model differs from {type(network).__name__} by {difference:.1e} of the "
            f"largest output; rounding explains {limit:.1e}. Nothing was written"
        )
    return Exported(write_bytes(path, content), difference)


class _First(nn.Module):
    """A network as a function of tensors that returns the first output.

    Args:
        network: The network.
        names: The names of the tensors as arguments of the network.
        constants: Its other arguments.
    """

    def __init__(self, network: nn.Module, names: list[str], constants: dict[str, Any]) -> None:
        super().__init__()
        self.network, self.names, self.constants = network, names, constants

    def forward(self, *tensors: Tensor) -> Tensor:
        output = self.network(**dict(zip(self.names, tensors, strict=True)), **self.constants)
        while not isinstance(output, Tensor):
            output = next(iter(output.values())) if isinstance(output, Mapping) else output[0]
        return output

    def dtype(self, tensors: Mapping[str, Tensor]) -> torch.dtype:
        return self(*tensors.values()).dtype


def _sizes(tensors: Mapping[str, Tensor], free: Mapping[str, Mapping[int, str]]) -> dict[str, int]:
    """Return the sizes of free dimensions by their names."""
    sizes: dict[str, int] = {}
    for name, dimensions in free.items():
        if name not in tensors:
            raise ValueError(f"free has {name!r}, which is not a tensor of inputs: {', '.join(tensors)}")
        for dimension, label in dimensions.items():
            if not -tensors[name].dim() <= dimension < tensors[name].dim():
                raise ValueError(f"{name} {list(tensors[name].shape)} has no dimension {dimension}")
            size = tensors[name].shape[dimension]
            if sizes.setdefault(label, size) != size:
                raise ValueError(
                    f"free dimension {label!r} has sizes {sizes[label]} and {size} in inputs"
                )
    return sizes


def _to_onnx(
    model: _First,
    tensors: Mapping[str, Tensor],
    free: Mapping[str, Mapping[int, str]],
    sizes: Mapping[str, int],
) -> bytes:
    labels = {label: Dim(label) for label in sizes}
    shapes = [
        {d % x.dim(): labels[label] for d, label in free.get(name, {}).items()} or None
        for name, x in tensors.items()
    ]
    try:
        program: Any = torch.onnx.export(
            model,
            tuple(tensors.values()),
            dynamic_shapes=(tuple(shapes),) if sizes else None,  # of *tensors
            input_names=[*tensors],
            output_names=["output"],
            opset_version=20,
            dynamo=True,
            verbose=False,
        )
    except Exception as error:
        cause = " ".join(str(error.__cause__ or error).split())
        raise RuntimeError(
            f"{type(model.network).__name__} has no ONNX form: {cause[:600]}\nNothing was written"
        ) from error
    return without_paths(program.model_proto).SerializeToString()


def _examples(
    tensors: Mapping[str, Tensor], free: Mapping[str, Mapping[int, str]], sizes: Mapping[str, int]
) -> list[dict[str, Tensor]]:
    """Return the inputs, and inputs with one more element in every free dimension."""
    if not sizes:
        return [dict(tensors)]
    longer = dict(tensors)
    for name, dimensions in free.items():
        for dimension in dimensions:
            x = longer[name]
            index = torch.arange(x.shape[dimension] + 1, device=x.device) % x.shape[dimension]
            longer[name] = x.index_select(dimension, index)
    return [dict(tensors), longer]


def _difference(run: Callable[..., Tensor], model: _First, inputs: Mapping[str, Tensor]) -> float:
    expected = model(*inputs.values()).cpu()
    actual = run(**{name: x.cpu() for name, x in inputs.items()})
    if actual.shape != expected.shape:
        return float("inf")
    return ((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()
