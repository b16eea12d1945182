"""Machines of a provider that failed this user in the last day, so that they are not rented again.

Each is a file.

For providers where an offer is one stranger's machine. Whoever wants one back removes its file.
"""

from __future__ import annotations

import time
from pathlib import Path

REMEMBERED = 86400.0
"""Seconds for which a machine is left out."""


def note(provider: str, machine: int, why: str) -> None:
    """From now on every process of this user knows that it failed."""
    folder = place(provider)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / str(machine)).write_text(why)


def known(provider: str) -> dict[int, str]:
    """Those that failed, and why; the files of those whose time is over go."""
    found: dict[int, str] = {}
    for file in place(provider).glob("[0-9]*"):
        try:
            if time.time() - file.stat().st_mtime < REMEMBERED:
                found[int(file.name)] = file.read_text(errors="replace")
            else:
                file.unlink()
        except FileNotFoundError:
            continue  # another process was first
    return found


def place(provider: str) -> Path:
    """Where the files are."""
    import platformdirs  # not on a node, where modules that import skypool are imported too

    return Path(platformdirs.user_state_dir("skypool")) / "faulty" / provider
