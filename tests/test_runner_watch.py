"""The agent's watch over its runner: a real process, and a clock that the test moves."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skypool.agent.runner_watch import RunnerWatch
from skypool.head import messages
from skypool.head.states import (
    AgentEvent,
    Cancel,
    Go,
    Heard,
    Outcome,
    Party,
    Program,
    RunnerEnded,
    RunnerLate,
    RunnerSaid,
    RunnerSilent,
    RunOver,
    StandsBy,
    Welcome,
)

Watched = Callable[[str], RunnerWatch]
ALIVE = messages.line(messages.Alive(5))
MOVES = """n = 0
while True:
    n += 1
    says(b'{"is": "alive", "moves": %d}\\n' % n)
    time.sleep(0.01)
"""


class Loop:
    """The agent's loop, with the events that it has heard."""

    def __init__(self) -> None:
        self.now = 100.0
        self.heard: list[AgentEvent] = []
        self._poll = select.epoll()
        self._callbacks: dict[int, Callable[[], None]] = {}

    def watch(self, fd: int, events: int, callback: Callable[[], None]) -> None:
        if fd in self._callbacks:
            self._poll.unregister(fd)
            del self._callbacks[fd]
        if events:
            self._callbacks[fd] = callback
            self._poll.register(fd, events)

    def until(self, event: AgentEvent, watch: RunnerWatch) -> None:
        """Run until this event has come, and forget it and those before."""
        end = time.monotonic() + 30
        while event not in self.heard:
            assert time.monotonic() < end, self.heard
            self.turn(watch)
        del self.heard[: self.heard.index(event) + 1]

    def turn(self, watch: RunnerWatch) -> None:
        watch.tick(self.now)
        for fd, _ in self._poll.poll(0.02):
            if fd in self._callbacks:
                self._callbacks[fd]()

    @property
    def is_idle(self) -> bool:
        return not self._callbacks


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
def watched(loop: Loop) -> Iterator[Callable[[str], RunnerWatch]]:
    made: list[RunnerWatch] = []

    def watch(script: str) -> RunnerWatch:
        head = "import os, sys, time\nsays = lambda line: os.write(1, line)\n"
        made.append(RunnerWatch(loop.watch, loop.heard.append, lambda: loop.now, [sys.executable, "-c", head + script]))
        return made[-1]

    yield watch
    for each in made:
        while each.pid:
            os.kill(each.pid, signal.SIGKILL)
            loop.turn(each)


def test_it_gets_its_needs_and_then_what_it_is_told(loop: Loop, watched: Watched, tmp_path: Path) -> None:
    got = tmp_path / "got"
    wanted = messages.packed_needs(b"n" * (3 << 20)) + messages.line(Go("word")) + messages.line(Cancel())
    script = f"open({str(got)!r}, 'wb').write(sys.stdin.buffer.read({len(wanted)})); "
    watch = watched(f"{script}says({messages.line(StandsBy())!r})")
    watch.give(b"n" * (3 << 20))
    watch.start(1)
    watch.tell(1, Go("word"))
    watch.tell(2, Go("of another one"))
    watch.tell(1, Cancel())
    loop.until(RunnerSaid(1, StandsBy()), watch)
    assert got.read_bytes() == wanted
    loop.until(RunnerEnded(1), watch)
    assert watch.pid == 0
    assert loop.is_idle
    watch.tell(1, Cancel())  # it is gone


def test_what_it_has_said_last_is_heard_before_its_end(loop: Loop, watched: Watched) -> None:
    over = messages.line(RunOver(Outcome.ENDED))
    watch = watched(f"says({over!r}[:5]); says({over!r}[5:]); os.kill(os.getpid(), 9)")
    watch.start(1)
    time.sleep(0.5)  # it has ended before anything is read
    while len(loop.heard) < 2:
        loop.turn(watch)
    assert loop.heard == [RunnerSaid(1, RunOver(Outcome.ENDED)), RunnerEnded(1)]


def test_a_stopped_runner_is_silent_after_a_minute_of_the_agents_clock(loop: Loop, watched: Watched) -> None:
    watch = watched(f"while True: says({ALIVE!r}); time.sleep(0.01)")
    watch.start(1)
    loop.until(Heard(Party.RUNNER, 1, True), watch)
    os.kill(watch.pid, signal.SIGSTOP)
    for _ in range(10):  # what it has still said
        loop.turn(watch)
    loop.heard.clear()
    loop.now += 59
    watch.tick(loop.now)
    assert loop.heard == []
    loop.now += 2
    watch.tick(loop.now)
    watch.tick(loop.now)
    assert loop.heard == [RunnerSilent(1)]
    watch.kill(1)
    loop.until(RunnerEnded(1), watch)


