"""One run of our own strategy: begun or gone on with, round after round, written down, ended."""

from __future__ import annotations

import logging
import math
import secrets
import time
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from aqg.core.downlink import describe_downlink
from aqg.errors import ConfigError, RunError
from aqg.flower.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from aqg.flower.client_metrics import EVALUATED, TRAINED, metric_fields
from aqg.flower.coordinator import Coordinator, Evaluation
from aqg.flower.desk import Desk
from aqg.flower.endings import ending
from aqg.flower.exchange import Exchange
from aqg.flower.intake import Intake
from aqg.flower.loggers import MLflow, RunDirectory, RunLogger, TensorBoard, config_of
from aqg.flower.presence import Presence
from aqg.flower.reports import summarize_reports
from aqg.flower.roster import Roster
from aqg.flower.settings import Settings, describe_step
from aqg.objectives.metrics import METRICS
from aqg.protocol.book import MirrorBook
from aqg.protocol.mirrors import fingerprint
from aqg.runs.cost import ClientBytes
from aqg.runs.directory import Line, finite_or_none, read_rows
from aqg.runs.files import locked
from aqg.runs.loop import ModelFiles
from aqg.runs.summary import summarize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from flwr.app import ConfigRecord, Message
    from flwr.serverapp import Grid

    from aqg.core.recipe import Recipe
    from aqg.core.types import Float64Array, FloatArray
    from aqg.flower.models import ServerModel
    from aqg.flower.reports import RoundReport

    Measure = Callable[[int, FloatArray], Mapping[str, float]]

_logger = logging.getLogger("flwr.aqg")

_SAID = ("final_loss", "upload_bytes", "download_bytes", "total_bytes")
"""Of the results, what the log says at the end."""


