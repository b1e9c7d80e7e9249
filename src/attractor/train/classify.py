"""The loss of whoever names none: cross-entropy, with accuracy beside it."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

IGNORED = -100  # a label that `cross_entropy` leaves out


class Classify:
    """Cross-entropy and accuracy, an entry a sample, of batches (inputs, labels).

    Labels are classes, of which -100 is left out, or probabilities of them. The model gives a number a
    class: ``[batch, classes, ...]`` for labels ``[batch, ...]``, as torch has it, or with classes last.
    With mixup a batch has two more, the labels of what is mixed in and the first ones' weights: both
    numbers are then weighted means over the two labels.

    Args:
        label_smoothing: of the loss in training.
        wary: look at the labels of the first batch, for which a GPU has to be waited for.
        exact: there are no entries of labels that are left out, for which it has to be waited too;
            False: they are 0 and the others larger, so that the batch's mean is the same.
    """

    def __init__(self, label_smoothing: float = 0.0, wary: bool = False, exact: bool = False) -> None:
        self.label_smoothing = label_smoothing
        self.wary, self.exact = wary, exact

    def __call__(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """`label_smoothing` is for training alone."""
        if not isinstance(batch, tuple | list) or len(batch) not in (2, 4):
            given = f"{type(batch).__name__} of {len(batch)}"
            raise ValueError(f"a batch is a {given}; give (inputs, labels), or a loss= of your own")
        logits = model(batch[0])
        labels = batch[1] if batch[1].is_floating_point() else batch[1].long()
        if labels.shape == logits.shape[:-1] != logits.shape[:1] + logits.shape[2:]:
            logits = logits.movedim(-1, 1)
        if self.wary:
            self.look_at(labels, logits)
        found = self.against(logits, labels, model.training)
        if len(batch) == 2:
            return found if labels.is_floating_point() else self.without(labels == IGNORED, found, model)
        _, _, others, weight = batch
        mixed = self.against(logits, others.long(), model.training)
        return {k: torch.lerp(mixed[k].to(weight), found[k].to(weight), weight) for k in found}

    def without(self, left_out: Tensor, found: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        """What is found of the other labels. A training step needs some entry to take the mean of."""
        if self.exact and not (model.training and bool(left_out.all())):
            return {name: entries[~left_out] for name, entries in found.items()}
        size = left_out.numel() / (~left_out).sum().clamp(min=1)
        return {name: torch.where(left_out, 0, entries * size) for name, entries in found.items()}

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
        """Both numbers of logits ``[batch, classes, ...]``."""
        smoothing = self.label_smoothing if training else 0.0
        found = cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
        classes = labels.argmax(1) if labels.is_floating_point() else labels
        return {"loss": found, "accuracy": logits.detach().argmax(1) == classes}
