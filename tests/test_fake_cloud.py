"""FakeCloud: what it was told to do, and that its machines are real and end."""

from __future__ import annotations

import dataclasses
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool import events, processes
from skypool.agent.guard import Guard
from skypool.agent.shared_page import SharedPage
from skypool.drivers import registry
from skypool.errors import (
    CapacityError,
    CredentialsError,
    LaunchError,
    ProviderError,
    QuotaError,
    RateLimitError,
    StillRunning,
    UsageError,
)
from skypool.model import Instance, Need, Offer, Order
from skypool.testing import FakeCloud, Stock
from skypool.testing.state_store import Overtaken
from tests.conftest import eventually, processes_of
from tests.watched import Watched

ROOT = Path(__file__).parent.parent


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[FakeCloud]:
    with FakeCloud(tmp_path / "cloud", patience=0.2) as made:
        yield made
    eventually(lambda: not processes_of(str(tmp_path)), 30, "the end of all processes of the cloud")


@pytest.fixture
def names(tmp_path: Path) -> FakeCloud:
    """One whose machines are names alone."""
    return FakeCloud(tmp_path / "cloud", machines=False, patience=0.2)


def offer(cloud: FakeCloud, instance_type: str = "small", zone: str = "north-a", market: str = "on-demand") -> Offer:
    asked = instance_type, zone, market
    return next(o for o in cloud.offers(Need()) if (o.instance_type, o.zone, o.market) == asked)


def order(*nodes: int, **more: Any) -> Order:
    return replace(Order("p", "t", nodes or (0,), Need()), **more)


def launch(cloud: FakeCloud, *nodes: int, **more: Any) -> list[Instance]:
    return cloud.launch(offer(cloud), order(*nodes, **more))


# --- its machines --------------------------------------------------------------------------------------------


def home() -> str:
    return os.environ["HOME"]


def test_a_pool_runs_on_machines_that_have_what_was_bought(cloud: FakeCloud) -> None:
    with sky.ComputePool(cloud, accelerator="H100", nodes=2, console="off") as pool:
        assert pool.submit(home).result().startswith(str(cloud.state))
        [device] = pool.submit(sky.devices.detect).result()
        assert device.accelerator == sky.accelerators.H100(memory="80GB")
        assert cloud.control.alive("machine") == [f"machine i-000{n} of pool {pool.name}, running" for n in (1, 2)]
        assert cloud.count() == 4
    assert cloud.count("machine") == 0


def where() -> tuple[str, int]:
    return os.environ["WHERE"], len(sky.instance_info().accelerators)


def test_a_machine_has_no_variables_of_its_client_but_those_that_are_named(
    cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "sesame")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    monkeypatch.setenv("API_KEY", "open")
    monkeypatch.setenv("LC_TIME", "C")
    with Watched(cloud, image=sky.Image(secrets=["API_KEY"])) as pool:
        there = pool.submit(lambda: dict(os.environ)).result()
    assert (there["API_KEY"], there["LC_TIME"]) == ("open", "C")
    assert there["PATH"].endswith(os.environ["PATH"])
    assert there["HOME"].startswith(str(cloud.state))
    assert not there.keys() & {"AWS_SECRET_ACCESS_KEY", "XDG_CACHE_HOME", "PYTEST_CURRENT_TEST"}


def test_a_pool_waits_for_a_machine_that_boots(cloud: FakeCloud) -> None:
    cloud.control.next_machines(boots=60)
    pool = Watched(cloud)
    with ThreadPoolExecutor(1) as thread:
        starting = thread.submit(pool.start)
        eventually(lambda: "booting" in [each.phase for each in pool.heard(events.NodePhase)], 30, "the boot")
        time.sleep(1.0)
        assert not starting.done()
        assert [each.phase for each in pool.heard(events.NodePhase)] == ["launching", "booting"]
        cloud.clock.advance(60)
        starting.result(30)
    with pool:
        assert pool.submit(home).result().startswith(str(cloud.state))
        assert [each.call for each in cloud.control.calls()].count("create") == 1, "the machine was not replaced"


