"""Sweeps: every combination of some settings' values, each in a run directory of its own.

A grid file holds settings as ``aqg run`` knows them, and a table ``[grid]`` of settings with lists
of values; the product of the lists is run. In place of ``[grid]`` it may hold tables ``[[run]]``,
the settings of a run each; a Python function may yield these as well (`call_study`).
``docs/how-to/sweeps.md`` says what is in a sweep's directory. A run with a ``summary.json`` of its
own is finished and never touched again; the others go on from their checkpoints.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from aqg.errors import AqgError, ConfigError, RunError
from aqg.runs.config import SETTINGS, RunConfig, located, refuse_changes, resolve
from aqg.runs.cost import DOWNLOADS, UPLOADS
from aqg.runs.directory import SUMMARY, create_directory, read_summary, read_toml
from aqg.runs.files import write_atomically
from aqg.runs.plan import Job
from aqg.runs.table import records_to_csv
from aqg.spec import Code, in_words

RUNS = "run"
"""The array of tables in a sweep's file that holds the runs one by one."""
GRID = "sweep.toml"
TABLE = "summary.csv"
_MAX_NAME_LENGTH = 120


@dataclass(frozen=True)
class Sweep:
    """All combinations, in the order of the grid: the last setting changes fastest."""

    varying: tuple[str, ...]
    runs: tuple[Job, ...]

    def settings_of(self, run: Job) -> dict[str, Any]:
        return {name: getattr(run.config, name) for name in self.varying}


def expand(document: Mapping[str, Any], data_dir: Path | None = None) -> Sweep:
    """Make the sweep that a grid file's content describes; every config is checked."""
    fixed = {key: value for key, value in document.items() if key not in ("grid", RUNS)}
    is_grid = RUNS not in document
    rows = _read_grid(document, fixed) if is_grid else _read_list(document, fixed)
    named = tuple(dict.fromkeys(key for row in rows for key in row if key != "name"))
    configs = []
    for row in rows:
        own = {key: row[key] for key in named if key in row}
        config, *more = resolve({**fixed, **own}, data_dir)
        if more:
            recipes = json.dumps([one.recipe for one in (config, *more)])
            raise ConfigError(
                f"a run has 1 recipe, not {len(more) + 1}; use recipe = {recipes} in [grid]"
            )
        configs.append(config)
    varying = named
    if not is_grid:
        varying = tuple(k for k in named if len({repr(getattr(c, k)) for c in configs}) > 1)
        varying = varying or named[:1] or ("recipe",)
    found = [{key: getattr(config, key) for key in varying} for config in configs]
    names = [row["name"] for row in rows if "name" in row] or _names(found)
    return Sweep(varying, tuple(map(Job, names, configs)))


def _read_grid(document: Mapping[str, Any], fixed: Mapping[str, Any]) -> list[dict[str, Any]]:
    grid = document.get("grid")
    if not isinstance(grid, dict) or not grid:
        raise ConfigError("the grid file has no table [grid] with lists of values")
    _check_keys((*fixed, *grid))
    for key, values in grid.items():
        if not isinstance(values, list):
            raise ConfigError(f"{key} in [grid] is {values!r}; it must be a list of values")
        if not values:
            raise ConfigError(f"{key} in [grid] is []; it must have at least 1 value")
        for position, value in enumerate(values):
            if value in values[:position]:
                raise ConfigError(f"{key} in [grid] has {value!r} twice; values must differ")
        if key in fixed:
            raise ConfigError(f"{key} is both fixed ({fixed[key]!r}) and in [grid]; keep one")
    return [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]


def _read_list(document: Mapping[str, Any], fixed: Mapping[str, Any]) -> list[dict[str, Any]]:
    runs = document[RUNS]
    if "grid" in document:
        raise ConfigError("the file has both [grid] and [[run]]; keep one")
    if not isinstance(runs, list) or not runs or not all(isinstance(run, dict) for run in runs):
        raise ConfigError("run is not an array of tables with the settings of a run each")
    _check_keys((*fixed, *(key for run in runs for key in run if key != "name")))
    names = [run.get("name") for run in runs]
    for name in names if any(names) else ():
        if not isinstance(name, str) or not name or _safe(name) != name:
            raise ConfigError(
                f"name of a run is {name!r}; every run needs one, of letters, digits, . + and -"
            )
        if names.count(name) > 1:
            raise ConfigError(f"two runs have the name {name!r}")
    return runs


def _check_keys(keys: Iterable[str]) -> None:
    for key in keys:
        if key not in SETTINGS:
            raise ConfigError(f"unknown setting {key!r}; choose from {', '.join(SETTINGS)}, grid")


