"""What is saved of a hybrid solver, and how it is read again."""

from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from attractor.core.rates import Rate
from attractor.core.rosenbrock import Rosenbrock
from attractor.core.tableaus import AnyScheme
from attractor.ode import corrections, serialization
from attractor.ode.corrections.network import ACTIVATIONS
from attractor.ode.corrections.sequence import BODIES
from attractor.ode.patch_region import PatchRegion
from attractor.ode.serialization import is_system
from attractor.ode.trust import TrustRegion
from attractor.storage import schema
from attractor.storage.objects import AnyPath
from attractor.storage.schema import (
    ADVICE,
    any_of,
    flag,
    listing,
    null,
    number,
    record,
    text,
    text_number,
    variants,
)
from attractor.train import checkpoint
from attractor.train.checkpoint import CheckpointError
from attractor.train.tensors import JSON, described

KIND = "hybrid solver"
SIZE, COUNT = number(1, 2**31, whole=True), number(0, 2**31, whole=True)
AFFINE = {"period": any_of(number(0), null), "parameters": COUNT}
NETWORK = AFFINE | {
    "width": COUNT, "depth": SIZE, "activation": text(choices=ACTIVATIONS), "skip": flag,
    "residual": flag, "body": text(choices=("mlp", *BODIES)),
    "precision": any_of(text(choices=("float32",)), null),
}  # fmt: skip
OPTIONS = dict.fromkeys(corrections.BY_NAME, NETWORK) | {
    "attns": NETWORK | {"times_dt": flag, "state": flag},
    "linear": AFFINE,
    "patches": AFFINE
    | dict.fromkeys(("channels", "radius", "degree"), SIZE)
    | {
        "shape": listing(SIZE, 1),
        "breadth": COUNT,
        "walls": flag,
        "conservative": flag,
    },
    "polynomial": AFFINE | {"degree": SIZE, "odd": flag},
    "stages": NETWORK | {"stages": SIZE},
}
SOLVER = record(
    {
        "dt": text_number(5e-324),
        "scheme": serialization.SCHEME,
        "correction": variants(
            "name", {k: record({"name": text(), "dim": SIZE}, own) for k, own in OPTIONS.items()}
        ),
        "trust": flag,
        "rate": serialization.RATE,
        "history": any_of(text(JSON), serialization.HISTORY),
    }
)


class Parts(NamedTuple):
    """The arguments of a `HybridSolver`."""

    rate: Rate
    scheme: AnyScheme
    correction: nn.Module
    dt: float
    trust: TrustRegion | PatchRegion | None
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
        "rate": {**rate, **serialization.values_to_json(solver.rate, solver.dim, _of_states(trust))},
        "history": serialization.history_to_json(solver.history),
    }
    return tensors, config


def from_checkpoint(
    tensors: dict[str, Tensor],
    config: dict[str, Any],
    folder: AnyPath | str,
    rate: Rate | None = None,
) -> Parts:
    """Return the parts of the solver that `to_checkpoint` was given.

    Args:
        folder: Where they were read; named in errors.
        rate: The equation, if it is not one of `attractor.systems`.

    Raises:
        CheckpointError: They do not describe a solver, or the solver of another equation.
    """
    schema.check(config, SOLVER, folder, CheckpointError)
    options = dict(config["correction"])
    dim = options["dim"]
    sizes = {**options, **config["rate"].get("options", {})}
    checkpoint.check_sizes({k: v for k, v in sizes.items() if k != "seed"}, tensors, folder)
    unknown = [name for name in tensors if not name.startswith(("correction.", "trust."))]
    if unknown or (not config["trust"] and any(name.startswith("trust.") for name in tensors)):
        raise CheckpointError(f"{folder} has tensors that belong to no part of the solver. {ADVICE}")
    filled = partial(serialization.module_from_tensors, tensors=tensors, folder=folder)
    with described(folder, "a hybrid solver"):
        known = serialization.rate_from_json(config["rate"])
        make = partial(corrections.get_correction(options.pop("name")), **options)
        correction = filled(make, prefix="correction.")
        correction.requires_grad_(False)  # as fit returns it
        region: Any = partial(TrustRegion, dim, options.get("parameters", 0))
        if isinstance(correction, corrections.Patches) and "trust.deviation" not in tensors:
            region = partial(PatchRegion.of, correction)
        trust = filled(region, prefix="trust.") if config["trust"] else None
        if trust is not None and not trust.is_valid():
            raise ValueError("the deviations and the limit of its trust region must be above 0")
        scheme = serialization.scheme_from_json(config["scheme"])
        values = serialization.values_from_json(config["rate"], dim)
    history = serialization.history_from_json(config["history"], folder)
    if rate is None and known is None:
        raise CheckpointError(
            f"{folder} was fitted to {config['rate']['name']!r}, which is not saved with it; "
            "pass it as rate= (on the command line --rate FILE.py:NAME)"
        )
    if rate is not None and known is not None and is_system(rate) and rate != known:
        raise CheckpointError(f"{folder} was fitted to {known}, not to {rate}")
    equation = rate if rate is not None else known
    own = getattr(equation, "dim", None) if is_system(equation) else dim
    if own != dim:
        raise CheckpointError(
            f"{folder} holds a correction of states of {dim} components, and those of {equation} have "
            f"{own}; pass the equation of the fit as rate="
        )
    own = len(scheme.b) if isinstance(scheme, Rosenbrock) else scheme.rate_calls
    stages = correction.config.get("stages", own)
    if stages != own:
        raise CheckpointError(
            f"{folder} holds a correction of {stages} stages, and {scheme!r} has {own}. {ADVICE}"
        )
    if values is not None:
        serialization.check_values(values, equation, options["dim"], _of_states(trust), folder)
    return Parts(equation, scheme, correction, float.fromhex(config["dt"]), trust, history)


def _of_states(trust: Any) -> TrustRegion | None:
    """Return a trust region if it is one of states; that of a field knows patches only."""
    return trust if isinstance(trust, TrustRegion) else None
