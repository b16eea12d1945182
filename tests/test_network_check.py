"""Nodes that need each other are checked before: what is blocked is named, with the port and what to do."""

from __future__ import annotations

import contextlib
import itertools
import re
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool.calls.futures import Items
from skypool.errors import NetworkError, PoolClosed, ProtocolError, UsageError
from skypool.events import Notice
from skypool.gangs import probe
from skypool.gangs.network_report import Connection, NetworkReport, NodeNetwork, connections_of, error_of, node_network
from skypool.pool.network import Unanswered, _Deadline, advice_for, check_network
from skypool.testing import FakeCloud
from tests import work
from tests.conftest import eventually
from tests.lab.machines import Lab, Machine
from tests.lab.network import NETNS

TOKEN = "0123456789abcdef" * 2


def node(number: int, **changes: Any) -> NodeNetwork:
    """What a healthy node says of itself."""
    address = f"10.0.0.{number}"
    values = {"port": 40000 + number, "hostname": f"m{number}", "found": (address,), "interface": "eth0", "mtu": 1500}
    return NodeNetwork(**{"node": number, "address": address, **values, "told": "", **changes})


def report(nodes: list[NodeNetwork], **outcomes: Any) -> NetworkReport:
    """A report in which connections such as `from_0_to_1="refused"` failed."""
    pairs = itertools.permutations([each.node for each in nodes], 2)
    found = [Connection(a, b, outcomes.get(f"from_{a}_to_{b}", "ok"), 0.001) for a, b in pairs]
    return NetworkReport({each.node: each for each in nodes}, tuple(found))


# --- the report ----------------------------------------------------------------------------------------------


def test_a_healthy_network_is_no_error_and_gives_no_warning() -> None:
    healthy = report([node(0), node(1), node(2)])
    assert error_of(healthy, "") is None
    assert healthy.warnings == ()


def test_the_error_names_the_first_pair_the_port_the_count_and_the_advice() -> None:
    blocked = report([node(0), node(1), node(2)], from_0_to_2="timeout", from_1_to_2="refused")
    error = error_of(blocked, "Open it")
    assert error is not None
    assert str(error) == (
        "node 0 (10.0.0.0) cannot reach node 2 (10.0.0.2) on TCP port 40002: no answer within 3 s, as when a firewall "
        "drops the packets or no route leads there. 2 of 6 connections between nodes failed: 0 to 2, 1 to 2. Open it"
    )
    said = (error.source, error.target, error.address, error.port, error.outcome, error.advice, error.report)
    assert said == (0, 2, "10.0.0.2", 40002, "timeout", "Open it", blocked)


def test_a_single_failed_connection_is_not_counted_and_many_are_not_all_listed() -> None:
    nodes = [node(each) for each in range(4)]
    assert "connections between nodes" not in str(error_of(report(nodes, from_0_to_1="silent"), "Open it"))
    all_of_them = {f"from_{a}_to_{b}": "refused" for a, b in itertools.permutations(range(4), 2)}
    many = str(error_of(report(nodes, **all_of_them), "Open it"))
    assert "12 of 12 connections between nodes failed: 0 to 1, 0 to 2, 0 to 3, 1 to 0, 1 to 2, …. Open it" in many


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        ("no address", "its address is not known"),
        ("refused", "the connection was refused, although the node listens there; a firewall rejects it"),
        ("unreachable", "No route to host"),
        ("broken", "No route to host"),
        ("silent", "nothing came back within 3 s"),
        ("stranger", "something else answered there"),
        ("stalled", "64 KiB do not within 3 s; large packets are lost on the way.*MTU of node 1 is 1500 bytes"),
    ],
)
def test_each_way_to_fail_is_told_in_words(outcome: Any, words: str) -> None:
    failed = Connection(0, 1, outcome, 0.0, "No route to host")
    error = error_of(NetworkReport({0: node(0), 1: node(1)}, (failed,)), "Open it")
    text = rf"node 0 \(10.0.0.0\) cannot reach node 1 \(10.0.0.1\) on TCP port 40001: .*{words}.*\. Open it"
    assert re.fullmatch(text, str(error))


