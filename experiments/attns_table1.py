"""Table 1: depth and width of Q, with what a step costs.

The paper gives speed relative to its own setting; here "step" is a hybrid step's time over a plain RK4
step's, both in float32 and in the same run, all test states at once.
"""

import math
from typing import Any

from attractor.reproduce import (
    Effect,
    Experiment,
    Results,
    Scale,
    Verdict,
    all_of,
    compare,
    decide,
    number,
)
from attractor.reproduce.tasks.solver_settings import CEILING

from .attns_shared import (
    CPU,
    GPU,
    LENGTHS,
    LONG,
    SEEDS,
    SMOKE,
    SOLVE,
    UNPRINTED,
    against,
    arms,
    frame,
    mean_of_finite,
    name,
    too_short,
    typical,
)

SYSTEMS = ("spring-mass", "2-link", "elastic")
WIDTHS = (512, 1024, 2048)
KINDS = {
    "h = 2, width 1024": {"depth": 2, "width": 1024},
    "h = 3, width 1024": {"depth": 3, "width": 1024},
    "h = 4, width 1024": {"depth": 4, "width": 1024},
    "h = 2, width 512": {"depth": 2, "width": 512},
    "h = 2, width 2048": {"depth": 2, "width": 2048},
}
FAIR = {
    "h = 2, width 256": {"depth": 2, "width": 256},
    "h = 2, width 512": {"depth": 2, "width": 512},
    "h = 2, width 1024": {"depth": 2, "width": 1024},
    "h = 3, width 512": {"depth": 3, "width": 512},
}
NUMBERS = {
    "spring-mass": (2.58e-6, 2.49e-6, 2.55e-6, 3.76e-5, 2.41e-6),
    "2-link": (4.26e-9, 4.39e-9, 4.42e-9, 2.56e-8, 3.98e-9),
    "elastic": (5.41e-7, 5.28e-7, 5.58e-7, 2.56e-6, 4.83e-7),
}
# Networks with one hidden layer are quick to train: the three widths also for as long as the paper's.
ENDS = {f"width {w}, long": {"width": w} if w != 1024 else {} for w in WIDTHS}
OURS, SLOW = "h = 2, width 1024", "h = 3, width 1024"
LITTLE = 1.5  # factor between errors that are said to differ little
TICKS = (1, 2, 5, 10, 20, 50)


def wider(results: Results) -> Verdict:
    """Width lowers the error: from 512 to 2,048, trained for as long as was possible."""
    effects, texts = [], []
    for system in SYSTEMS:
        arms = [name(system, what, "paper") for what in ENDS]
        effects.append(against(results, arms[-1], arms[0], f"{system}, width 2,048 against 512"))
        errors = ", ".join(number(typical(results, arm)) for arm in arms)
        limit = f" ({effects[-1].limitation})" if effects[-1].limitation else ""
        texts.append(f"{system} {errors}{limit}")
    why = f"errors of widths 512, 1,024 and 2,048: {'; '.join(texts)} ({decide(effects).tally()})"
    return decide(effects, why, claim="Width lowers the error")


def deeper(results: Results) -> Verdict:
    """Depth changes the error by less than a factor of 1.5 either way."""
    effects, texts = [], []
    for system in SYSTEMS:
        arms = [name(system, f"h = {h}, width 1024", "paper") for h in (2, 3, 4)]
        lost = any(max(results.values(arm)) >= CEILING for arm in arms)
        limit = "; ".join(filter(None, ["trajectories are lost" * lost, too_short(results, arms)]))
        for arm in arms[1:]:
            shift = against(results, arm, arms[0])
            samples = tuple(math.log(LITTLE) - abs(x) for x in shift.samples)
            effects.append(Effect(arm, samples, None, "", True, None, limit))
        shallow, *deep = (typical(results, arm) for arm in arms)
        ratios = " and ".join(number(error / shallow) for error in deep)
        texts.append(f"{system} {'not known, trajectories are lost' if lost else ratios}")
    why = f"errors of h = 3 and 4 over that of h = 2: {'; '.join(texts)}"
    return decide(
        effects, why, claim="Depth has little effect on the error", headline=mean_of_finite(effects)
    )


