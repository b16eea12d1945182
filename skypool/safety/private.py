"""Makes and checks folders and files that only this user can change.

What skypool runs, imports, unpickles or believes is in such places. A new folder is made with mode 0700. An existing
one is used only if this user owns it, and nobody else can change or replace it. That includes the way to it:

- Each folder on the way belongs to this user or root. Others cannot change it, unless it has the sticky bit, as /tmp.
- Symbolic links on the way belong to this user or root. The last part of the path is no link.

So no other user can change what was checked between the check and the use.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections import deque
from importlib.resources import files
from pathlib import Path

from skypool.errors import NotPrivate

CLOSED = (files("skypool.safety") / "closed.sh").read_text("utf-8")
"""The source of a shell function for nodes, `closed FOLDER`, which checks a folder.

If another user can change the folder, the function prints why; otherwise it prints nothing.
"""
STATE = "set XDG_STATE_HOME to a folder of your own"
CACHE = "set XDG_CACHE_HOME to a folder of your own"
"""Advice if the folder for caches cannot be used. `STATE` is the advice for the folder for state."""
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_MOST_LINKS = 40
"""The most symbolic links that are followed on the way to a folder. Linux has the same limit."""


def folder(path: str | os.PathLike[str], instead: str = "", *, mend: bool = True) -> Path:
    """Make a folder that only this user can enter, and the folders above it, or check an existing one. Return it.

    Args:
        instead: for the error message, how to use another folder, such as "set XDG_STATE_HOME to a folder of your own".
        mend: True takes away the rights of others to read an existing folder; False refuses such a folder. A folder
            that others can change is always refused, as they may have put something into it.

    Raises:
        NotPrivate: another user can change the folder, or what is on the way to it. Nothing was changed.
        OSError: the folder cannot be made.
    """
    place = _way_to(os.fspath(path), instead, make=True)
    opened = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        about = os.fstat(opened)
        _judge(place, about, instead)
        if about.st_mode & _OTHERS:
            if not mend:
                raise _refused(place, about, "other users can enter it, and may have put something into it", instead)
            os.fchmod(opened, stat.S_IRWXU)
    finally:
        os.close(opened)
    return Path(path)


def check(path: str | os.PathLike[str], instead: str = "") -> None:
    """Check that other users cannot change an existing folder. They may be able to read it. Nothing is changed.

    Args:
        instead: for the error message, how to use another folder.

    Raises:
        NotPrivate: another user can change the folder, or what is on the way to it.
        FileNotFoundError: the folder does not exist.
        OSError: the folder cannot be examined.
    """
    place = _way_to(os.fspath(path), instead, make=False)
    _judge(place, os.lstat(place), instead)


def check_file(path: str | os.PathLike[str], instead: str = "") -> None:
    """Check that other users cannot change a file in a private folder. A missing file raises no error.

    Others may have put the file there before the folder became private. `instead` is advice for the error message, on
    how to use another folder. Raises NotPrivate if the file is another user's, others can change it, or it is no
    regular file.
    """
    with contextlib.suppress(FileNotFoundError):
        _judge_file(os.fspath(path), os.lstat(path), instead)


def opened(path: str | os.PathLike[str], flags: int, instead: str = "") -> int:
    """Open a file in a private folder, and return its descriptor. With O_CREAT, a new file gets mode 0600.

    `flags` are those of `os.open`. `instead` is advice for the error message, on how to use another folder.

    Raises:
        NotPrivate: the file is another user's, others can change it, or it is no regular file.
        OSError: the file cannot be opened.
    """
    place = os.fspath(path)
    with contextlib.suppress(FileNotFoundError):
        _judge_file(place, os.lstat(place), instead)
    fd = os.open(place, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    try:
        _judge_file(place, os.fstat(fd), instead)
    except NotPrivate:
        os.close(fd)
        raise
    os.set_blocking(fd, True)
    return fd


def read(path: str | os.PathLike[str]) -> bytes:
    """Return the contents of a file in a private folder.

    Raises:
        NotPrivate: the file is another user's, others can change it, or it is no regular file.
        OSError: the file cannot be opened, for example because it does not exist.
    """
    with open(opened(path, os.O_RDONLY), "rb") as file:
        return file.read()


def _way_to(path: str, instead: str, make: bool) -> str:
    """Check the folders on the way to a folder; with `make`, make missing ones. Return the path without links."""
    todo = deque(each for each in os.path.join(os.getcwd(), path).split(os.sep) if each not in ("", os.curdir))
    here = os.sep
    links = 0
    while True:
        about = os.lstat(here)
        if not todo:
            break  # of the folder itself, only its type is checked
        _judge_above(path, here, about, instead)
        part = todo.popleft()
        if part == os.pardir:
            here = os.path.dirname(here)
            continue
        below = os.path.join(here, part)
        try:
            about = os.lstat(below)
        except FileNotFoundError:
            if not make:
                raise
            with contextlib.suppress(FileExistsError):  # by another process just now; it is looked at all the same
                os.mkdir(below, stat.S_IRWXU)
            about = os.lstat(below)
        if not stat.S_ISLNK(about.st_mode):
            here = below
            continue
        links += 1
        if not todo or links > _MOST_LINKS:
            raise _refused(below, about, "it is a symbolic link, which is not followed", instead)
        if not _is_builder(about.st_uid):
            raise _refused(below, about, "it is a symbolic link of another user", instead)
        to = os.readlink(below)
        todo.extendleft(each for each in reversed(to.split(os.sep)) if each not in ("", os.curdir))
        if os.path.isabs(to):
            here = os.sep
    if not stat.S_ISDIR(about.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), here)
    return here


def _judge(place: str, about: os.stat_result, instead: str) -> None:
    """Raise NotPrivate if a folder is not this user's, or if others can change it."""
    if about.st_uid != os.geteuid():
        raise _refused(place, about, "it belongs to another user, who could have you run code through it", instead)
    if _is_open(about):
        raise _refused(place, about, "other users can change it, and may have put something into it", instead)


