"""Training recipes: all settings that the networks of a comparison share."""

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from attractor.storage.fingerprint import fingerprint, outline
from attractor.storage.schema import any_of, flag, listing, null, number, record, text
from attractor.train.groups import undecayed

Optimiser: TypeAlias = Callable[[nn.Module], torch.optim.Optimizer]
Schedule: TypeAlias = Callable[[float], float]

CHOICES = {
    "schedule": ("cosine", "steps", "constant"),
    "optimiser": ("sgd", "adamw"),
    "padding": ("zero", "reflect"),
    "precision": ("auto", "fp32", "bf16", "fp16"),
    "capture": ("auto", "none", "graph", "compile"),
}


@dataclass(frozen=True)
class Recipe:
    """A training recipe. `dataclasses.replace` returns a modified one. The defaults are `SHORT`.

    Attributes:
        epochs: passes over the training set.
        batch: images per step, over all processes together; an incomplete last batch is left out. (Data
            that come as batches keep their own batch size.)
        learning_rate: the highest learning rate.
        warmup: number of epochs (may be fractional) in which the rate grows linearly from 0.
        schedule: the rate after warmup: "cosine" falls to `floor`, "steps" is multiplied by `decay` at
            each of the `milestones` (epochs from 0), "constant" does not change. A function of the time
            in epochs returns the rate as a fraction of learning_rate; `warmup` then has no effect.
        floor: final rate of the cosine schedule, as a fraction of learning_rate.
        optimiser: "sgd" with `momentum` and `nesterov`, or "adamw" with `betas`. A function of the model
            returns any other optimiser, which has learning rates and weight decay of its own: the
            schedule multiplies the rate of each of its groups, and `learning_rate` is not used.
        weight_decay: applied to all parameters with SGD, and to those with two or more dimensions with
            AdamW; `decay_vectors`, True or False, overrides this for both. Parameters of modules that
            declare ``no_weight_decay = True``, such as the coefficients of a `LearnedPDE`, are
            never decayed.
        label_smoothing: label smoothing of the training loss; validation does without.
        mixup: alpha of mixup (Zhang et al., 2018): a training image is a mean of two, with weights w and
            1 - w, and so is its loss; w is drawn per image from Beta(alpha, alpha). 0: no mixup. It
            needs images on the device and the default loss.
        clip: largest norm of the gradient; None: no clipping.
        accumulate: number of batches per update, whose gradients are averaged, each batch with the same
            weight. Batches at the end of an epoch that are too few for an update are left out.
        ema: decay of an exponential moving average of the weights, such as 0.999, which is updated in
            each step. Validation uses the averaged weights, and the trained model has them. 0: no
            average.
        crop: pixels added on each side, with `padding` "zero" (black) or "reflect", before a random crop
            of the original size. flip: whether half of the images are mirrored left to right.
        precision: "bf16" and "fp16" are mixed (torch.autocast); "auto": the precision of `accelerate
            launch` if it is set, else "bf16" on a GPU that supports it, else "fp32".
        channels_last: memory format of images and weights.
        capture: "graph": the whole step, optimiser included, as one CUDA graph; "compile": the same with
            the model's repeated blocks compiled; "none": operation by operation; "auto": "graph" on a
            GPU, else "none". Steps in fp16, of several processes, and of an optimiser of your own are
            never captured. A graph does not repeat what model and loss do in Python (count, print,
            branch on a flag); use "none" if they must.
        seed: seed of batches, crops and dropout. It does not seed the initial weights: call
            ``torch.manual_seed`` before making the model.
    """

    epochs: int = 30
    batch: int = 256
    learning_rate: float = 0.2
    warmup: float = 5.0
    schedule: str | Schedule = "cosine"
    milestones: tuple[int, ...] = ()
    decay: float = 0.1
    floor: float = 0.0
    optimiser: str | Optimiser = "sgd"
    momentum: float = 0.9
    nesterov: bool = True
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 5e-4
    decay_vectors: bool | None = None
    label_smoothing: float = 0.0
    mixup: float = 0.0
    clip: float | None = None
    crop: int = 4
    padding: str = "zero"
    flip: bool = True
    precision: str = "auto"
    channels_last: bool = True
    capture: str = "auto"
    seed: int = 0
    accumulate: int = 1
    ema: float = 0.0

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            value, functions = getattr(self, name), name in ("schedule", "optimiser")
            if value not in choices and not (functions and callable(value)):
                also = ", or a function" if functions else ""
                raise ValueError(f"{name} = {value!r} is not one of {', '.join(choices)}{also}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ValueError(f"seed = {self.seed!r} must be an integer")
        for name, least in (("epochs", 0), ("batch", 1), ("crop", 0), ("accumulate", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} = {value!r} must be an integer of at least {least}")
        for name in ("learning_rate", "warmup", "weight_decay", "decay", "floor", "mixup"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)} must be a finite number of at least 0")
        for name in ("label_smoothing", "ema"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be in [0, 1)")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip = {self.clip} must be positive, or None")
        if (self.schedule == "steps") != bool(self.milestones):
            raise ValueError(
                f"milestones = {self.milestones} with schedule {self.schedule!r}; only schedule 'steps' "
                "has milestones, and it needs them"
            )

    def rate(self, time: float) -> float:
        """Return the learning rate at a time in epochs since the start.

        Training evaluates it at the middle of each step.
        """
        if callable(self.schedule):
            return self.learning_rate * self.schedule(time)
        if time < self.warmup:
            return self.learning_rate * time / self.warmup
        if self.schedule == "steps":
            return self.learning_rate * self.decay ** sum(time >= m for m in self.milestones)
        if self.schedule == "constant":
            return self.learning_rate
        progress = min(1.0, (time - self.warmup) / max(self.epochs - self.warmup, 1e-9))
        return self.learning_rate * (
            self.floor + (1 - self.floor) * (1 + math.cos(math.pi * progress)) / 2
        )

    def fraction(self, time: float) -> float:
        """Return the learning rate at a time as a fraction of the highest one."""
        return replace(self, learning_rate=1.0).rate(time)

    def settings(self) -> dict[str, Any]:
        """Return all fields for JSON; a function is represented by its name and a fingerprint."""
        settings = {own.name: getattr(self, own.name) for own in fields(self)}
        for name in ("schedule", "optimiser"):
            function = settings[name]
            if callable(function):
                digest = fingerprint(outline(function, foreign="class"))[:16]
                settings[name] = f"{getattr(function, '__qualname__', 'function')} #{digest}"
        return settings

    def stream(self, *what: Any) -> int:
        """Return a seed for one purpose, such as ``("batches", epoch)``, that depends on `seed` only.

        No random state is carried from one epoch to the next, so none has to be saved.
        """
        digest = hashlib.sha256(repr((self.seed, *what)).encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1

    def make_optimiser(self, model: nn.Module, rate: Tensor | None = None) -> torch.optim.Optimizer:
        """Return the optimiser of the parameters of a model that require gradients.

        Args:
            model: the model, already on the device of training.
            rate: the learning rate as a tensor ``[]`` on the same GPU, for steps in a CUDA graph: its
                value at the time of a step is the rate of the step.

        Raises:
            TypeError: the function `optimiser` did not return an optimiser.
            ValueError: no parameter requires a gradient.
        """
        parameters = [p for p in model.parameters() if p.requires_grad]
        if not parameters:
            raise ValueError(f"{type(model).__name__} has no parameter that requires a gradient")
        if callable(self.optimiser):
            own = self.optimiser(model)
            if not isinstance(own, torch.optim.Optimizer):
                raise TypeError(
                    f"the function optimiser returned a {type(own).__name__}; it must return a "
                    "torch.optim.Optimizer of the model's parameters"
                )
            return own
        vectors = self.optimiser == "sgd" if self.decay_vectors is None else self.decay_vectors
        groups = _groups(parameters, self.weight_decay, vectors, undecayed(model))
        # Fused SGD does not accept sharded parameters; by default they are updated one by one.
        sharded = any(hasattr(p, "full_tensor") for p in parameters)
        on_gpu = all(p.is_cuda and p.is_floating_point() for p in parameters)
        ways: dict[str, Any] = {"foreach": True} if sharded else {"fused": True} if on_gpu else {}
        lr = self.learning_rate if rate is None else rate
        if self.optimiser == "sgd":
            nesterov = self.nesterov and self.momentum > 0
            return torch.optim.SGD(groups, lr, momentum=self.momentum, nesterov=nesterov, **ways)
        adamw = torch.optim.AdamW(groups, lr, self.betas, capturable=rate is not None, **ways)
        adamw._warned_capturable_if_run_uncaptured = True  # the steps before the capture are intended
        return adamw


def _groups(
    parameters: Iterable[nn.Parameter], decay: float, vectors: bool, never: Iterable[nn.Parameter]
) -> list[dict[str, Any]]:
    decayed: list[nn.Parameter] = []
    without_decay: list[nn.Parameter] = []
    excluded_ids = {id(p) for p in never}
    for p in parameters:
        (decayed if (vectors or p.dim() > 1) and id(p) not in excluded_ids else without_decay).append(p)
    groups = [{"params": decayed, "weight_decay": decay}, {"params": without_decay, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


# The schema of a recipe in files, where infinite numbers are null or text.
OPTION = any_of(number(), text(), flag, null, listing(number(), most=1000))
SCHEMA = record({}, {own.name: OPTION for own in fields(Recipe)})

SHORT = Recipe()  # for a fair short comparison
PAPER = Recipe(  # Table 6 of the StepNet paper, ResNet164 on CIFAR
    epochs=164, batch=128, learning_rate=0.1, warmup=0.0, schedule="steps", milestones=(81, 122),
    nesterov=False, weight_decay=1e-4,
)  # fmt: skip
