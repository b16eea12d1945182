"""Decides which slices of a pool to retire when it becomes smaller, and which requests are not valid.

The functions are pure. A slice is one machine, or several hosts that a provider rents out only together. Each host is
a node.
"""

from __future__ import annotations

from collections.abc import Mapping

from skypool.errors import UsageError
from skypool.pool.replacement import LIVING
from skypool.pool.states import Node, Pool


def surplus(pool: Pool, load: Mapping[int, int]) -> list[int]:
    """Return the slices to retire so that a pool has at most `pool.maximum`, by the numbers of their first hosts.

    Slices that are not ready come first: they run no calls. Of the ready ones, those with the fewest calls come first.
    Of several such slices, that with the highest number comes first.

    Args:
        pool: the state of the pool, with the new `maximum`.
        load: a dict from node numbers to the number of calls that run on the node or wait for it.
    """
    heads = [state for state in pool.nodes.values() if not state.host and _is_staying(state)]

    def rank(head: Node) -> tuple[int, int, int]:
        """Return the sort key of a slice. Slices with smaller keys are retired first."""
        calls = sum(load.get(each.node, 0) for each in pool.slice_of(head.node))
        return LIVING.index(head.phase), calls, -head.node

    heads.sort(key=rank)
    return [head.node for head in heads[: max(0, len(heads) - pool.maximum)]]


def check_retirement(pool: Pool, name: str, node: int) -> None:
    """Raise UsageError if a node of a pool cannot be retired. A node that leaves already is accepted.

    Args:
        pool: the state of the pool.
        name: the name of the pool, for the message.
        node: the number of the node.

    Raises:
        UsageError: the pool has no such node, the node is a part of a slice, or no other node would be left.
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
