"""`Agents`: connects to the agents of nodes. The agent is the process on a node that runs the calls."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from skypool.calls.dispatch import Dispatch
from skypool.drivers.contract import Driver
from skypool.link.agent_messages import Welcome
from skypool.link.link import Link, Listener
from skypool.model import Access, Instance, SlotsAsked, Trust
from skypool.pool.life import Life
from skypool.pool.limits import Limits
from skypool.pool.trust_levels import TrustLevels
from skypool.provision import health_check
from skypool.provision.setup_payload import NodeSetup
from skypool.rental.pool_terms import Terms
from skypool.shipping import package_zip, user_modules
from skypool.wire.agent_config import AgentConfig, SlicePlace, SlotPlan
from skypool.wire.transport import CommandStream


class Home(Protocol):
    """A protocol for the members of the engine that `Agents` uses."""

    dispatch: Dispatch

    def listener_of(self, node: int) -> Listener: ...


class Agents:
    """The agents of one pool's nodes. The methods run in the engine's thread.

    Attributes:
        connections: gets the link to each agent.
    """

    def __init__(
        self,
        terms: Terms,
        node_setup: NodeSetup,
        life: Life,
        trust_levels: TrustLevels,
        limits: Limits,
        home: Home,
    ) -> None:
        self._terms = terms
        self._node_setup = node_setup
        self._life = life
        self._trust_levels = trust_levels
        self._limits = limits
        self.connections = life.connections
        self._home = home
        self._session = secrets.token_hex(8)
        self._taken: dict[str, user_modules.Unit] = {}

    async def judge(self, instance: Instance, driver: Driver) -> None:
        """Decide if a machine's results are unpickled. Call this before `open`. It may ask the driver for offers.

        A driver is the object that talks to the machine's provider.
        """
        await asyncio.to_thread(self._trust_levels.judge, instance, driver)

    def note_trust(self, instance: Instance, trust: Trust) -> None:
        """Unpickle the results of a machine, or not, as the former process of the pool did (`trust`).

        Call this before `open`, in place of `judge`.
        """
        self._trust_levels.note(instance, trust)

    def trust_of(self, node: int) -> Trust:
        """Return "full" if the results of a node are unpickled, otherwise "data". Call `judge` for the node first."""
        return self._trust_levels.of(node)

    def is_stranger(self, node: int) -> bool:
        """Return True if the results of a node are not unpickled. Call `judge` for the node first."""
        return self._trust_levels.is_stranger(node)

    async def open(
        self,
        instance: Instance,
        access: Access,
        python: str,
        stream: CommandStream | None = None,
        attach: bool = False,
        heir: str = "",
    ) -> Welcome:
        """Connect to the agent of an instance, and return its first message.

        Args:
            access: the driver's description of how to reach the machine.
            python: the path of the Python interpreter on the node; "" to look for one.
            stream: an open connection to the loader, the program on the machine that starts the agent. Default None: a
                new connection is made.
            attach: True requires that the agent runs already. False (the default) starts the agent.
            heir: the word by which the agent knows its new owner; "" for none.

        Raises:
            ConnectionLost: the agent cannot be reached, does not run any more, or serves another client.
            PythonMismatch: the node runs another minor version of Python than this process.
        """
        config = await self._agent_config(instance, access)
        command: Sequence[str]
        if stream is None and python:
            command = ["sh", "-c", package_zip.agent_starter(python, access.home)]
            preamble = b""
        else:
            command = package_zip.STAGE
            preamble = package_zip.staged(package_zip.agent_starter(python, access.home))
        link = Link(
            access.transport,
            config,
            self._home.listener_of(instance.node),
            session=self._session,
            command=command,
            preamble=preamble,
            liveness=self._terms.liveness,
            awaited=partial(self._home.dispatch.roster.awaited, instance.node),
            reader=self._trust_levels.reader(instance.node),
            linger=self._limits.linger_told,
            heir=heir,
        )
        connections = self.connections
        connections.links[instance.node] = link
        connections.ways[instance.node] = (access, python)
        connections.lenders[instance.node] = user_modules.Lender(self._taken, not self._terms.lends)
        welcome = await link.open(stream, start=not attach)
        if not attach:  # otherwise the calls that it names are taken over
            welcome = replace(welcome, calls=(), names={}, functions=(), objects=())
            if self._trust_levels.is_stranger(instance.node):
                welcome = _believed(welcome, config, instance)
        connections.welcomes[instance.node] = welcome
        return welcome

    async def _agent_config(self, instance: Instance, access: Access) -> AgentConfig:
        """Return the configuration for the agent of an instance."""
        terms = self._terms
        state = self._life.state
        slots: SlotsAsked | tuple[SlotPlan, ...] = terms.need.slots
        if isinstance(access.slots, (int, str)):
            slots = access.slots
        elif access.slots is not None:
            slots = tuple(SlotPlan(each["env"], tuple(each.get("devices", ()))) for each in access.slots)
        return AgentConfig(
            folder=access.folder,
            spool=access.spool,
            cwd=access.cwd or access.folder,
            pool=terms.name,
            node=instance.node,
            nodes=max(len(state.nodes), state.minimum * state.hosts),
            slice=self._place(instance),
            slots=slots,
            lease=terms.lease,
            lifetime=await asyncio.to_thread(self._limits.node_lifetime),
            liveness=terms.liveness,
            grace=terms.grace,
            guard=access.guard,
            rented=bool(access.guard) and not access.owned,
            watch=access.watch,
            spool_memory=access.spool_memory,
            trust=self._trust_levels.of(instance.node),
            allow=tuple(sorted(terms.allow_results)),
            env={**access.env, **dict(terms.image.spec.env), **self._node_setup.secrets},
            keep=(9,) if access.exclusive else (),
        )

    def _place(self, instance: Instance) -> SlicePlace:
        """Return the place of a node in its slice, as calls may ask for it. Without a TPU, it has 0 chips."""
        state = self._life.state
        node = state.nodes.get(instance.node)
        accelerator = instance.offer.accelerator if instance.offer else None
        kind = accelerator.slice if accelerator else None
        return SlicePlace(
            host=node.host if node else 0,
            hosts=len(state.slice_of(node.node)) if node else 1,
            chips=kind.chips_per_vm if kind else 0,
            slice_chips=kind.chips if kind else 0,
        )


def _believed(welcome: Welcome, config: AgentConfig, instance: Instance) -> Welcome:
    """Return the first message of a stranger's node. If it claims more slots than the machine can have, reduce them."""
    offer = instance.offer
    bought = offer.accelerator if offer else None
    vcpus = offer.vcpus if offer else None
    slots, cpu_slots = health_check.most_slots(config.slots, bought, vcpus, len(welcome.health.devices))
    return replace(welcome, slots=min(slots, welcome.slots), cpu_slots=min(cpu_slots, welcome.cpu_slots))
