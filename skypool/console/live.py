"""The live console: the view of a pool on the terminal, with warnings and functions' output above it."""

from __future__ import annotations

from collections.abc import Callable

from skypool import events
from skypool.console.board import Board, Figures
from skypool.console.event_text import Words
from skypool.console.live_screen import show
from skypool.console.plain import Plain
from skypool.console.printer import Printer


class Live(Plain):
    """Console for terminals: a live view of the pool, and plain lines above it for what the view cannot show.

    Args:
        show: starts to draw a board, and returns a function that removes it. That function takes the maximum seconds to
            wait; None for no limit. The default draws on stderr.
        figures: returns costs and measurements of the pool. None: the view shows no costs and measurements.
    """

    def __init__(
        self,
        show: Callable[[Board], Callable[[float | None], None]] = show,
        figures: Callable[[], Figures] | None = None,
    ) -> None:
        super().__init__(words=Words(routine=False), printer=Printer(states=False))
        self._board = Board(figures)
        self._hide = show(self._board)

    def hear(self, e: events.Event) -> None:
        """Show one event in the view, or as a line above it. Any thread may call this."""
        self._board.hear(e)
        super().hear(e)

    def end(self, timeout: float | None = None) -> None:
        """Show what has not been shown yet, and remove the pool from the view. Blocks until that is done.

        If no other pool is in the view, the terminal is restored, even if text could not be written. `timeout` is the
        maximum seconds to wait for each of stdout, stderr and the view; None for no limit.
        """
        try:
            super().end(timeout)
        finally:
            self._hide(timeout)
