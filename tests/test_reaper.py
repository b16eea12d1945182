"""Ending the rest: everything of a pool is ended and proved to be, here or by a process that outlives this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import ClassVar

import pytest

import skypool as sky
from skypool.errors import AccessError, CredentialsError, ErrorGroup, ProviderError
from skypool.model import Instance, Need, Order
from skypool.rental import reaper
from skypool.rental.ledger import Ledger
from skypool.rental.reaper import terminate_all
from skypool.rental.reaper_process import log_of, terminate_in_background
from skypool.testing import FakeCloud
from skypool.wire.keys import Keys
from tests.conftest import eventually, processes_of

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def cloud(tmp_path: Path) -> FakeCloud:
    """Its machines are names alone."""
    return FakeCloud(tmp_path / "cloud", machines=False, patience=0.2)


@pytest.fixture
def ledger() -> Ledger:
    def fail(text: str) -> None:
        raise AssertionError(text)

    return Ledger.here(fail)


def rent(cloud: FakeCloud, nodes: int = 2, pool: str = "p", ledger: Ledger | None = None) -> list[Instance]:
    """A pool as its client has it, one order a node."""
    offer = next(iter(cloud.offers(Need())))
    if ledger is not None:
        ledger.begin(pool, f"s-{pool}", lease=600, drivers=[cloud])
    launched: list[Instance] = []
    for node in range(nodes):
        token = f"s-{pool}-{node}"
        if ledger is not None:
            ledger.intend(f"s-{pool}", token, offer, (node,))
        until = datetime.now(UTC) + timedelta(seconds=600)
        made = cloud.launch(offer, Order(pool, token, (node,), Need(), until=until))
        if ledger is not None:
            ledger.rented(f"s-{pool}", token, made)
        launched += made
    return launched


# --- here ----------------------------------------------------------------------------------------------------


@pytest.mark.needs("openssh")
def test_all_of_a_pool_is_ended_and_nothing_of_another(cloud: FakeCloud, ledger: Ledger) -> None:
    rent(cloud, ledger=ledger)
    rent(cloud, 1, "other", ledger)
    assert Path(Keys.of("p").identity).exists()
    said: list[str] = []
    terminate_all([cloud], "p", ledger, "s-p", say=said.append)
    assert all("of pool other" in each for each in cloud.control.alive())
    assert cloud.count() == 3, "a machine, its key pair, its security group"
    one, other = ledger.pools()
    assert (one.state(time.time()), one.running, other.state(time.time())) == ("ended", (), "live")
    assert not Keys.of("p").folder.exists()
    assert any(each.startswith("fake: ends i-") for each in said)
    assert any(each.startswith("fake: removes key-pair skypool-p, security-group skypool-p") for each in said)
    terminate_all([cloud], "p", ledger, "s-p")


def test_it_works_without_a_ledger_and_where_there_is_nothing(cloud: FakeCloud) -> None:
    rent(cloud)
    terminate_all([cloud], "p")
    terminate_all([cloud], "never-was")
    assert cloud.count() == 0


def test_it_is_tried_again_until_it_is_proved(cloud: FakeCloud, ledger: Ledger) -> None:
    one, _ = rent(cloud, ledger=ledger)
    cloud.control.undying(one, times=5)
    cloud.control.throttle()
    cloud.control.lose_reply("delete")
    cloud.control.refuse(ProviderError, "remove")
    said: list[str] = []
    terminate_all([cloud], "p", ledger, "s-p", patience=30, say=said.append)
    assert cloud.count() == 0
    assert any("too many requests" in each and each.startswith("not yet: ") for each in said)
    assert ledger.pools()[0].state(time.time()) == "ended"


def test_what_cannot_be_ended_is_named_and_stays_on_record(cloud: FakeCloud, ledger: Ledger) -> None:
    one, two = rent(cloud, ledger=ledger)
    cloud.control.undying(one)
    with pytest.raises(sky.StillRunning, match=rf"'p': .* {one.id} ended:\n  fake: .*\n`skypool down p`") as caught:
        terminate_all([cloud], "p", ledger, "s-p", patience=0.5)
    assert [each.id for each in caught.value.instances if isinstance(each, Instance)] == [one.id]
    (record,) = ledger.pools()
    assert [each.id for each in record.running] == [one.id]
    assert [each.id for each in cloud.instances()] == [one.id] != [two.id]
    ledger.end("s-p", str(caught.value))
    assert ledger.pools()[0].state(time.time()) == "left"


def test_where_nobody_answers_the_machines_of_the_ledger_are_named(cloud: FakeCloud, ledger: Ledger) -> None:
    launched = rent(cloud, ledger=ledger)
    cloud.control.refuse(CredentialsError, "", times=None)
    began = time.monotonic()
    with pytest.raises(sky.StillRunning, match="the key is not known") as caught:
        terminate_all([cloud], "p", ledger, "s-p", patience=60)
    assert time.monotonic() - began < 30, "it does not pass by itself"
    assert isinstance(caught.value.__cause__, CredentialsError)
    assert {getattr(each, "id", "") for each in caught.value.instances} == {each.id for each in launched}


class Lagging(FakeCloud):
    """It has machines alone, and its lists lag behind: they begin to tell at some time."""

    leftovers = None  # type: ignore[assignment]
    tells: ClassVar[float] = 0.0

    def instances(self, *, pool: str | None = None) -> list[Instance]:
        return super().instances(pool=pool) if time.time() > self.tells else []


def test_a_machine_that_was_rented_just_now_and_is_not_listed_yet_is_waited_for_and_ended(
    cloud: FakeCloud, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client died right after the answer."""
    monkeypatch.setattr(reaper, "SETTLING", 6.0)
    rent(cloud, ledger=ledger)
    Lagging.tells = time.time() + 2.0
    terminate_all([Lagging(cloud.state, machines=False)], "p", ledger, "s-p")
    assert cloud.count("machine") == 0
    assert ledger.pools()[0].running == ()


