"""The state of an optimiser as tensors by name, for checkpoints."""

from typing import Any

import torch
from torch import Tensor

from attractor.storage.objects import AnyPath
from attractor.storage.tensor_specs import FLOATS, TensorSpec, check_tensors
from attractor.train.checkpoint import CheckpointError
from attractor.train.recent_checkpoints import ADVICE

# Entries of the state per parameter. Other optimisers have entries of their own.
ENTRIES = {"sgd": {"momentum_buffer"}, "adamw": {"step", "exp_avg", "exp_avg_sq"}}
NUMBER = ":number"  # suffix of the names of entries that are Python numbers


def optimiser_tensors(optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the state of an optimiser as tensors by the index of a parameter and the entry.

    Raises:
        TypeError: an entry is neither a tensor nor a number nor None.
    """
    tensors = {}
    for index, entries in optimiser.state_dict()["state"].items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{key}"] = value
            elif isinstance(value, int | float):
                tensors[f"{index}.{key}{NUMBER}"] = torch.tensor(
                    value, dtype=torch.float64 if isinstance(value, float) else None
                )
            elif value is not None:
                raise TypeError(
                    f"the state of {type(optimiser).__name__} has {key!r} of type "
                    f"{type(value).__name__}, which a checkpoint cannot hold; use tensors or numbers "
                    "there, or train without out="
                )
    return tensors


def load_optimiser_state(
    optimiser: torch.optim.Optimizer, tensors: dict[str, Tensor], name: Any, folder: AnyPath
) -> None:
    """Restore the state of an optimiser; each tensor gets the memory layout of its parameter.

    Args:
        optimiser: the optimiser.
        tensors: the result of `optimiser_tensors`.
        name: "sgd" or "adamw", whose entries are checked; a function for any other optimiser.
        folder: the checkpoint, for error messages.

    Raises:
        CheckpointError: the tensors are not a state of this optimiser.
    """
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    rates = [group["lr"] for group in optimiser.param_groups]
    advice = f"{ADVICE[0].upper()}{ADVICE[1:]}."
    if name in ENTRIES:
        specs = {
            f"{i}.{key}": TensorSpec((), FLOATS)
            if key == "step"
            else TensorSpec(tuple(p.shape), (p.dtype,))
            for i, p in enumerate(parameters)
            for key in ENTRIES[name]
        }
        source = f"{folder} has a state that the optimiser does not"
        check_tensors(tensors, specs, source, CheckpointError, optional=specs, advice=advice)
    state: dict[int, dict[str, Any]] = {}
    for path, value in tensors.items():
        index, _, key = path.partition(".")
        if not index.isdecimal() or int(index) >= len(parameters):
            raise CheckpointError(f"{folder} has a state of a parameter {index[:20]!r}. {advice}")
        like = parameters[int(index)]
        entry: Any = value
        if key.endswith(NUMBER):
            key, entry = key.removesuffix(NUMBER), value.item()
        elif value.shape == like.shape:
            entry = torch.empty_like(like, dtype=value.dtype).copy_(value)
        state.setdefault(int(index), {})[key] = entry
    if name in ENTRIES and any(set(entries) != ENTRIES[name] for entries in state.values()):
        raise CheckpointError(f"{folder} has only a part of the optimiser's state; {ADVICE}")
    optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
    for group, rate in zip(optimiser.param_groups, rates):
        group["lr"] = rate  # the same tensor object, because a captured step reads it
