"""The training loop: one for images and text, for one process and several, on CPU and GPU.

An epoch of training is a run of steps (forward, loss, backward, clipping, update) that the host only
starts: batches are made on the device, losses stay there until the epoch ends or somebody wants to see
them, and on a GPU the whole step is one CUDA graph. Then all of the validation data, once.
"""

import math
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attractor.core.files import lock_folder, write_json
from attractor.train import generators
from attractor.train.blame import blame, finite
from attractor.train.bookkeeping import Counted, Sums, Tell, Watch
from attractor.train.capture import Blocks, Captured, compiled_blocks
from attractor.train.checkpoint import CheckpointError
from attractor.train.classify import Classify
from attractor.train.definition import Definition
from attractor.train.feeds import Feed, feed_of
from attractor.train.history import DivergedError, History, Progress, Row, Seeds
from attractor.train.join import join
from attractor.train.place import HALVES, Place
from attractor.train.recipe import SHORT, Recipe
from attractor.train.runs import Begun, RunFolder
from attractor.train.stopping import Stop

# (model, batch) -> the loss, or numbers by name with "loss" among them: a tensor with one entry an item,
# of which the mean is taken, or a scalar, which counts as one item.
Loss = Callable[[nn.Module, Any], Tensor | dict[str, Tensor]]


