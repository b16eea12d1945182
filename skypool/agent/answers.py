"""Ends calls in place of a worker process: sends the client an error for a call that was stopped or whose worker died.

This runs in the agent, the main process of a node.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from skypool.agent import stacks
from skypool.agent.call import NodeCall
from skypool.agent.call_output import CallOutput
from skypool.agent.call_queue import CallQueue
from skypool.agent.capture import PRINTED
from skypool.agent.slots import Slot
from skypool.agent.unacknowledged import Unacknowledged
from skypool.errors import CallTimeout, ConnectionLost, SkypoolError, WorkerDied
from skypool.wire import exceptions
from skypool.wire.exceptions import STOPPED_IN
from skypool.wire.frames import Kind, encode, pad
from skypool.wire.handshake import AgentConfig

_PROGRAMS = 4
"""The most programs whose stacks an error shows."""


class Answers:
    """The part of the agent (a node's main process) that sends errors for calls that no worker process can answer.

    Args:
        config: the node's configuration.
        queue: the calls that have not ended.
        output: the calls' output, whose last lines become part of an error.
        unacknowledged: sends the outcomes (here errors), and keeps them until the client acknowledges them.
    """

    def __init__(
        self, config: AgentConfig, queue: CallQueue, output: CallOutput, unacknowledged: Unacknowledged
    ) -> None:
        self._node = config.node
        self._liveness = config.liveness
        self._queue = queue
        self._output = output
        self._unacknowledged = unacknowledged

    def fail(self, id_: int, error: BaseException) -> None:
        """End the call with this id: send an error to the client, which raises it. This method raises nothing.

        The call is removed from the queue. The error is sent even if the queue does not have the call.
        """
        call = self._queue.calls.get(id_)
        header: dict[str, Any] = {"id": id_, "ok": False, "seconds": 0}
        if call is not None:
            self._queue.forget(id_)
            header["cancelled"] = call.doomed == "cancel"
        dumped = exceptions.dump_error(error, home=True)
        buffers, total = pad(dumped)
        header["lens"] = [len(b) for b in dumped]
        self._unacknowledged.add(id_, 0, [encode(Kind.OUTCOME, header, total), *buffers])

    def stopped(self, call: NodeCall, printed: str = "", said: str = "") -> None:
        """Send the client an error for a call that the agent has made to end. `call.doomed` has the reason.

        The error depends on the reason:

        - "timeout": a CallTimeout.
        - "stopped" (the worker's process was frozen too long, for example by SIGSTOP): a ConnectionLost.
        - any other: a SkypoolError that says that the call was cancelled.

        The call is removed from the queue.

        Args:
            call: the call.
            printed: the end of what the call has printed, if that was captured; "" if not.
            said: the exception that the call raised when its time was over; "" for none.
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
        """End a call whose worker was killed because the agent (the node's main process) failed to read what it wrote.

        The call is removed from the queue.

        Args:
            call: the call.
            fault: what went wrong.
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
        """End a call for which no worker process can be started on this node. It was taken from the queue."""
        error = SkypoolError(
            f"{call.name} cannot run on node {self._node}, because no worker process can be started there: {why}; an "
            "earlier call may have left too many processes, or have changed the machine"
        )
        self.fail(call.id, error)

    def died(self, slot: Slot, call: NodeCall, status: int) -> None:
        """End a call whose worker died while it ran, by sending the client a WorkerDied error.

        The error contains the worker's signal or exit code, and the end of what the call printed. For SIGKILL it also
        says that the machine may have run out of memory. The call is removed from the queue.

        Args:
            slot: the worker's slot (place where one call runs at a time).
            call: the call.
            status: the wait status of the worker's process, as from `os.waitpid`.
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
    """Return what a call was doing when it was to stop; "" if it has not said so. Close the files that say it.

    For a call that ran a program, that is what its Python processes were doing. If none of them has said it, the
    program's command and state follow.
    """
    was = stacks.short(call.mark) if call.mark is not None else ""
    if not was and call.programs:
        told = [text for each in call.programs if (text := each.text())]
        was = "\n".join(told[:_PROGRAMS]) or f"{call.programs[0].command}: {call.programs[0].state}"
    for mark in (call.mark, *call.programs):
        if mark is not None:
            mark.close()
    call.mark = None
    call.programs = ()
    return was
