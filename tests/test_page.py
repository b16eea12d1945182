"""The page of memory that answers for workers which cannot be asked."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from skypool.agent.shared_page import SharedPage

LONG_ENOUGH = 3.0
"""Seconds to look at another process, which sees fewer of its steps where both share a core."""


def test_a_new_page_says_that_nothing_runs() -> None:
    page = SharedPage(3)
    assert [page.running(slot) for slot in range(3)] == [(0, 0.0)] * 3
    assert not any(page.given_up(slot) for slot in range(3))
    assert (page.deadline, page.drops) == (0.0, 0)


def test_each_slot_keeps_its_own_call() -> None:
    page = SharedPage(200)
    for slot in range(200):
        page.begin(slot, 2**40 + slot, slot + 0.25)
    assert [page.running(slot) for slot in range(200)] == [(2**40 + slot, slot + 0.25) for slot in range(200)]


def test_deadline_and_drops_are_apart_from_the_slots_and_from_each_other() -> None:
    page = SharedPage(1)
    page.begin(0, 2**64 - 1, 1e9)
    page.give_up(0, 2**64 - 1)
    page.deadline, page.drops = 123.5, 7
    assert (page.deadline, page.drops) == (123.5, 7)
    assert page.running(0) == (2**64 - 1, 1e9)
    assert page.given_up(0)


def test_a_call_whose_needs_are_loaded_counts_from_then_and_stays_the_same_call() -> None:
    page = SharedPage(2)
    page.begin(1, 5, 1.0)
    page.give_up(1, 5)
    page.run(1, 3.0)
    assert page.running(1) == (5, 3.0)
    assert page.given_up(1)
    assert page.running(0) == (0, 0.0)


def test_only_the_call_that_runs_is_given_up() -> None:
    page = SharedPage(2)
    page.begin(0, 5, 1.0)
    page.give_up(0, 4)
    assert not page.given_up(0)
    page.give_up(0, 5)
    assert page.given_up(0)
    assert not page.given_up(1)


def test_the_next_call_is_not_given_up_with_the_one_before() -> None:
    page = SharedPage(1)
    page.begin(0, 5, 1.0)
    page.give_up(0, 5)
    page.begin(0, 6, 2.0)
    assert not page.given_up(0)


def test_a_slot_that_runs_nothing_has_nothing_to_give_up() -> None:
    page = SharedPage(1)
    page.give_up(0, 0)
    assert not page.given_up(0)


@pytest.fixture
def busy() -> Iterator[SharedPage]:
    """A page whose slot 0 another process rewrites without a pause: call n, taken at second n."""
    page = SharedPage(1)
    pid = os.fork()
    if pid == 0:
        call = 0
        while True:
            call += 1
            page.begin(0, call, float(call))
    yield page
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_another_process_sees_what_is_written_and_never_a_call_with_the_time_of_an_earlier_one(
    busy: SharedPage,
) -> None:
    until = time.monotonic() + LONG_ENOUGH
    last, seen = 0, 0
    while seen < 20_000 and time.monotonic() < until:
        call, when = busy.running(0)
        assert call >= last
        assert when >= call
        seen += call > last
        last = call
    assert seen > 10, "the other process writes nothing"


def test_a_deadline_that_is_moved_is_never_seen_as_none(busy_deadline: SharedPage) -> None:
    until = time.monotonic() + LONG_ENOUGH
    last, seen = 1.0, 0
    while seen < 20_000 and time.monotonic() < until:
        deadline = busy_deadline.deadline
        assert deadline >= last
        seen += deadline > last
        last = deadline
    assert seen > 10, "the other process writes nothing"


@pytest.fixture
def busy_deadline() -> Iterator[SharedPage]:
    """A page whose deadline another process moves on without a pause."""
    page = SharedPage(1)
    page.deadline = 1.0
    pid = os.fork()
    if pid == 0:
        while True:
            page.deadline += 1.0
    yield page
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
