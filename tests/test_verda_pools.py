"""Whole pools on the lab's Verda: real machines, booted with the startup script that the driver sent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool import events, reaper
from tests.conftest import eventually
from tests.lab import work
from tests.lab.verda import Verda

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(reaper, "SETTLING", 1.0)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("accelerator", ["V100", pytest.param("A6000", marks=pytest.mark.slow)])
def test_the_gpu_that_was_bought_is_there_with_its_driver(verda: Verda, accelerator: str) -> None:
    seen: list[events.Event] = []
    pool = sky.ComputePool(sky.Verda(), accelerator=accelerator, slots=1, console="off")
    pool.events.listen(seen.append)
    with pool:
        info = work.about() >> pool
    done = [each.step for each in seen if isinstance(each, events.BootstrapStep) and each.state in ("done", "skipped")]
    assert "nvidia" in done
    assert "CUDA_VISIBLE_DEVICES" in info["env"]
    assert any("billed until `skypool gc --yes`" in each.text for each in seen if isinstance(each, events.Notice))
    (line,) = pool.receipt.lines
    assert line.type == {"V100": "1V100.6V", "A6000": "1A6000.10V"}[accelerator]
    assert verda.left() == {}


EXAMPLE = """
import runpy, sys
import skypool as sky

path, terms = sys.argv[1], eval(sys.argv[2])
image = sky.Image(pip=["scikit-learn"] if "grid" in path else [])
made = sky.ComputePool.__init__

def init(self, *args, **kwargs):
    kwargs.setdefault("provider", sky.Verda())
    kwargs.setdefault("image", image)
    made(self, *args, **{**terms, **kwargs})

sky.ComputePool.__init__ = init
sys.argv = [path]
runpy.run_path(path, run_name="__main__")
"""
RUNS: list[tuple[str, dict[str, Any]]] = [(path.stem, {}) for path in sorted((ROOT / "examples").glob("0*.py"))]
RUNS += [(example, {"accelerator": "V100"}) for example in ("01_hello", "03_stream")]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("example", "terms"), RUNS)
def test_the_examples_run_unchanged(example: str, terms: dict[str, Any], verda: Verda) -> None:
    argv = [sys.executable, "-c", EXAMPLE, f"examples/{example}.py", repr(terms)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=280, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert verda.left() == {}


# --- failover ------------------------------------------------------------------------------------------------


@pytest.mark.timeout(240)
@pytest.mark.parametrize("late", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_machine_that_was_promised_and_does_not_come_is_had_elsewhere(verda: Verda, late: bool) -> None:
    """Late: only when the launch has been back for long."""
    verda.delays.ordered = 15.0 if late else 0.3
    verda.sell_out()
    offers = [each for each in sky.plan(sky.Verda(), accelerator=["V100", "A6000"]).offers if each.available]
    with sky.ComputePool(sky.Verda(), accelerator=["V100", "A6000"], console="off") as pool:
        if late:
            verda.delays.ordered = 0.1
        assert pool.submit(abs, -3).result() == 3
        (there,) = [each for each in verda.rentals.values() if each.living]
        assert (there.kind, there.place) == (offers[1].instance_type, offers[1].region)
    assert [each.told["instance_type"] for each in verda.rentals.values()] in ([offers[0].instance_type], [])
    assert verda.left() == {}


# --- spot ----------------------------------------------------------------------------------------------------


@pytest.mark.timeout(240)
def test_a_machine_that_is_taken_back_without_a_word_is_replaced_and_its_call_runs_again(verda: Verda) -> None:
    seen: list[events.Event] = []
    terms: dict[str, Any] = {"nodes": 2, "slots": 1, "market": "spot", "liveness": 4.0, "console": "off"}
    with sky.ComputePool(sky.Verda(), **terms) as pool:
        pool.events.listen(seen.append)
        first = {each.id for each in verda.rentals.values()}
        running = [pool.submit(work.long, 12.0) for _ in range(2)]
        eventually(lambda: sum(isinstance(e, events.NodeStatus) and e.busy == 1 for e in seen) >= 2, 30)
        verda.preempt(taken := sorted(first)[0])
        names = {each.result() for each in running}
        now = {each.id for each in verda.rentals.values() if each.living}
    assert len(names) == 2
    assert taken not in now
    assert len(first & now) == 1
    assert [each.attempt for each in seen if isinstance(each, events.CallRetried)] == [2]
    assert verda.left() == {}


# --- nobody is left to end it --------------------------------------------------------------------------------

CLIENT = """
import sys, time
import skypool as sky

with sky.ComputePool(sky.Verda(), name="train", console="off", lease="6s") as pool:
    pool.submit(abs, -3).result()
    print("at work", flush=True)
    time.sleep(600)
"""
LATER = """
import sys, time