def test_an_image_is_made_on_a_machine_whose_accelerator_is_simulated(cloud: FakeCloud) -> None:
    image = sky.Image(env={"WHERE": "here"}, run=["true"])
    with sky.ComputePool(cloud, accelerator="H100", image=image, console="off") as pool:
        assert pool.submit(where).result() == ("here", 1)


def test_a_machine_with_other_devices_than_were_bought_gets_no_call(cloud: FakeCloud) -> None:
    cloud.control.next_machines(2, has="A100-80GB")
    with pytest.raises(sky.BootstrapError, match="H100-80GB was bought, and it has A100-80GB"):
        sky.ComputePool(cloud, accelerator="H100", console="off").start()
    assert cloud.count("machine") == 0


def test_a_machine_ends_itself_when_its_lease_is_over_and_nobody_looks(cloud: FakeCloud) -> None:
    [instance] = launch(cloud, lease=0.5)
    transport = cloud.access(instance).transport
    process = subprocess.Popen(transport.argv(["sh", "-c", "env -i sleep 60; true"]))
    assert process.wait(10) == -9
    assert subprocess.run(transport.argv(["true"]), stderr=subprocess.DEVNULL).returncode == 255


def test_a_machine_lives_on_while_its_client_does_and_ends_with_it(cloud: FakeCloud) -> None:
    code = f"""
        import sys, time
        import skypool as sky
        from skypool.testing import FakeCloud
        pool = sky.ComputePool(FakeCloud({str(cloud.state)!r}), lease=3, console="off").start()
        print(flush=True)
        time.sleep(60)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, cwd=ROOT) as client:
        assert client.stdout is not None
        client.stdout.readline()
        for _ in range(10):
            time.sleep(0.5)
            assert cloud.count("machine") == 1
        client.kill()
    eventually(lambda: cloud.count("machine") == 0, 30, "the end of the machine of a client that was killed")


def test_time_is_moved_by_tests_and_a_guard_that_hears_puts_the_end_off(names: FakeCloud) -> None:
    [instance] = launch(names, lease=600, lifetime=1500)
    assert instance.state == "running"
    names.clock.advance(500)
    folder = Path(str(names.state), "machines", instance.id)
    (folder / "lease").write_text("1 600")
    assert abs((names.clock.now() - datetime.now(UTC)).total_seconds() - 500) < 5
    names.clock.advance(550)
    assert names.count("machine") == 1
    (folder / "lease").write_text("2 600")
    names.clock.advance(460)  # the lifetime is over, whatever the guard heard
    assert names.count("machine") == 0
    assert names.control.usd() == pytest.approx(0.1 * 1510 / 3600, rel=0.01)


def test_a_machine_ends_at_its_written_end_or_at_once(cloud: FakeCloud) -> None:
    one, other = launch(cloud, 0, 1, lease=5000)
    guards = [Guard(cloud.access(each).guard, SharedPage(1)) for each in (one, other)]
    assert all(guard.give_end(1000, "ab" * 32) for guard in guards)
    assert not guards[0].give_end(900, "cd" * 32), "another heir"
    guards[0].ask_stop()  # the answer may be gone with the machine
    eventually(lambda: cloud.count("machine") == 1, 10, "the end of a machine that was stopped")
    cloud.clock.advance(900)
    assert cloud.count("machine") == 1
    cloud.clock.advance(101)
    assert cloud.count("machine") == 0


def test_machines_of_a_cloud_where_they_do_not_end_themselves_stay(tmp_path: Path) -> None:
    cloud = FakeCloud(tmp_path / "cloud", machines=False, ends_itself=False)
    launch(cloud)
    cloud.clock.advance(1e6)
    assert cloud.count("machine") == 1
    assert not cloud.abilities.ends_itself


def test_a_notice_is_heard_on_the_machine_before_it_is_taken_back(cloud: FakeCloud) -> None:
    [instance] = launch(cloud)
    access = cloud.access(instance)
    argv = access.transport.argv([sys.executable, "-c", access.watch])
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        cloud.control.interrupt(instance, notice=120)
        at = float(watch.stdout.readline())
    assert abs(at - datetime.now(UTC).timestamp() - 120) < 5
    assert cloud.count("machine") == 1
    cloud.clock.advance(120)
    assert cloud.instances(pool="p") == []


def test_machines_that_never_boot_or_never_answer_are_there_and_cost(cloud: FakeCloud) -> None:
    cloud.control.next_machines(boots=None)
    cloud.control.next_machines(deaf=True)
    cloud.control.next_machines(boots=60)
    machines = launch(cloud, 0, 1, 2)
    assert [each.state for each in machines] == ["starting", "running", "starting"]

    def answers() -> list[int]:
        doors = [cloud.access(each).transport.argv(["true"]) for each in machines]
        return [subprocess.run(door, stderr=subprocess.DEVNULL).returncode for door in doors]

    assert answers() == [255, 255, 255]
    cloud.clock.advance(60)
    assert [each.state for each in cloud.instances()] == ["starting", "running", "running"]
    assert answers() == [255, 255, 0]


# --- what it refuses -----------------------------------------------------------------------------------------


def test_it_sells_by_regions_without_zones(tmp_path: Path) -> None:
    stock = [Stock("gpu", usd, "H100", region=region, zone="") for region, usd in (("north", 2.0), ("south", 3.0))]
    cloud = FakeCloud(tmp_path / "cloud", stock, machines=False)
    north, south = sorted(cloud.offers(Need()), key=lambda each: each.usd_per_hour)
    cloud.control.stock_out(north)
    with pytest.raises(CapacityError, match="no gpu is left in north"):
        cloud.launch(north, order(0))
    assert len(cloud.launch(south, order(0))) == 1
    assert [each.available for each in cloud.offers(Need())] == [False, True]
    cloud.control.stock_out(south, left=1)
    with pytest.raises(CapacityError, match="no gpu is left in south"):
        cloud.launch(south, order(1))


def test_it_has_no_more_than_its_stock(tmp_path: Path) -> None:
    cloud = FakeCloud(tmp_path / "cloud", [Stock("gpu", 2.0, "H100", capacity=2)], machines=False)
    [sold] = cloud.offers(Need())
    assert sold.available
    assert len(cloud.launch(sold, order(0, 1, 2))) == 2
    assert not next(iter(cloud.offers(Need()))).available
    with pytest.raises(CapacityError, match="no gpu is left in north-a"):
        cloud.launch(sold, order(3, token="u"))
    cloud.terminate(cloud.instances())
    with pytest.raises(CapacityError):
        cloud.launch(sold, order(0, 1, 2, token="v", need=Need(private_network=True)))
    assert cloud.count("machine") == 0
    cloud.control.stock_out(sold)
    with pytest.raises(CapacityError):
        cloud.launch(sold, order(0, token="w"))


def test_each_refusal_has_its_code_text_and_advice_in_the_order_in_which_they_were_told(names: FakeCloud) -> None:
    names.control.refuse(QuotaError)
    names.control.refuse(CredentialsError, "describe")
    names.control.refuse(RuntimeError("broken"), zone="north-a")
    names.control.refuse(CapacityError, zone="south-a", times=None)
    with pytest.raises(QuotaError, match="ask for a higher limit") as refused:
        launch(names)
    assert (refused.value.provider, refused.value.code) == ("fake", "QuotaExceeded")
    with pytest.raises(RuntimeError, match="broken"):
        launch(names)
    with pytest.raises(CredentialsError):
        names.instances()
    for _ in range(2):
        with pytest.raises(CapacityError):
            names.launch(offer(names, zone="south-a"), order())
    assert len(launch(names)) == len(names.instances()) == 1
    names.control.throttle(retry_after=7)
    with pytest.raises(RateLimitError) as throttled:
        names.instances()
    assert throttled.value.retry_after == 7
    with pytest.raises(UsageError, match="did you mean create"):
        names.control.refuse(QuotaError, "creates")


def test_the_accounts_limit_covers_all_that_counts_toward_it(tmp_path: Path) -> None:
    stock = [Stock("gpu", zone=zone, quota="gpus") for zone in ("a", "b")]
    cloud = FakeCloud(tmp_path / "cloud", stock, machines=False)
    cloud.control.limit("gpus", 1)
    first, second = cloud.offers(Need())
    cloud.launch(first, order())
    with pytest.raises(QuotaError, match="at most 1 machines of the quota 'gpus'"):
        cloud.launch(second, order(token="u"))
    assert [finding.good for finding in cloud.check()] == [True, True, True]


def test_another_key_is_refused(names: FakeCloud, tmp_path: Path) -> None:
    cloud = FakeCloud(tmp_path / "locked", key="right", machines=False)
    assert "right" not in repr(cloud)
    launch(cloud)
    wrong = replace(cloud, key="wrong")
    with pytest.raises(CredentialsError, match="SKYPOOL_FAKE_KEY"):
        wrong.instances()
    assert [finding.good for finding in wrong.check()] == [False]


def test_failover_takes_the_next_zone(names: FakeCloud) -> None:
    names.control.refuse(CapacityError, times=None, instance_type="small")
    with pytest.raises(LaunchError, match="OutOfStock"):
        sky.ComputePool(names, console="off", max_usd_per_hour=1).start()
    assert len(names.control.calls("create")) == 3


# --- replies that are lost, and machines that do not end -----------------------------------------------------


def test_a_lost_reply_leaves_a_machine_that_the_same_token_finds_again(names: FakeCloud) -> None:
    names.control.lose_reply()
    with pytest.raises(ProviderError, match="did not answer the call 'create'") as lost:
        launch(names, 0, 1)
    assert isinstance(lost.value.__cause__, ConnectionResetError)
    assert names.count("machine") == 1
    assert [each.id for each in launch(names, 0, 1)] == ["i-0001", "i-0002"]
    assert names.count("machine") == 2
    names.terminate(names.instances())
    with pytest.raises(ProviderError, match="has ended"):
        launch(names)


def test_a_machine_that_does_not_end_is_told_of_until_it_does(names: FakeCloud) -> None:
    names.control.next_machines(undying=None)
    stubborn, other = launch(names, 0, 1)
    with pytest.raises(StillRunning, match="i-0001") as left:
        names.terminate([stubborn, other])
    assert [each.id for each in names.instances()] == ["i-0001"]
    assert left.value.instances == (stubborn,)
    assert names.instances()[0].state == "ending"
    names.control.undying(stubborn, times=2)
    patient = dataclasses.replace(names, patience=30.0)
    patient.terminate([stubborn, other])
    assert names.count("machine") == 0
    names.terminate([stubborn, other])


def test_leftovers_stay_until_they_are_tidied_which_a_machine_that_uses_them_hinders(names: FakeCloud) -> None:
    until = datetime.now(UTC) + timedelta(seconds=60)
    launch(names, until=until)
    names.launch(offer(names), order(pool="q", token="u"))
    left = names.leftovers(pool="p")
    assert {(each.kind, each.until) for each in left} == {("key-pair", until), ("security-group", until)}
    with pytest.raises(ProviderError, match=r"machines use it: i-0001 \(InUse\)"):
        names.tidy(left)
    later = until + timedelta(seconds=60)
    names.renew("p", later)
    assert [each.until for each in names.instances(pool="p")] == [later]
    assert [(each.kind, each.until) for each in names.leftovers(pool="p")] == [("security-group", later)]
    names.terminate(names.instances())
    names.tidy(names.leftovers())
    names.tidy(left)
    assert names.count() == 0


# --- a cloud outlives its clients ----------------------------------------------------------------------------

CLIENT = """
    import sys
    from skypool.model import Need, Order
    from skypool.testing import FakeCloud
    cloud = FakeCloud(sys.argv[1])
    offer = next(iter(cloud.offers(Need())))
    cloud.launch(offer, Order("p", "t", (0, 1), Need()))
