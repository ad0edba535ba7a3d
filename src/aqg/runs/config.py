"""From settings to configs: defaults, files, TOML in and out.

Settings come from four places, the later winning: the dataset's defaults, a TOML file,
``--set key=value``, and the command line's own flags.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aqg.core.downlink import AUTO
from aqg.data import is_dataset_file
from aqg.errors import ConfigError
from aqg.runs.defaults import (
    DATASET_DEFAULTS,
    OWN,
    STEP_SIZES,
    dataset_defaults,
    problem_defaults,
)
from aqg.runs.own import problem_settings
from aqg.runs.run_config import SETTINGS, RunConfig, read_stored, typed
from aqg.spec import Code, file_digest

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "BEFORE_DOWNLINKS",
    "DATASET_DEFAULTS",
    "OWN",
    "SETTINGS",
    "STEP_SIZES",
    "RunConfig",
    "check_files",
    "load_plugins",
    "located",
    "names_step",
    "parse_assignment",
    "read_settings",
    "read_stored",
    "refuse_unnamed_code",
    "resolve",
    "to_toml",
]

BEFORE_DOWNLINKS: Mapping[str, str] = {"downlink": "full"}
"""What a stored config that does not name a downlink was made with."""


def resolve(settings: Mapping[str, Any], data_dir: Path | None = None) -> tuple[RunConfig, ...]:
    """Fill in defaults and check everything; one config per recipe named.

    Where a function makes the problem, it is called (with ``data_dir``) if a default depends on
    what it makes.

    >>> [config.recipe for config in resolve({"recipe": "lean,gd"})]
    ['lean', 'gd']
    >>> resolve({"rounds": -5})
    Traceback (most recent call last):
    aqg.errors.ConfigError: rounds is -5; it must be at least 1
    """
    unknown = sorted(set(settings) - set(SETTINGS))
    if unknown:
        raise ConfigError(f"unknown setting {unknown[0]!r}; choose from {', '.join(SETTINGS)}")
    settings = {name: located(name, value) for name, value in settings.items()}
    if settings.get("problem") is not None:
        merged = problem_defaults(settings, data_dir)
    else:
        merged = dataset_defaults(settings)
    merged.setdefault("recipe", "auto,gd,laq")
    merged.setdefault("downlink", AUTO)
    recipes = merged.pop("recipe")
    names = recipes.split(",") if isinstance(recipes, str) else list(recipes)
    names = [name.strip() for name in names]
    if len(set(names)) < len(names):
        raise ConfigError(f"a recipe is named twice in {','.join(names)}")
    merged["files"] = _noted_files(merged)
    checked = {name: typed(name, value) for name, value in merged.items()}
    load_plugins(checked.get("plugins", ()))
    return tuple(RunConfig(recipe=typed("recipe", name), **checked) for name in names)


def names_step(settings: Mapping[str, Any]) -> bool:
    """Tell whether settings, or the problem that they name, say how long steps are."""
    problem = located("problem", settings.get("problem"))
    own = problem_settings(problem) if isinstance(problem, str) else {}
    return bool({"alpha", "step"} & {*settings, *own})


def located(name: str, value: Any) -> Any:
    """Make the files that a setting names absolute, so that a run can go on from anywhere."""
    if name == "plugins" and isinstance(value, list | tuple):
        return [str(Path(item).expanduser().resolve()) for item in value]
    if not isinstance(value, str):
        return value
    if name == "init" or (name == "dataset" and is_dataset_file(value)):
        return str(Path(value).expanduser().resolve())
    if name in ("model", "problem"):
        code = Code.parse(value)
        if code is None and name == "problem":
            raise ConfigError(f"problem is {value!r}; it must be FILE.py:FUNCTION")
        return value if code is None else str(code.located())
    return value


def refuse_unnamed_code(
    settings: Mapping[str, Any], named: Mapping[str, Any], *, allowed: bool, where: str
) -> None:
    """Refuse settings in a file that would run code which the command line does not name.

    Args:
        settings: from the file.
        named: from the command line.
        allowed: whether the user said that code in files may run.
        where: the file, for the message.

    """
    for name in ("model", "problem", "plugins"):
        value = settings.get(name)
        if allowed or not value or located(name, named.get(name)) == located(name, value):
            continue
        if name != "model" or (isinstance(value, str) and Code.parse(value) is not None):
            shown = value[0] if isinstance(value, list | tuple) else value
            raise ConfigError(
                f"{where} would run {name} {shown!r}, which the command line does not name; "
                "add --allow-code if you trust it"
            )


def check_files(config: RunConfig) -> None:
    """Raise if a file is not the one that the run began with."""
    _compare_digests(
        dict(config.files), {path: file_digest(Path(path)) for path, _ in config.files}
    )


def _noted_files(settings: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the digest of every file that shapes the problem; one that has changed is refused."""
    paths = []
    for name in ("dataset", "model", "problem", "init"):
        value = settings.get(name)
        if not isinstance(value, str):
            continue
        code = Code.parse(value) if name in ("model", "problem") else None
        if code is not None:
            paths.append(str(code.path))
        elif name == "init" or (name == "dataset" and is_dataset_file(value)):
            paths.append(value)
    now = {path: file_digest(Path(path)) for path in dict.fromkeys(paths)}
    _compare_digests(dict(typed("files", settings.get("files", ()))), now)
    return tuple(now.items())


def _compare_digests(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    for path, digest in now.items():
        if before.get(path, digest) != digest:
            raise ConfigError(
                f"{path!r} is not the file that this run began with (SHA-256 {before[path][:12]} "
                f"then, {digest[:12]} now); put that one back, or start a new run"
            )


def load_plugins(paths: tuple[str, ...]) -> None:
    """Run Python files that register recipes."""
    import importlib.util

    for path in paths:
        spec = importlib.util.spec_from_file_location("aqg_plugin", path)
        if spec is None or spec.loader is None:
            raise ConfigError(f"plugin {path!r} is not a Python file")
        try:
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"plugin {path!r} cannot be loaded: {error}") from error


def read_settings(path: Path) -> dict[str, Any]:
    """Read settings from a TOML file."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"config file {str(path)!r} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {str(path)!r} is not valid TOML: {error}") from None


def parse_assignment(text: str) -> tuple[str, Any]:
    """Parse ``key=value`` with the value in TOML notation, or as a bare word.

    >>> parse_assignment("alpha=0.1"), parse_assignment("model=mlp:200")
    (('alpha', 0.1), ('model', 'mlp:200'))
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"{text!r} is not of the form key=value")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    return key.strip(), parsed


def to_toml(configs: tuple[RunConfig, ...]) -> str:
    """Write configs that differ only in the recipe as one TOML text that `resolve` reads back."""
    settings = {k: v for k, v in asdict(configs[0]).items() if v is not None and v != ()}
    if len(configs) > 1:
        settings["recipe"] = [config.recipe for config in configs]
    # Texts, numbers and lists of them are written alike in JSON and TOML.
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
