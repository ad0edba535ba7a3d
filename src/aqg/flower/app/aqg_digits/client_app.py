"""The client's side: one share of the digits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aqg.flower import FlowerTask, make_client_app

from .task import make_problem

if TYPE_CHECKING:
    from flwr.app import Context


def make_task(context: Context) -> FlowerTask:
    """Return the training on this node's share."""
    problem = make_problem(context.run_config)
    samples = problem.clients[int(context.node_config["partition-id"])]
    return FlowerTask.from_objective(problem.objective, *samples, start=problem.initial_params)


app = make_client_app(make_task)
