"""Forks and watches the workers of a node: one process for each slot.

A node with devices has two kinds of slots, each with a queue of its own. MAIN slots share out the devices. In addition,
there is one CPU slot, without devices, for each CPU; its worker starts when it is needed. A node without devices has
MAIN slots only.

Each process of a gang has a slot of the kind GANG, and each service one of the kind SERVICE. Such a slot is made for
one call and forgotten when its process has ended.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

from skypool import devices, runtime
from skypool.agent import own_name
from skypool.agent.batch import SharedBatch
from skypool.agent.call import NodeCall
from skypool.agent.notice import Herald
from skypool.agent.own_notices import OwnNotices, set_own
from skypool.agent.packets import CLOEXEC, PACKET, SPACE, descriptors, rights
from skypool.agent.processes import (
    Orphans,
    adopt_orphans,
    call_it,
    descendants,
    kill_group,
    tracer_of,
    usable_cpus,
)
from skypool.agent.shared_page import SharedPage
from skypool.agent.slot_plan import GANG_PROCESSES, GANG_ROWS, NodePlan
from skypool.agent.worker import LOADING, Worker
from skypool.clock import RunningClock
from skypool.errors import UsageError
from skypool.gangs import environment
from skypool.gangs.environment import Member
from skypool.wire.agent_config import SlotPlan
from skypool.wire.frames import Buffer, Frame, parse_frame

_WAKE = 0.2
"""Seconds after which a worker that was asked to stop a call is woken for the first time."""
TAIL = 4096
"""The number of bytes of a call's output that are kept, to show its last lines if its worker dies."""
Packet = tuple[list[Buffer], list[int], bool]
MAIN = 0
CPU = 1
GANG = 2
SERVICE = 3
OWN = (GANG, SERVICE)
"""The kinds of slots that are made for one call, and not counted.

A slot of the kind GANG is for one process of a gang, and one of the kind SERVICE for one service. CPU is for calls that
ask for no device, and MAIN for all other calls. A node without devices has no CPU slots: these calls run on its MAIN
slots.
"""
SERVICE_MARK = "SKYPOOL_SERVICE"
"""The environment variable that marks the processes of a service. Its value is the call's id."""


