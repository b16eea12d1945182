"""How a worker tells the call that runs of an interruption: with a page and a pipe as the agent gives them."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from skypool.agent.notice import Herald
from skypool.agent.shared_page import SharedPage
from skypool.runtime import Attended, Interruption
from tests.conftest import eventually

AT = 4_000_000_000.0


class Agent:
    """What an agent has in common with one worker."""

    def __init__(self) -> None:
        self.page = SharedPage(1)
        self.read_end, self.write_end = os.pipe()
        self.herald = Herald(self.read_end, self.page)
        self.told: list[float] = []

    def interrupt(self, at: float = AT) -> None:
        self.page.interruption = at
        self.go()

    def go(self) -> None:
        os.close(self.write_end)
        self.write_end = -1

    def hear(self, interruption: Interruption) -> None:
        self.told.append(interruption.at)

    def call(self, on_interruption: Any = None) -> Any:
        """A call begins; its function."""
        return self.herald.attend(Attended(len, on_interruption or self.hear))


@pytest.fixture
def agent() -> Iterator[Agent]:
    made = Agent()
    yield made
    if made.write_end >= 0:
        made.go()


def listeners() -> int:
    return sum(thread.name == "skypool-notice" for thread in threading.enumerate())


def test_a_call_that_runs_is_told_once_and_those_before_it_are_not(agent: Agent) -> None:
    agent.call()
    agent.herald.leave()
    assert agent.call() is len
    agent.interrupt()
    eventually(lambda: agent.told, what="the notice")
    agent.herald.leave()
    assert agent.told == [AT]


def test_a_call_that_begins_after_the_notice_is_told_at_once(agent: Agent) -> None:
    agent.interrupt()
    for count in (1, 2):
        agent.call()
        eventually(lambda count=count: len(agent.told) == count, what="the notice")  # type: ignore[misc]
        agent.herald.leave()
    assert agent.told == [AT, AT]


def test_a_call_ends_when_what_it_does_about_the_notice_has_ended(agent: Agent) -> None:
    begun, ended = threading.Event(), threading.Event()

    async def save(interruption: Interruption) -> None:
        begun.set()
        await asyncio.sleep(0.2)
        ended.set()

    agent.call(save)
    agent.interrupt()
    assert begun.wait(60)
    agent.herald.leave()
    assert ended.is_set()


def test_whatever_is_raised_is_shown_and_the_next_call_is_told(
    agent: Agent, capsys: pytest.CaptureFixture[str]
) -> None:
    def leave(interruption: Interruption) -> None:
        raise SystemExit("enough")

    agent.call(leave)
    agent.interrupt()
    eventually(lambda: agent.herald._told, what="the notice")
    agent.herald.leave()
    assert "leave failed; the call goes on" in (said := capsys.readouterr().err)
    assert "SystemExit: enough" in said
    agent.call()
    eventually(lambda: agent.told, what="the notice")


def test_nobody_is_told_when_it_is_the_agent_that_goes(agent: Agent) -> None:
    before = listeners()
    agent.call()
    assert listeners() == before + 1
    agent.go()
    eventually(lambda: listeners() == before, what="the end of the thread")
    assert agent.told == []


def test_a_forked_child_waits_for_nothing(agent: Agent) -> None:
    hold = threading.Event()
    agent.call(lambda _: hold.wait(10))
    agent.interrupt()
    eventually(lambda: agent.herald._telling, what="the notice")
    child = os.fork()
    if child == 0:
        agent.herald.forget()
        agent.herald.leave()
        os._exit(7)
    until = time.monotonic() + 5
    while (reaped := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < until:
        time.sleep(0.01)
    hold.set()
    assert os.waitstatus_to_exitcode(reaped[1]) == 7
    agent.herald.leave()
