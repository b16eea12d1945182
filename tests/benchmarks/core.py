"""Calls, values and streams on this machine, each beside a baseline measured in the same run."""

from __future__ import annotations

import os
import re
import socket
import statistics
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np

import skypool as sky
from tests.benchmarks import peers

Row = tuple[str, str, str, str]
CALLS = peers.CALLS
LARGE = 500_000_000

ECHO = """
import struct, sys, cloudpickle
read, write = sys.stdin.buffer, sys.stdout.buffer
while head := read.read(4):
    function, args = cloudpickle.loads(read.read(struct.unpack("!I", head)[0]))
    data = cloudpickle.dumps(function(*args))
    write.write(struct.pack("!I", len(data)) + data)
    write.flush()
"""


@sky.compute
def same(x: Any) -> Any:
    return x


def identity(x: Any) -> Any:
    return x


def rows() -> Iterator[Row]:
    """(what, figure, baseline, ratio)."""
    with sky.ComputePool(slots=2, console="off") as pool:
        list(pool.map(same, range(100)))
        yield from _round_trip(pool)
        yield from _map(pool)
        yield _idle_memory(pool)
        yield from _stream(pool)
        yield from _large(pool)
    yield from _start()


def _round_trip(pool: sky.ComputePool) -> Iterator[Row]:
    """Alternating, so that whatever else the machine does hits all of them.

    A bare echo either sends a value alone, or the call as it is: the function by value, as a script defines it.
    """

    def in_a_script(x: Any) -> Any:
        return x

    times: dict[str, list[float]] = {"ours": [], "value": [], "call": []}
    with subprocess.Popen([sys.executable, "-c", ECHO], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as echo:
        runs: dict[str, Callable[[int], Any]] = {
            "ours": lambda n: same(n) >> pool,
            "value": lambda n: _bare_call(echo, abs, n),
            "call": lambda n: _bare_call(echo, in_a_script, n),
        }
        for block in range(20):
            for name, run in runs.items():
                for n in range(100):
                    began = time.perf_counter()
                    run(n)
                    if block:
                        times[name].append(time.perf_counter() - began)
        assert echo.stdin is not None
        echo.stdin.close()
    ours, value, call = (statistics.median(times[name]) * 1e6 for name in ("ours", "value", "call"))
    what, figure = "no-op round trip, p50", f"{ours:.0f} µs"
    yield what, figure, f"{value:.0f} µs cloudpickle echo of a value by a pipe", f"{ours / value:.2f} (≤ 3)"
    yield what, figure, f"{call:.0f} µs cloudpickle echo of the same call", f"{ours / call:.2f} (≤ 3)"


def _bare_call(echo: subprocess.Popen[bytes], function: Callable[[Any], Any], n: int) -> Any:
    assert echo.stdin is not None
    assert echo.stdout is not None
    data = cloudpickle.dumps((function, (n,)))
    echo.stdin.write(struct.pack("!I", len(data)) + data)
    echo.stdin.flush()
    (length,) = struct.unpack("!I", echo.stdout.read(4))
    return cloudpickle.loads(echo.stdout.read(length))


def _rate(run: Callable[[], Any], count: int = CALLS) -> float:
    began = time.perf_counter()
    run()
    return count / (time.perf_counter() - began)


def _map(pool: sky.ComputePool) -> Iterator[Row]:
    ours = max(_rate(lambda: list(pool.map(same, range(CALLS)))) for _ in range(3))
    what = f"map of {CALLS:,} no-ops, 2 slots"
    with ProcessPoolExecutor(2) as executor:
        list(executor.map(identity, range(10)))
        peer = max(_rate(lambda: list(executor.map(identity, range(CALLS)))) for _ in range(3))
    yield what, f"{ours:,.0f} calls/s", f"{peer:,.0f} ProcessPoolExecutor", f"{ours / peer:.2f} (≥ 1)"
    for name, aim in (("distributed", " (≥ 5)"), ("ray", ""), ("execnet", "")):
        yield _beside(what, ours, name, aim)


def _beside(what: str, ours: float, name: str, aim: str) -> Row:
    """The row of a peer, which says why if it could not be measured."""
    figure = f"{ours:,.0f} calls/s"
    try:
        peer = peers.rate(name)
    except peers.Unmeasured as e:
        return what, figure, f"{name} could not be measured: {e}", "–"
    return what, figure, f"{peer:,.0f} {name}", f"{ours / peer:.2f}{aim}"


def _large(pool: sky.ComputePool) -> Iterator[Row]:
    """As an argument and as a result, alternating with `cat` on a socket of the same kind."""
    array = np.ones(LARGE, dtype=np.uint8)

    @sky.compute
    def size(x: Any) -> int:
        return len(x)

    @sky.compute
    def make(n: int) -> Any:
        kept = sys.__dict__.setdefault("_kept_by_benchmark", [])  # in the worker, so that only the way home counts
        if not kept:
            kept.append(np.ones(n, dtype=np.uint8))
        return kept[0]

    runs: list[Callable[[], Any]] = [
        lambda: size(array) >> pool,
        lambda: len(make(LARGE) >> pool),
        lambda: _through_cat(array),
    ]
    times: list[list[float]] = [[], [], []]
    for turn in range(4):
        for measured, run in zip(times, runs, strict=True):
            began = time.perf_counter()
            run()
            if turn:
                measured.append(time.perf_counter() - began)
    argument, result, cat = (LARGE / min(each) / 1e6 for each in times)
    for what, rate in (("as an argument", argument), ("as a result", result)):
        yield f"500 MB array {what}", f"{rate:,.0f} MB/s", f"{cat:,.0f} MB/s through cat", f"{rate / cat:.2f} (≥ 0.7)"


def _through_cat(array: Any) -> None:
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    with ours, subprocess.Popen(["cat"], stdin=theirs.fileno(), stdout=theirs.fileno()) as cat:
        theirs.close()

        def send() -> None:
            ours.sendall(array)
            ours.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send)
        sender.start()
        back = np.empty(len(array), dtype=np.uint8).data.cast("B")
        got = 0
        while got < len(back):
            got += ours.recv_into(back[got : got + (1 << 20)])
        sender.join()
        cat.wait()


