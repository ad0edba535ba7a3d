"""Our own strategy: the simulator's server, as a strategy of Flower.

It keeps the model itself: clients send updates against mirrors that the server holds, and the
server publishes the sum. So a client that is silent, late or away still counts with what is known
of it, and the run ends with the simulator's model.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp.strategy import Result, Strategy

from aqg.errors import ConfigError
from aqg.flower.desk import EVALUATE, TRAIN
from aqg.flower.grid import CompressedGrid
from aqg.flower.models import ServerModel, make_model
from aqg.flower.run import Run
from aqg.flower.settings import KEYS, Settings, read_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch
    from flwr.app import Message
    from flwr.serverapp import Grid

    from aqg.core.recipe import Recipe
    from aqg.core.types import FloatArray
    from aqg.flower.loggers import RunLogger
    from aqg.flower.reports import RoundReport

    Evaluate = Callable[[Any], float | Mapping[str, float] | None]
    EvaluateRound = Callable[[int, ArrayRecord], MetricRecord | None]

_logger = logging.getLogger("flwr.aqg")

_METRIC_POINTS = 50
_ROUNDS = 3
"""Flower's default."""


class AQG(Strategy):
    """Trains with the fewest bytes, and goes on whatever happens to clients and server.

    Clients are those of `make_client_app`, or any ClientApp with the mod:
    ``ClientApp(mods=[aqg_mod])``, whose handlers are as for FedAvg.

    Args:
        num_clients: how many clients there are, connected or not.
        recipe: name and options of the compressor, see ``aqg recipes``, or a recipe of your own,
            which clients must have as well.
        evaluate: the accuracy of a model on the server's own test data, or several metrics by
            name. It is given what training starts from, with the current model in it: a torch
            module, an ArrayRecord or a flat vector.
        include: name patterns of the parameters that travel, such as ``"*.lora_*"``.
        exclude: name patterns of tensors that stay out.
        statistics: what becomes of running statistics: ``"average"``, ``"local"``, ``"frozen"``.
        describe: more keys for ``config.toml``, such as ``dataset``.
        loggers: are told about every round, beside the run directory.
        settings: all others of `aqg.flower.settings.Settings`, by name, such as ``run_dir``.

    Attributes:
        settings: as they are.
        final: the final model, as ``evaluate`` is given it; None before the end of a run.
        results: what ``summary.json`` holds; empty before the end of a run.

    """

    def __init__(
        self,
        num_clients: int,
        *,
        recipe: str | Recipe = "auto",
        evaluate: Evaluate | None = None,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        statistics: str = "average",
        describe: Mapping[str, Any] | None = None,
        loggers: Sequence[RunLogger] = (),
        **settings: Any,
    ) -> None:
        names = [field.name for field in fields(Settings)]
        for name in settings:
            if name not in names:
                close = get_close_matches(name, names, n=1)
                meant = f"; {close[0]!r} is meant?" if close else ""
                raise ConfigError(f"AQG has no setting {name!r}{meant}")
        spec = recipe if isinstance(recipe, str) else ""
        chosen = {"num_clients": num_clients, "rounds": _ROUNDS, "recipe": spec, **settings}
        keyed = {KEYS[name]: value for name, value in chosen.items()}
        self.settings = read_settings(keyed)
        self.final: Any = None
        self.results: dict[str, Any] = {}
        self._recipe = None if isinstance(recipe, str) else recipe
        self._evaluate = evaluate
        self._choice = include, exclude, statistics
        self._describe = describe or {}
        self._loggers = loggers
        self._run: Run | None = None
        self._record: ArrayRecord | None = None

    @staticmethod
    def from_run_config(
        run_config: Mapping[str, Any],
        defaults: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> AQG:
        """Make the strategy that a run-config describes; keys that are not ours are left alone.

        >>> AQG.from_run_config({"num-clients": 4, "num-server-rounds": 20}).settings.rounds
        20

        Args:
            run_config: Flower's, with names in hyphens.
            defaults: values for keys that it does not have.
            options: of `AQG`, apart from settings.

        """
        settings = asdict(read_settings(run_config, defaults))
        if options.get("recipe") is None:
            options["recipe"] = settings.pop("recipe")
        settings.pop("recipe", None)
        return AQG(**settings, **options)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | torch.nn.Module | FloatArray,
        num_rounds: int | None = None,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateRound | None = None,
    ) -> Result:
        """Run to the end, or go on with the run in ``run_dir``, and return what came of it.

        Args:
            grid: Flower's.
            initial_arrays: the model to start from. Of a torch module, the parameters that require
                a gradient travel; of an ArrayRecord, all of floating point that ``include`` and
                ``exclude`` leave; a flat vector is nothing but parameters.
            num_rounds: how many rounds in all; as in the settings where it is not given.
            timeout: seconds until a round goes on without those who have not answered; as
                ``round_timeout`` of the settings where it is not given.
            train_config: for the clients' ``train`` handlers, beside ``server-round``.
            evaluate_config: for their ``evaluate`` handlers.
            evaluate_fn: called with the round and the model, before the first round and after
                every one, or every ``metrics_every`` rounds where that is set.

        The results have the rounds of this start; those before a restart are in ``run_dir``. Where
        steps adapt, the final model, and what the server measures, is the mean over the last ones.

        """
        changes: dict[str, Any] = {}
        if num_rounds is not None:
            changes["rounds"] = num_rounds
        if timeout is not None:
            changes["round_timeout"] = float(timeout)
        if isinstance(grid, CompressedGrid):
            raise ConfigError("AQG compresses by itself: write AQG(...), not Compressed(AQG(...))")
        settings = replace(self.settings, **changes)
        model = make_model(initial_arrays, *self._choice)
        configs = {TRAIN: train_config, EVALUATE: evaluate_config}
        result = Result()
        self.summary()
        measure, every = self._measure(settings, model, evaluate_fn)
        known = {kind: config for kind, config in configs.items() if config}
        recipe = self._recipe or settings.make_recipe()
        run = Run(grid, settings, recipe, model, measure, every, known)
        try:
            run.begin(self._describe, self._loggers)
            while not run.is_over:
                _note(result, run.run_round())
            metrics = run.finish()
        finally:
            run.close()
        last = run.num_rounds
        if run.evaluation.metrics:
            result.evaluate_metrics_clientapp[last] = _metric_record(run.evaluation.metrics)
        if metrics:
            result.evaluate_metrics_serverapp[last] = _metric_record(metrics)
        result.arrays = model.record(run.averaged)
        self.final = model.with_params(run.averaged)
        self.results = run.results
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the orders of a round, for a loop that is not `start`.

        The model must be the one that `aggregate_train` returned, because clients follow it by
        what changes. A client that lacks part of it gets that with the next order.
        """
        if self._run is None:
            model = make_model(arrays, *self._choice)
            recipe = self._recipe or self.settings.make_recipe()
            self._run = Run(grid, self.settings, recipe, model)
            self._run.begin(self._describe, self._loggers)
        elif self._record is not None and not _is_same(arrays, self._record):
            raise ConfigError(
                f"the model of round {server_round} is not the one that AQG made; it keeps the "
                "model itself, and no other strategy can change it"
            )
        self._run.set_config(TRAIN, config)
        return self._run.orders()

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Take replies to the orders of `configure_train` in, and step."""
        run = self._require_run(server_round)
        report = run.take_replies(replies)
        self._record = run.model.record(run.parameters)
        return self._record, _metric_record(report.trained) if report.trained else None

    def configure_evaluate(
        self,
        server_round: int,
        arrays: ArrayRecord,  # noqa: ARG002  (the model is kept here)
        config: ConfigRecord,
        grid: Grid,  # noqa: ARG002
    ) -> Iterable[Message]:
        """Return orders to evaluate the model, where it is time for that."""
        run = self._require_run(server_round)
        every = self.settings.client_eval_every
        if not every or server_round % every:
            return []
        run.set_config(EVALUATE, config)
        return run.evaluation_orders()

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the means of what clients measured."""
        evaluation = self._require_run(server_round).take_evaluations(replies)
        return _metric_record(evaluation.metrics) if evaluation.metrics else None

    def summary(self) -> None:
        """Log what the strategy is set to."""
        settings = self.settings
        recipe = settings.recipe or "one of your own"
        _logger.info(
            "AQG: %d clients, recipe %s, downlink %s, step %s, weighting %s, participation %g, %s",
            settings.num_clients,
            recipe,
            settings.downlink,
            settings.step,
            settings.weighting,
            settings.participation,
            f"written to {settings.run_dir!r}" if settings.run_dir else "written nowhere",
        )

    def _require_run(self, server_round: int) -> Run:
        if self._run is None:
            raise ConfigError(f"round {server_round} was not begun with configure_train")
        return self._run

    def _measure(
        self, settings: Settings, model: ServerModel, evaluate_fn: EvaluateRound | None
    ) -> tuple[Callable[[int, FloatArray], Mapping[str, float]] | None, int]:
        """Return what measures a model on the server, and every how many rounds it does."""
        evaluate = self._evaluate
        if evaluate_fn is not None:
            if evaluate is not None:
                raise ConfigError("AQG has an evaluate, and start an evaluate_fn; give one of them")
            function = evaluate_fn

            def measure_record(number: int, params: FloatArray) -> Mapping[str, float]:
                return _metrics_of(function(number, model.record(params)))

            return measure_record, settings.metrics_every or 1
        every = settings.metrics_every or max(1, settings.rounds // _METRIC_POINTS)
        if evaluate is None:
            return None, every

        def measure(number: int, params: FloatArray) -> Mapping[str, float]:  # noqa: ARG001
            return _metrics_of(evaluate(model.with_params(params)))

        return measure, every


def _metrics_of(found: float | Mapping[str, Any] | None) -> dict[str, float]:
    """Return metrics by name; one number is the accuracy."""
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        return {"accuracy": float(found)}
    metrics = {}
    for name, value in found.items():
        try:
            metrics[str(name)] = float(value)
        except (TypeError, ValueError):
            raise ConfigError(
                f"evaluate returned {value!r:.80} for {name!r}; it must be a number"
            ) from None
    return metrics


def _metric_record(metrics: Mapping[str, float]) -> MetricRecord:
    return MetricRecord({name: float(value) for name, value in metrics.items()})


def _note(result: Result, report: RoundReport) -> None:
    """Put a round into Flower's result; what is measured before it belongs to the one before."""
    number = report.line.record.round
    if report.trained:
        result.train_metrics_clientapp[number] = _metric_record(report.trained)
    if report.evaluated:
        result.evaluate_metrics_clientapp[number - 1] = _metric_record(report.evaluated)
    if report.line.metrics:
        result.evaluate_metrics_serverapp[number - 1] = _metric_record(report.line.metrics)


def _is_same(one: ArrayRecord, other: ArrayRecord) -> bool:
    return one is other or (
        list(one) == list(other) and all(one[name].data == other[name].data for name in one)
    )
