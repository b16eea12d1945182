"""`RunLook`: looks in at a run on its machine, also across lost connections. `await_end`: waits for its end."""

from __future__ import annotations

import contextlib
import json
import math
import shlex
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from dataclasses import dataclass, replace
from functools import partial

from skypool.errors import (
    ConnectionLost,
    CredentialsError,
    HostKeyMismatch,
    LedgerError,
    LoginRefused,
    ProtocolError,
    SkypoolError,
    UsageError,
)
from skypool.files.transfer import node_program
from skypool.head import messages
from skypool.head.states import Ask, Outcome
from skypool.head.states import Ledger as State
from skypool.link.reach import local_command
from skypool.model import Access
from skypool.rental.ledger import Ledger
from skypool.rental.records import Record, RunEnd, RunRecord
from skypool.rental.run_state import WORDS
from skypool.runs import look_end, machine_look, stored
from skypool.runs.end_in_bucket import end_in_bucket
from skypool.runs.follow import exactly
from skypool.runs.machine_look import Found
from skypool.runs.noting import record_found
from skypool.runs.output_files import END, Records
from skypool.runs.own_thread import in_thread
from skypool.runs.reaching import NotListed, reach
from skypool.runs.stored import About
from skypool.shipping.package_zip import shell_path
from skypool.text import one_line
from skypool.wire.frames import WIRE_VERSION, Kind
from skypool.wire.transport import CommandStream, refusal

SILENT = 30.0
"""Seconds without a byte after which a connection counts as lost. A machine that is well sends some each second."""
_TO_REACH = 30.0
"""Seconds in which a provider has said where the machine is."""
_PAUSES = 1.0, 10.0
"""The shortest and the longest pause in seconds before the next connection."""
_TO_END = 0.5
"""Seconds in which a command whose connection was lost ends, and says why."""
_TO_DOWN = 30.0
"""Seconds in which another process has written down the end of a machine."""
_LOOK_END = ("safety.peers", "agent.agent_socket", "runs.agent_door", "runs.follow_end", "runs.look_end")
"""The modules that say what is there, on the machine."""
_LOOK = 0.2
"""Seconds between two looks for that."""
_MOST = 4 << 20
"""The most bytes of a message."""
FINAL = (NotListed, LoginRefused, HostKeyMismatch, CredentialsError, UsageError, ProtocolError)
"""Errors after which another attempt would fail in the same way."""
_PYTHON = 'case $python in "") python=python3 ;; esac\n'
"""Shell text for a machine whose setup has left no word of its Python."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The state of the run on its machine. It comes first, and whenever it changes.

    `about` is None if the row of the run is not there, or nothing about the program.
    """

    found: Found
    about: About | None


