"""The worker process: takes calls from the node's queue, runs them one at a time, and sends back their outcomes."""

from __future__ import annotations

import gc
import json
import mmap
import os
import select
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn
from weakref import ref

from skypool import runtime
from skypool.agent import broken_devices, child_imports, stacks
from skypool.agent.batch import LARGEST_END, SharedBatch
from skypool.agent.capture import PRINTED, Capture
from skypool.agent.import_clock import ImportClock
from skypool.agent.left_processes import end_processes, holds_process_group
from skypool.agent.modules import FoundPackage, ScriptModule, UserModules, take_source
from skypool.agent.notice import Herald
from skypool.agent.output_stream import OutputStream
from skypool.agent.packets import CLOEXEC, PACKET, SPACE, descriptors
from skypool.agent.restore import CallState
from skypool.agent.shared_page import SharedPage
from skypool.agent.shield import Cancelled, Shield
from skypool.agent.streams import Sender
from skypool.agent.worker_channel import WorkerChannel, await_end
from skypool.clock import moment_between_changes
from skypool.errors import PickleError, SkypoolError, SpoolFull, UntrustedResult
from skypool.wire import codec, exceptions, namespaces
from skypool.wire.error_text import annotate, text_of
from skypool.wire.frames import INLINE, Buffer, Frame, Kind, encode, end_of, frame, parse_frame, seal, split_buffers

_CALLS = Kind.CALLS
_OUTCOME = int(Kind.OUTCOME)
_SOME_ENDED: list[Buffer] = [encode(Kind.OUTCOMES, {})]
_LINGERING = 5
"""The most seconds that a process of a gang waits, after it has failed, until the client knows its exception."""
_UNTOLD = 16 << 10
"""The bytes of outcomes at which the agent is asked to read them from the shared memory, which then has room left."""
_LARGEST = LARGEST_END - len(end_of(0, True, 0, b""))
"""The greatest size in bytes of the serialized value or error of a batched call that is sent through shared memory."""
LOADING = 60.0
"""Seconds to load a call's function, modules and arguments. Only longer loading counts towards the call's timeout.

Imports by the function itself count towards these seconds, too.
"""
_TEXT = 200
"""The most characters of an exception's text that the agent is told when the call exceeded its timeout."""
_FORKING = 5e-5
"""The least seconds of a call that starts a process. After a shorter call, no child processes are looked for."""
_ENDING = 5.0
"""Seconds in which processes that a call has left are ended. They do not count towards the call's timeout."""
_BRIEF = 1e-3
"""The most seconds of a short call. Checking all that it may have changed would take too long in proportion."""
_KERNELS = 5.0
"""Seconds that the next call waits at most for GPU kernels that the call before has left running."""
_PAUSE = 2e-3
"""Seconds without a call after which all that short calls may have changed is checked before the next call."""
_MOMENT = 0.05
"""The most seconds, while short calls run, between two checks of all that they may have changed."""


class _Small:
    """Small value of `pool.put()`, kept serialized: its pickle, and the memory of its larger arrays."""

    def __init__(self, buffers: list[bytes]) -> None:
        self.buffers = buffers


class _Function(NamedTuple):
    """An unpickled function, the values of its globals (`view`), its name, and its result's name in messages."""

    run: Callable[..., Any] | runtime.Attended
    view: namespaces.View
    name: str
    what: str


class _Order:
    """Options of a call, or of all calls of a batch, from the header of the packet in which they came."""

    __slots__ = ("captures", "fn", "is_fresh", "is_gang", "is_own", "stream", "timeout", "world")

    def __init__(self, header: dict[str, Any]) -> None:
        self.fn: str = header["fn"]
        self.is_gang = "gang" in header
        self.is_own = self.is_gang or "service" in header  # its worker runs nothing else
        self.is_fresh = self.is_own or "fresh" in header  # no other call may have run in its process
        self.captures = header.get("output") == "capture"  # what it prints becomes part of its value
        self.timeout: float | None = header.get("timeout")
        self.stream: int | None = header.get("stream")  # window of its generator, as for `Sender`; else None
        self.world: tuple[int, Sequence[str]] | None = header.get("world")  # as for `runtime.begin`


