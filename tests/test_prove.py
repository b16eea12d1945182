"""`skypool prove` at a cloud to rehearse with: its levels, what goes wrong, its report, and clients that are killed."""

from __future__ import annotations

import io
import json
import os
import pty
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from skypool.cli import main
from skypool.errors import AccessError, BudgetExceeded, ProviderError, UsageError
from skypool.model import Bill, Finding, Market, Need, Offer, PriceSource
from skypool.proof import free_checks
from skypool.proof.comparison import bill_step, price_step
from skypool.proof.proof import Proof
from skypool.proof.renting import Wish
from skypool.proof.report import RentedMachine, Report, Step, from_json
from skypool.proof.report_redaction import Redaction
from skypool.proof.selection import select
from skypool.rental.ledger import Ledger
from skypool.testing import FakeCloud, Stock
from skypool.testing.cloud_state import When
from tests.caches import with_zip
from tests.conftest import eventually
from tests.lab import stores
from tests.lab.launches import LATER, LEASE_OVER
from tests.test_ledger import change

ROOT = Path(__file__).parent.parent
RUN = "import sys; from skypool.cli import main; sys.exit(main())"
STOCK = [
    Stock("small", 0.1),
    Stock("small", 0.04, market="spot"),
    Stock("gpu", 2.5, "H100", quota="gpus"),
]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("SKYPOOL_FAKE_CLOUD", str(tmp_path / "cloud"))
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def cloud_in(folder: Path, **settings: Any) -> FakeCloud:
    cloud = FakeCloud(folder, **{"stock": STOCK, **settings})
    list(cloud.offers(Need()))
    return cloud


@pytest.fixture
def cloud(home: Path) -> FakeCloud:
    return cloud_in(home / "cloud")


@pytest.fixture
def prove(monkeypatch: pytest.MonkeyPatch) -> Run:
    """`skypool prove fake`, in this very process."""

    def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
        out, err = io.StringIO(), io.StringIO()
        with monkeypatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            for name, value in env.items():
                patch.setenv(name, value)
            argv = ["skypool", "prove", "fake", *args]
            patch.setattr(sys, "argv", argv)
            patch.setattr(sys, "stdin", io.StringIO())
            with pytest.raises(SystemExit) as left:
                main()
        status = left.value.code
        return subprocess.CompletedProcess(
            argv, status if isinstance(status, int) else 0, out.getvalue(), err.getvalue()
        )

    return run


def bad(told: str) -> list[str]:
    """Return each failure with its next step, as one text."""
    return re.findall(r"^  BAD +(.*\n +what to do: .*)", told, re.MULTILINE)


# --- levels that cost nothing --------------------------------------------------------------------------------


@pytest.mark.needs("openssh")
def test_read_asks_and_rents_nothing(prove: Run, cloud: FakeCloud) -> None:
    done = prove()
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith("level read: asks fake for credentials")
    assert "It costs nothing." in done.stdout
    assert "ok   offers: 3 offers; the cheapest is small in north-a for 0.0400 USD/h" in done.stdout
    assert "level write" not in done.stdout
    assert done.stdout.endswith("all is good\n")
    assert cloud.control.calls("create") == []


@pytest.mark.needs("openssh")
def test_write_sends_creates_that_are_refused(prove: Run, cloud: FakeCloud) -> None:
    done = prove("--level", "write")
    assert done.returncode == 0, done.stdout
    assert done.stdout.index("level read") < done.stdout.index("level write: sends fake creates that it must refuse")
    assert len(re.findall(r"ok   a (type|zone) .*: refused: no ", done.stdout)) == 4
    assert len(cloud.control.calls("create")) == 4
    assert cloud.count() == 0


