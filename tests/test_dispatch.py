"""Which call goes to which node, and what becomes of it: against links that only write down what is sent."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import pytest

from skypool.calls import node_queue, placement
from skypool.calls.call_events import CallEvents
from skypool.calls.dispatch import Dispatch
from skypool.calls.futures import CallFuture, Items, ResultCell
from skypool.calls.options import Options
from skypool.calls.pending_calls import Code, PendingCall, UserCall
from skypool.errors import (
    ConnectionLost,
    NodeInterrupted,
    PoolClosed,
    SkypoolError,
    UsageError,
    WorkerDied,
    taken_back,
)
from skypool.link.agent_messages import ItemWanted, Outcome, Outcomes, Recalled, Welcome, Yielded
from skypool.link.inbox import Arrival
from skypool.link.link import Link
from skypool.trust.reader import DataReader
from skypool.wire import codec, exceptions
from skypool.wire import frames as wire
from skypool.wire.frames import INLINE, Buffer, Kind
from tests.conftest import eventually

CODE = Code("c0de", "train", (b"function", b"{}"))
OTHER = Code("0ther", "other", (b"another", b"{}"))
ASKED = {"timeout", "retries", "retry_on", "grace"}
"""What `Office.send` takes for a call's options; anything else is for the pending call."""


class Paper:
    """A link that writes down what it is given. While it is down it drops it, as a link does."""

    def __init__(self) -> None:
        self.is_up = True
        self.connection = 1
        self.reader: DataReader | None = None
        self.written = bytearray()
        self.writes = 0
        self.large: list[int | str] = []
        self.driven = 0

    def send(self, buffers: Sequence[Buffer]) -> None:
        if self.is_up and buffers:
            self.writes += 1
            self.written += b"".join(bytes(each) for each in buffers)

    def reply(self, buffers: Sequence[Buffer]) -> None:
        self.send(buffers)

    def send_large(self, key: int | str, buffers: Sequence[Buffer], then: Sequence[Buffer]) -> None:
        if self.is_up:
            self.large.append(key)
            self.send(then)

    def drive(self, awaited: object) -> None:
        self.driven += 1

    def read(self) -> list[tuple[Kind, dict[str, Any]]]:
        """The frames written since the last time."""
        frames, used = wire.scan(memoryview(bytes(self.written)))
        assert used == len(self.written)
        self.written.clear()
        return [(f.kind, f.header) for f in frames]

    def told(self, kind: Kind) -> list[dict[str, Any]]:
        """The headers of the frames of one kind written since the last time; the others are forgotten."""
        return [header for each, header in self.read() if each is kind]

    @property
    def calls(self) -> list[int]:
        """The calls written since the last time, alone or together."""
        told = [header for kind, header in self.read() if kind in (Kind.CALL, Kind.CALLS)]
        return [id_ for header in told for id_ in header.get("ids", [header.get("id")])]


class Told(CallEvents):
    """It keeps what it is to tell."""

    def __init__(self, failed: list[tuple[PendingCall, BaseException]], retried: list[Any]) -> None:
        super().__init__("p", lambda _: None)
        self._failed = failed
        self._retried = retried

    def failed(self, pending: PendingCall, error: BaseException, node: int) -> None:
        self._failed.append((pending, error))

    def retried(self, pending: PendingCall, error: BaseException, node: int, attempt: int) -> None:
        self._retried.append((pending, error))


class Office:
    """A dispatch with nodes on paper."""

    def __init__(self, *slots: int) -> None:
        self.failed: list[tuple[PendingCall, BaseException]] = []
        self.retried: list[tuple[PendingCall, BaseException]] = []
        self.fed: list[tuple[PendingCall, int, int]] = []
        self.drained: list[int] = []
        self.dispatch = Dispatch(
            "p", Told(self.failed, self.retried), lambda *told: self.fed.append(told), self.drained.append
        )
        self.links: dict[int, Paper] = {}
        self.waiting: deque[PendingCall] = deque()
        for node, count in enumerate(slots):
            self.join(node, count)

    def join(self, node: int, slots: int = 1, cpu_slots: int = 0) -> Paper:
        self.links[node] = Paper()
        welcome = Welcome(slots, cpu_slots=cpu_slots)
        self.dispatch.add(node, welcome, cast(Link, self.links[node]))
        return self.links[node]

    def send(self, **options: Any) -> PendingCall:
        outlet = options.pop("outlet", None) or CallFuture[Any]("train")
        payload = options.pop("payload", None) or codec.dumps(((), {}))
        asked = Options(**{name: options.pop(name) for name in ASKED & options.keys()})
        pending = PendingCall(options.pop("code", CODE), payload, outlet, asked, **options)
        self.dispatch.submit(pending)
        return pending

    def send_many(self, count: int, **options: Any) -> list[PendingCall]:
        return [self.send(**options) for _ in range(count)]

    def end(self, *pending_calls: PendingCall, value: object = None, seconds: float = 1.0) -> None:
        """The outcomes of these calls arrive, in one read for each node."""
        by_rank: dict[int, list[Arrival]] = {}
        for pending in pending_calls:
            said = Outcome(pending.id, True, seconds)
            by_rank.setdefault(pending.at, []).append(Arrival(said, codec.dumps(value)))
        for node, arrivals in by_rank.items():
            self.dispatch.arrived(node, arrivals)

    def fail(self, pending: PendingCall, error: BaseException) -> None:
        self.dispatch.arrived(pending.at, [Arrival(Outcome(pending.id, False, 1.0), exceptions.dump_error(error))])

    def quick(self, node: int, seconds: float = 0.0015) -> None:
        """Teach a node that calls are short, so that some are sent ahead; if they are very short, together."""
        pending = self.send(node=node)
        self.end(pending, seconds=seconds)
        self.links[node].read()


def future(pending: PendingCall) -> CallFuture[Any]:
    assert isinstance(pending.outlet, CallFuture)
    return pending.outlet


def error_of(pending: PendingCall) -> BaseException | None:
    return future(pending).exception(timeout=0)


# --- which node ----------------------------------------------------------------------------------------------


