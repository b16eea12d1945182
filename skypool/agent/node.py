"""The agent: one loop that takes calls from the client, hands them to workers and brings their answers back."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from skypool import codec
from skypool.agent import health
from skypool.agent.call import Call
from skypool.agent.client import OUTPUT_WINDOW, Client
from skypool.agent.lease import Lease
from skypool.agent.notice import Lookout
from skypool.agent.page import Page
from skypool.agent.slots import TAIL, Slot, Slots
from skypool.agent.spool import Blob
from skypool.agent.store import Arrivals, Store
from skypool.errors import CallTimeout, ConnectionLost, ProtocolError, SkypoolError, SpoolFull, WorkerDied
from skypool.wire import WIRE_VERSION, Frame, Kind, encode, pad, parse

_OUTPUT_LIMIT = 10 << 20
_LOST_AFTER = 5.0
_OUTCOME = Kind.OUTCOME


class Agent:
    """One node's agent.

    Args:
        config: what `start` was given.
        listener: the Unix socket where clients come in.
        page: shared with the keeper and the workers.
    """

    def __init__(self, config: dict[str, Any], listener: socket.socket, page: Page) -> None:
        self.config, self.page = config, page
        self._poll = select.epoll()
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._outputs: set[int] = set()
        self._calls: dict[int, Call] = {}
        self._waiting: deque[Call] = deque()
        self._names: dict[int, str] = {}
        self._slots = Slots(config, page, self._watch)
        self._lookout = Lookout(config["watch"], self._watch, self._on_interruption)
        self._arrivals = Arrivals(config["spool"], config.get("spool_memory"))
        self._client = Client(
            listener,
            self._watch,
            config["liveness"],
            self._on_frame,
            self._on_hello,
            self._on_resumed,
            self._arrivals_gone,
        )
        self._store = Store(config["folder"], self._slots, self._arrivals, self._client.send)
        self._handlers = self._handle()
        self._done = 0
        self._queue_full = False
        self._ending = False
        self._keeper = os.getppid()
        self._lease = Lease(config)

    # --- the loop --------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until the client says BYE, the lease runs out, or SIGTERM."""
        signal.signal(signal.SIGTERM, lambda *_: self._end())
        for number, slot in enumerate(self.config["slots"]):
            self._slots.all.append(Slot(number, slot["env"]))
        self._renew()
        for each in self._slots.all:
            self._start(each)
        gc.freeze()
        gc.set_threshold(50_000)  # calls leave no cycles
        ticked = 0.0
        while not self._ending:
            ready = [fd for fd, _ in self._poll.poll(0.1)]
            if len(ready) > 1:  # what a call wrote goes before what it returned
                ready.sort(key=self._outputs.__contains__, reverse=True)
            for fd in ready:
                if callback := self._callbacks.get(fd):
                    callback()
            if (now := time.monotonic()) - ticked >= 0.1:
                ticked = now
                self._tick(now)
            self._client.flush()
        for each in self._slots.all:
            self._slots.signal(each, signal.SIGKILL)
        self._client.send(Kind.BYE, {})
        self._client.flush()

    def _watch(self, fd: int, events: int, callback: Callable[[], None]) -> None:
        """Call `callback` when `fd` is ready; events 0 to stop."""
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
            self._poll.register(fd, events)

    def _tick(self, now: float) -> None:
        self._renew()
        self._lookout.tick(now)
        if now > self.page.deadline or os.getppid() != self._keeper:
            self._end()
        for call in list(self._calls.values()):
            if call.offered:
                self._check_call(call, now)
        for slot in self._slots.all:
            if slot.kill_at is not None and now > slot.kill_at:
                self._slots.signal(slot, signal.SIGKILL)
            if slot.waiting:
                self._slots.retell(slot)
            self._check_stopped(slot, now)

    def _check_call(self, call: Call, now: float) -> None:
        """Stop a call that is to stop or runs too long; run one again that a worker took along before it began."""
        slot = self._slots.running(call.id)
        if slot is None:
            if call.missing is not None and now - call.missing > _LOST_AFTER:
                self._again(call.id)
            return
        call.missing = None
        began = self.page.running(slot.number)[1]
        if not call.doomed and call.timeout is not None and now - began > call.timeout:
            call.doomed, call.grace = "timeout", self.config["grace"]
        if call.doomed and slot.kill_at is None:
            self._slots.stop_call(slot, call.id, call.grace)

    def _check_stopped(self, slot: Slot, now: float) -> None:
        """A worker that was stopped, as by SIGSTOP, will never answer: after `liveness` it is replaced."""
        if not self._slots.stopped(slot):
            slot.silent_since = None
            return
        slot.silent_since = slot.silent_since or now
        if now - slot.silent_since > self.config["liveness"]:
            call = self._calls.get(self.page.running(slot.number)[0])
            if call is not None and not call.doomed:
                call.doomed = "stopped"
            self._slots.signal(slot, signal.SIGKILL)

    def _arrivals_gone(self) -> None:
        self._arrivals.clear()

    def _renew(self) -> None:
        """The lease runs from the client's last sign of life."""
        self.page.deadline = self._lease.renew(self._client.heard)

    def _end(self) -> None:
        self._ending = True

    # --- from the client -------------------------------------------------------------------------------------

    def _on_frame(self, f: Frame) -> None:
        handle = self._handlers.get(f.kind)
        if handle is None:
            raise ProtocolError(f"a client does not send {f.kind.name}")
        handle(f)

    def _handle(self) -> dict[Kind, Callable[[Frame], None]]:
        """What is done about each kind of frame from the client."""
        return {
            Kind.CALL: self._on_call,
            Kind.BLOB: self._arrivals.add,
            Kind.ACK: self._on_ack,
            Kind.CREDIT: self._on_credit,
            Kind.ITEM: self._on_item,
            Kind.PING: self._on_ping,
            Kind.CANCEL: lambda f: self._on_cancel(f.header["id"], float(f.header["grace"])),
            Kind.FUNCTION: lambda f: self._store.keep("function", f),
            Kind.OBJECT: lambda f: self._store.keep("object", f),
            Kind.DROP: lambda f: self._store.drop(f.header["key"]),
            Kind.MODULE: self._store.on_module,
            Kind.RECALL: lambda f: self._on_recall(f.header["n"]),
            Kind.BYE: lambda _: self._end(),
        }

    def _on_ping(self, f: Frame) -> None:
        if "left" in f.header:
            self._lease.allow(float(f.header["left"]))
        self._client.send(Kind.PONG, self._report())

    def _on_credit(self, f: Frame) -> None:
        self._client.spool.consumed(f.header["id"], f.header["seq"])
        self._pass_on(f)

    def _on_hello(self) -> dict[str, Any]:
        calls = [*self._calls, *self._client.spool.calls]
        self._names = {call: self._names[call] for call in calls if call in self._names}
        return {
            "wire": WIRE_VERSION,
            "pid": os.getpid(),
            "slots": len(self._slots.all),
            "calls": calls,
            "names": [[call, name] for call, name in self._names.items()],
            "streams": [call.id for call in self._calls.values() if call.streams],
            "functions": list(self._store.functions),
            "objects": list(self._store.objects),
            "health": {**self.config["health"], **health.now(self.config["cwd"])},
        }

    def _on_resumed(self) -> None:
        """Ask again for what workers still wait for."""
        self._store.ask_again()
        for call in self._calls.values():
            for arg, n in call.pulls.items():
                self._client.send(Kind.CREDIT, {"id": call.id, "arg": arg, "n": n})

    def _on_ack(self, f: Frame) -> None:
        self._client.spool.acknowledge(f.header["calls"], f.header["output"])
        for call in f.header["calls"]:
            self._names.pop(call, None)

    def _report(self) -> dict[str, Any]:
        running = (self._calls.get(self.page.running(slot.number)[0]) for slot in self._slots.all)
        names = [call.name for call in running if call is not None]
        waiting = len(self._calls) - len(names)
        gone = self.page.interruption or None
        return {"busy": len(names), "running": names[:8], "waiting": waiting, "done": self._done, "interruption": gone}

    def _on_interruption(self, at: float) -> None:
        """The client is told with every sign of life from here on: it may not hear the first."""
        self._slots.interrupt(at)
        self._client.send(Kind.PONG, self._report())

    def _on_call(self, f: Frame) -> None:
        h = f.header
        if h["id"] in self._calls or self._client.spool.knows(h["id"]):
            self._arrivals.discard(f)
            return
        name = self._store.name(h["fn"])
        blob = self._arrivals.take(h["id"]) if "blob" in h else None
        if isinstance(blob, SpoolFull):
            self._fail(h["id"], blob)
            return
        silent, streams = h.get("output") == "silent", "stream" in h
        call = Call(h["id"], bytes(f.raw), blob, name, h.get("timeout"), silent, streams)
        self._names[call.id] = name
        self._calls[call.id] = call
        self._waiting.append(call)
        if not self._queue_full:  # if it is, the loop pumps as soon as there is room
            self._pump()

    def _pump(self) -> None:
        """Put calls where workers take them, as many as fit."""
        while self._waiting:
            call = self._waiting[0]
            try:
                self._slots.offer([call.packet], [call.blob.fd] if call.blob else [])
            except BlockingIOError:
                if not self._queue_full:
                    self._queue_full = True
                    self._watch(self._slots.queue.fileno(), select.EPOLLOUT, self._pump)
                return
            call.offered = True
            self._waiting.popleft()
        if self._queue_full:
            self._queue_full = False
            self._watch(self._slots.queue.fileno(), 0, self._pump)

    def _on_cancel(self, id_: int, grace: float) -> None:
        call = self._calls.get(id_)
        if call is None or call.doomed:
            return
        call.doomed, call.grace = "cancel", grace
        if call not in self._waiting:
            self._take_back()
        if call in self._waiting:
            self._waiting.remove(call)
            self._finish_doomed(call)
        else:
            self._check_call(call, time.monotonic())
        self._pump()

    def _take_back(self) -> None:
        """Bring the calls that no worker has taken back to the front of the line."""
        for f, fds in reversed(self._slots.take_back()):
            _close_all(fds)
            self._again(f.header["id"])

    def _again(self, id_: int) -> None:
        """A call that was offered and has not begun goes back to the front of the line."""
        call = self._calls.get(id_)
        if call is not None:
            call.offered, call.missing = False, None
            self._waiting.appendleft(call)

    def _on_recall(self, n: int) -> None:
        """Give back up to `n` calls that have not begun, the last ones first."""
        if n > len(self._waiting):
            self._take_back()
        back: list[int] = []
        while self._waiting and len(back) < n:
            call = self._waiting.pop()
            self._forget(call)
            self._names.pop(call.id, None)
            back.append(call.id)
        self._client.send(Kind.RECALLED, {"calls": back})
        self._pump()

    def _forget(self, call: Call) -> None:
        self._calls.pop(call.id, None)
        if call.blob is not None:
            os.close(call.blob.fd)

    def _on_item(self, f: Frame) -> None:
        """An item of an iterator argument, if it is the one its worker waits for."""
        call = self._calls.get(f.header["id"])
        if call is not None and call.pulls.get(f.header["arg"]) == f.header["n"]:
            self._pass_on(f)
        else:
            self._arrivals.discard(f)

    def _pass_on(self, f: Frame) -> None:
        """Give a frame to the worker that runs its call."""
        slot = self._slots.running(f.header["id"])
        if slot is None or f.header["id"] not in self._calls:
            self._arrivals.discard(f)
            return
        blob = self._arrivals.take(f.header["key"]) if "blob" in f.header else None
        if isinstance(blob, SpoolFull):
            self._fail(f.header["id"], blob)
            return
        self._slots.tell(slot, [bytes(f.raw)], [blob.fd] if blob else [], give=True)

    # --- from workers ----------------------------------------------------------------------------------------

    def _start(self, slot: Slot) -> None:
        self._slots.start(slot, self._on_packets, self._on_output, self._on_death)
        self._outputs = {fd for each in self._slots.all for fd in each.outputs.values()}

    def _on_packets(self, slot: Slot) -> None:
        for _ in range(64):
            received = self._slots.receive(slot)
            if received is None:
                break
            packet, fds = received
            f = parse(memoryview(packet))
            if f.kind is _OUTCOME:
                self._on_outcome(slot, f, packet, fds)
                if not self._calls:
                    break  # nothing else is expected: do not look once more, answer
            else:
                self._on_packet(slot, f, packet, fds)
        if slot.waiting:
            self._slots.retell(slot)

    def _on_packet(self, slot: Slot, f: Frame, packet: bytes, fds: list[int]) -> None:
        match f.kind:
            case Kind.OUTPUT:
                self._print(slot, f.header["id"], f.header["fd"], bytes(f.body))
            case Kind.YIELD:
                blob = Blob(fds[0], f.header["blob"]) if fds else None
                self._client.spool.add(f.header["id"], f.header["seq"], [packet], blob)
            case Kind.FETCH:
                self._store.fetch(slot, f.header["what"], f.header["key"])
            case Kind.CREDIT:
                self._on_pull(f.header["id"], f.header["arg"])
            case Kind.RECALLED:
                self._again(f.header["id"])
            case _:
                raise ProtocolError(f"a worker does not send {f.kind.name}")

    def _on_outcome(self, slot: Slot, f: Frame, packet: bytes, fds: list[int]) -> None:
        call = self._calls.get(f.header["id"])
        if call is None:
            _close_all(fds)
            return
        if call.dropped:
            self._end_output(slot, call)
        slot.tail.clear()
        slot.kill_at = None
        self._done += 1
        self._forget(call)
        self._client.spool.add(call.id, 0, [packet], Blob(fds[0], f.header["blob"]) if fds else None)

    def _on_pull(self, id_: int, arg: int) -> None:
        """A worker wants the next item of an iterator argument."""
        call = self._calls.get(id_)
        if call is not None:
            call.pulls[arg] = call.pulls.get(arg, 0) + 1
            self._client.send(Kind.CREDIT, {"id": id_, "arg": arg, "n": call.pulls[arg]})

    def _on_death(self, slot: Slot) -> None:
        self._on_packets(slot)
        for fd in list(slot.outputs):
            self._on_output(slot, fd)
        call = self._calls.get(self.page.running(slot.number)[0])
        status = self._slots.bury(slot)
        if call is not None and call.offered:
            self._end_output(slot, call)
            if call.doomed:
                self._finish_doomed(call)
            else:
                self._fail(call.id, self._death(slot, call, status))
        slot.tail.clear()
        self._store.forget_worker(slot)
        self._start(slot)
        self._take_back()
        for other in self._calls.values():
            if other.offered and self._slots.running(other.id) is None:
                other.missing = time.monotonic()
        self._pump()

    def _death(self, slot: Slot, call: Call, status: int) -> WorkerDied:
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        hint = ""
        if number == signal.SIGKILL:
            hint = "skypool did not send it; most often the kernel does when memory runs out: try a smaller input"
        return WorkerDied(
            call.name,
            signal=number,
            exitcode=None if number else os.WEXITSTATUS(status),
            tail=slot.tail[-TAIL:].decode("utf-8", "replace"),
            node=self.config["rank"],
            hint=hint,
        )

    def _finish_doomed(self, call: Call) -> None:
        error: SkypoolError
        if call.doomed == "timeout":
            error = CallTimeout(f"{call.name} ran longer than its timeout of {call.timeout:g} s and was ended")
        elif call.doomed == "stopped":
            error = ConnectionLost(
                f"the worker running {call.name} was stopped (as by SIGSTOP) for longer than liveness="
                f"{self.config['liveness']:g} s and was replaced",
                self.config["rank"],
            )
        else:
            error = SkypoolError(f"{call.name} was cancelled")
        self._fail(call.id, error)

    def _fail(self, id_: int, error: BaseException) -> None:
        """Answer a call in the place of its worker."""
        call = self._calls.get(id_)
        header: dict[str, Any] = {"id": id_, "ok": False, "seconds": 0}
        if call is not None:
            self._forget(call)
            header["cancelled"] = call.doomed == "cancel"
        dumped = codec.dump_error(error)
        buffers, total = pad(dumped)
        header["lens"] = [len(b) for b in dumped]
        self._client.spool.add(id_, 0, [encode(Kind.OUTCOME, header, total), *buffers])

    # --- output ----------------------------------------------------------------------------------------------

    def _on_output(self, slot: Slot, fd: int) -> None:
        """What a worker's process, or a child of it, wrote straight to its file descriptor 1 or 2."""
        data = b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(slot.outputs[fd], 64 << 10)
            if not data:
                self._watch(slot.outputs[fd], 0, self._pump)
        if data:
            self._print(slot, self.page.running(slot.number)[0], fd, data)

    def _print(self, slot: Slot, id_: int, fd: int, data: bytes) -> None:
        slot.tail += data
        if len(slot.tail) > 4 * TAIL:
            del slot.tail[:-TAIL]
        call = self._calls.get(id_)
        unread = self._client.spool.output_size
        if call is not None and call.silent:
            return
        if call is not None:
            room = max(0, min(_OUTPUT_LIMIT - call.printed, OUTPUT_WINDOW - unread))
            call.dropped += max(0, len(data) - room)
            data = data[:room]
            call.printed += len(data)
        elif unread > OUTPUT_WINDOW:
            return
        if data:
            self._client.spool.add_output({"id": id_, "fd": fd, "slot": slot.number}, data)

    def _end_output(self, slot: Slot, call: Call) -> None:
        """Say what the limit withheld, and show the end of it."""
        if call.dropped:
            last = bytes(slot.tail[-min(TAIL, call.dropped) :])
            withheld = call.dropped - len(last)
            line = f"\n[skypool] {call.name} printed too much, too fast: {withheld:,} bytes dropped here\n"
            self._client.spool.add_output({"id": call.id, "fd": 2, "slot": slot.number}, line.encode() + last)
            call.dropped = 0


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
