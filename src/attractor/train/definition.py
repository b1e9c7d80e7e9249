"""The definition of a training run: recipe, model, weights, loss and data. A folder holds one run.

The device, the number of processes, the folder, `tell`, `save_every`, the workers of a loader and the
way in which steps are captured are not part of the definition: they change results by rounding at most.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader, TensorDataset

from attractor.storage.fingerprint import (
    Fingerprints,
    differences,
    fingerprint,
    outline,
    settings_of,
    short,
)
from attractor.storage.schema import listing, mapping, mismatch, number, record, text
from attractor.train import recipe as recipes
from attractor.train.recipe import Recipe

FORMAT = 1
FREE = ("capture",)  # fields of a recipe that may change when a run is resumed
# Fields that may change when a run is extended.
SCHEDULE = ("epochs", "learning_rate", "warmup", "schedule", "milestones", "decay", "floor")
OUTLINE = mapping(text(100_000))  # fingerprints by path
DEFINITION = record(
    {"format": number(whole=True), "recipe": recipes.SCHEMA, "frozen": listing(text()),
     "tied": listing(listing(text())),
     **dict.fromkeys(("model", "weights", "loss", "train_data", "valid_data"), OUTLINE)},
    {"steps": number(0, whole=True), "extends": listing(text())},
)  # fmt: skip
LOADER = ("dataset", "batch_size", "drop_last", "sampler", "batch_sampler", "collate_fn")


@dataclass(frozen=True)
class Definition:
    """The definition of a run, in values that JSON can represent.

    Attributes:
        recipe: its fields; "precision" is the precision in use, also if the recipe says "auto".
        model: path of every module -> its description, with a fingerprint of class and attributes.
        weights: name of every parameter and buffer -> dtype, shape and fingerprint, before training.
        frozen: names of the parameters that are not trained.
        tied: groups of names that refer to one tensor.
        loss, train_data, valid_data: their outlines (`attractor.storage.fingerprint`).
        steps: steps per epoch.
        extends: digests of the definitions that this run had before it was extended.
    """

    recipe: dict[str, Any]
    model: dict[str, str]
    weights: dict[str, str]
    frozen: list[str]
    tied: list[list[str]]
    loss: dict[str, str]
    train_data: dict[str, str]
    valid_data: dict[str, str]
    steps: int = 0
    extends: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, model: nn.Module, train_data: Any, valid_data: Any, recipe: Recipe, loss: Any, *,
        precision: str, processes: int,
    ) -> "Definition":  # fmt: skip
        """Describe a run before it begins, without reading batches or drawing random numbers.

        Args:
            model: the model, with its initial weights.
            precision: the precision in use.
            processes: the number of processes that share every batch; a loader's batch is that of one
                process.
        """
        model, prints = plain(model), Fingerprints("public")
        parameters = [*model.named_parameters(remove_duplicate=False)]
        tensors = [*parameters, *model.named_buffers(remove_duplicate=False)]
        names_of: dict[int, list[str]] = {}
        for name, value in tensors:
            names_of.setdefault(id(value), []).append(name)
        fields = {k: v for k, v in recipe.settings().items() if k not in FREE}
        fields |= {"precision": precision}
        return cls(
            recipe={k: repr(v) if v == math.inf else _as_list(v) for k, v in fields.items()},
            model={path: _module(part, prints) for path, part in model.named_modules()},
            weights={name: _tensor(value) for name, value in tensors} | _extra(model, prints),
            frozen=[name for name, value in parameters if not value.requires_grad],
            tied=[names for names in names_of.values() if len(names) > 1],
            loss={"": "default"} if loss is None else outline(loss, foreign="class"),
            train_data=_data(train_data, processes),
            valid_data={"": "none"} if valid_data is None else _data(valid_data, 1),
        )

    @classmethod
    def from_json(cls, content: Any) -> "Definition":
        """Read the result of `to_json`.

        Raises:
            ValueError: the format is unknown, or the value does not describe a run.
        """
        version = content.get("format") if isinstance(content, dict) else FORMAT
        if version != FORMAT:
            raise ValueError(f"its format is {version!r:.40}, and this version reads {FORMAT}")
        fault = mismatch(content, DEFINITION)
        if fault is not None:
            raise ValueError(fault)
        fields = {name: value for name, value in content.items() if name != "format"}
        return cls(**fields | {"extends": tuple(content.get("extends", ()))})

    def to_json(self) -> dict[str, Any]:
        """Return the definition as it is written to the folder of the run."""
        fields = asdict(self)
        extends = list(fields.pop("extends"))
        return {"format": FORMAT, **fields} | ({"extends": extends} if extends else {})

    @property
    def digest(self) -> str:
        """The fingerprint of the definition, without those of the runs that it extends."""
        return fingerprint({k: v for k, v in self.to_json().items() if k != "extends"})

    def extension_of(self, other: "Definition") -> "Definition":
        """Return this definition as an extension of a run that differs in the schedule at most."""
        if self.digest == other.digest:
            return other
        old = {k: v for k, v in other.recipe.items() if k not in SCHEDULE}
        new = {k: v for k, v in self.recipe.items() if k in SCHEDULE}
        return replace(other, recipe=old | new, extends=(*other.extends, other.digest))

    def unlike(self, other: "Definition") -> list[str]:
        """List the differences from another run, as "X, not Y" with X of this run."""
        messages = []
        theirs = {**asdict(Recipe()), **self.recipe}  # definitions of older versions have fewer options
        for name, value in other.recipe.items():
            if theirs.get(name) != value:
                messages.append(f"{name} = {theirs.get(name)!r:.80}, not {value!r:.80}")
        if self.steps != other.steps:
            messages.append(
                f"{self.steps} steps per epoch, not {other.steps} (the data differ, or a loader's "
                "batches are shared by another number of processes)"
            )
        modules = [p for p in dict.fromkeys((*self.model, *other.model)) if p not in self.model
                   or p not in other.model or self.model[p] != other.model[p]]  # fmt: skip
        if modules:
            first = modules[0]
            one, two = (_without_fingerprint(x.model.get(first)) for x in (self, other))
            place = f"its module {first!r}" if first else "itself"
            how = (
                f" ({place} is {one}, not {two})" if one != two else f" (in {short(map(repr, modules))})"
            )
            messages.append(f"another model{how}")
        weights = self.unlike_weights(other)
        if weights:
            messages.append(weights)
        if sorted(self.frozen) != sorted(other.frozen):
            names = sorted({*self.frozen} ^ {*other.frozen})
            messages.append(f"other parameters frozen ({short(names)})")
        if self.tied != other.tied and not modules:
            messages.append("other parameters tied to each other")
        for what in ("loss", "train_data", "valid_data"):
            parts = differences(getattr(self, what), getattr(other, what), what)
            if parts:
                messages.append(short(parts))
        return messages

    def unlike_weights(self, other: "Definition") -> str:
        """Name the initial weights that differ between two runs; return an empty text if none do."""
        names = [n for n in dict.fromkeys((*self.weights, *other.weights))
                 if self.weights.get(n) != other.weights.get(n)]  # fmt: skip
        return f"other initial weights ({short(names)})" if names else ""


def plain(model: nn.Module) -> nn.Module:
    """Return the module inside the wrapper of `torch.compile`, or the module itself."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model