def test_a_call_goes_to_a_node_and_its_value_comes_back() -> None:
    office = Office(1)
    pending = office.send(timeout=3)
    frames = office.links[0].read()
    assert [kind for kind, _ in frames] == [Kind.FUNCTION, Kind.CALL]
    assert frames[1][1] == {"id": pending.id, "fn": "c0de", "lens": [len(pending.payload[0])], "timeout": 3}
    office.end(pending, value="done")
    assert future(pending).result(timeout=0) == "done"
    assert office.dispatch.progress.done == 1
    assert office.dispatch.unfinished == 0


def test_calls_go_to_the_node_with_the_most_room() -> None:
    office = Office(1, 3)
    pending_calls = office.send_many(4)
    assert sorted(pending.at for pending in pending_calls) == [0, 1, 1, 1]
    office.end(pending_calls[-1])
    assert office.send().at == pending_calls[-1].at


def test_what_finds_no_room_waits_and_goes_in_order() -> None:
    office = Office(1)
    pending_calls = office.send_many(4)
    assert office.links[0].calls == [pending_calls[0].id]
    assert office.dispatch.pressed
    for ended, begun in itertools.pairwise(pending_calls):
        office.end(ended)
        assert office.links[0].calls == [begun.id]
    assert not office.dispatch.pressed


def test_calls_wait_for_the_first_node_to_join() -> None:
    office = Office()
    pending_calls = office.send_many(3)
    assert office.join(0, slots=2).calls == [pending_calls[0].id, pending_calls[1].id]
    assert office.join(1).calls == [pending_calls[2].id]


def test_a_function_travels_once_to_each_node() -> None:
    office = Office(3, 3)
    office.send_many(4)
    office.send_many(2, code=OTHER)
    for link in office.links.values():
        assert [header["key"] for header in link.told(Kind.FUNCTION)] == ["c0de", "0ther"]


def test_a_pinned_call_goes_to_its_node_alone_and_before_others_that_wait() -> None:
    office = Office(1, 1)
    first = office.send_many(2)
    waiting, pinned = office.send(), office.send(node=1)
    office.links[1].read()
    office.end(first[1])
    assert office.links[1].calls == [pinned.id]
    office.end(first[0])
    assert waiting.at == 0


def test_a_pinned_call_does_not_wait_behind_a_queue_for_another_node() -> None:
    office = Office(1, 1)
    office.send_many(2, node=0)
    assert office.send(node=1).at == 1


def test_a_call_for_some_nodes_goes_to_the_one_of_them_with_the_most_room() -> None:
    office = Office(5, 1, 2)
    assert [each.at for each in office.send_many(3, node=(1, 2))] == [1, 2, 2]


def test_calls_for_some_nodes_wait_for_these_and_go_in_order() -> None:
    office = Office(5, 1, 1)
    running = office.send_many(2, node=(1, 2))
    waiting = office.send_many(3, node=(1, 2))
    assert [each.at for each in waiting] == [-1, -1, -1]
    assert office.dispatch.unfinished == 5
    assert not office.dispatch.pressed  # more nodes would not help
    office.end(running[1])
    assert (waiting[0].at, waiting[1].at) == (running[1].at, -1)
    office.end(running[0], waiting[0])
    assert {waiting[1].at, waiting[2].at} == {1, 2}
    assert office.links[0].calls == []


def test_calls_for_some_nodes_outlive_one_of_them_and_fail_with_the_last() -> None:
    office = Office(1, 1, 1)
    running = office.send_many(2, node=(0, 1))
    again = next(each for each in running if each.at == 0)
    waiting = office.send(node=(0, 1))
    office.dispatch.lose(0, LOST)
    assert isinstance(error_of(again), ConnectionLost)
    assert not future(waiting).done()
    office.dispatch.lose(1, ConnectionLost("node 1 fell silent", 1))
    error = error_of(waiting)
    assert isinstance(error, ConnectionLost)
    assert str(error) == "train was lost with node 1: node 1 fell silent"
    assert office.links[2].calls == []
    with pytest.raises(UsageError, match=r"has no node 0, 1; its nodes are \[2\]"):
        office.send(node=(0, 1))


def test_a_call_for_some_nodes_runs_again_on_another_of_them() -> None:
    office = Office(1, 1, 1)
    pending = office.send(node=(0, 1), retries=1)
    at = pending.at
    office.dispatch.lose(at, LOST)
    assert pending.at == 1 - at


def test_a_node_that_leaves_gives_its_calls_to_the_others_that_they_are_for() -> None:
    office = Office(1, 1, 1)
    running = office.send_many(2, node=(0, 1))
    waiting = office.send(node=(0, 1))
    office.dispatch.drain(0)
    office.end(running[1])
    assert waiting.at == 1
    last = office.send(node=(0, 1))
    office.dispatch.drain(1)
    assert isinstance(error_of(last), NodeInterrupted)
    assert isinstance(error_of(office.send(node=(0, 1))), NodeInterrupted)


def lines_of(work: Callable[[], object]) -> int:
    """Return how many lines of Python a function executes, with those of all that it calls."""
    count = 0

    def trace(*_: object) -> Any:
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def one_after_the_other(office: Office) -> None:
    for _ in range(50):
        office.end(office.send())


def on_some_nodes(office: Office) -> None:
    every = tuple(sorted(office.links))
    for _ in range(50):
        office.end(office.send(node=every))


def while_others_wait(office: Office) -> None:
    for _ in range(50):
        office.end(office.waiting.popleft())
        office.waiting.append(office.send())


def failing_and_again(office: Office) -> None:
    for _ in range(50):
        pending = office.send(retries=1, retry_on=(KeyError,))
        office.fail(pending, KeyError("again"))
        office.end(pending)


def bound_to_a_node(office: Office) -> None:
    for _ in range(50):
        office.end(office.send(node=1))


def short_ones(office: Office) -> None:
    for _ in range(20):
        office.end(*office.send_many(10), seconds=1e-5)


@pytest.mark.parametrize(
    "work", [one_after_the_other, on_some_nodes, while_others_wait, failing_and_again, bound_to_a_node, short_ones]
)
def test_the_cost_of_a_call_does_not_grow_with_the_number_of_nodes(work: Callable[[Office], None]) -> None:
    counts = []
    for nodes in (16, 400):
        office = Office(*[1] * nodes)
        if work is while_others_wait:
            office.waiting.extend(office.send_many(nodes + 10))
        elif work is short_ones:
            office.end(*office.send_many(nodes), seconds=1e-5)
        work(office)  # whatever is done for the first time only
        counts.append(lines_of(lambda office=office: work(office)))  # type: ignore[misc]
    assert counts[1] < 1.3 * counts[0], counts


