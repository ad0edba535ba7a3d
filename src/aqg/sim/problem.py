"""What is to be learned, and by whom: the input of every simulator."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aqg.core.types import FloatArray, to_numpy
from aqg.errors import ConfigError, DataError
from aqg.objectives.base import Objective
from aqg.objectives.metrics import METRICS, Metric, default_metrics, make_metrics, measure

if TYPE_CHECKING:
    import torch


class Samples(NamedTuple):
    """Features ``(n, ...)``, floating-point or integer, and targets ``(n, ...)`` of any kind.

    The built-in models take rows of features ``(n, f)`` and labels ``(n,)``.
    """

    features: NDArray[Any]
    labels: NDArray[Any]


@dataclass(frozen=True)
class Problem:
    """An objective, each client's samples, the starting point and (if any) a test set.

    The loss that is reported is the mean over clients of their own loss, ``(1/M) Σ_m f_m(θ)``,
    weighted where clients are.

    Attributes:
        objective: the loss and its gradient.
        clients: the samples of each.
        initial_params: ``θ^0``, float32 or float64, which is the precision of everything.
        test: samples that no client has.
        validation: samples that the clients hold out: runs may be tuned and stopped by them.
        metrics: what is measured on the test set, in any form that `make_metrics` takes; by default
            what suits the targets.
        start_bytes: what a client receives that gets ``θ^0`` sent (`aqg.start`).
    """

    objective: Objective
    clients: tuple[Samples, ...]
    initial_params: FloatArray
    test: Samples | None = None
    metrics: Any = None
    validation: Samples | None = None
    start_bytes: int = 0

    @staticmethod
    def from_module(
        module: torch.nn.Module,
        clients: Iterable[Any],
        test: Any = None,
        loss: Callable[[Any, torch.Tensor], torch.Tensor] | None = None,
        *,
        metrics: Any = None,
        dtype: str = "float32",
        **options: Any,
    ) -> Problem:
        """Make a problem of a torch module and each client's data.

        Args:
            module: what is trained; it is copied and never changed.
            clients: for each, a `torch.utils.data.Dataset` of pairs (sample, target), or a pair of
                arrays or tensors. All is read into memory once.
            test: the same for the test set.
            loss: the mean loss of a batch, from outputs and targets; by default cross-entropy for
                whole numbers, at every place of a sequence, and the mean squared error for others.
            metrics: names or functions; by default what suits the targets.
            dtype: the precision of everything.
            options: as in `Objective.from_module`.
        """
        from aqg.models.nets import default_loss  # needs torch
        from aqg.objectives import Objective

        held = tuple(gather(data, f"client {m}", dtype) for m, data in enumerate(clients))
        if not held:
            raise DataError("a problem has 0 clients; it needs at least 1")
        loss = default_loss(held[0].labels) if loss is None else loss
        options.setdefault("name", type(module).__name__)
        objective = Objective.from_module(module, loss, **options)
        return Problem(
            objective=objective,
            clients=held,
            initial_params=objective.init_params(0).astype(dtype),
            test=None if test is None else gather(test, "the test set", dtype),
            metrics=metrics,
        )

    def __post_init__(self) -> None:
        if self.initial_params.dtype not in (np.float32, np.float64):
            raise ConfigError(
                f"initial_params are {self.initial_params.dtype}; they must be float32 or float64 "
                "(models in half precision train with float32 values)"
            )
        if not self.clients:
            raise DataError("a problem has 0 clients; it needs at least 1")
        clients = tuple(self._checked(f"client {m}", s) for m, s in enumerate(self.clients))
        shape = clients[0].features.shape[1:]
        if not (self.objective.takes_integers or _is_float(clients[0].features)):
            raise DataError(
                f"features are {clients[0].features.dtype}; {self.objective.name} needs "
                f"floating-point ones, such as {self.initial_params.dtype}"
            )
        change = {"clients": clients, "objective": self.objective.for_samples(shape)}
        for name, samples in ("test", self.test), ("validation", self.validation):
            if samples is not None:
                change[name] = self._checked(f"the {name} set", samples)
        if self.metrics is not None:
            change["metrics"] = make_metrics(self.metrics)
        for name, value in change.items():
            object.__setattr__(self, name, value)

    def _checked(self, owner: str, samples: Samples) -> Samples:
        features, labels = (to_numpy(part) for part in samples)
        first = to_numpy(self.clients[0].features)
        if features.ndim < 2:
            raise DataError(
                f"{owner} has features of shape {features.shape}; they need an axis of samples "
                "and at least one of features"
            )
        if len(features) != len(labels):
            raise DataError(f"{owner} has {len(features)} features and {len(labels)} targets")
        if features.shape[1:] != first.shape[1:]:
            raise DataError(
                f"{owner} has samples of shape {features.shape[1:]}; those of client 0 are "
                f"{first.shape[1:]}"
            )
        dtype = self.initial_params.dtype
        if _is_float(features) and features.dtype.itemsize < dtype.itemsize:
            features = features.astype(dtype)  # wider, so nothing is lost
        return Samples(features, labels)

    @property
    def num_clients(self) -> int:
        return len(self.clients)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The precision everything is computed in."""
        return self.initial_params.dtype

    @property
    def chosen_metrics(self) -> tuple[Metric, ...]:
        """What `measure` reports, where it makes sense."""
        if self.test is None:
            return ()
        return default_metrics(self.test.labels) if self.metrics is None else self.metrics

    def measure(self, params: FloatArray) -> dict[str, float]:
        """Return the metrics of a model on the test set, by name.

        Empty where there is no test set, or the model holds NaN or infinity. Where each client has
        statistics of its own, a metric is the mean over the clients' models.
        """
        if self.test is None or not np.isfinite(params).all():
            return {}
        found = []
        for view in self.objective.views():
            with view:
                batches = self.objective.test_batches(params, *self.test)
                required = self.metrics is not None
                found.append(measure(self.chosen_metrics, batches, required=required))
        return {name: float(np.mean([row[name] for row in found])) for name in found[0]}

    def validate(self, params: Any, samples: Samples, kind: str) -> float:
        """Return the accuracy or the loss of a model on samples; NaN where there is none.

        ``kind`` is ``"accuracy"`` or ``"loss"``; the model is finite, and where the samples are.
        """
        found = []
        for view in self.objective.views():
            with view:
                if kind == "loss":
                    found.append(float(self.objective.losses(params, *samples)))
                    continue
                batches = self.objective.test_batches(params, *samples)
                measured = measure((METRICS["accuracy"],), batches, required=False)
                found.append(measured.get("accuracy", math.nan))
        return float(np.mean(found))

    def test_accuracy(self, params: FloatArray) -> float | None:
        """Return the fraction of test samples that the model gets right, where that is measured."""
        return self.measure(params).get("accuracy")


