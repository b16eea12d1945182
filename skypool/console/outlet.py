"""Writer to the user's stdout and stderr that never blocks the thread that writes.

The thread that hears events also keeps the nodes' connections alive. If a reader that has stopped reading
(`script.py | less`, Ctrl-S) could block it, it would cost the pool its nodes.
"""

from __future__ import annotations

import contextlib
import contextvars
import io
import os
import select
import stat
import sys
import threading
from collections.abc import Iterable
from typing import Literal, TextIO

from skypool.console.lines import Lines, harmless

MOST = 64 << 20
"""Characters that wait for a slow reader."""
PATIENCE = 1.0
"""Seconds that whoever writes waits for room among them; then its text is dropped, and that is said."""
_PIECE = select.PIPE_BUF
"""Bytes that a pipe takes without blocking once it says it is writable."""


class Backlog:
    """Text that waits to be written, in order and bounded."""

    def __init__(self, most: int = MOST, patience: float = PATIENCE) -> None:
        self._most = most
        self._patience = patience
        self._changed = threading.Condition()
        self._waiting: list[str] = []
        self._size = 0
        self._dropped = 0

    def put(self, text: str) -> None:
        """Add text; dropped if there is no room for it in time."""
        with self._changed:
            if self._size >= self._most and not self._dropped:
                self._changed.wait_for(lambda: self._size < self._most, self._patience)
            if self._size >= self._most:
                self._dropped += len(text)
                return
            self._waiting.append(text)
            self._size += len(text)

    def take(self) -> str:
        """All that waits, and how much was dropped after it."""
        with self._changed:
            text = "".join(self._waiting)
            if self._dropped:
                text += f"[skypool] nobody read this for a while: {self._dropped:,} characters dropped here\n"
            self._waiting.clear()
            self._size = 0
            self._dropped = 0
            self._changed.notify_all()
        return text


class Above:
    """Stands in for `sys.stdout` or `sys.stderr` while a view is on their terminal: text goes above the view.

    A line without an end, such as a progress bar's, is kept for the view to show. All else is the file's own.
    """

    def __init__(self, file: TextIO, backlog: Backlog) -> None:
        self._file = file
        self._backlog = backlog
        self._lock = threading.RLock()
        self._lines = Lines()
        self._drawn = True

    def write(self, text: str) -> int:
        """Write as the file would; after the view has ended the file does."""
        with self._lock:
            if not self._drawn:
                return self._file.write(text)
            if whole := self._lines.feed(text):
                self._backlog.put(harmless(whole))
        return len(text)

    def write_lines(self, lines: str) -> None:
        """Write whole lines that do not belong to an unfinished one."""
        with self._lock:
            if self._drawn:
                self._backlog.put(harmless(lines))
            else:
                self._file.write(lines)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write one after the other."""
        self.write("".join(lines))

    def flush(self) -> None:
        """Nothing while the view is drawn: what is written is shown soon anyway."""
        if not self._drawn:
            self._file.flush()

    @property
    def unfinished(self) -> str:
        """The line that has no end yet."""
        with self._lock:
            return self._lines.unfinished

    def take_unfinished(self) -> str:
        """Return the line that has no end yet, and keep it no longer."""
        with self._lock:
            return self._lines.finish().removesuffix("\n")

    def end(self) -> str:
        """The view ends, and the file itself is written to from here on. The line that has no end yet."""
        with self._lock:
            self._drawn = False
            return self._lines.finish().removesuffix("\n")

    def forget(self) -> None:
        """As `end`, in a forked child, where another thread may have held the lock."""
        self._lock = threading.RLock()
        self._drawn = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)


class Outlet:
    """`sys.stdout` or `sys.stderr`, whatever it is at the time.

    Writing never blocks for long: what a pipe or terminal does not take at once is written by a thread that
    lives while the reader is behind. When it breaks (`script.py | head`), that is said once, and then it is
    quiet until it is another file.
    """

    def __init__(self, name: Literal["stdout", "stderr"]) -> None:
        self._name = name
        self._lock = threading.RLock()
        self._backlog = Backlog()
        self._thread: threading.Thread | None = None
        self._broken: TextIO | None = None

    def write(self, text: str) -> None:
        """Write whole lines; from any thread."""
        with self._lock:
            if self._thread is None:
                text = self._write(text, wait=False)
                if not text:
                    return
                self._thread = threading.Thread(target=self._catch_up, name=f"skypool-{self._name}", daemon=True)
                self._thread.start()
            self._backlog.put(text)

    def drain(self, timeout: float | None = None) -> None:
        """Wait until all is written, at most `timeout` seconds."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout)

    def _catch_up(self) -> None:
        while True:
            text = self._backlog.take()
            if text:
                self._write(text, wait=True)
                continue
            with self._lock:
                text = self._backlog.take()
                if not text:
                    self._thread = None
                    return
            self._write(text, wait=True)

    def _write(self, text: str, *, wait: bool) -> str:
        """Write, and return what would have blocked."""
        file: TextIO | Above | None = getattr(sys, self._name)
        if file is None or file is self._broken:
            return ""
        if isinstance(file, Above):
            file.write_lines(text)
            return ""
        try:
            fd = _may_block(file)
            if fd is not None:
                return _send(file, fd, text, wait)
            _context().run(_write_to, file, _encodable(text, file))
        except (OSError, ValueError) as e:  # a ValueError: it is closed
            self._give_up(file, e)
        return ""

    def _give_up(self, file: TextIO, error: Exception) -> None:
        self._broken = file
        if self._name == "stderr":
            return  # there is nobody left to tell
        note = f"skypool: stdout is gone ({error}): what functions print there is no longer shown\n"
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(note)
            sys.stderr.flush()


