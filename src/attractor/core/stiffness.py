"""Measures of stiffness, for solutions of equations and for the features of residual networks.

For rates and their solutions: the stiffness index SI, and the stiffness-aware index SAI, which is
computed from a trajectory. For residual networks: the neural stiffness index NSI of every block, and
the total neural stiffness TNS. The definitions are those of the StepNet paper (Huang et al.,
"Understanding self-attention mechanism via dynamical system perspective", ICCV 2023).

Thresholds come in pairs: a block of an input exceeds (m1, m2) if its NSI is at least m2 and at least
1 + m1 times the mean NSI of its stage. There are three differences from the paper. The first block of
a stage is excluded from means and maxima (`drop_first`). The mean is over the blocks of one input, or
over all inputs as well (`mean="stage"`), because the paper uses both. The integral over all thresholds
is exact, not a sum over a grid.
"""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from attractor.common.checks import check_beside, check_tensor, check_time, check_values, is_number
from attractor.core.rates import Rate, call_rate
from attractor.core.trajectory import Trajectory

Mean: TypeAlias = Literal["input", "stage"]


def jacobian(f: Rate, u: Tensor, t: Any = 0.0) -> Tensor:
    """Return the Jacobian ``df_i/du_j`` of each trajectory, ``[*batch, d, d]``.

    It takes one backward pass per component. Requires: trajectories do not depend on each other.
    """
    check_tensor("u", u, "[*batch, d]", floating=False)
    if u.is_complex():
        raise TypeError(
            "the Jacobian of a complex state is not defined here; stack real and imaginary parts"
        )
    check_tensor("u", u, "[*batch, d]")
    check_values("u", u)
    if u.dim() == 0 or u.shape[-1] == 0:
        raise ValueError(f"u has shape {list(u.shape)}; give states [*batch, d] with d of at least 1")
    check_time(t, u)
    with torch.inference_mode(False), torch.enable_grad():
        u = u.detach().clone().requires_grad_()
        du = call_rate(f, torch.as_tensor(t, dtype=u.dtype, device=u.device), u)
        if not du.requires_grad:  # a constant rate
            return u.new_zeros(*u.shape, u.shape[-1])
        rows = [
            torch.autograd.grad(du[..., i].sum(), u, retain_graph=True, allow_unused=True)[0]
            for i in range(u.shape[-1])
        ]
    return torch.stack([torch.zeros_like(u) if row is None else row for row in rows], -2).detach()


def stiffness_index(f: Rate, u: Tensor, t: Any = 0.0) -> Tensor:
    """Return SI, the largest ``|Re lambda|`` over the eigenvalues of the Jacobian of f at u.

    Args:
        f: The rate.
        u: States ``[*batch, d]``, real.
        t: Time, for rates that depend on it.

    Returns:
        ``[*batch]``; NaN where the Jacobian is not finite.

    >>> import torch
    >>> stiffness_index(lambda t, u: u * torch.tensor([-1.0, -50.0]), torch.ones(1, 2))
    tensor([50.])
    """
    j = jacobian(f, u, t)
    finite = torch.isfinite(j).all(-1).all(-1)
    j = torch.where(finite[..., None, None], j, 0.0)
    si = torch.linalg.eigvals(j.double()).real.abs().amax(-1).to(u.dtype)
    return torch.where(finite, si, torch.nan)


def stiffness_aware_index(trajectory: Trajectory) -> Tensor:
    """Return SAI, ``|(u' - u) / (t' - t)| / |u|`` between neighbouring states, ``[n, *batch]``.

    It is infinite where a state is exactly zero and the next one is not, and zero where both are.
    """
    if not isinstance(trajectory, Trajectory):
        raise TypeError(
            f"trajectory is a {type(trajectory).__name__}; pass a Trajectory, the result of evolve"
        )
    u, t = trajectory.u, trajectory.t
    for name, x in (("t", t), ("u", u)):
        check_tensor(
            f"trajectory.{name}", x, "[n+1]" if name == "t" else "[n+1, *batch, d]", floating=False
        )
    if not (u.is_floating_point() or u.is_complex()) or not t.is_floating_point():
        raise TypeError(f"t and u of a trajectory must be floating; they are {t.dtype} and {u.dtype}")
    if t.dim() != 1 or u.dim() < 2 or len(t) != len(u):
        raise ValueError(
            f"t and u of a trajectory must be [n+1] and [n+1, *batch, d]; they are {[*t.shape]} and "
            f"{[*u.shape]}"
        )
    check_beside("trajectory.t", t, "u", u)
    dt = t.diff().abs().to(u.real.dtype if u.is_complex() else u.dtype)
    speed = torch.linalg.vector_norm(u[1:] - u[:-1], dim=-1) / dt.reshape(-1, *[1] * (u.dim() - 2))
    return _ratio(speed, torch.linalg.vector_norm(u[:-1], dim=-1))


