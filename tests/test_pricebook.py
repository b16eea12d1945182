"""What providers said they sell is kept while it holds, by several processes, and nothing breaks when it cannot be."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import pytest

import skypool as sky
from skypool.drivers.contract import Answers, lacks
from skypool.errors import CredentialsError, ErrorGroup, NoAnswer, ProviderError
from skypool.model import Need, Offer
from skypool.offers import price_cache, search
from skypool.offers.ranking import Plan
from skypool.offers.search import look_around
from tests.lab.prices import Fleeting, Kept, Snapshot, snapshot

ROOT = Path(__file__).parents[1]
DAY, MINUTE = 86400.0, 60.0


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class Clock:
    """`time.time` of the pricebook, which can be put forward."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def time(self) -> float:
        return time.time() + self.ahead


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(price_cache, "time", made)
    return made


@dataclass(frozen=True)
class Shop(Kept):
    """A snapshot that counts how often it is asked, and can be out of reach."""

    error: list[Exception] = field(default_factory=list, repr=False, compare=False)
    asked: list[Need] = field(default_factory=list, repr=False, compare=False)
    name: ClassVar[str] = "shop"

    def offers(self, need: Need) -> Iterable[Offer]:
        self.asked.append(need)
        if self.error:
            raise self.error[0]
        return super().offers(need)


@dataclass(frozen=True)
class Partial(Shop):
    """A shop of which one place does not answer."""

    def offers(self, need: Need) -> Iterable[Offer]:
        return Answers(super().offers(need), ["offers"])


def look(*drivers: Snapshot, need: Need | None = None, refresh: bool = False, offline: bool = True) -> Plan:
    return asyncio.run(look_around(drivers, need or Need(), refresh=refresh, offline=offline))


# --- ages ----------------------------------------------------------------------------------------------------


def test_an_answer_is_kept_as_long_as_the_driver_says_and_is_the_same(clock: Clock) -> None:
    shop = Shop("verda")
    first = look(shop)
    clock.ahead = DAY - MINUTE
    again = look(shop)
    assert len(shop.asked) == 1
    assert again.offers == first.offers
    assert again.offers[0].accelerator == first.offers[0].accelerator
    clock.ahead = DAY + MINUTE
    look(shop)
    assert len(shop.asked) == 2


def test_spot_prices_and_stock_are_believed_for_minutes(clock: Clock) -> None:
    shop = Shop("verda")
    look(shop, need=Need(market="spot"))
    clock.ahead = price_cache.PASSING - 10
    look(shop, need=Need(market="spot"))
    assert len(shop.asked) == 1
    clock.ahead = price_cache.PASSING + 10
    look(shop, need=Need(market="spot"))
    assert len(shop.asked) == 2
    sold = snapshot("verda")
    assert price_cache.holds(shop, Need(), sold) == DAY
    assert price_cache.holds(shop, Need(market="cheapest"), sold) == price_cache.PASSING
    assert (
        price_cache.holds(Fleeting(), Need(), [replace(each, available=True) for each in sold]) == price_cache.PASSING
    )


