"""The training loop for images and text, for one or several processes, on CPU and GPU.

`train` prepares a run, and calls `run_epoch` for each epoch: a sequence of steps (forward, loss,
backward, clipping, update) that the host only launches. Batches are made on the device, losses stay
there until the epoch ends or progress is reported, and on a GPU the whole step is one CUDA graph.
Validation follows, once over all of its data.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from attractor.storage.files import lock_folder
from attractor.storage.objects import AnyPath
from attractor.train import generators
from attractor.train.bookkeeping import Sums, Tell, Timer
from attractor.train.capture import Blocks, compiled_blocks
from attractor.train.checkpoint import CheckpointError
from attractor.train.checkpointer import Checkpointer
from attractor.train.history import DivergedError, History, Progress, Row
from attractor.train.join import join
from attractor.train.place import Place
from attractor.train.recipe import SHORT, Recipe
from attractor.train.run_folder import EpochState, RunFolder
from attractor.train.steps import Loss
from attractor.train.training import Training

AfterEpoch = Callable[[nn.Module, Row], Mapping[str, float] | None]


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
    extend: bool = False,
    save_every: int = 1,
    save_minutes: float = 10.0,
    tell: Tell | None = None,
    after_epoch: AfterEpoch | None = None,
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
    code, closure and global variables) and the data (tensors in memory; of other objects their class and
    state, as pickling would keep it, without drawing a batch). The device, the number of processes,
    `sharding`, `tell`, `after_epoch`, `save_every` and the workers of a loader do not define a run. If
    the same run is called again, it continues from its last checkpoint or, if it is finished, returns
    the same history and weights; any other run raises `CheckpointError`, which names the differences.

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
        extend: continue a finished run in `out` by a recipe with more epochs. `epochs`, `learning_rate`,
            `warmup`, `schedule`, `milestones`, `decay` and `floor` may differ from those of the run; the
            epochs that follow have the new schedule, at their times since the start of the run. The
            result differs from that of a run that had the new schedule from its start.
        tell: a function that is called with `Progress` about once a second and after each epoch, such
            as ``print`` or a logger: ``lambda p: p.row and wandb.log(p.row)``. TensorBoard's files are
            written to `out` if TensorBoard is installed.
        after_epoch: a function ``(model, row) -> numbers`` that is called after each epoch in the first
            process, with the model in evaluation mode and the row of the epoch. The numbers, by name,
            become entries of the row, and so of log.jsonl; None: no further numbers.
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
    if extend and (out is None or not resume):
        raise ValueError("extend=True continues the run in a folder; pass out=, and not resume=False")
    place = Place.find(device, recipe.precision, distributed)
    with ExitStack() as stack:
        stack.enter_context(_isolated(place.device))
        training = Training(model, train_data, valid_data, recipe, loss, place, sharding, blocks)
        if training.sharded and after_epoch is not None:
            raise ValueError("after_epoch needs a whole model; use sharding='none', or leave it out")
        folder: RunFolder | None = None
        if out is not None or place.share[1] > 1:
            definition = training.definition(train_data, valid_data, loss)
            options = {"out": out is not None, "resume": resume, "save_every": save_every}
            join(place.share, definition, options | {"sharding": sharding, "extend": extend})
            if out is not None:
                folder = RunFolder(out, recipe, definition, place.is_main)
        stack.callback(training.finish)
        if recipe.capture == "compile":
            stack.enter_context(compiled_blocks(model, blocks))
        history, epoch_state = History(), None
        if folder:
            stack.callback(folder.close)
            history, epoch_state = _open_run(stack, folder, training, resume, extend)
        place.wait()
        training.begin()
        checkpointer = Checkpointer(training, folder if save_every else None, history, 60 * save_minutes)
        if checkpointer.folder:
            stack.enter_context(checkpointer.stop.handle_signals())
        for epoch in range(len(history), recipe.epochs):
            generators.seed(recipe.stream("epoch", epoch, place.share[0]))  # dropout, DataLoaders
            try:
                row, progress = run_epoch(
                    training, epoch, tell if place.is_main else None, checkpointer, epoch_state
                )
                if after_epoch and place.is_main:
                    row |= after_epoch(training.evaluated.eval(), row) or {}
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
        training.use_average()
        if folder and place.is_main:
            folder.finish(model)
    return history


def run_epoch(
    training: Training,
    epoch: int,
    tell: Tell | None,
    checkpointer: Checkpointer,
    state: EpochState | None = None,
) -> tuple[Row, Progress]:
    """Run one epoch, or the rest of an interrupted one: training, then validation."""
    feed, place, model = training.feed, training.place, training.model
    alone = place.share[1] == 1
    model.train()
    sums, timer = Sums(feed.steps, place), Timer(training.recipe, epoch, feed, tell)
    rate, first = 0.0, 0
    inputs: tuple[Tensor, ...] = ()
    if state is None:
        steps = checkpointer.inputs(feed, epoch)
    else:
        rate, first = state.rate, state.step
        steps = checkpointer.inputs(feed, epoch, first) if first < feed.steps else iter(())
        training.restore(state, sums, timer)
    for i, inputs in enumerate(steps, first):
        rate = training.set_rate(epoch + (i + 0.5) / feed.steps)
        sums.add(training.step(*inputs))
        if training.checks_loss and not sums.last_is_finite():
            training.check(sums, epoch, inputs)
        training.update_average()
        if timer.is_due(feed.size(*inputs)) and alone:
            training.check(sums, epoch, inputs)
            timer.report(i + 1, sums.means()["loss"])
        if checkpointer.is_due(i + 1):
            training.check(sums, epoch, inputs)
            checkpointer.within_epoch(training.epoch_state(rate, sums, timer))
    if checkpointer.stop.signal is not None and sums.count < feed.steps and alone:
        checkpointer.cut_short(training.epoch_state(rate, sums, timer) if sums.count else None)
    _require_batches(sums, f"no batches in epoch {epoch + 1}")
    training.check(sums, epoch, inputs)
    means = sums.means()  # waits for the device
    seconds = timer.seconds
    row: Row = {"epoch": epoch + 1, "lr": rate}
    row |= {f"train_{name}": value for name, value in means.items()}
    place.agree(training.evaluated)
    if training.valid is not None:
        end = training.epoch_state(rate, sums, timer) if checkpointer.folder else None
        row |= {f"valid_{k}": value for k, value in validate(training, epoch, checkpointer, end).items()}
    per_second = timer.samples * place.share[1] / max(seconds, 1e-9)
    row |= {"seconds": seconds, f"{feed.unit}_per_second": per_second}
    row = {k: v if not isinstance(v, float) or math.isfinite(v) else None for k, v in row.items()}
    return row, timer.progress(feed.steps, means["loss"], row)


def validate(
    training: Training, epoch: int, checkpointer: Checkpointer, end: EpochState | None
) -> dict[str, float]:
    """Return means over the validation data.

    Args:
        end: the state after the training steps of the epoch, for a checkpoint during validation; None
            for no checkpoint.
    """
    feed, alone = training.valid, training.place.share[1] == 1
    assert feed is not None
    training.model.eval()
    training.evaluated.eval()
    sums = Sums(feed.steps, training.place)
    # Evaluation is short: compiling it would take longer than it saves.
    eager = training.recipe.capture == "compile"
    with torch.compiler.set_stance("force_eager") if eager else nullcontext():
        for inputs, counts in training.in_step(checkpointer.inputs(feed, epoch)):
            numbers = training.valid_step(*inputs)
            if counts:
                sums.add(numbers)
            if end and alone and checkpointer.is_due(sums.count):
                checkpointer.within_epoch(end)
    if end and alone and sums.count < feed.steps and checkpointer.stop.signal is not None:
        checkpointer.cut_short(end)
    _require_batches(sums, f"no validation batches in epoch {epoch + 1}")
    return sums.means()


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
        training = Training(model, train_data, valid_data, recipe, loss, place)
        definition = training.definition(train_data, valid_data, loss)
        history, epoch_state = RunFolder(out, recipe, definition).resume(training.state)
        training.use_average()
    model.eval()
    return History() if epoch_state else history


def _open_run(
    stack: ExitStack, folder: RunFolder, training: Training, resume: bool, extend: bool
) -> tuple[History, EpochState | None]:
    """Lock the folder of a run, and load its last checkpoint or remove it; all processes take part.

    Returns:
        The rows of the finished epochs, and the state of an unfinished one.
    """
    place = training.place
    problem: Exception | None = None
    history, epoch_state = History(), None
    try:
        if place.is_main:
            stack.enter_context(lock_folder(folder.folder))
        if resume:
            history, epoch_state = folder.resume(training.state, extend)
        elif place.is_main:
            folder.clear()
        if extend and len(history) > training.recipe.epochs:
            raise ValueError(
                f"epochs = {training.recipe.epochs}, but the run in {folder.folder} has "
                f"{len(history)} finished epochs; extend=True needs more of them"
            )
    except (CheckpointError, OSError, ValueError) as error:
        problem = error
    place.raise_together(problem)
    steps_done = len(history) * (training.feed.steps + 1) + (epoch_state.step if epoch_state else 0)
    if int(place.total(torch.tensor([steps_done]))) != place.share[1] * steps_done:
        raise ValueError(
            f"processes found other checkpoints in {folder.folder}; all must see one folder"
        )
    try:
        if place.is_main:
            folder.begin(history, training.model)
    except (CheckpointError, OSError, TypeError) as error:
        problem = error
    place.raise_together(problem)
    return history, epoch_state


def _require_batches(sums: Sums, problem: str) -> None:
    if not sums.count:
        raise ValueError(
            f"{problem}: the data can be iterated only once; give a list, a DataLoader or a class whose "
            "__iter__ starts again"
        )


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
