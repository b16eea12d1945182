"""SSH: machines of the user's own. They cost nothing here, and stay; what ends is the pool's part of them.

On a host is what ~/.skypool has: `pools/<pool>.<rank>` while a node lives, and what images installed, kept.
"""

from __future__ import annotations

import getpass
import os
import time
import warnings
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from skypool.accelerators import Accelerator
from skypool.devices import elsewhere
from skypool.drivers import settings
from skypool.drivers.contract import Abilities
from skypool.errors import CapacityError, ConnectionLost, HostKeyMismatch, SkypoolError, UsageError, not_ended, together
from skypool.model import Access, Instance, Need, Offer, Order
from skypool.processes import host_name
from skypool.wire import host_keys, transport
from skypool_ssh import _api
from skypool_ssh._api import Host as Host

_LOOK, _DEVICES, _END = 20.0, 45.0, 20.0


@settings.settings_named
@dataclass(frozen=True)
class SSH:
    """Run on machines of your own, by the `ssh` program with your configuration, agent and keys.

    Args:
        hosts: names, "user@name:port", Hosts of your ssh configuration, or `Host(…)` for more.
        inventory: a TOML file with more of them: `[[host]]` tables, and `[defaults]`.
        user, port, identity, jump: of hosts that do not say it themselves; None leaves it to your ssh configuration.
        config: an ssh configuration file in the place of your own.
        python: the nodes' interpreter, of this minor version; None finds or installs one in ~/.skypool.
        strict: refuse a host whose key nobody knows, instead of keeping the first one seen.

    Raises:
        UsageError: a value that cannot mean anything.
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
    abilities: ClassVar[Abilities] = Abilities(private_network=True)

    def __post_init__(self) -> None:
        settings.plain(self, inventory=Path, config=Path, identity=Path, python=Path, strict=bool)
        if isinstance(self.hosts, (str, Host)) or not isinstance(self.hosts, Iterable):
            raise UsageError(f"hosts is a list: hosts=[{self.hosts!r}]")
        if not self.hosts and self.inventory is None:
            raise UsageError("SSH needs machines: hosts=['gpu1', 'user@gpu2:2222'], or inventory='hosts.toml'")
        object.__setattr__(self, "hosts", tuple(_once(list(map(_api.host, self.hosts)))))
        Host("all", self.user, self.port, self.identity, self.jump)  # refuses what none of them can have

    # --- the verbs -------------------------------------------------------------------------------------------

    def offers(self, need: Need) -> Iterable[Offer]:
        """One for each kind of accelerator among the hosts. They are asked only if that matters and was not said."""
        hosts, left_out = self._all(), dict[str, str]()
        has: dict[Host, Accelerator | None] = {host: host.has for host in hosts}
        if any(each.kind != "cpu" for each in need.accelerators):
            answers = self._ask({host: ("devices",) for host in hosts if host.has is None}, _DEVICES)
            for host, answer in answers.items():
                if isinstance(answer, SkypoolError):
                    left_out[host.label] = str(answer)
                    del has[host]
                else:
                    has[host] = next(iter(elsewhere.accelerators(answer)), None)
            if not has:
                failed = [each for each in answers.values() if isinstance(each, SkypoolError)]
                raise together("no host can be used", failed)
        groups: dict[Accelerator | None, list[str]] = {}
        for host, accelerator in has.items():
            groups.setdefault(accelerator, []).append(host.label)
        return [
            Offer(
                provider=self.name,
                instance_type=labels[0] if len(labels) == 1 else f"{labels[0]} and {len(labels) - 1} more",
                accelerator=accelerator,
                detail={"hosts": tuple(labels), "left_out": left_out},
            )
            for accelerator, labels in groups.items()
        ]

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        """Claim a host for each node, by a folder there; the agent starts in it when it is first connected to.

        Raises:
            CapacityError: not enough of them are free; it says what each one does.
        """
        hosts = [host for host in self._all() if host.label in offer.detail["hosts"]]
        first = order.ranks[0] % max(1, len(hosts))  # as pools grow, nodes find their hosts at the first attempt
        queue, missing = deque([*hosts[first:], *hosts[:first]]), list(order.ranks)
        taken: list[Instance] = []
        ours: list[Host] = []
        again = [1.0, 2.0, 2.0, 2.0]  # a host of this very pool may be just becoming free: its node was lost
        why: dict[str, str | SkypoolError] = dict(offer.detail["left_out"])
        me = f"{getpass.getuser()}@{host_name()}"
        while missing and (queue or (ours and again)):
            if not queue:
                time.sleep(again.pop(0))
                queue, ours = deque(ours), []
            tried = {queue.popleft(): rank for rank in missing[: len(queue)]}
            questions = {host: ("take", order.pool, str(rank), order.token, me) for host, rank in tried.items()}
            for host, answer in self._ask(questions, _LOOK).items():
                if isinstance(answer, list) and "@taken" in answer:
                    missing.remove(rank := tried[host])
                    taken += [Instance(self.name, host.label, order.pool, rank, "starting", offer, token=order.token)]
                else:
                    why[host.label] = answer if isinstance(answer, SkypoolError) else _busy(answer)
                    ours += [host] if f"serves pool {order.pool!r} " in str(why[host.label]) else []
            if any(isinstance(each, HostKeyMismatch) for each in why.values()):
                break  # never just the next one: somebody may be listening
        if missing:
            self.terminate(taken)  # all or none
            raise _none_left(order, why)
        return sorted(taken, key=lambda instance: instance.rank)

    def instances(self, *, pool: str | None = None) -> list[Instance]:
        """Every node of this user's pools on these hosts, as found there.

        Raises:
            SkypoolError: none was found, and some hosts cannot be asked. If others have nodes that is a warning.
        """
        found, errors = [], []
        for host, answer in self._ask(dict.fromkeys(self._all(), ("look",)), _LOOK).items():
            if isinstance(answer, SkypoolError):
                errors.append(answer)
                continue
            for line in (each for each in answer if each.startswith("@node ")):
                _, state, name, rank, token, owner = line.split(" ", 5)
                mine = name == pool or (pool is None and owner.partition("@")[0] == getpass.getuser())
                if mine and state != "ended":
                    alive: Literal["starting", "running"] = "running" if state == "running" else "starting"
                    found.append(Instance(self.name, host.label, name, int(rank), alive, token=token))
        if errors and not found:
            raise together("no node was found, and not every host could be asked", errors)
        for error in errors:
            warnings.warn(f"not every host could be asked for its nodes: {error}", RuntimeWarning, stacklevel=2)
        return found

    def access(self, instance: Instance) -> Access:
        """The host's own account. A key that was believed for being the first is a notice."""
        ssh, notice = self._transport(next(host for host in self._all() if host.label == instance.id))
        folder = f"~/.skypool/pools/{instance.pool}.{instance.rank}"
        return Access(
            transport=ssh,
            python=self.python,
            folder=folder,
            spool=folder,
            cwd="~/.skypool/work",
            exclusive=True,
            booting=10,
            notice=notice,
        )

    def terminate(self, instances: Sequence[Instance]) -> None:
        """End what runs of these nodes on their hosts, and see it gone.

        Raises:
            StillRunning: hosts that cannot be reached or are named no more, or processes that survive SIGKILL.
        """
        on = {each.id: each for each in instances}
        hosts = {host: on[host.label] for host in self._all() if host.label in on}
        asked = {host: ("end", node.pool, str(node.rank)) for host, node in hosts.items()}
        unnamed = on.keys() - {host.label for host in hosts}
        unreachable: list[Instance] = []
        left = dict.fromkeys(unnamed, "neither hosts= nor the inventory names it now: name it again")
        for host, answer in self._ask(asked, _END).items():
            if isinstance(answer, SkypoolError):
                left[host.label] = f"{answer}; the agent there ends itself when its lease is over"
                unreachable += [on[host.label]] if isinstance(answer, ConnectionLost) else []
            elif "@gone" not in answer:
                left[host.label] = f"processes survive SIGKILL: {' '.join(answer)}"
        if left:
            raise not_ended(left, [on[label] for label in left], unreachable)

    # --- on the hosts ----------------------------------------------------------------------------------------

    def _all(self) -> list[Host]:
        return _once([*map(_api.host, self.hosts), *(_api.inventory(self.inventory) if self.inventory else ())])

    def _transport(self, host: Host) -> tuple[transport.SSH, str]:
        bare = transport.SSH(
            host.name,
            user=host.user or self.user or "",
            port=host.port or self.port,
            identity=os.path.expanduser(host.identity or self.identity or ""),
            jump=host.jump or self.jump or "",
            config=os.path.expanduser(self.config or ""),
            connect_timeout=6,
        )
        if host.host_key:
            return host_keys.declared(bare, host.label, host.host_key), ""
        return host_keys.believed(bare, host.label, self.strict)

    def _ask(self, questions: Mapping[Host, Sequence[str]], patience: float) -> dict[Host, list[str] | SkypoolError]:
        """Ask every host its question, all at once; without threads, which an interpreter that exits cannot start. An
        sshd, as that of a host on the way to all of them, drops some of many that come at once: those ask again."""
        answers: dict[Host, list[str] | SkypoolError] = {}
        until = time.monotonic() + patience
        for pause in (0.3, 0.6, 1.2, 2.4, 4.8, 0.0):
            asked = {}
            for host, words in questions.items():
                try:
                    asked[host] = _api.ask(self._transport(host)[0], host.label, words)
                except SkypoolError as e:
                    answers[host] = e
            for host, answer in asked.items():
                try:
                    answers[host] = answer(until)
                except SkypoolError as e:
                    answers[host] = e
            questions = {host: questions[host] for host, each in answers.items() if isinstance(each, _api.Dropped)}
            if not questions or time.monotonic() + pause > until:
                break
            time.sleep(pause)
        return answers


def _busy(answer: list[str]) -> str:
    busy = [each for line in answer if len(each := line.split(" ", 4)) == 5 and each[0] == "@busy"]
    return f"it serves pool {busy[0][1]!r} of {busy[0][4]}" if busy else f"it answered {answer!r:.200}"


def _none_left(order: Order, why: dict[str, str | SkypoolError]) -> SkypoolError:
    for error in why.values():
        if isinstance(error, HostKeyMismatch) or (isinstance(error, SkypoolError) and len(why) == 1):
            return error
    reasons = "".join(f"\n    {label}: {reason}" for label, reason in why.items())
    words = "and there are not as many: name more of them, or wait"
    return CapacityError(f"{order.count} free hosts are needed, {words}:{reasons}", provider="ssh")


def _once(hosts: list[Host]) -> list[Host]:
    labels = [host.label for host in hosts]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise UsageError(f"host {twice[0]} is named twice")
    return hosts
