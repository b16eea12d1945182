"""Every way in which the cost of a pool ends, also if what watches the pool raises, hangs, or has no room."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from skypool.pool import engine
from skypool.testing import FakeCloud, Stock
from tests.conftest import eventually
from tests.endings import END, SIGNALS, TROUBLES, WATCHERS, Rows, Saboteur, run, run_process

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)

SLOW = ("budget", "linger_after_block", "failed_start")
"""Ends that take seconds."""


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[FakeCloud]:
    with FakeCloud(tmp_path / "cloud", [Stock(usd_per_hour=36_000.0)]) as made:
        yield made


@pytest.mark.parametrize("row", [pytest.param(row, marks=pytest.mark.slow) if row in SLOW else row for row in END])
def test_a_pool_ends(row: str, cloud: FakeCloud) -> None:
    run(row, (), "", cloud)


@pytest.mark.parametrize("row", END)
@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.slow
def test_a_pool_ends_whatever_watches_it(row: str, trouble: str, cloud: FakeCloud) -> None:
    run(row, WATCHERS, trouble, cloud)


@pytest.mark.parametrize("watcher", WATCHERS)
@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.slow
def test_one_broken_watcher_delays_no_end(watcher: str, trouble: str, cloud: FakeCloud) -> None:
    run("stop", (watcher,), trouble, cloud)


@pytest.mark.parametrize("number", ["SIGTERM", ""], ids=lambda number: number or "exit")
def test_machines_end_with_their_process(number: str, cloud: FakeCloud) -> None:
    run_process(number, (), "", cloud)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number or "exit")
@pytest.mark.parametrize("trouble", ["", *TROUBLES])
@pytest.mark.slow
def test_machines_end_with_their_process_whatever_watches(number: str, trouble: str, cloud: FakeCloud) -> None:
    run_process(number, WATCHERS, trouble, cloud)


IMPATIENT = """
import sys
import skypool as sky
from skypool.testing import FakeCloud
from tests.work import nap
pool = sky.ComputePool(FakeCloud(sys.argv[1]), name="p", slots=1, console="off").start()
call = pool.send(nap(600))
print("ready", flush=True)
if sys.argv[2] == "leaves its block":
    with pool:
        pass
call.result()
"""


@pytest.mark.parametrize("program", ["leaves its block", "waits for a call"])
@pytest.mark.slow
def test_machines_end_however_often_their_user_presses_ctrl_c(program: str, cloud: FakeCloud) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", IMPATIENT, str(cloud.state), program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            cloud.control.delay(3.0, "delete")
            for _ in range(4):
                time.sleep(0.5)  # not for luck: each arrives at another step of the end
                process.send_signal(signal.SIGINT)
            eventually(lambda: cloud.count() == 0, 40.0, "the end of machines, keys and groups")
            process.wait(20.0)
        finally:
            process.kill()


def test_machines_end_before_anything_that_watches_is_closed(cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    with Saboteur(WATCHERS, "hangs") as saboteur:
        monkeypatch.setattr(engine, "_TO_CLOSE", 60.0)
        pool, _ = Rows(cloud, saboteur).started()
        stop = threading.Thread(target=pool.stop)
        stop.start()
        eventually(lambda: cloud.count() == 0, 20.0, "the end of machines, keys and groups")
        assert stop.is_alive()
    stop.join(30.0)
    assert not stop.is_alive()
