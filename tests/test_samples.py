"""Samples of nodes, devices and calls, and the health that follows. An NVML of our own stands in for a GPU.

Tests of `fake_and_real` run with a real one, too, where there is one: `pytest -m gpu`.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import skypool as sky
from skypool import events
from skypool.agent import monitor, node_facts
from skypool.agent.monitor import Monitor
from skypool.console.gauges import gauges
from skypool.devices.device import Device
from skypool.devices.health import HealthOfNode, judge
from skypool.devices.sample import CallSample, DeviceSample, NodeSample, node_sample, to_json
from skypool.devices.xid import bounded
from skypool.errors import NodeUnhealthy
from skypool.link.agent_messages import message_of
from skypool.model import Instance
from skypool.pool import lifecycle, new_samples, states
from skypool.samples import machine as machine_load
from skypool.samples import nvml as nvml_reader
from skypool.samples import session_file, store, tools
from skypool.samples.machine import Machine, process
from skypool.samples.store import history, thin
from skypool.wire.frames import MAX_HEADER, Kind, encode, parse_frame
from tests.conftest import eventually
from tests.facts import Kept
from tests.nvml import FakeNvml, Library, fake_and_real
from tests.test_link import cut, link_of

PROGRAM = [sys.executable, "-c", "import sys; from skypool.cli import main; sys.exit(main())"]
GOOD = DeviceSample(
    "cuda", 0, ecc_uncorrected=0, remap_failed=False, pcie_width=16, pcie_width_max=16, nvlinks=18, nvlinks_all=18,
    recovery=0, xids_watched=True,
)  # fmt: skip


def with_(**values: Any) -> DeviceSample:
    return replace(GOOD, **values)


# --- values that a node sends --------------------------------------------------------------------------------


def test_a_sample_comes_back_from_json_as_it_was() -> None:
    call = CallSample(7, "train", 0, 1.5, 1.25, 100.0, 120.0, 512.0)
    sample = NodeSample(
        time=1.0, cpu_percent=3.5, devices=(with_(xids=(45, 79), throttled=("power cap",)),), calls=(call,)
    )
    assert node_sample(json.loads(json.dumps(to_json(sample)))) == sample


@pytest.mark.parametrize(
    "said",
    [
        7,
        {"time": "now"},
        {"time": -1},
        {"time": float("nan")},
        {"cpu_percent": True},
        {"disk_written_mib": "fast"},
        {"devices": [{"kind": "cuda"}]},
        {"devices": [{"kind": "cuda", "index": 0, "lost": "yes"}]},
        {"devices": [{"kind": "cuda", "index": 0, "xids": [1] * 65}]},
        {"devices": [{"kind": "cuda", "index": 0, "memory_of": {"me": 1}}]},
        {"devices": [{"kind": "cuda", "index": 1 << 70}]},
        {"devices": [{"kind": "cuda", "index": 0}] * 65},
        {"calls": {}},
    ],
)
def test_a_sample_with_a_wrong_field_is_refused(said: Any) -> None:
    with pytest.raises(ValueError, match=r"field|object|lacks"):
        node_sample(said)
    pong = {"busy": 0, "waiting": 0, "done": 0, "running": [], "cpu_busy": 0, "samples": [said]}
    with pytest.raises(sky.errors.ProtocolError, match=r"measurement|sent"):
        message_of(parse_frame(memoryview(encode(Kind.PONG, pong))))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cpu_percent", 1e9),
        ("cpu_percent", 101),
        ("memory_used_mib", -1),
        ("memory_used_mib", float("nan")),
        ("memory_used_mib", float("inf")),
        ("memory_used_mib", 10**400),
        ("memory_used_mib", 2**64 / 2**20 - 1),
        ("memory_used_mib", 200_000),
        ("disk_used_mib", 2e7),
        ("disk_read_mib", -0.5),
        ("disk_written_mib", 1e15),
    ],
)
def test_a_value_of_a_node_that_cannot_be_true_is_unknown(name: str, value: float) -> None:
    sane = {"cpu_percent": 3.0, "memory_used_mib": 5.0, "memory_total_mib": 1e5, "disk_total_mib": 1e7}
    found = node_sample({**sane, name: value})
    assert getattr(found, name) is None
    assert found.memory_total_mib == 1e5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("utilization_percent", 255),
        ("memory_used_mib", 17592186044415.0),
        ("memory_total_mib", -1),
        ("power_watts", 4294967.295),
        ("power_watts", -1),
        ("temperature_celsius", 65535),
        ("temperature_celsius", -274),
        ("sm_clock_mhz", 4294967295),
        ("pcie_width", 4294967295),
        ("pcie_width_max", -1),
        ("nvlinks", 1 << 20),
        ("ecc_uncorrected", -1),
        ("ecc_corrected", 1 << 64),
        ("recovery", -1),
    ],
)
def test_a_value_of_a_device_that_cannot_be_true_is_unknown_and_never_shown(name: str, value: float) -> None:
    said = to_json(GOOD) | {name: value, "memory_of": {"7": 100.0, "8": -1, "9": 1e13}}
    (found,) = node_sample({"devices": [said]}).devices
    assert getattr(found, name) is None
    assert found.memory_of == {"7": 100.0}
    shown = " ".join(each.text for each in gauges(NodeSample(devices=(found,))))
    assert not re.search(r"\d{6}|-\d", shown)


def test_values_at_their_limits_are_taken_as_they_are() -> None:
    device = with_(utilization_percent=100.0, temperature_celsius=-40.0, memory_used_mib=81559.0, power_watts=1400.0)
    sample = NodeSample(cpu_percent=100.4, memory_used_mib=1e5, memory_total_mib=1e5, devices=(device,))
    assert node_sample(json.loads(json.dumps(to_json(sample)))) == sample


def test_control_characters_of_a_sample_are_removed() -> None:
    sample = {"devices": [{"kind": "cuda", "index": 0, "unknown": "\x1b[31mred\n\tnode 7"}], "claimed": True, "node": 9}
    pong = {"busy": 0, "waiting": 0, "done": 0, "running": [], "cpu_busy": 0, "samples": [sample]}
    said: Any = message_of(parse_frame(memoryview(encode(Kind.PONG, pong))))
    assert said.samples[0].devices[0].unknown == "red node 7"
    assert (said.samples[0].node, said.samples[0].claimed) == (0, False), "a node cannot speak for another"


# --- health --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seen", "state", "reason"),
    [
        (GOOD, "ok", ""),
        (with_(xids=(79,)), "unhealthy", "XID 79: GPU has fallen off the bus"),
        (with_(xids=(48,)), "unhealthy", "XID 48"),
        (with_(xids=(95,)), "unhealthy", "XID 95"),
        (with_(xids=(119,)), "unhealthy", "XID 119"),
        (with_(xids=(154,), recovery=None), "unhealthy", "XID 154"),
        (with_(xids=(154,), recovery=2), "unhealthy", "a restart of the machine"),
        (with_(xids=(154,), recovery=0), "ok", ""),
        (with_(xids=(94,)), "degraded", "XID 94: contained"),
        (with_(xids=(45, 13, 31, 43)), "ok", ""),
        (with_(lost=True), "unhealthy", "lost"),
        (with_(remap_failed=True), "unhealthy", "could not be replaced"),
        (with_(remap_pending=True), "degraded", "next reset"),
        (with_(ecc_uncorrected=3), "degraded", "3 memory errors"),
        (with_(pcie_width=8), "degraded", "8 lanes of 16"),
        (with_(nvlinks=17), "degraded", "17 of 18 NVLinks"),
        (with_(nvlinks=0), "unknown", "none of 18 NVLinks"),
        (with_(nvlinks=0, nvlinks_all=0), "ok", ""),
        (with_(ecc_uncorrected=None), "unknown", "memory errors"),
        (with_(xids_watched=False), "unknown", "XID codes"),
        (with_(pcie_width_max=None), "unknown", "PCIe width"),
        (DeviceSample("tpu", 0, unknown="no tool"), "unknown", "no tool"),
        (DeviceSample("rocm", 0, utilization_percent=5.0), "unknown", "row remapping"),
    ],
)
def test_a_device_is_judged_by_what_it_reports(seen: DeviceSample, state: str, reason: str) -> None:
    found = HealthOfNode().judge(NodeSample(devices=(seen,)))
    assert found.state == state
    assert reason in "; ".join(found.reasons)
    judging = HealthOfNode()
    for before in (GOOD, GOOD):
        judging.judge(NodeSample(devices=(replace(before, kind=seen.kind),)))
    later = judging.judge(NodeSample(devices=(seen,)))
    assert later.state in (state, "unhealthy"), "what gets worse may count for more"
    assert judging.judge(NodeSample(devices=(seen,))).state == later.state


def test_what_gets_worse_while_the_pool_runs_makes_a_device_unhealthy_for_good() -> None:
    for before, after in (
        (with_(ecc_uncorrected=3), with_(ecc_uncorrected=4)),
        (with_(nvlinks=18), with_(nvlinks=0)),
        (with_(xids=(79,)), GOOD),
    ):
        judging = HealthOfNode()
        judging.judge(NodeSample(devices=(before,)))
        assert judging.judge(NodeSample(devices=(after,))).state == "unhealthy"
        assert judging.judge(NodeSample(devices=(after,))).state == "unhealthy"


def test_no_device_is_no_proof_of_health() -> None:
    assert HealthOfNode().judge(NodeSample()).state == "unknown"
    assert judge(GOOD).state == "ok"
    assert judge(with_(lost=True)).state == "unhealthy"
    assert judge(with_(lost=True, unknown="it does not answer")).state == "unhealthy"


def test_a_node_that_claims_other_devices_in_each_sample_is_not_remembered_without_end() -> None:
    judging = HealthOfNode()
    for number in range(1000):
        judging.judge(NodeSample(devices=(with_(index=number, xids=(79,)),)))
    assert len(judging._past) == 64
    assert judging.judge(NodeSample(devices=(with_(index=0),))).state == "unhealthy"


def test_a_storm_of_an_error_does_not_hide_another_one() -> None:
    assert bounded((79, *[45] * 1000)) == (79, *[45] * 63)
    assert bounded((*[45] * 1000, 48, 13, *[45] * 1000), 4) == (48, 13, 45, 45)
    assert bounded(tuple(range(100)), 3) == (97, 98, 99)
    assert bounded((45, 45)) == (45, 45)


def machine(node: int) -> Instance:
    return Instance(id=f"i-{node}", provider="fake", pool="p", node=node)


def ready(nodes: int) -> states.Pool:
    pool, _ = lifecycle.step(states.Pool(nodes, nodes), states.Start())
    for node in range(nodes):
        for event in (states.Launched(node, machine(node)), states.Reached(node), states.Bootstrapped(node)):
            pool, _ = lifecycle.step(pool, event)
    return pool


def test_an_unhealthy_node_is_drained_and_replaced_and_then_ended() -> None:
    error = NodeUnhealthy("node 0 is unhealthy", 0)
    pool, actions = lifecycle.step(ready(2), states.Unhealthy(0, error))
    assert actions == [states.Drain(0, None, error), states.Launch((2,))]
    assert pool.nodes[0].word == "unhealthy"
    assert lifecycle.step(pool, states.Unhealthy(0, error)) == (pool, [])
    pool, actions = lifecycle.step(pool, states.Drained(0))
    assert actions == [states.Dismiss(0, error), states.Terminate((0,))]
    assert pool.nodes[0].error is error
    assert pool.phase is states.Phase.READY


def test_an_unhealthy_node_that_cannot_be_replaced_ends_a_pool_of_one() -> None:
    from dataclasses import replace

    error = NodeUnhealthy("node 0 is unhealthy", 0)
    pool, actions = lifecycle.step(replace(ready(1), replaced=99), states.Unhealthy(0, error))
    assert actions == [states.Drain(0, None, error)]
    pool, _ = lifecycle.step(pool, states.Drained(0))
    assert (pool.phase, pool.error) == (states.Phase.DRAINING, error)


# --- what is kept --------------------------------------------------------------------------------------------


def test_samples_are_kept_once_and_read_again(tmp_path: Path) -> None:
    file = tmp_path / "samples" / "s.sqlite3"
    kept = Kept(file)
    now = time.time()
    first = [NodeSample(node=1, time=now + at, claimed=True, devices=(GOOD,)) for at in range(5)]
    assert kept.write(first) == first
    assert kept.write(first[2:]) == [], "they came again after a reconnection"
    assert [each.time for each in history(file, 1, since=now + 3)] == [
        pytest.approx(now + 3, abs=0.01),
        pytest.approx(now + 4, abs=0.01),
    ]
    assert next(history(file, 1)).claimed
    assert list(history(file, 0)) == []
    assert list(history(tmp_path / "none.sqlite3")) == []
    assert file.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
def test_samples_are_read_while_another_thread_makes_their_file(tmp_path: Path) -> None:
    for number in range(50):
        file = tmp_path / f"{number}.sqlite3"
        kept = Kept(file)
        with ThreadPoolExecutor(1) as thread:
            written = thread.submit(kept.write, [NodeSample(time=1.0)])
            while not written.done():
                assert len(list(history(file))) <= 1
            written.result()
        assert len(list(history(file))) == 1


def test_old_samples_are_thinned_and_errors_of_drivers_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sqlite3

    monkeypatch.setattr(new_samples, "_CLOCKS", 1e9)

    file = tmp_path / "s.sqlite3"
    now = time.time()
    ages = [*range(1000), *range(4000, 5000), *range(90_000, 91_000)]
    Kept(file).write(
        [
            NodeSample(time=now - age, devices=(with_(xids=(45,) if age == 90_003 else ()),))
            for age in sorted(ages, reverse=True)
        ]
    )
    with sqlite3.connect(file) as book:
        thin(book, now)
    left = [now - each.time for each in history(file)]
    assert sum(age < 3600 for age in left) == 1000
    assert 99 <= sum(3600 < age < 86_400 for age in left) <= 102
    assert 16 <= sum(age > 86_400 for age in left) <= 19
    assert any(each.devices[0].xids for each in history(file))


def test_a_sample_from_the_future_gets_the_time_of_its_arrival(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "s.sqlite3")
    [found] = kept.write([NodeSample(time=1e14)])
    assert abs(found.time - time.time()) < 60
    assert kept.write([NodeSample(time=1e14)]) == []


def test_a_file_of_samples_has_a_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sqlite3

    monkeypatch.setattr(store, "_MOST_BYTES", 256 << 10)
    file = tmp_path / "s.sqlite3"
    now = time.time()
    times = [now - 2000 + at / 2 for at in range(4000)]
    Kept(file).write([NodeSample(time=float(at), devices=(GOOD,)) for at in times])
    with sqlite3.connect(file) as book:
        thin(book, now)
        book.execute("pragma wal_checkpoint(truncate)")
    assert file.stat().st_size < 320 << 10
    assert max(each.time for each in history(file)) == pytest.approx(times[-1], abs=0.01)


def test_only_the_files_of_the_last_sessions_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_file, "_MOST_FILES", 3)
    for number in range(6):
        file = tmp_path / f"{number}.sqlite3"
        Kept(file).write([NodeSample(time=1.0)])
        os.utime(file, (number, number))
    assert sorted(each.name for each in tmp_path.glob("*.sqlite3")) == ["3.sqlite3", "4.sqlite3", "5.sqlite3"]


def test_a_file_that_a_killed_process_never_finished_is_removed(tmp_path: Path) -> None:
    for name in ("old.part", "old.part-wal", "young.part"):
        (tmp_path / name).touch()
    for name in ("old.part", "old.part-wal"):
        os.utime(tmp_path / name, (1, 1))
    Kept(tmp_path / "new.sqlite3").write([NodeSample(time=1.0)])
    assert sorted(each.name for each in tmp_path.iterdir()) == ["new.sqlite3", "young.part"]


# --- what a node keeps for its client ---------------------------------------------------------------------------


def test_two_samples_of_one_moment_have_times_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Monitor((), "/", lambda *_: None, list, lambda: None)
    monkeypatch.setattr(made._machine, "read", lambda: NodeSample(time=5.0001))
    made._measure()
    made._measure()
    assert times_in(frames_of(made)) == [5.0, 5.001]


def kept_by(made: Monitor, times: Sequence[float]) -> None:
    for each in times:
        made._keep(NodeSample(time=each))


def times_in(frames: Sequence[Sequence[dict[str, Any]]]) -> list[float]:
    return [each["time"] for frame in frames for each in frame]


def frames_of(made: Monitor) -> list[list[dict[str, Any]]]:
    """Take all that a monitor would send, in parts as a client gets them."""
    return list(iter(made.taken, []))


@pytest.fixture
def bare() -> Monitor:
    return Monitor([], "/", lambda *_: None, list, lambda: None)


def test_the_newest_samples_are_kept_in_order_while_no_client_takes_them(bare: Monitor) -> None:
    kept_by(bare, range(1, 11))
    assert times_in(frames_of(bare)) == [*range(1, 11)]
    kept_by(bare, range(11, 1001))
    frames = frames_of(bare)
    assert times_in(frames) == [*range(401, 1001)]
    assert [len(each) for each in frames] == [16] * 37 + [8]
    assert bare.taken() == []


def test_what_is_sent_again_after_several_connections_is_noted_once(bare: Monitor, tmp_path: Path) -> None:
    file = tmp_path / "s.sqlite3"
    kept = Kept(file)
    start = time.time()

    def client_takes(frames: Sequence[Sequence[dict[str, Any]]]) -> list[float]:
        return [
            round(each.time - start) for frame in frames for each in kept.write([node_sample(one) for one in frame])
        ]

    kept_by(bare, [start + at for at in range(200)])
    assert client_takes(frames_of(bare)) == [*range(200)]
    for _ in range(8):  # connections that break before the client asks for a report
        bare.rewind()
    again = frames_of(bare)
    assert [round(at - start) for at in times_in(again)] == [*range(170, 200)]
    assert client_takes(again) == []
    kept_by(bare, [start + at for at in range(200, 220)])
    bare.taken()  # lost with a connection, as is the next one
    bare.rewind()
    bare.taken()
    bare.rewind()
    assert client_takes(frames_of(bare)) == [*range(200, 220)]
    assert len(list(history(file))) == 220


LARGEST = DeviceSample(
    "cuda", 0, "GPU-01234567-89ab-cdef-0123-456789abcdef", "", False, 99.999, 99.999, 123456.789, 123456.789, 1234.567,
    1234.567, 123.456, 1234.567, 1234.567, tuple(nvml_reader._REASONS.values()), 12345.678, 12345.678, 123456.789,
    123456.789, 16, 16, 18, 18, 10**15, 10**15, True, True, 4, (9,) * 64, True,
    {str(4_000_000 + n): 1.0 for n in range(64)},
)  # fmt: skip
"""A device with the longest lists, and numbers that need as much memory for as little text as they can."""


@pytest.mark.parametrize("name", ["f", "n" * 300, "\N{CJK UNIFIED IDEOGRAPH-706B}" * 300, "\U00020000" * 300])
def test_the_largest_samples_are_sent_in_frames_that_a_client_takes(name: str) -> None:
    running = [(10**18 + n, name, n, os.getpid(), 1234.567) for n in range(64)]
    made = Monitor([], "/", lambda *_: None, lambda: running, lambda: None)
    for number in range(40):
        made._take(tuple(replace(LARGEST, index=n, ecc_corrected=number) for n in range(8)))
    seen: list[NodeSample] = []
    for samples in frames_of(made):
        assert len(samples) <= 16
        report = {"busy": 64, "waiting": 9, "done": 9, "running": [name[:200]] * 8, "cpu_busy": 0, "samples": samples}
        data = encode(Kind.PONG, report)
        assert len(data) - 16 <= MAX_HEADER
        said: Any = message_of(parse_frame(memoryview(data)))
        seen += said.samples
    assert [each.devices[0].ecc_corrected for each in seen] == [*range(40)]
    assert all((len(each.devices), len(each.calls)) == (8, 32) for each in seen)
    assert {len(one.xids) for each in seen for one in each.devices} == {64}


PROBE = """
import importlib.util
import sys

