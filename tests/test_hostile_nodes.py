"""Nodes that mean harm, in both modes of trust: each is given up by itself, soon, and costs its client little.

The node is a process that speaks the protocol by hand. What it does once it was let in stands in each test.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import skypool as sky
from skypool import events
from skypool.accelerators import H100
from skypool.calls.gang_steps import StepAgreements
from skypool.errors import ConnectionLost, PoolClosed, ProtocolError, RemoteError, WorkerDied
from skypool.gangs.agreement import Answer, Offer
from skypool.link import link
from skypool.link.agent_messages import Steps, message_of
from skypool.provision.health_check import most_slots
from skypool.report import words
from skypool.shipping import user_modules
from skypool.shipping.user_modules import Lender
from skypool.text import plain_error, printable
from skypool.wire.frames import Frame, Kind
from tests.conftest import eventually, memory
from tests.false_node import false_node


@pytest.fixture(scope="module")
def honest() -> Iterator[sky.ComputePool]:
    """A pool of the same client, all the while."""
    with sky.ComputePool(slots=1, console="off") as pool:
        yield pool


@sky.compute
def asks(*_: Any) -> int:
    return 1


@sky.compute
def counts(items: Iterator[Any]) -> int:
    return sum(1 for _ in items)


MALFORMED = {
    "an outcome whose seconds are a text": 'outcome(call(), seconds="x"); wait()',
    "an outcome that took no number": 'outcome(call(), seconds=float("nan")); wait()',
    "an outcome without an end of its number": "outcome(call(), seconds=10**400); wait()",
    "an outcome whose ok is a number": "outcome(call(), ok=1); wait()",
    "an outcome without lengths": "outcome(call(), lens=None); wait()",
    "an outcome of more bytes than there are": "outcome(call(), lens=[10**9]); wait()",
    "an outcome whose id is a list": "outcome([call()]); wait()",
    "an exception that is none": "outcome(call(), ok=False); wait()",
    "a value that never came": """
        write(frame(7, {"id": call(), "ok": True, "seconds": 1, "lens": [99999], "blob": 99999}))
        wait()
    """,
    "a piece that is too short": 'write(frame(11, {"key": call(), "at": 0, "size": 1 << 20}, b"x")); wait()',
    "ends that took no number": 'write(frame(24, {}, struct.pack("!QI?d", call(), 0, True, float("nan")))); wait()',
    "half an end": 'call(); write(frame(24, {}, b"abc")); wait()',
    "an item of what is no generator": 'write(frame(8, {"id": call(), "seq": 1, "lens": [1]}, b"N")); wait()',
    "the wish for an argument that is not there": 'write(frame(9, {"id": call(), "arg": 7, "n": 1})); wait()',
    "calls that nobody asked back": 'write(frame(14, {"calls": [call()]})); wait()',
    "a header that is as deep as the sea": 'call(); raw(20, b"[" * 900000); wait()',
    "a header of empty lists": """
        call()
        raw(20, b'{"a":[' + b"[]," * 300000 + b"[]]}")
        wait()
    """,
    "signs of life without end": """
        call()
        f = frame(20, {"busy": 0, "cpu_busy": 0, "waiting": 0, "done": 0, "running": []}) * 100
        while True: write(f)
    """,
    "items of calls that are not there": """
        call()
        f = frame(8, {"id": 3, "seq": 1, "lens": [1]}, b"N") * 100
        while True: write(f)
    """,
    "a second WELCOME": "call(); write(frame(2, welcome)); wait()",
    "a frame that only a client sends": 'call(); write(frame(6, {"id": 1})); wait()',
    "output from a slot that is a text": """
        call()
        write(frame(16, {"id": 0, "slot": "x", "fd": 1, "seq": 1}, b"x"))
        wait()
    """,
    "output from slot numbers without end": """
        call()
        n = 0
        while True:
            n += 1
            write(frame(16, {"id": 0, "slot": n, "fd": 1, "seq": n}, b"x"))
    """,
    "steps that are texts": 'call(); write(frame(29, {"calls": [1], "round": "x"})); wait()',
    "modules that are not there": """
        call()
        n = 0
        while True:
            n += 1
            write(frame(18, {"name": f"nothing_{n}", "version": "", "file": ""}))
    """,
}


@pytest.mark.slow
@pytest.mark.parametrize("trust", ["full", "data"])
@pytest.mark.parametrize("after", MALFORMED.values(), ids=MALFORMED)
def test_a_node_that_speaks_nonsense_is_given_up_alone_and_its_call_ends(
    honest: sky.ComputePool, after: str, trust: Any, tmp_path: Path
) -> None:
    node, began, before = false_node(tmp_path, after), time.monotonic(), memory()
    with pytest.raises((ConnectionLost, PoolClosed, RemoteError, sky.errors.UntrustedResult)) as caught:
        with sky.ComputePool(node, slots=1, console="off", liveness=2, trust=trust) as pool:
            assert asks() >> pool == 1
            raise AssertionError("it was believed")
    assert time.monotonic() - began < 30
    assert "\x1b" not in str(caught.value)
    assert memory() - before < 64 << 20
    assert asks() >> honest == 1


@pytest.mark.slow
def test_a_node_that_ends_each_connection_at_once_is_not_reached_again_without_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "_AT_ONCE", 2)
    downs: list[float] = []
    with sky.ComputePool(false_node(tmp_path, "sys.exit()"), slots=1, console="off", liveness=30) as pool:
        pool.events.listen(lambda e: downs.append(time.monotonic()) if isinstance(e, events.LinkDown) else None)
        future = asks() > pool
        eventually(lambda: len(downs) >= 6)
        future.cancel()
        pool.stop()
    assert downs[-1] - downs[-3] > 1.5


GREETINGS = {
    "a greeting as deep as the sea": 'greeting = "[" * 60000',
    "a greeting that is a number": 'greeting = "5"',
    "a greeting with a version of texts": 'greeting = json.dumps({"python": ["\x1b]0;x\x07"], "have": 1, "gone": 0})',
    "calls that are a number": 'welcome["calls"] = 5',
    "no slots": 'del welcome["slots"]',
    "no slot": 'welcome["slots"] = 0',
    "slots without end": 'welcome["slots"] = 10**12',
    "slots that are a text": 'welcome["slots"] = "1"',
    "CPU slots without end": 'welcome["cpu_slots"] = 10**12',
    "devices that are a list": 'welcome["devices"] = [1]',
    "calls on CPU slots that are texts": 'welcome["cpu_calls"] = ["1"]',
    "names that are a list": 'welcome["names"] = [[1, "x"]]',
    "a name of nothing": 'welcome["names"] = {"x": [{}]}',
    "functions that are numbers": 'welcome["functions"] = [5]',
    "no health": 'del welcome["health"]',
    "a disk that is a text": 'welcome["health"]["disk_free"] = "much"',
    "a clock that is none": 'welcome["health"]["time"] = float("nan")',
    "a device that is none": 'welcome["health"]["devices"] = [{"kind": "cuda", "speed": 7}]',
}


@pytest.mark.parametrize("wrong", GREETINGS.values(), ids=GREETINGS)
def test_a_node_that_greets_with_nonsense_does_not_start(honest: sky.ComputePool, wrong: str, tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(sky.SkypoolError) as caught:
        sky.ComputePool(false_node(tmp_path, "wait()", wrong), slots=1, console="off", liveness=2).start()
    assert time.monotonic() - began < 30
    assert "\x1b" not in str(caught.value)
    assert asks() >> honest == 1


@pytest.mark.parametrize("wrong", GREETINGS.values(), ids=GREETINGS)
def test_a_node_that_greets_with_nonsense_when_it_is_reached_again_is_given_up(wrong: str, tmp_path: Path) -> None:
    node = false_node(tmp_path, "call(); sys.exit() if not again else wait()", f"if again: {wrong}")
    began = time.monotonic()
    with pytest.raises((ConnectionLost, PoolClosed)):
        with sky.ComputePool(node, slots=1, console="off", liveness=3) as pool:
            asks() >> pool
    assert time.monotonic() - began < 30


def test_a_node_that_asks_for_a_module_without_reading_it_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_large_module.py").write_text("x = 1\n" + "#" * (1 << 20))
    monkeypatch.syspath_prepend(str(tmp_path))
    asking = 'frame(18, {"name": "a_large_module", "version": "", "file": ""})'
    node = false_node(tmp_path, f"call(); f = {asking} * 100\nwhile True: write(f)")
    before = memory()
    with pytest.raises((ConnectionLost, PoolClosed), match="bytes of answers unread"):
        with sky.ComputePool(node, slots=1, console="off", liveness=30) as pool:
            asks() >> pool
    assert memory() - before < 80 << 20


def test_a_node_that_asks_for_the_same_module_all_the_time_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "asked_often.py").write_text("x = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    lender = Lender()
    for _ in range(1000):
        assert lender.find("asked_often")[1].endswith(b"\nx = 1")
    (tmp_path / "asked_often.py").write_text("x = 22")
    assert lender.find("asked_often")[1].endswith(b"\nx = 1")  # all nodes get the same
    assert lender.find("a" * 100_000)[0]["found"] is False
    with pytest.raises(ProtocolError, match="asked_often' more than 2000 times"):
        for _ in range(3000):
            lender.find("asked_often")


def test_a_node_that_has_the_version_of_a_module_gets_no_files_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "had.py").write_text("x = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    lender = Lender()
    version = lender.find("had")[0]["hash"]
    header, body = lender.find("had", has=("another", version))
    assert (header["found"], header["hash"], body) == (True, version, b"")
    assert lender.find("had", has=("another",))[1] != b""


def test_a_node_that_asks_again_for_what_it_has_got_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or else it would cost its client any amount of network traffic."""
    for name in ("got", "got_too"):
        (tmp_path / f"{name}.py").write_text(f"x = 1  #{'.' * (3 << 20)}")
    monkeypatch.syspath_prepend(str(tmp_path))
    lender = Lender()
    for _ in range(15):  # connections may break, and 45 MB are not too much
        for name in ("got", "got_too"):
            assert len(lender.find(name)[1]) > 3 << 20
    with pytest.raises(ProtocolError, match="more than 128 MiB in a short time, at last for 'got "):
        for _ in range(60):
            lender.find("got")


