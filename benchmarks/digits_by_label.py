"""Digits, two kinds to a client, under strategies of Flower's: stock, and with the two lines."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp import strategy as flower
from sklearn.datasets import load_digits
from torch import nn

from aqg.flower import Compressed, aqg_mod

from tests.flower.memory_grid import MemoryGrid

NUM_CLIENTS = 10
_EVERYONE = {
    "fraction_evaluate": 0.0,
    "min_train_nodes": NUM_CLIENTS,
    "min_available_nodes": NUM_CLIENTS,
}
_PRIVACY = {"noise_multiplier": 0.02, "clipping_norm": 2.0, "num_sampled_clients": NUM_CLIENTS}
STRATEGIES = {
    "FedAvg": lambda: flower.FedAvg(**_EVERYONE),
    "FedProx": lambda: flower.FedProx(**_EVERYONE, proximal_mu=0.0),
    "FedAdam": lambda: flower.FedAdam(**_EVERYONE, eta=0.03, tau=0.01),
    "FedYogi": lambda: flower.FedYogi(**_EVERYONE, eta=0.03, tau=0.01),
    "FedAdagrad": lambda: flower.FedAdagrad(**_EVERYONE, eta=0.05, tau=0.01),
    "FedMedian": lambda: flower.FedMedian(**_EVERYONE),
    "FedTrimmedAvg": lambda: flower.FedTrimmedAvg(**_EVERYONE, beta=0.2),
    "Krum": lambda: flower.Krum(**_EVERYONE, num_malicious_nodes=1),
    "DP, server clips": lambda: flower.DifferentialPrivacyServerSideFixedClipping(
        flower.FedAvg(**_EVERYONE), **_PRIVACY
    ),
    "DP, clients clip": lambda: flower.DifferentialPrivacyClientSideFixedClipping(
        flower.FedAvg(**_EVERYONE), **_PRIVACY
    ),
}


def make_net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def train(name, compressed, seed, rounds, recipe=None):
    """Return the mean accuracy of the last five rounds, and the shares of bytes up and down."""
    torch.set_num_threads(1)
    pixels, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    pixels, rng = (pixels / 16).float(), np.random.default_rng(seed)
    order = torch.tensor(rng.permutation(len(labels)))
    tested, trained = order[:400], order[400:]
    # Sorted by label and cut into shards, of which each client gets two.
    shards = trained[labels[trained].argsort(stable=True)].chunk(2 * NUM_CLIENTS)
    given = rng.permutation(2 * NUM_CLIENTS).reshape(NUM_CLIENTS, 2)
    inner = STRATEGIES[name]()
    clips = [fixedclipping_mod] if "clients clip" in name else []
    app = ClientApp(mods=[*([aqg_mod] if compressed else []), *clips])

    @app.train()
    def handle(message: Message, context: Any) -> Message:
        net, client = make_net(seed), int(context.node_config["partition-id"])
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        mine = torch.cat([shards[i] for i in given[client]])
        number = int(message.content["config"]["server-round"])
        mine = mine[
            torch.tensor(np.random.default_rng((seed, client, number)).permutation(len(mine)))
        ]
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for batch in mine.split(16):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(pixels[batch]), labels[batch]).backward()
            optimizer.step()
        content = {"arrays": ArrayRecord(net.state_dict())}
        content["metrics"] = MetricRecord({"num-examples": len(mine)})
        return Message(RecordDict(content), reply_to=message)

    accuracies = []

    def evaluate(_number, arrays):
        net = make_net(seed)
        net.load_state_dict(arrays.to_torch_state_dict())
        with torch.no_grad():
            right = net(pixels[tested]).argmax(1) == labels[tested]
        accuracies.append(float(right.float().mean()))

    strategy = Compressed(inner, recipe=recipe, seed=seed) if compressed else inner
    with tempfile.TemporaryDirectory() as directory:
        os.environ["AQG_STATE_DIR"] = directory
        grid = MemoryGrid(app, {100 + m: {"partition-id": m} for m in range(NUM_CLIENTS)})
        first = ArrayRecord(make_net(seed).state_dict())
        strategy.start(grid, first, num_rounds=rounds, evaluate_fn=evaluate)
    share = np.ones(2)
    if compressed:
        traffic = strategy.counts.train
        share = np.array([traffic.up / traffic.plain_up, traffic.down / traffic.plain_down])
    return float(np.mean(accuracies[-5:])), share
