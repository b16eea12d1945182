"""`attach`: shows the events of a pool, and decides whether as a live view, as lines, or only what functions print."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, TextIO

from skypool import events
from skypool.console.plain import OutputOnly, Plain

if TYPE_CHECKING:
    from skypool.console.board import Figures

Mode = Literal["auto", "live", "plain", "off", "silent"]


def attach(stream: events.EventStream, mode: Mode, figures: Callable[[], Figures] | None = None) -> Callable[[], None]:
    """Start to show a pool's events on stdout and stderr. Return a function that stops showing them.

    The returned function shows what has not been shown yet, and blocks until all of it is written.

    Args:
        stream: the events of the pool.
        mode: "live" shows a view that is redrawn, "plain" shows lines, "off" shows only what functions print, "silent"
            nothing. "auto" is "live" on a terminal outside of CI jobs, otherwise "plain". "live" becomes "plain" if
            stderr cannot be redrawn.
        figures: returns the costs and measurements of the pool. Called only for a live view, in the thread that draws.
            None: the view shows no costs and measurements.
    """
    if mode == "silent":
        return lambda: None
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
        environ: environment variables. The result is False if TERM is missing, empty, "dumb" or "unknown".
        asked: True accepts a CI job's terminal, because the user asked for the view.
    """
    try:
        terminal = file is not None and file.isatty()
    except ValueError:  # the file is closed
        return False
    if not terminal or environ.get("TERM", "dumb") in ("dumb", "unknown", ""):
        return False
    return asked or environ.get("CI", "").lower() in ("", "0", "false")
