"""Tells which user a Unix socket is connected to."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys

_SOL_LOCAL = 0
"""The level of the socket option `_LOCAL_PEERCRED` on macOS."""
_LOCAL_PEERCRED = 1
"""The socket option of macOS that returns a struct xucred: version and user id, 32 bits each, and groups."""


def user(connection: socket.socket) -> int | None:
    """Return the user id of the process at the other end of a Unix socket; None if the system does not tell."""
    if hasattr(socket, "SO_PEERCRED"):  # Linux
        return int(struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1])
    if sys.platform == "darwin":
        with contextlib.suppress(OSError):
            return int(struct.unpack_from("2I", connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERCRED, 76))[1])
    return None
