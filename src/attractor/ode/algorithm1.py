"""Algorithm 1 of the AttNS paper: a correction trained by Adam on one-step pairs."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from attractor.ode.pairs import Pairs
from attractor.ode.processes import Crew
from attractor.ode.unfinished import Unfinished
from attractor.train import checkpoint
from attractor.train.checkpoint import CheckpointError

# The paper prints neither. `attractor.reproduce.tasks.solvers` trains with the same settings.
BATCH, LEARNING_RATE = 16_384, 1e-3


def train_as_printed(
    model: nn.Module,
    pairs: Pairs,
    epochs: int,
    loss_scale: float,
    generator: torch.Generator,
    progress: Callable[[str], None],
    unfinished: Unfinished | None = None,
    crew: Crew | None = None,
) -> list[dict[str, Any]]:
    """Algorithm 1 of the AttNS paper: Adam on one-step pairs, in float32; the loss of each epoch.

    With `unfinished` it goes on where it was interrupted, to the same bits.
    """
    pairs, u = pairs.to(torch.float32), pairs.u
    batch = min(BATCH, len(u))
    total = epochs * math.ceil(len(u) / batch)
    optimiser = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, total)
    crew = crew or Crew()
    history: list[dict[str, Any]] = []
    found = unfinished.load() if unfinished else None
    crew.wait()  # until all have read what is there
    if found is not None:
        losses = _take_up(*found, model, optimiser, schedule, generator)
        history = [{"epoch": i, "loss": loss} for i, loss in enumerate(losses)]
    for epoch in range(len(history), epochs):
        summed = torch.zeros((), dtype=torch.float64, device=u.device)
        for whole in torch.randperm(len(u), generator=generator).to(u.device).split(batch):
            some = pairs.rows(crew.share(whole))
            loss = loss_scale * crew.mean((model(some.step()) - some.error).square(), len(whole))
            optimiser.zero_grad()
            loss.backward()
            crew.add_gradients(model.parameters())
            optimiser.step()
            schedule.step()
            summed += loss.detach() * len(whole)
        mean = crew.total(summed).item() / len(u)
        if not math.isfinite(mean):
            raise FloatingPointError(f"the loss became non-finite in epoch {epoch}; lower loss_scale")
        history.append({"epoch": epoch, "loss": mean})
        if unfinished and unfinished.due(epoch + 1 == epochs):
            tensors, numbers = _put_down(model, optimiser, schedule, generator)
            tensors["losses"] = torch.tensor([row["loss"] for row in history], dtype=torch.float64)
            unfinished.save(epoch + 1, tensors, numbers, last=epoch + 1 == epochs)
        progress(f"epoch {epoch + 1} of {epochs}, loss {mean:.2e}")
    return history


def _put_down(
    model: nn.Module, optimiser: torch.optim.Adam, schedule: Any, generator: torch.Generator
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All that an epoch of Adam changes."""
    tensors = {f"model.{k}": v for k, v in model.state_dict().items()}
    for index, state in optimiser.state_dict()["state"].items():
        tensors |= {f"adam.{index}.{k}": v for k, v in state.items()}
    tensors["generator"] = generator.get_state()
    return tensors, {"rate": optimiser.param_groups[0]["lr"], "steps": schedule.last_epoch}


def _take_up(
    tensors: dict[str, Tensor], numbers: dict[str, Any], model: nn.Module, optimiser: torch.optim.Adam,
    schedule: Any, generator: torch.Generator,
) -> list[float]:  # fmt: skip
    """Put back what `_put_down` took; the losses so far."""
    weights = {k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")}
    checkpoint.fill(model, weights, "the unfinished fit")
    state: dict[int, dict[str, Tensor]] = {}
    try:
        for name, value in tensors.items():
            if name.startswith("adam."):
                _, index, key = name.split(".")
                state.setdefault(int(index), {})[key] = value
        groups = optimiser.state_dict()["param_groups"]
        optimiser.load_state_dict({"state": state, "param_groups": groups})
        optimiser.param_groups[0]["lr"] = numbers["rate"]
        schedule.last_epoch = numbers["steps"]
        generator.set_state(tensors["generator"])
        return tensors["losses"].tolist()
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"the unfinished fit cannot be taken up: {error}") from None
