"""Ctrl-C and SIGTERM while training: finish the step, write a checkpoint, and stop."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from attractor.train.history import TerminatedError

# Handlers that are replaced; a program's own handlers, and ignored signals, are left unchanged.
DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)


class Stop:
    """Records whether Ctrl-C or SIGTERM has arrived."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.handled = False

    def now(self, message: str, aloud: bool = True) -> NoReturn:
        """Raise KeyboardInterrupt after Ctrl-C or `TerminatedError` after SIGTERM.

        Args:
            message: where training stops.
            aloud: whether to print the message on stderr first.
        """
        self.handled = True
        name = "Ctrl-C" if self.signal == signal.SIGINT else "SIGTERM"
        message = f"stopped by {name} {message}"
        if aloud:
            print(message, file=sys.stderr, flush=True)
        if self.signal == signal.SIGINT:
            raise KeyboardInterrupt(message)
        raise TerminatedError(message)

    @contextmanager
    def handle_signals(self) -> Iterator["Stop"]:
        """Record signals instead of stopping at once; a second signal stops at once.

        This has an effect in the main thread only, because Python handles signals there. Handlers are
        restored at the end.
        """
        former = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) in DEFAULTS:
                    former[number] = signal.signal(number, self._record)
        try:
            yield self
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)
            if (
                self.signal is not None and not self.handled
            ):  # it arrived too late for training to respond
                signal.raise_signal(self.signal)

    def _record(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            self.now("at once; steps after the last checkpoint are lost")
        self.signal = number
