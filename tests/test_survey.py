"""What pools left behind is found without the ledger, judged, and ended; the ledger is told."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import skypool as sky
from skypool.drivers import registry
from skypool.errors import CredentialsError, ErrorGroup, LedgerError, ProviderError, UsageError
from skypool.model import Instance, Leftover, Need, Order
from skypool.processes import Process
from skypool.rental import gc
from skypool.rental.gc import Thing, everyone, judged, reconcile, terminate_found
from skypool.rental.ledger import Ledger
from skypool.rental.receipt import Line
from skypool.rental.records import Intent, Record
from skypool.testing import FakeCloud
from skypool.wire.keys import Keys
from tests.test_ledger import change

NOW = datetime(2026, 8, 20, 12, tzinfo=UTC)
HERE = Process.this()
GONE = replace(HERE, birth="another")
ELSEWHERE = replace(HERE, host="elsewhere")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def cloud(tmp_path: Path) -> FakeCloud:
    return FakeCloud(tmp_path / "cloud", machines=False, patience=0.2)


def minutes(count: float) -> datetime:
    return NOW + timedelta(minutes=count)


def machine(until: datetime | None, node: int = 0, token: str = "s-0") -> Instance:
    return Instance("fake", f"i-{node}", "p", node, token=token, until=until)


def group(until: datetime | None) -> Leftover:
    return Leftover("fake", "security-group", "sg-1", "p", until=until)


def record(client: Process, beat: float, *, ended: float | None = None, session: str = "s") -> Record:
    """Heard of so many minutes ago, of a lease of ten."""
    at = minutes(-beat).timestamp()
    over = None if ended is None else minutes(-ended).timestamp()
    return Record("p", session, client, at, at, 600.0, None, None, over, "", (), (), ())


# --- the verdict ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("until", "renews", "known", "verdict", "why"),
    [
        (5, True, None, "live", "its lease runs until 2026-08-20 12:05 UTC"),
        (-0.9, True, None, "live", "its lease runs until 2026-08-20 11:59 UTC"),
        (-1.1, True, None, "lost", "its lease ran out at 2026-08-20 11:58 UTC"),
        (-60, True, record(HERE, 1), "live", "runs its pool"),
        (-60, True, record(ELSEWHERE, 1), "live", "runs its pool"),
        (-60, True, record(ELSEWHERE, 11), "lost", "its lease ran out at"),
        (-60, True, record(GONE, 1), "lost", "its lease ran out at"),
        (5, True, record(GONE, 30), "live", "its lease runs until"),
        (5, True, record(GONE, 30, ended=20), "live", "its lease runs until"),
        (5, False, None, "live", "its lease runs until"),
        (-60, False, None, "unknown", "no tag says when its lease ends"),
        (-60, False, record(HERE, 1), "live", "runs its pool"),
        (-60, False, record(GONE, 5), "live", "its client is gone, and its pool may be taken over until 2026-08-20"),
        (-60, False, record(GONE, 12), "lost", "its client was last seen at 2026-08-20 11:48 UTC"),
        (None, True, None, "unknown", "its pool is not in the ledger of this computer"),
        (None, True, record(HERE, 1), "live", "runs its pool"),
        (None, True, record(GONE, 12), "lost", "its client was last seen at"),
        (None, True, record(GONE, 1, ended=1), "lost", "its pool ended at 2026-08-20 11:59 UTC"),
    ],
)  # fmt: skip
def test_a_machine_is_judged(until: float | None, renews: bool, known: Record | None, verdict: str, why: str) -> None:
    thing = machine(None if until is None else minutes(until))
    ((_, got, said),) = judged([thing], renews, [known] if known else [], NOW.timestamp())
    assert (got, why in said) == (verdict, True), said


def test_a_machine_is_judged_by_its_own_session_and_not_by_another_of_that_name() -> None:
    old, new = record(GONE, 30, session="old"), record(HERE, 1, session="new")
    of_old, of_new = machine(None, token="old-3"), machine(None, 1, token="new-0")
    verdicts = [verdict for _, verdict, _ in judged([of_old, of_new], True, [old, new], NOW.timestamp())]
    assert verdicts == ["lost", "live"]
    ((_, verdict, _),) = judged([machine(None, token="")], True, [old, new], NOW.timestamp())
    assert verdict == "live", "where no token tells, the newest pool of the name"


def test_a_machine_that_another_client_rented_for_a_pool_of_that_name_is_not_judged_by_ours() -> None:
    ours, theirs = record(GONE, 60, ended=50, session="ours"), machine(minutes(-30), token="theirs-0")
    for renews, verdict in ((False, "unknown"), (True, "lost")):
        assert [got for _, got, _ in judged([theirs], renews, [ours], NOW.timestamp())] == [verdict]
    live = record(HERE, 1, session="ours")
    assert [got for _, got, _ in judged([theirs], True, [live], NOW.timestamp())] == ["lost"]


def test_a_machine_that_its_pool_ordered_after_it_was_taken_over_is_judged_by_that_pool() -> None:
    held = record(HERE, 1, session="first")
    line = Line("fake", "i-0", "small", "north", "spot", 0, 1.0, 0.0, NOW.timestamp(), NOW.timestamp())
    intent = Intent("later-1", "fake", "small", "north", (1,), NOW.timestamp())
    held = replace(held, lines=(line,), intents=(intent,))
    told = judged([machine(None, token="later-0"), machine(None, 1, token="later-1")], True, [held], NOW.timestamp())
    assert [verdict for _, verdict, _ in told] == ["live", "live"]


@pytest.mark.parametrize(
    ("group_until", "machine_until", "verdict"),
    [(-60, 5, "live"), (-60, -60, "lost"), (5, -60, "live"), (None, 5, "live"), (None, -60, "unknown")],
)
def test_what_machines_use_lasts_as_long_as_they(group_until: float | None, machine_until: float, verdict: str) -> None:
    things: list[Thing] = [
        group(None if group_until is None else minutes(group_until)),
        machine(minutes(machine_until)),
    ]
    assert judged(things, True, [], NOW.timestamp())[0][1] == verdict


def test_what_machines_use_is_unknown_where_they_are() -> None:
    things: list[Thing] = [group(minutes(-60)), machine(None)]
    assert [verdict for _, verdict, _ in judged(things, True, [], NOW.timestamp())] == ["unknown", "unknown"]


# --- what there is -------------------------------------------------------------------------------------------


def rent(cloud: FakeCloud, pool: str, lease: float = 600.0) -> None:
    offer = next(iter(cloud.offers(Need())))
    until = datetime.now(UTC) + timedelta(seconds=lease)
    cloud.launch(offer, Order(pool, f"s-{pool}-0", (0, 1), Need(), until=until))


def test_what_is_lost_is_found_and_ended_without_a_ledger_and_the_rest_stays(cloud: FakeCloud) -> None:
    rent(cloud, "lost", -120)
    rent(cloud, "live")
    seen = gc.survey([cloud])
    assert [(each.thing.pool, each.verdict) for each in seen.found] == [("live", "live")] * 4 + [("lost", "lost")] * 4
    terminate_found([each for each in seen.found if each.verdict == "lost"])
    assert {each.pool for each in cloud.instances()} == {"live"} == {each.pool for each in cloud.leftovers()}
    assert cloud.count("machine") == 2


def test_the_same_thing_seen_with_two_settings_is_one(cloud: FakeCloud) -> None:
    rent(cloud, "p")
    again = replace(cloud, patience=3.0)
    assert len(gc.survey([cloud, again]).found) == 4


def test_a_provider_that_fails_is_named_and_the_others_are_asked(cloud: FakeCloud, tmp_path: Path) -> None:
    other = FakeCloud(tmp_path / "other", machines=False)
    rent(other, "p")
    cloud.control.refuse(ProviderError, "describe")
    seen = gc.survey([cloud, other])
    assert [driver for driver, _ in seen.failures] == [cloud]
    assert len(seen.found) == 4


def test_what_cannot_be_ended_is_told_once_all_was_tried(cloud: FakeCloud, tmp_path: Path) -> None:
    other = FakeCloud(tmp_path / "other", machines=False)
    rent(cloud, "p", -120)
    rent(other, "q", -120)
    seen = gc.survey([cloud, other])
    cloud.control.refuse(CredentialsError, "delete", times=None)
    with pytest.raises(ErrorGroup, match="some machines or other resources could not be ended") as caught:
        terminate_found(seen.found, patience=5)
    assert [type(each) for each in caught.value.exceptions] == [CredentialsError]
    assert (cloud.count("machine"), other.count()) == (2, 0)


# --- whom to ask ---------------------------------------------------------------------------------------------


def test_everyone_is_asked_whom_the_ledger_or_the_registry_knows(cloud: FakeCloud) -> None:
    ledger = Ledger.here()
    ledger.begin("p", "s", lease=600, drivers=[cloud, sky.Local()])
    ledger.begin("q", "t", lease=600, drivers=[cloud, sky.SSH(["gpu1"])])
    drivers, left_out = everyone(ledger)
    assert [registry.noted(each) for each in drivers].count(registry.noted(sky.Local())) == 1
    assert [each for each in drivers if each.name == "fake"] == [cloud]
    assert [each.name for each in drivers].count("ssh") == 1
    assert "ssh" not in left_out, "one of it can be asked"
    _, left_out = everyone(None)
    assert "SSH needs machines" in str(left_out["ssh"])


def test_only_those_that_are_named_are_asked(cloud: FakeCloud) -> None:
    ledger = Ledger.here()
    with pytest.raises(UsageError, match="SSH needs machines"):
        everyone(ledger, ["ssh"])
    ledger.begin("p", "s", lease=600, drivers=[cloud])
    drivers, left_out = everyone(ledger, ["fake"])
    assert ({each.name for each in drivers}, cloud in drivers, left_out) == ({"fake"}, True, {})
    with pytest.raises(UsageError, match="no provider is called 'fkae'"):
        everyone(ledger, ["fkae"])


def test_a_driver_of_a_pool_that_may_run_and_cannot_be_made_again_is_told(cloud: FakeCloud) -> None:
    ledger = Ledger.here()
    ledger.begin("p", "s", lease=600, drivers=[cloud])
    change(ledger.file, "UPDATE pools SET drivers = replace(drivers, 'FakeCloud', 'Gone')")
    _, left_out = everyone(ledger)
    assert "cannot be created from the settings" in str(left_out["fake of pool p"])
    ledger.end("s")
    assert "fake of pool p" not in everyone(ledger)[1]


def test_settings_of_pools_that_ended_long_ago_are_not_asked(cloud: FakeCloud) -> None:
    ledger = Ledger.here()
    ledger.begin("p", "s", lease=600, drivers=[cloud])
    ledger.end("s")
    assert cloud in everyone(ledger)[0]
    change(ledger.file, "UPDATE pools SET ended = ended - ?", 31 * 86400.0)
    assert cloud not in everyone(ledger)[0]


# --- the ledger learns ---------------------------------------------------------------------------------------


def abandoned(cloud: FakeCloud, ledger: Ledger) -> None:
    """A pool whose client was killed, and whose last order got no answer."""
    offer = next(iter(cloud.offers(Need())))
    ledger.begin("p", "s", lease=600, drivers=[cloud])
    ledger.intend("s", "s-0", offer, (0,))
    ledger.rented("s", "s-0", cloud.launch(offer, Order("p", "s-0", (0,), Need())))
    ledger.intend("s", "s-1", offer, (1,))
    change(ledger.file, "UPDATE pools SET birth = 'another', beat = beat - 700")
    change(ledger.file, "UPDATE orders SET at = at - 700, sent = sent - 700")
    change(ledger.file, "UPDATE instances SET launched = launched - 700, billed_from = billed_from - 700")
    assert Path(Keys.of("p").identity).exists()


@pytest.mark.needs("openssh")
def test_a_pool_of_which_nothing_is_left_is_over(cloud: FakeCloud) -> None:
    ledger = Ledger.here()
    abandoned(cloud, ledger)
    seen = gc.survey([cloud], ledger)
    assert {each.verdict for each in seen.found} == {"lost"}
    assert reconcile(ledger, seen) == []
    terminate_found(seen.found)
    assert reconcile(ledger, seen, seen.found) == ["p"]
    (record,) = ledger.pools()
    assert (record.state(time.time()), record.running, record.intents) == ("ended", (), ())
    assert not Keys.of("p").folder.exists()
    assert reconcile(ledger, gc.survey([cloud], ledger)) == []


def test_a_local_pool_that_is_not_seen_from_here_is_not_over_before_its_lease_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two clients with one ledger, as on hosts or in containers that share a home, see other folders of nodes."""
    ledger, local = Ledger.here(), sky.Local()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "ours").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "theirs"))
    offer = next(iter(local.offers(Need())))
    ledger.begin("p", "s", lease=600, drivers=[local])
    ledger.intend("s", "s-0", offer, (0,))
    ledger.rented("s", "s-0", local.launch(offer, Order(pool="p", token="s-0", nodes=(0,), need=Need())))
    change(ledger.file, "UPDATE pools SET birth = 'another'")
    change(ledger.file, "UPDATE instances SET launched = launched - 60, billed_from = billed_from - 60")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "ours"))
    seen = gc.survey([local], ledger)
    assert seen.found == ()
    assert reconcile(ledger, seen) == []
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "theirs"))
    seen = gc.survey([local], ledger)
    assert len(seen.found) == 1
    terminate_found(seen.found)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "ours"))
    change(ledger.file, "UPDATE pools SET beat = beat - 700")
    assert reconcile(ledger, gc.survey([local], ledger)) == ["p"]


