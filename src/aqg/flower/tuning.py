"""Shorter waits inside Flower, where it offers no setting for them.

These are private parts of Flower: they are touched only in versions in which they were tried, only
where they still look as expected, and only in processes whose environment asks for it. Everything
works without them; rounds then take some seconds longer. The one exception is `bounded_pulls`,
which a server always uses where it can.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from flwr import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator

SWITCH = "AQG_FLOWER_QUICK"
"""The environment variable that asks for shorter waits: ``"1"``."""
LEASE = "AQG_FLOWER_LEASE_SECONDS"
"""The environment variable for how long a silent node counts as online (Flower: 60 s)."""

TRIED = ("1.41.", "1.42.")
"""Versions of Flower whose private parts are known."""
_LOCAL_SECONDS = 0.05
"""Between two looks into the node's own memory."""
_REMOTE_SECONDS = 0.2
"""Between two questions to the SuperLink, which costs it CPU and the line some 700 bytes."""
_BEATS_PER_LEASE = 2
_CALL_SECONDS = 5.0
"""Flower subtracts this from the time between two heartbeats."""

_PULL_CAP_SECONDS = 0.5
"""The longest pause between two questions for an object that a node is still sending."""

_log = logging.getLogger("aqg.flower")


def apply_tuning() -> None:
    """Shorten Flower's waits in this process, as far as the environment asks for it."""
    quick, lease = os.environ.get(SWITCH) == "1", os.environ.get(LEASE)
    if not (quick or lease):
        return
    if not __version__.startswith(TRIED):
        _log.warning("flwr %s is untried: its waits stay as they are", __version__)
        return
    if quick:
        _poll_often()
    if lease:
        _shorten_lease(float(lease))


def _poll_often() -> None:
    """Cap the SuperNode's sleeps of 0.5 and 3 s, and the back-off of 1 s for missing objects."""
    node = import_module("flwr.supernode.start_client_internal")
    if getattr(node, "time", None) is time:
        node.time = SimpleNamespace(  # type: ignore[attr-defined]
            sleep=lambda seconds: time.sleep(_REMOTE_SECONDS if seconds > 1 else _LOCAL_SECONDS),
            time=time.time,
            monotonic=time.monotonic,
        )
    utilities = import_module("flwr.supercore.inflatable.inflatable_utils")
    for name in ("pull_objects", "pull_and_inflate_object_from_tree"):
        defaults: dict[str, Any] | None = getattr(
            getattr(utilities, name, None), "__kwdefaults__", None
        )
        if defaults and "initial_backoff" in defaults:
            defaults["initial_backoff"] = _LOCAL_SECONDS


def _shorten_lease(seconds: float) -> None:
    """Let a node announce, and the SuperLink accept, a shorter interval between heartbeats."""
    interval = seconds / _BEATS_PER_LEASE
    changes = {
        "flwr.superlink.servicer.fleet.fleet_handlers": ("HEARTBEAT_MIN_INTERVAL", 0.5),
        "flwr.supernode.fleet_http_connection": ("HEARTBEAT_DEFAULT_INTERVAL", interval),
        "flwr.supercore.heartbeat": ("HEARTBEAT_DEFAULT_INTERVAL", interval + _CALL_SECONDS),
    }
    for module_name, (name, value) in changes.items():
        module = import_module(module_name)
        if hasattr(module, name):
            setattr(module, name, value)


@contextmanager
def bounded_pulls(seconds: float) -> Iterator[None]:
    """Let Flower wait no longer than this, in all, for replies that nodes do not finish sending.

    A reply is announced before its content is sent. Where a node dies in between, Flower waits for
    the content for three minutes, and every other reply waits behind it.
    """
    grid = sys.modules.get("flwr.superlink.grid.http_grid")
    pull: Any = getattr(grid, "pull_objects", None)
    known = getattr(pull, "__kwdefaults__", None) or {}
    if grid is None or not {"max_time", "initial_backoff", "backoff_cap"} <= set(known):
        yield
        return
    end = time.monotonic() + seconds

    def pull_in_time(*arguments: Any, **options: Any) -> Any:
        options["max_time"] = max(0.0, end - time.monotonic())
        options["initial_backoff"] = _LOCAL_SECONDS
        options["backoff_cap"] = _PULL_CAP_SECONDS
        return pull(*arguments, **options)

    grid.pull_objects = pull_in_time  # type: ignore[attr-defined]
    try:
        yield
    finally:
        grid.pull_objects = pull  # type: ignore[attr-defined]
