"""Draws live views on the terminal, in a thread of its own. Other output is printed above the view.

Threads that print only queue their text, and do not wait for the terminal. The view is drawn at most 8 times a second.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from skypool.console.board import Board
from skypool.console.nonblocking_writer import Above, Backlog

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

_PAUSE = 0.125
"""Minimum seconds between two drawings of the view."""
_AT_LEAST_EVERY = 1.0
"""Seconds after which the view is drawn again although nothing has happened, because the view shows durations."""
_DUTY = 20
"""The pause after a drawing is this many times as long as the drawing took. So drawing costs little time.

But it is at least `_PAUSE` and at most `_AT_LEAST_EVERY` seconds.
"""


class Screen:
    """View of several pools on one terminal. While it is drawn, it replaces `sys.stdout`, `sys.stderr` and `input()`.

    Once the last pool has been removed, the view ends for good. `file` is the terminal. `make` is called with it in the
    drawing thread, and returns rich's `Console` for it.
    """

    def __init__(self, file: TextIO, make: Callable[[TextIO], Console] | None = None) -> None:
        self._file = file
        self._make = make or _console
        self._boards: list[Board] = []
        self._backlog = Backlog()
        self._aboves: list[tuple[str, Above, TextIO]] = []
        self._done = threading.Event()
        self._asking = threading.Event()
        self._hidden = threading.Event()
        self._ask = builtins.input
        self._thread = threading.Thread(target=self._run, name="skypool-view", daemon=True)

    def add(self, board: Board) -> None:
        """Add a pool to the view, below the others. The first pool starts the thread that draws. Does not block."""
        self._boards = [*self._boards, board]
        if self._thread.ident is None:
            self._thread.start()

    def remove(self, board: Board) -> bool:
        """Remove a pool. Return True if none is left, so that the view ends. Does not wait for the end."""
        self._boards = [each for each in self._boards if each is not board]
        if not self._boards:
            self._done.set()
        return not self._boards

    def wait(self, timeout: float | None) -> None:
        """Wait until the view has ended and the terminal is restored, at most `timeout` seconds; None for no limit."""
        self._thread.join(timeout)

    # --- the thread that draws ------------------------------------------------------------------------------

    def _run(self) -> None:
        from rich.live import Live

        console = self._make(self._file)
        if self._done.is_set():
            return
        with contextlib.suppress(OSError, ValueError):  # the terminal is gone
            try:
                self._stand_in()
                while not self._done.is_set():
                    live = Live(
                        console=console,
                        auto_refresh=False,
                        transient=True,
                        redirect_stdout=False,
                        redirect_stderr=False,
                    )
                    live.start()
                    try:
                        self._draw_until_done(live)
                    finally:
                        begun = self._begun() if self._asking.is_set() else self._give_back()
                        _print_above(live, self._backlog.take())
                        live.stop()
                        self._file.write(begun)
                        self._file.flush()
                    self._let_ask()
            finally:
                self._hidden.set()
                self._file.write(self._give_back())
                self._file.flush()

    def _let_ask(self) -> None:
        """Wait until `input()` no longer uses the terminal, or until the view is to end."""
        self._hidden.set()
        while self._asking.is_set() and not self._done.wait(_PAUSE):
            pass
        self._hidden.clear()

    def _begun(self) -> str:
        """Return the unfinished lines of stdout and stderr, to write them before the prompt, and forget them."""
        return "".join(above.take_unfinished() for _, above, _ in self._aboves)

    def _input(self, prompt: object = "", /) -> str:
        """Replace `input()`. In the main thread, hide the view meanwhile: it would overwrite prompt and answer."""
        if threading.current_thread() is not threading.main_thread():
            return self._ask(prompt)
        self._asking.set()
        try:
            while self._thread.is_alive() and not self._hidden.wait(_PAUSE):
                pass
            return self._ask(prompt)
        finally:
            self._asking.clear()

    def _draw_until_done(self, live: Live) -> None:
        drawn = 0.0
        changes = -1
        pause = 0.0
        while not self._done.wait(pause) and not self._asking.is_set():
            began = time.monotonic()
            pause = _PAUSE
            text = self._backlog.take()
            seen = sum(board.changes for board in self._boards)
            if not text and seen == changes and began - drawn < _AT_LEAST_EVERY:
                continue
            self._draw(live, text)
            drawn = time.monotonic()
            changes = seen
            pause = min(_AT_LEAST_EVERY, max(_PAUSE, _DUTY * (drawn - began)))

    def _draw(self, live: Live, text: str) -> None:
        from skypool.console.layout import draw

        pictures = [board.picture() for board in self._boards]
        unfinished = [line for _, above, _ in self._aboves if (line := above.unfinished)]
        with live.console:  # one write for both
            _print_above(live, text)
            size = live.console.size
            live.update(draw(pictures, time.time(), size.height, unfinished, size.width), refresh=True)

    # --- sys.stdout and sys.stderr --------------------------------------------------------------------------

    def _stand_in(self) -> None:
        for name in ("stdout", "stderr"):
            file = getattr(sys, name)
            if file is not None and not isinstance(file, Above) and file.isatty():
                above = Above(file, self._backlog)
                self._aboves.append((name, above, file))
                setattr(sys, name, above)
        self._ask = builtins.input
        builtins.input = self._input

    def _give_back(self) -> str:
        """Restore stdout, stderr and `input()`, unless other code has replaced them. Return the unfinished lines."""
        begun = ""
        self._give_back_input()
        for name, above, file in self._aboves:
            begun += above.end()
            if getattr(sys, name) is above:
                setattr(sys, name, file)
        return begun

    def _give_back_input(self) -> None:
        if builtins.input == self._input:
            builtins.input = self._ask

    def forget(self) -> None:
        """Restore stdout, stderr and `input()` in a forked child process, without writing to the terminal."""
        self._give_back_input()
        for name, above, file in self._aboves:
            above.forget()
            if getattr(sys, name) is above:
                setattr(sys, name, file)


def _console(file: TextIO) -> Console:
    from rich.console import Console

    return Console(file=file, highlight=False)


def _print_above(live: Live, text: str) -> None:
    """Print text above the view unchanged: not wrapped, not cut, in its own colours."""
    if text:
        from rich.segment import Segment, Segments

        live.console.print(Segments([Segment(text)]), end="", crop=False)


# --- the one screen of this process -------------------------------------------------------------------------

_lock = threading.RLock()
_current: Screen | None = None


def show(board: Board) -> Callable[[float | None], None]:
    """Show a pool on stderr, below the others that are shown. Return a function that removes it again.

    A thread draws the view. If the returned function removes the last pool, it waits until the view has ended. Its
    argument is the maximum seconds to wait, or None for no limit.
    """
    global _current
    with _lock:
        if _current is None:
            _current = Screen(sys.stderr)
        screen = _current
        screen.add(board)
    return lambda timeout: _hide(screen, board, timeout)


def _hide(screen: Screen, board: Board, timeout: float | None) -> None:
    global _current
    with _lock:
        if screen.remove(board):
            _current = None if _current is screen else _current
            screen.wait(timeout)


def _forget() -> None:
    """Reset this module in a forked child process, which has no drawing thread."""
    global _current, _lock
    screen = _current
    _current = None
    _lock = threading.RLock()
    if screen is not None:
        screen.forget()


os.register_at_fork(after_in_child=_forget)
