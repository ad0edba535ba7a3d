"""Metrics: the numbers of the textbooks, whatever shape outputs come in, and silence otherwise."""

import math

import numpy as np
import pytest

from aqg.errors import ConfigError
from aqg.objectives.metrics import (
    METRICS,
    DoesNotApply,
    Metric,
    default_metrics,
    make_metrics,
    measure,
)

torch = pytest.importorskip("torch")

RANDOM = np.random.default_rng(0)


def value(name, outputs, targets):
    return measure([METRICS[name]], [(outputs, targets)], required=True)[name]


def test_accuracy_of_classes_sequences_labels_and_logits():
    scores, labels = RANDOM.normal(size=(40, 3)), RANDOM.integers(0, 3, 40)
    expected = np.mean(scores.argmax(1) == labels)
    assert value("accuracy", scores, labels) == expected
    assert value("accuracy", torch.from_numpy(scores), torch.from_numpy(labels)) == expected
    assert value("accuracy", scores.argmax(1), labels) == expected
    tokens = RANDOM.normal(size=(4, 5, 7))
    wanted = RANDOM.integers(0, 7, (4, 5))
    by_token = np.mean(tokens.argmax(-1) == wanted)
    assert value("accuracy", tokens, wanted) == by_token
    assert value("accuracy", np.moveaxis(tokens, -1, 1), wanted) == by_token
    logits = np.array([[-1.0], [2.0], [3.0]])
    assert value("accuracy", logits, np.array([0, 1, 0])) == pytest.approx(2 / 3)
    several = np.array([[1.0, -1.0], [-2.0, 2.0]])
    assert value("accuracy", several, np.array([[1.0, 1.0], [0.0, 1.0]])) == 0.75


def test_targets_that_do_not_count_are_left_out():
    scores = np.eye(3)[[0, 1, 2, 0]]
    labels = np.array([0, 1, -100, 2])
    assert value("accuracy", scores, labels) == pytest.approx(2 / 3)
    mean = torch.nn.functional.cross_entropy(torch.from_numpy(scores), torch.from_numpy(labels))
    assert value("perplexity", scores, labels) == pytest.approx(math.exp(mean), rel=1e-12)


def test_errors_of_numbers():
    outputs, targets = RANDOM.normal(size=(30, 2)), RANDOM.normal(size=(30, 2))
    assert value("mse", outputs, targets) == pytest.approx(np.mean((outputs - targets) ** 2))
    residual = ((targets - outputs) ** 2).sum(0)
    total = ((targets - targets.mean(0)) ** 2).sum(0)
    assert value("r2", outputs, targets) == pytest.approx(np.mean(1 - residual / total))
    assert value("r2", targets, targets) == 1


@pytest.mark.parametrize("name", METRICS)
def test_batches_give_what_the_whole_gives(name):
    outputs = RANDOM.normal(size=(30, 4))
    targets = RANDOM.normal(size=(30, 4)) if name in ("mse", "r2") else RANDOM.integers(0, 4, 30)
    parts = [(outputs[i : i + 7], targets[i : i + 7]) for i in range(0, 30, 7)]
    whole = value(name, outputs, targets)
    assert measure([METRICS[name]], parts, required=True)[name] == pytest.approx(whole, rel=1e-12)


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(DoesNotApply, match=r"outputs have shape \(5, 1\) and targets \(5,\)"):
        value("mse", np.zeros((5, 1)), np.zeros(5))
    with pytest.raises(DoesNotApply, match="either axis 1 or the last may count classes"):
        value("accuracy", np.zeros((2, 3, 3)), np.zeros((2, 3), int))


def test_what_makes_no_sense_is_left_out_unless_it_was_asked_for():
    outputs, numbers = RANDOM.normal(size=8), RANDOM.normal(size=8)
    assert measure([METRICS["accuracy"]], [(outputs, numbers)], required=False) == {}
    with pytest.raises(DoesNotApply, match="stands for a label 0 or 1; a target is"):
        value("accuracy", outputs, numbers)
    with pytest.raises(DoesNotApply, match="accuracy needs classes; the targets are float64"):
        value("accuracy", np.zeros((8, 3)), numbers)
    with pytest.raises(DoesNotApply, match="perplexity needs classes"):
        value("perplexity", np.zeros((8, 3)), numbers)
    with pytest.raises(DoesNotApply, match="constant"):
        value("r2", outputs, np.ones(8))


def test_defaults_follow_the_targets():
    def names(targets):
        return [metric.name for metric in default_metrics(targets)]

    assert names(np.array([3, 1])) == ["accuracy"]
    assert names(np.array([[0.0, 1.0]])) == ["accuracy"]
    assert names(np.array([0.5, 1.0])) == ["mse", "r2"]


def test_several_outputs():
    logits, labels = RANDOM.normal(size=(6, 3)), RANDOM.integers(0, 3, 6)
    expected = value("accuracy", logits, labels)
    tensor = torch.from_numpy(logits)
    assert value("accuracy", {"hidden": tensor, "logits": tensor}, labels) == expected
    assert value("accuracy", (tensor, torch.zeros(6)), labels) == expected
    found = measure(default_metrics(labels), [({"boxes": tensor}, labels)], required=False)
    assert found == {}

    def boxes(outputs, targets):
        return float(outputs["boxes"].sum()) + len(targets)

    parts = [({"boxes": tensor[:4]}, labels[:4]), ({"boxes": tensor[4:]}, labels[4:])]
    assert measure(make_metrics(boxes), parts, required=True)["boxes"] == pytest.approx(
        float(tensor.sum()) + 6
    )


def test_half_precision_outputs():
    outputs = torch.tensor([[0.0, 1.0]], dtype=torch.bfloat16)
    assert value("accuracy", outputs, torch.tensor([1])) == 1


def test_bad_metrics_are_named():
    for given, message in (
        ("acuracy", "'acuracy' is not one of accuracy, mse, r2, perplexity"),
        ("accuracy,accuracy", "named twice"),
        ([3], "metric is a int"),
        ({"my metric": max}, "letters, digits and underscores"),
        ({"loss": max}, "other than loss and residual"),
        (lambda o, t: 0.0, "without a name"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_metrics(given)
    broken = Metric("broken", whole=lambda o, t: 1 / 0)
    with pytest.raises(ConfigError, match="metric 'broken' failed: ZeroDivisionError"):
        measure([broken], [(np.zeros(2), np.zeros(2))], required=False)
    text = Metric("text", whole=lambda o, t: "good")
    with pytest.raises(ConfigError, match="metric 'text' returned a str, not a number"):
        measure([text], [(np.zeros(2), np.zeros(2))], required=False)
    with pytest.raises(ConfigError, match="needs one of whole= and sums="):
        Metric("nothing")
