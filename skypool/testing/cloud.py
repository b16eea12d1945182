"""`FakeCloud`: a cloud for rehearsals and tests. Its machines are real agents on this machine.

It sells at prices that nobody charges, is out of stock, refuses, loses replies, takes machines back and forgets to end
them, whenever `control` says so, on a clock that tests move. What it is lives in a folder, so that it outlives the
client that is killed, and several processes see the same cloud.
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
    """A cloud to rehearse with.

    Args:
        state: a folder of its own, made when it is first asked for anything; None is $SKYPOOL_FAKE_CLOUD.
        stock: what it sells, where there is no such cloud yet; None is a little of everything.
        machines: whether its machines are real agents here, which needs Linux; otherwise they are names alone and
            cannot be reached.
        ends_itself: whether they end when their lease is over.
        billing: from which moment a machine is billed: from its "create", or from when it is "running".
        tells_billing: whether the cloud says of a machine since when it is billed.
        key: the credentials; the first one is right, and later clients must show the same. None is $SKYPOOL_FAKE_KEY.
        patience: seconds until a machine that does not end is said to be `StillRunning`.

    Raises:
        UsageError: no folder is named.
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
        return Abilities(ends_itself=self.ends_itself, private_network=True, spot=True, billed_from=self.billing)

    # --- the verbs -------------------------------------------------------------------------------------------

    def offers(self, need: Need) -> Iterable[Offer]:
        """All that it sells."""
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
        """A machine for each node, one call each, or one for each slice; the same token and node are the same.

        Raises:
            UsageError: its machines would be processes here, and this computer does not run Linux.
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
        """The machines that live, by their tags."""
        return [self._instance(each) for each in self._api().describe(pool)]

    def access(self, instance: Instance) -> Access:
        """Its own door, and its own home behind it.

        Raises:
            ProviderError: it has ended, or this cloud has no real machines.
        """
        found = next((each for each in self._api().describe(instance.pool) if each.id == instance.id), None)
        if found is None or not self.machines:
            why = "this cloud has no real machines: FakeCloud(machines=True)" if found else "it has ended"
            raise ProviderError(f"{self.name} has no way to {instance.id}: {why}", provider=self.name, text=why)
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
        """Ask for their end, and ask again until the cloud knows none of them.

        Raises:
            StillRunning: some are there after `patience`.
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
                raise StillRunning(f"{self.name} was asked to end {names} and they are still there", left)
            time.sleep(0.05 if ids else 0)

    def renew(self, pool: str, until: datetime) -> None:
        """Let the tags of this pool say so."""
        self._api().tag(pool, until)

    def leftovers(self, *, pool: str | None = None) -> list[Leftover]:
        """Key pairs and security groups."""
        return [
            Leftover(self.name, each.kind, each.id, each.pool, until=each.until) for each in self._api().things(pool)
        ]

    def tidy(self, leftovers: Sequence[Leftover]) -> None:
        """Remove them; one that a machine uses is told of when the others are gone."""
        api = self._api()
        errors = list[ProviderError]()
        for each in leftovers:
            try:
                api.remove(each.kind, each.id)
            except ProviderError as e:
                errors.append(e)
        if errors:
            raise together(f"{self.name}: not everything could be removed", errors)

    def check(self) -> Iterable[Finding]:
        """Whether the key is right, and what the account's limits are."""
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
        """What it does wrong, and what it has seen."""
        return FakeCloudControl(self._state())

    @property
    def clock(self) -> Clock:
        """The cloud's clock, which tests move."""
        return Clock(self._state())

    def count(self, kind: str = "") -> int:
        """How many of all that it has are alive: "machine", "key-pair", "security-group", "" for everything."""
        return len(self.control.alive(kind))

    def close(self) -> None:
        """End all of its machines at once, as if the cloud had gone bankrupt."""
        with contextlib.suppress(FileNotFoundError), State(Path(str(self.state))).open() as world:
            for each in world.alive():
                world.end(each)

    def __enter__(self) -> FakeCloud:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- its parts -------------------------------------------------------------------------------------------

    def _state(self) -> State:
        return State(str(self.state), self._world)

    def _world(self) -> World:
        stock = USUAL if self.stock is None else tuple(self.stock)
        return World(str(self.state), stock, self.key or "", self.machines, self.ends_itself, self.billing)

    def _api(self) -> Api:
        return Api(self._state(), self.name, self.key or "")

    def _instance(self, made: Machine, offer: Offer | None = None) -> Instance:
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