def _is_float(array: NDArray[Any]) -> bool:
    return bool(np.issubdtype(array.dtype, np.floating))


def gather(source: Any, name: str = "the dataset", dtype: str = "float32") -> Samples:
    """Return the samples of a dataset as two arrays.

    ``source`` is a torch dataset of pairs of a sample and its target; a pair of arrays or tensors,
    samples first; or `Samples`. Whole numbers stay whole, others get ``dtype``.

    >>> samples = gather([([0.5, 1.0], 0), ([2.0, 4.0], 1), ([0.0, 8.0], 1)])
    >>> samples.features.dtype, samples.labels.tolist()
    (dtype('float32'), [0, 1, 1])
    """
    features, labels = _columns(source, name)
    if not features.ndim or not labels.ndim or len(features) != len(labels):
        raise DataError(
            f"{name} has samples of shape {features.shape} and targets of shape {labels.shape}; "
            "both need one entry per sample"
        )
    if not len(labels):
        raise DataError(f"{name} has 0 samples; at least 1 is needed")
    return Samples(
        _numbers(features, f"samples of {name}", dtype),
        _numbers(labels, f"targets of {name}", dtype),
    )


def _columns(source: Any, name: str) -> tuple[NDArray[Any], NDArray[Any]]:
    # A TensorDataset has tensors, which are read without a copy per sample.
    for pair in source, getattr(source, "tensors", None):
        if isinstance(pair, tuple | list) and len(pair) == 2:
            return _array(pair[0], name), _array(pair[1], name)
    items = source
    if hasattr(source, "__len__") and hasattr(source, "__getitem__"):
        items = map(source.__getitem__, range(len(source)))
    elif not hasattr(source, "__iter__"):
        kind = type(source).__name__
        raise DataError(f"{name} is a {kind}; it must be a torch Dataset or a pair")
    columns: tuple[list[NDArray[Any]], list[NDArray[Any]]] = [], []
    for number, item in enumerate(items):
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise DataError(
                f"item {number} of {name} is a {type(item).__name__}; it must be a pair of a "
                "sample and its target"
            )
        for what, column, value in zip(("sample", "target"), columns, item, strict=True):
            column.append(_array(value, name))
            if column[-1].shape != column[0].shape:
                raise DataError(
                    f"{what} {number} of {name} has shape {column[-1].shape}, and {what} 0 has "
                    f"{column[0].shape}; pad them to one shape"
                )
    if not columns[0]:
        raise DataError(f"{name} has 0 samples; at least 1 is needed")
    features, labels = map(np.stack, columns)
    return features, labels


def _array(value: Any, name: str) -> NDArray[Any]:
    try:
        return to_numpy(value)
    except ValueError as error:
        raise DataError(f"{name} holds what is no array of numbers: {error}") from None


def _numbers(array: NDArray[Any], what: str, dtype: str) -> NDArray[Any]:
    if array.dtype.kind == "f":
        return array.astype(dtype, copy=False)
    if array.dtype.kind in "iub":
        return array.astype(np.int64, copy=False)
    raise DataError(f"{what} are {array.dtype}; they must be numbers")
