"""What a process finds that takes a pool over: calls, generators and services of a process that is gone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool import events
from skypool.link.agent_messages import Welcome
from skypool.model import Instance
from skypool.pool.agents import Agents
from skypool.pool.departures import Departures
from skypool.processes import is_stopped
from skypool.shipping import package_zip
from skypool.testing import FakeCloud
from tests.conftest import children, eventually, nodes
from tests.work import add, nap

CLIENT = """
    import os, sys, time
    import skypool as sky
    place = sys.argv[1]

    def write(name):
        open(f"{place}/{name}", "w").close()

    def wait(name):
        while not os.path.exists(f"{place}/{name}"):
            time.sleep(0.01)

    @sky.compute(window=100 << 20)
    def ends_early(count):
        for n in range(count):
            yield n
            if n == 0:
                wait("orphaned")
        write("generator ended")

    @sky.compute(devices=0)
    def ends_with_nothing():
        wait("orphaned")
        return
        yield

    @sky.compute
    def total(numbers):
        found = 0
        for n in numbers:
            write("number")
            found += n
        return found

    @sky.compute
    def late():
        wait("attached")
        return "late"

    @sky.compute
    def serve():
        wait("orphaned")
        raise ValueError("it ended while nobody looked")

    def numbers():
        yield 1
        time.sleep(600)

    pool = sky.ComputePool(name="orphan", nodes=2, slots=8, lease=60, console="off").start()
    calls = [late() > pool, late().with_options(node=1) > pool]
    streams = [ends_early(30_000) >> pool[0], ends_early(3) >> pool[0], ends_with_nothing() >> pool[0]]
    next(streams[0])
    calls.append(total(numbers()).with_options(node=0) > pool)
    service = pool.service(serve(), node=0)
    wait("number")
    print("sent", flush=True)
    time.sleep(600)
"""


class Attached:
    """A pool that was taken over, and what happened since."""

    def __init__(self, place: Path) -> None:
        self.place = place
        argv = [sys.executable, "-c", textwrap.dedent(CLIENT), str(place)]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == "sent\n"
            client.kill()
        (place / "orphaned").touch()
        eventually((place / "generator ended").exists, 60, "the end of a generator without a client")
        self.heard: list[events.Event] = []
        self.pool = sky.ComputePool.attach("orphan", console="off")
        self.pool.events.listen(self.heard.append)

    def future(self, name: str) -> sky.CallFuture[Any]:
        [future] = [each for each in self.pool.inherited if each.name == name]
        return future


@pytest.fixture(scope="module")
def attached(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attached]:
    attached = Attached(tmp_path_factory.mktemp("attach"))
    yield attached
    attached.pool.stop()


def test_generators_of_the_former_process_are_left_out_also_those_that_have_ended(attached: Attached) -> None:
    assert sorted(each.name for each in attached.pool.inherited) == ["late", "late", "total"]


def test_a_call_whose_iterator_is_gone_with_its_process_gets_an_error_that_says_so(attached: Attached) -> None:
    with pytest.raises(sky.SkypoolError, match=r"an iterator argument of total .* in the process that sent the call"):
        attached.future("total").result(60)


def test_no_node_is_given_up_and_the_other_calls_end_as_if_nothing_had_happened(attached: Attached) -> None:
    (attached.place / "attached").touch()
    late = [each for each in attached.pool.inherited if each.name == "late"]
    assert [each.result(60) for each in late] == ["late", "late"]
    assert add(1) @ attached.pool == [2, 2]
    assert set(attached.pool.nodes.values()) == {"ready"}
    bad = (events.LinkDown, events.NodePhase)
    assert not [each for each in attached.heard if isinstance(each, bad)]


def test_the_node_forgets_what_the_former_process_was_to_get(
    attached: Attached, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = attached.pool._engine
    (attached.place / "attached").touch()
    eventually(lambda: all(each.done() for each in attached.pool.inherited), 60, "the end of the calls")
    assert nap(0) @ attached.pool == [0, 0]
    welcomes: list[Welcome] = []
    resume = engine.dispatch.resume

    def note(node: int, welcome: Welcome) -> None:
        welcomes.append(welcome)
        resume(node, welcome)

    monkeypatch.setattr(engine.dispatch, "resume", note)
    engine.dispatch.roster.acknowledge(0)
    link = engine.connections.links[0]
    link._loop.call_soon_threadsafe(link._break, "cut by the test", link._stream)
    eventually(lambda: welcomes, 60, "a new connection")
    assert (welcomes[0].calls, welcomes[0].streams, welcomes[0].services) == ((), (), ())
    assert not engine.dispatch.node_queues[0].strays


def test_a_service_that_ended_meanwhile_is_a_service_and_no_call(attached: Attached) -> None:
    assert "serve" not in [each.name for each in attached.pool.inherited]
    assert not attached.pool.services


def left_by_a_process(pool: str, then: str = "") -> None:
    """Start a pool in a process, and kill that process.

    Args:
        pool: the code that makes the pool.
        then: what the process does with the pool before it is killed.
    """
    code = f"""
