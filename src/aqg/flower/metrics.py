"""Metrics that clients measure, with names: their means, weighted by examples."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from aqg.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flwr.app import RecordDict

_logger = logging.getLogger("flwr.aqg")

TRAINED, EVALUATED = "train_", "eval_"
"""Begin the names of fields with what clients measured while they trained, and of the model."""
EXAMPLES = "num-examples"
"""The metric by which others are weighted, under Flower's name for it."""
_LONGEST_NAME = 80
_LOSSES = ("loss", "train_loss", "train-loss", "eval_loss", "eval-loss")


def mean_metrics(found: Sequence[tuple[float, Mapping[str, float]]]) -> dict[str, float]:
    """Return the mean of every metric over the clients that sent it; NaN stays NaN.

    Args:
        found: the weight and the metrics of every client.

    >>> mean_metrics([(10.0, {"accuracy": 0.5}), (30.0, {"accuracy": 0.9, "own": 2.0})])
    {'accuracy': 0.8, 'own': 2.0}

    """
    means = {}
    for name in dict.fromkeys(name for _, metrics in found for name in metrics):
        pairs = [(weight, metrics[name]) for weight, metrics in found if name in metrics]
        total = sum(weight for weight, _ in pairs)
        if total > 0:
            means[name] = sum(weight * value for weight, value in pairs) / total
        else:
            means[name] = sum(value for _, value in pairs) / len(pairs)
    return means


def loss_in(metrics: Mapping[str, float]) -> float:
    """Return the loss among a client's metrics; NaN where there is none.

    >>> loss_in({"accuracy": 0.5, "train_loss": 0.25})
    0.25
    """
    return next((metrics[name] for name in _LOSSES if name in metrics), math.nan)


def metric_fields(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics under the names of their fields in ``rounds.jsonl``.

    >>> metric_fields(EVALUATED, {"top-5 accuracy": 0.9, "eval_loss": 0.1})
    {'eval_top_5_accuracy': 0.9, 'eval_loss': 0.1}
    """
    fields = {}
    for name, value in metrics.items():
        word = re.sub(r"\W", "_", name)
        fields[word if word.startswith(prefix) else prefix + word] = value
    return fields


def as_metrics(said: float | Mapping[str, Any] | None, single: str) -> dict[str, float]:
    """Return what a user's function measured, by name; one number alone is ``single``.

    >>> as_metrics({"loss": 0.5, "accuracy": 0.75}, "loss"), as_metrics(0.5, "loss")
    ({'loss': 0.5, 'accuracy': 0.75}, {'loss': 0.5})
    """
    if said is None:
        return {}
    metrics = {}
    for name, value in (said if isinstance(said, Mapping) else {single: said}).items():
        try:
            metrics[str(name)] = float(value)
        except (TypeError, ValueError):
            raise ConfigError(f"metric {name!r} is {value!r:.80}; it must be a number") from None
    return metrics


def numbers_in(content: RecordDict) -> dict[str, float]:
    """Return the numbers in all metrics of a reply."""
    found: dict[str, float] = {}
    for record in content.metric_records.values():
        for name, value in record.items():
            if isinstance(value, int | float):
                found[plain(name, _LONGEST_NAME)] = float(value)
            else:
                _logger.warning("metric %r is a list, which AQG does not average", name)
    return found


def plain(text: str, max_length: int = 500) -> str:
    r"""Make a text of a node fit for logs and terminals: one line, every character visible.

    >>> plain("lost\n\x1b[2J  the\u202e end")
    'lost \\x1b[2J the\\u202e end'
    """
    line = " ".join(text[:max_length].split())
    shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return "".join(shown)[:max_length]
