"""Queue of one node on the client: the calls sent there, its free slots, and the frames that calls become."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skypool.calls.futures import Items
from skypool.calls.pending import SMALL, PendingCall
from skypool.errors import ProtocolError
from skypool.link.connection import Link
from skypool.wire.frames import INLINE, TOGETHER, Buffer, Kind, encode, frame, pad, seal

_AHEAD_SECONDS = 0.02
"""Seconds of work that a slot has waiting on its node: more than a message there and back takes on most networks."""
_AHEAD_MOST = 1024
"""Calls sent ahead of those that run, at most. What is sent must come back when the node is lost."""
_TOGETHER_SECONDS = 0.002
"""Seconds of work in one frame: a slot gets its next frame before long, and slots stay evenly loaded."""
_TOGETHER_MOST = 128
"""Calls in one frame, unless `chunksize` says how many."""
_TOGETHER_BYTES = 4 * SMALL
"""Bytes of arguments after which a frame is full."""
_CALL = int(Kind.CALL)
"""The kind as a plain integer, which costs less in each frame."""
_MOST_STRAYS = 10_000
"""Frames about calls that a node does not run, after which it is given up."""


@dataclass(slots=True, eq=False)
class Lane:
    """The slots of one kind on a node, and the calls for them.

    Attributes:
        on_cpu: whether these are the CPU slots beside those with devices.
        takes: the kinds of waiting calls that run here, as values of `Options.on_cpu`. A node with one kind of
            slot takes both.
        underway: calls sent there that have not ended.
        pinned: calls that must run there and wait.
        shared: waiting calls that may run there or on some other nodes, whose lanes have the same queues.
        seconds: how long its calls take, lately; paces: how long those of each function take, by its key.
        recalling: whether it was asked for calls back and has not answered.
    """

    slots: int
    takes: tuple[bool, ...] = (False, True)
    on_cpu: bool = False
    underway: dict[int, PendingCall] = field(default_factory=dict)
    pinned: deque[PendingCall] = field(default_factory=deque)
    shared: list[deque[PendingCall]] = field(default_factory=list)
    seconds: float | None = None
    paces: dict[str, float] = field(default_factory=dict)
    recalling: bool = False

    def room(self, together: int | None = None) -> int:
        """How many more calls to send: one for each slot, or as many as are to travel together; and a few ahead while
        calls are short."""
        seconds = self.seconds
        ahead = 0 if seconds is None else min(_AHEAD_MOST, int(self.slots * _AHEAD_SECONDS / max(seconds, 1e-5)))
        return self.slots * (together or 1) + ahead - len(self.underway)

    @property
    def load(self) -> float:
        """The calls under way for each slot."""
        return len(self.underway) / self.slots

    def learn(self, key: str, seconds: float) -> None:
        """A call of a function, or several on average, took so long there. A slow one counts at once."""
        self.seconds = seconds if self.seconds is None else 0.8 * self.seconds + 0.2 * seconds
        self.paces[key] = max(seconds, 0.8 * self.paces.get(key, seconds) + 0.2 * seconds)

    def frame_full(self, pending: PendingCall) -> int:
        """Return how many calls like this one may share a frame.

        That is as many as a slot runs in a moment, unless the call says how many.
        """
        if not pending.is_small:
            return 1
        if pending.together:
            return min(pending.together, TOGETHER)
        pace = self.paces.get(pending.code.key, _TOGETHER_SECONDS)  # one nobody knows yet travels alone
        return max(1, min(_TOGETHER_MOST, int(_TOGETHER_SECONDS / max(pace, 1e-6))))

    def waits(self, waiting: int, first: PendingCall) -> bool:
        """Return True if waiting calls should wait until they fill a frame, or until a call ends.

        They only do so while the node has enough to do.
        """
        if len(self.underway) < 2 * self.slots:
            return False
        ready = min(waiting, self.room(first.together))
        return ready < self.frame_full(first) and (first.together is None or ready < waiting)

    def frames(self, pending_calls: Sequence[PendingCall]) -> Iterator[list[PendingCall]]:
        """These calls in their order, those together that may travel so; never all for one slot while others idle."""
        fair = -(-(len(self.underway) + len(pending_calls)) // (2 * self.slots))
        group: list[PendingCall] = []
        size = most = 0
        for pending in pending_calls:
            if len(group) < most and size < _TOGETHER_BYTES and group[0].is_like(pending):
                group.append(pending)
                size += len(pending.payload[0])
                continue
            if group:
                yield group
            group = [pending]
            most = self.frame_full(pending)
            if pending.together is None:
                most = min(most, fair)
            size = len(pending.payload[0]) if most > 1 else 0
        if group:
            yield group


def lanes_of(slots: int, cpu_slots: int) -> tuple[Lane, ...]:
    """Return the lanes of a node with so many slots, and so many CPU slots beside them; 0 for none."""
    if not cpu_slots:
        return (Lane(slots),)
    return Lane(slots, takes=(False,)), Lane(cpu_slots, takes=(True,), on_cpu=True)


@dataclass(slots=True, eq=False)
class NodeQueue:
    """The queue of one node: the calls sent there, and what the node has of functions and objects.

    Attributes:
        lanes: its kinds of slots: those that calls run on unless they ask for no device, and CPU slots beside these.
        functions, objects: keys it has; theirs: of objects that a former client gave it.
        resumed: whether everything was told again since the link broke.
        leaving: whether the provider takes it back: it ends what it runs and gets no more.
        address: where the other nodes may reach it, "" where nobody knows.
        asked_back: calls that it may give back, because it was asked to.
        strays: frames that came by this connection about calls that it does not run.
        to_ack: outcomes to acknowledge with the next frames; holds_memory: one of them is large, and the node keeps
            it until it is told.
    """

    node: int
    lanes: tuple[Lane, ...]
    link: Link
    functions: set[str] = field(default_factory=set)
    objects: set[str] = field(default_factory=set)
    theirs: frozenset[str] = frozenset()
    to_ack: list[int] = field(default_factory=list)
    holds_memory: bool = False
    output_seen: int = 0
    asked_back: int = 0
    strays: int = 0
    resumed: bool = True
    leaving: bool = False
    address: str = ""

    @property
    def is_up(self) -> bool:
        """Whether calls can be sent: it stays, the link is there, and what the last one lost was told again."""
        return self.resumed and not self.leaving and self.link.is_up

    def lane(self, pending: PendingCall) -> Lane:
        """Return the slots that a call runs on."""
        return self.lanes[-1 if pending.options.on_cpu else 0]

    @property
    def underway(self) -> list[PendingCall]:
        """The calls sent there that have not ended."""
        return [pending for lane in self.lanes for pending in lane.underway.values()]

    @property
    def pinned(self) -> list[PendingCall]:
        """The calls that must run there and wait."""
        return [pending for lane in self.lanes for pending in lane.pinned]

    @property
    def is_idle(self) -> bool:
        """Whether no call sent there is left."""
        return not any(lane.underway for lane in self.lanes)

    def has(self, pending: PendingCall) -> bool:
        """Return True if this call was sent there and has not ended."""
        return pending.id in self.lane(pending).underway

    def find(self, id_: int) -> PendingCall | None:
        """Return a call sent there that has not ended."""
        pending = self.lanes[0].underway.get(id_)
        return pending if pending is not None or len(self.lanes) == 1 else self.lanes[1].underway.get(id_)

    def take(self, id_: int) -> PendingCall | None:
        """Return a call sent there that has ended or comes back, and forget it."""
        pending = self.find(id_)
        if pending is not None:
            del self.lane(pending).underway[id_]
        return pending

    # --- what is sent there ----------------------------------------------------------------------------------

    def send(self, pending_calls: Sequence[PendingCall]) -> None:
        """Send it these calls for slots of one kind, in one write, with what it needs for them."""
        if not pending_calls:
            return
        out: list[Buffer] = self.acks()
        lane = self.lane(pending_calls[0])
        for group in lane.frames(pending_calls) if len(pending_calls) > 1 else [pending_calls]:
            first = group[0]
            for pending in group:
                pending.at = self.node
                lane.underway[pending.id] = pending
            self._give_function(first, out)
            if len(group) > 1:
                out.append(_frame_of(group))
            else:
                self._send_one(first, out)
        if out:
            self.link.send(out)

    def _send_one(self, pending: PendingCall, out: list[Buffer]) -> None:
        padded, total = pad(pending.payload)
        head = _members_of(f'"id":{pending.id}', [len(b) for b in pending.payload], pending)
        if total <= INLINE:
            out.append(seal(_CALL, f"{{{head}}}".encode(), total))
            out += padded
        else:
            self.link.send(out)
            out.clear()
            large = seal(_CALL, f'{{{head},"blob":{total}}}'.encode())
            self.link.send_large(pending.id, pending.payload, [large])

    def tell_again(self, pending: PendingCall) -> None:
        """The link is back, and it knows this call: what it may have missed of it."""
        out: list[Buffer] = []
        if pending.code.buffers:  # not a call of a former client
            self._give_function(pending, out)
        if pending.stopped:
            self.cancel(pending)
        elif isinstance(pending.outlet, Items) and pending.outlet.taken:
            out += frame(Kind.CREDIT, {"id": pending.id, "seq": pending.outlet.taken})
        if out:
            self.link.send(out)

    def _give_function(self, pending: PendingCall, out: list[Buffer]) -> None:
        """Send it the function of a call, unless it has it already."""
        if pending.code.key not in self.functions:
            self.functions.add(pending.code.key)
            self._give(Kind.FUNCTION, pending.code.key, pending.code.buffers, out, name=pending.name)

    def give_object(self, key: str, buffers: Sequence[Buffer]) -> None:
        """Send it a value of `put`, unless it has it already."""
        if key not in self.objects and self.is_up:
            self.objects.add(key)
            out: list[Buffer] = []
            self._give(Kind.OBJECT, key, buffers, out)
            self.link.send(out)

    def _give(self, kind: Kind, key: str, buffers: Sequence[Buffer], out: list[Buffer], **more: Any) -> None:
        """A function or an object; a large one is announced, and follows."""
        header = {"key": key, "lens": [len(b) for b in buffers], **more}
        padded, total = pad(buffers)
        if total <= INLINE // 2:
            out += [encode(kind, header, total), *padded]
            return
        out += frame(kind, {"key": key, "coming": True, **more})
        self.link.send(out)
        out.clear()
        self.link.send_large(key, buffers, [encode(kind, {**header, "blob": total})])

    def drop_object(self, key: str) -> None:
        """Let it forget a value of `put`, if it has it."""
        if key in self.objects:
            self.objects.discard(key)
            self.link.send(frame(Kind.DROP, {"key": key}))

    def send_item(self, call: int, header: Mapping[str, object], buffers: Sequence[Buffer]) -> None:
        """Send it an item of an iterator argument of a call."""
        padded, total = pad(buffers)
        header = {**header, "id": call, "lens": [len(b) for b in buffers]}
        if total <= INLINE:
            self.link.send([encode(Kind.ITEM, header, total), *padded])
        else:
            key = f"{call}/{header['arg']}/{header['n']}"
            self.link.send_large(key, buffers, [encode(Kind.ITEM, {**header, "blob": total, "key": key})])

    def cancel(self, pending: PendingCall) -> None:
        """Have it stop a call, whose arguments may still be on their way."""
        said = frame(Kind.CANCEL, {"id": pending.id, "grace": pending.options.grace})
        if sum(map(len, pending.payload)) > INLINE:
            self.link.send_large(pending.id, (), said)  # behind them
        else:
            self.link.send(said)

    def recall_all(self) -> None:
        """If it leaves, ask for every call back that it has not begun."""
        for lane in self.lanes:
            if self.leaving and lane.underway:
                self.recall(lane, len(lane.underway))

    def recall(self, lane: Lane, count: int) -> None:
        """Ask for so many calls back that it has not begun."""
        self.asked_back += count
        self.link.send(frame(Kind.RECALL, {"n": count, "cpu": lane.on_cpu}))

    def gave_back(self, count: int, on_cpu: bool) -> None:
        """It gave so many calls of one kind back.

        Raises:
            ProtocolError: nobody had asked for so many.
        """
        self.lanes[-1 if on_cpu else 0].recalling = False
        self.asked_back -= count
        if self.asked_back < 0:
            raise ProtocolError("it gives back calls that nobody asked for")

    def stray(self) -> None:
        """A frame came about a call that it does not run: a few do, when a call has just ended or been given up.

        Raises:
            ProtocolError: these are far too many.
        """
        self.strays += 1
        if self.strays > _MOST_STRAYS:
            raise ProtocolError("it goes on about calls that it does not run")

    def acks(self, least: int = 32) -> list[Buffer]:
        """The acknowledgement of what came from it, if it is of so many calls at least, or of a large result."""
        if len(self.to_ack) < (min(least, 1) if self.holds_memory else least):
            return []
        acks = self.to_ack
        self.to_ack = []
        self.holds_memory = False
        return [encode(Kind.ACK, {"calls": acks, "output": self.output_seen})]


def _frame_of(group: Sequence[PendingCall]) -> bytes:
    """Return the frame of small calls that travel together."""
    ids = [pending.id for pending in group]
    lens = [len(pending.payload[0]) for pending in group]
    head = _members_of(f'"ids":{ids}', lens, group[0])
    return seal(Kind.CALLS, f"{{{head}}}".encode(), sum(lens)) + b"".join(pending.payload[0] for pending in group)


def _members_of(ids: str, lens: Sequence[int], pending: PendingCall) -> str:
    """Return the JSON members that begin the header of a CALL or CALLS frame.

    Only numbers and a key of hexadecimal digits are written by hand; a serializer writes the options, once for all
    calls that have them. With a serializer for the whole header a call that travels alone costs 1.1 µs more in the
    client, where `Dispatch` takes 11.8 µs for it, there and back (Python 3.11, 2026-11).

    Args:
        ids: the member that names the calls.
        lens: the lengths of their buffers.
        pending: one of the calls.
    """
    header = pending.header
    return f'{ids},"fn":"{pending.code.key}","lens":{lens}{"," if header else ""}{header}'
