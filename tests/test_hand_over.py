"""The agent's part of a hand-over: a real agent with its keeper, a small runner, and clients that speak frames."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from skypool.head import messages, rows
from skypool.head.states import (
    Abandon,
    Ask,
    CancelRun,
    Claim,
    Commit,
    EndSooner,
    Outcome,
    Prepare,
    Stage,
    Status,
    ToAgent,
)
from skypool.wire.frames import WIRE_VERSION, Decoder, Kind, frame, header_of, long_frame
from skypool.wire.save_orders import Order
from tests.conftest import eventually
from tests.lab import small_runner

ROOT = Path(__file__).parent.parent
LAB = ROOT / "tests" / "lab"
CLAIM = Claim("train-7")
HEIR = "the heir's word"


class Peer:
    """A connection to the agent: of its client, or of anybody else who may log in."""

    def __init__(self, head: Head, name: str = "") -> None:
        self.link = small_runner.connect(str(head.folder / "agent.sock"), self)
        self.decoder = Decoder()
        self.frames: list[tuple[Kind, dict[str, Any]]] = []
        self.is_open = True
        self.left: float | None = None  # the seconds until the machine's end, in the last state
        if name:
            self.send(long_frame(Kind.HELLO, {"wire": WIRE_VERSION, "session": name, "calls": [], "epoch": 0}))

    def send(self, buffers: list[Any]) -> None:
        self.link.sendall(b"".join(buffers))

    def say(self, message: ToAgent, needs: bytes = b"", **more: Any) -> None:
        self.send(frame(Kind.HANDOVER, messages.to_json(message) | more, [needs]))

    def read(self, seconds: float = 0.1) -> None:
        if self.is_open and select.select([self.link], [], [], seconds)[0]:
            n = 0
            with contextlib.suppress(ConnectionError):
                n = self.link.recv_into(self.decoder.space())
            self.is_open = n > 0
            self.frames += [(f.kind, header_of(f)) for f in self.decoder.advance(n)] if n else []

    def hears(self, test: Callable[[Kind, dict[str, Any]], bool], seconds: float = 30.0) -> dict[str, Any]:
        """Return the header of the first frame like this, and forget it and those before it."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for index, (kind, header) in enumerate(self.frames):
                if test(kind, header):
                    del self.frames[: index + 1]
                    return header
            assert self.is_open, f"closed after {self.frames}"
            self.read()
        raise AssertionError(f"only {self.frames}")

    def gets(self, kind: Kind) -> dict[str, Any]:
        return self.hears(lambda each, header: each is kind)

    def status(self) -> Status:
        return self._without_left(messages.status(self.gets(Kind.HANDED)))

    def _without_left(self, status: Status) -> Status:
        self.left = status.left
        return replace(status, left=None)

    def until(self, stage: Stage, seconds: float = 30.0) -> Status:
        """Return the first state that is in this stage."""
        like = lambda kind, header: kind is Kind.HANDED and header["stage"] == stage.value  # noqa: E731
        return self._without_left(messages.status(self.hears(like, seconds)))

    def asks(self, message: ToAgent) -> Status:
        """Return the answer to a message, after all that came before."""
        while self.frames or select.select([self.link], [], [], 0)[0]:
            self.read(0)
            self.frames.clear()
            assert self.is_open
        self.say(message)
        return self.status()

    def is_closed(self) -> bool:
        self.read(0)
        return not self.is_open


