"""Corrections that are affine maps of the state and the stages, without the weights that are 0.

Such a correction takes one multiplication for each weight of the map, which is next to nothing for a map
with few of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attractor.core.native.tracing import ScalarFunction

MOST_WEIGHTS = 2_000  # that are written one by one; larger maps are matrix products,
SPARSE = 0.5  # and so are those with a larger share of weights that are not 0
MOST_TERMS = 100  # of a loop over trajectories
MOST_KNOWN = 64  # maps that are kept, because each solve asks for one
_KNOWN: list[tuple[ScalarFunction, tuple[Tensor, ...], "AffineMap | None"]] = []


@dataclass(frozen=True)
class AffineMap:
    """What a correction adds to a step.

    Attributes:
        places: Row and column of each weight. Column i is component i of the state, and column
            ``(j + 1) * dim + i`` that of stage j.
        numbers: The weights, followed by the constant of each row.
    """

    places: tuple[tuple[int, int], ...]
    numbers: Tensor

    def lines(self, dim: int) -> list[str]:
        """Return the statements that compute the blocks `added` from the numbers in `map`."""
        lines, terms = [f"  Block added[{dim}];", "  EACH_LANE {"], 0
        for row in range(dim):
            own = [(n, column) for n, (place, column) in enumerate(self.places) if place == row]
            blocks = [f"u[{c}]" if c < dim else f"k[{c - dim}]" for _, c in own]
            weighted = [f" + map[{n}] * {block}[s]" for (n, _), block in zip(own, blocks)]
            if terms > MOST_TERMS:  # compilers make no vectors of long loops
                lines, terms = [*lines, "  }", "  EACH_LANE {"], 0
            terms += len(own)
            lines.append(f"    added[{row}][s] = map[{len(self.places) + row}]{''.join(weighted)};")
        return [*lines, "  }"]


def affine_map(function: ScalarFunction, dim: int, stages: int) -> AffineMap | None:
    """Return the map that a correction computes; None if it is not affine, or has too many weights.

    Args:
        dim: Size of a state.
        stages: Number of stages of a step.
    """
    for known, values, result in _KNOWN:
        same = known.program is function.program and len(values) == len(function.memory)
        if same and all(map(torch.equal, values, function.memory)):
            return result
    matrix, result = _matrix(function, (stages + 1) * dim), None
    count = math.inf if matrix is None else np.count_nonzero(matrix[:, :-1])
    if matrix is not None and count <= min(MOST_WEIGHTS, SPARSE * dim * (stages + 1) * dim):
        rows, columns = np.nonzero(matrix[:, :-1])
        numbers = np.concatenate((matrix[rows, columns], matrix[:, -1]))
        dtype = function.memory[0].dtype if function.memory else torch.float64
        places = tuple(zip(rows.tolist(), columns.tolist()))
        result = AffineMap(places, torch.from_numpy(numbers).to(dtype))
    _KNOWN.append((function, tuple(x.clone() for x in function.memory), result))
    del _KNOWN[:-MOST_KNOWN]
    return result


def _matrix(function: ScalarFunction, inputs: int) -> Any:
    """Return the coefficients of each output, and its constant in the last column; None without them.

    Each number of the program is computed as an array of coefficients and a constant, or as a float.
    """
    dim = len(function.outputs)
    values = [x.double().reshape(-1).numpy() for x in function.memory]
    forms: dict[int, Any] = {}
    for node in function.program.needed(function.outputs):
        operation, arguments = function.program.operations[node]
        if operation == "constant":
            forms[node] = arguments[0]
        elif operation == "leaf":
            source, place, _ = arguments[0]
            if source == "memory":
                forms[node] = float(values[place[0]][place[1]])
            elif source in ("u", "k"):
                forms[node] = np.zeros(inputs + 1)
                column = place[0] if source == "u" else (place[0] + 1) * dim + place[1]
                forms[node][column] = 1.0
            else:
                return None
        else:
            form = _combined(operation, [forms[x] for x in arguments])
            if form is None:
                return None
            forms[node] = form
    constant = np.eye(inputs + 1)[-1]
    outputs = [forms[node] for node in function.outputs]
    return np.stack([constant * x if isinstance(x, float) else x for x in outputs])


def _combined(operation: str, forms: Sequence[Any]) -> Any:
    """Return the form of an operation; None if it is not affine."""
    numbers = [isinstance(form, float) for form in forms]
    match operation:
        case "neg":
            return -forms[0]
        case "mul" if any(numbers):
            return forms[0] * forms[1]
        case "div" if numbers[1] and forms[1]:
            return forms[0] / forms[1]
        case "add" | "sub":
            first, second = forms
            if numbers[0] != numbers[1]:
                constant = np.eye(len(second if numbers[0] else first))[-1]
                first, second = (constant * x if isinstance(x, float) else x for x in forms)
            return first + second if operation == "add" else first - second
        case "dot":
            half = len(forms) // 2
            if not any(numbers[:half]):
                return np.tensordot(np.array(forms[half:]), np.stack(forms[:half]), 1)
    return None
