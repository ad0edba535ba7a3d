"""What a client does: train the model it is sent, and send what the server does not know yet."""

from flwr.app import Context

from aqg.flower import FlowerTask, make_client_app
from digits.task import Net, load_data, train


def make_task(context: Context) -> FlowerTask:
    """Return the training on this client's images."""
    partition, num_partitions = (
        int(context.node_config[key]) for key in ("partition-id", "num-partitions")
    )
    loader = load_data(partition, num_partitions, float(context.run_config["dirichlet"]))
    epochs = int(context.run_config["local-epochs"])
    learning_rate = float(context.run_config["learning-rate"])
    return FlowerTask.from_training(
        Net(), lambda net: train(net, loader, epochs, learning_rate), len(loader.dataset)
    )


app = make_client_app(make_task)
