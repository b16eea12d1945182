"""A page of memory that the agent, its workers and the keeper share.

The page shows which worker runs which call, and when everything on the node must end. It can be read at any time, even
if the worker is busy, stopped or has just been killed.

Each number is written with one store instruction, so no reader sees half a number. (`struct.pack_into` would write
zeros first.) When a worker takes a call, the time of that call is written before its id. A reader in between sees the
id of the earlier call with the later time. So a call may look younger than it is, but never older.
"""

from __future__ import annotations

import mmap
import os

from skypool.runtime import LEASE, LIMIT, PROVIDER, Reason

NAME = "skypool-page"
"""The name of the memory, as `/proc` shows it."""
# Positions of the node's numbers in the first line,
_DEADLINE = 0
_DROPS = 1
_INTERRUPTION = 2
_MOVER = 3
_END = 4
_DRAIN = 5
_STOP = 6
_STOP_REASON = 7
# and of a slot's numbers in the slot's own line.
_TIME = 0
_CALL = 1
_GIVEN_UP = 2
_NOTICE = 3
_STALLED = 4
_TOLD = 5
_OFFER = 6
_NOTICE_REASON = 7
# and of the node's numbers in the last line.
_END_ASKED = 0
_END_HELD = 1
_WIDTH = 8
"""The number of eight-byte numbers in a line: one line of the CPU's cache."""
_REASONS: tuple[Reason, ...] = (PROVIDER, LIMIT, LEASE)
"""The reasons of a notice, by the numbers that stand for them."""


