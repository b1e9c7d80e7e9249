"""Polynomial: all monomials of the state up to a degree, times a matrix."""

import math
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from attractor.common.checks import check_input, check_whole
from attractor.core.chunks import Guard
from attractor.core.step import Step
from attractor.ode.corrections.correction import Correction
from attractor.ode.corrections.network import check_factory, check_period, check_sizes
from attractor.ode.corrections.polynomial_kernel import TYPES, Kernel, Size
from attractor.ode.trust import ALL_PRODUCTS, TrustRegion

# The last kernel of each polynomial. It is not an attribute, for modules are copied and saved.
_KERNELS: WeakKeyDictionary[nn.Module, Kernel] = WeakKeyDictionary()

REACH = 3.0  # standard deviations that are mapped to 1, so that high powers stay small
MOST_TERMS = 20_000


class Polynomial(Correction):
    """``sum_k c_k u^k`` over all monomials of total degree 1 to `degree`, and a constant.

    The state one step later is a smooth function of the state, and for few components a polynomial is
    the cheapest approximation of it, with a step size limited by its accuracy alone. With the scheme
    "identity" it replaces all calls of the rate. The number of monomials, ``binomial(inputs + degree,
    degree)``, limits this to about eight inputs, or to low degrees. A polynomial is useless outside of
    the states that it was fitted to, so keep the solver's guard. It does not vanish with the step.

    With the scheme "identity", ``compile=True``, on a CPU and without gradients, all steps of a solve
    and the tests of the guard are one loop in C.

    Args:
        dim: Size of a state.
        degree: The largest total degree.
        period: For equations that repeat in time; the phase joins u as a cosine and a sine.
        parameters: Number of parameters of the equation; those of each trajectory join u.
        odd: Whether only odd powers are used, half of all. They suffice for an equation without
            parameters whose rate changes its sign with u (and, if it has a period, half a period later).
        factory: device and dtype.
    """

    fit_defaults: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        dim: int,
        degree: int = 6,
        period: float | None = None,
        parameters: int = 0,
        odd: bool = False,
        **factory: Any,
    ) -> None:
        super().__init__()
        self.config = {
            "dim": dim, "degree": degree, "period": period, "parameters": parameters, "odd": odd
        }  # fmt: skip
        self.net = Monomials(dim, dim, degree, period, parameters, odd, **factory)

    def _seen(self, step: Step) -> Tensor:
        """Return the state."""
        return step.u

    def _identity_loop(self, u: Tensor, guard: Guard | None) -> Kernel | None:
        """Return a loop of steps of the scheme "identity" in C; None if there is none.

        Args:
            u: The states ``[*batch, d]`` from which the loop starts.
            guard: What stops it.
        """
        net, head, region = self.net, self.net.head, None if guard is None else guard.region
        if u.device.type != "cpu" or u.dtype != head.weight.dtype or u.dtype not in TYPES:
            return None
        if torch.is_grad_enabled() and (head.weight.requires_grad or head.bias.requires_grad):
            return None
        tensors = [head.weight, head.bias, net.centre, net.scale]
        if guard is not None:
            if not isinstance(region, TrustRegion) or region.mean.dtype != u.dtype:
                return None
            tensors += [region.mean, region.deviation, region.factor, region.limit]
        known = _KERNELS.get(net)
        if known is None or not known.is_of(tensors):
            known = _KERNELS[net] = Kernel(tensors, self._size(region), net.period)
        return known if known.available else None

    def _size(self, region: TrustRegion | None) -> Size:
        """Return what the C code is compiled for."""
        net, config, features, all_products = self.net, self.config, 0, False
        if region is not None:
            features, all_products = len(region.factor), len(region.mean) <= ALL_PRODUCTS
        return Size(
            net.centre.dtype, config["dim"], config["parameters"], 2 * (net.period is not None),
            net.degree, net.odd, features, all_products,
        )  # fmt: skip


