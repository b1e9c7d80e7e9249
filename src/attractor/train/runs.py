"""A folder of one training: its definition, logs, the last two checkpoints, the final weights."""

import json
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attractor.core import schema
from attractor.core.files import json_bytes, sweep, write_new, write_text
from attractor.core.limits import read_json, read_json_lines
from attractor.core.tensor_specs import ANY, FLOATS, TensorSpec, check_tensors
from attractor.core.versions import versions
from attractor.train import checkpoint
from attractor.train import recipe as recipes
from attractor.train.checkpoint import CheckpointError
from attractor.train.definition import Definition, plain
from attractor.train.history import TIMES, History, Row
from attractor.train.recipe import Recipe
from attractor.train.tensors import check_dtypes, described, parse, write_tensors

KIND = "training"
DEFINITION, WEIGHTS = "run.json", "model.safetensors"
SECONDS, COUNT = schema.number(0), schema.number(0, whole=True)
SCALER = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
BEGUN = schema.record(
    {"step": schema.number(1, whole=True), "rate": schema.number(), "counts": schema.mapping(COUNT),
     "seconds": SECONDS, "samples": COUNT}
)  # fmt: skip
TRAINING = schema.record(  # the configuration of a checkpoint
    {"run": schema.text(), "recipe": recipes.SCHEMA, "steps": COUNT,
     "scaler": schema.record({}, dict.fromkeys(SCALER, SECONDS)),
     "trained": schema.listing(schema.text(1000)), "versions": schema.mapping(schema.text())},
    {"begun": BEGUN},
)  # fmt: skip
EPOCH = {"epoch": schema.number(1, whole=True)}
ROWS = schema.listing(schema.record(EPOCH, others=schema.plain))  # of log.jsonl
TIMED = schema.listing(schema.record(EPOCH, dict.fromkeys(TIMES, SECONDS)))  # of times.jsonl
INTEGERS = (torch.int64, torch.uint8)
NEEDED = ("random.torch", "random.python")
RANDOM = {k: TensorSpec(("processes", k), INTEGERS) for k in (*NEEDED, "random.numpy", "random.cuda")}
STATES = {"sgd": {"momentum_buffer"}, "adamw": {"step", "exp_avg", "exp_avg_sq"}}  # of an optimiser

Found = tuple[Path, dict[str, Tensor], dict[str, Any]]


