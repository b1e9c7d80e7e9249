"""Theorem 2 (D.2): smoothness and variance of a map fall along pseudo-time.

The paper bounds both by falling exponentials. Here softmax maps of random queries and keys, causal (with
walls) and not, under all four PDEs: whether both fall in every step.
"""

from dataclasses import replace

from attractor.reproduce import Effect, Experiment, Results, Scale, Verdict, combine, decide, number

from . import pde_settings as lm

PDES = ("diffusion", "advection_diffusion", "reaction_diffusion", "wave")
KINDS = {"causal": True, "full": False}
ARMS = {
    f"{pde.replace('_', '-')}, {kind}": {"pde": pde, "causal": causal}
    for pde in PDES
    for kind, causal in KINDS.items()
}


def judge(results: Results) -> Verdict:
    """Both fall in every step under the PDEs that the theorem is about, and variance ends below its
    start, which is all that a falling bound asks for."""
    falls = {arm: results.mean(arm) for arm in results.arms}
    always = [arm for arm, x in falls.items() if x == 1]
    others = ", ".join(f"{arm} {100 * x:.0f} %" for arm, x in falls.items() if x < 1)
    why = f"both fall in every step under {', '.join(always)}"
    why += f"; less often under {others} of all steps" if others else ""
    ends = {arm: results.mean(arm, "variance") for arm in results.arms if not arm.startswith("wave")}
    most = max(ends, key=ends.__getitem__)
    why += f"; variance ends at up to {number(ends[most])} of its start ({most})"
    ours = [arm for arm in results.arms if not arm.startswith("wave")]
    steps = [Effect(arm, tuple(x - 1 for x in results.values(arm)), inclusive=True) for arm in ours]
    variance = [Effect(arm, tuple(1 - x for x in results.values(arm, "variance"))) for arm in ours]
    verdict = combine([
        decide(steps, others or "in every step", claim="Both fall in every step",
               measurement=f"in {100 * min(falls[a] for a in ours):.0f} to 100 % of steps",
               headline=min(steps, key=lambda e: e.value)),
        decide(variance, f"it ends at up to {number(ends[most])} of its start ({most})",
               claim="Variance ends below its start",
               measurement=f"at up to {number(ends[most])} of its start",
               headline=min(variance, key=lambda e: e.value)),
    ])  # fmt: skip
    return replace(verdict, why=f"{verdict.why}. {why[0].upper()}{why[1:]}")


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