class Head:
    """A machine with its agent, and the files by which runner and program are told what to do."""

    def __init__(self, place: Path, guard: str = "", lease: float = 60.0, ranks: int = 1, retries: int = 0) -> None:
        self.place, self.folder, self.notes = place, place / "node", place / "notes"
        for each in (self.folder, self.notes):
            each.mkdir(0o700)
        self.run = place / "home" / "heads" / "train-7-1"
        config = {"folder": str(self.folder), "spool": str(self.folder), "cwd": str(self.folder)}
        more: dict[str, Any] = {"lease": lease, "slots": 1, "liveness": 5.0}
        if guard:
            (place / "lease").write_text(" " * 32)
            more["guard"] = str(place / "lease")
        runner = [sys.executable, str(LAB / "small_runner.py"), str(ROOT)]
        argv = [sys.executable, "-m", "tests.lab.head_agent", json.dumps(config | more), guard, *runner]
        self.keeper = subprocess.Popen(argv, cwd=ROOT)
        said = {"notes": str(self.notes), "socket": str(self.folder / "agent.sock")}
        self.needs = json.dumps(said | {"ranks": ranks, "retries": retries}).encode()
        eventually((self.folder / "keeper.json").exists, 30, "the keeper")
        self.client = Peer(self, "client")
        self.agent = self.client.gets(Kind.WELCOME)["pid"]
        self.pid = json.loads((self.folder / "keeper.json").read_text())["pid"]

    def tell(self, name: str) -> None:
        (self.notes / name).touch()

    def lines(self, name: str) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return (self.notes / name).read_text().splitlines()
        return []

    def steps(self) -> list[str]:
        return [each.split()[1] for each in self.lines("journal")]

    def runners(self) -> list[int]:
        return list(dict.fromkeys(int(each.split()[0]) for each in self.lines("journal")))

    def prepare(self, end: float = 600.0, keep: float = 0.0) -> None:
        self.client.say(Prepare(CLAIM, end, HEIR), self.needs, folder=str(self.run), keep=keep)

    def commit(self, end: float = 600.0, keep: float = 0.0) -> None:
        self.prepare(end, keep)
        self.client.until(Stage.READY)
        self.client.say(Commit(CLAIM))
        self.client.until(Stage.COMMITTED)

    def ran(self) -> None:
        eventually(lambda: bool(self.lines("ran")), 60, "the start of the program")

    def is_gone(self, seconds: float = 60.0) -> None:
        """Wait until the agent has ended and all that it has started."""
        self.keeper.wait(seconds)
        assert not self.folder.exists()
        for pid in self.runners():
            assert has_ended(pid)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        self.keeper.wait(30)


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Head]]:
    made: list[Head] = []

    def start(**more: Any) -> Head:
        made.append(Head(tmp_path, **more))
        return made[-1]

    yield start
    for each in made:
        each.close()


def test_a_run_that_was_handed_over_ends_without_its_client(started: Callable[..., Head]) -> None:
    head = started()
    before = time.time()
    head.commit(end=600)
    row = rows.read(str(head.run))
    assert row is not None
    assert (row.claim, row.heir) == (CLAIM, messages.heir_digest(HEIR))
    assert before + 600 <= row.end <= time.time() + 600
    assert HEIR not in (head.run / rows.FILE).read_text()
    head.client.link.close()
    head.ran()
    watcher = Peer(head)
    assert watcher.asks(Ask(CLAIM)) == Status(CLAIM, Stage.COMMITTED)
    head.tell("go")
    assert watcher.until(Stage.OVER).outcome is Outcome.ENDED
    head.is_gone()
    assert head.lines("ran") == ["1 0"]
    assert rows.read(str(head.run)) == row  # it outlives the agent's folder


def test_the_agent_tells_the_end_that_its_guard_holds_which_only_comes_nearer(started: Callable[..., Head]) -> None:
    head = started(guard="holds")
    assert head.client.asks(Ask(CLAIM)).stage is Stage.NOTHING
    assert head.client.left is None
    for end, asked in ((900.0, "prepare"), (600.0, "sooner"), (800.0, "later")):
        if asked == "prepare":
            head.prepare(end)
        else:
            head.client.say(EndSooner(CLAIM, end))
        head.client.until(Stage.READY)
        assert head.client.left is not None
        assert 570 < head.client.left <= min(end, 900.0 if asked == "prepare" else 600.0)
    told = [each.split()[:2] for each in (head.place / "guard.txt").read_text().splitlines()]
    assert told == [["end", "900"], ["end", "600"], ["end", "800"]]
    head.client.say(Commit(CLAIM))
    head.client.until(Stage.COMMITTED)
    row = rows.read(str(head.run))
    assert row is not None
    assert row.end <= time.time() + 600


STEPS = (
    *("before-StandsBy", "after-StandsBy", "got-Go", "before-Takes", "after-Takes", "got-Welcome", "before-Starts"),
    *("sent-0", "after-Starts", "got-ProgramOver", "before-Store", "after-Store", "before-RunOver", "after-RunOver"),
)


@pytest.mark.parametrize(
    "step", [pytest.param(each, marks=[] if each in ("got-Go", "after-Starts") else pytest.mark.slow) for each in STEPS]
)
def test_a_runner_that_is_killed_at_any_step_is_followed_by_one_that_completes_the_run(
    step: str, started: Callable[..., Head]
) -> None:
    head = started()
    head.tell(f"die-{step}")
    head.tell("go")
    head.commit()
    status = head.client.until(Stage.OVER, 60)
    assert status == Status(CLAIM, Stage.OVER, outcome=Outcome.ENDED)
    assert head.lines("ran") == ["1 0"]
    assert len(head.runners()) == (1 if step == "after-RunOver" else 2)
    head.is_gone()


