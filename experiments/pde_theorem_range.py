"""Theorem 1: how the range of attention grows with pseudo-time.

The paper says that it grows like sqrt(t). Here the spread of softmax maps in which every query looks for
one key, step by step; and how far a single weight gets in the four steps that the paper takes.
"""

from attractor.reproduce import Effect, Experiment, Results, Scale, Verdict, decide

from . import pde_settings as lm

PDES = {
    "diffusion": {}, "advection-diffusion": {"pde": "advection_diffusion"},
    "reaction-diffusion": {"pde": "reaction_diffusion"}, "wave": {"pde": "wave"},
}  # fmt: skip
CLOSE = 0.05  # of the exponent 1/2
SIZE = {"tokens": 128, "steps": 100}


def judge(results: Results) -> Verdict:
    """Whether the exponent of diffusion is a half."""
    half, wave = results.mean("diffusion"), results.mean("wave")
    rate = results.mean("diffusion", "rate")
    why = (
        f"the range of diffusion grows like t^{half:.3f}, its square by {rate:.3f} of 2 alpha t; the "
        f"wave's like t^{wave:.3f}"
    )
    values = results.values("diffusion")
    return decide([Effect("exponent", tuple(CLOSE - abs(x - 0.5) for x in values))], why,
                  measurement=f"t^{half:.3f}")  # fmt: skip


def picture(results: Results):
    """Range against time, both logarithmic, and slopes 1/2 and 1."""
    figure, (axis,) = lm.axes_of(1, ["maps of single peaks"], "pseudo-time", "range (keys)")
    axis.set_xscale("log")
    for i, arm in enumerate(results.arms):
        axis.plot(results.curve(arm, "time"), results.curve(arm, "range"), color=f"C{i}", label=arm)
    t = results.curve("diffusion", "time")
    for power, look in ((0.5, ":"), (1.0, "--")):
        axis.plot(t, [0.1 * x**power for x in t], look, color="#1b1f24", lw=0.9, label=f"t^{power:g}")
    axis.legend(frameon=False, fontsize=8)
    return figure


EXPERIMENT = Experiment(
    name="pde-theorem-range",
    paper="pde",
    place="Theorem 1",
    claim="The effective range of attention grows like sqrt(t).",
    task="attractor.reproduce.tasks.maps:spreading",
    base={"pde": "diffusion", "sharpness": 4.0, "dt": 1.0},
    arms=PDES,
    scales={
        "smoke": Scale({"tokens": 64, "steps": 20}, judged=False, time="1 s"),
        "cpu": Scale(SIZE, seeds=(0, 1, 2, 3, 4), time="20 s on one core"),
    },
    metric="exponent",
    better="",
    others=("rate", "reach", "tail"),
    numbers={"diffusion": 0.5},
    judge=judge,
    note=(
        "Range² is the mean square distance of a row's weight from its mean key, less that of the "
        "first map; so taken, that of diffusion is 2 alpha t where no wall is near, and what is tested "
        "is that steps keep it. With an alpha of 0.1 and four steps of size 1 a peak spreads over 0.9 "
        "keys; the paper prints no size of steps."
    ),
    picture=picture,
)
