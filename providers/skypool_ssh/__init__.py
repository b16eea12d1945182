"""Driver for the user's own machines, reached by ssh. The machines cost nothing and are never switched off.

When a pool ends, only the pool's processes and files on these hosts are removed. All files of skypool are in ~/.skypool
on the host. A node's folder there is `pools/<pool>.<node>`. Software that images installed is kept.

Words of this package:

- host: a machine of the user. Its label is its name in messages, such as "user@name:port".
- node: a machine of a pool; here, a host that serves the pool. Its node number is its number in the pool.
- agent: the process on a node that runs calls. It starts at the first connection.
- offer, order: a group of hosts with the same accelerator, and the request to use some of them (`skypool.model`).
- inventory: a TOML file that describes hosts.
- claim: a folder on a host that reserves the host for one node.
- settings: the arguments of `SSH`.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from skypool import tracebacks
from skypool.accelerators import Accelerator
from skypool.devices import elsewhere
from skypool.drivers import settings
from skypool.drivers.contract import Abilities
from skypool.errors import CapacityError, ConnectionLost, HostKeyMismatch, SkypoolError, UsageError, not_ended, together
from skypool.model import Access, Instance, Need, Offer, Order
from skypool.processes import host_name, user_name
from skypool.wire import host_keys, transport
from skypool_ssh import _hosts
from skypool_ssh._hosts import Host as Host

_LOOK = 20.0
"""Seconds that a host has to list its nodes or to accept one."""

_DEVICES = 45.0
"""Seconds that a host has to list its accelerators. The vendors' tools are slow when they first start."""

_END = 20.0
"""Seconds that a host has to end a node."""

_AGAIN = (1.0, 2.0, 2.0, 2.0)
"""Pauses in seconds before each new attempt to claim hosts that an earlier launch of the same pool still uses."""

_DROPPED = (0.3, 0.6, 1.2, 2.4, 4.8, 0.0)
"""Pauses in seconds after each attempt to ask a host that drops connections; 0 after the last attempt."""

_CONNECT = 6
"""Seconds that a host has to accept a connection."""

_BOOTING = 10
"""Seconds for which a connection to a node's host is tried again if the host does not answer.

The time is short because the host answered at launch.
"""

_Answer = list[str] | SkypoolError
"""The lines that a host answered, or the error if the host could not be asked."""


