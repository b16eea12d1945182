"""What receipts say against what the simulated cloud bills, in random worlds and in some of them by name."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

import skypool as sky
from skypool import clock
from skypool.errors import QuotaError
from skypool.model import Instance, Offer, Order
from skypool.rental import gc, reaper
from skypool.rental import supply as supply_module
from skypool.rental.ledger import Ledger
from skypool.rental.ledger_file import LedgerFile
from skypool.rental.supply import Supply
from skypool.testing import FakeCloud, Stock
from tests.bill import bill
from tests.conftest import eventually
from tests.soak import _living, bills
from tests.supplies import supply_of, tend


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_receipts_of_a_hundred_worlds_are_what_their_cloud_bills() -> None:
    happened, faults = bills.run(100, seed=1)
    assert faults == {}
    wanted = "lost", "throttled delete", "launched too few", "queued", "never runs", "died silently", "undying"
    assert all(happened[each] for each in wanted), happened
    assert happened["machines"] > 300


@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of logs that are broken
def test_a_hundred_pools_cost_nothing_after_their_promised_end() -> None:
    happened, faults, late = _living.run(100, seed=1)
    assert faults == {}
    wanted = ["end: planned", "end: collected", "unread", "broken off", "error", "name", "program", "death"]
    wanted += ["watcher raises", "watcher hangs", "watcher full", "end: interrupted"]
    assert all(happened[each] for each in wanted), happened
    assert len(late) == 100


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(reaper, "SETTLING", 0.0)


def rented(
    cloud: FakeCloud,
    monkeypatch: pytest.MonkeyPatch,
    *,
    nodes: int = 1,
    stopping: threading.Event | None = None,
    **more: object,
) -> Supply:
    """A pool's rental on a cloud whose clock is that of money."""
    monkeypatch.setattr(clock, "now", lambda: cloud.clock.now().timestamp())
    pool = sky.ComputePool(cloud, nodes=nodes, name="p", console="off", **more)  # type: ignore[arg-type]
    supply = supply_of(pool, stopping)
    asyncio.run(supply.look())
    supply.begin()
    return supply


def rent(supply: Supply, *nodes: int) -> list[Instance]:
    async def pause(seconds: float) -> None: ...

    return list(asyncio.run(supply.rent(nodes, None, pause)).instances)


def test_the_ends_of_many_machines_are_as_few_writes_as_that_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write waits for the disk, some 4 ms. One for each of a thousand machines made a pool take twice as long."""
    commits = 0
    write = LedgerFile.write

    def counted(file: LedgerFile, *args: Any, **more: Any) -> Any:
        nonlocal commits
        commits += 1
        return write(file, *args, **more)

    def writes(nodes: int) -> int:
        nonlocal commits
        folder = tmp_path / str(nodes)
        cloud = FakeCloud(folder, [Stock(capacity=nodes)], machines=False, billing="running")
        supply = rented(cloud, monkeypatch, nodes=nodes)
        there = rent(supply, *range(nodes))
        cloud.control.advance(60.0)
        commits = 0
        assert not supply.terminate(there, silent=dict.fromkeys(range(0, nodes, 2), 10.0))
        done = commits
        assert [line.ended for line in supply.rental.receipt.lines] == [True] * nodes
        assert all(line.billed_from is not None for line in supply.rental.receipt.lines)
        supply.close(None, proved=True)
        return done

    monkeypatch.setattr(LedgerFile, "write", counted)
    assert writes(1) == writes(40)


def test_after_a_shortage_only_a_machine_whose_end_is_not_proved_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that were ended must not be taken for nodes of the pool."""
    cloud = FakeCloud(tmp_path / "cloud", [Stock(capacity=2)], machines=False, patience=0.0)
    supply = rented(cloud, monkeypatch, nodes=3, wait=60.0)
    cloud.control.next_machines(undying=None)
    there = rent(supply, 0, 1, 2)
    assert [each.node for each in there] == [0]
    assert [line.ended for line in supply.rental.receipt.lines] == [False, True]


def test_a_machine_that_never_runs_costs_nothing_where_its_cloud_bills_from_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud = FakeCloud(tmp_path / "cloud", [Stock(usd_per_hour=346.0)], machines=False, billing="running")
    supply = rented(cloud, monkeypatch)
    cloud.control.next_machines(boots=None)
    there = rent(supply, 0)
    cloud.control.advance(1800.0)
    assert (supply.rental.receipt.usd, supply.rental.receipt.usd_per_hour) == (0.0, 0.0)
    assert not supply.terminate(there)
    assert [(line.usd, line.ended) for line in supply.rental.receipt.lines] == [(0.0, True)]


