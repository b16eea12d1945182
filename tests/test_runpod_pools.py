"""Whole pools on the lab's RunPod: containers with the start command that the driver sent, reached by mapped ports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
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
from tests.lab.runpod import RunPod

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(reaper, "SETTLING", 1.0)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("accelerator", "type_"),
    [
        ("RTX_4090", "1x NVIDIA GeForce RTX 4090"),
        pytest.param("H100-SXM:8", "8x NVIDIA H100 80GB HBM3", marks=pytest.mark.slow),
    ],
)
def test_the_gpus_that_were_bought_are_there(runpod: RunPod, accelerator: str, type_: str) -> None:
    seen: list[events.Event] = []
    pool = sky.ComputePool(sky.RunPod(), accelerator=accelerator, slots=1, console="off")
    pool.events.listen(seen.append)
    with pool:
        info = work.about() >> pool
    assert "CUDA_VISIBLE_DEVICES" in info["env"]
    (line,) = pool.receipt.lines
    assert (line.type, line.ended is not None) == (type_, True)
    assert line.usd_per_hour == pytest.approx(sky.plan(sky.RunPod(), accelerator=accelerator).usd_per_hour)
    assert runpod.left() == {}


EXAMPLE = """
import runpy, sys
import skypool as sky

path, terms = sys.argv[1], eval(sys.argv[2])
image = sky.Image(pip=["scikit-learn"] if "grid" in path else [])
made = sky.ComputePool.__init__

def init(self, *args, **kwargs):
    kwargs.setdefault("provider", sky.RunPod())
    kwargs.setdefault("image", image)
    made(self, *args, **{**terms, **kwargs})

sky.ComputePool.__init__ = init
sys.argv = [path]
runpy.run_path(path, run_name="__main__")
"""
RUNS: list[tuple[str, dict[str, Any]]] = [(path.stem, {}) for path in sorted((ROOT / "examples").glob("0*.py"))]
RUNS += [("01_hello", {"accelerator": "A40"}), ("03_stream", {"accelerator": "A40", "market": "spot"})]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("example", "terms"), RUNS)
def test_the_examples_run_unchanged(example: str, terms: dict[str, Any], runpod: RunPod) -> None:
    argv = [sys.executable, "-c", EXAMPLE, f"examples/{example}.py", repr(terms)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=280, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert runpod.left() == {}


# --- nobody is left to end it -----------------------------------------------------------------------------------

CLIENT = """
import sys, time
import skypool as sky

sky.Budget.check_first_hour = lambda *_, **__: None
with sky.ComputePool(sky.RunPod(), name="train", console="off", **eval(sys.argv[1])) as pool:
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


def swept(later: float = 3600.0, **environment: str) -> None:
    """`gc --yes`, so many seconds later."""
    argv = [sys.executable, "-c", LATER, str(later), "gc", "--yes", "--provider", "runpod"]
    gc = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, **environment})
    assert gc.returncode == 0, gc


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "terms",
    [
        "{'lease': '6s'}",
        pytest.param("{'lease': '20m', 'max_lifetime': '15s'}", marks=pytest.mark.slow),
        pytest.param("{'lease': '20m', 'accelerator': 'A40', 'budget': 0.5}", marks=pytest.mark.slow),
    ],
    ids=["its client is silent", "its lifetime is over", "its budget is spent"],
)
def test_a_pod_whose_client_was_killed_ends_itself(runpod: RunPod, terms: str) -> None:
    runpod.price("NVIDIA A40", 120.0, None)  # of 0.5 USD nothing is left after 15 s
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CLIENT), terms], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "at work\n"
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert runpod.count()["instances"] == 1
    eventually(lambda: not runpod.count()["instances"], 90)
    swept()
    assert runpod.left() == {}


# --- spot ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_pod_that_is_outbid_is_replaced_and_its_disk_is_paid_for_no_longer(runpod: RunPod) -> None:
    seen: list[events.Event] = []
    driver = sky.RunPod()
    with sky.ComputePool(
        driver, accelerator="A40", nodes=2, slots=1, market="spot", liveness="6s", console="off"
    ) as pool:
        pool.events.listen(seen.append)
        first = sorted(each.id for each in driver.instances(pool=pool.name))
        running = [pool.submit(work.long, 8.0) for _ in range(2)]
        eventually(lambda: sum(isinstance(e, events.NodeStatus) and e.busy == 1 for e in seen) >= 2, 30)
        runpod.interrupt(first[0])
        assert [each.state for each in driver.instances(pool=pool.name) if each.id == first[0]] == ["ending"]
        for each in running:
            each.result()
        eventually(lambda: sum(each.state == "running" for each in driver.instances(pool=pool.name)) == 2, 30)
        eventually(lambda: first[0] not in runpod.rentals, 20)
    assert any(isinstance(each, events.Interruption) for each in seen)
    assert [each.attempt for each in seen if isinstance(each, events.CallRetried)] == [2]
    assert runpod.left() == {}


