"""Packs the user's files for a node into a tar.gz archive. Equal contents give equal bytes."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from skypool_images.errors import ImageError
from skypool_images.field_checks import Spec
from skypool_images.sent_project import SentProject

if TYPE_CHECKING:
    import tarfile

PLACES = {"work": "$SKYPOOL_WORK", "home": "$HOME", "root": "/"}
"""A dict from top-level folder of the archive to the place on the node where the folder is unpacked."""

_NEVER = (".git", "__pycache__", ".venv", "*.pyc")
"""Names of files and folders that are never sent, even if they match a glob of `include`."""


Progress = Callable[[int, int], None]
"""Function that is called with the number of bytes read so far and the total number of bytes."""

_LEVEL = 1
"""Compression level of gzip. Level 6 takes four times as long, longer than most networks, and saves about 10 %."""
_GZIP = 31
"""The `wbits` with which zlib writes a gzip member."""
_SAMPLE = 16 << 10
"""Number of bytes of each part of the archive that are compressed to see if compressing the part is worth the time."""
_WORTH = 0.9
"""A part is compressed if its sample becomes smaller than this, as a share of the sample's size."""
_CHUNK = 1 << 20
"""Number of bytes that are read from a file or from an archive at once."""


class Packed:
    """An archive in a temporary file, which is deleted when this object is.

    Attributes:
        size: the archive's size in bytes.
        project: the project whose files are in it; None for none.
    """

    def __init__(self, project: SentProject | None = None) -> None:
        import tempfile  # this import and those of `pack` are here because most images have no files

        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as this object lives
        self._hash = hashlib.sha256()
        self.size = 0
        self.project = project

    @classmethod
    def of(cls, data: bytes) -> Packed:
        """Return a `Packed` with exactly these bytes as contents. They are not compressed or checked."""
        made = cls()
        made.write(data)
        return made

    @property
    def name(self) -> str:
        """The archive's file name on a node: a hash of everything written so far, and ".tar.gz"."""
        return f"{self._hash.hexdigest()[:16]}.tar.gz"

    def write(self, data: bytes) -> int:
        """Append bytes to the archive, and return their number. They are in the file when this method returns."""
        self._file.write(data)
        self._file.flush()
        self._hash.update(data)
        self.size += len(data)
        return len(data)

    def read(self, at: int, size: int = _CHUNK) -> bytes:
        """Return at most `size` bytes from position `at`; b"" at the end. Any thread may call this."""
        return os.pread(self._file.fileno(), size, at)

    def __bytes__(self) -> bytes:
        return self.read(0, self.size)

    def __del__(self) -> None:
        self._file.close()


def pack(spec: Spec, progress: Progress | None = None, project: SentProject | None = None) -> Packed | None:
    """Return a tar.gz archive of the image's `project`, `files` and `include`, or None if there is nothing to send.

    Blocks until all files are packed, piece by piece, so that large files need little memory. `progress` is called in
    this thread with the number of bytes read so far and the total number.

    Raises:
        ImageError: a local file cannot be read or becomes shorter during reading, a glob of `include` matches no file,
            or the image has a project that nobody has looked at.
    """
    if spec.project is not None and project is None:
        raise ImageError(
            f"project: which files of {spec.project} are sent is found out when a pool starts, so this image has no "
            "script or archive before; without project= it has"
        )
    entries = dict(_entries(spec, project))
    if not entries:
        return None
    import tarfile

    packed = Packed(project)
    total = sum(_size(source) for source, _ in entries.values())
    read = _Counter(progress or (lambda done, total: None), total)
    members = cast(IO[bytes], _Members(packed))
    with tarfile.open(fileobj=members, mode="w|", format=tarfile.PAX_FORMAT, bufsize=_CHUNK) as archive:
        for place in sorted(entries):
            _add(archive, place, *entries[place], read)
    return packed


