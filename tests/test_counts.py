"""All views of a pool count its calls alike, and as the user's script does."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import skypool as sky
from skypool import cli
from skypool.cli import top_survey
from skypool.console.board import Board
from skypool.console.layout import draw_pool
from skypool.observers import client
from skypool.observers.observed import Observed
from skypool.rental.ledger import Ledger
from skypool.report.facts import collect
from skypool.report.widget import picture
from skypool.samples.session_file import path_of
from tests.conftest import eventually
from tests.counted_work import die_once, explode, fails_first, ranks
from tests.facts import measured
from tests.work import add, count, nap, until


@dataclass
class Seen:
    """What a view says of a pool; None for what it does not show."""

    running: int | None = None
    waiting: int | None = None
    done: int | None = None
    failed: int | None = None
    busy: str | None = None


class Views:
    """All views of a pool."""

    def __init__(self, pool: sky.ComputePool) -> None:
        self.pool = pool
        self.board = Board(lambda: Observed(self.engine.facts).figures())
        pool.events.listen(self.board.hear)  # before its nodes are there

    @property
    def engine(self) -> Any:
        return self.pool._engine

    def all(self) -> dict[str, Seen]:
        """Return what each view says now."""
        return {
            "live view": self.live(),
            "top": self.top(),
            "ps": self.ps(),
            "metrics": self.metrics(),
            "notebook": self.notebook(),
            "report": self.report(),
        }

    def live(self) -> Seen:
        time.sleep(1.05)  # for this long, the view shows what it has read
        text = draw_pool(self.board.picture(), time.time(), 20, 200)[0].plain
        done, failed = _number(r"([\d,]+) done", text), _number(r"([\d,]+) failed", text)
        return Seen(busy=_found(r"(\d+/\d+) busy", text), done=done, failed=failed)

    def top(self) -> Seen:
        [record] = [each for each in Ledger.here().pools(self.pool.name) if each.session == self.engine.rental.session]
        view = top_survey.view_of(record, top_survey.Answer(client.info(self.pool.name), time.time()), time.time())
        drawn = top_survey.picture_of(view)
        busy = f"{sum(each.busy for each in drawn.rows)}/{sum(each.slots for each in drawn.rows)}"
        return Seen(view.busy, view.waiting, view.done, drawn.failed, busy)

    def ps(self) -> Seen:
        said = client.info(self.pool.name)
        return Seen(said["running"], said["waiting"], said["done"], said["failed"])

    def metrics(self) -> Seen:
        found: dict[tuple[str, str], float] = {}
        for each in measured(self.engine):
            if isinstance(each.value, (int, float)):
                key = each.metric.name, str(each.attributes.get("skypool.outcome", ""))
                found[key] = found.get(key, 0) + each.value
        done = sum(int(value) for (name, _), value in found.items() if name == "skypool.calls")
        busy = f"{int(found['skypool.node.calls', ''])}/{int(found['skypool.node.slots', ''])}"
        running, waiting = (int(found[f"skypool.calls.{each}", ""]) for each in ("running", "waiting"))
        return Seen(running, waiting, done, int(found["skypool.calls", "failed"]), busy)

    def notebook(self) -> Seen:
        text = picture(self.pool.name, self.pool._now())
        done, failed, waiting = (_number(rf"([\d,]+) {each}", text) for each in ("calls? done", "failed", "waiting"))
        return Seen(waiting=waiting, done=done, failed=failed)

    def report(self) -> Seen:
        self.pool.report()
        record = Ledger.here().record(self.engine.rental.session)
        assert record is not None
        counts = collect(record, path_of(record.session), time.time()).counts
        assert counts is not None
        return Seen(done=counts.done, failed=counts.failed)


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""


def _number(pattern: str, text: str) -> int:
    return int(_found(pattern, text).replace(",", "") or 0)


def differing(views: Views, expected: Seen) -> dict[str, Seen]:
    """Return the views that say something else than expected."""
    return {
        name: seen
        for name, seen in views.all().items()
        if any(value is not None and value != getattr(expected, field) for field, value in vars(seen).items())
    }


def assert_all(views: Views, expected: Seen) -> None:
    """Fail if a view says something else for long: nodes are asked once a second."""
    found: dict[str, Seen] = {}

    def agree() -> bool:
        found.clear()
        found.update(differing(views, expected))
        return not found

    try:
        eventually(agree, 20)
    except AssertionError:
        raise AssertionError(f"{found} instead of {expected}") from None


@pytest.fixture(scope="module")
def views() -> Iterator[Views]:
    views = Views(sky.ComputePool(nodes=2, slots=2, console="off", grace=1.0))
    with views.pool as pool:
        yield views
        pool.stop()  # the calls of a test that has failed wait for a file


def test_all_views_count_what_the_script_has_started(views: Views, tmp_path: Path) -> None:
    pool, go = views.pool, str(tmp_path / "go")
    done = failed = 0
    assert list(pool.map(add, range(100))) == list(range(1, 101))
    done += 100
    assert add(1) @ pool == [2, 2]  # two parts are one call
    done += 1
    assert die_once(str(tmp_path / "died")).with_options(retries=1) >> pool == "the second run"
    done += 1
    assert list(count(10) >> pool) == list(range(10))
    assert [list(each) for each in count(3) @ pool] == [[0, 1, 2]] * 2
    done += 2
    for send in (lambda: explode() >> pool, lambda: explode() @ pool):
        with pytest.raises(ValueError, match="it failed"):
            send()
    done, failed = done + 2, failed + 2
    assert sky.gather(add(1), add(2), add(3)) >> pool == (2, 3, 4)
    done += 3
    cancelled = until(go) > pool
    assert cancelled.cancel()
    assert cancelled.wait_stopped(30)
    done += 1
    assert fails_first(go) @ pool == [1] * 4  # of which one was run again
    done += 1
    assert_all(views, Seen(0, 0, done, failed, "0/4"))

    gang = pool.send(ranks(go), node="all")  # eight processes are one call, which has both nodes
    behind = [add(1) > pool for _ in range(3)]
    assert_all(views, Seen(1, 3, done, failed, "4/4"))
    Path(go).touch()
    assert gang.result(60) == list(range(8))
    assert [each.result(60) for each in behind] == [2] * 3
    done += 4
    assert_all(views, Seen(0, 0, done, failed, "0/4"))
    counts = views.engine.dispatch.tally.counts()
    assert (counts.ok, counts.failed, counts.cancelled, counts.retried) == (done - failed - 1, failed, 1, 2)


def test_calls_that_run_and_wait_are_counted_once_each(views: Views, tmp_path: Path) -> None:
    pool, go = views.pool, str(tmp_path / "go")
    before = views.engine.dispatch.tally.counts()
    broadcast: sky.CallFuture[Any] = pool.send(until(go), node="all")
    running = [until(go) > pool for _ in range(2)]
    waiting = [until(go) > pool for _ in range(3)]
    bound = until(go).with_options(node=1) > pool
    assert_all(views, Seen(3, 4, before.done, before.failed, "4/4"))
    service = pool.service(nap(60), busy=True)
    assert_all(views, Seen(3, 4, before.done, before.failed, "4/4"))  # a service is no call
    service.close()
    gang = pool.send(ranks(go), node="all")
    assert_all(views, Seen(3, 5, before.done, before.failed, "4/4"))  # also on the nodes for which the gang waits
    for each in waiting:
        assert each.cancel()
    assert_all(views, Seen(3, 2, before.done + 3, before.failed, "4/4"))
    Path(go).touch()
    for each in (broadcast, *running, bound, gang):
        each.result(60)
    assert_all(views, Seen(0, 0, before.done + 8, before.failed, "0/4"))


def test_checks_of_skypools_own_are_no_calls() -> None:
    views = Views(sky.ComputePool(nodes=2, slots=1, console="off", check="network"))
    with views.pool as pool:
        assert ranks.with_options(procs=1)("/") @ pool == [0, 1]  # after a check of the network, and empty calls
        assert_all(views, Seen(0, 0, 1, 0, "0/2"))
        on = [views.engine.dispatch.tally.on(node) for node in (0, 1)]
        assert [(each.done, each.running, each.waiting) for each in on] == [(1, 0, 0)] * 2


def test_calls_that_the_end_of_the_pool_ends_are_counted_as_cancelled(tmp_path: Path) -> None:
    pool = sky.ComputePool(nodes=1, slots=1, console="off").start()
    engine: Any = pool._engine
    futures = [until(str(tmp_path / "never")) > pool for _ in range(5)]
    assert futures[4].cancel()
    pool.stop()
    counts = engine.dispatch.tally.counts()
    assert (counts.ok, counts.failed, counts.cancelled) == (0, 0, 5)


def test_the_commands_say_the_same(views: Views, tmp_path: Path) -> None:
    pool, go = views.pool, str(tmp_path / "go")
    futures = [until(go) > pool for _ in range(6)]
    eventually(lambda: views.ps().running == 4, 30)
    said = CliRunner().invoke(cli.build(), ["top", "--once", pool.name])
    assert said.exit_code == 0, said.output
    line = next(each for each in said.output.splitlines() if each.strip().startswith(pool.name))
    done = views.ps().done
    assert re.search(rf"\b4\b.*\b2\b.*\b{done}\b", line), said.output
    assert "4/4 busy" in said.output
    Path(go).touch()
    assert [each.result(60) for each in futures] == [go] * 6