def train(
    model: nn.Module,
    train_data: Any,
    valid_data: Any = None,
    recipe: Recipe = SHORT,
    *,
    loss: Loss | None = None,
    device: torch.device | str | None = None,
    out: Path | str | None = None,
    resume: bool = True,
    save_every: int = 1,
    save_minutes: float = 10.0,
    tell: Tell | None = None,
    blocks: Blocks | None = None,
    distributed: bool = True,
) -> History:
    """Train a model in place by a recipe; the same model, data and recipe give the same result.

    On a CPU to the last bit, on a GPU up to the rounding of algorithms that cuDNN may choose anew; also
    if it was killed in between, at any moment, and called again. Torch's, Python's and NumPy's random
    numbers are seeded for every epoch, and are the caller's again afterwards; what data sets draw from
    others is theirs to seed.

    **Threads.** Dropout and data loaders draw from generators that all threads share. Trainings in
    several threads of one process therefore take turns, and give the weights that they give one after
    the other. Meanwhile other threads must not draw from the global generators, and `tell` must not
    wait for the training of another thread. Trainings that are to run at the same time need processes.

    **The run in a folder.** With `out`, a folder holds one run. What defines it is written to
    ``run.json`` before the first step: the recipe (without `capture`; `precision` as in use), the model
    (class and attributes of every module, such as dropout's), its weights at the call, the loss (its
    code, closure and global variables) and the data (tensors in memory; of other objects their class
    and state, as pickling would keep it, without drawing a batch). The device, the number of processes,
    `tell`, `save_every` and the workers of a loader do not define a run. The same run called again goes
    on from its last checkpoint or, if it is finished, returns the same history and weights; any other
    run raises `CheckpointError`, which names what differs.

    Args:
        model: any network; it is moved to the device and left there, in evaluation mode.
        train_data: images, that is, whatever has `images` uint8 ``[n, c, h, w]``, `labels` ``[n]``,
            `mean` and `std` (such as `attractor.data.images.load` gives), or batches: a list, a
            DataLoader, anything with a length that can be gone through again.
        valid_data: likewise; None: no validation.
        loss: ``(model, batch) -> Tensor`` or a dictionary with "loss" and further numbers to report: one
            entry an item, or a scalar. None: cross-entropy and accuracy of batches (inputs, labels).
        device: None: a GPU if there is one.
        out: a folder for run.json, log.jsonl, times.jsonl and the last two checkpoints: after every
            `save_every` epochs (0: none), and within an epoch every `save_minutes`. After Ctrl-C or
            SIGTERM the step is finished and one more is written. A finished run leaves its weights in
            model.safetensors, for ``model.load_state_dict(safetensors.torch.load_file(path))``.
        resume: True, the default: go on with the run in `out`, as if there had been no break, because a
            job that is killed is submitted again with the same call, and a call that defines another
            run raises. Of an epoch that was interrupted, a loader's batches are gone through again up
            to there. False: remove the run in `out` and start anew.
        tell: called with `Progress`; ``print`` will do.
        blocks: what capture="compile" compiles; None: the blocks that repeat.
        distributed: True: processes that torchrun or ``accelerate launch`` has started (``WORLD_SIZE``
            above 1) train one run together, whose batches they share and whose gradients are averaged.
            All of them must call `train`, with the same run: they compare its definition first. A
            process group that is merely initialised has no part in it. False: this process trains
            alone, without a word to the others, as it must where one rank trains, or each another model.

    Raises:
        DivergedError: the training loss is not finite; names epoch, step and layer.
        CheckpointError: `out` holds another run, or one of a version of attractor that did not record
            what defines it, or is damaged.
        ValueError: processes that were launched together train different runs; says in what they differ.
        RuntimeError: another process has not called `train` within
            `attractor.train.join.JOIN_SECONDS`, 120.
        OSError: the log or a checkpoint cannot be written, because the disk is full, say.
        FolderLockedError: another process is training in `out`, and has not ended within
            `attractor.core.files.LOCK_SECONDS`, 30.
        KeyboardInterrupt, TerminatedError: after Ctrl-C, after SIGTERM (a `SystemExit`).
    """
    place = Place.find(device, recipe.precision, distributed)
    with ExitStack() as stack:
        stack.enter_context(_own_surroundings(place.device))
        training = _Training(model, train_data, valid_data, recipe, loss, place)
        folder: RunFolder | None = None
        if out is not None or place.share[1] > 1:
            definition = training.definition(train_data, valid_data, loss)
            options = {"out": out is not None, "resume": resume, "save_every": save_every}
            join(place.share, definition, options)
            if out is not None:
                folder = RunFolder(out, recipe, definition, place.is_main)
        training.begin()
        stack.callback(training.finish)
        if recipe.capture == "compile":
            stack.enter_context(compiled_blocks(model, blocks))
        history, begun = History(), None
        if folder:
            problem: Exception | None = None
            try:
                if place.is_main:
                    stack.enter_context(lock_folder(folder.folder))
                if resume:
                    history, begun = folder.resume(model, training.optimiser, training.scaler)
                elif place.is_main:
                    folder.clear()
            except (CheckpointError, OSError) as error:
                problem = error
            place.raise_together(problem)
            stack.callback(folder.close)
            done = len(history) * (training.feed.steps + 1) + (begun.step if begun else 0)
            if int(place.total(torch.tensor([done]))) != place.share[1] * done:
                raise ValueError(f"processes found other checkpoints in {out}; all must see one folder")
            try:
                if place.is_main:
                    folder.begin(history, model)
            except (CheckpointError, OSError, TypeError) as error:
                problem = error
            place.raise_together(problem)
        place.wait()
        keeper = _Keeper(training, folder if save_every else None, history, 60 * save_minutes)
        if keeper.folder:
            stack.enter_context(keeper.stop.watched())
        for epoch in range(len(history), recipe.epochs):
            generators.seed(recipe.stream("epoch", epoch, place.share[0]))  # dropout, DataLoaders
            try:
                row, progress = training.epoch(epoch, tell if place.is_main else None, keeper, begun)
                history.rows.append(row)
                if folder and place.is_main:
                    folder.log(history.rows)
                whole = save_every and ((epoch + 1) % save_every == 0 or epoch + 1 == recipe.epochs)
                keeper.after_epoch(bool(whole))
            except DivergedError as error:
                del history.rows[epoch:]
                error.history = history
                if folder and place.is_main:
                    last = {"epoch": epoch + 1, "train_loss": None, "step": error.step}
                    folder.log([*history, last | {"layer": error.layer} if error.layer else last])
                    if folder.kept.last:
                        error.args = (f"{error}; the last good checkpoint is {folder.kept.last}",)
                raise
            begun = None
            place.wait()
            if tell and place.is_main:
                tell(progress)
        if folder and place.is_main:
            folder.finish(model)
    return history


def restored(
    model: nn.Module,
    train_data: Any,
    valid_data: Any,
    recipe: Recipe,
    *,
    out: Path | str,
    loss: Loss | None = None,
    device: torch.device | str | None = None,
) -> History:
    """Give a model the weights of the last checkpoint of its run, and train no further.

    In this process alone. All arguments are those that `train` was called with; the model has the
    weights it started from, and is left in evaluation mode.

    Returns:
        The rows of the epochs that are done; none if there is no checkpoint, or if the last one was
        written within an epoch.

    Raises:
        CheckpointError: the folder holds another run.
    """
    place = Place.find(device, recipe.precision, distributed=False)
    with _own_surroundings(place.device):
        training = _Training(model, train_data, valid_data, recipe, loss, place)
        definition = training.definition(train_data, valid_data, loss)
        history, begun = RunFolder(out, recipe, definition).resume(
            model, training.optimiser, training.scaler
        )
    model.eval()
    return History() if begun else history


