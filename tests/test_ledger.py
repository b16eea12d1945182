"""The ledger: what was rented is on record, whoever dies, and what cannot be written is told before money is spent."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool.drivers import registry
from skypool.errors import LedgerError, PoolClosed, UsageError
from skypool.model import Instance, Need, Offer
from skypool.processes import Process, is_stopped
from skypool.rental import ledger_damage, ledger_file, ledger_schema
from skypool.rental.ledger import Ledger
from skypool.testing import FakeCloud
from tests.conftest import eventually

ROOT = Path(__file__).parent.parent
OFFER = Offer("fake", "gpu", "north", "north-a", "on-demand", 3.6, least_billed=60.0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "state" / "ledger.sqlite3"


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def ledger(file: Path, told: list[str]) -> Ledger:
    return Ledger(file, told.append)


def machine(id: str, node: int = 0) -> Instance:
    return Instance("fake", id, "p", node, offer=OFFER)


def rent(ledger: Ledger, session: str, *ids: str, token: str = "") -> None:
    ledger.intend(session, token or f"{session}-0", OFFER, range(len(ids)))
    ledger.rented(session, token or f"{session}-0", [machine(id, node) for node, id in enumerate(ids)])


def change(file: Path, sql: str, *values: object) -> None:
    """What no method of the ledger does: time passes, a pid is used again."""
    with sqlite3.connect(file) as book:
        book.execute(sql, values)
    book.close()


def python(code: str, *args: object, **more: Any) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", textwrap.dedent(code), *map(str, args)]
    return subprocess.Popen(argv, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more)


def said(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=60)
    assert process.returncode in (0, -signal.SIGKILL), err
    return out


# --- the life of a pool on record ----------------------------------------------------------------------------


def test_a_pool_is_on_record_from_its_intent_to_its_receipt(ledger: Ledger) -> None:
    ledger.begin("p", "s", lease=600, budget=sky.Budget(5), drivers=[sky.Local()])
    ledger.intend("s", "s-0", OFFER, (0, 1))
    (intent,) = ledger.open_orders("s")
    assert (intent.token, intent.provider, intent.type, intent.place, intent.nodes) == (
        "s-0", "fake", "gpu", "north-a", (0, 1),
    )  # fmt: skip
    ledger.rented("s", "s-0", [machine("i-1"), machine("i-2", 1)])
    assert ledger.open_orders("s") == ()
    assert ledger.rate("s") == pytest.approx(7.2)
    ledger.ended("s", "fake", "i-1")
    assert ledger.rate("s") == pytest.approx(3.6)
    (record,) = ledger.pools()
    assert (record.pool, record.budget, record.state(time.time())) == ("p", sky.Budget(5), "live")
    assert [each.id for each in record.running] == ["i-2"]
    ledger.ended("s", "fake", "i-2")
    ledger.end("s", "the budget is spent")
    (record,) = ledger.pools("p")
    assert (record.state(time.time()), record.error) == ("ended", "the budget is spent")
    assert ledger.spent("s") == pytest.approx(2 * 60 / 3600 * 3.6), "a minute is charged at least"


def test_what_ended_costs_nothing_more(ledger: Ledger, file: Path) -> None:
    ledger.begin("p", "s", lease=600)
    rent(ledger, "s", "i-1", "i-2")
    change(file, "UPDATE instances SET launched = launched - 3600, billed_from = billed_from - 3600")
    ledger.ended("s", "fake", "i-1")
    now = time.time()
    later = ledger.receipt("s", now + 3600)
    assert [each.usd for each in later.lines] == [pytest.approx(3.6, rel=1e-3), pytest.approx(7.2, rel=1e-3)]
    assert later.usd_per_hour == 3.6


def test_an_order_that_was_refused_is_no_open_one(ledger: Ledger) -> None:
    ledger.begin("p", "s", lease=600)
    ledger.intend("s", "s-0", OFFER, (0,))
    ledger.refused("s", "s-0", "out of stock")
    assert ledger.open_orders("s") == ()
    assert ledger.receipt("s").lines == ()


def test_open_pools_are_those_that_run_or_have_left_something(ledger: Ledger) -> None:
    for name in ("runs", "over", "machine-left", "order-left"):
        ledger.begin(name, f"s-{name}", lease=600)
    rent(ledger, "s-over", "i-1")
    ledger.ended("s-over", "fake", "i-1")
    ledger.end("s-over")
    rent(ledger, "s-machine-left", "i-2")
    ledger.end("s-machine-left")
    ledger.intend("s-order-left", "s-order-left-0", OFFER, (0,))
    ledger.end("s-order-left")
    assert [each.pool for each in ledger.open_pools()] == ["runs", "machine-left", "order-left"]
    assert [each.pool for each in ledger.pools() if each.state(time.time()) == "ended"] == ["over"]


def test_a_machine_without_an_offer_costs_what_was_ordered(ledger: Ledger) -> None:
    ledger.begin("p", "s", lease=600)
    ledger.intend("s", "s-0", OFFER, (0, 1))
    ledger.rented(
        "s",
        "s-0",
        [replace(machine("i-1"), offer=None), replace(machine("i-2", 1), offer=replace(OFFER, zone="north-b"))],
    )
    assert [(each.place, each.usd_per_hour) for each in ledger.receipt("s").lines] == [
        ("north-a", 3.6),
        ("north-b", 3.6),
    ]


@pytest.mark.parametrize("offer", [replace(OFFER, hosts=2), None], ids=["with its offer", "without"])
def test_a_slice_costs_once_whatever_becomes_of_its_hosts(ledger: Ledger, offer: Offer | None) -> None:
    ledger.begin("p", "s", lease=600)
    ledger.intend("s", "s-0", replace(OFFER, hosts=2), (0, 1, 2, 3))
    hosts = [Instance("fake", f"i-{n}", "p", n, offer=offer, slice=f"s-{n // 2}") for n in range(4)]
    ledger.rented("s", "s-0", hosts)
    assert ledger.rate("s") == pytest.approx(2 * 3.6)
    assert [line.usd_per_hour for line in ledger.receipt("s").lines] == [pytest.approx(1.8)] * 4
    ledger.ended("s", "fake", "i-0", "i-1", "i-2", "i-3")
    assert ledger.spent("s") == pytest.approx(2 * 0.06)  # a minute at least, of each slice


def test_what_is_not_known_is_empty(ledger: Ledger) -> None:
    assert ledger.pools() == []
    assert ledger.record("s") is None
    assert ledger.receipt("s").usd == 0
    assert ledger.open_orders("s") == ()


# --- whose a name is -----------------------------------------------------------------------------------------


def test_a_name_is_taken_while_its_pool_lives(ledger: Ledger) -> None:
    ledger.begin("p", "s1", lease=600)
    with pytest.raises(
        UsageError, match=rf"'p' already exists and is run by process {os.getpid()} on .*skypool down p"
    ):
        ledger.begin("p", "s2", lease=600)
    ledger.begin("q", "s3", lease=600)
    ledger.end("s1")
    ledger.begin("p", "s4", lease=600)


def test_a_name_is_taken_while_machines_of_a_dead_client_may_be_taken_over(ledger: Ledger, file: Path) -> None:
    ledger.begin("p", "s1", lease=600)
    change(file, "UPDATE pools SET birth = 'another'")  # the pid is used again: it is not that process
    ledger.begin("p", "s2", lease=600)  # it had rented nothing
    rent(ledger, "s2", "i-1")
    change(file, "UPDATE pools SET birth = 'another'")
    assert ledger.pools("p")[-1].state(time.time()) == "left"
    with pytest.raises(UsageError, match=r"left behind by process .*ComputePool.attach\('p'\)"):
        ledger.begin("p", "s3", lease=600)
    change(file, "UPDATE pools SET beat = beat - 601")
    ledger.begin("p", "s3", lease=600)


def test_a_pool_of_another_host_lives_while_it_is_heard_of(ledger: Ledger, file: Path) -> None:
    ledger.begin("p", "s", lease=600)
    change(file, "UPDATE pools SET host = 'elsewhere'")
    (record,) = ledger.pools()
    assert record.client.lives() is None
    assert record.client_lives(time.time() + 599)
    assert not record.client_lives(time.time() + 601)


def test_of_processes_that_begin_the_same_pool_at_once_one_gets_it(file: Path) -> None:
    code = """
        import os, sys, time
        from pathlib import Path
        from skypool.errors import UsageError
        from skypool.rental.ledger import Ledger
        while not os.path.exists(sys.argv[1] + ".go"):
            time.sleep(0.001)
        try:
            Ledger(Path(sys.argv[1])).begin("p", sys.argv[2], lease=600)
            print("mine")
            sys.stdout.flush()
            sys.stdin.read()
        except UsageError as e:
            print(e)
    """
    racers = [python(code, file, f"s{n}", stdin=subprocess.PIPE) for n in range(6)]
    file.parent.mkdir()
    Path(f"{file}.go").touch()
    lines = [racer.stdout.readline() for racer in racers if racer.stdout]
    assert lines.count("mine\n") == 1
    winner = racers[lines.index("mine\n")]
    assert all(f"run by process {winner.pid}" in line for line in lines if line != "mine\n")
    for racer in racers:
        said(racer)
    (record,) = Ledger(file).pools()
    assert record.session == f"s{racers.index(winner)}"


def test_a_pool_is_adopted_from_a_client_that_is_gone_and_from_no_other(ledger: Ledger, file: Path) -> None:
    assert ledger.adopt("p") is None
    ledger.begin("p", "s", lease=600)
    rent(ledger, "s", "i-1")
    change(file, "UPDATE pools SET pid = ?, birth = ?", os.getppid(), Process.of(os.getppid()).birth)
    with pytest.raises(UsageError, match=f"still run by process {os.getppid()}"):
        ledger.adopt("p")
    change(file, "UPDATE pools SET birth = 'another', beat = beat - 300")
    adopted = ledger.adopt("p", lease=60)
    assert adopted is not None
    assert adopted.session == "s"
    record = ledger.record("s")
    assert record is not None
    assert record.client == Process.this()
    assert (record.state(time.time()), record.lease) == ("live", 60)
    assert record.beat > time.time() - 60


def test_nothing_is_rented_any_more_for_a_pool_that_somebody_ends(ledger: Ledger) -> None:
    ledger.begin("p", "s", lease=600)
    ledger.beat("s")
    assert not ledger.standing("s")[0]
    Ledger(ledger.file).ending("p")
    ledger.beat("s")
    assert ledger.standing("s")[0]
    with pytest.raises(PoolClosed, match="'p' is being ended by another process"):
        ledger.intend("s", "s-0", OFFER, (0,))
    assert ledger.pools()[0].state(time.time()) == "ending"


# --- whoever dies --------------------------------------------------------------------------------------------


def test_a_client_that_dies_between_asking_and_answer_leaves_its_order_on_record(file: Path, tmp_path: Path) -> None:
    cloud = FakeCloud(tmp_path / "cloud", machines=False)
    cloud.control.kill_client(1 + len(cloud.control.calls()) + 3, "after")  # stock, two things, then the machine
    code = """
        import sys
        from pathlib import Path
        from skypool.rental.ledger import Ledger
        from skypool.model import Need, Order
        from skypool.testing import FakeCloud
        ledger, cloud = Ledger(Path(sys.argv[1])), FakeCloud(sys.argv[2], machines=False)
        ledger.begin("p", "s", lease=600, drivers=[cloud])
        offer = next(iter(cloud.offers(Need())))
        ledger.intend("s", "s-0", offer, (0,))
        cloud.launch(offer, Order("p", "s-0", (0,), Need()))
        print("alive")
    """
    client = python(code, file, tmp_path / "cloud")
    assert said(client) == ""
    assert client.returncode == -signal.SIGKILL
    assert cloud.count("machine") == 1
    ledger = Ledger(file)
    (record,) = ledger.pools()
    assert (record.state(time.time()), record.running) == ("left", ())
    assert [each.token for each in record.intents] == [each.token for each in cloud.instances(pool="p")]
    assert ledger.drivers_of("p") == (cloud,)
    assert "orders without an answer: 1" in str(ledger.receipt("s"))


def test_a_writer_killed_at_any_moment_leaves_whole_lines(file: Path) -> None:
    code = """
        import sys
        from pathlib import Path
        from skypool.rental.ledger import Ledger
        from skypool.model import Instance, Offer
        ledger, session = Ledger(Path(sys.argv[1])), sys.argv[2]
        ledger.begin(session, session, lease=600)
        print("begun", flush=True)
        for n in range(10**6):
            token = f"{session}-{n}"
            ledger.intend(session, token, Offer("fake", "gpu"), (0, 1))
            ledger.rented(session, token, [Instance("fake", f"{token}-{node}", session, node) for node in (0, 1)])
    """
    for n in range(4):
        writer = python(code, file, f"s{n}")
        assert writer.stdout
        assert writer.stdout.readline() == "begun\n"
        time.sleep(0.02 + n * 0.013)
        writer.kill()
        said(writer)
    ledger = Ledger(file)
    ledger.check()
    records = ledger.pools()
    assert [each.session for each in records] == ["s0", "s1", "s2", "s3"]
    for record in records:
        assert len(record.intents) <= 1
        assert len(record.lines) % 2 == 0, "both machines of an order, or none"


def test_threads_and_processes_write_at_once_and_nothing_is_lost(file: Path) -> None:
    code = """
        import sys
        from concurrent.futures import ThreadPoolExecutor
        from pathlib import Path
        from skypool.rental.ledger import Ledger
        from skypool.model import Instance, Offer
        ledger, session = Ledger(Path(sys.argv[1])), sys.argv[2]
        ledger.begin(session, session, lease=600)
        def rent(n):
            token = f"{session}-{n}"
            ledger.intend(session, token, Offer("fake", "gpu"), (n,))
            ledger.rented(session, token, [Instance("fake", token, session, n)])
            ledger.ended(session, "fake", token)
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(rent, range(15)))
    """
    for process in [python(code, file, f"s{n}") for n in range(4)]:
        assert said(process) == ""
    for record in Ledger(file).pools():
        assert sorted(each.node for each in record.lines) == list(range(15))
        assert (record.running, record.intents) == ((), ())


# --- a ledger that is of no use ------------------------------------------------------------------------------


def broken_header(file: Path) -> None:
    file.write_bytes(b"not a database, by far" * 300)


def broken_page(file: Path) -> None:
    with open(file, "r+b") as raw:
        raw.seek(4096)
        raw.write(os.urandom(4096))


def newer(file: Path) -> None:
    change(file, f"PRAGMA user_version = {ledger_schema.SHAPE + 1}")
    change(file, f"PRAGMA application_id = {ledger_damage.MARK + ledger_schema.SHAPE + 1}")


def folder_there(file: Path) -> None:
    file.unlink()
    file.mkdir()


def folder_missing(file: Path) -> None:
    shutil.rmtree(file.parent)
    file.parent.write_text("a file where the folder should be")


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (newer, "was written by a newer skypool: update skypool"),
        (folder_there, r"cannot be written \(.*make the file and its folder writable, or set XDG_STATE_HOME"),
        (folder_missing, r"cannot be written \(.*make the file and its folder writable, or set XDG_STATE_HOME"),
    ],
)
def test_a_pool_does_not_begin_where_it_cannot_be_written_down(
    ledger: Ledger, file: Path, told: list[str], broken: Callable[[Path], None], says: str
) -> None:
    ledger.begin("old", "s0", lease=600)
    ledger.end("s0")
    broken(file)
    with pytest.raises(LedgerError, match=says):
        ledger.begin("p", "s", lease=600)
    with pytest.raises(LedgerError, match=says):
        ledger.check()
    assert told == []


def test_a_ledger_that_another_process_holds_is_waited_for_and_then_told_of(
    ledger: Ledger, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ledger_file.PATIENCE == 30.0
    ledger.begin("p", "s", lease=600)
    book = sqlite3.connect(file, isolation_level=None)
    book.execute("BEGIN IMMEDIATE")
    with monkeypatch.context() as impatient:
        impatient.setattr(ledger_file, "PATIENCE", 0.3)
        with pytest.raises(LedgerError, match=r"is locked by another process: see which with `fuser \S+`"):
            ledger.intend("s", "s-0", OFFER, (0,))
    with ThreadPoolExecutor() as thread:
        waits = thread.submit(ledger.intend, "s", "s-1", OFFER, (0,))
        time.sleep(0.1)
        assert not waits.done()
        book.execute("ROLLBACK")
        waits.result()
    book.close()
    assert [each.token for each in ledger.open_orders("s")] == ["s-1"]


HOLDER = """
import fcntl, sqlite3, sys
if sys.argv[1] == "lock":
    lock = open(sys.argv[2] + ".lock")
    fcntl.flock(lock, fcntl.LOCK_EX)
