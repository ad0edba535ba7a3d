"""Names, shapes, starting points, predictions, extreme values and bad input."""

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from aqg.errors import ConfigError, DataError
from aqg.objectives import make_objective

from tests.commands import run

MODELS = [("logistic", 2), ("softmax", 3), ("mlp:4", 3)]
ARRAY_KINDS = ["numpy", "torch"]


def make(model, num_classes, l2=0.1):
    return make_objective(model, 6, num_classes, l2, "mean")


def as_kind(kind, *arrays):
    if kind == "numpy":
        return list(arrays)
    torch = pytest.importorskip("torch")
    return [torch.from_numpy(array) for array in arrays]


def test_only_regularized_linear_models_are_strongly_convex():
    assert make("logistic", 2).convex
    assert make("softmax", 3).convex
    assert not make("softmax", 3, l2=0.0).convex
    assert not make("mlp:4", 3).convex


def test_logistic_starts_from_zero():
    params = make("logistic", 2).init_params(seed=3)
    assert params.dtype == np.float64
    assert not params.any()


def test_networks_start_from_glorot_weights_and_zero_biases():
    objective = make_objective("mlp:200", 100, 10, 0.0, "mean")
    params = objective.init_params(seed=3)
    np.testing.assert_array_equal(params, objective.init_params(seed=3))
    assert (params != objective.init_params(seed=4)).any()
    weight1, bias1, weight2, bias2 = np.split(params, [20_000, 20_200, 22_200])
    assert not bias1.any()
    assert not bias2.any()
    for weight, fans in (weight1, 100 + 200), (weight2, 200 + 10):
        bound = np.sqrt(6 / fans)
        assert 0.99 * bound < np.abs(weight).max() <= bound
        assert abs(weight.mean()) < 0.05 * bound


@pytest.mark.parametrize("kind", ARRAY_KINDS)
@pytest.mark.parametrize(("model", "num_classes"), MODELS)
def test_prediction_is_the_label_with_the_smallest_loss(model, num_classes, kind):
    objective = make(model, num_classes)
    random = np.random.default_rng(0)
    params = random.normal(size=objective.num_params)
    features = random.normal(size=(4, 9, 6))
    loss_of_label = np.stack(
        [
            objective.losses(params, features[..., None, :], np.full((4, 9, 1), label))
            for label in range(num_classes)
        ]
    )
    predicted = objective.predict(*as_kind(kind, params, features))
    assert predicted.shape == (4, 9)
    np.testing.assert_array_equal(np.asarray(predicted), loss_of_label.argmin(axis=0))


@pytest.mark.parametrize("label_dtype", [np.uint8, np.int32, np.int64])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", ARRAY_KINDS)
@pytest.mark.parametrize(("model", "num_classes"), MODELS)
def test_dtype_is_kept(model, num_classes, kind, dtype, label_dtype):
    objective = make(model, num_classes)
    params, features, labels = as_kind(
        kind,
        objective.init_params(0).astype(dtype),
        np.ones((2, 5, 6), dtype),
        np.ones((2, 5), label_dtype),
    )
    losses, gradients = objective.losses_and_gradients(params, features, labels)
    assert losses.dtype == gradients.dtype == features.dtype
    assert objective.losses(params, features, labels).dtype == features.dtype


@pytest.mark.parametrize(("model", "num_classes"), MODELS)
def test_inputs_are_left_alone(model, num_classes):
    objective = make(model, num_classes)
    random = np.random.default_rng(0)
    arrays = (
        random.normal(size=objective.num_params),
        random.normal(size=(2, 5, 6)),
        random.integers(0, 2, (2, 5)),
    )
    for array in arrays:
        array.flags.writeable = False
    objective.losses_and_gradients(*arrays)
    objective.predict(*arrays[:2])


def test_huge_scores_give_the_exact_loss():
    objective = make_objective("logistic", 1, 2, 0.0, "sum")
    scores = np.array([[1e4], [-1e4], [1e4], [-1e4]])
    losses, gradients = objective.losses_and_gradients(np.ones(1), scores, np.array([1, 0, 0, 1]))
    assert losses == 2e4
    assert gradients == 2e4  # slope 1 on the wrong side, 0 on the right one

    objective = make_objective("softmax", 1, 2, 0.0, "sum")
    params = np.array([1.0, 0.0, 0.0, 0.0])
    losses = objective.losses(params, scores, np.array([0, 1, 1, 0]))
    assert losses == 2e4


def test_small_losses_keep_their_precision():
    objective = make_objective("logistic", 1, 2, 0.0, "sum")
    loss = objective.losses(np.ones(1), np.array([[50.0]]), np.array([1]))
    np.testing.assert_allclose(loss, np.exp(-50.0), rtol=1e-15)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
@pytest.mark.parametrize("kind", ARRAY_KINDS)
@pytest.mark.parametrize(("model", "num_classes"), MODELS)
def test_divergence_shows_in_the_result_without_a_warning(model, num_classes, kind, value):
    objective = make(model, num_classes)
    params = np.full(objective.num_params, value)
    features = np.random.default_rng(0).normal(size=(2, 5, 6)) * 1e10
    labels = np.zeros((2, 5), np.int64)
    losses, gradients = objective.losses_and_gradients(*as_kind(kind, params, features, labels))
    assert not np.isfinite(np.asarray(losses)).any()
    if not np.isfinite(value):
        assert not np.isfinite(np.asarray(gradients)).all()
    objective.predict(*as_kind(kind, params, features))


def test_threads_do_not_disturb_each_other():
    objective = make("softmax", 3)
    params = np.full(objective.num_params, np.inf)
    features, labels = np.ones((50, 6)), np.zeros(50, np.int64)

    def work(_):
        return bool(np.isnan(objective.losses_and_gradients(params, features, labels)[0]))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(200)))


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
        (("softmax", 0, 3, 0.0, "mean"), "at least 1 feature, got 0"),
        (("softmax", 4, 1, 0.0, "mean"), "at least 2 classes, got 1"),
        (("softmax", 4, 3, -0.5, "mean"), "l2 -0.5"),
        (("softmax", 4, 3, float("nan"), "mean"), "l2 nan"),
        (("softmax", 4, 3, 0.0, "median"), "scaling 'median' is not one of mean, sum"),
        (("softmax", 4, 3, 0.0, "mean"), "seed -1"),
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
