"""How tables name recipes."""

from __future__ import annotations

from aqg.core.field import FROM_MEMORY

MARK = "‡"
FOOTNOTE = f"{MARK}: implemented from memory, not checked against its paper's text."


def label(recipe: str) -> str:
    """Return a recipe's name, marked where it was not checked against its paper.

    >>> label("stc"), label("aquila:beta=1")
    ('stc', 'aquila:beta=1‡')
    """
    return recipe + (MARK if recipe.partition(":")[0] in FROM_MEMORY else "")
