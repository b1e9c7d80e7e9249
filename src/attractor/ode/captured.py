"""Steps of a hybrid solver as one CUDA graph: for small batches a step then costs a few microseconds.

>>> import torch
>>> from attractor.ode import HybridSolver, corrections, systems
>>> pendulum = systems.ElasticPendulum()
>>> solver = HybridSolver(pendulum, "rk4", corrections.NeurVec(4, width=16), dt=0.1)
>>> u = pendulum.sample(10)
>>> step = solver.capture(u, steps=5)
>>> end = step.advance(2)  # ten steps; on a CPU they run as they are
>>> bool(step.t == 1.0)
True
"""

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from attractor.common.checks import as_int, check_tensor
from attractor.core.compiling import compiled, components_first, count_operations
from attractor.core.grid import COMPILED_OPERATIONS
from attractor.core.rates import Rate
from attractor.core.step import correction_of_step, with_parameters
from attractor.core.tableaus import AnyScheme
from attractor.ode import fused
from attractor.train.capture import WARMUP, Captured


class CapturedStep:
    """The state of a batch and the time, moved by the same graph again and again.

    Nothing looks at the states on the way: one that is not finite stays so, and its neighbours do not
    notice. A rate that waits for the GPU (``.item()``, a branch on values), or draws random numbers on
    the CPU, cannot be captured; it then runs as it is, with a warning. Parameters may change in place
    between calls; moving them (``.to``, ``.double``) pulls them from under the graph. No gradients.

    Args:
        solver: The `HybridSolver` whose steps they are. Its trust region is not used.
        u: States ``[*batch, d]`` to start from. Later ones must have their shape.
        t: The time of u.
        steps: Number of steps of dt in one graph. They share the cost of a launch, a few microseconds.
        compile: Compile steps to few kernels. There is one for all steps where a step is a
            formula per number around a small network (see `fused.steps`), otherwise two per step, by
            `torch.compile`, which takes up to a minute the first time. None: on a GPU.
        precision: Of a fused network's products, see `fused.network`; None: as the correction chooses.
        parameters: Parameters ``[*batch, k]`` of the trajectories, or ``[k]`` for all of them, where the
            equation is ``rate(t, u, p)``. Steps with parameters have no single kernel for all steps.

    Attributes:
        parameters: The parameters ``[*batch, k]``, or None. Change them with `reset`.
        u, t: The current state and time. `advance` overwrites them.
        captured: Whether there is a graph.
        whole: Whether one kernel takes all steps.
    """

    def __init__(
        self,
        solver: Any,
        u: Tensor,
        *,
        t: float = 0.0,
        steps: int = 1,
        compile: bool | None = None,
        precision: str | None = None,
        parameters: Tensor | None = None,
    ) -> None:
        check_tensor("u", u, "[*batch, d]")
        steps = as_int(steps)
        if not isinstance(steps, int) or steps < 1:
            raise ValueError(f"steps = {steps!r} goes nowhere; use 1 or more steps of dt a graph")
        gpu = _on_gpu(u)
        self.solver, self.steps, self.compile = solver, steps, gpu if compile is None else compile
        correction: Any = correction_of_step(solver.correction)
        if precision is not None:
            correction = fused.fuse(correction, precision)
        self._fixed = (solver.rate, solver.scheme, correction, solver.dt)
        start = components_first(u.detach()).clone(), _time(t, u)
        self.parameters = solver._parameters(u, parameters)
        if self.parameters is not None:
            # A copy, whose address the graph keeps.
            self.parameters = components_first(self.parameters.detach()).clone()
        rate = with_parameters(solver.rate, self.parameters)
        solver.scheme.check_rate(rate, start[1].to(u.dtype), start[0])
        net = getattr(correction, "net", None)
        self._whole: Any = None
        alone = precision is None and self.parameters is None
        if self.compile and alone and hasattr(net, "in_torch") and fused.usable(net, u):
            self._whole = kernel_of_steps(*self._fixed, *start)
        torchs = self.compile and self._whole is None
        self._length = self._compiled_length(*start) if torchs else steps
        self._captured: Captured | None = None
        self.u, self.t = start
        if gpu:
            with torch.cuda.device(u.device):
                self._captured = Captured(self._run)
                for _ in range(WARMUP + 1):
                    self._captured(*(x.clone() for x in start))
            self.u, self.t = self._captured.inputs
            self.reset(u, t)

    @property
    def captured(self) -> bool:
        """Whether there is a graph."""
        return self._captured is not None and self._captured.graph is not None

    @property
    def whole(self) -> bool:
        """Whether one kernel takes all steps."""
        return self._whole is not None

    def reset(self, u: Tensor, t: float = 0.0, parameters: Tensor | None = None) -> None:
        """Set the batch to states u, of the shape it was made for, and the time to t.

        States and parameters of another dtype, or on another device, are converted.

        Args:
            parameters: New parameters ``[*batch, k]`` or ``[k]``; None keeps those there are.

        Raises:
            ValueError: The shapes are not those that this object was made for.
        """
        if u.shape != self.u.shape:
            raise ValueError(
                f"states {list(u.shape)} do not fit a graph of {list(self.u.shape)}; make another "
                "CapturedStep for them"
            )
        if parameters is not None:
            if self.parameters is None:
                raise ValueError("parameters= needs a capture with parameters; pass them to capture")
            own = self.solver._parameters(self.u, parameters)
            if own.shape != self.parameters.shape:
                raise ValueError(
                    f"parameters {list(own.shape)} do not fit a graph of {list(self.parameters.shape)}; "
                    "make another CapturedStep for them"
                )
            self.parameters.copy_(own.detach())
        self.u.copy_(u.detach())
        self.t.fill_(t)

    def advance(self, times: int = 1) -> Tensor:
        """`times` times `steps` steps; the state then, which the next call overwrites."""
        for _ in range(times):
            if self._captured is None:
                self._run(self.u, self.t)
            else:
                self._captured(self.u, self.t)  # inputs that are the graph's own are not copied
        return self.u

    def __call__(self, u: Tensor, t: float = 0.0, parameters: Tensor | None = None) -> Tensor:
        """Return the states `steps` steps after u at time t, in a tensor of their own.

        Args:
            parameters: See `reset`.
        """
        self.reset(u, t, parameters)
        return self.advance().clone()

    @torch.no_grad()
    def _run(self, u: Tensor, t: Tensor) -> Tensor:
        if self._whole is not None:
            self._whole(u, t, self.steps)
            return u
        part: Any = _steps
        if self.compile:
            part = compiled(_steps, u.device, *self._fixed, self._length)
        new, dt = u, self.solver.dt
        for first in range(0, self.steps, self._length):
            now = t + first * dt if first else t
            new = part(*self._fixed, self._length, new, now, self.parameters)
        u.copy_(new)
        t.add_(self.steps * dt)
        return u

    @torch.no_grad()
    def _compiled_length(self, u: Tensor, t: Tensor) -> int:
        """Steps that are compiled together: a part of all, not too long for compilers."""
        size = count_operations(lambda: _steps(*self._fixed, 1, u, t, self.parameters))
        most = COMPILED_OPERATIONS // size + 1
        return max(n for n in range(1, self.steps + 1) if n <= most and self.steps % n == 0)