else:
    book = sqlite3.connect(sys.argv[2], isolation_level=None)
    book.execute("BEGIN IMMEDIATE")
print("holds", flush=True)
input()
"""


@pytest.mark.skipif(
    hasattr(sys, "_skypool_as_darwin") or not Path("/proc/locks").exists(),
    reason="macOS does not tell who holds a lock",
)
@pytest.mark.parametrize("what", ["lock", "write"])
def test_a_stopped_process_that_holds_the_ledger_is_named_after_seconds_and_readers_need_no_lock_of_writers(
    ledger: Ledger, file: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    assert ledger_file._TO_READ == 10.0
    ledger.begin("p", "s", lease=600)
    monkeypatch.setattr(ledger_file, "_TO_READ", 0.2)
    monkeypatch.setattr(ledger_file, "PATIENCE", 0.4)
    argv = [sys.executable, "-c", HOLDER, what, str(file)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            holder.stdout.readline()
            named = rf"is locked by process {holder.pid} \([^)]*python.*\): wait for it, or end it, and try again"
            with pytest.raises(LedgerError, match=named):
                ledger.intend("s", "s-0", OFFER, (0,))
            holder.send_signal(signal.SIGSTOP)
            eventually(lambda: is_stopped(holder.pid))
            if what == "write":
                assert [each.pool for each in ledger.pools()] == ["p"]
            else:
                with pytest.raises(LedgerError, match=rf"which is stopped: continue it with `kill -CONT {holder.pid}`"):
                    ledger.pools()
        finally:
            holder.kill()


def test_what_cannot_be_written_after_renting_is_told_once_and_written_later(
    ledger: Ledger, file: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.begin("p", "s", lease=600)
    ledger.intend("s", "s-0", OFFER, (0, 1))
    monkeypatch.setattr(ledger_file, "PATIENCE", 0.1)
    book = sqlite3.connect(file, isolation_level=None)
    book.execute("BEGIN IMMEDIATE")
    ledger.rented("s", "s-0", [machine("i-1"), machine("i-2", 1)])
    ledger.ended("s", "fake", "i-1")
    ledger.beat("s")
    assert not ledger.standing("s")[0]
    assert len(told) == 1
    assert "is locked by another process" in told[0]
    assert "Machines are ended all the same" in told[0]
    book.execute("ROLLBACK")
    book.close()
    assert len(ledger.open_orders("s")) == 1
    ledger.ended("s", "fake", "i-2")
    assert ledger.open_orders("s") == ()
    assert [(each.id, each.ended) for each in ledger.receipt("s").lines] == [("i-1", True), ("i-2", True)]


def test_a_receipt_has_lines_that_could_not_be_written(
    ledger: Ledger, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file can be read all the while, and says that both machines run."""
    ledger.begin("p", "s", lease=600)
    rent(ledger, "s", "i-1", "i-2")
    monkeypatch.setattr(ledger_file, "PATIENCE", 0.1)
    book = sqlite3.connect(file, isolation_level=None)
    book.execute("BEGIN IMMEDIATE")
    ledger.ended("s", "fake", "i-1")
    assert [(each.id, each.ended) for each in ledger.receipt("s").lines] == [("i-1", True), ("i-2", False)]
    ledger.ended("s", "fake", "i-2")
    ledger.end("s")
    assert [(each.id, each.ended) for each in ledger.receipt("s").lines] == [("i-1", True), ("i-2", True)]
    book.execute("ROLLBACK")
    book.close()