class Worker:
    """Main loop of one worker, which runs calls for the agent.

    Args:
        slot: the number of the worker's slot on the node.
        agent: the packet socket to and from the agent, for this worker only.
        queue: the packet socket in which calls wait. All workers with the same kind of slot share it.
        batch: the pipe and the memory that this process and the agent share for batches.
        herald: calls `on_interruption` of the running call when there is a notice.
        page: the memory that shows the agent which worker runs which call.
        folder: the folder for values that are too large for memory.
        spool_memory: the size in bytes of the largest value kept in memory; None for half of the free memory.
        node_folder: the folder of skypool's files on this node.
        printed: the file in memory for what a call with `output="capture"` prints. The agent reads it, too.
    """

    def __init__(
        self,
        slot: int,
        agent: socket.socket,
        queue: socket.socket,
        batch: SharedBatch,
        herald: Herald,
        page: SharedPage,
        folder: str,
        spool_memory: int | None,
        node_folder: str,
        printed: int,
    ) -> None:
        self._slot = slot
        self._socket = agent
        self._queue = queue
        self._buffer = bytearray(PACKET)
        self._batch = batch
        self._page = page
        self._herald = herald
        self._process = os.getpid()
        self._functions: dict[str, _Function] = {}
        self._plain: dict[str, _Order] = {}
        self._objects: dict[str, Any] = {}
        self._sources: dict[str, str] = {}
        self._shield = Shield()
        self._is_stop_lost = False
        self._channel = WorkerChannel(slot, agent, page, folder, spool_memory, lambda key: self._objects.pop(key, None))
        self._drops = page.drops
        self._untold = 0
        self._forks = 0
        self._forking = threading.local()
        self._served = 0
        self._worn = False
        self._is_restored = True
        self._restored_at = 0.0
        self._ended_at = 0.0
        self._function_key = ""
        self._harmless: set[str] = set()
        self._uses_devices = False
        self._contexts = broken_devices.Contexts()
        self._failure: BaseException | None = None
        self._arguments: tuple[Callable[[], object], int] | None = None
        self._runs = False
        self._counts_from = 0.0
        self._uncounted = 0.0
        self._node_folder = node_folder
        self._user_modules = UserModules(self._fetch_module, node_folder)
        self._out = OutputStream(1, self._print)
        self._err = OutputStream(2, self._print)
        self._capture = Capture(printed, self._out, self._err)

    def run(self) -> NoReturn:
        """Run calls until this process must end, then end it. Does not return.

        The process ends with status 0 in these cases:

        - The agent has ended, or a call was cancelled, or this is a child process that a call forked.
        - A call needed a fresh process, or has left something that spoils later calls: changes that cannot be put back,
          child processes, a broken CUDA context or, if it failed, an initialised process group of torch.distributed or
          JAX. A new worker then replaces this one.
        """
        self._settle_in()
        while True:
            packet, fds = self._next_call()
            if packet is None:
                os._exit(0)
            try:
                if packet.kind is _CALLS:
                    self._serve_all(packet)
                else:
                    self._serve(packet.header["id"], self._order(packet.header), packet, fds)
            except Cancelled:
                self._flush()
                os._exit(0)
            except (BrokenPipeError, ConnectionResetError):
                os._exit(0)
            if self._failure is not None and os.getpid() == self._process:
                self._linger()
            if self._worn or os.getpid() != self._process:
                os._exit(0)  # this process is worn out, or it is a child that the user's function forked

    def _linger(self) -> None:
        """Keep this process of a gang, which has failed, for `_LINGERING` seconds or until the agent is gone."""
        # The exception's frames keep the sockets of the function open. So the gang's other processes notice the failure
        # only after the client knows which process failed first.
        gone = select.poll()
        gone.register(self._socket, 0)  # only its end is reported, not what arrives
        gone.poll(1000 * _LINGERING)

    def _settle_in(self) -> None:
        """Prepare this process for calls: set up `sys`, `__main__`, imports, signals, `skypool.runtime` and `codec`."""
        main = ScriptModule("__main__")
        main.__dict__["__builtins__"] = __builtins__
        sys.modules["__main__"] = main
        namespaces.own_main(main.__dict__)
        sys.stdout = self._out
        sys.stderr = self._err
        sys.argv = ["skypool-worker"]
        self._user_modules.install()
        ImportClock(self._on_import, self._on_imported).install()
        stacks.register()
        runtime.pull = self._pull
        codec.resolve_object = self._object
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGURG, self._on_wake)
        sys.unraisablehook = self._on_unraisable
        os.register_at_fork(
            before=self._before_fork,
            after_in_parent=self._after_fork_in_parent,
            after_in_child=self._after_fork_in_child,
        )
        self._state = CallState()
        gc.freeze()

    def _before_fork(self) -> None:
        self._forks += 1
        self._forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def _after_fork_in_parent(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._forking.mask)

    def _after_fork_in_child(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._on_sigterm:  # not a handler that the call has set
            # Python would not run the handler while this process waits, such as for a semaphore.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._forking.mask)
        self._out.forget()
        self._err.forget()
        self._herald.forget()
        self._runs = False  # the call is the parent's

    def _on_import(self) -> None:
        """Stop the clock of the call's timeout while its function imports a module, for at most `LOADING` s in all."""
        if self._runs:
            self._page.run(self._slot, self._counts_from + self._uncounted)

    def _on_imported(self, seconds: float) -> None:
        """Let the clock of the call's timeout run again, after an import that took `seconds`."""
        if self._runs:
            seconds = min(seconds, self._uncounted)
            self._uncounted -= seconds
            self._counts_from += seconds
            self._page.run(self._slot, self._counts_from)

    def _on_sigterm(self, _number: int, _stack: object) -> None:
        """Raise Cancelled if the agent wants the running call to stop. Otherwise ignore SIGTERM."""
        # a child process that the call forked, where a handler of the call may call this one
        if os.getpid() != self._process:
            os._exit(128 + signal.SIGTERM)
        if self._channel.call and self._page.given_up(self._slot):
            self._shield.stop()

    def _on_unraisable(self, lost: sys.UnraisableHookArgs) -> None:
        """Note a Cancelled that Python ignored, as in `__del__` or a weak reference. Print other exceptions."""
        if isinstance(lost.exc_value, Cancelled):
            self._is_stop_lost = True
        else:
            sys.__unraisablehook__(lost)

    def _on_wake(self, number: int, stack: object) -> None:
        """Raise Cancelled again if Python ignored it. The signal also ends a system call, so that handlers run."""
        if self._is_stop_lost:
            self._is_stop_lost = False
            self._on_sigterm(number, stack)

    # --- packets ---------------------------------------------------------------------------------------------

    def _next_call(self) -> tuple[Frame | None, list[int]]:
        """Wait for the next call or batch. Return its packet, valid until this runs again, and its file descriptors."""
        try:
            n, ancillary, _, _ = self._queue.recvmsg_into([self._buffer], SPACE, CLOEXEC)
        except BlockingIOError:  # a call has changed all file descriptors of its process; workers share this one
            self._queue.setblocking(True)
            return self._next_call()
        except ConnectionResetError:
            return None, []
        fds = descriptors(ancillary)
        # no packet if the agent is gone, or has replaced the queue
        return (parse_frame(memoryview(self._buffer)[:n]) if n else None), fds

    def _payload(self, packet: Frame, fds: list[int]) -> list[Buffer]:
        """Return the serialized arguments or contents in a packet from the agent, as buffers. Closes `fds[0]`."""
        lengths = packet.header["lens"]
        if "blob" in packet.header:
            forks = self._forks
            writes = 0 if packet.header.get("what") == "object" else mmap.PROT_WRITE
            # mapped, not copied: changes stay private, and a value of `pool.put()` is read-only
            memory = mmap.mmap(fds[0], packet.header["blob"], mmap.MAP_PRIVATE, mmap.PROT_READ | writes)
            os.close(fds[0])
            if packet.kind is Kind.CALL:
                self._arguments = ref(memory), forks
            return list(split_buffers(memoryview(memory), lengths))
        if len(lengths) == 1:  # unpickling copies it, so the next packet may overwrite it
            return [packet.body[: lengths[0]]]
        return list(split_buffers(memoryview(bytearray(packet.body)), lengths))

    def _let_go(self) -> bool:
        """Return True if the memory of the call's large arguments is free: no object or forked child uses it now."""
        return self._arguments is not None and self._arguments[0]() is None and self._arguments[1] == self._forks

    def _fetch_module(self, name: str, version: str) -> FoundPackage:
        """Request a package of the user's own from the client, and wait for the answer. `version` is "" for any."""
        # a child that the call has forked uses another socket, because the worker reads this one
        if os.getpid() != self._process:
            return FoundPackage(child_imports.ask(self._node_folder, name), version, (), "")
        header = self._channel.fetch("module", f"{name} {version}")[0].header
        if not header.get("found"):
            return FoundPackage(None, "", (), header.get("why", ""))
        return FoundPackage(header["folder"], header["hash"], tuple(header["left_out"]), "")

    def _object(self, key: str) -> Any:
        """Return the `pool.put()` value with this key, fetched at its first use. Raises KeyError or SpoolFull."""
        if key not in self._objects:
            reply, fds = self._channel.fetch("object", key)
            if not reply.header.get("found"):
                raise KeyError(
                    f"this node has no value {key} of put(), because the value was freed or put into another pool; "
                    "call put() on this pool again"
                )
            if "full" in reply.header:
                raise SpoolFull(reply.header["full"])
            payload = self._payload(reply, fds)
            if "blob" in reply.header:
                # unpickled once; its arrays are read-only
                self._objects[key] = codec.loads(payload)
            else:
                self._objects[key] = _Small([bytes(buffer) for buffer in payload])
        found = self._objects[key]
        # a small value is unpickled for each use, so that calls do not see each other's changes
        return codec.loads([found.buffers[0], *map(bytearray, found.buffers[1:])]) if type(found) is _Small else found

    def _function(self, key: str, view: namespaces.View | None = None) -> _Function | None:
        """Return the function with this key, fetched at first use; None if a new process must import its modules."""
        # with `view`, it is unpickled again, with the values of its globals in that view
        if key not in self._functions or view is not None:
            reply, fds = self._channel.fetch("function", key)
            if not reply.header.get("found"):
                raise SkypoolError(
                    "the client that sent this call disconnected before the call's function had arrived "
                    "completely; send the call again"
                )
            if "full" in reply.header:
                raise SpoolFull(reply.header["full"])
            *pickled, manifest = self._payload(reply, fds)
            about = json.loads(bytes(manifest))
            if not self._user_modules.learn(about):
                # an imported module has changed on the client
                return None
            for file, source in about["sources"].items():
                self._take_source(file, source)
            view = view or namespaces.View()
            with namespaces.loading(view):
                name = reply.header["name"]
                self._functions[key] = _Function(codec.loads(pickled), view, name, f"the result of {name}")
        return self._functions[key]

    def _take_source(self, file: str, key: str) -> None:
        """Fetch the text of a script from the agent, at its first use, so that tracebacks show its lines."""
        if self._sources.get(file) != key:
            reply, fds = self._channel.fetch("function", key)
            if reply.header.get("found") and "full" not in reply.header:
                take_source(file, bytes(self._payload(reply, fds)[0]))
                self._sources[file] = key

    def _order(self, header: dict[str, Any]) -> _Order:
        if len(header) > 3:
            return _Order(header)
        # without options: it has the function, the id or ids, and the lengths of the arguments
        order = self._plain.get(header["fn"])
        if order is None:
            order = self._plain[header["fn"]] = _Order(header)
        return order

    # --- one call --------------------------------------------------------------------------------------------

    def _serve_all(self, packet: Frame) -> None:
        """Run the calls of one batch in order, except those that the agent takes back before they begin."""
        self._batch.hold(packet.header["ids"])
        self._untold = at = 0
        order = self._order(packet.header)
        for id_, length in zip(packet.header["ids"], packet.header["lens"], strict=True):
            if not self._batch.claim():
                break
            if not self._serve(id_, order, packet, [], packet.body[at : at + length]):
                return
            at += length
            if self._worn:
                break  # the agent queues the others again
        if self._untold:
            self._socket.sendmsg(_SOME_ENDED)

    def _serve(self, id_: int, order: _Order, packet: Frame, fds: list[int], part: Buffer | None = None) -> bool:
        """Run one call, send its outcome. Return False in a child that the call forked. Raise Cancelled on a stop."""
        is_own = order.is_own
        if order.is_fresh:
            self._worn = True
        function = order.fn
        began = time.monotonic()
        has_paused = began - self._ended_at > _PAUSE
        is_other = function != self._function_key or self._uses_devices or has_paused
        is_unfit = is_other and self._is_unfit()
        if (self._worn or is_unfit) and self._served:
            # this call needs a fresh process: the worker that follows this one runs it
            self._worn = True
            self._channel.send(Kind.RECALLED, {"id": id_}, [])
            return True
        self._function_key = function
        self._served += 1
        began = time.monotonic() if is_other else began
        if not is_own:  # otherwise the agent wrote the call into the page, and may have asked already to stop it
            self._page.begin(self._slot, id_, began + LOADING)
        self._channel.call = id_
        if is_own and self._page.given_up(self._slot):
            raise Cancelled
        self._arguments = None
        self._counts_from = began + LOADING
        if self._page.drops != self._drops:
            self._drops = self._page.drops
            self._channel.drain()
        ok = True
        try:
            # `part` has the arguments of a batched call
            buffers = self._run(id_, order, self._payload(packet, fds) if part is None else [part])
        except Cancelled:
            raise
        except BaseException as e:  # noqa: BLE001 - every error is sent to the caller
            ok = False
            self._failure = e
            if advice := self._user_modules.advice(e):
                annotate(e, advice, {})
            buffers = exceptions.dump_error(e, home=True)
        self._runs = False
        more = {} if order.timeout is None else self._lateness(order.timeout)
        self._herald.leave()
        if self._out.waiting or self._err.waiting:
            self._flush()
        self._channel.call = 0
        if self._channel.arrived:
            self._channel.forget_arrived()
        self._ended_at = time.monotonic()
        seconds = self._ended_at - began
        if seconds > _FORKING:
            if os.getpid() != self._process:
                return False  # this is a child that the call forked
            if not is_own and self._end_processes():
                self._worn = True
            if self._page.given_up(self._slot):
                more["ended"] = moment_between_changes()
        if more:
            self._answer(id_, ok, buffers, seconds, more)
        elif part is None or len(buffers) > 1 or len(buffers[0]) > _LARGEST:
            self._answer(id_, ok, buffers, seconds)
        elif self._batch.end(end := end_of(id_, ok, seconds, buffers[0])):
            self._untold += len(end)
            if self._untold > _UNTOLD:
                self._untold = 0
                self._socket.sendmsg(_SOME_ENDED)
        else:
            self._answer(id_, ok, buffers, seconds)
        # after a short call of a function that had changed nothing a moment ago, it waits until another one is called
        is_due = (
            seconds > _BRIEF
            or not ok
            or function not in self._harmless
            or began - self._restored_at > _MOMENT
            or self._uses_devices
            or self._state.is_touched()
            or (has_paused and not self._state.is_unchanged())
        )
        self._is_restored = is_due or has_paused
        if is_due and not is_own and not self._worn:
            self._restored_at = began
            self._worn = self._is_spoiled()
        if not order.is_gang:
            # Kept until here because its frames may hold sockets: peers must not notice their end before it is sent.
            self._failure = None
        return True

    def _is_spoiled(self) -> bool:
        """Put back what a call that has ended has changed in this process. Return True if a new one must replace it."""
        if not self._restore():
            return True
        self._uses_devices = broken_devices.is_in_use()
        if self._failure is not None and (
            holds_process_group() or (self._uses_devices and broken_devices.is_at_fault(self._failure))
        ):
            return True
        return self._uses_devices and self._contexts.are_broken()

    def _restore(self) -> bool:
        """Put back what calls have changed in this process. Return False if the next call needs a new process."""
        try:
            has_changed = self._state.restore()
        except OSError:
            return False
        if has_changed:
            self._harmless.discard(self._function_key)
        else:
            self._harmless.add(self._function_key)
        return True

    def _is_unfit(self) -> bool:
        """Return True if earlier calls have left this process in a state that spoils a call that begins now."""
        if not self._is_restored and not self._restore():
            return True
        return self._uses_devices and self._contexts.are_broken(_KERNELS)  # a kernel may fail after its call

    def _lateness(self, timeout: float) -> dict[str, Any]:
        """Return what the outcome's header tells the agent if the call exceeded its timeout; {} if it did not."""
        ran = time.monotonic() - self._counts_from
        if ran <= timeout:
            return {}
        said = "" if self._failure is None else f"{type(self._failure).__name__}: {text_of(self._failure)}"
        # the agent decides if it was too long, because it alone knows for how long the whole node was stopped
        return {"late": ran, "said": said[:_TEXT], "printed": self._capture.last}

    def _end_processes(self) -> bool:
        """End processes that the call has left; its timeout does not count this time. Return True if there were any."""
        self._page.run(self._slot, time.monotonic() + _ENDING)
        return end_processes()

    def _run(self, id_: int, order: _Order, payload: list[Buffer]) -> list[Buffer]:
        """Run the function of a call and return its serialized result. A generator's items are sent while it runs."""
        known = self._functions.get(order.fn) or self._function(order.fn)
        is_entered = known is not None and namespaces.is_entered(known.view)
        if known is not None and not is_entered and known.view.is_outdated():
            known = self._function(order.fn, known.view)
        # only a new process can run the call: give it back, and end this process
        if known is None:
            self._page.begin(self._slot, 0, time.monotonic())  # another worker may have it before this one has ended
            self._channel.send(Kind.RECALLED, {"id": self._channel.call}, [])
            os._exit(0)
        function, view, name, what = known
        if not is_entered:
            namespaces.enter(view)
        runtime.begin(id_, order.world)
        self._capture.last = ""
        args, kwargs = codec.loads(payload)
        if isinstance(function, runtime.Attended):
            function = self._herald.attend(function)
        now = time.monotonic()
        self._uncounted = left if (left := self._counts_from - now) > 0.0 else 0.0  # what is left of LOADING
        self._counts_from = now
        self._page.run(self._slot, now)
        self._runs = True
        value: Any
        try:
            value = self._captured(function, args, kwargs) if order.captures else function(*args, **kwargs)
            if type(value) is types.CoroutineType:
                value = _run_coroutine(value)
            if order.stream is not None:
                stall = partial(self._page.stall, self._slot)
                value = Sender(self._channel, id_, name, order.stream, self._shield, stall).send_all(value)
        except SystemExit as e:
            if not _is_success(e):
                raise
            value = None
        try:
            return exceptions.dump_result(value, what)
        except (PickleError, UntrustedResult) as e:
            self._tell_printed(e)
            raise

    def _captured(self, function: Callable[..., Any], args: Any, kwargs: Any) -> codec.Captured:
        """Run a function and return its value with everything that it and its child processes printed."""
        self._flush()
        self._capture.begin()
        try:
            value = function(*args, **kwargs)
            if type(value) is types.CoroutineType:
                value = _run_coroutine(value)
        except Cancelled:
            raise  # the agent reads what was printed
        except BaseException as e:
            printed = self._capture.end()
            if isinstance(e, SystemExit) and _is_success(e):
                return codec.Captured(None, printed)
            if printed:
                annotate(e, f"{PRINTED}{printed}", {})
            raise
        return codec.Captured(value, self._capture.end())

    def _tell_printed(self, error: BaseException) -> None:
        """Add the end of the call's captured output, if any, to an error that is sent in place of the call's value."""
        if self._capture.last:
            annotate(error, f"{PRINTED}{self._capture.last}", {})

    def _answer(
        self, id_: int, ok: bool, buffers: list[Buffer], seconds: float, more: Mapping[str, Any] | None = None
    ) -> None:
        """Send the outcome of a call in a packet of its own, with `more` in its header."""
        if not more and len(buffers) == 1 and (size := len(buffers[0])) <= INLINE and self._arguments is None:
            # The usual header contains numbers only. Writing it by hand takes 0.3 µs, a serializer 2.5 µs (Python
            # 3.11).
            head = f'{{"id":{id_},"ok":{"true" if ok else "false"},"seconds":{seconds:.6f},"lens":[{size}]}}'
            self._socket.sendmsg((seal(_OUTCOME, head.encode(), size), buffers[0]))
            return
        lens = [len(b) for b in buffers]
        answer: dict[str, Any] = {"id": id_, "ok": ok, "seconds": seconds, "lens": lens, **(more or {})}
        if self._let_go():
            answer["done"] = True
        try:
            self._channel.send(Kind.OUTCOME, answer, buffers)
        except SpoolFull as e:
            self._tell_printed(e)
            buffers = exceptions.dump_error(e, home=True)
            answer |= {"ok": False, "lens": [len(buffers[0])]}
            self._channel.send(Kind.OUTCOME, answer, buffers)

    def _pull(self, number: int) -> Any:
        """Return the next item of iterator argument `number`. Raises StopIteration, or the iterator's own exception."""
        self._channel.send(Kind.CREDIT, {"id": self._channel.call, "arg": number}, [])
        reply, fds = self._channel.receive(
            lambda f: f.kind == Kind.ITEM and f.header["id"] == self._channel.call and f.header["arg"] == number
        )
        if reply.header.get("end"):
            if reply.header.get("error"):
                raise exceptions.load_error(self._payload(reply, fds))
            raise StopIteration
        return codec.loads(self._payload(reply, fds))

    # --- output ----------------------------------------------------------------------------------------------

    def _print(self, fd: int, data: bytes) -> None:
        """Send output of the running call to the agent. End this process with status 0 if the agent is gone."""
        try:
            self._socket.sendmsg(frame(Kind.OUTPUT, {"id": self._channel.call, "fd": fd}, [data]))
        except OSError:
            await_end(self._page)
            os._exit(0)  # without the agent, this process has no purpose

    def _flush(self) -> None:
        self._out.flush()
        self._err.flush()


def _is_success(ended: SystemExit) -> bool:
    """Return True if a function has ended itself with success, as by `sys.exit(0)`. Its call then returns None."""
    return ended.code is None or ended.code == 0


def _run_coroutine(coroutine: types.CoroutineType[Any, Any, Any]) -> Any:
    """Run a coroutine to its end, and return its value."""
    import asyncio  # imported here because few calls need it, and it would delay the start of every node

    # with a factory, it leaves no mark in this thread that keeps later calls from `asyncio.get_event_loop()`
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        return runner.run(coroutine)
