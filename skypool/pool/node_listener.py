"""`NodeListener`: passes the messages of one node on: about calls, output, modules and the node itself."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Protocol

from skypool import events
from skypool.calls.dispatch import Dispatch
from skypool.devices.sample import NodeSample
from skypool.errors import ConnectionLost
from skypool.head.states import Status
from skypool.link.agent_messages import Handed, ModuleAsked, Pong, Printed, Saved, Steps, Taken, Welcome
from skypool.link.inbox import Arrival
from skypool.link.reports import NodeReports
from skypool.pool.life import Life
from skypool.wire.frames import Kind, frame
from skypool.wire.save_orders import FolderState

_NOTICED_AGAIN = 0.1
"""Seconds in which at most one notice of a node is passed on: the notice that the provider takes the machine back."""


class NodeEvents(Protocol):
    """A protocol for the engine, which handles what happens to nodes."""

    @property
    def is_due(self) -> bool:
        """True if the pool's budget or lifetime ends it within 2 s. The user is then not told of broken connections."""
        ...

    def on_welcome(self, node: int, welcome: Welcome) -> None:
        """Handle the first message of a new connection to a node."""

    def on_notice(self, node: int, at: float) -> None:
        """Handle the notice that the provider takes a machine back at `at`, in seconds since 1970.

        Any thread may call this.
        """

    def on_lost(self, node: int, error: ConnectionLost) -> None:
        """Handle the loss of a node that its link has given up."""

    def on_samples(self, node: int, samples: Sequence[NodeSample]) -> None:
        """Handle measurements of a node. Any thread may call this."""

    def on_saved(self, node: int, folders: Sequence[FolderState]) -> None:
        """Handle what a node tells of the folders that it saves. Any thread may call this."""

    def on_handed(self, status: Status) -> None:
        """Handle the state of the hand-over of a run to its machine. Any thread may call this."""


class NodeListener:
    """The listener of the link to one node: it passes each message to the object that handles the message."""

    def __init__(
        self,
        node: int,
        dispatch: Dispatch,
        reports: NodeReports,
        life: Life,
        hearer: NodeEvents,
    ) -> None:
        self._node = node
        self._dispatch = dispatch
        self._reports = reports
        self._life = life
        self._hearer = hearer
        self._noticed = -math.inf
        self._told_down = False

    def on_arrivals(self, arrivals: list[Arrival], connection: int) -> None:
        """Pass messages of the node to the objects that handle them, in the order in which they came.

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
            elif isinstance(said, Saved):
                self._hearer.on_saved(self._node, said.folders)
            elif isinstance(said, Handed):
                self._hearer.on_handed(said.status)
            elif isinstance(said, Taken):  # this process was the owner until just now
                if said.handover is not None:
                    self._hearer.on_handed(said.handover)
            elif isinstance(said, Steps):
                if self._dispatch.gangs is not None:
                    self._dispatch.gangs.agreements.heard(self._node, said)
            elif isinstance(said, ModuleAsked):
                lender = self._life.connections.lenders[self._node]
                if said.file:
                    header, data = lender.file(said.name, said.version, said.file)
                else:
                    header, data = lender.find(said.name, said.version, said.has)
                if (link := self._life.connections.links.get(self._node)) is not None:  # else it has just ended
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
            self._hearer.on_notice(self._node, said.interruption)
        self._dispatch.roster.stall(self._node, said.stalled)
        if said.samples:
            self._hearer.on_samples(self._node, said.samples)
        self._reports.reported(self._node, said)

    def on_welcome(self, welcome: Welcome) -> None:
        self._hearer.on_welcome(self._node, welcome)

    def on_down(self, reason: str) -> None:
        self._dispatch.pause(self._node)
        if not self._hearer.is_due:
            self._told_down = True
            self._life.emit(events.LinkDown(pool=self._life.pool, node=self._node, reason=reason))

    def on_up(self, welcome: Welcome) -> None:
        if self._told_down:
            self._told_down = False
            self._life.emit(events.LinkUp(pool=self._life.pool, node=self._node))
        self._dispatch.resume(self._node, welcome)

    def on_lost(self, error: ConnectionLost) -> None:
        self._hearer.on_lost(self._node, error)
