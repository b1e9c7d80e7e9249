"""Chunks of steps along a grid of times: guarded, compiled, and repeated where a trajectory is lost."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from attractor.common.checks import all_finite
from attractor.core.chunks import Guard, LoopResult, guarded_step, take_steps
from attractor.core.compiling import compiled, components_first
from attractor.core.rates import Rate
from attractor.core.step import Correction
from attractor.core.tableaus import AnyScheme
from attractor.core.trajectory import Status
from attractor.core.transforms import is_differentiated

LOOP = 256  # largest number of steps of a compiled loop
Loop: TypeAlias = Callable[..., LoopResult]  # called as `step_loop`: (t, dt, count, u, anywhere, p)


class Survivors(NamedTuple):
    """The trajectories that are not lost, and the last valid time of each; ``[*batch]`` each."""

    alive: Tensor
    until: Tensor


@dataclass(frozen=True)
class March:
    """Steps along a grid of times, in chunks. Survivors are None as long as no trajectory was lost.

    Attributes:
        t: Times as the caller passed them.
        times: Times in the precision of the states, for the rate.
        dt: Step sizes: numbers, or a tensor where steps are compiled or differentiated.
        saved: Indices of the states to save.
        compiled_length: Number of steps of the chunks that are compiled; 0 for none.
        loop: A loop of steps in machine code.
        watch: Whether to check for lost trajectories.
        outside: Trajectories ``[*batch]`` outside of the guarded region, by step; chunks fill it.
    """

    f: Rate
    scheme: AnyScheme
    correction: Correction | None
    parameters: Tensor | None  # [*batch, k]
    t: Tensor
    times: Tensor
    dt: Any
    saved: frozenset[int]
    compiled_length: int
    loop: Loop | None
    watch: bool
    guard: Guard | None
    outside: dict[int, Tensor]

    def segment(
        self, chunks: list[tuple[int, int]], u: Tensor, survivors: Survivors | None
    ) -> tuple[list[Tensor], Tensor, Survivors | None, list[int]]:
        """Take several chunks; return the saved states, the last one, the survivors, and the lengths."""
        states, lengths = list[Tensor](), list[int]()
        for first, stop in chunks:
            new, survivors, own = self._advance(first, stop, u, survivors)
            u, lengths = new[-1], lengths + own
            states += new if stop in self.saved else new[:-1]
        return states, u, survivors, lengths

    def _advance(
        self, first: int, stop: int, u: Tensor, survivors: Survivors | None
    ) -> tuple[list[Tensor], Survivors | None, list[int]]:
        """Take a chunk; return its saved states and the last one, the survivors, and the lengths."""
        keep = tuple(i - first for i in range(first + 1, stop + 1) if i in self.saved or i == stop)
        states, took = self._attempt(first, keep, u, survivors)
        states = _of_survivors(survivors, states, [u] * len(keep))
        if not self.watch or all_finite(states[-1]):
            return states, survivors, took

        # A trajectory was lost: single steps find which one, and its last finite state.
        before, survivors, single = self._step_by_step(first, keep, u, survivors)
        if not bool(survivors.alive.any()):
            return before, survivors, [*took, *single]
        # The survivors repeat the same chunk, so that their states are the same to the last bit.
        states, again = self._attempt(first, keep, u, survivors)
        return _of_survivors(survivors, states, before), survivors, [*took, *single, *again]

    def _step_by_step(
        self, first: int, keep: tuple[int, ...], u: Tensor, survivors: Survivors | None
    ) -> tuple[list[Tensor], Survivors, list[int]]:
        """Take the same chunk one step at a time; a lost trajectory keeps its last finite state."""
        states, took = list[Tensor](), list[int]()
        alive, until = survivors or everybody(u, self.t)
        for i in range(first, first + keep[-1]):
            while bool(alive.any()):
                (new,), lengths = self._attempt(i, (1,), u, Survivors(alive, until))
                took += lengths
                lost = alive & ~torch.isfinite(new).all(-1)
                if not bool(lost.any()):
                    u = torch.where(alive[..., None], new, u)
                    break
                alive, until = alive & ~lost, torch.where(lost, self.t[i].detach(), until)
            if i + 1 - first in keep:
                states.append(u)
        return states, Survivors(alive, until), took

    def _attempt(
        self, first: int, keep: tuple[int, ...], u: Tensor, survivors: Survivors | None
    ) -> tuple[list[Tensor], list[int]]:
        """Take a chunk, with guarded steps outside of the region; return its states and the lengths."""
        states, inside = self._run(first, keep, u, survivors)
        took = [keep[-1]]
        if self.guard is None or inside is None:
            return states, took
        alive = torch.ones_like(inside) if survivors is None else survivors.alive
        left, stayed = ~inside & alive, inside & alive
        if not bool(left.any()):
            return states, took
        if self.guard.replace is None:
            self.outside.setdefault(first, left)
            return states, took
        if is_differentiated(states[-1]):
            # Corrected steps outside may overflow, and must not enter shared gradients.
            if bool(stayed.any()):
                states, _ = self._run(first, keep, u, Survivors(stayed, self.t[-1]))
                took.append(keep[-1])
            else:
                states = [state.detach() for state in states]
        own = None if self.parameters is None else self.parameters[left]
        few = replace(self, parameters=own, outside={})
        guarded = few._guarded_run(first, keep, u[left])
        for step, outside in few.outside.items():
            self.outside.setdefault(step, torch.zeros_like(left).masked_scatter(left, outside))
        return [state.masked_scatter(left[..., None], x) for state, x in zip(states, guarded)], took

    def _run(
        self, first: int, keep: tuple[int, ...], u: Tensor, survivors: Survivors | None
    ) -> tuple[list[Tensor], Tensor | None]:
        """Take keep[-1] steps from u. The states of lost trajectories are replaced.

        Returns:
            The states after the steps in `keep`, and with a guard the trajectories ``[*batch]`` that
            started every one of these steps inside.
        """
        stop = first + keep[-1]
        inside = None if self.guard is None else self.guard.inside
        fixed = (self.f, self.scheme, self.correction, inside)
        u, p = _stand_in(u, survivors), _stand_in(self.parameters, survivors)
        if self.loop is not None:
            return self._loop_chunk(self.loop, first, keep[-1], u, survivors, p)
        steps = take_steps
        if keep[-1] == self.compiled_length:
            u, p = components_first(u), None if p is None else components_first(p)
            steps = compiled(take_steps, u.device, *fixed, keep)
        alive = survivors.alive if survivors is not None and torch.is_grad_enabled() else None
        return steps(*fixed, keep, self.times[first:stop], self.dt[first:stop], u, alive, p)

    def _loop_chunk(
        self,
        loop: Loop,
        first: int,
        count: int,
        u: Tensor,
        survivors: Survivors | None,
        p: Tensor | None,
    ) -> tuple[list[Tensor], Tensor | None]:
        """Take the same steps by a compiled loop.

        Trajectories that leave take their steps once more, by themselves, with those of the guard.
        """
        u, p = components_first(u), None if p is None else components_first(p)
        state, stayed = self._until_outside(loop, first, count, u, p, replace=False)
        if self.guard is None or self.guard.replace is None:
            return [state], None if self.guard is None else stayed
        left = ~stayed if survivors is None else ~stayed & survivors.alive
        if not bool(left.any()):
            return [state], None
        few = replace(self, parameters=None if p is None else p[left], outside={})
        own, _ = few._until_outside(loop, first, count, u[left], few.parameters, replace=True)
        for step, outside in few.outside.items():  # runs are repeated where a trajectory is lost
            everyone = torch.zeros_like(left).masked_scatter(left, outside)
            self.outside.setdefault(step, everyone)
        return [state.masked_scatter(left[..., None], own)], None

    def _until_outside(
        self, loop: Loop, first: int, count: int, u: Tensor, p: Tensor | None, replace: bool
    ) -> tuple[Tensor, Tensor]:
        """Take steps by a compiled loop, which stops for each step that the guard replaces.

        Args:
            replace: Whether steps from outside are replaced; otherwise the loop does not stop.

        Returns:
            The last state, and which trajectories ``[*batch]`` started all steps inside.
        """
        anyone = torch.ones(u.shape[:-1], dtype=torch.bool, device=u.device)
        stayed, anywhere = anyone, ~anyone if replace else anyone

        def steps(done: int, most: int, u: Tensor, anywhere: Tensor) -> LoopResult:
            some = slice(first + done, first + done + LOOP)
            u = components_first(u)
            return loop(self.times[some], self.dt[some], torch.tensor(most), u, anywhere, p)

        done = 0
        while done < count:
            taken, u, inside, still = steps(done, count - done, u, anywhere)
            done, stayed = done + int(taken), stayed & still
            if done < count and not bool((inside | anywhere).all()):
                assert self.guard is not None
                left, i = ~inside, first + done
                self.outside[i] = left
                own = None if p is None else p[left]
                guarded = self.guard.step(self.f, self.times[i], self.dt[i], u[left], own)
                others = steps(done, 1, u, anyone).u
                u, done = others.masked_scatter(left[..., None], guarded), done + 1
        return u, stayed

    def _guarded_run(self, first: int, keep: tuple[int, ...], u: Tensor) -> list[Tensor]:
        """Take the same chunk, in which the guard replaces every step that starts outside."""
        assert self.guard is not None
        states = list[Tensor]()
        for i in range(first, first + keep[-1]):
            u, outside = guarded_step(
                self.f, self.scheme, self.correction, self.guard, self.times[i], self.dt[i], u,
                self.parameters,
            )  # fmt: skip
            if bool(outside.any()):
                self.outside[i] = outside
            if i + 1 - first in keep:
                states.append(u)
        return states

    def outcome(self, survivors: Survivors) -> tuple[Tensor, Tensor | None]:
        """Return the status of each trajectory, and its number of guarded steps; ``[*batch]`` each."""
        alive, until = survivors
        status = torch.zeros_like(alive, dtype=torch.int8).masked_fill(~alive, Status.LOST)
        if self.guard is None:
            return status, None
        count = torch.zeros_like(alive, dtype=torch.long)
        if self.outside:
            # Steps after a trajectory was lost do not count.
            sign = -1.0 if len(self.t) > 1 and bool(self.t[-1] < self.t[0]) else 1.0
            step_count = torch.searchsorted(sign * self.t.detach(), sign * until.contiguous())
            for step, outside in self.outside.items():
                count += outside & (step < step_count)
            left = Status.EXTRAPOLATED if self.guard.replace is None else Status.GUARDED
            status = status.masked_fill(alive & (count > 0), left)
        return status, None if self.guard.replace is None else count


def everybody(u: Tensor, t: Tensor) -> Survivors:
    """Return all trajectories whose state is finite, as survivors up to the last time."""
    finite = torch.isfinite(u.detach()).all(-1)
    return Survivors(finite, torch.where(finite, t[-1].detach(), t[0].detach()))


def _stand_in(u: Any, survivors: Survivors | None) -> Any:
    """Return u with the state of a surviving trajectory in place of every lost one; None stays None.

    The result is always a new node of the graph. The gradients of a chunk are added up there before
    those of a saved state are added, so that the order of additions, and every bit, is the same with
    and without a loss.
    """
    if u is None:
        return None
    if survivors is None or not bool(survivors.alive.any()):
        return u.view_as(u)
    donor = u.detach()[survivors.alive][0]
    return torch.where(survivors.alive[..., None], u, donor)


def _of_survivors(survivors: Survivors | None, new: list[Tensor], old: list[Tensor]) -> list[Tensor]:
    """Return the new states of survivors, and the old states of lost trajectories."""
    if survivors is None:
        return new
    return [torch.where(survivors.alive[..., None], a, b) for a, b in zip(new, old)]
