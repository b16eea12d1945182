"""The ledger of a run that is handed over: it only goes forward, whoever writes, and every command honours it."""

from __future__ import annotations

import itertools
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import skypool as sky
from skypool import clock
from skypool.cli.top_survey import Answer, view_of
from skypool.drivers.contract import Abilities
from skypool.errors import (
    AccessError,
    BudgetExceeded,
    LedgerError,
    PoolClosed,
    ProviderError,
    SkypoolError,
    TakenOver,
    UsageError,
)
from skypool.head.messages import folder_of, heir_digest
from skypool.head.states import Claim, Entry, Outcome
from skypool.head.states import Ledger as State
from skypool.head.steps import merged, seen, seen_ended
from skypool.model import Instance
from skypool.processes import Process
from skypool.rental import gc, ledger_damage, ledger_schema, supply
from skypool.rental.ledger import Ledger
from skypool.rental.records import Record, RunEnd, RunRecord
from skypool.rental.run_account import ENDING, RunAccount
from skypool.rental.run_state import state_of
from skypool.runs.ends_here import note_ends
from skypool.runs.stored import RunStatus, store
from skypool.testing import FakeCloud
from tests.conftest import eventually
from tests.handed_runs import cloud_at, handed, passed, record_of, rented, untils, write_row
from tests.test_ledger import change, rent

ROOT = Path(__file__).parent.parent
ENTRIES = [Entry(state, outcome) for state in State for outcome in (None, *Outcome)]
CLAIM = Claim("train")
Start = Callable[..., Any]


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def cloud(tmp_path: Path) -> FakeCloud:
    return cloud_at(tmp_path / "cloud")


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.sqlite3")


