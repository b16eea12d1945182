"""`Guard`: asks what ends this machine for the written end, which only comes nearer, and for an end now.

The guard of a rented machine is a process of root (see `skypool.drivers.userdata`). This module asks it by overwriting
the file `END`, beside the file of the lease, with "SERIAL SECONDS HEIR SERIAL". Other programs may write it, too: the
earliest end counts. The guard has saved the end when its file `HELD` has the answer.

On a machine without such a guard, such as the user's own, the keeper ends the node, and holds the end in its memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import re
import secrets
import stat
import sys
import threading
import time
from collections.abc import Generator
from io import FileIO

from skypool.agent.shared_page import SharedPage
from skypool.clock import elapsed

END = "end"
"""Name of the file with the request, in the folder of the lease file."""
HELD = "held"
"""Name of the file with the guard's answer, in the same folder. Only root can write there."""
PATIENCE = 30.0
"""Seconds in which the guard must answer. It looks every 5 s, and then waits for its disk."""
_AGAIN = 0.5
"""Seconds after which an unanswered request is written anew, with the seconds that are left by then."""
_LOOK = 0.05
"""Seconds between two looks at the answer."""
_MOST = 99_999_999
"""The most seconds of a request: three years. A later end is asked for as this one."""
_WIDTH = 127
"""The number of characters of each request. Each one overwrites the one before."""
_LONGEST = 255
"""The most bytes of an answer."""
_DIGEST = re.compile("[0-9a-f]{64}")
_ANSWER = re.compile(rb"(\d+) -?\d+ (-|[0-9a-f]+)\n")
_NOBODY = "-"
"""The word for no heir."""


class Asking:
    """A request to the guard that waits for its answer.

    Args:
        steps: looks for the answer at each step, and returns it at last.
    """

    def __init__(self, steps: Generator[None, None, bool]) -> None:
        self._steps = steps
        self._answer: bool | None = None

    def look(self) -> bool | None:
        """Look for the answer without waiting. Returns None as long as there is none. Call it several times a second.

        After the time in which an answer must come, it is False.
        """
        if self._answer is None:
            try:
                next(self._steps)
            except StopIteration as e:
                self._answer = bool(e.value)
            except OSError as e:
                self._answer = _refused(f"the guard of this machine cannot be asked for an end: {e}")
        return self._answer

    def wait(self) -> bool:
        """Return the answer when it has come."""
        while (answer := self.look()) is None:
            time.sleep(_LOOK)
        return answer


