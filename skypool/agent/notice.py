"""Waits for the provider's spot notice, and tells the running calls when it arrives, or when the node stops them soon.

The agent runs a program of the provider's driver that waits for the notice.
"""

from __future__ import annotations

import math
import os
import select
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from skypool.runtime import PROVIDER, Attended, Interruption, Reason

if TYPE_CHECKING:
    import subprocess

    from skypool.agent.shared_page import SharedPage

_PAUSE = 1.0
"""Seconds between the first two starts of a program that ends without a notice. Each later pause is twice as long."""
_LONGEST_PAUSE = 60.0
"""The greatest number of seconds between two starts of the program."""
_LOOK = 0.5
"""Seconds between two looks whether the node stops its calls soon."""
_MOST = 4096
"""The number of bytes after which the program's output is no longer read."""


class Lookout:
    """Watcher in the agent: runs a program of the driver that reports a spot notice.

    If the program ends without reporting a notice, it is started again after a pause. Creating this object starts
    nothing; `tick` starts the program.

    Args:
        source: the text of the Python program, which prints the time of the interruption, in seconds since 1970, as
            soon as it is announced; "" if the driver has no such program.
        watch: `watch(fd, events, callback)` makes the agent's loop call `callback` when these epoll events occur on the
            file descriptor `fd`. With events 0, the loop stops watching `fd`.
        on_notice: called once, with the time at which the provider takes the machine back, in seconds since 1970.
    """

    def __init__(
        self,
        source: str,
        watch: Callable[[int, int, Callable[[], None]], None],
        on_notice: Callable[[float], None],
    ) -> None:
        self._source = source
        self._watch = watch
        self._on_notice = on_notice
        self._child: subprocess.Popen[bytes] | None = None
        self._said = b""
        self._pause = _PAUSE
        self._next = 0.0

    def tick(self, now: float) -> None:
        """Start the driver's program if it is not running and the pause since its last start is over.

        `now` is the time of the agent's clock, in seconds. Pauses between two starts are at least 1 s, and double up to
        60 s. Does nothing if there is no program, or after a notice has been reported.
        """
        if self._source and self._child is None and now >= self._next:
            self._next = now + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            self._start()

    def _start(self) -> None:
        """Start the driver's program and watch its stdout. If that fails, print the error; a later `tick` retries."""
        import subprocess  # imported here because few agents need it

        argv = [sys.executable, "-I", "-S", "-c", self._source]
        try:
            self._child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        except OSError as e:
            print(f"the program that watches for interruptions cannot be started: {e}", file=sys.stderr, flush=True)
            return
        self._said = b""
        self._watch(self._fd, select.EPOLLIN, self._read)

    @property
    def _fd(self) -> int:
        """The file descriptor of the stdout of the driver's program, which must be running."""
        assert self._child is not None
        assert self._child.stdout is not None
        return self._child.stdout.fileno()

    def _read(self) -> None:
        """Read the program's output. After its first line or `_MOST` bytes, end the program, and report the time."""
        data = os.read(self._fd, _MOST)
        self._said += data
        if data and b"\n" not in self._said and len(self._said) < _MOST:
            return
        self._end()
        at = _seconds(self._said)
        if at is None:
            # `tick` starts the program again
            print(
                f"the program that watches for interruptions ended with {self._said[:200]!r}",
                file=sys.stderr,
                flush=True,
            )
        else:
            self._source = ""
            self._on_notice(at)

    def _end(self) -> None:
        """Stop watching the output of the driver's program, kill the program, and wait until it has ended."""
        self._watch(self._fd, 0, self._read)
        assert self._child is not None
        self._child.kill()
        with self._child:  # leaving the block closes the pipe and waits for the process
            self._child = None


def _seconds(said: bytes) -> float | None:
    """Return the time in the first line of `said`, in seconds since 1970; None if it is not a finite number."""
    try:
        at = float(said.partition(b"\n")[0])
    except ValueError:
        return None
    return at if math.isfinite(at) else None