import os, time, sys, skypool as sky
from skypool.testing import FakeCloud
pool = {pool}.start()
{then}
print("started", flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "started\n"
        client.kill()


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[Agents], bool]]:
    """Conditions that come true between the connection to the first node of a pool and that to the second."""
    opened = Agents.open
    conditions: list[Callable[[Agents], bool]] = []

    async def open_later(self: Agents, instance: Instance, *args: Any, **named: Any) -> Welcome:
        until = time.monotonic() + 30
        while self.connections.links and not all(each(self) for each in conditions):
            assert time.monotonic() < until
            await asyncio.sleep(0.01)
        return await opened(self, instance, *args, **named)

    monkeypatch.setattr(Agents, "open", open_later)
    return conditions


def test_a_node_that_is_lost_while_others_are_taken_over_ends_the_attempt_and_no_node(
    between: list[Callable[[Agents], bool]],
) -> None:
    left_by_a_process('sky.ComputePool(name="halved", nodes=2, slots=1, lease=60, console="off")')

    def is_lost(agents: Agents) -> bool:
        [(node, link)] = agents.connections.links.items()
        access, _ = agents.connections.ways[node]
        if not link._closed:
            with contextlib.suppress(ProcessLookupError, ValueError, FileNotFoundError):  # it was killed before
                [agent] = children(int(json.loads((Path(access.folder) / "keeper.json").read_text())["pid"]))
                os.kill(agent, signal.SIGKILL)
        return link._closed

    between.append(is_lost)
    try:
        with pytest.raises(sky.ConnectionLost, match="agent process on node 0 has ended"):
            sky.ComputePool.attach("halved", console="off")
        eventually(lambda: len(nodes("halved")) == 1, 30, "the end of node 0, and only of it")
    finally:
        driver = sky.Local()
        driver.terminate(driver.instances(pool="halved"))


SUSPENDED = """
import sys, skypool as sky
@sky.compute
def ten():
    return 10
pool = sky.ComputePool(name="suspended", lease=60, liveness=3, console="off").start()
print("started", flush=True)
sys.stdin.readline()
try:
    ten() >> pool
except sky.SkypoolError as e:
    print(type(e).__name__, flush=True)
pool.stop()
print("stopped", flush=True)
"""


def test_another_version_of_skypool_is_told_that_it_cannot_take_a_pool_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeCloud(tmp_path / "cloud") as cloud:
        with sky.ComputePool(cloud, name="older", slots=1, linger=60, console="off"):
            pass
        newer = package_zip.Bundle("0" * 16, 1, lambda: b"")
        with monkeypatch.context() as patch:
            patch.setattr(package_zip, "bundle", lambda: newer)
            with pytest.raises(sky.ConnectionLost, match=r"another version .* end the pool with `skypool down older`"):
                sky.ComputePool.attach("older", cloud, console="off")
        with sky.ComputePool.attach("older", cloud, console="off") as pool:
            assert pool.submit(add, 1, 2).result() == 3