def test_files_that_a_node_lacks_come_together_up_to_a_size_and_are_counted_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "in_parts"
    package.mkdir()
    for name in ("__init__", "a", "b", "c", "d"):
        (package / f"{name}.py").write_text(f"# {name}{'.' * (1 << 20)}")
    monkeypatch.syspath_prepend(str(tmp_path))
    lender = Lender()
    header, _ = lender.find("in_parts")
    assert header["inline"] == 3
    version, listed = header["hash"], [f"in_parts/{name}.py" for name in ("__init__", "a", "b", "c", "d")]
    header, body = lender.file("in_parts", version, listed[3])
    assert header == {"name": "in_parts", "hash": version, "file": listed[3], "files": listed[3:]}
    assert body == b"".join((tmp_path / each).read_bytes() for each in listed[3:])
    assert lender.file("in_parts", version, listed[0])[0]["files"] == listed[:3]
    with pytest.raises(ProtocolError, match="more than 128 MiB in a short time"):
        for n in range(200):  # a first file that is another one each time is no way around the limit
            lender.file("in_parts", version, listed[n % 5])


def test_a_node_that_asks_for_a_large_package_all_the_time_costs_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "a_large_package"
    package.mkdir()
    (package / "__init__.py").touch()
    for n in range(4):
        with (package / f"{n}.bin").open("wb") as file:
            file.truncate(9 << 20)
    monkeypatch.syspath_prepend(str(tmp_path))
    lender = Lender()
    lender.find("a_large_package")
    began = time.process_time()
    for _ in range(1000):
        assert lender.find("a_large_package")[0]["found"]
    assert time.process_time() - began < 2


