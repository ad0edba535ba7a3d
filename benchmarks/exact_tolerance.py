"""Bytes of exact gradients on MNIST until the loss is within 1e-6 of its minimum, by tolerance.

    python benchmarks/exact_tolerance.py [--device cuda] [--tolerances 0.05,0.1,0.2,0.4]
                                         [--data-dir DIR]

Ten clients, 784→10 softmax regression, both splits, `lean` and `auto`: rounds, and bytes that all
clients sent and received until the loss stays there for 100 rounds. On two cores a run takes
minutes, on a GPU seconds.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from aqg.runs.config import resolve
from aqg.runs.setup import build_problem, find_minimum, make_simulation

ROUNDS, RESIDUAL, HOLD = 3500, 1e-6, 100


def reach(settings: dict[str, object], data_dir: Path | None) -> tuple[int, int, int] | None:
    """Return rounds and bytes up and down until the target holds; None where it does not."""
    (config,) = resolve({"dataset": "mnist", "model": "softmax", "rounds": ROUNDS, **settings})
    problem = build_problem(config, data_dir)
    minimum = find_minimum(config, problem)
    assert minimum is not None
    simulation = make_simulation(config, problem)
    sent = received = 0
    found: tuple[int, int, int] | None = None
    for record in simulation.run_rounds(ROUNDS):
        if record.loss is None or record.loss - minimum > RESIDUAL:
            found = None
        elif found is None:
            found = record.round, sent, received
        elif record.round > found[0] + HOLD:
            break
        sent += record.upload_bytes
        received += record.download_bytes or 0
    return found


def main() -> None:
    """Run, and print a line for each setting."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tolerances", default="0.05,0.1,0.2,0.4")
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("AQG_DATA_DIR"))
    options = parser.parse_args()
    downlinks = ["exact", *(f"condensed:tolerance={c}" for c in options.tolerances.split(","))]
    print(f"{'split':6} {'recipe':6} {'downlink':26} rounds  up kB  down kB")
    for partition in ("iid", "label"):
        for recipe in ("lean", "auto"):
            for downlink in downlinks:
                settings = {"partition": partition, "recipe": recipe, "downlink": downlink}
                found = reach({**settings, "device": options.device}, options.data_dir)
                cost = "not reached"
                if found is not None:
                    rounds, up, down = found
                    cost = f"{rounds:6} {up / 1e3:6,.0f} {down / 1e3:8,.0f}"
                print(f"{partition:6} {recipe:6} {downlink:26} {cost}", flush=True)


if __name__ == "__main__":
    main()