class Kept:
    """The last two checkpoints of something that goes on, each a folder of its own.

    They are called ``epoch-0012``, or ``epoch-0012-step-000340`` within an epoch. The one before the
    last is there in case the last is damaged.
    """

    def __init__(self, folder: Path | str, kind: str, unit: str = "epoch", main: bool = True) -> None:
        self.folder, self.kind, self.unit, self.main = Path(folder), kind, unit, main
        self.name = re.compile(rf"{unit}-(\d+)(?:-step-(\d+))?")
        self.bad: list[Path] = []  # which the next one replaces
        self.last: Path | None = None

    def found(self) -> list[Path]:
        """Those that there are, the latest first."""
        names = {p: self.name.fullmatch(p.name) for p in self.folder.glob(f"{self.unit}-*")}
        return sorted(
            (p for p, match in names.items() if match and not p.is_symlink()),
            key=lambda p: tuple(int(x or 0) for x in names[p].groups()),  # type: ignore[union-attr]
            reverse=True,
        )

    def forget(self) -> None:
        """Remove them all."""
        for old in self.found():
            _remove(old)

    def place(self, count: int, step: int = 0) -> Path:
        """Where the checkpoint after so many epochs, and steps of the next, is kept."""
        return self.folder / (f"{self.unit}-{count:04}" + (f"-step-{step:06}" if step else ""))

    def save(self, count: int, step: int, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
        """Write one; then remove all but the one before it. If that fails, nothing of it is left."""
        new = self.place(count, step)
        others = [p for p in self.found() if p != new and p not in self.bad]
        _remove(new)
        with self.told(f"{self.unit} {count}" + (f", step {step}," if step else "")):
            checkpoint.save(new, self.kind, tensors, config)
        for old in [p for p in self.bad if p != new] + others[1:]:
            _remove(old)
        self.bad, self.last = [], new
        return new

    def load(self) -> Found | None:
        """The latest that is sound; None if there is none. A damaged one is passed over with a warning.

        Raises:
            CheckpointError: all are damaged.
        """
        said = []
        for path in self.found():
            try:
                tensors, config = checkpoint.load(path, self.kind)
            except CheckpointError as error:
                self.bad.append(path)
                said.append(str(error))
                continue
            if said and self.main:
                warnings.warn(f"{'; '.join(said)}; going on from {path.name}", stacklevel=4)
            if self.main:
                with suppress(OSError):  # it is read-only, or another process is writing to it
                    checkpoint.settle(path)
            self.last = path
            return path, tensors, config
        if any((path / checkpoint.MANIFEST).exists() for path in self.bad):
            raise CheckpointError(f"no checkpoint is left in {self.folder}: {said[0]}; {ADVICE}")
        if said and self.main:
            warnings.warn(f"{'; '.join(said)}; starting from the beginning", stacklevel=4)
        return None

    @contextmanager
    def told(self, what: str) -> Iterator[None]:
        """An error of the disk says what could not be written, and what there is."""
        try:
            yield
        except OSError as error:
            there = f"{self.last} is whole" if self.last else "there is no checkpoint yet"
            raise type(error)(
                error.errno,
                f"{what} could not be written to {self.folder} ({error.strerror or error}); {there}: "
                "once the folder can be written to, the same call goes on from there",
            ) from None


@dataclass
class Begun:
    """An epoch that is not over: so many steps are done, with these losses and numbers by now.

    Attributes:
        step: steps that are done. rate: the learning rate of the last.
        sums: what they gave ``[step, names]``, and counts: of how many items, by name.
        random: states of the random generators, a row a process.
        seconds, samples: time and samples that it took.
    """

    step: int
    rate: float
    sums: Tensor
    counts: dict[str, int]
    random: dict[str, Tensor]
    seconds: float = 0.0
    samples: int = 0


class RunFolder:
    """Everything a training writes; each file is whole or not there.

    ``run.json`` says what defines the run, from its beginning. A checkpoint holds weights, the
    optimiser's state, the recipe, the log and the digest of the definition; within an epoch also what
    its steps gave so far and the states of all random generators, which each epoch seeds anew from its
    number and the recipe's seed. ``model.safetensors`` holds the weights of a run that is finished.
    Times are in times.jsonl alone: all else is the same in every run.

    Args:
        definition: of the run.
        main: whether this is the process that writes.
    """

    def __init__(
        self, folder: Path | str, recipe: Recipe, definition: Definition, main: bool = True
    ) -> None:
        self.folder, self.recipe, self.definition, self.main = Path(folder), recipe, definition, main
        self.steps = definition.steps
        self.kept = Kept(folder, KIND, main=main)
        self.board: Any = None

    def begin(self, history: History, model: nn.Module) -> None:
        """Write the definition and the log: a folder that cannot be written to is found out now.

        Raises:
            CheckpointError: another run has begun here meanwhile.
        """
        check_dtypes(model.state_dict())
        self._check_foreign()
        mine = json_bytes(self.definition.to_json())
        with self.kept.told("the definition of the run"):
            for name in (DEFINITION, WEIGHTS, "log.jsonl", "times.jsonl"):
                sweep(self.folder / name)
            if not write_new(self.folder / DEFINITION, mine):
                self._check(self._recorded())
        with self.kept.told("the log"):
            if len(history) < self.recipe.epochs:
                (self.folder / WEIGHTS).unlink(missing_ok=True)
            self._write_log(history.rows)

    def clear(self) -> None:
        """Remove what another run has left."""
        self._check_foreign()
        self.kept.forget()
        for name in (DEFINITION, WEIGHTS, "log.jsonl", "times.jsonl"):
            with suppress(OSError):  # which writing will tell
                (self.folder / name).unlink(missing_ok=True)

    def finish(self, model: nn.Module) -> Path:
        """Write the weights as they are loaded anywhere: names of the model's own state, no prefix.

        Tensors that are tied to each other are written under each of their names, so that
        ``load_state_dict`` finds all of them.
        """
        path = self.folder / WEIGHTS
        with self.kept.told(f"the weights {WEIGHTS}"):
            write_tensors(path, dict(plain(model).state_dict()))
        return path

    def save(
        self,
        model: nn.Module,
        optimiser: torch.optim.Optimizer,
        scaler: Any,
        history: History,
        begun: Begun | None = None,
    ) -> Path:
        """Write the state after an epoch, or within one; not again what is the last one anyway."""
        step = begun.step if begun else 0
        if self.kept.last == self.kept.place(len(history), step):
            return self.kept.last
        tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
        for index, state in optimiser.state_dict()["state"].items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    tensors[f"optimiser.{index}.{key}"] = value
        log = _lines([_timeless(row) for row in history]).encode()
        tensors["log"] = torch.frombuffer(bytearray(log + b"\n"), dtype=torch.uint8)  # never empty
        config = {"run": self.definition.digest, "recipe": asdict(self.recipe), "steps": self.steps,
                  "scaler": scaler.state_dict(), "trained": _names(model, optimiser),
                  "versions": versions()}  # fmt: skip
        if begun:
            tensors["begun.sums"] = begun.sums
            tensors |= {f"random.{name}": value for name, value in begun.random.items()}
            config["begun"] = {"step": step, "rate": begun.rate, "counts": begun.counts,
                               "seconds": begun.seconds, "samples": begun.samples}  # fmt: skip
        return self.kept.save(len(history), step, tensors, config)

    def resume(
        self, model: nn.Module, optimiser: torch.optim.Optimizer, scaler: Any
    ) -> tuple[History, Begun | None]:
        """Put model and optimiser back where the latest checkpoint has them; empty if there is none.

        Raises:
            CheckpointError: the folder holds another run, or all of its checkpoints are damaged.
        """
        recorded = self._recorded()
        found = self.kept.load()
        if found is None:
            self._check(recorded)
            return History(), None
        folder, tensors, config = found
        if "run" not in config:
            raise CheckpointError(
                f"{folder} was written by a version of attractor that did not record what defines a "
                f"run, so it may be another one; {ADVICE}. Its weights are in {checkpoint.FILES[0]}, "
                "with 'model.' before their names"
            )
        schema.check(config, TRAINING, folder, CheckpointError, ADVISED)
        begun = _begun(config.get("begun"), tensors, self.steps, folder)
        rows = _rows(tensors["log"], folder)
        weights = _weights(model, tensors)
        self._check(recorded, None if len(rows) >= self.recipe.epochs else weights, model)
        if recorded is None and config["run"] != self.definition.digest:
            raise CheckpointError(f"{folder} is of another run, and without {DEFINITION}; {ADVICE}")
        if recorded is not None and config["run"] != recorded.digest:
            raise CheckpointError(f"{folder} is of another run than {DEFINITION} says; {ADVICE}")
        checkpoint.fill(model, weights, folder, ADVICE)
        if config["trained"] != _names(model, optimiser):
            raise CheckpointError(f"{folder} was trained with other parameters frozen; {ADVICE}")
        _restore(optimiser, _part(tensors, "optimiser."), self.recipe, folder)
        if config["scaler"]:
            with described(folder, "a training"):
                scaler.load_state_dict(config["scaler"])
        return History([{**row, **times} for row, times in zip(rows, self._times(len(rows)))]), begun

    def _check_foreign(self) -> None:
        """Raise rather than replace files that have names of ours, in a folder that is no training's."""
        ours = (self.folder / "log.jsonl").exists() or self.kept.found()
        foreign = [name for name in (DEFINITION, WEIGHTS) if (self.folder / name).exists() and not ours]
        if foreign:
            raise CheckpointError(
                f"{self.folder} holds {' and '.join(foreign)}, which no training has written; "
                "give another out="
            )

    def _recorded(self) -> Definition | None:
        """What defines the run in the folder, as it says itself; None if it does not."""
        path = self.folder / DEFINITION
        if not path.exists():
            return None
        try:
            return Definition.from_json(read_json(path))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} does not describe a run ({error}); {ADVICE}") from None

    def _check(
        self,
        recorded: Definition | None,
        weights: dict[str, Tensor] | None = None,
        model: nn.Module | None = None,
    ) -> None:
        """Raise if the folder holds another run.

        Args:
            recorded: what defines the run in the folder, if that is known.
            weights: of the checkpoint of a run that is not finished. A model that has them already, as
                after Ctrl-C in a notebook, is taken for the one that was trained.
            model: of the call.
        """
        if recorded is None:
            return
        unlike = recorded.unlike(self.definition)
        initial = recorded.unlike_weights(self.definition)
        if weights is not None and model is not None and unlike == [initial]:
            own = model.state_dict()
            if own.keys() == weights.keys() and all(_equal(own[k], v) for k, v in weights.items()):
                self.definition = recorded
                return
        if unlike:
            hint = (
                "make the model anew, from the same seed, to get this run; "
                if unlike == [initial]
                else ""
            )
            raise CheckpointError(f"{self.folder} holds a run with {'; '.join(unlike)}; {hint}{ADVICE}")

    def log(self, rows: list[Row]) -> None:
        """Write log.jsonl and times.jsonl, a row a line; and the last row for TensorBoard."""
        with self.kept.told("the log"):
            self._write_log(rows)
        if self.board is None:
            self.board = _board(self.folder / "tensorboard", len(rows))
        if self.board:
            for name, value in rows[-1].items():
                if isinstance(value, int | float) and name != "epoch":
                    self.board.add_scalar(name, value, rows[-1]["epoch"])

    def _write_log(self, rows: list[Row]) -> None:
        write_text(self.folder / "log.jsonl", _lines([_timeless(row) for row in rows]))
        timed = [{"epoch": row["epoch"], **{k: row[k] for k in TIMES if k in row}} for row in rows]
        write_text(self.folder / "times.jsonl", _lines(timed))

    def _times(self, count: int) -> list[Row]:
        """Of so many epochs, as far as they are known: nothing depends on them."""
        try:
            times = read_json_lines(self.folder / "times.jsonl")[:count]
        except (OSError, ValueError):
            times = []
        known = schema.mismatch(times, TIMED) is None
        rows = [{k: row[k] for k in TIMES if k in row} for row in times] if known else []
        return rows + [{}] * (count - len(rows))

    def close(self) -> None:
        """Let TensorBoard write what it has."""
        if self.board:
            self.board.close()


