"""What is measured on the test set: functions with names.

A metric takes a model's outputs and the targets, and gives one number. Those built in know when
they make no sense, such as the accuracy of a regression, and say so.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aqg.core.types import Float64Array, to_numpy
from aqg.errors import AqgError, ConfigError

Function = Callable[[Any, Any], float]

IGNORED = -100
"""Integer targets of this value do not count, as in ``torch.nn.functional.cross_entropy``."""

_RESERVED = ("loss", "residual")


class DoesNotApply(ConfigError):  # noqa: N818  (a reason, which a default leaves out)
    """A metric makes no sense for these outputs and targets."""


@dataclass(frozen=True)
class Metric:
    """A number that says how good a model is."""

    name: str  # letters, digits and underscores; in records it is ``test_NAME``
    # from all outputs of the test set, as the module returns them, and all targets
    whole: Function | None = None
    # from a batch of them, in place of ``whole``: sums over the samples that are added up
    sums: Callable[[Any, Any], Float64Array] | None = None
    finish: Callable[[Float64Array], float] = float  # from the added sums, the number
    higher_is_better: bool | None = None  # None where nobody said
    is_percent: bool = False  # whether the number is a share, to be shown in percent

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or not self.name.isascii() or self.name in _RESERVED:
            raise ConfigError(
                f"metric {self.name!r} needs a name of letters, digits and underscores other than "
                f"{' and '.join(_RESERVED)}"
            )
        if (self.whole is None) == (self.sums is None):
            raise ConfigError(f"metric {self.name!r} needs one of whole= and sums=")

    def format(self, value: float | None) -> str:
        """Write a value as tables show it.

        >>> METRICS["accuracy"].format(0.912), METRICS["mse"].format(0.0123)
        ('91.2%', '0.0123')
        """
        if value is None or not math.isfinite(value):
            return "-"
        return f"{value:.1%}" if self.is_percent else f"{value:.4g}"

    def describe(self) -> dict[str, Any]:
        return {"higher_is_better": self.higher_is_better, "percent": self.is_percent}


def named_metric(name: str) -> Metric:
    """Return a metric as records know it: one built in, or an unknown one with that name."""
    return METRICS.get(name) or Metric(name, whole=lambda _outputs, _targets: math.nan)


def make_metrics(
    given: str | Metric | Function | Iterable[str | Metric | Function] | Mapping[str, Function],
) -> tuple[Metric, ...]:
    """Return metrics given by name, as functions, or both.

    A function is named after itself, or by its key in a mapping.
    """
    if isinstance(given, Mapping):
        given = [Metric(name, whole=function) for name, function in given.items()]
    elif isinstance(given, str):
        given = [name.strip() for name in given.split(",") if name.strip()]
    elif isinstance(given, Metric) or callable(given):
        given = [given]
    chosen: dict[str, Metric] = {}
    for metric in map(_one, given):
        if metric.name in chosen:
            raise ConfigError(f"metric {metric.name!r} is named twice")
        chosen[metric.name] = metric
    return tuple(chosen.values())


def _one(given: str | Metric | Function) -> Metric:
    if isinstance(given, Metric):
        return given
    if isinstance(given, str):
        if given not in METRICS:
            choices = ", ".join(METRICS)
            raise ConfigError(f"metric {given!r} is not one of {choices}; give a function")
        return METRICS[given]
    if not callable(given):
        raise ConfigError(f"metric is a {type(given).__name__}, not a name or a function")
    name = getattr(given, "__name__", "")
    if not name.isidentifier():
        raise ConfigError("a metric without a name; give it as {'name': function}")
    return Metric(name, whole=given)


def default_metrics(targets: Any) -> tuple[Metric, ...]:
    """Return what suits the targets: accuracy for classes, errors for numbers."""
    array = to_numpy(targets)
    if not np.issubdtype(array.dtype, np.floating) or np.isin(array, (0, 1)).all():
        return (METRICS["accuracy"],)
    return METRICS["mse"], METRICS["r2"]


def measure(
    metrics: Sequence[Metric], batches: Iterable[tuple[Any, Any]], *, required: bool
) -> dict[str, float]:
    """Return the value of each metric that applies; with ``required``, raise where one does not."""
    totals: dict[str, Float64Array] = {}
    kept: list[tuple[Any, Any]] = []
    left = list(metrics)

    def attempt(metric: Metric, outputs: Any, targets: Any) -> Any:
        try:
            function: Any = metric.sums if metric.sums is not None else metric.whole
            return function(outputs, targets)
        except DoesNotApply:
            if required:
                raise
            left.remove(metric)
        except AqgError:
            raise
        except Exception as error:  # the user's own code
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"metric {metric.name!r} failed: {type(error).__name__}: {reason}"
            ) from error
        return None

    for outputs, targets in batches:
        for metric in [metric for metric in left if metric.sums is not None]:
            part = attempt(metric, outputs, targets)
            if part is not None:
                totals[metric.name] = totals.get(metric.name, 0.0) + part
        if any(metric.whole is not None for metric in left):
            kept.append((outputs, targets))
    values: dict[str, float] = {}
    for metric in list(left):
        if metric.whole is not None:
            value = attempt(metric, _joined([o for o, _ in kept]), _joined([t for _, t in kept]))
        else:
            value = metric.finish(totals[metric.name]) if metric.name in totals else None
        try:
            values |= {} if value is None else {metric.name: float(value)}
        except (TypeError, ValueError):
            raise ConfigError(
                f"metric {metric.name!r} returned a {type(value).__name__}, not a number"
            ) from None
    return values


def _joined(parts: Sequence[Any]) -> Any:
    """Return batches of outputs as one: tensors, and tuples or mappings of them."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, dict):
        return {key: _joined([part[key] for part in parts]) for key in first}
    if isinstance(first, tuple | list):
        return type(first)([_joined(list(column)) for column in zip(*parts, strict=True)])
    if isinstance(first, np.ndarray):
        return np.concatenate(parts)
    import torch

    if isinstance(first, torch.Tensor):
        return torch.cat(list(parts)) if first.ndim else torch.stack(list(parts))
    return list(parts)