class Guard:
    """Asks for the end of this machine at its guard, or for the end of this node at the keeper if there is no guard.

    Its methods raise nothing: the reason of a False is printed to stderr. `give_end` and `stop_now` block, and several
    threads may call them at once. `ask_end` and `ask_stop` are for a loop that must not block.

    Args:
        lease_file: the path of the file by which the guard grants a lease; "" if the machine has no guard.
        page: memory shared with the keeper.
        patience: seconds in which an answer must come.
    """

    def __init__(self, lease_file: str, page: SharedPage, patience: float = PATIENCE) -> None:
        self._folder = os.path.dirname(lease_file)
        self._page = page
        self._patience = patience
        self._lock = threading.Lock()  # guards the heir, and the page's `end_asked`
        self._heir = ""

    def give_end(self, seconds: float, heir_digest: str) -> bool:
        """Let the machine end in `seconds` at the latest, whoever asks for more time later.

        An earlier end that was given before stays, and so does the first heir. True means that the guard holds an end
        that is not later than this one, and this heir, also after a reboot. After False it may hold the end, too.

        Args:
            seconds: seconds from now; 0 or less for an end now.
            heir_digest: SHA-256 of the heir, in 64 hex digits. Another heir than the first is refused.
        """
        return self.ask_end(seconds, heir_digest).wait()

    def stop_now(self, keep_seconds: float = 0.0) -> bool:
        """Let the machine end in `keep_seconds`, or earlier if its end comes before that. This cannot be taken back.

        The guard stops the machine itself, and does not wait for the end of the lease. Until then the lease must be
        renewed as ever. Returns True if the guard will do so.
        """
        return self.ask_stop(keep_seconds).wait()

    def ask_end(self, seconds: float, heir_digest: str) -> Asking:
        """Ask for what `give_end` gives, without waiting for the answer."""
        if not _DIGEST.fullmatch(heir_digest):
            return Asking(_no(f"the digest of an heir has 64 hex digits, not {heir_digest!r}"))
        return self._ask(seconds, heir_digest)

    def ask_stop(self, keep_seconds: float = 0.0) -> Asking:
        """Ask for what `stop_now` does, without waiting for the answer."""
        return self._ask(keep_seconds, _NOBODY)

    def _ask(self, seconds: float, heir: str) -> Asking:
        if math.isnan(seconds):
            return Asking(_no("a time in seconds is not a number"))
        end = elapsed() + max(0.0, min(seconds, _MOST))
        asking = Asking(self._ask_guard(end, heir) if self._folder else self._ask_keeper(end, heir))
        asking.look()
        return asking

    # --- the guard -------------------------------------------------------------------------------------------

    def _ask_guard(self, end: float, heir: str) -> Generator[None, None, bool]:
        """Write the request, and write it anew until the guard has answered one of these writes."""
        until = elapsed() + self._patience
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield from self._turn(folder)
            serials: set[int] = set()
            written, trouble = -math.inf, ""
            while elapsed() < until:
                try:
                    if elapsed() - written >= _AGAIN:
                        written = elapsed()
                        serials.add(self._write(end - written, heir))
                    answer = self._answer()
                except OSError as e:  # the guard replaces what is no file
                    trouble, answer = f": {e}", None
                if answer is not None and answer[0] in serials:
                    is_heir = heir in (_NOBODY, answer[1])
                    return is_heir or _refused("the guard of this machine holds the end of another heir")
                yield
        finally:
            fcntl.flock(folder, fcntl.LOCK_UN)  # a worker that was forked meanwhile has the folder open, too
            os.close(folder)
        return _refused(f"the guard of this machine has not taken its end within {self._patience:g} s{trouble}")

    def _turn(self, folder: int) -> Generator[None, None, None]:
        """Wait until nobody else asks the guard. One that is stuck is not waited for: the earlier end counts."""
        until = elapsed() + self._patience / 2
        while elapsed() < until:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            yield

    def _write(self, seconds: float, heir: str) -> int:
        """Write a request over the last one. Return its serial number."""
        serial = secrets.randbelow(10**15)
        request = f"{serial} {max(0, math.floor(seconds))} {heir} {serial}"
        with _opened(os.path.join(self._folder, END), "r+") as file:
            file.write(f"{request:<{_WIDTH}}\n".encode())
        return serial

    def _answer(self) -> tuple[int, str] | None:
        """Return serial number and heir of the guard's last answer; None if there is none."""
        try:
            with _opened(os.path.join(self._folder, HELD), "r") as file:
                match = _ANSWER.fullmatch(file.read(_LONGEST) or b"")
        except FileNotFoundError:
            return None
        return None if match is None else (int(match[1]), match[2].decode())

    # --- the keeper ------------------------------------------------------------------------------------------

    def _ask_keeper(self, end: float, heir: str) -> Generator[None, None, bool]:
        """Let the keeper end the node."""
        when = time.monotonic() + end - elapsed()
        with self._lock:
            if heir not in (_NOBODY, self._heir) and self._heir:
                return _refused("the keeper of this node holds the end of another heir")
            self._heir = self._heir if heir == _NOBODY else heir
            self._page.end_asked = min(when, self._page.end_asked or math.inf)
        until = elapsed() + self._patience
        while elapsed() < until:
            if 0.0 < self._page.end_held <= when:
                return True
            yield
        return _refused(f"the keeper of this node has not taken its end within {self._patience:g} s")


def _opened(path: str, mode: str) -> FileIO:
    """Open a file without a buffer. Raises OSError for anything else: it must not block, or lead elsewhere."""
    extra = os.O_NOFOLLOW | os.O_NONBLOCK
    file = FileIO(path, mode, opener=lambda path, flags: os.open(path, flags | extra))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(f"{path} is not a file")
    return file


def _refused(why: str) -> bool:
    print(why, file=sys.stderr, flush=True)
    return False


def _no(why: str) -> Generator[None, None, bool]:
    yield from ()
    return _refused(why)
