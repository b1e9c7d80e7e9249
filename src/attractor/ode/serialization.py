"""Equations and schemes as JSON, and whether an equation is the one that was saved.

Code is not saved: of a system of `attractor.systems` its name and options are, of any other rate its
name. Both are saved with some values, which tell a rate from another one of the same name.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attractor.core import Scheme, Splitting
from attractor.core.identity import Identity
from attractor.core.rosenbrock import Rosenbrock
from attractor.core.step import with_parameters
from attractor.core.tableau_checks import LONGEST, MOST_STAGES
from attractor.core.tableaus import IDENTITY, AnyScheme
from attractor.ode import systems
from attractor.ode.trust import TrustRegion
from attractor.storage.limits import parse_json
from attractor.storage.objects import AnyPath
from attractor.storage.schema import (
    Schema,
    any_of,
    check,
    flag,
    listing,
    null,
    number,
    plain,
    record,
    text,
    variants,
)
from attractor.storage.tensor_specs import TensorSpec, check_tensors
from attractor.train import checkpoint, generators
from attractor.train.checkpoint import CheckpointError
from attractor.train.tensors import described

TIMES = (0.0, 0.37, 1.9)  # at which the values of a rate are saved

# Schemas of the parts of a configuration. Keys that files of older versions lack are optional.
LARGEST_SYSTEM = 100_000  # components of a state, say
ORDER = number(1, 64, whole=True)
COEFFICIENTS = listing(text(LONGEST), most=MOST_STAGES)
ROWS = listing(COEFFICIENTS, most=MOST_STAGES)
SCHEME = any_of(
    record(
        {"scheme": text(), "a": ROWS, "b": COEFFICIENTS, "c": COEFFICIENTS, "order": ORDER,
         **dict.fromkeys(("b_low", "dense"), any_of(COEFFICIENTS, null))},
        {"b_lower": any_of(COEFFICIENTS, null), "dense_rows": ROWS, "dense_a": ROWS, "exact": flag},
    ),
    record({"splitting": text(), **dict.fromkeys(("kick", "drift"), COEFFICIENTS), "order": ORDER}),
    record(
        {"rosenbrock": text(), "gamma": text(LONGEST), "b": COEFFICIENTS, "order": ORDER,
         **dict.fromkeys(("a", "c", "dense_rows"), ROWS), "b_low": any_of(COEFFICIENTS, null)}
    ),
    record({"identity": flag}),
)  # fmt: skip
VALUES = {
    "values": listing(listing(number(), 1), len(TIMES), len(TIMES)),
    "times": listing(number(), len(TIMES), len(TIMES)),
}
ERROR = any_of(number(finite=False), null)  # of a candidate; null in files without infinite numbers
ENTRY = dict.fromkeys(("rollout", "median", "worst", "plain", "loss"), ERROR)
ENTRY |= dict.fromkeys(("scale", "seconds"), number()) | {"epoch": number(0, whole=True)}
ENTRY |= {"correction": text(), "state": flag, "chosen": flag}
HISTORY = listing(record({}, ENTRY, partial(plain, finite=False)))


def _options_of(system: type) -> Schema:
    """Return the schema of the options of a system."""
    size, seed = number(0, LARGEST_SYSTEM, whole=True), number(0, 2**63 - 1, whole=True)
    whole = lambda name: seed if name == "seed" else size
    fields = [f for f in dataclasses.fields(system) if f.init]
    return record({}, {f.name: whole(f.name) if f.type is int else number() for f in fields})


SYSTEMS = {
    name: record({"system": text(), "options": _options_of(getattr(systems, name))}, VALUES)
    for name in systems.__all__
    if dataclasses.is_dataclass(getattr(systems, name))
}
RATE = any_of(variants("system", SYSTEMS), record({"name": text()}, VALUES))


def is_system(rate: Any) -> bool:
    """Return whether a rate is one of `attractor.systems`, not another class of the same name."""
    name = type(rate).__name__
    return name in systems.__all__ and type(rate) is getattr(systems, name)


def rate_to_json(rate: Any) -> dict[str, Any]:
    """Return what is saved of a rate: name and options of a system, the name of a function."""
    if is_system(rate):
        options = {f.name: getattr(rate, f.name) for f in dataclasses.fields(rate) if f.init}
        return {"system": type(rate).__name__, "options": options}
    return {"name": getattr(rate, "__qualname__", type(rate).__qualname__)}


def rate_from_json(saved: dict[str, Any]) -> Any:
    """Return the system that was saved; None if it was a rate of the user's own."""
    if "system" not in saved:
        return None
    return getattr(systems, saved["system"])(**saved["options"])


