"""What is counted of the calls that have ended, and which single calls are kept."""

from __future__ import annotations

import skypool as sky
from skypool.calls.tally import BOUNDS
from skypool.errors import WorkerDied
from tests.test_dispatch import Office


def test_calls_are_counted_by_outcome_and_wall_time() -> None:
    office = Office(4)
    done = office.send_many(3)
    office.end(done[0], seconds=0.03)
    office.end(done[1], seconds=1e9)
    office.fail(done[2], ValueError("no"))
    retried = office.send(retries=1)
    office.fail(retried, WorkerDied("gone"))
    office.end(retried, seconds=0.05)
    stopped = office.send()
    office.dispatch.stop(stopped)
    office.fail(stopped, RuntimeError("stopped"))
    counts = office.dispatch.tally.counts()
    assert (counts.ok, counts.failed, counts.cancelled, counts.retried) == (3, 1, 1, 1)
    assert counts.classes[BOUNDS.index(0.05)] == 2  # a bound belongs to its class
    assert counts.classes[-1] == 1
    assert sum(counts.classes) == 5
    records = office.dispatch.tally.take()
    assert sorted(each.outcome for each in records) == ["cancelled", "failed", "ok", "ok", "ok"]
    assert [each.error for each in records if each.outcome == "failed"] == ["ValueError: no"]
    assert office.dispatch.tally.take() == []
    assert office.dispatch.tally.counts() == counts


def test_the_bounds_of_the_classes_are_1_and_2_5_and_5_of_each_power_of_ten() -> None:
    assert BOUNDS[:4] == (0.0001, 0.00025, 0.0005, 0.001)
    assert list(BOUNDS) == sorted(set(BOUNDS))


def test_records_that_nobody_takes_are_bounded_and_the_slowest_stay() -> None:
    office = Office(1)
    tally = office.dispatch.tally
    pending = office.send()
    for number in range(50_000):
        tally.returned(pending, 0, float(number), 0.0)
    assert tally.counts().ok == 50_000
    kept = tally.take()
    assert {each.seconds for each in kept} == {float(number) for number in range(49_900, 50_000)}


def test_calls_of_a_real_pool_are_counted() -> None:
    @sky.compute
    def halve(x: int) -> float:
        return 2 / x

    with sky.ComputePool(slots=2, console="off") as pool:
        found = list(pool.map(halve, [*range(1, 50)]))
        assert len(found) == 49
        try:
            halve(0) >> pool
        except ZeroDivisionError:
            pass
        else:
            raise AssertionError("dividing by zero must raise")
        engine = pool._engine
        assert engine is not None
        counts = engine.dispatch.tally.counts()
        records = engine.dispatch.tally.take()
    assert (counts.ok, counts.failed) == (49, 1)
    assert {each.name.rpartition(".")[2] for each in records} == {"halve"}
