"""Seconds per round of Flower's simulation on a workload of ``engine.py``; ends with one JSON line.

    python benchmarks/engine_flower.py W3 --rounds 20

The server sends the model to every client with the low-level ``Grid`` and sums the gradients that
come back: one full-batch gradient each, no compression. Clients run on Ray, one per core.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import numpy as np
import torch
from engine_peers import LOCAL_RATE, make_module
from engine_workloads import WORKLOADS, make_data

if TYPE_CHECKING:
    from engine_workloads import Data

POLL_SECONDS = 0.002


@functools.cache
def client_data(name: str) -> Data:
    """Return all clients' data, made once in every process."""
    return make_data(WORKLOADS[name])


def gradient(name: str, client: int, params: np.ndarray) -> np.ndarray:
    """Return the gradient of the mean cross-entropy of a client's samples."""
    features, labels = (torch.as_tensor(part[client]) for part in client_data(name))
    module = make_module(WORKLOADS[name]).to(features.dtype)
    torch.nn.utils.vector_to_parameters(torch.from_numpy(params.copy()), module.parameters())
    torch.nn.functional.cross_entropy(module(features), labels).backward()
    parts = [parameter.grad.reshape(-1) for parameter in module.parameters()]
    return torch.cat(parts).numpy()


def run(name: str, rounds: int) -> list[float]:
    """Return the seconds that each round took."""
    from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.simulation import run_simulation

    workload = WORKLOADS[name]
    seconds: list[float] = []
    client_app, server_app = ClientApp(), ServerApp()
    path = os.path.dirname(os.path.abspath(__file__))

    @client_app.train()
    def train(message: Message, context: Context) -> Message:
        sys.path.insert(0, path)  # a Ray worker imports this file by its name
        import engine_flower

        client = int(context.node_config["partition-id"])
        params = np.frombuffer(message.content["model"]["values"], workload.dtype)
        update = engine_flower.gradient(name, client, params)
        content = RecordDict({"update": ConfigRecord({"values": update.tobytes()})})
        return Message(content=content, reply_to=message)

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:  # noqa: ARG001
        module = make_module(workload)
        params = torch.nn.utils.parameters_to_vector(module.parameters()).detach().numpy()
        params = params.astype(workload.dtype)
        nodes: list[int] = []
        while len(nodes) < workload.num_clients:
            nodes = list(grid.get_node_ids())
        for _ in range(rounds):
            start = time.perf_counter()
            model = RecordDict({"model": ConfigRecord({"values": params.tobytes()})})
            pending = set(
                grid.push_messages(
                    [
                        Message(content=model, dst_node_id=n, message_type=MessageType.TRAIN)
                        for n in nodes
                    ]
                )
            )
            total: Any = 0
            while pending:
                for reply in grid.pull_messages(pending):
                    pending.discard(reply.metadata.reply_to_message_id)
                    if reply.has_error():
                        raise RuntimeError(reply.error.reason)
                    total = total + np.frombuffer(reply.content["update"]["values"], workload.dtype)
                time.sleep(POLL_SECONDS)
            params = (params - LOCAL_RATE / workload.num_clients * total).astype(workload.dtype)
            seconds.append(time.perf_counter() - start)

    run_simulation(
        server_app,
        client_app,
        num_supernodes=workload.num_clients,
        backend_config={"client_resources": {"num_cpus": 1}},
    )
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("workload", choices=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # clients share the cores between them
    try:
        seconds = run(arguments.workload, arguments.rounds)
        result: dict[str, Any] = {"first_round": seconds[0], "seconds": min(seconds[1:])}
    except Exception as error:  # whatever goes wrong there, the caller goes on without it
        result = {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
    sys.stderr.flush()
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
