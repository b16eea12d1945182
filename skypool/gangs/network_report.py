"""Makes the report of the network check: which nodes reach each other, and what each node knows about its own network.

The check makes a TCP connection from each node to each other node. The functions here take the answers of the nodes
(see `skypool.gangs.probe`) and return values; they send nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

from skypool.errors import NetworkError, protocol_violation
from skypool.gangs.probe import BULK, WITHIN

Outcome = Literal["ok", "no address", "timeout", "refused", "unreachable", "broken", "silent", "stranger", "stalled"]
"""What became of a connection from one node to another.

- "ok": the other node has answered, and got all bytes.
- "no address": the address of the other node is not known.
- "timeout": nobody has answered the attempt to connect.
- "refused": the attempt was rejected, by the other machine or by a firewall.
- "unreachable": a router or this machine says that there is no way to the address.
- "broken": another error of the operating system.
- "silent": the connection was made, but nothing came back.
- "stranger": something else than skypool's listener has answered.
- "stalled": a few bytes went there and back, but 64 KiB did not arrive.
"""
_NAMED = 5
"""The most failed connections that a message names."""


@dataclass(frozen=True, slots=True)
class NodeNetwork:
    """What a node knows about its own network.

    Attributes:
        node: the number of the node.
        address: the address at which other nodes connect to it; "" if unknown.
        port: the TCP port on which it has listened for the check.
        hostname: its own host name.
        found: the addresses to which that name resolves on the node.
        interface: the network interface that has `address`; "" if none has it.
        mtu: the size in bytes of the largest packet that this interface sends; None if unknown.
        told: the interface that the node's environment variable GLOO_SOCKET_IFNAME names; "" if it is not set.
    """

    node: int
    address: str
    port: int
    hostname: str
    found: tuple[str, ...]
    interface: str
    mtu: int | None
    told: str

    @property
    def name_leads_astray(self) -> bool:
        """True if libraries that look up this host name get another address than `address`.

        It is False if GLOO_SOCKET_IFNAME names an interface, because libraries then do not look up the name.
        """
        return bool(self.address) and self.found != (self.address,) and not self.told


@dataclass(frozen=True, slots=True)
class Connection:
    """Attempt to connect from the node `source` to the listening node `target`.

    Attributes:
        outcome: how the attempt ended.
        seconds: the time in seconds until the connection was made, about one round trip; 0.0 if none was made.
        text: the error of the operating system; "" if there is none.
    """

    source: int
    target: int
    outcome: Outcome
    seconds: float
    text: str = ""


@dataclass(frozen=True, slots=True)
class NetworkReport:
    """Result of a network check among nodes.

    Attributes:
        nodes: what each node knows about its network, by the number of the node.
        connections: the attempts to connect, ordered by source and target. Pairs of nodes that an earlier check of the
            pool has found good are left out.
    """

    nodes: Mapping[int, NodeNetwork]
    connections: tuple[Connection, ...]

    @property
    def failed(self) -> tuple[Connection, ...]:
        """The connections that failed."""
        return tuple(each for each in self.connections if each.outcome != "ok")

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about possible problems although all nodes reach each other. Empty on a single machine."""
        nodes = list(self.nodes.values())
        if len({each.address for each in nodes}) == 1:
            return ()
        return (*_different_mtus(nodes), *_wrong_names(nodes))


def _different_mtus(nodes: Sequence[NodeNetwork]) -> Iterable[str]:
    """Yield a warning if the interfaces of the nodes send packets of different sizes."""
    known = [each for each in nodes if each.mtu is not None]
    if len({each.mtu for each in known}) > 1:
        told = ", ".join(f"node {each.node} {each.mtu} ({each.interface})" for each in known)
        yield (
            f"the network interfaces of the nodes have different MTUs, in bytes: {told}; large packets may be lost or "
            "slow between them, so set the same MTU on all"
        )


def _wrong_names(nodes: Sequence[NodeNetwork]) -> Iterable[str]:
    """Yield a warning if a node's host name resolves there to another address than the one at which others connect."""
    wrong = [each for each in nodes if each.name_leads_astray]
    if wrong:
        first = wrong[0]
        others = f", and likewise on {len(wrong) - 1} other nodes" if len(wrong) > 1 else ""
        yield (
            f"on node {first.node}, its own name {first.hostname} leads to {' and '.join(first.found) or 'no address'}"
            f", but other nodes reach it at {first.address}{others}; libraries that look up their own name may hang, "
            f"so put the line '{first.address} {first.hostname}' into its /etc/hosts"
        )