def _judge_above(path: str, place: str, about: os.stat_result, instead: str) -> None:
    """Raise NotPrivate if others can replace what is in a folder on the way to `path`."""
    if not _is_builder(about.st_uid):
        why = f"it belongs to another user, who could replace {path}"
    elif _is_open(about) and not about.st_mode & stat.S_ISVTX:
        why = f"other users can change it, and could replace {path}"
    else:
        return
    raise _refused(place, about, why, instead)


def _judge_file(place: str, about: os.stat_result, instead: str) -> None:
    if not stat.S_ISREG(about.st_mode) and not stat.S_ISDIR(about.st_mode):  # using a folder fails by itself
        raise _refused(place, about, "it is no regular file", instead)
    if about.st_uid != os.geteuid():
        raise _refused(place, about, "it belongs to another user", instead)
    if _is_open(about):
        raise _refused(place, about, "other users can change it", instead)


def _is_open(about: os.stat_result) -> bool:
    """Return True if others than the owner can write. Rights of this user's own group (mode 0775) do not count."""
    if not about.st_mode & _OTHERS_WRITE:
        return False
    return bool(about.st_mode & stat.S_IWOTH) or not _is_own_group(about.st_gid)


def _is_own_group(group: int) -> bool:
    """Return True if a group is root's, or this user's primary group with the user's name and no other member."""
    import grp
    import pwd

    if group == 0:
        return True  # its members are root's own choice
    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return user.pw_gid == group and user.pw_name == found.gr_name and set(found.gr_mem) <= {user.pw_name}


def _is_builder(user: int) -> bool:
    """Return True for root and this user. In a user namespace, the id that stands for all users outside counts, too."""
    if user in (0, os.geteuid()):
        return True
    try:
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text())
        mapped = [int(line.split()[2]) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    except (OSError, ValueError):
        return False
    return user == overflow and sum(mapped) < 2**32 - 1


def _refused(place: str, about: os.stat_result, why: str, instead: str) -> NotPrivate:
    mode = stat.S_IMODE(about.st_mode)
    mine = about.st_uid == os.geteuid()
    if not mine:
        remedy = instead or "have its owner remove it, or use another folder"
    elif stat.S_ISDIR(about.st_mode):
        remedy = f"if all that is in it is yours, run `chmod go-rwx {place}`; otherwise remove it"
        remedy += f", or {instead}" if instead else ""
    else:
        remedy = f"look at it, and remove it: rm {place}"
    what = {stat.S_IFDIR: "folder", stat.S_IFREG: "file", stat.S_IFLNK: "link"}.get(stat.S_IFMT(about.st_mode), "entry")
    owner = "you" if mine else _name_of(about.st_uid)
    return NotPrivate(
        f"skypool does not use the {what} {place} (owner {owner}, mode {mode:04o}): {why}; {remedy}",
        path=place,
        owner=about.st_uid,
        mode=mode,
    )


def _name_of(user: int) -> str:
    import pwd

    try:
        return f"{pwd.getpwuid(user).pw_name} ({user})"
    except KeyError:
        return str(user)
