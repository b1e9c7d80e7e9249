"""The model, data, optimiser and steps of a training, and the state that a checkpoint restores."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from attractor.train import generators
from attractor.train.blame import blame, finite
from attractor.train.bookkeeping import StepSums, Sums, Timer
from attractor.train.capture import Blocks, Captured
from attractor.train.checkpoint import CheckpointError
from attractor.train.classify import Classify
from attractor.train.definition import Definition
from attractor.train.evaluation import floating_parameter
from attractor.train.feeds import Feed, feed_of
from attractor.train.history import DivergedError, History
from attractor.train.place import Place
from attractor.train.recipe import Recipe
from attractor.train.run_folder import EpochState, TrainingState
from attractor.train.sharding import SHARDINGS, check_sharding, equal_steps, local, shard_optimiser
from attractor.train.steps import EvaluationStep, Loss, TrainingStep


class Training:
    """The parts of a training.

    Attributes:
        feed, valid: training and validation data; `valid` may be None.
        optimiser, scaler: the optimiser, and the gradient scaler of fp16.
        average: averaged weights; None if the recipe has no `ema`.
        step, valid_step: the training step and the validation step, from `begin` on.
    """

    def __init__(
        self, model: nn.Module, train_data: Any, valid_data: Any, recipe: Recipe, loss: Loss | None,
        place: Place, sharding: str = "none", blocks: Blocks | None = None,
    ) -> None:  # fmt: skip
        if sharding not in SHARDINGS:
            raise ValueError(f"sharding = {sharding!r} is not one of {', '.join(SHARDINGS)}")
        self.sharded, self.blocks = sharding != "none" and place.share[1] > 1, blocks
        if self.sharded:
            check_sharding(model, recipe, place.precision)
        for name in ("label_smoothing", "mixup"):
            if loss is not None and getattr(recipe, name):
                raise ValueError(
                    f"{name} belongs to the default loss; a loss of your own must apply it itself"
                )
        on_cpu = place.device.type == "cpu"
        self.model, self.recipe, self.place = model, recipe, place
        self.loss: Loss = loss or Classify(recipe.label_smoothing, wary=True, exact=on_cpu)
        self.captures = _captures(recipe, place)
        self.finish_sharing: Callable[[], None] = lambda: None
        if not self.sharded:  # a sharded model is moved and laid out in parts
            model.to(place.device)
            if recipe.channels_last:
                _lay_out(model)
        like = torch.empty(0, dtype=floating_parameter(model).dtype, device=place.device)
        self.feed = feed_of(train_data, recipe, train=True, like=like, share=place.share)
        self.rate = torch.zeros((), device=place.device) if self.captures else None
        self.optimiser = recipe.make_optimiser(model, self.rate)
        self.scaler = torch.amp.GradScaler(place.device.type, enabled=place.precision == "fp16")
        self.average: AveragedModel | None = None
        if recipe.ema:
            self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(recipe.ema))
        self.valid: Feed | None = None
        if valid_data is not None:
            self.valid = feed_of(valid_data, recipe, train=False, like=like, share=place.share)

    @property
    def state(self) -> TrainingState:
        """The state that a checkpoint holds."""
        return TrainingState(self.model, self.optimiser, self.scaler, self.average)

    @property
    def evaluated(self) -> nn.Module:
        """The model that is validated, with averaged weights if there are any."""
        return self.model if self.average is None else self.average.module

    def definition(self, train_data: Any, valid_data: Any, loss: Loss | None) -> Definition:
        """Return the definition of the run. Requires: the model has its initial weights."""
        definition = Definition.of(
            self.model, train_data, valid_data, self.recipe, loss, precision=self.place.precision,
            processes=self.place.share[1],
        )  # fmt: skip
        return replace(definition, steps=self.feed.steps)

    def begin(self) -> None:
        """Share the model with the other processes, and make the training and validation steps."""
        model, place, captures = self.model, self.place, self.captures
        shared_model, self.finish_sharing = place.share_model(model, self.sharded, self.blocks)
        if self.sharded:
            source, self.optimiser = self.optimiser, self.recipe.make_optimiser(model)
            shard_optimiser(source, self.optimiser)
        self.own_rates = [group["lr"] for group in self.optimiser.param_groups]
        # If waiting for the device is free, the loss of a step is checked before weights are changed.
        self.checks_loss = place.device.type == "cpu" and place.share[1] == 1
        step = TrainingStep(
            shared_model, model, self.optimiser, self.scaler, self.loss, self.feed, self.recipe, place,
            captures, self.checks_loss,
        )  # fmt: skip
        self.step: Callable[..., StepSums] = Captured(step, step.snapshot) if captures else step
        if self.valid is not None:
            valid_step = EvaluationStep(self.evaluated, self.loss, self.valid, place, captures)
            self.valid_step: Callable[..., StepSums] = Captured(valid_step) if captures else valid_step

    def in_step(self, steps: Iterator[tuple[Tensor, ...]]) -> Iterator[tuple[tuple[Tensor, ...], bool]]:
        """Yield the inputs of an evaluation and whether they count; see `sharding.equal_steps`."""
        if self.sharded:
            return equal_steps(steps, self.place.anywhere)
        return ((inputs, True) for inputs in steps)

    def epoch_state(self, rate: float, sums: Sums, timer: Timer) -> EpochState:
        """Return the state of an unfinished epoch for a checkpoint."""
        rank, world = self.place.share
        random = {}
        for name, own in generators.state(self.place.device).items():
            rows = torch.zeros(world, len(own), dtype=torch.int64)
            rows[rank] = own
            random[name] = self.place.total(rows).to(own.dtype)
        rows, counts = sums.totals()
        return EpochState(sums.count, rate, rows, counts, random, timer.seconds, timer.samples)

    def restore(self, state: EpochState, sums: Sums, timer: Timer) -> None:
        """Restore sums, times and random numbers from a checkpoint."""
        rank, world = self.place.share
        sums.restore(state)
        timer.began -= state.seconds
        timer.samples = state.samples
        # With another number of processes, the generators keep the seed of the epoch.
        if all(len(rows) == world for rows in state.random.values()):
            try:
                generators.restore({k: v[rank] for k, v in state.random.items()}, self.place.device)
            except (OverflowError, RuntimeError, TypeError, ValueError) as error:
                raise CheckpointError(
                    f"the checkpoint's random numbers cannot be used: {error}"
                ) from None

    def set_rate(self, time: float) -> float:
        """Set the learning rate of the next step, at a time in epochs, and return it.

        An optimiser of the user's own has a rate per group; that of the first group is returned.
        """
        if callable(self.recipe.optimiser):
            fraction = self.recipe.fraction(time)
            for group, own in zip(self.optimiser.param_groups, self.own_rates):
                group["lr"] = own * fraction
            return float(self.own_rates[0]) * fraction
        rate = self.recipe.rate(time)
        if self.rate is not None:
            self.rate.fill_(rate)
        else:
            for group in self.optimiser.param_groups:
                group["lr"] = rate
        return rate

    def update_average(self) -> None:
        """Add the weights after a step to their moving average, if there is one."""
        if self.average is not None:
            self.average.update_parameters(self.model)

    def use_average(self) -> None:
        """Give the model its averaged weights, if there are any."""
        if self.average is not None and self.average.n_averaged:
            self.model.load_state_dict(self.average.module.state_dict())

    def check(self, sums: Sums, epoch: int, inputs: tuple[Tensor, ...]) -> None:
        """Raise if a loss of this epoch is not finite in any process.

        Args:
            sums: the losses of this epoch.
            epoch: the epoch, from 0.
            inputs: inputs of the last step; on a CPU that is the step with the bad loss.
        """
        step = sums.first_bad()
        if step is None:
            return
        self.gather()  # the processes do not run the same operations below

        batches = list(self.feed.batches_of(*inputs)) if inputs else []

        def again() -> None:
            with self.place.half():
                for batch in batches:
                    self.loss(self.model, batch)

        layer, why = blame(self.model, again, batches)
        rate = self.recipe.rate(epoch + (step - 0.5) / sums.steps)
        raise DivergedError(
            f"the loss is not finite at epoch {epoch + 1}, step {step} of {sums.steps}, where the "
            f"learning rate is {rate:.3g}: {why}",
            History(), epoch + 1, step, layer,
        )  # fmt: skip

    def check_weights(self, epoch: int, step: int) -> None:
        """Raise if a weight is not finite in any process, because such a state must not be saved."""
        values = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        bad = self.place.total(torch.tensor([int(not finite(local(p))) for p in values.values()]))
        name = next((name for name, count in zip(values, bad.tolist()) if count), None)
        if name is not None:
            self.gather()
            raise DivergedError(
                f"the weights {name!r} are not finite after epoch {epoch}, step {step}: lower the "
                "learning rate, lengthen warmup, or set clip=1.0",
                History(), epoch, step, name.rpartition(".")[0],
            )  # fmt: skip

    def gather(self) -> None:
        """Make a sharded model whole again. All processes must call it."""
        if self.sharded:
            self.finish_sharing()
            if self.recipe.channels_last:
                _lay_out(self.model)

    def finish(self) -> None:
        """Undo all changes to the model except its weights, and set evaluation mode.

        A model that is still sharded stays so: after an error, other processes may not be here.
        """
        if not self.sharded:
            self.finish_sharing()
        self.optimiser.zero_grad(set_to_none=True)  # gradients share the memory of the graph
        self.model.eval()


def _lay_out(model: nn.Module) -> None:
    """Set channels_last for four dimensions (`Module.to` fails on the five of a Conv3d)."""
    for x in (*model.parameters(), *model.buffers()):
        if x.dim() == 4:
            x.data = x.data.to(memory_format=torch.channels_last)


def _captures(recipe: Recipe, place: Place) -> bool:
    """Return whether steps are captured in a CUDA graph."""
    if recipe.capture == "graph" and place.device.type != "cuda":
        raise ValueError(
            f"capture = 'graph' on {place.device}; it needs a GPU: choose one with device=, or use "
            "capture='auto'"
        )
    possible = place.device.type == "cuda" and place.share[1] == 1 and place.precision != "fp16"
    return possible and recipe.capture != "none" and isinstance(recipe.optimiser, str)
