"""Views of some nodes of a pool: `pool[0]`, `pool[0:2]` and `pool[[0, 2]]`. Calls to a view run only there."""

from __future__ import annotations

import http.server
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

import skypool as sky
from skypool.errors import UsageError
from tests.conftest import eventually, served
from tests.work import add, count, where


@sky.compute
def rank(_: int = 0) -> tuple[int, int]:
    """The number of the node that runs this process of a gang, as its folder has it, and the rank of the process."""
    (folder,) = (Path(each).parent.name for each in sys.path if each.endswith(".zip") and "skypool-" in each)
    return int(folder.split(".")[1]), sky.instance_info().rank


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(nodes=3, slots=1, console="off") as made:
        yield made


def test_calls_to_a_view_run_only_on_its_nodes(pool: sky.ComputePool) -> None:
    assert [where() >> pool[node] for node in (2, 0, 1)] == [2, 0, 1]
    assert (where() > pool[2]).result(60) == 2
    assert {where() >> pool[1:] for _ in range(6)} <= {1, 2}
    futures = [where() > pool[[0, 2]] for _ in range(20)]
    assert {future.result(60) for future in futures} == {0, 2}
    assert (where() & where()) >> pool[1] == (1, 1)
    assert list(sky.gather(*[where() for _ in range(4)], stream=True) >> pool[0]) == [0] * 4
    assert pool[2].submit(where).result(60) == 2
    assert list(count(3) >> pool[1]) == [0, 1, 2]


def test_the_nodes_that_send_names_must_be_in_the_view(pool: sky.ComputePool) -> None:
    assert pool[1:].send(where(), node=2).result(60) == 2
    assert pool[1:].send(add(1), node="all").result(60) == [2, 2]
    with pytest.raises(UsageError, match="asks for node 0, which"):
        pool[1:].send(where(), node=0)


def test_a_service_of_a_view_runs_on_its_first_node_or_on_each(pool: sky.ComputePool) -> None:
    with pool[1:].service(sky.cmd("sleep", "600")) as service:
        assert service.node == 1
    both = pool[1:].service(sky.cmd("sleep", "600"), node="all")
    assert [each.node for each in both] == [1, 2]
    for each in both:
        each.close()
    with pytest.raises(UsageError, match="asks for node 0, which"):
        pool[1:].service(sky.cmd("sleep", "600"), node=0)


def test_a_broadcast_to_a_view_runs_on_each_of_its_nodes(pool: sky.ComputePool) -> None:
    assert len(add(1) @ pool[0:2]) == 2
    assert len(add(1) @ pool[:]) == 3
    assert len(add(1) @ pool[0::2]) == 2
    assert add(1) @ pool[1] == [2]
    everywhere = add(1).with_options(node="all")
    assert everywhere >> pool[[0, 2]] == [2, 2]
    assert (everywhere > pool[1:]).result(60) == [2, 2]
    assert [list(items) for items in count(2) @ pool[0:2]] == [[0, 1], [0, 1]]


def test_a_gang_that_is_sent_to_a_view_runs_on_its_nodes(pool: sky.ComputePool) -> None:
    two = rank.with_options(procs=2)
    assert two() @ pool[1:] == [(1, 0), (1, 1), (2, 2), (2, 3)]
    assert two() @ pool[0] == [(0, 0), (0, 1)]
    assert two() >> pool[2] == (2, 0)
    assert (two() > pool[1]).result(60) == (1, 0)
    assert {node for node, _ in pool[1:].map(two, [0] * 4)} <= {1, 2}


def test_map_over_a_view_uses_only_its_nodes(pool: sky.ComputePool) -> None:
    assert set(pool[[0, 2]].map(where, [""] * 40)) == {0, 2}
    assert set(pool[1].map(where, [""] * 5)) == {1}
    assert list(pool[0:2].map(add, range(3), range(3), buffersize=1, timeout=60)) == [0, 2, 4]


