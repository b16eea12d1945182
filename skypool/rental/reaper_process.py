"""Terminates all machines of a pool in a process of its own, which outlives the client and its terminal.

A machine that was handed over to its run is left to it. If the pool has `linger=`, its machines stay for that time
after its `with` block. The process then first waits for that time to pass.

`terminate_in_background` starts the process, and `main` is what the process runs.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, cast

from skypool.drivers.contract import Driver
from skypool.errors import LedgerError, SkypoolError
from skypool.rental.ledger import Ledger
from skypool.rental.reaper import terminate_all
from skypool.safety import private, user_folders

_PATIENCE = 24 * 3600.0
"""Seconds for which the process tries. In a day the user may renew credentials, or be back at work."""
_MONTH = 30 * 86400.0
"""Seconds for which logs are kept."""
_LOOK = 2.0
"""The most seconds between two looks at a pool whose machines stay."""
_READY = b"ready\n"
"""Line that the process writes to its stdout once it has read its task."""


def terminate_in_background(drivers: Sequence[Driver], pool: str, session: str, *, staying: bool = False) -> int:
    """Start a process that terminates all machines of a pool, and return its pid once it is at work.

    The new process outlives this process and its terminal. It tries for up to a day, and writes the log file `log_of`.
    The drivers, with their secrets, are sent to it through a pipe, and never written to disk. This function waits until
    the new process has read its task, but not for the end of the machines.

    Args:
        staying: True if the machines stay after the `with` block until a time that the ledger has. The process then
            waits until that time, and does nothing if another process takes the pool over or ends it. Default False.

    Raises:
        SkypoolError: the process could not be started. Machines that can end themselves do so when their lease is over.
    """
    import cloudpickle  # it can also send drivers that the user's own script defines

    file = log_of(pool, session)
    try:
        process = _started(pool, file)
        said = _told(process, cloudpickle.dumps((tuple(drivers), pool, session, staying)))
    except OSError as e:
        raise SkypoolError(_not_begun(pool, f"{e}; see {file}")) from e
    if said != _READY:
        raise SkypoolError(_not_begun(pool, f"see {file}"))
    return process.pid


def _not_begun(pool: str, why: str) -> str:
    return f"the background process that ends pool {pool!r} could not start ({why}): run `skypool down {pool}`"


def _started(pool: str, file: Path) -> subprocess.Popen[bytes]:
    """Start the process that ends a pool. It waits for its task on stdin, answers on stdout, and logs to `file`."""
    path = os.pathsep.join(each or os.getcwd() for each in sys.path)
    log = _opened_log(file)
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "skypool.rental.reaper_process", pool],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # signals of the terminal do not reach it
        )
    finally:
        os.close(log)
    process.returncode = 0  # nobody waits for the process; this avoids Python's warning
    return process


def _told(process: subprocess.Popen[bytes], errand: bytes) -> bytes:
    """Send the pickled task to the process, and return its answer: `_READY`, or b"" if it ended without one."""
    with cast(IO[bytes], process.stdin) as pipe, cast(IO[bytes], process.stdout) as answer:
        pipe.write(errand)
        pipe.close()
        for line in answer:  # a `sitecustomize` may print as well
            if line.endswith(_READY):
                return _READY
        return b""


def log_of(pool: str, session: str) -> Path:
    """Return the path of the log of the process that ends a pool, in the user's state folder. It may not exist."""
    return user_folders.state() / "reaper" / f"{pool}-{session}.log"


def _opened_log(file: Path) -> int:
    """Open a log file for appending, which only this user can read; the null device if that fails. Delete old logs."""
    try:
        private.folder(file.parent)
        for old in file.parent.glob("*.log"):
            with contextlib.suppress(FileNotFoundError):  # another process may have deleted it
                if old.stat().st_mtime < time.time() - _MONTH:
                    old.unlink()
        return private.opened(file, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


def main() -> int:
    """Run the process that `terminate_in_background` starts, and return its exit status.

    The process reads its pickled task from stdin: the arguments of `terminate_in_background`. It then writes the line
    "ready" to stdout. After that, stdout goes to the log, as stderr does from the start. Blocks until the machines have
    ended, or for up to a day. If the machines stay for a while, it first waits until that time is over. The status is 0
    if every machine has ended, or another process or its run has the pool, otherwise 1.
    """
    drivers, pool, session, staying = pickle.load(sys.stdin.buffer)
    ledger = Ledger.here(_log)
    is_detached = _is_detached(ledger, session)
    if not staying and not is_detached:
        ledger.ending(pool)
    os.write(1, _READY)
    os.dup2(2, 1)
    if is_detached:
        _log(f"the machine of run {pool} belongs to it, and ends by itself; `skypool down {pool}` ends it earlier")
        return 0
    if staying:
        _log(f"process {os.getpid()} waits until the machines of pool {pool} need not stay any longer")
        if not _stayed(ledger, session):
            _log(f"another process has pool {pool}, or has ended it")
            return 0
    _log(f"process {os.getpid()} ends pool {pool} at {', '.join(each.name for each in drivers)}")
    try:
        terminate_all(drivers, pool, ledger, session, patience=_PATIENCE, stubborn=True, say=_log)
    except Exception as e:  # noqa: BLE001 - only the log can show the error
        _log(f"gave up: {type(e).__name__}: {e}")
        return 1
    _log(f"every machine of pool {pool} has ended")
    return 0


def _is_detached(ledger: Ledger, session: str) -> bool:
    """Return True if the machine was handed over to its run, which goes on."""
    try:
        record = ledger.record(session)
    except LedgerError as e:
        _log(f"it is not known whether the run was handed over to its machine: {e}")
        return False
    return record is not None and record.is_detached and record.is_kept(time.time())


def _stayed(ledger: Ledger, session: str) -> bool:
    """Wait until a pool's machines stay no longer. Return False if another process has the pool, or may have it."""
    try:
        while (record := ledger.record(session)) is not None and record.is_staying:
            left = record.lasts - time.time()
            if left <= 0:
                return ledger.end_stay(session)
            time.sleep(min(left, _LOOK))
    except LedgerError as e:  # the machines end themselves, or `skypool gc` ends them
        _log(f"gave up: {e}")
    return False


def _log(text: str) -> None:
    sys.stderr.write(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
