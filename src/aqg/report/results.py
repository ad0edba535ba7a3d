"""A run's results in numbers, whether it is finished or not, and as CSV."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from aqg.report.curves import LOSSES, run_points
from aqg.runs.cost import add_bytes
from aqg.runs.table import write_csv

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from aqg.report.runs import Run


@dataclass(frozen=True)
class Result:
    """What a run has spent and reached so far; None where a number is unknown.

    ``target`` is the residual asked for, and the names that begin with it what it took to stay
    within it.
    """

    finished: bool
    diverged: bool
    rounds: int
    uploads: int
    bits_per_param: int
    upload_bytes: int
    download_bytes: int | None
    total_bytes: int | None
    final_loss: float | None
    residual: float | None
    metrics: dict[str, float | None]
    target: float | None
    target_rounds: float | None
    target_upload_bytes: float | None
    target_download_bytes: float | None
    target_total_bytes: float | None
    faults: int


def result_of(run: Run) -> Result:
    """Sum up a run; one that is not finished counts as far as it came."""
    target = (run.summary or {}).get("target")
    target = target if isinstance(target, dict) else {}
    return Result(
        finished=run.summary is not None,
        diverged=run.diverged,
        rounds=len(run.rounds),
        uploads=int(run.uploads.sum()),
        bits_per_param=int(run.bits.sum()),
        upload_bytes=int(run.upload_bytes.sum()),
        download_bytes=_whole(run.download_bytes.sum()),
        total_bytes=_whole(run.total_bytes.sum()),
        final_loss=_last(run, "loss"),
        residual=_last(run, "residual"),
        metrics={name: _last(run, name) for name in run.metrics},
        target=_number(run.config.get("target")) if _is_residual(run) else None,
        target_rounds=_number(target.get("reached_round")),
        target_upload_bytes=_number(target.get("upload_bytes")),
        target_download_bytes=_number(target.get("download_bytes")),
        target_total_bytes=_number(target.get("total_bytes")),
        faults=len(run.faults),
    )


def _is_residual(run: Run) -> bool:
    """Tell whether the run's target is a distance from the minimum."""
    return bool(run.config.get("target_kind", "residual") == "residual")


def _last(run: Run, metric: str) -> float | None:
    if run.diverged and metric in LOSSES:
        return None
    values = run_points(run, "rounds", metric).y
    return float(values[-1]) if len(values) else None


def _whole(total: float) -> int | None:
    return None if math.isnan(total) else int(total)


def _number(value: object) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def summary_csv(runs: Sequence[Run]) -> str:
    """Return one row per run: its name, every setting, and its results."""
    settings = list(dict.fromkeys(name for run in runs for name in run.config))
    metrics = metric_names(runs)
    rows = []
    for run in runs:
        row: dict[str, Any] = {"run": run.name}
        row.update((name, _cell(run.config.get(name))) for name in settings)
        results = asdict(result_of(run))
        found = results.pop("metrics")
        results |= {_column(name, results): found.get(name) for name in metrics}
        row.update((f"result_{k}" if k in settings else k, v) for k, v in results.items())
        rows.append(row)
    return write_csv(list(rows[0]) if rows else ["run"], (row.values() for row in rows))


_BYTES = ("upload_bytes", "download_bytes", "total_bytes")


def curves_csv(runs: Sequence[Run]) -> str:
    """Return one row per run and round: what it had cost so far, and what it had reached.

    Round 0 is the start.
    """
    metrics = metric_names(runs)
    columns = ["run", "recipe", "seed", "round", "uploads", *_BYTES, "loss", "residual"]
    columns += [_column(name, columns) for name in metrics]
    return write_csv(columns, (row for run in runs for row in _curve_rows(run, metrics)))


def metric_names(runs: Iterable[Run]) -> list[str]:
    """Return the metrics that some run has, in order."""
    return list(dict.fromkeys(name for run in runs for name in run.metrics))


def _column(name: str, taken: Iterable[str]) -> str:
    """Return the heading of a metric: its name, unless another column has it."""
    return f"test_{name}" if name in taken else name


def _curve_rows(run: Run, metrics: Sequence[str]) -> Iterator[Iterable[Any]]:
    summary = run.summary or {}
    uploads = np.concatenate(([0], np.cumsum(run.uploads))).tolist()
    sent = np.concatenate(([0], np.cumsum(run.upload_bytes))).tolist()
    received = np.concatenate(([0.0], np.cumsum(run.download_bytes))).tolist()
    rounds = [*(run.rounds - 1).tolist(), *run.rounds[-1:].tolist()]
    losses = [*_known(run.losses), summary.get("final_loss")]
    unknown = np.full(len(run.rounds), np.nan)
    found = [
        [*_known(run.metrics.get(name, unknown)), summary.get(f"test_{name}")] for name in metrics
    ]
    rows = zip(rounds, uploads, sent, received, losses, strict=False)
    for index, (number, count, up, down, loss) in enumerate(rows):
        residual = None if loss is None or run.minimum is None else loss - run.minimum
        values = [column[index] for column in found]
        sizes = (up, _whole(down), _whole(up + down))
        yield run.name, run.recipe, run.seed, number, count, *sizes, loss, residual, *values


def clients_csv(runs: Sequence[Run]) -> str:
    """Return one row per run and client: what it sent and received in all rounds.

    A number is missing where it is not on record.
    """
    columns = ["run", "recipe", "seed", "client", *_BYTES]
    return write_csv(columns, (row for run in runs for row in _client_rows(run)))


def _client_rows(run: Run) -> Iterator[Iterable[Any]]:
    unknown = [None] * run.widths.shape[1]
    up, down = run.client_upload_bytes, run.client_download_bytes
    sent = unknown if up is None else up.tolist()
    received = unknown if down is None else down.tolist()
    for client, sizes in enumerate(zip(sent, received, strict=True)):
        yield run.name, run.recipe, run.seed, client, *sizes, add_bytes(*sizes)


def _known(values: np.ndarray[Any, np.dtype[np.float64]]) -> list[float | None]:
    return [None if value != value else value for value in values.tolist()]


def _cell(value: object) -> object:
    return json.dumps(value) if isinstance(value, list | dict) else value