class Monomials(nn.Module):
    """A linear map of all monomials of ``z = (x - centre) * scale``, with what a fit needs."""

    centre: Tensor
    scale: Tensor

    def __init__(
        self,
        inputs: int,
        outputs: int,
        degree: int,
        period: float | None = None,
        parameters: int = 0,
        odd: bool = False,
        **factory: Any,
    ) -> None:
        super().__init__()
        check_sizes(dim=inputs, degree=degree)
        check_whole("parameters", parameters, 0)
        check_period(period)
        check_factory(factory)
        if not isinstance(odd, bool):
            raise TypeError(f"odd = {odd!r} must be True or False")
        if odd and parameters:
            raise ValueError(
                f"odd=True serves rates that change their sign with the state, and the {parameters} "
                "parameters do not; use odd=False"
            )
        self.period, self.parameter_count, self.degree, self.odd = period, parameters, degree, odd
        inputs += parameters + 2 * (period is not None)
        terms = count_terms(inputs, degree, odd)
        if terms > MOST_TERMS:
            raise ValueError(
                f"{inputs} inputs have {terms:,} monomials of degree {degree} or less; at most "
                f"{MOST_TERMS:,} are supported: use a smaller degree, or a network"
            )
        self.head = nn.Linear(terms, outputs, **factory)
        if odd:
            nn.init.zeros_(self.head.bias)
        self.register_buffer("centre", torch.zeros(inputs, **factory))
        self.register_buffer("scale", torch.full((inputs,), 1 / REACH, **factory))

    def forward(self, x: Tensor) -> Tensor:
        """Return the value ``[*batch, outputs]`` at x ``[*batch, inputs]``."""
        weight, bias = self.head.weight, self.head.bias
        check_input("u", x, "[*batch, dim]", "the correction", weight)
        rows = x.reshape(-1, x.shape[-1]).T
        y = torch.addmm(bias[:, None], weight, self.monomials(rows))
        return y.T.reshape(*x.shape[:-1], y.shape[0])

    def monomials(self, x: Tensor) -> Tensor:
        """Return the monomials ``[terms, n]`` of ``z = (x - centre) * scale``, for x ``[inputs, n]``.

        They are in the order of their degree. Those of one degree that start with component i are z_i
        times the monomials of the previous degree that start with component i or later. These are
        neighbours, so that a degree is one product per component.
        """
        z = (x - self.centre[:, None]) * self.scale[:, None]
        degrees, starts = [z], list(range(len(z)))
        for _ in range(1, self.degree):
            products = [z[i : i + 1] * degrees[-1][start:] for i, start in enumerate(starts)]
            starts = [sum(map(len, products[:i])) for i in range(len(z))]
            degrees.append(torch.cat(products))
        return torch.cat(degrees[:: 2 if self.odd else 1])

    def features(self, x: Tensor) -> Tensor:
        """Return the monomials of x ``[n, inputs]``, and 1 unless they are odd: ``[n, features]``."""
        rows = self.monomials(x.T)
        return rows.T if self.odd else torch.cat((rows, torch.ones_like(rows[:1]))).T

    def set_head(self, weights: Tensor) -> None:
        """Set the coefficients ``[features, outputs]``, in the order of `features`."""
        with torch.no_grad():
            self.head.weight.copy_(weights[: self.head.in_features].T)
            self.head.bias.copy_(torch.zeros_like(weights[-1]) if self.odd else weights[-1])

    def standardise(self, mean: Tensor, deviation: Tensor) -> None:
        """Make the map that takes x what it was for ``(x - mean) / deviation``."""
        self.centre.mul_(deviation).add_(mean)
        self.scale.div_(deviation)


def count_terms(inputs: int, degree: int, odd: bool = False) -> int:
    """Return the number of monomials of degree 1 to `degree`, all or only those of odd degrees."""
    degrees = range(1, degree + 1, 2 if odd else 1)
    return sum(math.comb(inputs + n - 1, n) for n in degrees)