def test_the_cost_of_a_nodes_report_does_not_grow_with_the_number_of_nodes() -> None:
    counts = []
    for nodes in (4, 100):
        office = Office(*[1] * nodes)
        for _ in range(5):
            whole, payload = UserCall("train", nodes), codec.dumps(((), {}))
            office.dispatch.submit_together(
                [
                    PendingCall(CODE, payload, CallFuture[Any]("train"), Options(), node=node, part_of=whole)
                    for node in range(nodes)
                ]
            )
        counts.append(lines_of(lambda office=office: office.dispatch.tally.on(1)))  # type: ignore[misc]
        there = office.dispatch.tally.on(1)
        assert (there.running, there.waiting, there.done) == (1, 4, 0)
        assert (office.dispatch.tally.now().running, office.dispatch.tally.now().waiting) == (1, 4)
    assert counts[1] < 1.3 * counts[0], counts


def ended(office: Office) -> tuple[int, int, int]:
    counts = office.dispatch.tally.counts()
    return counts.ok, counts.failed, counts.cancelled


@pytest.mark.parametrize("bound", [0, (0, 1), None])
def test_calls_that_are_cancelled_while_they_wait_are_counted_once_and_wait_no_more(bound: Any) -> None:
    office = Office(1, 1)
    office.send_many(2)
    for pending in office.send_many(3, node=bound)[1:]:
        future(pending).cancel()
    assert office.dispatch.tally.now().waiting == 1
    assert office.dispatch.tally.on(0).waiting == (1 if bound == 0 else 0)
    assert office.dispatch.pressed is (bound is None)
    for node in (0, 1):
        office.dispatch.drain(node)
    assert ended(office) == (0, 0 if bound is None else 1, 2)
    office.dispatch.close(LOST)
    assert sum(ended(office)) == 5


def test_a_pool_does_not_grow_for_calls_that_were_cancelled() -> None:
    office = Office(1)
    office.send()
    for pending in office.send_many(3):
        future(pending).cancel()
    assert not office.dispatch.pressed


def test_parts_that_were_sent_ahead_wait() -> None:
    office = Office(1, 1)
    for node in (0, 1):
        office.quick(node)
    payload = codec.dumps(((), {}))
    for _ in range(5):
        whole = UserCall("train", 2)
        office.dispatch.submit_together(
            [
                PendingCall(CODE, payload, CallFuture[Any]("train"), Options(), node=node, part_of=whole)
                for node in (0, 1)
            ]
        )
    now = office.dispatch.tally.now()
    assert len(office.dispatch.node_queues[0].underway) > 1
    assert (now.running, now.waiting) == (1, 4)
    assert [(each.running, each.waiting, each.slots[0].busy) for each in now.nodes.values()] == [(1, 4, 1)] * 2


def test_a_map_begins_on_all_idle_nodes_although_its_first_calls_end_at_once() -> None:
    office = Office(1, 1, 1)
    busy = office.send(node=1)
    first, *rest = [PendingCall(CODE, codec.dumps(((), {})), ResultCell(), Options()) for _ in range(5)]
    assert office.dispatch.placement.idle_lanes(first) == 2
    office.dispatch.submit(first, rest[0], spread=True)
    office.end(first)
    office.dispatch.submit(*rest[1:])
    assert [each.at for each in (first, *rest)] == [0, 2, 0, -1, -1]
    assert busy.at == 1


def test_an_idle_node_takes_calls_over_only_if_the_busy_one_does_not_end_them_sooner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (node_queue, placement):
        monkeypatch.setattr(module, "STUCK", 1.0)  # this thread may be held up for longer than 5 ms
    office = Office(1, 1)
    for node in (0, 1):
        office.quick(node, 1e-5)
    busy = office.send(node=1)
    ahead = [PendingCall(CODE, codec.dumps(((), {})), ResultCell(), Options()) for _ in range(100)]
    office.dispatch.submit(*ahead)
    assert {each.at for each in ahead} == {0}
    office.links[0].read()
    office.end(busy, seconds=1e-5)
    assert not office.links[0].told(Kind.RECALL), "100 calls of 10 µs have ended before some of them could move"
    eventually(lambda: office.links[0].told(Kind.RECALL), 30, "a call that runs for longer than those before it")


def test_an_idle_node_gets_calls_back_that_it_may_run() -> None:
    office = Office(1, 1, 1)
    for node in (0, 1, 2):
        office.quick(node)
    first, second = office.send(node=0), office.send(node=1)
    ahead = office.send_many(8, node=(0, 1))
    mine = [each for each in ahead if each.at == 1]
    office.links[0].read()
    office.end(second, *mine)
    told = office.links[0].told(Kind.RECALL)
    assert told
    given = [each.id for each in ahead if each.at == 0][-told[0]["n"] :]
    office.dispatch.arrived(0, [Arrival(Recalled(given))])
    assert {each.at for each in ahead if each.id in given} == {1}
    assert office.links[2].calls == []
    assert first.at == 0


def test_the_queue_for_some_nodes_is_forgotten_when_it_is_empty() -> None:
    office = Office(1, 1, 1)
    for nodes in ((0, 1), (0, 2), (1, 2)):
        office.end(office.send(node=nodes))
    for node in range(3, 100):
        office.join(node)
        office.end(office.send(node=(0, node)))
    assert len(office.dispatch._waiting.queues) < 20


def test_a_call_for_some_nodes_that_wait_fails_when_the_pool_ends() -> None:
    office = Office(1)
    office.send(node=(0,))
    waiting = office.send(node=(0,))
    office.dispatch.close(PoolClosed("the end"))
    assert isinstance(error_of(waiting), PoolClosed)
    assert office.dispatch.unfinished == 0


def test_a_call_pinned_to_a_node_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match=r"has no node 7; its nodes are \[0, 1\]"):
        Office(1, 1).send(node=7)


