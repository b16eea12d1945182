"""Events that a pool emits about its nodes and calls, and the stream that carries them to listeners.

`pool.events.listen(function)` calls the function with every event. The console prints by listening to the same stream.

A node is a rented machine of the pool. A slot is a place on a node that runs one call at a time; a CPU slot has no
device. A gang is one call that runs as several processes, its ranks. The field `call` is the name of a function, unless
said otherwise.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields

from skypool.text import encodable, plain, printable


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base class of all events: things that happened to a pool.

    Attributes:
        pool: the name of the pool.
        time: when it happened, in seconds since 1970. Default: when the event was made.
    """

    pool: str
    time: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        """Remove control characters from texts. Write surrogates as escapes, because UTF-8 cannot encode them."""
        kind = type(self)
        for name in _TEXTS.get(kind) or _texts_of(kind):
            value = getattr(self, name)
            if type(value) is str:
                if not (value.isascii() and value.isprintable()):
                    object.__setattr__(self, name, self._harmless(value))
            elif type(value) is tuple:
                object.__setattr__(self, name, tuple(map(self._harmless, value)))

    def _harmless(self, text: str) -> str:
        """Return a text without control characters. Colours are kept, because the text may quote output of a call."""
        return printable(text, colours=True)


_TEXTS: dict[type[Event], tuple[str, ...]] = {}
"""The names of the fields of each class of events that are texts, or tuples of texts."""


