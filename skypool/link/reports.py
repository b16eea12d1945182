"""Turns what nodes print and report into events: in order, once, and without terminal control sequences."""

from __future__ import annotations

import codecs
from collections.abc import Callable

from skypool import events, trust
from skypool.link.inbound import Pong, Printed
from skypool.wire.frames import Buffer

_ACK = 256 << 10
"""Bytes of output after which a node may forget what it printed, without waiting for the next sign of life."""


class NodeReports:
    """Of one pool. In the engine's thread, or in one that waits for a call.

    Args:
        pool: its name; emit: takes the events.
        acknowledge: lets a node forget what it printed up to a number.
        is_stranger: whether what a node prints may be shown as plain text only; of others, colours are shown.
    """

    def __init__(
        self,
        pool: str,
        emit: Callable[[events.Event], None],
        acknowledge: Callable[[int, int], None],
        is_stranger: Callable[[int], bool],
    ) -> None:
        self._pool = pool
        self._emit = emit
        self._acknowledge = acknowledge
        self._is_stranger = is_stranger
        self._heard: dict[int, int] = {}
        self._unread: dict[int, int] = {}
        self._decoders: dict[tuple[int, int, int], codecs.IncrementalDecoder] = {}
        self._halves: dict[tuple[int, int, int], str] = {}

    def printed(self, node: int, said: Printed, data: Buffer) -> None:
        """A node's calls wrote something; what came before is not told again."""
        if said.seq <= self._heard.get(node, 0):
            return
        self._heard[node] = said.seq
        self._unread[node] = self._unread.get(node, 0) + len(data)
        if self._unread[node] > _ACK:
            self._unread[node] = 0
            self._acknowledge(node, said.seq)
        text = self._shown(node, said, data)
        self._emit(events.Output(pool=self._pool, node=node, slot=said.slot, call=said.id, stream=said.fd, text=text))

    def reported(self, node: int, said: Pong) -> None:
        """A node said how it is."""
        self._acknowledge(node, self._heard.get(node, 0))
        status = events.NodeStatus(
            pool=self._pool,
            node=node,
            busy=said.busy,
            waiting=said.waiting,
            done=said.done,
            running=said.running,
            cpu_busy=said.cpu_busy,
        )
        self._emit(status)

    def _shown(self, node: int, said: Printed, data: Buffer) -> str:
        """Return what was printed, without what would change a terminal.

        A character or a colour may arrive in two pieces: what is not whole waits for the next one.
        """
        source = (node, said.slot, said.fd)
        decoder = self._decoders.get(source)
        if decoder is None:
            decoder = self._decoders[source] = codecs.getincrementaldecoder("utf-8")("replace")
        text = self._halves.pop(source, "") + decoder.decode(data)
        if self._is_stranger(node):
            return trust.printable(text)
        if "\x1b" in text and (waits := trust.unfinished(text)):
            self._halves[source] = text[-waits:]
            text = text[:-waits]
        return trust.printable(text, colours=True)
