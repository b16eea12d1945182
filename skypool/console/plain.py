"""The plain console: prints functions' output, and a line with the time of day for each event of the pool."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable

from skypool import events
from skypool.console.event_text import Words
from skypool.console.nonblocking_writer import PATIENCE
from skypool.console.printer import Printer


class Plain:
    """Console that shows the events of one pool in files, pipes, notebooks and CI, where nothing can be redrawn.

    Args:
        words: makes the lines. Default: all events are described.
        printer: prints functions' output. Default: states of progress bars are printed, too.
    """

    def __init__(self, *, words: Words | None = None, printer: Printer | None = None) -> None:
        self._words = words or Words()
        self._printer = printer or Printer()
        self._unlisten: Callable[[], None] | None = None

    def follow(self, stream: events.EventStream) -> Callable[[], None]:
        """Start to show a stream's events. Return the method `end`, which is also called when the interpreter exits."""
        self._unlisten = stream.follow(self.hear)
        atexit.register(self._end_at_exit)
        return self.end

    def hear(self, e: events.Event) -> None:
        """Show one event: functions' output as it is, other events as lines on stderr. Any thread may call this."""
        self._printer.hear(e)
        if not isinstance(e, events.Output):
            self._say(self._words.tell(e))

    def end(self, timeout: float | None = None) -> None:
        """Show what has not been shown yet, and block until all of it is written. Later events are not shown.

        `timeout` is the maximum seconds to wait for stdout, and then for stderr; None for no limit. A second call does
        nothing.
        """
        unlisten = self._unlisten
        self._unlisten = None
        if unlisten is None:
            return
        unlisten()
        atexit.unregister(self._end_at_exit)
        self._say(self._words.close(time.time()))
        self._printer.close(timeout)

    def _end_at_exit(self) -> None:
        """End the console, but wait only a second for stdout and for stderr: machines may still have to be ended."""
        self.end(PATIENCE)

    def _say(self, lines: list[str]) -> None:
        if lines:
            self._printer.stderr.write("".join(lines))


class OutputOnly(Plain):
    """Console that is off: it shows what functions print, and no lines of skypool's own."""

    def _say(self, lines: list[str]) -> None:
        """Show no lines of skypool's own."""
