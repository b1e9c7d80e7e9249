"""The folder of a training run: definition, logs, the last two checkpoints, the final weights."""

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attractor.common.versions import versions
from attractor.storage import schema
from attractor.storage.files import (
    json_bytes,
    write_bytes,
    write_new,
    write_text,
)
from attractor.storage.limits import read_json, read_json_lines
from attractor.storage.objects import AnyPath, path_of
from attractor.storage.tensor_specs import ANY, TensorSpec, check_tensors
from attractor.train import checkpoint
from attractor.train import recipe as recipes
from attractor.train.checkpoint import CheckpointError
from attractor.train.definition import Definition, plain
from attractor.train.history import TIMES, History, Row
from attractor.train.optimiser_state import load_optimiser_state, optimiser_tensors
from attractor.train.recent_checkpoints import ADVICE, RecentCheckpoints
from attractor.train.recipe import Recipe
from attractor.train.sharding import gather_tensors
from attractor.train.tensors import check_dtypes, described, parse, write_tensors

KIND = "training"
DEFINITION, WEIGHTS = "run.json", "model.safetensors"
SECONDS, COUNT = schema.number(0), schema.number(0, whole=True)
SCALER = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
EPOCH_STATE = schema.record(
    {"step": schema.number(1, whole=True), "rate": schema.number(), "counts": schema.mapping(COUNT),
     "seconds": SECONDS, "samples": COUNT}
)  # fmt: skip
TRAINING = schema.record(  # the configuration of a checkpoint
    {"run": schema.text(), "recipe": recipes.SCHEMA, "steps": COUNT,
     "scaler": schema.record({}, dict.fromkeys(SCALER, SECONDS)),
     "trained": schema.listing(schema.text(1000)), "versions": schema.mapping(schema.text())},
    {"begun": EPOCH_STATE},
)  # fmt: skip
EPOCH = {"epoch": schema.number(1, whole=True)}
ROWS = schema.listing(schema.record(EPOCH, others=schema.plain))  # rows of log.jsonl
TIME_ROWS = schema.listing(schema.record(EPOCH, dict.fromkeys(TIMES, SECONDS)))  # rows of times.jsonl
INTEGERS = (torch.int64, torch.uint8)
REQUIRED_STATES = ("random.torch", "random.python")
RANDOM = {
    k: TensorSpec(("processes", k), INTEGERS) for k in (*REQUIRED_STATES, "random.numpy", "random.cuda")
}


@dataclass
class EpochState:
    """The state of an unfinished epoch.

    Attributes:
        step: number of finished steps.
        rate: the learning rate of the last of them.
        sums: sums of the numbers of each step ``[step, names]``.
        counts: number of items in the sums, by name.
        random: states of the random generators, one row per process.
        seconds, samples: time and samples of the finished steps.
    """

    step: int
    rate: float
    sums: Tensor
    counts: dict[str, int]
    random: dict[str, Tensor]
    seconds: float = 0.0
    samples: int = 0


@dataclass
class TrainingState:
    """The objects whose state a checkpoint holds.

    Attributes:
        model: the model.
        optimiser: its optimiser.
        scaler: the gradient scaler of fp16.
        average: the model with averaged weights, as torch's `AveragedModel`; None without an average.
    """

    model: nn.Module
    optimiser: torch.optim.Optimizer
    scaler: Any
    average: nn.Module | None = None


