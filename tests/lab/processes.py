"""A group of processes that live no longer than the object that started them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aqg
from aqg.errors import RunError

from tests.lab.commands import QUIET

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

_ROOT = Path(__file__).parents[2]
_POLL_SECONDS = 0.05
_END_SECONDS = 10.0
_SINGLE_THREADED = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"
)


class ProcessGroup:
    """Forks commands from one supervisor, which is a process of its own.

    A context manager: on leaving it, and when this process dies in any way, all are gone.

    Args:
        directory: where the supervisor's own log goes.
        environment: variables for every process of the group.
        preload: modules to import once, before the first fork.

    """

    def __init__(
        self,
        directory: Path,
        environment: Mapping[str, str] | None = None,
        preload: Sequence[str] = (),
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        package = os.pathsep.join((str(Path(aqg.__file__).parents[1]), str(_ROOT)))
        surroundings = {
            **os.environ,
            **QUIET,
            "PYTHONPATH": _prepend(package, os.environ.get("PYTHONPATH")),
            "PATH": _prepend(str(Path(sys.executable).parent), os.environ.get("PATH")),
            **(environment or {}),
        }
        for name, value in _SINGLE_THREADED.items():
            surroundings.setdefault(name, value)
        self._changed = threading.Condition()
        self._running: dict[str, int] = {}
        self._codes: dict[str, int] = {}
        self._ready = False
        with open(directory / "supervisor.log", "ab") as log:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-m", "tests.lab.supervisor", *preload],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=surroundings,
                start_new_session=True,
                text=True,
            )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill every process of the group, and wait until they are gone."""
        assert self._supervisor.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._supervisor.stdin.close()
        try:
            self._supervisor.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:  # its children die with it
            self._supervisor.kill()
            self._supervisor.wait()
        self._listener.join(_END_SECONDS)  # a daemon: whoever still holds the pipe is dying

    def start(
        self,
        name: str,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        restart: bool = False,
    ) -> None:
        """Fork a process that runs a command of `tests.lab.commands`.

        Args:
            name: what the process is called here; its output goes to ``<name>.log``.
            arguments: the command and its arguments.
            environment: further variables.
            restart: start it again whenever it ends, until it is stopped.

        """
        with self._changed:
            self._codes.pop(name, None)
        self._tell(
            do="start",
            name=name,
            arguments=list(arguments),
            environment=dict(environment or {}),
            log=str(self.log_of(name)),
            restart=restart,
        )
        self.wait_for(lambda: name in self._running or name in self._codes, 60, f"{name} to start")

    def send_signal(self, name: str, signum: int, forget: bool = False) -> None:
        """Send a signal to a process; with ``forget`` it is not started again."""
        with self._changed:
            if name not in self._running and name not in self._codes:
                raise RunError(f"no process is called {name!r}; there are {sorted(self._running)}")
        self._tell(do="signal", name=name, signal=int(signum), forget=forget)

    def kill(self, name: str) -> None:
        """Kill a process as a power failure would, and wait until it is gone."""
        process = self.process_of(name)
        self.send_signal(name, signal.SIGKILL)
        self.wait_for(lambda: self._running.get(name) != process, 10, f"{name} to die")

    def stop(self, name: str, seconds: float = _END_SECONDS) -> int:
        """Ask a process to end, kill it if it does not, and return its exit code."""
        self.send_signal(name, signal.SIGINT, forget=True)
        try:
            return self.wait(name, seconds)
        except RunError:
            self.send_signal(name, signal.SIGKILL, forget=True)
            return self.wait(name, seconds)

    def wait(self, name: str, seconds: float) -> int:
        """Wait for a process to end, and return its exit code."""
        self.wait_for(
            lambda: name not in self._running and name in self._codes, seconds, f"{name} to end"
        )
        return self._codes[name]

    def process_of(self, name: str) -> int | None:
        """Return the id of a running process."""
        with self._changed:
            return self._running.get(name)

    def is_running(self, name: str) -> bool:
        """Whether a process was started and has not ended."""
        return self.process_of(name) is not None

    def log_of(self, name: str) -> Path:
        """Return the file that a process writes to."""
        return self.directory / f"{name}.log"

    def read_log(self, name: str) -> str:
        """Return what a process has written so far."""
        path = self.log_of(name)
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait until ``condition`` holds; it is looked at often, and after every event."""
        end = time.monotonic() + seconds
        while not condition():
            if self._supervisor.poll() is not None:
                log = self.directory / "supervisor.log"
                raise RunError(f"the supervisor ended while waiting for {what}; see {log}")
            if time.monotonic() > end:
                raise RunError(f"waited {seconds:g} s for {what}; logs are in {self.directory}")
            with self._changed:
                self._changed.wait(_POLL_SECONDS)

    def _tell(self, **order: object) -> None:
        assert self._supervisor.stdin is not None
        self.wait_for(lambda: self._ready, 120, "the supervisor")
        try:
            self._supervisor.stdin.write(json.dumps(order) + "\n")
            self._supervisor.stdin.flush()
        except BrokenPipeError:
            log = self.directory / "supervisor.log"
            raise RunError(f"the supervisor has ended; see {log}") from None

    def _listen(self) -> None:
        assert self._supervisor.stdout is not None
        with self._supervisor.stdout as lines:
            for line in lines:
                self._note(json.loads(line))

    def _note(self, event: dict[str, Any]) -> None:
        with self._changed:
            match event["event"]:
                case "ready":
                    self._ready = True
                case "started":
                    self._running[event["name"]] = event["process"]
                case "ended":
                    self._running.pop(event["name"], None)
                    self._codes[event["name"]] = event["code"]
            self._changed.notify_all()


def _prepend(first: str, others: str | None) -> str:
    return os.pathsep.join(filter(None, (first, others)))
