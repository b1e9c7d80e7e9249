"""Repeat a training with several seeds."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from attractor.storage.files import write_json
from attractor.storage.objects import AnyPath, path_of
from attractor.train import generators
from attractor.train.history import History, Seeds
from attractor.train.loop import train
from attractor.train.recipe import SHORT, Recipe


def train_seeds(
    make_model: Callable[[], nn.Module],
    train_data: Any,
    valid_data: Any,
    recipe: Recipe = SHORT,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    out: AnyPath | str | None = None,
    after: Callable[[nn.Module, History, int], None] | None = None,
    name: str = "valid_accuracy",
    **options: Any,
) -> Seeds:
    """Train with several seeds, one after the other, and return mean and spread of the final epoch.

    Args:
        make_model: a function that is called after ``torch.manual_seed(seed)``, so that initial weights
            depend on the seed. The global generators are restored afterwards.
        train_data, valid_data, recipe: as for `train`.
        seeds: the seeds, all different.
        out: a folder or URL with one subfolder per seed, such as ``seed-0``, for one run as in `train`;
            summary.json holds the results.
        after: a function that is called with each trained model, its history and its seed.
        name: name of the number that `Seeds` summarises.
        options: further arguments of `train`.
    """
    seeds = tuple(operator.index(seed) for seed in seeds)
    if not seeds or len(set(seeds)) != len(seeds):
        raise ValueError(f"seeds = {seeds}; give one or more, all different")
    if valid_data is None and name.startswith("valid_"):
        raise ValueError(
            f"{name} needs valid_data; or ask for another number, such as name='train_loss'"
        )
    folder = None if out is None else path_of(out)
    if folder is not None and not options.get("resume", True):
        (folder / "summary.json").unlink(missing_ok=True)
    histories: list[History] = []
    for seed in seeds:
        with generators.forked(
            torch.device(options.get("device") or ("cuda" if torch.cuda.is_available() else "cpu"))
        ):
            torch.manual_seed(seed)
            model = make_model()
        inner = None if folder is None else folder / f"seed-{seed}"
        own = replace(recipe, seed=seed)
        history = train(model, train_data, valid_data, own, out=inner, **options)
        histories.append(history)
        history.last(name)  # raises before the next seed if there is no such number
        if after:
            after(model, history, seed)
    results = Seeds(seeds, tuple(histories), name)
    if folder is not None:
        summary = {"name": name, "seeds": seeds, "values": results.values, "mean": results.mean,
                   "spread": results.spread, "final": [h.final for h in histories]}  # fmt: skip
        write_json(folder / "summary.json", summary)
    return results
