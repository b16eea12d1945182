"""Whole pools on the lab's Vast.ai: real machines, started with the command that the driver sent, reached by ssh."""

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
from skypool import events, faulty, reaper
from skypool.errors import LaunchError, ProviderError
from skypool_vastai import _api
from tests.conftest import eventually
from tests.lab import work
from tests.lab.vastai import KEY
from tests.lab.vastai import VastAI as World

ROOT = Path(__file__).parent.parent
CREATE, DESTROY = "PUT /api/v0/asks/{id}/", "DELETE /api/v0/instances/{id}/"


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(reaper, "SETTLING", 1.0)
    monkeypatch.setattr(_api, "PACE", {})


def pool(**terms: Any) -> tuple[sky.ComputePool, list[events.Event]]:
    """A pool of one-slot nodes and what will be heard of it."""
    seen: list[events.Event] = []
    made = sky.ComputePool(sky.VastAI(), console="off", slots=1, **terms)
    made.events.listen(seen.append)
    return made, seen


def cheapest(accelerator: str | None = None, **terms: Any) -> list[int]:
    """The machines that a pool would take, best first."""
    return [each.detail["machine"] for each in sky.plan(sky.VastAI(), accelerator=accelerator, **terms).offers]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "accelerator", ["RTX_4090", *(pytest.param(each, marks=pytest.mark.slow) for each in ("RTX_3090:4", "H100"))]
)
def test_the_accelerator_that_was_bought_is_there_and_only_its_price_is_paid(vastai: World, accelerator: str) -> None:
    (offer, *_) = sky.plan(sky.VastAI(), accelerator=accelerator).offers
    made, seen = pool(accelerator=accelerator, image=sky.Image(pip=["numpy"]))
    with made:
        info = work.about() >> made
        [contract] = vastai.rentals.values()
        assert contract.machine is not None
        told = contract.machine.run("cat /proc/[0-9]*/environ").stdout
        assert contract.key in told
        assert KEY not in told, "the account's key is on a stranger's machine"
    assert vastai.left() == {}
    done = [each.step for each in seen if isinstance(each, events.BootstrapStep) and each.state in ("done", "skipped")]
    assert "nvidia" in done
    assert info["numpy"]
    assert "CUDA_VISIBLE_DEVICES" in info["env"]
    (line,) = made.receipt.lines
    assert line.ended
    assert line.usd_per_hour == pytest.approx(offer.usd_per_hour) == pytest.approx(contract.ask["dph_total"])


# --- machines that fail ------------------------------------------------------------------------------------------


@pytest.mark.timeout(240)
def test_machines_that_fail_are_replaced_and_left_out_from_then_on(
    vastai: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sky.VastAI, "loading", 4.0)
    oci, other, offline, stuck, driver, good = cheapest("RTX_4090")[:6]
    vastai.flaws = {oci: "oci", other: "oci", offline: "offline", stuck: "stuck", driver: "driver"}
    made, _ = pool(accelerator="RTX_4090", nodes=2)
    with made:
        assert made.submit(abs, -1).result() == 1
        used = {each.ask["machine_id"] for each in vastai.rentals.values() if each.living}
        assert good in used
        assert not used & {*vastai.flaws}
    assert vastai.left() == {}
    said = faulty.known("vastai")
    assert set(said) == {*vastai.flaws}
    for machine, words in ((oci, "OCI runtime"), (offline, "offline"), (stuck, "too slow"), (driver, "driver")):
        assert words in said[machine]
    assert not set(cheapest("RTX_4090", refresh=True)) & {*vastai.flaws}


@pytest.mark.timeout(120)
def test_an_image_that_nobody_has_ends_the_pool_and_says_so(vastai: World) -> None:
    image = sky.Image(base={"vastai": "no-such-image:1"})
    made, seen = pool(vcpus=1, image=image)
    with pytest.raises(ProviderError, match=r"manifest unknown.*check the image's name"):
        made.start()
    assert len(vastai.rentals) == 2, [each.detail for each in seen if isinstance(each, events.NodePhase)]
    assert vastai.left() == {}
    assert faulty.known("vastai") == {}


def test_where_all_offers_are_stale_it_is_told_of_each(vastai_api: World) -> None:
    words = "error 404/3603: no_such_ask Instance type by id 1 is not available."
    vastai_api.fail(CREATE, 404, {"success": False, "error": "no_such_ask", "msg": words}, times=None)
    made, _ = pool(accelerator="H100")
    offers = len(cheapest("H100"))
    with pytest.raises(LaunchError, match=f"none of {offers} offers") as none_left:
        made.start()
    assert str(none_left.value).count("no_such_ask") >= 1
    assert vastai_api.left() == {}


