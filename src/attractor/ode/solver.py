"""A hybrid solver: a scheme, a correction fitted to one step size, and where it can be trusted."""

import math
import sys
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor, nn

from attractor.common.checks import MOST_STEPS, as_number, check_values, is_whole
from attractor.common.views import html_table
from attractor.core import Trajectory, get_scheme
from attractor.core.chunks import Guard, correction_term, guarded_step
from attractor.core.grid import on_grid
from attractor.core.problem import check_initial, check_parameters
from attractor.core.rates import Rate, check_state
from attractor.core.step import correction_of_step
from attractor.core.tableaus import AnyScheme
from attractor.core.transforms import is_transformed, without_vmap
from attractor.ode.captured import CapturedStep
from attractor.ode.patch_region import PatchRegion
from attractor.ode.serialization import is_system
from attractor.ode.solver_checkpoint import KIND, from_checkpoint, to_checkpoint
from attractor.ode.solver_hub import located, push
from attractor.ode.trust import TrustRegion
from attractor.storage.limits import STEP_BYTES, check_memory
from attractor.storage.objects import AnyPath
from attractor.train import checkpoint


class HybridSolver:
    """A solver with steps ``u + dt * S + Q``: large steps with the accuracy of small ones.

    States may have any floating dtype and be on any device: they are converted to the solver's `dtype`
    and moved to its `device`, and results have these, too.

    Args:
        rate: The equation that the correction was fitted to.
        scheme: The scheme whose error the correction corrects.
        correction: What is added to a plain step, ``correction(step)`` or ``correction(u, slope, dt)``.
        dt: The step size that the correction was fitted to. The solver takes no other.
        trust: The region of states in which the correction can be trusted. With it, steps from other
            states are replaced by plain substeps, unless a call says ``guard=False``.
        history: The course of the fit, one dictionary per entry.
    """

    def __init__(
        self,
        rate: Rate,
        scheme: str | AnyScheme,
        correction: nn.Module,
        dt: float,
        trust: TrustRegion | PatchRegion | None = None,
        history: list[dict[str, Any]] | None = None,
    ) -> None:
        dt = as_number("dt", dt)
        if not (dt > 0 and math.isfinite(dt)):
            raise ValueError(f"dt = {dt} must be positive; a correction is fitted to one step forward")
        self.rate = rate
        self.scheme = get_scheme(scheme)
        self.correction = correction
        self.dt = dt
        self.trust = trust
        self.history = history or []

    @property
    def rate_name(self) -> str:
        """The name of the equation."""
        if is_system(self.rate):
            return type(self.rate).__name__
        return getattr(self.rate, "__name__", type(self.rate).__name__)

    @property
    def plain_scheme(self) -> AnyScheme:
        """The scheme that the solver is compared with: its own, or rk4 if its own is "identity"."""
        return get_scheme("rk4") if self.scheme.order == 0 else self.scheme

    @property
    def dim(self) -> int | None:
        """The size of a state according to the correction or the equation; None if neither has one."""
        known = getattr(self.correction, "config", {}).get("dim")
        return known if known is not None else getattr(self.rate, "dim", None)

    @property
    def parameter_count(self) -> int:
        """The number of parameters that the correction sees of each trajectory."""
        return getattr(self.correction, "config", {}).get("parameters", 0)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of states and results; None if the correction has no tensors, and any will do."""
        like = self._like
        return None if like is None else like.dtype

    @property
    def device(self) -> torch.device | None:
        """The device of states and results; None if the correction has no tensors, and any will do."""
        like = self._like
        return None if like is None else like.device

    @property
    def _like(self) -> Tensor | None:
        if not isinstance(self.correction, nn.Module):
            return None
        modules = list(self.correction.modules())
        tensors = chain(
            *(x._parameters.values() for x in modules), *(x._buffers.values() for x in modules)
        )
        return next((x for x in tensors if x is not None and x.is_floating_point()), None)

    @property
    def fit_error(self) -> float | None:
        """Mean square error on trajectories that the fit did not use; None without a fit."""
        return self.history[-1].get("rollout") if self.history else None

    def about(self) -> dict[str, str]:
        """Return a description, one entry per part."""
        options = getattr(self.correction, "config", {})
        width = f" of width {options['width']}" if "width" in options else ""
        trust = "none: no step is guarded"
        if self.trust is not None:
            trust = "known: steps outside are replaced by plain substeps, unless guard=False"
        return {
            "system": repr(self.rate) if is_system(self.rate) else self.rate_name,
            "scheme": f"{self.scheme.name}, order {self.scheme.order}",
            "dt": f"{self.dt:g}",
            "correction": f"{type(self.correction).__name__}{width}",
            "mean square error on new trajectories": self._error_text(),
            "trust region": trust,
        }

    def _error_text(self) -> str:
        if self.fit_error is None:
            return "not fitted"
        last = self.history[-1]
        names = {"median": "median", "worst": "worst", "plain": "without the correction"}
        known = [f"{names[key]} {last[key]:.1e}" for key in names if last.get(key) is not None]
        return f"{self.fit_error:.1e}" + (f" ({', '.join(known)})" if known else "")

    def __repr__(self) -> str:
        parts = self.about()
        error = "not fitted" if self.fit_error is None else f"test MSE {self.fit_error:.1e}"
        return (
            f"HybridSolver({parts['system']}, {self.scheme.name}, dt {self.dt:g}, "
            f"{parts['correction']}, {error}, "
            f"{'no trust region' if self.trust is None else 'trust region'})"
        )

    def _repr_html_(self) -> str:
        return html_table(["HybridSolver", ""], list(self.about().items()))

    def step(
        self,
        u: Tensor,
        t: float | Tensor = 0.0,
        guard: bool | None = None,
        parameters: Tensor | None = None,
    ) -> Tensor:
        """Return the state ``[*batch, d]`` one dt after u.

        Args:
            t: The time of u.
            parameters: See `solve`.
            guard: See `solve`. None never guards under torch.compile, torch.export and transforms of
                torch.func, where nothing can depend on the values of states.
        """
        check_state(u, t)
        u = self._converted(u)
        t = torch.as_tensor(t, dtype=u.dtype, device=u.device)
        parameters = self._parameters(u, parameters)
        correction: Any = correction_of_step(self.correction)
        traced = torch.compiler.is_compiling() or is_transformed(u)
        steps = None if guard is None and traced else self._guard(guard)
        if steps is not None and steps.replace is not None:
            fixed = self.rate, self.scheme, correction, steps
            return guarded_step(*fixed, t, self.dt, u, parameters)[0]
        step = self.scheme.step(self.rate, t, u, self.dt, parameters)
        return u + self.dt * step.slope + correction_term(correction, step)

    def solve(
        self,
        u0: Tensor,
        t_end: float,
        t0: float = 0.0,
        every: int = 1,
        guard: bool | None = None,
        compile: bool = False,
        parameters: Tensor | None = None,
    ) -> Trajectory:
        """Follow u0 ``[*batch, d]`` from t0 to t_end in steps of dt.

        Args:
            u0: Initial states, of any floating dtype and on any device.
            every: Keep every n-th state and the last.
            guard: Whether a step from a state outside of the trust region is replaced by plain substeps,
                as many as the accuracy of the fit requires. None: if there is a trust region. With False
                the correction is applied there as well, and `Trajectory.status` says which trajectories
                have left.
            compile: Compile several steps at a time with `torch.compile`, as in `evolve`. With the
                scheme "identity" the first step from outside of the trust region compiles its substeps
                as well.
            parameters: Parameters ``[*batch, k]`` of the trajectories, or ``[k]`` for all of them, where
                the equation is ``rate(t, u, p)``.

        Returns:
            A `Trajectory` of the solver's dtype and on its device. `status` tells trajectories that left
            the trust region, and `stats.guarded` counts their replaced steps.

        Raises:
            ValueError: t_end is not a whole number of steps away, or guard=True without a trust region.
        """
        t_end, t0 = as_number("t_end", t_end), as_number("t0", t0)
        check_initial(u0)
        if self.dim not in (None, u0.shape[-1]):
            raise ValueError(
                f"u0 {list(u0.shape)}: states of {u0.shape[-1]} numbers; this solver's have {self.dim}"
            )
        if not abs(t_end - t0) <= MOST_STEPS * self.dt:
            raise ValueError(
                f"from t0 = {t0:g} to t_end = {t_end:g} is not a finite time, or more than "
                f"{MOST_STEPS:g} steps of dt = {self.dt:g}"
            )
        if not is_whole(every) or every < 1:
            raise ValueError(f"every = {every!r} keeps nothing; use 1 for all states, 10 for each tenth")
        n = round((t_end - t0) / self.dt)
        rounding = 4 * sys.float_info.epsilon * max(abs(t_end), abs(t0))
        if n < 0 or abs(t0 + n * self.dt - t_end) > 1e-6 * self.dt + rounding:
            raise ValueError(
                f"t_end = {t_end:g} is not a whole number of steps of dt = {self.dt:g} "
                f"after t0 = {t0:g}; the nearest is {t0 + max(n, 0) * self.dt!r}"
            )
        u0, kept = self._converted(u0), n // every + 2
        check_memory(
            f"{kept:,} states {list(u0.shape)}, and the times of {n:,} steps,",
            kept * u0.numel() * u0.element_size() + STEP_BYTES * n,
            "use a larger every=, an earlier t_end, or fewer trajectories at a time",
            u0.device,
        )
        if self.dt < 4 * math.ulp(max(abs(t_end), abs(t0))):
            raise ValueError(
                f"times from {t0:g} to {t_end:g} cannot be told apart in steps of dt = {self.dt:g}; "
                "count time from a later origin"
            )
        t = t0 + torch.arange(n + 1, dtype=torch.float64) * self.dt
        with without_vmap("a solver with a trust region"):
            return on_grid(
                self.rate, u0, t.to(u0.device), self.scheme, self.correction, every=every,
                compile=compile, guard=self._guard(guard, compile),
                parameters=self._parameters(u0, parameters),
            )  # fmt: skip

    def _converted(self, u: Tensor) -> Tensor:
        """Return states in the solver's dtype and on its device; all else as it is."""
        like = self._like
        if not (isinstance(u, Tensor) and u.is_floating_point()) or like is None:
            return u
        if u.device != like.device:
            check_values("u", u)
        return u.to(like)

    def _parameters(self, u: Tensor, parameters: Tensor | None) -> Tensor | None:
        """Return parameters ``[*batch, k]`` beside states u, as many as the correction sees."""
        parameters, count = check_parameters(u, parameters), self.parameter_count
        if count and (parameters is None or parameters.shape[-1] != count):
            shape = "none" if parameters is None else list(parameters.shape)
            raise ValueError(
                f"this solver was fitted to an equation with {count} parameters, and there are {shape}; "
                f"pass parameters= [*batch, {count}]"
            )
        return parameters

    def _guard(self, guard: bool | None, compile: bool = False) -> Guard | None:
        """Return the guard of one solve; None if nothing is known about where the correction applies."""
        if self.trust is None:
            if guard:
                raise ValueError("guard=True needs a trust region; solvers made by fit have one")
            return None
        return self.trust.guard(self.scheme, guard is None or bool(guard), compile)

    def capture(
        self, u: Tensor, *, steps: int = 1, parameters: Tensor | None = None, **options: Any
    ) -> CapturedStep:
        """Return steps of states like u ``[*batch, d]``, several at a time, as one CUDA graph.

        This is for small batches on a GPU, where launching a step takes longer than computing it.
        Nothing looks at the states on the way, so these steps are not guarded. Other options and the
        result: see `CapturedStep`.

        Args:
            parameters: See `solve`. `CapturedStep.reset` changes them later.
        """
        return CapturedStep(self, self._converted(u), steps=steps, parameters=parameters, **options)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move the correction and the trust region to a dtype or device."""
        self.correction.to(*args, **kwargs)
        if self.trust is not None:
            self.trust.to(*args, **kwargs)
        return self

    def save(self, folder: AnyPath | str) -> AnyPath:
        """Write the solver to a folder: safetensors and JSON, every file under a hash.

        A URL such as "s3://bucket/solver" names a folder in an object store.

        Raises:
            TypeError: The correction is none of `attractor.corrections`.
        """
        return checkpoint.save(folder, KIND, *self._to_checkpoint())

    def _to_checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors and the configuration that `save` writes."""
        return to_checkpoint(self)

    @classmethod
    def load(cls, folder: AnyPath | str, rate: Rate | None = None) -> Self:
        """Read a solver; it computes the same bits as the one that was saved.

        Args:
            rate: The equation, if it is not one of `attractor.systems`: code is not saved.

        Raises:
            CheckpointError: The folder is damaged, or the solver was fitted to another equation, some
                values of which are saved with it.
        """
        return cls._from_checkpoint(*checkpoint.load(folder, KIND), folder, rate)

    @classmethod
    def _from_checkpoint(
        cls,
        tensors: dict[str, Tensor],
        config: dict[str, Any],
        folder: AnyPath | str,
        rate: Rate | None = None,
    ) -> Self:
        """Return the solver of `_to_checkpoint`; `folder` is named in errors."""
        return cls(*from_checkpoint(tensors, config, folder, rate))

    @classmethod
    def from_pretrained(
        cls,
        name: AnyPath | str,
        rate: Rate | None = None,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
    ) -> Self:
        """Return a solver by name: of the library, of a folder, or of a repository of the hub.

        Args:
            name: such as "elastic-pendulum" (`attractor.ode.pretrained.names` has all), the folder or
                URL that `save` has written, or "somebody/something" on the Hugging Face hub, which needs
                the extra `hub`.
            rate: the equation, if it is not one of `attractor.systems`.
            revision, token: Of the hub.

        >>> HybridSolver.from_pretrained("elastic-pendulum").dt
        0.1
        """
        with located(name, revision=revision, token=token) as folder:
            return cls.load(folder, rate)

    def push_to_hub(
        self, repo: str, *, private: bool | None = None, token: str | bool | None = None
    ) -> str:
        """Put the solver and a card about it on the Hugging Face hub; returns the address.

        Args:
            repo: "somebody/something"; made if there is none.
        """
        return push(self, repo, private=private, token=token)
