"""A call under way, and a node as the dispatch sees it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from skypool.futures import CallFuture, Items, Place, Returned
from skypool.link import Link
from skypool.wire import TOGETHER, Buffer, Kind, seal

_AHEAD_SECONDS = 0.02
_AHEAD_MOST = 1024
_TOGETHER_SECONDS = 0.002
_TOGETHER_MOST = 128
_TOGETHER_BYTES = 32 << 10
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
        node: the rank it must run on, None for any.
        outlet: where its end goes, and its items.
        feeds: iterators among its arguments.
        together: how many such calls at most travel in one frame, None for as many as are quick.
        retries: how many more times it may run after a loss.
        retry_on: exceptions of its own after which it runs again, too.
        at: the rank it was sent to.
    """

    code: Code
    payload: Sequence[Buffer]
    extra: str
    outlet: CallFuture[Any] | Items[Any] | Place[Any]
    node: int | None = None
    retries: int = 0
    retry_on: tuple[type[BaseException], ...] = ()
    grace: float = _GRACE
    feeds: Sequence[Iterator[Any]] = ()
    together: int | None = None
    id: int = 0
    at: int = -1
    attempt: int = 1
    stopped: bool = False
    ended: bool = False

    @property
    def name(self) -> str:
        return self.code.name

    def finish(self, end: BaseException | Returned) -> None:
        """Hand the end to whoever waits."""
        self.ended = True
        self.outlet.finish(end)

    def is_like(self, other: Ticket) -> bool:
        """Whether another call, if it is small, may travel in the same frame."""
        return self.code.key == other.code.key and self.extra == other.extra and other.is_small

    @property
    def is_small(self) -> bool:
        """Whether it may travel with others."""
        payload = self.payload
        return (
            len(payload) == 1
            and len(payload[0]) <= _TOGETHER_BYTES // 4
            and not self.feeds
            and not isinstance(self.outlet, Items)
        )


@dataclass(slots=True, eq=False)
class Desk:
    """A node as the dispatch sees it.

    Attributes:
        underway: calls sent there that have not ended; pinned: calls that must run there and wait.
        seconds: how long its calls take, lately; paces: how long those of each function take, by its key.
        ahead: how many calls it gets beyond one for each slot; frame_fulls: how many calls of each function travel
            together.
        functions, objects: keys it has.
        resumed: whether everything was told again since the link broke.
        to_ack: outcomes to acknowledge with the next frames.
    """

    rank: int
    slots: int
    link: Link
    underway: dict[int, Ticket] = field(default_factory=dict)
    pinned: deque[Ticket] = field(default_factory=deque)
    seconds: float | None = None
    ahead: int = 0
    paces: dict[str, float] = field(default_factory=dict)
    frame_fulls: dict[str, int] = field(default_factory=dict)
    functions: set[str] = field(default_factory=set)
    objects: set[str] = field(default_factory=set)
    to_ack: list[int] = field(default_factory=list)
    output_seen: int = 0
    recalling: bool = False
    resumed: bool = True

    @property
    def is_up(self) -> bool:
        """Whether calls can be sent: the link is there, and what the last one lost was told again."""
        return self.resumed and self.link.is_up

    def room(self, together: int | None = None) -> int:
        """How many more calls to send: one for each slot, or as many as are to travel together; and a few ahead while
        calls are short."""
        return self.slots * (together or 1) + self.ahead - len(self.underway)

    def learn(self, key: str, seconds: float) -> None:
        """A call of a function, or several on average, took so long there. A slow one counts at once."""
        self.seconds = seconds if self.seconds is None else 0.8 * self.seconds + 0.2 * seconds
        self.ahead = min(_AHEAD_MOST, int(self.slots * _AHEAD_SECONDS / max(self.seconds, 1e-5)))
        pace = self.paces[key] = max(seconds, 0.8 * self.paces.get(key, seconds) + 0.2 * seconds)
        self.frame_fulls[key] = max(1, min(_TOGETHER_MOST, int(_TOGETHER_SECONDS / max(pace, 1e-6))))

    def frame_full(self, ticket: Ticket) -> int:
        """How many calls like this one may travel in one frame: what a slot runs in a moment, unless it says itself."""
        if not ticket.is_small:
            return 1
        return min(ticket.together, TOGETHER) if ticket.together else self.frame_fulls.get(ticket.code.key, 1)

    def waits(self, waiting: int, first: Ticket) -> bool:
        """Whether calls that wait had better wait until they fill a frame, or until one ends: there is enough to do."""
        if len(self.underway) < 2 * self.slots:
            return False
        ready = min(waiting, self.room(first.together))
        return ready < self.frame_full(first) and (first.together is None or ready < waiting)

    def frames(self, tickets: Sequence[Ticket]) -> Iterator[list[Ticket]]:
        """These calls in their order, those together that may travel so; never all for one slot while others idle."""
        fair = -(-(len(self.underway) + len(tickets)) // (2 * self.slots))
        group: list[Ticket] = []
        size = most = 0
        for ticket in tickets:
            if len(group) < most and size < _TOGETHER_BYTES and group[0].is_like(ticket):
                group.append(ticket)
                size += len(ticket.payload[0])
                continue
            if group:
                yield group
            group, most = [ticket], self.frame_full(ticket)
            if ticket.together is None:
                most = min(most, fair)
            size = len(ticket.payload[0]) if most > 1 else 0
        if group:
            yield group


def frame_of(group: Sequence[Ticket]) -> bytes:
    """The frame of small calls that travel together."""
    ids, lens = [ticket.id for ticket in group], [len(ticket.payload[0]) for ticket in group]
    head = f'{{"ids":{ids},"fn":"{group[0].code.key}","lens":{lens}{group[0].extra}}}'
    return seal(Kind.CALLS, head.encode(), sum(lens)) + b"".join(ticket.payload[0] for ticket in group)
