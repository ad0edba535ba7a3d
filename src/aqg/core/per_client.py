"""A sequence with an entry per client that is replaced one at a time, and never copied whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")

_FANOUT = 32


class PerClient(Generic[Value]):
    """An immutable sequence, all of whose entries are alike at first.

    `replaced` shares everything but a path of a tree with the old sequence: its cost does not
    depend on the length but for a logarithm, and entries that were never replaced take no memory.

    >>> empty = PerClient(1_000_000, "nothing")
    >>> one = empty.replaced(999_999, "something")
    >>> one[999_999], one[0], empty[999_999]
    ('something', 'nothing', 'nothing')
    """

    __slots__ = ("_depth", "_initial", "_length", "_root")

    def __init__(self, length: int, initial: Value) -> None:
        self._length = length
        self._initial = initial
        self._depth = 1
        while _FANOUT**self._depth < length:
            self._depth += 1
        self._root: Any = None

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Value:
        node = self._root
        for level in range(self._depth - 1, -1, -1):
            if node is None:
                return self._initial
            node = node[index // _FANOUT**level % _FANOUT]
        return self._initial if node is None else node[0]

    def __iter__(self) -> Iterator[Value]:
        return (self[index] for index in range(self._length))

    def replaced(self, index: int, value: Value) -> PerClient[Value]:
        """Return the sequence with another entry at one place."""
        if not 0 <= index < self._length:
            raise IndexError(index)
        changed: PerClient[Value] = PerClient.__new__(PerClient)
        changed._length, changed._initial = self._length, self._initial
        changed._depth = self._depth
        changed._root = _replace(self._root, self._depth, index, (value,))
        return changed


def _replace(node: Any, depth: int, index: int, leaf: tuple[Any]) -> Any:
    """Return the tree with another leaf, a tuple of one so that any value can stand in it."""
    if depth == 0:
        return leaf
    children = [None] * _FANOUT if node is None else list(node)
    place = index // _FANOUT ** (depth - 1) % _FANOUT
    children[place] = _replace(children[place], depth - 1, index, leaf)
    return tuple(children)
