"""What clients need that missed some rounds: their entries one by one, merged, and a snapshot.

    python benchmarks/merging.py [--task sampled-dirichlet] [--rounds 150] [--seed 0]
                                 [--missed 1 5 10 50 140]

TASK is one of ``aqg compare`` with noisy updates; the recipe is ``auto``. A row has kB for one
client that missed so many rounds before the last one: all entries in one frame, the frame of their
sum, and a snapshot relative to the starting model; and two approximate models, the difference to
what the client holds in 2 and in 4 bits (`aqg.start`), with the error in its length.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from aqg.core.recipes import make_recipe
from aqg.runs.setup import build_problem
from aqg.sim.engine import FastSimulation
from aqg.start import pack, unpack
from aqg.studies.contest.tasks import TASKS
from aqg.wire.entry import Merger, encode_snapshot


def main() -> None:
    """Train, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--task", choices=sorted(TASKS), default="sampled-dirichlet")
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--missed", type=int, nargs="+", default=[1, 5, 10, 25, 50, 140])
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("AQG_DATA_DIR"))
    options = parser.parse_args()
    config = replace(TASKS[options.task].config, recipe="auto", seed=options.seed)
    simulation = FastSimulation(
        build_problem(config, options.data_dir),
        make_recipe("auto"),
        config.alpha,
        config.dropout_schedule(),
        config.seed,
        training=config.training(),
    )
    start = simulation.parameters.copy()
    log = simulation.log
    assert log is not None
    log.cut = lambda _oldest: None  # type: ignore[method-assign]  # every entry is kept
    held = {}
    for number in range(options.rounds):
        if options.rounds - number in options.missed:
            held[options.rounds - number] = simulation.parameters.copy()
        simulation.run_round(evaluate=False)
    public = simulation.model.public(simulation.space)
    merger = Merger(public)
    print(f"{options.task}, {options.rounds} rounds, {len(start)} parameters, kB")
    print("missed   entries   merged snapshot   2 bits    error   4 bits    error")
    for missed in options.missed:
        first = log.round - missed
        while merger.first > first:
            entry = log.entries[merger.first - 1 - log.first]
            assert isinstance(entry, bytes)
            if not merger.add(entry):
                raise SystemExit(f"entry {merger.first - 1} names another quantum")
        sizes = len(log.frame(first)), len(merger.frame()), len(encode_snapshot(public, start))
        text = " ".join(f"{size / 1000:8.1f}" for size in sizes)
        change = simulation.parameters - held[missed]
        for bits in (2, 4):
            frame = pack(change, simulation.problem.objective.layout, "rounded", bits=bits)
            left = change - unpack(frame, len(change), change.dtype)
            error = np.linalg.norm(left) / np.linalg.norm(change)
            text += f" {len(frame) / 1000:8.1f} {error:8.2f}"
        print(f"{missed:6} {text}")


if __name__ == "__main__":
    main()
