"""Sends the items of a call's iterator arguments, each when the function on the node asks for it.

The iterator itself stays in this process.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from skypool.calls.dispatch import Dispatch
from skypool.calls.pending_calls import PendingCall
from skypool.errors import protocol_violation
from skypool.wire import codec, exceptions


class Feeder:
    """A thread that reads one iterator argument of a call and sends its items to the node that runs the call.

    Each iterator has its own thread, because the user's iterator may block. The constructor starts the thread, as a
    daemon. The thread ends when the iterator ends, or at most one second after the call has ended, unless the iterator
    blocks. `arg` is the index of the iterator among the call's iterator arguments, from 0.
    """

    def __init__(self, dispatch: Dispatch, pending: PendingCall, arg: int) -> None:
        self._dispatch = dispatch
        self._pending = pending
        self._arg = arg
        self._items: Iterator[Any] = pending.feeds[arg]
        self._wanted = 0
        self._sent_by = 0
        self._last: tuple[int, dict[str, Any], list[Any]] = (0, {}, [])
        self._more = threading.Condition()
        threading.Thread(target=self._run, name="skypool-feed", daemon=True).start()

    @property
    def is_over(self) -> bool:
        """True if the call has ended, so that the node asks for no more items."""
        return self._pending.ended

    def want(self, n: int) -> None:
        """Have the thread send item number `n` (from 1) as soon as the iterator yields it. Return at once.

        If the node requests the last sent item again over a new connection, that item is sent again. Other repeated
        requests are ignored. Raises ProtocolError if the item before number `n` was not sent yet.
        """
        connection = self._dispatch.roster.connection(self._pending)
        with self._more:
            last = self._last[0]
            if n > last + 1:
                raise protocol_violation(
                    f"the node asks for item {n} of an iterator argument of {self._pending.name}, although item "
                    f"{last + 1} is the next one"
                )
            if n == last and connection != self._sent_by:
                self._sent_by = connection
                self._dispatch.roster.item(self._pending, self._last[1], self._last[2])
            self._wanted = max(n, self._wanted)
            self._more.notify()

    def _run(self) -> None:
        """Read and send items as they are asked for, until the iterator or the call ends."""
        while True:
            with self._more:
                while self._wanted <= self._last[0]:
                    self._more.wait(1.0)
                    if self._pending.ended:
                        return
                n = self._wanted
            header: dict[str, Any] = {"arg": self._arg, "n": n}
            buffers: list[Any] = []
            try:
                buffers = codec.dumps(next(self._items), f"item {n} of an iterator argument of {self._pending.name}")
            except StopIteration:
                header["end"] = True
            except Exception as e:  # noqa: BLE001 - the node raises it in the function that asked for the item
                header |= {"end": True, "error": True}
                buffers = exceptions.dump_error(e)
            with self._more:
                self._last = (n, header, buffers)
                self._sent_by = self._dispatch.roster.connection(self._pending)
            self._dispatch.roster.item(self._pending, header, buffers)
            if "end" in header:  # sent like an item; no more items follow
                return
