"""The training loop for images and text, for one or several processes, on CPU and GPU.

An epoch of training is a sequence of steps (forward, loss, backward, clipping, update) that the host
only launches: batches are made on the device, losses stay there until the epoch ends or progress is
reported, and on a GPU the whole step is one CUDA graph. Validation follows, once over all of its data.
"""

import math
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from attractor.storage.files import lock_folder, write_json
from attractor.storage.objects import AnyPath, path_of
from attractor.train import generators
from attractor.train.blame import blame, finite
from attractor.train.bookkeeping import StepSums, Sums, Tell, Timer
from attractor.train.capture import Blocks, Captured, compiled_blocks
from attractor.train.checkpoint import CheckpointError
from attractor.train.classify import Classify
from attractor.train.definition import Definition
from attractor.train.feeds import Feed, feed_of
from attractor.train.history import DivergedError, History, Progress, Row, Seeds
from attractor.train.join import join
from attractor.train.place import HALVES, Place
from attractor.train.recipe import SHORT, Recipe
from attractor.train.runs import EpochState, RunFolder
from attractor.train.sharding import SHARDINGS, check_sharding, equal_steps, local, shard_optimiser
from attractor.train.stopping import Stop

# (model, batch) -> the loss, or numbers by name, one of which is "loss". Each is a tensor with one entry
# per item, of which the mean is taken, or a scalar, which counts as one item.
Loss = Callable[[nn.Module, Any], Tensor | dict[str, Tensor]]


