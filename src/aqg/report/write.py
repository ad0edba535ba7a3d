"""From directories to files: the report as one HTML file, and pictures and tables on request.

The page holds template, style, scripts and data, and needs no network. What it shows is one JSON
document with arrays in it: groups, curves, runs, results and settings.
"""

import base64
import gzip
import html
import json
import math
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
from numpy.typing import NDArray

import aqg
from aqg.core.types import Float64Array, IntArray
from aqg.errors import RunError
from aqg.report import curves
from aqg.report import runs as grouping
from aqg.report.curves import spread_of_known, test_title
from aqg.report.frontier import Panel, of_runs, of_studies
from aqg.report.runs import COLORS, Comparison, Group, Run, setting_text
from aqg.runs.cost import BYTES
from aqg.runs.files import explained, write_atomically
from aqg.runs.table import format_bytes

_MAX_POINTS = 600
_TOTAL_POINTS = 12_000
_MAX_COLUMNS = 400
_MAX_ROWS = 200
_TOTAL_CELLS = 1_500_000
_HISTOGRAM_BINS = 120
_MAX_MARKED_FAULTS = 500
_MAX_FAULT_ROWS = 200
_SPREAD = (
    *("rounds", "uploads", "bits_per_param", *BYTES),
    *("target_upload_bytes", "target_total_bytes", "final_loss", "residual", "faults"),
)


def make_document(comparison: Comparison, studies: Sequence[Panel] = ()) -> dict[str, Any]:
    """Describe a comparison; curves and counts are arrays."""
    groups, runs = comparison.groups, comparison.runs
    panels = [*studies, *of_runs(comparison)]
    colors = {group.recipe: group.color for group in groups}
    others = [point.recipe for panel in studies for point in panel.points]
    if not colors:
        colors = grouping.assign_colors(list(dict.fromkeys(others)))
    extras = _telling_extras(runs)
    all_extras = dict.fromkeys(name for run in runs for name in run.extras)
    position = {id(run): index for index, run in enumerate(runs)}
    return {
        "title": title(comparison) or "Recipes in the place of federated averaging",
        "facts": facts(comparison) if runs else [f"{len(panels)} tasks", f"{len(colors)} recipes"],
        "headline": headline(comparison),
        "versions": _versions(runs),
        "recipes": [
            {"name": name, "color": colors[name], "again": rank >= len(COLORS)}
            for rank, name in enumerate(comparison.recipes)
        ],
        "telling": list(comparison.telling),
        "target": common(curves.result_of(run)["target"] for run in runs),
        "widths": grouping.widths_of(runs),
        "metrics": [_metric(name, runs) for name in curves.metric_names(runs)],
        "extras": extras,
        "never": [name for name in all_extras if name not in extras],
        "groups": [_group(group, comparison, position, extras) for group in groups],
        "runs": [
            _run(run, group_index, len(runs))
            for group_index, group in enumerate(groups)
            for run in group.runs
        ],
        "faults": _faults(runs),
        "settings": _settings(groups),
        "frontiers": [panel.to_json(colors) for panel in panels],
    }


def _telling_extras(runs: Sequence[Run]) -> list[str]:
    """Return the extra numbers that are not zero throughout, those that change first."""
    known: dict[str, Float64Array] = {}
    for run in runs:
        for name, values in _finite(run).items():
            known[name] = np.append(known.get(name, ()), values)
    names = [name for name, values in known.items() if values.any()]
    return sorted(names, key=lambda name: bool((known[name] == known[name][0]).all()))


def _finite(run: Run) -> dict[str, Float64Array]:
    return {name: values[np.isfinite(values)] for name, values in run.extras.items()}


