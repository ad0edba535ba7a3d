"""The client's side: its own training loop, unchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aqg.flower import FlowerTask, make_client_app

from .task import load, make_net, train

if TYPE_CHECKING:
    from flwr.app import Context


def make_task(context: Context) -> FlowerTask:
    """Return the training on this node's share."""
    client = int(context.node_config["partition-id"])
    num_samples = len(load()[0][client][1])
    return FlowerTask.from_training(make_net(), lambda net: train(net, client), num_samples)


app = make_client_app(make_task)