def node_network(node: int, address: str, item: object) -> NodeNetwork:
    """Check the first answer of a node, `item`, and return it as a `NodeNetwork`.

    The answer is a dict from `skypool.gangs.probe.facts` with "port" added. `address` is the node's address; "" if
    unknown. Raises ProtocolError if the answer has another form.
    """
    try:
        said = cast("dict[str, object]", item)
        mtu = said["mtu"]
        return NodeNetwork(
            node,
            address,
            _whole(said["port"]),
            str(said["hostname"]),
            tuple(str(each) for each in cast("list[object]", said["found"])),
            str(said["interface"]),
            None if mtu is None else _whole(mtu),
            str(said["told"]),
        )
    except (KeyError, TypeError, ValueError) as e:
        raise protocol_violation(f"node {node} answers the network check with {item!r:.200}") from e


def connections_of(node: int, targets: Iterable[int], item: object) -> list[Connection]:
    """Check the second answer of a node, `item`, and return its attempts to connect, ordered by target.

    The answer is a list of (node, outcome, seconds, text), as `skypool.gangs.probe.connect_all` makes it. Raises
    ProtocolError if it has another form, or is about other nodes than `targets`.
    """
    try:
        found = {
            _whole(target): Connection(node, _whole(target), _outcome(outcome), float(seconds), str(text))
            for target, outcome, seconds, text in cast("list[tuple[object, object, float, object]]", item)
        }
        if found.keys() != set(targets):
            raise ValueError("other nodes")
    except (TypeError, ValueError) as e:
        raise protocol_violation(f"node {node} answers the network check with {item!r:.200}") from e
    return [found[target] for target in sorted(found)]


def _whole(value: object) -> int:
    if not isinstance(value, int):
        raise TypeError(f"{value!r} is not a whole number")
    return value


def _outcome(value: object) -> Outcome:
    if value not in get_args(Outcome):
        raise ValueError(f"{value!r} is not an outcome")
    return cast(Outcome, value)


def error_of(report: NetworkReport, advice: str) -> NetworkError | None:
    """Return (not raise) the error for a report with failed connections; None if all connections are good.

    `advice` is a sentence without a full stop for the user. It says which ports to open, and how.
    """
    failed = report.failed
    if not failed:
        return None
    first = failed[0]
    source = report.nodes[first.source]
    target = report.nodes[first.target]
    message = (
        f"node {source.node} ({source.address or 'no address'}) cannot reach node {target.node} "
        f"({target.address or 'no address'}) on TCP port {target.port}: {_how(first, target)}"
    )
    if len(failed) > 1:
        pairs = ", ".join(f"{each.source} to {each.target}" for each in failed[:_NAMED])
        more = ", …" if len(failed) > _NAMED else ""
        count = len(report.connections)
        message += f". {len(failed)} of {count} connections between nodes failed: {pairs}{more}"
    return NetworkError(
        f"{message}. {advice}",
        source=source.node,
        target=target.node,
        address=target.address,
        port=target.port,
        outcome=first.outcome,
        advice=advice,
        report=report,
    )


def _how(failed: Connection, target: NodeNetwork) -> str:
    """Return the part of the message that says how a connection failed, without a full stop."""
    match failed.outcome:
        case "no address":
            return "its address is not known, because it has no network interface with a way out"
        case "timeout":
            return f"no answer within {WITHIN:g} s, as when a firewall drops the packets or no route leads there"
        case "refused":
            return (
                "the connection was refused, although the node listens there; a firewall rejects it, or the address "
                "leads to another machine"
            )
        case "silent":
            return f"the connection was made, but nothing came back within {WITHIN:g} s"
        case "stranger":
            return "something else answered there, so the address leads to another machine"
        case "stalled":
            size = "" if target.mtu is None else f" (the MTU of node {target.node} is {target.mtu} bytes)"
            return (
                f"a few bytes arrive, but {BULK >> 10} KiB do not within {WITHIN:g} s; large packets are lost on the "
                f"way, as when the MTU is too large{size}"
            )
        case _:
            return failed.text or "the connection failed"
