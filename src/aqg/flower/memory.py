"""What a node remembers of a model: its copy of it, and the mirror of its updates.

Both are found out to be old, damaged or missing by their digests, and repaired: nothing here needs
to be in step with anything else.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict
from numpy.typing import NDArray

from aqg.channel.client import Memory
from aqg.errors import ConfigError, RunError
from aqg.protocol.store import DirectoryVault, Vault, forget_old_runs

STATE_DIR = "aqg-state-dir"
"""Key of a node's own configuration: the directory in which it remembers."""
SHARED_STATE_DIR = "client-state-dir"
"""Key of the run-config: a directory in which every node has one of its own."""
STATE_DAYS = "aqg-state-days"
"""Key of a node's own configuration: for how many days it remembers runs that do not go on."""
ENVIRONMENT = "AQG_STATE_DIR"
BY_PARTITION = "p"
"""Begins the names of runs whose clients are partitions, where nodes name one."""
IN_CONTEXT = "context"
"""In place of a directory: remember in Flower's context, for as long as the node lives."""
_DAYS = 30


class NodeMemory(Memory):
    """A node's memory, in a directory, or by default where `state_directory` says."""

    def __init__(self, context: Context, directory: Path | None = None) -> None:
        self._context = context
        found, is_own = (directory, False) if directory else state_directory(context)
        self.directory = found  # None where Flower's context remembers
        self._is_own = is_own

    def runs(self) -> Iterable[str]:
        if self.directory is None:
            names = [key[len("aqg-") : -len("-index")] for key in self._context.state]
        else:
            homes = {self._home(""), self._home(BY_PARTITION)}
            files = [f for home in homes if home for f in home.glob("*/state.json")]
            names = [file.parent.name for file in sorted(files, key=_age)]
        return dict.fromkeys(name for name in names if name.isalnum())

    def vault(self, run: str, name: str) -> Vault:
        home = self._home(run)
        if home is None or self.directory is None:
            return ContextVault(self._context.state, f"aqg-{name}")
        if name == run and not (home / run).exists():
            for node in {home, *self.directory.glob("*-*")}:  # also of nodes that are gone
                forget_old_runs(node, days_to_keep(self._context))
        return DirectoryVault(home / name)

    def forget(self, run: str) -> None:
        home = self._home(run)
        if home is not None and run.isalnum():
            for found in home.glob(f"{run}*"):
                shutil.rmtree(found, ignore_errors=True)

    def _home(self, run: str) -> Path | None:
        """Return a node's own directory.

        A client of our own server that comes back under another node id finds what it knew.
        """
        if self.directory is None or (self._is_own and run.startswith(BY_PARTITION)):
            return self.directory
        partition = partition_of(self._context) if run.startswith(BY_PARTITION) else None
        node = f"node-{self._context.node_id}"
        return self.directory / (node if partition is None else f"partition-{partition}")


class ContextVault:
    """The state of a Flower context: in memory, for as long as node and run live."""

    def __init__(self, records: RecordDict, prefix: str = "aqg") -> None:
        self._records = records
        self._index_name = f"{prefix}-index"
        self._prefix = f"{prefix}-vector-"

    def read_index(self) -> str | None:
        record = self._records.get(self._index_name)
        return str(record["json"]) if isinstance(record, ConfigRecord) else None

    def write_index(self, text: str) -> None:
        self._records[self._index_name] = ConfigRecord({"json": text})

    def read_vector(self, number: int) -> NDArray[Any]:
        record = self._records.get(f"{self._prefix}{number}")
        if not isinstance(record, ArrayRecord):
            raise RunError(f"the context has no vector {number}")
        return record["vector"].numpy()

    def write_vector(self, number: int, vector: NDArray[Any]) -> None:
        array = Array(np.ascontiguousarray(vector))
        self._records[f"{self._prefix}{number}"] = ArrayRecord({"vector": array})

    def keep_only(self, numbers: set[int]) -> None:
        kept = {f"{self._prefix}{number}" for number in numbers}
        for name in list(self._records):
            if name.startswith(self._prefix) and name not in kept:
                del self._records[name]


def _age(file: Path) -> float:
    try:
        return -file.stat().st_mtime
    except OSError:  # deleted just now
        return 0.0


def state_directory(context: Context) -> tuple[Path | None, bool]:
    """Return where nodes remember, None for Flower's own context; and whether one node owns it.

    That is the directory in the node's configuration (``aqg-state-dir``), in the run-config
    (``client-state-dir``), in the environment (``AQG_STATE_DIR``), Flower's context in a
    simulation, and otherwise ``~/.local/state/aqg``, or ``aqg`` in ``XDG_STATE_HOME``. Only the
    first is one node's own. ``context`` as a directory stands for Flower's context.
    """
    own = context.node_config.get(STATE_DIR)
    named = own or context.run_config.get(SHARED_STATE_DIR) or os.environ.get(ENVIRONMENT)
    if named == IN_CONTEXT:
        return None, False
    if named:
        return Path(os.path.expandvars(str(named))).expanduser(), bool(own)
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return None, False
    home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(home).expanduser() / "aqg", False


def partition_of(context: Context) -> int | None:
    partition = context.node_config.get("partition-id")
    return partition if type(partition) is int else None


def days_to_keep(context: Context) -> float:
    days = context.node_config.get(STATE_DAYS, _DAYS)
    if isinstance(days, bool) or not isinstance(days, int | float) or not days > 0:
        raise ConfigError(f"{STATE_DAYS} is {days!r}; it must be a number above 0")
    return float(days)
