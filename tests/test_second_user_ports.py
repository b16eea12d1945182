"""Another user of this computer connects to our ports, and sends nothing, too much, or nonsense.

Each test is one attempt, as in test_second_user.py. What he holds and sends must not make calls fail or keep machines.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import skypool as sky
from skypool.gangs import probe
from skypool.metrics import http_server
from skypool.testing import FakeCloud
from tests.conftest import ROOT, children, eventually
from tests.second_user import EMPTY, argv, needs_root, open_place, other

pytestmark = needs_root

HOLD = """
    resource.setrlimit(resource.RLIMIT_NOFILE, (4000, 4000))
    held = []
    for number in range(int(sys.argv[2])):
        one = socket.socket()
        one.settimeout(2)
        try:
            one.connect(("127.0.0.1", int(sys.argv[1])))
            one.send(b"G")
            held.append(one)
        except TimeoutError:
            break  # nobody accepts them
        except OSError:
            continue
    print("ready", flush=True)
    while True:
        time.sleep(0.5)
        for one in held:
            with contextlib.suppress(OSError):
                one.send(b"E")
"""
"""Holds many connections, and sends a byte to each now and then."""


@contextlib.contextmanager
def attacked(program: str, *args: object) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program as the other user, which has begun when it prints a line, and kill it at the end."""
    with subprocess.Popen(argv(program, *args), stdout=subprocess.PIPE, cwd="/", env=EMPTY) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process
        finally:
            process.kill()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def page(prometheus: sky.Prometheus) -> str:
    with urllib.request.urlopen(prometheus.url, timeout=20) as reply:
        return str(reply.read().decode())


@pytest.fixture(scope="module")
def prometheus() -> Iterator[sky.Prometheus]:
    """The port of a pool's metrics."""
    found = sky.Prometheus(port=0)
    with sky.ComputePool(slots=1, console="off", metrics=found, name="measured") as pool:
        assert pool.submit(abs, -1).result(60) == 1
        yield found


# --- metrics ---------------------------------------------------------------------------------------------------------


def test_hold_connections_to_the_metrics(prometheus: sky.Prometheus) -> None:
    files, threads = descriptors(), threading.active_count()
    with attacked(HOLD, prometheus.port, 300):
        assert descriptors() < files + 50
        assert threading.active_count() < threads + 5
        for _ in range(3):  # those that hold connections do not keep out who asks
            assert 'skypool_pool="measured"' in page(prometheus)


def test_send_a_request_byte_by_byte(prometheus: sky.Prometheus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_WITHIN", 1.0, raising=False)
    program = """
        one = socket.create_connection(("127.0.0.1", int(sys.argv[1])), 5)
        began = time.monotonic()
        with contextlib.suppress(OSError):
            for byte in b"GET /metrics HTTP/1.0\\r\\nX: " + b"x" * 30:
                one.send(bytes([byte]))
                time.sleep(0.2)
        print(time.monotonic() - began)
    """
    assert float(other(program, prometheus.port)) < 5


def test_take_an_answer_byte_by_byte(prometheus: sky.Prometheus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_WITHIN", 1.0, raising=False)
    program = """
        for _ in range(100):
            one = socket.socket()
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            one.connect(("127.0.0.1", int(sys.argv[1])))
            one.send(b"GET /metrics HTTP/1.0\\r\\n\\r\\n")
            globals()[f"kept_{_}"] = one
        print("ready", flush=True)
        time.sleep(600)
    """
    files, threads = descriptors(), threading.active_count()
    with attacked(program, prometheus.port):
        assert 'skypool_pool="measured"' in page(prometheus)
        eventually(lambda: descriptors() < files + 5 and threading.active_count() < threads + 5, 30, "the end of them")


def test_fill_memory_by_an_endless_request(prometheus: sky.Prometheus) -> None:
    program = """
        one = socket.create_connection(("127.0.0.1", int(sys.argv[1])), 5)
        sent = 0
        one.send(b"GET /metrics HTTP/1.0\\r\\n")
        with contextlib.suppress(OSError):
            while sent < 50_000_000:
                sent += one.send(b"X: " + b"x" * 30_000 + b"\\r\\n")
        print(sent)
    """
    assert int(other(program, prometheus.port)) < 10_000_000


@pytest.mark.parametrize(
    "sent",
    [
        b"\r\n\r\n",
        b"\0\xff\x1b[2J\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /metrics HTTP/9\r\nno header\r\n\r\n",
        b"GET / X\n\n",
    ],
)
def test_send_nonsense_to_the_metrics(
    prometheus: sky.Prometheus, capfd: pytest.CaptureFixture[str], sent: bytes
) -> None:
    program = """
        linger = struct.pack("ii", 1, 0)  # the connection is reset at its end
        for _ in range(20):
            one = socket.create_connection(("127.0.0.1", int(sys.argv[1])), 5)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            one.send(bytes.fromhex(sys.argv[2]))
            one.close()
    """
    other(program, prometheus.port, sent.hex())
    assert 'skypool_pool="measured"' in page(prometheus)
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "")


def test_keep_the_metrics_busy(prometheus: sky.Prometheus) -> None:
    program = """
        print("ready", flush=True)
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", int(sys.argv[1])), 5) as one:
                one.send(b"GET /metrics HTTP/1.0\\r\\n\\r\\n")
                one.recv(100)
    """
    [thread] = [each for each in threading.enumerate() if each.name == "skypool metrics server"]
    clock = time.pthread_getcpuclockid(thread.ident or 0)
    with attacked(program, prometheus.port), attacked(program, prometheus.port):
        before, began = time.clock_gettime(clock), time.monotonic()
        time.sleep(3)
        used = (time.clock_gettime(clock) - before) / (time.monotonic() - began)
    assert used < 0.35


STARVED = """
    import contextlib, os, resource, sys, threading, time
    import skypool as sky
    from skypool.testing import FakeCloud

    folder, exhausted_by = sys.argv[1:]
    prometheus = sky.Prometheus(port=0)
    pool = sky.ComputePool(FakeCloud(folder), slots=1, console="off", metrics=prometheus, name="starved")
    with pool:
        assert pool.submit(abs, -1).result(60) == 1
        limit = len(os.listdir("/proc/self/fd")) + 40
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        hogs = []
        if exhausted_by == "us":
            with contextlib.suppress(OSError):
                while True:
                    hogs.append(os.open("/dev/null", os.O_RDONLY))
        print(prometheus.port, flush=True)
        sys.stdin.readline()
        if exhausted_by == "us":
            began = time.process_time()
            time.sleep(2)
            print(time.process_time() - began, flush=True)
        else:
            assert [pool.submit(abs, -n).result(60) for n in range(50)] == list(range(50))
            assert list(pool.map(abs, range(-50, 0))) == list(range(50, 0, -1))
    print("ended", flush=True)
"""
"""A program of ours in which few descriptors are left."""


@pytest.mark.parametrize("exhausted_by", ["him", "us"])
def test_take_all_descriptors_before_a_pool_ends(exhausted_by: str, tmp_path: Path) -> None:
    argv = [sys.executable, "-c", textwrap.dedent(STARVED), str(tmp_path / "cloud"), exhausted_by]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    ) as ours:
        assert ours.stdout is not None
        port = int(ours.stdout.readline() or 0)
        with attacked(HOLD, port, 300):
            out, err = ours.communicate(b"\n", timeout=100)
    assert ours.returncode == 0, err.decode()
    *used, last = out.decode().split()
    assert last == "ended"
    assert b"Traceback" not in err
    assert [float(each) < 0.5 for each in used] == [True] * (exhausted_by == "us")
    assert FakeCloud(tmp_path / "cloud").instances() == []


