"""The folder of a node in which projects, their environments and the output of programs are kept.

Nodes may have nothing but the standard library and skypool.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Sequence
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


def note_sent(copy: str, paths: Sequence[str]) -> None:
    """Remove the files of a project that an earlier run has sent and this one has not, and note what this one has.

    What programs wrote there stays.
    """
    note = Path(copy).parent.parent / "sent" / Path(copy).name
    note.parent.mkdir(exist_ok=True)
    former: list[str] = []
    with contextlib.suppress(FileNotFoundError):
        former = json.loads(note.read_text("utf-8", "surrogateescape"))
    for each in {*former} - {*paths}:
        gone = Path(copy, each)
        with contextlib.suppress(OSError):  # such as a folder that is full, or a file that is a folder now
            gone.unlink()
            for folder in [*gone.relative_to(copy).parents][:-1]:
                Path(copy, folder).rmdir()
    note.write_text(json.dumps(paths), "utf-8", "surrogateescape")