@dataclass(slots=True, eq=False)
class Slot:
    """Slot of a node, and the worker that fills it now. Times are those of the agent's clock, in seconds.

    Attributes:
        number: the number of the slot on the node, from 0, and of its part of the shared page.
        kind: MAIN, CPU, GANG or SERVICE.
        env: environment variables of the slot's worker.
        member: the process of a gang that the slot was made for; None for other slots.
        on_cpu: True for a process of a gang or a service that asks for no devices.
        label: the text before each output line of a process of a gang, if others of the gang run on this node; or "".
        own_devices: for a process of a gang that sees all devices of the node: the names of its own, such as "cuda 0".
            None for slots whose workers see only their own devices.
        notice: the write end of a pipe; -1 if there is none. The process of a gang or a service has the other end, and
            looks for a notice when this end is closed.
        pid: the pid of the worker.
        pidfd: a file descriptor that stands for the worker, and reports its death to the event loop.
        channel: the packet socket to the worker.
        outputs: a dict from the worker's file descriptors 1 and 2 to the read ends of the pipes that they write to.
        waiting: packets for which the worker's socket had no room, in order. Each is (buffers, file descriptors, True
            if these file descriptors are closed after sending).
        printed: the file in memory, as a file descriptor, that has what a call with `output="capture"` prints.
        batch: the pipe and the memory that the worker and the agent share for batches.
        ended: encoded outcomes of batched calls that were not sent to the client yet.
        answer: the outcome of a service, kept until all its processes are gone. A tuple (packet, True if a large value
            was sent before it, True if the worker no longer uses the arguments); None for other calls.
        tail: the last bytes that the call `tail_of` printed.
        tail_of: the id of the call that printed last; 0 if no call was running then.
        seen: the id of the call that ran here at the last check of batches, and the time of the first check that saw
            it.
        kill_at: the time at which the worker is killed, if it was asked to stop a call; None otherwise.
        wake_at: if `kill_at` is set, the time at which the worker is woken next.
        wake_pause: seconds between that wake and the one after it.
        silent_since: the time at which the process was first found frozen, for example by SIGSTOP; None if it is not.
        paused: the id of a call, and the seconds in all for which the whole node was stopped while that call ran.
        fault: the error of the agent's own code for which the worker was killed; "" if there was none.
        failures: the number of workers in a row that died before they took a call, or that could not be started.
        failing_since: the time of the first of these failures; 0.0 if there are none.
    """

    number: int
    env: Mapping[str, str]
    kind: int = MAIN
    member: Member | None = None
    on_cpu: bool = False
    label: str = ""
    own_devices: tuple[str, ...] | None = None
    notice: int = -1
    pid: int = 0
    pidfd: int = -1
    channel: socket.socket = field(default_factory=socket.socket)
    outputs: dict[int, int] = field(default_factory=dict)
    waiting: deque[Packet] = field(default_factory=deque)
    printed: int = -1
    batch: SharedBatch = field(init=False)
    ended: bytearray = field(default_factory=bytearray)
    answer: tuple[bytes, bool, bool] | None = None
    tail: bytearray = field(default_factory=bytearray)
    tail_of: int = 0
    seen: tuple[int, float] = (0, 0.0)
    kill_at: float | None = None
    wake_at: float = 0.0
    wake_pause: float = 0.0
    silent_since: float | None = None
    paused: tuple[int, float] = (0, 0.0)
    fault: str = ""
    failures: int = 0
    failing_since: float = 0.0

    def add_pause(self, call: int, seconds: float) -> None:
        """Note that the whole node was stopped for some seconds during a call on this slot.

        Pauses of the same call add up. Those of an earlier call are forgotten.
        """
        self.paused = call, self.paused_during(call) + seconds

    def paused_during(self, call: int) -> float:
        """Return for how many seconds in all the whole node was stopped while `call` ran on this slot.

        Returns 0.0 if pauses of a later call were noted since.
        """
        return self.paused[1] if self.paused[0] == call else 0.0


class WorkerQueue:
    """Queue in which calls wait for the next free worker of one kind of slot: a pair of packet sockets.

    The agent puts calls into `end`, which does not block. Workers take them from `taken`.
    """

    def __init__(self) -> None:
        self.end, self.taken = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for each in (self.end, self.taken):
            with contextlib.suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        self.end.setblocking(False)
        self._waiting = select.poll()
        self._waiting.register(self.taken, select.POLLIN)

    def offer(self, buffers: list[Buffer], fds: list[int]) -> None:
        """Put the packet of a call or a batch into the queue without waiting. The next free worker takes it.

        The file descriptors `fds` are sent with the packet, and stay open here. Raises BlockingIOError if the queue is
        full.
        """
        _send(self.end, buffers, fds)

    def take_back(self) -> list[tuple[Frame, list[int]]]:
        """Remove the calls and batches that no worker has taken, and return them in order. Does not wait.

        Returns a list of (frame, its file descriptors). The caller must close these.
        """
        back: list[tuple[Frame, list[int]]] = []
        while True:
            try:
                packet, ancillary, _, _ = self.taken.recvmsg(PACKET, SPACE, CLOEXEC | socket.MSG_DONTWAIT)
            except BlockingIOError:
                return back
            if not packet:
                return back  # the queue is broken
            back.append((parse_frame(memoryview(packet)), descriptors(ancillary)))

    def close(self) -> None:
        """Close this process's ends of the queue. A worker that was forked before can still take what is in it."""
        self.end.close()
        self.taken.close()

    @property
    def is_broken(self) -> bool:
        """True if a call has shut the socket that its worker shares with the others."""
        ends = select.poll()
        ends.register(self.end, 0)
        return bool(ends.poll(0))

    @property
    def has_calls(self) -> bool:
        """True if the queue contains a call that no worker has taken."""
        return bool(self._waiting.poll(0))


