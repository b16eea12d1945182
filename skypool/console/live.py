"""The live console: the view of a pool on the terminal, with warnings and functions' output above it."""

from __future__ import annotations

from collections.abc import Callable

from skypool import events
from skypool.console.board import Board
from skypool.console.plain import Plain
from skypool.console.printer import Printer
from skypool.console.screen import show
from skypool.console.words import Words


class Live(Plain):
    """Plain lines for what a view cannot show, and the view."""

    def __init__(self, show: Callable[[Board], Callable[[float | None], None]] = show) -> None:
        super().__init__(words=Words(routine=False), printer=Printer(states=False))
        self._board = Board()
        self._hide = show(self._board)

    def hear(self, e: events.Event) -> None:
        """Show one event; from any thread."""
        self._board.hear(e)
        super().hear(e)

    def end(self, timeout: float | None = None) -> None:
        """Show what is left, end the view and give the terminal back."""
        try:
            super().end(timeout)
        finally:
            self._hide(timeout)
