"""Theorems D.1 (2) and D.2 (3): how far attention gets, the stronger claims.

The abstract's: distant interactions decay polynomially instead of exponentially. And the range grows
linearly (by as many layers as sqrt(t)). The runs of pde-theorem-range.
"""

from dataclasses import replace

from attractor.reproduce import Effect, Results, Verdict, combine, decide, number

from .pde_theorem_range import EXPERIMENT as RANGE

STEPS = 4  # after which reach and tail are taken


def judge(results: Results) -> Verdict:
    """Linear: an exponent near 1. Polynomial: weight beyond what steps of a stencil reach, and at that
    distance less than half of it lost from one key to the next; (1 + 1 / 4)^-3 is half."""
    growth, reach, tail = (results.mean("diffusion", n) for n in ("exponent", "reach", "tail"))
    of = lambda name: results.values("diffusion", name)
    linear = [Effect("exponent", tuple(x - 0.9 for x in of("exponent")))]
    polynomial = [
        Effect("weight beyond the stencil", tuple(x - STEPS - 0.5 for x in of("reach")), unit="keys"),
        Effect("weight lost from one key to the next", tuple(x - 0.5 for x in of("tail"))),
    ]
    return combine([
        decide(polynomial, f"in four steps of diffusion a weight reaches {number(reach)} keys and none "
               f"beyond, the last of them has {number(tail)} of the one before",
               claim="Distant interactions decay polynomially", headline=polynomial[1],
               measurement=f"none beyond {number(reach)} keys"),
        decide(linear, f"the range of one map grows like t^{growth:.3f}",
               claim="The range grows linearly", measurement=f"t^{growth:.3f}"),
    ])  # fmt: skip


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
