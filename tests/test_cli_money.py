"""`skypool ps`, `cost`, `down`, `gc` and `doctor`; and docs/money.md, which shows what they print.

    SKYPOOL_WRITE_DOCS=1 .venv/bin/pytest tests/test_cli_money.py

writes that page anew.
"""

from __future__ import annotations

import getpass
import io
import json
import os
import pty
import re
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool.cli import main
from skypool.drivers import registry, tags
from skypool.errors import AccessError, CredentialsError, ProviderError
from skypool.head.states import Entry, Outcome
from skypool.head.states import Ledger as State
from skypool.model import Need, Offer, Order
from skypool.rental.ledger import Ledger
from skypool.rental.reaper import terminate_all
from skypool.rental.reaper_process import log_of, terminate_in_background
from skypool.testing import FakeCloud, Stock
from tests.handed_runs import handed, passed, record_of
from tests.test_ledger import change

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "money.md"
RUN = "import sys; from skypool.cli import main; sys.exit(main())"
STOCK = [Stock("gpu-8", 32.77, "H100:8"), Stock("small", 0.1)]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("SKYPOOL_FAKE_CLOUD", str(tmp_path / "cloud"))
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    near = {name: each for name, each in registry.providers().items() if name in ("local", "ssh", "container")}
    every = registry.providers
    monkeypatch.setattr(registry, "providers", lambda group="": every(group) if group else near)  # none far away
    return tmp_path / "state"


@pytest.fixture
def cloud(tmp_path: Path) -> FakeCloud:
    made = FakeCloud(stock=STOCK, machines=False, patience=0.3)
    list(made.offers(Need()))
    return made


@pytest.fixture
def skypool(monkeypatch: pytest.MonkeyPatch) -> Run:
    """The program, in this very process: starting it takes longer than what it does."""

    def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
        out, err = io.StringIO(), io.StringIO()
        with monkeypatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            for name, value in env.items():
                patch.setenv(name, value)
            patch.setattr(sys, "argv", ["skypool", *args])
            patch.setattr(sys, "stdin", io.StringIO())
            with pytest.raises(SystemExit) as left:
                main()
        status = left.value.code
        return subprocess.CompletedProcess(
            ["skypool", *args], status if isinstance(status, int) else 0, out.getvalue(), err.getvalue()
        )

    return run


CLIENT = """
    import sys
    import skypool as sky
    from skypool.rental.ledger import Ledger
    from skypool.model import Need, Order
    from skypool.testing import FakeCloud
    from datetime import UTC, datetime, timedelta
    pool, kind, nodes, answers = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    cloud, ledger, session = FakeCloud(machines=False), Ledger.here(), f"session-of-{pool}"
    offer = next(each for each in cloud.offers(Need()) if each.instance_type == kind)
    ledger.begin(pool, session, lease=600, budget=sky.Budget(100) if kind == "gpu-8" else None, drivers=[cloud])
    for node in range(nodes):
        token = f"{session}-{node}"
        until = datetime.now(UTC) + timedelta(seconds=600)
        ledger.intend(session, token, offer, (node,))
        ledger.rented(session, token, cloud.launch(offer, Order(pool, token, (node,), Need(), until=until)))
    if answers == "no":
        ledger.intend(session, f"{session}-{nodes}", offer, (nodes,))
    print("holds it", flush=True)
    sys.stdin.read()
"""


class Client:
    """A process that holds a pool."""

    def __init__(self, pool: str, kind: str = "small", nodes: int = 2, answers: str = "yes") -> None:
        argv = [sys.executable, "-c", textwrap.dedent(CLIENT), pool, kind, str(nodes), answers]
        self.process = subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout
        assert self.process.stdout.readline() == "holds it\n"
        self.pid = self.process.pid

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def client() -> Iterator[Callable[..., Client]]:
    made: list[Client] = []

    def begin(*args: Any, **more: Any) -> Client:
        made.append(Client(*args, **more))
        return made[-1]

    yield begin
    for each in made:
        each.kill()


def slice_of(folder: Path, pool: str) -> FakeCloud:
    """A cloud with a slice of two hosts that this process rented for a pool."""
    cloud = FakeCloud(folder, [Stock("v5p-16", 3600.0, "v5p-16")], machines=False)
    (offer,) = cloud.offers(Need())
    order = Order(pool, f"session-of-{pool}-0", (0, 1), Need(), until=datetime.now(UTC) + timedelta(seconds=600))
    ledger, session = Ledger.here(), f"session-of-{pool}"
    ledger.begin(pool, session, lease=600, drivers=[cloud])
    ledger.intend(session, order.token, offer, order.nodes)
    ledger.rented(session, order.token, cloud.launch(offer, order))
    return cloud


def over(cloud: FakeCloud, pool: str) -> None:
    """The lease of this pool ran out, and its machines run on, as some do."""
    cloud.renew(pool, datetime.now(UTC) - timedelta(minutes=5))


