"""Outcomes on disk: ``trials.jsonl``, a line each, added by whichever process has finished one."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from aqg.compare.search import SEARCH_SEED
from aqg.compare.trial import CEILING, Limits, Outcome
from aqg.errors import RunError
from aqg.experiments.rundir import write_atomically

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from aqg.compare.trial import Trial

TRIALS = "trials.jsonl"


class Ledger:
    """The outcomes in one directory; reads only what was added since it last looked."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / TRIALS
        self._position = 0
        self._stored: dict[Trial, Outcome] = {}
        self._outcomes: dict[Trial, Outcome] = {}

    def repair(self) -> None:
        """Drop a last line that a kill cut short, so that the next one starts afresh."""
        if not self.path.exists():
            return
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(self.path, whole)

    def add(self, outcome: Outcome) -> None:
        """Append a line, in one piece: other processes may do the same."""
        line = _write(outcome)
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise RunError(f"{str(self.path)!r} cannot be written: {error.strerror}") from None
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def outcomes(self) -> dict[Trial, Outcome]:
        """Return all outcomes by trial; of one trial, the last counts.

        They are made `comparable`.
        """
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._position)
                content = file.read()
            whole = content.rfind(b"\n") + 1
            self._position += whole
            for line in content[:whole].splitlines():
                try:
                    outcome = Outcome.from_json(json.loads(line))
                except (ValueError, KeyError, TypeError) as error:
                    text = line[:40].decode(errors="replace")
                    raise RunError(
                        f"{str(self.path)!r} has a damaged line, {text!r} ({error!r}); delete it"
                    ) from None
                self._stored[outcome.trial] = outcome
            if whole:
                self._outcomes = comparable(self._stored)
        return self._outcomes

    def limits(self, trial: Trial) -> Limits:
        """Return the bytes beyond which the cost of a trial is of no interest.

        For a setting of the search: what the best setting of the same recipe needs, unless it was
        abandoned for that before and is run again, for a final. For all: so many times what the
        best recipe needs on the same task. Both are taken from seed 0, on which all are measured.
        """
        before = self.outcomes().get(trial)
        is_search = trial.seed == SEARCH_SEED and (before is None or before.ending != "costlier")
        own = every = math.inf
        for other, outcome in self.outcomes().items():
            if outcome.is_reached and (other.task, other.seed) == (trial.task, SEARCH_SEED):
                every = min(every, outcome.cost)
                if other.recipe == trial.recipe:
                    own = min(own, outcome.cost)
        uploads_only = any(o.download_bytes is None for o in self.outcomes().values())
        return Limits(own if is_search else math.inf, CEILING * every, uploads_only)

    def forget(self, recipes: Collection[str], tasks: Collection[str]) -> int:
        """Drop all trials of these recipes on these tasks, and return how many there were.

        The file is replaced whole or not at all; no one else may be writing to it.
        """
        self.outcomes()
        kept = [
            outcome
            for trial, outcome in self._stored.items()
            if trial.recipe not in recipes or trial.task not in tasks
        ]
        num_dropped = len(self._stored) - len(kept)
        if num_dropped:
            write_atomically(self.path, "".join(map(_write, kept)).encode())
            self._position, self._stored, self._outcomes = 0, {}, {}
        return num_dropped


def comparable(outcomes: Mapping[Trial, Outcome]) -> dict[Trial, Outcome]:
    """Return outcomes whose costs count the same: both directions, or uploads alone.

    A comparison from before downloads were counted has trials without; all of its trials are then
    returned without, also those that were run since.
    """
    if all(outcome.download_bytes is not None for outcome in outcomes.values()):
        return dict(outcomes)
    return {trial: replace(o, download_bytes=None) for trial, o in outcomes.items()}


def _write(outcome: Outcome) -> str:
    return json.dumps(outcome.to_json(), allow_nan=False) + "\n"
