"""Ends calls in place of a worker: sends the client an error for a call that was stopped or whose worker died."""

from __future__ import annotations

import os
import signal
from typing import Any

from skypool.agent import stacks
from skypool.agent.call import NodeCall
from skypool.agent.call_output import CallOutput
from skypool.agent.call_queue import CallQueue
from skypool.agent.capture import PRINTED
from skypool.agent.unacknowledged import Unacknowledged
from skypool.agent.worker_processes import Slot
from skypool.errors import CallTimeout, ConnectionLost, SkypoolError, WorkerDied
from skypool.wire import exceptions
from skypool.wire.agent_config import AgentConfig
from skypool.wire.exceptions import STOPPED_IN
from skypool.wire.frames import Kind, encode, pad

_PROGRAMS = 4
"""The most programs whose stacks an error shows."""


class Answers:
    """The part of the agent that sends errors for calls that no worker can answer. Each method ends the call."""

    def __init__(
        self, config: AgentConfig, queue: CallQueue, output: CallOutput, unacknowledged: Unacknowledged
    ) -> None:
        self._node = config.node
        self._liveness = config.liveness
        self._queue = queue
        self._output = output
        self._unacknowledged = unacknowledged

    def fail(self, id_: int, error: BaseException) -> None:
        """End the call with this id: remove it from the queue, and send the client `error` as its outcome.

        The client raises the error; this method raises nothing. The error is sent even if the queue lacks the call.
        """
        call = self._queue.calls.get(id_)
        header: dict[str, Any] = {"id": id_, "ok": False, "seconds": 0}
        if call is not None:
            self._queue.forget(id_)
            if isinstance(call, NodeCall):
                call.doomed = call.doomed or "lost"
            header["cancelled"] = call.doomed == "cancel"
        dumped = exceptions.dump_error(error, home=True)
        buffers, total = pad(dumped)
        header["lens"] = [len(b) for b in dumped]
        self._unacknowledged.add(id_, 0, [encode(Kind.OUTCOME, header, total), *buffers])

    def stopped(self, call: NodeCall, printed: str = "", said: str = "") -> None:
        """End a call that the agent has stopped, for the reason in `call.doomed`.

        The client gets a CallTimeout for "timeout", a ConnectionLost for "stopped" (its worker was frozen), and for
        other reasons a SkypoolError that says that the call was cancelled.

        Args:
            printed: the end of the call's captured output, for a note of the error; "" for no note.
            said: the exception that the call raised when its time was over, for another note; "" for no note.
        """
        error: SkypoolError
        if call.doomed == "timeout":
            error = CallTimeout(
                f"{call.name} ran longer than its timeout of {call.timeout:g} s (imports do not count) and was ended; "
                "set a longer timeout= if the call needs more time"
            )
        elif call.doomed == "stopped":
            error = ConnectionLost(
                f"the worker process that ran {call.name} was stopped (as by SIGSTOP), or lost its main thread, for "
                f"longer than liveness={self._liveness:g} s and was replaced; send the call again",
                self._node,
            )
        else:
            error = SkypoolError(f"{call.name} was cancelled")
        if was := _last_seen(call):
            error.add_note(f"{STOPPED_IN}{was}")
        if said:
            error.add_note(f"when its time was over, it raised {said}")
        if printed:
            error.add_note(f"{PRINTED}{printed}")
        self.fail(call.id, error)

    def broken(self, call: NodeCall, fault: str) -> None:
        """End a call whose worker the agent has killed. The client gets a WorkerDied error.

        `fault` is the text of the error that data of this worker has caused in the agent.
        """
        error = WorkerDied(
            call.name,
            signal=signal.SIGKILL,
            node=self._node,
            hint=f"skypool has replaced it, because it wrote what its agent does not understand ({fault}): the "
            "function must not use file descriptors that it did not open",
        )
        self.fail(call.id, error)

    def unable(self, call: NodeCall, why: str) -> None:
        """End a call for which no worker can be started on this node. The client gets a SkypoolError that says `why`.

        The call must have been taken off the list of waiting calls before.
        """
        error = SkypoolError(
            f"{call.name} cannot run on node {self._node}, because no worker process can be started there: {why}; an "
            "earlier call may have left too many processes, or have changed the machine"
        )
        self.fail(call.id, error)

    def died(self, slot: Slot, call: NodeCall, status: int) -> None:
        """End a call whose worker died while it ran the call. The client gets a WorkerDied error.

        `status` is the worker's wait status, as from `os.waitpid`. The error has the signal or exit code from it, and
        the end of what the call printed. For SIGKILL it also says that the machine may have run out of memory.
        """
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        hint = ""
        if number == signal.SIGKILL:
            hint = (
                "skypool did not send this signal; usually the kernel sends it when the machine's memory runs out: "
                "try a smaller input"
            )
        error = WorkerDied(
            call.name,
            signal=number,
            exitcode=None if number else os.WEXITSTATUS(status),
            tail=self._output.tail(slot, call),
            node=self._node,
            hint=hint,
        )
        self.fail(call.id, error)


def _last_seen(call: NodeCall) -> str:
    """Return what a call was doing when it was asked to stop, "" if unknown. Close the files with its stacks."""
    was = stacks.short(call.mark) if call.mark is not None else ""
    if not was and call.programs:
        # the call runs a program: show its Python processes, or else the program's command and state
        told = [text for each in call.programs if (text := each.text())]
        was = "\n".join(told[:_PROGRAMS]) or f"{call.programs[0].command}: {call.programs[0].state}"
    for mark in (call.mark, *call.programs):
        if mark is not None:
            mark.close()
    call.mark = None
    call.programs = ()
    return was
