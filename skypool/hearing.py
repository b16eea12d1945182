"""What the nodes of a pool print and report, as events: in order, once, and harmless to a terminal."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import Any

from skypool import events, trust
from skypool.link import Arrival

_ACK = 256 << 10


class Hearing:
    """Of one pool. In the engine's thread, or in one that waits for a call.

    Args:
        pool: its name; emit: takes the events.
        acknowledge: lets a node forget what it printed up to a number.
        is_stranger: whether what a node says may be shown as plain text only.
    """

    def __init__(
        self,
        pool: str,
        emit: Callable[[events.Event], None],
        acknowledge: Callable[[int, int], None],
        is_stranger: Callable[[int], bool],
    ) -> None:
        self._pool, self._emit, self._acknowledge, self._is_stranger = pool, emit, acknowledge, is_stranger
        self._heard: dict[int, int] = {}
        self._unread: dict[int, int] = {}
        self._decoders: dict[tuple[int, int, int], codecs.IncrementalDecoder] = {}

    def printed(self, rank: int, arrival: Arrival) -> None:
        """A node's calls wrote something; what came before is not told again."""
        h = arrival.header
        if h["seq"] <= self._heard.get(rank, 0):
            return
        self._heard[rank] = h["seq"]
        data = b"".join(arrival.buffers)
        self._unread[rank] = self._unread.get(rank, 0) + len(data)
        if self._unread[rank] > _ACK:
            self._unread[rank] = 0
            self._acknowledge(rank, h["seq"])
        source = (rank, h["slot"], h["fd"])
        decoder = self._decoders.get(source)
        if decoder is None:
            decoder = self._decoders[source] = codecs.getincrementaldecoder("utf-8")("replace")
        text = self._shown(rank, decoder.decode(data))  # a character may arrive in two pieces
        self._emit(events.Output(pool=self._pool, node=rank, slot=h["slot"], call=h["id"], stream=h["fd"], text=text))

    def reported(self, rank: int, h: dict[str, Any]) -> None:
        """A node said how it is."""
        self._acknowledge(rank, self._heard.get(rank, 0))
        status = events.NodeStatus(
            pool=self._pool,
            node=rank,
            busy=int(h["busy"]),
            waiting=int(h["waiting"]),
            done=int(h["done"]),
            running=tuple(self._shown(rank, each) for each in h["running"]),
        )
        self._emit(status)

    def _shown(self, rank: int, text: str) -> str:
        return trust.plain(text) if self._is_stranger(rank) else text
