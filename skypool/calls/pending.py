"""A pending call: what the client keeps for each call from its submission to its end."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from skypool.calls.futures import CallFuture, Items, ResultCell, Returned
from skypool.calls.options import Options
from skypool.wire.frames import Buffer, members

SMALL = 8 << 10
"""Bytes of arguments up to which a call may travel with others."""
World = tuple[int, list[str]]
"""A rank among the nodes that one call is sent to together, and the addresses of all of them."""


@dataclass(frozen=True, slots=True, eq=False)
class Code:
    """A function as it travels: once to each node. `manifest` names the user's modules it may need."""

    key: str
    name: str
    buffers: tuple[Buffer, ...]


@dataclass(slots=True, eq=False)
class PendingCall:
    """A call that was sent or waits to be sent, until it ends.

    Two are equal only if they are the same object.

    Attributes:
        payload: its pickled arguments.
        outlet: where its end goes, and its items.
        options: how it is to run.
        node: the node it must run on, those of which any will do, or None for any: that of its options, or its own
            if it is a part of a broadcast.
        world: where it is a part of a broadcast: its rank among the parts, and the addresses of all their nodes.
        feeds: iterators among its arguments.
        chunk: how many such calls at most travel in one frame, None for as many as are quick.
        retried: how many of the retries that its options allow are used up.
        at: the node it was sent to, -1 while it waits.
        attempt: which of its runs this is, from 1; runs that a spot market took back count, too.
    """

    code: Code
    payload: Sequence[Buffer]
    outlet: CallFuture[Any] | Items[Any] | ResultCell[Any]
    options: Options
    node: int | tuple[int, ...] | None = None
    world: World | None = None
    feeds: Sequence[Iterator[Any]] = ()
    chunk: int | None = None
    id: int = 0
    at: int = -1
    attempt: int = 1
    retried: int = 0
    stopped: bool = False
    ended: bool = False

    @property
    def name(self) -> str:
        """The name of its function."""
        return self.code.name

    @property
    def header(self) -> str:
        """What the header of its CALL frame says beside its id, its function and its lengths; see `frames.members`."""
        options = self.options
        if self.world is None and not isinstance(self.outlet, Items):
            return options.header
        more: dict[str, Any] = {}
        if self.world is not None:
            more["world"] = self.world
            if options.output == "head" and self.world[0]:
                more["output"] = "silent"
        if isinstance(self.outlet, Items):
            more["stream"] = options.window
        return f"{options.header},{members(more)}" if options.header else members(more)

    @property
    def together(self) -> int | None:
        """How many such calls at most travel in one frame, None for as many as are quick."""
        return 1 if self.options.fresh else self.chunk

    @property
    def retries(self) -> int:
        """How many more times it may run after a loss."""
        return self.options.retries - self.retried

    def bound(self, nodes: Container[int], begun: bool) -> str:
        """Return why it cannot run anew on any of these nodes, "" if it can.

        Args:
            begun: whether it may have begun before.
        """
        if isinstance(self.node, tuple):
            if not any(node in nodes for node in self.node):
                return f"it was sent to nodes {', '.join(map(str, self.node))} alone"
        elif self.node is not None and self.node not in nodes:
            return "it was sent to that node alone"
        if begun and isinstance(self.outlet, Items) and self.outlet.seen > 0:
            return f"it had yielded {self.outlet.seen} items, which cannot be taken back"
        if begun and self.feeds:
            return "what it read of an iterator argument cannot be read again"
        return ""

    def finish(self, end: BaseException | Returned) -> None:
        """Hand the end to whoever waits."""
        self.ended = True
        self.outlet.finish(end)

    def is_like(self, other: PendingCall) -> bool:
        """Return True if this call, which is small, may travel in the same frame as another one."""
        is_same = self.options is other.options and self.world is other.world  # as in `map`, and quicker to compare
        return self.code.key == other.code.key and other.is_small and (is_same or self.header == other.header)

    @property
    def is_small(self) -> bool:
        """Whether it may travel with others."""
        payload = self.payload
        return len(payload) == 1 and len(payload[0]) <= SMALL and not self.feeds and not isinstance(self.outlet, Items)
