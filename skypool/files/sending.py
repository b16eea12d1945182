"""`Sender`: sends a folder, or a file, to one or more receivers.

A node gets the text of this module, so it uses the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import queue
import stat
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from skypool.files.entries import READ, Entry, digest_of, entry_of, pieces, told_path
from skypool.files.frames import (
    PART,
    SIGN,
    VERSION,
    Broken,
    Channel,
    Kind,
    Refused,
    in_parts,
    nonsense,
    packed,
    unpacked,
)

_AHEAD = 16
"""The number of parts of the list that are sent before the answer to the first of them."""
_TRIES = 3
"""How often a file is read that changes meanwhile."""
_WAITING = 1 << 21
"""The bytes of frames that may wait to be sent to one receiver."""
_REASON = 5.0
"""Seconds to wait for the reason why the other end takes no more data."""


class Sender:
    """Sends one folder, or one file, to receivers. Each byte is read once, however many receivers there are.

    Args:
        channels: a channel to each receiver.
        root: the folder whose contents are sent, or the path of the file.
        name: the name of the file if `root` is a file, otherwise "".
        entries: what is sent.
        leaves_out: tells of a path below `root`, and whether it is a folder, if it is left out. Receivers that delete
            ask for it.
        delete: the receivers delete what `root` does not have.
        again: files that change while they are read are listed again. False leaves them out.
        on_want: called with the number of bytes that are missing of one more file.
        on_file: called with the path of each file when it begins.
        on_bytes: called with the number of bytes that were read.

    Attributes:
        lost: by the index of a channel, why a receiver did not get all.
        ends: by the index of a channel, what a receiver said at the end.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        root: str,
        name: str,
        entries: Iterable[Entry],
        *,
        leaves_out: Callable[[str, bool], bool] = lambda path, is_folder: False,
        delete: bool = False,
        again: bool = True,
        on_want: Callable[[int], None] = lambda size: None,
        on_file: Callable[[str], None] = lambda path: None,
        on_bytes: Callable[[int], None] = lambda size: None,
    ) -> None:
        self._root = root
        self._name = name
        self._entries = entries
        self.leaves_out, self.delete = leaves_out, delete
        self._again = again
        self._on_want, self._on_file, self._on_bytes = on_want, on_file, on_bytes
        self.lost: dict[int, Broken | Refused] = {}
        self.ends: dict[int, dict[str, Any]] = {}
        self._lines = [_Line(number, channel, self) for number, channel in enumerate(channels)]
        self._listed = 0
        self._changed: list[Entry] = []

    def run(self) -> None:
        """Send everything. Errors of single receivers are in `lost` afterwards. Call `stop` then, also after an error.

        Raises OSError if the folder cannot be read.
        """
        for each in self._lines:
            each.start()
        self._put(Kind.BEGIN, packed({"version": VERSION, "name": self._name}))
        self._list(Kind.LIST, self._entries)
        self._put(Kind.LISTED)
        for _ in range(_TRIES - 1 if self._again else 0):
            changed, self._changed = self._changed, []
            self._list(Kind.AGAIN, [entry_of(each.path, self._path(each.path)) for each in changed])
        changed = self._changed if self._again else []
        self._list(Kind.AGAIN, [Entry(each.path, "s", text="it changed while it was read") for each in changed])
        self._put(Kind.END)
        for each in self._lines:
            each.finish()

    def stop(self) -> None:
        """End the threads. Their connections must be shut, or all must be sent."""
        for each in self._lines:
            each.stop()

    def _put(self, kind: int, content: bytes = b"") -> None:
        for each in self._lines:
            each.put(kind, content)

    def _list(self, kind: int, entries: Iterable[Entry]) -> None:
        """Send a list, and what the receivers lack of it."""
        waiting: list[tuple[int, list[Entry]]] = []
        for part in in_parts(entries, lambda each: len(each.path) + len(each.text)):
            if len(self.lost) == len(self._lines):
                return
            self._put(kind, packed(part))
            waiting.append((self._listed, part))
            self._listed += len(part)
            if len(waiting) > _AHEAD:
                self._answer(*waiting.pop(0))
        for each in waiting:
            self._answer(*each)

    def _answer(self, first: int, part: list[Entry]) -> None:
        """Send what the receivers lack of one part of the list."""
        wants: dict[tuple[int, int], list[_Line]] = {}
        digests: dict[int, str] = {}
        for line in self._lines:
            answer = line.want(first, part)
            for index, offset in answer.send:
                wants.setdefault((index, offset), []).append(line)
            for index, digest in answer.hashes:
                if index not in digests:
                    digests[index] = self._digest(part[index - first])
                if digests[index] == digest:
                    line.put(Kind.SAME, struct.pack(">Q", index))
                else:
                    wants.setdefault((index, 0), []).append(line)
        for index, offset in sorted(wants):
            self._on_want(part[index - first].size - offset)
        for (index, offset), lines in sorted(wants.items(), key=lambda each: each[0]):
            self._send(index, part[index - first], offset, lines)

    def _path(self, path: str) -> str:
        return self._root if self._name else os.path.join(self._root, path)

    def _digest(self, entry: Entry) -> str:
        """Return the hash of a file; "" if it cannot be read, or has changed since it was listed."""
        try:
            with open(os.open(self._path(entry.path), READ), "rb") as file:
                return digest_of(file.fileno()) if _is(entry, file.fileno()) else ""
        except OSError:
            return ""  # `_send` tells

    def _send(self, index: int, entry: Entry, offset: int, lines: list[_Line]) -> None:
        """Send one file from `offset` on. One that changes meanwhile is noted in `_changed`."""
        self._on_file(entry.path)
        digest, why, same = "", "", True
        try:
            with open(os.open(self._path(entry.path), READ), "rb", buffering=0) as opened:
                file = opened.fileno()
                same = _is(entry, file)
                if same:
                    lines = [each for each in lines if each.put(Kind.FILE, struct.pack(">QQ", index, offset))]
                    whole = self._send_data(file, offset, entry, lines)
                    digest = digest_of(file) if offset and whole else ""
                    same = whole and _is(entry, file)
        except OSError as e:
            why = e.strerror or str(e)
        if not same and any(each.works for each in lines):
            self._changed.append(entry)
        for line in lines:
            if same:
                line.put(Kind.DONE, packed([index, digest, why]))
            else:
                line.put(Kind.CHANGED, struct.pack(">Q", index))

    def _send_data(self, file: int, offset: int, entry: Entry, lines: list[_Line]) -> bool:
        """Send the data of a file, but no more of them than were listed. Return True if that was all."""
        at, left = offset, entry.data
        for piece in pieces(file, offset, entry.size):
            if isinstance(piece, int):
                kind, content, size = Kind.HOLE, struct.pack(">Q", piece), piece
            else:
                kind, content, size = Kind.DATA, piece, len(piece)
                left -= size
                if left < 0:
                    return False
            lines = [each for each in lines if each.put(kind, content)]
            if not lines:
                return False
            at += size
            if kind == Kind.DATA:
                self._on_bytes(size)
        return at == entry.size


