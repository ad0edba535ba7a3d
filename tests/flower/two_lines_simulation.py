"""The two lines in Flower's simulation, whatever its version; prints what came out as JSON."""

from __future__ import annotations

import json

import flwr
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from aqg.flower import Compressed, aqg_mod

from tests.flower.small_app import NUM_CLIENTS, distance, first_arrays, make_app


def main():
    """Run a few rounds."""
    app, found = ServerApp(), {}

    @app.main()
    def serve(grid: Grid, context: Context) -> None:
        every = {"min_train_nodes": NUM_CLIENTS, "min_available_nodes": NUM_CLIENTS}
        strategy = Compressed(FedAvg(**every))
        first = first_arrays()
        result = strategy.start(grid, first, num_rounds=4)
        train = strategy.counts.train
        found.update(
            version=flwr.__version__,
            start=distance(first),
            distance=distance(result.arrays),
            evaluated=sorted(result.evaluate_metrics_clientapp),
            refused=sum(strategy.counts.refused.values()),
            up=train.up,
            plain_up=train.plain_up,
            down=train.down,
            plain_down=train.plain_down,
        )

    run_simulation(
        app,
        make_app([aqg_mod]),
        num_supernodes=NUM_CLIENTS,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": 1, "include_dashboard": False},
        },
    )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
