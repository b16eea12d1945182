"""`FilledFolder`: fills a folder of the node from a bucket, so that it has what the bucket has, or is given up."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import stat
import subprocess
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from skypool.buckets import google, store
from skypool.data.checksums import Checksums
from skypool.data.data_listing import wanted
from skypool.data.fetching import Fetcher, above, check_room
from skypool.data.folder_saver import Object
from skypool.data.local_files import OURS, State, aside_of, journal_lines, listed, nested
from skypool.data.node_login import place_of
from skypool.data.objects import exists
from skypool.data.progress import Pause
from skypool.data.restoring import in_the_way, move_aside
from skypool.errors import UsageError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

FETCHES = 16
"""The number of small files, or parts of large ones, that come at the same time."""
_PATIENCE = 60.0
"""Seconds after which a request has failed. A part of a large file must come in this time."""
_PAUSES = 1.0, 15.0
"""The first and the longest pause in seconds after a request that has failed."""
_LOOK = 0.5
"""Seconds between two attempts to have a folder that another mover fills."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""The errors of a disk that has no room for a file."""
_TO_MAKE = 20.0
"""Seconds in which sudo makes a folder, or has failed."""
_OF_DISKS = "lost+found"
"""The folder that a disk has on which nothing was written yet."""
_PART_NAME = re.compile(rf"{re.escape(OURS)}[0-9a-f]{{12}}")
"""Matches the names of files that have not come to their end."""
_FILES = 0o444
"""The permissions of files."""
_FOLDERS = 0o555
"""The permissions of folders that are filled."""
_OPEN = 0o755
"""The permissions of folders while they are filled."""


class Stopped(Exception):
    """The folder is not wanted any more."""


class Former(Protocol):
    """A folder with the same name from an earlier order, which ends before this one begins."""

    def end(self, seconds: float) -> object: ...
    def join(self) -> object: ...


@dataclass
class Fetched:
    """An account of what was fetched.

    Attributes:
        files: the number of files that were fetched, and `bytes` the bytes that came.
        wanted: the number of files to fetch, and `wanted_bytes` their bytes.
        checked: the number of files whose content was compared with a checksum of the store.
        aside: the folder to which files were moved that the bucket does not have; "" if there were none.
    """

    files: int = 0
    bytes: int = 0
    wanted: int = 0
    wanted_bytes: int = 0
    checked: int = 0
    aside: str = ""