def main_output(outputs: Any) -> NDArray[Any]:
    """Return the output that is measured: the only one, ``logits``, or the first of a tuple."""
    if isinstance(outputs, dict):
        if "logits" not in outputs:
            names = ", ".join(map(str, outputs))
            raise DoesNotApply(f"the outputs are {names}, without logits; give your own metric")
        outputs = outputs["logits"]
    elif hasattr(outputs, "logits"):
        outputs = outputs.logits
    elif isinstance(outputs, tuple | list) and outputs:
        outputs = outputs[0]
    if not isinstance(outputs, np.ndarray) and not hasattr(outputs, "detach"):
        raise DoesNotApply(f"the output is a {type(outputs).__name__}; give your own metric")
    return to_numpy(outputs)


def _scores(outputs: Any, targets: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return class scores ``(N, C)`` and targets ``(N,)``, without those that do not count."""
    scores, labels = main_output(outputs), to_numpy(targets)
    last = scores.shape[:-1] == labels.shape
    second = scores.ndim > 2 and (scores.shape[0], *scores.shape[2:]) == labels.shape
    if scores.ndim != labels.ndim + 1 or not (last or second):
        raise DoesNotApply(
            f"outputs of shape {scores.shape} are no class scores for targets of shape "
            f"{labels.shape}; give your own metric"
        )
    if last and second:
        raise DoesNotApply(
            f"in outputs of shape {scores.shape} either axis 1 or the last may count classes; "
            "give your own metric"
        )
    if second:
        scores = np.moveaxis(scores, 1, -1)
    scores, labels = scores.reshape(-1, scores.shape[-1]), labels.reshape(-1)
    counted = labels != IGNORED
    return scores[counted], labels[counted]


def _accuracy(outputs: Any, targets: Any) -> Float64Array:
    scores, labels = main_output(outputs), to_numpy(targets)
    if scores.shape == (*labels.shape, 1):
        scores = scores[..., 0]
    if scores.shape == labels.shape:
        if not np.issubdtype(scores.dtype, np.floating):  # labels already
            return np.array([np.count_nonzero(scores == labels), labels.size], np.float64)
        if not np.isin(labels, (0, 1)).all():
            raise DoesNotApply(
                f"one output per target stands for a label 0 or 1; a target is "
                f"{labels[~np.isin(labels, (0, 1))][0]}"
            )
        return np.array([np.count_nonzero((scores > 0) == labels), labels.size], np.float64)
    if np.issubdtype(labels.dtype, np.floating):
        raise DoesNotApply(f"accuracy needs classes; the targets are {labels.dtype}")
    scores, labels = _scores(outputs, targets)
    return np.array([np.count_nonzero(scores.argmax(-1) == labels), labels.size], np.float64)


def _mean_of(sums: Float64Array) -> float:
    return float(sums[0] / sums[1]) if sums[1] else math.nan


def _errors(outputs: Any, targets: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    found, wanted = main_output(outputs), to_numpy(targets)
    if found.shape != wanted.shape:
        raise DoesNotApply(
            f"outputs have shape {found.shape} and targets {wanted.shape}; they must be equal"
        )
    return found.astype(np.float64), wanted.astype(np.float64)


def _squared_errors(outputs: Any, targets: Any) -> Float64Array:
    found, wanted = _errors(outputs, targets)
    return np.array([np.sum((found - wanted) ** 2), wanted.size])


def _explained(outputs: Any, targets: Any) -> float:
    """Return ``1 - Σ(y - o)² / Σ(y - mean)²``, the mean over the columns of ``y``."""
    found, wanted = (part.reshape(len(part), -1) for part in _errors(outputs, targets))
    spread = np.sum((wanted - wanted.mean(0)) ** 2, axis=0)
    if not (spread > 0).all():
        raise DoesNotApply("a column of the targets is constant, so there is nothing to explain")
    return float(np.mean(1 - np.sum((wanted - found) ** 2, axis=0) / spread))


def _surprise(outputs: Any, targets: Any) -> Float64Array:
    if np.issubdtype(to_numpy(targets).dtype, np.floating):
        raise DoesNotApply(f"perplexity needs classes; the targets are {to_numpy(targets).dtype}")
    scores, labels = _scores(outputs, targets)
    shifted = scores.astype(np.float64) - scores.max(-1, keepdims=True)
    log_sums = np.log(np.exp(shifted).sum(-1))
    chosen = np.take_along_axis(shifted, labels[:, None].astype(np.int64), -1)[:, 0]
    return np.array([np.sum(log_sums - chosen), labels.size])


def _perplexity(sums: Float64Array) -> float:
    mean = _mean_of(sums)
    return math.exp(mean) if mean < 700 else math.inf


_BUILT_IN = (
    Metric("accuracy", sums=_accuracy, finish=_mean_of, higher_is_better=True, is_percent=True),
    Metric("mse", sums=_squared_errors, finish=_mean_of, higher_is_better=False),
    Metric("r2", whole=_explained, higher_is_better=True),
    Metric("perplexity", sums=_surprise, finish=_perplexity, higher_is_better=False),
)
METRICS: dict[str, Metric] = {metric.name: metric for metric in _BUILT_IN}
"""The metrics that are built in, by name."""