def test_of_a_folder_that_may_be_no_package_no_more_is_read_than_of_the_files_of_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(20):
        for kind in ("so", "py"):
            (tmp_path / "environment" / str(n)).mkdir(parents=True, exist_ok=True)
            with (tmp_path / "environment" / str(n) / f"m.{kind}").open("wb") as file:
                file.truncate(4 << 20)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = memory()
    header, body = Lender().find("environment")
    assert header["found"]
    assert sum(size for _, _, size in json.loads(body.partition(b"\n")[0])) <= 50 << 20
    assert memory() - before < 80 << 20


def test_of_a_folder_with_very_many_files_only_a_part_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_modules, "_MOST_ENTRIES", 100)
    for n in range(3):
        (tmp_path / "pictures" / str(n)).mkdir(parents=True)
        (tmp_path / "pictures" / str(n) / "m.py").touch()
        for each in range(40):
            (tmp_path / "pictures" / str(n) / f"{each}.jpg").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    _, body = Lender().find("pictures")
    assert [path for path, _, _ in json.loads(body.partition(b"\n")[0])] != []
    assert len(json.loads(body.partition(b"\n")[0])) == 2


def test_nodes_get_no_more_packages_when_they_have_asked_for_many_that_are_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_modules, "_MOST_TAKEN", 100)
    for name in ("taken_one", "taken_two", "taken_three"):
        (tmp_path / f"{name}.py").write_text("#" * 60)
    monkeypatch.syspath_prepend(str(tmp_path))
    taken: dict[str, user_modules.Unit] = {}
    first, second = Lender(taken), Lender(taken)
    found = [lender.find(name)[0] for lender in (first, second) for name in ("taken_one", "taken_two", "taken_three")]
    assert [each["found"] for each in found] == [True, True, False] * 2
    assert found[2]["why"] == found[5]["why"] == first.find("taken_three")[0]["why"] == "much"


