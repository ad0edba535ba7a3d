"""Runs whatever a plan wants next, wherever it runs, until nothing is left.

The executor asks the plan for a job whenever a worker is free, hands it over, and hands the plan
the result. The first Ctrl-C lets runs finish their round and save, the second stops at once; a run
that fails costs only itself, and one whose worker died is tried again where the place says so.

`Processes` are the place on this machine. Every process has a pipe of its own, so a killed one
leaves no lock behind, and the next task gets a new process. Processes ignore Ctrl-C: a terminal
sends it to all, and only the executor decides what it means. They are asked through their pipes.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection as pipes
from multiprocessing import resource_tracker
from typing import Any, TypeAlias, TypeVar

from aqg.errors import AqgError, RunError
from aqg.spec import in_words

_SECONDS_BETWEEN_LOOKS = 0.05


class Interrupted(Exception):  # noqa: N818  (not an error: the user asked for it)
    """Work was stopped by Ctrl-C, with everything saved."""


@dataclass(frozen=True)
class Contact:
    """What a task says to the executor while it runs, and what it is told; by default nothing.

    Where ``is_stop_asked``, the task should save and raise `Interrupted`. It says that it has
    ``saved`` when the files of its run are such that it can go on from them.
    """

    tell: Callable[[Any], None] = lambda _: None
    is_stop_asked: Callable[[], bool] = lambda: False
    saved: Callable[[], None] = lambda: None


Task: TypeAlias = Callable[[Contact], Any]
"""Work that can be pickled; what it tells and returns can be, too.

One that saves what it did when it is asked to stop has an attribute ``saves = True``; others are
simply ended.
"""


@dataclass(frozen=True)
class Event:
    """What happened to a task, and what it said or what came of it."""

    index: int = -1
    value: Any = None


class Started(Event): ...


class Reported(Event): ...


class Done(Event): ...


@dataclass(frozen=True)
class Failed(Event):
    """A task raised an `AqgError`, which is the value, or its worker died."""

    died: bool = False


class Stopped(Event): ...


class Stopping(Event):
    """Ctrl-C came: no further task is started, and those under way are asked to stop."""


Handle: TypeAlias = Callable[[Event], None]


class Place(AbstractContextManager["Place"]):
    """Where up to ``jobs`` tasks run at a time; on leaving it, all workers are gone."""

    retries = 0  # how often a task is started again whose worker died
    jobs: int

    def __init__(self) -> None:
        self.stop = threading.Event()  # is set by the first Ctrl-C

    @abstractmethod
    def start(self, index: int, task: Task) -> None:
        """Hand a task to a worker; there are fewer than ``jobs`` under way."""

    @abstractmethod
    def wait(self, seconds: float, receive: Handle) -> None:
        """Say what happened; return after ``seconds`` at the latest, or after some of it."""

    @abstractmethod
    def ask_to_stop(self) -> None:
        """Ask every task under way to save and stop."""


JobType = TypeVar("JobType")


def carry_out(
    next_job: Callable[[], JobType | None],
    make_task: Callable[[JobType], Task],
    place: Place,
    take: Callable[[JobType, Any], None],
    handle: Callable[[JobType | None, Event], None] = lambda *_: None,
) -> None:
    """Do one job after the other, as many at a time as the place has room for.

    ``next_job`` returns None while everything left depends on jobs under way. ``take`` is given
    what came of a job: what its task returned, or an `AqgError`. ``handle`` is told of everything.
    On Ctrl-C, `Interrupted` is raised after every task under way has stopped.
    """
    under_way: dict[int, tuple[JobType, Task]] = {}
    deaths: Counter[int] = Counter()
    is_stopping, is_starved = False, False

    def receive(event: Event) -> None:
        nonlocal is_starved
        index = event.index
        job, task = under_way[index]
        if isinstance(event, Reported):
            handle(job, event)
            return
        if isinstance(event, Failed) and event.died and not is_stopping:
            deaths[index] += 1
            if deaths[index] <= place.retries:
                place.start(index, task)
                return
        del under_way[index]
        is_starved = False
        if isinstance(event, Failed) and is_stopping:
            return
        if isinstance(event, Done | Failed):
            take(job, event.value)
        handle(job, event)

    num_started = 0
    with stop_requests(place.stop):
        while True:
            if place.stop.is_set() and not is_stopping:
                is_stopping = True
                place.ask_to_stop()
                handle(None, Stopping())
            while not (is_stopping or is_starved) and len(under_way) < place.jobs:
                job = next_job()
                if job is None:
                    is_starved = True
                    break
                under_way[num_started] = job, make_task(job)
                place.start(num_started, under_way[num_started][1])
                handle(job, Started(num_started))
                num_started += 1
            if not under_way:
                break
            place.wait(_SECONDS_BETWEEN_LOOKS, receive)
        if place.stop.is_set():
            raise Interrupted


def run_tasks(
    tasks: Sequence[Task], place: Place, handle: Callable[[Event], None] = lambda _: None
) -> list[Any]:
    """Do tasks that do not depend on each other; return their results, or raise what failed."""
    results: list[Any] = [None] * len(tasks)
    waiting = iter(range(len(tasks)))

    def take(index: int, result: Any) -> None:
        if isinstance(result, AqgError):
            raise result
        results[index] = result

    jobs = (lambda: next(waiting, None)), tasks.__getitem__
    carry_out(*jobs, place, take, lambda _, event: handle(event))
    return results


@contextmanager
def stop_requests(stop: threading.Event) -> Iterator[None]:
    """Turn the first Ctrl-C into a request to stop; the second raises KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(signum: int, frame: object) -> None:  # noqa: ARG001
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    previous = signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def attempt(index: int, task: Task, contact: Contact) -> Done | Failed | Stopped:
    """Do a task, and say what came of it in terms that any process can read."""
    try:
        return Done(index, task(contact))
    except Interrupted:
        return Stopped(index)
    except BrokenPipeError:  # whoever wanted the task done has ended
        raise
    except Exception as error:
        if isinstance(error, AqgError) and type(error).__module__ == AqgError.__module__:
            return Failed(index, error)
        return Failed(index, RunError(in_words(error)))  # others may not know a plugin's errors


