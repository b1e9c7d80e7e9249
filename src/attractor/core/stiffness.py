"""How fast a trajectory turns, whatever it is a trajectory of.

For rates and their solutions: the stiffness index SI and its data-driven stand-in SAI. For the
features of residual networks: the neural stiffness index NSI of every block, and the total neural
stiffness TNS. Definitions from the StepNet paper (Huang et al., "Understanding self-attention
mechanism via dynamical system perspective", ICCV 2023).

Thresholds come in pairs: a block of an input exceeds (m1, m2) if its NSI is at least m2 and at
least 1 + m1 times the mean NSI of its stage. Three things follow the notes to that paper rather
than its text: a stage's first block is left out of means and maxima (`drop_first`); the mean is
taken over the blocks of one input, or over all inputs too (`mean="stage"`), as the paper is not of
one mind; and the integral over all thresholds is exact instead of a sum over a grid.
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
    """``df_i/du_j`` of each trajectory, ``[*batch, d, d]``.

    One backward pass a component, which any rate allows whose trajectories are independent.
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
    """SI: the largest ``|Re lambda|`` over the eigenvalues of the Jacobian of f at u.

    Args:
        f: the rate.
        u: states ``[*batch, d]``, real.
        t: time, for rates that depend on it.

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
    """SAI: ``|(u' - u) / (t' - t)| / |u|`` between neighbouring states, ``[n, *batch]``.

    Infinite where a state is exactly zero and moves on, zero where it stays.
    """
    if not isinstance(trajectory, Trajectory):
        raise TypeError(
            f"trajectory is a {type(trajectory).__name__}; give a Trajectory, as evolve does"
        )
    u, t = trajectory.u, trajectory.t
    for name, x in (("t", t), ("u", u)):
        check_tensor(
            f"trajectory.{name}", x, "[n+1]" if name == "t" else "[n+1, *batch, d]", floating=False
        )
    if not (u.is_floating_point() or u.is_complex()) or not t.is_floating_point():
        raise TypeError(f"a trajectory's t and u are floats, not {t.dtype} and {u.dtype}")
    if t.dim() != 1 or u.dim() < 2 or len(t) != len(u):
        raise ValueError(
            f"a trajectory has t [n+1] and u [n+1, *batch, d], not {[*t.shape]} and {[*u.shape]}"
        )
    check_beside("trajectory.t", t, "u", u)
    dt = t.diff().abs().to(u.real.dtype if u.is_complex() else u.dtype)
    moved = torch.linalg.vector_norm(u[1:] - u[:-1], dim=-1) / dt.reshape(-1, *[1] * (u.dim() - 2))
    return _ratio(moved, torch.linalg.vector_norm(u[:-1], dim=-1))


def neural_stiffness_index(x: Tensor, x_next: Tensor, step: Tensor | float | None = None) -> Tensor:
    """NSI: ``|(x_next - x) / step| / |x|``, a sample at a time.

    Args:
        x, x_next: features before and after a residual block ``[inputs, ...]``.
        step: the block's step size, broadcasting against x; None is 1. With a gate F for a step,
            pass the block's ungated output as ``x_next - x`` and no step instead: dividing by a
            gate that is nearly closed loses all digits.

    Returns:
        ``[inputs]``.
    """
    check_tensor("x", x, "[inputs, ...]")
    check_tensor("x_next", x_next, "like x")
    check_beside("x_next", x_next, "x", x)
    if x.dtype != x_next.dtype:
        raise ValueError(f"x is of {x.dtype} but x_next of {x_next.dtype}; give both in one type")
    if x.shape != x_next.shape:
        raise ValueError(
            f"x has shape {list(x.shape)} but x_next {list(x_next.shape)}; a residual block keeps the "
            "shape (for a stage's first block, pass the projected shortcut as x)"
        )
    if x.dim() < 2:
        raise ValueError(f"x has shape {list(x.shape)}; give [inputs, ...] with at least one feature")
    move = x_next - x
    if step is not None:
        if not isinstance(step, Tensor) and not is_number(step):
            raise TypeError(f"step is a {type(step).__name__}; give a number, or a tensor like x")
        check_beside("step", step, "x", x)
        check_values("x", x)
        step = torch.as_tensor(step, dtype=x.dtype, device=x.device)
        if step.dim() > x.dim() or any(s not in (1, n) for s, n in zip(step.shape[::-1], x.shape[::-1])):
            raise ValueError(f"step {list(step.shape)} does not broadcast to x {list(x.shape)}")
        if bool((step == 0).any()):
            raise ValueError("step holds zeros; a step size must not vanish")
        move = move / step
    wide = torch.float32 if x.dtype.itemsize < 4 else None  # half precision overflows at 65,504
    norms = [torch.linalg.vector_norm(y.flatten(1), dim=1, dtype=wide) for y in (move, x)]
    return _ratio(*norms)


def total_neural_stiffness(
    nsi: Tensor, stage: Tensor, drop_first: bool = True, mean: Mean = "input"
) -> Tensor:
    """TNS: the integral of `stiffness_surface` over all thresholds, exactly.

    For one input the thresholds that some block exceeds are the union of the rectangles
    ``[0, a] x [0, b]`` of its blocks, with ``b = NSI`` and ``a = NSI / mean - 1``. Within a stage
    the largest NSI covers the others, so there is one rectangle a stage; sorted by a from the
    widest, a running maximum of b makes the union a staircase.

    A stage with one block left has no a to speak of and adds nothing, see `silent_stages`.

    Args:
        nsi: ``[inputs, blocks]``.
        stage: the stage of every block ``[blocks]``, any labels.
        drop_first: leave out every stage's first block.
        mean: "input": mean over an input's blocks of a stage; "stage": over all inputs as well.

    Returns:
        The mean over inputs, a tensor of no dimension.
    """
    a, b = _rectangles(nsi, stage, drop_first, mean)
    a, order = a.clamp(min=0).sort(dim=1, descending=True)
    height = b.gather(1, order).cummax(dim=1).values
    width = a - torch.cat((a[:, 1:], torch.zeros_like(a[:, :1])), dim=1)
    return (width * height).sum(dim=1).mean()


def silent_stages(stage: Tensor, drop_first: bool = True, mean: Mean = "input") -> list[int]:
    """The labels of the stages that TNS says nothing of, whatever their NSI.

    One block alone is as stiff as the mean of its stage, over an "input"; over the "stage" it can still
    be stiffer on one input than on another.

    >>> import torch
    >>> silent_stages(torch.tensor([0, 0, 1, 1, 1])), silent_stages(torch.tensor([0, 0, 1]), False)
    ([0], [1])
    """
    check_tensor("stage", stage, "[blocks]", floating=False)
    check_values("stage", stage)
    if mean not in ("input", "stage"):
        raise ValueError(f"mean = {mean!r}; it is 'input' or 'stage'")
    needed = (2 if mean == "input" else 1) + int(drop_first)
    return [s for s in stage.unique().tolist() if int((stage == s).sum()) < needed]


def stiffness_surface(
    nsi: Tensor,
    stage: Tensor,
    m1: Tensor | float,
    m2: Tensor | float,
    drop_first: bool = True,
    mean: Mean = "input",
) -> Tensor:
    """The part of the inputs that have some block exceeding the thresholds (m1, m2).

    Numbers give a tensor of no dimension, 1-D tensors the whole grid ``[len(m1), len(m2)]``.
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
    """The part of all blocks of all inputs that exceed the thresholds (m1, m2).

    Numbers give a tensor of no dimension, 1-D tensors the whole grid ``[len(m1), len(m2)]``.
    """
    kept = _kept_blocks(nsi, stage, drop_first)
    a = torch.cat([_relative(nsi[:, blocks], mean) for blocks in kept], dim=1)
    b = torch.cat([nsi[:, blocks] for blocks in kept], dim=1)
    return _over_grid(m1, m2, a, b, lambda exceeds: exceeds)


