"""Write checkpoints of a training when they are due, and stop it after a signal."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from attractor.train.feeds import Feed
from attractor.train.history import History
from attractor.train.run_folder import EpochState, RunFolder
from attractor.train.stopping import Stop
from attractor.train.training import Training


@dataclass
class Checkpointer:
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

    training: Training
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
            self.folder.save(training.state, self.history, state)
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

    def inputs(self, feed: Feed, epoch: int, first: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """Yield the inputs of an epoch.

        It ends early if a loader loses its workers because the signal to stop reached them too.
        """

        def has_stopped() -> bool:
            time.sleep(0.05)  # the signal may arrive a moment later
            return self.stop.signal is not None and self.training.place.share[1] == 1

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
