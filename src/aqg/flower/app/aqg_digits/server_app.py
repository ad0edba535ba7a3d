"""The server's side: the starting point, and the test of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aqg.flower import make_server_app

from .task import DESCRIPTION, make_problem

if TYPE_CHECKING:
    from flwr.app import Context

    from aqg.core.types import FloatArray


def initial_params(context: Context) -> FloatArray:
    """Return the model that training starts from."""
    return make_problem(context.run_config).initial_params


def evaluate(params: FloatArray) -> float:
    """Return the accuracy on the test digits."""
    accuracy = make_problem({"num-clients": 1}).test_accuracy(params)
    return float("nan") if accuracy is None else accuracy


app = make_server_app(initial_params, evaluate=evaluate, describe=DESCRIPTION)