def _rectangles(nsi: Tensor, stage: Tensor, drop_first: bool, mean: Mean) -> tuple[Tensor, Tensor]:
    """Corners (a, b), each [inputs, stages], of the rectangles of exceeded thresholds."""
    kept = _kept_blocks(nsi, stage, drop_first)
    a = torch.stack([_relative(nsi[:, blocks], mean).amax(dim=1) for blocks in kept], dim=1)
    b = torch.stack([nsi[:, blocks].amax(dim=1) for blocks in kept], dim=1)
    return a, b


def _kept_blocks(nsi: Tensor, stage: Tensor, drop_first: bool) -> list[Tensor]:
    """For every stage, the indices of the blocks that count."""
    check_tensor("nsi", nsi, "[inputs, blocks]")
    check_values("nsi", nsi)
    check_beside("stage", stage, "nsi", nsi)
    if not isinstance(drop_first, bool):
        raise TypeError(f"drop_first = {drop_first!r}; it is True or False")
    if nsi.dim() != 2 or nsi.shape[0] == 0:
        raise ValueError(f"nsi has shape {list(nsi.shape)}; give [inputs, blocks] with some inputs")
    try:
        stage = torch.as_tensor(stage, device=nsi.device)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"stage is {stage!r}; give the stage of every block [blocks]") from None
    if stage.shape != nsi.shape[1:]:
        raise ValueError(f"stage has shape {list(stage.shape)}; it labels {nsi.shape[1]} blocks")
    if not bool((torch.isfinite(nsi) & (nsi >= 0)).all()):
        raise ValueError("nsi holds negative or non-finite values; was a feature exactly zero?")
    blocks = [(stage == s).nonzero()[:, 0][int(drop_first) :] for s in stage.unique()]
    kept = [b for b in blocks if len(b)]
    if not kept:
        raise ValueError(
            "every stage has one block only, and drop_first leaves none; set drop_first=False"
        )
    return kept


def _relative(nsi: Tensor, mean: Mean) -> Tensor:
    """NSI / mean - 1 within a stage; 0 where all are 0."""
    if mean not in ("input", "stage"):
        raise ValueError(f"mean = {mean!r}; it is 'input' or 'stage'")
    mu = nsi.mean(dim=1, keepdim=True) if mean == "input" else nsi.mean()
    return torch.where(mu > 0, nsi / mu, 1.0) - 1


def _over_grid(
    m1: Tensor | float, m2: Tensor | float, a: Tensor, b: Tensor, gather: Callable[[Tensor], Tensor]
) -> Tensor:
    """For each pair of thresholds the mean of gather([a >= m1 and b >= m2]), a and b [inputs, ...]."""
    for name, given in (("m1", m1), ("m2", m2)):
        if not isinstance(given, Tensor) and not is_number(given):
            raise TypeError(f"{name} = {given!r}; give a number, or a 1-D tensor of thresholds")
        check_beside(name, given, "nsi", a)
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