def test_who_is_stubborn_waits_for_credentials_to_come_back(cloud: FakeCloud) -> None:
    rent(cloud)
    cloud.control.refuse(CredentialsError, "", times=2)
    terminate_all([cloud], "p", patience=30, stubborn=True)
    assert cloud.count() == 0


def test_a_provider_that_fails_keeps_no_other_from_its_turn(cloud: FakeCloud, tmp_path: Path, ledger: Ledger) -> None:
    other = FakeCloud(tmp_path / "other", machines=False)
    rent(other)
    rent(cloud, ledger=ledger)
    cloud.control.refuse(AccessError, "", times=None)
    with pytest.raises(sky.StillRunning):
        terminate_all([cloud, other], "p", ledger, "s-p", patience=1)
    assert (other.count(), cloud.count("machine")) == (0, 2)
    assert len(ledger.pools()[0].running) == 2, "both are called fake, and one of them proves nothing"


def test_what_is_left_beside_machines_is_told_apart(cloud: FakeCloud, ledger: Ledger) -> None:
    rent(cloud, ledger=ledger)
    cloud.control.refuse(AccessError, "remove", times=None)
    with pytest.raises(
        ErrorGroup, match="every machine of pool 'p' has ended, but other resources of the pool are left"
    ):
        terminate_all([cloud], "p", ledger, "s-p", patience=1)
    assert cloud.count("machine") == 0
    assert ledger.pools()[0].running == ()