def _stream(pool: sky.ComputePool) -> Iterator[Row]:
    count = 300_000

    @sky.compute
    def numbers(n: int) -> Iterator[int]:
        yield from range(n)

    def plain() -> Iterator[int]:
        yield from range(count)

    ours = max(_rate(lambda: sum(1 for _ in numbers(count) >> pool), count) for _ in range(3))
    loop = _rate(lambda: sum(1 for _ in plain()), count)
    yield (
        "stream of small items",
        f"{ours:,.0f} items/s",
        f"{loop:,.0f} plain generator",
        f"{ours / loop:.3f} (≥ 50,000/s)",
    )

    @sky.compute
    def blocks(n: int) -> Iterator[bytes]:
        for _ in range(n):
            yield bytes(100_000)

    items: Any = blocks(3000) >> pool
    next(items)
    before, peak = _rss(os.getpid()), 0
    for index, _ in enumerate(items):
        if index % 300 == 0:
            time.sleep(0.02)
            peak = max(peak, _rss(os.getpid()))
    grown = (peak - before) / 2**20
    yield (
        "slow consumer of a 300 MB stream",
        f"{grown:.1f} MiB more memory",
        "286 MiB all at once",
        f"{grown / 286:.3f}",
    )


def _rss(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found.group(1)) * 1024


def _idle_memory(pool: sky.ComputePool) -> Row:
    @sky.compute
    def agent() -> int:
        return os.getppid()

    ours = _rss(agent() >> pool) / 2**20
    bare = _out_of("import re; print(int(re.search(r'VmRSS:\\s+(\\d+)', open('/proc/self/status').read())[1]) / 1024)")
    return "memory of an idle agent", f"{ours:.1f} MiB", f"{bare:.1f} MiB bare python", f"{ours / bare:.2f} (≤ 40 MiB)"


def _out_of(script: str) -> float:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def _start() -> Iterator[Row]:
    timed = "import time; began = time.perf_counter(); {}; print(time.perf_counter() - began)"
    ours = min(_out_of(timed.format("import skypool")) for _ in range(5))
    json = min(_out_of(timed.format("import json")) for _ in range(5))
    yield "import skypool", f"{ours * 1e3:.1f} ms", f"{json * 1e3:.1f} ms import json", f"{ours / json:.2f} (≤ 60 ms)"
    first = """
        import time
        import skypool as sky
        @sky.compute
        def same(x): return x
        began = time.perf_counter()
        pool = sky.ComputePool(console="off").start()
        same(1) >> pool
        took = time.perf_counter() - began
        pool.stop()
        print(took)
        """
    peer = """
        import time
        began = time.perf_counter()
        from concurrent.futures import ProcessPoolExecutor
        if __name__ == "__main__":
            with ProcessPoolExecutor(2) as executor:
                executor.submit(abs, 1).result()
                print(time.perf_counter() - began)
        """
    ours = statistics.median(_out_of(first) for _ in range(5))
    bare = statistics.median(_out_of(peer) for _ in range(5))
    yield (
        "ComputePool() to first result",
        f"{ours * 1e3:.0f} ms",
        f"{bare * 1e3:.0f} ms ProcessPoolExecutor",
        f"{ours / bare:.2f} (≤ 500 ms)",
    )
