"""The network of a correction in one Triton kernel: its hidden layer never leaves the chip.

Networks use it by themselves where it `pays`. Never required: without Triton, on another device or for
another kind of network torch runs, bit for bit as ever. `perceptron` has the kernels, `gradients` their
gradients, `steps` takes whole steps with them; all need Triton to be imported, so ask `usable` first.
With ``TRITON_INTERPRET=1`` in the environment before the first import they run on a CPU, slowly, for
tests.

>>> import torch
>>> from attractor.ode import corrections
>>> correction = corrections.AttNS(dim=4, width=32)
>>> u, slope = torch.rand(10, 4), torch.rand(10, 4)
>>> torch.allclose(fuse(correction)(u, slope, 0.1), correction(u, slope, 0.1), atol=1e-6)
True
"""

import copy
import os
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from attractor.common.versions import exporting

TRITON = find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

EVERYWHERE = False  # whether networks also choose the interpreter by themselves; for tests
PRECISIONS = ("ieee", "tf32x3", "tf32")
LARGEST = 128  # inputs or outputs: a row of both is held whole
QUICK = 64  # inputs or outputs, up to which registers hold them
FEW = 16  # inputs and outputs together, up to which multiply-adds are as quick as products of matrices
MANY = 2_000  # states from which compilers multiply larger matrices as quickly


def at_hand(x: Tensor) -> bool:
    """Whether kernels run where x is."""
    gpu = x.device.type == "cuda" and torch.version.hip is None
    return TRITON and (gpu or (INTERPRETED and x.device.type == "cpu"))


def usable(net: Any, x: Tensor) -> bool:
    """Whether a kernel computes this `Network` for an x like that.

    It must be a perceptron of one hidden layer, in float32, or in float64 if the network says that it
    may be computed in float32; on a GPU, without autocast, not inside a transform of `torch.func`.
    """
    if not at_hand(x) or len(getattr(net.body, "activations", ())) != 1:
        return False
    first, head = net.body.layers[0], net.head
    return (
        x.numel() > 0
        and x.dtype == first.weight.dtype == head.weight.dtype
        and (x.dtype == torch.float32 or (x.dtype == torch.float64 and net.low))
        and max(first.in_features, head.out_features) <= LARGEST
        and not torch.is_autocast_enabled(x.device.type)
        and not torch._C._are_functorch_transforms_active()
    )


def pays(net: Any, x: Tensor) -> bool:
    """Whether a `Network` should be computed by a kernel for this x, by itself.

    Wherever one is `usable`, except in exported programs, for more than `QUICK` inputs or outputs, and
    in compiled code for `MANY` states of more than `FEW` of both. Where gradients are wanted, only for
    up to `FEW` of both, and if x has none: those of weights have a kernel, too.
    """
    if not (x.is_cuda or EVERYWHERE) or not usable(net, x):
        return False
    if exporting() or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return False
    inputs, outputs = net.body.layers[0].in_features, net.head.out_features
    if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in net.parameters())):
        return inputs + outputs <= FEW and not x.requires_grad
    if inputs + outputs <= FEW:
        return True
    few = not torch.compiler.is_compiling() or x.numel() // x.shape[-1] <= MANY
    return few and max(inputs, outputs) <= QUICK


def network(net: Any, x: Tensor, precision: str | None = None) -> Tensor:
    """Q of x ``[*batch, inputs]``: what ``net(x)`` is, by a kernel wherever it can be.

    Args:
        net: a `Network`.
        precision: of the two products, where inputs and outputs are more than `FEW` together (up to
            that many, float32 is the quickest). "ieee": float32. "tf32x3": on the matrix units, every
            factor as two numbers of 11 bits, as exact, and quicker; the same as None. "tf32": the same
            for the first product, which standardised inputs make a small difference of large numbers,
            but one number of 11 bits for every factor of the second: errors of 1e-3 of its terms. Look
            at `deviation` where head weights are large and cancel, as those of a ridge fit do.
    """
    check_precision(precision)
    return kernel(net, x, precision) if usable(net, x) else net.in_torch(x)


def kernel(net: Any, x: Tensor, precision: str | None = None) -> Tensor:
    """`network` where it is known to be `usable`."""
    from attractor.ode.fused import gradients

    layer, activation, head = net.body.layers[0], net.body.activations[0], net.head
    learned = (activation.top, activation.bottom) if hasattr(activation, "top") else (None, None)
    way = None if net.around is None else net.around.weight
    apart = way is not None and x.dtype == torch.float64  # the linear map of x is not for float32
    out = gradients.differentiable(
        x.reshape(-1, x.shape[-1]), layer.weight, layer.bias, head.weight, head.bias,
        None if apart else way, *learned, net.config["activation"], precision or "tf32x3",
    )  # fmt: skip
    out = out.view(*x.shape[:-1], head.out_features)
    return out + net.around(x) if apart else out


def deviation(net: Any, x: Tensor, precision: str | None = None) -> float:
    """How far `network` is from float64 for these x, relative to the root mean square of Q."""
    with torch.no_grad():
        exact = copy.deepcopy(net).double()
        exact.low = False
        truth = exact.in_torch(x.double())
        off = network(net, x, precision).double() - truth
    return (off.square().mean() / truth.square().mean()).sqrt().item()


def fuse(correction: nn.Module, precision: str | None = None) -> nn.Module:
    """A correction with the same parameters (not copies) and the same call, always through `network`.

    Corrections use kernels by themselves where it `pays`; this one also elsewhere, and in a precision of
    your choice. One without a `Network` comes back as it is.
    """
    check_precision(precision)
    net: Any = getattr(correction, "net", None)
    if not hasattr(net, "body") or isinstance(net, Fused):
        return correction
    fused = copy.copy(correction)
    fused._modules = {**correction._modules, "net": Fused(net, precision)}
    return fused


class Fused(nn.Module):
    """A `Network` that is computed by `network`; it shares its parameters."""

    def __init__(self, net: nn.Module, precision: str | None = None) -> None:
        super().__init__()
        self.net, self.precision = net, precision
        self.period = net.period

    def forward(self, x: Tensor) -> Tensor:
        """Q of an x that has its phase."""
        return network(self.net, x, self.precision)


def check_precision(precision: str | None) -> None:
    """Raise ValueError if it is not one."""
    if precision not in (None, *PRECISIONS):
        raise ValueError(
            f"precision {precision!r} is not one of {', '.join(PRECISIONS)}; 'ieee' is float32"
        )
