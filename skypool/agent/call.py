"""The record that the agent has of one call that has not ended.

The agent never unpickles the call's function and arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from skypool.agent.stacks import Mark, ProgramMark
from skypool.agent.value_storage import Blob


@dataclass(slots=True, eq=False)
class NodeCall:
    """The agent's record of one call that waits or runs on this node. Times are those of the agent's clock, in seconds.

    Attributes:
        packet: the frame of the call, as it was received.
        blob: the call's arguments if they are large; None if they are in `packet`.
        fn: the key by which the node stores the call's function.
        timeout: seconds that the call may run; None for no limit.
        silent: True if the call's output is not sent to the client.
        streams: True if the call sends items of a generator.
        kind: the kind of slot that the call needs: MAIN, CPU, GANG or SERVICE.
        busy: True if the call counts as work, for which the node lives on. Most services do not count.
        offered: True if the call was put into the socket from which workers take calls. A worker may have taken it.
        again: True if the call was queued again after workers could take it, so that two workers may have its
            arguments.
        doomed: why the agent ends the call: "cancel", "timeout", "stopped" (its worker was frozen, for example by
            SIGSTOP), "unable" (no worker can be started) or "lost" (any other reason). "" if the call may go on, or has
            ended by itself.
        grace: seconds that the call has to end after it was asked to, before its worker is killed. Until the call is
            cancelled, this is its option `grace`; None if that was not given.
        mark: the place where the worker writes its stack, before the call is asked to stop; None if it writes none.
        programs: the same for the programs that the call has started.
        stop_at: the time at which the call is asked to stop even if these stacks are not written yet.
        looks: the numbers of the mover's looks which files the call writes: before it is stopped (False) and before it
            is killed (True).
        slot: the number of the slot in which it was asked to stop, or is killed; -1 if it was not.
        ended: the time in nanoseconds since 1970 after which others may have written to its files, as its worker says;
            0 if the worker has not said it.
        missing: the time at which a worker died that may have had the call; None if none has, or if another worker is
            known to have the call since.
        printed: number of bytes of the call's output that were sent.
        dropped: number of bytes of the call's output beyond the limit, which were not sent.
        ends: the last of the dropped bytes, by the number of the file descriptor: 1 for stdout, 2 for stderr.
        pulls: how many items the worker has asked for, by the number of the iterator argument.
        given: how many of these items were passed to the worker, by the same number.
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
    looks: dict[bool, int] = field(default_factory=dict)
    slot: int = -1
    ended: int = 0
    missing: float | None = None
    printed: int = 0
    dropped: int = 0
    ends: dict[int, bytearray] = field(default_factory=dict)
    pulls: dict[int, int] = field(default_factory=dict)
    given: dict[int, int] = field(default_factory=dict)