def slower(results: Results) -> Verdict:
    """Depth makes a step slower."""
    effects, texts = [], []
    for system in SYSTEMS:
        arms = [name(system, f"h = {h}, width 1024", "paper") for h in (2, 3, 4)]
        effects.append(
            compare(
                results, arms[2], arms[0], metric="step", ratio=True, label=f"{system}, h = 4 over 2"
            )
        )
        texts.append(f"{system} {', '.join(number(typical(results, arm, 'step')) for arm in arms)}")
    why = f"a step of h = 2, 3 and 4 takes as long as so many plain ones: {'; '.join(texts)}"
    caveat = "part of what depth costs is a kernel for h = 2, which deeper networks do not have"
    return decide(effects, why, claim="Depth costs speed", caveat=caveat)


def picture(results: Results) -> Any:
    """Error against the cost of a step, for the systems that were run; hollow: trajectories lost."""
    from attractor.report.figures import plt

    shown = [s for s in SYSTEMS if any(results.runs.get(name(s, k, "paper")) for k in KINDS)]
    figure, axes = plt.subplots(1, len(shown), figsize=(4 * len(shown) + 2.4, 3.6), squeeze=False)
    for axis, s in zip(axes[0], shown):
        points = [(what, what, "paper", "o") for what in KINDS]
        points += [(what, f"h = 2, {what.split(',')[0]}", "paper", "s") for what in ENDS]
        points += [(what, what, "default", "D") for what in FAIR]
        for k, (what, timed, r, mark) in enumerate(points):
            arm = name(s, what, r)
            if results.runs.get(arm):
                x, y = typical(results, name(s, timed, r), "step"), typical(results, arm)
                color = plt.get_cmap("tab20")(2 * k % 20 + k // 10)
                lost = max(results.values(arm)) >= CEILING
                # What lost trajectories has no error: on the frame's upper edge, hollow.
                top = axis.get_xaxis_transform() if lost else axis.transData
                axis.plot(
                    [x], [1.0 if lost else y], mark, color=color, mfc="white" if lost else color, ms=6,
                    transform=top, clip_on=False, label=f"{what}, {r}",
                )  # fmt: skip
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.autoscale_view()
        axis.set_xticks(TICKS, [str(x) for x in TICKS])
        axis.minorticks_off()
        y = "mean square error" if s == shown[0] else ""
        gone = any(line.get_mfc() == "white" for line in axis.lines)
        frame(
            axis,
            f"{s}{' (hollow: trajectories lost)' * gone}",
            "a step's time over a plain RK4 step's",
            y,
        )
    most = max((axis.get_legend_handles_labels() for axis in axes[0]), key=lambda found: len(found[1]))
    axes[0][-1].legend(*most, frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    return figure


EXPERIMENT = Experiment(
    name="attns-table1",
    paper="attns",
    place="Table 1, all rows",
    claim="Depth has little effect on the error, width lowers it; depth costs most of the speed.",
    task=SOLVE,
    arms={
        **arms(SYSTEMS, KINDS, ("paper",), speed=True),
        **arms(SYSTEMS, ENDS, ("paper",), epochs=LONG),
        **arms(("2-link",), FAIR, ("default",), speed=True),
    },
    base={"correction": "attns"},
    scales={
        "smoke": Scale({**SMOKE, "train": 10}, judged=False, time="4 s", arms=tuple(
            name(s, what, "paper") for s in ("spring-mass", "2-link") for what in (OURS, SLOW)
        )),
        "cpu": Scale({**CPU, "train": 500, "epochs": 40}, arms=(
            *(name("2-link", what, "paper") for what in KINDS), *arms(("2-link",), FAIR, ("default",))
        ), judged=False, time="30 min on 2 cores",
           note="Here 500 trajectories and 40 epochs in batches of 2,048, 960 updates."),
        "gpu": Scale({**GPU, "epochs": {"spring-mass": 50, "2-link": 12, "elastic": 2}}, SEEDS,
                     training="width: 100 %, elastic 20 %; depth: 0.4 to 10 %",
                     time="8 min on one H200; one run at a time, for the times of steps",
                     note="Here 1,220 to 1,500 updates on every system; three widths also "
                     f"long: {LENGTHS}."),
    },
    metric="mse",
    better="lower",
    numbers={
        name(s, what, "paper"): value
        for s in SYSTEMS
        for what, value in zip((*KINDS, *ENDS), (*NUMBERS[s], *(NUMBERS[s][i] for i in (3, 0, 4))))
    },
    others=("step", "plain", "updates"),
    judge=all_of(wider, deeper, slower),
    logarithmic=True,
    note=f"{UNPRINTED} The paper gives times of a network relative to its own; \"step\" is a hybrid "
    "step's time over a plain step's, which is what one pays: h = 2 by a kernel of ours, which deeper "
    "networks do not have, so that part of what depth costs is that kernel.",
    picture=picture,
)  # fmt: skip
