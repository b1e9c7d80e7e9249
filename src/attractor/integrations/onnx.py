"""Export of a hybrid solver to a file that runs without attractor: ONNX, or PyTorch's `.pt2`."""

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from attractor.common.checks import as_int
from attractor.core.step import with_parameters
from attractor.ode import HybridSolver
from attractor.ode.trust import TrustRegion
from attractor.storage.files import check_target, write_bytes

__all__ = ["Exported", "export"]

LONGEST = 32  # largest number of steps: each is a copy of the graph, and takes the exporter seconds
ROUNDING = 300  # largest difference per step, in units of rounding; fewer than ten are usual


@dataclass(frozen=True)
class Exported:
    """An exported file.

    Attributes:
        path: Path of the file.
        difference: Largest difference between the outputs of the file and of the original, relative to
            the largest component of a state, or of an output; None if it was not checked.
    """

    path: Path
    difference: float | None


def export(solver: HybridSolver, path: Path | str, *, steps: int = 1, check: bool = True) -> Exported:
    """Write the solver's step as a model ``u [batch, d] -> after [batch, d]``.

    The batch size is free, and the dtype is the solver's. If the correction or the rate depends on time,
    the model has a second input, the scalar time `t` of u in the same dtype. If the solver was fitted
    with parameters, the last input is `parameters` ``[batch, k]``, a keyword argument in a .pt2 file.
    ONNX's metadata, or the extra file ``attractor.json`` of a .pt2 file, contain dt, scheme, correction,
    system and steps. The model has no trust region, so its steps are not guarded.

    Args:
        solver: The solver.
        path: A path that ends in .onnx (for onnxruntime and others) or .pt2 (for `torch.export.load`).
        steps: Number of steps of dt per call of the model, up to 32.
        check: Whether to compare the model with the solver, for two batch sizes, before writing.

    Raises:
        ValueError: The path has another ending, there are too many steps, or the solver has no states
            to trace it with.
        RuntimeError: The step cannot be traced, converted or run, or the outputs of the model differ.
        ImportError: onnx, onnxscript or onnxruntime is missing.
    """
    path = Path(path)
    if path.suffix not in FORMATS:
        raise ValueError(f"{path.name!r} must end in {' or '.join(FORMATS)}, the formats of an export")
    if not isinstance(solver, HybridSolver):
        raise TypeError(f"solver is a {type(solver).__name__}; pass a HybridSolver, as fit returns")
    check_target(path)
    steps = as_int(steps)
    if not isinstance(steps, int) or not 1 <= steps <= LONGEST:
        raise ValueError(f"steps = {steps!r}; one call takes 1 to {LONGEST}, call again to go further")
    write, read = FORMATS[path.suffix]
    about = {
        "dt": repr(solver.dt),
        "scheme": solver.scheme.name,
        "correction": type(solver.correction).__name__,
        "system": getattr(solver.rate, "__qualname__", repr(solver.rate)),
        "steps": str(steps),
    }
    with torch.no_grad(), without_warnings():
        model = _Steps(solver, steps)
        content = write(_export_program(model, model.example(2)), model, about)
        if not check:
            return Exported(write_bytes(path, content), None)
        run = read(content)
        difference = max(_difference(run, model, model.example(n)) for n in (1, 7))
    limit = ROUNDING * steps * torch.finfo(model.dtype).eps + steps * _network_rounding(solver, model)
    if not difference <= limit:  # NaN, too
        raise RuntimeError(
            f"the exported model differs from {solver} by {difference:.1e} of a state's size; rounding "
            f"explains {limit:.1e}. Nothing was written; check=False would"
        )
    return Exported(write_bytes(path, content), difference)