"""


@pytest.mark.parametrize(
    ("number", "when", "left"), [(4, "before", 0), (4, "after", 1), (5, "before", 1), (9, "after", 2)]
)
def test_a_client_is_killed_at_the_call_it_was_to_be_killed_at(
    names: FakeCloud, number: int, when: Any, left: int
) -> None:
    names.control.kill_client(number, when)
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(CLIENT), str(names.state)], cwd=ROOT)
    assert done.returncode == (0 if number == 9 else -9)
    assert names.count("machine") == left
    calls = [(each.call, each.about.get("node")) for each in names.control.calls()]
    assert calls == [("stock", None), ("make", None), ("make", None), ("create", 0), ("create", 1)][:number]
    assert all(each.pid != os.getpid() for each in names.control.calls())


STOPPED = """
    import os, signal, sys
    from skypool.model import Need, Order
    from skypool.testing import FakeCloud, machine
    create, was_stopped = machine.create, []

    def create_and_stop(folder):
        create(folder)
        if not was_stopped:
            was_stopped.append(folder)
            os.kill(os.getpid(), signal.SIGSTOP)

    machine.create = create_and_stop
    cloud = FakeCloud(sys.argv[1], machines=False)
    offer = next(iter(cloud.offers(Need())))
    print(*(each.id for each in cloud.launch(offer, Order("stopped", "t", (0, 1), Need()))))
