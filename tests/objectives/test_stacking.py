"""A client's numbers do not depend on the clients it is stacked with: equal to the last bit.

Through torch's products, too, which give the same numbers, and no warnings.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqg.objectives import closed_form as products
from aqg.objectives import make_objective

torch = pytest.importorskip("torch")
FEATURES = 300


@pytest.fixture
def _through_torch(monkeypatch):
    """Let large clients go through torch here as well, whatever the machine."""
    monkeypatch.setattr(products, "_faster_torch", lambda: torch)


def large_client(dtype, *clients):
    num_samples = products.LARGE_BYTES // np.dtype(dtype).itemsize // FEATURES + 1
    return np.random.default_rng(0).normal(size=(*clients, num_samples, FEATURES)).astype(dtype)


@pytest.mark.usefixtures("_through_torch")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("own_weights", [False, True])
def test_torch_computes_what_numpy_does(dtype, own_weights):
    inputs = large_client(dtype, 2)
    inputs.flags.writeable = False  # torch would warn of it
    shape = (2, FEATURES, 10) if own_weights else (FEATURES, 10)
    weight = np.random.default_rng(1).normal(size=shape).astype(dtype)
    outputs = products.narrow_outputs(inputs, weight)
    gradient = np.empty((2, FEATURES, 10), dtype)
    products.narrow_gradient(inputs, outputs.swapaxes(-1, -2), gradient)
    accuracy = {"rtol": 1e-4, "atol": 1e-2} if dtype == np.float32 else {"rtol": 1e-10}
    expected = (inputs @ weight).swapaxes(-1, -2)
    np.testing.assert_allclose(outputs, expected, **accuracy)
    np.testing.assert_allclose(
        gradient, inputs.swapaxes(-1, -2) @ expected.swapaxes(-1, -2), **accuracy
    )
    assert outputs.dtype == dtype


@pytest.mark.usefixtures("_through_torch")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("model", ["softmax", "mlp:40"])
def test_stacking_changes_nothing_through_torch(model, dtype):
    assert_stacking_changes_nothing(model, 2, large_client(dtype).shape[0], FEATURES, dtype)


def test_only_large_clients_with_few_outputs_ask_for_torch(monkeypatch):
    asked = []
    monkeypatch.setattr(products, "_faster_torch", lambda: asked.append(True))
    small = np.ones((5, 100, FEATURES))
    products.narrow_outputs(small, np.ones((FEATURES, 10)))
    products.narrow_outputs(large_client(np.float64), np.ones((FEATURES, products.NARROW + 1)))
    assert not asked
    products.narrow_outputs(large_client(np.float64), np.ones((FEATURES, products.NARROW)))
    assert asked


@pytest.mark.usefixtures("_through_torch")
def test_a_short_lived_process_stays_with_numpy(monkeypatch):
    monkeypatch.setattr(products, "_is_short_lived", False)
    inputs, weight = large_client(np.float64), np.ones((FEATURES, 3))
    products.stay_with_numpy()
    np.testing.assert_array_equal(products.narrow_outputs(inputs, weight), weight.T @ inputs.T)


@pytest.mark.usefixtures("_through_torch")
def test_samples_in_any_order_in_memory():
    objective = make_objective("softmax", FEATURES, 4, l2=0.01, scaling="mean")
    features = large_client(np.float64)
    labels = np.random.default_rng(2).integers(0, 4, len(features))
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