class FilledFolder:
    """A folder of the node that is filled from a bucket. It has a thread of its own.

    A journal has the files that have come, with the versions of their objects. So a mover that begins again, or a later
    order, fetches only what is missing or has changed.

    Args:
        said: the command, with the members of `Order` in `skypool.wire.save_orders`. `before` is the last account of a
            mover that has ended; its counts go on.
        journals: the folder with the journals.
        turns: has as many requests at the same time as the mover may make.
        former: the same folder of an earlier order.

    Attributes:
        phase: "fetching", then "there"; or "ended" if this node cannot have it, for which `trouble` has the reason.
    """

    def __init__(
        self, said: Mapping[str, Any], journals: Path, turns: threading.Semaphore, former: Former | None = None
    ) -> None:
        self.id: str = said["id"]
        self.serial: str = said["serial"]
        self.phase = "fetching"
        self.trouble = ""
        before = said.get("before", {})
        self.done = Fetched(**before.get("back", {}))
        self._checksums = Checksums(parts=not google.is_google(place_of(said, said["values"])[0]))
        self._checked = self.done.checked  # by former movers
        self._come = self.done.bytes = before.get("whole_bytes", 0)  # without parts of files, which come again
        self._said, self._journals, self._turns, self._former = said, journals, turns, former
        self._credentials: tuple[int, tuple[str, ...]] = said["credentials"], tuple(said["values"])
        self._stop = threading.Event()
        self._news = threading.Event()  # is set at new credentials, or the end; another one follows the former
        self._use: IO[str] | None = None  # is locked while nobody else may change the folder
        self._thread = threading.Thread(target=self._work, name=f"data {self.id}", daemon=True)
        self._thread.start()

    @property
    def is_ending(self) -> bool:
        """True if it is not filled any more."""
        return self._stop.is_set()

    def renew(self, credentials: int, values: tuple[str, ...]) -> None:
        """Use other values for the requests that follow, and try again at once what has failed."""
        self._credentials = credentials, values
        if not self.is_ending:
            news, self._news = self._news, threading.Event()
            news.set()

    def end(self, seconds: float, calm: bool = False, is_quiet: threading.Event | None = None) -> None:
        """Fetch no more. Data has nothing to save, so that it needs no time for that."""
        self._stop.set()
        self._news.set()

    def join(self) -> None:
        """Wait for the end. Others may change the folder then."""
        self._thread.join()
        if self._use is not None:
            self._use.close()

    def told(self) -> dict[str, Any]:
        """Return the state of the folder for the client."""
        said = {name: self._said[name] for name in ("id", "url", "serial", "drain")}
        said |= {"is_data": True, "phase": self.phase, "trouble": self.trouble, "whole_bytes": self._come}
        said["credentials"] = self._credentials[0]
        return {**said, "back": asdict(self.done)}

    def _work(self) -> None:
        if self._former is not None:
            self._former.end(0.0)
            self._former.join()
            self._former = None
        pause = Pause(*_PAUSES)
        while not self.is_ending:
            news = self._news
            try:
                self._fill()
                self.trouble, self.phase = "", "there"
                return
            except Stopped:
                break
            except UsageError as e:
                self.trouble, self.phase = str(e), "ended"
                return
            except Exception as e:  # noqa: BLE001 - whatever a store answers is told, and the next attempt follows
                self.trouble = store.trouble(e).words
            pause.wait(news)
        self.phase = "ended"

    # --- one attempt -----------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Make the folder as the bucket has it. Raises UsageError if this node cannot have it."""
        said = self._said
        bucket, values = place_of(said, self._credentials[1])
        newest = (lambda: self._credentials[1]) if bucket.keys else None
        opened = store.opened(bucket, values, _PATIENCE, newest, unsigned=not bucket.identity)
        folder = self._made(os.path.abspath(os.path.expanduser(said["folder"])))
        if bucket.scheme == "file" and nested(os.path.realpath(bucket.name), folder):
            raise UsageError(f"{bucket} and {folder} are inside each other; use another folder")
        name = hashlib.sha256(repr((os.uname().nodename, folder)).encode()).hexdigest()[:16]
        with self._alone(self._journals / f"{name}.lock"):
            if self._use is None:
                self._use = (self._journals / f"{name}.use").open("w")
            if not said["restores"]:
                self._take(folder, fcntl.LOCK_SH)
                return
            objects = self._attempt(lambda: wanted(opened))
            journal = _Journal(self._journals / name, f"{bucket.url} {bucket.endpoint}")
            self._fetch(opened, folder, objects, journal)
            self._take(folder, fcntl.LOCK_SH)

    def _take(self, folder: str, lock: int) -> None:
        """Lock the folder, to change it or to use it as it is. Raises UsageError if another pool uses it."""
        assert self._use is not None
        try:
            fcntl.flock(self._use, lock | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"{folder} there has other data, which another pool of this machine uses; use another folder, or end "
                "that pool"
            ) from None

    def _made(self, folder: str) -> str:
        """Make a folder, and return its real path. Raises UsageError if that is not possible."""
        advice = "use a path that this user can write to, such as 'data' or '~/data'"
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as e:
            if not (isinstance(e, PermissionError) and _made_by_root(folder)):
                raise UsageError(f"{folder} cannot be made by {_user()} there: {e.strerror}; {advice}") from e
        about = os.stat(folder)
        if not os.access(folder, os.W_OK | os.X_OK) and about.st_uid != os.geteuid():
            raise UsageError(f"{_user()} may not write to {folder} there; {advice}")
        return os.path.realpath(folder)

    @contextmanager
    def _alone(self, lock: Path) -> Iterator[None]:
        """Wait until no other mover of this machine fills the folder."""
        with lock.open("w") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if self._stop.wait(_LOOK):
                        raise Stopped from None
            yield

    def _fetch(self, opened: ObjectStore, folder: str, objects: dict[str, Object], journal: _Journal) -> None:
        found = listed(folder)
        here = (found.files.keys() | found.refused.keys()) - {"", _OF_DISKS}
        some = next(iter(here), None)
        if some is not None and not journal.knows(found.files):
            raise UsageError(
                f"{folder} there has files that skypool has not fetched, such as {some}; remove them, or use "
                "another folder"
            )
        missing = {path: each for path, each in objects.items() if not journal.has(path, each, found.files.get(path))}
        if missing or here - objects.keys():
            self._take(folder, fcntl.LOCK_EX)
        journal.begin()
        check_room(folder, missing.values())
        _permit(folder, {*objects, *journal.files}, _OPEN)
        _clean(folder)
        done = self.done

        def came(count: int) -> None:
            done.bytes += count

        def arrived(each: Object) -> None:
            self._come += each.size
            done.files, done.checked = done.files + 1, self._checked + self._checksums.checked

        with ThreadPoolExecutor(FETCHES) as executor:
            empty = [path for path, each in missing.items() if not each.size]
            there = executor.map(lambda path: self._attempt(partial(exists, opened, path)), empty)
            for path in [path for path, is_there in zip(empty, there, strict=True) if not is_there]:
                del objects[path], missing[path]  # a mark for an empty folder
            self._remove_others(folder, objects, here, found.files, journal)
            done.bytes = self._come
            done.wanted = done.files + len(missing)
            done.wanted_bytes = done.bytes + sum(each.size for each in missing.values())
            fetcher = Fetcher(opened, folder, executor, journal.note, self._attempt, came, self._checksums, _FILES)
            try:
                fetcher.fetch(missing, arrived)
            except OSError as e:
                if e.errno not in _FULL:
                    raise
                raise UsageError(
                    f"{folder} there has no room for all of the data: {e.strerror}; ask for a larger disk with disk=, "
                    "or use a folder on another disk"
                ) from e
        self._check(folder, objects, journal)
        journal.end()
        _permit(folder, objects, _FOLDERS)

    def _attempt(self, request: Callable[[], Any]) -> Any:
        """Make a request again and again, until it has an answer. Raises for an object that has changed."""
        from obstore.exceptions import PreconditionError

        pause = Pause(*_PAUSES)
        while not self.is_ending:
            news = self._news
            try:
                with self._turns:
                    found = request()
            except (UsageError, FileNotFoundError, PreconditionError):
                raise
            except Exception as e:  # noqa: BLE001 - whatever a store answers is told, and the next attempt follows
                self.trouble = store.trouble(e).words
                pause.wait(news)
            else:
                self.trouble = ""
                return found
        raise Stopped

    def _remove_others(
        self,
        folder: str,
        objects: Mapping[str, Object],
        here: set[str],
        files: Mapping[str, State],
        journal: _Journal,
    ) -> None:
        """Remove what was fetched before and is not wanted any more. Move what others have written aside.

        Args:
            here: the paths of all that is in the folder, and `files` the states of its files.
        """
        gone = [path for path in journal.files if path not in objects]
        gone = [path for path in gone if journal.forget(path) == files.get(path)]  # else it is of others, or not there
        for path in gone:
            os.unlink(os.path.join(folder, path))
        for path in sorted(above(gone) - above(objects), reverse=True):
            with suppress(OSError):  # it has files of others
                os.rmdir(os.path.join(folder, path))
        others = here - objects.keys() - {*gone}
        if paths := others | in_the_way(folder, objects):
            self.done.aside = aside_of(folder)
            try:
                move_aside(folder, paths, self.done.aside)
            except PermissionError as e:
                raise UsageError(
                    f"{folder} there has files that skypool has not fetched, such as {min(paths)}, and they cannot be "
                    f"moved to {self.done.aside}; remove them, or use another folder"
                ) from e

    def _check(self, folder: str, objects: Mapping[str, Object], journal: _Journal) -> None:
        """Raise OSError unless all files are there as they came."""
        here = listed(folder).files
        for path in objects:
            if path not in here or journal.files.get(path, (None,))[0] != here[path]:
                raise OSError(f"{path} in {folder} is not as it was fetched")


