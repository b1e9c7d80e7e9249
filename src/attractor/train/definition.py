"""What defines a training run, so that a folder never holds two: recipe, model, weights, loss and data.

The device, the number of processes, the folder, `tell`, `save_every`, the workers of a loader and how
steps are captured do not define a run: they change no number, or change it by rounding only.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader, TensorDataset

from attractor.core.fingerprint import (
    Fingerprints,
    differences,
    fingerprint,
    outline,
    settings_of,
    short,
)
from attractor.core.schema import listing, mapping, mismatch, number, record, text
from attractor.train import recipe as recipes
from attractor.train.recipe import Recipe

FORMAT = 1
FREE = ("capture",)  # of a recipe: may be another when a run goes on
OUTLINE = mapping(text(100_000))  # of fingerprints by path
DEFINITION = record(
    {"format": number(whole=True), "recipe": recipes.SCHEMA, "frozen": listing(text()),
     "tied": listing(listing(text())),
     **dict.fromkeys(("model", "weights", "loss", "train_data", "valid_data"), OUTLINE)},
    {"steps": number(0, whole=True)},
)  # fmt: skip
LOADER = ("dataset", "batch_size", "drop_last", "sampler", "batch_sampler", "collate_fn")


@dataclass(frozen=True)
class Definition:
    """What defines a run, as JSON holds it.

    Attributes:
        recipe: its fields; "precision" is the one in use, where the recipe says "auto".
        model: path of every module -> what it is, with a fingerprint of its class and attributes.
        weights: name of every parameter and buffer -> dtype, shape and fingerprint, before training.
        frozen: names of the parameters that are not trained.
        tied: groups of names that are one tensor.
        loss, train_data, valid_data: their outlines (`attractor.core.fingerprint`).
        steps: steps per epoch.
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

    @classmethod
    def of(
        cls, model: nn.Module, train_data: Any, valid_data: Any, recipe: Recipe, loss: Any, *,
        precision: str, processes: int,
    ) -> "Definition":  # fmt: skip
        """Describe a run that has not begun; nothing is drawn from data or random generators.

        Args:
            model: with the weights that it starts from.
            precision: the one in use.
            processes: how many share every batch; a loader's batch is that of one of them.
        """
        model, prints = plain(model), Fingerprints("public")
        named = [*model.named_parameters(remove_duplicate=False)]
        tensors = [*named, *model.named_buffers(remove_duplicate=False)]
        same: dict[int, list[str]] = {}
        for name, value in tensors:
            same.setdefault(id(value), []).append(name)
        fields = {k: v for k, v in asdict(recipe).items() if k not in FREE} | {"precision": precision}
        return cls(
            recipe={k: repr(v) if v == math.inf else _as_list(v) for k, v in fields.items()},
            model={path: _module(part, prints) for path, part in model.named_modules()},
            weights={name: _tensor(value) for name, value in tensors} | _extra(model, prints),
            frozen=[name for name, value in named if not value.requires_grad],
            tied=[names for names in same.values() if len(names) > 1],
            loss={"": "default"} if loss is None else outline(loss, foreign="class"),
            train_data=_data(train_data, processes),
            valid_data={"": "none"} if valid_data is None else _data(valid_data, 1),
        )

    @classmethod
    def from_json(cls, saved: Any) -> "Definition":
        """Read what `to_json` wrote.

        Raises:
            ValueError: it has another format, or is not the description of a run.
        """
        version = saved.get("format") if isinstance(saved, dict) else FORMAT
        if version != FORMAT:
            raise ValueError(f"its format is {version!r:.40}, and this version reads {FORMAT}")
        fault = mismatch(saved, DEFINITION)
        if fault is not None:
            raise ValueError(fault)
        return cls(**{name: value for name, value in saved.items() if name != "format"})

    def to_json(self) -> dict[str, Any]:
        """Return what is written to the folder of the run."""
        return {"format": FORMAT, **asdict(self)}

    @property
    def digest(self) -> str:
        """The fingerprint of all of it."""
        return fingerprint(self.to_json())

    def unlike(self, other: "Definition") -> list[str]:
        """Name what differs in this run from another one, as "X, not Y" with X of this one."""
        found = []
        theirs = {**asdict(Recipe()), **self.recipe}  # older ones know fewer options
        for name, value in other.recipe.items():
            if theirs.get(name) != value:
                found.append(f"{name} = {theirs.get(name)!r:.80}, not {value!r:.80}")
        if self.steps != other.steps:
            found.append(
                f"{self.steps} steps per epoch, not {other.steps} (other data, or a loader's batch, "
                "which is one process's own, with another number of processes)"
            )
        changed = [p for p in dict.fromkeys((*self.model, *other.model)) if p not in self.model
                   or p not in other.model or self.model[p] != other.model[p]]  # fmt: skip
        if changed:
            first = changed[0]
            one, two = (_shown(x.model.get(first)) for x in (self, other))
            place = f"its module {first!r}" if first else "itself"
            how = (
                f" ({place} is {one}, not {two})" if one != two else f" (in {short(map(repr, changed))})"
            )
            found.append(f"another model{how}")
        weights = self.unlike_weights(other)
        if weights:
            found.append(weights)
        if sorted(self.frozen) != sorted(other.frozen):
            names = sorted({*self.frozen} ^ {*other.frozen})
            found.append(f"other parameters frozen ({short(names)})")
        if self.tied != other.tied and not changed:
            found.append("other parameters tied to each other")
        for what in ("loss", "train_data", "valid_data"):
            parts = differences(getattr(self, what), getattr(other, what), what)
            if parts:
                found.append(short(parts))
        return found

    def unlike_weights(self, other: "Definition") -> str:
        """Name the weights that differ at the beginning of two runs; empty if none do."""
        names = [n for n in dict.fromkeys((*self.weights, *other.weights))
                 if self.weights.get(n) != other.weights.get(n)]  # fmt: skip
        return f"other initial weights ({short(names)})" if names else ""