def test_short_calls_are_sent_ahead_and_long_ones_are_not() -> None:
    office = Office(1)
    office.quick(0)
    office.send_many(10)
    assert len(office.links[0].calls) == 10
    slow = Office(1)
    slow.end(slow.send(), seconds=1.0)
    slow.links[0].read()
    slow.send_many(20)
    assert len(slow.links[0].calls) == 1


def test_many_calls_that_waited_share_one_write() -> None:
    office = Office(1)
    office.quick(0, seconds=0.0001)
    office.links[0].is_up = False
    pending_calls = office.send_many(50)
    office.links[0].is_up = True
    office.links[0].writes = 0
    office.dispatch.resume(0, Welcome(1, functions=("c0de",)))
    assert office.links[0].calls == [pending.id for pending in pending_calls]
    assert office.links[0].writes == 1


def test_nothing_is_sent_while_the_link_is_down() -> None:
    office = Office(1, 1)
    office.links[0].is_up = False
    pending_calls = office.send_many(3)
    assert [pending.at for pending in pending_calls] == [1, -1, -1]


def test_ids_are_never_the_same() -> None:
    office = Office()
    assert len({pending.id for pending in office.send_many(1000)}) == 1000


# --- calls that travel together ------------------------------------------------------------------------------


def test_very_short_calls_travel_together_and_each_ends_by_itself() -> None:
    office = Office(1)
    office.quick(0, seconds=0.0001)
    pending_calls = office.send_many(22)
    frames = office.links[0].read()
    assert [kind for kind, _ in frames] == [Kind.CALL, Kind.CALL, Kind.CALLS, Kind.CALLS]
    assert [id_ for _, h in frames[2:] for id_ in h["ids"]] == [pending.id for pending in pending_calls[2:]]
    ends = [wire.end_of(t.id, True, 0.0001, codec.dumps(n)[0]) for n, t in enumerate(pending_calls)]
    ends[5] = wire.end_of(pending_calls[5].id, False, 0.0001, exceptions.dump_error(ValueError("five"))[0])
    office.dispatch.arrived(0, [Arrival(Outcomes([*wire.ends_in(b"".join(ends[3:]))]))])
    assert [future(t).result(0) for t in (*pending_calls[3:5], *pending_calls[6:])] == [3, 4, *range(6, 22)]
    assert isinstance(error_of(pending_calls[5]), ValueError)
    assert not any(future(t).done() for t in pending_calls[:3])
    assert office.dispatch.progress.done == 1 + 19


def test_ends_that_come_again_change_nothing_and_are_acknowledged_again() -> None:
    office = Office(1)
    pending = office.send()
    frame = [Arrival(Outcomes([(pending.id, True, 0.1, bytes(codec.dumps("once")[0]))]))]
    office.dispatch.arrived(0, frame)
    office.dispatch.arrived(0, frame)
    office.dispatch.roster.acknowledge(0)
    assert office.links[0].told(Kind.ACK)[-1]["calls"] == [pending.id, pending.id]
    assert future(pending).result(0) == "once"
    assert office.dispatch.progress.done == 1


@pytest.mark.parametrize(
    "alone",
    [{"code": OTHER}, {"timeout": 3}, {"payload": [bytes(9_000)]}, {"payload": [b"x", b"y"]}],
    ids=["another function", "other options", "large", "in buffers"],
)
def test_only_small_calls_of_one_function_with_the_same_options_travel_together(alone: dict[str, Any]) -> None:
    office = Office(1)
    office.quick(0, seconds=0.0001)
    office.links[0].is_up = False
    office.send_many(8)
    other = office.send(**alone)
    office.send_many(8)
    office.links[0].is_up = True
    office.dispatch.resume(
        0,
        Welcome(
            1,
            functions=(
                "c0de",
                "0ther",
            ),
        ),
    )
    frames = office.links[0].read()
    assert [kind for kind, _ in frames] == [Kind.CALLS, Kind.CALL, Kind.CALLS]
    assert frames[1][1]["id"] == other.id


def test_calls_that_waited_are_spread_over_slots_that_are_free() -> None:
    office = Office(4)
    office.quick(0, seconds=0.00001)
    office.links[0].is_up = False
    office.send_many(16)
    office.links[0].is_up = True
    office.dispatch.resume(0, Welcome(1, functions=("c0de",)))
    assert [len(h["ids"]) for h in office.links[0].told(Kind.CALLS)] == [2] * 8


def test_one_slow_call_is_enough_for_the_next_ones_to_travel_alone() -> None:
    office = Office(1)
    office.quick(0, seconds=0.00001)
    office.quick(0, seconds=0.5)
    office.send_many(8)
    assert {kind for kind, _ in office.links[0].read()} == {Kind.CALL}


def test_calls_of_a_chunk_travel_together_however_long_they_take() -> None:
    office = Office(2)
    pending_calls = [
        PendingCall(CODE, codec.dumps(((), {})), CallFuture[Any]("train"), Options(), chunk=5) for _ in range(13)
    ]
    office.dispatch.submit(*pending_calls[:5])
    office.dispatch.submit(*pending_calls[5:10])
    office.dispatch.submit(*pending_calls[10:])
    sent = office.links[0].told(Kind.CALLS)
    assert [h["ids"] for h in sent] == [[t.id for t in pending_calls[:5]], [t.id for t in pending_calls[5:10]]]
    office.end(*pending_calls[:5], seconds=3.0)
    assert [h["ids"] for h in office.links[0].told(Kind.CALLS)] == [[t.id for t in pending_calls[10:]]]


def test_calls_that_travelled_together_are_told_again_when_the_link_is_back() -> None:
    office = Office(1)
    office.quick(0, seconds=0.00001)
    pending_calls = office.send_many(300)
    office.links[0].read()
    sent = [t for t in pending_calls if t.at == 0]
    office.dispatch.pause(0)
    office.dispatch.resume(0, Welcome(1, calls=tuple(t.id for t in sent[:7]), functions=("c0de",)))
    assert office.links[0].calls == [t.id for t in sent[7:]]


def test_a_call_whose_arguments_are_on_their_way_is_cancelled_behind_them() -> None:
    office = Office(2)
    large, small = office.send(payload=[bytes(INLINE + 1)]), office.send()
    office.links[0].large.clear()
    assert future(small).cancel()
    assert office.links[0].large == []
    assert future(large).cancel()
    assert office.links[0].large == [large.id]
    assert [h["id"] for h in office.links[0].told(Kind.CANCEL)] == [small.id, large.id]


