"""The ServerApp: starts a run or goes on with one, and brings it to its end."""

from __future__ import annotations

import logging
import math
import secrets
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import numpy as np
from flwr.serverapp import Grid, ServerApp

from aqg.core.downlink import describe_downlink
from aqg.errors import ConfigError, RunError
from aqg.flower.checkpoint import Checkpoint, load_checkpoint, locked, save_checkpoint
from aqg.flower.coordinator import Coordinator
from aqg.flower.endings import ending
from aqg.flower.exchange import Exchange
from aqg.flower.loggers import MLflow, RunDirectory, RunLogger, TensorBoard, config_of
from aqg.flower.presence import Presence
from aqg.flower.reports import summarize_reports
from aqg.flower.roster import Roster
from aqg.flower.settings import Settings, describe_step, read_settings
from aqg.flower.statistics import ServerModel
from aqg.objectives.layout import ModelLayout
from aqg.objectives.metrics import METRICS
from aqg.protocol.book import MirrorBook
from aqg.protocol.mirrors import fingerprint
from aqg.runs.client_bytes import ClientBytes
from aqg.runs.models import ModelFiles
from aqg.runs.summary import summarize

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from flwr.app import Context

    from aqg.core.recipe import Recipe
    from aqg.core.types import FloatArray
    from aqg.flower.reports import RoundReport
    from aqg.runs.directory import Line

_logger = logging.getLogger("flwr.aqg")

_METRIC_POINTS = 50
_SAID = ("final_loss", "upload_bytes", "download_bytes", "total_bytes")
"""Of the results, what the log says at the end."""

Start: TypeAlias = "FloatArray | torch.nn.Module"
"""A model to start from."""