class _Steps(nn.Module):
    """The solver's steps as a function of u, and of t if they depend on it."""

    def __init__(self, solver: HybridSolver, steps: int) -> None:
        super().__init__()
        self.solver, self.steps = solver, steps
        self.correction, self.rate = solver.correction, solver.rate  # weights of both are exported
        like = next(solver.correction.parameters(), torch.zeros((), dtype=torch.float64))
        self.dtype, self.device, self.takes_time = like.dtype, like.device, False
        inputs = self.example(16)
        u, rate = inputs["u"], with_parameters(solver.rate, inputs.get("parameters"))
        rates = [rate(torch.tensor(t).to(u), u) for t in (0.0, 0.37, 7.1)]
        self.takes_time = getattr(solver.correction, "timed", False) or any(
            not torch.equal(rate, rates[0]) for rate in rates
        )

    def forward(self, u: Tensor, t: Any = 0.0, parameters: Tensor | None = None) -> Tensor:
        for i in range(self.steps):
            u = self.solver.step(u, t + i * self.solver.dt, guard=False, parameters=parameters)
        return u

    def example(self, n: int) -> dict[str, Tensor]:
        """Return inputs by name, with n states like those of the fit, or initial states."""
        generator, solver = torch.Generator().manual_seed(n), self.solver
        if isinstance(solver.trust, TrustRegion):
            mean, deviation = solver.trust.mean.cpu(), solver.trust.deviation.cpu()
            u = mean + deviation * torch.randn(n, len(mean), generator=generator, dtype=torch.float64)
        elif hasattr(solver.rate, "sample") and not solver.parameter_count:
            u = solver.rate.sample(n, generator, torch.float64)
        else:
            raise ValueError(
                f"{solver} has no trust region and its rate no sample(), so there are no states to "
                "trace it with; pass trust=TrustRegion.around(states) to HybridSolver"
            )
        inputs = {"u": u}
        if self.takes_time:
            inputs["t"] = torch.tensor(0.3 * n * solver.dt)
        if solver.parameter_count:
            dim = u.shape[-1] - solver.parameter_count
            inputs |= {"u": u[:, :dim], "parameters": u[:, dim:]}
        return {name: x.to(self.device, self.dtype).contiguous() for name, x in inputs.items()}


def _network_rounding(solver: HybridSolver, model: _Steps) -> float:
    """Return the rounding of a float32 network, relative to a state's largest component."""
    net: Any = getattr(solver.correction, "net", None)
    if not getattr(net, "low", False) or model.dtype != torch.float64:
        return 0.0
    terms = net.head.weight.abs().sum(-1).max() / model.example(7)["u"].abs().amax(-1).min()
    return 10 * torch.finfo(torch.float32).eps * terms.item()


