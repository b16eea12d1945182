"""`Entry`: a file, folder or link of a transfer; what a folder has of them, and what is in a file.

A node gets the text of this module, so it uses the standard library only.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from skypool.files.frames import BLOCK, Refused

PARTS = ".skypool-parts"
"""How the names of folders and files begin in which files come until they are whole: see `is_part`."""
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
OF_REPOSITORIES = ("HEAD", "objects", "refs", "commondir")
"""The names by which git takes a folder for a repository, in the groups of `_REPOSITORIES`."""
_REPOSITORIES = (frozenset({"head", "objects", "refs"}), frozenset({"head", "commondir"}))
_LONGEST_NAME = 255
_LONGEST_PATH = 4096
_LATEST = (1 << 62) - 1
_ZEROS = bytes(BLOCK)
_NO_NAME = re.compile(r"(?:\A|/)\.{0,2}(?:/|\Z)")
"""Matches the part of a path that is empty, "." or ".."."""


class Entry(NamedTuple):
    """A file, folder or symbolic link that the sender has.

    Attributes:
        path: the path below the folder that is sent, with "/".
        kind: "f" for a file, "w" for one that is being written, "d" for a folder, "l" for a link, "s" for what the
            sender cannot read.
        mode: the permissions, without those of other users to act as the owner (set-user-ID and the like).
        size: the size of a file in bytes.
        mtime: the time of the last change, in nanoseconds since 1970.
        text: the target of a link, or why something cannot be read.
        data: the bytes of a file that are not in holes.
    """

    path: str
    kind: str
    mode: int = 0
    size: int = 0
    mtime: int = 0
    text: str = ""
    data: int = 0


def walk(root: str, leaves_out: Callable[[str, bool], bool]) -> Iterator[Entry]:
    """Yield what is below a folder. The contents of a folder come together, sorted, and then those of its folders.

    Args:
        root: the folder. Raises OSError if it cannot be read.
        leaves_out: tells of a path below `root`, and whether it is a folder, if it is left out.
    """
    pending = [""]
    while pending:
        folder = pending.pop()
        try:
            with os.scandir(os.path.join(root, folder)) as found:
                names = sorted(found, key=lambda each: each.name)
        except OSError as e:
            if not folder:
                raise
            yield Entry(folder, "s", text=e.strerror or str(e))
            continue
        below = []
        for each in names:
            path = f"{folder}/{each.name}" if folder else each.name
            entry = entry_of(path, each.path)
            if is_part(each.name) or leaves_out(path, entry.kind == "d"):
                continue
            yield entry
            if entry.kind == "d":
                below.append(path)
        pending += reversed(below)


def entry_of(path: str, file: str) -> Entry:
    """Return the entry for a file, folder or link, whose path in the transfer is `path`."""
    try:
        about = os.lstat(file)
        mode = stat.S_IMODE(about.st_mode) & 0o777
        if stat.S_ISREG(about.st_mode):
            data = min(_data_of(file), about.st_size) if _has_holes(about) else about.st_size
            return Entry(path, "f", mode, about.st_size, _mtime(about), "", data)
        if stat.S_ISDIR(about.st_mode):
            return Entry(path, "d", mode, 0, _mtime(about))
        if stat.S_ISLNK(about.st_mode):
            return Entry(path, "l", text=os.readlink(file))
    except OSError as e:
        return Entry(path, "s", text=e.strerror or str(e))
    return Entry(path, "s", text="it is no file, folder or link")


def _mtime(about: os.stat_result) -> int:
    """Return a time of change that `told_entry` allows."""
    return max(-_LATEST, min(about.st_mtime_ns, _LATEST))


def is_part(name: str) -> bool:
    """Return True for the name of a folder or file in which files come until they are whole. It is never sent."""
    return name.casefold().startswith(PARTS)


def _has_holes(about: os.stat_result) -> bool:
    """Return True if holes may be looked for. Systems other than Linux name new data as holes."""
    return sys.platform == "linux" and about.st_blocks * 512 < about.st_size


def _data_of(path: str) -> int:
    """Return the bytes of a file that are not in holes."""
    file = os.open(path, READ)
    try:
        size = os.fstat(file).st_size
        at = count = 0
        while at < size:
            data, at = _data_from(file, at, size)
            count += at - data
        return count
    finally:
        os.close(file)


def pieces(file: int, begin: int, end: int) -> Iterator[bytes | int]:
    """Yield the data of a file, and the lengths of its holes. Stops early if the file gets shorter."""
    at = begin
    holes = _has_holes(os.fstat(file))
    while at < end:
        data, hole = _data_from(file, at, end) if holes else (at, end)
        if data > at:
            yield data - at
        at = data
        while at < hole:
            content = os.pread(file, min(BLOCK, hole - at), at)
            if not content:
                return
            yield content
            at += len(content)


def _data_from(file: int, at: int, end: int) -> tuple[int, int]:
    """Return where the next data of a file begins, and where it ends."""
    try:
        data = os.lseek(file, at, os.SEEK_DATA)
        return min(data, end), min(os.lseek(file, data, os.SEEK_HOLE), end)
    except OSError as e:
        if e.errno == errno.ENXIO:
            return end, end  # no data until the end
        return at, end  # a file system that knows no holes


def digest_of(file: int, check: Callable[[], None] = lambda: None) -> str:
    """Return a hash of a file's contents; "" if it gets shorter. Holes are read in no time, and have the hash of zeros.

    `check` is called for each block, and may raise an error.
    """
    made = hashlib.blake2b(digest_size=20)
    about = os.fstat(file)
    size, holes = about.st_size, _has_holes(about)
    at = 0
    while at < size:
        data, hole = _data_from(file, at, size) if holes else (0, size)
        at = max(at, data - data % BLOCK)
        while at < hole:
            check()
            content = os.pread(file, BLOCK, at)
            if not content:
                return ""
            if content != _ZEROS[: len(content)]:
                made.update(at.to_bytes(8))
                made.update(content)
            at += BLOCK
        at = max(at, hole - hole % BLOCK) if hole < size else size
    made.update(size.to_bytes(8))
    return made.hexdigest()


def told_entry(said: Any) -> Entry:
    """Return one entry of a list that the other end sent. Raises Refused if it is not valid."""
    path, kind, mode, size, mtime, text, data = said
    if (
        not (type(mode) is type(size) is type(data) is int and mode >= 0 and size >= 0 and data >= 0)
        or kind not in ("f", "w", "d", "l", "s")
        or type(mtime) is not int
        or type(text) is not str
        or "\0" in text
        or len(text) > _LONGEST_PATH
        or (kind in ("l", "s")) != bool(text)
        or not -_LATEST <= mtime <= _LATEST
        or not data <= size < 1 << 62
    ):
        raise Refused("the other end sent an entry that makes no sense")
    return Entry(told_path(path), kind, mode & 0o777, size, mtime, text, data)


def told_path(path: Any) -> str:
    """Return a path that lies below a folder. Raises Refused for others, such as absolute ones and those with ".."."""
    if type(path) is not str:
        raise Refused("the other end sent a path that is no text")
    if "\0" in path or len(path) > _LONGEST_PATH or _NO_NAME.search(path):
        raise Refused(f"the other end sent the path {path[:100]!r}, which does not lie below the folder")
    try:
        size = len(path) if path.isascii() else len(os.fsencode(path))
        is_long = size > _LONGEST_NAME and max(len(os.fsencode(name)) for name in path.split("/")) > _LONGEST_NAME
    except UnicodeEncodeError:
        raise Refused(f"the other end sent the path {path[:100]!r}, which this system cannot have") from None
    if is_long or (PARTS in path.casefold() and any(map(is_part, path.split("/")))):
        raise Refused(f"the other end sent the path {path[:100]!r}, which cannot be a file's name")
    return path


def leads_out(path: str, target: str) -> bool:
    """Return True if a link at `path` may lead out of the folder, by itself or with other links.

    A target that goes up only at its beginning stays inside: it starts in a folder that is no link, and the same holds
    for each link on its way.
    """
    if target.startswith("/"):
        return True
    names = [name for name in target.split("/") if name not in ("", ".")]
    ups = 0
    while ups < len(names) and names[ups] == "..":
        ups += 1
    return ups > path.count("/") or ".." in names[ups:]


def is_repository(names: Collection[str]) -> bool:
    """Return True if git takes a folder with these names, in lower case, for a repository without a working tree."""
    return any(each.issubset(names) for each in _REPOSITORIES)
