"""Problems that a function in the user's own file makes: ``--problem FILE.py:FUNCTION``.

The function returns a `Problem`; torch's layers draw their parameters from the seed. It may ask, by
the names of its parameters, for ``seed``, ``data_dir`` (a path) and ``dtype`` ("float32" or
"float64"). The file may hold a dict ``SETTINGS`` of defaults for its runs, such as
``{"rounds": 200, "batch_size": 16}``.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from aqg.data import data_directory
from aqg.data.files import Facts, peek
from aqg.errors import ConfigError
from aqg.sim.problem import Problem
from aqg.spec import Code, file_digest, load_file, seeded

_NOT_DEFAULTS = frozenset(
    ("problem", "dataset", "partition", "model", "l2", "scaling", "files", "init", "plugins")
)


def file_facts(dataset: str) -> Facts:
    """Return what the defaults of a run on ``FILE.npz`` depend on."""
    return _peek(dataset, file_digest(Path(dataset)))


@functools.lru_cache(maxsize=8)
def _peek(dataset: str, digest: str) -> Facts:  # noqa: ARG001  (tells versions apart)
    return peek(Path(dataset))


def problem_settings(spec: str) -> dict[str, Any]:
    """Return the defaults that a problem's file brings."""
    code = _parse(spec)
    settings = getattr(load_file(code.path), "SETTINGS", {})
    if not isinstance(settings, dict):
        raise ConfigError(f"SETTINGS in {str(code.path)!r} is {settings!r}; it must be a dict")
    for name in settings:
        if name in _NOT_DEFAULTS:
            raise ConfigError(
                f"SETTINGS in {str(code.path)!r} holds {name!r}, which cannot be set there"
            )
    return settings


def problem_facts(spec: str, dtype: str, data_dir: Path | None) -> Facts:
    """Return what the defaults of a run depend on."""
    problem = make_own_problem(spec, 0, dtype, data_dir)
    num_samples = sum(len(client.labels) for client in problem.clients)
    return Facts(num_samples, problem.num_clients, has_classes=False)


def make_own_problem(spec: str, seed: int, dtype: str, data_dir: Path | None) -> Problem:
    """Call the function and check what it made; the last problem is kept."""
    code = _parse(spec)
    digest = file_digest(code.path)
    return _make(code, digest, seed, dtype, data_directory(data_dir))


@functools.lru_cache(maxsize=1)
def _make(code: Code, digest: str, seed: int, dtype: str, data_dir: Path) -> Problem:  # noqa: ARG001
    with seeded(seed):
        problem = code.call(seed=seed, data_dir=data_dir, dtype=dtype)
    if not isinstance(problem, Problem):
        raise ConfigError(
            f"{code} returned {type(problem).__name__}; it must return an aqg.sim.problem.Problem"
        )
    if not problem.clients:
        raise ConfigError(f"{code} returned a problem with 0 clients; at least 1 is needed")
    if str(problem.dtype) != dtype:
        raise ConfigError(
            f"{code} returned a problem in {problem.dtype}, and dtype is {dtype}; set dtype to "
            f"{problem.dtype}, or let the function take dtype and use it"
        )
    return problem


def _parse(spec: str) -> Code:
    code = Code.parse(spec)
    if code is None:
        raise ConfigError(f"problem is {spec!r}; it must be FILE.py:FUNCTION")
    return code