"""


def test_a_client_that_is_stopped_while_it_changes_the_cloud_stops_nobody_else(names: FakeCloud) -> None:
    argv = [sys.executable, "-c", textwrap.dedent(STOPPED), str(names.state)]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as client:
        try:
            eventually(lambda: processes.is_stopped(client.pid), 30, "the stop of the client")
            mine = [each.id for each in launch(names, 0, 1, 2, token="other")]
            assert names.count("machine") == 3
        finally:
            client.send_signal(signal.SIGCONT)
        theirs = client.communicate(timeout=60)[0].split()
    assert client.returncode == 0
    assert len({*mine, *theirs}) == 5
    assert sorted(each.id for each in names.instances()) == sorted([*mine, *theirs])


def test_what_a_process_changes_by_hand_while_it_is_stopped_is_refused(names: FakeCloud) -> None:
    ours, other = names.control.state, subprocess.Popen(["sleep", "60"])
    try:
        with pytest.raises(Overtaken, match="was stopped while it changed the fake cloud"):
            with ours.open() as world:
                other.send_signal(signal.SIGSTOP)  # stands for this process, which goes on
                eventually(lambda: processes.is_stopped(other.pid))
                next((names.control.state.folder).glob("lock.*")).write_text(f"{other.pid}")
                names.control.limit("gpus", 3)
                world.limits["gpus"] = 5
    finally:
        other.kill()
        other.wait()
    assert [(each.what, each.text) for each in names.check()] == [
        ("credentials", "the key is known"),
        ("quota gpus", "at most 3"),
        ("price list", "all on-demand prices are those of the list"),
    ]


@pytest.mark.serial
def test_a_machine_costs_no_more_time_where_there_are_many(names: FakeCloud) -> None:
    def seconds(first: int, count: int) -> float:
        began = time.process_time()
        launch(names, *range(first, first + count))
        return time.process_time() - began

    alone = seconds(0, 100)
    seconds(100, 900)
    assert seconds(1000, 100) < 8 * alone  # 4 as it is; 11 if each call wrote down all machines
    assert len(names.instances()) == 1100


def test_it_is_found_by_name_where_a_variable_says_so_and_travels_to_other_processes(
    names: FakeCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(names)
    assert pickle.loads(pickle.dumps(names)).instances() == names.instances()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    usual = registry.driver("fake")
    assert isinstance(usual, FakeCloud)
    assert usual.state == str(tmp_path / "state" / "skypool" / "fake-cloud")
    assert usual.instances() == []
    monkeypatch.setenv("SKYPOOL_FAKE_CLOUD", str(names.state))
    assert registry.driver("fake").instances() == names.instances()
    assert "fake" not in registry.providers()


@pytest.mark.parametrize(
    ("say", "words"),
    [
        (lambda control: control.refuse("CapacityError"), r"refuse\(\) takes .* such as skypool.errors.Cap"),
        (lambda control: control.refuse(CapacityError, "craete"), "no call 'craete'; did you mean create"),
        (lambda control: control.refuse(CapacityError, times=0), r"times \(how many .*\) must be at least 1, not 0"),
        (lambda control: control.delay("3"), r"seconds \(how much longer a call takes\) must be a number, not '3'"),
        (lambda control: control.limit("gpu", "3"), r"most \(.*\) must be a whole number, not '3'"),
        (lambda control: control.kill_client(0, "before"), r"number \(the number of .*\) must be at least 1"),
        (lambda control: control.kill_client(1, "befor"), "not 'befor'; did you mean 'before'"),
    ],
)  # fmt: skip
def test_what_a_control_cannot_do_is_refused_where_it_is_said(cloud: FakeCloud, say: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        say(cloud.control)
