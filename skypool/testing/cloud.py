"""`FakeCloud`: a cloud for rehearsals and tests. Its machines are processes on this computer that run real pool nodes.

Its prices are never charged. Its `control` makes it run out of stock, refuse requests, lose replies, take machines back
or fail to end them. Tests can move its clock forward. Its state is stored in a folder. So it outlives a client that is
killed, and several processes can share it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import ClassVar

from skypool.drivers import settings
from skypool.drivers.contract import Abilities, undo
from skypool.errors import (
    CapacityError,
    NoAnswer,
    ProviderError,
    QuotaError,
    RateLimitError,
    StillRunning,
    UsageError,
    together,
)
from skypool.model import Access, Finding, Instance, Leftover, Need, Offer, Order
from skypool.testing import machine
from skypool.testing.api import Api
from skypool.testing.control import Clock, FakeCloudControl
from skypool.testing.state import State
from skypool.testing.world import USUAL, Billing, Machine, Stock, World

_THINGS = ("key-pair", "security-group")


@settings.settings_named
@dataclass(frozen=True)
class FakeCloud:
    """A driver for a fake cloud, for rehearsals and tests.

    In a `with` block, all machines are ended at the end of the block.

    Args:
        state: a folder for the cloud alone, which is made on first use. None means $SKYPOOL_FAKE_CLOUD.
        stock: the kinds of machines that a new cloud sells; None means `world.USUAL`. An existing cloud keeps its
            stock.
        machines: True to run machines as processes here, which needs Linux. With False they exist by name only and
            cannot be reached.
        ends_itself: True if machines end when their lease is over. A lease is the time that a machine lives on without
            hearing from its client.
        key: the API key. A new cloud accepts the first key that it sees, and later clients must use the same. None
            means $SKYPOOL_FAKE_KEY, or "" if that is not set.
        patience: seconds after which `terminate` raises StillRunning for a machine that has not ended.
        billing: the moment from which a machine is billed: its "create", or when it is "running".
        tells_billing: True if the cloud reports since when a machine is billed.

    Raises:
        UsageError: no folder is given.
    """

    state: str | Path | None = None
    stock: Sequence[Stock] | None = field(default=None, repr=False)
    machines: bool = True
    ends_itself: bool = True
    key: str | None = field(default=None, repr=False)
    patience: float = 1.0
    billing: Billing = "create"
    tells_billing: bool = True
    name: ClassVar[str] = "fake"

    def __post_init__(self) -> None:
        state = self.state or os.environ.get("SKYPOOL_FAKE_CLOUD")
        if not state:
            raise UsageError("a fake cloud needs a folder: FakeCloud(tmp_path / 'cloud'), or $SKYPOOL_FAKE_CLOUD")
        object.__setattr__(self, "state", os.path.abspath(state))
        if self.key is None:
            object.__setattr__(self, "key", os.environ.get("SKYPOOL_FAKE_KEY", ""))

    @property
    def abilities(self) -> Abilities:
        """Return what this cloud can do, as `Abilities`.

        It has a spot market and a private network. The rest follows from the settings.
        """
        return Abilities(ends_itself=self.ends_itself, private_network=True, spot=True, billed_from=self.billing)

    # --- the verbs -------------------------------------------------------------------------------------------

    def offers(self, need: Need) -> Iterable[Offer]:
        """Return an offer for everything that the cloud sells, in stock or not. The need is ignored.

        The field `available` of an offer tells if it is in stock now.
        """
        return [
            Offer(
                provider=self.name,
                instance_type=each.instance_type,
                region=each.region,
                zone=each.zone,
                market=each.market,
                usd_per_hour=each.usd_per_hour,
                accelerator=each.has,
                vcpus=each.vcpus,
                memory_gib=each.memory_gib,
                disk_gib=each.disk_gib,
                arch=each.arch,
                available=there,
                quota=each.quota,
                hosts=each.size,
                least_billed=each.least_billed,
                detail={"stock": each},
            )
            for each, there in self._api().stock()
        ]

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        """Rent one machine for each node of the order, or one slice (several hosts) for each group of nodes.

        Returns at once with the machines in the order of their nodes; they may still be booting. A repeated launch with
        the same token and nodes returns the same machines.

        If stock or quota runs out on the way, fewer machines are returned: those of the first nodes. If the order needs
        a private network, these are ended again instead, and the error is raised.

        Raises:
            UsageError: machines would be processes here, and this computer does not run Linux.
            CapacityError, QuotaError: stock or quota does not suffice; nothing is left rented.
            ProviderError: the cloud refused for another reason, or did not answer. Machines that were made before are
                not ended; a repeated launch returns them.
            StillRunning: machines that had to be ended again did not end.
        """
        if self.machines and not machine.run_here():
            raise UsageError(
                "the machines of FakeCloud are processes of this computer and need Linux: rehearse in a Linux "
                "container or machine, or use FakeCloud(machines=False), which rents but runs no calls"
            )
        api = self._api()
        stock = offer.detail["stock"]
        for kind in _THINGS:
            api.make(kind, order.pool, order.until)
        launched: list[Instance] = []
        for first in range(0, order.count, offer.hosts):
            nodes = order.nodes[first : first + offer.hosts]
            order.asking(*nodes)
            try:
                made = api.create(stock, order, nodes, f"{order.token}/{nodes[0]}")
            except (CapacityError, QuotaError):
                if launched and not order.need.private_network:
                    break
                undo(self.terminate, order, launched)
                raise
            new = [self._instance(each, offer) for each in made]
            order.made(*new)
            launched += new
        return launched

    def instances(self, *, pool: str | None = None) -> list[Instance]:
        """Return the live machines of this user's pools, found by their tags. Empty if there are none.

        Their `offer` is None, because tags do not tell on which offer a machine was rented.

        Args:
            pool: the pool's name; only machines that were rented from this host are returned then. None for all pools.
        """
        return [self._instance(each) for each in self._api().describe(pool)]

    def access(self, instance: Instance) -> Access:
        """Return how to run commands on a machine. It does not wait: a machine that is still booting refuses commands.

        Raises:
            ProviderError: the machine has ended or never existed, or this cloud's machines exist by name only.
        """
        found = next((each for each in self._api().describe(instance.pool) if each.id == instance.id), None)
        if found is None or not self.machines:
            why = "its machines exist by name only; use FakeCloud(machines=True)" if found else "it has ended"
            raise ProviderError(
                f"the machine {instance.id} of {self.name} cannot be reached: {why}", provider=self.name, text=why
            )
        return Access(
            transport=machine.Door(found.folder, machine.devices(found.has)),
            python=sys.executable,
            folder=f"{found.folder}/agent",
            spool=f"{found.folder}/agent",
            cwd=f"{found.folder}/home",
            home=f"{found.folder}/home/.skypool",
            booting=5.0,
            owned=True,
            simulated=True,
            guard=machine.guard(found.folder),
            watch=machine.watch(found.folder),
        )

    def terminate(self, instances: Sequence[Instance]) -> None:
        """End machines, and repeat the request until the cloud no longer lists any of them. Blocks until then.

        All hosts of a slice end together. Machines that no longer exist are ignored.

        Raises:
            StillRunning: some are still alive after `patience` seconds; its `instances` are these.
            NoAnswer, RateLimitError: the cloud answered no request within `patience` seconds.
            ProviderError: the cloud refused for another reason, such as a wrong key. This is raised at once.
        """
        ids = {each.id for each in instances}
        api = self._api()
        until = time.monotonic() + self.patience
        while ids:
            try:
                api.terminate(sorted(ids))
                ids &= {each.id for each in api.describe(None)}
            except (NoAnswer, RateLimitError):
                if time.monotonic() > until:
                    raise
            if ids and time.monotonic() > until:
                left = [each for each in instances if each.id in ids]
                names = ", ".join(sorted(ids))
                raise StillRunning(
                    f"{self.name} was asked to end {names}, but still lists them after {self.patience:g} s; "
                    "call terminate() again",
                    left,
                )
            time.sleep(0.05 if ids else 0)

    def renew(self, pool: str, until: datetime) -> None:
        """Set the time in the tags of a pool's machines, key pairs and security groups until which the pool needs them.

        Args:
            pool: the pool's name. A pool that has nothing is accepted, without effect.
            until: the new time.
        """
        self._api().tag(pool, until)

    def leftovers(self, *, pool: str | None = None) -> list[Leftover]:
        """Return the key pairs and security groups of a pool, also if machines still use them. Empty if there are none.

        Args:
            pool: the pool's name; None for all pools of this user.
        """
        return [
            Leftover(self.name, each.kind, each.id, each.pool, until=each.until) for each in self._api().things(pool)
        ]

    def tidy(self, leftovers: Sequence[Leftover]) -> None:
        """Remove key pairs and security groups. All are tried before an error is raised.

        Does nothing for those that no longer exist.

        Args:
            leftovers: what to remove.

        Raises:
            ProviderError: one could not be removed, for example because a machine still uses it. If several could not
                for different reasons, an ErrorGroup of such errors.
        """
        api = self._api()
        errors = list[ProviderError]()
        for each in leftovers:
            try:
                api.remove(each.kind, each.id)
            except ProviderError as e:
                errors.append(e)
        if errors:
            raise together(
                f"{self.name}: some leftover resources could not be removed; correct these causes and call "
                "tidy() again",
                errors,
            )

    def check(self) -> Iterable[Finding]:
        """Return a finding on the API key, and one for each of the account's limits.

        If the cloud refuses, for example because of a wrong key, the only finding tells that, and no error is raised. A
        limit of 0 is a bad finding. The check costs nothing.
        """
        try:
            limits = self._api().account()
        except ProviderError as e:
            return [Finding("credentials", False, e.text, "set $SKYPOOL_FAKE_KEY, or FakeCloud(key=…)")]
        return [
            Finding("credentials", True, "the key is known"),
            *(Finding(f"quota {name}", most > 0, f"at most {most}") for name, most in limits.items()),
        ]

    # --- for tests -------------------------------------------------------------------------------------------

    @property
    def control(self) -> FakeCloudControl:
        """Return the control, with which a test prepares failures and reads the calls that the cloud received."""
        return FakeCloudControl(self._state())

    @property
    def clock(self) -> Clock:
        """Return the cloud's clock, which tests can move forward."""
        return Clock(self._state())

    def count(self, kind: str = "") -> int:
        """Return how many live machines, key pairs and security groups there are in total.

        Args:
            kind: "machine", "key-pair" or "security-group" for one kind only; "" for all.
        """
        return len(self.control.alive(kind))

    def close(self) -> None:
        """End all machines at once.

        Does nothing if the cloud was never used. The folder, key pairs and security groups are kept.
        """
        with contextlib.suppress(FileNotFoundError), State(Path(str(self.state))).open() as world:
            for each in world.alive():
                world.end(each)

    def __enter__(self) -> FakeCloud:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- its parts -------------------------------------------------------------------------------------------

    def _state(self) -> State:
        """Return the stored state of this cloud. The state is created when it is first opened."""
        return State(str(self.state), self._world)

    def _world(self) -> World:
        """Return a new initial state of this cloud, with its stock, key and settings and no machines.

        Nothing is stored.
        """
        stock = USUAL if self.stock is None else tuple(self.stock)
        return World(str(self.state), stock, self.key or "", self.machines, self.ends_itself, self.billing)

    def _api(self) -> Api:
        """Return an object with the cloud's calls, which uses this driver's key."""
        return Api(self._state(), self.name, self.key or "")

    def _instance(self, made: Machine, offer: Offer | None = None) -> Instance:
        """Return the cloud's record of a machine as an `Instance`.

        Its `billed_from` is None if `tells_billing` is False, or if the machine is billed only once it runs and does
        not yet.

        Args:
            made: the cloud's record of the machine.
            offer: the offer that the machine was rented on; None if that is not known.
        """
        token = made.token.rpartition("/")[0]
        billed_from = made.born if self.billing == "create" else made.ran_at
        return Instance(
            self.name,
            made.id,
            made.pool,
            made.node,
            made.state,
            offer,
            token=token,
            until=made.until,
            slice=made.slice,
            billed_from=billed_from if self.tells_billing else None,
        )
