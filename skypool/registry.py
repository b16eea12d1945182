"""Drivers by name: whatever is installed under the entry-point group `skypool.providers`."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from skypool.driver import Driver
from skypool.errors import UsageError, nearest

GROUP = "skypool.providers"
REHEARSALS = "skypool.rehearsals"
"""Drivers that rent nothing real: found by their names, and never among what is installed."""


def providers(group: str = GROUP) -> dict[str, EntryPoint]:
    """The installed drivers by name, none of them imported.

    Raises:
        UsageError: two distributions claim one name.
    """
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=group):
        other = found.setdefault(point.name, point)
        if other.value != point.value:
            raise UsageError(
                f"two installed packages both provide {point.name!r} ({other.value} and {point.value}); uninstall one"
            )
    return found


def driver(name: str) -> Driver:
    """A driver by name, with its default settings.

    Raises:
        UsageError: no installed package provides it.
    """
    known = providers()
    if name not in known and name in (rehearsals := providers(REHEARSALS)):
        known = rehearsals
    if name not in known:
        close = nearest(name, known)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise UsageError(f"no provider is called {name!r}; {hint}installed: {', '.join(sorted(known))}")
    made = known[name].load()()
    if not isinstance(made, Driver):
        raise UsageError(f"{known[name].value} is no skypool driver: it lacks a verb of skypool.driver.Driver")
    return made
