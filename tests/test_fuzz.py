"""Nonsense on the wire: an agent and a client close that link with a reason, and go on."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import skypool as sky
from skypool.link import link
from skypool.shipping import package_zip as ship
from skypool.wire.agent_config import AgentConfig
from skypool.wire.frames import PREFIX, WIRE_VERSION, Kind, encode, scan
from tests.conftest import children, eventually, home
from tests.soak import frames


class Node:
    """An agent without a client of ours: whoever connects speaks to it byte by byte."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = AgentConfig(str(folder), str(folder), "/", pool="fuzz", slots=1, liveness=0.0, grace=1.0)
        self.processes: list[subprocess.Popen[bytes]] = []

    def connect(self, session: str) -> socket.socket:
        """A link after the handshake, its WELCOME read."""
        ours, theirs = socket.socketpair()
        with theirs:
            argv = ["sh", "-c", ship.agent_starter(sys.executable, "")]
            self.processes.append(subprocess.Popen(argv, stdin=theirs.fileno(), stdout=theirs.fileno()))
        ours.settimeout(20)
        ours.sendall(ship.prelude(self.config, start=True))
        if not json.loads(_line(ours))["have"]:
            ours.sendall(ship.bundle().read())
        assert _line(ours) == b"ready\n"
        ours.sendall(encode(Kind.HELLO, {"session": session, "calls": []}))
        got = b""
        while not scan(memoryview(got))[0]:
            got += _some(ours)
        assert scan(memoryview(got))[0][0].kind == Kind.WELCOME
        return ours

    def is_alive(self) -> bool:
        """Whether it still lets somebody in."""
        with self.connect(f"check-{random.random()}"):
            return True

    def end(self) -> None:
        with self.connect("end") as link:
            link.sendall(encode(Kind.BYE, {}))
            eventually(lambda: not self.folder.exists(), what="the end of the node")
        for process in self.processes:
            process.wait(10)


def _some(link: socket.socket) -> bytes:
    data = link.recv(65536)
    if not data:
        raise EOFError
    return data


def _line(link: socket.socket) -> bytes:
    got = b""
    while not got.endswith(b"\n"):
        got += link.recv(1)
    return got


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    place = home() / "fuzz.0.000000"
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = Node(place)
    made.connect("first").close()
    yield made
    made.end()


NAMES = st.sampled_from(
    ["id", "key", "fn", "lens", "name", "at", "size", "blob", "seq", "n", "arg", "calls", "output", "grace", "found",
     "file", "hash", "timeout", "stream", "coming", "session", "package", "world"]
)  # fmt: skip
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=8), st.just("../../etc/x\0"),
    st.lists(st.integers(-5, 2**40), max_size=4), st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip
KINDS = st.sampled_from([kind for kind in Kind if kind is not Kind.BYE])


HEADERS = st.dictionaries(NAMES, VALUES, max_size=7)
FRAMES = st.lists(st.tuples(KINDS, HEADERS, st.binary(max_size=200)), max_size=8)
FEW_OR_MANY = pytest.mark.parametrize("number", [10, pytest.param(60, marks=pytest.mark.slow)])
"""Each link is a Python of its own."""


@FEW_OR_MANY
def test_no_frame_whatever_it_says_ends_the_agent(node: Node, number: int) -> None:
    agent = _agent(node)

    @settings(max_examples=number, suppress_health_check=[HealthCheck.too_slow])
    @given(frames=FRAMES)
    def said(frames: list[tuple[Kind, dict[str, Any], bytes]]) -> None:
        with node.connect(f"fuzz-{time.monotonic()}") as link:
            try:
                for kind, header, body in frames:
                    link.sendall(encode(kind, header, len(body)) + body)
            except (BrokenPipeError, ConnectionResetError):
                pass
        assert node.is_alive()
        assert _agent(node) == agent

    said()


def _agent(node: Node) -> int:
    keeper = int(json.loads((node.folder / "keeper.json").read_text())["pid"])
    (agent,) = children(keeper)
    return agent


