"""The engine on a GPU: the part of ``engine.py`` behind ``--device cuda``."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import torch
from engine_bare import bare_gradient
from engine_workloads import WORKLOADS, make_data, make_problem

from aqg.core.recipes import make_recipe
from aqg.sim.engine import FastSimulation

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine_workloads import Workload

    from aqg.sim.problem import Problem


def measure_cuda(rounds: int) -> dict[str, Any]:
    """Rounds per second of ``lean`` on softmax, and W1 relative to its bare gradient."""
    workload = WORKLOADS["W4"]
    problems = {"W4": (make_problem(workload, make_data(workload)), workload.step_size)}
    for partition in ("iid", "label"):
        problem = mnist_problem(partition)
        if problem is not None:
            problems[f"MNIST, {partition}"] = (problem, 0.02)
    results: dict[str, Any] = {"rounds": rounds}
    for name, (problem, step_size) in problems.items():
        simulation = FastSimulation(problem, make_recipe("lean"), step_size, device="cuda")
        for _ in range(20):  # kernels are compiled, and the round is recorded
            simulation.run_round()
        start = time.perf_counter()
        records = list(simulation.run_rounds(rounds))
        seconds = time.perf_counter() - start
        results[name] = {
            "rounds_per_second": rounds / seconds,
            "uploads": sum(record.num_uploads for record in records),
            "upload_bytes": sum(record.upload_bytes for record in records),
            "first_loss": records[0].loss,
            "last_loss": records[-1].loss,
        }
        print(name, results[name], flush=True)
        del simulation
    results["W1"] = measure_cuda_against_bare(WORKLOADS["W1"])
    print("W1", results["W1"], flush=True)
    return results


def measure_cuda_against_bare(workload: Workload, window: int = 100) -> dict[str, float]:
    """Seconds per round, turn by turn: bare, and ``lean``."""
    data = make_data(workload)
    problem = make_problem(workload, data)
    bare = bare_gradient(workload, problem, data, "cuda")
    simulation = FastSimulation(problem, make_recipe("lean"), workload.step_size, device="cuda")
    uploads = 0

    def lean_rounds() -> None:
        nonlocal uploads
        uploads += sum(record.num_uploads for record in simulation.run_rounds(window))

    def bare_rounds() -> None:
        for _ in range(window):
            bare()

    for _ in simulation.run_rounds(window):
        pass
    contestants = {"bare": bare_rounds, "lean": lean_rounds}
    best = dict.fromkeys(contestants, float("inf"))
    for _ in range(workload.repetitions):
        for key, run in contestants.items():
            best[key] = min(best[key], _seconds(run) / window)
    return {
        **best,
        "uploads_per_round": uploads / window / workload.repetitions,
        "speed_of_bare": best["bare"] / best["lean"],
    }


def mnist_problem(partition: str) -> Problem | None:
    """Return full MNIST with softmax regression, ten clients; None where the data is missing."""
    from aqg.errors import AqgError
    from aqg.runs.config import RunConfig
    from aqg.runs.setup import build_problem

    data = {"dataset": "mnist", "partition": partition, "clients": 10, "dtype": "float32"}
    config = RunConfig(recipe="lean", model="softmax", rounds=1, alpha=0.02, **data)
    try:
        return build_problem(config)
    except AqgError as error:
        print(f"MNIST is left out: {error}", file=sys.stderr)
        return None


def _seconds(run: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start