def train_seeds(
    make_model: Callable[[], nn.Module],
    train_data: Any,
    valid_data: Any,
    recipe: Recipe = SHORT,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    out: Path | str | None = None,
    after: Callable[[nn.Module, History, int], None] | None = None,
    name: str = "valid_accuracy",
    **options: Any,
) -> Seeds:
    """Train from several seeds, one after the other: mean and spread of the final epoch.

    Args:
        make_model: called after ``torch.manual_seed(seed)``: weights differ like everything else. The
            global generators are the caller's again afterwards.
        out: each seed has a folder in it, ``seed-0``, for one run as in `train`; summary.json holds what
            they give.
        after: called with each trained model, its history and its seed.
        name: of the number that `Seeds` is about.
        options: of `train`.
    """
    seeds = tuple(operator.index(seed) for seed in seeds)
    if not seeds or len(set(seeds)) != len(seeds):
        raise ValueError(f"seeds = {seeds}; give one or more, all different")
    if valid_data is None and name.startswith("valid_"):
        raise ValueError(
            f"{name} needs valid_data; or ask for another number, such as name='train_loss'"
        )
    if out is not None and not options.get("resume", True):
        (Path(out) / "summary.json").unlink(missing_ok=True)
    histories: list[History] = []
    for seed in seeds:
        with generators.forked(torch.device(options.get("device") or _first_device())):
            torch.manual_seed(seed)
            model = make_model()
        inner = None if out is None else Path(out) / f"seed-{seed}"
        own = replace(recipe, seed=seed)
        history = train(model, train_data, valid_data, own, out=inner, **options)
        histories.append(history)
        history.last(name)  # raises now if there is no such number, not after the last seed
        if after:
            after(model, history, seed)
    found = Seeds(seeds, tuple(histories), name)
    if out is not None:
        summary = {"name": name, "seeds": seeds, "values": found.values, "mean": found.mean,
                   "spread": found.spread, "final": [h.final for h in histories]}  # fmt: skip
        write_json(Path(out) / "summary.json", summary)
    return found


