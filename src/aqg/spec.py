"""What settings name: ``name:key=value:…``, and functions in files, ``FILE.py:FUNCTION:key=value``.

Recipes, downlinks, steps, optimizers, partitions and models are all named so, and read here. What
an option is called, what it holds and whether it can be left out is taken from the function (or the
class) that takes it, so that it is written once. A value without a key stands for the next option
that has no default, as in ``dirichlet:0.3``; a word alone switches on what can be on or off, as in
``source:shuffled``.

A Python file named on the command line is run. One that is named only in another file (a config, a
grid, a run directory that somebody sent) is refused by the commands unless the user allows it.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from aqg.errors import AqgError, ConfigError

_CODE = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_]\w*)(?P<options>(?::\w+=[^:]*)*)")
_KINDS = {int: "a whole number", float: "a number", bool: "true or false"}


def make_named(
    kind: str,
    spec: str,
    makers: Mapping[str, Callable[..., Any]],
    *given: Any,
    also: Sequence[str] = (),
) -> Any:
    """Make what a spec names.

    ``makers`` are, by name, what takes the options after the ``given`` arguments; ``kind`` and
    ``also``, further names that the setting can have, are for messages.
    """
    name, *items = spec.split(":")
    if name not in makers:
        raise ConfigError(f"unknown {kind} {name!r}; choose from {', '.join((*also, *makers))}")
    maker, taken = makers[name], dict(list(_parameters(makers[name]).items())[len(given) :])
    needed = [key for key, p in taken.items() if p.default is p.empty]
    options: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not equals and key in taken and _type(taken[key]) is bool:
            text = "true"
        elif not equals and needed and key:
            key, text = needed[0], item
        if key not in taken:
            known = ", ".join(taken) or "none"
            raise ConfigError(f"{kind} {name!r} has no option {key!r}; it has: {known}")
        if key in options:
            raise ConfigError(f"option {key} of {kind} {name!r} is given twice in {spec!r}")
        options[key] = _read(text, _type(taken[key]), f"option {key} of {kind} {name!r}")
        needed = [other for other in needed if other != key]
    if needed:
        raise ConfigError(f"{kind} {spec!r} needs a value, as in {name}:{needed[0].upper()}")
    return maker(*given, **options)


def defaults(maker: Callable[..., Any]) -> dict[str, Any]:
    """Return the options that can be left out, with their values then."""
    return {key: p.default for key, p in _parameters(maker).items() if p.default is not p.empty}


@functools.cache
def _parameters(maker: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(maker).parameters


def _type(parameter: inspect.Parameter) -> type:
    """Return what a parameter says it is; without a word about it, what its default is."""
    for kind in (int, float, bool, str):
        if parameter.annotation in (kind, kind.__name__):
            return kind
    return float if parameter.default is parameter.empty else type(parameter.default)


def _read(text: str, wanted: type, what: str) -> Any:
    if wanted is str:
        return text
    if wanted is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        number = float(text)
        if wanted is float:
            return number
        if wanted is int and math.isfinite(number) and number == int(number):
            return int(number)
    except ValueError:
        pass
    raise ConfigError(f"{what} is {text!r}; it must be {_KINDS[wanted]}")


@dataclass(frozen=True)
class Code:
    """A function in a file, and options for it.

    The function is given what its parameters ask for by name, out of what the caller offers.
    """

    path: Path
    function: str
    options: tuple[tuple[str, Any], ...] = ()

    @staticmethod
    def parse(text: str) -> Code | None:
        """Read ``FILE.py:FUNCTION[:KEY=VALUE...]``; None where the text is nothing like it.

        A value is a number, a truth value or a text.
        """
        if ".py:" not in text and not text.endswith(".py"):
            return None
        found = _CODE.fullmatch(text)
        if found is None:
            raise ConfigError(
                f"{text!r} does not name a function in a file; write FILE.py:FUNCTION, "
                "or FILE.py:FUNCTION:KEY=VALUE with options"
            )
        pairs = (item.split("=", 1) for item in found["options"].split(":")[1:])
        options = {key: _literal(value) for key, value in pairs}
        return Code(Path(found["file"]), found["name"], tuple(options.items()))

    @staticmethod
    def required(setting: str, text: str) -> Code:
        code = Code.parse(text)
        if code is None:
            raise ConfigError(f"{setting} is {text!r}; it must be FILE.py:FUNCTION")
        return code

    def __str__(self) -> str:
        options = "".join(f":{key}={value}" for key, value in self.options)
        return f"{self.path}:{self.function}{options}"

    @property
    def short(self) -> str:
        return str(replace(self, path=Path(self.path.name)))

    def located(self) -> Code:
        return replace(self, path=self.path.expanduser().resolve())

    def call(self, **offered: Any) -> Any:
        """Call the function with its options and those of the arguments offered that it takes."""
        function = getattr(load_file(self.path), self.function, None)
        if not callable(function):
            raise ConfigError(f"{str(self.path)!r} has no function {self.function!r}")
        options = dict(self.options)
        place = f"{self.function}() in {str(self.path)!r}"
        parameters = inspect.signature(function).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        for key in options:
            if key not in parameters and not takes_all:
                taken = ", ".join(name for name in parameters if name not in offered) or "none"
                raise ConfigError(f"{place} has no option {key!r}; it has: {taken}")
        arguments = {key: value for key, value in offered.items() if takes_all or key in parameters}
        arguments |= options
        for name, p in parameters.items():
            is_needed = p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
            if p.kind is p.POSITIONAL_ONLY or (is_needed and name not in arguments):
                raise ConfigError(
                    f"{place} needs an argument {name!r}; what it can ask for by name is "
                    f"{', '.join(offered)}, or give it as an option: {self}:{name}=VALUE"
                )
        try:
            return function(**arguments)
        except AqgError:
            raise
        except Exception as error:
            raise ConfigError(f"{place} failed: {in_words(error)}") from error


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Let torch draw from a seed, its own generator untouched; without torch, do nothing."""
    try:
        import torch
    except ImportError:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def load_file(path: Path) -> ModuleType:
    """Run a Python file, once for each content it has; its own folder can be imported from."""
    return _load(path.expanduser().resolve(), file_digest(path))


@functools.cache
def _load(path: Path, digest: str) -> ModuleType:
    name = f"aqg_file_{path.stem}_{digest[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{str(path)!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    sys.modules[name] = module  # dataclasses look their module up there
    try:  # from its text: compiled files tell versions of one second and one length not apart
        exec(compile(path.read_bytes(), path, "exec", dont_inherit=True), module.__dict__)
    except Exception as error:
        del sys.modules[name]
        if isinstance(error, AqgError):
            raise
        raise ConfigError(f"{str(path)!r} cannot be run: {in_words(error)}") from error
    return module


def in_words(error: Exception) -> str:
    """Return an error's type and text in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def file_digest(path: Path) -> str:
    try:
        status = path.expanduser().stat()
        return _digest(path.expanduser().resolve(), status.st_mtime_ns, status.st_size)
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror}") from None


@functools.lru_cache(maxsize=64)
def _digest(path: Path, modified: int, size: int) -> str:  # noqa: ARG001  (they tell versions apart)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
