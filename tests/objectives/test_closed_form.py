"""Closed forms: gradients of the textbook, whatever arrays come in, alone or stacked."""

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqg.errors import ConfigError, DataError
from aqg.objectives import make_objective

from tests.commands import run

torch = pytest.importorskip("torch")

NUM_FEATURES, SCALINGS = 5, ("mean", "sum")
MODELS = [("logistic", 2), ("softmax", 2), ("softmax", 4), ("mlp:6", 3)]
CASES = [(*model, l2, scaling) for model in MODELS for l2 in (0.0, 0.3) for scaling in SCALINGS]
THREE = [("logistic", 2), ("softmax", 3), ("mlp:4", 3)]
"""One of each, on six features."""
ARRAY_KINDS = [np.asarray, torch.from_numpy]
DEVICES = list(ARRAY_KINDS)
if torch.cuda.is_available():
    DEVICES.append(lambda array: torch.from_numpy(array).cuda())


def host(found):
    return found.cpu().numpy() if isinstance(found, torch.Tensor) else found


def make(model, num_classes, l2=0.1):
    return make_objective(model, 6, num_classes, l2, "mean")


def draw(objective, client_axes, num_classes, num_features=NUM_FEATURES):
    """Return a model and samples, none of which may be written to."""
    random = np.random.default_rng(12)
    params = random.normal(size=objective.num_params)
    features = random.normal(size=(*client_axes, 7, num_features))
    labels = random.integers(0, num_classes, (*client_axes, 7))
    for array in (params, features, labels):
        array.flags.writeable = False
    return params, features, labels


def textbook_losses(model, params, features, labels, l2, scaling, layout):
    """The definition, with torch's own loss functions and a loop over clients."""
    tensors, start = [], 0
    for _, shape in layout:
        stop = start + int(np.prod(shape))
        tensors.append(params[start:stop].reshape(shape))
        start = stop
    losses = []
    for x, y in zip(
        features.reshape(-1, *features.shape[-2:]),
        labels.reshape(-1, labels.shape[-1]),
        strict=True,
    ):
        if model == "logistic":
            loss = torch.nn.functional.softplus(-(2 * y - 1) * (x @ tensors[0])).sum()
        else:
            if model.startswith("mlp"):
                x = torch.relu(x @ tensors[0] + tensors[1])
            loss = torch.nn.functional.cross_entropy(
                x @ tensors[-2] + tensors[-1], y, reduction="sum"
            )
        if scaling == "mean":
            loss = loss / len(y)
        losses.append(loss + l2 / 2 * (params**2).sum())
    return torch.stack(losses).reshape(features.shape[:-2])


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("client_axes", [(), (1,), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize(("model", "num_classes", "l2", "scaling"), CASES)
def test_matches_automatic_differentiation(model, num_classes, l2, scaling, client_axes):
    objective = make_objective(model, NUM_FEATURES, num_classes, l2, scaling)
    arrays = draw(objective, client_axes, num_classes)
    tensors = [torch.from_numpy(array) for array in arrays]

    def definition(params):
        return textbook_losses(model, params, tensors[1], tensors[2], l2, scaling, objective.layout)

    expected_losses = definition(tensors[0]).numpy()
    expected = torch.autograd.functional.jacobian(definition, tensors[0]).numpy()
    for put in DEVICES:
        params, *samples = map(put, arrays)
        losses, gradients = objective.losses_and_gradients(params, *samples)
        assert type(gradients) is type(params)
        assert gradients.device == params.device
        assert gradients.shape == (*client_axes, objective.num_params)
        np.testing.assert_allclose(host(losses), expected_losses, rtol=1e-12)
        np.testing.assert_allclose(host(gradients), expected, rtol=1e-10, atol=1e-13)
        again, predicted = objective.losses(params, *samples), objective.predict(params, samples[0])
        np.testing.assert_allclose(host(again), host(losses), rtol=1e-15)
        np.testing.assert_array_equal(host(predicted), objective.predict(*arrays[:2]))


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
def test_a_client_is_the_same_to_the_last_bit_alone(
    model, num_clients, num_samples, num_features, dtype
):
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
def test_so_it_is_in_real_runs(model, num_clients, num_samples, num_features, dtype):
    assert_stacking_changes_nothing(model, num_clients, num_samples, num_features, dtype)


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


@pytest.mark.parametrize(("dtype", "label_dtype"), [("f4", "u1"), ("f4", "i8"), ("f8", "i4")])
@pytest.mark.parametrize("kind", ARRAY_KINDS)
@pytest.mark.parametrize(("model", "num_classes"), THREE)
def test_predictions_have_the_smallest_loss_and_results_their_dtype(
    model, num_classes, kind, dtype, label_dtype
):
    objective = make(model, num_classes)
    params, features, labels = draw(objective, (4,), num_classes, 6)
    params, features = params.astype(dtype), features.astype(dtype)
    loss_of_label = [
        objective.losses(params, features[..., None, :], np.full((4, 7, 1), label))
        for label in range(num_classes)
    ]
    params, features, labels = map(kind, (params, features, labels.astype(label_dtype)))
    predicted = objective.predict(params, features)
    np.testing.assert_array_equal(np.asarray(predicted), np.argmin(loss_of_label, axis=0))
    losses, gradients = objective.losses_and_gradients(params, features, labels)
    assert losses.dtype == gradients.dtype == features.dtype
    assert objective.losses(params, features, labels).dtype == features.dtype


def test_where_models_start_and_which_are_strongly_convex():
    assert make("logistic", 2).convex
    assert make("softmax", 3).convex
    assert not make("softmax", 3, l2=0.0).convex
    assert not make("mlp:4", 3).convex
    assert not make("logistic", 2).init_params(seed=3).any()
    objective = make_objective("mlp:200", 100, 10, 0.0, "mean")
    params = objective.init_params(seed=3)
    np.testing.assert_array_equal(params, objective.init_params(seed=3))
    assert (params != objective.init_params(seed=4)).any()
    weight1, bias1, weight2, bias2 = np.split(params, [20_000, 20_200, 22_200])
    assert not np.concatenate([bias1, bias2]).any()
    for weight, fans in (weight1, 100 + 200), (weight2, 200 + 10):  # Glorot
        bound = np.sqrt(6 / fans)
        assert 0.99 * bound < np.abs(weight).max() <= bound
        assert abs(weight.mean()) < 0.05 * bound


def test_huge_scores_and_small_losses_are_exact():
    objective = make_objective("logistic", 1, 2, 0.0, "sum")
    scores = np.array([[1e4], [-1e4], [1e4], [-1e4]])
    losses, gradients = objective.losses_and_gradients(np.ones(1), scores, np.array([1, 0, 0, 1]))
    assert losses == 2e4
    assert gradients == 2e4  # slope 1 on the wrong side, 0 on the right one
    loss = objective.losses(np.ones(1), np.array([[50.0]]), np.array([1]))
    np.testing.assert_allclose(loss, np.exp(-50.0), rtol=1e-15)
    objective = make_objective("softmax", 1, 2, 0.0, "sum")
    params = np.array([1.0, 0.0, 0.0, 0.0])
    assert objective.losses(params, scores, np.array([0, 1, 1, 0])) == 2e4


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
@pytest.mark.parametrize("kind", ARRAY_KINDS)
@pytest.mark.parametrize(("model", "num_classes"), THREE)
def test_divergence_shows_in_the_result_without_a_warning(model, num_classes, kind, value):
    objective = make(model, num_classes)
    params = kind(np.full(objective.num_params, value))
    features = kind(np.random.default_rng(0).normal(size=(2, 5, 6)) * 1e10)
    labels = kind(np.zeros((2, 5), np.int64))
    losses, gradients = objective.losses_and_gradients(params, features, labels)
    assert not np.isfinite(np.asarray(losses)).any()
    assert np.isfinite(value) or not np.isfinite(np.asarray(gradients)).all()
    objective.predict(params, features)


@pytest.mark.parametrize(
    "spec", ["", "mpl:200", "mlp", "mlp:", "mlp:0", "mlp:-3", "mlp:2.5", "mlp:²", "softmax:3"]
)
def test_unknown_model_is_named_with_the_choices(spec):
    with pytest.raises(ConfigError, match=r"^(unknown )?(model|option hidden of model) ") as caught:
        make_objective(spec, 4, 2, 0.0, "mean")
    assert repr(spec.partition(":")[0]) in str(caught.value) or repr(spec) in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("logistic", 4, 3, 0.0, "mean"), "needs 2 classes, the data has 3"),
        (("softmax", 0, 3, 0.0, "mean"), "features is 0; it must be at least 1"),
        (("softmax", 4, 1, 0.0, "mean"), "classes is 1; it must be at least 2"),
        (("softmax", 4, 3, -0.5, "mean"), "l2 is -0.5"),
        (("softmax", 4, 3, float("nan"), "mean"), "l2 is nan"),
        (("softmax", 4, 3, 0.0, "median"), "unknown scaling 'median'; choose from mean, sum"),
        (("softmax", 4, 3, 0.0, "mean"), "seed is -1"),
    ],
)
def test_bad_settings(arguments, message):
    with pytest.raises(ConfigError, match=message):
        make_objective(*arguments).init_params(-1)