@dataclass(frozen=True, slots=True)
class Printed:
    """Output of a process of the program. `stream` is 1 for stdout, 2 for stderr."""

    attempt: int
    rank: int
    stream: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Missing:
    """Output of a process is missing here."""

    attempt: int
    rank: int
    why: str


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing more is there now. It comes about once a second. `lost` is why the machine is not connected; or ""."""

    lost: str = ""


Shown = Seen | Printed | Missing | Idle


@dataclass(slots=True)
class _Position:
    """The place up to which the output of one process was read."""

    number: int = 0
    position: int = 0
    has_ended: bool = False


class RunLook:
    """A look at a run on its machine. Iterate over it once, to get what it shows.

    It ends when the run is over and everything was shown, or without `follow` when everything was shown that is there.
    Output comes once and in order for each process, also if connections are lost on the way.

    Args:
        record: the pool of the run in the ledger.
        output: True to show output.
        follow: True to go on until the run is over.
        until: the time of `time.monotonic()` at which it ends in any case.
        patience: seconds without a connection after which it gives up.
        access: how the machine is reached; None to ask its provider.

    Attributes:
        access: how the machine is reached; None if nobody has said that yet.

    Iterating raises:
        NotListed: the provider does not list the machine any more.
        ConnectionLost: the machine was not reached for `patience` seconds.
        LoginRefused, HostKeyMismatch, CredentialsError: it cannot be reached from here.
        ProtocolError: what it said is not valid.
        TimeoutError: `until` has come.
    """

    def __init__(
        self,
        record: Record,
        *,
        output: bool,
        follow: bool,
        until: float = math.inf,
        patience: float = math.inf,
        access: Access | None = None,
    ) -> None:
        self._record = record
        self._run = run_of(record)
        message = json.dumps(messages.to_json(Ask(self._run.claim)))
        ask = {"wire": WIRE_VERSION, "asks": Kind.HANDOVER, "answers": Kind.HANDED, "message": message}
        self._asked = {"output": output, "follow": follow, "ask": ask}
        self._until, self._patience = until, patience
        self.access = access
        self._positions: dict[tuple[int, int], _Position] = {}
        self._records: dict[tuple[int, int], Records] = {}
        self._has_row = False
        self._moved = time.monotonic()

    def __iter__(self) -> Iterator[Shown]:
        pause, most = _PAUSES
        while True:
            moved = self._moved
            try:
                yield from self._connected()
                return
            except FINAL:
                raise
            except Exception as e:  # a driver may raise whatever it wants if its provider cannot be asked
                self._check_time()
                why = one_line(str(e) or type(e).__name__, 500)
                if time.monotonic() > self._moved + self._patience:
                    raise ConnectionLost(f"the machine of run {self._record.pool} cannot be reached: {why}") from e
            if moved == self._moved:
                self.access = None  # its address may be another one by now
                pause = min(most, 2 * pause)
            else:
                pause, _ = _PAUSES
            yield Idle(why)
            time.sleep(max(0.0, min(pause, self._until - time.monotonic())))
            self._check_time()

    def _check_time(self) -> None:
        if time.monotonic() >= self._until:
            raise TimeoutError

    def _connected(self) -> Iterator[Shown]:
        """Connect, and yield what comes until the end. Raises EOFError, OSError or ConnectionLost if it is lost."""
        access = self.access = self.access or reached(self._record, self._until)
        begin = [[*process, each.number, each.position] for process, each in self._positions.items()]
        place = shell_path(stored.place_of(access, self._run.claim))
        said = shlex.quote(json.dumps({**self._asked, "begin": begin}))
        with started(access, _LOOK_END, f'{place} "$folder" {said}') as stream:
            while True:
                stream.socket.settimeout(max(0.01, min(SILENT, self._until - time.monotonic())))
                kind, attempt, rank, *where, length = look_end.MESSAGE.unpack(exactly(stream, look_end.MESSAGE.size))
                if length > _MOST:
                    raise ProtocolError("the machine of the run sent what makes no sense")
                data = exactly(stream, length)
                self._moved = time.monotonic()
                match kind:
                    case look_end.STATE:
                        yield self._state(data, stored.place_of(access, self._run.claim))
                    case look_end.CURRENT:
                        yield Idle()
                    case look_end.OVER:
                        return
                    case _ if self._has_row:  # else it is of an earlier run of that name
                        yield from self._process(kind, (attempt, rank), (where[0], where[1]), data)
                self._check_time()

    def _state(self, data: bytes, folder: str) -> Seen:
        try:
            said = json.loads(data)
            found = machine_look.found(
                folder,
                self._run.claim,
                self._run.heir,
                has_agent=bool(said["agent"]),
                boot=str(said["boot"]),
                row=str(said["row"]),
                end=str(said["status"]),
                over=said["over"],
                posted=str(said["posted"]),
            )
            self._has_row = found.has_row
            return Seen(found, About.parsed(said["about"]) if found.has_row else None)
        except (KeyError, SkypoolError, TypeError, ValueError) as e:  # such as a damaged file
            raise ProtocolError(f"run {self._record.pool}: {e}") from e

    def _process(
        self, kind: int, process: tuple[int, int], where: tuple[int, int], data: bytes
    ) -> Iterator[Printed | Missing]:
        """Yield what a message says of a process, and note how far that was read."""
        known = self._positions.setdefault(process, _Position())
        records = self._records.setdefault(process, Records())
        if where[0] != known.number or kind == look_end.MISSING:
            records.forget()
        known.number, known.position = where[0], where[1] + (len(data) if kind == look_end.OUTPUT else 0)
        if kind == look_end.MISSING:
            yield Missing(*process, "the machine keeps the last 1 GB, and what was before it was not read in time")
        elif kind == look_end.OUTPUT:
            try:
                found = [*records.feed(data)]
            except ValueError as e:
                raise ProtocolError(str(e)) from e
            for stream, piece in found:
                yield Printed(*process, stream, piece)
        elif kind == look_end.END and not known.has_ended:
            known.has_ended = True
            *_, lost = END.unpack(data)
            if lost:
                yield Missing(*process, f"{lost:,} bytes could not be written on the machine")


def run_of(record: Record) -> RunRecord:
    """Return the hand-over of the run of a pool, which has one."""
    assert record.run is not None
    return record.run


def look_once(record: Record, access: Access, until: float) -> Found:
    """Return what the machine of a run has of it. Raises what `RunLook` raises, at the first error."""
    seen = None
    for each in RunLook(record, output=False, follow=False, until=until, patience=0.0, access=access):
        seen = each.found if isinstance(each, Seen) else seen
    assert seen is not None  # it comes first
    return seen


def working_access(record: Record, patience: float) -> Access:
    """Return how the machine of a run is reached, where commands begin in the folder in which the program starts.

    Raises what `RunLook` raises.
    """
    look = RunLook(record, output=False, follow=False, patience=patience)
    seen = next(each for each in look if isinstance(each, Seen))
    assert look.access is not None  # it has answered
    about = seen.about
    return look.access if about is None else replace(look.access, cwd=about.folder, programs=about.programs)


def reached(record: Record, until: float) -> Access:
    """Return how the machine of a run is reached, if its provider says so in time."""
    asked = in_thread(partial(reach, record), "skypool-reach")
    patience = max(0.0, min(_TO_REACH, until - time.monotonic()))
    if not wait([asked], patience).done:
        raise ConnectionLost(f"the provider did not say within {patience:.3g} s where the machine is")
    return asked.result()


@contextlib.contextmanager
def started(access: Access, modules: tuple[str, ...], words: str) -> Iterator[CommandStream]:
    """Start a program of these modules on a machine, and yield the connection to it.

    Raises ConnectionLost, LoginRefused or HostKeyMismatch with what the command has said, if the connection is lost.
    """
    loader, program = node_program(*modules)
    script = f'{_PYTHON}exec "$python" -c {shlex.quote(loader)} {len(program)} {words} 3>&1 1>&2'
    stream = CommandStream(local_command(access, access.python or "", script))
    try:
        try:
            stream.socket.sendall(program)
            yield stream
        except (EOFError, OSError) as e:
            said = stream.end(_TO_END)
            raise refusal(access.transport, 0, said or str(e) or "the connection was closed") from e
    finally:
        stream.shut()
        stream.close()


# --- the end -------------------------------------------------------------------------------------------------


def end_of(found: Found, is_detached: bool) -> RunEnd | None:
    """Return how a run has ended by what its machine has; None if it goes on. `is_detached` is from the ledger."""
    if found.has_row and found.end is not None:
        return found.end
    if found.has_row:
        return None if found.has_agent else RunEnd(Outcome.INTERRUPTED)
    if is_detached:
        return RunEnd(Outcome.LOST)  # the machine has nothing of it any more
    return None if found.has_agent else RunEnd(Outcome.NOT_STARTED)


def known_end(record: Record, known: Ledger) -> RunEnd | None:
    """Return how a run has ended if all of that is known. Asks only the buckets of a run that is lost otherwise."""
    end = run_of(record).end
    if end is None or (end.outcome is Outcome.ENDED and end.returncode is None and not end.why):
        return None  # the exit status may still be there
    return (_end_in_bucket(record, known) or end) if end.outcome is Outcome.LOST else end


def _end_in_bucket(record: Record, known: Ledger) -> RunEnd | None:
    """Return the end that a run has kept beside its folders in a bucket, and record it; None if there is none."""
    try:
        status = end_in_bucket(record)
    except (OSError, SkypoolError) as e:
        return RunEnd(Outcome.LOST, why=f"{WORDS[Outcome.LOST][1]} here: {e}")
    if status is None:
        return None
    note_found(known, record, Found(has_agent=False, has_row=True, status=status))
    return status.end


def await_end(
    record: Record, known: Ledger, hear: Callable[[str], object], until: float = math.inf, patience: float = math.inf
) -> RunEnd:
    """Wait until a run is over, and record that. Return how it has ended.

    Args:
        hear: called about once a second with why the machine is not connected; "" if it is.
        until, patience: as for `RunLook`.

    Raises what `RunLook` raises, but for NotListed.
    """
    if (end := known_end(record, known)) is not None:
        return end
    is_detached = run_of(record).entry.state is State.DETACHED
    try:
        for each in RunLook(record, output=False, follow=True, until=until, patience=patience):
            if isinstance(each, Seen):
                note_found(known, record, each.found)
                if (end := end_of(each.found, is_detached)) is not None:
                    return end
            elif isinstance(each, Idle):
                hear(each.lost)
    except NotListed:
        return lost_end(known, record)
    raise ProtocolError(f"the machine of run {record.pool} says that it is over, but not how")


def note_found(known: Ledger, record: Record, found: Found) -> None:
    """Record what a machine has said of a run, if the ledger can be written."""
    if found.has_row:
        with contextlib.suppress(LedgerError):
            record_found(known, record.session, found)


def lost_end(known: Ledger, record: Record) -> RunEnd:
    """Return how a run has ended whose machine is not listed any more: another process, or a bucket, may have it.

    Waits for a process that ends the machine just now, such as `skypool down`, for 30 s at most.
    """
    until = time.monotonic() + _TO_DOWN
    while True:
        record = known.record(record.session) or record
        is_ending = record.ending is not None and record.ended is None and run_of(record).entry.outcome is None
        if not is_ending or time.monotonic() > until:
            break
        time.sleep(_LOOK)
    end = known_end(record, known) or _end_in_bucket(record, known)
    return end or run_of(record).end or RunEnd(Outcome.LOST)
