"""Hints about idle devices: one when a node with devices is idle, and one when a call uses one of several."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from skypool import clock, events
from skypool.calls.idle_time import IdleTime
from skypool.console.event_text import Words
from skypool.devices.sample import CallSample, DeviceSample, NodeSample
from skypool.link.agent_messages import Welcome
from skypool.pool.unused_devices import IDLE_FOR, UNUSED_FOR, Hints
from skypool.rental.receipt import Line, Receipt
from skypool.testing import FakeCloud
from tests.conftest import eventually
from tests.facts import Given, watch_of
from tests.test_idle import Script, cloud, script
from tests.watched import Watched
from tests.work import add

__all__ = ["cloud", "script"]
EIGHT = Welcome(slots=1, devices=8)


PRICE = Receipt("p", (Line("p", "i", "t", "z", "spot", 0, 32.77, 0.0, 0.0, 0.0, billed_from=0.0),), 0.0)


class Pool:
    """The hints of a pool with one node of eight devices, which costs 32.77 USD/h."""

    def __init__(self, welcome: Welcome = EIGHT, knows_price: bool = True) -> None:
        self.given = Given(welcomes={0: welcome}, costs=PRICE if knows_price else None)
        self.told = self.given.told
        self.hints = Hints()
        self.hints.begin(self.given)

    def look(self, idle: IdleTime, *times: float) -> None:
        for now in times:
            self.given.idleness[0] = idle.until(now)
            self.hints.tick()

    def measured(self, sample: NodeSample) -> None:
        self.given.samples[0] = replace(sample, time=clock.now())
        self.hints.tick()


def lines(*told: events.Event) -> list[str]:
    words = Words()
    return [line.partition("  ")[2].strip() for each in told for line in words.tell(each)]


def use(*percent: float | None, calls: tuple[str, ...] = ("train",)) -> NodeSample:
    devices = tuple(DeviceSample("cuda", n, utilization_percent=each) for n, each in enumerate(percent))
    running = tuple(CallSample(n, name, 0, 1.0) for n, name in enumerate(calls))
    return NodeSample(devices=devices, calls=running)


# --- a node is idle ------------------------------------------------------------------------------------------


def test_a_node_that_is_idle_for_five_minutes_is_told_once() -> None:
    pool = Pool()
    idle = IdleTime(0.0)
    pool.look(idle, *range(0, 299, 2))
    assert pool.told == []
    pool.look(idle, *range(300, 900, 2))
    [told] = pool.told
    assert isinstance(told, events.NodeIdle)
    assert (told.node, told.seconds, told.usd_per_hour) == (0, IDLE_FOR, 32.77)
    assert lines(told) == [
        "hint: node 0 has been idle for 5:00 min, at 32.7700 USD/h; pool.retire(0) ends it, and linger= an idle pool"
    ]


def test_a_short_call_begins_the_time_anew() -> None:
    pool = Pool()
    idle = IdleTime(0.0)
    pool.look(idle, *range(0, 200, 2))
    idle.begin(200.0)
    idle.end(201.0)
    pool.look(idle, *range(202, 500, 2))
    assert pool.told == []
    pool.look(idle, 503.0)
    assert len(pool.told) == 1


def test_a_node_whose_call_leaves_its_devices_idle_is_told_and_a_node_without_devices_is_not() -> None:
    idle = IdleTime(0.0)
    idle.begin(0.0)
    for welcome, count in ((EIGHT, 1), (Welcome(slots=8), 0)):
        pool = Pool(welcome, knows_price=False)
        for now in range(0, 310, 2):
            idle.measured(float(now), low=True)
            pool.look(idle, float(now))
        assert len(pool.told) == count
        assert all(isinstance(each, events.NodeIdle) and each.usd_per_hour is None for each in pool.told)
        assert all("USD" not in line for line in lines(*pool.told))


# --- one of eight --------------------------------------------------------------------------------------------


def test_a_call_that_uses_one_of_eight_devices_is_told_once(script: Script) -> None:
    pool = Pool()
    for _ in range(0, int(UNUSED_FOR), 2):
        pool.measured(use(97.0, *[4.9] * 7))
        script.pass_(2.0)
    assert pool.told == []
    for _ in range(100):
        pool.measured(use(97.0, *[0.0] * 7))
        script.pass_(2.0)
    [told] = pool.told
    assert isinstance(told, events.DevicesUnused)
    assert (told.call, told.devices, told.seconds) == ("train", 8, UNUSED_FOR)
    assert lines(told) == [
        'hint: train() uses 1 of 8 devices of node 0 for 2:00 min now; slots="per-device" runs a call on each, '
        'procs="per-device" a process'
    ]


@pytest.mark.parametrize(
    "sample",
    [
        use(97.0, *[5.0] * 7),
        use(*[0.0] * 8),
        use(97.0, None, *[0.0] * 6),
        use(97.0, *[0.0] * 7, calls=()),
        use(97.0),
        NodeSample(calls=(CallSample(1, "train", 0, 1.0),)),
    ],
)
def test_other_uses_are_not_told(script: Script, sample: NodeSample) -> None:
    pool = Pool()
    for _ in range(200):
        pool.measured(sample)
        script.pass_(2.0)
    assert pool.told == []


def test_a_gap_or_a_second_device_begins_the_time_anew(script: Script) -> None:
    pool = Pool()
    for interruption in (use(97.0, 50.0, *[0.0] * 6), None):
        for _ in range(50):
            pool.measured(use(97.0, *[0.0] * 7))
            script.pass_(2.0)
        if interruption is not None:
            pool.measured(interruption)
        else:
            script.pass_(60.0)
    pool.measured(use(97.0, *[0.0] * 7))
    assert pool.told == []


def test_where_each_device_has_a_slot_nothing_is_told(script: Script) -> None:
    pool = Pool(Welcome(slots=8, devices=8))
    for _ in range(200):
        pool.measured(use(97.0, *[0.0] * 7))
        script.pass_(2.0)
    assert pool.told == []


# --- in a pool -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_pool_passes_the_idle_time_and_the_samples_of_its_nodes_on(
    cloud: FakeCloud, script: Script, tmp_path: Path
) -> None:
    with Watched(cloud, name="hinted") as pool:
        assert add(1) >> pool == 2
        engine = pool._begun
        assert engine is not None
        engine.connections.welcomes[0] = Welcome(slots=1, devices=8)  # as if the machine had GPUs
        hints = watch_of(pool, Hints)
        eventually(lambda: hints._idle, what="a first look")
        script.pass_(301.0)
        eventually(lambda: pool.heard(events.NodeIdle), what="the hint")
        [told] = pool.heard(events.NodeIdle)
        assert told.usd_per_hour == 36.0
        for _ in range(62):
            engine.on_samples(0, [replace(use(97.0, *[0.0] * 7), time=clock.now())])
            hints.tick()
            script.pass_(2.0)
        [unused] = pool.heard(events.DevicesUnused)
        assert unused.call == "train"
