"""Other processes of the user look into a running pool: what they see, and that none of them harms the pool."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool import events
from skypool.agent.processes import descendants
from skypool.errors import SkypoolError
from skypool.observers import client, pool_sockets, server
from skypool.observers.protocol import LONGEST_LINE, VERSION, line_of
from tests.conftest import eventually
from tests.test_forward import fetched, fetched_from, is_free, page
from tests.work import add

__all__ = ["page"]
PROGRAM = [sys.executable, "-c", "import sys; from skypool.cli import main; sys.exit(main())"]


@pytest.fixture(scope="module", autouse=True)
def _own_state() -> Iterator[None]:
    """The pools of other tests, which a list or an advice would name, are not seen here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", f"{os.environ['XDG_RUNTIME_DIR']}/observed")
        yield


@pytest.fixture(scope="module")
def shared() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(name="seen", nodes=2, slots=1, console="off") as made:
        eventually(lambda: "seen" in pool_sockets.pools(), 30, "the socket")
        yield made


@pytest.fixture
def pool(shared: sky.ComputePool) -> sky.ComputePool:
    return shared


def cli(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PROGRAM, *args], capture_output=True, text=True, timeout=60)


def started(*args: str) -> subprocess.Popen[str]:
    return subprocess.Popen([*PROGRAM, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def observer(program: str) -> subprocess.Popen[bytes]:
    """Start a Python program that observes the pool, and wait until it has said that it is ready."""
    told = "from skypool.observers import client, pool_sockets\nfrom skypool.observers.protocol import line_of\n"
    argv = [sys.executable, "-c", told + textwrap.dedent(program)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


@contextlib.contextmanager
def ended(process: subprocess.Popen[Any]) -> Iterator[subprocess.Popen[Any]]:
    with process:
        try:
            yield process
        finally:
            process.kill()


# --- what an observer sees -----------------------------------------------------------------------------------


def test_an_observer_sees_the_pool_and_its_nodes(pool: sky.ComputePool) -> None:
    seen = client.info("seen")
    assert (seen["pool"], seen["pid"], seen["phase"], seen["usd"]) == ("seen", os.getpid(), "ready", 0.0)
    assert [(each["node"], each["state"], each["provider"], each["slots"]) for each in seen["nodes"]] == [
        (0, "ready", "local", 1),
        (1, "ready", "local", 1),
    ]


def test_an_observer_gets_what_calls_print_from_now_on(pool: sky.ComputePool) -> None:
    with client.events("seen") as made:
        pool.submit(print, "a line").result()
        said = next(each for each in made.lines() if each["event"] == "Output" and "a line" in each["text"])
    assert said["stream"] == 1
    assert said["pool"] == "seen"


def test_an_observer_forwards_a_port_as_long_as_it_stays(pool: sky.ComputePool, page: int) -> None:
    with client.forward("seen", page, node=1) as made:
        assert fetched(f"http://{made.answer['address']}").startswith(b"<title>a page")
    port = int(made.answer["address"].rpartition(":")[2])
    eventually(lambda: is_free(port), 30, "the port's end")


def test_an_observer_reaches_a_node_by_the_owners_way(pool: sky.ComputePool) -> None:
    argv = client.command("seen", 1, 'cd "$cwd" && pwd; cat')
    done = subprocess.run(argv, input="given", capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{os.getcwd()}\ngiven"
    with pytest.raises(sky.UsageError, match=r"needs a node that is reached over ssh.*`skypool forward`"):
        client.command("seen", 1, "pwd", ports=[(8000, "localhost", 80)])


def test_errors_of_the_owner_are_those_of_the_observer(pool: sky.ComputePool, page: int) -> None:
    with pytest.raises(sky.UsageError, match=r"has no node 7; its nodes are \[0, 1\]"):
        client.forward("seen", 80, node=7)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(sky.UsageError, match="cannot be used"):
            client.forward("seen", page, here=taken.getsockname()[1])
    with pytest.raises(client.NoOwner, match="no process on this computer owns a pool called 'nobody'"):
        client.info("nobody")


def test_only_the_user_may_enter_and_nothing_is_left() -> None:
    with sky.ComputePool(name="private", console="off"):
        eventually(lambda: "private" in pool_sockets.pools(), 30, "the socket")
        assert stat.S_IMODE(os.lstat(pool_sockets.folder()).st_mode) == 0o700
        assert stat.S_IMODE(os.lstat(pool_sockets.folder() / "private").st_mode) == 0o600
    assert "private" not in pool_sockets.pools()
    assert [each.name for each in threading.enumerate() if "private" in each.name] == []


def test_observers_hear_of_the_end(page: int) -> None:
    with sky.ComputePool(name="short", console="off"):
        eventually(lambda: "short" in pool_sockets.pools(), 30, "the socket")
        following, forwarding = client.events("short"), client.forward("short", page)
    with following, forwarding:
        assert [each["phase"] for each in following.lines() if each["event"] == "PoolPhase"][:1] == ["draining"]
        assert all("closed" in each for each in forwarding.lines())
    assert is_free(int(forwarding.answer["address"].rpartition(":")[2]))


# --- sockets and their places --------------------------------------------------------------------------------


class Still:
    """A pool that says nothing by itself. A forward of it takes as long as its `ready` is not set."""

    def __init__(self) -> None:
        self.stream = events.EventStream()

    def info(self) -> dict[str, object]:
        return {"pool": "still"}

    def listen(self, hear: Callable[[events.Event], None]) -> Callable[[], None]:
        return self.stream.listen(hear)

    def forward(self, node: int, host: str, port: int, here: int | str) -> Any:
        raise RuntimeError("a fault of the owner")

    def command(self, node: int, script: str, terminal: bool, ports: Any) -> list[str]:
        return ["sh", "-c", script]


@pytest.fixture
def still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Still]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    watched = Still()
    serving = server.ObserverServer("still", watched)
    serving.open()
    yield watched
    serving.close()
    assert pool_sockets.pools() == []
    assert [each.name for each in threading.enumerate() if "observer" in each.name and "seen" not in each.name] == []


def connected() -> socket.socket:
    return pool_sockets.connect("still", 30)


def answer_to(data: bytes) -> bytes:
    """Everything that the owner sends after these bytes of an observer, until it closes the connection."""
    with connected() as made:
        with contextlib.suppress(BrokenPipeError):
            made.sendall(data)
        said = b""
        with contextlib.suppress(ConnectionResetError):  # it has closed the connection before it had read all
            while part := made.recv(65536):
                said += part
    return said


def test_a_long_path_leads_to_a_socket_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / ("long" * 30)))
    first, second = (server.ObserverServer("still", Still()) for _ in range(2))
    first.open()
    before = Path(os.readlink(pool_sockets.folder() / "still")).parent
    assert stat.S_IMODE(before.stat().st_mode) == 0o700
    assert client.info("still") == {"pool": "still"}
    second.open()  # as a process that has taken the pool over
    assert not before.exists()
    now = Path(os.readlink(pool_sockets.folder() / "still")).parent
    first.close()
    assert client.info("still") == {"pool": "still"}
    second.close()
    assert not now.exists()
    assert os.listdir(pool_sockets.folder()) == []


def test_the_socket_of_a_killed_process_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for home in (tmp_path / "state", tmp_path / ("long" * 30)):
        monkeypatch.setenv("XDG_STATE_HOME", str(home))
        process = observer(
            "kept = pool_sockets.listen('dead')\nprint('ready', flush=True)\nimport time; time.sleep(600)"
        )
        with ended(process):
            assert pool_sockets.pools() == ["dead"]
        link = pool_sockets.folder() / "dead"
        there = Path(os.readlink(link)).parent if link.is_symlink() else None
        with pytest.raises(client.NoOwner):
            client.info("dead")
        assert pool_sockets.pools() == []
        assert there is None or not there.exists()


def test_a_path_is_no_name_of_a_pool_and_a_file_is_never_removed(still: Still, tmp_path: Path) -> None:
    file = tmp_path / "state" / "skypool" / "a-file"
    file.write_text("kept")
    for name in (str(file), "../a-file", "", ".", "still/", "still\n"):
        with pytest.raises(client.NoOwner):
            client.info(name)
    inside = pool_sockets.folder() / "inside"
    inside.write_text("kept")
    with pytest.raises(client.NoOwner):
        client.info("inside")
    assert (file.read_text(), inside.read_text()) == ("kept", "kept")
    inside.unlink()


def test_a_forked_child_does_not_keep_the_socket(still: Still) -> None:
    child = os.fork()
    if child == 0:
        time.sleep(600)

    parent, elsewhere = str(pool_sockets.folder()), str((pool_sockets.folder() / "still").resolve().parent)

    def holds(pid: int) -> bool:
        held = set()
        for each in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # it was closed just now
                held.add(os.readlink(f"/proc/{pid}/fd/{each}"))
        lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
        return any(f"socket:[{line[6]}]" in held for line in lines if line[-1].startswith((parent, elsewhere)))

    try:
        eventually(lambda: not holds(child), 30, "the child's socket is closed")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert client.info("still") == {"pool": "still"}


@pytest.mark.needs("root")
def test_another_user_is_refused_even_where_the_modes_let_him_in(still: Still) -> None:
    there = (pool_sockets.folder() / "still").resolve()  # it is elsewhere if the path is long
    there.parent.chmod(0o711)
    there.chmod(0o666)
    program = """
        import os, socket, sys
        os.chdir(sys.argv[1])
        os.setuid(65534)
        made = socket.socket(socket.AF_UNIX)
        made.connect(sys.argv[2])
        try:
            made.sendall(b'{"skypool": 1, "ask": "info"}\\n')
            print(made.recv(1000))
        except OSError:
            print(b"")
    """
    argv = [sys.executable, "-c", textwrap.dedent(program), str(there.parent), there.name]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("b''\n", "")


# --- what observers must not do ------------------------------------------------------------------------------


def asked(**fields: object) -> bytes:
    return line_of({"skypool": VERSION, **fields})


@pytest.mark.parametrize("ask", ["call", "submit", "lease", "resize", "stop", "Info", "", None, 7, ["info"], {}])
def test_there_is_no_request_to_call_lease_or_end(still: Still, ask: object) -> None:
    said = json.loads(answer_to(asked(ask=ask)))
    assert said["ok"] is False
    assert "observers can ask for info, logs, forward, reach, not for" in said["error"]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"\n", "one line of JSON"),
        (b"GET / HTTP/1.1\r\n\r\n", "one line of JSON"),
        (b"\xff\xfe\x00\n", "one line of JSON"),
        (b"[" * 60_000 + b"\n", "one line of JSON"),
        (b"[1]\n", "must be a JSON object, not list"),
        (b"null\n", "must be a JSON object, not NoneType"),
        (b'{"ask": "info"}\n', "speaks version 2"),
        (b'{"skypool": 1, "ask": "info"}\n', "speaks version 2 of the observers' protocol, not 1"),
        (b"x" * (LONGEST_LINE + 1), "longer than 65536 bytes"),
        (b"x" * LONGEST_LINE + b"\n", "longer than 65536 bytes"),
        (asked(ask="info", node=1), "invalid field 'node'"),
        (asked(ask="forward"), "has no field 'port'"),
        (asked(ask="forward", port=0), "invalid field 'port'"),
        (asked(ask="forward", port=True), "invalid field 'port'"),
        (asked(ask="forward", port="80"), "invalid field 'port'"),
        (asked(ask="forward", port=1e3), "invalid field 'port'"),
        (asked(ask="forward", port=80, node=-1), "invalid field 'node'"),
        (asked(ask="forward", port=80, node=2**70), "invalid field 'node'"),
        (asked(ask="forward", port=80, here=65536), "invalid field 'here'"),
        (asked(ask="forward", port=80, socket="board"), "invalid field 'socket'"),
        (asked(ask="forward", port=80, host="-oProxyCommand=touch /tmp/x"), "invalid field 'host'"),
        (asked(ask="forward", port=80, host="a b"), "invalid field 'host'"),
        (asked(ask="forward", port=80, host="a\nb"), "invalid field 'host'"),
        (asked(ask="forward", port=80, host=""), "invalid field 'host'"),
        (asked(ask="reach", node=0), "has no field 'script'"),
        (asked(ask="reach", node=0, script="a\0b"), "invalid field 'script'"),
        (asked(ask="reach", node=0, script="", ports=[[1, 2, 3]]), "invalid field 'ports'"),
        (asked(ask="reach", node=0, script="", ports=[[80, "-x", 3]]), "invalid field 'ports'"),
        (asked(ask="reach", node=0, script="", ports={}), "invalid field 'ports'"),
        (asked(ask="forward", port=80), "the owner of the pool failed: RuntimeError: a fault of the owner"),
    ],
)
def test_what_is_no_request_is_refused_and_the_owner_goes_on(still: Still, line: bytes, error: str) -> None:
    said = answer_to(line)
    if said or len(line) <= LONGEST_LINE:  # an answer may be lost if not all that was sent could be read
        assert error in json.loads(said)["error"]
    assert client.info("still") == {"pool": "still"}


