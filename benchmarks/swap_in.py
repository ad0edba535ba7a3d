"""What it costs to swap a recipe into an app: rounds and bytes until it is as good as averaging.

    python benchmarks/swap_in.py [--tasks local-iid,…] [--recipes auto,stc@2,…] [--seeds 3]
                                 [--rounds 100] [--device cpu] [--out FOLDER]

For each task and seed, federated averaging in full precision, with whole models as downloads, is
run for R rounds with one, two and four times its own step. Its best mean accuracy over the last
tenth of the rounds, less one point, is the target, and counts once it is held for three rounds.
Then each recipe is run until it holds the target, for half as many rounds again at the most. Its
*delay* is the rounds it took over those of averaging; its *saving* is averaging's bytes until the
target, both directions, all clients, over its own.

A recipe is NAME, with the step that sets itself, or NAME@X, with a fixed step of X times
averaging's; after it, /DOWNLINK if another than the recipe's own is meant. A task is one of
``aqg compare``, or FILE.py:FUNCTION, which makes a problem. Averaging is charged 32 bits per
parameter and direction, recipes the lengths of their frames.

Every round is a line in FOLDER/curves.csv; runs that are there already are not run again.
FOLDER/table.csv has a line per run, and at the end the means of the seeds are printed.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from aqg.core.policies import Always
from aqg.core.quantizers import Verbatim
from aqg.core.recipe import Recipe
from aqg.core.recipes import make_recipe
from aqg.runs.config import resolve
from aqg.runs.setup import build_problem
from aqg.sim.engine import FastSimulation
from aqg.sim.record import DROPPED
from aqg.studies.compare.tasks import TASKS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aqg.runs.config import RunConfig
    from aqg.sim.problem import Problem

FEDAVG = "fedavg"
STEPS = (1, 2, 4)
HOLD = 3
COLUMNS = ("task", "recipe", "seed", "round", "accuracy", "upload_bytes", "download_bytes")
TABLE = (
    "task",
    "recipe",
    "seed",
    "target",
    "best_accuracy",
    "rounds",
    "delay",
    "upload_bytes",
    "download_bytes",
    "saving",
)
Curve = list[tuple[float, int, int]]
"""Accuracy, and bytes sent and received so far, after each round."""


def config_of(task: str, rounds: int) -> RunConfig:
    """Return the settings of a task."""
    if task in TASKS:
        config = TASKS[task].config
    else:
        (config,) = resolve({"problem": task, "recipe": "gd"})
    return replace(config, rounds=rounds, target=None, hold=0)


def simulate(config: RunConfig, problem: Problem, recipe: str, device: str) -> FastSimulation:
    """Return the simulation of a recipe, as the command line names it."""
    name, _, downlink = recipe.partition("/")
    name, _, multiple = name.partition("@")
    alpha = config.alpha * float(multiple or 1)
    step = "fixed" if multiple else "auto"
    if name == FEDAVG:
        training = replace(config, downlink="full", step="fixed").training()
        made = Recipe(policy=Always(32), quantizer=Verbatim())
    else:
        chosen = replace(config, recipe=name, downlink=downlink or "auto", step=step)
        training, made = chosen.training(), make_recipe(name)
    return FastSimulation(
        problem, made, alpha, config.dropout_schedule(), config.seed, device, training=training
    )


def rounds_of(simulation: FastSimulation, is_full: bool) -> Iterator[tuple[float, int, int]]:
    """Yield accuracy and bytes so far after each round, for ever."""
    sent = received = 0
    model_bytes = 4 * len(simulation.parameters)
    while True:
        record = simulation.run_round(evaluate=False)
        whole = model_bytes * sum(width != DROPPED for width in record.widths)
        sent += whole if is_full else record.upload_bytes
        received += whole if is_full else record.download_bytes
        accuracy = simulation.problem.test_accuracy(simulation.averaged)
        yield (math.nan if accuracy is None else accuracy), sent, received


def held_at(curve: Curve, target: float) -> int | None:
    """Return the first of the rounds, counted from 1, that hold the target."""
    streak = 0
    for number, (accuracy, _, _) in enumerate(curve, 1):
        streak = streak + 1 if accuracy >= target else 0
        if streak == HOLD:
            return number - HOLD + 1
    return None


def plateau(curve: Curve) -> float:
    """Return the mean accuracy over the last tenth of the rounds."""
    return float(np.mean([row[0] for row in curve[-max(1, len(curve) // 10) :]]))


class Curves:
    """All curves so far, on disk."""

    def __init__(self, file: Path) -> None:
        self.curves: dict[tuple[str, str, int], Curve] = {}
        self._file = file
        if file.exists():
            with file.open() as lines:
                for row in csv.DictReader(lines):
                    key = row["task"], row["recipe"], int(row["seed"])
                    values = float(row["accuracy"]), int(row["upload_bytes"])
                    self.curves.setdefault(key, []).append((*values, int(row["download_bytes"])))

    def add(self, key: tuple[str, str, int], curve: Curve) -> None:
        """Append a finished run."""
        self.curves[key] = curve
        is_new = not self._file.exists()
        with self._file.open("a", newline="") as file:
            writer = csv.writer(file)
            if is_new:
                writer.writerow(COLUMNS)
            for number, (accuracy, sent, received) in enumerate(curve, 1):
                writer.writerow((*key, number, f"{accuracy:.6g}", sent, received))


def train(
    config: RunConfig, problem: Problem, recipe: str, device: str, target: float, rounds: int
) -> Curve:
    """Run until the target is held, or for so many rounds."""
    curve: Curve = []
    simulation = simulate(config, problem, recipe, device)
    for row in rounds_of(simulation, recipe.startswith(FEDAVG)):
        curve.append(row)
        if len(curve) == rounds or held_at(curve, target) is not None:
            return curve
    return curve


def best_average(curves: dict[tuple[str, str, int], Curve], task: str, seed: int) -> str:
    """Return the step with which averaging ended best."""
    names = [f"{FEDAVG}@{step}" for step in STEPS]
    return max(names, key=lambda name: plateau(curves[task, name, seed]))


def to_rows(curves: dict[tuple[str, str, int], Curve]) -> list[dict]:
    """Return a line per run, held against averaging with the same seed."""
    rows = []
    for (task, recipe, seed), curve in curves.items():
        if not all((task, f"{FEDAVG}@{step}", seed) in curves for step in STEPS):
            continue
        best = best_average(curves, task, seed)
        if recipe.startswith(FEDAVG) and recipe != best:
            continue
        base = curves[task, best, seed]
        target = plateau(base) - 0.01
        needed, taken = held_at(base, target), held_at(curve, target)
        row = {"task": task, "recipe": recipe, "seed": seed, "target": round(target, 4)}
        row["best_accuracy"] = round(max(point[0] for point in curve), 4)
        row |= dict.fromkeys(TABLE[5:], "")
        if needed is not None and taken is not None:
            sent, received = curve[taken - 1][1:]
            row |= {"rounds": taken, "delay": round(taken / needed, 3)}
            row |= {"upload_bytes": sent, "download_bytes": received}
            row["saving"] = round(sum(base[needed - 1][1:]) / (sent + received), 1)
        rows.append(row)
    return rows


def show(rows: list[dict]) -> None:
    """Print the means of the seeds; geometric ones of ratios."""
    groups: dict[tuple[str, str], list[dict]] = {}
    for row in rows:
        recipe = FEDAVG if row["recipe"].startswith(FEDAVG) else row["recipe"]
        groups.setdefault((row["task"], recipe), []).append(row)
    print(f"{'task':22} {'recipe':34} reached  rounds  delay  total MB  saving")
    for (task, recipe), found in groups.items():
        held = [row for row in found if row["rounds"] != ""]
        text = f"{task:22} {recipe:34} {len(held)} of {len(found)}"
        if held:
            total = [int(row["upload_bytes"]) + int(row["download_bytes"]) for row in held]
            delay, saving = (
                math.exp(np.mean([math.log(float(row[name])) for row in held]))
                for name in ("delay", "saving")
            )
            text += f" {np.mean([int(row['rounds']) for row in held]):8.0f} {delay:6.2f}"
            text += f" {np.mean(total) / 1e6:9.3f} {saving:7.0f}"
        print(text)


def main() -> None:
    """Run what is missing, then write and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tasks", default="digits-local")
    parser.add_argument("--recipes", default="swap")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("AQG_DATA_DIR"))
    parser.add_argument("--out", type=Path, default=Path("swap-in"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    store = Curves(options.out / "curves.csv")
    recipes = [] if not options.recipes else options.recipes.split(",")
    for task in options.tasks.split(","):
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            config = replace(config_of(task, options.rounds), seed=seed)
            wanted = [*(f"{FEDAVG}@{step}" for step in STEPS), *recipes]
            missing = [name for name in wanted if (task, name, seed) not in store.curves]
            problem = build_problem(config, options.data_dir) if missing else None
            for recipe in missing:
                assert problem is not None
                started = time.perf_counter()
                target, rounds = math.inf, options.rounds
                if not recipe.startswith(FEDAVG):
                    base = store.curves[task, best_average(store.curves, task, seed), seed]
                    target, rounds = plateau(base) - 0.01, rounds * 3 // 2
                curve = train(config, problem, recipe, options.device, target, rounds)
                store.add((task, recipe, seed), curve)
                seconds = time.perf_counter() - started
                text = f"{task} {recipe} {seed}: {len(curve)} rounds, {curve[-1][0]:.4f}"
                print(f"{text}, {seconds:.0f} s", file=sys.stderr, flush=True)
    rows = to_rows(store.curves)
    with (options.out / "table.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, TABLE)
        writer.writeheader()
        writer.writerows(rows)
    show(rows)


if __name__ == "__main__":
    main()
