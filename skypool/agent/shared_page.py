"""A page of memory that the agent (the node's main process), its workers and the keeper (the agent's parent) share.

The page shows which worker runs which call, and when everything on the node must end. It can be read at any time, even
if the worker is busy, stopped or has just been killed.

Each number is written with one store instruction, so no reader sees half a number. (`struct.pack_into` would write
zeros first.) When a worker takes a call, the time of that call is written before its id. A reader in between sees the
id of the earlier call with the later time. So a call may look younger than it is, but never older.
"""

from __future__ import annotations

import mmap

# Positions of the node's numbers in the first line,
_DEADLINE = 0
_DROPS = 1
_INTERRUPTION = 2
# and of a slot's numbers in the slot's own line.
_TIME = 0
_CALL = 1
_GIVEN_UP = 2
_NOTICE = 3
_STALLED = 4
_WIDTH = 8
"""The number of eight-byte numbers for each slot: one line of the CPU's cache."""


class SharedPage:
    """A page of numbers in memory that forked processes share. All numbers are 0 at first.

    A slot is a place where one call runs at a time. For each slot there are five numbers:

    - the id of the call that the slot's worker took last,
    - the time from which the duration of that call counts,
    - the id of the call that the worker process must stop; 0 for none,
    - the time at which another machine of the call's gang is taken back; 0 for none,
    - the id of the generator call that waits until its client takes items; 0 for none.

    The time of a notice is in seconds since 1970. Other times are in seconds of `time.monotonic()`.

    Args:
        slots: the number of slots on the node, with those for processes of gangs.
    """

    def __init__(self, slots: int) -> None:
        memory = memoryview(mmap.mmap(-1, 8 * _WIDTH * (slots + 1)))
        self._whole = memory.cast("Q")
        self._real = memory.cast("d")

    @property
    def deadline(self) -> float:
        """The time at which everything on this node ends, in seconds of `time.monotonic()`.

        The agent (the node's main process) moves the deadline, and the keeper (the agent's parent process) enforces it.
        """
        return self._real[_DEADLINE]

    @deadline.setter
    def deadline(self, when: float) -> None:
        self._real[_DEADLINE] = when

    @property
    def drops(self) -> int:
        """The number of `pool.put()` values that were dropped so far on this node.

        When the number has grown, a worker process reads the packets (messages) that name these values.
        """
        return self._whole[_DROPS]

    @drops.setter
    def drops(self, count: int) -> None:
        self._whole[_DROPS] = count

    @property
    def interruption(self) -> float:
        """The time at which the provider takes the machine back, in seconds since 1970; 0.0 if none is announced."""
        return self._real[_INTERRUPTION]

    @interruption.setter
    def interruption(self, at: float) -> None:
        self._real[_INTERRUPTION] = at

    def begin(self, slot: int, call: int, now: float) -> None:
        """Write into the page that the worker process of `slot` has taken a call.

        A request by `give_up` to stop a call on this slot is removed.

        Args:
            slot: the number of the slot (place where one call runs at a time).
            call: the call's id; 0 for a new worker, which has taken no call.
            now: the time from which the call's duration counts, unless `run` changes it, in seconds of
                `time.monotonic()`.
        """
        at = _WIDTH * (slot + 1)
        self._whole[at + _GIVEN_UP] = 0
        self._real[at + _TIME] = now
        self._whole[at + _CALL] = call

    def run(self, slot: int, now: float) -> None:
        """Write into the page the time at which the function of the call on `slot` begins.

        The worker calls this method when it has loaded the call's arguments. The id of the call in the page stays.

        Args:
            slot: the number of the slot (place where one call runs at a time).
            now: the time from which the call's duration counts, in seconds of `time.monotonic()`.
        """
        self._real[_WIDTH * (slot + 1) + _TIME] = now

    def running(self, slot: int) -> tuple[int, float]:
        """Return the id of the call that the worker of `slot` took last, and the time from which its duration counts.

        The id is 0 if the worker process has taken none. The time is in seconds of `time.monotonic()`. It may lie in
        the future while the worker loads the call's arguments. The call may have ended already.
        """
        at = _WIDTH * (slot + 1)
        before = self._whole[at + _CALL], self._real[at + _TIME]
        while (after := (self._whole[at + _CALL], self._real[at + _TIME])) != before:
            before = after  # the worker was writing just then
        return after

    def give_up(self, slot: int, call: int) -> None:
        """Write the id of the call that the worker process of `slot` must stop at its next SIGTERM.

        No signal is sent here. An id from an earlier `give_up` is overwritten.

        Args:
            slot: the number of the slot (place where one call runs at a time).
            call: the call's id.
        """
        self._whole[_WIDTH * (slot + 1) + _GIVEN_UP] = call

    def given_up(self, slot: int) -> bool:
        """Return True if the worker process of `slot` must stop its call, because `give_up` has named that call.

        Returns False if `give_up` has named no call or another one, or if the worker has taken none.
        """
        at = _WIDTH * (slot + 1)
        call = self._whole[at + _CALL]
        return bool(call) and call == self._whole[at + _GIVEN_UP]

    def notify(self, slot: int, at: float) -> None:
        """Write into the page when another machine of the gang of the call on `slot` is taken back.

        A gang is one call that runs as processes on several nodes. The worker process is not told here.

        Args:
            slot: the number of the slot (place where one call runs at a time).
            at: the time in seconds since 1970; 0.0 for a new worker, whose gang loses no machine.
        """
        self._real[_WIDTH * (slot + 1) + _NOTICE] = at

    def stall(self, slot: int, call: int) -> None:
        """Write into the page which generator call of `slot` waits until its client takes items; 0 for none."""
        self._whole[_WIDTH * (slot + 1) + _STALLED] = call

    def stalled(self, slot: int) -> int:
        """Return the id of the generator call of `slot` that waits until its client takes items; 0 for none."""
        return self._whole[_WIDTH * (slot + 1) + _STALLED]

    def announced(self, slot: int) -> float:
        """Return the time at which a machine that the call on `slot` needs is taken back, in seconds since 1970.

        Such a machine is this node itself or, for a process of a gang, the machine of another process. The result is
        the earlier of the two times, and 0.0 if nothing is announced.
        """
        times = self._real[_INTERRUPTION], self._real[_WIDTH * (slot + 1) + _NOTICE]
        return min(times) or max(times)