_GPUS = "CUDA_VISIBLE_DEVICES"
_LIBRARIES = ("OMP_NUM", "OPENBLAS_NUM", "MKL_NUM", "VECLIB_MAXIMUM", "NUMBA_NUM")
ONE_THREAD = {f"{library}_THREADS": "1" for library in _LIBRARIES}
"""Environment of a process that computes with one thread: the cores are shared out already."""


def default_jobs() -> int:
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


class Processes(Place):
    """Up to ``jobs`` processes with one compute thread each, started when there is work.

    On leaving the context, all processes are gone. Each sees one of the GPUs, in turn; with more
    jobs than GPUs, several share one.
    """

    def __init__(self, jobs: int, gpus: Sequence[str] = ()) -> None:
        super().__init__()
        self.jobs = jobs
        self._gpus = tuple(gpus)
        self._workers: list[_Worker] = []

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.end()
        self._workers.clear()

    def start(self, index: int, task: Task) -> None:
        """Give a task to a free process, or to a new one; those found dead are replaced."""
        while not (worker := self._free_worker()).accept(index, task):
            self._drop(worker)

    def wait(self, seconds: float, receive: Handle) -> None:
        busy = {worker.connection: worker for worker in self._workers if worker.index is not None}
        for ready in pipes.wait(list(busy), seconds):
            worker = busy[ready]  # type: ignore[index]
            event = worker.receive()
            if not worker.is_open:
                self._drop(worker)
            receive(event)

    def ask_to_stop(self) -> None:
        for worker in self._workers:
            worker.ask_to_stop()

    def _free_worker(self) -> _Worker:
        for worker in self._workers:
            if worker.index is None:
                return worker
        taken = [worker.gpu for worker in self._workers]
        gpu = {_GPUS: min(self._gpus, key=taken.count)} if self._gpus else {}
        self._workers.append(_Worker(ONE_THREAD | gpu))
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
        with _starting(environment):
            self.process.start()
        far_end.close()

    def accept(self, index: int, task: Task) -> bool:
        if not self._send((index, task)):
            return False
        self.index = index
        self._saves = getattr(task, "saves", False)
        return True

    def _send(self, message: tuple[int, Task] | None) -> bool:
        """Send a task, or None to ask it to stop; return False if the process is gone."""
        with suppress(OSError):
            self.connection.send(message)
            return True
        return False

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
        """Ask the task under way to save and stop, or end the process: it can be done again."""
        if self.index is None:
            return
        self._is_stopped = True
        if not (self._saves and self._send(None)):
            self.process.kill()

    def end(self) -> None:
        """End the process at once; a task under way is lost, and an idle process loses nothing."""
        self.connection.close()
        self.process.kill()
        self.process.join()
        self.process.close()


def _serve(connection: pipes.Connection) -> None:
    os.setpgrp()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        while True:
            message = connection.recv()
            if message is not None:  # else a task that had ended was asked to stop
                index, task = message
                connection.send(attempt(index, task, _pipe_contact(index, connection)))
    except (EOFError, OSError):
        return


def _pipe_contact(index: int, connection: pipes.Connection) -> Contact:
    """Return what talks to the parent; it raises `BrokenPipeError` once the parent is gone."""
    asked: list[None] = []

    def is_stop_asked() -> bool:
        try:
            while connection.poll():
                asked.append(connection.recv())  # to a busy worker, nothing else is said
        except EOFError:
            raise BrokenPipeError from None
        return bool(asked)

    return Contact(lambda value: connection.send(Reported(index, value)), is_stop_asked)


@contextmanager
def _starting(environment: Mapping[str, str]) -> Iterator[None]:
    """Start a process with these variables, deaf to Ctrl-C until it is in a group of its own."""
    resource_tracker.ensure_running()  # starting it would lift the block
    before = {name: os.environ[name] for name in environment if name in os.environ}
    os.environ.update(environment)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        for name in environment:
            del os.environ[name]
        os.environ.update(before)
