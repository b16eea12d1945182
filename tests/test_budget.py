"""The meter: what is spent, how long a budget lasts, and the receipt."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

import skypool as sky
from skypool import clock
from skypool.errors import BudgetExceeded, LifetimeExceeded, UsageError
from skypool.model import Offer
from skypool.rental.budget import Enforcement, ceiling, highest_price, repriced, worst_bill
from skypool.rental.ledger import Ledger
from skypool.rental.pool_account import Rental
from skypool.rental.receipt import Line, by_day
from skypool.rental.supply import Supply
from skypool.testing import FakeCloud

NOON = datetime(2026, 8, 20, 12, tzinfo=UTC).timestamp()


def line(hours: float = 1.0, price: float = 2.0, **more: Any) -> Line:
    facts: dict[str, Any] = {"least_billed": 0.0, "launched": NOON, "until": NOON + hours * 3600, **more}
    facts.setdefault("billed_from", facts["launched"])
    return Line("fake", "i-1", "gpu", "north-a", "spot", 0, price, **facts)


def offer(price: float, least: float = 0.0) -> Offer:
    return Offer("fake", "gpu", usd_per_hour=price, least_billed=least)


@pytest.mark.parametrize(
    ("market", "asked", "has_budget", "highest"),
    [
        ("spot", None, False, None),
        ("spot", None, True, 2.5),
        ("spot", 2.2, True, 2.2),
        ("spot", 3.0, True, 2.5),
        ("spot", 3.0, False, 3.0),
        ("on-demand", None, True, None),
        ("on-demand", 3.0, True, 3.0),
        ("on-demand", 0, False, None),
    ],
)
def test_the_price_of_a_machine_may_rise_to_what_the_budget_or_the_user_allows(
    market: Literal["on-demand", "spot"], asked: float | None, has_budget: bool, highest: float | None
) -> None:
    assert highest_price(replace(offer(2), market=market), asked, has_budget) == highest


# --- one instance --------------------------------------------------------------------------------------------


def test_an_instance_costs_its_seconds_and_at_least_the_least() -> None:
    assert line(0.5).usd == 1.0
    assert line(0.01, least_billed=600).usd == pytest.approx(2.0 / 6)
    assert line(-1).usd == 0, "a clock that was set back costs nothing"


def test_the_start_of_an_instance_is_charged_once_as_soon_as_it_is_billed() -> None:
    started = line(0.5, start_usd=0.25, idle_at=NOON)
    assert (started.usd, started.at(NOON + 7200).usd) == (1.25, 4.25)
    assert line(0, start_usd=0.25).usd == 0.25
    assert line(0.5, start_usd=0.25, billed_from=None).usd == 0.0
    assert started.usd_between(-math.inf, NOON) == 0.0
    assert started.usd_between(NOON, NOON + 900) == 0.75
    assert started.usd_between(NOON + 900) == 0.5
    assert started.idle_usd == 1.0, "it is not paid for idle time"
    told = str(sky.Receipt("p", (started, line(1)), NOON + 3600))
    assert "included: 0.2500 USD for traffic at the start of machines, which is an estimate" in told
    assert "not included: further network traffic, storage" in told
    assert "included: 0" not in str(sky.Receipt("p", (line(1),), NOON))


def test_a_budget_counts_the_starts_of_machines() -> None:
    budget = sky.Budget(10.0)
    costly = replace(offer(2.0), start_usd=4.0)
    assert budget.lasts([], NOON, [costly]) == pytest.approx(3 * 3600)
    assert budget.lasts([line(1, start_usd=4.0, billed_from=None)], NOON) == pytest.approx(3 * 3600)
    assert budget.lasts([line(1, start_usd=4.0)], NOON + 3600) == pytest.approx(2 * 3600)
    budget.check_start([costly])
    with pytest.raises(BudgetExceeded, match=r"14\.00 USD"):
        budget.check_start([costly, costly, costly])


def test_an_instance_that_has_ended_costs_no_more() -> None:
    later = NOON + 7200
    assert line(1).at(later).usd == 4.0
    assert line(1, ended=True).at(later).usd == 2.0


def test_a_day_is_charged_for_its_own_hours() -> None:
    over_midnight = line(13)  # from noon until one o'clock
    assert by_day([over_midnight, line(1)]) == {"2026-08-20": 26.0, "2026-08-21": 2.0}
    assert by_day([line(0)]) == {"2026-08-20": 0.0}
    assert by_day([]) == {}
    assert by_day([over_midnight], start=NOON + 86400) == {}, "it had ended before"
    assert by_day([over_midnight], start=NOON + 12 * 3600) == {"2026-08-21": 2.0}


@given(st.floats(0, 1e7) | st.just(43200.0), st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 100))
def test_days_come_to_what_the_instance_costs(offset: float, seconds: float, least: float, begin: float) -> None:
    launched = NOON + offset
    each = line(price=3.6, launched=launched, until=launched + seconds, least_billed=least, start_usd=begin)
    assert sum(by_day([each]).values()) == pytest.approx(each.usd, abs=1e-6)


# --- the receipt ---------------------------------------------------------------------------------------------


def test_a_receipt_is_a_table() -> None:
    lines = (
        line(0.75, 32.77, ended=True),
        Line(
            "fake",
            "i-0123456789",
            "small",
            "north",
            "on-demand",
            11,
            0.1,
            60.0,
            NOON + 3580,
            NOON + 3600,
            billed_from=NOON + 3580,
            idle_at=NOON + 3590,
            idle_usd_then=0.0001,
        ),
    )
    assert str(sky.Receipt("train", lines, NOON + 3600)) == (
        """\
