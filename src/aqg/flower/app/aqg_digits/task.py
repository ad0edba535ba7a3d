"""What is learned: the digits, split unevenly among the clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aqg.runs.config import RunConfig, resolve
from aqg.runs.setup import build_problem

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aqg.sim.problem import Problem

DESCRIPTION = {"dataset": "digits", "partition": "dirichlet:0.5", "model": "softmax", "l2": 0.01}
"""Settings that the app fixes, as the simulator names them."""

_TAKEN = ("alpha", "seed", "recipe", "downlink")


def simulator_config(run_config: Mapping[str, bool | int | float | str]) -> RunConfig:
    """Return the config with which the simulator trains the same.

    >>> config = simulator_config({"num-clients": 3, "num-server-rounds": 5, "seed": 1})
    >>> config.clients, config.rounds, config.seed, round(config.alpha, 3)
    (3, 5, 1, 0.333)
    """
    taken = {name: run_config[name] for name in _TAKEN if name in run_config}
    if "num-server-rounds" in run_config:
        taken["rounds"] = run_config["num-server-rounds"]
    settings = {"recipe": "auto", **DESCRIPTION, "clients": run_config["num-clients"], **taken}
    return resolve(settings)[0]


def make_problem(run_config: Mapping[str, bool | int | float | str]) -> Problem:
    """Return all clients' samples, the objective and the starting point."""
    return build_problem(simulator_config(run_config))
