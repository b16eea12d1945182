"""Hooks of pytest, used by conftest.py: tests can press Ctrl-C wherever they are started, and a timeout ends a test.

A shell without job control starts a background job with SIGINT ignored, as some CI runners do, and `nohup` ignores
SIGHUP. Every child inherits that, so a client that a test interrupts would go on for ever.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from types import FrameType

import pytest

from skypool.agent.processes import descendants, started

_began = pytest.StashKey[float]()


def hear_signals() -> None:
    """Let children start with the usual SIGINT and SIGHUP; a handler, unlike SIG_IGN, is not inherited."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _outlive_the_terminal)


def _outlive_the_terminal(_number: int, _frame: FrameType | None) -> None:
    """Ignore SIGHUP in this process only."""


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item) -> Iterator[None]:
    """Kill what the test has started before its timeout is raised in it: `Popen.__exit__` waits for its child."""
    item.stash[_began] = now()
    answer = yield
    raise_timeout = signal.getsignal(signal.SIGALRM)

    def on_timeout(number: int, frame: FrameType | None) -> None:
        kill_started_since(item.stash[_began])
        if callable(raise_timeout):
            raise_timeout(number, frame)

    if callable(raise_timeout):
        signal.signal(signal.SIGALRM, on_timeout)
    return answer


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """What its fixtures have started stays: it may be there for other tests, too."""
    item.stash[_began] = now()


def now() -> float:
    """Seconds since this machine was started, by the clock of `started`."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def kill_started_since(began: float) -> None:
    """Kill the processes below this one that began after that."""
    for pid in descendants(os.getpid()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if started(pid) >= int(began * os.sysconf("SC_CLK_TCK")):
                os.kill(pid, signal.SIGKILL)