class Probe:
    '''Gives `skypool.agent.monitor` other constants, and writes down which samples it makes and sends.'''

    def find_spec(self, name, path=None, target=None):
        if name != "skypool.agent.monitor":
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec(name)
        self.loader, found.loader = found.loader, self
        return found

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        exec(self.loader.get_code(module.__name__), module.__dict__)
        vars(module).update({constants})
        keep, taken = module.Monitor._keep, module.Monitor.taken

        def tell(*words):
            with open({log!r}, "a") as file:
                print(*words, file=file)

        def keep_and_tell(monitor, sample):
            keep(monitor, sample)
            tell("made", monitor._kept[-1][1]["time"])

        def taken_and_told(monitor):
            samples = taken(monitor)
            tell("sent", *(each["time"] for each in samples))
            return samples

        module.Monitor._keep, module.Monitor.taken = keep_and_tell, taken_and_told

sys.meta_path.insert(0, Probe())
"""


class Probe:
    """A machine whose agent measures ten times in a second, writes down what it measures, and can be out of reach.

    Args:
        folder: an empty folder.
        constants: other values of constants of `skypool.agent.monitor`.
    """

    def __init__(self, folder: Path, **constants: float) -> None:
        self._log, self._down = folder / "log", folder / "down"
        self._log.touch()
        constants = {"_EVERY": 0.01, "_EVERY_WITH_DEVICES": 0.01, "_FIRST": 0.0, **constants}
        (folder / "sitecustomize.py").write_text(
            PROBE.replace("{constants}", repr(constants)).replace("{log!r}", repr(str(self._log)))
        )
        script = folder / "python"
        script.write_text(
            f"#!/bin/sh\nif [ -e {self._down} ]; then echo the network is down >&2; exit 255; fi\n"
            f'PYTHONPATH={folder} exec {sys.executable} "$@"\n'
        )
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        self.driver = sky.Local(python=str(script))

    def disconnect(self) -> None:
        """Let no connection be made."""
        self._down.touch()

    def reconnect(self) -> None:
        self._down.unlink()

    def lines(self) -> list[list[str]]:
        return [each.split() for each in self._log.read_text().splitlines()]

    @property
    def made(self) -> list[float]:
        """The times of the samples that were measured so far."""
        return [float(words[1]) for words in self.lines() if words[0] == "made"]

    @property
    def reports(self) -> list[tuple[int, list[float]]]:
        """For each report with samples: the number of lines before it, and the times of its samples."""
        found = enumerate(self.lines())
        return [(at, [*map(float, words[1:])]) for at, words in found if words[0] == "sent" and words[1:]]

    @property
    def sent(self) -> list[float]:
        """The times of the samples that were sent so far. Those that were sent again are there again."""
        return [each for _, times in self.reports for each in times]


def history_of(pool: sky.ComputePool) -> list[float]:
    return [round(each.time, 3) for each in pool.samples.history()]


def await_later(pool: sky.ComputePool, probe: Probe) -> None:
    """Wait until the client has a sample that is made after now, and so all that were sent before it."""
    last = probe.made[-1]
    eventually(lambda: history_of(pool)[-1] > last, 60, "later samples")


def test_after_a_long_cut_the_client_gets_the_newest_samples_in_order(tmp_path: Path) -> None:
    probe = Probe(tmp_path, _KEPT=40)
    with sky.ComputePool(probe.driver, console="off", slots=1, liveness=60) as pool:
        eventually(lambda: len(history_of(pool)) >= 5, 60, "the first samples")
        link = link_of(pool)
        probe.disconnect()
        cut(link)
        eventually(lambda: not link.is_up)
        had, before = history_of(pool), len(probe.made)
        eventually(lambda: len(probe.made) > before + 60, 60, "more samples than are kept")
        probe.reconnect()
        eventually(lambda: link.is_up, 60, "the link")
        await_later(pool, probe)
        seen = history_of(pool)
    made = probe.made
    counts = [sum(words[0] == "made" for words in probe.lines()[:at]) for at, _ in probe.reports]
    first = next(count for count in counts if count > before + 60) - 40  # the oldest that was kept at the next report
    assert had == made[: len(had)]
    assert seen[len(had) :] == made[first:][: len(seen) - len(had)]
    assert len(had) < first


@pytest.mark.slow
def test_samples_that_were_lost_with_a_connection_are_sent_again(tmp_path: Path) -> None:
    probe = Probe(tmp_path)
    with sky.ComputePool(probe.driver, console="off", slots=1, liveness=60) as pool:
        eventually(lambda: len(history_of(pool)) >= 5, 60, "the first samples")
        link = link_of(pool)
        stream = link._stream
        assert stream is not None
        with link.reading():  # so the client reads nothing
            before = len(history_of(pool))
            eventually(lambda: len(probe.sent) >= before + 10, 60, "samples that nobody reads")
            cut(link)
            eventually(lambda: link._stream is not stream, 60, "the end of the connection")
        lost = probe.sent[before : before + 10]
        eventually(lambda: {*lost} <= {*history_of(pool)}, 60, "the samples that were lost")
        await_later(pool, probe)
        seen = history_of(pool)
        assert seen == probe.made[: len(seen)], "each sample is there once, and in order"
        assert len(probe.sent) > len({*probe.sent}), "some were sent twice"


@pytest.mark.slow
def test_a_node_with_eight_gpus_and_eight_calls_comes_back_after_a_cut(nvml: FakeNvml, tmp_path: Path) -> None:
    nvml.say(0, count=8)
    go = tmp_path / "go"

    def wait_until_it_may_end(n: int) -> int:
        while not os.path.exists(go):
            time.sleep(0.1)
        return n

    probe = Probe(tmp_path)
    heard: list[events.Event] = []
    with sky.ComputePool(probe.driver, console="off", slots=8, liveness=60) as pool:
        pool.events.listen(heard.append)
        calls = [pool.submit(wait_until_it_may_end, n) for n in range(8)]
        eventually(lambda: len(pool.samples.latest()[0].calls) == 8, 60, "eight calls in a sample")
        link = link_of(pool)
        probe.disconnect()
        cut(link)
        before = len(probe.made)
        eventually(lambda: len(probe.made) > before + 40, 60, "samples that wait for the client")
        probe.reconnect()
        await_later(pool, probe)
        seen = history_of(pool)
        assert seen == probe.made[: len(seen)]
        go.touch()
        assert [each.result(60) for each in calls] == [*range(8)]
    assert sum(isinstance(each, events.LinkUp) for each in heard) == 1


# --- the machine ---------------------------------------------------------------------------------------------


def test_the_machine_and_a_process_are_read(tmp_path: Path) -> None:
    reading = Machine(str(tmp_path))
    assert reading.read().cpu_percent is None, "there is no span yet"
    time.sleep(0.05)
    seen = reading.read()
    assert seen.memory_used_mib
    assert seen.memory_total_mib
    assert 0 < seen.memory_used_mib < seen.memory_total_mib
    assert seen.disk_total_mib
    assert seen.sent_mib is not None
    use = process(os.getpid())
    assert use is not None
    assert use.rss_mib > 5
    assert process(2**22 + 1) is None


DISKSTATS = """\
   7       0 loop0 900 0 9000000 0 900 0 9000000 0 0 0 0
 259       0 nvme0n1 10 0 {read} 5 10 0 {written} 5 0 9 9 0 0 0 0
 259       1 nvme0n1p1 10 0 {read} 5 10 0 {written} 5 0 9 9 0 0 0 0
 259       2 nvme0c0n1 10 0 {read} 5 10 0 {written} 5 0 9 9 0 0 0 0
 253       0 dm-0 10 0 {read} 5 10 0 {written} 5 0 9 9 0 0 0 0
 104       0 cciss/c0d0 10 0 {read} 5 10 0 {written} 5 0 9 9
