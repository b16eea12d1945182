"""How Acme is asked, its refusals as errors of skypool, and how commands are run on its machines."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from skypool.drivers.refusals import Refusals
from skypool.drivers.rest import Rest
from skypool.drivers.transports import Trouble

REFUSALS = Refusals("skypool_acme", "acme", "Acme")


def account(url: str | None = None, api_key: str | None = None) -> Rest:
    """Return the API for this account.

    Args:
        url: base of the API; None is $ACME_URL, or else Acme's own.
        api_key: None is $ACME_API_KEY.

    Raises:
        CredentialsError: there is no key.
    """
    key = api_key or os.environ.get("ACME_API_KEY")
    if not key:
        raise REFUSALS.error("a login", "missing", "there is no API key")
    return _account(url or os.environ.get("ACME_URL") or "https://api.acme.example/v1", key)


@lru_cache(maxsize=32)
def _account(url: str, key: str) -> Rest:
    """Return one connection pool for each account, whichever driver object asks."""
    return Rest(url, REFUSALS, lambda: {"Authorization": f"Bearer {key}"})


@dataclass(frozen=True, slots=True)
class Console:
    """A transport: runs commands on a machine by the console program that Acme names for it."""

    words: tuple[str, ...]

    def argv(self, command: Sequence[str], *, terminal: bool = False) -> list[str]:
        """Return the local command that runs `command` on the machine."""
        return [*self.words, *command]

    def trouble(self, said: str) -> Trouble:
        """Tell from what the console printed why a command could not be run."""
        return Trouble.UNREACHABLE if "No route to host" in said else Trouble.OTHER
