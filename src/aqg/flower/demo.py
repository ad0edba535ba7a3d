"""Flower's own simulation on this machine: train on digits, and count every client's bytes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.simulation import run_simulation

from aqg.errors import RunError
from aqg.flower import FlowerTask, make_client_app, make_server_app
from aqg.flower.journal import RoundReport, RunLogger
from aqg.flower.strategy import read_settings
from aqg.runs.config import RunConfig, resolve
from aqg.runs.cost import DOWNLOADS, UPLOADS
from aqg.runs.directory import create_directory, read_summary
from aqg.runs.loop import slug
from aqg.runs.setup import build_problem

DIGITS = {"dataset": "digits", "partition": "dirichlet:0.5", "model": "softmax", "l2": 0.01}
"""What is learned: digits, split unevenly among the clients."""

_FLOAT_BYTES = 4
_PATIENCE_SECONDS = 900.0
"""All clients share one machine, which may be busy with other things."""
_TAKEN = ("alpha", "seed", "recipe", "downlink")
_QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ADDRESS": "local",  # not a cluster that happens to run here
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Without these, Flower and Ray look for the Internet and other machines, and print a warning."""


def digits_config(settings: Mapping[str, bool | int | float | str]) -> RunConfig:
    """Return the config with which the simulator trains what Flower's settings describe.

    >>> config = digits_config({"num-clients": 3, "num-server-rounds": 5, "seed": 1})
    >>> config.clients, config.rounds, config.seed, round(config.alpha, 3)
    (3, 5, 1, 0.333)
    """
    taken = {name: settings[name] for name in _TAKEN if name in settings}
    if "num-server-rounds" in settings:
        taken["rounds"] = settings["num-server-rounds"]
    return resolve({"recipe": "auto", **DIGITS, "clients": settings["num-clients"], **taken})[0]


def digits_task(settings: Mapping[str, bool | int | float | str], context: Context) -> FlowerTask:
    """Return the training on one node's share of the digits."""
    problem = build_problem(digits_config(settings))
    samples = problem.clients[int(context.node_config["partition-id"])]
    return FlowerTask.from_objective(problem.objective, *samples)


@dataclass(frozen=True, kw_only=True)
class Demo:
    """What ``aqg flower demo`` runs."""

    directory: Path  # where results go; new or empty
    nodes: int = 3
    rounds: int = 20
    recipe: str = "auto"
    seed: int = 0

    @property
    def run_directory(self) -> Path:
        """Where the training is written, as the simulator writes it."""
        return self.directory / slug(self.recipe)

    @property
    def settings(self) -> dict[str, bool | int | float | str]:
        settings: dict[str, bool | int | float | str] = {
            "num-clients": self.nodes,
            "num-server-rounds": self.rounds,
            "recipe": self.recipe,
            "seed": self.seed,
            "exact": True,
            "weighting": "equal",
            "run-dir": str(self.run_directory.resolve()),
            "trust-partition-id": True,
            "round-timeout": _PATIENCE_SECONDS,
            "start-timeout": _PATIENCE_SECONDS,
        }
        return {**settings, "alpha": digits_config(settings).alpha}

    def run(self, on_round: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
        """Train, and return the lines of all rounds; ``on_round`` is given each as it ends.

        Also when interrupted, returns after Flower and Ray have ended.
        """
        settings = self.settings
        read_settings(settings)
        create_directory(self.directory)
        os.environ.update(_QUIET)
        logging.getLogger("flwr").setLevel(logging.ERROR)
        reporter, problem = _Reporter(on_round), build_problem(digits_config(settings))
        server = make_server_app(
            problem.initial_params,
            evaluate=lambda params: problem.test_accuracy(params),
            settings=settings,
            describe=DIGITS,
            loggers=[reporter],
        )
        client = make_client_app(partial(digits_task, settings))
        backend: Any = {
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": 1, "include_dashboard": False, "logging_level": "ERROR"},
        }
        # Interrupts end the clients of a simulation in the main thread, and its server waits on.
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(run_simulation, server, client, self.nodes, backend_config=backend)
            try:
                done.result()
            finally:
                reporter.is_stopped = True
        return reporter.rows

    def summary(self) -> dict[str, Any]:
        return read_summary(self.run_directory) or {}

    def byte_table(self, rows: list[dict[str, Any]]) -> list[dict[str, int]]:
        """Return what every node has sent and received in these rounds.

        ``plain_bytes`` is what a gradient and a model as float32 in every round would have taken.
        """
        num_params = build_problem(digits_config(self.settings)).objective.num_params
        plain_bytes = 2 * _FLOAT_BYTES * num_params * len(rows)
        table = []
        for node in range(self.nodes):
            up, down = (sum(row[name][node] for row in rows) for name in (UPLOADS, DOWNLOADS))
            sent = {"upload_bytes": up, "download_bytes": down, "total_bytes": up + down}
            uploads = sum(row["widths"][node] > 0 for row in rows)
            table.append({"node": node, "uploads": uploads, **sent, "plain_bytes": plain_bytes})
        return table


class _Reporter(RunLogger):
    """Passes every round on, and ends the run when it is told to."""

    def __init__(self, on_round: Callable[[dict[str, Any]], None]) -> None:
        self.rows: list[dict[str, Any]] = []
        self.is_stopped = False
        self._on_round = on_round

    def round(self, report: RoundReport) -> None:
        if self.is_stopped:
            raise RunError("the run was interrupted")
        self.rows.append(report.to_row())
        self._on_round(self.rows[-1])
