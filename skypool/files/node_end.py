"""The node's end of a transfer, as a program: `main`.

A node gets the text of this module, so it uses the standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys

from skypool.files.entries import entry_of, walk
from skypool.files.frames import Broken, Channel, Kind, Refused
from skypool.files.receiving import Receiver
from skypool.files.sending import Sender


def main(role: str, path: str, options: str) -> None:
    """Send or receive through stdin and stdout, and end the process.

    Args:
        role: "send" or "receive".
        path: the file or folder.
        options: those of `Receiver`, as JSON.
    """
    channel = Channel(0, 1)
    try:
        if role == "receive":
            Receiver(channel, os.path.expanduser(path), **json.loads(options)).run()
        else:
            _send(channel, os.path.expanduser(path))
    except Broken as e:
        sys.exit(str(e))
    except Exception as e:  # noqa: BLE001 - the client tells the user
        with contextlib.suppress(Broken):
            channel.tell(Kind.FAILED, _why(path, e))
        sys.exit(1)


def _why(path: str, error: Exception) -> str:
    """Return what the client is told about an error."""
    if isinstance(error, Refused):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename or path}: {error.strerror}"
    return f"{type(error).__name__}: {error}"


def _send(channel: Channel, path: str) -> None:
    if stat.S_ISDIR(os.stat(path).st_mode):
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY))  # raises OSError now rather than in the middle
        sender = Sender([channel], path, "", walk(path, lambda *_: False))
    else:
        name, file = os.path.basename(path), os.path.realpath(path)
        sender = Sender([channel], file, name, [entry_of(name, file)])
    sender.run()
    for error in sender.lost.values():
        raise error
