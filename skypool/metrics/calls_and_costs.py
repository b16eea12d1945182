"""Converts calls, nodes, kept folders, launches and costs of a pool into measurements. All functions are pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from skypool.calls.tally import BOUNDS, NodeCounts, PoolCounts
from skypool.metrics import names
from skypool.metrics.values import Attributes, Distribution, Measurement
from skypool.rental.orders import OrderKey
from skypool.rental.receipt import Line
from skypool.wire.save_orders import FolderState

STATES = ("launching", "booting", "bootstrapping", "ready", "unreachable", "leaving", "unhealthy", "draining", "ended")
"""All states that a node can have."""


def state_of(word: str) -> str:
    """Return the first word of a node's state in `pool.nodes`: "unreachable" for "unreachable since 12:03:04"."""
    return word.partition(" ")[0]


def node_attributes(pool: Attributes, node: int, provider: str, offer: str) -> Attributes:
    """Return the attributes of a node, with those of its pool. `offer` is its machine type. "" means unknown."""
    return {
        **pool,
        "skypool.node": node,
        **({"skypool.provider": provider} if provider else {}),
        **({"skypool.offer": offer} if offer else {}),
    }


def state_measurements(words: Mapping[int, str], pool: Attributes) -> Iterator[Measurement]:
    """Yield the number of nodes in each state; 0 for states without a node. `words` has the state of each node."""
    found = Counter(map(state_of, words.values()))
    for state in dict.fromkeys((*STATES, *found)):
        yield Measurement(names.NODES, found[state], {**pool, "skypool.state": state})


def call_measurements(counts: PoolCounts, pool: Attributes) -> Iterator[Measurement]:
    """Yield the measurements of a pool's calls. `pool` has the attributes that all measurements of the pool get."""
    ended = counts.ended
    for outcome in ("ok", "failed", "cancelled"):
        yield Measurement(names.CALLS, getattr(ended, outcome), {**pool, "skypool.outcome": outcome})
    yield Measurement(names.CALLS_RETRIED, ended.retried, pool)
    yield Measurement(names.CALLS_RUNNING, counts.running, pool)
    yield Measurement(names.CALLS_WAITING, counts.waiting, pool)
    yield Measurement(names.CALL_DURATION, Distribution(BOUNDS, ended.classes, ended.seconds), pool)


def slot_measurements(counts: NodeCounts, node: Attributes) -> Iterator[Measurement]:
    """Yield the number of slots of a node, and how many of them are busy. A node that takes no calls yields nothing."""
    for each in counts.slots:
        attributes = {**node, "skypool.slot": "cpu" if each.on_cpu else "all"}
        yield Measurement(names.NODE_SLOTS, each.slots, attributes)
        yield Measurement(names.NODE_CALLS, each.busy, attributes)


def folder_measurements(folder: FolderState, node: Attributes) -> Iterator[Measurement]:
    """Yield what a node saves of a folder that it keeps in a bucket: only trouble at first, and nothing at the end."""
    if folder.phase == "ended":
        return
    attributes = {**node, "skypool.folder": folder.id}
    yield Measurement(names.FOLDER_TROUBLE, int(bool(folder.trouble)), attributes)
    if folder.is_open:
        yield Measurement(names.FOLDER_FILES, folder.files, attributes)
        yield Measurement(names.FOLDER_SAVED, folder.bytes, attributes)
        yield Measurement(names.FOLDER_UNSAVED_FILES, folder.unsaved, attributes)
        yield Measurement(names.FOLDER_UNSAVED, folder.unsaved_bytes, attributes)
        yield Measurement(names.FOLDER_OLDEST, folder.oldest, attributes)
        if folder.rate:
            yield Measurement(names.FOLDER_RATE, folder.rate, attributes)


def launch_measurements(orders: Mapping[OrderKey, int], pool: Attributes) -> Iterator[Measurement]:
    """Yield the numbers of orders of machines, which `orders` has by (provider, machine type, outcome)."""
    for (provider, offer, outcome), count in orders.items():
        attributes = {"skypool.provider": provider, "skypool.offer": offer, "skypool.outcome": outcome}
        yield Measurement(names.LAUNCHES, count, {**pool, **attributes})


def cost_measurements(lines: Iterable[Line], budget: float | None, pool: Attributes) -> Iterator[Measurement]:
    """Yield the costs of a pool by node, from its receipt. Machines that have ended are included.

    `lines` are those of the receipt. The budget is in US dollars; None without a budget.
    """
    nodes: dict[tuple[int, str, str], list[Line]] = {}
    for line in lines:
        nodes.setdefault((line.node, line.provider, line.type), []).append(line)
    for (node, provider, offer), theirs in nodes.items():
        attributes = node_attributes(pool, node, provider, offer)
        rate = sum(each.usd_per_hour for each in theirs if not each.ended and each.billed_from is not None)
        yield Measurement(names.COST, sum(each.usd for each in theirs), attributes)
        yield Measurement(names.COST_RATE, rate, attributes)
        idle = [(each.idle_usd, each.idle_seconds) for each in theirs]
        if all(usd is not None for usd, _ in idle):
            yield Measurement(names.IDLE_COST, sum(usd or 0.0 for usd, _ in idle), attributes)
            yield Measurement(names.IDLE_TIME, sum(seconds or 0.0 for _, seconds in idle), attributes)
    if budget is not None:
        yield Measurement(names.BUDGET, budget, pool)
