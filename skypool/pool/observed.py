"""`Observed`: lets observers, such as `skypool ps`, see a pool of this process and run commands on its nodes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict

from skypool import events
from skypool.calls.dispatch import Dispatch
from skypool.calls.tally import NodeCounts
from skypool.console.board import Calls, Figures
from skypool.devices.device import Device
from skypool.errors import LedgerError
from skypool.link.forward import Forward
from skypool.model import Instance
from skypool.observers.reach import local_command
from skypool.pool import states
from skypool.pool.forwards import Forwards
from skypool.pool.health import HealthWatch
from skypool.pool.life import Life
from skypool.rental.receipt import Line, Receipt
from skypool.rental.rental import Rental
from skypool.rental.request import Terms
from skypool.samples.health import NodeHealth
from skypool.samples.values import to_json

_MOST_REASONS = 16
"""The most reasons for the health of a node that are told."""


class Observed:
    """The side of a pool that observers see. They can neither send calls nor rent or end machines through it.

    The methods are called in the threads of `skypool.observers.server`.
    """

    def __init__(
        self,
        terms: Terms,
        stream: events.EventStream,
        life: Life,
        rental: Rental,
        dispatch: Dispatch,
        forwards: Forwards,
        health: HealthWatch,
    ) -> None:
        self._terms = terms
        self._life = life
        self._rental = rental
        self._dispatch = dispatch
        self._forwards = forwards
        self._health = health
        self.listen = stream.follow

    def figures(self) -> Figures:
        """Return costs and newest samples of the pool, for its live view. Costs are None if they are not known."""
        samples = dict(self._health.store.newest)
        try:
            receipt = self._rental.receipt
        except LedgerError:
            return Figures(samples=samples, counts=self._counts())
        return Figures(receipt.usd, receipt.usd_per_hour, receipt.idle_usd, samples, self._counts())

    def _counts(self) -> Calls:
        counts = self._dispatch.tally.now()
        return Calls(counts.ended.done, counts.ended.failed, {node: each.done for node, each in counts.nodes.items()})

    def info(self) -> dict[str, object]:
        """Return the state, costs, calls and nodes of the pool, as values for JSON. Unknown costs are None."""
        try:
            receipt = self._rental.receipt
        except LedgerError:
            receipt = None
        state = self._life.performed
        lines = receipt.lines if receipt else ()
        counts = self._dispatch.tally.now()
        return {
            "pool": self._terms.name,
            "session": self._rental.session,
            "pid": os.getpid(),
            "phase": state.phase.value,
            "usd": receipt and receipt.usd,
            "usd_per_hour": receipt and receipt.usd_per_hour,
            "idle_usd": receipt and receipt.idle_usd,
            "running": counts.running,
            "waiting": counts.waiting,
            "done": counts.ended.done,
            "failed": counts.ended.failed,
            "nodes": [
                self._node(node, word, state.nodes.get(node), lines, counts.nodes.get(node, NodeCounts()))
                for node, word in self._life.words().items()
            ],
        }

    def _node(
        self, node: int, word: str, state: states.Node | None, lines: Sequence[Line], counts: NodeCounts
    ) -> dict[str, object]:
        instance = state.instance if state is not None else None
        welcome = self._life.connections.welcomes.get(node)
        return {
            "node": node,
            "state": word,
            **_machine(instance),
            **_cost(node, lines),
            "address": welcome.health.address if welcome else "",
            "hardware": hardware(welcome.health.devices) if welcome else "",
            "slots": welcome.slots if welcome else 0,
            "cpu_slots": welcome.cpu_slots if welcome else 0,
            "busy": sum(each.busy for each in counts.slots),
            "cpu_busy": sum(each.busy for each in counts.slots if each.on_cpu),
            "calls": counts.running,
            "waiting": counts.waiting,
            "done": counts.done,
            "running": list(counts.names),
            "health": _health(self._health.of(node)),
            "sample": to_json(sample) if (sample := self._health.store.newest.get(node)) else None,
        }

    def forward(self, node: int, host: str, port: int, here: int | str) -> Forward:
        """Open a forward to a port of a node, and return it when it can be used. Raises as `ComputePool.forward`."""
        self._dispatch.roster.nodes([node])  # raises UsageError for a node that does not exist
        return self._forwards.open(node, host, port, here)

    def command(self, node: int, script: str, terminal: bool, ports: Sequence[tuple[int, str, int]]) -> list[str]:
        """Return a command for this computer that runs a shell script on a node.

        Args:
            script: the script. It can use the variables `folder` (the folder of the agent) and `cwd` (that of calls).
            terminal: True if the command is to run in a terminal.
            ports: triples (port of this computer, host, port) to forward while the command runs.

        Raises:
            UsageError: the pool does not have the node, or ports cannot be forwarded to it in this way.
            PoolClosed: the pool has ended.
        """
        self._dispatch.roster.nodes([node])
        access, _ = self._life.connections.ways[node]
        return local_command(access, script, terminal, ports)


def _machine(instance: Instance | None) -> dict[str, object]:
    if instance is None:
        return {"provider": "", "id": "", "type": "", "place": "", "market": ""}
    offer = instance.offer
    return {
        "provider": instance.provider,
        "id": instance.id,
        "type": offer.instance_type if offer else instance.instance_type,
        "place": (offer.zone or offer.region) if offer else instance.region,
        "market": offer.market if offer else "",
    }


def _cost(node: int, lines: Sequence[Line]) -> dict[str, object]:
    """Return the costs of a node's machines, from the lines of the receipt, as values for JSON; None if not known."""
    theirs = Receipt("", tuple(each for each in lines if each.node == node), 0.0)
    if not theirs.lines:
        return {"usd": None, "usd_per_hour": None, "idle_usd": None}
    return {"usd": theirs.usd, "usd_per_hour": theirs.usd_per_hour, "idle_usd": theirs.idle_usd}


def _health(found: NodeHealth | None) -> dict[str, object] | None:
    """Return the health of a node as values for JSON; None if it is not known."""
    return None if found is None else {**asdict(found), "reasons": list(found.reasons[:_MOST_REASONS])}


def hardware(devices: Sequence[Device]) -> str:
    """Return the devices of a node as text, such as "8 NVIDIA H100 80GB HBM3"; "" if there are none."""
    names = [each.name or each.kind for each in devices if each.kind != "cpu"]
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))
