"""The user's files for a node, in one archive whose bytes depend on nothing but what is in it."""

from __future__ import annotations

import fnmatch
import gzip
import hashlib
import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

from skypool_images.errors import ImageError
from skypool_images.spec import Spec

PLACES = {"work": "$SKYPOOL_WORK", "home": "$HOME", "root": "/"}
"""Folders in the archive, and where on the node their contents go."""

_NEVER = (".git", "__pycache__", ".venv", "*.pyc")


def pack(spec: Spec) -> bytes:
    """A tar.gz of `files` and `include`; b"" where there is nothing to send.

    Raises:
        ImageError: a local file that is not there, or a glob that finds nothing.
    """
    entries = dict(_entries(spec))
    if not entries:
        return b""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for place in sorted(entries):
            data, mode = entries[place]
            member = tarfile.TarInfo(place)
            member.size, member.mode = len(data), mode
            archive.addfile(member, io.BytesIO(data))
    return gzip.compress(packed.getvalue(), mtime=0)


def name(packed: bytes) -> str:
    return f"{hashlib.sha256(packed).hexdigest()[:16]}.tar.gz" if packed else ""


def roots(spec: Spec) -> set[str]:
    """Which of PLACES the archive has something for."""
    return {_inside(place).partition("/")[0] for place, _ in spec.files} | ({"work"} if spec.include else set())


def _inside(place: str) -> str:
    """Where a place on the node stands in the archive."""
    if place.startswith("~/"):
        return f"home/{place[2:]}"
    return f"root{place}" if place.startswith("/") else f"work/{place}"


def _entries(spec: Spec) -> Iterator[tuple[str, tuple[bytes, int]]]:
    """(place in the archive, (contents, mode)); what is named in `files` is stronger than what a glob finds."""
    folder = Path(spec.folder)
    for pattern in spec.include:
        found = False
        for path in _found(folder, pattern, spec.exclude):
            found = True
            yield _named(f"work/{path.relative_to(folder).as_posix()}", "include"), _read(path, "include")
        if not found:
            raise ImageError(f"include: {pattern!r} finds nothing to send in {folder.resolve()}")
    for place, source in spec.files:
        if isinstance(source, bytes):
            yield _inside(place), (source, 0o644)
            continue
        local = folder / os.path.expanduser(source)
        if not local.is_dir():
            yield _inside(place), _read(local, "files")
            continue
        for path in _below(local):
            yield _named(f"{_inside(place)}/{path.relative_to(local).as_posix()}", "files"), _read(path, "files")


def _named(place: str, field: str) -> str:
    """A place that the node can list in one line."""
    if "\n" in place:
        raise ImageError(f"{field}: {place.partition('/')[2]!r} has a line break in its name; give it another one")
    return place


def _read(path: Path, field: str) -> tuple[bytes, int]:
    try:
        if not path.is_file() and path.exists():
            raise ImageError(f"{field}: {path} is neither a file nor a folder")
        return path.read_bytes(), path.stat().st_mode & 0o777
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