def test_a_run_is_over_when_several_runners_have_failed_to_store_its_end(started: Callable[..., Head]) -> None:
    head = started()
    head.commit()
    head.ran()
    for _ in range(4):
        head.tell("die-before-Store")
        head.tell("go")
        eventually(lambda: not (head.notes / "die-before-Store").exists(), 60, "the end of a runner")
    status = head.client.until(Stage.OVER, 60)
    assert status.outcome is Outcome.ENDED
    assert status.why == "4 runners have ended before they had stored how the run has ended"
    head.is_gone()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_gang_or_call_that_was_sent_whole_goes_on_without_its_runner_and_else_is_lost(
    ranks: int, started: Callable[..., Head]
) -> None:
    head = started(ranks=ranks, retries=1)
    head.tell("die-sent-0")
    head.commit()
    attempt = "1" if ranks == 1 else "2"
    wanted = {f"{attempt} {rank}" for rank in range(ranks)}
    eventually(lambda: wanted <= set(head.lines("ran")), 60, "the whole program")
    head.tell("go")
    assert head.client.until(Stage.OVER, 60).outcome is Outcome.ENDED
    assert [each for each in head.lines("ran") if each[0] == attempt] == sorted(wanted, key=head.lines("ran").index)


def test_a_program_that_is_killed_is_started_again_as_often_as_is_allowed(started: Callable[..., Head]) -> None:
    head = started(retries=1)
    head.tell("crash")
    head.commit()
    eventually(lambda: head.lines("ran") == ["1 0", "2 0"], 60, "the second attempt")
    head.tell("crash")
    assert head.client.until(Stage.OVER, 60).outcome is Outcome.FAILED
    assert head.lines("ran") == ["1 0", "2 0"]


def test_anybody_who_may_log_in_asks_and_cancels_and_a_former_client_only_watches(started: Callable[..., Head]) -> None:
    head = started()
    other = Peer(head)
    assert other.asks(Ask(CLAIM)) == Status(CLAIM, Stage.NOTHING)
    other.say(Prepare(CLAIM, 60, "another word"), head.needs, folder=str(head.run))
    assert other.status().stage is Stage.NOTHING  # it is not the owner
    head.prepare()
    head.client.until(Stage.READY)
    assert other.asks(Commit(CLAIM)).stage is Stage.READY
    assert other.asks(Abandon(CLAIM)).stage is Stage.READY
    assert other.asks(Ask(Claim("another"))).stage is Stage.OTHER
    head.client.say(Commit(CLAIM))
    head.client.until(Stage.COMMITTED)
    assert other.until(Stage.COMMITTED).claim == CLAIM
    head.ran()
    # the former client: each of its frames is answered by the state, and does nothing
    head.client.frames.clear()
    head.client.send(frame(Kind.PING, {"left": 0.1, "stop": 0.1, "linger": [0.1, 0.1]}))
    assert head.client.status().stage is Stage.COMMITTED
    head.client.send(frame(Kind.CANCEL, {"id": 1, "grace": 0}))
    assert head.client.status().stage is Stage.COMMITTED
    head.client.send(frame(Kind.BYE, {}))
    assert head.client.asks(Ask(CLAIM)).stage is Stage.COMMITTED
    # it comes again, as itself or as a client that attaches
    for session, epoch in (("client", 1), ("client", 0), ("another", 0)):
        again = Peer(head)
        hello = {"wire": WIRE_VERSION, "session": session, "calls": [], "epoch": epoch}
        again.send(long_frame(Kind.HELLO, hello | ({"heir": "a guess"} if session == "another" else {})))
        taken = again.gets(Kind.TAKEN)
        assert taken["former"] is True
        status = messages.status(taken["handover"])
        assert status.left is not None
        assert replace(status, left=None) == Status(CLAIM, Stage.COMMITTED)
        eventually(again.is_closed, 10, "the end of the connection")
    assert head.lines("stored") == []
    assert other.asks(CancelRun(CLAIM)).is_cancelled
    assert other.until(Stage.OVER, 60) == Status(CLAIM, Stage.OVER, "", True, Outcome.CANCELLED)
    assert head.lines("ran") == ["1 0"]
    head.is_gone()


