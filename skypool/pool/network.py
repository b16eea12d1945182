"""`NetworkCheck`: makes sure that the nodes of a pool reach each other, before a call needs that.

Each node listens on a free TCP port and connects to all others. The check is one call on each node, which needs no
device.
"""

from __future__ import annotations

import queue
import secrets
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from skypool.calls.call import ComputeFunction, packed
from skypool.calls.dispatch import Dispatch
from skypool.calls.futures import Items
from skypool.calls.options import Options
from skypool.calls.pending_calls import NO_CALL, PendingCall
from skypool.drivers.contract import Driver, abilities
from skypool.gangs.all_reduce import bandwidth_of
from skypool.gangs.network_report import (
    Connection,
    NetworkReport,
    NodeNetwork,
    connections_of,
    error_of,
    node_network,
)
from skypool.gangs.probe import WITHIN, Target, probe
from skypool.rental.pool_terms import Check

BUSY = 10.0
"""Seconds for which the check waits for nodes that are busy with other calls."""
_SPARE = 2.0
"""Seconds that a node may take for its answer in addition to twice `WITHIN`."""
_STOPPING = 1.0
"""The most seconds for which the check waits at its end until the calls on the nodes have closed their ports."""

_PROBE: ComputeFunction[..., object] = ComputeFunction(
    probe, Options(devices=0, output="silent", timeout=BUSY + 2 * WITHIN + _SPARE, grace=1.0)
)
"""The function that nodes run. Because of its timeout, they close their ports also if this process is gone."""

MEASURING = Options(procs="per-device", output="silent", timeout=300.0)
"""The options of the call that measures an all-reduce. It runs as a gang."""


def advice_for(driver: Driver | None, private_network: bool) -> str:
    """Return advice to the user, without a full stop, for the case that machines cannot reach each other.

    Args:
        driver: the driver of their provider; None if the pool has none.
        private_network: True if the pool was made with `private_network=True`.
    """
    ports = "TCP on all ports between the machines of this pool, because libraries choose free ports"
    if driver is None:
        advice = f"Allow {ports}"
    elif (can := abilities(driver)).network_advice:
        advice = can.network_advice
    elif not can.private_network:
        advice = f"Machines of {driver.name} have no network among them: choose another provider"
    elif private_network:
        advice = (
            f"The pool has private_network=True, so look for a firewall in the machines themselves, or for a rule of "
            f"the account or its network that blocks them, and allow {ports}"
        )
    else:
        advice = (
            f"ComputePool(private_network=True) asks {driver.name} for machines with a network among them; otherwise "
            f"add a rule to its firewall or security group that allows {ports}"
        )
    return f"{advice}. ComputePool(check=None) leaves this check out"


class Unanswered(Exception):
    """Raised if nodes did not answer in time, for example because they are busy with other calls."""

    def __init__(self, nodes: Collection[int]) -> None:
        self.nodes = sorted(nodes)
        names = ", ".join(map(str, self.nodes))
        super().__init__(f"{'node' if len(nodes) == 1 else 'nodes'} {names} did not answer in time")


class NetworkCheck:
    """The network check of one pool. It remembers which nodes reach each other.

    Any thread may call the methods, except the thread of the event loop, which carries the answers. `advice` takes the
    number of a node that cannot be reached, and returns a sentence of advice. `tell` shows a sentence to the user.
    """

    def __init__(
        self, dispatch: Dispatch, check: Check | None, advice: Callable[[int], str], tell: Callable[[str], None]
    ) -> None:
        self._dispatch = dispatch
        self._check = check
        self._advice = advice
        self._tell = tell
        self._lock = threading.Lock()
        self._groups: list[frozenset[int]] = []
        self._pairs: set[tuple[int, int]] = set()
        self._told: set[str] = set()
        self._measures = check == "nccl"

    def ensure(self, nodes: Collection[int]) -> NetworkReport | None:
        """Raise a NetworkError unless each of these nodes can connect to each other one. Blocks until that is known.

        Pairs that could connect before are not tried again, so most calls return at once. A notice warns the user of
        possible problems, such as different MTUs. If a node is busy for 10 s, a notice says so, and the nodes are
        checked when this is called again. They are also checked again after a NetworkError. Returns None if nothing was
        checked.

        Raises:
            NetworkError: a node cannot connect to another one.
            ConnectionLost, PoolClosed: a node was lost, or the pool has ended.
            UsageError: the pool does not have one of the nodes.
        """
        group = frozenset(nodes)
        if self._check is None or len(group) < 2 or any(group <= known for known in self._groups):
            return None
        texts: list[str] = []
        try:
            with self._lock:
                if any(group <= known for known in self._groups):
                    return None
                return self._checked(group, texts)
        finally:
            for text in texts:  # without the lock, as a listener may send a call that needs the network
                self._tell(text)

    def _checked(self, group: frozenset[int], texts: list[str]) -> NetworkReport | None:
        """Check that the nodes of a group reach each other. Add sentences for the user to `texts`, each only once."""
        addresses = self._dispatch.roster.nodes(sorted(group))
        try:
            report = check_network(self._dispatch, addresses, self._pairs)
        except Unanswered as e:
            why = self._dispatch.roster.occupants(e.nodes) or "other calls"
            texts += self._not_told(
                f"the network between the nodes was not checked, because {e}, as when {why} keep a node busy; it "
                "is checked before the next call that needs it"
            )
            return None
        texts += self._not_told(*report.warnings)
        self._pairs |= {(each.source, each.target) for each in report.connections if each.outcome == "ok"}
        if report.failed and (error := error_of(report, self._advice(report.failed[0].target))) is not None:
            raise error
        self._groups = [*(known for known in self._groups if not known <= group), group]
        return report

    def _not_told(self, *texts: str) -> list[str]:
        """Return those of the texts that the user was not told before. Note that they are told now."""
        new = [each for each in dict.fromkeys(texts) if each not in self._told]
        self._told.update(new)
        return new

    def begin_measuring(self) -> bool:
        """Return True if the caller must measure an all-reduce now.

        It is True for the first caller if the pool has `check="nccl"`, and False otherwise.
        """
        with self._lock:
            measures = self._measures
            self._measures = False
            return measures

    def tell_bandwidth(self, answers: Sequence[object]) -> None:
        """Tell the user the bandwidth of an all-reduce, or why it was not measured.

        `answers` has what each process of the measuring call returned.
        Raises ProtocolError if a result has another form than that of `skypool.gangs.all_reduce.all_reduce`.
        """
        measured = bandwidth_of(answers)
        self._tell(f'check="nccl" measured nothing: {measured}' if isinstance(measured, str) else str(measured))


