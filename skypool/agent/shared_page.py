"""Shared memory page of agent, keeper and workers: which worker runs which call, and the node's deadline.

It answers without asking: a worker that is busy, stopped or just killed cannot be asked.

Each number is one native store, which no reader sees half done; `struct.pack_into` would write zeros first. A call's
time is stored before the call: whoever looks in between, however long, sees the call before with a time that is too
late, and never a call with a time that is too early.
"""

from __future__ import annotations

import mmap

# The numbers of the whole node, by their place in the first line,
_DEADLINE = 0
_DROPS = 1
_INTERRUPTION = 2
# and those of a slot, in its own line.
_TIME = 0
_CALL = 1
_GIVEN_UP = 2
_WIDTH = 8
"""How many numbers of eight bytes a slot has: one line of the cache."""


class SharedPage:
    """Slot i holds: when its worker took a call last (monotonic seconds), which call, and which one to give up."""

    def __init__(self, slots: int) -> None:
        memory = memoryview(mmap.mmap(-1, 8 * _WIDTH * (slots + 1)))
        self._whole = memory.cast("Q")
        self._real = memory.cast("d")

    @property
    def deadline(self) -> float:
        """When everything of this node ends, in monotonic seconds; the agent moves it, the keeper obeys it."""
        return self._real[_DEADLINE]

    @deadline.setter
    def deadline(self, when: float) -> None:
        self._real[_DEADLINE] = when

    @property
    def drops(self) -> int:
        """How many values of `pool.put` were dropped so far: a worker that sees it grow looks which."""
        return self._whole[_DROPS]

    @drops.setter
    def drops(self, count: int) -> None:
        self._whole[_DROPS] = count

    @property
    def interruption(self) -> float:
        """When the provider takes the machine back, in seconds since 1970; 0.0 as long as it says nothing."""
        return self._real[_INTERRUPTION]

    @interruption.setter
    def interruption(self, at: float) -> None:
        self._real[_INTERRUPTION] = at

    def begin(self, slot: int, call: int, now: float) -> None:
        """The worker of `slot` takes `call`, whose time counts from `now` unless `run` says otherwise."""
        at = _WIDTH * (slot + 1)
        self._whole[at + _GIVEN_UP] = 0
        self._real[at + _TIME] = now
        self._whole[at + _CALL] = call

    def run(self, slot: int, now: float) -> None:
        """What the call of `slot` needs is loaded, and its function begins: its time counts from here."""
        self._real[_WIDTH * (slot + 1) + _TIME] = now

    def running(self, slot: int) -> tuple[int, float]:
        """The call that the worker of `slot` took last, 0 for none, and when it took it."""
        at = _WIDTH * (slot + 1)
        before = self._whole[at + _CALL], self._real[at + _TIME]
        while (after := (self._whole[at + _CALL], self._real[at + _TIME])) != before:
            before = after  # the worker is writing just now
        return after

    def give_up(self, slot: int, call: int) -> None:
        """Name the call that the next SIGTERM to the worker of `slot` means."""
        self._whole[_WIDTH * (slot + 1) + _GIVEN_UP] = call

    def given_up(self, slot: int) -> bool:
        """Whether the call that runs now is the one to give up."""
        at = _WIDTH * (slot + 1)
        call = self._whole[at + _CALL]
        return bool(call) and call == self._whole[at + _GIVEN_UP]