def test_where_nobody_listens_a_line_that_cannot_be_written_is_a_warning(file: Path) -> None:
    ledger = Ledger(file)
    ledger.begin("p", "s", lease=600)
    newer(file)
    with pytest.warns(RuntimeWarning, match="was written by a newer skypool"):
        ledger.end("s")


def test_a_meter_goes_on_by_what_it_read_last(ledger: Ledger, file: Path) -> None:
    ledger.begin("p", "s", lease=600)
    rent(ledger, "s", "i-1")
    before = ledger.receipt("s")
    newer(file)
    assert ledger.receipt("s", before.at + 3600).usd == pytest.approx(3.6, rel=0.01)
    with pytest.raises(LedgerError):
        ledger.receipt("t")


def test_a_full_disk_is_told_before_renting(file: Path) -> None:
    """No file of this process may grow beyond what the ledger has: as a full disk, it is an error of the write."""
    code = """
        import resource, sys
        from pathlib import Path
        from skypool.errors import LedgerError
        from skypool.rental.ledger import Ledger
        from skypool.model import Offer
        ledger = Ledger(Path(sys.argv[1]))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        try:
            ledger.intend("s", "s-0", Offer("fake", "gpu"), (0,))
        except LedgerError as e:
            print(e)
    """
    Ledger(file).begin("p", "s", lease=600)
    out = said(python(code, file))
    assert "cannot be written" in out
    assert "nothing is rented" in out
    assert Ledger(file).open_orders("s") == ()


