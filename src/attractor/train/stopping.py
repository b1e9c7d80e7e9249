"""Ctrl-C and SIGTERM while training: the step is finished and its state written, then it stops."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from attractor.train.history import TerminatedError

# What can be waited with; a program's own handlers, and signals that are ignored, are left as they are.
DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)


class Stop:
    """Whether a signal has come that asks to stop."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.obeyed = False

    def now(self, message: str, aloud: bool = True) -> NoReturn:
        """KeyboardInterrupt after Ctrl-C, `TerminatedError` after SIGTERM; before, a line on stderr."""
        self.obeyed = True
        name = "Ctrl-C" if self.signal == signal.SIGINT else "SIGTERM"
        message = f"stopped by {name} {message}"
        if aloud:
            print(message, file=sys.stderr, flush=True)
        if self.signal == signal.SIGINT:
            raise KeyboardInterrupt(message)
        raise TerminatedError(message)

    @contextmanager
    def watched(self) -> Iterator["Stop"]:
        """Take down signals instead of stopping at once; a second one does stop at once.

        In the main thread only, elsewhere Python knows no signals; handlers are put back at the end.
        """
        former = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) in DEFAULTS:
                    former[number] = signal.signal(number, self._came)
        try:
            yield self
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)
            if self.signal is not None and not self.obeyed:  # too late to be seen by training
                signal.raise_signal(self.signal)

    def _came(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            self.now("at once; what came after the last checkpoint is lost")
        self.signal = number
