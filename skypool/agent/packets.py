"""Converts file descriptors to and from the control data with which packets on Unix sockets carry them."""

from __future__ import annotations

import array
import socket

from skypool.wire.frames import INLINE

PACKET = INLINE + (64 << 10)
"""The greatest size of a packet in bytes: the body of a frame, and room for the header."""
SPACE = socket.CMSG_SPACE(64)
"""The room in bytes for the control data of one packet: up to 16 file descriptors."""
CLOEXEC = int(socket.MSG_CMSG_CLOEXEC)


def descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """Return the file descriptors in the control data of a packet, as `recvmsg` returns it, in order."""
    if not ancillary:
        return []
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds.tolist()


def rights(fds: list[int]) -> list[tuple[int, int, array.array[int]]]:
    """Return the control data for `sendmsg` that sends these file descriptors."""
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
