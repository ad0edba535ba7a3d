"""A place on this machine: processes that do one task at a time each.

A task that fails, or takes its process down with it, costs nothing but itself: every process has a
pipe of its own, so a killed one leaves no lock behind, and the next task gets a new process.

Processes do not hear Ctrl-C: a terminal sends it to all, and only the executor shall decide what it
means. They are asked to stop through their pipes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from multiprocessing import connection as pipes
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any

from aqg.errors import ConfigError, RunError
from aqg.runs.executor import (
    CallerIsGone,
    Contact,
    Event,
    Failed,
    Reported,
    Stopped,
    attempt,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

    from aqg.runs.executor import Handle, Task

_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMBA_NUM_THREADS",
)
_GPUS = "CUDA_VISIBLE_DEVICES"
ONE_THREAD = dict.fromkeys(_THREAD_VARIABLES, "1")
"""Environment of a process that computes with one thread: the cores are shared out already."""
_STOP, _NOTE = "stop", "note"


def default_jobs() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def visible_gpus() -> tuple[str, ...]:
    """Return the names of the GPUs that processes may use, as ``CUDA_VISIBLE_DEVICES`` has them."""
    if os.environ.get(_GPUS):
        return tuple(name.strip() for name in os.environ[_GPUS].split(","))
    try:
        import torch
    except ImportError:  # whoever needs a GPU will say so
        return ()
    return tuple(map(str, range(torch.cuda.device_count())))


class Processes:
    """Up to ``jobs`` processes with one compute thread each, started when there is work.

    A context manager: on leaving it, all processes are gone.

    Args:
        jobs: how many tasks run at a time.
        gpus: each process sees one of them, in turn; with more jobs than GPUs, several share one.

    """

    retries = 0

    def __init__(self, jobs: int, gpus: Sequence[str] = ()) -> None:
        if jobs < 1:
            raise ConfigError(f"jobs is {jobs}; it must be at least 1")
        self.jobs = jobs
        self.stop = threading.Event()
        self._gpus = tuple(gpus)
        self._workers: list[_Worker] = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for worker in self._workers:
            worker.end()
        self._workers.clear()

    def start(self, index: int, task: Task) -> None:
        """Give a task to a free process, or to a new one; those found dead are replaced."""
        while not (worker := self._free_worker()).accept(index, task):
            self._drop(worker)

    def wait(self, seconds: float, receive: Handle) -> None:
        """Say what the processes say, and which of them died."""
        busy = {worker.connection: worker for worker in self._workers if worker.index is not None}
        for ready in pipes.wait(list(busy), seconds):
            worker = busy[ready]  # type: ignore[index]
            event = worker.receive()
            if not worker.is_open:
                self._drop(worker)
            receive(event)

    def pass_on(self, index: int, note: Any) -> None:
        """Send a note to the process that does the task."""
        for worker in self._workers:
            if worker.index == index:
                worker.send(_NOTE, note)

    def ask_to_stop(self) -> None:
        """Ask tasks that save to do so, and end the others; what is lost can be done again."""
        for worker in self._workers:
            worker.ask_to_stop()

    def _free_worker(self) -> _Worker:
        for worker in self._workers:
            if worker.index is None:
                return worker
        environment = dict(ONE_THREAD)
        if self._gpus:
            taken = [worker.gpu for worker in self._workers]
            gpu = min(self._gpus, key=taken.count)
            environment[_GPUS] = gpu
        self._workers.append(_Worker(environment))
        return self._workers[-1]

    def _drop(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.end()


class _Worker:
    """The parent's end of one process, and the index of the task it does."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, far_end = context.Pipe()
        self.process = context.Process(target=_serve, args=(far_end,), daemon=True)
        self.index: int | None = None
        self.is_open = True
        self.gpu = environment.get(_GPUS)
        self._saves = False
        self._is_stopped = False
        with _environment(environment), _without_interrupts():
            self.process.start()
        far_end.close()

    def accept(self, index: int, task: Task) -> bool:
        """Hand over a task; False if the process is gone."""
        if not self.send(index, task):
            return False
        self.index = index
        self._saves = getattr(task, "saves", False)
        return True

    def send(self, kind: object, value: Any = None) -> bool:
        """Send a message; False if the process is gone."""
        try:
            self.connection.send((kind, value))
        except OSError:
            return False
        return True

    def receive(self) -> Event:
        """Take the next message about the task; without one, the process has died."""
        assert self.index is not None
        try:
            event: Event = self.connection.recv()
        except (EOFError, OSError):
            self.is_open = False
            if self._is_stopped:
                return Stopped(self.index)
            return Failed(self.index, RunError(self._cause_of_death()), died=True)
        if not isinstance(event, Reported):
            self.index = None
        return event

    def _cause_of_death(self) -> str:
        self.process.join()
        code = self.process.exitcode or 0
        if code == -signal.SIGKILL:
            return "its process was killed (SIGKILL); this machine may be short of memory"
        if code < 0:
            return f"its process was killed ({signal.Signals(-code).name})"
        return f"its process ended with exit code {code} before the run did"

    def ask_to_stop(self) -> None:
        """Ask the task under way to stop, or end the process where that would be of no use."""
        if self.index is None:
            return
        self._is_stopped = True
        if not (self._saves and self.send(_STOP)):
            self.process.kill()

    def end(self) -> None:
        """End the process at once; a task under way is lost, and an idle process loses nothing."""
        self.connection.close()
        self.process.kill()
        self.process.join()
        self.process.close()


def _serve(connection: pipes.Connection) -> None:
    """Be a worker process: do tasks until the parent hangs up or is gone."""
    os.setpgrp()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        while True:
            index, task = connection.recv()
            if isinstance(index, int):  # else a message that came after its task had ended
                connection.send(attempt(index, task, _PipeContact(index, connection)))
    except (EOFError, OSError, CallerIsGone):
        return


class _PipeContact(Contact):
    """Talks to the parent through a pipe; raises `CallerIsGone` once the parent is gone."""

    def __init__(self, index: int, connection: pipes.Connection) -> None:
        self._index = index
        self._connection = connection
        self._is_stop_asked = False
        self._note: Any = None

    def tell(self, value: Any) -> None:
        self._connection.send(Reported(self._index, value))

    def is_stop_asked(self) -> bool:
        self._listen()
        return self._is_stop_asked

    def note(self) -> Any:
        self._listen()
        return self._note

    def _listen(self) -> None:
        try:
            messages = []
            while self._connection.poll():
                messages.append(self._connection.recv())
        except EOFError:
            raise CallerIsGone from None
        for kind, value in messages:
            if kind == _STOP:
                self._is_stop_asked = True
            elif kind == _NOTE:
                self._note = value


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Let processes started here have these variables."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Start a process deaf to Ctrl-C until it is in a group of its own."""
    resource_tracker.ensure_running()  # starting it would lift the block
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