def train(
    model: nn.Module,
    train_data: Any,
    valid_data: Any = None,
    recipe: Recipe = SHORT,
    *,
    loss: Loss | None = None,
    device: torch.device | str | None = None,
    out: AnyPath | str | None = None,
    resume: bool = True,
    save_every: int = 1,
    save_minutes: float = 10.0,
    tell: Tell | None = None,
    blocks: Blocks | None = None,
    distributed: bool = True,
    sharding: str = "none",
) -> History:
    """Train a model in place by a recipe; the same model, data and recipe give the same result.

    The result is the same to the last bit on a CPU, and up to the rounding of algorithms that cuDNN may
    choose anew on a GPU; this also holds if training was killed at any moment and called again. The
    random numbers of torch, Python and NumPy are seeded for every epoch and restored afterwards; data
    sets that draw from other generators must seed them.

    **Threads.** Dropout and data loaders draw from generators that all threads share. Trainings in
    several threads of one process therefore take turns, with the same results as one after the other.
    Meanwhile other threads must not draw from the global generators, and `tell` must not wait for the
    training of another thread. Trainings run at the same time only in separate processes.

    **The run in a folder.** With `out`, a folder holds one run. What defines it is written to
    ``run.json`` before the first step: the recipe (without `capture`; `precision` as in use), the model
    (class and attributes of every module, such as dropout's), its weights at the call, the loss (its
    code, closure and global variables) and the data (tensors in memory; of other objects their class
    and state, as pickling would keep it, without drawing a batch). The device, the number of processes,
    `sharding`, `tell`, `save_every` and the workers of a loader do not define a run. If the same run is
    called again, it continues from its last checkpoint or, if it is finished, returns the same history
    and weights; any other run raises `CheckpointError`, which names the differences.

    Args:
        model: any network; it is moved to the device and left there, in evaluation mode.
        train_data: images, that is, any object with `images` uint8 ``[n, c, h, w]``, `labels` ``[n]``,
            `mean` and `std` (as `attractor.data.images.load` returns), or batches: a list, a DataLoader,
            or any iterable that has a length and can be iterated repeatedly.
        valid_data: the validation data, of the same kinds; None: no validation.
        loss: ``(model, batch) -> Tensor``, or a dictionary with "loss" and further numbers to report:
            one entry per item, or a scalar. None: cross-entropy and accuracy of (inputs, labels).
        device: the device of training; None: a GPU if there is one.
        out: a folder, or the URL of one in an object store such as "s3://bucket/run", for run.json,
            log.jsonl, times.jsonl and the last two checkpoints, which are written after every
            `save_every` epochs (0: never), and within an epoch every `save_minutes`.
            After Ctrl-C or SIGTERM the step is finished and one more is written. A finished run leaves
            its weights in model.safetensors, for
            ``model.load_state_dict(safetensors.torch.load_file(path))``.
        resume: if True, the default, continue the run in `out` as if it had not been interrupted,
            because a job that is killed is submitted again with the same call, and a call that defines
            another run raises. In an interrupted epoch, a loader's batches are read again up to the
            interrupted step. If False, remove the run in `out` and start anew.
        tell: a function that is called with `Progress`, such as ``print``.
        blocks: the blocks that capture="compile" compiles and that sharding="full" shards one by one;
            None: the blocks that repeat.
        distributed: if True, processes that torchrun or ``accelerate launch`` has started
            (``WORLD_SIZE`` above 1) train one run together: they share its batches, and gradients are
            averaged. All of them must call `train` with the same run; they compare its definition
            first. A process group that is only initialised is not used. If False, this process trains
            alone, without communication. Use False if only one rank trains, or each rank another model.
        sharding: "none": each of several processes has all parameters (DistributedDataParallel). "full":
            parameters, gradients and optimiser states are distributed over the processes (FSDP2), and
            those of a block are gathered while it computes. A model on the CPU is moved to the device in
            parts. The loss must compute with the parameters only by calling the model. Checkpoints are
            the same for both. After training the model is whole again in every process; after an error
            other than `DivergedError`, and after a signal, it stays sharded, and has to be made anew to
            be trained again. One process trains without sharding.

    Raises:
        DivergedError: the training loss is not finite; names epoch, step and layer.
        CheckpointError: `out` holds another run, or a run of a version of attractor that did not record
            its definition, or is damaged.
        ValueError: processes that were launched together train different runs; the message names the
            differences. Or the model or the recipe cannot be trained with `sharding`.
        RuntimeError: another process has not called `train` within
            `attractor.train.join.JOIN_SECONDS`, 120.
        OSError: the log or a checkpoint cannot be written, because the disk is full, say.
        FolderLockedError: another process is training in `out`, and has not ended within
            `attractor.storage.files.LOCK_SECONDS`, 30.
        KeyboardInterrupt, TerminatedError: after Ctrl-C, after SIGTERM (a `SystemExit`).
    """
    place = Place.find(device, recipe.precision, distributed)
    with ExitStack() as stack:
        stack.enter_context(_isolated(place.device))
        training = _Training(model, train_data, valid_data, recipe, loss, place, sharding, blocks)
        folder: RunFolder | None = None
        if out is not None or place.share[1] > 1:
            definition = training.definition(train_data, valid_data, loss)
            options = {"out": out is not None, "resume": resume, "save_every": save_every}
            join(place.share, definition, options | {"sharding": sharding})
            if out is not None:
                folder = RunFolder(out, recipe, definition, place.is_main)
        stack.callback(training.finish)
        if recipe.capture == "compile":
            stack.enter_context(compiled_blocks(model, blocks))
        history, epoch_state = History(), None
        if folder:
            problem: Exception | None = None
            try:
                if place.is_main:
                    stack.enter_context(lock_folder(folder.folder))
                if resume:
                    history, epoch_state = folder.resume(model, training.optimiser, training.scaler)
                elif place.is_main:
                    folder.clear()
            except (CheckpointError, OSError) as error:
                problem = error
            place.raise_together(problem)
            stack.callback(folder.close)
            steps_done = len(history) * (training.feed.steps + 1) + (
                epoch_state.step if epoch_state else 0
            )
            if int(place.total(torch.tensor([steps_done]))) != place.share[1] * steps_done:
                raise ValueError(f"processes found other checkpoints in {out}; all must see one folder")
            try:
                if place.is_main:
                    folder.begin(history, model)
            except (CheckpointError, OSError, TypeError) as error:
                problem = error
            place.raise_together(problem)
        place.wait()
        training.begin()
        checkpointer = _Checkpointer(
            training, folder if save_every else None, history, 60 * save_minutes
        )
        if checkpointer.folder:
            stack.enter_context(checkpointer.stop.handle_signals())
        for epoch in range(len(history), recipe.epochs):
            generators.seed(recipe.stream("epoch", epoch, place.share[0]))  # dropout, DataLoaders
            try:
                row, progress = training.epoch(
                    epoch, tell if place.is_main else None, checkpointer, epoch_state
                )
                history.rows.append(row)
                if folder and place.is_main:
                    folder.log(history.rows)
                due = save_every and ((epoch + 1) % save_every == 0 or epoch + 1 == recipe.epochs)
                checkpointer.after_epoch(bool(due))
            except DivergedError as error:
                del history.rows[epoch:]
                error.history = history
                if folder and place.is_main:
                    last = {"epoch": epoch + 1, "train_loss": None, "step": error.step}
                    folder.log([*history, last | {"layer": error.layer} if error.layer else last])
                    if folder.checkpoints.last:
                        error.args = (f"{error}; the last good checkpoint is {folder.checkpoints.last}",)
                raise
            epoch_state = None
            place.wait()
            if tell and place.is_main:
                tell(progress)
        training.gather()
        if folder and place.is_main:
            folder.finish(model)
    return history