@pytest.mark.needs("openssh")
@pytest.mark.parametrize("silent", [True, False], ids=["not asked", "failed"])
def test_a_pool_is_not_over_where_its_provider_said_nothing(cloud: FakeCloud, silent: bool) -> None:
    ledger = Ledger.here()
    abandoned(cloud, ledger)
    cloud.close()
    for each in cloud.leftovers():
        cloud.tidy([each])
    if not silent:
        cloud.control.refuse(ProviderError, "describe")
    seen = gc.survey([] if silent else [cloud], ledger)
    assert reconcile(ledger, seen) == []
    assert reconcile(ledger, gc.survey([cloud], ledger)) == ["p"]


def test_a_pool_is_not_over_while_a_machine_may_still_turn_up(cloud: FakeCloud) -> None:
    ledger = Ledger.here()
    ledger.begin("p", "s", lease=600, drivers=[cloud])
    ledger.intend("s", "s-0", next(iter(cloud.offers(Need()))), (0,))
    change(ledger.file, "UPDATE pools SET birth = 'another'")
    assert reconcile(ledger, gc.survey([cloud], ledger)) == []
    change(ledger.file, "UPDATE orders SET at = at - 60, sent = sent - 60")
    assert reconcile(ledger, gc.survey([cloud], ledger)) == ["p"]


