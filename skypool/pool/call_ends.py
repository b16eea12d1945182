"""`CallEnds`: ends the calls, streams and services of a pool that ends."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from functools import partial

from skypool.calls.dispatch import Dispatch
from skypool.calls.pending_calls import PendingCall
from skypool.errors import PoolClosed
from skypool.event_loop import beside
from skypool.pool import watch_closing
from skypool.pool.life import Life
from skypool.pool.service_supervisor import Services

_TO_END_CALLS = 5.0
"""The most seconds for which the end of machines waits for callbacks of the user about calls that end."""
_TO_CLEAN_UP = 5.0
"""The most seconds for which the end of a pool waits for generators that are stopped."""


class CallEnds:
    """Ends one pool's calls. A method runs in the engine's thread unless its description says otherwise."""

    def __init__(self, life: Life, dispatch: Dispatch, services: Services) -> None:
        self._life = life
        self._dispatch = dispatch
        self._services = services

    def close_streams(self, reason: BaseException | None = None) -> list[PendingCall]:
        """Close the streams that have not ended, tell the user about them, and return their calls. Do not wait.

        Any thread may call this. `reason` is the error that readers of these streams get; None for a PoolClosed error.
        """
        closed = self._dispatch.close_streams(
            reason
            or PoolClosed(
                f"pool {self._life.pool!r} was left before this stream was read to its end; read streams in the `with` "
                "block"
            )
        )
        if closed:
            names = [each.name for each in closed]
            told = ", ".join(f"{name} ({n} times)" if (n := names.count(name)) > 1 else name for name in {*names})
            self._life.notice(
                f"the pool ends, so generators that have not ended are stopped, and the rest of their items is "
                f"discarded: {told}. Read a stream to its end before, or close it"
            )
        return closed

    async def end_streams(self, reason: BaseException) -> None:
        """Close the streams that have not ended, and wait until their generators have cleaned up, at most 5 s."""
        closed = self.close_streams(reason)
        until = time.monotonic() + _TO_CLEAN_UP
        while any(map(self._dispatch.roster.runs, closed)) and time.monotonic() < until:
            await asyncio.sleep(0.01)

    async def end(self, reason: BaseException) -> None:
        """End all calls, then all services, and accept no more. Wait at most 5 s for callbacks of the user.

        `reason` is the error that the calls get.
        """
        await self._beside(self._dispatch.end_calls, reason)
        await self._services.close()
        await self._beside(self._dispatch.close, reason)

    async def cut_off(self, error: BaseException) -> None:
        """End all services and calls at once, with `error`, and accept no more. Wait at most 5 s for user callbacks."""

        def end(error: BaseException) -> None:
            self._services.end(error)
            self._dispatch.close(error)

        await self._beside(end, error)

    async def _beside(self, end: Callable[[BaseException], None], reason: BaseException) -> None:
        """Call `end(reason)`, which runs callbacks of the user, in another thread. Wait for it, at most 5 s."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TO_END_CALLS):
                await beside(partial(end, reason), "skypool end of calls")

    def end_now(self) -> None:
        """End the calls at the interpreter's exit. Any thread may call this."""
        error = PoolClosed(f"pool {self._life.pool!r} ended when Python exited")
        watch_closing.close_all([("its calls", partial(self._dispatch.close, error))], _TO_END_CALLS)
