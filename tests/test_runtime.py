"""Inside a function: which part of the data is mine. The parts of all nodes together are the whole."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skypool import runtime
from skypool.errors import UsageError
from skypool.runtime import InstanceInfo, instance_info, is_head, part, shard

worlds = st.integers(1, 7)
rows = st.integers(0, 60)


@contextlib.contextmanager
def on(node: int, nodes: int) -> Iterator[None]:
    """As if this process were node `node` of `nodes`."""
    before = runtime._process, runtime._call, runtime._world
    runtime.enter(InstanceInfo(pool="p", node=node, nodes=nodes))
    try:
        yield
    finally:
        runtime._process, runtime._call, runtime._world = before


def on_each(nodes: int, *data: Any, **options: Any) -> list[Any]:
    """What `shard` gives on each of `nodes` nodes."""
    parts = []
    for node in range(nodes):
        with on(node, nodes):
            parts.append(shard(*data, **options))
    return parts


def chained(parts: list[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(parts))


# --- parts ---------------------------------------------------------------------------------------------------


@given(rows, worlds)
def test_the_parts_together_are_the_whole_in_order_and_even(length: int, nodes: int) -> None:
    data = list(range(length))
    parts = on_each(nodes, data)
    assert chained(parts) == data
    sizes = [len(each) for each in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(rows, worlds, st.integers())
def test_shuffled_parts_together_are_the_whole_in_one_order_on_every_node(length: int, nodes: int, seed: int) -> None:
    data = list(range(length))
    dealt = chained(on_each(nodes, data, shuffle=True, seed=seed))
    assert sorted(dealt) == data
    assert dealt == on_each(1, data, shuffle=True, seed=seed)[0]


@given(rows, worlds, st.booleans())
def test_without_the_last_rows_all_parts_are_of_one_length(length: int, nodes: int, shuffle: bool) -> None:
    parts = on_each(nodes, list(range(length)), shuffle=shuffle, drop_last=True)
    assert {len(each) for each in parts} == {length // nodes}
    together = chained(parts)
    assert len(set(together)) == len(together)


@given(rows, worlds)
def test_parts_of_a_length_do_not_overlap_and_leave_nothing_out(length: int, nodes: int) -> None:
    at = 0
    for node in range(nodes):
        mine = part(length, node, nodes)
        assert mine.start == at
        at = mine.stop
    assert at == length


def test_another_seed_deals_another_order() -> None:
    data = list(range(100))
    assert shard(data, shuffle=True, seed=1) != shard(data, shuffle=True, seed=2)
    assert shard(data, shuffle=True) == shard(data, shuffle=True, seed=0)
    assert data == list(range(100))


# --- kinds ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    ("data", "kind"),
    [([1, 2, 3, 4, 5], list), ((1, 2, 3, 4, 5), tuple), ("abcde", str), (b"abcde", bytes), (np.arange(5), np.ndarray)],
    ids=["list", "tuple", "str", "bytes", "numpy"],
)
def test_a_part_is_of_the_kind_that_was_given(data: Any, kind: type, shuffle: bool) -> None:
    parts = on_each(2, data, shuffle=shuffle)
    assert [type(each) for each in parts] == [kind, kind]
    assert [len(each) for each in parts] == [3, 2]
    assert sorted([*parts[0], *parts[1]]) == list(data)


def test_a_range_stays_a_range_and_shuffled_becomes_a_list() -> None:
    assert on_each(2, range(0, 10, 2)) == [range(0, 6, 2), range(6, 10, 2)]
    dealt = on_each(2, range(0, 10, 2), shuffle=True)
    assert sorted(chained(dealt)) == [0, 2, 4, 6, 8]


class Rows(Sequence[int]):
    """A sequence that knows no slices."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, int):
            raise TypeError(f"{index!r} is no row")
        if index >= 5:
            raise IndexError(index)
        return index * 10


@pytest.mark.parametrize("data", [Rows(), deque([0, 10, 20, 30, 40])], ids=["rows", "deque"])
def test_a_sequence_of_no_known_kind_becomes_a_list(data: Any) -> None:
    assert on_each(2, data) == [[0, 10, 20], [30, 40]]
    assert sorted(chained(on_each(2, data, shuffle=True))) == [0, 10, 20, 30, 40]


