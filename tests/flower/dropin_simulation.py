"""Every strategy in one run of Flower's simulation: ``python dropin_simulation.py OUT``."""

from __future__ import annotations

import json
import sys

from flwr.app import ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp import strategy as flower
from flwr.simulation import run_simulation

from aqg.flower import AQG, Compressed, aqg_mod

from tests.flower.small_app import NUM_CLIENTS, distance, first_arrays, make_app
from tests.flower.test_dropin import Own, everyone

ROUNDS = 2


def strategies():
    """Return every strategy that is tried, by name."""
    return {
        "FedAvg": flower.FedAvg(**everyone()),
        "FedAvgM": flower.FedAvgM(**everyone(server_momentum=0.1)),
        "FedAdam": flower.FedAdam(**everyone(eta=0.1, tau=0.01)),
        "FedProx": flower.FedProx(**everyone(proximal_mu=0.1)),
        "FedMedian": flower.FedMedian(**everyone()),
        "Krum": flower.Krum(**everyone(num_malicious_nodes=1)),
        "DP": flower.DifferentialPrivacyServerSideFixedClipping(
            flower.FedAvg(**everyone()), 0.001, 20.0, NUM_CLIENTS
        ),
        "own": Own(),
    }


def main(out):
    """Run them, and write what came out."""
    app = ServerApp()
    results = {}

    @app.main()
    def serve(grid: Grid, context: Context) -> None:
        for name, strategy in strategies().items():
            wrapped = Compressed(strategy)
            result = wrapped.start(
                grid, first_arrays(), num_rounds=ROUNDS, train_config=ConfigRecord({"lr": 0.5})
            )
            counts = wrapped.counts
            results[name] = {
                "distance": distance(result.arrays),
                "evaluated": sorted(result.evaluate_metrics_clientapp),
                "trained": sorted(result.train_metrics_clientapp),
                "refused": sum(counts.refused.values()),
                "lost": counts.lost,
                "up": counts.train.up,
                "plain_up": counts.train.plain_up,
            }

        own = AQG(NUM_CLIENTS, recipe="lean", client_eval_every=1)
        result = own.start(grid, first_arrays(), ROUNDS, train_config=ConfigRecord({"lr": 0.5}))
        incidents = own.results["deployment"]["incidents"]
        results["AQG"] = {
            "distance": distance(result.arrays),
            "evaluated": sorted(result.evaluate_metrics_clientapp),
            "trained": sorted(result.train_metrics_clientapp),
            "refused": incidents["rejected"] + incidents["errors"],
            "lost": incidents["lost"],
            "up": own.results["upload_bytes"],
            "plain_up": results["FedAvg"]["plain_up"],
        }

    run_simulation(
        app,
        make_app([aqg_mod]),
        num_supernodes=NUM_CLIENTS,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": 1, "include_dashboard": False},
        },
    )
    with open(out, "w", encoding="utf-8") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main(sys.argv[1])
