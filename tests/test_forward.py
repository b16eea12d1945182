"""A port of this computer leads to a port of a node: on this machine and over ssh. test_container.py has containers."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import os
import signal
import socket
import socketserver
import subprocess
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

import skypool as sky
from skypool import events
from skypool.agent.processes import descendants
from tests.conftest import eventually, served
from tests.lab.machines import Lab, Machine
from tests.lab.work import serve_a_page
from tests.work import add

PAGE = b"<title>a page</title>" + b"x" * 10_000


class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(PAGE)))
        self.end_headers()
        self.wfile.write(PAGE)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class Loud(socketserver.BaseRequestHandler):
    """Read until the client has said all, and then say how much that was."""

    def handle(self) -> None:
        count = 0
        while part := self.request.recv(65536):
            count += len(part)
        self.request.sendall(str(count).encode())


@pytest.fixture
def page() -> Iterator[int]:
    with served(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)) as server:
        yield server.server_port


@pytest.fixture(scope="module")
def shared() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(nodes=2, console="off") as made:
        yield made


@pytest.fixture
def pool(shared: sky.ComputePool) -> sky.ComputePool:
    return shared


def fetched(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as answer:
        body: bytes = answer.read()
    return body


def answers(url: str) -> bool:
    try:
        return fetched(url) == b"there"
    except OSError:
        return False


def is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def test_a_page_of_a_node_is_read_through_a_port_here(pool: sky.ComputePool, page: int) -> None:
    with pool.forward(page, node=1) as forward:
        assert forward.address == f"127.0.0.1:{forward.port}"
        assert forward.url == f"http://{forward.address}"
        assert fetched(forward.url) == PAGE
        assert repr(forward) == f"<Forward of {forward.address} to localhost:{page} of node 1>"
    assert is_free(forward.port)
    forward.close()


def test_many_connections_are_open_at_once(pool: sky.ComputePool, page: int) -> None:
    with pool.forward(page) as forward:
        held = [http.client.HTTPConnection("127.0.0.1", forward.port, timeout=60) for _ in range(20)]
        for each in held:
            each.connect()
        with ThreadPoolExecutor(20) as threads:

            def read(connection: http.client.HTTPConnection) -> bytes:
                connection.request("GET", "/")
                return connection.getresponse().read()

            assert list(threads.map(read, held)) == [PAGE] * 20
        for each in held:
            each.close()


def test_a_client_that_has_said_all_still_gets_its_answer(pool: sky.ComputePool) -> None:
    with served(socketserver.ThreadingTCPServer(("127.0.0.1", 0), Loud)) as server:
        with pool.forward(server.server_address[1]) as forward:
            with socket.create_connection(("127.0.0.1", forward.port), timeout=60) as connection:
                connection.sendall(b"y" * 5_000_000)
                connection.shutdown(socket.SHUT_WR)
                assert connection.recv(100) == b"5000000"
                assert connection.recv(100) == b""


def test_a_port_on_which_nobody_listens_closes_the_connection(pool: sky.ComputePool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        nobody = probe.getsockname()[1]
    with pool.forward(nobody) as forward:
        with socket.create_connection(("127.0.0.1", forward.port), timeout=60) as connection:
            assert connection.recv(100) == b""


def test_a_port_can_be_chosen_and_one_that_is_taken_is_refused(pool: sky.ComputePool, page: int) -> None:
    with pool.forward(page) as first:
        with pytest.raises(sky.UsageError, match=f"port {first.port} of this computer cannot be used: .*in use"):
            pool.forward(page, here=first.port)
    with pool.forward(page, here=first.port) as second:
        assert second.port == first.port
        assert fetched(second.url) == PAGE


class ByPath(http.client.HTTPConnection):
    """A connection to a web server at a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(60)
        self.sock.connect(self._path)


def fetched_from(path: str) -> bytes:
    with contextlib.closing(ByPath(path)) as connection:
        connection.request("GET", "/")
        return connection.getresponse().read()


def answers_at(path: str) -> bool:
    try:
        return fetched_from(path) == b"there"
    except OSError:
        return False


