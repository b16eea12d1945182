"""What libraries find on a node when they look up its own name."""

from __future__ import annotations

import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import skypool as sky
from skypool.agent import own_name
from skypool.devices import network
from skypool.gangs.environment import Member
from skypool.link import agent_messages
from tests.lab import work
from tests.lab.aws import AWS
from tests.lab.machines import Lab

DEBIAN = """\
    127.0.0.1\tlocalhost
    127.0.1.1\tgpu1.lan gpu1  # by the installer
    ::1\tlocalhost ip6-localhost
    10.9.9.9\tstorage
    """


def test_the_own_name_gets_the_address_that_peers_reach_and_what_was_there_is_kept() -> None:
    before = textwrap.dedent(DEBIAN)
    after = own_name.mended(before, "10.0.0.5", "gpu1")
    assert after.splitlines() == [
        "127.0.0.1\tlocalhost",
        "# skypool: 127.0.1.1\tgpu1.lan gpu1  # by the installer",
        "::1\tlocalhost ip6-localhost",
        "10.9.9.9\tstorage",
        "10.0.0.5 gpu1 gpu1.lan # skypool: its own address",
    ]


def test_other_names_of_a_loopback_line_stay() -> None:
    after = own_name.mended("127.0.0.1 localhost gpu1 other\n", "10.0.0.5", "gpu1.lan")
    assert after.splitlines() == [
        "# skypool: 127.0.0.1 localhost gpu1 other",
        "127.0.0.1 localhost other # skypool: without gpu1.lan",
        "10.0.0.5 gpu1.lan gpu1 # skypool: its own address",
    ]


def test_the_interface_of_an_address_is_found() -> None:
    assert network.interface("127.0.0.1") == "lo"
    assert network.interface("192.0.2.77") == ""


def test_the_mtu_of_an_interface_is_read_and_that_of_none_is_unknown() -> None:
    assert network.mtu("lo") == int(Path("/sys/class/net/lo/mtu").read_text())
    assert network.mtu("no-such-one") is None


def test_a_name_that_leads_to_the_address_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    if network.found("localhost") != {"127.0.0.1"}:
        pytest.skip("this machine has another address for localhost, too")
    assert own_name.prepare("127.0.0.1", False, {"A": "b"}) == {}


def test_interfaces_that_the_user_has_named_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-name.invalid")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("TP_SOCKET_IFNAME", raising=False)
    added = own_name.prepare("127.0.0.1", False, {"TP_SOCKET_IFNAME": "eth7"})
    assert added == {"GLOO_SOCKET_IFNAME": "lo"}


@pytest.mark.slow
@pytest.mark.usefixtures("own_state")
@pytest.mark.timeout(240)
def test_rented_machines_find_their_own_address_and_meet_by_their_names(aws: AWS) -> None:
    """Each listens where its own name leads, as Gloo does, and tells the head; the head then calls them all."""
    provider = sky.AWS(region="us-east-1", ssh_from="0.0.0.0/0")
    with sky.ComputePool(provider, vcpus=2, nodes=2, private_network=True, console="off") as pool:
        for addresses, own, hosts, _ in work.own_name() @ pool:
            assert addresses == [own]
            assert "its own address" in hosts
        assert work.meet_by_name.with_options(timeout=60)() @ pool == [[0, 1], [0, 1]]
    assert aws.left() == {}


@pytest.mark.timeout(120)
def test_the_hosts_file_of_the_users_own_machine_is_left_and_the_interface_is_named(lab: Lab) -> None:
    machine = lab.machine(keys=[lab.public_key])
    host = sky.Host(machine.address, host_key=machine.host_key)
    provider = sky.SSH(hosts=[host], user="root", identity=str(lab.client_key))
    with sky.ComputePool(provider, console="off") as pool:
        addresses, own, hosts, names = work.own_name() >> pool
    assert addresses == ["127.0.1.1"], "as Debian has it: otherwise this test shows nothing"
    assert own == machine.address
    assert "skypool" not in hosts
    assert len(set(names)) == 1
    assert names[0], "the interface that has the address"
    machine.destroy()


@pytest.mark.timeout(120)
def test_the_processes_of_a_gang_find_the_other_machines_by_their_names(lab: Lab) -> None:
    machines = [lab.machine(keys=[lab.public_key]) for _ in range(2)]
    hosts = [sky.Host(each.address, host_key=each.host_key) for each in machines]
    provider = sky.SSH(hosts=hosts, user="root", identity=str(lab.client_key))
    with sky.ComputePool(provider, nodes=2, console="off") as pool:
        first, second = work.names() @ pool
        alone = work.names() >> pool
    addresses = {first[0]: first[2], second[0]: second[2]}
    assert set(addresses.values()) == {each.address for each in machines}
    assert first[1] == [f"{second[0]} {second[2]}"]
    assert second[1] == [f"{first[0]} {first[2]}"]
    assert alone[1:] == ([], "")
    for each in machines:
        each.destroy()