def neural_stiffness_index(x: Tensor, x_next: Tensor, step: Tensor | float | None = None) -> Tensor:
    """Return NSI, ``|(x_next - x) / step| / |x|``, per sample.

    Args:
        x, x_next: Features before and after a residual block ``[inputs, ...]``.
        step: The step size of the block, which broadcasts against x; None for 1. If the step size is a
            gate F, pass ``x + f(x)``, without the gate, as `x_next`, and no step: dividing by a gate
            near 0 loses all digits.

    Returns:
        ``[inputs]``.
    """
    check_tensor("x", x, "[inputs, ...]")
    check_tensor("x_next", x_next, "like x")
    check_beside("x_next", x_next, "x", x)
    if x.dtype != x_next.dtype:
        raise ValueError(f"x has dtype {x.dtype} and x_next has {x_next.dtype}; pass both in one dtype")
    if x.shape != x_next.shape:
        raise ValueError(
            f"x has shape {list(x.shape)} and x_next has {list(x_next.shape)}; a residual block keeps "
            "the shape (for the first block of a stage, pass the projected shortcut as x)"
        )
    if x.dim() < 2:
        raise ValueError(f"x has shape {list(x.shape)}; pass [inputs, ...] with at least one feature")
    move = x_next - x
    if step is not None:
        if not isinstance(step, Tensor) and not is_number(step):
            raise TypeError(f"step is a {type(step).__name__}; pass a number, or a tensor like x")
        check_beside("step", step, "x", x)
        check_values("x", x)
        step = torch.as_tensor(step, dtype=x.dtype, device=x.device)
        if step.dim() > x.dim() or any(s not in (1, n) for s, n in zip(step.shape[::-1], x.shape[::-1])):
            raise ValueError(f"step {list(step.shape)} does not broadcast to x {list(x.shape)}")
        if bool((step == 0).any()):
            raise ValueError("step contains zeros; step sizes must not be 0")
        move = move / step
    norm_dtype = torch.float32 if x.dtype.itemsize < 4 else None  # half precision overflows at 65,504
    norms = [torch.linalg.vector_norm(y.flatten(1), dim=1, dtype=norm_dtype) for y in (move, x)]
    return _ratio(*norms)


def total_neural_stiffness(
    nsi: Tensor, stage: Tensor, drop_first: bool = True, mean: Mean = "input"
) -> Tensor:
    """Return TNS, the exact integral of `stiffness_surface` over all thresholds.

    For one input, the thresholds that some block exceeds are the union of the rectangles
    ``[0, a] x [0, b]`` of its blocks, with ``b = NSI`` and ``a = NSI / mean - 1``. Within a stage the
    rectangle of the largest NSI contains the others, so there is one rectangle per stage. In descending
    order of a, with a running maximum of b, the union is a staircase.

    A stage with a single block has ``a = 0`` and contributes nothing; see `silent_stages`.

    Args:
        nsi: NSI ``[inputs, blocks]``.
        stage: The stage of every block ``[blocks]``, any labels.
        drop_first: Exclude the first block of every stage.
        mean: "input" for the mean over the blocks of a stage for each input; "stage" for the mean over
            all inputs as well.

    Returns:
        The mean over inputs, a tensor of no dimension.
    """
    a, b = _rectangles(nsi, stage, drop_first, mean)
    a, order = a.clamp(min=0).sort(dim=1, descending=True)
    height = b.gather(1, order).cummax(dim=1).values
    width = a - torch.cat((a[:, 1:], torch.zeros_like(a[:, :1])), dim=1)
    return (width * height).sum(dim=1).mean()


def silent_stages(stage: Tensor, drop_first: bool = True, mean: Mean = "input") -> list[int]:
    """Return the labels of the stages that contribute nothing to TNS, whatever their NSI.

    With ``mean="input"`` the NSI of a single block equals the mean of its stage. With ``mean="stage"``
    a single block can exceed the mean on some inputs.

    >>> import torch
    >>> silent_stages(torch.tensor([0, 0, 1, 1, 1])), silent_stages(torch.tensor([0, 0, 1]), False)
    ([0], [1])
    """
    check_tensor("stage", stage, "[blocks]", floating=False)
    check_values("stage", stage)
    if mean not in ("input", "stage"):
        raise ValueError(f"mean = {mean!r}; pass 'input' or 'stage'")
    least = (2 if mean == "input" else 1) + int(drop_first)
    return [s for s in stage.unique().tolist() if int((stage == s).sum()) < least]


def stiffness_surface(
    nsi: Tensor,
    stage: Tensor,
    m1: Tensor | float,
    m2: Tensor | float,
    drop_first: bool = True,
    mean: Mean = "input",
) -> Tensor:
    """Return the share of inputs for which some block exceeds the thresholds (m1, m2).

    For numbers the result has no dimension; for 1-D tensors it is ``[len(m1), len(m2)]``.
    """
    a, b = _rectangles(nsi, stage, drop_first, mean)
    return _over_grid(m1, m2, a, b, lambda exceeds: exceeds.any(dim=1))


