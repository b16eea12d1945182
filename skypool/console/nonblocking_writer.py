"""Writes to the user's stdout and stderr without blocking the calling thread for long.

The reader of the output may have stopped reading (`script.py | less`, Ctrl-S). The thread that receives events must not
wait for it, because this thread also keeps the nodes' connections alive.
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
from collections import deque
from collections.abc import Callable, Iterable
from typing import Literal, TextIO

from skypool.console.whole_lines import Lines, harmless
from skypool.text import encodable

MOST = 8 << 20
"""Maximum number of characters that wait for a slow reader (the terminal or program that takes the output)."""
PATIENCE = 1.0
"""Seconds that a write waits for room in a full queue. Then its text is dropped, and a note about that is written."""
_REST = 5.0
"""A thread ends if it has nothing to write for this many seconds."""
_LAST = 10.0
"""The most seconds that `drain` waits, by default, for a file that is no pipe and no terminal."""
_PIECE = select.PIPE_BUF
"""Number of bytes that a pipe takes without blocking as soon as the pipe is writable."""


class Backlog:
    """Queue of text that waits to be written. Any thread may use it.

    The queue is full at `most` characters. `put` then waits for room, at most `patience` seconds.
    """

    def __init__(self, most: int = MOST, patience: float = PATIENCE) -> None:
        self._most = most
        self._patience = patience
        self._changed = threading.Condition()
        self._waiting: list[str] = []
        self._size = 0
        self._dropped = 0

    def put(self, text: str) -> None:
        """Add text to the queue. If the queue is still full after `patience` seconds, drop the text without an error.

        From then on, `put` drops text without waiting, until `take` empties the queue.
        """
        with self._changed:
            if self._size >= self._most and not self._dropped:
                self._changed.wait_for(lambda: self._size < self._most, self._patience)
            if self._size >= self._most:
                self._dropped += len(text)
                return
            self._waiting.append(text)
            self._size += len(text)

    def take(self) -> str:
        """Return all waiting text and empty the queue; "" if no text waits. Does not block.

        If text was dropped, the result ends with a note that says how many characters are missing.
        """
        with self._changed:
            text = "".join(self._waiting)
            if self._dropped:
                text += f"[skypool] output was read too slowly: {self._dropped:,} characters are missing here\n"
            self._waiting.clear()
            self._size = 0
            self._dropped = 0
            self._changed.notify_all()
        return text


class Above:
    """Stand-in for `sys.stdout` or `sys.stderr` while a live view is drawn: text goes above the view.

    Whole lines go to `backlog`, from which the view prints them. The view shows an unfinished line at the bottom.
    `file` is the replaced stream, from which all other attributes come.
    """

    def __init__(self, file: TextIO, backlog: Backlog) -> None:
        self._file = file
        self._backlog = backlog
        self._lock = threading.RLock()
        self._lines = Lines()
        self._drawn = True

    def write(self, text: str) -> int:
        """Write text above the view, or to the file itself after the view has ended. Return the length of the text.

        Control codes that move the cursor are removed. An unfinished line is kept until its newline comes.
        """
        with self._lock:
            if not self._drawn:
                return self._file.write(text)
            if whole := self._lines.feed(text):
                self._backlog.put(harmless(whole))
        return len(text)

    def write_lines(self, lines: str) -> None:
        """Write whole lines as `write` does. An unfinished line that `write` has kept stays as it is."""
        with self._lock:
            if self._drawn:
                self._backlog.put(harmless(lines))
            else:
                self._file.write(lines)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several pieces of text, one after the other. No newlines are added."""
        self.write("".join(lines))

    def flush(self) -> None:
        """Flush the file if the view has ended. Before that, do nothing, because the view will show the text soon."""
        if not self._drawn:
            self._file.flush()

    @property
    def unfinished(self) -> str:
        """The unfinished line; "" if there is none. Of a progress bar or the like, it is only the last state."""
        with self._lock:
            return self._lines.unfinished

    def take_unfinished(self) -> str:
        """Return the unfinished line and forget it; "" if there is none."""
        with self._lock:
            return self._lines.finish().removesuffix("\n")

    def end(self) -> str:
        """Let later writes go to the file itself. Return the unfinished line ("" if there is none) and forget it."""
        with self._lock:
            self._drawn = False
            return self._lines.finish().removesuffix("\n")

    def forget(self) -> None:
        """Let writes go to the file itself in a forked child process, which has no view.

        An unfinished line is not written. The lock is made anew, because another thread may have held it at the fork.
        """
        self._lock = threading.RLock()
        self._drawn = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)


