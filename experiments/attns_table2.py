"""Table 2: Q with a skip connection, with dt S as its input, and LSTM and Transformer in its place."""

from typing import Any

from attractor.reproduce import NOT_RUN, Experiment, Results, Scale, Verdict, all_of, decide

from .attns_shared import (
    CPU,
    GPU,
    LENGTH,
    LENGTHS,
    LONG,
    SEEDS,
    SMOKE,
    SOLVE,
    UNPRINTED,
    against,
    all_smaller,
    arms,
    dots,
    in_words,
    name,
    typical,
)

SYSTEMS = ("spring-mass", "2-link", "elastic")
PLAIN: dict[str, Any] = {"options": {"skip": False}}  # the default recipe has a skip by itself
LEFT: dict[str, dict[str, Any]] = {
    "AttNS": {},
    "with identity": {"options": {"skip": True}, "identity": True},
    "with skip": {"options": {"skip": True}},
    "with dt S": {"options": {"skip": False, "times_dt": True}},
}
RIGHT: dict[str, dict[str, Any]] = {
    "LSTM": {"options": {"skip": False, "body": "lstm"}, "width": 128},
    "Transformer": {"options": {"skip": False, "body": "transformer"}, "width": 128},
}
FAIR = {k: v for k, v in {**LEFT, "AttNS": PLAIN, **RIGHT}.items() if k != "with identity"}
PENDULUMS = SYSTEMS[1:]
# LSTM and Transformer take many times as long: a tenth of the epochs, and AttNS beside them.
TENTH = {"2-link": 50, "elastic": 10}
SHORT = {
    f"{what}, a tenth": {**options, "epochs": TENTH} for what, options in {"AttNS": {}, **RIGHT}.items()
}
NUMBERS = {
    "spring-mass": {"AttNS": 2.58e-6, "with skip": 4.57e-4, "with dt S": 3.67e-6},
    "2-link": {"AttNS": 4.26e-9, "with skip": 6.36e-6, "with dt S": 4.18e-9, "LSTM": 1.35e-8,
               "Transformer": 2.65e-6},
    "elastic": {"AttNS": 5.41e-7, "with skip": 1.39e-4, "with dt S": 1.65e-6, "LSTM": 7.21e-6,
                "Transformer": 3.64e-4},
}  # fmt: skip


def skips(results: Results) -> Verdict:
    """AttNS is better than with its input added, with the paper's numbers of its skip connection."""
    effects = [
        against(
            results, name(s, "AttNS", "paper"), name(s, "with identity", "paper"),
            paper=NUMBERS[s]["with skip"] / NUMBERS[s]["AttNS"],
        )
        for s in SYSTEMS
        if results.runs.get(name(s, "with identity", "paper"))
    ]  # fmt: skip
    claim = "A skip connection makes AttNS worse"
    if not effects:
        return Verdict(NOT_RUN, "AttNS with identity is still to be run", claim)
    texts = [
        in_words(results, name(s, "AttNS", "paper"), [name(s, "with identity", "paper")], s)
        for s in SYSTEMS
        if results.runs.get(name(s, "with identity", "paper"))
    ]
    return decide(effects, f"{'; '.join(texts)} ({decide(effects).tally()})", claim=claim)


INPUTS = all_smaller(  # the paper sees no difference on the 2-link pendulum
    {s: (name(s, "AttNS", "paper"), [name(s, "with dt S", "paper")]) for s in SYSTEMS if s != "2-link"},
    "S is a better input than dt S, but for the 2-link pendulum",
)
NETWORKS = all_smaller(  # all trained for as long as those were
    {
        s: (
            name(s, "AttNS, a tenth", "paper"),
            [name(s, f"{what}, a tenth", "paper") for what in RIGHT],
        )
        for s in PENDULUMS
    },
    "An LSTM or a Transformer makes AttNS worse",
)


def picture(results: Results) -> Any:
    """A panel a system, the paper's recipe; the default one for the 2-link pendulum."""
    short = any("a tenth" in arm for arm in results.arms)
    panels = {s: {"paper": [name(s, k, "paper") for k in LEFT]} for s in SYSTEMS}
    for s in PENDULUMS:
        if short:
            panels[s]["a tenth"] = [name(s, k, "paper") for k in SHORT]
        else:
            panels[s]["paper"] += [name(s, k, "paper") for k in RIGHT]
    panels["2-link"]["default"] = [name("2-link", k, "default") for k in (*LEFT, *RIGHT)]
    lines = {s: {"RK4 alone": typical(results, name(s, "AttNS", "paper"), "plain")} for s in SYSTEMS}
    return dots(results, {s: panels[s] for s in ("spring-mass", "elastic", "2-link")}, lines)


LEFTS, RIGHTS, SHORTS = (
    tuple(arms(systems, kinds, ("paper",)))
    for systems, kinds in ((SYSTEMS, LEFT), (PENDULUMS, RIGHT), (PENDULUMS, SHORT))
)
FAIRS = tuple(arms(("2-link",), FAIR, ("default",)))

EXPERIMENT = Experiment(
    name="attns-table2",
    paper="attns",
    place="Table 2, left and right",
    claim="A skip connection, an LSTM or a Transformer makes AttNS worse; S is a better input than "
    "dt S, but for the 2-link pendulum.",
    task=SOLVE,
    arms={
        **arms(SYSTEMS, LEFT, ("paper",)),
        **arms(PENDULUMS, {**RIGHT, **SHORT}, ("paper",)),
        **arms(("2-link",), FAIR, ("default",)),
    },
    extra=tuple(name(s, "with identity", "paper") for s in SYSTEMS),
    base={"correction": "attns"},
    scales={
        "smoke": Scale({**SMOKE, "train": 10}, judged=False, time="4 s", arms=(*LEFTS, *RIGHTS, *FAIRS)),
        "cpu": Scale(
            {**CPU, "train": 500, "epochs": 40}, arms=tuple(
                name("2-link", k, r) for r in ("paper", "default") for k in FAIR
            ), judged=False, time="18 min on 2 cores",
            note="Here 500 trajectories and 40 epochs in batches of 2,048, 960 updates.",
        ),
        "gpu": Scale(
            {**GPU, "epochs": LONG}, SEEDS, time="30 min on one H200", training=LENGTH,
            arms=(*LEFTS, *SHORTS, *FAIRS),
            note=f"Here {LENGTHS}; LSTM and Transformer, and AttNS beside them, a tenth of that.",
        ),
    },
    metric="mse",
    better="lower",
    numbers={name(s, what, "paper"): x for s, row in NUMBERS.items() for what, x in row.items()}
    | {
        name(s, what, "paper"): NUMBERS[s][what.removesuffix(", a tenth")]
        for s in PENDULUMS
        for what in SHORT
    },
    others=("loss", "plain", "updates"),
    judge=all_of(skips, INPUTS, NETWORKS),
    logarithmic=True,
    note=f"{UNPRINTED} With identity: the input is added to Q, as in the residual blocks that the paper "
    "has in mind. With skip, beside it and not judged: a learnt linear map of the input is, which is "
    "all that spring-mass needs. LSTM and Transformer read "
    "the input component by component and are 128 wide instead of 1024, without which an update "
    "would take a second. The paper's column \"w/o dt\" is headed so, but its text says that it has "
    "S dt as its input.",
    picture=picture,
)  # fmt: skip
