"""`FakeCloud`: a cloud for rehearsals and tests. Its machines are processes on this computer that run real pool nodes.

Nothing that this cloud rents costs money. With `FakeCloud.control`, a test makes the cloud run out of stock, refuse
requests, lose replies, take machines back or fail to end them. The cloud's state is stored in a folder. So the cloud
outlives a client that is killed, and several processes can use the same cloud.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import ClassVar

from skypool.drivers import preflight, settings
from skypool.drivers.contract import Abilities, undo
from skypool.errors import (
    CapacityError,
    NoAnswer,
    OfferGone,
    ProviderError,
    QuotaError,
    RateLimitError,
    StillRunning,
    UsageError,
    together,
)
from skypool.model import Access, Bill, Finding, Instance, Leftover, Market, Need, Offer, Order
from skypool.safety import user_folders
from skypool.testing import machine
from skypool.testing.api import Api
from skypool.testing.cloud_state import USUAL, Billing, Machine, Stock, World
from skypool.testing.control import Clock, FakeCloudControl
from skypool.testing.state_store import State

_USUAL = "fake-cloud"
"""The name of the folder of a cloud for which none is named."""
_THINGS = ("key-pair", "security-group")
_ANSWERS = 5.0
"""Seconds from the end of a machine's boot in which the machine need not answer.

