"""`StopNotice`: tells calls some time ahead that this node stops them, to save what is left before it ends."""

from __future__ import annotations

import math
import time

from skypool.agent.shared_page import SharedPage
from skypool.runtime import LIMIT, Reason

_AHEAD = 30.0
"""The most seconds by which calls hear of it ahead: as much as some providers give. A quarter of the lease if less."""
_CLIENT_EARLIER = 5.0
"""Seconds by which the client ends a pool before its nodes do it themselves: `skypool.rental.budget.NODE_LATER`. For
nodes to which it has not told when it stops calls."""
_BACK = 5.0
"""Seconds by which the end must have moved further away to be no longer near."""
_NEWS = 1.0
"""Seconds by which a new time differs from the one that was told."""


class StopNotice:
    """Announces the end of a node in its page, and takes that back if the end moves away.

    Args:
        lease: the lease of the node, in seconds.
    """

    def __init__(self, page: SharedPage, lease: float) -> None:
        self._page = page
        self._ahead = min(_AHEAD, lease / 4)
        self._client: float | None = None
        self._most = math.inf

    def client_stops(self, seconds: float | None) -> None:
        """Note after how many seconds the client stops the calls; None if it does not say."""
        self._client = None if seconds is None else time.monotonic() + seconds

    def steady(self, reserve: float) -> float:
        """Return the reserve, or what it was when calls were told last.

        It grows with each file that is written, and calls write what they save until the time that they were told.
        """
        return min(reserve, self._most)

    def look(self, deadline: float, reserve: float, why: Reason | None) -> None:
        """Look at the deadline of the node, in seconds of `time.monotonic()`.

        Args:
            deadline: when calls are stopped.
            reserve: the seconds after it to save folders; 0.0 if none is saved. Nothing is announced then.
            why: why the node ends; None if it ends for another reason, such as that it has no work.
        """
        told = self._page.stop
        if why == LIMIT:
            deadline = deadline - _CLIENT_EARLIER if self._client is None else min(deadline, self._client)
        left = deadline - time.monotonic()
        if why is None or not reserve or left > self._ahead + (_BACK if told else 0.0):
            self._most = math.inf
            if told:
                self._page.announce_stop(0.0, self._page.stop_reason)
            return
        at = time.time() + left
        if abs(at - told) > _NEWS:
            self._most = reserve
            self._page.announce_stop(at, why)
