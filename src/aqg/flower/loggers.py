"""Where a run is written down: its directory, TensorBoard, MLflow, or anything like them."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from aqg.errors import ConfigError
from aqg.runs.directory import CONFIG, ROUNDS, SUMMARY
from aqg.runs.files import Records, to_json, write_atomically
from aqg.settings import CommonSettings, table

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from aqg.flower.reports import RoundReport
    from aqg.flower.settings import Settings


class RunLogger(Protocol):
    """Is told how a run goes; wrap Weights & Biases or a database in one of these."""

    def start(self, config: Mapping[str, Any], next_round: int) -> None:
        """Start or resume at ``next_round``; discard what was said of it and of later rounds."""

    def round(self, report: RoundReport) -> None: ...

    def finish(self, summary: Mapping[str, Any]) -> None: ...

    def close(self) -> None:
        """Let go of files, also after an error."""


class RunDirectory:
    """The simulator's run directory: ``config.toml``, ``rounds.jsonl`` and ``summary.json``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rounds = Records(path / ROUNDS)

    def start(self, config: Mapping[str, Any], next_round: int) -> None:
        """Write the config, and drop the lines of rounds that will be run again."""
        text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in config.items())
        write_atomically(self._path / CONFIG, text.encode())
        self._rounds.replace(self._rounds.read()[: next_round - 1] if next_round > 1 else [])

    def round(self, report: RoundReport) -> None:
        """Add a line, on disk before the checkpoint that counts on it."""
        self._rounds.add(report.to_row())

    def finish(self, summary: Mapping[str, Any]) -> None:
        write_atomically(self._path / SUMMARY, to_json(summary).encode())

    def close(self) -> None: ...


class TensorBoard:
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

    def start(self, config: Mapping[str, Any], next_round: int) -> None: ...

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


class MLflow:
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
