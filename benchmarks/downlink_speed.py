"""What counting a downlink costs the engine: rounds with and without, in turns.

    python benchmarks/downlink_speed.py [--workloads W1,W3,W4] [--recipe lean] [--repetitions 6]

prints, for each workload of ``engine.py``, the time of a round with ``exact`` and ``condensed``
entries over that with whole models, in CPU seconds of one process, smallest of several windows. The
simulations run side by side from the same start, so that each is at the same stage of training.
"""

from __future__ import annotations

import argparse
import time

from engine_workloads import WORKLOADS, make_data, make_problem

from aqg.core.downlink import make_downlink
from aqg.core.recipes import make_recipe
from aqg.sim.engine import FastSimulation
from aqg.sim.training import Training

DOWNLINKS = ("full", "exact", "condensed")


def measure(name: str, recipe: str, repetitions: int, warm_up: int) -> dict[str, float]:
    """Return the smallest seconds per round of each downlink."""
    workload = WORKLOADS[name]
    problem = make_problem(workload, make_data(workload))
    simulations = {
        downlink: FastSimulation(
            problem,
            make_recipe(recipe),
            workload.step_size,
            training=Training(downlink=make_downlink(downlink)),
        )
        for downlink in DOWNLINKS
    }
    best = dict.fromkeys(DOWNLINKS, float("inf"))
    for simulation in simulations.values():
        for _ in simulation.run_rounds(warm_up):
            pass
    for _ in range(repetitions):
        for downlink, simulation in simulations.items():
            started = time.process_time()
            for _ in simulation.run_rounds(workload.window):
                pass
            seconds = (time.process_time() - started) / workload.window
            best[downlink] = min(best[downlink], seconds)
    return best


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workloads", default="W1,W3,W4")
    parser.add_argument("--recipe", default="lean")
    parser.add_argument("--repetitions", type=int, default=8)
    parser.add_argument("--warm-up", type=int, default=3)
    options = parser.parse_args()
    print("workload  full, ms  exact/full  condensed/full")
    for name in options.workloads.split(","):
        best = measure(name, options.recipe, options.repetitions, options.warm_up)
        full = best["full"]
        print(
            f"{name:8} {1e3 * full:9.3f} {best['exact'] / full:11.3f} "
            f"{best['condensed'] / full:15.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
