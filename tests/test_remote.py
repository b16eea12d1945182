"""Pools on machines that are really booted, reached by real ssh, and really broken."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool import events
from tests.lab import examples
from tests.lab.machines import Lab, Machine
from tests.lab.work import count_up, hostname, long, note, sum_of_all

ROOT = Path(__file__).parent.parent
LIVENESS = 5.0


def soon(check: Any, within: float = 30.0, what: str = "it") -> None:
    until = time.monotonic() + within
    while not check():
        assert time.monotonic() < until, f"{what} did not happen within {within} s"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> Path:
    key = tmp_path_factory.mktemp("keys") / "id"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    return key


class Fleet:
    """Some machines, and the provider that reaches them."""

    def __init__(self, lab: Lab, identity: Path, count: int) -> None:
        key = Path(f"{identity}.pub").read_text()
        with ThreadPoolExecutor(count) as boot:
            self.machines = list(boot.map(lambda _: lab.machine(keys=[key]), range(count)))
        self._identity = identity

    def provider(self, machines: Sequence[Machine] = ()) -> Any:
        hosts = [sky.Host(m.address, host_key=m.host_key) for m in machines or self.machines]
        return sky.SSH(hosts=hosts, user="root", identity=str(self._identity))

    def of(self, node: int, pool: sky.ComputePool) -> Machine:
        """The machine of a node: the one with the name that the node says."""
        name = pool.send(hostname(), node=node).result(30)
        return next(machine for machine in self.machines if machine.name == name)

    def agents(self) -> dict[str, list[str]]:
        """What of ours runs there, by machine."""
        return {m.name: [p for p in m.processes().values() if "skypool" in p] for m in self.machines}


@pytest.fixture(scope="module")
def four(lab: Lab, identity: Path) -> Iterator[Fleet]:
    fleet = Fleet(lab, identity, 4)
    yield fleet
    for machine in fleet.machines:
        machine.destroy()


@pytest.fixture
def two(lab: Lab, identity: Path) -> Iterator[Fleet]:
    fleet = Fleet(lab, identity, 2)
    yield fleet
    for machine in fleet.machines:
        machine.destroy()


def heard(pool: sky.ComputePool) -> list[events.Event]:
    told: list[events.Event] = []
    pool.events.listen(told.append)
    return told


def ran(fleet: Fleet) -> list[int]:
    lines = [m.path("/root/ran").read_text().split() for m in fleet.machines if m.path("/root/ran").exists()]
    return sorted(int(line) for each in lines for line in each)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_link_cut_for_a_minute_costs_no_result_and_no_error(four: Fleet) -> None:
    """1,000 calls and a stream on four machines: every result once and in order, and the user sees nothing of it."""
    pool = sky.ComputePool(four.provider(), nodes=4, slots=2, console="off")
    told = heard(pool)
    with pool:
        items: list[int] = []
        stream: Any = count_up(1500) >> pool
        with ThreadPoolExecutor(1) as reader:
            reading = reader.submit(items.extend, stream)
            results = pool.map(note, range(1000))
            first = [next(results) for _ in range(100)]
            for machine in four.machines:
                machine.cut()
            time.sleep(60)  # not for luck: this long it is cut
            for machine in four.machines:
                machine.mend()
            rest = list(results)
            reading.result(60)
        assert [*first, *rest] == [n * n for n in range(1000)]
        assert items == list(range(1500))
    assert ran(four) == list(range(1000))
    assert any(isinstance(e, events.LinkDown) for e in told)
    assert any(isinstance(e, events.LinkUp) for e in told)
    assert not [e for e in told if isinstance(e, (events.CallFailed, events.CallRetried))]
    assert not any(four.agents().values())


def lost_and_run_again(fleet: Fleet, pool: sky.ComputePool, strike: Any) -> Machine:
    """Strike the machine under one of two long calls, first without retries and then with one.

    Returns:
        the machine that was struck.
    """
    victim = fleet.of(0, pool)
    doomed = pool.send(long(30), node=0)
    other = pool.send(long(3), node=1)
    again = [long.with_options(retries=1)(3.0) > pool for _ in range(2)]  # one more on each machine
    time.sleep(0.3)
    began = time.monotonic()
    strike(victim)
    with pytest.raises(sky.ConnectionLost, match=r"long was lost with node 0"):
        doomed.result(60)
    assert time.monotonic() - began < LIVENESS + 15
    name = other.result(60)
    assert name != victim.name
    assert {future.result(60) for future in again} == {name}
    assert (long(0) >> pool) == name
    return victim


@pytest.mark.slow
def test_a_machine_killed_under_its_calls_loses_only_these(two: Fleet) -> None:
    with sky.ComputePool(two.provider(), nodes=2, slots=2, liveness=LIVENESS, console="off") as pool:
        told = heard(pool)
        victim = lost_and_run_again(two, pool, Machine.kill)
        assert [e.node for e in told if isinstance(e, events.CallRetried)] == [0]
        victim.reap()
        victim.boot()
        victim.wait_for_ssh()  # the pool's end is proved on it, too


@pytest.mark.slow
def test_a_pool_that_goes_on_without_a_host_of_ones_own_ends_well(two: Fleet) -> None:
    """The host costs nothing and what may be left there ends with its lease: a notice says so, and no error."""
    with sky.ComputePool(two.provider(), nodes=1, slots=1, liveness=LIVENESS, console="off") as pool:
        told = heard(pool)
        victim = two.of(0, pool)
        doomed = long(30) > pool
        victim.cut()
        with pytest.raises(sky.ConnectionLost):
            doomed.result(60)
        soon(lambda: "ready" in pool.nodes.values(), 60, "a node on the other host")
        assert (long(0) >> pool) != victim.name
    assert pool.phase == "ended"
    assert any("cannot be ended from here" in e.text for e in told if isinstance(e, events.Notice))
    victim.mend()


@pytest.mark.parametrize(
    ("strike", "heal"),
    [(Machine.freeze, Machine.thaw), pytest.param(Machine.cut, Machine.mend, marks=pytest.mark.slow)],
)
@pytest.mark.slow
def test_a_machine_that_comes_back_too_late_is_told_to_end(two: Fleet, strike: Any, heal: Any) -> None:
    with sky.ComputePool(two.provider(), nodes=2, slots=2, liveness=LIVENESS, console="off") as pool:
        victim = lost_and_run_again(two, pool, strike)
        heal(victim)
        soon(lambda: not two.agents()[victim.name], what="the end of the agent that came back")
        assert (long(0) >> pool) != victim.name


def test_a_secret_is_found_nowhere_but_in_the_call(two: Fleet, tmp_path: Path) -> None:
    secret = "s3cr3t-" + os.urandom(8).hex()
    image = sky.Image(secrets={"TOKEN": secret}, env={"PLAIN": "yes"}, run=["true"], files={"a.txt": b"a"})

    @sky.compute
    def length() -> int:
        print("the call runs")
        return len(os.environ["TOKEN"])

    machine = two.machines[0]
    with sky.ComputePool(two.provider([machine]), image=image, console="off") as pool:
        assert length() >> pool == len(secret)
        assert secret not in repr(pool) + repr(image) + image.script() + image.to_toml() + image.to_json()
        folders = "/root /home /tmp /var /etc /run /opt /usr/local /srv /dev/shm"
        found = machine.run(f"grep -rIl {secret} {folders} 2> /dev/null", check=False).stdout
        assert found == ""
        seen = machine.run("ps -efww; cat /proc/[0-9]*/cmdline | tr '\\0' ' '", check=False).stdout
        assert "skypool" in seen
        assert secret not in seen
        here = subprocess.run(["ps", "-ef"], capture_output=True, text=True, check=True).stdout
        assert secret not in here
        assert secret not in machine.console()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", examples.SOME_LATER)
def test_the_examples_run_unchanged(name: str, four: Fleet, identity: Path) -> None:
    hosts = ", ".join(f"sky.Host({each.address!r}, host_key={each.host_key!r})" for each in four.machines)
    driver = f"sky.SSH(hosts=[{hosts}], user='root', identity={str(identity)!r})"
    examples.run(name, driver, {}, 'sky.Image(pip=["numpy"], apt=["jq"])')
    assert not any(four.agents().values())


@pytest.mark.slow
def test_nodes_that_run_one_call_together_find_each_other(four: Fleet) -> None:
    """Each listens on its own machine, in a network namespace of its own; nobody told them where the others are."""
    with sky.ComputePool(four.provider(), nodes=4, slots=1, console="off") as pool:
        told = sum_of_all.with_options(timeout=60)(1.5) @ pool
    assert [total for total, _ in told] == [6.0] * 4
    assert {address for _, address in told} == {machine.address for machine in four.machines}
