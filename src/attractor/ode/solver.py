"""A hybrid solver: a scheme, a correction fitted to one step size, and where it can be trusted."""

import dataclasses
import math
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from attractor.core import Scheme, Splitting, Trajectory, evolve, get_scheme
from attractor.core.checks import MOST_STEPS, as_number
from attractor.core.evolve import call_correction
from attractor.core.scheme import Rate, check_state
from attractor.core.tableaus import AnyScheme
from attractor.core.views import html_table
from attractor.ode import corrections, pretrained, systems
from attractor.ode.captured import CapturedStep
from attractor.ode.trust import TrustRegion
from attractor.train import checkpoint
from attractor.train.checkpoint import CheckpointError

KIND = "hybrid solver"
SUBSTEPS = 2  # plain steps in place of a corrected one that cannot be trusted


class HybridSolver:
    """``u + dt * S + Q``: big steps at the accuracy of small ones.

    Args:
        rate: the equation it was fitted to.
        scheme: the scheme whose error the correction corrects.
        correction: ``(u, slope, dt) -> what is added``.
        dt: the step size the correction was fitted to; the solver takes no other.
        trust: where the correction can be trusted; needed for ``guard=True``.
        history: what happened in the fit, a dictionary an entry.
    """

    def __init__(
        self,
        rate: Rate,
        scheme: str | AnyScheme,
        correction: nn.Module,
        dt: float,
        trust: TrustRegion | None = None,
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
        """The equation's name."""
        if _is_system(self.rate):
            return type(self.rate).__name__
        return getattr(self.rate, "__name__", type(self.rate).__name__)

    @property
    def dim(self) -> int | None:
        """Size of a state, as the correction or the equation tells it; None if neither does."""
        known = getattr(self.correction, "config", {}).get("dim")
        return known if known is not None else getattr(self.rate, "dim", None)

    @property
    def fit_error(self) -> float | None:
        """Mean square error on the trajectories that the fit held out; None without a fit."""
        return self.history[-1].get("rollout") if self.history else None

    def about(self) -> dict[str, str]:
        """What it is, a line a part."""
        options = getattr(self.correction, "config", {})
        width = f" of width {options['width']}" if "width" in options else ""
        plain = self.history[-1].get("plain") if self.history else None
        beside = f" (without the correction {plain:.1e})" if plain is not None else ""
        error = self.fit_error
        inside = "known: guard=True takes plain steps outside it"
        return {
            "system": repr(self.rate) if _is_system(self.rate) else self.rate_name,
            "scheme": f"{self.scheme.name}, order {self.scheme.order}",
            "dt": f"{self.dt:g}",
            "correction": f"{type(self.correction).__name__}{width}",
            "held-out mean square error": "not fitted" if error is None else f"{error:.1e}{beside}",
            "trust region": "none, so no guard" if self.trust is None else inside,
        }

    def __repr__(self) -> str:
        parts = self.about()
        error = "not fitted" if self.fit_error is None else f"held-out MSE {self.fit_error:.1e}"
        return (
            f"HybridSolver({parts['system']}, {self.scheme.name}, dt {self.dt:g}, "
            f"{parts['correction']}, {error}, "
            f"{'no trust region' if self.trust is None else 'trust region'})"
        )

    def _repr_html_(self) -> str:
        return html_table(["HybridSolver", ""], list(self.about().items()))

    def step(self, u: Tensor, t: float | Tensor = 0.0) -> Tensor:
        """The state ``[*batch, d]`` one dt later."""
        check_state(u, t)
        t = torch.as_tensor(t, dtype=u.dtype, device=u.device)
        slope = self.scheme.slope(self.rate, t, u, self.dt)
        return u + self.dt * slope + call_correction(self.correction, u, slope, self.dt, t)

    def solve(
        self,
        u0: Tensor,
        t_end: float,
        t0: float = 0.0,
        every: int = 1,
        guard: bool = False,
        compile: bool = False,
    ) -> Trajectory:
        """Follow u0 ``[*batch, d]`` from t0 to t_end in steps of dt.

        Args:
            every: keep every n-th state and the last.
            guard: where a state is outside the region the fit knows, take plain substeps instead of
                the corrected step; `stats.guarded` counts them for each trajectory.
            compile: several steps at a time with `torch.compile`, as in `evolve`; not with guard,
                which looks at every state.

        Raises:
            ValueError: t_end is not a whole number of steps away, or there is no trust region.
        """
        t_end, t0 = as_number("t_end", t_end), as_number("t0", t0)
        if isinstance(u0, Tensor) and u0.dim() and self.dim not in (None, u0.shape[-1]):
            raise ValueError(
                f"u0 {list(u0.shape)}: states of {u0.shape[-1]} numbers; this solver's have {self.dim}"
            )
        if not abs(t_end - t0) <= MOST_STEPS * self.dt:
            raise ValueError(
                f"from t0 = {t0:g} to t_end = {t_end:g} is not a finite time, or more than "
                f"{MOST_STEPS:g} steps of dt = {self.dt:g}"
            )
        n = round((t_end - t0) / self.dt)
        rounding = 4 * sys.float_info.epsilon * max(abs(t_end), abs(t0))
        if n < 0 or abs(t0 + n * self.dt - t_end) > 1e-6 * self.dt + rounding:
            raise ValueError(
                f"t_end = {t_end:g} is not a whole number of steps of dt = {self.dt:g} "
                f"after t0 = {t0:g}; the nearest is {t0 + max(n, 0) * self.dt!r}"
            )
        t = t0 + torch.arange(n + 1, dtype=torch.float64) * self.dt
        if not guard:
            return evolve(self.rate, u0, t, self.scheme, self.correction, every=every, compile=compile)
        if compile:
            raise ValueError(
                "guard=True looks at every state, so it cannot be compiled; drop one of them"
            )
        if self.trust is None:
            raise ValueError("guard=True needs a trust region; solvers made by fit have one")
        guarded = _Guarded(self, t0)
        solved = evolve(self.rate, u0, t, self.scheme, guarded, every=every)
        calls = solved.stats.rate_calls + guarded.rate_calls
        stats = dataclasses.replace(solved.stats, rate_calls=calls, guarded=guarded.count(solved.until))
        return dataclasses.replace(solved, stats=stats)

    def capture(self, u: Tensor, *, steps: int = 1, **options: Any) -> CapturedStep:
        """Steps of states like u ``[*batch, d]``, several at a time, as one CUDA graph.

        For small batches on a GPU, where launching a step takes longer than computing it. Other options
        and what comes back: see `CapturedStep`.
        """
        return CapturedStep(self, u, steps=steps, **options)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move the correction and the trust region to a dtype or device."""
        self.correction.to(*args, **kwargs)
        if self.trust is not None:
            self.trust.to(*args, **kwargs)
        return self

    def save(self, folder: Path | str) -> Path:
        """Write the solver to a folder: safetensors and JSON, every file under a hash.

        Raises:
            TypeError: the correction is none of `attractor.corrections`.
        """
        name = next((n for n, cls in corrections.BY_NAME.items() if type(self.correction) is cls), None)
        if name is None:
            known = ", ".join(cls.__name__ for cls in corrections.BY_NAME.values())
            raise TypeError(
                f"a correction of type {type(self.correction).__name__} cannot be saved, since code is "
                f"not; those of attractor.corrections can: {known}. Save your own by its state_dict()"
            )
        options: Any = self.correction.config
        tensors = {f"correction.{k}": v for k, v in self.correction.state_dict().items()}
        if self.trust is not None:
            tensors |= {f"trust.{k}": v for k, v in self.trust.state_dict().items()}
        config = {
            "dt": self.dt.hex(),
            "scheme": _scheme_to_json(self.scheme),
            "correction": {"name": name, **options},
            "trust": self.trust is not None,
            "rate": {**rate_to_json(self.rate), **_values_to_json(self.rate, self.trust)},
            "history": self.history,
        }
        return checkpoint.save(folder, KIND, tensors, config)

    @classmethod
    def load(cls, folder: Path | str, rate: Rate | None = None) -> Self:
        """Read a solver back; it gives the same bits.

        Args:
            rate: the equation, if it is not one of `attractor.systems`: code is not saved.

        Raises:
            CheckpointError: the folder is damaged, or it was fitted to another equation, of which it
                has some values.
        """
        tensors, config = checkpoint.load(folder, KIND)
        try:
            options = dict(config["correction"])
            sizes = {**options, **config["rate"].get("options", {})}
            checkpoint.check_sizes(sizes, tensors, folder)
            known = _rate_from_json(config["rate"])
            make = corrections.get_correction(options.pop("name"))
            correction = _filled(partial(make, **options), tensors, "correction.", folder)
            correction.requires_grad_(False)  # as fit hands it back
            region = partial(TrustRegion, options["dim"])
            trust = _filled(region, tensors, "trust.", folder) if config["trust"] else None
            scheme, dt = _scheme_from_json(config["scheme"]), float.fromhex(config["dt"])
            history = config["history"]
            values = _values_from_json(config["rate"], options["dim"])
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{folder} does not describe a hybrid solver: {error}") from None
        if rate is None and known is None:
            raise CheckpointError(
                f"{folder} was fitted to {config['rate']['name']!r}, which is not saved with it; "
                "pass it as rate= (on the command line --rate FILE.py:NAME)"
            )
        if rate is not None and known is not None and _is_system(rate) and rate != known:
            raise CheckpointError(f"{folder} was fitted to {known}, not to {rate}")
        if values is not None and trust is not None and not _is_system(rate):
            _check_values(values, rate, trust, folder)
        return cls(rate if rate is not None else known, scheme, correction, dt, trust, history)

    @classmethod
    def from_pretrained(
        cls,
        name: Path | str,
        rate: Rate | None = None,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
    ) -> Self:
        """A solver by name: one that comes with the library, a folder, or a repository of the hub.

        Args:
            name: such as "elastic-pendulum" (`attractor.ode.pretrained.names` has all), the folder that
                `save` has written, or "somebody/something" on the Hugging Face hub, which needs the
                extra `hub`.
            rate: the equation, if it is not one of `attractor.systems`.
            revision, token: of the hub.

        >>> HybridSolver.from_pretrained("elastic-pendulum").dt
        0.1
        """
        if not isinstance(name, str | Path):
            raise TypeError(f"name is a {type(name).__name__}; give a name, a folder or a repository")
        place = Path(name)
        if str(name) in pretrained.names():
            return cls.load(pretrained.folder(str(name)), rate)
        if place.is_dir():
            inner = place / FOLDER
            return cls.load(inner if (inner / checkpoint.MANIFEST).exists() else place, rate)
        if str(name).count("/") != 1 or str(name).startswith((".", "/", "~")):
            pretrained.folder(str(name))  # says what there is
        with import_module("attractor.integrations.hub").fetched(
            str(name), FOLDER, revision=revision, token=token
        ) as folder:
            return cls.load(folder, rate)

    def push_to_hub(
        self, repo: str, *, private: bool | None = None, token: str | bool | None = None
    ) -> str:
        """Put the solver and a card about it on the Hugging Face hub; returns the address.

        Args:
            repo: "somebody/something"; made if there is none.
        """
        lines = [f"| {key} | {value} |" for key, value in self.about().items()]
        card = CARD.format(title=self.rate_name, repo=repo, table="\n".join(lines))
        return import_module("attractor.integrations.hub").push(
            repo, {FOLDER: self.save}, card, private=private, token=token
        )


FOLDER = "solver"  # in a repository of the hub, beside the card
CARD = """---
library_name: attractor
tags: [ode, hybrid-solver]
---
# A hybrid solver for {title}

| | |
|---|---|
{table}

```python
import attractor as at

solver = at.HybridSolver.from_pretrained("{repo}")
```
"""


class _Guarded:
    """A correction that gives way to plain substeps where it cannot be trusted."""

    timed = True

    def __init__(self, solver: HybridSolver, t0: float) -> None:
        self.solver, self.t0 = solver, t0
        self.outside: dict[int, Tensor] = {}  # steps in which somebody was, and who [*batch]
        self.rate_calls = 0

    def step_of(self, t: Tensor) -> Tensor:
        """Which step starts at t."""
        return ((t.double() - self.t0) / self.solver.dt).round().long()

    def count(self, until: Tensor) -> Tensor:
        """Steps of each trajectory ``[*batch]`` that were guarded, of those before it was lost."""
        total, taken = torch.zeros_like(until, dtype=torch.long), self.step_of(until)
        for step, outside in self.outside.items():
            total += outside & (step < taken)
        return total

    def __call__(self, u: Tensor, slope: Tensor, dt: Any, t: Any) -> Tensor:
        solver = self.solver
        assert solver.trust is not None
        outside = ~(solver.trust.distance(u.detach()) <= 1)
        added = call_correction(solver.correction, u, slope, dt, t)
        if not bool(outside.any()):
            return added
        # Where somebody is lost, steps are repeated with others in their place: the first time counts.
        self.outside.setdefault(int(self.step_of(t)), outside)
        plain, part = u, dt / SUBSTEPS
        for i in range(SUBSTEPS):
            plain = plain + part * solver.scheme.slope(solver.rate, t + i * part, plain, part)
        self.rate_calls += SUBSTEPS * solver.scheme.rate_calls
        return torch.where(outside[..., None], plain - (u + dt * slope), added)


# What is saved


def _is_system(rate: Any) -> bool:
    return dataclasses.is_dataclass(rate) and type(rate).__name__ in systems.__all__


def rate_to_json(rate: Any) -> dict[str, Any]:
    """What is kept of an equation: name and options of a system, the name of a function."""
    if _is_system(rate):
        options = {f.name: getattr(rate, f.name) for f in dataclasses.fields(rate) if f.init}
        return {"system": type(rate).__name__, "options": options}
    return {"name": getattr(rate, "__qualname__", type(rate).__qualname__)}


def _states_of(trust: TrustRegion) -> Tensor:
    """Some states that a fit has seen ``[3, dim]``."""
    signs = torch.tensor([1.0, -1.0]).to(trust.mean).repeat(trust.mean.numel())[: trust.mean.numel()]
    return torch.stack([trust.mean + x * signs * trust.deviation for x in (0.0, 0.4, -0.7)])


def _values_of(rate: Any, trust: TrustRegion) -> Tensor | None:
    """What a rate gives there, float64; None if it cannot be asked, since it wants batches of another
    shape, say, or a time that is not 0."""
    try:
        with torch.no_grad():
            u = _states_of(trust)
            found = rate(torch.zeros((), dtype=u.dtype, device=u.device), u).double().cpu()
    except Exception:
        return None
    return found if found.shape == u.shape and bool(torch.isfinite(found).all()) else None


def _values_to_json(rate: Any, trust: TrustRegion | None) -> dict[str, Any]:
    """Of a rate of one's own, whose code is not saved, what tells it from others."""
    found = None if trust is None or _is_system(rate) else _values_of(rate, trust)
    return {} if found is None else {"values": found.tolist()}


def _values_from_json(saved: dict[str, Any], dim: int) -> Tensor | None:
    if "values" not in saved:  # of older versions
        return None
    found = torch.tensor(saved["values"], dtype=torch.float64)
    if found.shape != (3, dim):
        raise ValueError(f"values of its rate have shape {list(found.shape)}, not [3, {dim}]")
    return found


def _check_values(then: Tensor, rate: Any, trust: TrustRegion, folder: Path | str) -> None:
    """Raise if a rate is clearly another than the one that was fitted to."""
    now = _values_of(rate, trust)
    if now is None:
        return
    off = (now - then).abs().amax(1)
    if bool((off > 1e-3 * then.abs().max()).any()):
        told = lambda x: "[" + ", ".join(f"{v:.4g}" for v in x.tolist()) + "]"
        i = int(off.argmax())
        raise CheckpointError(
            f"{folder} was fitted to another equation: at u = {told(_states_of(trust)[i])} its rate was "
            f"{told(then[i])}, and this one gives {told(now[i])}"
        )


def _rate_from_json(saved: dict[str, Any]) -> Any:
    if "system" not in saved:
        return None
    if saved["system"] not in systems.__all__:
        raise ValueError(f"no system is called {saved['system']!r}")
    return getattr(systems, saved["system"])(**saved["options"])


def _scheme_to_json(scheme: AnyScheme) -> dict[str, Any]:
    if isinstance(scheme, Splitting):
        parts = {k: [x.hex() for x in getattr(scheme, k)] for k in ("kick", "drift")}
        return {"splitting": scheme.name, **parts, "order": scheme.order}
    listed = lambda row: None if row is None else [str(x) for x in row]
    return {
        "scheme": scheme.name,
        "a": [listed(row) for row in scheme.a],
        **{key: listed(getattr(scheme, key)) for key in ("b", "c", "b_low", "dense")},
        "order": scheme.order,
    }


def _scheme_from_json(saved: dict[str, Any]) -> AnyScheme:
    if "splitting" in saved:
        kick, drift = ([float.fromhex(x) for x in saved[k]] for k in ("kick", "drift"))
        return Splitting(saved["splitting"], kick, drift, saved["order"])
    parts = (saved[key] for key in ("a", "b", "c", "order", "b_low", "dense"))
    return Scheme(saved["scheme"], *parts)


def _filled(
    make: Callable[..., Any], tensors: dict[str, Tensor], prefix: str, folder: Path | str
) -> Any:
    """The module with the saved tensors, in their dtype; names and shapes must fit exactly."""
    own = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
    dtypes = {v.dtype for v in own.values() if v.is_floating_point()}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float64
    checkpoint.check(make(dtype=dtype, device="meta"), own, folder)  # before memory is taken
    with torch.random.fork_rng(devices=[]):  # its first weights are thrown away
        module = make(dtype=dtype)
    checkpoint.fill(module, own, folder)
    return module
