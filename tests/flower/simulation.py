"""Strategies with the two lines in Flower's simulation, whatever its version; prints JSON.

python tests/flower/simulation.py ROUNDS NAME...
"""

import json
import sys

import flwr
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from aqg.flower import AQG, Compressed, aqg_mod

from tests.flower.small_app import NUM_CLIENTS, STRATEGIES, distance, first_arrays, make_app


def main(rounds: int, names: list[str]) -> None:
    """Run them, one after the other."""
    app, found = ServerApp(), {"version": flwr.__version__}

    @app.main()
    def serve(grid: Grid, context: Context) -> None:
        for name in names:
            is_own = name == "AQG"
            own = AQG(NUM_CLIENTS, recipe="lean", client_eval_every=1) if is_own else None
            strategy = own or Compressed(STRATEGIES[name]())
            result = strategy.start(grid, first_arrays(), num_rounds=rounds)
            counts = result.traffic
            found[name] = {
                "distance": distance(result.arrays),
                "evaluated": sorted(result.evaluate_metrics_clientapp),
                "trained": sorted(result.train_metrics_clientapp),
                "refused": sum(counts.refused.values()),
                "lost": counts.lost,
                "up": counts.train.up,
                "plain_up": counts.train.plain_up,
                "down": counts.train.down,
                "plain_down": counts.train.plain_down,
            }

    resources = {"num_cpus": 1, "num_gpus": 0.0}
    ray = {"num_cpus": 1, "include_dashboard": False}
    backend = {"client_resources": resources, "init_args": ray}
    run_simulation(app, make_app([aqg_mod]), num_supernodes=NUM_CLIENTS, backend_config=backend)
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
