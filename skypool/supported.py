"""Checks the operating system. The client (the user's side) runs on Linux and macOS. Nodes run Linux."""

from __future__ import annotations

import sys

from skypool.errors import UsageError


def check_client() -> None:
    """Raise UsageError if skypool cannot run on this operating system as a client. Only Windows is refused."""
    if sys.platform == "win32":
        raise UsageError(
            "skypool runs on Linux and macOS, and this is Windows: install WSL (`wsl --install`) and use it there"
        )