def aged(pool: str, seconds: float) -> None:
    """It began so long before."""
    for table, column in (("pools", "started"), ("instances", "launched"), ("instances", "billed_from")):
        sql = f"UPDATE {table} SET {column} = {column} - ? WHERE session = ?"
        change(Ledger.here().file, sql, seconds, f"session-of-{pool}")


# --- ps and cost ---------------------------------------------------------------------------------------------


def test_ps_tells_what_runs_and_what_it_costs(skypool: Run, cloud: FakeCloud, client: Callable[..., Client]) -> None:
    pid = client("train", "gpu-8", 2).pid
    aged("train", 3600)
    (told,) = json.loads(skypool("ps", "--json").stdout)
    assert (told["pool"], told["state"], told["client"]["pid"]) == ("train", "live", pid)
    assert told["usd_per_hour"] == pytest.approx(2 * 32.77)
    assert told["usd"] == pytest.approx(2 * 32.77, rel=0.01)
    assert told["age"] == pytest.approx(3600, abs=60)
    assert told["budget"] == {"max_usd": 100, "warn": 0.8}
    assert [each["id"] for each in told["instances"]] == [each.id for each in cloud.instances(pool="train")]
    heading, line = skypool("ps").stdout.splitlines()
    assert heading.split()[:4] == ["pool", "state", "client", "nodes"]
    assert line.split()[:2] == ["train", "live"]
    assert re.search(r"  2  1:00:\d\d  65\.5400  (65\.\d{4}) +\1  66% of 100  fake$", line)


def test_ps_tells_of_what_was_left(skypool: Run, cloud: FakeCloud, client: Callable[..., Client]) -> None:
    client("train", answers="no").kill()
    done = skypool("ps")
    assert done.returncode == 0
    assert re.search(r"^train +left ", done.stdout, re.MULTILINE)
    assert re.search(
        r"train: the process that ran this pool is gone; the pool's lease runs until .*`skypool down train`",
        done.stdout,
    )
    assert "train: order session-of-train-2 at fake got no answer; its machine may be running" in done.stdout
    change(Ledger.here().file, "UPDATE pools SET beat = beat - 700")
    assert (
        "the process that ran this pool is gone and the pool's lease is over, but machines may be left; `skypool down "
        "train` ends them and checks that" in skypool("ps").stdout
    )
    Ledger.here().end("session-of-train", "the cloud was on fire")
    said = skypool("ps").stdout
    assert "train: the pool has ended, but perhaps not all of its machines; `skypool down train` ends them" in said
    assert "train: the cloud was on fire" in said


def test_where_nothing_runs_ps_says_so(skypool: Run) -> None:
    done = skypool("ps")
    assert (done.returncode, done.stdout) == (
        0, "no pool of this computer is running; `skypool gc` asks the providers for machines of other pools\n",
    )  # fmt: skip
    assert json.loads(skypool("ps", "--json").stdout) == []


def test_cost_is_by_pool_or_by_day_and_since(skypool: Run, cloud: FakeCloud, client: Callable[..., Client]) -> None:
    client("old", "gpu-8", 1).kill()
    client("new", "small", 2).kill()
    aged("old", 10 * 86400)
    change(Ledger.here().file, "UPDATE instances SET ended = billed_from + 7200 WHERE session = 'session-of-old'")
    aged("new", 3600)
    told = json.loads(skypool("cost", "--json").stdout)
    assert [(each["pool"], each["instances"]) for each in told["lines"]] == [("old", 1), ("new", 2)]
    assert [each["usd"] for each in told["lines"]] == [pytest.approx(65.54), pytest.approx(0.2, rel=0.05)]
    assert told["usd"] == pytest.approx(65.74, rel=0.01)
    assert skypool("cost").stdout.splitlines()[-1].split()[0] == "total"
    since = json.loads(skypool("cost", "--since", "7d", "--json").stdout)
    assert [each["pool"] for each in since["lines"]] == ["new"]
    days = json.loads(skypool("cost", "--by", "day", "--json").stdout)
    assert sum(each["usd"] for each in days["lines"]) == pytest.approx(told["usd"], rel=0.01)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", each["day"]) for each in days["lines"])
    first = days["lines"][0]["day"]
    assert json.loads(skypool("cost", "--since", first, "--json").stdout)["usd"] == pytest.approx(told["usd"], rel=0.01)


