"""`Receiver`: receives files into a folder.

A node gets the text of this module, so it uses the standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

from skypool.files.entries import (
    OF_REPOSITORIES,
    READ,
    Entry,
    digest_of,
    is_part,
    is_repository,
    leads_out,
    told_entry,
    told_path,
)
from skypool.files.frames import VERSION, Channel, Kind, Refused, in_parts, nonsense, unpacked
from skypool.files.safe_writing import Folder, Incoming, Parts, about, set_file, version_of

_MEMORY = 64 << 20
"""The most bytes of memory for entries: folders, and files that are to come."""
_ENTRY = 250
"""The bytes of memory for one entry, without its path."""
_NAME = 100
"""The bytes of memory for the name of a file, without its characters."""
_TOLD = 20
"""The most errors of single files that are told."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
"""The errors of a full disk, which no other file on it is spared."""


class Receiver:
    """Receives files into a folder. Nothing that the sender says leads out of this folder.

    Args:
        channel: the channel to the sender.
        target: the folder, which is made if it does not exist. If the sender sends one file, the path of the file, or
            a folder for it if `target` is one or ends with "/".
        name: the name of the one file in such a folder. Default: the one that the sender tells.
        delete: delete what the sender does not have, and does not leave out.
        keeps: with `delete`, tells of a path below the folder, and whether it is a folder, if it stays in any case. The
            sender is then not asked what it leaves out.
        checksum: compare the contents of all files of equal size. Otherwise, equal size and time mean an equal file.
        inside: refuse links that may lead out of the folder.
        again: this goes on with a transfer that was lost. Its process on this computer may still end.
        no_git: refuse git checkouts, whose settings may name programs that git would start here.
        settled: the sender may leave out a file that changes while it is read.
        on_want: called with the number of bytes that are missing of one more file.
        on_file: called with the path of each file when it begins.
        on_same: called with the path of each file that is here already.
        on_bytes: called with the number of bytes that came.
    """

    def __init__(
        self,
        channel: Channel,
        target: str,
        *,
        name: str = "",
        delete: bool = False,
        keeps: Callable[[str, bool], bool] | None = None,
        checksum: bool = False,
        inside: bool = False,
        again: bool = False,
        no_git: bool = False,
        settled: bool = False,
        on_want: Callable[[int], None] = lambda size: None,
        on_file: Callable[[str], None] = lambda path: None,
        on_same: Callable[[str], None] = lambda path: None,
        on_bytes: Callable[[int], None] = lambda size: None,
    ) -> None:
        self._channel = channel
        self._target, self._name = target, name
        self._delete, self._keeps, self._checksum, self._inside = delete, keeps, checksum, inside
        self._again, self._no_git, self._settled = again, no_git, settled
        self._on_want, self._on_file, self._on_same, self._on_bytes = on_want, on_file, on_same, on_bytes
        self._asked: dict[int, Entry] = {}
        self._hashed: dict[int, tuple[int, int]] = {}
        self._folders: list[Entry] = []
        self._memory = self._needed = 0
        self._listed = 0
        self._changed: set[str] = set()
        self._repositories: dict[str, set[str]] = {}
        self._current: int | None = None
        self._file: Incoming | None = None
        self._troubles: list[str] = []
        self._failed = self._files = self._bytes = self._deleted = 0

    def run(self) -> dict[str, Any]:
        """Receive everything. Return what was done: files, bytes, deleted, failed and the texts of errors.

        Raises Broken if the connection is lost, and Refused if the sender says what it may not, or the disk is full.
        """
        with self._channel.signs():
            try:
                return self._run()
            except OSError as e:  # of the folder itself, or of the disk
                raise Refused(f"{e.filename or self._target}: {e.strerror}") from e
            except (LookupError, TypeError, ValueError, AttributeError, struct.error, RecursionError) as e:
                raise nonsense(e) from e

    def _run(self) -> dict[str, Any]:
        kind, content = self._channel.receive()
        if kind != Kind.BEGIN:
            raise nonsense("it begins in the middle")
        self._folder, self._single = self._begin(unpacked(content))
        try:
            self._parts = Parts(self._folder, self._single, self._again)
            self._listing = Listing(self._folder, self._delete and not self._single, self._keep)
            room = os.fstatvfs(self._folder.root)
            self._room = room.f_bavail * room.f_frsize if room.f_blocks else 1 << 62
            done = False
            try:
                while True:
                    kind, content = self._channel.receive()
                    if kind == Kind.END:
                        said = self._end()
                        done = True
                        return said
                    self._handle(kind, content)
            finally:
                if self._file is not None:
                    self._file.leave()
                self._parts.close(done)
        finally:
            self._folder.close()

    def _begin(self, said: Any) -> tuple[Folder, str]:
        """Return the folder that receives, and the name of the file if only one comes."""
        if said["version"] != VERSION:
            raise Refused(f"the other end speaks version {said['version']!r} of the protocol, and this one {VERSION}")
        if not said["name"]:
            return Folder(self._target), ""
        if self._target.endswith("/") or os.path.isdir(self._target):
            folder, name = self._target, self._name or said["name"]
        else:
            folder, name = os.path.split(os.path.abspath(self._target))
        if "/" in told_path(name):
            raise Refused("the other end sent the name of a file with a folder")
        return Folder(folder), name

    def _handle(self, kind: int, content: memoryview) -> None:
        if kind == Kind.DATA and self._current is not None:
            self._data(self._current, content)
        elif kind == Kind.HOLE and self._current is not None:
            if self._file is not None:
                self._file.skip(struct.unpack(">Q", content)[0])
        elif kind == Kind.FILE and self._current is None:
            self._begin_file(*struct.unpack(">QQ", content))
        elif kind == Kind.DONE:
            self._end_file(*unpacked(content))
        elif kind == Kind.CHANGED:
            self._forget(struct.unpack(">Q", content)[0])
        elif kind == Kind.SAME:
            self._same(struct.unpack(">Q", content)[0])
        elif kind == Kind.LIST:
            self._list(unpacked(content), again=False)
        elif kind == Kind.AGAIN:
            self._list(unpacked(content), again=True)
        elif kind == Kind.LISTED:
            self._listing.end()
        else:
            raise nonsense()

    # --- the list ------------------------------------------------------------------------------------------------

    def _list(self, said: Any, again: bool) -> None:
        """Make the folders and links of one part of the list, and ask for what is missing of its files."""
        send: list[tuple[int, int]] = []
        hashes: list[tuple[int, str]] = []
        for each in said:
            entry = told_entry(each)
            if self._no_git:
                self._check_git(entry.path)
            index = self._listed
            self._listed += 1
            if self._single:
                if entry.kind not in ("f", "s") or (index and not again):
                    raise Refused("the other end sent more than the one file that it announced")
                entry = entry._replace(path=self._single)
            if again:
                self._listed_again(entry.path)
                if entry.kind not in ("f", "s"):
                    entry = Entry(entry.path, "s", text="it changed while it was read")
            elif not self._listing.add(entry):
                self._trouble(entry.path, "another name there is the same apart from capital letters")
                continue
            try:
                self._take(index, entry, send, hashes)
            except OSError as e:
                self._cannot(entry.path, e)
        self._channel.tell(Kind.WANT, {"send": send, "hash": hashes})

    def _check_git(self, path: str) -> None:
        """Refuse what belongs to a checkout, and the last part of what git takes for a repository without a name."""
        folder, _, name = path.rpartition("/")
        if ".git" not in path.casefold().split("/"):
            if name.casefold() not in map(str.casefold, OF_REPOSITORIES):
                return
            parts = self._repositories.get(folder.casefold())
            if parts is None:
                self._keep(folder)
                parts = self._repositories[folder.casefold()] = set()
            parts.add(name.casefold())
            with contextlib.suppress(OSError):  # the folder is not there yet
                at = self._folder.at(folder)
                parts |= {each.casefold() for each in OF_REPOSITORIES if about(at, each) is not None}
            if not is_repository(parts):
                return
        raise Refused(f"the other end sent {path!r}, and git would start programs that a checkout names")

    def _take(self, index: int, entry: Entry, send: list[tuple[int, int]], hashes: list[tuple[int, str]]) -> None:
        """Make the folder or link of an entry, or ask for its file if it is missing."""
        if entry.kind == "s":
            self._trouble(entry.path, entry.text)
        elif entry.kind == "d":
            self._folder.make(entry.path)
            self._folders.append(entry)
        elif entry.kind == "l":
            if self._inside and leads_out(entry.path, entry.text):
                self._trouble(entry.path, f"it is a link that may lead out of the folder, to {entry.text!r}")
            else:
                self._folder.link(entry.path, entry.text)
        elif entry.kind == "f":
            self._ask(index, entry, send, hashes)
        elif not self._has_more(entry):  # what is being written may be half of what is here
            self._ask(index, entry._replace(kind="f"), send, hashes)

    def _has_more(self, entry: Entry) -> bool:
        """Return True if there is a larger file in the place of an entry."""
        found = about(*self._folder.parent(entry.path))
        return found is not None and stat.S_ISREG(found.st_mode) and found.st_size > entry.size

    def _ask(self, index: int, entry: Entry, send: list[tuple[int, int]], hashes: list[tuple[int, str]]) -> None:
        """Ask for a file, or for a comparison of its hash, unless it is there."""
        folder, name = self._folder.parent(entry.path)
        found = about(folder, name)
        digest = "" if found is None else self._digest(folder, name, found, entry)
        if digest is None:
            self._on_same(entry.path)
            return
        if digest and found is not None:
            hashes.append((index, digest))
            self._hashed[index] = version_of(found)
            self._expect(index, entry)
            return
        offset = self._parts.have(entry)
        self._expect(index, entry)
        if self._folder.is_near(entry.path):
            self._need(entry.data - offset - (found.st_blocks * 512 if found is not None else 0))
        send.append((index, offset))
        self._on_want(entry.size - offset)

    def _digest(self, folder: int, name: str, found: os.stat_result, entry: Entry) -> str | None:
        """Return the hash of a file that may be the same; None if it is the same, and "" if it is another one."""
        if not stat.S_ISREG(found.st_mode) or found.st_size != entry.size:
            return ""
        same = found.st_mtime_ns == entry.mtime and not self._checksum
        if same and stat.S_IMODE(found.st_mode) == entry.mode:
            return None
        try:
            if same:
                set_file(folder, name, entry, version_of(found))
                return None
            with open(os.open(name, READ, dir_fd=folder), "rb") as file:
                os.fchmod(file.fileno(), stat.S_IMODE(found.st_mode))  # which the owner may
                return digest_of(file.fileno(), self._channel.check)
        except PermissionError:
            return ""  # another file can take its place

    def _need(self, size: int) -> None:
        """Count bytes that are to come. Raises Refused if the disk has no room for them."""
        self._needed += size
        if self._needed > self._room:
            self._room += self._parts.keep_only(self._asked.values())
        if self._needed > self._room:
            raise Refused(f"{self._target}: the files need at least {self._needed} bytes, and {self._room} are free")

    def _expect(self, index: int, entry: Entry) -> None:
        self._asked[index] = entry
        self._keep(entry.path)

    def _keep(self, path: str) -> None:
        """Count the memory for an entry."""
        self._memory += _ENTRY + sys.getsizeof(path)
        if self._memory > _MEMORY:
            raise Refused("the other end listed more folders and files at once than fit into memory")

    def _came(self, index: int) -> Entry:
        """Return an entry that was asked for, and is not expected any more."""
        entry = self._asked.pop(index)
        self._hashed.pop(index, None)
        self._release(entry.path)
        return entry

    def _release(self, path: str) -> None:
        self._memory -= _ENTRY + sys.getsizeof(path)

    def _listed_again(self, path: str) -> None:
        """Note that a file is listed again, which has changed, here or for another receiver."""
        if path in self._changed:
            self._changed.remove(path)
            self._release(path)
        elif self._inside:  # this is the only receiver
            raise nonsense(f"{path!r} has not changed")

    # --- the files -----------------------------------------------------------------------------------------------

    def _begin_file(self, index: int, offset: int) -> None:
        entry = self._asked[index]
        self._current = index
        self._on_file(entry.path)
        try:
            if offset not in (0, self._parts.have(entry)):
                raise nonsense()
            self._file = self._parts.begin(entry, offset)
        except OSError as e:
            self._cannot(entry.path, e)

    def _data(self, index: int, content: memoryview) -> None:
        if self._file is not None:  # else its error is told already
            try:
                self._file.write(content)
            except OSError as e:
                file, self._file = self._file, None
                file.leave(keep=False)  # a full disk has room again
                self._cannot(self._asked[index].path, e)
        self._bytes += len(content)
        self._on_bytes(len(content))

    def _end_file(self, index: int, digest: str, why: str) -> None:
        """Finish the current file, or one that could not be opened."""
        if self._current not in (None, index) or type(digest) is not str or type(why) is not str:
            raise nonsense()
        entry = self._came(index)
        file, began = self._file, self._current is not None
        self._file = self._current = None
        if why:
            self._trouble(entry.path, why[:200])
            if file is not None:
                file.leave(keep=False)
        elif not began:
            raise nonsense()
        elif file is not None:
            try:
                why = file.finish(digest, self._channel.check)
            except OSError as e:
                self._cannot(entry.path, e)
                return
            if why:
                self._trouble(entry.path, why)
            else:
                self._files += 1

    def _forget(self, index: int) -> None:
        """Drop a file that changed while it was read. It is listed again."""
        if self._current not in (None, index):
            raise nonsense()
        entry = self._came(index)
        if self._file is not None:
            self._file.leave(keep=False)
        self._file = self._current = None
        self._changed.add(entry.path)
        self._keep(entry.path)

    def _same(self, index: int) -> None:
        """Set time and mode of a file whose contents are the same."""
        version = self._hashed[index]
        entry = self._came(index)
        try:
            folder, name = self._folder.parent(entry.path)
            set_file(folder, name, entry, version)
            self._on_same(entry.path)
        except OSError as e:
            self._trouble(entry.path, e.strerror or str(e))

    # --- the end -------------------------------------------------------------------------------------------------

    def _end(self) -> dict[str, Any]:
        """Delete what the sender does not have, set times of folders, and tell the sender what was done."""
        if self._asked or (self._changed and not self._settled) or not self._listing.ended:
            raise Refused(f"the other end did not send {len(self._asked) + len(self._changed)} files that it announced")
        self._delete_extra()
        for each in reversed(self._folders):
            try:
                self._folder.set_folder(each)
            except OSError as e:
                self._trouble(each.path, e.strerror or str(e))
        done = {
            "files": self._files,
            "bytes": self._bytes,
            "deleted": self._deleted,
            "failed": self._failed,
            "errors": self._troubles,
        }
        self._channel.tell(Kind.END, done)
        return done

    def _delete_extra(self) -> None:
        """Delete what the sender does not have, but for what stays."""
        extra = [each for path in self._listing.extra for each in self._folder.below(path)]
        kept: set[str] = set()
        for part in in_parts([each for each in extra if not _is_ours(each[0])], lambda each: len(each[0])):
            kept.update(self._kept_of(part))
        for path, _ in extra:
            if path.rpartition("/")[0] in kept:
                kept.add(path)
        for path, _ in reversed(extra):
            if path in kept:
                kept.add(path.rpartition("/")[0])
        for path, is_folder in reversed(extra):
            if path not in kept:
                try:
                    self._folder.remove(path, is_folder)
                    self._deleted += 1
                except FileNotFoundError:
                    continue  # another transfer has done it
                except OSError as e:
                    self._trouble(path, e.strerror or str(e))

    def _kept_of(self, part: Sequence[tuple[str, bool]]) -> list[str]:
        """Return the paths that stay of those that the sender does not have."""
        if self._keeps is not None:
            return [path for path, is_folder in part if self._keeps(path, is_folder)]
        self._channel.tell(Kind.EXTRA, part)
        kind, content = self._channel.receive()
        if kind != Kind.KEEP:
            raise nonsense()
        return [part[index][0] for index in unpacked(content)]

    def _cannot(self, path: str, error: OSError) -> None:
        """Tell the error of one file. Raise it if the disk is full, as no other file has room either."""
        if error.errno in _FULL and self._folder.is_near(path):
            self._parts.keep_only([])
            raise error
        self._trouble(path, error.strerror or str(error))

    def _trouble(self, path: str, why: str) -> None:
        self._failed += 1
        if len(self._troubles) < _TOLD:
            self._troubles.append(f"{path}: {why}")


