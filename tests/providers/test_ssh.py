"""SSH: real sshd's on loopback addresses, each with a home of its own, and lab machines for what needs root."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool import accelerators, events
from skypool.errors import (
    CapacityError,
    ConnectionLost,
    HostBusy,
    HostKeyMismatch,
    LaunchError,
    LoginRefused,
    StillRunning,
    UsageError,
)
from skypool.model import Instance, Need, Offer, Order
from skypool.testing import DriverContract
from skypool_ssh import SSH, Host
from tests.conftest import eventually, processes_of
from tests.lab import kernel
from tests.lab.homehost import HomeHost
from tests.lab.machines import Lab, Machine
from tests.lab.work import hostname
from tests.providers.on_nodes import fail, parent, stop_keeper, where

pytestmark = pytest.mark.needs("sshd")
ROOT = Path(__file__).parent.parent.parent
LOCK = f"host.{os.uname().nodename}.lock"


class Site:
    """Three hosts, a key that may log in, and one user's ssh configuration and state."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key = self.new_key("id")
        self.hosts = [HomeHost([Path(f"{self.key}.pub").read_text().strip()]) for _ in range(3)]
        self.argv = folder / "argv"
        wrapper = folder / "bin/ssh"
        wrapper.parent.mkdir()
        wrapper.write_text(f'#!/bin/sh\necho "$*" | head -1 >> {self.argv}\nexec {shutil.which("ssh")} "$@"\n')
        wrapper.chmod(0o755)

    def new_key(self, name: str) -> str:
        file = self.folder / name
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(file)], check=True)
        return str(file)

    def begin(self, place: Path) -> None:
        """A new user, who knows nobody."""
        self.place = place
        place.mkdir(exist_ok=True)
        self.argv.unlink(missing_ok=True)
        self.write_config()
        for host in self.hosts:
            shutil.rmtree(host.home)
            host.home.mkdir()

    def write_config(self, *more: str, known: tuple[HomeHost, ...] = ()) -> None:
        """The user's ssh configuration and known_hosts."""
        lines = [f"UserKnownHostsFile {self.place}/known", f"IdentityFile {self.key}", "IdentitiesOnly yes"]
        (self.place / "config").write_text("\n".join([*more, "Host *", *lines, ""]))
        known_ = [f"[{host.address}]:{host.port} {host.host_key}\n" for host in known]
        (self.place / "known").write_text("".join(known_))

    def host(self, number: int, **more: Any) -> Host:
        """With its key declared, unless something else is said."""
        host = self.hosts[number]
        return Host(host.address, **{"port": host.port, "host_key": host.host_key, **more})

    def driver(self, *hosts: str | Host, **more: Any) -> SSH:
        return SSH(hosts or [self.host(0)], config=str(self.place / "config"), **more)


@pytest.fixture(scope="module")
def shared_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("ssh"))
    yield site
    for host in site.hosts:
        host.close()


@pytest.fixture
def site(shared_site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Afterwards nothing runs on the hosts, and no command line gave up on host keys."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", f"{shared_site.folder}/bin:{os.environ['PATH']}")
    shared_site.begin(tmp_path / "user")
    yield shared_site
    asked = shared_site.argv.read_text() if shared_site.argv.exists() else ""
    assert "StrictHostKeyChecking=no" not in asked
    assert "HostsFile=/dev/null" not in asked.replace('"', "")
    for host in shared_site.hosts:
        assert host.nodes() == []
        eventually(partial(is_quiet, host), 30, f"the end of all on {host.address}")


def is_quiet(host: HomeHost) -> bool:
    return not processes_of(f"HOME={host.home}")


def pool(driver: SSH, **more: Any) -> sky.ComputePool:
    return sky.ComputePool(driver, console="off", **more)


def ordered(driver: SSH, nodes: tuple[int, ...], pool: str = "p", token: str = "t") -> tuple[Offer, Order]:
    need = Need()
    return next(iter(driver.offers(need))), Order(pool, token, nodes, need)


# --- the whole life ------------------------------------------------------------------------------------------


