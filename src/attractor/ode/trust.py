"""The region of states in which a fitted correction can be trusted, and the steps outside of it."""

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

import torch
from torch import Tensor, nn

from attractor.common.checks import check_input, check_number, check_tensor, check_values, check_whole
from attractor.core import get_scheme
from attractor.core.chunks import Guard
from attractor.core.clocks import OneTimeError
from attractor.core.control import controlled
from attractor.core.native import native_loop
from attractor.core.rates import Rate
from attractor.core.rounds import Control
from attractor.core.step import with_parameters
from attractor.core.tableaus import AnyScheme
from attractor.core.transforms import is_differentiated

PLAIN_SUBSTEPS = 2  # of the solver's own scheme, where the accuracy of a fit is not known
SCHEME = "dop853"  # of the substeps in place of a step, otherwise
LOCAL = 0.05  # share of the allowed error that one of them may have
MOST_ATTEMPTS = 4096  # substeps with error control
MOST_SUBSTEPS = 64  # equal ones in place of a step,
MOST_OF_LARGE_STEPS = 1024  # or of one of the scheme "identity", whose steps no stability limits
FLOW_ACCURACY = 1e-9  # of such a step, relative to a state, if the accuracy of the fit is not known
ALL_PRODUCTS = 16  # components of which all products are features
FEW = 16  # states for which compiled code adds up products by itself
ROUNDING = 1e-13  # relative to a state: substeps are not asked to agree better


class TrustRegion(nn.Module):
    """The states that a fit has seen, as the leverage of a least squares fit with quadratic features.

    ``distance(u)`` is ``z' (Z'Z)^-1 z`` over its largest value among the training states, with z the
    standardised state, its products and 1: up to 1 inside, growing with the fourth power outside. It
    is the predictive variance of a ridge fit on z; that of the correction itself would cost the square
    of its width in every step.

    Args:
        dim: Size of a state.
        parameters: Number of parameters of the equation. They follow the state: u is
            ``[*batch, dim + parameters]`` then.

    Attributes:
        accuracy: ``[dim]``, root mean square error of one corrected step inside the region; -1 if it is
            not known.
    """

    mean: Tensor
    deviation: Tensor
    factor: Tensor
    limit: Tensor
    accuracy: Tensor
    may_lack = ("accuracy",)  # regions that were saved by the first versions have none

    def __init__(self, dim: int, parameters: int = 0, **factory: Any) -> None:
        super().__init__()
        check_whole("dim", dim, 1)
        check_whole("parameters", parameters, 0)
        self.dim = dim
        size = self._features(torch.zeros(dim + parameters)).numel()
        self.register_buffer("mean", torch.zeros(dim + parameters, **factory))
        self.register_buffer("deviation", torch.ones(dim + parameters, **factory))
        # On the meta device torch.eye would import torch's compiler, which takes a second.
        self.register_buffer("factor", torch.zeros(size, size, **factory).fill_diagonal_(1.0))
        self.register_buffer("limit", torch.ones((), **factory))
        self.register_buffer("accuracy", torch.full((dim,), -1.0, **factory))

    def extra_repr(self) -> str:
        """Return the sizes, for ``repr``."""
        return f"dim={self.mean.numel()}, {self.factor.shape[0]} features"

    @classmethod
    def around(cls, u: Tensor, margin: float = 1.0, dim: int | None = None) -> Self:
        """Return the region of states u ``[n, dim]``.

        Args:
            dim: Size of a state, if parameters follow it in u; None: u holds states only.
            margin: Factor by which `distance` may exceed its largest value among u. Since the distance
                grows with the fourth power, a margin of 1.5 widens the region by a tenth.
        """
        check_tensor("u", u, "[n, dim]")
        check_values("u", u)
        check_number("margin", margin, 0.0)
        if u.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"u is of {u.dtype}; a region needs float32 or float64")
        if u.dim() != 2 or len(u) < 2 or not bool(torch.isfinite(u).all()):
            raise ValueError(f"u has shape {list(u.shape)}; give at least two finite states [n, dim]")
        dim = u.shape[-1] if dim is None else dim
        region = cls(dim, u.shape[-1] - dim, dtype=u.dtype, device=u.device)
        region.mean = u.mean(0)
        spread = u.std(0)
        region.deviation = torch.where(spread > 0, spread, 1.0)
        z = region._features((u - region.mean) / region.deviation)
        triangle = torch.linalg.qr(z, mode="r")[1]
        # Directions the data never takes: leave them a small but not vanishing size.
        size = triangle.diagonal().abs().max()
        size = size if size > 0 else triangle.abs().max()  # two states that are one
        ridge = 1e-6 * size * torch.eye(z.shape[-1]).to(z)
        triangle = torch.linalg.qr(torch.cat((triangle, ridge)), mode="r")[1]
        with suppress(RuntimeError):  # torch.linalg.LinAlgError
            region.factor = torch.linalg.inv(triangle)
            region.limit = margin * (z @ region.factor).square().sum(-1).max()
            if bool(torch.isfinite(region.factor).all() & torch.isfinite(region.limit)):
                return region
        raise ValueError(
            f"states of {u.dtype} from {u.min():.2g} to {u.max():.2g} have no region; scale them, "
            "or use float64"
        )

    def distance(self, u: Tensor) -> Tensor:
        """Return the leverage ``[*batch]`` of states u ``[*batch, dim]`` over the region's limit."""
        check_input("u", u, f"[*batch, {len(self.mean)}]", "the trust region", self.mean)
        if u.dim() == 0 or u.shape[-1] != len(self.mean):
            raise ValueError(
                f"u has shape {list(u.shape)}; this region is of states [*batch, {len(self.mean)}]"
            )
        if torch.compiler.is_compiling():
            return self._compiled_distance(u)
        z = self._features((u - self.mean) / self.deviation)
        return (z @ self.factor).square().sum(-1) / self.limit

    def _compiled_distance(self, u: Tensor) -> Tensor:
        """`distance`, for compiled steps: component by component, as they hold states."""
        # Compilers compute a standardised state once for each product, and divisions take long.
        x = u.movedim(-1, 0).flatten(1)
        x = (x - self.mean[:, None]) * self.deviation.reciprocal()[:, None]
        z, factor = self._features(x.float(), 0), self.factor.T.float()
        few = z.shape[1] <= FEW  # a call of BLAS takes longer than the sums
        rows = (factor[:, :, None] * z).sum(1) if few else factor @ z
        return rows.square().sum(0).reshape(u.shape[:-1]) / self.limit

    def inside(self, u: Tensor) -> Tensor:
        """Return ``[*batch]``, True for states u ``[*batch, dim]`` in the region; NaN is outside."""
        return self.distance(u) <= 1

    def is_valid(self) -> bool:
        """Return whether distances are defined: deviations and the limit are above 0."""
        return bool((self.deviation > 0).all() & (self.limit > 0))

    def guard(self, scheme: AnyScheme, replace: bool = True, compile: bool = False) -> Guard:
        """Return the guard of a solver with this scheme, for one solve.

        Args:
            replace: Whether steps outside of the region are replaced by plain substeps, or only
                recorded.
            compile: Whether substeps with error control are one compiled loop, on a CPU and without
                gradients.
        """
        size = (self.mean.abs() + self.deviation)[: self.dim]
        return plain_guard(self, self.inside, size, self.accuracy, scheme, replace, compile)

    @staticmethod
    def _features(x: Tensor, dim: int = -1) -> Tensor:
        d = x.shape[dim]
        part = lambda start, stop: x.narrow(dim, start, stop - start)
        products = [part(i, i + 1) * part(i, d) for i in range(d)] if d <= ALL_PRODUCTS else [x**2]
        return torch.cat((*products, x, torch.ones_like(part(0, 1))), dim)