def test_messages_that_come_twice_late_or_for_another_run_change_nothing(started: Callable[..., Head]) -> None:
    head = started()
    head.client.say(Commit(CLAIM))  # before all
    assert head.client.status().stage is Stage.NOTHING
    head.prepare()
    head.client.say(Prepare(CLAIM, 1.0, "another word"), b"other needs", folder="/nowhere")
    head.client.say(Prepare(Claim("train-7", 2), 1.0, "another word"), b"other needs", folder="/nowhere")
    assert head.client.until(Stage.OTHER).claim == Claim("train-7", 2)
    assert head.client.until(Stage.READY).claim == CLAIM
    for _ in range(3):
        head.client.say(Commit(CLAIM))
    head.client.until(Stage.COMMITTED)
    assert head.client.asks(Abandon(CLAIM)).stage is Stage.COMMITTED
    row = rows.read(str(head.run))
    assert row is not None
    assert row.heir == messages.heir_digest(HEIR)
    assert row.end > time.time() + 500
    head.ran()
    head.tell("go")
    assert head.client.until(Stage.OVER, 60).outcome is Outcome.ENDED
    assert head.lines("ran") == ["1 0"]


def test_an_attempt_is_not_started_again_whatever_its_runner_sends(started: Callable[..., Head]) -> None:
    head = started()
    head.tell("again")
    head.commit()
    head.ran()
    eventually(lambda: head.lines("outcomes"), 30, "an answer")
    assert head.lines("outcomes") == ["7 attempt 1 of the program was started before, or is not the next one"]
    head.tell("go")
    assert head.client.until(Stage.OVER, 60).outcome is Outcome.ENDED
    head.is_gone()
    assert head.lines("ran") == ["1 0"]


def test_a_run_that_is_cancelled_before_its_runner_takes_the_machine_is_never_started(
    started: Callable[..., Head],
) -> None:
    head = started()
    head.tell("die-before-Takes")
    head.commit()
    head.client.say(CancelRun(CLAIM))  # the end of the first runner may be told before its answer
    head.client.hears(lambda kind, header: kind is Kind.HANDED and header["is_cancelled"])
    assert head.client.until(Stage.OVER, 60) == Status(CLAIM, Stage.OVER, "", True, Outcome.CANCELLED)
    assert head.lines("ran") == []


def test_a_runner_that_leaves_without_an_outcome_is_followed_by_another_one(started: Callable[..., Head]) -> None:
    head = started()
    head.tell("bye")
    head.commit()
    head.ran()
    eventually(lambda: len(head.runners()) == 2, 30, "the next runner")
    head.tell("go")
    assert head.client.until(Stage.OVER, 60).outcome is Outcome.ENDED
    assert head.lines("ran") == ["1 0"]


@pytest.mark.parametrize("when", ["first", "preparing", "ready"])
def test_what_is_abandoned_is_never_committed_and_its_runner_ends(when: str, started: Callable[..., Head]) -> None:
    head = started()
    if when == "preparing":
        head.tell("hang")
    if when != "first":
        head.prepare()
        eventually(head.runners, 60, "the runner")
    if when == "ready":
        head.client.until(Stage.READY)
    head.client.say(Abandon(CLAIM))
    head.client.until(Stage.ABANDONED)
    assert head.client.asks(Commit(CLAIM)).stage is Stage.ABANDONED
    head.prepare()
    assert head.client.status().stage is Stage.ABANDONED
    for pid in head.runners():
        eventually(partial(has_ended, pid), 10, "the end of the runner")
    assert not (head.run / rows.FILE).exists()
    assert head.lines("ran") == []
    head.client.send(frame(Kind.BYE, {}))  # it still owns the machine
    head.is_gone()


def test_an_agent_that_is_killed_after_the_commit_leaves_the_row_and_nothing_else(started: Callable[..., Head]) -> None:
    head = started()
    head.commit()
    head.ran()
    os.kill(head.agent, signal.SIGKILL)
    head.is_gone()
    row = rows.read(str(head.run))
    assert row is not None
    assert row.claim == CLAIM
    assert head.lines("stored") == []