class Herald:
    """Notifier in a worker: it calls the callbacks `on_interruption` of the user's calls, in another thread.

    When a notice arrives, the running call's callback is called once: again for a notice that comes after that one was
    withdrawn, and for one of the provider after that of another end. If a call begins after a notice, its callback is
    called at once. For a process of a gang, notices for machines of the gang's other processes count, too.

    Args:
        fd: the read end of a pipe. End of file means that `page` has the time of the interruption, or that the agent
            has died.
        page: the memory that the agent and its workers share.
        slot: the number of the worker's slot.
    """

    def __init__(self, fd: int, page: SharedPage, slot: int = 0) -> None:
        self._fd = fd
        self._page = page
        self._slot = slot
        self._begin()

    def _begin(self) -> None:
        """Reset all state, as if no call were running and no thread were started. An earlier thread is not stopped."""
        self._changed = threading.Condition()
        self._attended: Attended | None = None
        self._told: Reason | None = None  # what the running call knows
        self._telling = False
        self._thread: threading.Thread | None = None

    forget = _begin
    """Reset the notifier in a forked child process, where it calls no `on_interruption`."""

    def attend(self, attended: Attended) -> Callable[..., Any]:
        """Note that a call begins, and return its function, which the caller must call. Does not wait.

        `attended` has this function and the callback `on_interruption`. When there is a notice, or at once if it has
        come before, another thread calls the callback.
        """
        with self._changed:
            self._attended, self._told = attended, None
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="skypool-notice", daemon=True)
            self._thread.start()
        return attended.function

    def leave(self) -> None:
        """Note that the running call has ended, so that its `on_interruption` is not called any more.

        If its `on_interruption` is running now, waits until that has ended.
        """
        if self._attended is not None or self._telling:
            with self._changed:
                self._attended = None
                while self._telling:
                    self._changed.wait()

    def _run(self) -> None:
        """Call `on_interruption` of the running and of each later call while there is a notice, in a thread."""
        ended = select.poll()
        ended.register(self._fd, select.POLLIN)
        has_ended = False
        while True:
            # the end of the file says that there is news; a notice that the node itself stops its calls says nothing
            if not has_ended:
                has_ended = bool(ended.poll(1000 * _LOOK)) and not os.read(self._fd, 1)
                if has_ended and not self._page.announced(self._slot):
                    return  # the agent has died
            with self._changed:
                notice = self._untold()
                if notice is None and has_ended:
                    self._changed.wait(_LOOK)
                    notice = self._untold()
                attended = self._attended
                if notice is None or attended is None:
                    continue
                self._told = notice.reason
                self._telling = True
            try:
                _tell(attended, notice)
            finally:
                with self._changed:
                    self._telling = False
                    self._changed.notify_all()

    def _untold(self) -> Interruption | None:
        """Return the notice that the running call has not been told."""
        at, reason = self._page.announced(self._slot), self._page.reason(self._slot)
        if not at:
            self._told = None
        if self._attended is None or not at or self._told in (reason, PROVIDER):
            return None
        return Interruption(at, reason) if self._told is None or reason == PROVIDER else None


def _tell(attended: Attended, interruption: Interruption) -> None:
    """Call `on_interruption` of a call, and run a coroutine that it returns. Its exceptions are printed, not raised."""
    try:
        done = attended.on_interruption(interruption)
        if isinstance(done, types.CoroutineType):
            import asyncio  # imported here because few nodes need it, and it would delay the start of each

            asyncio.run(done)
    except BaseException as e:  # noqa: BLE001 - the call itself goes on
        name = getattr(attended.on_interruption, "__qualname__", repr(attended.on_interruption))
        tb = e.__traceback__.tb_next if e.__traceback__ is not None else None
        text = "".join(traceback.format_exception(type(e), e, tb))
        sys.stderr.write(f"[skypool] on_interruption={name} failed; the call goes on:\n{text}")
