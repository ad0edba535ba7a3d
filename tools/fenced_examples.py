"""Extension of the API reference: examples in docstrings become fenced blocks."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_EXAMPLE = re.compile(r"^(?P<indent> *)>>> .*(?:\n(?! *$).+)*", re.MULTILINE)


class FencedExamples(Extension):
    """Fence every doctest, up to the blank line after it."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(_fence, obj.docstring.value)


def _fence(match: re.Match[str]) -> str:
    return f"\n{match['indent']}```pycon\n{match[0]}\n{match['indent']}```\n"
