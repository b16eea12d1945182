"""`Renewals`: sends nodes new temporary credentials for folders in buckets, before the former ones expire."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping

from skypool.buckets.temporary import Issuer
from skypool.pool.connections import Connections
from skypool.pool.life import Life
from skypool.pool.states import Phase
from skypool.text import one_line
from skypool.wire.save_orders import FolderState, Order

_LOOK = 1.0
"""Seconds between two looks at what nodes have."""
_AGAIN = 2.0
"""Seconds after which credentials are sent again that the node has not confirmed."""

Key = tuple[int, str]
"""The number of a node, and the name of a folder."""


class Renewals:
    """The temporary credentials of the nodes of one pool. Any thread may call the methods.

    Args:
        states: returns the state of each folder.
        send: sends an order to a node.
    """

    def __init__(
        self,
        life: Life,
        connections: Connections,
        states: Callable[[], Mapping[Key, FolderState]],
        send: Callable[[int, Mapping[str, object]], None],
    ) -> None:
        self._life, self._connections = life, connections
        self._states, self._send = states, send
        self._renewed: dict[Key, tuple[Order, Issuer]] = {}
        self._sent: dict[Key, float] = {}
        self._troubles: dict[Issuer | Key, str] = {}  # that were told
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def add(self, node: int, order: Order, issuer: Issuer) -> None:
        """Renew the credentials of a folder until it is not saved any more, or its data is there."""
        with self._lock:
            self._renewed[node, order.id] = order, issuer
            self._sent.pop((node, order.id), None)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="skypool credentials", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        while self._life.state.phase is not Phase.ENDED and self._life.given_away is None:
            with self._lock:
                renewed = dict(self._renewed)
            for key, (order, issuer) in renewed.items():
                try:
                    self._renew(key, order, issuer)
                except Exception as e:  # noqa: BLE001 - the others are renewed, and so is this one if the error passes
                    self._tell(key, order, f"{type(e).__name__}: {one_line(str(e), 300)}")
            time.sleep(_LOOK)

    def _renew(self, key: Key, order: Order, issuer: Issuer) -> None:
        """Send a node what it lacks."""
        state = self._states().get(key)
        if key[0] not in self._connections.links or state is None or state.serial != order.serial:
            return
        if state.phase in ("ended", "there"):
            return
        newest = issuer.newest()
        self._tell(issuer, order, issuer.trouble)
        now = time.monotonic()
        if newest is None or state.credentials >= newest.number or now - self._sent.get(key, -math.inf) < _AGAIN:
            return
        self._sent[key] = now
        self._send(key[0], order.new_values(newest.values, newest.number))

    def _tell(self, of: Issuer | Key, order: Order, trouble: str) -> None:
        """Tell of trouble once; "" for none."""
        if trouble != self._troubles.get(of, ""):
            self._troubles[of] = trouble
            if trouble:
                self._life.notice(f"the credentials of {order.url} cannot be renewed: {trouble}")