def _arguments(inputs: dict[str, Tensor]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Return the positional and keyword arguments of a model; `parameters` is a keyword."""
    kwargs = {name: x for name, x in inputs.items() if name == "parameters"}
    return tuple(x for name, x in inputs.items() if name not in kwargs), kwargs


def _export_program(model: nn.Module, example: dict[str, Tensor]) -> ExportedProgram:
    """Return the program of a model whose batch size is free."""
    batch = Dim("batch")
    free: Any = {name: {0: batch} if x.dim() else {} for name, x in example.items()}
    try:
        return torch.export.export(model, *_arguments(example), dynamic_shapes=free)
    except Exception as error:
        raise RuntimeError(
            f"the solver's step cannot be traced: {error}\nA rate to export consists of operations on "
            "tensors: torch.where instead of if, no .item(), no fixed batch size"
        ) from error


def _difference(run: Callable[..., Tensor], model: _Steps, inputs: dict[str, Tensor]) -> float:
    args, kwargs = _arguments(inputs)
    expected, actual = model(*args, **kwargs), run(*args, **kwargs).to(model.device)
    size = expected.abs().amax(-1).clamp(min=torch.finfo(expected.dtype).tiny)
    return ((actual - expected).abs().amax(-1) / size).max().item()


# Formats


def _to_pt2(program: ExportedProgram, model: _Steps, about: dict[str, str]) -> bytes:
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths of this machine
    content = io.BytesIO()
    torch.export.save(program, content, extra_files={"attractor.json": json.dumps(about)})
    return content.getvalue()


def _from_pt2(content: bytes) -> Callable[..., Tensor]:
    return torch.export.load(io.BytesIO(content)).module()


def _to_onnx(program: ExportedProgram, model: _Steps, about: dict[str, str]) -> bytes:
    check_packages()
    example = model.example(2)
    if model.dtype == torch.float64:
        program = _export_program(_Float64Numbers(program), example)
    try:
        model_file: Any = torch.onnx.export(
            program, opset_version=20, dynamo=True, input_names=[*example], output_names=["after"],
            verbose=False,
        )  # fmt: skip
    except torch.onnx.OnnxExporterError as error:
        raise RuntimeError(
            f"the solver's step has no ONNX form: {error.__cause__ or error}\nA .pt2 file supports "
            "every operation of torch"
        ) from error
    proto = without_paths(model_file.model_proto)
    proto.graph.ClearField("value_info")
    for value in (*proto.graph.input, *proto.graph.output):
        if value.type.tensor_type.shape.dim:
            value.type.tensor_type.shape.dim[0].dim_param = "batch"
    for key, value in about.items():
        proto.metadata_props.add(key=key, value=value)
    return proto.SerializeToString()


def check_packages() -> None:
    """Raise an ImportError unless the packages of the extra `onnx` are installed."""
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
    if missing:
        raise ImportError(f"an .onnx file needs {', '.join(missing)}: pip install 'attractor[onnx]'")


def without_paths(proto: Any) -> Any:
    """Remove the paths of this machine from an ONNX model, in place, and return it."""
    for part in (*proto.graph.node, *proto.graph.input, *proto.graph.output):
        part.ClearField("metadata_props")
    return proto


def from_onnx(content: bytes) -> Callable[..., Tensor]:
    """Return a function that runs an ONNX model by onnxruntime."""
    import onnxruntime

    try:
        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise RuntimeError(
            f"onnxruntime cannot run the model: {error}\nIt lacks some operations in float64, such as "
            "Erf (gelu): use solver.to(torch.float32), a .pt2 file, or check=False for another runtime"
        ) from error
    names = [x.name for x in session.get_inputs()]

    def run(*args: Tensor, **kwargs: Tensor) -> Tensor:
        inputs = {**dict(zip(names, args)), **kwargs}
        feed = {name: x.cpu().numpy() for name, x in inputs.items()}
        return torch.from_numpy(session.run(None, feed)[0])

    return run


FORMATS: dict[str, tuple[Callable[..., bytes], Callable[[bytes], Callable[..., Tensor]]]] = {
    ".onnx": (_to_onnx, from_onnx),
    ".pt2": (_to_pt2, _from_pt2),
}


class _Float64Numbers(nn.Module):
    """A program whose numbers are tensors, because the ONNX exporter rounds Python floats to float32."""

    def __init__(self, program: ExportedProgram) -> None:
        super().__init__()
        self.program: Any = program.run_decompositions().module(check_guards=False)

    def forward(self, u: Tensor, t: Tensor | None = None, parameters: Tensor | None = None) -> Tensor:
        inputs = (x for x in (u, t, parameters) if x is not None)
        return _NumbersToTensors(self.program).run(*inputs)


class _NumbersToTensors(torch.fx.Interpreter):
    """Runs a graph of aten operations with float64 tensors in place of Python floats."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = lambda x: torch.tensor(x, dtype=torch.float64)
        numbers = [x for x in args if isinstance(x, float)]
        aten: Any = torch.ops.aten
        if numbers and target in (aten.full.default, aten.full_like.default, aten.scalar_tensor.default):
            zeros = target(*(0.0 if isinstance(x, float) else x for x in args), **kwargs)
            return zeros + tensor(numbers[0]).to(zeros.dtype)
        doubles = [x for x in args if isinstance(x, Tensor) and x.dtype == torch.float64]
        if doubles and isinstance(target, torch._ops.OpOverload):
            if isinstance(kwargs.get("alpha"), float):  # u + alpha v
                args, kwargs = (args[0], args[1] * tensor(kwargs["alpha"])), {}
            if numbers and target._overloadname in ("Scalar", "default"):  # use the overload for tensors
                packet: Any = target.overloadpacket
                target = getattr(packet, "Tensor", getattr(packet, "Tensor_Tensor", target))
            slots = [str(slot.type) for slot in target._schema.arguments]
            args = tuple(
                tensor(x) if isinstance(x, float) and "Tensor" in slot else x
                for x, slot in zip(args, slots)
            )
        return super().call_function(target, args, kwargs)


@contextmanager
def without_warnings() -> Iterator[None]:
    """Suppress torch's warnings about its own deprecated calls and about missing packages."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
