"""`Watch`: base class of objects that observe a pool, such as its logs and its history. `Watches` runs those of a pool.

    class Count(Watch):
        name = "the count of events"

        def begin(self, facts):
            self.facts, self.counts = facts, Counter()

        def hear(self, event):
            self.counts[type(event).__name__] += 1

A watch changes nothing. It can be slow, raise or hang, and the pool goes on. So code that decides something about a
pool is a part of the pool, not a watch. docs/watches.md describes how to add a watch.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

from skypool import events
from skypool.errors import UsageError
from skypool.events import node_of
from skypool.pool import watch_closing
from skypool.safety.received_data_limit import WAITING, Quota
from skypool.wire import error_text

if TYPE_CHECKING:
    from skypool.calls.idle_time import Idleness
    from skypool.calls.tally import EndedCall, PoolCounts
    from skypool.link.agent_messages import Welcome
    from skypool.model import Access
    from skypool.offers.ranking import Plan
    from skypool.pool.health import HealthWatch
    from skypool.pool.open_forwards import Forwards
    from skypool.pool.states import Pool
    from skypool.rental.orders import OrderKey
    from skypool.rental.receipt import Receipt
    from skypool.wire.save_orders import FolderState

MOST_WAITING = 16 << 20
"""The approximate bytes of events that may wait for one watch. Further events are dropped and counted."""
_TO_SETTLE = 8.0
"""The most seconds for which a reader waits, unless it says otherwise, until watches have written everything."""
_TO_BEGIN = 8.0
"""The most seconds for which the start of a pool waits for a watch that it must have."""


class PoolFacts(Protocol):
    """A protocol for what a pool shows to its watches. Any thread may use it.

    The keys of dicts are the numbers of nodes.

    Attributes:
        pool: the name of the pool.
        session: the id of this run of the pool in the ledger; "" before the first machine is rented.
        max_usd: the budget in US dollars; None if the pool has none.
        secrets: values, by name, that must not be written anywhere.
        quota: limits the bytes that are kept of each node.
        state: the state of the pool and its nodes.
        welcomes: the first message of each node's agent.
        counts: the numbers of calls that wait, run and have ended.
        idleness: for how long each node was idle.
        plan: the last plan: the ranked offers of providers for this pool; None if there is none.
        attempts: for each offer that could not be rented, its text and the error.
        launches: the number of launches, by their outcome.
        health: the samples and the health of the nodes.
        folders: the state of each folder that a node saves to a bucket, or fills from one, by the numbers of nodes and
            names of folders.
        forwards: makes ports of this computer that lead to nodes.
    """

    @property
    def pool(self) -> str: ...
    @property
    def max_usd(self) -> float | None: ...
    @property
    def quota(self) -> Quota: ...
    @property
    def health(self) -> HealthWatch: ...
    @property
    def forwards(self) -> Forwards: ...
    @property
    def folders(self) -> Mapping[tuple[int, str], FolderState]: ...
    @property
    def session(self) -> str: ...
    @property
    def secrets(self) -> Mapping[str, str]: ...
    @property
    def state(self) -> Pool: ...
    @property
    def welcomes(self) -> Mapping[int, Welcome]: ...
    @property
    def counts(self) -> PoolCounts: ...
    @property
    def idleness(self) -> Mapping[int, Idleness]: ...
    @property
    def plan(self) -> Plan | None: ...
    @property
    def attempts(self) -> Sequence[str]: ...
    @property
    def launches(self) -> Mapping[OrderKey, int]: ...

    def words(self) -> Mapping[int, str]:
        """Return the state of each node as a word, such as "ready"."""
        ...

    def takes_calls(self, node: int) -> bool:
        """Return False for a node that is gone, or not there yet."""
        ...

    def ended_calls(self) -> Sequence[EndedCall]:
        """Return records of calls that have ended. Each is returned once, so only the history may ask."""
        ...

    def receipt(self, *, until_now: bool = False) -> Receipt | None:
        """Return the costs so far; None if they are not known. May block.

        If `until_now` is True, idle time until now is included; otherwise until it was last recorded.
        """
        ...

    def is_stranger(self, node: int) -> bool:
        """Return True for a node that is known not to be trusted."""
        ...

    def way(self, node: int) -> tuple[Access, str]:
        """Return how a node is reached, and the path of Python there, as for `link.reach.local_command`.

        Raises UsageError if there is no such node, and PoolClosed after the pool's end.
        """
        ...

    def listen(self, hear: Callable[[events.Event], None]) -> Callable[[], None]:
        """Call `hear`, which must not block, with each event from now on. Return a function that ends this."""
        ...

    def emit(self, event: events.Event) -> None:
        """Emit an event of the pool. Listeners of the user hear it, too."""
        ...

    def notice(self, text: str) -> None:
        """Emit a message for the user."""
        ...


class Watch:
    """Base class of objects that observe a pool. The methods of each watch run in a thread of its own.

    A method that raises ends the watch: the user is told once, and the pool goes on. There is one exception: if
    `must_begin` is True and `begin` raises UsageError, the pool does not start.

    Attributes:
        name: the name of the watch, as words for the user.
        hears: the classes of events that `hear` gets; () for none. Default: all.
        hears_hidden: True if `hear` also gets output that the user does not want to see.
        gather: seconds for which events are gathered before they are heard together. Default 0.
        every: seconds between two calls of `tick`. Default None: it is called only after events were heard.
        must_begin: True if the pool rents nothing before `begin` has returned.
        closes: the order of closing: watches with smaller numbers are closed before others. Default 0.
    """

    name: ClassVar[str] = "a watch"
    hears: ClassVar[tuple[type[events.Event], ...]] = (events.Event,)
    hears_hidden: ClassVar[bool] = False
    gather: ClassVar[float] = 0.0
    every: ClassVar[float | None] = None
    must_begin: ClassVar[bool] = False
    closes: ClassVar[int] = 0
    _told_failure = ""

    def begin(self, facts: PoolFacts) -> None:
        """Begin to watch a pool."""

    def hear(self, event: events.Event) -> None:
        """Handle an event of the pool. Events that came before `begin` are passed after it."""

    def missed(self, count: int) -> bool:
        """Handle that `count` events were dropped, because too many waited.

        Return True if this watch tells the user of it, and False if the pool must do that.
        """
        return False

    def tick(self) -> None:
        """Do the regular work. This is called after events were heard, and every `every` seconds."""

    def settle(self) -> None:
        """Do the regular work now, because somebody reads what the watch has written. Default: `tick`."""
        self.tick()

    def close(self) -> None:
        """End the work, because the pool has ended. This is called after `hear` was called for all events."""

    def tell_failure(self, facts: PoolFacts, what: str, error: Exception) -> None:
        """Tell the user what has failed, and why. Say nothing if the last failure had the same reason."""
        if str(error) != self._told_failure:
            self._told_failure = str(error)
            facts.notice(f"{what}: {error}")


class Watches:
    """The watches of one pool. Any thread may use this.

    Args:
        watches: the watches of the pool.
        quota: limits the events of an untrusted node that may wait to be heard.
        notice: shows a sentence to the user.
    """

    def __init__(self, watches: Sequence[Watch], quota: Quota, notice: Callable[[str], None]) -> None:
        self._notice = notice
        self._runners = [_Runner(each, quota, notice) for each in watches]

    def hear(self, event: events.Event, *, is_hidden: bool = False) -> None:
        """Pass an event to all watches, without waiting. `is_hidden` is True for output that the user must not see.

        Only watches with `hears_hidden` get such output.
        """
        for each in self._runners:
            if isinstance(event, each.watch.hears) and (each.watch.hears_hidden or not is_hidden):
                each.put(event)

    @property
    def some_needed(self) -> bool:
        """True if there are watches that must begin before the pool rents anything."""
        return any(each.watch.must_begin for each in self._runners)

    def begin_needed(self, facts: PoolFacts) -> None:
        """Start the watches that must begin before the pool rents anything, and wait until they have begun.

        Raises UsageError if one cannot work as the user has asked. The watches that have begun are then closed.
        """
        try:
            for each in self._runners:
                if each.watch.must_begin:
                    each.begin(facts)
                    each.wait_begun(_TO_BEGIN)
        except BaseException:
            self.close(_TO_BEGIN)
            raise

    def begin(self, facts: PoolFacts) -> None:
        """Start all other watches, each in its own thread. Do not wait."""
        for each in self._runners:
            if not each.watch.must_begin:
                each.begin(facts)

    def settle(self, kind: type[Watch] = Watch, within: float = _TO_SETTLE) -> None:
        """Wait at most `within` seconds until each watch of a kind has heard the events so far, and has settled."""
        until = time.monotonic() + within
        for runner, number in [(each, each.ask()) for each in self._runners if isinstance(each.watch, kind)]:
            runner.wait_done(number, max(0.0, until - time.monotonic()))

    def close(self, within: float, others: Sequence[watch_closing.Part] = ()) -> None:
        """Pass the waiting events to all watches, and close the watches. Blocks.

        Watches with the same `closes` are closed at the same time, those with smaller numbers first. The user is told
        of each that fails. One that takes longer than `within` seconds is not waited for; the user is told of it, too.

        Args:
            within: the most seconds for the watches with the same `closes`.
            others: further parts, as (words for the user, function). They are closed with the watches of the first
                number.
        """
        for order in sorted({0, *(each.watch.closes for each in self._runners)}):
            parts = [(each.watch.name, each.close) for each in self._runners if each.watch.closes == order]
            for words in watch_closing.close_all([*others, *parts], within):
                self._notice(f"the pool has ended, but {words}")
            others = ()


class _Runner:
    """Runs one watch in a thread of its own, which begins with `begin`."""

    def __init__(self, watch: Watch, quota: Quota, notice: Callable[[str], None]) -> None:
        self.watch = watch
        self._quota = quota
        self._notice = notice
        self._changed = threading.Condition()  # guards all that follows
        self._waiting: deque[events.Event] = deque()
        self._size = self._dropped = 0
        self._asked = self._done = 0
        self._is_over = self._is_closing = self._told = False
        self._error: BaseException | None = None
        self._begun: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, event: events.Event) -> None:
        """Queue an event for the watch, without waiting. If too much waits, drop the event and count it."""
        size = events.weight(event)
        node = node_of(event)
        has_room = self._quota.take(node, WAITING, size)  # it may emit an event, so no lock is held
        with self._changed:
            if self._is_over or self._is_closing or not has_room or self._size + size > MOST_WAITING:
                self._dropped += not (self._is_over or self._is_closing)
            else:
                self._waiting.append(event)
                self._size += size
                if len(self._waiting) == 1:
                    self._changed.notify_all()
                return
        if has_room:
            self._quota.give_back(node, WAITING, size)

    def begin(self, facts: PoolFacts) -> None:
        """Start the thread, which calls the watch's `begin`."""
        self._thread = threading.Thread(
            target=self._work, args=(facts,), name=f"skypool {self.watch.name}", daemon=True
        )
        self._thread.start()

    def wait_begun(self, within: float) -> None:
        """Wait until the watch has begun, at most `within` seconds. If its `begin` raised a UsageError, raise that."""
        try:
            error = self._begun.get(timeout=within)
        except queue.Empty:
            self._notice(f"{self.watch.name} did not begin within {within:g} s; the pool goes on")
        else:
            if isinstance(error, UsageError):
                raise error

    def ask(self) -> int:
        """Have the thread call the watch's `settle` soon. Return the number of this request, to pass to `wait_done`."""
        with self._changed:
            self._asked += 1
            self._changed.notify_all()
            return self._asked

    def wait_done(self, number: int, within: float) -> bool:
        """Wait until the request with this number is done. Return False if that takes more than `within` seconds."""
        if self._thread is None or self._thread is threading.current_thread():
            return False
        with self._changed:
            return self._changed.wait_for(lambda: self._done >= number or self._is_over, within)

    def close(self) -> None:
        """Pass the waiting events to the watch, and close it. Blocks. Raise the error that this raises."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _work(self, facts: PoolFacts) -> None:
        """Run the watch from its `begin` to its `close`. The thread runs this function."""
        try:
            self.watch.begin(facts)
        except BaseException as e:  # noqa: BLE001 - a watch that fails must not harm the pool
            self._leave_out(e, is_told=isinstance(e, UsageError) and self.watch.must_begin)
            self._begun.put(e)
            return
        self._begun.put(None)
        try:
            while self._round():
                pass
            self.watch.close()
        except BaseException as e:  # noqa: BLE001 - as above
            self._leave_out(e, is_told=self._is_closing)
            self._error = e if self._is_closing else None
        else:
            self._leave_out(None, is_told=True)

    def _round(self) -> bool:
        """Wait for events or for the next tick, and call the watch's methods. Return False if it is to be closed."""
        due = None if self.watch.every is None else time.monotonic() + self.watch.every
        with self._changed:
            while not (self._waiting or self._dropped or self._is_closing or self._asked > self._done):
                left = None if due is None else due - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._changed.wait(left)
            if self._waiting and not self._is_closing and self._asked == self._done:
                self._changed.wait_for(lambda: self._is_closing or self._asked > self._done, self.watch.gather)
            taken, self._waiting, self._size = self._waiting, deque(), 0
            dropped, self._dropped = self._dropped, 0
            asked, is_closing = self._asked, self._is_closing
        self._give_back(taken)
        for event in taken:
            self.watch.hear(event)
        if dropped and not self.watch.missed(dropped) and not self._told:
            self._told = True
            self._notice(f"{self.watch.name} is too slow: {dropped} events were dropped, and more may follow")
        if asked > self._done:
            self.watch.settle()
        else:
            self.watch.tick()
        with self._changed:
            self._done = asked
            self._changed.notify_all()
        return not is_closing

    def _give_back(self, taken: Sequence[events.Event]) -> None:
        for event in taken:
            self._quota.give_back(node_of(event), WAITING, events.weight(event))

    def _leave_out(self, error: BaseException | None, *, is_told: bool) -> None:
        """Give the watch no more events. Tell the user of its error, unless `is_told`: then somebody else does."""
        with self._changed:
            self._is_over = True
            taken, self._waiting = self._waiting, deque()
            self._changed.notify_all()
        self._give_back(taken)
        if error is not None and not is_told:
            self._notice(
                f"{self.watch.name} has failed and is left out, and the pool goes on: {error_text.told(error)}"
            )
