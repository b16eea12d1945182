"""A gang: one call that runs as processes on several nodes, which start, fail and run again as one."""

from __future__ import annotations

import math
import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool import events
from skypool.calls.gangs import seconds_left
from skypool.errors import (
    CallTimeout,
    CapacityError,
    ConnectionLost,
    NodeInterrupted,
    PoolClosed,
    RemoteError,
    UsageError,
    WorkerDied,
)
from skypool.testing import FakeCloud
from skypool.wire.error_text import notes_of
from tests.conftest import eventually
from tests.test_bad_luck import agent_of
from tests.watched import Watched

GRACE = 1.0
AT_MOST = GRACE + 30.0
"""How long a failure may take here, in seconds. It only tells a failure that comes from one that never does."""


@pytest.fixture(scope="module")
def shared() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(nodes=2, slots=2, console="off") as made:
        yield made


@pytest.fixture
def pool(shared: sky.ComputePool) -> sky.ComputePool:
    return shared


@dataclass(frozen=True)
class Seen:
    """What one rank saw of its place."""

    rank: int
    world: int
    local: int
    of: int
    node: int
    nodes: int
    pid: int
    environment: dict[str, str]
    addresses: tuple[str, ...]


@sky.compute(procs=2)
def look() -> Seen:
    me = sky.instance_info()
    return Seen(
        me.rank,
        me.world_size,
        me.local_rank,
        me.local_world_size,
        me.node,
        me.nodes,
        os.getpid(),
        dict(os.environ),
        me.addresses,
    )


def meet() -> list[int]:
    """Connect all ranks through MASTER_PORT as a rendezvous does, and return the ranks that rank 0 has heard."""
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if rank:
        until = time.monotonic() + 30
        while True:
            try:
                with socket.create_connection(where, timeout=30) as peer:
                    peer.sendall(bytes([rank]))
                    return list(peer.recv(64))
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.01)
    with socket.create_server(where) as server:
        peers = [server.accept()[0] for _ in range(world - 1)]
        heard = sorted([0, *(peer.recv(1)[0] for peer in peers)])
        for peer in peers:
            peer.sendall(bytes(heard))
            peer.close()
    return heard


def test_the_values_of_all_ranks_come_in_their_order(pool: sky.ComputePool) -> None:
    seen = look() @ pool
    assert [each.rank for each in seen] == [0, 1, 2, 3]
    assert [(each.node, each.local) for each in seen] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {(each.world, each.of, each.nodes) for each in seen} == {(4, 2, 2)}
    assert len({each.pid for each in seen}) == 4
    for each in seen:
        env = each.environment
        assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"]) == (str(each.rank), "4", str(each.local))
        assert env["NODE_RANK"] == str(each.node)
        assert env["MASTER_ADDR"] == each.addresses[0]
    assert len({each.environment["MASTER_PORT"] for each in seen}) == 1


@pytest.mark.slow
def test_ranks_meet_at_the_port_of_the_first_node(pool: sky.ComputePool) -> None:
    assert sky.compute(procs=2)(meet)() @ pool == [[0, 1, 2, 3]] * 4


@pytest.mark.slow
def test_each_gang_gets_fresh_processes(pool: sky.ComputePool) -> None:
    first, second = look() @ pool, look() @ pool
    assert not {each.pid for each in first} & {each.pid for each in second}


def test_a_gang_on_one_node_gives_the_value_of_its_first_rank(pool: sky.ComputePool) -> None:
    seen = look() >> pool
    assert (seen.rank, seen.world, seen.nodes) == (0, 2, 1)
    pinned = look().with_options(node=1) >> pool
    assert pinned.rank == 0
    assert [each.rank for each in look().with_options(node=[1]) >> pool] == [0, 1]
    assert look.with_options(procs=3)().with_options(node="all") >> pool


def test_a_node_without_devices_gets_one_process_per_device(pool: sky.ComputePool) -> None:
    assert [each.world for each in look.with_options(procs="per-device")() @ pool] == [2, 2]


