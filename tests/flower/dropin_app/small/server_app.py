"""A server with one of Flower's strategies."""

import resource
import time

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAdam, FedAvg

from aqg.flower import AQG, Buffered, Compressed
from small.client_app import target_of

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and say how near the model comes to the mean of all clients' vectors."""
    name, count = str(context.run_config["strategy"]), int(context.run_config["num-clients"])
    options = {"min_train_nodes": count, "min_evaluate_nodes": count, "min_available_nodes": count}
    size = int(context.run_config["size"])
    if name == "AQG":
        serve_own(grid, count, size, int(context.run_config["rounds"]))
        return
    inner = FedAvg(**options) if name == "FedAvg" else FedAdam(**options, eta=0.3, tau=0.1)
    size_of_round = int(context.run_config["buffer-size"])
    strategy = Compressed(Buffered(inner, size=size_of_round) if size_of_round else inner)
    starting = strategy if context.run_config["compressed"] else inner
    first = ArrayRecord({"w": Array(np.zeros(size, np.float32))})
    rounds, timeout = int(context.run_config["rounds"]), float(context.run_config["timeout"])
    result = starting.start(grid, first, num_rounds=rounds, timeout=timeout, evaluate_fn=tell_time)
    optimum = np.mean([target_of(client, size) for client in range(count)], axis=0)
    distance = np.abs(result.arrays["w"].numpy() - optimum).max()
    refused, up = sum(strategy.counts.refused.values()), strategy.counts.train.up
    print(f"{name}: distance {distance:.4f}, refused {refused}, up {up}", flush=True)
    print(f"peak memory {1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}", flush=True)


def serve_own(grid: Grid, count: int, size: int, rounds: int) -> None:
    """Train with aqg's own strategy and the same clients."""
    strategy = AQG(count, recipe="lean", client_eval_every=1)
    first = ArrayRecord({"w": Array(np.zeros(size, np.float32))})
    result = strategy.start(grid, first, num_rounds=rounds)
    optimum = np.mean([target_of(client, size) for client in range(count)], axis=0)
    distance = np.abs(result.arrays["w"].numpy() - optimum).max()
    refused = strategy.results["deployment"]["incidents"]["rejected"]
    evaluated = sorted(result.evaluate_metrics_clientapp)
    up = strategy.results["upload_bytes"]
    print(f"AQG: distance {distance:.4f}, refused {refused}, up {up}, {evaluated}", flush=True)


def tell_time(server_round: int, arrays: ArrayRecord) -> None:
    """Say when a round ends."""
    print(f"round {server_round} at {time.time():.3f}", flush=True)
