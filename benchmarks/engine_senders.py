"""Rounds in which everyone sends, a tenth of the clients, and none: part of ``engine.py``.

Every checkout runs in a process of its own, with ``bare`` beside its simulations; processes and
contestants take turns, window by window, and the smallest mean over a window counts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_workloads import WORKLOADS

if TYPE_CHECKING:
    from collections.abc import Sequence

SENDERS = ("everyone", "a tenth", "none")
WINDOW_SECONDS = 0.5
"""A window is as many rounds as take about so long, but no more than the workload's."""
Key = tuple[str, str]
Results = dict[Key, dict[str, float]]


class Checkout:
    """A worker process that imports ``aqg`` from the sources of one checkout."""

    def __init__(self, root: Path, workload: str, num_clients: int) -> None:
        if not (root / "src" / "aqg").is_dir():
            raise SystemExit(f"{root} is no checkout: it has no src/aqg")
        script = Path(__file__).with_name("engine_worker.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), workload, str(num_clients)],
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
