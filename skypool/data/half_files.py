"""`HalfFiles`: remembers which files of a folder were being written when their programs were stopped."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from skypool.data.local_files import State, journal_lines, written_by


@dataclass
class _Half:
    """A file that was being written: the number of the stop, when its programs had ended, and its state as of then."""

    number: int
    end: int | None = None
    state: State | None = None


class HalfFiles:
    """Files of a folder that programs had open for writing when they were stopped. Any thread may use it.

    Such a file is a half until it changes after its programs have ended, under whatever name it has by then.

    Args:
        folder: the folder.
        path: the file in which they are noted, for the next mover.
    """

    def __init__(self, folder: str, path: str) -> None:
        self._folder, self._path = folder, path
        self._lock = threading.Lock()
        self._halves: dict[tuple[int, int], _Half] = {}  # by device and inode
        self._ended: set[int] = set()
        for line in journal_lines(path):
            match line:
                case [int(number), int(at)]:
                    self._end(number, at)
                case [int(number), int(device), int(inode)]:
                    self._halves[device, inode] = _Half(number)

    def forget(self) -> None:
        """Forget all files, as other programs begin."""
        with self._lock, suppress(FileNotFoundError):
            self._halves = {}
            os.unlink(self._path)

    def note(self, number: int, pids: Collection[int] | None) -> bool:
        """Note which files processes write that are stopped next. Return False if they have ended already.

        Args:
            number: what `end` is told of them.
            pids: the processes; None for all of this user.
        """
        found = written_by(self._folder, pids)
        with self._lock:
            if number in self._ended:  # others may be writing by now
                return False
            self._halves |= {each: _Half(number) for each in found}
            self._append([number, *each] for each in found)
        return True

    def end(self, number: int, at: int) -> None:
        """Note when the processes had ended, in nanoseconds since 1970. What changes later is whole."""
        with self._lock:
            self._ended.add(number)
            if self._end(number, at):
                self._append([[number, at]])

    def _end(self, number: int, at: int) -> bool:
        """Note an end. Return False if the processes wrote no files."""
        ended = [each for each in self._halves.values() if each.number == number]
        for each in ended:
            each.end = at
        return bool(ended)

    def among(self, files: Mapping[str, State]) -> set[str]:
        """Return those of the files that are halves."""
        with self._lock:
            inodes = {inode for _, inode in self._halves}
            return {path for path, each in files.items() if each.inode in inodes and self._is_half(path, each)}

    def _is_half(self, path: str, state: State) -> bool:
        try:
            about = os.stat(os.path.join(self._folder, path))
        except OSError:  # it is gone
            return False
        half = self._halves.get((about.st_dev, about.st_ino))
        if half is None or half.end is None:
            return half is not None
        # not the time of the last change, which a copy may have from the original; later, a new mode changes nothing
        if half.state is None and about.st_ctime_ns <= half.end:
            half.state = State(about.st_ino, about.st_size, about.st_mtime_ns)
        return half.state == state

    def _append(self, lines: Iterable[Sequence[int]]) -> None:
        with suppress(OSError), open(self._path, "a", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(line)}\n" for line in lines)
