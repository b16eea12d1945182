"""A pool over ssh beside the bare ssh pipe, on a lab machine; and making a bare machine ready beside a shell script."""

from __future__ import annotations

import shlex
import socket
import statistics
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import numpy as np

import skypool as sky
from tests.benchmarks.core import CALLS, ECHO, Row
from tests.lab.machines import Lab, Machine, unavailable
from tests.lab.work import interpreter, made_once, same, size_of

_LARGE = 200_000_000
_FORWARDED = 50_000_000

_BY_HAND = """
set -e
export DEBIAN_FRONTEND=noninteractive
apt-get -q update
apt-get -q -y install --no-install-recommends jq
python3 -m venv /root/venv
/root/venv/bin/pip -q install numpy
/root/venv/bin/python -c 'import numpy'
"""


def rows() -> Iterator[Row]:
    """(what, figure, baseline, ratio)."""
    if why := unavailable():
        yield "a pool over ssh", "–", why, "–"
        return
    with Lab() as lab:
        machine = lab.machine(keys=[lab.public_key])
        with sky.ComputePool(
            _provider(lab, machine), image=sky.Image(pip=["cloudpickle", "numpy"]), console="off"
        ) as pool:
            remote = interpreter() >> pool
            ssh = machine.ssh_argv("root", lab.client_key)
            list(pool.map(same, range(100)))
            yield from _round_trip(pool, [*ssh, shlex.join([remote, "-c", ECHO])])
            yield from _pipelined(pool, [*ssh, shlex.join([remote, "-c", ECHO])])
            yield from _large(pool, ssh)
            yield from _forward(pool, ssh)
        machine.destroy()
        yield from _making_ready(lab)


def _provider(lab: Lab, machine: Machine) -> Any:
    return sky.SSH(
        hosts=[sky.Host(machine.address, host_key=machine.host_key)], user="root", identity=str(lab.client_key)
    )


def _framed(function: Callable[..., Any], n: int) -> bytes:
    data: bytes = cloudpickle.dumps((function, (n,)))
    return struct.pack("!I", len(data)) + data


def _answer(pipe: Any) -> Any:
    return cloudpickle.loads(pipe.read(struct.unpack("!I", pipe.read(4))[0]))


