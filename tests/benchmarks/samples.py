"""What samples cost: CPU time of the client and of a node, and the round trip of a call. Timing never fails a test.

python -m tests.benchmarks.samples
"""

from __future__ import annotations

import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import skypool as sky
from skypool.agent import monitor, node_facts
from skypool.devices.device import Device
from skypool.devices.health import HealthOfNode
from skypool.devices.sample import CallSample, DeviceSample, NodeSample, node_sample, to_json
from tests.facts import Kept
from tests.nvml import build

NODES = 64
CARDS = 8
_EVERY = 5.0
"""Seconds between two samples of a node without devices, as `skypool.agent.monitor` has them."""
_SPAN = 20.0
"""Seconds for which running processes are measured. Longer than the pause between two readings of rare values."""
_CARD = DeviceSample(
    "cuda", 0, "GPU-00000000-0000-0000-0000-000000000000", utilization_percent=97.0, sm_activity_percent=61.5,
    memory_used_mib=71234.5, memory_total_mib=81559.0, power_watts=654.321, temperature_celsius=61.0,
    sm_clock_mhz=1980.0, memory_clock_mhz=2619.0, throttled=("power cap",), pcie_sent_mib=123.456,
    pcie_received_mib=234.567, nvlink_sent_mib=34567.891, nvlink_received_mib=34567.891, pcie_width=16,
    pcie_width_max=16, nvlinks=18, nvlinks_all=18, ecc_corrected=0, ecc_uncorrected=0, remap_pending=False,
    remap_failed=False, recovery=0, xids_watched=True, memory_of={"12345": 70000.0},
)  # fmt: skip


def rows() -> list[tuple[str, str, str, str]]:
    """(what, figure, baseline, ratio)."""
    return [*_node(), *_cards(), *_client(), *_client_of_processes(), *_round_trips()]


