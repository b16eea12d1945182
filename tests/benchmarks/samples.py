"""What samples cost: CPU time of the client and of a node, and the round trip of a call. Timing never fails a test.

python tests/benchmarks/samples.py
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import skypool as sky
from skypool.agent import monitor
from skypool.samples.machine import Machine
from skypool.samples.store import SampleStore
from skypool.samples.values import CallSample, NodeSample, node_sample, to_json

NODES = 64
_EVERY = 5.0
"""Seconds between two samples of a node without devices, as `skypool.agent.monitor` has them."""


def rows() -> list[tuple[str, str, str, str]]:
    """(what, figure, baseline, ratio)."""
    return [*_node(), *_client(), *_round_trips()]


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


def _client() -> Iterator[tuple[str, str, str, str]]:
    """The work of the client for one sample of each of 64 nodes: read it, keep it, write it to the file."""
    import tempfile

    call = CallSample(1, "train", 0, 1.0, 1.0, 100.0, 100.0)
    reading = Machine("/")
    reading.read()
    with tempfile.TemporaryDirectory() as folder:
        store = SampleStore(lambda: Path(folder) / "s.sqlite3")
        at = time.time()

        def one() -> None:
            nonlocal at
            at += _EVERY
            for node in range(NODES):
                said = to_json(NodeSample(time=at, cpu_percent=3.0, memory_used_mib=1e3, calls=(call,)))
                sample = node_sample(said)
                store.add([NodeSample(node, sample.time, calls=sample.calls)])
            store.flush()

        share = 100 * _each(one, 100) / _EVERY
    yield f"samples: the client of {NODES} nodes, of a core", f"{share:.3f} %", "1 %", f"{share:.3f} (1)"


def _nothing() -> None:
    return None


def _round_trips(rounds: int = 40, calls: int = 250) -> Iterator[tuple[str, str, str, str]]:
    """No-op calls on two pools by turns: one whose node is measured, one whose node is not."""
    times: dict[str, list[float]] = {"on": [], "off": []}
    pools = {"on": _pool("on"), "off": _pool("off")}
    try:
        for turn in range(2 * rounds):
            name = ("on", "off")[turn % 2]
            pool = pools[name]
            began = time.perf_counter()
            for _ in range(calls):
                pool.submit(_nothing).result()
            times[name].append((time.perf_counter() - began) / calls)
    finally:
        for pool in pools.values():
            pool.stop()
    on, off = (statistics.median(times[name]) for name in ("on", "off"))
    yield "samples: round trip of a no-op call", f"{1e6 * on:.1f} µs", f"{1e6 * off:.1f} µs", f"{on / off:.3f} (1.03)"


def _pool(switch: str) -> sky.ComputePool:
    os.environ[monitor.SWITCH] = switch
    try:
        return sky.ComputePool(console="off", slots=1).start()
    finally:
        del os.environ[monitor.SWITCH]


if __name__ == "__main__":
    for row in rows():
        print("  ".join(row))
