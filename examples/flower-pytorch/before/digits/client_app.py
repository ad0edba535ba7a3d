"""What a client does: train the model it is sent, and send it back."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from digits.task import Net, load_data, train

app = ClientApp()


@app.train()
def train_model(message: Message, context: Context) -> Message:
    """Train on this client's images."""
    net = Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    partition, num_partitions = (
        int(context.node_config[key]) for key in ("partition-id", "num-partitions")
    )
    loader = load_data(partition, num_partitions, float(context.run_config["dirichlet"]))
    loss = train(
        net,
        loader,
        epochs=int(context.run_config["local-epochs"]),
        learning_rate=float(context.run_config["learning-rate"]),
    )
    metrics = MetricRecord({"loss": loss, "num-examples": len(loader.dataset)})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)