ADVICE = "give another out=, or resume=False to start anew"
ADVISED = f"{ADVICE[0].upper()}{ADVICE[1:]}."


def _remove(folder: Path) -> None:
    """Its manifest first: what is left if that is interrupted is no checkpoint."""
    if folder.is_symlink():  # what it points to is not ours
        folder.unlink()
        return
    with suppress(OSError):
        (folder / checkpoint.MANIFEST).unlink()
    shutil.rmtree(folder, ignore_errors=True)


def _lines(rows: list[Row]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _timeless(row: Row) -> Row:
    return {k: v for k, v in row.items() if k not in TIMES}


def _weights(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return checkpoint.completed(model, _part(tensors, "model."))


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def _begun(
    saved: dict[str, Any] | None, tensors: dict[str, Tensor], steps: int, folder: Path
) -> Begun | None:
    """What a checkpoint holds of an epoch that is not over; all but weights and states is checked."""
    own = {k: v for k, v in tensors.items() if not k.startswith(("model.", "optimiser."))}
    specs = {"log": TensorSpec(("bytes",), (torch.uint8,))}
    if saved is not None:
        specs["begun.sums"] = TensorSpec((saved["step"], len(saved["counts"])), values=ANY)
        specs |= {k: spec for k, spec in RANDOM.items() if k in own or k in NEEDED}
    check_tensors(own, specs, folder, CheckpointError, advice=ADVISED)
    if saved is None:
        return None
    if saved["step"] > steps or "loss" not in saved["counts"]:
        raise CheckpointError(f"{folder}: its steps and their numbers do not match. {ADVISED}")
    return Begun(**saved, sums=tensors["begun.sums"], random=_part(tensors, "random."))


def _rows(log: Tensor, folder: Path) -> list[Row]:
    """The rows of a log that is kept as bytes."""
    lines = log.numpy().tobytes().splitlines()
    rows = [parse(line, f"{folder}: the log") for line in lines if line]
    schema.check(rows, ROWS, f"{folder}: the log", CheckpointError, ADVISED)
    return rows


def _names(model: nn.Module, optimiser: torch.optim.Optimizer) -> list[str]:
    """Of the parameters that are trained, in the optimiser's order."""
    names = {id(p): name for name, p in model.named_parameters()}
    return [names[id(p)] for group in optimiser.param_groups for p in group["params"]]


def _equal(one: Tensor, other: Tensor) -> bool:
    return _alike(one, other) and torch.equal(one.cpu(), other)


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


def _restore(
    optimiser: torch.optim.Optimizer, tensors: dict[str, Tensor], recipe: Recipe, folder: Path
) -> None:
    """Fill an optimiser's state; each tensor laid out in memory as its parameter is."""
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    rates = [group["lr"] for group in optimiser.param_groups]
    specs = {
        f"{i}.{key}": TensorSpec((), FLOATS) if key == "step" else TensorSpec(tuple(p.shape), (p.dtype,))
        for i, p in enumerate(parameters)
        for key in STATES[recipe.optimiser]
    }
    told = f"{folder} has a state that the optimiser does not"
    check_tensors(tensors, specs, told, CheckpointError, optional=specs, advice=ADVISED)
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        index, _, key = name.partition(".")
        like = parameters[int(index)]
        laid_out = torch.empty_like(like, dtype=value.dtype) if value.shape == like.shape else None
        state.setdefault(int(index), {})[key] = value if laid_out is None else laid_out.copy_(value)
    if any(set(found) != STATES[recipe.optimiser] for found in state.values()):
        raise CheckpointError(f"{folder} has only a part of the optimiser's state; {ADVICE}")
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