"""
"""Six block devices with one disk of NVMe and one of an old RAID controller among them, as the kernel lists them."""


def test_the_traffic_of_whole_disks_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvme0n1", "nvme0c0n1", "cciss!c0d0"):
        (tmp_path / "block" / name / "device").mkdir(parents=True)
    for name in ("loop0", "dm-0"):
        (tmp_path / "block" / name).mkdir()
    monkeypatch.setattr(machine_load, "_BLOCK_DEVICES", str(tmp_path / "block"))
    stats = tmp_path / "diskstats"
    monkeypatch.setattr(machine_load, "_DISKSTATS", str(stats))
    times = iter([100.0, 102.0, 104.0, 106.0, 108.0, 110.0])
    monkeypatch.setattr(machine_load, "time", SimpleNamespace(monotonic=lambda: next(times), time=time.time))
    reading = Machine("/")
    stats.write_text(DISKSTATS.format(read=0, written=0))
    assert (reading.read().disk_read_mib, reading._before is not None) == (None, True), "there is no span yet"
    stats.write_text(DISKSTATS.format(read=2048, written=4096))  # sectors: 1 MiB and 2 MiB for each of two disks in 2 s
    seen = reading.read()
    assert (seen.disk_read_mib, seen.disk_written_mib) == (1.0, 2.0)
    stats.write_text(DISKSTATS.format(read=0, written=4096))
    seen = reading.read()
    assert (seen.disk_read_mib, seen.disk_written_mib) == (0.0, 0.0), "a disk was removed"
    for said in ("", "1 2\n", DISKSTATS.format(read="many", written=0)):
        stats.write_text(said)
        seen = reading.read()
        assert (seen.disk_read_mib, seen.disk_written_mib) == (None, None)


def test_what_is_written_to_a_disk_is_measured(tmp_path: Path) -> None:
    number = tmp_path.stat().st_dev
    if not Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").exists():
        pytest.skip("the folder of this test is not on a disk")
    reading = Machine(str(tmp_path))
    reading.read()
    with (tmp_path / "data").open("wb") as file:
        file.write(os.urandom(8 << 20))
        file.flush()
        os.fsync(file.fileno())
    written = reading.read().disk_written_mib
    if written is None:
        pytest.skip("this machine has no disk of its own in /proc/diskstats")
    assert written > 0


@pytest.mark.slow
def test_a_pool_without_devices_is_sampled_without_a_process() -> None:
    def busy(seconds: float) -> int:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            pass
        return os.getppid()

    with sky.ComputePool(console="off", slots=1) as pool:
        assert pool.samples.health() == {}
        working = pool.submit(busy, 2.5)
        eventually(lambda: pool.samples.latest(), 60, "a sample")
        [(node, seen)] = pool.samples.latest().items()
        assert (node, seen.node, seen.devices, seen.claimed) == (0, 0, (), False)
        assert seen.memory_total_mib
        assert [each.name.rpartition(".")[2] for each in seen.calls] == ["busy"]
        assert seen.calls[0].rss_mib
        assert seen.calls[0].cpu_seconds is None  # it counts from the first sample
        agent = working.result()
        names = [Path(f"/proc/{pid}/comm").read_text() for pid in children_of(agent)]
        assert all("worker" in name for name in names), names
        assert pool.samples.history()[0].node == 0


def children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


# --- NVIDIA GPUs, by an NVML of our own, and by the real one where there are some ------------------------------


def run_python(program: str, *args: str) -> str:
    """Run a program in a process of its own, which loads the library of the test, and return its output."""
    done = subprocess.run([sys.executable, "-c", program, *args], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def read(wanted: list[tuple[int, str]]) -> tuple[DeviceSample, ...]:
    """Return the second reading of GPUs, as a node sends it."""
    program = """
