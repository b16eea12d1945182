"""`Terminations`: ends the machines of nodes, and tries again until each provider confirms their end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextvars import copy_context
from functools import partial

from skypool.errors import ConnectionLost, SkypoolError, StillRunning, not_ended, together
from skypool.event_loop import beside
from skypool.link.link import Link
from skypool.model import Instance
from skypool.pool import states, watch_closing
from skypool.pool.idle_accounting import IdleWatch
from skypool.pool.life import Life
from skypool.pool.node_startup import NodeStartup
from skypool.pool.saving import Saving
from skypool.rental.receipt import Receipt
from skypool.rental.supply import Supply
from skypool.wire import error_text
from skypool.wire.save_orders import LEAST

_AGAIN = 5.0
"""Seconds between two attempts to end machines whose end is not confirmed."""
_TO_RECORD = 5.0
"""The most seconds for which the end of machines waits until their idle time is recorded."""


class Terminations:
    """Ends one pool's machines. A method runs in the engine's thread unless its description says otherwise.

    Attributes:
        paid: the pool's costs when machines were last ended; None if none were ended, or if the costs are not known.
    """

    def __init__(
        self, life: Life, supply: Supply | None, startup: NodeStartup | None, idle: IdleWatch, saving: Saving
    ) -> None:
        self._life = life
        self._supply = supply
        self._node_startup = startup
        self._idle = idle
        self._saving = saving
        self._silent_since: dict[int, float] = {}
        self.paid: Receipt | None = None

    async def terminate(self, nodes: tuple[int, ...]) -> None:
        """End the machines of these nodes, and report each to the state machine, as `Terminated` or `StillThere`.

        First, the nodes save what is left of the folders that they save.

        Attempts are repeated every 5 s, until the provider confirms the end of all machines. An attempt that begins
        while the pool is ending is the last. A machine of the user's own that was lost and cannot be reached counts as
        ended; the user is told. Nodes that were given to another process are left running, but reported as
        `Terminated`.
        """
        from tenacity import AsyncRetrying, retry_if_result

        life = self._life
        given_away = life.given_away or frozenset()
        for node in nodes:
            if node in given_away:
                life.apply(states.Terminated(node))
        nodes = tuple(node for node in nodes if node not in given_away)
        if not nodes:
            return
        if self._saving.has(nodes):
            try:
                await beside(partial(self._save_rest, nodes), "skypool save")
            except Exception as e:  # noqa: BLE001 - the machines must end in any case
                life.notice(f"what is left was perhaps not saved: {error_text.told(e)}")
        await self.record_idle()
        if self._supply is None:
            await self._end_by_agents(nodes)
            return
        await asyncio.gather(*(self._leave(node) for node in nodes), return_exceptions=True)
        left = {node: life.state.instance_of(node) for node in nodes}
        lost = {node for node in nodes if isinstance(life.state.nodes[node].error, ConnectionLost)}
        is_last = False
        supply = self._supply

        async def end() -> Mapping[int, StillRunning]:
            """Try once to end the machines in `left`. Return the error of each that may still run, by node number."""
            nonlocal is_last
            is_last = life.is_ending
            return await self._end(supply, left)

        again = AsyncRetrying(
            stop=lambda _: is_last,
            retry=retry_if_result(bool),
            wait=lambda _: _AGAIN,
            sleep=life.pause,
            retry_error_callback=lambda state: state.outcome.result() if state.outcome else {},
        )
        unproved: Mapping[int, StillRunning] = await again(end)
        for node, error in unproved.items():
            if node in lost and left[node].id in {getattr(each, "id", "") for each in error.unreachable}:
                life.notice(f"node {node} was lost, and skypool's processes there cannot be ended from here: {error}")
                life.rental.ended([left[node]])
                life.apply(states.Terminated(node))
            else:
                life.apply(states.StillThere(node, error))

    def _save_rest(self, nodes: tuple[int, ...]) -> None:
        """Have nodes save what is left, in the time that budget and lifetime allow."""
        life = self._life
        try:
            left = min(life.rental.limits.left(), life.rental.limits.lifetime_left)
        except SkypoolError:  # the costs cannot be read, which was told
            left = LEAST
        self._saving.end(nodes, max(0.0, left), calm=life.state.error is None, stops=True)

    async def record_idle(self) -> None:
        """Record the idle time of nodes until now.

        If this fails or takes more than 5 s, tell the user, and return.
        """
        try:
            async with asyncio.timeout(_TO_RECORD):
                await beside(self._idle.record, "skypool idle time")
        except Exception as e:  # noqa: BLE001 - the machines must end in any case
            self._life.notice(f"the idle time of nodes was not recorded: {error_text.told(e)}")

    async def _leave(self, node: int) -> None:
        """Tell the agent of a node to end, and close the link to it."""
        if self._node_startup is not None:
            await self._node_startup.stop(node)
        link = self._life.connections.links.pop(node, None)
        if link is not None:
            silence = link.silence
            if silence is not None:
                self._silent_since[node] = time.monotonic() - silence
            await link.close(bye=True)

    async def _end(self, supply: Supply, left: dict[int, Instance]) -> Mapping[int, StillRunning]:
        """Try once to end the machines in `left`. Remove the ended ones, and return the errors of those that remain."""
        now = time.monotonic()
        silent = {node: now - self._silent_since[node] for node in left if node in self._silent_since}
        try:
            context, end = copy_context(), partial(supply.terminate, list(left.values()), silent)
            unproved = await beside(lambda: context.run(end), "skypool end")
        except Exception as e:  # noqa: BLE001 - whatever it is, the machines may still cost something
            error = not_ended({f"node {node}": error_text.told(e) for node in left}, list(left.values()))
            error.__cause__ = e
            unproved = dict.fromkeys(left, error)
        await self._note_paid()
        for node in sorted(left.keys() - unproved.keys()):
            del left[node]
            self._life.apply(states.Terminated(node))
        return unproved

    async def _note_paid(self) -> None:
        try:
            async with asyncio.timeout(_TO_RECORD):
                self.paid = await beside(lambda: self._life.rental.known_receipt, "skypool receipt")
        except Exception:  # noqa: BLE001 - what it costs is not known, and the pool's end says so
            self.paid = None

    async def _end_by_agents(self, nodes: tuple[int, ...]) -> None:
        """Have the agents of these nodes end their machines, as no provider can be asked. Their end is not proved."""
        life = self._life
        links = {node: life.connections.links.pop(node, None) for node in nodes}
        told = await asyncio.gather(*(self._tell_to_end(link) for link in links.values()))
        await self._note_paid()
        for node, was_told in zip(links, told, strict=True):
            instance = life.state.instance_of(node)
            # the account of a machine goes on until its end is proved, unless it costs nothing
            if await asyncio.to_thread(life.rental.is_free, instance):
                await asyncio.to_thread(life.rental.ended, [instance])
            elif not was_told and not life.rental.ends_itself(instance):
                life.apply(states.StillThere(node, _left_running(life.pool, instance)))
                continue
            elif not was_told:
                life.notice(f"node {node} could not be told to end; its machine {instance.id} ends with its lease")
            life.apply(states.Terminated(node))

    @staticmethod
    async def _tell_to_end(link: Link | None) -> bool:
        return link is not None and await link.end()

    def unproved(self) -> list[StillRunning]:
        """Return the errors of machines whose end is not confirmed. An error of several machines is in it only once."""
        errors = [node.error for node in self._life.state.nodes.values()]
        return list({id(e): e for e in errors if isinstance(e, StillRunning)}.values())

    async def close(self) -> None:
        """Remove keys and other leftovers at the providers, and close the pool's record in the ledger.

        If the end of a machine is not confirmed, the record is left open. Does nothing for a pool that was given to
        another process, which owns what is left. Raises StillRunning or ErrorGroup if something could not be removed.
        """
        if self._life.given_away is not None:
            return
        if self._supply is None:
            await asyncio.to_thread(self._close_account)
            return
        close = partial(self._supply.close, self._life.state.error, proved=not self.unproved())
        await beside(partial(copy_context().run, close), "skypool end")

    def _close_account(self) -> None:
        """Close the record in the ledger if no machine is left. Otherwise tell the user how to prove their end."""
        life = self._life
        if not life.rental.there:
            life.rental.end(life.state.error)
        elif not self.unproved():
            life.notice(
                f"the machines of pool {life.pool!r} were told to end; `skypool down {life.pool}`, where the "
                "credentials are, proves that they have, and removes what they leave"
            )

    def end_now(self) -> None:
        """End every machine from the calling thread, and block until the provider confirms that all have ended.

        This is used at the interpreter's exit, when no thread can be started. Any thread may call this.

        Raises:
            StillRunning: the end of one or more machines is not confirmed.
            ErrorGroup: this is so at several providers, or the machines have ended but leftovers of the pool remain.
        """
        if self._life.given_away is not None:
            return
        if self._supply is None:
            self.hand_over_now()
            return
        for link in self._life.connections.links.values():
            link.bid_farewell()
        watch_closing.close_all([("the record of idle time", self._idle.record)], _TO_RECORD)
        supply = self._supply
        failed = supply.terminate(self._life.rental.there)  # of which the engine's thread may not have heard yet
        supply.close(self._life.state.error, proved=not failed)
        if failed:
            raise together(
                f"it is not confirmed that each machine of pool {self._life.pool!r} has ended; run `skypool down "
                f"{self._life.pool}` to try again",
                failed.values(),
            )

    def hand_over_now(self) -> None:
        """Let a new process end the machines. Raise SkypoolError if it cannot be started. Any thread may call this.

        Without an account of a provider, the agents of the nodes are told to end the machines. Does nothing if another
        process owns the pool, or its run does.
        """
        if self._life.given_away is not None:
            return
        if self._supply is not None:
            self._life.notice(self._supply.terminate_in_background())
            return
        for link in self._life.connections.links.values():
            link.allow(0.0)


def _left_running(pool: str, instance: Instance) -> StillRunning:
    """Return (do not raise) the error for a machine that was not told to end, and cannot end itself."""
    return StillRunning(
        f"machine {instance.id} of {instance.provider} was not reached, and it cannot end itself, so it goes on to "
        f"cost money: run `skypool down {pool}` where the credentials are",
        [instance],
    )
