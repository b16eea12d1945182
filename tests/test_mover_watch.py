"""`MoverWatch`, as an agent uses it: movers are real processes, and a folder takes the place of a bucket."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from skypool.agent import keeper, mover_watch
from skypool.agent.mover_watch import MoverWatch
from skypool.agent.shared_page import SharedPage
from skypool.wire.save_orders import LEAST, SOCKET, Order

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
    write: dict[int, Callable[[], None]] = field(default_factory=dict[int, Callable[[], None]])
    watch: MoverWatch = field(init=False)

    def __post_init__(self) -> None:
        self.watch = MoverWatch(self._watch, self._tell, self.page)

    def _tell(self, folders: list[dict[str, Any]]) -> None:
        self.told |= {each["id"]: each for each in folders}

    def _watch(self, number: int, events: int, call: Callable[[], None]) -> None:
        self.read.pop(number, None)
        self.write.pop(number, None)
        if events:
            (self.read if events == select.EPOLLIN else self.write)[number] = call

    def order(self, said: Mapping[str, Any], stop_calls: Callable[[float], bool] = lambda grace: False) -> None:
        self.watch.order(said, stop_calls)

    def save(self, folder: str = "out") -> None:
        bucket = "bucket" if folder == "out" else f"{folder}-bucket"
        made = Order(folder, str(self.place / folder), f"file://{self.place}/{bucket}", journal=folder, parts=ROOT)
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
        readable, writable, _ = select.select([*self.read], [*self.write], [], 0.05)
        for number in [*readable, *writable]:
            if call := self.read.get(number, self.write.get(number)):
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
    for each in ("out", "bucket", "data-bucket", "more", "more-bucket"):
        (tmp_path / each).mkdir()
    made = Watched(tmp_path)
    yield made
    first = made.watch.pid
    made.watch.kill()
    if first:
        os.waitpid(first, 0)
    made.until(lambda: not made.read)  # it has read that the mover has ended, and closed its pipes


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
    for pause in 0, 0, 1, 2, 4, 8, 16:  # each is over when its mover is killed; the next one begins after 30 seconds
        watched.now += pause
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


def test_an_end_that_comes_while_a_mover_waits_stops_calls_only_when_it_knows_what_they_write(watched: Watched) -> None:
    watched.save()
    watched.until(lambda: watched.told["out"]["phase"] == "saving")
    (watched.place / "out/known").write_text("whole")
    watched.flush()
    for _ in range(3):  # the next one begins after a pause
        watched.kill()
    with (watched.place / "out/known").open("w") as known:
        known.write("ha")
        known.flush()
        stopped: list[str] = []

        def stop_calls(grace: float) -> bool:
            stopped.append(watched.told["out"]["phase"])
            time.sleep(2.0)  # a mover that knew of the end would have ended
            (watched.place / "out/last").write_text("written by a call that is told to stop")
            known.close()
            return False

        watched.order({"do": "end", "id": "out", "seconds": 60.0, "calm": True, "stops": True}, stop_calls)
        watched.until(lambda: stopped, 20)
    assert stopped == ["saving"]
    watched.until(lambda: watched.told["out"]["phase"] == "ended")
    assert (watched.place / "bucket/last").exists()
    assert (watched.place / "bucket/known").read_text() == "whole"
    assert (watched.place / "bucket/known.snapshot").read_text() == "ha"


def test_a_call_that_is_stopped_while_a_mover_waits_has_it_begin_and_look(watched: Watched) -> None:
    watched.save()
    watched.until(lambda: watched.told["out"]["phase"] == "saving")
    for _ in range(3):
        watched.kill()
    waiting = watched.watch.pid
    number = watched.watch.look([os.getpid()])
    assert watched.watch.pid not in (0, waiting)
    watched.until(lambda: watched.watch.has_looked(number), 20)
    assert number in watched.told["out"]["looked"]


def test_a_mover_that_ends_before_its_pause_is_over_is_started_again_only_after_that(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = watched.place / "broken/skypool"
    broken.mkdir(parents=True)
    starts = watched.place / "starts"
    starts.touch()
    (broken / "__init__.py").write_text(f"print('one', file=open({str(starts)!r}, 'a'), flush=True)\n1 / 0\n")
    monkeypatch.setattr(sys, "path", [str(broken.parent), *sys.path])
    watched.save()
    # the second one has no pause, and the third one would have begun its work after a second
    watched.until(lambda: len(starts.read_text().split()) >= 3 and not watched.watch.pid, 20)
    for _ in range(20):
        watched.turn()
        assert (watched.watch.pid, len(starts.read_text().split())) == (0, 3)
    watched.now += 2.0
    watched.until(lambda: len(starts.read_text().split()) == 4, 20)
    watched.until(lambda: not watched.watch.pid)
    watched.order({"do": "end", "id": "out", "seconds": 60.0, "calm": True, "stops": False})
    assert watched.watch.pid, "it has no time for a pause any more"


def test_orders_wait_outside_a_pipe_that_is_full(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover_watch, "_PIPE", 4096)
    watched.save()
    watched.until(lambda: watched.told["out"]["phase"] == "saving")
    os.kill(watched.watch.pid, signal.SIGSTOP)
    alarm = threading.Timer(20, os.kill, (watched.watch.pid, signal.SIGCONT))
    alarm.start()
    for number in range(1, 101):
        watched.order(Order("out", "", "").new_values(("secret" * 100,), number))
    assert alarm.is_alive(), "the agent has waited for the mover"
    alarm.cancel()
    os.kill(watched.watch.pid, signal.SIGCONT)
    watched.until(lambda: watched.told["out"]["credentials"] == 100, 20)


def test_a_mover_that_waits_with_a_full_pipe_gives_way_to_one_that_begins_when_the_agent_ends(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mover_watch, "_PIPE", 4096)
    watched.save()
    watched.until(lambda: watched.told["out"]["phase"] == "saving")
    for _ in range(3):
        watched.kill()
    for number in range(1, 21):
        watched.order(Order("out", "", "").new_values(("secret" * 100,), number))
    waiting = watched.watch.pid
    watched.watch.end()
    assert watched.page.mover == watched.watch.pid != waiting
    watched.until(lambda: watched.told["out"]["credentials"] == 20, 20)


def test_a_mover_that_has_just_died_is_replaced_when_the_agent_ends(watched: Watched) -> None:
    watched.save()
    watched.until(lambda: watched.told["out"]["phase"] == "saving")
    dead = watched.watch.pid
    os.kill(dead, signal.SIGKILL)
    os.waitid(os.P_PID, dead, os.WEXITED | os.WNOWAIT)
    watched.watch.end()
    assert watched.page.mover == watched.watch.pid != dead
    watched.until(lambda: watched.told["out"]["phase"] == "saving" and not watched.told["out"]["trouble"])


@pytest.mark.parametrize("fits", [False, True])
def test_a_node_needs_no_time_for_an_end_that_fits_into_its_life(fits: bool, watched: Watched) -> None:
    watched.save()
    watched.save("more")
    watched.until(lambda: {each.get("phase") for each in watched.told.values()} == {"saving"})
    for each in ("out", "more"):
        assert watched.watch.reserve(600.0) == LEAST
        watched.order({"do": "end", "id": each, "seconds": 60.0, "calm": True, "stops": False, "fits": fits})
    assert watched.watch.reserve(600.0) == (0.0 if fits else LEAST)


def test_a_look_does_not_wait_for_folders_that_have_ended(watched: Watched) -> None:
    watched.save()
    watched.save("more")
    watched.until(lambda: {each["phase"] for each in watched.told.values()} == {"saving"})
    watched.order({"do": "end", "id": "more", "seconds": 60.0, "calm": True, "stops": False})
    watched.until(lambda: watched.told["more"]["phase"] == "ended")
    watched.kill()
    number = watched.watch.look()
    watched.until(lambda: watched.watch.has_looked(number), 20)


def test_all_of_many_looks_at_the_same_time_are_told(watched: Watched) -> None:
    watched.save()
    watched.until(lambda: watched.told["out"]["phase"] == "saving")
    numbers = [watched.watch.look([os.getpid()]) for _ in range(200)]
    watched.until(lambda: all(map(watched.watch.has_looked, numbers)), 20)


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