@pytest.mark.slow
def test_a_node_that_wants_the_same_item_all_the_time_gets_it_once(tmp_path: Path) -> None:
    flood = 'id = call(); f = frame(9, {"id": id, "arg": 0, "n": 1}) * 100\nend = time.time() + 3\n'
    flood += "while time.time() < end: write(f)\noutcome(id); wait()"
    before = memory()
    with sky.ComputePool(false_node(tmp_path, flood), slots=1, console="off", liveness=30) as pool:
        assert counts(iter([b"x" * (1 << 20)])) >> pool == 1
        assert memory() - before < 64 << 20


def test_an_item_out_of_turn_is_refused(tmp_path: Path) -> None:
    node = false_node(tmp_path, 'write(frame(9, {"id": call(), "arg": 0, "n": 5})); wait()')
    with pytest.raises((ConnectionLost, PoolClosed), match="asks for item 5"):
        with sky.ComputePool(node, slots=1, console="off", liveness=3) as pool:
            counts(iter([1, 2])) >> pool


IDLE = """
    while True:
        hear(19)
        write(frame(20, {"busy": 1, "cpu_busy": 0, "waiting": 0, "done": 0, "running": []}))
"""


@pytest.mark.slow
def test_a_node_that_claims_more_slots_than_were_asked_for_gets_no_calls_for_them(tmp_path: Path) -> None:
    node = false_node(tmp_path, IDLE, "welcome['slots'] = 16000; welcome['cpu_slots'] = 16000", honest=[1])
    with sky.ComputePool(node, nodes=2, slots=1, console="off", trust="data") as pool:
        futures = [asks(n) > pool for n in range(4)]
        eventually(lambda: sum(future.done() for future in futures) == 3, 60, "all calls but one")
        for future in futures:
            future.cancel()
        pool.stop()