def test_the_file_is_for_its_user_alone(ledger: Ledger, file: Path) -> None:
    ledger.begin("p", "s", lease=600)
    assert file.stat().st_mode & 0o077 == 0
    assert file.parent.stat().st_mode & 0o077 == 0


def test_it_is_in_the_state_folder_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "mine"))
    assert Ledger.here().file == tmp_path / "mine" / "skypool" / "ledger" / "ledger.sqlite3"


# --- a damaged file ------------------------------------------------------------------------------------------


def no_text(file: Path) -> None:
    change(file, "UPDATE pools SET error = CAST(x'ff80fe' AS TEXT)")


def no_number(file: Path) -> None:
    change(file, "UPDATE pools SET started = 1e300")


def no_driver(file: Path) -> None:
    change(file, "UPDATE pools SET drivers = '[{\"provider\": 5}]'")


def other_version(file: Path) -> None:
    change(file, "PRAGMA user_version = 129")


def no_table(file: Path) -> None:
    change(file, "DROP TABLE orders")


def empty(file: Path) -> None:
    file.write_bytes(b"")


def torn(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


DAMAGES = [
    broken_header, broken_page, no_text, no_number, no_driver, other_version, no_table, empty, torn,
]  # fmt: skip


def set_aside(file: Path) -> list[Path]:
    return sorted(file.parent.glob("ledger.damaged-*.sqlite3"))


@pytest.mark.parametrize("broken", DAMAGES)
@pytest.mark.parametrize("used", ["begin", "pools", "check"])
def test_a_damaged_file_is_set_aside_and_a_fresh_one_serves(
    ledger: Ledger, file: Path, told: list[str], broken: Callable[[Path], None], used: str
) -> None:
    ledger.begin("old", "s0", lease=600)
    ledger.end("s0")
    broken(file)
    was = file.read_bytes()
    if used == "begin":
        ledger.begin("p", "s", lease=600)
        rent(ledger, "s", "i-1")
    elif used == "pools":
        assert ledger.pools() == []
    else:
        ledger.check()
    (kept,) = set_aside(file)
    assert kept.read_bytes() == was
    (said,) = told
    assert f"the ledger {file} was damaged (" in said
    assert f"it is kept as {kept}" in said
    assert "`skypool gc`" in said
    assert [each.pool for each in Ledger(file).pools()] == (["p"] if used == "begin" else [])


def test_a_file_whose_format_can_only_be_read_is_damaged_for_those_who_write(ledger: Ledger, file: Path) -> None:
    ledger.begin("old", "s0", lease=600)
    with open(file, "r+b") as raw:
        raw.seek(18)
        raw.write(b"\x09")
    assert [each.pool for each in Ledger(file).pools()] == ["old"]
    Ledger(file, lambda text: None).begin("p", "s", lease=600)
    assert len(set_aside(file)) == 1
    assert [each.pool for each in Ledger(file).pools()] == ["p"]


def test_a_pool_that_lives_writes_what_it_knows_into_the_fresh_file(ledger: Ledger, file: Path) -> None:
    ledger.begin("p", "s", lease=600, budget=sky.Budget(5), drivers=[sky.Local()])
    rent(ledger, "s", "i-1", "i-2")
    before, (record,) = ledger.receipt("s"), ledger.pools()
    broken_header(file)
    assert Ledger(file, lambda text: None).pools() == [], "another process meets the damage first"
    assert ledger.receipt("s", before.at) == before
    (after,) = Ledger(file).pools()
    assert (after.budget, after.client, after.notes) == (record.budget, record.client, record.notes)
    no_table(file)
    ledger.intend("s", "s-9", OFFER, (2,))
    assert [each.token for each in ledger.open_orders("s")] == ["s-9"]
    assert [each.id for each in ledger.receipt("s").lines] == ["i-1", "i-2"]
    ledger.beat("s")
    assert not ledger.standing("s")[0]


def test_a_pool_that_was_adopted_is_written_into_the_fresh_file_too(ledger: Ledger, file: Path) -> None:
    ledger.begin("p", "s", lease=600)
    rent(ledger, "s", "i-1")
    change(file, "UPDATE pools SET birth = 'another'")
    other = Ledger(file, lambda text: None)
    other.adopt("p")
    empty(file)
    other.beat("s")
    assert not other.standing("s")[0]
    assert [each.id for each in other.receipt("s").lines] == ["i-1"]


def test_a_receipt_outlives_damage_after_the_end(ledger: Ledger, file: Path) -> None:
    ledger.begin("p", "s", lease=600)
    rent(ledger, "s", "i-1")
    ledger.ended("s", "fake", "i-1")
    ledger.end("s")
    before = ledger.receipt("s", 0.0)
    broken_header(file)
    assert ledger.receipt("s", 0.0) == before


def test_of_processes_that_find_the_damage_at_once_one_sets_the_file_aside(file: Path) -> None:
    code = """
        import os, sys, time
        from pathlib import Path
        from skypool.rental.ledger import Ledger
        told = []
        ledger = Ledger(Path(sys.argv[1]), told.append)
        while not os.path.exists(sys.argv[1] + ".go"):
            time.sleep(0.001)
        ledger.begin(sys.argv[2], sys.argv[2], lease=600)
        print(len(told), flush=True)
        sys.stdin.read()
    """
    Ledger(file).begin("old", "old", lease=600)
    broken_page(file)
    racers = [python(code, file, f"s{n}", stdin=subprocess.PIPE) for n in range(6)]
    Path(f"{file}.go").touch()
    counts = [int(racer.stdout.readline()) for racer in racers if racer.stdout]
    assert sum(counts) == 1
    assert len(set_aside(file)) == 1
    assert {each.pool for each in Ledger(file).pools()} == {f"s{n}" for n in range(6)}
    for racer in racers:
        said(racer)


def test_a_locked_file_is_never_set_aside(
    ledger: Ledger, file: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.begin("p", "s", lease=600)
    monkeypatch.setattr(ledger_file, "PATIENCE", 0.2)
    book = sqlite3.connect(file, isolation_level=None)
    book.execute("PRAGMA locking_mode = EXCLUSIVE")
    book.execute("BEGIN EXCLUSIVE")
    book.execute("UPDATE pools SET beat = beat")
    for use in (ledger.check, ledger.pools):
        with pytest.raises(LedgerError, match="is locked by another process"):
            use()
    book.execute("ROLLBACK")
    book.close()
    assert (set_aside(file), told) == ([], [])
    assert [each.pool for each in ledger.pools()] == ["p"]


def test_a_file_on_a_full_disk_is_never_set_aside(file: Path) -> None:
    code = """
        import resource, signal, sys
        from pathlib import Path
        from skypool.errors import LedgerError
        from skypool.rental.ledger import Ledger
        told = []
        ledger = Ledger(Path(sys.argv[1]), told.append)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        for use in (ledger.check, lambda: ledger.begin("q", "t", lease=600), lambda: ledger.end("s")):
            try:
                use()
            except LedgerError as e:
                assert "damaged" not in str(e), e
        assert all("damaged" not in each for each in told), told
    """
    Ledger(file).begin("p", "s", lease=600)
    said(python(code, file))
    assert set_aside(file) == []
    assert [each.pool for each in Ledger(file).pools()] == ["p"]


def test_a_file_of_an_earlier_skypool_without_a_mark_is_healthy(ledger: Ledger, file: Path, told: list[str]) -> None:
    file.parent.mkdir(parents=True)
    book = sqlite3.connect(file)
    book.executescript(f"{ledger_schema.STEPS[0]} PRAGMA user_version = 1; PRAGMA journal_mode = WAL;")
    me, began = Process.this(), time.time() - 3600
    pool = "s", "p", me.host, me.pid, me.birth, began, began, 600.0, 20.0, 0.8, "[]", None, None, ""
    machine = "s", "fake", "i-1", 0, "s-0", "gpu", "north", "north-a", "spot", 3.6, 0.0, began, None
    for table, row in (("pools", pool), ("instances", machine)):
        book.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)
    book.commit()
    book.close()
    assert [(each.pool, each.budget) for each in ledger.pools()] == [("p", sky.Budget(20, 0.8))]
    assert ledger.spent("s") == pytest.approx(3.6, rel=0.01), "what an earlier one rented is charged as it was"
    assert (set_aside(file), told) == ([], [])


def test_a_damaged_file_that_cannot_be_set_aside_is_an_error_with_what_to_do(
    ledger: Ledger, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.begin("p", "s", lease=600)
    broken_header(file)

    def refused(self: Path, target: Path) -> Path:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "rename", refused)  # root may write into any folder
    with pytest.raises(LedgerError, match=r"cannot be set aside \(.*Permission denied.*mv \S+/state \S+/state.damaged"):
        Ledger(file).pools()


# --- what goes, and what stays -------------------------------------------------------------------------------


def test_pools_that_ended_long_ago_are_forgotten_and_what_may_run_never_is(ledger: Ledger, file: Path) -> None:
    for session in ("ended", "running", "young"):
        ledger.begin(session, session, lease=600)
        rent(ledger, session, f"i-{session}")
    for session in ("ended", "young"):
        ledger.ended(session, "fake", f"i-{session}")
        ledger.end(session)
    ledger.end("running", "its end could not be proved")
    change(file, "UPDATE pools SET beat = beat - ?, ended = ended - ? WHERE pool != 'young'", 4e7, 4e7)
    ledger.begin("new", "new", lease=600)
    assert [each.pool for each in ledger.pools()] == ["running", "young", "new"]
    left = sqlite3.connect(file).execute("SELECT session FROM instances UNION SELECT session FROM orders").fetchall()
    assert sorted(left) == [("running",), ("young",)]


def test_machines_that_ended_themselves_are_charged_until_their_lease_was_over(ledger: Ledger, file: Path) -> None:
    ledger.begin("p", "s", lease=600)
    rent(ledger, "s", "i-1", "i-2")
    ledger.intend("s", "s-9", OFFER, (2,))
    change(file, "UPDATE pools SET beat = beat - 7200")
    change(file, "UPDATE instances SET launched = launched - 10800, billed_from = billed_from - 10800")
    ledger.cleared("p", "fake", ["i-2"])
    assert [each.lived for each in ledger.receipt("s").lines] == [
        pytest.approx(3600 + 600, abs=2),
        pytest.approx(10800, abs=2),
    ]
    assert ledger.open_orders("s") == ()


# --- drivers on paper ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "driver",
    [
        sky.Local(),
        sky.Local(spool="/tmp/x", spool_memory=3),
        sky.SSH(hosts=["me@gpu1:2222", sky.Host("gpu2", accelerator="H100:8")], strict=True),
        sky.Container(volumes={"/data": "/data:ro"}, cpus=1.5, gpus="all"),
    ],
)
def test_a_driver_is_made_again_as_it_was(ledger: Ledger, driver: Any) -> None:
    ledger.begin("p", "s", lease=600, drivers=[driver, sky.Local()])
    again, _ = ledger.drivers_of("p")
    assert type(again) is type(driver)
    assert registry.noted(again) == registry.noted(driver)
    assert again == driver or isinstance(driver, sky.Container), "options is a tuple then"