def call_study(code: Code, data_dir: Path | None) -> list[dict[str, Any]]:
    """Return the settings of every run that a function of the user's own yields.

    An item is a mapping of settings, or a `RunConfig`; its ``name`` becomes that of the run's
    directory. The function may ask for ``data_dir`` by name, and for options that follow its own
    name, as in ``FILE.py:FUNCTION:width=64``. It is called once: what it yields is written down, so
    that going on needs no code but that of models and problems.
    """
    found = code.call(data_dir=data_dir)
    if isinstance(found, str | Mapping) or not isinstance(found, Iterable):
        raise ConfigError(f"{code} returned {type(found).__name__}; it must yield settings of runs")
    runs: list[dict[str, Any]] = []
    try:
        for item in found:
            runs.append(_plain(code, len(runs) + 1, item))
    except ConfigError:
        raise
    except Exception as error:  # a generator runs only now
        raise ConfigError(f"{code} failed after {len(runs)} runs: {in_words(error)}") from error
    if not runs:
        raise ConfigError(f"{code} yields no run; at least 1 is needed")
    return runs


def _plain(code: Code, number: int, item: object) -> dict[str, Any]:
    """Return settings that a TOML file can hold, with absolute paths."""
    if isinstance(item, RunConfig):
        item = {k: v for k, v in asdict(item).items() if k != "files" and v not in (None, ())}
    if not isinstance(item, Mapping):
        raise ConfigError(
            f"{code} yields a {type(item).__name__} as run {number}; it must be settings by name"
        )
    settings = {str(key): _value(value) for key, value in item.items() if value is not None}
    return {key: located(key, value) for key, value in settings.items()}


def _value(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [_value(one) for one in value]
    item = getattr(value, "item", None)  # a number of NumPy's
    return item() if callable(item) else value


def runs_to_toml(runs: Iterable[Mapping[str, Any]]) -> str:
    lines: list[str] = []
    for run in runs:
        lines += ["", f"[[{RUNS}]]", *(f"{key} = {json.dumps(v)}" for key, v in run.items())]
    return "\n".join(lines) + "\n"


def _names(combinations: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name each combination so that it can be read, fits a file system and is unique."""
    plain = ["_".join(f"{key}-{_safe(c[key])}" for key in c) for c in combinations]
    counts = Counter(name.lower() for name in plain)  # some file systems ignore case
    names = []
    for name, combination in zip(plain, combinations, strict=True):
        if len(name) > _MAX_NAME_LENGTH or counts[name.lower()] > 1:
            digest = hashlib.sha256(json.dumps(combination).encode()).hexdigest()[:12]
            name = f"{name[: _MAX_NAME_LENGTH - 13]}-{digest}"
        names.append(name)
    if len(set(names)) < len(names):
        twice = Counter(names).most_common(1)[0][0]
        raise ConfigError(f"two combinations are the same run, {twice}")
    return names


def _safe(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return re.sub(r"[^A-Za-z0-9.+-]+", "-", text).strip("-")


def create_sweep(directory: Path, grid_file: bytes) -> None:
    create_directory(directory)
    write_atomically(directory / GRID, grid_file)


def open_sweep(
    directory: Path, document: Mapping[str, Any] | None = None, data_dir: Path | None = None
) -> Sweep:
    """Read the sweep in a directory; a ``document`` that differs from its grid is refused."""
    if not (directory / GRID).is_file():
        raise RunError(f"{str(directory)!r} is not a sweep's directory: it has no {GRID}")
    stored = read_toml(directory / GRID)
    if document is not None:
        advice = "drop the file, or start a new sweep"
        refuse_changes(directory, _flat(stored), _flat(document), "sweep", advice)
    return expand(stored, data_dir)


def _flat(document: Mapping[str, Any]) -> dict[str, Any]:
    top, grid = dict(document), document.get("grid")
    if isinstance(grid, dict):
        top |= {f"grid.{key}": value for key, value in top.pop("grid").items()}
    return top


def collect(
    sweep: Sweep, directory: Path, failures: Mapping[str, AqgError]
) -> list[dict[str, Any]]:
    """Return one object per run: name, settings that vary, and results or the error."""
    rows = []
    for run in sweep.runs:
        found: dict[str, Any] = {"error": str(failures.get(run.name))}
        if run.name not in failures:
            summary = read_summary(directory / run.name) or {}
            found = {k: value for k, value in summary.items() if k not in (UPLOADS, DOWNLOADS)}
        rows.append({"name": run.name, "settings": sweep.settings_of(run), **found})
    return rows


def write_results(directory: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    text = json.dumps({"runs": rows}, indent=2, allow_nan=False) + "\n"
    write_atomically(directory / SUMMARY, text.encode())
    write_atomically(directory / TABLE, records_to_csv([_flat_row(row) for row in rows]).encode())


def _flat_row(row: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if key == "target":
            flat |= {f"target_{name}": number for name, number in value.items()}
        elif key == "settings":
            flat |= {k: json.dumps(v) if isinstance(v, tuple) else v for k, v in value.items()}
        else:
            flat[key] = value
    return flat
