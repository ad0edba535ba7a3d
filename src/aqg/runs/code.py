"""Functions from the user's own Python files, named ``FILE.py:FUNCTION``.

Options may follow, as in ``FILE.py:FUNCTION:width=64:norm=batch``; they become keyword arguments.
A function is given what its parameters ask for by name, out of what the caller offers.

A file named on the command line is run. One that is named only in another file (a config, a grid,
a run directory that somebody sent) is refused by the commands unless the user allows it.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import inspect
import re
import sys
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aqg.errors import AqgError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

_FORM = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_]\w*)(?P<options>(?::\w+=[^:]*)*)")


@dataclass(frozen=True)
class Code:
    """A function in a file, and options for it."""

    path: Path
    function: str
    options: tuple[tuple[str, Any], ...] = ()

    @staticmethod
    def parse(text: str) -> Code | None:
        """Read ``FILE.py:FUNCTION[:KEY=VALUE...]``; None where the text is nothing like it.

        >>> Code.parse("models.py:make:width=64").options
        (('width', 64),)
        >>> Code.parse("mlp:200") is None
        True
        """
        if ".py:" not in text and not text.endswith(".py"):
            return None
        found = _FORM.fullmatch(text)
        if found is None:
            raise ConfigError(
                f"{text!r} does not name a function in a file; write FILE.py:FUNCTION, "
                "or FILE.py:FUNCTION:KEY=VALUE with options"
            )
        options = parse_options(found["options"])
        return Code(Path(found["file"]), found["name"], tuple(options.items()))

    def __str__(self) -> str:
        options = "".join(f":{key}={value}" for key, value in self.options)
        return f"{self.path}:{self.function}{options}"

    @property
    def short(self) -> str:
        """The name without the folder, for titles."""
        return str(replace(self, path=Path(self.path.name)))

    def located(self) -> Code:
        """Return the same with an absolute path."""
        return replace(self, path=self.path.expanduser().resolve())

    def load(self) -> Callable[..., Any]:
        """Run the file and return the function."""
        function = getattr(load_file(self.path), self.function, None)
        if not callable(function):
            raise ConfigError(f"{str(self.path)!r} has no function {self.function!r}")
        return function  # type: ignore[no-any-return]

    def call(self, **offered: Any) -> Any:
        """Call the function with its options and those of the arguments offered that it takes."""
        function = self.load()
        options = dict(self.options)
        parameters = inspect.signature(function).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        for key in options:
            if key not in parameters and not takes_all:
                taken = ", ".join(name for name in parameters if name not in offered) or "none"
                raise ConfigError(f"{self._place} has no option {key!r}; it has: {taken}")
        arguments = {key: value for key, value in offered.items() if takes_all or key in parameters}
        arguments |= options
        for name, parameter in parameters.items():
            needed = parameter.default is parameter.empty and parameter.kind not in (
                parameter.VAR_POSITIONAL,
                parameter.VAR_KEYWORD,
            )
            if parameter.kind is parameter.POSITIONAL_ONLY or (needed and name not in arguments):
                raise ConfigError(
                    f"{self._place} needs an argument {name!r}; what it can ask for by name is "
                    f"{', '.join(offered)}, or give it as an option: {self}:{name}=VALUE"
                )
        try:
            return function(**arguments)
        except AqgError:
            raise
        except Exception as error:
            raise ConfigError(f"{self._place} failed: {_in_words(error)}") from error

    @property
    def _place(self) -> str:
        return f"{self.function}() in {str(self.path)!r}"


def parse_options(text: str) -> dict[str, Any]:
    """Read ``:key=value:key=value``; a value is a number, a truth value or a text.

    >>> parse_options(":width=64:norm=batch")
    {'width': 64, 'norm': 'batch'}
    """
    options: dict[str, Any] = {}
    for item in text.split(":")[1:]:
        key, equals, value = item.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigError(f"option {item!r} is not of the form key=value")
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = value
    return options


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Let torch's layers draw from a seed; its own generator goes on as if nothing had been drawn.

    Where torch is not installed, do nothing.
    """
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
    try:
        spec.loader.exec_module(module)
    except AqgError:
        del sys.modules[name]
        raise
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"{str(path)!r} cannot be run: {_in_words(error)}") from error
    return module


def _in_words(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hex."""
    try:
        status = path.expanduser().stat()
        return _digest(path.expanduser().resolve(), status.st_mtime_ns, status.st_size)
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror}") from None


@functools.lru_cache(maxsize=64)
def _digest(path: Path, modified: int, size: int) -> str:  # noqa: ARG001  (they tell versions apart)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
