"""A client that goes half of the way to a vector of its own."""

import resource
import time

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable

from aqg.flower import aqg_mod


def tell_memory(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Say how much memory it took."""
    reply = call_next(message, context)
    print(f"peak memory {1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}", flush=True)
    return reply


app = ClientApp(mods=[tell_memory, aqg_mod])


def target_of(client: int, size: int) -> np.ndarray:
    """Return a client's own vector."""
    return np.random.default_rng(client).standard_normal(size, np.float32)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Go half of the way; the first client takes its time."""
    client = int(context.node_config["partition-id"])
    if client == 0:
        time.sleep(float(context.run_config["slow-seconds"]))
    model = message.content["arrays"]["w"].numpy()
    trained = ArrayRecord({"w": Array(model + (target_of(client, model.size) - model) / 2)})
    metrics = MetricRecord({"num-examples": 1, "loss": float(np.square(model).mean())})
    return Message(RecordDict({"arrays": trained, "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Measure the distance to the own vector."""
    client = int(context.node_config["partition-id"])
    model = message.content["arrays"]["w"].numpy()
    loss = float(np.square(model - target_of(client, model.size)).mean())
    metrics = MetricRecord({"num-examples": 1, "loss": loss})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
