"""Does batch normalization get in a recipe's way? A small ResNet with it, and without.

    python benchmarks/batchnorm.py [--rounds 20] [--seeds 3] [RECIPE …]

trains the net of the tests (five digits, three clients, local training) with every recipe, all at
the step size of federated averaging, which is ``gd``. It prints the test accuracy, mean of the
seeds, once with batch normalization, whose statistics travel beside the recipe, and once with
group normalization, where parameters are all that travels: the control. A recipe that stays
behind in both is slow to learn this net at this step size, whatever its normalization.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from torch import nn

from aqg.core.recipes import RECIPES

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.flower.resnet import (
    SIMULATED_ROUNDS,
    group_norm,
    make_net,
    make_simulation,
    simulated_accuracy,
)

BASELINE = "gd"
TWO_POINTS = 0.02
NORMS = {"batch": nn.BatchNorm2d, "group": group_norm}


def train(recipe: str, norm: str, rounds: int, seed: int) -> tuple[float, int, int]:
    """Return the final accuracy, the bytes uploaded, and how many rounds had faults."""
    simulation = make_simulation(recipe, make_net(NORMS[norm]), seed)
    records = [simulation.run_round(evaluate=False) for _ in range(rounds)]
    num_bytes = sum(record.upload_bytes for record in records)
    return simulated_accuracy(simulation), num_bytes, sum(bool(record.faults) for record in records)


def verdict(is_within: dict[str, bool]) -> str:
    """Name the cases: a recipe that fails with batch normalization alone is to be looked into."""
    if is_within["batch"]:
        return "yes" if is_within["group"] else "yes; not in the control"
    return "NO, but in the control" if is_within["group"] else "no, nor in the control"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="*", default=list(RECIPES), metavar="RECIPE")
    parser.add_argument("--rounds", type=int, default=SIMULATED_ROUNDS)
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    recipes = [BASELINE, *(name for name in options.recipes if name != BASELINE)]
    print(f"| recipe | batch norm. | control | kB uploaded | within two points of `{BASELINE}` |")
    print("|---|---|---|---|---|")
    reached: dict[str, float] = {}
    for recipe in recipes:
        cells, is_within, faults = [], {}, 0
        for norm in NORMS:
            runs = [train(recipe, norm, options.rounds, seed) for seed in range(options.seeds)]
            mean = float(np.mean([run[0] for run in runs]))
            is_within[norm] = mean >= reached.setdefault(norm, mean) - TWO_POINTS
            cells.append(f"{mean:.1%}")
            faults += sum(run[2] for run in runs)
            if norm == "batch":
                num_bytes = np.mean([run[1] for run in runs])
        cells += [f"{num_bytes / 1000:.0f}", "–" if recipe == BASELINE else verdict(is_within)]
        note = f"; {faults} rounds with faults" if faults else ""
        print(f"| `{recipe}` | {' | '.join(cells)}{note} |", flush=True)


if __name__ == "__main__":
    main()