_shared: dict[str, Outlet] = {}


def outlet(name: Literal["stdout", "stderr"]) -> Outlet:
    """The one outlet of this process, for all pools: they share the file, its slow reader and its end."""
    return _shared.setdefault(name, Outlet(name))


os.register_at_fork(after_in_child=_shared.clear)


def _context() -> contextvars.Context:
    """Return the context to write in.

    A notebook shows text in the cell whose context it was written in. The threads of skypool belong to no cell,
    although Python and ipykernel hand them the context of the cell that started them. An empty context stands for
    the cell that runs now: the one that waits for a call.
    """
    is_ours = threading.current_thread().name.startswith("skypool-")
    return contextvars.Context() if is_ours else contextvars.copy_context()


def _write_to(file: TextIO, text: str) -> None:
    file.write(text)
    file.flush()


def _may_block(file: TextIO) -> int | None:
    """Its descriptor, if it is a pipe, a terminal or the like, whose reader may be slow."""
    if type(file) is not io.TextIOWrapper:
        return None
    try:
        fd = file.fileno()
    except io.UnsupportedOperation:
        return None
    return None if stat.S_ISREG(os.fstat(fd).st_mode) else fd


def _send(file: TextIO, fd: int, text: str, wait: bool) -> str:
    """Write straight to the descriptor: a reader that is gone leaves nothing in the file's buffer then."""
    step = _PIECE if text.isascii() else _PIECE // 4
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    for start in range(0, len(text), step):
        if not _takes_more(poll, fd, wait):
            return text[start:]
        if start == 0:
            file.flush()  # the user's own text was first
        data = text[start : start + step].encode(file.encoding or "utf-8", "backslashreplace")
        while data:
            try:
                data = data[os.write(fd, data) :]
            except BlockingIOError:
                _takes_more(poll, fd, wait=True)
    return ""


def _takes_more(poll: select.poll, fd: int, wait: bool) -> bool:
    """Return whether the descriptor can be written to.

    Args:
        wait: until it can.
    """
    ready = poll.poll(None if wait else 0)
    if ready and ready[0][1] & select.POLLNVAL:  # on macOS poll() does not know terminals, but select() does
        return bool(select.select([], [fd], [], None if wait else 0)[1])
    return bool(ready)


def _encodable(text: str, file: TextIO) -> str:
    """As it can be written in the file's encoding."""
    encoding = getattr(file, "encoding", None)
    if text.isascii() or not encoding or encoding.lower().replace("-", "") == "utf8":
        return text
    return text.encode(encoding, "backslashreplace").decode(encoding)
