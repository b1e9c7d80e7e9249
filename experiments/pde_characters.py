"""IMDb byte by byte, texts of 2,048: the text classification of Long Range Arena (Tay et al., 2021).

Not in the paper, whose texts are short; but long sequences are what PDE attention is offered for, and
this is the usual test of it. Standard attention, diffusion and the wave from one start under one recipe.
"""

from attractor.reproduce import Experiment, Scale, gains

from . import pde_table1 as table

RECIPE = {"learning_rate": 1e-3, "warmup": 0.1, "weight_decay": 0.01, "norm": "pre"}
COMMON = {"tokenizer": "bytes", "limit": None}
GPU = {
    **COMMON,
    "tokens": {"imdb": 2048},
    "size": {"dim": 128, "heads": 4, "layers": 4, "hidden": 256, "dropout": 0.1},
    "recipes": {"fair": {**RECIPE, "batch": 64, "epochs": 5}},
}
CPU = {
    **COMMON,
    "tokens": {"imdb": 256},
    "size": {"dim": 32, "heads": 4, "layers": 2, "hidden": 64, "dropout": 0.0},
    "recipes": {"fair": {**RECIPE, "batch": 32, "epochs": 3}},
    "limit": [2000, 2000],
}
SMOKE = {
    **table.SMOKE,
    "tokens": {"imdb": 64},
    "recipes": {"fair": {**RECIPE, "batch": 64, "epochs": 1}},
}
ARMS = {
    name: {"data": "imdb", "model": table.MODELS[name], "recipe": "fair"}
    for name in ("standard", "diffusion", "wave")
}

EXPERIMENT = Experiment(
    name="pde-characters",
    paper="pde",
    place="sections 1 and 5 (long sequences), on the Text task of Long Range Arena",
    claim="PDE attention helps where sequences are long.",
    task=table.TASK,
    arms=ARMS,
    scales={
        "smoke": Scale(SMOKE, arms=("wave",), judged=False, time="1 s"),
        "cpu": Scale(
            CPU,
            seeds=(0, 1, 2),
            judged=False,
            time="8 min on 2 cores",
            note="Here 256 bytes of 2,000 texts, which is not long.",
        ),
        "gpu": Scale(
            GPU,
            training="not in the paper",
            seeds=(0, 1, 2),
            time="9 runs of 50 to 70 s on one H200; a seed at a time",
        ),
    },
    metric="accuracy",
    better="higher",
    unit="%",
    others=("valid_accuracy", "train_loss", "epochs"),
    numbers={},
    judge=gains(["diffusion", "wave"], over="standard"),
    data=("imdb",),
    note=(
        "Not in the paper. Long Range Arena's Text task is this one with up to 4,000 bytes, where a "
        "larger Transformer, trained for 20,000 steps, has 64.27 %; at scale gpu 2,048 and five epochs. "
        "Weight moves four keys in four steps, a fifth of a percent of such a text: what far tokens "
        "have to do with each other is still the softmax's."
    ),
)
