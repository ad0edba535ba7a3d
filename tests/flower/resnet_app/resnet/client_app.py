"""The client's side: its own training loop, unchanged."""

from aqg.flower import FlowerTask, make_client_app

from .task import load, make_net, train


def make_task(context):
    """Return the training on this node's share."""
    client = int(context.node_config["partition-id"])
    num_samples = len(load()[0][client][1])
    return FlowerTask.from_training(make_net(), lambda net: train(net, client), num_samples)


app = make_client_app(make_task)
