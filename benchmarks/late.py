"""Rounds that do not wait for everyone: simulated time and bytes until a test accuracy.

    python benchmarks/late.py [--task digits --task mnist] [--seeds 1] [--out results]

Clients have given speeds (log-normal, σ = 1, median one second per round, some spread from round to
round), every twentieth reply is held up for 20 seconds on average, and links carry 10 Mbit/s. All
methods see the same clients. A buffered round ends with half as many replies as clients are at
work. FedBuff's update has 32 bits per parameter in both directions. QAFeL (Ortega and Jafarkhani
2023) is FedBuff with quantized updates and quantized differences to a model that both sides hold:
here 4 bits per parameter up, by QSGD, and down. Bytes are all that is sent until the target:
frames, heads of orders and replies, and what tells a client the first model.

Writes ``late.md`` and ``late.csv`` (the curves); the picture is ``docs/images/late.png``.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from aqg.core.auto import STEP
from aqg.runs.config import resolve
from aqg.runs.cost import Meter
from aqg.runs.setup import build_problem, make_simulation

CLOCK = {
    "speeds": "lognormal:sigma=1:jitter=0.3",
    "outages": "random:chance=0.05:seconds=20",
    "link_mbit": 10.0,
}
LOCAL = {"local_steps": 5, "local_rate": 0.1, "l2": 0.0, "dtype": "float32"}
TASKS: dict[str, dict[str, Any]] = {
    "digits": {
        "dataset": "digits",
        "model": "mlp:64",
        "partition": "dirichlet:0.5",
        "clients": 20,
        "participation": 0.5,
        "batch_size": 16,
        "rounds": 400,
        **LOCAL,
    },
    "mnist": {
        "dataset": "mnist",
        "model": "mlp:50",
        "partition": "dirichlet:0.5",
        "samples": 12_000,
        "clients": 50,
        "participation": 0.2,
        "batch_size": 32,
        "rounds": 400,
        **LOCAL,
    },
}
TARGETS = {"digits": 0.94, "mnist": 0.92}
BUFFER = 5
METHODS: dict[str, dict[str, Any]] = {
    "auto, buffered": {"recipe": "auto", "buffer_size": BUFFER, "step": "auto"},
    "8-bit QSGD up, buffered": {"recipe": "qsgd", "bits": 8, "buffer_size": BUFFER, "step": "auto"},
    "FedBuff": {"recipe": "fedavg", "buffer_size": BUFFER, "step": "fixed"},
    "FedBuff, step and mean of auto": {"recipe": "fedavg", "buffer_size": BUFFER, "step": STEP},
    "QAFeL, 4 bits": {
        "recipe": "qsgd",
        "bits": 4,
        "downlink": "condensed:keep=1",
        "buffer_size": BUFFER,
        "step": "fixed",
    },
    "auto, waits for all": {"recipe": "auto", "step": "auto"},
    "FedAvg, waits for all": {"recipe": "fedavg", "step": "fixed"},
}
HOLD = 3
"""Measurements in a row that must be at the target."""
COLUMNS = ("task", "method", "seed", "round", "seconds", "bytes", "accuracy")


class Point(NamedTuple):
    """Where a run is: after some rounds, seconds and bytes."""

    round: int
    seconds: float
    bytes: int
    accuracy: float


def run(task: str, method: str, seed: int, every: int, data_dir: Path | None) -> list[Point]:
    """Run until the target holds, or to the last round."""
    settings = {**TASKS[task], **CLOCK, **METHODS[method], "seed": seed}
    (config,) = resolve(settings, data_dir)
    problem = build_problem(config, data_dir)
    simulation = make_simulation(config, problem)
    meter = Meter(problem.start_bytes, simulation.training)
    points: list[Point] = []
    size = 0
    for number in range(1, config.rounds + 1):
        record = meter.charge(simulation.run_round(evaluate=False))
        size += record.total_bytes or 0
        if number % every:
            continue
        accuracy = problem.measure(simulation.averaged)["accuracy"]
        points.append(Point(number, record.simulated_seconds or 0.0, size, accuracy))
        if reached(points, TARGETS[task]) is not None:
            break
    return points


def reached(points: Sequence[Point], target: float) -> Point | None:
    """Return the first point from which the target held."""
    for start in range(len(points) - HOLD + 1):
        if all(point.accuracy >= target for point in points[start : start + HOLD]):
            return points[start]
    return None


def table(task: str, curves: dict[str, list[list[Point]]]) -> str:
    """Return a task's rows: medians over seeds, and ratios to FedBuff."""
    target = TARGETS[task]
    firsts = {name: [reached(run, target) for run in runs] for name, runs in curves.items()}
    middle = {name: _median(found) for name, found in firsts.items()}
    base = middle.get("FedBuff")
    rows = [
        f"| {task}, accuracy {target:.2f} | rounds | simulated time | vs FedBuff | bytes "
        "| vs FedBuff |",
        "|---|---|---|---|---|---|",
    ]
    for name, point in middle.items():
        if point is None:
            best = max(p.accuracy for runs in curves[name] for p in runs)
            rows.append(f"| {name} | not reached (best {best:.3f}) | | | | |")
            continue
        ratios = "", ""
        if base is not None:
            ratios = f"{point.seconds / base.seconds:.2f}×", f"1/{base.bytes / point.bytes:.1f}"
        rows.append(
            f"| {name} | {point.round} | {point.seconds:.1f} s | {ratios[0]} "
            f"| {point.bytes / 1e6:.2f} MB | {ratios[1]} |"
        )
    return "\n".join(rows) + "\n"


