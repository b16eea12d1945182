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
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from skypool.agent import health
from skypool.agent.answers import Answers
from skypool.agent.batch import Batch, frame_of_ends
from skypool.agent.batch_watch import LOOK, BatchWatch
from skypool.agent.call import NodeCall
from skypool.agent.call_output import CallOutput
from skypool.agent.call_queue import CallQueue
from skypool.agent.capture import captured
from skypool.agent.client import Client
from skypool.agent.lease import Lease
from skypool.agent.notice import Lookout
from skypool.agent.packages import Packages
from skypool.agent.packets import PACKET
from skypool.agent.plan import GANG_PROCESSES, NodePlan
from skypool.agent.shared_page import SharedPage
from skypool.agent.slots import CPU, GANG, MAIN, OWN, SERVICE, Slot, Slots, too_many_processes
from skypool.agent.stops import Stops
from skypool.agent.store import Arrivals, Store
from skypool.agent.value_storage import SpareMemory
from skypool.clock import RunningClock
from skypool.errors import ProtocolError, SkypoolError, SpoolFull, UsageError, protocol_violation
from skypool.gangs.environment import Member
from skypool.wire import codec
from skypool.wire.frames import CALLS_NAMED, WIRE_VERSION, End, Frame, Kind, end_of, ends_in, parse_frame

if TYPE_CHECKING:
    from skypool.agent import monitor

_TICK = 0.1
"""Seconds between two checks of things that no file descriptor reports, such as the lease and timeouts."""
_UNMEASURED = 0.5
"""Seconds after the start of the loop in which nothing is measured on a node without devices."""
_HIRED = 4
"""The number of workers that are started before the loop handles other events again."""
_TO_VANISH = 2.0
"""Seconds that a dead worker's call waits, at most, until all processes that it has left are gone."""
_PAUSE = 0.1
"""Seconds until a worker that died before its first call is replaced again. Each later pause is twice as long."""
_LONGEST_PAUSE = 5.0
"""The longest such pause in seconds."""
_UNABLE = 10.0
"""Seconds after which calls fail for which no worker can be started."""
_PACKETS_AT_ONCE = 64
"""The number of packets of one worker that are handled before those of other workers."""
_OUTCOME = Kind.OUTCOME


