"""`HalfFiles`: remembers which files of a folder were being written when their programs were stopped."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress

from skypool.data.local_files import State, journal_lines, written_by

_LOOK = 0.05, 1.0
"""The first and the longest pause in seconds between two looks whether programs have closed their files."""


class HalfFiles:
    """Files of a folder whose programs were stopped while they wrote. Any thread may use it.

    Args:
        path: the file in which they are noted, for the next mover.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._inodes: dict[str, int] = {}
        self._states: dict[str, State] = {}
        for line in journal_lines(path):
            match line:
                case [str(name), int(inode)]:
                    self._inodes[name] = inode
                case [str(name), [int(inode), int(size), int(changed)]]:
                    self._states[name] = State(inode, size, changed)

    def forget(self) -> None:
        """Forget all files, as other programs begin."""
        with self._lock, suppress(FileNotFoundError):
            self._inodes, self._states = {}, {}
            os.unlink(self._path)

    def note(self, inodes: Mapping[str, int]) -> None:
        """Note files, by their paths in the folder, of which all programs are stopped next."""
        with self._lock:
            self._inodes |= inodes
            self._append(inodes.items())

    def find(self, folder: str, pids: Collection[int]) -> set[str]:
        """Return the paths of files in the folder that these processes write."""
        below = f"{os.path.realpath(folder)}/"
        return {path.removeprefix(below) for path in written_by(pids) if path.startswith(below)}

    def follow(self, folder: str, pids: Collection[int], paths: set[str]) -> None:
        """Wait until the processes have closed these files. Note each as it is then: a later change makes it whole."""
        pause, longest = _LOOK
        while paths:
            closed = paths - self.find(folder, pids)
            states: dict[str, State] = {}
            for path in closed:
                with suppress(OSError):  # it is gone
                    about = os.stat(os.path.join(folder, path))
                    states[path] = State(about.st_ino, about.st_size, about.st_mtime_ns)
            with self._lock:
                self._states |= states
                self._append(states.items())
            paths = paths - closed
            time.sleep(pause)
            pause = min(longest, 1.1 * pause)

    def among(self, files: Mapping[str, State]) -> set[str]:
        """Return those of the files that are halves."""
        with self._lock:
            if not (self._states or self._inodes):
                return set()
            states = {*self._states.values()}
            return {path for path, each in files.items() if each in states or self._inodes.get(path) == each.inode}

    def _append(self, lines: Iterable[tuple[str, object]]) -> None:
        with suppress(OSError), open(self._path, "a", encoding="utf-8", errors="surrogateescape") as file:
            file.writelines(f"{json.dumps(line)}\n" for line in lines)