def test_a_runner_is_late_that_lives_and_does_not_take_its_machine_in_a_minute(loop: Loop, watched: Watched) -> None:
    watch = watched(MOVES)
    watch.start(1)
    loop.until(Heard(Party.RUNNER, 1, True), watch)
    loop.now += 200  # before the commit it may wait
    loop.until(Heard(Party.RUNNER, 1, True), watch)
    assert RunnerLate(1) not in loop.heard
    watch.tell(1, Go("word"))
    loop.now += 59
    loop.until(Heard(Party.RUNNER, 1, True), watch)
    assert RunnerLate(1) not in loop.heard
    loop.now += 2
    loop.until(RunnerLate(1), watch)
    loop.until(Heard(Party.RUNNER, 1, True), watch)
    assert RunnerLate(1) not in loop.heard, "it is told once"


def test_a_runner_that_is_welcome_is_not_late(loop: Loop, watched: Watched) -> None:
    watch = watched(MOVES)
    watch.start(1)
    loop.until(Heard(Party.RUNNER, 1, True), watch)
    watch.tell(1, Go("word"))
    watch.tell(1, Welcome(0, Program.NONE, is_cancelled=False))
    loop.now += 61
    loop.until(Heard(Party.RUNNER, 1, True), watch)
    assert RunnerLate(1) not in loop.heard


def test_a_runner_whose_loop_stands_still_for_a_minute_does_not_move(loop: Loop, watched: Watched) -> None:
    watch = watched(f"while True: says({ALIVE!r}); time.sleep(0.01)")
    watch.start(1)
    loop.until(Heard(Party.RUNNER, 1, True), watch)
    loop.now += 59
    loop.until(Heard(Party.RUNNER, 1, True), watch)
    loop.now += 2
    loop.until(Heard(Party.RUNNER, 1, False), watch)


@pytest.mark.parametrize("script", ["says(b'no JSON\\n')", "says(b'x' * 70000)", "says(b'[]\\n')"])
def test_a_runner_that_says_what_is_no_message_is_killed(script: str, loop: Loop, watched: Watched) -> None:
    watch = watched(f"{script}; time.sleep(60)")
    watch.start(1)
    loop.until(RunnerEnded(1), watch)


def test_what_a_runner_has_started_ends_with_it(loop: Loop, watched: Watched, tmp_path: Path) -> None:
    note = tmp_path / "child"
    child = "import subprocess; pid = subprocess.Popen(['sleep', '60']).pid"
    watch = watched(f"{child}; open({str(note)!r}, 'w').write(str(pid)); says({ALIVE!r}); time.sleep(60)")
    watch.start(1)
    loop.until(Heard(Party.RUNNER, 1, True), watch)
    watch.kill(1)
    loop.until(RunnerEnded(1), watch)
    stat = Path(f"/proc/{note.read_text()}/stat")
    end = time.monotonic() + 10
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < end
        time.sleep(0.02)


def test_each_runner_that_ends_soon_is_followed_after_a_longer_pause(loop: Loop, watched: Watched) -> None:
    watch = watched(f"says({ALIVE!r})")
    pauses = []
    for number in range(1, 9):
        watch.start(number)
        began = loop.now
        while not watch.pid:
            loop.now += 0.5
            watch.tick(loop.now)
        pauses.append(loop.now - began)
        loop.until(RunnerEnded(number), watch)
    assert pauses == [0, 1, 2, 4, 8, 16, 30, 30]
    watch.start(9)
    watch.kill(9)  # it waits
    assert loop.heard == [RunnerEnded(9)]
    loop.heard.clear()
    loop.now += 60
    watch.tick(loop.now)
    assert watch.pid == 0


def test_a_runner_that_has_lived_long_is_followed_at_once(loop: Loop, watched: Watched) -> None:
    watch = watched("time.sleep(60)")
    for number in (1, 2, 3):
        watch.start(number)
        while not watch.pid:
            loop.now += 0.5
            watch.tick(loop.now)
        began = loop.now
        loop.now += 121
        watch.kill(number)
        loop.until(RunnerEnded(number), watch)
        assert loop.now == began + 121
    watch.start(4)
    assert watch.pid


def test_a_runner_that_cannot_be_started_has_ended(loop: Loop) -> None:
    watch = RunnerWatch(loop.watch, loop.heard.append, lambda: loop.now, ["/nowhere/python"])
    watch.start(1)
    assert loop.heard == [RunnerEnded(1)]


def test_a_runner_gets_no_secrets_of_the_environment(
    loop: Loop, watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    watch = watched(f"open({str(tmp_path / 'env')!r}, 'w').write(repr(dict(os.environ)))")
    watch.start(1)
    loop.until(RunnerEnded(1), watch)
    found = (tmp_path / "env").read_text()
    assert "PATH" in found
    assert "hidden" not in found
