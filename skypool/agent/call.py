"""State that the agent keeps for one call that has not ended. The agent never unpickles the call."""

from __future__ import annotations

from dataclasses import dataclass, field

from skypool.agent.value_storage import Blob


@dataclass(slots=True, eq=False)
class NodeCall:
    """A call that has not ended.

    Attributes:
        packet: its frame as it came; blob: its arguments, when they are large; fn: the key of its function.
        kind: of slot that it runs on (see `slots`).
        offered: whether it is where workers take calls; again: it was there before, and two may have its arguments.
        doomed: why it is being stopped: "cancel", "timeout", "stopped", or "".
        missing: since when it may have died with a worker that took it and had not begun.
        printed, dropped: bytes of its output sent on, and withheld beyond the limit.
        pulls: for each iterator argument, how many items were asked for; given: how many of them its worker got.
    """

    id: int
    packet: bytes
    blob: Blob | None
    name: str
    fn: str
    timeout: float | None
    silent: bool
    streams: bool
    kind: int = 0
    offered: bool = False
    again: bool = False
    doomed: str = ""
    grace: float = 0.0
    missing: float | None = None
    printed: int = 0
    dropped: int = 0
    pulls: dict[int, int] = field(default_factory=dict)
    given: dict[int, int] = field(default_factory=dict)
