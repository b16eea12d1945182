"""Watches of a pool: each hears events in its own thread, and what is wrong with one harms nothing else."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

import skypool as sky
from skypool import events
from skypool.compute_pool import watch_list
from skypool.pool.watch import MOST_WAITING, PoolFacts, Watch, Watches
from tests.conftest import ROOT, eventually
from tests.facts import Given, watching
from tests.work import add


def notice(text: str) -> events.Notice:
    return events.Notice(pool="mine", text=text)


class Heard(Watch):
    """It notes what it is told, and in which thread."""

    name = "the test's watch"

    def __init__(self) -> None:
        self.told: list[str] = []
        self.threads: set[str] = set()

    def _note(self, text: str) -> None:
        self.told.append(text)
        self.threads.add(threading.current_thread().name)

    def begin(self, facts: PoolFacts) -> None:
        self._note("begin")

    def hear(self, event: events.Event) -> None:
        self._note(event.text if isinstance(event, events.Notice) else type(event).__name__)

    def close(self) -> None:
        self._note("close")


# --- one watch -----------------------------------------------------------------------------------------------


def test_it_hears_events_in_their_order_also_those_from_before_it_began_in_one_thread() -> None:
    watch, given = Heard(), Given()
    told = Watches([watch], given.quota, given.notice)
    told.hear(notice("0"))
    told.begin(given)
    for n in range(1, 500):
        told.hear(notice(str(n)))
    told.close(30)
    assert watch.told == ["begin", *map(str, range(500)), "close"]
    assert watch.threads == {"skypool the test's watch"}
    assert given.told == []


def test_it_hears_only_the_events_that_it_names_and_hidden_output_if_it_asks() -> None:
    class Nodes(Heard):
        hears = (events.Output,)

    class Hidden(Nodes):
        hears_hidden = True

    nodes, hidden, given = Nodes(), Hidden(), Given()
    told = Watches([nodes, hidden], given.quota, given.notice)
    told.begin(given)
    output = events.Output(pool="mine", node=0, slot=0, call=1, stream=1, text="x")
    told.hear(notice("a"))
    told.hear(output)
    told.hear(output, is_hidden=True)
    told.close(30)
    assert nodes.told == ["begin", "Output", "close"]
    assert hidden.told == ["begin", "Output", "Output", "close"]


def test_it_does_its_regular_work_after_events_and_when_it_is_asked_and_at_intervals() -> None:
    class Regular(Heard):
        every: ClassVar[float | None] = None

        def tick(self) -> None:
            self._note("tick")

        def settle(self) -> None:
            self._note("settle")

    watch = Regular()
    told = watching(watch, Given())
    told.hear(notice("a"))
    eventually(lambda: watch.told == ["begin", "a", "tick"])
    told.settle(within=30)
    assert watch.told == ["begin", "a", "tick", "settle"]
    Regular.every = 0.01
    told.settle(within=30)  # so that it is known
    eventually(lambda: watch.told.count("tick") > 3)
    told.close(30)


# --- what is wrong with it -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["begin", "hear", "tick", "close"])
def test_one_that_raises_is_told_of_once_and_left_out_and_others_go_on(method: str) -> None:
    class Broken(Heard):
        name = "the broken watch"

    def fail(*_: object) -> None:
        raise RuntimeError("it is broken")

    broken, other, given = Broken(), Heard(), Given()
    setattr(broken, method, fail)
    told = Watches([broken, other], given.quota, given.notice)
    told.begin(given)
    for n in range(3):
        told.hear(notice(str(n)))
        told.settle(within=30)
    told.close(30)
    assert other.told == ["begin", "0", "1", "2", "close"]
    [said] = given.notices
    assert "the broken watch" in said
    assert "RuntimeError: it is broken" in said


def test_one_that_hangs_is_left_at_the_end_and_its_events_take_bounded_memory() -> None:
    over = threading.Event()
    hangs = threading.Event()

    class Hangs(Heard):
        name = "the slow watch"

        def hear(self, event: events.Event) -> None:
            hangs.set()
            over.wait(60)

    watch, given = Hangs(), Given()
    told = watching(watch, given)
    large = notice("x" * (1 << 20))
    told.hear(large)
    assert hangs.wait(30)  # with this one alone: all that waits is taken at once
    for _ in range(99):
        told.hear(large)
    waiting = told._runners[0]._waiting
    assert 10 < sum(map(events.weight, waiting)) >> 20 <= MOST_WAITING >> 20
    began = time.monotonic()
    told.close(0.5)
    assert time.monotonic() - began < 5
    assert given.notices == ["the pool has ended, but the slow watch did not end within 0.5 s, and was left"]
    over.set()
    eventually(lambda: len(given.notices) == 2)
    assert re.fullmatch(r"the slow watch is too slow: 8\d events were dropped, and more may follow", given.notices[1])


def test_a_pool_does_not_start_without_a_watch_that_must_begin() -> None:
    class Needed(Heard):
        must_begin = True

        def begin(self, facts: PoolFacts) -> None:
            raise sky.UsageError("port 1 is in use")

    given = Given()
    told = Watches([Needed()], given.quota, given.notice)
    with pytest.raises(sky.UsageError, match="port 1 is in use"):
        told.begin_needed(given)
    assert given.told == []


# --- in a pool -----------------------------------------------------------------------------------------------


def with_watches(monkeypatch: pytest.MonkeyPatch, *more: Callable[[], Watch]) -> None:
    known = watch_list.watches_of
    monkeypatch.setattr(watch_list, "watches_of", lambda asked: [*known(asked), *(each() for each in more)])


def test_the_watch_of_the_page_counts_the_events_of_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    [program] = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/watches.md").read_text(), re.MULTILINE | re.DOTALL)
    namespace: dict[str, Any] = {"__name__": "page"}
    exec(compile(program, "docs/watches.md", "exec", dont_inherit=True), namespace)
    with_watches(monkeypatch, namespace["EventCount"])
    heard: list[str] = []
    pool = sky.ComputePool(slots=1, console="off")
    pool.events.listen(lambda event: heard.append(event.text) if isinstance(event, events.Notice) else None)
    with pool:
        assert add(1) >> pool == 2
    [told] = [each for each in heard if each.startswith("what happened to nodes: ")]
    assert re.search(r"\b[4-9] NodePhase\b", told), told


def test_a_pool_works_and_ends_while_one_of_its_watches_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    class Hangs(Heard):
        name = "the slow watch"

        def hear(self, event: events.Event) -> None:
            over.wait(60)

    with_watches(monkeypatch, Hangs)
    monkeypatch.setattr("skypool.pool.engine._TO_CLOSE", 0.5)
    heard: list[str] = []
    pool = sky.ComputePool(slots=1, console="off")
    pool.events.listen(lambda event: heard.append(event.text) if isinstance(event, events.Notice) else None)
    with pool:
        assert list(pool.map(add, range(100))) == list(range(1, 101))
        eventually(pool.samples.latest)
        began = time.monotonic()
        assert pool.samples.history()
        assert time.monotonic() - began < 4, "it waits for the watch that writes samples, and for no other"
    assert [each for each in heard if "the slow watch did not end" in each]
    over.set()