@pytest.mark.needs("openssh")
def test_write_checks_a_bucket_as_machines_would_use_it(prove: Run, cloud: FakeCloud, tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    done = prove("--level", "write", "--bucket", f"file://{tmp_path}/bucket")
    told = [line.split(":")[1].strip() for line in done.stdout.splitlines() if "bucket: " in line]
    assert (done.returncode, told) == (0, ["list", "write", "read", "create", "delete"])
    assert not [*(tmp_path / "bucket").iterdir()]
    missing = prove("--level", "write", "--bucket", f"file://{tmp_path}/missing")
    assert missing.returncode == 1
    assert bad(missing.stdout)[0].startswith(f"bucket: {tmp_path}/missing is no folder here")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--bucket", "file:///x"], "--bucket writes an object, which level read does not"),
        (["--level", "write", "--bucket-keys", "A,B"], "are about a bucket; name it with --bucket URL"),
        (["--level", "write", "--bucket", "s3a://x"], "did you mean s3://"),
        (["--bill", "proof.json", "--level", "write", "--bucket", "file:///x"], "so leave out --bucket"),
        (["--bill", "proof.json", "--report", "new.md", "--record", "all"], "so leave out --report, --record"),
    ],
)
def test_a_bucket_that_cannot_be_checked_is_refused(prove: Run, words: list[str], why: str) -> None:
    done = prove(*words)
    assert done.returncode == 2
    assert why in done.stderr


@pytest.mark.slow
@pytest.mark.needs("openssh")
@pytest.mark.skipif(bool(stores.missing_s3()), reason=stores.missing_s3())
def test_keys_of_a_prefix_are_proved_to_reach_nothing_else(prove: Run, cloud: FakeCloud, tmp_path: Path) -> None:
    with stores.seaweedfs(tmp_path) as server:
        words = ["--level", "write", "--bucket", "s3://models/runs", "--bucket-endpoint", server.endpoint]
        done = prove(*words, "--bucket-keys", "ID,SECRET", ID="run", SECRET=stores.secret_of("run"))
    assert done.returncode == 0, done
    assert "bucket: outside of the prefix: the keys were refused to list or look at objects there" in done.stdout


@pytest.mark.needs("openssh")
def test_credentials_that_are_not_accepted_are_one_line_and_end_the_proof(prove: Run, home: Path) -> None:
    cloud_in(home / "locked", key="right", machines=False)
    done = prove("--level", "cents", "--yes", SKYPOOL_FAKE_CLOUD=str(home / "locked"), SKYPOOL_FAKE_KEY="expired")
    assert done.returncode == 1
    (told,) = bad(done.stdout)
    assert told.startswith("credentials: fake refused")
    assert "what to do: set $SKYPOOL_FAKE_KEY" in told
    assert "level write" not in done.stdout
    assert "not all is good: 1 step failed" in done.stdout


@pytest.mark.needs("openssh")
def test_a_quota_of_0_is_told_with_the_next_step(prove: Run, cloud: FakeCloud) -> None:
    cloud.control.limit("gpus", 0)
    done = prove()
    assert done.returncode == 1
    assert bad(done.stdout) == [
        "quota gpus: at most 0\n       what to do: raise it: FakeCloud.control.limit('gpus', …)"
    ]


@pytest.mark.needs("openssh")
def test_a_clock_that_was_set_back_is_told_with_the_next_step(prove: Run, cloud: FakeCloud) -> None:
    ledger = Ledger.here()
    ledger.begin("p", "s", lease=600)
    change(ledger.file, "UPDATE pools SET beat = beat + 86400")
    (told,) = bad(prove().stdout)
    assert re.match(r"clock: .* is before .*\n +what to do: set this computer's clock", told)


