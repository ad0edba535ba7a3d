"""What worker processes do for a comparison: make data and minima ready, and run trials."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aqg.studies.compare.ledger import Ledger
from aqg.studies.compare.own import check_problem
from aqg.studies.compare.own_trial import run_own_trial
from aqg.studies.compare.problems import Workshop
from aqg.studies.compare.trial import Limits, run_trial
from aqg.warmup import warm_up

if TYPE_CHECKING:
    from pathlib import Path

    from aqg.runs.executor import Contact
    from aqg.studies.compare.tasks import Task
    from aqg.studies.compare.trial import Outcome, Trial

_SECONDS_BETWEEN_LOOKS = 0.5


def compile_kernels(contact: Contact) -> None:  # noqa: ARG001
    """Compile what all trials use, so that they find it on disk."""
    warm_up()


@dataclass(frozen=True)
class Prepare:
    """Load a task's data and find its minimum."""

    task: Task
    seed: int
    data_dir: Path | None

    def __call__(self, contact: Contact) -> None:  # noqa: ARG002
        """Leave the minimum in the cache."""
        workshop = _workshop(self.data_dir)
        problem = workshop.problem(self.task, self.seed)
        if self.task.config is not None:
            check_problem(self.task, problem)
        workshop.minimum(self.task, self.seed)


@dataclass(frozen=True)
class RunTrial:
    """Run a trial and write its outcome down.

    With ``is_search``, it is abandoned when others that reached the target show that its cost is
    of no interest; see `Ledger.limits`.
    """

    trial: Trial
    task: Task
    directory: Path
    device: str
    data_dir: Path | None
    is_search: bool

    def __call__(self, contact: Contact) -> Outcome:  # noqa: ARG002
        """Return the outcome as well."""
        workshop = _workshop(self.data_dir)
        ledger = Ledger(self.directory)
        next_look, limits = 0.0, Limits()

        def look() -> Limits:
            nonlocal next_look, limits
            if self.is_search and time.monotonic() >= next_look:
                next_look = time.monotonic() + _SECONDS_BETWEEN_LOOKS
                limits = ledger.limits(self.trial)
            return limits

        problem = workshop.problem(self.task, self.trial.seed)
        device = self.device if self.task.uses_device else "cpu"
        if self.task.config is None:
            minimum = workshop.minimum(self.task, self.trial.seed)
            outcome = run_trial(self.trial, self.task, problem, minimum, device, look)
        else:
            outcome = run_own_trial(self.trial, self.task, problem, self.directory, device, look)
        ledger.add(outcome)
        gc.collect()  # graphs on a GPU hold on to each other, and to its memory
        return outcome


_workshops: dict[Path | None, Workshop] = {}
"""The worker's own, kept from trial to trial."""


def _workshop(data_dir: Path | None) -> Workshop:
    return _workshops.setdefault(data_dir, Workshop(data_dir))
