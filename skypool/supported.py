"""Checks the operating system: the client runs on Linux and macOS, nodes run Linux."""

from __future__ import annotations

import sys

from skypool.errors import UsageError


def check_client() -> None:
    """Check that the client supports this operating system.

    Raises:
        UsageError: this is Windows.
    """
    if sys.platform == "win32":
        raise UsageError(
            "skypool runs on Linux and macOS, and this is Windows: install WSL (`wsl --install`) and use it there"
        )
