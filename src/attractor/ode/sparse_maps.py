"""Linear maps of the stages with few weights.

The stages of a scheme are nearly dependent, and some of them carry the error of a component, so that
a fraction of the weights of a map explain as much of the error as all of them. Each of them takes a
multiplication in every step.
"""

import torch
from torch import Tensor

LARGER = 1.03  # times the error of the full map that a map with few weights may have
ROUNDING = 1e-13  # of targets: smaller errors are not told apart
MOST_WEIGHTS = 2_000  # of a map, beyond which the full map is taken
DEPENDENT = 1e-8  # part of a column that is not a combination of others, from which on it counts
WORSE = 1.3  # times the error on rows that were not used, up to which the map is taken

Solution = tuple[Tensor, float, float]  # weights, penalty, and mean square error on further rows


def sparse_solution(
    triangle: Tensor, check: Tensor, check_y: Tensor, full: Solution, rounding: Tensor
) -> Solution:
    """Return weights of which few are not 0; those of the full map if they are clearly better.

    Columns are chosen for each output by orthogonal matching pursuit, until its error is as
    small as that of the full map. The last column, the constant, is always used.

    Args:
        triangle: The R of a QR decomposition of ``[features, targets]``.
        check, check_y: Further rows of features and targets.
        full: The solution with all columns.
        rounding: Root of the sum of squares of the rounding errors of each target.
    """
    k = check.shape[-1]
    if len(triangle) <= k:  # fewer rows than features
        return full
    a, y, rest = triangle[:k, :k], triangle[:k, k:], triangle[k:, k:]
    size = (y.square().sum(0) + rest.square().sum(0)).sqrt()
    error = (y - a @ full[0]).square().sum(0) + rest.square().sum(0)
    allowed = LARGER**2 * error + torch.maximum(rounding, ROUNDING * size).square()
    most = min(k // 2, MOST_WEIGHTS // y.shape[-1])
    weights = torch.zeros_like(full[0])
    for output in range(y.shape[-1]):
        target = (allowed[output] - rest[:, output].square().sum()).clamp_min(0.0)
        columns = matching_pursuit(a, y[:, output], target.item(), most)
        if columns is None:
            return full
        solved = torch.linalg.lstsq(a[:, columns], y[:, output, None], rcond=1e-14, driver="gelsd")
        weights[columns, output] = solved.solution[:, 0]
    check_error = (check @ weights - check_y).square().mean().item()
    worst = WORSE**2 * full[2] + (rounding / size).square().mean().item()
    return (weights, 0.0, check_error) if check_error <= worst else full


def matching_pursuit(a: Tensor, y: Tensor, target: float, most: int) -> list[int] | None:
    """Return columns of a that explain y up to a sum of squares; None if that needs more than `most`.

    The last column is the first of them. Each further column is the one that explains the largest part
    of the remaining error.
    """
    a, y, columns = a.clone(), y.clone(), list[int]()
    size = a.norm(dim=0)
    column = a.shape[-1] - 1
    while True:
        columns.append(column)
        direction = a[:, column] / a[:, column].norm()
        for _ in range(2):  # the second time removes what rounding has left
            a -= direction[:, None] * (direction @ a)
            y -= direction * (direction @ y)
        norm = a.norm(dim=0)
        gain = torch.where(norm > DEPENDENT * size, (y @ a) / norm, 0.0).abs()
        gain[columns] = 0.0
        column = int(gain.argmax())
        if y.square().sum().item() <= target or not gain[column] > 0:
            return columns
        if len(columns) > most:
            return None
