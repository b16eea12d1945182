"""The user's files for a node, in one archive whose bytes depend on nothing but what is in it."""

from __future__ import annotations

import fnmatch
import gzip
import hashlib
import io
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, cast

from skypool_images.errors import ImageError
from skypool_images.spec import Spec

PLACES = {"work": "$SKYPOOL_WORK", "home": "$HOME", "root": "/"}
"""Folders in the archive, and where on the node their contents go."""

_NEVER = (".git", "__pycache__", ".venv", "*.pyc")


Progress = Callable[[int, int], None]
"""Called with the bytes that were read so far, and how many there are in all."""

_LEVEL = 6
"""Of gzip: level 9 takes twice as long and saves about one byte in a hundred."""
_CHUNK = 1 << 20
"""Bytes that are read from a file or from an archive at once."""


class Packed:
    """An archive of files in a temporary file without a name. It is gone when nobody holds it.

    Attributes:
        size: in bytes.
        name: its file name on a node, by its contents.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as this object lives
        self._hash = hashlib.sha256()
        self.size = 0

    @classmethod
    def of(cls, data: bytes) -> Packed:
        """Return one that holds these bytes."""
        made = cls()
        made.write(data)
        return made

    @property
    def name(self) -> str:
        return f"{self._hash.hexdigest()[:16]}.tar.gz"

    def write(self, data: bytes) -> int:
        """Add bytes at the end."""
        self._file.write(data)
        self._file.flush()
        self._hash.update(data)
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing: each write is flushed. `gzip` calls it."""

    def read(self, at: int, size: int = _CHUNK) -> bytes:
        """Return bytes from a place on, b"" at the end. From any thread."""
        return os.pread(self._file.fileno(), size, at)

    def __bytes__(self) -> bytes:
        return self.read(0, self.size)

    def __del__(self) -> None:
        self._file.close()


def pack(spec: Spec, progress: Progress | None = None) -> Packed | None:
    """Return a tar.gz of `files` and `include`, None where there is nothing to send.

    Files are read, compressed and written piece by piece, so that their size does not matter to memory.

    Raises:
        ImageError: a local file that is not there or changes while it is read, or a glob that finds nothing.
    """
    entries = dict(_entries(spec))
    if not entries:
        return None
    packed = Packed()
    total = sum(_size(source) for source, _ in entries.values())
    read = _Counter(progress or (lambda done, total: None), total)
    with (
        gzip.GzipFile("", "wb", _LEVEL, cast(IO[bytes], packed), mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w|", format=tarfile.PAX_FORMAT, bufsize=_CHUNK) as archive,
    ):
        for place in sorted(entries):
            _add(archive, place, *entries[place], read)
    return packed


class _Counter:
    """Counts the bytes that are read from one file after the other."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0
        self.file: IO[bytes] = io.BytesIO()

    def read(self, size: int) -> bytes:
        data = self.file.read(size)
        self._done += len(data)
        self._progress(self._done, self._total)
        return data


def _add(archive: tarfile.TarFile, place: str, source: Path | bytes, field: str, read: _Counter) -> None:
    member = tarfile.TarInfo(place)
    if isinstance(source, bytes):
        member.size, member.mode, read.file = len(source), 0o644, io.BytesIO(source)
        return archive.addfile(member, cast(IO[bytes], read))
    try:
        with open(source, "rb") as read.file:
            about = os.fstat(read.file.fileno())
            member.size = about.st_size
            member.mode = about.st_mode & 0o777
            archive.addfile(member, cast(IO[bytes], read))
    except OSError as error:
        why = error.strerror or "it became shorter meanwhile"
        raise ImageError(f"{field}: {source} cannot be read: {why}") from error


def _size(source: Path | bytes) -> int:
    return len(source) if isinstance(source, bytes) else source.stat().st_size


def roots(spec: Spec) -> set[str]:
    """Which of PLACES the archive has something for."""
    return {_inside(place).partition("/")[0] for place, _ in spec.files} | ({"work"} if spec.include else set())


def _inside(place: str) -> str:
    """Where a place on the node stands in the archive."""
    if place.startswith("~/"):
        return f"home/{place[2:]}"
    return f"root{place}" if place.startswith("/") else f"work/{place}"


def _entries(spec: Spec) -> Iterator[tuple[str, tuple[Path | bytes, str]]]:
    """(place in the archive, (contents or where they are, the field that names them)).

    What is named in `files` is stronger than what a glob finds.
    """
    folder = Path(spec.folder)
    for pattern in spec.include:
        found = False
        for path in _found(folder, pattern, spec.exclude):
            found = True
            yield (
                _named(f"work/{path.relative_to(folder).as_posix()}", "include"),
                (_readable(path, "include"), "include"),
            )
        if not found:
            raise ImageError(f"include: {pattern!r} finds nothing to send in {folder.resolve()}")
    for place, source in spec.files:
        if isinstance(source, bytes):
            yield _inside(place), (source, "files")
            continue
        local = folder / os.path.expanduser(source)
        if not local.is_dir():
            yield _inside(place), (_readable(local, "files"), "files")
            continue
        for path in _below(local):
            yield (
                _named(f"{_inside(place)}/{path.relative_to(local).as_posix()}", "files"),
                (_readable(path, "files"), "files"),
            )


def _named(place: str, field: str) -> str:
    """A place that the node can list in one line."""
    if "\n" in place:
        raise ImageError(f"{field}: {place.partition('/')[2]!r} has a line break in its name; give it another one")
    return place


def _readable(path: Path, field: str) -> Path:
    """Return the path of a file that can be read: that is told before anything is packed."""
    try:
        if not path.is_file() and path.exists():
            raise ImageError(f"{field}: {path} is neither a file nor a folder")
        with open(path, "rb"):
            return path
    except OSError as error:
        raise ImageError(f"{field}: {path} cannot be read: {error.strerror}") from error


def _found(folder: Path, pattern: str, exclude: tuple[str, ...]) -> Iterator[Path]:
    for path in sorted(folder.glob(pattern)) if Path(pattern).parts else (folder,):
        for each in _below(path) if path.is_dir() else (path,):
            if not any(_matches(each.relative_to(folder), glob) for glob in (*_NEVER, *exclude)):
                yield each


def _below(folder: Path) -> Iterator[Path]:
    """The files below a folder, by name; links to folders are followed once."""
    seen: set[str] = set()
    for top, folders, files in os.walk(folder, followlinks=True):
        seen.add(os.path.realpath(top))
        folders[:] = sorted(
            each for each in folders if each not in _NEVER and os.path.realpath(f"{top}/{each}") not in seen
        )
        yield from (Path(top, each) for each in sorted(files))


def _matches(path: Path, glob: str) -> bool:
    """Whether a glob means a path: one without a slash means any part of it, another the path or a folder above."""
    if "/" not in glob.rstrip("/"):
        return any(fnmatch.fnmatchcase(part, glob.rstrip("/")) for part in path.parts)
    wanted = glob.rstrip("/").removesuffix("/**")
    return any(fnmatch.fnmatchcase(above.as_posix(), wanted) for above in (path, *path.parents))