def plain_guard(
    region: Any,
    inside: Callable[[Tensor], Tensor],
    size: Tensor,
    accuracy: Tensor,
    scheme: AnyScheme,
    replace: bool,
    compile: bool,
) -> Guard:
    """Return a guard that replaces steps by plain substeps; see `TrustRegion.guard`.

    Args:
        region: What `inside` is a method of.
        inside: Maps states to True where the correction may be applied.
        size: Size of each component ``[d]`` of a state.
        accuracy: Error of a corrected step ``[d]``, which substeps must not exceed; negative: not known.
    """

    def substeps(
        rate: Rate, t: Tensor, dt: Any, u: Tensor, parameters: Tensor | None
    ) -> tuple[Tensor, int]:
        unknown, bound = bool((accuracy < 0).any()), with_parameters(rate, parameters)
        if unknown and scheme.order:
            state = _substeps(bound, scheme, t, dt, u, PLAIN_SUBSTEPS)
            return state, PLAIN_SUBSTEPS * scheme.rate_calls
        least = max(ROUNDING, 8 * torch.finfo(u.dtype).eps)
        rounding = least * torch.maximum(size, u.detach().abs())
        tolerance = torch.maximum(FLOW_ACCURACY * size if unknown else accuracy, rounding)
        loops = compile and u.device.type == "cpu" and not is_differentiated(u)
        if scheme.order:  # few substeps
            return settled_substeps(rate, t, dt, u, tolerance, parameters, loops)
        return controlled_step(rate, t, dt, u, tolerance, parameters, loops)

    return Guard(inside, substeps if replace else None, region)


