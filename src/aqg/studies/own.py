"""A study of the user's own: a function ``FILE.py:FUNCTION`` that yields the settings of its runs.

Each item is a mapping of settings as ``aqg run`` knows them, or a `RunConfig`. An item ``name``
becomes the name of the run's directory. The function may ask for ``data_dir`` by name, and for
options that follow its own name, as in ``FILE.py:FUNCTION:width=64``. It is called once: what it
yields is written down, so that going on with the study needs no code but that of models and
problems.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aqg.errors import ConfigError
from aqg.runs.config import RunConfig, located

if TYPE_CHECKING:
    from aqg.spec import Code

RUNS = "run"
"""The array of tables in a sweep's file that holds the runs one by one."""


def call_study(code: Code, data_dir: Path | None) -> list[dict[str, Any]]:
    """Return the settings of every run that the function wants."""
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
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{code} failed after {len(runs)} runs: {text}") from error
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