# --- giving back ---------------------------------------------------------------------------------------------


def test_a_node_with_nothing_to_do_gets_calls_that_another_has_not_begun() -> None:
    office = Office(1)
    office.quick(0)
    pending_calls = office.send_many(10)
    office.links[0].read()
    office.join(1)
    (recall,) = office.links[0].told(Kind.RECALL)
    assert 1 <= recall["n"] <= 9
    back = [pending.id for pending in pending_calls[-recall["n"] :]]
    office.dispatch.arrived(0, [Arrival(Recalled(back))])
    (moved,) = office.links[1].calls
    assert moved in back
    assert next(pending for pending in pending_calls if pending.id == moved).at == 1


def test_calls_are_asked_back_once_at_a_time() -> None:
    office = Office(1)
    office.quick(0)
    office.send_many(10)
    office.links[0].read()
    office.join(1)
    office.join(2)
    assert len(office.links[0].told(Kind.RECALL)) == 1


def test_a_call_that_was_given_back_after_it_was_cancelled_goes_nowhere() -> None:
    office = Office(1)
    office.quick(0)
    pending_calls = office.send_many(5)
    office.join(1)
    future(pending_calls[4]).cancel()
    office.dispatch.arrived(0, [Arrival(Recalled([pending_calls[4].id]))])
    assert office.links[1].calls == []
    assert office.dispatch.unfinished == 4
    assert pending_calls[4].ended


# --- losing a node -------------------------------------------------------------------------------------------

LOST = ConnectionLost("node 0 fell silent", 0)


def test_a_call_on_a_lost_node_fails_and_is_not_run_again_unasked() -> None:
    office = Office(1, 1)
    pending = office.send(node=None)
    assert pending.at == 0
    office.dispatch.lose(0, LOST)
    error = error_of(pending)
    assert isinstance(error, ConnectionLost)
    assert error.node == 0
    assert error.__cause__ is LOST
    assert "train was lost with node 0" in str(error)
    assert office.failed == [(pending, error)]
    assert office.links[1].calls == []


def test_a_call_that_may_runs_again_elsewhere_as_often_as_it_was_asked() -> None:
    office = Office(1, 1)
    pending = office.send(retries=1)
    office.dispatch.lose(0, LOST)
    assert pending.at == 1
    assert office.links[1].calls == [pending.id]
    assert [each for each, _ in office.retried] == [pending]
    assert pending.attempt == 2
    office.dispatch.lose(1, LOST)
    assert isinstance(error_of(pending), ConnectionLost)
    assert len(office.retried) == 1


def test_calls_of_a_slice_that_goes_run_again_outside_of_it_and_once() -> None:
    office = Office(1, 1, 1)
    first, second = office.send_many(2, retries=1)
    assert (first.at, second.at) == (0, 1)
    bound = office.send(node=1)
    office.dispatch.lose(0, LOST, (1,))
    assert {first.attempt, second.attempt} == {2}
    assert len(office.retried) == 2
    assert office.links[2].calls in ([first.id], [second.id])
    error = error_of(bound)
    assert isinstance(error, ConnectionLost)
    assert error.node == 1
    assert str(error) == (
        "train was lost with node 1: node 1 was ended because node 0 of the same slice (machines rented together) "
        "was lost: node 0 fell silent"
    )


def test_a_call_that_runs_again_goes_before_those_that_wait() -> None:
    office = Office(1, 1)
    again, busy = office.send(retries=1), office.send()
    office.send_many(3)
    office.dispatch.lose(0, LOST)
    office.links[1].read()
    office.end(busy)
    assert office.links[1].calls == [again.id]


def test_calls_that_wait_for_any_node_outlive_a_lost_one() -> None:
    office = Office(1)
    office.send()
    waiting = office.send()
    office.dispatch.lose(0, LOST)
    assert not future(waiting).done()
    assert office.join(1).calls == [waiting.id]


def test_calls_pinned_to_a_lost_node_fail_even_if_they_may_run_again() -> None:
    office = Office(1, 1)
    running, waiting = office.send_many(2, node=0, retries=5)
    office.dispatch.lose(0, LOST)
    assert isinstance(error_of(running), ConnectionLost)
    assert isinstance(error_of(waiting), ConnectionLost)
    assert office.retried == []


def test_a_stream_runs_again_only_before_its_first_item() -> None:
    office = Office(1, 1)
    items: Items[str] = Items("count")
    fresh = office.send(retries=2, outlet=items)
    office.dispatch.lose(0, LOST)
    assert fresh.at == 1
    items.feed(1, True, codec.dumps("one"))
    office.dispatch.lose(1, LOST)
    assert next(items) == "one"
    with pytest.raises(ConnectionLost):
        next(items)
    assert len(office.retried) == 1


def test_a_call_that_reads_an_iterator_is_not_run_again() -> None:
    office = Office(1, 1)
    pending = office.send(retries=2, feeds=[iter([1])])
    office.dispatch.lose(0, LOST)
    assert isinstance(error_of(pending), ConnectionLost)


def test_a_call_whose_worker_died_runs_again_if_it_may() -> None:
    office = Office(1)
    once, never = office.send(retries=1), office.send()
    office.fail(once, WorkerDied("train", signal=9))
    assert not future(once).done()
    assert len(office.retried) == 1
    office.fail(once, WorkerDied("train", signal=9))
    assert isinstance(error_of(once), WorkerDied)
    office.fail(never, WorkerDied("train", signal=9))
    assert isinstance(error_of(never), WorkerDied)


def test_an_exception_of_its_own_runs_again_only_if_named() -> None:
    office = Office(2)
    named, other = office.send_many(2, retries=1, retry_on=(KeyError,))
    office.fail(named, KeyError("k"))
    office.fail(other, ValueError("v"))
    assert isinstance(error_of(other), ValueError)
    assert not future(named).done()
    office.end(named, value=3)
    assert future(named).result(timeout=0) == 3


def test_a_node_that_is_not_there_can_be_lost_twice() -> None:
    office = Office(1)
    office.dispatch.lose(0, LOST)
    office.dispatch.lose(0, LOST)
    office.dispatch.arrived(0, [Arrival(Outcome(1, True, 1.0))])