@settings.settings_named
@dataclass(frozen=True)
class SSH:
    """A driver that runs nodes on machines of your own, at no cost. Each host serves one node at a time.

    The driver uses the `ssh` program with your ssh configuration, ssh agent and keys. Creating the object connects to
    no host.

    The arguments `user`, `port`, `identity` and `jump` are for hosts that do not have their own values. None leaves a
    value to your ssh configuration.

    Args:
        hosts: host names, "user@name:port", Hosts of your ssh configuration, or `Host(…)` objects.
        inventory: path of a TOML file with more hosts in `[[host]]` tables, and defaults in `[defaults]`. The file is
            read at each use. None means no such file.
        user: the login name.
        port: the port of the SSH server.
        identity: the file of a private key.
        jump: the host to connect through, as for `ssh -J`.
        config: path of an ssh configuration file to use instead of your own. None uses your own.
        python: path of the Python interpreter on the nodes, of the client's minor version. None finds an interpreter,
            or installs one in ~/.skypool.
        strict: True refuses a host with an unknown host key. False trusts the first key that is seen, and keeps it.

    Raises:
        UsageError: a value is not valid, a host is named twice, or there are neither hosts nor an inventory.
    """

    hosts: Sequence[str | Host] = ()
    inventory: str | None = None
    user: str | None = None
    port: int | None = None
    identity: str | None = None
    jump: str | None = None
    config: str | None = None
    python: str | None = None
    strict: bool = False
    name: ClassVar[str] = "ssh"
    abilities: ClassVar[Abilities] = Abilities(
        private_network=True,
        network_advice=(
            "Allow TCP on all ports between these machines in their firewalls, such as ufw or firewalld, and in those "
            "of your network, because libraries choose free ports"
        ),
    )

    def __post_init__(self) -> None:
        settings.plain(self, inventory=Path, config=Path, identity=Path, python=Path, strict=bool)
        if isinstance(self.hosts, (str, Host)) or not isinstance(self.hosts, Iterable):
            raise UsageError(f"hosts must be a list; write hosts=[{self.hosts!r}]")
        if not self.hosts and self.inventory is None:
            raise UsageError("SSH needs machines: pass hosts=['gpu1', 'user@gpu2:2222'] or inventory='hosts.toml'")
        object.__setattr__(self, "hosts", tuple(_once(list(map(_hosts.host, self.hosts)))))
        Host("all", self.user, self.port, self.identity, self.jump)  # raises if a default is not valid

    # --- the verbs -------------------------------------------------------------------------------------------

    def offers(self, need: Need) -> Iterable[Offer]:
        """Return one offer, at the price 0, for each kind of accelerator among the hosts. The offer names its hosts.

        The accelerator of a host is the one that the settings or the inventory give. If the need has accelerators, all
        other hosts are asked by ssh which accelerator they have, for up to 45 s. Hosts that do not answer are left out,
        and the reasons are in the offer's `detail`. If the need has no accelerators, no host is asked, and hosts whose
        accelerator is not given are offered without one.

        Args:
            need: the requirements of each node. Offers that do not meet the need may be among the result.

        Raises:
            SkypoolError: every host failed to answer. If there are several hosts, the error is an ErrorGroup.
            UsageError: the inventory cannot be read or is not valid, or a host is named twice.
        """
        hosts = self._all()
        has: dict[Host, Accelerator | None] = {host: host.has for host in hosts}
        left_out: dict[str, str] = {}
        if any(each.kind != "cpu" for each in need.accelerators):
            unknown = [host for host in hosts if host.has is None]
            answers = self._ask(dict.fromkeys(unknown, ("devices",)), _DEVICES)
            for host, answer in answers.items():
                if isinstance(answer, SkypoolError):
                    left_out[host.label] = str(answer)
                    del has[host]
                else:
                    has[host] = next(iter(elsewhere.accelerators(answer)), None)
            if not has:
                failed = [each for each in answers.values() if isinstance(each, SkypoolError)]
                raise together("none of the hosts can be used; correct the cause for at least one of them", failed)
        groups: dict[Accelerator | None, list[str]] = {}
        for host, accelerator in has.items():
            groups.setdefault(accelerator, []).append(host.label)
        return [self._offer(accelerator, labels, left_out) for accelerator, labels in groups.items()]

    def _offer(self, accelerator: Accelerator | None, labels: list[str], left_out: dict[str, str]) -> Offer:
        """Return an offer of the hosts `labels`. `left_out` says why other hosts cannot be used; the offer tells it."""
        name = labels[0]
        if len(labels) > 1:
            name = f"{name} and {len(labels) - 1} more"
        return Offer(
            provider=self.name,
            instance_type=name,
            accelerator=accelerator,
            detail={"hosts": tuple(labels), "left_out": left_out},
        )

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        """Claim one of the offer's hosts for each node of the order, by creating a folder on that host.

        No process is left running on the hosts: a node's agent starts at the first connection. Hosts that an earlier
        launch of the same order claimed are returned again. Hosts that another order of the same pool still uses are
        asked again for 7 s. If there are not enough free hosts, the claims of this launch are released.

        Returns:
            the nodes as instances with the state "starting", sorted by node number.

        Raises:
            CapacityError: too few hosts are free. The message says for each other host why it cannot be used.
            HostKeyMismatch: a host showed another key than the known one. No further host is tried.
            SkypoolError: too few hosts are free, and only one host cannot be used: it could not be asked. The error is
                that of this host.
            StillRunning: a claim could not be released.
        """
        hosts = [host for host in self._all() if host.label in offer.detail["hosts"]]
        missing = list(order.nodes)
        first = order.nodes[0] % max(1, len(hosts))  # so that a further node of a growing pool begins with another host
        queue = deque([*hosts[first:], *hosts[:first]])
        taken: list[Instance] = []
        ours: list[Host] = []
        pauses = list(_AGAIN)
        why: dict[str, str | SkypoolError] = dict(offer.detail["left_out"])
        while missing and (queue or (ours and pauses)):
            if not queue:
                time.sleep(pauses.pop(0))
                queue = deque(ours)
                ours = []
            tried = {queue.popleft(): node for node in missing[: len(queue)]}
            for host, answer in self._take(order, tried).items():
                node = tried[host]
                if isinstance(answer, list) and "@taken" in answer:
                    missing.remove(node)
                    taken.append(self._claimed(host, node, offer, order))
                    continue
                reason = answer if isinstance(answer, SkypoolError) else _busy(answer)
                why[host.label] = reason
                if f"serves pool {order.pool!r} " in str(reason):
                    ours.append(host)
            if any(isinstance(each, HostKeyMismatch) for each in why.values()):
                break  # do not try the next host: this may be an attack
        if missing:
            self.terminate(taken)  # release the hosts: a launch gives all nodes or none
            raise _none_left(order, why)
        return sorted(taken, key=lambda instance: instance.node)

    def _take(self, order: Order, nodes: Mapping[Host, int]) -> dict[Host, _Answer]:
        """Ask each host, in parallel for up to 20 s, to serve its node in `nodes`. "@taken" in the answer means yes."""
        me = f"{user_name()}@{host_name()}"
        questions = {host: ("take", order.pool, str(node), order.token, me) for host, node in nodes.items()}
        return self._ask(questions, _LOOK)

    def _claimed(self, host: Host, node: int, offer: Offer, order: Order) -> Instance:
        return Instance(
            provider=self.name,
            id=host.label,
            pool=order.pool,
            node=node,
            state="starting",
            offer=offer,
            token=order.token,
        )

    def instances(self, *, pool: str | None = None) -> list[Instance]:
        """Return the nodes that exist on the hosts. All hosts are asked by ssh, in parallel for up to 20 s.

        If a node was found, a RuntimeWarning names each host that could not be asked. The list is empty if all hosts
        answered and none has a node.

        Args:
            pool: the name of a pool, for the nodes of this pool only. None means all pools. Nodes of other users are
                never returned.

        Raises:
            SkypoolError: no node was found, and some hosts could not be asked. If several hosts failed, the error is
                an ErrorGroup.
            UsageError: the inventory cannot be read or is not valid.
        """
        found: list[Instance] = []
        errors: list[SkypoolError] = []
        for host, answer in self._ask(dict.fromkeys(self._all(), ("look",)), _LOOK).items():
            if isinstance(answer, SkypoolError):
                errors.append(answer)
                continue
            found += self._nodes_of(host, answer, pool)
        if errors and not found:
            raise together(
                "no node was found, and several hosts could not be asked; correct these causes and try again", errors
            )
        for error in errors:
            tracebacks.warn(f"the list of nodes may be incomplete, because a host could not be asked: {error}")
        return found

    def _nodes_of(self, host: Host, answer: Iterable[str], pool: str | None) -> Iterator[Instance]:
        """Yield this user's nodes, from a host's answer, that have not ended. If `pool` is None, those of all pools."""
        for line in answer:
            if not line.startswith("@node "):
                continue
            _, state, name, node, token, owner = line.split(" ", 5)
            user = owner.partition("@")[0]
            is_wanted = user == user_name() and pool in (None, name)
            if is_wanted and state != "ended":
                alive: Literal["starting", "running"] = "running" if state == "running" else "starting"
                yield Instance(
                    provider=self.name,
                    id=host.label,
                    pool=name,
                    node=int(node),
                    state=alive,
                    token=token,
                )

    def access(self, instance: Instance) -> Access:
        """Return how to reach a node: by ssh, as the login user of its host. Connects to nothing.

        The result's `notice` is a text for the user if the host's key is trusted only because it was the first one
        seen. Otherwise `notice` is "".

        Raises:
            UsageError: neither the setting `hosts` nor the inventory has the node's host any more. Or the user's ssh
                configuration, or the inventory, cannot be used.
            HostKeyMismatch: the host's key is unknown, and the setting `strict` is True.
        """
        host = next((host for host in self._all() if host.label == instance.id), None)
        if host is None:
            raise UsageError(
                f"node {instance.node} of pool {instance.pool!r} is on host {instance.id}, which is no longer "
                f"in hosts= or the inventory: add {instance.id} again"
            )
        ssh, notice = self._transport(host)
        folder = f"~/.skypool/pools/{instance.pool}.{instance.node}"
        return Access(
            transport=ssh,
            python=self.python,
            folder=folder,
            spool=folder,
            cwd="~/.skypool/work",
            exclusive=True,
            booting=_BOOTING,
            notice=notice,
        )

    def terminate(self, instances: Sequence[Instance]) -> None:
        """End the processes of these nodes on their hosts, remove their folders, and check that both are gone.

        The hosts are asked in parallel, for up to 20 s. The machines go on running. Does not raise for a node that no
        longer exists.

        Raises:
            StillRunning: a host cannot be reached, is no longer in `hosts` or the inventory, or has processes that
                survived SIGKILL. The error's `instances` has these nodes, and its `unreachable` the nodes on hosts that
                cannot be reached.
        """
        on = {instance.id: instance for instance in instances}
        hosts = {host: on[host.label] for host in self._all() if host.label in on}
        asked = {host: ("end", node.pool, str(node.node)) for host, node in hosts.items()}
        unnamed = on.keys() - {host.label for host in hosts}
        unreachable: list[Instance] = []
        left = dict.fromkeys(unnamed, "the host is no longer in hosts= or the inventory: add the host again")
        for host, answer in self._ask(asked, _END).items():
            if isinstance(answer, SkypoolError):
                left[host.label] = f"{answer}; the agent there ends itself when its lease is over"
                if isinstance(answer, ConnectionLost):
                    unreachable.append(on[host.label])
            elif "@gone" not in answer:
                left[host.label] = f"these processes of the node survived SIGKILL: {' '.join(answer)}"
        if left:
            raise not_ended(left, [on[label] for label in left], unreachable)

    # --- on the hosts ----------------------------------------------------------------------------------------

    def _all(self) -> list[Host]:
        """Return the hosts of the setting `hosts`, then those of the inventory, which is read each time."""
        hosts = [_hosts.host(each) for each in self.hosts]
        if self.inventory:
            hosts += _hosts.inventory(self.inventory)
        return _once(hosts)

    def _transport(self, host: Host) -> tuple[transport.SSH, str]:
        """Return how to run commands on a host, and a notice if its key is trusted only because none was known."""
        bare = transport.SSH(
            host.name,
            user=host.user or self.user or "",
            port=host.port or self.port,
            identity=os.path.expanduser(host.identity or self.identity or ""),
            jump=host.jump or self.jump or "",
            config=os.path.expanduser(self.config or ""),
            connect_timeout=_CONNECT,
        )
        if host.host_key:
            return host_keys.declared(bare, host.label, host.host_key), ""
        return host_keys.believed(bare, host.label, self.strict)

    def _ask(self, questions: Mapping[Host, Sequence[str]], patience: float) -> dict[Host, _Answer]:
        """Run a shell function (name, arguments) on each host, in parallel. Return each host's output or error."""
        answers: dict[Host, _Answer] = {}
        until = time.monotonic() + patience
        # an SSH server may drop some of many simultaneous connections: these hosts are asked again
        for pause in _DROPPED:
            asked: dict[Host, Callable[[float], list[str]]] = {}
            for host, words in questions.items():
                try:
                    ssh, _ = self._transport(host)
                    asked[host] = _hosts.ask(ssh, host.label, words)
                except SkypoolError as e:
                    answers[host] = e
            for host, wait in asked.items():
                try:
                    answers[host] = wait(until)
                except SkypoolError as e:
                    answers[host] = e
            dropped = [host for host, each in answers.items() if isinstance(each, _hosts.Dropped)]
            questions = {host: questions[host] for host in dropped}
            if not questions or time.monotonic() + pause > until:
                break
            time.sleep(pause)
        return answers


