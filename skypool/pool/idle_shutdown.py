"""`LingerWatch`: ends a pool that has had no work for a while, and tells its nodes how long they may live without work.

Work is a call that waits or runs, or a service with `busy=True`. The nodes are told regularly, so that they end
themselves even if this process is killed.
"""

from __future__ import annotations

import asyncio
import sys
from functools import partial

from skypool import clock
from skypool.calls.dispatch import Dispatch
from skypool.checks import Duration, duration_words, seconds
from skypool.errors import PoolClosed, UsageError
from skypool.event_loop import beside
from skypool.pool import states
from skypool.pool.call_ends import CallEnds
from skypool.pool.life import Life
from skypool.pool.states import Phase
from skypool.rental.pool_account import Rental
from skypool.rental.pool_terms import Terms

IN_NOTEBOOK = 3600.0
"""Seconds for which a pool of a notebook lives without work, if its user names no time."""
NOTEBOOK_NOTICE = (
    'this is a notebook, so the pool ends itself after an hour without a call; ComputePool(..., linger="4h") gives '
    "another time"
)
"""The notice for the user about `IN_NOTEBOOK`."""
SLACK = 10.0
"""Seconds that a node waits beyond the time at which a process should end it: its pool's, or that for `linger=`.

If both ended the machine at once, its end would be unproved for a while, because providers may list machines late.
"""
_LOOK = 1.0
"""The most seconds between two looks at the work of the pool."""


class LingerWatch:
    """Ends a pool that has had no work for its linger time. If the pool has no linger time, this does nothing.

    The time counts from the end of the last work, or from when the pool became ready if that is later.
    """

    def __init__(
        self,
        terms: Terms,
        dispatch: Dispatch,
        rental: Rental,
        life: Life,
        call_ends: CallEnds,
    ) -> None:
        self._terms = terms
        self._dispatch = dispatch
        self._rental = rental
        self._life = life
        self._call_ends = call_ends
        self._since = clock.now()

    def told(self) -> tuple[float, float] | None:
        """Return what nodes are told about this limit; None if the pool has no such limit. Any thread may call this.

        It is (seconds until they end if no work comes, seconds after their own last work). A node ends itself when both
        times are over, or when its lease is over.
        """
        full = self._terms.linger
        return None if full is None else (max(0.0, full - self.idle) + SLACK, full)

    @property
    def idle(self) -> float:
        """Seconds for which the ready pool has had no work; 0 while it has some. Any thread may call this."""
        worked = self._dispatch.worked
        now = clock.now()
        if worked is None or self._life.state.phase is not Phase.READY:
            self._since = now
        return max(0.0, now - max(self._since, worked or 0.0))

    async def keep(self) -> None:
        """Wait until the pool has had no work for its whole linger time, and end it.

        If the pool has no linger time, return at once.
        """
        linger = self._terms.linger
        if linger is None:
            return
        while True:
            while (idle := self.idle) < linger:
                await asyncio.sleep(min(_LOOK, max(0.05, (linger - idle) / 2)))
            try:
                await self.check()
            except PoolClosed as e:
                await self._call_ends.end_streams(e)
                self._life.apply(states.Stop(e))
                return

    async def check(self) -> None:
        """Raise PoolClosed if the pool has had no work for its whole linger time. Otherwise do nothing."""
        linger, idle = self._terms.linger, self.idle
        if linger is not None and idle >= linger:
            error = PoolClosed(await beside(partial(self._why, idle), "skypool linger"))
            if self.idle >= linger:  # no call came meanwhile
                raise error

    def _why(self, idle: float) -> str:
        """Return the message for the user: how long the pool had no work, what its machines cost, and what to do."""
        said = f"pool {self._terms.name!r} ends itself, as it has had no work for {duration_words(idle)} (linger)"
        receipt = self._rental.known_receipt
        if receipt is not None and receipt.usd_per_hour:
            paid = "an unknown part" if receipt.idle_usd is None else f"{receipt.idle_usd:.4f} USD"
            said += (
                f"; that saves {receipt.usd_per_hour:.4f} USD for each further hour. Of {receipt.usd:.4f} USD, {paid} "
                f"was paid while it was idle"
            )
        return f"{said}. Make a new ComputePool to go on"


def linger_asked(linger: Duration | None) -> float | None:
    """Return the `linger` argument of a pool in seconds; None for no limit. Raise UsageError if it is not above 0."""
    if linger is None:
        return None
    if linger == 0 and not isinstance(linger, (bool, str)):
        raise UsageError("linger must be more than 0; leave it out to end the machines at once after the `with` block")
    return seconds("linger", linger)


def in_notebook() -> bool:
    """Return True if this program runs in a Jupyter kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None
