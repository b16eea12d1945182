"""What a run may cost that was handed over to its machine: never more than was said before, whatever happens there."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

import skypool as sky
from skypool.cli.run_messages import Json
from skypool.errors import AccessError, BudgetExceeded, ProviderError, SkypoolError, UsageError
from skypool.head.states import Claim, Entry, Outcome
from skypool.head.states import Ledger as State
from skypool.model import Market, Need
from skypool.rental import budget as budgets
from skypool.rental import launch, reaper
from skypool.rental import supply as supplies
from skypool.rental.ledger import Ledger
from skypool.rental.run_account import ENDING, RunAccount
from skypool.rental.supply import Supply
from skypool.runs import stored, whole_run
from skypool.runs.run import _Printer
from skypool.runs.target import Target
from skypool.runs.whole_run import Asked, WholeRun
from skypool.testing import FakeCloud, Stock
from tests.conftest import eventually
from tests.handed_runs import cloud_at, record_of, rented

CLAIM = Claim("train")
SOLD = [Stock("gpu", 36.0), Stock("gpu", 18.0, market="spot")]


class Endless(FakeCloud):
    """A cloud whose machines are only switched off when they end themselves."""

    name: ClassVar[str] = "endless"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("SKYPOOL_MAX_USD", raising=False)
    made = tmp_path / "project"
    made.mkdir()
    (made / "train.py").write_text("print('done')")
    monkeypatch.chdir(made)
    return made


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[FakeCloud]:
    with FakeCloud(tmp_path / "cloud", SOLD, machines=False) as made:
        yield made


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[FakeCloud]:
    with Endless(tmp_path / "endless", SOLD, machines=False, ends_itself=False) as made:
        yield made


def check(rent: dict[str, Any], **options: Any) -> None:
    asked, tell = Asked(rent, detach=True, keep=60.0, **{"lossy": True, **options}), _Printer()
    try:
        WholeRun(Target.of(["train.py"]), asked, tell).check()
    finally:
        tell.close()


def handed(supply: Supply, seconds: float = 1e6) -> RunAccount:
    account = RunAccount(supply, CLAIM, min(seconds, supply.rental.limits.left()))
    account.write(Entry(State.DETACHING))
    account.write(Entry(State.DETACHED))
    return account


# --- machines that cannot end their cost ---------------------------------------------------------------------


def test_a_run_is_not_given_to_a_machine_that_is_billed_after_its_end(
    cloud: FakeCloud, endless: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = r"endless gpu cannot end its own cost.*gc --yes.*choose another provider=, or leave detach=True out"
    with pytest.raises(UsageError, match=said):
        check({"provider": endless}, max_lifetime=3600.0)
    with pytest.raises(UsageError, match=said):
        check({"provider": endless}, budget=100.0)
    with pytest.raises(UsageError, match=said):
        check({"provider": [cloud, endless]}, max_lifetime=3600.0)
    check({"provider": [cloud, endless]}, budget=100.0)  # such a pool rents no machines of `endless`
    monkeypatch.setenv("SKYPOOL_MAX_USD", "100")
    check({"provider": [cloud, endless]}, max_lifetime=3600.0)
    assert endless.count() == cloud.count() == 0


def test_a_machine_that_cannot_end_its_cost_is_never_handed_over(tmp_path: Path) -> None:
    cloud = cloud_at(tmp_path / "cloud", ends_itself=False)
    with pytest.raises(UsageError, match=r"machine i-0001 at fake cannot end its own cost"):
        RunAccount(rented(cloud, budget=None), CLAIM, 3600.0)


def test_a_run_is_not_handed_over_beside_a_machine_whose_end_is_not_proved(tmp_path: Path) -> None:
    supply = rented(cloud_at(tmp_path / "cloud"))
    [machine] = supply.rental.there
    supply.rental.has([replace(machine, id="i-0002", node=1)])
    with pytest.raises(SkypoolError, match=r"other machines, .* beside its own: i-0001, i-0002; `skypool down"):
        RunAccount(supply, CLAIM, 3600.0)


# --- the worst bill and the budget ---------------------------------------------------------------------------


@pytest.mark.parametrize("market", ["on-demand", "spot"])
@pytest.mark.parametrize("limit", ["budget", "SKYPOOL_MAX_USD"])
def test_a_run_costs_no_more_than_its_budget_whatever_its_price_does(
    limit: str, market: Market, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if limit == "SKYPOOL_MAX_USD":
        monkeypatch.setenv(limit, "90")
    supply = rented(cloud_at(tmp_path / "cloud"), budget=90.0 if limit == "budget" else None, market=market)
    account = handed(supply)
    run = record_of().run
    assert run is not None
    assert run.worst_usd == account.worst_usd
    assert run.worst_usd == pytest.approx(90.0, abs=0.01), "it is used up"
    assert run.worst_usd <= 90.0 + 1e-6
    price = 36.0 if market == "on-demand" else 18.0 * 1.25
    supply.rental.repriced({("fake", "i-0001"): price})
    dearest = record_of().receipt(account.latest)  # from now on
    assert dearest.usd == pytest.approx(90.0, abs=0.01)
    assert dearest.usd <= 90.0 + 1e-6
    assert record_of().worst <= 90.0 + 1e-6


def test_a_price_that_has_fallen_before_the_hand_over_may_rise_again(tmp_path: Path) -> None:
    supply = rented(cloud_at(tmp_path / "cloud"), budget=90.0, market="spot")
    supply.rental.repriced({("fake", "i-0001"): 6.0})
    account = handed(supply)
    assert account.latest - time.time() == pytest.approx(4 * 3600, abs=5), "as long as 22.50 USD an hour can be paid"
    assert account.worst_usd <= 90.0 + 1e-6
    assert account.limit == "budget"


@pytest.mark.parametrize("usd", [1.2, 0.75])
def test_a_budget_that_pays_for_no_run_without_a_client_is_refused(usd: float, tmp_path: Path) -> None:
    """A machine of 36 USD an hour costs 1.20 USD in the two minutes in which it may end."""
    supply = rented(cloud_at(tmp_path / "cloud"))
    supply.rental.limits.budget = sky.Budget(usd)
    with pytest.raises(BudgetExceeded, match=r"could then cost 1\.20 USD, .* the budget of .* raise the budget"):
        RunAccount(supply, CLAIM, 3600.0)
    assert record_of().run is None


def test_a_lifetime_that_ends_before_the_budget_is_the_written_end(tmp_path: Path) -> None:
    account = handed(rented(cloud_at(tmp_path / "cloud"), budget=90.0), 3600.0)
    assert account.left == pytest.approx(3600.0, abs=5)
    assert account.worst_usd == pytest.approx(36.0 * (3600 + ENDING) / 3600, rel=0.01)
    assert account.limit == "lifetime"


# --- machines that nobody knows ------------------------------------------------------------------------------


@pytest.fixture
def lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[FakeCloud, Supply]:
    """A cloud that has made a machine without an answer, and another one, which is known."""
    monkeypatch.setattr(launch, "_ATTEMPTS", 1)
    monkeypatch.setattr(supplies, "_LOOK", 0.1)
    places = [("north", "north-a", 36.0), ("south", "south-a", 37.0)]
    stock = [Stock("gpu-8", usd, "H100:8", region, zone) for region, zone, usd in places]
    cloud = FakeCloud(tmp_path / "cloud", stock, machines=False)
    cloud.control.lose_reply()
    cloud.control.refuse(AccessError, "describe")
    supply = rented(cloud)
    assert len(cloud.control.alive("machine")) == 2
    return cloud, supply


def test_a_machine_that_came_without_an_answer_is_ended_before_its_client_leaves(
    lost: tuple[FakeCloud, Supply],
) -> None:
    cloud, supply = lost
    cloud.control.refuse(AccessError, "describe")
    supply.end_lost()
    assert [each.id for each in cloud.instances(pool="train")] == [each.id for each in supply.rental.there]


def test_a_client_does_not_leave_while_it_is_not_known_if_there_is_another_machine(
    lost: tuple[FakeCloud, Supply], monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud, supply = lost
    monkeypatch.setattr(supplies, "LATE", 0.3)
    cloud.control.refuse(AccessError, "describe", times=None)
    with pytest.raises(ProviderError, match="fake did not answer an order, and does not say"):
        supply.end_lost()


def test_the_time_for_which_a_machine_stays_is_a_part_of_its_lifetime(cloud: FakeCloud) -> None:
    with pytest.raises(UsageError, match=r"keep= is a part of max_lifetime=, and leaves nothing of it"):
        check({"provider": cloud}, max_lifetime=60.0)
    check({"provider": cloud}, max_lifetime=61.0)
    assert cloud.count() == 0


# --- spot machines without a budget --------------------------------------------------------------------------


def test_a_spot_machine_needs_a_limit_of_its_price(cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    spot = {"provider": cloud, "market": "spot"}
    said = r"price of a spot machine may rise .* as by budget=20, or max_usd_per_hour=22\.5 for an hour"
    with pytest.raises(UsageError, match=said):
        check(spot, max_lifetime=3600.0)
    check({**spot, "max_usd_per_hour": 20.0}, max_lifetime=3600.0)
    check(spot, budget=100.0)
    check({"provider": cloud, "market": "on-demand"}, max_lifetime=3600.0)
    monkeypatch.setenv("SKYPOOL_MAX_USD", "100")
    check(spot, max_lifetime=3600.0)
    assert cloud.count() == 0


def test_a_spot_machine_whose_run_is_in_no_bucket_needs_a_word_for_that(cloud: FakeCloud, tmp_path: Path) -> None:
    spot = {"provider": cloud, "market": "spot"}
    said = r"is a spot machine, .* lost when it is taken back: .*save=.*s3://models/x.*, or add lossy=True"
    with pytest.raises(UsageError, match=said):
        check(spot, budget=100.0, lossy=False)
    check(spot, budget=100.0)
    check(spot, budget=100.0, lossy=False, buckets={"out": f"file://{tmp_path}"})
    check({"provider": cloud, "market": "on-demand"}, budget=100.0, lossy=False)
    with pytest.raises(UsageError, match=r"lossy=True is for runs that nobody watches; add detach=True"):
        WholeRun(Target.of(["train.py"]), Asked(spot, budget=100.0, lossy=True), _Printer())
    assert cloud.count() == 0


def test_the_worst_bill_without_a_budget_has_the_highest_price_that_was_asked_for(tmp_path: Path) -> None:
    supply = rented(cloud_at(tmp_path / "cloud"), budget=None, market="spot", max_usd_per_hour=20.0)
    assert supply._order(list(cloud_at(tmp_path / "cloud").offers(Need()))[1], (0,)).max_usd_per_hour == 20.0
    account = handed(supply, 3600.0)
    assert account.worst_usd == pytest.approx(20.0 * (3600 + ENDING) / 3600, rel=0.01)


def test_a_spot_machine_without_a_limit_of_its_price_is_never_handed_over(tmp_path: Path) -> None:
    supply = rented(cloud_at(tmp_path / "cloud"), budget=None, market="spot")
    with pytest.raises(UsageError, match="not handed over, as the price of a spot machine may rise"):
        RunAccount(supply, CLAIM, 3600.0)


# --- what is told --------------------------------------------------------------------------------------------


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """What `--json` tells: events and their fields."""
    told: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(Json, "_tell", lambda self, event, **fields: told.append((event, fields)))
    return told


@pytest.mark.parametrize(
    ("rent", "budget", "most"),
    [
        ({"market": "spot", "max_usd_per_hour": 20.0}, None, 20.0),
        ({"market": "spot", "max_usd_per_hour": 20.0}, 100.0, 20.0),
        ({"market": "spot"}, 100.0, 22.5),
        ({"market": "on-demand"}, None, 36.0),
        ({"market": "on-demand"}, 100.0, 36.0),
    ],
)
def test_a_dry_run_tells_the_worst_bill_of_a_run_without_a_client(
    rent: dict[str, Any],
    budget: float | None,
    most: float,
    cloud: FakeCloud,
    told: list[tuple[str, dict[str, Any]]],
) -> None:
    rent = {"provider": cloud, **rent}
    asked = Asked(rent, budget=budget, max_lifetime=3600.0, detach=True, keep=60.0, lossy=True)
    WholeRun(Target.of(["train.py"]), asked, Json()).check(dry_run=True)
    fields = dict(told)["plan"]
    assert fields["most_usd"] == pytest.approx(most * (3600 + ENDING) / 3600)


def test_lines_and_json_tell_the_worst_bill(
    capsys: pytest.CaptureFixture[str], told: list[tuple[str, dict[str, Any]]]
) -> None:
    tell = _Printer()
    tell.detached("train", 3600.0, 20.001, "~/heads")
    tell.detached("free", 3600.0, 0.0, "~/heads")
    tell.detached("train", 3600.0, 20.0 + 1e-9, "~/heads")
    tell.close()
    first, second, third = capsys.readouterr().err.splitlines()
    assert "which ends within 1:00 h and costs at most 20.01 USD in all; its output" in first
    assert "which ends within 1:00 h; its output" in second
    assert "costs at most 20.00 USD in all" in third
    Json().detached("train", 3600.0, 20.001, "~/heads")
    assert told == [("detached", {"pool": "train", "seconds": 3600.0, "worst_usd": 20.001, "folder": "~/heads"})]


# --- needs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["words", "env"])
def test_a_program_that_is_too_large_to_be_given_away_is_refused_before_anything_is_rented(
    where: str, cloud: FakeCloud
) -> None:
    large = "x" * (12 << 20)
    words, env = (["train.py", large], {}) if where == "words" else (["train.py"], {"LARGE": large})
    asked = Asked({"provider": cloud}, budget=100.0, detach=True, keep=60.0, env=env)
    with pytest.raises(UsageError, match=r"have 12,\d+,\d+ bytes, .* into a file of the project"):
        WholeRun(Target.of(words), asked, _Printer())
    WholeRun(Target.of(words), replace(asked, detach=False, keep=None), _Printer())


# --- with machines -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_program_on_a_spot_machine_is_stopped_before_the_end_that_its_budget_pays_for(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The budget pays for 45 s and more at the highest price, and for the time in which the machine ends."""
    monkeypatch.setattr(reaper, "SETTLING", 0.5)
    for module in (budgets, whole_run):
        monkeypatch.setattr(module, "START", 5.0)
    (folder / "train.py").write_text("import time\ntry:\n    time.sleep(600)\nfinally:\n    print('stopped')")
    name = f"spot-{secrets.token_hex(3)}"
    usd = (ENDING + 60.0) * 1.25 * 36.0 / 3600
    with FakeCloud(tmp_path / "cloud", [Stock(usd_per_hour=36.0, market="spot")]) as cloud:
        rent = {"provider": cloud, "market": "spot"}
        whole = WholeRun(
            Target.of(["train.py"]), Asked(rent, name=name, budget=usd, detach=True, keep=2.0, lossy=True), _Printer()
        )
        whole.check()
        assert whole.run() == 0
        run = record_of(name).run
        assert run is not None
        assert run.worst_usd <= usd + 1e-6
        [place] = (tmp_path / "cloud").glob(f"machines/*/home/.skypool/heads/{name}-1")
        eventually(lambda: stored.stored(place) is not None, 90, "the end of the run")
        status = stored.stored(place)
        assert status is not None
        assert (status.outcome, status.limit) == (Outcome.CANCELLED, "budget")
        assert status.ended < run.ends
        assert b"stopped" in (place / stored.OUTPUT / "1" / "0" / "0").read_bytes()
        eventually(lambda: all(each.state == "ended" for each in cloud.instances(pool=name)), 60, "its end")
        assert time.time() < run.latest
        reaper.terminate_all([cloud], name, Ledger.here())
