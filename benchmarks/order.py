"""Measured order of every scheme on problems with known answers.

The error is the largest over the whole trajectory, the order the slope between two step sizes.
"""

import math
import statistics

import torch

from attractor import evolve
from attractor.core.splitting import Splitting
from attractor.core.tableaus import ALL
from benchmarks.problems import PROBLEMS, Problem
from benchmarks.results import save

# Steps for each order: fine enough for the slope to settle, coarse enough to stay above rounding.
STEPS = {1: 3200, 2: 400, 3: 200, 4: 160, 5: 60, 8: 10}


def error(problem: Problem, scheme, steps: int) -> float:
    t = torch.linspace(0, problem.end, steps + 1, dtype=torch.float64)
    truth = problem.truth(t)
    return (evolve(problem.rate, truth[0], t, scheme).u - truth).abs().max().item()


def measured(problem: Problem, scheme, steps: int) -> tuple[float, float]:
    """The slope between `steps` and twice as many, and the error with the latter."""
    coarse, fine = error(problem, scheme, steps), error(problem, scheme, 2 * steps)
    return math.log2(coarse / fine), fine


def problems_for(scheme) -> list[Problem]:
    return [p for p in PROBLEMS if p.separable or not isinstance(scheme, Splitting)]


def main() -> None:
    rows = []
    print(f"{'scheme':14} {'order':>5} {'problems':>8} {'least':>7} {'median':>7} {'most':>7}")
    for scheme in ALL.values():
        slopes = {p.name: measured(p, scheme, STEPS[scheme.order])[0] for p in problems_for(scheme)}
        least, most = min(slopes.values()), max(slopes.values())
        median = statistics.median(slopes.values())
        print(
            f"{scheme.name:14} {scheme.order:5} {len(slopes):8} {least:7.3f} {median:7.3f} {most:7.3f}"
        )
        rows.append(
            {"scheme": scheme.name, "order": scheme.order, "least": least, "median": median,
             "slopes": slopes}
        )  # fmt: skip
    save("order", {"steps": STEPS, "schemes": rows})


if __name__ == "__main__":
    main()
