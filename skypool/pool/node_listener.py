"""`NodeListener`: passes the messages of one node on: about calls, output, modules and the node itself."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

from skypool import events
from skypool.calls.dispatch import Dispatch
from skypool.errors import ConnectionLost
from skypool.link.connection import Link
from skypool.link.inbound import ModuleAsked, Pong, Printed, Welcome
from skypool.link.inbox import Arrival
from skypool.link.reports import NodeReports
from skypool.samples.values import NodeSample
from skypool.shipping.user_modules import Lender
from skypool.wire.frames import Kind, frame

_NOTICED_AGAIN = 0.1
"""Seconds in which at most one notice of a node is passed on: the notice that the provider takes the machine back."""


class NodeListener:
    """The listener of the link to one node: it passes each message to the object that handles the message.

    Args:
        lenders: the senders of the user's modules, by the number of the node.
        on_welcome: called as (node, welcome) with the first message of each connection.
        on_notice: called as (node, time) when the provider announces that it takes the machine back at this time, in
            seconds since 1970. The call may come from any thread, like that of `on_samples`.
        on_lost: called as (node, error) when the link has given up the node.
        is_due: returns True if the pool ends as planned about now. The user is then not told that the connection broke.
    """

    def __init__(
        self,
        node: int,
        pool: str,
        dispatch: Dispatch,
        reports: NodeReports,
        links: Mapping[int, Link],
        lenders: Mapping[int, Lender],
        emit: Callable[[events.Event], None],
        on_welcome: Callable[[int, Welcome], None],
        on_notice: Callable[[int, float], None],
        on_lost: Callable[[int, ConnectionLost], None],
        on_samples: Callable[[int, Sequence[NodeSample]], None],
        is_due: Callable[[], bool],
    ) -> None:
        self._node = node
        self._pool = pool
        self._dispatch = dispatch
        self._reports = reports
        self._links = links
        self._lenders = lenders
        self._emit = emit
        self._on_welcome = on_welcome
        self._on_notice = on_notice
        self._on_lost = on_lost
        self._on_samples = on_samples
        self._is_due = is_due
        self._noticed = -math.inf
        self._told_down = False

    def on_arrivals(self, arrivals: list[Arrival], connection: int) -> None:
        """Pass messages of the node, in the order they came, to the objects that handle them.

        This is called in the engine's thread, or in a thread that waits for the result of a call. Messages about calls
        are passed on together, after all others. Requests for the source of a module are answered here. `connection` is
        the number of the connection over which the messages came.
        """
        about_calls = []
        for arrival in arrivals:
            said = arrival.said
            if isinstance(said, Printed):
                self._reports.printed(self._node, said, arrival.buffers)
            elif isinstance(said, Pong):
                self._on_pong(said)
            elif isinstance(said, ModuleAsked):
                lender = self._lenders[self._node]
                if said.file:
                    header, data = lender.file(said.name, said.version, said.file)
                else:
                    header, data = lender.find(said.name, said.version)
                if (link := self._links.get(self._node)) is not None:  # otherwise the node has ended just now
                    link.reply(frame(Kind.MODULE, header, [data]))
            else:
                about_calls.append(arrival)
        if about_calls:
            self._dispatch.arrived(self._node, about_calls, connection)

    def _on_pong(self, said: Pong) -> None:
        """Pass a status report of the node on. If it has a spot notice, call `on_notice` first, at most every 0.1 s."""
        now = time.monotonic()
        if said.interruption is not None and now - self._noticed > _NOTICED_AGAIN:
            self._noticed = now
            self._on_notice(self._node, said.interruption)
        self._dispatch.roster.stall(self._node, said.stalled)
        if said.samples:
            self._on_samples(self._node, said.samples)
        self._reports.reported(self._node, said)

    def on_welcome(self, welcome: Welcome) -> None:
        self._on_welcome(self._node, welcome)

    def on_down(self, reason: str) -> None:
        self._dispatch.pause(self._node)
        if not self._is_due():
            self._told_down = True
            self._emit(events.LinkDown(pool=self._pool, node=self._node, reason=reason))

    def on_up(self, welcome: Welcome) -> None:
        if self._told_down:
            self._told_down = False
            self._emit(events.LinkUp(pool=self._pool, node=self._node))
        self._dispatch.resume(self._node, welcome)

    def on_lost(self, error: ConnectionLost) -> None:
        self._on_lost(self._node, error)
