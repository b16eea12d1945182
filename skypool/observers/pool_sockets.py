"""Finds the sockets on which owners of pools serve observers.

Each socket has the name of its pool, in the folder `observers` of the user's state folder. Only the user may enter the
folder. If the path would be too long for a socket, the entry is a symbolic link to a socket in a new folder in /tmp.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from skypool.errors import NotPrivate
from skypool.safety import peers, private, user_folders

LONGEST = 103
"""The most bytes of the path of a Unix socket. Linux allows 107, and macOS allows 103."""
_NAME = re.compile(r"[a-z0-9-]+")
"""The names of pools."""
_UNFINISHED = "~"
"""A mark in the name of a socket while the socket is being made. It cannot be part of a pool's name."""
_MARK_LENGTH = 9
"""The number of characters of this mark and the random digits after it."""
_AGAIN = 0.02
"""Seconds between two attempts to connect to an owner for whom too many connections wait."""
_BACKLOG = 16
"""The most connections that may wait until the owner accepts them."""


def folder() -> Path:
    """Return the folder of the sockets. It may not exist yet."""
    return user_folders.state() / "observers"


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a socket in the folder of the sockets, as `listen` returns it.

    Attributes:
        name: the entry in the folder of the sockets.
        inode: the inode number of the entry. An entry of a later owner has another one.
        elsewhere: the folder of the socket, if the entry is a symbolic link; otherwise None.
    """

    name: Path
    inode: int
    elsewhere: Path | None

    def remove(self) -> None:
        """Remove the socket, unless it is gone. An entry of a later owner with the same name is kept."""
        if self.elsewhere is not None:
            _discard(self.elsewhere)
        with contextlib.suppress(FileNotFoundError):
            told = os.lstat(self.name)
            if told.st_ino == self.inode and (stat.S_ISSOCK(told.st_mode) or stat.S_ISLNK(told.st_mode)):
                self.name.unlink()


def listen(pool: str) -> tuple[socket.socket, Place]:
    """Make a listening socket (mode 0600) under the name of a pool, replacing an older one. Return it and its place.

    The socket accepts connections before it appears under its name, so an entry that refuses connections is stale.
    Raises OSError if the socket cannot be made, or if another user can change the folder.
    """
    home = private.folder(folder(), private.STATE)
    name = home / pool
    mark = _UNFINISHED + secrets.token_hex(_MARK_LENGTH // 2)
    path, elsewhere = name.with_name(pool + mark), None
    if len(os.fsencode(path)) > LONGEST:
        elsewhere = Path(tempfile.mkdtemp(prefix="skypool-", dir="/tmp"))
        path = elsewhere / "socket"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if elsewhere is not None:
            private.check(elsewhere)
        listener.bind(os.fspath(path))
        path.chmod(0o600)
        listener.listen(_BACKLOG)
        if elsewhere is not None:
            path = name.with_name(pool + mark)
            path.symlink_to(elsewhere / "socket")
        inode = os.lstat(path).st_ino
        former = _elsewhere(name)
        path.rename(name)
    except BaseException:
        listener.close()
        path.unlink(missing_ok=True)
        if elsewhere is not None:
            _discard(elsewhere)
        raise
    if former is not None:
        _discard(former)
    return listener, Place(name, inode, elsewhere)


def pools() -> list[str]:
    """Return the sorted names of the pools that have a socket, also a stale one; [] if the folder is not private."""
    with contextlib.suppress(FileNotFoundError, NotPrivate):
        private.check(folder())
        return sorted(each for each in os.listdir(folder()) if _UNFINISHED not in each)
    return []


def connect(pool: str, patience: float) -> socket.socket:
    """Connect to the owner of a pool, and return the connection. A stale socket is removed.

    Args:
        patience: seconds to wait for the connection, and later for each answer.

    Raises:
        FileNotFoundError: the pool has no socket, or `pool` is not the name of a pool.
        ConnectionRefusedError: the pool's socket is stale: its process was killed.
        NotPrivate: another user can change the folder of the sockets.
        PermissionError: the socket is that of another user.
        OSError: connecting failed, as after `patience` seconds (TimeoutError).
    """
    if not _NAME.fullmatch(pool):  # a path must not lead out of the folder
        raise FileNotFoundError(f"{pool!r} is not the name of a pool")
    private.check(folder(), private.STATE)
    name = folder() / pool
    inode = os.lstat(name).st_ino
    elsewhere = _elsewhere(name)
    if elsewhere is not None and not _is_private(elsewhere):
        Place(name, inode, None).remove()
        raise ConnectionRefusedError(f"{elsewhere} was removed, and another user has taken its name")
    path = name if elsewhere is None else elsewhere / "socket"
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.settimeout(patience)
    try:
        _connect(made, os.fspath(path), time.monotonic() + patience)
        if (user := peers.user(made)) not in (None, os.geteuid()):
            raise PermissionError(f"the socket {path} is served by user {user}, not by you")
    except (ConnectionRefusedError, FileNotFoundError):
        made.close()
        Place(name, inode, elsewhere).remove()
        raise
    except BaseException:
        made.close()
        raise
    return made


def _connect(made: socket.socket, path: str, until: float) -> None:
    """Connect to a socket. If its queue is full, try again until `until`: Linux itself does not wait for room."""
    while True:
        try:
            return made.connect(path)
        except BlockingIOError:
            if time.monotonic() > until:
                raise TimeoutError("too many connections wait for the owner already") from None
            time.sleep(_AGAIN)


def _elsewhere(name: Path) -> Path | None:
    """Return the folder in /tmp that an entry leads to; None if the entry is a socket itself, or does not exist."""
    try:
        return Path(os.readlink(name)).parent
    except OSError:
        return None


def _is_private(folder: Path) -> bool:
    """Return False if another user can change a folder, and True if nobody else can or the folder is missing."""
    try:
        private.check(folder)
    except FileNotFoundError:
        return True
    except NotPrivate:
        return False
    return True


def _discard(folder: Path) -> None:
    """Remove a folder in /tmp with the socket in it, unless it is gone, or is not a folder of this user."""
    with contextlib.suppress(OSError):
        private.check(folder)
        if folder.name.startswith("skypool-"):
            (folder / "socket").unlink(missing_ok=True)
            folder.rmdir()