def _cpu(pid: int) -> float:
    """Return the CPU seconds of all threads of a process so far, to the nanosecond."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((each / "schedstat").read_text().split()[0]) for each in threads) / 1e9


def _each(work: object, times: int) -> float:
    """Return the CPU seconds of one call, on average."""
    assert callable(work)
    began = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - began) / times


def _node() -> Iterator[tuple[str, str, str, str]]:
    pid = os.getpid()
    made = monitor.Monitor((), "/", lambda *_: None, lambda: [(1, "train", 0, pid, 1.0)], lambda: None)

    def one() -> None:
        made._measure()
        made.taken()

    share = 100 * _each(one, 2000) / _EVERY
    yield "samples: a node without devices, of a core", f"{share:.4f} %", "0.5 %", f"{share / 0.5:.3f} (1)"


@contextmanager
def _false_cards() -> Iterator[None]:
    """Let processes that start meanwhile find an NVML with `CARDS` GPUs, whose functions take next to no time."""
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder))
        changed = {"LD_LIBRARY_PATH": folder, "NVML_COUNT": str(CARDS)}
        before = {name: os.environ.get(name) for name in changed}
        os.environ.update(changed)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _cards() -> Iterator[tuple[str, str, str, str]]:
    """A node with GPUs: its sampler, the work of the agent, and how often the driver is asked."""
    with _false_cards():
        argv = [sys.executable, "-c", "from tests.benchmarks import samples; samples.measure_cards()"]
        done = subprocess.run(argv, capture_output=True, text=True, check=True)
        sampler, agent, asked = (float(each) for each in done.stdout.split())
    what = f"samples: a node with {CARDS} GPUs"
    yield f"{what}, sampler, of a core", f"{sampler:.3f} %", "0.5 %", f"{sampler / 0.5:.3f} (1)"
    yield (
        f"{what}, sampler and agent, of a core",
        f"{sampler + agent:.3f} %",
        "0.5 %",
        f"{(sampler + agent) / 0.5:.3f} (1)",
    )
    yield f"{what}, calls of NVML by GPU and s", f"{asked:.1f}", "-", "-"


def measure_cards() -> None:
    """Print the shares of a core in per cent of a sampler and of its agent's part, and `_asked`."""
    poll = select.epoll()
    callbacks: dict[int, Callable[[], None]] = {}

    def watch(fd: int, events: int, callback: Callable[[], None]) -> None:
        poll.register(fd, events)
        callbacks[fd] = callback

    devices = [Device("cuda", index, "NVIDIA H100 80GB HBM3", uuid=f"GPU-{index:08}-0000") for index in range(CARDS)]
    sys.path.insert(0, str(Path(sky.__file__).parents[1]))
    made = monitor.Monitor(devices, "/", watch, list, lambda: None)

    def run(seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for fd, _ in poll.poll(0.5):
                callbacks[fd]()
            made.tick(time.monotonic())
            for each in made.taken():
                assert not any(device.unknown for device in node_sample(each).devices)

    run(4)
    child = made._child
    assert child is not None
    before = _cpu(child.pid), _cpu(os.getpid())
    began = time.monotonic()
    run(_SPAN)
    span = time.monotonic() - began
    shares = [100 * (_cpu(pid) - was) / span for pid, was in zip((child.pid, os.getpid()), before, strict=True)]
    child.kill()
    child.wait()
    print(*shares, _asked())


def _asked() -> float:
    """Return how often a GPU's NVML is called in a second, counted over one period of the rare values."""
    import pynvml

    from skypool.samples import nvml

    counted: Counter[str] = Counter()
    find = pynvml._nvmlGetFunctionPointer

    def noted(name: str) -> object:
        counted[name] += 1
        return find(name)

    reader = nvml.Nvml([(index, "") for index in range(CARDS)])
    pynvml._nvmlGetFunctionPointer = noted
    for _ in range(int(nvml._RARELY)):
        reader.read()
    return counted.total() / CARDS / nvml._RARELY


def _client() -> Iterator[tuple[str, str, str, str]]:
    """The work of the client for the samples of 64 nodes: read, judge and keep them, and write them to the file."""
    yield _client_row("without devices", (), _EVERY)
    yield _client_row(f"with {CARDS} GPUs", (_CARD,) * CARDS, 1.0)


def _client_row(what: str, devices: tuple[DeviceSample, ...], every: float) -> tuple[str, str, str, str]:
    call = CallSample(1, "train", 0, 1.0, 1.0, 100.0, 100.0)
    at = time.time()
    judges = [HealthOfNode() for _ in range(NODES)]
    turns = iter(range(1_000_000))
    with tempfile.TemporaryDirectory() as folder:
        kept = Kept(Path(folder) / "s.sqlite3")

        def one() -> None:
            turn = next(turns)
            sample = NodeSample(time=at + turn * every, cpu_percent=3.0, memory_used_mib=1e3, devices=devices)
            line = json.dumps(to_json(replace(sample, calls=(call,))))
            for node in range(NODES):
                [new] = kept.new.add([replace(node_sample(json.loads(line)), node=node)])
                if devices:
                    judges[node].judge(new)
            if turn % int(_EVERY / every) == 0:
                kept.write()

        share = 100 * _each(one, 100) / every
    return f"samples: client of {NODES} nodes {what}, of a core", f"{share:.3f} %", "1 %", f"{share:.3f} (1)"


def _client_of_processes() -> Iterator[tuple[str, str, str, str]]:
    """The CPU time of a client with 64 idle local nodes, as real processes: by turns measured and not measured."""
    shares: dict[str, list[float]] = {"on": [], "off": []}
    for turn in range(4):
        name = ("on", "off")[turn % 2]
        with _switched(name), sky.ComputePool(console="off", nodes=NODES, slots=1):
            time.sleep(2)
            before, began = _cpu(os.getpid()), time.monotonic()
            time.sleep(_SPAN)
            shares[name].append(100 * (_cpu(os.getpid()) - before) / (time.monotonic() - began))
    on, off = (statistics.mean(shares[name]) for name in ("on", "off"))
    figure, share = f"{on:.3f} %", on - off
    yield f"samples: client of {NODES} local nodes, of a core", figure, f"{off:.3f} %", f"{share:+.3f} % (1 %)"


def _nothing() -> None:
    return None


def _round_trips() -> Iterator[tuple[str, str, str, str]]:
    yield _round_trip("")
    with _false_cards():
        yield _round_trip(f", {CARDS} GPUs")


def _round_trip(what: str, starts: int = 15, rounds: int = 200, calls: int = 10) -> tuple[str, str, str, str]:
    """No-op calls on two pools by turns: one whose node is measured, one whose node is not.

    Two pools alike differ, mostly because of the CPUs where their processes run. So all nodes get one CPU, and the
    client another one. The pools are started several times, and the ratio is the median of those of the starts, with
    the smallest and the largest one. The turns are so short that other work on the machine slows down both pools alike.
    """
    cpus = sorted(os.sched_getaffinity(0))
    medians: dict[str, list[float]] = {"on": [], "off": []}
    for start in range(starts):
        order = ("on", "off") if start % 2 else ("off", "on")
        _run_on(cpus[-1])
        pools = {name: _pool(name) for name in order}
        _run_on(cpus[0])
        times: dict[str, list[float]] = {"on": [], "off": []}
        try:
            for turn in range(rounds):
                for name in order if turn % 2 else reversed(order):
                    began = time.perf_counter()
                    for _ in range(calls):
                        pools[name].submit(_nothing).result()
                    times[name].append((time.perf_counter() - began) / calls)
        finally:
            for pool in pools.values():
                pool.stop()
            _run_on(*cpus)
        for name, found in times.items():
            medians[name].append(statistics.median(found))
    ratios = [on / off for on, off in zip(medians["on"], medians["off"], strict=True)]
    on, off = (statistics.median(medians[name]) for name in ("on", "off"))
    ratio = f"{statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f} (1.03)"
    return f"samples: round trip of a no-op call{what}", f"{1e6 * on:.1f} µs", f"{1e6 * off:.1f} µs", ratio


def _run_on(*cpus: int) -> None:
    """Let this process, and those that it starts, run on these CPUs."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cpus)


def _pool(switch: str) -> sky.ComputePool:
    with _switched(switch):
        return sky.ComputePool(console="off", slots=1).start()


@contextmanager
def _switched(value: str) -> Iterator[None]:
    """Let local nodes that start meanwhile be measured, or not, by `value` "on" or "off"."""
    os.environ[node_facts.SWITCH] = value
    try:
        yield
    finally:
        del os.environ[node_facts.SWITCH]


if __name__ == "__main__":
    for row in rows():
        print("  ".join(row), flush=True)