# --- bids ----------------------------------------------------------------------------------------------------


@pytest.mark.timeout(240)
def test_a_node_that_is_outbid_is_replaced_and_its_call_runs_again_and_nothing_is_billed_on(vastai: World) -> None:
    made, seen = pool(nodes=2, vcpus=1, market="spot", liveness="3s")
    with made:
        running = [made.submit(work.long, 8.0) for _ in range(2)]
        eventually(lambda: sum(isinstance(e, events.NodeStatus) and e.busy == 1 for e in seen) >= 2, 30)
        first = sorted(vastai.rentals)[0]
        vastai.outbid(first)
        assert all(each.result() for each in running)
        assert not vastai.rentals[first].living, "a stopped instance is billed on"
        assert sum(each.living for each in vastai.rentals.values()) == 2
    assert any(isinstance(each, events.Interruption) for each in seen)
    assert [each.attempt for each in seen if isinstance(each, events.CallRetried)] == [2]
    assert vastai.left() == {}


# --- nobody is left to end it -----------------------------------------------------------------------------------

CLIENT = """
import sys, time
import skypool as sky
from skypool_vastai import _api

_api.PACE.clear()
sky.Budget.check_first_hour = lambda *_, **__: None
terms = eval(sys.argv[1])
with sky.ComputePool(sky.VastAI(), vcpus=2, name="train", console="off", **terms) as pool:
    pool.submit(abs, -3).result()
    print("at work", flush=True)
    time.sleep(600)
"""


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "terms",
    ["{'lease': '6s'}", pytest.param("{'lease': '20m', 'max_lifetime': '25s'}", marks=pytest.mark.slow)],
)
def test_a_machine_whose_client_was_killed_destroys_itself_with_a_key_of_its_own(vastai: World, terms: str) -> None:
    argv = [sys.executable, "-c", textwrap.dedent(CLIENT), terms]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "at work\n"
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert vastai.count()["instances"] == 1
    eventually(lambda: not vastai.count()["instances"], 90)
    ends = [each for each in vastai.calls(DESTROY) if each.status == 200]  # asked again until it is gone
    assert ends
    assert all(each.headers["authorization"].startswith("Bearer container-") for each in ends)
    assert gc(3600).returncode == 0
    assert vastai.left() == {}


@pytest.mark.timeout(120)
def test_its_end_goes_without_curl_too(vastai: World) -> None:
    script = (ROOT / "providers/skypool_vastai/end.sh").read_text()
    driver = sky.VastAI()
    made, _ = pool(vcpus=1)
    with made:
        [contract] = [each for each in vastai.rentals.values() if each.living]
        assert contract.machine is not None
        told = {
            "base": vastai.url,
            "PATH": "/root/tools",
            "CONTAINER_ID": contract.id,
            "CONTAINER_API_KEY": contract.key,
        }
        text = "".join(f"export {name}={value}\n" for name, value in told.items()) + script
        contract.machine.run('mkdir /root/tools; ln -s "$(command -v python3)" /root/tools/')
        contract.machine.run(f"cat > /root/end <<'END'\n{text}\nEND\n(sleep 0.5; sh /root/end) > /dev/null 2>&1 &")
        eventually(lambda: driver.instances() == [], 20)
        assert vastai.calls(DESTROY)[-1].headers["authorization"] == f"Bearer {contract.key}"


def gc(later: float, state: str | None = None) -> subprocess.CompletedProcess[str]:
    """`skypool gc --yes` in another process, so many seconds later."""
    argv = [sys.executable, "-c", LATER, str(later), "gc", "--yes", "--provider", "vastai"]
    env = os.environ | ({"XDG_STATE_HOME": state} if state else {})
    return subprocess.run(argv, env=env, capture_output=True, text=True)


# --- the examples ------------------------------------------------------------------------------------------------

