"""`Launches`: rents the machines of new nodes, and lets a pool grow while calls wait."""

from __future__ import annotations

import asyncio
import math
import time

from skypool.calls.dispatch import Dispatch
from skypool.errors import retired
from skypool.pool import states
from skypool.pool.life import Life
from skypool.pool.replacement import LIVING, alike
from skypool.pool.states import Phase
from skypool.rental.handover import NoSupply
from skypool.rental.launch import Rented
from skypool.rental.pool_terms import Terms
from skypool.rental.supply import Supply

_GROW_AGAIN = 5.0
"""Seconds until a pool that could not grow tries again. The pause doubles with every failure."""
_GROW_AGAIN_AT_MOST = 300.0
"""The longest pause between two attempts to grow, in seconds."""


class Launches:
    """Rents the machines of one pool's new nodes. The methods run in the engine's thread."""

    def __init__(self, terms: Terms, life: Life, supply: Supply | None, dispatch: Dispatch) -> None:
        self._terms = terms
        self._life = life
        self._supply = supply
        self._dispatch = dispatch
        self._watching: asyncio.Task[None] | None = None
        self._pause = _GROW_AGAIN
        self._from = -math.inf  # the earliest time of the next attempt to grow
        self._told = ""

    async def launch(self, nodes: tuple[int, ...]) -> None:
        """Rent a slice for each of these node numbers, which becomes the number of the slice's first host.

        For each slice, report `Launched` or `Failed` to the state machine.
        """
        life = self._life
        if self._supply is None:
            self._refuse(nodes)
            return
        try:
            hosts = life.state.hosts if life.state.maximum > 1 else None  # so that nodes do not meet
            rented = await self._supply.rent(nodes, hosts, life.pause, self._is_wanted)
        except Exception as e:  # noqa: BLE001 - lifecycle decides what it means
            rented = Rented((), e)
        for first, *others in rented.slices:
            life.apply(states.Launched(first.node, first, tuple(others)))
        was_ready = life.state.phase is Phase.READY
        for node in sorted(set(nodes) - {instance.node for instance in rented.instances}):
            if rented.error is not None or not self._is_wanted(node):
                life.apply(states.Failed(node, rented.error or retired(node)))
        if was_ready:
            self._note_growth(rented.error)

    def _refuse(self, nodes: tuple[int, ...]) -> None:
        """Report to the state machine that these slices cannot be rented, without an account. Tell the user once."""
        error = NoSupply(self._life.pool, "replace a node")
        for node in nodes:
            self._life.apply(states.Failed(node, error))
        if not self._told and not self._life.is_ending:
            self._told = alike(error)
            self._life.notice(str(error))

    def _is_wanted(self, node: int) -> bool:
        """Return True if a machine is still to be rented for a node: the node was not retired meanwhile."""
        return not self._life.state.nodes[node].retiring

    def _note_growth(self, error: Exception | None) -> None:
        """Note that nodes of a ready pool were launched (None), or why not: then pause before the next attempt."""
        if error is None:
            self._pause = _GROW_AGAIN
            self._told = ""
            return
        pause = self._pause
        self._from = time.monotonic() + pause
        self._pause = min(2 * pause, _GROW_AGAIN_AT_MOST)
        words = alike(error)
        if words != self._told:  # an error that repeats is told once
            self._told = words
            state = self._life.state
            if self.may_grow:
                self._life.notice(
                    f"the pool cannot grow for now; it uses the nodes it has, and tries again in {pause:g} s: {error}"
                )
            else:
                self._life.notice(
                    f"no further machine could be rented, so the pool has {state.count(*LIVING)} of {state.minimum} "
                    f"nodes; pool.resize({state.minimum}) tries again: {error}"
                )

    @property
    def may_grow(self) -> bool:
        """True if the pool may get more nodes than its minimum when calls wait."""
        state = self._life.state
        return self._supply is not None and self._terms.replaces and state.maximum > state.minimum

    def watch(self) -> None:
        """Start the task that makes the pool grow while calls wait, unless it runs already."""
        if self._watching is None or self._watching.done():
            self._watching = self._life.spawn(self._watch_pressure())

    async def _watch_pressure(self) -> None:
        """Report `Pressure` after each second in which calls wait. After a failed attempt to grow, pause first."""
        waited = 0
        while self._life.state.phase is Phase.READY and self.may_grow:
            await asyncio.sleep(0.25)
            waited = waited + 1 if self._dispatch.pressed else 0
            if waited >= 4 and time.monotonic() >= self._from:
                waited = 0
                self._life.apply(states.Pressure())
