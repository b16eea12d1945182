"""`Fetcher`: fetches objects of a bucket into a folder, small ones side by side and large ones in parts."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

from skypool.data.checksums import Checksums, Damaged, sum_of, sum_of_file
from skypool.data.folder_saver import PART, Object, attributes_of, takes_attributes
from skypool.data.local_files import OURS, State, state_of
from skypool.errors import UsageError

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult
    from obstore.store import ObjectStore

T = TypeVar("T")
_LONGEST = 255
"""The most bytes of the name of a file."""
_LARGE = 3
"""The number of large files of which parts come at the same time."""
_SPARE = 64 << 20
"""The bytes that stay free on a disk."""
_BLOCK = 4096
"""A file takes whole blocks of so many bytes."""
_CHUNK = 1 << 20
"""The bytes after which what comes of a file is counted."""


def once(request: Callable[[], T]) -> T:
    """Make a request once."""
    return request()


@dataclass
class Fetcher:
    """Fetches objects into a folder. Each file gets its name when all of it is there, of one version of its object.

    Args:
        store: the bucket, opened at the prefix.
        folder: the folder.
        executor: its threads make the requests.
        note: called with each file that is there: its path, its state, and its object in the version that came.
        attempt: makes a request, perhaps again and again. It gets no errors of the disk.
        came: called with the number of bytes that have come, by one thread at a time. It is below 0 for bytes that are
            fetched again.
        checksums: compares what comes with the store's checksums. Default None: sizes are compared.
        mode: the permissions of files. Default None: those that the umask leaves.
    """

    store: ObjectStore
    folder: str
    executor: Executor
    note: Callable[[str, State, Object], object]
    attempt: Callable[[Callable[[], Any]], Any] = once
    came: Callable[[int], object] = lambda count: None
    checksums: Checksums | None = None
    mode: int | None = None
    _counting: threading.Lock = field(default_factory=threading.Lock, init=False)

    def fetch(self, wanted: Mapping[str, Object], arrived: Callable[[Object], object]) -> None:
        """Fetch objects, by the paths of their files in the folder. Folders are made.

        What can be fetched is fetched, also if something cannot.

        Args:
            arrived: called with each object that was asked for, when its file is there.

        Raises:
            obstore.exceptions.BaseError, OSError: an object could not be fetched or written.
        """
        small = {path: each for path, each in wanted.items() if each.size <= PART}
        errors = self._all(self.executor, self._small, small, arrived)
        if not errors:
            with ThreadPoolExecutor(_LARGE) as files:  # whose threads only wait for those of the executor
                large = {path: each for path, each in wanted.items() if path not in small}
                errors = self._all(files, self._large, large, arrived)
        if errors:
            raise errors[0]

    @staticmethod
    def _all(
        executor: Executor,
        fetch: Callable[[str, Object], object],
        wanted: Mapping[str, Object],
        arrived: Callable[[Object], object],
    ) -> list[BaseException]:
        fetched = {executor.submit(_twice, fetch, path, each): each for path, each in wanted.items()}
        errors: list[BaseException] = []
        for future in as_completed(fetched):
            if error := future.exception():
                errors.append(error)
            else:
                arrived(fetched[future])
        return errors

    def _small(self, path: str, wanted: Object) -> None:
        import obstore

        def request() -> tuple[GetResult, bytearray]:
            got, data = obstore.get(self.store, wanted.name), bytearray()
            try:
                for each in self._chunks(got):
                    data += each
                if len(data) != got.meta["size"]:
                    raise OSError(f"{wanted.name} has {len(data)} of {got.meta['size']} bytes")
            except Exception:
                self._came(-len(data))
                raise
            return got, data

        got, data = self.attempt(request)
        version = got.meta["e_tag"]
        if expected := self._expected(version, len(data)):
            self._compare(wanted, expected, sum_of(data, expected), len(data))
        part = self._part_of(path)
        try:
            with open(part, "wb") as file:
                file.write(data)
            self._finish(path, part, wanted._replace(version=version), self._attributes_of(got, wanted.name))
        finally:
            with suppress(FileNotFoundError):
                os.unlink(part)

    def _large(self, path: str, wanted: Object) -> None:
        """Fetch a large file in parts, side by side, all of one version."""
        import obstore
        from obstore.exceptions import BaseError

        options: GetOptions = {"range": (0, 1)}
        head = self.attempt(lambda: obstore.get(self.store, wanted.name, options=options))
        size, version = head.meta["size"], head.meta["e_tag"]
        attributes = self._attributes_of(head, wanted.name)
        part = self._part_of(path)
        file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        expected = self._expected(version, size)
        sum_ = sum_of_file(file, expected) if expected else None
        come: dict[int, int] = {}  # the bytes of each part, by its place in the file
        refused: list[OSError] = []  # by the disk: another attempt would not help

        def read(part: int, end: int) -> None:
            """Write what is missing of a part. If that breaks off, the next attempt goes on where it was."""
            while (at := part + come[part]) < end and not refused:
                options: GetOptions = {"range": (at, end)}
                if version is not None:
                    options["if_match"] = version
                got = obstore.get(self.store, wanted.name, options=options)
                place = at
                try:
                    for each in self._chunks(got):
                        place += len(each)
                        if place <= end:  # else all of it is given up below
                            _write(file, each, place - len(each))
                except BaseError:
                    if place == at:
                        raise
                except OSError as e:  # of the disk
                    self._came(at - place)
                    refused.append(e)
                    return
                if not at < place <= end:
                    self._came(at - place)
                    raise OSError(f"{wanted.name} has {place - at} bytes from {at} on, not {end - at}")
                come[part] = place - part

        def fetch(part: int) -> None:
            come[part] = 0
            self.attempt(lambda: read(part, min(part + PART, size)))
            if refused:
                raise refused[0]
            if sum_ is not None:
                sum_.add(part)

        try:
            try:
                fetched = [self.executor.submit(fetch, at) for at in range(0, size, PART)]
                errors = [each.exception() for each in fetched]
                if error := next(filter(None, errors), None):
                    raise error
                if sum_ is not None:
                    self._compare(wanted, expected, sum_.found(), size)
            finally:
                os.close(file)  # when no thread writes to it any more, as its number will be that of another file
            self._finish(path, part, wanted._replace(version=version), attributes)
        except Damaged:
            raise
        except BaseException:
            self._came(-sum(come.values()))
            raise
        finally:
            with suppress(FileNotFoundError):
                os.unlink(part)

    def _came(self, count: int) -> None:
        with self._counting:
            self.came(count)

    def _chunks(self, got: GetResult) -> Iterator[memoryview]:
        """Yield what comes of an object, and count it."""
        for data in got.stream(min_chunk_size=_CHUNK):
            self._came(len(data))
            yield memoryview(data)

    def _expected(self, version: str | None, size: int) -> str:
        """Return the checksum that an object should have; "" if nothing is compared."""
        return "" if self.checksums is None else self.checksums.expected(version, size)

    def _compare(self, wanted: Object, expected: str, found: str, size: int) -> None:
        assert self.checksums is not None
        try:
            self.checksums.compare(wanted.name, expected, found)
        except Damaged:
            self._came(-size)
            raise

    def _attributes_of(self, got: GetResult, name: str) -> dict[str, str]:
        """Return the attributes of an object; for a file of a folder, those that tell the same."""
        if takes_attributes(self.store):
            return dict(got.attributes)
        with open(os.path.join(cast(Any, self.store).prefix, name), "rb") as file:
            return attributes_of(state_of(file.fileno()))

    def _part_of(self, path: str) -> str:
        """Return the path of a new file beside that of `path`. Its folder is made."""
        folder = os.path.dirname(os.path.join(self.folder, path))
        os.makedirs(folder, exist_ok=True)
        return os.path.join(folder, f"{OURS}{secrets.token_hex(6)}")

    def _finish(self, path: str, part: str, fetched: Object, attributes: Mapping[str, str]) -> None:
        """Give a file that has come its time and its name, and note that it is as in the bucket."""
        seconds, _, rest = attributes.get("mtime", "").partition(".")
        if seconds.isdecimal() and rest.isdecimal():
            at = int(seconds) * 10**9 + int(rest[:9].ljust(9, "0"))
            os.utime(part, ns=(at, at))
        if self.mode is not None:
            os.chmod(part, self.mode)
        os.rename(part, os.path.join(self.folder, path))
        with open(os.path.join(self.folder, path), "rb") as file:
            self.note(path, state_of(file.fileno()), fetched)


def _write(file: int, data: memoryview, at: int) -> None:
    while data:
        count = os.pwrite(file, data, at)
        data, at = data[count:], at + count


def _twice(fetch: Callable[[str, Object], object], path: str, wanted: Object) -> None:
    """Fetch an object, and once more if it did not come as the checksum says."""
    try:
        fetch(path, wanted)
    except Damaged:
        fetch(path, wanted)


def check_room(folder: str, missing: Collection[Object]) -> None:
    """Raise UsageError if the disk of a folder has no room for what is missing."""
    about = os.statvfs(folder)
    free = about.f_bavail * about.f_frsize
    needed = sum(-(-each.size // _BLOCK) * _BLOCK for each in missing)
    if missing and needed + _SPARE > free:
        raise UsageError(
            f"{folder} there has no room: {needed / 1e9:.2f} GB are to be fetched, and {free / 1e9:.2f} GB of its "
            "disk are free; ask for a larger one with disk=, or use a folder on another disk"
        )


def is_plain(path: str) -> bool:
    """Return True if an object can be a file below a folder."""
    parts = path.split("/")
    return path.isprintable() and not any(
        each in ("", ".", "..") or each.startswith(OURS) or len(each.encode()) > _LONGEST for each in parts
    )


def above(paths: Iterable[str]) -> set[str]:
    """Return the paths of all folders that have these paths below them."""
    return {path[:at] for path in paths for at, each in enumerate(path) if each == "/"}