def make_server_app(
    initial: Start | Callable[[Context], Start],
    *,
    recipe: Recipe | None = None,
    evaluate: Callable[[Any], float | Mapping[str, float] | None] | None = None,
    on_finish: Callable[[Any], None] | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    statistics: str = "average",
    settings: Mapping[str, Any] | None = None,
    describe: Mapping[str, Any] | None = None,
    loggers: Sequence[RunLogger] = (),
) -> ServerApp:
    """Make the ServerApp of a deployment.

    Args:
        initial: the model to start from, or what makes it: a torch module, or its parameters as a
            flat float32 or float64 vector. A module is needed where the model has statistics, such
            as those of batch normalization; clients whose module is another are told so.
        recipe: in place of the one that the run-config names; clients must have an equal one.
        evaluate: the accuracy of a model on the server's own test data, or several metrics by
            name; None where there is none. It is called before some rounds, see ``metrics_every``
            of `Settings`, and after the last; NaN is recorded as null. It is given a module where
            ``initial`` is one, ready for use, and a flat vector otherwise.
        on_finish: is given the final model, in the same way, once the run is over.
        include: name patterns of the module's parameters that travel; as the clients have them.
        exclude: name patterns of tensors that stay out; as the clients have them.
        statistics: the policy for the module's statistics; as the clients have it.
        settings: values for keys that the run-config does not have; see `Settings`.
        describe: more keys for ``config.toml``, such as ``dataset`` or ``model``.
        loggers: are told about every round, beside the run directory.

    Where the run-config names a ``run-dir``, the run leaves its final and its best model there (see
    `aqg.load_model`), under the module's own names; a vector without a module is one tensor called
    ``parameters``. Where the directory holds a checkpoint, the run goes on from there.

    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        chosen = read_settings(context.run_config, settings)
        if recipe is not None:
            chosen = replace(chosen, recipe="")
        start: Any = initial
        if callable(initial) and not _is_module(initial):
            start = initial(context)
        model = None
        if _is_module(start):
            layout = ModelLayout.of(start, include=include, exclude=exclude, statistics=statistics)
            model = ServerModel(start, layout)
            start = layout.flatten(start)
        run = _Run(grid, chosen, _checked(start), recipe or chosen.make_recipe(), evaluate, model)
        with ExitStack() as stack:
            final = run.go(stack, describe or {}, loggers)
        if on_finish is not None:
            on_finish(final if model is None else model.with_params(final))

    return app


class _Run:
    """One run, from its first round or its checkpoint to its last round."""

    def __init__(
        self,
        grid: Grid,
        settings: Settings,
        params: FloatArray,
        recipe: Recipe,
        evaluate: Callable[[Any], float | Mapping[str, float] | None] | None,
        model: ServerModel | None,
    ) -> None:
        self.settings = settings
        self.recipe = recipe
        self.downlink = settings.make_downlink(recipe)
        self.rule = settings.make_step(recipe)
        told = {"downlink": describe_downlink(self.downlink), "step": describe_step(self.rule)}
        self.terms = settings.terms | told
        self.params = params
        self.evaluate = evaluate
        self.model = model
        if model is not None and not model.can_be_measured and evaluate is not None:
            _logger.warning("clients keep their own statistics; the server measures no metrics")
            self.evaluate = None
        self.exchange = Exchange(grid)
        self.directory = Path(settings.run_dir).expanduser() if settings.run_dir else None

    def go(
        self, stack: ExitStack, describe: Mapping[str, Any], loggers: Sequence[RunLogger]
    ) -> FloatArray:
        """Run to the end and return the model."""
        settings = self.settings
        if self.directory is not None:
            stack.enter_context(locked(self.directory))
        coordinator, presence, run, incarnation = self._start()
        writers = [stack.enter_context(closing(w)) for w in (*self._own_loggers(), *loggers)]
        config = config_of(settings, describe, str(self.params.dtype))
        lines = self._earlier_lines(coordinator.book)
        for writer in writers:
            writer.start(config, coordinator.book.round)

        def save() -> None:
            if self.directory is not None:
                checkpoint = Checkpoint(
                    run=run,
                    fingerprint=coordinator.fingerprint,
                    incarnation=incarnation,
                    book=coordinator.book,
                    nodes=presence.roster.nodes,
                    num_samples=presence.roster.num_samples,
                    terms=self.terms,
                )
                if self.model is not None:  # before the checkpoint that names its round
                    self.model.save(self.directory, coordinator.book.round)
                save_checkpoint(self.directory, checkpoint)

        models = None
        if self.directory is not None:
            directions = {name: metric.higher_is_better for name, metric in METRICS.items()}
            models = ModelFiles(self.directory, directions, coordinator.book.round)
        save()  # the incarnation must be on disk before the first order goes out
        reports: list[RoundReport] = []
        failed, started = 0, time.monotonic()
        while coordinator.book.round <= settings.rounds:
            number = coordinator.book.round
            is_measured = self._is_measured(number)
            metrics, model = {}, None
            if is_measured:
                metrics = self._measure(coordinator.book.parameters)
                model = self._tensors(coordinator.book.parameters)
            report = coordinator.run_round(metrics)
            if models is not None and model is not None:
                loss = report.line.record.loss
                models.consider(number - 1, metrics, loss, partial(dict, model))
            lines.append(report.line)
            reports.append(report)
            for writer in writers:
                writer.round(report)
            why = ending(settings, lines, time.monotonic() - started)
            last = coordinator.book.round > settings.rounds or bool(why)
            if last or number % settings.checkpoint_every == 0:
                if models is not None:
                    models.save()
                save()
            failed = 0 if report.stepped else failed + 1
            if failed > settings.max_failed_rounds:
                raise RunError(
                    f"{failed} rounds in a row had fewer than {settings.needed_clients} valid "
                    "replies; lower min-clients, raise round-timeout, or look at the clients' logs"
                )
            if why:
                _logger.info("stopping after round %d: %s", number, why)
                break
            if report.diverged:
                _logger.warning("the loss left all use in round %d; stopping", number)
                save()
                break
        summary, metrics = self._summary(coordinator, lines, reports)
        if models is not None:
            make = partial(self._tensors, coordinator.book.parameters)
            models.consider(len(lines), metrics, summary["final_loss"], make)
            models.finish(len(lines), make)
        for writer in writers:
            writer.finish(summary)
        _logger.info("done: %s", {key: summary[key] for key in _SAID})
        return coordinator.book.parameters

    def _start(self) -> tuple[Coordinator, Presence, str, int]:
        """Wait for the clients; begin, or go on from the checkpoint."""
        settings = self.settings
        saved = None
        if self.directory is not None:
            saved = load_checkpoint(self.directory, self.recipe, self.downlink, self.rule)
        run, incarnation = secrets.token_hex(8), time.time_ns() // 1_000_000
        if saved is None:
            roster = Roster(settings.num_clients, settings.trust_partition_id)
        else:
            self._check_same_run(saved)
            run, incarnation = saved.run, max(incarnation, saved.incarnation + 1)
            roster = Roster(
                settings.num_clients, settings.trust_partition_id, saved.nodes, saved.num_samples
            )
        presence = Presence(self.exchange, roster, settings)
        if not presence.wait_for(settings.num_clients, settings.start_timeout):
            _logger.warning(
                "%d of %d clients are connected; starting without the others",
                len(roster.present),
                settings.num_clients,
            )
        if saved is None:
            weights = settings.client_weights(roster.num_samples)
            optimizer = settings.training().optimizer
            book = MirrorBook.first(
                self.recipe, self.params, weights, optimizer, self.downlink, self.rule
            )
        else:
            book = saved.book
            if self.model is not None and self.directory is not None:
                self.model.restore(self.directory, book.round)
            _logger.info("going on with run %s at round %d", run, book.round)
        spec = settings.recipe
        coordinator = Coordinator(
            settings, self.exchange, presence, book, run, incarnation, spec, self.model
        )
        return coordinator, presence, run, incarnation

    def _check_same_run(self, saved: Checkpoint) -> None:
        wanted = fingerprint(
            self.recipe, len(self.params), str(self.params.dtype), self.settings.seed
        )
        if saved.fingerprint != wanted:
            raise ConfigError(
                f"run-dir {self.settings.run_dir!r} holds a run with another recipe, seed or "
                "model; give it a new directory"
            )
        for name, value in self.terms.items():
            if saved.terms.get(name, value) != value:
                raise ConfigError(
                    f"run-dir {self.settings.run_dir!r} holds a run with {name} "
                    f"{saved.terms[name]}, and {name} is {value}; set it back, or give it a new "
                    "directory"
                )

    def _own_loggers(self) -> list[RunLogger]:
        own: list[RunLogger] = []
        if self.directory is not None:
            own.append(RunDirectory(self.directory))
            if self.settings.tensorboard:
                own.append(TensorBoard(self.directory / "tensorboard"))
        if self.settings.mlflow:
            own.append(MLflow(self.settings.mlflow, self.directory))
        return own

    def _earlier_lines(self, book: MirrorBook) -> list[Line]:
        if self.directory is None or book.round == 1:
            return []
        return RunDirectory(self.directory).lines(book.round)

    def _is_measured(self, number: int) -> bool:
        settings = self.settings
        every = settings.metrics_every or max(1, settings.rounds // _METRIC_POINTS)
        return (number - 1) % every == 0

    def _tensors(self, params: FloatArray) -> dict[str, Any]:
        """Return copies of the model's tensors by name; a vector without a module has no names."""
        if self.model is None:
            return {"parameters": params.copy()}
        state = self.model.with_params(params).state_dict()
        return {name: tensor.detach().clone() for name, tensor in state.items()}

    def _measure(self, params: FloatArray) -> dict[str, float]:
        """Return the metrics of a model on the server's own test data."""
        if self.evaluate is None:
            return {}
        found = self.evaluate(params if self.model is None else self.model.with_params(params))
        if found is None:
            return {}
        if isinstance(found, Mapping):
            return {str(name): float(value) for name, value in found.items()}
        return {"accuracy": float(found)}

    def _summary(
        self, coordinator: Coordinator, lines: list[Line], reports: list[RoundReport]
    ) -> tuple[dict[str, Any], dict[str, float]]:
        final_loss = coordinator.final_loss()
        if final_loss is None:  # tasks that cannot evaluate: the last loss that training reported
            known = [line.record.loss for line in lines if line.record.loss is not None]
            final_loss = known[-1] if known else math.nan
        metrics = self._measure(coordinator.book.parameters)
        recipe = self.settings.recipe or "custom"
        summary = summarize(recipe, lines, final_loss, metrics, None, None).to_json()
        client_bytes = ClientBytes.first(self.settings.num_clients)
        for line in lines:
            client_bytes.add(line.record)
        deployment = summarize_reports(reports)
        deployment["evaluation_download_bytes"] = coordinator.evaluation_bytes
        return summary | client_bytes.to_json() | {"deployment": deployment}, metrics


def _is_module(start: object) -> TypeGuard[torch.nn.Module]:
    """Tell whether this is a torch module; where torch was never imported, nothing is."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(start, torch.nn.Module)


def _checked(params: FloatArray) -> FloatArray:
    if params.ndim != 1 or params.dtype not in (np.float32, np.float64) or not len(params):
        raise ConfigError(
            f"initial parameters are {params.ndim}-d {params.dtype} of {params.size} values; "
            "they must be a flat float32 or float64 vector"
        )
    if not np.isfinite(params).all():
        raise ConfigError("initial parameters hold NaN or infinity")
    return params
