"""Outcomes on disk: ``trials.jsonl``, a line each, added by whichever process has finished one."""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING

from aqg.compare.trial import Outcome
from aqg.errors import RunError

if TYPE_CHECKING:
    from pathlib import Path

    from aqg.compare.trial import Trial

TRIALS = "trials.jsonl"


class Ledger:
    """The outcomes in one directory; reads only what was added since it last looked."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / TRIALS
        self._position = 0
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
        line = json.dumps(outcome.to_json(), allow_nan=False) + "\n"
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise RunError(f"{str(self.path)!r} cannot be written: {error.strerror}") from None
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def outcomes(self) -> dict[Trial, Outcome]:
        """Return all outcomes by trial; of one trial, the last counts."""
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
                self._outcomes[outcome.trial] = outcome
        return self._outcomes

    def fewest_bytes(self, trial: Trial) -> float:
        """Return what the best setting so far needs for the same task, recipe and seed."""
        costs = [
            outcome.upload_bytes
            for other, outcome in self.outcomes().items()
            if (other.task, other.recipe, other.seed) == (trial.task, trial.recipe, trial.seed)
            and outcome.is_reached
        ]
        return min(costs, default=math.inf)
