"""The live console: the view of a pool on the terminal, with warnings and functions' output above it."""

from __future__ import annotations

from collections.abc import Callable

from skypool import events
from skypool.console.board import Board, Figures
from skypool.console.plain import Plain
from skypool.console.printer import Printer
from skypool.console.screen import show
from skypool.console.words import Words


class Live(Plain):
    """Console for terminals: a live view of the pool, and plain lines above it for what the view cannot show.

    Args:
        show: function that starts to draw a board (the state of a pool), and returns a second function. The second
            function removes the board again. Its argument is the maximum seconds to wait; None for no limit. The
            default draws on stderr.
        figures: function that returns the costs and measurements of the pool. Default None: the view shows none.
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

        If no other pool is in the view, the view ends and the terminal is restored. This is done even if an error is
        raised before.

        Args:
            timeout: maximum seconds to wait for a slow terminal. The time counts anew for stdout, for stderr and for
                the view. Default None: no limit.
        """
        try:
            super().end(timeout)
        finally:
            self._hide(timeout)
