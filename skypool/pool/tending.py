"""`Tending`: the regular work of a pool: it renews lease and prices, and ends the pool when a limit is reached."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from skypool.errors import TakenOver
from skypool.pool import states
from skypool.pool.idle_accounting import IdleWatch
from skypool.pool.life import Life
from skypool.pool.limits import LOOK, PLANNED, Limits
from skypool.pool.replacement import alike
from skypool.pool.takeover import Takeover
from skypool.rental.supply import Supply
from skypool.wire import error_text


class Tending:
    """The lease, the prices and the limits of one pool. The methods run in the engine's thread."""

    def __init__(
        self,
        life: Life,
        supply: Supply | None,
        idle: IdleWatch,
        limits: Limits,
        takeover: Takeover,
    ) -> None:
        self._life = life
        self._rental = life.rental
        self._supply = supply
        self._idle = idle
        self._limits = limits
        self._takeover = takeover
        self._told: set[str] = set()

    async def keep_lease(self) -> None:
        """Tell the ledger and the providers regularly that this pool is alive, until it begins to end."""
        while not self._life.is_ending:
            with self._deciding():
                await asyncio.to_thread(self._renew)
            await self._life.pause(self._rental.pulse)

    def _renew(self) -> None:
        """Renew the pool's lease and prices. Blocks. Raises if another process ends the pool or has taken it over."""
        self._rental.beat()
        if self._supply is None:
            return
        self._supply.renew()
        if prices := self._supply.new_prices():
            self._idle.record()  # until now at the old prices
            self._rental.repriced(prices)
        self._supply.terminate_lost()

    async def keep_limits(self) -> None:
        """End the pool when its budget is spent or its lifetime is over. No provider is asked."""
        while not self._life.is_ending:
            pause = LOOK
            with self._deciding():
                pause = await self._limits.check()
            await self._life.pause(pause)

    @contextlib.contextmanager
    def _deciding(self) -> Iterator[None]:
        """Handle errors of the `with` block: end the pool for a planned end, and tell the user of others, each once."""
        try:
            yield
        except TakenOver as e:
            self._life.spawn(self._takeover.hand_over(e))
        except PLANNED as e:
            self._life.apply(states.Stop(e))
        except Exception as e:  # noqa: BLE001 - the user is told, and it is tried again
            if (words := alike(e)) not in self._told:
                self._told.add(words)
                self._life.notice(f"the pool goes on, but could not check its limits: {error_text.told(e)}")