def test_the_option_node_chooses_among_the_nodes_of_a_view(pool: sky.ComputePool) -> None:
    assert where().with_options(node=2) >> pool[1:] == 2
    assert len(where().with_options(node=[0, 1]) >> pool[0:2]) == 2
    with pytest.raises(UsageError, match=r"asks for node 0, which <.*\[1:\]> does not have; its nodes are"):
        where().with_options(node=0) >> pool[1:]
    with pytest.raises(UsageError, match="asks for node 0"):
        pool[1:].map(where.with_options(node=[0, 1]), [""])


def test_a_view_names_the_states_of_its_nodes(pool: sky.ComputePool) -> None:
    assert dict(pool[1:].nodes) == {1: "ready", 2: "ready"}
    assert dict(pool[0].nodes) == {0: "ready"}
    assert dict(pool[[0, 2]].nodes) == {0: "ready", 2: "ready"}
    assert dict(pool[7].nodes) == {}
    assert pool[0:2].numbers() == (0, 1)
    names = [repr(pool[key]).partition("[")[2] for key in (0, slice(0, 4), slice(None), slice(1, None, 2), [2, 0])]
    assert names == ["0]>", "0:4]>", ":]>", "1::2]>", "[0, 2]]>"]


def test_a_forward_of_a_view_leads_to_its_first_node(pool: sky.ComputePool) -> None:
    with served(http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)) as server:
        with pool[1:].forward(server.server_port) as forward:
            assert forward.node == 1
        with pool[1:].forward(server.server_port, 2) as forward:
            assert forward.node == 2
        with pytest.raises(UsageError, match="asks for node 0, which"):
            pool[1:].forward(server.server_port, 0)


def test_nodes_that_a_pool_does_not_have_are_refused_when_the_view_is_used(pool: sky.ComputePool) -> None:
    for view in (pool[7], pool[[0, 7]]):
        with pytest.raises(UsageError, match=r"has no node 7; its nodes are \[0, 1, 2\]"):
            where() >> view
    missing = pool[5:8]
    uses: list[Callable[[], object]] = [
        lambda: where() >> missing,
        lambda: where() > missing,
        lambda: where() @ missing,
        lambda: missing.map(where, [""]),
    ]
    for use in uses:
        with pytest.raises(UsageError, match=r"has no node in the range of .*\[5:8\]>; its nodes are \[0, 1, 2\]"):
            use()


@pytest.mark.parametrize(
    "key", [-1, "0", True, None, 1.5, [], [0, 0], [-1], slice(-2, None), slice(2, 1), slice(0, 4, 0)]
)
def test_what_names_no_nodes_is_refused_at_once(pool: sky.ComputePool, key: object) -> None:
    with pytest.raises(UsageError):
        pool[key]  # type: ignore[index]  # as users may


def test_a_view_starts_and_stops_nothing_and_a_pool_is_not_iterable(pool: sky.ComputePool) -> None:
    unstarted = sky.ComputePool(console="off")
    view = unstarted[0:2]
    assert (dict(view.nodes), unstarted.phase) == ({}, "planned")
    with pytest.raises(UsageError, match=r"cannot start or stop its pool: write `with pool:`"), view:
        pass
    assert not hasattr(view, "start")
    assert not hasattr(view, "stop")
    with pytest.raises(TypeError, match="not iterable"):
        iter(unstarted)
    with pytest.raises(TypeError):
        list(view)  # type: ignore[call-overload]  # as users may
    assert not isinstance(unstarted, Iterable)
    with pytest.raises(UsageError, match="takes a call"):
        3 >> view
    with pytest.raises(UsageError, match="takes a call"):
        [where()] @ view
    with pytest.raises(UsageError, match="generator"):
        _ = count(3) > pool[0]
    with pytest.raises(TypeError, match="can be used only in the process"):
        pickle.dumps(view)


def test_a_range_means_the_nodes_that_have_its_numbers_when_a_call_is_sent() -> None:
    with sky.ComputePool(nodes=2, slots=1, console="off") as pool:
        view = pool[1:3]
        assert view.numbers() == (1,)
        pool.resize(3)
        pool.wait_ready(timeout=60)
        assert view.numbers() == (1, 2)
        pool.retire(1)
        eventually(lambda: view.nodes == {1: "ended", 2: "ready"}, what="the end of node 1")
        assert [where() >> view for _ in range(3)] == [2] * 3
