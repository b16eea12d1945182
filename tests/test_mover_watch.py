"""`MoverWatch`, as an agent uses it: movers are real processes, and a folder takes the place of a bucket."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from skypool.agent import keeper
from skypool.agent.mover_watch import MoverWatch
from skypool.agent.shared_page import SharedPage
from skypool.wire.save_orders import SOCKET, Order

ROOT = str(Path(__file__).parents[1])


@dataclass
class Watched:
    """A watch of a mover, and what it tells. `now` is the time of its clock, which only the test turns.

    Attributes:
        told: the last account of each folder, by its id.
    """

    place: Path
    now: float = 0.0
    page: SharedPage = field(default_factory=lambda: SharedPage(1))
    told: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    read: dict[int, Callable[[], None]] = field(default_factory=dict[int, Callable[[], None]])
    watch: MoverWatch = field(init=False)

    def __post_init__(self) -> None:
        self.watch = MoverWatch(self._watch, self._tell, self.page)

    def _tell(self, folders: list[dict[str, Any]]) -> None:
        self.told |= {each["id"]: each for each in folders}

    def _watch(self, number: int, events: int, call: Callable[[], None]) -> None:
        self.read.pop(number, None)
        if events:
            self.read[number] = call

    def order(self, said: Mapping[str, Any], stop_calls: Callable[[float], bool] = lambda grace: False) -> None:
        self.watch.order(said, stop_calls)

    def save(self, folder: str = "out") -> None:
        made = Order(folder, str(self.place / folder), f"file://{self.place}/bucket", journal="j", parts=ROOT)
        self.order(made.to_json())

    def fill(self, folder: str = "data") -> None:
        there = str(self.place / folder)
        self.order(Order(folder, there, f"file://{self.place}/{folder}-bucket", parts=ROOT, is_data=True).to_json())

    def until(self, condition: Callable[[], object], seconds: float = 60.0) -> None:
        """Act as the loop of an agent does, until a condition holds."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.told
            self.turn()

    def turn(self) -> None:
        self.watch.tick(self.now, is_idle=True)
        for number in select.select([*self.read], [], [], 0.05)[0]:
            if call := self.read.get(number):
                call()

    def flush(self) -> dict[str, Any]:
        """Save all files of the folder "out" at once, as a program of the node asks for it."""
        with socket.socket(socket.AF_UNIX) as asked:
            asked.connect(SOCKET)
            asked.sendall(json.dumps({"do": "flush", "id": "out", "seconds": 30}).encode() + b"\n")
            with asked.makefile() as answer:
                said: dict[str, Any] = json.loads(answer.readline())
        return said

    def kill(self) -> None:
        """Kill the mover, and read that it has ended."""
        first = self.watch.pid
        os.kill(first, signal.SIGKILL)
        self.until(lambda: self.watch.pid != first)


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [ROOT, *sys.path])
    for each in ("out", "bucket", "data-bucket"):
        (tmp_path / each).mkdir()
    made = Watched(tmp_path)
    yield made
    first = made.watch.pid
    made.watch.kill()
    if first:
        os.waitpid(first, 0)
    for number in [*made.read]:
        os.close(number)


def test_what_a_mover_has_counted_goes_on_with_the_next_one(watched: Watched) -> None:
    (watched.place / "bucket/old").write_text("brought back")
    (watched.place / "data-bucket/a").write_text("123")
    watched.save()
    watched.fill()
    watched.until(lambda: {each["phase"] for each in watched.told.values()} == {"saving", "there"})
    (watched.place / "out/new").write_text("12345")
    watched.flush()
    watched.until(lambda: watched.told["out"]["files"])
    former = watched.told
    watched.told = {}
    watched.kill()
    watched.until(lambda: watched.watch.pid and len(watched.told) == 2 and not watched.told["out"]["trouble"])
    for name in ("files", "bytes", "rate", "back"):
        assert watched.told["out"][name] == former["out"][name], name
    assert former["out"]["back"]["bytes"] == len("brought back")
    assert (watched.told["data"]["back"], watched.told["data"]["phase"]) == (former["data"]["back"], "there")
    (watched.place / "out/newer").write_text("123456")
    said = watched.flush()
    assert (said["files"], said["bytes"]) == (2, 11)