def test_a_page_of_a_node_is_read_through_a_socket_here(pool: sky.ComputePool, page: int, tmp_path: Path) -> None:
    path = tmp_path / "board"
    with pool.forward(page, node=1, socket=path) as forward:
        assert (forward.port, forward.socket, forward.address) == (0, str(path), str(path))
        assert forward.url == f"http+unix://{str(path).replace('/', '%2F')}"
        assert path.stat().st_mode & 0o777 == 0o600
        assert fetched_from(forward.socket) == PAGE
        with pytest.raises(sky.UsageError, match="exists already"):
            pool.forward(page, socket=path)
    assert not path.exists()
    socket.socket(socket.AF_UNIX).bind(str(path))  # as after a kill
    with pool[1].forward(page, socket=path) as forward:
        assert fetched_from(forward.socket) == PAGE
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_can_be_no_socket_is_refused(pool: sky.ComputePool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, says in (
        (tmp_path / "file", "exists already"),
        (tmp_path, "exists already"),
        (tmp_path / "file" / "in it", "without spaces"),
        (tmp_path / "file" / "in-it", "no folder"),
        (tmp_path / "none" / "board", "there is no folder"),
        (tmp_path / "a:b", "without spaces"),
        (tmp_path / ("x" * 100), "at most 103 bytes"),
    ):
        with pytest.raises(sky.UsageError, match=says):
            pool.forward(80, socket=path)
    with pytest.raises(sky.UsageError, match="not both"):
        pool.forward(80, here=8080, socket=tmp_path / "board")
    assert (tmp_path / "file").read_text() == ""


def test_what_cannot_be_meant_is_refused(pool: sky.ComputePool) -> None:
    with pytest.raises(sky.UsageError, match=r"port \(a port\) must be at least 1, not 0"):
        pool.forward(0)
    with pytest.raises(sky.UsageError, match=r"here \(a port\) must be at most 65535, not 70000"):
        pool.forward(80, here=70_000)
    with pytest.raises(sky.UsageError, match=r"has no node 7; its nodes are \[0, 1\]"):
        pool.forward(80, node=7)


class Held(NamedTuple):
    """What this process and those that it has started hold, apart from the nodes' own processes."""

    files: int
    threads: int
    processes: int
    listening: int

    @classmethod
    def now(cls) -> Held:
        processes = descendants(os.getpid())
        lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
        listening = {f"socket:[{line.split()[9]}]" for line in lines if line.split()[3] == "0A"}
        ours = [target for pid in (os.getpid(), *processes) for target in _files(pid)]
        return cls(
            len(_files(os.getpid())), threading.active_count(), len(processes), len(listening.intersection(ours))
        )


def _files(pid: int) -> list[str]:
    """Return what the open files of a process are; [] if it has ended."""
    found = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for each in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                found.append(os.readlink(f"/proc/{pid}/fd/{each}"))
    return found


def open_and_close_a_hundred(pool: sky.ComputePool, port: int, nodes: int, expected: bytes) -> None:
    """Open and close 100 forwards while a map runs. See that the map is right, and that as much is held as before."""
    with pool.forward(port) as forward:
        assert fetched(forward.url) == expected
    before = Held.now()
    running = iter(pool.map(add, range(20_000), buffersize=1000))
    results = [next(running) for _ in range(100)]
    for turn in range(100):
        with pool.forward(port, node=turn % nodes) as forward:
            if turn % 10 == 0:
                assert fetched(forward.url) == expected
        results += [next(running) for _ in range(50)]
    results += running
    assert results == [n + 1 for n in range(20_000)]

    def is_as_before() -> bool:
        return all(now <= then for now, then in zip(Held.now(), before, strict=True))

    try:
        eventually(is_as_before, 30)
    except AssertionError:
        assert Held.now() == before


@pytest.mark.slow
def test_a_hundred_forwards_while_a_map_runs_leave_nothing(pool: sky.ComputePool, page: int) -> None:
    open_and_close_a_hundred(pool, page, 2, PAGE)


def test_forwards_end_with_the_pool(page: int) -> None:
    with sky.ComputePool(console="off") as pool:
        forward = pool.forward(page)
        assert fetched(forward.url) == PAGE
    assert forward.closed
    assert is_free(forward.port)
    with pytest.raises(sky.PoolClosed):
        pool.forward(page)


# --- over ssh ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> Path:
    key = tmp_path_factory.mktemp("keys") / "id"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    return key


@pytest.fixture
def remote(lab: Lab, identity: Path) -> Iterator[Machine]:
    made = lab.machine(keys=[Path(f"{identity}.pub").read_text()])
    yield made
    made.destroy()


def ssh_pool(machine: Machine, identity: Path, slots: int | None = None) -> sky.ComputePool:
    host = sky.Host(machine.address, host_key=machine.host_key)
    provider = sky.SSH(hosts=[host], user="root", identity=str(identity))
    return sky.ComputePool(provider, slots=slots, console="off", liveness=20)


@pytest.mark.slow
def test_over_ssh_a_port_that_only_the_machine_reaches(remote: Machine, identity: Path) -> None:
    with ssh_pool(remote, identity) as pool:
        running = serve_a_page(8265) > pool
        with pool.forward(8265) as forward:
            eventually(lambda: answers(forward.url), 60, "the page")
            assert fetched(forward.url) == b"there"
            with pytest.raises(sky.UsageError, match="cannot be used"):
                pool.forward(8265, here=forward.port)
        assert is_free(forward.port)
        with pool.forward(8265, host="127.0.0.1") as again:
            assert fetched(again.url) == b"there"
        running.cancel()


@pytest.mark.slow  # each forward logs in
def test_over_ssh_a_hundred_forwards_while_a_map_runs_leave_nothing(remote: Machine, identity: Path) -> None:
    with ssh_pool(remote, identity, slots=2) as pool:
        running = serve_a_page(8265) > pool
        with pool.forward(8265) as forward:
            eventually(lambda: answers(forward.url), 60, "the page")
            before = Counter(remote.processes().values())
        open_and_close_a_hundred(pool, 8265, 1, b"there")
        # A login is two processes of sshd, and `cat`, which are those of the forward that was open.
        eventually(lambda: Counter(remote.processes().values()) < before, 30, "the end of all logins but the pool's")
        running.cancel()


@pytest.mark.slow
def test_over_ssh_a_socket_is_made_again_too(remote: Machine, identity: Path, tmp_path: Path) -> None:
    path = str(tmp_path / "board")
    with ssh_pool(remote, identity) as pool:
        running = serve_a_page(8265) > pool
        with pool.forward(8265, socket=path) as forward:
            eventually(lambda: answers_at(forward.socket), 60, "the page")
            assert os.stat(path).st_mode & 0o777 == 0o600
            (ssh,) = _carriers(path)
            os.kill(ssh, signal.SIGKILL)
            eventually(lambda: _carriers(path) not in ([], [ssh]), 60, "another ssh")
            eventually(lambda: answers_at(forward.socket), 60, "the page")
        assert _carriers(path) == []
        assert not os.path.lexists(path)
        running.cancel()


@pytest.mark.slow
def test_over_ssh_a_broken_connection_is_made_again(remote: Machine, identity: Path) -> None:
    told: list[events.Event] = []
    with ssh_pool(remote, identity) as pool:
        pool.events.listen(told.append)
        running = serve_a_page(8265) > pool
        with pool.forward(8265) as forward:
            eventually(lambda: answers(forward.url), 60, "the page")
            (ssh,) = _carriers(forward.address)
            os.kill(ssh, signal.SIGKILL)
            eventually(lambda: _carriers(forward.address) not in ([], [ssh]), 60, "another ssh")
            eventually(lambda: answers(forward.url), 60, "the page")
        assert _carriers(forward.address) == []
        running.cancel()
    notices = [each.text for each in told if isinstance(each, events.Notice)]
    assert f"the forward of port {forward.port} to node 0 broke; it is being made again" in notices


def _carriers(address: str) -> list[int]:
    """The ssh processes that listen at an address of ours."""
    found = []
    for pid in descendants(os.getpid()):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if f"{address}:".encode() in words:
            found.append(pid)
    return found
