"""Spot notices on the node: runs the driver's program that waits for a notice, and tells the running call."""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import select
import sys
import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from skypool.runtime import Attended, Interruption

if TYPE_CHECKING:
    import subprocess

    from skypool.agent.shared_page import SharedPage

_PAUSE = 1.0
"""Seconds after which the program is started again that ended without a notice; doubled each time."""
_LONGEST_PAUSE = 60.0
"""Seconds of the longest such pause."""
_MOST = 4096
"""Bytes that the program may print for a notice."""


class Lookout:
    """The agent's: runs the driver's program that waits for the provider's word, and again whenever it fails.

    Args:
        source: the program, as `Access.watch` says; "" for none.
        watch: watch(fd, events, callback) for the agent's loop; events 0 to stop.
        on_notice: called once, with the time that the program prints.
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
        """Start the program if it should run and does not; `now` in monotonic seconds."""
        if self._source and self._child is None and now >= self._next:
            self._next = now + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            self._start()

    def _start(self) -> None:
        import subprocess  # few agents need it

        argv = [sys.executable, "-I", "-S", "-c", self._source]
        try:
            self._child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        except OSError as e:
            print(f"the watch for an interruption cannot be started: {e}", file=sys.stderr, flush=True)
            return
        self._said = b""
        self._watch(self._fd, select.EPOLLIN, self._read)

    @property
    def _fd(self) -> int:
        assert self._child is not None
        assert self._child.stdout is not None
        return self._child.stdout.fileno()

    def _read(self) -> None:
        data = os.read(self._fd, _MOST)
        self._said += data
        if data and b"\n" not in self._said and len(self._said) < _MOST:
            return
        self._end()
        at = _seconds(self._said)
        if at is None:
            print(f"the watch for an interruption ended with {self._said[:200]!r}", file=sys.stderr, flush=True)
        else:
            self._source = ""
            self._on_notice(at)

    def _end(self) -> None:
        self._watch(self._fd, 0, self._read)
        assert self._child is not None
        self._child.kill()
        with self._child:  # closes the pipe and waits
            self._child = None


def _seconds(said: bytes) -> float | None:
    """The time in the first line, None if there is none."""
    try:
        at = float(said.partition(b"\n")[0])
    except ValueError:
        return None
    return at if math.isfinite(at) else None


class Herald:
    """The worker's: calls `on_interruption` of the call that runs, in a thread beside it, once.

    Args:
        fd: at its end as soon as the page says when the machine goes.
    """

    def __init__(self, fd: int, page: SharedPage) -> None:
        self._fd = fd
        self._page = page
        self._begin()

    def _begin(self) -> None:
        self._changed = threading.Condition()
        self._untold: Attended | None = None
        self._telling = False
        self._thread: threading.Thread | None = None

    forget = _begin
    """In a forked child: nothing is to be told there."""

    def attend(self, attended: Attended) -> Callable[..., Any]:
        """A call begins; its function. If the machine's end is known already, it is told at once."""
        with self._changed:
            self._untold = attended
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="skypool-notice", daemon=True)
            self._thread.start()
        return attended.function

    def leave(self) -> None:
        """The call has ended; what it wanted to do about an interruption ends first."""
        if self._untold is not None or self._telling:
            with self._changed:
                self._untold = None
                while self._telling:
                    self._changed.wait()

    def _run(self) -> None:
        os.read(self._fd, 1)
        while at := self._page.interruption:  # 0 if it is the agent that went
            with self._changed:
                while self._untold is None:
                    self._changed.wait()
                attended = self._untold
                self._untold = None
                self._telling = True
            try:
                _tell(attended, Interruption(at))
            finally:
                with self._changed:
                    self._telling = False
                    self._changed.notify_all()


def _tell(attended: Attended, interruption: Interruption) -> None:
    """A failure is shown and fails nothing."""
    try:
        done = attended.on_interruption(interruption)
        if inspect.iscoroutine(done):
            asyncio.run(done)
    except BaseException as e:  # noqa: BLE001 - the call itself goes on
        name = getattr(attended.on_interruption, "__qualname__", repr(attended.on_interruption))
        tb = e.__traceback__.tb_next if e.__traceback__ is not None else None
        text = "".join(traceback.format_exception(type(e), e, tb))
        sys.stderr.write(f"[skypool] on_interruption={name} failed; the call goes on:\n{text}")
