"""The default loss: cross-entropy and accuracy."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

IGNORED = -100  # the label that `cross_entropy` ignores


class Classify:
    """Cross-entropy and accuracy of batches (inputs, labels), one entry per sample.

    Labels are classes, of which -100 is ignored, or class probabilities. The model returns one logit per
    class: ``[batch, classes, ...]`` for labels ``[batch, ...]``, as in torch, or with classes last. With
    mixup a batch has two more tensors, the labels of the second images and the weights of the first
    ones; both numbers are then weighted means over the two labels.

    Args:
        label_smoothing: label smoothing of the training loss.
        wary: check the labels of the first batch, which waits for a GPU.
        exact: return no entries for ignored labels, which waits for a GPU. If False, their entries are 0
            and the others are scaled, so that the mean over the batch is the same.
    """

    def __init__(self, label_smoothing: float = 0.0, wary: bool = False, exact: bool = False) -> None:
        self.label_smoothing = label_smoothing
        self.wary, self.exact = wary, exact

    def __call__(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return "loss" and "accuracy"; labels are smoothed in training mode only."""
        if not isinstance(batch, tuple | list) or len(batch) not in (2, 4):
            description = f"{type(batch).__name__} of length {len(batch)}"
            raise ValueError(
                f"a batch is a {description}, but the default loss needs (inputs, labels); pass loss= "
                "for other batches"
            )
        logits = model(batch[0])
        labels = batch[1] if batch[1].is_floating_point() else batch[1].long()
        if labels.shape == logits.shape[:-1] != logits.shape[:1] + logits.shape[2:]:
            logits = logits.movedim(-1, 1)
        if self.wary:
            self.look_at(labels, logits)
        numbers = self.against(logits, labels, model.training)
        if len(batch) == 2:
            return (
                numbers
                if labels.is_floating_point()
                else self.without(labels == IGNORED, numbers, model)
            )
        _, _, others, weight = batch
        second = self.against(logits, others.long(), model.training)
        return {k: torch.lerp(second[k].to(weight), numbers[k].to(weight), weight) for k in numbers}

    def without(
        self, ignored: Tensor, numbers: dict[str, Tensor], model: nn.Module
    ) -> dict[str, Tensor]:
        """Remove ignored labels. A training step keeps at least one entry, so that it has a mean."""
        if self.exact and not (model.training and bool(ignored.all())):
            return {name: entries[~ignored] for name, entries in numbers.items()}
        size = ignored.numel() / (~ignored).sum().clamp(min=1)
        return {name: torch.where(ignored, 0, entries * size) for name, entries in numbers.items()}

    def look_at(self, labels: Tensor, logits: Tensor) -> None:
        """Check once that all labels are classes of the model; a CUDA assertion would not name them."""
        self.wary = False
        if labels.is_floating_point() or not labels.numel() or logits.dim() < 2:
            return
        classes, low, high = logits.shape[1], *map(int, labels.aminmax())
        if high >= classes or (low < 0 and low != IGNORED):
            raise ValueError(
                f"labels go from {low} to {high}, but the model gives {classes} numbers per input and "
                f"accepts labels from 0 to {classes - 1}; make a model with more classes, or renumber "
                "the labels"
            )

    def against(self, logits: Tensor, labels: Tensor, training: bool) -> dict[str, Tensor]:
        """Return loss and accuracy of logits ``[batch, classes, ...]``, one entry per label."""
        smoothing = self.label_smoothing if training else 0.0
        losses = cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
        classes = labels.argmax(1) if labels.is_floating_point() else labels
        return {"loss": losses, "accuracy": logits.detach().argmax(1) == classes}