def test_a_pool_lives_and_ends_on_two_hosts(site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    driver = site.driver(site.host(0), site.host(1))
    with sky.ComputePool(driver, nodes=2, console="plain", name="life") as p:
        assert where("hi") @ p == [str(site.hosts[0].home), str(site.hosts[1].home)]
        with pytest.raises(KeyError, match="my own"):
            fail() >> p
        assert list(p.map(abs, range(-50, 0))) == list(range(50, 0, -1))
        assert site.hosts[0].nodes() == ["life.0"]
        assert [(i.id, i.node, i.state) for i in driver.instances(pool="life")] == [
            (site.host(0).label, 0, "running"),
            (site.host(1).label, 1, "running"),
        ]
        assert len(driver.instances()) == 2
        assert driver.instances(pool="another") == []
    assert driver.instances() == []
    assert "said hi" in capfd.readouterr().out


def test_calls_run_in_a_folder_that_stays(site: Site) -> None:
    with pool(site.driver()) as p:
        assert p.submit(os.getcwd).result() == f"{site.hosts[0].home}/.skypool/work"
        here = subprocess.run(["sh", "-c", "umask"], capture_output=True, text=True, check=True).stdout
        there: Any = sky.cmd("sh", "-c", "umask").with_options(output="capture") >> p
        assert there.output == here  # that of the login, here of this process, whose child sshd is
    assert (site.hosts[0].home / ".skypool/work").is_dir()


def test_the_interpreter_that_is_named_runs_the_nodes(site: Site) -> None:
    with pool(site.driver(python=sys.executable)) as p:
        assert p.submit(getattr, sys, "executable").result() == sys.executable
    assert (site.hosts[0].home / f".skypool/{LOCK}").exists()


# --- which host is meant -------------------------------------------------------------------------------------


def test_hosts_of_the_ssh_configuration_are_known_by_their_names(site: Site) -> None:
    host = site.hosts[1]
    site.write_config(f"Host gpu1\n  HostName {host.address}\n  Port {host.port}\n", known=(host,))
    with pool(site.driver("gpu1")) as p:
        assert where() >> p == str(host.home)


def test_a_host_is_reached_through_another_one(site: Site) -> None:
    jump, target = site.hosts[0], site.hosts[1]
    site.write_config(known=(jump,))
    before = jump.console().count("Accepted publickey")
    with pool(site.driver(site.host(1, jump=f"{jump.user}@{jump.address}:{jump.port}"))) as p:
        assert where() >> p == str(target.home)
    assert jump.console().count("Accepted publickey") > before
    assert not (jump.home / ".skypool").exists()


@pytest.mark.slow
def test_many_hosts_behind_one_that_lets_few_in_at_a_time_are_all_reached(site: Site) -> None:
    jump = site.hosts[0]
    config = jump.folder / "sshd_config"
    usual = config.read_text()
    config.write_text(usual.replace("MaxStartups 100", "MaxStartups 1"))
    jump.stop()
    jump.start_sshd()
    try:
        site.write_config(known=(jump,))
        door = f"{jump.user}@{jump.address}:{jump.port}"
        driver = site.driver(site.host(1, jump=door), site.host(2, jump=door))
        for _ in range(3):
            taken = driver.launch(*ordered(driver, (0, 1)))
            assert len(driver.instances()) == 2
            driver.terminate(taken)
    finally:
        config.write_text(usual)
        jump.stop()
        jump.start_sshd()


def test_what_a_proxy_command_leaves_behind_keeps_nobody_waiting(site: Site) -> None:
    jump, target = site.hosts[:2]
    left = site.place / "left"
    linger = f"sleep 100 < /dev/null > /dev/null & echo $! >> {left}"
    proxy = f"sh -c '{linger}; exec ssh -F {site.place}/config -W %h:%p door'"
    site.write_config(
        f"Host far\n  HostName {target.address}\n  Port {target.port}\n  ProxyCommand {proxy}",
        f"Host door\n  HostName {jump.address}\n  Port {jump.port}",
        known=(jump, target),
    )
    driver = site.driver("far")
    began = time.monotonic()
    try:
        driver.terminate(driver.launch(*ordered(driver, (0,))))
        assert time.monotonic() - began < 18  # what it waits for an answer is more
    finally:
        for pid in left.read_text().split():
            os.kill(int(pid), signal.SIGKILL)


def test_an_inventory_names_hosts_and_what_they_share(site: Site) -> None:
    first, second = site.hosts[:2]
    file = site.place / "hosts.toml"
    file.write_text(
        f"""
        [defaults]
        user = "{first.user}"
        [[host]]
        name = "{first.address}"
        port = {first.port}
        host_key = "{first.host_key}"
        [[host]]
        name = "{second.address}"
        port = {second.port}
        host_key = "{second.host_key}"
        accelerator = "H100:8"
        """
    )
    driver = SSH(inventory=str(file), config=str(site.place / "config"))
    assert [each.accelerator for each in driver.offers(Need())] == [None, accelerators.parse("H100:8")]
    file.write_text(file.read_text().replace("accelerator", "acelerator"))
    with pytest.raises(UsageError, match="no field 'acelerator'; did you mean 'accelerator'"):
        driver.offers(Need())


untyped: Any = SSH


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (SSH, "SSH needs machines"),
        (lambda: SSH("gpu1"), r"hosts must be a list; write hosts=\['gpu1'\]"),
        (lambda: SSH(["gpu1", "gpu1"]), "gpu1 is named twice"),
        (lambda: SSH(["ssh://gpu1"]), "a host"),
        (lambda: SSH(["-oProxyCommand=x"]), "a host's name"),
        (lambda: SSH(["gpu1:99999"]), "port must be a number from 1 to 65535"),
        (lambda: SSH(["gpu1"], jump="-x"), "jump must be a text of one line"),
        (lambda: Host("gpu1", accelerator="H1000"), "no accelerator is called 'H1000'; did you mean"),
        (lambda: Host("gpu1", host_key="AAAA"), "host_key must be like"),
        (lambda: Host("gpu1", host_key=untyped), "host_key must be a non-empty string, not <class"),
        (lambda: untyped(7), r"hosts must be a list; write hosts=\[7\]"),
        (lambda: untyped(["gpu1"], strict="no"), "strict must be True or False, not 'no'"),
        (lambda: untyped(["gpu1"], config=7), "config must be a path, not 7"),
        (lambda: untyped(inventory=7), "inventory must be a path, not 7"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_where_it_is_written(made: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        made()


def test_hosts_as_people_write_them() -> None:
    driver = SSH(["gpu1", "me@gpu2:2222", "[fe80::1]:22"])
    assert [each.label for each in driver.hosts if isinstance(each, Host)] == ["gpu1", "me@gpu2:2222", "[fe80::1]:22"]


# --- whose key is believed -----------------------------------------------------------------------------------


def test_another_host_key_ends_it_before_anything_is_sent(site: Site) -> None:
    driver = site.driver(site.host(0, host_key=site.hosts[1].host_key), site.host(1))
    before = site.hosts[0].console().count("Accepted publickey")
    with pytest.raises(HostKeyMismatch, match=r"127[\d.]+.* has another host key than the known one, so nothing"):
        pool(driver).start()
    assert site.hosts[0].console().count("Accepted publickey") == before
    assert list(site.hosts[0].home.iterdir()) == []
    assert SSH([site.host(1)], config=driver.config).instances() == []  # nor was the other one kept


def test_the_first_key_seen_is_kept_and_the_user_is_told(site: Site, tmp_path: Path) -> None:
    host = site.hosts[0]
    driver = site.driver(f"{host.address}:{host.port}")
    told: list[events.Event] = []
    p = pool(driver)
    p.events.listen(told.append)
    with p:
        assert where() >> p == str(host.home)
    kept = tmp_path / "state/skypool/ssh/known_hosts"
    [notice] = [e.text for e in told if isinstance(e, events.Notice)]
    assert "the first one seen: SHA256:" in notice
    assert str(kept) in notice
    assert kept.read_text().split()[:3] == [f"[{host.address}]:{host.port}", *host.host_key.split()]
    assert kept.parent.stat().st_mode & 0o777 == 0o700
    assert "accept-new" not in site.argv.read_text().splitlines()[-1]  # it was the first one seen once

    old = host.host_key
    try:
        host.change_key()
        assert host.host_key != old
        with pytest.raises(HostKeyMismatch, match="has another host key than the known one"):
            pool(driver).start()
    finally:
        kept.unlink()


def test_what_the_user_knows_is_believed_and_nothing_else(site: Site, tmp_path: Path) -> None:
    host = site.hosts[0]
    site.write_config(known=(host,))
    driver = site.driver(f"{host.address}:{host.port}")
    told: list[events.Event] = []
    p = pool(driver)
    p.events.listen(told.append)
    with p:
        assert where() >> p == str(host.home)
    assert not [e for e in told if isinstance(e, events.Notice)]
    assert not (tmp_path / "state/skypool/ssh/known_hosts").exists()
    known = site.place / "known"
    known.write_text(known.read_text().replace(host.host_key, site.hosts[1].host_key))
    with pytest.raises(HostKeyMismatch):
        pool(driver).start()


@pytest.mark.parametrize("known", [False, True], ids=["unknown", "another"])
def test_the_key_of_a_host_on_the_way_is_not_mistaken_for_that_of_the_host(site: Site, known: bool) -> None:
    jump = site.hosts[0]
    site.write_config(known=(jump,) if known else ())
    file = site.place / "known"
    file.write_text(file.read_text().replace(jump.host_key, site.hosts[2].host_key))
    driver = site.driver(site.host(1, jump=f"{jump.address}:{jump.port}"))
    with pytest.raises(
        HostKeyMismatch, match=r"the jump host on the way to 127[\d.]+:\d+ \(log in to a new .* has another host key"
    ):
        driver.launch(*ordered(driver, (0,)))


def test_a_strict_driver_does_not_even_connect_to_a_host_that_nobody_knows(site: Site) -> None:
    host = site.hosts[0]
    before = host.console()
    with pytest.raises(HostKeyMismatch, match=r"the host key of 127[\d.]+.* is unknown.*host_key"):
        pool(site.driver(f"{host.address}:{host.port}", strict=True)).start()
    assert host.console() == before


# --- who is let in, and who is there -------------------------------------------------------------------------


def test_a_refused_login_says_who_asked_and_what_to_check(site: Site) -> None:
    with pytest.raises(LoginRefused, match=r"127[\d.]+:\d+ refused the login as nobody: check user= and identity="):
        pool(site.driver(user="nobody")).start()
    stranger = site.new_key(f"stranger-{time.monotonic_ns()}")
    site.write_config("IdentityFile none")
    (site.place / "config").write_text(f"UserKnownHostsFile {site.place}/known\n")
    with pytest.raises(LoginRefused, match="Permission denied"):
        pool(site.driver(identity=stranger)).start()
    with pytest.raises(LoginRefused, match="the key file /nowhere/key does not exist on this computer; check user="):
        pool(site.driver(identity="/nowhere/key")).start()
    jump = site.hosts[2]
    site.write_config(known=(jump,))
    behind = site.host(1, jump=f"nobody@{jump.address}:{jump.port}")
    with pytest.raises(LoginRefused, match=r"jump host on the way to 127[\d.]+:\d+ \(.*\) refused the login: check"):
        pool(site.driver(behind)).start()


def test_a_host_that_cannot_be_reached_is_named(site: Site) -> None:
    away = site.host(0, port=9)
    with pytest.raises(ConnectionLost, match=r"127[\d.]+:9 cannot be used: .*refused"):
        pool(site.driver(away)).start()
    with pool(site.driver(away, site.host(1))) as p:  # the next one will do
        assert where() >> p == str(site.hosts[1].home)


@pytest.mark.slow
def test_a_host_serves_one_pool_at_a_time(site: Site) -> None:
    one = site.driver(site.host(0))
    with pool(one, name="first") as p:
        with pytest.raises(LaunchError, match=r"1 free hosts are needed.*\n.*127[\d.]+:\d+: it serves pool 'first' of"):
            pool(one, name="second").start()
        with pool(site.driver(site.host(0), site.host(1)), name="second") as q:
            assert where() >> q == str(site.hosts[1].home)
        assert where() >> p == str(site.hosts[0].home)
    with pool(one, name="second") as p:
        assert where() >> p == str(site.hosts[0].home)


def test_a_pool_of_the_same_name_of_another_user_is_not_seen(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = site.driver()
    with monkeypatch.context() as another:
        another.setenv("LOGNAME", "somebody")
        theirs = driver.launch(*ordered(driver, (0,)))
        assert [each.id for each in driver.instances(pool=theirs[0].pool)] == [theirs[0].id]
    assert driver.instances(pool=theirs[0].pool) == []
    driver.terminate(theirs)


def test_a_host_that_was_taken_between_claim_and_bootstrap_is_busy_by_name(site: Site) -> None:
    driver = site.driver()
    offer, order = ordered(driver, (0,))
    home = site.hosts[0].home / ".skypool"
    instances = driver.launch(offer, order)
    (home / LOCK).write_text("'another' of somebody@elsewhere\n")
    with subprocess.Popen(["flock", str(home / LOCK), "sleep", "60"]) as holder:
        eventually(lambda: subprocess.run(["flock", "-n", str(home / LOCK), "true"]).returncode)
        try:

            class Same(SSH):
                def launch(self, offer: Offer, order: Order) -> list[Any]:
                    return [replace(each, pool=order.pool, node=order.nodes[0]) for each in instances]

            with pytest.raises(HostBusy, match="serves another pool: 'another' of somebody@elsewhere"):
                pool(Same([site.host(0)], config=driver.config)).start()
        finally:
            for pid in sky_children(holder.pid):
                os.kill(pid, signal.SIGKILL)
    driver.terminate(instances)


def test_a_glance_at_the_lock_of_a_host_makes_it_busy_for_nobody(site: Site) -> None:
    driver = site.driver()
    instances = driver.launch(*ordered(driver, (0,)))
    lock = str(site.hosts[0].home / f".skypool/{LOCK}")

    class Same(SSH):
        def launch(self, offer: Offer, order: Order) -> list[Any]:
            subprocess.Popen(["flock", lock, "sleep", "1"])  # as `look` does for a moment
            eventually(lambda: subprocess.run(["flock", "-n", lock, "true"]).returncode)
            return [replace(each, pool=order.pool, node=order.nodes[0]) for each in instances]

    with pool(Same([site.host(0)], config=driver.config)) as p:
        assert where() >> p == str(site.hosts[0].home)
    driver.terminate(instances)


def sky_children(pid: int) -> list[int]:
    from skypool.agent.processes import descendants

    return [*descendants(pid), pid]


@pytest.mark.slow
def test_a_lost_node_comes_back_on_the_only_host_there_is(site: Site) -> None:
    with pool(site.driver(), name="only") as p:
        lost = where().with_options(retries=3)
        for pid in processes_of(f"HOME={site.hosts[0].home}"):
            os.kill(pid, signal.SIGKILL)
        assert lost >> p == str(site.hosts[0].home)


@pytest.mark.slow
def test_the_end_of_a_lost_node_leaves_the_next_node_of_its_pool_on_the_same_host_alone(site: Site) -> None:
    driver = site.driver()
    with pool(driver, name="only") as p:
        [lost] = driver.instances(pool="only")
        for pid in processes_of(f"HOME={site.hosts[0].home}"):
            os.kill(pid, signal.SIGKILL)
        agent = parent().with_options(retries=3) >> p
        assert [each.node for each in driver.instances(pool="only")] != [lost.node]
        driver.terminate([lost])
        assert parent() >> p == agent


# --- launching -----------------------------------------------------------------------------------------------


def test_all_hosts_or_none_are_claimed(site: Site) -> None:
    driver = site.driver(site.host(0), site.host(1))
    with pool(site.driver(site.host(1)), name="first"):
        with pytest.raises(CapacityError, match="2 free hosts are needed") as e:
            driver.launch(*ordered(driver, (0, 1)))
        assert e.value.provider == "ssh"
        assert site.hosts[0].nodes() == []


@pytest.mark.slow
def test_a_launch_that_is_repeated_takes_nothing_more(site: Site) -> None:
    driver = site.driver(site.host(0), site.host(1), site.host(2))
    first = driver.launch(*ordered(driver, (0, 1)))
    assert driver.launch(*ordered(driver, (0, 1))) == first
    more = driver.launch(*ordered(driver, (2,), token="u"))
    assert [each.id for each in [*first, *more]] == [site.host(i).label for i in range(3)]
    with pytest.raises(CapacityError, match="it serves pool 'p'"):
        driver.launch(*ordered(driver, (3,), pool="q", token="v"))
    assert {each.state for each in driver.instances(pool="p")} == {"starting"}
    driver.terminate([*first, *more])
    driver.terminate(first)  # quiet for the gone
    assert driver.instances() == []


def test_a_claim_that_nobody_used_is_free_after_a_while(site: Site) -> None:
    driver = site.driver()
    driver.launch(*ordered(driver, (0,), pool="old"))
    claim = site.hosts[0].home / ".skypool/pools/old.0/claim"
    os.utime(claim, (time.time() - 1000, time.time() - 1000))
    assert driver.instances() == []
    [taken] = driver.launch(*ordered(driver, (0,), pool="new"))
    assert site.hosts[0].nodes() == ["new.0"]
    driver.terminate([taken])


SMI = """\
#!/bin/sh
case $1 in
    -L) echo 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-11111111-2222-3333-4444-555555555555)'
        echo 'GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-11111111-2222-3333-4444-666666666666)' ;;
    *) printf '0, 81559, 0x233010DE\\n1, 81559, 0x233010DE\\n' ;;
esac
"""


def test_hosts_are_asked_for_accelerators_only_if_that_matters(site: Site) -> None:
    tool = site.hosts[1].tools / "nvidia-smi"
    tool.write_text(SMI)
    tool.chmod(0o755)
    driver = site.driver(site.host(0), site.host(1), site.host(2, accelerator="L4"), site.host(0, port=9))
    [plain, l4] = driver.offers(Need())
    assert (plain.accelerator, l4.accelerator) == (None, accelerators.L4())
    assert not site.argv.exists()
    offers = list(driver.offers(Need(accelerators=(accelerators.parse("H100:2"),))))
    tool.unlink()
    found = {offer.instance_type: offer.accelerator for offer in offers}
    assert found[site.host(1).label] is not None
    assert str(found[site.host(1).label]) == str(accelerators.parse("H100-80GB-SXM:2"))
    assert found[site.host(0).label] is None
    assert len(found) == 3
    assert "refused" in offers[0].detail["left_out"][site.host(0, port=9).label]
    with pytest.raises(ConnectionLost, match=r"127[\d.]+:9 cannot be used"):
        site.driver(site.host(0, port=9)).offers(Need(accelerators=(accelerators.L4(),)))


# --- the end -------------------------------------------------------------------------------------------------


def test_the_end_is_made_and_proved_when_the_keeper_is_frozen(site: Site) -> None:
    p = pool(site.driver()).start()
    keeper = stop_keeper() >> p
    assert keeper in processes_of(f"HOME={site.hosts[0].home}")
    p.stop()
    assert processes_of(f"HOME={site.hosts[0].home}") == []


@pytest.mark.needs("root", "mounts")
def test_what_is_mounted_in_the_folder_of_a_node_is_not_emptied_by_its_end(site: Site, tmp_path: Path) -> None:
    driver = site.driver()
    [instance] = driver.launch(*ordered(driver, (0,)))
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/weights").touch()
    place = site.hosts[0].home / ".skypool/pools/p.0/its data"
    place.mkdir()
    subprocess.run(["mount", "--bind", str(tmp_path / "precious"), str(place)], check=True)
    try:
        driver.terminate([instance])
    finally:
        kernel.unmount_below(site.hosts[0].home)
    assert (tmp_path / "precious/weights").exists()
    assert not place.parent.exists()


def test_an_end_that_cannot_be_proved_names_the_host_and_what_ends_it(site: Site) -> None:
    driver = site.driver()
    instances = driver.launch(*ordered(driver, (0,)))
    site.hosts[0].stop()
    try:
        with pytest.raises(StillRunning, match=r"127[\d.]+:\d+ cannot be used: .*refused.*\n?.*lease is over") as e:
            driver.terminate(instances)
        assert e.value.instances == tuple(instances)
    finally:
        site.hosts[0].start_sshd()
    driver.terminate(instances)


def test_a_node_on_a_host_that_is_named_no_more_is_not_proved_ended(site: Site) -> None:
    named, other = [
        f'[[host]]\nname = "{each.address}"\nport = {each.port}\nhost_key = "{each.host_key}"\n'
        for each in site.hosts[:2]
    ]
    inventory = site.place / "hosts.toml"
    inventory.write_text(named)
    driver = SSH(inventory=str(inventory), config=str(site.place / "config"))
    [node] = driver.launch(*ordered(driver, (0,)))
    inventory.write_text(other)
    with pytest.raises(StillRunning, match=f"{node.id}: the host is no longer in hosts= or the inventory") as left:
        driver.terminate([node])
    assert left.value.instances == (node,)
    with pytest.raises(UsageError, match=f"is on host {node.id}, which is no longer in hosts= or the inventory"):
        driver.access(node)
    inventory.write_text(named)
    driver.terminate([node])
    assert driver.instances() == []


def test_a_host_that_cannot_be_asked_hides_no_node_of_others(site: Site) -> None:
    driver = site.driver(site.host(0), site.host(0, port=9))
    instances = driver.launch(*ordered(driver, (0,)))
    with pytest.warns(RuntimeWarning, match=r"127[\d.]+:9 cannot be used"):
        assert [each.id for each in driver.instances()] == [site.host(0).label]
    driver.terminate(instances)
    with pytest.raises(ConnectionLost, match=r"127[\d.]+:9 cannot be used"):
        driver.instances()


@pytest.mark.slow
def test_a_script_that_just_ends_ends_its_nodes(site: Site) -> None:
    hosts = [f"sky.Host({host.address!r}, port={host.port}, host_key={host.host_key!r})" for host in site.hosts[:2]]
    code = f"""
        import skypool as sky
        driver = sky.SSH([{", ".join(hosts)}], config={str(site.place / "config")!r})
        pool = sky.ComputePool(driver, nodes=2, console="off").start()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert [host.nodes() for host in site.hosts[:2]] == [[], []]


@pytest.mark.slow
def test_a_client_that_is_killed_leaves_the_host_free_when_its_lease_is_over(site: Site) -> None:
    host = site.hosts[0]
    code = f"""
        import skypool as sky, time
        driver = sky.SSH([sky.Host({host.address!r}, port={host.port}, host_key={host.host_key!r})],
                         config={str(site.place / "config")!r})
        pool = sky.ComputePool(driver, name="orphan", lease=5, liveness=5, console="off").start()
        print("ready", flush=True)
        time.sleep(60)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, cwd=ROOT) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"ready\n"
        client.kill()
    assert host.nodes() == ["orphan.0"]
    eventually(lambda: host.nodes() == [], 30, "the end of the lease")
    with pool(site.driver()) as p:
        assert where() >> p == str(host.home)


# --- shells and ssh settings in the way ----------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["StdinNull yes", "ForkAfterAuthentication yes", "SessionType none"])
def test_settings_of_ssh_that_leave_no_stream_do_no_harm(site: Site, setting: str) -> None:
    site.write_config(setting)
    with pool(site.driver()) as p:
        assert where() >> p == str(site.hosts[0].home)


@pytest.mark.parametrize("way", ["exit 0", "exit 3", "nologin"])
def test_a_shell_that_runs_no_command_is_named_at_once(lab: Lab, tmp_path: Path, monkeypatch: Any, way: str) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    machine = lab.machine(keys=[lab.public_key], user="plain")
    machine.wait_booted()
    if way == "nologin":
        machine.run("usermod -s /usr/sbin/nologin plain")
        words = r"runs no commands.*This account is currently not available.*chsh"
    else:
        machine.run("chsh -s /bin/bash plain")
        machine.path("/home/plain/.bashrc").write_text(f"echo hello there\n{way}\n")
        words = r"runs no commands.*hello there.*~/\.bashrc"
    driver = SSH([Host(machine.address, user="plain", identity=str(lab.client_key), host_key=machine.host_key)])
    began = time.monotonic()
    with pytest.raises(ConnectionLost, match=rf"(?s)plain@{machine.address} accepts the login, but {words}"):
        pool(driver).start()
    assert time.monotonic() - began < 15
    with pytest.raises(ConnectionLost, match="accepts the login, but"):
        driver.instances()
    lost = Instance("ssh", f"plain@{machine.address}", "p", 0)
    with pytest.raises(StillRunning, match="accepts the login, but"):
        driver.terminate([lost])
    machine.destroy()


@pytest.mark.slow
def test_a_shell_that_prints_before_a_command_is_named(lab: Lab, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    machine = lab.machine(keys=[lab.public_key], user="plain")
    machine.wait_booted()
    machine.run("chsh -s /bin/bash plain")
    machine.path("/home/plain/.bashrc").write_text("echo hello there\n")
    driver = SSH([Host(machine.address, user="plain", identity=str(lab.client_key), host_key=machine.host_key)])
    began = time.monotonic()
    with pytest.raises(ConnectionLost, match=r"'hello there'.*prints before a command .*~/\.bashrc"):
        pool(driver).start()
    assert time.monotonic() - began < 15
    machine.path("/home/plain/.bashrc").write_text("")
    with pool(driver) as p:
        assert where() >> p == "/home/plain"
    machine.destroy()


# --- machines of their own -----------------------------------------------------------------------------------


def test_a_user_without_root_needs_none_and_changes_nothing_but_its_home(
    lab: Lab, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    machine = lab.machine(keys=[lab.public_key], user="plain")
    machine.wait_booted()
    machine.run("touch /tmp/before")
    before = set(machine.processes())
    host = Host(machine.address, user="plain", identity=str(lab.client_key), host_key=machine.host_key)
    with pool(SSH([host])) as p:
        assert where() >> p == "/home/plain"
    changed = "find / -xdev -newer /tmp/before -type f -not -path '/home/plain/*' -not -path '/proc/*'"
    ours = [line for line in machine.run(changed).stdout.split() if "/var/log" not in line]
    assert ours == []
    eventually(lambda: set(machine.processes()) <= before, 30, "the end of the connections")
    machine.destroy()


@pytest.mark.slow
def test_a_host_that_went_silent_is_named_in_time_and_ends_the_node_itself(
    lab: Lab, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    machine = lab.machine(keys=[lab.public_key])
    driver = SSH([Host(machine.address, user="root", identity=str(lab.client_key), host_key=machine.host_key)])
    p = pool(driver, lease=3, liveness=3).start()
    assert where() >> p == "/root"
    instances = driver.instances()
    machine.cut()
    began = time.monotonic()
    with pytest.raises(StillRunning, match="the agent there ends itself when its lease is over"):
        driver.terminate(instances)
    assert time.monotonic() - began < 15
    eventually(lambda: not list(machine.path("/root/.skypool/pools").glob("*.0")), 30, "the end of the lease")
    machine.mend()
    p.stop()
    machine.destroy()


@pytest.mark.slow
def test_a_host_whose_disk_is_full_says_so_and_is_as_it_was_when_it_has_room(
    lab: Lab, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    machine = lab.machine(keys=[lab.public_key])
    driver = SSH([Host(machine.address, user="root", identity=str(lab.client_key), host_key=machine.host_key)])
    machine.fill_disk()
    with pytest.raises(ConnectionLost, match=r"nothing can be written to /root/\.skypool: is its disk full\?"):
        driver.launch(*ordered(driver, (0,)))
    machine.free_disk()
    assert driver.instances() == []
    with pool(driver) as p:
        assert where() >> p == "/root"
    claim = machine.path("/root/.skypool/pools/crashed.0/claim")
    claim.parent.mkdir(parents=True)
    claim.touch()  # written just when its power was cut
    assert driver.instances() == []
    driver.terminate(driver.launch(*ordered(driver, (0,))))
    machine.destroy()


@pytest.mark.slow
def test_hosts_that_share_a_home_serve_a_pool_each_and_harm_none(lab: Lab, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    home = tmp_path / "home"
    home.mkdir()

    def share(machine: Machine) -> None:
        machine.path("/root/.skypool").mkdir()
        kernel.mount(home, machine.path("/root/.skypool"), flags=kernel.MS_BIND)

    machines = [lab.machine(keys=[lab.public_key], prepare=share) for _ in range(2)]
    hosts = [Host(m.address, user="root", identity=str(lab.client_key), host_key=m.host_key) for m in machines]
    with pool(SSH(hosts), nodes=2) as p:
        assert set(hostname() @ p) == {m.name for m in machines}
    one, other = SSH(hosts[:1]), SSH(hosts[1:])
    with pool(one, name="one", liveness=10) as p:
        with pool(other, name="other") as q:
            assert hostname() >> q == machines[1].name
            assert [each.pool for each in SSH(hosts).instances()] == ["one", "other"]
        machines[0].kill_sshd()
        machines[0].start_sshd()
        assert hostname() >> p == machines[0].name  # its agent can be found again
        with pytest.raises(LaunchError, match="it serves pool 'one'"):
            pool(one, name="third").start()
    assert sorted(each.name for each in home.glob("pools/*")) == ["lock"]
    for machine in machines:
        machine.destroy()


# --- the contract --------------------------------------------------------------------------------------------


class Hosts:
    """What is alive on the hosts, whatever the driver says."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def count(self) -> int:
        return sum(len(host.nodes()) for host in self._site.hosts)

    def kill(self, instance: Instance) -> None:
        for host in self._site.hosts:
            shutil.rmtree(host.home / f".skypool/pools/{instance.pool}.{instance.node}", ignore_errors=True)


@pytest.mark.slow
class TestSSH(DriverContract):
    @pytest.fixture
    def driver(self, site: Site) -> SSH:
        return site.driver(*[site.host(number) for number in range(3)])

    @pytest.fixture
    def control(self, site: Site) -> Hosts:
        return Hosts(site)