@dataclasses.dataclass(frozen=True)
class Values:
    """What a rate returns for some states, which tells it from other rates.

    Attributes:
        times: The time of each state ``[3]``; the first versions used 0 for all.
        rates: The rate there ``[3, dim]``, in float64.
    """

    times: tuple[float, ...]
    rates: Tensor


def values_to_json(rate: Any, dim: int | None, trust: TrustRegion | None) -> dict[str, Any]:
    """Return some values of a rate as JSON; nothing if it cannot be called."""
    rates = None if dim is None else _rates_of(rate, TIMES, *_states_of(dim, trust))
    return {} if rates is None else {"values": rates.tolist(), "times": list(TIMES)}


def values_from_json(saved: dict[str, Any], dim: int) -> Values | None:
    """Return the values of `values_to_json`; None if there are none."""
    if "values" not in saved:
        return None
    rates = torch.tensor(saved["values"], dtype=torch.float64)
    if rates.shape[1:] != (dim,):
        raise ValueError(f"values of its rate have shape {list(rates.shape)}, not [3, {dim}]")
    return Values(tuple(float(t) for t in saved.get("times", (0.0, 0.0, 0.0))), rates)


def check_values(
    saved: Values, rate: Any, dim: int, trust: TrustRegion | None, folder: AnyPath | str
) -> None:
    """Raise if a rate has other values than the one that was saved.

    Raises:
        CheckpointError: It has.
    """
    states, parameters = _states_of(dim, trust)
    rates = _rates_of(rate, saved.times, states, parameters)
    if rates is None:
        return
    difference = (rates - saved.rates).abs().amax(1)
    if bool((difference > 1e-6 * saved.rates.abs().max()).any()):
        i = int(difference.argmax())
        u, before, now = (_row(x[i]) for x in (states, saved.rates, rates))
        raise CheckpointError(
            f"{folder} was fitted to another equation: at t = {saved.times[i]:g} and u = {u} its rate "
            f"was {before}, and this one is {now}; pass the equation of the fit as rate="
        )


def _states_of(dim: int, trust: TrustRegion | None) -> tuple[Tensor, Tensor | None]:
    """Some states ``[3, dim]`` and parameters, in the trust region if it is one of states."""
    mean = torch.zeros(dim, dtype=torch.float64) if trust is None else trust.mean
    deviation = torch.ones_like(mean) if trust is None else trust.deviation
    size = len(mean)
    signs = torch.tensor([1.0, -1.0]).to(mean).repeat(size)[:size]
    points = torch.stack([mean + x * signs * deviation for x in (0.0, 0.4, -0.7)])
    return points[:, :dim], points[:, dim:] if size > dim else None


def _rates_of(
    rate: Any, times: Sequence[float], states: Tensor, parameters: Tensor | None
) -> Tensor | None:
    """The rate of each state at its time, in float64; None if it cannot be called with them, since it
    requires batches of another shape, or is not finite there."""
    try:
        with torch.no_grad():
            clock = torch.tensor(times, dtype=states.dtype, device=states.device)
            rows = [with_parameters(rate, parameters)(t, states) for t in clock]
            rates = torch.stack([row[i] for i, row in enumerate(rows)]).double().cpu()
    except Exception:
        return None
    return rates if rates.shape == states.shape and bool(torch.isfinite(rates).all()) else None


def _row(x: Tensor) -> str:
    return "[" + ", ".join(f"{value:.4g}" for value in x.tolist()) + "]"


def history_to_json(history: list[dict[str, Any]]) -> str:
    """Return the history of a fit as text, in which an infinite error stays infinite."""
    return json.dumps(history)


