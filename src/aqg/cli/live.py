"""What commands with many runs share: a display that moves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from types import TracebackType

    from rich.console import Console


class Moving(Protocol):
    """A live display of rich's."""

    def start(self) -> None:
        """Begin to draw."""

    def stop(self) -> None:
        """Leave the last picture on the screen."""


class LiveDisplay:
    """A context manager that draws on a terminal, and nowhere else."""

    def __init__(self, console: Console, moving: Moving) -> None:
        self._console = console
        self._moving = moving

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._moving.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._moving.stop()

    def _say(self, text: str) -> None:
        """Print a line above the display, as it is."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
