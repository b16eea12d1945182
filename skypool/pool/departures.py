"""`Departures`: all ways in which a pool loses a node, from the first sign until the state machine knows of it.

A node is lost when its connection is given up. Its provider may take its machine back, and announce that with a spot
notice, usually 30 to 120 seconds before. A node with a broken device is unhealthy. Nodes that are retired leave too.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from skypool.calls.dispatch import Dispatch
from skypool.errors import ConnectionLost, LedgerError, NodeUnhealthy, ProtocolError, TakenOver, taken_back
from skypool.model import Instance
from skypool.pool import states
from skypool.pool.life import Life
from skypool.pool.limits import PLANNED, Limits
from skypool.pool.service_supervisor import Services
from skypool.pool.takeover import Takeover
from skypool.rental.supply import Supply

_LOOK = 0.5
"""Seconds between two checks if the link (connection) to a node still works."""
_ASK = 5.0
"""Seconds between two requests to a provider. Requests are rare because providers limit their rate."""
_ANSWER = 10.0
"""The most seconds for which the loss of a node waits for the answer of its provider."""


class Departures:
    """The departures of one pool's nodes.

    The methods run in the engine's thread unless their description says otherwise.

    Attributes:
        taken: when the provider takes back the machine of a pool without a supply, in seconds since 1970; None if it
            has announced nothing.
    """

    def __init__(
        self,
        life: Life,
        supply: Supply | None,
        dispatch: Dispatch,
        services: Services,
        limits: Limits,
        takeover: Takeover,
    ) -> None:
        self._life = life
        self._takeover = takeover
        self._supply = supply
        self._dispatch = dispatch
        self._services = services
        self._limits = limits
        self.taken: float | None = None
        self._since: dict[int, float] = {}
        self._clearing: set[int] = set()  # nodes that leave, whose services were stopped

    def admitted(self, node: int) -> None:
        """Note that a node became ready now, so that `noticed` can report how long it was ready."""
        self._since[node] = time.monotonic()

    # --- its provider takes it back --------------------------------------------------------------------------

    def on_notice(self, node: int, at: float) -> None:
        """Handle a node's notice that its provider takes the machine back at `at`, in seconds since 1970.

        Any thread may call this. From then on, all hosts of the node's slice get no more calls. The engine's thread
        reports the notice to the state machine later. While the pool is being taken over, do nothing: the node repeats
        the notice. A pool without a supply goes on: it is run from its machine, by a runner that looks at `taken`.
        """
        state = self._life.state
        if node not in state.nodes:
            return
        if self._supply is None:
            self.taken = at
            return
        self._dispatch.expect(1)  # a gang must not give up before it is decided if the node is replaced
        self._life.soon(self._on_noticed, node, at)  # before it is drained
        for each in state.slice_of(node):
            self._dispatch.drain(each.node)
            if self._dispatch.gangs is not None:
                self._dispatch.gangs.interrupted(each.node, at)

    def _on_noticed(self, node: int, at: float) -> None:
        self.noticed(node, at)
        self._dispatch.expect(-1)

    def noticed(self, node: int, at: float) -> None:
        """Report the first spot notice of a node as an `Interrupted` event. Ignore further notices of that node.

        `at` is when the machine goes, in seconds since 1970. The event also says how long the node was ready:
        infinitely long if it was taken over from another process.
        """
        if self._life.state.nodes[node].taken is None:
            served = time.monotonic() - self._since.get(node, -math.inf)  # who took a pool over knows no beginning
            self._life.apply(states.Interrupted(node, at, served))

    async def follow(self, node: int, at: float, is_up: Callable[[], bool]) -> None:
        """Wait until a node that its provider takes back is gone, then report to the state machine that it has failed.

        The provider is asked every 5 s if the machine has ended. The requests begin when the announced time has passed,
        or when `is_up` returns False, as the connection is down. Returns when the node is no longer ready for any
        reason. There is no time limit.
        """
        asked = 0.0
        while self._life.state.nodes[node].phase is states.Phase.READY:
            await asyncio.sleep(_LOOK)
            if (time.time() >= at or not is_up()) and time.monotonic() - asked >= _ASK:
                asked = time.monotonic()
                if await self._is_gone(node):
                    self._life.apply(states.Failed(node, taken_back(node)))

    # --- it does not answer ----------------------------------------------------------------------------------

    def on_lost(self, node: int, error: ConnectionLost) -> None:
        """Start a task that handles the loss of a node, which its link has given up. Do not wait for the task."""
        self._life.spawn(self._on_loss(node, error))

    async def _on_loss(self, node: int, error: ConnectionLost) -> None:
        """Report a lost node to the state machine, unless the pool ends as planned or another process took it over."""
        if node not in self._life.state.nodes:  # not all nodes of the pool are taken over yet
            self._takeover.early = error
            return
        try:
            # a stranger's machine could claim a takeover, to be left running
            if isinstance(error, TakenOver) and self._takeover.is_believed(node):
                raise error
            await self._limits.check_loss()
        except TakenOver as e:
            await self._takeover.hand_over(e)
        except PLANNED as e:
            self._life.apply(states.Stop(e))
        except LedgerError:  # whether the end was planned is not known
            await self.lost(node, error)
        else:
            await self.lost(node, error)

    async def lost(self, node: int, error: ConnectionLost) -> None:
        """Report to the state machine that a node has failed, because the connection to the node was given up.

        If the machine costs something, first ask the provider whether it ends or has ended. If so, report a spot
        machine as taken back by its provider, before it is reported as failed. For any other machine, the error says
        that it has ended.
        """
        instance = self._life.state.instance_of(node)
        offer = instance.offer
        if (offer is None or offer.usd_per_hour > 0) and await self._is_gone_soon(node):
            if offer is not None and offer.market == "spot":
                self.noticed(node, time.time())
            elif not isinstance(error, ProtocolError):
                error = _ended(instance, error)
        self._life.apply(states.Failed(node, error))

    async def _is_gone_soon(self, node: int) -> bool:
        """Return True if a node's machine ends or has ended; False if not, or without an answer within 10 s."""
        try:
            async with asyncio.timeout(_ANSWER):
                return await self._is_gone(node)
        except TimeoutError:
            return False

    async def _is_gone(self, node: int) -> bool:
        """Return True if the provider does not list a node's machine, or says that it ends or has ended."""
        instance = self._life.state.instance_of(node)
        if self._supply is None:
            return False
        try:
            return await asyncio.to_thread(self._supply.is_gone, instance)
        except Exception:  # noqa: BLE001 - a lost node is given up even if the provider cannot be asked
            return False

    # --- it must not be used, or is not needed ---------------------------------------------------------------

    def unhealthy(self, node: int, error: NodeUnhealthy) -> None:
        """Stop sending calls to an unhealthy node, and tell its driver to avoid the machine from now on.

        Do nothing during the node's setup, which has a health check of its own.
        """
        state = self._life.state.nodes.get(node)
        if state is None or state.phase is not states.Phase.READY or state.is_leaving:
            return
        self._life.apply(states.Unhealthy(node, error))
        if self._supply is not None:
            work = asyncio.to_thread(self._supply.rejected, self._life.state.instance_of(node), error)
            self._life.spawn(work, "the report of an unhealthy machine")

    def on_drained(self, node: int) -> None:
        """Handle that a leaving node has no call left. Any thread may call this."""
        self._life.soon(self._drained, node)

    def _drained(self, node: int) -> None:
        """Stop the services of a leaving node that has no call left, and then report it as `Drained`."""
        if self._dispatch.roster.services_on(node):
            if node not in self._clearing:
                self._clearing.add(node)
                self._life.spawn(self._clear(node))
        else:
            self._life.apply(states.Drained(node))

    async def _clear(self, node: int) -> None:
        await self._services.leave(node)
        self._life.apply(states.Drained(node))


def _ended(instance: Instance, error: ConnectionLost) -> ConnectionLost:
    """Return (do not raise) the error for a node whose machine has ended, but was not taken back by its provider."""
    lost = ConnectionLost(
        f"node {instance.node} was lost, because its machine {instance.id} has ended, as {instance.provider} says: it "
        f"has failed, or was ended by somebody, as `skypool down {instance.pool}` does on another computer",
        instance.node,
    )
    lost.__cause__ = error
    return lost
