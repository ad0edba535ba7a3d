"""The validation set: samples that the clients hold out, by which runs are tuned and stopped.

The test set is then looked at for reports only. A run with a ``validation`` share has a target on
this set, and its summary holds the *curve*: the accuracy or loss on the validation set after every
round, and every byte that all clients had sent and received by then. So does that of a run that
ends with another target, with what this is about.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from aqg.errors import ConfigError
from aqg.runs.cost import count_every_byte
from aqg.runs.directory import finite_or_none
from aqg.sim.problem import Samples

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aqg.runs.directory import Line
    from aqg.sim.engine import FastSimulation
    from aqg.sim.problem import Problem
    from aqg.sim.reference import ReferenceSimulation

_STREAM = 0xFA1D
"""Keeps the choice of samples apart from other random numbers of the same seed."""


def hold_out(problem: Problem, share: float, seed: int) -> Problem:
    """Return the problem with a share of every client's samples, drawn at random, held out.

    A client with one sample keeps it. A problem that has a validation set stays as it is.
    """
    if problem.validation is not None:
        return problem
    kept, held_out = [], []
    for client, (features, labels) in enumerate(problem.clients):
        order = np.random.default_rng([_STREAM, seed, client]).permutation(len(labels))
        count = min(len(labels) - 1, max(1, round(share * len(labels))))
        chosen, rest = np.sort(order[:count]), np.sort(order[count:])
        kept.append(Samples(features[rest], labels[rest]))
        held_out.append((features[chosen], labels[chosen]))
    features, labels = (np.concatenate(parts) for parts in zip(*held_out, strict=True))
    if not len(labels):
        raise ConfigError(f"validation is {share}; no client has 2 samples, to hold out one")
    return replace(problem, clients=tuple(kept), validation=Samples(features, labels))


class Validator:
    """Measures the current model of a simulation on the validation set, on the same device.

    Args:
        simulation: of a problem with a validation set.
        kind: ``"accuracy"`` or ``"loss"``.

    """

    def __init__(self, simulation: FastSimulation | ReferenceSimulation, kind: str) -> None:
        samples = simulation.problem.validation
        assert samples is not None, "a run with validation has a problem with it"
        self._simulation = simulation
        self._kind = kind
        backend = getattr(simulation, "backend", None)
        self._put = (lambda array: array) if backend is None else backend.put
        self._samples = Samples(*map(self._put, samples))

    def __call__(self) -> float:
        """Return the accuracy or the loss; NaN for a model that holds NaN or infinity."""
        params = self._simulation.averaged
        if not np.isfinite(params).all():
            return math.nan
        return self._simulation.problem.validate(self._put(params), self._samples, self._kind)


def curve(
    values: Sequence[float],
    lines: Sequence[Line],
    final_metrics: Mapping[str, float],
    first_model: int,
) -> dict[str, Any]:
    """Return a run's curve for its summary: entry ``k`` of each list is after ``k`` rounds.

    ``values`` are what the run's target is about. ``bytes`` are frames, heads of orders and
    replies, and ``first_model`` bytes for each client once (`aqg.runs.cost.count_every_byte`).
    ``tests`` are the test accuracies that were measured, as pairs of rounds and accuracy.
    """
    tests = [
        [line.record.round - 1, line.metrics["accuracy"]]
        for line in lines
        if "accuracy" in line.metrics
    ]
    if "accuracy" in final_metrics:
        tests.append([len(lines), final_metrics["accuracy"]])
    return {
        "values": [_shortened(value) for value in values],
        "bytes": count_every_byte((line.record for line in lines), first_model),
        "tests": tests,
    }


def _shortened(value: float) -> float | None:
    """Round to six digits, far below what a sample counts."""
    return finite_or_none(float(f"{value:.6g}"))
