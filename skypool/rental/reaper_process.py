"""Terminates all machines of a pool in a process of its own, which outlives the client and its terminal."""

from __future__ import annotations

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
from skypool.errors import SkypoolError
from skypool.rental.ledger import Ledger
from skypool.rental.reaper import terminate_all

_PATIENCE = 24 * 3600.0
"""Seconds for which the process tries: the user may renew credentials, or be back the next day."""
_MONTH = 30 * 86400.0
"""Seconds for which logs are kept."""
_READY = b"ready\n"
"""What the process says once it has its errand."""


def terminate_in_background(drivers: Sequence[Driver], pool: str, session: str) -> int:
    """Let a process of its own terminate the pool, which outlives this one and its terminal. Return its pid.

    It tries for a day, and writes to `log_of(pool, session)` what it does. The drivers go to it through a pipe, secrets
    included, and are never on disk. Comes back when it is at work.

    Raises:
        SkypoolError: it could not be started; what runs then ends itself when its lease is over, where it can.
    """
    import cloudpickle  # drivers of the user's own script travel, too

    file = log_of(pool, session)
    try:
        process = _started(pool, file)
        said = _told(process, cloudpickle.dumps((tuple(drivers), pool, session)))
    except OSError as e:
        raise SkypoolError(_not_begun(pool, f"{e}; see {file}")) from e
    if said != _READY:
        raise SkypoolError(_not_begun(pool, f"see {file}"))
    return process.pid


def _not_begun(pool: str, why: str) -> str:
    return f"the process that was to end pool {pool!r} could not begin ({why}): end it with `skypool down {pool}`"


def _started(pool: str, file: Path) -> subprocess.Popen[bytes]:
    """It waits for its errand."""
    path = os.pathsep.join(each or os.getcwd() for each in sys.path)
    log = _opened_log(file)
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "skypool.rental.reaper_process", pool],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
    finally:
        os.close(log)
    process.returncode = 0  # nobody waits for it, and Python need not warn of that
    return process


def _told(process: subprocess.Popen[bytes], errand: bytes) -> bytes:
    """What it answers to its errand."""
    with cast(IO[bytes], process.stdin) as pipe, cast(IO[bytes], process.stdout) as answer:
        pipe.write(errand)
        pipe.close()
        return answer.readline()


def log_of(pool: str, session: str) -> Path:
    """Where the process that ends a pool writes what it does."""
    import platformdirs  # not on a node, where modules that import skypool are imported too

    return Path(platformdirs.user_state_dir("skypool")) / "reaper" / f"{pool}-{session}.log"


def _opened_log(file: Path) -> int:
    """A file descriptor; where no log can be written the work is done without one."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        for old in file.parent.glob("*.log"):
            if old.stat().st_mtime < time.time() - _MONTH:
                old.unlink(missing_ok=True)
        return os.open(file, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


def main() -> int:
    """The process that `terminate_in_background` starts: its errand is on stdin, stderr is its log."""
    drivers, pool, session = pickle.load(sys.stdin.buffer)
    ledger = Ledger.here(_log)
    ledger.ending(pool)
    os.write(1, _READY)
    os.dup2(2, 1)
    _log(f"process {os.getpid()} ends pool {pool} at {', '.join(each.name for each in drivers)}")
    try:
        terminate_all(drivers, pool, ledger, session, patience=_PATIENCE, stubborn=True, say=_log)
    except Exception as e:  # noqa: BLE001 - whatever it is, the log and the ledger are where it can be told
        _log(f"gave up: {type(e).__name__}: {e}")
        return 1
    _log(f"every machine of pool {pool} has ended")
    return 0


def _log(text: str) -> None:
    sys.stderr.write(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
