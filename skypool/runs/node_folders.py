"""The folder of a node in which projects, their environments and the output of programs are kept."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from skypool.safety import user_folders

_KEPT = 14 * 86400.0
"""Seconds for which a project, an environment or output that nobody uses is kept on a machine that goes on."""


def home() -> str:
    """Return the folder, and remove what has not been used for 14 days."""
    found = user_folders.cache() / "runs"
    for each in found.glob("*/*"):
        if time.time() - each.stat().st_mtime > _KEPT:
            shutil.rmtree(each, ignore_errors=True)
    return str(found)


def use(folder: Path) -> None:
    """Note that a folder below the home is in use."""
    os.utime(folder)