# --- a node that its provider takes back ---------------------------------------------------------------------

TAKEN = taken_back(0)


def recalled(office: Office, *pending_calls: PendingCall) -> None:
    """The agent of node 0 gives these calls back, which it had not begun."""
    office.dispatch.arrived(0, [Arrival(Recalled([pending.id for pending in pending_calls]))])


def test_a_leaving_node_gets_no_new_calls_and_gives_back_those_it_has_not_begun() -> None:
    office = Office(1)
    office.quick(0)
    running, *ahead = office.send_many(4)
    office.links[0].read()
    office.dispatch.drain(0)
    office.dispatch.drain(0)
    assert office.links[0].told(Kind.RECALL) == [{"n": 4, "cpu": False}]
    late = office.send()
    recalled(office, *reversed(ahead))
    assert office.links[0].calls == []
    assert office.dispatch.roster.nodes() == {}
    assert office.join(1, slots=9).calls == [pending.id for pending in (*ahead, late)]
    assert office.dispatch.roster.nodes() == {1: ""}
    assert office.drained == []
    office.end(running)
    assert set(office.drained) == {0}
    assert (office.retried, office.failed) == ([], [])


def test_a_leaving_node_without_calls_is_drained_at_once() -> None:
    office = Office(1)
    office.dispatch.drain(0)
    assert office.drained == [0]


def test_calls_that_run_when_a_machine_is_taken_back_run_again_unasked_and_keep_their_retries() -> None:
    office = Office(1, 1)
    pending = office.send(retries=1)
    office.dispatch.drain(0)
    office.dispatch.lose(0, TAKEN)
    assert office.links[1].calls == [pending.id]
    assert [(t, str(why)) for t, why in office.retried] == [(pending, "the provider took node 0 back")]
    assert (pending.retries, pending.attempt) == (1, 2)


def test_a_worker_killed_by_the_shutdown_of_a_leaving_machine_went_with_it() -> None:
    office = Office(2, 1)
    shut, crashed = office.send(node=None), office.send(node=0)
    assert shut.at == 0
    office.dispatch.drain(0)
    office.fail(shut, WorkerDied("train", signal=9))
    office.fail(crashed, WorkerDied("train", signal=11))
    assert shut.at == 1
    assert isinstance(error_of(crashed), WorkerDied)


def test_calls_bound_to_a_leaving_node_fail_with_the_reason() -> None:
    office = Office(1, 1)
    running, waiting = office.send_many(2, node=0, retries=5)
    office.dispatch.drain(0)
    assert str(error_of(waiting)) == (
        "train was lost: the provider took node 0 back, and the call was sent to node 0 only"
    )
    late = office.send(node=0)
    assert isinstance(error_of(late), NodeInterrupted)
    assert not future(running).done()
    office.dispatch.lose(0, TAKEN)
    assert isinstance(error_of(running), NodeInterrupted)
    assert [pending for pending, _ in office.failed] == [waiting, late, running]


@pytest.mark.parametrize("retries", [0, 3])
def test_a_call_bound_to_a_node_fails_with_it_however_many_retries_it_has(retries: int) -> None:
    """Such as a part of a broadcast: on another node its rank and the addresses it was given would be wrong."""
    office = Office(2, 2)
    part = office.send(node=0, retries=retries)
    office.dispatch.lose(0, ConnectionLost("gone", 0))
    assert isinstance(error_of(part), ConnectionLost)
    assert part.at == 0


def test_a_stream_and_a_reader_of_an_iterator_say_why_they_end_with_a_leaving_node() -> None:
    office = Office(3, 3)
    items: Items[str] = Items("count")
    fresh: Items[str] = Items("count")
    begun, other = office.send(node=0, outlet=items), office.send(node=0, outlet=fresh)
    begun.node = other.node = None
    read = office.send(node=0, feeds=[iter([1])])
    read.node = None
    items.feed(2, True, codec.dumps("one"))
    office.dispatch.lose(0, TAKEN)
    assert next(items) == "one"
    with pytest.raises(NodeInterrupted, match="the call had yielded 2 items, which cannot be taken back"):
        next(items)
    assert other.at == 1
    assert "the call may have read items of an iterator argument, which cannot be read again" in str(error_of(read))


def test_a_leaving_node_whose_link_is_back_is_asked_again_for_what_it_has_not_begun() -> None:
    office = Office(2, 2)
    known, unknown = office.send(), office.send(node=0)
    unknown.node = None
    assert known.at == unknown.at == 0
    office.dispatch.drain(0)
    office.links[0].read()
    office.dispatch.resume(0, Welcome(1, calls=(known.id,), functions=("c0de",)))
    assert office.links[0].read() == [(Kind.RECALL, {"n": 1, "cpu": False})]
    assert unknown.at == 1


# --- a link that comes back ----------------------------------------------------------------------------------


def test_a_link_that_is_back_is_told_only_what_its_agent_does_not_know() -> None:
    office = Office(3)
    known, unknown, also = office.send_many(3)
    office.links[0].read()
    office.dispatch.resume(
        0,
        Welcome(
            1,
            calls=(
                known.id,
                also.id,
            ),
            functions=("c0de",),
        ),
    )
    frames = office.links[0].read()
    assert [kind for kind, _ in frames] == [Kind.CALL]
    assert frames[0][1]["id"] == unknown.id


def test_an_agent_that_lost_a_function_gets_it_again() -> None:
    office = Office(1)
    office.send()
    office.links[0].read()
    office.dispatch.resume(0, Welcome(1))
    assert [kind for kind, _ in office.links[0].read()] == [Kind.FUNCTION, Kind.CALL]


def test_a_call_cancelled_while_the_link_was_down_is_cancelled_when_it_is_back() -> None:
    office = Office(2)
    known, unknown = office.send_many(2)
    office.links[0].is_up = False
    future(known).cancel()
    future(unknown).cancel()
    office.links[0].is_up = True
    office.links[0].read()
    office.dispatch.resume(0, Welcome(1, calls=(known.id,), functions=("c0de",)))
    assert office.links[0].read() == [(Kind.CANCEL, {"id": known.id, "grace": 5.0})]
    assert office.dispatch.unfinished == 1


