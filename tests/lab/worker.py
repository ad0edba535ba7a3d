"""A persistent worker: forks the process of an app instead of starting an interpreter for it.

Flower starts a new Python for every message to a node, which costs about two seconds of CPU in
imports. With ``--isolation process`` it leaves that to another program. This is one: it asks the
SuperNode (or SuperLink) for tasks and forks itself, imports done, for each. An app's process still
lives for one task only, so a crash costs that task and nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.lab.commands import fork_command, preload
from tests.lab.repairs import TaskQueue

if TYPE_CHECKING:
    from collections.abc import Sequence

POLL_SECONDS = 0.1


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the worker until it is stopped."""
    options = _parse(arguments)
    preload(options.preload)
    certificates = Path(options.root_certificates) if options.root_certificates else None
    queue = TaskQueue(
        options.runtime_api_address, certificates.read_bytes() if certificates else None
    )
    security = ["--root-certificates", str(certificates)] if certificates else ["--insecure"]
    address = ["--runtime-api-address", options.runtime_api_address]
    address += ["--parent-pid", str(os.getpid())]
    while True:
        found = queue.next()
        if found is not None:
            kind, token = found
            fork_command([kind, *address, "--token", token, *security], {})
        _reap()
        time.sleep(POLL_SECONDS)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "lab-worker", description="Run the tasks of Flower apps in forked processes."
    )
    parser.add_argument(
        "--runtime-api-address",
        required=True,
        metavar="HOST:PORT",
        help="of the SuperNode or SuperLink, which runs with --isolation process",
    )
    parser.add_argument("--root-certificates", metavar="FILE", help="where that address has TLS")
    parser.add_argument(
        "--preload", action="append", default=[], metavar="MODULE", help="import it before forking"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
