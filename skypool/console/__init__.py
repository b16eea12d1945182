"""Terminal output: functions' output, and skypool's own lines or live view about the pool.

    python script.py > out.txt      # what functions print on stdout is in out.txt, and nothing else of ours

Until a live view is drawn, nothing here needs more than the standard library: loading rich takes as long as
starting a node.

- `plain`: lines for files, pipes and CI; `live`: the live view for terminals.
- `words`: turns events into lines of text; `board`: turns them into the state that a live view shows.
- `view`: layout of the live view; `screen`: draws it on the terminal, in a thread of its own.
- `printer`: prints functions' output, marked with its node; `lines`: cuts streams of text into whole lines.
- `outlet`: writes to the user's stdout and stderr without ever blocking the caller.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Literal, TextIO

from skypool import events
from skypool.console.plain import OutputOnly, Plain

__all__ = ["Mode", "attach", "drawable"]

Mode = Literal["auto", "live", "plain", "off"]


def attach(stream: events.EventStream, mode: Mode) -> Callable[[], None]:
    """Show a pool's events until the function that is returned is called.

    Args:
        mode: "live" is a view that is redrawn, "plain" is lines. "off" shows what functions print and nothing else.
            "auto" is live where stderr is a terminal that can be drawn on, plain elsewhere. Where nothing can be
            drawn, live is plain.
    """
    if mode == "off":
        return OutputOnly().follow(stream)
    if mode == "plain" or not drawable(sys.stderr, os.environ, asked=mode == "live"):
        return Plain().follow(stream)
    from skypool.console.live import Live

    return Live().follow(stream)


def drawable(file: TextIO | None, environ: Mapping[str, str], *, asked: bool = False) -> bool:
    """Whether a view can be redrawn on `file`: a terminal that moves its cursor, and not the log of a CI job.

    Args:
        asked: the user wants the view, so that a CI job's terminal will do.
    """
    try:
        terminal = file is not None and file.isatty()
    except ValueError:  # it is closed
        return False
    if not terminal or environ.get("TERM", "dumb") in ("dumb", "unknown", ""):
        return False
    return asked or environ.get("CI", "").lower() in ("", "0", "false")
