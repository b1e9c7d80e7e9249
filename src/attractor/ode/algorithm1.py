"""Algorithm 1 of the AttNS paper: a correction trained by Adam on one-step pairs, in float32.

`train_epochs` is the only loop: ``fit(recipe="paper")`` calls it through `train_on_pairs`, and the
experiments of the paper call it with their own loss. Its arguments hold what differs between the two:
how batches are drawn, where in an update the learning rate is evaluated, the processes that share the
work, checkpoints, and whether an update is one CUDA graph.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from attractor.ode.pairs import Pairs
from attractor.ode.processes import Crew
from attractor.ode.unfinished import Unfinished
from attractor.storage.tensor_specs import TensorSpec, check_tensors, specs_of
from attractor.train.capture import Captured
from attractor.train.checkpoint import CheckpointError
from attractor.train.tensors import described

BATCH, LEARNING_RATE = 16_384, 1e-3  # the paper prints neither

KEPT = {  # tensors of an unfinished training beside the weights and the state of Adam
    "generator": TensorSpec(("state",), (torch.uint8,)),
    "losses": TensorSpec(("epochs",), (torch.float64,)),
}

# (model, index [batch]) -> the loss of these rows, and the sum over them that is reported, both [].
Loss = Callable[[nn.Module, Tensor], tuple[Tensor, Tensor]]


class Batches(Protocol):
    """The batches of each epoch, as indices of rows.

    Attributes:
        rows: Number of rows per epoch.
    """

    rows: int

    def __len__(self) -> int:
        """Return the number of batches per epoch."""
        ...

    def epoch(self, epoch: int) -> Iterator[Tensor]:
        """Yield the indices ``[batch]`` of each batch."""
        ...


class AllRows:
    """Batches that contain each row once per epoch; the last batch may be smaller than the others.

    Args:
        rows: Number of rows.
        device: Device of the indices.
        generator: CPU generator that draws the order of each epoch, one epoch after the other.
    """

    def __init__(self, rows: int, device: torch.device, generator: torch.Generator) -> None:
        self.rows, self.device, self.generator = rows, device, generator
        self.batch = min(BATCH, rows)

    def __len__(self) -> int:
        return math.ceil(self.rows / self.batch)

    def epoch(self, epoch: int) -> Iterator[Tensor]:
        """Yield the indices of each batch."""
        order = torch.randperm(self.rows, generator=self.generator)
        yield from order.to(self.device).split(self.batch)


class FullBatches:
    """Batches of one size, as a CUDA graph needs them; the rows that are left over change every epoch.

    Args:
        rows: Number of rows to draw from.
        batch: Number of rows per batch.
        device: Device on which the order is drawn.
        seed: Seed of the order of an epoch.
    """

    def __init__(self, rows: int, batch: int, device: torch.device, seed: Callable[[int], int]) -> None:
        self.total, self.batch, self.device, self.seed = rows, min(batch, rows), device, seed
        self.rows = len(self) * self.batch

    def __len__(self) -> int:
        return self.total // self.batch

    def epoch(self, epoch: int) -> Iterator[Tensor]:
        """Yield the indices of each batch."""
        first = torch.Generator().manual_seed(self.seed(epoch))
        seed = int(torch.randint(2**62, (), generator=first))
        generator = torch.Generator(self.device).manual_seed(seed)
        order = torch.randperm(self.total, generator=generator, device=self.device)
        yield from order[: self.rows].split(self.batch)


def cosine(epochs: int, updates: int, *, middle: bool = False) -> list[float]:
    """Return the learning rate of every update, from `LEARNING_RATE` along a cosine to 0.

    Args:
        epochs: Number of epochs.
        updates: Number of updates per epoch.
        middle: Evaluate the cosine in the middle of each update rather than at its start.
    """
    if middle:
        times = [epoch + (i + 0.5) / updates for epoch in range(epochs) for i in range(updates)]
        return [LEARNING_RATE * ((1 + math.cos(math.pi * (time / epochs))) / 2) for time in times]
    optimiser = torch.optim.SGD([torch.zeros(())], LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs * updates)
    rates = []
    for _ in range(epochs * updates):
        rates.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        schedule.step()
    return rates


def train_on_pairs(
    model: nn.Module,
    pairs: Pairs,
    epochs: int,
    loss_scale: float,
    generator: torch.Generator,
    progress: Callable[[str], None],
    unfinished: Unfinished | None = None,
    crew: Crew | None = None,
) -> list[dict[str, Any]]:
    """Train a correction on the errors of plain steps, and return the loss of each epoch.

    The loss is the mean square error times `loss_scale`. With `unfinished`, an interrupted training
    continues from its last checkpoint and finds the same weights.

    Raises:
        FloatingPointError: The loss became non-finite.
        CheckpointError: `unfinished` holds another training.
    """
    pairs, crew = pairs.to(torch.float32), crew or Crew()
    batches = AllRows(len(pairs.u), pairs.u.device, generator)

    def loss(model: nn.Module, index: Tensor) -> tuple[Tensor, Tensor]:
        some = pairs.rows(crew.share(index))
        mean = loss_scale * crew.mean((model(some.step()) - some.error).square(), len(index))
        return mean, mean.detach() * len(index)

    losses = train_epochs(
        model, loss, batches, epochs, cosine(epochs, len(batches)), crew=crew,
        checkpoints=None if unfinished is None else Checkpoints(unfinished, generator),
        after_epoch=lambda done, mean: progress(f"epoch {done} of {epochs}, loss {mean:.2e}"),
    )  # fmt: skip
    return [{"epoch": i, "loss": mean} for i, mean in enumerate(losses)]


def train_epochs(
    model: nn.Module,
    loss: Loss,
    batches: Batches,
    epochs: int,
    rates: list[float],
    *,
    crew: Crew | None = None,
    graph: bool = False,
    checkpoints: "Checkpoints | None" = None,
    after_epoch: Callable[[int, float], None] = lambda done, mean: None,
) -> list[float]:
    """Train a correction in place, and return the mean loss of each epoch.

    Args:
        model: The correction.
        loss: Called with the model and the rows of a batch.
        batches: The batches of each epoch.
        epochs: Number of epochs.
        rates: The learning rate of every update, as `cosine` returns them.
        crew: The processes that share each batch. None: this process alone.
        graph: Replay each update as one CUDA graph. Requires: a GPU, one process, and a `loss` that does
            not wait for the GPU.
        checkpoints: Where the training is kept while it runs.
        after_epoch: Called with the number of completed epochs and the mean loss of the last one.

    Raises:
        FloatingPointError: The loss became non-finite.
        CheckpointError: `checkpoints` holds another training.
    """
    crew, device = crew or Crew(), next(model.parameters()).device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        update = _Update(model, loss, crew, device, graph)
        losses = checkpoints.load(model, update.optimiser) if checkpoints else []
        crew.wait()  # until all processes have read the checkpoint
        step: Callable[[Tensor], Tensor] = Captured(update, update.snapshot) if graph else update
        for epoch in range(len(losses), epochs):
            total = torch.zeros((), dtype=torch.float64, device=device)
            for i, index in enumerate(batches.epoch(epoch), epoch * len(batches)):
                update.set_rate(rates[i])
                total += step(index)
            losses.append(crew.total(total).item() / batches.rows)
            if not math.isfinite(losses[-1]):
                raise FloatingPointError(
                    f"the loss became non-finite in epoch {epoch}; lower loss_scale"
                )
            if checkpoints:
                checkpoints.save(model, update.optimiser, losses, last=epoch + 1 == epochs)
            after_epoch(epoch + 1, losses[-1])
        update.optimiser.zero_grad(set_to_none=True)  # gradients lie in the memory of the graph
    return losses


class _Update:
    """One update of the weights by Adam. No operation in it waits for the device."""

    def __init__(
        self, model: nn.Module, loss: Loss, crew: Crew, device: torch.device, graph: bool
    ) -> None:
        self.model, self.loss, self.crew = model, loss, crew
        # A graph reads its learning rate from a tensor.
        self.rate = torch.zeros((), device=device) if graph else None
        self.optimiser = torch.optim.Adam(
            model.parameters(), LEARNING_RATE if self.rate is None else self.rate,
            fused=True if device.type == "cuda" else None, capturable=graph,
        )  # fmt: skip
        self.optimiser._warned_capturable_if_run_uncaptured = True

    def __call__(self, index: Tensor) -> Tensor:
        """Return the sum of the loss over the rows of a batch, before the update."""
        self.optimiser.zero_grad(set_to_none=True)
        mean, total = self.loss(self.model, index)
        mean.backward()
        self.crew.add_gradients(self.model.parameters())
        self.optimiser.step()
        return total

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of the next update."""
        if self.rate is not None:
            self.rate.fill_(rate)
        else:
            self.optimiser.param_groups[0]["lr"] = rate

    def snapshot(self) -> Callable[[], None]:
        """Copy all that an update changes, and return a function that restores it."""
        states = [x for state in self.optimiser.state.values() for x in state.values()]
        tensors = [*self.model.parameters(), *filter(torch.is_tensor, states)]
        copies = [x.detach().clone() for x in tensors]

        def restore() -> None:
            with torch.no_grad():
                for x, copy in zip(tensors, copies):
                    x.copy_(copy)

        return restore