def evaluate(
    model: nn.Module, data: Any, *, loss: Loss | None = None, batch: int = 500, precision: str = "fp32"
) -> dict[str, float]:
    """Means over all of the data, every sample once: "loss" and "accuracy", or what `loss` names.

    On the model's device, in evaluation mode; the model is left in the mode it was in. In this process
    alone, whatever other processes there are: each sees all of the data.
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
    """All that takes part in training a model: feeds, optimiser, steps."""

    def __init__(
        self, model: nn.Module, train_data: Any, valid_data: Any, recipe: Recipe, loss: Loss | None,
        place: Place,
    ) -> None:  # fmt: skip
        for name in ("label_smoothing", "mixup"):
            if loss is not None and getattr(recipe, name):
                raise ValueError(f"{name} belongs to the default loss; yours has to do it itself")
        on_cpu = place.device.type == "cpu"
        loss = loss or Classify(recipe.label_smoothing, wary=True, exact=on_cpu)
        graph = _captures(recipe, place)
        self.model, self.recipe, self.place = model, recipe, place
        model.to(place.device)
        if recipe.channels_last:
            _lay_out(model)
        like = _example(model)
        self.feed = feed_of(train_data, recipe, train=True, like=like, share=place.share)
        self.rate = torch.zeros((), device=place.device) if graph else None
        self.optimiser = recipe.make_optimiser(model, self.rate)
        self.scaler = torch.amp.GradScaler(place.device.type, enabled=place.precision == "fp16")
        self.loss, self.graph = loss, graph
        # Where waiting for a step costs nothing, its loss is looked at before weights are changed.
        self.careful = on_cpu and place.share[1] == 1
        self.valid: Feed | None = None
        if valid_data is not None:
            self.valid = feed_of(valid_data, recipe, train=False, like=like, share=place.share)

    def definition(self, train_data: Any, valid_data: Any, loss: Loss | None) -> Definition:
        """What defines the run; before the model is shared, and while it has its first weights."""
        place = self.place
        found = Definition.of(
            self.model, train_data, valid_data, self.recipe, loss, precision=place.precision,
            processes=place.share[1],
        )  # fmt: skip
        return replace(found, steps=self.feed.steps)

    def begin(self) -> None:
        """Share the model with the other processes, and make the steps."""
        model, place, loss, graph = self.model, self.place, self.loss, self.graph
        shared, self.finish_sharing = place.shared(model)
        step = _Step(
            shared, model, self.optimiser, self.scaler, loss, self.feed, self.recipe, place, graph
        )
        step.careful = self.careful
        self.step: Callable[..., Counted] = Captured(step, step.snapshot) if graph else step
        if self.valid is not None:
            look = _Evaluation(model, loss, self.valid, place, graph)
            self.look: Callable[..., Counted] = Captured(look) if graph else look

    def epoch(
        self, epoch: int, tell: Tell | None, keeper: "_Keeper", begun: Begun | None = None
    ) -> tuple[Row, Progress]:
        """One pass over the training data, or the rest of it, and one over the validation data."""
        feed, recipe = self.feed, self.recipe
        self.model.train()
        sums, watch = Sums(feed.steps, self.place), Watch(recipe, epoch, feed, tell)
        rate, first = 0.0, 0
        inputs: tuple[Tensor, ...] = ()
        if begun is None:
            steps = self.inputs(feed, epoch, keeper)
        else:
            rate, first = begun.rate, begun.step
            steps = self.inputs(feed, epoch, keeper, first) if first < feed.steps else iter(())
            self.go_on(begun, sums, watch)
        for i, inputs in enumerate(steps, first):
            rate = recipe.rate(epoch + (i + 0.5) / feed.steps)
            self.set_rate(rate)
            sums.add(self.step(*inputs))
            if self.careful and not sums.last_is_finite():
                self.check(sums, epoch, inputs)
            if watch.wants_to_look(feed.size(*inputs)) and self.place.share[1] == 1:
                self.check(sums, epoch, inputs)
                watch.look(i + 1, sums.means()["loss"])
            if keeper.wanted(i + 1):
                self.check(sums, epoch, inputs)
                keeper.within_epoch(self.begun(rate, sums, watch))
        if keeper.stop.signal is not None and sums.done < feed.steps and self.place.share[1] == 1:
            keeper.cut_short(self.begun(rate, sums, watch) if sums.done else None)
        if not sums.done:
            raise ValueError(f"no batches in epoch {epoch + 1}: the data can only be gone through once")
        self.check(sums, epoch, inputs)
        found = sums.means()  # waits for the device
        seconds = watch.seconds
        row: Row = {"epoch": epoch + 1, "lr": rate}
        row |= {f"train_{name}": value for name, value in found.items()}
        self.place.agree(self.model)
        if self.valid is not None:
            trained = self.begun(rate, sums, watch) if keeper.folder else None
            self.model.eval()
            sums = Sums(self.valid.steps, self.place)
            # Evaluation is short: code of its own for it would take longer to compile than it saves.
            own = recipe.capture == "compile"
            with torch.compiler.set_stance("force_eager") if own else nullcontext():
                for inputs in self.inputs(self.valid, epoch, keeper):
                    sums.add(self.look(*inputs))
                    if trained and self.place.share[1] == 1 and keeper.wanted(sums.done):
                        keeper.within_epoch(trained)
            early = sums.done < self.valid.steps and self.place.share[1] == 1
            if trained and early and keeper.stop.signal is not None:
                keeper.cut_short(trained)
            if not sums.done:
                raise ValueError(
                    f"no validation batches in epoch {epoch + 1}: they can only be gone through once"
                )
            row |= {f"valid_{name}": value for name, value in sums.means().items()}
        per_second = watch.samples * self.place.share[1] / max(seconds, 1e-9)
        row |= {"seconds": seconds, f"{feed.unit}_per_second": per_second}
        row = {k: v if not isinstance(v, float) or math.isfinite(v) else None for k, v in row.items()}
        return row, watch.progress(feed.steps, found["loss"], row)

    def inputs(
        self, feed: Feed, epoch: int, keeper: "_Keeper", first: int = 0
    ) -> Iterator[tuple[Tensor, ...]]:
        """What a feed has for an epoch, up to where a loader has lost its workers because the signal to
        stop reached them too."""

        def stopped() -> bool:
            time.sleep(0.05)  # the signal may be here in a moment
            return keeper.stop.signal is not None and self.place.share[1] == 1

        def up_to_there() -> Iterator[tuple[Tensor, ...]]:
            try:
                yield from steps
            except RuntimeError:  # as a DataLoader has it
                if not stopped():
                    raise

        try:
            steps = feed.epoch(epoch, first)
        except RuntimeError:
            if not stopped():
                raise
            return iter(())
        return up_to_there()

    def begun(self, rate: float, sums: Sums, watch: Watch) -> Begun:
        """What has to be kept of an epoch that is not over."""
        rank, world = self.place.share
        random = {}
        for name, own in generators.state(self.place.device).items():
            rows = torch.zeros(world, len(own), dtype=torch.int64)
            rows[rank] = own
            random[name] = self.place.total(rows).to(own.dtype)
        rows, counts = sums.totals()
        return Begun(sums.done, rate, rows, counts, random, watch.seconds, watch.samples)

    def go_on(self, begun: Begun, sums: Sums, watch: Watch) -> None:
        """Put sums, times and random numbers back where they were."""
        rank, world = self.place.share
        sums.restore(begun)
        watch.began -= begun.seconds
        watch.samples = begun.samples
        if all(len(rows) == world for rows in begun.random.values()):  # else the epoch's seed will do
            try:
                generators.restore({k: v[rank] for k, v in begun.random.items()}, self.place.device)
            except (OverflowError, RuntimeError, TypeError, ValueError) as error:
                raise CheckpointError(
                    f"the checkpoint's random numbers cannot be used: {error}"
                ) from None

    def set_rate(self, rate: float) -> None:
        """The learning rate of the next step."""
        if self.rate is not None:
            self.rate.fill_(rate)
        else:
            for group in self.optimiser.param_groups:
                group["lr"] = rate

    def check(self, sums: Sums, epoch: int, inputs: tuple[Tensor, ...]) -> None:
        """Raise if a loss of this epoch is not finite, in whichever process.

        Inputs are those of the last step: on a CPU the one whose loss it is, before weights change.
        """
        step = sums.first_bad()
        if step is None:
            return

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
        """Raise if a weight is not finite: such a state is not worth keeping."""
        for name, value in self.model.named_parameters():
            if value.requires_grad and not finite(value):
                raise DivergedError(
                    f"the weights {name!r} are not finite after epoch {epoch}, step {step}: lower the "
                    "learning rate, lengthen warmup, or set clip=1.0",
                    History(), epoch, step, name.rpartition(".")[0],
                )  # fmt: skip

    def finish(self) -> None:
        """Leave the model as a plain one."""
        self.finish_sharing()
        self.optimiser.zero_grad(set_to_none=True)  # gradients lie in the graph's memory
        self.model.eval()


class _Step:
    """Forward, loss, backward, clipping, update; nothing in it waits for the device."""

    def __init__(
        self, shared: nn.Module, model: nn.Module, optimiser: torch.optim.Optimizer, scaler: Any,
        loss: Loss, feed: Feed, recipe: Recipe, place: Place, captured: bool,
    ) -> None:  # fmt: skip
        self.shared, self.model, self.optimiser, self.scaler = shared, model, optimiser, scaler
        self.loss, self.feed, self.clip = loss, feed, recipe.clip
        self.place, self.captured, self.careful = place, captured, False

    def __call__(self, *inputs: Tensor) -> Counted:
        self.optimiser.zero_grad(set_to_none=True)
        with self.place.half(cache=not self.captured):
            numbers = _numbers(self.loss(self.shared, self.feed.batch(*inputs)))
        if self.careful and not finite(numbers["loss"]):
            return _counted(numbers, self.place)
        self.scaler.scale(numbers["loss"].mean()).backward()
        if self.clip is not None:
            self.scaler.unscale_(self.optimiser)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.scaler.step(self.optimiser)
        self.scaler.update()
        return _counted(numbers, self.place)

    def snapshot(self) -> Callable[[], None]:
        """Copies of all that a step changes, and what puts them back."""
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
    """Forward and the loss's numbers."""

    def __init__(self, model: nn.Module, loss: Loss, feed: Feed, place: Place, captured: bool) -> None:
        self.model, self.loss, self.feed, self.place, self.captured = model, loss, feed, place, captured

    def __call__(self, *inputs: Tensor) -> Counted:
        with torch.no_grad(), self.place.half(cache=not self.captured):
            return _counted(_numbers(self.loss(self.model, self.feed.batch(*inputs))), self.place)


