"""`WatchedRun`: a run that belongs to its machine, while the process that has started it shows it to the user."""

from __future__ import annotations

import contextlib
import json
import shlex
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path

from skypool import events
from skypool.console.event_text import span
from skypool.errors import ConnectionLost, ProtocolError, SkypoolError
from skypool.files import transfer
from skypool.head.states import Outcome
from skypool.logs.writer import LogWriter
from skypool.pool.watch import PoolFacts
from skypool.rental.ledger import Ledger
from skypool.rental.receipt import Receipt
from skypool.rental.records import Record, RunEnd
from skypool.rental.run_state import CANCELLED, status_of, told
from skypool.runs import cancelling
from skypool.runs.looking import (
    Idle,
    Missing,
    Printed,
    RunLook,
    Seen,
    end_of,
    lost_end,
    note_found,
    run_of,
    started,
    working_access,
)
from skypool.runs.machine_end import end_machine
from skypool.runs.own_thread import in_thread
from skypool.runs.program_run import LeftBehind, await_end, fetch_from
from skypool.runs.reaching import NotListed
from skypool.runs.stored import RunStatus
from skypool.runs.teller import Teller

_LOOKS = 0.5
"""Seconds between two looks if somebody still reads the output."""
_TO_SHOW = 30.0
"""Seconds in which the last output of a run that was cancelled has come."""
_EVERY = 60.0
"""Seconds between two fetches of the folder that the program writes."""
_OFTEN = 5.0
"""The same when its machine ends soon, and before the first one."""
_SPOT = 10.0
"""The same on a spot machine, as this process does not hear that it is taken back."""
_LAST = 60.0
"""Seconds before the written end from which the folder is fetched often."""
_TO_REACH = 60.0
"""Seconds in which the machine must be reached for the last fetch."""
_PATIENCE = 90.0
"""Seconds without progress after which a fetch is given up, as the default `liveness` of a pool."""
_TO_LOOK = 5.0
"""The most seconds in which the machine looks for files that are not fetched."""
_MOST_SAID = 4 << 20
"""The most bytes of its answer."""


class ViewEnds(Exception):
    """Raised if nobody reads what the program prints any more. The run goes on."""


