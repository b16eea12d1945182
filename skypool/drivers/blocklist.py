"""Blocklist of a provider's machines that failed for this user in the last day, so that they are not rented again.

It is for providers whose offers are single machines of strangers. Each blocked machine is one file, named by its
number. Remove the file to allow the machine again.
"""

from __future__ import annotations

import time
from pathlib import Path

REMEMBERED = 86400.0
"""Seconds for which a failed machine is left out."""


def note(provider: str, machine: int, why: str) -> None:
    """Add a machine to the provider's blocklist, for all processes of this user and for one day.

    If the machine is listed already, the reason is replaced and the day begins again.

    Args:
        provider: name of the driver.
        machine: the provider's number of the machine.
        why: reason, which `known` returns.
    """
    folder = place(provider)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / str(machine)).write_text(why)


def known(provider: str) -> dict[int, str]:
    """Return the blocked machines of a provider: a dict from the machine's number to the reason.

    Empty if there are none. Entries that are a day old or older are deleted, and not returned.
    """
    found: dict[int, str] = {}
    for file in place(provider).glob("[0-9]*"):
        try:
            if time.time() - file.stat().st_mtime < REMEMBERED:
                found[int(file.name)] = file.read_text(errors="replace")
            else:
                file.unlink()
        except FileNotFoundError:
            continue  # another process deleted it first
    return found


def place(provider: str) -> Path:
    """Return the folder of the provider's blocklist, which has one file for each machine.

    The folder is not created, so it may not exist yet.
    """
    import platformdirs  # imported here, as nodes import this module without having platformdirs

    return Path(platformdirs.user_state_dir("skypool")) / "faulty" / provider
