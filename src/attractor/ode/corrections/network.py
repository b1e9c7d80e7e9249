"""The network Q inside the corrections (AttNS, Eq. 8), and its activations."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from attractor.common.checks import (
    check_dtype,
    check_home,
    check_input,
    check_number,
    check_tensor,
    check_whole,
    is_number,
)
from attractor.common.versions import exporting
from attractor.ode import fused
from attractor.ode.corrections.sequence import BODIES

FEW = 16  # states for which compiled code adds up products by itself


class Rational(nn.Module):
    """A learned ratio of a cubic and a quadratic, one set of coefficients a layer.

    Boullé et al. 2020 start it near a leaky ReLU. Both sums start at power 0 (the AttNS paper prints
    1). The denominator ``1 + |b1 x + b2 x^2|`` equals theirs at the start and cannot reach 0.
    """

    def __init__(self, **factory: Any) -> None:
        super().__init__()
        self.top = nn.Parameter(torch.tensor([0.0218, 0.5, 1.5957, 1.1915], **factory))
        self.bottom = nn.Parameter(torch.tensor([0.0, 2.383], **factory))

    def forward(self, x: Tensor) -> Tensor:
        """Element by element."""
        a, b = self.top, self.bottom
        return (a[0] + x * (a[1] + x * (a[2] + x * a[3]))) / (1 + (x * (b[0] + x * b[1])).abs())


class Sine(nn.Module):
    """sin x: with random weights these are random Fourier features (Rahimi and Recht 2007)."""

    def forward(self, x: Tensor) -> Tensor:
        """Element by element."""
        return torch.sin(x)


class Cubic(nn.Module):
    """``x^2 (1 + x)``: with random weights these are random polynomials of degree three.

    The error of a small step is close to a polynomial of the stages. For such errors the features are as
    good as sines, or better, and take a fraction of the time. The odd power serves equations with
    ``f(-u) = -f(u)``, whose error has no even part.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Element by element."""
        return x * x * (1 + x)


ACTIVATIONS: dict[str, Callable[..., nn.Module]] = {
    "rational": Rational,
    "sine": lambda **_: Sine(),
    "cubic": lambda **_: Cubic(),
    "tanh": lambda **_: nn.Tanh(),
    "relu": lambda **_: nn.ReLU(),
    "gelu": lambda **_: nn.GELU(),
    "silu": lambda **_: nn.SiLU(),
}


class Layers(nn.Module):
    """The hidden layers of a perceptron: ``a(... W_2 a(W_1 x))`` with biases.

    Args:
        inputs, width: sizes of x and of every hidden layer.
        layers: how many.
        activation: a name of `ACTIVATIONS`.
        residual: layers after the first add to what they get.
    """

    def __init__(
        self, inputs: int, width: int, layers: int, activation: str, residual: bool, **factory: Any
    ) -> None:
        super().__init__()
        sizes = [inputs] + [width] * layers
        self.layers = nn.ModuleList(nn.Linear(a, b, **factory) for a, b in pairwise(sizes))
        self.activations = nn.ModuleList(ACTIVATIONS[activation](**factory) for _ in self.layers)
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        """The last hidden layer ``[*batch, width]``."""
        if _by_component(x):
            return self.by_component(x.T).T
        for i, (layer, activation) in enumerate(zip(self.layers, self.activations)):
            y = activation(layer(x))
            x = x + y if self.residual and i else y
        return x

    def by_component(self, x: Tensor) -> Tensor:
        """The same for x ``[inputs, n]``: ``[width, n]``."""
        layers: list[Any] = list(self.layers)
        for i, (layer, activation) in enumerate(zip(layers, self.activations)):
            y = activation(_product(layer.weight, layer.bias, x))
            x = x + y if self.residual and i else y
        return x

    def spread(self, scale: float, generator: torch.Generator) -> None:
        """Random weights for standardised inputs: normal, the first layer of that scale."""
        layers: list[Any] = list(self.layers)
        for i, layer in enumerate(layers):
            size = scale if i == 0 else scale / layer.in_features**0.5
            for p in (layer.weight, layer.bias):
                p.copy_(size * torch.randn(p.shape, generator=generator, dtype=torch.float64))

    def standardise(self, mean: Tensor, deviation: Tensor) -> None:
        """Take x from here on for what was ``(x - mean) / deviation``."""
        first: Any = self.layers[0]
        first.weight.div_(deviation)
        first.bias.sub_(first.weight @ mean)


class Network(nn.Module):
    """Q: hidden layers, a linear head, and optionally a linear way around.

    Args:
        inputs, outputs: sizes of x and of the result.
        width: of the hidden layers.
        depth: number of layers with the head, at least 2.
        activation: "rational", "sine", "cubic", "tanh", "relu", "gelu" or "silu", for the perceptron.
        skip: add a linear map of x (it makes linear corrections exact; Table 2's "w/ skip").
        residual: hidden layers after the first add to what they get.
        body: "mlp", or the modules of Table 2 that read x component by component: "lstm",
            "transformer".
        period: for equations that repeat in time: the phase of t joins x as a cosine and a sine.
        precision: "float32" computes the hidden layers and the head of a float64 network in float32,
            which is faster: what is added to a step is small, so its relative error may be larger than
            the state's. The linear map of x, the largest part, remains in float64. Loops in C compute
            all of it in float64.
        parameters: for equations with parameters: how many of each trajectory join x.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        width: int,
        depth: int,
        activation: str = "rational",
        skip: bool = False,
        residual: bool = False,
        body: str = "mlp",
        period: float | None = None,
        precision: str | None = None,
        parameters: int = 0,
        **factory: Any,
    ) -> None:
        super().__init__()
        check_sizes(dim=outputs, width=width, depth=depth)
        check_period(period)
        check_factory(factory)
        if min(inputs, outputs, width) < 1 or depth < 2:
            raise ValueError(
                f"sizes {inputs} -> {width} -> {outputs} with depth {depth} make no network; sizes "
                "start at 1, depth at 2"
            )
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation {activation!r} is not one of {', '.join(ACTIVATIONS)}")
        if body != "mlp" and body not in BODIES:
            raise ValueError(f"body {body!r} is not one of mlp, {', '.join(BODIES)}")
        if precision not in (None, "float32"):
            raise ValueError(f"precision {precision!r} is neither None, the weights' own, nor 'float32'")
        self.config = {
            "width": width, "depth": depth, "activation": activation, "skip": skip,
            "residual": residual, "body": body, "period": period, "precision": precision,
            "parameters": parameters,
        }  # fmt: skip
        check_whole("parameters", parameters, 0)
        self.period, self.low, self.parameter_count = period, precision is not None, parameters
        inputs += parameters + 2 * (period is not None)
        self.body: Any
        if body == "mlp":
            self.body = Layers(inputs, width, depth - 1, activation, residual, **factory)
        else:
            self.body = BODIES[body](inputs, width, depth - 1, **factory)
        self.head = nn.Linear(width, outputs, **factory)
        self.around = nn.Linear(inputs, outputs, bias=False, **factory) if skip else None

    def forward(self, x: Tensor) -> Tensor:
        """Q of an x that has its phase (see `with_phase`); on a GPU by a kernel where that pays."""
        check_input("u", x, "[*batch, dim]", "the correction", getattr(self.head, "weight", None))
        return fused.kernel(self, x) if fused.pays(self, x) else self.in_torch(x)

    def in_torch(self, x: Tensor) -> Tensor:
        """Q of x, in plain torch."""
        if self.low and x.dtype == torch.float64:
            weights = {name: p.float() for name, p in self.head.named_parameters()}
            out = _linear(self.head, self._low_hidden(x), weights).double()
        else:
            out = _linear(self.head, self.body(x))
        return out if self.around is None else out + _linear(self.around, x)

    def features(self, x: Tensor) -> Tensor:
        """What the result is linear in: hidden layer, x itself if there is a way around, and 1."""
        lower = self.low and x.dtype == torch.float64
        parts = [self._low_hidden(x).double() if lower else self.body(x)]
        if self.around is not None:
            parts.append(x)
        return torch.cat([*parts, torch.ones_like(x[..., :1])], -1)

    def _low_hidden(self, x: Tensor) -> Tensor:
        """The hidden layer in float32."""
        weights = {name: p.float() for name, p in self.body.named_parameters()}
        low = x.T.float().T if _by_component(x) else x.float()
        return torch.func.functional_call(self.body, weights, (low,))

    def set_head(self, weights: Tensor) -> None:
        """Put in weights ``[features, outputs]``, in the order of `features`."""
        width = self.head.in_features
        with torch.no_grad():
            self.head.weight.copy_(weights[:width].T)
            self.head.bias.copy_(weights[-1])
            if self.around is not None:
                self.around.weight.copy_(weights[width:-1].T)

    def spread(self, scale: float, generator: torch.Generator) -> None:
        """Random hidden weights for standardised inputs, the first layer of that scale."""
        with torch.no_grad():
            self.body.spread(scale, generator)

    def standardise(self, mean: Tensor, deviation: Tensor) -> None:
        """Make the network that takes x what it was for ``(x - mean) / deviation``."""
        with torch.no_grad():
            self.body.standardise(mean, deviation)
            if self.around is not None:
                self.around.weight.div_(deviation)
                self.head.bias.sub_(self.around.weight @ mean)