@pytest.mark.parametrize(
    ("asked", "bought", "vcpus", "devices", "most"),
    [
        (3, None, 8, 0, (3, 0)),
        (0, None, 8, 0, (1, 0)),
        (None, None, 7.5, 0, (15, 0)),
        (None, None, None, 0, (1024, 0)),
        ("per-device", None, 8, 0, (16, 0)),
        (None, H100(count=2), 8, 2, (1, 16)),
        ("per-device", H100(count=2), 8, 2, (2, 16)),
        ("per-device", H100(count=2), 8, 14, (14, 16)),
        ("per-device", H100(count=2), 8, 1000, (16, 16)),
        (4, H100(count=2), 8, 2, (4, 16)),
        ((1, 2, 3), None, 8, 0, (3, 0)),
    ],
)
def test_the_most_slots_of_a_node(asked: Any, bought: Any, vcpus: Any, devices: int, most: tuple[int, int]) -> None:
    assert most_slots(asked, bought, vcpus, devices) == most


LOUD = """
    call()
    text = chr(0x1f600) * 1000
    device = {"kind": "cuda", "uuid": text, "unknown": text, "throttled": [text] * 8, "xids": [31] * 64}
    devices = [{**device, "index": i} for i in range(2)]
    names = [text] * 48
    n = 0
    while True:
        n += 1
        sample = {"time": time.time() + n, "devices": devices[: 1 + n % 2]}
        write(frame(20, {"busy": 1, "cpu_busy": 0, "waiting": 0, "done": n, "running": names, "samples": [sample]}))
        write(frame(16, {"id": 0, "slot": 0, "fd": 1, "seq": n}, b"[1] mine\\n" * 40))
        if n > 10: hear(19)
"""


def test_a_node_that_says_as_much_as_it_can_hides_no_other_node(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from skypool import cli  # nodes that import this module lack these
    from skypool.logs import files, reader
    from skypool.logs.reader import Assembler
    from skypool.observers import client

    @sky.compute
    def says(text: str) -> int:
        print(text)
        return len(text)

    node = false_node(tmp_path, LOUD, honest=[1])
    with sky.ComputePool(node, nodes=2, slots=1, console="off", trust="data", name="loud") as pool:
        loud = asks(1) > pool[0]
        assert says("quiet") >> pool[1] == 5
        eventually(lambda: 0 in pool.samples.latest() and 1 in pool.samples.latest(), 60, "samples of both")
        told = client.info("loud")
        assert [each["node"] for each in told["nodes"]] == [0, 1]
        assert len(json.dumps(told)) < 1 << 20
        shown = CliRunner().invoke(cli.build(), ["top", "loud", "--once"]).stdout
        assert "node 1" in shown
        found = pool.stack()
        assert found.nodes[1]
        assert isinstance(found.errors[0], ConnectionLost)
        assert says("again") >> pool[1] == 5
        pool.stop()  # it would wait for the call on node 0, which never ends
        assert loud.exception(10)
    assert "node 1" in pool.report().html
    assert {each.node for each in pool.samples.history()} == {0, 1}
    kept = reader.lines(reader.records(files.runs("loud")[-1]), Assembler(1))
    assert [each.text for each in kept if each is not None and each.place == "1"] == ["quiet", "again"]


# --- what it shows -------------------------------------------------------------------------------------------

EVIL = "\x1b]52;c;ZXZpbA==\x07\x1b]0;title\x07\x1b[2J\x1b[?1049h\x9b2J\x1bP1$r\x1b\\\x0e"
RED = "\x1b[1;31mred\x1b[0m"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        *(
            (f"{EVIL}go{RED}{EVIL}on", f"go{RED}on"),
            ("\x1b[3\x1b[31mx", "[3\x1b[31mx"),
            ("\x1b\x1b[0m[2J", "\x1b[0m[2J"),
        ),
        *(
            ("50%\r60%\b\b\b70%\t.\n", "50%\r60%\b\b\b70%\t.\n"),
            ("\u05d0\u200f", "\u05d0\u200f"),
            ("\x1b[38;5;1m", "\x1b[38;5;1m"),
        ),
        *(("\x1b[31", "[31"), ("\x1b[>4;2m", ""), ("\x1b[31 m", "")),
    ],
)
def test_colours_are_all_that_is_left_of_escape_sequences(text: str, left: str) -> None:
    assert printable(text, colours=True) == left


