"""Rounds in which everyone sends, a tenth of the clients, and none: part of ``engine.py``.

Every checkout runs in a process of its own, with ``bare`` beside its simulations; processes and
contestants take turns, window by window, and the smallest mean over a window counts. Run as a
script, this is such a process: it imports whichever ``aqg`` is on its path, reads one request per
line, ``{"contestant": ..., "senders": ..., "rounds": ...}``, and answers with one line.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "8")  # as in engine.py

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from engine_bare import bare_gradient, numpy_gradient
from engine_workloads import WORKLOADS, make_data, make_problem

from aqg.core.recipes import make_recipe
from aqg.sim.engine import FastSimulation

if TYPE_CHECKING:
    from collections.abc import Sequence

SENDERS = ("everyone", "a tenth", "none")
WINDOW_SECONDS = 0.5
"""A window is as many rounds as take about so long, but no more than the workload's."""
Key = tuple[str, str]
Results = dict[Key, dict[str, float]]
NEVER = 1 << 40


class Checkout:
    """A worker process that imports ``aqg`` from the sources of one checkout."""

    def __init__(self, root: Path, workload: str, num_clients: int) -> None:
        if not (root / "src" / "aqg").is_dir():
            raise SystemExit(f"{root} is no checkout: it has no src/aqg")
        self._process = subprocess.Popen(
            [sys.executable, __file__, workload, str(num_clients)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(root / "src")},
        )

    def run(self, key: Key, rounds: int) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"contestant": key[0], "senders": key[1], "rounds": rounds}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"the worker ended in {key}, exit code {self._process.wait()}")
        timing: dict[str, float] = json.loads(answer)
        return timing

    def close(self) -> None:
        self._process.communicate()


def measure_senders(
    name: str,
    recipes: Sequence[str],
    num_clients: int,
    against: Path | None,
    clock: str,
    repetitions: int,
) -> dict[str, Results]:
    """Return what each contestant took, by checkout: ``new``, and ``old`` if there is one."""
    here = Path(__file__).resolve().parents[1]
    roots = {"new": here} if against is None else {"new": here, "old": against.resolve()}
    checkouts = {label: Checkout(root, name, num_clients) for label, root in roots.items()}
    keys: list[Key] = [("bare", "")]
    if WORKLOADS[name].model == "logistic":
        keys.append(("bare (NumPy)", ""))
    keys += [(recipe, senders) for recipe in recipes for senders in SENDERS]
    try:
        return _take_turns(checkouts, keys, clock, WORKLOADS[name].window, repetitions)
    finally:
        for checkout in checkouts.values():
            checkout.close()


def _take_turns(
    checkouts: dict[str, Checkout], keys: list[Key], clock: str, longest: int, repetitions: int
) -> dict[str, Results]:
    windows = {}
    for key in keys:
        warm = [checkout.run(key, 2) for checkout in checkouts.values()]
        seconds = min(timing["wall"] for timing in warm)
        windows[key] = max(1, min(longest, round(WINDOW_SECONDS / seconds)))
    best: dict[str, Results] = {label: {} for label in checkouts}
    differing = set()
    for turn in range(repetitions):
        order = list(checkouts) if turn % 2 == 0 else list(checkouts)[::-1]
        for key in keys:
            num_bytes = set()
            for label in order:
                timing = checkouts[label].run(key, windows[key])
                num_bytes.add(timing["bytes"])
                if key not in best[label] or timing[clock] < best[label][key][clock]:
                    best[label][key] = timing
            if len(num_bytes) > 1:
                differing.add(" ".join(key))
    if differing:
        print(f"the checkouts sent different numbers of bytes: {', '.join(sorted(differing))}")
    return best


def print_senders(name: str, num_clients: int, results: dict[str, Results], clock: str) -> None:
    old = results.get("old")
    print(f"\n{name}: {num_clients} clients, {WORKLOADS[name].model}; seconds by {clock} clock")
    heads = ["s/round", "× bare", "uploads", "bytes"]
    if old is not None:
        heads += ["old s/round", "× bare", "new/old"]
    print(f"{'':24}" + "".join(f"{head:>13}" for head in heads))
    for key, timing in results["new"].items():
        cells = [f"{timing[clock]:.6f}", _ratio(results["new"], key, clock)]
        cells += [f"{timing['uploads']:.1f}", f"{timing['bytes']:.0f}"]
        if old is not None:
            cells += [f"{old[key][clock]:.6f}", _ratio(old, key, clock)]
            cells.append(f"{timing[clock] / old[key][clock]:.2f}")
        print(f"{' '.join(key):24}" + "".join(f"{cell:>13}" for cell in cells), flush=True)


def _ratio(results: Results, key: Key, clock: str) -> str:
    return f"{results[key][clock] / results[('bare', '')][clock]:.2f}"


def as_json(results: dict[str, Results]) -> dict[str, Any]:
    return {
        label: {" ".join(key).strip(): timing for key, timing in contestants.items()}
        for label, contestants in results.items()
    }


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
