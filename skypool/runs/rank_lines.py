"""Marks the lines that several processes print, so that they can be told apart."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from skypool.console.printer import REDRAW_EVERY
from skypool.console.whole_lines import Lines, marked

_LONGEST = 1 << 16
"""The most bytes of an unfinished line. A longer one is shown as several."""


@dataclass(slots=True)
class _Source:
    """Output of one stream of a process, which is cut into lines.

    Attributes:
        mark: what each of its lines begins with.
        state: the state of its progress bar that was shown last, at the time `shown`.
    """

    mark: str
    lines: Lines = field(default_factory=Lines)
    state: str = ""
    shown: float = field(default_factory=time.monotonic)


class RankLines:
    """Cuts output into lines with marks. Each process has a thread that calls `feed`."""

    def __init__(self) -> None:
        self._sources: dict[tuple[int, int], _Source] = {}

    def feed(self, rank: int, stream: int, data: bytes, mark: str) -> bytes:
        """Take output of a process. Return the lines that are complete now, each with the mark before it.

        The state of a progress bar is a line, too, at most every 10 seconds.
        """
        source = self._sources.setdefault((rank, stream), _Source(mark))
        lines = source.lines.feed(data.decode("latin-1"))  # bytes are text of one character each here
        if source.lines.size > _LONGEST:
            lines += source.lines.finish()
        state, now = source.lines.unfinished, time.monotonic()
        if source.lines.redrawn and state != source.state and now >= source.shown + REDRAW_EVERY:
            source.state, source.shown = state, now
            lines += f"{state}\n"
        return marked(lines, mark).encode("latin-1")

    def finish(self) -> Iterator[tuple[int, int, bytes]]:
        """End all output. Yield what is left of each process: rank, stream and the unfinished line, with its mark."""
        for (rank, stream), source in self._sources.items():
            if rest := source.lines.finish():
                yield rank, stream, marked(rest, source.mark).encode("latin-1")
