"""Stops calls that are cancelled, that run too long, or whose worker hangs, and queues lost calls again."""

from __future__ import annotations

import signal
import time
import traceback

from skypool.agent import stacks
from skypool.agent.call import NodeCall
from skypool.agent.call_queue import CallQueue
from skypool.agent.failed_calls import Answers
from skypool.agent.mover_watch import MoverWatch
from skypool.agent.processes import children, descendants
from skypool.agent.worker_processes import GANG, Slot, Slots
from skypool.clock import RunningClock
from skypool.wire.agent_config import AgentConfig

_WRITING = 2.0
"""Seconds in which processes must have written their stacks, also where all processors are busy. After that, the call
is told to stop in any case."""
_PROGRAMS = 16
"""The most processes started by a call that are asked to write their stacks before the call is stopped."""
_LOST_AFTER = 5.0
"""Seconds after which a call is queued again if its worker died and nothing shows that the call has begun."""


class Stops:
    """The part of the agent that stops calls. It also queues calls again that were lost with a worker.

    A call that has not begun ends with an error at once. A running call is asked to stop. If it goes on for longer than
    its grace period, its worker is killed, and the call ends with an error. The attribute `cancelling` is True if a
    call was cancelled since the last `look`.
    """

    def __init__(
        self,
        config: AgentConfig,
        slots: Slots,
        queue: CallQueue,
        clock: RunningClock,
        answers: Answers,
        mover: MoverWatch,
    ) -> None:
        self._grace = config.grace
        self._liveness = config.liveness
        self._slots = slots
        self._queue = queue
        self._clock = clock
        self._answers = answers
        self._mover = mover
        self.cancelling = False
        queue.on_stopped = self._on_stopped

    def cancel(self, id_: int, grace: float) -> None:
        """Mark a call as cancelled, so that the next `look` stops it. Does not wait.

        A running call has `grace` seconds to end before its worker is killed. A call that must stop already is ignored.
        """
        call = self._queue.get(id_)
        if call is not None and not call.doomed:
            call.doomed = "cancel"
            call.grace = grace
            self._queue.suspects[id_] = call
            self.cancelling = True

    def cancel_all(self, grace: float) -> bool:
        """Cancel all calls as `cancel` does, when the mover has looked. Return False if there are none."""
        for id_ in [*self._queue.calls]:
            if (call := self._queue.get(id_)) is not None:
                call.looks[False] = 0
            self.cancel(id_, grace)
        return bool(self._queue.calls)

    def note_missing(self, id_: int) -> None:
        """Note that a call that has not ended may be lost: a worker that may have had it died before the call began.

        If no worker has taken the call `_LOST_AFTER` (5) seconds later, `look` queues it again.
        """
        call = self._queue.get(id_)
        assert call is not None
        call.missing = self._clock()
        self._queue.suspects[id_] = call

    def look(self) -> None:
        """Stop the calls that must stop, queue lost calls again, and set `cancelling` to False. Does not wait.

        Calls that have not begun end with an error. Running calls are asked to stop.
        """
        self.cancelling = False
        now = self._clock()
        suspects = self._queue.suspects
        taken = self._slots.taken() if suspects else {}
        if any(call.doomed and id_ not in taken for id_, call in suspects.items()):
            for call in self._queue.doomed():
                self._answers.stopped(call)
            self._queue.pump()
        for call in list(suspects.values()):
            try:
                self._look_at(call, now)
            except Exception as e:  # noqa: BLE001 - one call must not end the agent
                traceback.print_exc()
                self._answers.broken(call, f"{type(e).__name__}: {e}")
                if (slot := self._slots.running(call.id)) is not None:
                    self._slots.signal(slot, signal.SIGKILL)

    def _has_looked(self, slot: Slot, call: NodeCall, kills: bool = False) -> bool:
        """Return True if the mover knows which files a call is writing, so that it may be stopped, or killed."""
        if kills not in call.looks:
            call.looks[kills] = self._mover.look([slot.pid, *descendants(slot.pid)]) if self._mover.saves else 0
        if not self._mover.has_looked(call.looks[kills]):
            return False
        call.slot = slot.number
        return True

    def _on_stopped(self, call: NodeCall) -> None:
        """Tell the mover when a call had ended. What is written later to the same files is whole."""
        at = call.ended or time.time_ns()
        if call.slot < 0:  # it was faster than the look, and has ended by itself
            at = 0
        elif not call.ended:  # its worker has died, or was asked to stop it when it had answered
            running, began = self._slots.page.running(call.slot)
            if running not in (0, call.id):  # the worker was faster than its agent
                at -= max(0, int(1e9 * (time.monotonic() - began)))
        for number in filter(None, call.looks.values()):
            self._mover.over(number, at)

    def _has_told(self, slot: Slot, call: NodeCall, now: float) -> bool:
        """Return True if a call may be asked to stop now, and False while its stacks are still being written."""
        # what it writes is for the error's message
        if call.doomed != "timeout" and slot.kind != GANG:
            return True
        if not call.stop_at:
            call.mark = stacks.ask(slot.pid)
            if children(slot.pid):
                asked = set() if call.mark is None else {call.mark.file}
                call.programs = tuple(stacks.ProgramMark(pid, asked) for pid in descendants(slot.pid)[:_PROGRAMS])
            call.stop_at = now + _WRITING
        marks = (call.mark, *(each.mark for each in call.programs))
        writing = [mark for mark in marks if mark is not None and not mark.is_written()]
        return not writing or now >= call.stop_at

    def look_at_slot(self, slot: Slot, now: float) -> None:
        """Check one slot: stop a call that has run too long, and kill its worker if the call does not stop in time.

        A worker that has been frozen for more than `liveness` seconds, for example by SIGSTOP, is killed, too. `now` is
        the time of the agent's clock, in seconds.
        """
        if slot.kill_at is not None and now > slot.kill_at:
            call = self._queue.get(self._slots.page.running(slot.number)[0])
            if call is None or self._has_looked(slot, call, kills=True):
                self._slots.signal(slot, signal.SIGKILL)
        elif slot.kill_at is not None and now > slot.wake_at:
            self._slots.wake(slot)
        self._check_time(slot, now)
        self._check_stopped(slot, now)

    def _look_at(self, call: NodeCall, now: float) -> None:
        """Ask a running call to stop if it must, unless it was asked before. Queue a lost call again."""
        slot = self._slots.running(call.id)
        if slot is not None:
            call.missing = None
            if (
                call.doomed
                and slot.kill_at is None
                and self._has_told(slot, call, now)
                and self._has_looked(slot, call)
            ):
                self._slots.stop_call(slot, call.id, self._grace if call.grace is None else call.grace)
        elif call.missing is not None and now - call.missing > _LOST_AFTER:
            self._queue.again([call.id])
            self._queue.pump()

    def _check_time(self, slot: Slot, now: float) -> None:
        """Ask the call of a slot to stop if it exceeds its timeout. Pauses of the whole node are not counted."""
        id_, began = self._slots.page.running(slot.number)
        limit = None if id_ not in self._queue.calls else self._queue.calls[id_].timeout
        if limit is None or time.monotonic() - began - slot.paused_during(id_) <= limit:
            return
        call = self._queue.get(id_)
        if call is not None and not call.doomed:
            call.doomed = "timeout"
            if call.grace is None:
                call.grace = self._grace
            self._queue.suspects[id_] = call
            self._look_at(call, now)

    def _check_stopped(self, slot: Slot, now: float) -> None:
        """Kill a worker that has been frozen, for example by SIGSTOP, for more than `liveness` seconds."""
        if not self._slots.stopped(slot):
            slot.silent_since = None
            return
        slot.silent_since = slot.silent_since or now
        if now - slot.silent_since > self._liveness:
            call = self._queue.get(self._slots.page.running(slot.number)[0])
            if call is not None and not self._has_looked(slot, call, kills=True):
                return
            if call is not None and not call.doomed:
                call.doomed = "stopped"
            self._slots.signal(slot, signal.SIGKILL)
