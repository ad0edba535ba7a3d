"""What the page shows, as one document: groups, curves, runs, results and settings."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

import numpy as np

import aqg
from aqg.objectives.metrics import named_metric
from aqg.report.activity import count_widths, watch_clients
from aqg.report.curves import AXES, LOSSES, combine, extra_points, run_points, thin
from aqg.report.frontier import of_runs
from aqg.report.groups import COLORS, assign_colors, setting_text
from aqg.report.results import metric_names, result_of
from aqg.report.words import common, facts, headline, join_words, spread, spread_of, title

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from aqg.report.curves import Band
    from aqg.report.frontier import Panel
    from aqg.report.groups import Comparison, Group
    from aqg.report.packing import Packer
    from aqg.report.results import Result
    from aqg.report.runs import Run

_MAX_POINTS = 600
_TOTAL_POINTS = 12_000
_MAX_COLUMNS = 400
_MAX_ROWS = 200
_TOTAL_CELLS = 1_500_000
_HISTOGRAM_BINS = 120
_MAX_MARKED_FAULTS = 500
_MAX_FAULT_ROWS = 200
_SPREAD = (
    "rounds",
    "uploads",
    "bits_per_param",
    "upload_bytes",
    "download_bytes",
    "total_bytes",
    "target_upload_bytes",
    "target_total_bytes",
    "final_loss",
    "residual",
    "faults",
)


def make_document(
    comparison: Comparison, packer: Packer, studies: Sequence[Panel] = ()
) -> dict[str, Any]:
    """Describe a comparison; arrays go into ``packer``."""
    groups, runs = comparison.groups, comparison.runs
    panels = [*studies, *of_runs(comparison)]
    colors = {group.recipe: group.color for group in groups}
    others = [point.recipe for panel in studies for point in panel.points]
    if not colors:
        colors = assign_colors(list(dict.fromkeys(others)))
    extras = _telling_extras(runs)
    position = {id(run): index for index, run in enumerate(runs)}
    widths = sorted({int(width) for run in runs for width in np.unique(run.widths) if width > 0})
    return {
        "title": title(comparison) or "Recipes in the place of federated averaging",
        "facts": facts(comparison) if runs else [f"{len(panels)} tasks", f"{len(colors)} recipes"],
        "headline": headline(comparison),
        "versions": _versions(runs),
        "recipes": [
            {
                "name": name,
                "color": next(group.color for group in groups if group.recipe == name),
                "again": rank >= len(COLORS),
            }
            for rank, name in enumerate(comparison.recipes)
        ],
        "telling": list(comparison.telling),
        "target": common(result_of(run).target for run in runs),
        "widths": widths,
        "metrics": [_metric(name, runs) for name in metric_names(runs)],
        "extras": extras,
        "never": [name for name in _extra_names(runs) if name not in extras],
        "groups": [_group(group, comparison, position, extras, packer) for group in groups],
        "runs": [
            _run(run, group_index, len(runs), packer)
            for group_index, group in enumerate(groups)
            for run in group.runs
        ],
        "faults": _faults(runs),
        "settings": _settings(groups),
        "frontiers": [panel.to_json(colors) for panel in panels],
    }


def _telling_extras(runs: Sequence[Run]) -> list[str]:
    """Return the extra numbers that are not zero throughout, those that change first."""
    highest: dict[str, float] = {}
    lowest: dict[str, float] = {}
    for run in runs:
        for name, values in run.extras.items():
            known = values[np.isfinite(values)]
            highest[name] = max(highest.get(name, -np.inf), known.max(initial=-np.inf))
            lowest[name] = min(lowest.get(name, np.inf), known.min(initial=np.inf))
    names = [name for name in highest if highest[name] != 0 or lowest[name] != 0]
    return sorted(names, key=lambda name: highest[name] == lowest[name])


def _extra_names(runs: Iterable[Run]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.extras))


def _group(
    group: Group,
    comparison: Comparison,
    position: Mapping[int, int],
    extras: Sequence[str],
    packer: Packer,
) -> dict[str, Any]:
    limit = max(100, min(_MAX_POINTS, _TOTAL_POINTS // len(comparison.groups)))
    metrics = metric_names(comparison.runs)

    def pack(band: Band | None) -> dict[str, Any] | None:
        if band is None:
            return None
        band = thin(band, limit)
        curve = {"x": packer.floats(band.x), "y": packer.floats(band.median)}
        if len(group.runs) > 1:
            curve |= {"low": packer.floats(band.low), "high": packer.floats(band.high)}
        return curve

    results = [result_of(run) for run in group.runs]
    config = group.runs[0].config
    return {
        "label": group.label,
        "recipe": comparison.recipes.index(group.recipe),
        "color": group.color,
        "dash": group.dash,
        "settings": [setting_text(value) for value in group.settings],
        "dataset": setting_text(config.get("dataset")),
        "partition": setting_text(config.get("partition")),
        "runs": [position[id(run)] for run in group.runs],
        "finished": all(result.finished for result in results),
        "state": _state(results),
        "results": {name: spread_of(results, name) for name in _SPREAD}
        | {f"test_{name}": spread([r.metrics.get(name) for r in results]) for name in metrics},
        "target": common(result.target for result in results),
        "reached": sum(result.target_upload_bytes is not None for result in results),
        "curves": {
            key: {
                axis: pack(combine([run_points(run, axis, metric) for run in group.runs]))
                for axis in AXES
            }
            for key, metric in [
                *((name, name) for name in LOSSES),
                *((f"test_{name}", name) for name in metrics),
            ]
        },
        "extras": {
            name: pack(combine([extra_points(run, name) for run in group.runs])) for name in extras
        },
    }


def _metric(name: str, runs: Iterable[Run]) -> dict[str, Any]:
    """Return what a page says of a metric: its title, and how numbers are written."""
    described = [(run.summary or {}).get("metrics", {}).get(name) for run in runs]
    known = next((row for row in described if isinstance(row, dict)), named_metric(name).describe())
    words = name.replace("_", " ")
    is_higher = known.get("higher_is_better")
    better = "" if is_higher is None else "higher" if is_higher else "lower"
    return {
        "key": f"test_{name}",
        "name": words,
        "title": f"test {words}",
        "format": "percent" if known.get("percent") else "number",
        "better": better,
    }


def _state(results: Sequence[Result]) -> str:
    """Say what keeps a group's numbers from being those of complete, healthy runs."""
    parts = []
    for count, word in (
        (sum(not result.finished for result in results), "not finished"),
        (sum(result.diverged for result in results), "diverged"),
    ):
        if count:
            parts.append(word if count == len(results) else f"{count} of {len(results)} {word}")
    return ", ".join(parts)


