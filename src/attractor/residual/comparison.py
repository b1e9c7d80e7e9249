"""Comparison of several networks: total neural stiffness beside accuracy."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attractor.common.views import html_table, pandas, pictures
from attractor.residual import ranks
from attractor.residual.profile import STEPS, StiffnessProfile, as_text
from attractor.storage.files import write_json


@dataclass(frozen=True)
class Comparison:
    """TNS of several networks, and its correlation with their accuracy.

    Attributes:
        rows: One dict per network with the keys "name", "one", "gate", "one_initial", "gate_initial"
            and "accuracy"; for profiles also "note", see `StiffnessProfile.note`.
        correlations: For each of the four columns of TNS, "kendall" and "spearman" with the accuracy,
            and "kendall_p" and "spearman_p", the fraction of permutations of the accuracies whose
            correlation is as strong. Empty without accuracies.
    """

    rows: list[dict[str, Any]]
    correlations: dict[str, dict[str, float]]

    @classmethod
    def of(cls, rows: list[dict[str, Any]]) -> "Comparison":
        """Compute the correlations of rows; "accuracy" is None in all rows or in none."""
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
        cells = lambda row: " ".join(f"{as_text(row[c]):>12}" for c in columns)
        lines += [f"{row['name']:{width}} {cells(row)}" for row in self.rows]
        lines += self._correlation_texts()
        lines += [f"{row['name']}: {row['note']}" for row in self.rows if row.get("note")]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        head = ("name", "one", "one_initial", "gate", "gate_initial", "accuracy")
        rows = [[row[key] for key in head] for row in self.rows]
        return html_table(head, rows, ". ".join(self._correlation_texts()))

    def _correlation_texts(self) -> list[str]:
        text = lambda values, name: f"{name} {values[name]:+.2f} (p {values[f'{name}_p']:.2g})"
        return [
            f"TNS {column} and accuracy: {text(values, 'kendall')}, {text(values, 'spearman')}"
            for column, values in self.correlations.items()
        ]

    def to_pandas(self) -> Any:
        """Return a pandas table with one row per network. Requires the extra `report`."""
        return pandas().DataFrame(self.rows)

    def plot(self, path: Path | str | None = None) -> Any:
        """Draw TNS against accuracy, one panel per step size (the paper's Fig. 7).

        Requires the extra `report`. Arguments and result as in `StiffnessProfile.plot`.
        """
        return pictures("stiffness").draw_comparison(self, path)

    def save(self, path: Path | str) -> Path:
        """Write rows and correlations as JSON, and return the path."""
        return write_json(Path(path), {"rows": self.rows, "correlations": self.correlations})


def compare_profiles(
    profiles: Mapping[str, StiffnessProfile], accuracy: Mapping[str, float] | None = None
) -> Comparison:
    """Compare the TNS of several networks, with both step sizes, after and before training.

    A gate makes NSI larger with step "gate" and smaller with "one" even before training. Only the
    differences from the initial columns show the effect of training, between networks of one backbone.

    Args:
        profiles: Profiles by the name of the network.
        accuracy: Accuracies by the name of the network, or None.
    """
    if not profiles:
        raise ValueError("profiles is empty; pass {name: profile}")
    is_mapping = isinstance(profiles, Mapping)
    if not is_mapping or not all(isinstance(p, StiffnessProfile) for p in profiles.values()):
        raise TypeError("profiles must be a dictionary {name: StiffnessProfile}, as probe returns them")
    unknown = set(accuracy or ()) ^ set(profiles)
    if accuracy is not None and unknown:
        raise ValueError(
            f"accuracy and profiles differ in {sorted(unknown)}; pass one accuracy per profile"
        )
    rows = []
    for name, profile in profiles.items():
        totals = profile.totals()
        row: dict[str, Any] = {"name": name, "blocks": len(profile.names), "model": profile.model}
        row["note"] = profile.note
        for step in STEPS:
            row |= {step: totals[step]["trained"], f"{step}_initial": totals[step]["initial"]}
        rows.append({**row, "accuracy": accuracy[name] if accuracy is not None else None})
    return Comparison.of(rows)