def _module(part: nn.Module, prints: Fingerprints) -> str:
    """Describe a module for a reader, and append the fingerprint of its class and attributes."""
    try:
        extra = " ".join(part.extra_repr().split())
    except Exception:  # extra_repr may be the user's own code
        extra = ""
    text = f"{type(part).__name__}({extra})"
    digest = prints.of([type(part), settings_of(part)])[:16]
    return f"{text if len(text) <= 100 else text[:97] + '...'} #{digest}"


def _without_fingerprint(text: str | None) -> str:
    return "absent" if text is None else text.rpartition(" #")[0]


def _tensor(value: Tensor) -> str:
    kind = str(value.dtype).removeprefix("torch.")
    return f"{kind} {list(value.shape)} #{fingerprint(value.detach())[:32]}"


def _extra(model: nn.Module, prints: Fingerprints) -> dict[str, str]:
    """Return fingerprints of the state that modules keep beside tensors (`get_extra_state`)."""
    default = nn.Module.get_extra_state
    parts = [(path, m) for path, m in model.named_modules() if type(m).get_extra_state is not default]
    return {f"{path}._extra_state".lstrip("."): prints.of(m.get_extra_state()) for path, m in parts}


def _data(data: Any, processes: int) -> dict[str, str]:
    """Return the outline of data without iterating over them."""
    prints = Fingerprints()
    if hasattr(data, "images") and hasattr(data, "labels"):
        values = {"images": data.images, "labels": data.labels}
        values |= {
            n: torch.as_tensor(getattr(data, n), dtype=torch.float64).tolist() for n in ("mean", "std")
        }
        return {name: prints.told(value) for name, value in values.items()}
    if isinstance(data, DataLoader):
        return _loader(data, processes, prints)
    if type(data) in (list, tuple):
        return _batches(data, processes)
    if isinstance(data, list | tuple):  # a subclass may iterate in its own way
        own = {"class": prints.told(type(data)), "attributes": prints.told(vars(data))}
        return _batches(data, processes) | own
    return prints.outline(data)


def _loader(data: DataLoader[Any], processes: int, prints: Fingerprints) -> dict[str, str]:
    """Return the outline of a loader's data set and of its batching, without its workers."""
    usual = vars(DataLoader(TensorDataset()))
    own = {k: v for k, v in vars(data).items() if k in LOADER or k not in usual}
    if isinstance(data.batch_size, int):
        own["batch_size"] = data.batch_size * processes
        own.pop("batch_sampler", None)  # it follows from the other attributes
    for name in own.keys() & {"sampler", "batch_sampler"}:
        state = getattr(own[name], "__dict__", None)
        if state is not None:
            state = {k: "the data set" if v is data.dataset else v for k, v in state.items()}
            own[name] = [type(own[name]), state]
    parts = {"": f"{type(data).__qualname__} #{prints.of(type(data))[:16]}"}
    for name, value in own.items():
        outline = prints.outline(value)
        parts |= {f"{name}.{path}".rstrip("."): print_ for path, print_ in outline.items()}
    return parts


def _batches(data: Sequence[Any], processes: int) -> dict[str, str]:
    """Return the outline of batches in memory.

    A step takes one batch per process. The outline depends on the rows of each step, not on how the
    processes share them.
    """
    forms, content = set(), hashlib.sha256()
    for start in range(0, len(data), processes):
        step = [tree_flatten(_as_dict(data[i])) for i in range(start, min(start + processes, len(data)))]
        forms |= {str(form) for _, form in step}
        for leaves in zip(*(leaves for leaves, _ in step)):
            rows = all(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves)
            alike = rows and len({(leaf.dtype, leaf.shape[1:]) for leaf in leaves}) == 1
            whole = torch.cat([x.detach().cpu() for x in leaves]) if alike and leaves[1:] else leaves
            whole = leaves[0] if alike and not leaves[1:] else whole
            content.update(fingerprint(whole).encode())
    return {"": f"#{content.hexdigest()[:32]}", "form": f"#{fingerprint(sorted(forms))[:16]}"}


def _as_dict(batch: Any) -> Any:
    return dict(batch) if isinstance(batch, Mapping) else batch


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