def test_a_machine_that_waited_is_charged_from_when_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = [Stock(usd_per_hour=3600.0)]
    cloud = FakeCloud(tmp_path / "cloud", stock, machines=False, ends_itself=False, billing="running")
    supply = rented(cloud, monkeypatch)
    cloud.control.next_machines(boots=600.0)
    there = rent(supply, 0)
    cloud.control.advance(600.5)
    supply.runs(cloud.instances(pool="p")[0])
    cloud.control.advance(100.0)
    assert not supply.terminate(there)
    assert supply.rental.receipt.usd == pytest.approx(100.5, abs=1.0)


def test_a_machine_of_a_launch_that_was_undone_has_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cloud = FakeCloud(
        tmp_path / "cloud", [Stock(capacity=2, least_billed=60.0)], machines=False, ends_itself=False, patience=0.0
    )
    supply = rented(cloud, monkeypatch, nodes=3, private_network=True)
    cloud.control.throttle(times=1, retry_after=0.01, call="delete")
    assert rent(supply, 0, 1, 2) == []
    items = bill(tmp_path / "cloud" / "events", clock.now())
    assert len(items) == 2
    assert {line.id: line.usd for line in supply.rental.receipt.lines} == {
        name: pytest.approx(item.usd, abs=1 / 3600) for name, item in items.items()
    }
    assert cloud.count("machine") == 0


def test_a_machine_that_dies_silently_is_charged_until_it_was_heard_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud = FakeCloud(tmp_path / "cloud", [Stock(usd_per_hour=3600.0)], machines=False)
    supply = rented(cloud, monkeypatch)
    there = rent(supply, 0)
    cloud.control.advance(100.0)
    cloud.control.kill(there[0])
    cloud.control.advance(91.0)
    assert not supply.terminate(there, {0: 91.0})
    assert supply.rental.receipt.usd == pytest.approx(100.0, abs=1.0)


def test_an_order_without_an_answer_is_looked_for_at_once_and_on_the_bill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud = FakeCloud(tmp_path / "cloud", machines=False)
    supply = rented(cloud, monkeypatch, stopping=bills.Patience(cloud))
    cloud.control.lose_reply(times=None)
    offers = len(supply.plan.offers) if supply.plan else 0
    assert rent(supply, 0) == []
    assert offers
    assert cloud.count("machine") == 0, "it is not left until the pool ends"
    assert len(supply.rental.receipt.lines) == len(bill(tmp_path / "cloud" / "events")) > 0


# --- several providers ---------------------------------------------------------------------------------------


class Hangs(FakeCloud):
    """Answers no request for the end of a machine for a while."""

    name: ClassVar[str] = "busy"
    answers: ClassVar[threading.Event]

    def terminate(self, instances: Sequence[Instance]) -> None:
        self.answers.wait(60.0)
        super().terminate(instances)


@pytest.mark.parametrize("way", ["stop", "down", "gc"])
def test_a_provider_that_hangs_keeps_no_machine_of_another(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hangs, "answers", threading.Event(), raising=False)
    hangs = Hangs(tmp_path / "hangs", [Stock(usd_per_hour=1.0, capacity=1)], machines=False)
    other = FakeCloud(tmp_path / "other", [Stock(usd_per_hour=2.0)], machines=False)
    pool = sky.ComputePool([hangs, other], nodes=2, name="p", console="off")
    supply = supply_of(pool)
    asyncio.run(supply.look())
    supply.begin()
    there = rent(supply, 0, 1)
    assert [hangs.count("machine"), other.count("machine")] == [1, 1]
    ends = {
        "stop": lambda: supply.terminate(there),
        "down": lambda: reaper.terminate_all([hangs, other], "p", Ledger.here()),
        "gc": lambda: gc.terminate_found(gc.survey([hangs, other]).found),
    }
    end = threading.Thread(target=ends[way], daemon=True)
    end.start()
    try:
        eventually(lambda: not other.count("machine"), 20.0, "the end of the machine of the other provider")
        assert hangs.count("machine") == 1
    finally:
        Hangs.answers.set()
        end.join(30.0)
    assert not hangs.count("machine")


# --- budgets -------------------------------------------------------------------------------------------------