def test_maps_and_futures_run_gangs_side_by_side(pool: sky.ComputePool) -> None:
    @sky.compute(procs=2)
    def square(x: int) -> tuple[int, int, int]:
        return x * x, sky.instance_info().rank, sky.instance_info().world_size

    assert list(pool.map(square, range(6))) == [(x * x, 0, 2) for x in range(6)]
    assert pool.submit(square, 3).result() == (9, 0, 2)
    assert (square(4) & square(5)) >> pool == ((16, 0, 2), (25, 0, 2))
    assert list(pool.map(square, range(5), buffersize=2)) == [(x * x, 0, 2) for x in range(5)]


def test_gangs_never_share_a_node_and_other_calls_wait_for_them(pool: sky.ComputePool, tmp_path: Path) -> None:
    @sky.compute(procs=2)
    def exclusive(folder: str) -> float:
        """Fail if another gang is on this node."""
        mark = Path(folder) / f"{sky.instance_info().addresses}-{os.environ['NODE_RANK']}-{os.environ['LOCAL_RANK']}"
        with mark.open("x"):
            time.sleep(0.05)
        mark.unlink()
        return time.monotonic()

    @sky.compute
    def plain(x: int) -> int:
        return x

    futures: list[sky.CallFuture[Any]] = []
    for x in range(4):
        futures += [exclusive(str(tmp_path)).with_options(node="all") > pool, plain(x) > pool]
    for future in futures:
        future.result(timeout=60)
    assert plain(7) >> pool == 7


def leave_mark(path: Path) -> None:
    """Leave the number of this process as a symbolic link, which is made at once: a file could stay empty at a kill."""
    path.symlink_to(str(os.getpid()))


@sky.compute(procs=2, grace=GRACE, output="silent")
def fails(how: str, rank: int, folder: str) -> int:
    """End as `how` says on one rank, once all ranks run. The others wait for long."""
    me = sky.instance_info()
    leave_mark(Path(folder) / f"{me.attempt}-{me.rank}")
    while len(list(Path(folder).glob(f"{me.attempt}-*"))) < me.world_size:
        time.sleep(0.005)
    if me.rank == rank and me.attempt == 1:
        match how:
            case "raise":
                raise KeyError("mine")
            case "exit":
                raise SystemExit(3)
            case "_exit":
                os._exit(5)
            case "hang":
                time.sleep(600)
            case _:
                os.kill(os.getpid(), getattr(signal, how))
    if how == "hang" or me.attempt > 1:
        return me.rank
    time.sleep(600)
    return me.rank


def gone(folder: Path) -> bool:
    """Return True if no process that left its number in the folder is alive."""
    return not any(Path("/proc", each.readlink()).exists() for each in folder.iterdir())


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("raise", KeyError),
        pytest.param("exit", RemoteError, marks=pytest.mark.slow),
        pytest.param("_exit", WorkerDied, marks=pytest.mark.slow),
        ("SIGKILL", WorkerDied),
        pytest.param("SIGSEGV", WorkerDied, marks=pytest.mark.slow),
    ],
)
def test_the_rank_that_began_is_named_and_the_others_are_gone(
    pool: sky.ComputePool, tmp_path: Path, how: str, kind: type[BaseException]
) -> None:
    began = time.monotonic()
    with pytest.raises(kind) as caught:
        fails(how, 2, str(tmp_path)) @ pool
    assert time.monotonic() - began < AT_MOST
    assert "failed first on rank 2 (node 1), one of 4 processes" in caught.value.__notes__[-1]
    assert vars(caught.value)["rank"] == 2
    assert vars(caught.value)["node"] == 1
    eventually(lambda: gone(tmp_path))


@pytest.mark.slow
def test_a_gang_that_is_too_slow_names_the_ranks_that_had_not_ended(pool: sky.ComputePool, tmp_path: Path) -> None:
    for timeout in (5, 60):  # on a busy machine, the other ranks may not have ended within 5 s either
        with pytest.raises(CallTimeout, match=r"gang of 4 processes .* had not ended: ") as e:
            fails("hang", 3, str(tmp_path)).with_options(timeout=timeout) @ pool
        eventually(lambda: gone(tmp_path))
        if "rank 0" not in str(e.value):
            break
    assert str(e.value).endswith("had not ended: rank 3 (node 1, process 1)")
    assert list(e.value.stacks) == [3]
    assert "in fails" in e.value.stacks[3]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGKILL", "raise"])
