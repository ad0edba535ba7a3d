"""Find run directories, read them into arrays, whatever state the runs are in, and group them.

Runs that differ in the seed only are one group; what else differs tells groups apart.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aqg.core.types import Float64Array, IntArray
from aqg.errors import RunError
from aqg.runs import directory as stored
from aqg.runs.cost import BYTES, DOWNLOADS, UPLOADS
from aqg.runs.directory import CONFIG, METRIC_PREFIX, ROUNDS, read_config, read_metrics, read_toml
from aqg.runs.files import explained
from aqg.sim.record import DROPPED
from aqg.studies.sweep import GRID

_MAX_DEPTH = 4
_KNOWN_KEYS = frozenset(("round", "loss", "uploads", "bits_per_param", "widths", *BYTES))


@dataclass(frozen=True)
class Fault:
    round: int
    client: int
    text: str


@dataclass(frozen=True)
class Run:
    """One run as read from its directory; arrays have one entry per round on record.

    What is unknown of a round is NaN, and what is unknown of a run None.
    """

    name: str  # tells the directory from the others in a report
    config: Mapping[str, Any]
    rounds: IntArray
    losses: Float64Array  # at the model broadcast in the round
    metrics: Mapping[str, Float64Array]  # of that model on the test set
    upload_bytes: IntArray
    download_bytes: IntArray
    widths: NDArray[np.int16]  # rounds × clients; 0 for a skip, `DROPPED` for a dropout
    faults: tuple[Fault, ...] = ()
    extras: Mapping[str, Float64Array] = field(default_factory=dict)  # all other numbers
    summary: Mapping[str, Any] | None = None  # while the run is not finished
    minimum: float | None = None
    client_upload_bytes: IntArray | None = None  # of each client, in all rounds
    client_download_bytes: IntArray | None = None

    @property
    def uploads(self) -> IntArray:
        return (self.widths > 0).sum(axis=1)

    @property
    def bits(self) -> IntArray:
        return np.maximum(self.widths, 0).sum(axis=1, dtype=np.int64)

    @property
    def total_bytes(self) -> IntArray:
        return self.upload_bytes + self.download_bytes

    @property
    def recipe(self) -> str:
        return str(self.config.get("recipe", "unknown"))

    @property
    def seed(self) -> object:
        return self.config.get("seed")

    @property
    def diverged(self) -> bool:
        return self.summary is not None and bool(self.summary.get("diverged"))


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read every run in the directories given, each once, in a stable order."""
    found: dict[Path, str] = {}
    for path in paths:
        for run in find_runs(path):
            name = "/".join((path.resolve().name, *run.relative_to(path).parts))
            found.setdefault(run.resolve(), name)
    return _share_minima([read_run(place, name) for place, name in found.items()])


def holds_runs(path: Path) -> bool:
    return path.is_dir() and bool(_find_below(path, _MAX_DEPTH))


def find_runs(path: Path) -> list[Path]:
    """Return the directory itself, or the runs below it, in the order of its config or natural."""
    if not path.is_dir():
        reason = "is not a directory" if path.exists() else "does not exist"
        raise RunError(f"{str(path)!r} {reason}; name a directory that `aqg run` or a sweep made")
    with explained(f"{str(path)!r} cannot be read"):
        runs = _find_below(path, _MAX_DEPTH)
    if not runs:
        advice = ""
        for file, command in (("trials.jsonl", "compare"), ("runs.csv", "reproduce")):
            if (path / file).is_file():  # published results, whose runs are kept elsewhere
                advice = f"; look at its {file} with: aqg {command} --from {path}"
        raise RunError(
            f"{str(path)!r} is not a run directory and holds none: "
            f"there is no {CONFIG} with a {ROUNDS} beside it{advice}"
        )
    return runs


def _find_below(path: Path, depth: int) -> list[Path]:
    if (path / ROUNDS).is_file():
        return [path]
    children = [child for child in path.iterdir() if child.is_dir() and child.name[0] != "."]
    children.sort(key=lambda child: natural_key(child.name))
    runs = [run for child in children if depth > 0 for run in _find_below(child, depth - 1)]
    if not runs and (path / CONFIG).is_file() and "recipe" in read_config(path):
        return [path]  # about to start; other programs have a file of that name, too
    varied: Any = {}  # by the comparison or sweep, with values in order
    if (path / GRID).is_file():
        varied = read_toml(path / GRID).get("grid")
    elif (path / CONFIG).is_file():
        varied = {"recipe": read_config(path).get("recipe")}
    order = varied.items() if isinstance(varied, dict) else ()

    def positions(run: Path) -> list[int]:
        config = read_config(run)
        lists = [(config.get(name), choices) for name, choices in order if type(choices) is list]
        return [choices.index(v) if v in choices else len(choices) for v, choices in lists]

    return sorted(runs, key=positions) if order else runs


def natural_key(text: str) -> list[tuple[int, int, str]]:
    """Return a sort key that counts numbers as numbers."""
    parts = re.split(r"(\d+)", text)
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts if part]