# --- the crash matrix ------------------------------------------------------------------------------------------

LIFE = """
import sys
import skypool as sky

with sky.ComputePool(sky.RunPod(), name=sys.argv[1], lease="10m", console="off") as pool:
    assert pool.submit(abs, -1).result() == 1
"""


@dataclass
class Matrix:
    """Clients of one account, each with a key of its own by which its calls are counted and it is killed."""

    runpod: RunPod
    home: Path
    clients: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    fates: dict[str, tuple[int, str]] = field(default_factory=dict)
    calls: dict[str, list[str]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def on_call(self, call: Any, moment: str) -> None:
        """Kill whose hour has come."""
        key = call.headers["authorization"].removeprefix("Bearer ")
        with self.lock:
            mine = self.calls.setdefault(key, [])
            if moment == "before":
                mine.append(f"{call.number} {call.action}")
            number = next(n for n, each in enumerate(mine, 1) if each == f"{call.number} {call.action}")
        if self.fates.get(key) == (number, moment):
            os.kill(self.clients[key].pid, signal.SIGKILL)
            if moment == "before":
                self.runpod.drop(call.action, moment="before", when=lambda other: other is call)

    def live(self, name: str, number: int = 0, moment: str = "", *, lose_reply: bool = False) -> tuple[str, int]:
        """One life; the call at which it was killed, and its exit status."""
        key = f"rpa_{name}"
        self.fates[key] = number, moment
        if lose_reply:
            self.runpod.drop("deployCpuPod", when=lambda call: call.headers["authorization"] == f"Bearer {key}")
        environment = {**os.environ, "RUNPOD_API_KEY": key, "XDG_STATE_HOME": str(self.home / name)}
        with self.lock:
            process = subprocess.Popen(
                [sys.executable, "-c", LIFE, name], env=environment, stderr=subprocess.PIPE, text=True
            )
            self.clients[key] = process
        _, err = process.communicate(timeout=200)
        assert process.returncode in (0, -9), err
        calls = self.calls.get(key, [])
        if number > len(calls):
            return "(it was through)", process.returncode
        return calls[number - 1].split()[1] if number else str(len(calls)), process.returncode


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("ledger", "lose_reply"), [(True, False), (False, True)], ids=["ledger", "no ledger, replies lost"]
)
def test_a_client_killed_at_any_call_leaves_nothing(
    runpod: RunPod, tmp_path: Path, ledger: bool, lose_reply: bool
) -> None:
    matrix = Matrix(runpod, tmp_path)
    runpod.on_call = matrix.on_call
    many = int(matrix.live("whole")[0])
    assert runpod.left() == {}
    cells = [(number, moment) for number in range(1, many + 1) for moment in ("before", "after")]
    with ThreadPoolExecutor(4) as several:
        ended = list(several.map(lambda c: matrix.live(f"p{c[0]}-{c[1]}", *c, lose_reply=lose_reply), cells))
    left = _by_pool()
    for each in [f"p{number}-{moment}" for number, moment in cells] if ledger else ["none"]:
        swept(XDG_STATE_HOME=str(tmp_path / each))
        if not runpod.left():
            break
    now = _by_pool()
    print(f"\n{'killed at call':>36}  {'':6}  left  after gc")
    for (number, moment), (action, status) in zip(cells, ended, strict=True):
        name = f"p{number}-{moment}"
        assert status or action == "(it was through)"
        print(f"{f'{number} {action}':>36}  {moment:6}  {left.get(name, 0):>4}  {now.get(name, 0):>8}")
    assert any(left.values())
    assert runpod.left() == {}


def _by_pool() -> dict[str, int]:
    """The pods that are there, by the pools of their names."""
    pools = [each.pool for each in sky.RunPod().instances()]
    return {pool: pools.count(pool) for pool in pools}
