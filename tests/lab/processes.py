"""Flower's commands as processes that live no longer than the object that started them.

Importing Flower costs about two seconds of CPU. Python's fork server does it once, and forks a
SuperLink, a SuperNode or an app's process in milliseconds.
"""

import ctypes
import importlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from multiprocessing import forkserver
from pathlib import Path
from unittest.mock import patch

import aqg
from aqg.errors import RunError

COMMANDS = {
    "flower-superlink": "flwr.superlink.cli:flower_superlink",
    "flower-supernode": "flwr.supernode.cli:flower_supernode",
    "flwr": "flwr.cli.app:app",
    "flwr-clientapp": "flwr.supernode.cli:flwr_clientapp",
    "flwr-serverapp": "flwr.superlink.cli:flwr_serverapp",
    "lab-worker": "tests.lab.worker:main",
}
"""What can be forked: a command's name, and the module and function behind it."""
SWITCH = "AQG_FLOWER_QUICK"
"""The environment variable that asks for shorter waits of Flower: ``"1"``."""
LEASE = "AQG_FLOWER_LEASE_SECONDS"
"""The environment variable for how long a silent node counts as online (Flower: 60 s)."""
_PRELOADED = [target.partition(":")[0] for target in COMMANDS.values()]
_PRELOADED += ["flwr.superlink.main", "flwr.supernode.main", "tests.lab.preloaded"]
_QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
"""Without these, every command of Flower looks for the Internet first."""
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
_ROOT = Path(__file__).parents[2]
_POLL_SECONDS = 0.05
_END_SECONDS = 10.0
_RESTART_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1


def run_command(arguments, environment, log, parent):
    """Become a command, in a process just forked; it dies with its parent, whatever ends that."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_DFL)
    os.environ.update(environment)
    if log is not None:
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for descriptor, source in enumerate((os.open(os.devnull, os.O_RDONLY), target, target)):
            os.dup2(source, descriptor)
    from tests.lab.repairs import apply_repairs

    apply_repairs()
    module, _, function = COMMANDS[arguments[0]].partition(":")
    sys.argv, code = list(arguments), 1
    try:
        getattr(importlib.import_module(module), function)()
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


class ProcessGroup:
    """Forks commands, which are gone once it is closed, or this process has ended.

    Modules of ``preload`` are imported before the first fork; those of the first group count.
    """

    def __init__(self, directory, environment, preload=()):
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        package = os.pathsep.join((str(Path(aqg.__file__).parents[1]), str(_ROOT)))
        self._environment = {
            **{name: os.environ.get(name, "1") for name in _THREADS},
            **_QUIET,
            "PYTHONPATH": _prepend(package, os.environ.get("PYTHONPATH")),
            "PATH": _prepend(str(Path(sys.executable).parent), os.environ.get("PATH")),
            **environment,
        }
        self._lock = threading.RLock()
        self._running, self._restarted = {}, {}
        self._is_open = True
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*preload, *_PRELOADED])
        with patch.dict(os.environ, self._environment):
            forkserver.ensure_running()
        threading.Thread(target=self._restart, daemon=True).start()

    def close(self):
        """Kill every process of the group, and wait until they are gone."""
        with self._lock:
            self._is_open = False
            for process in self._running.values():
                process.kill()
            for process in self._running.values():
                process.join(_END_SECONDS)

    def start(self, name, arguments, restart=False):
        """Fork a process that runs a command; with ``restart``, again whenever it ends."""
        with self._lock:
            what = (list(arguments), self._environment, str(self.log_of(name)))
            self._running[name] = process = self._context.Process(target=_forked, args=what)
            process.daemon = True
            process.start()
            self._restarted.pop(name, None)
            if restart:
                self._restarted[name] = arguments

    def _restart(self):
        """Start again what has ended and is to run."""
        while self._is_open:
            time.sleep(_POLL_SECONDS)
            with self._lock:
                ended = [name for name in self._restarted if not self.is_running(name)]
            if ended:
                time.sleep(_RESTART_SECONDS)
            with self._lock:
                for name in ended:
                    if self._is_open and name in self._restarted and not self.is_running(name):
                        self.start(name, self._restarted[name], restart=True)

    def kill(self, name):
        """Kill a process as a power failure would, and wait until it is gone."""
        with self._lock:
            process = self._running[name]
            process.kill()
        self.wait_for(lambda: not self._is_alive(process), _END_SECONDS, f"{name} to die")

    def wait(self, name, seconds):
        self.wait_for(lambda: not self.is_running(name), seconds, f"{name} to end")
        return self._running[name].exitcode

    def _is_alive(self, process):
        with self._lock:  # two threads must not read how it ended
            return process.is_alive()

    def process_of(self, name):
        return self._running[name].pid if self.is_running(name) else None

    def is_running(self, name):
        """Whether a process was started and has not ended."""
        return name in self._running and self._is_alive(self._running[name])

    def log_of(self, name):
        return self.directory / f"{name}.log"

    def read_log(self, name):
        path = self.log_of(name)
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for(self, condition, seconds, what):
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                raise RunError(f"waited {seconds:g} s for {what}; logs are in {self.directory}")
            time.sleep(_POLL_SECONDS)


def _forked(arguments, environment, log):
    run_command(arguments, environment, log, parent=os.getppid())


def _prepend(first, others):
    return os.pathsep.join(filter(None, (first, others)))
