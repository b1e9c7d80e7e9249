"""Table 1: depth and width of Q, with what a step costs.

The paper gives speed relative to its own setting; here "step" is a hybrid step's time over a plain RK4
step's, both in float32 and in the same run, all test states at once.
"""

from typing import Any

from attractor.reproduce import DIRECTION, FAILS, HOLDS, Experiment, Results, Scale, Verdict
from attractor.reproduce.verdict import number

from .attns_shared import (
    CPU,
    GPU,
    SEEDS,
    SMOKE,
    SOLVE,
    UNPRINTED,
    arms,
    cautious,
    frame,
    name,
    typical,
)

SYSTEMS = ("spring-mass", "2-link", "elastic")
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
OURS, HALF = "h = 2, width 1024", "h = 2, width 512"
TICKS = (1, 2, 5, 10, 20, 50)


def judge(results: Results) -> Verdict:
    """Depth changes the error by less than a factor of 1.5 either way and makes a step slower; width
    makes the error smaller."""
    depth, width, told = [], [], []
    for s in SYSTEMS:
        error = {k: typical(results, name(s, k, "paper")) for k in KINDS}
        cost = {k: typical(results, name(s, k, "paper"), "step") for k in KINDS}
        ratios = [error[f"h = {h}, width 1024"] / error[OURS] for h in (3, 4)]
        slower = cost[OURS] < cost["h = 3, width 1024"] < cost["h = 4, width 1024"]
        depth.append(slower and all(1 / 1.5 < r < 1.5 for r in ratios))
        width.append(error[HALF] > error[OURS] and error[OURS] > error["h = 2, width 2048"])
        told.append(
            f"{s}: error of h = 3 and 4 over h = 2 {number(ratios[0])} and {number(ratios[1])}, of "
            f"width 512 and 2048 over 1024 {number(error[HALF] / error[OURS])} and "
            f"{number(error['h = 2, width 2048'] / error[OURS])}, a step costs {number(cost[OURS])} "
            f"(h = 2) and {number(cost['h = 3, width 1024'])} (h = 3) plain ones"
        )
    good = sum(depth) + sum(width)
    word = HOLDS if good == 2 * len(SYSTEMS) else DIRECTION if all(width) else FAILS
    paper = [name(s, k, "paper") for s in SYSTEMS for k in KINDS]
    return cautious(results, paper, Verdict(word, "; ".join(told)))


def picture(results: Results) -> Any:
    """Error against the cost of a step, for the systems that were run."""
    from attractor.report.figures import plt

    shown = [s for s in SYSTEMS if any(results.runs.get(name(s, k, "paper")) for k in KINDS)]
    figure, axes = plt.subplots(1, len(shown), figsize=(4 * len(shown) + 2.4, 3.6), squeeze=False)
    for axis, s in zip(axes[0], shown):
        for r, fill in (("paper", None), ("default", "none")):
            for k, what in enumerate(KINDS if r == "paper" else FAIR):
                arm = name(s, what, r)
                if not results.runs.get(arm):
                    continue
                x, y = typical(results, arm, "step"), typical(results, arm)
                color = plt.get_cmap("tab10")(k + (5 if r == "default" else 0))
                axis.loglog(
                    [x], [min(y, 1e12)], "o", color=color, mfc=fill or color, label=f"{what}, {r}"
                )
        axis.set_xticks(TICKS, [str(x) for x in TICKS])
        axis.minorticks_off()
        y = "mean square error" if s == shown[0] else ""
        frame(axis, s, "a step's time over a plain RK4 step's", y)
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
    arms={**arms(SYSTEMS, KINDS, ("paper",)), **arms(("2-link",), FAIR, ("default",))},
    base={"correction": "attns", "speed": True},
    scales={
        "smoke": Scale({**SMOKE, "train": 10}, judged=False, time="4 s", arms=tuple(
            name(s, what, "paper") for s in ("spring-mass", "2-link") for what in (OURS, HALF)
        )),
        "cpu": Scale({**CPU, "train": 500, "epochs": 40}, arms=(
            *(name("2-link", what, "paper") for what in KINDS), *arms(("2-link",), FAIR, ("default",))
        ), judged=False, time="30 min on 2 cores",
           note="Here 500 trajectories and 40 epochs in batches of 2,048, 960 updates."),
        "gpu": Scale({**GPU, "epochs": {"spring-mass": 40, "2-link": 10, "elastic": 2}}, SEEDS,
                     time="6 min on one H200",
                     note="Here 1,200 updates on every system, 8 %, 2 % and 0.4 % of the epochs."),
    },
    metric="mse",
    better="lower",
    numbers={
        name(s, what, "paper"): value
        for s in SYSTEMS
        for what, value in zip(KINDS, NUMBERS[s])
    },
    others=("step", "plain", "updates"),
    judge=judge,
    logarithmic=True,
    note=f"{UNPRINTED} The paper gives times of a network relative to its own; \"step\" is a hybrid "
    "step's time over a plain step's, which is what one pays.",
    picture=picture,
)  # fmt: skip