@dataclass
class _Keeper:
    """When a checkpoint is written, and whether to stop after it.

    Attributes:
        folder: where to; None: nowhere, and signals stop training as they do elsewhere.
        seconds: between checkpoints within an epoch.
    """

    AGREE = 32  # steps after which several processes ask each other

    training: _Training
    folder: RunFolder | None
    history: History
    seconds: float
    stop: Stop = field(default_factory=Stop)
    last: float = field(default_factory=time.monotonic)

    def wanted(self, step: int, agree: bool = False) -> bool:
        """Whether a checkpoint is due after a step; several processes agree on it."""
        if self.folder is None:
            return False
        due = self.stop.signal is not None or time.monotonic() - self.last >= self.seconds
        place = self.training.place
        if place.share[1] == 1:
            return due
        return (agree or step % self.AGREE == 0) and self.anywhere(due)

    def anywhere(self, it: bool) -> bool:
        """Whether it is so in any process."""
        return bool(self.training.place.total(torch.tensor([int(it)])))

    def within_epoch(self, begun: Begun) -> None:
        """Write one, and stop if asked to."""
        self.write(begun)
        epochs, steps = self.training.recipe.epochs, self.training.feed.steps
        where = f"after step {begun.step} of {steps} of epoch {len(self.history) + 1} of {epochs}"
        self.stop_if_asked(where)

    def cut_short(self, begun: Begun | None) -> None:
        """Write one where the data ended too early, because it is asked to stop; and stop."""
        if begun is not None:
            self.within_epoch(begun)
        if len(self.history):
            self.write(None)
        self.stop_if_asked(f"before the first step of epoch {len(self.history) + 1}")

    def after_epoch(self, whole: bool) -> None:
        """Write one if it is time, and stop if asked to."""
        if self.folder and (self.wanted(0, agree=True) or whole):
            self.write(None)
            self.stop_if_asked(f"after epoch {len(self.history)} of {self.training.recipe.epochs}")

    def write(self, begun: Begun | None) -> None:
        """In the process that writes; all know whether weights are finite."""
        training = self.training
        training.check_weights(
            len(self.history) + bool(begun), begun.step if begun else training.feed.steps
        )
        if self.folder and training.place.is_main:
            self.folder.save(training.model, training.optimiser, training.scaler, self.history, begun)
        self.last = time.monotonic()

    def stop_if_asked(self, where: str) -> None:
        """With a line that says where it is, and how to go on."""
        if self.anywhere(self.stop.signal is not None):
            assert self.folder is not None
            main = self.training.place.is_main
            last = self.folder.kept.last if main else self.folder.folder
            told = (
                f"{last} is written, and the same call goes on from there" if last else "nothing is lost"
            )
            self.stop.now(f"{where}: {told}", main)


