"""What a client keeps of a node is counted by size: its output, measurements and events, in memory and on disk."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skypool import events
from skypool.clock import RunningClock
from skypool.console.printer import Printer
from skypool.console.whole_lines import LONGEST, Lines
from skypool.devices.sample import DeviceSample, NodeSample
from skypool.errors import BootstrapError, ProtocolError
from skypool.gangs.ports import ports_of
from skypool.link.agent_messages import Printed, message_of
from skypool.link.chunks import Pieces
from skypool.link.inbox import Arrival, Inbox
from skypool.link.reports import NodeReports
from skypool.logs import files
from skypool.logs.files import Limits
from skypool.logs.masking import Masker
from skypool.logs.writer import LogWriter
from skypool.metrics.devices import device_measurements, xid_measurements
from skypool.observers.server import Waiting
from skypool.pool.health import HealthWatch
from skypool.pool.new_samples import NewSamples
from skypool.pool.watch import Watches
from skypool.provision.bootstrap import SetupBundle, bootstrap
from skypool.safety.received_data_limit import Quota, Share
from skypool.samples import journal, store
from skypool.samples.journal import Journal, JournalEvent, read
from skypool.samples.store import history, sizes
from skypool.shipping.user_modules import Lender
from skypool.wire.frames import Frame, Kind, frame, scan
from skypool.wire.transport import CommandStream, Errand
from tests.conftest import memory
from tests.facts import Given, Kept, watching

STRANGER = 7
SMALL = Share("small", 100, "it is too much", strangers=True)


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers have room for 1 MiB of samples and events, so that a test need not write more."""
    monkeypatch.setattr(store, "_KEPT", replace(store._KEPT, most=1 << 20))
    monkeypatch.setattr(journal, "_KEPT", replace(journal._KEPT, most=1 << 20))


@pytest.fixture
def quota(told: list[str]) -> Quota:
    return Quota(lambda node: node == STRANGER, told.append)


def sick(node: int, n: int) -> events.HealthChanged:
    """An event with 18 kB of reasons."""
    return events.HealthChanged(
        pool="p", node=node, state="unknown", reasons=tuple(f"{n}{'x' * 280}" for _ in range(64))
    )


def cards(n: int, kind: str = "cuda", **said: Any) -> tuple[DeviceSample, ...]:
    return tuple(DeviceSample(kind, index, **said) for index in range(n))


# --- the count -----------------------------------------------------------------------------------------------


def test_a_quota_has_room_again_when_something_is_given_back(quota: Quota, told: list[str]) -> None:
    assert quota.take(STRANGER, SMALL, 60)
    assert not quota.take(STRANGER, SMALL, 60)
    assert not quota.take(STRANGER, SMALL, 60)
    assert told == ["node 7 sends more than is kept of one node: it is too much"]
    assert quota.used(STRANGER, SMALL) == 60
    quota.give_back(STRANGER, SMALL, 60)
    assert quota.take(STRANGER, SMALL, 60)


def test_a_trusted_node_and_the_pool_have_no_limit_that_is_for_strangers(quota: Quota, told: list[str]) -> None:
    assert quota.take(0, SMALL, 1000)
    assert quota.take(-1, SMALL, 1000)
    assert not quota.take(0, Share("all", 100, ""), 1000)
    assert len(told) == 1


# --- events --------------------------------------------------------------------------------------------------


def test_an_event_weighs_its_texts() -> None:
    astral = events.Output(pool="p", node=0, slot=0, call=1, stream=1, text="\U0001f600" * 1000)
    assert events.weight(astral) > 4000
    assert events.weight(sick(0, 1)) > 18_000
    assert events.weight(events.LinkDown(pool="p", node=0, reason="r" * 5000)) > 5000


def test_events_that_wait_for_a_slow_observer_are_bounded_by_their_size() -> None:
    waiting = Waiting()
    for n in range(1000):
        waiting.hear(sick(0, n))
    lines = waiting.taken(0, 1 << 30)
    assert 500_000 < sum(map(len, lines)) < 1_100_000
    assert b'"Missed"' in lines[-1]