real, later = time.time, float(sys.argv.pop(1))
time.time = lambda: real() + later
from skypool.cli import main
main()
"""


def gc(seconds: float, state: str = "") -> subprocess.CompletedProcess[str]:
    """`skypool gc --yes` of another process, so much later."""
    argv = [sys.executable, "-c", LATER, str(seconds), "gc", "--yes", "--provider", "verda"]
    env = {**os.environ, **({"XDG_STATE_HOME": state} if state else {})}
    return subprocess.run(argv, capture_output=True, text=True, env=env)


@pytest.mark.timeout(240)
def test_a_machine_whose_client_was_killed_does_no_more_and_gc_ends_its_cost(verda: Verda, tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", CLIENT], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "at work\n"
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    (rental,) = verda.rentals.values()
    eventually(lambda: rental.state == "offline", 60)
    assert verda.count()["instances"] == 1, "it is billed on"
    early = gc(0, str(tmp_path / "elsewhere"))
    assert verda.count()["instances"] == 1, early
    done = gc(3600, str(tmp_path / "elsewhere"))
    assert done.returncode == 0, done
    assert verda.left() == {}


# --- the crash matrix ----------------------------------------------------------------------------------------

LIFE = """
import sys
import skypool as sky

with sky.ComputePool(sky.Verda(), name=sys.argv[1], lease="10m", console="off") as pool:
    assert pool.submit(abs, -1).result() == 1
"""


@dataclass
class Matrix:
    """Clients of one account, each with a User-Agent of its own by which its calls are counted and it is killed."""

    verda: Verda
    home: Path
    clients: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    fates: dict[str, tuple[int, str]] = field(default_factory=dict)
    calls: dict[str, list[int]] = field(default_factory=dict)
    actions: dict[str, list[str]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def on_call(self, call: Any, moment: str) -> None:
        """Kill whose hour has come."""
        name = call.headers.get("x-client", "")
        with self.lock:
            mine = self.calls.setdefault(name, [])
            if moment == "before":
                mine.append(call.number)
                self.actions.setdefault(name, []).append(call.action)
            number = mine.index(call.number) + 1
        if self.fates.get(name) == (number, moment):
            os.kill(self.clients[name].pid, signal.SIGKILL)
            if moment == "before":
                self.verda.drop(call.action, moment="before", when=lambda other: other is call)

    def live(self, name: str, number: int = 0, moment: str = "", *, lose_reply: bool = False) -> tuple[str, int]:
        """One life; the call at which it was killed, and its exit status."""
        self.fates[name] = number, moment
        if lose_reply:
            self.verda.drop("POST /instances", when=lambda call: call.headers.get("x-client") == name)
        environment = {**os.environ, "X_CLIENT": name, "XDG_STATE_HOME": str(self.home / name)}
        argv = [sys.executable, "-c", NAMED + LIFE, name]
        with self.lock:
            process = subprocess.Popen(argv, env=environment, stderr=subprocess.PIPE, text=True)
            self.clients[name] = process
        _, err = process.communicate(timeout=200)
        assert process.returncode in (0, -9), err
        actions = self.actions.get(name, [])
        if number > len(actions):
            return "(it was through)", process.returncode
        return actions[number - 1] if number else str(len(actions)), process.returncode


NAMED = """
import os, requests
made = requests.Session.__init__

def init(self):
    made(self)
    self.headers["X-Client"] = os.environ["X_CLIENT"]

requests.Session.__init__ = init
"""


def left_by_pool() -> dict[str, int]:
    """Everything that is there, by its pool."""
    driver = sky.Verda()
    pools = [each.pool for each in driver.instances()] + [each.pool for each in driver.leftovers()]
    return {pool: pools.count(pool) for pool in pools}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("ledger", "lose_reply"), [(True, False), (False, True)], ids=["ledger", "no ledger, replies lost"]
)
def test_a_client_killed_at_any_call_leaves_nothing(
    verda: Verda, tmp_path: Path, ledger: bool, lose_reply: bool
) -> None:
    matrix = Matrix(verda, tmp_path)
    verda.on_call = matrix.on_call
    many = int(matrix.live("whole")[0])
    assert verda.left() == {}
    cells = [(number, moment) for number in range(1, many + 1) for moment in ("before", "after")]
    with ThreadPoolExecutor(4) as several:
        ended = list(several.map(lambda c: matrix.live(f"p{c[0]}-{c[1]}", *c, lose_reply=lose_reply), cells))
    left = left_by_pool()
    states = [str(tmp_path / f"p{number}-{moment}") for number, moment in cells] if ledger else [str(tmp_path / "none")]
    for each in states:
        done = gc(3600, each)
        assert done.returncode == 0, done
        if not verda.left():
            break
    now = left_by_pool()
    print(f"\n{'killed at call':>36}  {'':6}  left  after gc")
    for (number, moment), (action, status) in zip(cells, ended, strict=True):
        name = f"p{number}-{moment}"
        assert status or action == "(it was through)"
        print(f"{f'{number} {action}':>36}  {moment:6}  {left.get(name, 0):>4}  {now.get(name, 0):>8}")
    assert any(left.values())
    assert verda.left() == {}
