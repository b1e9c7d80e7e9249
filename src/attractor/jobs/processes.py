"""Engine "processes": workers on this machine, each with a pipe to the caller."""

import atexit
import multiprocessing
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

from attractor.jobs.job import Artifact, Job, Shard, attempt
from attractor.jobs.ledger import Ledger

GRACE = 5.0  # seconds


def processes(job: Job, shards: Iterable[Shard], workers: int, retries: int) -> Iterator[Artifact]:
    """Every artifact as it ends; as many processes as there are shards to begin, `workers` at most."""
    ledger = Ledger(shards, retries)
    everybody, idle, busy = list[_Worker](), list[_Worker](), dict[Connection, _Worker]()

    def receive(seconds: float | None = 0.0) -> None:
        for pipe in wait(list(busy), seconds):
            worker = busy.pop(pipe)  # type: ignore[call-overload]
            try:
                ledger.ended.append(worker.pipe.recv())
            except (EOFError, OSError):
                everybody.remove(worker)
                why = f"exit code {worker.end()} (-9: killed, often for want of memory)"
                ledger.died(worker.shard, why)
            else:
                idle.append(worker)

    def end() -> None:
        for worker in idle:
            worker.pipe.close()  # which they see, and go
        for worker in everybody:
            worker.end(GRACE if worker in idle else 0.0)

    atexit.register(end)  # Python waits for processes, and these wait for work
    try:
        while True:
            while len(busy) < workers:
                shard = ledger.next_shard()
                if shard is None:
                    break
                if not idle:
                    everybody.append(_Worker(job))
                    idle.append(everybody[-1])
                    idle[-1].start()
                worker = idle.pop()
                worker.begin(shard)
                busy[worker.pipe] = worker
            while ledger.ended:  # now, while everybody has something to do
                yield ledger.take(receive)
            if not busy:
                return
            receive(None)
    finally:
        end()
        atexit.unregister(end)


class _Worker:
    """A process and the shard it has."""

    def __init__(self, job: Job) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, self.theirs = spawn.Pipe()
        self.process = spawn.Process(target=_serve, args=(job, self.theirs))

    def start(self) -> None:
        try:
            with _without_ctrl_c():
                self.process.start()
        except Exception as error:
            raise TypeError(
                f"the configuration cannot be sent to a process ({error}); give functions of a module "
                "or a file instead of lambdas, or use engine here"
            ) from error
        self.theirs.close()  # so that the end of the process ends the pipe

    def begin(self, shard: Shard) -> None:
        self.shard = shard
        with suppress(OSError):  # it has died: what is read from the pipe says so
            self.pipe.send(shard)

    def end(self, grace: float = 0.0) -> int | None:
        """Its exit code; killed unless it goes by itself within so many seconds, and cleans up."""
        self.pipe.close()
        if self.process.pid is not None:
            if grace:
                self.process.join(grace)
            self.process.kill()
            self.process.join()
        return self.process.exitcode


@contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Ctrl-C waits, and a process begun here never sees it: it reaches all, and the caller decides."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # which would let the signal through
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _serve(job: Job, pipe: Any) -> None:
    """What a worker does, until the caller has gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    with suppress(EOFError, OSError):
        while True:
            pipe.send(attempt(job, pipe.recv()))