import json, sys
from skypool.samples.nvml import Nvml
from skypool.devices.sample import to_json
reader = Nvml(json.loads(sys.argv[1]))
reader.read(); reader.wait(0.2)
print(json.dumps([to_json(each) for each in reader.read()]))
"""
    return node_sample({"devices": json.loads(run_python(program, json.dumps(wanted)))}).devices


def test_the_structs_of_the_library_have_the_sizes_of_those_of_nvidia_ml_py(nvml: FakeNvml) -> None:
    source = Path(__file__).with_name("nvml").joinpath("nvml.c").read_text()
    structs = re.findall(r'"((?:c_)?nvml[A-Za-z0-9_]+_t)"', source)
    assert len(structs) > 5
    program = f"""
import ctypes, pynvml
library = ctypes.CDLL("libnvidia-ml.so.1")
for name in {structs!r}:
    mine, theirs = library.size_of(name.encode()), ctypes.sizeof(getattr(pynvml, name))
    assert mine == theirs, (name, mine, theirs)
"""
    run_python(program)
    nvml.say(0, sm_activity=40, busy=90)
    [seen] = read([(0, "")])
    assert (seen.utilization_percent, seen.sm_activity_percent) == (90.0, 40.0)


@fake_and_real
def test_the_library_writes_no_more_than_the_structs_of_nvidia_ml_py_hold(library: Library) -> None:
    program = """