def test_the_pool_of_a_process_that_is_suspended_is_taken_over_and_refused_to_it_when_it_goes_on() -> None:
    client = subprocess.Popen(
        [sys.executable, "-c", SUSPENDED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with client, contextlib.ExitStack() as ending:
        ending.callback(client.kill)
        assert client.stdout is not None
        assert client.stdin is not None
        assert client.stdout.readline() == "started\n"
        with pytest.raises(sky.UsageError, match="is still run by"):
            sky.ComputePool.attach("suspended", console="off")
        client.send_signal(signal.SIGSTOP)
        eventually(lambda: is_stopped(client.pid), 30, "the stop of the process")
        with pytest.raises(sky.SkypoolError, match="silent for the liveness="):
            sky.ComputePool.attach("suspended", console="off")
        time.sleep(3)  # the nodes hear nothing of it meanwhile
        with sky.ComputePool.attach("suspended", console="off") as pool:
            assert (add(1) >> pool) == 2
            client.send_signal(signal.SIGCONT)
            client.stdin.write("\n")
            client.stdin.flush()
            assert client.stdout.readline() == "TakenOver\n"
            assert client.stdout.readline() == "stopped\n"
            assert (add(2) >> pool) == 3


HOLD = """
@sky.compute(procs=1, output="silent")
def hold(path):
    open(f"{path}-{sky.instance_info().node}", "w").close()
    time.sleep(600)
future = pool.send(hold(PATH), node="all")
while not all(os.path.exists(f"{PATH}-{node}") for node in (0, 1)):
    time.sleep(0.01)
"""


def test_a_gang_that_waits_for_the_gang_of_the_former_process_says_so_and_how_it_is_stopped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made = 'sky.ComputePool(name="held", nodes=2, slots=1, lease=60, console="off")'
    left_by_a_process(made, HOLD.replace("PATH", repr(str(tmp_path / "began"))))
    said: list[str] = []
    pool = sky.ComputePool.attach("held", console="plain", check=None)
    try:
        words = "these calls still run: hold on nodes 0, 1 (sent by the process that had the pool before"
        eventually(lambda: words in "".join(capfd.readouterr()), 30, "the notice of calls that run")
        pool.events.listen(lambda event: said.append(event.text) if isinstance(event, events.Notice) else None)
        future = pool.send(add(1).with_options(procs=1), node="all")
        eventually(lambda: said, 30, "the notice")
        assert said[0].startswith(
            "add waits for other calls to end: hold on nodes 0, 1 (sent by the process that had the"
        )
        assert "pool.inherited" in said[0]
        for each in pool.inherited:
            each.cancel()
        assert future.result(60) == [2, 2]
    finally:
        pool.stop()


def test_a_notice_that_comes_while_others_are_taken_over_is_heard_later(
    between: list[Callable[[Agents], bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud = FakeCloud(tmp_path / "cloud")
    made = f'sky.ComputePool(FakeCloud({str(cloud.state)!r}), name="warned", nodes=2, slots=1, lease=60, console="off")'
    left_by_a_process(made)
    noticed: list[int] = []
    on_notice = Departures.on_notice

    def note(self: Departures, node: int, at: float) -> None:
        noticed.append(node)
        on_notice(self, node, at)

    monkeypatch.setattr(Departures, "on_notice", note)
    cloud.control.interrupt(next(each for each in cloud.instances(pool="warned") if each.node == 0))
    between.append(lambda _: bool(noticed))
    pool = sky.ComputePool.attach("warned", cloud, console="off")
    try:
        eventually(lambda: pool.nodes[0] in ("leaving", "draining", "ended"), 30, "the notice")
        assert add(1) @ pool == [2]
        assert pool.nodes[1] == "ready"
    finally:
        pool.stop()
