"""The agent of a node: an event loop that receives calls, passes them to workers and returns their outcomes.

A worker that dies is replaced, and its call gets an error.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from skypool.agent import messages, node_facts
from skypool.agent.batch import Batch, frame_of_ends
from skypool.agent.batch_watch import LOOK, BatchWatch
from skypool.agent.call import NodeCall
from skypool.agent.call_names import NamedCalls
from skypool.agent.call_output import CallOutput
from skypool.agent.call_queue import CallQueue
from skypool.agent.capture import captured
from skypool.agent.client_session import Client
from skypool.agent.failed_calls import Answers
from skypool.agent.gang_steps import GangSteps
from skypool.agent.items import Items
from skypool.agent.lease import Lease
from skypool.agent.messages import call_in, is_large
from skypool.agent.mover_watch import MoverWatch
from skypool.agent.notice import Lookout
from skypool.agent.ownership import Ownership
from skypool.agent.packages import Packages
from skypool.agent.packets import PACKET
from skypool.agent.shared_page import SharedPage
from skypool.agent.slot_plan import GANG_PROCESSES, NodePlan
from skypool.agent.status import Status
from skypool.agent.stop_notice import StopNotice
from skypool.agent.stops import Stops
from skypool.agent.store import Arrivals, Store
from skypool.agent.value_storage import SpareMemory
from skypool.agent.worker_processes import CPU, GANG, MAIN, OWN, SERVICE, Slot, Slots, too_many_processes
from skypool.clock import RunningClock
from skypool.errors import ProtocolError, SkypoolError, SpoolFull, UsageError, protocol_violation
from skypool.gangs.environment import Member
from skypool.wire import codec
from skypool.wire.frames import CALLS_NAMED, WIRE_VERSION, End, Frame, Kind, end_of, ends_in, parse_frame

if TYPE_CHECKING:
    from skypool.agent.guard import Guard
    from skypool.agent.hand_over import HandOver

_TICK = 0.1
"""Seconds between two checks of things that no file descriptor reports, such as the lease and timeouts."""
_HIRED = 4
"""The number of workers that are started before the loop handles other events again."""
_TO_VANISH = 2.0
"""Seconds that a dead worker's call waits, at most, until all processes that it has left are gone."""
_PAUSE = 0.1
"""Seconds until a worker that died before its first call is replaced again. Each later pause is twice as long."""
_LONGEST_PAUSE = 5.0
"""The longest pause in seconds until such a worker is replaced again."""
_UNABLE = 10.0
"""Seconds for which starting a worker is tried in vain before the calls that wait for it fail."""
_PACKETS_AT_ONCE = 64
"""The most packets of one worker that are handled before those of other workers get their turn."""
_OUTCOME = Kind.OUTCOME


