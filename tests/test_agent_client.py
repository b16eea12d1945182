"""The agent's connections to its client."""

from __future__ import annotations

import gc
import os
import socket
import weakref
from collections.abc import Callable
from pathlib import Path

from skypool.agent.client_session import Client
from skypool.agent.value_storage import SpareMemory
from skypool.clock import RunningClock


def test_the_memory_of_a_connection_is_free_when_it_is_closed(tmp_path: Path) -> None:
    """A node may see thousands of connections, and each has a buffer of a megabyte."""
    watched: dict[int, Callable[[], None]] = {}

    def watch(fd: int, events: int, callback: Callable[[], None]) -> None:
        if events:
            watched[fd] = callback
        else:
            watched.pop(fd, None)

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "agent"))
    listener.listen()
    nothing = lambda *_: None  # noqa: E731
    client = Client(
        listener, watch, 10.0, RunningClock(), nothing, lambda: "", lambda *_: {}, nothing, nothing, SpareMemory()
    )
    holder = socket.socket(socket.AF_UNIX)
    holder.connect(str(tmp_path / "agent"))
    ours, theirs = socket.socketpair()
    socket.send_fds(holder, [b"x"], [theirs.fileno(), os.dup(theirs.fileno())])
    watched[listener.fileno()]()
    [connection] = map(weakref.ref, client._holders)
    assert len(watched) == 2
    ours.close()
    theirs.close()
    gc.disable()
    try:
        [fd] = watched.keys() - {listener.fileno()}
        watched[fd]()
        assert len(watched) == 1
        assert connection() is None
    finally:
        gc.enable()
        listener.close()
        holder.close()
