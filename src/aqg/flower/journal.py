"""What is written of a run of our own server: its rounds, models and checkpoint, and its end."""

from __future__ import annotations

import json
import logging
import math
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aqg.channel.stepping import SteppingChannel
from aqg.errors import ConfigError, RunError
from aqg.flower.envelope import EVALUATED, TRAINED, logger
from aqg.flower.mod import BY_PARTITION
from aqg.objectives.metrics import METRICS
from aqg.protocol.store import make_directory, read_arrays, write_arrays
from aqg.runs.cost import DOWNLOADS, UPLOADS, ClientBytes
from aqg.runs.directory import (
    CHECKPOINT,
    CONFIG,
    ROUNDS,
    SUMMARY,
    Line,
    finite_or_none,
    metric_fields,
    read_lines,
    read_rows,
)
from aqg.runs.files import Records, locked, to_json, write_atomically
from aqg.runs.loop import ModelFiles
from aqg.runs.stopping import summarize
from aqg.settings import CommonSettings, table
from aqg.sim.record import DROPPED

if TYPE_CHECKING:
    from aqg.flower.rounds import Roster
    from aqg.flower.strategy import Settings

_FORMAT = 7
LOSS = "loss"
INCIDENTS = {
    "resync": "resyncs",  # a mirror was started again from zero
    "rollback": "rollbacks",  # a client took back an upload that had not arrived
    # a reply was forged, damaged, oversized or for another state: nothing of it was used
    "rejected": "rejected",
    "fault": "fault_count",  # a client could not send: its gradient was not finite
    "error": "errors",  # Flower reports that a client failed
    "missing": "missing",  # a sampled client had not answered when the round ended
    # a node that is no client: too many, a partition taken already, absurd samples
    "refused": "refused",
    # a client's loss was beyond all use, and most others' was not: it was left out
    "outlier": "outliers",
    # a client reports so many samples that it counts only for the largest share
    "capped": "capped",
    # a client could not reach the model from what it holds; it was sent what it lacks
    "lost": "lost",
}
"""Every kind of incident, and the name of its count in ``rounds.jsonl``."""

_MOST_CLIENTS_SHOWN = 32
"""Up to this many clients have curves of their own."""


class Incident(NamedTuple):
    """Something that should not happen, and does."""

    client: int
    node: int
    kind: str
    text: str = ""