import ctypes, json, pynvml
pynvml.nvmlInit()
library = ctypes.CDLL("libnvidia-ml.so.1")
handle = pynvml.nvmlDeviceGetHandleByIndex(0)
def call(function, struct, *args):
    size, guard = ctypes.sizeof(struct), b"\\xa5" * 256
    memory = ctypes.create_string_buffer(bytes(size) + guard, size + len(guard))
    found = struct.from_buffer(memory)
    if struct is pynvml.c_nvmlFieldValue_t:
        found.fieldId = pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES
    code = getattr(library, function)(handle, *args, memory)
    assert code in (pynvml.NVML_SUCCESS, pynvml.NVML_ERROR_NOT_SUPPORTED), (function, code)
    assert memory.raw[size:] == guard, (function, memory.raw[size:])
    return found
memory = call("nvmlDeviceGetMemoryInfo", pynvml.c_nvmlMemory_t)
assert 0 <= memory.used <= memory.total, (memory.used, memory.total)
assert call("nvmlDeviceGetUtilizationRates", pynvml.c_nvmlUtilization_t).gpu <= 100
pci = call("nvmlDeviceGetPciInfo_v3", pynvml.nvmlPciInfo_t)
assert pci.pciDeviceId & 0xFFFF == 0x10DE, hex(pci.pciDeviceId)
call("nvmlDeviceGetFieldValues", pynvml.c_nvmlFieldValue_t, 1)
print(memory.total >> 20)
"""
    lowest, highest = library.cards[0].memory_mib
    assert lowest <= int(run_python(program)) <= highest


@fake_and_real
def test_the_library_has_every_symbol_that_is_asked_for_while_all_cards_are_read(library: Library) -> None:
    program = f"""
