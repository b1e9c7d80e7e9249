"""What a probe finds: the stiffness of every block of a network on every input, and what follows."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from attractor.core import stiffness
from attractor.core.checks import check_beside, check_tensor, check_values
from attractor.core.files import write_json
from attractor.core.schema import check, listing, record, text
from attractor.core.stiffness import Mean
from attractor.core.tensor_specs import ANY, FINITE, TensorSpec, check_tensors
from attractor.core.views import html_table, pandas, pictures
from attractor.residual import ranks
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
    """Stiffness of a network's blocks, input by input.

    Attributes:
        one, gate: NSI ``[inputs, blocks]`` with a step of 1, and with gates as step sizes. Where a block
            has no gate they are equal.
        gates: mean value of each block's gate ``[inputs, blocks]``, NaN where there is none; the product
            of the means where a branch passes several.
        stage: the stage of every block ``[blocks]``, from 0.
        names: the block's modules, as ``layer1.0``.
        model, granularity: what was probed, and by "block" or "addition".
        step: which of the two `nsi` is.
        mean: what TNS compares a block with: its stage's mean over an "input" or over the "stage".
        initial: the same network before training, or None.
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
        """``[inputs, blocks]``, with the step that `step` names."""
        return self.one if self.step == "one" else self.gate

    @property
    def tns(self) -> Tensor:
        """Total neural stiffness, every stage's first block left out; `note` says of what it is silent.

        Raises:
            ValueError: nothing is left, as every stage has one block only.
        """
        if len(self.stage.unique()) == len(self.stage):
            raise ValueError(
                f"all {len(self.stage)} stages have one block only, and .tns leaves that out; "
                "look at .nsi, block by block (.total(drop_first=False) counts it too, but with "
                "mean='input' a block alone is as stiff as its mean, and adds 0)"
            )
        return self.total()

    @property
    def note(self) -> str:
        """Of which stages TNS says nothing, why, and what to use instead; empty if of none."""
        silent = stiffness.silent_stages(self.stage, mean=self.mean)
        if not silent:
            return ""
        lonely = stiffness.silent_stages(self.stage, drop_first=False, mean=self.mean)
        starts = [self.names[int((self.stage == s).nonzero()[0])] for s in silent]
        every = len(silent) == len(self.stage.unique())
        more = f" and {len(starts) - 4} more" if len(starts) > 4 else ""
        which = "any stage" if every else f"the stages that begin at {', '.join(starts[:4])}{more}"
        left = "one block at most is" if self.mean == "input" else "no block is"
        use = ["NSI block by block (.nsi)"]
        if lonely != silent:
            use.insert(0, ".total(drop_first=False), which counts first blocks too")
        if lonely:
            use[-1] += f"; of {len(lonely)} with one block in all there is nothing else"
        return (
            f"TNS says nothing of {which}: it leaves out a stage's first block and compares the others "
            f"with their mean, and {left} left. Use {', or '.join(use)}."
        )

    @property
    def gated(self) -> bool:
        """Whether any block has a gate."""
        return not bool(self.gates.isnan().all())

    def total(self, drop_first: bool = True) -> Tensor:
        """Total neural stiffness; ``drop_first=False`` counts the stages' first blocks too."""
        return stiffness.total_neural_stiffness(self.nsi, self.stage, drop_first, self.mean)

    def proportion(self, m1: Tensor | float, m2: Tensor | float, drop_first: bool = True) -> Tensor:
        """The part of all blocks of all inputs that exceed the thresholds (m1, m2)."""
        return stiffness.stiffness_proportion(self.nsi, self.stage, m1, m2, drop_first, self.mean)

    def surface(self, m1: Tensor | float, m2: Tensor | float, drop_first: bool = True) -> Tensor:
        """The part of the inputs that have some block exceeding the thresholds (m1, m2)."""
        return stiffness.stiffness_surface(self.nsi, self.stage, m1, m2, drop_first, self.mean)

    def with_step(self, step: Step) -> "StiffnessProfile":
        """The same measurement with the other step size."""
        initial = self.initial.with_step(step) if self.initial is not None else None
        return replace(self, step=step, initial=initial)

    def with_mean(self, mean: Mean) -> "StiffnessProfile":
        """The same measurement with another mean in TNS."""
        initial = self.initial.with_mean(mean) if self.initial is not None else None
        return replace(self, mean=mean, initial=initial)

    def beside(self, initial: "StiffnessProfile | None") -> "StiffnessProfile":
        """This profile with that of the network before training."""
        if initial is not None and not isinstance(initial, StiffnessProfile):
            raise TypeError(f"initial is a {type(initial).__name__}; give a StiffnessProfile")
        if initial is not None and initial.stage.tolist() != self.stage.tolist():
            raise ValueError(
                f"the network before training has blocks {_outline(initial)}, this one "
                f"{_outline(self)}; give the same architecture"
            )
        if initial is not None:
            initial = replace(initial, step=self.step, mean=self.mean, initial=None)
        return replace(self, initial=initial)

    def correlation(self) -> dict[str, Tensor]:
        """How NSI goes with the gate's mean value over inputs, block by block (the paper's Fig. 9).

        Returns:
            "pearson" and "spearman" ``[blocks]``; NaN where there is no gate, or it is constant.
        """
        pairs = [(self.nsi[:, b], self.gates[:, b]) for b in range(len(self.names))]
        kinds = {"pearson": ranks.pearson, "spearman": ranks.spearman}
        return {
            name: torch.tensor([math.nan if g.isnan().any() else f(x, g) for x, g in pairs])
            for name, f in kinds.items()
        }

    def stages(self) -> list[dict[str, Any]]:
        """A row a stage: blocks, NSI over inputs and blocks (mean and largest), at the start, gates."""
        rows = []
        for number in self.stage.unique().tolist():
            own = self.stage == number
            of = lambda p, own=own: p.nsi[:, own]
            gates = self.gates[:, own]
            rows.append(
                {
                    "stage": number,
                    "first": self.names[int(own.nonzero()[0])],
                    "blocks": int(own.sum()),
                    "mean": of(self).mean().item(),
                    "largest": of(self).max().item(),
                    "initial": of(self.initial).mean().item() if self.initial is not None else None,
                    "gate": gates[~gates.isnan()].mean().item() if not gates.isnan().all() else None,
                }
            )
        return rows

    def totals(self, drop_first: bool = True) -> dict[str, dict[str, float | None]]:
        """TNS by step, of the network and of its beginning; None where it is not defined."""
        return {
            step: {
                "trained": _total(self, step, drop_first),
                "initial": _total(self.initial, step, drop_first) if self.initial is not None else None,
            }
            for step in STEPS
        }

    def summary(self) -> str:
        """A table of the stages, and TNS with both steps beside its value before training."""
        lines = [
            repr(self),
            f"{'stage':>5} {'blocks':>6} {'NSI':>8} {'largest':>8} {'initial':>8}  first",
        ]
        for row in self.stages():
            numbers = " ".join(f"{_text(row[k]):>8}" for k in ("mean", "largest", "initial"))
            lines.append(f"{row['stage']:>5} {row['blocks']:>6} {numbers}  {row['first']}")
        for step, pair in self.totals().items():
            lines.append(f"TNS, step {step}: {_text(pair['trained'])}, initial {_text(pair['initial'])}")
        if self.note:
            lines.append(self.note)
        if self.initial is None:
            lines.append(
                "initial: not given; NSI depends on it, so pass probe(..., initial=a fresh model)"
            )
        if not self.gated:
            lines.append("no gates: both steps are one")
        return "\n".join(lines)

    def __repr__(self) -> str:
        shape = f"{self.nsi.shape[0]} inputs, {len(self.names)} {self.granularity}s"
        beside = "" if self.initial is None else ", beside its initial value"
        stages, silent = (
            len(self.stage.unique()),
            len(stiffness.silent_stages(self.stage, mean=self.mean)),
        )
        unsaid = f"; TNS says nothing of {silent} stages, see .note" if silent else ""
        return (
            f"StiffnessProfile({self.model}: {shape} in {stages} stages, step "
            f"{self.step}, mean NSI {self.nsi.mean().item():.3g}{beside}{unsaid})"
        )

    def __str__(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        head = ("first", "stage", "blocks", "mean", "largest", "initial", "gate")
        rows = [
            [row["stage"] + 1 if key == "stage" else row[key] for key in head] for row in self.stages()
        ]
        totals = [
            f"TNS, step {step}: {_text(pair['trained'])}, initial {_text(pair['initial'])}"
            for step, pair in self.totals().items()
        ]
        told = ". ".join((repr(self), *totals)) + f". {self.note}"
        return html_table(head, rows, told.rstrip())

    def to_pandas(self) -> Any:
        """A row an input and block: input, block, name, stage, NSI with both steps, the gate's value.

        And NSI before training, where it is known. Needs the extra `report`.
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
        """A picture, as a Matplotlib figure.

        Args:
            kind: "nsi" by block, "surface" of TNS over both thresholds, "proportion" of stiff blocks,
                "gates" against NSI, or "all".
            path: where to write it as a PNG, if anywhere.
        """
        return _pictures().draw(self, kind, path)

    def numbers(self) -> dict[str, Any]:
        """All that fits in a JSON file: means over inputs, block by block, and TNS."""
        found: dict[str, Any] = {
            "model": self.model,
            "granularity": self.granularity,
            "inputs": self.nsi.shape[0],
            "mean": self.mean,
            "tns": self.totals(),
            "tns_with_first": self.totals(drop_first=False),
            "note": self.note,
            "stages": self.stages(),
        }
        found["blocks"] = [
            {
                "name": name,
                "stage": int(self.stage[b]),
                "one": self.one[:, b].mean().item(),
                "gate": self.gate[:, b].mean().item(),
                "gate_value": self.gates[:, b].mean().item(),
                "initial": self.initial.one[:, b].mean().item() if self.initial is not None else None,
            }
            for b, name in enumerate(self.names)
        ]
        return found

    def save(self, folder: Path | str) -> Path:
        """Write it to a folder of its own; an older profile there is replaced."""
        tensors = {k: getattr(self, k) for k in ("one", "gate", "gates", "stage")}
        config: dict[str, Any] = {
            k: getattr(self, k) for k in ("names", "model", "granularity", "step", "mean")
        }
        if self.initial is not None:
            tensors |= {f"initial.{k}": getattr(self.initial, k) for k in ("one", "gate", "gates")}
            config["initial"] = self.initial.model
        return checkpoint.save(folder, KIND, tensors, config)

    @classmethod
    def load(cls, folder: Path | str) -> "StiffnessProfile":
        """Read what `save` wrote."""
        tensors, config = checkpoint.load(folder, KIND)
        check(config, PROFILE, folder, CheckpointError)
        before = config.pop("initial", None)
        specs = TENSORS if before is None else TENSORS | INITIAL
        check_tensors(tensors, specs, folder, CheckpointError)
        config["names"] = tuple(config["names"])
        config["stage"] = tensors["stage"]

        def made(prefix: str) -> StiffnessProfile:
            options: dict[str, Any] = {k: tensors[prefix + k] for k in ("one", "gate", "gates")}
            return cls(**options, **config)

        with described(folder, "a profile"):
            stages = tensors["stage"].unique().tolist()
            if stages and not 0 <= stages[0] <= stages[-1] < MOST_STAGES:
                raise ValueError(f"its stages are {stages[0]} to {stages[-1]}; they count from 0")
            found = made("")
            if before is None:
                return found
            config["model"] = before
            return found.beside(made("initial."))


@dataclass(frozen=True)
class Comparison:
    """Several networks' TNS, and how it goes with their accuracy.

    Attributes:
        rows: a dict a network: "name", "one", "gate", "one_initial", "gate_initial", and "accuracy"; of
            profiles also "note", what their TNS is silent of.
        correlations: for each of those four columns "kendall" and "spearman" with the accuracy, and the
            "p" of each: the part of all orders of the accuracies that correlate as strongly. Empty
            without accuracies.
    """

    rows: list[dict[str, Any]]
    correlations: dict[str, dict[str, float]]

    @classmethod
    def of(cls, rows: list[dict[str, Any]]) -> "Comparison":
        """Such rows with their correlations; "accuracy" is None in all of them, or in none."""
        correlations = {}
        for column in ("one", "gate", "one_initial", "gate_initial"):
            pairs = [(row[column], row["accuracy"]) for row in rows]
            if len(rows) < 2 or any(None in pair for pair in pairs):
                continue
            x, y = torch.tensor(pairs, dtype=torch.float64).T
            correlations[column] = {
                "kendall": ranks.kendall(x, y),
                "kendall_p": ranks.p_value(ranks.kendall, x, y),
                "spearman": ranks.spearman(x, y),
                "spearman_p": ranks.p_value(ranks.spearman, x, y),
            }
        return cls(rows, correlations)

    def __repr__(self) -> str:
        columns = ("one", "one_initial", "gate", "gate_initial", "accuracy")
        width = max(8, *(len(row["name"]) for row in self.rows))
        lines = [" ".join((f"{'':{width}}", *(f"{c:>12}" for c in columns)))]
        cells = lambda row: " ".join(f"{_text(row[c]):>12}" for c in columns)
        lines += [f"{row['name']:{width}} {cells(row)}" for row in self.rows]
        tell = lambda found, name: f"{name} {found[name]:+.2f} (p {found[f'{name}_p']:.2g})"
        lines += [
            f"TNS {column} and accuracy: {tell(found, 'kendall')}, {tell(found, 'spearman')}"
            for column, found in self.correlations.items()
        ]
        lines += [f"{row['name']}: {row['note']}" for row in self.rows if row.get("note")]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        head = ("name", "one", "one_initial", "gate", "gate_initial", "accuracy")
        tell = lambda found, name: f"{name} {found[name]:+.2f} (p {found[f'{name}_p']:.2g})"
        told = [
            f"TNS {column} and accuracy: {tell(found, 'kendall')}, {tell(found, 'spearman')}"
            for column, found in self.correlations.items()
        ]
        return html_table(head, [[row[key] for key in head] for row in self.rows], ". ".join(told))

    def to_pandas(self) -> Any:
        """A row a network. Needs the extra `report`."""
        return pandas().DataFrame(self.rows)

    def plot(self, path: Path | str | None = None) -> Any:
        """TNS against accuracy (the paper's Fig. 7), a panel a step."""
        return _pictures().draw_comparison(self, path)

    def save(self, path: Path | str) -> Path:
        """Write rows and correlations as JSON."""
        return write_json(path, {"rows": self.rows, "correlations": self.correlations})


def compare_profiles(
    profiles: Mapping[str, StiffnessProfile], accuracy: Mapping[str, float] | None = None
) -> Comparison:
    """TNS of several networks with both steps, trained and initial, beside their accuracies.

    A gate makes NSI larger with step "gate" and smaller with "one" already before training, so only
    differences from the initial columns tell of what was learnt; compare networks of one backbone.
    """
    if not profiles:
        raise ValueError("no profiles given; pass {name: profile}")
    named = isinstance(profiles, Mapping)
    if not named or not all(isinstance(p, StiffnessProfile) for p in profiles.values()):
        raise TypeError("profiles must be a dictionary {name: StiffnessProfile}, as probe returns them")
    unknown = set(accuracy or ()) ^ set(profiles)
    if accuracy is not None and unknown:
        raise ValueError(f"accuracies and profiles differ in {sorted(unknown)}; give one for each")
    rows = []
    for name, profile in profiles.items():
        totals = profile.totals()
        row: dict[str, Any] = {"name": name, "blocks": len(profile.names), "model": profile.model}
        row["note"] = profile.note
        for step in STEPS:
            row |= {step: totals[step]["trained"], f"{step}_initial": totals[step]["initial"]}
        rows.append({**row, "accuracy": accuracy[name] if accuracy is not None else None})
    return Comparison.of(rows)


def _pictures() -> Any:
    """The report's module, which imports Matplotlib; a wing does not import the report by itself."""
    return pictures("stiffness")


def _total(profile: StiffnessProfile, step: Step, drop_first: bool) -> float | None:
    try:
        return profile.with_step(step).total(drop_first).item()
    except ValueError:  # one block a stage, or a feature that is zero
        return None


def _outline(profile: StiffnessProfile) -> list[int]:
    return torch.bincount(profile.stage).tolist()


def _text(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