def test_what_a_driver_does_not_say_to_keep_is_never_kept(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for _ in range(3):
        look(Snapshot("verda", log=str(log)))
    assert len(log.read_text().splitlines()) == 3
    assert not price_cache.path().exists()
    for name in ("local", "container"):
        assert price_cache.keeps(sky.Local() if name == "local" else sky.Container()) == 0


def test_an_answer_that_lacks_something_is_used_and_not_kept() -> None:
    shop = Partial("verda")
    first, again = look(shop), look(shop)
    assert first.offers
    assert again.offers == first.offers
    assert len(shop.asked) == 2


@dataclass(frozen=True)
class Simultaneous(Kept):
    """A snapshot whose offers are made while another one's are.

    Args:
        together: where the two wait for each other, before and after something is found to be missing.
        missing: what may be missing; "" where all is told.
    """

    together: threading.Barrier = field(default_factory=lambda: threading.Barrier(1), repr=False, compare=False)
    missing: str = ""

    def offers(self, need: Need) -> Iterable[Offer]:
        self.together.wait(60)
        lacking = [lacks(self.missing, NoAnswer("no answer"))] if self.missing else []
        self.together.wait(60)
        return Answers(super().offers(need), lacking)


@pytest.mark.filterwarnings("ignore:offers of eu-1 may be missing")
def test_of_two_answers_at_the_same_time_only_the_one_that_lacks_something_is_not_kept() -> None:
    both = threading.Barrier(2)
    complete = Simultaneous("verda", together=both)
    partial = Simultaneous("runpod", together=both, missing="offers of eu-1")
    look(complete, partial)
    assert price_cache.read(complete, Need()) is not None
    assert price_cache.read(partial, Need()) is None


def test_one_answer_serves_for_any_price_cap_and_the_driver_is_not_told_of_one() -> None:
    shop = Shop("verda")
    dear = look(shop, need=Need(max_usd_per_hour=100))
    cheap = look(shop, need=Need(max_usd_per_hour=1))
    assert len(shop.asked) == 1
    assert shop.asked[0].max_usd_per_hour is None
    assert max(each.usd_per_hour for each in cheap.offers) <= 1 < max(each.usd_per_hour for each in dear.offers)


def test_another_need_and_other_settings_are_another_question() -> None:
    shop = Shop("verda")
    look(shop)
    look(shop, need=Need(market="spot"))
    assert len(shop.asked) == 2
    other = Shop("runpod")
    assert {each.region for each in look(other).offers} == {"global"}
    assert len(other.asked) == 1


def test_refresh_asks_although_the_answer_holds_and_keeps_the_new_one() -> None:
    shop = Shop("verda")
    look(shop)
    look(shop, refresh=True)
    look(shop)
    assert len(shop.asked) == 2


def test_a_clock_that_was_put_back_makes_no_answer_last(clock: Clock) -> None:
    shop = Shop("verda")
    clock.ahead = 10 * DAY
    look(shop)
    clock.ahead = 0
    look(shop)
    assert len(shop.asked) == 2
    look(shop)
    assert len(shop.asked) == 2


# --- offline -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        ProviderError("no route", provider="shop"),
        ConnectionResetError("reset by peer"),
        ErrorGroup(
            "2 regions or zones could not be queried", [NoAnswer("no route to one"), NoAnswer("no route to another")]
        ),
    ],
    ids=["refused", "broken", "several places"],
)
def test_where_a_provider_cannot_be_reached_its_last_offers_are_used_and_their_age_is_said(
    clock: Clock, error: Exception
) -> None:
    shop = Shop("verda")
    fresh = look(shop)
    clock.ahead = 3 * DAY
    shop.error.append(error)
    made = look(shop)
    assert made.offers == fresh.offers
    assert made.notes == (f"shop cannot be reached ({error}); its cached offers are used, 3 d old",)
    assert made.explain().endswith(f"\n!  {made.notes[0]}")
    assert made.failures == {}


def test_offers_of_last_week_are_no_offers(clock: Clock) -> None:
    shop = Shop("verda")
    look(shop)
    clock.ahead = price_cache.FORGET + DAY
    shop.error.append(ProviderError("no route", provider="shop"))
    with pytest.raises(ProviderError, match="no route"):
        look(shop)


def test_a_pool_does_not_rent_from_who_cannot_be_reached(clock: Clock) -> None:
    shop = Shop("verda")
    look(shop)
    clock.ahead = 2 * DAY
    shop.error.append(ProviderError("no route", provider="shop"))
    made = look(shop, Snapshot("runpod"), offline=False)
    assert {each.provider for each in made.offers} == {"snapshot"}
    assert set(made.failures) == {"shop"}


def test_who_is_refused_is_told_so_and_gets_no_old_offers(clock: Clock) -> None:
    shop = Shop("verda")
    look(shop)
    clock.ahead = 2 * DAY
    shop.error.append(CredentialsError("the token has expired", provider="shop"))
    with pytest.raises(CredentialsError):
        look(shop)


def test_a_mistake_in_a_driver_is_not_hidden_behind_old_offers(clock: Clock) -> None:
    shop = Shop("verda")
    look(shop)
    clock.ahead = 2 * DAY
    shop.error.append(TypeError("a mistake"))
    with pytest.raises(TypeError, match="a mistake"):
        look(shop)


@dataclass(frozen=True)
class Silent(Snapshot):
    """Never answers while the test lasts."""

    over: threading.Event = field(default_factory=threading.Event, repr=False)
    name: ClassVar[str] = "silent"

    def offers(self, need: Need) -> Iterable[Offer]:
        self.over.wait(20)
        return []