def restored(
    model: nn.Module,
    train_data: Any,
    valid_data: Any,
    recipe: Recipe,
    *,
    out: AnyPath | str,
    loss: Loss | None = None,
    device: torch.device | str | None = None,
) -> History:
    """Load the weights of the last checkpoint of a run into a model, without training.

    Only this process takes part. The arguments must be those of the call of `train`, and the model must
    have its initial weights; it is left in evaluation mode.

    Returns:
        The rows of the finished epochs; none if there is no checkpoint, or if the last one was written
        within an epoch.

    Raises:
        CheckpointError: the folder holds another run.
    """
    place = Place.find(device, recipe.precision, distributed=False)
    with _isolated(place.device):
        training = _Training(model, train_data, valid_data, recipe, loss, place)
        definition = training.definition(train_data, valid_data, loss)
        history, epoch_state = RunFolder(out, recipe, definition).resume(
            model, training.optimiser, training.scaler
        )
    model.eval()
    return History() if epoch_state else history


def train_seeds(
    make_model: Callable[[], nn.Module],
    train_data: Any,
    valid_data: Any,
    recipe: Recipe = SHORT,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    out: AnyPath | str | None = None,
    after: Callable[[nn.Module, History, int], None] | None = None,
    name: str = "valid_accuracy",
    **options: Any,
) -> Seeds:
    """Train with several seeds, one after the other, and return mean and spread of the final epoch.

    Args:
        make_model: a function that is called after ``torch.manual_seed(seed)``, so that initial weights
            depend on the seed. The global generators are restored afterwards.
        train_data, valid_data, recipe: as for `train`.
        seeds: the seeds, all different.
        out: a folder or URL with one subfolder per seed, such as ``seed-0``, for one run as in `train`;
            summary.json holds the results.
        after: a function that is called with each trained model, its history and its seed.
        name: name of the number that `Seeds` summarises.
        options: further arguments of `train`.
    """
    seeds = tuple(operator.index(seed) for seed in seeds)
    if not seeds or len(set(seeds)) != len(seeds):
        raise ValueError(f"seeds = {seeds}; give one or more, all different")
    if valid_data is None and name.startswith("valid_"):
        raise ValueError(
            f"{name} needs valid_data; or ask for another number, such as name='train_loss'"
        )
    folder = None if out is None else path_of(out)
    if folder is not None and not options.get("resume", True):
        (folder / "summary.json").unlink(missing_ok=True)
    histories: list[History] = []
    for seed in seeds:
        with generators.forked(torch.device(options.get("device") or _first_device())):
            torch.manual_seed(seed)
            model = make_model()
        inner = None if folder is None else folder / f"seed-{seed}"
        own = replace(recipe, seed=seed)
        history = train(model, train_data, valid_data, own, out=inner, **options)
        histories.append(history)
        history.last(name)  # raises before the next seed if there is no such number
        if after:
            after(model, history, seed)
    results = Seeds(seeds, tuple(histories), name)
    if folder is not None:
        summary = {"name": name, "seeds": seeds, "values": results.values, "mean": results.mean,
                   "spread": results.spread, "final": [h.final for h in histories]}  # fmt: skip
        write_json(folder / "summary.json", summary)
    return results


