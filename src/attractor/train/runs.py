"""A folder of one training: log.jsonl, the latest checkpoint, TensorBoard's files if it is installed."""

import json
import shutil
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attractor.core.files import write_text
from attractor.train import checkpoint
from attractor.train.history import History, Row
from attractor.train.recipe import Recipe

KIND = "training"
FREE = ("capture",)  # of a recipe: may be another when training is resumed


class RunFolder:
    """Everything a training writes; each file is whole or not there.

    A checkpoint is a folder of its own, ``epoch-0012``; the one before is removed when it is complete,
    so there always is one. It holds weights, the optimiser's state, the recipe and the history;
    random numbers need no keeping, each epoch's come from its number and the recipe's seed.
    """

    def __init__(self, folder: Path | str, recipe: Recipe) -> None:
        self.folder, self.recipe = Path(folder), recipe
        self.board: Any = None

    def checkpoints(self) -> list[Path]:
        """Those that there are, the latest first."""
        found = [p for p in self.folder.glob("epoch-*") if p.name.removeprefix("epoch-").isdecimal()]
        return sorted(found, key=lambda p: int(p.name.removeprefix("epoch-")), reverse=True)

    def forget(self) -> None:
        """Remove the checkpoints of an earlier training."""
        for old in self.checkpoints():
            shutil.rmtree(old)

    def begin(self, history: History) -> None:
        """Write the log as far as it goes: a folder that cannot be written to is found out now."""
        write_text(self.folder / "log.jsonl", _lines(history.rows))

    def save(
        self,
        model: nn.Module,
        optimiser: torch.optim.Optimizer,
        scaler: Any,
        history: History,
        steps: int,
    ) -> None:
        """Write the state after an epoch."""
        tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
        for index, state in optimiser.state_dict()["state"].items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    tensors[f"optimiser.{index}.{key}"] = value
        # Copies: tied weights are one tensor under two names, which safetensors refuses.
        tensors = {name: value.detach().cpu().clone() for name, value in tensors.items()}
        config = {"recipe": asdict(self.recipe), "rows": history.rows, "steps": steps,
                  "scaler": scaler.state_dict(), "trained": _names(model, optimiser)}  # fmt: skip
        new = self.folder / f"epoch-{len(history):04}"
        shutil.rmtree(new, ignore_errors=True)  # what an interrupted writing may have left
        older = self.checkpoints()
        checkpoint.save(new, KIND, tensors, config)
        for old in older:
            shutil.rmtree(old)

    def resume(
        self, model: nn.Module, optimiser: torch.optim.Optimizer, scaler: Any, steps: int
    ) -> History:
        """Put model and optimiser back where the latest checkpoint has them; empty if there is none.

        Raises:
            ValueError: the checkpoint is of another recipe, model or data.
        """
        for folder in self.checkpoints():
            try:
                tensors, config = checkpoint.load(folder, KIND)
            except checkpoint.CheckpointError as error:
                warnings.warn(f"not resumed from: {error}", stacklevel=3)
                continue
            self._check(folder, config, steps)
            weights = {k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")}
            try:
                model.load_state_dict(weights)
            except RuntimeError as error:
                raise ValueError(f"{folder} is of another model; {_ADVICE} ({error})") from None
            if config["trained"] != _names(model, optimiser):
                raise ValueError(f"{folder} was trained with other parameters frozen; {_ADVICE}")
            _restore(optimiser, {k: v for k, v in tensors.items() if k.startswith("optimiser.")})
            if config["scaler"]:
                scaler.load_state_dict(config["scaler"])
            return History(config["rows"])
        return History()

    def _check(self, folder: Path, config: dict[str, Any], steps: int) -> None:
        # Through JSON, as the other one went, where tuples become lists.
        mine = json.loads(json.dumps(asdict(self.recipe)))
        theirs = {**asdict(Recipe()), **config["recipe"]}  # older ones know fewer options
        other = [
            f"{name} = {theirs.get(name)!r}, not {value!r}"
            for name, value in mine.items()
            if name not in FREE and theirs.get(name) != value
        ]
        if steps != config["steps"]:
            other.append(f"{config['steps']} steps an epoch, not {steps}")
        if other:
            raise ValueError(f"{folder} was trained with {'; '.join(other)}; {_ADVICE}")

    def log(self, rows: list[Row]) -> None:
        """Write log.jsonl, a row a line; and the last row for TensorBoard."""
        write_text(self.folder / "log.jsonl", _lines(rows))
        if self.board is None:
            self.board = _board(self.folder / "tensorboard", len(rows))
        if self.board:
            for name, value in rows[-1].items():
                if isinstance(value, int | float) and name != "epoch":
                    self.board.add_scalar(name, value, rows[-1]["epoch"])

    def close(self) -> None:
        """Let TensorBoard write what it has."""
        if self.board:
            self.board.close()


_ADVICE = "give another out=, or resume=False to start again"


def _lines(rows: list[Row]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _names(model: nn.Module, optimiser: torch.optim.Optimizer) -> list[str]:
    """Of the parameters that are trained, in the optimiser's order."""
    names = {id(p): name for name, p in model.named_parameters()}
    return [names[id(p)] for group in optimiser.param_groups for p in group["params"]]


def _restore(optimiser: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Fill an optimiser's state; each tensor laid out in memory as its parameter is."""
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    rates = [group["lr"] for group in optimiser.param_groups]
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        _, index, key = name.split(".", 2)
        like = parameters[int(index)]
        laid_out = torch.empty_like(like, dtype=value.dtype) if value.shape == like.shape else None
        state.setdefault(int(index), {})[key] = value if laid_out is None else laid_out.copy_(value)
    optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
    for group, rate in zip(optimiser.param_groups, rates):
        group["lr"] = rate  # the very tensor that a captured step reads, not a copy


def _board(folder: Path, first: int) -> Any:
    """TensorBoard's writer; False if it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return False
    return SummaryWriter(folder, purge_step=first)
