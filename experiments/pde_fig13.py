"""Fig. 13: alpha and beta of the four layers after training.

In the paper all PDEs have small alphas in layers 0 and 1 (0.07 to 0.11), a peak in layer 2 (0.12 to
0.15) and 0.02 to 0.03 in layer 3; beta of reaction-diffusion rises to 0.11 with depth, that of
advection-diffusion is high in the first and the last layer. The runs are those of Table 5.
"""

from itertools import pairwise

from attractor.reproduce import Effect, Experiment, Results, Scale, Verdict, decide, number

from . import pde_settings as lm
from . import pde_table5 as table

LAYERS = range(4)
ALPHAS = ((0.07, 0.11), (0.07, 0.11), (0.12, 0.15), (0.02, 0.03))  # of the paper, by layer
ARMS = {name: arm for name, arm in table.ARMS.items() if name != "standard"}


def layers(results: Results, arm: str, name: str = "coefficient") -> list[float]:
    """A coefficient of every layer."""
    return [results.mean(arm, f"{name}_{i}") for i in LAYERS]


def judge(results: Results) -> Verdict:
    """Three patterns, with walls and without: alpha peaks in layer 2 and is lowest in layer 3, the
    reaction's beta rises with depth, the advection's is lowest in the middle. The first decides; how
    many alphas are in the paper's ranges, and the betas, are told beside it."""
    right, size, told = {"alpha": [], "beta": []}, [], []
    for arm in ARMS:
        found, beta = layers(results, arm), layers(results, arm, "beta")
        right["alpha"].append((found.index(max(found)), found.index(min(found))) == (2, 3))
        if not arm.startswith("wave"):
            size += [low <= x <= high for x, (low, high) in zip(found, ALPHAS)]
        told.append(f"{arm} {', '.join(number(x) for x in found)}")
        if arm.startswith("reaction"):
            right["beta"].append(all(a < b for a, b in pairwise(beta)))
        elif arm.startswith("advection"):
            right["beta"].append(max(beta[1:-1]) < min(beta[0], beta[-1]))
        else:
            continue
        told[-1] += f" (beta {', '.join(number(x) for x in beta)})"
    why = (
        f"{sum(right['alpha'])} of {len(right['alpha'])} peak in layer 2 and are lowest in layer 3, "
        f"{sum(size)} of {len(size)} alphas are in the paper's range, {sum(right['beta'])} of "
        f"{len(right['beta'])} betas go as it says; by layer: {'; '.join(told)}"
    )
    effects = [
        Effect(f"{arm}, {where}", (gap,), deviation=lm.difference(lm.COEFFICIENT))
        for arm in ARMS
        for where, gap in patterns(layers(results, arm)).items()
    ]
    measured = f"{sum(right['alpha'])} of {len(right['alpha'])} models have the pattern of alpha"
    return decide(effects, why, measurement=measured)


def patterns(alpha: list[float]) -> dict[str, float]:
    """Return by how much layer 2 is above the highest of the others, and layer 3 below the lowest."""
    return {
        "layer 2 is highest": alpha[2] - max(alpha[:2] + alpha[3:]),
        "layer 3 is lowest": min(alpha[:3]) - alpha[3],
    }


def picture(results: Results):
    """alpha (c of the wave) on the left, beta on the right; dashed without walls."""
    figure, axes = lm.axes_of(2, ["alpha (wave: c)", "beta"], "layer", "", log=False)
    for i, word in enumerate(table.NAMES.values()):
        for kind, look in (("causal", "-"), ("without walls", "--")):
            arm = f"{word}, {kind}"
            for axis, name in zip(axes, ("coefficient", "beta")):
                if results.runs.get(arm):
                    y = layers(results, arm, name)
                    axis.plot(LAYERS, y, look, marker="o", ms=4, color=f"C{i}", label=arm)
    for axis in axes:
        axis.set_xticks(list(LAYERS))
    axes[0].legend(frameon=False, fontsize=7)
    return figure


EXPERIMENT = Experiment(
    name="pde-fig13",
    paper="pde",
    place="Fig. 13 and C.4, alpha of layer 2 (the middle of the range printed)",
    claim="alpha is 0.07 to 0.11 in layers 0 and 1, 0.12 to 0.15 in layer 2 and 0.02 to 0.03 in layer "
    "3, whatever the PDE; a reaction's beta rises with depth, an advection's is low in the middle.",
    task=lm.TASK,
    base=lm.BASE,
    arms=ARMS,
    scales={
        "smoke": Scale(lm.SMOKE, arms=("advection-diffusion, causal",), judged=False, time="1 s"),
        "gpu": Scale(lm.GPU, training=lm.SHARE, time="3 min on one H200; runs of pde-table5"),
    },
    metric="coefficient_2",
    better="",
    others=tuple(f"coefficient_{i}" for i in (0, 1, 3)) + tuple(f"beta_{i}" for i in LAYERS),
    numbers={a: 0.135 for a in ARMS if a.endswith("without walls") and not a.startswith("wave")},
    judge=judge,
    data=("wikitext2",),
    note=(
        "One coefficient a layer, started at 0.10 (the wave's c at 0.15) and kept where steps are "
        "stable: alpha below 0.5, c below 1. Where the model can read its answers, coefficients are "
        "about reading them, and say nothing about smoothing."
    ),
    picture=picture,
)
