"""Terminal output of a pool: what functions print, and skypool's own lines or live view about the pool.

    python script.py > out.txt      # out.txt has what functions print on stdout; skypool's own lines go to stderr

A pool is a set of rented machines, its nodes, on which functions run. The library rich is loaded only when a live view
is drawn, because that takes time. Everything else needs only the standard library.

- `plain`: lines for files, pipes and CI; `live`: the live view for terminals.
- `event_text`: turns events into lines of text; `board`: turns events into the state that a live view shows.
- `layout`: layout of the live view; `gauges`: its small bars of what nodes measure.
- `live_screen`: draws the view on the terminal, in a thread of its own.
- `printer`: prints functions' output, marked with the node; `whole_lines`: cuts streams of text into whole lines.
- `outlet`: writes to the user's stdout and stderr without blocking the caller for long.

Words of this package:

- device: an accelerator. Slot: a place on a node where one call runs at a time. A CPU slot has no device.
- mark: the text before each printed line that says where it comes from, such as "[0.1]" for slot 1 of node 0.
- gang: one call that runs as several processes, its ranks. Service: a long-running process on a node.
- unfinished line: text that has no newline yet, such as a progress bar.
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
        stream: the events of the pool.
        mode: "live" shows a view that is redrawn, "plain" shows lines, "off" shows only what functions print. "auto" is
            "live" on a terminal outside of CI jobs, otherwise "plain". "live" becomes "plain" if stderr cannot be
            redrawn.
        figures: returns the costs and measurements of the pool. Called only for a live view, in the thread that draws.
            None: the view shows no costs and measurements.
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