class RunFolder:
    """All files of a training. Each file is written atomically.

    ``run.json`` holds the definition of the run from its beginning. A checkpoint holds weights, the
    optimiser's state, the recipe, the log and the digest of the definition. Within an epoch it also
    holds the numbers of the finished steps and the states of all random generators, which are seeded
    for every epoch from its number and the recipe's seed. ``model.safetensors`` holds the weights of a
    finished run. Only times.jsonl differs between equal runs.

    Args:
        folder: the folder.
        recipe: the recipe of the training.
        definition: the definition of the run.
        main: whether this process writes files.
    """

    def __init__(
        self, folder: AnyPath | str, recipe: Recipe, definition: Definition, main: bool = True
    ) -> None:
        self.folder, self.recipe, self.main = path_of(folder), recipe, main
        self.definition = definition
        self.steps = definition.steps
        self.checkpoints = RecentCheckpoints(folder, KIND, main=main)
        self.writer: Any = None
        self.extended = False  # whether the definition on disk is to be replaced

    def begin(self, history: History, model: nn.Module) -> None:
        """Write the definition and the log, so that a folder that is not writable raises at once.

        Raises:
            CheckpointError: another run has begun in the folder in the meantime.
        """
        check_dtypes(model.state_dict())
        self._check_foreign()
        mine = json_bytes(self.definition.to_json())
        with self.checkpoints.disk_errors("the definition of the run"):
            if self.extended:
                write_bytes(self.folder / DEFINITION, mine)
            elif not write_new(self.folder / DEFINITION, mine):
                self._check(self._read_definition())
        with self.checkpoints.disk_errors("the log"):
            if len(history) < self.recipe.epochs:
                (self.folder / WEIGHTS).unlink(missing_ok=True)
            self._write_log(history.rows)

    def clear(self) -> None:
        """Remove the files of a previous run."""
        self._check_foreign()
        self.checkpoints.remove_all()
        for name in (DEFINITION, WEIGHTS, "log.jsonl", "times.jsonl"):
            with suppress(OSError):  # writing the file raises the error later
                (self.folder / name).unlink(missing_ok=True)

    def finish(self, model: nn.Module) -> AnyPath:
        """Write the weights under the names of the model's ``state_dict``, without a prefix.

        Tied tensors are written under each of their names, so that ``load_state_dict`` accepts the file.
        """
        path = self.folder / WEIGHTS
        with self.checkpoints.disk_errors(f"the weights {WEIGHTS}"):
            write_tensors(path, dict(plain(model).state_dict()))
        return path

    def save(
        self,
        state: TrainingState,
        history: History,
        unfinished: EpochState | None = None,
    ) -> AnyPath:
        """Write the state after or within an epoch, unless the last checkpoint has this state.

        All processes must call it, because the parts of a sharded model are gathered in the main
        process, which writes.
        """
        step = unfinished.step if unfinished else 0
        path = self.checkpoints.path(len(history), step)
        if self.checkpoints.last == path:
            return path
        tensors = {f"model.{name}": value for name, value in state.model.state_dict().items()}
        tensors |= {f"optimiser.{k}": value for k, value in optimiser_tensors(state.optimiser).items()}
        if state.average is not None:
            tensors |= {f"average.{name}": value for name, value in state.average.state_dict().items()}
        tensors = gather_tensors(tensors, keep=self.main)
        if not self.main:
            self.checkpoints.last = path
            return path
        log = _lines([_without_times(row) for row in history]).encode()
        tensors["log"] = torch.frombuffer(bytearray(log + b"\n"), dtype=torch.uint8)  # never empty
        config = {"run": self.definition.digest, "recipe": self.recipe.settings(), "steps": self.steps,
                  "scaler": state.scaler.state_dict(), "trained": _names(state.model, state.optimiser),
                  "versions": versions()}  # fmt: skip
        if unfinished:
            tensors["begun.sums"] = unfinished.sums
            tensors |= {f"random.{name}": value for name, value in unfinished.random.items()}
            config["begun"] = {"step": step, "rate": unfinished.rate, "counts": unfinished.counts,
                               "seconds": unfinished.seconds, "samples": unfinished.samples}  # fmt: skip
        return self.checkpoints.save(len(history), step, tensors, config)

    def resume(self, state: TrainingState, extend: bool = False) -> tuple[History, EpochState | None]:
        """Restore the state from the latest checkpoint; return an empty history without one.

        Args:
            state: the objects to restore, in place.
            extend: accept a run with another schedule; see `Definition.extension_of`.

        Raises:
            CheckpointError: the folder holds another run, or all of its checkpoints are damaged.
        """
        model = state.model
        definition = self._read_definition()
        if extend and definition is not None:
            definition = self.definition.extension_of(definition)
        content = self.checkpoints.load()
        if content is None:
            self._check(definition)
            return History(), None
        folder, tensors, config = content
        if "run" not in config:
            raise CheckpointError(
                f"{folder} was written by a version of attractor that did not record what defines a "
                f"run, so it may be another run; {ADVICE}. Its weights are in {checkpoint.FILES[0]}, "
                "with 'model.' before their names"
            )
        schema.check(config, TRAINING, folder, CheckpointError, ADVICE_SENTENCE)
        epoch_state = _epoch_state(config.get("begun"), tensors, self.steps, folder)
        rows = _rows(tensors["log"], folder)
        weights = checkpoint.completed(model, _part(tensors, "model."))
        self._check(definition, None if len(rows) >= self.recipe.epochs else weights, model)
        if extend and definition is not None:
            self.definition, self.extended = definition, True
        if definition is None and config["run"] != self.definition.digest:
            raise CheckpointError(
                f"{folder} belongs to another run, and its folder has no {DEFINITION}; {ADVICE}"
            )
        if definition is not None and config["run"] not in (definition.digest, *definition.extends):
            raise CheckpointError(f"{folder} belongs to another run than {DEFINITION}; {ADVICE}")
        checkpoint.fill(model, weights, folder, ADVICE)
        if state.average is not None:
            checkpoint.fill(state.average, _part(tensors, "average."), folder, ADVICE)
        if config["trained"] != _names(model, state.optimiser):
            raise CheckpointError(f"{folder} was trained with other parameters frozen; {ADVICE}")
        load_optimiser_state(
            state.optimiser, _part(tensors, "optimiser."), self.recipe.optimiser, folder
        )
        if config["scaler"]:
            with described(folder, "a training"):
                state.scaler.load_state_dict(config["scaler"])
        history_rows = [{**row, **times} for row, times in zip(rows, self._times(len(rows)))]
        return History(history_rows), epoch_state

    def _check_foreign(self) -> None:
        """Raise if the folder of no training holds files with the names that training would write."""
        ours = (self.folder / "log.jsonl").exists() or bool(self.checkpoints.paths())
        if not ours:
            with suppress(CheckpointError):  # a run that was killed before it wrote its log
                ours = self._read_definition() is not None
        foreign = [name for name in (DEFINITION, WEIGHTS) if (self.folder / name).exists() and not ours]
        if foreign:
            raise CheckpointError(
                f"{self.folder} holds {' and '.join(foreign)}, which no training has written; "
                "give another out="
            )

    def _read_definition(self) -> Definition | None:
        """Return the definition in the folder; None if there is none."""
        path = self.folder / DEFINITION
        if not path.exists():
            return None
        try:
            return Definition.from_json(read_json(path))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} does not describe a run ({error}); {ADVICE}") from None

    def _check(
        self,
        definition: Definition | None,
        weights: dict[str, Tensor] | None = None,
        model: nn.Module | None = None,
    ) -> None:
        """Raise if the folder holds another run.

        Args:
            definition: the definition of the run in the folder, if it is known.
            weights: weights in the checkpoint of an unfinished run. A model that has them already, as
                after Ctrl-C in a notebook, is accepted as the model that was trained.
            model: the model of the call.
        """
        if definition is None:
            return
        unlike = definition.unlike(self.definition)
        initial = definition.unlike_weights(self.definition)
        if weights is not None and model is not None and unlike == [initial]:
            own = model.state_dict()
            if own.keys() == weights.keys() and all(_equal(own[k], v) for k, v in weights.items()):
                self.definition = definition
                return
        if unlike:
            hint = more = ""
            if unlike == [initial]:
                hint = "make the model anew, from the same seed, to get this run; "
            elif self._differs_in_schedule_only(definition):
                more = ", or extend=True to continue it with this schedule"
            raise CheckpointError(
                f"{self.folder} holds a run with {'; '.join(unlike)}; {hint}{ADVICE}{more}"
            )

    def _differs_in_schedule_only(self, definition: Definition) -> bool:
        return not self.definition.extension_of(definition).unlike(self.definition)

    def log(self, rows: list[Row]) -> None:
        """Write log.jsonl and times.jsonl, one row per line, and the last row for TensorBoard."""
        with self.checkpoints.disk_errors("the log"):
            self._write_log(rows)
        if self.writer is None:
            # TensorBoard writes to folders only.
            self.writer = isinstance(self.folder, Path) and _tensorboard_writer(
                self.folder / "tensorboard", len(rows)
            )
        if self.writer:
            for name, value in rows[-1].items():
                if isinstance(value, int | float) and name != "epoch":
                    self.writer.add_scalar(name, value, rows[-1]["epoch"])

    def _write_log(self, rows: list[Row]) -> None:
        write_text(self.folder / "log.jsonl", _lines([_without_times(row) for row in rows]))
        times = [{"epoch": row["epoch"], **{k: row[k] for k in TIMES if k in row}} for row in rows]
        write_text(self.folder / "times.jsonl", _lines(times))

    def _times(self, count: int) -> list[Row]:
        """Return the times of the first `count` epochs, with empty rows where they are not known."""
        try:
            times = read_json_lines(self.folder / "times.jsonl")[:count]
        except (OSError, ValueError):
            times = []
        valid = schema.mismatch(times, TIME_ROWS) is None
        rows = [{k: row[k] for k in TIMES if k in row} for row in times] if valid else []
        return rows + [{}] * (count - len(rows))

    def close(self) -> None:
        """Close the TensorBoard writer."""
        if self.writer:
            self.writer.close()


