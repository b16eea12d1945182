"""How a node's devices are split into slots, and the CPU slots beside them."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool import devices, events
from skypool.accelerators import Custom
from skypool.agent.processes import usable_cpus
from skypool.agent.slot_plan import plan_slots, share
from skypool.devices import Device
from skypool.errors import UsageError, WorkerDied
from skypool.runtime import InstanceInfo
from skypool.testing import FakeCloud, Stock
from skypool.wire.agent_config import SlotPlan
from tests.conftest import eventually
from tests.watched import Watched

H100S = tuple(Device("cuda", index, "NVIDIA H100 80GB HBM3", 81559, pin=str(index)) for index in range(8))
SHOWN = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "HABANA_VISIBLE_MODULES",
         "TPU_VISIBLE_CHIPS", "JAX_PLATFORMS", "PJRT_DEVICE")  # fmt: skip


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has eight GPUs, as far as its nodes can tell."""
    monkeypatch.setenv("SKYPOOL_DEVICES", json.dumps([asdict(each) for each in H100S]))
    for name in (*SHOWN, "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


def python_with(tmp_path: Path, count: int) -> str:
    """An interpreter whose machine has so many CPUs."""
    (tmp_path / "sitecustomize.py").write_text(f"import os\nos.sched_getaffinity = lambda _: set(range({count}))\n")
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


@pytest.fixture
def big(eight: None, tmp_path: Path) -> Iterator[sky.ComputePool]:
    """A node with eight GPUs and 192 CPUs."""
    with sky.ComputePool(sky.Local(python=python_with(tmp_path, 192)), console="off", grace=1.0) as pool:
        yield pool


@sky.compute
def where() -> tuple[InstanceInfo, dict[str, str | None], int]:
    env = {name: os.environ.get(name) for name in (*SHOWN, "OMP_NUM_THREADS")}
    return sky.instance_info(), env, os.getpid()


@sky.compute
def meet(folder: str, count: int) -> int:
    """Comes back when so many calls run at once."""
    Path(folder, str(os.getpid())).touch()
    until = time.monotonic() + 60
    while len(os.listdir(folder)) < count:
        assert time.monotonic() < until, f"{len(os.listdir(folder))} of {count} calls run at once"
        time.sleep(0.01)
    return os.getpid()


@sky.compute
def wait_for(path: str, began: str = "") -> int:
    if began:
        Path(began).touch()
    until = time.monotonic() + 60
    while not os.path.exists(path):
        assert time.monotonic() < until
        time.sleep(0.01)
    return os.getpid()


@sky.compute
def die() -> None:
    os._exit(3)


@sky.compute
def count_to(n: int) -> Iterator[int]:
    yield from range(n)


@sky.compute
def total(numbers: Iterator[int]) -> int:
    return sum(numbers)


@sky.compute
def double(n: int) -> int:
    return 2 * n


on_cpu: dict[str, Any] = {"devices": 0}


# --- how devices are dealt out -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slots", "parts"),
    [
        (None, ["0,1,2,3,4,5,6,7"]),
        (1, ["0,1,2,3,4,5,6,7"]),
        ("per-device", [*"01234567"]),
        (2, ["0,1,2,3", "4,5,6,7"]),
        (3, ["0,1,2", "3,4,5", "6,7"]),
        (5, ["0,1", "2,3", "4,5", "6", "7"]),
        (10, [*"0123456701"]),
    ],
)
def test_devices_are_dealt_out_in_order_and_the_first_slots_get_what_is_left(slots: Any, parts: list[str]) -> None:
    dealt = share(H100S, slots)
    assert [each.env["CUDA_VISIBLE_DEVICES"] for each in dealt] == parts
    assert [",".join(name.removeprefix("cuda ") for name in each.devices) for each in dealt] == parts


