"""Whole pools on the lab's AWS: real machines, booted with the user data that the driver sent, reached by ssh."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool import accelerators, events, reaper
from skypool.errors import LaunchError
from skypool.launch import Launcher, look_around
from skypool.ledger import Ledger
from skypool.loop import Loop
from skypool.model import Need, Offer, Order
from skypool.testing import FakeCloud, Stock
from skypool_images import recipes
from tests.conftest import eventually
from tests.lab import repository, work
from tests.lab.aws import AWS

ROOT = Path(__file__).parent.parent
HERE = "0.0.0.0/0"
"""Port 22 of lab machines is open to whoever is in the lab: nobody tells this host its public address."""


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(reaper, "SETTLING", 1.0)


def provider(region: str = "us-east-1") -> sky.AWS:
    return sky.AWS(region=region, ssh_from=HERE)


@dataclass(frozen=True)
class Ran:
    """What a pool of one node did."""

    type: str
    steps: tuple[str, ...]
    info: dict[str, Any]


def ran(aws: AWS, **terms: Any) -> Ran:
    """One node, one call, and nothing left."""
    seen: list[events.Event] = []
    pool = sky.ComputePool(provider(), console="off", slots=1, **terms)
    pool.events.listen(seen.append)
    with pool:
        info = work.about() >> pool
    assert aws.left() == {}
    done = [each.step for each in seen if isinstance(each, events.BootstrapStep) and each.state in ("done", "skipped")]
    (line,) = pool.receipt.lines
    assert line.ended
    return Ran(line.type, tuple(done), info)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("accelerator", "type_", "step", "variable"),
    [
        ("A10G", "g5.xlarge", "nvidia", "CUDA_VISIBLE_DEVICES"),
        ("Trainium1", "trn1.2xlarge", "neuron", "NEURON_RT_VISIBLE_CORES"),
        pytest.param("H100:8", "p5.48xlarge", "nvidia", "CUDA_VISIBLE_DEVICES", marks=pytest.mark.slow),
        pytest.param("Inferentia2", "inf2.xlarge", "neuron", "NEURON_RT_VISIBLE_CORES", marks=pytest.mark.slow),
    ],
)
def test_the_accelerator_that_was_bought_is_there(
    aws: AWS,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    accelerator: str,
    type_: str,
    step: str,
    variable: str,
) -> None:
    assert aws.lab is not None
    (empty := tmp_path / "index").mkdir()
    with repository.serve(empty, aws.lab.gateway) as index:  # Neuron's own cannot be reached from every place
        monkeypatch.setattr(recipes, "NEURON_INDEX", index.url)
        _bought(aws, accelerator, type_, step, variable)


def _bought(aws: AWS, accelerator: str, type_: str, step: str, variable: str) -> None:
    done = ran(aws, accelerator=accelerator, image=sky.Image(pip=["numpy"]))
    assert done.type == type_
    assert step in done.steps
    assert done.info["numpy"]
    assert variable in done.info["env"]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("arch", ["x86_64", pytest.param("arm64", marks=pytest.mark.slow)])
def test_machines_without_an_accelerator_are_the_cheapest_of_their_arch(aws: AWS, arch: str) -> None:
    done = ran(aws, vcpus=2, arch=arch, image=sky.Image(pip=["numpy"]))
    (offer, *_) = sky.plan(provider(), vcpus=2, arch=arch).offers
    assert (done.type, offer.arch) == (offer.instance_type, arch)
    assert done.info["numpy"]


EXAMPLE = """
import runpy, sys
import skypool as sky

path, terms = sys.argv[1], eval(sys.argv[2])
image = sky.Image(pip=["scikit-learn"] if "grid" in path else [])
made = sky.ComputePool.__init__

def init(self, *args, **kwargs):
    kwargs.setdefault("provider", sky.AWS(region="us-east-1", ssh_from="0.0.0.0/0"))
    kwargs.setdefault("image", image)
    made(self, *args, **{**terms, **kwargs})