class Slots:
    """Slots of a node that have a worker, and the queues from which workers take calls.

    Creating this object starts no worker (see `start`), and increases this process's limit of open files.

    Args:
        page: the memory that the agent shares with its workers and the keeper.
        clock: the agent's clock.
        watch: `watch(fd, events, callback)` makes the agent's loop call `callback` when these epoll events occur on the
            file descriptor `fd`. With events 0, the loop stops watching `fd`.

    Attributes:
        counts: the number of slots of each kind on the node: [MAIN slots] or [MAIN slots, CPU slots].
        queues: a `WorkerQueue` for each of these kinds, in the same order.
        all: the slots that have a worker, those that get one when the agent starts, and slots made for one call.
        output_files: the file descriptors from which the output of workers is read, as `find_outputs` found them.
    """

    def __init__(
        self,
        plan: NodePlan,
        page: SharedPage,
        clock: RunningClock,
        watch: Callable[[int, int, Callable[[], None]], None],
    ) -> None:
        self._plan = plan
        self.page = page
        self._clock = clock
        self._watch = watch
        self.counts = [len(plan.slots)]
        if plan.cpu_slots:
            self.counts.append(plan.cpu_slots)
        self.queues = [WorkerQueue() for _ in self.counts]
        self._notice, self._notice_end = os.pipe()
        self.all = [Slot(number, slot.env) for number, slot in enumerate(plan.slots)]
        self._lasting = len(self.all)
        self.output_files: set[int] = set()
        self._files = allow_more_files()
        self._orphans = Orphans()

    @property
    def spare(self) -> int:
        """The number of CPU slots that have no worker yet."""
        return sum(self.counts) - self._lasting

    def add_cpu_slot(self) -> Slot:
        """Add one more CPU slot to `all`, and return it. `start` must be called for it.

        The caller must check that the node may have more CPU slots: `spare` is above 0.
        """
        slot = Slot(self._lasting, devices.hidden(), CPU)
        self._lasting += 1
        self.all.append(slot)
        return slot

    @property
    def cpu_workers(self) -> int:
        """The number of CPU slots that have a worker."""
        return self._lasting - self.counts[MAIN]

    def add_gang_slot(self, member: Member, on_cpu: bool) -> Slot:
        """Add a slot for one process of a gang to `all`, and return it. `start` must be called for it.

        With `on_cpu`, the node's devices are hidden from the process. Raises UsageError if the node can run no more
        such processes.
        """
        on_cpu = on_cpu and len(self.counts) > 1
        number = self._free_number()
        if number is None:
            raise too_many_processes()
        config = self._plan.config
        shares = self._plan.shares(0 if on_cpu else member.of) or (SlotPlan(devices.hidden()),) * member.of
        # the machine's own variables for devices are no choice of the user: the node's devices were detected with them
        share = shares[member.local]
        index = None if on_cpu else self._plan.index_among_all(share, member.of)
        own = {name: value for name, value in share.env.items() if name not in config.env} if index is None else {}
        env = environment.variables(
            member,
            config.env,
            os.environ,
            devices=own,
            index=index,
            cpus=usable_cpus(),
            hosts=config.slice.hosts,
            efa=environment.has_efa(),
        )
        text = environment.label([share.devices for share in shares], member.local)
        slot = Slot(number, env, GANG, member, on_cpu, text, share.devices if index is not None else None)
        self.all.append(slot)
        return slot

    def add_service_slot(self, call: int, on_cpu: bool) -> Slot:
        """Add a slot for a service, whose call has this id, to `all`, and return it. `start` must be called for it.

        The service sees all devices of the node, or none with `on_cpu`. Raises UsageError if the node has no room for
        it.
        """
        number = self._free_number()
        if number is None:
            raise UsageError("this node runs as many services as it can; close some, or use more nodes")
        on_cpu = on_cpu and len(self.counts) > 1
        env = {**(devices.hidden() if on_cpu else {}), SERVICE_MARK: str(call)}
        slot = Slot(number, env, SERVICE, on_cpu=on_cpu)
        self.all.append(slot)
        return slot

    def _free_number(self) -> int | None:
        """Return an unused number for a slot that is made for one call; None if all are used."""
        first = sum(self.counts)
        used = {slot.number for slot in self.all if slot.kind in OWN}
        return next((each for each in range(first, first + GANG_ROWS) if each not in used), None)

    def find_outputs(self) -> None:
        """Set `output_files` to the files from which the output of workers is read. Call it when `all` has changed."""
        self.output_files = {fd for slot in self.all for fd in slot.outputs.values()}

    def remove(self, slot: Slot) -> None:
        """Forget the slot of a service or of a process of a gang, whose process has ended or was never started."""
        self.all.remove(slot)

    def kind_of(self, header: Mapping[str, Any]) -> int:
        """Return the kind of slot that a call needs, from the header of its frame.

        A call with `"devices": 0` needs a CPU slot, if the node has any.
        """
        if "gang" in header:
            return GANG
        if "service" in header:
            return SERVICE
        return CPU if header.get("devices") == 0 and len(self.counts) > 1 else MAIN

    def start(
        self,
        slot: Slot,
        on_packet: Callable[[Slot], None],
        on_output: Callable[[Slot, int], None],
        on_death: Callable[[Slot], None],
        call: NodeCall | None = None,
    ) -> None:
        """Fork the worker of a slot, and watch it in the agent's event loop. Returns at once.

        The slot's attributes then describe the new worker. Packets that wait for the slot's earlier worker are dropped.
        Raises OSError if the process could not be forked, or if there are too many open files.

        Args:
            on_packet: called with the slot when a packet from the worker can be read.
            on_output: called when output of the worker can be read, with the slot and 1 for stdout or 2 for stderr.
            on_death: called with the slot when the worker has ended.
            call: for a slot of the kind GANG or SERVICE, the only call that the worker runs. None for other slots.
        """
        with contextlib.ExitStack() as opened:  # what was opened is closed if the process cannot be started
            self._fork(slot, call, opened)
            opened.pop_all()
        self._forget_waiting(slot)
        slot.kill_at = slot.silent_since = None
        self._watch(slot.channel.fileno(), select.EPOLLIN, partial(on_packet, slot))
        self._watch(slot.pidfd, select.EPOLLIN, partial(on_death, slot))
        for fd, read_end in slot.outputs.items():
            os.set_blocking(read_end, False)
            self._watch(read_end, select.EPOLLIN, partial(on_output, slot, fd))

    def _fork(self, slot: Slot, call: NodeCall | None, opened: contextlib.ExitStack) -> None:
        """Fork the worker of a slot, and set the slot's attributes. `opened` gets what must be closed if this fails."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        opened.callback(ours.close)
        opened.callback(theirs.close)
        slot.batch = SharedBatch()
        opened.callback(slot.batch.close)
        opened.callback(slot.batch.keep)
        slot.printed = os.memfd_create("skypool-printed", os.MFD_CLOEXEC)
        opened.callback(os.close, slot.printed)
        pipes: dict[int, tuple[int, int]] = {}
        for fd in (1, 2):
            pipes[fd] = os.pipe2(os.O_CLOEXEC)
            opened.callback(_close, [*pipes[fd]])
        notice = self._notice
        if call is None:
            queue = self.queues[slot.kind]
            self.page.begin(slot.number, 0, 0.0)  # from here on only the worker writes these numbers
        else:
            queue = WorkerQueue()
            opened.callback(queue.close)
            queue.offer([call.packet], [call.blob.fd] if call.blob else [])
            notice, slot.notice = os.pipe2(os.O_CLOEXEC)
            opened.callback(_close, [notice, slot.notice])
            self.page.notify(slot.number, 0.0)
            self.page.tell_step(slot.number, -1)
            self.page.offer(slot.number, 0)
            # The worker has its call from the start, so that the call is never without a slot. The worker itself writes
            # only when the call's function begins.
            self.page.begin(slot.number, call.id, time.monotonic() + LOADING)
        pid = os.fork()
        if pid == 0:
            self._become_worker(slot, theirs, {fd: ends[1] for fd, ends in pipes.items()}, queue.taken, notice)
        slot.pid = pid
        try:
            slot.pidfd = os.pidfd_open(pid)
        except OSError:  # too many open files
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        theirs.close()
        slot.batch.keep()
        for _, write_end in pipes.values():
            os.close(write_end)
        ours.setblocking(False)
        slot.channel = ours
        slot.outputs = {fd: ends[0] for fd, ends in pipes.items()}
        if call is not None:
            queue.close()
            os.close(notice)
            if self.page.interruption:
                _end_notice(slot)

    def _become_worker(
        self, slot: Slot, channel: socket.socket, outputs: dict[int, int], taken: socket.socket, notice: int
    ) -> NoReturn:
        """Run a worker in this forked process, then end the process. `outputs` become file descriptors 1 and 2."""
        try:
            os.setsid()
            for fd, write_end in outputs.items():
                os.dup2(write_end, fd)
            keep = {
                0,
                1,
                2,
                channel.fileno(),
                taken.fileno(),
                notice,
                slot.printed,
                *slot.batch.leave(),
            }
            for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
                if fd not in keep:
                    with contextlib.suppress(OSError):
                        os.close(fd)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGPIPE, signal.SIG_IGN)
            signal.set_wakeup_fd(-1)
            resource.setrlimit(resource.RLIMIT_NOFILE, self._files)
            os.environ.update(slot.env)
            # threads for each worker's share of the CPUs, unless the user has set it
            if slot.kind not in OWN and self.counts[slot.kind] > 1 and len(self.counts) > 1:
                os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cpus() // self.counts[slot.kind])))
            adopt_orphans()
            os.umask(self._plan.umask)
            os.makedirs(self._plan.config.cwd, exist_ok=True)  # a call may have removed it
            os.chdir(self._plan.config.cwd)
            self._introduce(slot)
            size = 1 if slot.member is None else slot.member.size
            set_own(OwnNotices(self.page, slot.number, size), os.getppid())
            call_it("worker" if slot.member is None else f"rank-{slot.member.rank}")
            Worker(
                slot.number,
                channel,
                taken,
                slot.batch,
                Herald(notice, self.page, slot.number),
                self.page,
                self._plan.config.spool,
                self._plan.config.spool_memory,
                self._plan.config.folder,
                slot.printed,
            ).run()
        except BaseException:  # noqa: BLE001 - a forked child must never return into the agent's loop
            import traceback

            traceback.print_exc()
        os._exit(70)

    def _introduce(self, slot: Slot) -> None:
        """Set what users' functions get from `skypool.runtime` in this new worker."""
        config = self._plan.config
        place = config.slice
        member = slot.member
        # slots of each kind count from 0; a process of a gang sees those of its gang here, and a service only itself
        number = slot.number - (self.counts[MAIN] if slot.kind == CPU else 0)
        info = runtime.InstanceInfo(
            pool=config.pool,
            node=config.node,
            nodes=config.nodes,
            slot=member.local if member is not None else 0 if slot.kind == SERVICE else number,
            slots=member.of if member is not None else 1 if slot.kind == SERVICE else self.counts[slot.kind],
            slot_kind="device" if slot.kind != CPU and not slot.on_cpu and len(self.counts) > 1 else "cpu",
            address=self._plan.health.address,
            host=place.host,
            hosts=place.hosts,
            chips=place.chips,
            slice_chips=place.slice_chips,
        )
        if member is not None:
            info = replace(
                info,
                rank=member.rank,
                world_size=member.size,
                local_rank=member.local,
                local_world_size=member.of,
                attempt=member.attempt,
                world_changed=member.changed,
            )
            if member.nodes > 1:
                own_name.shadow(self._plan.health.address, member.peers)
        runtime.enter(info, in_gang=member is not None, own=slot.own_devices, folder=config.folder)

    def ignore(self, fd: int) -> None:
        """Stop watching a file descriptor in the agent's event loop. It stays open.

        Does nothing if it is not watched.
        """
        self._watch(fd, 0, _nothing)

    def interrupt(self, at: float) -> None:
        """Tell all workers, also those started later, of a notice. Call this method only once.

        The provider takes the machine back at `at`, in seconds since 1970.
        """
        self.page.interruption = at
        os.close(self._notice_end)
        for slot in self.all:
            _end_notice(slot)

    def notify(self, calls: Collection[int], at: float, reason: runtime.Reason = runtime.PROVIDER) -> None:
        """Tell the processes of gangs that run these calls that another machine of their gang is taken back, or ends.

        `at` is the time, in seconds since 1970. It replaces the time of an earlier notice for the same call. Calls that
        have ended, or that belong to no gang, are ignored.
        """
        for slot in self.all:
            if slot.kind == GANG and self.page.running(slot.number)[0] in calls:
                self.page.notify(slot.number, at, reason)
                _end_notice(slot)

    # --- packets ---------------------------------------------------------------------------------------------

    def tell(self, slot: Slot, buffers: list[Buffer], fds: list[int], give: bool = False) -> None:
        """Send a packet to the worker of a slot, after those that wait already. Does not wait.

        If the worker's socket has no room, the packet is kept until a later `retell` sends it. If the worker has died,
        the packet is dropped. With `give`, the file descriptors are closed here when they are sent or dropped.
        """
        slot.waiting.append((buffers, fds, give))
        self.retell(slot)

    def retell(self, slot: Slot) -> None:
        """Send the packets that wait for a worker, in order, while its socket has room. Does not wait.

        If the worker has died, all are dropped.
        """
        while slot.waiting:
            buffers, fds, give = slot.waiting[0]
            try:
                _send(slot.channel, buffers, fds)
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                self._forget_waiting(slot)  # the worker has died, which its pidfd reports
                return
            slot.waiting.popleft()
            if give:
                _close(fds)

    def _forget_waiting(self, slot: Slot) -> None:
        """Drop the packets that wait for a worker. Close file descriptors if `tell` was asked to do so."""
        for _, fds, give in slot.waiting:
            if give:
                _close(fds)
        slot.waiting.clear()

    def receive(self, slot: Slot) -> tuple[bytes, list[int]] | None:
        """Return the next packet of a worker, and its file descriptors; None if none has arrived. Does not wait.

        If the worker has closed its end and no packet is left, the event loop stops watching the socket.
        """
        try:
            packet, ancillary, _, _ = slot.channel.recvmsg(PACKET, SPACE, CLOEXEC)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            packet, ancillary = b"", []
        if not packet:
            self.ignore(slot.channel.fileno())
            return None
        return packet, descriptors(ancillary)

    # --- who runs what ---------------------------------------------------------------------------------------

    def running(self, call: int) -> Slot | None:
        """Return the slot whose worker took the call with this id last. The call may have ended already.

        Returns None if no worker has taken it, or if its worker has taken another call since.
        """
        for slot in self.all:
            if self.page.running(slot.number)[0] == call:
                return slot
        return None

    def taken(self) -> dict[int, Slot]:
        """Return a dict from the id of the call that each worker took last to the worker's slot.

        The call may have ended already. Workers that have taken no call are left out.
        """
        return {call: slot for slot in self.all if (call := self.page.running(slot.number)[0])}

    def stop_call(self, slot: Slot, call: int, grace: float) -> None:
        """Ask the worker of a slot to stop a call, by SIGTERM. Does not wait.

        The worker ignores this if it runs another call. If the call goes on for `grace` seconds, the worker is killed.
        """
        self.page.give_up(slot.number, call)
        now = self._clock()
        slot.kill_at = now + grace
        slot.wake_pause = _WAKE
        slot.wake_at = now + _WAKE
        self.signal(slot, signal.SIGTERM)

    def wake(self, slot: Slot) -> None:
        """Interrupt the system call in which a worker may wait, so that Python runs its signal handlers.

        Python runs the handler of SIGTERM in the main thread, between two instructions. If the signal arrives just
        before that thread begins to wait, or in another thread, the handler would run only after the wait.

        If Python has ignored the exception that the handler raised, as in `__del__`, the worker raises it again. Each
        call sets the time of the next one, after a pause twice as long.
        """
        self.signal(slot, signal.SIGURG)
        slot.wake_at += slot.wake_pause
        slot.wake_pause *= 2

    def end_processes_of(self, calls: Collection[int]) -> None:
        """Kill the processes of gangs that ran these calls, which have ended.

        A process whose call has failed waits up to five seconds for this.
        """
        if len(self.all) > self._lasting:
            for slot in self.all:
                if slot.kind == GANG and self.page.running(slot.number)[0] in calls:
                    self.signal(slot, signal.SIGKILL)

    def signal(self, slot: Slot, number: int) -> None:
        """Send a signal to a worker. SIGKILL goes to the other processes of its process group, too.

        Does not raise if the worker has ended, or has become another user's process.
        """
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(slot.pidfd, number)
        if number == signal.SIGKILL:
            kill_group(slot.pid)

    def reap(self, slot: Slot) -> int | None:
        """Return the wait status of a dead worker, as from `os.waitpid`; None if another process traces it.

        Does not wait. Once this method has returned the status, the pid may belong to another process.
        """
        while True:
            pid, status = os.waitpid(slot.pid, os.WNOHANG)
            if not pid:
                return None
            if not os.WIFSTOPPED(status):  # of a worker that is traced, also its stops are reported
                return status

    def end_orphans(self) -> bool:
        """Kill processes that dead workers have left, in any session. Return True if none is left. Does not wait."""
        return self._orphans.end({slot.pid for slot in self.all})

    @property
    def has_orphans(self) -> bool:
        """True if the last call of `end_orphans` found processes that a dead worker has left."""
        return self._orphans.are_some

    def close(self, slot: Slot) -> None:
        """Close the agent's files for a dead worker, and stop watching them. Then the slot can get a new worker."""
        for fd in (slot.channel.fileno(), slot.pidfd, *slot.outputs.values()):
            self._watch(fd, 0, _nothing)
        slot.channel.close()
        for fd in (slot.pidfd, slot.printed, *slot.outputs.values()):
            os.close(fd)
        slot.batch.close()
        slot.outputs = {}
        _end_notice(slot)

    def of_file(self, fd: int) -> Slot | None:
        """Return the slot to whose worker this watched file descriptor belongs: socket, output or pidfd; else None."""
        for slot in self.all:
            if fd in (slot.pidfd, slot.channel.fileno(), *slot.outputs.values()):
                return slot
        return None

    def stopped(self, slot: Slot) -> bool:
        """Return True if the worker is frozen, for example by SIGSTOP, or if only its main thread has ended.

        A worker that a debugger has stopped counts as frozen only if a call started the debugger, which may never end.
        """
        try:
            with open(f"/proc/{slot.pid}/stat", "rb") as file:
                state = file.read().rpartition(b")")[2].split()[:1]
        except OSError:
            return False
        return state in ([b"T"], [b"Z"]) or (state == [b"t"] and tracer_of(slot.pid) in descendants(os.getpid()))


def allow_more_files() -> tuple[int, int]:
    """Raise the soft limit of open files to the hard limit: an agent needs seven files for each worker.

    Returns the earlier limits (soft, hard). Workers get these again: some programs fail with descriptors above 1,023.
    """
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    return before


def too_many_processes() -> UsageError:
    """Return the error for a gang that asks for more processes on this node than the node can still run."""
    return UsageError(
        f"this node runs {GANG_PROCESSES} processes of calls with procs= already, which is the most that a node can; "
        "use fewer processes on each node"
    )


def _end_notice(slot: Slot) -> None:
    """Close the slot's pipe, so that its process looks for a notice. Does nothing if it is closed already."""
    if slot.notice >= 0:
        os.close(slot.notice)
        slot.notice = -1


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _nothing() -> None:
    """Do nothing. `watch` gets this callback when it is to stop watching a file descriptor."""


def _send(to: socket.socket, buffers: list[Buffer], fds: list[int]) -> None:
    """Send one packet. Raises BlockingIOError if there is no room, ConnectionError if the other end is closed."""
    if not fds and len(buffers) == 1:
        to.send(buffers[0])
        return
    to.sendmsg(buffers, rights(fds))