@pytest.mark.parametrize(("slots", "count"), [(None, usable_cpus()), ("per-device", usable_cpus()), (5, 5)])
def test_a_node_without_devices_has_a_slot_for_each_cpu_unless_a_number_is_given(slots: Any, count: int) -> None:
    assert share((), slots) == (SlotPlan(),) * count


def test_a_host_of_a_slice_sees_the_slice_unless_its_chips_are_split() -> None:
    chips = [Device("tpu", index, "TPUv5p", pin=str(index)) for index in range(4)]
    for whole in (None, 1):
        (slot,) = plan_slots(whole, chips, hosts=2)
        assert slot.env == {}
        assert len(slot.devices) == 4
    assert [each.env["TPU_VISIBLE_CHIPS"] for each in plan_slots("per-device", chips, hosts=2)] == [*"0123"]


def test_slots_that_mean_nothing_are_refused_where_they_are_written() -> None:
    with pytest.raises(
        UsageError, match=r"slots \(how many .*\) must be a number, 'per-device' for one call per device, or left out"
    ):
        sky.ComputePool(slots="per-gpu")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"slots \(calls a node runs at once\) must be at least 1"):
        sky.ComputePool(slots=0)
    with pytest.raises(UsageError, match="devices must be 0 for a call without accelerators, or left out"):
        sky.compute(devices=2)(lambda: None)  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="devices must be 0"):
        double(1).with_options(devices=False)  # type: ignore[call-overload]


def test_every_family_of_devices_is_hidden() -> None:
    env = devices.hidden()
    hidden = {name: value for name, value in env.items() if "VISIBLE" in name}
    assert hidden == dict.fromkeys((name for name in SHOWN if "VISIBLE" in name), "")
    assert (env["JAX_PLATFORMS"], env["PJRT_DEVICE"]) == ("cpu", "CPU")


# --- what calls see ------------------------------------------------------------------------------------------


