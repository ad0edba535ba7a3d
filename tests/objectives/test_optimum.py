"""The certified minimum and its cache."""

import json
from unittest.mock import Mock

import numpy as np
import pytest
from scipy import optimize

from aqg.errors import ConfigError, DataError
from aqg.objectives import make_objective
from aqg.objectives.optimum import Optimum, cached_optimum, find_optimum


def unequal_clients(num_classes, dtype=np.float64):
    """Each client holds mostly one label, and a different number of samples."""
    random = np.random.default_rng(5)
    clients = []
    for index, num_samples in enumerate((40, 7, 23)):
        labels = np.where(
            random.random(num_samples) < 0.7,
            index % num_classes,
            random.integers(0, num_classes, num_samples),
        )
        features = random.normal(size=(num_samples, 4)) + labels[:, None]
        clients.append((features.astype(dtype), labels))
    return clients


@pytest.mark.parametrize("scaling", ["mean", "sum"])
@pytest.mark.parametrize("l2", [1.0, 1e-2, 1e-5])
@pytest.mark.parametrize(("model", "num_classes"), [("logistic", 2), ("softmax", 3)])
def test_agrees_with_an_independent_solver(model, num_classes, l2, scaling):
    clients = unequal_clients(num_classes)
    objective = make_objective(model, 4, num_classes, l2, scaling)
    optimum = find_optimum(objective, clients)
    assert optimum.error_bound <= 1e-9
    assert optimum.error_bound == optimum.gradient_norm**2 / (2 * l2)

    def average(params):
        return float(np.mean([objective.losses(params, *client) for client in clients]))

    def gradient(params):
        each = [objective.losses_and_gradients(params, *client)[1] for client in clients]
        return np.mean(each, axis=0)

    # Newton's conjugate gradients share nothing with L-BFGS.
    found = optimize.minimize(
        average, np.zeros(objective.num_params), jac=gradient, method="Newton-CG", tol=1e-10
    )
    assert optimum.value == pytest.approx(found.fun, abs=1e-9)


def test_clients_count_alike_whatever_their_size():
    (features, labels), *_ = unequal_clients(2)
    objective = make_objective("logistic", 4, 2, 0.1, "mean")
    once = find_optimum(objective, [(features, labels)])
    doubled = np.concatenate([features, features]), np.concatenate([labels, labels])
    twice = find_optimum(objective, [(features, labels), doubled])
    assert twice.value == pytest.approx(once.value, abs=1e-11)


def test_single_precision_is_solved_in_double_and_an_exhausted_budget_shows_in_the_bound():
    objective = make_objective("softmax", 4, 3, 0.01, "mean")
    single = unequal_clients(3, np.float32)
    double = [(features.astype(np.float64), labels) for features, labels in single]
    assert find_optimum(objective, single) == find_optimum(objective, double)
    objective = make_objective("softmax", 4, 3, 1e-4, "mean")
    rough = find_optimum(objective, unequal_clients(3), max_passes=5)
    fine = find_optimum(objective, unequal_clients(3))
    assert rough.error_bound > 1e-9
    assert rough.value - rough.error_bound <= fine.value <= rough.value


def test_what_has_no_certified_minimum():
    for model, l2 in (("mlp:3", 0.1), ("softmax", 0.0)):
        with pytest.raises(ConfigError, match=f"{model} with l2={l2}"):
            find_optimum(make_objective(model, 4, 3, l2, "mean"), unequal_clients(3))
    objective = make_objective("logistic", 4, 2, 0.1, "mean")
    with pytest.raises(DataError, match="0 clients"):
        find_optimum(objective, [])
    (features, labels), *_ = unequal_clients(2)
    features[3, 1] = np.nan
    with pytest.raises(DataError, match="not finite"):
        find_optimum(objective, [(features, labels)])


KEY = {"dataset": "digits", "model": "softmax", "l2": 0.01, "clients": 10}
VALUE = Optimum(value=0.1 + 0.2, gradient_norm=1e-7, error_bound=1 / 3 * 1e-12)


def solver(answer=VALUE):
    return Mock(return_value=answer)


def only_entry(directory):
    (entry,) = (directory / "optima").iterdir()
    return entry


def test_computed_once_for_each_key(tmp_path, monkeypatch):
    compute, other = solver(), Optimum(2.0, 0.0, 0.0)
    assert cached_optimum(KEY, compute, tmp_path) == VALUE
    assert json.loads(only_entry(tmp_path).read_text())["optimum"]["value"] == VALUE.value
    for change in ({"l2": 0.02}, {"clients": 11}, {"seed": 1}):
        assert cached_optimum(KEY | change, solver(other), tmp_path) == other
    reordered = dict(reversed(KEY.items()))
    assert cached_optimum(reordered, compute, tmp_path) == VALUE  # to the last bit
    assert compute.call_count == 1
    monkeypatch.setenv("AQG_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert cached_optimum(KEY, solver(other)) == other
    assert only_entry(tmp_path / "elsewhere").suffix == ".json"


GOOD = {"value": 1.0, "gradient_norm": 0.0, "error_bound": 0.0}
DAMAGED = {
    "empty": b"",
    "truncated": b'{"key": "',
    "not text": b"\xff\xfe\x00",
    "not an object": b"[1, 2]",
    "no optimum": b"{}",
    "numbers missing": json.dumps({"key": "", "optimum": {"value": 1.0}}).encode(),
    "no finite number": json.dumps({"key": "", "optimum": GOOD | {"value": np.nan}}).encode(),
    "not a number": json.dumps({"key": "", "optimum": GOOD | {"value": "two"}}).encode(),
    "key of another entry": json.dumps({"key": "{}", "optimum": GOOD}).encode(),
    "optimum is a list": json.dumps({"key": "", "optimum": [1.0]}).encode(),
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_damaged_entry_is_computed_again_and_replaced(tmp_path, damage):
    cached_optimum(KEY, solver(), tmp_path)
    entry = only_entry(tmp_path)
    intact = entry.read_bytes()
    key = json.dumps(json.loads(intact)["key"]).encode()
    entry.write_bytes(damage.replace(b'"key": ""', b'"key": ' + key))
    compute = solver()
    assert cached_optimum(KEY, compute, tmp_path) == VALUE
    assert compute.call_count == 1
    assert only_entry(tmp_path).read_bytes() == intact


def test_a_cache_that_cannot_be_written_and_a_computation_that_fails(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("a file where the directory should be")
    compute = solver()
    for _ in range(2):
        assert cached_optimum(KEY, compute, blocked) == VALUE
    assert compute.call_count == 2
    with pytest.raises(DataError):
        cached_optimum(KEY, Mock(side_effect=DataError), tmp_path)
    assert list(tmp_path.iterdir()) == [blocked]
