"""The node's half of gangs: a real agent that runs calls as processes of a gang, each in a process of its own."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool import events
from skypool.agent.slot_plan import GANG_PROCESSES
from skypool.calls.call import Call
from skypool.calls.futures import CallFuture
from skypool.calls.pending_calls import PendingCall
from skypool.errors import CallTimeout, ConnectionLost, ProtocolError, RemoteError, UsageError, WorkerDied
from skypool.gangs import environment
from skypool.gangs.environment import Member
from skypool.gangs.ports import free_ports
from skypool.link.agent_messages import message_of
from skypool.runtime import Interruption
from skypool.testing import FakeCloud
from skypool.wire.frames import Kind, frame, members, parse_frame
from tests import work
from tests.conftest import eventually, processes_of
from tests.gang_work import agent, await_file, dawdle, end, meet, own_rank, place, sizes, speak
from tests.test_slots import eight, python_with
from tests.watched import Watched

__all__ = ["eight"]

PLACE = Member(5, 8, 1, 4, 1, 2, 3, True, "train-17", "10.0.0.3", 40001, 40002)


def engine_of(pool: sky.ComputePool) -> Any:
    return pool._engine


def start(pool: sky.ComputePool, call: Call[Any], size: int, *, of: int | None = None) -> list[CallFuture[Any]]:
    """Send the processes of a gang to node 0: ranks 0 to `size` - 1. All have one node, as far as they can tell."""
    dispatch = engine_of(pool).dispatch
    payload, _ = call.payload()
    futures = []
    with dispatch._lock:
        node_queue = dispatch.node_queues[0]
        for rank in range(size):
            options = call.options.but({})
            said = {"rank": rank, "size": size, "local": rank, "of": of or size, "attempt": 2, "changed": True}
            header = members({"gang": {**said, "id": "mine-1", "master": ["127.0.0.1", 40001, 40002]}})
            options.header = f"{options.header},{header}" if options.header else header
            future: CallFuture[Any] = CallFuture(call.function.name)
            pending = PendingCall(
                call.function.code(), payload, future, options, node=0, world=(0, ["127.0.0.1"]), id=next(dispatch.ids)
            )
            dispatch._connect(pending)
            node_queue.send([pending])
            futures.append(future)
    return futures


def ids_of(pool: sky.ComputePool) -> list[int]:
    dispatch = engine_of(pool).dispatch
    with dispatch._lock:
        return [pending.id for pending in dispatch.node_queues[0].underway]


def values(futures: Sequence[CallFuture[Any]]) -> list[Any]:
    return [future.result(60) for future in futures]


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(slots=1, console="off", grace=0.5) as mine:
        yield mine
        mine.stop()  # the calls of a test that has failed wait for a file


def pids_in(folder: Path, count: int) -> list[int]:
    """The processes that `dawdle` has noted, once there are so many calls."""
    eventually(lambda: len(list(folder.iterdir())) == count, 60, f"the start of {count} processes")
    return [int(pid) for each in folder.iterdir() for pid in each.name.split()]


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# --- the environment ---------------------------------------------------------------------------------------------


def test_each_process_gets_its_place_in_all_the_ways_in_which_libraries_look_for_it() -> None:
    assert environment.variables(PLACE, {}, devices={"CUDA_VISIBLE_DEVICES": "1"}, cpus=18) == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "NODE_RANK": "1",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.3",
        "MASTER_PORT": "40001",
        "TORCHELASTIC_RUN_ID": "train-17",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "JAX_COORDINATOR_ADDRESS": "10.0.0.3:40002",
        "JAX_NUM_PROCESSES": "8",
        "JAX_PROCESS_ID": "5",
        "OMP_NUM_THREADS": "4",
        "CUDA_VISIBLE_DEVICES": "1",
    }


def test_what_the_user_has_set_stays_and_devices_are_shared_out_anyway() -> None:
    given = {"MASTER_PORT": "1", "OMP_NUM_THREADS": "7", "CUDA_VISIBLE_DEVICES": "0,1", "FI_PROVIDER": "tcp"}
    env = environment.variables(PLACE, given, devices={"CUDA_VISIBLE_DEVICES": "1"}, cpus=2, efa=True)
    assert not {"MASTER_PORT", "OMP_NUM_THREADS", "FI_PROVIDER"} & env.keys()
    assert env["CUDA_VISIBLE_DEVICES"] == "1"


def test_the_place_of_another_launcher_does_not_count_but_the_machines_threads_do() -> None:
    machine = {"RANK": "0", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "7", "FI_PROVIDER": "tcp"}
    env = environment.variables(PLACE, {}, machine, cpus=2, efa=True)
    assert (env["RANK"], env["LOCAL_RANK"]) == ("5", "1")
    assert not {"OMP_NUM_THREADS", "FI_PROVIDER"} & env.keys()


def test_a_host_of_a_tpu_slice_leaves_jax_to_libtpu_and_efa_is_named_where_it_is() -> None:
    env = environment.variables(PLACE, {}, cpus=2, hosts=2, efa=True)
    assert not [name for name in env if name.startswith("JAX")]
    assert env["OMP_NUM_THREADS"] == "1"
    assert env["FI_PROVIDER"] == "efa"


def test_an_address_of_ipv6_is_put_in_brackets_for_jax_only() -> None:
    env = environment.variables(Member(0, 1, 0, 1, 0, 1, 1, False, "g", "fd00::3", 1, 2), {})
    assert env["JAX_COORDINATOR_ADDRESS"] == "[fd00::3]:2"
    assert env["MASTER_ADDR"] == "fd00::3"


def test_an_efa_device_counts_if_programs_can_open_it(tmp_path: Path) -> None:
    assert not environment.has_efa(str(tmp_path))
    for name, driver in (("mlx5_0", "mlx5_core"), ("rdmap0s6", "efa")):
        device = tmp_path / "sys/devices" / name
        (device / "infiniband_verbs" / f"uverbs-{name}").mkdir(parents=True)
        (tmp_path / "sys/bus/pci/drivers" / driver).mkdir(parents=True)
        (device / "driver").symlink_to(tmp_path / "sys/bus/pci/drivers" / driver)
        listed = tmp_path / "sys/class/infiniband" / name
        listed.mkdir(parents=True)
        (listed / "device").symlink_to(device)
    doors = tmp_path / "dev/infiniband"
    doors.mkdir(parents=True)
    (doors / "uverbs-mlx5_0").touch()
    assert not environment.has_efa(str(tmp_path)), "a container sees the device in sys/, but has no file for it"
    (doors / "uverbs-rdmap0s6").touch()
    assert environment.has_efa(str(tmp_path))


@pytest.mark.parametrize(
    ("shares", "labels"),
    [
        ([["cuda 0", "cuda 1"]], [""]),
        ([[]], [""]),
        ([[], []], ["0", "1"]),
        ([["cuda 0"], ["cuda 1"]], ["gpu0", "gpu1"]),
        ([["rocm 0", "rocm 1"], ["rocm 2"]], ["gpu0-1", "gpu2"]),
        ([["tpu 0"], ["tpu 0"]], ["0", "1"]),
        ([["cuda MIG-0a"], ["cuda MIG-0b"]], ["0", "1"]),
        ([["neuron 0-1"], ["neuron 2-3"]], ["0", "1"]),
        ([["cuda 0"], ["hpu 1", "cuda 1"]], ["0", "1"]),
    ],
)
def test_processes_on_one_node_are_told_apart_by_devices_or_numbers(shares: list[list[str]], labels: list[str]) -> None:
    assert [environment.label(shares, local) for local in range(len(shares))] == labels


def test_a_place_that_cannot_be_is_refused() -> None:
    said = {"rank": 2, "size": 2, "local": 0, "of": 1, "attempt": 1, "changed": False, "id": "g", "master": ["a", 1, 2]}
    with pytest.raises(ValueError, match="rank 2 of 2"):
        Member.from_header({"gang": said, "world": [0, [""]]})


# --- what the processes see --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_rank_has_a_process_of_its_own_with_its_place(pool: sky.ComputePool) -> None:
    ordinary = work.where() >> pool
    found = values(start(pool, place(), 4))
    assert len({pid for _, _, pid, _ in found} | {ordinary}) == 5
    for rank, (info, env, _, part) in enumerate(found):
        assert (info.rank, info.world_size, info.local_rank, info.local_world_size) == (rank, 4, rank, 4)
        assert (info.node, info.nodes, info.attempt, info.world_changed) == (0, 1, 2, True)
        assert (info.slot, info.slots, info.slot_kind, info.accelerators) == (rank, 4, "cpu", ())
        assert info.is_head == (rank == 0)
        assert part == [2 * rank, 2 * rank + 1], "each process has rows of its own"
        assert env["RANK"] == env["LOCAL_RANK"] == env["JAX_PROCESS_ID"] == str(rank)
        assert env["MASTER_ADDR"] == "127.0.0.1"
        assert env["JAX_COORDINATOR_ADDRESS"] == "127.0.0.1:40002"
        assert env["TORCHELASTIC_RESTART_COUNT"] == "1"
        assert "CUDA_VISIBLE_DEVICES" not in env
    again = values(start(pool, place(), 4))
    assert not {pid for _, _, pid, _ in found} & {pid for _, _, pid, _ in again}
    assert work.where() >> pool == ordinary, "the worker of ordinary calls is not touched"
    info = work.info() >> pool
    assert (info.rank, info.world_size, info.local_rank, info.local_world_size, info.attempt) == (0, 1, 0, 1, 1)
    (info,) = work.info() @ pool
    assert (info.rank, info.world_size, info.world_changed) == (0, 1, False)


@pytest.mark.slow
def test_devices_threads_and_what_the_user_has_set(eight: None, tmp_path: Path) -> None:
    image = sky.Image(env={"MASTER_PORT": "777", "GLOO_SOCKET_IFNAME": "lo"})
    provider = sky.Local(python=python_with(tmp_path, 96))
    heard: list[events.Event] = []
    with sky.ComputePool(provider, image=image, console="off") as mine:
        mine.events.listen(heard.append)
        found = values(start(mine, place(), 8))
        assert not any("CUDA_VISIBLE_DEVICES" in env for _, env, _, _ in found), "all see all, as under torchrun"
        assert [env["JAX_LOCAL_DEVICE_IDS"] for _, env, _, _ in found] == [*"01234567"]
        assert [[each.index for each in info.accelerators] for info, _, _, _ in found] == [[n] for n in range(8)]
        assert {info.slot_kind for info, _, _, _ in found} == {"device"}
        assert {(env["OMP_NUM_THREADS"], env["MASTER_PORT"], env["GLOO_SOCKET_IFNAME"]) for _, env, _, _ in found} == {
            ("12", "777", "lo")
        }
        (info, env, _, _), _ = values(start(mine, place(), 2))
        assert env["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
        (info, env, _, _), _ = values(start(mine, place.with_options(devices=0)(), 2))
        assert (info.accelerators, info.slot_kind, env["CUDA_VISIBLE_DEVICES"]) == ((), "cpu", "")


# --- how they end --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["exit", "SIGKILL", "SIGSEGV", "sys.exit", "raise"])
def test_each_end_is_told_and_the_other_ranks_go_on(pool: sky.ComputePool, how: str) -> None:
    zero, one, two = start(pool, end(how), 3)
    assert (zero.result(60), two.result(60)) == (0, 2)
    error = one.exception(60)
    if how == "sys.exit":
        assert isinstance(error, RemoteError)
        assert str(error).startswith("SystemExit: 3")
    elif how == "raise":
        assert isinstance(error, KeyError)
    else:
        assert isinstance(error, WorkerDied)
        assert (error.signal, error.exitcode) == ((None, 3) if how == "exit" else (getattr(signal, how), None))
        assert "my last words" in error.tail


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_cancelled_gang_and_its_child_processes_are_gone(
    pool: sky.ComputePool, tmp_path: Path, stubborn: bool
) -> None:
    call = dawdle.with_options(grace=0.3)(str(tmp_path), stubborn)
    futures = start(pool, call, 3)
    pids = pids_in(tmp_path, 3)
    began = time.monotonic()
    for future in futures:
        future.cancel()
    assert all(future.wait_stopped(60) for future in futures)
    assert time.monotonic() - began < 60
    eventually(lambda: not any(map(lives, pids)), what="the end of all processes")
    assert ids_of(pool) == []


def test_cancelled_before_it_has_begun(pool: sky.ComputePool, tmp_path: Path) -> None:
    futures = start(pool, dawdle.with_options(grace=20)(str(tmp_path)), 4)
    for future in futures:
        future.cancel()
    assert all(future.wait_stopped(10) for future in futures)
    eventually(lambda: ids_of(pool) == [])


def test_a_timeout_ends_the_process(pool: sky.ComputePool, tmp_path: Path) -> None:
    (future,) = start(pool, dawdle.with_options(timeout=0.3)(str(tmp_path)), 1)
    assert isinstance(future.exception(60), CallTimeout)
    eventually(lambda: not any(map(lives, pids_in(tmp_path, 1))))


@pytest.mark.slow
def test_a_process_that_is_stopped_for_long_is_given_up(tmp_path: Path) -> None:
    with sky.ComputePool(slots=1, console="off", grace=0.5, liveness=4) as mine:
        futures = start(mine, dawdle(str(tmp_path)), 2)
        pids = pids_in(tmp_path, 2)
        os.kill(int(next(tmp_path.iterdir()).name.split()[0]), signal.SIGSTOP)
        eventually(lambda: any(future.done() for future in futures), 60)
        ended = next(future for future in futures if future.done())
        assert isinstance(ended.exception(0), ConnectionLost)
        for future in futures:
            future.cancel()
        eventually(lambda: not any(map(lives, pids)))


def test_the_end_of_the_pool_ends_them(tmp_path: Path) -> None:
    with sky.ComputePool(slots=1, console="off") as mine:
        start(mine, dawdle(str(tmp_path)), 4)
        pids = pids_in(tmp_path, 4)
        engine_of(mine).dispatch.close(ConnectionLost("the test is over"))
    eventually(lambda: not any(map(lives, pids)), what="the end of all processes")
    assert processes_of(str(tmp_path)) == []


def test_the_end_of_the_agent_ends_them(tmp_path: Path) -> None:
    with sky.ComputePool(slots=1, console="off") as mine:
        main_process = agent() >> mine
        futures = start(mine, dawdle(str(tmp_path)), 4)
        pids = pids_in(tmp_path, 4)
        os.kill(main_process, signal.SIGKILL)
        assert isinstance(futures[0].exception(60), ConnectionLost)
        eventually(lambda: not any(map(lives, pids)), what="the end of all processes")


# --- with the rest of a node ---------------------------------------------------------------------------------


def test_a_gang_needs_no_free_slot_and_is_never_given_back(pool: sky.ComputePool, tmp_path: Path) -> None:
    go = tmp_path / "go"
    folder = tmp_path / "met"
    folder.mkdir()
    ordinary = work.until(str(go)) > pool
    waiting = work.until(str(go)) > pool
    try:
        futures = start(pool, meet(str(folder), 5), 4)
        eventually(lambda: len(list(folder.iterdir())) == 4, 60)
        node_queue = engine_of(pool).dispatch.node_queues[0]
        lane = node_queue.lanes[0]
        with engine_of(pool).dispatch._lock:
            assert len(lane.underway) >= 5
            asked = node_queue.asked_back + 100
            lane.recalling = True
            node_queue.recall(lane, 100)
        eventually(lambda: not lane.recalling, 60, "the node's answer")
        assert asked - node_queue.asked_back <= 1, "only the call that waits was given back"
        (folder / "and I").touch()
        assert values(futures) == [0, 1, 2, 3]
    finally:
        go.touch()  # what fails here leaves the only slot to the tests after it
    assert {ordinary.result(60), waiting.result(60)} == {str(go)}


def test_after_a_broken_connection_they_run_on_and_none_begins_twice(pool: sky.ComputePool, tmp_path: Path) -> None:
    futures = start(pool, meet(str(tmp_path), 4), 3)
    eventually(lambda: len(list(tmp_path.iterdir())) == 3, 60)
    link = engine_of(pool).connections.links[0]
    heard: list[events.Event] = []
    unlisten = pool.events.listen(heard.append)
    link._loop.call_soon_threadsafe(link._break, "cut by the test", link._stream)
    eventually(lambda: any(isinstance(e, events.LinkUp) for e in heard), 60)
    dispatch = engine_of(pool).dispatch
    with dispatch._lock:  # the frames come a second time
        node_queue = dispatch.node_queues[0]
        for pending in node_queue.underway:
            node_queue.send([pending])
    assert len(list(tmp_path.iterdir())) == 3
    (tmp_path / "and I").touch()
    assert values(futures) == [0, 1, 2]
    assert len(list(tmp_path.iterdir())) == 4
    unlisten()


def test_large_arguments_put_values_and_modules_travel_as_for_other_calls(pool: sky.ComputePool) -> None:
    data = os.urandom(300_000)
    kept = pool.put(b"x" * 200_000)
    for ends in values(start(pool, sizes(data, kept), 3)):
        assert ends == (300_000, 200_000, len("tests.planting"), data)


def test_output_says_which_process_printed_it(pool: sky.ComputePool) -> None:
    heard: list[events.Output] = []
    unlisten = pool.events.listen(lambda e: heard.append(e) if isinstance(e, events.Output) else None)
    values(start(pool, speak(), 3))
    expected = {(f"{words} {rank}", rank, str(rank)) for words in ("I am", "directly") for rank in range(3)}

    def lines() -> set[tuple[str, int | None, str]]:
        return {(line, e.rank, e.label) for e in heard for line in e.text.splitlines()}  # some come together

    eventually(lambda: lines() == expected, 60, "the output of all ranks")
    heard.clear()
    values(start(pool, speak(), 1))
    eventually(lambda: heard, 60)
    assert {(e.rank, e.label) for e in heard} == {(0, "")}
    heard.clear()
    work.info() >> pool
    unlisten()


def told(folder: str) -> Any:
    """A function that ends when it is told that a machine goes; both ways in which a call can be told are noted."""

    def save(interruption: Interruption) -> None:
        Path(folder, f"saved {sky.instance_info().rank}").write_text(str(interruption.at))

    @sky.compute(on_interruption=save)
    def train() -> float:
        Path(folder, f"began {os.getpid()}").touch()
        until = time.monotonic() + 60
        while (seen := sky.interruption()) is None or not Path(folder, f"saved {sky.instance_info().rank}").exists():
            assert time.monotonic() < until
            time.sleep(0.01)
        return seen.at

    return train


def test_a_notice_reaches_the_processes_that_it_is_for(pool: sky.ComputePool, tmp_path: Path) -> None:
    futures = start(pool, told(str(tmp_path))(), 3)
    eventually(lambda: len(list(tmp_path.iterdir())) == 3, 60)
    dispatch = engine_of(pool).dispatch
    first, second, third = ids_of(pool)
    with dispatch._lock:
        dispatch.node_queues[0].notice([first, second, 99], 4_000_000_000.0)
        dispatch.node_queues[0].notice([second], 4_000_000_000.0)
    assert values(futures[:2]) == [4_000_000_000.0] * 2
    assert not futures[2].done()
    assert {each.name: each.read_text() for each in tmp_path.glob("saved*")} == {
        "saved 0": "4000000000.0",
        "saved 1": "4000000000.0",
    }
    with dispatch._lock:
        dispatch.node_queues[0].notice([third], 4_100_000_000.0)
    assert futures[2].result(60) == 4_100_000_000.0
    assert sky.interruption() is None
    assert (work.info() >> pool).rank == 0, "ordinary calls hear nothing"


@pytest.mark.slow
def test_one_process_too_many_is_refused_by_itself(pool: sky.ComputePool, tmp_path: Path) -> None:
    count = GANG_PROCESSES
    futures = start(pool, await_file(str(tmp_path), "go"), count + 1)
    error = futures[-1].exception(60)
    assert isinstance(error, UsageError)
    assert "runs 128 processes of calls with procs= already" in str(error)
    eventually(lambda: len(list(tmp_path.iterdir())) == count, 60)
    (tmp_path / "go").touch()
    assert values(futures[:-1]) == list(range(count))
    assert values(start(pool, own_rank(), count)) == list(range(count)), "their places are free again at once"


def test_free_ports_are_free_everywhere_and_differ(pool: sky.ComputePool) -> None:
    ports = sky.compute(free_ports)(20) >> pool
    assert len({*ports}) == 20
    assert all(20_000 <= port < 32_768 for port in ports)
    for port in ports:
        with socket.socket() as listener:
            listener.bind(("", port))


def test_the_nodes_own_notice_reaches_running_processes_and_later_ones(tmp_path: Path) -> None:
    with FakeCloud(tmp_path / "cloud") as cloud:
        with Watched(cloud, nodes=1) as mine:
            folder = tmp_path / "told"
            folder.mkdir()
            (busy,) = start(mine, await_file(str(tmp_path), "go"), 1)  # else the node is ended as soon as it is idle
            futures = start(mine, told(str(folder))(), 2)
            eventually(lambda: len(list(folder.iterdir())) == 2, 60)
            at = mine.notify(0, 600)
            assert values(futures) == pytest.approx([at, at], abs=30)
            futures = start(mine, told(str(folder))(), 2)
            assert values(futures) == pytest.approx([at, at], abs=30)
            (tmp_path / "go").touch()
            assert busy.result(60) == 0
        eventually(lambda: not processes_of(str(tmp_path)), 30, "the end of the cloud's processes")


# --- messages ------------------------------------------------------------------------------------------------


def test_a_node_cannot_put_just_any_text_before_what_it_prints() -> None:
    def message(**more: object) -> Any:
        data = b"".join(frame(Kind.OUTPUT, {"id": 7, "slot": 0, "fd": 1, "seq": 1, **more}, [b"text"]))
        return message_of(parse_frame(memoryview(data)))

    assert (message().rank, message().label) == (None, "")
    said = message(rank=3, label="gpu4-7")
    assert (said.rank, said.label) == (3, "gpu4-7")
    for wrong in ("\x1b[2J", "gpu1] [1", "x" * 30, "GPU", None, 5):
        with pytest.raises(ProtocolError, match="'label'"):
            message(rank=0, label=wrong)
    for rank in (-1, True, "0", 1 << 20, None):
        with pytest.raises(ProtocolError, match="'rank'"):
            message(rank=rank, label="")
