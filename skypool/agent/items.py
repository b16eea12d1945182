"""Passes items of iterator arguments from the client to calls, and credit for the items that calls send.

Credit is the client's message that it has taken items of a generator call, so that the call may send more.
"""

from __future__ import annotations

from skypool.agent.call_queue import CallQueue
from skypool.agent.client_session import Client
from skypool.agent.failed_calls import Answers
from skypool.agent.messages import Pull, credit_in, item_in
from skypool.agent.store import Arrivals
from skypool.agent.worker_processes import Slots
from skypool.errors import SpoolFull
from skypool.wire.frames import Frame, Kind


class Items:
    """The part of the agent that asks the client for items, and gives items and credit to the worker of their call."""

    def __init__(self, slots: Slots, queue: CallQueue, client: Client, arrivals: Arrivals, answers: Answers) -> None:
        self._slots = slots
        self._queue = queue
        self._client = client
        self._arrivals = arrivals
        self._answers = answers

    def on_credit(self, f: Frame) -> None:
        """Forget the items of a generator call that the client has taken, as a CREDIT says, and tell the worker."""
        credit = credit_in(f)
        self._client.unacknowledged.consumed(credit.id, credit.seq)
        self._pass_on(credit.id, f)

    def on_item(self, f: Frame) -> None:
        """Pass an item of a call's iterator argument to the worker that waits for it. If none waits, drop the item."""
        id_, arg, n = item_in(f)
        call = self._queue.get(id_)
        if call is not None and call.pulls.get(arg) == n and call.given.get(arg, 0) < n:
            call.given[arg] = n
            self._pass_on(id_, f)
        else:
            self._arrivals.discard(f)

    def _pass_on(self, id_: int, f: Frame) -> None:
        """Give a frame to the worker that runs its call. If no worker runs it, drop the frame."""
        slot = self._slots.running(id_)
        if slot is None or id_ not in self._queue.calls:
            self._arrivals.discard(f)
            return
        blob = self._arrivals.take_of(f)
        if isinstance(blob, SpoolFull):
            self._answers.fail(id_, blob)
            return
        self._slots.tell(slot, [bytes(f.raw)], [blob.fd] if blob else [], give=True)

    def pull(self, wanted: Pull) -> None:
        """Ask the client for the next item of an iterator argument. Does nothing if the call has ended."""
        call = self._queue.get(wanted.id)
        if call is not None:
            call.pulls[wanted.arg] = call.pulls.get(wanted.arg, 0) + 1
            self._client.send(Kind.CREDIT, {"id": call.id, "arg": wanted.arg, "n": call.pulls[wanted.arg]})

    def ask_again(self) -> None:
        """Ask the client again, after a reconnection, for the items that workers wait for."""
        for id_, call in self._queue.calls.items():
            for arg, n in call.pulls.items():
                if call.given.get(arg, 0) < n:
                    self._client.send(Kind.CREDIT, {"id": id_, "arg": arg, "n": n})
