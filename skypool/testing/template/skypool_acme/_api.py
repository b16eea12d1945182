"""Client of Acme's API: its requests, its errors as errors of skypool, and a transport to its machines."""

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
    """Return a client of the API for an account.

    Args:
        url: the base address of the API. None means $ACME_URL, or Acme's own address if that is not set.
        api_key: the API key. None means $ACME_API_KEY.

    Raises:
        CredentialsError: `api_key` is None, and $ACME_API_KEY is not set.
    """
    key = api_key or os.environ.get("ACME_API_KEY")
    if not key:
        raise REFUSALS.error("a login", "missing", "there is no API key")
    return _account(url or os.environ.get("ACME_URL") or "https://api.acme.example/v1", key)


@lru_cache(maxsize=32)
def _account(url: str, key: str) -> Rest:
    """Return a client of the API. The same arguments give the same client, which keeps its connections."""
    return Rest(url, REFUSALS, lambda: {"Authorization": f"Bearer {key}"})


@dataclass(frozen=True, slots=True)
class Console:
    """A transport that runs commands on a machine with the console program that Acme names for the machine.

    Args:
        words: the console program and its arguments. A command for the machine is put behind them.
    """

    words: tuple[str, ...]

    def argv(self, command: Sequence[str], *, terminal: bool = False) -> list[str]:
        """Return the local command that runs `command` on the machine. `terminal` is ignored."""
        return [*self.words, *command]

    def trouble(self, said: str) -> Trouble:
        """Return why a command could not be run, judged by `said`, the text that the console wrote to stderr."""
        return Trouble.UNREACHABLE if "No route to host" in said else Trouble.OTHER
