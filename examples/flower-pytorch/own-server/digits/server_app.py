"""What the server does: add up what the clients send, and test the result."""

import numpy as np
import torch
from flwr.app import Context

from aqg.flower import flatten, load_flat, make_server_app
from digits.task import Net, load_test_data, test


def initial_params(context: Context) -> np.ndarray:  # noqa: ARG001
    """Return the model that training starts from."""
    torch.manual_seed(0)
    return flatten(Net())


def evaluate(params: np.ndarray) -> float:
    """Test a model."""
    net = Net()
    load_flat(net, params)
    return test(net, load_test_data())


app = make_server_app(initial_params, evaluate=evaluate)