@sky.compute
def prints(text: str) -> None:
    os.write(1, text.encode())
    raise ValueError(f"{text} failed", [1])


@pytest.mark.parametrize(("trust", "left"), [("full", RED), ("data", "red")])
def test_what_is_printed_and_raised_shows_no_escape_sequences_but_colours(trust: Any, left: str) -> None:
    heard: list[events.Event] = []
    with sky.ComputePool(slots=1, console="off", trust=trust) as pool:
        pool.events.listen(heard.append)
        with pytest.raises(ValueError, match="failed") as caught:
            prints(f"{EVIL}go{RED}{EVIL}") >> pool
        eventually(lambda: [e for e in heard if isinstance(e, events.Output)])
        eventually(lambda: [e for e in heard if isinstance(e, events.CallFailed)])
    error = caught.value
    (printed,) = [e for e in heard if isinstance(e, events.Output)]
    (failed,) = [e for e in heard if isinstance(e, events.CallFailed)]
    assert printed.text == f"go{left}"
    assert error.args == (f"go{left} failed", [1])
    assert failed.error == f"ValueError: ('go{left} failed', [1])".replace("\x1b", "\\x1b")
    for text in (str(error.__cause__), *map(str, error.args), failed.error, printed.text):
        assert printable(text, colours=True) == text


def test_a_colour_in_two_pieces_stays_whole(tmp_path: Path) -> None:
    printing = """
        call()
        write(frame(16, {"id": 0, "slot": 0, "fd": 1, "seq": 1}, b"a\\x1b[3"))
        write(frame(16, {"id": 1, "slot": 0, "fd": 1, "seq": 2}, b"1mb\\x1b]52;c;"))
        write(frame(16, {"id": 2, "slot": 0, "fd": 1, "seq": 3}, b"AA\\x07"))
        wait()
    """
    heard: list[str] = []
    with sky.ComputePool(false_node(tmp_path, printing), slots=1, console="off", liveness=5) as pool:
        pool.events.listen(lambda e: heard.append(e.text) if isinstance(e, events.Output) else None)
        future = asks() > pool
        eventually(lambda: "".join(heard) == "a\x1b[31mbAA")
        future.cancel()


def test_an_error_of_a_trusted_node_is_the_same_object_with_its_texts_cleaned() -> None:
    died = WorkerDied("f", signal=9, tail=f"{EVIL}tail", node=1)
    error = ExceptionGroup("g", [died, KeyError(b"\x1b", "\x00kept")])
    error.__cause__ = RemoteError("a.B", EVIL)
    error.add_note(f"{EVIL}note")
    assert plain_error(error) is error
    assert "\x1b" not in str(died)
    assert died.tail == "tail"
    assert error.exceptions[1].args == (b"\x1b", "\x00kept")
    assert "\x1b" not in str(error.__cause__)
    assert error.__notes__ == ["note"]


def test_fields_of_the_handshake_that_are_shown_hold_no_escape_sequences() -> None:
    health = {
        "devices": [{"kind": "cuda", "index": 0, "name": f"{EVIL}H100"}],
        "driver": EVIL,
        "disk_free": 1,
        "time": 1,
    }
    header: dict[str, Any] = {
        "slots": 1,
        "cpu_slots": 0,
        "devices": 0,
        "cpu_calls": [],
        "calls": [7],
        "names": {f"{EVIL}train": [7]},
        "streams": [],
    }
    header |= {"functions": [], "objects": [], "health": health}
    said: Any = message_of(Frame(Kind.WELCOME, header, memoryview(b""), memoryview(b"")))
    assert said.names == {7: "train"}
    assert said.health.devices[0].name == "H100"
    assert said.health.driver == ""
    with pytest.raises(ProtocolError, match="'silent'"):
        message_of(Frame(Kind.TAKEN, {"silent": EVIL}, memoryview(b""), memoryview(b"")))