def _round_trip(pool: sky.ComputePool, echo: list[str]) -> Iterator[Row]:
    def in_a_script(x: Any) -> Any:
        return x

    times: dict[str, list[float]] = {"ours": [], "value": [], "call": []}
    with subprocess.Popen(echo, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as pipe:
        assert pipe.stdin is not None
        assert pipe.stdout is not None

        def through(function: Callable[..., Any], n: int) -> Any:
            pipe.stdin.write(_framed(function, n))  # type: ignore[union-attr]  # asserted above
            pipe.stdin.flush()  # type: ignore[union-attr]  # asserted above
            return _answer(pipe.stdout)

        runs: dict[str, Callable[[int], Any]] = {
            "ours": lambda n: same(n) >> pool,
            "value": lambda n: through(abs, n),
            "call": lambda n: through(in_a_script, n),
        }
        for block in range(20):
            for name, run in runs.items():
                for n in range(50):
                    began = time.perf_counter()
                    run(n)
                    if block:
                        times[name].append(time.perf_counter() - began)
        pipe.stdin.close()
    ours, value, call = (statistics.median(times[name]) * 1e6 for name in ("ours", "value", "call"))
    what, figure = "no-op round trip over ssh, p50", f"{ours:.0f} µs"
    yield what, figure, f"{value:.0f} µs cloudpickle echo of a value through ssh", f"{ours / value:.2f} (≤ 2)"
    yield what, figure, f"{call:.0f} µs cloudpickle echo of the same call", f"{ours / call:.2f} (≤ 2)"


def _pipelined(pool: sky.ComputePool, echo: list[str]) -> Iterator[Row]:
    def ours() -> float:
        began = time.perf_counter()
        list(pool.map(same, range(CALLS)))
        return CALLS / (time.perf_counter() - began)

    def bare() -> float:
        with subprocess.Popen(echo, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as pipe:
            assert pipe.stdin is not None
            pipe.stdin.write(_framed(abs, 0))
            pipe.stdin.flush()
            _answer(pipe.stdout)
            began = time.perf_counter()
            sender = threading.Thread(target=_send_all, args=(pipe.stdin,))
            sender.start()
            for n in range(CALLS):
                assert _answer(pipe.stdout) == n
            took = time.perf_counter() - began
            sender.join()
            pipe.stdin.close()
        return CALLS / took

    rates = [(ours(), bare()) for _ in range(9)]  # by turns, as the machine's speed changes from second to second
    mine, other = (statistics.median(each) for each in zip(*rates, strict=True))
    what = f"map of {CALLS:,} no-ops over ssh, 2 slots"
    yield what, f"{mine:,.0f} calls/s", f"{other:,.0f} pipelined through bare ssh", f"{mine / other:.2f} (≥ 0.7)"


def _send_all(pipe: Any) -> None:
    for n in range(CALLS):
        pipe.write(_framed(abs, n))
    pipe.flush()


def _large(pool: sky.ComputePool, ssh: list[str]) -> Iterator[Row]:
    data = np.ones(_LARGE, dtype=np.uint8)

    def up() -> float:
        return _bare(ssh, "echo; cat > /dev/null; echo", data.data)

    def down() -> float:
        return _bare(ssh, f"echo; head -c {_LARGE} /dev/zero", b"")

    def timed(run: Callable[[], Any]) -> float:
        began = time.perf_counter()
        run()
        return time.perf_counter() - began

    runs: dict[str, Callable[[], float]] = {
        "as an argument": lambda: timed(lambda: size_of(data) >> pool),
        "as a result": lambda: timed(lambda: made_once(_LARGE) >> pool),
        "up": up,
        "down": down,
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(4):
        for name, run in runs.items():
            took = run()
            if turn:
                times[name].append(took)
    rate = {name: _LARGE / min(each) / 1e6 for name, each in times.items()}
    for what, bare in (("as an argument", "up"), ("as a result", "down")):
        ours, other = rate[what], rate[bare]
        yield (
            f"{_LARGE // 10**6} MB over ssh {what}",
            f"{ours:,.0f} MB/s",
            f"{other:,.0f} MB/s through bare ssh",
            f"{ours / other:.2f} (≥ 0.7)",
        )


_SERVE = """
import socket, threading
def serve(connection):
    with connection:
        head = connection.recv(10)
        left = int(head[1:])
        if head[:1] == b"d":
            block = bytes(1 << 20)
            while left:
                left -= connection.send(block[:left])
        else:
            while left:
                left -= len(connection.recv(min(left, 1 << 20)))
            connection.sendall(b"done")
with socket.create_server(("127.0.0.1", 8264), backlog=16) as server:
    print("up", flush=True)
    while True:
        threading.Thread(target=serve, args=(server.accept()[0],)).start()
"""
"""A program for the machine: it sends ("d") or takes ("u") as many bytes as a connection says first, as 9 digits."""


def _forward(pool: sky.ComputePool, ssh: list[str]) -> Iterator[Row]:
    """Bytes through `pool.forward` beside those through `ssh -L`, by turns."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    serving = [*ssh, shlex.join(["timeout", "300", "python3", "-c", _SERVE])]
    options, host = ssh[:-1], ssh[-1]
    beside = [*options, "-o", "ExitOnForwardFailure=yes", "-L", f"127.0.0.1:{port}:localhost:8264", host, "echo; cat"]
    with (
        subprocess.Popen(serving, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server,
        subprocess.Popen(beside, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as carrier,
        pool.forward(8264) as forward,
    ):
        try:
            assert server.stdout is not None
            assert carrier.stdout is not None
            server.stdout.readline()
            carrier.stdout.readline()
            for kind, what in ((b"d", "from"), (b"u", "to")):
                rates = [(_through(forward.port, kind), _through(port, kind)) for _ in range(8)][1:]
                ours, other = (statistics.median(each) for each in zip(*rates, strict=True))
                yield (
                    f"{_FORWARDED // 10**6} MB {what} a node through pool.forward",
                    f"{ours:,.0f} MB/s",
                    f"{other:,.0f} MB/s through ssh -L",
                    f"{ours / other:.2f} (≥ 0.8)",
                )
        finally:
            server.kill()
            carrier.kill()


def _through(port: int, kind: bytes) -> float:
    """Send or take `_FORWARDED` bytes through a port of this computer, and return the rate in MB/s."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        began = time.perf_counter()
        connection.sendall(kind + b"%09d" % _FORWARDED)
        if kind == b"d":
            left = _FORWARDED
            space = bytearray(1 << 20)
            while left:
                received = connection.recv_into(space, min(left, len(space)))
                assert received
                left -= received
        else:
            block = bytes(1 << 20)
            for at in range(0, _FORWARDED, len(block)):
                connection.sendall(block[: _FORWARDED - at])
            assert connection.recv(4) == b"done"
        return _FORWARDED / (time.perf_counter() - began) / 1e6


def _bare(ssh: list[str], command: str, data: bytes | memoryview) -> float:
    """Seconds from the end of the login until `data` has gone there and everything has come back."""
    with subprocess.Popen([*ssh, command], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as pipe:
        assert pipe.stdin is not None
        assert pipe.stdout is not None
        pipe.stdout.readline()
        began = time.perf_counter()
        pipe.stdin.write(data)
        pipe.stdin.close()
        while pipe.stdout.read(1 << 20):
            pass
        return time.perf_counter() - began


def _making_ready(lab: Lab) -> Iterator[Row]:
    image = sky.Image(pip=["numpy"], apt=["jq"])

    def start(machine: Machine) -> float:
        began = time.perf_counter()
        pool = sky.ComputePool(_provider(lab, machine), image=image, console="off").start()
        took = time.perf_counter() - began
        pool.stop()
        return took

    ours, hand, warm = [], [], []
    for _ in range(3):
        bare = lab.machine(keys=[lab.public_key])
        began = time.perf_counter()
        subprocess.run(
            [*bare.ssh_argv("root", lab.client_key), "sh"], input=_BY_HAND.encode(), capture_output=True, check=True
        )
        hand.append(time.perf_counter() - began)
        bare.destroy()
        machine = lab.machine(keys=[lab.public_key])
        ours.append(start(machine))
        warm.append(start(machine))
        machine.destroy()
    mine, other, again = map(statistics.median, (ours, hand, warm))
    yield (
        "a bare machine made ready: apt jq, pip numpy",
        f"{mine:.1f} s",
        f"{other:.1f} s by a shell script with pip",
        f"{mine / other:.2f} (≤ 1.2)",
    )
    yield "the same image on the warm machine", f"{again:.2f} s", f"{mine:.1f} s bare", f"{again / mine:.2f} (< 1 s)"
