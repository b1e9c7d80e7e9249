"""Table 2: Q with a skip connection, with dt S as its input, and LSTM and Transformer in its place."""

from typing import Any

from attractor.reproduce import Experiment, Results, Scale, all_of

from .attns_shared import (
    CPU,
    GPU,
    SEEDS,
    SMOKE,
    SOLVE,
    UNPRINTED,
    also,
    arms,
    dots,
    name,
    smaller,
    typical,
)

SYSTEMS = ("spring-mass", "2-link", "elastic")
LEFT = {
    "AttNS": {"options": {"skip": False}},
    "with skip": {"options": {"skip": True}},
    "with dt S": {"options": {"skip": False, "times_dt": True}},
}
RIGHT = {
    "LSTM": {"options": {"skip": False, "body": "lstm"}, "width": 128},
    "Transformer": {"options": {"skip": False, "body": "transformer"}, "width": 128},
}
PENDULUMS = SYSTEMS[1:]
NUMBERS = {
    "spring-mass": {"AttNS": 2.58e-6, "with skip": 4.57e-4, "with dt S": 3.67e-6},
    "2-link": {"AttNS": 4.26e-9, "with skip": 6.36e-6, "with dt S": 4.18e-9, "LSTM": 1.35e-8,
               "Transformer": 2.65e-6},
    "elastic": {"AttNS": 5.41e-7, "with skip": 1.39e-4, "with dt S": 1.65e-6, "LSTM": 7.21e-6,
                "Transformer": 3.64e-4},
}  # fmt: skip


def leads(system: str, recipe: str) -> Any:
    """AttNS is better than with a skip, dt S, an LSTM or a Transformer; the paper has no difference
    between S and dt S on the 2-link pendulum."""
    rivals = ["with skip", *(["with dt S"] if system != "2-link" else [])]
    rivals += RIGHT if system != "spring-mass" else ()
    return smaller(name(system, "AttNS", recipe), [name(system, r, recipe) for r in rivals], system)


def picture(results: Results) -> Any:
    """A panel a system, the paper's recipe; the default one for the 2-link pendulum."""
    panels = {
        s: {"paper": [name(s, k, "paper") for k in (*LEFT, *(RIGHT if s != "spring-mass" else ()))]}
        for s in SYSTEMS
    }
    panels["2-link"]["default"] = [name("2-link", k, "default") for k in (*LEFT, *RIGHT)]
    lines = {s: {"RK4 alone": typical(results, name(s, "AttNS", "paper"), "plain")} for s in SYSTEMS}
    return dots(results, {s: panels[s] for s in ("spring-mass", "elastic", "2-link")}, lines)


EXPERIMENT = Experiment(
    name="attns-table2",
    paper="attns",
    place="Table 2, left and right",
    claim="A skip connection, an LSTM or a Transformer makes AttNS worse; S is a better input than "
    "dt S, but for the 2-link pendulum.",
    task=SOLVE,
    arms={
        **arms(SYSTEMS, LEFT, ("paper",)),
        **arms(PENDULUMS, RIGHT, ("paper",)),
        **arms(("2-link",), {**LEFT, **RIGHT}, ("default",)),
    },
    base={"correction": "attns"},
    scales={
        "smoke": Scale({**SMOKE, "train": 10}, judged=False, time="4 s"),
        "cpu": Scale(
            {**CPU, "train": 500, "epochs": 40}, arms=tuple(
                name("2-link", k, r) for r in ("paper", "default") for k in (*LEFT, *RIGHT)
            ), judged=False, time="18 min on 2 cores",
            note="Here 500 trajectories and 40 epochs in batches of 2,048, 960 updates.",
        ),
        "gpu": Scale(
            {**GPU, "epochs": {"spring-mass": 40, "2-link": 10, "elastic": 2}}, SEEDS,
            time="6 min on one H200",
            note="Here 1,200 updates on every system, 8 %, 2 % and 0.4 % of the epochs.",
        ),
    },
    metric="mse",
    better="lower",
    numbers={name(s, what, "paper"): x for s, row in NUMBERS.items() for what, x in row.items()},
    others=("loss", "plain", "updates"),
    judge=also(all_of(*(leads(s, "paper") for s in SYSTEMS)), leads("2-link", "default")),
    logarithmic=True,
    note=f"{UNPRINTED} With skip: a linear map of the input is added to Q. LSTM and Transformer read "
    "the input component by component and are 128 wide instead of 1024, without which an update "
    "would take a second. The paper's column \"w/o dt\" is headed so, but its text says that it has "
    "S dt as its input.",
    picture=picture,
)  # fmt: skip
