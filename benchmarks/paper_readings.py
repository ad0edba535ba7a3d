"""What other readings of the paper give: its grid's size, and what Augmented AQG amplifies.

    python benchmarks/paper_readings.py grids      # 2^b values (ours), or 2^b - 1 (in the paper)
    python benchmarks/paper_readings.py amplified  # the sum (ours), or the round's uploads
    python benchmarks/paper_readings.py check      # the loop below sends what the engine sends

The rounds are a plain loop over full gradients that reads like the paper's Algorithms 1 and 2. It
trains softmax regression on part of MNIST, in float32, for fewer rounds than the paper's 4,000, so
that all of it takes minutes on one core; what `aqg reproduce` runs is the paper's length.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aqg.core.grids import Grid
from aqg.core.policies import Case, Lazy, Multilevel, TwoLevel
from aqg.core.quantizers import GridQuantizer, Request
from aqg.core.recipe import Movement
from aqg.core.recipes import make_recipe
from aqg.runs.config import resolve
from aqg.runs.setup import build_problem, find_minimum
from aqg.sim.engine import FastSimulation
from aqg.sim.training import Dropout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aqg.core.policies import Policy
    from aqg.sim.problem import Problem

BITS, DEPTH, STALENESS, ALPHA = 4, 10, 100, 0.02
RULES: dict[str, Policy] = {"laq": Lazy(), "aqg-2": TwoLevel(), "aqg": Multilevel()}
GRIDS = {"2^b": Grid.MIDRISE, "2^b - 1": Grid.MIDTREAD}


class Round(NamedTuple):
    loss: float
    uploads: int
    bits: int


def rounds(
    problem: Problem, policy: Policy, grid: Grid, amplified: str, dropout: Dropout, count: int
) -> Iterator[Round]:
    """Run Algorithm 1, or 2 where something is amplified: ``"sum"``, ``"uploads"`` or ``""``."""
    quantizer, movement = GridQuantizer(grid, BITS), Movement((1 / DEPTH,) * DEPTH)
    theta = problem.initial_params.copy()
    num_clients = len(problem.clients)
    mirrors = np.zeros((num_clients, len(theta)), theta.dtype)
    stored, silent = np.zeros((num_clients, BITS)), np.zeros(num_clients, int)
    history: tuple[float, ...] = ()
    for number in range(1, count + 1):
        computed = [problem.objective.losses_and_gradients(theta, *c) for c in problem.clients]
        losses, gradients = zip(*computed, strict=True)
        deltas = np.stack(gradients) - mirrors
        measured = quantizer.measure(deltas)
        wanted = policy.decide(Case(measured, movement.of(history), stored))
        present = ~dropout.dropped(number, num_clients)
        silent[present] += 1
        senders = np.flatnonzero(present & (wanted.send | (silent > STALENESS)))
        silent[senders] = 0
        stored[senders] = measured.errors[senders]
        for m in senders:
            width = int(wanted.width[m])
            request = Request(width, float(measured.steps[m, width - 1]))
            mirrors[m] += quantizer.quantize(deltas[m], request).values(theta.dtype.type)
        direction = mirrors.sum(axis=0, dtype=np.float64)
        if amplified == "sum":
            direction /= 1 - dropout.rate
        elif amplified == "uploads":  # Q/(1-p) of those that upload, the others as they are known
            extra = mirrors[senders].sum(axis=0, dtype=np.float64)
            direction += dropout.rate / (1 - dropout.rate) * extra
        history = movement.extend(history, float(direction @ direction) / num_clients**2)
        theta = theta - (ALPHA * direction).astype(theta.dtype)
        yield Round(float(np.mean(losses)), len(senders), int(wanted.width[senders].sum()))


class Result(NamedTuple):
    """What a run cost until its loss stayed within the residual, and where it ended."""

    bits: int | None
    uploads: int
    rounds: int
    residual: float
    runs_away: bool


def run(
    split: str,
    seed: int,
    rule: str,
    grid: str,
    amplified: str,
    rate: float,
    given: argparse.Namespace,
) -> Result:
    (config,) = resolve(
        {
            "dataset": "mnist",
            "partition": split,
            "recipe": "laq",
            "seed": seed,
            "samples": given.samples,
            "dtype": "float32",
        },
        given.data_dir,
    )
    problem = build_problem(config, given.data_dir)
    minimum = find_minimum(config, problem)
    assert minimum is not None
    dropout = Dropout(rate, config.seed)
    records = list(rounds(problem, RULES[rule], GRIDS[grid], amplified, dropout, given.rounds))
    losses = np.array([record.loss for record in records])
    outside = np.flatnonzero(~(losses - minimum <= given.residual))
    end = int(outside[-1]) + 1 if len(outside) else 0
    arrives = end < len(losses)
    spent = records[:end] if arrives else records
    return Result(
        sum(record.bits for record in spent) if arrives else None,
        sum(record.uploads for record in spent),
        len(spent),
        float(losses[-1] - minimum),
        not losses[-1] <= losses[0],
    )


def show(title: str, results: list[Result], base: list[Result]) -> None:
    """Print a row: seeds that arrive, and what they cost; bits against ``base``, seed by seed."""
    arrived = [one for one in results if one.bits is not None]
    text = f"{title:34} {len(arrived)} of {len(results)} arrive"
    if arrived:
        text += (
            f", {median(one.rounds for one in arrived):.0f} rounds, "
            f"{median(one.uploads for one in arrived):.0f} uploads, "
            f"{median(one.bits or 0 for one in arrived):.0f} bits"
        )
    pairs = zip(results, base, strict=True)
    ratios = [a.bits / b.bits for a, b in pairs if a.bits is not None and b.bits]
    if ratios and results is not base:
        text += f", {median(ratios):.2f} [{min(ratios):.2f}..{max(ratios):.2f}] of the bits"
    if away := sum(one.runs_away for one in results):
        text += f", {away} end above their first loss"
    print(f"{text}; ends at {median(one.residual for one in results):.0e}", flush=True)


def compare_grids(given: argparse.Namespace) -> None:
    for split in given.splits:
        for grid in given.grids:
            base: list[Result] = []
            for rule in given.rules:
                results = [run(split, s, rule, grid, "", 0.0, given) for s in range(given.seeds)]
                base = base or results
                show(f"{split}, {grid} values, {rule}", results, base)


def compare_amplified(given: argparse.Namespace) -> None:
    for split in given.splits:
        for rate in given.rates:
            base: list[Result] = []
            for amplified in ("", "sum", "uploads"):
                results = [
                    run(split, s, "aqg-2", "2^b", amplified, rate, given)
                    for s in range(given.seeds)
                ]
                base = base or results
                show(f"{split}, p = {rate:g}, {amplified or 'nothing'} amplified", results, base)


def check(given: argparse.Namespace) -> None:
    """Compare with the engine: both readings of the grid, and the sum amplified."""
    (config,) = resolve({"dataset": "digits", "partition": "label", "recipe": "laq", "clients": 10})
    problem = build_problem(config)
    for rule, amplified, rate in (("laq", "", 0.0), ("aqg", "", 0.3), ("aqg-2", "sum", 0.3)):
        for grid in GRIDS.values():
            dropout = Dropout(rate, 1)
            recipe = replace(
                make_recipe("aqg-augmented" if amplified else rule, BITS, STALENESS),
                quantizer=GridQuantizer(grid, BITS),
            )
            simulation = FastSimulation(problem, recipe, ALPHA, dropout)
            found = list(rounds(problem, RULES[rule], grid, amplified, dropout, given.rounds))
            for ours, theirs in zip(found, simulation.run_rounds(given.rounds), strict=True):
                sent = [width for width in theirs.widths if width > 0]
                if (ours.uploads, ours.bits) != (len(sent), sum(sent)):
                    raise SystemExit(f"{rule}, {grid}: round {theirs.round} differs")
            print(f"{rule}, {grid}, p = {rate}: {given.rounds} rounds send the same", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["grids", "amplified", "check"])
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--residual", type=float, default=1e-3)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 0.8])
    parser.add_argument("--splits", nargs="+", default=["iid", "label"])
    parser.add_argument("--rules", nargs="+", default=list(RULES), choices=list(RULES))
    parser.add_argument("--grids", nargs="+", default=list(GRIDS), choices=list(GRIDS))
    parser.add_argument("--data-dir", type=Path)
    given = parser.parse_args(arguments)
    start = time.process_time()
    actions = {"grids": compare_grids, "amplified": compare_amplified, "check": check}
    actions[given.what](given)
    print(f"{time.process_time() - start:.0f} s of processor time")


if __name__ == "__main__":
    main()