sky.ComputePool.__init__ = init
sys.argv = [path]
runpy.run_path(path, run_name="__main__")
"""


KINDS: list[dict[str, Any]] = [
    {"accelerator": "A10G"},
    {"accelerator": "Trainium1"},
    {"accelerator": "Inferentia2"},
    {"vcpus": 2, "arch": "arm64"},
]
RUNS = [(path.stem, {"vcpus": 2, "arch": "x86_64"}) for path in sorted((ROOT / "examples").glob("0*.py"))]
RUNS += [(example, terms) for example in ("01_hello", "03_stream") for terms in KINDS]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("example", "terms"), RUNS)
def test_the_examples_run_unchanged(example: str, terms: dict[str, Any], aws: AWS) -> None:
    argv = [sys.executable, "-c", EXAMPLE, f"examples/{example}.py", repr(terms)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=280, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert aws.left() == {}


# --- nobody is left to end it -----------------------------------------------------------------------------------

CLIENT = """
import sys, time
import skypool as sky

sky.Budget.check_first_hour = lambda *_, **__: None
terms = eval(sys.argv[1])
driver = sky.AWS(region="us-east-1", ssh_from="0.0.0.0/0")
with sky.ComputePool(driver, vcpus=2, name="train", console="off", **terms) as pool:
    pool.submit(abs, -3).result()
    print("at work", flush=True)
    time.sleep(600)