def read_run(path: Path, name: str) -> Run:
    config = readable(read_config(path))
    rows = stored.read_rows(path)
    summary = stored.read_summary(path)
    try:
        rounds = np.array([row["round"] for row in rows], np.int64)
        if (np.diff(rounds) <= 0).any() or (rounds < 1).any():
            raise ValueError("round numbers must rise from 1")
        widths = _widths([row.get("widths") or () for row in rows])
        return Run(
            name=name,
            config=config,
            rounds=rounds,
            losses=_numbers(row["loss"] for row in rows),
            metrics=_metrics(rows, summary),
            upload_bytes=np.array([row["upload_bytes"] for row in rows], np.int64),
            download_bytes=np.array([row["download_bytes"] for row in rows], np.int64),
            widths=widths,
            faults=tuple(fault for row in rows for fault in _faults(row)),
            extras=_extras(rows),
            summary=summary,
            minimum=_minimum(summary),
            client_upload_bytes=_client_bytes(rows, summary, UPLOADS, widths.shape[1]),
            client_download_bytes=_client_bytes(rows, summary, DOWNLOADS, widths.shape[1]),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else error
        file = str(path / ROUNDS)
        raise RunError(f"{file!r} holds a line that is not a round: {what}") from None


def widths_of(runs: Iterable[Run]) -> list[int]:
    """Return the bits per parameter that uploads have, in order."""
    return sorted({int(width) for run in runs for width in np.unique(run.widths) if width > 0})


def readable(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's settings with files named as people call them, and digests cut short.

    >>> readable({"dataset": "/data/own.npz", "model": "/home/me/nets.py:make", "clients": 3})
    {'dataset': 'own.npz', 'model': 'nets.py:make', 'clients': 3}
    >>> readable({"dataset": "custom", "model": "custom", "problem": "/home/me/heart.py:problem"})
    {'dataset': 'heart.py:problem', 'model': 'custom', 'problem': 'heart.py:problem'}
    """
    shown = dict(config)
    for name in ("dataset", "model", "problem", "init"):
        if isinstance(value := config.get(name), str) and value.startswith("/"):
            rest = value.rpartition("/")[2]
            if ".py:" in rest or name in ("dataset", "init"):
                shown[name] = rest
    if "problem" in shown:
        shown["dataset"] = shown["problem"]
    if isinstance(files := config.get("files"), list):
        shown["files"] = " ".join(str(row[-1])[:8] for row in files if isinstance(row, list))
    return shown


def _numbers(values: Iterable[Any]) -> Float64Array:
    array = np.array([np.nan if value is None else value for value in values], np.float64)
    array[np.isinf(array)] = np.nan
    return array


def _widths(rows: Sequence[Sequence[int]]) -> NDArray[np.int16]:
    """Stack the widths; a client that a round does not know yet counts as dropped out."""
    stacked = np.full((len(rows), max(map(len, rows), default=0)), DROPPED, np.int16)
    for index, row in enumerate(rows):
        stacked[index, : len(row)] = row
    return stacked


def _metrics(
    rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any] | None
) -> dict[str, Float64Array]:
    names = dict.fromkeys(name for row in (*rows, summary or {}) for name in read_metrics(row))
    return {name: _numbers(row.get(f"{METRIC_PREFIX}{name}") for row in rows) for name in names}


def _client_bytes(
    rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any] | None, key: str, num_clients: int
) -> IntArray | None:
    """Return the totals that the summary holds or, of a deployment, those of its rounds."""
    found = (summary or {}).get(key)
    if found is None and rows and all(key in row for row in rows):
        found = [sum(row[key][m] for row in rows if m < len(row[key])) for m in range(num_clients)]
    return np.array(found, np.int64) if found is not None and len(found) == num_clients else None


def _extras(rows: Sequence[Mapping[str, Any]]) -> dict[str, Float64Array]:
    others = [
        {k: value for k, value in row.items() if isinstance(value, int | float)} for row in rows
    ]
    names = dict.fromkeys(name for row in others for name in row if name not in _KNOWN_KEYS)
    extras = [name for name in names if not name.startswith(METRIC_PREFIX)]
    return {name: _numbers(row.get(name) for row in others) for name in extras}


def _faults(row: Mapping[str, Any]) -> Iterator[Fault]:
    """Return what went wrong in a round: faults, and what deployments call incidents."""
    for client, text in row.get("faults", ()):
        yield Fault(row["round"], int(client), str(text))
    for incident in row.get("incidents", ()):
        kind, text = str(incident["kind"]), str(incident.get("text", ""))
        if kind != "fault":  # is among the faults already
            yield Fault(row["round"], int(incident["client"]), f"{kind}: {text}" if text else kind)


def _minimum(summary: Mapping[str, Any] | None) -> float | None:
    loss, residual = ((summary or {}).get(name) for name in ("final_loss", "residual"))
    if not isinstance(loss, int | float) or not isinstance(residual, int | float):
        return None
    return stored.finite_or_none(float(loss - residual))


def _share_minima(runs: Sequence[Run]) -> list[Run]:
    """Give runs that are not finished the minimum of one that differs in the recipe only."""

    def problem_of(run: Run) -> str:
        return _text({key: value for key, value in run.config.items() if key != "recipe"})

    known = {problem_of(run): run.minimum for run in reversed(runs) if run.minimum is not None}
    return [
        run if run.minimum is not None else replace(run, minimum=known.get(problem_of(run)))
        for run in runs
    ]


COLORS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555", "#8C510A"),
    *("#332288", "#882255", "#999933", "#00A9B5"),
)
"""The first eight are told apart with any color vision (after Okabe and Ito)."""
_LOOKS_KNOWN = ("lean", "gd", "laq", "aqg-2", "aqg", "qgd", "lag", "qsgd")
_RESERVED = {name: color for color, name in enumerate(_LOOKS_KNOWN)}
"""Recipes that look the same in every report, if nobody else has taken their color."""
_LEADING = ("dataset", "partition", "model", "clients", "dropout")


@dataclass(frozen=True)
class Group:
    """Runs that differ in the seed only.

    The label is the recipe and the settings that tell it from others. Color and dash are indices.
    """

    runs: tuple[Run, ...]
    label: str
    settings: tuple[Any, ...]  # the values of `Comparison.telling`
    color: int
    dash: int

    @property
    def recipe(self) -> str:
        return self.runs[0].recipe


@dataclass(frozen=True)
class Comparison:
    """All groups, and the settings beside the recipe that it takes to tell them apart."""

    groups: tuple[Group, ...]
    telling: tuple[str, ...]

    @property
    def recipes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(group.recipe for group in self.groups))

    @property
    def runs(self) -> tuple[Run, ...]:
        return tuple(run for group in self.groups for run in group.runs)


def compare(runs: Iterable[Run]) -> Comparison:
    """Group runs and give every group its label and looks."""
    together: dict[str, list[Run]] = {}
    for run in runs:
        settings = {key: value for key, value in run.config.items() if key != "seed"}
        together.setdefault(_text(settings), []).append(run)
    firsts = [group[0] for group in together.values()]
    telling = telling_settings(firsts)
    recipes = list(dict.fromkeys(run.recipe for run in firsts))
    colors = assign_colors(recipes)
    dash_of: dict[object, int] = {}
    groups = []
    for first, group in zip(firsts, together.values(), strict=True):
        own = sorted(group, key=lambda run: natural_key(f"{run.seed} {run.name}"))
        values = tuple(first.config.get(name) for name in telling)
        looks = (recipes.index(first.recipe) // len(COLORS), _text(values))
        dash = dash_of.setdefault(looks, len(dash_of))
        label = _label(first, telling)
        groups.append(Group(tuple(own), label, values, colors[first.recipe], dash))
    return Comparison(tuple(groups), telling)


def telling_settings(runs: Sequence[Run]) -> tuple[str, ...]:
    """Choose settings that, with the recipe, tell all runs apart; none that adds nothing."""
    names = dict.fromkeys((*_LEADING, *(name for run in runs for name in run.config)))
    chosen, most = ["recipe"], len({run.recipe for run in runs})
    for name in names:
        asked = (*chosen, name)
        distinct = len({_text([run.config.get(key) for key in asked]) for run in runs})
        if name not in ("recipe", "seed") and distinct > most:
            chosen, most = [*asked], distinct
    return tuple(chosen[1:])


def assign_colors(recipes: Sequence[str]) -> dict[str, int]:
    """Give every recipe an index into `COLORS`: no two the same before all are in use."""
    colors: dict[str, int] = {}
    for recipe in recipes[: len(COLORS)]:
        color = _RESERVED.get(recipe.partition(":")[0])
        if color is not None and color not in colors.values():
            colors[recipe] = color
    for position, recipe in enumerate(recipes):
        free = [index for index in range(len(COLORS)) if index not in colors.values()]
        colors.setdefault(recipe, free[0] if free else position % len(COLORS))
    return {recipe: colors[recipe] for recipe in recipes}


def setting_text(value: object) -> str:
    """Write a setting's value for humans.

    >>> setting_text(0.5), setting_text("iid"), setting_text([[3, 1, 9]]), setting_text(None)
    ('0.5', 'iid', '[[3, 1, 9]]', '–')
    """
    if isinstance(value, float):
        return f"{value:g}"
    return "–" if value is None else value if isinstance(value, str) else _text(value)


def _label(run: Run, telling: Sequence[str]) -> str:
    parts = [run.recipe]
    for name in telling:
        text = setting_text(run.config.get(name))
        if name in ("rounds", "clients"):
            text = f"{text} {name}"
        elif name not in ("dataset", "partition", "model"):
            text = f"{name.replace('_', ' ')} {text}"
        parts.append(text)
    return " · ".join(parts)


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str, ensure_ascii=False)