class Agent:
    """Event loop in one thread that takes a client's calls and has workers run them.

    Creating an Agent starts nothing; `run` does. Clients connect at the Unix socket `listener`. `page` is the memory
    that the agent shares with its workers and the keeper. `guard` and `runner` are those of `HandOver`.
    """

    def __init__(
        self,
        plan: NodePlan,
        listener: socket.socket,
        page: SharedPage,
        guard: Guard | None = None,
        runner: list[str] | None = None,
    ) -> None:
        config = plan.config
        self._plan = plan
        self.config = config
        self.page = page
        self._clock = RunningClock()
        if config.trust == "data":
            from skypool.trust import sending

            codec.result_writer = sending.DataWriter(config.node, config.allow)  # for the workers, too
        self._poll = select.epoll()
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._registered: set[int] = set()
        self._named = NamedCalls()
        self._slots = Slots(plan, page, self._clock, self._watch)
        self._kept = SpareMemory()
        self._queue = CallQueue(self._slots, self._watch, self._kept)
        self._calls = self._queue.calls
        self._batch_watch = BatchWatch(self._slots, self._queue, self._hear)
        self._noted_pauses = 0.0
        self._arrivals = Arrivals(config.spool, config.spool_memory, self._kept)
        self._client = Client(
            listener,
            self._watch,
            config.liveness,
            self._clock,
            self._on_frame,
            self._take_over,
            self._on_hello,
            self._on_resumed,
            self._arrivals.clear,
            self._kept,
            lambda hello: self._ownership.refusal(hello),
            lambda f, connection: self._ownership.on_other(f, connection),
        )
        self._unacknowledged = self._client.unacknowledged
        self._status = Status(plan, self._slots, self._queue, self._client, self._watch)
        self._lookout = Lookout(config.watch, self._watch, self._status.interrupt)
        self._mover = MoverWatch(self._watch, lambda said: self._client.send(Kind.SAVED, {"folders": said}), page)
        self._gang_steps = GangSteps(self._slots, lambda said: self._client.send(Kind.STEPS, said), self._clock)
        self._call_output = CallOutput(self._slots, self._queue, self._client)
        self._answers = Answers(config, self._queue, self._call_output, self._unacknowledged)
        self._items = Items(self._slots, self._queue, self._client, self._arrivals, self._answers)
        self._stops = Stops(config, self._slots, self._queue, self._clock, self._answers, self._mover)
        self._packages = Packages(config.folder, self._client.send, self._watch)
        self._store = Store(self._packages, self._slots, self._arrivals, self._kept)
        self._handlers = self._handle()
        self._dying: dict[Slot, float] = {}
        self._vacant: dict[Slot, float] = {}
        self._ending = False
        self._keeper = os.getppid()
        self._lease = Lease(config.lease, config.lifetime, config.guard)
        self._stop_notice = StopNotice(page, config.lease)

        def hand_over() -> HandOver:
            from skypool.agent.guard import Guard
            from skypool.agent.hand_over import HandOver

            return HandOver(
                self._watch,
                self._clock,
                self._client,
                self._lease,
                self._handlers,
                self._queue,
                self._stops,
                self._answers,
                self._arrivals,
                guard or Guard(config.guard, page),
                runner,
                lambda: self._mover.reserve(config.lease),
            )

        self._ownership = Ownership(hand_over)

    # --- the loop --------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Start the workers, and run the event loop until the node must end.

        The loop ends when the client sends BYE, the node's deadline has passed, the keeper has died, or SIGTERM
        arrives. Then the workers' process groups get SIGKILL. If a mover saves what they write, the keeper kills them,
        after this method has returned. A connected client gets BYE. Must be called in the main thread, because it sets
        a signal handler.
        """
        signal.signal(signal.SIGTERM, lambda *_: self._bye())
        self._renew()
        gc.freeze()
        gc.enable()  # the loader has switched it off
        for each in self._slots.all:
            self._start(each)
        gc.set_threshold(50_000)  # collect garbage rarely: the agent makes no reference cycles
        ticked = 0.0
        lacking = False
        while not self._ending:
            patience = LOOK if self._batch_watch.alert or self._dying else _TICK
            ready = self._poll.poll(0 if lacking or self._packages.is_behind else patience)
            if len(ready) > 1:  # handle the output of a call before its outcome
                ready.sort(key=lambda each: each[0] in self._slots.output_files, reverse=True)
            self._registered.clear()
            for fd, _ in ready:
                # what is ready may belong to a file that was closed meanwhile, and whose number a new file has
                if fd not in self._registered and (callback := self._callbacks.get(fd)):
                    try:
                        callback()
                    except Exception as e:  # noqa: BLE001 - one worker must not end the agent; others are raised again
                        self._contain(e, self._slots.of_file(fd))
            self._client.flush()  # outcomes do not wait for the checks that follow
            turned = time.monotonic()
            ticks = turned - ticked >= _TICK
            if ticks or self._dying or self._stops.cancelling or self._batch_watch.alert or self._packages.is_behind:
                now = self._read_clock()
                if ticks:
                    ticked = turned
                    self._tick(now)
                if self._dying:
                    self._bury()
                if self._stops.cancelling:
                    self._stops.look()
                if self._batch_watch.alert:
                    self._batch_watch.look(now)
                if self._packages.is_behind:
                    self._packages.proceed()
                self._client.flush()
            lacking = self._slots.spare > 0 and self._hire()
        self._mover.end()
        if not self._mover.pid or os.getppid() != self._keeper:  # else the keeper does, when the mover has looked
            for each in self._slots.all:
                self._slots.signal(each, signal.SIGKILL)
        self._client.send(Kind.BYE, {})
        self._client.flush()

    def _hire(self) -> bool:
        """Start up to `_HIRED` CPU workers while calls wait for them. Return True if more may be needed."""
        for _ in range(_HIRED):
            if not self._queue.lacks_workers():
                return False
            self._vacant[self._slots.add_cpu_slot()] = 0.0
            self._fill(self._clock())
        return not self._vacant

    def _watch(self, fd: int, events: int, callback: Callable[[], None]) -> None:
        """Have the loop call `callback` on these epoll events of `fd`, instead of what was set before. 0 for never."""
        known = fd in self._callbacks
        if not events:
            if known:
                self._poll.unregister(fd)
                del self._callbacks[fd]
            return
        self._callbacks[fd] = callback
        if known:
            self._poll.modify(fd, events)
        else:
            self._registered.add(fd)
            self._poll.register(fd, events)

    def _read_clock(self) -> float:
        """Return the time of the agent's clock. If the whole node was paused, note that for the calls that ran then."""
        now = self._clock()
        pause = self._clock.paused - self._noted_pauses
        self._noted_pauses = self._clock.paused
        # all processes of the node were stopped; neither the clock nor the timeouts of calls count this time
        if pause:
            until = time.monotonic()
            for slot in self._slots.all:
                call, began = self.page.running(slot.number)
                if not until - pause < began <= until:
                    slot.add_pause(call, pause)
        return now

    def _tick(self, now: float) -> None:
        """Renew the lease, and check what no file descriptor reports. `now` is the time of the agent's clock."""
        self._renew()
        self._lookout.tick(now)
        self._status.measure(now)
        self._mover.tick(now, is_idle=not self._calls)
        self._ownership.tick(now)
        self._gang_steps.tick(now)
        self._packages.tick()
        self._kept.let_go(time.monotonic())  # `now` stands still while the agent is paused
        if time.monotonic() > self.page.deadline or os.getppid() != self._keeper:
            self._bye()
        if self._queue.suspects:
            self._stops.look()
        for slot in list(self._slots.all):
            try:
                if slot.waiting:
                    self._slots.retell(slot)
                self._stops.look_at_slot(slot, now)
            except Exception as e:  # noqa: BLE001 - one worker must not end the agent
                self._contain(e, slot)
        if self._slots.has_orphans:
            self._slots.end_orphans()
        if self._vacant:
            self._fill(now)

    def _renew(self) -> None:
        """Renew the deadline at which everything on the node ends. Pauses of the whole node do not use up the lease."""
        if self._lease.lingers and self._status.works():
            self._lease.worked()
        reserve = self._stop_notice.steady(self._mover.reserve(self.config.lease))
        self.page.end = self._lease.renew(self._ownership.heard(self._client.heard) + self._clock.paused, reserve)
        self.page.deadline = self.page.end - reserve
        self._stop_notice.look(self.page.deadline, reserve, self._lease.why)

    def _bye(self) -> None:
        self._ending = True

    # --- from the client -------------------------------------------------------------------------------------

    def _on_frame(self, f: Frame) -> None:
        """Handle a frame from the client. Raises ProtocolError for an invalid one; the caller then disconnects."""
        handle = self._handlers.get(f.kind)
        if handle is None:
            raise protocol_violation(f"the client sent a {f.kind.name} message, which a client must not send")
        handle(f)

    def _handle(self) -> dict[Kind, Callable[[Frame], None]]:
        """Return the handler for each kind of frame that a client sends, except HELLO, which `Client` handles."""
        return {
            Kind.CALL: self._on_call,
            Kind.CALLS: self._on_calls,
            Kind.BLOB: self._arrivals.add,
            Kind.ACK: self._on_ack,
            Kind.CREDIT: self._items.on_credit,
            Kind.ITEM: self._items.on_item,
            Kind.PING: self._on_ping,
            Kind.CANCEL: lambda f: self._stops.cancel(*messages.cancel_in(f)),
            Kind.FUNCTION: lambda f: self._store.keep("function", f),
            Kind.OBJECT: lambda f: self._store.keep("object", f),
            Kind.DROP: lambda f: self._store.drop(messages.dropped_in(f)),
            Kind.MODULE: self._packages.on_module,
            Kind.RECALL: lambda f: self._on_recall(*messages.recall_in(f)),
            Kind.NOTICE: lambda f: self._slots.notify(*messages.notice_in(f)),
            Kind.AGREE: lambda f: self._gang_steps.agree(messages.agree_in(f)),
            Kind.SAVE: lambda f: self._mover.order(messages.order_in(f), self._stops.cancel_all),
            Kind.HANDOVER: lambda f: self._ownership.on_frame(f),
            Kind.BYE: self._on_bye,
        }

    def _on_ping(self, f: Frame) -> None:
        left, stop, linger = messages.ping_in(f)
        if left is not None:
            self._lease.allow(left)
            self._stop_notice.client_stops(stop)
        if linger is not None:
            self._lease.linger(*linger)
        self._status.send()

    def _on_bye(self, f: Frame) -> None:
        """End the node, or let it stay without this client for the time that the client says."""
        stay = messages.stay_in(f)
        if stay is not None:
            self._lease.stay(stay)
            self._client.leave()
        else:
            self._mover.kill()  # the client has had saved what is left
            self._bye()

    def _take_over(self) -> str:
        """Let another client have the node for a whole lease. Return "", or why the client cannot have it."""
        return self._lease.take(time.monotonic())

    def _on_hello(self, is_new: bool, hello: Mapping[str, Any]) -> dict[str, Any]:
        """Return the header of WELCOME: slots, devices, the machine's state, and the known calls and functions."""
        if is_new:
            # workers learn that what the former client was sending will not arrive
            self._store.wait_no_more()
        if (linger := messages.linger_in(hello)) is not None:
            self._lease.linger(*linger)
        self._ownership.on_accepted(hello)
        calls = [*self._calls, *self._unacknowledged.calls]
        self._named.keep_only(calls)
        return {
            "wire": WIRE_VERSION,
            "trust": self.config.trust,
            "pid": os.getpid(),
            "slots": self._slots.counts[MAIN],
            "cpu_slots": self._plan.cpu_slots,
            "devices": len({name for slot in self._plan.slots for name in slot.devices}),
            "calls": calls,
            "cpu_calls": [id_ for id_, call in self._calls.items() if call.kind == CPU],
            "services": [*self._named.services],
            "quiet": [id_ for id_, call in self._calls.items() if not call.busy],
            "names": self._named.by_name(),
            "streams": [*self._named.generators],
            "functions": list(self._store.functions),
            "objects": list(self._store.objects),
            "health": node_facts.refreshed(self._plan.health, self.config.cwd).to_json(),
        }

    def _on_resumed(self) -> None:
        """Repeat what may have been lost with an earlier connection: a notice, and requests for modules and items."""
        self._status.resume()
        self._mover.tell_again()
        self._store.ask_again()
        self._items.ask_again()

    def _on_ack(self, f: Frame) -> None:
        calls, output = messages.ack_in(f)
        self._unacknowledged.acknowledge(calls, output)
        for call in self._named.acknowledge(calls):  # who has the end of a stream has its items
            self._unacknowledged.consumed(call, sys.maxsize)
        self._slots.end_processes_of(calls)

    def _on_call(self, f: Frame) -> None:
        """Queue a call, or start it at once if it is a service or of a gang. A call that is known is ignored."""
        kind = self._slots.kind_of(f.header)
        call = call_in(f, kind)
        id_ = call.id
        if id_ in self._calls or self._unacknowledged.knows(id_):
            self._arrivals.discard(f)
            return
        # raises ProtocolError if the function was never announced
        call.name = self._named.names[id_] = self._store.name(call.fn)
        if is_large(f):
            blob = self._arrivals.take(id_)
            if isinstance(blob, SpoolFull):
                self._named.forget((id_,))
                self._answers.fail(id_, blob)
                return
            call.blob = blob
        if call.streams:
            self._named.generators.add(id_)
        if kind == SERVICE:
            self._named.services.add(id_)
        if kind in OWN:
            self._begin_own(call, messages.member_in(f), messages.wants_no_devices(f))
        else:
            self._queue.add(call)

    def _begin_own(self, call: NodeCall, member: Member | None, on_cpu: bool) -> None:
        """Start a worker that runs only this call: a process of a gang, or a service if `member` is None."""
        self._queue.add_begun(call)
        slot = None
        try:
            if member is None:
                slot = self._slots.add_service_slot(call.id, on_cpu)
            else:
                running = [each for each in self._slots.all if each.kind == GANG]
                if sum(self.page.running(each.number)[0] in self._calls for each in running) >= GANG_PROCESSES:
                    raise too_many_processes()
                slot = self._slots.add_gang_slot(member, on_cpu)
            self._start(slot, call)
        except Exception as e:  # noqa: BLE001 - whatever keeps one call from its start must not end the agent
            if slot is not None:
                self._slots.remove(slot)
            if isinstance(e, UsageError):
                self._answers.fail(call.id, e)
                return
            if not isinstance(e, OSError):
                traceback.print_exc()
            what = f"service {call.name}" if member is None else f"rank {member.rank} of {call.name}"
            advice = "close other services there" if member is None else "use fewer processes on each node"
            error = SkypoolError(
                f"{what} cannot be started on node {self.config.node}: {e}; {advice}, or use a machine with more memory"
            )
            self._answers.fail(call.id, error)

    def _on_calls(self, f: Frame) -> None:
        """Queue the calls of one frame as a batch, or one by one. Raises ProtocolError for an invalid frame."""
        if len(f.raw) > PACKET:
            raise protocol_violation(
                f"the client sent a message of {len(f.raw)} bytes with several calls, and the limit is {PACKET} bytes"
            )
        batch = Batch(f, self._store.name(f.header["fn"]), self._slots.kind_of(f.header))
        new = batch.ids
        if not self._calls.keys().isdisjoint(new) or self._unacknowledged.knows_any(new):
            new = [id_ for id_ in batch.ids if id_ not in self._calls and not self._unacknowledged.knows(id_)]
        self._named.add(new, batch.name)
        # in a batch, output that goes directly to file descriptor 1 or 2 would not show which call wrote it
        if new is batch.ids and batch.fn not in self._call_output.apart:
            self._queue.add(batch)
            self._batch_watch.came()
        else:
            for id_ in new:
                self._queue.add(batch.single(id_))

    def _on_recall(self, n: int, on_cpu: bool) -> None:
        """Give back up to `n` calls that have not begun, the last ones first. Send RECALLED also if there are none."""
        back = self._queue.give_back(n, CPU if on_cpu and len(self._slots.counts) > 1 else MAIN)
        self._named.forget(back)
        for at in range(0, len(back) or 1, CALLS_NAMED):
            self._client.send(Kind.RECALLED, {"calls": back[at : at + CALLS_NAMED], "cpu": on_cpu})
        self._queue.pump()

    # --- from workers ----------------------------------------------------------------------------------------

    def _start(self, slot: Slot, call: NodeCall | None = None) -> None:
        self._slots.start(slot, self._on_packets, self._call_output.read, self._on_death, call)
        self._slots.find_outputs()

    def _on_packets(self, slot: Slot) -> None:
        """Handle up to `_PACKETS_AT_ONCE` packets of a worker. Further ones are left for the loop's next turn."""
        if self._read_packets(slot):
            self._batch_watch.alert = True

    def _hear(self, slot: Slot) -> None:
        """Handle packets of a worker. An error kills the worker and is not raised, as in the event loop."""
        try:
            self._on_packets(slot)
        except Exception as e:  # noqa: BLE001 - one worker must not end the agent
            self._contain(e, slot)

    def _read_packets(self, slot: Slot) -> bool:
        """Handle up to `_PACKETS_AT_ONCE` packets of a worker without waiting. Return True if there may be more."""
        more = True
        for _ in range(_PACKETS_AT_ONCE):
            received = self._slots.receive(slot)
            if received is None:
                self._on_ends(slot)
                more = False
                break
            packet, fds = received
            f = parse_frame(memoryview(packet))
            if f.kind is _OUTCOME:
                self._on_outcome(slot, f, packet)
                if not self._calls:
                    more = False  # send the outcome at once, as no other packet is expected
                    break
            elif f.kind is Kind.OUTCOMES:
                slot.ended += slot.batch.ended()
            else:
                self._on_packet(slot, f, packet, fds)
        if slot.waiting:
            self._slots.retell(slot)
        return more

    def _on_packet(self, slot: Slot, f: Frame, packet: bytes, fds: list[int]) -> None:
        match f.kind:
            case Kind.OUTPUT:
                self._call_output.add(slot, *messages.output_in(f))
            case Kind.YIELD:
                items = messages.yielded_in(f)
                self._unacknowledged.add(items.id, items.seq, [packet], items.is_large)
            case Kind.BLOB:
                told = messages.written_in(f)
                self._unacknowledged.on_written(told, fds, told.id in self._calls)
            case Kind.FETCH:
                self._store.fetch(slot, *messages.wanted_in(f))
            case Kind.CREDIT:
                self._items.pull(messages.pull_in(f))
            case Kind.RECALLED:
                self._queue.again([messages.id_in(f)])  # its worker ends now, and then the call goes to another one
            case _:
                raise ProtocolError(
                    f"a worker process on this node sent a {f.kind.name} message, which a worker must not send; this "
                    "is a bug of skypool, so please report it"
                )

    def _on_outcome(self, slot: Slot, f: Frame, packet: bytes) -> None:
        outcome = messages.outcome_in(f)
        id_ = outcome.id
        if slot.kind == SERVICE:
            if outcome.late is not None and id_ in self._calls and self._is_late(slot, id_, outcome.late):
                call = self._queue.get(id_)
                assert call is not None
                call.doomed = "timeout"
            else:  # sent when its processes are gone
                slot.answer = packet, outcome.is_large, outcome.done
        elif id_ in self._calls:
            if outcome.ended and (call := self._queue.get(id_)) is not None:
                call.ended = outcome.ended
            if outcome.late is not None and self._is_late(slot, id_, outcome.late):
                self._end_late(slot, outcome)
                return
            self._end(slot, id_, outcome.done)
            self._unacknowledged.add(id_, 0, [packet], outcome.is_large)

    def _is_late(self, slot: Slot, id_: int, seconds: float) -> bool:
        """Return True if a call that took `seconds`, less the pauses of the whole node, exceeded its timeout."""
        limit = self._calls[id_].timeout
        return limit is not None and seconds - slot.paused_during(id_) > limit

    def _end_late(self, slot: Slot, outcome: messages.Outcome) -> None:
        """End a call that took longer than its timeout. Its outcome is discarded."""
        call = self._queue.get(outcome.id)
        assert call is not None
        call.doomed = "timeout"
        self._call_output.end_gap(slot, call)
        slot.kill_at = None
        self._status.done += 1
        self._answers.stopped(call, outcome.printed, outcome.said)
        self._batch_watch.ended()

    def _end(self, slot: Slot, id_: int, done: bool = False) -> None:
        """Forget a call that has ended, and call off a kill of its worker. `done`: its arguments are no longer used."""
        call = self._calls[id_]
        if isinstance(call, NodeCall) and call.dropped:
            self._call_output.end_gap(slot, call)
        slot.kill_at = None
        self._status.done += 1
        self._queue.forget(id_, done)
        self._batch_watch.ended()

    def _on_ends(self, slot: Slot) -> None:
        """Send the client, in one frame, the outcomes of batched calls that a worker has written to shared memory."""
        if not slot.ended:
            return
        body = bytes(slot.ended)
        slot.ended = bytearray()
        ends: list[End] = []
        fault = None
        try:
            ends.extend(ends_in(body))  # those before a fault are added
        except ProtocolError as e:
            fault = e
        ids = [end[0] for end in ends]
        if fault is not None or not self._calls.keys() >= set(ids):  # or the agent itself has answered some meanwhile
            kept = [end for end in ends if end[0] in self._calls]
            ids = [end[0] for end in kept]
            body = b"".join(end_of(*end) for end in kept)
        for id_ in ids:
            if isinstance(self._calls[id_], Batch):  # it was never separated from its batch
                del self._calls[id_]
                self._status.done += 1
            else:
                self._end(slot, id_)
        if ids:
            self._batch_watch.ended()
            self._unacknowledged.add_together(ids, frame_of_ends(body))
        if fault is not None:
            raise fault

    # --- the end of workers ----------------------------------------------------------------------------------

    def _contain(self, error: Exception, slot: Slot | None) -> None:
        """Log an error that a worker's data has caused in the agent, and kill that worker. Without `slot`, raise it."""
        if slot is None:
            raise error
        traceback.print_exception(error)
        slot.fault = slot.fault or f"{type(error).__name__}: {error}"
        for fd in (slot.channel.fileno(), *slot.outputs.values()):
            self._slots.ignore(fd)
        self._slots.signal(slot, signal.SIGKILL)

    def _on_death(self, slot: Slot) -> None:
        """Handle the death of a worker: kill the processes that it has left, and forget it when they are gone."""
        self._slots.ignore(slot.pidfd)
        self._dying[slot] = self._clock()
        self._bury()

    def _bury(self) -> None:
        """Kill processes that dead workers have left. Forget the workers when none is left, or after `_TO_VANISH` s."""
        is_clean = self._slots.end_orphans()
        now = self._clock()
        for slot, since in list(self._dying.items()):
            if is_clean or now - since > _TO_VANISH:
                status = self._slots.reap(slot)
                if status is not None:
                    del self._dying[slot]
                    self._forget(slot, status)

    def _forget(self, slot: Slot, status: int) -> None:
        """Answer for the call of a dead worker, and start a new worker unless the slot was made for one call."""
        for hear in (self._hear_last_packets, self._hear_last_output, self._hear_last_ends):
            try:
                hear(slot)
            except Exception as e:  # noqa: BLE001 - what a worker wrote must not end the agent
                self._contain(e, slot)
        # calls that it had not begun are queued again, before all others
        self._queue.take_back_from([slot])
        id_ = self.page.running(slot.number)[0]
        call = self._queue.get(id_)
        if call is not None and call.offered:
            try:
                self._answer_for(slot, call, status)
            except Exception as e:  # noqa: BLE001 - as above
                self._contain(e, slot)
                self._answers.broken(call, slot.fault)
        self._slots.close(slot)
        slot.failures = 0 if id_ else slot.failures + 1
        slot.fault = ""
        slot.answer = None
        slot.ended.clear()
        self._store.forget_worker(slot)
        self._slots.remove(slot)
        if slot.kind not in OWN:
            self._queue.mend()
            now = self._clock()
            self._vacant[slot] = now + (min(_PAUSE * 2**slot.failures, _LONGEST_PAUSE) if slot.failures > 1 else 0.0)
            self._fill(now)
            self._queue.take_back()
            self._queue.take_back_from(self._slots.all)
            taken = self._slots.taken()
            for each in list(self._calls):
                if self._calls[each].offered and each not in taken:
                    self._stops.note_missing(each)
            self._queue.pump()
        self._slots.find_outputs()

    def _hear_last_packets(self, slot: Slot) -> None:
        while self._read_packets(slot):
            pass

    def _hear_last_output(self, slot: Slot) -> None:
        for fd in list(slot.outputs):
            self._call_output.read(slot, fd)

    def _hear_last_ends(self, slot: Slot) -> None:
        slot.ended += slot.batch.ended()
        self._on_ends(slot)

    def _answer_for(self, slot: Slot, call: NodeCall, status: int) -> None:
        """End the call of a dead worker. `status` is the worker's wait status, as from `os.waitpid`."""
        self._call_output.end_gap(slot, call)
        if slot.answer is not None:
            packet, is_large, done = slot.answer
            self._end(slot, call.id, done)
            self._unacknowledged.add(call.id, 0, [packet], is_large)
        elif call.doomed:
            self._answers.stopped(call, captured(slot.printed))
        elif slot.fault:
            self._answers.broken(call, slot.fault)
        else:
            self._answers.died(slot, call, status)

    def _fill(self, now: float) -> None:
        """Start a worker in each vacant slot whose pause is over. If that fails, try again after a longer pause."""
        for slot, at in list(self._vacant.items()):
            if now < at:
                continue
            why = CallOutput.last_line(slot) if slot.failures > 1 else ""
            try:
                self._start(slot)
            except OSError as e:
                why = f"{type(e).__name__}: {e}"
                slot.failures += 1
                self._vacant[slot] = now + min(_PAUSE * 2**slot.failures, _LONGEST_PAUSE)
            else:
                del self._vacant[slot]
                self._slots.all.append(slot)
                self._slots.find_outputs()
                slot.tail.clear()
            slot.failing_since = (slot.failing_since or now) if slot.failures else 0.0
            if why and now - slot.failing_since > _UNABLE:
                self._give_up(slot.kind, why)

    def _give_up(self, kind: int, why: str) -> None:
        """End all calls for a kind of slot with the error `why`, unless a slot of this kind has a worker that works."""
        if any(each.kind == kind and not each.failures for each in self._slots.all):
            return
        for id_ in list(self._calls):
            call = self._queue.get(id_)
            if call is not None and call.kind == kind and not call.doomed:
                call.doomed = "unable"
        for call in self._queue.doomed():
            if call.doomed == "unable":
                self._answers.unable(call, why)
            else:
                self._answers.stopped(call)
        self._queue.pump()