def test_a_stream_that_was_cancelled_while_the_link_was_down_ends() -> None:
    office = Office(1)
    items: Items[int] = Items("count")
    office.send(outlet=items)
    items.close()
    office.dispatch.resume(0, Welcome(1))
    assert office.dispatch.unfinished == 0


def test_credit_is_told_again_to_a_stream_that_goes_on() -> None:
    office = Office(1)
    items: Items[int] = Items("count")
    pending = office.send(outlet=items)
    items.feed(4, True, codec.dumps(1))
    items.feed(5, True, codec.dumps(2))
    assert [next(items), next(items)] == [1, 2]
    assert office.links[0].told(Kind.CREDIT) == [{"id": pending.id, "seq": 4}]
    office.dispatch.resume(0, Welcome(1, calls=(pending.id,), functions=("c0de",)))
    assert office.links[0].told(Kind.CREDIT) == [{"id": pending.id, "seq": 4}]


def test_the_link_can_ask_which_calls_are_awaited() -> None:
    office = Office(2)
    pending_calls = office.send_many(2)
    assert list(office.dispatch.roster.awaited(0)) == [pending.id for pending in pending_calls]


# --- cancelling and closing ----------------------------------------------------------------------------------


def test_cancelling_a_call_under_way_tells_its_node_how_long_it_may_take() -> None:
    office = Office(1)
    pending = office.send(grace=2.5)
    office.links[0].read()
    future(pending).cancel()
    office.dispatch.stop(pending)
    assert office.links[0].read() == [(Kind.CANCEL, {"id": pending.id, "grace": 2.5})]


def test_a_call_cancelled_while_it_waits_is_never_sent() -> None:
    office = Office(1)
    running, cancelled, waiting = office.send_many(3)
    future(cancelled).cancel()
    office.links[0].read()
    office.end(running)
    assert office.links[0].calls == [waiting.id]


def test_who_is_told_of_a_failure_and_stops_the_call_at_once_does_not_hide_it() -> None:
    """As `call >> pool` does whose thread wakes before the one that reads has told the pool."""
    office = Office(1)
    pending = office.send()
    future(pending).add_done_callback(lambda _: office.dispatch.stop(pending))
    office.fail(pending, ValueError("too large"))
    assert [(told, str(error)) for told, error in office.failed] == [(pending, "too large")]
    assert not pending.stopped


def test_a_call_that_is_cancelled_between_its_outcome_and_its_end_ends_once() -> None:
    office = Office(2)
    ends: list[object] = []
    second: CallFuture[Any] = CallFuture("second", ends.append)
    first: CallFuture[Any] = CallFuture("first", lambda _: [second.cancel()].clear())
    office.end(office.send(outlet=first), office.send(outlet=second))
    assert len(ends) == 1
    assert second.cancelled()


def test_an_outcome_that_comes_after_a_cancel_does_no_harm() -> None:
    office = Office(1)
    pending = office.send()
    future(pending).cancel()
    office.end(pending, value=1)
    assert future(pending).cancelled()
    assert office.dispatch.unfinished == 0
    assert office.failed == []


def test_closing_fails_what_runs_what_waits_and_what_is_pinned() -> None:
    office = Office(1, 1)
    pending_calls = [*office.send_many(4), *office.send_many(2, node=0)]
    items: Items[int] = Items("count")
    office.send(outlet=items)
    cancelled = office.send()
    future(cancelled).cancel()
    error = PoolClosed("it is over")
    office.dispatch.close(error)
    assert [error_of(pending) for pending in pending_calls] == [error] * 6
    with pytest.raises(PoolClosed):
        next(items)
    assert future(cancelled).cancelled()
    assert office.dispatch.unfinished == 0
    office.dispatch.close(PoolClosed("again"))


@pytest.mark.parametrize(
    "send", [lambda o: o.send(), lambda o: o.dispatch.values.put("k", [b"v"])], ids=["call", "put"]
)
def test_a_closed_pool_takes_nothing_and_says_why_it_ended(send: Callable[[Office], object]) -> None:
    office, why = Office(1), SkypoolError("the budget is spent")
    office.dispatch.close(why)
    with pytest.raises(PoolClosed, match="which has ended") as caught:
        send(office)
    assert caught.value.__cause__ is why


# --- what comes back -----------------------------------------------------------------------------------------


def test_outcomes_are_matched_by_id_alone() -> None:
    office = Office(3)
    pending_calls = office.send_many(3)
    for number, pending in reversed(list(enumerate(pending_calls))):
        office.end(pending, value=number)
    assert [future(pending).result(timeout=0) for pending in pending_calls] == [0, 1, 2]


def test_an_outcome_that_comes_again_is_acknowledged_and_nothing_more() -> None:
    office = Office(1)
    pending = office.send()
    office.end(pending, value=1)
    office.end(pending, value=2)
    assert future(pending).result(timeout=0) == 1
    assert office.dispatch.progress.done == 1
    office.links[0].read()
    office.dispatch.roster.acknowledge(0)
    assert office.links[0].told(Kind.ACK) == [{"calls": [pending.id, pending.id], "output": 0}]


def test_outcomes_are_acknowledged_many_at_a_time() -> None:
    office = Office(40)
    pending_calls = office.send_many(40)
    office.links[0].read()
    for pending in pending_calls:
        office.end(pending)
    acks = office.links[0].told(Kind.ACK)
    assert len(acks) == 1
    office.dispatch.roster.acknowledge(0)
    acks += office.links[0].told(Kind.ACK)
    assert [id_ for ack in acks for id_ in ack["calls"]] == [pending.id for pending in pending_calls]
    office.dispatch.roster.acknowledge(0)
    assert office.links[0].read() == []


def test_output_is_acknowledged_once_and_never_backwards() -> None:
    office = Office(1)
    for seen in (5, 5, 3, 9):
        office.dispatch.roster.acknowledge(0, seen)
    assert [ack["output"] for ack in office.links[0].told(Kind.ACK)] == [5, 9]


def test_items_go_to_the_stream_they_belong_to() -> None:
    office = Office(2)
    streams: list[Items[int]] = [Items("a"), Items("b")]
    pending_calls = [office.send(outlet=each) for each in streams]
    for number, pending in enumerate(pending_calls):
        office.dispatch.arrived(0, [Arrival(Yielded(pending.id, 1, single=True), codec.dumps(number))])
    assert [next(each) for each in streams] == [0, 1]