def _run(run: Run, group_index: int, num_runs: int, packer: Packer) -> dict[str, Any]:
    rows = min(max(run.widths.shape[1], 1), _MAX_ROWS)
    columns = max(40, min(_MAX_COLUMNS, _TOTAL_CELLS // num_runs // rows))
    histogram = count_widths(run.widths, _HISTOGRAM_BINS)
    activity = watch_clients(run.widths, columns, rows)
    return {
        "name": run.name,
        "seed": setting_text(run.seed),
        "group": group_index,
        "finished": run.summary is not None,
        "first": int(run.rounds[0]) if len(run.rounds) else 1,
        "histogram": {
            "edges": packer.counts(histogram.edges),
            "widths": list(histogram.widths),
            "counts": packer.counts(histogram.counts),
        },
        "activity": {
            "edges": packer.counts(activity.edges),
            "clients": packer.counts(activity.client_edges),
            "uploads": packer.counts(activity.uploads),
            "bits": packer.counts(activity.bits),
            "away": packer.counts(activity.away),
        },
        "clients": {
            "upload": _per_client(run.client_upload_bytes, activity.client_edges, packer),
            "download": _per_client(run.client_download_bytes, activity.client_edges, packer),
        },
        "faults": [[f.round, f.client] for f in run.faults[:_MAX_MARKED_FAULTS]],
        "extras": {
            name: _total(values[np.isfinite(values)])
            for name, values in run.extras.items()
            if np.isfinite(values).any()
        },
    }


def _per_client(
    totals: NDArray[np.int64] | None, edges: NDArray[np.int64], packer: Packer
) -> dict[str, Any] | None:
    """Pack what a client sent or received, on average over those in a row; None if unknown."""
    if totals is None or not len(totals):
        return None
    return packer.floats(np.add.reduceat(totals, edges[:-1]) / np.diff(edges))


def _total(values: NDArray[np.float64]) -> dict[str, float]:
    """Sum up counts; of other numbers, return the mean and the largest."""
    if (values == np.rint(values)).all():
        return {"total": float(values.sum())}
    return {"mean": float(values.mean()), "largest": float(values.max())}


def _faults(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """Count the faults of each run by what happened."""
    rows: list[dict[str, Any]] = []
    for index, run in enumerate(runs):
        by_text: dict[str, dict[str, Any]] = {}
        for fault in run.faults:
            row = by_text.setdefault(
                fault.text,
                {"run": index, "text": fault.text, "count": 0, "first": fault.round, "who": set()},
            )
            row["count"] += 1
            row["last"] = fault.round
            row["who"].add(fault.client)
        rows.extend(by_text.values())
    return [{**row, "who": sorted(row["who"])[:20]} for row in rows[:_MAX_FAULT_ROWS]]


def _settings(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return every setting with its value in each group."""
    names = dict.fromkeys(name for group in groups for name in group.runs[0].config)
    rows = []
    for name in names:
        if name == "seed":
            values = [join_words([setting_text(r.seed) for r in group.runs]) for group in groups]
        else:
            values = [setting_text(group.runs[0].config.get(name)) for group in groups]
        rows.append({"name": name, "values": values, "differs": len(set(values)) > 1})
    return rows


def _versions(runs: Sequence[Run]) -> list[list[str]]:
    """Name what made the report and, where they say so, what made the runs."""
    rows = [
        ["this report", f"aqg {aqg.__version__}"],
        ["Python", platform.python_version()],
        ["NumPy", np.__version__],
    ]
    stored: dict[str, dict[str, None]] = {}
    for run in runs:
        versions = (run.summary or {}).get("versions", run.config.get("versions"))
        if isinstance(versions, dict):
            for name, version in versions.items():
                stored.setdefault(f"runs: {name}", {})[setting_text(version)] = None
    return rows + [[name, ", ".join(values)] for name, values in stored.items()]
