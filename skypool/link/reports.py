"""`NodeReports`: turns the output and the status reports of nodes into events.

Each piece of output becomes an event once, in order, and without control sequences that would change the terminal.
"""

from __future__ import annotations

import codecs
import threading
from collections import Counter
from collections.abc import Callable, Sequence

from skypool import events
from skypool.errors import protocol_violation
from skypool.link.agent_messages import Pong, Printed
from skypool.text import printable, unfinished
from skypool.wire.frames import Buffer

_ACK = 256 << 10
"""Bytes of output after which the client acknowledges the output at once, before the next status report."""
_MOST_SOURCES = 4096
"""The most streams of output of one node: two for each slot that prints."""


class NodeReports:
    """A converter of the output and the status reports of one pool's nodes into events.

    The methods are called in the thread that read the message: the thread of the pool's event loop, or a thread that
    waits for the result of a call. When a connection was replaced, two threads may call them for the same node.

    Args:
        pool: the name of the pool, for the events.
        emit: called with each event.
        acknowledge: called as (node, number) to tell the node that its output has arrived up to the piece with that
            number.
        is_stranger: takes a node's number and returns True if the node is not trusted. The output of such a node is
            shown without colours.
        service_of: takes the numbers of a node and of a call, and returns the name of the service that the call is; ""
            for other calls.
        function_of: takes the numbers of a node and of a call, and returns the name of the call's function; "" if it is
            not known.
        counted: takes a status as the node reported it, and returns it with the client's own counts of calls. A node
            also counts parts of calls, and calls of skypool's own. Default: the node's counts stay.

    Attributes:
        statuses: the last status report of each node, by the node's number.
    """

    def __init__(
        self,
        pool: str,
        emit: Callable[[events.Event], None],
        acknowledge: Callable[[int, int], None],
        is_stranger: Callable[[int], bool],
        service_of: Callable[[int, int], str] = lambda node, call: "",
        function_of: Callable[[int, int], str] = lambda node, call: "",
        counted: Callable[[events.NodeStatus], events.NodeStatus] = lambda status: status,
    ) -> None:
        self._pool = pool
        self._emit = emit
        self._acknowledge = acknowledge
        self._is_stranger = is_stranger
        self._service_of = service_of
        self._function_of = function_of
        self._counted = counted
        self.statuses: dict[int, events.NodeStatus] = {}
        self._heard: dict[int, int] = {}
        self._unread: dict[int, int] = {}
        self._decoders: dict[tuple[int, int, int], codecs.IncrementalDecoder] = {}
        self._halves: dict[tuple[int, int, int], str] = {}
        self._sources: Counter[int] = Counter()
        self._lock = threading.Lock()  # guards the four dicts above

    def printed(self, node: int, said: Printed, pieces: Sequence[Buffer]) -> None:
        """Emit an `Output` event for pieces of output. `said` is the header of the last of these pieces.

        When more than 256 KiB have come since this method last acknowledged output to the node, acknowledge all output
        so far. The text of the event may be empty if a character or colour sequence is not complete yet. Pieces that
        have come before are ignored: nodes send pieces again after a reconnection.
        """
        with self._lock:
            new = said.seq - self._heard.get(node, 0)
            if new <= 0:
                return
            data = b"".join(pieces[-new:])
            self._heard[node] = said.seq
            unread = self._unread.get(node, 0) + len(data)
            self._unread[node] = 0 if unread > _ACK else unread
            text = self._shown(node, said, data)
        if unread > _ACK:
            self._acknowledge(node, said.seq)
        output = events.Output(
            pool=self._pool,
            node=node,
            slot=said.slot,
            call=said.id,
            stream=said.fd,
            text=text,
            rank=said.rank,
            label=said.label,
            service=self._service_of(node, said.id),
            function=self._function_of(node, said.id),
        )
        self._emit(output)

    def reported(self, node: int, said: Pong) -> None:
        """Acknowledge all output that has come from a node, then emit a `NodeStatus` event for its status report."""
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
        status = self.statuses[node] = self._counted(status)
        self._emit(status)

    def _shown(self, node: int, said: Printed, data: Buffer) -> str:
        """Return a piece of output as text, without control sequences that would change a terminal, except colours."""
        source = (node, said.slot, said.fd)
        decoder = self._decoders.get(source)
        if decoder is None:
            self._sources[node] += 1
            if self._sources[node] > _MOST_SOURCES:
                raise protocol_violation(f"the node sent output of more than {_MOST_SOURCES // 2} slots")
            decoder = self._decoders[source] = codecs.getincrementaldecoder("utf-8")("replace")
        text = self._halves.pop(source, "") + decoder.decode(data)
        if self._is_stranger(node):
            return printable(text)
        # the first part of a split colour sequence is shown with the next piece of the same source
        if "\x1b" in text and (waits := unfinished(text)):
            self._halves[source] = text[-waits:]
            text = text[:-waits]
        return printable(text, colours=True)
