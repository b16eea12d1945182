"""Idle money: what receipts say was paid while no call ran, against hand calculation in scripted worlds."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import skypool as sky
from skypool import clock, events
from skypool.calls.idle_time import FRESH, IdleTime
from skypool.console.board import Board
from skypool.console.layout import draw
from skypool.devices.sample import DeviceSample, NodeSample
from skypool.errors import PoolClosed
from skypool.observers.observed import Observed
from skypool.rental.ledger import Ledger
from skypool.rental.receipt import IdleSpan, Line
from skypool.testing import FakeCloud, Stock
from tests.conftest import eventually
from tests.test_cli_money import Run, skypool
from tests.watched import Watched
from tests.work import where

__all__ = ["skypool"]

CENT = 0.005
"""Half a cent: sums that differ by less are equal to the cent."""


class Script:
    """A clock of money that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    made = Script()
    monkeypatch.setattr(clock, "now", made)
    return made


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[FakeCloud]:
    stock = [Stock(usd_per_hour=36.0)]
    with FakeCloud(tmp_path / "cloud", stock, tells_billing=False) as made:
        yield made


def devices(*percent: float | None) -> list[NodeSample]:
    read = tuple(DeviceSample("cuda", n, utilization_percent=each) for n, each in enumerate(percent))
    return [NodeSample(devices=read)]


# --- the sum of idle time ------------------------------------------------------------------------------------


def test_a_node_is_idle_while_no_call_runs() -> None:
    idle = IdleTime(100.0)
    assert idle.until(110.0).seconds == 10.0
    idle.begin(120.0)
    assert idle.until(150.0).seconds == 20.0
    assert idle.until(150.0).since is None
    idle.end(160.0)
    found = idle.until(165.0)
    assert (found.seconds, found.since, found.is_idle) == (25.0, 160.0, True)


def test_a_node_whose_devices_are_low_is_idle_while_the_reading_is_fresh() -> None:
    idle = IdleTime(0.0)
    idle.begin(0.0)
    idle.measured(10.0, low=True)
    idle.measured(12.0, low=True)
    assert idle.until(14.0).seconds == 4.0
    idle.measured(15.0, low=False)
    assert idle.until(30.0).seconds == 5.0
    idle.measured(40.0, low=True)
    assert idle.until(40.0 + 10 * FRESH).seconds == 5.0 + FRESH


def test_what_is_held_as_work_is_not_idle() -> None:
    idle = IdleTime(0.0)
    idle.hold(10.0, True)
    idle.begin(20.0)
    idle.hold(30.0, False)
    idle.end(40.0)
    assert idle.until(50.0).seconds == 20.0


Steps = st.lists(
    st.tuples(st.integers(0, 50), st.sampled_from(["begin", "end", "hold", "free", "low", "high", "look"])), max_size=60
)


@given(steps=Steps)
def test_the_sum_is_that_of_each_second_for_itself(steps: list[tuple[int, str]]) -> None:
    """The model looks at each second alone. Times are whole, so that sums of floats are exact."""
    idle = IdleTime(0.0)
    calls = held = False
    fresh = -1.0
    now = expected = 0
    for after, what in steps:
        for second in range(now, now + after):
            expected += not (calls or held) or second < fresh
        now += after
        match what:
            case "begin":
                idle.begin(now)
                calls = True
            case "end":
                idle.end(now)
                calls = False
            case "hold" | "free":
                held = what == "hold"
                idle.hold(now, held)
            case "low" | "high":
                fresh = now + FRESH if what == "low" else -1.0
                idle.measured(now, what == "low")
            case _:
                assert idle.until(now).seconds == expected
        assert (idle.until(now).since is None) is (calls or held)
    assert idle.until(now).seconds == expected


# --- the price of idle time ----------------------------------------------------------------------------------


def line(**more: object) -> Line:
    values = {"usd_per_hour": 36.0, "least_billed": 0.0, "launched": 0.0, "until": 0.0, "billed_from": 0.0}
    return Line("p", "i", "t", "z", "spot", 0, **{**values, "idle_at": 0.0, **more})  # type: ignore[arg-type]


def test_idle_time_costs_what_each_moment_cost() -> None:
    cheap_first = line(until=100.0, earlier=((40.0, 3.6),))
    assert cheap_first.idle_usd == pytest.approx(40 * 0.001 + 60 * 0.01)
    worked = cheap_first.idled(IdleSpan(0.0, 40.0, 10.0, False)).idled(IdleSpan(40.0, 80.0, 5.0, True))
    assert worked.idle_usd == pytest.approx(10 * 0.001 + 5 * 0.01 + 20 * 0.01)
    assert worked.idle_seconds == pytest.approx(35.0)