class Affine(nn.Module):
    """``M x + b``, with what a `Network` offers to a fit; nothing in it is random."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        period: float | None = None,
        parameters: int = 0,
        **factory: Any,
    ) -> None:
        super().__init__()
        check_sizes(dim=inputs)
        check_whole("parameters", parameters, 0)
        check_period(period)
        check_factory(factory)
        self.period, self.parameter_count = period, parameters
        self.head = nn.Linear(inputs + parameters + 2 * (period is not None), outputs, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """M x + b."""
        check_input("u", x, "[*batch, dim]", "the correction", getattr(self.head, "weight", None))
        return _linear(self.head, x)

    def features(self, x: Tensor) -> Tensor:
        """x and 1."""
        return torch.cat((x, torch.ones_like(x[..., :1])), -1)

    def set_head(self, weights: Tensor) -> None:
        """Put in weights ``[inputs + 1, outputs]``."""
        with torch.no_grad():
            self.head.weight.copy_(weights[:-1].T)
            self.head.bias.copy_(weights[-1])

    def standardise(self, mean: Tensor, deviation: Tensor) -> None:
        """Make the map that takes x what it was for ``(x - mean) / deviation``."""
        with torch.no_grad():
            self.head.weight.div_(deviation)
            self.head.bias.sub_(self.head.weight @ mean)


def _by_component(x: Tensor) -> bool:
    """Whether x ``[n, inputs]`` is in compiled code on the CPU, which holds states by component.

    There products are taken of x transposed: BLAS and the layers' activations then read what is
    contiguous, where a compiler would transpose every layer.
    """
    compiled = torch.compiler.is_compiling() and not exporting()
    return compiled and x.device.type == "cpu" and x.dim() == 2


def joined(*parts: Tensor) -> Tensor:
    """The parts ``[*batch, n]`` beside each other; by component where `_by_component` holds."""
    if _by_component(parts[0]):
        return torch.cat([x.T for x in parts]).T
    return torch.cat(parts, -1)


def _linear(layer: Any, x: Tensor, weights: dict[str, Tensor] | None = None) -> Tensor:
    """``W x + b`` for x ``[*batch, inputs]``, with other weights than the layer's if they are given."""
    if _by_component(x):
        own = dict(layer.named_parameters()) if weights is None else weights
        return _product(own["weight"], own.get("bias"), x.T).T
    return layer(x) if weights is None else torch.func.functional_call(layer, weights, (x,))


