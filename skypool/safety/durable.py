"""Files that stay through a loss of power, which only this user can read."""

from __future__ import annotations

import contextlib
import os
import secrets


def write_new(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file that is not there yet. It is whole or absent, as it is written under another name first.

    Its data is on the disk then; call `sync` with its folder for its name.

    Raises:
        FileExistsError: there is one.
        OSError: it cannot be written.
    """
    new = f"{os.fspath(path)}.{secrets.token_hex(4)}"
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.link(new, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new)


def sync(folder: str | os.PathLike[str]) -> None:
    """Have the names of the files in a folder written to the disk. Raises OSError if that fails."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