def test_secrets_are_not_written_down_and_missed_where_they_are_needed(
    ledger: Ledger, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud = FakeCloud(tmp_path / "cloud", machines=False, key="hunter2-secret")
    list(cloud.offers(Need()))
    ledger.begin("p", "s", lease=600, drivers=[cloud])
    assert b"hunter2" not in b"".join(each.read_bytes() for each in file.parent.iterdir())
    (again,) = ledger.drivers_of("p")
    with pytest.raises(sky.SkypoolError, match="the key is not known"):
        again.instances()
    monkeypatch.setenv("SKYPOOL_FAKE_KEY", "hunter2-secret")
    assert ledger.drivers_of("p")[0].instances() == []


def test_a_driver_that_cannot_be_made_again_says_so(ledger: Ledger, file: Path) -> None:
    ledger.begin("p", "s", lease=600, drivers=[sky.SSH(["gpu1"])])
    change(file, "UPDATE pools SET drivers = replace(drivers, 'skypool_ssh:', 'skypool_gone:')")
    with pytest.raises(
        UsageError, match=r"'ssh' \(skypool_gone:SSH\) cannot be created from the settings in .*: No module named"
    ):
        ledger.drivers_of("p")
    change(file, "UPDATE pools SET drivers = replace(drivers, 'skypool_gone:', 'skypool_ssh:')")
    change(file, "UPDATE pools SET drivers = replace(drivers, 'skypool_ssh._hosts:Host', 'os:system')")
    with pytest.raises(UsageError, match="os:system, which is neither from the driver's package nor from skypool"):
        ledger.drivers_of("p")
    with pytest.raises(
        UsageError, match=r"there is no pool called 'trane' in skypool's ledger \S+; .*; did you mean train\?"
    ):
        ledger.begin("train", "s2", lease=600)
        ledger.drivers_of("trane")