# --- forwards --------------------------------------------------------------------------------------------------------


def test_start_programs_without_end_by_a_forward(prometheus: sky.Prometheus) -> None:
    with sky.ComputePool(slots=1, console="off") as pool, pool.forward(prometheus.port) as forward:
        before = len(children(os.getpid()))
        with attacked(HOLD, forward.port, 200):
            seen = [0]
            while (now := len(children(os.getpid()))) > seen[-1]:  # until there are no further ones
                seen.append(now)
                time.sleep(1)
            assert max(seen) <= before + 70
            assert pool.submit(abs, -1).result(60) == 1


def test_connect_to_the_socket_of_a_forward(prometheus: sky.Prometheus) -> None:
    program = """
        one = socket.socket(socket.AF_UNIX)
        one.settimeout(10)
        with contextlib.suppress(ConnectionError):
            one.connect(sys.argv[1])
            one.send(b"GET /metrics HTTP/1.0\\r\\n\\r\\n")
            print(one.recv(10))
    """
    with open_place() as tmp, sky.ComputePool(slots=1, console="off") as pool:
        (tmp / "mine").mkdir(mode=0o755)
        with pool.forward(prometheus.port, socket=tmp / "mine" / "metrics") as forward:
            assert (forward.port, forward.socket, forward.address) == (0, *2 * [f"{tmp}/mine/metrics"])
            refused = subprocess.run(argv(program, forward.socket), capture_output=True, text=True, env=EMPTY)
            assert "PermissionError" in refused.stderr
            os.chmod(forward.socket, 0o666)
            assert other(program, forward.socket) in ("", "b''\n")
            with socket.socket(socket.AF_UNIX) as ours:
                ours.connect(forward.socket)
                ours.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
                assert ours.recv(15) == b"HTTP/1.0 200 OK"
        assert list((tmp / "mine").iterdir()) == []


@pytest.mark.parametrize("what", ["folder", "socket", "link", "open folder", "tmp"])
def test_take_the_place_of_the_socket_of_a_forward(prometheus: sky.Prometheus, what: str) -> None:
    with open_place() as tmp, sky.ComputePool(slots=1, console="off") as pool:
        path = tmp / "mine" / "metrics"
        bind = "socket.socket(socket.AF_UNIX).bind(sys.argv[1])"
        if what == "folder":
            other("os.mkdir(sys.argv[1], 0o777)", path.parent)
        elif what == "tmp":  # he could take the name whenever `ssh` is started again
            path = tmp / "metrics"
        else:
            path.parent.mkdir()
            path.parent.chmod(0o777)
            if what == "socket":
                other(bind, path)
            elif what == "link":
                other("os.symlink('/etc/passwd', sys.argv[1])", path)
            if what != "open folder":
                path.parent.chmod(0o755)
        with pytest.raises(sky.SkypoolError, match=r"in a folder of your own|exists already"):
            pool.forward(prometheus.port, socket=path)


# --- nodes -----------------------------------------------------------------------------------------------------------


def test_hold_connections_to_the_check_of_the_network() -> None:
    token = "t" * 32
    files = descriptors()
    with probe.Listener(token, socket.AF_INET) as listener, attacked(HOLD, listener.port, 600):
        assert descriptors() < files + 400
        for _ in range(3):
            assert probe.connect((0, "127.0.0.1", listener.port, token), 10)[1] == "ok"
