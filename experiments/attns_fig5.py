"""Fig. 5: noise of 1e-5 on the states of training, elastic pendulum, several amounts of data.

"Constant noise sigma = 1e-5 to u_n for all n" has two readings: independent noise of that size on every
state, and the number 1e-5 added to every state that a step starts from. Both are here; the second
makes a correction learn to subtract 1e-5 in every step, which the test does not need.
"""

from typing import Any

from attractor.reproduce import FAILS, HOLDS, Experiment, Results, Scale, Verdict
from attractor.reproduce.verdict import number

from .attns_shared import CPU, GPU, SEEDS, SMOKE, SOLVE, arms, corrections, dots, name, typical

SHARES = (0.25, 0.5, 1.0)
NOISE = 1e-5
PAIR = corrections("attns", "neurvec")


def label(what: str, share: float) -> str:
    """A kind of arm."""
    return f"{what} at {share:.0%}".replace("%", " %")


NORMAL = {
    label(what, share): {**kind, "share": share, "noise": NOISE}
    for share in SHARES
    for what, kind in PAIR.items()
}
CONSTANT = {
    f"{what} at 50 %, constant": {**kind, "share": 0.5, "noise": NOISE, "kind": "constant"}
    for what, kind in PAIR.items()
}
QUIET = {f"{what} at 50 %, no noise": {**kind, "share": 0.5} for what, kind in PAIR.items()}


def judge(results: Results) -> Verdict:
    """The paper: NeurVec explodes in all settings, AttNS stays stable and is better."""
    told, good = [], []
    for share in SHARES:
        ours, theirs = (name("elastic", label(w, share), "paper") for w in PAIR)
        a, b = typical(results, ours), typical(results, theirs)
        lost = max(results.values(ours, "lost")), max(results.values(theirs, "lost"))
        good.append(a < b and lost[0] == 0)
        told.append(
            f"{number(a)} against {number(b)} at {share:.0%}, lost {lost[0]:.0%} and {lost[1]:.0%}"
        )
    fair = [
        typical(results, name("elastic", label("AttNS", s), "default"))
        / typical(results, name("elastic", label("NeurVec", s), "default"))
        for s in SHARES
    ]
    default = f"default recipe: AttNS over NeurVec {number(min(fair))} to {number(max(fair))}"
    return Verdict(
        HOLDS if all(good) else FAILS,
        f"AttNS against NeurVec with noise: {'; '.join(told)}; {default}".replace("%", " %"),
    )


def picture(results: Results) -> Any:
    """A panel a recipe."""
    panels = {
        f"{r} recipe": {
            f"{s:.0%}".replace("%", " %"): [name("elastic", label(w, s), r) for w in PAIR]
            for s in SHARES
        }
        for r in ("paper", "default")
    }
    plain = typical(results, name("elastic", label("AttNS", 1.0), "default"), "plain")
    return dots(results, panels, {title: {"RK4 alone": plain} for title in panels})


EXPERIMENT = Experiment(
    name="attns-fig5",
    paper="attns",
    place="Fig. 5",
    claim="With noise of 1e-5 in training NeurVec explodes for every amount of data; AttNS does not.",
    task=SOLVE,
    arms={
        **arms(("elastic",), {**NORMAL, **CONSTANT, **QUIET}, ("paper",)),
        **arms(("elastic",), {**NORMAL, **QUIET}, ("default",)),
    },
    scales={
        "smoke": Scale(SMOKE, judged=False, time="2 s"),
        "cpu": Scale(CPU, SEEDS, time="10 min on 2 cores"),
        "gpu": Scale({**GPU, "epochs": 20}, SEEDS, time="3 min on one H200"),
    },
    metric="mse",
    better="lower",
    numbers={},
    others=("lost", "plain", "loss", "updates"),
    judge=judge,
    note="The paper's recipe for 20 of its 500 epochs (3,000 to 12,200 updates); at scale cpu for 10 "
    "with a tenth of the data, in batches of 2,048 (240 to 970 updates), up to T = 10. "
    "Percentages are of 20,000 trajectories (cpu: 2,000). The paper does not say which amounts "
    "it has. 1e40 stands for trajectories that were lost.",
    picture=picture,
)