def _product(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """``W x + b`` for x ``[inputs, n]``."""
    if x.shape[1] <= FEW:  # a call of BLAS takes longer than the sums
        y = (weight[:, :, None] * x).sum(1)
        return y if bias is None else y + bias[:, None]
    return weight @ x if bias is None else torch.addmm(bias[:, None], weight, x)


def with_phase(x: Tensor, t: Any, period: float | None) -> Tensor:
    """x ``[*batch, d]``, joined by the cosine and sine of the phase of t (a number or ``[*batch]``)."""
    if period is None:
        return x
    if t is None:
        raise ValueError(
            f"a correction with period = {period:g} needs the time: step.t, or a fourth argument"
        )
    if not isinstance(t, Tensor) and not is_number(t):
        raise TypeError(f"t is a {type(t).__name__}; give a number, or a tensor of times")
    angle = 2 * math.pi / period * torch.as_tensor(t, device=x.device)
    sizes = zip(reversed(angle.shape), reversed(x.shape[:-1]))
    if angle.dim() >= x.dim() or any(size not in (1, own) for size, own in sizes):
        raise ValueError(
            f"t has shape {list(angle.shape)}; give a number, or times {list(x.shape[:-1])}"
        )
    phase = torch.stack((torch.cos(angle), torch.sin(angle)), -1).to(x.dtype)
    return joined(x, phase.expand(*x.shape[:-1], 2))


def check_step(net: Any, u: Any, slope: Any) -> None:
    """Raise unless u and slope are what a correction with this network takes: ``[*batch, dim]``."""
    head = getattr(net.net if isinstance(net, fused.Fused) else net, "head", None)
    if head is None:  # around a network, or in its place while a step is written down as a formula
        return
    weight, dim = getattr(head, "weight", None), getattr(head, "out_features", None)
    for name, x in (("u", u), ("slope", slope)):
        check_tensor(name, x, f"[*batch, {dim}]")
        check_home(name, x, "the correction", weight)
        if x.dim() == 0 or (dim is not None and x.shape[-1] != dim):
            raise ValueError(f"{name} has shape {list(x.shape)}; this correction takes [*batch, {dim}]")


def check_sizes(**sizes: Any) -> None:
    """Raise unless all of them are whole numbers of at least 1."""
    for name, size in sizes.items():
        check_whole(name, size, 1)


def check_factory(options: dict[str, Any]) -> None:
    """Raise unless options are device and dtype, which are torch's, and nothing else."""
    unknown = sorted(set(options) - {"device", "dtype"})
    if unknown:
        raise TypeError(f"a correction has no option {', '.join(unknown)}; see Network for those it has")
    check_dtype(options.get("dtype"))


def check_period(period: Any) -> None:
    """Raise unless it is None or a positive number."""
    if period is not None:
        check_number("period", period)
        if not period > 0:
            raise ValueError(f"period = {period} must be more than 0")
