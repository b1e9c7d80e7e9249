"""Theorems D.1 (2) and D.2 (3): how far attention gets, the stronger claims.

The abstract's: distant interactions decay polynomially instead of exponentially. And the range grows
linearly (by as many layers as sqrt(t)). The runs of pde-theorem-range.
"""

from dataclasses import replace

from attractor.reproduce import DIRECTION, FAILS, HOLDS, Results, Verdict
from attractor.reproduce.verdict import number

from .pde_theorem_range import EXPERIMENT as RANGE

STEPS = 4  # after which reach and tail are taken


def judge(results: Results) -> Verdict:
    """Linear: an exponent near 1. Polynomial: weight beyond what steps of a stencil reach, and at that
    distance less than half of it lost from one key to the next; (1 + 1 / 4)^-3 is half."""
    growth, reach, tail = (results.mean("diffusion", n) for n in ("exponent", "reach", "tail"))
    linear, polynomial = growth > 0.9, reach > STEPS and tail > 0.5
    why = (
        f"in four steps of diffusion a weight reaches {number(reach)} keys and none beyond, the last of "
        f"them has {number(tail)} of the one before; the range of one map grows like t^{growth:.3f}"
    )
    word = HOLDS if linear and polynomial else DIRECTION if linear or polynomial else FAILS
    return Verdict(word, why)


EXPERIMENT = replace(
    RANGE,
    name="pde-theorem-tail",
    place="Theorems D.1 (2) and D.2 (3), and the abstract",
    claim="Distant interactions decay polynomially instead of exponentially; the range grows linearly.",
    metric="tail",
    others=("reach", "exponent"),
    numbers={},
    judge=judge,
    note=(
        "One step of a stencil moves weight by one key, so after n steps there is nothing beyond n "
        "keys, and what is there falls faster than exponentially. What far tokens have to do with each "
        "other is the softmax's, as without a PDE."
    ),
    picture=None,
)
