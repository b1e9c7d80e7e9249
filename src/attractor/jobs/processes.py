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

GRACE = 5.0  # seconds that an idle worker has to exit


def processes(job: Job, shards: Iterable[Shard], workers: int, retries: int) -> Iterator[Artifact]:
    """Yield every artifact when it is finished, with one process per shard, and `workers` at most."""
    ledger = Ledger(shards, retries)
    pool, idle, busy = list[_Worker](), list[_Worker](), dict[Connection, _Worker]()

    def receive(seconds: float | None = 0.0) -> None:
        for pipe in wait(list(busy), seconds):
            worker = busy.pop(pipe)  # type: ignore[call-overload]
            try:
                ledger.replies.append(worker.pipe.recv())
            except (EOFError, OSError):
                pool.remove(worker)
                why = f"exit code {worker.end()} (-9: killed, often for want of memory)"
                ledger.died(worker.shard, why)
            else:
                idle.append(worker)

    def end() -> None:
        for worker in idle:
            worker.pipe.close()  # idle workers then exit
        for worker in pool:
            worker.end(GRACE if worker in idle else 0.0)

    atexit.register(end)  # otherwise Python would wait for processes that wait for work
    try:
        while True:
            while len(busy) < workers:
                shard = ledger.next_shard()
                if shard is None:
                    break
                if not idle:
                    pool.append(_Worker(job))
                    idle.append(pool[-1])
                    idle[-1].start()
                worker = idle.pop()
                worker.begin(shard)
                busy[worker.pipe] = worker
            while ledger.replies:  # yield now, while all workers are busy
                yield ledger.take(receive)
            if not busy:
                return
            receive(None)
    finally:
        end()
        atexit.unregister(end)


class _Worker:
    """A process and its current shard."""

    def __init__(self, job: Job) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, self.remote_pipe = spawn.Pipe()
        self.process = spawn.Process(target=_serve, args=(job, self.remote_pipe))

    def start(self) -> None:
        try:
            with _without_ctrl_c():
                self.process.start()
        except Exception as error:
            raise TypeError(
                f"the configuration cannot be sent to a process ({error}); give functions of a module "
                "or a file instead of lambdas, or use engine here"
            ) from error
        self.remote_pipe.close()  # so that the pipe closes when the process ends

    def begin(self, shard: Shard) -> None:
        self.shard = shard
        with suppress(OSError):  # the worker has died, which reading from the pipe will show
            self.pipe.send(shard)

    def end(self, grace: float = 0.0) -> int | None:
        """End the process, after `grace` seconds to exit by itself; return its exit code."""
        self.pipe.close()
        if self.process.pid is not None:
            if grace:
                self.process.join(grace)
            self.process.kill()
            self.process.join()
        return self.process.exitcode


@contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Block Ctrl-C, also in processes that are started here, so that only the caller handles it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # starting it later would unblock the signal
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _serve(job: Job, pipe: Any) -> None:
    """Compute shards from the pipe until the caller closes it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    with suppress(EOFError, OSError):
        while True:
            pipe.send(attempt(job, pipe.recv()))