"""


def client(terms: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CLIENT), terms], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "at work\n"
    return process


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("terms", "why"),
    [
        ("{'lease': '6s'}", "its client is silent"),
        pytest.param(
            "{'lease': '20m', 'max_lifetime': '25s'}", "it has lived for so long as it may", marks=pytest.mark.slow
        ),
        pytest.param(
            "{'lease': '20m', 'market': 'spot', 'budget': 20.0}", "its budget is spent", marks=pytest.mark.slow
        ),
    ],
)
def test_a_machine_whose_client_was_killed_ends_itself(aws: AWS, terms: str, why: str) -> None:
    for offer in provider().offers(Need(vcpus=2, market="spot")):
        aws.spot_price(offer.zone, offer.instance_type, 3600.0)
    process = client(terms)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert aws.count()["instances"] == 1
    eventually(lambda: not aws.count()["instances"], 90)
    gc = subprocess.run(
        [sys.executable, "-c", LATER, "3600", "gc", "--yes", "--provider", "aws"], capture_output=True, text=True
    )
    assert gc.returncode == 0, gc
    assert aws.left() == {}


# --- spot ----------------------------------------------------------------------------------------------------


@pytest.mark.timeout(240)
def test_only_the_machine_that_is_taken_back_is_replaced_and_its_call_runs_again(aws: AWS) -> None:
    seen: list[events.Event] = []
    with sky.ComputePool(provider(), nodes=2, slots=1, vcpus=2, market="spot", console="off") as pool:
        pool.events.listen(seen.append)
        first = {each.id for each in pool_instances(pool)}
        running = [pool.submit(work.long, 20.0) for _ in range(2)]
        eventually(lambda: sum(isinstance(e, events.NodeStatus) and e.busy == 1 for e in seen) >= 2, 30)
        taken = sorted(first)[0]
        aws.interrupt(taken, notice=8.0)
        names = {each.result() for each in running}
        now = {each.id for each in pool_instances(pool)}
    assert len(names) == 2
    assert len(first & now) == 1
    assert taken not in now
    assert any(isinstance(each, events.Interruption) for each in seen)
    assert [each.attempt for each in seen if isinstance(each, events.CallRetried)] == [2]
    assert aws.left() == {}


def pool_instances(pool: sky.ComputePool) -> list[Any]:
    return [each for each in provider().instances(pool=pool.name) if each.state == "running"]


# --- failover ------------------------------------------------------------------------------------------------


_numbers = itertools.count()


class Book:
    """The tokens of creates."""

    def __init__(self) -> None:
        self.tokens: list[str] = []

    def intend(self, order: Order, offer: Offer) -> None:
        self.tokens.append(order.token)

    def rented(self, order: Order, instances: Any) -> None:
        assert order.token in self.tokens

    def refused(self, order: Order, error: Exception) -> None:
        assert order.token in self.tokens


def launched(drivers: list[Any], need: Need, ranks: tuple[int, ...] = (0,)) -> tuple[Launcher, Offer]:
    """What is rented for a need, cheapest first, and what was tried before it."""

    def order(offer: Offer, ranks: tuple[int, ...]) -> Order:
        return Order(pool="train", token=f"{'0' * 16}-{next(_numbers)}", ranks=ranks, need=need)

    at = Launcher(drivers, order, Book())
    rented = at.launch(Loop.shared().run(look_around(drivers, need)).offers, ranks)
    if rented.error is not None:
        raise rented.error
    offer = rented.instances[0].offer
    assert offer is not None
    return at, offer


def gpus(*wanted: str, market: Any = "spot-if-available") -> Need:
    return Need(accelerators=tuple(map(accelerators.parse, wanted)), market=market)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_zone_after_zone_then_region_then_market_then_accelerator_then_provider(aws_api: AWS, tmp_path: Path) -> None:
    driver = sky.AWS(region=["us-east-1", "us-west-2"], ssh_from=HERE)
    need = replace(gpus("Trainium1", "Inferentia2"), max_usd_per_hour=1.5)
    seen: list[tuple[str, str, str]] = []
    for _ in range(200):
        try:
            at, offer = launched([driver], need)
        except LaunchError as e:
            assert "could be launched" in str(e)
            break
        assert all(tried.usd_per_hour <= offer.usd_per_hour or tried.market == "spot" for tried, _ in at.attempts)
        seen.append((offer.market, offer.instance_type, offer.zone))
        aws_api.capacity(0, offer.instance_type, offer.zone, offer.market)
    else:
        raise AssertionError("it never ends")
    markets = [market for market, *_ in seen]
    assert markets == sorted(markets, reverse=True)  # every spot offer comes first
    assert len(set(seen)) == len(seen)
    assert {zone[:-1] for *_, zone in seen} == {"us-east-1", "us-west-2"}
    assert {kind.partition(".")[0] for _, kind, _ in seen} >= {"trn1", "inf2"}
    with FakeCloud(tmp_path / "cloud", [Stock("other", usd_per_hour=1.4, accelerator="Trainium1")]) as other:
        _, offer = launched([driver, other], need)
        assert offer.provider == "fake"


@pytest.mark.parametrize(
    ("code", "next_is_in"),
    [
        ("InsufficientInstanceCapacity", "another zone"),
        ("InsufficientHostCapacity", "another zone"),
        ("Unsupported", "another zone"),
        ("SpotMaxPriceTooLow", "another zone"),
        ("MaxSpotInstanceCountExceeded", "another quota"),
        ("VcpuLimitExceeded", "another quota"),
        ("OptInRequired", "another region"),
        ("PendingVerification", "another region"),
    ],
)
def test_each_refusal_leads_to_what_it_does_not_cover(aws_api: AWS, code: str, next_is_in: str) -> None:
    driver = sky.AWS(region=["us-east-1", "us-west-2"], ssh_from=HERE)
    need = gpus("Trainium1", "Inferentia2")
    best = Loop.shared().run(look_around([driver], need)).offers[0]
    aws_api.fail("RunInstances", code, times=1, region=best.region)
    _, offer = launched([driver], need)
    assert (offer.region, offer.zone, offer.instance_type, offer.market) != (
        best.region,
        best.zone,
        best.instance_type,
        best.market,
    )
    if next_is_in == "another region":
        assert offer.region != best.region
    if next_is_in == "another quota":
        assert offer.quota != best.quota
    assert aws_api.count()["instances"] == 1


@pytest.mark.parametrize("code", ["RequestLimitExceeded", "InternalError", "ServiceUnavailable"])
def test_what_passes_by_itself_is_asked_again_with_the_same_token(aws_api: AWS, code: str) -> None:
    aws_api.fail("RunInstances", code, times=2)
    at, _ = launched([provider()], gpus("L4"))
    assert at.attempts == []
    assert len({call.params["ClientToken"] for call in aws_api.calls("RunInstances")}) == 1
    assert aws_api.count()["instances"] == 1


def test_a_lost_reply_of_a_launch_is_not_a_second_machine(aws_api: AWS) -> None:
    aws_api.drop("RunInstances")
    launched([provider()], gpus("L4"))
    assert aws_api.count()["instances"] == 1


def test_the_price_that_is_charged_is_in_the_receipt(aws: AWS) -> None:
    pool = sky.ComputePool(provider(), vcpus=2, console="off")
    with pool:
        assert pool.submit(abs, -1).result() == 1
        (record,) = Ledger.here().pools(pool.name)
        assert record.receipt(0).lines[0].usd_per_hour == pytest.approx(sky.plan(provider(), vcpus=2).usd_per_hour)
    assert json.dumps(str(pool.receipt))


# --- the crash matrix ------------------------------------------------------------------------------------------

LIFE = """
import sys
import skypool as sky

