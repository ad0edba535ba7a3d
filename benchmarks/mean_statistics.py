"""Which statistics of batch normalization fit the mean over the last models.

    python benchmarks/mean_statistics.py [TASK] [--rounds 60] [--every 6] [--seed 0] [--halves]

TASK is one of ``aqg compare`` with batch normalization: ``watch`` or
``cifar10-batchnorm``. It is run with nothing set. Printed are validation accuracies: of the last
model; of the mean over the models with the statistics of the last round; of that mean with the mean
of their statistics, which is what a run reports; and of that mean with statistics measured anew on
2,048 samples of the clients, which a server cannot do. The last line is what share of all bytes the
statistics were. With ``--halves`` they travel in half precision, as they do beside updates in full.
"""

from __future__ import annotations

import argparse
import copy
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from aqg.runs.setup import build_problem, make_simulation
from aqg.studies.contest.tasks import TASKS

if TYPE_CHECKING:
    from aqg.objectives.layout import Buffers
    from aqg.sim.problem import Problem

_NUM_MEASURED, _BATCH = 2048, 256


def main() -> None:
    """Run, and print four accuracies every few rounds."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("task", nargs="?", choices=("watch", "cifar10-batchnorm"), default="watch")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--every", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--halves", action="store_true", help="send statistics in half precision")
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("AQG_DATA_DIR"))
    options = parser.parse_args()
    config = replace(
        TASKS[options.task].config,
        recipe="auto",
        seed=options.seed,
        step="auto",
        downlink="auto",
        device="cpu",
    )
    simulation = make_simulation(config, build_problem(config, options.data_dir))
    problem, statistics = simulation.problem, simulation.statistics
    if options.halves:
        carrier = statistics._carrier
        carrier._shared = carrier._shared._replace(fine=True)
        carrier._start, carrier._known = carrier._shared.received
    totals, total_bytes, own_bytes = [], 0, 0
    for number in range(1, options.rounds + 1):
        record = simulation.run_round(evaluate=False)
        total_bytes += record.upload_bytes + record.download_bytes
        own_bytes += record.statistics_upload_bytes + record.statistics_download_bytes
        if number % options.every:
            continue
        now, mean = statistics.buffers(), statistics.averaged()
        found = [
            _accuracy(problem, simulation.parameters, now),
            _accuracy(problem, simulation.averaged, now),
            _accuracy(problem, simulation.averaged, mean),
            _accuracy(problem, simulation.averaged, mean, anew=True),
        ]
        totals.append(found)
        _print(f"round {number}", found)
    _print("mean", np.mean(totals, axis=0))
    print(f"statistics: {own_bytes / total_bytes:.1%} of {total_bytes / 1e6:.2f} MB")


def _accuracy(
    problem: Problem, params: np.ndarray, buffers: Buffers, *, anew: bool = False
) -> float:
    """Return the accuracy of the module with these parameters and buffers."""
    objective, validation = problem.objective, problem.validation
    module: nn.Module = copy.deepcopy(objective.module)
    objective.model_layout.load(module, params)
    objective.model_layout.write_buffers(module, buffers)
    with torch.no_grad():
        if anew:
            _measure_statistics(module, problem)
        module.eval()
        inputs = torch.from_numpy(validation.features).float()
        outputs = torch.cat([module(part) for part in torch.split(inputs, _BATCH)])
    return float(np.mean(outputs.argmax(1).numpy() == validation.labels))


def _measure_statistics(module: nn.Module, problem: Problem) -> None:
    """Replace running statistics by those of some samples of all clients."""
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.reset_running_stats()
            layer.momentum = None
    features = np.concatenate([samples.features for samples in problem.clients])
    chosen = np.random.default_rng(0).permutation(len(features))[:_NUM_MEASURED]
    for part in torch.split(torch.from_numpy(features[chosen]).float(), _BATCH):
        if len(part) > 1:
            module.train()(part)


def _print(name: str, found: list[float]) -> None:
    last, by_last, by_mean, anew = (f"{value:.1%}" for value in found)
    print(
        f"{name}: the last model {last}; the mean {by_last} with the last statistics, "
        f"{by_mean} with their mean, {anew} with new ones",
        flush=True,
    )


if __name__ == "__main__":
    main()