def test_a_gang_runs_again_as_a_whole(pool: sky.ComputePool, tmp_path: Path, how: str) -> None:
    heard: list[events.GangFailed] = []
    stop = pool.events.listen(lambda e: heard.append(e) if isinstance(e, events.GangFailed) else None)
    try:
        again = fails(how, 1, str(tmp_path)).with_options(retries=1, retry_on=KeyError)
        assert again @ pool == [0, 1, 2, 3]
    finally:
        stop()
    assert [(each.rank, each.node, each.again, each.attempt) for each in heard] == [(1, 0, True, 1)]
    assert sorted(each.name for each in tmp_path.iterdir()) == [f"{a}-{r}" for a in (1, 2) for r in range(4)]


@pytest.mark.slow
def test_an_exception_without_retry_on_is_not_tried_again(pool: sky.ComputePool, tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="mine"):
        fails("raise", 0, str(tmp_path)).with_options(retries=3) @ pool
    assert not list(tmp_path.glob("2-*"))


@pytest.mark.slow
def test_a_cancelled_gang_is_gone(pool: sky.ComputePool, tmp_path: Path) -> None:
    future = fails("none", 9, str(tmp_path)).with_options(node="all") > pool
    eventually(lambda: len(list(tmp_path.iterdir())) == 4)
    assert future.cancel()
    assert future.wait_stopped(AT_MOST)
    eventually(lambda: gone(tmp_path))
    assert look() >> pool


def test_the_output_of_a_rank_that_failed_is_part_of_the_error(pool: sky.ComputePool) -> None:
    @sky.compute(procs=2)
    def speak() -> None:
        print("words of rank", sky.instance_info().rank, flush=True)
        if sky.instance_info().rank == 3:
            time.sleep(0.3)  # the output comes in a message of its own
            raise ValueError("no")
        time.sleep(600)

    with pytest.raises(ValueError, match="no") as caught:
        speak() @ pool
    assert "last output of rank 3:\n  words of rank 3" in caught.value.__notes__[-1]


def test_only_rank_0_is_heard_if_asked(pool: sky.ComputePool) -> None:
    heard: list[events.Output] = []
    stop = pool.events.listen(lambda e: heard.append(e) if isinstance(e, events.Output) else None)

    @sky.compute(procs=2, output="rank0")
    def speak() -> None:
        print("rank", sky.instance_info().rank, flush=True)

    try:
        speak() @ pool
        eventually(lambda: "rank 0" in "".join(each.text for each in heard))
    finally:
        stop()
    assert "".join(each.text for each in heard).splitlines() == ["rank 0"]


def test_a_rank_that_is_not_heard_shows_its_last_output_in_its_error(pool: sky.ComputePool) -> None:
    @sky.compute(procs=2, output="rank0")
    def speak() -> None:
        print("words of rank", sky.instance_info().rank, flush=True)
        if sky.instance_info().rank == 3:
            time.sleep(0.3)  # the output comes in a message of its own
            raise ValueError("no")
        time.sleep(600)

    with pytest.raises(ValueError, match="no") as caught:
        speak() @ pool
    assert "last output of rank 3:\n  words of rank 3" in caught.value.__notes__[-1]


def total(numbers: Iterator[int]) -> int:
    return sum(numbers)


