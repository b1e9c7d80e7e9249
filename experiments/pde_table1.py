"""Table 1: accuracy on IMDb, AG News and SST-2.

In the paper PDE attention gains 3, 11.6 and 19.7 points. Nothing can leak there: no mask, no next token.
First the paper's configuration (Table 7): batches of 4,096 texts, a learning rate of 2e-5, at most 50
epochs, the end when the validation loss has not fallen for three. Then one under which models learn:
batches of 128, four epochs, with the learning rate of a grid of three that is best for both rows
together on held-out texts. Diffusion stands for PDE attention; the other PDEs are run beside it.
"""

from dataclasses import replace

from attractor.reproduce import (
    Effect,
    Experiment,
    Results,
    Scale,
    Verdict,
    combine,
    compare,
    decide,
    number,
)

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


def gain(results: Results, data: str, recipe: str) -> Effect:
    """Return the gain of diffusion over standard attention on a data set, in points of accuracy."""
    standard, moved = (name_of(data, m, recipe) for m in ("standard", "diffusion"))
    paper = PAPER[data][1] - PAPER[data][0]
    return replace(compare(results, moved, standard, label=SETS[data], paper=paper), unit="points")


def judge(results: Results) -> Verdict:
    """Diffusion gains on all three sets, by the tuned recipe and by the paper's."""
    tuned, printed, told = [], [], []
    for data in SETS:
        rate = chosen(results, data)
        tuned.append(gain(results, data, rate))
        printed.append(gain(results, data, "paper"))
        words = [
            " against ".join(
                number(results.mean(name_of(data, m, recipe))) for m in ("diffusion", "standard")
            )
            for recipe in ("paper", rate)
        ]
        told.append(f"{SETS[data]} {words[0]}, tuned ({rate}) {words[1]}")
    verdict = combine([
        decide(tuned, "; ".join(f"{e.label} {e}" for e in tuned),
               claim="PDE attention is more accurate, by a recipe under which models learn"),
        decide(printed, "; ".join(f"{e.label} {e}" for e in printed),
               claim="PDE attention is more accurate by the paper's recipe",
               caveat="by the paper's recipe both models are still one function"),
    ])  # fmt: skip
    return replace(
        verdict, why=f"{verdict.why}. Diffusion against standard attention: {'; '.join(told)}"
    )


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
            GPU, seeds=(0, 1, 2), training="100 %; tuned 8 %",
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
