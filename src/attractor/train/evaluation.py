"""Evaluate a model on data."""

from typing import Any

from torch import Tensor, nn

from attractor.common.modes import evaluation_mode
from attractor.train.bookkeeping import Sums
from attractor.train.classify import Classify
from attractor.train.feeds import feed_of
from attractor.train.place import HALVES, Place
from attractor.train.recipe import Recipe
from attractor.train.steps import EvaluationStep, Loss


def evaluate(
    model: nn.Module, data: Any, *, loss: Loss | None = None, batch: int = 500, precision: str = "fp32"
) -> dict[str, float]:
    """Return means over all of the data: "loss" and "accuracy", or the names that `loss` returns.

    Every sample is used once, on the model's device and in evaluation mode; the mode of the model is
    restored. Processes do not share the work: each evaluates all of the data.
    """
    if precision not in ("fp32", *HALVES):
        raise ValueError(f"precision = {precision!r} is not one of {', '.join(('fp32', *HALVES))}")
    like = floating_parameter(model)
    place = Place(like.device, precision)
    feed = feed_of(data, Recipe(batch=batch), train=False, like=like)
    sums = Sums(feed.steps, place)
    step = EvaluationStep(model, loss or Classify(wary=True, exact=True), feed, place, captured=False)
    with evaluation_mode(model):
        for inputs in feed.epoch(0):
            sums.add(step(*inputs))
    return sums.means()


def floating_parameter(model: nn.Module) -> Tensor:
    """Return a parameter of a floating-point dtype, which determines device and dtype."""
    parameter = next((p for p in model.parameters() if p.is_floating_point()), None)
    if parameter is None:
        raise ValueError(f"{type(model).__name__} has no parameters of a floating-point dtype")
    return parameter