class Agent:
    """Event loop in one thread that takes a client's calls and has workers run them.

    Creating an Agent starts nothing; `run` does. Clients connect at the Unix socket `listener`.
    """

    def __init__(self, plan: NodePlan, listener: socket.socket, page: SharedPage) -> None:
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
        self._outputs: set[int] = set()
        self._names: dict[int, str] = {}
        self._generators: set[int] = set()  # like _names, also those that have ended
        self._services: set[int] = set()
        self._slots = Slots(plan, page, self._clock, self._watch)
        self._kept = SpareMemory()
        self._queue = CallQueue(self._slots, self._watch, self._kept)
        self._calls = self._queue.calls
        self._batch_watch = BatchWatch(self._slots, self._queue, self._hear)
        self._noted_pauses = 0.0
        self._lookout = Lookout(config.watch, self._watch, self._on_interruption)
        self._measured = plan.health.devices if plan.health.monitored else ()
        self._measures_at: float | None = None
        self._monitor: monitor.Monitor | None = None
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
        )
        self._unacknowledged = self._client.unacknowledged
        self._call_output = CallOutput(self._slots, self._queue, self._client)
        self._answers = Answers(config, self._queue, self._call_output, self._unacknowledged)
        self._stops = Stops(config, self._slots, self._queue, self._clock, self._answers)
        self._packages = Packages(config.folder, self._client.send, self._watch)
        self._store = Store(self._packages, self._slots, self._arrivals, self._kept)
        self._handlers = self._handle()
        self._done = self._seen_done = 0
        self._dying: dict[Slot, float] = {}
        self._vacant: dict[Slot, float] = {}
        self._ending = False
        self._keeper = os.getppid()
        self._lease = Lease(config.lease, config.lifetime, config.guard)

    # --- the loop --------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Start the workers, and run the event loop until the node must end. Then kill all workers and return.

        The loop ends when the client sends BYE, the node's deadline has passed, the keeper has died, or SIGTERM
        arrives. Then the workers' process groups get SIGKILL, and a connected client gets BYE. Must be called in the
        main thread, because it sets a signal handler.
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
            ready = self._poll.poll(0 if lacking else patience)
            if len(ready) > 1:  # handle the output of a call before its outcome
                ready.sort(key=lambda each: each[0] in self._outputs, reverse=True)
            self._registered.clear()
            for fd, _ in ready:
                # what is ready may belong to a file that was closed meanwhile, and whose number a new file has
                if fd not in self._registered and (callback := self._callbacks.get(fd)):
                    try:
                        callback()
                    except Exception as e:  # noqa: BLE001 - one worker must not end the agent; others are raised again
                        self._contain(e, self._slots.of_file(fd))
            if self._dying:
                self._bury()
            if self._stops.cancelling:
                self._stops.look()
            now = self._read_clock()
            if self._batch_watch.alert:
                self._batch_watch.look(now)
            if now - ticked >= _TICK:
                ticked = now
                self._tick(now)
            if self._slots.spare:
                lacking = self._hire()
            self._client.flush()
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
        """Have the loop call `callback` on these epoll events of a file descriptor; `events` 0 stops watching.

        New events and callback replace earlier ones.
        """
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
        """Return the agent's clock in seconds, and note any new pause of the whole node for the calls that it stopped.

        In a pause, all processes of the node are stopped. The clock leaves pauses out, and so do the timeouts of calls.
        """
        now = self._clock()
        pause = self._clock.paused - self._noted_pauses
        self._noted_pauses = self._clock.paused
        if pause:
            until = time.monotonic()
            for slot in self._slots.all:
                call, began = self.page.running(slot.number)
                if not until - pause < began <= until:
                    slot.add_pause(call, pause)
        return now

    def _tick(self, now: float) -> None:
        """Renew the lease, and check what no file descriptor reports. `now` is the agent's clock, in seconds."""
        self._renew()
        self._lookout.tick(now)
        self._measure(now)
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
        """Set the deadline at which everything on the node ends. Pauses of the whole node do not use up the lease."""
        if self._lease.lingers and self._works():
            self._lease.worked()
        self.page.deadline = self._lease.renew(self._client.heard + self._clock.paused)

    def _works(self) -> bool:
        """Return True if a call waits or runs, or has ended since the last call of this method.

        Idle services and generators that wait for their client do not count.
        """
        done, self._seen_done = self._seen_done, self._done
        stalled = self._stalled()
        return self._done > done or any(call.busy and id_ not in stalled for id_, call in self._calls.items())

    def _stalled(self) -> list[int]:
        """Return the ids of generators that wait until their client takes items."""
        return [id_ for slot in self._slots.all if (id_ := self.page.stalled(slot.number)) in self._calls]

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
            Kind.CREDIT: self._on_credit,
            Kind.ITEM: self._on_item,
            Kind.PING: self._on_ping,
            Kind.CANCEL: lambda f: self._stops.cancel(f.header["id"], float(f.header["grace"])),
            Kind.FUNCTION: lambda f: self._store.keep("function", f),
            Kind.OBJECT: lambda f: self._store.keep("object", f),
            Kind.DROP: lambda f: self._store.drop(f.header["key"]),
            Kind.MODULE: self._packages.on_module,
            Kind.RECALL: lambda f: self._on_recall(f.header["n"], bool(f.header["cpu"])),
            Kind.NOTICE: lambda f: self._slots.notify({*f.header["calls"]}, float(f.header["at"])),
            Kind.BYE: self._on_bye,
        }

    def _on_ping(self, f: Frame) -> None:
        if "left" in f.header:
            self._lease.allow(float(f.header["left"]))
        self._limit_idle(f.header)
        self._client.send(Kind.PONG, self._report())

    def _limit_idle(self, said: Mapping[str, Any]) -> None:
        """Note for how long the node may live without work, if the header of a frame says so."""
        if said.get("linger") is not None:
            left, full = said["linger"]
            self._lease.linger(float(left), float(full))

    def _on_bye(self, f: Frame) -> None:
        """End the node, or let it stay without this client for the time that the client says."""
        if "stay" in f.header:
            self._lease.stay(float(f.header["stay"]))
            self._client.leave()
        else:
            self._bye()

    def _on_credit(self, f: Frame) -> None:
        self._unacknowledged.consumed(f.header["id"], f.header["seq"])
        self._pass_on(f)

    def _take_over(self) -> str:
        """Let another client have the node for a whole lease. Return "", or why the client cannot have it."""
        return self._lease.take(time.monotonic())

    def _on_hello(self, is_new: bool, hello: Mapping[str, Any]) -> dict[str, Any]:
        """Return the header of WELCOME: slots, devices, the machine's state, and the known calls and functions.

        `is_new` is True if this client is not the one before. Workers then learn that functions and objects which the
        former client was sending will not arrive.
        """
        if is_new:
            self._store.wait_no_more()
        self._limit_idle(hello)
        calls = [*self._calls, *self._unacknowledged.calls]
        self._names = {call: self._names[call] for call in calls if call in self._names}
        self._generators &= self._names.keys()
        self._services &= self._names.keys()
        return {
            "wire": WIRE_VERSION,
            "trust": self.config.trust,
            "pid": os.getpid(),
            "slots": self._slots.counts[MAIN],
            "cpu_slots": self._plan.cpu_slots,
            "devices": len({name for slot in self._plan.slots for name in slot.devices}),
            "calls": calls,
            "cpu_calls": [id_ for id_, call in self._calls.items() if call.kind == CPU],
            "services": [*self._services],
            "quiet": [id_ for id_, call in self._calls.items() if not call.busy],
            "names": self._calls_by_name(),
            "streams": [*self._generators],
            "functions": list(self._store.functions),
            "objects": list(self._store.objects),
            "health": health.refreshed(self._plan.health, self.config.cwd).to_json(),
        }

    def _calls_by_name(self) -> dict[str, list[int]]:
        """Return the ids of the calls without an acknowledged outcome, by the name of their function."""
        found: dict[str, list[int]] = {}
        for call, name in self._names.items():
            found.setdefault(name, []).append(call)
        return found

    def _measure(self, now: float) -> None:
        """Let the monitor measure the node. Its modules take long to import, so it is made after the start."""
        if self._measures_at is None:
            self._measures_at = now if self._measured else now + _UNMEASURED
        if self._monitor is None and now >= self._measures_at:
            from skypool.agent.monitor import Monitor

            self._monitor = Monitor(self._measured, self.config.cwd, self._watch, self._running, self._on_news)
        if self._monitor is not None:
            self._monitor.tick(now)

    def _on_resumed(self) -> None:
        """Repeat what may have been lost with an earlier connection: a notice, and requests for modules and items."""
        if self._monitor is not None:
            self._monitor.rewind()
        if self.page.interruption:
            self._client.send(Kind.PONG, self._report())
        self._store.ask_again()
        for id_, call in self._calls.items():
            for arg, n in call.pulls.items():
                if call.given.get(arg, 0) < n:
                    self._client.send(Kind.CREDIT, {"id": id_, "arg": arg, "n": n})

    def _on_ack(self, f: Frame) -> None:
        self._unacknowledged.acknowledge(f.header["calls"], f.header["output"])
        for call in f.header["calls"]:
            self._names.pop(call, None)
        for call in self._generators.intersection(f.header["calls"]):  # who has the end of a stream has its items
            self._unacknowledged.consumed(call, sys.maxsize)
            self._generators.discard(call)
        self._services.difference_update(f.header["calls"])
        self._slots.end_processes_of(f.header["calls"])

    def _report(self) -> dict[str, Any]:
        """Return the header of a PONG: the status of the node. Services do not count as busy or running.

        `interruption` is the time of the notice in seconds since 1970, or None. `running` names at most 8 calls.
        """
        taken = [call for id_ in self._slots.taken() if (call := self._calls.get(id_)) is not None]
        running = [call for call in taken if call.kind != SERVICE]
        return {
            "busy": len(running),
            "cpu_busy": sum(call.kind == CPU for call in running),
            "running": [call.name for call in running[:8]],
            "waiting": len(self._calls) - len(taken),
            "done": self._done,
            "interruption": self.page.interruption or None,
            **({"stalled": stalled} if (stalled := self._stalled()) else {}),
            **self._samples(),
        }

    def _samples(self) -> dict[str, Any]:
        """Return the samples that the client does not have, as part of a PONG; {} if there are none or no client."""
        samples = self._monitor.taken() if self._monitor is not None and self._client.is_connected else []
        return {"samples": samples} if samples else {}

    def _on_news(self) -> None:
        """Send a status report at once, because the devices were read for the first time or have reported an error."""
        self._client.send(Kind.PONG, self._report())

    def _running(self) -> Iterator[tuple[int, str, int, int, float]]:
        """Yield (id, function name, slot, process id, seconds so far) for each running call."""
        now = time.monotonic()
        for slot in self._slots.all:
            id_, began = self.page.running(slot.number)
            call = self._calls.get(id_) if id_ else None
            if call is not None and slot.pid:
                yield id_, call.name, slot.number, slot.pid, now - began

    def _on_interruption(self, at: float) -> None:
        """Tell workers and client of a notice; `at` in seconds since 1970.

        Later PONGs repeat it, because this one may be lost.
        """
        self._slots.interrupt(at)
        self._client.send(Kind.PONG, self._report())

    def _on_call(self, f: Frame) -> None:
        """Queue a call from the client. A service or a process of a gang starts at once instead.

        A call that is known already is ignored. Raises ProtocolError if its function was never announced.
        """
        h = f.header
        if h["id"] in self._calls or self._unacknowledged.knows(h["id"]):
            self._arrivals.discard(f)
            return
        name = self._store.name(h["fn"])
        blob = self._arrivals.take(h["id"]) if "blob" in h else None
        if isinstance(blob, SpoolFull):
            self._answers.fail(h["id"], blob)
            return
        silent = h.get("output") == "silent"
        streams = "stream" in h
        kind = self._slots.kind_of(h)
        busy = kind != SERVICE or bool(h.get("busy"))
        call = NodeCall(
            h["id"],
            bytes(f.raw),
            blob,
            name,
            h["fn"],
            h.get("timeout"),
            silent,
            streams,
            kind,
            busy,
            grace=h.get("grace"),
        )
        self._names[call.id] = name
        if streams:
            self._generators.add(call.id)
        if kind == SERVICE:
            self._services.add(call.id)
        if kind in OWN:
            self._begin_own(call, Member.from_header(h) if kind == GANG else None, h.get("devices") == 0)
        else:
            self._queue.add(call)

    def _begin_own(self, call: NodeCall, member: Member | None, on_cpu: bool) -> None:
        """Start the worker that runs only this service or process of a gang. A failure ends the call with an error.

        `member` is None for a service. `on_cpu` is True if the call asks for no devices.
        """
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
        """Queue the calls of one frame as a batch, or one by one if some of them are known already.

        They are also queued one by one if calls of this function have written directly to file descriptor 1 or 2. Such
        output does not show which call of a batch wrote it. Raises ProtocolError for an invalid frame.
        """
        if len(f.raw) > PACKET:
            raise protocol_violation(
                f"the client sent a message of {len(f.raw)} bytes with several calls, and the limit is {PACKET} bytes"
            )
        batch = Batch(f, self._store.name(f.header["fn"]), self._slots.kind_of(f.header))
        new = batch.ids
        if not self._calls.keys().isdisjoint(new) or self._unacknowledged.knows_any(new):
            new = [id_ for id_ in batch.ids if id_ not in self._calls and not self._unacknowledged.knows(id_)]
        self._names.update(dict.fromkeys(new, batch.name))
        if new is batch.ids and batch.fn not in self._call_output.apart:
            self._queue.add(batch)
            self._batch_watch.came()
        else:
            for id_ in new:
                self._queue.add(batch.single(id_))

    def _on_recall(self, n: int, on_cpu: bool) -> None:
        """Give back to the client up to `n` calls that have not begun, the last ones first.

        If there are none, an empty RECALLED frame is sent. `on_cpu` chooses the calls that wait for CPU slots; it is
        ignored on a node without CPU slots.
        """
        back = self._queue.give_back(n, CPU if on_cpu and len(self._slots.counts) > 1 else MAIN)
        for id_ in back:
            self._names.pop(id_, None)
        for at in range(0, len(back) or 1, CALLS_NAMED):
            self._client.send(Kind.RECALLED, {"calls": back[at : at + CALLS_NAMED], "cpu": on_cpu})
        self._queue.pump()

    def _on_item(self, f: Frame) -> None:
        """Pass an item of a call's iterator argument to the worker that waits for it. Drop it if no worker does."""
        call = self._queue.get(f.header["id"])
        arg = f.header["arg"]
        n = f.header["n"]
        if call is not None and call.pulls.get(arg) == n and call.given.get(arg, 0) < n:
            call.given[arg] = n
            self._pass_on(f)
        else:
            self._arrivals.discard(f)

    def _pass_on(self, f: Frame) -> None:
        """Give a frame to the worker that runs its call. Drop the frame if no worker does.

        If there was no room for the frame's large value, the call ends with a SpoolFull error.
        """
        slot = self._slots.running(f.header["id"])
        if slot is None or f.header["id"] not in self._calls:
            self._arrivals.discard(f)
            return
        blob = self._arrivals.take(f.header["key"]) if "blob" in f.header else None
        if isinstance(blob, SpoolFull):
            self._answers.fail(f.header["id"], blob)
            return
        self._slots.tell(slot, [bytes(f.raw)], [blob.fd] if blob else [], give=True)

    # --- from workers ----------------------------------------------------------------------------------------

    def _start(self, slot: Slot, call: NodeCall | None = None) -> None:
        self._slots.start(slot, self._on_packets, self._call_output.read, self._on_death, call)
        self._find_outputs()

    def _find_outputs(self) -> None:
        self._outputs = {fd for each in self._slots.all for fd in each.outputs.values()}

    def _on_packets(self, slot: Slot) -> None:
        """Handle up to `_PACKETS_AT_ONCE` packets of a worker. The rest is left for the loop's next turn."""
        if self._read_packets(slot):
            self._batch_watch.alert = True

    def _hear(self, slot: Slot) -> None:
        """Handle packets of a worker as the event loop does: an error kills the worker instead of being raised."""
        try:
            self._on_packets(slot)
        except Exception as e:  # noqa: BLE001 - one worker must not end the agent
            self._contain(e, slot)

    def _read_packets(self, slot: Slot) -> bool:
        """Handle up to `_PACKETS_AT_ONCE` packets of a worker without waiting. Return True if there may be more.

        When the node's last call has ended, stop and return False, so that its outcome is sent at once.
        """
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
                self._call_output.add(slot, f.header["id"], f.header["fd"], bytes(f.body))
            case Kind.YIELD:
                self._unacknowledged.add(f.header["id"], f.header["seq"], [packet], "blob" in f.header)
            case Kind.BLOB:
                self._unacknowledged.on_written(f.header, fds, f.header["id"] in self._calls)
            case Kind.FETCH:
                self._store.fetch(slot, f.header["what"], f.header["key"])
            case Kind.CREDIT:
                self._on_pull(f.header["id"], f.header["arg"])
            case Kind.RECALLED:
                self._queue.again([f.header["id"]])  # its worker ends now, and then the call goes to another one
            case _:
                raise ProtocolError(
                    f"a worker process on this node sent a {f.kind.name} message, which a worker must not send; this "
                    "is a bug of skypool, so please report it"
                )

    def _on_outcome(self, slot: Slot, f: Frame, packet: bytes) -> None:
        id_ = f.header["id"]
        if slot.kind == SERVICE:
            if "late" in f.header and id_ in self._calls and self._is_late(slot, f.header):
                call = self._queue.get(id_)
                assert call is not None
                call.doomed = "timeout"
            else:  # sent when its processes are gone
                slot.answer = packet, "blob" in f.header, "done" in f.header
        elif id_ in self._calls:
            if "late" in f.header and self._is_late(slot, f.header):
                self._end_late(slot, f.header)
                return
            self._end(slot, id_, "done" in f.header)
            self._unacknowledged.add(id_, 0, [packet], "blob" in f.header)

    def _is_late(self, slot: Slot, header: Mapping[str, Any]) -> bool:
        """Return True if a call took longer than its timeout, not counting pauses in which the whole node was stopped.

        `header` is that of its outcome, in which the worker says how long the call took.
        """
        limit = self._calls[header["id"]].timeout
        return limit is not None and float(header["late"]) - slot.paused_during(header["id"]) > limit

    def _end_late(self, slot: Slot, header: Mapping[str, Any]) -> None:
        """End a call that took longer than its timeout. Its outcome is discarded."""
        call = self._queue.get(header["id"])
        assert call is not None
        call.doomed = "timeout"
        self._call_output.end_gap(slot, call)
        slot.kill_at = None
        self._done += 1
        self._answers.stopped(call, str(header["printed"]), str(header["said"]))
        self._batch_watch.ended()

    def _end(self, slot: Slot, id_: int, done: bool = False) -> None:
        """Forget a call that has ended, and call off the planned kill of its worker.

        `done` is True if the worker no longer uses the memory of the call's arguments, so that another value may.
        """
        call = self._calls[id_]
        if isinstance(call, NodeCall) and call.dropped:
            self._call_output.end_gap(slot, call)
        slot.kill_at = None
        self._done += 1
        self._queue.forget(id_, done)
        self._batch_watch.ended()

    def _on_ends(self, slot: Slot) -> None:
        """Send the client, in one frame, the outcomes of batched calls that a worker has written to shared memory.

        Drops outcomes of calls that the agent itself has ended. Raises ProtocolError, after the valid outcomes were
        sent, if other bytes follow them.
        """
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
                self._done += 1
            else:
                self._end(slot, id_)
        if ids:
            self._batch_watch.ended()
            self._unacknowledged.add_together(ids, frame_of_ends(body))
        if fault is not None:
            raise fault

    def _on_pull(self, id_: int, arg: int) -> None:
        """Ask the client for the next item of iterator argument `arg`. Does nothing if the call has ended."""
        call = self._queue.get(id_)
        if call is not None:
            call.pulls[arg] = call.pulls.get(arg, 0) + 1
            self._client.send(Kind.CREDIT, {"id": id_, "arg": arg, "n": call.pulls[arg]})

    # --- the end of workers ----------------------------------------------------------------------------------

    def _contain(self, error: Exception, slot: Slot | None) -> None:
        """Log an error of the agent's own code, and kill the worker to blame. If `slot` is None, raise the error."""
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
        """Forget a dead worker, and start a new one unless its slot was made for one call. `status` is its wait status.

        First handle its last packets and output. The call that it ran ends with an error. Calls that it had not begun
        are queued again, before all others. For calls that no worker is known to have, see `Stops.note_missing`.
        """
        for hear in (self._hear_last_packets, self._hear_last_output, self._hear_last_ends):
            try:
                hear(slot)
            except Exception as e:  # noqa: BLE001 - what a worker wrote must not end the agent
                self._contain(e, slot)
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
        self._find_outputs()

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
        """Start a worker in each vacant slot whose pause is over. If that fails, try again after a longer pause.

        If no worker could be started for `_UNABLE` seconds, all calls for this kind of slot fail.
        """
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
                self._find_outputs()
                slot.tail.clear()
            slot.failing_since = (slot.failing_since or now) if slot.failures else 0.0
            if why and now - slot.failing_since > _UNABLE:
                self._give_up(slot.kind, why)

    def _give_up(self, kind: int, why: str) -> None:
        """End all calls for a kind of slot with the error `why`, unless some slot of this kind has a worker."""
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