@pytest.mark.parametrize("at", [2.5e11, 9e11, float("inf"), float("nan"), -1])
def test_a_notice_of_a_time_that_has_no_date_is_refused(at: float) -> None:
    """The report could not write it."""
    status = {"busy": 0, "cpu_busy": 0, "waiting": 0, "done": 0, "running": [], "interruption": at}
    with pytest.raises(ProtocolError, match="'interruption'"):
        message_of(Frame(Kind.PONG, status, memoryview(b""), memoryview(b"")))


def test_the_latest_notice_has_a_date() -> None:
    status = {"busy": 0, "cpu_busy": 0, "waiting": 0, "done": 0, "running": [], "interruption": 249_999_999_999}
    said: Any = message_of(Frame(Kind.PONG, status, memoryview(b""), memoryview(b"")))
    assert words.moment(said.interruption).startswith("9892-")


def steps(calls: tuple[int, ...], highest: int = 7, decided: int = -1) -> Steps:
    return Steps(calls, Answer(1, highest, 1.0, ok=True, decided=decided), 4e9, "provider")


def test_what_a_node_says_of_ranks_of_others_is_not_heard_and_costs_little() -> None:
    gang = SimpleNamespace(pending=[])
    for id_ in range(2000):
        code = SimpleNamespace(name="train")
        gang.pending.append(SimpleNamespace(id=id_, at=id_ % 2, ended=False, code=code))
    ranks: Any = {each.id: (gang, each.id) for each in gang.pending}
    told: list[str] = []
    made = StepAgreements(threading.RLock(), ranks, dict, lambda *_: None, told.append)
    began = time.monotonic()
    made.heard(5, steps((*range(2000), *range(10**6, 10**6 + 100_000))))
    made.heard(0, steps((10**7,)))
    assert not made._open, "these are not its ranks"
    assert time.monotonic() - began < 1
    made.heard(0, steps((0, 2)))
    assert len(made._open) == 1
    made.heard(1, steps((1, 3), decided=9))
    state = made._open[0].state
    assert (state.offer, state.confirmed) == (None, frozenset()), "only the client decides"
    assert not told


@pytest.mark.parametrize(
    "wrong", [{"calls": "x"}, {"round": "1"}, {"highest": -2}, {"decided": 1 << 63}, {"rate": float("nan")}, {"ok": 2}]
)
def test_steps_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    header: dict[str, Any] = {"calls": [1], "round": 1, "highest": 7, "rate": 1.0, "ok": True, "decided": -1}
    header |= {"at": 4e9, "reason": "provider"}
    assert message_of(Frame(Kind.STEPS, header, memoryview(b""), memoryview(b"")))
    with pytest.raises(ProtocolError, match=next(iter(wrong))):
        message_of(Frame(Kind.STEPS, header | wrong, memoryview(b""), memoryview(b"")))


def test_a_process_that_has_gone_past_the_decided_step_is_told_once() -> None:
    gang = SimpleNamespace(pending=[])
    for id_ in range(2):
        gang.pending.append(SimpleNamespace(id=id_, at=id_, ended=False, code=SimpleNamespace(name="train")))
    ranks: Any = {each.id: (gang, each.id) for each in gang.pending}
    told: list[str] = []
    made = StepAgreements(threading.RLock(), ranks, dict, lambda *_: None, told.append)
    for round_ in (1, 2):
        for node in (0, 1):
            made.heard(node, Steps((node,), Answer(round_, 7, 1.0, ok=round_ == 2), 4e9, "provider"))
    assert made._open[0].state.offer == Offer(8, decided=True)
    made.heard(0, Steps((0,), Answer(2, 7, 1.0, ok=True, decided=8), 4e9, "provider"))
    for _ in range(2):
        made.heard(1, Steps((1,), Answer(2, 9, 1.0, ok=False, decided=8), 4e9, "provider"))
    assert told == [
        "a process of train on node 1 went past step 8 before it heard that all must save there; its part of that "
        "checkpoint is missing"
    ]
