"""The folder of a node in which projects and their environments are kept.

Nodes may have nothing but the standard library and skypool.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from skypool import runtime
from skypool.safety import private, removal

_COARSEST = 2.0
"""The most seconds between two ticks of the clock of a file system."""
_KEPT = 14 * 86400.0
"""Seconds for which a project or an environment that nobody uses is kept on a machine that goes on."""


def claimed(name: str) -> str:
    """Return the folder of a project on this node, which is made if it is not there.

    Remove projects and environments that have not been used for 14 days.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    home = private.folder(cache / "skypool" / "runs", private.CACHE)
    copy = home / "projects" / name
    copy.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.utime(copy)
    for each in home.glob("marks/*/*"):
        with contextlib.suppress(OSError):  # another run removes it, too
            if time.time() - each.stat().st_mtime > 86400:
                each.unlink()
    for each in (*home.glob("projects/*"), *home.glob("environments/*")):
        with contextlib.suppress(OSError):  # it is in use, or another run removes it, too
            if time.time() - each.stat().st_mtime > _KEPT:
                with _lock(each) as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if time.time() - each.stat().st_mtime > _KEPT:  # and still is
                        removal.remove(each)
                        if not each.exists():
                            _note(each).unlink(missing_ok=True)
    return str(copy)


@contextlib.contextmanager
def held(*folders: str) -> Iterator[None]:
    """Keep folders of projects and environments from being removed in the `with` block. "" stands for none."""
    with contextlib.ExitStack() as locks:
        for each in filter(None, folders):
            fcntl.flock(locks.enter_context(_lock(Path(each))), fcntl.LOCK_SH)
            os.utime(each)
        try:
            yield
        finally:
            for each in filter(None, folders):
                with contextlib.suppress(OSError):  # the program may have removed it
                    os.utime(each)


@contextlib.contextmanager
def alone(folder: str) -> Iterator[None]:
    """Wait until no other run makes this environment, and let none make or remove it in the `with` block."""
    with _lock(Path(f"{folder}.made")) as making, _lock(Path(folder)) as using:
        fcntl.flock(making, fcntl.LOCK_EX)
        fcntl.flock(using, fcntl.LOCK_SH)
        yield


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[int]:
    """Open the file whose lock tells that a folder is in use. A program that is started does not inherit it."""
    path = folder.parent.parent / "locks" / f"{folder.parent.name}-{folder.name}"
    path.parent.mkdir(exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield file
    finally:
        os.close(file)


def _note(copy: Path) -> Path:
    """Return the file that says what was sent of a project."""
    return copy.parent.parent / "sent" / copy.name


def sent_files(copy: str) -> dict[str, int]:
    """Return what was sent of a project: the time of the last change of each file, in nanoseconds, by path."""
    try:
        found = json.loads(_note(Path(copy)).read_text("utf-8", "surrogateescape"))
    except (OSError, ValueError):  # the first run, or the disk was full
        return {}
    return found if isinstance(found, dict) else {}


def note_sent(copy: str, sent: Mapping[str, int], removes: bool) -> None:
    """Note what is sent of a project.

    Args:
        sent: the time of the last change of each file, in nanoseconds since 1970, by its path.
        removes: remove the files that were sent before and are not sent any more, and the folders that are empty then.
            What programs wrote stays, also in place of a file that was sent.
    """
    note = _note(Path(copy))
    note.parent.mkdir(exist_ok=True)
    with _lock(Path(f"{copy}.note")) as lock, contextlib.ExitStack() as undo:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = sent_files(copy)
        if removes:
            for each in kept.keys() - sent.keys():
                _remove(copy, each, kept.pop(each))
        new = note.with_name(f"{note.name}.{os.getpid()}-{time.time_ns():x}")
        undo.callback(new.unlink, missing_ok=True)
        new.write_text(json.dumps(kept | dict(sent)), "utf-8", "surrogateescape")
        new.replace(note)


def _remove(copy: str, path: str, sent_at: int) -> None:
    """Remove a file that was sent, unless a program has changed it, and the folders that are empty then."""
    gone = Path(copy, path)
    if os.path.realpath(gone.parent) != os.path.join(os.path.realpath(copy), os.path.dirname(path)).rstrip("/"):
        return  # a program has put a link there
    with contextlib.suppress(OSError):  # such as a folder that is full, or a file that is a folder now
        about = os.lstat(gone)
        if stat.S_ISREG(about.st_mode) and about.st_mtime_ns != sent_at:
            return
        gone.unlink(missing_ok=True)
        for folder in [*gone.relative_to(copy).parents][:-1]:
            Path(copy, folder).rmdir()


def mark(copy: str, run: str) -> None:
    """Leave a mark of this node beside a project, by which `begun` finds nodes with one folder."""
    marks = _marks(copy)
    marks.mkdir(parents=True, exist_ok=True)
    Path(marks, f"{run}-{runtime.node_number():06}").touch()


def begun(copy: str, run: str, saved: str) -> tuple[int, str, str, int]:
    """Note that a project is there and that its program begins.

    Args:
        saved: the folder below the project that will be fetched; "" for none.

    Returns:
        The time in nanoseconds, by the clock of the file system: what a program changes from now on is newer. The first
        mark of this run that is beside the project, which is the same for nodes with one folder. The file with the
        paths of the files that are in `saved` now, and their inodes, each with a zero byte: a file that comes later was
        moved there, though it may be older. And the number of these files that were not sent.
    """
    sent, unsent = sent_files(copy) if saved else {}, 0
    known = _marks(copy) / f"known-{run}-{runtime.node_number():06}"
    with open(known, "wb") as file:
        for folder, _, names in os.walk(os.path.join(copy, saved)) if saved else ():
            below = os.path.relpath(folder, os.path.join(copy, saved))
            for each in names:
                with contextlib.suppress(OSError):  # it is gone again, or in a folder that may not be read
                    inode = os.lstat(os.path.join(folder, each)).st_ino
                    file.write(os.fsencode(os.path.normpath(f"{below}/{each}")) + f"\0{inode}\0".encode())
                    unsent += os.path.normpath(f"{saved}/{below}/{each}") not in sent
    return _tick(copy), min(each.name for each in _marks(copy).glob(f"{run}-*")), str(known), unsent


def _tick(folder: str) -> int:
    """Return a time of the clock of a folder's file system that no change before this call has, in nanoseconds."""
    os.utime(folder)
    before = now = os.stat(folder).st_ctime_ns
    until = time.monotonic() + _COARSEST
    while now == before and time.monotonic() < until:
        time.sleep(0.001)
        os.utime(folder)
        now = os.stat(folder).st_ctime_ns
    return now


def _marks(copy: str) -> Path:
    """Return the folder of the marks of nodes."""
    path = Path(copy)
    return path.parent.parent / "marks" / path.name
