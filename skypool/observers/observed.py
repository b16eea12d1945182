"""`Observed`: lets observers, such as `skypool ps`, see a pool of this process and run commands on its nodes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict

from skypool.calls.tally import NodeCounts
from skypool.console.board import Calls, Figures
from skypool.devices.device import hardware
from skypool.devices.health import NodeHealth
from skypool.devices.sample import to_json
from skypool.link.forward import Forward
from skypool.link.reach import local_command
from skypool.model import Instance
from skypool.pool import states
from skypool.pool.watch import PoolFacts
from skypool.rental.receipt import Line, Receipt
from skypool.wire.save_orders import FolderState

_MOST_REASONS = 16
"""The most reasons for a node's state of health that an observer gets."""


class Observed:
    """What observers can see and use of a pool. They can neither send calls nor rent or end machines through it.

    The methods are called in the threads of `skypool.observers.server`.
    """

    def __init__(self, facts: PoolFacts) -> None:
        self._facts = facts
        self.listen = facts.listen

    def figures(self) -> Figures:
        """Return costs and newest samples of the pool, for its live view. Costs are None if they are not known."""
        samples = dict(self._facts.health.samples.newest)
        receipt = self._facts.receipt()
        if receipt is None:
            return Figures(samples=samples, counts=self._counts())
        return Figures(receipt.usd, receipt.usd_per_hour, receipt.idle_usd, samples, self._counts())

    def _counts(self) -> Calls:
        counts = self._facts.counts
        return Calls(counts.ended.done, counts.ended.failed, {node: each.done for node, each in counts.nodes.items()})

    def info(self) -> dict[str, object]:
        """Return the state, costs, calls and nodes of the pool, as values for JSON. Unknown costs are None."""
        receipt = self._facts.receipt()
        state = self._facts.state
        lines = receipt.lines if receipt else ()
        counts = self._facts.counts
        return {
            "pool": self._facts.pool,
            "session": self._facts.session,
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
                for node, word in self._facts.words().items()
            ],
        }

    def _node(
        self, node: int, word: str, state: states.Node | None, lines: Sequence[Line], counts: NodeCounts
    ) -> dict[str, object]:
        instance = state.instance if state is not None else None
        welcome = self._facts.welcomes.get(node)
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
            "health": _health(self._facts.health.of(node)),
            "folders": [
                _folder(each)
                for (other, _), each in sorted(self._facts.folders.items())
                if other == node and not each.is_data
            ],
            "sample": to_json(sample) if (sample := self._facts.health.samples.newest.get(node)) else None,
        }

    def forward(self, node: int, host: str, port: int, here: int | str) -> Forward:
        """Open a forward to a port of a node, and return it when it can be used.

        `host` is the host to connect to, as the node knows it. `here` is a port of this computer, 0 for a free one, or
        the path of a Unix socket.

        Raises:
            UsageError: there is no such node, the port of this computer is not free, or the socket cannot be made.
            NotPrivate: another user can change the folder of the socket.
            ConnectionLost: the node cannot be reached.
            PoolClosed: the pool has ended.
        """
        self._facts.way(node)  # raises UsageError for a node that does not exist
        return self._facts.forwards.open(node, host, port, here)

    def command(self, node: int, script: str, terminal: bool, ports: Sequence[tuple[int, str, int]]) -> list[str]:
        """Return a command for this computer that runs a shell script on a node.

        Args:
            script: the script. It can use the variables `folder` (the folder of the agent), `cwd` (that of calls) and
                `python`.
            terminal: True if the command is to run in a terminal.
            ports: triples (port of this computer, host, port) to forward while the command runs.

        Raises:
            UsageError: the pool does not have the node, or ports cannot be forwarded to it in this way.
            PoolClosed: the pool has ended.
        """
        return local_command(*self._facts.way(node), script, terminal, ports)


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


def _folder(state: FolderState) -> dict[str, object]:
    """Return the state of a folder that is saved to a bucket as values for JSON."""
    said = asdict(state)
    wanted = ("id", "url", "phase", "whole", "files", "bytes", "unsaved", "unsaved_bytes", "oldest", "rate", "trouble")
    return {name: said[name] for name in wanted}


def _cost(node: int, lines: Sequence[Line]) -> dict[str, object]:
    """Return the costs of a node's machines as values for JSON, from the lines of a receipt; None if not known."""
    theirs = Receipt("", tuple(each for each in lines if each.node == node), 0.0)
    if not theirs.lines:
        return {"usd": None, "usd_per_hour": None, "idle_usd": None}
    return {"usd": theirs.usd, "usd_per_hour": theirs.usd_per_hour, "idle_usd": theirs.idle_usd}


def _health(found: NodeHealth | None) -> dict[str, object] | None:
    """Return the health of a node as values for JSON; None if it is not known."""
    return None if found is None else {**asdict(found), "reasons": list(found.reasons[:_MOST_REASONS])}