class Frame:
    """Rows by `iloc`, and columns by name, as in pandas; it can become an array, too."""

    def __init__(self, column: list[int]) -> None:
        self.column = column

    def __len__(self) -> int:
        return len(self.column)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return Frame(self.column[key])
        raise KeyError(key)

    def __array__(self) -> Any:
        return np.array(self.column)

    @property
    def iloc(self) -> Any:
        return _Located(self)


class _Located:
    def __init__(self, frame: Frame) -> None:
        self.frame = frame

    def __getitem__(self, key: Any) -> Frame:
        if isinstance(key, slice):
            return Frame(self.frame.column[key])
        return Frame([self.frame.column[index] for index in key])


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_table_is_cut_by_its_rows(shuffle: bool) -> None:
    parts = on_each(2, Frame([1, 2, 3, 4, 5]), shuffle=shuffle)
    assert all(isinstance(each, Frame) for each in parts)
    assert sorted(parts[0].column + parts[1].column) == [1, 2, 3, 4, 5]


@given(rows, worlds, st.booleans(), st.booleans())
def test_several_are_cut_alike(length: int, nodes: int, shuffle: bool, drop_last: bool) -> None:
    xs, ys, zs = np.arange(length) * 2, [str(n * 2) for n in range(length)], tuple(range(0, length * 2, 2))
    for x, y, z in on_each(nodes, xs, ys, zs, shuffle=shuffle, drop_last=drop_last):
        assert [str(n) for n in x] == y
        assert tuple(x) == z
        assert type(y) is list


def test_a_matrix_is_cut_by_its_rows() -> None:
    matrix = np.arange(12).reshape(4, 3)
    assert np.array_equal(np.vstack(on_each(3, matrix)), matrix)
    assert [each.shape for each in on_each(3, matrix)] == [(2, 3), (1, 3), (1, 3)]


def test_one_gives_itself_and_several_give_a_tuple() -> None:
    assert shard([1, 2]) == [1, 2]
    assert shard([1, 2], [3, 4]) == ([1, 2], [3, 4])


def test_more_nodes_than_rows_leaves_some_with_nothing() -> None:
    assert on_each(4, [1, 2]) == [[1], [2], [], []]


# --- errors --------------------------------------------------------------------------------------------------


def test_nothing_to_cut_is_refused() -> None:
    with pytest.raises(UsageError, match="at least one sequence"):
        shard()  # type: ignore[call-overload]  # that is what is tested


def test_sequences_of_different_lengths_are_refused_with_their_lengths() -> None:
    with pytest.raises(UsageError, match=r"equal length, but their lengths are \[3, 2\]"):
        shard([1, 2, 3], [1, 2])


@pytest.mark.parametrize("value", [iter([1, 2]), 3, None, {"a": 1}, {1}], ids=lambda value: type(value).__name__)
def test_what_is_no_sequence_is_refused_with_what_to_do(value: Any) -> None:
    with pytest.raises(UsageError, match=f"{type(value).__name__} is not a sequence; pass a list instead"):
        shard(value)


# --- where am I ----------------------------------------------------------------------------------------------


def test_outside_of_a_pool_this_is_node_0_of_1() -> None:
    info = instance_info()
    assert (info.pool, info.node, info.nodes, info.call) == ("", 0, 1, 0)
    assert info.is_head
    assert is_head()
    assert info.accelerator is None
    assert info.vcpus >= 1


def test_a_broadcast_counts_its_own_nodes() -> None:
    with on(5, 9):
        runtime.begin(77, (1, ["10.0.0.4", "10.0.0.5", ""]))
        info = instance_info()
        assert (info.node, info.nodes, info.call) == (1, 3, 77)
        assert (info.addresses, info.head_address) == (("10.0.0.4", "10.0.0.5", ""), "10.0.0.4")
        assert not is_head()
        assert shard([1, 2, 3]) == [2]
        runtime.begin(78, None)
        assert (instance_info().node, instance_info().nodes, instance_info().addresses) == (5, 9, ())


def test_nodes_that_cannot_meet_say_why() -> None:
    with pytest.raises(UsageError, match="send the call with `call @ pool`"):
        _ = InstanceInfo().head_address
    with pytest.raises(UsageError, match="node 0 does not know its own address"):
        _ = InstanceInfo(addresses=("", "10.0.0.5")).head_address


def test_an_iterator_argument_can_only_be_read_where_its_call_runs() -> None:
    with pytest.raises(UsageError, match="by the call that received the argument"):
        next(runtime.Upstream(0))


def test_an_iterator_argument_pulls_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "pull", lambda number: number * 2)
    assert next(runtime.Upstream(21)) == 42