import ctypes, pynvml
from skypool.samples.nvml import Nvml
asked = set()
find = pynvml._nvmlGetFunctionPointer
def noted(name):
    asked.add(name)
    return find(name)
pynvml._nvmlGetFunctionPointer = noted
reader = Nvml([(index, "") for index in range({len(library.cards)})])
reader.read(); reader.wait(0.2); reader.read()
library = ctypes.CDLL("libnvidia-ml.so.1")
missing = [name for name in asked if not hasattr(library, name)]
assert not missing, missing
assert len(asked) > 15, asked
"""
    run_python(program)


@fake_and_real
def test_values_that_rarely_change_are_read_rarely(library: Library) -> None:
    program = f"""
import collections, pynvml
from skypool.samples.nvml import Nvml
asked = collections.Counter()
find = pynvml._nvmlGetFunctionPointer
def noted(name):
    asked[name] += 1
    return find(name)
cards = {len(library.cards)}
reader = Nvml([(index, "") for index in range(cards)])
pynvml._nvmlGetFunctionPointer = noted
first = [each.nvlinks for each in reader.read()]
for _ in range(9):
    assert [each.nvlinks for each in reader.read()] == first
assert asked["nvmlDeviceGetUtilizationRates"] == 10 * cards, asked
assert 1 <= asked["nvmlDeviceGetNvLinkState"] <= pynvml.NVML_NVLINK_MAX_LINKS * cards, asked
assert asked["nvmlDeviceGetTotalEccErrors"] == 2 * cards, asked
"""
    run_python(program)


def test_values_that_rarely_change_are_read_at_once_after_an_error(nvml: FakeNvml) -> None:
    program = """
import collections
import pynvml
from skypool.samples.nvml import Nvml
asked = collections.Counter()
find = pynvml._nvmlGetFunctionPointer
def noted(name):
    asked[name] += 1
    return find(name)
