"""Processes that work off tasks, each one task at a time.

A task that fails, or takes its process down with it, costs nothing but itself: every process has a
pipe of its own, so a killed one leaves no lock behind, and the next task gets a new process.

Every process lives in a process group of its own. A Ctrl-C in the terminal therefore reaches only
the parent, which passes on exactly one SIGINT, the one that lets a run finish its round and save.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from dataclasses import dataclass
from multiprocessing import connection as pipes
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any, Protocol

from aqg.errors import AqgError, ConfigError, RunError
from aqg.runs.loop import Interrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    Report = Callable[[Any], None]

_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMBA_NUM_THREADS",
)
_SECONDS_BETWEEN_LOOKS = 0.05


class Task(Protocol):
    """Work that can be pickled; what it reports and returns can be, too."""

    def __call__(self, report: Report) -> Any:
        """Do it in the worker process."""


@dataclass(frozen=True)
class Started:
    """A task was handed to a process."""

    index: int


@dataclass(frozen=True)
class Reported:
    """A task passed ``value`` to its ``report``."""

    index: int
    value: Any


@dataclass(frozen=True)
class Done:
    """A task returned ``value``."""

    index: int
    value: Any


@dataclass(frozen=True)
class Failed:
    """A task raised ``error``, or its process died."""

    index: int
    error: AqgError


@dataclass(frozen=True)
class Stopping:
    """Ctrl-C came: no further task is started, and those under way are asked to stop."""


Event = Started | Reported | Done | Failed | Stopping


def default_jobs() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Workers:
    """Up to ``jobs`` processes with one compute thread each, started when there is work.

    A context manager: on leaving it, all processes are gone. While it is open, the first Ctrl-C
    stops `run` as told there, and the second kills the processes and raises KeyboardInterrupt.
    """

    def __init__(self, jobs: int) -> None:
        if jobs < 1:
            raise ConfigError(f"jobs is {jobs}; it must be at least 1")
        self.jobs = jobs
        self._workers: list[_Worker] = []
        self._stop_asked = False
        self._previous_handler: Any = None

    def __enter__(self) -> Workers:
        if threading.current_thread() is threading.main_thread():
            self._previous_handler = signal.signal(signal.SIGINT, self._ask_to_stop)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            for worker in self._workers:
                worker.end()
        finally:
            self._workers.clear()
            if self._previous_handler is not None:
                signal.signal(signal.SIGINT, self._previous_handler)

    def _ask_to_stop(self, signum: int, frame: object) -> None:  # noqa: ARG002
        if self._stop_asked:
            raise KeyboardInterrupt
        self._stop_asked = True

    def run(self, tasks: Sequence[Task], handle: Callable[[Event], None]) -> None:
        """Work off ``tasks``, in order as far as several at a time allow; tell what happens.

        Raises:
            Interrupted: on Ctrl-C, after every task under way has stopped.

        """
        waiting = iter(tasks)
        self.serve(lambda: next(waiting, None), handle)

    def serve(self, next_task: Callable[[], Task | None], handle: Callable[[Event], None]) -> None:
        """Ask for a task whenever a process is free; tell what happens.

        ``next_task`` may answer None while there is nothing to do; it is asked again when a task
        under way has ended. Tasks are numbered from 0 in the order they are asked for. It is over
        when there is nothing to do and nothing under way.

        Raises:
            Interrupted: on Ctrl-C, after every task under way has stopped.

        """
        try:
            self._work_off(next_task, handle)
        finally:
            for worker in self._busy():  # only where a function of the caller's raised
                self._drop(worker)

    def _work_off(
        self, next_task: Callable[[], Task | None], handle: Callable[[Event], None]
    ) -> None:
        num_started = 0
        stopping, starved = False, False
        while True:
            if self._stop_asked and not stopping:
                stopping = True
                for worker in self._workers:
                    worker.interrupt()
                handle(Stopping())
            while not (stopping or starved) and len(self._busy()) < self.jobs:
                task = next_task()
                if task is None:
                    starved = True
                    break
                self._hand_over(num_started, task)
                handle(Started(num_started))
                num_started += 1
            busy = self._busy()
            if not busy:
                break
            ready = pipes.wait([worker.connection for worker in busy], _SECONDS_BETWEEN_LOOKS)
            for worker in busy:
                if worker.connection not in ready:
                    continue
                event = worker.receive()
                if not worker.is_open:
                    self._drop(worker)
                if worker.is_open or not stopping:
                    handle(event)
                starved = starved and isinstance(event, Reported)
        if stopping:
            raise Interrupted

    def _hand_over(self, index: int, task: Task) -> None:
        """Give a task to a free process, or to a new one; those found dead are replaced."""
        while not (worker := self._free_worker()).accept(index, task):
            self._drop(worker)

    def _busy(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.is_busy]

    def _free_worker(self) -> _Worker:
        for worker in self._workers:
            if not worker.is_busy:
                return worker
        self._workers.append(_Worker())
        return self._workers[-1]

    def _drop(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.end()


class _Worker:
    """The parent's end of one process, and the index of its last task."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, far_end = context.Pipe()
        self.process = context.Process(target=_serve, args=(far_end,), daemon=True)
        self.index = -1
        self.is_busy = False
        self.is_open = True
        with _one_thread(), _without_interrupts():
            self.process.start()
        far_end.close()

    def accept(self, index: int, task: Task) -> bool:
        """Hand over a task; False if the process is gone."""
        try:
            self.connection.send((index, task))
        except OSError:
            return False
        self.index = index
        self.is_busy = True
        return True

    def receive(self) -> Event:
        """Take the next message about the task; without one, the process has died."""
        try:
            event: Event = self.connection.recv()
        except (EOFError, OSError):
            self.is_open = False
            return Failed(self.index, RunError(self._cause_of_death()))
        self.is_busy = isinstance(event, Reported)
        return event

    def _cause_of_death(self) -> str:
        self.process.join()
        code = self.process.exitcode or 0
        if code == -signal.SIGKILL:
            return "its process was killed (SIGKILL); this machine may be short of memory"
        if code < 0:
            return f"its process was killed ({signal.Signals(-code).name})"
        return f"its process ended with exit code {code} before the run did"

    def interrupt(self) -> None:
        """Ask the task under way to stop."""
        if self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGINT)

    def end(self) -> None:
        """End the process at once; a task under way is lost, and an idle process loses nothing."""
        self.connection.close()
        self.process.kill()
        self.process.join()
        self.process.close()


def _serve(connection: pipes.Connection) -> None:
    """Be a worker process: do tasks until Ctrl-C, or until the parent hangs up or is gone."""
    os.setpgrp()
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        while True:
            index, task = connection.recv()
            connection.send(_attempt(index, task, connection.send))
    except (EOFError, OSError, KeyboardInterrupt, Interrupted):
        return


def _attempt(index: int, task: Task, send: Callable[[Event], None]) -> Done | Failed:
    try:
        return Done(index, task(lambda value: send(Reported(index, value))))
    except Interrupted:
        raise
    except Exception as error:
        # The parent can load the package's own errors, but not those of a plugin.
        if isinstance(error, AqgError) and type(error).__module__ == AqgError.__module__:
            return Failed(index, error)
        return Failed(index, RunError(" ".join(f"{type(error).__name__}: {error}".split())))


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Let processes started here compute with one thread: the cores are shared out already."""
    before = {name: os.environ.get(name) for name in _THREAD_VARIABLES}
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, "1"))
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
    """Start a process deaf to Ctrl-C until it is in a group of its own and says otherwise."""
    resource_tracker.ensure_running()  # starting it would lift the block
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
