"""For all tests, and for the examples in ``src``, ``docs`` and ``README.md``."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from aqg.core.recipes import RECIPES

if TYPE_CHECKING:
    from collections.abc import Iterator

collect_ignore = []
if find_spec("nvflare") is None:  # it has an environment of its own
    collect_ignore += ["src/aqg/flare.py"]


@pytest.fixture(autouse=True)
def _same_recipes_for_everyone() -> Iterator[None]:
    """Forget the recipes that a test or an example registers: others list all there are."""
    before = dict(RECIPES)
    yield
    RECIPES.clear()
    RECIPES.update(before)