driver = sky.AWS(region="us-east-1", ssh_from="0.0.0.0/0")
with sky.ComputePool(driver, vcpus=2, name=sys.argv[1], lease="10m", console="off") as pool:
    assert pool.submit(abs, -1).result() == 1
"""
LATER = """
import sys, time

real, later = time.time, float(sys.argv.pop(1))
time.time = lambda: real() + later
from skypool.cli import main
main()
"""


@dataclass
class Matrix:
    """Clients of one account, each with an access key of its own by which its calls are counted and it is killed."""

    aws: AWS
    home: Path
    clients: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    fates: dict[str, tuple[int, str]] = field(default_factory=dict)
    calls: dict[str, list[str]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def on_call(self, call: Any, moment: str) -> None:
        """Kill whose hour has come."""
        with self.lock:
            mine = self.calls.setdefault(call.key, [])
            if moment == "before":
                mine.append(f"{call.number} {call.action}")
            number = next(n for n, each in enumerate(mine, 1) if each == f"{call.number} {call.action}")
        if self.fates.get(call.key) == (number, moment):
            os.kill(self.clients[call.key].pid, signal.SIGKILL)
            if moment == "before":
                self.aws.drop(call.action, moment="before", when=lambda other: other is call)

    def live(self, name: str, number: int = 0, moment: str = "", *, lose_reply: bool = False) -> tuple[str, int]:
        """One life; the call at which it was killed, and its exit status."""
        key = f"AKIA{name.upper().replace('-', 'X'):X<16}"
        self.fates[key] = number, moment
        if lose_reply:
            self.aws.drop("RunInstances", when=lambda call: call.key == key)
        environment = {**os.environ, "AWS_ACCESS_KEY_ID": key, "XDG_STATE_HOME": str(self.home / name)}
        argv = [sys.executable, "-c", LIFE, name]
        with self.lock:
            process = subprocess.Popen(argv, env=environment, stderr=subprocess.PIPE, text=True)
            self.clients[key] = process
        _, err = process.communicate(timeout=200)
        assert process.returncode in (0, -9), err
        calls = self.calls.get(key, [])
        if number > len(calls):
            return "(it was through)", process.returncode
        return calls[number - 1].split()[1] if number else str(len(calls)), process.returncode


def left_by_pool(aws: AWS) -> dict[str, int]:
    """Everything that is there, by the pool of its tag."""
    pools = [each.pool for each in provider().instances()] + [each.pool for each in provider().leftovers()]
    return {pool: pools.count(pool) for pool in pools}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("ledger", "lose_reply"), [(True, False), (False, True)], ids=["ledger", "no ledger, replies lost"]
)
def test_a_client_killed_at_any_call_leaves_nothing(aws: AWS, tmp_path: Path, ledger: bool, lose_reply: bool) -> None:
    matrix = Matrix(aws, tmp_path)
    aws.on_call = matrix.on_call
    matrix.live("first")  # asks for prices, which are known from then on
    many = int(matrix.live("whole")[0])
    assert aws.left() == {}
    cells = [(number, moment) for number in range(1, many + 1) for moment in ("before", "after")]
    with ThreadPoolExecutor(4) as several:
        ended = list(several.map(lambda c: matrix.live(f"p{c[0]}-{c[1]}", *c, lose_reply=lose_reply), cells))
    left = left_by_pool(aws)
    state = [str(tmp_path / f"p{number}-{moment}") for number, moment in cells] if ledger else [str(tmp_path / "none")]
    for each in state if ledger else state[:1]:
        argv = [sys.executable, "-c", LATER, "3600", "gc", "--yes", "--provider", "aws"]
        gc = subprocess.run(argv, env={**os.environ, "XDG_STATE_HOME": each}, capture_output=True, text=True)
        assert gc.returncode == 0, gc
        if not aws.left():
            break
    now = left_by_pool(aws)
    print(f"\n{'killed at call':>36}  {'':6}  left  after gc")
    for (number, moment), (action, status) in zip(cells, ended, strict=True):
        name = f"p{number}-{moment}"
        assert status or action == "(it was through)"
        print(f"{f'{number} {action}':>36}  {moment:6}  {left.get(name, 0):>4}  {now.get(name, 0):>8}")
    assert any(left.values())
    assert aws.left() == {}