def test_idle_time_before_billing_and_after_the_end_costs_nothing() -> None:
    late = line(until=100.0, billed_from=60.0)
    assert late.idle_usd == pytest.approx(0.4)
    assert late.idle_seconds == 40.0
    assert late.idled(IdleSpan(0.0, 80.0, 80.0, False)).idle_usd == pytest.approx(0.2)
    ended = line(until=100.0, ended=True).idled(IdleSpan(0.0, 50.0, 0.0, True)).at(1e6)
    assert ended.idle_usd == pytest.approx(0.5)
    assert line(billed_from=None, until=100.0).idle_usd == 0.0


def test_the_rest_of_the_least_billed_time_is_idle() -> None:
    brief = line(until=10.0, ended=True, least_billed=60.0).idled(IdleSpan(0.0, 10.0, 4.0, True))
    assert brief.usd == pytest.approx(0.6)
    assert brief.idle_usd == pytest.approx(0.04 + 0.5)


def test_without_a_record_the_idle_time_is_unknown() -> None:
    old = line(idle_at=None, until=100.0)
    assert old.idle_usd is None
    assert old.idled(IdleSpan(0.0, 50.0, 50.0, True)).idle_usd is None


# --- scripted worlds -----------------------------------------------------------------------------------------


def test_a_pool_is_idle_until_its_first_call_and_between_calls(
    cloud: FakeCloud, script: Script, tmp_path: Path
) -> None:
    """36 USD/h is a cent a second. Two nodes: one runs a call for 300 s of 700 s, the other none."""
    with Watched(cloud, nodes=2, name="p") as pool:
        script.pass_(100.0)
        go = tmp_path / "go"
        call = pool.send(where(str(go)), node=0)
        pool.until_busy(0)
        script.pass_(300.0)
        assert pool.receipt.idle_usd == pytest.approx(1.0 + 4.0, abs=CENT)
        go.touch()
        assert call.result(60) == 0
        script.pass_(200.0)
        receipt = pool.receipt
        by_node = {each.node: each.idle_usd for each in receipt.lines}
        assert by_node == {0: pytest.approx(3.0, abs=CENT), 1: pytest.approx(6.0, abs=CENT)}
        assert receipt.usd == pytest.approx(12.0, abs=CENT)
        assert "idle, USD</dt><dd><strong>9.0000<" in pool.report().html
        assert Ledger.here().pools("p")[-1].receipt(script.now).idle_usd == pytest.approx(9.0, abs=CENT)
        script.pass_(100.0)
    assert pool.receipt.idle_usd == pytest.approx(11.0, abs=CENT)
    [end] = [each for each in pool.heard(events.PoolPhase) if each.phase == "ended"]
    assert (end.usd, end.idle_usd) == (pytest.approx(14.0, abs=CENT), pytest.approx(11.0, abs=CENT))
    assert str(pool.receipt).count(" 11.0000") == 1
    assert [each.idle_seconds for each in pool.receipt.lines] == [pytest.approx(400.0), pytest.approx(700.0)]


@pytest.mark.slow
def test_a_machine_that_is_lost_under_its_call_and_its_replacement_have_their_own_idle_time(
    cloud: FakeCloud, script: Script, tmp_path: Path
) -> None:
    """The first node: 100 s idle, 200 s with the call. The second: 300 s with the call, and 400 s idle."""
    with Watched(cloud, name="taken", liveness=3) as pool:
        script.pass_(100.0)
        go = tmp_path / "go"
        call = pool.send(where(str(go)).with_options(retries=1))
        pool.until_busy(0)
        script.pass_(200.0)
        pool.take(0)
        pool.until_busy(1)
        script.pass_(300.0)
        go.touch()
        assert call.result(60) == 1
        script.pass_(400.0)
    assert {each.node: each.usd for each in pool.receipt.lines} == pytest.approx({0: 3.0, 1: 7.0}, abs=CENT)
    assert {each.node: each.idle_usd for each in pool.receipt.lines} == pytest.approx({0: 1.0, 1: 4.0}, abs=CENT)
    assert pool.receipt.idle_usd == pytest.approx(5.0, abs=CENT)


def test_calls_with_devices_below_five_percent_are_idle(cloud: FakeCloud, script: Script, tmp_path: Path) -> None:
    with Watched(cloud, name="p") as pool:
        go = tmp_path / "go"
        call = pool.send(where(str(go)), node=0)
        pool.until_busy(0)
        engine = pool._begun
        assert engine is not None
        for percent in ([1.0, 4.9], [0.0, 0.0], [0.0, 5.0], [None, 0.0], [2.0, 2.0]):
            engine.idle.arrived(0, devices(*percent))
            script.pass_(10.0)
        script.pass_(90.0)
        assert pool.receipt.idle_usd == pytest.approx(0.01 * (10 + 10 + FRESH), abs=CENT)
        go.touch()
        call.result(60)