def stiffness_proportion(
    nsi: Tensor,
    stage: Tensor,
    m1: Tensor | float,
    m2: Tensor | float,
    drop_first: bool = True,
    mean: Mean = "input",
) -> Tensor:
    """Return the share of blocks, over all inputs, that exceed the thresholds (m1, m2).

    For numbers the result has no dimension; for 1-D tensors it is ``[len(m1), len(m2)]``.
    """
    stages = _blocks_by_stage(nsi, stage, drop_first)
    a = torch.cat([_relative(nsi[:, blocks], mean) for blocks in stages], dim=1)
    b = torch.cat([nsi[:, blocks] for blocks in stages], dim=1)
    return _over_grid(m1, m2, a, b, lambda exceeds: exceeds)


def _rectangles(nsi: Tensor, stage: Tensor, drop_first: bool, mean: Mean) -> tuple[Tensor, Tensor]:
    """Return the corners (a, b), each ``[inputs, stages]``, of the rectangles of exceeded thresholds."""
    stages = _blocks_by_stage(nsi, stage, drop_first)
    a = torch.stack([_relative(nsi[:, blocks], mean).amax(dim=1) for blocks in stages], dim=1)
    b = torch.stack([nsi[:, blocks].amax(dim=1) for blocks in stages], dim=1)
    return a, b


def _blocks_by_stage(nsi: Tensor, stage: Tensor, drop_first: bool) -> list[Tensor]:
    """Return the indices of the blocks of every stage, without the first ones if `drop_first`."""
    check_tensor("nsi", nsi, "[inputs, blocks]")
    check_values("nsi", nsi)
    check_beside("stage", stage, "nsi", nsi)
    if not isinstance(drop_first, bool):
        raise TypeError(f"drop_first = {drop_first!r}; pass True or False")
    if nsi.dim() != 2 or nsi.shape[0] == 0:
        raise ValueError(
            f"nsi has shape {list(nsi.shape)}; pass [inputs, blocks] with at least one input"
        )
    try:
        stage = torch.as_tensor(stage, device=nsi.device)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"stage is {stage!r}; pass the stage of every block [blocks]") from None
    if stage.shape != nsi.shape[1:]:
        raise ValueError(
            f"stage has shape {list(stage.shape)}; pass one label for each of the {nsi.shape[1]} blocks"
        )
    if not bool((torch.isfinite(nsi) & (nsi >= 0)).all()):
        raise ValueError("nsi contains negative or non-finite values; was a feature exactly zero?")
    blocks = [(stage == s).nonzero()[:, 0][int(drop_first) :] for s in stage.unique()]
    blocks = [b for b in blocks if len(b)]
    if not blocks:
        raise ValueError(
            "every stage has only one block, which drop_first excludes; pass drop_first=False"
        )
    return blocks


def _relative(nsi: Tensor, mean: Mean) -> Tensor:
    """Return NSI / mean - 1 within a stage; 0 where all NSI are 0."""
    if mean not in ("input", "stage"):
        raise ValueError(f"mean = {mean!r}; pass 'input' or 'stage'")
    mu = nsi.mean(dim=1, keepdim=True) if mean == "input" else nsi.mean()
    return torch.where(mu > 0, nsi / mu, 1.0) - 1


def _over_grid(
    m1: Tensor | float, m2: Tensor | float, a: Tensor, b: Tensor, gather: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the mean of ``gather(a >= m1 and b >= m2)`` for each pair of thresholds.

    Args:
        a, b: Tensors ``[inputs, ...]``.
    """
    for name, value in (("m1", m1), ("m2", m2)):
        if not isinstance(value, Tensor) and not is_number(value):
            raise TypeError(f"{name} = {value!r}; pass a number, or a 1-D tensor of thresholds")
        check_beside(name, value, "nsi", a)
    first = torch.as_tensor(m1, dtype=a.dtype, device=a.device)
    second = torch.as_tensor(m2, dtype=a.dtype, device=a.device)
    if not first.numel():
        return a.new_zeros((*first.shape, *second.shape))
    rounding = 8 * torch.finfo(a.dtype).eps  # equal NSI are equal to their mean
    tall = b[..., None] >= second.reshape(-1)
    rows = [
        gather((a >= x - rounding)[..., None] & tall).to(a.dtype).flatten(0, -2).mean(0)
        for x in first.reshape(-1)
    ]
    return torch.stack(rows).reshape((*first.shape, *second.shape))


def _ratio(top: Tensor, bottom: Tensor) -> Tensor:
    return torch.where((top == 0) & (bottom == 0), 0.0, top / bottom)