def evaluate(
    model: nn.Module, data: Any, *, loss: Loss | None = None, batch: int = 500, precision: str = "fp32"
) -> dict[str, float]:
    """Return means over all of the data: "loss" and "accuracy", or the names that `loss` returns.

    Every sample is used once, on the model's device and in evaluation mode; the mode of the model is
    restored. Processes do not share the work: each evaluates all of the data.
    """
    if precision not in ("fp32", *HALVES):
        raise ValueError(f"precision = {precision!r} is not one of {', '.join(('fp32', *HALVES))}")
    like = _example(model)
    place = Place(like.device, precision)
    feed = feed_of(data, Recipe(batch=batch), train=False, like=like)
    modes = [(module, module.training) for module in model.modules()]
    try:
        sums = Sums(feed.steps, place)
        loss = loss or Classify(wary=True, exact=True)
        look = _Evaluation(model, loss, feed, place, captured=False)
        model.eval()
        for inputs in feed.epoch(0):
            sums.add(look(*inputs))
        return sums.means()
    finally:
        for module, training in modes:
            module.training = training


class _Training:
    """The parts of a training: feeds, optimiser, training step and evaluation step."""

    def __init__(
        self, model: nn.Module, train_data: Any, valid_data: Any, recipe: Recipe, loss: Loss | None,
        place: Place, sharding: str = "none", blocks: Blocks | None = None,
    ) -> None:  # fmt: skip
        if sharding not in SHARDINGS:
            raise ValueError(f"sharding = {sharding!r} is not one of {', '.join(SHARDINGS)}")
        self.sharded, self.blocks = sharding != "none" and place.share[1] > 1, blocks
        if self.sharded:
            check_sharding(model, recipe, place.precision)
        for name in ("label_smoothing", "mixup"):
            if loss is not None and getattr(recipe, name):
                raise ValueError(
                    f"{name} belongs to the default loss; a loss of your own must apply it itself"
                )
        on_cpu = place.device.type == "cpu"
        loss = loss or Classify(recipe.label_smoothing, wary=True, exact=on_cpu)
        graph = _captures(recipe, place)
        self.model, self.recipe, self.place = model, recipe, place
        self.finish_sharing: Callable[[], None] = lambda: None
        if not self.sharded:  # a sharded model is moved and laid out in parts
            model.to(place.device)
            if recipe.channels_last:
                _lay_out(model)
        like = torch.empty(0, dtype=_example(model).dtype, device=place.device)
        self.feed = feed_of(train_data, recipe, train=True, like=like, share=place.share)
        self.rate = torch.zeros((), device=place.device) if graph else None
        self.optimiser = recipe.make_optimiser(model, self.rate)
        self.scaler = torch.amp.GradScaler(place.device.type, enabled=place.precision == "fp16")
        self.loss, self.graph = loss, graph
        # If synchronisation is free, the loss of a step is checked before weights are changed.
        self.careful = on_cpu and place.share[1] == 1
        self.valid: Feed | None = None
        if valid_data is not None:
            self.valid = feed_of(valid_data, recipe, train=False, like=like, share=place.share)

    def definition(self, train_data: Any, valid_data: Any, loss: Loss | None) -> Definition:
        """Return the definition of the run. Requires: the model has its initial weights."""
        place = self.place
        definition = Definition.of(
            self.model, train_data, valid_data, self.recipe, loss, precision=place.precision,
            processes=place.share[1],
        )  # fmt: skip
        return replace(definition, steps=self.feed.steps)

    def begin(self) -> None:
        """Share the model with the other processes, and make the training and evaluation steps."""
        model, place, loss, graph = self.model, self.place, self.loss, self.graph
        shared_model, self.finish_sharing = place.share_model(model, self.sharded, self.blocks)
        if self.sharded:
            source, self.optimiser = self.optimiser, self.recipe.make_optimiser(model)
            shard_optimiser(source, self.optimiser)
        step = _Step(
            shared_model, model, self.optimiser, self.scaler, loss, self.feed, self.recipe, place, graph
        )
        step.careful = self.careful
        self.step: Callable[..., StepSums] = Captured(step, step.snapshot) if graph else step
        if self.valid is not None:
            look = _Evaluation(model, loss, self.valid, place, graph)
            self.look: Callable[..., StepSums] = Captured(look) if graph else look

    def epoch(
        self,
        epoch: int,
        tell: Tell | None,
        checkpointer: "_Checkpointer",
        resume_state: EpochState | None = None,
    ) -> tuple[Row, Progress]:
        """Run one epoch, or the rest of an interrupted one: training, then validation."""
        feed, recipe = self.feed, self.recipe
        self.model.train()
        sums, timer = Sums(feed.steps, self.place), Timer(recipe, epoch, feed, tell)
        rate, first = 0.0, 0
        inputs: tuple[Tensor, ...] = ()
        if resume_state is None:
            steps = self.inputs(feed, epoch, checkpointer)
        else:
            rate, first = resume_state.rate, resume_state.step
            steps = self.inputs(feed, epoch, checkpointer, first) if first < feed.steps else iter(())
            self.restore(resume_state, sums, timer)
        for i, inputs in enumerate(steps, first):
            rate = recipe.rate(epoch + (i + 0.5) / feed.steps)
            self.set_rate(rate)
            sums.add(self.step(*inputs))
            if self.careful and not sums.last_is_finite():
                self.check(sums, epoch, inputs)
            if timer.is_due(feed.size(*inputs)) and self.place.share[1] == 1:
                self.check(sums, epoch, inputs)
                timer.report(i + 1, sums.means()["loss"])
            if checkpointer.is_due(i + 1):
                self.check(sums, epoch, inputs)
                checkpointer.within_epoch(self.epoch_state(rate, sums, timer))
        if checkpointer.stop.signal is not None and sums.count < feed.steps and self.place.share[1] == 1:
            checkpointer.cut_short(self.epoch_state(rate, sums, timer) if sums.count else None)
        if not sums.count:
            raise ValueError(
                f"no batches in epoch {epoch + 1}: the data can be iterated only once; give a list, a "
                "DataLoader or a class whose __iter__ starts again"
            )
        self.check(sums, epoch, inputs)
        means = sums.means()  # waits for the device
        seconds = timer.seconds
        row: Row = {"epoch": epoch + 1, "lr": rate}
        row |= {f"train_{name}": value for name, value in means.items()}
        self.place.agree(self.model)
        if self.valid is not None:
            trained_state = self.epoch_state(rate, sums, timer) if checkpointer.folder else None
            self.model.eval()
            sums = Sums(self.valid.steps, self.place)
            # Evaluation is short: compiling it would take longer than it saves.
            own = recipe.capture == "compile"
            with torch.compiler.set_stance("force_eager") if own else nullcontext():
                steps = self.inputs(self.valid, epoch, checkpointer)
                for inputs, counts in self.in_step(steps):
                    numbers = self.look(*inputs)
                    if counts:
                        sums.add(numbers)
                    if trained_state and self.place.share[1] == 1 and checkpointer.is_due(sums.count):
                        checkpointer.within_epoch(trained_state)
            early = sums.count < self.valid.steps and self.place.share[1] == 1
            if trained_state and early and checkpointer.stop.signal is not None:
                checkpointer.cut_short(trained_state)
            if not sums.count:
                raise ValueError(
                    f"no validation batches in epoch {epoch + 1}: the data can be iterated only once; "
                    "give a list, a DataLoader or a class whose __iter__ starts again"
                )
            row |= {f"valid_{name}": value for name, value in sums.means().items()}
        per_second = timer.samples * self.place.share[1] / max(seconds, 1e-9)
        row |= {"seconds": seconds, f"{feed.unit}_per_second": per_second}
        row = {k: v if not isinstance(v, float) or math.isfinite(v) else None for k, v in row.items()}
        return row, timer.progress(feed.steps, means["loss"], row)

    def inputs(
        self, feed: Feed, epoch: int, checkpointer: "_Checkpointer", first: int = 0
    ) -> Iterator[tuple[Tensor, ...]]:
        """Yield the inputs of an epoch.

        It ends early if a loader loses its workers because the signal to stop reached them too.
        """

        def has_stopped() -> bool:
            time.sleep(0.05)  # the signal may arrive a moment later
            return checkpointer.stop.signal is not None and self.place.share[1] == 1

        def until_stopped() -> Iterator[tuple[Tensor, ...]]:
            try:
                yield from steps
            except RuntimeError:  # raised by a DataLoader whose workers have died
                if not has_stopped():
                    raise

        try:
            steps = feed.epoch(epoch, first)
        except RuntimeError:
            if not has_stopped():
                raise
            return iter(())
        return until_stopped()

    def in_step(self, steps: Iterator[tuple[Tensor, ...]]) -> Iterator[tuple[tuple[Tensor, ...], bool]]:
        """Yield the inputs of an evaluation and whether they count; see `sharding.equal_steps`."""
        if self.sharded:
            return equal_steps(steps, self.place.anywhere)
        return ((inputs, True) for inputs in steps)

    def epoch_state(self, rate: float, sums: Sums, timer: Timer) -> EpochState:
        """Return the state of an unfinished epoch for a checkpoint."""
        rank, world = self.place.share
        random = {}
        for name, own in generators.state(self.place.device).items():
            rows = torch.zeros(world, len(own), dtype=torch.int64)
            rows[rank] = own
            random[name] = self.place.total(rows).to(own.dtype)
        rows, counts = sums.totals()
        return EpochState(sums.count, rate, rows, counts, random, timer.seconds, timer.samples)

    def restore(self, state: EpochState, sums: Sums, timer: Timer) -> None:
        """Restore sums, times and random numbers from a checkpoint."""
        rank, world = self.place.share
        sums.restore(state)
        timer.began -= state.seconds
        timer.samples = state.samples
        # With another number of processes, the generators keep the seed of the epoch.
        if all(len(rows) == world for rows in state.random.values()):
            try:
                generators.restore({k: v[rank] for k, v in state.random.items()}, self.place.device)
            except (OverflowError, RuntimeError, TypeError, ValueError) as error:
                raise CheckpointError(
                    f"the checkpoint's random numbers cannot be used: {error}"
                ) from None

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of the next step."""
        if self.rate is not None:
            self.rate.fill_(rate)
        else:
            for group in self.optimiser.param_groups:
                group["lr"] = rate

    def check(self, sums: Sums, epoch: int, inputs: tuple[Tensor, ...]) -> None:
        """Raise if a loss of this epoch is not finite in any process.

        Args:
            sums: the losses of this epoch.
            epoch: the epoch, from 0.
            inputs: inputs of the last step; on a CPU that is the step with the bad loss.
        """
        step = sums.first_bad()
        if step is None:
            return
        self.gather()  # the processes do not run the same operations below

        def again() -> None:
            with self.place.half():
                self.loss(self.model, self.feed.batch(*inputs))

        layer, why = blame(self.model, again, self.feed.batch(*inputs) if inputs else ())
        rate = self.recipe.rate(epoch + (step - 0.5) / sums.steps)
        raise DivergedError(
            f"the loss is not finite at epoch {epoch + 1}, step {step} of {sums.steps}, where the "
            f"learning rate is {rate:.3g}: {why}",
            History(), epoch + 1, step, layer,
        )  # fmt: skip

    def check_weights(self, epoch: int, step: int) -> None:
        """Raise if a weight is not finite in any process, because such a state must not be saved."""
        values = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        bad = self.place.total(torch.tensor([int(not finite(local(p))) for p in values.values()]))
        name = next((name for name, count in zip(values, bad.tolist()) if count), None)
        if name is not None:
            self.gather()
            raise DivergedError(
                f"the weights {name!r} are not finite after epoch {epoch}, step {step}: lower the "
                "learning rate, lengthen warmup, or set clip=1.0",
                History(), epoch, step, name.rpartition(".")[0],
            )  # fmt: skip

    def gather(self) -> None:
        """Make a sharded model whole again. All processes must call it."""
        if self.sharded:
            self.finish_sharing()
            if self.recipe.channels_last:
                _lay_out(self.model)

    def finish(self) -> None:
        """Undo all changes to the model except its weights, and set evaluation mode.

        A model that is still sharded stays so: after an error, other processes may not be here.
        """
        if not self.sharded:
            self.finish_sharing()
        self.optimiser.zero_grad(set_to_none=True)  # gradients share the memory of the graph
        self.model.eval()


class _Step:
    """Forward, loss, backward, clipping and update, without synchronisation with the device."""

    def __init__(
        self, shared_model: nn.Module, model: nn.Module, optimiser: torch.optim.Optimizer, scaler: Any,
        loss: Loss, feed: Feed, recipe: Recipe, place: Place, captured: bool,
    ) -> None:  # fmt: skip
        self.shared_model, self.model = shared_model, model
        self.optimiser, self.scaler = optimiser, scaler
        self.loss, self.feed, self.clip = loss, feed, recipe.clip
        self.place, self.captured, self.careful = place, captured, False

    def __call__(self, *inputs: Tensor) -> StepSums:
        self.optimiser.zero_grad(set_to_none=True)
        with self.place.half(cache=not self.captured):
            numbers = _numbers(self.loss(self.shared_model, self.feed.batch(*inputs)))
        if self.careful and not finite(numbers["loss"]):
            return _step_sums(numbers, self.place)
        self.scaler.scale(numbers["loss"].mean()).backward()
        if self.clip is not None:
            self.scaler.unscale_(self.optimiser)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.scaler.step(self.optimiser)
        self.scaler.update()
        return _step_sums(numbers, self.place)

    def snapshot(self) -> Callable[[], None]:
        """Copy everything that a step changes, and return a function that restores it."""
        states = [s for state in self.optimiser.state.values() for s in state.values()]
        tensors = [*self.model.parameters(), *self.model.buffers(), *filter(torch.is_tensor, states)]
        copies = [x.detach().clone() for x in tensors]
        random = torch.cuda.get_rng_state(self.place.device)

        def restore() -> None:
            with torch.no_grad():
                for x, copy in zip(tensors, copies):
                    x.copy_(copy)
            torch.cuda.set_rng_state(random, self.place.device)

        return restore


class _Evaluation:
    """Forward pass and the numbers of the loss, without gradients."""

    def __init__(self, model: nn.Module, loss: Loss, feed: Feed, place: Place, captured: bool) -> None:
        self.model, self.loss, self.feed, self.place, self.captured = model, loss, feed, place, captured

    def __call__(self, *inputs: Tensor) -> StepSums:
        with torch.no_grad(), self.place.half(cache=not self.captured):
            return _step_sums(_numbers(self.loss(self.model, self.feed.batch(*inputs))), self.place)


@dataclass
class _Checkpointer:
    """Writes checkpoints when they are due, and stops training after a signal.

    Attributes:
        training: the training to save.
        folder: the folder of the checkpoints; None: write none, and leave signals alone.
        history: the rows of the finished epochs.
        seconds: the time between checkpoints within an epoch.
        stop: whether a signal has arrived.
        last: the time of the last checkpoint.
    """

    AGREE = 32  # steps between two agreements of several processes

    training: _Training
    folder: RunFolder | None
    history: History
    seconds: float
    stop: Stop = field(default_factory=Stop)
    last: float = field(default_factory=time.monotonic)

    def is_due(self, step: int, agree: bool = False) -> bool:
        """Return whether a checkpoint is due after a step; several processes agree on the answer."""
        if self.folder is None:
            return False
        due = self.stop.signal is not None or time.monotonic() - self.last >= self.seconds
        place = self.training.place
        if place.share[1] == 1:
            return due
        return (agree or step % self.AGREE == 0) and place.anywhere(due)

    def within_epoch(self, state: EpochState) -> None:
        """Write a checkpoint within an epoch, and stop if a signal has arrived."""
        self.write(state)
        epochs, steps = self.training.recipe.epochs, self.training.feed.steps
        where = f"after step {state.step} of {steps} of epoch {len(self.history) + 1} of {epochs}"
        self.stop_if_signalled(where)

    def cut_short(self, state: EpochState | None) -> None:
        """Write a checkpoint after a signal has ended the data of an epoch early, and stop."""
        if state is not None:
            self.within_epoch(state)
        if len(self.history):
            self.write(None)
        self.stop_if_signalled(f"before the first step of epoch {len(self.history) + 1}")

    def after_epoch(self, whole: bool) -> None:
        """Write a checkpoint after an epoch if it is due, and stop if a signal has arrived."""
        if self.folder and (self.is_due(0, agree=True) or whole):
            self.write(None)
            self.stop_if_signalled(f"after epoch {len(self.history)} of {self.training.recipe.epochs}")

    def write(self, state: EpochState | None) -> None:
        """Check weights and gather the state in all processes, and write it in the main one."""
        training = self.training
        training.check_weights(
            len(self.history) + bool(state), state.step if state else training.feed.steps
        )
        if self.folder:
            self.folder.save(training.model, training.optimiser, training.scaler, self.history, state)
        self.last = time.monotonic()

    def stop_if_signalled(self, where: str) -> None:
        """Stop if a signal has arrived, with a message that says where, and how to continue."""
        if self.training.place.anywhere(self.stop.signal is not None):
            assert self.folder is not None
            main = self.training.place.is_main
            last = self.folder.checkpoints.last if main else self.folder.folder
            outcome = (
                f"{last} is written, and the same call continues from it" if last else "nothing is lost"
            )
            self.stop.now(f"{where}: {outcome}", main)


def _numbers(output: Tensor | dict[str, Tensor]) -> dict[str, Tensor]:
    numbers = output if isinstance(output, dict) else {"loss": output}
    if "loss" not in numbers:
        raise ValueError(
            f"the loss function returned the names {', '.join(numbers)}; one of them must be 'loss'"
        )
    for name, value in numbers.items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"the loss function returned {name} as {type(value).__name__}; it must return tensors"
            )
    return numbers


def _step_sums(numbers: dict[str, Tensor], place: Place) -> StepSums:
    sums = torch.stack([value.detach().to(place.accumulate_dtype).sum() for value in numbers.values()])
    return sums, {name: value.numel() for name, value in numbers.items()}


def _first_device() -> str:
    """Return a GPU if there is one, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _example(model: nn.Module) -> Tensor:
    """Return a parameter of a floating-point dtype, which determines device and dtype."""
    parameter = next((p for p in model.parameters() if p.is_floating_point()), None)
    if parameter is None:
        raise ValueError(f"{type(model).__name__} has no parameters of a floating-point dtype")
    return parameter


def _lay_out(model: nn.Module) -> None:
    """Set channels_last for four dimensions (`Module.to` fails on the five of a Conv3d)."""
    for x in (*model.parameters(), *model.buffers()):
        if x.dim() == 4:
            x.data = x.data.to(memory_format=torch.channels_last)


def _captures(recipe: Recipe, place: Place) -> bool:
    """Return whether steps are captured in a CUDA graph."""
    if recipe.capture == "graph" and place.device.type != "cuda":
        raise ValueError(
            f"capture = 'graph' on {place.device}; it needs a GPU: choose one with device=, or use "
            "capture='auto'"
        )
    possible = place.device.type == "cuda" and place.share[1] == 1 and place.precision != "fp16"
    return possible and recipe.capture != "none"


@contextmanager
def _isolated(device: torch.device) -> Iterator[None]:
    """Set random numbers and cuDNN benchmarking for training, and restore them afterwards."""
    with ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
            stack.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
            torch.backends.cudnn.benchmark = not torch.are_deterministic_algorithms_enabled()
        stack.enter_context(generators.forked(device))
        yield