ADVICE_SENTENCE = f"{ADVICE[0].upper()}{ADVICE[1:]}."


def _lines(rows: list[Row]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _without_times(row: Row) -> Row:
    return {k: v for k, v in row.items() if k not in TIMES}


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def _epoch_state(
    config: dict[str, Any] | None, tensors: dict[str, Tensor], steps: int, folder: AnyPath
) -> EpochState | None:
    """Return the unfinished epoch in a checkpoint, or None; check all but model and optimiser."""
    own = {k: v for k, v in tensors.items() if not k.startswith(("model.", "optimiser.", "average."))}
    specs = {"log": TensorSpec(("bytes",), (torch.uint8,))}
    if config is not None:
        specs["begun.sums"] = TensorSpec((config["step"], len(config["counts"])), values=ANY)
        specs |= {k: spec for k, spec in RANDOM.items() if k in own or k in REQUIRED_STATES}
    check_tensors(own, specs, folder, CheckpointError, advice=ADVICE_SENTENCE)
    if config is None:
        return None
    if config["step"] > steps or "loss" not in config["counts"]:
        raise CheckpointError(f"{folder}: its steps and their numbers do not match. {ADVICE_SENTENCE}")
    return EpochState(**config, sums=tensors["begun.sums"], random=_part(tensors, "random."))


def _rows(log: Tensor, folder: AnyPath) -> list[Row]:
    """Return the rows of a log that is stored as bytes."""
    lines = log.numpy().tobytes().splitlines()
    rows = [parse(line, f"{folder}: the log") for line in lines if line]
    schema.check(rows, ROWS, f"{folder}: the log", CheckpointError, ADVICE_SENTENCE)
    return rows


def _names(model: nn.Module, optimiser: torch.optim.Optimizer) -> list[str]:
    """Return the names of the trained parameters, in the order of the optimiser."""
    names = {id(p): name for name, p in model.named_parameters()}
    return [names[id(p)] for group in optimiser.param_groups for p in group["params"]]


def _equal(one: Tensor, other: Tensor) -> bool:
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and torch.equal(one.cpu(), other)


def _tensorboard_writer(folder: Path, first: int) -> Any:
    """Return TensorBoard's writer, or False if it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return False
    return SummaryWriter(folder, purge_step=first)
