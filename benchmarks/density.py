"""How dense clients' updates are, which decides how much `auto` sends of them.

    python benchmarks/density.py TASK [TASK ...] [--rounds 20] [--recipe auto] [--seed 0]

TASK is one of ``aqg compare --swap-in``, run with the downlink and the steps that it has there. The
density of an update is ``‖g‖₁²/(n‖g‖₂²)``: 1 if all coordinates are alike, and ``1/n`` if it has
only one. The local density is the mean of those of its blocks of 64 coordinates. Printed are means
over the clients of a round, and the share of all coordinates that a client sends if it is asked in
every round.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from aqg.core.recipes import make_recipe
from aqg.core.sparsifiers import AdaptiveTernary
from aqg.core.stages import noise_switch
from aqg.runs.setup import build_problem, make_simulation
from aqg.studies.swap_in.tasks import SWAP_TASKS


def main() -> None:
    """Run, and print rounds in which twice as many have passed as at the last line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tasks", nargs="+", choices=sorted(SWAP_TASKS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--recipe", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("AQG_DATA_DIR"))
    options = parser.parse_args()
    seen: list[tuple[float, float, float]] = []
    switch = make_recipe(options.recipe).switch
    if not (isinstance(switch, noise_switch.NoiseSwitch) and switch.keep):
        parser.error(f"recipe {options.recipe!r} does not look at densities")
    measure, rule = noise_switch.densities, AdaptiveTernary(keep=switch.keep)

    def noted(vector: np.ndarray) -> tuple[float, float]:
        found = measure(vector)
        share = rule.num_kept(len(vector), 1.0, 1.0, *found) / len(vector)
        seen.append((*found, share))
        return found

    noise_switch.densities = noted
    for name in options.tasks:
        config = replace(
            SWAP_TASKS[name].config,
            recipe=options.recipe,
            seed=options.seed,
            step="auto",
            downlink="auto",
            device=options.device,
        )
        simulation = make_simulation(config, build_problem(config, options.data_dir))
        shown = 1
        for number in range(1, options.rounds + 1):
            seen.clear()
            simulation.run_round(evaluate=False)
            if number == shown or number == options.rounds:
                density, local, share = np.mean(seen, axis=0)
                text = f"density {density:.3f}, local {local:.3f}, share {share:.4f}"
                print(f"{name} round {number}: {text}", flush=True)
                shown *= 2


if __name__ == "__main__":
    main()