def test_different_mtus_are_a_warning() -> None:
    (warning,) = report([node(0), node(1, mtu=9001, interface="ens5")]).warnings
    assert "in bytes: node 0 1500 (eth0), node 1 9001 (ens5);" in warning


def test_a_name_that_leads_elsewhere_is_a_warning_unless_a_variable_names_the_interface() -> None:
    astray = node(1, found=("127.0.1.1",))
    (warning,) = report([node(0), astray]).warnings
    assert "on node 1, its own name m1 leads to 127.0.1.1, but other nodes reach it at 10.0.0.1" in warning
    assert "the line '10.0.0.1 m1'" in warning
    assert report([node(0), node(1, found=("127.0.1.1",), told="eth0")]).warnings == ()


def test_nodes_on_one_machine_give_no_warnings() -> None:
    assert (
        report([node(each, address="10.0.0.9", found=("127.0.1.1",), mtu=9000 + each) for each in (0, 1)]).warnings
        == ()
    )


@pytest.mark.parametrize("item", [None, {}, {"port": "x"}, {**probe.facts(""), "port": "1"}, [1, 2]])
def test_a_node_that_says_something_else_about_itself_breaks_the_protocol(item: object) -> None:
    with pytest.raises(ProtocolError, match="node 3 answers the network check with"):
        node_network(3, "10.0.0.3", item)


@pytest.mark.parametrize(
    "item", [None, [(1, "ok")], [(1, "fine", 0.1, "")], [(2, "ok", 0.1, "")], [("1", "ok", 0, "")]]
)
def test_a_node_that_says_something_else_about_its_peers_breaks_the_protocol(item: object) -> None:
    with pytest.raises(ProtocolError, match="node 3 answers the network check with"):
        connections_of(3, [1], item)


# --- connections of this machine -----------------------------------------------------------------------------


def test_a_listener_answers_who_knows_its_token() -> None:
    with probe.Listener(TOKEN, socket.AF_INET) as listener:
        assert probe.connect((7, "127.0.0.1", listener.port, TOKEN), 10)[:2] == (7, "ok")
        assert probe.connect((7, "127.0.0.1", listener.port, TOKEN[::-1]), 10)[:2] == (7, "stranger")
        assert [
            each[1] for each in probe.connect_all([(n, "127.0.0.1", listener.port, TOKEN) for n in range(200)], 10)
        ] == ["ok"] * 200
    assert probe.connect((7, "127.0.0.1", listener.port, TOKEN), 10)[:2] == (7, "refused")


def test_a_listener_for_ipv6_answers_both_kinds() -> None:
    with probe.Listener(TOKEN, socket.AF_INET6) as listener:
        for address in ("::1", "127.0.0.1"):
            assert probe.connect((0, address, listener.port, TOKEN), 10)[1] == "ok"


def test_who_connects_and_says_nothing_keeps_nobody_waiting() -> None:
    with probe.Listener(TOKEN, socket.AF_INET) as listener:
        with socket.create_connection(("127.0.0.1", listener.port)):
            assert probe.connect((0, "127.0.0.1", listener.port, TOKEN), 10)[1] == "ok"
    assert "skypool-probe" not in {each.name for each in threading.enumerate()}


def test_a_node_without_an_address_is_not_tried() -> None:
    assert probe.connect((4, "", 1, TOKEN), 10) == (4, "no address", 0.0, "")


