"""Clients that take their local steps together, against each of them alone."""

import numpy as np
import pytest

from aqg.errors import ConfigError
from aqg.objectives import make_objective
from aqg.sim.backends import NumpyBackend
from aqg.sim.problem import Problem, Samples
from aqg.sim.training import LocalTraining

torch = pytest.importorskip("torch")

SIZES = (40, 7, 23, 16)
TRAININGS = {
    "steps": LocalTraining(8, steps=5, rate=0.3),
    "more steps than a pass": LocalTraining(16, steps=6, rate=0.3),
    "epochs": LocalTraining(8, epochs=2, rate=0.3),
    "batches larger than clients": LocalTraining(64, steps=3, rate=0.3),
}


@pytest.mark.parametrize("l2", [0.0, 0.2])
@pytest.mark.parametrize("model", ["softmax", "mlp:5"])
@pytest.mark.parametrize("training", TRAININGS.values(), ids=TRAININGS)
def test_together_as_alone(training, model, l2):
    random = np.random.default_rng(5)
    objective = make_objective(model, 6, 3, l2, "mean")
    params = torch.tensor(objective.init_params(1))
    features = torch.tensor(random.standard_normal((sum(SIZES), 6)))
    labels = torch.tensor(random.integers(0, 3, sum(SIZES)))
    starts = np.cumsum([0, *SIZES[:-1]]).tolist()
    keys = [(3, client, 12) for client in range(len(SIZES))]
    losses, updates = training.update_many(objective, params, features, labels, starts, SIZES, keys)
    for m, (start, size) in enumerate(zip(starts, SIZES, strict=True)):
        own = slice(start, start + size)
        loss, update = training.update(objective, params, features[own], labels[own], keys[m])
        assert float(losses[m]) == pytest.approx(float(loss), rel=1e-12)
        np.testing.assert_allclose(updates[m], update, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("model", ["softmax", "mlp:5"])
@pytest.mark.parametrize("training", TRAININGS.values(), ids=TRAININGS)
def test_clients_of_one_size_step_together_to_the_same_bits(training, model, dtype, monkeypatch):
    monkeypatch.setattr("aqg.sim.backends._TOGETHER_BYTES", 1000)  # so that it takes several pieces
    random = np.random.default_rng(5)
    objective = make_objective(model, 6, 3, 0.2, "mean")
    params = objective.init_params(1).astype(dtype)
    clients = tuple(
        Samples(random.standard_normal((size, 6)).astype(dtype), random.integers(0, 3, size))
        for size in (20, 20, 7, 20, 20, 20, 20, 20)
    )
    backend = NumpyBackend(Problem(objective, clients, params))
    for present in (np.arange(8), np.array([0, 2, 3, 5, 7])):
        keys = [(3, client, 12) for client in present.tolist()]
        losses, updates = backend.local_updates(training, params, present, keys)
        for place, client in enumerate(present):
            loss, update = training.update(objective, params, *clients[client], keys[place])
            assert losses[place].tobytes() == loss.tobytes()
            assert updates[place].tobytes() == update.tobytes()


def test_models_must_fit_the_clients():
    objective = make_objective("softmax", 6, 3, 0.0, "mean")
    features, labels = np.zeros((4, 5, 6)), np.zeros((4, 5), np.int64)
    with pytest.raises(ConfigError, match=r"\(3, 21\); features of shape \(4, 5, 6\)"):
        objective.weighted_losses_and_gradients(
            np.zeros((3, 21)), features, labels, np.ones((4, 5))
        )