class _Journal:
    """The file in which it is noted which files were fetched. It begins with the place, and ends with 1 if all were.

    Attributes:
        files: the state of each file, and the version of its object; None if it is not from this place.
    """

    def __init__(self, path: Path, place: str) -> None:
        self._path, self._place = path, place
        self._lock = threading.Lock()
        self._is_new, self._is_done = not path.exists(), False
        self.files: dict[str, tuple[State, str | None]] = {}
        is_ours = False
        for line in journal_lines(str(path)):
            match line:
                case [str(name)]:
                    is_ours = name == place
                    self.files = {path: (state, None) for path, (state, _) in self.files.items()}
                case [str(name), [int(inode), int(size), int(changed)], str() | None as version]:
                    self.files[name] = State(inode, size, changed), version if is_ours else None
                case [str(name), None]:
                    self.files.pop(name, None)
                case [1]:
                    self._is_done = True
        if not is_ours:
            self.files = {path: (state, None) for path, (state, _) in self.files.items()}

    def begin(self) -> None:
        """Write what is known in a new file, so that it does not grow without end."""
        new = self._path.with_suffix(".new")
        with new.open("w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(f"{json.dumps([self._place])}\n")
            file.writelines(f"{json.dumps([path, *each])}\n" for path, each in self.files.items())
        new.replace(self._path)

    def knows(self, files: Mapping[str, State]) -> bool:
        """Return True if a folder with these files was filled by skypool, and not by others since."""
        if self._is_new or not self._is_done:  # of a mover that was killed, the last file may not be noted
            return not self._is_new
        return any(files.get(path) == state for path, (state, _) in self.files.items())

    def end(self) -> None:
        """Note that the folder has all files."""
        self._append([1])

    def has(self, path: str, wanted: Object, state: State | None) -> bool:
        """Return True if a file is here as it is in the bucket."""
        return wanted.version is not None and self.files.get(path) == (state, wanted.version)

    def note(self, path: str, state: State, fetched: Object) -> None:
        """Note that a file has come. Any thread may call this."""
        with self._lock:
            self.files[path] = state, fetched.version
            self._append([path, state, fetched.version])

    def forget(self, path: str) -> State:
        """Note that a file is not wanted any more. Return the state in which it was fetched."""
        with self._lock:
            state, _ = self.files.pop(path)
            self._append([path, None])
            return state

    def _append(self, line: object) -> None:
        with self._path.open("a", encoding="utf-8", errors="surrogateescape") as file:
            file.write(f"{json.dumps(line)}\n")


def _made_by_root(folder: str) -> bool:
    """Make a folder for this user with sudo. Return False if this user may not do so without a password."""
    owner = ["-o", str(os.geteuid()), "-g", str(os.getegid())]
    argv = ["sudo", "-n", "install", "-d", *owner, "--", folder]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TO_MAKE, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _user() -> str:
    import pwd

    try:
        return f"the user {pwd.getpwuid(os.geteuid()).pw_name}"
    except KeyError:
        return f"the user {os.geteuid()}"


def _permit(folder: str, paths: Collection[str], mode: int) -> None:
    """Give a folder, and those below it that have these paths, other permissions, if they belong to this user."""
    for path in ("", *above(paths)):
        there = os.path.join(folder, path)
        with suppress(FileNotFoundError):
            about = os.lstat(there)
            if stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid():
                os.chmod(there, mode)


def _clean(folder: str) -> None:
    """Remove files that have not come to their end, as their mover was killed."""
    for path, _, names in os.walk(folder):
        for each in names:
            there = os.path.join(path, each)
            if _PART_NAME.fullmatch(each) and stat.S_ISREG(os.lstat(there).st_mode):
                os.unlink(there)