def test_what_a_gang_cannot_do_is_refused_in_one_line(pool: sky.ComputePool) -> None:
    def items() -> Iterator[int]:
        yield 1

    with pytest.raises(UsageError, match="generator function, which cannot run as a gang"):
        sky.compute(procs=2)(items)
    with pytest.raises(UsageError, match="iterator among its arguments"):
        sky.compute(procs=2)(total)(iter([1])) @ pool
    with pytest.raises(UsageError, match=r"procs .* must be at least 1, not 0"):
        sky.compute(procs=0)
    with pytest.raises(UsageError, match="procs must be at most 128"):
        sky.compute(procs=129)
    with pytest.raises(UsageError, match="min_nodes is for gangs"):
        sky.compute(min_nodes=1)
    with pytest.raises(UsageError, match="exclude each other"):
        sky.compute(procs=2, independent=True)
    with pytest.raises(UsageError, match="min_nodes=3 is more than the 2 nodes"):
        look.with_options(min_nodes=3)() @ pool
    with pytest.raises(UsageError, match="rank0"):
        sky.compute(output="rank0")


@pytest.mark.slow
def test_a_lost_node_is_replaced_before_the_gang_runs_again(tmp_path: Path) -> None:
    with sky.ComputePool(nodes=2, console="off") as pool:
        future = fails("none", 9, str(tmp_path)).with_options(node="all", retries=1) > pool
        eventually(lambda: len(list(tmp_path.iterdir())) == 4)
        lose_node(pool, 1)
        assert future.result(timeout=60) == [0, 1, 2, 3]
        assert sorted(pool.nodes.items())[0] == (0, "ready")


@pytest.mark.slow
def test_a_lost_node_without_retries_is_told_with_its_first_rank(tmp_path: Path) -> None:
    with sky.ComputePool(nodes=2, console="off") as pool:
        future = fails("none", 9, str(tmp_path)).with_options(node="all") > pool
        eventually(lambda: len(list(tmp_path.iterdir())) == 4)
        lose_node(pool, 1)
        with pytest.raises(ConnectionLost) as caught:
            future.result(timeout=60)
        assert (caught.value.rank, caught.value.node) == (2, 1)
        assert [type(each) for each in caught.value.others] == [ConnectionLost]
        eventually(lambda: gone(tmp_path))


@pytest.mark.parametrize("said", ["soon", None, [1.0], math.nan, -1.0, -math.inf, 0])
def test_seconds_of_a_node_that_are_none_count_as_0(said: Any) -> None:
    error = NodeInterrupted("gone", 0)
    error.left = said
    assert seconds_left(error) == 0.0
    assert seconds_left(ValueError()) == 0.0


@pytest.mark.parametrize(("said", "seconds"), [(30, 30.0), (1e12, 600.0), (10**400, 600.0), (math.inf, 600.0)])
def test_the_seconds_of_a_notice_are_bounded(said: float, seconds: float) -> None:
    error = NodeInterrupted("gone", 0)
    error.left = said
    assert seconds_left(error) == seconds


def test_only_texts_are_notes() -> None:
    error = ValueError()
    for notes, found in ((["a", 1, None, "b"], ["a", "b"]), ("text", []), (3, []), (None, [])):
        vars(error)["__notes__"] = notes
        assert notes_of(error) == found


@pytest.mark.slow
def test_a_gang_runs_again_whatever_its_node_says_of_the_time_that_is_left(
    pool: sky.ComputePool, tmp_path: Path
) -> None:
    @sky.compute(procs=2, grace=GRACE)
    def interrupted() -> int:
        run = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if os.environ["RANK"] == "1" and run < 2:
            error = NodeInterrupted("told to end", 0)
            error.left = ("soon", 1e12)[run]  # type: ignore[assignment]
            raise error
        time.sleep(0.5)
        return run

    assert (interrupted() > pool).result(timeout=60) == 2


class Refuses(Exception):
    """An exception that takes no notes and has no text."""

    def add_note(self, note: str) -> None:
        raise RuntimeError(f"no {note}")

    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.slow
def test_an_exception_that_refuses_notes_and_text_is_raised_as_itself_and_no_node_is_lost(
    pool: sky.ComputePool,
) -> None:
    @sky.compute(procs=2, grace=GRACE)
    def refuse() -> None:
        raise Refuses

    with pytest.raises(Refuses) as caught:
        refuse() @ pool
    assert "refuse failed first on rank" in caught.value.__notes__[-1]
    with pytest.raises(Refuses):
        refuse.with_options(procs=None)() @ pool
    assert set(pool.nodes.values()) == {"ready"}


