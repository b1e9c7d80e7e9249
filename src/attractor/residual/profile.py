"""The result of `probe`: the stiffness of each block of a network for each input."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from attractor.common.checks import check_beside, check_tensor, check_values
from attractor.common.views import html_table, pandas, pictures
from attractor.core import stiffness
from attractor.core.stiffness import Mean
from attractor.residual import ranks
from attractor.storage.objects import AnyPath
from attractor.storage.schema import check, listing, record, text
from attractor.storage.tensor_specs import ANY, FINITE, TensorSpec, check_tensors
from attractor.train import checkpoint
from attractor.train.checkpoint import CheckpointError
from attractor.train.tensors import described

Step: TypeAlias = Literal["one", "gate"]
STEPS: tuple[Step, ...] = ("one", "gate")
KIND = "stiffness profile"
MOST_STAGES = 100_000
PROFILE = record(
    {"names": listing(text()), "model": text(), "granularity": text(choices=("block", "addition")),
     "step": text(choices=STEPS), "mean": text(choices=("input", "stage"))},
    {"initial": text()},
)  # fmt: skip
MATRIX = TensorSpec(("inputs", "blocks"))
GATES = TensorSpec(("inputs", "blocks"), values=ANY)  # NaN where there is no gate
TENSORS = {
    "one": MATRIX, "gate": GATES, "gates": GATES, "stage": TensorSpec(("blocks",), (torch.int64,)),
}  # fmt: skip
BEFORE, GATES_BEFORE = (TensorSpec(("initial inputs", "blocks"), values=v) for v in (FINITE, ANY))
INITIAL = {"initial.one": BEFORE, "initial.gate": GATES_BEFORE, "initial.gates": GATES_BEFORE}


@dataclass(frozen=True, eq=False)
class StiffnessProfile:
    """Stiffness of a network's blocks for each input.

    Attributes:
        one: NSI ``[inputs, blocks]`` with step size 1.
        gate: NSI ``[inputs, blocks]`` with gates as step sizes; equal to `one` without a gate.
        gates: Mean value of each block's gate ``[inputs, blocks]``, NaN for blocks without a gate. If a
            branch has several gates, it is the product of their means.
        stage: Stage of each block ``[blocks]``, from 0.
        names: Path of each block's module, such as ``layer1.0``.
        model: Name of the network's class.
        granularity: "block" or "addition".
        step: "one" or "gate": the step size of `nsi`.
        mean: The mean with which TNS compares the NSI of a block: that of its stage for each "input", or
            that over the whole "stage".
        initial: Profile of the same network before training, or None.
    """

    one: Tensor
    gate: Tensor
    gates: Tensor
    stage: Tensor
    names: tuple[str, ...]
    model: str = "network"
    granularity: str = "block"
    step: Step = "one"
    mean: Mean = "input"
    initial: "StiffnessProfile | None" = None

    def __post_init__(self) -> None:
        for name in ("one", "gate", "gates"):
            check_tensor(name, getattr(self, name), "[inputs, blocks]")
            check_values(name, getattr(self, name))
        check_tensor("stage", self.stage, "[blocks]", floating=False)
        shapes = {tuple(x.shape) for x in (self.one, self.gate, self.gates)}
        if len(shapes) > 1 or self.one.dim() != 2 or self.stage.shape != self.one.shape[1:]:
            raise ValueError(
                "one, gate and gates must be [inputs, blocks] and stage [blocks], not "
                f"{list(self.one.shape)}, {list(self.gate.shape)}, {list(self.gates.shape)} and "
                f"{list(self.stage.shape)}"
            )
        check_beside("stage", self.stage, "one", self.one)
        if not isinstance(self.names, tuple | list) or len(self.names) != len(self.stage):
            raise ValueError(f"names {self.names!r} must name the {len(self.stage)} blocks")
        if self.step not in STEPS:
            raise ValueError(f"step = {self.step!r}; it is 'one' or 'gate'")
        if self.mean not in ("input", "stage"):
            raise ValueError(f"mean = {self.mean!r}; it is 'input' or 'stage'")
        if self.step == "gate" and bool(self.gate.isnan().any()):
            missing = [n for n, bad in zip(self.names, self.gate.isnan().any(0)) if bad]
            raise ValueError(
                f"the gates of {', '.join(missing[:4])} act on other axes than the block's sum, which "
                "joins several additions; probe with granularity='addition' for step='gate'"
            )

    @property
    def nsi(self) -> Tensor:
        """NSI ``[inputs, blocks]`` with the step size `step`."""
        return self.one if self.step == "one" else self.gate

    @property
    def tns(self) -> Tensor:
        """Total neural stiffness without the first block of each stage; `note` states its gaps.

        Raises:
            ValueError: Each stage has one block only, so no block remains.
        """
        if len(self.stage.unique()) == len(self.stage):
            raise ValueError(
                f"all {len(self.stage)} stages have one block only, which .tns omits; use .nsi of the "
                "blocks (.total(drop_first=False) includes them, but with mean='input' a single block "
                "equals its mean, and contributes 0)"
            )
        return self.total()

    @property
    def note(self) -> str:
        """The stages that TNS does not measure, why, and the alternative; empty if there are none."""
        silent = stiffness.silent_stages(self.stage, mean=self.mean)
        if not silent:
            return ""
        single = stiffness.silent_stages(self.stage, drop_first=False, mean=self.mean)
        starts = [self.names[int((self.stage == s).nonzero()[0])] for s in silent]
        more = f" and {len(starts) - 4} more" if len(starts) > 4 else ""
        which = f"the stages that begin at {', '.join(starts[:4])}{more}"
        if len(silent) == len(self.stage.unique()):
            which = "any stage"
        count = "at most one" if self.mean == "input" else "none"
        alternatives = ["the NSI of each block (.nsi)"]
        if single != silent:
            alternatives.insert(0, ".total(drop_first=False), which includes first blocks")
        if single:
            alternatives[-1] += f"; for {len(single)} stages of one block it is the only alternative"
        return (
            f"TNS does not measure {which}: it omits a stage's first block and compares the others with "
            f"their mean, and {count} remains. Use {', or '.join(alternatives)}."
        )

    @property
    def gated(self) -> bool:
        """Whether any block has a gate."""
        return not bool(self.gates.isnan().all())

    def total(self, drop_first: bool = True) -> Tensor:
        """Return the total neural stiffness; ``drop_first=False`` includes the stages' first blocks."""
        return stiffness.total_neural_stiffness(self.nsi, self.stage, drop_first, self.mean)

    def proportion(self, m1: Tensor | float, m2: Tensor | float, drop_first: bool = True) -> Tensor:
        """Return the fraction of all blocks of all inputs that exceed the thresholds m1 and m2."""
        return stiffness.stiffness_proportion(self.nsi, self.stage, m1, m2, drop_first, self.mean)

    def surface(self, m1: Tensor | float, m2: Tensor | float, drop_first: bool = True) -> Tensor:
        """Return the fraction of the inputs with a block that exceeds the thresholds m1 and m2."""
        return stiffness.stiffness_surface(self.nsi, self.stage, m1, m2, drop_first, self.mean)

    def with_step(self, step: Step) -> "StiffnessProfile":
        """Return the same measurement with another step size."""
        initial = self.initial.with_step(step) if self.initial is not None else None
        return replace(self, step=step, initial=initial)

    def with_mean(self, mean: Mean) -> "StiffnessProfile":
        """Return the same measurement with another mean in TNS."""
        initial = self.initial.with_mean(mean) if self.initial is not None else None
        return replace(self, mean=mean, initial=initial)

    def beside(self, initial: "StiffnessProfile | None") -> "StiffnessProfile":
        """Return this profile with the profile of the network before training."""
        if initial is not None and not isinstance(initial, StiffnessProfile):
            raise TypeError(f"initial is a {type(initial).__name__}; pass a StiffnessProfile")
        if initial is not None and initial.stage.tolist() != self.stage.tolist():
            raise ValueError(
                f"the network before training has blocks {_outline(initial)}, this one "
                f"{_outline(self)}; pass a network of the same architecture"
            )
        if initial is not None:
            initial = replace(initial, step=self.step, mean=self.mean, initial=None)
        return replace(self, initial=initial)

    def correlation(self) -> dict[str, Tensor]:
        """Return the correlation of NSI and mean gate value over the inputs (the paper's Fig. 9).

        Returns:
            "pearson" and "spearman" ``[blocks]``; NaN if there is no gate, or its value is constant.
        """
        pairs = [(self.nsi[:, b], self.gates[:, b]) for b in range(len(self.names))]
        kinds = {"pearson": ranks.pearson, "spearman": ranks.spearman}
        return {
            name: torch.tensor([math.nan if g.isnan().any() else f(x, g) for x, g in pairs])
            for name, f in kinds.items()
        }

    def stages(self) -> list[dict[str, Any]]:
        """Return one row per stage: number of blocks, mean and largest NSI, initial NSI, mean gate."""
        rows = []
        for number in self.stage.unique().tolist():
            members = self.stage == number
            nsi = self.nsi[:, members]
            initial = self.initial.nsi[:, members] if self.initial is not None else None
            gates = self.gates[:, members]
            rows.append(
                {
                    "stage": number,
                    "first": self.names[int(members.nonzero()[0])],
                    "blocks": int(members.sum()),
                    "mean": nsi.mean().item(),
                    "largest": nsi.max().item(),
                    "initial": initial.mean().item() if initial is not None else None,
                    "gate": gates[~gates.isnan()].mean().item() if not gates.isnan().all() else None,
                }
            )
        return rows

    def totals(self, drop_first: bool = True) -> dict[str, dict[str, float | None]]:
        """Return TNS by step size, after and before training; None where it is undefined."""
        return {
            step: {
                "trained": _total(self, step, drop_first),
                "initial": _total(self.initial, step, drop_first) if self.initial is not None else None,
            }
            for step in STEPS
        }

    def summary(self) -> str:
        """Return a table of the stages, and TNS with both step sizes after and before training."""
        lines = [
            repr(self),
            f"{'stage':>5} {'blocks':>6} {'NSI':>8} {'largest':>8} {'initial':>8}  first",
        ]
        for row in self.stages():
            numbers = " ".join(f"{as_text(row[k]):>8}" for k in ("mean", "largest", "initial"))
            lines.append(f"{row['stage']:>5} {row['blocks']:>6} {numbers}  {row['first']}")
        for step, pair in self.totals().items():
            lines.append(
                f"TNS, step {step}: {as_text(pair['trained'])}, initial {as_text(pair['initial'])}"
            )
        if self.note:
            lines.append(self.note)
        if self.initial is None:
            lines.append(
                "initial: unknown; NSI depends on it, so call probe(..., initial=model before training)"
            )
        if not self.gated:
            lines.append("no gates: both step sizes are 1")
        return "\n".join(lines)

    def __repr__(self) -> str:
        shape = f"{self.nsi.shape[0]} inputs, {len(self.names)} {self.granularity}s"
        initial = "" if self.initial is None else ", with its initial value"
        stages = len(self.stage.unique())
        silent = len(stiffness.silent_stages(self.stage, mean=self.mean))
        gaps = f"; TNS does not measure {silent} stages, see .note" if silent else ""
        return (
            f"StiffnessProfile({self.model}: {shape} in {stages} stages, step "
            f"{self.step}, mean NSI {self.nsi.mean().item():.3g}{initial}{gaps})"
        )

    def __str__(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        head = ("first", "stage", "blocks", "mean", "largest", "initial", "gate")
        rows = [
            [row["stage"] + 1 if key == "stage" else row[key] for key in head] for row in self.stages()
        ]
        totals = [
            f"TNS, step {step}: {as_text(pair['trained'])}, initial {as_text(pair['initial'])}"
            for step, pair in self.totals().items()
        ]
        caption = ". ".join((repr(self), *totals)) + f". {self.note}"
        return html_table(head, rows, caption.rstrip())

    def to_pandas(self) -> Any:
        """Return a pandas table with one row per input and block.

        Its columns are input, block, name, stage, NSI with both step sizes (one, gate), gate_value, and
        NSI before training (initial) if it is known. Requires the extra `report`.
        """
        inputs, blocks = self.one.shape
        columns: dict[str, Any] = {
            "input": torch.arange(inputs).repeat_interleave(blocks).numpy(),
            "block": torch.arange(blocks).repeat(inputs).numpy(),
            "name": list(self.names) * inputs,
            "stage": self.stage.repeat(inputs).cpu().numpy(),
            "one": self.one.flatten().cpu().numpy(),
            "gate": self.gate.flatten().cpu().numpy(),
            "gate_value": self.gates.flatten().cpu().numpy(),
        }
        if self.initial is not None and self.initial.one.shape == self.one.shape:
            columns["initial"] = self.initial.one.flatten().cpu().numpy()
        return pandas().DataFrame(columns)

    def plot(self, kind: str = "all", path: Path | str | None = None) -> Any:
        """Draw the profile. Requires the extra `report`.

        Args:
            kind: "nsi" by block, "surface" of TNS over both thresholds, "proportion" of stiff blocks,
                "gates" against NSI, or "all".
            path: File to write the picture to, as PNG.

        Returns:
            A Matplotlib figure.
        """
        return pictures("stiffness").draw(self, kind, path)

    def numbers(self) -> dict[str, Any]:
        """Return TNS, the stages, and the mean over the inputs for each block, for a JSON file."""
        initial = self.initial.one.mean(0).tolist() if self.initial is not None else None
        return {
            "model": self.model,
            "granularity": self.granularity,
            "inputs": self.nsi.shape[0],
            "mean": self.mean,
            "tns": self.totals(),
            "tns_with_first": self.totals(drop_first=False),
            "note": self.note,
            "stages": self.stages(),
            "blocks": [
                {
                    "name": name,
                    "stage": int(self.stage[b]),
                    "one": self.one[:, b].mean().item(),
                    "gate": self.gate[:, b].mean().item(),
                    "gate_value": self.gates[:, b].mean().item(),
                    "initial": initial[b] if initial is not None else None,
                }
                for b, name in enumerate(self.names)
            ],
        }

    def save(self, folder: AnyPath | str) -> AnyPath:
        """Write the profile to a folder of its own; an older profile there is replaced."""
        tensors = {k: getattr(self, k) for k in ("one", "gate", "gates", "stage")}
        config: dict[str, Any] = {
            k: getattr(self, k) for k in ("names", "model", "granularity", "step", "mean")
        }
        if self.initial is not None:
            tensors |= {f"initial.{k}": getattr(self.initial, k) for k in ("one", "gate", "gates")}
            config["initial"] = self.initial.model
        return checkpoint.save(folder, KIND, tensors, config)

    @classmethod
    def load(cls, folder: AnyPath | str) -> "StiffnessProfile":
        """Read a profile that `save` wrote.

        Raises:
            CheckpointError: The folder does not hold a valid profile.
        """
        tensors, config = checkpoint.load(folder, KIND)
        check(config, PROFILE, folder, CheckpointError)
        initial_model = config.pop("initial", None)
        specs = TENSORS if initial_model is None else TENSORS | INITIAL
        check_tensors(tensors, specs, folder, CheckpointError)
        config["names"] = tuple(config["names"])
        config["stage"] = tensors["stage"]

        def make(prefix: str) -> StiffnessProfile:
            options: dict[str, Any] = {k: tensors[prefix + k] for k in ("one", "gate", "gates")}
            return cls(**options, **config)

        with described(folder, "a profile"):
            stages = tensors["stage"].unique().tolist()
            if stages and not 0 <= stages[0] <= stages[-1] < MOST_STAGES:
                raise ValueError(f"its stages are {stages[0]} to {stages[-1]}; they count from 0")
            profile = make("")
            if initial_model is None:
                return profile
            config["model"] = initial_model
            return profile.beside(make("initial."))


def _total(profile: StiffnessProfile, step: Step, drop_first: bool) -> float | None:
    try:
        return profile.with_step(step).total(drop_first).item()
    except ValueError:  # one block per stage, or features that are zero
        return None


def _outline(profile: StiffnessProfile) -> list[int]:
    return torch.bincount(profile.stage).tolist()


def as_text(value: float | None) -> str:
    """Format a value with four digits, None as a dash."""
    return "–" if value is None else f"{value:.4g}"
