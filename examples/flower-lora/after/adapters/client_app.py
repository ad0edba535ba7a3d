"""What a client does: train the adapters it is sent, and send them back."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from adapters.task import adapters_of, load_data, make_model, train
from aqg.flower import aqg_mod

app = ClientApp(mods=[aqg_mod])


@app.train()
def train_adapters(message: Message, context: Context) -> Message:
    """Train on this client's images."""
    model = make_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=False)
    partition, num_partitions = (
        int(context.node_config[key]) for key in ("partition-id", "num-partitions")
    )
    loader = load_data(partition, num_partitions)
    loss = train(
        model,
        loader,
        epochs=int(context.run_config["local-epochs"]),
        learning_rate=float(context.run_config["learning-rate"]),
    )
    metrics = MetricRecord({"loss": loss, "num-examples": len(loader.dataset)})
    content = RecordDict({"arrays": ArrayRecord(adapters_of(model)), "metrics": metrics})
    return Message(content=content, reply_to=message)