def test_a_worker_that_wants_an_item_is_heard_and_gets_it() -> None:
    office = Office(1)
    pending = office.send(feeds=[iter([1])])
    office.dispatch.arrived(0, [Arrival(ItemWanted(pending.id, 0, 1))])
    assert office.fed == [(pending, 0, 1)]
    office.links[0].read()
    office.dispatch.roster.item(pending, {"arg": 0, "n": 1}, codec.dumps(1))
    (item,) = office.links[0].told(Kind.ITEM)
    assert (item["id"], item["arg"], item["n"]) == (pending.id, 0, 1)
    office.end(pending)
    office.dispatch.roster.item(pending, {"arg": 0, "n": 2}, codec.dumps(1))
    assert office.links[0].told(Kind.ITEM) == []


# --- large values and objects --------------------------------------------------------------------------------


def test_a_large_argument_travels_beforehand_under_the_id_of_its_call() -> None:
    office = Office(1)
    pending = office.send(payload=[b"x" * (INLINE + 1)])
    assert office.links[0].large == [pending.id]
    assert office.links[0].told(Kind.CALL)[0]["blob"] == INLINE + 1


def test_a_large_function_is_announced_before_the_first_call_of_it() -> None:
    office = Office(2)
    code = Code("b16", "big", (b"x" * INLINE, b"{}"))
    office.send(code=code)
    office.send(code=code)
    frames = office.links[0].read()
    assert office.links[0].large == ["b16"]
    assert frames[0] == (Kind.FUNCTION, {"key": "b16", "coming": True, "name": "big"})
    assert [kind for kind, _ in frames].count(Kind.CALL) == 2


def test_an_object_reaches_every_node_once_also_those_that_join_later() -> None:
    office = Office(1, 1)
    office.dispatch.values.put("k1", [b"value"])
    office.dispatch.values.put("k1", [b"value"])
    office.join(2)
    for link in office.links.values():
        assert [header["key"] for header in link.told(Kind.OBJECT)] == ["k1"]
    office.dispatch.resume(0, Welcome(1))
    assert [header["key"] for header in office.links[0].told(Kind.OBJECT)] == ["k1"]


def test_a_dropped_object_is_forgotten_everywhere() -> None:
    office = Office(1)
    office.dispatch.values.put("k1", [b"value"])
    office.links[0].read()
    office.dispatch.values.drop("k1")
    office.dispatch.values.drop("k1")
    assert office.links[0].read() == [(Kind.DROP, {"key": "k1"})]
    assert office.join(1).told(Kind.OBJECT) == []


# --- cost ----------------------------------------------------------------------------------------------------


def prepared(count: int) -> Iterator[PendingCall]:
    payload = codec.dumps(((), {}))
    return iter([PendingCall(CODE, payload, CallFuture[Any]("train"), Options()) for _ in range(count)])


def cost(waiting: int, nodes: int) -> float:
    """Seconds of this thread for 300 calls in and 300 out, while so many wait; the best of five."""
    office = Office(*[1] * nodes)
    running = office.send_many(nodes)
    for pending in prepared(waiting):
        office.dispatch.submit(pending)
    best = float("inf")
    for _ in range(5):
        batch = list(prepared(300))
        began = time.thread_time()
        for pending in batch:
            office.dispatch.submit(pending)
            ended, node = running[0], running[0].at
            office.end(ended)
            running = [office.dispatch.node_queues[node].underway[0]]
        best = min(best, time.thread_time() - began)
        running = [office.dispatch.node_queues[running[0].at].underway[0]]
    return best


@pytest.mark.serial
def test_the_cost_of_a_call_does_not_grow_with_how_many_wait() -> None:
    assert cost(30_000, nodes=1) < 5 * cost(1_000, nodes=1)


@pytest.mark.serial
def test_cancelling_does_not_cost_more_when_many_wait() -> None:
    def cancel_some(waiting: int) -> float:
        office = Office(1)
        pending_calls = office.send_many(waiting)
        best = float("inf")
        for start in range(0, 900, 300):
            began = time.thread_time()
            for pending in pending_calls[-1 - start : -301 - start : -1]:
                future(pending).cancel()
            best = min(best, time.thread_time() - began)
        return best

    assert cancel_some(30_000) < 5 * cancel_some(1_000)


@pytest.mark.serial
def test_a_stranger_that_claims_calls_of_a_former_client_without_end_costs_little() -> None:
    names = dict.fromkeys(range(50_000), "f")
    welcome = Welcome(1, tuple(names), names, quiet=tuple(names), services=tuple(range(20_000)))
    office = Office()
    began = time.process_time()
    for node, reader, most in ((0, DataReader(0), 0), (1, None, 30_000)):
        link = Paper()
        link.reader = reader
        assert len(office.dispatch.inherit(node, welcome, cast(Link, link))) == most
    assert len(office.dispatch.roster.services_on(0)) == 10_000
    assert time.process_time() - began < 5


class Slow(Paper):
    """A link on which it takes a while to stop a call: until readers of other streams have got what they can."""

    def __init__(self) -> None:
        super().__init__()
        self.readers: list[threading.Thread] = []
        self.in_vain = False

    def send(self, buffers: Sequence[Buffer]) -> None:
        super().send(buffers)
        for each in self.readers:
            each.join(10)
            self.in_vain |= each.is_alive()


def test_streams_that_the_pool_closes_all_have_its_error_before_one_of_them_is_stopped() -> None:
    office = Office()
    link = office.links[0] = Slow()
    office.dispatch.add(0, Welcome(2), cast(Link, link))
    streams = [Items[Any]("train") for _ in range(2)]
    for each in streams:
        office.send(outlet=each)
    got: list[BaseException] = []

    def read(items: Items[Any]) -> None:
        with pytest.raises(PoolClosed) as raised:
            next(items)
        got.append(raised.value)

    link.readers = [threading.Thread(target=read, args=(each,), daemon=True) for each in streams]
    for reader in link.readers:
        reader.start()
    closed = office.dispatch.close_streams(PoolClosed("the pool ends"))
    assert not link.in_vain
    assert len(closed) == len(got) == 2