def test_who_says_more_than_a_request_is_disconnected(still: Still) -> None:
    assert answer_to(asked(ask="info") + b"more") == b""
    with connected() as made:
        made.sendall(asked(ask="logs"))
        assert made.recv(100) == b'{"ok":true}\n'
        made.sendall(b"more")
        with contextlib.suppress(ConnectionResetError):
            assert made.recv(100) == b""


def test_a_request_that_does_not_end_is_given_up(still: Still, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_ASKING", 0.3)
    with connected() as made:
        made.sendall(b'{"skypool"')
        assert made.recv(100) == b""


def test_a_crowd_is_refused_and_has_room_again_later(still: Still) -> None:
    crowd = [connected() for _ in range(16)]
    with pytest.raises(sky.UsageError, match="pool 'still' has 16 observers, and takes no more"):
        client.info("still")
    for each in crowd:
        each.close()

    def has_room() -> bool:
        try:
            return client.info("still") == {"pool": "still"}
        except sky.UsageError:
            return False

    eventually(has_room, 30, "room")


def test_an_observer_that_reads_nothing_misses_events_and_is_told_how_many(still: Still) -> None:
    with client.events("still") as made:
        for n in range(3000):
            still.stream.emit(events.Output(pool="still", node=0, slot=0, call=n, stream=1, text="x" * 1000))
        time.sleep(1)  # until there is room again
        still.stream.emit(events.Notice(pool="still", text="after"))
        due = missed = 0
        for each in made.lines():
            if each["event"] == "Notice":
                break
            if each["event"] == "Missed":
                due += each["count"]
                missed += each["count"]
            else:
                assert each["call"] == due
                due += 1
    assert due == 3000
    assert missed > 500
    eventually(lambda: not still.stream._listeners, 30, "the end of listening")


# --- observers that misbehave while a map runs ---------------------------------------------------------------


def timed_map(pool: sky.ComputePool, count: int) -> float:
    began = time.monotonic()
    assert list(pool.map(add, range(count))) == [n + 1 for n in range(count)]
    return time.monotonic() - began


KINDS = {
    "killed": "made = client.events('seen')\nprint('ready', flush=True)\nfor each in made.lines(): pass",
    "stopped": "made = client.events('seen')\nprint('ready', flush=True)\nfor each in made.lines(): pass",
    "talking": """
        made = pool_sockets.connect("seen", 30)
        made.sendall(line_of({"skypool": 1, "ask": "logs"}))
        print("ready", flush=True)
        while True:
            try:
                made.sendall(b"x" * 1000000)
            except OSError:
                made = pool_sockets.connect("seen", 30)
        """,
    "flooding": """
        print("ready", flush=True)
        while True:
            try:
                made = pool_sockets.connect("seen", 30)
                made.sendall(line_of({"skypool": 1, "ask": "info"}) * 100)
                made.close()
            except OSError:
                pass
        """,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_map_is_not_harmed_by_an_observer_that_is(pool: sky.ComputePool, kind: str) -> None:
    alone = timed_map(pool, 20_000)
    with ended(observer(KINDS[kind])) as process:
        if kind == "stopped":
            process.send_signal(signal.SIGSTOP)
        elif kind == "killed":
            threading.Timer(0.2, process.kill).start()
        noisy = pool.submit(_loud, 3000)
        beside = timed_map(pool, 20_000)
        assert noisy.result(60) == 3000
    print(f"map of 20,000 calls: {alone:.2f} s alone, {beside:.2f} s beside an observer that is {kind} and a loud call")
    eventually(lambda: client.info("seen")["phase"] == "ready", 30, "an answer")


def _loud(lines: int) -> int:
    for n in range(lines):
        print(n, "x" * 1000)
    return lines


def test_a_forward_of_a_killed_observer_is_closed(pool: sky.ComputePool, page: int) -> None:
    before = len(descendants(os.getpid()))
    process = started("forward", "seen", str(page))
    with ended(process):
        assert process.stdout is not None
        url = process.stdout.readline().split()[0]
        assert fetched(url).startswith(b"<title>a page")
        process.kill()
    eventually(lambda: is_free(int(url.rpartition(":")[2])), 30, "the port's end")
    eventually(lambda: len(descendants(os.getpid())) <= before, 30, "the processes' end")


# --- the commands --------------------------------------------------------------------------------------------


def test_skypool_forward_stays_until_it_is_interrupted(pool: sky.ComputePool, page: int) -> None:
    with ended(started("forward", "seen", str(page), "--node", "1")) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        url = line.split()[0]
        who = "every user of this computer can connect (--socket PATH is for you alone)"
        assert line == f"{url} leads to port {page} of node 1 of pool 'seen'; {who}; Ctrl-C ends this\n"
        with urllib.request.urlopen(url, timeout=60) as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = probe.getsockname()[1]
    with ended(started("forward", "seen", str(free))) as process:  # the same number here, if it is free
        assert process.stdout is not None
        assert process.stdout.readline().startswith(f"http://127.0.0.1:{free} leads to port {free} of node 0")


def test_skypool_forward_makes_a_socket_for_the_user_alone(pool: sky.ComputePool, page: int, tmp_path: Path) -> None:
    argv = [*PROGRAM, "forward", "seen", str(page), "--socket", "board"]
    with ended(subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=tmp_path)) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith(
            f"the socket {tmp_path}/board leads to port {page} of node 0 of pool 'seen'; only you can"
        )
        assert f"`curl --unix-socket {tmp_path}/board http://localhost/`" in line
        assert fetched_from(str(tmp_path / "board")) == fetched(f"http://127.0.0.1:{page}")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    eventually(lambda: not list(tmp_path.iterdir()), 30, "the end of the socket")
    assert "not both" in cli("forward", "seen", str(page), "--here", "8080", "--socket", "board").stderr


def test_skypool_ps_lists_the_nodes_of_a_pool_that_answers(pool: sky.ComputePool) -> None:
    done = cli("ps")
    words = [line.split() for line in done.stdout.splitlines()]
    assert words[3] == ["pool", "node", "state", "machine", "hardware", "address", "running", "waiting", "functions"]
    assert [line[:4] for line in words[4:6]] == [["seen", str(n), "ready", "this-machine"] for n in (0, 1)]
    (told,) = json.loads(cli("ps", "--json").stdout)
    assert told["answers"] is True
    assert [each["state"] for each in told["nodes"]] == ["ready", "ready"]


def test_skypool_logs_follows_what_calls_print(pool: sky.ComputePool) -> None:
    with ended(started("logs", "seen", "--follow", "--grep", "to stdout")) as process:
        pool.submit(print, "to stdout").result()
        assert process.stdout is not None
        assert process.stdout.readline().endswith("] to stdout\n")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


@pytest.mark.slow
def test_what_is_not_there_is_said_with_the_next_step(pool: sky.ComputePool) -> None:
    done = cli("forward", "see", "80")
    assert (done.returncode, done.stderr.strip()) == (
        2,
        "error: pool 'see' does not exist; `skypool ps` lists the running pools; did you mean seen?",
    )
    assert cli("forward", "seen", "80", "-n", "5").stderr.startswith("error: pool 'seen' has no node 5")
    assert cli("forward", "seen", "99999").returncode == 2


OWNER = """
import sys, time
import skypool as sky
with sky.ComputePool(name="owned", console="off", lease="120s") as pool:
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_an_owner_that_is_stopped_or_killed_is_told_of(page: int) -> None:
    with ended(subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE)) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        eventually(lambda: "owned" in pool_sockets.pools(), 30, "the socket")
        with ended(started("forward", "owned", str(page))) as forward:
            assert forward.stdout is not None
            forward.stdout.readline()
            owner.send_signal(signal.SIGSTOP)
            with pytest.raises(client.NoOwner, match=r"did not answer within 0\.5 s; it may be stopped") as caught:
                client.info("owned", 0.5)
            assert caught.value.exists

            def is_told() -> bool:
                """Return False if the owner was stopped while it wrote to the ledger, which nobody can read then."""
                if "owned: the process that owns pool 'owned' did not answer within 2 s" in (done := cli("ps")).stdout:
                    return True
                assert f"is locked by process {owner.pid} (" in done.stderr, done
                owner.send_signal(signal.SIGCONT)
                time.sleep(0.2)
                owner.send_signal(signal.SIGSTOP)
                return False

            eventually(is_told, 60, "a ledger that is not locked")
            owner.kill()
            owner.wait()
            assert forward.wait(60) == 2
            assert forward.stderr is not None
            assert "has ended: the process that runs pool 'owned' is gone" in forward.stderr.read()
        said = cli("forward", "owned", str(page)).stderr
        assert "the process that ran pool 'owned' is gone" in said
        assert "ComputePool.attach('owned') takes the machines over" in said
        assert "left" in cli("ps").stdout
        assert cli("down", "owned", "--yes").returncode == 0
    with pytest.raises(SkypoolError):
        client.info("owned")
