"""Runs of the digits app on a deployment, watched from the files that they write."""

import json
import time
from pathlib import Path

from aqg.core.recipes import make_recipe
from aqg.sim.record import DROPPED

from tests.flower.own_messages import Saved

APP = Path(__file__).parent / "digits_app"
PRELOAD = ("aqg.flower", "aqg.flower.demo", "sklearn.datasets")
"""What apps import."""

PATIENCE_SECONDS = 180.0
"""How long to wait for what must happen: much longer than it takes on a busy machine."""


class WatchedRun:
    """A run of the digits app whose clients take orders to misbehave."""

    def __init__(self, deployment, directory, **config):
        self.deployment = deployment
        self.directory = directory
        self.number = 0
        own = {name.replace("_", "-"): value for name, value in config.items()}
        self.config = {"num-clients": len(deployment.nodes), "run-dir": str(directory)} | own

    def submit(self, rounds):
        """Start the run, or go on with it."""
        self.number = self.deployment.run(APP, {**self.config, "num-server-rounds": rounds})

    def rows(self):
        path = self.directory / "rounds.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    @property
    def last_round(self):
        rows = self.rows()
        return rows[-1]["round"] if rows else 0

    def wait_for_round(self, number):
        return self._wait(number, lambda row: True, "its end")

    def wait_for_incident(self, kinds, client, after):
        """Wait until an incident is in the metrics of a round after ``after``; return the round.

        ``kinds`` are those of which one must happen, with ``|`` between.
        """
        wanted = set(kinds.split("|"))

        def happened(row):
            return wanted & incidents_of(row, client)

        return self._wait(after + 1, happened, f"{kinds!r} of client {client}")["round"]

    def wait_for_agreement(self, client, after):
        """Wait until a client's reply was taken with nothing to report; return the round.

        The server takes a reply only if its own copy of the client's mirror has the digest that
        the client says, so that is a round in which both mirrors were equal.
        """

        def agrees(row):
            return row["widths"][client] != DROPPED and not incidents_of(row, client)

        return self._wait(after + 1, agrees, f"agreement with client {client}")["round"]

    def wait_for_clean_round(self, after):
        """Wait for a round in which all answered, with mirrors equal, and nothing happened."""

        def is_clean(row):
            return not row.get("incidents") and DROPPED not in row["widths"]

        return self._wait(after + 1, is_clean, "a clean round")

    def order(self, client, deed):
        """Tell a client how to misbehave with its next upload."""
        path = self._order_of(client)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(deed)
        partial.rename(path)

    def has_order(self, client):
        """Whether a client has not misbehaved yet, as it was told to."""
        return self._order_of(client).exists()

    def _order_of(self, client):
        return self.deployment.state_directory(client).with_suffix(".order")

    def is_forgotten(self, client):
        """Whether a client has deleted what it kept of a run that has ended."""
        return not list(self.deployment.state_directory(client).glob("p*"))

    def model_agrees(self, client):
        """Whether the model that a client has saved is one that the server had."""
        digests = set()

        def agrees():
            saved = self._saved()
            digests.add(saved.digest)
            model = saved.model(self.deployment.state_directory(client))
            return model is not None and model.digest in digests

        return _comes_true(agrees)

    def mirrors_settle(self, client):
        """Whether the mirrors agree once the client has done what it was about to do.

        While a round is under way, the server's is the client's before its last answer.
        """

        def agrees():
            saved = self._saved()
            found = saved.mirrors(self.deployment.state_directory(client))
            both = (
                () if found is None else (found.current, found.before)
            )  # None while it is written
            return any(saved.has_mirror(client, mirror) for mirror in both)

        return _comes_true(agrees)

    def _saved(self):
        return Saved(self.directory, make_recipe("lean"))

    def _wait(self, first, holds, what):
        """Return the first round from ``first`` on of which something holds."""
        end = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < end:
            for row in self.rows():
                if row["round"] >= first and holds(row):
                    return row
            time.sleep(0.05)
        seen = [(row["round"], row.get("incidents")) for row in self.rows()[-5:]]
        raise AssertionError(f"waited for {what} from round {first} on; last rounds: {seen}")


def _comes_true(condition):
    end = time.monotonic() + PATIENCE_SECONDS
    while not (holds := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return holds


def incidents_of(row, client):
    """Return the kinds of incident that a client had in a round."""
    return {entry["kind"] for entry in row.get("incidents", ()) if entry["client"] == client}


def clean_losses(rows):
    """Return the losses that all clients measured together."""
    return [row["loss"] for row in rows if DROPPED not in row["widths"]]
