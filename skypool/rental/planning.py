"""Plans what one pool would rent now, and decides if it may help to wait for machines that are out of stock."""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from skypool.drivers.contract import Driver
from skypool.errors import ErrorGroup, LaunchError, NoOffers, PoolClosed, ProviderError
from skypool.offers.ranking import Plan
from skypool.offers.search import look_around
from skypool.rental import reaper
from skypool.rental.budget import Enforcement
from skypool.rental.launch import Rented
from skypool.rental.machine_ends import ends_itself
from skypool.rental.pool_terms import Tell, Terms

if TYPE_CHECKING:
    from tenacity import AsyncRetrying, RetryCallState

_STALE = 300.0
"""Age of a plan in seconds after which a new one is made before more is rented."""
FIRST_PAUSE = 2.0
"""Seconds until offers that are out of stock are tried again the first time. Each later pause is twice as long."""
LONGEST_PAUSE = 120.0
"""Longest pause in seconds between two attempts to rent machines that are out of stock."""

Pause = Callable[[float], Awaitable[None]]
"""A function that sleeps for so many seconds, or less if the pool is stopped."""


class Planning:
    """The plan of one pool: the offers that meet the pool's requirements, in the order in which they are tried.

    A new plan is made when the last one is 5 minutes old, or when too few machines were in stock. The event `stopping`
    is set when the pool is stopped.

    Attributes:
        plan: the last plan; None before the first one, and after a shortage until a new one is made.
        lacking: the errors of places that accepted an order and then had no machine. The launcher skips these places. A
            key is what `launch.place` returns for an offer: its provider, machine type, place and market. A new plan
            clears the dict.
    """

    def __init__(
        self, drivers: Sequence[Driver], terms: Terms, limits: Enforcement, tell: Tell, stopping: threading.Event
    ) -> None:
        self._drivers = drivers
        self._terms = terms
        self._limits = limits
        self._tell = tell
        self._stopping = stopping
        self._made_at = 0.0
        self._waits = False
        self.plan: Plan | None = None
        self.lacking: dict[tuple[str, ...], ProviderError] = {}

    async def look(self) -> Plan:
        """Return the plan: the offers on which machines would be rented now, in the order in which they are tried.

        A plan that is at most 5 minutes old is returned again.

        Raises:
            NoOffers: no offer meets the requirements.
            PoolClosed: the pool is stopped.
            UsageError: offers meet the requirements, but none of them can keep the budget.
            ProviderError: the pool's only provider could not be asked.
        """
        if self._stopping.is_set():
            raise PoolClosed(
                f"pool {self._terms.name!r} was stopped while it waited for machines to become available; make "
                "a new ComputePool to try again"
            )
        if self.plan is None or time.monotonic() - self._made_at > _STALE:
            plan = await look_around(self._drivers, self._terms.need, order_by=self._terms.order_by)
            self.plan = self._limits.keepable(plan, partial(ends_itself, self._drivers))
            self._made_at = time.monotonic()
            self.lacking.clear()
        return self.plan

    def waiting(self, pause: Pause) -> AsyncRetrying:
        """Return a tenacity retry object that repeats a function after a shortage, until the pool's `wait` is over.

        A shortage is an error for which `is_short` is True. The function may raise this error, or return a `Rented`
        with this error and no instances. When the time is over, the last result is returned, or the last error raised.
        Before each pause, the user is told, and the plan is dropped. The function `pause` is called with the seconds to
        sleep, from about 2 s to about 2 minutes.
        """
        from tenacity import (
            AsyncRetrying,
            retry_if_exception,
            retry_if_result,
            stop_after_delay,
            wait_exponential,
            wait_random,
        )

        return AsyncRetrying(
            retry=retry_if_exception(self.is_short)
            | retry_if_result(lambda got: isinstance(got, Rented) and not got.instances and self.is_short(got.error)),
            stop=stop_after_delay(self._terms.wait),
            wait=wait_exponential(multiplier=FIRST_PAUSE, max=LONGEST_PAUSE) + wait_random(0, FIRST_PAUSE),
            sleep=pause,
            before_sleep=self._tell_shortage,
            retry_error_callback=lambda state: state.outcome.result() if state.outcome else None,
        )

    def is_short(self, error: BaseException | None) -> bool:
        """Return True if an error says that machines are out of stock, so that waiting may help.

        Once the pool has begun to wait, other errors of a provider that may pass by themselves count, too.
        """
        if isinstance(error, NoOffers) and isinstance(error.plan, Plan):
            failures = error.plan.failures
            all_failed = len(failures) == len(self._drivers)
            return any(map(self.is_short, failures.values())) if all_failed else error.plan.is_short
        if isinstance(error, (ProviderError, ErrorGroup)):
            return self._waits and reaper.may_pass(error)
        return isinstance(error, LaunchError) and error.is_short

    def _tell_shortage(self, state: RetryCallState) -> None:
        assert state.outcome is not None
        error = state.outcome.exception() or state.outcome.result().error
        self._waits = True
        self._tell(f"too few machines are in stock; skypool keeps asking for {self._terms.wait:g} s", str(error))
        self.plan = None
