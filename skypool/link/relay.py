"""The program that connects its stdin and stdout with a port: `python -c SOURCE HOST PORT`. It runs on a node.

The client starts it once for each connection of a forward, on nodes that are not reached by ssh. It uses the standard
library only, and does not import skypool.
"""

import os
import socket
import sys
import threading

_BLOCK = 1 << 18
"""The most bytes that are read at a time."""


def main(host: str, port: int) -> None:
    """Copy stdin to the port, and what comes back to stdout, until the other side closes the connection.

    When stdin ends, the other side is told so, and may still answer.
    """
    try:
        connection = socket.create_connection((host, port), timeout=30)
    except OSError as e:
        sys.exit(f"cannot connect to {host}:{port}: {e}")
    connection.settimeout(None)
    threading.Thread(target=_send, args=(connection,), daemon=True).start()
    try:
        while data := connection.recv(_BLOCK):
            while data:
                data = data[os.write(1, data) :]
    except OSError:
        sys.exit(1)  # one of the two sides is gone; the exit tells the other


def _send(connection: socket.socket) -> None:
    try:
        while data := os.read(0, _BLOCK):
            connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
    except OSError:
        os._exit(1)  # the main thread waits for an answer that cannot come


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
