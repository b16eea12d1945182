"""Events that a pool emits about its nodes and calls, and the stream that carries them to listeners.

The console, logs and reports all listen to one stream of these; nothing else prints.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to a pool, at `time` (seconds since 1970)."""

    pool: str
    time: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPhase(Event):
    """The pool is in another phase of its life: launching, ready, draining, ended."""

    phase: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEvent(Event):
    """Something happened to a node."""

    node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePhase(NodeEvent):
    """A node is in another phase of its life: launching, booting, bootstrapping, ready, draining, ended.

    Attributes:
        slots: how many calls it runs at once, 0 while that is not known; devices: how many it has; cpu_slots: how many
            calls that need no device it runs beside them, 0 where these have no slots of their own.
        hosts: how many nodes come of it, while it is launched: a slice is one until it is there.
    """

    phase: str
    detail: str = ""
    slots: int = 0
    devices: int = 0
    cpu_slots: int = 0
    hosts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapStep(NodeEvent):
    """A step that makes a node ready: started, skipped (it was done before), done, or retried after a failure."""

    step: str
    state: str
    number: int
    steps: int
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapOutput(NodeEvent):
    """A step printed a line."""

    step: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesProgress(Event):
    """Files of the image are packed on the client, or sent to a node; told about once a second.

    Attributes:
        node: the node they are sent to; -1 while they are packed.
        done: bytes that were packed or sent; total: how many there are. Sent bytes are compressed.
    """

    done: int
    total: int
    node: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice(Event):
    """Something that the user should know, and need do nothing about at once."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus(NodeEvent):
    """What a node is doing, told about once a second.

    Attributes:
        busy: how many calls run; cpu_busy: how many of them on CPU slots beside those with devices.
    """

    busy: int
    waiting: int
    done: int
    running: tuple[str, ...] = ()
    cpu_busy: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkDown(NodeEvent):
    """The connection to a node broke; its work goes on while the link comes back."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUp(NodeEvent):
    """The connection to a node is back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInterruption(NodeEvent):
    """The provider takes a node's machine back, at `at` (seconds since 1970): it gets no new calls."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Output(NodeEvent):
    """A call printed `text`; `stream` is 1 for stdout, 2 for stderr.

    `slot` counts the node's slots with devices first, and then its CPU slots.
    """

    slot: int
    call: int
    stream: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRetried(NodeEvent):
    """A call runs again because of `reason`: as its `retries` asked, or because its node was interrupted."""

    call: str
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFailed(NodeEvent):
    """A call raised, or its worker died."""

    call: str
    error: str


Hear = Callable[[Event], None]


class EventStream:
    """Hands each event to everyone who listens, in order. A listener that raises is told of on stderr and dropped."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._listeners: list[Hear] = []

    def listen(self, hear: Hear) -> Callable[[], None]:
        """Add a listener; what is returned removes it."""
        with self._lock:
            self._listeners.append(hear)
        return lambda: self._remove(hear)

    def _remove(self, hear: Hear) -> None:
        with self._lock:
            if hear in self._listeners:
                self._listeners.remove(hear)

    def emit(self, event: Event) -> None:
        """Tell everyone; from any thread."""
        with self._lock:
            for hear in list(self._listeners):
                try:
                    hear(event)
                except Exception:  # noqa: BLE001 - a broken listener must not break the pool
                    self._remove(hear)
                    sys.stderr.write(f"a listener of pool {event.pool!r} failed and was removed:\n")
                    traceback.print_exc()


_RENAMED = {"Stream": EventStream, "Interruption": NodeInterruption}
"""Former names, which work in this release. `skypool.Stream` and `skypool.Interruption` are something else."""


def __getattr__(name: str) -> object:
    renamed = _RENAMED.get(name)
    if renamed is None:
        raise AttributeError(f"module 'skypool.events' has no attribute {name!r}")
    warnings.warn(
        f"events.{name} has been renamed to events.{renamed.__name__}; the old name still works in this release, but not "
        f"in the next one",
        DeprecationWarning,
        stacklevel=2,
    )
    return renamed