class _Answers:
    """The call with which one node takes part in the check. It gets lists of nodes to connect to, and sends answers."""

    def __init__(self, dispatch: Dispatch, node: int, address: str) -> None:
        self._targets: queue.SimpleQueue[Sequence[Target] | None] = queue.SimpleQueue()
        self.token = secrets.token_hex(16)
        self.items: Items[object] = Items("network check")
        call = packed(_PROBE(address, self.token, self._feed(), WITHIN))
        dispatch.submit(
            PendingCall(call.code, call.payload, self.items, call.options, node=node, feeds=call.feeds, part_of=NO_CALL)
        )

    def _feed(self) -> Iterator[Sequence[Target]]:
        """Yield the items for the node: each list passed to `send`, until `end` is called."""
        while (targets := self._targets.get()) is not None:
            yield targets

    def send(self, targets: Sequence[Target]) -> None:
        """Send the node the list of nodes to connect to."""
        self._targets.put(targets)

    def end(self) -> None:
        """Let the node close its port and return."""
        self._targets.put(None)


def check_network(
    dispatch: Dispatch, addresses: Mapping[int, str], known: Collection[tuple[int, int]] = ()
) -> NetworkReport:
    """Let nodes connect to each other, and return a report. Blocks for at most about 18 s, mostly far less.

    Args:
        addresses: the address of each node, by its number; "" if unknown.
        known: pairs of node numbers (source, target) that need not be tried.

    Raises:
        Unanswered: a node was busy with other calls for 10 s, or did not answer in time.
        ConnectionLost, PoolClosed: a node was lost, or the pool has ended.
        SkypoolError: the check failed on a node for another reason, such as a firewall that keeps the node from
            connecting to itself.
    """
    calls: dict[int, _Answers] = {}
    facts: dict[int, NodeNetwork] = {}
    try:
        for node, address in addresses.items():
            calls[node] = _Answers(dispatch, node, address)
        with _Deadline(BUSY, calls, lambda: Unanswered(calls.keys() - facts.keys())):
            for node, call in calls.items():
                facts[node] = node_network(node, addresses[node], next(call.items))
        wanted = {node: [each for each in calls if each != node and (node, each) not in known] for node in calls}
        for node, call in calls.items():
            call.send([(each, addresses[each], facts[each].port, calls[each].token) for each in wanted[node]])
        found: dict[int, list[Connection]] = {}
        with _Deadline(2 * WITHIN + _SPARE, calls, lambda: Unanswered(calls.keys() - found.keys())):
            for node, call in calls.items():
                found[node] = connections_of(node, wanted[node], next(call.items))
    except BaseException:
        for call in calls.values():
            call.items.close()
        raise
    finally:
        for call in calls.values():
            call.end()
    for call in calls.values():
        call.items.wait_stopped(_STOPPING)
    return NetworkReport(facts, tuple(each for some in found.values() for each in some))


class _Deadline:
    """A time limit, in seconds, for a `with` block that reads answers. When it is over, reading raises an error."""

    def __init__(self, seconds: float, calls: Mapping[int, _Answers], error: Callable[[], Exception]) -> None:
        self._calls = calls
        self._error = error
        self._timer = threading.Timer(seconds, self._fail)
        self._timer.daemon = True

    def _fail(self) -> None:
        error = self._error()
        failed = [call for call in self._calls.values() if call.items.fail(error)]
        for call in failed:  # only now, as a node that is stopped closes its port, and the others cannot reach it then
            call.items.stop()

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