def test_a_budget_is_refused_where_machines_cannot_end_themselves_unless_that_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud = FakeCloud(tmp_path / "cloud", machines=False, ends_itself=False)
    with pytest.raises(sky.UsageError, match=r"cannot end itself.*skypool gc --yes.*Budget\(5, best_effort=True\)"):
        rented(cloud, monkeypatch, budget=5)
    rented(cloud, monkeypatch, budget=sky.Budget(5, best_effort=True))
    (record,) = Ledger.here().pools("p")
    assert record.budget == sky.Budget(5, best_effort=True)


def test_what_cannot_keep_the_budget_is_left_out_where_something_else_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cheap = FakeCloud(tmp_path / "one", [Stock(usd_per_hour=0.1)], machines=False, ends_itself=False)
    dear = FakeCloud(tmp_path / "two", [Stock(usd_per_hour=0.2)], machines=False)
    object.__setattr__(cheap, "name", "unbounded")
    pool = sky.ComputePool([cheap, dear], name="p", budget=5, console="off")
    plan = asyncio.run(supply_of(pool).look())
    assert [each.provider for each in plan.offers] == ["fake"]
    assert "offers of unbounded are left out" in plan.explain()


def test_a_budget_on_spot_caps_the_price_and_leaves_the_end_to_the_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = Stock(usd_per_hour=2.0, market="spot")
    supply = rented(FakeCloud(tmp_path / "cloud", [stock], machines=False), monkeypatch, budget=20, market="spot")
    assert supply.plan is not None
    order = supply._order(supply.plan.offers[0], (0,))
    assert (order.max_usd_per_hour, order.lifetime) == (2.5, None)


def test_a_spot_price_that_moves_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cloud = FakeCloud(tmp_path / "cloud", [Stock(usd_per_hour=2.0, market="spot")], machines=False, ends_itself=False)
    monkeypatch.setattr(supply_module, "REPRICE", 0.0)
    supply = rented(cloud, monkeypatch, budget=sky.Budget(20, best_effort=True), market="spot")
    rent(supply, 0)
    cloud.control.advance(3600.0)
    tend(supply)
    assert supply.rental.limits.check() == pytest.approx(9 * 3600, abs=5)
    cloud.control.spot_price("small", 6.0)
    tend(supply)
    assert supply.rental.limits.check() == pytest.approx(3 * 3600, abs=5), "the nodes are told so"
    cloud.control.advance(3600.0)
    assert supply.rental.receipt.usd == pytest.approx(8.0, abs=0.02)
    assert supply.rental.receipt.usd_per_hour == 6.0
    items = bill(tmp_path / "cloud" / "events", clock.now())
    assert sum(item.usd for item in items.values()) == pytest.approx(supply.rental.receipt.usd, abs=6.0 / 3600)
    assert Ledger.here().pools("p")[0].receipt(clock.now()).usd == pytest.approx(supply.rental.receipt.usd, abs=0.01)


# --- quotas --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [0, 1, 3, 5])
def test_a_quota_with_room_for_some_nodes_serves_so_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    class AllOrNone(FakeCloud):
        """Refuses the whole order where its quota has no room for all of it, as RunInstances of AWS does."""

        def launch(self, offer: Offer, order: Order) -> list[Instance]:
            if offer.quota and self.count("machine") + order.count > room:
                raise QuotaError("the quota is reached", provider=self.name)
            return super().launch(offer, order)

    stock = [Stock("cheap", usd_per_hour=1.0, quota="few"), Stock("dear", usd_per_hour=9.0)]
    supply = rented(AllOrNone(tmp_path / "cloud", stock, machines=False), monkeypatch, nodes=5)
    assert len(rent(supply, 0, 1, 2, 3, 4)) == 5
    assert sorted(line.type for line in supply.rental.receipt.lines) == ["cheap"] * room + ["dear"] * (5 - room)


def test_a_launch_that_a_quota_stops_half_way_leaves_what_it_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = [Stock("cheap", usd_per_hour=1.0, quota="few"), Stock("dear", usd_per_hour=9.0)]
    cloud = FakeCloud(tmp_path / "cloud", stock, machines=False)
    supply = rented(cloud, monkeypatch, nodes=5)
    cloud.control.limit("few", 3)
    assert len(rent(supply, 0, 1, 2, 3, 4)) == 5
    assert cloud.count("machine") == 5
    assert sorted(line.type for line in supply.rental.receipt.lines) == ["cheap"] * 3 + ["dear"] * 2