def controlled_step(
    rate: Rate,
    t: Tensor,
    dt: Any,
    u: Tensor,
    tolerance: Tensor,
    parameters: Tensor | None = None,
    compile: bool = False,
) -> tuple[Tensor, int]:
    """Return the states ``[*batch, d]`` one dt after u, and the number of calls of the rate.

    The error of each component is within the tolerance. Each trajectory has error-controlled steps of
    its own, which do not depend on the others; a rate that takes one time for all states has equal
    substeps instead. A trajectory that does not arrive becomes NaN.

    Args:
        tolerance: Allowed errors ``[d]`` or ``[*batch, d]``.
        compile: Compile the steps. Numbers of trajectories are filled up to a power of 16, so that torch
            compiles few of them where it has to.
    """
    count, start = u[..., 0].numel(), torch.as_tensor(t, device=u.device).detach().double()
    # Of one trajectory alone a rate of one time could not be told.
    filled = 16 ** math.ceil(math.log(count, 16) or 1) if compile else max(2, count)

    def rows(x: Tensor) -> Tensor:
        x = x.reshape(-1, x.shape[-1])
        return x if len(x) == filled else torch.cat((x, x[:1].expand(filled - count, -1)))

    control = Control(
        rtol=0.0, atol=LOCAL * (tolerance if tolerance.dim() == 1 else rows(tolerance)),
        first=abs(float(dt)), max_steps=MOST_ATTEMPTS, norm=largest_component,
    )  # fmt: skip
    try:
        solved = controlled(
            rate, rows(u), torch.stack((start, start + dt)), get_scheme(SCHEME), control,
            parameters=None if parameters is None else rows(parameters), compile=compile,
        )  # fmt: skip
    except OneTimeError:
        return settled_substeps(rate, t, dt, u, tolerance, parameters, compile, MOST_OF_LARGE_STEPS)
    state = torch.where(solved.ok[..., None], solved.final, torch.nan)
    return state[:count].reshape(u.shape), solved.stats.rate_calls


def largest_component(error: Tensor) -> Tensor:
    """Return the largest error ``[*batch, 1]`` of a component of ``[*batch, d]``."""
    return error.abs().amax(-1, keepdim=True)


def settled_substeps(
    rate: Rate,
    t: Tensor,
    dt: Any,
    u: Tensor,
    tolerance: Tensor,
    parameters: Tensor | None = None,
    compile: bool = False,
    most: int = MOST_SUBSTEPS,
) -> tuple[Tensor, int]:
    """Return the states one dt after u by equal substeps; otherwise as `controlled_step`.

    Each trajectory doubles its substeps until the estimated error of every component is within the
    tolerance, or there are `most`. Its substeps do not depend on the other trajectories.
    """
    scheme, calls, bound = get_scheme(SCHEME), 1, with_parameters(rate, parameters)

    def substeps(count: int) -> Tensor:
        times = t + torch.arange(count, dtype=u.dtype) * (dt / count) if compile else t
        sizes = torch.full((count,), float(dt) / count, dtype=u.dtype)
        loop = None
        if compile:
            loop = native_loop(rate, scheme, None, None, times, sizes, start, parameters)
        if loop is None:
            return _substeps(bound, scheme, t, dt, start, count)
        anywhere = torch.ones(start.shape[:-1], dtype=torch.bool)
        return loop(times, sizes, torch.tensor(count), start, anywhere, parameters).u

    with torch.no_grad():
        start, count = u.detach(), 1
        before = state = substeps(count)
        settled = ~torch.isfinite(start).all(-1)
        needed = torch.where(settled, count, most)
        while count < most and not bool(settled.all()):
            count *= 2
            calls += count
            after = substeps(count)
            # Half as many substeps have 2^order times the error.
            error = (after - before).abs() / (2**scheme.order - 1)
            state = torch.where(settled[..., None], state, after)
            passed = ~settled & (error <= tolerance).all(-1)
            needed, settled, before = torch.where(passed, count, needed), settled | passed, after
    if torch.is_grad_enabled() and not (compile and not (u + dt * bound(t, u)).requires_grad):
        # Once more with gradients. A neighbour's state in place of the trajectories that need more
        # substeps: with fewer theirs may overflow.
        state = u
        for n in needed.unique().tolist():
            mine = (needed == n)[..., None]
            own = torch.where(mine, u, u.detach()[needed == n][0])
            state = torch.where(mine, _substeps(bound, scheme, t, dt, own, n), state)
            calls += n
    return state, calls * scheme.rate_calls


def _substeps(rate: Rate, scheme: AnyScheme, t: Tensor, dt: Any, u: Tensor, count: int) -> Tensor:
    part = dt / count
    for i in range(count):
        u = u + part * scheme.slope(rate, t + i * part, u, part)
    return u
