"""`Monitor`: measures the node, its devices and its running calls, and keeps the samples until the client has them.

The agent itself reads the node and the calls from `/proc`. Devices are read by a process of its own, the sampler,
because a broken device or driver may hang whoever asks it.
"""

from __future__ import annotations

import json
import math
import os
import select
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from skypool.agent.node_facts import SWITCH
from skypool.agent.processes import CLEAN
from skypool.devices.device import Device
from skypool.devices.sample import CallSample, DeviceSample, NodeSample, node_sample, to_json
from skypool.devices.xid import bounded
from skypool.samples.machine import Machine, process
from skypool.wire.frames import JSON_SPARE, MAX_HEADER, share_of_header

if TYPE_CHECKING:
    import subprocess

_EVERY = 5.0
"""Seconds between two samples of a node without devices."""
_EVERY_WITH_DEVICES = 1.0
"""Seconds between two samples of a node with devices."""
_FIRST = 1.0
"""Seconds until the first sample, so that a node's start costs nothing."""
_PATIENCE = 10.0
"""Seconds without a reading after which the sampler counts as hung, and is killed."""
_PATIENCE_WITH_TOOLS = 120.0
"""The value of `_PATIENCE` on a node whose devices are read by vendors' tools, which have a time limit of their own."""
_PAUSE = 1.0
"""Seconds until a sampler that ended or hung is started again. Each later pause is twice as long."""
_LONGEST_PAUSE = 60.0
"""The longest pause in seconds until a sampler is started again."""
_KEPT = 600
"""The most samples that are kept while no client takes them."""
_AT_ONCE = 16
"""The most samples in one status report."""
_MOST_BYTES = MAX_HEADER - (256 << 10)
"""The most bytes that the samples of one status report have together. The rest of the report is short."""
_MOST_SPARE = JSON_SPARE - (64 << 10)
"""The most bytes of `JSON_SPARE`, the memory that a header may take beyond its length, for a report's samples.

They suffice for about 9 samples of 8 devices and 8 calls.
"""
_SENT_AGAIN = 30
"""The number of samples that are sent again on a new connection, because they may have been lost with the old one."""
_LINE = 1 << 20
"""The most bytes of a line that the sampler prints. A longer line counts as a failure."""
_CALLS = 32
"""The most calls that one sample describes."""
_PROGRAM = """import os, sys
sys.stdout.flush()
os.dup2(3, 1)
os.close(3)
sys.path[:0] = [sys.argv[1]]
from skypool.samples.sampler import main
main({wanted})"""

Running = Callable[[], Iterable[tuple[int, str, int, int, float]]]
"""Returns (call id, function name, slot, process id, seconds that it has run) for each running call."""