def test_a_machine_that_turns_up_late_is_ended_too(
    cloud: FakeCloud, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client died between the order and its answer, and the cloud was slow."""
    monkeypatch.setattr(reaper, "SETTLING", 2.0)
    offer = next(iter(cloud.offers(Need())))
    ledger.begin("p", "s", lease=600, drivers=[cloud])
    ledger.intend("s", "s-0", offer, (0,))
    late = threading.Timer(1.0, cloud.launch, (offer, Order("p", "s-0", (0,), Need())))
    late.start()
    terminate_all([cloud], "p", ledger, "s")
    late.join()
    assert len(cloud.control.calls("create")) == 1
    assert cloud.count() == 0
    assert ledger.open_orders("s") == ()


# --- by a process of its own ---------------------------------------------------------------------------------

CLIENT = """
    import os, sys, time
    from skypool.errors import CredentialsError
    from skypool.rental.ledger import Ledger
    from skypool.model import Need, Order
    from skypool.rental.reaper_process import terminate_in_background
    from skypool.testing import FakeCloud

    class Mine(FakeCloud):
        "A driver of the user's own script."

    cloud = Mine(sys.argv[1], machines=False, key="hunter2-secret", patience=0.2)
    ledger = Ledger.here()
    ledger.begin("p", "s", lease=600, drivers=[cloud])
    offer = next(iter(cloud.offers(Need())))
    ledger.intend("s", "s-0", offer, (0, 1))
    ledger.rented("s", "s-0", cloud.launch(offer, Order("p", "s-0", (0, 1), Need())))
    cloud.control.refuse(CredentialsError, "describe", times=None)
    print(terminate_in_background([cloud], "p", "s"), flush=True)
    time.sleep(60)
"""


@pytest.fixture
def client(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """One that has handed its pool over, at a cloud that answers nobody; it has a process group of its own."""
    argv = [sys.executable, "-c", textwrap.dedent(CLIENT), str(tmp_path / "cloud")]
    process = subprocess.Popen(
        argv, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    yield process
    process.kill()
    process.communicate()
    eventually(lambda: not processes_of(str(tmp_path / "home")), 30, "the end of every process of this test")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_the_process_that_ends_a_pool_outlives_its_client(
    client: subprocess.Popen[str], tmp_path: Path, state: Path, number: signal.Signals
) -> None:
    assert client.stdout
    line = client.stdout.readline()
    assert line, client.communicate()[1]
    pid = int(line)
    cloud = FakeCloud(tmp_path / "cloud", machines=False, key="hunter2-secret")
    ledger = Ledger.here()
    (record,) = ledger.pools()
    assert (record.state(time.time()), record.client.pid) == ("ending", pid)
    os.killpg(client.pid, number)
    client.wait(10)
    assert cloud.control.count() == 2
    eventually(lambda: "not yet" in log_of("p", "s").read_text(), 30, "the first attempt")
    cloud.control.relent()
    eventually(lambda: ledger.pools()[0].ended is not None, 30, "the end of the pool")
    assert cloud.count() == 0
    eventually(lambda: "every machine of pool p has ended" in log_of("p", "s").read_text(), 30, "the last line")
    files = [each for each in state.rglob("*") if each.is_file()]
    assert b"hunter2" not in b"".join(each.read_bytes() for each in files)
    assert log_of("p", "s").stat().st_mode & 0o077 == 0


def test_a_hand_over_that_cannot_begin_says_so(cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(sky.SkypoolError, match=r"could not start.*`skypool down p`"):
        terminate_in_background([cloud], "p", "s")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(sky.SkypoolError, match=r"could not start \(.*see \S+/reaper/p-s.log\)"):
        terminate_in_background([cloud], "p", "s")


def test_it_is_handed_over_where_no_state_can_be_written(
    cloud: FakeCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rent(cloud)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    pid = terminate_in_background([cloud], "p", "s")
    eventually(lambda: cloud.count() == 0, 30, "the end of the pool")
    os.waitpid(pid, 0)


def test_logs_of_a_month_ago_go(cloud: FakeCloud) -> None:
    old = log_of("old", "s")
    old.parent.mkdir(parents=True)
    old.touch()
    os.utime(old, times=(then := time.time() - 32 * 86400, then))
    pid = terminate_in_background([cloud], "p", "s")
    os.waitpid(pid, 0)
    assert not old.exists()
    assert log_of("p", "s").exists()


def test_what_a_sitecustomize_prints_disturbs_neither_nodes_nor_the_process_that_ends_a_pool(tmp_path: Path) -> None:
    """On the client and on the node, which is this computer."""
    (tmp_path / "sitecustomize.py").write_text("print('printed by the site')\n")
    script = """
        import socket, sys, threading
        import skypool as sky
        from skypool.rental.reaper_process import terminate_in_background
        from skypool.testing import FakeCloud

        server = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=lambda: server.accept()[0].sendall(b"through a forward"), daemon=True).start()
        with sky.ComputePool(slots=1, console="off") as pool:
            print(sky.compute(abs)(-3) >> pool)
            with pool.forward(server.getsockname()[1]) as forward:
                print(socket.create_connection(("127.0.0.1", forward.port)).recv(100))
        print(terminate_in_background([FakeCloud(sys.argv[1], machines=False)], "p", "s") > 0)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "cloud")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "printed by the site\n3\nb'through a forward'\nTrue\n", done.stderr
    eventually(lambda: "has ended" in log_of("p", "s").read_text(), 30, "the end of the process")