@pytest.mark.slow
def test_a_gang_that_waits_in_a_pool_that_became_too_small_says_so(tmp_path: Path) -> None:
    with sky.ComputePool(nodes=2, console="off") as pool:
        mark = tmp_path / "mark"

        @sky.compute
        def wait() -> None:
            mark.touch()
            time.sleep(1)

        busy = wait().with_options(node=0) > pool
        waits = look().with_options(node="all") > pool
        eventually(mark.exists)
        pool.resize(1)
        with pytest.raises(ConnectionLost, match=r"needs 2 nodes at once, but pool '.*' has 1 and rents no more"):
            waits.result(timeout=60)
        busy.result(timeout=30)
        assert look() >> pool


@pytest.mark.slow
def test_the_pools_end_ends_its_gangs(tmp_path: Path) -> None:
    with sky.ComputePool(nodes=2, console="off") as pool:
        future = fails("none", 9, str(tmp_path)).with_options(node="all") > pool
        waits = look().with_options(node="all") > pool
        eventually(lambda: len(list(tmp_path.iterdir())) == 4)
        pool.stop()
        for each in (future, waits):
            with pytest.raises(PoolClosed):
                each.result(timeout=30)
    eventually(lambda: gone(tmp_path))


def lose_node(pool: sky.ComputePool, node: int) -> None:
    """Kill the agent of a local node, and with it all of its processes."""
    os.kill(agent_of(pool, node), signal.SIGKILL)


# --- machines that come and go -------------------------------------------------------------------------------


@sky.compute(procs=2, grace=GRACE, output="silent")
def outlive(folder: str) -> tuple[int, int, bool]:
    """In the first run, wait for the notice of a machine and leave a mark. Return attempt, size, and if it changed."""
    me = sky.instance_info()
    leave_mark(Path(folder) / f"{me.attempt}-{me.rank}")
    if me.attempt == 1:
        while sky.interruption() is None:
            time.sleep(0.02)
        leave_mark(Path(folder) / f"noticed-{me.rank}")
        time.sleep(600)
    return me.attempt, me.world_size, me.world_changed


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[FakeCloud]:
    with FakeCloud(tmp_path / "cloud") as made:
        yield made


@pytest.mark.slow
def test_every_rank_hears_a_notice_and_the_gang_runs_again_without_a_retry(cloud: FakeCloud, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    with Watched(cloud, nodes=2, market="spot", liveness=6) as pool:
        future = outlive(str(marks)).with_options(node="all") > pool
        eventually(lambda: len(list(marks.glob("1-*"))) == 4)
        pool.notify(1)
        eventually(lambda: len(list(marks.glob("noticed-*"))) == 4, what="the notice on all ranks")
        assert not future.done()
        pool.take(1)
        assert future.result(timeout=90) == [(2, 4, False)] * 4
        assert [each.again for each in pool.heard(events.GangFailed)] == [True]


@pytest.mark.slow
@pytest.mark.parametrize("least", [None, 1])
def test_a_gang_without_replacements_shrinks_only_if_it_may(
    cloud: FakeCloud, tmp_path: Path, least: int | None
) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    with Watched(cloud, nodes=2, market="spot", liveness=6) as pool:
        future = outlive(str(marks)).with_options(node="all", min_nodes=least) > pool
        eventually(lambda: len(list(marks.glob("1-*"))) == 4)
        cloud.control.refuse(CapacityError, times=None)
        pool.take(1)
        if least:
            assert future.result(timeout=90) == [(2, 2, True)] * 2
            assert any("runs again as 2 processes on 1 node" in each.text for each in pool.heard(events.Notice))
        else:
            with pytest.raises(ConnectionLost) as caught:
                future.result(timeout=90)
            assert "was not run again" in caught.value.__notes__[-1]
        again = [True] if least else [True, False]
        eventually(lambda: [each.again for each in pool.heard(events.GangFailed)] == again, what="the failures")
