"""What libraries find on a node when they look up its own name."""

from __future__ import annotations

import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import skypool as sky
from skypool.agent import own_name
from skypool.devices import network
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


SHADOWED = """
import socket, sys
from pathlib import Path
from skypool.agent import own_name
text = Path("/etc/hosts").read_text
done = own_name.shadow(sys.argv[1], {"gpu2": "192.0.2.8"})
print(done, own_name.found("gpu2"), own_name.found(socket.gethostname()), own_name.MARK in text())
"""


@pytest.mark.needs("mounts")
def test_a_process_gets_a_hosts_file_of_its_own_and_the_machines_stays() -> None:
    before = Path("/etc/hosts").read_text()
    argv = ["unshare", "--uts", "sh", "-c", 'hostname gpu1; exec "$0" -c "$1" 192.0.2.7', sys.executable, SHADOWED]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[1])
    assert done.stdout == "True {'192.0.2.8'} {'192.0.2.7'} True\n", done.stderr
    assert Path("/etc/hosts").read_text() == before
