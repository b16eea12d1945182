"""Blocklist of a provider's machines that failed for this user in the last day, so that they are not rented again.

The blocklist is for providers whose offers are single machines of strangers. Each blocked machine is one file, whose
name is the provider's number of the machine. Remove the file to allow the machine again.
"""

from __future__ import annotations

import time
from pathlib import Path

from skypool.safety import private, user_folders

REMEMBERED = 86400.0
"""Seconds for which a failed machine stays on the blocklist."""
_LONGEST = 1000
"""The most characters of a reason that are kept."""


def note(provider: str, machine: int, why: str) -> None:
    """Put a machine on the provider's blocklist, so that no process of this user rents it for one day.

    If the machine is on the blocklist already, its reason is replaced and its day begins again.

    Args:
        provider: name of the driver, such as "vastai".
        machine: the provider's number of the machine.
        why: the reason, of which the first 1,000 characters are kept.

    Raises:
        OSError: the blocklist cannot be written, or another user can change it.
    """
    folder = private.folder(place(provider), private.STATE)
    (folder / str(machine)).write_text(why[:_LONGEST], "utf-8", "backslashreplace")


def known(provider: str) -> dict[int, str]:
    """Return a dict from the number of each blocked machine of a provider to the reason why it is blocked.

    Machines that were blocked a day ago or earlier are removed from the blocklist, and not returned.

    Raises:
        NotPrivate: another user can change the blocklist.
    """
    found: dict[int, str] = {}
    try:
        private.check(place(provider), private.STATE)
    except FileNotFoundError:
        return {}
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
    """Return the folder of the provider's blocklist, with one file for each blocked machine. It may not exist yet."""
    return user_folders.state() / "faulty" / provider
