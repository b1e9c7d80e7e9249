"""`evolve`: solve on a grid of times (`grid`), or under error control (`control`)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from attractor.common.checks import is_whole
from attractor.core.control import controlled
from attractor.core.dense import GridOutput
from attractor.core.events import Event
from attractor.core.grid import on_grid, output_indices
from attractor.core.problem import check_parameters, check_problem
from attractor.core.rates import Linearised, Rate
from attractor.core.rosenbrock import Rosenbrock
from attractor.core.rounds import Control
from attractor.core.scheme import Scheme
from attractor.core.step import Correction, with_parameters
from attractor.core.tableaus import AnyScheme, get_scheme
from attractor.core.trajectory import Trajectory
from attractor.core.transforms import check_checkpoint, without_vmap


def evolve(
    f: Rate,
    u0: Tensor,
    t: Tensor | Sequence[float],
    scheme: str | AnyScheme | None = None,
    correction: Correction | None = None,
    *,
    parameters: Tensor | None = None,
    every: int = 1,
    compile: bool = False,
    checkpoint: int | bool | None = None,
    rtol: float | Tensor | None = None,
    atol: float | Tensor | None = None,
    max_steps: int = 100_000,
    dense: bool = False,
    events: Event | Sequence[Event] | None = None,
    jacobian: Callable[..., Any] | None = None,
) -> Trajectory:
    """Follow ``du/dt = f(t, u)`` from u0 at ``t[0]`` through the times t.

    Without rtol and atol there is one step from each time to the next. With either of them every
    trajectory of the batch chooses its own steps, and t says only where states are wanted.

    Args:
        f: The rate. On a grid t is a tensor of no dimension. Under error control trajectories have
            their own times: ``[*batch, 1]``, or ``[*batch]`` for a rate that works on the
            components of u; which of them fits is found by a call. Trajectories must not depend on
            each other.
        u0: Initial states ``[*batch, d]``, floating or complex.
        t: Times, 1-D, strictly increasing or decreasing, of any spacing. Under error control also
            ``[n+1, *batch]``, one column of times per trajectory, all in one direction.
        scheme: A name (see `get_scheme`), a Scheme, a Rosenbrock or a Splitting. None: "dopri5" if a
            tolerance is passed, "rk4" otherwise. For stiff equations use "rodas4" or "rodas5p", which
            solve linear systems with the Jacobian of the rate.
        correction: What is added to a plain step: ``correction(step)`` of a `Step`, or
            ``correction(u, slope, dt)``; one with a true attribute `timed` is called with t as a fourth
            argument.
        parameters: Parameters ``[*batch, k]`` of the trajectories, or ``[k]`` for all of them. The rate
            is then called with them as a third argument, ``f(t, u, p)``.
        every: Number of steps between kept states. The last state is kept as well.
        compile: Compile steps. On the CPU and without gradients they become one loop of machine code,
            under error control if there are no events and no dense output: a loop in C, compiled in
            less than a second, where the rate is arithmetic on the components of a state, and one by
            `torch.compile` in about ten seconds where it is not. With gradients and on a GPU
            `torch.compile` compiles several steps at a time. Rosenbrock schemes are compiled under error
            control only, in C. See docs/foundation.md.
        checkpoint: Number of steps between the states that are kept for gradients; the steps between
            them are computed again in the backward pass. True: about the square root of the number of
            steps.
        rtol, atol: Allowed local error per step, relative and absolute (root mean square over d):
            numbers, or tensors that broadcast to u0. If only one is passed, the other is 1e-7 or 1e-9.
            Requires a scheme with an embedded pair, such as "bosh3" or "dopri5". Gradients treat the
            step sizes as constants.
        max_steps: Largest number of attempts under error control. Trajectories that have not arrived
            then are not `ok`.
        dense: Keep the interpolants of all steps, so that ``trajectory(t)`` returns states at any time.
        events: Under error control, a function ``(t, u) -> values`` or several, t ``[*batch]``, u
            ``[*batch, d]`` and the values ``[*batch]``. A trajectory ends where one of its values
            crosses zero, and keeps that state at later times; see `Trajectory.events`.
        jacobian: For Rosenbrock schemes, a function of the arguments of f that returns df/du
            ``[*batch, d, d]``, or the pair of df/du and df/dt ``[*batch, d]``. Without it both are
            computed by `torch.func`; with df/du alone, df/dt is. A trajectory whose Jacobian is not
            finite is `Status.LOST`. Gradients are those of the steps, the Jacobian included.

    Returns:
        A `Trajectory`. Where a state becomes non-finite, the trajectory keeps its last finite
        state and `ok` is False; its neighbours' values and gradients are untouched. `status` has the
        reason per trajectory.

    Raises:
        ValueError, TypeError: The input cannot be evolved.

    >>> import math, torch
    >>> from attractor.core import evolve
    >>> u0 = torch.tensor([[1.0, 0.0], [2.0, 0.0]], dtype=torch.float64)
    >>> spring = lambda t, u: torch.stack((u[..., 1], -u[..., 0]), -1)
    >>> end = evolve(spring, u0, torch.linspace(0, 2 * math.pi, 101), "rk4").final
    >>> bool(torch.allclose(end, u0, atol=1e-4))
    True
    """
    if not callable(f):
        raise TypeError(f"f is a {type(f).__name__}; pass a function (t, u) -> du/dt")
    if jacobian is not None and not callable(jacobian):
        raise TypeError(
            f"jacobian is a {type(jacobian).__name__}; pass a function (t, u) -> df/du [*batch, d, d]"
        )
    controls_error = rtol is not None or atol is not None
    scheme = get_scheme(scheme if scheme is not None else "dopri5" if controls_error else "rk4")
    if isinstance(scheme, Rosenbrock):
        if compile and not controls_error:
            raise ValueError(
                f"compile=True is not implemented for {scheme.name} with equal steps; pass rtol, leave "
                "out compile, or use an explicit scheme"
            )
        f = f if jacobian is None else Linearised(f, jacobian)
    elif jacobian is not None:
        raise ValueError(
            f"jacobian was passed, but {scheme.name} does not use it; leave it out, or use a Rosenbrock "
            "scheme such as 'rodas4'"
        )
    with without_vmap("error control"):
        t = check_problem(u0, t, per_trajectory=controls_error)
    parameters = check_parameters(u0, parameters)
    if not is_whole(every) or every < 1:
        raise ValueError(
            f"every = {every!r} must be a whole number of at least 1, such as 10 for each tenth state"
        )
    if checkpoint is not None and not (
        checkpoint in (True, False) or (is_whole(checkpoint) and checkpoint > 0)
    ):
        raise ValueError(f"checkpoint = {checkpoint!r}; use True, or the number of steps between states")
    check_checkpoint(checkpoint)
    if dense and every != 1:
        raise ValueError(f"dense=True needs all states, but every = {every}; use every=1")
    if dense and checkpoint:
        raise ValueError(
            "dense=True keeps all steps, which checkpoint is meant to avoid; use one of them"
        )
    if not controls_error:
        if events is not None:
            raise ValueError(
                "events need error control; pass rtol or atol, or use odeint with step_size"
            )
        trajectory = on_grid(
            f, u0, t, scheme, correction, parameters=parameters, every=every, compile=compile,
            checkpoint=checkpoint,
        )  # fmt: skip
        if not dense:
            return trajectory
        own = isinstance(scheme, Scheme | Rosenbrock) and scheme.dense_weights and correction is None
        rate = with_parameters(f, parameters)
        output = GridOutput(rate, t, trajectory.u, trajectory.until, scheme if own else None)  # type: ignore[arg-type]
        return replace(trajectory, dense=output)

    if correction is not None:
        raise ValueError(
            "a correction is fitted to one step size, so it cannot be combined with rtol/atol; "
            "leave out one of them"
        )
    control = Control(
        rtol=1e-7 if rtol is None else rtol,
        atol=1e-9 if atol is None else atol,
        max_steps=max_steps,
    )
    with without_vmap("error control"):
        return controlled(
            f, u0, t[output_indices(len(t) - 1, every)], scheme, control, parameters=parameters,
            compile=compile, checkpoint=checkpoint, dense=dense, events=_as_events(events),
        )  # fmt: skip


def _as_events(events: Event | Sequence[Event] | None) -> tuple[Event, ...]:
    functions = () if events is None else (events,) if callable(events) else tuple(events)
    if not all(callable(event) for event in functions):
        raise TypeError("events must be a function (t, u) -> [*batch], or a list of such functions")
    return functions
