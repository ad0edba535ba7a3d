"""A place on many machines: actors on a Ray cluster, which need not share a disk with us.

The head builds every problem once and puts it into Ray's object store. A run writes into a
directory of its own on its node; whenever it has saved, the files come back to the head. When a
worker or a whole node dies, its runs start again elsewhere from there.
"""

from __future__ import annotations

import queue
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aqg.errors import ConfigError, RunError
from aqg.runs import executor
from aqg.runs.config import load_plugins
from aqg.runs.directory import CHECKPOINT, CONFIG, ROUNDS, SUMMARY
from aqg.runs.executor import Contact, Event, Failed, Handle, Place, Reported, Task
from aqg.runs.files import write_atomically
from aqg.runs.plan import Train, load, problem_key
from aqg.sim.problem import Problem
from aqg.weights import BEST, FINAL

RETRIES = 3
_RUNS_PER_GPU = 4
_SECONDS_BETWEEN_COUNTS = 2.0
_SECONDS_TO_CONNECT = 5.0
_ORDER = (CONFIG, BEST, ROUNDS, CHECKPOINT, FINAL, SUMMARY)
"""In which files of a run are written down: each one counts on those before it."""


@dataclass(frozen=True)
class _Files:
    """The files of a run as it goes on from them; those that are not there are gone."""

    content: Mapping[str, bytes]

    @staticmethod
    def of(directory: Path) -> _Files:
        found = (directory / name for name in _ORDER)
        return _Files({file.name: file.read_bytes() for file in found if file.exists()})

    def write(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        for name in _ORDER:
            if name in self.content:
                write_atomically(directory / name, self.content[name])
            else:
                (directory / name).unlink(missing_ok=True)


class RayCluster(Place):
    """Workers on a Ray cluster, by default one per core; nodes may come and go.

    On leaving the context, all workers are gone, and the cluster is left as it was. ``address`` is
    such as ``"10.0.0.1:6379"``.
    """

    retries = RETRIES

    def __init__(self, address: str, jobs: int | None = None, uses_gpus: bool = False) -> None:
        super().__init__()
        try:
            import ray
        except ImportError:
            raise ConfigError(
                "--cluster needs Ray, which is not installed: pip install 'aqg[flower]'"
            ) from None
        self._ray: Any = ray
        self._address = address
        self._most_jobs = jobs
        self._uses_gpus = uses_gpus
        self._counted = (0.0, 1)
        self._idle: list[Any] = []
        self._busy: dict[Any, tuple[int, Any, Task]] = {}
        self._problems: dict[Any, Any] = {}

    def __enter__(self) -> RayCluster:
        try:
            _knock(self._address)
            self._ray.init(
                address=self._address,
                log_to_driver=False,
                logging_level="ERROR",
                runtime_env={"env_vars": executor.ONE_THREAD},
            )
        except Exception as error:  # Ray raises whatever it meets
            text = " ".join(str(error).split())[:200]
            raise ConfigError(f"no Ray cluster at {self._address!r}: {text}") from None
        if self._uses_gpus and not self._ray.cluster_resources().get("GPU"):
            self._ray.shutdown()
            raise ConfigError(f"device is cuda, and the cluster at {self._address!r} has no GPU")
        return self

    def __exit__(self, *_: object) -> None:
        for actor in (*self._idle, *(actor for _, actor, _ in self._busy.values())):
            self._ray.kill(actor)
        self._idle, self._busy = [], {}
        self._problems.clear()
        self._ray.shutdown()

    @property
    def jobs(self) -> int:  # type: ignore[override]
        """How many runs fit on the nodes that are alive now, at least one."""
        last, count = self._counted
        if time.monotonic() - last > _SECONDS_BETWEEN_COUNTS:
            resources = self._ray.cluster_resources() if self._ray.is_initialized() else {}
            count = int(resources.get("CPU", 1))
            if self._uses_gpus:
                count = min(count, _RUNS_PER_GPU * int(resources.get("GPU", 0)))
            self._counted = time.monotonic(), max(1, count)
        count = self._counted[1]
        return count if self._most_jobs is None else min(count, self._most_jobs)

    def start(self, index: int, task: Task) -> None:
        """Send a task to an idle actor, or to a new one."""
        actor = self._idle.pop() if self._idle else self._make_actor()
        sent = self._pack(task) if isinstance(task, Train) else (task, None)
        stream = actor.work.options(num_returns="streaming").remote(index, *sent)
        self._busy[stream] = index, actor, task

    def wait(self, seconds: float, receive: Handle) -> None:
        """Take what actors say; files are written down, and the dead are reported."""
        while self._idle and len(self._idle) + len(self._busy) > self.jobs:
            self._ray.kill(self._idle.pop())  # takes the place of others: a node may have died
        ready, _ = self._ray.wait(list(self._busy), num_returns=1, timeout=seconds)
        for stream in ready:
            index, actor, task = self._busy[stream]
            try:
                event: Event = self._ray.get(next(stream))
            except self._ray.exceptions.RayError as error:
                del self._busy[stream]
                self._ray.kill(actor)
                kind = type(error).__name__
                receive(Failed(index, RunError(f"its worker or node died ({kind})"), died=True))
                continue
            if isinstance(event, Reported) and isinstance(event.value, _Files):
                assert isinstance(task, Train)
                event.value.write(task.directory)
                continue
            if not isinstance(event, Reported):
                del self._busy[stream]
                self._idle.append(actor)
            receive(event)

    def ask_to_stop(self) -> None:
        for _, actor, _ in self._busy.values():
            actor.stop.remote()

    def _make_actor(self) -> Any:
        options: dict[str, Any] = {"num_cpus": 1, "max_restarts": 0, "max_concurrency": 2}
        if self._uses_gpus:
            options["num_gpus"] = 1 / _RUNS_PER_GPU
        return self._ray.remote(**options)(_Worker).remote()

    def _pack(self, task: Train) -> tuple[_Away, Any]:
        """Return the task with the files it goes on from, and its problem in the object store."""
        key = problem_key(task.config)
        if key not in self._problems:
            load_plugins(task.config.plugins)
            problem = load(task.config, task.data_dir)
            self._register_own_modules()
            self._problems[key] = self._ray.put(problem)
        plugins = {path: Path(path).read_bytes() for path in task.config.plugins}
        has_begun = (task.directory / CHECKPOINT).exists()
        files = _Files.of(task.directory) if has_begun else _Files({})
        return _Away(task, files, plugins), self._problems[key]

    def _register_own_modules(self) -> None:
        """Let the user's own files travel as they are: other nodes may not have them."""
        own = {name: m for name, m in sys.modules.items() if name.startswith("aqg_file_")}
        folders = {Path(str(module.__file__)).parent for module in own.values()}
        for module in tuple(sys.modules.values()):
            file = getattr(module, "__file__", None)
            if module.__name__ in own or (file is not None and Path(file).parent in folders):
                self._ray.cloudpickle.register_pickle_by_value(module)


def _knock(address: str) -> None:
    """Raise `OSError` if nobody listens at an address: Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), _SECONDS_TO_CONNECT).close()


class _Worker:
    """A Ray actor: does one task at a time, and learns meanwhile what it is told."""

    def __init__(self) -> None:
        self._is_stopped = False

    def work(self, index: int, task: Any, problem: Any) -> Iterator[Event]:
        """Yield what happens, the end of the task last."""
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        contact = Contact(
            lambda value: events.put(Reported(index, value)), lambda: self._is_stopped
        )
        done = task if problem is None else task.on(problem)
        thread = threading.Thread(target=lambda: events.put(executor.attempt(index, done, contact)))
        thread.start()
        while True:
            event = events.get()
            yield event
            if not isinstance(event, Reported):
                return

    def stop(self) -> None:
        self._is_stopped = True


@dataclass(frozen=True)
class _Away:
    """A run away from its directory: goes on from these files, and sends back what it writes."""

    task: Train
    files: _Files
    plugins: Mapping[str, bytes]

    def on(self, problem: Problem) -> Task:

        def run(contact: Contact) -> Any:
            with tempfile.TemporaryDirectory(prefix="aqg-run-") as temporary:
                paths = []
                for number, content in enumerate(self.plugins.values()):
                    paths.append(Path(temporary) / f"plugin-{number}.py")
                    paths[-1].write_bytes(content)
                load_plugins(tuple(map(str, paths)))
                directory = Path(temporary) / "run"
                self.files.write(directory)
                local = replace(self.task, directory=directory)
                # Whenever the run was saved, its files come back.
                sending = replace(contact, saved=lambda: contact.tell(_Files.of(directory)))
                return local.run(lambda: problem, sending)

        return run
