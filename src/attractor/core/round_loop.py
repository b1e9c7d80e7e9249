"""Many rounds under error control as one loop of compiled code."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch._higher_order_ops.while_loop import while_loop

from attractor.core.compiling import compiled, vectorised
from attractor.core.rates import Rate
from attractor.core.rounds import Progress, Rules, as_time, attempt


def loop(
    f: Rate,
    rules: Rules,
    goal: Tensor,
    pause: Tensor,
    limit: Tensor,
    now: Progress,
    parameters: Tensor | None = None,
) -> tuple[Tensor, Progress]:
    """Take rounds until every trajectory has reached its goal or was given up.

    Compiled, this is one loop around one round: it is compiled once for all tolerances and numbers of
    rounds, and no Python runs between rounds. It has no gradients.

    Args:
        f: The rate, which takes `parameters` if there are any.
        goal: Last times, ``[]`` or ``[*batch, 1]``.
        pause: The loop ends before a round in which an active trajectory would step to this time or
            beyond it, ``[*batch, 1]``; infinite for trajectories that may step up to their goal.
        limit: Largest number of rounds ``[]``.
        now: The trajectories, laid out by `to_loop`.

    Returns:
        The number of rounds ``[]``, and the trajectories after them.
    """

    def more(rounds: Tensor, *values: Tensor) -> Tensor:
        now = _from_loop(values)
        waits = now.active & ((now.t + now.h - pause) * rules.sign >= 0)[..., 0]
        return now.active.any() & ~waits.any() & (rounds < limit)

    def one_round(rounds: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        now = _from_loop(values)
        step = rules.propose(now, goal)
        t, h = as_time(now.t, now.u), as_time(step.size, now.u)
        with vectorised(now.u.dtype):
            u1, k1, stages = attempt(f, rules.scheme, t, h, now.u, now.k, None, parameters)
        verdict = rules.judge(now, step, u1, k1, stages)
        done = (verdict.passed & step.arrives)[..., 0]
        return rounds + 1, *to_loop(rules.advance(now, step, verdict, u1, k1, step.t1, done))

    start = torch.zeros((), dtype=torch.long, device=goal.device)
    rounds, *values = while_loop(more, one_round, (start, *now))
    return rounds, _from_loop(values)


def compiled_rounds(
    f: Rate,
    rules: Rules,
    goal: Tensor,
    pause: Tensor,
    limit: int,
    now: Progress,
    parameters: Tensor | None = None,
) -> tuple[int, Progress]:
    """Call the compiled `loop`, whose arguments these are.

    Returns:
        The number of rounds, and the trajectories after them.

    Raises:
        NotCompiledError: torch cannot compile the loop.
    """
    # Numbers that differ between calls are tensors, or each of them would be compiled for itself.
    number = lambda x: torch.as_tensor(x, dtype=now.t.dtype)
    control = replace(rules.control, rtol=1.0, atol=1.0, first=None, max_steps=1)
    fast = compiled(loop, now.u.device, f, rules.scheme, control, rules.exact, or_plain=False)
    rules = rules._replace(
        control=control, rtol=number(rules.rtol), atol=number(rules.atol), sign=number(rules.sign)
    )
    own = None if parameters is None else parameters.detach()
    rounds, later = fast(f, rules, goal, pause, torch.tensor(limit), to_loop(now), own)
    return int(rounds), later


def to_loop(now: Progress) -> Progress:
    """Return the trajectories as `loop` carries them: contiguous, with times and errors ``[*batch]``."""
    fresh = lambda x: x.clone(memory_format=torch.contiguous_format)  # with the strides of its shape
    now = now._replace(t=now.t[..., 0], h=now.h[..., 0], error=now.error[..., 0])
    return Progress(*map(fresh, now))


def _from_loop(values: Sequence[Tensor]) -> Progress:
    now = Progress(*values)
    return now._replace(t=now.t[..., None], h=now.h[..., None], error=now.error[..., None])