@pytest.fixture
def process() -> Iterator[Start]:
    """Starts a module of these tests with arguments, and waits for its first line."""
    made: list[subprocess.Popen[str]] = []

    def start(module: str, *args: object) -> Any:
        argv = [sys.executable, "-m", f"tests.{module}", *map(str, args)]
        made.append(subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        assert made[-1].stdout
        assert made[-1].stdout.readline()
        return made[-1]

    yield start
    for each in made:
        each.kill()
        each.communicate()


def begun(ledger: Ledger, name: str = "train", seconds: float = 3600.0) -> RunRecord:
    """A pool of this process with a machine at 3.6 USD/h, whose run is being handed over."""
    ledger.begin(name, name, lease=600, budget=sky.Budget(5))
    rent(ledger, name, "i-1")
    ends = time.time() + seconds
    ledger.hand_over(name, Claim(name), ends=ends, latest=ends + ENDING, worst_usd=4.0)
    return run_of(ledger, name)


def run_of(ledger: Ledger, session: str = "train") -> RunRecord:
    record = ledger.record(session)
    assert record is not None
    assert record.run is not None
    return record.run


def is_before(old: Entry, new: Entry) -> bool:
    """Return True if an entry may follow another one: nothing that was known is forgotten."""
    order = list(State)
    return order.index(old.state) <= order.index(new.state) and (old.outcome is None or new.outcome is not None)


# --- what is on record ---------------------------------------------------------------------------------------


def test_a_hand_over_is_on_record_with_its_claim_and_its_end(ledger: Ledger) -> None:
    run = begun(ledger)
    assert (run.claim, run.entry, run.worst_usd) == (Claim("train", 1), Entry(State.DETACHING), 4.0)
    assert run.latest - run.ends == pytest.approx(ENDING)
    ledger.mark("train", Entry(State.DETACHED))
    assert run_of(ledger).entry == Entry(State.DETACHED)
    ledger.mark("train", Entry(State.ENDED, Outcome.ENDED))
    (record,) = ledger.pools()
    assert (record.running, record.ended is not None, record.run and record.run.entry.outcome) == (
        (), True, Outcome.ENDED,
    )  # fmt: skip
    ledger.check()


def test_what_is_written_over_an_entry_is_merged_with_it(ledger: Ledger) -> None:
    begun(ledger)
    some = [each for each in ENTRIES if each.outcome in (None, Outcome.ENDED, Outcome.LOST)]
    for old, new in itertools.product(some, repeat=2):
        values = old.state.value, old.outcome and old.outcome.value
        change(ledger.file, "UPDATE runs SET state = ?, outcome = ?", *values)
        ledger.mark("train", new)
        assert run_of(ledger).entry == merged(old, new), (old, new)


def test_a_pool_of_today_has_no_run_and_nothing_is_written_for_it(ledger: Ledger) -> None:
    ledger.begin("p", "s", lease=600)
    ledger.mark("s", Entry(State.ENDED, Outcome.NOT_STARTED))
    (record,) = ledger.pools()
    assert (record.run, record.state(time.time())) == (None, "live")
    assert state_of(record, time.time()) is None


def test_the_end_of_a_run_only_comes_nearer(ledger: Ledger) -> None:
    run = begun(ledger)
    ledger.hand_over("train", CLAIM, ends=run.ends + 900, latest=run.latest + 900, worst_usd=9.0)
    assert run_of(ledger) == run
    ledger.hand_over("train", CLAIM, ends=run.ends - 900, latest=run.latest - 900, worst_usd=3.0)
    assert run_of(ledger) == replace(run, ends=run.ends - 900, latest=run.latest - 900, worst_usd=3.0)


def test_a_run_is_not_handed_over_by_a_process_that_may_not(ledger: Ledger, tmp_path: Path) -> None:
    run = begun(ledger)
    times: dict[str, Any] = {"ends": run.ends, "latest": run.latest, "worst_usd": 4.0}
    with pytest.raises(LedgerError, match="of generation 1 of run 'train', and not of generation 2"):
        ledger.hand_over("train", Claim("train", 2), **times)
    with pytest.raises(LedgerError, match="no record of this pool"):
        ledger.hand_over("nobody", CLAIM, **times)
    with pytest.raises(LedgerError, match="cannot be written"):
        (tmp_path / "file").write_text("")
        Ledger(tmp_path / "file" / "ledger.sqlite3").hand_over("train", CLAIM, **times)
    change(ledger.file, "UPDATE pools SET pid = pid + 1")
    with pytest.raises(TakenOver, match="was taken over by"):
        ledger.hand_over("train", CLAIM, **times)
    ledger.ending("train")
    with pytest.raises(PoolClosed, match="is being ended by another process"):
        ledger.hand_over("train", CLAIM, **times)


def test_a_ledger_of_the_version_before_gets_the_table_and_the_older_skypool_refuses_it(tmp_path: Path) -> None:
    file = tmp_path / "ledger.sqlite3"
    before = ledger_schema.SHAPE - 1
    book = sqlite3.connect(file, isolation_level=None)
    for n, step in enumerate(ledger_schema.STEPS[:before]):
        mark = f"PRAGMA user_version = {n + 1}; PRAGMA application_id = {ledger_damage.MARK + n + 1};"
        book.executescript(f"{step} {mark}")
    me = Process.this()
    row = (
        "s",
        "train",
        me.host,
        me.pid,
        me.birth,
        1.0,
        time.time(),
        600.0,
        None,
        None,
        "[]",
        None,
        None,
        "",
        0,
        None,
        None,
    )
    book.execute(f"INSERT INTO pools VALUES ({', '.join('?' * len(row))})", row)
    run = "old", "train", 1, "ended", "ended", 1.0, 2.0, 3.0, 4.0, "", None, "a file"
    book.execute(f"INSERT INTO pools VALUES ({', '.join('?' * len(row))})", ("old", *row[1:11], 2.0, 2.0, *row[13:]))
    book.execute(f"INSERT INTO runs VALUES ({', '.join('?' * len(run))})", run)
    book.close()
    file.chmod(0o600)
    ledger = Ledger(file)
    (record, old) = ledger.pools()
    assert old.run is not None
    assert old.run.end == RunEnd(Outcome.ENDED, unsaved="a file")
    assert (record.pool, record.run) == ("train", None)
    ledger.hand_over("s", CLAIM, ends=time.time() + 60, latest=time.time() + 120, worst_usd=1.0)
    assert run_of(ledger, "s").entry == Entry(State.DETACHING)
    ledger.check()
    assert ledger_damage.examine(file, before, [], 1.0) is None, "a newer file is not damaged for an older skypool"
    with sqlite3.connect(file) as book:
        assert ledger_damage.version(book) > before
    book.close()


def test_an_entry_that_cannot_be_written_is_written_with_the_next_one(ledger: Ledger) -> None:
    told: list[str] = []
    mine = Ledger(ledger.file, told.append)
    begun(mine)
    folder = ledger.file.with_name("elsewhere")
    ledger.file.rename(folder)
    ledger.file.mkdir()
    mine.mark("train", Entry(State.DETACHED))
    assert len(told) == 1
    ledger.file.rmdir()
    folder.rename(ledger.file)
    assert run_of(ledger).entry == Entry(State.DETACHING)
    mine.mark("train", Entry(State.DETACHED, Outcome.FAILED))
    assert run_of(ledger).entry == Entry(State.DETACHED, Outcome.FAILED)


@pytest.mark.parametrize(
    "change_of", ["state = 'gone'", "outcome = 'fine'", "ends = 'soon'", "latest = -1", "generation = -1"]
)
def test_a_value_that_skypool_never_writes_is_damage(ledger: Ledger, change_of: str) -> None:
    begun(ledger)
    change(ledger.file, f"UPDATE runs SET {change_of}")
    told: list[str] = []
    assert Ledger(ledger.file, told.append).pools() == []
    assert "was damaged" in told[0]


# --- several processes ---------------------------------------------------------------------------------------


def test_it_only_goes_forward_while_processes_write_at_once(ledger: Ledger, process: Start) -> None:
    sessions = [f"run-{n}" for n in range(8)]
    for each in sessions:
        begun(ledger, each)
    words = (["detaching", "detached"], ["detached", "ended:lost"], ["detached:interrupted", "ended:ended"])
    writers = [process("run_writers", ledger.file, ",".join(sessions), *each) for each in words]
    for each in writers:
        print(file=each.stdin, flush=True)
    last = dict.fromkeys(sessions, Entry(State.DETACHING))
    while any(each.poll() is None for each in writers):
        for record in ledger.pools():
            assert record.run is not None
            assert is_before(last[record.pool], record.run.entry)
            last[record.pool] = record.run.entry
    assert [each.returncode for each in writers] == [0, 0, 0]
    for each in sessions:
        entry = run_of(ledger, each).entry
        assert is_before(last[each], entry)
        assert (entry.state, entry.outcome in (Outcome.ENDED, Outcome.INTERRUPTED)) == (State.ENDED, True)


def test_a_writer_that_is_killed_leaves_whole_entries(ledger: Ledger, process: Start) -> None:
    sessions = [f"run-{n}" for n in range(12)]
    for each in sessions:
        begun(ledger, each)
    writer = process("run_writers", ledger.file, ",".join(sessions), "detached", "ended:lost", "ended:failed")
    print(file=writer.stdin, flush=True)
    for _ in range(3):
        assert writer.stdout.readline()
    writer.kill()
    writer.communicate()
    ledger.check()
    steps = [Entry(State.DETACHING), Entry(State.DETACHED), Entry(State.ENDED, Outcome.LOST)]
    steps.append(Entry(State.ENDED, Outcome.FAILED))
    found = [steps.index(run_of(ledger, each).entry) for each in sessions]
    assert found == sorted(found, reverse=True)
    assert found[:3] == [3, 3, 3]
    assert sum(0 < each < 3 for each in found) <= 1, "the others were written whole or not at all"
    for record in ledger.pools():  # the account is closed with the entry
        assert record.run is not None
        assert (record.ended is not None, not record.running) == (record.run.entry.state is State.ENDED,) * 2


# --- names, takeovers and caps -------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", [Entry(State.DETACHED), Entry(State.DETACHED, Outcome.FAILED)])
def test_a_name_is_taken_while_its_run_has_a_machine(ledger: Ledger, entry: Entry) -> None:
    begun(ledger)
    ledger.mark("train", entry)
    with pytest.raises(UsageError, match=r"a run called 'train' (goes on on its machine|is over, and its machine may)"):
        ledger.begin("train", "next", lease=600)
    with pytest.raises(UsageError, match="belongs to its machine, or was just given to it, so no process can take"):
        ledger.adopt("train")
    ledger.mark("train", Entry(State.ENDED, Outcome.LOST))
    ledger.begin("train", "next", lease=600)


def test_a_run_whose_client_died_while_it_was_handed_over_is_not_taken_over(ledger: Ledger) -> None:
    begun(ledger)
    change(ledger.file, "UPDATE pools SET birth = 'another', beat = beat - 700")
    (record,) = ledger.pools()
    assert (record.state(time.time()), record.client_lives(time.time())) == ("detached", False)
    with pytest.raises(UsageError, match="no process can take it over"):
        ledger.adopt("train")
    with pytest.raises(UsageError, match="goes on on its machine"):
        ledger.begin("train", "next", lease=600)
    change(ledger.file, "UPDATE runs SET latest = ends - 7200")
    ledger.begin("train", "next", lease=600)


def test_the_worst_bill_of_a_run_counts_as_spent(cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYPOOL_MAX_USD", "100")
    handed(cloud, seconds=3600.0, budget=90.0)
    worst = record_of().worst
    assert worst == pytest.approx(36.0 * (3600 + ENDING) / 3600, rel=0.01), "until the latest end, not the budget"
    rented(cloud, "second", None)
    second = record_of("second").budget
    assert second is not None
    assert second.max_usd == pytest.approx(100 - worst)
    with pytest.raises(BudgetExceeded, match=r"second .*, train \(37\.\d\d USD\)"):
        rented(cloud, "third", None)
    Ledger.here().mark(record_of().session, Entry(State.ENDED, Outcome.ENDED))
    rented(cloud, "third", None)


def test_the_worst_bill_has_the_highest_price_of_a_spot_machine(cloud: FakeCloud) -> None:
    rental = rented(cloud, market="spot").rental
    assert rental.worst_until(clock.now() + 3600) == pytest.approx(18.0 * 1.25, rel=0.01)
    change(Ledger.here().file, "UPDATE instances SET billed_from = NULL")
    assert rental.worst_until(clock.now() + 3600) == pytest.approx(18.0 * 1.25, rel=0.01)
    change(Ledger.here().file, "UPDATE instances SET usd_per_hour = 9.0")
    assert rental.worst_until(clock.now() + 3600) == pytest.approx(18.0 * 1.25, rel=0.01), "it may rise again"


def test_a_machine_is_not_charged_beyond_the_end_of_its_run(cloud: FakeCloud) -> None:
    account = handed(cloud)
    worst = record_of().worst
    passed(cloud, 10 * 3600.0)
    record = record_of()
    assert sum(each.usd for each in record.lines) == pytest.approx(worst, rel=1e-3)
    assert record.receipt(time.time()).usd == pytest.approx(worst, rel=1e-3)
    assert account.left > 0


# --- the tags ------------------------------------------------------------------------------------------------


def test_the_tags_have_the_end_of_the_run_and_no_renewal_changes_that(cloud: FakeCloud) -> None:
    made = rented(cloud)
    account = RunAccount(made, CLAIM, 60.0)
    account.write(Entry(State.DETACHING))
    account.renew_tags()
    (until,) = set(untils(cloud))
    assert 0 <= until.timestamp() - account.latest < 2, "also where the lease is longer than the run"
    made.renew()
    assert set(untils(cloud)) == {until}


def test_a_tag_that_cannot_be_written_is_an_error(cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    account = RunAccount(rented(cloud), CLAIM, 3600.0)
    cloud.control.refuse(AccessError, "tag")
    with pytest.raises(AccessError):
        account.renew_tags()
    account.renew_tags()
    monkeypatch.setattr(supply, "_TO_SHOW", 0.0)
    cloud.control.refuse(AccessError, "describe")
    with pytest.raises(AccessError):
        account.renew_tags()
    cloud.control.kill(cloud.instances(pool="train")[0])
    with pytest.raises(ProviderError, match="does not list i-0001 as needed until"):
        account.renew_tags()


class Forgetful(FakeCloud):
    """A cloud that takes new tags, and keeps the old ones."""

    def renew(self, pool: str, until: datetime) -> None:
        pass


def test_a_tag_that_the_provider_does_not_show_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supply, "_TO_SHOW", 0.0)
    forgetful = Forgetful(cloud_at(tmp_path / "cloud").state, machines=False)
    with pytest.raises(ProviderError, match="does not list i-0001 as needed until"):
        RunAccount(rented(forgetful), CLAIM, 3600.0).renew_tags()


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_a_run_is_handed_over_with_an_end(cloud: FakeCloud, seconds: float) -> None:
    with pytest.raises(UsageError, match="a positive number of seconds"):
        RunAccount(rented(cloud), CLAIM, seconds)


# --- gc ------------------------------------------------------------------------------------------------------


def swept(cloud: FakeCloud, ledger: Ledger | None) -> list[str]:
    """End what is lost, as `skypool gc --yes` does, and return what the ledger closes."""
    found = gc.survey([cloud], ledger)
    doomed = [each for each in found.found if each.verdict == "lost"]
    gc.terminate_found(doomed)
    return gc.reconcile(ledger, found, doomed) if ledger is not None else []


@pytest.mark.parametrize("has_ledger", [True, False], ids=["ledger", "tags alone"])
@pytest.mark.parametrize("how_far", [State.DETACHING, State.DETACHED])
def test_gc_ends_a_run_after_its_end_and_not_before(
    cloud: FakeCloud, has_ledger: bool, how_far: State, process: Start
) -> None:
    client = process("handed_runs", cloud.state, "train", how_far.value)
    client.kill()
    client.communicate()
    ledger = Ledger.here() if has_ledger else None
    for _ in range(5):  # 0, 15, 30, 45, 60 minutes after the hand-over
        assert swept(cloud, ledger) == []
        assert (cloud.count("machine"), cloud.count()) == (1, 3)
        passed(cloud, 900.0)
    passed(cloud, ENDING + gc.GRACE + 5.0 - 900.0)
    swept(cloud, ledger)
    assert cloud.count() == 0
    swept(cloud, Ledger.here())
    record = record_of()
    assert (record.ended is not None, record.running) == (True, ())
    assert record.run is not None
    assert record.run.entry == Entry(State.ENDED, Outcome.LOST)


@given(
    entry=st.builds(Entry, st.sampled_from([State.DETACHING, State.DETACHED]), st.sampled_from([None, *Outcome])),
    client=st.sampled_from([Process.this(), replace(Process.this(), birth="another")]),
    ending=st.none() | st.just(0.0),
    beat=st.floats(-9000, 0),
    tag=st.none() | st.floats(-9000, 9000),
    renews=st.booleans(),
    later=st.floats(-3600, 3600),
)
def test_no_machine_is_lost_before_the_end_of_its_run_and_each_one_after_it(
    entry: Entry, client: Process, ending: float | None, beat: float, tag: float | None, renews: bool, later: float
) -> None:
    end = 1e9
    run = RunRecord(CLAIM, entry, end - 3600, end - ENDING, end, 1.0)
    known = Record("p", "s", client, end - 3600, end + beat, 600.0, None, ending, None, "", (), (), (), run=run)
    until = None if tag is None else datetime.fromtimestamp(end + tag, UTC)
    machine = Instance("fake", "i-1", "p", 0, token="s-0", until=until)
    ((_, verdict, _),) = gc.judged([machine], renews, [known], end + later)
    if later <= gc.GRACE:
        assert verdict == "live"
    elif until is None or tag is None or tag + gc.GRACE < later:
        assert verdict == ("live" if known.client_lives(end + later) else "lost")


def test_gc_closes_a_run_that_ended_early_and_removes_what_it_leaves_at_once(cloud: FakeCloud) -> None:
    handed(cloud)
    passed(cloud, 900.0)
    cloud.control.kill(cloud.instances(pool="train")[0])
    assert cloud.count("key-pair") == 1
    assert swept(cloud, None) == []
    assert cloud.count("key-pair") == 1, "without a ledger, a machine may be about to come"
    assert swept(cloud, Ledger.here()) == ["train"]
    assert cloud.count() == 0
    record = record_of()
    assert record.run is not None
    assert record.run.entry == Entry(State.ENDED, Outcome.LOST)
    assert record.receipt(time.time()).usd == pytest.approx(9.0, rel=0.02), "until its end was seen"


class Near(FakeCloud):
    """A cloud that may have machines which this client does not see, as the own computer has in containers."""

    @property
    def abilities(self) -> Abilities:
        return replace(super().abilities, lists_all=False)


def test_a_run_whose_machine_may_not_be_seen_is_closed_when_it_is_over(cloud: FakeCloud) -> None:
    near = Near(cloud.state, machines=False)
    handed(near)
    passed(near, 60.0)
    near.control.kill(near.instances(pool="train")[0])
    assert swept(near, Ledger.here()) == []
    Ledger.here().mark(record_of().session, Entry(State.DETACHED, Outcome.ENDED))
    assert swept(near, Ledger.here()) == ["train"]


def test_the_end_that_a_run_has_stored_on_this_computer_is_recorded(cloud: FakeCloud, state: Path) -> None:
    handed(cloud)
    passed(cloud, 900.0)
    note_ends(Ledger.here())
    assert run_of(Ledger.here(), record_of().session).entry == Entry(State.DETACHED)
    folder = Path(folder_of(str(state / "skypool"), CLAIM))
    write_row(folder, CLAIM)
    status = RunStatus(CLAIM, Outcome.FAILED, 1, 1, time.time() - 60)
    store(folder, replace(status, claim=Claim("train", 2)))
    note_ends(Ledger.here())
    assert run_of(Ledger.here(), record_of().session).entry == Entry(State.DETACHED), "it is of another generation"
    (folder / "status.json").write_text("{")
    note_ends(Ledger.here())
    (folder / "status.json").unlink()
    store(folder, status)
    note_ends(Ledger.here())
    run = run_of(Ledger.here(), record_of().session)
    assert run.entry == Entry(State.DETACHED, Outcome.FAILED)
    assert run.at == pytest.approx(status.ended)
    with pytest.raises(UsageError, match="is over, and its machine may still be there"):
        rented(cloud)
    Ledger.here().mark(record_of().session, lambda entry: seen_ended(entry, None))
    assert run_of(Ledger.here(), record_of().session) == replace(run, entry=Entry(State.ENDED, Outcome.FAILED))


@pytest.mark.parametrize("row", [None, "of an earlier run"])
def test_an_end_on_this_computer_that_is_of_another_run_of_that_name_is_not_believed(
    cloud: FakeCloud, state: Path, row: str | None
) -> None:
    handed(cloud)
    passed(cloud, 900.0)
    folder = Path(folder_of(str(state / "skypool"), CLAIM))
    store(folder, RunStatus(CLAIM, Outcome.ENDED, 0, 1, time.time()))
    if row is not None:
        write_row(folder, CLAIM, heir_digest(row))
    note_ends(Ledger.here())
    assert run_of(Ledger.here(), record_of().session).entry == Entry(State.DETACHED)
    (folder / "row.json").unlink(missing_ok=True)
    write_row(folder, CLAIM)
    note_ends(Ledger.here())
    assert run_of(Ledger.here(), record_of().session).entry == Entry(State.DETACHED, Outcome.ENDED)


def test_a_run_on_this_computer_was_interrupted_if_that_was_rebooted_since(cloud: FakeCloud, state: Path) -> None:
    handed(cloud)
    folder = Path(folder_of(str(state / "skypool"), CLAIM))
    write_row(folder, CLAIM)
    note_ends(Ledger.here())
    assert run_of(Ledger.here(), record_of().session).entry == Entry(State.DETACHED)
    (folder / "row.json").unlink()
    write_row(folder, CLAIM, boot="an earlier one")
    note_ends(Ledger.here())
    assert run_of(Ledger.here(), record_of().session).entry == Entry(State.DETACHED, Outcome.INTERRUPTED)


def test_the_ledger_keeps_all_that_a_run_has_stored_of_its_end(ledger: Ledger) -> None:
    begun(ledger)
    ledger.mark("train", Entry(State.DETACHED, Outcome.INTERRUPTED))
    assert run_of(ledger).end == RunEnd(Outcome.INTERRUPTED)
    status = RunStatus(CLAIM, Outcome.CANCELLED, 130, 2, time.time(), 1.5, "budget", "it was slow", "", ())
    ledger.mark("train", Entry(State.DETACHED, Outcome.CANCELLED), status.ended, end=status.end)
    assert run_of(ledger).end == status.end
    ledger.mark("train", Entry(State.DETACHED, Outcome.CANCELLED), end=RunEnd(Outcome.CANCELLED, why="less is known"))
    ledger.mark("train", lambda entry: seen_ended(entry, None))
    assert run_of(ledger).end == status.end
    ledger.mark("train", Entry(State.ENDED, Outcome.ENDED), end=RunEnd(Outcome.ENDED, 0, 1))
    assert run_of(ledger).end == status.end, "the first end of a machine that is gone stays"
    ledger.check()


@pytest.mark.parametrize("wrong", [{"returncode": -1}, {"returncode": 1 << 70}, {"attempts": -1}, {"usd": "nan"}])
def test_an_end_that_the_ledger_cannot_keep_is_no_end(wrong: dict[str, object]) -> None:
    said = RunStatus(CLAIM, Outcome.ENDED, 0, 1, 7e12, 1.0).to_json()
    assert RunStatus.from_json(said).end.ended == 7e9
    with pytest.raises(SkypoolError, match="the status of a run is not valid"):
        RunStatus.from_json({**said, **wrong})


def test_the_time_at_which_a_machine_was_seen_never_goes_back(ledger: Ledger) -> None:
    begun(ledger)
    assert run_of(ledger).seen is None
    ledger.mark("train", Entry(State.DETACHED), seen=2e9)
    at = run_of(ledger).at
    ledger.mark("train", Entry(State.DETACHED), seen=1e9)
    assert (run_of(ledger).seen, run_of(ledger).at) == (2e9, at)
    ledger.mark("train", Entry(State.DETACHED), seen=3e9)
    assert (run_of(ledger).seen, run_of(ledger).at) == (3e9, at), "the state is as old as before"
    ledger.mark("train", Entry(State.DETACHED, Outcome.ENDED), 0.0)
    assert (run_of(ledger).seen, run_of(ledger).at) == (3e9, at), "no run ends before it was handed over"


def test_gc_keeps_the_keys_of_another_pool_of_that_name(cloud: FakeCloud) -> None:
    handed(cloud)
    Ledger.here().mark(record_of().session, Entry(State.ENDED, Outcome.ENDED))
    cloud.control.kill(cloud.instances(pool="train")[0])
    cloud.renew("train", datetime.fromtimestamp(time.time() + 300, UTC))  # as another computer has made them just now
    assert [each.verdict for each in gc.survey([cloud], Ledger.here()).found] == ["live", "live"]


def test_an_outcome_that_is_known_is_kept_when_the_machine_is_gone(cloud: FakeCloud) -> None:
    handed(cloud)
    ledger, session = Ledger.here(), record_of().session
    ledger.mark(session, Entry(State.DETACHED, Outcome.ENDED))
    cloud.control.kill(cloud.instances(pool="train")[0])
    passed(cloud, 60.0)
    assert swept(cloud, ledger) == ["train"]
    assert run_of(ledger, session).entry == Entry(State.ENDED, Outcome.ENDED)
    ledger.mark(session, lambda entry: seen_ended(entry, Outcome.FAILED))
    assert run_of(ledger, session).entry.outcome is Outcome.ENDED


def test_what_another_command_has_seen_is_written_by_a_function_of_the_entry(ledger: Ledger) -> None:
    begun(ledger)
    ledger.mark("train", lambda entry: seen(entry, is_committed=False))
    assert run_of(ledger).entry == Entry(State.DETACHING)
    ledger.mark("train", lambda entry: seen(entry, is_committed=True))
    assert run_of(ledger).entry == Entry(State.DETACHED)
    ledger.mark("train", lambda entry: seen_ended(entry, None))
    assert run_of(ledger).entry == Entry(State.ENDED, Outcome.LOST)
    ledger.mark("train", lambda entry: seen_ended(entry, Outcome.ENDED))
    assert run_of(ledger).entry == Entry(State.ENDED, Outcome.ENDED)


def test_a_second_ctrl_c_starts_no_process_that_ends_a_machine_of_a_run(state: Path) -> None:
    with sky.ComputePool(name="given", slots=1, console="off") as pool:
        engine = pool._sender.working()
        engine.life.given_away = frozenset({0})
        engine.hand_over_now()
        assert not (state / "skypool" / "reaper").exists()
        engine.life.given_away = None
        engine.hand_over_now()
        assert (state / "skypool" / "reaper").exists()
        eventually(lambda: record_of("given").ended is not None, 60, "the end of the machine")


# --- the state of a run --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "after", "word", "why"),
    [
        (Entry(State.DETACHING), 0, "starting", "hands it over to its machine"),
        (Entry(State.DETACHED), 0, "running", "its machine ends at"),
        (Entry(State.DETACHED), 3610, "draining", "its end has come"),
        (Entry(State.DETACHED), 3600 + ENDING + 10, "lost", "nothing says what it did; its machine ends itself"),
        (Entry(State.DETACHED, Outcome.ENDED), 0, "ended", "`skypool down train` ends it now"),
        (Entry(State.DETACHED, Outcome.FAILED), 4000, "failed", "and `skypool gc` proves that it has"),
        (Entry(State.ENDED, Outcome.ENDED), 0, "ended", "its program has ended by itself"),
        (Entry(State.ENDED, Outcome.CANCELLED), 0, "cancelled", "a user, its budget or its lifetime has stopped it"),
        (Entry(State.ENDED, Outcome.INTERRUPTED), 0, "interrupted", "rebooted"),
        (Entry(State.ENDED, Outcome.LOST), 0, "lost", "nothing says what the run did"),
        (Entry(State.ENDED, Outcome.NOT_STARTED), 0, "failed", "never started"),
    ],
)  # fmt: skip
def test_a_run_has_one_state_and_a_reason(ledger: Ledger, entry: Entry, after: float, word: str, why: str) -> None:
    begun(ledger)
    ledger.mark("train", entry)
    (record,) = ledger.pools()
    found = state_of(record, time.time() + after)
    assert found is not None
    assert (found.word, why in found.why) == (word, True), found.why
    assert found.since <= time.time() + after


def test_a_run_whose_client_died_in_between_says_what_is_not_known(ledger: Ledger) -> None:
    begun(ledger)
    change(ledger.file, "UPDATE pools SET birth = 'another'")
    (record,) = ledger.pools()
    found = state_of(record, time.time())
    assert found is not None
    assert (found.word, "it is not known if its machine had taken it over" in found.why) == ("starting", True)
    later = state_of(record, time.time() + 4000)
    assert later is not None
    assert later.word == "lost"


def test_top_shows_the_state_of_a_run_and_why(ledger: Ledger) -> None:
    begun(ledger)
    ledger.mark("train", Entry(State.DETACHED))
    (record,) = ledger.pools()
    view = view_of(record, Answer(), time.time())
    assert (view.state, view.nodes, view.left) == ("running", 1, None)
    assert "its machine ends at" in view.notes[0]


def test_every_entry_has_a_state(ledger: Ledger) -> None:
    begun(ledger)
    (record,) = ledger.pools()
    assert record.run is not None
    for entry, after, ended in itertools.product(ENTRIES, (0.0, 3610.0, 9000.0), (None, time.time())):
        found = state_of(replace(record, run=replace(record.run, entry=entry), ended=ended), time.time() + after)
        assert found is not None
        if entry.outcome is None and (ended is not None or entry.state is State.ENDED):
            assert found.word == "lost"