@dataclass(frozen=True)
class Checkpoints:
    """Where a training is kept while it runs, with the generator that draws its batches."""

    unfinished: Unfinished
    generator: torch.Generator

    def save(
        self, model: nn.Module, optimiser: torch.optim.Adam, losses: list[float], last: bool
    ) -> None:
        """Keep all that an epoch changes, if a checkpoint is due."""
        if not self.unfinished.due(last):
            return
        tensors = {f"model.{k}": v for k, v in model.state_dict().items()}
        for index, state in optimiser.state_dict()["state"].items():
            tensors |= {f"adam.{index}.{k}": v for k, v in state.items()}
        tensors["generator"] = self.generator.get_state()
        tensors["losses"] = torch.tensor(losses, dtype=torch.float64)
        self.unfinished.save(len(losses), tensors, {}, last=last)

    def load(self, model: nn.Module, optimiser: torch.optim.Adam) -> list[float]:
        """Restore the last checkpoint, if there is one, and return the losses so far.

        Raises:
            CheckpointError: The checkpoint is of another training, or damaged.
        """
        saved = self.unfinished.load({})
        if saved is None:
            return []
        source, (tensors, _) = "the unfinished fit", saved
        weights = [x for group in optimiser.param_groups for x in group["params"]]
        specs = {f"model.{name}": spec for name, spec in specs_of(model).items()} | KEPT
        for index, x in enumerate(weights):
            specs[f"adam.{index}.step"] = TensorSpec(())
            for name in ("exp_avg", "exp_avg_sq"):
                specs[f"adam.{index}.{name}"] = TensorSpec(tuple(x.shape), (x.dtype,))
        check_tensors(tensors, specs, source, CheckpointError)
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            if name.startswith("adam."):
                _, number, key = name.split(".")
                state.setdefault(int(number), {})[key] = value
        with described(source, "a training"):
            self.generator.set_state(tensors["generator"])
        model.load_state_dict({k[6:]: v for k, v in tensors.items() if k.startswith("model.")})
        groups = optimiser.state_dict()["param_groups"]
        optimiser.load_state_dict({"state": state, "param_groups": groups})
        return tensors["losses"].tolist()
