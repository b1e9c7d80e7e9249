"""Table 1: accuracy on IMDb, AG News and SST-2.

In the paper PDE attention gains 3, 11.6 and 19.7 points. Nothing can leak there: no mask, no next token.
First the paper's configuration (Table 7): batches of 4,096 texts, a learning rate of 2e-5, at most 50
epochs, the end when the validation loss has not fallen for three. Then one under which models learn:
batches of 128, four epochs, with the learning rate of a grid of three that is best for both rows
together on held-out texts. Diffusion stands for PDE attention; the other PDEs are run beside it.
"""

from attractor.reproduce import DIRECTION, FAILS, HOLDS, UNTESTED, Experiment, Results, Scale, Verdict
from attractor.reproduce.verdict import lead, number

TASK = "attractor.reproduce.tasks.texts:classify"
SETS = {"imdb": "IMDb", "ag_news": "AG News", "sst2": "SST-2"}
PAPER = {"imdb": (59.4, 62.4), "ag_news": (60.5, 72.1), "sst2": (56.6, 76.3)}
PDES = ("diffusion", "wave", "reaction_diffusion", "advection_diffusion")
MODELS = {"standard": {"pde": None}} | {pde.replace("_", "-"): {"pde": pde, "steps": 4} for pde in PDES}
GRID = ("3e-4", "1e-3", "3e-3")

_TUNED = {"warmup": 0.1, "weight_decay": 0.01, "norm": "pre"}
GPU = {
    "tokenizer": "wordpiece",
    "tokens": {"imdb": 256, "ag_news": 128, "sst2": 64},
    "size": {"dim": 128, "heads": 4, "layers": 4, "hidden": 256, "dropout": 0.1},
    "recipes": {
        "paper": {
            **_TUNED, "norm": "post", "learning_rate": 2e-5, "batch": 4096, "epochs": 50, "patience": 3,
        },
        **{r: {**_TUNED, "learning_rate": float(r), "batch": 128, "epochs": 4} for r in GRID},
    },
    "limit": None,
}  # fmt: skip
# A part of the texts, shorter, and a narrow model; batches of 1,024 instead of 4,096.
CPU = GPU | {
    "tokens": {"imdb": 64, "ag_news": 32, "sst2": 32},
    "size": {"dim": 32, "heads": 4, "layers": 2, "hidden": 64, "dropout": 0.1},
    "recipes": {
        "paper": GPU["recipes"]["paper"] | {"batch": 1024, "epochs": 10},
        **{r: GPU["recipes"][r] | {"batch": 64} for r in GRID},
    },
    "limit": [4000, 2000],
}
SMOKE = {
    "synthetic": True,
    "tokenizer": "bytes",
    "tokens": dict.fromkeys(SETS, 24),
    "size": {"dim": 16, "heads": 2, "layers": 1, "hidden": 16, "dropout": 0.0},
    "recipes": {
        name: {**_TUNED, "learning_rate": 1e-3, "batch": 64, "epochs": 1} for name in ("paper", *GRID)
    },
    "limit": None,
}


def name_of(data: str, model: str, recipe: str) -> str:
    """Of an arm."""
    ending = "paper's recipe" if recipe == "paper" else f"tuned, {recipe}"
    return f"{SETS[data]}, {model}, {ending}"


ARMS = {
    name_of(data, model, recipe): {"data": data, "model": options, "recipe": recipe}
    for recipe in ("paper", *GRID)
    for data in SETS
    for model, options in MODELS.items()
}


def chosen(results: Results, data: str) -> str:
    """The learning rate with the best mean accuracy of the two models on held-out texts."""

    def held_out(rate: str) -> float:
        arms = [name_of(data, m, rate) for m in ("standard", "diffusion")]
        return sum(results.mean(arm, "valid_accuracy") for arm in arms)

    return max(GRID, key=held_out)