def test_a_hand_over_fails_if_the_row_cannot_be_written(started: Callable[..., Head]) -> None:
    head = started()
    head.run.parent.mkdir(0o700, parents=True)
    head.run.touch()
    head.prepare()
    head.client.until(Stage.READY)
    head.client.say(Commit(CLAIM))
    assert "cannot write down that it has the run" in head.client.until(Stage.FAILED).why
    assert head.client.asks(Commit(CLAIM)).stage is Stage.FAILED
    assert head.lines("ran") == []


def test_a_run_that_was_handed_over_before_is_not_handed_over_again(started: Callable[..., Head]) -> None:
    head = started()
    head.run.mkdir(0o700, parents=True)
    rows.write(str(head.run), rows.WrittenRow(CLAIM, 1.0, "0" * 64, 1.0))
    head.prepare()
    head.client.until(Stage.READY)
    head.client.say(Commit(CLAIM))
    assert "was handed over to this machine before" in head.client.until(Stage.FAILED).why
    assert rows.read(str(head.run)) == rows.WrittenRow(CLAIM, 1.0, "0" * 64, 1.0)
    assert [each.name for each in head.run.iterdir()] == [rows.FILE]
    assert head.lines("ran") == []


def test_a_hand_over_fails_if_its_runners_end_before_the_commit(started: Callable[..., Head]) -> None:
    head = started()
    head.needs = b"no JSON"
    head.prepare()
    assert head.client.until(Stage.FAILED, 60).why == "2 runners have ended before the commit"


@pytest.mark.parametrize("guard", ["holds", "refuses"])
def test_the_guard_of_the_machine_takes_the_end_first_and_ends_the_machine_at_last(
    guard: str, started: Callable[..., Head]
) -> None:
    head = started(guard=guard)
    if guard == "refuses":
        head.prepare()
        assert "the guard has not taken the end" in head.client.until(Stage.FAILED).why
        assert not (head.run / rows.FILE).exists()
        return
    head.tell("go")
    head.commit(end=500, keep=3.5)
    head.client.until(Stage.OVER, 60)
    wanted = f"end 500 {messages.heir_digest(HEIR)}\nstop 3.5\n"
    eventually(lambda: (head.place / "guard.txt").read_text() == wanted, 30, "the stop")
    head.is_gone()


def test_the_machine_saves_what_its_last_runner_has_not_had_saved(
    started: Callable[..., Head], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, bucket = tmp_path / "out", tmp_path / "bucket"
    bucket.mkdir()
    head = started(guard="holds")
    order = Order("out", str(folder), f"file://{bucket}", journal="out", parts=str(ROOT))
    head.client.send(frame(Kind.SAVE, {}, [json.dumps(order.to_json()).encode()]))
    head.client.hears(lambda kind, header: kind is Kind.SAVED and header["folders"][0]["phase"] == "saving")
    head.tell("go")
    head.commit(end=500, keep=0.5)
    folder.mkdir(exist_ok=True)
    (folder / "a").write_text("late")
    head.client.until(Stage.OVER, 60)
    wanted = f"end 500 {messages.heir_digest(HEIR)}\nstop 33\n"
    eventually(lambda: (head.place / "guard.txt").read_text() == wanted, 30, "the stop")
    head.is_gone()
    assert (bucket / "a").read_text() == "late"


@pytest.mark.slow
def test_an_owner_that_is_gone_or_stands_still_extends_no_lease(started: Callable[..., Head]) -> None:
    head = started(lease=6.0)
    head.commit()
    head.ran()
    time.sleep(9)  # the client, which says nothing, does not matter
    assert head.client.asks(Ask(CLAIM)).stage is Stage.COMMITTED
    head.tell("hang")
    while not head.client.is_closed():
        with contextlib.suppress(ConnectionError):  # it was closed meanwhile
            head.client.say(Ask(CLAIM))
        time.sleep(0.1)
    head.is_gone()
    assert head.lines("stored") == []


@pytest.mark.slow
@pytest.mark.parametrize("how", ["hang", "stuck"])
def test_a_runner_that_is_silent_or_stands_still_for_a_minute_is_followed_by_another_one(
    how: str, started: Callable[..., Head]
) -> None:
    head = started(lease=200.0)
    head.commit()
    head.ran()
    head.tell(how)
    began = time.monotonic()
    eventually(partial(has_ended, head.runners()[0]), 120, "the end of the runner")
    assert time.monotonic() - began > 55
    (head.notes / how).unlink()
    head.tell("go")
    assert head.client.until(Stage.OVER, 60).outcome is Outcome.ENDED
    assert head.lines("ran") == ["1 0"]
    assert len(head.runners()) == 2
