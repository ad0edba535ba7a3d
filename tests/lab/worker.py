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

import httpx
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient

from tests.lab.processes import run_command

POLL_SECONDS = 0.1
KINDS = ("flwr-clientapp", "flwr-serverapp")
"""Flower names the kinds of task like the commands that run them."""


def main():
    """Run the tasks of the SuperNode or SuperLink at an address until stopped."""
    parser = argparse.ArgumentParser("lab-worker")
    parser.add_argument("--runtime-api-address", required=True, metavar="HOST:PORT")
    parser.add_argument("--root-certificates", metavar="FILE", help="where that address has TLS")
    options = parser.parse_args()
    certificates, parent = options.root_certificates, os.getpid()
    client = RuntimeHttpClient.from_server_address(
        server_address=options.runtime_api_address,
        insecure=certificates is None,
        root_certificates=Path(certificates).read_bytes() if certificates else None,
        interceptors=[RuntimeVersionHttpInterceptor(component_name="SuperExec")],
    )
    security = ["--root-certificates", certificates] if certificates else ["--insecure"]
    address = ["--runtime-api-address", options.runtime_api_address, "--parent-pid", str(parent)]
    while True:
        with contextlib.suppress(httpx.TransportError):  # nobody can be reached
            found = client.AcquireTask(AcquireTaskRequest(supported_task_types=KINDS))
            if found.HasField("task") and found.token and os.fork() == 0:
                command = [found.task.type, *address, "--token", found.token, *security]
                run_command(command, {}, None, parent)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(POLL_SECONDS)