def test_all_that_shows_idle_money_shows_the_same(
    cloud: FakeCloud, script: Script, tmp_path: Path, skypool: Run
) -> None:
    """A node costs a cent a second. Node 0 is idle for 123 s, works for 310 s, and is idle for 207 s. Node 1 is idle.

    So they were idle for 123 s + 433 s while the call runs, and for 330 s + 640 s at the end.
    """

    def of_ledger() -> float | None:
        return Ledger.here().pools("shown")[-1].receipt(script.now).idle_usd

    def shown(board: Board) -> dict[str, str]:
        """What is shown of idle money, by where it is shown. `ps` comes first, as the receipt would record it."""
        table = [line.split() for line in skypool("ps").stdout.splitlines() if line.startswith("shown ")]
        [told] = [each for each in json.loads(skypool("ps", "--json").stdout) if each["pool"] == "shown"]
        terminal = Console(file=io.StringIO(), width=120)
        terminal.print(draw([board.picture()], script.now, 20, width=120))
        view = terminal.file.getvalue()  # type: ignore[attr-defined]
        lines = json.loads(skypool("cost", "--json").stdout)["lines"]
        [cost] = [each for each in lines if each["pool"] == "shown"]
        receipt = str(pool.receipt)
        page = pool.report().html
        return {
            "ps": table[0][-2],
            "ps --json": f"{told['idle_usd']:.4f}",
            "nodes of ps --json": f"{sum(each['idle_usd'] for each in told['instances']):.4f}",
            "live view": view.partition("  idle ")[2].partition(" USD")[0],
            "cost --json": f"{cost['idle_usd']:.4f}",
            "receipt": receipt.partition("total")[2].splitlines()[0].split()[-1],
            "report": page.partition("idle, USD</dt><dd><strong>")[2].partition("<")[0],
        }

    def all_are(usd: str) -> dict[str, str]:
        names = ["ps", "ps --json", "nodes of ps --json", "live view", "cost --json", "receipt", "report"]
        return {**dict.fromkeys(names, f"{usd}00"), "live view": usd}

    with Watched(cloud, nodes=2, name="shown") as pool:
        engine = pool._begun
        assert engine is not None
        figures = Observed(engine.facts).figures
        first, second = Board(figures), Board(figures)  # a board keeps its figures for a second
        for each in (first, second):
            pool.events.listen(each.hear)
        script.pass_(123.0)
        go = tmp_path / "go"
        call = pool.send(where(str(go)), node=0)
        pool.until_busy(0)
        script.pass_(310.0)
        eventually(lambda: of_ledger() == pytest.approx(5.56, abs=CENT), 30, "the record of the call's start")
        assert shown(first) == all_are("5.56")
        go.touch()
        assert call.result(60) == 0
        script.pass_(207.0)
        eventually(lambda: of_ledger() == pytest.approx(9.70, abs=CENT), 30, "the record of the call's end")
        assert shown(second) == all_are("9.70")


def test_a_changed_price_counts_from_its_change(cloud: FakeCloud, script: Script, tmp_path: Path) -> None:
    with Watched(cloud, name="p") as pool:
        go = tmp_path / "go"
        script.pass_(50.0)
        call = pool.send(where(str(go)), node=0)
        pool.until_busy(0)
        script.pass_(50.0)
        go.touch()
        call.result(60)
        engine = pool._begun
        assert engine is not None
        [instance] = engine.rental.there
        engine.idle.record()
        Ledger.here().repriced(engine.rental.session, {(instance.provider, instance.id): 72.0})
        script.pass_(50.0)
        assert pool.receipt.idle_usd == pytest.approx(0.5 + 1.0, abs=CENT)
        assert pool.receipt.usd == pytest.approx(0.5 + 0.5 + 1.0, abs=CENT)


def test_a_call_that_the_end_of_the_pool_cut_off_ends_then(cloud: FakeCloud, script: Script, tmp_path: Path) -> None:
    with Watched(cloud, name="p") as pool:
        call = pool.send(where(str(tmp_path / "never")), node=0)
        pool.until_busy(0)
        script.pass_(100.0)
        pool.stop()
        with pytest.raises(PoolClosed):
            call.result(60)
    assert pool.receipt.usd == pytest.approx(1.0, abs=CENT)
    assert pool.receipt.idle_usd == pytest.approx(0.0, abs=CENT)


def test_the_receipt_of_a_pool_without_machines_has_no_idle_money() -> None:
    assert sky.ComputePool(name="p", console="off").receipt.idle_usd == 0.0