def history_from_json(saved: Any, source: AnyPath | str) -> list[dict[str, Any]]:
    """Return the history of a fit; the first versions wrote it as a list.

    Raises:
        CheckpointError: It is not the history of a fit.
    """
    if isinstance(saved, str):
        with described(source, "the history of a fit"):
            saved = parse_json(saved, "the history", constants=True)
    check(saved, HISTORY, f"{source}: history", CheckpointError)
    return saved


def scheme_to_json(scheme: AnyScheme) -> dict[str, Any]:
    """Return the coefficients of a scheme."""
    if isinstance(scheme, Identity):
        return {"identity": True}
    if isinstance(scheme, Splitting):
        parts = {k: [x.hex() for x in getattr(scheme, k)] for k in ("kick", "drift")}
        return {"splitting": scheme.name, **parts, "order": scheme.order}
    if isinstance(scheme, Rosenbrock):
        text = lambda row: None if row is None else [x.hex() for x in row]
        rows = {key: [text(x) for x in getattr(scheme, key)] for key in ("a", "c", "dense_rows")}
        return {
            "rosenbrock": scheme.name, "gamma": scheme.gamma.hex(), **rows, "b": text(scheme.b),
            "b_low": text(scheme.b_low), "order": scheme.order,
        }  # fmt: skip
    # Coefficients that were floats are written as such, for their checks are not exact.
    text_of = lambda x: str(x) if scheme.exact else float(x).hex()
    listed = lambda row: None if row is None else [text_of(x) for x in row]
    return {
        "scheme": scheme.name,
        **{key: [listed(row) for row in getattr(scheme, key)] for key in ("a", "dense_rows", "dense_a")},
        **{key: listed(getattr(scheme, key)) for key in ("b", "c", "b_low", "dense", "b_lower")},
        "order": scheme.order,
        "exact": scheme.exact,
    }


def scheme_from_json(saved: dict[str, Any]) -> AnyScheme:
    """Return the scheme of `scheme_to_json`."""
    if saved.get("identity"):
        return IDENTITY
    if "splitting" in saved:
        kick, drift = ([float.fromhex(x) for x in saved[k]] for k in ("kick", "drift"))
        return Splitting(saved["splitting"], kick, drift, saved["order"])
    if "rosenbrock" in saved:
        read = lambda row: [float.fromhex(x) for x in row]
        a, c, dense_rows = ([read(row) for row in saved[key]] for key in ("a", "c", "dense_rows"))
        gamma, b = float.fromhex(saved["gamma"]), read(saved["b"])
        b_low = None if saved["b_low"] is None else read(saved["b_low"])
        return Rosenbrock(saved["rosenbrock"], gamma, a, c, b, saved["order"], b_low, dense_rows)
    number = str if saved.get("exact", True) else float.fromhex
    row = lambda values: None if values is None else [number(x) for x in values]
    parts: dict[str, Any] = {key: row(saved[key]) for key in ("b", "c", "b_low", "dense")}
    parts |= {key: [row(x) for x in saved.get(key, [])] for key in ("a", "dense_rows", "dense_a")}
    # Older files have neither of the last three.
    return Scheme(saved["scheme"], **parts, order=saved["order"], b_lower=row(saved.get("b_lower")))


def module_from_tensors(
    make: Callable[..., Any], tensors: dict[str, Tensor], prefix: str, folder: AnyPath | str
) -> Any:
    """Return a module with the saved tensors, in their dtype; names and shapes must fit exactly."""
    own = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
    dtypes = {v.dtype for v in own.values() if v.is_floating_point()}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float64
    shell = make(dtype=dtype, device="meta")
    checkpoint.check(shell, checkpoint.completed(shell, own), folder)  # before memory is taken
    finite = {name: TensorSpec(tuple(x.shape), (x.dtype,)) for name, x in own.items()}
    check_tensors(own, finite, folder, CheckpointError)  # buffers as well
    with generators.own():  # its first weights are not kept
        module = make(dtype=dtype)
    checkpoint.fill(module, checkpoint.completed(module, own), folder)
    return module
