"""Flower's console commands as functions, for processes that are forked instead of started.

Importing Flower costs about two seconds of CPU. A process that has done it once can fork a
SuperLink, a SuperNode or an app's process in milliseconds.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import signal
import sys
import traceback
from typing import TYPE_CHECKING, NoReturn

from aqg.errors import ConfigError
from aqg.objectives.closed_form import stay_with_numpy
from aqg.warmup import warm_up

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

COMMANDS = {
    "flower-superlink": "flwr.superlink.cli:flower_superlink",
    "flower-supernode": "flwr.supernode.cli:flower_supernode",
    "flwr": "flwr.cli.app:app",
    "flwr-clientapp": "flwr.supernode.cli:flwr_clientapp",
    "flwr-serverapp": "flwr.superlink.cli:flwr_serverapp",
    "lab-worker": "tests.lab.worker:main",
}
"""What can be forked: a command's name, and the module and function behind it."""

_PRELOADED = (
    *(target.partition(":")[0] for target in COMMANDS.values()),
    "flwr.superlink.main",
    "flwr.supernode.main",
)

QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
"""Without these, every command of Flower looks for the Internet first."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def preload(modules: Sequence[str] = ()) -> None:
    """Import everything that forked commands need, and ``modules``; start no threads."""
    for name in (*_PRELOADED, *modules):
        importlib.import_module(name)
    stay_with_numpy()  # a forked command computes too little to be worth importing torch
    warm_up()


def find_command(name: str) -> Callable[[], object]:
    """Return the function behind a command.

    >>> find_command("flower-superlnk")
    Traceback (most recent call last):
    aqg.errors.ConfigError: unknown command 'flower-superlnk'; choose from flower-superlink, \
flower-supernode, flwr, flwr-clientapp, flwr-serverapp, lab-worker
    """
    if name not in COMMANDS:
        raise ConfigError(f"unknown command {name!r}; choose from {', '.join(COMMANDS)}")
    module, _, function = COMMANDS[name].partition(":")
    command: Callable[[], object] = getattr(importlib.import_module(module), function)
    return command


def fork_command(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    log: str | None = None,
    new_session: bool = False,
) -> int:
    """Fork a process that runs a command, and return its id.

    Args:
        arguments: the command's name and its arguments.
        environment: variables to set in the process.
        log: a file that its output is appended to; without one it goes where the caller's goes.
        new_session: make the process the leader of a session and process group of its own.

    The process is killed when its parent ends, whatever ended it.

    """
    command = find_command(arguments[0])
    parent = os.getpid()
    process = os.fork()
    if process == 0:
        try:
            _settle(parent, environment, log, new_session)
            sys.argv = list(arguments)
            _run(command)
        finally:
            os._exit(1)
    return process


def _settle(
    parent: int, environment: Mapping[str, str], log: str | None, new_session: bool
) -> None:
    """Turn the copy of the parent into a process of its own."""
    if new_session:
        os.setsid()
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_DFL)
    os.environ.update(environment)
    if log is not None:
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for descriptor, source in ((0, nothing), (1, target), (2, target)):
            os.dup2(source, descriptor)


def _run(command: Callable[[], object]) -> NoReturn:
    """Run a command and end the process with its exit code, without the parent's clean-up."""
    code: object = 1
    try:
        command()
        code = 0
    except SystemExit as asked:
        code = asked.code if asked.code is not None else 0
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def become_subreaper() -> None:
    """Inherit every orphan among this process's descendants, so that none can hide."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process; does nothing where the system is not Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
