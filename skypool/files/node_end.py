"""The node's end of a transfer, as a program: `main`.

A node gets the text of this module, so it uses the standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
import time
from collections.abc import Iterable, Iterator

from skypool.files.entries import Entry, entry_of, is_repository, leads_out, walk
from skypool.files.frames import Broken, Channel, Kind, Refused
from skypool.files.open_files import open_for_writing
from skypool.files.receiving import Receiver
from skypool.files.sending import Sender


def main(role: str, path: str, options: str) -> None:
    """Send or receive through stdin and stdout, and end the process.

    Args:
        role: "send" or "receive".
        path: the file or folder.
        options: those of `Receiver` or of `_send`, as JSON.
    """
    channel = Channel(0, 1)
    try:
        if role == "receive":
            Receiver(channel, os.path.expanduser(path), **json.loads(options)).run()
        else:
            _send(channel, os.path.expanduser(path), **json.loads(options))
    except Broken as e:
        sys.exit(str(e))
    except Exception as e:  # noqa: BLE001 - the client tells the user
        with contextlib.suppress(Broken):
            channel.tell(Kind.FAILED, _why(path, e))
        sys.exit(1)


def _why(path: str, error: Exception) -> str:
    """Return what the client is told about an error."""
    if isinstance(error, Refused):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename or path}: {error.strerror}"
    return f"{type(error).__name__}: {error}"


def _send(channel: Channel, path: str, since: int | None = None, known: str = "", settled: bool = False) -> None:
    """Send a file or a folder; with `since`, of the folder only what is new since then.

    A file is new if it has changed since, or if the file `known` does not have its path and inode. What cannot be used
    elsewhere is left out: repositories of git, links that lead out of the folder, and what is no file, folder or link.
    With `settled`, the client is told which files are being written, and what changes while it is read is left out.
    """
    before: dict[str, int] = {}
    if known:
        with open(known, "rb") as noted:
            os.utime(noted.fileno())  # it is in use, so that nobody removes it
            words = noted.read().split(b"\0")
            before = {os.fsdecode(below): int(inode) for below, inode in zip(words[::2], words[1::2], strict=False)}
    is_git_itself = since is not None and _is_repository(path)

    def leaves_out(below: str, is_folder: bool) -> bool:
        if since is None:
            return False
        if is_git_itself and below.casefold() == "head":  # without which the rest is no repository
            return True
        whole = os.path.join(path, below)
        try:
            about = os.lstat(whole)
        except OSError:  # it is gone again
            return True
        is_git = os.path.basename(below).lower() == ".git"
        if is_folder:
            return is_git or _is_repository(whole)
        if is_git:  # a file that names another folder
            return True
        if stat.S_ISLNK(about.st_mode):
            target = os.readlink(whole)
            return leads_out(below, _inner(path, below, target))
        return not stat.S_ISREG(about.st_mode) or (about.st_ctime_ns < since and before.get(below) == about.st_ino)

    if stat.S_ISDIR(os.stat(path).st_mode):
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY))  # raises OSError now rather than in the middle
        entries = walk(path, leaves_out)
        if since is not None:
            entries = _with_relative_links(path, _without_old_folders(path, entries, since))
        sender = Sender([channel], path, "", _with_writers(path, entries) if settled else entries, again=not settled)
    else:
        name, file = os.path.basename(path), os.path.realpath(path)
        sender = Sender([channel], file, name, [entry_of(name, file)])
    sender.run()
    for error in sender.lost.values():
        raise error


def _with_writers(path: str, entries: Iterable[Entry]) -> Iterator[Entry]:
    """Yield the entries of a folder, those of files that are being written as such."""
    writers = _Writers()
    for each in entries:
        if each.kind == "f":
            with contextlib.suppress(FileNotFoundError):  # then it cannot be read either
                if writers.have(os.lstat(os.path.join(path, each.path))):
                    yield each._replace(kind="w")
                    continue
        yield each


class _Writers:
    """The files that processes of this node have open for writing."""

    def __init__(self) -> None:
        self._files: set[tuple[int, int]] = set()
        self._looked = 0.0

    def have(self, about: os.stat_result) -> bool:
        """Return True if a file is among them, by a look at all processes that is later than its last change."""
        changed = about.st_ctime if about.st_ctime < time.time() + 1 else 0.0  # by another clock, which tells nothing
        if self._looked < changed + 0.1:  # clocks of file systems are coarse
            self._looked = time.time()
            self._files = {*open_for_writing()}
        return (about.st_dev, about.st_ino) in self._files


def _is_repository(folder: str) -> bool:
    """Return True if git could take a folder for a repository, on a disk to which capital letters mean nothing, too."""
    try:
        return is_repository({each.casefold() for each in os.listdir(folder)})
    except OSError:  # it is no folder, gone again, or may not be read
        return False


def _without_old_folders(path: str, entries: Iterable[Entry], since: int) -> Iterator[Entry]:
    """Yield the entries of a folder, without folders that have not changed since and have nothing new in them."""
    old: dict[str, Entry] = {}
    for each in entries:
        if each.kind == "d":
            with contextlib.suppress(OSError):
                if os.lstat(os.path.join(path, each.path)).st_ctime_ns < since:
                    old[each.path] = each
                    continue
        parts = each.path.split("/")
        for depth in range(1, len(parts)):
            above = old.pop("/".join(parts[:depth]), None)
            if above is not None:
                yield above
        yield each


def _with_relative_links(path: str, entries: Iterable[Entry]) -> Iterator[Entry]:
    """Yield the entries of a folder, with relative links in place of absolute ones to what is in it."""
    for each in entries:
        yield each._replace(text=_inner(path, each.path, each.text)) if each.kind == "l" else each


def _inner(path: str, below: str, target: str) -> str:
    """Return the target of the link `below` in a folder: a relative one, if it is an absolute one into the folder."""
    root = os.path.realpath(path)
    for each in (path, root):
        if target == each or target.startswith(f"{each}/"):
            here = os.path.dirname(os.path.join(each, below))
            return os.path.relpath(target, here)
    return target