def test_who_does_not_answer_in_time_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_OFFERS_TIMEOUT", 0.2)
    silent = Silent()

    async def both() -> Plan:
        try:
            return await look_around([silent, Snapshot("verda")], Need())
        finally:
            silent.over.set()

    began = time.monotonic()
    made = asyncio.run(both())
    assert time.monotonic() - began < 15
    assert made.offers
    assert str(made.failures["silent"]) == (
        "silent did not return its offers within 0.2 s; try again, or leave this provider out"
    )


# --- the file ------------------------------------------------------------------------------------------------

WRITER = """
import sys
from skypool.offers import price_cache as pricebook
from skypool.model import Need
from tests.lab.prices import Kept, snapshot
driver, offers = Kept(sys.argv[1]), snapshot(sys.argv[1])
for n in range(40):
    pricebook.write(driver, Need(vcpus=n % 4), offers)
    found = pricebook.read(driver, Need(vcpus=n % 4))
    assert found is not None and found.offers == offers, n
print("done")
"""


def test_two_processes_write_and_read_at_once() -> None:
    argv = [sys.executable, "-c", WRITER]
    running = [
        subprocess.Popen([*argv, name], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for name in ("verda", "verda", "runpod")
    ]
    for each in running:
        out, err = each.communicate(timeout=60)
        assert (out, err) == ("done\n", "")


FIRST = """
import multiprocessing, os, sys
from skypool.offers import price_cache
def write(number, barrier, lost):
    for folder in sys.argv[1:]:
        os.environ["XDG_CACHE_HOME"] = folder
        barrier.wait(30)
        price_cache.remember(f"key {number}", (number,))
        if price_cache.recall(f"key {number}", tuple) is None:
            with lost:
                lost.value += 1
context = multiprocessing.get_context("fork")
barrier, lost = context.Barrier(4), context.Value("i")
running = [context.Process(target=write, args=(number, barrier, lost)) for number in range(4)]
for each in running:
    each.start()
for each in running:
    each.join()
print(lost.value, *(each.exitcode for each in running))
"""


def test_nothing_is_lost_where_several_processes_make_the_file_at_once(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", FIRST, *(str(tmp_path / f"{number}") for number in range(30))]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("0 0 0 0 0\n", "")


def test_a_file_that_is_no_database_is_replaced() -> None:
    shop = Shop("verda")
    price_cache.path().parent.mkdir(parents=True)
    price_cache.path().write_bytes(b"what is this" * 1000)
    look(shop)
    look(shop)
    assert len(shop.asked) == 1


def test_an_answer_that_cannot_be_read_is_asked_for_again() -> None:
    shop = Shop("verda")
    look(shop)
    with price_cache._book() as book:
        book.execute("UPDATE answers SET offers = ?", (b"torn",))
    look(shop)
    look(shop)
    assert len(shop.asked) == 2


def test_where_nothing_can_be_kept_the_provider_is_asked_each_time(tmp_path: Path) -> None:
    shop = Shop("verda")
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert look(shop).offers
    assert look(shop).offers
    assert len(shop.asked) == 2


def test_what_is_of_no_use_any_more_goes(clock: Clock) -> None:
    look(Shop("verda"))
    clock.ahead = price_cache.FORGET + DAY
    look(Shop("runpod"))
    with price_cache._book() as book:
        assert book.execute("SELECT count(*) FROM answers").fetchone() == (1,)


def test_a_driver_keeps_a_list_of_prices_there_too(clock: Clock) -> None:
    assert price_cache.recall("list", dict) is None
    price_cache.remember("list", {("a", 1): 2.5})
    clock.ahead = DAY
    found = price_cache.recall("list", dict)
    assert found is not None
    assert found[0] == {("a", 1): 2.5}
    assert price_cache.recall("list", str) is None
    assert found[1] == pytest.approx(DAY, abs=60)
    clock.ahead = price_cache.FORGET + DAY
    assert price_cache.recall("list", dict) is None


def test_no_secret_is_in_the_file_and_it_is_the_users_alone() -> None:
    @dataclass(frozen=True)
    class Secretive(Kept):
        token: str = field(default="hunter2", repr=False)

    look(Secretive("verda"))
    folder = price_cache.path().parent
    assert folder.stat().st_mode & 0o777 == 0o700
    assert not any(b"hunter2" in each.read_bytes() for each in folder.iterdir())
