"""Decides which slices of a pool to retire when it becomes smaller, and which requests are not valid.

The functions are pure.
"""

from __future__ import annotations

from collections.abc import Mapping

from skypool.errors import UsageError
from skypool.pool.replacement import LIVING
from skypool.pool.states import Node, Pool


def surplus(pool: Pool, load: Mapping[int, int]) -> list[int]:
    """Return the slices to retire so that a pool has at most its new `maximum`, by the numbers of their first hosts.

    Slices that are not ready come first: they run no calls. Then come those with the fewest calls, and of several with
    equally many, the one with the highest number. `load` is the number of calls that run on each node or wait for it.
    """
    heads = [state for state in pool.nodes.values() if not state.host and _is_staying(state)]

    def rank(head: Node) -> tuple[int, int, int]:
        calls = sum(load.get(each.node, 0) for each in pool.slice_of(head.node))
        return LIVING.index(head.phase), calls, -head.node

    heads.sort(key=rank)
    return [head.node for head in heads[: max(0, len(heads) - pool.maximum)]]


def check_retirement(pool: Pool, name: str, node: int) -> None:
    """Raise UsageError if a node cannot be retired: it has ended or never existed, or is the last node of the pool.

    Of a slice with several hosts, only the first host is accepted. A node that leaves already is accepted. `name` is
    the name of the pool.
    """
    state = pool.nodes.get(node)
    if state is None or state.phase not in LIVING:
        there = sorted(each.node for each in pool.nodes.values() if each.phase in LIVING)
        what = "has ended already" if state is not None else "does not exist"
        raise UsageError(f"node {node} of pool {name!r} {what}; its nodes are {there}")
    if state.host:
        last = max(each.node for each in pool.slice_of(node))
        raise UsageError(
            f"node {node} is one of the nodes {state.head} to {last}, which are rented together and end only together: "
            f"pool.retire({state.head}) retires all of them"
        )
    if not state.is_leaving and pool.count(*LIVING) <= 1:
        raise UsageError(
            f"node {node} is the last one of pool {name!r}, so it cannot be retired: pool.stop() ends the pool"
        )


def _is_staying(state: Node) -> bool:
    return state.phase in LIVING and not state.is_leaving