def test_a_wrong_clock_explains_why_the_credentials_are_not_accepted(
    monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    locked = cloud_in(home / "locked", key="right", machines=False)
    driver = replace(locked, key="wrong")
    wrong = [Finding("API: clock", False, "-900 s off", "set the clock"), Finding("image", False, "no", "log in")]
    monkeypatch.setattr(FakeCloud, "check", lambda self: [Finding("ssh", True, "there"), *wrong])
    reading = free_checks.read(driver)
    assert not reading.known
    assert [each.what for each in reading.findings] == ["ssh", "API: clock"]


@pytest.mark.needs("openssh")
def test_prices_that_drifted_from_the_list_are_told_with_the_next_step(prove: Run, cloud: FakeCloud) -> None:
    cloud.control.reprice("small", 0.2)
    (told,) = bad(prove().stdout)
    assert told.startswith("price list: small in north-a costs 0.2 USD/h, not 0.1\n       what to do: trust the offers")


@pytest.mark.needs("openssh")
def test_a_missing_permission_is_one_line(prove: Run, cloud: FakeCloud) -> None:
    cloud.control.refuse(AccessError, "create", times=None)
    done = prove("--level", "write")
    assert done.returncode == 1
    (told,) = bad(done.stdout)
    assert "the account lacks the permission (Forbidden)\n       what to do: ask the owner of the account" in told
    assert told.count("that is not sold") == 2, "all four creates are named"


def test_a_machine_that_is_made_all_the_same_is_named_and_ended(prove: Run, home: Path) -> None:
    cloud = cloud_in(home / "cloud", machines=False)
    cloud.control.make_anything()
    done = prove("--level", "write", SKYPOOL_FAKE_CLOUD=str(cloud.state))
    assert done.returncode == 1
    assert "i-0001" in done.stdout
    assert cloud.count() == 0


def test_ssh_is_a_fact_of_this_computer_and_is_not_said_again_by_a_driver(
    cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = [Finding("API: ssh on this machine", True, "OpenSSH_9.2"), Finding("credentials", True, "yes")]
    monkeypatch.setattr(FakeCloud, "check", lambda self: told)
    titles = [each.what for each in free_checks.read(cloud).findings]
    assert titles[0] == "credentials"
    assert not [each for each in titles if "ssh" in each]


def test_failures_with_the_same_advice_are_said_once() -> None:
    several = [
        Finding("a", True, "x"),
        Finding("b", False, "no b", "log in"),
        Finding("c", False, "no c", "log in"),
        Finding("d", False, "gone"),
        Finding("e", False, "gone"),
        Finding("f", True, "x"),
    ]
    assert [(each.what, each.text) for each in free_checks.once(several)] == [
        ("a", "x"),
        ("b, c", "no b"),
        ("d, e", "gone"),
        ("f", "x"),
    ]


def test_old_tables_of_prices_are_told_with_the_next_step() -> None:
    def offer(day: date | None, market: Market = "on-demand") -> Offer:
        return Offer("a", "t", market=market, price_source=PriceSource("table", day))

    today = date(2026, 11, 24)
    assert free_checks.prices([Offer("a", "t")], today) == []
    (fresh,) = free_checks.prices([offer(date(2026, 10, 1)), Offer("a", "t")], today)
    assert (fresh.good, fresh.text) == (True, "1 of 2 prices are from tables of 2026-10-01 (table)")
    for old in (offer(date(2026, 1, 1)), offer(None), offer(date(2026, 10, 1), "spot")):
        (told,) = free_checks.prices([old], today)
        assert not told.good
        assert "1 are too old" in told.text
        assert "install a later skypool" in told.advice


# --- what to rent --------------------------------------------------------------------------------------------


def sold(usd: float, market: Market = "on-demand", **more: Any) -> Offer:
    return Offer("a", f"t{usd}", market=market, usd_per_hour=usd, **more)


def test_the_cheapest_machine_and_one_for_the_guard_come_before_the_spot_machine() -> None:
    offers = [sold(0.3, "spot"), sold(0.6), sold(0.9, "spot")]
    chosen = select(offers, max_usd=1.0, lifetime=1200.0, with_guard=True)
    assert [(each.name, each.offer.usd_per_hour) for each in chosen.stages] == [
        ("first", 0.6),
        ("spot", 0.3),
        ("guard", 0.6),
    ]
    assert chosen.most_usd == pytest.approx(0.5)
    less = select(offers, max_usd=0.45, lifetime=1200.0, with_guard=True)
    assert [each.name for each in less.stages] == ["first", "guard"]
    assert less.left_out == ("spot: 0.10 USD are needed, and 0.05 USD are left",)


def test_without_spot_a_second_machine_is_rented_and_sold_out_offers_are_passed_over() -> None:
    offers = [sold(0.1, available=False), sold(0.3)]
    chosen = select(offers, max_usd=1.0, lifetime=1200.0, with_guard=False)
    assert [(each.name, each.offer.usd_per_hour) for each in chosen.stages] == [("first", 0.3), ("second", 0.3)]


def test_the_minimum_time_that_is_billed_counts() -> None:
    with pytest.raises(BudgetExceeded, match=r"can cost 1.20 USD .* raise --max-usd to 1.2"):
        select([sold(1.2, least_billed=3600.0)], max_usd=1.0, lifetime=1200.0, with_guard=True)


@pytest.mark.needs("openssh")
def test_too_little_money_is_one_line_and_rents_nothing(prove: Run, cloud: FakeCloud) -> None:
    done = prove("--level", "cents", "--max-usd", "0.001", "--yes")
    assert done.returncode == 1
    (told,) = bad(done.stdout)
    assert "what to rent: the cheapest machine, small in north-a, can cost 0.03 USD" in told
    assert "what to do: raise --max-usd to 0.04" in told
    assert cloud.control.calls("make") == []


@pytest.mark.needs("openssh")
def test_nothing_for_sale_is_one_line(prove: Run, cloud: FakeCloud) -> None:
    done = prove("--level", "cents", "--accelerator", "A100", "--yes")
    assert done.returncode == 1
    (told,) = bad(done.stdout)
    assert told.startswith(
        "what to rent: no provider sells what the pool needs\n       what to do: `skypool plan -p fake`"
    )


def test_nobody_is_asked_where_there_is_no_terminal(prove: Run, cloud: FakeCloud) -> None:
    done = prove("--level", "cents")
    assert done.returncode == 2
    assert done.stderr.startswith("error: stdin is not a terminal")
    assert "pass --yes" in done.stderr
    assert cloud.control.calls("make") == []


def test_a_no_rents_nothing(cloud: FakeCloud, home: Path) -> None:
    ours, theirs = pty.openpty()
    argv = [sys.executable, "-c", RUN, "prove", "fake", "--level", "cents"]
    with subprocess.Popen(argv, cwd=home, stdin=theirs, stdout=subprocess.PIPE, text=True) as process:
        os.write(ours, b"n\n")
        told, _ = process.communicate(timeout=60)
    os.close(ours)
    os.close(theirs)
    assert process.returncode == 1
    assert "1. first machine: small in north-a, on-demand, 0.1000 USD/h" in told
    assert "It costs about 0.0200 USD, and at most 0.08 USD: each machine ends itself after 20 minutes." in told
    assert "Rent these machines? [y/N]" in told
    assert cloud.control.calls("make") == []


# --- cents ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_cents_rents_ends_watches_and_compares_the_bill(prove: Run, cloud: FakeCloud, home: Path) -> None:
    file = home / "proof.md"
    done = prove("--level", "cents", "--yes", "--lease", "6s", "--report", str(file), SKYPOOL_FAKE_KEY="sesame-street")
    assert done.returncode == 0, done.stdout + done.stderr
    assert cloud.count() == 0
    report = from_json((home / "proof.json").read_text())
    steps = {each.what: each for each in report.steps if each.level in ("cents", "bill")}
    assert list(steps) == [
        *(f"{name} machine: {what}" for name in ("first", "spot") for what in ("reached", "a call", "ended", "price")),
        *(f"machine without its client: {what}" for what in ("reached", "its own end", "nothing left")),
        "accelerator",
        "bill",
    ]
    assert {each.result for each in steps.values()} == {"good", "open"}
    assert steps["bill"].result == "open"
    assert (
        steps["accelerator"].text
        == "no machine with an accelerator was rented; H100-80GB in north-a costs 2.5000 USD/h"
    )
    command = "skypool prove fake --level cents --accelerator H100-80GB --max-usd 3"
    assert steps["accelerator"].advice == f"run `{command}`, for about 0.62 USD"
    assert re.match(
        r"it ended \d+ s after its client, with a lease of 6 s", steps["machine without its client: its own end"].text
    )
    assert [(each.market, each.offered_usd_per_hour, each.ended) for each in report.machines] == [
        ("on-demand", 0.1, True),
        ("spot", 0.04, True),
        ("on-demand", 0.1, True),
    ]
    assert report.good
    assert report.receipt_usd == pytest.approx(cloud.control.usd(), rel=0.5)
    assert "sesame" not in file.read_text() + (home / "proof.json").read_text()
    page = file.read_text()
    assert page.startswith("# Proof of fake, level cents: all is good\n")
    assert "| first machine: a call |" in page.replace("| cents | ", "| ")
    assert all(each.id in page for each in report.machines)
    assert [record.ended is not None for record in Ledger.here().pools()] == [True] * 3

    cloud.clock.advance(3700)
    later = prove("--bill", str(home / "proof.json"))
    assert later.returncode == 0, later.stdout
    assert "ok   bill: billed 0.0" in later.stdout
    assert from_json((home / "proof.json").read_text()).billed_usd == pytest.approx(report.receipt_usd, abs=0.005)
    cloud.control.overbill(1e6)
    dearer = prove("--bill", str(home / "proof.json"), "--json")
    assert dearer.returncode == 1
    (step,) = [each for each in json.loads(dearer.stdout)["steps"] if each["level"] == "bill"]
    assert step["result"] == "bad"
    assert step["advice"].startswith("look at the provider's billing page")


@pytest.mark.needs("openssh")
def test_json_is_all_there_is_on_stdout(prove: Run, cloud: FakeCloud) -> None:
    told = json.loads(prove("--level", "write", "--json").stdout)
    assert told["good"] is True
    assert {each["level"] for each in told["steps"]} == {"read", "write"}
    assert told["versions"]["skypool"]


def proof_at(cloud: FakeCloud, **more: Any) -> Proof:
    proof = Proof(cloud, "cents", 1.0, Wish(console="off"), lease=2.0, **more)
    selection = proof.select()
    assert selection is not None
    proof.rent(selection)
    proof.end()
    return proof


@pytest.mark.slow
def test_a_machine_that_does_not_end_itself_is_ended_and_told(home: Path) -> None:
    cloud = cloud_in(home / "undying", ends_itself=False)
    proof = proof_at(replace(cloud, ends_itself=True), margin=1.0)
    wrong = [each for each in proof.report.steps if each.result == "bad"]
    assert [each.what for each in wrong] == ["machine without its client: its own end"]
    assert wrong[0].text.startswith("it lived on 3 s after its client, with a lease of 2 s; skypool ends it")
    assert "do not rely on the lease" in wrong[0].advice
    assert not proof.report.good
    assert cloud.count() == 0
    assert all(each.ended for each in proof.report.machines)


@pytest.mark.slow
def test_where_no_machine_ends_itself_the_proof_says_so(home: Path) -> None:
    cloud = cloud_in(home / "undying", ends_itself=False)
    proof = proof_at(cloud)
    (told,) = [each for each in proof.report.steps if each.what == "machine without its client"]
    assert (told.result, told.advice) == ("open", "run `skypool gc --yes` after a crash of your computer")
    assert "cannot end their own cost" in told.text
    assert proof.report.good
    assert [each.market for each in proof.report.machines] == ["on-demand", "spot"]


@pytest.mark.slow
def test_a_machine_that_cannot_be_rented_is_told_and_the_others_are_rented(home: Path) -> None:
    cloud = cloud_in(home / "cloud")
    cloud.control.refuse(AccessError, market="spot", times=None)
    proof = proof_at(cloud)
    wrong = [each for each in proof.report.steps if each.result == "bad"]
    assert [each.what for each in wrong] == ["spot machine: reached"]
    assert wrong[0].advice
    assert "\n" not in wrong[0].text
    assert len(proof.report.machines) == 2
    assert cloud.count() == 0


def test_a_client_of_the_guard_that_fails_is_told(home: Path) -> None:
    cloud = cloud_in(home / "cloud", stock=STOCK[:1])
    cloud.control.refuse(ProviderError, "make", times=None)
    proof = proof_at(cloud)
    wrong = [each.what for each in proof.report.steps if each.result == "bad"]
    assert wrong == [f"{each}: reached" for each in ("first machine", "second machine", "machine without its client")]
    assert all(each.advice for each in proof.report.steps if each.result == "bad")
    assert cloud.count() == 0


# --- comparison, report and redaction ------------------------------------------------------------------------


def machine(**more: Any) -> RentedMachine:
    known: dict[str, Any] = {"offered_usd_per_hour": 1.0, "usd_per_hour": 1.0, "market": "on-demand", "usd": 0.1} | more
    times = {"launched": 0.0, "billed_from": 0.0, "until": 360.0, "ended": True, "least_billed": 0.0}
    return RentedMachine(id="i-1", pool="p", type="t", place="a", **(known | times))


@pytest.mark.parametrize(
    ("found", "result"),
    [
        ({}, "good"),
        ({"usd_per_hour": 1.2}, "bad"),
        ({"usd_per_hour": 0.5}, "bad"),
        ({"usd_per_hour": 1.2, "market": "spot"}, "good"),
        ({"offered_usd_per_hour": None}, "open"),
    ],
)
def test_a_price_is_compared_with_the_plan(found: dict[str, object], result: str) -> None:
    step = price_step("price", [machine(**found)])
    assert step.result == result
    assert bool(step.advice) == (result == "bad")


@pytest.mark.parametrize(
    ("usd", "result"), [(0.1, "good"), (0.104, "good"), (0.0, "bad"), (0.12, "bad"), (None, "open")]
)
def test_a_bill_is_compared_with_the_receipt(usd: float | None, result: str) -> None:
    assert bill_step([machine()], Bill(usd, "by the API")).result == result


def test_a_report_is_the_same_after_it_was_written_and_read() -> None:
    step = Step("read", "a | b", "bad", "text", "advice", 1.0, 2.0)
    report = Report("fake", "cents", 0.0, 1.0, {"skypool": "1"}, 1.0, (step,), (machine(),), 0.2)
    assert from_json(json.dumps(report.to_json())) == report
    assert "a \\| b" in report.to_markdown()
    for text in ("", "[]", "{}", '{"format": 1}'):
        with pytest.raises(UsageError, match="no JSON report"):
            from_json(text)
    with pytest.raises(UsageError, match="format 99"):
        from_json('{"format": 99}')


@pytest.mark.parametrize(
    ("private", "text"),
    [
        ("123456789012", "User: arn:aws:iam::123456789012:user/joe may not"),
        ("joe", "User: arn:aws:iam::123456789012:user/joe may not"),
        ("123456789012", "account 123456789012 is closed"),
        ("my-project-7", "projects/my-project-7/zones/a was not found"),
        ("my-project-7", "the project 'my-project-7' has no billing"),
        ("joe", "joe@example.org may not"),
        ("sesame-street", "the key sesame-street is wrong"),
        ("joe", "/home/joe/.local/state/skypool"),
        ("AKIAIOSFODNN7EXAMPLE", "AKIAIOSFODNN7EXAMPLE is not known"),
        ("8.8.4.4", "8.8.4.4/32 may log in"),
    ],
)
def test_what_is_private_is_not_in_a_report(private: str, text: str) -> None:
    assert private not in Redaction(["sesame-street"])(text)


def test_what_is_not_private_stays_in_a_report() -> None:
    text = "i-0123456789abcdef0 in us-east-1a since 2026-11-24 08:34:23 UTC, OpenSSL 3.0.19, project of 12 machines"
    assert Redaction()(text) == text


# --- clients that end early ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        (signal.SIGINT, "without its client: reached"),
        (signal.SIGTERM, "first machine: reached"),
        *(
            pytest.param(number, moment, marks=pytest.mark.slow)
            for number, moment in (
                (signal.SIGINT, "first machine: reached"),
                (signal.SIGHUP, "first machine: reached"),
                (signal.SIGHUP, "without its client: reached"),
                (signal.SIGTERM, "without its client: reached"),
                (signal.SIGTERM, "spot machine: price"),
            )
        ),
    ],
)
def test_a_proof_that_is_stopped_leaves_nothing(cloud: FakeCloud, home: Path, number: int, moment: str) -> None:
    argv = [sys.executable, "-u", "-c", RUN, "prove", "fake", "--level", "cents", "--yes", "--lease", "60s"]
    with (
        (home / "stderr").open("w") as stderr,
        subprocess.Popen(
            argv, cwd=home, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if moment in line:
                break
        os.kill(process.pid, number)
        rest = process.stdout.read()
        status = process.wait(60)
    (file,) = home.glob("skypool-prove-fake-*.json")
    report = json.loads(file.read_text())
    assert status != 0, f"{rest}\n{(home / 'stderr').read_text()}\n{report}"
    eventually(lambda: cloud.count() == 0, 60, "the end of everything")
    assert report["ended"] is None
    assert report["good"] is False


def lived(home: Path, number: int, when: When) -> tuple[str, int, int]:
    """Kill a proof at one call. Return the call, and what was left then and after `gc`."""
    home.mkdir()
    environment = {
        **os.environ,
        "XDG_STATE_HOME": str(home / "state"),
        "XDG_CACHE_HOME": str(with_zip(home / "cache")),
        "SKYPOOL_FAKE_CLOUD": str(home / "cloud"),
    }

    def run(program: str, *words: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-c", program, *words]
        return subprocess.run(argv, env=environment, cwd=home, capture_output=True, text=True, timeout=200)

    with cloud_in(home / "cloud", stock=STOCK[:2]) as cloud:
        begun = len(cloud.control.calls())
        if number:
            cloud.control.kill_client(begun + number, when)
        done = run(RUN, "prove", "fake", "--level", "cents", "--yes", "--lease", "3s")
        calls = cloud.control.calls()[begun:]
        if not number:
            assert done.returncode == 0, done.stdout + done.stderr
            return str(len(calls)), 0, cloud.count()
        if len(calls) < number:
            return "not made", cloud.count(), cloud.count()
        client = calls[number - 1].pid
        statuses = (-9, 1) if client == calls[0].pid else (-9, 0, 1)  # the client of the guard is to be killed anyway
        assert done.returncode in statuses, done.stdout + done.stderr
        eventually(lambda: not alive(client), 30, "the end of the client that was killed")
        time.sleep(0.5)  # a client of the guard whose parent was killed begins to end its machine
        left = cloud.count()
        shutil.rmtree(home / "state", ignore_errors=True)
        cloud.clock.advance(LEASE_OVER)
        gc = run(LATER, str(LEASE_OVER), "gc", "--yes", "--provider", "fake")
        assert gc.returncode == 0, gc
        return f"{number} {calls[number - 1].call}", left, cloud.count()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def killed(home: Path, seed: int, share: int = 1) -> list[str]:
    """Kill a proof before and after each of its calls, or at every `share`th of these moments. Return what was left.

    Args:
        home: a folder that does not exist yet.
        seed: decides with which moment the count begins.
        share: 1 for all moments.
    """
    home.mkdir()
    many, _, left = lived(home / "whole", 0, "before")
    assert left == 0
    moments: tuple[When, When] = ("before", "after")
    cells = [(number, when) for number in range(1, int(many) + 1) for when in moments]
    assert len(cells) > 60
    cells = cells[random.Random(seed).randrange(share) :: share]
    with ThreadPoolExecutor(3) as several:  # each of them waits more than it works
        told = list(several.map(lambda cell: lived(home / f"{cell[0]}-{cell[1]}", *cell), cells))
    for (_, when), (call, early, late) in zip(cells, told, strict=True):
        print(f"{call:>18}  {when:6}  {early:>5}  {late:>8}", flush=True)
    assert share > 1 or any(early for _, early, _ in told)
    return [f"{number} {when}: {late}" for (number, when), (_, _, late) in zip(cells, told, strict=True) if late]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_proof_that_is_killed_at_any_call_leaves_nothing(tmp_path: Path) -> None:
    assert killed(tmp_path / "proofs", seed=7, share=10) == []
