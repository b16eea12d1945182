"""`Connector`: turns rented machines into nodes. It reaches each machine, sets it up and connects to its agent."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

from skypool import events
from skypool.errors import BootstrapError
from skypool.link.connection import Link, Listener
from skypool.link.inbound import Welcome
from skypool.model import Access, Instance, SlotsAsked
from skypool.pool import states
from skypool.pool.health import FIRST, HealthWatch
from skypool.pool.trust_levels import TrustLevels
from skypool.provision import health_check
from skypool.provision.bootstrap import SetupBundle, bootstrap, reach
from skypool.provision.node_setup import NodeSetup
from skypool.rental.budget import Enforcement
from skypool.rental.request import Terms
from skypool.rental.supply import Supply
from skypool.shipping import bundle, user_modules
from skypool.wire.handshake import AgentConfig, SlicePlace, SlotPlan
from skypool.wire.transport import CommandStream


class Connector:
    """A part of the engine that turns rented machines into nodes: it reaches them, sets them up and connects to them.

    The methods run in the engine's thread. The keys of the dicts are the numbers of nodes. `apply` passes an event to
    `lifecycle`. `linger` returns what nodes are told of the time for which they may live without work (see
    `LingerWatch.told`).

    Attributes:
        ways: how each node is reached, and the path of Python on it ("" if its setup wrote the path to a file there).
        welcomes: the first message of each node's agent.
        lenders: the senders of the user's modules to each node.
    """

    def __init__(
        self,
        terms: Terms,
        supply: Supply,
        limits: Enforcement,
        trust_levels: TrustLevels,
        emit: Callable[[events.Event], None],
        state: Callable[[], states.Pool],
        apply: Callable[[states.Event], None],
        listener_of: Callable[[int], Listener],
        awaited: Callable[[int], Collection[int]],
        health: HealthWatch,
        linger: Callable[[], tuple[float, float] | None],
    ) -> None:
        self._terms = terms
        self._supply = supply
        self._limits = limits
        self._trust_levels = trust_levels
        self._emit = emit
        self._state = state
        self._apply = apply
        self._listener_of = listener_of
        self._awaited = awaited
        self._health = health
        self._linger = linger
        self._session = secrets.token_hex(8)
        self._node_setup = NodeSetup(terms)
        self._reached: dict[int, tuple[Access, SetupBundle | None, CommandStream | None]] = {}
        self._came: dict[str, asyncio.Event] = {}
        self.links: dict[int, Link] = {}
        self.ways: dict[int, tuple[Access, str]] = {}
        self.welcomes: dict[int, Welcome] = {}
        self.lenders: dict[int, user_modules.Lender] = {}
        self._taken: dict[str, user_modules.Unit] = {}

    def pack(self, progress: Callable[[int, int], None]) -> None:
        """Read the files and secrets that the image names, before anything is rented. Blocks until all are read.

        `progress` is called as (bytes read, bytes in all). Raises UsageError if a file or environment variable does not
        exist.
        """
        self._node_setup.pack(progress)

    @property
    def secrets(self) -> dict[str, str]:
        """The values of the image's secrets by their names; empty before `pack`."""
        return self._node_setup.secrets

    async def reach(self, node: int) -> None:
        """Ask the driver how to reach the machine of a node, and wait until the machine answers.

        Report `Reached` or `Failed` to `lifecycle`. A failure is not raised.
        """
        instance = self._state().instance_of(node)
        try:
            access = await self._access(node)
            await asyncio.to_thread(self._supply.runs, instance)
            if access.notice:
                self._emit(events.Notice(pool=self._terms.name, text=access.notice))
            setup = await asyncio.to_thread(self._node_setup.bundle_for, access, instance)
            stream = await reach(access, setup, node) if setup or access.booting else None
        except Exception as e:  # noqa: BLE001 - lifecycle decides what it means
            await self._give_up(instance, e)
            return
        self._reached[node] = (access, setup, stream)
        self._apply(states.Reached(node))

    async def _access(self, node: int) -> Access:
        """Ask the driver how to reach a node's machine. In a slice, the driver is asked for the first host first."""
        instance = self._state().instance_of(node)
        came = self._came.setdefault(instance.slice or str(node), asyncio.Event())
        if self._state().nodes[node].host:
            await came.wait()
        try:
            return await asyncio.to_thread(self._supply.driver_of(instance).access, instance)
        finally:
            came.set()

    async def bootstrap(self, node: int) -> None:
        """Set up a machine that `reach` has reached: run the image's script, connect to it and check its hardware.

        Report `Bootstrapped` or `Failed` to `lifecycle`. A failure is not raised.
        """
        access, setup, stream = self._reached.pop(node)
        instance = self._state().instance_of(node)
        terms = self._terms
        try:
            python = access.python or ""
            if setup is not None and stream is not None:
                python = await bootstrap(stream, setup, terms.name, node, terms.liveness, self._emit)
            welcome = await self.open(instance, access, python, stream)
            bought = instance.offer.accelerator if instance.offer else None
            faults = health_check.faults(bought, welcome.health, time.time())
            if faults:
                raise BootstrapError(
                    f"the machine of node {node} is not what was asked for: {'; '.join(faults)}", step="health"
                )
            if welcome.health.monitored:
                await self._check_devices(node)
        except Exception as e:  # noqa: BLE001 - lifecycle decides what it means
            await self._give_up(instance, e)
            return
        self._apply(states.Bootstrapped(node))

    async def _check_devices(self, node: int) -> None:
        """Wait until the devices of a node were read, at most 15 s. Raise BootstrapError if one must not be used.

        Devices that cannot be read do not keep the node from getting calls; an event tells that they are unknown.
        """
        found = await self._health.first(node)
        if found.state == "unhealthy":
            raise BootstrapError(
                f"the machine of node {node} has a device that must not be used: {'; '.join(found.reasons)}",
                step="health",
            )
        if not found.devices:
            self._emit(
                events.HealthChanged(
                    pool=self._terms.name,
                    node=node,
                    state="unknown",
                    reasons=(f"the devices were not read within {FIRST:g} s; the node gets calls all the same",),
                )
            )

    async def _give_up(self, instance: Instance, error: Exception) -> None:
        """Report to the driver and to `lifecycle` that an instance could not become a node. This does not end it."""
        await asyncio.to_thread(self._supply.rejected, instance, error)
        self._apply(states.Failed(instance.node, error))

    async def open(
        self, instance: Instance, access: Access, python: str, stream: CommandStream | None = None, attach: bool = False
    ) -> Welcome:
        """Connect to the agent of an instance, and return its first message.

        Args:
            access: the driver's description of how to reach the machine.
            python: the path of the Python interpreter on the node; "" to look for one.
            stream: an open connection to the loader, the program on the machine that starts the agent. Default None: a
                new connection is made.
            attach: True requires that the agent runs already. False (the default) starts the agent.

        Raises:
            ConnectionLost: the agent cannot be reached, is gone, or serves another client.
            PythonMismatch: the node runs another minor version of Python than this process.
        """
        config = await self._agent_config(instance, access)
        command: Sequence[str]
        if stream is None and python:
            command = ["sh", "-c", bundle.agent_starter(python, access.home)]
            preamble = b""
        else:
            command = bundle.STAGE
            preamble = bundle.staged(bundle.agent_starter(python, access.home))
        link = Link(
            access.transport,
            config,
            self._listener_of(instance.node),
            session=self._session,
            command=command,
            preamble=preamble,
            liveness=self._terms.liveness,
            awaited=partial(self._awaited, instance.node),
            reader=self._trust_levels.reader(instance.node),
            linger=self._linger,
        )
        self.links[instance.node] = link
        self.ways[instance.node] = (access, python)
        self.lenders[instance.node] = user_modules.Lender(self._taken)
        welcome = await link.open(stream, start=not attach)
        if not attach:  # otherwise the calls that it names are taken over
            welcome = replace(welcome, calls=(), names={}, functions=(), objects=())
            if self._trust_levels.is_stranger(instance.node):
                welcome = _believed(welcome, config, instance)
        self.welcomes[instance.node] = welcome
        return welcome

    async def _agent_config(self, instance: Instance, access: Access) -> AgentConfig:
        """Return the configuration for the agent of an instance. May take long, as it may ask the driver for offers."""
        terms = self._terms
        state = self._state()
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
            trust=await asyncio.to_thread(self._trust_levels.judge, instance, self._supply.driver_of(instance)),
            allow=tuple(sorted(terms.allow_results)),
            env={**access.env, **dict(terms.image.spec.env), **self._node_setup.secrets},
            keep=(9,) if access.exclusive else (),
        )

    def _place(self, instance: Instance) -> SlicePlace:
        """Return the place of a node in its slice, for `runtime.InstanceInfo`. Without a TPU, it has 0 chips."""
        state = self._state()
        node = state.nodes.get(instance.node)
        accelerator = instance.offer.accelerator if instance.offer else None
        kind = accelerator.slice if accelerator else None
        return SlicePlace(
            host=node.host if node else 0,
            hosts=len(state.slice_of(node.node)) if node else 1,
            chips=kind.chips_per_vm if kind else 0,
            slice_chips=kind.chips if kind else 0,
        )

    async def drop(self, node: int) -> None:
        """Close the connection that `reach` opened to a machine, unless `bootstrap` uses it already."""
        reached = self._reached.pop(node, None)
        if reached is None:
            return
        _, _, stream = reached
        if stream is not None:
            await asyncio.to_thread(stream.close)


def _believed(welcome: Welcome, config: AgentConfig, instance: Instance) -> Welcome:
    """Return the first message of a stranger's node, without the slots in it that such a machine cannot have."""
    offer = instance.offer
    bought = offer.accelerator if offer else None
    vcpus = offer.vcpus if offer else None
    slots, cpu_slots = health_check.most_slots(config.slots, bought, vcpus, len(welcome.health.devices))
    return replace(welcome, slots=min(slots, welcome.slots), cpu_slots=min(cpu_slots, welcome.cpu_slots))
