"""Programs get a signal when their machine is taken back soon: real processes, and machines of a fake cloud."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool.agent import own_notices
from skypool.agent.own_notices import OwnNotices
from skypool.agent.shared_page import SharedPage
from skypool.errors import NodeInterrupted, UsageError
from skypool.runs.node_program import _NoticeTeller, catches
from skypool.testing import FakeCloud
from tests.conftest import eventually, processes_of

CATCHES = "trap 'echo told; exit {status}' {signal}; echo begun; while :; do sleep 0.02; done"


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> SharedPage:
    made = SharedPage(1)
    monkeypatch.setattr(own_notices, "_own", OwnNotices(made, 0))
    return made


@pytest.fixture
def started() -> Iterator[Any]:
    made: list[subprocess.Popen[bytes]] = []

    def start(script: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE)
        made.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        return process

    yield start
    for each in made:
        each.kill()
        each.communicate()


@pytest.mark.parametrize(("name", "number"), [("", "TERM"), ("TERM", "TERM"), ("USR1", "USR1")])
def test_a_program_gets_the_signal_once_if_it_catches_it(
    page: SharedPage, started: Any, name: str, number: str
) -> None:
    process = started(
        f"n=0; trap 'n=$((n + 1))' {number}; echo begun; for i in $(seq 40); do sleep 0.02; done; exit $n"
    )
    teller = _NoticeTeller(process, pytest.fail, name)
    teller.look()
    page.interruption = time.time() + 60
    for _ in range(3):
        teller.look()
    assert process.wait(60) == 1
    assert not teller.has_ended_it(1)
    assert teller.has_ended_it(128 + getattr(signal, f"SIG{number}"))


def test_a_program_that_does_not_catch_it_is_left_alone(page: SharedPage, started: Any) -> None:
    process = started("echo begun; exec sleep 60")
    page.interruption = time.time() + 60
    told: list[str] = []
    for name in ("", "TERM", "USR1", "none"):
        teller = _NoticeTeller(process, told.append, name)
        teller.look()
        teller.look()
        assert not teller.has_ended_it(-signal.SIGTERM)
    assert told == ["the machine ends soon; SIGUSR1 is not sent, as the program does not catch it yet"]
    time.sleep(0.1)
    assert process.poll() is None


def test_a_program_that_begins_to_catch_it_after_the_notice_is_told_then(page: SharedPage, started: Any) -> None:
    process = started(f"echo begun; sleep 0.3; {CATCHES.format(status=0, signal='TERM')}")
    page.interruption = time.time() + 60
    teller = _NoticeTeller(process, pytest.fail, "")
    teller.look()
    eventually(lambda: catches(process.pid, signal.SIGTERM), what="a handler")
    teller.look()
    assert process.wait(60) == 0


def test_nothing_is_sent_if_it_is_not_wanted_or_if_the_client_interrupts_the_program(
    page: SharedPage, started: Any
) -> None:
    process = started(CATCHES.format(status=3, signal="TERM"))
    page.announce_stop(time.time() + 60, "limit")
    _NoticeTeller(process, pytest.fail, "").look()
    page.interruption = time.time() + 60
    _NoticeTeller(process, pytest.fail, "none").look()
    time.sleep(0.2)
    assert process.poll() is None
    page.interruption = 0.0
    page.announce_stop(time.time() + 60, "lease")
    _NoticeTeller(process, pytest.fail, "").look()
    assert process.wait(60) == 3


@pytest.mark.parametrize(("name", "interrupted"), [("", True), ("TERM", False), ("USR1", False)])
def test_status_0_is_a_success_only_if_the_user_has_named_the_signal(
    page: SharedPage, started: Any, name: str, interrupted: bool
) -> None:
    teller = _NoticeTeller(
        started(f"trap 'exit 0' {name or 'TERM'}; echo begun; while :; do sleep 0.02; done"), pytest.fail, name
    )
    assert not teller.has_ended_it(0), "nothing was sent"
    page.interruption = time.time() + 60
    teller.look()
    assert teller.has_ended_it(0) == interrupted
    assert not teller.has_ended_it(1)


def test_a_program_hears_of_a_notice_after_a_false_alarm_and_of_the_provider_after_a_lease(
    page: SharedPage, started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = started("trap 'echo told' TERM; echo begun; while :; do sleep 0.02; done")
    teller = _NoticeTeller(process, pytest.fail, "")

    def hears(count: int) -> None:
        for _ in range(3):
            teller.look()
            time.sleep(0.05)
        for _ in range(count):
            assert process.stdout.readline() == b"told\n"

    page.announce_stop(time.time() + 30, "lease")
    hears(1)
    page.announce_stop(0.0, "lease")
    teller.look()
    page.announce_stop(time.time() + 30, "lease")
    hears(1)
    page.interruption = time.time() + 30
    hears(1)
    page.announce_stop(0.0, "lease")
    page.interruption = 0.0
    teller.look()
    assert teller.has_ended_it(0), "it may have been saving when the notice was withdrawn"
    later = time.monotonic() + 120
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert not teller.has_ended_it(0), "it has gone on"
    process.kill()
    assert process.stdout.read() == b"", "no signal came twice"


# --- whole runs --------------------------------------------------------------------------------------------------


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCloud]:
    root = tmp_path / "project"
    root.mkdir()
    monkeypatch.chdir(root)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with FakeCloud(tmp_path / "cloud") as made:
        yield made
    eventually(lambda: not processes_of(str(tmp_path)), 30, "the end of all processes of the cloud")


def run(
    words: Sequence[str], cloud: FakeCloud, capsys: pytest.CaptureFixture[str], notice: float = 30, **options: Any
) -> sky.Run[None]:
    """Run a program, and announce that its machines are taken back when it has begun, so many seconds ahead."""
    said: list[str] = []

    def take_back() -> None:
        def has_begun() -> bool:
            said.append(capsys.readouterr().out)
            return "begun" in "".join(said)

        eventually(has_begun, 60, "the program")
        for each in cloud.instances():
            cloud.control.interrupt(each, notice)

    provider = threading.Thread(target=take_back)
    provider.start()
    try:
        done: sky.Run[None] = sky.run(words, cloud, market="spot", max_lifetime="10m", **options)
    finally:
        provider.join()
    return done


def catching(status: int) -> list[str]:
    """A program that ends with a status when it is told."""
    return ["sh", "-c", CATCHES.format(status=status, signal="TERM")]


COUNTS = """
import time
import skypool
print("begun", flush=True)
step = 0
while skypool.interruption(step) is None:
    time.sleep(0.005)
    step += 1
