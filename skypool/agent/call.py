"""The record that the agent (the node's main process) has of one call that has not ended.

The agent never unpickles the call's function and arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from skypool.agent.stacks import Mark, ProgramMark
from skypool.agent.value_storage import Blob


@dataclass(slots=True, eq=False)
class NodeCall:
    """The agent's record of one call that waits or runs on this node.

    Attributes:
        id: the call's id.
        packet: the frame (message) of the call, as it was received.
        blob: the call's arguments if they are large; None if they are in `packet`.
        name: the name of the call's function.
        fn: the key by which the node stores the call's function.
        timeout: seconds that the call may run; None for no limit.
        silent: True if the call's output is not sent to the client.
        streams: True if the call sends items of a generator.
        kind: the kind of slot (place for one call) that the call needs: CPU for a slot without devices, GANG or
            SERVICE for a slot of its own, otherwise MAIN.
        busy: True if the call is work, for which the node lives on. Most services are none.
        offered: True if the call is in a queue of the worker processes, or a worker has taken it.
        again: True if the call was queued again after workers could take it, so that two workers may have its
            arguments.
        doomed: why the agent ends the call: "cancel", "timeout" or "stopped" (its worker's process was frozen, for
            example by SIGSTOP). "" if the call may go on.
        grace: seconds that the call has to end after it was asked to. Then its worker is killed. Until it is cancelled,
            this is the option of the call; None if it was not given.
        mark: where the worker writes what it was doing when it was to stop; None if it was not asked.
        programs: what the programs that the call had started were doing then.
        stop_at: the time from which the worker may be told to stop, when it has written that.
        missing: the time at which a worker died, after which no worker was known to have the call; None if the call is
            not missing.
        printed: number of bytes of the call's output that were sent.
        dropped: number of bytes of the call's output beyond the limit, which were not sent.
        ends: the end of what was not sent of stdout and of stderr, by the number of the file descriptor.
        pulls: a dict from the number of each iterator argument to the number of items that the worker has asked for.
        given: a dict from the number of each iterator argument to the number of items that the worker was given.
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
    busy: bool = True
    offered: bool = False
    again: bool = False
    doomed: str = ""
    grace: float | None = None
    mark: Mark | None = None
    programs: tuple[ProgramMark, ...] = ()
    stop_at: float = 0.0
    missing: float | None = None
    printed: int = 0
    dropped: int = 0
    ends: dict[int, bytearray] = field(default_factory=dict)
    pulls: dict[int, int] = field(default_factory=dict)
    given: dict[int, int] = field(default_factory=dict)