def _group(
    group: Group, comparison: Comparison, position: Mapping[int, int], extras: Sequence[str]
) -> dict[str, Any]:
    limit = max(100, min(_MAX_POINTS, _TOTAL_POINTS // len(comparison.groups)))
    metrics = curves.metric_names(comparison.runs)

    def shown(points: Iterable[curves.Points]) -> dict[str, Any] | None:
        band = curves.combine(list(points))
        if band is None:
            return None
        band = curves.thin(band, limit)
        curve = {"x": band.x, "y": band.median}
        return curve | ({"low": band.low, "high": band.high} if len(group.runs) > 1 else {})

    def curve(axis: str, metric: str) -> dict[str, Any] | None:
        return shown(curves.run_points(run, axis, metric) for run in group.runs)

    named = {name: name for name in curves.LOSSES} | {f"test_{name}": name for name in metrics}
    results = [curves.result_of(run) for run in group.runs]
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
        "finished": all(result["finished"] for result in results),
        "state": _state(results),
        "results": {name: spread_of_known(r[name] for r in results) for name in _SPREAD}
        | {
            f"test_{name}": spread_of_known(r["metrics"].get(name) for r in results)
            for name in metrics
        },
        "target": common(result["target"] for result in results),
        "reached": sum(result["target_upload_bytes"] is not None for result in results),
        "curves": {
            k: {axis: curve(axis, name) for axis in curves.AXES} for k, name in named.items()
        },
        "extras": {
            name: shown(curves.extra_points(run, name) for run in group.runs) for name in extras
        },
    }


def _metric(name: str, runs: Iterable[Run]) -> dict[str, Any]:
    known, title = curves.described(name, runs), test_title(name)
    return {
        "key": f"test_{name}",
        "name": title.removeprefix("test "),
        "title": title,
        "format": "percent" if known.is_percent else "number",
        "better": {None: "", True: "higher", False: "lower"}[known.higher_is_better],
    }


def _state(results: Sequence[Mapping[str, Any]]) -> str:
    """Say what keeps a group's numbers from being those of complete, healthy runs."""
    total, num_diverged = len(results), sum(result["diverged"] for result in results)
    num_left = sum(not result["finished"] for result in results)
    return ", ".join(
        word if count == total else f"{count} of {total} {word}"
        for count, word in ((num_left, "not finished"), (num_diverged, "diverged"))
        if count
    )


def _run(run: Run, group_index: int, num_runs: int) -> dict[str, Any]:
    rows = min(max(run.widths.shape[1], 1), _MAX_ROWS)
    columns = max(40, min(_MAX_COLUMNS, _TOTAL_CELLS // num_runs // rows))
    histogram = curves.count_widths(run.widths, _HISTOGRAM_BINS)
    activity = curves.watch_clients(run.widths, columns, rows)
    return {
        "name": run.name,
        "seed": setting_text(run.seed),
        "group": group_index,
        "finished": run.summary is not None,
        "first": int(run.rounds[0]) if len(run.rounds) else 1,
        "histogram": histogram._asdict(),
        "activity": activity._asdict(),
        "clients": {
            "upload": _per_client(run.client_upload_bytes, activity.clients),
            "download": _per_client(run.client_download_bytes, activity.clients),
        },
        "faults": [[f.round, f.client] for f in run.faults[:_MAX_MARKED_FAULTS]],
        "extras": {name: _sum_up(known) for name, known in _finite(run).items() if known.size},
    }


def _per_client(totals: IntArray | None, edges: IntArray) -> Float64Array | None:
    if totals is None or not len(totals):
        return None
    return np.add.reduceat(totals, edges[:-1]) / np.diff(edges)


def _sum_up(values: Float64Array) -> dict[str, float]:
    """Sum up counts; of other numbers, return the mean and the largest."""
    if (values == np.rint(values)).all():
        return {"total": float(values.sum())}
    return {"mean": float(values.mean()), "largest": float(values.max())}


def _faults(runs: Iterable[Run]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for index, run in enumerate(runs):
        for text in dict.fromkeys(fault.text for fault in run.faults):
            own = [fault for fault in run.faults if fault.text == text]
            who = sorted({fault.client for fault in own})[:20]
            row = {"run": index, "text": text, "count": len(own), "who": who}
            rows.append(row | {"first": own[0].round, "last": own[-1].round})
    return rows[:_MAX_FAULT_ROWS]


def _settings(groups: Sequence[Group]) -> list[dict[str, Any]]:
    rows = []
    for name in dict.fromkeys(name for group in groups for name in group.runs[0].config):
        shown = [group.runs if name == "seed" else group.runs[:1] for group in groups]
        values = [join_words([setting_text(r.config.get(name)) for r in runs]) for runs in shown]
        rows.append({"name": name, "values": values, "differs": len(set(values)) > 1})
    return rows


def _versions(runs: Sequence[Run]) -> list[list[str]]:
    """Name what made the report and, where they say so, what made the runs."""
    made_by = {"this report": f"aqg {aqg.__version__}", "Python": platform.python_version()}
    stored: dict[str, dict[str, None]] = {}
    for run in runs:
        versions = (run.summary or {}).get("versions", run.config.get("versions"))
        for name, version in versions.items() if isinstance(versions, dict) else ():
            stored.setdefault(f"runs: {name}", {})[setting_text(version)] = None
    made_by |= {"NumPy": np.__version__} | {name: ", ".join(each) for name, each in stored.items()}
    return [[name, text] for name, text in made_by.items()]


_NAMELESS = ("–", "custom")
"""How a setting reads that is not stored, or that a deployment has not described."""


def title(comparison: Comparison) -> str:
    """Name what is compared: some recipes on some data."""
    recipes = comparison.recipes
    datasets = {setting_text(run.config.get("dataset")): None for run in comparison.runs}
    named = [dataset for dataset in datasets if dataset not in _NAMELESS]
    what = join_words(recipes) if len(recipes) <= 4 else f"{len(recipes)} recipes"
    return f"{what} on {join_words(named)}" if named else what


def facts(comparison: Comparison) -> list[str]:
    """Return what all runs share, in a few words each."""
    runs = comparison.runs
    words = {"model": "{}", "clients": "{} clients", "partition": "{} split"}
    words["dropout"] = "dropout {}"
    shared = {text: common(run.config.get(name) for run in runs) for name, text in words.items()}
    told = [
        text.format(setting_text(value))
        for text, value in shared.items()
        if value != 0 and setting_text(value) not in _NAMELESS
    ]
    lengths = [len(run.rounds) for run in runs] or [0]
    unfinished = sum(run.summary is None for run in runs)
    return [
        f"{len(runs)} {'run' if len(runs) == 1 else 'runs'}",
        *told,
        f"{_range(lengths, '{:,}'.format)} rounds",
        *([f"{unfinished} not finished"] if unfinished else []),
    ]


def headline(comparison: Comparison) -> str | None:
    """Say in a sentence which recipe reached the target with the fewest bytes; None without one.

    Only runs with the same settings are compared. Where there are several such sets, it gives the
    range over all, and there is none unless one recipe wins in each.
    """
    results = {id(run): curves.result_of(run) for run in comparison.runs}
    sets: dict[str, dict[str, float]] = {}
    target = common(result["target"] for result in results.values())
    for group in comparison.groups:
        found = spread_of_known(results[id(run)]["target_total_bytes"] for run in group.runs)
        if found is not None:
            config = group.runs[0].config.items()
            others = {name: value for name, value in config if name not in ("recipe", "seed")}
            sets.setdefault(setting_text(others), {})[group.recipe] = found[0]
    if target is None or not sets:
        return None
    costs = list(sets.values())
    winner, *others_win = {min(own, key=own.__getitem__) for own in costs}
    rivals = [r for r in comparison.recipes if r != winner and all(r in own for own in costs)]
    if others_win or not rivals or any(own[winner] <= 0 for own in costs):
        return None
    rival = "gd" if "gd" in rivals else max(rivals, key=lambda r: max(own[r] for own in costs))
    spent = _range([own[winner] for own in costs], format_bytes)
    saving = _range([own[rival] / own[winner] for own in costs], "{:.3g}".format)
    return (
        f"{winner} came within {target:g} of the minimum after {spent} up and down, "
        f"{saving} times less than {rival}."
    )


def _range(values: Sequence[float], write: Callable[[float], str]) -> str:
    low, high = write(min(values)), write(max(values))
    return low if low == high else f"{low} to {high}"


def common(values: Iterable[Any]) -> Any:
    """Return the one value that all share, or None."""
    first, *others = [*values] or [None]
    return first if all(value == first for value in others) else None


def join_words(words: Sequence[str]) -> str:
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def pack(document: dict[str, Any]) -> str:
    """Return a document with arrays in it as text without any special character.

    It is JSON, gzip and base64; an array is ``{"$": [numbers]}``, and null stands for what is no
    number. Eight digits are more than a screen shows.
    """
    text = json.dumps(document, allow_nan=False, separators=(",", ":"), default=_listed)
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode("ascii")


def _listed(array: NDArray[Any]) -> dict[str, Any]:
    numbers = array.ravel().tolist()
    if array.dtype.kind == "f":
        numbers = [float(f"{x:.8g}") if math.isfinite(x) else None for x in numbers]
    return {"$": numbers}


_STYLE = "style.css"
_SCRIPTS = ("data.js", "charts.js", "activity.js", "frontier.js", "tables.js", "report.js")


def make_page(comparison: Comparison, studies: Sequence[Panel] = ()) -> str:
    """Return the report as one HTML text.

    Whatever comes from run directories reaches it as packed data, shown as text only, or escaped.
    """
    document = make_document(comparison, studies)
    document["created"] = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return Template(_read("template.html")).substitute(
        title=html.escape(document["title"]),
        style=_read(_STYLE),
        scripts="\n".join(_read(name) for name in _SCRIPTS),
        data=pack(document),
    )


def _read(name: str) -> str:
    return resources.files("aqg.report").joinpath(name).read_text(encoding="utf-8")


def write_report(
    directories: Sequence[Path], page: Path, png: Path | None = None, csv: Path | None = None
) -> tuple[list[Path], int]:
    """Write the page and, where a directory is given, pictures and tables.

    Return the files, and how many runs were read.
    """
    if page.is_dir():
        raise RunError(f"{str(page)!r} is a directory; name a file, as in --out report.html")
    if not page.parent.is_dir():
        raise RunError(f"directory {str(page.parent)!r} of --out does not exist")
    for directory in (png, csv):
        if directory is not None:
            with explained(f"output directory {str(directory)!r} cannot be made"):
                directory.mkdir(parents=True, exist_ok=True)
    studies = of_studies(directories)
    # What was published of a comparison has no runs beside it.
    with_runs = [path for path in directories if path not in studies or grouping.holds_runs(path)]
    comparison = grouping.compare(grouping.read_runs(with_runs))
    panels = [panel for found in studies.values() for panel in found]
    contents = {page: make_page(comparison, panels).encode()}
    if png is not None:
        from aqg.report.pictures import draw_pictures  # needs matplotlib

        contents |= {png / name: data for name, data in draw_pictures(comparison).items()}
    if csv is not None:
        for name, write in curves.TABLES.items():
            contents[csv / name] = write(comparison.runs).encode()
    for path, content in contents.items():
        write_atomically(path, content)
    return list(contents), len(comparison.runs)