class Listing:
    """Checks that a list comes in the order of `entries.walk`, so that no path comes twice. Finds what is extra here.

    Attributes:
        extra: what is in the listed folders and not in the list.
        ended: True once the list has come to its end.
    """

    def __init__(self, folder: Folder, finds_extra: bool, keep: Callable[[str], None]) -> None:
        self._folder = folder
        self._keep = keep
        self._finds_extra = finds_extra
        self._here = self._last = ""
        self._names: set[str] = set()
        self._size = 0
        self._below: list[str] = []
        self._pending: list[str] = []
        self._complete = True
        self._twins: set[str] = set()
        self.extra: list[str] = []
        self.ended = False

    def add(self, entry: Entry) -> bool:
        """Note the next entry. Return False if its name is that of another one in the same folder on this disk.

        Raises Refused if it cannot come here.
        """
        if self.ended:
            raise nonsense()
        if entry.kind == "s" and (entry.path in self._below or entry.path in self._pending):
            self._go_to(entry.path)
            self._complete = False  # nobody knows what is in it
            return True
        folder, _, name = entry.path.rpartition("/")
        if folder != self._here:
            self._go_to(folder)
        if name <= self._last:
            raise Refused(f"the other end listed {entry.path!r} twice, or too late")
        self._last = name
        if entry.kind == "d":
            self._keep(entry.path)
            self._below.append(entry.path)
        if self._here in self._twins or not self._is_alone(folder, name):
            if entry.kind == "d":
                self._twins.add(entry.path)
            return False
        return True

    def _is_alone(self, folder: str, name: str) -> bool:
        """Note a name in the folder that is listed. Return False if it is that of another file on this disk."""
        if self._finds_extra or self._folder.ignores_case:
            folded = self._folder.fold(name)
            if folded in self._names:
                return False
            self._names.add(folded)
            self._size += _NAME + len(name)
            if self._size > _MEMORY:
                raise Refused(f"{folder or 'the folder'!r} has more files than fit into memory")
        return True

    def end(self) -> None:
        """Note that the list is complete."""
        if self.ended:
            raise nonsense()
        self._leave()
        while self._pending:
            self._enter(self._pending.pop())
            self._leave()
        self.ended = True

    def _go_to(self, folder: str) -> None:
        """Leave the folder that is listed, and all that follow before this one."""
        self._leave()
        while self._pending:
            self._enter(self._pending.pop())
            if self._here == folder:
                return
            self._leave()
        raise Refused(f"the other end listed {folder!r} twice, or what is in it before it")

    def _enter(self, folder: str) -> None:
        self._here, self._last, self._complete = folder, "", folder not in self._twins
        self._names, self._size, self._below = set(), 0, []

    def _leave(self) -> None:
        self._pending += reversed(self._below)
        self._below = []
        if not self._finds_extra or not self._complete:
            return
        try:
            names = os.listdir(self._folder.at(self._here))
        except OSError:
            return  # it could not be made, which is told
        prefix = f"{self._here}/" if self._here else ""
        self.extra += [
            prefix + name for name in sorted(names) if self._folder.fold(name) not in self._names and not is_part(name)
        ]


def _is_ours(path: str) -> bool:
    """Return True if a path is, or is in, a folder of files that have come only partly."""
    return any(map(is_part, path.split("/")))