def _is(entry: Entry, file: int) -> bool:
    """Return True if an open file is as it was listed."""
    about = os.fstat(file)
    return stat.S_ISREG(about.st_mode) and (about.st_size, about.st_mtime_ns) == (entry.size, entry.mtime)


class _Answer(NamedTuple):
    send: list[tuple[int, int]]
    hashes: list[tuple[int, str]]


class _Line:
    """The way to one receiver: a thread that sends, and one that receives its answers."""

    def __init__(self, number: int, channel: Channel, sender: Sender) -> None:
        self._number = number
        self._channel = channel
        self._sender = sender
        self._changes = threading.Condition()
        self._frames: list[tuple[int, bytes]] = []
        self._bytes = 0
        self._ended = self._stopped = False
        self._asked = self._answers = 0
        self._in: queue.Queue[_Answer | dict[str, Any] | None] = queue.Queue()
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._write, self._read)]

    @property
    def works(self) -> bool:
        """True while the receiver is not lost."""
        return self._number not in self._sender.lost

    def start(self) -> None:
        for each in self._threads:
            each.start()

    def stop(self) -> None:
        if self._number not in self._sender.ends:
            self._lose(Broken("the transfer was stopped"))
        with self._changes:
            self._stopped = True
            self._changes.notify_all()
        for each in self._threads:
            each.join()

    def put(self, kind: int, content: bytes = b"") -> bool:
        """Send a frame, soon. Wait while others wait to be sent. Return False if this receiver is lost."""
        with self._changes:
            self._changes.wait_for(lambda: self._bytes < _WAITING or not self.works)
            if not self.works:
                return False
            self._frames.append((kind, content))
            self._bytes += len(content)
            self._ended = self._ended or kind == Kind.END
            self._asked += kind in (Kind.LIST, Kind.AGAIN)
            self._changes.notify_all()
            return True

    def want(self, first: int, part: list[Entry]) -> _Answer:
        """Wait for the answer to one part of the list, and return it. It is empty if the receiver is lost."""
        said = self._in.get()
        if not isinstance(said, _Answer):
            self._in.put(None)
            return _Answer([], [])
        files = {first + number: each.size for number, each in enumerate(part) if each.kind in ("f", "w")}
        asked = [index for index, _ in said.send] + [index for index, _ in said.hashes]
        if (
            len(set(asked)) < len(asked)
            or not files.keys() >= set(asked)
            or not all(0 <= offset <= files[index] for index, offset in said.send)
        ):
            self._lose(Refused("the other end asked for a file that it was not told of"))
            return _Answer([], [])
        return said

    def finish(self) -> None:
        """Wait until the receiver has told that it has all."""
        if not isinstance(self._in.get(), dict):
            self._lose(nonsense())

    def _lose(self, error: Broken | Refused) -> None:
        with self._changes:
            if self._number in self._sender.ends:
                return
            self._sender.lost.setdefault(self._number, error)
            self._frames = []
            self._changes.notify_all()
        with contextlib.suppress(queue.Empty):
            while True:
                self._in.get_nowait()
        self._in.put(None)

    def _write(self) -> None:
        try:
            while True:
                with self._changes:
                    self._changes.wait_for(lambda: self._frames or self._stopped, SIGN / 4)
                    frames, self._frames, self._bytes = self._frames, [], 0
                    self._changes.notify_all()
                    if not frames and (self._stopped or not self.works or self._number in self._sender.ends):
                        return
                if frames:
                    self._channel.send_all(frames)
                else:
                    self._channel.sign()
        except Broken as e:
            self._threads[1].join(_REASON)  # it may still read why the other end has gone
            self._lose(e)
        except Exception as e:  # noqa: BLE001 - without a word, `put` would wait for ever
            self._lose(Refused(f"{type(e).__name__}: {e}"))

    def _read(self) -> None:
        try:
            while True:
                kind, content = self._channel.receive()
                said = unpacked(content)
                if kind == Kind.WANT and self._answers < self._asked:
                    self._answers += 1
                    self._in.put(_answer(said))
                elif kind == Kind.EXTRA and self._ended and self._sender.delete and len(said) <= PART:
                    left_out = [self._sender.leaves_out(told_path(path), bool(is_folder)) for path, is_folder in said]
                    self.put(Kind.KEEP, packed([number for number, each in enumerate(left_out) if each]))
                elif kind == Kind.END and self._ended:
                    told = _end(said)
                    with self._changes:
                        if self.works:
                            self._sender.ends[self._number] = told
                    self._in.put(told)
                    return
                else:
                    raise nonsense()
        except (Broken, Refused) as e:
            self._lose(e)
        except Exception as e:  # noqa: BLE001 - without a word, `want` would wait for ever
            self._lose(nonsense(e))


def _answer(said: Any) -> _Answer:
    """Return a checked answer to a part of the list."""
    if len(said["send"]) + len(said["hash"]) > PART:
        raise nonsense()
    send = [(index, offset) for index, offset in said["send"]]
    hashes = [(index, digest) for index, digest in said["hash"]]
    if not all(type(value) is int for pair in send for value in pair):
        raise nonsense()
    if not all(type(index) is int and type(digest) is str and len(digest) < 100 for index, digest in hashes):
        raise nonsense()
    return _Answer(send, hashes)


def _end(said: Any) -> dict[str, Any]:
    """Return a checked account of what a receiver has done."""
    numbers = {name: said[name] for name in ("files", "bytes", "deleted", "failed")}
    errors = said["errors"]
    if not all(type(each) is int and 0 <= each < 1 << 62 for each in numbers.values()):
        raise nonsense()
    if not all(type(each) is str for each in errors):
        raise nonsense()
    return {**numbers, "errors": [each[:1000] for each in errors[:20]]}