def test_cost_tells_two_runs_of_one_name_apart_by_the_id_that_report_takes(skypool: Run, cloud: FakeCloud) -> None:
    ledger = Ledger.here()
    for session, kind in (("first", "gpu-8"), ("second", "small")):
        offer = next(each for each in cloud.offers(Need()) if each.instance_type == kind)
        order = Order("train", f"{session}-0", (0,), Need(), until=datetime.now(UTC) + timedelta(seconds=600))
        ledger.begin("train", session, lease=600, drivers=[cloud])
        ledger.intend(session, order.token, offer, order.nodes)
        ledger.rented(session, order.token, cloud.launch(offer, order))
        change(ledger.file, "UPDATE instances SET billed_from = billed_from - 3600 WHERE session = ?", session)
        terminate_all([cloud], "train")
        ledger.end(session)
    told = json.loads(skypool("cost", "--json").stdout)["lines"]
    assert [(each["pool"], each["session"]) for each in told] == [("train", "first"), ("train", "second")]
    assert [each["usd"] for each in told] == [pytest.approx(32.77, rel=0.05), pytest.approx(0.1, rel=0.05)]
    for each in told:
        page = skypool("report", "train", "--run", each["session"], "-o", "-")
        assert (page.returncode, each["session"] in page.stdout) == (0, True), page.stderr
    assert "session" not in json.loads(skypool("cost", "--by", "day", "--json").stdout)["lines"][0]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["cost", "--since", "2026-13-01"], "--since 2026-13-01 is not a date: month must be in 1..12"),
        (["cost", "--since", "yesterday"], "--since must be a duration such as 90, '90s', '10m' or '1h30m', not"),
        (["gc", "--provider", "fkae"], "no provider is called 'fkae'; did you mean fake? the installed ones are: "),
        (["doctor", "--provider", "fkae"], "no provider is called 'fkae'"),
        (["doctor", "--policy", "local"], "cannot print a policy for provider 'local'"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_status_2(skypool: Run, args: list[str], says: str) -> None:
    done = skypool(*args)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_ledger_that_cannot_be_read_is_told_and_gc_goes_on(
    skypool: Run, cloud: FakeCloud, client: Callable[..., Client]
) -> None:
    client("train").kill()
    over(cloud, "train")
    Ledger.here().file.unlink()
    Ledger.here().file.mkdir()
    for command in ("ps", "cost"):
        done = skypool(command)
        assert done.returncode == 2
        assert "cannot be written" in done.stderr
    done = skypool("gc", "--provider", "fake", "--yes")
    assert done.returncode == 0, done.stderr
    assert "(continuing without the ledger)" in done.stderr
    assert cloud.count() == 0


@pytest.mark.needs("openssh")
@pytest.mark.parametrize("command", ["ps", "cost", "gc", "doctor"])
def test_a_damaged_ledger_is_set_aside_and_the_command_goes_on(
    skypool: Run, cloud: FakeCloud, client: Callable[..., Client], command: str
) -> None:
    client("train").kill()
    over(cloud, "train")
    file = Ledger.here().file
    change(file, "UPDATE pools SET error = CAST(x'ff80fe' AS TEXT)")
    more = ["--provider", "fake", "--yes"] if command == "gc" else ["--provider", "fake"] if command == "doctor" else []
    done = skypool(command, *more)
    assert done.returncode == 0, done.stderr
    (kept,) = file.parent.glob("ledger.damaged-*.sqlite3")
    assert f"warning: the ledger {file} was damaged (" in done.stderr
    assert f"it is kept as {kept}" in done.stderr
    assert command != "gc" or cloud.count() == 0
    again = skypool(command, *more)
    assert (again.returncode, again.stderr) == (0, "")


# --- down ----------------------------------------------------------------------------------------------------


def test_down_ends_a_pool_whoever_holds_it(skypool: Run, cloud: FakeCloud, client: Callable[..., Client]) -> None:
    client("train")
    client("other", nodes=1)
    done = skypool("down", "train", "--yes")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "pool train has ended"
    assert {each.pool for each in cloud.instances()} == {"other"}
    ledger = Ledger.here()
    ledger.beat("session-of-train")
    assert ledger.standing("session-of-train")[0], "its client learns of it"
    with pytest.raises(sky.PoolClosed):
        ledger.intend("session-of-train", "late", Offer("fake", "small"), (0,))
    assert [each["pool"] for each in json.loads(skypool("ps", "--json").stdout)] == ["other"]


def test_a_pool_may_be_named_as_a_model(skypool: Run, cloud: FakeCloud, client: Callable[..., Client]) -> None:
    pool = sky.ComputePool(name="Llama3.1_a")
    assert pool.name == "llama3-1-a"
    client(pool.name)
    missing = skypool("report", "llama_9")
    assert "no pool called 'llama-9'" in missing.stderr
    done = skypool("down", "Llama3.1_a", "--yes")
    assert done.stdout.splitlines()[-1] == "pool llama3-1-a has ended"


def test_down_knows_pools_that_the_ledger_does_not(skypool: Run, cloud: FakeCloud, state: Path) -> None:
    offer = next(iter(cloud.offers(Need())))
    cloud.launch(offer, Order("elsewhere", "s-0", (0,), Need()))
    Ledger.here().begin("mine", "s", lease=600, drivers=[cloud])  # so that the fake cloud is asked, too
    done = skypool("down", "elsewhere", "--yes")
    assert done.returncode == 0, done.stderr
    assert cloud.count() == 0
    assert "a program that still runs there rents new ones" in done.stdout.splitlines()[-1]


def test_down_ends_what_another_host_rented_where_it_is_named_and_a_pool_of_that_name_here_does_not(
    skypool: Run, cloud: FakeCloud, client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, offer = client("train", nodes=1), next(iter(cloud.offers(Need())))
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(tags, "owner", lambda: f"{getpass.getuser()}@elsewhere")
        (theirs,) = cloud.launch(offer, Order("train", "theirs-0", (0,), Need(), until=datetime.now(UTC)))
    terminate_all([cloud], "train", Ledger.here())
    ours.kill()
    assert [each.id for each in cloud.instances()] == [theirs.id]
    done = skypool("down", "train", "--yes")
    assert done.returncode == 0, done.stderr
    assert cloud.count("machine") == 0
    assert theirs.id in done.stdout
    assert "another computer rented some of these" in done.stdout
    assert "a program that still runs there rents new ones" in done.stdout.splitlines()[-1]


def test_down_asks_all_where_the_drivers_of_the_pool_cannot_be_made_again(
    skypool: Run, cloud: FakeCloud, client: Callable[..., Client]
) -> None:
    client("train")
    Ledger.here().begin("mine", "s", lease=600, drivers=[cloud])
    sql = "UPDATE pools SET drivers = replace(drivers, 'FakeCloud', 'Gone') WHERE pool = 'train'"
    change(Ledger.here().file, sql)
    done = skypool("down", "train", "--yes")
    assert done.returncode == 0, done.stderr
    assert "cannot be created from the settings in skypool's ledger" in done.stderr
    assert cloud.count() == 0


def test_down_asks_first(skypool: Run, cloud: FakeCloud, client: Callable[..., Client]) -> None:
    client("train")
    done = skypool("down", "train")
    assert done.returncode == 1
    assert "stdin is not a terminal, so the end cannot be confirmed by hand: pass --yes" in done.stderr
    assert cloud.count("machine") == 2
    for answer, left in (("n", 2), ("y", 0)):
        main, other = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-c", RUN, "down", "train"], cwd=ROOT, stdin=other, stdout=subprocess.PIPE, text=True
        )
        os.write(main, f"{answer}\n".encode())
        said, _ = process.communicate(timeout=30)
        os.close(main)
        os.close(other)
        assert "End pool 'train'?" in said
        assert (process.returncode, cloud.count("machine")) == (1 if left else 0, left)


def test_down_says_what_it_could_not_end_and_goes_on_with_the_rest(
    skypool: Run, cloud: FakeCloud, client: Callable[..., Client]
) -> None:
    client("train", nodes=1)
    client("other", nodes=1)
    (machine,) = cloud.instances(pool="train")
    cloud.control.refuse(CredentialsError, "delete")
    done = skypool("down", "train", "other", "nope", "--yes")
    assert done.returncode == 1
    assert re.search(rf"pool 'train': it is not confirmed that .*{machine.id}", done.stderr)
    assert "no provider has machines or other resources of a pool called 'nope'" in done.stderr
    assert [each.pool for each in cloud.instances()] == ["train"]
    assert skypool("down", "train", "--yes").returncode == 0
    assert cloud.count() == 0


def test_down_is_not_done_while_a_provider_cannot_show_what_it_has_of_a_pool_that_nobody_knows(
    skypool: Run, cloud: FakeCloud, tmp_path: Path
) -> None:
    broken = FakeCloud(tmp_path / "broken", machines=False)
    for each in (cloud, broken):
        each.launch(next(iter(each.offers(Need()))), Order("elsewhere", "s-0", (0,), Need()))
    Ledger.here().begin("mine", "s", lease=600, drivers=[cloud, broken])
    broken.control.cut_short()
    done = skypool("down", "elsewhere", "--yes")
    assert done.returncode == 1
    assert "may be incomplete" in done.stderr
    assert "run the same command again" in done.stderr
    assert "has ended\n" not in done.stdout
    assert (cloud.count(), broken.count("machine")) == (0, 1)
    broken.control.cut_short(False)
    assert skypool("down", "elsewhere", "--yes").returncode == 0
    assert broken.count() == 0


# --- gc ------------------------------------------------------------------------------------------------------


def test_gc_says_that_it_could_not_see_all_where_a_list_breaks_off(
    skypool: Run, cloud: FakeCloud, client: Callable[..., Client]
) -> None:
    client("lost").kill()
    over(cloud, "lost")
    cloud.control.cut_short()
    done = skypool("gc", "--provider", "fake", "--yes")
    assert done.returncode == 1
    assert re.search("not asked: fake: .*may be incomplete: .*do not count as ended", done.stdout)
    assert (cloud.count("machine"), Ledger.here().pools("lost")[0].ended) == (2, None)
    cloud.control.cut_short(False)
    cloud.control.paged(1)
    done = skypool("gc", "--provider", "fake", "--yes")
    assert (done.returncode, cloud.count()) == (0, 0), done.stderr


def test_gc_ends_what_is_lost_and_only_when_told_to(
    skypool: Run, cloud: FakeCloud, client: Callable[..., Client]
) -> None:
    client("lost").kill()
    client("live", nodes=1)
    over(cloud, "lost")
    over(cloud, "live")  # its client lives, and will renew it
    dry = skypool("gc", "--provider", "fake")
    assert dry.returncode == 0, dry.stderr
    assert "nothing was ended; `skypool gc --yes` ends 2 machines and 2 other resources" in dry.stdout
    assert cloud.count("machine") == 3
    told = json.loads(skypool("gc", "--provider", "fake", "--json").stdout)
    assert {(each["pool"], each["verdict"], each["to_end"], each["ended"]) for each in told["found"]} == {
        ("live", "live", False, False), ("lost", "lost", True, False),
    }  # fmt: skip
    done = skypool("gc", "--provider", "fake", "--yes")
    assert done.returncode == 0, done.stderr
    assert "ended: 2 machines and 2 other resources" in done.stdout
    assert "pool lost: nothing is left of it; the ledger now shows it as ended" in done.stdout
    assert {each.pool for each in cloud.instances()} == {"live"} == {each.pool for each in cloud.leftovers()}
    assert "nothing is lost; asked: fake" in skypool("gc", "--provider", "fake").stdout


def test_gc_needs_no_ledger(skypool: Run, cloud: FakeCloud, client: Callable[..., Client], tmp_path: Path) -> None:
    client("lost").kill()
    over(cloud, "lost")
    elsewhere = {"XDG_STATE_HOME": str(tmp_path / "elsewhere")}
    told = json.loads(skypool("gc", "--provider", "fake", "--json", "--yes", **elsewhere).stdout)
    assert [(each["kind"], each["ended"]) for each in told["found"]] == [
        ("machine", True), ("machine", True), ("key-pair", True), ("security-group", True),
    ]  # fmt: skip
    assert cloud.count() == 0


def test_gc_leaves_what_is_unknown_unless_told_to_take_all(skypool: Run, cloud: FakeCloud) -> None:
    offer = next(iter(cloud.offers(Need())))
    cloud.launch(offer, Order("untold", "s-0", (0,), Need()))
    done = skypool("gc", "--provider", "fake", "--yes")
    assert "of unknown state, and kept: 3; if you know that nobody uses them, `skypool down NAME`" in done.stdout
    assert cloud.count() == 3
    assert skypool("gc", "--provider", "fake", "--yes", "--all").returncode == 0
    assert cloud.count() == 0


def test_gc_asks_all_that_are_set_up_and_says_who_was_not(
    skypool: Run, cloud: FakeCloud, client: Callable[..., Client]
) -> None:
    client("train")
    done = skypool("gc")
    assert "not asked: ssh: SSH needs machines" in done.stdout
    assert re.search(r"live +fake +train +machine \S+ \(node 0\) +process \d+ on \S+ runs its pool", done.stdout)
    cloud.control.refuse(AccessError, "describe")
    done = skypool("gc", "--json")
    assert done.returncode == 1, "a pool is there that nobody can speak for"
    assert "the account lacks the permission" in json.loads(done.stdout)["not_asked"]["fake"]


def test_gc_says_what_it_could_not_end(skypool: Run, cloud: FakeCloud, client: Callable[..., Client]) -> None:
    client("lost").kill()
    over(cloud, "lost")
    cloud.control.refuse(AccessError, "delete", times=None)
    done = skypool("gc", "--provider", "fake", "--yes")
    assert done.returncode == 1
    assert re.search(
        r"some machines or other resources could not be ended .* again:\n  .*account lacks the permission", done.stderr
    )
    cloud.control.refuse(CredentialsError, "describe")
    assert skypool("gc", "--provider", "fake").returncode == 1


def test_a_pool_that_ended_itself_is_over_in_the_ledger_then(
    skypool: Run, cloud: FakeCloud, client: Callable[..., Client]
) -> None:
    client("lost", nodes=1).kill()
    over(cloud, "lost")
    aged("lost", 600)
    cloud.control.kill(cloud.instances()[0])
    cloud.tidy(cloud.leftovers())
    assert json.loads(skypool("ps", "--json").stdout)
    assert json.loads(skypool("gc", "--provider", "fake", "--json").stdout)["over"] == ["lost"]
    assert json.loads(skypool("ps", "--json").stdout) == []


# --- runs that belong to their machine ---------------------------------------------------------------------------


def test_ps_shows_a_run_with_its_state_its_end_and_its_worst_bill(
    skypool: Run, cloud: FakeCloud, client: Callable[..., Client]
) -> None:
    client("other")
    handed(cloud, seconds=3600.0)
    passed(cloud, 900.0)
    (told,) = (each for each in json.loads(skypool("ps", "--json").stdout) if "run" in each)
    run = told["run"]
    assert (told["pool"], told["state"]) == ("train", "detached")
    assert (run["name"], run["generation"], run["state"], run["estimated"]) == ("train", 1, "running", True)
    assert run["usd"] == pytest.approx(32.77 / 4, rel=0.01)
    assert run["worst_usd"] == pytest.approx(32.77 * 3720 / 3600, rel=0.01)
    ends, ends_by = (datetime.fromisoformat(run[each]).timestamp() for each in ("ends", "ends_by"))
    assert ends - time.time() == pytest.approx(2700, abs=30)
    assert ends_by - ends == 120
    said = skypool("ps").stdout
    assert re.search(r"^pool +state +client .*\nother +live .*\n\nrun +state +age ", said)
    assert re.search(r"^train  running  0:15:\d\d  32\.7700  8\.\d{4}  +33\.\d{4}  20\d\d-.* UTC  fake$", said, re.M)
    assert re.search(r"^train: running since .* UTC: its machine ends at .* UTC at the latest$", said, re.M)
    assert "client" not in skypool("ps").stdout.partition("run ")[2]


def test_ps_shows_how_a_run_has_ended_for_a_day(skypool: Run, cloud: FakeCloud) -> None:
    handed(cloud)
    Ledger.here().mark(record_of().session, Entry(State.ENDED, Outcome.FAILED))
    assert "train: failed since" in skypool("ps").stdout
    change(Ledger.here().file, "UPDATE pools SET ended = ended - 90000")
    assert skypool("ps").stdout.startswith("no pool of this computer is running")


def test_a_cost_is_estimated_until_an_end_is_proved(skypool: Run, cloud: FakeCloud) -> None:
    handed(cloud)
    passed(cloud, 900.0)
    (line,) = json.loads(skypool("cost", "--json").stdout)["lines"]
    assert (line["state"], line["estimated"]) == ("running", True)
    assert "estimated: train: `skypool gc` asks if the machine has ended" in skypool("cost").stdout
    assert "estimated: train" in skypool("cost", "--by", "day").stdout
    cloud.control.kill(cloud.instances(pool="train")[0])
    assert "pool train: nothing is left of it" in skypool("gc", "--provider", "fake", "--yes").stdout
    (line,) = json.loads(skypool("cost", "--json").stdout)["lines"]
    assert (line["state"], "estimated" in line) == ("lost", False)
    assert line["usd"] == pytest.approx(32.77 / 4, rel=0.02)
    assert "estimated" not in skypool("cost").stdout


def test_down_ends_a_run_and_its_name_is_free(skypool: Run, cloud: FakeCloud) -> None:
    handed(cloud)
    asked = skypool("down", "train")
    assert (asked.returncode, cloud.count("machine")) == (1, 1)
    assert "its run belongs to its machine and goes on there, so far as is known (its machine could" in asked.stdout
    assert "; what it has not saved is lost" in asked.stdout
    assert re.search(r"machine i-0001 \(node 0\) at fake: it belongs to its run, until .* at the latest", asked.stdout)
    done = skypool("down", "train", "--yes")
    assert (done.returncode, cloud.count()) == (0, 0), done.stderr
    assert "pool train has ended" in done.stdout
    assert "train: cancelled since" in skypool("ps").stdout
    handed(cloud)


def test_down_keeps_an_outcome_that_is_known_and_invents_none(skypool: Run, cloud: FakeCloud) -> None:
    handed(cloud)
    Ledger.here().mark(record_of().session, Entry(State.DETACHED, Outcome.ENDED))
    assert skypool("down", "train", "--yes").returncode == 0
    assert "train: ended since" in skypool("ps").stdout
    handed(cloud, "second")
    passed(cloud, 60.0, "second")
    cloud.control.kill(cloud.instances(pool="second")[0])
    assert skypool("down", "second", "--yes").returncode == 0
    assert "second: lost since" in skypool("ps").stdout


def test_gc_says_to_whom_a_machine_belongs(skypool: Run, cloud: FakeCloud) -> None:
    handed(cloud)
    done = skypool("gc", "--provider", "fake", "--yes")
    assert (done.returncode, cloud.count()) == (0, 3)
    assert re.search(r"^live  fake +train +machine i-0001 .* it belongs to its run, until ", done.stdout, re.M)
    passed(cloud, 3600.0 + 120.0 + 70.0)
    assert "ended: 1 machine and 2 other resources" in skypool("gc", "--provider", "fake", "--yes").stdout
    assert "train: lost since" in skypool("ps").stdout


def test_a_command_for_the_client_of_a_pool_asks_the_machine_of_a_run(skypool: Run, cloud: FakeCloud) -> None:
    handed(cloud)
    done = skypool("stack", "train")
    assert done.returncode != 0
    assert "from the machine of run train, fake i-0001:" in done.stderr
    assert "the machine i-0001 of fake cannot be reached" in done.stderr


@pytest.mark.parametrize(("how_far", "left"), [(State.DETACHED, 1), (State.DETACHING, 0)])
def test_the_process_that_ends_a_pool_leaves_a_run_alone(cloud: FakeCloud, how_far: State, left: int) -> None:
    handed(cloud, state=how_far)
    session = record_of().session
    terminate_in_background([cloud], "train", session)
    log, until = log_of("train", session), time.monotonic() + 60.0
    while not re.search("belongs to it|has ended", log.read_text()):
        assert time.monotonic() < until
        time.sleep(0.1)
    assert cloud.count("machine") == left
    assert (record_of().ended is None, record_of().ending is None) == (bool(left), bool(left))


# --- doctor --------------------------------------------------------------------------------------------------


@pytest.mark.needs("openssh")
def test_doctor_is_content_with_this_machine_and_what_is_set_up(skypool: Run, cloud: FakeCloud) -> None:
    done = skypool("doctor")
    assert done.returncode == 0, done.stdout
    assert re.search(r"ok +ledger: \S+ledger.sqlite3 can be written", done.stdout)
    assert re.search(r"ssh\n +– +not set up: SSH needs machines", done.stdout)
    told = json.loads(skypool("doctor", "--provider", "fake", "--json").stdout)
    assert set(told) == {"this machine", "fake"}
    assert {each.pop("open") for each in told["fake"]} == {False}
    assert told["fake"] == [
        {"what": "credentials", "good": True, "text": "the key is known", "advice": ""},
        {"what": "price list", "good": True, "text": "all on-demand prices are those of the list", "advice": ""},
        {"what": "machines", "good": True, "text": "0 machines of your pools", "advice": ""},
        {
            "what": "offers",
            "good": True,
            "text": "2 offers; the cheapest is small in north-a for 0.1000 USD/h",
            "advice": "",
        },
    ]


@pytest.mark.needs("openssh")
@pytest.mark.parametrize("named", ["fake", "ssh"])
def test_doctor_fails_where_what_was_named_cannot_work(skypool: Run, tmp_path: Path, named: str) -> None:
    locked = tmp_path / "locked"
    list(FakeCloud(locked, machines=False, key="right").offers(Need()))
    done = skypool("doctor", "--provider", named, SKYPOOL_FAKE_CLOUD=str(locked), SKYPOOL_FAKE_KEY="wrong")
    assert done.returncode == 1
    what = (
        r"credentials: .*the key is not known .*\n +what to do: set \$SKYPOOL_FAKE_KEY"
        if named == "fake"
        else "not set up"
    )
    assert re.search(rf"{named}\n +BAD +{what}", done.stdout)
    assert skypool("doctor", "--provider", "local", SKYPOOL_FAKE_CLOUD=str(locked)).returncode == 0


def test_doctor_fails_where_this_machine_lacks_something(skypool: Run, state: Path, tmp_path: Path) -> None:
    state.touch()
    done = skypool("doctor", "--provider", "local", PATH=str(tmp_path))
    assert done.returncode == 1
    assert re.search(r"BAD +ssh: not found\n +what to do: install openssh-client", done.stdout)
    assert re.search(r"BAD +ledger: the ledger \S+ cannot be written", done.stdout)


def test_doctor_sees_a_clock_that_was_set_back(skypool: Run, cloud: FakeCloud) -> None:
    ledger = Ledger.here()
    ledger.begin("p", "s", lease=600)
    change(ledger.file, "UPDATE pools SET beat = beat + 86400")
    done = skypool("doctor", "--provider", "local")
    assert done.returncode == 1
    assert re.search(
        r"BAD +clock: \S+ \S+ UTC is before \S+ \S+ UTC, a time seen earlier\n +what to do: set this computer's clock",
        done.stdout,
    )


# --- the page ------------------------------------------------------------------------------------------------

VARIES = [
    (r"/\S*/state/skypool", "~/.local/state/skypool"),
    (r"\S+/skypool$", "…/skypool"),
    (r"damaged-\d{8}T\d{6}Z", "damaged-20260820T121000Z"),
    (r"\b\d+ on \S+", "4242 on laptop"),
    (r"\d{4}-\d\d-\d\d(T| )?(\d\d:\d\d(:\d\d)?)?(Z| UTC)?", "2026-08-20"),
    (r"until \d\d:\d\d UTC", "until 12:10 UTC"),
    (r"\b\d:\d\d:\d\d", "0:00:00"),
    (r"\b\d+\.\d{3,4}\b|\b\d+%", "0"),
    (r"(2026-08-20 +0\n)+", "2026-08-20 0\n"),  # around midnight it is two days
    (r"process \d+", "process 4243"),
    (r"(\d+\.){2}\d+(; nodes get | in …)\S+", "3.11"),
    (r"(ssh(-keygen)?): /\S+(, OpenSSH.*)?$", r"\1: /usr/bin/\1"),
    (r" +", " "),
]


def normal(text: str) -> str:
    """Without what differs from run to run and from place to place."""
    for pattern, instead in VARIES:
        text = re.sub(pattern, instead, text, flags=re.MULTILINE)
    return text


@pytest.mark.needs("openssh")
def test_the_page_shows_what_the_commands_print(
    skypool: Run, cloud: FakeCloud, client: Callable[..., Client], state: Path
) -> None:
    shown: dict[str, str] = {}

    def show(name: str, *args: str) -> None:
        shown[name] = f"{shown.get(name, '')}$ skypool {' '.join(args)}\n{skypool(*args).stdout}"

    client("train", "gpu-8")
    client("old", nodes=3, answers="no").kill()
    aged("train", 4000)
    aged("old", 1000)
    ledger = Ledger.here()
    shown["receipt"] = str(ledger.receipt("session-of-train"))
    show("ps", "ps")
    show("cost", "cost")
    show("cost", "cost", "--by", "day", "--since", "30d")
    show("down", "down", "train", "--yes")
    change(ledger.file, "UPDATE orders SET at = at - 1000, sent = sent - 1000")
    over(cloud, "old")
    show("gc", "gc", "--provider", "fake")
    show("gc", "gc", "--provider", "fake", "--yes")
    show("doctor", "doctor", "--provider", "fake")
    offer = next(iter(cloud.offers(Need())))
    cloud.launch(offer, Order("sweep", "s-0", (0, 1), Need()))
    ledger.begin("sweep", "s", lease=600, drivers=[cloud])
    cloud.control.refuse(ProviderError, "describe")
    os.waitpid(terminate_in_background([cloud], "sweep", "s"), 0)
    shown["log"] = log_of("sweep", "s").read_text().strip()
    ledger.file.write_bytes(b"garbage" * 1000)
    shown["damaged"] = skypool("ps").stderr
    page = PAGE.read_text()
    assert re.findall(r"<!-- (\w+) -->", page) == ["receipt", "ps", "cost", "down", "gc", "log", "doctor", "damaged"]
    for name, text in shown.items():
        before, opening, after = re.split(rf"(<!-- {name} -->\n```\w*\n)", page)
        _, closing, rest = re.split(r"(?m)^(```)$", after, maxsplit=1)
        page = f"{before}{opening}{text.strip()}\n{closing}{rest}"
    for pattern, instead in VARIES[:2]:
        page = re.sub(pattern, instead, page, flags=re.MULTILINE)
    if os.environ.get("SKYPOOL_WRITE_DOCS") == "1":
        PAGE.write_text(page.replace(socket.gethostname(), "laptop"))
    assert normal(PAGE.read_text()) == normal(page), "write it anew: see the top of this file"
    assert cloud.count() == 0


# --- slices of several hosts ---------------------------------------------------------------------------------


def test_a_slice_is_listed_host_by_host_and_costs_once(tmp_path: Path, skypool: Run) -> None:
    cloud = slice_of(tmp_path / "tpus", "tpu")
    (pool,) = json.loads(skypool("ps", "--json").stdout)
    assert (pool["pool"], pool["usd_per_hour"]) == ("tpu", 3600.0)
    assert [(each["node"], each["usd_per_hour"]) for each in pool["instances"]] == [(0, 1800.0), (1, 1800.0)]
    done = skypool("down", "tpu", "--yes")
    assert done.returncode == 0, done.stderr
    assert "machine i-0001 (node 0 of slice s-0001) at fake" in done.stdout
    assert cloud.count() == 0
    assert len(cloud.control.calls("delete")) == 1
    record = Ledger.here().pools("tpu")[0]
    assert record.receipt(record.ended or 0.0).usd == pytest.approx(cloud.control.usd("tpu"), abs=0.5)
    (line,) = json.loads(skypool("cost", "--json").stdout)["lines"]
    assert (line["pool"], line["instances"]) == ("tpu", 2)
    assert line["usd"] == pytest.approx(cloud.control.usd("tpu"), abs=0.5)


def test_gc_ends_a_slice_that_was_left_as_a_whole(tmp_path: Path, skypool: Run) -> None:
    cloud = slice_of(tmp_path / "tpus", "tpu")
    Ledger.here().end("session-of-tpu")
    over(cloud, "tpu")
    found = json.loads(skypool("gc", "--json").stdout)["found"]
    machines = [each for each in found if each["kind"] == "machine"]
    assert [(each["id"], each["slice"], each["verdict"]) for each in machines] == [
        ("i-0001", "s-0001", "lost"),
        ("i-0002", "s-0001", "lost"),
    ]
    assert "ended: 2 machines and 2 other resources" in skypool("gc", "--yes").stdout
    assert cloud.count() == 0