For a machine that never boots, they count from the first attempt to connect. The client then gives the machine up.
"""


@settings.settings_named
@dataclass(frozen=True)
class FakeCloud:
    """A driver for a fake cloud, for rehearsals and tests.

    In a `with` block, all machines are ended at the end of the block.

    Args:
        state: the folder for the cloud's state, which must hold nothing else and is made on first use. None means the
            value of $SKYPOOL_FAKE_CLOUD, or "fake-cloud" in the folder of skypool's state.
        stock: the kinds of machines that a new cloud sells; None means the default stock, `world.USUAL`. If the folder
            holds a cloud already, that cloud keeps its stock.
        machines: True runs machines as processes on this computer, which needs Linux. False makes mere records, which
            cannot be reached and run nothing. All clients of one cloud must pass the same value.
        ends_itself: True if machines end when their lease is over. A lease is how long a machine lives without hearing
            from its client. All clients of one cloud must pass the same value.
        key: the API key. The first client sets the cloud's key, and later clients must use the same key; "" accepts
            every key. None means $SKYPOOL_FAKE_KEY, or "" if that is not set.
        patience: seconds after which `terminate` raises StillRunning for a machine that has not ended.
        billing: the moment from which a machine is billed: "create" (its creation) or "running" (the end of its boot).
            All clients of one cloud must pass the same value.
        tells_billing: True if `Instance.billed_from` tells since when a machine is billed. False: this field is None.

    Raises:
        UsageError: `state` is no path.
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
        state = self.state or os.environ.get("SKYPOOL_FAKE_CLOUD") or user_folders.state() / _USUAL
        if not isinstance(state, (str, os.PathLike)):
            raise UsageError(f"the state of a fake cloud must be the path of a folder, not {state!r}")
        object.__setattr__(self, "state", os.path.abspath(state))
        if self.key is None:
            object.__setattr__(self, "key", os.environ.get("SKYPOOL_FAKE_KEY", ""))

    @property
    def abilities(self) -> Abilities:
        """Return what this cloud can do: it always has a spot market and a private network.

        `ends_itself` and `billed_from` follow from the settings `ends_itself` and `billing`.
        """
        return Abilities(ends_itself=self.ends_itself, private_network=True, spot=True, billed_from=self.billing)

    # --- the methods of a driver -----------------------------------------------------------------------------

    def offers(self, need: Need) -> Iterable[Offer]:
        """Return an offer for each stock of the cloud. `available` tells if it is in stock now. `need` is ignored."""
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
        """Rent one machine for each node of the order, or one slice for each group of nodes.

        The machines are returned in the order of their nodes, without waiting for their boot. A repeated launch with
        the same token and nodes returns the same machines.

        If stock or quota suffices for some nodes only, the machines of the first nodes are returned. But if the order
        needs a private network, the machines that were made are ended again, and the error is raised.

        Raises:
            UsageError: `machines` is True, but this computer does not run Linux.
            CapacityError, QuotaError: stock or quota does not suffice. No machine of the order is left.
            ProviderError: the cloud refused for another reason, or did not answer. Machines that this launch made
                before are not ended; a repeated launch with the same token returns them.
            StillRunning: machines that had to be ended again did not end.
        """
        if self.machines and not machine.run_here():
            raise UsageError(
                "FakeCloud runs its machines as processes on this computer, which must run Linux, but does not: use a "
                "Linux machine or container, or FakeCloud(machines=False), which rents machines but runs nothing on "
                "them"
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
        """Return the live machines whose tags name this user.

        Their `offer` is None, because tags do not tell on which offer a machine was rented.

        Args:
            pool: return only this pool's machines that were rented from this computer. None: the machines of all pools,
                rented from any computer.
        """
        return [self._instance(each) for each in self._api().machines(pool)]

    def access(self, instance: Instance) -> Access:
        """Return how to run commands on a machine, without waiting for the machine's boot.

        A machine that is still booting refuses commands.

        Raises:
            ProviderError: the machine has ended or never existed, was not rented by this user from this computer, or
                `machines` is False.
        """
        found = next((each for each in self._api().machines(instance.pool) if each.id == instance.id), None)
        if found is None or not self.machines:
            why = (
                "no command can run on a machine of FakeCloud(machines=False); use FakeCloud(machines=True)"
                if found
                else f"it has ended or never existed; instances(pool={instance.pool!r}) lists the live machines"
            )
            raise ProviderError(
                f"the machine {instance.id} of {self.name} cannot be reached: {why}", provider=self.name, text=why
            )
        return Access(
            transport=machine.Door(found.folder, machine.devices(found.has)),
            python=sys.executable,
            folder=f"{found.folder}/agent",
            spool=f"{found.folder}/agent",
            cwd=f"{found.folder}/home/.skypool/work",
            home=f"{found.folder}/home/.skypool",
            booting=_ANSWERS + self._boots_for(found),
            owned=True,
            simulated=True,
            notice=f"the fake cloud is in {self.state}" if Path(str(self.state)).name == _USUAL else "",
            guard=machine.guard(found.folder),
            watch=machine.watch(found.folder),
        )

    def _boots_for(self, one: Machine) -> float:
        """Return how many more seconds of the cloud's clock a machine's boot takes; 0 for a boot that never ends."""
        if one.state != "starting" or one.boots_at is None:
            return 0.0
        return max(0.0, one.boots_at - self.clock.now().timestamp())

    def terminate(self, instances: Sequence[Instance]) -> None:
        """End machines, and repeat the request until the cloud no longer lists any of them. Blocks until then.

        All hosts of a slice end together. Machines that no longer exist are ignored.

        Raises:
            StillRunning: machines are still alive after `patience` seconds. The error's `instances` are these machines.
            NoAnswer, RateLimitError: `patience` seconds are over, and the last request got no answer or came too soon.
            ProviderError: the cloud refused for another reason, such as a wrong key. This error is raised at once.
        """
        ids = {each.id for each in instances}
        api = self._api()
        until = time.monotonic() + self.patience
        while ids:
            try:
                api.terminate(sorted(ids))
                ids &= {each.id for each in api.machines(None)}
            except (NoAnswer, RateLimitError):
                if time.monotonic() > until:
                    raise
            if ids and time.monotonic() > until:
                left = [each for each in instances if each.id in ids]
                names = ", ".join(sorted(ids))
                raise StillRunning(
                    f"{self.name} was asked to end machines, but still lists these after {self.patience:g} s: "
                    f"{names}; call terminate() again",
                    left,
                )
            time.sleep(0.05 if ids else 0)

    def renew(self, pool: str, until: datetime) -> None:
        """Record in the tags of a pool's resources until when the pool needs them.

        These are the pool's machines, key pairs and security groups that were made from this computer; there may be
        none.
        """
        self._api().tag(pool, until)

    def leftovers(self, *, pool: str | None = None) -> list[Leftover]:
        """Return the key pairs and security groups of a pool, also if machines still use them.

        Args:
            pool: return only this pool's resources that were made from this computer. None: the resources of all pools
                of this user, made from any computer.
        """
        return [
            Leftover(self.name, each.kind, each.id, each.pool, until=each.until) for each in self._api().things(pool)
        ]

    def tidy(self, leftovers: Sequence[Leftover]) -> None:
        """Remove key pairs and security groups. All removals are tried before an error is raised.

        Args:
            leftovers: the resources, from `leftovers`. Those that no longer exist are ignored.

        Raises:
            ProviderError: a resource could not be removed, for example because a machine still uses it.
            ErrorGroup: several resources could not be removed.
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
                f"{self.name}: {len(errors)} key pairs or security groups could not be removed, for the reasons in "
                "this group; correct these causes and call tidy() again",
                errors,
            )

    def check(self) -> Iterable[Finding]:
        """Check the API key, the account's limits and the price list. Nothing is rented.

        A limit of 0, and an on-demand price that differs from the cloud's price list, give a finding with `good` =
        False. If the cloud refuses the first request, no error is raised: the only finding is then about the key.
        """
        api = self._api()
        try:
            limits = api.account()
        except ProviderError as e:
            return [Finding("credentials", False, e.text, "set $SKYPOOL_FAKE_KEY, or FakeCloud(key=…)")]
        return [
            Finding("credentials", True, "the key is known"),
            *(
                Finding(
                    f"quota {name}",
                    most > 0,
                    f"at most {most}",
                    "" if most else f"raise it: FakeCloud.control.limit({name!r}, …)",
                )
                for name, most in limits.items()
            ),
            self._price_list(api),
        ]

    def _price_list(self, api: Api) -> Finding:
        """Compare the cloud's on-demand prices with its published price list, and return the result as a finding."""
        try:
            drift = api.drift()
        except ProviderError as e:
            return preflight.failure("price list", e)
        if not drift:
            return Finding("price list", True, "all on-demand prices are those of the list")
        told = ", ".join(
            f"{new.instance_type} in {new.where} costs {new.usd_per_hour:g} USD/h, not {old.usd_per_hour:g}"
            for old, new in drift
        )
        return Finding("price list", False, told, "trust the offers, which have the new prices; the list is old")

    def prove_creates(self) -> Iterable[Finding]:
        """Send create requests that the cloud must refuse: for an unknown type and an unknown zone, on both markets.

        There is one finding for each request. It is good if the driver raised OfferGone for the refusal. If a machine
        is made all the same, the machine is ended, and the finding is bad.
        """
        impossibles = (
            ("a type that is not sold", replace(USUAL[0], instance_type="no-such-type")),
            ("a zone that does not exist", replace(USUAL[0], zone="no-such-zone")),
        )
        markets: tuple[Market, Market] = ("on-demand", "spot")
        return [
            self._refused(what, replace(impossible, market=market))
            for what, impossible in impossibles
            for market in markets
        ]

    def _refused(self, what: str, stock: Stock) -> Finding:
        """Send a create request that the cloud must refuse, and return a finding, which is good if it was refused."""
        title = f"{what}, {stock.market}"
        token = f"prove-{secrets.token_hex(4)}"
        order = Order(token, token, (0,), Need(), until=datetime.now(UTC) + timedelta(minutes=10))
        try:
            made = self._api().create(stock, order, order.nodes, token)
            self.terminate([self._instance(each) for each in made])
        except (ProviderError, StillRunning) as e:
            if isinstance(e, OfferGone) and f"no {stock.instance_type} is sold in {stock.where}" in e.text:
                return Finding(title, True, f"refused: {e.text} ({e.code})")
            return preflight.failure(title, e, "report this message to skypool's authors")
        ids = ", ".join(each.id for each in made)
        return Finding(title, False, f"the cloud made {ids}, which has ended again", "ask the cloud why it sells it")

    def billed(self, instances: Sequence[str], since: datetime, until: datetime) -> Bill:
        """Return the cloud's bill for machines. Its `usd` is None until an hour after the last of them has ended.

        Args:
            instances: ids of the machines.
            since, until: ignored; each machine is billed from its start to its end.
        """
        usd = self._api().bill(instances)
        if usd is None:
            return Bill(None, "the bill is complete an hour after the last machine has ended")
        return Bill(usd, "the bill of the fake cloud")

    # --- for the authors of tests ----------------------------------------------------------------------------

    @property
    def control(self) -> FakeCloudControl:
        """Return the object with which a test prepares failures and reads the calls that the cloud received."""
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
        """End all machines of the cloud at once, whoever rented them, also those that ignore requests to end them.

        The cloud's folder, key pairs and security groups are kept. Does nothing if the cloud was never used.

        Raises:
            RuntimeError: processes of a machine survived SIGKILL for 10 seconds.
        """
        with contextlib.suppress(FileNotFoundError), State(Path(str(self.state))).open() as world:
            for each in world.alive():
                world.end(each)

    def __enter__(self) -> FakeCloud:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- helpers ---------------------------------------------------------------------------------------------

    def _state(self) -> State:
        """Return the stored state of this cloud. It is created when it is first opened."""
        return State(str(self.state), self._world)

    def _world(self) -> World:
        """Return a new initial state of this cloud, without machines. Nothing is stored."""
        stock = USUAL if self.stock is None else tuple(self.stock)
        return World(str(self.state), stock, self.key or "", self.machines, self.ends_itself, self.billing)

    def _api(self) -> Api:
        return Api(self._state(), self.name, self.key or "")

    def _instance(self, made: Machine, offer: Offer | None = None) -> Instance:
        """Return the cloud's record of a machine as an `Instance`. `offer` is None if it is not known."""
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
