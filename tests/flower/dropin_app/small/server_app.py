"""A server with one of Flower's strategies."""

import resource
import time

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAdam, FedAvg

from aqg.flower import AQG, Buffered, Compressed
from aqg.flower.grid import Counts
from small.client_app import target_of

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and say how near the model comes to the mean of all clients' vectors."""
    config = context.run_config
    name, count, size = str(config["strategy"]), int(config["num-clients"]), int(config["size"])
    everyone = dict.fromkeys(
        ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes"), count
    )
    if name == "AQG":
        strategy = AQG(count, recipe="lean", client_eval_every=1)
    else:
        inner = FedAvg(**everyone) if name == "FedAvg" else FedAdam(**everyone, eta=0.3, tau=0.1)
        if size_of_round := int(config["buffer-size"]):
            inner = Buffered(inner, size=size_of_round)
        strategy = Compressed(inner) if config["compressed"] else inner
    first = ArrayRecord({"w": Array(np.zeros(size, np.float32))})
    rounds, timeout = int(config["rounds"]), float(config["timeout"])
    result = strategy.start(grid, first, num_rounds=rounds, timeout=timeout, evaluate_fn=tell_time)
    optimum = np.mean([target_of(client, size) for client in range(count)], axis=0)
    distance = np.abs(result.arrays["w"].numpy() - optimum).max()
    traffic = getattr(result, "traffic", Counts())
    refused, up = sum(traffic.refused.values()), traffic.train.up
    evaluated = sorted(result.evaluate_metrics_clientapp)
    print(f"{name}: distance {distance:.4f}, refused {refused}, up {up}, {evaluated}", flush=True)
    print(f"peak memory {1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}", flush=True)


def tell_time(server_round: int, arrays: ArrayRecord) -> None:
    """Say when a round ends."""
    print(f"round {server_round} at {time.time():.3f}", flush=True)
