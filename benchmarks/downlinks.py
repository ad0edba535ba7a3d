"""What each downlink costs until the target, in both directions.

    python benchmarks/downlinks.py [--tasks local-iid,…] [--seeds 3] [--clients M]
                                   [--participation P] [--rounds R] [--out FILE]
                                   [RECIPE] [DOWNLINK …]

trains the tasks of ``aqg compare`` until their target is reached and held, and writes a line per
run: rounds, bytes sent, bytes received by all clients that ever took part, and both. The step is
the one that a search found for the recipe ``auto`` with whole models. With ``--clients``, tasks get
another number of clients, and a step size to match; with ``--participation`` another share of them
is asked in a round; ``--rounds`` is when to give up. Lines that are in FILE already are not run
again. At the end it prints medians of the seeds.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from aqg.runs.setup import build_problem, find_minimum, make_simulation
from aqg.studies.compare.tasks import TASKS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aqg.sim.engine import FastSimulation
    from aqg.sim.reference import ReferenceSimulation
    from aqg.studies.compare.tasks import Task

STEPS = {
    "local-iid": 8.0,
    "local-dirichlet": 2.0,
    "sampled-dirichlet": 1.0,
    "sampled-iid": 2.0,
    "softmax-iid": 2.0,
    "softmax-label": 2.0,
    "mlp-iid": 2.0,
    "mlp-label": 2.0,
}
"""Multiples of the task's step size."""
COLUMNS = ("task", "clients", "recipe", "downlink", "seed", "step", "reached", "rounds")
BYTES = ("upload_bytes", "download_bytes", "seconds")
DOWNLINKS = ("full", "exact", "condensed")


def values(
    simulation: FastSimulation | ReferenceSimulation, task: Task, minimum: float
) -> Iterator[tuple[float, int, int]]:
    """Yield loss or accuracy after the bytes sent and received so far."""
    sent = received = 0
    problem = simulation.problem
    for _ in range(task.config.rounds):
        if task.target.kind == "accuracy":
            record = simulation.run_round(evaluate=False)
            predicted = problem.objective.predict(simulation.parameters, problem.test.features)
            value = float(np.mean(predicted == problem.test.labels))
            sent, received = sent + record.upload_bytes, received + record.download_bytes
            yield value, sent, received
        else:
            record = simulation.run_round()
            yield record.loss - minimum, sent, received
            sent, received = sent + record.upload_bytes, received + record.download_bytes


def train(task: Task, data_dir: Path | None, recipe: str, downlink: str, seed: int) -> dict:
    """Return one line of the table."""
    started = time.perf_counter()
    multiplier = STEPS.get(task.name, 1.0)
    alpha = task.config.alpha * multiplier
    config = replace(task.config, recipe=recipe, alpha=alpha, seed=seed, downlink=downlink)
    problem = build_problem(config, data_dir)
    minimum = (find_minimum(config, problem) or 0.0) if task.target.kind == "residual" else 0.0
    simulation = make_simulation(config, problem)
    streak, best = 0, None
    rounds, sent, received, reached = config.rounds, 0, 0, False
    for number, (value, up, down) in enumerate(values(simulation, task, minimum), 1):
        sent, received = up, down
        streak = streak + 1 if task.target.is_met(value) else 0
        if streak == 1:
            best = number, up, down
        if streak >= task.target.hold:
            (rounds, sent, received), reached = best, True
            break
        if not np.isfinite(value):
            break
    return {
        "task": task.name,
        "clients": config.clients,
        "recipe": recipe,
        "downlink": downlink,
        "seed": seed,
        "step": multiplier,
        "reached": int(reached),
        "rounds": rounds,
        "upload_bytes": sent,
        "download_bytes": received,
        "seconds": round(time.perf_counter() - started, 1),
    }


def resized(
    task: Task, num_clients: int | None, participation: float | None, rounds: int | None
) -> Task:
    """Return the task with another number of clients, and the step size that goes with it."""
    chosen = {"participation": participation, "rounds": rounds}
    config = replace(task.config, **{k: v for k, v in chosen.items() if v is not None})
    task = replace(task, config=config)
    if num_clients is None or num_clients == config.clients:
        return task
    alpha = config.alpha * config.clients / num_clients
    return replace(task, config=replace(config, clients=num_clients, alpha=alpha))


def show(rows: list[dict]) -> None:
    """Print medians of the seeds."""
    groups: dict[tuple[str, ...], list[dict]] = {}
    for row in rows:
        key = (row["task"], str(row["clients"]), row["recipe"], row["downlink"])
        groups.setdefault(key, []).append(row)
    print(f"{'task':20} {'M':>5} {'recipe':10} {'downlink':34} rounds  sent kB  rec. kB  total MB")
    for key, found in groups.items():
        if not all(int(row["reached"]) for row in found):
            print(f"{key[0]:20} {key[1]:>5} {key[2]:10} {key[3]:34} not reached on all seeds")
            continue
        rounds = statistics.median(int(row["rounds"]) for row in found)
        sent = statistics.median(int(row["upload_bytes"]) for row in found) / 1e3
        received = statistics.median(int(row["download_bytes"]) for row in found) / 1e3
        total = (
            statistics.median(int(r["upload_bytes"]) + int(r["download_bytes"]) for r in found)
            / 1e6
        )
        print(
            f"{key[0]:20} {key[1]:>5} {key[2]:10} {key[3]:34} {rounds:6.0f} {sent:8.1f} "
            f"{received:8.1f} {total:9.3f}"
        )


def main() -> None:
    """Run what is missing, then print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("recipe", nargs="?", default="auto:keep=0")
    parser.add_argument("downlinks", nargs="*", default=list(DOWNLINKS))
    parser.add_argument("--tasks", default="local-iid,local-dirichlet")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--clients", type=int)
    parser.add_argument("--participation", type=float)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, default=Path("downlinks.csv"))
    options = parser.parse_args()
    rows: list[dict] = []
    if options.out.exists():
        with options.out.open() as file:
            rows = list(csv.DictReader(file))
    done = {tuple(str(row[name]) for name in COLUMNS[:5]) for row in rows}
    with options.out.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS + BYTES)
        if not rows:
            writer.writeheader()
        for name in options.tasks.split(","):
            task = resized(TASKS[name], options.clients, options.participation, options.rounds)
            for seed in range(options.seeds):
                for downlink in options.downlinks:
                    key = (name, str(task.config.clients), options.recipe, downlink, str(seed))
                    if key in done:
                        continue
                    row = train(task, options.data_dir, options.recipe, downlink, seed)
                    print(*row.values(), file=sys.stderr, flush=True)
                    writer.writerow(row)
                    file.flush()
                    rows.append(row)
    show(rows)


if __name__ == "__main__":
    main()