class Scribe:
    """Writer to files that cannot be asked if a write would block, such as a regular file on a slow disk.

    A thread of its own, named `name`, does the writing. It ends when nothing is left to write. Any thread may use this
    object. When a file cannot be written, the writing thread calls `on_error` as (file, error).
    """

    def __init__(self, name: str, on_error: Callable[[TextIO, Exception], None]) -> None:
        self._name = name
        self._on_error = on_error
        self._changed = threading.Condition()  # guards all that follows
        self._waiting: deque[tuple[TextIO, str, contextvars.Context]] = deque()
        self._size = 0
        self._put = self._written = 0
        self._is_late = False
        self._thread: threading.Thread | None = None

    def write(self, file: TextIO, text: str) -> None:
        """Write text to a file, and wait until it is written, for `PATIENCE` (1) second at most.

        If a write takes longer, this and later calls only queue their text, until all queued text is written. If too
        much text is queued, further text is dropped. If no thread can be started, the calling thread writes.
        """
        with self._changed:
            if self._size + len(text) > MOST:
                return
            self._waiting.append((file, text, _context()))
            self._size += len(text)
            self._put += 1
            number = self._put
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # the interpreter exits
                    self._thread = None
            else:
                self._changed.notify_all()
            if self._thread is not None:
                if not self._is_late:
                    self._is_late = not self._changed.wait_for(lambda: self._written >= number, PATIENCE)
                return
        self._work()

    def drain(self, timeout: float) -> None:
        """Wait until all is written, at most `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._written >= self._put, timeout)

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._is_late = False
                    if threading.current_thread() is not self._thread:
                        return
                    if not self._changed.wait_for(lambda: self._waiting, _REST):
                        self._thread = None
                        return
                file, text, context = self._waiting.popleft()
                self._size -= len(text)
            try:
                context.run(_write_to, file, _encodable(text, file))
            except Exception as e:  # noqa: BLE001 - a file of the user's own may raise anything
                self._on_error(file, e)
            with self._changed:
                self._written += 1
                self._changed.notify_all()


class Outlet:
    """Writer to the current `sys.stdout` or `sys.stderr`, which each write looks up anew. Any thread may use it.

    Writing never blocks for long. A background thread writes what a pipe or terminal does not take at once. A second
    thread writes to files of other kinds, and `write` waits for it a second at most. If stdout breaks (`script.py |
    head`), this is reported once, on stderr. Text for a broken file is dropped, until `sys` has another file.
    """

    def __init__(self, name: Literal["stdout", "stderr"]) -> None:
        self._name = name
        self._lock = threading.RLock()
        self._backlog = Backlog()
        self._thread: threading.Thread | None = None
        self._broken: TextIO | None = None
        self._scribe = Scribe(f"skypool-{name}", self._give_up)

    def write(self, text: str) -> None:
        """Write whole lines. Any thread may call this. If the file is missing, closed or broken, the text is dropped.

        Text that cannot be written at once is queued. If the queue is full, wait up to a second for room, and then
        drop the text.
        """
        with self._lock:
            if self._thread is None:
                text = self._write(text, wait=False)
                if not text:
                    return
                self._thread = threading.Thread(target=self._catch_up, name=f"skypool-{self._name}", daemon=True)
                self._thread.start()
            self._backlog.put(text)

    def drain(self, timeout: float | None = None) -> None:
        """Wait until all text is written, or until `timeout` is over: this raises no error.

        `timeout` is in seconds. None waits without limit for a pipe or terminal, and `_LAST` (10) seconds for files of
        other kinds.
        """
        self._scribe.drain(_LAST if timeout is None else timeout)
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
        """Write text, and return the part that the file does not take at once. With `wait`, block and write it, too."""
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
            self._scribe.write(file, text)
        except (OSError, ValueError) as e:  # a closed file raises ValueError
            self._give_up(file, e)
        return ""

    def _give_up(self, file: TextIO, error: Exception) -> None:
        self._broken = file
        if self._name == "stderr":
            return  # there is no other place for a message
        note = f"skypool: stdout cannot be written ({error}), so what functions print to it is no longer shown\n"
        with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):
            sys.stderr.write(note)
            sys.stderr.flush()


_shared: dict[str, Outlet] = {}


def outlet(name: Literal["stdout", "stderr"]) -> Outlet:
    """Return this process's writer for "stdout" or "stderr", which all pools share. It is made on first use."""
    return _shared.setdefault(name, Outlet(name))


os.register_at_fork(after_in_child=_shared.clear)


def _context() -> contextvars.Context:
    """Return the context to write in. In skypool's threads it is empty, so that a notebook uses the running cell."""
    is_ours = threading.current_thread().name.startswith("skypool-")
    return contextvars.Context() if is_ours else contextvars.copy_context()


def _write_to(file: TextIO, text: str) -> None:
    file.write(text)
    file.flush()


def _may_block(file: TextIO) -> int | None:
    """Return the descriptor of a file if writing to it may block, as with a pipe or terminal; None for other files."""
    if type(file) is not io.TextIOWrapper:
        return None
    try:
        fd = file.fileno()
    except io.UnsupportedOperation:
        return None
    return None if stat.S_ISREG(os.fstat(fd).st_mode) else fd


def _send(file: TextIO, fd: int, text: str, wait: bool) -> str:
    """Write text to a file's descriptor. Return the part that is not taken at once; with `wait`, block and write it."""
    step = _PIECE if text.isascii() else _PIECE // 4
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    for start in range(0, len(text), step):
        if not _takes_more(poll, fd, wait):
            return text[start:]
        if start == 0:
            file.flush()  # text that the user printed before must come first
        data = text[start : start + step].encode(file.encoding or "utf-8", "backslashreplace")
        while data:
            try:
                data = data[os.write(fd, data) :]
            except BlockingIOError:
                _takes_more(poll, fd, wait=True)
    return ""


def _takes_more(poll: select.poll, fd: int, wait: bool) -> bool:
    """Return True if the descriptor can be written to now. With `wait`, block until it can."""
    ready = poll.poll(None if wait else 0)
    if ready and ready[0][1] & select.POLLNVAL:  # on macOS poll() does not support terminals, but select() does
        return bool(select.select([], [fd], [], None if wait else 0)[1])
    return bool(ready)


def _encodable(text: str, file: TextIO) -> str:
    """Return text with backslash escapes for characters that the file's encoding (or else UTF-8) cannot have."""
    text = encodable(text)
    encoding = getattr(file, "encoding", None)
    if text.isascii() or not encoding or encoding.lower().replace("-", "") == "utf8":
        return text
    return text.encode(encoding, "backslashreplace").decode(encoding)