@dataclass(frozen=True)
class RoundReport:
    # what the simulator would write; in its record, 0 bytes came from a client whose reply did not,
    # and those sent to a client count whether it answered or not
    line: Line
    staleness: tuple[int, ...]  # rounds since each client's last upload was taken
    incidents: tuple[Incident, ...]
    stepped: bool  # whether enough clients answered for the model to take a step
    work_seconds: float  # the slowest client's own work
    round_seconds: float = 0.0  # from the first message out to the last reply in
    # whether more than half of the sampled clients, and at least two where there are more than one,
    # report a loss beyond all use
    diverged: bool = False
    # means of what clients measured as they trained, by name; and of the model before the round
    trained: Mapping[str, float] = field(default_factory=dict)
    evaluated: Mapping[str, float] = field(default_factory=dict)

    @property
    def overhead_seconds(self) -> float:
        return max(0.0, self.round_seconds - self.work_seconds)

    def client_fields(self) -> dict[str, float]:
        """Return the clients' metrics under the names that they have in ``rounds.jsonl``."""
        return client_fields(TRAINED, self.trained) | client_fields(EVALUATED, self.evaluated)

    def counts(self) -> dict[str, int]:
        found = Counter(incident.kind for incident in self.incidents)
        return {name: found[kind] for kind, name in INCIDENTS.items()}

    def to_row(self) -> dict[str, Any]:
        """Return the line of ``rounds.jsonl``: the simulator's, and more."""
        row: dict[str, Any] = json.loads(self.line.to_json())
        row |= {
            UPLOADS: list(self.line.record.client_upload_bytes),
            DOWNLOADS: list(self.line.record.client_download_bytes),
            "staleness": list(self.staleness),
            "stepped": self.stepped,
            "round_seconds": round(self.round_seconds, 4),
            "work_seconds": round(self.work_seconds, 4),
            "overhead_seconds": round(self.overhead_seconds, 4),
            **{name: finite_or_none(value) for name, value in self.client_fields().items()},
            **self.counts(),
        }
        if self.incidents:
            row["incidents"] = [incident._asdict() for incident in self.incidents]
        return row

    def scalars(self) -> dict[str, float]:
        """Return the numbers to plot over rounds; what was measured as NaN is NaN."""
        record = self.line.record
        widths = [width for width in record.widths if width > 0]
        values: dict[str, float | None] = {
            "loss": record.loss,
            **{next(iter(metric_fields({name: v}))): v for name, v in self.line.metrics.items()},
            **self.client_fields(),
            "uploads": record.num_uploads,
            "upload_bytes": record.upload_bytes,
            "download_bytes": record.download_bytes,
            "total_bytes": record.total_bytes,
            "mean_width": sum(widths) / len(widths) if widths else 0.0,
            "max_staleness": max(self.staleness, default=0),
            "round_seconds": self.round_seconds,
            "overhead_seconds": self.overhead_seconds,
            **{f"incidents/{name}": count for name, count in self.counts().items()},
        }
        of_clients = {
            "width": record.widths,
            "upload_bytes": record.client_upload_bytes,
            "download_bytes": record.client_download_bytes,
            "staleness": self.staleness,
        }
        if len(record.widths) <= _MOST_CLIENTS_SHOWN:
            for name, numbers in of_clients.items():
                values |= {f"client-{client}/{name}": n for client, n in enumerate(numbers)}
        return {name: float(value) for name, value in values.items() if value is not None}

    def log(self, num_rounds: int) -> None:
        record = self.line.record
        metrics = {**self.line.metrics, **self.client_fields()}
        logger.info(
            "round %d/%d: loss %s%s, %d/%d answered, %d uploads, %d bytes up, %d down, %.2f s "
            "(%.2f s overhead)%s",
            record.round,
            num_rounds,
            "   -    " if record.loss is None else f"{record.loss:.6f}",
            "".join(f", {name} {value:.4g}" for name, value in metrics.items()),
            sum(width != DROPPED for width in record.widths),
            len(record.widths),
            record.num_uploads,
            record.upload_bytes,
            record.download_bytes,
            self.round_seconds,
            self.overhead_seconds,
            "" if self.stepped else "; too few, no step",
        )
        for incident in self.incidents:
            level = logging.INFO if incident.kind == "missing" else logging.WARNING
            text = "round %d: client %d (node %d): %s %s"
            logger.log(level, text, record.round, *incident)


