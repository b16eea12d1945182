"""A pending call: what the client keeps for each call from its submission to its end."""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from skypool.calls.futures import CallFuture, Items, ResultCell, Returned
from skypool.wire.frames import Buffer

SMALL = 8 << 10
"""Bytes of arguments up to which a call may travel with others."""
_GRACE = 5.0
World = tuple[int, list[str]]
"""A rank among the nodes that one call is sent to together, and the addresses of all of them."""


def part_of(world: World, output: str) -> str:
    """What the frame of one node's part of a call says beside, as JSON that begins with a comma."""
    return f',"world":{json.dumps(world)}' + (',"output":"silent"' if output == "head" and world[0] else "")


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
        payload: its pickled arguments; extra: what its CALL frame says beside, as JSON that begins with a comma.
        node: the rank it must run on, None for any. A part of a call to all nodes has one: it knows their addresses.
        outlet: where its end goes, and its items.
        feeds: iterators among its arguments.
        together: how many such calls at most travel in one frame, None for as many as are quick.
        on_cpu: whether it asks for no device, and runs on a CPU slot where its node has such.
        retries: how many more times it may run after a loss.
        retry_on: exceptions of its own after which it runs again, too.
        at: the rank it was sent to.
    """

    code: Code
    payload: Sequence[Buffer]
    extra: str
    outlet: CallFuture[Any] | Items[Any] | ResultCell[Any]
    node: int | None = None
    retries: int = 0
    retry_on: tuple[type[BaseException], ...] = ()
    grace: float = _GRACE
    feeds: Sequence[Iterator[Any]] = ()
    together: int | None = None
    on_cpu: bool = False
    id: int = 0
    at: int = -1
    attempt: int = 1
    stopped: bool = False
    ended: bool = False

    @property
    def name(self) -> str:
        return self.code.name

    def bound(self, nodes: Container[int], begun: bool) -> str:
        """Why it cannot run anew on any of these nodes, "" if it can; `begun` says whether it may have begun before."""
        if self.node is not None and self.node not in nodes:
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
        """Whether another call, if it is small, may travel in the same frame."""
        return self.code.key == other.code.key and self.extra == other.extra and other.is_small

    @property
    def is_small(self) -> bool:
        """Whether it may travel with others."""
        payload = self.payload
        return len(payload) == 1 and len(payload[0]) <= SMALL and not self.feeds and not isinstance(self.outlet, Items)