@pytest.mark.parametrize(
    ("params", "features", "labels", "message"),
    [
        (np.zeros(7), np.zeros((5, 6)), np.zeros(5, int), r"shape \(7,\).* needs \(21,\)"),
        (np.zeros(21), np.zeros((5, 7)), np.zeros(5, int), r"shape \(5, 7\).*samples, 6\)"),
        (np.zeros(21), np.zeros(6), np.zeros(1, int), r"shape \(6,\).*samples, 6\)"),
        (np.zeros(21), np.zeros((2, 5, 6)), np.zeros(5, int), r"shape \(5,\).*need \(2, 5\)"),
        (np.zeros(21), np.zeros((5, 6), np.float32), np.zeros(5, int), "float64 and .*float32"),
        (np.zeros(21), np.zeros((0, 6)), np.zeros(0, int), "a client has 0 samples"),
    ],
)
def test_arrays_that_do_not_fit(params, features, labels, message):
    objective = make("softmax", 3)
    for function in (objective.losses_and_gradients, objective.losses):
        with pytest.raises((ConfigError, DataError), match=message):
            function(params, features, labels)


def test_numpy_alone_is_enough():
    script = """
import sys
for name in ("torch", "scipy", "platformdirs"):
    sys.modules[name] = None  # import fails
import numpy as np
from aqg.objectives import make_objective
objective = make_objective("mlp:4", 6, 3, 0.1, "mean")
loss, _ = objective.losses_and_gradients(
    objective.init_params(0), np.ones((5, 6)), np.zeros(5, np.int64)
)
assert np.isfinite(loss)
"""
    run(sys.executable, "-c", script)
