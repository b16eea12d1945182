"""What is written to disk about a pool while it runs, for reports: events, calls, working times and facts."""

from __future__ import annotations

import itertools
import os
import sqlite3
import time
from pathlib import Path

import pytest

import skypool as sky
from skypool.calls.tally import BOUNDS, MOST_SLOWEST, EndedCall
from skypool.rental.ledger import Ledger
from skypool.samples import journal, session_file
from skypool.samples.journal import Journal, JournalEvent, WorkSpan, read
from tests.conftest import eventually


def call(seconds: float | None, outcome: str = "ok", ended: float = 0.0) -> EndedCall:
    return EndedCall("train", 0, ended, seconds, outcome, "" if outcome == "ok" else "ValueError: no")


def test_a_journal_comes_back_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "samples" / "s.sqlite3"
    made = Journal(lambda: file)
    assert read(file) == journal.JournalContent()
    event = JournalEvent(2.0, "NodePhase", 3, {"phase": "ready"})
    made.write([event, event._replace(time=1.0)], [call(1.5)], [WorkSpan(0, 1.0, 2.0, 0.5)], {"plan": "text"})
    made.write((), [], [WorkSpan(0, 1.0, 3.0, 1.5)], {"plan": "other"})
    found = read(file)
    assert found.events == (event._replace(time=1.0), event)
    assert (found.calls, found.facts) == ((call(1.5),), {"plan": "other"})
    assert found.work == (WorkSpan(0, 1.0, 3.0, 1.5),), "a span that grows is one span"
    assert file.parent.stat().st_mode & 0o777 == 0o700


def test_a_journal_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_MOST_EVENTS", 100)
    monkeypatch.setattr(journal, "_MOST_SPANS", 100)
    file = tmp_path / "s.sqlite3"
    made = Journal(lambda: file)
    made.write([JournalEvent(0.0, "NodePhase", 0, {})])
    for turn in range(10):
        made.write(
            [JournalEvent(float(turn * 100 + n), "Notice", -1, {}) for n in range(100)],
            [call(float(n), "ok" if n % 2 else "failed", float(turn)) for n in range(1000)],
            [WorkSpan(node, turn * 100.0 + n, turn * 100.0 + n + 1, 0.25) for n in range(100) for node in range(2)],
        )
    found = read(file)
    assert 90 <= len(found.events) <= 100
    assert found.events[0].kind == "NodePhase", "phases go last"
    assert found.events[-1].time == 999.0
    slowest = [each.seconds for each in found.calls if each.outcome == "ok"]
    assert (len(slowest), min(filter(None, slowest))) == (MOST_SLOWEST, 981.0)
    failed = [each for each in found.calls if each.outcome != "ok"]
    assert (len(failed), min(each.ended for each in failed)) == (journal.MOST_FAILED, 9.0)
    assert len(found.work) <= 100
    assert sum(each.busy for each in found.work) == pytest.approx(2 * 1000 * 0.25)
    for node in range(2):
        spans = sorted(each for each in found.work if each.node == node)
        assert (spans[0].since, spans[-1].until) == (0.0, 1000.0)
        assert all(one.until == other.since for one, other in itertools.pairwise(spans))


def test_all_files_together_have_a_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_file, "_MOST_OF_ALL", 200_000)
    for number in range(8):
        file = tmp_path / f"{number}.sqlite3"
        Journal(lambda file=file: file).write(facts={"plan": "x" * 50_000})  # type: ignore[misc]
        os.utime(file, (number, number))
    left = sorted(each.name for each in tmp_path.glob("*.sqlite3"))
    assert "7.sqlite3" in left
    assert 1 < len(left) < 5, left


def test_the_history_of_a_pool_is_read_after_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    @sky.compute
    def divide(x: int) -> float:
        import time

        time.sleep(0.2 if x == 2 else 0)
        return 1 / x

    monkeypatch.setenv("HISTORY_TOKEN", "hunter2hunter2")
    image = sky.Image(secrets=["HISTORY_TOKEN"])
    began = time.time()
    with sky.ComputePool(image=image, console="off", slots=1, name="history") as pool:
        [divide(x) >> pool for x in range(1, 30)]
        with pytest.raises(ZeroDivisionError):
            divide(0) >> pool
        with pytest.raises(ValueError, match="hunter2"):
            pool.submit(int, "hunter2hunter2").result()
    [session] = {each.session for each in Ledger.here().pools("history")}
    found = read(session_file.path_of(session))
    phases = [each.data["phase"] for each in found.events if each.kind == "NodePhase" and each.node == 0]
    assert phases == ["launching", "booting", "bootstrapping", "ready", "draining", "ended"]
    assert [each.data["phase"] for each in found.events if each.kind == "PoolPhase"][-1] == "ended"
    assert next(each.error for each in found.calls if each.outcome == "failed").startswith("ZeroDivisionError")
    assert "hunter2" not in str(found)
    assert "[secret HISTORY_TOKEN]" in str(found.calls)
    assert len([each for each in found.calls if each.outcome == "ok"]) == 29
    [counts] = [value for name, value in found.facts.items() if name.startswith("calls ")]
    assert (counts["ok"], counts["failed"], sum(counts["classes"])) == (29, 2, 31)
    assert counts["classes"][BOUNDS.index(0.25)] == 1
    assert 0.15 < sum(each.busy for each in found.work) < sum(each.until - each.since for each in found.work)
    assert "local" in found.facts["plan"]
    days = [time.strftime("%Y-%m-%d", time.gmtime(each)) for each in (began, time.time())]
    assert found.facts["prices"][0]["as_of"] in days


def test_a_history_that_cannot_be_written_is_told_once_and_the_pool_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise sqlite3.OperationalError("disk is full")

    monkeypatch.setattr(Journal, "write", broken)
    heard: list[str] = []
    pool = sky.ComputePool(console="off", slots=1)
    pool.events.listen(lambda event: heard.append(getattr(event, "text", "")))
    with pool:
        assert pool.submit(os.getpid).result()
        eventually(lambda: any("disk is full" in each for each in heard), 30, "the notice")
    assert sum("disk is full" in each for each in heard) == 1
