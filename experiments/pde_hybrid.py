"""Proposition D.5: the error of cheap attention (windows, random features) that a PDE refines.

The paper bounds the distance to the exact softmax map by that at the start, plus O(exp(-alpha lambda T)
+ dt): with small steps and a long time the refined map would be as good as the cheap one, or better. The
proof takes the softmax map to be stationary under diffusion. Here the distance is measured until
alpha lambda T = 5, with two step sizes, from the exact map itself, whose distance would stay near 0,
from its larger half of entries, from a windowed map and from a Performer's.
"""

from attractor.reproduce import Effect, Experiment, Results, Scale, Verdict, decide, number

from . import pde_settings as lm

CHEAP = ("exact", "largest", "window", "performer")
STEPS = (1.0, 0.25)
ARMS = {f"{cheap}, dt {dt:g}": {"cheap": cheap, "dt": dt} for cheap in CHEAP for dt in STEPS}


def judge(results: Results) -> Verdict:
    """Whether the distance stays within the bound."""
    told = ", ".join(
        f"{arm}: {number(results.mean(arm, 'start'))} at the start, {number(results.mean(arm))} at the "
        f"end, {number(results.mean(arm, 'bound'))} allowed"
        for arm in (f"{cheap}, dt {STEPS[-1]:g}" for cheap in CHEAP)
    )
    grown = max(results.mean(arm, "grows") for arm in results.arms)
    why = (
        f"distance to the softmax map, as a part of it: {told}. A smaller dt does not help: "
        "the softmax map is not stationary under diffusion, it becomes flat. The distance to the "
        f"softmax map after the same steps {'never grew' if grown == 0 else 'grew in some step'}"
    )
    effects = [
        Effect(arm, tuple(-x for x in results.values(arm, "excess")), inclusive=True)
        for arm in results.arms
    ]
    least = min(effects, key=lambda effect: effect.value)
    measured = f"{number(-least.value)} of the map beyond the bound ({least.label})"
    return decide(effects, why, headline=least, measurement=measured)


def picture(results: Results):
    """Both distances over pseudo-time."""
    titles = ["to the softmax map as it was (D.5)", "to the softmax map after the same steps"]
    figure, axes = lm.axes_of(2, titles, "pseudo-time", "distance / size of the map", log=False)
    for i, cheap in enumerate(CHEAP):
        arm = f"{cheap}, dt {STEPS[-1]:g}"
        for axis, name in zip(axes, ("start", "truth")):
            time = results.curve(arm, "time")
            axis.plot(time, results.curve(arm, name), color=f"C{i}", label=f"from the {cheap} map")
    axes[0].legend(frameon=False, fontsize=8)
    return figure


EXPERIMENT = Experiment(
    name="pde-hybrid",
    paper="pde",
    place="Proposition D.5",
    claim="A cheap map refined by diffusion is no further from the softmax map than before, up to "
    "O(exp(-alpha lambda T) + dt).",
    task="attractor.reproduce.tasks.maps:hybrid",
    base={"alpha": 0.4, "sharpness": 1.0, "window": 8, "features": 4096},
    arms=ARMS,
    scales={
        "smoke": Scale({"tokens": 16, "decay": 1.0}, judged=False, time="1 s"),
        "cpu": Scale({"tokens": 32, "decay": 5.0}, seeds=(0, 1, 2, 3, 4), time="1 min on one core"),
    },
    metric="end",
    better="lower",
    others=("start", "bound", "truth", "stationary"),
    numbers={},
    judge=judge,
    note=(
        "The constants of the bound are not printed; 1 is taken for that of the exponential, and for "
        "that of dt the change of the softmax map in a unit of time. What does hold, and `truth` shows: "
        "diffusion never carries two maps apart."
    ),
    picture=picture,
)
