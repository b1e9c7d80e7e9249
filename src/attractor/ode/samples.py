"""Initial states and parameters from samplers, checked."""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attractor.common.checks import is_whole
from attractor.storage.limits import STEP_BYTES, check_memory

Sampler: TypeAlias = Callable[..., Tensor]


def initial_states(
    rate: Any,
    sample: Sampler | None,
    trajectories: int,
    generator: torch.Generator,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return states ``[trajectories, d]`` from the sampler, or from the system's own, checked."""
    check_states(trajectories, 0, getattr(rate, "dim", 1), 1, device)
    if sample is None:
        if not hasattr(rate, "sample"):
            raise ValueError(
                "a rate of your own needs sample=, a function (n, generator=...) -> states [n, d]"
            )
        return rate.sample(trajectories, generator, torch.float64, device)
    if not callable(sample):
        raise TypeError(
            f"sample is a {type(sample).__name__}; give a function (n, generator=...) -> [n, d]"
        )
    return _sampled("sample", sample, trajectories, generator, device)


def check_states(
    trajectories: Any, steps: int, dim: Any, substeps: int, device: torch.device | str | None
) -> None:
    """Raise if states ``[steps + 1, trajectories, dim]`` in float64 do not fit into memory."""
    if is_whole(trajectories) and is_whole(dim):
        check_memory(
            f"states [{steps + 1:,}, {trajectories:,}, {dim}] in float64",
            8 * (steps + 1) * trajectories * dim + STEP_BYTES * steps * substeps,
            "use fewer trajectories or steps at a time",
            device,
        )


def sampled_parameters(
    parameters: Sampler | None,
    trajectories: int,
    generator: torch.Generator,
    device: torch.device | str | None = None,
) -> Tensor | None:
    """Return parameters ``[trajectories, k]`` from the sampler, checked; None without one."""
    if parameters is None:
        return None
    if not callable(parameters):
        raise TypeError(
            f"parameters is a {type(parameters).__name__}; give a function (n, generator=...) -> [n, k] "
            "that draws the parameters of n trajectories"
        )
    return _sampled("parameters", parameters, trajectories, generator, device)


def _sampled(
    name: str,
    sample: Sampler,
    trajectories: int,
    generator: torch.Generator,
    device: torch.device | str | None,
) -> Tensor:
    rows = sample(trajectories, generator=generator)
    if not isinstance(rows, Tensor) or rows.dim() != 2 or len(rows) != trajectories:
        got = list(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        raise ValueError(
            f"{name}({trajectories}) returned {got}; it must return a tensor [{trajectories}, d]"
        )
    if not bool(torch.isfinite(rows).all()):
        what = "states" if name == "sample" else "parameters"
        raise ValueError(f"{name} returned non-finite {what}; a fit needs finite ones")
    return rows.to(dtype=torch.float64, device=device)
