"""Functions that hang, for tests of what processes say that they are doing."""

from __future__ import annotations

import ctypes
import os
import socket
import time

import skypool as sky


def barrier(rank: int, world: int) -> None:
    """Meet the other ranks at rank 0. The last rank never comes."""
    if rank == world - 1:
        late()
    place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if rank == 0:
        with socket.create_server(("", place[1])) as server:
            here = [server.accept() for _ in range(world - 1)]
            assert here
    while True:
        try:
            with socket.create_connection(place) as peer:
                peer.recv(1)
        except ConnectionRefusedError:
            time.sleep(0.01)


def late() -> None:
    time.sleep(600)


def native() -> None:
    """Hang in native code, which keeps the interpreter's lock, so that no Python code can run in this process."""
    read, _ = os.pipe()
    while True:
        ctypes.PyDLL(None).read(read, ctypes.create_string_buffer(1), 1)


def spin() -> None:
    while True:
        pass


@sky.compute(procs=2)
def hang(how: str, pause: float = 0.0) -> None:
    info = sky.instance_info()
    time.sleep(pause * (info.rank or 0))
    if how == "barrier":
        barrier(info.rank or 0, info.world_size or 1)
    elif how == "native":
        native()
    elif how == "spin":
        spin()
    late()


WHERE = {"barrier": ("in barrier", "in late"), "native": ("in native",), "spin": ("in spin",), "late": ("in late",)}
"""What the stack of a rank must contain, one of these, for each way to hang."""