EXAMPLE = """
import runpy, sys
import skypool as sky

path, terms = sys.argv[1], eval(sys.argv[2])
image = sky.Image(pip=["scikit-learn"] if "grid" in path else [])
made = sky.ComputePool.__init__

def init(self, *args, **kwargs):
    kwargs.setdefault("provider", sky.VastAI())
    kwargs.setdefault("image", image)
    made(self, *args, **{**terms, **kwargs})

sky.ComputePool.__init__ = init
sys.argv = [path]
runpy.run_path(path, run_name="__main__")
"""
RUNS: list[tuple[str, dict[str, Any]]] = [
    (path.stem, {"vcpus": 2}) for path in sorted((ROOT / "examples").glob("0*.py"))
]
RUNS += [(example, {"accelerator": "RTX_4090"}) for example in ("01_hello", "03_stream")]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("example", "terms"), RUNS)
def test_the_examples_run_unchanged(example: str, terms: dict[str, Any], vastai: World) -> None:
    argv = [sys.executable, "-c", EXAMPLE, f"examples/{example}.py", repr(terms)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=280, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert vastai.left() == {}


# --- the crash matrix ------------------------------------------------------------------------------------------

LIFE = """
import sys
import skypool as sky
from skypool_vastai import _api

_api.PACE.clear()
with sky.ComputePool(sky.VastAI(), vcpus=2, name=sys.argv[1], lease="10m", market=sys.argv[2], console="off") as pool:
    assert pool.submit(abs, -1).result() == 1
"""
LATER = """
import sys, time
from skypool_vastai import _api

_api.PACE.clear()
real, later = time.time, float(sys.argv.pop(1))
time.time = lambda: real() + later
from skypool.cli import main
main()
"""


@dataclass
class Matrix:
    """Clients of one account, each with an API key of its own by which its calls are counted and it is killed."""

    world: World
    home: Path
    market: str
    clients: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    fates: dict[str, tuple[int, str]] = field(default_factory=dict)
    calls: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def on_call(self, call: Any, moment: str) -> None:
        """Kill whose hour has come."""
        key = call.headers.get("authorization", "").removeprefix("Bearer ")
        with self.lock:
            mine = self.calls.setdefault(key, [])
            if moment == "before":
                mine.append((call.number, call.action))
            number = 1 + mine.index((call.number, call.action))
        if self.fates.get(key) == (number, moment):
            os.kill(self.clients[key].pid, signal.SIGKILL)
            if moment == "before":
                self.world.drop(call.action, moment="before", when=lambda other: other is call)

    def live(self, name: str, number: int = 0, moment: str = "", *, lose_reply: bool = False) -> tuple[str, int]:
        """One life; the call at which it was killed, and its exit status."""
        key = f"{KEY}-{name}"
        self.fates[key] = number, moment
        if lose_reply:
            self.world.drop(CREATE, when=lambda call: call.headers["authorization"].endswith(f"{KEY}-{name}"))
        environment = {**os.environ, "VAST_API_KEY": key, "XDG_STATE_HOME": str(self.home / name)}
        environment["XDG_CACHE_HOME"] = str(self.home / name / "cache")
        with self.lock:
            argv = [sys.executable, "-c", LIFE, name, self.market]
            process = subprocess.Popen(argv, env=environment, stderr=subprocess.PIPE, text=True)
            self.clients[key] = process
        _, err = process.communicate(timeout=200)
        assert process.returncode in (0, -9), err
        calls = self.calls.get(key, [])
        if number > len(calls):
            return "(it was through)", process.returncode
        return calls[number - 1][1] if number else str(len(calls)), process.returncode


def left_by_pool() -> dict[str, int]:
    """The instances there are, by the pool of their label."""
    pools = [each.pool for each in sky.VastAI().instances()]
    return {name: pools.count(name) for name in pools}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("ledger", "lose_reply", "market"),
    [(True, False, "on-demand"), (False, True, "spot")],
    ids=["ledger", "no ledger, replies lost, bids"],
)
def test_a_client_killed_at_any_call_leaves_nothing(
    vastai: World, tmp_path: Path, ledger: bool, lose_reply: bool, market: str
) -> None:
    matrix = Matrix(vastai, tmp_path, market)
    vastai.on_call = matrix.on_call
    many = int(matrix.live("whole")[0])
    assert vastai.left() == {}
    cells = [(number, moment) for number in range(1, many + 1) for moment in ("before", "after")]
    with ThreadPoolExecutor(4) as several:
        ended = list(several.map(lambda c: matrix.live(f"p{c[0]}-{c[1]}", *c, lose_reply=lose_reply), cells))
    left = left_by_pool()
    states = [str(tmp_path / f"p{number}-{moment}") for number, moment in cells] if ledger else [str(tmp_path / "none")]
    for state in states:
        done = gc(3600, state)
        assert done.returncode == 0, done
        if not vastai.left():
            break
    now = left_by_pool()
    print(f"\n{'killed at call':>36}  {'':6}  left  after gc")
    for (number, moment), (action, status) in zip(cells, ended, strict=True):
        name = f"p{number}-{moment}"
        assert status or action == "(it was through)"
        print(f"{f'{number} {action}':>36}  {moment:6}  {left.get(name, 0):>4}  {now.get(name, 0):>8}")
    assert any(left.values())
    assert vastai.left() == {}