def capture_step(solver: Any, u: Tensor, **options: Any) -> CapturedStep:
    """Return a `CapturedStep` with these options."""
    return CapturedStep(solver, u, **options)


def _steps(
    f: Rate,
    scheme: AnyScheme,
    correction: Any,
    dt: float,
    steps: int,
    u: Tensor,
    t: Tensor,
    parameters: Tensor | None = None,
) -> Tensor:
    """`HybridSolver.step`, several times; t in float64."""
    for i in range(steps):
        now = (t + i * dt if i else t).to(u.dtype)
        step = scheme.step(f, now, u, dt, parameters)
        plain = u + dt * step.slope
        u = plain if correction is None else plain + correction(step)
    return u


@torch.no_grad()
def kernel_of_steps(
    rate: Rate,
    scheme: AnyScheme,
    correction: Any,
    dt: float,
    u: Tensor,
    t: Tensor,
    tolerance: tuple[float, float] = (1e-3, 1e-5),
    most: float = math.inf,
) -> Any:
    """Return one kernel for steps of u (see `fused.steps`), if there is one and it agrees with torch.

    Args:
        correction: One with a network that `fused.usable` accepts, or None for plain steps.
        tolerance: Allowed difference from torch's step, relative to the change of u and to u.
        most: Largest number of lines of the formulas for which a kernel is compiled.

    Returns:
        A `WholeSteps`; None if the rate is more than a formula, or a formula that is too long.
    """
    from attractor.ode.fused.formulas import CannotWriteError
    from attractor.ode.fused.steps import WholeSteps

    try:
        whole = WholeSteps(rate, scheme, correction, dt, u)
        if whole.lines > most:
            return None
        ours = components_first(u).clone()
        whole(ours, t.clone(), 1)
    except CannotWriteError:
        return None
    except Exception as error:  # of compilers, which must not stop what runs without
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(f"no kernel for whole steps, going on without ({reason})", stacklevel=4)
        return None
    theirs = _steps(rate, scheme, correction, dt, 1, u, t)
    off, moved = (x[torch.isfinite(x)] for x in (ours - theirs, theirs - u))
    sizes = [x.abs().max() for x in (moved, u[torch.isfinite(u)])] if len(moved) else []
    allowed = sum(part * size for part, size in zip(tolerance, sizes))
    if len(off) < len(moved) or bool((off.abs() > allowed).any()):
        warnings.warn("a kernel for whole steps does not do what the rate does: left out", stacklevel=4)
        return None
    return whole


def _time(t: float, u: Tensor) -> Tensor:
    return torch.tensor(t, dtype=torch.float64, device=u.device)


def _on_gpu(u: Tensor) -> bool:
    return u.is_cuda
