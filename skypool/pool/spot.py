"""`Departures`: follows the nodes with a spot notice until their machines are gone.

A spot notice is the announcement of a provider that it takes a machine back, usually 30 to 120 seconds later.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from skypool.drivers.contract import Driver
from skypool.errors import ConnectionLost, ProtocolError, taken_back
from skypool.model import Instance
from skypool.pool import states

_LOOK = 0.5
"""Seconds between two checks if the link (connection) to a node still works."""
_ASK = 5.0
"""Seconds between two requests to a provider. Requests are rare because providers limit their rate."""
_ANSWER = 10.0
"""The most seconds for which the loss of a node waits for the answer of its provider."""


class Departures:
    """An observer of the nodes whose machines are taken back by their providers.

    It reports to the state machine that a machine will be taken back, and later that the machine is gone. The methods
    run in the engine's thread.
    """

    def __init__(
        self,
        state: Callable[[], states.Pool],
        driver_of: Callable[[Instance], Driver],
        apply: Callable[[states.Event], None],
    ) -> None:
        self._state = state
        self._driver_of = driver_of
        self._apply = apply
        self._since: dict[int, float] = {}

    def admitted(self, node: int) -> None:
        """Note that a node became ready now. `noticed` reports for how long the node was ready."""
        self._since[node] = time.monotonic()

    def noticed(self, node: int, at: float) -> None:
        """Report the first spot notice of a node as an `Interrupted` event. Ignore further notices of that node.

        `at` is when the machine goes, in seconds since 1970. The event also says how long the node was ready:
        infinitely long if it was taken over from another process.
        """
        if self._state().nodes[node].taken is None:
            served = time.monotonic() - self._since.get(node, -math.inf)  # who took a pool over knows no beginning
            self._apply(states.Interrupted(node, at, served))

    async def follow(self, node: int, at: float, is_up: Callable[[], bool]) -> None:
        """Wait until a node that its provider takes back is gone, then report to the state machine that it has failed.

        The provider is asked every 5 s if the machine has ended. The requests begin when the announced time has passed,
        or when `is_up` returns False, as the connection is down. Returns when the node is no longer ready, for whatever
        reason. There is no time limit.
        """
        asked = 0.0
        while self._state().nodes[node].phase is states.Phase.READY:
            await asyncio.sleep(_LOOK)
            if (time.time() >= at or not is_up()) and time.monotonic() - asked >= _ASK:
                asked = time.monotonic()
                if await self._is_gone(node):
                    self._apply(states.Failed(node, taken_back(node)))

    async def lost(self, node: int, error: ConnectionLost) -> None:
        """Report to the state machine that a node has failed, because the connection to the node was given up.

        If the machine costs something, ask the provider first if it has ended or is ending. A spot machine that has is
        first reported as taken back by its provider. For any other machine that has, the error says that it has ended.
        """
        instance = self._state().instance_of(node)
        offer = instance.offer
        if (offer is None or offer.usd_per_hour > 0) and await self._is_gone_soon(node):
            if offer is not None and offer.market == "spot":
                self.noticed(node, time.time())
            elif not isinstance(error, ProtocolError):
                error = _ended(instance, error)
        self._apply(states.Failed(node, error))

    async def _is_gone_soon(self, node: int) -> bool:
        """Return the result of `_is_gone` for a node, or False if the provider does not answer within 10 s."""
        try:
            async with asyncio.timeout(_ANSWER):
                return await self._is_gone(node)
        except TimeoutError:
            return False

    async def _is_gone(self, node: int) -> bool:
        """Return True if the provider says that the machine of a node is ending or has ended, or does not list it."""
        instance = self._state().instance_of(node)
        try:
            found = await asyncio.to_thread(self._driver_of(instance).instances, pool=instance.pool)
        except Exception:  # noqa: BLE001 - a lost node is given up even if the provider cannot be asked
            return False
        return {each.id: each.state for each in found}.get(instance.id, "ended") in ("ending", "ended")


def _ended(instance: Instance, error: ConnectionLost) -> ConnectionLost:
    """Return (not raise) the error for a node whose machine has ended, but was not taken back by its provider."""
    lost = ConnectionLost(
        f"node {instance.node} was lost, because its machine {instance.id} has ended, as {instance.provider} says: it "
        f"has failed, or was ended by somebody, as `skypool down {instance.pool}` does on another computer",
        instance.node,
    )
    lost.__cause__ = error
    return lost