def _median(found: Sequence[Point | None]) -> Point | None:
    """Return the run in the middle by time; None where most did not reach the target."""
    known = sorted((p for p in found if p is not None), key=lambda point: point.seconds)
    if 2 * len(known) <= len(found):
        return None
    place = statistics.median_low(range(len(found)))
    return known[min(place, len(known) - 1)]


def draw(curves: dict[str, dict[str, list[list[Point]]]], path: Path) -> None:
    """Draw accuracy over simulated time and over bytes, of the first seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4 * len(curves)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(curves), 2, sharey="row", squeeze=False)
    for row, (task, methods) in zip(panels, curves.items(), strict=True):
        for index, (name, runs) in enumerate(methods.items()):
            points = runs[0]
            heights = [point.accuracy for point in points]
            style = "--" if "waits" in name else "-"
            for panel, x in zip(
                row, ([p.seconds for p in points], [p.bytes for p in points]), strict=True
            ):
                panel.plot(x, heights, style, color=f"C{index}", label=name, linewidth=1.4)
        for panel, label in zip(row, ("simulated seconds", "bytes, both directions"), strict=True):
            panel.axhline(TARGETS[task], color="#999999", linewidth=0.8)
            panel.set_xlabel(label)
            panel.set_xscale("log")
            panel.grid(True, color="#dddddd", linewidth=0.7)
            panel.spines[["top", "right"]].set_visible(False)
        row[0].set_ylabel(f"{task}: test accuracy")
    panels[0][0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run all, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--task", choices=sorted(TASKS), action="append", dest="tasks")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--every", type=int, default=5, help="rounds between measurements")
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("AQG_DATA_DIR"))
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--picture", type=Path, default=Path("docs/images/late.png"))
    options = parser.parse_args()
    if options.seeds < 1 or options.every < 1:
        parser.error(f"seeds is {options.seeds}, every {options.every}; both must be at least 1")
    curves: dict[str, dict[str, list[list[Point]]]] = {}
    texts, rows = [], []
    for task in options.tasks or list(TASKS):
        for method in METHODS:
            for seed in range(options.seeds):
                points = run(task, method, seed, options.every, options.data_dir)
                curves.setdefault(task, {}).setdefault(method, []).append(points)
                rows += [(task, method, seed, *point) for point in points]
                print(f"{task}, {method}, seed {seed}: {points[-1]}", flush=True)
        texts.append(table(task, curves[task]))
        print(texts[-1], flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    text = (__doc__.partition("Writes")[0]).strip()
    head = f"# Late clients\n\n{text}\n\nMedians over seeds; here {options.seeds}.\n\n"
    (options.out / "late.md").write_text(
        head + "\n".join(texts) + "\n![](../docs/images/late.png)\n"
    )
    with (options.out / "late.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows((*row[:4], f"{row[4]:.2f}", row[5], f"{row[6]:.4f}") for row in rows)
    draw(curves, options.picture)


if __name__ == "__main__":
    main()
