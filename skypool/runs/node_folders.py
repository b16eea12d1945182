"""The folder of a node in which projects, their environments and the output of programs are kept.

Nodes may have nothing but the standard library and skypool.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path

_KEPT = 14 * 86400.0
"""Seconds for which a project, an environment or output that nobody uses is kept on a machine that goes on."""


def home() -> str:
    """Return the folder, and remove what has not been used for 14 days."""
    found = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "skypool" / "runs"
    found.mkdir(mode=0o700, parents=True, exist_ok=True)
    for each in found.glob("*/*"):
        with contextlib.suppress(FileNotFoundError):  # another run removes it, too
            if time.time() - each.lstat().st_mtime <= _KEPT:
                continue
            if each.is_dir() and not each.is_symlink():
                shutil.rmtree(each, ignore_errors=True)
            else:
                each.unlink()
    return str(found)


def use(folder: Path) -> None:
    """Note that a folder below the home is in use."""
    os.utime(folder)