def _texts_of(kind: type[Event]) -> tuple[str, ...]:
    names = tuple(each.name for each in fields(kind) if each.type in ("str", "tuple[str, ...]"))
    return _TEXTS.setdefault(kind, names)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPhase(Event):
    """Event: a pool has reached another phase of its life.

    Attributes:
        phase: "launching", "ready", "draining" (its machines are being ended) or "ended".
        detail: the error that ends the pool, as text; "" if there is none.
        usd: in the phase "ended", what the pool has cost in US dollars; None if that is unknown, or in other phases.
        idle_usd: the part of `usd` that was paid for idle time.
        staying: in the phase "ended", the number of nodes whose machines go on for the pool's `linger` time.
    """

    phase: str
    detail: str = ""
    usd: float | None = None
    idle_usd: float | None = None
    staying: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEvent(Event):
    """Base class of all events about a node of a pool. `node` is its number, from 0."""

    node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePhase(NodeEvent):
    """Event: a node has reached another phase of its life.

    Attributes:
        phase: "launching", "booting", "bootstrapping" (the setup runs), "ready", "draining" (the machine is being
            ended) or "ended".
        detail: the error that ends the node, as text; "" if there is none.
        slots: the number of calls that the node runs at once, without those on CPU slots; 0 while not known.
        devices: the number of the node's accelerators; 0 while not known.
        cpu_slots: the number of further calls, without devices, that the node runs at once.
        hosts: in the phase "launching", the number of nodes that the launch will give: more than 1 for a TPU slice,
            several machines that are rented together. 1 in later phases.
    """

    phase: str
    detail: str = ""
    slots: int = 0
    devices: int = 0
    cpu_slots: int = 0
    hosts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapStep(NodeEvent):
    """Event: a step of the setup of a node was started, skipped, done or retried.

    Attributes:
        step: the name of the step.
        state: "started", "skipped" (it was done before), "done" or "retried" (after a failure).
        number: the number of the step, from 1 to `steps`, the number of all steps.
        detail: further information, "" if there is none.
    """

    step: str
    state: str
    number: int
    steps: int
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapOutput(NodeEvent):
    """Event: a step of the setup of a node printed a line; or several lines, if they come very fast.

    `step` is the name of the step, and `text` what it printed.
    """

    step: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesProgress(Event):
    """Event: progress of the image's files, which are packed on this machine and then sent to each node.

    A pool emits this event about once a second, and at the end.

    Attributes:
        done: the number of bytes packed, or sent to the node, so far. Sent bytes are counted as compressed.
        total: the number of bytes to pack or to send in all.
        node: the number of the node that the files are sent to; -1 while the files are packed.
    """

    done: int
    total: int
    node: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice(Event):
    """Event: a message (`text`) for the user, who need not act at once."""

    text: str

    def _harmless(self, text: str) -> str:
        return plain(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus(NodeEvent):
    """Event: the work of a node, reported about once a second.

    Attributes:
        busy: the number of busy slots, CPU slots included. A gang occupies all slots of its nodes.
        waiting: the number of calls that wait for a free slot of this node: those sent to it, and those that no other
            node may run.
        done: the number of calls that have ended on the node so far.
        running: the names of some of the functions that run on the node.
        cpu_busy: the number of busy CPU slots.
    """

    busy: int
    waiting: int
    done: int
    running: tuple[str, ...] = ()
    cpu_busy: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkDown(NodeEvent):
    """Event: the connection to a node broke; `reason` says why. The node's calls go on while the client reconnects."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUp(NodeEvent):
    """Event: the connection to a node was made again after it had broken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInterruption(NodeEvent):
    """Event: the provider will take a node's machine back at the time `at`, in seconds since 1970.

    The node gets no new calls. Calls that run there go on until that time.
    """

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderSaved(NodeEvent):
    """Event: what a node saves of a folder, or the trouble with it, has changed.

    While files are saved, such an event comes at most every 10 seconds.

    Attributes:
        folder: the folder, as the user wrote it.
        url: the place where it is kept.
        place: the number of the node among those that save the folder there. A replacement has that of the node before.
        phase: "restoring" until the folder is as the bucket has it, "saving", "ending" while what is left is saved, and
            "ended".
        whole: True if all was saved when it ended.
        files: the number of files that were saved.
        bytes: the bytes of these.
        unsaved: the number of files that are not saved as they are now.
        unsaved_bytes: the bytes of these.
        oldest: for how many seconds the first of these has been waiting.
        rate: the bytes that were sent in a second, while something was sent; 0 if nothing was.
        trouble: why the last attempt has failed; "" if it has not.
        names: some of the files that are not saved.
        refused: why a file cannot be saved, as pairs (path, reason).
        kept: the number of files in the bucket that were deleted here.
        restored: the number of files that were brought back.
        restored_bytes: the bytes of these.
        not_restored: why an object of the bucket cannot be a file, as pairs (name, reason).
        aside: the folder of the node to which files were moved that the bucket does not have; "" for none.
        moved: the number of these files; 0 if they are checkpoints of `Checkpoints` that belong to another place.
        unfinished: checkpoints that are not whole in the bucket, and were left there.
    """

    folder: str
    url: str
    phase: str
    place: int = 0
    whole: bool = False
    files: int = 0
    bytes: int = 0
    unsaved: int = 0
    unsaved_bytes: int = 0
    oldest: float = 0.0
    rate: float = 0.0
    trouble: str = ""
    names: tuple[str, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    kept: int = 0
    restored: int = 0
    restored_bytes: int = 0
    not_restored: tuple[tuple[str, str], ...] = ()
    aside: str = ""
    moved: int = 0
    unfinished: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFetched(NodeEvent):
    """Event: what a node has fetched for a folder of data, or the trouble with it, has changed.

    While files come, such an event comes at most every 10 seconds.

    Attributes:
        folder: the folder, as the user wrote it.
        url: the place that it is filled from.
        phase: "fetching", "there" when the folder is as the place has it, and "ended" if the node cannot have it.
        files: the number of files that were fetched.
        bytes: the bytes that have come.
        wanted: the number of files to fetch: those that were not there before.
        wanted_bytes: the bytes of these.
        checked: the number of files whose content was compared with a checksum of the store.
        trouble: why the last request has failed, or the node cannot have the data; "" if all is well.
        aside: the folder of the node to which files were moved that the place does not have; "" for none.
    """

    folder: str
    url: str
    phase: str
    files: int = 0
    bytes: int = 0
    wanted: int = 0
    wanted_bytes: int = 0
    checked: int = 0
    trouble: str = ""
    aside: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GangFailed(NodeEvent):
    """Event: a run of a gang has failed. `node` is the node of the rank that failed first.

    Attributes:
        call: the name of the gang's function.
        rank: the rank that failed first.
        error: the error of that rank, as text.
        others: the errors of other ranks that came before the gang was stopped, as texts.
        attempt: the number of the run, from 1.
        again: True if the gang will be run again.
    """

    call: str
    rank: int
    error: str
    others: tuple[str, ...] = ()
    attempt: int = 1
    again: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRetirement(NodeEvent):
    """Event: a node was retired, by `pool.retire` or because the pool was made smaller.

    The node gets no new calls. Its machine is ended when the calls that run there have ended.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthChanged(NodeEvent):
    """Event: the health of a node's devices has changed, or is known for the first time.

    Attributes:
        state: "unhealthy" (the node gets no more calls), "degraded" (it works, with a defect), "unknown" (a check could
            not be made) or "ok".
        reasons: what was found, and which checks could not be made, each with its device.
        claimed: True if the node is not trusted, so that this is what its owner claims.
    """

    state: str
    reasons: tuple[str, ...] = ()
    claimed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeIdle(NodeEvent):
    """Event: a node with accelerators has been idle for 5 minutes (`seconds`).

    A node is idle while no call runs on it, or while all of its accelerators are under 5 % utilisation. A pool emits
    only one such event. `usd_per_hour` is the node's price; None if unknown.
    """

    seconds: float
    usd_per_hour: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesUnused(NodeEvent):
    """Event: a call has used only one of its accelerators for 2 minutes (`seconds`).

    The others of the node's `devices` accelerators were under 5 % utilisation. A pool emits only one such event.
    """

    call: str
    devices: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Output(NodeEvent):
    """Event: text that a call printed.

    Attributes:
        slot: the number of the slot that ran the call, from 0. Slots with devices come before CPU slots.
        call: the id of the call; 0 if it is not known.
        stream: 1 for stdout, 2 for stderr.
        text: a piece of the output. It may hold several lines, or end in the middle of one.
        rank: the number of the process in its gang, from 0; None for output of other calls.
        label: distinguishes the process from the gang's others on the node: its devices, such as "gpu1", or else its
            number on the node. "" if it is the only one there, and for other calls.
        service: the name of the service of `pool.service` that printed the text; "" for other calls.
        function: the name of the function of the call; "" if it is not known.
    """

    slot: int
    call: int
    stream: int
    text: str
    rank: int | None = None
    label: str = ""
    service: str = ""
    function: str = ""

    def _harmless(self, text: str) -> str:
        return encodable(text)  # the rest was done when the text came


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRetried(NodeEvent):
    """Event: a call will run again, because its `retries` allow that or because the provider took the machine back.

    `attempt` is the number of the run that comes next, 2 for the second run. `reason` says why the run before it ended.
    """

    call: str
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFailed(NodeEvent):
    """Event: a call failed. The function raised, or its worker process or node was lost.

    `node` is -1 if no node ran it. `error` has the type and the message of the error.
    """

    call: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceEnded(NodeEvent):
    """Event: a service of `pool.service` has ended, although it was not closed and its pool has not ended.

    Attributes:
        node: the number of the node that ran the service.
        service: the name of the service.
        error: the type and the message of the error; "" if the service's function returned.
        restarts: True if the service will start again.
        delay: the seconds until the service starts again; None if it does not start again, or waits for another node to
            join the pool.
    """

    service: str
    error: str
    restarts: bool = False
    delay: float | None = None


def node_of(event: Event) -> int:
    """Return the number of the node that an event is about; -1 if it is about the pool."""
    node: int = getattr(event, "node", -1)
    return node


_BESIDE_TEXTS = 200
"""About how many bytes of memory an event takes, without its texts."""


def weight(event: Event) -> int:
    """Return about how many bytes of memory an event takes. Most of them are for texts, which a node may have sent."""
    if type(event) is Output:  # most events are
        return _BESIDE_TEXTS + sys.getsizeof(event.text)
    size = _BESIDE_TEXTS
    for each in fields(event):
        value = getattr(event, each.name)
        size += sum(map(sys.getsizeof, value if type(value) is tuple else (value,)))
    return size


Hear = Callable[[Event], None]
"""A listener: a function that is called with each event."""
_PATIENCE = 1.0
"""The most seconds for which `emit` waits for a listener. If that is too short, it does not wait for it again."""
_MOST_UNHEARD = 16 << 20
"""About the most bytes of events that wait for one listener. Events beyond this size are dropped and counted."""
_REST = 5.0
"""Seconds without an event after which the thread of a listener ends. The next event starts another one."""


class _Listener:
    """A listener whose function `hear` runs in a thread of its own. If it raises, `on_error` gets the listener."""

    def __init__(self, hear: Hear, on_error: Callable[[_Listener], None]) -> None:
        self.hear = hear
        self._on_error = on_error
        self._changed = threading.Condition()  # guards all that follows
        self._unheard: deque[Event] = deque()
        self._size = 0
        self._dropped = 0
        self._put = self._heard = 0
        self._is_late = self._is_removed = False
        self._thread: threading.Thread | None = None

    def put(self, event: Event) -> int:
        """Queue an event for the function, without waiting. Return a number to pass to `wait`; 0 if it was dropped."""
        with self._changed:
            size = weight(event)
            if self._is_removed:
                return 0
            if self._size + size > _MOST_UNHEARD:
                self._dropped += 1
                return 0
            self._unheard.append(event)
            self._size += size
            self._put += 1
            self._changed.notify_all()
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name="skypool listener", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # the interpreter exits: nobody hears any more
                    self._thread = None
                    return 0
            return self._put

    def wait(self, number: int, patience: float = _PATIENCE) -> None:
        """Wait up to `patience` seconds until the function has heard an event, whose number `put` returned.

        Does not wait if the function took longer than that for an earlier event. Does not wait in the listener's own
        thread either, which would wait for itself.
        """
        with self._changed:
            if self._is_late or self._thread is threading.current_thread():
                return
            self._is_late = not self._changed.wait_for(lambda: self._heard >= number or self._is_removed, patience)

    def settle(self, patience: float) -> bool:
        """Wait until the function has heard all events. Return False if that takes longer than `patience` seconds."""
        with self._changed:
            return self._thread is threading.current_thread() or self._changed.wait_for(
                lambda: self._heard >= self._put or self._is_removed, patience
            )

    def remove(self) -> None:
        """Drop the events that wait, and let the function hear no more events."""
        with self._changed:
            self._is_removed = True
            self._unheard.clear()
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: self._unheard or self._is_removed, _REST) or self._is_removed:
                    self._thread = None
                    return
                event = self._unheard.popleft()
                self._size -= weight(event)
                dropped, self._dropped = self._dropped, 0
            try:
                if dropped:
                    text = f"a listener was too slow, and has missed {dropped} events"
                    self.hear(Notice(pool=event.pool, text=text))
                self.hear(event)
            except BaseException:  # noqa: BLE001 - a broken listener must not break the pool
                self._on_error(self)
                _complain(event)
            with self._changed:
                self._heard += 1
                self._changed.notify_all()


def _complain(event: Event) -> bool:
    """Write the exception of a listener to stderr. Return False if stderr does not work either."""
    try:
        sys.stderr.write(f"a listener of pool {event.pool!r} failed and was removed:\n{traceback.format_exc()}")
    except Exception:  # noqa: BLE001 - a stderr of the user's own may raise anything
        return False
    return True


class _Inline:
    """A listener that is called in the thread that emits an event."""

    def __init__(self, hear: Hear) -> None:
        self.hear = hear


class EventStream:
    """A stream of events with any number of listeners. A listener gets all later events in order.

    A listener that raises an exception is removed, and its traceback is written to stderr. Any thread may use a stream.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._followers: list[_Listener | _Inline] = []
        self._listeners: list[_Listener | _Inline] = []

    def listen(self, hear: Hear, *, inline: bool = False) -> Callable[[], None]:
        """Add a listener, and return a function that removes it. Events from before are not repeated.

        A listener that is added twice is called twice. A second call of the returned function does nothing.

        Args:
            hear: called with each event, in a thread of its own. The pool waits for it, a second at most. A slower
                listener hears its events later, and the pool does not wait for it again. If more than 16 MiB of events
                wait for it, further ones are dropped.
            inline: True calls `hear` in the thread that emits an event. The pool waits for it without a limit, even
                before it ends machines, so `hear` must not block. Default False.
        """
        listener = _Inline(hear) if inline else _Listener(hear, self._remove)
        with self._lock:
            self._listeners.append(listener)
        return lambda: self._remove(listener)

    def _remove(self, listener: _Listener | _Inline) -> None:
        """Remove a listener. Do nothing if the stream does not have it."""
        with self._lock:
            for known in (self._followers, self._listeners):
                if listener in known:
                    known.remove(listener)
        if isinstance(listener, _Listener):
            listener.remove()

    def follow(self, hear: Hear) -> Callable[[], None]:
        """Add a listener of skypool's own, and return a function that removes it.

        `hear` is called in the thread that emits an event, for one event at a time, before the user's listeners. It
        must not block.
        """
        follower = _Inline(hear)
        with self._lock:
            self._followers.append(follower)
        return lambda: self._remove(follower)

    def emit(self, event: Event) -> None:
        """Let all listeners hear an event, and wait for each of them for a second at most.

        Inline listeners are called here, one after the other, and the others in their own threads at the same time.
        """
        waiting: list[tuple[_Listener, int]] = []
        inline: list[_Inline] = []
        with self._lock:
            for follower in list(self._followers):
                self._tell(follower, event)
            for each in self._listeners:
                if isinstance(each, _Listener):
                    waiting.append((each, each.put(event)))
                else:
                    inline.append(each)
        for one in inline:  # without the lock, as this is code of the user
            self._tell(one, event)
        for listener, number in waiting:
            listener.wait(number)

    def _tell(self, listener: _Listener | _Inline, event: Event) -> None:
        try:
            listener.hear(event)
        except Exception:  # noqa: BLE001 - a broken listener must not break the pool
            self._remove(listener)
            _complain(event)

    def settle(self, within: float) -> None:
        """Wait until all listeners have heard all events so far. Raise TimeoutError after `within` seconds."""
        until = time.monotonic() + within
        for each in list(self._listeners):
            if isinstance(each, _Listener) and not each.settle(max(0.0, until - time.monotonic())):
                raise TimeoutError(f"a listener has not heard all events within {within:g} s: {each.hear!r}")