class _Members:
    """Writer that adds each part of an archive to a `Packed` as a gzip member. gzip reads all members as one file."""

    def __init__(self, packed: Packed) -> None:
        self._packed = packed

    def write(self, data: bytes) -> int:
        import zlib

        # what hardly becomes smaller, such as images and weights, is only stored: that is 20 times as fast
        sample = data[len(data) // 2 :][:_SAMPLE]
        is_worth_it = len(zlib.compress(sample, _LEVEL)) < _WORTH * len(sample)
        self._packed.write(zlib.compress(data, _LEVEL if is_worth_it else 0, wbits=_GZIP))
        return len(data)


class _Counter:
    """A reader of the file in its attribute `file`, which reports the number of bytes that it read from all files."""

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
    """Add a local file, or bytes, to an archive under the path `place`. Errors name `field`, the image's field."""
    import tarfile

    member = tarfile.TarInfo(place)
    if isinstance(source, bytes):
        member.size, member.mode, read.file = len(source), 0o644, io.BytesIO(source)
        return archive.addfile(member, cast(IO[bytes], read))
    try:
        if field == "project" and source.is_symlink():
            member.type, member.linkname = tarfile.SYMTYPE, os.readlink(source)
            return archive.addfile(member)
        with open(source, "rb") as read.file:
            about = os.fstat(read.file.fileno())
            member.size = about.st_size
            member.mode = about.st_mode & 0o777
            archive.addfile(member, cast(IO[bytes], read))
    except OSError as error:
        why = error.strerror or "it became shorter while it was read"
        raise ImageError(f"{field}: {source} cannot be read: {why}") from error


def _size(source: Path | bytes) -> int:
    if isinstance(source, bytes):
        return len(source)
    return source.stat().st_size if source.exists() else 0  # a link of a project may lead to nothing


def roots(spec: Spec) -> set[str]:
    """Return the top-level folders that the image's archive will have: "work", "home", "root". No file is read."""
    found = {_inside(place).partition("/")[0] for place, _ in spec.files}
    return found | ({"work"} if spec.include or spec.project is not None else set())


def _inside(place: str) -> str:
    """Return the path in the archive for a place on a node: "home/a" for "~/a", "root/a" for "/a", "work/a" for "a"."""
    if place.startswith("~/"):
        return f"home/{place[2:]}"
    return f"root{place}" if place.startswith("/") else f"work/{place}"


def _entries(spec: Spec, project: SentProject | None) -> Iterator[tuple[str, tuple[Path | bytes, str]]]:
    """Yield (path in the archive, (contents or local path, name of the field)) for each file to send."""
    folder = Path(spec.folder)
    if project is not None:
        for below in project.paths:
            yield _named(f"work/{below}", "project"), (project.root / below, "project")
    for pattern in spec.include:
        found = False
        for path in _found(folder, pattern, spec.exclude):
            found = True
            yield (
                _named(f"work/{path.relative_to(folder).as_posix()}", "include"),
                (_readable(path, "include"), "include"),
            )
        if not found:
            raise ImageError(
                f"include: {pattern!r} matches no file to send in {folder.resolve()}; correct or remove this pattern"
            )
    # of entries with the same path, the later one counts
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
    """Return a path in the archive unchanged. Raise ImageError, which names `field`, if it has a line break."""
    if "\n" in place:
        raise ImageError(f"{field}: {place.partition('/')[2]!r} has a line break in its name; rename the file")
    return place


def _readable(path: Path, field: str) -> Path:
    """Return the path of a local file unchanged. Raise ImageError if it is not a regular file that can be read."""
    try:
        if not path.is_file() and path.exists():
            raise ImageError(
                f"{field}: {path} is neither a regular file nor a folder, so it cannot be sent; name another path"
            )
        with open(path, "rb"):
            return path
    except OSError as error:
        raise ImageError(f"{field}: {path} cannot be read: {error.strerror}") from error


def _found(folder: Path, pattern: str, exclude: tuple[str, ...]) -> Iterator[Path]:
    """Yield the files that match a glob, or are in a matching folder, unless `exclude` or `_NEVER` matches them."""
    for path in sorted(folder.glob(pattern)) if Path(pattern).parts else (folder,):
        for each in _below(path) if path.is_dir() else (path,):
            if not any(_matches(each.relative_to(folder), glob) for glob in (*_NEVER, *exclude)):
                yield each


def _below(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, sorted by name in each folder. A link to a folder is followed only once."""
    seen: set[str] = set()
    for top, folders, files in os.walk(folder, followlinks=True):
        seen.add(os.path.realpath(top))
        folders[:] = sorted(
            each for each in folders if each not in _NEVER and os.path.realpath(f"{top}/{each}") not in seen
        )
        yield from (Path(top, each) for each in sorted(files))


def _matches(path: Path, glob: str) -> bool:
    """Return True if a glob matches a relative path. Case matters. A slash at the end of the glob is ignored."""
    import fnmatch

    if "/" not in glob.rstrip("/"):  # "data" matches "a/data/b"
        return any(fnmatch.fnmatchcase(part, glob.rstrip("/")) for part in path.parts)
    # "data/**" matches "data/b", but not "a/data/b"
    wanted = glob.rstrip("/").removesuffix("/**")
    return any(fnmatch.fnmatchcase(above.as_posix(), wanted) for above in (path, *path.parents))
