"""What is saved of a hybrid solver, and how it is read again."""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from attractor.core.rates import Rate
from attractor.core.tableaus import AnyScheme
from attractor.ode import corrections, serialization
from attractor.ode.serialization import is_system
from attractor.ode.trust import TrustRegion
from attractor.train import checkpoint
from attractor.train.checkpoint import CheckpointError

KIND = "hybrid solver"


class Parts(NamedTuple):
    """The arguments of a `HybridSolver`."""

    rate: Rate
    scheme: AnyScheme
    correction: nn.Module
    dt: float
    trust: TrustRegion | None
    history: list[dict[str, Any]]


def to_checkpoint(solver: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the configuration of a `HybridSolver`.

    Raises:
        TypeError: The correction is none of `attractor.corrections`.
    """
    correction, trust = solver.correction, solver.trust
    name = next((n for n, cls in corrections.BY_NAME.items() if type(correction) is cls), None)
    if name is None:
        known = ", ".join(cls.__name__ for cls in corrections.BY_NAME.values())
        raise TypeError(
            f"a correction of type {type(correction).__name__} cannot be saved, since code is "
            f"not; those of attractor.corrections can: {known}. Save your own by its state_dict()"
        )
    tensors = {f"correction.{k}": v for k, v in correction.state_dict().items()}
    if trust is not None:
        tensors |= {f"trust.{k}": v for k, v in trust.state_dict().items()}
    rate = serialization.rate_to_json(solver.rate)
    config = {
        "dt": solver.dt.hex(),
        "scheme": serialization.scheme_to_json(solver.scheme),
        "correction": {"name": name, **correction.config},
        "trust": trust is not None,
        "rate": {**rate, **serialization.values_to_json(solver.rate, solver.dim, trust)},
        "history": serialization.history_to_json(solver.history),
    }
    return tensors, config


def from_checkpoint(
    tensors: dict[str, Tensor],
    config: dict[str, Any],
    folder: Path | str,
    rate: Rate | None = None,
) -> Parts:
    """Return the parts of the solver that `to_checkpoint` was given.

    Args:
        folder: Where they were read; named in errors.
        rate: The equation, if it is not one of `attractor.systems`.

    Raises:
        CheckpointError: They do not describe a solver, or the solver of another equation.
    """
    try:
        options = dict(config["correction"])
        sizes = {**options, **config["rate"].get("options", {})}
        checkpoint.check_sizes(sizes, tensors, folder)
        known = serialization.rate_from_json(config["rate"])
        make = corrections.get_correction(options.pop("name"))
        filled = partial(serialization.module_from_tensors, tensors=tensors, folder=folder)
        correction = filled(partial(make, **options), prefix="correction.")
        correction.requires_grad_(False)  # as fit returns it
        region = partial(TrustRegion, options["dim"], options.get("parameters", 0))
        trust = filled(region, prefix="trust.") if config["trust"] else None
        scheme = serialization.scheme_from_json(config["scheme"])
        dt = float.fromhex(config["dt"])
        history = serialization.history_from_json(config["history"])
        values = serialization.values_from_json(config["rate"], options["dim"])
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{folder} does not describe a hybrid solver: {error}") from None
    if rate is None and known is None:
        raise CheckpointError(
            f"{folder} was fitted to {config['rate']['name']!r}, which is not saved with it; "
            "pass it as rate= (on the command line --rate FILE.py:NAME)"
        )
    if rate is not None and known is not None and is_system(rate) and rate != known:
        raise CheckpointError(f"{folder} was fitted to {known}, not to {rate}")
    equation = rate if rate is not None else known
    if values is not None:
        serialization.check_values(values, equation, options["dim"], trust, folder)
    return Parts(equation, scheme, correction, dt, trust, history)