def test_a_call_has_all_devices_of_its_node_and_one_that_needs_none_has_none(big: sky.ComputePool) -> None:
    info, env, _ = where() >> big
    assert [each.index for each in info.accelerators] == [*range(8)]
    assert (info.slot_kind, info.slot, info.slots) == ("device", 0, 1)
    assert (env["CUDA_VISIBLE_DEVICES"], env["OMP_NUM_THREADS"]) == ("0,1,2,3,4,5,6,7", None)
    info, env, _ = where().with_options(devices=0) >> big
    assert info.accelerators == ()
    assert (info.slot_kind, info.slot, info.slots) == ("cpu", 0, 192)
    assert env == {**dict.fromkeys(SHOWN, ""), "JAX_PLATFORMS": "cpu", "PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_devices_can_be_split(eight: None, tmp_path: Path) -> None:
    with sky.ComputePool(slots="per-device", console="off") as pool:
        folder = tmp_path / "met"
        folder.mkdir()
        assert len({*pool.map(meet, [str(folder)] * 8, [8] * 8)}) == 8
        infos = [info for info, _, _ in pool.map(lambda _: where.function(), range(8), chunksize=1)]
        assert {(len(each.accelerators), each.slots, each.slot_kind) for each in infos} == {(1, 8, "device")}


@pytest.mark.slow
def test_threads_are_shared_out_unless_the_user_says_how_many(eight: None, tmp_path: Path) -> None:
    python = python_with(tmp_path, 96)
    with sky.ComputePool(sky.Local(python=python), slots=4, console="off") as pool:
        assert (where() >> pool)[1]["OMP_NUM_THREADS"] == "24"
    image = sky.Image(env={"OMP_NUM_THREADS": "7"})
    with sky.ComputePool(sky.Local(python=python), slots=4, image=image, console="off") as pool:
        assert (where() >> pool)[1]["OMP_NUM_THREADS"] == "7"
        assert (where().with_options(devices=0) >> pool)[1]["OMP_NUM_THREADS"] == "7"


def test_a_node_without_devices_runs_all_calls_on_its_slots(tmp_path: Path) -> None:
    with sky.ComputePool(slots=1, console="off") as pool:
        pids = {call >> pool for call in (wait_for("/"), wait_for("/").with_options(devices=0))}
        assert len(pids) == 1, "there is one queue"
        info, _, _ = where().with_options(devices=0) >> pool
        assert (info.slot_kind, info.slot, info.slots) == ("cpu", 0, 1)


@pytest.mark.slow
def test_a_machine_of_the_users_own_shares_its_devices_among_nodes(eight: None) -> None:
    with sky.ComputePool(accelerator="H100:4", nodes=2, console="off") as pool:
        first, second = where() @ pool
        assert [each.index for each in (*first[0].accelerators, *second[0].accelerators)] == [*range(8)]
        for info, _, _ in where().with_options(devices=0) @ pool:
            assert (info.accelerators, info.slot_kind) == ((), "cpu")


# --- two kinds of slots --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_calls_that_need_no_device_run_beside_those_that_do(big: sky.ComputePool, tmp_path: Path) -> None:
    go, folder = tmp_path / "go", tmp_path / "met"
    folder.mkdir()
    training = wait_for(str(go)) > big
    waiting = double(4) > big
    prepare = meet.with_options(**on_cpu)
    workers = {*big.map(prepare, [str(folder)] * 40, [40] * 40)}
    assert len(workers) == 40, "as many at once as there are calls, and the device slot is not among them"
    assert not training.done()
    assert not waiting.done(), "a call that wants devices never runs on a CPU slot"
    go.touch()
    assert training.result(60) not in workers
    assert waiting.result(60) == 8


@pytest.mark.slow
def test_all_cpu_slots_of_a_large_node_can_be_used_at_once(big: sky.ComputePool, tmp_path: Path) -> None:
    @sky.compute(devices=0)
    def wait(go: str, began: str) -> int:  # by value: 192 workers that import this file take two CPUs 40 s
        import os
        import time

        open(began, "w").close()
        while not os.path.exists(go):
            time.sleep(0.2)
        return os.getpid()

    seen, go = heard(big), tmp_path / "go"
    began = [tmp_path / f"began {number}" for number in range(192)]
    running = [wait(str(go), str(each)) > big for each in began]

    def told() -> bool:
        return any(isinstance(each, events.NodeStatus) and each.cpu_busy == 192 for each in seen)

    eventually(lambda: told() and all(each.exists() for each in began), 60, "192 calls at once")
    go.touch()
    assert len({each.result(60) for each in running}) == 192


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def seconds_of(pid: int) -> float:
    """The processor time of a process."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def workers_of(pid: int) -> int:
    """How many children the agent of a worker has."""
    parent = parent_of(pid)
    return len(Path(f"/proc/{parent}/task/{parent}/children").read_text().split())


def test_cpu_workers_are_started_when_they_are_needed(big: sky.ComputePool) -> None:
    pid = wait_for("/") >> big
    assert workers_of(pid) == 1, "one that has the devices, and no other"
    other = wait_for("/").with_options(devices=0) >> big
    assert other != pid
    for _ in range(20):
        assert wait_for("/").with_options(devices=0) >> big == other
    assert workers_of(pid) == 2, "calls one after the other need one"


def test_an_agent_waits_once_it_has_started_its_last_cpu_workers(eight: None, tmp_path: Path) -> None:
    (folder := tmp_path / "met").mkdir()
    with sky.ComputePool(sky.Local(python=python_with(tmp_path, 4)), console="off", grace=1.0) as pool:
        agent = parent_of((where() >> pool)[2])
        os.kill(agent, signal.SIGSTOP)  # so that it receives the four calls at once
        running = [meet(str(folder), 4).with_options(devices=0) > pool for _ in range(4)]
        os.kill(agent, signal.SIGCONT)
        assert len({each.result(60) for each in running}) == 4
        before = seconds_of(agent)
        time.sleep(1.0)
        assert seconds_of(agent) - before < 0.5, "it looks again and again whether more workers are needed"


def test_small_calls_without_devices_travel_together(big: sky.ComputePool) -> None:
    small = double.with_options(**on_cpu)
    assert list(big.map(small, range(5000))) == [2 * n for n in range(5000)]
    assert list(big.map(small, range(5000), chunksize=64)) == [2 * n for n in range(5000)]


@pytest.mark.slow
def test_both_kinds_stream_cancel_and_survive_a_death(big: sky.ComputePool, tmp_path: Path) -> None:
    for more in ({}, on_cpu):
        assert list(count_to(1000).with_options(**more) >> big) == [*range(1000)]
        assert total(iter(range(100))).with_options(**more) >> big == 4950
        with pytest.raises(WorkerDied):
            die().with_options(**more) >> big
        go, began = tmp_path / "never", tmp_path / f"began-{len(more)}"
        future = wait_for(str(go), str(began)).with_options(**more) > big
        eventually(began.exists, what="a call that is to be cancelled")
        assert future.cancel()
        with pytest.raises(sky.CallTimeout):
            wait_for(str(go)).with_options(timeout=0.3, **more) >> big
        assert double(3).with_options(**more) >> big == 6
    assert double(3).with_options(retries=1, **on_cpu) @ big == [6]


def test_a_call_that_waits_for_a_slot_of_its_kind_can_be_cancelled(eight: None, tmp_path: Path) -> None:
    go = tmp_path / "go"
    with sky.ComputePool(sky.Local(python=python_with(tmp_path, 2)), console="off", grace=1.0) as pool:
        for more in ({}, on_cpu):
            busy = [wait_for(str(go)).with_options(**more) > pool for _ in range(2)]
            waiting = [wait_for(str(go)).with_options(**more) > pool for _ in range(5)]
            assert all(each.cancel() for each in waiting)
            go.touch()
            assert all(each.result(60) for each in busy)
            go.unlink()
            assert double(1).with_options(**more) >> pool == 2


def test_pools_of_several_nodes_use_cpu_slots_of_all(eight: None, tmp_path: Path) -> None:
    folder = tmp_path / "met"
    folder.mkdir()
    with sky.ComputePool(sky.Local(python=python_with(tmp_path, 3)), nodes=2, console="off") as pool:
        assert len({*pool.map(meet.with_options(**on_cpu), [str(folder)] * 6, [6] * 6)}) == 6


# --- what is told --------------------------------------------------------------------------------------------


def heard(pool: sky.ComputePool) -> list[events.Event]:
    seen: list[events.Event] = []
    pool.events.listen(seen.append)
    return seen


def test_map_says_once_how_to_split_the_devices(eight: None) -> None:
    pool = sky.ComputePool(console="off")
    seen = heard(pool)
    with pool:
        list(pool.map(double.with_options(**on_cpu), range(3)))
        assert not [each for each in seen if isinstance(each, events.Notice)]
        for _ in range(2):
            list(pool.map(double, range(3)))
    (notice,) = [each.text for each in seen if isinstance(each, events.Notice)]
    assert notice == (
        "map runs one call at a time on each node, with all 8 GPUs; "
        'ComputePool(..., slots="per-device") runs 8 at a time'
    )


@pytest.mark.parametrize("slots", [1, 2, "per-device"])
def test_map_says_nothing_where_the_user_chose_the_slots(eight: None, slots: Any) -> None:
    pool = sky.ComputePool(console="off", slots=slots)
    seen = heard(pool)
    with pool:
        list(pool.map(double, range(3)))
    assert not [each for each in seen if isinstance(each, events.Notice)]


def test_what_a_node_has_is_told_when_it_is_ready(
    eight: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pool = sky.ComputePool(sky.Local(python=python_with(tmp_path, 192)), console="plain")
    seen = heard(pool)

    @sky.compute
    def say(word: str) -> None:
        print(word)

    with pool:
        say("devices") >> pool
        say("none").with_options(devices=0) >> pool
    (ready,) = [each for each in seen if isinstance(each, events.NodePhase) and each.phase == "ready"]
    assert (ready.slots, ready.devices, ready.cpu_slots) == (1, 8, 192)
    out, err = capfd.readouterr()
    assert "node 0 ready (1 slot with 8 devices, 192 CPU slots)" in err
    assert "[0] devices" in out
    assert "[0.cpu0] none" in out


@pytest.mark.slow
def test_what_runs_on_cpu_slots_is_told_apart(big: sky.ComputePool, tmp_path: Path) -> None:
    seen = heard(big)
    go = tmp_path / "go"
    running = [wait_for(str(go)).with_options(**on_cpu) > big for _ in range(3)]

    def told() -> bool:
        return any(isinstance(each, events.NodeStatus) and (each.busy, each.cpu_busy) == (3, 3) for each in seen)

    eventually(told, what="three busy CPU slots")
    go.touch()
    assert all(each.result(60) for each in running)


# --- clouds --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_machine_of_a_fake_cloud_has_one_slot_with_all_it_was_sold_with(tmp_path: Path) -> None:
    stock = Stock("gpu-8", accelerator="H100:8")
    with (
        FakeCloud(tmp_path / "cloud", stock=[stock]) as cloud,
        Watched(cloud, accelerator="H100:8", slots=None) as pool,
    ):
        info, env, _ = where() >> pool
        assert (len(info.accelerators), info.slots, info.slot_kind) == (8, 1, "device")
        info, env, _ = where().with_options(devices=0) >> pool
        assert (info.accelerators, info.slots, info.slot_kind) == ((), usable_cpus(), "cpu")
        assert env["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.slow
def test_a_host_of_a_slice_has_one_slot_and_cpu_slots(tmp_path: Path) -> None:
    stock = Stock("v5p-16", accelerator="v5p-16")
    with (
        FakeCloud(tmp_path / "cloud", stock=[stock]) as cloud,
        Watched(cloud, accelerator="v5p-16", slots=None) as pool,
    ):
        for info, env, _ in where() @ pool:
            assert (len(info.accelerators), info.slots, env["TPU_VISIBLE_CHIPS"]) == (4, 1, None)
        for info, env, _ in where().with_options(devices=0) @ pool:
            assert (info.accelerators, info.slot_kind, env["TPU_VISIBLE_CHIPS"]) == ((), "cpu", "")
        list(pool.map(double, range(3)))
        assert not pool.heard(events.Notice), "splitting a host takes its slice away"


@pytest.mark.slow
@pytest.mark.parametrize(
    "accelerator",
    [Custom("mychip", memory="16GB", count=2), Custom("mygpu", runtime="cuda", count=2), "U30:2", "Qualcomm_AI100:2"],
    ids=str,
)
def test_hardware_that_nothing_here_can_pin_is_rented_and_seen(tmp_path: Path, accelerator: Any) -> None:
    stock = Stock("odd", accelerator=accelerator)
    with FakeCloud(tmp_path / "cloud", stock=[stock]) as cloud:
        with Watched(cloud, accelerator=accelerator, slots=None) as pool:
            assert len((where() >> pool)[0].accelerators) == 2
            assert (where().with_options(devices=0) >> pool)[0].accelerators == ()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os; os.environ['SKYPOOL_DEVICES'] = 'nonsense'", "JSONDecodeError"),
        ("import resource; resource.setrlimit = None", "'NoneType' object is not callable"),
    ],
    ids=["the keeper", "the agent"],
)
def test_an_agent_that_dies_as_it_starts_says_why(tmp_path: Path, code: str, words: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"{code}\n")
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    with pytest.raises(sky.ConnectionLost, match=words) as caught:
        with sky.ComputePool(sky.Local(python=str(script)), slots=1, console="off", liveness=10):
            pass
    assert "the agent ended with an error" in str(caught.value)
