"""What a node remembers of a model: its public copy, and the mirror of its updates.

Both are found out to be old, damaged or missing by their digests, and repaired: nothing here needs
to be in step with anything else.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aqg.errors import RunError
from aqg.flower.dropin.copies import PublicCopy
from aqg.flower.dropin.tensors import Schema, Spec
from aqg.flower.store import ContextVault
from aqg.protocol.digests import DIGEST_BYTES
from aqg.protocol.store import ArrayStore, ClientStore, DirectoryVault, forget_old_runs

if TYPE_CHECKING:
    from flwr.app import Context

    from aqg.protocol.store import Vault

_logger = logging.getLogger("flwr.aqg")

STATE_DIR = "aqg-state-dir"
"""Key of a node's own configuration: the directory in which it remembers."""
ENVIRONMENT = "AQG_STATE_DIR"
_DAYS = 30
_UNREADABLE = (RunError, ValueError, KeyError, TypeError, AttributeError)


class Memory:
    """A node's memory of one run.

    Args:
        context: Flower's.
        directory: where to remember; None to choose (see `state_directory`).

    """

    def __init__(self, context: Context, directory: Path | None) -> None:
        self._context = context
        found = directory if directory is not None else state_directory(context)
        self._directory = None if found is None else found / f"node-{context.node_id}"

    def copies(self, run: str) -> CopyStore:
        """Return the place for the public copy of a model."""
        if self._directory is not None and not (self._directory / run).exists():
            for node in self._directory.parent.glob("node-*"):  # also of nodes that are gone
                forget_old_runs(node, _DAYS)
        return CopyStore(self._vault(run), run)

    def mirrors(self, run: str, fingerprint: bytes, layout: bytes) -> ClientStore:
        """Return the place for the mirror of the updates to some tensors of a model."""
        choice = hashlib.blake2b(layout, key=fingerprint, digest_size=DIGEST_BYTES)
        key = f"{run}-{choice.hexdigest()}"
        return ClientStore(self._vault(key), key)

    def _vault(self, name: str) -> Vault:
        if self._directory is None:
            return ContextVault(self._context.state, f"aqg-{name}")
        return DirectoryVault(self._directory / name)


def state_directory(context: Context) -> Path | None:
    """Return where a node remembers; None for Flower's own context.

    That is the directory in the node's configuration (``aqg-state-dir``), that in the environment
    (``AQG_STATE_DIR``), Flower's context in a simulation, and otherwise ``~/.local/state/aqg``, or
    ``aqg`` in ``XDG_STATE_HOME``.
    """
    named = context.node_config.get(STATE_DIR) or os.environ.get(ENVIRONMENT)
    if named:
        return Path(os.path.expandvars(str(named))).expanduser()
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return None
    home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(home).expanduser() / "aqg"


class CopyStore:
    """Keeps a `PublicCopy` in a vault.

    Args:
        vault: where it lies.
        key: names the model; a copy under another key is not found.

    """

    def __init__(self, vault: Vault, key: str) -> None:
        self._vault = vault
        self._key = key
        self._arrays = ArrayStore(vault)

    def load(self) -> tuple[PublicCopy, Schema] | None:
        """Return the copy and its tensors; None where there is none, or none that can be read."""
        try:
            text = self._vault.read_index()
            index: dict[str, Any] = json.loads(text) if text else {}
            if index.get("key") != self._key:
                return None
            self._arrays.reserve(_numbers_in(index))
            schema = Schema(Spec(n, d, tuple(shape)) for n, d, shape in index["schema"])
            copy = PublicCopy(
                int(index["version"]),
                bytes.fromhex(index["layout"]),
                self._arrays.read(index["vector"]),
                {name: self._arrays.read(cell) for name, cell in index["kept"].items()},
                {name: bytes.fromhex(digest) for name, digest in index["digests"].items()},
            )
            return copy, schema
        except _UNREADABLE as error:
            _logger.warning("the saved model cannot be used: %r", error)
            return None

    def save(self, copy: PublicCopy, schema: Schema) -> None:
        """Write the copy, whole or not at all."""
        index = {
            "key": self._key,
            "version": copy.version,
            "schema": schema.specs,
            "layout": copy.layout.hex(),
            "vector": self._arrays.write(copy.vector),
            "kept": {name: self._arrays.write(tensor) for name, tensor in copy.kept.items()},
            "digests": {name: digest.hex() for name, digest in copy.digests.items()},
        }
        self._arrays.commit(json.dumps(index), _numbers_in(index))


def _numbers_in(index: dict[str, Any]) -> set[int]:
    cells = [index["vector"], *index["kept"].values()]
    return {int(cell["number"]) for cell in cells if "number" in cell}
