"""`NodeStartup`: turns rented machines into nodes. It reaches each machine, sets it up and has its agent started."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from functools import partial

from skypool import events
from skypool.data.data_asked import DataFolder, examined, far_apart, on_node
from skypool.data.save_asked import SaveFolder, checked
from skypool.errors import BootstrapError
from skypool.event_loop import beside
from skypool.model import Access, Instance, Offer
from skypool.pool import states
from skypool.pool.agents import Agents
from skypool.pool.health import FIRST, HealthWatch
from skypool.pool.life import Life
from skypool.pool.saving import Saving, check_lease
from skypool.provision import health_check
from skypool.provision.bootstrap import SetupBundle, bootstrap, reach
from skypool.provision.setup_payload import NodeSetup
from skypool.rental.pool_terms import Terms
from skypool.rental.supply import Supply
from skypool.wire.transport import CommandStream

_SAY_EVERY = 1.0
"""Seconds between two events about the packing of files."""


class NodeStartup:
    """The setup of one pool's rented machines, until each is a node. The methods run in the engine's thread.

    Attributes:
        data: the folders of data, with what was found at their places.
    """

    def __init__(
        self,
        terms: Terms,
        node_setup: NodeSetup,
        life: Life,
        supply: Supply,
        agents: Agents,
        health: HealthWatch,
        saving: Saving,
    ) -> None:
        self._terms = terms
        self._node_setup = node_setup
        self._life = life
        self._supply = supply
        self._agents = agents
        self._health = health
        self._saving = saving
        self._places: list[SaveFolder] = []
        self.data: list[DataFolder] = []
        self._tasks: dict[int, asyncio.Task[None]] = {}  # that reach a machine or set it up, by node number
        self._reached: dict[int, tuple[Access, SetupBundle | None, CommandStream | None]] = {}
        self._came: dict[str, asyncio.Event] = {}

    def pack(self) -> None:
        """Read the files and secrets that the user's image names. Call this before anything is rented. Blocks.

        The user sees each second how much was read. Raises UsageError if a file or environment variable does not exist.
        """
        said = time.monotonic()

        def tell(done: int, total: int) -> None:
            nonlocal said
            if done == total or time.monotonic() - said >= _SAY_EVERY:
                said = time.monotonic()
                self._life.emit(events.FilesProgress(pool=self._terms.name, done=done, total=total))

        self._node_setup.pack(tell)

    def check_places(self) -> None:
        """Try the places to which folders are saved, and those of data. Call this before anything is rented. Blocks.

        Raises UsageError if one cannot be used.
        """
        self._places = checked(self._terms.save, self._life.notice)
        check_lease(self._places, self._terms.lease)
        self.data = examined(self._terms.data)

    def tell_of_data(self, offers: Sequence[Offer]) -> None:
        """Tell what may cost traffic on machines that may be rented."""
        for text in far_apart(self.data, offers):
            self._life.notice(text)

    def begin_reach(self, node: int) -> None:
        """Start a task that reaches the machine of a node, and reports `Reached` or `Failed` to `lifecycle`."""
        self._tasks[node] = self._life.spawn(self._reach(node))

    def begin_bootstrap(self, node: int) -> None:
        """Start a task that sets up a machine that was reached. It reports `Bootstrapped` or `Failed`."""
        self._tasks[node] = self._life.spawn(self._bootstrap(node))

    async def stop(self, node: int) -> None:
        """Stop setting a node up: cancel the task, and close the connection. Return when the task has ended.

        It then starts no agent any more.
        """
        task = self._tasks.pop(node, None)
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait([task])
        reached = self._reached.pop(node, None)
        if reached is not None and reached[2] is not None:
            await asyncio.to_thread(reached[2].close)

    async def _reach(self, node: int) -> None:
        """Ask the driver how to reach the machine of a node, and wait until the machine answers."""
        instance = self._life.state.instance_of(node)
        try:
            access = await self._access(node)
            await asyncio.to_thread(self._supply.runs, instance)
            if access.notice:
                self._life.emit(events.Notice(pool=self._terms.name, text=access.notice))
            setup = await asyncio.to_thread(self._node_setup.bundle_for, access, instance)
            stream = await reach(access, setup, node) if setup or access.booting else None
        except Exception as e:  # noqa: BLE001 - lifecycle decides what it means
            await self._give_up(instance, e)
            return
        self._reached[node] = (access, setup, stream)
        self._life.apply(states.Reached(node))

    async def _access(self, node: int) -> Access:
        """Ask the driver how to reach a node's machine. In a slice, ask for the first host before all others."""
        instance = self._life.state.instance_of(node)
        came = self._came.setdefault(instance.slice or str(node), asyncio.Event())
        if self._life.state.nodes[node].host:
            await came.wait()
        try:
            return await asyncio.to_thread(self._supply.driver_of(instance).access, instance)
        finally:
            came.set()

    async def _bootstrap(self, node: int) -> None:
        """Run the image's script on a machine that was reached, connect to its agent, and check its hardware."""
        access, setup, stream = self._reached.pop(node)
        instance = self._life.state.instance_of(node)
        terms = self._terms
        try:
            python = access.python or ""
            if setup is not None and stream is not None:
                python = await bootstrap(stream, setup, terms.name, node, terms.liveness, self._life.emit)
            await self._agents.judge(instance, self._supply.driver_of(instance))
            welcome = await self._agents.open(instance, access, python, stream)
            bought = instance.offer.accelerator if instance.offer else None
            faults = health_check.faults(bought, welcome.health, time.time())
            if faults:
                raise BootstrapError(
                    f"the machine of node {node} is not what was asked for: {'; '.join(faults)}", step="health"
                )
            if welcome.health.monitored:
                await self._check_devices(node)
            if self.data:
                base = access.cwd or access.folder
                folders = {on_node(base, each.path): each for each in self.data}
                await beside(partial(self._saving.fill, node, folders), "skypool data")
            if self._places:
                await self._bring_back(node, access)
        except Exception as e:  # noqa: BLE001 - lifecycle decides what it means
            await self._give_up(instance, e)
            return
        self._life.apply(states.Bootstrapped(node))

    async def _check_devices(self, node: int) -> None:
        """Raise BootstrapError if a device of a node must not be used. Wait at most 15 s for its first sample."""
        found = await self._health.first(node)
        if found.state == "unhealthy":
            raise BootstrapError(
                f"the machine of node {node} has a device that must not be used: {'; '.join(found.reasons)}",
                step="health",
            )
        if not found.devices:
            self._life.emit(
                events.HealthChanged(
                    pool=self._terms.name,
                    node=node,
                    state="unknown",
                    reasons=(f"the devices were not read within {FIRST:g} s; the node gets calls all the same",),
                )
            )

    async def _bring_back(self, node: int, access: Access) -> None:
        """Bring the folders that a node saves back, and have it save them from now on."""
        terms = self._terms
        folders = {os.path.join(access.cwd or access.folder, each.path): each for each in self._places}
        count = max(terms.maximum, self._life.state.maximum) * self._life.state.hosts
        begin = partial(self._saving.begin, node, folders, count=count, patterns=terms.complete, drain=terms.drain)
        await beside(begin, "skypool save")

    async def _give_up(self, instance: Instance, error: Exception) -> None:
        """Report to the driver and to `lifecycle` that an instance could not become a node. Do not end the instance."""
        await asyncio.to_thread(self._supply.rejected, instance, error)
        self._life.apply(states.Failed(instance.node, error))
