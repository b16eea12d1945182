"""A pool without an account of a provider: it has nodes that another process has rented, and can rent no others.

It lives in a process in which the libraries of the clouds cannot be imported, with a ledger of its own, as on another
machine. It gets its nodes by a hand-over record. Nodes are machines of a fake cloud that cost something, or of the lab.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool.errors import TakenOver
from skypool.event_loop import Loop
from skypool.rental import reaper
from skypool.rental.handover import Handover
from skypool.rental.ledger import Ledger
from skypool.testing import FakeCloud, Stock
from tests.conftest import eventually
from tests.lab.machines import Lab

LEASE = 30.0
PROGRAM = """
    import importlib.abc, json, os, pickle, signal, sys, time

    BARRED = {"boto3", "botocore", "google", "requests"}

    class Bar(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in BARRED:
                raise ImportError(f"{name} cannot be imported here")

    sys.meta_path.insert(0, Bar())
    import skypool as sky

    RECORD, PLACE, OPTIONS = sys.argv[1:]
    with open(RECORD, "rb") as file:
        handover = pickle.load(file)

    def say(**what):
        print(json.dumps(what), flush=True)

    def caught(work, *args, **more):
        try:
            work(*args, **more)
        except BaseException as e:
            return [type(e).__name__, str(e)]

    def there(name):
        return os.path.exists(f"{PLACE}/{name}")

    @sky.compute
    def node():
        return sky.instance_info().node

    @sky.compute
    def until(name):
        open(f"{PLACE}/{name}-began", "w").close()
        while not there(name):
            time.sleep(0.01)
        return sky.instance_info().node

    @sky.compute(retries=1)
    def dies_once():
        if not there("died"):
            open(f"{PLACE}/died", "w").close()
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)
        return sky.instance_info().node

    @sky.compute(procs=1)
    def rank():
        return [sky.instance_info().rank, sky.instance_info().world_size]

    notices = []
    pool = sky.ComputePool._held(handover, console="off", **json.loads(OPTIONS))
    pool.events.listen(lambda event: notices.append(getattr(event, "text", "")))
