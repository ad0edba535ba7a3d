"""Ordinary Flower apps of NumPy."""

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAvg, Strategy

from aqg.flower import aqg_mod

NUM_CLIENTS = 4
SHAPE = (30, 10)
TARGETS = np.random.default_rng(3).standard_normal((NUM_CLIENTS, *SHAPE)).astype(np.float32)
SIZES = np.array([10, 20, 30, 40])
OPTIMUM = np.average(TARGETS, axis=0, weights=SIZES)
"""What federated averaging, weighted by examples, arrives at."""
FROZEN = np.arange(5000, dtype=np.float32)


def first_arrays():
    """A layer that is trained, one that is not, and batch normalization."""
    arrays = {"layer.weight": np.zeros(SHAPE, np.float32), "layer.frozen": FROZEN}
    arrays["bn.running_mean"] = np.zeros(6, np.float32)
    arrays["bn.num_batches_tracked"] = np.zeros((), np.int64)
    return ArrayRecord({key: Array(value) for key, value in arrays.items()})


def distance(arrays, target=OPTIMUM):
    return float(np.abs(arrays["layer.weight"].numpy() - target).max())


def app_answering(answer, mods=(aqg_mod,)):
    """Return an app whose handler answers with the records that a function makes."""
    app = ClientApp(mods=list(mods))

    @app.train()
    def handle(message: Message, context: Context) -> Message:
        return Message(RecordDict(answer(message, context)), reply_to=message)

    return app


def app_of(train, mods=(aqg_mod,)):
    """Return an app whose handler answers with what a function makes of the model's tensors."""

    def answer(message, context):
        values = {name: array.numpy() for name, array in message.content["arrays"].items()}
        number = int(message.content["config"]["server-round"])
        trained = train(values, number, context.node_id)
        arrays = ArrayRecord({name: Array(np.asarray(value)) for name, value in trained.items()})
        return {"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})}

    return app_answering(answer, mods)


def make_app(mods, noise=0.0, seen=None):
    seen = [] if seen is None else seen

    def answer(message, context):
        client = int(context.node_config["partition-id"])
        config = message.content["config"]
        seen.append((client, dict(config), list(message.content)))
        rate = float(config.get("lr", 0.5))
        name, arrays = next(iter(message.content.array_records.items()))
        values = {key: array.numpy() for key, array in arrays.items()}
        weight = values["layer.weight"].copy()
        mean = float(weight.mean())
        rng = np.random.default_rng((client, int(config["server-round"])))
        for _ in range(2):
            weight -= rate * (weight - TARGETS[client])
            weight += noise * rng.standard_normal(SHAPE).astype(np.float32)
        values["layer.weight"] = weight
        values["bn.running_mean"] = np.full(6, 1 + client, np.float32) / 3
        values["bn.num_batches_tracked"] = values["bn.num_batches_tracked"] + 2
        trained = ArrayRecord({key: Array(np.asarray(v)) for key, v in values.items()})
        loss = float(np.square(weight - TARGETS[client]).mean())
        metrics = {"loss": loss, "start": mean, "num-examples": int(SIZES[client])}
        return {name: trained, "metrics": MetricRecord(metrics)}

    app = app_answering(answer, mods)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        weight = message.content["arrays"]["layer.weight"].numpy()
        metrics = MetricRecord(
            {"distance": float(np.abs(weight - OPTIMUM).max()), "num-examples": int(SIZES[client])}
        )
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def everyone(**options):
    names = "min_train_nodes", "min_available_nodes", "min_evaluate_nodes"
    return dict.fromkeys(names, NUM_CLIENTS) | options


def unevaluated(**options):
    return everyone(fraction_evaluate=0.0, **options)


class Own(Strategy):
    """A strategy of one's own: a coordinate-wise mean of the middle half."""

    def __init__(self):
        self.inner = FedAvg(**everyone())

    def configure_train(self, *arguments):
        return self.inner.configure_train(*arguments)

    def configure_evaluate(self, *arguments):
        return self.inner.configure_evaluate(*arguments)

    def aggregate_evaluate(self, *arguments):
        return self.inner.aggregate_evaluate(*arguments)

    def aggregate_train(self, server_round, replies):
        contents = [reply.content for reply in replies if not reply.has_error()]
        names = list(contents[0]["arrays"])
        tensors = {n: np.stack([c["arrays"][n].numpy() for c in contents]) for n in names}
        middle = {n: np.sort(tensor, 0)[1:-1].mean(0) for n, tensor in tensors.items()}
        arrays = ArrayRecord({n: Array(np.asarray(v)) for n, v in middle.items()})
        return arrays, MetricRecord({"replies": len(contents)})

    def summary(self):
        pass


STRATEGIES = {
    "FedAvg": lambda: FedAvg(**everyone()),
    "FedAvgM": lambda: flower.FedAvgM(**everyone(server_momentum=0.3, server_learning_rate=0.8)),
    "FedProx": lambda: flower.FedProx(**everyone(proximal_mu=0.1)),
    "FedAdam": lambda: flower.FedAdam(**everyone(eta=0.1, tau=0.01)),
    "FedYogi": lambda: flower.FedYogi(**everyone(eta=0.1, tau=0.01)),
    "FedAdagrad": lambda: flower.FedAdagrad(**everyone(eta=0.3, tau=0.1)),
    "FedMedian": lambda: flower.FedMedian(**everyone()),
    "FedTrimmedAvg": lambda: flower.FedTrimmedAvg(**everyone(beta=0.25)),
    "Krum": lambda: flower.Krum(**everyone(num_malicious_nodes=1)),
    "MultiKrum": lambda: flower.MultiKrum(**everyone(num_malicious_nodes=1, num_nodes_to_select=2)),
    "DP": lambda: flower.DifferentialPrivacyServerSideFixedClipping(
        FedAvg(**everyone()), 0.001, 20.0, NUM_CLIENTS
    ),
    "DP adaptive": lambda: flower.DifferentialPrivacyServerSideAdaptiveClipping(
        FedAvg(**everyone()), 0.01, NUM_CLIENTS, clipped_count_stddev=0.1
    ),
    "own": Own,
}
"""Every kind, with all clients in every round."""