def judge(results: Results) -> Verdict:
    """Whether diffusion gains half of what the paper says, or more, on all three sets by the tuned
    recipe; in direction if it gains by more than seeds differ, not if half is out of reach. By the
    paper's recipe both models stay one function, which is told."""
    found, told = [], []
    for data in SETS:
        words = []
        for recipe in ("paper", chosen(results, data)):
            standard, moved = (name_of(data, m, recipe) for m in ("standard", "diffusion"))
            if recipe != "paper":
                gain, doubt = lead(results, moved, standard)
                half = (PAPER[data][1] - PAPER[data][0]) / 2
                if gain > doubt:
                    found.append(HOLDS if gain >= half else DIRECTION)
                else:
                    found.append(FAILS if gain + doubt < half else UNTESTED)
            words.append(f"{number(results.mean(moved))} against {number(results.mean(standard))}")
        told.append(f"{SETS[data]} {words[0]}, tuned ({chosen(results, data)}) {words[1]}")
    why = "diffusion against standard attention: " + "; ".join(told)
    return Verdict(max(found, key=[HOLDS, DIRECTION, UNTESTED, FAILS].index), why)


EXPERIMENT = Experiment(
    name="pde-table1",
    paper="pde",
    place="Table 1, both rows",
    claim="PDE attention is more accurate: 62.4 against 59.4 % on IMDb, 72.1 against 60.5 % on AG News, "
    "76.3 against 56.6 % on SST-2.",
    task=TASK,
    arms=ARMS,
    extra=tuple(
        name_of(d, m, r) for r in ("paper", *GRID) for d in SETS for m in MODELS
        if m not in ("standard", "diffusion")
    ),
    scales={
        "smoke": Scale(
            SMOKE, judged=False, time="3 s",
            arms=tuple(name_of(d, m, r) for d, m, r in (
                ("sst2", "standard", "paper"), ("imdb", "reaction-diffusion", "1e-3"),
            )),
        ),
        "cpu": Scale(
            CPU, time="6 min on 2 cores",
            arms=tuple(name_of(d, m, r) for r in ("paper", *GRID) for d in SETS
                       for m in ("standard", "diffusion")),
        ),
        "gpu": Scale(
            GPU, seeds=(0, 1, 2),
            time="on one H200, a run: SST-2 3 s, AG News 13 s, IMDb 20 s (reaction-diffusion 3, 40 "
            "and 120 s) with the paper's recipe; 1 to 5 s tuned (reaction-diffusion up to 15 s)",
        ),
    },
    metric="accuracy",
    better="higher",
    unit="%",
    others=("valid_accuracy", "train_loss", "epochs"),
    numbers={
        name_of(data, model, "paper"): PAPER[data][which]
        for data in SETS
        for which, model in enumerate(("standard", "diffusion"))
    },
    judge=judge,
    data=tuple(SETS),
    note=(
        "The paper does not say which PDE, nor the longest text (here 256, 128 and 64 pieces), "
        "pooling (the mean), schedule (a cosine after the warm-up), optimiser (AdamW, betas 0.9 and "
        "0.95, weight decay 0.01, clipped at 1), dropout (0.1), size of steps (1) or how weights "
        "start (N(0, 0.02), norms after the branches; alpha at 0.10 as in its Table 11). Batches of "
        "at most 4,096 are 3,460 on SST-2, 3,750 on IMDb, 4,062 on AG News: 100 to 350 updates at "
        "2e-5. By such a training maps stay nearly even and alpha where it was, so that with and "
        "without diffusion it is one function to four digits: these rows say nothing about PDE "
        "attention, the tuned ones do. The paper's own training losses (0.46 and 0.48 on SST-2) are "
        "not reached this way. AG News is a quarter of its training set, 31,600 texts, so a quarter of "
        "the updates, and its own 7,600 test texts. Accuracy is that of the last epoch on the test set."
    ),
)  # fmt: skip