class WatchedRun:
    """A view of a run that belongs to its machine. At its end, it fetches what the run has left and ends the machine.

    Ctrl-C cancels the run. Any other end of this process ends the view only.

    Args:
        record: the pool of the run in the ledger.
        known: the ledger.
        tell: what happens is told to it, and it gets the output.
        facts: what the pool shows to its watches. The output is kept in its logs.
        printed: makes an event for the logs of output without secrets: of a rank, a number of a stream, and bytes.
        left: what was on the machine when the program began.
        folder: the folder that is fetched, below that in which the program starts; "" for none.
        target: the folder here.
        stay: the seconds that the machine stays after the run if nobody ends it.

    Attributes:
        end: how the run has ended; None before.
        receipt: the receipt when the end of the machine is proved; None before, and if the machine stays, as what the
            run has left there could not be fetched.
        unsaved: why what the program saved could not be fetched, or is not in a bucket; "" if it is.
    """

    def __init__(
        self,
        record: Record,
        known: Ledger,
        tell: Teller,
        facts: PoolFacts,
        printed: Callable[[int, int, bytes], events.Output],
        left: LeftBehind,
        folder: str,
        target: Path,
        stay: float,
    ) -> None:
        self._record, self._known, self._tell = record, known, tell
        self._printed, self._left = printed, left
        self._folder, self._target, self._stay = folder, target, stay
        self._names: set[str] = set()
        self._lost = ""
        self._is_over = threading.Event()
        self._is_left = False  # the last fetch has failed
        self._status: RunStatus | None = None
        self._log = LogWriter()
        self._log.begin(facts)
        self.end: RunEnd | None = None
        self.receipt: Receipt | None = None
        self.unsaved = ""

    def run(self, is_cancelled: bool = False) -> int:
        """Show the run until it is over, fetch what it has left, and end its machine. Return the exit status.

        With `is_cancelled`, cancel it at once.

        Raises:
            KeyboardInterrupt: a signal has cancelled the run, and its machine has ended, unless `receipt` is None.
            SystemExit: another signal has ended the view.
            ViewEnds: nobody reads what the program prints any more.
            SkypoolError: the run has failed or is lost, cannot be looked at any more, or its end is not proved.
        """
        reading, fetching = in_thread(self._read, "skypool-view"), in_thread(self._fetch_often, "skypool-fetch")
        is_hurried = False
        try:
            try:
                if is_cancelled:
                    raise KeyboardInterrupt
                self._await(reading)
            except KeyboardInterrupt:
                is_cancelled = True
                self._cancel(reading)
            self._is_over.set()
            await_end(fetching)
            self._bring_back(is_cancelled)
        except KeyboardInterrupt:
            is_hurried = True
            self._tell.note("interrupted: the machine is ended now")
            if self._folder:
                self.unsaved = "it was interrupted"
                self._tell.error(f"what the program wrote last into {self._folder} was not fetched: {self.unsaved}")
        finally:
            self._is_over.set()
            self._log.close()
        if self.end is None and not is_hurried:
            raise ProtocolError(f"the machine of run {self._record.pool} says that it is over, but not how")
        if self._stay and self._is_left:
            self._tell.note(
                f"the machine stays for {span(self._stay)} after the run: `skypool pull {self._record.pool} "
                f"{self._folder}` fetches what is there, and `skypool down {self._record.pool}` ends it before"
            )
            return self._told(is_cancelled)
        self._tell.stage("the machine, which ends")
        ending = in_thread(self._end_machine, "skypool-end")
        try:
            await_end(ending)
        except KeyboardInterrupt:
            self._tell.note("the end of the machine is still being proved; another signal leaves that to `skypool gc`")
            await_end(ending)
        self.receipt = ending.result()
        self._tell.stage("")
        if is_hurried:
            raise KeyboardInterrupt
        return self._told(is_cancelled)

    def _end_machine(self) -> Receipt:
        return end_machine(self._record, self._known)

    def _told(self, is_cancelled: bool) -> int:
        """Tell how the run has ended if the line `end` does not, and return its exit status."""
        end = self.end
        assert end is not None
        if end.outcome is Outcome.CANCELLED and not end.limit:
            if is_cancelled:
                raise KeyboardInterrupt
            self._tell.note(f"run {self._record.pool} was cancelled")
            return CANCELLED
        if end.outcome is Outcome.CANCELLED:
            self._tell.error(
                f"the machine was to end in some seconds, as the budget or the lifetime is over: the program is "
                f"interrupted, for the {end.limit}"
            )
        elif end.outcome is not Outcome.ENDED:
            raise SkypoolError(f"run {self._record.pool} {told(end)}")
        return status_of(end)

    # --- the view --------------------------------------------------------------------------------------------

    def _await(self, reading: Future[None]) -> None:
        while not wait([reading], _LOOKS).done:
            if self._tell.is_unread:
                raise ViewEnds
        reading.result()

    def _cancel(self, reading: Future[None]) -> None:
        """Cancel the run, and wait until it is over, and for its last output. Another signal interrupts that."""
        self._tell.note(
            "interrupted: the run is cancelled, and the program has 5 s to end; another Ctrl-C ends the machine at once"
        )
        cancelled = in_thread(lambda: cancelling.cancel(self._record, self._known, self._hear), "skypool-cancel")
        await_end(cancelled)
        end, _ = cancelled.result()
        until = time.monotonic() + _TO_SHOW
        while not wait([reading], _LOOKS).done and time.monotonic() < until:
            pass
        self.end = self.end or end

    def _read(self) -> None:
        """Show what the program prints, until the run is over."""
        record, known = self._record, self._known
        try:
            for each in RunLook(record, output=True, follow=True):
                match each:
                    case Seen(found):
                        note_found(known, record, found)
                        self._status = found.status or self._status
                        self.end = end_of(found, is_detached=True)
                    case Printed():
                        self._tell.wrote(each.rank, each.stream, each.data)
                        self._log.tick()
                    case Missing():
                        self._tell.error(f"some output of rank {each.rank} is missing: {each.why}")
                    case Idle():
                        self._hear(each.lost)
                        self._log.tick()
                        if self.end is not None and not each.lost:  # as after a reboot of the machine
                            break
        except NotListed:
            self.end = self.end or lost_end(known, record)

    def keep(self, rank: int, stream: int, data: bytes) -> None:
        """Keep output, which has no secrets any more, in the logs of the pool."""
        self._log.hear(self._printed(rank, stream, data))

    def _hear(self, why: str) -> None:
        if why and not self._lost:
            self._tell.note(f"the machine cannot be reached now, and is tried again; the run goes on there: {why}")
        self._lost = why

    # --- what it leaves --------------------------------------------------------------------------------------

    def _fetch_often(self) -> None:
        """Fetch the folder each minute until the run is over."""
        pause, last = _OFTEN, ""
        while self._folder and not self._is_over.wait(pause):
            try:
                self._fetch(settled=True, patience=_OFTEN)
                last = ""
            except SkypoolError as e:
                if str(e) != last and not self._lost:
                    self._tell.note(f"{self._folder} cannot be fetched now: {e}")
                last = str(e)
            left = run_of(self._record).ends - time.time()
            usual = _SPOT if any(each.market == "spot" for each in self._record.running) else _EVERY
            pause = _OFTEN if left < _LAST else min(usual, left - _LAST + _OFTEN)

    def _fetch(self, settled: bool, patience: float) -> None:
        access = working_access(self._record, patience)
        end, left = transfer.end_of(0, access, access.python or ""), self._left
        fetch_from(end, self._folder, self._target, self._names, left.since, left.known, settled, _PATIENCE)

    def _bring_back(self, is_cancelled: bool) -> None:
        """Fetch the folder for the last time, and tell what was saved, and what was not. A signal interrupts that."""
        if self._folder:
            if is_cancelled:
                self._tell.note(f"fetching {self._folder} before the machine ends; another Ctrl-C ends it at once")
            last = in_thread(lambda: self._fetch(settled=False, patience=_TO_REACH), "skypool-fetch-last")
            await_end(last)
            try:
                last.result()
            except SkypoolError as e:
                self.unsaved, self._is_left = str(e), True
                self._tell.error(f"what the program wrote into {self._folder} was not fetched: {e}")
            if self._names or not self.unsaved:
                self._tell.saved(self._folder, len(self._names))
        looking = in_thread(self._files_elsewhere, "skypool-look")
        with contextlib.suppress(SkypoolError, OSError, ValueError):  # the machine is lost, or takes too long
            if wait([looking], _TO_LOOK).done:
                self._tell.unsaved(looking.result())
        self._tell_of_buckets()

    def _files_elsewhere(self) -> list[tuple[str, int]]:
        """Return large files that the program wrote elsewhere in the project."""
        access = working_access(self._record, _TO_LOOK)
        said = json.dumps([self._left.copy, self._left.since, self._left.saved])
        with started(access, ("safety.never_sent", "runs.unsaved_files"), shlex.quote(said)) as stream:
            stream.socket.settimeout(_TO_LOOK)
            data = bytearray()
            while not data.endswith(b"\n") and len(data) < _MOST_SAID:
                piece = stream.socket.recv(1 << 16)
                if not piece:
                    raise ConnectionLost("the machine did not say which files are not saved")
                data += piece
        return [(str(path), int(size)) for path, size in json.loads(data)]

    def _tell_of_buckets(self) -> None:
        for each in () if self._status is None else self._status.folders:
            if not each.why:
                self._tell.saved_to(each)
            elif each.unsaved:
                lost = f"{each.unsaved} file{'s' * (each.unsaved != 1)} of {each.id} ({', '.join(each.names)})"
                self.unsaved = "; ".join(filter(None, [self.unsaved, f"{lost}: {each.why}"]))
                self._tell.error(f"saved nowhere: {lost}: {each.why}")


def again(name: str, stay: float) -> str:
    """Return how to look in again at a run whose view has ended. `stay` is how long its machine stays after the run."""
    kept = f", and its machine stays for {span(stay)} then" if stay else ""
    return (
        f"run {name} goes on on its machine until it is over{kept}: `skypool logs -f {name}` shows it again, `skypool "
        f"wait {name}` waits for its end, and `skypool cancel {name}` ends it"
    )