@pytest.mark.parametrize(
    "said",
    [
        *(
            "",
            "localhost",
            "LocalHost",
            "localhost6",
            "ip6-loopback",
            "ip6-allnodes",
            "127",
            "0x7f000001",
            "0X7F",
            "0x",
        ),
        *("gpu1.lan", "a b", "a\n6.6.6.6 github.com", "a\n", "a#", "-a", "a-", "a_b", "\u017fky", "\u0661", "a" * 64),
    ],
)
def test_a_name_that_could_be_taken_for_another_thing_than_the_node_is_not_given_to_others(said: str) -> None:
    assert agent_messages.host_name(said) == ""


@pytest.mark.parametrize("said", ["gpu1", "ip-10-0-0-5", "GPU-1", "a", "7b", "a" * 63])
def test_the_name_of_a_machine_is_given_to_others(said: str) -> None:
    assert agent_messages.host_name(said) == said


@pytest.mark.parametrize(
    "said",
    [
        *(
            "fe80::1%x\n6.6.6.6 github.com",
            "fe80::1%eth0",
            "2001:db8::1% github.com",
            "10.0.0.5\n6.6.6.6 a",
            "10.0.0.5 a",
        ),
        *(
            "127.0.0.1",
            "127.9.9.9",
            "::1",
            "::ffff:127.0.0.1",
            "0.0.0.0",
            "::",
            "::ffff:0.0.0.0",
            "224.0.0.1",
            "ff02::1",
        ),
        *("255.255.255.255", "10.0.0", "010.0.0.1", "\u0661.1.1.1", "x", ""),
    ],
)
def test_an_address_at_which_no_other_machine_reaches_a_node_is_not_given_to_others(said: str) -> None:
    assert agent_messages.address(said) == ""


def test_an_address_is_given_to_others_in_its_usual_form() -> None:
    given = [agent_messages.address(said) for said in ("10.0.0.5", "2001:DB8::0:1", "169.254.7.7", "fd00::1")]
    assert given == ["10.0.0.5", "2001:db8::1", "169.254.7.7", "fd00::1"]


def _member(*hosts: tuple[str, str]) -> Member:
    return Member(
        rank=0,
        size=2,
        local=0,
        of=1,
        position=0,
        nodes=len(hosts),
        attempt=1,
        changed=False,
        gang="g",
        master="",
        port=0,
        jax_port=0,
        hosts=hosts,
    )


def test_of_names_that_differ_in_case_alone_none_is_used() -> None:
    member = _member(("a", "10.0.0.1"), ("gpu2", "10.0.0.2"), ("GPU2", "10.6.6.6"), ("c", ""), ("d", "10.0.0.4"))
    assert member.peers == {"d": "10.0.0.4"}
    assert _member(("a", "10.0.0.1"), ("A", "10.6.6.6")).peers == {}


def test_the_names_of_thousands_of_nodes_take_little_time() -> None:
    member = _member(*((f"n{i}", "10.0.0.1") for i in range(20_000)))
    header = {"gang": member.header, "world": (0, [address for _, address in member.hosts])}
    began = time.process_time()
    assert len(Member.from_header(header).peers) == 19_999
    assert time.process_time() - began < 2


SHADOWED = """
import socket, sys
from pathlib import Path
from skypool.agent import own_name
peers = {name: "192.0.2.6" for name in ("gpu1", "GPU1", "Gpu1.lan", "db")}
done = own_name.shadow(sys.argv[1], {**peers, "gpu2": "192.0.2.8"})
names = "gpu2", "gpu1", socket.gethostname(), "db"
print(done, *(own_name.found(name) for name in names), own_name.MARK.encode() in Path("/etc/hosts").read_bytes())
"""
SHADOWED_IN = 'hostname gpu1.lan; mount --bind "$0" /etc/hosts; exec "$1" -c "$2" 192.0.2.7'


@pytest.mark.needs("mounts")
def test_a_process_gets_a_hosts_file_of_its_own_and_the_machines_stays(tmp_path: Path) -> None:
    """No other machine gets a name of this one, nor one that the file has."""
    file = tmp_path / "hosts"
    before = b"127.0.0.1 localhost\n127.0.1.1 gpu1.lan gpu1 # in the b\xfcro\n192.0.2.9 DB\n"
    file.write_bytes(before)
    argv = ["unshare", "--uts", "--mount", "sh", "-ec", SHADOWED_IN, str(file), sys.executable, SHADOWED]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[1])
    assert done.stdout == "True {'192.0.2.8'} {'192.0.2.7'} {'192.0.2.7'} {'192.0.2.9'} True\n", done.stderr
    assert file.read_bytes() == before
