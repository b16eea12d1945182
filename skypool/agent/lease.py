"""Limits how long a node lives: until its lease ends. Each frame of the client extends the lease.

If the client has set a linger time, the node also ends after it has had no work for that time.

This module also writes a file for the guard. The guard is a process that runs as root, and ends the rented machine at a
certain time. Writing the file postpones that time. See `skypool.drivers.userdata`.
"""

from __future__ import annotations

import math
import sys
import time

from skypool.runtime import LEASE, LIMIT, Reason

_EVERY = 5.0
"""The least time in seconds between two writes to the guard's file; a twentieth of the lease if that is less."""
_GUARD_LOOKS = 5.0
"""The most time in seconds between two times that the guard reads its file. It is less for a lease below 100 s."""
_GUARD_READS = 2.0
"""Seconds that the guard may take to read its file once."""
_WIDTH = 31
"""The number of characters that each write to the guard's file has. Each write overwrites the one before."""


class Lease:
    """The time until which the node may live: `lease` seconds after the client's last frame, or an earlier limit.

    A client that leaves can say for how long the node stays (`stay`). That time then counts instead of the lease.

    Args:
        lease: seconds that the node lives without a frame from its client.
        lifetime: seconds from now after which the node ends in any case; None for no limit.
        guard: the path of the guard's file; "" for none.

    Attributes:
        why: why the node ends at the deadline that `renew` has returned last; None if it has no work, or no client.
    """

    def __init__(self, lease: float, lifetime: float | None, guard: str) -> None:
        self._lease = lease
        self._guard = guard
        self._end = math.inf if lifetime is None else time.monotonic() + lifetime
        self._allowed = math.inf
        self._idle_end = math.inf
        self._linger = math.inf
        self._stays: float | None = None
        self._told = self._heard = self._until = -math.inf
        self._granted = math.inf  # until when the guard lets the machine live, so far as it is known
        self._trouble = ""
        self.why: Reason | None = None

    def allow(self, seconds: float) -> None:
        """Allow the node to live for at most `seconds` from now, for example because the budget is nearly spent.

        Another call replaces this limit, even by a later time. The lease, the lifetime and the linger time still hold.
        Takes effect at the next `renew`.
        """
        self._allowed = time.monotonic() + seconds

    def end_by(self, seconds: float) -> None:
        """Let the node end in `seconds` from now at the latest. Unlike `allow`, it only brings the end nearer.

        Takes effect at the next `renew`.
        """
        self._end = min(self._end, time.monotonic() + seconds)

    def linger(self, left: float, full: float) -> None:
        """Let the node end itself after `full` seconds without work. `left` is how many of them are left now.

        The client asks for this again and again, because it alone knows of work on other nodes. The last call counts.
        """
        self._idle_end = time.monotonic() + left
        self._linger = full

    @property
    def lingers(self) -> bool:
        """True if the node ends itself after a time without work."""
        return self._linger < math.inf

    def worked(self) -> None:
        """Note that the node works now, so that it lives for the whole linger time from now."""
        self._idle_end = max(self._idle_end, time.monotonic() + self._linger)

    def stay(self, seconds: float) -> None:
        """Let the node live for so many seconds from now without a client.

        The lease and the linger time do not count then. The lifetime and the limit of `allow` still hold.
        """
        self._stays = time.monotonic() + seconds

    def take(self, heard: float) -> str:
        """Let a new client take the node: ask the guard for more time, and forget what `linger` and `stay` have set.

        Returns "", or a text that says why the client cannot have the node. This is so if the guard's file cannot be
        written, or if the guard is about to end the machine and may not read the file any more. Then nothing is
        forgotten. `heard` is the time of the new client's first frame, in seconds of `time.monotonic()`.
        """
        left = self._granted - time.monotonic()
        if self._guard and left < min(_GUARD_LOOKS, max(1.0, self._lease / 20)) + _GUARD_READS:
            return f"its machine ends itself in {max(0.0, left):.0f} s, which is too late to stop"
        before = self._idle_end, self._linger, self._stays
        self._idle_end = self._linger = math.inf
        self._stays = None
        self._told = self._heard = -math.inf
        self.renew(heard)
        if self._guard and self._trouble:
            self._idle_end, self._linger, self._stays = before
            return self._trouble
        return ""

    def renew(self, heard: float, reserve: float = 0.0) -> float:
        """Return the node's deadline. Write the guard's file if that is due.

        The deadline is the earliest of the limits by lease, lifetime, `allow` and `linger`. After `stay`, its time
        counts instead of lease and `linger`. `heard` is the time of the client's last sign of life. Both times are in
        seconds of `time.monotonic()`. In the `reserve` seconds before the deadline, the node works no more, but
        saves what is left. They are added to the times of `linger` and `stay`.

        The guard's file gets the seconds that are left. It is written at once if the deadline has become more than a
        second earlier. Otherwise it is written at most every `_EVERY` (5) seconds, or more often for a lease below
        100 s, in these cases:

        - The client was heard since the last write.
        - The node works on without its client, so that the linger time ends more than a second later.
        - The node stays without a client. The guard grants at most one lease each time, so it must be asked again.
        """
        leased = heard + self._lease if self._stays is None else math.inf
        end = min(leased, self._idle_end + reserve) if self._stays is None else self._stays + reserve
        deadline = min(end, self._end, self._allowed)
        self.why = LIMIT if deadline < end else LEASE if leased == end < math.inf else None
        now = time.monotonic()
        is_later = self.lingers and deadline > self._until + 1  # the node works on without its client
        is_news = heard > self._heard or is_later or (self._stays is not None and now < self._stays)
        more = is_news and now - self._told >= min(_EVERY, self._lease / 20)
        if self._guard and (more or deadline < self._until - 1):
            self._told = now
            self._heard = heard
            self._until = deadline
            self._ask(deadline - now)
            if not self._trouble:
                self._granted = deadline
        return deadline

    def _ask(self, seconds: float) -> None:
        """Let the guard know that the machine may live for `seconds` more. Print a new error instead of raising it."""
        asked = f"{time.monotonic_ns() // 1_000_000} {max(0, math.ceil(seconds))}"
        try:
            with open(self._guard, "r+b", buffering=0) as file:
                file.write(f"{asked:<{_WIDTH}}\n".encode())
            trouble = ""
        except OSError as e:
            trouble = (
                "this machine will end although its client is connected, because its lease cannot be extended in the "
                f"file {self._guard}: {e}"
            )
        if trouble and trouble != self._trouble:
            print(trouble, file=sys.stderr, flush=True)
        self._trouble = trouble