def test_a_pool_is_not_over_while_a_machine_rented_just_now_may_not_be_listed_yet(cloud: FakeCloud) -> None:
    ledger = Ledger.here()
    offer = next(iter(cloud.offers(Need())))
    before = gc.survey([cloud], ledger)
    ledger.begin("p", "s", lease=600, drivers=[cloud])
    ledger.intend("s", "s-0", offer, (0,))
    ledger.rented("s", "s-0", [Instance("fake", "i-1", "p", 0, offer=offer, token="s-0")])
    change(ledger.file, "UPDATE pools SET birth = 'another'")
    assert reconcile(ledger, gc.survey([cloud], ledger)) == []
    change(ledger.file, "UPDATE instances SET launched = launched - 60, billed_from = billed_from - 60")
    assert reconcile(ledger, replace(before, at=before.at - 60)) == [], "it was rented after it was looked"
    assert ledger.receipt("s").usd_per_hour > 0
    assert reconcile(ledger, gc.survey([cloud], ledger)) == ["p"]


def test_a_ledger_that_cannot_be_read_says_so_and_is_not_needed(cloud: FakeCloud, state: Path) -> None:
    rent(cloud, "lost", -120)
    ledger = Ledger.here()
    ledger.file.mkdir(parents=True)
    with pytest.raises(LedgerError, match="cannot be written"):
        gc.survey([cloud], ledger)
    assert len(gc.survey([cloud]).found) == 4
