"""What a first model costs in each way it can travel, and what accuracy training from it reaches.

    python benchmarks/start.py [--models mlp:32,cnn] [--seeds 5] [--rounds 20] [--out FILE]

Models on digits, ten clients, ``auto`` with nothing set. The accuracy is that of the final
model on the test set, the mean over seeds; beside it is the difference from the module's own first
weights (``exact``) in points, paired by seed, with a 95 % interval of Student's. ``digest`` starts
from the same weights and is not run again. ``rounded:4`` is four bits per parameter.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

from scipy import stats

from aqg.runs.config import RunConfig, resolve
from aqg.runs.setup import build_problem, make_simulation, send_start
from aqg.sim.problem import Problem
from aqg.start import pack, unpack

MODELS = ("mlp:32", "cnn", "resnet8:width=4")
WAYS = ("exact", "digest", "rounded:4", "seed")
SETTINGS = {"dataset": "digits", "partition": "iid", "clients": 10, "batch_size": 16}


def main() -> None:
    """Run, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("results/start.md"))
    arguments = parser.parse_args()
    lines = [
        f"First models on digits, {arguments.seeds} seeds, {arguments.rounds} rounds"
        f" (`python benchmarks/start.py --models {arguments.models}`).",
        "",
        "| model | parameters | way | bytes | accuracy | against its own start, points |",
        "|---|---|---|---|---|---|",
    ]
    for model in arguments.models.split(","):
        rows = {
            way: [measure(model, way, seed, arguments.rounds) for seed in range(arguments.seeds)]
            for way in WAYS
        }
        own = [accuracy for _, _, accuracy in rows["exact"]]
        for way, found in rows.items():
            size, length = round(fmean(row[1] for row in found)), found[0][0]
            accuracies = [row[2] for row in found] if way != "digest" else own
            lines.append(
                f"| {model} | {length:,} | {way} | {size:,} | {fmean(accuracies):.1%} | "
                f"{difference(accuracies, own) if way not in ('exact', 'digest') else ''} |"
            )
            print(lines[-1], flush=True)
    arguments.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def measure(model: str, way: str, seed: int, rounds: int) -> tuple[int, int, float]:
    """Return the number of parameters, the bytes of the first model and the final accuracy."""
    name, _, bits = way.partition(":")
    settings = {**SETTINGS, "model": model, "local_steps": 5, "rounds": rounds, "seed": seed}
    (config,) = resolve({**settings, "recipe": "auto", "start": "exact"})
    problem = build_problem(config)
    if bits:
        params, layout = problem.initial_params, problem.objective.layout
        message = pack(params, layout, name, bits=int(bits))
        started = unpack(message, len(params), params.dtype)
        problem = replace(problem, initial_params=started, start_bytes=len(message))
    else:
        problem = send_start(problem, name, seed)
    size = len(problem.initial_params), problem.start_bytes
    return (*size, 0.0 if way == "digest" else final_accuracy(config, problem))


def final_accuracy(config: RunConfig, problem: Problem) -> float:
    """Train, and return the accuracy on the test set."""
    simulation = make_simulation(config, problem)
    for _ in range(config.rounds):
        simulation.run_round(evaluate=False)
    return simulation.problem.measure(simulation.averaged)["accuracy"]


def difference(ours: list[float], own: list[float]) -> str:
    """Return the mean difference in points and its 95 % interval."""
    points = [100 * (a - b) for a, b in zip(ours, own, strict=True)]
    if len(points) < 2:
        return f"{points[0]:+.2f}"
    half = float(stats.t.ppf(0.975, len(points) - 1)) * stdev(points) / len(points) ** 0.5
    return f"{fmean(points):+.2f} ± {half:.2f}"


if __name__ == "__main__":
    main()