"""


class Given:
    """A pool whose owner has made the record of it, and has given it up."""

    def __init__(self, provider: Any, place: Path, nodes: int, **options: Any) -> None:
        self.provider = provider
        self.place = place
        pool = sky.ComputePool(
            provider, nodes=nodes, name="given", lease=LEASE, slots=1, console="off", **options
        ).start()
        self.handover: Handover = pool._handed_over()
        (place / "record").write_bytes(pickle.dumps(self.handover))
        engine: Any = pool._engine
        Loop.shared().run(engine.takeover.hand_over(TakenOver("it was handed over")))
        pool.stop()

    def run(self, then: str, **options: Any) -> subprocess.Popen[str]:
        """Run a program that owns the pool, on a computer with a ledger of its own."""
        code = textwrap.dedent(PROGRAM) + textwrap.dedent(then)
        return subprocess.Popen(
            [sys.executable, "-c", code, str(self.place / "record"), str(self.place), json.dumps(options)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "XDG_STATE_HOME": str(self.place / "elsewhere")},
        )

    def said(self, then: str, **options: Any) -> list[dict[str, Any]]:
        """Run a program to its end. Return what it has said."""
        with self.run(then, **options) as process:
            out, _ = process.communicate(timeout=120)
        assert process.returncode == 0, out
        return [json.loads(line) for line in out.splitlines()]

    @property
    def machines(self) -> list[int]:
        return sorted(each.node for each in self.provider.instances(pool="given") if each.state != "ended")


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCloud]:
    monkeypatch.setattr(reaper, "SETTLING", 0.5)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with FakeCloud(tmp_path / "cloud", [Stock(usd_per_hour=36.0)]) as cloud:
        yield cloud
        reaper.terminate_all([cloud], "given", Ledger.here())  # as `skypool down` does, where the credentials are
        assert cloud.count() == 0


def test_it_runs_calls_and_gangs_and_a_retry_after_the_loss_of_a_node_and_refuses_to_rent(
    cloud: FakeCloud, tmp_path: Path
) -> None:
    given = Given(cloud, tmp_path, nodes=3)
    said = given.said("""
        with pool:
            say(calls=node() @ pool, gang=rank() @ pool, budget=pool.receipt.usd_per_hour)
            say(grow=caught(pool.resize, 4), range=caught(pool.resize, (1, 9)))
            running = until("go").with_options(node=2) > pool
            while not there("go-began"):
                time.sleep(0.01)
            pool.retire(2)
            open(f"{PLACE}/go", "w").close()
            say(drained=running.result(60))
            while pool.nodes[2] != "ended":
                time.sleep(0.01)
            say(again=dies_once() >> pool[0:2])
            while "ready" in pool.nodes.values() and len([w for w in pool.nodes.values() if w == "ended"]) < 2:
                time.sleep(0.01)
            left = [number for number, word in pool.nodes.items() if word == "ready"]
            say(left=left, told=[each for each in notices if "cannot replace" in each])
            say(waits=caught(pool.wait_ready), gang=caught(lambda: rank() @ pool), smaller=caught(pool.resize, 1))
            say(calls=node() @ pool, plan=pool.explain())
            state = [(each.node, each.ended) for each in pool.receipt.lines]
        say(lines=state, proof=[each for each in notices if "skypool down" in each])
        say(imported=sorted(BARRED & sys.modules.keys()))
    """)
    first, refused, drained, again, left, short, last, end, imported = said
    assert first == {"calls": [0, 1, 2], "gang": [[0, 3], [1, 3], [2, 3]], "budget": 108.0}
    for kind, text in (refused["grow"], refused["range"]):
        assert kind == "NoSupply"
        assert "no account of a provider" in text
        assert "ComputePool.attach('given')" in text
    assert drained == {"drained": 2}
    assert left["left"] == [again["again"]]
    assert len(left["told"]) == 1
    assert short["waits"][0] == "LaunchError"
    assert "no account of a provider" in short["waits"][1]
    assert "resize(2) tries again" not in short["waits"][1]
    assert last["calls"] == [0]  # the number among the nodes of the call
    assert last["plan"] == "pool 'given' makes no plan, as it has no account of a provider"
    assert [ended for _, ended in end["lines"]] == [False] * 3, "no end is proved, so the account goes on"
    assert len(end["proof"]) == 1
    assert imported == {"imported": []}
    cloud.control.advance(0.0)
    [lost] = {0, 1} - {*left["left"]}
    eventually(lambda: given.machines in ([], [lost]), 30, "the end of machines whose agents were told")
    cloud.control.advance(LEASE + 5)
    assert given.machines == [], "and by its lease the end of the one whose agent died"


def test_its_budget_ends_it_at_the_last_known_prices(cloud: FakeCloud, tmp_path: Path) -> None:
    given = Given(cloud, tmp_path, nodes=1)
    said = given.said(
        """
        with pool:
            call = until("never") > pool
            say(error=caught(call.result, 60), left=pool.receipt.usd > 0.05)
    """,
        budget=0.08,
    )
    [told] = said
    assert told["error"][0] == "BudgetExceeded"
    assert told["left"]
    eventually(lambda: given.machines == [], 30, "the end of the machine by its agent")


@pytest.mark.lab
def test_machines_over_ssh_run_calls_and_gangs_and_are_left_by_all_processes(lab: Lab, tmp_path: Path) -> None:
    machines = [lab.machine(keys=[lab.public_key]) for _ in range(3)]
    for each in machines:
        each.wait_for_ssh()
    hosts = [sky.Host(each.address, host_key=each.host_key) for each in machines]
    before = [set(each.processes().values()) for each in machines]
    ssh = sky.SSH(hosts=hosts, user="root", identity=str(lab.client_key))
    said = Given(ssh, tmp_path, nodes=3).said("""
        with pool:
            say(calls=node() @ pool, gang=rank() @ pool, grow=caught(pool.resize, 4))
            pool.retire(2)
            while pool.nodes[2] != "ended":
                time.sleep(0.01)
            killed = sky.compute(lambda: os.kill(os.getppid(), signal.SIGKILL) or time.sleep(60))
            say(lost=caught(lambda: killed().with_options(node=0) >> pool), again=sky.compute(abs)(-1) >> pool)
            say(left=[number for number, word in pool.nodes.items() if word == "ready"])
        say(imported=sorted(BARRED & sys.modules.keys()))
    """)
    first, lost, left, imported = said
    assert first["calls"] == [0, 1, 2]
    assert first["gang"] == [[0, 3], [1, 3], [2, 3]]
    assert first["grow"][0] == "NoSupply"
    assert lost["again"] == 1
    assert 2 not in left["left"]
    assert imported == {"imported": []}
    eventually(lambda: [set(each.processes().values()) for each in machines] == before, 60, "the end of all processes")
    for each in machines:
        each.destroy()
