"""The loss of whoever names none: cross-entropy, with accuracy beside it."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

IGNORED = -100  # a label that `cross_entropy` leaves out


class Classify:
    """Cross-entropy and accuracy, an entry a sample, of batches (inputs, labels).

    With mixup a batch has two more, the labels of what is mixed in and the first ones' weights: both
    numbers are then weighted means over the two labels.

    Args:
        label_smoothing: of the loss in training.
        wary: look at the labels of the first batch, for which a GPU has to be waited for.
    """

    def __init__(self, label_smoothing: float = 0.0, wary: bool = False) -> None:
        self.label_smoothing = label_smoothing
        self.wary = wary

    def __call__(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """`label_smoothing` is for training alone."""
        if not isinstance(batch, tuple | list) or len(batch) not in (2, 4):
            given = f"{type(batch).__name__} of {len(batch)}"
            raise ValueError(f"a batch is a {given}; give (inputs, labels), or a loss= of your own")
        logits = model(batch[0])
        if self.wary:
            self.look_at(batch[1], logits)
        found = self.against(logits, batch[1], model.training)
        if len(batch) == 2:
            return found
        _, _, others, weight = batch
        mixed = self.against(logits, others, model.training)
        return {k: torch.lerp(mixed[k].to(weight), found[k].to(weight), weight) for k in found}

    def look_at(self, labels: Tensor, logits: Tensor) -> None:
        """Once: whether labels are classes that the model knows; a GPU would stop without naming any."""
        self.wary = False
        if labels.is_floating_point() or not labels.numel() or logits.dim() < 2:
            return
        classes, low, high = logits.shape[1], *map(int, labels.aminmax())
        if high >= classes or (low < 0 and low != IGNORED):
            raise ValueError(
                f"labels go from {low} to {high}, but the model gives {classes} numbers an input and "
                f"knows labels from 0 to {classes - 1}; make it with more classes, or number yours so"
            )

    def against(self, logits: Tensor, labels: Tensor, training: bool) -> dict[str, Tensor]:
        """Both numbers of logits ``[batch, ..., classes]``, as labels ``[batch, ...]`` would have it."""
        smoothing = self.label_smoothing if training else 0.0
        found = cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
        return {"loss": found, "accuracy": logits.detach().argmax(-1) == labels}