class Monitor:
    """Monitor of one node. Making the object starts and reads nothing; `tick` does.

    Args:
        devices: the devices to measure. Without any, no sampler is started.
        folder: the folder in which calls run.
        watch: `watch(fd, events, callback)` makes the agent's loop call `callback` when these epoll events occur on the
            file descriptor `fd`. With events 0, the loop stops watching `fd`.
        running: returns (call id, function name, slot, process id, seconds so far) for each running call.
        on_news: called when the devices were read for the first time, when a driver has reported an error, and when
            devices are lost or can no longer be read.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        folder: str,
        watch: Callable[[int, int, Callable[[], None]], None],
        running: Running,
        on_news: Callable[[], None],
    ) -> None:
        wanted: dict[tuple[str, int], str] = {}
        for each in devices:  # partitions of one card are one device here
            wanted.setdefault((each.kind, each.index), "" if each.profile else each.uuid)
        self._wanted = [(kind, index, uuid) for (kind, index), uuid in wanted.items()]
        self._machine = Machine(folder)
        self._watch = watch
        self._running = running
        self._on_news = on_news
        self._read_devices: tuple[DeviceSample, ...] = ()
        self._xids: dict[int, tuple[int, ...]] = {}
        self._child: subprocess.Popen[bytes] | None = None
        self._said = b""
        self._heard = 0.0
        self._pause = _PAUSE
        self._start_at = 0.0
        self._now = 0.0
        self._next: float | None = None
        self._calls: dict[int, tuple[float, float]] = {}
        self._kept: deque[tuple[int, dict[str, Any]]] = deque(maxlen=_KEPT)
        self._made = 0
        self._at = 0.0
        self._sent = 0
        self._most_sent = 0
        tools = any(kind != "cuda" for kind, _, _ in self._wanted)
        self._patience = _PATIENCE_WITH_TOOLS if tools else _PATIENCE

    # --- what the loop calls ---------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Start the sampler if there are devices, kill it if it hangs, and take a sample if it is time to.

        `now` is the time of the agent's clock, in seconds. It does not count pauses of the whole node.
        """
        self._now = now
        if self._next is None:
            is_off = os.environ.get(SWITCH) == "off"
            self._next = math.inf if is_off else now + _FIRST
            if is_off:
                self._wanted = []
        if self._wanted:
            self._look_after(now)
        if now >= self._next:
            self._next = now + (_EVERY_WITH_DEVICES if self._wanted else _EVERY)
            self._measure()

    def taken(self) -> list[dict[str, Any]]:
        """Return the oldest samples that were not sent yet, as values for JSON. From now on they count as sent.

        At most `_AT_ONCE` (16) are returned, and only as many as fit into one frame: a client gives up a node whose
        frame is too large.
        """
        if self._made == self._sent:
            return []
        waiting = [(number, said) for number, said in self._kept if number > self._sent][:_AT_ONCE]
        found = waiting[: _fitting([said for _, said in waiting])]
        self._sent = found[-1][0]
        self._most_sent = max(self._most_sent, self._sent)
        return [said for _, said in found]

    def rewind(self) -> None:
        """Have `taken` return the last `_SENT_AGAIN` (30) samples again, as an earlier connection may have lost them.

        Two calls in a row go back no further than one. The client drops samples that it has already, but recognises
        only the last ones.
        """
        self._sent = min(self._sent, max(0, self._most_sent - _SENT_AGAIN))

    # --- measuring -------------------------------------------------------------------------------------------

    def _measure(self) -> None:
        sample = replace(self._machine.read(), devices=self._devices(), calls=tuple(self._call_samples()))
        self._xids = {}
        at = round(sample.time, 3)
        if at == self._at:  # a client tells the samples of a node apart by their times
            at = round(at + 0.001, 3)
        self._at = at
        self._keep(replace(sample, time=at))

    def _keep(self, sample: NodeSample) -> None:
        self._made += 1
        self._kept.append((self._made, to_json(sample)))

    def _devices(self) -> tuple[DeviceSample, ...]:
        """Return the last reading of the devices, with all errors of drivers since the last sample."""
        return tuple(replace(each, xids=self._xids.get(each.index, ())) for each in self._read_devices)

    def _call_samples(self) -> Iterable[CallSample]:
        before, self._calls = self._calls, {}
        memory: dict[int, float] = {}
        for each in self._read_devices:
            for owner, mib in (each.memory_of or {}).items():
                memory[int(owner)] = memory.get(int(owner), 0.0) + mib
        for id_, name, slot, pid, seconds in list(self._running())[:_CALLS]:
            use = process(pid)
            if use is None:
                continue
            began, peak = before.get(id_, (use.cpu_seconds, 0.0))
            peak = max(peak, use.rss_mib)
            self._calls[id_] = began, peak
            cpu = use.cpu_seconds - began if id_ in before else None
            yield CallSample(id_, name[:200], slot, max(0.0, seconds), cpu, use.rss_mib, peak, memory.get(pid))

    # --- the sampler -----------------------------------------------------------------------------------------

    def _look_after(self, now: float) -> None:
        """Start the sampler, or kill it if it hangs. Never waits for it: a hung driver may make it unkillable."""
        child = self._child
        if child is None:
            if now >= self._start_at:
                self._start()
        elif child.stdout is None:  # it was told to end
            if child.poll() is not None:
                self._child = None
        elif now - self._heard > self._patience:
            self._give_up("the monitor hangs: the device's driver does not answer")

    def _start(self) -> None:
        import subprocess  # imported here because a node without devices does not need it

        program = _PROGRAM.format(wanted=repr(self._wanted))
        argv = ["sh", "-c", CLEAN, "sh", sys.executable, "-P", "-c", program, sys.path[0]]
        self._heard = self._now
        self._said = b""
        try:
            self._child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except OSError as e:
            self._fail(f"the monitor cannot be started: {e}")
            return
        os.set_blocking(self._stdout, False)
        self._watch(self._stdout, select.EPOLLIN, self._read)

    @property
    def _stdout(self) -> int:
        assert self._child is not None
        assert self._child.stdout is not None
        return self._child.stdout.fileno()

    def _read(self) -> None:
        """Read what the sampler has printed. A whole line is a reading; the end of the output counts as a failure."""
        try:
            data = os.read(self._stdout, 1 << 16)
        except BlockingIOError:
            return
        self._said += data
        *lines, self._said = self._said.split(b"\n")
        try:
            for line in lines:
                self._take(node_sample({"devices": json.loads(line)}).devices)
        except ValueError as e:  # a library of the vendor may print to stdout, too
            print(f"the monitor printed something that is no reading: {e}", file=sys.stderr, flush=True)
            self._give_up("the monitor printed something that is no reading")
            return
        if not data or len(self._said) > _LINE:
            self._give_up("the monitor ended")

    def _take(self, read: tuple[DeviceSample, ...]) -> None:
        is_first = not self._read_devices or any(each.unknown for each in self._read_devices)
        for sample in read:
            if sample.xids:
                self._xids[sample.index] = bounded((*self._xids.get(sample.index, ()), *sample.xids))
        was_lost = {each.index for each in self._read_devices if each.lost}
        is_lost = {each.index for each in read if each.lost}
        self._read_devices = read
        self._heard = self._now
        if not any(each.unknown for each in read):
            self._pause = _PAUSE
        if is_first or self._xids or is_lost - was_lost:
            self._measure()
            self._on_news()

    def _give_up(self, why: str) -> None:
        """Kill the sampler, and note that the devices are unknown because of `why`. Does not wait for its end."""
        child = self._child
        assert child is not None
        assert child.stdin is not None
        assert child.stdout is not None
        self._watch(self._stdout, 0, lambda: None)
        child.kill()
        child.stdin.close()
        child.stdout.close()
        child.stdout = None
        self._fail(why)

    def _fail(self, why: str) -> None:
        """Note that the devices are unknown because of `why`, and set the time of the sampler's next start."""
        self._start_at = self._now + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        known = self._read_devices
        self._read_devices = tuple(DeviceSample(kind, index, uuid, why) for kind, index, uuid in self._wanted)
        if not known or not known[0].unknown:
            self._measure()
            self._on_news()


def _fitting(samples: Sequence[dict[str, Any]]) -> int:
    """Return how many samples, from the first one on, fit in one status report. A single sample always does."""
    if len(samples) == 1:  # the usual case: nothing waits
        return 1
    length = spare = 0
    for count, said in enumerate(samples):
        more, more_spare = share_of_header(said)
        length += more
        spare += more_spare
        if count and (length > _MOST_BYTES or spare > _MOST_SPARE):
            return count
    return len(samples)
