"""One round of other federated-learning simulators on the workloads of ``engine.py``.

Each adapter runs the peer's own federated averaging with all clients, one full-batch gradient step
per client, no compression and no evaluation. A peer that is not installed, or does not import here,
is left out with a line that says so.

Flower's simulation starts a Ray cluster, which does not mix with timing others in the same process:
see ``engine_flower.py``.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine_workloads import Data, Workload

LOCAL_RATE = 0.1


def installed_peers(
    workload: Workload, data: Data, wanted: Sequence[str]
) -> dict[str, Callable[[], Any]]:
    found = {}
    for name, module, make in (
        ("FedJAX", "fedjax", make_fedjax),
        ("pfl", "pfl.algorithm.federated_averaging", make_pfl),
        ("FedLab", "fedlab.contrib.algorithm.basic_client", make_fedlab),
    ):
        if name not in wanted:
            continue
        try:
            importlib.import_module(module)
        except Exception as error:  # a half-installed peer can fail in any way
            reason = str(error).partition("\n")[0]
            print(f"{name} is left out: {type(error).__name__}: {reason}", file=sys.stderr)
            continue
        found[name] = make(workload, data)
    return found


def make_module(workload: Workload) -> torch.nn.Module:
    num_outputs = workload.num_classes
    if workload.model.startswith("mlp:"):
        num_hidden = int(workload.model.partition(":")[2])
        return torch.nn.Sequential(
            torch.nn.Linear(workload.num_features, num_hidden),
            torch.nn.ReLU(),
            torch.nn.Linear(num_hidden, num_outputs),
        )
    return torch.nn.Sequential(torch.nn.Linear(workload.num_features, num_outputs))


def make_fedjax(workload: Workload, data: Data) -> Callable[[], Any]:
    import fedjax
    import jax
    import jax.numpy as jnp

    if not hasattr(jax, "tree_map"):  # FedJAX 0.0.17 was written for a JAX that had it
        jax.tree_map = jax.tree_util.tree_map
    from fedjax.algorithms import fed_avg

    sizes = [workload.num_features]
    if workload.model.startswith("mlp:"):
        sizes.append(int(workload.model.partition(":")[2]))
    sizes.append(workload.num_classes)

    def loss(params: list, batch: dict, rng: Any) -> Any:  # noqa: ARG001
        outputs = batch["x"]
        for weight, bias in params[:-1]:
            outputs = jax.nn.relu(outputs @ weight + bias)
        logits = jax.nn.log_softmax(outputs @ params[-1][0] + params[-1][1])
        return -jnp.mean(jnp.take_along_axis(logits, batch["y"][:, None], axis=1))

    keys = jax.random.split(jax.random.PRNGKey(0), workload.num_clients + len(sizes))
    params = [
        (jax.random.normal(keys[i], shape) * 0.05, jnp.zeros(shape[1]))
        for i, shape in enumerate(itertools.pairwise(sizes))
    ]
    algorithm = fed_avg.federated_averaging(
        jax.grad(loss),
        fedjax.optimizers.sgd(LOCAL_RATE),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=workload.num_samples, num_epochs=1, seed=0),
    )
    clients = [
        (b"%d" % m, fedjax.ClientDataset({"x": features, "y": labels}), keys[len(sizes) + m])
        for m, (features, labels) in enumerate(zip(*data, strict=True))
    ]
    state = algorithm.init(params)

    def run_round() -> None:
        nonlocal state
        state, _ = algorithm.apply(state, clients)
        jax.block_until_ready(state.params)

    return run_round


def make_pfl(workload: Workload, data: Data) -> Callable[[], Any]:
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = make_module(workload)

        def loss(self, features: Any, labels: Any, eval: bool = False) -> Any:  # noqa: A002, ARG002
            return torch.nn.functional.cross_entropy(self.layers(features), labels)

        def metrics(self, features: Any, labels: Any, eval: bool = True) -> dict:  # noqa: A002, ARG002
            return {}

    module = Module().to(torch.as_tensor(data.features[:0]).dtype)
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    datasets = [
        Dataset((torch.as_tensor(features), torch.as_tensor(labels)))
        for features, labels in zip(*data, strict=True)
    ]
    users = list(range(workload.num_clients))
    sampler = get_user_sampler("minimize_reuse", users)
    federated = FederatedDataset(datasets.__getitem__, sampler)
    backend = SimulatedBackend(federated, federated)
    training = NNTrainHyperParams(
        local_num_epochs=1, local_learning_rate=LOCAL_RATE, local_batch_size=None
    )
    settings = NNAlgorithmParams(
        central_num_iterations=1,
        evaluation_frequency=10**9,
        train_cohort_size=workload.num_clients,
        val_cohort_size=0,
    )

    def run_round() -> None:
        FederatedAveraging().run(
            settings,
            backend,
            model,
            training,
            model_eval_params=None,
            send_metrics_to_platform=False,
        )

    return run_round


def make_fedlab(workload: Workload, data: Data) -> Callable[[], Any]:
    from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
    from fedlab.contrib.algorithm.basic_server import SyncServerHandler

    batches = [
        (torch.as_tensor(features), torch.as_tensor(labels))
        for features, labels in zip(*data, strict=True)
    ]

    class Clients:
        """A data set in the form FedLab asks for: one full batch per client."""

        def get_dataloader(self, client: int, batch_size: int) -> list:  # noqa: ARG002
            return [batches[client]]

    module = make_module(workload).to(batches[0][0].dtype)
    handler = SyncServerHandler(module, global_round=10**9, sample_ratio=1.0)
    handler.num_clients = workload.num_clients
    trainer = SGDSerialClientTrainer(module, workload.num_clients)
    trainer.setup_dataset(Clients())
    trainer.setup_optim(epochs=1, batch_size=workload.num_samples, lr=LOCAL_RATE)

    def run_round() -> None:
        trainer.local_process(handler.downlink_package, handler.sample_clients())
        for package in trainer.uplink_package:
            handler.load(package)

    return run_round
