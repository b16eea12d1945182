"""Terminal output of a pool: what functions print, and skypool's own lines or live view about the pool.

    python script.py > out.txt      # out.txt has what functions print on stdout; skypool's own lines go to stderr

A pool is a set of rented machines, its nodes, on which functions run. The library rich is loaded only when a live view
is drawn, because that takes time. Everything else needs only the standard library.

- `plain`: lines for files, pipes and CI; `live`: the live view for terminals.
- `words`: turns events into lines of text; `board`: turns events into the state that a live view shows.
- `view`: layout of the live view; `gauges`: its small bars of what nodes measure.
- `screen`: draws the view on the terminal, in a thread of its own.
- `printer`: prints functions' output, marked with the node; `lines`: cuts streams of text into whole lines.
- `outlet`: writes to the user's stdout and stderr without blocking the caller for long.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, TextIO

from skypool import events
from skypool.console.plain import OutputOnly, Plain

if TYPE_CHECKING:
    from skypool.console.board import Figures

__all__ = ["Mode", "attach", "drawable"]

Mode = Literal["auto", "live", "plain", "off"]


def attach(stream: events.EventStream, mode: Mode, figures: Callable[[], Figures] | None = None) -> Callable[[], None]:
    """Start to show a pool's events on stdout and stderr. Return a function that stops showing them.

    The returned function shows what has not been shown yet, and blocks until all of it is written.

    Args:
        stream: the pool's events.
        mode: "live" shows a view that is redrawn, "plain" shows lines. "off" shows only what functions print. "auto" is
            "live" if stderr is a terminal that can be redrawn and no CI job runs, otherwise "plain". "live" becomes
            "plain" if stderr is not such a terminal.
        figures: function that returns the costs and measurements of the pool. Only a live view calls it, in the thread
            that draws. Default None: the view shows none.
    """
    if mode == "off":
        return OutputOnly().follow(stream)
    if mode == "plain" or not drawable(sys.stderr, os.environ, asked=mode == "live"):
        return Plain().follow(stream)
    from skypool.console.live import Live

    return Live(figures=figures).follow(stream)


def drawable(file: TextIO | None, environ: Mapping[str, str], *, asked: bool = False) -> bool:
    """Return True if a view can be redrawn on `file`: a terminal with a movable cursor, and not the log of a CI job.

    Returns False for None and for a closed file.

    Args:
        file: the file to draw on, or None.
        environ: environment variables; TERM and CI are read. The result is False if TERM is missing, empty, "dumb" or
            "unknown".
        asked: True if the user asked for the view. Then a CI job's terminal is accepted, too.
    """
    try:
        terminal = file is not None and file.isatty()
    except ValueError:  # the file is closed
        return False
    if not terminal or environ.get("TERM", "dumb") in ("dumb", "unknown", ""):
        return False
    return asked or environ.get("CI", "").lower() in ("", "0", "false")