def client_fields(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics under the names of their fields in ``rounds.jsonl``.

    >>> client_fields(EVALUATED, {"top-5 accuracy": 0.9, "eval_loss": 0.1})
    {'eval_top_5_accuracy': 0.9, 'eval_loss': 0.1}
    """
    fields = {}
    for name, value in metrics.items():
        word = re.sub(r"\W", "_", name)
        fields[word if word.startswith(prefix) else prefix + word] = value
    return fields


class Journal:
    """Writes a run down, in its directory and for ``loggers``, and says when it is over."""

    def __init__(self, settings: Settings, loggers: Sequence[RunLogger]) -> None:
        self.run = BY_PARTITION + secrets.token_hex(8)  # its name
        self.incarnation = time.time_ns() // 1_000_000  # of the server that begins, or goes on
        self.ending = ""  # why the run is over
        self._settings = settings
        self._directory = Path(settings.run_dir).expanduser() if settings.run_dir else None
        self._loggers = loggers
        self._terms: dict[str, Any] = {}
        self._saved: dict[str, NDArray[Any]] = {}
        self._stack = ExitStack()
        self._reports: list[RoundReport] = []
        self._models: ModelFiles | None = None
        self._started = time.monotonic()

    def open(self, terms: dict[str, Any]) -> None:
        """Lock the directory; read what to go on from, which must be of the same terms."""
        self._terms = terms
        if self._directory is None:
            return
        make_directory(self._directory, "run-dir ")
        self._stack.enter_context(locked(self._directory))
        file = self._directory / CHECKPOINT
        if not file.exists():
            lines = self._directory / ROUNDS
            if lines.exists() and lines.stat().st_size:
                raise RunError(
                    f"run-dir {str(self._directory)!r} holds rounds but no checkpoint to go on "
                    "from; name another directory"
                )
            return
        arrays = read_arrays(file)
        try:
            if int(arrays["format"]) != _FORMAT:
                raise RunError(
                    f"checkpoint {str(file)!r} has format {int(arrays['format'])}; this version of "
                    f"aqg reads {_FORMAT}"
                )
            self._check_terms(json.loads(str(arrays["terms"])))
            self.run = str(arrays["run"])
            self.incarnation = max(self.incarnation, int(arrays["incarnation"]) + 1)
        except KeyError as error:
            raise RunError(f"checkpoint {str(file)!r} has no {error}; not a server's") from None
        self._saved = arrays

    def restore(self, channel: SteppingChannel, roster: Roster) -> None:
        """Bring the parts of a server to where an earlier one was."""
        arrays, channel.incarnation = self._saved, self.incarnation
        if not arrays or self._directory is None:
            return
        roster.restore(arrays["nodes"].tolist(), arrays["num_samples"])
        channel.restore(arrays)
        self._saved = {}
        channel.book.check(self._directory / CHECKPOINT)
        logger.info("going on with run %s at round %d", self.run, channel.version)

    def save(self, channel: SteppingChannel, roster: Roster) -> None:
        """Write the checkpoint, whole or not at all."""
        if self._directory is None:
            return
        if self._models is not None:
            self._models.save()
        arrays: dict[str, NDArray[Any]] = {
            "format": np.array(_FORMAT, np.int64),
            "run": np.array(self.run),
            "incarnation": np.array(self.incarnation, np.int64),
            "terms": np.array(json.dumps(self._terms)),
            "nodes": np.array(roster.nodes, np.uint64),
            "num_samples": roster.num_samples,
            **channel.to_arrays(),
        }
        write_arrays(self._directory / CHECKPOINT, arrays)

    def begin(self, number: int, describe: Mapping[str, Any], dtype: str) -> None:
        """Start or resume at a round: open all that is written to."""
        settings, directory = self._settings, self._directory
        config = config_of(settings, describe, dtype)
        self._lines: list[Line] = []
        writers: list[RunLogger] = []
        if directory is not None:
            text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in config.items())
            write_atomically(directory / CONFIG, text.encode())
            self._rounds = Records(directory / ROUNDS)
            if number > 1:
                self._lines = _earlier_lines(directory, number)
            self._rounds.replace(self._rounds.read()[: number - 1] if number > 1 else [])
            if settings.tensorboard:
                writers.append(TensorBoard(directory / "tensorboard"))
            directions = {name: metric.higher_is_better for name, metric in METRICS.items()}
            self._models = ModelFiles(directory, directions, number)
        if settings.mlflow:
            writers.append(MLflow(settings.mlflow, directory))
        self._writers = [self._stack.enter_context(closing(w)) for w in (*writers, *self._loggers)]
        for writer in self._writers:
            writer.start(config, number)

    def close(self) -> None:
        self._stack.close()

    def note(self, report: RoundReport, tensors: Mapping[str, Any] | None) -> None:
        """Write a round down, with the model before it where that was measured."""
        report.log(self._settings.rounds)
        record, metrics = report.line.record, report.line.metrics
        if self._models is not None and tensors is not None:
            self._models.consider(record.round - 1, metrics, record.loss, lambda: tensors)
        self._lines.append(Line(record, {**metrics, **report.client_fields()}))
        self._reports.append(report)
        if self._directory is not None:  # before the checkpoint that counts on it
            self._rounds.add(report.to_row())
        for writer in self._writers:
            writer.round(report)
        self.ending = ending(self._settings, self._lines, time.monotonic() - self._started)
        if self.ending:
            logger.info("stopping after round %d: %s", record.round, self.ending)
        elif report.diverged:
            self.ending = "the loss left all use"
            logger.warning("the loss left all use in round %d; stopping", record.round)

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
        summary = summarize(settings.recipe or "custom", lines, loss, metrics, None, None)
        client_bytes = ClientBytes(settings.num_clients)
        for line in lines:
            client_bytes.add(line.record)
        of_clients = client_fields(EVALUATED, evaluated)
        results = {
            **summary,
            **{name: finite_or_none(value) for name, value in of_clients.items()},
            **client_bytes.to_json(),
            "deployment": self._since_start(),
        }
        if self._models is not None:
            self._models.consider(len(lines), metrics, loss, make_tensors)
            self._models.finish(len(lines), make_tensors)
        if self._directory is not None:
            write_atomically(self._directory / SUMMARY, to_json(results).encode())
        for writer in self._writers:
            writer.finish(results)
        return results

    def _since_start(self) -> dict[str, Any]:
        """Return how the rounds since the server's last start went, in a few numbers."""
        reports, counts = self._reports, Counter[str]()
        for report in reports:
            counts.update(report.counts())
        row: dict[str, Any] = {"rounds": len(reports)}
        for name in ("round_seconds", "overhead_seconds"):
            seconds = [getattr(report, name) for report in reports]
            row[f"median_{name}"] = round(median(seconds), 4) if seconds else None
        return row | {"incidents": dict(counts)}

    def _check_terms(self, held: Mapping[str, Any]) -> None:
        where = f"run-dir {self._settings.run_dir!r} holds a run with"
        changed = [name for name, value in self._terms.items() if held.get(name) != value]
        if "model" in changed:
            raise ConfigError(f"{where} another recipe, seed or model; give it a new directory")
        for name in changed:
            raise ConfigError(
                f"{where} {name} {held.get(name)}, and {name} is {self._terms[name]}; set it back, "
                "or give it a new directory"
            )


def _earlier_lines(directory: Path, number: int) -> list[Line]:
    """Return the rounds before this one, with the clients' metrics among the others."""
    lines = read_lines(directory, number)
    found = []
    for line, row in zip(lines, read_rows(directory), strict=False):
        of_clients = {
            name: float(value)
            for name, value in row.items()
            if name.startswith((TRAINED, EVALUATED)) and isinstance(value, int | float)
        }
        found.append(Line(line.record, {**line.metrics, **of_clients}))
    return found


def ending(settings: Settings, lines: Sequence[Line], seconds: float) -> str:
    """Return why a run is over, given all its rounds and the seconds since this server began.

    Empty while it is not.
    """
    if settings.max_seconds and seconds >= settings.max_seconds:
        return f"{seconds:.0f} s have passed, and max-seconds is {settings.max_seconds:g}"
    total = sum(line.record.total_bytes or 0 for line in lines)
    if settings.max_bytes and total >= settings.max_bytes:
        return f"{total} bytes have been sent, and max-bytes is {settings.max_bytes}"
    if settings.patience:
        values = watched(settings.monitor, lines)
        since = len(values) - 1 - values.index(min(values)) if values else 0
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


class RunLogger:
    """Is told how a run goes; wrap Weights & Biases or a database in one of these."""

    def start(self, config: Mapping[str, Any], next_round: int) -> None:
        """Start or resume at ``next_round``; discard what was said of it and of later rounds."""

    def round(self, report: RoundReport) -> None:
        """Take a round."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Take the results."""

    def close(self) -> None:
        """Let go of files, also after an error."""


class TensorBoard(RunLogger):
    """Event files that TensorBoard shows; needs the package ``tensorboard``."""

    def __init__(self, path: Path) -> None:
        try:
            from tensorboard.summary.writer.event_file_writer import (  # type: ignore[import-untyped]
                EventFileWriter,
            )
        except ImportError:
            raise ConfigError(
                "tensorboard is true, but the package is not installed: pip install tensorboard"
            ) from None
        self._writer = EventFileWriter(str(path))

    def round(self, report: RoundReport) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        scalars, step = report.scalars().items(), report.line.record.round
        values = [Summary.Value(tag=f"aqg/{name}", simple_value=v) for name, v in scalars]
        summary = Summary(value=values)
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))

    def finish(self, summary: Mapping[str, Any]) -> None:  # noqa: ARG002
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class MLflow(RunLogger):
    """A run in MLflow's tracking store; needs the package ``mlflow`` or ``mlflow-skinny``.

    The store is at ``uri``, such as ``sqlite:///mlflow.db`` or ``http://host:5000``; a run that
    goes on in its directory goes on there.
    """

    def __init__(self, uri: str, directory: Path | None) -> None:
        try:
            from mlflow.exceptions import MlflowException
            from mlflow.tracking import MlflowClient
        except ImportError:
            raise ConfigError(
                f"mlflow is {uri!r}, but the package is not installed: pip install mlflow-skinny"
            ) from None
        try:
            self._client = MlflowClient(tracking_uri=uri)
            known = self._client.get_experiment_by_name("aqg")
            self._experiment = (
                known.experiment_id if known else self._client.create_experiment("aqg")
            )
        except MlflowException as error:
            reason = str(error).partition(". ")[0]
            raise ConfigError(f"mlflow is {uri!r}, which cannot be used: {reason}") from None
        self._file = None if directory is None else directory / "mlflow-run"
        self._run = ""

    def start(self, config: Mapping[str, Any], next_round: int) -> None:
        """Begin a run with the config as its parameters, or go on with the one of before."""
        from mlflow.entities import Param

        if next_round > 1 and self._file is not None and self._file.exists():
            self._run = self._file.read_text(encoding="utf-8")
            self._client.update_run(self._run, status="RUNNING")
            return
        self._run = self._client.create_run(self._experiment).info.run_id
        params = [Param(name, str(value)) for name, value in config.items()]
        self._client.log_batch(self._run, params=params)
        if self._file is not None:
            write_atomically(self._file, self._run.encode())

    def round(self, report: RoundReport) -> None:
        """Log every scalar of the round; of a round run again, MLflow shows the later ones."""
        self._log(report.scalars(), report.line.record.round)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Log the results, and end the run."""
        numbers = {name: v for name, v in summary.items() if isinstance(v, int | float)}
        self._log({f"summary/{name}": float(v) for name, v in numbers.items()}, 0)
        self._client.set_terminated(self._run, "FINISHED")
        self._run = ""

    def close(self) -> None:
        """Say of a run that did not finish that it failed."""
        if self._run:
            self._client.set_terminated(self._run, "FAILED")
            self._run = ""

    def _log(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=metrics)


_SHARED = (*table(CommonSettings), "rounds", "weighting")
"""Settings that the simulator has under the same name."""


def config_of(settings: Settings, describe: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return what goes into ``config.toml``: the simulator's names, so that runs compare."""
    values = asdict(settings) | {"recipe": settings.recipe or "custom"}
    config: dict[str, Any] = {"dataset": "custom", "partition": "custom", "model": "custom"}
    config |= {name: values[name] for name in _SHARED}
    config |= {"clients": settings.num_clients, "alpha": settings.step_size, "dtype": dtype}
    return config | {name: value for name, value in describe.items() if value is not None}