print("saves", step)
"""


@pytest.mark.slow
def test_all_processes_of_a_program_hear_of_the_notice_at_one_step(
    cloud: FakeCloud, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("train.py").write_text(COUNTS)
    env = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = run([sys.executable, "train.py"], cloud, capsys, procs=3, env=env)
    saves = [line.partition("saves ")[2] for line in done.output.splitlines() if "saves" in line]
    assert len(saves) == 3
    assert len({*saves}) == 1


def test_a_program_that_ends_with_0_by_the_signal_that_its_user_has_named_has_succeeded(
    cloud: FakeCloud, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run(catching(0), cloud, capsys, on_notice="TERM")
    assert (done.returncode, done.output.split()) == (0, ["begun", "told"])


@pytest.mark.parametrize(("procs", "status"), [(None, 0), (2, 143)])
def test_a_program_that_ends_by_the_signal_was_interrupted(
    cloud: FakeCloud, capsys: pytest.CaptureFixture[str], procs: int | None, status: int
) -> None:
    with pytest.raises(NodeInterrupted, match=r"ended by SIGTERM when it was told; run it again to go on"):
        run(catching(status), cloud, capsys, procs=procs)


SAVES = """
import os, signal, sys, time
def save(*_):
    time.sleep(2 * int(os.environ["RANK"]))
    print("saved", os.environ["RANK"], flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
print("begun", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_gang_ends_when_its_last_process_has_saved(
    cloud: FakeCloud, capsys: pytest.CaptureFixture[str], nodes: int
) -> None:
    Path("train.py").write_text(SAVES)
    began = time.monotonic()
    with pytest.raises(NodeInterrupted, match=r"ended by SIGTERM when it was told") as raised:
        run([sys.executable, "train.py"], cloud, capsys, notice=120, procs=2 // nodes, nodes=nodes)
    assert raised.value.others, "no process was stopped"
    assert time.monotonic() - began < 90
    printed = capsys.readouterr().out
    assert {line.partition("saved ")[2] for line in printed.splitlines() if "saved" in line} == {"0", "1"}


def test_a_signal_that_is_not_known_is_refused(cloud: FakeCloud) -> None:
    Path("train.py").touch()
    with pytest.raises(UsageError, match=r"on_notice= takes TERM, USR1 or none, not 'KILL'"):
        sky.run("train.py", on_notice="KILL")  # type: ignore[call-overload]