class SharedPage:
    """Page of numbers in memory that forked processes share. All numbers are 0 at first.

    For each slot, also those for processes of gangs, there are eight numbers:

    - the id of the call that the slot's worker took last,
    - the time from which the duration of that call counts,
    - the id of the call that the worker must stop; 0 for none,
    - the time at which another machine of the call's gang is taken back; 0 for none; and the reason,
    - the id of the generator call that waits until its client takes items; 0 for none,
    - the step that a process of a gang has told, plus 1; 0 for none,
    - the step that it is offered, as `skypool.gangs.agreement.Offer.word`; 0 for none.

    The time of a notice is in seconds since 1970. Other times are in seconds of `time.monotonic()`.

    Args:
        slots: the number of slots.
        file: the file descriptor of the memory of another process; None for new memory.

    Attributes:
        file: the file descriptor of the memory.
        slots: the number of slots.
    """

    def __init__(self, slots: int, file: int | None = None) -> None:
        size = 8 * _WIDTH * (slots + 2)
        self.slots = slots
        self.file = os.memfd_create(NAME, os.MFD_CLOEXEC) if file is None else file
        if file is None:
            os.ftruncate(self.file, size)
        memory = memoryview(mmap.mmap(self.file, size))
        self._whole = memory.cast("Q")
        self._real = memory.cast("d")

    @property
    def deadline(self) -> float:
        """The time at which everything on this node ends, in seconds of `time.monotonic()`.

        The agent moves the deadline, and the keeper enforces it.
        """
        return self._real[_DEADLINE]

    @deadline.setter
    def deadline(self, when: float) -> None:
        self._real[_DEADLINE] = when

    @property
    def drops(self) -> int:
        """The number of `pool.put()` values that were dropped so far on this node.

        When it has grown, a worker reads the packets that name these values.
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

    @property
    def mover(self) -> int:
        """The process id of the mover, which may outlive the agent until `end`; 0 if there is none."""
        return self._whole[_MOVER]

    @mover.setter
    def mover(self, pid: int) -> None:
        self._whole[_MOVER] = pid

    @property
    def end(self) -> float:
        """The time until which the mover may save what is left, in seconds of `time.monotonic()`."""
        return self._real[_END]

    @end.setter
    def end(self, when: float) -> None:
        self._real[_END] = when

    @property
    def drain(self) -> float:
        """The most seconds for which the mover may outlive the agent."""
        return self._real[_DRAIN]

    @drain.setter
    def drain(self, seconds: float) -> None:
        self._real[_DRAIN] = seconds

    @property
    def stop(self) -> float:
        """The time at which the node stops its calls, in seconds since 1970; 0.0 if that is far or not known."""
        return self._real[_STOP]

    @property
    def stop_reason(self) -> Reason:
        """The reason of `stop`."""
        return _REASONS[self._whole[_STOP_REASON] % len(_REASONS)]

    @property
    def end_asked(self) -> float:
        """The earliest end of the node that `Guard` was asked for, in seconds of `time.monotonic()`; 0.0 for none."""
        return self._real[_WIDTH * (self.slots + 1) + _END_ASKED]

    @end_asked.setter
    def end_asked(self, when: float) -> None:
        self._real[_WIDTH * (self.slots + 1) + _END_ASKED] = when

    @property
    def end_held(self) -> float:
        """The end at which the keeper ends the node in any case, in the same unit; 0.0 for none.

        The keeper keeps it in its own memory, and only shows it here.
        """
        return self._real[_WIDTH * (self.slots + 1) + _END_HELD]

    @end_held.setter
    def end_held(self, when: float) -> None:
        self._real[_WIDTH * (self.slots + 1) + _END_HELD] = when

    def announce_stop(self, at: float, reason: Reason) -> None:
        """Note when the node stops its calls, in seconds since 1970, and why; 0.0 if that is not near any more."""
        self._whole[_STOP_REASON] = _REASONS.index(reason)
        self._real[_STOP] = at

    def begin(self, slot: int, call: int, now: float) -> None:
        """Note that the worker of `slot` has taken `call`; 0 for a new worker, which has taken no call.

        The call's duration counts from `now`, in seconds of `time.monotonic()`, unless `run` changes that. An earlier
        request by `give_up` is removed.
        """
        at = _WIDTH * (slot + 1)
        self._whole[at + _GIVEN_UP] = 0
        self._real[at + _TIME] = now
        self._whole[at + _CALL] = call

    def run(self, slot: int, now: float) -> None:
        """Let the duration of the call on `slot` count from `now`, when its arguments are loaded, and not from earlier.

        `now` is in seconds of `time.monotonic()`.
        """
        self._real[_WIDTH * (slot + 1) + _TIME] = now

    def running(self, slot: int) -> tuple[int, float]:
        """Return the id of the call that the worker of `slot` took last, and the time from which its duration counts.

        The id is 0 if it has taken none. The time may lie in the future while the worker loads the call's arguments.
        The call may have ended already.
        """
        at = _WIDTH * (slot + 1)
        before = self._whole[at + _CALL], self._real[at + _TIME]
        while (after := (self._whole[at + _CALL], self._real[at + _TIME])) != before:
            before = after  # the worker was writing just then
        return after

    def give_up(self, slot: int, call: int) -> None:
        """Note that the worker of `slot` must stop this call at its next SIGTERM. No signal is sent here.

        An earlier request is overwritten.
        """
        self._whole[_WIDTH * (slot + 1) + _GIVEN_UP] = call

    def given_up(self, slot: int) -> bool:
        """Return True if the worker of `slot` must stop the call that it took last."""
        at = _WIDTH * (slot + 1)
        call = self._whole[at + _CALL]
        return bool(call) and call == self._whole[at + _GIVEN_UP]

    def notify(self, slot: int, at: float, reason: Reason = PROVIDER) -> None:
        """Note when another machine of the gang on `slot` ends, and why; 0.0 for a new worker.

        `at` is in seconds since 1970. This only writes the numbers, and does not wake the worker.
        """
        self._whole[_WIDTH * (slot + 1) + _NOTICE_REASON] = _REASONS.index(reason)
        self._real[_WIDTH * (slot + 1) + _NOTICE] = at

    def tell_step(self, slot: int, step: int) -> None:
        """Note the step that the process on `slot` has begun, and goes on; -1 for none."""
        self._whole[_WIDTH * (slot + 1) + _TOLD] = step + 1

    def told_step(self, slot: int) -> int:
        """Return the step that the process on `slot` has begun; -1 for none."""
        return self._whole[_WIDTH * (slot + 1) + _TOLD] - 1

    def offer(self, slot: int, word: int) -> None:
        """Offer a step to the process on `slot`, as `skypool.gangs.agreement.Offer.word` writes it; 0 for none."""
        self._whole[_WIDTH * (slot + 1) + _OFFER] = word

    def offered(self, slot: int) -> int:
        """Return what is offered to the process on `slot`; 0 for nothing."""
        return self._whole[_WIDTH * (slot + 1) + _OFFER]

    def stall(self, slot: int, call: int) -> None:
        """Note which generator call of `slot` waits until its client takes items; 0 for none."""
        self._whole[_WIDTH * (slot + 1) + _STALLED] = call

    def stalled(self, slot: int) -> int:
        """Return the id of the generator call of `slot` that waits until its client takes items; 0 for none."""
        return self._whole[_WIDTH * (slot + 1) + _STALLED]

    def announced(self, slot: int) -> float:
        """Return the earliest time at which a machine ends that the call on `slot` needs; 0.0 if none is announced.

        Such a machine is this node itself or, for a process of a gang, the machine of another process. The time is in
        seconds since 1970. It is that of the provider if there is one.
        """
        times = self._real[_INTERRUPTION], self._real[_WIDTH * (slot + 1) + _NOTICE]
        return min(times) or max(times) or self._real[_STOP]

    def reason(self, slot: int) -> Reason:
        """Return why the machine ends of which `announced` tells."""
        own, other = self._real[_INTERRUPTION], self._real[_WIDTH * (slot + 1) + _NOTICE]
        if not own and not other:
            return self.stop_reason
        if other and (not own or other < own):
            return _REASONS[self._whole[_WIDTH * (slot + 1) + _NOTICE_REASON] % len(_REASONS)]
        return PROVIDER