def _busy(answer: list[str]) -> str:
    """Return a text from a host's refusal to serve a node: which pool the host serves, and whose pool that is."""
    for line in answer:
        words = line.split(" ", 4)
        if len(words) == 5 and words[0] == "@busy":
            _, pool, _, _, owner = words
            return f"it serves pool {pool!r} of {owner}"
    return f"the host gave an unexpected answer: {answer!r:.200}"


def _none_left(order: Order, why: dict[str, str | SkypoolError]) -> SkypoolError:
    """Return the error for too few free hosts. `why` is a dict from each host that cannot be used to the reason."""
    for error in why.values():
        if isinstance(error, HostKeyMismatch):
            return error
        if isinstance(error, SkypoolError) and len(why) == 1:
            return error
    reasons = "".join(f"\n    {label}: {reason}" for label, reason in why.items())
    text = f"{order.count} free hosts are needed, and fewer are free: add hosts to hosts= or the inventory, or wait"
    if reasons:
        text += f". Hosts that cannot be used now:{reasons}"
    return CapacityError(text, provider="ssh")


def _once(hosts: list[Host]) -> list[Host]:
    """Return the given list unchanged. Raise UsageError if two hosts in it have the same name, user and port."""
    labels = [host.label for host in hosts]
    for label in labels:
        if labels.count(label) > 1:
            raise UsageError(f"host {label} is named twice in hosts= or the inventory; remove one of the two entries")
    return hosts