@FEW_OR_MANY
def test_random_bytes_and_cut_frames_do_not_end_the_agent(node: Node, number: int) -> None:
    agent = _agent(node)
    chance = random.Random(7)
    whole = encode(Kind.PING, {})
    for n in range(number):
        with node.connect(f"bytes-{n}") as link:
            garbage = chance.randbytes(chance.randrange(1, 300))
            prefix = PREFIX.pack(
                b"sk", WIRE_VERSION, chance.randrange(30), chance.randrange(2**32), chance.randrange(2**64)
            )
            link.sendall(chance.choice([garbage, prefix + garbage, whole[: chance.randrange(1, len(whole))]]))
    assert _agent(node) == agent
    assert node.is_alive()
    assert "connection to the client closed: " in (node.folder / "agent.log").read_text()


@pytest.fixture(scope="module")
def honest() -> Iterator[sky.ComputePool]:
    """A pool of the same client, all the while."""
    with sky.ComputePool(slots=1, console="off") as pool:
        yield pool


FALSE_NODE = """\
    #!{python}
    import json, os, struct, sys, time
    def take(n):
        d = b""
        while len(d) < n: d += os.read(0, n - len(d)) or sys.exit()
        return d
    p = json.loads(take(int(take(8))))
    line = json.dumps({{"python": list(sys.version_info[:3]), "have": True, "gone": False}})
    os.write(1, line.encode() + b"\\nready\\n")
    def frame(kind, header, body=b""):
        head = json.dumps(header).encode()
        return struct.pack("!2sBBIQ", b"sk", {version}, kind, len(head), len(body)) + head + body
    welcome = {{"slots": 1, "cpu_slots": 0, "devices": 0, "names": {{}}}}
    welcome |= {{key: [] for key in ("calls", "cpu_calls", "streams", "functions", "objects")}}
    welcome["health"] = {{"devices": [], "driver": "", "disk_free": 1 << 40, "time": time.time()}}
    welcome = frame(2, welcome)
    if {at_once}: welcome += {nonsense}
    os.write(1, welcome)
    take(40)
    if not {at_once}: os.write(1, {nonsense})
    while os.read(0, 65536): pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    "nonsense",
    [
        'b"HTTP/1.1 200 OK"',
        'b"sk" + os.urandom(100)',
        'struct.pack("!2sBBIQ", b"sk", 3, 7, 2, 1 << 60)',
        'frame(7, {"id": "x"}, b"abc")',
        'frame(7, {"id": 1, "ok": True, "seconds": 0, "lens": [5, 2 ** 70, 1]}, b"abc")',
        'frame(8, {"id": 1, "blob": 3, "lens": [1, 2]})',
        'frame(11, {"key": 1, "at": 0, "size": 2 ** 80}, b"abc")',
        'frame(11, {"key": 1, "at": 7, "size": 100}, b"abc")',
        'frame(18, {"name": ["not a name"]})',
        'frame(16, {"id": 1}, b"no such call")',
        'frame(14, {"calls": 3})',
        "frame(20, {})",
    ],
)
def test_a_node_that_talks_nonsense_is_given_up_by_name_and_the_client_goes_on(
    honest: sky.ComputePool, nonsense: str, at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "_START", 2.0)
    false = tmp_path / "python"
    text = textwrap.dedent(FALSE_NODE).format(
        python=sys.executable, version=WIRE_VERSION, nonsense=nonsense, at_once=at_once
    )
    false.write_text(text)
    false.chmod(0o755)
    began = time.monotonic()
    with pytest.raises((sky.ConnectionLost, sky.PoolClosed)) as caught:
        with sky.ComputePool(sky.Local(python=str(false)), slots=1, console="off", liveness=2) as pool:
            sky.compute(abs)(-1) >> pool
    assert time.monotonic() - began < 30  # a few times `liveness`, whatever it says on each new connection
    assert "node" in str(caught.value)
    assert sky.compute(abs)(-1) >> honest == 1


def test_a_sample_of_mutated_frames_raises_nothing_else_and_leaves_no_call_without_an_end() -> None:
    report = frames.Report()
    frames.fuzz_border(3000, 5, report)
    frames.fuzz_links(200, 5, report)
    assert report.frames == report.refused + report.taken == 3000
    assert report.links == 20
    assert report.memory_ratio < 1
