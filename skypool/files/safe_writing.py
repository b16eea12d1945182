"""`Folder`: a folder that receives, changed without following a link. `Parts`: its files that have come only partly.

A node gets the text of this module, so it uses the standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import platform
import stat
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator

from skypool.files.entries import PARTS, READ, Entry, digest_of, is_part, pieces
from skypool.files.frames import Refused

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OLD = 86400.0
"""Seconds after which what a transfer has left is removed by another one."""
_WAIT = 65.0
"""Seconds to wait for another transfer into the same folder. A lost one ends within 60 s."""


class Folder:
    """A folder, which is made if it does not exist, and what is below it.

    Paths are below the folder, with "/". No link is followed, but for one that is the folder itself.

    Attributes:
        root: the descriptor of the folder.
        ignores_case: True if names that differ in case only are the same file there. `Parts` finds it out.
    """

    def __init__(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)
        self.root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._device = os.fstat(self.root).st_dev
        self.ignores_case = False
        self._path, self._here = "", self.root

    def fold(self, name: str) -> str:
        """Return what is equal for all names of the same file."""
        if self.ignores_case:
            return unicodedata.normalize("NFC", name).casefold()
        return unicodedata.normalize("NFC", name) if sys.platform == "darwin" else name

    def close(self) -> None:
        """Close the descriptors."""
        self._leave()
        os.close(self.root)

    def parent(self, path: str) -> tuple[int, str]:
        """Return the descriptor of the folder that `path` is in, valid until the next call, and the last name."""
        folder, _, name = path.rpartition("/")
        return self.at(folder), name

    def at(self, path: str) -> int:
        """Return the descriptor of a folder, valid until the next call. "" is the folder itself."""
        if path != self._path:
            self._leave()
            here = self.root
            for name in path.split("/") if path else ():
                try:
                    below = os.open(name, _FOLDER, dir_fd=here)
                finally:
                    if here != self.root:
                        os.close(here)
                here = below
            self._path, self._here = path, here
        return self._here

    def _leave(self) -> None:
        if self._here != self.root:
            os.close(self._here)
        self._path, self._here = "", self.root

    def is_near(self, path: str) -> bool:
        """Return True if the folder that `path` is in is on the same file system as the whole."""
        return os.fstat(self.parent(path)[0]).st_dev == self._device

    def make(self, path: str) -> None:
        """Make a folder that can be written, in place of a file or link."""
        folder, name = self.parent(path)
        found = about(folder, name)
        if found is not None and not stat.S_ISDIR(found.st_mode):
            os.unlink(name, dir_fd=folder)
            found = None
        if found is None:
            with contextlib.suppress(FileExistsError):  # another transfer has made it
                os.mkdir(name, 0o700, dir_fd=folder)
        elif found.st_mode & 0o700 != 0o700:
            _set(folder, name, stat.S_IMODE(found.st_mode) | 0o700)

    def link(self, path: str, target: str) -> None:
        """Make a symbolic link, in place of what is there."""
        folder, name = self.parent(path)
        with contextlib.suppress(OSError):
            if os.readlink(name, dir_fd=folder) == target:
                return
        beside = _beside()
        try:
            os.symlink(target, beside, dir_fd=folder)
        except PermissionError:
            folder = self.opened_up(path)
            os.symlink(target, beside, dir_fd=folder)
        try:
            self.put(folder, beside, path)
        except BaseException:
            os.unlink(beside, dir_fd=folder)
            raise

    def put(self, source: int, beside: str, path: str) -> None:
        """Give a file or link of another name, in the folder `source`, its path, in place of what is there.

        Raises OSError for a folder that is not empty.
        """
        folder, name = self.parent(path)
        try:
            os.rename(beside, name, src_dir_fd=source, dst_dir_fd=folder)
        except PermissionError:
            folder = self.opened_up(path)
            os.rename(beside, name, src_dir_fd=source, dst_dir_fd=folder)
        except IsADirectoryError:
            try:
                os.rmdir(name, dir_fd=folder)
            except OSError as e:
                raise OSError(e.errno, "a folder is in its place; remove that first") from e
            os.rename(beside, name, src_dir_fd=source, dst_dir_fd=folder)

    def opened_up(self, path: str) -> int:
        """Make the folder that `path` is in writable again, as another transfer may have finished it. Return it."""
        folder = path.rpartition("/")[0]
        if folder:
            self.make(folder)
        return self.at(folder)

    def set_folder(self, entry: Entry) -> None:
        """Give a folder its mode and its time, unless it belongs to another user."""
        folder, name = self.parent(entry.path)
        with contextlib.suppress(PermissionError):
            _set(folder, name, entry.mode, entry.mtime)

    def below(self, path: str) -> Iterator[tuple[str, bool]]:
        """Yield what is at a path and below it, and whether each is a folder. Folders come before their contents.

        What cannot be read, or is gone, is left out.
        """
        pending = [path]
        while pending:
            each = pending.pop()
            with contextlib.suppress(OSError):
                folder, name = self.parent(each)
                found = about(folder, name)
                if found is None:
                    continue
                is_folder = stat.S_ISDIR(found.st_mode)
                yield each, is_folder
                if is_folder:
                    pending += [f"{each}/{inside}" for inside in sorted(os.listdir(self.at(each)), reverse=True)]

    def remove(self, path: str, is_folder: bool) -> None:
        """Remove a file, a link or an empty folder."""
        folder, name = self.parent(path)
        does = os.rmdir if is_folder else os.unlink
        try:
            does(name, dir_fd=folder)
        except PermissionError:
            mode = stat.S_IMODE(os.fstat(folder).st_mode)
            if mode & 0o300 == 0o300:
                raise
            os.fchmod(folder, mode | 0o300)
            try:
                does(name, dir_fd=folder)
            finally:
                os.fchmod(folder, mode)


class Parts:
    """The files of one transfer that have not come whole yet, in a folder that only one transfer has at a time.

    Each computer has one of its own in a folder that several share, as locks may not reach from one to the other.

    If another one keeps it, or it cannot be made, each file comes beside its place, and nothing is left for later.

    Args:
        folder: the folder that receives.
        name: the name of the file if only one comes, otherwise "".
        wait: wait for another transfer that keeps them, as a lost one does for some time.
    """

    def __init__(self, folder: Folder, name: str, wait: bool) -> None:
        self._folder = folder
        self._name = f"{PARTS}-{_hash(f'{_computer()}/{name}')[:16]}"
        self._mine: int | None = None
        deadline = time.monotonic() + (_WAIT if wait else 0.0)
        with contextlib.suppress(OSError):  # files come beside their places then
            self._sweep()
            while (mine := self._opened()) is None and time.monotonic() < deadline:
                time.sleep(0.1)
            self._mine = mine
            self._keep_newest()

    def _opened(self) -> int | None:
        """Make and lock the folder, and return its descriptor; None if another transfer has it.

        Raises OSError if this cannot work here.
        """
        with contextlib.suppress(FileExistsError):
            os.mkdir(self._name, 0o700, dir_fd=self._folder.root)
        try:
            mine = os.open(self._name, _FOLDER, dir_fd=self._folder.root)
        except FileNotFoundError:
            return None  # another transfer has just ended
        self._folder.ignores_case = about(self._folder.root, self._name.upper()) is not None
        try:
            if os.fstat(mine).st_uid != os.geteuid():
                raise PermissionError(errno.EPERM, "it belongs to another user")
            fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
            there = about(self._folder.root, self._name)
            if there is not None and os.path.samestat(there, os.fstat(mine)):
                return mine
        except BlockingIOError:
            pass
        except BaseException:
            os.close(mine)
            with contextlib.suppress(OSError):
                os.rmdir(self._name, dir_fd=self._folder.root)
            raise
        os.close(mine)
        return None

    def _sweep(self) -> None:
        """Remove what other computers, or this one before it started anew, have left more than a day ago."""
        for name in filter(is_part, os.listdir(self._folder.root)):
            with contextlib.suppress(OSError):  # of another user, or in use
                found = about(self._folder.root, name)
                if name == self._name or found is None or time.time() - found.st_mtime < _OLD:
                    continue
                if not stat.S_ISDIR(found.st_mode):
                    os.unlink(name, dir_fd=self._folder.root)
                    continue
                left = os.open(name, _FOLDER, dir_fd=self._folder.root)
                try:
                    fcntl.flock(left, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    files = {each: os.stat(each, dir_fd=left) for each in os.listdir(left)}
                    if all(time.time() - each.st_mtime > _OLD for each in files.values()):
                        for each in files:
                            os.unlink(each, dir_fd=left)
                        os.rmdir(name, dir_fd=self._folder.root)
                finally:
                    os.close(left)

    def keep_only(self, entries: Iterable[Entry]) -> int:
        """Remove what has come of other files. Return the bytes that are free now."""
        if self._mine is None:
            return 0
        kept = {_part(each) for each in entries}
        freed = 0
        for each in os.listdir(self._mine):
            if each not in kept:
                freed += os.stat(each, dir_fd=self._mine).st_blocks * 512
                os.unlink(each, dir_fd=self._mine)
        return freed

    def _keep_newest(self) -> None:
        """Remove all files but the newest one, which is what the last transfer has left."""
        if self._mine is None:
            return
        found = [(os.stat(each, dir_fd=self._mine).st_mtime_ns, each) for each in os.listdir(self._mine)]
        for _, each in sorted(found)[:-1]:
            os.unlink(each, dir_fd=self._mine)

    def have(self, entry: Entry) -> int:
        """Return the number of bytes that are there of a file from an earlier transfer."""
        if self._mine is None or not self._folder.is_near(entry.path):
            return 0
        found = about(self._mine, _part(entry))
        if found is None or not stat.S_ISREG(found.st_mode) or found.st_size > entry.size:
            return 0
        return found.st_size if found.st_mode & 0o600 == 0o600 else 0

    def begin(self, entry: Entry, offset: int) -> Incoming:
        """Begin to write a file at an offset, which `have` has returned."""
        if self._mine is not None and self._folder.is_near(entry.path):
            return Incoming(self._folder, entry, os.dup(self._mine), _part(entry), offset)
        try:
            return Incoming(self._folder, entry, os.dup(self._folder.parent(entry.path)[0]), "", offset)
        except PermissionError:
            return Incoming(self._folder, entry, os.dup(self._folder.opened_up(entry.path)), "", offset)

    def close(self, done: bool) -> None:
        """Remove what is left if the transfer is done, and give up the folder."""
        if self._mine is None:
            return
        with contextlib.suppress(OSError):  # the next transfer tries again
            if done:
                self.keep_only(())
            os.rmdir(self._name, dir_fd=self._folder.root)  # if it is empty
        os.close(self._mine)
        self._mine = None


class Incoming:
    """A file that comes in, under another name until it is whole.

    Args:
        folder: the folder that receives.
        entry: what the file will be.
        aside: the descriptor of the folder that it is in until then. It is closed with the file.
        name: its name there; "" for one that is removed if the file does not become whole.
        offset: where the data begin that come. What is before is there.
    """

    def __init__(self, folder: Folder, entry: Entry, aside: int, name: str, offset: int) -> None:
        self._folder, self._entry, self._aside = folder, entry, aside
        self._keeps = bool(name)
        self._name = name or _beside()
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | (0 if offset else os.O_CREAT | os.O_EXCL)
        try:
            if not offset:
                self._remove()
            self._file = os.open(self._name, flags, 0o600, dir_fd=aside)
        except BaseException:
            os.close(aside)
            raise
        self._at = self._offset = offset
        self._data = 0

    def write(self, content: memoryview) -> None:
        """Append data. Raises Refused if it is more than was announced."""
        self._data += len(content)
        if self._at + len(content) > self._entry.size or self._data > self._entry.data:
            raise Refused(f"the other end sent more of {self._entry.path!r} than it announced")
        _write(self._file, content, self._at)
        self._at += len(content)

    def skip(self, size: int) -> None:
        """Append a hole of so many bytes."""
        if self._at + size > self._entry.size:
            raise Refused(f"the other end sent more of {self._entry.path!r} than it announced")
        self._at += size

    def finish(self, digest: str, check: Callable[[], None]) -> str:
        """Give the file its time, its mode and its name. Return why it is not whole; "" if it is.

        A file whose beginning is of an earlier transfer must have the hash `digest`. `check` raises Broken if the
        transfer is lost: another one may have replaced the file already.
        """
        try:
            if self._at != self._entry.size:
                raise Refused(f"the other end sent {self._at} of {self._entry.size} bytes of {self._entry.path!r}")
            os.ftruncate(self._file, self._entry.size)
            if self._offset and digest_of(self._file, check) != digest:
                self._remove()
                return "what an earlier transfer had left of it was damaged; send it again"
            check()
            self._set(self._file)
            self._close_file()  # some disks tell only now that they are full, and the name must not come before
            try:
                self._folder.put(self._aside, self._name, self._entry.path)
            except OSError as e:
                if e.errno != errno.EXDEV:
                    raise
                self._copy()
        except OSError:
            self._remove()
            raise
        finally:
            self._close()
        return ""

    def leave(self, keep: bool = True) -> None:
        """Close the file. What has come of it stays for the next transfer, unless `keep` is false."""
        if not keep or not self._keeps:
            self._remove()
        self._close()

    def _copy(self) -> None:
        """Put a copy into the file's place, which is on another mount."""
        folder = os.dup(self._folder.parent(self._entry.path)[0])
        name = _beside()
        try:
            self._file = os.open(self._name, READ, dir_fd=self._aside)
            copy = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
            try:
                with open(copy, "wb", buffering=0) as written:  # which closes it before it gets its name
                    self._copy_to(written.fileno())
                self._folder.put(folder, name, self._entry.path)
            except BaseException:
                os.unlink(name, dir_fd=folder)
                raise
        finally:
            os.close(folder)
        self._remove()

    def _copy_to(self, copy: int) -> None:
        at = 0
        for piece in pieces(self._file, 0, self._entry.size):
            if isinstance(piece, int):
                at += piece
            else:
                _write(copy, memoryview(piece), at)
                at += len(piece)
        os.ftruncate(copy, self._entry.size)
        self._set(copy)

    def _set(self, file: int) -> None:
        os.fchmod(file, self._entry.mode)
        os.utime(file, ns=(self._entry.mtime, self._entry.mtime))

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._name, dir_fd=self._aside)

    def _close_file(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def _close(self) -> None:
        aside, self._aside = self._aside, -1
        try:
            self._close_file()
        finally:
            if aside >= 0:
                os.close(aside)


def about(folder: int, name: str) -> os.stat_result | None:
    """Return what is known of a file, folder or link; None if there is none."""
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def version_of(found: os.stat_result) -> tuple[int, int]:
    """Return what is another one once a file was changed or replaced."""
    return found.st_ino, found.st_mtime_ns


def set_file(folder: int, name: str, entry: Entry, version: tuple[int, int]) -> None:
    """Give a file its mode and its time, unless it is not `version` any more.

    Raises OSError if it is not, belongs to another user, cannot be read, or is a link.
    """
    with open(os.open(name, READ, dir_fd=folder), "rb") as file:
        found = os.fstat(file.fileno())
        if version_of(found) != version:
            raise OSError(errno.EBUSY, "it was changed there meanwhile")
        if stat.S_IMODE(found.st_mode) != entry.mode:
            os.fchmod(file.fileno(), entry.mode)
        if found.st_mtime_ns != entry.mtime:
            os.utime(file.fileno(), ns=(entry.mtime, entry.mtime))


def _set(folder: int, name: str, mode: int, mtime: int | None = None) -> None:
    """Give a folder its mode, and its time."""
    try:
        file = os.open(name, _FOLDER, dir_fd=folder)
    except PermissionError:  # of a folder that its owner cannot read
        if sys.platform == "linux":
            file = os.open(name, os.O_PATH | _FOLDER, dir_fd=folder)
            try:
                os.chmod(f"/proc/self/fd/{file}", mode)
            finally:
                os.close(file)
        else:
            os.chmod(name, mode, dir_fd=folder, follow_symlinks=False)
        return
    try:
        os.fchmod(file, mode)
        if mtime is not None:
            os.utime(file, ns=(mtime, mtime))
    finally:
        os.close(file)


def _write(file: int, content: memoryview, at: int) -> None:
    """Write all of `content` at an offset."""
    while content:
        written = os.pwrite(file, content, at)
        at += written
        content = content[written:]


def _beside() -> str:
    return f"{PARTS}-{os.urandom(8).hex()}"


def _part(entry: Entry) -> str:
    """Return the name under which this version of a file is kept until it is whole."""
    return _hash(f"{entry.path}\0{entry.size}\0{entry.mtime}")


def _hash(text: str) -> str:
    return hashlib.blake2b(os.fsencode(text), digest_size=16).hexdigest()


def _computer() -> str:
    """Return what tells this computer from others with the same folder."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return f"{platform.node()}/{file.read()}"
    return platform.node()
