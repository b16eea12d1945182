"""`lines`: the output of a run that belongs to its machine, line by line, for `skypool logs`."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

from skypool.cli import output
from skypool.cli.run_end import Lost, told
from skypool.errors import UsageError
from skypool.head.states import Ledger as State
from skypool.logs.reader import LogLine
from skypool.rental.ledger import Ledger
from skypool.rental.records import Record
from skypool.rental.run_state import what_is_left
from skypool.runs.looking import Idle, Missing, Printed, RunLook, Seen, end_of, note_found, run_of
from skypool.runs.rank_lines import RankLines

_PATIENCE = 8.0
"""Seconds in which the machine must be reached, without --follow."""


def check(node: int | None, call: str | None, since: str | None) -> None:
    """Raise UsageError for options of `skypool logs` that mean nothing for such a run."""
    if node:
        raise UsageError(f"a run that belongs to its machine has one node, 0, and no node {node}")
    for option, value in {"--call": call, "--since": since}.items():
        if value is not None:
            raise UsageError(
                f"{option} is for pools: what a program prints has neither calls nor times on its machine; use --tail "
                "or --grep"
            )


def lines(record: Record, follow: bool) -> Iterator[LogLine | None]:
    """Yield the lines that a run has printed, from its machine. None means that there is no new line yet.

    With `follow`, they go on until the run is over. Raises what `RunLook` raises, and BrokenPipeError if nobody reads
    any more.
    """
    name, known = record.pool, Ledger.here(output.warn)
    is_detached = run_of(record).entry.state is State.DETACHED
    made, lost = _Lines(name), Lost()
    look = RunLook(record, output=True, follow=follow, patience=math.inf if follow else _PATIENCE)
    end, is_first = None, True
    for each in look:
        match each:
            case Seen(found, about):
                if is_first:
                    line, is_first = (record.running or record.lines)[-1], False
                    output.note(f"from the machine of run {name}, {line.provider} {line.id}:")
                made.has_ranks = about is not None and about.procs is not None
                note_found(known, record, found)
                end = end_of(found, is_detached)
            case Printed():
                yield from made.feed(each)
            case Missing():
                yield from made.missing(each)
            case Idle():
                lost.hear(each.lost)
                output.check_reader()
                yield None
                if end is not None and not each.lost:  # as after a reboot of the machine
                    break
    yield from made.finish()
    yield None
    if follow and end is not None:
        output.note(told(name, end) + what_is_left(known.record(record.session) or record, time.time()))


class _Lines:
    """Maker of whole lines from what the processes of a run print. With `has_ranks`, each says its rank."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._attempt = 0
        self._lines = RankLines()
        self.has_ranks = False

    def feed(self, each: Printed) -> Iterator[LogLine]:
        """Yield the lines that become complete with a piece of output."""
        if each.attempt != self._attempt:
            yield from self.finish()
            self._attempt = each.attempt
        self.has_ranks |= each.rank > 0
        yield from self._made(each.rank, each.stream, self._lines.feed(each.rank, each.stream, each.data, ""))

    def missing(self, each: Missing) -> Iterator[LogLine]:
        """Yield a line that says what is missing."""
        of = f" of rank {each.rank}" if self.has_ranks else ""
        record = {"event": "Missed", "pool": self._name, "rank": each.rank if self.has_ranks else None}
        yield LogLine(f"some output{of} is missing here: {each.why}", record)

    def finish(self) -> Iterator[LogLine]:
        """Yield the last lines of an attempt, which have no newline."""
        for rank, stream, data in self._lines.finish():
            yield from self._made(rank, stream, data)
        self._lines = RankLines()

    def _made(self, rank: int, stream: int, data: bytes) -> Iterator[LogLine]:
        record: dict[str, Any] = {
            "event": "Output",
            "pool": self._name,
            "node": 0,
            "rank": rank if self.has_ranks else None,
            "attempt": self._attempt,
            "stream": stream,
        }
        for line in data.decode("utf-8", "replace").split("\n")[:-1]:
            yield LogLine(line, record, f"rank {rank}" if self.has_ranks else "")