@pytest.mark.parametrize(
    ("said", "outcome"), [(b"", "silent"), (b"SSH-2.0-OpenSSH\r\n", "stranger"), (TOKEN[::-1].encode(), "stalled")]
)
def test_a_server_that_is_no_listener_is_told_apart(said: bytes, outcome: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        target = (0, "127.0.0.1", int(server.getsockname()[1]), TOKEN)
        found: list[str] = []
        thread = threading.Thread(target=lambda: found.append(probe.connect(target, 0.3)[1]))
        thread.start()
        connection, _ = server.accept()
        with connection:
            connection.sendall(said)
            thread.join()
    assert found == [outcome]


# --- pools of this machine -----------------------------------------------------------------------------------


@pytest.mark.parametrize("check", ["tcp", True, 1, "", ("network",)])
def test_check_is_network_nccl_or_none(check: Any) -> None:
    with pytest.raises(UsageError, match="check must be 'network'"):
        sky.ComputePool(check=check)


def engine_of(pool: sky.ComputePool) -> Any:
    assert pool._engine is not None
    return pool._engine


@pytest.mark.slow
def test_nodes_are_checked_once_and_leave_nothing_behind() -> None:
    with sky.ComputePool(nodes=3, slots=1, console="off") as pool:
        check = engine_of(pool).network
        first = check.ensure([0, 1])
        assert [(each.source, each.target, each.outcome) for each in first.connections] == [(0, 1, "ok"), (1, 0, "ok")]
        assert check.ensure([1, 0]) is None
        second = check.ensure([0, 1, 2])
        assert {(each.source, each.target) for each in second.connections} == {(0, 2), (1, 2), (2, 0), (2, 1)}
        assert check.ensure([2, 1]) is None
        assert check.ensure([1]) is None
        for each in second.nodes.values():
            assert probe.connect((0, each.address, each.port, TOKEN), 10)[1] == "refused"
        assert work.add(1) @ pool == [2, 2, 2]


def test_results_that_must_be_plain_data_are_no_obstacle() -> None:
    with sky.ComputePool(nodes=2, trust="data", console="off") as pool:
        assert len(engine_of(pool).network.ensure([0, 1]).connections) == 2


def test_check_none_checks_nothing() -> None:
    with sky.ComputePool(nodes=2, check=None, private_network=True, console="off") as pool:
        assert engine_of(pool).network.ensure([0, 1]) is None


def test_a_pool_with_a_private_network_is_checked_when_it_starts() -> None:
    with sky.ComputePool(nodes=2, private_network=True, console="off") as pool:
        assert engine_of(pool).network.ensure([0, 1]) is None


@pytest.mark.slow
def test_busy_nodes_end_the_wait_and_the_check_is_made_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skypool.pool.network.BUSY", 0.3)
    go = tmp_path / "go"
    with sky.ComputePool(nodes=2, slots=1, console="off") as pool:
        notices: list[str] = []
        pool.events.listen(lambda event: notices.append(event.text) if isinstance(event, Notice) else None)
        future = work.until(str(go)).with_options(node=1) > pool
        dispatch = engine_of(pool).dispatch
        with pytest.raises(Unanswered, match="node 1 did not answer in time"):
            check_network(dispatch, dispatch.roster.nodes())
        assert engine_of(pool).network.ensure([0, 1]) is None
        go.touch()
        future.result()
        assert engine_of(pool).network.ensure([0, 1]) is not None
    assert any("because node 1 did not answer in time" in text for text in notices)


class Answers:
    """The answers of a node that is stopped slowly: only after the readers of all answers have got an error."""

    def __init__(self, got: threading.Barrier) -> None:
        self.items: Items[object] = Items("network check")
        self.items.connect(lambda _: None, lambda: self.stopped.append(got.wait(10)))
        self.stopped: list[int] = []
        self.reader = threading.Thread(target=self._read, args=(got,), daemon=True)
        self.reader.start()

    def _read(self, got: threading.Barrier) -> None:
        with pytest.raises(Unanswered):
            next(self.items)
        got.wait(10)


def test_no_node_is_stopped_before_the_answers_of_all_are_late() -> None:
    got = threading.Barrier(3)  # two readers, and the thread that stops a node
    answers: Any = {number: Answers(got) for number in range(2)}
    answers[1].items.connect(lambda _: None, lambda: answers[1].stopped.append(0))
    with _Deadline(0.01, answers, lambda: Unanswered(answers)):
        for each in answers.values():
            each.reader.join(30)
        eventually(lambda: all(each.stopped for each in answers.values()), 30)
    assert not got.broken


def test_a_pool_that_ends_ends_the_check(tmp_path: Path) -> None:
    errors: list[BaseException] = []
    pool = sky.ComputePool(nodes=2, slots=1, console="off").start()
    network = engine_of(pool).network

    def check() -> None:
        try:
            network.ensure([0, 1])
        except PoolClosed as e:
            errors.append(e)

    with contextlib.suppress(PoolClosed):
        future = work.until(str(tmp_path / "never")).with_options(node=1) > pool
        thread = threading.Thread(target=check)
        thread.start()
        pool.stop()
        thread.join(30)
        assert [type(each) for each in errors] == [PoolClosed]
        future.result()


# --- advice --------------------------------------------------------------------------------------------------


def test_the_advice_is_that_of_the_driver_or_says_what_the_pool_can_ask_for(tmp_path: Path) -> None:
    cloud = FakeCloud(tmp_path)
    assert "ComputePool(private_network=True) asks fake for machines with a network" in advice_for(cloud, False)
    assert "The pool has private_network=True, so look for a firewall" in advice_for(cloud, True)
    assert "Allow TCP on all ports between these machines" in advice_for(sky.SSH(hosts=["a.example"]), True)
    assert "Let this machine's firewall allow TCP" in advice_for(sky.Local(), False)
    assert "as by Container(network=…)" in advice_for(sky.Container(), False)
    assert "Machines of runpod have no network among them" in advice_for(sky.RunPod(), False)
    for driver in (cloud, sky.SSH(hosts=["a.example"]), sky.Local(), sky.Container(), sky.RunPod()):
        assert advice_for(driver, False).endswith(". ComputePool(check=None) leaves this check out")


# --- machines ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def machines(lab: Lab, count: int) -> Iterator[list[Machine]]:
    """New machines of the lab, which are removed afterwards."""
    made = [lab.machine(keys=[lab.public_key], wait=False) for _ in range(count)]
    try:
        for each in made:
            each.wait_for_ssh()
        yield made
    finally:
        for each in made:
            each.destroy()


def pool_of(lab: Lab, made: list[Machine], **options: Any) -> sky.ComputePool:
    """A pool whose node n is machine n."""
    hosts = [sky.Host(each.address, host_key=each.host_key) for each in made]
    provider = sky.SSH(hosts=hosts, user="root", identity=str(lab.client_key))
    return sky.ComputePool(provider, nodes=len(made), console="off", **options)


def block(source: Machine, target: Machine, *what: str) -> None:
    """Let the firewall of `target` do something with what comes from `source`."""
    inside = ["nsenter", f"--net={NETNS / target.lab.network.netns(target.number)}"]
    rule = ["-I", "INPUT", "-s", source.address, "-p", "tcp", *what]
    subprocess.run([*inside, "iptables", "-w", *rule], check=True, capture_output=True)


@pytest.mark.timeout(240)
def test_three_healthy_machines_reach_each_other(lab: Lab) -> None:
    with machines(lab, 3) as made, pool_of(lab, made, private_network=True) as pool:
        assert sorted(work.where() @ pool) == [0, 1, 2]
        dispatch = engine_of(pool).dispatch
        found = check_network(dispatch, dispatch.roster.nodes())
        assert found.failed == ()
        assert len(found.connections) == 6
        for each in found.nodes.values():
            assert each.interface == each.told == "eth0"
            assert each.found == ("127.0.1.1",), "as Debian has it; libraries are told the interface instead"
        assert found.warnings == ()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_what_a_firewall_drops_is_named_and_the_pool_does_not_start(lab: Lab) -> None:
    with machines(lab, 3) as made:
        block(made[2], made[0], "--syn", "-j", "DROP")
        pool = pool_of(lab, made, private_network=True)
        with pytest.raises(NetworkError) as raised:
            pool.start()
        error = raised.value
        numbers = {each.address: each for each in error.report.nodes.values()}  # type: ignore[attr-defined]
        source, target = numbers[made[2].address], numbers[made[0].address]
        assert (error.source, error.target, error.port) == (source.node, target.node, target.port)
        assert error.outcome == "timeout"
        assert str(error).startswith(
            f"node {source.node} ({made[2].address}) cannot reach node {target.node} ({made[0].address}) on TCP port "
            f"{target.port}: no answer within 3 s"
        )
        assert "Allow TCP on all ports between these machines" in str(error)
        assert pool.phase == "ended"


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_what_a_firewall_rejects_is_named_and_can_be_opened_while_the_pool_runs(lab: Lab) -> None:
    with machines(lab, 3) as made, pool_of(lab, made) as pool:
        check = engine_of(pool).network
        block(made[1], made[2], "--syn", "-j", "REJECT")
        with pytest.raises(NetworkError, match="the connection was refused") as refused:
            check.ensure([0, 1, 2])
        assert refused.value.address == made[2].address
        block(made[1], made[2], "--syn", "-j", "REJECT", "--reject-with", "icmp-host-prohibited")
        with pytest.raises(NetworkError, match="No route to host"):
            check.ensure([0, 1, 2])
        block(made[1], made[2], "--syn", "-j", "ACCEPT")
        opened = check.ensure([0, 1, 2])
        assert [each.outcome for each in opened.connections] == ["ok"], "the other pairs were good before"


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_nodes_of_a_gang_are_checked_before_it_runs(lab: Lab) -> None:
    with machines(lab, 2) as made, pool_of(lab, made) as pool:
        block(made[0], made[1], "--syn", "-j", "REJECT")
        assert sorted(work.where() @ pool) == [0, 1], "a call that is no gang may have no use for a network"
        assert work.where().with_options(procs=1) >> pool == 0
        with pytest.raises(NetworkError, match="the connection was refused"):
            work.where().with_options(procs=1) @ pool


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_large_packets_that_are_lost_and_different_mtus_are_told(lab: Lab) -> None:
    with machines(lab, 2) as made, pool_of(lab, made) as pool:
        notices: list[str] = []
        pool.events.listen(lambda event: notices.append(event.text) if isinstance(event, Notice) else None)
        made[1].run("ip link set eth0 mtu 1280")
        assert engine_of(pool).network.ensure([0, 1]).failed == ()
        assert any("different MTUs" in each and "1280 (eth0)" in each for each in notices)
        block(made[0], made[1], "-m", "length", "--length", "1000:65535", "-j", "DROP")
        dispatch = engine_of(pool).dispatch
        lost = error_of(check_network(dispatch, dispatch.roster.nodes()), "Open it")
        assert lost is not None
        assert lost.outcome == "stalled"
        assert "a few bytes arrive, but 64 KiB do not" in str(lost)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_eight_machines_without_a_network_are_told_soon(lab: Lab) -> None:
    with machines(lab, 8) as made, pool_of(lab, made) as pool:
        for each, other in itertools.permutations(made, 2):
            block(each, other, "-j", "DROP")
        begun = time.monotonic()
        with pytest.raises(NetworkError, match="56 of 56 connections between nodes failed"):
            engine_of(pool).network.ensure(range(8))
        spent = time.monotonic() - begun
        print(f"told after {spent:.1f} s")  # 3 s of waiting for answers, and what a busy machine adds
        assert spent < 60, "it does not wait for one connection after the other"
