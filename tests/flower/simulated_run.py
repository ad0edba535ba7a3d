"""Run the apps in Flower's simulation engine: ``python simulated_run.py OUT RECIPE ROUNDS``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np
from flwr.simulation import run_simulation

from aqg.flower import FlowerTask, make_client_app, make_server_app

from tests.problems import tiny_problem

if TYPE_CHECKING:
    from flwr.app import Context

ALPHA = 0.1
NUM_CLIENTS = 3


def task_of(context: Context) -> FlowerTask:
    problem = tiny_problem(num_clients=NUM_CLIENTS)
    samples = problem.clients[int(context.node_config["partition-id"])]
    return FlowerTask.from_objective(
        problem.objective, samples.features, samples.labels, start=problem.initial_params
    )


def main(out: str, recipe: str, rounds: str) -> None:
    settings = {
        "num-clients": NUM_CLIENTS,
        "num-server-rounds": int(rounds),
        "recipe": recipe,
        "alpha": ALPHA,
        "weighting": "equal",
        "trust-partition-id": True,
        "run-dir": out,
    }
    server = make_server_app(
        tiny_problem(num_clients=NUM_CLIENTS).initial_params, settings=settings
    )
    run_simulation(
        server,
        make_client_app(task_of),
        num_supernodes=NUM_CLIENTS,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": 1, "include_dashboard": False},
        },
    )
    with np.load(f"{out}/checkpoint.npz") as saved:
        np.save(f"{out}/parameters.npy", saved["parameters"])


if __name__ == "__main__":
    main(*sys.argv[1:])