def plain(model: nn.Module) -> nn.Module:
    """The module that `torch.compile` has wrapped, or the module itself."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model


def _module(part: nn.Module, prints: Fingerprints) -> str:
    """What a module is, for a reader, and its fingerprint: class and attributes."""
    try:
        extra = " ".join(part.extra_repr().split())
    except Exception:  # of the user's own
        extra = ""
    text = f"{type(part).__name__}({extra})"
    made = prints.of([type(part), settings_of(part)])[:16]
    return f"{text if len(text) <= 100 else text[:97] + '...'} #{made}"


def _shown(text: str | None) -> str:
    return "absent" if text is None else text.rpartition(" #")[0]


def _tensor(value: Tensor) -> str:
    kind = str(value.dtype).removeprefix("torch.")
    return f"{kind} {list(value.shape)} #{fingerprint(value.detach())[:32]}"


def _extra(model: nn.Module, prints: Fingerprints) -> dict[str, str]:
    """What modules keep in a state beside tensors (`get_extra_state`)."""
    default = nn.Module.get_extra_state
    parts = [(path, m) for path, m in model.named_modules() if type(m).get_extra_state is not default]
    return {f"{path}._extra_state".lstrip("."): prints.of(m.get_extra_state()) for path, m in parts}


def _data(data: Any, processes: int) -> dict[str, str]:
    """The outline of data, which are not gone through."""
    prints = Fingerprints()
    if hasattr(data, "images") and hasattr(data, "labels"):
        found = {"images": data.images, "labels": data.labels}
        found |= {
            n: torch.as_tensor(getattr(data, n), dtype=torch.float64).tolist() for n in ("mean", "std")
        }
        return {name: prints.told(value) for name, value in found.items()}
    if isinstance(data, DataLoader):
        return _loader(data, processes, prints)
    if type(data) in (list, tuple):
        return _batches(data, processes)
    if isinstance(data, list | tuple):  # which may give them in a way of its own
        own = {"class": prints.told(type(data)), "attributes": prints.told(vars(data))}
        return _batches(data, processes) | own
    return prints.outline(data)


def _loader(data: DataLoader[Any], processes: int, prints: Fingerprints) -> dict[str, str]:
    """A loader's data set and how it makes batches, without its workers."""
    usual = vars(DataLoader(TensorDataset()))
    own = {k: v for k, v in vars(data).items() if k in LOADER or k not in usual}
    if isinstance(data.batch_size, int):
        own["batch_size"] = data.batch_size * processes
        own.pop("batch_sampler", None)  # made of the others
    for name in own.keys() & {"sampler", "batch_sampler"}:
        state = getattr(own[name], "__dict__", None)
        if state is not None:
            state = {k: "the data set" if v is data.dataset else v for k, v in state.items()}
            own[name] = [type(own[name]), state]
    parts = {"": f"{type(data).__qualname__} #{prints.of(type(data))[:16]}"}
    for name, value in own.items():
        found = prints.outline(value)
        parts |= {f"{name}.{path}".rstrip("."): told for path, told in found.items()}
    return parts


def _batches(data: Sequence[Any], processes: int) -> dict[str, str]:
    """Batches in memory. A step takes as many of them as there are processes; which rows a step has
    counts, and not how processes share them."""
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
