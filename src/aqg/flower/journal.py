"""A run of our own server on disk: its lines, its models, its checkpoint, and when it ends."""

from __future__ import annotations

import json
import logging
import math
import secrets
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from aqg.errors import ConfigError, RunError
from aqg.flower.loggers import MLflow, RunDirectory, RunLogger, TensorBoard, config_of
from aqg.flower.memory import BY_PARTITION
from aqg.flower.metrics import EVALUATED, TRAINED, metric_fields
from aqg.flower.reports import RoundReport, summarize_reports
from aqg.objectives.metrics import METRICS
from aqg.protocol.book import check_book
from aqg.protocol.store import read_arrays, write_arrays
from aqg.runs.cost import ClientBytes
from aqg.runs.directory import CHECKPOINT, ROUNDS, Line, finite_or_none, read_rows
from aqg.runs.files import locked
from aqg.runs.loop import ModelFiles
from aqg.runs.summary import summarize

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from aqg.channel.stepping import SteppingChannel
    from aqg.flower.roster import Roster
    from aqg.flower.settings import Settings

_logger = logging.getLogger("flwr.aqg")

_FORMAT = 5
LOSS = "loss"


class Saved(NamedTuple):
    """What a server goes on from.

    Attributes:
        run: names the run.
        incarnation: of the server that goes on.
        arrays: of channel and roster; empty at the start of a run.

    """

    run: str
    incarnation: int
    arrays: dict[str, NDArray[Any]]


