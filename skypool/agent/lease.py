"""The node's lease: how long the node may live, extended at each sign of life from the client.

It also writes the file that keeps the machine itself alive (see `skypool.drivers.userdata`).
"""

from __future__ import annotations

import math
import sys
import time

_EVERY = 5.0
"""Seconds between two words to the guard, at most."""
_WIDTH = 31
"""Letters of such a word: each one covers the one before."""


class Lease:
    """The right to live on: from each sign of life for `lease` seconds, and no longer than anything else allows.

    Args:
        lease: seconds; lifetime: seconds from now in all, None for no such limit.
        guard: the file by which the machine's own end is put off, "" for none.
    """

    def __init__(self, lease: float, lifetime: float | None, guard: str) -> None:
        self._lease = lease
        self._guard = guard
        self._end = math.inf if lifetime is None else time.monotonic() + lifetime
        self._allowed = math.inf
        self._told = self._heard = self._until = -math.inf
        self._trouble = ""

    def allow(self, seconds: float) -> None:
        """Live for so long from now at most, until another word of this; the lifetime is never put off."""
        self._allowed = time.monotonic() + seconds

    def renew(self, heard: float) -> float:
        """When this node ends, in monotonic seconds; its machine's guard is told, if there is anything new to tell.

        Args:
            heard: when the client gave its last sign of life.
        """
        deadline = min(heard + self._lease, self._end, self._allowed)
        now = time.monotonic()
        more = heard > self._heard and now - self._told >= min(_EVERY, self._lease / 20)
        if self._guard and (more or deadline < self._until - 1):
            self._told = now
            self._heard = heard
            self._until = deadline
            self._ask(deadline - now)
        return deadline

    def _ask(self, seconds: float) -> None:
        """Ask for so many seconds more, written over what was asked before: a full disk has room for that."""
        asked = f"{time.monotonic_ns() // 1_000_000} {max(0, math.ceil(seconds))}"
        try:
            with open(self._guard, "r+b", buffering=0) as file:
                file.write(f"{asked:<{_WIDTH}}\n".encode())
            trouble = ""
        except OSError as e:
            trouble = f"this machine will end although its client is there: it cannot be asked for more time: {e}"
        if trouble and trouble != self._trouble:
            print(trouble, file=sys.stderr, flush=True)
        self._trouble = trouble
