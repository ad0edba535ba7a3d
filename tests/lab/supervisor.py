"""The process that forks, watches, restarts and kills all others of a deployment.

It is told what to do by lines of JSON on its standard input and reports by such lines on its
standard output. When its input ends, because whoever started it asked it to stop or died, it kills
everything it started, and everything these started, and ends: nothing outlives a deployment.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.lab.commands import become_subreaper, fork_command, preload
from tests.lab.repairs import apply_tuning, repair_node

if TYPE_CHECKING:
    from collections.abc import Iterable

RESTART_SECONDS = 1.0
"""How long to wait before a process that ended is started again."""


@dataclass
class _Charge:
    """A process to look after."""

    name: str
    arguments: list[str]
    environment: dict[str, str]
    log: str
    restart: bool
    process: int | None = None
    due: float | None = None
    """When to start it again."""


@dataclass
class Supervisor:
    """Starts processes, and notices when they end."""

    charges: dict[str, _Charge] = field(default_factory=dict)

    def obey(self, order: dict[str, Any]) -> None:
        """Carry out one line of input."""
        match order.pop("do"):
            case "start":
                charge = self.charges[order["name"]] = _Charge(**order)
                self._start(charge)
            case "signal":
                charge = self.charges[order["name"]]
                charge.restart = charge.restart and not order["forget"]
                charge.due = None if order["forget"] else charge.due
                if charge.process is not None:
                    os.kill(charge.process, order["signal"])

    def _start(self, charge: _Charge) -> None:
        charge.due = None
        charge.process = fork_command(
            charge.arguments, charge.environment, charge.log, new_session=True
        )
        report(event="started", name=charge.name, process=charge.process)

    def reap(self) -> None:
        """Notice every process that ended."""
        with contextlib.suppress(ChildProcessError):
            while True:
                process, status = os.waitpid(-1, os.WNOHANG)
                if process == 0:
                    return
                self._ended(process, os.waitstatus_to_exitcode(status))

    def _ended(self, process: int, code: int) -> None:
        for charge in self.charges.values():
            if charge.process == process:
                charge.process = None
                if charge.restart:
                    charge.due = time.monotonic() + RESTART_SECONDS
                report(event="ended", name=charge.name, process=process, code=code)

    def restart(self) -> float | None:
        """Start what is due again, and return the seconds until the next is."""
        waiting = []
        for charge in self.charges.values():
            if charge.due is not None:
                seconds = charge.due - time.monotonic()
                if seconds <= 0:
                    self._start(charge)
                else:
                    waiting.append(seconds)
        return min(waiting, default=None)

    def processes(self) -> list[int]:
        """Return the ids of the processes that run."""
        return [charge.process for charge in self.charges.values() if charge.process is not None]


def report(**event: object) -> None:
    """Tell whoever started the supervisor."""
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()


def kill_descendants(known: Iterable[int]) -> None:
    """Kill every process below this one; orphans among them have become its children.

    Where the system cannot list them, those ``known`` are killed.
    """
    while True:
        for child in _children() or known:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            return


def _children() -> list[int]:
    """Return the ids of this process's children."""
    listing = Path(f"/proc/self/task/{os.getpid()}/children")
    return [int(child) for child in listing.read_text().split()] if listing.exists() else []


def main() -> None:
    """Preload, then obey until the input ends."""
    become_subreaper()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for whoever started this process
    preload(sys.argv[1:])
    apply_tuning()
    repair_node()
    supervisor = Supervisor()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    os.set_blocking(reader, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    selector.register(reader, selectors.EVENT_READ)
    report(event="ready")
    rest = b""
    try:
        while True:
            for key, _ in selector.select(supervisor.restart()):
                data = os.read(key.fd, 1 << 16)
                if key.fd == reader:
                    supervisor.reap()
                elif not data:
                    return
                else:
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        supervisor.obey(json.loads(line))
    finally:
        kill_descendants(supervisor.processes())


if __name__ == "__main__":
    main()