class Journal:
    """Writes a run down, and says when it is over.

    Args:
        settings: of the run.
        loggers: are told about every round, beside the run directory.

    """

    def __init__(self, settings: Settings, loggers: Sequence[RunLogger]) -> None:
        self._settings = settings
        self._directory = Path(settings.run_dir).expanduser() if settings.run_dir else None
        self._given = loggers
        self._stack = ExitStack()
        self._reports: list[RoundReport] = []
        self._models: ModelFiles | None = None
        self._started = time.monotonic()
        self.ending = ""

    def open(self, terms: Mapping[str, Any]) -> Saved:
        """Lock the directory; return what to go on from, which must be of the same terms."""
        first = Saved(BY_PARTITION + secrets.token_hex(8), time.time_ns() // 1_000_000, {})
        if self._directory is None:
            return first
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            path = str(self._directory)
            raise RunError(f"run-dir {path!r} cannot be used: {error.strerror}") from None
        self._stack.enter_context(locked(self._directory))
        file = self._directory / CHECKPOINT
        if not file.exists():
            lines = self._directory / ROUNDS
            if lines.exists() and lines.stat().st_size:
                raise RunError(
                    f"run-dir {str(self._directory)!r} holds rounds but no checkpoint to go on "
                    "from; name another directory"
                )
            return first
        arrays = read_arrays(file)
        try:
            if int(arrays["format"]) != _FORMAT:
                raise RunError(
                    f"checkpoint {str(file)!r} has format {int(arrays['format'])}; this version of "
                    f"aqg reads {_FORMAT}"
                )
            self._check_terms(json.loads(str(arrays["terms"])), terms)
            incarnation = max(first.incarnation, int(arrays["incarnation"]) + 1)
            return Saved(str(arrays["run"]), incarnation, arrays)
        except KeyError as error:
            raise RunError(f"checkpoint {str(file)!r} has no {error}; not a server's") from None

    def begin(self, number: int, describe: Mapping[str, Any], dtype: str) -> None:
        """Begin, or go on at a round: open all that is written to."""
        opened = (*self._own_loggers(), *self._given)
        self._writers = [self._stack.enter_context(closing(writer)) for writer in opened]
        config = config_of(self._settings, describe, dtype)
        self._lines, self._history = self._earlier_lines(number)
        for writer in self._writers:
            writer.start(config, number)
        if self._directory is not None:
            directions = {name: metric.higher_is_better for name, metric in METRICS.items()}
            self._models = ModelFiles(self._directory, directions, number)

    def check(self, channel: SteppingChannel) -> None:
        """Raise `RunError` where what was restored is damaged."""
        if self._directory is not None:
            check_book(channel.book, self._directory / CHECKPOINT)

    def close(self) -> None:
        """Let go of files and locks."""
        self._stack.close()

    def note(self, report: RoundReport, tensors: Mapping[str, Any] | None) -> None:
        """Write a round down, with the model before it where that was measured."""
        if self._models is not None and tensors is not None:
            loss = report.line.record.loss
            number = report.line.record.round
            self._models.consider(number - 1, report.line.metrics, loss, lambda: tensors)
        self._lines.append(report.line)
        metrics = {**report.line.metrics, **report.client_fields()}
        self._history.append(Line(report.line.record, metrics))
        self._reports.append(report)
        for writer in self._writers:
            writer.round(report)
        self.ending = ending(self._settings, self._history, time.monotonic() - self._started)
        number = report.line.record.round
        if self.ending:
            _logger.info("stopping after round %d: %s", number, self.ending)
        elif report.diverged:
            self.ending = "the loss left all use"
            _logger.warning("the loss left all use in round %d; stopping", number)

    def save(
        self, saved: Saved, channel: SteppingChannel, roster: Roster, terms: Mapping[str, Any]
    ) -> None:
        """Write the checkpoint, whole or not at all."""
        if self._directory is None:
            return
        if self._models is not None:
            self._models.save()
        arrays: dict[str, NDArray[Any]] = {
            "format": np.array(_FORMAT, np.int64),
            "run": np.array(saved.run),
            "incarnation": np.array(saved.incarnation, np.int64),
            "terms": np.array(json.dumps(dict(terms))),
            "nodes": np.array(roster.nodes, np.uint64),
            "num_samples": roster.num_samples,
            **channel.to_arrays(),
        }
        write_arrays(self._directory / CHECKPOINT, arrays)

    def finish(
        self,
        evaluated: Mapping[str, float],
        loss: float | None,
        metrics: Mapping[str, float],
        make_tensors: Callable[[], Mapping[str, Any]],
    ) -> dict[str, Any]:
        """Write results and final model; return the results."""
        settings, lines = self._settings, self._lines
        if loss is None:  # clients that cannot evaluate: the last loss of training
            known = [line.record.loss for line in lines if line.record.loss is not None]
            loss = known[-1] if known else math.nan
        recipe = settings.recipe or "custom"
        summary = summarize(recipe, lines, loss, metrics, None, None)
        client_bytes = ClientBytes.first(settings.num_clients)
        for line in lines:
            client_bytes.add(line.record)
        of_clients = metric_fields(EVALUATED, evaluated)
        summary |= {name: finite_or_none(value) for name, value in of_clients.items()}
        deployment = summarize_reports(self._reports)
        results = summary | client_bytes.to_json() | {"deployment": deployment}
        if self._models is not None:
            self._models.consider(len(lines), metrics, loss, make_tensors)
            self._models.finish(len(lines), make_tensors)
        for writer in self._writers:
            writer.finish(results)
        return results

    def _check_terms(self, held: Mapping[str, Any], terms: Mapping[str, Any]) -> None:
        where = f"run-dir {self._settings.run_dir!r} holds a run with"
        for name, value in terms.items():
            if name == "model" and held.get(name) != value:
                raise ConfigError(f"{where} another recipe, seed or model; give it a new directory")
        for name, value in terms.items():
            if held.get(name) != value:
                raise ConfigError(
                    f"{where} {name} {held.get(name)}, and {name} is {value}; set it back, or "
                    "give it a new directory"
                )

    def _own_loggers(self) -> list[RunLogger]:
        own: list[RunLogger] = []
        if self._directory is not None:
            own.append(RunDirectory(self._directory))
            if self._settings.tensorboard:
                own.append(TensorBoard(self._directory / "tensorboard"))
        if self._settings.mlflow:
            own.append(MLflow(self._settings.mlflow, self._directory))
        return own

    def _earlier_lines(self, number: int) -> tuple[list[Line], list[Line]]:
        """Return the rounds before this one; once more, with the clients' metrics among others."""
        if self._directory is None or number == 1:
            return [], []
        lines = RunDirectory(self._directory).lines(number)
        history = []
        for line, row in zip(lines, read_rows(self._directory), strict=False):
            of_clients = {
                name: float(value)
                for name, value in row.items()
                if name.startswith((TRAINED, EVALUATED)) and isinstance(value, int | float)
            }
            history.append(Line(line.record, {**line.metrics, **of_clients}))
        return lines, history


def ending(settings: Settings, lines: Sequence[Line], seconds: float) -> str:
    """Return why a run is over; empty while it is not.

    Args:
        settings: of the run.
        lines: of all its rounds, those before a restart included; their metrics are the server's
            and the clients'.
        seconds: since this server began.

    """
    if settings.max_seconds and seconds >= settings.max_seconds:
        return f"{seconds:.0f} s have passed, and max-seconds is {settings.max_seconds:g}"
    total = sum(line.record.total_bytes or 0 for line in lines)
    if settings.max_bytes and total >= settings.max_bytes:
        return f"{total} bytes have been sent, and max-bytes is {settings.max_bytes}"
    if settings.patience:
        values = watched(settings.monitor, lines)
        since = len(values) - 1 - _best(values) if values else 0
        if since >= settings.patience:
            return (
                f"{settings.monitor or 'the loss'} has not improved the last {since} times it was "
                f"measured, and patience is {settings.patience}"
            )
    return ""


def watched(monitor: str, lines: Sequence[Line]) -> list[float]:
    """Return what is to become small, as often as it was measured.

    A metric that is better the larger it is, as far as is known, is taken with the other sign; a
    minus before the name says that a metric of one's own is better the smaller it is.
    """
    name = monitor.removeprefix("-")
    if name in ("", LOSS):
        found = [line.record.loss for line in lines]
        return [math.inf if math.isnan(v) else v for v in found if v is not None]
    word = name.removeprefix(TRAINED).removeprefix(EVALUATED)
    known = METRICS.get(word)
    is_rising = known.higher_is_better if known is not None else not monitor.startswith("-")
    is_rising = is_rising and word != LOSS
    values = [line.metrics[name] for line in lines if name in line.metrics]
    signed = [-value if is_rising else value for value in values]
    return [math.inf if math.isnan(value) else value for value in signed]


def _best(values: list[float]) -> int:
    return min(range(len(values)), key=values.__getitem__)
