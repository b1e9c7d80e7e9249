"""Theorem 2 (D.2): smoothness and variance of a map fall along pseudo-time.

The paper bounds both by falling exponentials. Here softmax maps of random queries and keys, causal (with
walls) and not, under all four PDEs: whether both fall in every step.
"""

from attractor.reproduce import DIRECTION, FAILS, HOLDS, Experiment, Results, Scale, Verdict
from attractor.reproduce.verdict import number

from . import pde_settings as lm

PDES = ("diffusion", "advection_diffusion", "reaction_diffusion", "wave")
KINDS = {"causal": True, "full": False}
ARMS = {
    f"{pde.replace('_', '-')}, {kind}": {"pde": pde, "causal": causal}
    for pde in PDES
    for kind, causal in KINDS.items()
}


def judge(results: Results) -> Verdict:
    """Whether both fall in every step. In direction if they do under diffusion alone; not if variance
    ends above its start under a PDE that the theorem is about: no falling bound allows that."""
    falls = {arm: results.mean(arm) for arm in results.arms}
    always = [arm for arm, x in falls.items() if x == 1]
    others = ", ".join(f"{arm} {100 * x:.0f} %" for arm, x in falls.items() if x < 1)
    why = f"both fall in every step under {', '.join(always)}"
    why += f"; less often under {others} of all steps" if others else ""
    ends = {arm: results.mean(arm, "variance") for arm in results.arms if not arm.startswith("wave")}
    most = max(ends, key=ends.__getitem__)
    why += f"; variance ends at up to {number(ends[most])} of its start ({most})"
    if all(x == 1 for x in falls.values()):
        return Verdict(HOLDS, why)
    smooth = falls["diffusion, causal"] == falls["diffusion, full"] == 1 and ends[most] < 1
    return Verdict(DIRECTION if smooth else FAILS, why)


def picture(results: Results):
    """Both measures, as parts of those at the start."""
    figure, axes = lm.axes_of(2, ["smoothness |L A|²", "variance"], "pseudo-time", "part of the start")
    for i, arm in enumerate(results.arms):
        for axis, name in zip(axes, ("smoothness", "variance")):
            look = "--" if arm.endswith("full") else "-"
            y = results.curve(arm, name)
            axis.plot(results.curve(arm, "time"), y, look, color=f"C{i // 2}", label=arm)
    axes[1].legend(frameon=False, fontsize=7)
    return figure


EXPERIMENT = Experiment(
    name="pde-theorem2",
    paper="pde",
    place="Theorem 2 and Theorem D.2 (1, 2)",
    claim="Smoothness |L A|² and variance of a map fall along pseudo-time.",
    task="attractor.reproduce.tasks.maps:smoothing",
    base={"sharpness": 2.0, "dt": 1.0},
    arms=ARMS,
    scales={
        "smoke": Scale({"tokens": 32, "steps": 8}, judged=False, time="1 s"),
        "cpu": Scale({"tokens": 128, "steps": 64}, seeds=(0, 1, 2, 3, 4), time="20 s on one core"),
    },
    metric="falls",
    better="higher",
    others=("smoothness", "variance", "mass"),
    numbers={},
    judge=judge,
    note=(
        "The metric is the part of steps in which both fall, which is stricter than the theorem's "
        "bound for smoothness (that has a constant beside the decay) and weaker than that for "
        "variance. It is about diffusion with a reaction that is Lipschitz; a wave only moves weight "
        "and is shown beside it. A reaction A (1 - A) adds weight, so that rows no longer sum to 1 "
        "(mass)."
    ),
    picture=picture,
)
