"""A process that runs rounds of one workload on demand: the far side of ``engine_senders.py``.

It imports whichever ``aqg`` is on its path, so that two checkouts can take turns. It reads one
request per line, ``{"contestant": ..., "senders": ..., "rounds": ...}``, and answers with one line.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "8")  # as in engine.py

import json
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
from engine_bare import bare_gradient, numpy_gradient
from engine_workloads import WORKLOADS, make_data, make_problem

from aqg.core.recipes import make_recipe
from aqg.sim.engine import FastSimulation

NEVER = 1 << 40


class ForcedSenders:
    """A recipe's own policy, but for who sends: everyone, a tenth of the clients in turn, or none.

    Widths are those that the policy chooses.
    """

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self.senders = "everyone"
        self._num_asked = 0

    def decide(self, *arguments: Any, **named: Any) -> Any:
        decision = self.policy.decide(*arguments, **named)
        turns = (self._num_asked + np.arange(decision.send.size)) % 10
        self._num_asked += decision.send.size
        send = {"everyone": turns >= 0, "a tenth": turns == 0, "none": turns < 0}[self.senders]
        return decision._replace(send=send.reshape(decision.send.shape))


class Worker:
    """The contestants of one workload, made when they are first asked for."""

    def __init__(self, name: str, num_clients: int) -> None:
        self.workload = WORKLOADS[name]._replace(num_clients=num_clients)
        self.data = make_data(self.workload)
        self.problem = make_problem(self.workload, self.data)
        self.bare: dict[str, Any] = {}
        self.simulations: dict[str, tuple[ForcedSenders, FastSimulation]] = {}

    def run(self, contestant: str, senders: str, rounds: int) -> dict[str, float]:
        if contestant.startswith("bare"):
            compute = self._bare(contestant)
            return _timed(lambda: [compute() for _ in range(rounds)] and [], rounds)
        policy, simulation = self._simulation(contestant)
        policy.senders = senders
        return _timed(lambda: [simulation.run_round() for _ in range(rounds)], rounds)

    def _bare(self, contestant: str) -> Any:
        if contestant not in self.bare:
            self.bare[contestant] = (
                numpy_gradient(self.problem, self.data)
                if contestant == "bare (NumPy)"
                else bare_gradient(self.workload, self.problem, self.data, "cpu")
            )
        return self.bare[contestant]

    def _simulation(self, name: str) -> tuple[ForcedSenders, FastSimulation]:
        if name not in self.simulations:
            recipe = make_recipe(name)
            policy = ForcedSenders(recipe.policy)
            recipe = replace(recipe, policy=policy, max_staleness=NEVER)
            simulation = FastSimulation(self.problem, recipe, self.workload.step_size)
            self.simulations[name] = policy, simulation
        return self.simulations[name]


def _timed(run: Any, rounds: int) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    records = run()
    return {
        "wall": (time.perf_counter() - wall) / rounds,
        "cpu": (time.process_time() - cpu) / rounds,
        "uploads": sum(record.num_uploads for record in records) / rounds,
        "bytes": sum(record.upload_bytes for record in records) / rounds,
    }


def main() -> None:
    worker = Worker(sys.argv[1], int(sys.argv[2]))
    for line in sys.stdin:
        print(json.dumps(worker.run(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
