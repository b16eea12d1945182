"""A call under way, and a node as the dispatch sees it."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator, Sequence
from concurrent.futures import InvalidStateError
from dataclasses import dataclass, field
from typing import Any

from skypool.futures import CallFuture, Items, Returned
from skypool.link import Link
from skypool.wire import Buffer

_AHEAD_SECONDS = 0.02
_AHEAD_MOST = 256
_GRACE = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class Code:
    """A function as it travels: once to each node. `manifest` names the user's modules it may need."""

    key: str
    name: str
    buffers: tuple[Buffer, ...]


@dataclass(slots=True, eq=False)
class Ticket:
    """A call under way, matched by its id alone.

    Attributes:
        payload: its pickled arguments; extra: what its CALL frame says beside, as JSON that begins with a comma.
        node: the rank it must run on, None for any; is_part: it is one node's part of a call that all of them got.
        outlet: where its end goes, and its items.
        feeds: iterators among its arguments.
        retries: how many more times it may run after a loss.
        retry_on: exceptions of its own after which it runs again, too.
        at: the rank it was sent to.
    """

    code: Code
    payload: list[Buffer]
    extra: str
    outlet: CallFuture[Any] | Items[Any]
    node: int | None = None
    retries: int = 0
    retry_on: tuple[type[BaseException], ...] = ()
    grace: float = _GRACE
    feeds: Sequence[Iterator[Any]] = ()
    is_part: bool = False
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
        """Hand the end to whoever waits; nothing if it was cancelled meanwhile."""
        self.ended = True
        if isinstance(self.outlet, Items):
            self.outlet.finish(end)
            return
        try:
            if isinstance(end, Returned):
                self.outlet.set_result(end)
            else:
                self.outlet.set_exception(end)
        except InvalidStateError:
            return  # cancelled a moment ago: nobody waits any more


@dataclass(slots=True, eq=False)
class Desk:
    """A node as the dispatch sees it.

    Attributes:
        underway: calls sent there that have not ended; pinned: calls that must run there and wait.
        seconds: how long its calls take, lately.
        functions, objects: keys it has.
        resumed: whether everything was told again since the link broke.
        leaving: whether the provider takes it back: it ends what it runs and gets no more.
        to_ack: outcomes to acknowledge with the next frames.
    """

    rank: int
    slots: int
    link: Link
    underway: dict[int, Ticket] = field(default_factory=dict)
    pinned: deque[Ticket] = field(default_factory=deque)
    seconds: float | None = None
    functions: set[str] = field(default_factory=set)
    objects: set[str] = field(default_factory=set)
    to_ack: list[int] = field(default_factory=list)
    output_seen: int = 0
    recalling: bool = False
    resumed: bool = True
    leaving: bool = False

    @property
    def is_up(self) -> bool:
        """Whether calls can be sent: it stays, the link is there, and what the last one lost was told again."""
        return self.resumed and not self.leaving and self.link.is_up

    @property
    def room(self) -> int:
        """How many more calls to send: one for each slot, and a few ahead while calls are short."""
        ahead = 0
        if self.seconds is not None:
            ahead = min(_AHEAD_MOST, int(self.slots * _AHEAD_SECONDS / max(self.seconds, 1e-5)))
        return self.slots + ahead - len(self.underway)
