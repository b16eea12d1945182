"""`DetachedRun`: a run that belongs to its machine, as other processes see it."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar, cast

from skypool import clock
from skypool.checks import Duration, seconds, switch
from skypool.errors import SkypoolError, UsageError, nearest
from skypool.files import transfer
from skypool.files.transfer import NodeEnd, Transferred
from skypool.head.states import Ledger as State
from skypool.rental.ledger import Ledger
from skypool.rental.pool_terms import spelt
from skypool.rental.receipt import Receipt
from skypool.rental.records import Record, RunEnd, RunRecord, newest
from skypool.rental.run_state import Word, state_of, status_of
from skypool.runs import call_results, cancelling
from skypool.runs.asking import ask_machines
from skypool.runs.looking import Missing, Printed, RunLook, Seen, await_end, note_found, run_of, working_access
from skypool.runs.machine_end import end_machine
from skypool.runs.rank_lines import RankLines
from skypool.runs.reaching import NotListed

T = TypeVar("T")
_TO_REACH = 8.0
"""Seconds in which the machine must be reached."""
_PATIENCE = 90.0
"""Seconds without progress after which a transfer is given up, as the default `liveness` of a pool."""


class DetachedRun(Generic[T]):
    """A run that belongs to its machine: `skypool.run(…, detach=True)` returns one, and `Run.get` finds one.

    Its methods ask the machine from wherever they are called. They need the account of the provider and the ssh key of
    the run, which this computer keeps. When the machine is gone, this computer still has the end of the run if somebody
    has asked for it before, or if it is in a bucket.

    The type parameter is the type of the value of a call, and None for a program.

    Attributes:
        name: the name of the run, by which `skypool ps` and `skypool logs` know it.
    """

    def __init__(self, record: Record) -> None:
        self.name = record.pool
        self._session = record.session
        self._last = record
        self._why = ""

    def __repr__(self) -> str:
        return f"DetachedRun({self.name!r})"

    # --- its state -------------------------------------------------------------------------------------------

    @property
    def state(self) -> Word:
        """Return the state of the run: "starting", "running", "draining", "ended", "failed", "cancelled" or others.

        The machine is asked for 8 seconds at most, unless it is known how the run has ended. If it does not answer, the
        state is what is known here, and `why` says so. docs/money.md explains all states.
        """
        known = self._known
        unheard = ask_machines(known, [self._record])
        state = state_of(self._record, time.time())
        assert state is not None
        self._why = "; ".join(filter(None, [state.why, unheard.get(self._session, "")]))
        return state.word

    @property
    def why(self) -> str:
        """The reason for the state as `state` has returned it last."""
        if not self._why:
            _ = self.state
        return self._why

    @property
    def returncode(self) -> int | None:
        """The exit status of the program: 128 + n if signal n ended it. None until `state` or `wait` has heard it."""
        end = self._run.end
        return None if end is None else end.returncode

    @property
    def usd(self) -> float:
        """The cost so far, in US dollars. It is estimated until the end of the machine is proved."""
        return self._record.receipt(clock.now()).usd

    @property
    def worst_usd(self) -> float:
        """The most that the run may cost in all, in US dollars."""
        return self._run.worst_usd

    @property
    def ends_by(self) -> datetime:
        """The latest time at which the machine may still be there, in UTC."""
        return datetime.fromtimestamp(self._run.latest, UTC)

    def wait(self, timeout: Duration | None = None) -> int:
        """Wait until the run is over, and return its exit status. Lost connections are made again.

        The status is that of the program if that has ended by itself, 130 if a user has cancelled the run, and 125
        otherwise: docs/close-the-lid.md has a table.

        Args:
            timeout: the longest time to wait. Default None: until the run is over.

        Raises:
            TimeoutError: the run was not over in time.
            LoginRefused, HostKeyMismatch, CredentialsError: the machine cannot be reached from here.
        """
        return status_of(self._await_end(timeout))

    def _await_end(self, timeout: Duration | None) -> RunEnd:
        until = math.inf if timeout is None else time.monotonic() + seconds("timeout", timeout)
        try:
            return await_end(self._record, self._known, _hear, until)
        except TimeoutError:
            raise TimeoutError(f"run {self.name} is not over after {timeout}") from None

    def result(self, timeout: Duration | None = None) -> T:
        """Wait until the run is over, and return the value of the call, or raise its exception.

        Any process of this computer may ask. The result comes from the machine while that is
        there, or else from the bucket of a folder of the run, and stays on this computer. It is unpickled only if it
        is the one that the run has stored. The modules of its classes must be there to import.

        Args:
            timeout: the longest time to wait for the end. Default None: until the run is over.

        Raises:
            TimeoutError: the run was not over in time.
            CancelledError: it was cancelled.
            BudgetExceeded, LifetimeExceeded: it was stopped because a limit was reached.
            SkypoolError: there is no result, as of a program; the machine that has it is gone; or it was changed.
            Exception: the exception that the function raised.
        """
        end = self._await_end(timeout)
        return cast(T, call_results.result_of(self._record, self._known, end, _TO_REACH))

    # --- what is on its machine ------------------------------------------------------------------------------

    def logs(self, follow: bool = False) -> Iterator[str]:
        """Return an iterator over the lines that the program has printed, to stdout and stderr.

        Each line comes once, without its newline. If the run has several processes, lines begin with `[rank 3] `.

        Args:
            follow: True to go on until the run is over. Lost connections are made again then. Default False: end with
                the last line that is there, and try for 8 seconds to reach the machine.

        Raises:
            SkypoolError: the machine has ended, so that its output is gone, or it cannot be reached.
        """
        switch("follow", follow)
        return self._lines(follow)

    def _lines(self, follow: bool) -> Iterator[str]:
        record, known = self._record, self._known
        made, mark, attempt = RankLines(), "", 0
        look = RunLook(record, output=True, follow=follow, patience=math.inf if follow else _TO_REACH)
        try:
            for each in look:
                match each:
                    case Seen(found, about):
                        note_found(known, record, found)
                        mark = "[rank {}] " if about is not None and about.procs is not None else ""
                    case Printed():
                        if each.attempt != attempt:
                            yield from _texts(data for _, _, data in made.finish())
                            made, attempt = RankLines(), each.attempt
                        yield from _texts([made.feed(each.rank, each.stream, each.data, mark.format(each.rank))])
                    case Missing():
                        yield f"{mark.format(each.rank)}[some output is missing here: {each.why}]"
                    case _:
                        pass
        except NotListed as e:
            raise self._is_gone(e) from e
        yield from _texts(data for _, _, data in made.finish())

    def pull(
        self,
        remote: str | os.PathLike[str],
        local: str | os.PathLike[str] | None = None,
        *,
        delete: bool = False,
        checksum: bool = False,
    ) -> Transferred:
        """Fetch a file or a folder from the machine, also after the run, while the machine is there.

        The arguments are as of `ComputePool.pull`. Relative paths on the machine begin where the program starts.

        Raises:
            UsageError, TransferError, ConnectionLost: as `ComputePool.pull`.
            SkypoolError: the machine has ended, or cannot be reached within 8 seconds.
        """
        there = os.fspath(remote)
        here = transfer.name_of(there) if local is None else os.fspath(local)
        return transfer.pull(self._end(there), there, here, patience=_PATIENCE, delete=delete, checksum=checksum)

    def push(
        self,
        local: str | os.PathLike[str],
        remote: str | os.PathLike[str] | None = None,
        *,
        delete: bool = False,
        checksum: bool = False,
    ) -> Transferred:
        """Send a file or a folder to the machine. The arguments, paths and errors are as of `pull`."""
        here = os.fspath(local)
        there = transfer.name_of(os.path.abspath(os.path.expanduser(here))) if remote is None else os.fspath(remote)
        end = self._end(there)
        return transfer.push([end], here, there, patience=_PATIENCE, delete=delete, checksum=checksum)

    def _end(self, remote: str) -> NodeEnd:
        if not remote or "\0" in remote:
            raise UsageError(f"remote must be a path on the machine, not {remote!r}")
        try:
            access = working_access(self._record, _TO_REACH)
        except NotListed as e:
            raise self._is_gone(e) from e
        return transfer.end_of(0, access, access.python or "")

    # --- its end ---------------------------------------------------------------------------------------------

    def cancel(self) -> int:
        """Cancel the run, wait until it is over, and return its exit status, as `wait` does.

        The program gets SIGINT and 5 seconds to end. The machine stays for `keep`, and ends itself then. Does nothing
        if the run is over.

        Raises:
            SkypoolError: the machine could not be told within a minute, or the run was not over two minutes later.
        """
        end, _ = cancelling.cancel(self._record, self._known, _hear)
        return status_of(end)

    def end(self) -> Receipt:
        """End the machine at once, with all that is on it, and return the receipt when the provider says it has ended.

        A run that goes on is cancelled by this.

        Raises:
            StillRunning: the machine may still run.
            SkypoolError: it has ended, but other resources of the run are left, or it is not known.
        """
        return end_machine(self._record, self._known)

    @property
    def _known(self) -> Ledger:
        return Ledger.here()

    @property
    def _record(self) -> Record:
        self._last = self._known.record(self._session) or self._last
        return self._last

    @property
    def _run(self) -> RunRecord:
        return run_of(self._record)

    def _is_gone(self, error: NotListed) -> SkypoolError:
        return SkypoolError(f"what run {self.name!r} has written was on its machine: {error}")


def get(name: str) -> DetachedRun[Any]:
    """Return the newest run of this name that belongs to its machine, or did so. Raises UsageError if there is none."""
    known = Ledger.here()
    name = spelt(name)
    record = newest(known.pools(name))
    if record is None or record.run is None or record.run.entry.state is State.LIVE:
        raise no_run(name, {each.pool for each in known.pools()})
    return DetachedRun(record)


def no_run(name: str, known: Iterable[str]) -> UsageError:
    """Return the error for a name that no run has which belongs to its machine. `known` has the names of all pools."""
    names = set(known)
    if name in names:
        return UsageError(
            f"{name!r} does not belong to its machine, but to the process that has started it; runs that `skypool run "
            "--detach` has started belong to theirs"
        )
    close = nearest(name, names)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    return UsageError(f"there is no run {name!r}; `skypool ps` lists runs{hint}")


def _hear(why: str) -> None:
    """Tell nobody that the machine cannot be reached now: it is tried again."""


def _texts(pieces: Iterable[bytes]) -> Iterator[str]:
    for each in pieces:
        yield from each.decode("utf-8", "replace").split("\n")[:-1]