def _numbers(found: Tensor | dict[str, Tensor]) -> dict[str, Tensor]:
    numbers = found if isinstance(found, dict) else {"loss": found}
    if "loss" not in numbers:
        raise ValueError(f"the loss function named {', '.join(numbers)}; one must be called 'loss'")
    for name, value in numbers.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"the loss function gave {name} as {type(value).__name__}; give tensors")
    return numbers


def _counted(numbers: dict[str, Tensor], place: Place) -> Counted:
    sums = torch.stack([value.detach().to(place.wide).sum() for value in numbers.values()])
    return sums, {name: value.numel() for name, value in numbers.items()}


def _first_device() -> str:
    """A GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _example(model: nn.Module) -> Tensor:
    """A parameter, for device and dtype."""
    found = next((p for p in model.parameters() if p.is_floating_point()), None)
    if found is None:
        raise ValueError(f"{type(model).__name__} has no parameters")
    return found


def _lay_out(model: nn.Module) -> None:
    """All that has four dimensions as channels_last (`Module.to` fails on five, a Conv3d's)."""
    for x in (*model.parameters(), *model.buffers()):
        if x.dim() == 4:
            x.data = x.data.to(memory_format=torch.channels_last)


def _captures(recipe: Recipe, place: Place) -> bool:
    """Whether steps go into a CUDA graph."""
    if recipe.capture == "graph" and place.device.type != "cuda":
        raise ValueError(
            f"capture = 'graph' on {place.device}; it needs a GPU, 'auto' takes one if there is"
        )
    possible = place.device.type == "cuda" and place.share[1] == 1 and place.precision != "fp16"
    return possible and recipe.capture != "none"


@contextmanager
def _own_surroundings(device: torch.device) -> Iterator[None]:
    """Random numbers and cuDNN's choice of algorithms as training needs them, and as they were after."""
    with ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
            stack.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
            torch.backends.cudnn.benchmark = not torch.are_deterministic_algorithms_enabled()
        stack.enter_context(generators.forked(device))
        yield