def test_events_that_wait_for_the_log_are_bounded_by_their_size_and_by_their_node(
    quota: Quota, told: list[str]
) -> None:
    watches = Watches([LogWriter(Limits())], quota, pytest.fail)  # `begin` was not called, so that they wait
    waiting = watches._runners[0]._waiting
    for n in range(1000):
        watches.hear(sick(STRANGER, n))
    assert 6 << 20 < sum(map(events.weight, waiting)) < 9 << 20
    watches.hear(events.Notice(pool="mine", text="of the pool"))
    assert isinstance(waiting[-1], events.Notice), "a node does not take the room of others"
    assert len(told) == 1


# --- files ---------------------------------------------------------------------------------------------------


def test_a_stranger_fills_half_of_the_logs_and_a_trusted_node_all(
    quota: Quota, told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for node, most in ((STRANGER, 400_000), (0, 800_000)):
        watches = watching(LogWriter(Limits(pool=800_000)), given := Given(session=f"5e5{node}", quota=quota))
        for n in range(400):
            text = f"{n} {'x' * 10_000}\n"
            watches.hear(events.Output(pool="mine", node=node, slot=0, call=1, stream=1, text=text))
        watches.close(30)
        assert not given.told
        run = next(each for each in files.runs("mine") if each.name.endswith(f"-5e5{node}"))
        assert 0.6 * most < files.size(run) <= most
        assert "399 xxx" in max(files.segments(run).values()).read_text(), "the newest stays"
    assert len(told) == 1


def test_the_samples_of_a_stranger_are_thinned_out_at_once_and_those_of_others_stay(
    quota: Quota, told: list[str], little: None, tmp_path: Path
) -> None:
    file = tmp_path / "s.sqlite3"
    kept = Kept(file, quota)
    now = time.time()
    kept.write([NodeSample(node=0, time=now + n / 100) for n in range(100)])
    for turn in range(6):
        kept.write(
            [NodeSample(STRANGER, now + turn + n / 1000, devices=cards(64, unknown="u" * 200)) for n in range(15)]
        )
        assert file.stat().st_size < 2 << 20
    found = [each.time for each in history(file, STRANGER)]
    assert max(found) == pytest.approx(now + 5.014, abs=0.01)
    assert min(found) < now + 3, "the whole time stays, with fewer samples"
    assert len(list(history(file, 0))) == 100
    assert [each.partition(": ")[2] for each in told] == [
        "its measurements are thinned out, so that they take at most 12 MiB"
    ]


def test_samples_of_drivers_errors_without_end_are_bounded_too(quota: Quota, little: None, tmp_path: Path) -> None:
    file = tmp_path / "s.sqlite3"
    kept = Kept(file, quota)
    now = time.time()
    for turn in range(4):
        kept.write([NodeSample(STRANGER, now + turn + n / 1000, devices=cards(64, xids=(79,))) for n in range(20)])
    assert file.stat().st_size < 2 << 20
    with sqlite3.connect(file) as book:
        assert quota.used(STRANGER, Share("samples", 0, "")) == sizes(book)[STRANGER]


def test_a_sample_that_is_too_large_is_left_out_and_one_that_cannot_wait_is_only_the_newest(
    quota: Quota, told: list[str], tmp_path: Path
) -> None:
    kept = NewSamples(quota)
    assert kept.add([NodeSample(STRANGER, 1.0, devices=cards(64, unknown="\U0001f600" * 256))]) == []
    assert kept.newest == {}
    for n in range(800):
        assert kept.add([NodeSample(STRANGER, time.time() + n / 1000, devices=cards(64, unknown="u" * 200))])
    assert 6 << 20 < sum(row.size for row in kept._waiting) < 9 << 20
    assert len(told) == 2
    assert kept.newest[STRANGER].devices


def test_what_the_file_had_of_a_node_counts_after_the_pool_was_taken_over(
    quota: Quota, little: None, tmp_path: Path
) -> None:
    file = tmp_path / "s.sqlite3"
    first = Kept(file)
    first.write([NodeSample(STRANGER, time.time() + n / 1000, devices=cards(64, unknown="u" * 200)) for n in range(50)])
    size = file.stat().st_size
    second = Kept(file, quota)
    second.write([NodeSample(STRANGER, time.time() + 100 + n / 1000, devices=cards(64)) for n in range(50)])
    assert file.stat().st_size < size


def test_the_file_of_samples_is_thinned_where_most_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_MOST_BYTES", 1 << 19)
    kept = Kept(tmp_path / "s.sqlite3")
    now = time.time()
    kept.write([NodeSample(0, now + n / 100) for n in range(500)])
    for turn in range(10):
        kept.write([NodeSample(1, now + turn + n / 1000, devices=cards(8, uuid="u" * 40)) for n in range(100)])
        assert (tmp_path / "s.sqlite3").stat().st_size < 1 << 20, "at once, not after some minutes"
    assert len(list(history(tmp_path / "s.sqlite3", 0))) == 500


def test_the_events_of_a_stranger_are_bounded_by_their_size(quota: Quota, little: None, tmp_path: Path) -> None:
    file = tmp_path / "s.sqlite3"
    made = Journal(lambda: file, quota)
    made.write([JournalEvent(0.0, "NodePhase", STRANGER, {"phase": "ready"}), JournalEvent(0.0, "Notice", 0, {})])
    for turn in range(20):
        made.write([JournalEvent(turn + n / 1000, "HealthChanged", STRANGER, {"r": "x" * 900}) for n in range(100)])
    assert file.stat().st_size < 2 << 20
    found = read(file).events
    assert [each.kind for each in found if each.time == 0.0] == ["NodePhase", "Notice"]
    assert found[-1].time == pytest.approx(19.099)


# --- measurements --------------------------------------------------------------------------------------------


def test_a_node_has_so_many_devices_causes_and_codes_and_no_more_however_they_change() -> None:
    watch = HealthWatch("p", Quota(lambda node: True), lambda node: True, lambda event: None, lambda *_: None)
    series = set()
    for n in range(300):
        devices = tuple(
            DeviceSample("cuda", n * 8 + i, f"{n}-{i}", throttled=(f"cause {n}",), xids=(n * 8 + i,), xids_watched=True)
            for i in range(8)
        )
        watch.arrived(0, [NodeSample(time=time.time() + n, devices=devices)])
        sample = watch.samples.newest[0]
        found = [
            *device_measurements(sample, watch.of(0), {}, {}),
            *xid_measurements(sample, watch.xids.get(0, {}), {}, {}),
        ]
        series |= {json.dumps([each.metric.name, dict(each.attributes)]) for each in found}
    assert len(series) < 3000
    assert len({each for each in series if "throttled" in each}) <= 128


def test_a_usual_node_keeps_all_its_devices() -> None:
    watch = HealthWatch("p", Quota(lambda node: True), lambda node: True, lambda event: None, lambda *_: None)
    for n in range(3):
        watch.arrived(0, [NodeSample(time=time.time() + n, devices=cards(16, throttled=("power cap",)))])
    assert len(watch.samples.newest[0].devices) == 16
    assert len(watch.known[0].devices) == 16


def test_a_status_report_keeps_as_many_names_as_an_agent_sends() -> None:
    names = [f"a\nb{'x' * 4000}"] * 64
    header = {"busy": 0, "cpu_busy": 0, "waiting": 0, "done": 0, "running": names}
    said: Any = message_of(Frame(Kind.PONG, header, memoryview(b""), memoryview(b"")))
    assert len(said.running) == 8
    assert all(len(each) <= 200 and "\n" not in each for each in said.running)


# --- output --------------------------------------------------------------------------------------------------


def test_output_of_slots_without_end_is_refused() -> None:
    reports = NodeReports("p", lambda event: None, lambda node, seq: None, lambda node: True)
    with pytest.raises(ProtocolError, match="more than 2048 slots"):
        for n in range(5000):
            reports.printed(0, Printed(1, n, 1, n + 1), [b"\xf0\x9f"])


def test_small_pieces_of_output_become_one_event_and_come_once_after_a_reconnection() -> None:
    heard: list[events.Event] = []
    reports = NodeReports("p", heard.append, lambda node, seq: None, lambda node: True)
    came: list[Arrival] = []
    broken: list[str] = []

    def wrong(*why: object) -> None:
        broken.append(str(why))

    inbox = Inbox(RunningClock(), lambda: (), lambda some, _: came.extend(some), lambda: None, wrong, wrong)
    said = [(1, 1, b"a"), (1, 1, b"b"), (2, 1, b"c"), (2, 2, b"d"), (2, 2, b"e" * 5000), *[(2, 2, b"f")] * 200]
    sent = b"".join(
        b"".join(bytes(part) for part in frame(Kind.OUTPUT, {"id": id_, "slot": 0, "fd": fd, "seq": n + 1}, [data]))
        for n, (id_, fd, data) in enumerate(said)
    )
    incoming: Any = SimpleNamespace(pieces=Pieces(), stream=None, number=1)
    for part in (sent[:150], sent):  # the second connection brings all again
        inbox._digest(incoming, scan(memoryview(part))[0])
    assert not broken
    assert len(came) < 15
    for each in came:
        assert isinstance(each.said, Printed)
        reports.printed(0, each.said, each.buffers)
    texts = [(each.call, each.stream, each.text) for each in heard if isinstance(each, events.Output)]
    assert texts[:3] == [(1, 1, "ab"), (2, 1, "c"), (2, 2, "d")]
    assert "".join(text for *_, text in texts) == f"abcd{'e' * 5000}{'f' * 200}"


def test_unfinished_lines_of_all_slots_of_a_node_are_bounded_together(capsys: pytest.CaptureFixture[str]) -> None:
    printer = Printer()
    try:
        for slot in range(100):
            text = "x" * (LONGEST // 10)
            printer.hear(events.Output(pool="p", node=0, slot=slot, call=1, stream=1, text=text))
            held = sum(each.lines.size for each in printer._sources.values())
            assert held <= 1.1 * LONGEST
    finally:
        printer.close()
    assert capsys.readouterr().out.count("x") == 100 * (LONGEST // 10)


@pytest.mark.parametrize("text", ["\r" * (1 << 20), "\r\n" * (1 << 19), "x\r" * (1 << 19), "\r" * (1 << 20) + "x\n"])
def test_a_text_of_carriage_returns_costs_as_much_as_any_other(text: str) -> None:
    lines, began = Lines(), time.process_time()
    lines.feed(text)
    lines.feed(text)
    lines.finish()
    assert time.process_time() - began < 5


def test_a_text_like_the_beginning_of_a_secret_costs_as_much_as_any_other() -> None:
    secret = "-----BEGIN OPENSSH PRIVATE KEY-----" + "x" * 4000
    masker, began = Masker({"KEY": secret, "OTHER": "-" * 30 + "y" * 4000}), time.process_time()
    for _ in range(250):
        masker.feed("s", "-" * 4096)
        masker.feed("s", secret[:30] * 130)
    assert time.process_time() - began < 5
    assert masker.feed("s", f" {secret[:100]}") + masker.feed("s", secret[100:]) != ""
    assert "x" not in masker.feed("t", secret[:2000]) + masker.feed("t", secret[2000:]) + masker.finish("t")


@pytest.mark.parametrize("piece", ["xy", "x\ry", "\rx"])
def test_a_line_in_a_million_pieces_costs_little(piece: str) -> None:
    lines, before, began = Lines(), memory(), time.process_time()
    for _ in range(100_000):
        lines.feed(piece)
    assert time.process_time() - began < 3
    assert memory() - before < 20 << 20


# --- other things that a node can ask or say -----------------------------------------------------------------


def test_names_of_modules_that_were_asked_for_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    lender = Lender()
    for n in range(2000):
        monkeypatch.setattr(time, "monotonic", lambda n=n: 10.0 * n)
        for _ in range(2):
            lender.find(f"nothing_{n}")
    assert len(lender._asked) < 10


@pytest.mark.parametrize("answer", [None, "ab", [1], [0, 1], [1, 65536], [1.0, 2.0], [True, 2], {}, [[], []]])
def test_an_answer_that_names_no_ports_is_refused(answer: Any) -> None:
    assert ports_of([1, 65535], 2) == [1, 65535]
    with pytest.raises(ProtocolError, match="2 free ports"):
        ports_of(answer, 2)


def test_a_command_that_complains_without_end_does_not_hold_up_who_asks() -> None:
    stream = CommandStream([sys.executable, "-c", "import os\nwhile True: os.write(2, b'x' * 65536)"])
    try:
        began = time.monotonic()
        for _ in range(20):
            assert len(stream.complaint()) <= 2000
        assert time.monotonic() - began < 30
    finally:
        stream.shut()
        stream.close(0.0)


@pytest.mark.parametrize("fd", [1, 2])
def test_an_answer_of_a_host_without_end_is_cut_off(fd: int) -> None:
    began, before = time.monotonic(), memory()
    program = f"import os\nwhile True: os.write({fd}, b'x' * 65536)"
    status, out, said = Errand([sys.executable, "-c", program], b"").result(time.monotonic() + 60)
    assert status == -signal.SIGKILL
    assert len(out) < 5 << 20
    assert len(said) <= 4096
    assert time.monotonic() - began < 50
    assert memory() - before < 50 << 20


def test_an_answer_of_a_host_is_whole_although_another_process_keeps_its_stderr_open() -> None:
    errand = Errand(["sh", "-c", "cat; echo done; echo why >&2; sleep 60 >/dev/null <&- & exit 3"], b"given\n")
    began = time.monotonic()
    assert errand.result(time.monotonic() + 60) == (3, "given\ndone\n", "why")
    assert time.monotonic() - began < 30
    os.killpg(errand._process.pid, signal.SIGKILL)


def test_an_answer_that_does_not_come_in_time_is_an_error() -> None:
    for command in ("sleep 60", "exec >&-; sleep 60"):
        with pytest.raises(TimeoutError, match="did not end in time"):
            Errand(["sh", "-c", command], b"").result(time.monotonic() + 1)


# --- the setup of a machine ----------------------------------------------------------------------------------

FLOODS = {
    "empty lines": r"b'\n' * 60000",
    "a line without end": "b'x' * 60000",
    "advice": r"b'@advice ' + b'x' * 60000 + b'\n'",
    "steps": r"b'@step 1 2 ' + b'x' * 6000 + b'\n'",
    "signs of life": r"b'@alive\n' * 8000",
    "lines of output": r"b'| ' + b'x' * 50 + b'\n| y\n'",
}


def set_up_by(program: str) -> tuple[list[events.Event], BaseException | None]:
    """What is told of the setup of a machine that is only a program, and the error with which it ended."""
    told: list[events.Event] = []

    async def work() -> None:
        stream = CommandStream([sys.executable, "-c", program])
        stream.socket.setblocking(False)
        await bootstrap(stream, SetupBundle("true"), "p", 7, 30.0, told.append)

    try:
        asyncio.run(work())
    except Exception as e:  # noqa: BLE001 - whatever it is, the test looks at it
        return told, e
    return told, None


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
def test_a_setup_that_prints_without_end_costs_little(flood: str) -> None:
    before, began = memory(), time.process_time()
    size = 10 << 20
    _, error = set_up_by(f"import os\ndata = {flood}\nfor _ in range({size} // len(data)): os.write(1, data)")
    assert error is not None
    assert time.process_time() - began < 4
    assert memory() - before < 50 << 20
    assert len(str(error)) < 200_000


@pytest.mark.parametrize("line", ["@step x", "@step 1", "@step 1 99999999 x", "@retry", "@fail a b c", "@fail a"])
def test_a_setup_that_prints_what_it_never_does_is_refused(line: str) -> None:
    _, error = set_up_by(f"import os; os.write(1, {line!r}.encode() + bytes([10])); os.read(0, 1 << 20)")
    assert isinstance(error, (ProtocolError, BootstrapError))
    assert "node 7" in str(error)


def test_the_lines_of_a_setup_come_in_order_one_by_one_or_together() -> None:
    lines = [f"| line {n}" for n in range(500)] + ["@step 1 1 run", "| one", "@done run"] + ["| more"] * 3
    told, _ = set_up_by(f"import os; os.write(1, {chr(10).join(lines)!r}.encode() + bytes([10]))")
    texts = [each.text for each in told if isinstance(each, events.BootstrapOutput)]
    assert "\n".join(texts).splitlines() == [*(f"line {n}" for n in range(500)), "one", *["more"] * 3]
    assert len(texts) < 100
    assert [each.state for each in told if isinstance(each, events.BootstrapStep)] == ["started", "done"]