pool train, 2026-08-20 13:00 UTC
node  instance      provider  type   place    market         time    USD/h      USD  idle USD
   0  i-1           fake      gpu    north-a  spot        0:45:00  32.7700  24.5775   unknown
  11  i-0123456789  fake      small  north    on-demand  0:01:00*   0.1000   0.0017    0.0004
      total                                                                 24.5792   unknown
* not ended: 1 of 2, 0.1000 USD/h
not included: network traffic, storage that outlives its machine, taxes"""
    )


def test_a_receipt_says_what_is_not_in_it() -> None:
    said = str(sky.Receipt("train", (), NOON, unanswered=1))
    assert "total" in said
    assert "orders without an answer: 1; their cost, if any, is not included" in said
    assert said.endswith("not included: network traffic, storage that outlives its machine, taxes")


def test_a_machine_that_waits_costs_nothing_and_the_receipt_says_so() -> None:
    waits = line(5, billed_from=None)
    assert (waits.seconds, waits.usd, by_day([waits])) == (0, 0, {})
    receipt = sky.Receipt("train", (waits, line(1)), NOON)
    assert (receipt.usd, receipt.usd_per_hour) == (2.0, 2.0)
    assert "of these 1 do not run yet, and their provider does not bill them" in str(receipt)
    assert sky.Budget(10).lasts([waits], NOON) == 5 * 3600, "it may be billed from any moment on"


def test_a_price_that_moved_counts_from_when_it_moved() -> None:
    moved = line(3, price=8.0, earlier=((NOON + 3600, 2.0), (NOON + 7200, 4.0)))
    assert moved.usd == 2.0 + 4.0 + 8.0
    assert moved.usd_between(NOON + 1800, NOON + 9000) == 1.0 + 4.0 + 4.0
    assert line(0.01, price=8.0, least_billed=600.0, earlier=((NOON + 300, 2.0),)).usd == pytest.approx(10 / 12)


# --- the budget ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "asked", [{"max_usd": 0}, {"max_usd": -1}, {"max_usd": "5"}, {"max_usd": True}, {"max_usd": math.nan},
              {"max_usd": math.inf}, {"max_usd": 5, "warn": 0}, {"max_usd": 5, "warn": 80}],
)  # fmt: skip
def test_a_budget_that_cannot_be_meant_is_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"Budget\(.*(above 0|endless)"):
        sky.Budget(**asked)


def test_a_budget_warns_at_its_share_and_is_never_less_than_spent() -> None:
    budget = sky.Budget(10, warn=0.5)
    assert [budget.warns(usd) for usd in (4.99, 5, 11)] == [False, True, True]
    assert [budget.left(usd) for usd in (4, 10, 11)] == [6, 0, 0]


def test_the_setup_and_ten_minutes_of_all_nodes_must_be_affordable() -> None:
    budget = sky.Budget(5)
    budget.check_start([offer(7.5), offer(7.5)])
    with pytest.raises(
        BudgetExceeded, match=r"first 20:00 min of 2 nodes cost 6\.00 USD, .* 5\.00 USD: .*Budget\(6\.00\)"
    ):
        budget.check_start([offer(9), offer(9)])
    with pytest.raises(BudgetExceeded, match=r"the first 2:00:00 h of 1 node cost 6\.00 USD"):
        budget.check_start([offer(3, least=7200)])
    with pytest.raises(BudgetExceeded, match=r"of which 4\.00 are spent: .*Budget\(6\.00\)"):
        budget.check_start([offer(6)], spent=4)
    with pytest.raises(BudgetExceeded, match=r"the first 10:00 min of 1 node cost 10\.00 USD"):
        budget.check_start([offer(60)], lifetime=600)
    budget.check_start([offer(60)], lifetime=300)
    budget.check_start([])


def test_a_budget_lasts_by_what_runs_and_what_is_about_to() -> None:
    now = NOON + 3600
    budget = sky.Budget(10)
    assert budget.lasts([line(1, 2)], now) == 4 * 3600
    assert budget.lasts([line(1, 2)], now, [offer(2)]) == 2 * 3600
    assert budget.lasts([line(1, 2, ended=True)], now) == math.inf
    assert budget.lasts([line(1, 0)], now) == math.inf
    assert budget.lasts([line(6, 2)], NOON + 6 * 3600) == 0


def test_a_time_that_is_paid_for_already_costs_nothing_more() -> None:
    """The first hour of 2 USD is charged at once; the other 8 USD last four hours, from its end on."""
    assert sky.Budget(10).lasts([], NOON, [offer(2, least=3600)]) == 5 * 3600
    mixed = [offer(2, least=3600), offer(4)]  # 4 USD in the first hour beside the paid one, then 6 USD/h
    assert sky.Budget(12).lasts([], NOON, mixed) == 2 * 3600


Prices = st.lists(st.tuples(st.floats(0.01, 50), st.floats(0, 7200), st.floats(0, 1e5)), min_size=1, max_size=5)


@given(Prices, st.floats(0.01, 1000))
def test_when_a_budget_is_over_it_is_spent_to_the_cent(prices: list[tuple[float, float, float]], usd: float) -> None:
    now = NOON + 1e5
    lines = [line(price=price, least_billed=least, launched=now - age) for price, least, age in prices]
    spent = sum(each.at(now).usd for each in lines)
    seconds = sky.Budget(spent + usd).lasts(lines, now)
    assert sum(each.at(now + seconds).usd for each in lines) == pytest.approx(spent + usd, rel=1e-6)


# --- what holds a pool to it ---------------------------------------------------------------------------------


def test_a_pool_is_held_to_its_budget_and_its_lifetime_by_its_receipt_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now, told = NOON + 3600, []
    monkeypatch.setattr(clock, "now", lambda: now)
    limits = Enforcement(
        "p",
        sky.Budget(10, warn=0.3),
        7 * 3600.0,
        lambda: sky.Receipt("p", (line().at(now),), now),
        lambda text, detail: told.append(f"{text} ({detail})"),
    )
    assert limits.check() == 4 * 3600
    assert told == []
    assert limits.life_of([offer(2)], lease=600) == 2 * 3600
    assert limits.life_of([replace(offer(2), market="spot")], lease=600) == 6 * 3600, "its price may fall"
    with pytest.raises(BudgetExceeded, match=r"of which 2\.00 are spent"):
        limits.check_start([offer(15), offer(12)])
    now = NOON + 2 * 3600
    assert (limits.check(), limits.node_lifetime()) == (3 * 3600, 5 * 3600 + 5)
    assert told == [
        "30% of the budget of $10 is spent; all machines are ended when the budget is used up ($4.00 so far)"
    ]
    now = NOON + 5 * 3600
    with pytest.raises(BudgetExceeded, match=r"has spent \$10.00 of its budget of \$10"):
        limits.check()
    with pytest.raises(BudgetExceeded):
        limits.life_of([offer(2)], lease=600)
    limits.budget = None
    assert limits.check() == 2 * 3600
    now = NOON + 7 * 3600
    with pytest.raises(LifetimeExceeded, match="max_lifetime of 7:00:00 h"):
        limits.check()


@given(
    begins=st.none() | st.floats(-9000, 0),
    market=st.sampled_from(["spot", "on-demand"]),
    least=st.sampled_from([0.0, 60.0, 9000.0]),
    left=st.floats(0, 20000),
    share=st.floats(0, 1),
    factor=st.floats(0.5, 1.25),
    late=st.floats(0, 1),
)
def test_no_bill_is_above_the_worst_one(
    begins: float | None, market: str, least: float, left: float, share: float, factor: float, late: float
) -> None:
    """A machine ends at any moment until the latest one. Its price changes now, and its billing may begin later."""
    billed = None if begins is None else NOON + begins
    now = replace(line(0.0, 36.0, billed_from=billed, least_billed=least, start_usd=0.5), market=market)
    end = NOON + share * left
    price = 36.0 * factor if market == "spot" else 36.0
    since = billed if billed is not None else NOON + late * (end - NOON)
    bill = replace(now, until=end, ended=True, billed_from=since, usd_per_hour=price, earlier=((NOON, 36.0),))
    ended = replace(now, ended=True)
    dearest = repriced(now, NOON, 36.0 * 1.25) if market == "spot" else now
    assert bill.usd + ended.usd <= worst_bill([dearest, ended], NOON, NOON + left) + 1e-9
    assert worst_bill([ended], NOON, NOON + left) == ended.usd


# --- the ceiling of all pools --------------------------------------------------------------------------------


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCloud]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("SKYPOOL_MAX_USD", "100")
    with FakeCloud(tmp_path / "cloud", machines=False) as made:
        yield made


def pool(cloud: FakeCloud, name: str, **options: Any) -> sky.ComputePool:
    return sky.ComputePool(cloud, accelerator="H100:8", name=name, console="off", **options)


def budgets() -> dict[str, float | None]:
    return {each.pool: each.budget.max_usd if each.budget else None for each in Ledger.here().open_pools()}


def begun(made: sky.ComputePool) -> None:
    """Plan, and record the pool in the ledger, as a start does; rent nothing."""
    terms = made._terms
    supply = Supply(made._drivers, terms, Rental(terms, lambda event: None), threading.Event())
    asyncio.run(supply.look())
    supply.begin()


def test_the_ceiling_holds_for_all_pools_together(cloud: FakeCloud) -> None:
    begun(pool(cloud, "first", budget=40))
    begun(pool(cloud, "second"))
    assert budgets() == {"first": 40, "second": 60}
    with pytest.raises(
        BudgetExceeded, match=r"SKYPOOL_MAX_USD=100 is .*second \(60.00 USD\), first \(40.00 USD\); end one"
    ):
        begun(pool(cloud, "third", budget=1000))
    assert [*budgets()] == ["first", "second"]


def test_what_is_left_of_the_ceiling_must_pay_for_the_start(cloud: FakeCloud) -> None:
    begun(pool(cloud, "first", budget=97))
    with pytest.raises(BudgetExceeded, match=r"the budget is 3\.00 USD"):
        begun(pool(cloud, "second", budget=1000))
    assert budgets() == {"first": 97}


def test_pools_that_have_ended_or_are_free_leave_the_ceiling_alone(
    cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SKYPOOL_MAX_USD")
    begun(pool(cloud, "ended", budget=90))
    Ledger.here().end(Ledger.here().open_pools()[0].session)
    monkeypatch.setenv("SKYPOOL_MAX_USD", "100")
    with sky.ComputePool(name="free", console="off") as free:
        assert free._engine is not None
        assert free._engine.rental.limits.budget is None
        begun(pool(cloud, "paid"))
    assert budgets() == {"paid": 100}


def test_two_pools_that_start_at_once_stay_below_the_ceiling_together(cloud: FakeCloud) -> None:
    refused: list[BudgetExceeded] = []

    def begin(name: str) -> None:
        try:
            begun(pool(cloud, name, budget=60))
        except BudgetExceeded as e:
            refused.append(e)

    threads = [threading.Thread(target=begin, args=(f"pool-{n}",)) for n in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert sorted(budgets().values()) == [40, 60]  # type: ignore[type-var]
    assert len(refused) == 4


@pytest.mark.parametrize("said", ["many", "0", "-1", "inf", "nan"])
def test_a_ceiling_that_cannot_be_meant_is_refused(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYPOOL_MAX_USD", said)
    with pytest.raises(UsageError, match="SKYPOOL_MAX_USD must be a number of US dollars above 0"):
        ceiling()
