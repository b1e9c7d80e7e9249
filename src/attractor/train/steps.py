"""The training step and the evaluation step, and the sums of their numbers."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from attractor.train.blame import finite
from attractor.train.bookkeeping import StepSums
from attractor.train.feeds import Feed
from attractor.train.place import Place
from attractor.train.recipe import Recipe

# (model, batch) -> the loss, or numbers by name, one of which is "loss". Each is a tensor with one entry
# per item, of which the mean is taken, or a scalar, which counts as one item.
Loss = Callable[[nn.Module, Any], Tensor | dict[str, Tensor]]


class TrainingStep:
    """Forward, loss and backward of each batch, clipping and update, without waiting for the device.

    Attributes:
        checks_loss: whether weights stay as they are if a loss is not finite, for which the step waits.
    """

    def __init__(
        self, shared_model: nn.Module, model: nn.Module, optimiser: torch.optim.Optimizer, scaler: Any,
        loss: Loss, feed: Feed, recipe: Recipe, place: Place, captured: bool, checks_loss: bool,
    ) -> None:  # fmt: skip
        self.shared_model, self.model = shared_model, model
        self.optimiser, self.scaler = optimiser, scaler
        self.loss, self.feed, self.clip, self.count = loss, feed, recipe.clip, recipe.accumulate
        self.place, self.captured, self.checks_loss = place, captured, checks_loss

    def __call__(self, *inputs: Tensor) -> StepSums:
        """Take one step, and return the sums of its numbers."""
        self.optimiser.zero_grad(set_to_none=True)
        total: StepSums | None = None
        for i, batch in enumerate(self.feed.batches_of(*inputs), 1):
            with self.place.no_sync(self.shared_model) if i < self.count else nullcontext():
                with self.place.half(cache=not self.captured):
                    numbers = loss_numbers(self.loss(self.shared_model, batch))
                sums = step_sums(numbers, self.place)
                total = sums if total is None else add_sums(total, sums)
                if self.checks_loss and not finite(numbers["loss"]):
                    return total
                loss = numbers["loss"].mean()
                self.scaler.scale(loss if self.count == 1 else loss / self.count).backward()
        assert total is not None
        if self.clip is not None:
            self.scaler.unscale_(self.optimiser)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.scaler.step(self.optimiser)
        self.scaler.update()
        return total

    def snapshot(self) -> Callable[[], None]:
        """Copy everything that a step changes, and return a function that restores it."""
        states = [s for state in self.optimiser.state.values() for s in state.values()]
        tensors = [*self.model.parameters(), *self.model.buffers(), *filter(torch.is_tensor, states)]
        copies = [x.detach().clone() for x in tensors]
        random = torch.cuda.get_rng_state(self.place.device)

        def restore() -> None:
            with torch.no_grad():
                for x, copy in zip(tensors, copies):
                    x.copy_(copy)
            torch.cuda.set_rng_state(random, self.place.device)

        return restore


class EvaluationStep:
    """Forward pass and the numbers of the loss, without gradients."""

    def __init__(self, model: nn.Module, loss: Loss, feed: Feed, place: Place, captured: bool) -> None:
        self.model, self.loss, self.feed, self.place, self.captured = model, loss, feed, place, captured

    def __call__(self, *inputs: Tensor) -> StepSums:
        """Return the sums of the numbers of a batch."""
        with torch.no_grad(), self.place.half(cache=not self.captured):
            numbers = loss_numbers(self.loss(self.model, self.feed.batch(*inputs)))
            return step_sums(numbers, self.place)


def loss_numbers(output: Tensor | dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the result of a loss function as tensors by name."""
    numbers = output if isinstance(output, dict) else {"loss": output}
    if "loss" not in numbers:
        raise ValueError(
            f"the loss function returned the names {', '.join(numbers)}; one of them must be 'loss'"
        )
    for name, value in numbers.items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"the loss function returned {name} as {type(value).__name__}; it must return tensors"
            )
    return numbers


def step_sums(numbers: dict[str, Tensor], place: Place) -> StepSums:
    """Return the sums of the numbers of a batch, and the number of items by name."""
    sums = torch.stack([value.detach().to(place.accumulate_dtype).sum() for value in numbers.values()])
    return sums, {name: value.numel() for name, value in numbers.items()}


def add_sums(one: StepSums, other: StepSums) -> StepSums:
    """Return the sums over two batches."""
    if one[1].keys() != other[1].keys():
        raise ValueError(
            f"the loss named {', '.join(one[1])} and later {', '.join(other[1])}; it must return the "
            "same names for every batch"
        )
    return one[0] + other[0], {name: count + other[1][name] for name, count in one[1].items()}
