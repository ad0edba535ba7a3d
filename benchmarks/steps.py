"""How training goes with one step rule, downlink and recipe: accuracy, step and bytes.

    python benchmarks/steps.py TASK RECIPE [--step dog:widest=8] [--downlink condensed:keep=0.003]
                               [--rounds 150] [--every 5] [--seed 0] [--device cpu] [--out FILE.csv]

TASK is one of ``aqg compare``. A step is a rule's, as ``aqg run --step`` names it, or
``xN``: N times that of federated averaging, in every round (``x4:average=8``: with a mean over the
last models). Accuracy is that on the validation
set of the mean over the last models (with ``--step dog:average=0``, of the model itself); the step
is in steps of federated averaging. FILE gets a line for every so many rounds.
"""

from __future__ import annotations

import argparse
import csv
import os
from dataclasses import replace
from pathlib import Path

from aqg.core.recipes import make_recipe
from aqg.runs.setup import build_problem
from aqg.sim.engine import FastSimulation
from aqg.studies.contest.tasks import TASKS

COLUMNS = (
    "task",
    "recipe",
    "step",
    "downlink",
    "seed",
    "round",
    "accuracy",
    "step_size",
    "upload_bytes",
    "download_bytes",
)


def main() -> None:
    """Run, print, and write down."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("task", choices=sorted(TASKS))
    parser.add_argument("recipe")
    parser.add_argument("--step", default="auto")
    parser.add_argument("--downlink", default="auto")
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("AQG_DATA_DIR"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    task = TASKS[options.task].config
    step, multiple = options.step, 1.0
    if step.startswith("x"):
        number, *rest = step[1:].split(":")
        step, multiple = ":".join(["fixed", *rest]), float(number)
    config = replace(
        task,
        recipe=options.recipe,
        downlink=options.downlink,
        step=step,
        alpha=task.alpha * multiple,
        seed=options.seed,
        device=options.device,
    )
    problem = build_problem(config, options.data_dir)
    simulation = FastSimulation(
        problem,
        make_recipe(options.recipe),
        config.alpha,
        config.dropout_schedule(),
        config.seed,
        config.device,
        training=config.training(),
    )
    key = (options.task, options.recipe, options.step, options.downlink, options.seed)
    sent = received = 0
    for number in range(1, options.rounds + 1):
        record = simulation.run_round(evaluate=False)
        sent, received = sent + record.upload_bytes, received + record.download_bytes
        if number % options.every and number not in (1, 3):
            continue
        measured = replace(simulation.problem, test=simulation.problem.validation)
        accuracy = measured.measure(simulation.averaged).get("accuracy", float("nan"))
        state = simulation.state().model.step
        adapts = state is not None and state.energy
        length = state.reach / state.energy**0.5 if adapts else config.alpha
        row = (*key, number, f"{accuracy:.3f}", f"{length / task.alpha:.1f}", sent, received)
        print(*row, flush=True)
        if options.out:
            is_new = not options.out.exists()
            with options.out.open("a", newline="") as file:
                writer = csv.writer(file)
                if is_new:
                    writer.writerow(COLUMNS)
                writer.writerow(row)


if __name__ == "__main__":
    main()
