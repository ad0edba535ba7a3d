"""What the last bit of the data changes: logistic runs repeated with perturbed features.

Two machines that round sums in another order differ in the last bit, so data perturbed by one unit
in the last place stand in for another machine. A difference can decide who speaks once the loss is
as close to its minimum as rounding lets it come; uploads until then are counted apart.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from aqg.runs.directory import write_atomically
from aqg.runs.processes import Done, Failed
from aqg.runs.setup import build_problem, find_minimum, make_simulation
from aqg.runs.summary import has_diverged
from aqg.sim.problem import Samples

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from aqg.core.types import FloatArray
    from aqg.errors import AqgError
    from aqg.runs.config import RunConfig
    from aqg.runs.processes import Report, Workers
    from aqg.sim.problem import Problem

PERTURBED = "rounding.csv"
JOURNAL = "rounding.jsonl"
ROUNDING = 1e-12
"""A residual that is hardly more than the rounding of a loss of about 70."""
_SEED_STREAM = 0x756C70  # keeps these draws apart from others made with the same seed


@dataclass(frozen=True)
class Perturbed:
    """One run on perturbed data.

    Attributes:
        partition: how the data was split.
        recipe: its spec.
        alpha: the step size.
        draw: the number of the perturbation; 0 is the data as it is.
        uploads: in all rounds.
        uploads_before: until the loss first came within `ROUNDING` of the minimum.
        bits_per_param: in all rounds.
        residual: ``f(θ) - f*`` at the end; infinity where it diverged.

    """

    partition: str
    recipe: str
    alpha: float
    draw: int
    uploads: int
    uploads_before: int
    bits_per_param: int
    residual: float

    @property
    def key(self) -> tuple[str, str, float, int]:
        """What tells runs apart."""
        return self.partition, self.recipe, self.alpha, self.draw

    @staticmethod
    def from_row(row: Mapping[str, Any]) -> Perturbed:
        """Read a row of ``rounding.csv`` or a line of the journal."""
        return Perturbed(
            row["partition"],
            row["recipe"],
            float(row["alpha"]),
            int(row["draw"]),
            int(row["uploads"]),
            int(row["uploads_before"]),
            int(row["bits_per_param"]),
            float(row["residual"]),
        )


def perturb(features: FloatArray, draw: int) -> FloatArray:
    """Return features of which a third each are one unit in the last place higher, lower, the same.

    Zeros stay zeros, and draw 0 changes nothing.

    >>> features = np.array([1.0, 0.0, -2.5])
    >>> bool(np.all(perturb(features, 0) == features)), float(perturb(features, 1)[1])
    (True, 0.0)
    >>> float(np.abs(perturb(np.full(100, 1.5), 1) / 1.5 - 1).max()) <= 2**-52
    True
    """
    if draw == 0:
        return features
    direction = np.random.default_rng([draw, _SEED_STREAM]).integers(-1, 2, features.shape)
    moved = np.nextafter(features, np.copysign(np.inf, direction)).astype(features.dtype)
    perturbed: FloatArray = np.where((direction == 0) | (features == 0), features, moved)
    return perturbed


def perturb_problem(problem: Problem, draw: int) -> Problem:
    """Return the problem with every client's features perturbed."""
    clients = tuple(
        Samples(perturb(samples.features, draw * problem.num_clients + m if draw else 0), labels)
        for m, samples in enumerate(problem.clients)
        for labels in (samples.labels,)
    )
    return replace(problem, clients=clients)


@dataclass(frozen=True)
class PerturbedRun:
    """A task for a worker process: one run on perturbed data."""

    config: RunConfig
    draw: int
    data_dir: Path | None

    @property
    def key(self) -> tuple[str, str, float, int]:
        """What tells runs apart."""
        return self.config.partition, self.config.recipe, self.config.alpha, self.draw

    def __call__(self, report: Report) -> Perturbed:  # noqa: ARG002
        """Run it."""
        problem = build_problem(self.config, self.data_dir)
        minimum = find_minimum(self.config, problem)
        assert minimum is not None, "logistic regression with l2 above 0 is convex"
        simulation = make_simulation(self.config, perturb_problem(problem, self.draw))
        uploads = uploads_before = bits = 0
        is_before = True
        for _ in range(self.config.rounds):
            record = simulation.run_round()
            assert record.loss is not None
            is_before = is_before and not record.loss - minimum <= ROUNDING
            uploads += record.num_uploads
            uploads_before += record.num_uploads if is_before else 0
            bits += record.bits_per_param
            if has_diverged(record.loss):
                break
        loss = simulation.loss()
        residual = np.inf if has_diverged(loss) else loss - minimum
        return Perturbed(
            self.config.partition,
            self.config.recipe,
            self.config.alpha,
            self.draw,
            uploads,
            uploads_before,
            bits,
            float(residual),
        )


def read_journal(directory: Path) -> list[Perturbed]:
    """Return the runs that are done; a last line cut short by a crash is left out."""
    path = directory / JOURNAL
    if not path.exists():
        return []
    return list(_lines(path.read_text(encoding="utf-8")))


def _lines(text: str) -> Iterator[Perturbed]:
    for line in text.splitlines():
        try:
            yield Perturbed.from_row(json.loads(line))
        except (ValueError, KeyError, TypeError):
            return


def left_to_do(tasks: Sequence[PerturbedRun], directory: Path) -> list[PerturbedRun]:
    """Return the runs that the journal does not have."""
    done = {one.key for one in read_journal(directory)}
    return [task for task in tasks if task.key not in done]


def run_perturbed(
    workers: Workers, tasks: Sequence[PerturbedRun], directory: Path
) -> dict[str, AqgError]:
    """Run them and write each into the journal; return what failed, by name."""
    directory.mkdir(parents=True, exist_ok=True)
    before = "".join(map(_line, read_journal(directory)))
    write_atomically(directory / JOURNAL, before.encode())
    failures: dict[str, AqgError] = {}
    with (directory / JOURNAL).open("a", encoding="utf-8") as file:

        def take(event: object) -> None:
            if isinstance(event, Done):
                file.write(_line(event.value))
                file.flush()
            if isinstance(event, Failed):
                failures["rounding_{}_{}_{:g}_{}".format(*tasks[event.index].key)] = event.error

        workers.run(tasks, take)
    return failures


def _line(one: Perturbed) -> str:
    return json.dumps(asdict(one)) + "\n"
