"""A persistent worker: forks the process of an app instead of starting an interpreter for it.

Flower starts a new Python for every message to a node, which costs about two seconds of CPU in
imports. With ``--isolation process`` it leaves that to another program. This is one: it asks the
SuperNode (or SuperLink) for tasks and forks itself, imports done, for each. An app's process still
lives for one task only, so a crash costs that task and nothing else.
"""

import argparse
import contextlib
import os
import time
from pathlib import Path

from tests.lab.processes import run_command
from tests.lab.repairs import TaskQueue

POLL_SECONDS = 0.1


def main():
    """Run the tasks of the SuperNode or SuperLink at an address until stopped."""
    parser = argparse.ArgumentParser("lab-worker")
    parser.add_argument("--runtime-api-address", required=True, metavar="HOST:PORT")
    parser.add_argument("--root-certificates", metavar="FILE", help="where that address has TLS")
    options = parser.parse_args()
    certificates, parent = options.root_certificates, os.getpid()
    queue = TaskQueue(
        options.runtime_api_address, Path(certificates).read_bytes() if certificates else None
    )
    security = ["--root-certificates", certificates] if certificates else ["--insecure"]
    address = ["--runtime-api-address", options.runtime_api_address, "--parent-pid", str(parent)]
    while True:
        found = queue.next()
        if found is not None and os.fork() == 0:
            kind, token = found
            run_command([kind, *address, "--token", token, *security], {}, None, parent)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(POLL_SECONDS)
