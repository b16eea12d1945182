"""`Takeover`: takes a pool over from another process, or gives it up to one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from skypool.calls.dispatch import Dispatch
from skypool.calls.futures import CallFuture
from skypool.drivers.contract import admitted
from skypool.errors import ConnectionLost, SkypoolError, TakenOver
from skypool.head.states import Answered, ClientEvent, Connected, Status
from skypool.link.agent_messages import Welcome
from skypool.link.handshake import HandedOver
from skypool.model import Access, Instance
from skypool.pool import states
from skypool.pool.agents import Agents
from skypool.pool.life import Life
from skypool.pool.service_supervisor import Services
from skypool.pool.states import Phase
from skypool.rental.handover import Handover, HeldNode, NoSupply
from skypool.rental.launch import Rented
from skypool.rental.pool_terms import Terms
from skypool.rental.supply import Supply
from skypool.wire import error_text
from skypool.wire.frames import Kind, frame

T = TypeVar("T")


class Takeover:
    """The change of one pool's owner. The methods run in the engine's thread.

    Attributes:
        inherited: the futures of the calls of a former client.
        early: the error of a node that was lost while the pool was being taken over; None if none was.
    """

    def __init__(
        self,
        terms: Terms,
        life: Life,
        supply: Supply | None,
        agents: Agents,
        dispatch: Dispatch,
        services: Services,
    ) -> None:
        self._terms = terms
        self._life = life
        self._rental = life.rental
        self._supply = supply
        self._agents = agents
        self._connections = agents.connections
        self._dispatch = dispatch
        self._services = services
        self.inherited: list[CallFuture[object]] = []
        self.early: ConnectionLost | None = None
        self._follow: Callable[[ClientEvent | ConnectionLost], None] = _nothing
        self._is_settled = asyncio.Event()
        self._is_settled.set()

    async def settled(self) -> None:
        """Wait until no takeover is going on. One that is cancelled gives the nodes back first."""
        await self._is_settled.wait()

    async def take(self, handover: Handover | None) -> None:
        """Take over the nodes of a pool that another process started, or hands over. The pool is then ready.

        If one node cannot be taken over, none is: the links are closed, and all nodes keep running. If all are taken
        over, running calls of generator functions are cancelled, because only the former process could read the items.
        With `handover`, no provider is asked.
        """
        self._is_settled.clear()
        try:
            await (self._adopt() if handover is None else self._hold(handover))
        finally:
            self._is_settled.set()

    async def _adopt(self) -> None:
        supply = self._supply
        if supply is None:
            raise NoSupply(self._life.pool, "be taken over")
        instances = await self._taken(supply.adopt)
        try:
            for instance in instances:
                driver = supply.driver_of(instance)
                access = await asyncio.to_thread(admitted, driver, instance)
                await self._agents.judge(instance, driver)
                await self._open(instance, access, access.python or "")
        except BaseException as e:
            await self._give_back(e)
            raise
        self._begin(instances)

    async def _hold(self, handover: Handover) -> None:
        await self._taken(partial(self._rental.hold, handover))
        try:
            for each in handover.nodes:
                self._agents.note_trust(each.instance, each.trust)
                await self._open(each.instance, each.access, each.python, handover.heir)
        except BaseException as e:
            await self._give_back(e)
            raise
        self._begin([each.instance for each in handover.nodes])

    async def _taken(self, take: Callable[[], T]) -> T:
        """Take nodes over by a function, in a thread. If cancelled, give them back when the function returns."""
        taking = asyncio.ensure_future(asyncio.to_thread(take))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError as e:
            await asyncio.wait([taking])
            if taking.exception() is None:
                await self._give_back(e)
            raise

    async def _open(self, instance: Instance, access: Access, python: str, heir: str = "") -> None:
        if self._terms.spares is not None:
            self._terms.spares.connect(instance.node, access)
        await self._agents.open(instance, access, python, attach=True, heir=heir)
        if self.early is not None:
            raise self.early

    def _begin(self, instances: Sequence[Instance]) -> None:
        """Make the nodes that were taken over the nodes of this pool, which is then ready. Cancel their generators."""
        slices = Rented(tuple(instances)).slices
        nodes: dict[int, states.Node] = {}
        for hosts in slices:
            for instance in hosts:
                host = instance.node - hosts[0].node
                nodes[instance.node] = states.Node(instance.node, Phase.READY, instance, host=host)
        fewest = len(slices) if self._terms.replaces else 0
        grows = self._terms.replaces and self._supply is not None
        most = max(len(slices), self._terms.maximum) if grows else len(slices)
        self._life.begin_as(states.Pool(fewest, most, Phase.READY, nodes, hosts=max(map(len, slices))))
        for node, link in self._connections.links.items():
            for call in self._connections.welcomes[node].streams:
                link.send(frame(Kind.CANCEL, {"id": call, "grace": self._terms.grace}))

    async def _give_back(self, error: BaseException) -> None:
        """Give nodes back after a failed takeover. They then end when they would have ended without it."""
        self._dispatch.close(error)
        back = self._rental if self._supply is None else self._supply
        try:
            record = await asyncio.to_thread(back.give_back)
        except SkypoolError as e:
            self._life.notice(error_text.told(e))
            record = None
        for link in self._connections.links.values():
            if record is None:
                await link.close(bye=False)
            else:
                await link.leave(max(0.0, record.lasts - time.time()))

    async def handover(self) -> Handover:
        """Return what another process must know to take over this pool with its ready nodes.

        Raises SkypoolError if the ledger does not have the pool.
        """
        rental, connections = self._rental, self._connections
        record = None if rental.ledger is None else await asyncio.to_thread(rental.ledger.record, rental.session)
        if record is None:
            raise SkypoolError(
                f"pool {self._life.pool!r} cannot be handed over, because the ledger does not have it, so nobody knows "
                "what it costs; end it here, or with `skypool down`"
            )
        ready = [each for each in self._life.state.nodes.values() if each.phase is Phase.READY and not each.is_leaving]
        nodes = [
            HeldNode.of(
                each.instance,
                *connections.ways[each.node],
                self._agents.trust_of(each.node),
                self._ends_itself(each.instance),
            )
            for each in ready
            if each.instance is not None
        ]
        return Handover(record, tuple(nodes))

    # --- to the machine of a run -----------------------------------------------------------------------------

    def follow(self, hear: Callable[[ClientEvent | ConnectionLost], None]) -> None:
        """Have a function called with what happens in a hand-over of the pool's run to its machine.

        It gets the answers of the agent, each new connection, and the loss of the node. Any thread may call it.
        """
        self._follow = hear

    def on_handed(self, status: Status) -> None:
        """Pass on an answer of the agent. Any thread may call this."""
        self._follow(Answered(status))

    def on_lost(self, error: ConnectionLost) -> None:
        """Pass on that the node is lost, or that the agent refuses this process because its machine owns the run."""
        self._follow(Answered(error.status) if isinstance(error, HandedOver) else error)

    def withhold(self) -> None:
        """Let nothing in this process end the ready nodes, as it is not known whether they have another owner."""
        life = self._life
        life.is_undecided = True
        life.given_away = frozenset(n.node for n in life.state.nodes.values() if n.phase is Phase.READY)

    def own_again(self) -> None:
        """Undo `withhold`: this process is the owner, and may end the nodes."""
        if self._life.is_undecided:
            self._life.is_undecided, self._life.given_away = False, None

    def _ends_itself(self, instance: Instance) -> bool:
        return (self._rental if self._supply is None else self._supply).ends_itself(instance)

    def on_welcome(self, node: int, welcome: Welcome) -> None:
        """Take over the calls of the former process from a node, at the first connection to it.

        Do nothing for a pool that this process has started, or for a node that was connected before.
        """
        self._follow(Connected())
        if self._terms.attach and node not in self._dispatch.node_queues:
            self.inherited += self._dispatch.inherit(node, welcome, self._connections.links[node])
            self._services.inherit(node)

    def is_believed(self, node: int) -> bool:
        """Return True if this node is believed when it says that another process has taken the pool over.

        The pool is then given up. A stranger is not believed: it could claim that so that its machine keeps running.
        """
        return not self._agents.is_stranger(node)

    async def hand_over(self, error: TakenOver) -> None:
        """Give the pool up, because another process owns it now. Ready nodes are left alone, and keep running.

        Machines that are still being set up are ended, as the new owner does not have them. Calls get the error. Does
        nothing if the pool is ending or has ended.
        """
        life = self._life
        if (life.given_away is not None and not life.is_undecided) or life.is_ending:
            return
        life.is_undecided = False
        life.given_away = frozenset(n.node for n in life.state.nodes.values() if n.phase is Phase.READY)
        self._dispatch.close(error)
        life.notice(f"this process gives the pool up, and leaves its machines to the new owner: {error}")
        for node in life.given_away:
            link = self._connections.links.pop(node, None)
            if link is not None:
                await link.close(bye=False)
        life.apply(states.Stop(error))


def _nothing(event: ClientEvent | ConnectionLost) -> None:
    """Hear of nothing, as no run is being handed over."""