class Run:
    """One run, from its first round or its checkpoint to its last round.

    Args:
        grid: Flower's.
        settings: of the run.
        recipe: the compressor.
        model: to start from.
        measure: the server's own metrics of a model, from the rounds that it took and ``θ``.
        measured_every: rounds from one call of that to the next.
        configs: what clients' handlers are told, by Flower's type of message.

    Attributes:
        results: what ``summary.json`` holds, once the run is over.
        evaluation: what clients measured of the final model.

    """

    def __init__(
        self,
        grid: Grid,
        settings: Settings,
        recipe: Recipe,
        model: ServerModel,
        measure: Measure | None = None,
        measured_every: int = 1,
        configs: Mapping[str, ConfigRecord] | None = None,
    ) -> None:
        self.settings = settings
        self.model = model
        self.results: dict[str, Any] = {}
        self.evaluation = Evaluation()
        self._recipe = recipe
        self._downlink = settings.make_downlink(recipe)
        self._rule = settings.make_step(recipe)
        model.set_statistics(fine=recipe.is_verbatim, average=self._rule.average)
        told = {"downlink": describe_downlink(self._downlink), "step": describe_step(self._rule)}
        self._terms = settings.terms | told
        self._measure_with = measure
        if not model.can_be_measured and measure is not None:
            _logger.warning("clients keep their own statistics; the server measures no metrics")
            self._measure_with = None
        self._measured_every = measured_every
        self._configs = dict(configs or {})
        self._exchange = Exchange(grid)
        self._directory = Path(settings.run_dir).expanduser() if settings.run_dir else None
        self._stack = ExitStack()
        self._reports: list[RoundReport] = []
        self._failed = 0
        self._ending = ""

    def begin(self, describe: Mapping[str, Any], loggers: Sequence[RunLogger]) -> None:
        """Wait for the clients; begin, or go on from the checkpoint."""
        settings = self.settings
        if self._directory is not None:
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                path = str(self._directory)
                raise RunError(f"run-dir {path!r} cannot be used: {error.strerror}") from None
            self._stack.enter_context(locked(self._directory))
        self._start()
        book = self._coordinator.book
        opened = (*self._own_loggers(), *loggers)
        self._writers = [self._stack.enter_context(closing(writer)) for writer in opened]
        config = config_of(settings, describe, str(self.model.initial.dtype))
        self._lines, self._history = self._earlier_lines(book)
        for writer in self._writers:
            writer.start(config, book.round)
        self._models = None
        if self._directory is not None:
            directions = {name: metric.higher_is_better for name, metric in METRICS.items()}
            self._models = ModelFiles(self._directory, directions, book.round)
        self._save()  # the incarnation must be on disk before the first order goes out
        self._started = time.monotonic()

    def close(self) -> None:
        """Let go of files and locks."""
        self._stack.close()

    @property
    def is_over(self) -> bool:
        """Whether there is no round left to run."""
        return bool(self._ending) or self._coordinator.book.round > self.settings.rounds

    @property
    def num_rounds(self) -> int:
        """How many rounds the model has taken, those before a restart included."""
        return self._coordinator.book.round - 1

    @property
    def parameters(self) -> FloatArray:
        """``θ``, with which training goes on."""
        return self._coordinator.book.parameters

    @property
    def averaged(self) -> FloatArray:
        """What is measured and kept: the mean of the last models where steps adapt, else ``θ``."""
        return self._coordinator.book.state.averaged

    def run_round(self) -> RoundReport:
        """Run the next round, and write it down."""
        self._measure_before()
        return self._conclude(self._coordinator.run_round(self._metrics))

    def orders(self) -> list[Message]:
        """Return the orders of the next round, for somebody else to send."""
        self._measure_before()
        return self._coordinator.orders()

    def take_replies(self, replies: Iterable[Message]) -> RoundReport:
        """Do what `run_round` does with the replies to `orders`."""
        return self._conclude(self._coordinator.take_replies(replies, self._metrics))

    def set_config(self, kind: str, config: ConfigRecord) -> None:
        """Tell clients' handlers something else, from the next order on."""
        self._desk.configs[kind] = config

    def evaluation_orders(self) -> list[Message]:
        """Return orders to evaluate the model, for somebody else to send."""
        return self._coordinator.evaluation_orders()

    def take_evaluations(self, replies: Iterable[Message]) -> Evaluation:
        """Return what the replies to `evaluation_orders` say."""
        return self._coordinator.take_evaluations(replies)

    def finish(self) -> Mapping[str, float]:
        """Let clients and server measure the final model, write the results; return metrics."""
        self.evaluation = self._coordinator.evaluate()
        metrics = self._measure(self.averaged)
        self.results = self._summary(metrics)
        if self._models is not None:
            make = partial(self.model.tensors, self.averaged)
            self._models.consider(len(self._lines), metrics, self.results["final_loss"], make)
            self._models.finish(len(self._lines), make)
        for writer in self._writers:
            writer.finish(self.results)
        _logger.info("done: %s", {key: self.results[key] for key in _SAID})
        return metrics

    def _measure_before(self) -> None:
        self._metrics: Mapping[str, float] = {}
        self._considered: Mapping[str, Any] | None = None
        if self.num_rounds % self._measured_every == 0:
            self._metrics = self._measure(self.averaged)
            if self._models is not None:
                self._considered = self.model.tensors(self.averaged)

    def _conclude(self, report: RoundReport) -> RoundReport:
        """Write a round down, and find out whether it was the last."""
        settings, number = self.settings, report.line.record.round
        if self._models is not None and self._considered is not None:
            loss = report.line.record.loss
            found = self._considered
            self._models.consider(number - 1, report.line.metrics, loss, lambda: found)
            self._considered = None
        self._lines.append(report.line)
        metrics = {**report.line.metrics, **report.client_fields()}
        self._history.append(Line(report.line.record, metrics))
        self._reports.append(report)
        for writer in self._writers:
            writer.round(report)
        self._ending = ending(settings, self._history, time.monotonic() - self._started)
        if self._ending:
            _logger.info("stopping after round %d: %s", number, self._ending)
        elif report.diverged:
            self._ending = "the loss left all use"
            _logger.warning("the loss left all use in round %d; stopping", number)
        if self.is_over or number % settings.checkpoint_every == 0:
            if self._models is not None:
                self._models.save()
            self._save()
        self._failed = 0 if report.stepped else self._failed + 1
        if self._failed > settings.max_failed_rounds:
            raise RunError(
                f"{self._failed} rounds in a row had fewer than {settings.needed_clients} valid "
                "replies; lower min-clients, raise round-timeout, or look at the clients' logs"
            )
        return report

    def _save(self) -> None:
        if self._directory is None:
            return
        book, roster = self._coordinator.book, self._presence.roster
        checkpoint = Checkpoint(
            run=self._name,
            fingerprint=self._desk.fingerprint,
            incarnation=self._desk.incarnation,
            book=book,
            nodes=roster.nodes,
            num_samples=roster.num_samples,
            terms=self._terms,
        )
        self.model.save(self._directory, book.round)  # before the checkpoint that names its round
        save_checkpoint(self._directory, checkpoint)

    def _start(self) -> None:
        settings = self.settings
        saved = None
        if self._directory is not None:
            saved = load_checkpoint(self._directory, self._recipe, self._downlink, self._rule)
        self._name, incarnation = secrets.token_hex(8), time.time_ns() // 1_000_000
        if saved is None:
            roster = Roster(settings.num_clients, settings.trust_partition_id)
        else:
            self._check_same_run(saved)
            self._name, incarnation = saved.run, max(incarnation, saved.incarnation + 1)
            roster = Roster(
                settings.num_clients, settings.trust_partition_id, saved.nodes, saved.num_samples
            )
        self._presence = Presence(self._exchange, roster, settings)
        if not self._presence.wait_for(settings.num_clients, settings.start_timeout):
            _logger.warning(
                "%d of %d clients are connected; starting without the others",
                len(roster.present),
                settings.num_clients,
            )
        if saved is None:
            weights = self._first_weights(roster)
            optimizer = settings.training().optimizer
            book = MirrorBook.first(
                self._recipe, self.model.initial, weights, optimizer, self._downlink, self._rule
            )
        else:
            book = saved.book
            if self._directory is not None:
                self.model.restore(self._directory, book.round)
            _logger.info("going on with run %s at round %d", self._name, book.round)
        self._desk = Desk(
            settings, book, self.model, roster, self._name, incarnation, settings.recipe
        )
        self._desk.configs = self._configs
        intake = Intake(settings, book, self.model, self._presence, incarnation)
        self._coordinator = Coordinator(
            settings, self._exchange, self._presence, self._desk, intake, self.model
        )

    def _first_weights(self, roster: Roster) -> Float64Array:
        """Return the weights to begin with: equal ones where clients say theirs with replies."""
        says_later = any(roster.is_plain(roster.node_of(client)) for client in roster.present)
        if says_later and not (roster.num_samples > 0).any():
            return np.ones(self.settings.num_clients)
        return self.settings.client_weights(roster.num_samples)

    def _check_same_run(self, saved: Checkpoint) -> None:
        initial = self.model.initial
        wanted = fingerprint(self._recipe, len(initial), str(initial.dtype), self.settings.seed)
        if saved.fingerprint != wanted:
            raise ConfigError(
                f"run-dir {self.settings.run_dir!r} holds a run with another recipe, seed or "
                "model; give it a new directory"
            )
        for name, value in self._terms.items():
            if saved.terms.get(name, value) != value:
                raise ConfigError(
                    f"run-dir {self.settings.run_dir!r} holds a run with {name} "
                    f"{saved.terms[name]}, and {name} is {value}; set it back, or give it a new "
                    "directory"
                )

    def _own_loggers(self) -> list[RunLogger]:
        own: list[RunLogger] = []
        if self._directory is not None:
            own.append(RunDirectory(self._directory))
            if self.settings.tensorboard:
                own.append(TensorBoard(self._directory / "tensorboard"))
        if self.settings.mlflow:
            own.append(MLflow(self.settings.mlflow, self._directory))
        return own

    def _earlier_lines(self, book: MirrorBook) -> tuple[list[Line], list[Line]]:
        """Return the rounds before this one; once more, with the clients' metrics among others."""
        if self._directory is None or book.round == 1:
            return [], []
        lines = RunDirectory(self._directory).lines(book.round)
        history = []
        for line, row in zip(lines, read_rows(self._directory), strict=False):
            of_clients = {
                name: float(value)
                for name, value in row.items()
                if name.startswith((TRAINED, EVALUATED)) and isinstance(value, int | float)
            }
            history.append(Line(line.record, {**line.metrics, **of_clients}))
        return lines, history

    def _measure(self, params: FloatArray) -> Mapping[str, float]:
        """Return the metrics of a model on the server's own test data."""
        if self._measure_with is None:
            return {}
        return self._measure_with(self.num_rounds, params)

    def _summary(self, metrics: Mapping[str, float]) -> dict[str, Any]:
        settings, final_loss = self.settings, self.evaluation.loss
        if final_loss is None:  # clients that cannot evaluate: the last loss of training
            known = [line.record.loss for line in self._lines if line.record.loss is not None]
            final_loss = known[-1] if known else math.nan
        recipe = settings.recipe or "custom"
        summary = summarize(recipe, self._lines, final_loss, metrics, None, None).to_json()
        client_bytes = ClientBytes.first(settings.num_clients)
        for line in self._lines:
            client_bytes.add(line.record)
        of_clients = metric_fields(EVALUATED, self.evaluation.metrics)
        summary |= {name: finite_or_none(value) for name, value in of_clients.items()}
        deployment = summarize_reports(self._reports)
        deployment["evaluation_download_bytes"] = self.evaluation.downloads.total()
        return summary | client_bytes.to_json() | {"deployment": deployment}
