"""A client's numbers do not depend on the clients it is stacked with: equal to the last bit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqg.objectives import make_objective


def test_samples_in_any_order_in_memory():
    objective = make_objective("softmax", 300, 4, l2=0.01, scaling="mean")
    random = np.random.default_rng(2)
    features, labels = random.normal(size=(450, 300)), random.integers(0, 4, 450)
    params = objective.init_params(0)
    backwards = features[::-1].copy()[::-1]
    loss, gradient = objective.losses_and_gradients(params, features, labels)
    same_loss, same_gradient = objective.losses_and_gradients(params, backwards, labels)
    np.testing.assert_allclose(same_gradient, gradient, rtol=1e-12, atol=1e-14)
    assert same_loss == pytest.approx(loss)


def assert_stacking_changes_nothing(model, num_clients, num_samples, num_features, dtype):
    num_classes = 2 if model == "logistic" else 10
    objective = make_objective(model, num_features, num_classes, l2=0.01, scaling="mean")
    random = np.random.default_rng(num_samples * num_features)
    params = random.normal(size=objective.num_params, scale=0.1).astype(dtype)
    features = random.normal(size=(num_clients, num_samples, num_features)).astype(dtype)
    labels = random.integers(0, num_classes, (num_clients, num_samples))

    losses, gradients = objective.losses_and_gradients(params, features, labels)
    assert losses.dtype == gradients.dtype == dtype
    for client in range(num_clients):
        # Copies, because a client alone has its samples elsewhere in memory.
        alone = features[client].copy(), labels[client].copy()
        loss, gradient = objective.losses_and_gradients(params, *alone)
        assert loss == losses[client] == objective.losses(params, *alone)
        np.testing.assert_array_equal(gradient, gradients[client])


@given(
    model=st.sampled_from(["logistic", "softmax", "mlp:1", "mlp:17"]),
    num_clients=st.integers(1, 5),
    num_samples=st.integers(1, 130),
    num_features=st.integers(1, 90),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_any_shape(model, num_clients, num_samples, num_features, dtype):
    assert_stacking_changes_nothing(model, num_clients, num_samples, num_features, dtype)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(
    ("model", "num_clients", "num_samples", "num_features"),
    [
        ("logistic", 18, 267, 34),
        ("logistic", 2, 6000, 784),
        ("softmax", 2, 6000, 784),
        ("softmax", 50, 60, 784),
        ("mlp:200", 2, 1000, 784),
        ("mlp:200", 10, 60, 784),
    ],
)
def test_shapes_of_real_runs(model, num_clients, num_samples, num_features, dtype):
    assert_stacking_changes_nothing(model, num_clients, num_samples, num_features, dtype)
