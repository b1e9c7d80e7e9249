"""Fig. 5: noise of 1e-5 on the states of training, elastic pendulum, several amounts of data.

"Constant noise sigma = 1e-5 to u_n for all n" has two readings: independent noise of that size on every
state, and the number 1e-5 added to every state that a step starts from. Both are here; the second
makes a correction learn to subtract 1e-5 in every step, which the test does not need.
"""

from dataclasses import replace
from typing import Any

from attractor.reproduce import Experiment, Results, Scale, Verdict, decide, number

from .attns_shared import (
    CPU,
    GPU,
    SEEDS,
    SMOKE,
    SOLVE,
    UNPRINTED,
    against,
    arms,
    corrections,
    dots,
    name,
    typical,
)

SHARES = (0.25, 0.5, 1.0)
NOISE = 1e-5
SEEN = 1.1  # by which noise must change an error to be seen
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
    """AttNS is more exact than NeurVec in all noisy settings; a lost trajectory is the largest error.

    Where noise changes no error, nothing is tested.
    """
    told = []
    settings = [*(label("{}", share) for share in SHARES), "{} at 50 %, constant"]
    noisy = [[name("elastic", s.format(w), "paper") for w in PAIR] for s in settings]
    for ours, theirs in noisy:
        a, b = typical(results, ours), typical(results, theirs)
        lost = max(results.values(ours, "lost")), max(results.values(theirs, "lost"))
        what = ours.split(" at ")[1].removesuffix(", paper")
        shares = " and ".join(f"{100 * x:.1f} %" for x in lost)
        errors = " against ".join("lost" if n else number(x) for x, n in zip((a, b), lost))
        told.append(f"{errors} ({what}; lost trajectories {shares})")
    change = [
        typical(results, name("elastic", label(w, 0.5), "paper"))
        / typical(results, name("elastic", f"{w} at 50 %, no noise", "paper"))
        for w in PAIR
    ]
    fair = [
        typical(results, name("elastic", label("AttNS", s), "default"))
        / typical(results, name("elastic", label("NeurVec", s), "default"))
        for s in SHARES
    ]
    losses = [
        " against ".join(
            number(typical(results, name("elastic", label(w, s), "paper"), "loss")) for w in PAIR
        )
        for s in SHARES
    ]
    default = [name("elastic", label(w, s), "default") for w in PAIR for s in SHARES]
    spared = not any(x > 0 for arm in default for x in results.values(arm, "lost"))
    why = (
        f"AttNS against NeurVec with noise: {', '.join(told)}; at half of the data noise multiplies "
        f"their errors by {number(change[0])} and {number(change[1])}. Training losses: "
        f"{', '.join(losses)}. Default recipe: "
        f"{'no' if spared else 'some'} trajectories are lost, "
        f"AttNS over NeurVec {number(min(fair))} to {number(max(fair))}"
    )
    effects = [against(results, ours, theirs) for ours, theirs in noisy]
    if all(1 / SEEN < x < SEEN for x in change):
        hidden = "errors of this training are far above such a noise"
        effects = [
            replace(e, limitation="; ".join(filter(None, [hidden, e.limitation]))) for e in effects
        ]
    return decide(effects, why)


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
    claim="With noise of 1e-5 in training NeurVec explodes for every amount of data; AttNS does not, "
    "and its training loss is smaller.",
    task=SOLVE,
    arms={
        **arms(("elastic",), {**NORMAL, **CONSTANT, **QUIET}, ("paper",)),
        **arms(("elastic",), {**NORMAL, **QUIET}, ("default",)),
    },
    scales={
        "smoke": Scale(SMOKE, judged=False, time="2 s"),
        "cpu": Scale(
            CPU,
            SEEDS,
            time="25 min on 2 cores",
            note="Here 10 epochs of 500 to 2,000 trajectories in batches of 2,048, 240 to 970 "
            "updates, up to T = 10.",
        ),
        "gpu": Scale(
            {**GPU, "epochs": 20},
            SEEDS,
            time="8 min on one H200",
            training="4 %",
            note="Here 20 epochs, 3,000 to 12,200 updates.",
        ),
    },
    metric="mse",
    better="lower",
    numbers={},
    others=("lost", "plain", "loss", "updates"),
    judge=judge,
    logarithmic=True,
    note=f"{UNPRINTED} Percentages are of the 20,000 trajectories of its Table 3; the paper does not "
    'say which amounts it has. "constant" adds the number 1e-5 to every state that a step starts '
    "from, which is what it prints; the others have independent noise of that size on every state.",
    picture=picture,
)
