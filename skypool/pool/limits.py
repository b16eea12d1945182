"""`Limits`: finds out when a pool must end as planned, because its budget, lifetime or other limit is over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial

from skypool import clock
from skypool.checks import duration_words
from skypool.errors import BudgetExceeded, LifetimeExceeded, PoolClosed
from skypool.event_loop import beside
from skypool.link.link import Link
from skypool.pool.idle_shutdown import LingerWatch
from skypool.rental.budget import NODE_LATER
from skypool.rental.pool_account import Rental
from skypool.rental.pool_terms import Terms

PLANNED = (BudgetExceeded, LifetimeExceeded, PoolClosed)
"""The errors of a planned end of a pool. Nodes that end then do not count as lost: nothing is sent or rented again."""
LOOK = 1.0
"""The most seconds between two checks."""
_OWNER_EVERY = 5.0
"""Seconds between two checks whether another process ends the pool, or has taken it over. While a node cannot be
reached, that is checked each time."""
_TELL_EVERY = 5.0
"""Seconds after which nodes are told again for how long they may live."""
_AHEAD = 30.0
"""The most seconds by which nodes tell calls ahead when they are stopped: `skypool.agent.stop_notice`."""
_AWAY = 10.0
"""Seconds by which the stop must have moved further away to be no longer near."""
_EARLY = 2.0
"""A node that is lost within this many seconds before a planned end counts as ended by it: clocks differ a little."""
_LATE = 2.0
"""The most seconds between a message to a node and the moment from which the node counts its lease."""
_SENT_EARLIER = 3.0
"""What comes from a node within this many seconds after a pause of this process may have been sent during the pause."""


class SteadyReserve:
    """The seconds before the end of a pool at which its calls are stopped, so that nodes save what is left.

    Once that is near, they stay as they are: calls have been told when they are stopped, and write more until then.

    Args:
        needed: returns the seconds that nodes need now; 0.0 if nothing is saved.
        lease: the lease of the nodes, in seconds.
    """

    def __init__(self, needed: Callable[[], float], lease: float) -> None:
        self._needed = needed
        self._near = min(_AHEAD, lease / 4) + _TELL_EVERY  # nodes go by what they have heard last
        self._kept: float | None = None

    def __call__(self) -> float:
        """Return the seconds."""
        return self._needed() if self._kept is None else self._kept

    def note(self, left: float, early: float) -> bool:
        """Note that the pool ends in `left` seconds, with this reserve. Return True if the stop has become near."""
        if self._kept is None:
            if early and left - early < self._near:
                self._kept = early
                return True
        elif left - early > self._near + _AWAY:
            self._kept = None
        return False


class Limits:
    """The limits of one pool, such as its budget.

    The methods run in the engine's thread unless their description says otherwise.

    Args:
        links: the links to its nodes, by their numbers.
        reserve: returns the seconds that nodes need before the end to save what is left.

    Attributes:
        for_programs: seconds by which calls are stopped earlier, so that programs can end and their files be fetched.
            Who runs them stops them then; it calls `until_stop`.
    """

    def __init__(
        self,
        terms: Terms,
        rental: Rental,
        linger: LingerWatch,
        links: Mapping[int, Link],
        reserve: Callable[[], float],
    ) -> None:
        self._terms = terms
        self._rental = rental
        self._linger = linger
        self._links = links
        self._reserve = SteadyReserve(reserve, terms.lease)
        self.for_programs = 0.0
        self._due = self._stop = float("inf")
        self._looked: float | None = None
        self._paused = 0.0
        self._resumed = float("-inf")  # the end of the last pause
        self._owner_checked = time.monotonic()  # the ledger has just been told of this process
        self._told = float("-inf")

    async def check(self) -> float:
        """Check the limits, and tell the nodes when they must end. Return the seconds after which to check again.

        Raises:
            BudgetExceeded, LifetimeExceeded: the budget is spent, or the lifetime is over, or will be when nodes have
                saved what is left.
            PoolClosed: another process has begun to end the pool.
            TakenOver: another process has taken the pool over.
        """
        early = self._reserve()
        left = await beside(partial(self._rental.limits.check, early), "skypool limits")
        stop = left - early - self.for_programs
        self._due, self._stop = clock.elapsed() + left - early, clock.elapsed() + stop
        now = time.monotonic()
        links = list(self._links.values())
        is_cut = not all(link.is_up for link in links)
        if is_cut or now - self._owner_checked >= _OWNER_EVERY:
            self._owner_checked = now
            await beside(self._rental.check_owner, "skypool limits")
        if is_cut:
            self._check_pause()
        elif clock.elapsed() - self._resumed > _SENT_EARLIER and all((link.silence or 0.0) < LOOK for link in links):
            self._paused = 0.0  # the nodes have outlived it
        is_near = self._reserve.note(left - self.for_programs, early)
        if left < float("inf") and (is_near or now - self._told >= _TELL_EVERY):
            self._told = now
            for link in links:
                link.allow(left + NODE_LATER, stop)
        return min(left - early, LOOK)

    def node_lifetime(self) -> float | None:
        """Return the seconds after which a new node ends itself; None for never. Blocks. Any thread may call this."""
        return self._rental.limits.node_lifetime()

    def linger_told(self) -> tuple[float, float] | None:
        """Return what nodes are told about the linger time; None if the pool has none.

        It is (seconds until they end if no work comes, seconds after their own last work). A node ends itself when both
        times are over.
        """
        return self._linger.told()

    def until_stop(self) -> float:
        """Return the seconds until calls are stopped, as nodes were told; infinite for no limit. For any thread."""
        return self._stop - clock.elapsed()

    @property
    def is_due(self) -> bool:
        """True if the budget or lifetime ends the pool within 2 s. A connection that breaks then is part of that end.

        Machines end themselves at the same time as the pool, so a machine may be a little earlier.
        """
        return clock.elapsed() >= self._due - _EARLY

    async def watch_pauses(self) -> None:
        """Note every second whether this process was paused, and how long, as on a suspended computer.

        The nodes heard nothing from this process in that time. Runs until the task is cancelled.
        """
        while True:
            self._note_pause()
            await asyncio.sleep(LOOK)

    def _note_pause(self) -> None:
        now = clock.elapsed()
        if self._looked is not None and now - self._looked > 2 * LOOK:
            self._paused = max(self._paused, now - self._looked - LOOK)
            self._resumed = now
        self._looked = now

    async def check_loss(self) -> None:
        """Raise the reason for a planned end of the pool if a node may have been lost because of it.

        Otherwise do nothing.

        Raises:
            BudgetExceeded, LifetimeExceeded: the budget is spent, or the lifetime is over.
            PoolClosed: the linger time is over, another process ends the pool, or this process was paused for longer
                than its lease.
            TakenOver: another process has taken the pool over.
        """
        self._note_pause()
        await beside(self._rental.check_owner, "skypool limits")
        await beside(partial(self._rental.limits.check, _EARLY + self._reserve()), "skypool limits")
        await self._linger.check()
        self._check_pause()

    def _check_pause(self) -> None:
        """Raise PoolClosed if this process was paused for longer than its lease, and no node has answered since."""
        lease = self._terms.lease - self._reserve()  # nodes need the rest to save what is left
        if self._paused >= max(lease - _LATE, self._terms.lease / 2):
            raise PoolClosed(
                f"pool {self._terms.name!r} has ended: this process was paused for {duration_words(self._paused)}, "
                f"longer than lease={self._terms.lease:g} s, so its machines have ended themselves. Make a new "
                "ComputePool, with a longer lease= if the pause was wanted"
            )