reader = Nvml([(0, "")])
pynvml._nvmlGetFunctionPointer = noted
first = reader.read()[0]
assert (first.nvlinks, first.nvlinks_all, first.ecc_uncorrected) == (18, 18, 0), first
print(flush=True)
input()
assert reader.read()[0].ecc_uncorrected == 0
assert reader.wait(30)
seen = reader.read()[0]
assert (seen.xids, seen.ecc_uncorrected, seen.nvlinks, seen.nvlinks_all) == ((48,), 1, 17, 18), seen
assert asked["nvmlDeviceGetMaxPcieLinkWidth"] == 2, asked
"""
    argv = [sys.executable, "-c", program]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        nvml.say(0, uncorrected=1, links_up=17)
        nvml.xid(0, 48)
        process.stdin.write(b"\n")
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said.decode()


class Loop:
    """A loop around a `Monitor`, as the agent has one."""

    def __init__(self, devices: list[Device]) -> None:
        self._poll = select.epoll()
        self._callbacks: dict[int, Callable[[], None]] = {}
        self.news = 0
        self.monitor = Monitor(devices, "/", self._watch, list, self._on_news)
        self.seen: list[NodeSample] = []

    def _on_news(self) -> None:
        self.news += 1

    def _watch(self, fd: int, events: int, callback: Callable[[], None]) -> None:
        if events:
            self._callbacks[fd] = callback
            self._poll.register(fd, events)
        else:
            del self._callbacks[fd]
            self._poll.unregister(fd)

    def until(self, wanted: Callable[[DeviceSample], bool]) -> DeviceSample:
        """Run until a sample of the first device is as wanted, and return that sample."""
        found: list[DeviceSample] = []

        def one_round() -> bool:
            for fd, _ in self._poll.poll(0.02):
                self._callbacks[fd]()
            self.monitor.tick(time.monotonic())
            for each in self.monitor.taken():
                self.seen.append(node_sample(each))
                found.extend(one for one in self.seen[-1].devices[:1] if wanted(one))
            return bool(found)

        eventually(one_round, 60, "such a sample")
        return found[0]

    @property
    def pid(self) -> int:
        child = self.monitor._child
        assert child is not None
        return child.pid

    def close(self) -> None:
        child = self.monitor._child
        if child is not None:
            if child.stdout is not None:
                child.stdout.close()
            if child.stdin is not None:
                child.stdin.close()
            child.kill()
            child.wait()
        self._poll.close()


@pytest.fixture
def loop(library: Library, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    """A loop with a monitor of all cards of the library."""
    monkeypatch.setattr(monitor, "_EVERY_WITH_DEVICES", 0.1)
    monkeypatch.setattr(sys, "path", [str(Path(sky.__file__).parents[1]), *sys.path])
    made = Loop([Device("cuda", index, card.name, uuid=card.uuid) for index, card in enumerate(library.cards)])
    yield made
    made.close()


@fake_and_real
def test_a_monitor_reads_every_card(loop: Loop, library: Library) -> None:
    loop.until(lambda each: each.memory_used_mib is not None)
    devices = loop.seen[-1].devices
    assert [(each.index, each.uuid) for each in devices] == [(n, card.uuid) for n, card in enumerate(library.cards)]
    for card, seen in zip(library.cards, devices, strict=True):
        card.check(seen)
        assert judge(seen).state in library.states
    assert loop.news == 1


def test_load_errors_and_a_lost_card_reach_the_samples(loop: Loop, nvml: FakeNvml) -> None:
    first = loop.until(lambda each: each.memory_used_mib is not None)
    assert judge(first).state == "ok"
    assert loop.news == 1
    nvml.say(0, busy=97, milliwatts=700_000, throttled=4, lanes=8, uncorrected=2, pid=os.getpid())
    seen = loop.until(lambda each: each.utilization_percent == 97)
    assert (seen.power_watts, seen.power_limit_watts, seen.throttled) == (700.0, 700.0, ("power cap",))
    assert seen.memory_of == {str(os.getpid()): 512.0}
    nvml.xid(0, 45)
    seen = loop.until(lambda each: each.xids == (45,))
    assert (seen.ecc_uncorrected, seen.pcie_width) == (2, 8), "after an error, these are read at once"
    nvml.xid(0, 79)
    loop.until(lambda each: each.xids == (79,))
    assert sum(79 in each.devices[0].xids for each in loop.seen if each.devices) == 1, "it is told once"
    nvml.say(0, lost=1)
    assert loop.until(lambda each: each.lost).utilization_percent is None


def test_a_storm_of_errors_does_not_delay_a_later_one(loop: Loop, nvml: FakeNvml) -> None:
    loop.until(lambda each: not each.unknown)
    nvml.say(0, xid=45, xids=3000)
    assert loop.until(lambda each: bool(each.xids)).xids == (45,) * 64
    loop.until(lambda each: not each.xids)
    nvml.xid(0, 79)
    assert loop.until(lambda each: 79 in each.xids).xids == (79,)
    nvml.say(0, busy=55)
    loop.until(lambda each: each.utilization_percent == 55)
    assert sum(79 in one.xids for each in loop.seen for one in each.devices) == 1


@fake_and_real
def test_a_card_is_found_by_its_uuid_after_another_one_was_lost(library: Library) -> None:
    """The driver has given GPU 1 the index 0, GPU 2 the index 1 and so on, as GPU 0 was lost before the start."""
    shifted = [(index, card.uuid) for index, card in enumerate(library.cards, 1)]
    lost, *found, unknown = read([(0, "GPU-00000007-0000"), *shifted, (len(shifted) + 1, "")])
    assert (lost.lost, lost.memory_used_mib, judge(lost).state) == (True, None, "unhealthy")
    for card, seen in zip(library.cards, found, strict=True):
        card.check(seen)
        assert judge(seen).state in library.states
    assert (unknown.lost, unknown.memory_used_mib, judge(unknown).state) == (False, None, "unknown")


def test_a_value_that_a_card_does_not_have_is_unknown(loop: Loop, nvml: FakeNvml) -> None:
    nvml.say(0, remap_failed=-1, corrected=-1, uncorrected=-1, recovery=-1, links=0, no_events=1)
    seen = loop.until(lambda each: each.memory_used_mib is not None)
    assert (seen.remap_failed, seen.ecc_uncorrected, seen.recovery, seen.nvlinks) == (None, None, None, 0)
    assert judge(seen).state == "unknown"


def test_a_card_that_hangs_its_monitor_is_unknown_until_it_answers_again(
    loop: Loop, nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop.monitor._patience = 1.0
    loop.until(lambda each: not each.unknown)
    pid = loop.pid
    nvml.say(0, hang=1)
    assert "the monitor hangs" in loop.until(lambda each: bool(each.unknown)).unknown
    nvml.say(0, hang=0)
    loop.monitor._patience = 30.0
    loop.until(lambda each: not each.unknown)
    assert loop.pid != pid


@fake_and_real
def test_a_monitor_that_cannot_be_killed_at_once_is_not_waited_for(loop: Loop, library: Library) -> None:
    """A stopped process stands in for one that hangs in the kernel: it does not answer, and SIGTERM does not end it."""
    loop.until(lambda each: not each.unknown)
    loop.monitor._patience = 1.0
    os.kill(loop.pid, signal.SIGSTOP)
    began = time.monotonic()
    loop.until(lambda each: bool(each.unknown))
    assert time.monotonic() - began < 30


def test_a_missing_driver_is_unknown_and_is_told(loop: Loop, nvml: FakeNvml) -> None:
    nvml.say(0, driver=0)
    assert loop.until(lambda each: bool(each.unknown)).unknown.startswith("NVML cannot be used: Driver Not Loaded")


@fake_and_real
def test_what_cards_report_reaches_the_pool_its_health_the_live_view_and_the_report(library: Library) -> None:
    cards = range(len(library.cards))
    with sky.ComputePool(console="off", name="cards", nodes=1, slots=1) as pool:
        health = pool.samples.health()[0]
        assert [(each.kind, each.index) for each in health.devices] == [("cuda", index) for index in cards]
        assert health.state in library.states
        eventually(lambda: pool.samples.latest()[0].devices, 60, "a sample of the cards")
        sample = pool.samples.latest()[0]
        for card, seen in zip(library.cards, sample.devices, strict=True):
            card.check(seen)
        memory = next(each.text for each in gauges(sample) if each.name == "mem")
        mib = sum(card.memory_mib[1] for card in library.cards)
        assert float(re.findall(r"/([\d.]+) GiB", memory)[0]) == pytest.approx(mib / 1024, rel=0.02)
        shown = subprocess.run([*PROGRAM, "health", "cards"], capture_output=True, text=True, timeout=60)
        assert shown.returncode == 0, shown
        rows = re.findall(r"cuda (\d+) +(\w+) +(\d+|\?) +(\d+)", shown.stdout)
        assert [int(index) for index, *_ in rows] == list(cards), shown.stdout
        assert all(state in library.states for _, state, *_ in rows), shown.stdout
        assert pool.submit(os.getpid).result(60)
        page = pool.report().html
    assert {each for each in cards if f'data-device="cuda {each}"' in page} == set(cards)
    assert all(card.name in page for card in library.cards)


def hold(folder: str, mib: int, on_a_real_card: bool) -> None:
    """Write the process id to the file `pid`, and work until the file `end` is there.

    Args:
        folder: the folder of the files.
        mib: the memory in MiB to take on a GPU, and to fill again and again.
        on_a_real_card: False if there is no GPU, so that nothing is taken.
    """
    import ctypes

    place = Path(folder)
    step: Callable[[], object] = partial(time.sleep, 0.01)
    if on_a_real_card:
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as NVML numbers them
        cuda = ctypes.CDLL("libcuda.so.1")

        def ask(function: str, *args: Any) -> None:
            if code := getattr(cuda, function)(*args):
                raise RuntimeError(f"{function}: CUDA error {code}")

        device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
        size = ctypes.c_size_t(mib << 20)
        ask("cuInit", 0)
        ask("cuDeviceGet", ctypes.byref(device), 0)
        ask("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        ask("cuCtxSetCurrent", context)
        ask("cuMemAlloc_v2", ctypes.byref(memory), size)

        def fill() -> None:
            for _ in range(100):
                ask("cuMemsetD8_v2", memory, ctypes.c_ubyte(0), size)
            ask("cuCtxSynchronize")

        step = fill
        step()
    (place / "part").write_text(str(os.getpid()))
    (place / "part").rename(place / "pid")
    while not (place / "end").exists():
        step()


@fake_and_real
def test_a_call_that_uses_a_card_is_seen_with_its_memory_and_its_load(library: Library, tmp_path: Path) -> None:
    with sky.ComputePool(console="off", nodes=1, slots=1) as pool:

        def device_memory() -> list[float | None]:
            return [each.device_memory_mib for each in pool.samples.latest()[0].calls]

        working = pool.submit(hold, str(tmp_path), 256, library.nvml is None)
        eventually(lambda: (tmp_path / "pid").exists() or working.done(), 60, "the start of the call")
        if working.done():
            working.result()
        pid = int((tmp_path / "pid").read_text())
        library.report_use(pid, 700)
        memory = library.memory_of(pid)
        if library.cards[0].values["utilization_percent"] is not None:
            eventually(lambda: (pool.samples.latest()[0].devices[0].utilization_percent or 0) > 0, 60, "the load")
        eventually(device_memory, 60, "a sample of the call")
        if memory is not None:
            assert memory >= 256
            eventually(lambda: device_memory() == [pytest.approx(memory, abs=1)], 60, "its device memory")
        else:
            assert device_memory() == [None]
        (tmp_path / "end").touch()
        working.result(60)
    if memory is None:
        pytest.skip("the driver does not report memory by process here, as in containers")


def test_a_gpu_that_falls_off_the_bus_is_seen_by_the_pool_and_the_node_is_replaced(nvml: FakeNvml) -> None:
    heard: list[events.Event] = []
    pool = sky.ComputePool(console="plain", name="gpus", nodes=1, slots=1)
    pool.events.listen(heard.append)
    with pool:
        assert pool.samples.health()[0].state == "ok"
        nvml.say(0, busy=88)
        eventually(
            lambda: any(
                each.utilization_percent == 88 for one in pool.samples.latest().values() for each in one.devices
            ),
            60,
            "the load",
        )
        shown = subprocess.run([*PROGRAM, "health", "gpus"], capture_output=True, text=True, timeout=60)
        assert (shown.returncode, "cuda 0" in shown.stdout, "88" in shown.stdout) == (0, True, True), shown
        nvml.xid(0, 79)
        eventually(lambda: pool.nodes[0].startswith(("unhealthy", "draining", "ended")), 60, "the unhealthy node")
        nvml.say(0, xid=45)
        eventually(lambda: pool.nodes.get(1) == "ready", 60, "another node")
        assert pool.submit(os.getpid).result(60)
    changes = [each for each in heard if isinstance(each, events.HealthChanged)]
    assert [(each.node, each.state) for each in changes[:2]] == [(0, "ok"), (0, "unhealthy")]
    assert "XID 79" in changes[1].reasons[0]


@pytest.mark.slow
def test_what_a_card_reports_reaches_console_and_report(nvml: FakeNvml, capfd: pytest.CaptureFixture[str]) -> None:
    def state() -> tuple[str, str]:
        found = pool.samples.health()[0]
        return found.state, "; ".join(found.reasons)

    nvml.say(0, uncorrected=3)
    with sky.ComputePool(console="plain", name="told", nodes=1, slots=1) as pool:
        assert state()[0] == "degraded"
        assert "3 memory errors" in state()[1]
        nvml.say(0, busy=88)
        nvml.xid(0, 94)
        eventually(lambda: "XID 94" in state()[1], 60, "XID 94")
        nvml.say(0, hang=1)
        eventually(lambda: "the monitor hangs" in state()[1], 60, "the hang")
        assert pool.submit(os.getpid).result(60)
        nvml.say(0, hang=0)
        eventually(lambda: "the monitor hangs" not in state()[1], 60, "the end of the hang")
        pool.samples.history()
        page = pool.report().html
        nvml.say(0, lost=1)
        eventually(lambda: state()[0] == "unhealthy", 60, "the loss")
    printed = capfd.readouterr().err
    last = pool.report().html
    for said in (printed, page):
        assert "3 memory errors" in said
        assert "XID 94" in said
        assert "the monitor hangs" in said
    for said in (printed, last):
        assert "the device is lost" in said


def test_a_node_whose_samples_are_off_measures_nothing(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(node_facts.SWITCH, "off")
    for seconds in range(30):
        loop.monitor.tick(float(seconds))
    assert loop.monitor._child is None
    assert loop.monitor.taken() == []


def test_an_unhealthy_machine_gets_no_call_at_all(nvml: FakeNvml) -> None:
    nvml.say(0, remap_failed=1)
    with pytest.raises(sky.BootstrapError, match=r"must not be used.*could not be replaced"):
        sky.ComputePool(console="off", nodes=1).start()


def test_devices_of_other_vendors_are_read_by_their_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tools print what they printed elsewhere (tests/samples/README.md). A TPU has no such tool."""
    for tool, recording in (("amd-smi", "amd-smi-metric-w7700.json"), ("hl-smi", "hl-smi-stats-gaudi.csv")):
        program = tmp_path / tool
        program.write_text(f"#!/bin/sh\nexec cat {Path(__file__).with_name('samples') / recording}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    amd, gaudi, tpu = tools.read([("rocm", 0, "a"), ("hpu", 0, "b"), ("tpu", 0, "")])
    for seen in (amd, gaudi):
        assert seen.utilization_percent is not None
        assert seen.memory_used_mib is not None
        assert judge(seen).state == "unknown", "these tools do not tell of errors"
    assert tpu.unknown


@fake_and_real
def test_a_monitor_that_prints_other_things_is_started_again(loop: Loop, library: Library) -> None:
    loop.until(lambda each: not each.unknown)
    loop.monitor._said = b"a message of the driver "
    assert "no reading" in loop.until(lambda each: bool(each.unknown)).unknown
    loop.until(lambda each: not each.unknown)