def test_a_mover_that_waits_for_its_start_begins_at_once_when_the_folder_ends(watched: Watched) -> None:
    (watched.place / "out/new").write_text("12345")
    watched.save()
    watched.until(lambda: watched.told["out"]["phase"] == "saving")
    for _ in range(7):  # the next one begins after 30 seconds
        watched.kill()
        assert watched.page.mover == watched.watch.pid != 0
    assert not (watched.place / "bucket/new").exists()
    watched.order({"do": "end", "id": "out", "seconds": 60.0, "calm": True, "stops": False})
    watched.until(lambda: (watched.place / "bucket/new").exists(), 20)


def test_what_calls_write_is_known_to_the_next_mover_if_the_first_is_killed_before_or_after_it_looks(
    watched: Watched,
) -> None:
    watched.save()
    watched.until(lambda: watched.told["out"]["phase"] == "saving")
    for name in ("known", "late"):
        (watched.place / "out" / name).write_text("whole")
    watched.flush()
    with ExitStack() as calls:
        known = calls.enter_context((watched.place / "out/known").open("w"))
        known.write("ha")
        known.flush()
        number = watched.watch.look()
        watched.until(lambda: watched.watch.has_looked(number))
        watched.kill()  # it was known to this one
        late = calls.enter_context((watched.place / "out/late").open("w"))
        late.write("ha")
        late.flush()
        os.kill(watched.watch.pid, signal.SIGSTOP)
        stopped: list[float] = []
        end = {"do": "end", "id": "out", "seconds": 60.0, "calm": True, "stops": True}

        def stop_calls(grace: float) -> bool:
            stopped.append(grace)
            return False

        watched.order(end, stop_calls)
        watched.kill()  # it never looks
        watched.until(lambda: stopped)
    watched.until(lambda: watched.told["out"]["phase"] == "ended")
    assert {each.name: each.read_text() for each in (watched.place / "bucket").iterdir() if each.is_file()} == {
        "known": "whole", "known.snapshot": "ha", "late": "whole", "late.snapshot": "ha"
    }  # fmt: skip


def test_what_a_call_was_writing_is_a_half_for_the_next_mover_until_it_is_written_after_the_end_of_the_call(
    watched: Watched,
) -> None:
    def kept() -> dict[str, str]:
        watched.flush()
        return {each.name: each.read_text() for each in (watched.place / "bucket").iterdir() if each.is_file()}

    watched.save()
    watched.until(lambda: watched.told["out"]["phase"] == "saving")
    model = watched.place / "out/model"
    model.write_text("whole")
    watched.flush()
    with model.open("w") as file:
        file.write("ha")
        file.flush()
        number = watched.watch.look([os.getpid()])
        watched.until(lambda: watched.watch.has_looked(number))
        watched.kill()
    watched.until(lambda: watched.told["out"]["phase"] == "saving" and not watched.told["out"]["trouble"])
    assert kept() == {"model": "whole", "model.snapshot": "ha"}
    watched.watch.over(number, time.time_ns())
    watched.kill()
    time.sleep(1.1)
    watched.now += 1.1
    watched.until(lambda: watched.told["out"]["phase"] == "saving" and not watched.told["out"]["trouble"])
    assert kept() == {"model": "whole", "model.snapshot": "ha"}
    model.write_text("whole, too")
    assert kept() == {"model": "whole, too"}


@pytest.mark.parametrize(("drain", "seconds"), [(120.0, 0.2), (0.0, 60.0)])
def test_a_keeper_does_not_wait_for_the_mover_beyond_the_end_of_its_node_or_if_no_folder_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drain: float, seconds: float
) -> None:
    monkeypatch.chdir(tmp_path)
    page = SharedPage(1)
    began = time.monotonic()
    page.mover, page.drain, page.end = os.getpid(), drain, began + seconds
    keeper._await_look(page)
    assert time.monotonic() - began < 2
